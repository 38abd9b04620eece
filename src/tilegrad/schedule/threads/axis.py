"""Ops that walk an axis in order, for blocks of threads: running sums.

The shape is seen as (outer, axis, inner). Where inner is long a tile is (axis, inner), else
(lines, axis); the tile is scanned and what came before it is carried along. Invariant: results
depend on shapes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, floor_divide, high, modulo
from ...ir.types import Array, Memory, product
from ...tile import ops as tile_ops
from ...tile.build import Body
from ..access import Index, offset_of, unravel
from ..evaluate import running, wide
from ..family import Bodies, Family, Offer
from ..fuse import Region
from ..space import COMBINE, identity
from .space import WARP, Roles
from .tiles import TileEvaluator, Viewed, power_of_two

ELEMENTS = 2048  # of a tile
LONG = 16  # inner sizes from which tiles lie along them


class Axis:
    """A Body under construction over (outer, axis, inner), and the index of an element."""

    def __init__(
        self, node: Node, reads: Sequence[Node], results: Sequence[Array], name: str
    ) -> None:
        self.node, self.reads = node, list(reads)
        self.x, self.axis = node.inputs[0], node.attrs["axis"]
        shape = self.x.shape
        self.outer, self.size = product(shape[: self.axis]), shape[self.axis]
        self.inner = product(shape[self.axis + 1 :])
        parameters = [(f"in{i}", Memory((product(r.shape),), r.dtype)) for i, r in enumerate(reads)]
        parameters += [
            (f"out{i}", Memory((product(t.shape),), t.dtype, "global", "result"))
            for i, t in enumerate(results)
        ]
        self.b = Viewed(name, parameters)
        self.e = TileEvaluator(self.b, dict(zip(reads, self.b.parameters)))
        self.results = self.b.parameters[len(reads) :]

    def index(self, outer: Size, k: Size, inner: Size) -> Index:
        """The full index of an element."""
        shape = self.x.shape
        return (*unravel(outer, shape[: self.axis]), k, *unravel(inner, shape[self.axis + 1 :]))

    def line_index(self, line: Size, k: Size) -> Index:
        """The index of element k of a line; lines are numbered by (outer, inner)."""
        return self.index(floor_divide(line, self.inner), k, modulo(line, self.inner))

    def offset(self, index: Index) -> Size:
        """The linear offset of an element."""
        return offset_of(self.x, index)


def lower_cumulative(group: Region, reads: Sequence[Node], name: str) -> list[tuple[Body, Roles]]:
    """A running sum, product, maximum or minimum."""
    node = group.values[0]
    walk = Axis(node, reads, [node.type], name)  # type: ignore[list-item]
    if high(walk.inner) >= LONG:
        grid, elements = _along_inner(walk)
    else:
        grid, elements = _along_axis(walk)
    warps = max(1, min(8, elements // (8 * WARP)))
    body = walk.b.finish((grid,), warps=warps)
    roles: Roles = [("read", i) for i in range(len(walk.reads))] + [("store", 0)]
    return [(body, [roles[n] for n in walk.b.numbers])]


def _along_axis(walk: Axis) -> tuple[Size, int]:
    """Tiles of (lines, axis)."""
    b, e = walk.b, walk.e
    lines = walk.outer * walk.inner
    lanes = max(2, min(ELEMENTS, power_of_two(high(walk.size))))
    rows = 1 if lanes > 256 else max(1, min(ELEMENTS // lanes, power_of_two(high(lines))))
    p = b.program(0, ceil_divide(lines, rows))
    dtype = wide(walk.node.dtype)
    kind = walk.node.attrs["kind"]
    kept = running(walk.node.dtype, kind)
    start = b.constant(identity(kind, kept), kept, (rows, 1) if rows > 1 else ())

    def step(at: Size, carried: list[Node]) -> Sequence[Node]:
        with e.tile(p * rows, rows, lines, at, lanes, walk.size) as (line, lane):
            index = walk.line_index(line, lane)
            x, run = _scan(walk, index, dtype, len(e.full) - 1)
            before = b.cast(carried[0], dtype)
            e.store(walk.results[0], b.apply(COMBINE[kind], before, run), walk.offset(index))
            total = b.add(tile_ops.reduce(x, axis=len(e.full) - 1, kind=kind))
            total = e.column(total) if total.shape else total
        return [b.apply(COMBINE[kind], carried[0], b.cast(total, kept))]

    b.loop("k", 0, walk.size, lanes, step, [start])
    return ceil_divide(lines, rows), rows * lanes


def _along_inner(walk: Axis) -> tuple[Size, int]:
    """Tiles of (axis, inner)."""
    b, e = walk.b, walk.e
    lanes = min(32, power_of_two(high(walk.inner)))
    rows = max(2, min(ELEMENTS // lanes, power_of_two(high(walk.size))))
    blocks = ceil_divide(walk.inner, lanes)
    p = b.program(0, walk.outer * blocks)
    outer, base = floor_divide(p, blocks), modulo(p, blocks) * lanes
    dtype = wide(walk.node.dtype)
    kind = walk.node.attrs["kind"]

    def step(at: Size, carried: list[Node]) -> Sequence[Node]:
        with e.tile(at, rows, walk.size, base, lanes, walk.inner) as (k, lane):
            index = walk.index(outer, k, lane)
            x, run = _scan(walk, index, dtype, 0)
            before = b.cast(carried[0], dtype)
            e.store(walk.results[0], b.apply(COMBINE[kind], before, run), walk.offset(index))
            total = b.add(tile_ops.reduce(x, axis=0, kind=kind))
        return [b.apply(COMBINE[kind], carried[0], b.cast(total, kept))]

    kept = running(walk.node.dtype, kind)
    start = b.constant(identity(kind, kept), kept, (lanes,))
    b.loop("k", 0, walk.size, rows, step, [start])
    return walk.outer * blocks, rows * lanes


def _scan(walk: Axis, index: Index, dtype: object, axis: int) -> tuple[Node, Node]:
    """A tile (what is outside changes nothing), and the same scanned along an axis."""
    b, e, kind = walk.b, walk.e, walk.node.attrs["kind"]
    x = b.broadcast(b.cast(e.value(walk.x, index), dtype), e.full)  # type: ignore[arg-type]
    inside = e.inside()
    if inside is not None:
        x = b.apply("where", inside, x, b.constant(identity(kind, x.dtype), x.dtype))
    return x, b.add(tile_ops.cumulative(x, axis=axis, kind=kind))


class ThreadScan(Family):
    """Running sums, products, maxima and minima by blocks of threads."""

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """Bodies, in the order they run."""
        return lower_cumulative(region, region.inputs, name)
