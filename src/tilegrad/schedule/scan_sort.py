"""Lower ops that go along an axis in order: running sums and sorts.

The shape is seen as (outer, axis, inner). A program takes one outer index and either a vector
of neighbouring inner elements or, where the axis is last, one row. Invariant: the axis is
taken from its start, so results do not depend on the number of workers.
"""

from __future__ import annotations

from ..core.dtype import int64
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, floor_divide, high, minimum, modulo
from ..ir.types import product
from ..tile import ops as tile_ops
from ..tile.numeric import COMBINE, identity
from .access import Index, offset_of, unravel
from .evaluate import running
from .family import Bodies
from .region import Region
from .sheet import Sheet
from .space import fitting

BLOCK = 64  # elements that a running sum adds one by one before what came before is added


class Axis:
    """An op along an axis: its input as (outer, axis, inner), and the index of an element."""

    def __init__(self, node: Node) -> None:
        self.node, self.x, self.axis = node, node.inputs[0], node.attrs["axis"]
        shape = self.x.shape
        self.outer, self.size = product(shape[: self.axis]), shape[self.axis]
        self.inner = product(shape[self.axis + 1 :])
        self.lines = self.outer * self.inner

    def index(self, outer: Size, k: Size, inner: Size) -> Index:
        """The full index of an element."""
        shape = self.x.shape
        return (*unravel(outer, shape[: self.axis]), k, *unravel(inner, shape[self.axis + 1 :]))

    def line_index(self, line: Size, k: Size) -> Index:
        """The index of element k of a line; lines are numbered by (outer, inner)."""
        return self.index(floor_divide(line, self.inner), k, modulo(line, self.inner))


def lower_scan(region: Region) -> Bodies:
    """A running sum, product, maximum or minimum."""
    node = region.anchor
    axis = Axis(node)
    sheet = Sheet.of(region)
    lanes = region.target.lanes(node.dtype.wide) if high(axis.inner) >= 4 else 1
    lanes = fitting(lanes, axis.inner)
    grid, (outer, block) = sheet.programs(axis.outer, ceil_divide(axis.inner, lanes))
    base = block * lanes
    if lanes == 1:
        _run_along(sheet, axis, outer, base, ())
    else:
        whole = axis.inner % lanes == 0
        with sheet.e.vector(base, lanes, axis.inner, whole) as lane:
            _run_along(sheet, axis, outer, lane, (lanes,))
    return [sheet.end(grid)]


def _run_along(sheet: Sheet, low: Axis, outer: Size, lane: Size, shape: tuple[int, ...]) -> None:
    """Along the axis: one element in float64, vectors in blocks whose totals are float64."""
    b, e, kind = sheet.b, sheet.e, low.node.attrs["kind"]
    dtype, kept = low.node.dtype.wide, running(low.node.dtype, kind)

    def block(start: Size, stop: Size, before: Node | None) -> Node:
        own = kept if before is None else dtype
        total = [b.constant(identity(kind, own), own, shape)]
        for k in b.each("k", start, stop, 1, total):
            with e.scope():
                at = low.index(outer, k, lane)
                x = b.cast(e.value(low.x, at), own)
                total[0] = b.apply(COMBINE[kind], total[0], b.broadcast(x, shape))
                whole = total[0] if before is None else b.apply(COMBINE[kind], before, total[0])
                e.store(sheet.outputs[low.node], whole, offset_of(low.x, at))
        return total[0]

    if not shape or kept is dtype or high(low.size) <= BLOCK:
        block(0, low.size, None)
        return
    all_ = [b.constant(identity(kind, kept), kept, shape)]
    for at in b.each("block", 0, low.size, BLOCK, all_):
        total = block(at, minimum(at + BLOCK, low.size), b.cast(all_[0], dtype))
        all_[0] = b.apply(COMBINE[kind], all_[0], b.cast(total, kept))


def lower_sort(region: Region) -> Bodies:
    """A stable sort of every line along the axis: values and indices."""
    node = region.anchor
    low = Axis(node)
    sheet = Sheet.of(region)
    b, e, x = sheet.b, sheet.e, low.x
    size = high(low.size)
    dtypes = (x.dtype.wide, int64)  # of keys, of numbers; each twice
    arrays = [b.allocate((size,), dtype, "l1") for dtype in dtypes * 2]
    grid, (outer, inner) = sheet.programs(low.outer, low.inner)
    for k in b.each("k", 0, low.size):
        with e.scope():
            b.store(arrays[0], e.value(x, low.index(outer, k, inner)), (k,))
            b.store(arrays[1], b.index(k), (k,))
    b.do(tile_ops.sort_rows, *arrays, low.size, size=size, descending=node.attrs["descending"])
    for k in b.each("k", 0, low.size):
        for v, memory in sheet.outputs.items():
            value = b.load(arrays[v.attrs["index"]], (k,))
            e.store(memory, value, offset_of(x, low.index(outer, k, inner)))
    return [sheet.end(grid)]
