"""tile/budget.py: turns of shared-memory accesses, against counting by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from placed_builder import PlacedBuilder

from tilegrad.core.dtype import DType, bfloat16, float32
from tilegrad.core.target import AVX512
from tilegrad.ir.types import Memory
from tilegrad.tile.budget import address, check_banks, check_budget, turns
from tilegrad.tile.build import Body


@pytest.mark.parametrize(
    "stride,width,expected",
    [
        (4, 4, 1),
        (8, 4, 2),
        (128, 4, 32),
        (132, 4, 1),
        (0, 4, 1),
        (2, 2, 1),
        (64, 4, 16),
        (8, 8, 1),
        (16, 8, 2),
        (128, 8, 16),
        (16, 16, 1),
        (32, 16, 2),
        (128, 16, 8),
        (144, 16, 1),
    ],
)
def test_turns_of_strides(stride: int, width: int, expected: int) -> None:
    """Lanes at equal distances: parts of 128 bytes, words that are shared count once."""
    assert turns(np.arange(32) * stride, width) == expected


def test_swizzled_rows_of_16_bytes() -> None:
    """Eight rows of one column of chunks: the swizzle spreads them over all banks."""
    rows = np.array([(r, 0) for r in range(8)])
    for layout, span, expected in (
        ("", 128, 8),
        ("swizzle128", 128, 1),
        ("swizzle64", 64, 1),
        ("swizzle32", 32, 1),
    ):
        place = Memory((64, span // 2), bfloat16, "shared", layout=layout)
        found = address(place, (0, 1), rows)
        assert turns(found, 16) == expected, layout
        assert sorted(found // 128) == [r * span // 128 for r in range(8)]


def test_addresses_are_a_permutation() -> None:
    """Every element of a swizzled place of several column blocks has a byte of its own."""
    place = Memory((2, 16, 128), bfloat16, "shared", layout="swizzle128")
    where = np.stack(np.meshgrid(np.arange(16), np.arange(128), indexing="ij"), -1).reshape(-1, 2)
    found = address(place, (1, 2), where)
    assert sorted(found) == list(range(0, 16 * 128 * 2, 2))


def staged(layout: str, columns: int, dtype: DType = bfloat16) -> Body:
    """An accumulator on its way out through a shared place."""
    b = PlacedBuilder("staged", [("out", Memory((64, columns), dtype))])
    place = b.allocate((64, columns), dtype, "shared", layout)
    left = b.allocate((64, 64), bfloat16, "shared", "swizzle128")
    right = b.allocate((64, columns), bfloat16, "shared", "swizzle128")

    def role() -> None:
        total = b.register_tile((64, columns), float32)
        b.matrix_async(total, left, right, False)
        b.write(place, b.cast(b.apply("exp", b.read(total)), dtype))

    b.role("only", 4, 0, role)
    return b.finish((1,))


@pytest.mark.parametrize(
    "layout,columns,dtype,expected",
    [
        ("swizzle128", 64, bfloat16, 1),
        ("", 64, bfloat16, 8),
        ("", 72, bfloat16, 1),
        ("swizzle128", 64, float32, 2),
        ("", 64, float32, 4),
    ],
)
def test_accumulators_on_their_way_out(
    layout: str, columns: int, dtype: DType, expected: int
) -> None:
    """The matrix unit's layout: 8 rows a warp, so plain rows of 128 bytes fall on one bank."""
    found = list(check_banks(staged(layout, columns, dtype)))
    if expected == 1:
        assert not found
    else:
        (finding,) = found
        assert finding.severity == "warning" and f"takes {expected} turns" in finding.message
        assert "(write_place)" in finding.line and "(allocate)" in finding.other
    assert not check_budget(staged("", 64), AVX512)


@pytest.mark.parametrize("axes,conflicts", [((0, 1), False), ((1, 0), True)])
def test_rows_and_columns(axes: tuple[int, int], conflicts: bool) -> None:
    """Rows are read in vectors; columns of a plain place make every lane want one bank."""
    b = PlacedBuilder("columns", [("out", Memory((32, 32), float32))])
    place = b.allocate((32, 32), float32, "shared")

    def role() -> None:
        b.write(place, b.constant(0, float32, (32, 32)))
        b.store(b.parameters[0], b.load(place, (0, 0), (32, 32), axes), (0, 0), (0, 1))

    b.role("only", 4, 0, role)
    found = check_banks(b.finish((1,)))
    assert [("32 turns" in f.message) for f in found] == [True] * conflicts
