"""The work list of a step over a paged cache: equal numbers of key blocks for every program.

Pairs (row block, key head) stand one after the other, requests first, each with the blocks of
keys that its tokens see and with one at least, so that someone writes its result. All blocks are
cut into ranges for the `walkers` that differ by one at most; where a cut or the end of a pair lies
an item ends. Item number g of walker p stands in row p if it is the walker's first, else in row
walkers + g - p - 1, so a program finds its first item at once and the others in a row. Parts of a
cut pair go to slots g, which are neighbours.

`work_list` is the kernel, one program that is run once a step; `kernels/paged/reference.py` has
the same in NumPy. Costs about 20 dependent reads and three running sums, whatever the lengths.
Invariant: the list depends on lengths, query starts and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import int32, int64
from ...ir.node import Node
from ...ir.symbol import Size, high
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .shape import (
    BLOCKS,
    CUT,
    CUT_HEAD,
    CUT_PARTS,
    CUT_SLOT,
    CUT_TOKEN,
    CUT_TOKENS,
    FIRST,
    FROM,
    HEAD,
    PARTS,
    RECORD,
    REQUEST,
    SEES,
    SLOT,
    START,
    STOP,
    TOKEN,
    TOKENS,
    PagedPlan,
    PagedShape,
    listed,
    per,
    row_blocks,
    walkers,
    work_parameters,
)

CHUNK = 64  # row blocks whose requests are looked up at once, at most
HELD = 1 << 14  # elements of a tile that the threads hold without spilling
KNOWN = (REQUEST, TOKEN, TOKENS, SEES, FIRST, BLOCKS)  # of a row block
UNITS = len(KNOWN)  # where a row block's blocks begin, of all


def work_parameters_of(x: PagedShape, plan: PagedPlan) -> list[tuple[str, Memory]]:
    """lengths, query_starts, items, cuts."""
    return [
        ("lengths", Memory((x.requests,), int32)),
        ("query_starts", Memory((x.requests + 1,), int32)),
        *work_parameters(x, plan, "result"),
    ]


def work_list(x: PagedShape, plan: PagedPlan, name: str = "paged_work") -> Body:
    """The kernel that makes the list."""
    return _Work(x, plan, BodyBuilder(name, work_parameters_of(x, plan))).build()


def power(size: Size) -> int:
    """The least power of two that is as large."""
    return 1 << max(0, high(size) - 1).bit_length()


class _Work:
    """Builds the Body of `work_list`."""

    def __init__(self, x: PagedShape, plan: PagedPlan, b: BodyBuilder) -> None:
        self.x, self.plan, self.b = x, plan, b
        self.lengths, self.starts, self.items, self.cuts = b.parameters
        self.walkers = walkers(x, plan)
        self.count = max(CHUNK, power(row_blocks(x, plan)))
        self.chunk = max(8, min(CHUNK, HELD // power(x.requests)))

    def build(self) -> Body:
        """Row blocks, then pairs, then items."""
        b = self.b
        self.known = b.allocate((UNITS + 1, self.count), int32, "shared")
        self.find_row_blocks()
        self.make_items()
        pairs = self.count * power(listed(self.x, self.plan))
        held = max(pairs // 256, power(self.walkers) // 64)
        return b.finish((1,), warps=max(8, min(32, held)), distinct=True)

    # ---- arithmetic -------------------------------------------------------------------------

    def do(self, name: str, a: Node | int, c: Node | int) -> Node:
        """An op of whole numbers."""
        a, c = (self.b.constant(v, int64) if isinstance(v, int) else v for v in (a, c))
        return self.b.apply(name, a, c)

    def pick(self, test: Node, a: Node | int, c: Node | int) -> Node:
        """One of two."""
        a, c = (self.b.constant(v, int64) if isinstance(v, int) else v for v in (a, c))
        return self.b.apply("where", test, a, c)

    def line(self, size: int) -> Node:
        """0 .. size-1."""
        return self.b.add(ops.iota(size=size, dtype=int64))

    def fold(self, x: Node, kind: str, axis: int = 0) -> Node:
        """A reduction."""
        return self.b.add(ops.reduce(x, axis=axis, kind=kind))

    def running(self, x: Node) -> Node:
        """Sums up to and with each place."""
        return self.b.add(ops.cumulative(x, axis=0, kind="sum"))

    # ---- row blocks -------------------------------------------------------------------------

    def find_row_blocks(self) -> None:
        """Which request, tokens and keys every row block has, into the place `known`."""
        b, x = self.b, self.x
        size = power(x.requests)
        inside = b.apply("less", self.line(size), b.index(x.requests))
        begin, end = (
            b.cast(b.load(self.starts, (i,), (size,), (0,), inside), int64) for i in (0, 1)
        )
        each = per(x, self.plan)
        blocks = self.do(
            "floor_divide", self.do("add", self.do("subtract", end, begin), each - 1), each
        )
        ends = b.add(ops.reshape(self.running(blocks), shape=(1, size)))

        def chunk(start: Size, _: list[Node]) -> Sequence[Node]:
            number = b.apply("add", self.line(self.chunk), b.index(start))
            column = b.add(ops.reshape(number, shape=(self.chunk, 1)))
            over = b.broadcast(b.apply("less_equal", ends, column), (self.chunk, size))
            request = self.fold(b.cast(over, int64), "sum", 1)
            before = self.fold(self.pick(over, b.broadcast(ends, (self.chunk, size)), 0), "max", 1)
            self.one_chunk(start, request, self.do("subtract", number, before))
            return []

        b.loop("chunk", 0, self.count, self.chunk, chunk)

    def one_chunk(self, start: Size, request: Node, number: Node) -> None:
        """Row blocks, each the `number`th of a request."""
        b, x, plan = self.b, self.x, self.plan
        there = b.apply("less", request, b.index(x.requests))
        first, last = (
            b.cast(b.gather(self.starts, self.do("add", request, i), there), int64) for i in (0, 1)
        )
        length = b.cast(b.gather(self.lengths, request, there), int64)
        queries = self.do("subtract", last, first)
        before = self.do("multiply", number, per(x, plan))
        tokens = self.do("minimum", self.do("subtract", queries, before), per(x, plan))
        sees = self.do("add", self.do("subtract", length, queries), self.do("add", before, 1))
        end = self.do("maximum", self.do("add", sees, self.do("subtract", tokens, 1)), 0)
        begin = b.constant(0, int64, (self.chunk,))
        if x.window:
            begin = self.do("maximum", self.do("subtract", sees, x.window), 0)
            begin = self.do("floor_divide", begin, plan.block)
        stop = self.do("floor_divide", self.do("add", end, plan.block - 1), plan.block)
        blocks = self.do("maximum", self.do("subtract", stop, begin), 1)
        found = {
            REQUEST: request,
            TOKEN: self.do("add", first, before),
            TOKENS: tokens,
            SEES: sees,
            FIRST: begin,
            BLOCKS: blocks,
        }
        for place, field in enumerate(KNOWN):
            value = b.cast(self.pick(there, found[field], 0), int32)
            b.store(self.known, value, (place, start), (1,))

    # ---- items ------------------------------------------------------------------------------

    def make_items(self) -> None:
        """Pairs and the parts that cuts make of them."""
        b, x, plan = self.b, self.x, self.plan
        heads, count = listed(x, plan), self.count
        units = b.cast(b.load(self.known, (KNOWN.index(BLOCKS), 0), (count,), (1,)), int64)
        units = self.do("multiply", units, heads)
        ends = self.running(units)
        total = self.fold(units, "sum")
        b.store(self.known, b.cast(self.do("subtract", ends, units), int32), (UNITS, 0), (1,))
        self.total = self.do("maximum", total, 1)
        self.programs = self.do("maximum", self.do("minimum", total, self.walkers), 1)
        number = self.line(count * heads)
        block = self.do("unsigned_divide", number, heads)
        head = self.do("unsigned_remainder", number, heads)
        found = {
            f: b.cast(b.gather(self.known, self.do("add", block, place * count)), int64)
            for place, f in enumerate((*KNOWN, UNITS + RECORD))
        }
        found[HEAD] = head
        size = found[BLOCKS]
        start = self.do("add", found.pop(UNITS + RECORD), self.do("multiply", head, size))
        stop = self.do("add", start, size)
        first, last = self.program_of(start), self.program_of(self.do("subtract", stop, 1))
        some = b.apply("less", b.constant(0, int64), size)
        parts = self.pick(some, self.do("add", self.do("subtract", last, first), 1), 0)
        slots = self.do("subtract", self.running(parts), parts)
        self.write_cuts(first, slots, parts, found)

        self.write_parts((first, start, stop, parts, slots), found)
        self.write_idle(total)

    def write_parts(self, known: Sequence[Node], found: dict[int, Node]) -> None:
        """Parts of all pairs: at once where they are few enough, else one of each after another."""
        b, size, pairs = self.b, power(self.walkers), known[0].shape[0]
        many = high(row_blocks(self.x, self.plan)) * 4 <= self.walkers  # parts of each pair
        if many and pairs * size <= HELD // 2:
            wide = (1, pairs)
            given = [b.add(ops.reshape(v, shape=wide)) for v in known]
            numbers = b.add(ops.reshape(self.line(size), shape=(size, 1)))
            self.write_part(
                numbers, given, {f: b.add(ops.reshape(v, shape=wide)) for f, v in found.items()}
            )
            return

        def part(k: Size, _: list[Node]) -> Sequence[Node]:
            self.write_part(b.index(k), known, found)
            return []

        most = b.atom("most", self.fold(known[3], "max"), 0, self.walkers)
        b.loop("part", 0, most, 1, part)

    def program_of(self, unit: Node) -> Node:
        """The program that takes a unit."""
        above = self.do("subtract", self.do("multiply", self.do("add", unit, 1), self.programs), 1)
        return self.do("floor_divide", above, self.total)

    def cut(self, program: Node) -> Node:
        """Where a program's units begin."""
        return self.do("floor_divide", self.do("multiply", program, self.total), self.programs)

    def write_cuts(self, first: Node, slots: Node, parts: Node, found: dict[int, Node]) -> None:
        """What the combining kernel reads: a pair that was cut stands in the row of the program
        that has its second part; where there is none, no parts do."""
        b, size = self.b, power(self.walkers)
        values = {
            CUT_SLOT: slots,
            CUT_PARTS: parts,
            CUT_TOKEN: found[TOKEN],
            CUT_TOKENS: found[TOKENS],
            CUT_HEAD: found[HEAD],
        }
        place = b.allocate((len(values), size), int32, "shared")
        for field in values:
            b.store(place, b.constant(0, int32, (size,)), (field, 0), (1,))
        cut = b.apply("less", b.constant(1, int64), parts)
        for field, value in values.items():
            at = self.do("add", first, 1 + field * size)
            b.scatter(place, b.cast(value, int32), at, cut)
        number = self.line(size)
        inside = b.apply("less", number, b.constant(self.walkers, int64))
        for field in values:
            at = self.do("add", self.do("multiply", number, CUT), field)
            b.scatter(self.cuts, b.load(place, (field, 0), (size,), (1,)), at, inside)

    def write_part(self, k: Node, known: Sequence[Node], found: dict[int, Node]) -> None:
        """Part k of every pair that has so many."""
        b, (first, start, stop, parts, slots) = self.b, known
        there = b.apply("less", k, parts)
        program = self.do("add", first, k)
        begin, end = self.cut(program), self.cut(self.do("add", program, 1))
        low, high_ = self.do("maximum", start, begin), self.do("minimum", stop, end)
        slot = self.do("add", slots, k)
        leads = b.apply("less_equal", start, begin)
        closes = b.apply("less_equal", end, stop)
        later = self.do("subtract", self.do("add", slot, self.walkers - 1), program)
        row = self.do("multiply", self.pick(leads, program, later), RECORD)
        alone = b.apply("less_equal", parts, b.constant(1, int64))
        values = {
            **found,
            FIRST: self.do("add", found[FIRST], self.do("subtract", low, start)),
            BLOCKS: self.do("subtract", high_, low),
            SLOT: self.pick(alone, -1, slot),
            FROM: slots,
            PARTS: parts,
        }
        for field, value in values.items():
            b.scatter(
                self.items,
                b.broadcast(b.cast(value, int32), there.shape),
                b.broadcast(self.do("add", row, field), there.shape),
                there,
            )
        own = self.do("multiply", program, RECORD)
        for field, ours in ((START, leads), (STOP, closes)):
            b.scatter(
                self.items,
                b.broadcast(b.cast(slot, int32), there.shape),
                b.broadcast(self.do("add", own, field), there.shape),
                b.apply("bit_and", there, ours),
            )

    def write_idle(self, total: Node) -> None:
        """Programs without units, where there are fewer of these."""
        b, programs = self.b, self.walkers
        size = power(programs)
        number = self.line(size)
        none = b.apply(
            "bit_and",
            b.apply("less_equal", b.broadcast(total, (size,)), number),
            b.apply("less", number, b.constant(programs, int64)),
        )
        for field, value in ((START, 0), (STOP, -1)):
            at = self.do("add", self.do("multiply", number, RECORD), field)
            b.scatter(self.items, b.constant(value, int32, (size,)), at, none)
