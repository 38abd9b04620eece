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

import math
from collections.abc import Sequence
from functools import partial

from ...core.dtype import float32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum, minimum
from ...ir.types import Memory
from ...tile import ops, placed
from ...tile.build import Body
from ...tile.placed import PlacedBuilder
from .append import Rotary, append_parameters
from .shape import PagedShape, ShortPlan, short_why_not
from .steps import BARRIER, Steps

AHEAD = 4  # blocks whose pages are asked for at once, before they are needed
CLEARED = 16  # rows that are written at once


def short_parameters(x: PagedShape, rotary: Rotary) -> list[tuple[str, Memory]]:
    """q, k, v, frequencies, scales (of 8 bits), table, lengths, query_starts, keys, values, and
    the result."""
    made = append_parameters(x, rotary)[:-1]
    out = Memory((x.tokens, x.heads, x.value_width), x.dtype, use="result")
    return [*made, ("out", out)]


def step_attend(
    x: PagedShape, plan: ShortPlan, rotary: Rotary, name: str = "paged_attention_short"
) -> Body:
    """The kernel."""
    why = short_why_not(x, plan)
    if why:
        raise InternalError("kernels.paged.short", f"{why}: {plan} for {x}")
    return _Short(x, plan, rotary, PlacedBuilder(name, short_parameters(x, rotary))).build()


class _Short(Steps):
    """Builds one Body of `step_attend`."""

    plan: ShortPlan

    def __init__(self, x: PagedShape, plan: ShortPlan, rotary: Rotary, b: PlacedBuilder) -> None:
        super().__init__(x, plan, b)
        self.rotary = rotary
        self.reach = x.window - 1  # the new token sees itself
        self.most = max(1, high(x.most_pages) * x.page)  # keys of a request

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, x, plan = self.b, self.x, self.plan
        self.make_places()
        many, half = plan.cluster, self.rotary.width // 2
        if half:
            self.turns = b.allocate((2, half), float32, "shared")  # cosines, sines
        shape = (many, self.widths[1] // many, plan.rows)
        self.parts = b.allocate(shape, float32, "shared")  # what is finished here, by who sent it
        self.weighed = b.allocate((many, 2, plan.rows), float32, "shared")  # best scores, weights
        self.gathered = b.barrier("gathered", 1)
        total = x.requests * (x.key_heads * many)
        program = b.program(0, total)
        self.rank = b.cluster_rank(many)
        pair = program // many
        self.request, self.head = pair // x.key_heads, pair % x.key_heads
        b.role("multiply", plan.warps, 0, self.consumer)
        b.role("bring_keys", 1, 0, lambda: self.producer(0))
        b.role("bring_values", 1, 0, lambda: self.producer(1))
        return b.finish(
            (total,), plan=plan, cluster=(many,), distinct=True, alone=plan.alone, level="placed"
        )

    # ---- what a program does --------------------------------------------------------------------

    def find(self) -> None:
        """The request's token, the keys before it, and the program's blocks of these."""
        b, x, plan, many = self.b, self.x, self.plan, self.plan.cluster
        starts = self.memory["query_starts"]
        first, last = (b.cast(b.load(starts, (self.request + i,)), int64) for i in (0, 1))
        length = b.cast(b.load(self.memory["lengths"], (self.request,)), int64)
        zero = b.constant(0, int64)
        self.there = b.apply("less", first, last)
        self.sees = b.apply("bit_and", self.there, b.apply("less", zero, length))
        before = self.within(b.apply("subtract", length, b.index(1)), 0, self.most - 1)
        before = b.apply("where", self.there, before, zero)
        self.before = b.atom("before", before, 0, self.most - 1)
        token = self.within(first, 0, high(x.tokens) - 1)
        self.token = b.atom("token", token, 0, high(x.tokens) - 1)
        self.first: Size = 0
        if x.window:
            self.first = maximum(self.before + 1 - x.window, 0) // plan.block
        blocks = ceil_divide(self.before, plan.block) - self.first
        mine = maximum((blocks - self.rank + many - 1) // many, 0)
        self.blocks = b.atom("blocks", b.index(mine), 0, -(-self.most_blocks // many))
        owner = (self.before // plan.block - self.first) % many
        self.owns = b.apply("equal", b.index(owner), b.index(self.rank))

    def block(self, step: Size) -> Size:
        """The number of the program's block of a step."""
        return self.first + self.rank + step * self.plan.cluster

    # ---- bringing -------------------------------------------------------------------------------

    def producer(self, which: int) -> None:
        """Fill the ring of keys or of values."""
        b, plan, x = self.b, self.plan, self.x
        full, empty, width = self.full[which], self.empty[which], self.widths[which]
        rows, together = min(x.page, plan.block), min(plan.stages, AHEAD)
        bytes_ = plan.block * width * x.cache.size
        b.do(placed.grid_dependency_wait)
        self.find()

        def copy(s: Size, pages: Node) -> Sequence[Node]:
            stage, lap = self.slot(0, s)
            b.wait(empty, stage, (lap + 1) % 2)
            b.expect(full, stage, bytes_)
            within = self.block(s) * plan.block % x.page if x.page > plan.block else 0
            b.copy_pages(
                self.rings[which],
                (stage,),
                self.cache[which],
                pages,
                (0, self.head, within, 0),
                (rows, width),
                (2, 3),
                full,
                stage,
                plan.hint,
            )
            return ()

        def some(s: Size, carried: list[Node]) -> Sequence[Node]:
            following = [self.pages(s + together + i) for i in range(together)]
            copy(s, carried[0])
            for i in range(1, together):
                b.branch(b.less(s + i, self.blocks), partial(copy, s + i, carried[i]))
            return following

        b.loop("step", 0, self.blocks, together, some, [self.pages(i) for i in range(together)])

    def pages(self, step: Size) -> Node:
        """The pages of a block of keys; -1, which reads as zeros, past the last earlier key. They
        are asked for whatever the length, and chosen when both are there."""
        b, plan, x = self.b, self.plan, self.x
        count = max(1, plan.block // x.page)
        at = self.block(step) * plan.block // x.page
        line = b.apply("add", b.add(ops.iota(size=count, dtype=int64)), b.index(at))
        inside = b.apply("less", line, b.index(x.most_pages))
        found = b.load(self.table, (self.request, at), (count,), (1,), inside)
        seen = b.apply(
            "less", line, b.index(minimum(ceil_divide(self.before, x.page), x.most_pages))
        )
        return b.apply("where", seen, b.cast(found, int64), b.constant(-1, int64))

    # ---- multiplying ----------------------------------------------------------------------------

    def consumer(self) -> None:
        """Turn, multiply, exchange, finish."""
        b, plan = self.b, self.plan
        b.do(placed.grid_dependency_wait)
        if plan.early:
            b.do(placed.grid_launch_dependents)
        each = plan.rows * (self.widths[1] // plan.cluster + 2) * float32.size
        b.expect(self.gathered, 0, each * plan.cluster)
        self.make_tiles()
        self.find()
        place = b.load(self.table, (self.request, self.before // self.x.page))
        self.page = self.within(b.cast(place, int64), 0, high(self.x.pages) - 1)
        start = self.begin()

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            return self.step(self.slot(0, s), self.block(s), self.before, 1, carried)

        best, sums = b.loop("step", 0, self.blocks, 1, step, start)
        self.exchange(best, sums)
        self.finish()
        mine = b.apply("bit_and", self.owns, self.there)
        b.branch(mine, lambda: self.append())

    def begin(self) -> list[Node]:
        """Queries into their place; the sums begin with the new token where it belongs here. All
        that is read is asked for before the warps first meet."""
        b, x, rows = self.b, self.x, self.plan.rows
        shape = (rows, self.widths[0])
        column, row = self.counted(shape, 1), self.counted(shape, 0)
        real = b.apply("less", row, b.constant(x.group, int64))
        line = b.apply("multiply", row, b.constant(x.width, int64))
        first = (self.token * x.heads + self.head * x.group) * x.width
        heads = self.read(self.q, b.apply("add", line, b.index(first)), real, column, shape)
        first = (self.token * x.key_heads + self.head) * x.width
        new = self.read(self.memory["k"], b.index(first), None, column, (1, shape[1]))
        value, self.value = (
            self.load_value((self.widths[1], 1), 0),
            self.load_value((1, self.widths[1]), 1),
        )
        angle = self.angles(column)
        queries = b.cast(b.cast(self.turned(heads, angle), x.dtype), self.operand)
        b.write(self.queries, queries)
        self.key = self.kept(self.turned(new, angle), 0)
        product = b.apply("multiply", b.cast(queries, float32), b.cast(self.key, float32))
        score = self.scaled(b.add(ops.reduce(product, axis=1, kind="sum")))
        score = b.add(ops.reshape(score, shape=(1, rows)))
        if not x.scaled:  # else the warps meet once the keys are widened
            self.meet()
        return self.start(score, value)

    def start(self, score: Node, value: Node) -> list[Node]:
        """(best, sums) and the total to begin with: the new token's, or nothing."""
        b, rows = self.b, self.plan.rows
        here = b.apply("bit_and", self.owns, self.sees)
        zero, line = b.constant(0.0, float32), b.broadcast(here, (1, rows))
        some = b.apply("where", b.broadcast(here, value.shape), b.cast(value, float32), zero)
        b.write(self.total, b.broadcast(some, (self.widths[1], rows)))
        return [
            b.apply("where", line, score, b.constant(-math.inf, float32)),
            b.apply("where", line, b.constant(1.0, float32), zero),
        ]

    def load_value(self, shape: tuple[int, int], axis: int) -> Node:
        """The new value along an axis, as the cache keeps it."""
        b, x = self.b, self.x
        at = self.counted(shape, axis)
        inside = b.apply("less", at, b.constant(x.value_width, int64))
        inside = b.apply("bit_and", inside, b.broadcast(self.there, inside.shape))
        first = (self.token * x.key_heads + self.head) * x.value_width
        found = b.gather(self.memory["v"], b.apply("add", at, b.index(first)), inside)
        return self.kept(b.cast(found, float32), 1)

    def kept(self, value: Node, which: int) -> Node:
        """Keys or values as the cache keeps them."""
        b = self.b
        if self.factors:
            value = b.apply("divide", value, b.broadcast(self.factors[which], value.shape))
        return b.cast(value, self.x.cache)

    # ---- turning --------------------------------------------------------------------------------

    def angles(self, column: Node) -> tuple[Node, Node] | None:
        """Cosines and sines (with the sign that a column's partner has) of every column: made
        once, a thread each, and looked up."""
        b, half = self.b, self.rotary.width // 2
        if not half:
            return None
        found = b.load(self.memory["frequencies"], (0,), (half,), (0,))
        angle = b.apply("multiply", found, b.cast(b.index(self.before), float32))
        factor = b.constant(self.rotary.factor, float32)
        for row, name in enumerate(("cos", "sin")):
            b.write(self.turns, b.apply("multiply", b.apply(name, angle), factor), row)
        b.do(placed.named_sync, number=BARRIER, threads=self.threads)
        number = b.constant(half, int64)
        if self.rotary.interleaved:
            pair = b.apply("unsigned_divide", column, b.constant(2, int64))
            second = b.apply("unsigned_remainder", column, b.constant(2, int64))
            leads = b.apply("equal", second, b.constant(0, int64))
        else:
            pair = b.apply("unsigned_remainder", column, number)
            leads = b.apply("less", column, number)
        inside = b.apply("less", column, b.constant(2 * half, int64))
        cosine, sine = (
            b.gather(self.turns, b.apply("add", pair, b.constant(i * half, int64)), inside)
            for i in range(2)
        )
        zero, one = b.constant(0.0, float32), b.constant(1.0, float32)
        sine = b.apply("where", leads, b.apply("subtract", zero, sine), sine)
        return b.apply("where", inside, cosine, one), b.apply("where", inside, sine, zero)

    def read(
        self, memory: Node, first: Node, real: Node | None, column: Node, shape: tuple[int, int]
    ) -> list[Node]:
        """Heads of which each begins at `first`, and what their elements turn with."""
        b = self.b
        inside = b.apply("less", column, b.constant(self.x.width, int64))
        inside = b.apply("bit_and", inside, b.broadcast(self.there, inside.shape))
        if real is not None:
            inside = b.apply("bit_and", inside, real)
        columns = [column, self.partner(column)] if self.rotary.width else [column]
        offsets = [b.broadcast(b.apply("add", first, at), shape) for at in columns]
        return [b.gather(memory, offset, b.broadcast(inside, shape)) for offset in offsets]

    def turned(self, heads: list[Node], angle: tuple[Node, Node] | None) -> Node:
        """Heads (float32), their first elements turned."""
        b = self.b
        wide = [b.cast(part, float32) for part in heads]
        if angle is None:
            return wide[0]
        parts = [
            b.apply("multiply", part, b.broadcast(v, part.shape)) for part, v in zip(wide, angle)
        ]
        return b.apply("add", *parts)

    def partner(self, column: Node) -> Node:
        """The column that a column turns with; those that do not turn have themselves."""
        b, half = self.b, self.rotary.width // 2
        if self.rotary.interleaved:
            other = b.apply("bit_xor", column, b.constant(1, int64))
        else:
            leads = b.apply("less", column, b.constant(half, int64))
            other = b.apply(
                "where",
                leads,
                b.apply("add", column, b.constant(half, int64)),
                b.apply("subtract", column, b.constant(half, int64)),
            )
        turns = b.apply("less", column, b.constant(2 * half, int64))
        return b.apply("where", turns, other, column)

    # ---- the cluster ----------------------------------------------------------------------------

    def exchange(self, best: Node, sums: Node) -> None:
        """Each program of the cluster gets the columns that it finishes, of every program."""
        b, rows = self.b, self.plan.rows
        b.send(self.parts, b.read(self.total), self.gathered, 0, self.rank, to="shares")
        for which, line in enumerate((best, sums)):
            line = b.add(ops.reshape(line, shape=(rows,)))
            b.send(self.weighed, line, self.gathered, 0, self.rank, which)
        b.wait(self.gathered, 0, 0)

    def finish(self) -> None:
        """Columns of the result: parts weighted by how far their best scores are apart."""
        b, many = self.b, self.plan.cluster
        best = [b.read(self.weighed, r, 0) for r in range(many)]
        base = best[0]
        for other in best[1:]:
            base = b.apply("maximum", base, other)
        base = self.finite(base)
        total: Node | None = None
        result: Node | None = None
        for r in range(many):
            weight = b.apply("quick_exp2", b.apply("subtract", best[r], base))
            more = b.apply("multiply", b.read(self.weighed, r, 1), weight)
            total = more if total is None else b.apply("add", total, more)
            part = b.apply("multiply", b.read(self.parts, r), self.by_row(weight))
            result = part if result is None else b.apply("add", result, part)
        assert total is not None and result is not None
        one = b.constant(1.0, float32)
        some = b.apply("less", b.constant(0.0, float32), total)
        share = b.apply("divide", one, b.apply("where", some, total, one))
        if self.factors:
            share = b.apply("multiply", share, self.factors[1])
        self.write(b.apply("multiply", result, self.by_row(share)))

    def write(self, result: Node) -> None:
        """Columns (columns, rows) of the result that this program finishes."""
        b, x, shape = self.b, self.x, result.shape
        at, row = self.counted(shape, 0, self.rank * shape[0]), self.counted(shape, 1)
        inside = b.apply(
            "bit_and",
            b.apply("less", at, b.constant(x.value_width, int64)),
            b.apply("less", row, b.constant(x.group, int64)),
        )
        inside = b.apply("bit_and", inside, b.broadcast(self.there, shape))
        first = (self.token * x.heads + self.head * x.group) * x.value_width
        line = b.apply("multiply", row, b.constant(x.value_width, int64))
        offset = b.apply("add", b.apply("add", line, at), b.index(first))
        b.scatter(self.out, b.cast(result, x.dtype), offset, inside)

    def by_row(self, line: Node) -> Node:
        """A number of every row beside all columns."""
        return self.b.add(ops.reshape(line, shape=(1, self.plan.rows)))

    # ---- the cache ------------------------------------------------------------------------------

    def append(self) -> None:
        """The new key and value into the cache; in a page that begins, zeros after the value."""
        b, x = self.b, self.x
        page = b.atom("page", self.page, 0, high(x.pages) - 1)
        row = self.before % x.page
        for which, value in enumerate((self.key, self.value)):
            width = (x.width, x.value_width)[which]
            inside = b.apply("less", self.counted(value.shape, 1), b.constant(width, int64))
            b.store(self.cache[which], value, (page, self.head, row, 0), (2, 3), inside)
        step = min(x.page, CLEARED)

        def rows(first: Size, _: list[Node]) -> Sequence[Node]:
            shape = (step, x.value_width)
            after = b.apply("less", b.index(row), self.counted(shape, 0, first))
            b.store(
                self.cache[1],
                b.constant(0.0, x.cache, shape),
                (page, self.head, first, 0),
                (2, 3),
                b.broadcast(after, shape),
            )
            return ()

        b.branch(b.less(row, 1), lambda: b.loop("row", 0, x.page, step, rows))
