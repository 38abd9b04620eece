"""Spreads: every element is held, by the thread and register that the digits say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilegrad.core.errors import InternalError
from tilegrad.targets.ptx.plan_spread import warp_grid
from tilegrad.targets.ptx.spread import (
    Spread,
    accumulator,
    accumulator_80,
    blocked,
    grid,
    lines,
)


def holders(spread: Spread, threads: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """(thread, register) pairs of each element."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for thread in range(threads):
        own = [0] * len(spread.shape)
        for shift, width, axis, stride in spread.fields:
            own[axis] += (thread >> shift & (1 << width) - 1) * stride
        for register, at in enumerate(spread.registers):
            found.setdefault(tuple(a + b for a, b in zip(own, at)), []).append((thread, register))
    return found


def check(spread: Spread, threads: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Every element is held, all by equally many threads, each once."""
    found = holders(spread, threads)
    assert set(found) == set(itertools.product(*map(range, spread.shape)))
    copies = 1 << spread.copies(threads).bit_count()
    assert all(len(who) == copies for who in found.values())
    assert all(len({t for t, _ in who}) == copies for who in found.values())
    return found


SHAPES = [(1,), (8,), (4096,), (16, 64), (64, 16), (2, 4, 32), (12, 40), (7,), (3, 128), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [32, 128])
def test_blocked_and_lines_hold_everything(shape: tuple[int, ...], threads: int) -> None:
    for vector, inner, along in itertools.product((1, 4, 16), range(-1, len(shape)), (-1, 0)):
        check(blocked(shape, threads, vector, inner, along), threads)
    for axis in range(len(shape)):
        check(lines(shape, threads, axis), threads)


def test_blocked_runs_are_neighbours() -> None:
    held = check(blocked((8, 256), 64, 8), 64)
    assert [held[0, i][0][0] for i in range(24)] == [0] * 8 + [1] * 8 + [2] * 8
    turned = blocked((256, 8), 64, 8, inner=0)
    held = check(turned, 64)
    assert [held[i, 0][0] for i in range(9)] == [(0, i) for i in range(8)] + [(1, 0)]


def test_reduced_rows_stay_within_a_warp() -> None:
    held = check(blocked((8, 512), 128, 4, warps_along=0), 128)
    for row in range(8):
        assert len({held[row, c][0][0] // 32 for c in range(512)}) == 1


def test_lines_are_scanned_in_order() -> None:
    held = check(lines((4, 256), 64, 1), 64)
    for row in range(4):
        order = [held[row, c][0] for c in range(256)]
        assert order == sorted(order)


@pytest.mark.parametrize("shape", [(64, 64), (16, 32), (8, 4), (1, 1), (128, 16)], ids=str)
def test_rectangles_for_products(shape: tuple[int, int]) -> None:
    for threads in (32, 128):
        spread = grid(shape, threads)
        check(spread, threads)
        rows, columns = ({at[axis] for at in spread.registers} for axis in (0, 1))
        assert len(rows) * len(columns) == len(spread.registers)
    with pytest.raises(InternalError, match="powers of two"):
        grid((48, 64), 32)


def test_accumulators() -> None:
    held = check(accumulator((128, 16), 8), 256)
    assert held[0, 0] == [(0, 0)] and held[8, 1] == [(0, 3)] and held[17, 2] == [(32 + 5, 0)]
    assert held[64, 0] == [(128, 0)]
    held = check(accumulator_80((64, 32), 2, 2), 128)
    assert held[0, 1] == [(0, 1)] and held[9, 3] == [(5, 3)] and held[0, 16][0][0] == 32
    with pytest.raises(InternalError):
        accumulator((96, 16), 8)


def test_warps_stand_near_to_square() -> None:
    assert warp_grid(64, 64, 4) == (2, 2)
    assert warp_grid(16, 256, 4) == (1, 4)
    down, across = warp_grid(16, 8, 4)  # too small: one warp's worth, held four times
    assert (down, across) == (1, 1)


def test_shapes_seen_otherwise() -> None:
    spread = blocked((8, 64), 128, 4)
    for other in (
        spread.reshape((512,)),
        spread.permute((1, 0)),
        spread.drop(0),
        spread.drop(1),
        spread.before_repeat((1, 64)),
        spread.stack(3),
        spread.reshape((4, 2, 64)),
        spread.before_repeat((8, 1)),
        spread.before_repeat((64,)),
    ):
        check(other, 128)
    held, flat = check(spread, 128), check(spread.reshape((512,)), 128)
    assert all(held[r, c] == flat[r * 64 + c,] for r in range(8) for c in range(64))
    turned = check(spread.permute((1, 0)), 128)
    assert all(held[r, c] == turned[c, r] for r in range(8) for c in range(64))


def test_parts_are_cut_where_registers_end() -> None:
    spread = blocked((8, 64), 32, 4)
    part = spread.part((4, 0), (4, 64))
    check(part, 32)
    assert np.prod(part.shape) == 4 * 64
    with pytest.raises(InternalError, match="is not cut"):
        spread.part((0, 3), (8, 5))
