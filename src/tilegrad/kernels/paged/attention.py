"""Attention over a paged cache: decode, several queries a request, prefill in chunks.

`attend` is the placed kernel. A program walks its items of the work list (`work`), whose
blocks of keys are as many for each program; two warps bring keys and values into rings, page by
page, and the other warps multiply. Queries are few, so they are the short side of both products:
scores^T (keys, rows) = K Q^T, and out^T (width, rows) += V^T P^T with P^T through shared memory.
An item that is a whole pair writes its result, others leave a part; who counts the last part of
a pair combines them, or another launch does (`combine`).

Costs of a block of 128 keys of width 128 in 16 bits, 8 rows, 8 warps: 64 KB through the ring
(1.9 us of an SM's share of 4.6 TB/s), 16 products m64n8k16 by each four warps, 2 exp2 a thread,
two meetings of the warps. What bounds it is memory; a short step is bound by its latencies: item,
page number, keys, products, part, combine.

Keys that nobody of a row block sees are masked, and values beside them count as zeros whatever
the cache holds there. Invariant: a pair's result depends on its own pages, and on how the work
list cut it, alone.
`producer` is long: one loop, in the order of what it copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce

from ...core.dtype import float32, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum, minimum
from ...tile import ops, placed
from ...tile.build import Body
from ...tile.placed import PlacedBuilder
from .combine import mixed
from .shape import (
    BLOCKS,
    FIRST,
    FROM,
    HEAD,
    PARTS,
    REQUEST,
    SEES,
    SLOT,
    START,
    STOP,
    TOKEN,
    TOKENS,
    PagedPlan,
    PagedShape,
    attend_parameters,
    item_rows,
    padded,
    per,
    spread,
    walkers,
    why_not,
)
from .steps import BARRIER, Steps

AHEAD = 4  # blocks whose pages are asked for at once, before they are needed
PRODUCER_FIELDS = (REQUEST, HEAD, TOKENS, SEES, FIRST, BLOCKS)
CONSUMER_FIELDS = (HEAD, TOKEN, TOKENS, SEES, FIRST, BLOCKS, SLOT, FROM, PARTS)


def attend(x: PagedShape, plan: PagedPlan, name: str = "paged_attention") -> Body:
    """The kernel; parameters as `attend_parameters` has them."""
    why = why_not(x, plan)
    if why:
        raise InternalError("kernels.paged.attention", f"{why}: {plan} for {x}")
    return _Attend(x, plan, PlacedBuilder(name, attend_parameters(x, plan))).build()


class _Attend(Steps):
    """Builds one Body of `attend`."""

    plan: PagedPlan

    def __init__(self, x: PagedShape, plan: PagedPlan, b: PlacedBuilder) -> None:
        super().__init__(x, plan, b)
        memory = self.memory
        self.items, self.partial, self.sums = (memory[n] for n in ("items", "partial", "sums"))
        self.counters = memory.get("counters")
        self.per, self.spread, self.walkers = per(x, plan), spread(x, plan), walkers(x, plan)
        self.rows = high(item_rows(x, plan))

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, plan = self.b, self.plan
        self.make_places()
        program = b.program(0, plan.programs)
        self.walker, self.near = program // self.spread, program % self.spread
        b.role("multiply", plan.warps, 0, self.consumer)
        b.role("bring_keys", 1, 0, lambda: self.producer(0))
        b.role("bring_values", 1, 0, lambda: self.producer(1))
        return b.finish((plan.programs,), plan=plan, distinct=True, level="placed")

    # ---- items ------------------------------------------------------------------------------

    def number(self, row: Size, field: int) -> Node:
        """An integer of a record, as it stands there."""
        return self.b.cast(self.b.load(self.items, (row, field)), int64)

    def walk(self, fields: Sequence[int], body: object) -> None:
        """body(the record's fields, turns of the ring before) for every item of the program; the
        next record is asked for before an item is worked on."""
        b, plan, p, most = self.b, self.plan, self.walker, self.rows
        loaded = [self.number(p, f) for f in (START, STOP, *fields)]
        start = b.atom("start", self.within(loaded[0], 0, most), 0, most)
        stop = b.atom("stop", self.within(loaded[1], -1, most), -1, most)
        first = [self.within(v, *self.bounds(f)) for f, v in zip(fields, loaded[2:])]
        count = maximum(minimum(stop - start + 1, most), 0)
        # No field is negative, and to know that all must be here: they come at the same time.
        signs = [v for f, v in zip(fields, loaded[2:]) if self.bounds(f)[0] >= 0]
        whole = reduce(lambda a, c: b.apply("bit_or", a, c), signs)
        there = b.apply("less_equal", b.constant(0, int64), whole)
        items = b.apply("where", there, b.index(count), b.constant(0, int64))

        def record(number: Size) -> list[Node]:
            row = minimum(maximum(self.walkers + start - p - 1 + number, 0), most - 1)
            row = b.atom("row", b.index(row), 0, most - 1)
            return [self.within(self.number(row, f), *self.bounds(f)) for f in fields]

        def one(number: Size, carried: list[Node]) -> Sequence[Node]:
            turn, *found = carried
            following = record(number + 1)
            sizes = {
                f: b.atom(f"field{f}", node, *self.bounds(f)) for f, node in zip(fields, found)
            }
            sizes[HEAD] = sizes[HEAD] + self.near
            before = b.atom("turn", turn, 0, 2 * plan.stages - 1)
            body(sizes, before)  # type: ignore[operator]
            after = (before + sizes[BLOCKS]) % (2 * plan.stages)
            return [b.index(after), *following]

        b.loop("item", 0, b.atom("items", items, 0, most), 1, one, [b.index(0), *first])

    def bounds(self, field: int) -> tuple[int, int]:
        """What a field of a record can be."""
        x, plan = self.x, self.plan
        keys = self.most_blocks * plan.block
        return {
            REQUEST: (0, high(x.requests) - 1),
            HEAD: (0, x.key_heads // self.spread - 1),
            TOKEN: (0, high(x.tokens) - 1),
            TOKENS: (0, self.per),
            SEES: (-high(x.tokens), keys),
            FIRST: (0, self.most_blocks - 1),
            BLOCKS: (0, self.most_blocks),
            SLOT: (-1, self.rows - 1),
            FROM: (0, self.rows - 1),
            PARTS: (1, self.walkers),
        }[field]

    # ---- bringing ---------------------------------------------------------------------------

    def producer(self, which: int) -> None:
        """Fill the ring of keys or of values."""
        b, plan, x = self.b, self.plan, self.x
        memory, ring, full, empty = (
            self.cache[which],
            self.rings[which],
            self.full[which],
            self.empty[which],
        )
        width = self.widths[which]
        rows = min(x.page, plan.block)
        bytes_ = plan.block * width * x.cache.size
        together = min(plan.stages, AHEAD)
        b.do(placed.grid_dependency_wait)

        def copy(s: Size, pages: Node, sizes: dict[int, Size], before: Size) -> Sequence[Node]:
            stage, lap = self.slot(before, s)
            b.wait(empty, stage, (lap + 1) % 2)
            b.expect(full, stage, bytes_)
            within = (sizes[FIRST] + s) * plan.block % x.page if x.page > plan.block else 0
            b.copy_pages(
                ring,
                (stage,),
                memory,
                pages,
                (0, sizes[HEAD], within, 0),
                (rows, width),
                (2, 3),
                full,
                stage,
                plan.hint,
            )
            return ()

        def item(sizes: dict[int, Size], before: Size) -> None:
            def pages(s: Size) -> list[Node]:
                return [self.pages(sizes, sizes[FIRST] + s + i) for i in range(together)]

            def some(s: Size, carried: list[Node]) -> Sequence[Node]:
                following = pages(s + together)
                copy(s, carried[0], sizes, before)
                for i in range(1, together):
                    b.branch(
                        b.less(s + i, sizes[BLOCKS]),
                        partial(copy, s + i, carried[i], sizes, before),
                    )
                return following

            b.loop("step", 0, sizes[BLOCKS], together, some, pages(0))

        self.walk(PRODUCER_FIELDS, item)

    def pages(self, sizes: dict[int, Size], block: Size) -> Node:
        """The pages of a block of keys; -1, which reads as zeros, past the last key that is seen:
        the page 0 of all tables' ends would be read from one place by every program."""
        b, plan, x = self.b, self.plan, self.x
        count = max(1, plan.block // x.page)
        at = block * plan.block // x.page
        line = b.apply("add", b.add(ops.iota(size=count, dtype=int64)), b.index(at))
        seen = ceil_divide(maximum(sizes[SEES] + sizes[TOKENS] - 1, 0), x.page)
        inside = b.apply("less", line, b.index(minimum(seen, x.most_pages)))
        found = b.load(self.table, (sizes[REQUEST], at), (count,), (1,), inside)
        return b.apply("where", inside, b.cast(found, int64), b.constant(-1, int64))

    # ---- multiplying ------------------------------------------------------------------------

    def consumer(self) -> None:
        """Scores, weights and sums of every item."""
        b = self.b
        b.do(placed.grid_dependency_wait)
        if self.plan.early:
            b.do(placed.grid_launch_dependents)
        self.make_tiles()
        self.walk(CONSUMER_FIELDS, self.item)

    def item(self, sizes: dict[int, Size], before: Size) -> None:
        """One item."""
        b, plan = self.b, self.plan
        self.load_queries(sizes)
        rows = plan.rows
        b.write(self.total, b.constant(0.0, float32, (self.widths[1], rows)))
        start = [
            b.constant(-math.inf, float32, (1, rows)),
            b.constant(0.0, float32, (plan.block, rows)),
        ]

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            return self.step(
                self.slot(before, s), sizes[FIRST] + s, sizes[SEES], sizes[TOKENS], carried
            )

        best, sums = b.loop("step", 0, sizes[BLOCKS], 1, step, start)
        self.finish(sizes, best, sums)

    def load_queries(self, sizes: dict[int, Size]) -> None:
        """Rows of queries: tokens, and within them the heads that share the key head."""
        b, x, plan = self.b, self.x, self.plan
        token, head, wide = sizes[TOKEN], sizes[HEAD] * x.group, self.widths[0]
        if self.per * x.group == plan.rows and wide == x.width:
            line = b.add(ops.iota(size=self.per, dtype=int64))
            inside = b.apply("less", line, b.index(sizes[TOKENS]))
            inside = b.add(ops.reshape(inside, shape=(self.per, 1, 1)))
            shape = (self.per, x.group, x.width)
            found = b.load(self.q, (token, head, 0), shape, (0, 1, 2), b.broadcast(inside, shape))
            found = b.add(ops.reshape(found, shape=(plan.rows, wide)))
        else:
            offset, inside = self.places(sizes, (plan.rows, wide), 0, x.width)
            found = b.gather(self.q, offset, inside)
        b.write(self.queries, b.cast(found, self.operand))
        if not x.scaled:  # else the warps meet once the keys are widened
            self.meet()

    def places(
        self, sizes: dict[int, Size], shape: tuple[int, int], axis: int, width: int
    ) -> tuple[Node, Node]:
        """Linear offsets of an item's rows (along `axis`) and of a width in (tokens, heads,
        width), and which there are."""
        b, x = self.b, self.x
        row, at = self.counted(shape, axis), self.counted(shape, 1 - axis)
        group = b.constant(x.group, int64)
        token = b.apply("unsigned_divide", row, group)
        head = b.apply("unsigned_remainder", row, group)
        token_at = b.apply("add", token, b.index(sizes[TOKEN]))
        head = b.apply("add", head, b.index(sizes[HEAD] * x.group))
        line = b.apply("add", b.apply("multiply", token_at, b.constant(x.heads, int64)), head)
        offset = b.apply("add", b.apply("multiply", line, b.constant(width, int64)), at)
        inside = b.apply("less", token, b.index(minimum(sizes[TOKENS], self.per)))
        if shape[1 - axis] != width:
            inside = b.apply("bit_and", inside, b.apply("less", at, b.constant(width, int64)))
        return offset, inside

    def finish(self, sizes: dict[int, Size], best: Node, sums: Node) -> None:
        """The result of a whole pair, or the part of one."""
        b, x, plan = self.b, self.x, self.plan
        sums = b.add(ops.reshape(b.add(ops.reduce(sums, axis=0, kind="sum")), shape=best.shape))
        some = b.apply("less", b.constant(0.0, float32), sums)
        one = b.constant(1.0, float32)
        scale = b.apply(
            "where",
            some,
            b.apply("divide", one, b.apply("where", some, sums, one)),
            b.constant(0.0, float32),
        )
        if self.factors:
            scale = b.apply("multiply", scale, self.factors[1])
        result = b.apply("multiply", b.read(self.total), scale)
        shape, slot = (self.widths[1], plan.rows), maximum(sizes[SLOT], 0)

        def whole() -> Sequence[Node]:
            offset, inside = self.places(sizes, shape, 1, x.value_width)
            b.scatter(
                self.out,
                b.cast(result, x.dtype),
                b.broadcast(offset, shape),
                b.broadcast(inside, shape),
            )
            return ()

        def part() -> Sequence[Node]:
            at, row = self.counted(shape, 0), self.counted(shape, 1)
            line = b.apply("add", row, b.index((slot * self.spread + self.near) * plan.rows))
            offset = b.apply("multiply", line, b.constant(x.value_width, int64))
            offset = b.broadcast(b.apply("add", offset, at), shape)
            inside = b.apply("less", at, b.constant(x.value_width, int64))
            real = b.apply("less", row, b.constant(self.per * x.group, int64))
            inside = b.apply("bit_and", inside, real)
            b.scatter(self.partial, result, offset, b.broadcast(inside, shape))
            log = b.apply("add", best, b.apply("log2", b.apply("where", some, sums, one)))
            log = b.apply("where", some, log, b.constant(-math.inf, float32))
            log = b.add(ops.reshape(log, shape=(plan.rows,)))
            b.store(self.sums, log, (slot, self.near, 0), (2,))
            if self.counters is not None:
                self.count(sizes)
            return ()

        b.branch(b.less(sizes[SLOT], 0), whole, part)

    # ---- the last part ------------------------------------------------------------------------

    def count(self, sizes: dict[int, Size]) -> None:
        """One more part of a pair is there; who counts the last one combines them."""
        b = self.b
        assert self.counters is not None
        b.do(placed.fence, kind="global")
        b.do(placed.named_sync, number=BARRIER, threads=self.threads)
        at = b.index(sizes[FROM] * self.spread + self.near)
        before = b.add(placed.atomic_add(self.counters, b.constant(1, int32), at))
        last = b.apply("equal", b.cast(before, int64), b.index(sizes[PARTS] - 1))
        b.branch(last, lambda: self.join(sizes))

    def join(self, sizes: dict[int, Size]) -> None:
        """All parts of a pair, some at a time, weighted by their sums of weights."""
        b, x, rows, wide = self.b, self.x, self.plan.rows, self.x.value_width
        b.do(placed.fence, kind="global")
        assert self.counters is not None
        b.store(self.counters, b.constant(0, int32), (sizes[FROM], self.near))
        room = max(1, min(16, 128 * self.threads // (rows * padded(wide))))
        together = 1 << (room.bit_length() - 1)
        result = mixed(
            b,
            (self.partial, self.sums),
            (sizes[FROM], self.near, 0),
            sizes[PARTS],
            (together, rows, wide),
            self.per * x.group,
        )
        offset, inside = self.places(sizes, (rows, wide), 0, wide)
        b.scatter(
            self.out,
            b.cast(result, x.dtype),
            b.broadcast(offset, (rows, wide)),
            b.broadcast(inside, (rows, wide)),
        )
