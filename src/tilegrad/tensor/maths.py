"""Maths functions of one operand, and the rule by which they round.

Invariant: a function composed of several ops is computed in float32 when its operand is of
lower precision and is cast once (`one_rounding`). Integers become float32 where PyTorch makes
them floats. Derivatives are those of the ops they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError
from ..graph import build, ops
from ..ir.node import Op
from .tensor import Tensor, in_place, lift, method, operand, wrap

Function = TypeVar("Function", bound=Callable[..., Any])


def cast(x: Tensor, dtype: DType) -> Tensor:
    """x in a dtype."""
    return x if x.dtype is dtype else wrap(build.cast(operand(x), dtype), x)


def floating(x: Any) -> Tensor:
    """x as floats: integers become float32."""
    tensor = lift(x)
    return tensor if tensor.dtype.is_float else cast(tensor, dtypes.float32)


def one_rounding(function: Function) -> Function:
    """Compute a function of floats in at least float32 and round the result once."""

    @wraps(function)
    def run(x: Any, *args: Any, **options: Any) -> Tensor:
        tensor = floating(x)
        if tensor.dtype.bits >= 32:
            return function(tensor, *args, **options)
        result = function(cast(tensor, dtypes.float32), *args, **options)
        return cast(result, tensor.dtype)

    return run  # type: ignore[return-value]


def pick(condition: Tensor, a: Any, b: Any) -> Tensor:
    """a where the condition holds, else b."""
    return wrap(build.where(operand(condition), operand(a), operand(b)), a, b)


# ---- one op each ----------------------------------------------------------------------------


def _attach(function: Callable[..., Tensor], names: tuple[str, ...], meaning: str) -> Any:
    function.__name__ = function.__qualname__ = names[0]
    function.__doc__ = meaning
    return method(*names)(function)


def _of_floats(op: Op, meaning: str, *names: str) -> Callable[[Any], Tensor]:
    """A function of one op whose result is always a float."""

    def run(x: Any) -> Tensor:
        tensor = floating(x)
        return wrap(op(operand(tensor)), tensor)

    return _attach(run, names, meaning)


def _rounding(op: Op, meaning: str, *names: str) -> Callable[[Any], Tensor]:
    """A function that leaves integers as they are."""

    def run(x: Any) -> Tensor:
        tensor = lift(x)
        return wrap(op(operand(tensor)) if tensor.dtype.is_float else operand(tensor), tensor)

    return _attach(run, names, meaning)


exp = _of_floats(ops.exp, "e ** x.", "exp")
log = _of_floats(ops.log, "The natural logarithm.", "log")
exp2 = _of_floats(ops.exp2, "2 ** x.", "exp2")
log2 = _of_floats(ops.log2, "The logarithm to base 2.", "log2")
log10 = _of_floats(ops.log10, "The logarithm to base 10.", "log10")
expm1 = _of_floats(ops.expm1, "e ** x - 1, exact for small x.", "expm1")
log1p = _of_floats(ops.log1p, "log(1 + x), exact for small x.", "log1p")
sqrt = _of_floats(ops.square_root, "The square root.", "sqrt")
reciprocal = _of_floats(ops.reciprocal, "1 / x.", "reciprocal")
sin = _of_floats(ops.sin, "The sine.", "sin")
cos = _of_floats(ops.cos, "The cosine.", "cos")
tan = _of_floats(ops.tan, "The tangent.", "tan")
asin = _of_floats(ops.asin, "The inverse sine.", "asin", "arcsin")
acos = _of_floats(ops.acos, "The inverse cosine.", "acos", "arccos")
atan = _of_floats(ops.atan, "The inverse tangent.", "atan", "arctan")
sinh = _of_floats(ops.sinh, "The hyperbolic sine.", "sinh")
cosh = _of_floats(ops.cosh, "The hyperbolic cosine.", "cosh")
asinh = _of_floats(ops.asinh, "The inverse hyperbolic sine.", "asinh", "arcsinh")
acosh = _of_floats(ops.acosh, "The inverse hyperbolic cosine.", "acosh", "arccosh")
atanh = _of_floats(ops.atanh, "The inverse hyperbolic tangent.", "atanh", "arctanh")
tanh = _of_floats(ops.tanh, "The hyperbolic tangent.", "tanh")
erf = _of_floats(ops.erf, "The error function.", "erf")
erfc = _of_floats(ops.erfc, "1 - erf(x), exact where erf is near 1.", "erfc")
erfinv = _of_floats(ops.erf_inverse, "The inverse of erf.", "erfinv")
floor = _rounding(ops.floor, "Round towards -inf.", "floor", "__floor__")
ceil = _rounding(ops.ceil, "Round towards +inf.", "ceil", "__ceil__")
trunc = _rounding(ops.trunc, "Round towards 0.", "trunc", "fix", "__trunc__")


@method("abs", "absolute", "__abs__")
def abs_(x: Any) -> Tensor:
    """|x|."""
    tensor = lift(x)
    unsigned = tensor.dtype.kind in ("bool", "uint")
    return wrap(operand(tensor) if unsigned else ops.absolute(operand(tensor)), tensor)


@method("neg", "negative", "__neg__")
def neg(x: Any) -> Tensor:
    """-x."""
    tensor = lift(x)
    if tensor.dtype.kind == "bool":
        raise DTypeError(
            "bools have no negative",
            op="neg",
            expected="numbers",
            got="bool",
            hint="use ~x, or x.int() first",
        )
    return wrap(ops.negative(operand(tensor)), tensor)


@method("positive", "__pos__")
def positive(x: Any) -> Tensor:
    """+x."""
    return lift(x)


@method("sign", "sgn")
def sign(x: Any) -> Tensor:
    """-1, 0 or 1."""
    tensor = lift(x)
    boolean = tensor.dtype.kind == "bool"
    return wrap(operand(tensor) if boolean else ops.sign(operand(tensor)), tensor)


@method("round", "__round__")
def round_(x: Any, decimals: int = 0) -> Tensor:
    """Round half to even, at so many decimals."""
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return tensor
    if not decimals:
        return wrap(ops.round_(operand(tensor)), tensor)
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return _round_at(tensor, lambda t: t * scale, lambda t: t / scale)
    return _round_at(tensor, lambda t: t / scale, lambda t: t * scale)


@one_rounding
def _round_at(x: Tensor, there: Any, back: Any) -> Tensor:
    return back(wrap(ops.round_(operand(there(x))), x))


@method()
def square(x: Any) -> Tensor:
    """x * x."""
    return lift(x) ** 2


@method()
def frac(x: Any) -> Tensor:
    """What trunc leaves."""
    tensor = lift(x)
    return tensor - trunc(tensor)


# ---- composed -------------------------------------------------------------------------------


@method()
@one_rounding
def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return reciprocal(sqrt(x))


@method()
@one_rounding
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return wrap(ops.sigmoid(operand(x)), x)


expit = sigmoid


@method()
@one_rounding
def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x))."""
    if eps is not None:
        x = x.clamp(eps, 1.0 - eps)
    return wrap(ops.logit(operand(x)), x)


@method()
def nan_to_num(
    x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Numbers in place of nan and infinities (by default 0 and the largest finite ones)."""
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return tensor
    largest = largest_finite(tensor.dtype)
    high = largest if posinf is None else posinf
    low = -largest if neginf is None else neginf
    result = pick(tensor == math.inf, high, pick(tensor == -math.inf, low, tensor))
    return pick(tensor != tensor, nan, result)


def largest_finite(dtype: DType) -> float:
    """The largest finite value of a float dtype."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.numpy).max)


@method()
def deg2rad(x: Any) -> Tensor:
    """Degrees to radians."""
    return floating(x) * (math.pi / 180.0)


@method()
def rad2deg(x: Any) -> Tensor:
    """Radians to degrees."""
    return floating(x) * (180.0 / math.pi)


in_place(
    "abs",
    "neg",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "square",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "sigmoid",
    "erf",
    "floor",
    "ceil",
    "round",
    "trunc",
    "frac",
    "sign",
    "nan_to_num",
)
