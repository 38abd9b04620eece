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
from .steps import BARRIER, Steps, counted

CLEARED = 16  # rows that are written at once


def step_attend(x: PagedShape, plan: PagedPlan, rotary: Rotary) -> Body:
    """The kernel."""
    refuse("kernels.paged.short", why_not(x, plan), plan, x)
    b = BodyBuilder("paged_attention_short", append_parameters(x, rotary, "out"))
    return _Short(x, plan, rotary, b).build()


class _Short(Steps):
    """Builds one Body of `step_attend`."""

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
        zero = tile.full((), 0, int64)
        self.there = first < last
        self.counts = self.there & (zero < length)
        before = tile.where(self.there, clamped(length - 1, 0, self.most - 1), zero)
        self.sees = tile.hold(before, "before", (0, self.most - 1))
        # Requests without a token write the zeros of those that belong to none, one after another.
        token = tile.where(self.there, first, number_at(starts, x.requests) + self.request - first)
        self.writes = token < x.tokens
        self.token = bounded(token, "token", x.tokens - 1)
        self.first: Any = 0
        if x.window:
            self.first = tile.maximum(self.sees + 1 - x.window, 0) // plan.block
        blocks = tile.ceil_divide(self.sees, plan.block) - self.first
        mine = tile.maximum((blocks - self.rank + many - 1) // many, 0)
        self.blocks = tile.hold(mine, "blocks", (0, -(-self.most_blocks // many)))
        owner = (self.sees // plan.block - self.first) % many
        self.owns = tile.cast(owner, int64) == self.rank

    def block(self, step: Any) -> Any:
        """The number of the program's block of a step."""
        return self.first + self.rank + step * self.plan.cluster

    def producer(self, which: int) -> None:
        """Fill the ring of keys or of values."""
        self.find()
        self.bring(which, self.blocks, 0, self.request, self.sees, self.block, True)

    @tile.function
    def consumer(self) -> None:
        """Turn, multiply, exchange, finish."""
        plan, x = self.plan, self.x
        each = plan.rows * (self.widths[1] // plan.cluster + 2) * float32.size
        self.gathered.expect(0, each * plan.cluster)
        self.make_tiles()
        self.load_factors()
        self.find()
        page = bounded(self.table[self.request, self.sees // x.page], "page", x.pages - 1)
        best, sums = self.begin()
        for step in tile.range(self.blocks):
            best, sums = self.step(step, self.block(step), best, sums)
        # each program of the cluster gets the columns that it finishes, of every program
        tile.send(self.parts[self.rank], tile.read(self.total), self.gathered[0], "shares")
        for which, line in enumerate((best, sums)):
            line = tile.reshape(line, (plan.rows,))
            tile.send(self.weighed[self.rank, which], line, self.gathered[0])
        self.gathered.wait(0, 0)
        self.finish()
        if self.owns & self.there:
            self.append(page)

    def begin(self) -> tuple[Any, Any]:
        """Queries into their place; (best, sums) and the total to begin with: those of the new
        token where it belongs here. All that is read is asked for before the warps first meet."""
        x, rows = self.x, self.plan.rows
        shape = (rows, self.widths[0])
        column, row = self.at_key(counted(shape, 1)), counted(shape, 0)
        real = row < x.group
        line = row * x.width
        first = (self.token * x.heads + self.head * x.group) * x.width
        heads = self.read("q", line + first, real, column, shape)
        first = (self.token * x.key_heads + self.head) * x.width
        new = self.read("k", tile.cast(first, int64), None, column, (1, shape[1]))
        down, across = (self.widths[1], 1), (1, self.widths[1])
        value = self.load_value(self.at_value(counted(down, 0)))
        self.value = self.load_value(counted(across, 1))
        self.load_sinks()
        angle = self.angles(column)
        queries = tile.cast(tile.cast(self.rotated(heads, "q", angle), x.dtype), self.operand)
        tile.write(self.queries, queries)
        self.new_key = self.kept(self.rotated(new, "k", angle), 0)
        product = tile.cast(queries, float32) * tile.cast(self.new_key, float32)
        score = tile.reshape(self.scaled(tile.sum(product, 1)), (1, rows))
        self.meet()
        here = self.owns & self.counts
        zero, line = tile.zeros(()), tile.broadcast(here, (1, rows))
        some = tile.where(here, tile.cast(value, float32), zero)
        tile.write(self.total, tile.broadcast(some, (self.widths[1], rows)))
        return tile.where(line, score, -tile.INF), tile.where(line, tile.full((), 1.0), zero)

    def load_value(self, at: Any) -> Any:
        """The new value's columns, as the cache keeps them."""
        x = self.x
        inside = (at < x.value_width) & self.there
        first = (self.token * x.key_heads + self.head) * x.value_width
        return self.kept(
            tile.cast(tile.load(self.memory["v"], at + first, mask=inside), float32), 1
        )

    def kept(self, value: Any, which: int) -> Any:
        """Keys or values as the cache keeps them."""
        return kept(value, self.x.cache, self.factors[which])

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
        number = tile.full((), half, int64)
        if self.rotary.interleaved:
            pair = tile.unsigned_divide(column, 2)
            leads = tile.unsigned_remainder(column, 2) == 0
        else:
            pair = tile.unsigned_remainder(column, number)
            leads = column < number
        inside = column < 2 * half
        cosine, sine = (tile.load(self.turns, pair + i * half, mask=inside) for i in range(2))
        zero, one = tile.zeros(()), tile.full((), 1.0)
        sine = tile.where(leads, zero - sine, sine)
        return tile.where(inside, cosine, one), tile.where(inside, sine, zero)

    def read(
        self, name: str, first: Any, real: Any, column: Any, shape: tuple[int, int]
    ) -> list[tuple[Any, ...]]:
        """Heads of which each begins at `first`, and what their elements turn with, each with the
        weights of its norm."""
        inside = (column < self.x.width) & self.there
        if real is not None:
            inside = inside & real
        columns = [column, self.partner(column)] if self.rotary.width else [column]
        offsets = [tile.broadcast(first + at, shape) for at in columns]
        parts = [[tile.load(self.memory[name], offset, mask=inside) for offset in offsets]]
        if self.norms is not None:
            weight = self.memory[f"{name}_norm"]
            parts.append([tile.load(weight, at, mask=at < self.x.width) for at in columns])
        return list(zip(*parts))

    def rotated(self, heads: list[tuple[Any, ...]], name: str, angle: Any) -> Any:
        """Heads (float32) by their norm, if they have one, their first elements turned."""
        wide = [tile.cast(part, float32) for part, *_ in heads]
        if self.norms is not None:
            squares = tile.sum(wide[0] * wide[0], 1) / self.x.width
            weights = (tile.cast(weight, float32) for _, weight in heads)
            wide = self.norms.applied(name, squares, wide, weights, self.x.dtype)
        if angle is None:
            return wide[0]
        return wide[0] * angle[0] + wide[1] * angle[1]

    def partner(self, column: Any) -> Any:
        """The column that a column turns with; those that do not turn have themselves."""
        half = self.rotary.width // 2
        if self.rotary.interleaved:
            other = column ^ 1
        else:
            other = tile.where(column < half, column + half, column - half)
        return tile.where(column < 2 * half, other, column)

    # ---- the cluster ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Columns of the result: parts weighted by how far their best scores are apart."""
        best = [tile.read(self.weighed[r, 0]) for r in range(self.plan.cluster)]
        begun = [] if self.sinks is None else [tile.reshape(self.sinks, best[0].shape)]
        base = finite(reduce(tile.maximum, [*best, *begun]))
        sums, parts = [tile.quick_exp2(one - base) for one in begun], []
        for r, one in enumerate(best):
            weight = tile.quick_exp2(one - base)
            sums.append(tile.read(self.weighed[r, 1]) * weight)
            parts.append(tile.read(self.parts[r]) * weight[None, :])
        share = times(1.0 / some_sum(reduce(add, sums)), self.factors[1])
        x, result = self.x, reduce(add, parts) * share[None, :]  # (columns, rows)
        shape = result.shape
        at, row = self.at_value(counted(shape, 0, self.rank * shape[0])), counted(shape, 1)
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
            column = counted(value.shape, 1)
            if which == 0 and x.scaled:
                column = self.at_key(column)
                first = ((page * x.key_heads + self.head) * x.page + at) * width
                tile.store(self.cache[0], column + first, value, mask=column < width)
            else:
                where = (page, self.head, at, 0)
                tile.store(self.cache[which], where, value, mask=column < width)
        if at < 1:
            clear_rest(x, self.cache[1], (page, self.head), at, CLEARED)
