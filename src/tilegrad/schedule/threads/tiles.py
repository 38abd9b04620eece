"""Evaluate Graph values over tiles as wide as a program: rows x lanes elements at once.

On a Target whose program is a block of threads a tile is spread over all of them, so the unit of
work is not a vector but a tile of one or two axes. Two index atoms stand for a tile's axes, `row`
and `lane`; what mentions neither is a scalar, what mentions the row alone has the shape (rows, 1),
the lane alone (lanes,), both (rows, lanes). An axis of one element is a scalar index. A read whose
offset is affine in the atoms is one `load` through a *view*: another parameter for the same
storage whose strides are the factors of the atoms. A read that runs along the rows is loaded that
way and turned in shared memory.

Invariant: a masked lane or row is never read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...core.dtype import bool_, int32, int64
from ...core.errors import InternalError
from ...graph import ops
from ...ir.node import Node, walk
from ...ir.symbol import (
    Expr,
    Size,
    atoms,
    coefficient,
    high,
    low,
    minimum,
    substitute,
)
from ...ir.types import Shape
from ...tile import ops as tile_ops
from ..access import ELEMENTWISE, Condition, Index, Place, symbolic, unravel
from ..evaluate import ROWS
from ..sheet import Sheet
from .exponent import ExponentEvaluator
from .views import Viewed, seen_along

TURN_BYTES = 36 << 10  # most bytes of shared memory that one turned read takes
FRAME = ("row", "row_base", "rows", "row_mask", "lane", "base", "lanes", "lane_mask")  # of a tile
LITTLE = 1 << 30  # places up to here are compared in 32 bits


class TileEvaluator(ExponentEvaluator):
    """Evaluates Graph values over a tile of rows x lanes."""

    body: Viewed

    def __init__(self, body: Viewed, memories: dict[Node, Node]) -> None:
        super().__init__(body, memories)
        self.row: Expr | None = None
        self.row_base: Size = 0
        self.rows = 1
        self.row_mask: Node | None = None  # (rows,)
        self.lane_mask: Node | None = None  # (lanes,)
        self.turns = True  # whether values may go through shared memory: roles may not
        self.handlers = {**ROWS, ops.sum_: _short_sum}
        self.outside = False  # no lane of the tile is at a place that is compared
        self.values: set[Node] | None = None  # values that some kernel stores, where known

    # ---- context --------------------------------------------------------------------------

    @contextmanager
    def tile(
        self,
        row: Size,
        rows: int,
        row_size: Size,
        base: Size,
        lanes: int,
        size: Size,
        whole: bool = False,
    ) -> Iterator[tuple[Size, Size]]:
        """rows x lanes elements from (row, base) on, of row_size x size; yields (row, lane).

        `whole` says that all of them are inside.
        """
        before = {name: getattr(self, name) for name in FRAME}
        at_row, self.row, self.row_mask = self._axis("row", row, rows, row_size, whole)
        at_lane, self.lane, self.lane_mask = self._axis("lane", base, lanes, size, whole)
        self.row_base, self.rows, self.base, self.lanes = row, rows, base, lanes
        if self.row is not None:
            node = self.body.atoms[self.row]
            self.body.atoms[self.row] = self.column(node)
        try:
            with self.scope():
                yield at_row, at_lane
        finally:
            vars(self).update(before)

    @contextmanager
    def vector(self, base: Size, lanes: int, size: Size, whole: bool = False) -> Iterator[Size]:
        """The lanes of one row alone; yields the lane."""
        with self.tile(0, 1, 1, base, lanes, size, whole) as (_, lane):
            yield lane

    def _axis(self, name: str, base: Size, count: int, size: Size, whole: bool) -> Any:
        """The index, atom and mask of a tile axis."""
        if count == 1:
            return base, None, None
        b, (atom, _) = self.body, self.axis_atom(name, base, count, size)
        if whole or _fits(base, count, size):
            return atom, atom, None
        left = b.cast(b.index(minimum(size - base, count)), int32)
        numbers = b.iota(count, int32)
        return atom, atom, b.apply("less", numbers, b.broadcast(left, (count,)))

    @property
    def full(self) -> Shape:
        """The shape of a whole tile."""
        if self.row is None:
            return () if self.lane is None else (self.lanes,)
        return (self.rows, self.lanes)

    def column(self, x: Node) -> Node:
        """(rows,) as (rows, 1)."""
        return self.body.reshape(x, (*x.shape, 1))

    def line(self, x: Node) -> Node:
        """(rows, 1) as (rows,)."""
        return self.body.reshape(x, x.shape[:1])

    def inside(self) -> Node | None:
        """The mask of the whole tile, where one is needed."""
        return self._range(self.full)

    def _value(self, node: Node, index: Index) -> Node:
        """A product that is stored nowhere and added to something is rounded once with the sum."""
        if (
            node.op is ops.add
            and node.dtype.is_float
            and node not in self.memories
            and self.values is not None
        ):
            for x, other in (node.inputs, node.inputs[::-1]):
                if x.op is ops.multiply and x not in self.values:
                    parts = [self.value(i, index) for i in (*x.inputs, other)]
                    return self.body.apply("multiply_add", *parts)
        if node.op is ops.equal and self.row is None and self.lane is not None:
            for x, other in (node.inputs, node.inputs[::-1]):
                number = lane_number(self, x, other, index)
                if number is not None and self.outside:
                    return self.body.constant(False, bool_)
                if number is not None:
                    return self.body.apply("equal", self.body.iota(self.lanes, int32), number)
        if node.op is ops.where and self.outside:
            chosen = self.value(node.inputs[0], index)
            if chosen.op is tile_ops.constant and not chosen.attrs["value"]:
                return self.value(node.inputs[2], index)
        return super()._value(node, index)

    # ---- loads and stores -----------------------------------------------------------------

    def _affine(self, offset: Size, varying: list[Expr]) -> tuple[Size, Size, Size] | None:
        """(factor of the row, factor of the lane, the rest), where the offset is that."""
        factors: list[Size] = []
        for atom in (self.row, self.lane):
            if atom is None or atom not in varying:
                factors.append(0)
                continue
            factor = coefficient(offset, atom)
            if factor is None or not _is_stride(factor):
                return None
            factors.append(factor)
        if any(v is not self.row and v is not self.lane for v in varying):
            return None
        zero = {v: 0 for v in varying}
        return factors[0], factors[1], substitute(offset, zero)

    def _load(self, memory: Node, offset: Size) -> Node:
        b, guard = self.body, self.mask
        varying = self._varying(offset)
        if guard is not None and Condition(offset, memory.shape[0]).holds():
            guard = None
        if not varying and (guard is None or not guard.shape):
            return b.load(memory, (offset,), mask=guard)
        found = self._affine(offset, varying) if varying else None
        if found is None or not _reaches(self, guard, found):
            return self._gathered(memory, offset, guard)
        by_row, by_lane, start = found
        bytes_ = self.lanes * (self.rows + 8) * memory.dtype.size
        turns = self.turns and min(self.rows, self.lanes) >= 4 and bytes_ <= TURN_BYTES
        turns = turns and by_row == 1 and by_lane not in (0, 1) and guard is None
        seen = self._seen(memory, by_row, by_lane, start, turns)
        if seen is None:
            return self._gathered(memory, offset, guard)
        place, index = seen
        if turns:
            return self._turned(place, index)
        x = b.load(place, index, *self._span(by_row, by_lane, guard))
        return self.column(x) if by_lane == 0 else x

    def _span(
        self, by_row: Size, by_lane: Size, guard: Node | None
    ) -> tuple[Shape, Shape, Node | None]:
        """What an affine access spans: the shape, the axes it runs along, and the mask."""
        b = self.body
        if by_row == 0:
            return (self.lanes,), (0,), b.logical_and(self.lane_mask, guard)
        if by_lane == 0:
            guard = self.line(guard) if guard is not None and guard.shape else guard
            return (self.rows,), (0,), b.logical_and(self.row_mask, guard)
        return self.full, (0, 1), b.logical_and(self.inside(), guard)

    def _seen(
        self, memory: Node, by_row: Size, by_lane: Size, start: Size, turned: bool = False
    ) -> Any:
        """The view and index of an affine access, turned or not, or None where it has no plain
        one."""
        axes = [(by_row, self.row_base), (by_lane, self.base)]
        along = [(s, base) for s, base in (axes[::-1] if turned else axes) if s != 0]
        return seen_along(self.body, memory, along, start)

    def _gathered(self, memory: Node, offset: Size, guard: Node | None) -> Node:
        """Elements at offsets, as wide as the offsets and the guard."""
        b = self.body
        at = b.index(offset)
        if guard is not None and guard.shape:
            at, guard = b._broadcast_all([at, guard])
        return b.gather(memory, at, b.logical_and(self._range(at.shape), guard))

    def active(self, shape: Shape) -> Node | None:
        """The rows and lanes that a tile of this shape spans, where what is guarded is read."""
        return self.body.logical_and(self._range(shape), self.mask)

    def _range(self, shape: Shape) -> Node | None:
        """The mask of the rows and lanes that a tile of this shape spans."""
        b = self.body
        mask: Node | None = None
        if self.row_mask is not None and len(shape) == 2 and shape[0] == self.rows:
            mask = self.column(self.row_mask)
        if self.lane is not None and shape and shape[-1] == self.lanes:
            mask = b.logical_and(mask, self.lane_mask)
        return None if mask is None else b.broadcast(mask, shape)

    def _turned(self, memory: Node, index: Index) -> Node:
        """A read that runs along the rows: loaded so, and turned in shared memory."""
        b = self.body
        shape = (self.lanes, self.rows)
        mask = b.logical_and(
            None if self.lane_mask is None else self.column(self.lane_mask), self.row_mask
        )
        source = b.load(memory, index, shape, mask=mask)
        pad = max(1, 4 // memory.dtype.size)  # a word more than a power of two: other banks
        place = b.allocate((self.lanes, self.rows + pad), memory.dtype, "shared")
        b.store(place, source, (0, 0))
        return b.load(place, (0, 0), self.full, (1, 0))

    def store(self, memory: Node, value: Node, offset: Size, only: Node | None = None) -> None:
        """Write a value (rounded to the Memory's dtype) at a linear offset, where `only` holds."""
        b = self.body
        value = b.cast(value, memory.dtype)
        varying = self._varying(offset)
        if not varying and only is not None and only.shape:
            self._scattered(memory, value, offset, only)  # one of the lanes writes
            return
        if not varying:
            while value.shape:  # of one element of each axis: others are nothing
                value = b.extract(value)
            b.store(memory, value, (offset,))
            return
        found = self._affine(offset, varying)
        seen = self._seen(memory, *found) if found and _reaches(self, only, found) else None
        if found is None or seen is None:
            self._scattered(memory, value, offset, only)
            return
        by_row, by_lane, _ = found
        shape, axes, mask = self._span(by_row, by_lane, only)
        if by_row == 0 and len(value.shape) == 2:  # of one element of an axis: others are nothing
            value = b.extract(value)
        elif by_row != 0 and by_lane == 0:
            if value.shape == self.full:
                value = b.part(value, (0, 0), (self.rows, 1))
            value = self.line(b.broadcast(value, (self.rows, 1)))
        b.store(seen[0], b.broadcast(value, shape), seen[1], axes, mask)

    def _scattered(self, memory: Node, value: Node, offset: Size, only: Node | None) -> None:
        """Elements written at offsets, as wide as value, offsets and `only`."""
        b = self.body
        parts = b._broadcast_all([b.index(offset), value, *([] if only is None else [only])])
        mask = b.logical_and(self._range(parts[0].shape), parts[2] if parts[2:] else None)
        b.scatter(memory, parts[1], parts[0], mask)


def ask(e: TileEvaluator, reads: Sequence[Place]) -> list[Node]:
    """Stored values as they are stored: what they are needed for comes later."""
    return [e.body.cast(e.value(node, index), node.dtype) for node, index in reads]


def have(e: TileEvaluator, reads: Sequence[Place], values: Sequence[Node]) -> None:
    """Reads that were asked for before."""
    for (node, index), x in zip(reads, values):
        e.bind(node, index, e.body.cast(x, node.dtype.wide))


def _short_sum(e: TileEvaluator, node: Node, index: Index) -> Node:
    """A short sum that no launch of its own finds: of the last axis, term by term."""
    x, last = node.inputs[0], len(node.inputs[0].shape) - 1
    if node.attrs["axes"] != (last,) or not isinstance(x.shape[last], int):
        raise InternalError("schedule.threads", f"{node!r} is no short sum")
    total = e.value(x, (*index, 0))
    for at in range(1, x.shape[last]):
        total = e.body.apply("add", total, e.value(x, (*index, at)))
    return total


def lane_numbers(e: TileEvaluator, node: Node, index: Index) -> list[Node]:
    """Which lanes, counted from the tile's first, some places below a value are at that are
    compared with values that all lanes share."""

    def step(current: Node) -> Sequence[Node]:
        inside = current.op is not ops.equal and current.op.category in ELEMENTWISE
        inputs = current.inputs if inside else ()
        return [i for i in inputs if i not in e.memories and i.shape == node.shape]

    tests = [n.inputs for n in walk([node], step) if n.op is ops.equal and n not in e.memories]
    found = [lane_number(e, *two, index) for x, y in tests for two in ((x, y), (y, x))]
    return list(dict.fromkeys(number for number in found if number is not None))


def lane_number(e: TileEvaluator, x: Node, other: Node, index: Index) -> Node | None:
    """The number of the lane whose place x equals a value that all lanes share, in 32 bits."""
    b, place = e.body, symbolic(x, index, e.memories)
    if x.dtype not in (int32, int64):
        return None
    if place is None or isinstance(place, int) or low(place) < -LITTLE or high(place) > LITTLE:
        return None
    varying = e._varying(place)
    found = e._affine(place, varying) if varying == [e.lane] else None
    if found is None or found[1] != 1 or symbolic(other, index, e.memories) is not None:
        return None
    wanted = e.value(other, index)
    if wanted.shape:
        return None
    wanted = b.apply("maximum", wanted, low(place) - 1)
    wanted = b.apply("minimum", wanted, high(place) + 1)
    first = b.cast(b.index(found[2] + e.base), int32)
    return b.apply("subtract", b.cast(wanted, int32), first)


def _fits(base: Size, count: int, size: Size) -> bool:
    rest = size - base
    if low(rest) >= count:
        return True
    begins = low(rest) > 0 if isinstance(size, int) else high(rest) > 0  # inside
    return begins and size % count == 0 and base % count == 0


def _reaches(e: TileEvaluator, guard: Node | None, found: tuple[Size, Size, Size]) -> bool:
    """Whether a guard is no larger than what an affine read gives."""
    if guard is None or not guard.shape:
        return True
    by_row, by_lane, _ = found
    if by_row != 0 and by_lane != 0:
        return True
    return guard.shape == ((e.lanes,) if by_row == 0 else (e.rows, 1))


class ThreadSheet(Sheet):
    """A Body of a program that is a block of threads, under construction."""

    b: Viewed
    e: TileEvaluator
    builder = Viewed
    evaluator = TileEvaluator

    def store_parts(self, reduces: Sequence[Node], row: Size, at: Size) -> None:
        """Partial results of a row into scratch."""
        for v, place in zip(reduces, self.others.values()):
            self.e.store(place, self.e.value(v, unravel(row, v.shape)), at)

    def numbers(self) -> Sequence[int]:
        """Views stand for the parameters that they are views of."""
        return self.b.numbers


def _is_stride(factor: Size) -> bool:
    """Whether a factor may be a stride: positive, of numbers and Symbols alone."""
    if isinstance(factor, int):
        return factor > 0
    return factor.low > 0 and all(a.kind == "symbol" for a in atoms(factor))
