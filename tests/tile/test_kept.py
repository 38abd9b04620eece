"""core/kept.py and matrix_async of operands of which two of every four are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))

from simulated import assembled, check_body

from tilegrad import tile
from tilegrad.core.dtype import bfloat16, float8_e4m3, float32, int32
from tilegrad.core.errors import InternalError
from tilegrad.core.kept import positions_of, spread_out, words_of
from tilegrad.ir.types import Memory
from tilegrad.tile import prove
from tilegrad.tile.build import Body, BodyBuilder

PAIRS = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint8)
KINDS = {"bf16": (bfloat16, ml_dtypes.bfloat16), "e4m3": (float8_e4m3, ml_dtypes.float8_e4m3fn)}


def draw(rows: int, columns: int, dtype: object, seed: int = 1) -> tuple[np.ndarray, ...]:
    """(a matrix, what is kept of it, places)."""
    rng = np.random.default_rng(seed)
    places = PAIRS[rng.integers(0, 6, (rows, columns // 4))]
    kept = (rng.integers(-8, 9, (rows, columns // 2)) / 4).astype(dtype)  # type: ignore[call-overload]
    whole = np.zeros((rows, columns // 4, 4), dtype)  # type: ignore[call-overload]
    np.put_along_axis(whole, places.astype(int), kept.reshape(rows, -1, 2), 2)
    return whole.reshape(rows, columns), kept, places.reshape(rows, -1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("depth", [64, 128])
def test_words_are_places(size: int, depth: int) -> None:
    _, _, places = draw(128, 256, np.float32)
    words = words_of(places, size, depth)
    assert words.shape == (8, 128) and words.dtype == np.int32
    np.testing.assert_array_equal(positions_of(words, size, depth), places)


def test_words_of_bytes() -> None:
    """Lane 5 of warp 1 has row 16 + 1 + 8, the first 32 columns of a step: low digits first."""
    _, _, places = draw(64, 256, np.float32)
    words = words_of(places, 1, 128).view(np.uint32).reshape(4, 2, 32, 2)
    for step, word in ((0, 0), (1, 1)):
        start = step * 64 + word * 32
        digits = [int(p) << 2 * i for i, p in enumerate(places[25, start : start + 16])]
        assert words[1, step, 5, word] == sum(digits)


def test_words_of_halves() -> None:
    """Lane 6 has rows 1 and 9, the third 16 of 64 columns."""
    _, _, places = draw(64, 64, np.float32)
    word = int(words_of(places, 2, 64).view(np.uint32)[0, 6])
    found = [word >> 2 * i & 3 for i in range(16)]
    assert found == [*places[1, 16:24], *places[9, 16:24]]


@tile.function
def multiply(memories: list, columns: int, depth: int, steps: int, pending: int) -> None:
    """A producer and a consumer over a ring of two stages."""
    (a, words, other, c), half = memories, depth // 2
    dtype = a.dtype
    tile.grid(1)
    left = tile.shared((2, 64, half), dtype, f"swizzle{half * dtype.size}")
    right = tile.shared((2, columns, depth), dtype, "swizzle128")
    kept = tile.shared((2, 4, half), int32)
    ring = tile.pipeline("ring", 2, consumers=1)
    with tile.role("producer", warps=4):
        tile.grid_dependency_wait()
        for s in tile.range(steps):
            at = ring.acquire(s)
            ring.full.expect(at, (64 * half + columns * depth) * dtype.size + 4 * half * 4)
            some, along = s * half, s * depth
            tile.copy_async(left[at], a[0:64, some : some + half], ring.full[at])
            tile.copy_async(kept[at], words[0:4, some : some + half], ring.full[at])
            tile.copy_async(right[at], other[0:columns, along : along + depth], ring.full[at])
    with tile.role("consumer", warps=4):
        tile.grid_dependency_wait()
        total = tile.register((64, columns), float32)
        for s in tile.range(steps):
            at = ring.wait(s)
            tile.matrix_fence()
            tile.matrix_async(total, left[at], right[at].T, s > 0, kept[at])
            tile.matrix_commit()
            tile.matrix_wait(pending)
            if pending == 0:
                ring.release(s)
            elif s > 0:
                ring.release(s - 1)
        if pending:
            tile.matrix_wait(0)
            ring.release(steps - 1)
        tile.store(c, (0, 0), tile.read(total))


def product(kind: str, columns: int, depth: int, steps: int, pending: int = 0) -> Body:
    """64 rows times `columns`, in steps of `depth` columns of k."""
    dtype, k = KINDS[kind][0], depth * steps
    b = BodyBuilder(
        "sparse",
        [
            ("a", Memory((64, k // 2), dtype)),
            ("words", Memory((4, k // 2), int32)),
            ("b", Memory((columns, k), dtype)),
            ("c", Memory((64, columns), float32, use="result")),
        ],
    )
    with tile.into(b):
        multiply(list(map(tile.memory, b.parameters)), columns, depth, steps, pending)
    return b.finish((1,), level="placed")


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize(
    ("kind", "columns", "depth"), [("bf16", 64, 64), ("e4m3", 64, 128), ("e4m3", 24, 128)]
)
def test_a_product(kind: str, columns: int, depth: int) -> None:
    steps, dtype = 3, KINDS[kind][1]
    whole, kept, places = draw(64, depth * steps, dtype)
    b = (np.random.default_rng(2).integers(-8, 9, (columns, depth * steps)) / 4).astype(dtype)
    words = words_of(places, kept.dtype.itemsize, depth)
    body = product(kind, columns, depth, steps)
    assert not [f for f in prove.check_body(body) if f.severity == "error"]
    c = np.zeros((64, columns), np.float32)
    found = check_body(body, kept, words, b, c, policies=("round", "far"))[-1]
    np.testing.assert_array_equal(found, whole.astype(np.float64) @ b.astype(np.float64).T)


def test_words_while_another_product_is_under_way() -> None:
    """It would read the registers that they are loaded into."""
    found = prove.check_body(product("bf16", 64, 64, 3, pending=1))
    (fault,) = [f for f in found if f.severity == "error"]
    assert fault.rule == "race" and "while another is under way" in fault.message
    assert "matrix_wait(pending=0)" in fault.hint


def test_spread_out() -> None:
    whole, kept, places = draw(64, 128, np.float16)
    np.testing.assert_array_equal(spread_out(kept, places), whole)


def test_words_that_do_not_fit() -> None:
    b = BodyBuilder("bad", [])
    with tile.into(b):
        total = tile.register((64, 64), float32)
        left, right = (tile.shared((64, n), bfloat16, "swizzle64") for n in (32, 64))
        with pytest.raises(InternalError, match="does not say where"):
            tile.matrix_async(total, left, right.T, True, tile.shared((4, 64), int32))
        with pytest.raises(InternalError, match="does not add"):
            tile.matrix_async(total, left, right.T, True)
