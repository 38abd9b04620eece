"""What a program does with blocks of keys: bring them, scores, weights, sums of values.

Kernels of a paged cache share this: they differ in which blocks a program takes, in what order,
and in what becomes of the sums. Queries are few, so they are the short side of both products:
scores^T (keys, rows) = K Q^T, and out^T (width, rows) += V^T P^T with P^T through shared memory.
Two rings, of keys and of values, are filled by warps of their own.

A cache of 8 bits is half the traffic: its blocks lie in the rings as they are, and become float16,
which holds them exactly, on their way to the registers of a product's long side. There the columns
of a row stand in another order (`placed.mixed_order`), and so do queries and sums: `column`.
Scales are factors of scores and results. A block of 128 keys of width 128 is then 32 KB
through the ring (0.9 us of an SM's share), 64 loads of matrices and 512 conversions by a warp.

Keys that nobody of a row block sees are masked, and values beside them count as zeros whatever
the cache holds there. Invariant: after a block, `total` holds the weighted sum of all values so
far and (best, sums) the largest score and the sums of weights, of all keys or by key of a block, as
they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import tile
from ...core.dtype import float16, int64
from ...tile.build import BodyBuilder
from ...tile.placed import mixed_order
from ..attention.holes import Holes
from ..attention.shape import swizzled
from ..attention.softmax import LOG2_E, finite, times
from .shape import PagedPlan, PagedShape, attention_of, padded

BARRIER = 0  # at which the warps that multiply meet
AHEAD = 4  # blocks whose pages are asked for at once, before they are needed


def page_numbers(
    x: PagedShape, table: Any, request: Any, key: Any, block: int, keys: Any, early: bool = False
) -> Any:
    """Pages of a block of a request's keys; -1, which reads as zeros, past its last key: the page
    0 of all tables' ends would be read from one place by every program. `early` ones are asked for
    before the number of keys is known."""
    at, count = key // x.page, max(1, block // x.page)
    line = tile.arange(count) + at
    known = tile.minimum(tile.ceil_divide(keys, x.page), x.most_pages)
    inside = line < (x.most_pages if early else known)
    found = tile.load(table, (request, at), (count,), mask=inside)
    return tile.where(line < known, found, -1)


def page_part(
    x: PagedShape, cache: Any, page: Any, head: Any, key: Any, part: tuple[int, int]
) -> Any:
    """What a block of keys has of a page: (keys of the block, columns) say how much at most."""
    block, width = part
    row = key % x.page if x.page > block else 0
    return cache[page, head, row : row + min(x.page, block), 0:width]


class Steps:
    """The places of a program, and what happens with a block of keys."""

    head: Any = 0  # the key head at work
    sees: Any  # keys that the first token of the row block sees; the next one sees one more
    tokens: Any  # of the row block
    factors: Sequence[Any] = (None, None)  # of keys and values of 8 bits
    sinks: Any = None
    early = False  # whether pages are asked for before the number of keys is known
    block: Callable[[Any], Any]  # the number of the block that a step takes
    consumer: Callable[[], None]  # what the warps that multiply do
    producer: Callable[[int], None]  # fills the ring of keys (0) or of values (1)

    def __init__(self, x: PagedShape, plan: PagedPlan, b: BodyBuilder) -> None:
        self.x, self.plan, self.b = x, plan, b
        self.memory = tile.memories(b)
        self.q, self.table, self.out = (self.memory[n] for n in ("q", "table", "out"))
        self.cache = (self.memory["keys"], self.memory["values"])
        self.holes = Holes(attention_of(x), {}, 0, 0, lanes=0)
        # float16 holds the floats of 8 bits exactly, and one instruction makes two of them
        self.operand = float16 if x.scaled else x.dtype
        # few rows leave registers for values that are widened while keys are multiplied
        self.widens_early = x.scaled and plan.rows <= 16
        self.per = 1  # tokens of a row block
        self.reach = x.window  # keys before its end that a token sees, if there is a window
        self.widths = (padded(x.width), padded(x.value_width))
        self.threads = 32 * plan.warps
        self.most_blocks = plan.most_blocks(x)

    def allocate_shared(self) -> None:
        """Rings with their barriers, and operands of the products."""
        plan, x, dtype = self.plan, self.x, self.operand
        self.rings, self.pipes = [], []
        for name, width in zip(("keys", "values"), self.widths):
            self.rings.append(swizzled(x.cache, plan.stages, plan.block, width))
            self.pipes.append(tile.pipeline(name, plan.stages))
        self.queries = swizzled(dtype, plan.rows, self.widths[0])
        self.weights = swizzled(dtype, plan.rows, plan.block)

    def make_tiles(self) -> None:
        """Places in the registers of the role that multiplies."""
        rows = self.plan.rows
        self.scores = tile.register((self.plan.block, rows))
        self.total = tile.register((self.widths[1], rows))
        if self.x.scaled:
            keys, values = (self.plan.block, self.widths[0]), (self.widths[1], self.plan.block)
            self.held = [tile.register(shape, self.operand) for shape in (keys, values)]

    def column(self, at: Any, turned: bool) -> Any:
        """The column of a key, and of a query, that stands at a column of the product; where it is
        `turned`, of a value that stands at a row of the sums."""
        return mixed_order(at, turned) if self.x.scaled else at

    def load_extras(self) -> None:
        """The scales of a key head in a cache of 8 bits; the exponents of 2 that sums of the rows
        begin with, if heads have sinks."""
        if self.x.scaled:
            self.factors = [tile.load(self.memory["scales"][i, self.head]) for i in range(2)]
        if self.x.sinks:
            head = tile.unsigned_remainder(tile.arange(self.plan.rows), self.x.group)
            found = tile.load(self.memory["sinks"], head + self.head * self.x.group)
            self.sinks = found * LOG2_E

    def roles(self) -> None:
        """Warps that multiply, and two that bring keys and values."""
        with tile.role("multiply", self.plan.warps):
            tile.grid_dependency_wait()
            tile.grid_launch_dependents()  # the next launch begins beside this one
            self.consumer()
        for which, name in enumerate(("keys", "values")):
            with tile.role(f"bring_{name}", 1):
                tile.grid_dependency_wait()
                self.producer(which)

    # ---- bringing -----------------------------------------------------------------------------

    @tile.function
    def bring(self, which: int, count: Any, before: Any, request: Any, keys: Any) -> None:
        """Fill the ring of keys or of values, where it stood before, with so many blocks of the
        keys of a request that are seen."""
        x, block, pipe = self.x, self.plan.block, self.pipes[which]
        together = min(self.plan.stages, AHEAD)

        def pages_of(step: Any) -> Any:
            key = self.block(step) * block
            return page_numbers(x, self.table, request, key, block, keys, self.early)

        def copy(step: Any, pages: Any) -> None:
            """A block into the next stage, page by page; caches need not keep it."""
            turn, key = before + step, self.block(step) * block
            stage = pipe.acquire(turn)
            place = self.rings[which][stage]
            pipe.expect(turn, place.bytes)
            cache, part = self.cache[which], (block, self.widths[which])
            source = page_part(x, cache, 0, self.head, key, part)
            tile.copy_pages(place, source, pages, pipe.full[stage], "first")

        pages = [pages_of(i) for i in range(together)]
        for step in tile.range(0, count, together):
            following = [pages_of(step + together + i) for i in range(together)]
            copy(step, pages[0])
            for i in range(1, together):
                if step + i < count:
                    copy(step + i, pages[i])
            pages = following

    # ---- a block ------------------------------------------------------------------------------

    def arrived(self, which: int) -> Any:
        """The block of keys (0) or values (1), once it is there."""
        return self.rings[which][self.pipes[which].wait(self.turn)]

    def meet(self) -> None:
        """What the warps stored is there for their products."""
        tile.fence("async")
        tile.named_sync(BARRIER, self.threads)

    def step(self, turn: Any, step: Any, best: Any, sums: Any) -> tuple[Any, Any]:
        """A step's block of keys, in a turn of the rings; the first key of it is kept."""
        size = self.plan.block
        key = self.block(step) * size
        self.turn, self.key = turn, tile.hold(key, "key", (0, self.most_blocks * size))
        scores = self.seen(self.scaled(self.products()))
        now = tile.maximum(best, tile.max(scores, 0))
        base = finite(now)
        p = tile.quick_exp2(scores - base)
        shrink = tile.quick_exp2(best - base)
        by_key = sums.shape == p.shape
        if by_key:
            sums = tile.multiply_add(sums, shrink, p)
        tile.write(self.weights, tile.cast(p, self.operand).T)
        if not self.widens_early:
            self.take_values()
        self.meet()
        tile.write(self.total, tile.read(self.total) * shrink)
        self.add_values()
        if not by_key:  # while values are multiplied
            sums = tile.multiply_add(sums, shrink, tile.sum(p, 0))
        self.values_added()
        return now, sums

    def add_values(self) -> None:
        """The values of a block, weighed, are added to the total: at the latest by `values_added`,
        when nobody reads them any more. Blocks of 8 bits are in registers, and the warps have met
        behind a fence since they read them."""
        values = self.held[1] if self.x.scaled else self.arrived(1).T
        for pipe in self.pipes if self.x.scaled else ():
            pipe.release(self.turn)
        tile.matrix_fence()
        tile.matrix_async(self.total, values, self.weights.T)
        tile.matrix_commit()

    def values_added(self) -> None:
        """See `add_values`."""
        tile.matrix_wait(0)
        if not self.x.scaled:
            self.pipes[1].release(self.turn)

    def products(self) -> Any:
        """Keys of a block times queries; values of 8 bits become operands meanwhile."""
        keys = self.arrived(0)
        if self.x.scaled:
            tile.load_operand(self.held[0], keys)
            keys = self.held[0]
        tile.matrix_fence()
        tile.matrix_async(self.scores, keys, self.queries.T, False)
        tile.matrix_commit()
        if self.widens_early:
            self.take_values()
        tile.matrix_wait(0)
        if not self.x.scaled:
            self.pipes[0].release(self.turn)
        return tile.read(self.scores)

    @tile.function
    def take_values(self) -> None:
        """Zeros for values that no token of the row block sees: anything may lie there; those of 8
        bits into registers."""
        x, end = self.x, self.sees + self.tokens - 1
        begin = self.sees - self.reach if x.window else 0
        partly = end < self.key + self.plan.block
        if x.window:
            partly = partly | (self.key < begin)
        if partly:
            self.clear(self.arrived(1), begin, end)
            if x.scaled:  # threads read them
                self.meet()
        if x.scaled:
            tile.load_operand(self.held[1], self.arrived(1).T)

    def scaled(self, scores: Any) -> Any:
        """Scores as exponents of 2."""
        return self.holes.score(times(scores, self.factors[0]), 0, 0) * self.holes.factor

    def seen(self, scores: Any) -> Any:
        """Scores, -inf where a token does not see a key: as many keys as its place says, the
        last ones of them if there is a window."""
        end = tile.cast(self.sees, int64)
        if self.per > 1:
            end = tile.unsigned_divide(tile.arange(self.plan.rows), self.x.group) + end
        begin = end - self.reach if self.x.window else 0
        return self.between(scores, begin, end, -tile.INF)

    def clear(self, values: Any, begin: Any, end: Any) -> None:
        """Zeros for the values of keys before `begin` and from `end` on, where they lie."""
        pieces = self.widths[1] * self.x.cache.size // 16
        if pieces & (pieces - 1):  # threads do not share rows of so many
            tile.write(values, self.between(tile.read(values), begin, end, 0.0))
            return
        tile.clear_rows(values, end - self.key, self.plan.block)
        if self.x.window:
            tile.clear_rows(values, 0, begin - self.key)

    def between(self, values: Any, begin: Any, end: Any, other: float) -> Any:
        """A tile of the block's keys; another number before `begin`, if there is a window, and
        from `end` on."""
        at = (tile.arange(values.shape[0]) + self.key)[:, None]
        inside = at < end
        if self.x.window:
            inside = inside & (begin <= at)
        return tile.where(inside, values, other)
