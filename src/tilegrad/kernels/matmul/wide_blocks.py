"""Wide matmuls of codes that have a scale for each block of k, with promoted sums.

Each BLOCK columns of a row of tokens have a scale, and so have those of BLOCK rows of weights. A
step of the ring is a block of k: a consumer multiplies it into sums of its own, waits for them, and
adds them to its total in float32 times both scales. So matrix units, which keep 14 bits of a sum of
codes, never add more than a block. While one consumer adds, the units multiply for the others.

Registers hold the sums twice, so products have at most BLOCK columns of a tile together, and those
of one are of one block of the weights: a consumer reads one scale of each weight a step, and one
for each row (or column) of tokens, asked for before it waits for the ring. Bytes: as the wide
matmul, and those of scales, 1/32 of the tokens. Invariant: a total is the sum of its blocks in the
order of k (with parts of k, in each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import bool_
from .joint import JointMatmul
from .plan import BLOCK
from .ring import Moving, read_sums
from .shape import positions, side
from .wide import WideMatmul, accumulators


class Promoting(Moving):
    """What a wide matmul of blocks does in its own way; comes before the class that it changes."""

    scales: Sequence[Any]  # of tokens, then of each weight
    sums: Sequence[Any]  # of a block
    starts: Any = (0,)  # where each weight begins
    pages: Any = None  # the rows of tokens, where they are not those of the result

    def begin(self, own: int) -> None:
        """Places for the sums of a block."""
        super().begin(own)
        self.sums = accumulators(self, self.joined)

    @tile.function
    def multiply(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """The products of a tile, block by block along k."""
        turn = tile.hold(count * self.turns, "turn")
        where = self.corner(self.program + count * self.clusters)
        self.begin_tile(where)
        for total in totals:
            tile.write(total, tile.zeros(total.shape))
        for step in tile.range(self.steps):
            tokens, weights = self.factors(own, where, step)
            stage = self.ring.wait(turn + step)
            tile.matrix_fence()
            for number, place in enumerate(self.sums):
                left, right = self.at(number, own, stage)
                tile.matrix_async(place, left, right.T, tile.full((), False, bool_))
            tile.matrix_commit()
            tile.matrix_wait(0)
            self.release(turn + step)
            for total, sums, weight in zip(totals, read_sums(self.sums, self.products), weights):
                factor = tokens * weight  # here, so that products do not wait for scales
                tile.write(total, tile.multiply_add(sums, factor, tile.read(total)))

    def factors(self, own: int, where: Any, step: Any) -> tuple[Any, list[Any]]:
        """Scales of a step's block: those of tokens, (64, 1) or (1, n), and one of each weight."""
        x, (batch, row, column), given = self.x, where, self.scales[0]
        (first, along), count = side(row + 64 * own, column, not x.turned), 64
        if x.turned:
            count = self.span[1]
        block = self.share * self.steps + step
        block = tile.minimum(block, given.shape[1] - 1)  # beyond the last, codes are 0
        weights = scales_at(self, along + batch * x.m if x.block else along, block)
        if self.pages is None:
            mask = positions(count, first) < given.shape[0]
            tokens = tile.load(given, (first, block), (count,), axes=(0,), mask=mask)
        else:
            tokens = tile.load(given, self.pages * given.shape[1] + block)
        return tokens[None, :] if x.turned else tokens[:, None], weights


class BlockMatmul(Promoting, WideMatmul):
    """The product with one weight."""


class BlockJoint(Promoting, JointMatmul):
    """Products with several, side by side or for an epilogue that makes one of them."""


def scales_at(kernel: Promoting, along: Any, block: Any) -> list[Any]:
    """Of a place among weights: of each product's, or of the one that it is in."""
    if kernel.x.gated:
        return [scale_of(stored, along, block) for stored in kernel.scales[1:]]
    return [scale_among(kernel.scales[1:], kernel.starts, along, block)]


@tile.function
def scale_among(stored: Sequence[Any], starts: Sequence[int], along: Any, block: Any) -> Any:
    """The scale of a place in one of several weights, which begin where it is said."""
    if len(stored) == 1 or along < starts[1]:
        found = scale_of(stored[0], along - starts[0], block)
    else:
        found = scale_among(stored[1:], starts[1:], along, block)
    return found


def scale_of(stored: Any, place: Any, block: Any) -> Any:
    """The scale of a place in a weight; the last one's beyond its end."""
    row = tile.minimum(place // BLOCK, stored.shape[0] - 1)
    return tile.load(stored, (row, block), ())
