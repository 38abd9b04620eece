"""Large values by pieces: how `legalize` holds what does not fit into registers.

A `Source` gives any piece of a row of a value on demand; `keep` stores one in a place, row-major.
Invariant: a Source reads nothing but places and values that stand still while it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtype import DType, float32, int64
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size
from ..ir.types import Tile
from . import ops
from .placed import PlacedBuilder

Indices = tuple[Size, ...]
Piece = Callable[[Indices, int], Node]


@dataclass
class Source:
    """A value that can be had piece by piece: `lanes` elements along the last axis."""

    shape: tuple[int, ...]
    dtype: DType
    piece: Piece
    place: Node | None = None  # where it is stored, row-major
    turned: Source | None = None  # what it is the transpose of
    carried: bool = False  # the place changes at the end of a loop's trip
    depth: int = 0  # values on values that a piece of it is computed of


def large(type_: Any, limit: int) -> bool:
    """Whether a type is a tile of more elements than that."""
    return isinstance(type_, Tile) and math.prod(type_.shape) > limit


def same_axes(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes differ only in axes of size 1."""
    return [s for s in a if s != 1] == [s for s in b if s != 1]


class Pieces:
    """A Body under construction, and the large values it holds by pieces."""

    def __init__(self, b: PlacedBuilder, target: Target, limit: int) -> None:
        self.b, self.target, self.limit = b, target, limit
        self.values: dict[Node, Node] = {}
        self.sources: dict[Node, Source] = {}
        self.spilled: list[dict[Node, Source]] = [{}]
        self.uses: dict[Node, int] = {}
        scopes = [s for s in ("l1", "shared", "scratch") if s in target.memories]
        self.scope = scopes[0] if scopes else "global"

    def large(self, node: Node) -> bool:
        """Whether a value is held by pieces."""
        return large(node.type, self.limit) and node.op.group != "matrix"

    def source(self, node: Node) -> Source:
        """A value by pieces; a small one is stored first, unless it is as cheap to make again."""
        if node in self.sources:
            return self.sources[node]
        if node.op is ops.constant:
            return self.constant(node.attrs["value"], node.type)
        if node.op is ops.iota:
            return self.iota(node)
        if node.op is ops.broadcast:
            return self.repeated(node)
        if node.op is ops.reshape and same_axes(node.inputs[0].shape, node.shape):
            return self.viewed(self.source(node.inputs[0]), node.shape)
        for known in reversed(self.spilled):
            if node in known:
                return known[node]
        value = self.values[node]
        if not node.shape:
            return Source((), node.dtype, lambda _, lanes: self.b.broadcast(value, (lanes,)))
        found = self.stored(self.b.allocate(node.shape, node.dtype, self.scope), node.shape)
        assert found.place is not None
        zeros = (0,) * len(node.shape)
        self.b.store(found.place, value, zeros, tuple(range(len(node.shape))))
        self.spilled[-1][node] = found
        return found

    def stored(self, place: Node, shape: tuple[int, ...]) -> Source:
        """What a place holds."""

        def piece(index: Indices, lanes: int) -> Node:
            return self.b.load(place, index, (lanes,), (len(shape) - 1,))

        return Source(shape, place.dtype, piece, place)

    def constant(self, value: Any, type_: Any) -> Source:
        """One value everywhere."""
        dtype = type_.dtype
        return Source(type_.shape, dtype, lambda _, n: self.b.constant(value, dtype, (n,)))

    def iota(self, node: Node) -> Source:
        """0, 1, 2, ..."""

        def piece(index: Indices, lanes: int) -> Node:
            line = self.b.add(ops.iota(size=lanes, dtype=int64))
            return self.b.cast(self.b.apply("add", self.b.index(index[0]), line), node.dtype)

        return Source(node.shape, node.dtype, piece)

    def repeated(self, node: Node) -> Source:
        """A broadcast."""
        inner, shape = self.source(node.inputs[0]), node.shape
        pad = len(shape) - len(inner.shape)
        single = not inner.shape or inner.shape[-1] == 1

        def piece(index: Indices, lanes: int) -> Node:
            own = tuple(0 if s == 1 else i for i, s in zip(index[pad:], inner.shape))
            if not single:
                return inner.piece(own, lanes)
            return self.b.broadcast(inner.piece(own, 1), (lanes,))

        return Source(shape, node.dtype, piece)

    def viewed(self, inner: Source, shape: tuple[int, ...]) -> Source:
        """Axes of size 1 added or dropped."""

        def piece(index: Indices, lanes: int) -> Node:
            live = iter([i for i, s in zip(index, shape) if s != 1])
            own = tuple(next(live) if s != 1 else 0 for s in inner.shape)
            if lanes > 1 or not inner.shape or inner.shape[-1] == shape[-1]:
                return inner.piece(own, lanes)
            return inner.piece(own, 1)

        if shape and inner.shape and shape[-1] == 1 != inner.shape[-1]:
            return Source(shape, inner.dtype, piece, depth=inner.depth + 1)  # pieces of one element
        if shape and shape[-1] != 1 and inner.shape[-1] == 1:
            return self.keep(Source(inner.shape, inner.dtype, inner.piece), shape)
        return Source(shape, inner.dtype, piece, depth=inner.depth + 1)

    def width(self, shape: tuple[int, ...], dtype: DType = float32) -> int:
        """Elements of a piece: a power of two that divides the last axis."""
        last = shape[-1] if shape else 1
        return min(last & -last, 4 * self.target.lanes(dtype))

    def each(self, shape: tuple[int, ...], act: Callable[[Indices, int], None]) -> None:
        """Run act for every piece, in row-major order."""
        lanes = self.width(shape)

        def walk(index: Indices) -> None:
            axis = len(index)
            if axis == len(shape):
                act(index, lanes)
                return
            step = lanes if axis == len(shape) - 1 else 1

            def one(i: Size, _: list[Node]) -> Sequence[Node]:
                walk((*index, i))
                return []

            bounds = (0, shape[axis] - step)
            self.b.loop(f"axis{axis}", 0, shape[axis], step, one, bounds=bounds)

        walk(())

    def keep(
        self,
        source: Source,
        shape: tuple[int, ...] | None = None,
        dtype: DType | None = None,
        place: Node | None = None,
    ) -> Source:
        """The value stored, row-major, maybe under another shape of as many elements."""
        dtype = dtype or source.dtype
        if place is None:
            place = self.b.allocate(source.shape, dtype, self.scope)
        if source.turned is not None:
            self.turn(source.turned, place)
        else:
            self.each(
                source.shape,
                lambda index, lanes: self.b.store(
                    place,
                    self.b.cast(source.piece(index, lanes), dtype),
                    index,
                    (len(source.shape) - 1,),
                ),
            )
        found = self.stored(place, source.shape)
        return found if shape is None or shape == source.shape else self.reshaped(found, shape)

    def reshaped(self, source: Source, shape: tuple[int, ...]) -> Source:
        """A stored value under another shape: pieces by linear offset."""
        place = source.place
        assert place is not None

        def piece(index: Indices, lanes: int) -> Node:
            total: Size = 0
            for i, s in zip(index, shape):
                total = total * s + i
            line = self.b.add(ops.iota(size=lanes, dtype=int64))
            return self.b.gather(place, self.b.apply("add", self.b.index(total), line))

        return Source(shape, source.dtype, piece)

    def turn(self, inner: Source, place: Node) -> None:
        """Store the transpose of a stored matrix, by squares."""
        if inner.place is None:
            inner = self.keep(inner, dtype=inner.dtype)
        rows, columns = inner.shape
        side = min(rows & -rows, columns & -columns, self.target.lanes(float32))

        def square(i: Size, j: Size) -> None:
            assert inner.place is not None
            tile = self.b.load(inner.place, (i, j), (side, side), (0, 1))
            tile = self.b.cast(tile, place.dtype)
            self.b.store(place, self.b.add(ops.transpose(tile, order=(1, 0))), (j, i), (0, 1))

        def line(i: Size, _: list[Node]) -> Sequence[Node]:
            self.b.loop(
                "column",
                0,
                columns,
                side,
                lambda j, _: square(i, j),
                bounds=(0, columns - side),
            )
            return []

        self.b.loop("row", 0, rows, side, line, bounds=(0, rows - side))

    def set(self, node: Node, source: Source) -> None:
        """Name a large result; one that is used more than once is stored."""
        cheap = source.place is not None or node.op in (ops.broadcast, ops.constant, ops.iota)
        if self.uses.get(node, 0) > 1 and not cheap:
            source = self.keep(source)
        self.sources[node] = source

    def give(self, node: Node, source: Source) -> None:
        """Name a result that may be small: then it is loaded from its place."""
        if self.large(node):
            self.sources[node] = source
            return
        assert source.place is not None
        zeros, axes = (0,) * len(node.shape), tuple(range(len(node.shape)))
        self.values[node] = self.b.load(source.place, zeros, node.shape, axes)
