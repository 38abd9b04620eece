"""The counting routine against a run of the loops, turn by turn."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegrad.chip.explore import (
    EXACT,
    EYERISS,
    TIMELOOP,
    Accelerator,
    Cut,
    Level,
    Mapping,
    Operand,
    Problem,
    convolution,
    count,
    gemm,
    mappings_of,
)
from tilegrad.chip.explore.count import Conventions
from tilegrad.chip.explore.interpret import MappingRun

KINDS = ("reads", "fills", "updates", "drains")
SOME = [c for n in (1, 2) for c in itertools.combinations(("weights", "inputs", "outputs"), n)]


def accelerator(keeps: list[tuple[str, ...]], sharing: list[str]) -> Accelerator:
    """Levels that keep some Operands, below one that keeps all."""
    whole = ("weights", "inputs", "outputs")
    levels = [
        Level(f"level{i}", keeps=k, columns=64, rows=64, sharing=s)
        for i, (k, s) in enumerate(zip([whole, *keeps], sharing))
    ]
    return Accelerator("any", tuple(levels))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Accelerator, Mapping, Conventions]:
    """A small Problem, Levels, and factors of its loops at random places."""
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = {loop: draw(st.sampled_from([1, 1, 2, 3])) for loop in "NMCRS"}
    sizes |= {loop: draw(st.sampled_from([1, 2, 3, 4])) for loop in "PQ"}
    problem = convolution(
        **sizes, stride=stride, dilation=dilation, G=draw(st.sampled_from([1, 2]))
    )
    keeps = draw(st.lists(st.sampled_from([*SOME, ("weights", "inputs", "outputs")]), max_size=2))
    sharing = draw(st.lists(st.sampled_from(["none", "equal", "halo"]), min_size=3, max_size=3))
    parts: list[list[list[tuple[str, int]]]] = [[[], [], []] for _ in range(len(keeps) + 1)]
    for loop, size in problem.sizes.items():
        for factor in [2] * (size // 2) if size != 3 else [3]:
            parts[draw(st.integers(0, len(keeps)))][draw(st.sampled_from([0, 0, 1, 2]))].append(
                (loop, factor)
            )
    for level in parts:
        for kind, part in enumerate(level):
            merged: dict[str, int] = {}
            for loop, factor in part:
                merged[loop] = merged.get(loop, 1) * factor
            level[kind] = draw(st.permutations(list(merged.items())))
    mapping = Mapping(tuple(Cut(*(tuple(p) for p in level)) for level in parts))
    made = draw(st.sampled_from([EXACT, TIMELOOP, EYERISS]))
    return problem, accelerator(keeps, sharing), mapping, made


def compare(
    problem: Problem, machine: Accelerator, mapping: Mapping, conventions: Conventions
) -> None:
    """Every count of the routine is that of the run."""
    counted = MappingRun(problem, machine, mapping, conventions).run()
    found = count(problem, machine, mappings_of(problem, [mapping]), conventions)
    for (level, operand), access in found.table.items():
        name = machine.levels[level].name
        for kind in KINDS:
            value = float(np.broadcast_to(getattr(access, kind), (1,))[0])
            assert value == counted[(name, operand, kind)], (name, operand, kind, str(mapping))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_every_count_is_that_of_the_run(
    case: tuple[Problem, Accelerator, Mapping, Conventions],
) -> None:
    compare(*case)


def test_a_sliding_window_in_every_order() -> None:
    problem = convolution(M=2, C=2, P=4, Q=2, R=3, S=1, stride=2)
    for order in itertools.permutations([("P", 4), ("R", 3), ("M", 2), ("C", 2)]):
        machine = accelerator([("inputs", "outputs")], ["equal"] * 2)
        for where in range(5):
            mapping = Mapping((Cut(order[:where], (("Q", 2),)), Cut(order[where:])))
            compare(problem, machine, mapping, EXACT)


def test_a_wrong_step_is_seen() -> None:
    """The comparison has teeth: another stride gives other counts."""
    problem = convolution(M=1, C=1, P=4, Q=1, R=3)
    other = dataclasses.replace(
        problem,
        operands=(
            problem.operands[0],
            Operand("inputs", (*problem.operands[1].axes[:2], (("P", 2), ("R", 1)), (("Q", 1),))),
            problem.operands[2],
        ),
    )
    machine = accelerator([("inputs",)], ["equal"] * 2)
    mapping = Mapping.of("P4", "R3")
    counted = MappingRun(problem, machine, mapping).run()
    found = count(other, machine, mappings_of(other, [mapping]))
    assert found.at("level1", "inputs").fills[0] != counted[("level1", "inputs", "fills")]


def test_many_mappings_at_once_are_each_alone() -> None:
    problem = convolution(M=8, C=4, P=8, Q=8, R=3, S=3)
    machine = accelerator([("weights", "inputs", "outputs")] * 2, ["equal", "halo", "equal"])
    random = np.random.default_rng(0)
    mappings = []
    for _ in range(40):
        parts: list[dict[str, int]] = [{} for _ in range(4)]
        for loop, size in problem.sizes.items():
            left = size
            while left > 1:
                factor = 3 if left == 3 else 2
                place = parts[random.integers(4)]
                place[loop] = place.get(loop, 1) * factor
                left //= factor
        ordered = [tuple((loop, p[loop]) for loop in problem.loops if loop in p) for p in parts]
        cuts = Cut(ordered[0]), Cut(ordered[1], ordered[3]), Cut(ordered[2])
        mappings.append(Mapping(cuts))
    together = count(problem, machine, mappings_of(problem, mappings, [problem.loops] * 3))
    for number, mapping in enumerate(mappings):
        single = count(problem, machine, mappings_of(problem, [mapping]))
        for key, access in single.table.items():
            for kind in KINDS:
                several = np.broadcast_to(getattr(together.table[key], kind), (40,))
                assert several[number] == np.broadcast_to(getattr(access, kind), (1,))[0]


def test_elements_that_nothing_touches_are_not_counted() -> None:
    strided = convolution(M=4, C=4, P=8, Q=8, stride=2)  # 1 x 1: every second pixel
    assert strided.words(strided.operand("inputs")) == 4 * 8 * 8
    product = gemm(M=5, N=7, K=3)
    assert [product.words(o) for o in product.operands] == [21, 15, 35]
    assert product.macs == math.prod((5, 7, 3))


@pytest.mark.parametrize("sharing", ["none", "equal", "halo"])
def test_neighbours_share_rows(sharing: str) -> None:
    """Four multipliers of a 3-tall window: 12 rows, or the 6 that differ."""
    problem = convolution(M=1, C=1, P=4, Q=5, R=3)
    machine = accelerator([("inputs",)], [sharing, "equal"])
    found = count(problem, machine, mappings_of(problem, [Mapping.of("Q5 | P4", "R3")]))
    access = found.at("level0", "inputs")
    assert access.moved[0] == 5 * 4 * 3
    assert access.reads[0] == {"none": 60, "equal": 60, "halo": 30}[sharing]
