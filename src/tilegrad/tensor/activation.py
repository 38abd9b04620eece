"""Activation functions, with PyTorch's names, defaults and derivatives at the kinks.

Invariant: each is composed of ops that stay finite wherever the function is, on both sides of
every branch, so that no derivative is nan; low precision is rounded once.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import ShapeError, UserError
from ..graph import build
from .maths import cast, erf, exp, expm1, floating, log1p, one_rounding, pick, sigmoid, tanh
from .operands import number_for
from .tensor import Tensor, in_place, lift, method

SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@method()
def relu(x: Any) -> Tensor:
    """x where it is positive, else 0."""
    tensor = lift(x)
    return pick(tensor <= 0, 0, tensor)  # nan stays, the derivative at 0 is 0


@method()
@one_rounding
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution's share below x; 'tanh' approximates it."""
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + tanh(inner))
    if approximate != "none":
        raise UserError(
            "unknown approximation", op="gelu", expected="'none' or 'tanh'", got=repr(approximate)
        )
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


@method()
@one_rounding
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@method()
@one_rounding
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * x)) / beta."""
    scaled = x * beta
    soft = (pick(scaled > 0, scaled, 0.0) + _soft_part(scaled)) / beta
    return pick(scaled > threshold, x, soft)


def _soft_part(x: Tensor) -> Tensor:
    """log(1 + exp(-|x|)), with the derivative of the side x >= 0 at 0 left out."""
    return log1p(exp(pick(x > 0, -x, x)))


@method()
@one_rounding
def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x))."""
    return pick(x < 0, x, 0.0) - log1p(exp(pick(x < 0, x, -x)))


@method()
@one_rounding
def mish(x: Tensor) -> Tensor:
    """x * tanh(softplus(x))."""
    return x * tanh(softplus(x))


@method()
@one_rounding
def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return x / (1.0 + abs(x))


@method()
@one_rounding
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where it is positive, else negative_slope * x."""
    return pick(x > 0, x, x * negative_slope)


def prelu(x: Any, weight: Any) -> Tensor:
    """leaky_relu with a slope that is learnt, one for all or one per channel (axis 1)."""
    tensor, slope = lift(x), lift(weight)
    if slope.ndim == 1 and slope.shape[0] != 1 and tensor.ndim > 1:
        slope = slope.reshape(slope.shape[0], *[1] * (tensor.ndim - 2))
    return pick(tensor > 0, tensor, tensor * slope)


@method()
@one_rounding
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is positive, else alpha * (exp(x) - 1)."""
    return pick(x > 0, x, alpha * expm1(pick(x > 0, 0.0, x)))


@method()
@one_rounding
def selu(x: Tensor) -> Tensor:
    """A scaled elu that keeps mean 0 and variance 1."""
    low = (SELU_SCALE * SELU_ALPHA) * expm1(pick(x > 0, 0.0, x))
    return pick(x > 0, SELU_SCALE * x, low)


@method()
@one_rounding
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """elu whose derivative is continuous for every alpha."""
    return pick(x > 0, x, alpha * expm1(pick(x > 0, 0.0, x) / alpha))


@method()
def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """x kept between two values, with no derivative at them."""
    tensor = lift(x)
    low, high = number_for(min_val, tensor.dtype), number_for(max_val, tensor.dtype)
    return pick(tensor <= low, low, pick(tensor >= high, high, tensor))


@method()
def relu6(x: Any) -> Tensor:
    """x kept between 0 and 6."""
    return hardtanh(x, 0, 6)


@method()
@one_rounding
def hardsigmoid(x: Tensor) -> Tensor:
    """x / 6 + 1/2 kept between 0 and 1."""
    return relu6(x + 3.0) / 6.0


@method()
@one_rounding
def hardswish(x: Tensor) -> Tensor:
    """x * hardsigmoid(x)."""
    return x * relu6(x + 3.0) / 6.0


@method()
@one_rounding
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """x moved towards 0 by lambd."""
    return pick(x > lambd, x - lambd, pick(x < -lambd, x + lambd, pick(x != x, x.detach(), 0.0)))


@method()
def hardshrink(x: Any, lambd: float = 0.5) -> Tensor:
    """x where |x| > lambd, else 0."""
    tensor = lift(x)
    return pick((tensor >= -lambd) & (tensor <= lambd), 0.0, tensor)


@method()
@one_rounding
def tanhshrink(x: Tensor) -> Tensor:
    """x - tanh(x)."""
    return x - tanh(x)


def threshold(x: Any, threshold: float, value: float) -> Tensor:
    """x where it is above the threshold, else the value."""
    tensor = lift(x)
    bound, filler = number_for(threshold, tensor.dtype), number_for(value, tensor.dtype)
    return pick(tensor <= bound, filler, tensor)


@method()
def glu(x: Any, dim: int = -1) -> Tensor:
    """The first half times sigmoid of the second half of an axis."""
    tensor = floating(x)
    axis = build.axis_of(tensor.node, dim, "glu")
    if tensor.shape[axis] % 2:
        raise ShapeError(
            "the axis does not halve",
            op="glu",
            expected="an even size",
            got=f"size {tensor.shape[axis]} on axis {axis}",
        )
    half = tensor.shape[axis] // 2
    wide = cast(tensor, dtypes.float32) if tensor.dtype.bits < 32 else tensor
    first, second = wide.narrow(axis, 0, half), wide.narrow(axis, half, half)
    return cast(first * sigmoid(second), tensor.dtype)


in_place("relu", "gelu", "silu", "leaky_relu", "elu", "hardtanh", "relu6", "hardswish")
