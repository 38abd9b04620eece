"""How large a value can be in size, where the ops that compute it show that.

An angle that is known to be small needs no way for large ones (`scope.Machine.rarely`).
Invariant: in no run is a value that is a number larger in size than what is found for it.
"""

from __future__ import annotations

import math

from ..ir.node import Node
from .scope import ANGLE_LIMITS

DEPTH = 12  # ops that are looked through
SAME = ("broadcast", "reshape", "transpose", "part", "extract", "negative", "absolute")
UNIT = ("sin", "cos", "tanh", "erf", "sign")
EITHER = ("where", "maximum", "minimum")


def near_angle(node: Node) -> bool:
    """Whether a Node is a function of an angle that is always near."""
    if node.op.name not in ("sin", "cos", "tan"):
        return False
    limit = ANGLE_LIMITS["float64" if node.dtype.bits == 64 else "float32"]
    return most(node.inputs[0]) < limit


def most(node: Node, depth: int = DEPTH) -> float:
    """A bound of |x|, infinite where none is known."""
    name, inputs = node.op.name, node.inputs
    if name == "constant":
        value = abs(float(node.attrs["value"]))
        return math.inf if math.isnan(value) else value
    if depth == 0:
        return math.inf
    if name in SAME:
        return most(inputs[0], depth - 1)
    if name in UNIT:
        return 1.0
    if name in EITHER:
        return max(most(i, depth - 1) for i in inputs[-2:])
    if node.dtype.is_integer:
        return _most_integer(node, depth)
    if name == "cast":
        return _rounded_up(most(inputs[0], depth - 1))
    if name in ("add", "subtract", "multiply"):
        a, b = (most(i, depth - 1) for i in inputs)
        found = a * b if name == "multiply" else a + b
        return math.inf if math.isnan(found) else _rounded_up(found)
    return math.inf


def _rounded_up(bound: float) -> float:
    """What rounding to the narrowest float may make of it."""
    return bound * 1.25


def _most_integer(node: Node, depth: int) -> float:
    own = float(node.dtype.highest) + 1
    if node.dtype.kind != "uint":
        if node.op.name == "cast" and node.inputs[0].dtype.kind in ("uint", "bool"):
            return min(own, most(node.inputs[0], depth - 1))
        return own
    if node.op.name in ("shift_right", "bit_and"):
        other = node.inputs[1]
        while other.op.name == "broadcast":
            other = other.inputs[0]
        if other.op.name == "constant":
            value = int(other.attrs["value"])
            return own / 2.0**value if node.op.name == "shift_right" else float(value)
    return own
