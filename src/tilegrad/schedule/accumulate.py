"""Accumulators of reductions: what they start with, how a vector or a tile is taken in.

An argmax has two, the largest value and its place; all others have one. Invariant: the first nan
is the largest, then the lower place wins; of nothing the place is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.dtype import int64
from ..graph import ops
from ..ir.node import Node
from ..tile import ops as tile_ops
from ..tile.build import BodyBuilder
from .evaluate import wide
from .space import COMBINE, KINDS, identity

FAR_OFF = 1 << 62  # no place: above every index


def shared_out(
    reduces: Sequence[Node], values: Sequence[Node]
) -> Iterator[tuple[Node, list[Node]]]:
    """Each reduction with its accumulators among those of all."""
    at = 0
    for v in reduces:
        width = 2 if v.op is ops.argmax else 1
        yield v, list(values[at : at + width])
        at += width


class Accumulators:
    """The accumulators of reductions in one Body; `some`: whether there is anything to reduce."""

    def __init__(self, b: BodyBuilder, some: bool) -> None:
        self.b, self.none = b, FAR_OFF if some else 0

    def starts(self, node: Node, shape: tuple[int, ...]) -> list[Node]:
        """Those of a reduction that has taken nothing."""
        b, dtype = self.b, wide(node.inputs[0].dtype)
        if node.op is ops.argmax:
            return [b.constant(dtype.lowest, dtype, shape), b.constant(self.none, int64, shape)]
        return [b.constant(identity(KINDS[node.op], dtype), dtype, shape)]

    def take(
        self, node: Node, x: Node, place: Node, mask: Node | None, old: list[Node]
    ) -> list[Node]:
        """Those of a reduction with values, which are at places, taken in where a mask holds."""
        b = self.b
        if node.op is not ops.argmax:
            new = b.apply(COMBINE[KINDS[node.op]], old[0], x)
            return [new if mask is None else b.apply("where", mask, new, old[0])]
        best, where = old
        better = b.apply("less", best, x)
        if x.dtype.is_float:
            is_new = b.apply("bit_and", b.apply("not_equal", x, x), b.apply("equal", best, best))
            better = b.apply("bit_or", better, is_new)
        better = b.apply("bit_or", better, b.apply("equal", where, b.constant(FAR_OFF, int64)))
        if mask is not None:
            better = b.apply("bit_and", better, mask)
        return [b.apply("where", better, x, best), b.apply("where", better, place, where)]

    def total(self, node: Node, x: Node) -> Node:
        """A sum or the like over the first axis."""
        return self.b.add(tile_ops.reduce(x, axis=0, kind=KINDS[node.op])) if x.shape else x

    def first_largest(self, x: Node, place: Node, mask: Node | None, axis: int) -> Node:
        """The first place of the largest value along an axis; nan is the largest."""
        b = self.b
        none = b.constant(self.none, int64)
        if not x.shape:
            return place
        kept = x if mask is None else b.apply("where", mask, x, b.constant(x.dtype.lowest, x.dtype))
        top = self._kept(b.add(tile_ops.reduce(kept, axis=axis, kind="max")), axis)
        best = b.apply("equal", x, top)
        if x.dtype.is_float:  # where the largest is nan, every nan is it
            is_nan = b.apply("bit_and", b.apply("not_equal", top, top), b.apply("not_equal", x, x))
            best = b.apply("bit_or", best, is_nan)
        best = b.apply("bit_and", best, mask) if mask is not None else best
        found = b.add(tile_ops.reduce(b.apply("where", best, place, none), axis=axis, kind="min"))
        return self._kept(found, axis)

    def _kept(self, x: Node, axis: int) -> Node:
        """A reduced tile in a shape that broadcasts with what it was."""
        return self.b.add(tile_ops.reshape(x, shape=(*x.shape, 1))) if axis == 1 else x
