"""bench/recipes.py on a tiny model: the source moves, rows are judged, what was found is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import recipes as bench


def quiet(*_: Any) -> None:
    """Nobody is told."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> bench.Source:
    return bench.tiny(tmp_path_factory.mktemp("recipes"), most=8)


def test_the_source_moves_off_its_grid(source: bench.Source) -> None:
    tuned = source.tune(quiet)
    assert tuned["noises"] == 3 and len(tuned["losses"]) == 8 + source.sizes.settle
    assert abs(tuned["moved"] / source.sizes.noise - 3**0.5) < 0.1
    before = source.new()
    source.start(before)
    movement = bench.Movement(before)
    assert movement.now() == 0
    head = source.model().embed.weight.numpy()
    np.testing.assert_array_equal(head, before.embed.weight.numpy())  # it is not trained
    before.load_state_dict(source.model().state_dict(), strict=False)
    assert abs(movement.now() - tuned["moved"]) < 1e-4
    assert source.tune(quiet) == tuned  # from the folder


def test_noise_is_in_units_of_steps(source: bench.Source) -> None:
    model = source.new()
    source.start(model)
    movement = bench.Movement(model)
    first = movement.weights[0].numpy()
    for count in (1, 2):  # it adds up as independent noise does
        movement.add_noise(0.3)
        assert abs(movement.now() - 0.3 * count**0.5) < 0.01
    away = (movement.weights[0].numpy() - first).reshape(len(first), -1, bench.BLOCK)
    each = np.sqrt(((away / movement.steps[0].numpy()) ** 2).mean())
    assert abs(each - 0.3 * 2**0.5) < 0.05


def test_rows_are_judged_and_kept(source: bench.Source, monkeypatch: Any) -> None:
    source.tune(quiet)
    assert set(bench.measured(source, "int4", quiet)) == {"none", "int4"}  # by its name
    rows = bench.verdicts({**bench.measured(source, "-int4", quiet)})
    assert {"none", "int4", "gptq-int4", "awq-int4"} <= set(rows) and "fp8" not in rows
    assert all(0 < row["divergence"] < 0.1 for name, row in rows.items() if name != "none")
    assert rows["gptq-int4"]["divergence_share"] < 0.8
    lost = [
        rows[n]["log_perplexity"] - rows["none"]["log_perplexity"] for n in ("gptq-int4", "int4")
    ]
    assert abs(rows["gptq-int4"]["share"] - lost[0] / lost[1]) < 1e-9
    monkeypatch.setattr(bench, "rows_of", lambda *_: {"int4": lambda: 1 / 0})
    assert set(bench.measured(source, "int4", quiet)) == set(rows)  # nothing is made again


def test_bars_by_hand() -> None:
    """Rows on both sides of every bar: gptq loses 2 of 5, awq 4 of 5, where 1/2 and 3/4 may be."""
    lost = {"none": 0.0, "int4": 0.5, "gptq-int4": 0.2, "awq-int4": 0.4, "fp8": 0.1}
    lost |= {bench.LONGER: 0.3, bench.TRAINED: 0.2}
    given = {n: {"log_perplexity": 4 + x, "divergence": x / 10} for n, x in lost.items()}
    rows = bench.verdicts(given)
    assert {n: row["met"] for n, row in rows.items() if "met" in row} == {
        "gptq-int4": True,
        "awq-int4": False,
        "fp8": False,  # exp(0.1) is 1.105
        bench.TRAINED: True,
    }
    assert rows["gptq-int4"]["share"] == pytest.approx(0.4)
    assert rows["awq-int4"]["divergence_share"] == pytest.approx(0.8)
    given["fp8"]["log_perplexity"], given[bench.TRAINED]["log_perplexity"] = 4.001, 4.31
    given["gptq-int4"]["log_perplexity"] = 4.26
    again = bench.verdicts(given)
    assert again["fp8"]["met"] is True
    assert again["gptq-int4"]["met"] is again[bench.TRAINED]["met"] is False


def test_parts_of_the_text_are_apart(source: bench.Source) -> None:
    assert len(source.seen) == source.sizes.samples and len(source.judged) == source.sizes.judged
    numbered = bench.Source(source.config, None, np.arange(4000), source.sizes, source.work)
    parts = [set(numbered.text), set(np.concatenate(numbered.seen).ravel())]
    parts.append(set(np.concatenate(numbered.judged).ravel()))
    assert all(not a & b for a in parts for b in parts if a is not b)


def test_another_model_or_other_sizes_have_a_folder_of_their_own(tmp_path: Path) -> None:
    plain, longer = bench.Sizes(), bench.Sizes(window=2048)
    given = [("smollm2", plain), ("smollm2", longer), ("qwen3-0.6b", plain)]
    folders = [bench.kept_in(tmp_path, *one) for one in given]
    assert len(set(folders)) == 3 and all(f.parent == tmp_path for f in folders)
    assert bench.kept_in(tmp_path, "smollm2", bench.Sizes()) == folders[0]  # a run goes on


@pytest.mark.slow
def test_training_in_three_bits(source: bench.Source) -> None:
    source.tune(quiet)
    rows = bench.verdicts(bench.measured(source, "trained on", quiet))
    for name in (bench.LONGER, bench.TRAINED):  # with 3 bits better than it was before with 32
        assert rows[name]["lost"] < -0.05
    assert rows[bench.TRAINED]["bits"] == rows[bench.LONGER]["bits"] == 3.75
