"""wgmma.mma_async.sp in the simulator: metadata laid out element by element."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import run
from wgmma_text import SMEM, accumulated, descriptor, kernel, lay_out, listed, product, random

from ptxsim.errors import MatrixFenceError, PendingError, SparsityError, TextError

PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def pruned(depth: int, type_: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A (64, depth), what is kept of it, places (64, depth / 4, 2))."""
    rng = np.random.default_rng(seed)
    places = np.array(PAIRS)[rng.integers(0, 6, (64, depth // 4))]
    kept = random((64, depth // 2), type_, seed)
    dense = np.zeros((64, depth), kept.dtype)
    for r in range(64):
        for j in range(depth // 2):
            dense[r, j // 2 * 4 + places[r, j // 2, j % 2]] = kept[r, j]
    return dense, kept, places


def metadata(places: np.ndarray, size: int, selector: int) -> np.ndarray:
    """The word of each of 128 threads for one instruction; those of no use are not valid."""
    words = np.zeros(128, np.uint32)
    for thread in range(128):
        row, number = thread // 32 * 16 + thread % 32 // 4, thread % 4
        bits = 0
        for digit in range(16):
            if size == 2:
                if number // 2 != selector:
                    continue
                r, column = row + digit // 8 * 8, 16 * (number % 2) + digit % 8 // 2 * 4
            else:
                r, column = row + number % 2 * 8, 32 * (number // 2) + digit // 2 * 4
            bits |= int(places[r, column // 4, digit % 2]) << 2 * digit
        words[thread] = bits
    return words


def multiply(
    columns: int,
    type_: str,
    selector: int,
    seed: int = 1,
    spoil: bool = False,
    fence: str = "wgmma.fence.sync.aligned;",
    between: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """(what is accumulated over two instructions, what NumPy says)."""
    size = {"bf16": 2, "f16": 2, "e4m3": 1}[type_]
    depth, total, found = 64 // size, np.zeros((64, columns)), []
    image, lines, metas = np.zeros(64 * 1024, np.uint8), [], []
    for number in range(2):
        a, kept, places = pruned(depth, type_, seed + number)
        b = random((columns, depth), type_, 10 + number)
        metas.append(metadata(places, size, selector))
        at = [number * 32 * 1024, number * 32 * 1024 + 8 * 1024]
        wide = np.concatenate([kept, kept], 1)  # a row of 64 bytes, of which 32 are read
        left = descriptor(SMEM + at[0], *lay_out(wide, 64, False, image, at[0]), 64)
        twice = np.concatenate([b, b], 1)
        right = descriptor(SMEM + at[1], *lay_out(twice, 128, False, image, at[1]), 128)
        tail = ", 1, 1, 0, 0" if size == 2 else ", 1, 1"
        lines += [
            f"mov.b64 %d10, {left:#x};",
            f"mov.b64 %d11, {right:#x};",
            f"wgmma.mma_async.sp.sync.aligned.m64n{columns}k{depth}.f32.{type_}.{type_} "
            f"{listed(columns // 2)}, %d10, %d11, %r{20 + number}, {selector}, "
            f"%p{1 if number else 2}{tail};",
        ]
        lines += [between] if between and not number else []
        total = total + product(a, b, np.zeros((64, columns)), "f32")
    loads = ["ld.param.u64 %d20, [p2];", "mul.wide.u32 %d21, %r0, 4;", "add.s64 %d20, %d20, %d21;"]
    loads += [f"ld.global.b32 %r{20 + n}, [%d20+{512 * n}];" for n in range(2)]
    words = np.stack(metas)
    words[0, 5] = 0 if spoil else words[0, 5]
    result = np.zeros((columns // 2, 128), np.float32)
    body = kernel(columns, [*loads, *([fence] if fence else []), *lines], image.size)
    run(body, [image, result, words], threads=128, shared=image.size, assembled=selector < 2)
    found = accumulated(result, columns)
    return found, total.astype(np.float32)


@pytest.mark.parametrize(
    ("columns", "type_", "selector"),
    [(64, "bf16", 0), (64, "bf16", 1), (8, "f16", 1), (128, "e4m3", 0), (24, "e4m3", 0)],
)
def test_products(columns: int, type_: str, selector: int) -> None:
    found, wanted = multiply(columns, type_, selector)
    np.testing.assert_array_equal(found, wanted)


def test_one_place_for_two_is_an_error() -> None:
    with pytest.raises(SparsityError, match="both kept elements"):
        multiply(8, "e4m3", 0, spoil=True)


def test_selectors() -> None:
    with pytest.raises(TextError, match="selector"):
        multiply(8, "bf16", 2)


def test_words_are_fenced() -> None:
    """An H200 may read the words of before."""
    with pytest.raises(MatrixFenceError, match="touched since the last wgmma"):
        multiply(8, "e4m3", 0, fence="")


def test_words_are_kept() -> None:
    """A product reads its words to its end: an H200 took others that were written meanwhile."""
    with pytest.raises(PendingError, match="what is kept"):
        multiply(8, "e4m3", 0, between="mov.b32 %r20, 0;")
    found, wanted = multiply(8, "e4m3", 0, between="mov.b32 %r22, %r20;")  # to read them is no harm
    np.testing.assert_array_equal(found, wanted)
