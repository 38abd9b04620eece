"""Simplification: Rules that give the same values with less work.

Every Rule holds for nan, inf and -0.0 where it applies to floats: x * 0 is 0 for integers
only, x + 0.0 is not x (it turns -0.0 into 0.0), but x + -0.0 and x - 0.0 are. Sums may be
reordered, which changes their last bits, never their meaning. Rules of arithmetic are here,
those of movement and reduction in `movement`; SIMPLIFY is both.
Invariant: a Rule never adds work and never changes a type.
"""

from __future__ import annotations

import math

from ..core.dtype import DType, bool_
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet, any_, of
from . import build, ops
from .movement import MOVEMENT
from .notation import (
    BINARY,
    TERNARY,
    UNARY,
    constant,
    fold,
    fold_root,
    is_float,
    is_integer,
    not_bool,
    not_float,
)

x, y, z = any_("x"), any_("y"), any_("z")
c, d, e = constant("c"), constant("d"), constant("e")


def value_of(node: Node) -> float:
    """The number a constant Node holds."""
    return ops.constant_value(node)


def _x(m: Match) -> Node:
    return m.x


def _zero(m: Match) -> Node:
    return build.like(m.root, 0)


FOLD = [
    Rule("fold_unary", of(UNARY, c), fold_root),
    Rule("fold_binary", of(BINARY, c, d), fold_root),
    Rule("fold_ternary", of(TERNARY, c, d, e), fold_root),
    Rule("fold_size", ops.size, lambda m: _known_size(m.root)),
    Rule("fold_iota", ops.iota, lambda m: _iota_one(m.root)),
]


def _known_size(node: Node) -> Node | None:
    value = node.attrs["value"]
    return build.size_value(value) if isinstance(value, int) else None


def _iota_one(node: Node) -> Node | None:
    return build.full((1,), 0, node.dtype) if node.shape == (1,) else None


# ---- sums and products ----------------------------------------------------------------------


def _join_constants(m: Match) -> Node | None:
    """(x * c) * d = x * (c * d), and so for +."""
    joined = fold(m.root.op, [m.c, m.d], {})
    return None if joined is None else build.binary(m.root.op, m.x, joined)


ARITHMETIC = [
    Rule("add_zero", x + 0, _x, not_float),
    Rule("add_minus_zero", x + -0.0, _x, is_float),
    Rule("add_negative", x + -y, lambda m: ops.subtract(m.x, m.y), not_bool),
    Rule("add_constants", (x + c) + d, _join_constants, not_float),
    Rule("subtract_zero", x - 0, _x),
    Rule("subtract_negative", x - -y, lambda m: ops.add(m.x, m.y), not_bool),
    Rule("subtract_self", x - x, _zero, not_float),
    Rule("zero_subtract", 0 - x, lambda m: ops.negative(m.x), is_integer),
    Rule("minus_zero_subtract", -0.0 - x, lambda m: ops.negative(m.x), is_float),
    Rule("negative_negative", of(ops.negative, -x), _x),
    Rule("multiply_one", x * 1, _x),
    Rule("multiply_zero", x * 0, _zero, not_float),
    Rule("multiply_minus_one", x * -1, lambda m: ops.negative(m.x)),
    Rule("multiply_negatives", (-x) * -y, lambda m: ops.multiply(m.x, m.y)),
    Rule("multiply_constants", (x * c) * d, _join_constants, not_float),
]

# ---- division -------------------------------------------------------------------------------

SMALLEST_EXPONENT = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}


def _exact_reciprocal(value: float, dtype: DType) -> float | None:
    """1 / value where value is a power of two and the result a normal number of the dtype."""
    if not math.isfinite(value) or abs(math.frexp(value)[0]) != 0.5:
        return None
    exponent = math.frexp(1 / value)[1] - 1
    smallest = SMALLEST_EXPONENT.get(dtype.name)
    if smallest is None or not smallest <= exponent <= 1 - smallest:
        return None
    return 1 / value


def _multiply_reciprocal(m: Match) -> Node | None:
    inverse = _exact_reciprocal(value_of(m.c), m.x.dtype)
    return None if inverse is None else ops.multiply(m.x, build.like(m.x, inverse))


def _power_of_two(m: Match) -> bool:
    value = value_of(m.c)
    return is_integer(m) and value > 0 and int(value) & (int(value) - 1) == 0


def _shift(m: Match) -> Node:
    """Arithmetic shifts round towards -inf, as floor division does."""
    return ops.shift_right(m.x, build.like(m.x, int(value_of(m.c)).bit_length() - 1))


def _mask(m: Match) -> Node:
    """The low bits are the remainder in two's complement, for either sign of x."""
    return ops.bit_and(m.x, build.like(m.x, value_of(m.c) - 1))


DIVISION = [
    Rule("divide_one", x / 1, _x),
    Rule("divide_power_of_two", x / c, _multiply_reciprocal),
    Rule("one_divide", 1 / x, lambda m: ops.reciprocal(m.x)),
    Rule("floor_divide_one", x // 1, _x, not_float),
    Rule("floor_divide_power_of_two", x // c, _shift, _power_of_two),
    Rule("remainder_one", x % 1, _zero, not_float),
    Rule("remainder_power_of_two", x % c, _mask, _power_of_two),
]

# ---- powers ---------------------------------------------------------------------------------

# A constant exponent of 0.5 means the square root, as in NumPy and PyTorch (-inf gives nan).


POWER = [
    Rule("power_zero", x**0, lambda m: build.like(m.x, 1)),
    Rule("power_one", x**1, _x),
    Rule("power_two", x**2, lambda m: ops.multiply(m.x, m.x), not_bool),
    Rule("power_minus_one", x**-1, lambda m: ops.reciprocal(m.x), is_float),
    Rule("power_half", x**0.5, lambda m: ops.square_root(m.x), is_float),
    Rule("absolute_absolute", of(ops.absolute, of(ops.absolute, x, name="y")), lambda m: m.y),
    Rule(
        "absolute_negative",
        of(ops.absolute, -x),
        lambda m: ops.absolute(m.x),
        lambda m: m.x.dtype.kind != "uint",
    ),
]

# ---- comparisons, extremes, bits, where -----------------------------------------------------


def _exact(m: Match) -> bool:
    return not m.x.dtype.is_float


def _true(m: Match) -> Node:
    return build.full(m.root.shape, True, bool_)


def _false(m: Match) -> Node:
    return build.full(m.root.shape, False, bool_)


COMPARE = [
    Rule("equal_self", of(ops.equal, x, x), _true, _exact),
    Rule("not_equal_self", of(ops.not_equal, x, x), _false, _exact),
    Rule("less_self", of(ops.less, x, x), _false),
    Rule("less_equal_self", of(ops.less_equal, x, x), _true, _exact),
    Rule("maximum_self", of(ops.maximum, x, x), _x),
    Rule("minimum_self", of(ops.minimum, x, x), _x),
    Rule("maximum_absorb", of(ops.maximum, x, of(ops.maximum, x, y, name="z")), lambda m: m.z),
    Rule("minimum_absorb", of(ops.minimum, x, of(ops.minimum, x, y, name="z")), lambda m: m.z),
    Rule("maximum_lowest", of(ops.maximum, x, c), _x, lambda m: value_of(m.c) == m.x.dtype.lowest),
    Rule(
        "minimum_highest", of(ops.minimum, x, c), _x, lambda m: value_of(m.c) == m.x.dtype.highest
    ),
]

BITS = [
    Rule("and_self", x & x, _x),
    Rule("or_self", x | x, _x),
    Rule("xor_self", x ^ x, _zero),
    Rule("and_zero", x & 0, _zero),
    Rule("or_zero", x | 0, _x),
    Rule("xor_zero", x ^ 0, _x),
    Rule("and_ones", x & c, _x, lambda m: value_of(m.c) == _all_ones(m.x.dtype)),
    Rule("or_ones", x | c, lambda m: m.c, lambda m: value_of(m.c) == _all_ones(m.x.dtype)),
    Rule("not_not", ~~x, _x),
    Rule("shift_zero", of((ops.shift_left, ops.shift_right), x, 0), _x),
]


def _all_ones(dtype: DType) -> int:
    return int(dtype.highest) if dtype.kind in ("bool", "uint") else -1


WHERE = [
    Rule("where_constant", of(ops.where, c, x, y), lambda m: m.x if value_of(m.c) else m.y),
    Rule("where_equal", of(ops.where, z, x, x), _x),
    Rule("where_not", of(ops.where, ~z, x, y), lambda m: ops.where(m.z, m.y, m.x)),
    Rule(
        "where_true_false", of(ops.where, z, 1, 0), lambda m: m.z, lambda m: m.root.dtype is bool_
    ),
    Rule(
        "where_false_true",
        of(ops.where, z, 0, 1),
        lambda m: ops.bit_not(m.z),
        lambda m: m.root.dtype is bool_,
    ),
    Rule(
        "where_inner_then",
        of(ops.where, z, of(ops.where, z, x, any_("_")), y),
        lambda m: ops.where(m.z, m.x, m.y),
    ),
    Rule(
        "where_inner_else",
        of(ops.where, z, x, of(ops.where, z, any_("_"), y)),
        lambda m: ops.where(m.z, m.x, m.y),
    ),
]

# ---- casts ----------------------------------------------------------------------------------

# (bits of significand, largest exponent, smallest exponent of a subnormal)
FLOATS = {
    "float8_e5m2": (3, 15, -16),
    "float8_e4m3": (4, 8, -9),
    "float16": (11, 15, -24),
    "bfloat16": (8, 127, -133),
    "float32": (24, 127, -149),
    "float64": (53, 1023, -1074),
}


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if narrow is wide or narrow.kind == "bool":
        return True
    if wide.kind == "bool":
        return False
    if wide.is_integer:
        if not narrow.is_integer:
            return False
        return bool(wide.lowest <= narrow.lowest and narrow.highest <= wide.highest)
    digits, largest, smallest = FLOATS[wide.name]
    if narrow.is_integer:
        bits = narrow.bits - (narrow.kind == "int")
        return bits <= digits and narrow.bits <= largest
    inner = FLOATS[narrow.name]
    if wide.name == "float8_e4m3":  # has no inf
        return False
    return inner[0] <= digits and inner[1] <= largest and inner[2] >= smallest


def _cast_once(m: Match) -> Node | None:
    """cast(cast(x)) is one cast where the first loses nothing, or only bits the last drops."""
    first, middle, last = m.x.dtype, m.y.dtype, m.root.dtype
    if holds(middle, first):
        # what a float out of an integer's range becomes is the machine's choice: keep it
        keep = first.is_float and last.is_integer and middle is not first
        return None if keep else build.cast(m.x, last)
    wraps = first.is_integer and middle.is_integer and last.is_integer
    if wraps and last.bits <= middle.bits and min(first.bits, last.bits) >= 8:
        return build.cast(m.x, last)
    return None


CAST = [
    Rule("cast_same", of(ops.cast, x), lambda m: m.x if m.x.dtype is m.root.dtype else None),
    Rule("cast_cast", of(ops.cast, of(ops.cast, x, name="y")), _cast_once),
    Rule("bitcast_same", of(ops.bitcast, x), lambda m: m.x if m.x.dtype is m.root.dtype else None),
    Rule(
        "bitcast_bitcast",
        of(ops.bitcast, of(ops.bitcast, x)),
        lambda m: ops.bitcast(m.x, dtype=m.root.dtype),
        lambda m: bool_ not in _dtypes(m.root),
    ),
]


def _dtypes(node: Node) -> list[DType]:
    found = [node.dtype]
    while node.op is ops.bitcast:
        node = node.inputs[0]
        found.append(node.dtype)
    return found


# ---- control --------------------------------------------------------------------------------


def _branch(m: Match) -> Node | None:
    """The result of the branch a constant condition takes."""
    node = m.x
    if not ops.is_constant(node.inputs[0]):
        return None
    block = node.blocks[0 if value_of(node.inputs[0]) else 1]
    return build.inline(block, node.inputs[1:])[m.root.attrs["index"]]


def _carry(m: Match) -> Node | None:
    """A carry that no step changes, or of a loop without steps, is its first value."""
    loop, index = m.x, m.root.attrs["index"]
    if index >= loop.attrs["carries"]:
        return None
    body = loop.blocks[-1]
    same = body.results[index] is body.arguments[index]
    never = loop.op is ops.scan and loop.attrs["length"] == 0
    return loop.inputs[index] if same or never else None


def _sorted_one(m: Match) -> Node | None:
    """Sorting one element."""
    source = m.x.inputs[0]
    if source.shape[m.x.attrs["axis"]] != 1:
        return None
    return source if m.root.attrs["index"] == 0 else build.like(m.root, 0)


CONTROL = [
    Rule("get_branch", of(ops.get, any_("x", ops=ops.cond)), _branch),
    Rule("get_carry", of(ops.get, any_("x", ops=(ops.scan, ops.while_loop))), _carry),
    Rule("get_sorted_one", of(ops.get, any_("x", ops=ops.sort)), _sorted_one),
]

SIMPLIFY = RuleSet(
    "simplify",
    [*FOLD, *ARITHMETIC, *DIVISION, *POWER, *COMPARE, *BITS, *WHERE, *CAST, *CONTROL, *MOVEMENT],
)
STRIP = RuleSet("strip", [Rule("stop_gradient", of(ops.stop_gradient, x), _x)])
