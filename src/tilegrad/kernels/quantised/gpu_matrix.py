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
from .shape import QuantisedShape, parameters
from .words import and_masks, there


@dataclass(frozen=True)
class MatrixPlan:
    """Choices of `many_tokens`."""

    tokens: int = 64  # of a tile
    rows: int = 128
    groups: int = 2  # of a step of columns
    warps: int = 8
    block: int = 0  # tokens of a block of a group, at most those of a tile; 0: there is one group


def many_tokens(shape: QuantisedShape, plan: MatrixPlan, name: str = "quantised_matrix") -> Body:
    """The kernel: x (tokens, columns), the parts, out (tokens, rows)."""
    rows = round_up(shape.outputs, ROWS)
    if BLOCK % plan.groups or rows % plan.rows:
        raise InternalError("kernels.quantised", f"{plan} does not fit {shape}")
    given = parameters(shape, parts(shape))
    if plan.block:
        most = most_blocks(shape.tokens, shape.groups, plan.block)
        given.insert(1, ("blocks", Memory((1 + most, COLUMNS), int32)))
    b = BodyBuilder(name, given)
    with tile.into(b):
        grid = multiply(shape, plan, {p.attrs["name"]: tile.memory(p) for p in b.parameters})
    return b.finish(grid, warps=plan.warps, level="placed")


@tile.function
def multiply(shape: QuantisedShape, plan: MatrixPlan, memory: dict[str, Any]) -> tuple[Any, Any]:
    """A tile of tokens by rows, or of a block of a list; gives the grid."""
    across = round_up(shape.outputs, ROWS) // plan.rows
    if not plan.block:
        grid = (across, ceil_divide(shape.tokens, plan.tokens))
        number, tokens = tile.grid(*grid)
        first = tokens * plan.tokens
        one_tile(shape, plan, memory, number * plan.rows, 0, first, shape.tokens)
    else:
        blocks = memory["blocks"]
        grid = (across, most_blocks(shape.tokens, shape.groups, plan.block))
        number, block = tile.grid(*grid)
        tile.grid_dependency_wait()
        if tile.less(block, listed(blocks, 0, 0, high(grid[1]))):
            own, first, stop = block_at(blocks, block, shape.groups, high(shape.tokens))
            own = own * shape.outputs
            one_tile(shape, plan, memory, number * plan.rows, own, first, stop)
    return grid


@tile.function
def one_tile(
    shape: QuantisedShape,
    plan: MatrixPlan,
    memory: dict[str, Any],
    column: Any,
    own: Any,
    token: Any,
    stop: Any,
) -> None:
    """Step by step along the columns, then write. `own` is the first row of a group's weights."""
    weights, row, last = Groups(shape, memory), own + column, groups_of(shape) - plan.groups
    while last * GROUP >= shape.columns:
        last -= plan.groups  # groups that are there for their number alone
    loaded = weights.load(row, 0, plan.rows, plan.groups)
    # the launch after this one begins when it ends: programs that wait would take its place
    if not plan.block:
        tile.grid_dependency_wait()
    total = tile.zeros((plan.tokens, plan.rows))
    left = load_input(shape, plan, memory["x"], token, stop, 0)
    for group in tile.range(0, last + 1, plan.groups):
        at = tile.minimum(group + plan.groups, last)
        ahead = load_input(shape, plan, memory["x"], token, stop, at)
        following = weights.load(row, at, plan.rows, plan.groups)
        total = tile.dot(left, values(weights, loaded, shape.dtype).T, total)
        left, loaded = ahead, following
    mask = inside((plan.tokens, plan.rows), token, stop, column, shape.outputs)
    tile.store(memory["out0"], (token, column), total.to(shape.dtype), mask=mask)


def load_input(
    shape: QuantisedShape, plan: MatrixPlan, x: Any, token: Any, stop: Any, group: Any
) -> Any:
    """A step of x, 0 past its ends."""
    size = (plan.tokens, plan.groups * GROUP)
    mask = inside(size, token, stop, group * GROUP, shape.columns)
    return tile.load(x, (token, group * GROUP), size, mask=mask)


def inside(size: tuple[int, int], token: Any, stop: Any, column: Any, limit: int) -> Any:
    """Which tokens and columns of a tile there are; None for all."""
    return and_masks(there(size, 0, token, stop), there(size, 1, column, limit))


def values(weights: Groups, loaded: Sequence[Any], dtype: Any) -> Any:
    """Weights (rows, columns) of a step, rounded to the dtype of x."""
    return as_columns([value.to(dtype) for value in weights.values(loaded, once=True)])
