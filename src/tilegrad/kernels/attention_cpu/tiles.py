"""What attention kernels on CPUs are made of: vectors, a source of tokens, products.

`Vectors` has the arithmetic of Tiles, `Source` says where tokens lie, and brings them into scratch:
a block of queries is turned once, so that a column of it is a vector; keys and values are copied as
they lie, widened to the accumulator's dtype. `product` keeps a register tile of rows by vectors of
queries. `Kernel` is what every Body has. Invariant: nothing is read past the end of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...core.dtype import DType, float32, int32, int64
from ...ir.node import Node
from ...ir.symbol import Size, floor_divide, high, minimum, modulo
from ...tile import ops
from ...tile.build import BodyBuilder
from ..attention.shape import AttentionShape, Parameters
from .holes import LOG2_E, Holes

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


def up(size: int, unit: int) -> int:
    """A size, up to a whole number of units."""
    return -(-size // unit) * unit


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
        return key // unit * unit if unit > 1 else key


class Vectors:
    """Arithmetic on the Tiles of a Body; sums have a dtype of their own."""

    def __init__(self, b: BodyBuilder, plan: CpuPlan, x: AttentionShape) -> None:
        self.b, self.lanes, self.sum = b, plan.lanes, x.sum_dtype
        self.exact = x.dtype is float32

    def chunks(self, name: str, width: int, carried: list[Node] | None = None) -> Iterator[Size]:
        """A loop over an axis, lanes at a time."""
        n, top = self.lanes, up(width, self.lanes)
        return self.b.each(name, 0, top, n, carried, bounds=(0, top - n))

    def clear(self, place: Node, width: int) -> None:
        """Zeros, row by row."""
        zeros = self.b.constant(0, self.sum, (width,))
        for r in self.b.each("clear", 0, place.shape[0]):
            self.b.store(place, zeros, (r, 0), (1,))

    def constant(self, value: float) -> Node:
        """A number of the accumulator's dtype."""
        return self.b.constant(value, self.sum)

    def steps(self, size: int, start: Size = 0, dtype: DType = int64) -> Node:
        """start, start + 1, ... as a tile."""
        b = self.b
        counted = b.add(ops.iota(size=size, dtype=dtype))
        return b.apply("add", counted, b.cast(b.index(start), dtype))

    def below(self, start: Size, size: int, limit: Size) -> Node | None:
        """Which of start, start + 1, ... are less than a limit; None where all are known to be."""
        if high(start + size - limit) <= 0:
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

    def turn(self, x: Node) -> Node:
        """A square, transposed."""
        return self.b.add(ops.transpose(x, order=(1, 0)))

    def greater(self, x: Node, y: Node) -> Node:
        """The greater of two; y where one is nan."""
        return self.b.apply("where", self.b.apply("less", y, x), x, y)

    def base_of(self, most: Node) -> Node:
        """What is subtracted from scores: their maximum, or 0 where nothing was seen."""
        hidden = self.b.apply("equal", most, self.constant(-math.inf))
        return self.b.apply("where", hidden, self.constant(0.0), most)

    def share_of(self, total: Node) -> Node:
        """What sums of products are multiplied with in the end: 0 where nothing was seen."""
        b = self.b
        none = b.apply("equal", total, self.constant(0.0))
        share = b.apply("divide", self.constant(1.0), total)
        return b.apply("where", none, self.constant(0.0), share)

    def log_sum(self, most: Node, total: Node) -> Node:
        """The log-sum-exp of scores."""
        b = self.b
        sums = b.apply("add", most, b.apply("log2", total))
        none = b.apply("equal", total, self.constant(0.0))
        sums = b.apply("where", none, self.constant(-math.inf), sums)
        return b.apply("multiply", sums, self.constant(1 / LOG2_E))

    def power(self, x: Node) -> Node:
        """2**x for x <= 0 or little more: 0 where it would be less than the least normal number."""
        b = self.b
        if self.sum is not float32:
            return b.apply("exp2", x)
        terms = EXACT if self.exact else SHORT
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


class Source:
    """Where q, k, v, the result and their gradients lie, for the programs of one batch entry."""

    batch: Size

    def __init__(self, v: Vectors, x: AttentionShape, memory: Mapping[str, Node]) -> None:
        self.v, self.x, self.memory = v, x, memory

    def order(self, name: str) -> str:
        """The axes of q, k, v, out or of a gradient."""
        return self.x.orders[("q", "k", "v", "out").index(name.removeprefix("d"))]

    def at(self, name: str, head: Size, token: Size, d: Size) -> list[Size]:
        """An index of q, k, v, out or of a gradient."""
        place = {"b": self.batch, "h": head, "t": token, "d": d}
        return [place[axis] for axis in self.order(name)]

    def line(self, name: str, head: Size, token: Size, d: Size, size: int, width: int) -> Node:
        """`size` elements of a token, 0 past its width."""
        v, index, axis = self.v, self.at(name, head, token, d), self.order(name).index("d")
        return v.b.load(self.memory[name], index, (size,), (axis,), v.below(d, size, width))

    def put_line(self, name: str, head: Size, token: Size, d: Size, part: Node, width: int) -> None:
        """Write a piece of a token."""
        v, index, axis = self.v, self.at(name, head, token, d), self.order(name).index("d")
        inside, part = v.below(d, v.lanes, width), v.b.cast(part, self.x.dtype)
        v.b.store(self.memory[name], part, index, (axis,), inside)

    def square(self, name: str, head: Size, token: Size, d: Size, mask: Node | None) -> Node:
        """lanes tokens x lanes of d."""
        n, order = self.v.lanes, self.order(name)
        axes = (order.index("t"), order.index("d"))
        return self.v.b.load(self.memory[name], self.at(name, head, token, d), (n, n), axes, mask)

    def copy_rows(
        self, name: str, head: Size, first: Size, count: Size, width: int, place: Node
    ) -> None:
        """place[r, :] = tokens first ... of k, v or others, as they lie."""
        v, b, n = self.v, self.v.b, self.v.lanes
        for r in b.each("row", 0, count, bounds=(0, high(place.shape[0]) - 1)):
            for d in range(0, width, n):
                part = self.line(name, head, first + r, d, n, width)
                b.store(place, b.cast(part, v.sum), (r, d), (1,))

    def turn_rows(
        self, name: str, head: Size, first: Size, limit: Size, width: int, place: Node
    ) -> None:
        """place[d, i] = token first + i of q: for a block of queries, 0 past the limit."""
        v, n = self.v, self.v.lanes
        for i in v.chunks("turn", high(place.shape[1])):
            for d in v.chunks("chunk", width):
                mask = v.both(v.below(first + i, n, limit), v.below(d, n, width), (n, n))
                part = v.b.cast(self.square(name, head, first + i, d, mask), v.sum)
                v.b.store(place, v.turn(part), (d, i), (0, 1))

    def put_turned(
        self, name: str, head: Size, token: Size, place: Node, i: Size, width: int, factor: Node
    ) -> None:
        """Tokens of out or dq = factor * what lies turned in columns i ... of a place."""
        v, b, n, order = self.v, self.v.b, self.v.lanes, self.order(name)
        inside = v.below(token, n, self.x.queries)
        for d in v.chunks("chunk", width):
            part = b.apply("multiply", b.load(place, (d, i), (n, n), (0, 1)), factor)
            mask = v.both(inside, v.below(d, n, width), (n, n))
            part, axes = b.cast(v.turn(part), self.x.dtype), (order.index("t"), order.index("d"))
            b.store(self.memory[name], part, self.at(name, head, token, d), axes, mask)

    def key_length(self) -> Size:
        """How many keys there are, of a sequence that may have a length of its own."""
        b, keys = self.v.b, self.x.keys
        if "key_lengths" not in self.x.extras:
            return keys
        length = b.cast(b.load(self.memory["key_lengths"], (self.batch,)), int64)
        return b.atom("length", b.apply("minimum", length, b.index(keys)), 0, high(keys))


class Kernel:
    """What every Body has: parameters, vectors, a source, holes; heads and keys at work."""

    head: Size
    key_head: Size
    first: Size  # query of the program
    lower: Size  # keys at work: lower <= j < upper
    upper: Size
    key: Size  # the first one of a block, and how many it has
    count: Size

    def __init__(self, x: AttentionShape, given: Parameters, plan: CpuPlan, name: str) -> None:
        self.plan, self.lanes = plan, plan.lanes
        self.b = BodyBuilder(name, given)
        self.memory = dict(zip((n for n, _ in given), self.b.parameters))
        self.v = Vectors(self.b, plan, x)
        self.sum: DType = x.sum_dtype
        self.source = self.source_of(self.v, x, self.memory)
        self.holes = Holes(self.b, self.source, self.memory)

    def source_of(self, v: Vectors, x: AttentionShape, memory: Mapping[str, Node]) -> Source:
        """Where its tokens lie."""
        return Source(v, x, memory)

    @property
    def x(self) -> AttentionShape:
        """The attention, as far as a program knows it."""
        return self.source.x

    def program(self, blocks: Size, heads: int) -> tuple[Size, Size]:
        """The grid, one program for each block of each head, and this one's block; its head and
        batch are set. `blocks` may be 0: then there is no program."""
        grid = self.x.batch * heads * blocks
        p = self.b.program(0, grid)
        rest = floor_divide(p, blocks)
        self.head, self.source.batch = rest % heads, rest // heads
        return grid, modulo(p, blocks)

    def scratch(self, *shape: int, dtype: DType | None = None) -> Node:
        """A place of the program's own."""
        return self.b.allocate(shape, dtype or self.sum, "l2")

    def each_block(self) -> Iterator[Size]:
        """A loop over the keys at work, a block at a time: `key` and `count` say which."""
        most = max(0, high(self.x.keys) - 1)
        for key in self.b.each("keys", self.lower, self.upper, self.plan.keys, bounds=(0, most)):
            self.key, self.count = key, minimum(self.upper - key, self.plan.keys)
            yield key


def product(
    v: Vectors,
    plan: CpuPlan,
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
    b, panel = v.b, plan.panel

    def many(first: Size, stop: Size, size: int) -> None:
        for r in b.each("tile", first, stop, size, bounds=(0, high(stop))):
            for c in b.each("across", 0, columns or plan.queries, panel):
                total = [b.constant(0, v.sum, (size, panel))]
                if start is not None:
                    total = [start(r, c, size)]
                bounds = (0, high(right.shape[0]) - 1)
                for s in b.each("depth", 0, depth, 1, total, unroll=4, bounds=bounds):
                    line = b.load(right, (s, c), (1, panel), (0, 1))
                    total[0] = b.add(ops.dot(left(s, r, size), line, total[0]))
                b.store(place, total[0], (r, c), (0, 1))

    if rows == 0:
        return
    if not isinstance(rows, int):
        many(0, rows, plan.rows)
        return
    count = -(-rows // plan.rows)  # nearly equal ones
    size, longer = divmod(rows, count)
    if longer:
        many(0, longer * (size + 1), size + 1)
    many(longer * (size + 1), rows, size)


class Pairs:
    """A Tile of scores: keys key ... (down, or alone), queries query ... or one."""

    def __init__(
        self,
        of: Kernel,
        head: Size,
        query: Size,
        key: Size,
        square: bool = False,
        banded: bool = True,
    ) -> None:
        self.of, self.head, self.query, self.key = of, head, query, key
        self.square, self.banded = square, banded

    def apart(self) -> tuple[Node, Size]:
        """Number of the key - number of the query: a Tile, and what all have in common."""
        b = self.of.b
        steps = b.add(ops.iota(size=self.of.lanes, dtype=int32))
        tile = b.apply("subtract", self.of.v.column(steps), steps) if self.square else steps
        return tile, self.key - self.query

    def limits(self) -> list[Node] | None:
        """What the band says, or nothing where all keys at work lie in it."""
        return None if self.banded else []

    def extra(self, name: str) -> Node:
        """A Tile of bias or mask, keys down; a mask as bool. 0 (or false) past the ends."""
        v, b, n, memory = self.of.v, self.of.b, self.of.lanes, self.of.memory[name]
        sizes = memory.shape
        place = (self.of.source.batch, self.head, self.query, self.key)
        index = [0 if size == 1 else at for size, at in zip(sizes, place)]
        queries = self.square and sizes[2] != 1
        rows = v.below(index[2], n, sizes[2]) if queries else None
        keys = None if sizes[3] == 1 else v.below(index[3], n, sizes[3])
        if sizes[3] == 1:  # one for all keys
            return b.load(memory, index, (n,), (2,), rows) if queries else b.load(memory, index)
        if not queries:
            found = b.load(memory, index, (n,), (3,), keys)
            return v.column(found) if self.square else found
        found = b.load(memory, index, (n, n), (2, 3), v.both(rows, keys, (n, n)))
        if found.dtype.is_float:
            return v.turn(b.cast(found, v.sum))
        one = b.apply("where", found, v.constant(1.0), v.constant(0.0))
        return b.apply("not_equal", v.turn(one), v.constant(0.0))
