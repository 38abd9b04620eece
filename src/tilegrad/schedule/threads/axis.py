"""Ops that go along an axis in order, for blocks of threads: running sums.

The shape is seen as (outer, axis, inner). Where inner is long a tile is (axis, inner), else
(lines, axis); the tile is scanned and what came before it is carried along. Invariant: results
depend on shapes and the Target alone.
"""

from __future__ import annotations

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high
from ...tile import ops as tile_ops
from .. import sheet as parameters
from ..access import Index
from ..evaluate import running, wide
from ..family import Bodies
from ..problem import power_of_two
from ..region import Region
from ..scan_sort import Axis
from ..space import COMBINE, identity
from .space_threads import WARP
from .tiles import ThreadSheet

ELEMENTS = 2048  # of a tile
LONG = 16  # inner sizes from which tiles lie along them


def lower_scan(region: Region, target: Target, name: str) -> Bodies:
    """A running sum, product, maximum or minimum."""
    node = region.anchor
    axis = Axis(node)
    sheet = ThreadSheet(name, [*parameters.reads(region.inputs), *parameters.results([node])])
    along = _along_inner if high(axis.inner) >= LONG else _along_axis
    grid, elements = along(sheet, axis)
    return [sheet.end((grid,), warps=max(1, min(8, elements // (8 * WARP))))]


def _along_axis(sheet: ThreadSheet, axis: Axis) -> tuple[Size, int]:
    """Tiles of (lines, axis)."""
    b, e = sheet.b, sheet.e
    lines = axis.lines
    lanes = max(2, min(ELEMENTS, power_of_two(high(axis.size))))
    rows = 1 if lanes > 256 else max(1, min(ELEMENTS // lanes, power_of_two(high(lines))))
    p = b.program(0, ceil_divide(lines, rows))
    kind = axis.node.attrs["kind"]
    kept = running(axis.node.dtype, kind)
    before = [b.constant(identity(kind, kept), kept, (rows, 1) if rows > 1 else ())]
    for at in b.each("k", 0, axis.size, lanes, before):
        with e.tile(p * rows, rows, lines, at, lanes, axis.size) as (line, lane):
            index = axis.line_index(line, lane)
            total = _scan(sheet, axis, index, before[0], len(e.full) - 1)
            total = e.column(total) if total.shape else total
        before[0] = b.apply(COMBINE[kind], before[0], b.cast(total, kept))
    return ceil_divide(lines, rows), rows * lanes


def _along_inner(sheet: ThreadSheet, axis: Axis) -> tuple[Size, int]:
    """Tiles of (axis, inner)."""
    b, e = sheet.b, sheet.e
    lanes = min(32, power_of_two(high(axis.inner)))
    rows = max(2, min(ELEMENTS // lanes, power_of_two(high(axis.size))))
    grid, (outer, block) = sheet.programs(axis.outer, ceil_divide(axis.inner, lanes))
    base = block * lanes
    kind = axis.node.attrs["kind"]
    kept = running(axis.node.dtype, kind)
    before = [b.constant(identity(kind, kept), kept, (lanes,))]
    for at in b.each("k", 0, axis.size, rows, before):
        with e.tile(at, rows, axis.size, base, lanes, axis.inner) as (k, lane):
            total = _scan(sheet, axis, axis.index(outer, k, lane), before[0], 0)
        before[0] = b.apply(COMBINE[kind], before[0], b.cast(total, kept))
    return grid, rows * lanes


def _scan(sheet: ThreadSheet, axis: Axis, index: Index, carried: Node, along: int) -> Node:
    """Scan a tile along an axis and store it with what came before; gives what it adds up to."""
    b, e, kind, dtype = sheet.b, sheet.e, axis.node.attrs["kind"], wide(axis.node.dtype)
    x = b.broadcast(b.cast(e.value(axis.x, index), dtype), e.full)
    x = b.where(e.inside(), x, identity(kind, x.dtype))  # what is outside changes nothing
    run = b.add(tile_ops.cumulative(x, axis=along, kind=kind))
    before = b.cast(carried, dtype)
    e.store(sheet.outputs[axis.node], b.apply(COMBINE[kind], before, run), axis.offset(index))
    return b.add(tile_ops.reduce(x, axis=along, kind=kind))
