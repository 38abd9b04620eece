"""int8 numbers: value = scale * integer, symmetric around 0; sums are int32.

A sum becomes int8 again by an integer product with rounding, as an NPU's vector unit does it:
(sum * factor + half) >> shift, saturated. Functions are written for Tensors and, with `_array`, for
NumPy arrays. Invariant: both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.dtype import float32, int8, int32, int64
from ..core.errors import UserError
from ..tensor.tensor import Tensor

INT8_MIN, INT8_MAX = -128, 127
SMALLEST = 1e-20  # absmax of a row: one of zeros alone has zeros
FACTOR_BITS = 22  # of the largest factor: a product with an int32 sum stays far below 2**63
MOST_SHIFT = 46

Array = np.ndarray


def scale_of(most: Any, largest: int = INT8_MAX) -> Array:
    """The scale of values up to `most` (an absmax, or one for each channel), which becomes the
    `largest` integer; 1 where all are 0."""
    wide = np.asarray(most, np.float64)
    if not np.isfinite(wide).all() or (wide < 0).any():
        raise UserError("bad absmax", op="quant", expected="numbers, at least 0", got=most)
    return np.where(wide > 0, wide / largest, 1.0).astype(np.float32)


def to_int8(x: Tensor, scale: float) -> Tensor:
    """The integers nearest to x / scale, saturated; halves go to even."""
    return (x.to(float32) * _inverse(scale)).round().clip(INT8_MIN, INT8_MAX).to(int8)


def to_int8_array(x: Array, scale: float) -> Array:
    """The same of an array."""
    found = np.round(x.astype(np.float32) * np.float32(_inverse(scale)))
    return np.clip(found, INT8_MIN, INT8_MAX).astype(np.int8)


def rows_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row (of the last axis) by its own absmax: integers, and the scales (..., 1)."""
    wide = x.to(float32)
    most = wide.abs().amax(-1, keepdim=True).clip(SMALLEST)
    codes = (wide * (INT8_MAX / most)).round().clip(INT8_MIN, INT8_MAX).to(int8)
    return codes, most * (1.0 / INT8_MAX)


def _inverse(scale: float) -> float:
    return float(np.float32(1.0) / np.float32(scale))


def channels(weight: Array, bits: int = 8) -> tuple[Array, Array]:
    """Weights in int8, of so many bits, and the scale of each channel, which the first axis
    counts."""
    largest = (1 << (bits - 1)) - 1
    flat = np.abs(weight.reshape(len(weight), -1)).max(1) if weight.size else np.ones(len(weight))
    scales = scale_of(flat, largest)
    wide = weight.astype(np.float64) / scales.reshape(-1, *(1,) * (weight.ndim - 1))
    return np.clip(np.round(wide), -largest, largest).astype(np.int8), scales


@dataclass(frozen=True)
class Requantised:
    """Factors and a shift that stand for real ones: factor / 2**shift, one for each channel."""

    factors: Array  # int32
    shift: int

    @staticmethod
    def of(real: Any) -> Requantised:
        """Those nearest to real factors, which are positive."""
        wide = np.atleast_1d(np.asarray(real, np.float64))
        if not np.isfinite(wide).all() or (wide <= 0).any():
            raise UserError("bad factors", op="quant", expected="numbers above 0", got=real)
        shift = int(np.clip(FACTOR_BITS - np.ceil(np.log2(wide.max())), 1, MOST_SHIFT))
        factors = np.round(wide * 2.0**shift)
        if factors.max() >= 2**31:
            raise UserError("factors are too large", op="quant", expected="below 2**30", got=real)
        return Requantised(factors.astype(np.int32), shift)


def requantise(sums: Tensor, factors: Tensor, shift: int, relu: bool = False) -> Tensor:
    """int8 of int32 sums; `factors` are int32 and broadcast."""
    wide = (sums.to(int64) * factors.to(int64) + (1 << (shift - 1))) >> shift
    return wide.to(int32).clip(0 if relu else INT8_MIN, INT8_MAX).to(int8)


def requantise_array(sums: Array, factors: Array, shift: int, relu: bool = False) -> Array:
    """The same of arrays."""
    wide = (sums.astype(np.int64) * factors.astype(np.int64) + (1 << (shift - 1))) >> shift
    narrow = wide.astype(np.uint64).astype(np.uint32).view(np.int32)
    return np.clip(narrow, 0 if relu else INT8_MIN, INT8_MAX).astype(np.int8)


__all__ = [
    "Requantised",
    "channels",
    "requantise",
    "requantise_array",
    "rows_to_int8",
    "scale_of",
    "to_int8",
    "to_int8_array",
]
