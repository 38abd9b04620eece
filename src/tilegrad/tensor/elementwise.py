"""Elementwise arithmetic of several operands.

Invariant: promotion, rounding and the dtype of results are PyTorch's, Python numbers and
Tensors without axes included. Branches are chosen with `where`, on the side that has PyTorch's
derivative. Names of Python's operators attach themselves here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

from ..core import dtype as dtypes
from ..core.dtype import promote_scalar
from ..core.errors import DTypeError, UserError
from ..graph import build, ops
from ..ir.node import Node, Op
from .compare import (
    bitwise_and,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    isinf,
    isnan,
    logical_and,
    logical_or,
    lt,
    ne,
    signbit,
)
from .maths import (
    abs_,
    cast,
    exp,
    floating,
    log1p,
    reciprocal,
    rsqrt,
    sqrt,
    trunc,
)
from .operands import binary, checked, common, number_for, paired
from .tensor import Tensor, in_place, lift, method, operand, wrap

# ---- arithmetic -----------------------------------------------------------------------------


@method("add", "__add__")
def add(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    """a + alpha * b."""
    return binary(ops.add, a, b) if _is_one(alpha) else _scaled(ops.add, a, b, alpha)


@method("sub", "subtract", "__sub__")
def sub(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    """a - alpha * b."""
    result = binary(ops.subtract, a, b) if _is_one(alpha) else _scaled(ops.subtract, a, b, alpha)
    if result.dtype.kind == "bool":
        raise DTypeError(
            "bools have no difference",
            op="subtract",
            expected="numbers",
            got="bool and bool",
            hint="use a ^ b, or ~a",
        )
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
        floats = [
            build.cast(v, dtypes.float32) if isinstance(v, Node) else v
            for v in (operand(a), operand(b))
        ]
        return wrap(build.divide(*floats))
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode != "trunc":
        raise UserError(
            "unknown rounding",
            op="divide",
            expected="None, 'floor' or 'trunc'",
            got=repr(rounding_mode),
        )
    number, divisor = (wrap(n, v) for n, v in zip(_numbers("divide", a, b), (a, b)))
    if number.dtype.is_float:
        return trunc(div(number, divisor))
    quotient = floor_divide(number, divisor)
    inexact = ne(mul(quotient, divisor), number)
    return add(quotient, logical_and(lt(quotient, 0), inexact).to(quotient.dtype))


def _numbers(op: str, a: Any, b: Any) -> list[Node]:
    """Promoted operands; bools become int64."""
    checked(op, a, b)
    nodes = build.promoted(op, operand(a), operand(b))
    return [build.cast(n, dtypes.int64) if n.dtype.kind == "bool" else n for n in nodes]


def _divided(op: str, a: Any, b: Any) -> list[Node]:
    """Promoted operands of a division, of integers not by a 0 that is known (but none by it is)."""
    nodes = _numbers(op, a, b)
    empty = any(size == 0 for node in nodes for size in node.shape)
    if nodes[1].dtype.is_integer and ops.constant_value(nodes[1]) == 0 and not empty:
        raise UserError("integers are divided by 0", op=op)
    return nodes


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, (int, float)) and alpha == 1


def _scaled(op: Op, a: Any, b: Any, alpha: Any) -> Tensor:
    """op(a, alpha * b) in the dtype of a and b, rounded once."""
    checked(op.name, a, b)
    nodes = build.promoted(op.name, operand(a), operand(b))
    dtype = nodes[0].dtype
    factor = alpha if isinstance(alpha, (bool, int, float)) else lift(alpha).item()
    if isinstance(factor, float) and not dtype.is_float:
        raise DTypeError(
            "integers have no fraction",
            op=op.name,
            expected="a whole alpha",
            got=f"alpha={factor} for {dtype}",
            hint="use x.float()",
        )
    wide = dtype.wide
    left, right = (build.cast(n, wide) for n in nodes)
    scaled = ops.multiply(right, build.like(right, factor))
    return wrap(build.cast(op(left, scaled), dtype), a, b)


@method("floor_divide", "__floordiv__")
def floor_divide(a: Any, b: Any) -> Tensor:
    """The quotient rounded towards -inf, by the exact remainder."""
    left, right = _divided("floor_divide", a, b)
    return wrap(ops.floor_divide_(left, right), a, b)


@method("remainder", "__mod__")
def remainder(a: Any, b: Any) -> Tensor:
    """a modulo b, with the sign of b."""
    left, right = _divided("remainder", a, b)
    return wrap(ops.remainder(left, right), a, b)


@method()
def fmod(a: Any, b: Any) -> Tensor:
    """a modulo b, with the sign of a."""
    left, right = _divided("fmod", a, b)
    return wrap(ops.fmod(left, right), a, b)


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
        raise DTypeError(
            "an integer has no negative power",
            op="pow",
            expected="exponent >= 0",
            got=f"{base.dtype} ** {exponent}",
            hint="use x.float() ** -1",
        )
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
    """The larger of both, a where they are equal; a number wins over nan."""
    return _extreme(ops.maximum, "fmax", a, b)


@method()
def fmin(a: Any, b: Any) -> Tensor:
    """The smaller of both, a where they are equal; a number wins over nan."""
    return _extreme(ops.minimum, "fmin", a, b)


def _extreme(op: Op, name: str, a: Any, b: Any) -> Tensor:
    """An extreme whose derivative is all a's where a is as good as b; nan loses."""
    nodes = build.promoted(name, operand(a), operand(b))
    if not nodes[0].dtype.is_float:
        return binary(op, a, b, name)
    x, y = wrap(nodes[0], a), wrap(nodes[1], b)
    if op is ops.maximum:  # -0.0 + y for y = 0 is which zero is larger
        wins, mine = x >= y, x + where(y == 0, y, -0.0).detach()
    else:
        wins, mine = x <= y, -(where(y == 0, -y, -0.0).detach() - x)
    return where(wins | isnan(y), mine, y)


@method("clamp", "clip")
def clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """x kept between bounds, which may be numbers or Tensors; nan if one of the three is."""
    result = lift(x)
    if min is None and max is None:
        raise UserError("needs a bound", op="clamp", expected="min, max or both", got="neither")
    if min is not None:
        result = where(_beyond(result < min, min), _lower_bound(min, max), result)
    if max is not None:
        result = where(_beyond(result > max, max), max, result)
    return result


def _beyond(outside: Tensor, bound: Any) -> Tensor:
    """Whether a value gives way to a bound: one that is nan always wins."""
    if isinstance(bound, Tensor):
        return logical_or(outside, isnan(bound)) if bound.dtype.is_float else outside
    return logical_or(outside, True) if bound != bound else outside


def _lower_bound(low: Any, high: Any) -> Any:
    """The lower bound, without a derivative where the upper one is not above it."""
    if not isinstance(low, Tensor) or high is None or not low.dtype.is_float:
        return low
    return where(low < high, low, low.detach())


clip = clamp


@overload
def where(condition: Any) -> tuple[Tensor, ...]: ...
@overload
def where(condition: Any, a: Any, b: Any) -> Tensor: ...
def where(condition: Any, a: Any = None, b: Any = None) -> Any:
    """a where the condition holds, else b; with the condition alone, the places it holds at."""
    if a is None and b is None:
        return lift(condition).nonzero(as_tuple=True)
    checked("where", a, b)
    chosen = build.where(operand(lift(condition)), operand(a), operand(b))
    return wrap(chosen, a, b)


@method("where")
def _where_method(self: Tensor, condition: Any, other: Any) -> Tensor:
    return where(condition, self, other)


@method()
def lerp(start: Any, end: Any, weight: Any) -> Tensor:
    """start + weight * (end - start), exact at both ends."""
    (a, b, w), dtype = common("lerp", start, end, weight)
    difference = b - a
    return cast(where(abs_(w) < 0.5, a + w * difference, b - difference * (1 - w)), dtype)


@method()
def addcmul(x: Any, a: Any, b: Any, *, value: float = 1) -> Tensor:
    """x + value * a * b."""
    product = mul(a, b)
    return add(x, mul(product, number_for(value, product.dtype)))


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
    length = scale * sqrt(left * left + right * right)
    return cast(where(isinf(x) | isinf(y), math.inf, length), dtype)


@method()
def copysign(a: Any, b: Any) -> Tensor:
    """|a| with the sign of b."""
    nodes = build.promoted("copysign", operand(a), operand(b))
    size, direction = floating(wrap(nodes[0], a)), floating(wrap(nodes[1], b))
    size = abs_(size)
    return where(signbit(direction), -size, size)


@method()
def clamp_min(x: Any, min: Any) -> Tensor:
    """x, and `min` where it is below."""
    return clamp(x, min=min)


@method()
def clamp_max(x: Any, max: Any) -> Tensor:
    """x, and `max` where it is above."""
    return clamp(x, max=max)


def rsub(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    """b - alpha * a."""
    return sub(b, a, alpha=alpha)


# ---- Python's operators ---------------------------------------------------------------------

in_place(
    "add",
    "sub",
    "mul",
    "div",
    "floor_divide",
    "remainder",
    "fmod",
    "pow",
    "clamp",
    "lerp",
    "addcmul",
    "addcdiv",
    "maximum",
    "minimum",
    "clamp_min",
    "clamp_max",
)


def _reflected(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    def run(self: Tensor, other: Any) -> Tensor:
        return function(other, self)

    return run


OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (add, "add_"),
    "sub": (sub, "sub_"),
    "mul": (mul, "mul_"),
    "truediv": (div, "div_"),
    "floordiv": (floor_divide, "floor_divide_"),
    "mod": (remainder, "remainder_"),
    "pow": (pow, "pow_"),
    "and": (bitwise_and, "bitwise_and_"),
    "or": (bitwise_or, "bitwise_or_"),
    "xor": (bitwise_xor, "bitwise_xor_"),
    "lshift": (bitwise_left_shift, "bitwise_left_shift_"),
    "rshift": (bitwise_right_shift, "bitwise_right_shift_"),
}

for _name, (_function, _place) in OPERATORS.items():
    setattr(Tensor, f"__r{_name}__", _reflected(_function))
    setattr(Tensor, f"__i{_name}__", getattr(Tensor, _place))
