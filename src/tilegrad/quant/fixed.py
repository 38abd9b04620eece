"""Softmax, norms and attention in integers: what an NPU's vector unit does, on any device.

exp, reciprocals and reciprocal square roots are those of `core/fixed.py`; all else is int32 with
products that are rounded. Invariant: the same bits on every device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.dtype import int8, int32, int64
from ..core.errors import UserError
from ..graph import ops
from ..tensor.tensor import Tensor, wrap
from .numbers import LEAST, MOST, MOST_SHIFT, Requantised

HIDDEN = -(1 << 28)  # of a mask: exp of it is 0, and no score that fits makes it wrap


def exp(x: Tensor) -> Tensor:
    """exp of int32 at most 0, 16 bits after the point on both sides."""
    return wrap(ops.fixed(x.node, kind="exp"), x)


def reciprocal(x: Tensor) -> Tensor:
    """2**30 / x of int32 above 0."""
    return wrap(ops.fixed(x.node, kind="reciprocal"), x)


def rsqrt(x: Tensor) -> Tensor:
    """2**24 / sqrt(x) of int32 above 0."""
    return wrap(ops.fixed(x.node, kind="rsqrt"), x)


def rounded_product(x: Tensor, factor: Tensor | int, shift: int) -> Tensor:
    """x * factor / 2**shift to the nearest, in int32; `shift` is at least 1."""
    wide = factor if isinstance(factor, int) else factor.to(int64)
    return ((x.to(int64) * wide + (1 << (shift - 1))) >> shift).to(int32)


def _narrow(x: Tensor, factor: int, shift: int) -> Tensor:
    return rounded_product(x, factor, shift).clip(LEAST, MOST).to(int8)


def softmax(scores: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Softmax along the last axis of int32 scores of a scale: int8 of the scale 1 / 127. A mask is
    int32, 0 or HIDDEN."""
    real = Requantised.of(scale * 65536)
    x = rounded_product(scores, int(real.factors[0]), real.shift)
    if mask is not None:
        x = x + mask
    found = exp(x - x.amax(-1, keepdim=True))
    total = found.sum(-1, keepdim=True, dtype=int32)
    return _narrow(found * reciprocal(total), MOST, 30)


def norm_factors(weight: Any, scale: float) -> Requantised:
    """What a norm of rows like `weight` multiplies by, for results of a scale."""
    wide = np.asarray(weight, np.float64) * math.sqrt(len(weight)) / scale
    real = Requantised.of(np.maximum(np.abs(wide), 1e-30) / 2**24)
    return Requantised((real.factors * np.sign(wide)).astype(np.int32), real.shift)


def rms_norm(x: Tensor, factors: Tensor, shift: int) -> Tensor:
    """int8 rows over their root mean square, times `norm_factors`: int8. The scale of x is no
    matter."""
    whole = x.to(int32)
    squares = (whole * whole).sum(-1, keepdim=True, dtype=int32)
    return rounded_product(whole * rsqrt(squares), factors, shift).clip(LEAST, MOST).to(int8)


def layer_norm(x: Tensor, factors: Tensor, shift: int, bias: Tensor | None = None) -> Tensor:
    """int8 rows less their mean, over their deviation, times `norm_factors`: int8. A bias is int32
    in 256ths of the result."""
    count = int(x.shape[-1])
    bits = (14 - max(1, (count - 1).bit_length())) // 2  # after the point: sums of squares fit
    if bits < 0 or not 8 < shift <= MOST_SHIFT:
        expected = f"at most 16384 columns, a shift of 9 to {MOST_SHIFT}"
        raise UserError("bad layer norm", op="quant", expected=expected, got=(count, shift))
    whole = x.to(int32)
    mean = Requantised.of(2**bits / count)
    sums = whole.sum(-1, keepdim=True, dtype=int32)
    away = whole * (1 << bits) - rounded_product(sums, int(mean.factors[0]), mean.shift)
    squares = (away * away).sum(-1, keepdim=True, dtype=int32)
    found = rounded_product(away * rsqrt(squares), factors, shift - 8)
    if bias is not None:
        found = found + bias
    return _narrow(found, 1, 8)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attention of int8 heads (..., tokens, width): int32 sums, of the scale of v over 127. `scale`
    is that of a score, the scales of q and k included."""
    chances = softmax(q.to(int32) @ k.to(int32).mT, scale, mask)
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
