"""Attention on CPUs for few queries (decode): keys and values are streamed once, as they lie.

A program has all queries of all heads that share one key head, and a part of the keys; d lies
along the lanes. Where there are fewer key heads than workers the keys are split, and a second
Body combines the parts. Invariant: the number of parts depends on the shape and the Target's
cores alone; parts are combined in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...core.config import invariant
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, high, maximum, minimum
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body
from ..attention.shape import AttentionShape, Parameters, parameters
from .tiles import CpuPlan, Kernel, Pairs, up

KEYS = 64  # of a block: their values are still near when they are read again
MOST_ROWS = 16
AHEAD = 16  # keys that are asked for before they are read
LEAST_PART = 256  # keys below which a part costs more than it saves


def choose(x: AttentionShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape, or None where there are too many queries (or a query's sums must be
    those that it has among many)."""
    if "query_starts" in x.extras or x.dropout > 0.0 or invariant():
        return None
    if not isinstance(x.queries, int) or x.queries == 0 or x.queries * x.group > MOST_ROWS:
        return None
    return plan_of(x.queries * x.group, x.sum_dtype, x.value_width, target)


def plan_of(queries: int, dtype: Any, width: int, target: Target, aligned: bool = False) -> CpuPlan:
    """A Plan for so many rows: register tiles of a width as wide as registers allow."""
    lanes, many = target.lanes(dtype), target.vector_registers >= 32
    across = max(1, min(8 if many else 4, -(-width // lanes)))
    rows = max(1, (24 if many else 10) // across)
    return CpuPlan(queries, KEYS, rows, across, lanes, aligned=aligned)


def parts_of(x: AttentionShape, target: Target) -> int:
    """Into how many parts the keys are split: enough for every worker."""
    programs = high(x.batch) * x.key_heads
    workers = max(1, target.cores)
    if programs >= 2 * workers or workers == 1:
        return 1
    wanted = -(-2 * workers // max(1, programs))
    return max(1, min(wanted, high(x.keys) // LEAST_PART))


def partial_parameters(
    x: AttentionShape, lead: Size, plan: CpuPlan, parts: int, use: str = "value"
) -> Parameters:
    """What parts leave behind: results that are not divided yet, maxima and sums; `lead` says how
    many programs there are for a key head and a part."""
    shape = (lead, x.key_heads, parts, plan.queries)
    rows = Memory(shape, x.sum_dtype, use=use)
    wide = Memory((*shape, x.value_width), x.sum_dtype, use=use)
    return [("partial", wide), ("maxima", rows), ("sums", rows)]


class Rows(Kernel):
    """What both Bodies share: rows are the queries of the heads of one key head."""

    parts: int
    part: Size
    notes: dict[str, Any] = {}

    def find_program(self, parts: int) -> Size:
        """This program's part, key head and batch; gives the grid."""
        keys = self.x.key_heads
        grid = self.lead() * keys * parts
        p = self.b.program(0, grid)
        self.part, self.key_head, self.source.batch = (
            p % parts,
            p // parts % keys,
            p // parts // keys,
        )
        return grid

    def lead(self) -> Size:
        """How many programs there are for a key head and a part."""
        return self.x.batch

    def begin(self) -> None:
        """What a program finds out first."""

    def end(self) -> None:
        """What a program does beside its rows."""

    def live(self) -> Size:
        """How many rows there are."""
        return self.plan.queries

    def each_row(self) -> Iterator[Size]:
        """A loop over the rows."""
        return self.b.each("row", 0, self.live(), bounds=(0, self.plan.queries - 1))

    def row_at(self, r: Size) -> tuple[Size, Size]:
        """Head and query of a row."""
        x = self.x
        return self.key_head * x.group + r // x.queries, r % x.queries

    def scaled(self, factor: Node, which: int) -> Node:
        """What queries (0) or sums of values (1) are multiplied by, with the scale of a cache."""
        return factor

    def put(self, r: Size, line: Callable[[Size], Node], most: Node, total: Node) -> None:
        """Store a finished row: line(d) are sums of products not divided yet."""
        b, width = self.b, self.x.value_width
        share = self.scaled(self.v.share_of(total), 1)
        head, query = self.row_at(r)
        for d in self.v.chunks("chunk", width):
            self.source.put_line("out", head, query, d, b.apply("multiply", line(d), share), width)
        if "lse" in self.memory:
            sums = self.v.log_sum(most, total)
            b.store(self.memory["lse"], sums, (self.source.batch, head, query))


class Decode(Rows):
    """Builds the Body that streams keys and values."""

    def __init__(
        self,
        x: AttentionShape,
        more: Sequence[Memory],
        plan: CpuPlan,
        name: str,
        parts: int,
        keeps_sums: bool = True,
    ) -> None:
        given = parameters(x, more)
        if parts > 1:
            given = [*given[:-2], *partial_parameters(x, x.batch, plan, parts, "result")]
        elif not keeps_sums:
            given = given[:-1]
        super().__init__(x, given, plan, name)
        self.parts = parts

    def build(self) -> Body:
        """The Body: one program for each key head and part of the keys."""
        grid = self.find_program(self.parts)
        self.places()
        self.begin()
        for r in self.each_row():
            self.prepare(r)
        for _ in self.each_block():
            self.block()
        for r in self.each_row():
            self.finish(r)
        self.end()
        return self.b.finish((grid,), plan=self.plan, **self.notes)

    def places(self) -> None:
        """Scratch."""
        x, plan = self.x, self.plan
        self.query_rows = self.scratch(plan.queries, up(x.width, plan.lanes))
        self.scores = self.scratch(plan.queries, plan.keys)
        self.result = self.scratch(plan.queries, up(x.value_width, plan.panel))
        self.most, self.total = self.scratch(plan.queries), self.scratch(plan.queries)

    def begin(self) -> None:
        """The keys of this part that some query may see: lower <= j < upper."""
        x = self.x
        self.lower, self.upper = 0, self.source.key_length()
        low, high_ = x.band
        if high_ is not None:
            self.upper = minimum(self.upper, high_ + x.queries)
        if low is not None:
            self.lower = maximum(0, low)
        if self.parts > 1:
            span = -(-high(x.keys) // (self.parts * self.lanes)) * self.lanes
            start = self.part * span
            self.lower = maximum(self.lower, start)
            self.upper = minimum(self.upper, start + span)

    def prepare(self, r: Size) -> None:
        """A query, scaled; its sums as they begin, in the first part."""
        b, x, n = self.b, self.x, self.lanes
        head, query = self.row_at(r)
        for d in self.v.chunks("chunk", x.width):
            part = b.cast(self.source.line("q", head, query, d, n, x.width), self.sum)
            factor = self.scaled(self.v.constant(self.holes.first), 0)
            b.store(self.query_rows, b.apply("multiply", part, factor), (r, d), (1,))
        size = high(self.result.shape[1])
        for d in b.each("clear", 0, size, n, bounds=(0, size - n)):
            b.store(self.result, b.constant(0, self.sum, (n,)), (r, d), (1,))
        counts = None
        if self.parts > 1:
            counts = b.apply("equal", b.index(self.part), b.index(0))
        for place, value in zip((self.most, self.total), self.holes.start(head, counts)):
            b.store(place, value, (r,))

    # ---- a block of keys ------------------------------------------------------------------

    def block(self) -> None:
        """Scores, softmax and values of a block of keys."""
        b, n = self.b, self.lanes
        whole = self.count // n * n
        for j in b.each("some", 0, whole, n, bounds=(0, self.plan.keys - n)):
            self.ask(self.key + j + AHEAD)
            for r in self.each_row():
                self.score(r, j)
        if self.count % n != 0:
            with b.when(b.less(whole, self.count)):
                for r in self.each_row():
                    self.score(
                        r, whole, b.apply("less", self.v.steps(n, whole), b.index(self.count))
                    )
        for r in self.each_row():
            self.soften(r)
        self.gather_rows(0, self.plan.queries)

    def ask(self, key: Size) -> None:
        """Bring keys near before they are read: rows of a tile are no stream, values are one."""
        width, line = self.x.width, 64 // self.x.dtype.size
        for d in self.b.each("ask", 0, width, line, bounds=(0, width - 1)):
            for r in range(self.lanes):
                index = self.source.at("k", self.key_head, key + r, d)
                self.b.prefetch(self.memory["k"], *index)

    def score(self, r: Size, j: Size, inside: Node | None = None) -> None:
        """scores[r, j ...] of as many keys as there are lanes, or of those that are `inside`."""
        b, x, n = self.b, self.x, self.lanes
        head, query = self.row_at(r)
        sums = [b.constant(0, self.sum, (n, n))]
        for d in self.v.chunks("chunk", x.width, sums):
            mask = self.v.both(inside, self.v.below(d, n, x.width), (n, n))
            keys = self.key_square(self.key + j, d, mask)
            line = b.load(self.query_rows, (r, d), (n,), (1,))
            sums[0] = b.apply("multiply_add", b.cast(keys, self.sum), line, sums[0])
        total = b.add(ops.reduce(sums[0], axis=1, kind="sum"))
        at = Pairs(self, head, query, self.key + j, banded=x.queries != 1)
        total = self.holes.hidden(self.holes.score(total, at, scaled=True), at)
        if inside is not None:
            total = b.apply("where", inside, total, self.v.constant(-math.inf))
        b.store(self.scores, total, (r, j), (1,))

    def key_square(self, token: Size, d: Size, mask: Node | None) -> Node:
        """Neighbouring keys, a piece of each."""
        return self.source.square("k", self.key_head, token, d, mask)

    def soften(self, r: Size) -> None:
        """Scores of a row to probabilities (not yet divided); its result and sum fade."""
        b, n = self.b, self.lanes
        stop = (self.count + n - 1) // n * n
        bounds = (0, self.plan.keys - n)
        top = [b.constant(-math.inf, self.sum, (n,))]
        for j in b.each("largest", 0, stop, n, top, bounds=bounds):
            top[0] = self.v.greater(b.load(self.scores, (r, j), (n,), (1,)), top[0])
        before = b.load(self.most, (r,))
        most = self.v.greater(b.add(ops.reduce(top[0], axis=0, kind="max")), before)
        base = self.v.base_of(most)
        decay = self.v.power(b.apply("subtract", before, base))
        sums = [b.constant(0, self.sum, (n,))]
        for j in b.each("powers", 0, stop, n, sums, bounds=bounds):
            score = b.load(self.scores, (r, j), (n,), (1,))
            value = self.v.power(b.apply("subtract", score, base))
            b.store(self.scores, value, (r, j), (1,))
            sums[0] = b.apply("add", sums[0], value)
        total = b.apply("multiply", b.load(self.total, (r,)), decay)
        total = b.apply("add", total, b.add(ops.reduce(sums[0], axis=0, kind="sum")))
        b.store(self.total, total, (r,))
        b.store(self.most, most, (r,))
        size = high(self.result.shape[1])
        for d in b.each("fade", 0, size, n, bounds=(0, size - n)):
            part = b.load(self.result, (r, d), (n,), (1,))
            b.store(self.result, b.apply("multiply", part, decay), (r, d), (1,))

    def gather_rows(self, base: Size, count: int) -> None:
        """result[r, :] += probability of key j times value j, for some rows."""
        plan, tiles = self.plan, -(-count // self.plan.rows)
        for number in range(tiles):
            first, last = (count * (number + i) // tiles for i in range(2))
            for d in range(0, self.x.value_width, plan.panel):
                self.gather_tile(base + first, last - first, d)

    def gather_tile(self, first: Size, rows: int, d: int) -> None:
        """A tile of rows by vectors."""
        b, plan, wide = self.b, self.plan, self.plan.panel
        ways = 2 if rows * plan.across < 8 else 1  # sums that do not wait for each other
        zeros = b.constant(0, self.sum, (rows, wide))
        sums = [b.load(self.result, (first, d), (rows, wide), (0, 1)), *[zeros] * (ways - 1)]
        even, bounds = self.count // ways * ways, (0, plan.keys - ways)

        def weighed(j: Size, sums: Node) -> Node:
            value = self.key + j
            line = self.source.line("v", self.key_head, value, d, wide, self.x.value_width)
            return self.weighed(first, rows, j, line, sums)

        for j in b.each("key", 0, even, ways, sums, unroll=4 // ways, bounds=bounds):
            sums[:] = [weighed(j + i, total) for i, total in enumerate(sums)]
        if ways > 1:
            sums = [b.apply("add", *sums)]
            for j in b.each("last", even, self.count, 1, sums, bounds=(0, plan.keys - 1)):
                sums[0] = weighed(j, sums[0])
        b.store(self.result, sums[0], (first, d), (0, 1))

    def weighed(self, first: Size, rows: int, j: Size, line: Node, sums: Node) -> Node:
        """sums + a piece of value j times its probabilities in some rows."""
        b = self.b
        line = b.add(ops.reshape(b.cast(line, self.sum), shape=(1, *line.shape)))
        left = b.load(self.scores, (first, j), (rows, 1), (0, 1))
        return b.add(ops.dot(left, line, sums))

    def finish(self, r: Size) -> None:
        """Store a row, or what it is before parts are combined."""
        b, n, width = self.b, self.lanes, self.x.value_width
        most, total = b.load(self.most, (r,)), b.load(self.total, (r,))

        def line(d: Size) -> Node:
            return b.load(self.result, (r, d), (n,), (1,))

        if self.parts == 1:
            self.put(r, line, most, total)
            return
        place = (self.source.batch, self.key_head, self.part, r)
        b.store(self.memory["maxima"], most, place)
        b.store(self.memory["sums"], total, place)
        for d in self.v.chunks("chunk", width):
            inside = self.v.below(d, n, width)
            b.store(self.memory["partial"], line(d), (*place, d), (4,), inside)


class Combine(Rows):
    """Builds the Body that puts parts together."""

    def __init__(
        self, x: AttentionShape, plan: CpuPlan, name: str, parts: int, keeps_sums: bool = True
    ) -> None:
        given = partial_parameters(x, x.batch, plan, parts)
        given += parameters(x)[3:] if keeps_sums else parameters(x)[3:-1]
        super().__init__(x, given, plan, name)
        self.parts = parts

    def build(self) -> Body:
        """The Body: one program for each key head."""
        grid = self.find_program(1)
        self.begin()
        for r in self.each_row():
            self.row(r)
        self.end()
        return self.b.finish((grid,), plan=self.plan, **self.notes)

    def row(self, r: Size) -> None:
        """One row: parts weighed by 2**(their maximum - the largest)."""
        b, n, width = self.b, self.lanes, self.x.value_width
        lead = (self.source.batch, self.key_head)
        place = [(*lead, part, r) for part in range(self.parts)]
        maxima = [b.load(self.memory["maxima"], at) for at in place]
        most = maxima[0]
        for other in maxima[1:]:
            most = self.v.greater(other, most)
        base = self.v.base_of(most)
        weights = [self.v.power(b.apply("subtract", m, base)) for m in maxima]
        total = self.v.constant(0.0)
        for at, weight in zip(place, weights):
            total = b.apply("multiply_add", b.load(self.memory["sums"], at), weight, total)

        def line(d: Size) -> Node:
            value = b.constant(0, self.sum, (n,))
            for at, weight in zip(place, weights):
                inside = self.v.below(d, n, width)
                part = b.load(self.memory["partial"], (*at, d), (n,), (4,), inside)
                value = b.apply("multiply_add", part, weight, value)
            return value

        self.put(r, line, most, total)
