"""How tiles come to the attention kernel: its places, and the copies that fill them.

A tile of queries lies in as many places of 64 rows as there are consumers; keys and values have a
ring each, so that a block of keys comes before the values of the block before are wanted.
Invariant: the bytes that a stage expects are those of the copies into it.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from .holes import Holes
from .plan import AttentionPlan
from .shape import AttentionShape, swizzled, tokens_of
from .tile_order import Work


class AttentionPlaces:
    """The part of a WideAttention that fills the rings; see there for what it is made of."""

    x: AttentionShape
    plan: AttentionPlan

    def __getattr__(self, name: str) -> Any:  # what WideAttention sets
        raise AttributeError(name)

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
