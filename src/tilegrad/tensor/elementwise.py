"""Elementwise functions of several operands: arithmetic, comparison, logic and bits.

Invariant: promotion, rounding and the dtype of results are PyTorch's, Python numbers and
Tensors without axes included. Branches are chosen with `where`, on the side that has PyTorch's
derivative. Names of Python's operators attach themselves here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, promote_scalar
from ..core.errors import DTypeError, UserError
from ..graph import build, ops
from ..ir.node import Node, Op
from ..ir.symbol import Expr
from .maths import (
    abs_,
    cast,
    exp,
    floating,
    log1p,
    reciprocal,
    round_,
    rsqrt,
    sqrt,
    trunc,
)  # fmt: skip
from .tensor import Tensor, call, in_place, lift, method, operand, wrap

# ---- operands -------------------------------------------------------------------------------


def checked(op: str, *values: Any) -> None:
    """Refuse operands that are neither Tensors, arrays nor numbers."""
    for value in values:
        if isinstance(value, (Tensor, bool, int, float, np.ndarray, np.generic, Expr)):
            continue
        if type(value).__module__ == "torch":
            continue
        raise DTypeError("operand is not a Tensor or a number", op=op,
                         expected="Tensor, array, bool, int or float",
                         got=type(value).__name__,
                         hint="tilegrad.tensor(...) makes a Tensor of a list")  # fmt: skip


def binary(op: Op, a: Any, b: Any, name: str = "") -> Tensor:
    """An op of two operands as a Tensor."""
    left, right, dtype = paired(name or op.name, a, b)
    result = op(left, right)
    return wrap(build.cast(result, dtype) if op.group == "binary" else result, a, b)


def paired(op: str, a: Any, b: Any) -> tuple[Node, Node, DType]:
    """Two operands promoted and broadcast, and the dtype to give back.

    A Python float that a low precision does not hold exactly stays exact: the op is done in
    float32, as in PyTorch.
    """
    checked(op, a, b)
    left, right = operand(a), operand(b)
    nodes = build.promoted(op, left, right)
    dtype = nodes[0].dtype
    for value in (left, right):
        if isinstance(value, float) and dtype.is_float and dtype.bits < 32:
            if float(dtype.numpy.type(value)) != value:
                wide = [build.cast(v, dtypes.float32) if isinstance(v, Node) else v
                        for v in (left, right)]  # fmt: skip
                nodes = build.promoted(op, *wide)
    return nodes[0], nodes[1], dtype


def common(op: str, *values: Any) -> tuple[list[Tensor], DType]:
    """Operands promoted and broadcast together, at least float32, and the dtype to give back."""
    checked(op, *values)
    given = [operand(v) for v in values]
    dtype = build.promoted(op, *given)[0].dtype
    if not dtype.is_float:
        dtype = dtypes.float32
    wide = dtypes.float32 if dtype.bits < 32 else dtype
    nodes = [build.cast(g, wide) if isinstance(g, Node) else g for g in given]
    return [wrap(n, v) for n, v in zip(build.promoted(op, *nodes), values)], dtype


# ---- arithmetic -----------------------------------------------------------------------------


@method("add", "__add__")
def add(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    """a + alpha * b."""
    return binary(ops.add, a, b if _is_one(alpha) else mul(b, alpha))


@method("sub", "subtract", "__sub__")
def sub(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    """a - alpha * b."""
    result = binary(ops.subtract, a, b if _is_one(alpha) else mul(b, alpha))
    if result.dtype.kind == "bool":
        raise DTypeError("bools have no difference", op="subtract", expected="numbers",
                         got="bool and bool", hint="use a ^ b, or ~a")  # fmt: skip
    return result


@method("mul", "multiply", "__mul__")
def mul(a: Any, b: Any) -> Tensor:
    """a * b."""
    return binary(ops.multiply, a, b)


@method("div", "divide", "true_divide", "__truediv__")
def div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Tensor:
    """a / b, or the quotient rounded: 'floor' or 'trunc' (integers stay integers)."""
    if rounding_mode is None:
        left, right, dtype = paired("divide", a, b)
        if dtype.is_float:
            return wrap(build.cast(ops.divide(left, right), dtype), a, b)
        floats = [build.cast(v, dtypes.float32) if isinstance(v, Node) else v
                  for v in (operand(a), operand(b))]  # fmt: skip
        return wrap(build.divide(*floats))
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode != "trunc":
        raise UserError("unknown rounding", op="divide", expected="None, 'floor' or 'trunc'",
                        got=repr(rounding_mode))  # fmt: skip
    left, right = (wrap(n, v) for n, v in zip(_numbers("divide", a, b), (a, b)))
    if left.dtype.is_float:
        return trunc(div(left, right))
    quotient = floor_divide(left, right)
    inexact = ne(mul(quotient, right), left)
    return add(quotient, logical_and(lt(quotient, 0), inexact).to(quotient.dtype))


def _numbers(op: str, a: Any, b: Any) -> list[Node]:
    """Promoted operands; bools become int64."""
    checked(op, a, b)
    nodes = build.promoted(op, operand(a), operand(b))
    return [build.cast(n, dtypes.int64) if n.dtype.kind == "bool" else n for n in nodes]


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, (int, float)) and alpha == 1


@method("floor_divide", "__floordiv__")
def floor_divide(a: Any, b: Any) -> Tensor:
    """The quotient rounded towards -inf."""
    left, right = _numbers("floor_divide", a, b)
    if not left.dtype.is_float:
        return wrap(ops.floor_divide_(left, right))
    (x, y), dtype = common("floor_divide", wrap(left, a), wrap(right, b))
    rest = fmod(x, y)
    quotient = (x - rest) / y - where((rest != 0) & ((rest < 0) != (y < 0)), 1.0, 0.0)
    return cast(where(y == 0, x / y, round_(quotient)), dtype)


@method("remainder", "__mod__")
def remainder(a: Any, b: Any) -> Tensor:
    """a modulo b, with the sign of b."""
    left, right = _numbers("remainder", a, b)
    return wrap(ops.remainder(left, right), a, b)


@method()
def fmod(a: Any, b: Any) -> Tensor:
    """a modulo b, with the sign of a."""
    nodes = _numbers("fmod", a, b)
    x, y = wrap(nodes[0], a), wrap(nodes[1], b)
    rest = binary(ops.remainder, where(x < 0, -x, x), where(y < 0, -y, y))
    return where(x < 0, -rest, rest)  # type: ignore[no-any-return]


@method("pow", "__pow__")
def pow(a: Any, b: Any) -> Tensor:
    """a ** b; small constant exponents become products and roots."""
    checked("pow", a, b)
    exponent = operand(b)
    if isinstance(exponent, Node) or not isinstance(a, Tensor):
        left, right = _numbers("pow", a, b)
        return wrap(ops.power(left, right), a, b)
    base = cast(a, promote_scalar(a.dtype, exponent))
    if base.dtype.is_integer and exponent < 0:
        raise DTypeError("an integer has no negative power", op="pow", expected="exponent >= 0",
                         got=f"{base.dtype} ** {exponent}", hint="use x.float() ** -1")  # fmt: skip
    known = _known_power(base, exponent)
    return binary(ops.power, base, exponent, "pow") if known is None else known


def _known_power(base: Tensor, exponent: float) -> Tensor | None:
    if exponent == 0:
        return wrap(build.like(base.node, 1))
    if exponent == 1:
        return wrap(operand(base), base)
    if exponent == 2:
        return mul(base, base)
    if exponent == 3 and base.dtype.bits >= 32:
        return mul(mul(base, base), base)
    if not base.dtype.is_float:
        return None
    known = {0.5: sqrt, -1: reciprocal, -0.5: rsqrt}.get(exponent)
    return None if known is None else known(base)


@method()
def float_power(a: Any, b: Any) -> Tensor:
    """a ** b in float64."""
    base = cast(lift(a), dtypes.float64)
    return pow(base, b if isinstance(b, (int, float)) else cast(lift(b), dtypes.float64))


@method()
def maximum(a: Any, b: Any) -> Tensor:
    """The larger of both; nan wins."""
    return binary(ops.maximum, a, b)


@method()
def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of both; nan wins."""
    return binary(ops.minimum, a, b)


@method()
def fmax(a: Any, b: Any) -> Tensor:
    """The larger of both; a number wins over nan."""
    return where(isnan(a), b, where(isnan(b), a, maximum(a, b)))


@method()
def fmin(a: Any, b: Any) -> Tensor:
    """The smaller of both; a number wins over nan."""
    return where(isnan(a), b, where(isnan(b), a, minimum(a, b)))


@method("clamp", "clip")
def clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """x kept between bounds, which may be numbers or Tensors."""
    result = lift(x)
    if min is None and max is None:
        raise UserError("needs a bound", op="clamp", expected="min, max or both", got="neither")
    if min is not None:
        result = where(result < min, min, result)
    if max is not None:
        result = where(result > max, max, result)
    return result


clip = clamp


def where(condition: Any, a: Any = None, b: Any = None) -> Any:
    """a where the condition holds, else b; with the condition alone, the places it holds at."""
    if a is None and b is None:
        return lift(condition).nonzero(as_tuple=True)
    checked("where", a, b)
    chosen = build.where(operand(lift(condition)), operand(a), operand(b))
    return wrap(chosen, a, b)


@method("where")
def _where_method(self: Tensor, condition: Any, other: Any) -> Tensor:
    return where(condition, self, other)  # type: ignore[no-any-return]


@method()
def lerp(start: Any, end: Any, weight: Any) -> Tensor:
    """start + weight * (end - start), exact at both ends."""
    (a, b, w), dtype = common("lerp", start, end, weight)
    difference = b - a
    return cast(where(abs_(w) < 0.5, a + w * difference, b - difference * (1 - w)), dtype)


@method()
def addcmul(x: Any, a: Any, b: Any, *, value: float = 1) -> Tensor:
    """x + value * a * b."""
    return add(x, mul(mul(a, b), value))


@method()
def addcdiv(x: Any, a: Any, b: Any, *, value: float = 1) -> Tensor:
    """x + value * a / b."""
    return add(x, mul(div(a, b), value))


@method()
def atan2(y: Any, x: Any) -> Tensor:
    """The angle of the point (x, y)."""
    (a, b), dtype = common("atan2", y, x)
    return cast(binary(ops.atan2, a, b), dtype)


@method()
def logaddexp(a: Any, b: Any) -> Tensor:
    """log(exp a + exp b)."""
    (x, y), dtype = common("logaddexp", a, b)
    distance = where(x == y, 0.0, x - y)  # both may be infinite
    return cast(maximum(x, y) + log1p(exp(-abs_(distance))), dtype)


@method()
def hypot(a: Any, b: Any) -> Tensor:
    """sqrt(a**2 + b**2) without overflow."""
    (x, y), dtype = common("hypot", a, b)
    scale = maximum(abs_(x), abs_(y)).detach()
    scale = where((scale == 0) | isinf(scale), 1.0, scale)
    left, right = x / scale, y / scale
    return cast(scale * sqrt(left * left + right * right), dtype)


@method()
def copysign(a: Any, b: Any) -> Tensor:
    """|a| with the sign of b."""
    nodes = build.promoted("copysign", operand(a), operand(b))
    size, direction = floating(wrap(nodes[0], a)), floating(wrap(nodes[1], b))
    size = abs_(size)
    return where(signbit(direction), -size, size)


# ---- comparison -----------------------------------------------------------------------------


@method("eq", "__eq__")
def eq(a: Any, b: Any) -> Any:
    """a == b, element by element."""
    return False if b is None or isinstance(b, str) else binary(ops.equal, a, b)


@method("ne", "not_equal", "__ne__")
def ne(a: Any, b: Any) -> Any:
    """a != b, element by element."""
    return True if b is None or isinstance(b, str) else binary(ops.not_equal, a, b)


@method("lt", "less", "__lt__")
def lt(a: Any, b: Any) -> Tensor:
    """a < b."""
    return binary(ops.less, a, b)


@method("le", "less_equal", "__le__")
def le(a: Any, b: Any) -> Tensor:
    """a <= b."""
    return binary(ops.less_equal, a, b)


@method("gt", "greater", "__gt__")
def gt(a: Any, b: Any) -> Tensor:
    """a > b."""
    return binary(ops.less, b, a, "greater")


@method("ge", "greater_equal", "__ge__")
def ge(a: Any, b: Any) -> Tensor:
    """a >= b."""
    return binary(ops.less_equal, b, a, "greater_equal")


@method()
def isnan(x: Any) -> Tensor:
    """Where x is nan."""
    tensor = lift(x)
    return ne(tensor, tensor)  # type: ignore[no-any-return]


@method()
def isinf(x: Any) -> Tensor:
    """Where x is infinite."""
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return wrap(build.full(tensor.shape, False, dtypes.bool_))
    return eq(abs_(tensor), math.inf)  # type: ignore[no-any-return]


@method()
def isfinite(x: Any) -> Tensor:
    """Where x is neither nan nor infinite."""
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return wrap(build.full(tensor.shape, True, dtypes.bool_))
    return lt(abs_(tensor), math.inf)


@method()
def signbit(x: Any) -> Tensor:
    """Where the sign is minus (-0.0 too)."""
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return lt(tensor, 0)
    whole = {8: dtypes.int8, 16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}
    return lt(wrap(ops.bitcast(tensor.node, dtype=whole[tensor.dtype.bits])), 0)


@method()
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8,
            equal_nan: bool = False) -> Tensor:  # fmt: skip
    """Where |a - b| <= atol + rtol * |b|."""
    x, y = lift(a), lift(b)
    close = eq(x, y) | (isfinite(x) & isfinite(y) & le(abs_(x - y), atol + rtol * abs_(y)))
    return close | (isnan(x) & isnan(y)) if equal_nan else close  # type: ignore[no-any-return]


@method()
def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8,
             equal_nan: bool = False) -> bool:  # fmt: skip
    """Whether all elements are close."""
    return bool(isclose(a, b, rtol, atol, equal_nan).all())


@method()
def equal(a: Any, b: Any) -> bool:
    """Whether both have one shape and equal elements."""
    x, y = lift(a), lift(b)
    return x.shape == y.shape and bool(eq(x, y).all())


# ---- logic and bits -------------------------------------------------------------------------


def _truth(x: Any) -> Tensor:
    return cast(lift(x), dtypes.bool_)


@method()
def logical_not(x: Any) -> Tensor:
    """Where x is zero."""
    return call(ops.bit_not, _truth(x))


@method()
def logical_and(a: Any, b: Any) -> Tensor:
    """Where both are nonzero."""
    return binary(ops.bit_and, _truth(a), _truth(b))


@method()
def logical_or(a: Any, b: Any) -> Tensor:
    """Where one is nonzero."""
    return binary(ops.bit_or, _truth(a), _truth(b))


@method()
def logical_xor(a: Any, b: Any) -> Tensor:
    """Where exactly one is nonzero."""
    return binary(ops.bit_xor, _truth(a), _truth(b))


def _bits(op: Op, name: str, a: Any, b: Any) -> Tensor:
    checked(name, a, b)
    left, right = build.promoted(name, operand(a), operand(b))
    if left.dtype.is_float or (name.endswith("shift") and left.dtype.kind == "bool"):
        raise DTypeError("has no bits to work on", op=name, expected="integers or bools",
                         got=left.dtype, hint="cast with .int() or .bool()")  # fmt: skip
    return wrap(op(left, right))


@method("bitwise_and", "__and__")
def bitwise_and(a: Any, b: Any) -> Tensor:
    """a & b."""
    return _bits(ops.bit_and, "bitwise_and", a, b)


@method("bitwise_or", "__or__")
def bitwise_or(a: Any, b: Any) -> Tensor:
    """a | b."""
    return _bits(ops.bit_or, "bitwise_or", a, b)


@method("bitwise_xor", "__xor__")
def bitwise_xor(a: Any, b: Any) -> Tensor:
    """a ^ b."""
    return _bits(ops.bit_xor, "bitwise_xor", a, b)


@method("bitwise_left_shift", "__lshift__")
def bitwise_left_shift(a: Any, b: Any) -> Tensor:
    """a << b."""
    return _bits(ops.shift_left, "bitwise_left_shift", a, b)


@method("bitwise_right_shift", "__rshift__")
def bitwise_right_shift(a: Any, b: Any) -> Tensor:
    """a >> b; the sign stays."""
    return _bits(ops.shift_right, "bitwise_right_shift", a, b)


@method("bitwise_not", "__invert__")
def bitwise_not(x: Any) -> Tensor:
    """~x."""
    tensor = lift(x)
    _bits(ops.bit_and, "bitwise_not", tensor, tensor)
    return wrap(ops.bit_not(tensor.node))


# ---- Python's operators ---------------------------------------------------------------------

in_place("add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "clamp", "lerp",
         "addcmul", "addcdiv", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
         "bitwise_left_shift", "bitwise_right_shift", "logical_not", "maximum",
         "minimum")  # fmt: skip


def _reflected(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda self, other: function(other, self)


OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (add, "add_"), "sub": (sub, "sub_"), "mul": (mul, "mul_"), "truediv": (div, "div_"),
    "floordiv": (floor_divide, "floor_divide_"), "mod": (remainder, "remainder_"),
    "pow": (pow, "pow_"), "and": (bitwise_and, "bitwise_and_"),
    "or": (bitwise_or, "bitwise_or_"), "xor": (bitwise_xor, "bitwise_xor_"),
    "lshift": (bitwise_left_shift, "bitwise_left_shift_"),
    "rshift": (bitwise_right_shift, "bitwise_right_shift_"),
}  # fmt: skip

for _name, (_function, _place) in OPERATORS.items():
    setattr(Tensor, f"__r{_name}__", _reflected(_function))
    setattr(Tensor, f"__i{_name}__", getattr(Tensor, _place))
