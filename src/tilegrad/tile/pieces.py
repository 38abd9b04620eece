"""Large values by pieces: how `legalize` holds what does not fit into registers.

A `Source` gives any piece of a row of a value on demand; `keep` stores one in a place, row-major.
Invariant: a Source reads nothing but places and values that stand still while it is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtype import DType, float32
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size
from ..ir.types import Shape, Tile, row_major
from . import ops
from .build import BodyBuilder
from .row import Touch
from .value import FAR

CHEAP = (ops.broadcast, ops.constant, ops.iota)
Indices = tuple[Size, ...]
Piece = Callable[[Indices, int], Node]


@dataclass
class Source:
    """A value that can be had piece by piece: `lanes` elements along the last axis."""

    shape: Shape
    dtype: DType
    piece: Piece
    place: Node | None = None  # where it is stored, row-major
    turned: Source | None = None  # what it is the transpose of
    carried: bool = False  # the place changes at the end of a loop's trip
    depth: int = 0  # values on values that a piece of it is computed of


def large(type_: Any, limit: int) -> bool:
    """Whether a type is a tile of more elements than that."""
    return isinstance(type_, Tile) and math.prod(type_.shape) > limit


def same_axes(a: Shape, b: Shape) -> bool:
    """Whether two shapes differ only in axes of size 1."""
    return [s for s in a if s != 1] == [s for s in b if s != 1]


class Pieces:
    """A Body under construction, and the large values it holds by pieces."""

    def __init__(self, b: BodyBuilder, target: Target, limit: int) -> None:
        self.b, self.target, self.limit = b, target, limit
        self.values: dict[Node, Node] = {}
        self.sources: dict[Node, Source] = {}
        self.spilled: list[dict[Node, Source]] = [{}]
        self.uses = Counter[Node]()
        self.bases: dict[Node, Size] = {}
        scopes = [s for s in ("l1", "shared", "scratch") if s in target.memories]
        self.scope = scopes[0] if scopes else "global"

    def large(self, node: Node) -> bool:
        """Whether a value is held by pieces."""
        return large(node.type, self.limit) and node.op.category != "matrix"

    def source(self, node: Node) -> Source:
        """A value by pieces; a small one is stored first, unless it is as cheap to make again."""
        if node in self.sources:
            return self.sources[node]
        if node.op in CHEAP:
            return self.cheap(node)
        if node.op is ops.reshape and same_axes(node.inputs[0].shape, node.shape):
            return self.viewed(self.source(node.inputs[0]), node.shape)
        for known in reversed(self.spilled):
            if node in known:
                return known[node]
        value = self.values[node]
        if not node.shape:
            return Source((), node.dtype, lambda _, lanes: self.b.broadcast(value, (lanes,)))
        place = self.room(node.shape, node.dtype)
        found = self.stored(place)
        self.b.store(place, value, (0,) * len(node.shape))
        self.spilled[-1][node] = found
        return found

    def room(self, shape: Shape, dtype: DType) -> Node:
        """A place for a value."""
        return self.b.allocate(shape, dtype, self.scope)

    def stored(self, place: Node) -> Source:
        """What a place holds."""

        def piece(index: Indices, lanes: int) -> Node:
            return self.b.load(place, index, (lanes,))

        return Source(place.shape, place.dtype, piece, place)

    def cheap(self, node: Node) -> Source:
        """A constant, an iota or a broadcast, made anew."""
        if node.op is ops.broadcast:
            return self.repeated(node)
        b, dtype = self.b, node.dtype
        if node.op is ops.iota:
            return Source(node.shape, dtype, lambda at, n: b.cast(b.line(at[0], n), dtype))
        value = node.attrs["value"]
        return Source(node.shape, dtype, lambda _, n: b.constant(value, dtype, (n,)))

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

    def viewed(self, inner: Source, shape: Shape) -> Source:
        """Axes of size 1 added or dropped."""

        def piece(index: Indices, lanes: int) -> Node:
            live = iter([i for i, s in zip(index, shape) if s != 1])
            own = tuple(next(live) if s != 1 else 0 for s in inner.shape)
            return inner.piece(own, lanes)

        if shape and shape[-1] != 1 and inner.shape[-1] == 1:
            return self.keep(Source(inner.shape, inner.dtype, inner.piece), shape)
        return Source(shape, inner.dtype, piece, depth=inner.depth + 1)

    def width(self, shape: Shape) -> int:
        """Elements of a piece: a power of two that divides the last axis."""
        last = shape[-1] if shape else 1
        return min(last & -last, 4 * self.target.lanes(float32))

    def each(self, shape: Shape) -> Iterator[tuple[Indices, int]]:
        """Loops over all pieces in row-major order, as `for` writes them: where a piece begins, and
        its elements."""
        lanes = self.width(shape)

        def loops(*index: Size) -> Iterator[tuple[Indices, int]]:
            axis = len(index)
            if axis == len(shape):
                yield index, lanes
                return
            step = lanes if axis == len(shape) - 1 else 1
            for i in self.b.each(f"axis{axis}", 0, shape[axis], step):
                yield from loops(*index, i)

        return loops()

    def blocks(self, shape: Shape, steps: tuple[int, int]) -> Iterator[tuple[Size, Size]]:
        """Loops over the blocks of a matrix."""
        for i in self.b.each("row", 0, shape[0], steps[0]):
            for j in self.b.each("column", 0, shape[1], steps[1]):
                yield i, j

    def keep(
        self,
        source: Source,
        shape: Shape | None = None,
        dtype: DType | None = None,
        place: Node | None = None,
    ) -> Source:
        """The value stored, row-major, maybe under another shape of as many elements."""
        dtype = dtype or source.dtype
        if place is None:
            place = self.room(source.shape, dtype)
        if source.turned is not None:
            self.transpose(source.turned, place)
        else:
            for index, lanes in self.each(source.shape):
                piece = self.b.cast(source.piece(index, lanes), dtype)
                self.b.store(place, piece, index)
        if shape is None or shape == source.shape:
            return self.stored(place)
        return self.gathered(place, shape, row_major(shape))

    def gathered(self, place: Node, shape: Shape, strides: Sequence[Size]) -> Source:
        """A stored value under another shape or order of axes: pieces by linear offset."""

        def piece(index: Indices, lanes: int) -> Node:
            start: Size = 0
            for i, stride in zip(index, strides):
                start = start + i * stride
            return self.b.gather(place, self.b.line(start, lanes, int(strides[-1])))

        return Source(shape, place.dtype, piece)

    def transpose(self, inner: Source, place: Node) -> None:
        """Store the transpose of a stored matrix, by squares."""
        own = self.kept(inner)
        rows, columns = inner.shape
        side = min(rows & -rows, columns & -columns, self.target.lanes(float32))
        for i, j in self.blocks(inner.shape, (side, side)):
            tile = self.b.cast(self.b.load(own, (i, j), (side, side)), place.dtype)
            self.b.store(place, self.b.add(ops.transpose(tile, order=(1, 0))), (j, i))

    def kept(self, source: Source, dtype: DType | None = None) -> Node:
        """The place of a value, in a dtype."""
        if source.place is None or source.dtype is not (dtype or source.dtype):
            source = self.keep(source, dtype=dtype)
        assert source.place is not None
        return source.place

    # ---- a tile of the old Body -----------------------------------------------------------

    def base(self, node: Node) -> Size:
        """A scalar of the old Body as part of an index."""
        new = self.values[node]
        if new.op is ops.constant:
            return int(new.attrs["value"])
        if new not in self.bases:
            self.bases[new] = self.b.atom("base", new, -FAR, FAR)
        return self.bases[new]

    def at(self, touch: Touch, index: Indices) -> list[Size]:
        """Where in a Memory a piece of a tile begins."""
        found = [self.base(i) for i in touch.nodes]
        for axis, i in zip(touch.axes, index):
            found[axis] = found[axis] + i
        return found

    def mask(self, node: Node | None) -> Piece:
        """A mask by pieces."""
        if node is None:
            return lambda index, lanes: None  # type: ignore[return-value]
        return self.source(node).piece

    def give(self, node: Node, source: Source) -> None:
        """Name a result: a small one is loaded from its place, one that is used more than once is
        stored."""
        if not self.large(node):
            zeros = (0,) * len(node.shape)
            self.values[node] = self.b.load(self.kept(source), zeros, node.shape)
            return
        cheap = source.place is not None or node.op in (*CHEAP, ops.extract)
        self.sources[node] = source if cheap or self.uses[node] < 2 else self.keep(source)
