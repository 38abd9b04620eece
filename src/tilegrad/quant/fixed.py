"""Softmax, norms and attention in integers: what an NPU's vector unit does, on any device.

exp, reciprocals and reciprocal square roots are those of `core/fixed.py`; all else is int32 with
products that are rounded. Invariant: the same bits on every device, and no sum that wraps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.dtype import DType, int8, int32, int64
from ..core.errors import DTypeError, UserError
from ..graph import ops
from ..ir.symbol import Size, high
from ..tensor.tensor import Tensor, wrap
from .numbers import INT8_MAX, INT8_MIN, MOST_SHIFT, Requantised

HIDDEN = -(1 << 30)  # of a mask: it decides over scores of +-SCORES, and no sum of them wraps
SCORES = (1 << 29) - (1 << 21)  # 16 bits after the point: 2 * SCORES + HIDDEN has an exp of 0
SUMMED = 2**31 // 65536 - 1  # columns of exp whose sum is int32
SQUARED = 2**31 // INT8_MIN**2 - 1  # columns of products of int8 whose sum is int32


def _checked(x: Tensor, op: str, dtype: DType) -> None:
    if not isinstance(x, Tensor) or x.dtype is not dtype:
        got = getattr(x, "dtype", type(x).__name__)
        raise DTypeError("bad operand", op=op, expected=f"a Tensor of {dtype}", got=got)


def _int32(x: Tensor, op: str) -> None:
    _checked(x, op, int32)


def _columns(shape: tuple[Size, ...], op: str, most: int) -> None:
    if not shape or not 1 <= high(shape[-1]) <= most:
        expected = f"1 to {most} columns: sums are int32"
        raise UserError("bad columns", op=op, expected=expected, got=shape)


def exp(x: Tensor) -> Tensor:
    """exp of int32 at most 0, 16 bits after the point on both sides."""
    _int32(x, "exp")
    return wrap(ops.fixed(x.node, kind="exp"), x)


def reciprocal(x: Tensor) -> Tensor:
    """2**30 / x of int32 above 0."""
    _int32(x, "reciprocal")
    return wrap(ops.fixed(x.node, kind="reciprocal"), x)


def rsqrt(x: Tensor) -> Tensor:
    """2**24 / sqrt(x) of int32 above 0."""
    _int32(x, "rsqrt")
    return wrap(ops.fixed(x.node, kind="rsqrt"), x)


def rounded_product(x: Tensor, factor: Tensor | int, shift: int) -> Tensor:
    """x * factor / 2**shift to the nearest, in int32; `shift` is at least 1."""
    _int32(x, "rounded_product")
    if not isinstance(factor, int):
        _int32(factor, "rounded_product")
    wide = factor if isinstance(factor, int) else factor.to(int64)
    return ((x.to(int64) * wide + (1 << (shift - 1))) >> shift).to(int32)


def _narrow(x: Tensor, factor: int, shift: int) -> Tensor:
    return rounded_product(x, factor, shift).clip(INT8_MIN, INT8_MAX).to(int8)


def softmax(scores: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Softmax along the last axis of int32 scores of a scale: int8 of the scale 1 / 127. A mask is
    int32, 0 or HIDDEN. Scores times the scale saturate at about +-8160; at most 32767 columns."""
    _int32(scores, "softmax")
    return _softmax(scores, 2**31, scale, mask, "softmax")


def _softmax(scores: Tensor, bound: int, scale: float, mask: Tensor | None, op: str) -> Tensor:
    """Of scores up to +-bound."""
    real = Requantised.of(scale * 65536)
    factor = int(real.factors[0])
    most = (SCORES << real.shift) // max(factor, 1)  # a score of which the product is in range
    if most < 1:
        raise UserError("bad scale", op=op, expected=f"below {SCORES // 65536}", got=scale)
    _columns(scores.shape, op, SUMMED)
    x = rounded_product(scores.clip(-most, most) if bound > most else scores, factor, real.shift)
    if mask is not None:
        _int32(mask, op)
        x = x + mask
    found = exp(x - x.amax(-1, keepdim=True))
    total = found.sum(-1, keepdim=True, dtype=int32)
    return _narrow(found * reciprocal(total), INT8_MAX, 30)


def norm_factors(weight: Any, scale: float) -> Requantised:
    """What a norm of rows like `weight` multiplies by, for results of a scale."""
    _columns(np.shape(weight), "norm_factors", SQUARED)
    wide = np.asarray(weight, np.float64) * math.sqrt(len(weight)) / scale
    real = Requantised.of(np.maximum(np.abs(wide), 1e-30) / 2**24)
    return Requantised((real.factors * np.sign(wide)).astype(np.int32), real.shift)


def rms_norm(x: Tensor, factors: Tensor, shift: int) -> Tensor:
    """int8 rows over their root mean square, times `norm_factors`: int8. The scale of x is no
    matter; at most 131071 columns."""
    _checked(x, "rms_norm", int8)
    _int32(factors, "rms_norm")
    _columns(x.shape, "rms_norm", SQUARED)
    whole = x.to(int32)
    squares = (whole * whole).sum(-1, keepdim=True, dtype=int32)
    return rounded_product(whole * rsqrt(squares), factors, shift).clip(INT8_MIN, INT8_MAX).to(int8)


def layer_norm(x: Tensor, factors: Tensor, shift: int, bias: Tensor | None = None) -> Tensor:
    """int8 rows less their mean, over their deviation, times `norm_factors`: int8. A bias is int32
    in 256ths of the result. At most 16384 columns."""
    _checked(x, "layer_norm", int8)
    _int32(factors, "layer_norm")
    _columns(x.shape, "layer_norm", 16384)
    count = int(x.shape[-1])
    bits = (14 - max(1, (count - 1).bit_length())) // 2  # after the point: sums of squares fit
    if not 8 < shift <= MOST_SHIFT:
        expected = f"a shift of 9 to {MOST_SHIFT}"
        raise UserError("bad shift", op="layer_norm", expected=expected, got=shift)
    whole = x.to(int32)
    mean = Requantised.of(2**bits / count)
    sums = whole.sum(-1, keepdim=True, dtype=int32)
    away = whole * (1 << bits) - rounded_product(sums, int(mean.factors[0]), mean.shift)
    squares = (away * away).sum(-1, keepdim=True, dtype=int32)
    found = rounded_product(away * rsqrt(squares), factors, shift - 8)
    if bias is not None:
        _int32(bias, "layer_norm")
        found = found + bias
    return _narrow(found, 1, 8)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attention of int8 heads (..., tokens, width): int32 sums, of the scale of v over 127. `scale`
    is that of a score, the scales of q and k included. At most 32767 keys; scores saturate as those
    of `softmax` do."""
    for x in (q, k, v):
        _checked(x, "attention", int8)
    _columns(q.shape, "attention", SQUARED)
    bound = INT8_MIN**2 * high(q.shape[-1])
    chances = _softmax(q.to(int32) @ k.to(int32).mT, bound, scale, mask, "attention")
    return chances.to(int32) @ v.to(int32)


__all__ = [
    "HIDDEN",
    "attention",
    "exp",
    "layer_norm",
    "norm_factors",
    "reciprocal",
    "rms_norm",
    "rounded_product",
    "rsqrt",
    "softmax",
]
