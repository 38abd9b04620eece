"""The catalogue: figures with sources, and predictions against what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tilegrad.chip.catalogue import (
    CHIPS,
    FIELDS,
    PHASES,
    Assumptions,
    Chip,
    Figure,
    Parallelism,
    Sizes,
    chip,
    load_chip,
    predict,
    roofline,
)
from tilegrad.chip.catalogue.parallelism import bubble, linked_bytes, ways
from tilegrad.chip.catalogue.picture import page, plotted
from tilegrad.chip.networks import resnet_50
from tilegrad.core.errors import UserError

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
MEASURED = json.loads(max(RESULTS.glob("llm-20*.json")).read_text())  # the newest


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_has_a_source(name: str) -> None:
    found = CHIPS[name]
    for field, figure in found.figures.items():
        assert field in FIELDS and figure.source and figure.date[:2] == "20", field
        peak = field in ("bf16", "fp8", "int8", "fp4")
        assert (figure.kind in ("dense", "sparse")) == peak, field


def test_the_measured_figures_are_those_of_a_machine() -> None:
    """One H200 differs from another by some percent."""
    ceilings = MEASURED["ceilings"]
    h200 = chip("h200")
    assert h200.get("bf16_measured") == pytest.approx(ceilings["bf16_flops"], rel=0.06)
    assert h200.get("bandwidth_measured") == pytest.approx(
        ceilings["read_bytes_per_second"], rel=0.03
    )


@pytest.mark.parametrize("row", MEASURED["batches"], ids=lambda row: f"batch {row['batch']}")
def test_decode_on_an_h200_is_within_15_percent(row: dict[str, float]) -> None:
    found = predict("llama-3-8b", chip("h200"), "decode", Sizes(batch=int(row["batch"])))
    assert 1e3 * found.seconds == pytest.approx(row["ms"], rel=0.15)
    assert found.bound == "memory" and found.chips == 1


def test_prefill_on_an_h200_is_within_15_percent() -> None:
    found = predict("llama-3-8b", chip("h200"), "prefill", Sizes(batch=8, tokens=1024))
    measured = MEASURED["prefill"]["tokens_per_second"]
    assert found.tokens_per_second == pytest.approx(measured, rel=0.15)
    assert found.bound == "compute"


def test_a_step_is_the_sum_of_its_products() -> None:
    work = resnet_50(4)
    rows = roofline(work, 1e12, 1e11)
    assert sum(row.count for row in rows) == 54
    for row, one in zip(rows, work.works):
        compute, memory = one.flops / 1e12, one.moved / 1e11
        assert row.seconds == pytest.approx(one.count * max(compute, memory))
        assert row.bound == ("compute" if compute >= memory else "memory")
    halves = roofline(work, 1e12, 1e11, chips=2)
    assert sum(r.seconds for r in halves) == pytest.approx(sum(r.seconds for r in rows) / 2)


def test_models_that_do_not_fit_are_cut_over_chips() -> None:
    v5e = chip("tpu-v5e")
    found = predict("llama-3-8b", v5e, "decode")
    assert found.chips == 2 and found.link_seconds is not None and found.link_seconds > 0
    with pytest.raises(UserError, match="does not fit 1 of tpu-v5e") as raised:
        predict("llama-3-8b", v5e, "decode", chips=1)
    assert "at most 14.4 GB" in str(raised.value) and "2 chips would fit" in str(raised.value)
    more = predict("llama-3-8b", v5e, "decode", chips=4)
    assert found.tokens_per_second < more.tokens_per_second < 2 * found.tokens_per_second
    assert predict("llama-3-8b", chip("mi325x"), "training", chips=4).link_seconds is None


def test_the_best_way_to_share_is_found() -> None:
    h200 = chip("h200")
    sizes = Sizes(batch=8)
    known = {str(c) for c in ways("llama-3-8b", "training", 8, 8)}
    assert {"tensor 8", "pipeline 8", "data 8", "tensor 2 x pipeline 2 x data 2"} <= known
    assert {str(c) for c in ways("llama-3-8b", "decode", 4, 6)} == {"tensor 4", "tensor 2 x data 2"}
    assert all(c.chips == 8 for c in ways("llama-3-8b", "training", 8, 8))
    prefill = predict("llama-3-8b", h200, "prefill", sizes, chips=8)
    assert prefill.parallelism == Parallelism(data=8) and prefill.link_seconds == 0.0
    one = predict("llama-3-8b", h200, "prefill", Sizes(batch=1))
    assert prefill.seconds == pytest.approx(one.seconds)
    decode = predict("llama-3-8b", h200, "decode", sizes, chips=8)
    assert decode.parallelism.tensor > 1  # weights are read by all at once
    step = predict("llama-3-8b", h200, "training", sizes, chips=8)
    alone = predict("llama-3-8b", h200, "training", sizes, chips=2)
    assert alone.tokens_per_second < step.tokens_per_second < 4 * alone.tokens_per_second
    pictures = predict("resnet-50", h200, "training", Sizes(batch=64), chips=8)
    assert pictures.parallelism == Parallelism(data=8) and pictures.link_seconds is not None


def test_bytes_of_links() -> None:
    inside, gradients, sums = (
        linked_bytes("llama-3-8b", "decode", Parallelism(tensor=2), 8, 8e9) or ()
    )
    assert inside == 2 * 32 * 8 * 4096 * 2 and gradients == 0 and sums == 64
    found = linked_bytes("llama-3-8b", "training", Parallelism(data=4), 8, 8e9)
    assert found == (0.0, 2 * 3 / 4 * 16e9, 0.0)
    assert bubble(Parallelism(pipeline=4), 8) == 1 + 3 / 8
    assert linked_bytes("resnet-50", "prefill", Parallelism(tensor=2), 8, 1e6) is None


def test_an_npus_parameters_are_a_chip(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"preset": "16x16", "dram_bandwidth": 8}))
    own = chip(str(path))
    assert own.get("int8") == 2 * 256 * 1e9 and own.get("bandwidth") == 8e9
    found = predict("smollm2-135m", own, "decode", Sizes(batch=1, dtype="int8"))
    assert found.bound == "memory" and not found.bounded and found.chips == 1
    with pytest.raises(UserError, match="mine has no figure for bf16"):
        predict("smollm2-135m", own, "decode", Sizes(batch=1))


def test_a_peak_is_of_weights_as_wide_as_the_element(tmp_path: Path) -> None:
    for name, more, times in (("narrow", {"weights": "int4"}, 1), ("pruned", {"sparse": True}, 2)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"preset": "16x16", **more}))
        figure = chip(str(path)).figures["int8"]
        assert chip(str(path)).get("int8") == times * 2 * 256 * 1e9
        assert figure.kind == ("sparse" if "sparse" in more else "dense")
        assert ("int4" in figure.note) == ("weights" in more)


def test_pictures_and_pages_are_whole() -> None:
    sizes = Sizes(batch=2)
    odd = replace(chip("h200"), name="<b>&", title="</script>")
    found = [
        (one, [predict("smollm2-135m", one, phase, sizes) for phase in PHASES])
        for one in (odd, chip("tpu-v5e"), chip("wse-3"))
    ]
    root = ElementTree.fromstring(plotted("smollm2-135m", sizes, found))
    said = " ".join(root.itertext())
    assert "<b>&" in said and "tokens a second" in said and "sparse values alone" in said
    bars = [e for e in root.iter() if e.get("class") == "bar"]
    assert len(bars) == 9 and all(float(bar.get("width", "0")) > 0 for bar in bars)
    roofs = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(roofs) == 3
    text = page("smollm2-135m", sizes, found)
    assert "&lt;b&gt;&amp;" in text and "</script>" not in text and "<script" not in text
    assert set(re.findall(r"(?:https?:)//[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "rooflinenotes.dev" in text and "jax-ml" not in text.split("Numbers")[0]
    for word in ("optimizer bytes", "sum seconds", "TFLOP/s", "dense"):
        assert word in text


def test_eight_bits_halve_the_weights() -> None:
    h200 = chip("h200")
    wide = predict("llama-3-8b", h200, "decode", Sizes(batch=1))
    narrow = predict("llama-3-8b", h200, "decode", Sizes(batch=1, dtype="fp8"))
    assert narrow.seconds == pytest.approx(wide.seconds / 2, rel=0.05)
    with pytest.raises(UserError, match="a100 has no figure for fp8"):
        predict("llama-3-8b", chip("a100"), "decode", Sizes(dtype="fp8"))
    with pytest.raises(UserError, match="unknown dtype"):
        predict("llama-3-8b", h200, "decode", Sizes(dtype="int3"))


def test_training_costs_three_passes_and_the_optimizer() -> None:
    b200 = chip("b200")
    sizes = Sizes(batch=64)
    once = predict("resnet-50", b200, "prefill", sizes)
    assumed = Assumptions(optimizer_bytes=0.0)
    step = predict("resnet-50", b200, "training", sizes, assumed=assumed)
    assert step.seconds == pytest.approx(3 * once.seconds)
    assert predict("resnet-50", b200, "training", sizes).seconds > step.seconds


def test_cost_and_energy_follow_from_price_and_power() -> None:
    given = {"bf16": 100.0, "bandwidth": 1.0, "memory": 80.0, "price": 2.0, "power": 300.0}
    own = Chip("own", "own", {name: Figure(value, "me", "2026") for name, value in given.items()})
    found = predict("llama-3-8b", own, "decode")
    rate = found.tokens_per_second
    assert found.dollars_per_million == pytest.approx(1e6 * 2.0 / 3600 / rate)
    assert found.joules_per_token == pytest.approx(300.0 / rate)
    assert predict("llama-3-8b", chip("mi325x"), "decode").dollars_per_million is None
    assert predict("resnet-50", chip("wse-3"), "prefill").sparse


def write(folder: Path, **fields: object) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps(fields))
    return path


def test_own_chips(tmp_path: Path) -> None:
    measured = {"value": 0.4, "source": "our board", "date": "2026-11-16"}
    path = write(tmp_path, bf16=50, memory=24, bandwidth=0.5, bandwidth_measured=measured)
    found = load_chip(path)
    assert found.name == "mine" and found.get("memory") == 24e9
    assert found.figures["bandwidth_measured"].source == "our board"
    assert chip(str(path)) == found
    slow = predict("smollm2-135m", found, "decode", Sizes(batch=1))
    assert slow.bound == "memory" and slow.seconds > 2 * 134.5e6 / 0.4e12


BAD = [
    ({"bf16": -1, "memory": 1, "bandwidth": 1}, "bad bf16 of chip mine", "1e-06 would fit"),
    ({"bf16": "fast", "memory": 1, "bandwidth": 1}, "bad bf16", "a number from 1e-06 to 1e+07"),
    ({"bf16": 1, "bandwidth": 1}, "chip mine lacks memory", "from 1e-06 to 1e+06 GB"),
    ({"bf16": 1, "memory": 1, "bandwidth": 1, "watts": 3}, "unknown field 'watts'", "power"),
    ({"bf16": {"source": "x"}}, "bad bf16", "value, and source"),
    ({"bf16": {"value": 1, "kind": "some"}, "memory": 1, "bandwidth": 1}, "bad kind", "dense"),
]


@pytest.mark.parametrize(("fields", "message", "bound"), BAD)
def test_bad_chip_files(
    tmp_path: Path, fields: dict[str, object], message: str, bound: str
) -> None:
    with pytest.raises(UserError) as raised:
        load_chip(write(tmp_path, **fields))
    assert message in str(raised.value) and bound in str(raised.value)


def test_unknown_chips_and_phases() -> None:
    with pytest.raises(UserError, match="unknown chip 'h300'"):
        chip("h300")
    with pytest.raises(UserError, match="unknown phase"):
        predict("llama-3-8b", chip("h200"), "dream")


def test_training_has_logits_of_every_token() -> None:
    h200 = chip("h200")
    forward = predict("llama-3-8b", h200, "prefill", Sizes(batch=2))
    step = predict("llama-3-8b", h200, "training", Sizes(batch=2))
    heads = [next(row.flops for row in p.rows if "M128256" in row.name) for p in (forward, step)]
    assert heads[1] == 1024 * heads[0]
