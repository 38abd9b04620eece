"""Attention on matrix units that run beside the threads: softmax(scale q k^T) v of 16-bit floats.

`wide_attention` is the placed kernel for GPUs with wgmma, in the way of FlashAttention-3:
persistent programs, one producer that copies a tile of queries and then blocks of keys and of
values into two rings, and consumers of 64 queries each. Scores are multiplied from
shared memory; softmax runs in registers, beside the product of the block before with its values,
whose weights are the product's left operand in registers; consumers take turns at the matrix units.
Blocks of keys go from the last to the first, those that a mask cuts in loops of their own
(`tile_order`); results leave through a staged tile while the next begins (`consumer`).
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
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .consumer import ConsumerRows
from .holes import Holes
from .plan import REGISTERS, AttentionPlan, padded, why_not
from .shape import AttentionShape, memories, parameters, refuse, swizzled
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
        refuse("kernels.attention.forward", why_not(x, plan), plan, x)
        self.x, self.plan, self.b = x, plan, b
        self.rows, self.keys = plan.tile
        self.halves = self.rows // 64
        self.width, self.value_width = padded(x.width), padded(x.value_width)
        self.memory = memories(b)

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
                with tile.role(f"consumer{own}", 4, registers):  # 64 queries of every tile
                    tile.grid_dependency_wait()
                    if plan.early:
                        tile.grid_launch_dependents()
                    Consumer(self, own).run()
                    if not plan.early:
                        tile.grid_launch_dependents()
                    tile.wait_copies(0)
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
        self.blocks = [tile.pipeline(of, plan.stages, halves) for of in ("key", "value")]

    def load_queries(self, count: Any, work: Work) -> None:
        """The queries of a tile, 64 rows a copy."""
        stage = self.tiles.acquire(count)
        self.tiles.full.expect(stage, self.rows * self.width * self.x.dtype.size)
        for own in range(self.halves):
            place = self.queries[stage, own]
            rows = work.holes.tokens("q", work.first + 64 * own, place.shape)
            tile.copy_async(place, rows, self.tiles.full[stage])

    def load(self, which: int, work: Work, turn: Any, step: Any) -> None:
        """A block of keys (0) or values (1)."""
        ring, blocks, key = self.ring[which], self.blocks[which], self.order.key_of(work, step)
        stage = blocks.acquire(turn + step)
        blocks.full.expect(stage, ring[0].bytes)
        for piece in range(ring.shape[1]):
            place = ring[stage, piece]
            rows = work.holes.tokens("kv"[which], key + piece * place.shape[0], place.shape)
            tile.copy_async(place, rows, blocks.full[stage])

    # ---- the producer -----------------------------------------------------------------------

    def producer(self) -> None:
        """Queries of a tile, then keys one block ahead of values."""
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
            holes = Holes(self.x, self.memory, 0, 0)
            nothing = Work(0, 1, 1, 1, holes, 0, self.x.queries, self.x.keys)
            self.load_queries(count, nothing)
            self.load(0, nothing, turn, 0)


class Consumer(ConsumerRows):
    """Writes one consumer: products, and the softmax between them."""

    first: Any  # step of the tile at work that its queries see

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
        self.work, self.turn, self.stage = work, turn, self.k.tiles.stage(count)
        self.first = first = self.skip()
        if not self.plan.chained:
            self.begin(count, turn + first)
        tile.matrix_wait(0)
        self.keys.release(turn + first)
        p, _ = self.softmax(first, self.k.order.cut_first, True)
        if self.shrink is not None:
            tile.write(self.shrink, tile.full((64, 1), 1.0))
        self.write_weights(p)
        self.values.wait(turn + first)
        self.steps()
        last = turn + work.count - 1
        if self.plan.staged:
            self.k.tiles.empty.arrive(self.stage)
        self.rescale_late()
        self.multiply_values(work.count - 1)
        if self.plan.chained:
            self.begin(count + 1, (turn + work.count) % (2 * self.plan.stages))
        tile.matrix_wait(int(self.plan.chained))
        self.values.release(last)
        self.finish()

    @tile.function
    def steps(self) -> None:
        """All steps of a tile after the first."""
        work, turn = self.work, self.turn

        def step(j: Any, cut: bool, columns: int = 0) -> None:
            """Scores of a block and the values of the one before, of which some keys count."""
            self.keys.wait(turn + j)
            self.take_turn()
            tile.matrix_fence()
            self.multiply_keys(self.stage, turn + j, self.scores)
            self.rescale_late()
            self.multiply_values(j - 1, columns)
            self.give_turn()
            tile.matrix_wait(1)
            self.keys.release(turn + j)
            p, shrink = self.softmax(j, cut, False)
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
        self.k.order.steps(work, step, self.first)

    # ---- products ---------------------------------------------------------------------------

    def begin(self, count: Any, step: Any) -> None:
        """Issue the first scores of a tile."""
        stage = self.k.tiles.wait(count)
        self.keys.wait(step)
        tile.matrix_fence()
        self.multiply_keys(stage, step, self.first_scores)

    def multiply_keys(self, query_stage: Any, step: Any, scores: Any) -> None:
        """Scores of a block."""
        keys = self.k.ring[0][self.keys.stage(step), 0]
        tile.matrix_async(scores, self.k.queries[query_stage, self.own], keys.T, False)
        tile.matrix_commit()

    def multiply_values(self, step: Any, columns: int = 0) -> None:
        """Add the values of a block's first keys, weighed, to those since the first step."""
        stage, count = self.values.stage(self.turn + step), (columns or self.k.keys) // self.piece
        tile.matrix_fence()
        for piece, weights in enumerate(self.weights[:count]):
            more = piece > 0 or tile.less(self.first, step)
            tile.matrix_async(self.total, weights, self.k.ring[1][stage, piece], more)
        tile.matrix_commit()
