"""A decode step of few requests: append and attention in one launch, as soon as it can be done.

One token a request at most. A cluster of programs takes a request and a key head; the program of
rank r takes the blocks r, r + programs, ... of the request's earlier keys, so that its first page
numbers do not depend on the length. It needs no work list and no scratch in global memory: sums
meet in the shared memory of the cluster, each program finishes some columns of the result.

The new token never goes through the ring. Its key and value, turned and rounded as the cache keeps
them, are where the sums of one program (that of the block it lies in) begin: weight 1, its own
score the largest so far. That program writes them to the cache when its copies are over, and
zeros for values in the rest of a page that begins, as `paged_append` does.

Latencies, at 1024 keys of width 128 and 8 programs for a key head (ns, about): numbers of pages,
length (300); keys and values from memory (900), while queries and the new key are turned; scores
(150), two meetings and weights (200), values (150), of two blocks each; sums to the others' memory
(300); result (100). Measured: 4.2 us a launch of many in a row on an H200, 3.3 with 256 keys; bytes
need 1.0, so latency bounds it.

Invariant: a request's result depends on its own pages alone, and the sum over programs runs in
the order of their ranks; of the cache, what `paged_append` writes is written, nothing else.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from ... import tile
from ...core.dtype import float32, int64
from ...ir.symbol import high
from ...tile.build import Body, BodyBuilder
from ..attention.shape import refuse
from ..attention.softmax import clamped, finite, some_sum, times
from ..attention.tile_order import bounded, number_at
from .append import Rotary, append_parameters, clear_rest, kept
from .shape import PagedPlan, PagedShape, why_not
from .steps import BARRIER, Steps

CLEARED = 16  # rows that are written at once


def step_attend(x: PagedShape, plan: PagedPlan, rotary: Rotary) -> Body:
    """The kernel."""
    refuse("kernels.paged.short", why_not(x, plan), plan, x)
    b = BodyBuilder("paged_attention_short", append_parameters(x, rotary, "out"))
    return _Short(x, plan, rotary, b).build()


class _Short(Steps):
    """Builds one Body of `step_attend`."""

    early = True

    def __init__(self, x: PagedShape, plan: PagedPlan, rotary: Rotary, b: BodyBuilder) -> None:
        super().__init__(x, plan, b)
        self.rotary, self.norms = rotary, rotary.norms
        self.reach = x.window - 1  # the new token sees itself
        self.tokens = 1
        self.most = max(1, high(x.most_pages) * x.page)  # keys of a request

    def build(self) -> Body:
        """Places, barriers, roles."""
        x, plan, many, half = self.x, self.plan, self.plan.cluster, self.rotary.width // 2
        total = x.requests * (x.key_heads * many)
        with tile.into(self.b):
            self.allocate_shared()
            if half:
                self.turns = tile.shared((2, half))  # cosines, sines
            # what is finished here, by who sent it; best scores and weights
            self.parts = tile.shared((many, self.widths[1] // many, plan.rows))
            self.weighed = tile.shared((many, 2, plan.rows))
            self.gathered = tile.barrier("gathered", 1)
            pair = tile.grid(total) // many
            self.rank = tile.cluster(many)
            self.request, self.head = pair // x.key_heads, pair % x.key_heads
            self.roles()
        return self.b.finish(
            (total,), plan=plan, cluster=(many,), distinct=True, alone=plan.alone, level="placed"
        )

    # ---- what a program does --------------------------------------------------------------------

    def find(self) -> None:
        """The request's token, the keys before it, and the program's blocks of these."""
        x, plan, many = self.x, self.plan, self.plan.cluster
        starts, lengths = self.memory["query_starts"], self.memory["lengths"]
        first, last = (number_at(starts, self.request + i) for i in (0, 1))
        length = number_at(lengths, self.request)
        self.there = first < last
        self.counts = self.there & (length > 0)
        before = tile.where(self.there, clamped(length - 1, 0, self.most - 1), 0)
        self.sees = tile.hold(before, "before", (0, self.most - 1))
        # Requests without a token write the zeros of those that belong to none, one after another.
        token = tile.where(self.there, first, number_at(starts, x.requests) + self.request - first)
        self.writes = token < x.tokens
        self.token = bounded(token, "token", x.tokens - 1)
        self.first: Any = 0
        if x.window:
            self.first = tile.maximum(self.sees + 1 - x.window, 0) // plan.block
        blocks = tile.ceil_divide(self.sees, plan.block) - self.first
        mine = tile.maximum(tile.ceil_divide(blocks - self.rank, many), 0)
        self.blocks = tile.hold(mine, "blocks", (0, -(-self.most_blocks // many)))
        owner = (self.sees // plan.block - self.first) % many
        self.owns = tile.cast(owner, int64) == self.rank

    def block(self, step: Any) -> Any:
        """See `Steps`: the programs of a cluster take turns."""
        return self.first + self.rank + step * self.plan.cluster

    def producer(self, which: int) -> None:
        """Fill the ring of keys or of values."""
        self.find()
        self.bring(which, self.blocks, 0, self.request, self.sees)

    @tile.function
    def consumer(self) -> None:
        """Turn, multiply, exchange, finish."""
        plan, x = self.plan, self.x
        each = plan.rows * (self.widths[1] // plan.cluster + 2) * float32.size
        self.gathered.expect(0, each * plan.cluster)
        self.make_tiles()
        self.load_extras()
        self.find()
        page = bounded(self.table[self.request, self.sees // x.page], "page", x.pages - 1)
        best, sums = self.begin()
        for step in tile.range(self.blocks):
            best, sums = self.step(step, step, best, sums)
        # each program of the cluster gets the columns that it finishes, of every program
        tile.send(self.parts[self.rank], tile.read(self.total), self.gathered[0], "shares")
        for which, line in enumerate((best, sums)):
            tile.send(self.weighed[self.rank, which], line, self.gathered[0])
        self.gathered.wait(0, 0)
        self.finish()
        if self.owns & self.there:
            self.append(page)

    def begin(self) -> tuple[Any, Any]:
        """Queries into their place; (best, sums) and the total to begin with: those of the new
        token where it belongs here. All that is read is asked for before the warps first meet."""
        x, rows = self.x, self.plan.rows
        column, row = (
            self.column(tile.arange(self.widths[0])[None, :], False),
            tile.arange(rows)[:, None],
        )
        inside = (column < x.width) & self.there
        first = (self.token * x.heads + self.head * x.group) * x.width
        heads = self.read("q", row * x.width + first, column, inside & (row < x.group))
        first = (self.token * x.key_heads + self.head) * x.width
        new = self.read("k", first, column, inside)
        columns = tile.arange(self.widths[1])
        value = self.load_value(self.column(columns[:, None], True))
        self.value = self.load_value(columns[None, :])
        angle = self.angles(column)
        queries = tile.cast(tile.cast(self.rotated("q", heads, angle), x.dtype), self.operand)
        tile.write(self.queries, queries)
        self.new_key = kept(self.rotated("k", new, angle), x.cache, self.factors[0])
        product = tile.cast(queries, float32) * tile.cast(self.new_key, float32)
        score = self.scaled(tile.sum(product, 1))
        self.meet()
        here = tile.broadcast(self.owns & self.counts, (rows,))
        tile.write(self.total, tile.where(here, tile.cast(value, float32), 0.0))
        return tile.where(here, score, -tile.INF), tile.where(here, tile.full((), 1.0), 0.0)

    def load_value(self, at: Any) -> Any:
        """The new value's columns, as the cache keeps them."""
        x = self.x
        first = (self.token * x.key_heads + self.head) * x.value_width
        value = tile.load(self.memory["v"], at + first, mask=(at < x.value_width) & self.there)
        return kept(tile.cast(value, float32), x.cache, self.factors[1])

    # ---- turning --------------------------------------------------------------------------------

    def angles(self, column: Any) -> tuple[Any, Any] | None:
        """Cosines and sines (with the sign that a column's partner has) of every column: made
        once, a thread each, and looked up."""
        half = self.rotary.width // 2
        if not half:
            return None
        found = tile.load(self.memory["frequencies"], (0,), (half,))
        for row, values in enumerate(self.rotary.turns(found, self.sees)):
            tile.write(self.turns[row], values)
        tile.named_sync(BARRIER, self.threads)
        pair, leads, _ = self.pairs(column)
        inside = column < 2 * half
        cosine, sine = (tile.load(self.turns, pair + i * half, mask=inside) for i in range(2))
        sine = tile.where(leads, 0.0 - sine, sine)
        return tile.where(inside, cosine, 1.0), tile.where(inside, sine, 0.0)

    def read(self, name: str, first: Any, column: Any, inside: Any) -> tuple[list[Any], list[Any]]:
        """Heads of which each begins at `first`, and what their elements turn with; the weights of
        the norms of both, if there are any."""
        columns, weights = [column], []
        if self.rotary.width:
            other = self.pairs(column)[2]
            columns.append(tile.where(column < self.rotary.width, other, column))
        parts = [tile.load(self.memory[name], first + at, mask=inside) for at in columns]
        if self.norms is not None:
            weight = self.memory[f"{name}_norm"]
            weights = [tile.load(weight, at, mask=at < self.x.width) for at in columns]
        return parts, weights

    def rotated(self, name: str, heads: tuple[list[Any], list[Any]], angle: Any) -> Any:
        """Heads (float32) by their norm, if they have one, their first elements turned."""
        parts = [tile.cast(part, float32) for part in heads[0]]
        if self.norms is not None:
            squares = tile.sum(parts[0] * parts[0], 1)
            parts = self.norms.applied(self.x, name, squares, parts, heads[1])
        return parts[0] if angle is None else parts[0] * angle[0] + parts[1] * angle[1]

    def pairs(self, column: Any) -> tuple[Any, Any, Any]:
        """Of columns that turn: the number of the pair, whether one is its first, the other one."""
        half = self.rotary.width // 2
        if self.rotary.interleaved:
            first = tile.unsigned_remainder(column, 2) == 0
            return tile.unsigned_divide(column, 2), first, column ^ 1
        first = column < half
        other = tile.where(first, column + half, column - half)
        return tile.unsigned_remainder(column, half), first, other

    # ---- the cluster ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Columns of the result: parts weighted by how far their best scores are apart."""
        best = [tile.read(self.weighed[r, 0]) for r in range(self.plan.cluster)]
        begun = [] if self.sinks is None else [self.sinks]
        base = finite(reduce(tile.maximum, [*best, *begun]))
        sums, parts = [tile.quick_exp2(one - base) for one in begun], []
        for r, one in enumerate(best):
            weight = tile.quick_exp2(one - base)
            sums.append(tile.read(self.weighed[r, 1]) * weight)
            parts.append(tile.read(self.parts[r]) * weight)
        share = times(1.0 / some_sum(reduce(add, sums)), self.factors[1])
        x, result = self.x, reduce(add, parts) * share  # (columns, rows)
        shape = result.shape
        columns = tile.arange(shape[0]) + self.rank * shape[0]
        at, row = self.column(columns[:, None], True), tile.arange(shape[1])
        inside = (at < x.value_width) & (row < x.group) & self.writes
        first = (self.token * x.heads + self.head * x.group) * x.value_width
        tile.store(self.out, row * x.value_width + at + first, result, mask=inside)

    # ---- the cache ------------------------------------------------------------------------------

    @tile.function
    def append(self, page: Any) -> None:
        """The new key and value into the cache; in a page that begins, zeros after the value."""
        x, at = self.x, self.sees % self.x.page
        for which, (value, width) in enumerate(
            zip((self.new_key, self.value), (x.width, x.value_width))
        ):
            column = tile.arange(value.shape[1])[None, :]
            if which == 0 and x.scaled:
                column = self.column(column, False)
                first = ((page * x.key_heads + self.head) * x.page + at) * width
                tile.store(self.cache[0], column + first, value, mask=column < width)
            else:
                where = (page, self.head, at, 0)
                tile.store(self.cache[which], where, value, mask=column < width)
        if at < 1:
            clear_rest(x, self.cache[1], (page, self.head), at, CLEARED)
