"""Bounds and divisors of integer values of a Body: what fits 32 bits, what is aligned.

Invariant: a value lies within the bounds found for it in every run with the Body's grid and
Symbols, and is a multiple of its divisor.

`Bounds.most` says how large a float can be in size, where the ops that compute it show that: an
angle that is known to be small needs no way for large ones (`scope.Machine.rarely`). In no run is a
value that is a number larger in size than what is found for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import Size, high, low, terms_of
from ..ir.types import Tile
from .build import Body
from .scalars import ARITHMETIC
from .scope import TABLES

Range = tuple[int, int]
WIDE: Range = (-(1 << 63), (1 << 63) - 1)
INT32: Range = (-(1 << 31), (1 << 31) - 1)


SAME = ("broadcast", "reshape", "transpose", "extract", "part", "stack", "stack_rows")
EXTREMES = ("max", "min")
# Ops whose extremes stand at the ends of their operands, and those that keep what divides both.
MONOTONE = ("add", "subtract", "multiply", "minimum", "maximum")
LINEAR = ("add", "subtract", "minimum", "maximum", "remainder", "unsigned_remainder")
GUESSES = 3  # at what a loop carries
DEPTH = 12  # ops that are looked through for the size of a float
UNIT = ("sin", "cos", "tanh", "erf", "sign")
LIKE = ("negative", "absolute", "maximum", "minimum")  # no larger in size than their operands
ROUNDED = ("cast", "add", "subtract", "multiply")  # a quarter more, in the narrowest float


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
        return known_range(node, self.ranges)

    def divisor(self, node: Node) -> int:
        """A number that divides the value; 0 for the value 0."""
        return self.divisors.get(node, 1)

    def near_angle(self, node: Node) -> bool:
        """Whether a Node is a function of an angle that is always near."""
        if node.op.name not in ("sin", "cos", "tan"):
            return False
        return self.most(node.inputs[0]) < TABLES[max(32, node.dtype.bits)].angle_limit

    def most(self, node: Node, depth: int = DEPTH) -> float:
        """A bound of |x|, infinite where none is known."""
        name = node.op.name
        if node.dtype.is_integer:
            return max(map(abs, self.range(node)))
        if name == "constant":
            value = abs(float(node.attrs["value"]))
            return math.inf if math.isnan(value) else value
        if depth == 0:
            return math.inf
        if name in UNIT:
            return 1.0
        if name in ROUNDED:
            sizes = [self.most(i, depth - 1) for i in node.inputs]
            found = 1.25 * (math.prod(sizes) if name == "multiply" else sum(sizes))
            return math.inf if math.isnan(found) else found
        given = node.inputs if name in LIKE else chosen_from(node)
        return max((self.most(i, depth - 1) for i in given), default=math.inf)

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
            if not node.blocks and is_integer(node):
                self.ranges[node] = node_range(node, self.ranges, self.grid)
                self.divisors[node] = self._divide(node)

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

    def _divide(self, node: Node) -> int:
        name, chosen = node.op.name, chosen_from(node)
        if name == "constant":
            return abs(int(node.attrs["value"]))
        if name == "symbol":
            return divisor_of(node.attrs["value"])
        given = [self.divisor(i) for i in chosen or node.inputs]
        if name == "multiply":
            return math.prod(given)
        return math.gcd(*given) if chosen or name in LINEAR else 1


def divisor_of(size: Size) -> int:
    """A number that divides a Size whatever its Symbols are; 0 for the Size 0."""
    if isinstance(size, int) or size.kind == "sum":
        terms, constant = terms_of(size)
        given = [math.prod(map(divisor_of, product), start=factor) for product, factor in terms]
        return math.gcd(constant, *given)
    if size.kind in ("min", "max"):
        return math.gcd(*map(divisor_of, size.args))
    return 1


def is_integer(node: Node) -> bool:
    """Whether a Node is a tile of integers."""
    return isinstance(node.type, Tile) and node.dtype.is_integer


def of_dtype(node: Node) -> Range:
    """What an integer (or a bool) of a dtype can be."""
    return int(node.dtype.lowest), int(node.dtype.highest)


def chosen_from(node: Node) -> Sequence[Node]:
    """The values of which every element of a Node is an element; none where it is computed."""
    name, inputs = node.op.name, node.inputs
    if name == "where":
        return inputs[1:]
    if name == "cast":
        return () if inputs[0].dtype.is_float else inputs
    if name == "get":
        source, number = inputs[0], node.attrs["index"]
        given = [b.results[number] for b in source.blocks]
        if source.op.name == "loop":
            given.append(source.blocks[0].arguments[1 + number])
        return given
    return inputs if name in SAME or node.attrs.get("kind") in EXTREMES else ()


def known_range(node: Node, known: Mapping[Node, Range]) -> Range:
    """What is known of a value, else all that its dtype has."""
    return known.get(node) or (WIDE if node.dtype.is_float else of_dtype(node))


def node_range(node: Node, known: Mapping[Node, Range], grid: Sequence[Size]) -> Range:
    """The least and the most that elements of an integer tile can be, by what is known of its
    inputs."""
    chosen = chosen_from(node)
    given = [known_range(i, known) for i in chosen or node.inputs]
    if chosen:
        found: Range | None = hull(*given)
    elif node.attrs.get("kind") == "sum":
        (least, most), count = given[0], node.inputs[0].shape[node.attrs["axis"]]
        found = (min(least, count * least), max(most, count * most))
    elif len(given) == 2:
        found = range_of(node.op.name, *given)
    else:
        found = leaf_range(node, grid)
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


def range_of(name: str, a: Range, b: Range) -> Range | None:
    """The range of an elementwise op from those of its operands."""
    natural, divides = a[0] >= 0 and b[0] >= 0, b[0] > 0
    if (
        name in MONOTONE
        or (name == "floor_divide" and divides)
        or (name == "unsigned_divide" and natural and divides)
        or (name == "shift_right" and natural)
    ):
        corners = [ARITHMETIC[name](x, y) for x in a for y in b]
        return (min(corners), max(corners))
    if name in ("remainder", "unsigned_remainder") and natural and divides:
        return (0, min(a[1], b[1] - 1))
    return (0, min(a[1], b[1])) if name == "bit_and" and natural else None
