"""Kernels around products of groups of rows: sorting by group, lists of blocks, outer products.

`group_rows` is a counting sort with a program for each group: it counts the rows of the groups
before its own, then gives its own rows their places, in order. `block_list` cuts the rows of every
group into blocks, for kernels that take them. `grouped_outer` adds up the products of a group's
rows, the derivative of a grouped product by its weights.

Costs: `group_rows` reads the ids twice for each group (they stay in the nearest cache);
`grouped_outer` reads x and y once for each tile of the result beside or below. Invariant: nothing
depends on the order in which programs run; the meaning is that of `graph.interpret`.
"""

from __future__ import annotations

from typing import Any

from .. import tile
from ..core.config import invariant
from ..core.dtype import float32, float64, int32, int64
from ..ir.symbol import Size, ceil_divide, high, minimum, power_of_two
from ..tile.define import Definition
from ..tile.trace import tracer

LEAST_BLOCK, MOST_BLOCK = 8, 128  # rows
COLUMNS, GROUP, FIRST, LAST = 4, 0, 1, 2  # of a list of blocks


def whole(value: int) -> Any:
    """An int32."""
    return tile.full((), value, int32)


def numbers(count: int, start: Any = None) -> Any:
    """0, 1, ... as int32; with a start, from that on."""
    line = tile.arange(count).to(int32)
    return line if start is None else line + tile.cast(start, int32)


def scatter(to: Any, at: Any, value: Any, mask: Any) -> None:
    """Write values at offsets where a mask holds; no two of those are the same."""
    tracer().notes["distinct"] = True
    tile.store(to, at, value, mask=mask, unique=True)


@tile.function
def ids_at(ids: Any, start: Any, block: int, groups: int) -> Any:
    """The ids of some rows; beyond the last row, that of no group."""
    found = tile.cast(tile.load(ids, (start,), (block,)), int32)  # which may hold more than ids
    return tile.fill(found, groups)


@Definition
def group_rows(ids: Any, *, groups: int, block: int) -> None:
    """order (rows,), its inverse (rows,), offsets (groups + 1,) of ids (rows,), all int32."""
    (rows,) = ids.shape
    group = tile.grid(groups)
    order, inverse = (tile.result((rows,), int32, fill="none") for _ in range(2))  # all is written
    offsets = tile.result((groups + 1,), int32, fill="none")
    mine, before = tile.cast(group, int32), tile.zeros((block,), int32)
    for start in tile.range(0, rows, block):
        before = before + (ids_at(ids, start, block, groups) < mine).to(int32)
    place = tile.sum(before)
    if mine < 1:
        tile.store(offsets, (0,), place, unique=True)
    for start in tile.range(0, rows, block):
        own = ids_at(ids, start, block, groups) == mine
        each = own.to(int32)
        count = tile.sum(each)
        if count > 0:
            here = numbers(block, start)
            at = place + tile.cumsum(each) - 1
            scatter(order, at, here, own)
            scatter(inverse, here, at, own)
            place = place + count
    tile.store(offsets, (group + 1,), place, unique=True)


def block_rows(rows: Size, groups: int) -> int:
    """Rows of a block: those of most groups, if they had about equal ones."""
    if invariant():
        return LEAST_BLOCK
    wanted = max(1, 2 * high(rows) // groups)
    return min(MOST_BLOCK, max(LEAST_BLOCK, power_of_two(wanted)))


def most_blocks(rows: Size, groups: int, block: int) -> Size:
    """Blocks that rows in groups may take."""
    return minimum(rows, ceil_divide(rows, block) + groups)


def list_sizes(rows: Size, groups: int) -> dict[str, Any]:
    """The rows of a block, and how many blocks a list has room for."""
    block = block_rows(rows, groups)
    return {"block": block, "most": most_blocks(rows, groups, block)}


def lanes_of(groups: int) -> int:
    """Lanes of a tile that has all groups."""
    return max(16, power_of_two(groups))


@tile.function
def write_list(out: Any, first: Any, rows: Any, block: int) -> None:
    """A list of blocks of groups, of which each has its first row and how many."""
    room = tile.cast(out.shape[0] - 1, int32)  # offsets that do not rise would ask for more
    count = (rows + (block - 1)) // block
    ends = tile.cumsum(count)
    for turn in tile.range(0, tile.max(count)):
        number = tile.cast(turn, int32)
        at, row = ends - count + number, first + number * block
        here = (number < count) & (at < room)
        found = (numbers(first.shape[0]), row, tile.minimum(row + block, first + rows))
        for column, value in zip((GROUP, FIRST, LAST), found):
            scatter(out, (at + 1) * COLUMNS + column, value, here)
    tile.store(out, (0, 0), tile.minimum(tile.sum(count), room), unique=True)


def list_of(most: Any) -> Any:
    """Where a list goes: how many blocks there are, then of each its group, its first row and the
    row after its last. Those past the total are not read."""
    return tile.result((1 + most, COLUMNS), int32, fill="none")


@Definition
def block_list(offsets: Any, *, block: int, most: Any) -> None:
    """(1 + most, 4): the list of blocks of groups that begin at offsets."""
    groups = offsets.shape[0] - 1
    lanes = lanes_of(groups)
    tile.grid(1)
    out = list_of(most)
    first, last = (tile.fill(tile.load(offsets, (i,), (lanes,)), 0) for i in range(2))
    rows = tile.maximum(tile.where(numbers(lanes) < groups, last - first, 0), 0)
    write_list(out, first, rows, block)


def listed(blocks: Any, what: int, number: Any, most: int) -> Any:
    """A number in a row of a list; the first row has how many blocks there are."""
    value = tile.cast(tile.load(blocks, (number, what), ()), int64)
    value = tile.minimum(tile.maximum(value, 0), most)  # what is simplified relies on it
    return tile.hold(value, "listed", (0, most))


def block_at(blocks: Any, number: Any, groups: int, rows: int) -> list[Any]:
    """The group of a block by its number, its first row, and the row after its last."""
    most = {GROUP: groups - 1, FIRST: rows, LAST: rows}
    return [listed(blocks, what, number + 1, most[what]) for what in most]


@Definition
def grouped_outer(x: Any, y: Any, offsets: Any) -> None:
    """(groups, A, B) of x (rows, A) and y (rows, B)."""
    groups, down, across = offsets.shape[0] - 1, x.shape[1], y.shape[1]
    T = tile.context()
    group, i, j = tile.grid(groups, tile.ceil_divide(down, T.m), tile.ceil_divide(across, T.n))
    out = tile.result((groups, down, across), x.dtype)
    first, last = (tile.load(offsets[group + at]) for at in range(2))
    total = tile.zeros((T.m, T.n), float64 if x.dtype is float64 else float32)
    for row in tile.range(first, last, T.k):
        own = numbers(T.k, row) < last
        left = tile.load(x, (row, i * T.m), (T.k, T.m))
        right = tile.load(y, (row, j * T.n), (T.k, T.n))
        left, right = (tile.where(own[:, None], tile.fill(v, 0.0), 0.0) for v in (left, right))
        total = tile.dot(tile.transpose(left), right, total)
    tile.store(out, (group, i * T.m, j * T.n), total.to(x.dtype))
