"""Rarer functions of floats: the gamma function's logarithm, xlogy, sinc and their kin.

Invariant: where a formula cancels or takes many steps it is computed in float64 and rounded once,
so float32 results are right to the last bit or the one before. Derivatives are those of the
formulas, whose every branch is kept finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import DTypeError
from .elementwise import maximum
from .maths import cast, exp2, floating, log, log1p, pick, sin
from .operands import common
from .tensor import Tensor, in_place, lift, method

# (zeta(k) - 1) / k with alternating sign, from k = 2: log gamma(2 + t) but for its linear term.
_ZETA = (
    0.6449340668482264, 0.2020569031595943, 0.08232323371113819, 0.03692775514336993,
    0.01734306198444914, 0.008349277381922827, 0.00407735619794434, 0.002008392826082214,
    0.0009945751278180853, 0.0004941886041194646, 0.0002460865533080483, 0.0001227133475784891,
    6.124813505870483e-05, 3.058823630702049e-05, 1.528225940865187e-05, 7.637197637899763e-06,
    3.817293264999839e-06, 1.908212716553939e-06, 9.539620338727962e-07, 4.769329867878065e-07,
    2.384505027277329e-07, 1.192199259653111e-07, 5.96081890512595e-08, 2.980350351465228e-08,
    1.490155482836504e-08, 7.450711789835429e-09, 3.725334024788457e-09, 1.862659723513049e-09,
)  # fmt: skip
_SERIES = tuple((-1) ** k * z / k for k, z in enumerate(_ZETA, 2))
_EULER = 0.5772156649015329
# Bernoulli numbers b(2k) / (2k (2k - 1)) of Stirling's series, and b(2k) / 2k of its derivative.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_FAR = 8.0  # from here on the series of Stirling has every digit


def _in_float64(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """Compute in float64 and round once."""

    @wraps(function)
    def run(x: Any) -> Tensor:
        tensor = floating(x)
        return cast(function(cast(tensor, dtypes.float64)), tensor.dtype)

    return run


def _polynomial(x: Tensor, factors: Sequence[float]) -> Tensor:
    """factors[0] + factors[1] x + ..."""
    result = x * factors[-1] + factors[-2]
    for factor in reversed(factors[:-2]):
        result = result * x + factor
    return result


def _mirrored(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether x is below 1/2, 1 - x there (x elsewhere), and the distance of x from an integer."""
    low = x < 0.5
    return low, pick(low, 1.0 - x, x), x - (x + pick(x < 0, -0.5, 0.5)).trunc()


@method()
@_in_float64
def lgamma(x: Tensor) -> Tensor:
    """The logarithm of |gamma(x)|."""
    low, y, rest = _mirrored(x)
    far = y >= _FAR
    near = pick(far, 2.0, y)
    factor = near * 0.0 + 1.0
    for _ in range(int(_FAR) - 2):  # down to [1.5, 2.5) or below
        high = near >= 2.5
        near = pick(high, near - 1.0, near)
        factor = pick(high, factor * near, factor)
    first = near < 1.5
    t = near - pick(first, 1.0, 2.0)
    small = t * ((1.0 - _EULER) + t * _polynomial(t, _SERIES)) + log(factor)
    small = small - pick(first, log1p(pick(first, t, 0.0)), 0.0)
    big = pick(far, y, _FAR)
    over = 1.0 / big
    large = (big - 0.5) * (log(big) - 1.0) - 0.5 + 0.5 * math.log(2.0 * math.pi)
    large = large + over * _polynomial(over * over, _STIRLING)
    upper = pick(y == math.inf, y, pick(far, large, small))
    pole = low & (rest == 0.0)
    sine = sin(math.pi * pick(low & (rest != 0.0), rest, 0.5)).abs()
    lower = math.log(math.pi) - log(sine) - upper
    result = pick(low, pick(x.abs() == math.inf, math.inf, lower), upper)
    return pick(pole, math.inf, pick(x != x, x, result))


@method()
@_in_float64
def digamma(x: Tensor) -> Tensor:
    """The derivative of lgamma."""
    low, y, rest = _mirrored(x)
    shift = y * 0.0
    for _ in range(int(_FAR) + 2):
        near = y < _FAR + 2.0
        shift = shift + pick(near, 1.0 / y, 0.0)
        y = pick(near, y + 1.0, y)
    over = 1.0 / y
    upper = log(y) - 0.5 * over - over * over * _polynomial(over * over, _DIGAMMA) - shift
    inside = low & (rest != 0.0)
    angle = math.pi * pick(inside, rest, 0.25)
    lower = upper - math.pi / angle.tan()
    result = pick(inside, lower, upper)
    pole = low & (rest == 0.0)
    at_pole = pick(x == 0.0, -(1.0 / pick(x == 0.0, x, 1.0)), math.nan)  # -inf at +0, inf at -0
    far = pick(x == math.inf, math.inf, result)
    return pick(pole, at_pole, pick((x != x) | (x == -math.inf), math.nan, far))


@method()
@_in_float64
def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x), and 1 at 0."""
    angle = math.pi * pick(x == 0.0, 1.0, x)
    return pick(x == 0.0, 1.0 + 0.0 * x, sin(angle) / angle)


@method()
def xlogy(x: Any, y: Any) -> Tensor:
    """x log(y), and 0 where x is 0."""
    (a, b), dtype = common("xlogy", x, y)
    # Where the logarithm is no number the product would be none; elsewhere it is 0 by itself, and
    # its derivative log(y).
    odd = (a == 0.0) & ((b <= 0.0) | (b == math.inf))
    value = pick(odd, 0.0, a * log(pick(odd, 1.0, b)))
    return cast(value, dtype)


@method()
def logaddexp2(a: Any, b: Any) -> Tensor:
    """log2(2 ** a + 2 ** b)."""
    (x, y), dtype = common("logaddexp2", a, b)
    top = maximum(x, y)
    same = x == y  # infinities too, whose difference is no number
    apart = pick(same, 0.0, (x - y).abs())
    value = top + log1p(exp2(-apart)) / math.log(2.0)
    return cast(pick(same & (top.abs() == math.inf), top, value), dtype)


@method()
def heaviside(x: Any, values: Any) -> Tensor:
    """0 below 0, 1 above, `values` at 0."""
    tensor, at_zero = lift(x), lift(values)
    if tensor.dtype is not at_zero.dtype:
        raise DTypeError(
            "the dtypes differ", op="heaviside", expected=tensor.dtype, got=at_zero.dtype
        )
    return pick(tensor == 0, at_zero, cast(tensor > 0, tensor.dtype)).detach()


@method()
def isposinf(x: Any) -> Tensor:
    """Whether an element is +inf."""
    tensor = lift(x)
    return tensor == math.inf if tensor.dtype.is_float else tensor != tensor


@method()
def isneginf(x: Any) -> Tensor:
    """Whether an element is -inf."""
    tensor = lift(x)
    return tensor == -math.inf if tensor.dtype.is_float else tensor != tensor


in_place("lgamma", "digamma", "sinc", "xlogy", "heaviside")

__all__ = [
    "digamma",
    "heaviside",
    "isneginf",
    "isposinf",
    "lgamma",
    "logaddexp2",
    "sinc",
    "xlogy",
]
