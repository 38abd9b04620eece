"""Wide matmuls of codes that have a scale for each block of k, with promoted sums.

Each BLOCK columns of a row of tokens have a scale, and so have those of BLOCK rows of weights. A
step of the ring is a block of k: a consumer multiplies it into sums of its own, waits for them, and
adds them to its total in float32 times both scales. So matrix units, which keep 14 bits of a sum of
codes, never add more than a block. While one consumer adds, the units multiply for the others.

Registers hold the sums twice, so tiles have at most BLOCK columns, and these are of one block of
the weights: a consumer reads one scale of them a step, and one for each row (or column) of tokens,
asked for before it waits for the ring. Bytes: as the wide matmul, and those of scales, 1/32 of the
tokens. Invariant: a total is the sum of its blocks in the order of k (with parts of k, in each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import bool_
from .plan import BLOCK
from .shape import positions, side
from .wide import WideMatmul


class BlockMatmul(WideMatmul):
    """Writes one Body."""

    scales: Sequence[Any]  # of tokens, of weights
    sums: Any  # of a block

    def begin(self, own: int) -> None:
        """A place for the sums of a block."""
        super().begin(own)
        self.sums = tile.register((64, self.span[1]))

    @tile.function
    def multiply(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """The products of a tile, block by block along k."""
        (total,), turn = totals, tile.hold(count * self.turns, "turn")
        where = self.corner(self.program + count * self.clusters)
        tile.write(total, tile.zeros(total.shape))
        for step in tile.range(self.steps):
            weight, tokens = self.factors(own, where, step)
            stage = self.ring.wait(turn + step)
            tile.matrix_fence()
            left, right = self.at(0, own, stage)
            tile.matrix_async(self.sums, left, right.T, tile.full((), False, bool_))
            tile.matrix_commit()
            tile.matrix_wait(0)
            self.release(turn + step)
            factor = tokens * weight  # here, so that products do not wait for scales
            grown = tile.multiply_add(tile.read(self.sums), factor, tile.read(total))
            tile.write(total, grown)

    def factors(self, own: int, where: Any, step: Any) -> tuple[Any, Any]:
        """Scales of a step's block: that of the weights, and those of tokens, (64, 1) or (1, n)."""
        x, (_, row, column), (given, stored) = self.x, where, self.scales
        (first, weight), count = side(row + 64 * own, column, not x.turned), 64
        if x.turned:
            count = self.span[1]
        last, block = stored.shape[0] - 1, self.share * self.steps + step
        block = tile.minimum(block, stored.shape[1] - 1)  # beyond the last, codes are 0
        one = tile.load(stored, (tile.minimum(weight // BLOCK, last), block), ())
        mask = positions(count, first) < given.shape[0]
        tokens = tile.load(given, (first, block), (count,), axes=(0,), mask=mask)
        return one, tokens[None, :] if x.turned else tokens[:, None]
