"""Bounds and divisors of integer values of a Body: what fits 32 bits, what is aligned.

Invariant: a value lies within the bounds found for it in every run with the Body's grid and
Symbols, and is a multiple of its divisor.

`most` says how large a value can be in size, where the ops that compute it show that: an angle that
is known to be small needs no way for large ones (`scope.Machine.rarely`). In no run is a value that
is a number larger in size than what is found for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import Size, high, low
from .build import Body
from .row import constant_of
from .scope import TABLES

Range = tuple[int, int]
WIDE: Range = (-(1 << 63), (1 << 63) - 1)
INT32: Range = (-(1 << 31), (1 << 31) - 1)


SAME = ("broadcast", "reshape", "transpose", "extract", "part")
EXTREMES = ("max", "min")


GUESSES = 3  # at what a loop carries


def hull(*ranges: Range) -> Range:
    """The least range that holds all of some."""
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


class Bounds:
    """Ranges and divisors by Node."""

    def __init__(self, body: Body) -> None:
        self.grid = body.grid
        self.ranges: dict[Node, Range] = {}
        self.divisors: dict[Node, int] = {}
        self._walk(body.block)

    def narrow(self, node: Node) -> bool:
        """Whether an int64 value always fits 32 bits."""
        a, b = self.range(node)
        return INT32[0] <= a and b <= INT32[1]

    def range(self, node: Node) -> Range:
        """The least and the most a value can be."""
        return self.ranges.get(node, WIDE)

    def divisor(self, node: Node) -> int:
        """A number that divides the value; 0 for the value 0."""
        return self.divisors.get(node, 1)

    def _walk(self, block: Block) -> None:
        for node in block.nodes:
            if node.op.name == "loop":
                index = node.blocks[0].arguments[0]
                start, stop = self.range(node.inputs[0]), self.range(node.inputs[1])
                self.ranges[index] = (start[0], max(start[0], stop[1] - 1))
                self.divisors[index] = math.gcd(self.divisor(node.inputs[0]), node.attrs["step"])
                self._carried(node)
            for inner in node.blocks:
                self._walk(inner)
            if not node.blocks and getattr(node.type, "dtype", None) is not None:
                if node.dtype.is_integer:
                    self._visit(node)

    def _carried(self, loop: Node) -> None:
        """Ranges of the whole numbers that a loop carries: a range that holds what the loop begins
        with, and what a trip that begins within it ends with, holds all trips."""
        block = loop.blocks[0]
        carried = [
            (a, given, result)
            for a, given, result in zip(block.arguments[1:], loop.inputs[2:], block.results)
            if a.shape == () and a.dtype.is_integer
        ]
        if not carried:
            return
        for a, given, _ in carried:
            self.ranges[a] = self.range(given)
        guesses = 0
        while True:
            self._walk(block)
            wider = {a: hull(self.ranges[a], self.range(result)) for a, _, result in carried}
            moving = [a for a, found in wider.items() if self.ranges[a] != found]
            if not moving:
                return
            guesses += 1
            self.ranges.update({a: wider[a] if guesses < GUESSES else of_dtype(a) for a in moving})

    def _visit(self, node: Node) -> None:
        self.ranges[node] = node_range(node, self.ranges, self.grid)
        self.divisors[node] = self._divide(node, node.op.name)

    def _divide(self, node: Node, name: str) -> int:
        given = [self.divisor(i) for i in node.inputs]
        if name == "constant":
            return abs(int(node.attrs["value"]))
        if name == "symbol":
            return divisor_of(node.attrs["value"])
        if name in ("add", "subtract", "minimum", "maximum"):
            return math.gcd(*given)
        if name == "multiply":
            return given[0] * given[1]
        if name in (*SAME, "cast"):
            return given[0]
        if name == "where":
            return math.gcd(given[1], given[2])
        if name in ("remainder", "unsigned_remainder"):
            return math.gcd(given[0], given[1])
        return 1


def divisor_of(size: Size) -> int:
    """A number that divides a Size whatever its Symbols are; 0 for the Size 0."""
    if isinstance(size, int):
        return abs(size)
    if size.kind == "sum":
        found = abs(size.constant)
        for product, factor in size.terms:
            found = math.gcd(found, math.prod((divisor_of(a) for a in product), start=factor))
        return found
    if size.kind in ("min", "max"):
        return math.gcd(*(divisor_of(a) for a in size.args))
    return 1


def of_dtype(node: Node) -> Range:
    """What an integer of a dtype can be."""
    return int(node.dtype.lowest), int(node.dtype.highest)


def node_range(node: Node, known: Mapping[Node, Range], grid: Sequence[Size]) -> Range:
    """The least and the most that elements of an integer tile can be, by what is known of its
    inputs."""
    name, ranges = node.op.name, [known.get(i, WIDE) for i in node.inputs]
    source = node.inputs[0] if node.inputs else node
    found = range_of(name, ranges) if node.inputs else leaf_range(node, grid)
    if name == "where":
        found = hull(*ranges[1:])
    if name in SAME or (name in ("reduce", "cumulative") and node.attrs["kind"] in EXTREMES):
        found = ranges[0]
    if name in ("reduce", "cumulative") and node.attrs["kind"] == "sum":
        least, most = ranges[0]
        count = source.shape[node.attrs["axis"]]
        found = (min(least, count * least), max(most, count * most))
    if name == "get":
        number = node.attrs["index"]
        given = [b.results[number] for b in source.blocks]
        if source.op.name == "loop":
            given.append(source.blocks[0].arguments[1 + number])
        found = hull(*[known.get(value, WIDE) for value in given])
    if name in ("stack", "stack_rows"):
        found = hull(*ranges)
    if name == "cast" and source.dtype.is_integer:
        found = known.get(source, of_dtype(source))
    if name == "cast" and source.dtype.kind == "bool":
        found = (0, 1)
    limit = of_dtype(node)
    if found is None or found[0] < limit[0] or found[1] > limit[1]:
        return limit
    return found


def leaf_range(node: Node, grid: Sequence[Size]) -> Range | None:
    """The range of a Node without inputs."""
    name, attrs = node.op.name, node.attrs
    if name == "constant":
        return (int(attrs["value"]), int(attrs["value"]))
    if name == "iota":
        return (0, attrs["size"] - 1)
    if name == "program":
        return (0, max(0, high(grid[attrs["axis"]]) - 1))
    if name == "cluster_rank":
        return (0, 15)
    if name == "symbol":
        return (low(attrs["value"]), high(attrs["value"]))
    return None


def range_of(name: str, r: Sequence[Range]) -> Range | None:
    """The range of an elementwise op from those of its operands."""
    if name == "add":
        return (r[0][0] + r[1][0], r[0][1] + r[1][1])
    if name == "subtract":
        return (r[0][0] - r[1][1], r[0][1] - r[1][0])
    if name == "multiply":
        corners = [a * b for a in r[0] for b in r[1]]
        return (min(corners), max(corners))
    if name in ("minimum", "maximum"):
        pick = min if name == "minimum" else max
        return (pick(r[0][0], r[1][0]), pick(r[0][1], r[1][1]))
    if name == "floor_divide" and r[1][0] > 0:
        corners = [a // b for a in r[0] for b in r[1]]
        return (min(corners), max(corners))
    positive = len(r) == 2 and r[0][0] >= 0 and r[1][0] > 0
    if positive and name == "unsigned_divide":
        return (r[0][0] // r[1][1], r[0][1] // r[1][0])
    if positive and name in ("remainder", "unsigned_remainder"):
        return (0, min(r[0][1], r[1][1] - 1))
    if name == "bit_and" and len(r) == 2 and r[0][0] >= 0 and r[1][0] >= 0:
        return (0, min(r[0][1], r[1][1]))
    if name == "shift_right" and r[0][0] >= 0 and r[1][0] >= 0:
        return (0, r[0][1] >> min(63, r[1][0]))
    return None


# ---- sizes of values ----------------------------------------------------------------------------


DEPTH = 12  # ops that are looked through
UNIT = ("sin", "cos", "tanh", "erf", "sign")
EITHER = ("where", "maximum", "minimum")


def near_angle(node: Node) -> bool:
    """Whether a Node is a function of an angle that is always near."""
    if node.op.name not in ("sin", "cos", "tan"):
        return False
    limit = TABLES[max(32, node.dtype.bits)].angle_limit
    return most(node.inputs[0]) < limit


def most(node: Node, depth: int = DEPTH) -> float:
    """A bound of |x|, infinite where none is known."""
    name, inputs = node.op.name, node.inputs
    if name == "constant":
        value = abs(float(node.attrs["value"]))
        return math.inf if math.isnan(value) else value
    if depth == 0:
        return math.inf
    if name in (*SAME, "negative", "absolute"):
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
        value = constant_of(node.inputs[1])
        if value is not None:
            return own / 2.0**value if node.op.name == "shift_right" else float(value)
    return own
