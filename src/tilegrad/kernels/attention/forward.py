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
from typing import Any, ClassVar

from ... import tile
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .consumer import Consumer
from .holes import Holes
from .plan import REGISTERS, AttentionPlan, padded, why_not
from .shape import AttentionShape, parameters, refuse, swizzled
from .tile_order import TileOrder, Tokens, Work


def wide_attention(
    x: AttentionShape, plan: AttentionPlan, name: str = "attention", more: Sequence[Memory] = ()
) -> Body:
    """The Body; parameters q, k, v, the extras, out, lse. `more` are the types of the extras.
    Tokens of no sequence are left alone."""
    return WideAttention(x, plan, BodyBuilder(name, parameters(x, more))).build()


class WideAttention(TileOrder):
    """Writes one Body of `wide_attention`."""

    registers = REGISTERS
    notes: ClassVar[dict[str, Any]] = {}  # of the Body

    def __init__(self, x: AttentionShape, plan: AttentionPlan, b: BodyBuilder) -> None:
        refuse("kernels.attention.forward", why_not(x, plan), plan, x)
        super().__init__(x, plan, tile.memories(b))
        self.b, self.halves = b, self.rows // 64
        self.width, self.value_width = padded(x.width), padded(x.value_width)
        self.operand = x.dtype  # of what products take

    def build(self) -> Body:
        """Places, then the roles beside each other."""
        plan = self.plan
        few, registers = self.registers[self.halves]
        with tile.into(self.b):
            self.place()
            self.program = tile.grid(plan.programs)
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
        dtype, plan, halves = self.operand, self.plan, self.halves
        # of a tile's last block a consumer may multiply fewer keys
        self.columns = [
            self.first_columns(own) if plan.narrow else self.keys for own in range(halves)
        ]
        self.pieces = self.keys // 64 if min(self.columns) < self.keys else 1  # of values
        keys = self.keys // self.pieces
        self.ring = {
            "q": swizzled(dtype, plan.query_stages, halves, 64, self.width),
            "k": swizzled(dtype, plan.stages, 1, self.keys, self.width),
            "v": swizzled(dtype, plan.stages, self.pieces, keys, self.value_width),
        }
        if plan.staged:
            self.staged = swizzled(self.x.dtype, halves, 64, plan.staged)
        self.pipes = {n: tile.pipeline(n, r.shape[0], halves) for n, r in self.ring.items()}

    def bring(self, name: str, work: Work, turn: Any, token: Any) -> None:
        """Tokens of a tile (queries) or a block (keys, values) into their next stage."""
        ring, pipe = self.ring[name], self.pipes[name]
        stage = pipe.acquire(turn)
        pipe.full.expect(stage, ring[0].bytes)
        for piece in range(ring.shape[1]):
            place = ring[stage, piece]
            rows = work.holes.tokens(name, token + piece * place.shape[0], place.shape)
            tile.copy_async(place, rows, pipe.full[stage])

    def scale(self, which: int, work: Work) -> Any | None:
        """What keys (0) or values (1) are multiplied by; None for 1."""
        return None

    # ---- the producer -----------------------------------------------------------------------

    def producer(self) -> None:
        """Queries of a tile, then keys one block ahead of values."""
        tile.grid_dependency_wait()

        def block(name: str, work: Work, turn: Any, step: Any) -> None:
            self.bring(name, work, turn + step, self.key_of(work, step))

        def one(count: Any, work: Work, turn: Any) -> None:
            self.bring("q", work, count, work.first)
            block("k", work, turn, 0)

            def step(j: Any, _: bool) -> None:
                block("k", work, turn, j)
                block("v", work, turn, j - 1)

            self.steps(work, step)
            block("v", work, turn, work.count - 1)

        count, turn = self.for_tiles(one)
        if self.plan.chained:  # consumers begin one tile more
            nothing: Any = Tokens(Holes(self.x, self.memory, 0, 0), 0, 0, 0)
            self.bring("q", nothing, count, 0)
            self.bring("k", nothing, turn, 0)
