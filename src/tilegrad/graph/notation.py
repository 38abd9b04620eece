"""How Rules over the Graph are written: operators, numbers, constants and ops by category.

Importing this file lets patterns say `x + 0` and mean the Graph's add and a constant zero.
A number matches a constant of that value through movement that only repeats it; zero matches
the zero of its own sign, since x + 0.0 is not x where x is -0.0.
Invariant: `fold` gives the very value the interpreter gives.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.dtype import DType
from ..ir.node import Node, Op
from ..ir.pattern import LIFT, OPERATORS, Match, Pattern, any_
from . import build, ops


def ops_of(*names: str) -> tuple[Op, ...]:
    """The ops of some categories."""
    return tuple(op for op in ops.graph.ops.values() if op.category in names)


UNARY = ops_of("unary")
BINARY = ops_of("binary", "compare")
TERNARY = ops_of("ternary")
REDUCE = (ops.sum_, ops.prod, ops.max_, ops.min_)
REPEATS = (ops.constant, ops.expand, ops.reshape, ops.permute)  # what a constant may look like

OPERATORS.update(
    {
        "+": ops.add,
        "-": ops.subtract,
        "*": ops.multiply,
        "/": ops.divide,
        "**": ops.power,
        "//": ops.floor_divide_,
        "%": ops.remainder,
        "neg": ops.negative,
        "~": ops.bit_not,
        "&": ops.bit_and,
        "|": ops.bit_or,
        "^": ops.bit_xor,
    }
)


def number(value: float) -> Pattern:
    """A constant equal to the number, zeros told apart by sign."""

    def _equals(node: Node) -> bool:
        found = ops.constant_value(node)
        if found is None or found != value:
            return False
        return found != 0 or math.copysign(1, found) == math.copysign(1, value)

    return Pattern(None, _equals, REPEATS)


def constant(name: str) -> Pattern:
    """Any constant, bound to the name."""
    return any_(name, ops.is_constant, REPEATS)


if not LIFT:
    LIFT.append(number)


# ---- questions Rules ask --------------------------------------------------------------------


def is_float(match: Match) -> bool:
    """Whether the matched Node is of floats."""
    return bool(match.root.dtype.is_float)


def not_float(match: Match) -> bool:
    """Whether the matched Node is of integers or bools: exact arithmetic."""
    return not match.root.dtype.is_float


def is_integer(match: Match) -> bool:
    """Whether the matched Node is of integers that every op supports (int4 is storage)."""
    dtype = match.root.dtype
    return bool(dtype.is_integer and dtype.bits >= 8)


def not_bool(match: Match) -> bool:
    """Whether the matched Node is of numbers."""
    return bool(match.root.dtype.kind != "bool")


# ---- constant folding -----------------------------------------------------------------------


def fold(op: Op, values: list[Node], attrs: dict[str, Any]) -> Node | None:
    """The op on constants as a scalar constant, or None where its value is not defined."""
    scalars = tuple([_scalar(v) for v in values])
    if op is ops.cast and not _defined_cast(scalars[0], attrs["dtype"]):
        return None
    from .interpret import interpret  # not needed where nothing is constant

    node = op.make(scalars, attrs)
    (found,) = interpret([node], {})
    value = found.item() if hasattr(found, "item") else found[()]
    if node.dtype.is_float and math.isnan(value):
        value = math.nan  # one nan, so that equal constants are one Node
    return build.constant(value, node.dtype)


def _scalar(node: Node) -> Node:
    while node.op is not ops.constant:
        node = node.inputs[0]
    return node


def _defined_cast(source: Node, dtype: DType) -> bool:
    """Whether a constant's cast means the same on every machine."""
    value = source.attrs["value"]
    if not (source.dtype.is_float and dtype.is_integer):
        return True
    return math.isfinite(value) and dtype.lowest <= math.trunc(value) <= dtype.highest


def fold_root(match: Match) -> Node | None:
    """The matched op on constants, repeated to its shape."""
    root = match.root
    value = fold(root.op, list(root.inputs), root.attrs)
    return None if value is None else build.broadcast_to(value, root.shape)
