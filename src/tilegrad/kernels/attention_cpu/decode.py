"""Attention on CPUs for few queries (decode): keys and values are streamed once, as they lie.

A program has a key head, some queries of one sequence with all heads that share it (the rows), and
a part of the keys; d lies along the lanes. Where there are fewer programs than workers the keys are
split, and a second Body combines the parts. Keys that are no float32 are widened once for several
rows. Invariant: the number of parts depends on the shape and the Target's cores alone; parts are
combined in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from ... import tile
from ...core.config import invariant
from ...core.target import Target
from ...ir.symbol import Size, high, round_up
from ...ir.types import Memory
from ...tile.build import Body
from ..attention.shape import AttentionShape, Parameters
from ..attention.softmax import finite, first_of, times
from .engine import CpuPlan
from .score_tiles import BodyWriter, greater
from .source import Source

KEYS, FEW_KEYS = 64, 16  # of a block, whose values are read in one turn, or in several
WIDEST = 64  # elements of a register tile, where vectors are narrow: values are read as they lie
MOST_ROWS = 16
AHEAD = 16  # keys of an array that are asked for before they are read
PARTIAL = ("partial", "maxima", "sums")  # what parts leave behind
COMBINED = ("scales", "lengths", "query_starts", "sinks", "out", "lse")  # and what goes with them
LEAST_PART = 256  # keys below which a part costs more than it saves


def choose(x: AttentionShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape, or None where there are too many queries (or a query's sums must be
    those that it has among many)."""
    if x.packed or x.dropout > 0.0 or invariant():
        return None
    if not isinstance(x.queries, int) or x.queries == 0 or x.queries * x.group > MOST_ROWS:
        return None
    return plan_of(x.queries * x.group, x.dtype.wide, x.value_width, target)


def plan_of(
    queries: int, dtype: Any, width: int, target: Target, aligned: bool = False, page: int = 0
) -> CpuPlan:
    """A Plan for so many rows: register tiles of a width as wide as registers allow. The keys of
    a vector lie in one page, if there are pages."""
    lanes, many = math.gcd(target.lanes(dtype), page), target.vector_registers >= 32
    most = min(16, max(8, WIDEST // lanes)) if many else 4
    across = max(1, min(most, -(-width // lanes)))
    rows = max(1, (24 if many else 10) // across)
    keys = FEW_KEYS if many and across * lanes < width else KEYS
    return CpuPlan(queries, keys, rows, across, lanes, queries, aligned)


def parts_of(x: AttentionShape, target: Target) -> int:
    """Into how many parts the keys are split: enough for every worker."""
    programs = high(x.batch) * x.key_heads
    workers = max(1, target.cores)
    if programs >= 2 * workers or workers == 1:
        return 1
    wanted = -(-2 * workers // max(1, programs))
    return max(1, min(wanted, high(x.keys) // LEAST_PART))


def streamed(
    source: Source, given: Parameters, lead: Size, plan: CpuPlan, name: str, parts: int
) -> list[Body]:
    """One Body for the parameters; where there are several parts, one that leaves them behind
    (results that are not divided yet, maxima and sums) and one that puts them together. `lead` says
    how many programs there are for a key head and a part."""
    if parts == 1:
        return [Decode(source, given, plan, name).build()]
    x = source.x
    rows = (lead, x.key_heads, parts, plan.queries)
    shapes = zip(PARTIAL, ((*rows, x.value_width), rows, rows))
    left = {name: Memory(shape, x.dtype.wide) for name, shape in shapes}
    made = [(name, replace(memory, use="result")) for name, memory in left.items()]
    first = [*(p for p in given if p[1].use == "value"), *made]
    last = [*left.items(), *(p for p in given if p[0] in COMBINED)]
    return [
        Decode(source, first, plan, name, parts).build(),
        Combine(source, last, plan, f"{name}_combine").build(),
    ]


class Rows(BodyWriter):
    """What both Bodies share: rows are the heads of one key head, query by query."""

    shared = True
    work: Any  # the method that takes all rows

    @property
    def each(self) -> int:
        """See `BodyWriter`: whole queries."""
        return self.plan.queries // self.x.group

    def take(self, first: Any, stop: Any) -> None:
        """The rows of some queries."""
        self.first, self.queries = first, stop - first if self.source.several else self.each
        self.rows = tile.range(self.queries * self.x.group)
        self.work()

    def row_at(self, r: Any) -> tuple[Any, Any]:
        """Head and query of a row."""
        group = self.x.group
        return self.key_head * group + r % group, self.first + r // group

    def lead(self) -> tuple[Any, Any]:
        """Where the parts of a program lie."""
        return (self.block if self.source.several else self.source.batch), self.key_head

    @tile.function
    def put(self, r: Any, line: Callable[[Any], Any], most: Any, total: Any) -> None:
        """Store a finished row: line(d) are sums of products not divided yet."""
        x, source = self.x, self.source
        head, query = self.row_at(r)
        share, sums = source.holes(head).ended(most, total)
        share = times(share, source.scale(1, self.key_head))
        place = source.place("out", head, query)
        for d in tile.range(0, x.value_width, self.lanes):
            source.put(place, d, line(d) * share)
        if "lse" in self.memory:
            self.memory["lse"][source.batch, head, query] = sums


class Decode(Rows):
    """Writes the Body that streams keys and values."""

    def allocate_scratch(self) -> None:
        """Queries, scores and sums of the rows; keys that are widened."""
        x, plan = self.x, self.plan
        place = [round_up(x.width, plan.lanes), plan.keys, round_up(x.value_width, plan.panel)]
        self.query_rows, self.scores, self.result = (
            tile.scratch((plan.queries, width), self.sum) for width in place
        )
        self.most, self.total = (tile.scratch((plan.queries,), self.sum) for _ in range(2))
        self.wide: Any = None
        if self.memory["k"].dtype is not self.sum and plan.queries > 1:
            self.wide = tile.scratch((plan.lanes, place[0]), self.sum)

    @tile.function
    def work(self) -> None:
        """All rows over all blocks of keys of this part that some query may see."""
        n, source = self.lanes, self.source
        lower, upper = self.seen(self.first, self.first + self.queries, source.run)
        if self.parts > 1:
            unit = self.parts * n
            span = tile.ceil_divide(tile.maximum(0, upper - lower), unit) * n
            lower = lower + self.part * span
            upper = tile.minimum(upper, lower + span)
        self.upper = upper
        for r in self.rows:
            self.prepare(r)
        self.for_blocks(lower, self.upper)
        for r in self.rows:
            self.finish(r)

    @tile.function
    def prepare(self, r: Any) -> None:
        """A query; its sums as they begin."""
        x, n, source = self.x, self.lanes, self.source
        place, scale = source.place("q", *self.row_at(r)), source.scale(0, self.key_head)
        for d in tile.range(0, x.width, n):
            line = tile.cast(source.load(place, d, (n,)), self.sum)
            self.query_rows[r, d : d + n] = times(line, scale)
        for d in tile.range(0, self.result.shape[1], n):
            self.result[r, d : d + n] = 0.0
        self.most[r], self.total[r] = -tile.INF, 0.0

    # ---- a block of keys ------------------------------------------------------------------

    @tile.function
    def step(self) -> None:
        """Scores, softmax and values of a block of keys."""
        n, count, source = self.lanes, self.count, self.source
        whole = count if source.several else count // n * n
        for j in tile.range(0, whole, n, bounds=(0, self.plan.keys - n)):
            if not source.run:
                source.ask_rows("k", self.key_head, self.key + j + AHEAD)
            self.score_some(j, None)
        if whole < count:
            self.score_some(whole, first_of(n, count - whole))
        for r in self.rows:
            self.soften(r)
        if source.several:
            for q in tile.range(self.queries):
                self.gather(q * self.x.group, self.x.group)
        else:
            self.gather(0, self.plan.queries)

    @tile.function
    def score_some(self, j: Any, inside: Any | None) -> None:
        """Scores of as many keys as there are lanes, or of those that are `inside`."""
        x, n, source, key = self.x, self.lanes, self.source, self.key + j
        place = source.place("k", self.key_head, key)
        values = place._replace(name="v")
        if self.wide is not None:
            for d in tile.range(0, x.width, n):
                tile.store(self.wide, (0, d), source.load(place, d, (n, n), inside))
        for r in self.rows:
            head, query = self.row_at(r)
            for row in range(0, n if source.run else 0, x.group):
                source.ask(values, r % x.group + row)
            sums = tile.zeros((n, n), self.sum)
            for d in tile.range(0, x.width, n):
                keys = (
                    tile.cast(source.load(place, d, (n, n), inside), self.sum)
                    if self.wide is None
                    else self.wide[0:n, d : d + n]
                )
                sums = tile.multiply_add(keys, self.query_rows[r, d : d + n], sums)
            holes = source.holes(head)
            s = holes.score(tile.sum(sums, 1)[None, :], query, key)
            s = holes.hidden(s, query, key, self.upper, inside is not None)
            tile.store(self.scores, (r, j), s)

    @tile.function
    def soften(self, r: Any) -> None:
        """Scores of a row to probabilities (not yet divided); its result and sum fade."""
        n, bounds = self.lanes, (0, self.plan.keys - self.lanes)
        stop = tile.ceil_divide(self.count, n) * n
        top = tile.full((n,), -tile.INF, self.sum)
        for j in tile.range(0, stop, n, bounds=bounds):
            top = greater(tile.load(self.scores[r, j : j + n]), top)
        before = tile.load(self.most[r])
        most = greater(tile.max(top, 0), before)
        base = finite(most)
        decay = self.weight(before, base)
        sums = tile.zeros((n,), self.sum)
        for j in tile.range(0, stop, n, bounds=bounds):
            weight = self.weight(self.scores[r, j : j + n], base)
            self.scores[r, j : j + n] = weight
            sums = sums + weight
        self.total[r] = self.total[r] * decay + tile.sum(sums, 0)
        self.most[r] = most
        for d in tile.range(0, self.result.shape[1], n):
            self.result[r, d : d + n] *= decay

    def gather(self, base: Any, count: int) -> None:
        """result[r, :] += probability of key j times value j, for some rows."""
        plan, tiles = self.plan, -(-count // self.plan.rows)
        for number in range(tiles):
            first, last = (count * (number + i) // tiles for i in range(2))
            for d in range(0, self.x.value_width, plan.panel):
                asks = number == 0 and d == 0 and self.source.run > 0
                self.gather_tile(base + first, last - first, d, asks)

    @tile.function
    def gather_tile(self, first: Any, rows: int, d: int, asks: bool) -> None:
        """A tile of rows by vectors; the first one asks for the next block's keys in pages."""
        plan, source, run = self.plan, self.source, self.source.run or self.plan.keys
        ways = 2 if rows * plan.across < 8 else 1  # sums that do not wait for each other
        zeros = tile.zeros((rows, plan.panel), self.sum)
        sums = [tile.load(self.result, (first, d), (rows, plan.panel)), *[zeros] * (ways - 1)]
        runs: Any = (0,)
        if run < plan.keys:
            runs = tile.range(0, self.count, run, bounds=(0, plan.keys - run))
        for j in runs:
            place = source.place("v", self.key_head, self.key + j)
            ahead = tile.minimum(self.key + j + plan.keys, self.upper - 1) // run * run
            following = source.place("k", self.key_head, ahead)
            here = tile.minimum(self.count - j, run)
            even = here // ways * ways
            for i in tile.range(0, even, ways, unroll=4 // ways, bounds=(0, run - ways)):
                for way in range(ways if asks else 0):
                    source.ask(following, i + way)
                sums = [
                    self.weighed(first, place, j, i + way, d, total)
                    for way, total in enumerate(sums)
                ]
            if ways > 1:
                for i in tile.range(even, here, bounds=(0, run - 1)):
                    sums = [self.weighed(first, place, j, i, d, sums[0]), *sums[1:]]
        tile.store(self.result, (first, d), reduce(add, sums))

    def weighed(self, first: Any, place: Any, j: Any, i: Any, d: int, sums: Any) -> Any:
        """sums + a piece of value j + i times its probabilities in some rows."""
        line = tile.cast(self.source.load(place, d, (self.plan.panel,), i=i), self.sum)
        left = tile.load(self.scores, (first, j + i), (sums.shape[0], 1))
        return tile.dot(left, line[None, :], sums)

    @tile.function
    def finish(self, r: Any) -> None:
        """Store a row, or what it is before parts are combined."""
        n, width = self.lanes, self.x.value_width
        most, total = tile.load(self.most[r]), tile.load(self.total[r])
        if self.parts == 1:
            self.put(r, lambda d: self.result[r, d : d + n], most, total)
            return
        place = (*self.lead(), self.part, r)
        self.memory["maxima"][place], self.memory["sums"][place] = most, total
        for d in tile.range(0, width, n):
            line, mask = self.result[r, d : d + n], first_of(n, width - d)
            tile.store(self.memory["partial"], (*place, d), line, axes=(4,), mask=mask)


class Combine(Rows):
    """Writes the Body that puts parts together, in their order."""

    @tile.function
    def work(self) -> None:
        """Row by row: parts weighed by 2**(their maximum - the largest)."""
        n, width = self.lanes, self.x.value_width
        for r in self.rows:
            indices = [
                (*self.lead(), part, r) for part in range(int(self.memory["maxima"].shape[2]))
            ]
            maxima = [tile.load(self.memory["maxima"][index]) for index in indices]
            most = reduce(lambda most, other: greater(other, most), maxima)
            base = finite(most)
            weights = [self.weight(one, base) for one in maxima]
            total = tile.zeros((), self.sum)
            for index, weight in zip(indices, weights):
                total = tile.multiply_add(self.memory["sums"][index], weight, total)

            def line(d: Any, indices: Any = indices, weights: Any = weights) -> Any:
                value, mask = tile.zeros((n,), self.sum), first_of(n, width - d)
                for index, weight in zip(indices, weights):
                    given = (self.memory["partial"], (*index, d), (n,))
                    part = tile.load(*given, axes=(4,), mask=mask)
                    value = tile.multiply_add(part, weight, value)
                return value

            self.put(r, line, most, total)
