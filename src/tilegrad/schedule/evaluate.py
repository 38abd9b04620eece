"""Evaluate Graph values at an index, as Tile IR: the heart of every generated kernel.

`Evaluator.value(node, index)` walks down from a value to what is stored, turning movement into
index arithmetic and elementwise ops into Tile ops; one index atom may be the vector lane. Low
precision floats are computed in float32 and rounded where they are stored, cast or compared; at the
level `invariant` after every op, so that it does not matter what is stored.
Invariant: a value whose index does not mention the lane atom is a scalar; all others have `lanes`
lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from ..core import dtype as dtypes
from ..core.config import invariant
from ..core.dtype import DType, int64
from ..core.errors import InternalError
from ..graph import ops
from ..ir.node import Node, Op, located
from ..ir.symbol import (
    Expr,
    Size,
    atoms,
    coefficient,
    high,
    low,
    maximum,
    minimum,
    substitute,
)
from ..tile import ops as tile_ops
from ..tile.build import BodyBuilder
from .access import (
    MOVEMENT,
    Condition,
    Index,
    Place,
    atom_of,
    base_of,
    below,
    depends,
    joined,
    moved,
    offset_of,
    placed,
    ravel,
    symbolic,
    walk_down,
)

FAR = 1 << 40  # no index that is in range is beyond it
# Graph ops that are one Tile op of the same name.
DIRECT = {
    op
    for op in ops.graph.ops.values()
    if op.category in ("unary", "binary", "compare") and op.name in tile_ops.ELEMENTWISE
}
COMPARE = {op for op in DIRECT if op.category == "compare"}


def running(dtype: DType, kind: str) -> DType:
    """The dtype in which a running sum or product is carried along: float64 for floats, since
    all that came before adds to its error."""
    return dtypes.float64 if dtype.is_float and kind in ("sum", "prod") else dtype.wide


def as_dtype(b: BodyBuilder, x: Node, dtype: DType) -> Node:
    """A value as a dtype has it."""
    return b.cast(b.cast(x, dtype), dtype.wide)


class Evaluator:
    """Evaluates Graph values inside one Body under construction."""

    def __init__(self, body: BodyBuilder, memories: dict[Node, Node]) -> None:
        self.body = body
        self.memories = memories  # stored Graph value -> Memory parameter
        self.memo: list[dict[Any, Node]] = [{}]
        self.lane: Expr | None = None  # the atom whose Node is base + iota
        self.base: Size = 0  # the scalar the lane atom starts from
        self.lanes = 1
        self.mask: Node | None = None  # lanes in range, where not all are
        self.lane_atoms: set[Expr] = set()
        self.settles = invariant()  # whether every result is rounded to its dtype
        self.handlers: dict[Op, Row] = ROWS
        self.own: dict[Node, Node] = {}  # read at one element only, however its index is written

    # ---- context --------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Any:
        """Values found inside are forgotten outside (loops, branches)."""
        self.memo.append({})
        try:
            yield
        finally:
            self.memo.pop()

    @contextmanager
    def vector(self, base: Size, lanes: int, size: Size, whole: bool) -> Any:
        """`lanes` lanes from base on, of an axis of `size`; yields the lane atom."""
        before = (self.lane, self.base, self.lanes, self.mask)
        b, (lane, node) = self.body, self.axis_atom("lane", base, lanes, size)
        self.lane, self.base, self.lanes = lane, base, lanes
        self.mask = None if whole else b.apply("less", node, b.broadcast(b.index(size), (lanes,)))
        try:
            with self.scope():
                yield lane
        finally:
            self.lane, self.base, self.lanes, self.mask = before

    def axis_atom(self, name: str, base: Size, count: int, size: Size) -> tuple[Expr, Node]:
        """The atom of so many places from base on, along an axis of `size`, and the places."""
        b = self.body
        node = b.line(base, count)
        atom = atom_of(name, size)
        b.atoms[atom] = node  # one name in all loops, so that indices compare equal
        self.lane_atoms.add(atom)
        return atom, node

    def atom(self, name: str, value: Node, least: int, most: int) -> Size:
        """An atom for an index that was computed; that of a tile varies along it."""
        found = self.body.atom(name, value, least, most)
        if value.shape and isinstance(found, Expr):
            self.lane_atoms.add(found)
        return found

    def bind(self, node: Node, index: Index, value: Node) -> None:
        """Say what a value is at an index, in this scope."""
        self.memo[-1][(node, index)] = value

    def known(self, node: Node, index: Index) -> Node | None:
        """A value found before."""
        for memo in reversed(self.memo):
            found = memo.get((node, index))
            if found is not None:
                return found
        return None

    # ---- values ---------------------------------------------------------------------------

    def value(self, node: Node, index: Index) -> Node:
        """The value at the index: a scalar, or a tile of `lanes`."""
        found = self.known(node, index)
        if found is None:
            with located(node.location):
                found = self._value(node, index)
            self.bind(node, index, found)
        return found

    def _value(self, node: Node, index: Index) -> Node:
        if node in self.own:
            return self.own[node]
        if node in self.memories:
            return self.load(node, index)
        op = node.op
        if op in MOVEMENT:
            inner, conditions = moved(node, index)
            if not conditions:
                return self.value(node.inputs[0], inner)
            if any(c.fails() for c in conditions):
                return self.body.constant(0, node.dtype.wide)
            return self._guarded(node.inputs[0], inner, conditions)
        if op is ops.constant:
            return self.body.constant(node.attrs["value"], node.dtype.wide)
        if op in DIRECT:
            seen = self.as_stored if op in COMPARE else self.value
            x = self.body.apply(self.tile_op(node), *(seen(i, index) for i in node.inputs))
            return self.settled(x, node)
        if op not in self.handlers:
            raise InternalError("schedule.evaluate", f"{op} cannot be evaluated inside a kernel")
        return self.handlers[op](self, node, index)

    def as_stored(self, node: Node, index: Index) -> Node:
        """The value as its dtype has it. A value that is computed anew and compared with one that
        was stored (a maximum, in its derivative) is equal to it so; constants are exact."""
        x, node = self.value(node, index), base_of(node)
        return x if node.op is ops.constant else as_dtype(self.body, x, node.dtype)

    def settled(self, x: Node, node: Node) -> Node:
        """What was computed of a Node, rounded to its dtype where it must not matter what is
        stored."""
        return as_dtype(self.body, x, node.dtype) if self.settles else x

    def tile_op(self, node: Node) -> str:
        """The Tile op that computes an elementwise Node."""
        return node.op.name

    def _guarded(self, node: Node, index: Index, conditions: Sequence[Condition]) -> Node:
        """A value where the conditions hold, else 0; nothing is read elsewhere."""
        mask = self.conditions(conditions)
        before = self.mask
        self.mask = self.body.logical_and(before, mask)
        try:
            with self.scope():
                inner = self.value(node, index)
        finally:
            self.mask = before
        return self.body.where(mask, inner, 0)

    def conditions(self, conditions: Sequence[Condition]) -> Node:
        """All conditions as one mask."""
        mask: Any = None
        for c in conditions:
            if low(c.value) < 0:
                mask = self.body.logical_and(mask, self.body.less_equal(0, c.value))
            if low(c.size - c.value) < 1:
                mask = self.body.logical_and(mask, self.body.less(c.value, c.size))
        return mask

    @property
    def full(self) -> tuple[int, ...]:
        """The shape of a whole tile."""
        return (self.lanes,)

    def inside(self) -> Node | None:
        """The mask of the whole tile, where one is needed."""
        return self.mask

    def active(self, shape: tuple[int, ...]) -> Node | None:
        """Which elements of a tile of this shape count; None for all."""
        return self.mask

    def position(self, node: Node, index: Index, size: Size) -> Size:
        """An integer value as an index Expr: exact for iotas, an atom for loaded values."""
        exact = symbolic(node, index, self.memories)
        if exact is not None:
            if Condition(exact, size).holds():
                return exact
            return maximum(minimum(exact, size - 1), 0)
        value = self.body.cast(self.value(node, index), int64)
        last = self.body.index(size - 1)  # out of range is clamped: never read there
        value = self.body.apply("minimum", value, last)
        value = self.body.apply("maximum", value, 0)
        return self.atom("at", value, 0, max(1, high(size) - 1))

    def place(self, value: Node) -> Size:
        """A computed integer as an index Expr; it may be out of range."""
        return self.atom("at", self.body.cast(value, int64), -FAR, FAR)

    # ---- loads and stores -----------------------------------------------------------------

    def load(self, node: Node, index: Index) -> Node:
        """A stored value at the index."""
        memory = self.memories[node]
        offset = offset_of(node, index)
        x = self._load(memory, offset)
        return self.body.cast(x, node.dtype.wide)

    def _varying(self, offset: Size) -> list[Expr]:
        return [a for a in atoms(offset) if a in self.lane_atoms]

    def _load(self, memory: Node, offset: Size) -> Node:
        b = self.body
        varying = self._varying(offset)
        if not varying:
            mask = self.mask
            if mask is not None and mask.shape:
                inside = Condition(offset, memory.shape[0]).holds()
                mask = None if inside else b.reduce(mask, 0, "max")
            return b.load(memory, (offset,), mask=mask)
        start = self._line(offset, varying)
        if start is not None:
            return b.load(memory, (start,), (self.lanes,), (0,), self.mask)
        return b.gather(memory, b.index(offset), self.mask)

    def _line(self, offset: Size, varying: Sequence[Expr]) -> Size | None:
        """Where an offset begins that moves along the lane, place by place; None for others."""
        lane = self.lane
        if lane is None or varying != [lane] or coefficient(offset, lane) != 1:
            return None
        return substitute(offset, {lane: self.base})

    def store(self, memory: Node, value: Node, offset: Size) -> None:
        """Write a value (rounded to the Memory's dtype) at a linear offset."""
        b = self.body
        value = b.cast(value, memory.dtype)
        varying = self._varying(offset)
        if not varying:
            if value.shape:  # one element: every lane has it
                value = b.extract(value)
            b.store(memory, value, (offset,))
            return
        value = b.broadcast(value, (self.lanes,))
        start = self._line(offset, varying)
        if start is None:
            b.scatter(memory, value, b.index(offset), self.mask)
        else:
            b.store(memory, value, (start,), (0,), self.mask)

    def hoist(self, node: Node, index: Index, inner: Sequence[Expr]) -> None:
        """Evaluate now every part of a value that does not depend on the inner atoms."""

        def step(current: Node, at: Index) -> Sequence[Place]:
            if self.known(current, at) is not None:
                return ()
            if not any(depends(i, inner) for i in at):
                if current.op is not ops.constant or not current.shape:
                    self.value(current, at)
                return ()
            return () if current in self.memories else below(current, at, guarded=False)

        for _ in walk_down([(node, index)], step):
            pass


# ---- ops, one row each --------------------------------------------------------------------------


def _cast(e: Evaluator, node: Node, index: Index) -> Node:
    return as_dtype(e.body, e.value(node.inputs[0], index), node.dtype)


def _bitcast(e: Evaluator, node: Node, index: Index) -> Node:
    source = node.inputs[0]
    x = e.body.cast(e.value(source, index), source.dtype)
    return as_dtype(e.body, e.body.bitcast(x, node.dtype), node.dtype)


def _fixed_point(e: Evaluator, node: Node, index: Index) -> Node:
    from .fixed_point import fixed_point

    return fixed_point(e.body, node, e.value(node.inputs[0], index))


def _in_range(e: Evaluator, node: Node, index: Index) -> Node:
    """The index; what is out of range is an error of the run."""
    b, x = e.body, e.value(node.inputs[0], index)
    if symbolic(node, index, e.memories) is None:
        place, size = b.cast(x, int64), b.index(node.attrs["size"])
        least = b.apply("less_equal", 0, place)
        inside = b.logical_and(least, b.apply("less", place, size))
        b.require(inside, node.attrs["message"], node.attrs["place"], e.active(inside.shape))
    return x


def _concatenate(e: Evaluator, node: Node, index: Index) -> Node:
    result: Node | None = None
    for x, inner, condition in joined(node, index):
        if condition.holds():
            return e.value(x, inner)
        if condition.size == 0 or condition.fails():
            continue
        part = e._guarded(x, inner, [condition])
        if result is None:
            result = part
        else:
            result = e.body.where(e.conditions([condition]), part, result)
    if result is not None:
        return result
    if e.mask is None:
        raise InternalError("schedule.evaluate", f"{index} lies outside {node}")
    return e.body.constant(0, node.dtype.wide)  # past the end: the mask leaves all of it out


def _gather(e: Evaluator, node: Node, index: Index) -> Node:
    x, axes = node.inputs[0], node.attrs["axes"]
    rank = len(node.inputs[1].shape)
    at = {a: e.position(i, index[:rank], x.shape[a]) for i, a in zip(node.inputs[1:], axes)}
    return e.value(x, placed(at, len(x.shape), index[rank:]))


def _random_bits(e: Evaluator, node: Node, index: Index) -> Node:
    """Philox-2x32-10 of (linear index, offset) under the key; word 0."""
    from ..kernels.random import random_bits  # few programs draw
    from ..tile.trace import into
    from ..tile.value import TileValue

    given = [*(e.value(i, ()) for i in node.inputs), e.body.index(ravel(index, node.shape))]
    with into(e.body):
        drawn: Node = random_bits(*map(TileValue, given)).node
    return drawn


Row = Callable[[Any, Node, Index], Node]
ROWS: dict[Op, Row] = {
    ops.cast: _cast,
    ops.bitcast: _bitcast,
    ops.fixed: _fixed_point,
    ops.stop_gradient: lambda e, node, index: e.value(node.inputs[0], index),
    ops.barrier: lambda e, node, index: e.value(node.inputs[0], index),
    ops.in_range: _in_range,
    ops.where: lambda e, node, index: e.body.where(*(e.value(i, index) for i in node.inputs)),
    ops.iota: lambda e, node, index: e.body.cast(e.body.index(index[0]), node.dtype.wide),
    ops.size: lambda e, node, index: e.body.index(node.attrs["value"]),
    ops.concatenate: _concatenate,
    ops.gather: _gather,
    ops.random_bits: _random_bits,
}
