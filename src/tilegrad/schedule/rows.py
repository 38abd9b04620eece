"""Lower ops that walk an axis in order: running sums and sorts.

The shape is seen as (outer, axis, inner). A program takes one outer index and either a vector
of neighbouring inner elements or, where the axis is last, one row. Invariant: the axis is
walked from its start, so results do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import int64
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, floor_divide, high, minimum, modulo
from ..ir.types import Array, Memory, product
from ..tile import ops as tile_ops
from ..tile.build import Body, BodyBuilder
from .access import Index, offset_of, unravel
from .evaluate import Evaluator, running, wide
from .family import Bodies, Family, Offer
from .fuse import Region
from .space import COMBINE, identity

BLOCK = 64  # elements that a running sum adds one by one before what came before is added


class AxisLowering:
    """What cumulative and sort share: parameters, and the index of (outer, k, inner)."""

    def __init__(
        self,
        group: Region,
        reads: Sequence[Node],
        results: Sequence[Array],
        target: Target,
        name: str,
    ) -> None:
        self.node = group.values[0]
        self.x, self.axis = self.node.inputs[0], self.node.attrs["axis"]
        self.target = target
        shape = self.x.shape
        self.outer, self.size = product(shape[: self.axis]), shape[self.axis]
        self.inner = product(shape[self.axis + 1 :])
        parameters = [(f"in{i}", Memory((product(r.shape),), r.dtype)) for i, r in enumerate(reads)]
        parameters += [
            (f"out{i}", Memory((product(t.shape),), t.dtype, "global", "result"))
            for i, t in enumerate(results)
        ]
        self.b = BodyBuilder(name, parameters)
        self.e = Evaluator(self.b, dict(zip(reads, self.b.parameters)))
        self.results = self.b.parameters[len(reads) :]

    def index(self, outer: Size, k: Size, inner: Size) -> Index:
        """The full index of an element."""
        shape = self.x.shape
        return (*unravel(outer, shape[: self.axis]), k, *unravel(inner, shape[self.axis + 1 :]))

    def offset(self, outer: Size, k: Size, inner: Size) -> Size:
        """The linear offset of an element."""
        return offset_of(self.x, self.index(outer, k, inner))


def lower_cumulative(
    group: Region, reads: Sequence[Node], values: set[Node], target: Target, name: str
) -> Body:
    """A running sum, product, maximum or minimum."""
    node = group.values[0]
    low = AxisLowering(group, reads, [node.type], target, name)  # type: ignore[list-item]
    b, e = low.b, low.e
    lanes = target.lanes(wide(node.dtype)) if high(low.inner) >= 4 else 1
    while lanes > 1 and lanes >= 2 * high(low.inner):
        lanes //= 2
    blocks = ceil_divide(low.inner, lanes)
    p = b.program(0, low.outer * blocks)
    outer, base = floor_divide(p, blocks), modulo(p, blocks) * lanes
    if lanes == 1:
        _run_along(low, outer, base, ())
    else:
        with e.vector(base, lanes, low.inner, modulo(low.inner, lanes) == 0) as lane:
            _run_along(low, outer, lane, (lanes,))
    return b.finish((low.outer * blocks,))


def _run_along(low: AxisLowering, outer: Size, lane: Size, shape: tuple[int, ...]) -> None:
    """Walk the axis: one element in float64, vectors in blocks whose totals are float64."""
    b, e, kind = low.b, low.e, low.node.attrs["kind"]
    dtype, kept = wide(low.node.dtype), running(low.node.dtype, kind)

    def block(start: Size, stop: Size, before: Node | None) -> Node:
        own = kept if before is None else dtype

        def step(k: Size, carried: list[Node]) -> Sequence[Node]:
            with e.scope():
                x = b.cast(e.value(low.x, low.index(outer, k, lane)), own)
                total = b.apply(COMBINE[kind], carried[0], b.broadcast(x, shape))
                whole = total if before is None else b.apply(COMBINE[kind], before, total)
                e.store(low.results[0], whole, low.offset(outer, k, lane))
            return [total]

        return b.loop("k", start, stop, 1, step, [b.constant(identity(kind, own), own, shape)])[0]

    def turn(at: Size, carried: list[Node]) -> Sequence[Node]:
        stop = minimum(at + BLOCK, low.size)
        total = block(at, stop, b.cast(carried[0], dtype))
        return [b.apply(COMBINE[kind], carried[0], b.cast(total, kept))]

    if not shape or kept is dtype or high(low.size) <= BLOCK:
        block(0, low.size, None)
    else:
        none = b.constant(identity(kind, kept), kept, shape)
        b.loop("block", 0, low.size, BLOCK, turn, [none])


def lower_sort(
    group: Region, reads: Sequence[Node], values: set[Node], target: Target, name: str
) -> list[tuple[Body, list[tuple[str, Any]]]]:
    """A stable sort of every line along the axis: values and indices."""
    node = group.values[0]
    x = node.inputs[0]
    roles: list[tuple[str, Any]] = [("read", i) for i in range(len(reads))]
    stored = [v for v in group.stored if v.op is ops.get]
    kinds = [v.attrs["index"] for v in stored]
    low = AxisLowering(group, reads, [v.type for v in stored], target, name)  # type: ignore[misc]
    b, e = low.b, low.e
    size = high(low.size)
    dtype = wide(x.dtype)
    keys, places = b.allocate((size,), dtype, "l1"), b.allocate((size,), int64, "l1")
    other_keys, other_places = b.allocate((size,), dtype, "l1"), b.allocate((size,), int64, "l1")
    p = b.program(0, low.outer * low.inner)
    outer, inner = floor_divide(p, low.inner), modulo(p, low.inner)

    def take(k: Size, _: list[Node]) -> Sequence[Node]:
        with e.scope():
            b.store(keys, e.value(x, low.index(outer, k, inner)), (k,))
            b.store(places, b.index(k), (k,))
        return ()

    def give(k: Size, _: list[Node]) -> Sequence[Node]:
        for memory, kind in zip(low.results, kinds):
            value = b.load(keys if kind == 0 else places, (k,))
            e.store(memory, value, low.offset(outer, k, inner))
        return ()

    b.loop("k", 0, low.size, 1, take)
    b.add(
        tile_ops.sort_rows(
            keys,
            places,
            other_keys,
            other_places,
            b.index(low.size),
            size=size,
            descending=node.attrs["descending"],
        )
    )
    b.loop("k", 0, low.size, 1, give)
    body = b.finish((low.outer * low.inner,))
    return [(body, roles + [("store", i) for i in range(len(stored))])]


class VectorScan(Family):
    """Running sums, products, maxima and minima over vectors."""

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """One Body."""
        body = lower_cumulative(region, region.inputs, region.known, target, name)
        return [(body, list(region.roles))]


class VectorSort(Family):
    """A sort of every line by one program."""

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """One Body."""
        return lower_sort(region, region.inputs, region.known, target, name)
