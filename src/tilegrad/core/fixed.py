"""Fixed point: exp, reciprocal and reciprocal square root of int32, by tables with a line between
entries.

What they mean is this file, over NumPy arrays: chips have the tables in their vector units, and
kernels elsewhere compute the entries. Invariant: int32 in, int32 out, the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LOG2E = 94548  # 16 bits after the point
INT32_MAX = 2**31 - 1


@cache
def exp_table() -> Array:
    """2 ** (i / 256), 16 bits after the point."""
    return np.array([round(2.0 ** (16 + i / 256)) for i in range(257)], np.int64)


@cache
def reciprocal_table() -> Array:
    """1 / (1 + i / 256), 16 bits after the point."""
    return np.array([round(2.0**16 / (1 + i / 256)) for i in range(257)], np.int64)


@cache
def rsqrt_table() -> Array:
    """1 / sqrt(1 + i / 128), then 1 / sqrt(2 + 2 i / 128), 16 bits after the point."""
    roots = [2.0**16 / math.sqrt((1 + odd) * (1 + i / 128)) for odd in (0, 1) for i in range(129)]
    return np.array([round(x) for x in roots], np.int64)


def exp(x: Array) -> Array:
    """exp of numbers at most 0, 16 bits after the point on both sides."""
    z = (np.minimum(x.astype(np.int64), 0) * LOG2E) >> 16
    n, f = -(z >> 16), z & 0xFFFF
    table = exp_table()
    low = table[f >> 8]
    value = low + (((table[(f >> 8) + 1] - low) * (f & 255)) >> 8)
    return np.where(n > 31, 0, value >> np.minimum(n, 31)).astype(np.int32)


def _leading(x: Array) -> tuple[Array, Array]:
    """The place of the highest 1 of positive numbers, and they with it shifted to bit 30."""
    x = np.maximum(x.astype(np.int64), 1)
    place = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1
    return place, x << (30 - place)


def reciprocal(x: Array) -> Array:
    """2**30 / x of positive numbers; of others the largest number."""
    place, m = _leading(x)
    table = reciprocal_table()
    i = (m >> 22) & 255
    value = table[i] - (((table[i] - table[i + 1]) * ((m >> 14) & 255)) >> 8)
    made = np.where(
        place <= 14, value << np.maximum(14 - place, 0), value >> np.maximum(place - 14, 0)
    )
    return np.where(x <= 0, INT32_MAX, made).astype(np.int32)


def rsqrt(x: Array) -> Array:
    """2**24 / sqrt(x) of positive numbers; of others the largest number."""
    place, m = _leading(x)
    half, odd = place >> 1, place & 1
    table = rsqrt_table()
    i = odd * 129 + ((m >> 23) & 127)
    value = table[i] - (((table[i] - table[i + 1]) * ((m >> 15) & 255)) >> 8)
    made = np.where(half <= 8, value << np.maximum(8 - half, 0), value >> np.maximum(half - 8, 0))
    return np.where(x <= 0, INT32_MAX, made).astype(np.int32)


FIXED: dict[str, Callable[[Array], Array]] = {
    "exp": exp,
    "reciprocal": reciprocal,
    "rsqrt": rsqrt,
}

__all__ = ["FIXED", "INT32_MAX", "LOG2E", "exp", "reciprocal", "rsqrt"]
