"""What attention kernels on CPUs are made of: queries along the lanes, products, powers of two.

A block of queries is turned once, so that a column of it is a vector; keys and values are copied
as they lie into scratch, widened to the accumulator's dtype. A product keeps a register tile of
rows by vectors of queries. Invariant: nothing is read past the end of an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.dtype import DType, float32, int32, int64
from ...ir.node import Node
from ...ir.symbol import Size, combine, floor_divide, high, multiply
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import BodyBuilder
from ..attention.shape import AttentionShape

LOG2_E = 1.4426950408889634
PAD = 16  # elements after each row of scratch: breaks power-of-two strides
MAGIC = 12582912.0  # 1.5 * 2**23: added to a small float32, its low bits are the nearest integer
# 2**x - 1 = x * (these, from the lowest power on), |x| <= 1/2; off by 9e-8 and 3e-6 of 2**x
EXACT = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
SHORT = (0.6931241750717163, 0.24024099111557007, 0.055906426161527634, 0.009582852944731712)


@dataclass(frozen=True)
class CpuPlan:
    """Tunable choices: queries of a program, keys of a block, the register tile."""

    queries: int
    keys: int
    rows: int  # most rows of a register tile
    across: int  # vectors of it
    lanes: int
    unit: str = ""  # a matrix unit of the Target, or vectors
    part: int = 0  # queries whose scores are in scratch at a time; 0 for all
    aligned: bool = False  # blocks of keys begin at multiples of `keys`, whoever reads them

    @property
    def strip(self) -> int:
        """Queries whose scores are in scratch at a time."""
        return self.part or self.queries

    @property
    def panel(self) -> int:
        """Columns of the register tile."""
        return self.across * self.lanes

    def begin(self, key: Size, unit: int = 1) -> Size:
        """Where a program begins that need see no key before this one; it can at every `unit`."""
        unit = self.keys if self.aligned else unit
        return multiply(floor_divide(key, unit), unit) if unit > 1 else key


class Builder:
    """What forward and backward share: indices, scratch, products, powers of two."""

    batch: Size
    head: Size
    key_head: Size
    first: Size  # query of the program
    lower: Size  # keys at work: lower <= j < upper
    upper: Size

    def __init__(
        self, x: AttentionShape, given: Sequence[tuple[str, Memory]], plan: CpuPlan, name: str
    ) -> None:
        self.x, self.plan, self.lanes = x, plan, plan.lanes
        self.b = BodyBuilder(name, given)
        self.memory = dict(zip((n for n, _ in given), self.b.parameters))
        self.sum: DType = x.sum_dtype

    # ---- memory ---------------------------------------------------------------------------

    def order(self, name: str) -> str:
        """The axes of q, k, v, out or of a gradient."""
        return self.x.orders[("q", "k", "v", "out").index(name.removeprefix("d"))]

    def at(self, name: str, batch: Size, head: Size, token: Size, d: Size) -> list[Size]:
        """An index of q, k, v, out or of a gradient."""
        place = {"b": batch, "h": head, "t": token, "d": d}
        return [place[axis] for axis in self.order(name)]

    def scratch(self, *shape: int, dtype: DType | None = None) -> Node:
        """A place of the program's own."""
        return self.b.allocate(shape, dtype or self.sum, "l2")

    def steps(self, size: int, start: Size = 0, dtype: DType = int64) -> Node:
        """start, start + 1, ... as a tile."""
        b = self.b
        counted = b.add(ops.iota(size=size, dtype=dtype))
        return b.apply("add", counted, b.cast(b.index(start), dtype))

    def below(self, start: Size, size: int, limit: Size) -> Node | None:
        """Which of start, start + 1, ... are less than a limit; None where all are known to be."""
        if high(combine(combine(start, size, 1), limit, -1)) <= 0:
            return None
        return self.b.apply("less", self.steps(size, start), self.b.index(limit))

    def column(self, x: Node) -> Node:
        """A tile (n,) as (n, 1)."""
        return self.b.add(ops.reshape(x, shape=(*x.shape, 1)))

    def both(self, rows: Node | None, columns: Node | None, shape: tuple[int, int]) -> Node | None:
        """A mask of a square from one of its rows and one of its columns."""
        b = self.b
        wide = None if rows is None else b.broadcast(self.column(rows), shape)
        deep = None if columns is None else b.broadcast(columns, shape)
        return b.logical_and(wide, deep)

    def square(
        self, name: str, batch: Size, head: Size, token: Size, limit: Size, d: Size, width: int
    ) -> Node:
        """lanes tokens x lanes of d, in the accumulator's dtype, 0 past the ends."""
        b, n = self.b, self.lanes
        order = self.order(name)
        mask = self.both(self.below(token, n, limit), self.below(d, n, width), (n, n))
        axes = (order.index("t"), order.index("d"))
        index = self.at(name, batch, head, token, d)
        return b.cast(b.load(self.memory[name], index, (n, n), axes, mask), self.sum)

    def turn(self, x: Node) -> Node:
        """A square, transposed."""
        return self.b.add(ops.transpose(x, order=(1, 0)))

    def copy_rows(
        self, name: str, batch: Size, head: Size, first: Size, count: Size, width: int, place: Node
    ) -> None:
        """place[r, :] = tokens first ... of k, v or others, as they lie."""
        b, n = self.b, self.lanes

        def row(r: Size, _: list[Node]) -> Sequence[Node]:
            for d in range(0, width, n):
                index = self.at(name, batch, head, combine(first, r, 1), d)
                part = b.load(
                    self.memory[name],
                    index,
                    (n,),
                    (self.order(name).index("d"),),
                    self.below(d, n, width),
                )
                b.store(place, b.cast(part, self.sum), (r, d), (1,))
            return ()

        most = high(place.shape[0])
        b.loop("row", 0, count, 1, row, bounds=(0, most - 1))

    def turn_rows(
        self,
        name: str,
        batch: Size,
        head: Size,
        first: Size,
        limit: Size,
        width: int,
        place: Node,
        factor: float = 1.0,
    ) -> None:
        """place[d, i] = factor * token first + i of q: for a block of queries."""
        b, n = self.b, self.lanes

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
                part = self.square(name, batch, head, combine(first, i, 1), limit, d, width)
                part = self.turn(part)
                if factor != 1.0:
                    part = b.apply("multiply", part, b.constant(factor, self.sum))
                b.store(place, part, (d, i), (0, 1))
                return ()

            self.chunks(width, chunk)
            return ()

        b.loop("turn", 0, self.plan.queries, n, some, bounds=(0, self.plan.queries - n))

    def chunks(self, width: int, body: Callable[[Size, list[Node]], Sequence[Node]]) -> None:
        """A loop over an axis, lanes at a time."""
        top = -(-width // self.lanes) * self.lanes
        self.b.loop("chunk", 0, top, self.lanes, body, bounds=(0, top - self.lanes))

    # ---- arithmetic -----------------------------------------------------------------------

    def constant(self, value: float) -> Node:
        """A number of the accumulator's dtype."""
        return self.b.constant(value, self.sum)

    def greater(self, x: Node, y: Node) -> Node:
        """The greater of two; y where one is nan."""
        return self.b.apply("where", self.b.apply("less", y, x), x, y)

    def power(self, x: Node) -> Node:
        """2**x for x <= 0 or little more: 0 where it would be less than the least normal number."""
        b = self.b
        if self.sum is not float32:
            return b.apply("exp2", x)
        terms = EXACT if self.x.dtype is float32 else SHORT
        least = b.constant(-127.0, float32)
        x = b.apply("where", b.apply("less", x, least), least, x)  # a nan stays
        shifted = b.apply("add", x, b.constant(MAGIC, float32))
        rest = b.apply("subtract", x, b.apply("subtract", shifted, b.constant(MAGIC, float32)))
        total = b.constant(terms[-1], float32)
        for term in (*terms[-2::-1], 1.0):
            total = b.apply("multiply_add", total, rest, b.constant(term, float32))
        bits = [b.add(ops.bitcast(v, dtype=int32)) for v in (shifted, total)]
        exponent = b.apply("shift_left", bits[0], b.constant(23, int32))
        return b.add(ops.bitcast(b.apply("add", bits[1], exponent), dtype=float32))

    def product(
        self,
        rows: Size,
        depth: Size,
        left: Callable[[Size, Size, int], Node],
        right: Node,
        place: Node,
        start: Callable[[Size, Size, int], Node] | None = None,
        columns: int | None = None,
    ) -> None:
        """place[r, :] = start + sum over depth of left(r ...) times right[depth, :].

        The columns are the queries, or as many as said, a multiple of the register tile's width.
        `left(step, first, rows)` is a column (rows, 1). Rows of `place` up to the next multiple of
        the register tile's height are written too where `rows` is known only at run time.
        """
        b, panel = self.b, self.plan.panel

        def tile(first: Size, size: int) -> None:
            def across(c: Size, _: list[Node]) -> Sequence[Node]:
                def step(s: Size, carried: list[Node]) -> Sequence[Node]:
                    line = b.load(right, (s, c), (1, panel), (0, 1))
                    return [b.add(ops.dot(left(s, first, size), line, carried[0]))]

                total = b.constant(0, self.sum, (size, panel))
                if start is not None:
                    total = start(first, c, size)
                limit = right.shape[0]
                total = b.loop(
                    "depth", 0, depth, 1, step, [total], unroll=4, bounds=(0, high(limit) - 1)
                )[0]
                b.store(place, total, (first, c), (0, 1))
                return ()

            b.loop("across", 0, columns or self.plan.queries, panel, across)

        def many(first: Size, stop: Size, size: int) -> None:
            def one(r: Size, _: list[Node]) -> Sequence[Node]:
                tile(r, size)
                return ()

            b.loop("tile", first, stop, size, one, bounds=(0, high(stop)))

        if rows == 0:
            return
        if not isinstance(rows, int):
            many(0, rows, self.plan.rows)
            return
        count = -(-rows // self.plan.rows)  # nearly equal ones
        size, longer = divmod(rows, count)
        if longer:
            many(0, longer * (size + 1), size + 1)
        many(longer * (size + 1), rows, size)
