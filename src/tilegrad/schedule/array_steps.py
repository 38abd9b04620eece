"""Values of a Region as steps of an array's vector unit, read from the Graph.

Integers wrap at 32 bits, as the unit does. What storing would have to wrap to 8 bits is refused,
which the ranges of values tell; a product with rounding is written in int64 and ends in int32.
Invariant: the steps give the Graph's values to the bit; what has none raises Refused with words
that follow "the array".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import DType, int8, int32, int64
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from .access import MOVEMENT, base_of
from .region import reduce_split

VECTOR = {
    ops.add: "add",
    ops.subtract: "sub",
    ops.maximum: "max",
    ops.minimum: "min",
    ops.multiply: "mul",
}
ALONG = {ops.sum_: "row_sum", ops.max_: "row_max"}
ORDERED = ("max", "min")
WRAPS = 1 << 31
Range = tuple[int, int]
Found = tuple[Any, Range]  # a reference, ('v', what) or ('#', number), and its range


class Refused(Exception):
    """Why the array does not compute something."""


def bounds(dtype: DType) -> Range:
    """The least and the largest integer of a DType."""
    return int(dtype.lowest), int(dtype.highest)


def takes_product(node: Node, target: Target) -> str:
    """Why the array has no product like a dot; '' if it has."""
    unit = target.array
    if unit is None:
        return "no array"
    kinds = tuple(i.dtype for i in node.inputs)
    if not any(kinds in (one.inputs, one.inputs[::-1]) for one in target.array_rates):
        known = dict.fromkeys(" by ".join(k.name for k in u.inputs) for u in target.array_rates)
        return f"multiplies {' or '.join(known)}, not {' by '.join(k.name for k in kinds)}"
    stored = (unit.accumulator, *unit.inputs[: unit.accumulator.is_float])
    if node.dtype not in stored:
        return f"sums are {unit.accumulator.name}, not {node.dtype.name}"
    if not high(node.size) or not all(high(i.size) for i in node.inputs):
        return "there is nothing to sum"
    return ""


class Reader:
    """Writes the values of a Region as steps of the vector unit; raises Refused where it cannot."""

    def __init__(
        self, values: Sequence[Node], leaves: set[Node], target: Target, dot: Node | None
    ) -> None:
        self.inside = set(values)
        self.leaves, self.target, self.dot = leaves, target, dot
        self.known: dict[Node, Found] = {}
        self.operands: list[Node] = []  # of the vector unit, as they are moved
        self.steps: list[tuple[str, Any, Any, int]] = []
        unit = target.array
        self.wide = int32 if unit is None else unit.accumulator

    def value(self, node: Node) -> Found:
        """The value of a Node, found once."""
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: Node) -> Found:
        if node is self.dot:
            return ("product",), bounds(int32)
        if self.wide is not int32:  # subnormal numbers differ from the host's
            raise Refused(
                f"keeps {node.op.name} of floats to the host, which has subnormal numbers"
            )
        if node.op is ops.constant:
            return self._constant(node)
        base, moves = node, []
        while base not in self.leaves and base.op in MOVEMENT and base is not self.dot:
            if base in self.inside and base is not node:
                break
            moves.append(base)
            base = base.inputs[0]
        if base in self.leaves:
            return self._operand(node)
        if base is not node:  # a value of the Region itself, read at its own element
            if base.op is ops.constant and base.size == 1:
                return self._constant(base)
            if any(n.op in (ops.pad, ops.windows) for n in moves):
                raise Refused("has no padding of sums")
            return self.value(base)
        if node.op is ops.cast:
            return self._cast(node)
        if node.op is ops.where:
            return self._chosen(node)
        if node.op in ALONG:
            return self._along(node)
        if node.op is ops.fixed:
            return self._one(node.attrs["kind"], node.inputs[0])
        if node.op not in VECTOR:
            raise Refused(f"has no {node.op.name}")
        first, second = node.inputs
        return self._step(node, VECTOR[node.op], first, second)

    def _along(self, node: Node) -> Found:
        """A sum or the largest of each row."""
        split = reduce_split(node)
        if node.dtype is not int32 or split is None or split[1] != "row":
            raise Refused(f"has no {node.op.name} of {node.dtype.name} but along rows of int32")
        return self._one(ALONG[node.op], node.inputs[0])

    def _one(self, kind: str, node: Node, number: int = 0, shift: int = 0) -> Found:
        """A step of one value and a number."""
        found, within = self.value(node)
        if found[0] == "#":
            raise Refused("has no numbers alone")
        self.steps.append((kind, found, ("#", number), shift))
        return ("step", len(self.steps) - 1), within if kind == "row_max" else bounds(int32)

    def _chosen(self, node: Node) -> Found:
        """The smaller or the larger of two that a `where` compares."""
        test, first, second = node.inputs
        if test.op is not ops.less and test.op is not ops.less_equal:
            raise Refused(f"has no where by {test.op.name}")
        if test.inputs == (first, second):
            return self._step(node, "min", first, second)
        if test.inputs == (second, first):
            return self._step(node, "max", first, second)
        raise Refused("has no where but of the larger or smaller")

    def _constant(self, node: Node) -> Found:
        value = node.attrs["value"]
        if node.dtype.kind != "int" or not -WRAPS <= int(value) < WRAPS:
            raise Refused(f"has no {node.dtype.name}")
        return ("#", int(value)), (int(value), int(value))

    def _operand(self, node: Node) -> Found:
        if node.dtype not in (int8, int32) or self.wide is not int32:
            raise Refused(f"has no {node.dtype.name}")
        if node not in self.operands:
            self.operands.append(node)
        return ("operand", node), bounds(node.dtype)

    def _cast(self, node: Node) -> Found:
        inner = node.inputs[0]
        if node.dtype is int32 and inner.dtype is int64:
            return self._scaled(inner)
        if node.dtype not in (int8, int32) or inner.dtype not in (int8, int32):
            raise Refused(f"has no cast from {inner.dtype.name} to {node.dtype.name}")
        value, (least, most) = self.value(inner)
        low, up = bounds(node.dtype)
        if least < low or most > up:
            raise Refused(f"wraps nothing to {node.dtype.name}: values may be {least} to {most}")
        return value, (least, most)

    def _scaled(self, node: Node) -> Found:
        """(int64(a) * int64(b) + half) >> shift: a product with rounding; b may be 1."""
        shift = 0
        if node.op is ops.shift_right:
            shift = self._number(node.inputs[1])
            node = node.inputs[0]
            if not 0 < shift <= 46:
                raise Refused(f"shifts by 1 to 46, not {shift}")
            if node.op is not ops.add or self._number(node.inputs[1]) != 1 << (shift - 1):
                raise Refused("rounds to the nearest where it shifts")
            node = node.inputs[0]
        if shift and node.op is ops.cast:
            return self._one("mul", self._narrowed(node), 1, shift)
        if node.op is not ops.multiply or node.dtype is not int64:
            raise Refused(f"has no {node.op.name} of int64")
        first, second = (self._narrowed(i) for i in node.inputs)
        return self._step(node, "mul", first, second, shift)

    def _number(self, node: Node) -> int:
        node = base_of(node)
        if node.op is not ops.constant:
            raise Refused("has no shift that differs")
        return int(node.attrs["value"])

    def _narrowed(self, node: Node) -> Node:
        """What an int64 is the cast of, through movement."""
        moves = []
        while node.op in MOVEMENT and node not in self.leaves:
            moves.append(node)
            node = node.inputs[0]
        if node.op is ops.constant:
            return node
        if node.op is not ops.cast or node.inputs[0].dtype not in (int8, int32):
            raise Refused("has no int64")
        found = node.inputs[0]
        for one in reversed(moves):
            found = one.op.make((found,), one.attrs)
        return found

    def _step(self, node: Node, kind: str, first: Node, second: Node, shift: int = 0) -> Found:
        if node.dtype is not int32 and not shift and not (kind in ORDERED and node.dtype is int8):
            if not (kind == "mul" and node.dtype is int64):
                raise Refused(f"has no {node.op.name} of {node.dtype.name}")
        (a, left), (b, right) = self.value(first), self.value(second)
        if a[0] == "#":
            if kind == "sub":
                raise Refused("has no number less a value")
            a, b, left, right = b, a, right, left
        if a[0] == "#":
            raise Refused("has no numbers alone")
        self.steps.append((kind, a, b, shift))
        return ("step", len(self.steps) - 1), _range(kind, left, right)


def _range(kind: str, a: Range, b: Range) -> Range:
    if kind == "max":
        return max(a[0], b[0]), max(a[1], b[1])
    if kind == "min":
        return min(a[0], b[0]), min(a[1], b[1])
    return bounds(int32)
