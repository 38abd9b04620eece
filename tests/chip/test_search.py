"""The search: exhaustive is the best of all, seeded is the same each time; errors say what fits."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tilegrad.chip.explore import (
    Accelerator,
    Level,
    Mapping,
    convolution,
    cost,
    cost_of,
    gemm,
    load,
    mappings_of,
)
from tilegrad.chip.explore.dataflow import DATAFLOWS, dataflow
from tilegrad.chip.explore.presets import eyeriss_energy
from tilegrad.chip.explore.search import search
from tilegrad.chip.explore.space import Space
from tilegrad.core.errors import UserError


def small(buffer: float = 200.0) -> Accelerator:
    return Accelerator(
        "small",
        (
            Level("DRAM", read=100.0, write=100.0, read_bandwidth=4.0, write_bandwidth=4.0),
            Level("buffer", bytes=buffer, read=5.0, write=5.0, columns=4, rows=2),
            Level("registers", bytes=16.0, read=1.0, write=1.0),
        ),
    )


@pytest.mark.parametrize("objective", ["energy", "cycles", "product"])
def test_exhaustive_is_the_best_of_all(objective: str) -> None:
    problem = gemm(M=8, N=4, K=4)
    found = search(problem, small(), objective=objective, pad=1.0, most=10**6)
    assert found.exhaustive and found.seen > 1000
    space = Space(problem, small(), dataflow("any"), pad=1.0)
    best = np.inf
    counts = [range(len(c)) for c in space.chains.values()]
    picks = np.array(list(itertools.product(*counts)))
    for order in space.orders(27, np.random.default_rng(0)):
        many = space.mappings(picks, order)
        made = cost(problem, small(), many)
        score = {"energy": made.energy, "cycles": made.cycles}.get(objective)
        score = made.energy * made.cycles if score is None else score
        best = min(best, float(score[space.fits(many)].min()))
    score = {"energy": found.energy, "cycles": found.cycles}.get(
        objective, found.energy * found.cycles
    )
    assert score == pytest.approx(best)


def test_seeded_comes_close_and_repeats() -> None:
    problem = gemm(M=8, N=8, K=4)
    whole = search(problem, small(), pad=1.0, most=10**7)
    seeded = search(problem, small(), pad=1.0, most=0, seed=3, rounds=8, samples=1024)
    assert whole.exhaustive and not seeded.exhaustive
    assert seeded.energy <= 1.02 * whole.energy
    again = search(problem, small(), pad=1.0, most=0, seed=3, rounds=8, samples=1024)
    assert again.mapping == seeded.mapping and again.seen == seeded.seen


@pytest.mark.parametrize("name", DATAFLOWS)
def test_dataflows_only_narrow(name: str) -> None:
    problem = convolution(M=8, C=4, P=6, Q=6, R=3, S=3)
    flow = DATAFLOWS[name]
    found = search(problem, eyeriss_energy(4, 4), flow, rounds=1, samples=256)
    array = [i for i, level in enumerate(found.accelerator.levels) if level.fanout > 1][-1]
    for number, cut in enumerate(found.mapping.cuts):
        assert {loop for loop, _ in cut.columns} <= set(flow.columns)
        assert {loop for loop, _ in cut.rows} <= set(flow.rows)
        if number > array:
            assert {loop for loop, _ in cut.temporal} <= set(flow.inside)
        elif flow.whole:
            assert not {loop for loop, _ in cut.temporal} & set(flow.whole)
    for level in found.accelerator.levels[array + 1 :]:
        assert set(level.keeps) <= set(flow.keeps)
    again = cost(problem, found.accelerator, mappings_of(problem, [found.mapping]))
    assert again.energy[0] == found.energy


def test_without_registers_their_bytes_join_the_buffer() -> None:
    machine = eyeriss_energy()
    bare = DATAFLOWS["nlr"].restrict(machine)
    assert [level.name for level in bare.levels] == ["DRAM", "buffer"]
    assert bare.levels[1].bytes == machine.levels[1].bytes + 256 * 512


def test_padding_fills_the_array() -> None:
    problem = gemm(M=1, N=13, K=7)
    exact = search(problem, small(), objective="cycles", pad=1.0)
    padded = search(problem, small(), objective="cycles")
    assert padded.cycles < exact.cycles
    assert padded.mapping.factors("M") * padded.mapping.factors("C") >= 13 * 7


# ---- errors ---------------------------------------------------------------------------------


def test_an_impossible_mapping_names_what_would_fit() -> None:
    problem = gemm(M=8, N=8, K=8)
    with pytest.raises(UserError, match=r"tiles do not fit in buffer") as raised:
        cost_of(problem, small(), Mapping.of("", "P8 M8 C8", ""))
    assert "at most 200 bytes" in str(raised.value) and "384" in str(raised.value)
    with pytest.raises(UserError, match=r"columns below buffer are too few") as raised:
        cost_of(problem, small(), Mapping.of("P8 C8", " | M8", ""))
    assert "at most 4" in str(raised.value) and "columns = 8" in str(raised.value)
    with pytest.raises(UserError, match=r"factors of loop C do not cover it") as raised:
        cost_of(problem, small(), Mapping.of("P8 M8 C4", "", ""))
    assert "at least 8" in str(raised.value) and "2 times as many" in str(raised.value)
    with pytest.raises(UserError, match="one cut for each Level"):
        cost_of(problem, small(), Mapping.of("P8 M8 C8"))
    with pytest.raises(UserError, match="bad factor"):
        Mapping.of("P8 Mx")


def test_a_problem_that_cannot_fit_says_what_it_needs() -> None:
    problem = convolution(M=1, C=1, P=1, Q=1, R=1, S=40)
    with pytest.raises(UserError, match="no Mapping of convolution fits small") as raised:
        search(problem, small(), "rs")
    assert "registers 16" in str(raised.value) and "the smallest tiles need" in str(raised.value)


BAD = [
    ("rows = 0", "rows", "from 1 to", "rows = 1 would fit"),
    ("rows = 2.5", "rows", "a whole number", ""),
    ("read = -1.0", "read", "from 0 to", "read = 0 would fit"),
    ("bytes = 0", "bytes", "from 1e-09", ""),
    ('sharing = "some"', "sharing", "none, equal, halo", ""),
    ('keeps = ["psums"]', "keeps", "weights, inputs, outputs", ""),
    ("colums = 3", "colums", "columns", ""),
]


@pytest.mark.parametrize(("line", "field", "bound", "fit"), BAD)
def test_bad_parameter_files(tmp_path: Path, line: str, field: str, bound: str, fit: str) -> None:
    pytest.importorskip("tomllib")
    path = tmp_path / "edge.toml"
    path.write_text(f'[[level]]\nname = "DRAM"\n[[level]]\nname = "buffer"\n{line}\n')
    with pytest.raises(UserError) as raised:
        load(path)
    message = str(raised.value)
    assert field in message and bound in message and fit in message


def test_parameter_files(tmp_path: Path) -> None:
    path = tmp_path / "edge.json"
    levels = [{"name": "DRAM"}, {"name": "buffer", "bytes": 64000, "rows": 8, "columns": 8}]
    path.write_text(json.dumps({"mac": 0.3, "clock": 5e8, "level": levels}))
    machine = load(path)
    assert (machine.name, machine.mac, machine.multipliers) == ("edge", 0.3, 64)
    path.write_text("{")
    with pytest.raises(UserError, match="is not json"):
        load(path)
    with pytest.raises(UserError, match="cannot read"):
        load(tmp_path / "none.toml")
    path.write_text(json.dumps({"level": [{"name": "buffer", "bytes": 10}]}))
    with pytest.raises(UserError, match="the outermost Level keeps all Operands, without bound"):
        load(path)
    path.write_text(json.dumps({"level": []}))
    with pytest.raises(UserError, match="bad levels"):
        load(path)


def test_cycles_follow_the_narrowest() -> None:
    problem = gemm(M=64, N=64, K=64)
    slow = Accelerator("slow", (Level("DRAM", read_bandwidth=0.5, write_bandwidth=0.5),))
    made = cost_of(problem, slow, Mapping.of("P64 M64 C64"))
    assert made.bound_by() == "DRAM" and made.cycles[0] >= 2 * 64**3 / 0.5
    fast = Accelerator("fast", (Level("DRAM"),), macs_a_cycle=2.0)
    assert cost_of(problem, fast, Mapping.of("P64 M64 C64")).cycles[0] == 64**3 / 2


def test_area_counts_every_instance() -> None:
    levels = (Level("DRAM"), Level("buffer", area=1.0, rows=2, columns=4), Level("r", area=0.1))
    assert Accelerator("a", levels, mac_area=0.01).area() == pytest.approx(1.0 + 0.8 + 0.08)
