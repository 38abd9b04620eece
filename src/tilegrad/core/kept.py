"""Matrices of which two of every four elements along k are kept, and the words that say which.

A matrix (m, k) is stored as what is kept of it (m, k / 2), and words (m / 16, k / 2) of 32 bits:
sixteen digits of two bits, each the place in its four of one that is kept. Words lie as the warps
of a matrix unit take them: a row has the words of 16 rows, of each step of `depth` columns those of
lane 0, then of lane 1, ..., one for every 64 columns. Which elements a word's digits speak of
depends on the size of an element, as PTX describes it for `wgmma.mma_async.sp`.
Invariant: `words_of` and `positions_of` are each other's inverse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

ROWS, COLUMNS = 16, 64  # that the words of a warp speak of at once
LANES, DIGITS = 32, 16
Array = np.ndarray[Any, Any]


@lru_cache(maxsize=4)
def order(size: int) -> tuple[Array, Array]:
    """(row, which of the 32 kept of 64 columns) of each digit of each lane (32, 16), of elements
    of so many bytes."""
    lane, digit = np.arange(LANES)[:, None], np.arange(DIGITS)[None, :]
    if size == 1:  # a lane has one row of half the columns
        return lane // 4 + lane % 2 * 8 + 0 * digit, lane // 2 % 2 * 16 + digit
    return lane // 4 + digit // 8 * 8, lane % 4 * 8 + digit % 8  # two rows of a fourth each


def words_of(positions: Array, size: int, depth: int) -> Array:
    """The words (m / 16, k / 2) of positions (m, k / 2) below 4, in steps of `depth` columns."""
    rows, kept = order(size)
    m, half = positions.shape
    steps = (m // ROWS, ROWS, 2 * half // depth, depth // COLUMNS, COLUMNS // 2)
    found = positions.reshape(steps)[:, rows, :, :, kept]  # (lane, digit, warp, step, word)
    shifts = 2 * np.arange(DIGITS, dtype=np.uint32)
    digits = found.transpose(2, 3, 0, 4, 1).astype(np.uint32) << shifts
    words = np.bitwise_or.reduce(digits, -1)  # (warp, step, lane, word)
    return np.ascontiguousarray(words).view(np.int32).reshape(m // ROWS, half)


def positions_of(words: Array, size: int, depth: int) -> Array:
    """The positions (m, k / 2) that words say."""
    rows, kept = order(size)
    warps, half = words.shape
    cut = words.reshape(warps, 2 * half // depth, LANES, depth // COLUMNS, 1).view(np.uint32)
    digits = cut >> (2 * np.arange(DIGITS, dtype=np.uint32)) & 3
    found = np.empty((warps, ROWS, 2 * half // depth, depth // COLUMNS, COLUMNS // 2), np.uint8)
    found[:, rows, :, :, kept] = digits.transpose(2, 4, 0, 1, 3)
    return found.reshape(warps * ROWS, half)


def spread_out(kept: Array, positions: Array) -> Array:
    """The matrix (m, k), of what is kept of it (m, k / 2) and where."""
    pairs, at = (x.reshape(len(kept), -1, 2) for x in (kept, positions))
    found = np.zeros((*pairs.shape[:2], 4), kept.dtype)
    np.put_along_axis(found, at.astype(np.int64), pairs, 2)
    return found.reshape(len(kept), -1)


__all__ = ["positions_of", "spread_out", "words_of"]
