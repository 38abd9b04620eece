"""Attention over a paged cache: decode, several queries a request, prefill in chunks.

`Items` builds the placed kernel. A program takes its items of the work list (`work`), whose
blocks of keys are as many for each program; two warps bring keys and values into rings, page by
page, and the other warps multiply. Queries are few, so they are the short side of both products:
scores^T (keys, rows) = K Q^T, and out^T (width, rows) += V^T P^T with P^T through shared memory.
An item that is a whole row block writes its result, others leave a part; who counts the last part
of one combines them, or another launch does (`work`). Where matrix units belong to a warp,
threads copy themselves (`ThreadItems`).

Costs of a block of 128 keys of width 128 in 16 bits, 8 rows, 8 warps: 64 KB through the ring
(1.9 us of an SM's share of 4.6 TB/s), 16 products m64n8k16 by each four warps, 2 exp2 a thread,
two meetings of the warps. What bounds it is memory; a short step is bound by its latencies: item,
page number, keys, products, part, combine.

Keys that nobody of a row block sees are masked, and values beside them count as zeros whatever
the cache holds there. Invariant: a row block's result depends on its own pages, and on how the
work list cut it, alone; a row without any weight gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from ... import tile
from ...core.dtype import int64
from ...ir.symbol import high
from ...tile.build import Body, BodyBuilder
from ..attention.shape import refuse
from ..attention.softmax import clamped, finished, log_sums, times
from ..attention.threads import multiply, shared_place
from ..attention.tile_order import bounded, number_at
from .shape import FIELDS, PagedPlan, PagedShape, padded, parameters, why_not
from .steps import BARRIER, Steps, page_part
from .work import mixed

SCRATCH = ("partial", "sums")
PRODUCER_FIELDS = ("request", "tokens", "sees", "first", "blocks")
CONSUMER_FIELDS = ("token", "tokens", "sees", "first", "blocks", "partial", "from", "parts")
Item = dict[str, Any]  # fields of a record


def attend(x: PagedShape, plan: PagedPlan) -> Body:
    """The kernel."""
    refuse("kernels.paged", why_not(x, plan), plan, x)
    made = ThreadItems if plan.threads else Items
    step = ("q", "keys", "values", "scales", "table", "sinks")
    names = (*step, "items", "out", *SCRATCH, "counters")
    given = parameters(x, names, plan, partial="result", sums="result")
    return made(x, plan, BodyBuilder("paged_attention", given)).build()


class Items(Steps):
    """Builds one Body of `attend`."""

    def __init__(self, x: PagedShape, plan: PagedPlan, b: BodyBuilder) -> None:
        super().__init__(x, plan, b)
        self.per, self.ranges, self.bounds = plan.per(x), plan.ranges(x), plan.bounds(x)

    def build(self) -> Body:
        """Places, barriers, roles."""
        plan = self.plan
        with tile.into(self.b):
            self.allocate_shared()
            program = tile.grid(plan.programs)
            heads = self.x.key_heads
            self.own_range, self.head = program // heads, program % heads
            self.roles()
        return self.b.finish((plan.programs,), plan=plan, distinct=True, level="placed")

    # ---- items ------------------------------------------------------------------------------

    def number(self, row: Any, field: str) -> Any:
        """An integer of a record, as it stands there."""
        return number_at(self.memory["items"], row, FIELDS.index(field))

    @tile.function
    def for_items(self, fields: Sequence[str], body: Callable[[Item, Any], None]) -> None:
        """body(the record's fields, turns of the ring before) for every item of the program; the
        next record is asked for before an item is worked on."""
        stages, most = self.plan.stages, self.bounds["start"][1]  # rows of the list
        first, last, *loaded = [self.number(self.own_range, f) for f in ("start", "stop", *fields)]
        start, stop = bounded(first, "start", most), bounded(last, "stop", most, -1)
        found = [clamped(v, *self.bounds[f]) for f, v in zip(fields, loaded)]
        count = clamped(stop - start + 1, 0, most)
        # No field is negative, and to know that all must be here: they come at the same time.
        signs = [v for f, v in zip(fields, loaded) if self.bounds[f][0] >= 0]
        items = tile.where(reduce(lambda a, c: a | c, signs) >= 0, count, 0)
        items = tile.hold(items, "items", (0, most))
        turn = tile.full((), 0, int64)
        for item in tile.range(items):
            row = clamped(self.ranges + start - self.own_range + item, 0, most - 1)
            row = tile.hold(row, "row")
            following = [clamped(self.number(row, f), *self.bounds[f]) for f in fields]
            # names of which the order is that of the records, in sums too
            sizes = {
                f: tile.hold(v, f"field{FIELDS.index(f)}", self.bounds[f])
                for f, v in zip(fields, found)
            }
            before = tile.hold(turn, "turn", (0, 2 * stages - 1))
            body(sizes, before)
            turn = tile.cast((before + sizes["blocks"]) % (2 * stages), int64)
            found = following

    def block(self, step: Any) -> Any:
        """See `Steps`."""
        return self.of["first"] + step

    # ---- what roles do ----------------------------------------------------------------------

    def producer(self, which: int) -> None:
        """Fill the ring of keys or of values."""

        def item(of: Item, before: Any) -> None:
            self.of, keys = of, tile.maximum(of["sees"] + of["tokens"] - 1, 0)
            self.bring(which, of["blocks"], before, of["request"], keys)

        self.for_items(PRODUCER_FIELDS, item)

    def consumer(self) -> None:
        """Scores, weights and sums of every item."""
        self.make_tiles()
        self.for_items(CONSUMER_FIELDS, self.item)

    def begin(self, of: Item) -> tuple[Any, Any]:
        """Queries, and empty sums."""
        rows, self.of = self.plan.rows, of  # the item at work
        self.sees, self.tokens = of["sees"], of["tokens"]
        self.load_extras()
        self.load_queries()
        tile.write(self.total, tile.zeros((self.widths[1], rows)))
        return tile.full((rows,), -tile.INF), tile.zeros((self.plan.block, rows))

    @tile.function
    def item(self, of: Item, before: Any) -> None:
        """One item."""
        best, sums = self.begin(of)
        for step in tile.range(of["blocks"]):
            best, sums = self.step(before + step, step, best, sums)
        self.finish(best, sums)

    def load_queries(self) -> None:
        """Rows of queries: tokens, and within them the heads that share the key head."""
        x, rows, wide = self.x, self.plan.rows, self.widths[0]
        if self.per * x.group == rows and wide == x.width and not x.scaled:
            inside = (tile.arange(self.per) < self.tokens)[:, None, None]
            shape, at = (self.per, x.group, x.width), (self.of["token"], self.head * x.group, 0)
            found = tile.reshape(tile.load(self.q, at, shape, mask=inside), (rows, wide))
        else:
            at = self.column(tile.arange(wide), False)
            offset, inside = self.offsets_of(at, tile.arange(rows)[:, None], x.width)
            found = tile.load(self.q, offset, mask=inside)
        tile.write(self.queries, tile.cast(found, self.operand))
        self.meet()

    def offsets_of(self, at: Any, row: Any, width: int) -> tuple[Any, Any]:
        """Linear offsets of columns `at` of the item's rows in (tokens, heads, width), and which
        there are."""
        x, token = self.x, tile.unsigned_divide(row, self.x.group)
        head = tile.unsigned_remainder(row, x.group)
        token_at, head = token + self.of["token"], head + self.head * x.group
        offset = (token_at * x.heads + head) * width + at
        inside = token < tile.minimum(self.tokens, self.per)
        if max(at.shape) != width:
            inside = inside & (at < width)
        return offset, inside

    # ---- the result -------------------------------------------------------------------------

    @tile.function
    def finish(self, best: Any, sums: Any) -> None:
        """The result of a whole row block, or the part of one."""
        of, sums, begun = self.of, tile.sum(sums, 0), self.sinks
        if begun is not None:  # they count in the first part of a row block
            begun = tile.where(of["partial"] <= of["from"], begun, -tile.INF)
        share, sums, best = finished(sums, best, begun)
        share = times(share, self.factors[1])
        result = tile.read(self.total) * share
        if of["partial"] < 0:
            at = self.column(tile.arange(self.widths[1])[:, None], True)
            row = tile.arange(self.plan.rows)
            offset, inside = self.offsets_of(at, row, self.x.value_width)
            tile.store(self.out, offset, result, mask=inside)
        else:
            self.leave(result, log_sums(sums, best, None))

    @tile.function
    def leave(self, result: Any, log: Any) -> None:
        """A part of a row block; who counts the last one combines them."""
        x, rows, of = self.x, self.plan.rows, self.of
        partial = tile.maximum(of["partial"], 0)
        at, row = self.column(tile.arange(self.widths[1])[:, None], True), tile.arange(rows)
        offset = (row + (partial * x.key_heads + self.head) * rows) * x.value_width + at
        inside = (at < x.value_width) & (row < self.per * x.group)
        tile.store(self.memory["partial"], offset, result, mask=inside)
        self.memory["sums"][partial, self.head, 0:rows] = log
        if self.plan.joined:
            tile.fence("global")
            tile.named_sync(BARRIER, self.threads)
            before = tile.atomic_add(self.memory["counters"], (of["from"], self.head), 1)
            if tile.cast(before, int64) == of["parts"] - 1:
                self.join()

    def join(self) -> None:
        """All parts of a row block, some at a time, weighted by their sums of weights."""
        x, rows, wide, of = self.x, self.plan.rows, self.x.value_width, self.of
        tile.fence("global")
        self.memory["counters"][of["from"], self.head] = 0
        room = max(1, min(16, 128 * self.threads // (rows * padded(wide))))
        shape = (1 << (room.bit_length() - 1), rows, wide)
        made, where = [self.memory[name] for name in SCRATCH], (of["from"], self.head, 0)
        result = mixed(made, where, of["parts"], shape, self.per * x.group)
        at, row = tile.arange(wide), tile.arange(rows)[:, None]
        offset, inside = self.offsets_of(at, row, wide)
        tile.store(self.out, offset, result, mask=inside)


# ---- threads that copy -------------------------------------------------------------------------


class ThreadItems(Items):
    """The same by one role, whose threads copy and multiply themselves (sm_80): they ask for the
    blocks of keys and values to come, 16 bytes each, while they multiply the ones that are there.
    Numbers of pages are asked for a step before their copies. Products are m16n8k16 of a warp: keys
    and then values are the long side, 16 rows of queries the short one; `stages - 1` blocks are
    under way."""

    def allocate_shared(self) -> None:
        """Rings, and operands of the products."""
        x, plan = self.x, self.plan
        self.rings = [shared_place(x.dtype, plan.stages, plan.block, w) for w in self.widths]
        self.queries = shared_place(x.dtype, plan.rows, self.widths[0])
        self.weights = shared_place(x.dtype, plan.rows, plan.block)

    def roles(self) -> None:
        """One, that copies and multiplies."""
        with tile.role("multiply", self.plan.warps):
            self.make_tiles()
            self.for_items(("request", *CONSUMER_FIELDS), self.item)

    def meet(self) -> None:
        """What the threads stored is there for all of them."""
        tile.named_sync(BARRIER, self.threads)

    # ---- copies -----------------------------------------------------------------------------

    @tile.function
    def item(self, of: Item, before: Any) -> None:
        """One item: the ring begins anew, once all threads are done with the one before."""
        best, sums = self.begin(of)
        stages = self.plan.stages
        for ahead in range(stages - 1):
            self.load(ahead, self.pages(ahead))
        pages = self.pages(stages - 1)
        for step in tile.range(of["blocks"]):
            tile.wait_threads(stages - 2)
            self.meet()
            self.load(step + stages - 1, pages)
            pages = self.pages(step + stages)
            best, sums = self.step(step, step, best, sums)
        tile.wait_threads(0)
        self.finish(best, sums)

    def pages(self, step: Any) -> list[Any]:
        """Numbers of the pages of a step; past the last key the last page again."""
        x, plan, of = self.x, self.plan, self.of
        keys = clamped(self.sees + self.tokens - 1, 1, high(x.most_pages) * x.page)
        first, last = self.block(step) * plan.block // x.page, (keys - 1) // x.page
        entries = [tile.minimum(first + i, last) for i in range(max(1, plan.block // x.page))]
        return [tile.load(self.table[of["request"], p]) for p in entries]

    def load(self, step: Any, pages: list[Any]) -> None:
        """A block of keys and one of values, page by page, in a group of their own."""
        x, block = self.x, self.plan.block
        key, rows = self.block(step) * block, min(x.page, block)
        for number, page in enumerate(pages):
            at = bounded(page, "page", x.pages - 1)
            for ring, cache, width in zip(self.rings, self.cache, self.widths):
                place = ring[step % self.plan.stages][number * rows : (number + 1) * rows, :]
                tile.copy_threads(place, page_part(x, cache, at, self.head, key, (block, width)))
        tile.commit_threads()

    # ---- products ---------------------------------------------------------------------------

    def arrived(self, which: int) -> Any:
        """A block that is there."""
        return self.rings[which][self.turn % self.plan.stages]

    def products(self) -> Any:
        """Keys of a block times queries."""
        tile.write(self.scores, tile.zeros(self.scores.shape))
        multiply(self.scores, self.arrived(0), self.queries, self.widths[0], self.plan.warps)
        return tile.read(self.scores)

    def add_values(self) -> None:
        """The values of a block, weighed."""
        values = self.arrived(1).T
        multiply(self.total, values, self.weights, self.plan.block, self.plan.warps)

    def values_added(self) -> None:
        """Nothing is under way."""
