"""Many tokens times quantised rows on a GPU: weights are taken apart on their way to a product.

A program computes a tile of tokens by rows. For each step of columns its threads take apart the
groups they hold (asked for a step ahead), lay the values down in shared memory in x's dtype
beside the tile of x, and multiply by the matrix units. Weights are read packed, once for each
block of tokens, mostly from L2. Values are rounded to x's dtype, as those of a model that is
stored in it would be; sums are float32. float32 tokens are multiplied as float32. Of groups, a
program has a block of tokens of one group, by a list (see `kernels.grouped`), and its rows.

Invariant: the order of every sum depends on the shape and the Plan alone; tokens past the end
are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...core.errors import InternalError
from ...ir.symbol import ceil_divide, high, round_up
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ..grouped import COLUMNS, block_at, listed, most_blocks
from .gpu_layout import BLOCK, GROUP, ROWS, Groups, as_columns, groups_of, parts
from .shape import NOTHING, Around, QuantisedShape, parameters
from .words import and_masks, there


@dataclass(frozen=True)
class MatrixPlan:
    """Choices of `MatrixKernel`."""

    tokens: int = 64  # of a tile
    rows: int = 128
    groups: int = 2  # of a step of columns
    warps: int = 8
    block: int = 0  # tokens of a block of a group, at most those of a tile; 0: there is one group


class MatrixKernel:
    """The kernel: x (tokens, columns), a list of blocks if there is one, the parts, out0 (tokens,
    rows)."""

    def __init__(
        self, shape: QuantisedShape, plan: MatrixPlan, name: str, around: Around = NOTHING
    ) -> None:
        self.shape, self.plan, rows = shape, plan, round_up(shape.outputs, ROWS)
        if BLOCK % plan.groups or rows % plan.rows or around != NOTHING:
            raise InternalError("kernels.quantised", f"{plan}, {around} do not fit {shape}")
        self.across, self.down = rows // plan.rows, ceil_divide(shape.tokens, plan.tokens)
        given = parameters(shape, parts(shape))
        if plan.block:
            self.down = most_blocks(shape.tokens, shape.groups, plan.block)
            given.insert(1, ("blocks", Memory((1 + self.down, COLUMNS), int32)))
        self.b = BodyBuilder(name, given)
        self.memory = tile.memories(self.b)
        self.weights = Groups(shape, self.memory)

    def build(self) -> Body:
        """A program has a tile of tokens by rows, or of a block of a list."""
        grid = (self.across, self.down)
        with tile.into(self.b):
            number, at = tile.grid(*grid)
            (self.of_block if self.plan.block else self.of_all)(number * self.plan.rows, at)
        return self.b.finish(grid, warps=self.plan.warps, level="placed")

    def of_all(self, column: Any, at: Any) -> None:
        """Some of all tokens."""
        self.work(column, 0, at * self.plan.tokens, self.shape.tokens)

    @tile.function
    def of_block(self, column: Any, block: Any) -> None:
        """The tokens of a block, if there is one."""
        blocks, shape = self.memory["blocks"], self.shape
        tile.grid_dependency_wait()
        if block < listed(blocks, 0, 0, high(self.down)):
            group, first, stop = block_at(blocks, block, shape.groups, high(shape.tokens))
            self.work(column, group * shape.outputs, first, stop)

    @tile.function
    def work(self, column: Any, own: Any, token: Any, stop: Any) -> None:
        """Step by step along the columns, then write. `own` is the first row of a group's
        weights."""
        plan, shape = self.plan, self.shape
        row, last = own + column, groups_of(shape) - plan.groups
        while last * GROUP >= shape.columns:
            last -= plan.groups  # groups that are there for their number alone
        loaded = self.weights.load(row, 0, plan.rows, plan.groups)
        # the launch after this one begins when it ends: programs that wait would take its place
        if not plan.block:
            tile.grid_dependency_wait()
        total = tile.zeros((plan.tokens, plan.rows))
        left = self.load_input(token, stop, 0)
        for group in tile.range(0, last + 1, plan.groups):
            at = tile.minimum(group + plan.groups, last)
            ahead = self.load_input(token, stop, at)
            following = self.weights.load(row, at, plan.rows, plan.groups)
            total = tile.dot(left, self.values(loaded).T, total)
            left, loaded = ahead, following
        mask = inside((plan.tokens, plan.rows), token, stop, column, shape.outputs)
        tile.store(self.memory["out0"], (token, column), total.to(shape.dtype), mask=mask)

    def load_input(self, token: Any, stop: Any, group: Any) -> Any:
        """A step of x, 0 past its ends."""
        size = (self.plan.tokens, self.plan.groups * GROUP)
        mask = inside(size, token, stop, group * GROUP, self.shape.columns)
        return tile.load(self.memory["x"], (token, group * GROUP), size, mask=mask)

    def values(self, loaded: Sequence[Any]) -> Any:
        """Weights (rows, columns) of a step, rounded to the dtype of x."""
        found = self.weights.values(loaded, once=True)
        return as_columns([value.to(self.shape.dtype) for value in found])


def inside(size: tuple[int, int], token: Any, stop: Any, column: Any, limit: int) -> Any:
    """Which tokens and columns of a tile there are; None for all."""
    return and_masks(there(size, 0, token, stop), there(size, 1, column, limit))
