"""Attention on matrix units that run beside the threads: softmax(scale q k^T) v of 16-bit floats.

`wide_attention` is the placed kernel for GPUs with wgmma, in the way of FlashAttention-3:
persistent programs, one producer that copies a tile of queries and then blocks of keys and of
values into two rings, and consumers of 64 queries each. Scores are multiplied from
shared memory; softmax runs in registers, beside the product of the block before with its values,
whose weights are the product's left operand in registers; consumers take turns at the matrix units.
Blocks of keys go from the last to the first, those that a mask cuts in loops of their own
(`tile_order`); results leave through a staged tile while the next begins.
`plan` has the Plan, `holes` what is done to scores and weights.

Costs of a tile of m queries over n keys: reads (m + 2 n) width elements, 4 m n width operations on
the matrix units and m n exponentials. Invariant: the order of a sum over keys depends on the
Plan and on which keys a tile sees alone; registers of a product that is under way are neither read
nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ... import tile
from ...core.dtype import float32, int32
from ...core.errors import InternalError
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from . import softmax
from .holes import ADDED, Holes
from .plan import REGISTERS, AttentionPlan, padded, why_not
from .shape import AttentionShape, parameters, swizzled, tokens_of
from .tile_order import TileOrder, Work


def wide_attention(
    x: AttentionShape, plan: AttentionPlan, name: str = "attention", more: Sequence[Memory] = ()
) -> Body:
    """The Body; parameters q, k, v, the extras, out, lse. `more` are the types of the extras."""
    return WideAttention(x, plan, BodyBuilder(name, parameters(x, more))).build()


class WideAttention:
    """Writes one Body of `wide_attention`."""

    tiles_of: type[TileOrder] = TileOrder
    registers = REGISTERS
    notes: ClassVar[dict[str, Any]] = {}  # of the Body

    def __init__(self, x: AttentionShape, plan: AttentionPlan, b: BodyBuilder) -> None:
        why = why_not(x, plan)
        if why:
            raise InternalError("kernels.attention.forward", f"{why}: {plan} for {x}")
        self.x, self.plan, self.b = x, plan, b
        self.rows, self.keys = plan.tile
        self.halves = self.rows // 64
        self.width, self.value_width = padded(x.width), padded(x.value_width)
        self.memory = {p.attrs["name"]: tile.memory(p) for p in b.parameters}

    def build(self) -> Body:
        """Places, then the roles beside each other."""
        plan = self.plan
        few, registers = self.registers[self.halves]
        with tile.into(self.b):
            self.order = self.tiles_of(self.x, self.plan, self.memory)
            self.place()
            self.order.program = tile.grid(plan.programs)
            with tile.role("producer", 4, few):
                self.producer()
            for own in range(self.halves):
                with tile.role(f"consumer{own}", 4, registers):
                    self.consumer(own)
        return self.b.finish((plan.programs,), plan=plan, **self.notes)

    # ---- places and copies ------------------------------------------------------------------

    def place(self) -> None:
        """Queries, the rings, results on their way out, and the barriers."""
        dtype, plan, halves = self.x.dtype, self.plan, self.halves
        self.queries = swizzled(dtype, plan.query_stages, halves, 64, self.width)
        # of a tile's last block a consumer may multiply fewer keys
        columns = [self.order.first_columns(own) for own in range(halves)]
        self.columns = columns if plan.narrow else [self.keys] * halves
        self.pieces = self.keys // 64 if min(self.columns) < self.keys else 1  # of values
        self.ring = [
            swizzled(dtype, plan.stages, 1, self.keys, self.width),
            swizzled(dtype, plan.stages, self.pieces, self.keys // self.pieces, self.value_width),
        ]
        if plan.staged:
            self.staged = swizzled(dtype, halves, plan.together, 64, plan.staged)
        self.tiles = tile.pipeline("query", plan.query_stages, halves)
        full = [tile.barrier(f"{of}_full", 1, plan.stages) for of in ("key", "value")]
        empty = [tile.barrier(f"{of}_empty", halves, plan.stages) for of in ("key", "value")]
        self.blocks = [tile.Pipeline(*pair) for pair in zip(full, empty)]  # of keys, of values

    def tokens(self, which: int, holes: Holes, token: Any, shape: Any, column: int = 0) -> Any:
        """Tokens of q, k, v or the result."""
        memory = self.memory[("q", "k", "v", "out")[which]]
        head, start = holes.head, holes.query_start
        if which in (1, 2):
            head, start = head // self.x.group, holes.key_start
        at = (holes.batch, head, token + start)
        return tokens_of(memory, self.x.orders[which], at, shape, column)

    def load_queries(self, count: Any, work: Work) -> None:
        """The queries of a tile, 64 rows a copy."""
        stage = self.tiles.acquire(count)
        self.tiles.full.expect(stage, self.rows * self.width * self.x.dtype.size)
        for own in range(self.halves):
            place = self.queries[stage, own]
            rows = self.tokens(0, work.holes, work.first + 64 * own, place.shape)
            tile.copy_async(place, rows, self.tiles.full[stage])

    def load(self, which: int, work: Work, turn: Any, step: Any) -> None:
        """A block of keys (0) or values (1)."""
        ring, blocks, key = self.ring[which], self.blocks[which], self.order.key_of(work, step)
        stage = blocks.acquire(turn + step)
        blocks.full.expect(stage, ring[0].bytes)
        for piece in range(ring.shape[1]):
            place = ring[stage, piece]
            rows = self.tokens(1 + which, work.holes, key + piece * place.shape[0], place.shape)
            tile.copy_async(place, rows, blocks.full[stage])

    # ---- the producer -----------------------------------------------------------------------

    def producer(self) -> None:
        """Queries of a tile, then keys one block ahead of values."""
        if self.plan.dependent:
            tile.grid_dependency_wait()

        def one(count: Any, work: Work, turn: Any) -> None:
            self.load_queries(count, work)
            self.load(0, work, turn, 0)

            def step(j: Any, _: bool) -> None:
                self.load(0, work, turn, j)
                self.load(1, work, turn, j - 1)

            self.order.steps(work, step)
            self.load(1, work, turn, work.count - 1)

        count, turn = self.order.for_tiles(one)
        if self.plan.chained:  # consumers begin one tile more
            nothing = Work(0, 1, 1, 1, Holes(self.x, {}, 0, 0), 0, self.x.queries, self.x.keys)
            self.load_queries(count, nothing)
            self.load(0, nothing, turn, 0)

    # ---- consumers --------------------------------------------------------------------------

    def consumer(self, own: int) -> None:
        """64 queries of every tile."""
        plan = self.plan
        if plan.dependent:
            tile.grid_dependency_wait()
            if plan.early:
                tile.grid_launch_dependents()
        Consumer(self, own).run()
        if plan.dependent and not plan.early:
            tile.grid_launch_dependents()
        tile.wait_copies(0)


class Consumer:
    """Writes one consumer: products, and the softmax between them."""

    def __init__(self, kernel: WideAttention, own: int) -> None:
        self.k, self.own, self.x, self.plan = kernel, own, kernel.x, kernel.plan
        self.keys, self.values = kernel.blocks
        late, dtype = self.plan.late, self.x.dtype
        self.scores = self.first_scores = tile.register((64, kernel.keys))
        self.columns = kernel.columns[own]  # of the first block
        if self.columns < kernel.keys:
            self.first_scores = tile.register((64, self.columns))
        self.piece = kernel.keys // kernel.pieces
        self.weights = [tile.register((64, self.piece), dtype) for _ in range(kernel.pieces)]
        self.total = tile.register((64, kernel.value_width), float32, 0.0 if late else None)
        self.shrink = tile.register((64, 1)) if late else None
        self.largest = tile.register((64, 1))
        self.sums = tile.register((64, softmax.LANES))
        self.turns = kernel.halves > 1  # whether consumers take turns

    def run(self) -> None:
        """Every tile; consumers take turns from the first on."""
        if self.turns and self.own == self.k.halves - 1:
            tile.named_arrive(0, 256)
        if self.plan.chained:
            self.begin(0, 0)
        _, turn = self.k.order.for_tiles(self.one)
        if self.plan.chained:
            tile.matrix_wait(0)
            self.keys.release(turn)

    def one(self, count: Any, work: Work, turn: Any) -> None:
        """One tile: scores of a block beside the values of the one before it."""
        stage = self.k.tiles.stage(count)
        first = self.skip(work, turn)
        if not self.plan.chained:
            self.begin(count, turn, first)
        tile.matrix_wait(0)
        self.keys.release(turn + first)
        p, _ = self.softmax(work, first, self.k.order.cut_first, True)
        if self.shrink is not None:
            tile.write(self.shrink, tile.full((64, 1), 1.0))
        self.write_weights(p)
        self.values.wait(turn + first)
        self.steps(work, turn, stage, first)
        last = turn + work.count - 1
        if self.plan.staged:
            self.k.tiles.empty.arrive(stage)
        self.rescale_late()
        self.multiply_values(turn, work.count - 1, first)
        if self.plan.chained:
            self.begin(count + 1, (turn + work.count) % (2 * self.plan.stages))
        tile.matrix_wait(int(self.plan.chained))
        self.values.release(last)
        self.finish(work, stage)

    @tile.function
    def steps(self, work: Work, turn: Any, stage: Any, first: Any) -> None:
        """All steps of a tile after the first."""

        def step(j: Any, cut: bool, columns: int = 0) -> None:
            """Scores of a block and the values of the one before, of which some keys count."""
            self.keys.wait(turn + j)
            self.take_turn()
            tile.matrix_fence()
            self.multiply_keys(stage, turn + j, self.scores)
            self.rescale_late()
            self.multiply_values(turn, j - 1, first, columns)
            self.give_turn()
            tile.matrix_wait(1)
            self.keys.release(turn + j)
            p, shrink = self.softmax(work, j, cut, False)
            # wanted in the next step; here, where a loop that waits begins, assemblers keep the
            # softmax before the wait for the product that runs beside it
            self.values.wait(turn + j)
            tile.matrix_wait(0)
            self.values.release(turn + j - 1)
            if self.shrink is not None:
                tile.write(self.shrink, shrink)
            else:
                self.rescale(shrink)
            self.write_weights(p)

        if self.columns < self.k.keys:  # the second step has the first block's values
            work = replace(work, right=tile.hold(tile.minimum(2, work.count), "second"))
            for second in tile.range(1, work.right):
                step(second, False, self.columns)
        self.k.order.steps(work, step, first)

    # ---- products ---------------------------------------------------------------------------

    def begin(self, count: Any, turn: Any, first: Any = 0) -> None:
        """Issue the first scores of a tile."""
        stage = self.k.tiles.wait(count)
        self.keys.wait(turn + first)
        tile.matrix_fence()
        self.multiply_keys(stage, turn + first, self.first_scores)

    def multiply_keys(self, query_stage: Any, step: Any, scores: Any) -> None:
        """Scores of a block."""
        keys = self.k.ring[0][self.keys.stage(step), 0]
        tile.matrix_async(scores, self.k.queries[query_stage, self.own], keys.T, False)
        tile.matrix_commit()

    def multiply_values(self, turn: Any, step: Any, first: Any, columns: int = 0) -> None:
        """Add the values of a block's first keys, weighed, to those since the `first` step."""
        stage, count = self.values.stage(turn + step), (columns or self.k.keys) // self.piece
        tile.matrix_fence()
        for piece, weights in enumerate(self.weights[:count]):
            more = piece > 0 or tile.less(first, step)
            tile.matrix_async(self.total, weights, self.k.ring[1][stage, piece], more)
        tile.matrix_commit()

    # ---- turns ------------------------------------------------------------------------------

    def take_turn(self) -> None:
        """Wait until the consumer before has issued its products."""
        if self.turns:
            tile.named_sync(self.own, 256)

    def give_turn(self) -> None:
        """Let the next consumer issue its products."""
        if self.turns:
            tile.named_arrive((self.own + 1) % self.k.halves, 256)

    @tile.function
    def skip(self, work: Work, turn: Any) -> Any:
        """Give back what this consumer's queries do not see; gives the first step that they do."""
        if not self.plan.narrow or self.plan.chained:
            return 0
        count = self.k.order.skipped(work, self.own)
        for skip in tile.range(count):
            for blocks in (self.keys, self.values):
                blocks.wait(turn + skip)  # else it would count for the lap before
                blocks.release(turn + skip)
            self.take_turn()
            self.give_turn()
        return count

    # ---- softmax ----------------------------------------------------------------------------

    def softmax(self, work: Work, step: Any, cut: bool, first: bool) -> tuple[Any, Any]:
        """Weights of a block, and the factor for what was summed before; max and sums move on."""
        holes, factor, order = work.holes, work.holes.factor, self.k.order
        row, key = self.row(work), order.key_of(work, step)
        s = tile.read(self.first_scores if first else self.scores)
        if ADDED & set(self.x.extras):
            key = tile.hold(key, "key")
        s = holes.score(s, row, key)
        if cut:
            key = tile.hold(key, "key")
            seen = holes.seen(s.shape, row, key, work.limit, order.ends)
            s = tile.where(seen, s, -tile.INF)
        now = tile.max(softmax.folded(tile.maximum, s), 1, keep=True)
        before = now if first else tile.read(self.largest)
        if not first:
            now = tile.maximum(before, now)
        tile.write(self.largest, now)
        top = softmax.top_of(now, factor, cut or "bias" in self.x.extras)
        p = softmax.weights(s, factor, top)
        sums = softmax.folded(lambda a, b: a + b, p)
        p = holes.weight(p, row, key)
        if first:
            tile.write(self.sums, sums)
            return p, now
        shrink = softmax.weights(before, factor, top)
        tile.write(self.sums, tile.multiply_add(tile.read(self.sums), shrink, sums))
        return p, shrink

    def row(self, work: Work) -> Any:
        """The first query of this consumer."""
        return work.first + 64 * self.own

    def rescale(self, shrink: Any) -> None:
        """What was summed so far, for a larger maximum."""
        tile.write(self.total, tile.read(self.total) * shrink)

    def rescale_late(self) -> None:
        """The same by the factor that was kept, if it was."""
        if self.shrink is not None:
            self.rescale(tile.read(self.shrink))

    def write_weights(self, p: Any) -> None:
        """The weights of a block, rounded, where the product finds them; 0 beyond their end."""
        narrow = tile.cast(p, self.x.dtype)
        for number, place in enumerate(self.weights):
            start, stop = number * self.piece, (number + 1) * self.piece
            inside = stop <= p.shape[1]
            tile.write(
                place, narrow[:, start:stop] if inside else tile.zeros(place.shape, self.x.dtype)
            )

    # ---- the end of a tile ------------------------------------------------------------------

    @tile.function
    def finish(self, work: Work, stage: Any) -> None:
        """Divide by the sums; results and log-sum-exps go out."""
        holes = work.holes
        sums, largest = tile.sum(tile.read(self.sums), 1, keep=True), tile.read(self.largest)
        top = largest * holes.factor  # -inf where nothing was seen
        over, sums, top = softmax.finished(sums, top, holes.begun(), holes.grown)
        result = tile.cast(tile.read(self.total) * over, self.x.dtype)
        # what lies after the last row of several sequences is another one's
        if self.k.order.packed and tile.less(0, self.row(work) + 64 - work.queries):
            self.write_rows(work, result)
        else:
            self.write_out(work, stage, result)
        self.write_sums(work, softmax.log_sums(sums, top))

    def write_sums(self, work: Work, natural: Any) -> None:
        """The log-sum-exps of the tile's queries."""
        x, mask = self.x, None
        if self.k.order.packed or not (isinstance(x.queries, int) and x.queries % self.k.rows == 0):
            mask = self.rows_inside(work)
        at = (work.holes.batch, work.holes.head, work.holes.query_start + self.row(work))
        tile.store(self.k.memory["lse"], at, tile.reshape(natural, (64,)), mask=mask)

    def rows_inside(self, work: Work) -> Any:
        """Which rows are queries that there are, (64,)."""
        count = tile.cast(work.queries - self.row(work), int32)
        return softmax.line(64) < count

    def write_rows(self, work: Work, result: Any) -> None:
        """Those rows of the results that are queries, from registers."""
        mask = self.rows_inside(work)[:, None]
        result = result[:, : self.x.value_width]
        target = self.k.tokens(3, work.holes, self.row(work), result.shape)
        tile.store(target, result, mask=mask)

    def write_out(self, work: Work, stage: Any, result: Any) -> None:
        """Results on their way out, piece by piece."""
        k, plan = self.k, self.plan
        wide, pieces = plan.staged or k.value_width, plan.together if plan.staged else 1
        for first in range(0, k.value_width, wide * pieces):
            if plan.staged:
                tile.wait_copies(0)
            staged = [
                k.staged[self.own, i] if plan.staged else k.queries[stage, self.own]
                for i in range(pieces)
            ]
            starts = range(first, first + wide * pieces, wide)
            for place, start in zip(staged, starts):
                tile.write(place, result[:, start : start + wide])
            tile.fence("async")
            tile.named_sync(k.halves + self.own, 128)
            for place, start in zip(staged, starts):
                target = k.tokens(3, work.holes, self.row(work), place.shape, start)
                tile.copy_store(target, place)
            tile.commit_copies()
        if not plan.staged:
            tile.wait_copies(0)
            k.tiles.empty.arrive(stage)
