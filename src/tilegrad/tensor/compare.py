"""Comparison, logic and bits.

Invariant: a comparison gives bools and has no derivative; nan is unequal to everything.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import DTypeError
from ..graph import build, ops
from ..ir.node import Op
from .maths import abs_, cast, floating
from .operands import binary, checked
from .tensor import Tensor, call, in_place, lift, method, operand, wrap

# ---- comparison -----------------------------------------------------------------------------


@method("eq", "__eq__")
def eq(a: Any, b: Any) -> Tensor:
    """a == b, element by element; no Tensor equals None or a string, and that is a plain False."""
    never: Any = False
    return never if b is None or isinstance(b, str) else binary(ops.equal, a, b)


@method("ne", "not_equal", "__ne__")
def ne(a: Any, b: Any) -> Tensor:
    """a != b, element by element; every Tensor differs from None and strings: a plain True."""
    always: Any = True
    return always if b is None or isinstance(b, str) else binary(ops.not_equal, a, b)


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
    return ne(tensor, tensor)


@method()
def isinf(x: Any) -> Tensor:
    """Where x is infinite."""
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return wrap(build.full(tensor.shape, False, dtypes.bool_))
    return eq(abs_(tensor), math.inf)


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
def isclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Where |a - b| <= atol + rtol * |b|."""
    x, y = lift(a), lift(b)
    same = eq(x, y)
    x, y = floating(x), floating(y)
    close = same | (isfinite(x) & isfinite(y) & le(abs_(x - y), atol + rtol * abs_(y)))
    return close | (isnan(x) & isnan(y)) if equal_nan else close


@method()
def allclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
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
        raise DTypeError(
            "has no bits to work on",
            op=name,
            expected="integers or bools",
            got=left.dtype,
            hint="cast with .int() or .bool()",
        )
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


in_place(
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "logical_not",
)
