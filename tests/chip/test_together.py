"""Whole networks whose layers run together: chains of a Graph, and which runs cost less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.chip.explore import Accelerator, Level
from tilegrad.chip.explore.fuse import Fused
from tilegrad.chip.networks import bert_base, mobilenet_v1, resnet_50
from tilegrad.chip.together import _chain, map_together
from tilegrad.chip.workload import Workload, workload

ARRAY = Accelerator(
    "array",
    (
        Level("DRAM", read=200.0, write=200.0, word_bits=8, read_bandwidth=4, write_bandwidth=4),
        Level("buffer", bytes=16000, read=6.0, write=6.0, word_bits=8, rows=4, columns=4),
    ),
)
QUICK: dict[str, Any] = {"rounds": 1, "samples": 64, "objective": "energy"}


@pytest.mark.parametrize("make", [resnet_50, mobilenet_v1, bert_base])
def test_every_product_is_in_one_chain(make: Callable[[], Workload]) -> None:
    work = make()
    found: Counter[int] = Counter()
    for chain in work.chains:
        for number in chain.works:
            found[number] += chain.count
    assert found == {number: one.count for number, one in enumerate(work.works)}
    assert max(len(chain.works) for chain in work.chains) > 1


def test_a_residual_ends_a_chain() -> None:
    work = resnet_50()
    lengths = Counter[int]()
    for chain in work.chains:
        lengths[len(chain.works)] += chain.count
    assert lengths == {3: 16, 1: 6}  # blocks; stem, four shortcuts, the last layer


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Workload:
    return workload(function, *(tg.zeros(shape) for shape in shapes)).with_bits(8)


def test_products_that_two_read_are_not_kept() -> None:
    def both(x: Any, a: Any, b: Any, c: Any) -> Any:
        y = tg.relu(x @ a)
        return (y @ b) + (y @ c)

    found = traced(both, (32, 16), (16, 24), (24, 8), (24, 8))
    assert sorted(len(chain.works) for chain in found.chains) == [1, 1]
    line = traced(lambda x, a, b: tg.relu(x @ a) @ b, (32, 16), (16, 24), (24, 8))
    assert [chain.works for chain in line.chains] == [(0, 1)]


def test_places_in_one_row_lie_as_their_neighbours() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1, bias=False),
        nn.Conv2d(8, 4, 1, bias=False),
    )  # fmt: skip
    work = traced(lambda x: model(x), (2, 4, 8, 8))
    (chain,) = work.chains
    first, middle, last = _chain(work, chain.works)
    for problem, plain in ((first, work.problems[0]), (last, work.problems[2])):
        assert [problem.sizes[loop] for loop in "NPQ"] == [2, 8, 8]
        assert problem.macs == plain.macs
        for operand in plain.operands:
            assert problem.words(problem.operand(operand.name)) == plain.words(operand)
    assert middle == work.problems[1]


def test_layers_run_together_where_it_costs_less() -> None:
    def mlp(x: Any, a: Any, b: Any, c: Any) -> Any:
        return tg.relu(tg.relu(x @ a) @ b) @ c

    work = traced(mlp, (16, 8), (8, 16), (16, 8), (8, 4))
    told: list[tuple[int, int, str]] = []
    found = map_together(work, ARRAY, "buffer", "ws", lambda *one: told.append(one), **QUICK)
    assert found.energy < found.alone and found.seconds > 0
    assert [n for run, _, _ in found.runs for n in run] == [0, 1, 2]
    assert any(isinstance(made, Fused) for _, _, made in found.runs)
    assert told[0][:2] == (0, 6) and told[-1] == (6, 6, "")  # three alone, two pairs, all three
    small = Accelerator("small", (ARRAY.levels[0], Level("buffer", bytes=12, word_bits=8)))
    alone = map_together(work, small, "buffer", "ws", **QUICK)
    assert alone.energy == pytest.approx(alone.alone)  # no rows fit beside the tiles
    assert all(len(run) == 1 for run, _, _ in alone.runs)
