"""Cycles of systolic arrays, as SCALE-Sim 3.0 prints them for runs without stalls."""

from __future__ import annotations

import pytest

from tilegrad.chip.explore import convolution
from tilegrad.chip.explore.systolic import cycles, problem_cycles
from tilegrad.core.errors import UserError

# (M, N, K), side of the array: total cycles of os, ws, is
PUBLISHED = {
    ((256, 128, 256), 8): (138239, 142335, 153599),
    ((256, 128, 256), 16): (36607, 38655, 44543),
    ((256, 128, 256), 32): (10175, 11199, 14207),
    ((64, 64, 64), 8): (4991, 5503, 5503),
    ((64, 64, 64), 16): (1503, 1759, 1759),
    ((64, 64, 64), 32): (503, 631, 631),
    ((100, 50, 200), 8): (19473, 21349, 23399),
    ((100, 50, 200), 16): (6439, 7591, 8735),
    ((100, 50, 200), 32): (2095, 2715, 4031),
    ((16, 16, 16), 8): (119, 151, 151),
    ((16, 16, 16), 16): (45, 61, 61),
    ((16, 16, 16), 32): (77, 109, 109),
    ((3136, 64, 64), 32): (24695, 12919, 30967),
    ((3136, 64, 64), 128): (7949, 3517, 11149),
    ((144, 256, 2304), 32): (94639, 137087, 125999),
    ((144, 256, 2304), 128): (10231, 18935, 22967),
    ((49, 512, 2048), 32): (67519, 146431, 77567),
    ((49, 512, 2048), 128): (9207, 27583, 14303),
    ((1, 1000, 2048), 32): (67519, 194559, 70015),
    ((1, 1000, 2048), 128): (18415, 49023, 22111),
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_cycles_are_scale_sims(case: tuple[tuple[int, int, int], int]) -> None:
    (m, n, k), side = case
    found = tuple(cycles(flow, side, side, m, n, k) for flow in ("os", "ws", "is"))
    assert found == PUBLISHED[case]


@pytest.mark.parametrize(
    ("side", "expected"), [(32, (113567, 185759, 137663)), (128, (7673, 27161, 13787))]
)
def test_a_convolution_is_the_product_of_its_windows(
    side: int, expected: tuple[int, int, int]
) -> None:
    """SCALE-Sim's layer has 13 x 13 inputs and adds no border: 11 x 11 results."""
    problem = convolution(M=384, C=256, P=11, Q=11, R=3, S=3)
    found = tuple(problem_cycles(problem, flow, side, side) for flow in ("os", "ws", "is"))
    assert found == expected


def test_bad_arrays_are_named() -> None:
    with pytest.raises(UserError, match="bad rows"):
        cycles("os", 0, 8, 1, 1, 1)
    with pytest.raises(UserError, match="unknown dataflow"):
        cycles("rs", 8, 8, 1, 1, 1)
