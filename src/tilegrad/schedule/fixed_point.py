"""Fixed-point functions as Tile IR: the entries of the tables are computed where they are needed.

Entries are numbers of float64 rounded to the nearest, so they are exact; lines between them are
integers. Invariant: the bits of `core/fixed.py`.
"""

from __future__ import annotations

from ..core.dtype import DType, float64, int32, int64
from ..core.fixed import INT32_MAX, LOG2E
from ..ir.node import Node
from ..tile.build import BodyBuilder


class _Numbers:
    """Integers of 64 bits in a Body under construction."""

    def __init__(self, body: BodyBuilder) -> None:
        self.body = body

    def __call__(self, op: str, a: Node, b: Node | float, dtype: DType = int64) -> Node:
        second = b if isinstance(b, Node) else self.body.constant(b, dtype)
        return self.body.apply(op, a, second)

    def where(self, test: Node, a: Node | int, b: Node | int) -> Node:
        whole = [x if isinstance(x, Node) else self.body.constant(x, int64) for x in (a, b)]
        return self.body.apply("where", test, *whole)

    def entry(self, x: Node) -> Node:
        """A float64 with 16 bits after the point, to the nearest."""
        scaled = self("add", self("multiply", x, 65536.0, float64), 0.5, float64)
        return self.body.cast(self.body.apply("floor", scaled), int64)

    def steps(self, i: Node, each: float, start: float) -> Node:
        """start + i * each, exactly."""
        x = self("multiply", self.body.cast(i, float64), each, float64)
        return self("add", x, start, float64) if start else x

    def between(self, ends: list[Node], part: Node, rising: bool) -> Node:
        """`part` of 256 from one entry to the next; the way between is rounded down."""
        low, next_ = ends
        way = self("subtract", next_, low) if rising else self("subtract", low, next_)
        moved = self("shift_right", self("multiply", way, part), 8)
        return self("add" if rising else "subtract", low, moved)

    def leading(self, x: Node) -> tuple[Node, Node]:
        """The place of the highest 1 of positive numbers, and they with it shifted to bit 30."""
        x = self("maximum", x, 1)
        bits = self.body.bitcast(self.body.cast(x, float64), int64)
        place = self("subtract", self("shift_right", bits, 52), 1023)
        return place, self("shift_left", x, self.less(30, place))

    def less(self, a: int, b: Node) -> Node:
        """a - b."""
        return self.body.apply("subtract", self.body.constant(a, int64), b)

    def shifted(self, x: Node, left: Node) -> Node:
        """x * 2**left, rounded down."""
        right = self("maximum", self("multiply", left, -1), 0)
        return self("shift_right", self("shift_left", x, self("maximum", left, 0)), right)


def _exp(n: _Numbers, x: Node) -> Node:
    z = n("shift_right", n("multiply", n("minimum", x, 0), LOG2E), 16)
    down, f = n.less(0, n("shift_right", z, 16)), n("bit_and", z, 0xFFFF)
    i = n("shift_right", f, 8)
    ends = [n.entry(n.body.apply("exp2", n.steps(j, 1 / 256, 0.0))) for j in (i, n("add", i, 1))]
    found = n.between(ends, n("bit_and", f, 255), True)
    small = n("less", down, 32)
    return n.where(small, n("shift_right", found, n("minimum", down, 31)), 0)


def _reciprocal(n: _Numbers, x: Node) -> Node:
    place, m = n.leading(x)
    i = n("bit_and", n("shift_right", m, 22), 255)
    ends = []
    for j in (i, n("add", i, 1)):
        ends.append(n.entry(n.body.apply("reciprocal", n.steps(j, 1 / 256, 1.0))))
    found = n.between(ends, n("bit_and", n("shift_right", m, 14), 255), False)
    return n.where(n("less", x, 1), INT32_MAX, n.shifted(found, n.less(14, place)))


def _rsqrt(n: _Numbers, x: Node) -> Node:
    place, m = n.leading(x)
    odd = n.body.cast(n("add", n("bit_and", place, 1), 1), float64)
    i = n("bit_and", n("shift_right", m, 23), 127)
    ends = []
    for j in (i, n("add", i, 1)):
        root = n.body.apply("square_root", n("multiply", n.steps(j, 1 / 128, 1.0), odd))
        ends.append(n.entry(n.body.apply("reciprocal", root)))
    found = n.between(ends, n("bit_and", n("shift_right", m, 15), 255), False)
    half = n("shift_right", place, 1)
    return n.where(n("less", x, 1), INT32_MAX, n.shifted(found, n.less(8, half)))


def fixed_point(body: BodyBuilder, kind: str, x: Node) -> Node:
    """One of the functions of an int32 value."""
    made = {"exp": _exp, "reciprocal": _reciprocal, "rsqrt": _rsqrt}[kind]
    return body.cast(made(_Numbers(body), body.cast(x, int64)), int32)
