"""The sparse matrix A of wgmma.mma_async.sp: what lanes say of the elements that are kept.

Two of every four neighbours in a row are stored; four bits say where they were, the first one's
place in the lower two. Of 16-bit elements (k is 32) two lanes of every four give metadata, which
ones the selector says: lane p of them has columns 16 p .. 16 p + 15 of row g = lane / 4 in its
lower half word and of row g + 8 in its upper one. Of 8-bit elements (k is 64) all four lanes do:
even ones have row g, odd ones row g + 8, the first two columns 0 .. 31, the others 32 .. 63.
Invariant: places that are the same, which the instruction set leaves undefined, are an error.
"""

from __future__ import annotations

import numpy as np

from .errors import SparsityError, TextError
from .values import LANES, Array


def dense(kept: Array, words: Array, selector: int, size: int) -> Array:
    """A (64, k) of what is kept of it (64, k / 2) and the words of four warps (4, lanes)."""
    if selector not in ((0, 1) if size == 2 else (0,)) or size > 2:
        raise TextError(f"sparsity selector {selector} of elements of {size} bytes")
    rows, half = kept.shape
    found = np.zeros((rows, 2 * half), kept.dtype)
    for warp in range(4):
        for lane in range(LANES):
            word, row, number = int(words[warp, lane]) & 0xFFFFFFFF, lane // 4, lane % 4
            if size == 2:
                if number // 2 != selector:
                    continue
                parts = [(row, word & 0xFFFF), (row + 8, word >> 16)]
                column, fours = 16 * (number % 2), 4
            else:
                parts, column, fours = [(row + 8 * (number % 2), word)], 32 * (number // 2), 8
            for at, bits in parts:
                spread(found[16 * warp + at], kept[16 * warp + at], bits, column, fours)
    return found


def spread(row: Array, kept: Array, bits: int, column: int, fours: int) -> None:
    """Put what is kept of some fours of a row, from a column on, at its places."""
    for four in range(fours):
        first, second = bits >> 4 * four & 3, bits >> 4 * four + 2 & 3
        if first == second:
            raise SparsityError(f"both kept elements of columns {column + 4 * four}.. at {first}")
        begin = column + 4 * four
        row[begin + first], row[begin + second] = kept[begin // 2], kept[begin // 2 + 1]
