"""Wide matmuls of rows in groups: each group's rows times weights of its own, in one launch.

Tiles are blocks of a group's rows by rows of its weights; a list of blocks, which another kernel
made of the groups' offsets, says which group and which rows. Operands are turned: weights are the
rows of the matrix unit, so that blocks of 8 rows are as fast as weights come. Programs take the
blocks in order, so that blocks of one group, which share weights, run at about the same time.

Where rows are those of another matrix by number, a lane of the producer brings each row of a block.

Rows beyond a block's end are those of the next group: they are multiplied, and not written. A
piece that is whole leaves by a copy, any other by masked stores. Invariant: weights of groups
without rows are not read; the order of a sum over k is that of k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ... import tile
from ...core.dtype import int64
from ...core.target import Target
from ..grouped import block_at, listed
from .joint import JointMatmul
from .plan import START_SECONDS, most_stages, transposed
from .ring import Moving
from .shape import Choice, Operands, WidePlan, box, positions
from .wide import WideMatmul
from .wide_blocks import BlockJoint, BlockMatmul

MOST_STAGES = 24
MOST_GATHERED = 16  # rows of all groups: brought one by one, more take longer than a launch
WIDE_BLOCK = 64  # rows of a block from which on tiles have more rows of the weights
TILE = 128  # rows of a tile, of all weights; rings are more than half of a core's shared memory


class Grouping(Moving):
    """What a wide matmul of groups does in its own way; comes before the class that it changes."""

    blocks: Any  # the list
    sources: Sequence[Any] = ()  # the row of the input that each row is, where it is not itself
    last: Any  # the row after the last of the block that was asked for

    def begin_early(self) -> int:
        """Nothing is read before the list is there."""
        tile.grid_dependency_wait()
        return 0

    def count(self) -> None:
        """How many tiles there are, and how many this program has."""
        down, most = self.counts[0], tile.most(self.blocks.shape[0])
        self.tiles = listed(self.blocks, 0, 0, most) * down
        self.mine = tile.ceil_divide(self.tiles - self.program, self.clusters)

    def corner(self, number: Any) -> tuple[Any, Any, Any]:
        """(group, row of its weights, first row of the block)."""
        down, (_, rows, _, groups) = self.counts[0], self.x.most
        group, first, self.last = block_at(self.blocks, number // down, groups, rows)
        return group, tile.hold(number % down * self.span[0], "row"), first

    def begin_tile(self, where: Any) -> None:
        """The rows of a block that the producer brings; those past the last row are any."""
        if self.sources:
            (rows,), (_, _, first) = self.sources, where
            at = tile.minimum(tile.arange(self.x.block) + first, rows.shape[0] - 1)
            most = tile.most(self.weight.shape[0]) - 1
            found = tile.cast(tile.load(rows, at), int64)
            self.pages = tile.minimum(tile.maximum(found, 0), most)

    def fill_right(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """A block of rows."""
        if not self.sources:
            super().fill_right(stage, where, step, number)
            return
        place, column = self.right[stage], self.along_k(step)
        source = box(self.weight, (0, column), (1, place.shape[1]))
        tile.copy_pages(place, source, self.pages, self.ring.full[stage])

    @tile.function
    def leave(self, place: Any, where: Any) -> None:
        """One piece out of a staged place: those of its rows that are the block's."""
        (_, row, column), wide = where, self.plan.staged
        if column + wide <= self.last:
            tile.copy_store(box(self.c, (column, row), place.shape), place)
        else:
            own = positions(wide, column) < self.last
            inside = positions(64, row) < self.c.shape[1]
            mask = tile.broadcast(own[:, None], place.shape) & inside[None, :]
            tile.store(self.c, (column, row), tile.read(place), mask=mask)


class GroupedMatmul(Grouping, WideMatmul):
    """The product of groups with one array of weights."""


class GroupedJoint(Grouping, JointMatmul):
    """The same with several, of whose products the epilogue makes one."""


class GroupedBlocks(Grouping, BlockMatmul):
    """The product with one array of weights in blocks, of which groups have whole ones."""


class GroupedBlockJoint(Grouping, BlockJoint):
    """The same with several."""


def choose_grouped(x: Operands, target: Target) -> Choice[WidePlan]:
    """The Plan for operands, which are turned, and about how long it takes: as weights of the
    groups that have rows come.

    A core has one program: of two in a core, which come where programs of the launch before have
    nothing to do, each would read half as fast as those of other cores."""
    x, parts = transposed(x), x.products
    rows = max(TILE, 64 * parts) if x.block < WIDE_BLOCK else TILE * parts
    staged = min(64, x.block)
    tile = (rows, x.block, 128 // x.dtype.size)
    plan = WidePlan(tile, MOST_STAGES, target.cores, staged=staged)
    plan = replace(plan, stages=most_stages(x, plan, target))
    m, n, k, used = x.most
    flops = 2 * max(n, min(used, n) * x.block // 2) * m * k * parts
    read = min(used, n) * m * k * x.dtype.size * parts / target.peak_bytes()
    seconds = max(read, flops / target.peak_flops(x.dtype)) + START_SECONDS
    return Choice(plan, True, seconds)
