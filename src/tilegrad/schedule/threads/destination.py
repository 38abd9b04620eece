"""Where the values of an `update` go: indices as Exprs, destinations as numbers.

Invariant: a destination is -1 exactly where an index is out of range; nothing is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.dtype import DType, int32, int64
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import (
    Size,
    ceil_divide,
    coefficient,
    combine,
    floor_divide,
    high,
    loop_index,
    modulo,
)
from ...ir.types import Array, Memory, product
from ...tile.build import Body
from ..access import MOVEMENT, Condition, Index, offset_of, ravel, unravel
from ..evaluate import symbolic
from . import sort as sorting
from .space import Roles
from .tiles import TileEvaluator, Viewed, power_of_two

NAMES = {"add": "add", "multiply": "multiply", "max": "maximum", "min": "minimum"}
WIDE = 32  # unindexed elements from which a tile lies along them
RANKED = 1 << 15  # indices that are ranked by comparing all with all


class UpdateDestinations:
    """One update, its Bodies under construction, and where its values go."""

    b: Viewed
    e: TileEvaluator

    def __init__(self, node: Node, reads: list[Node], values: set[Node], name: str) -> None:
        self.node, self.reads, self.values, self.name = node, reads, values, name
        self.state, self.value, *self.indices = node.inputs
        self.index_shape = self.indices[0].shape
        self.rank = len(self.index_shape)
        self.axes, self.mode = node.attrs["axes"], node.attrs["mode"]
        shape = self.value.shape
        self.count, self.rest = product(shape[: self.rank]), product(shape[self.rank :])
        after = max(self.axes, default=-1) + 1  # what follows lies in one piece in the state
        tail = product(self.state.shape[after:])
        self.span = tail if high(tail) >= WIDE else self.rest
        self.heads = floor_divide(self.rest, self.span) if high(self.rest) else 1

    # ---- Bodies and scratch ---------------------------------------------------------------

    def begin(
        self, name: str, extra: Sequence[str] = (), writes: Sequence[str] = (), state: bool = False
    ) -> dict[str, Node]:
        """Start a Body over the reads, some scratch that is read or written, and the state."""
        parameters = [
            (f"in{i}", Memory((product(r.shape),), r.dtype)) for i, r in enumerate(self.reads)
        ]
        self.roles: Roles = [("read", i) for i in range(len(self.reads))]
        for names, use in ((extra, "value"), (writes, "state")):
            for n in names:
                t = self.scratch(n)
                parameters.append((n, Memory(t.shape, t.dtype, "global", use)))
                self.roles.append(("scratch", (t, n)))
        if state:
            size = (product(self.state.shape),)
            parameters.append(("state", Memory(size, self.state.dtype, "global", "state")))
            self.roles.append(("state", 0))
        self.scalars: dict[Node, Size] = {}
        self.b = Viewed(name, parameters)
        self.e = TileEvaluator(self.b, dict(zip(self.reads, self.b.parameters)))
        names = [*extra, *writes, *(["state"] if state else [])]
        return dict(zip(names, self.b.parameters[len(self.reads) :]))

    def end(self, grid: Size, warps: int) -> tuple[Body, Roles]:
        """The Body and the roles of its parameters."""
        body = self.b.finish((grid,), warps=warps)
        return body, [self.roles[n] for n in self.b.numbers]

    @property
    def key_dtype(self) -> DType:
        """Of destinations: how many there are decides."""
        places = 1
        for a in self.axes:
            places *= high(self.state.shape[a])
        return int32 if places < 1 << 31 else int64

    @property
    def padded(self) -> int:
        """Pairs, at a power of two where they are sorted."""
        return max(sorting.LOCAL, power_of_two(high(self.count)))

    def scratch(self, name: str) -> Array:
        """The type of one scratch: destinations and numbers in order, lengths of runs."""
        size: Size = self.count if high(self.count) <= RANKED else self.padded
        return Array((size,), self.key_dtype if name == "keys" else int32)

    # ---- where things go ------------------------------------------------------------------

    def once(self) -> bool:
        """Whether every index is known from the value's own index and hits a place once."""
        probe = tuple(loop_index(f"probe{i}", s) for i, s in enumerate(self.index_shape))
        found = [self.exact(i, probe, lambda _: 0) for i in self.indices]
        if any(f is None for f in found):
            return False
        used = [p for p in probe if not isinstance(p, int)]
        for p in used:  # each own axis moves exactly one state axis
            moving = [f for f in found if f is not None and coefficient(f, p) not in (0,)]
            if len(moving) != 1 or coefficient(moving[0], p) is None:
                return False
        return all(
            len([p for p in used if coefficient(f, p) != 0]) <= 1  # type: ignore[arg-type]
            for f in found
        )

    def exact(self, node: Node, index: Index, scalar: Callable[[Node], Size]) -> Size | None:
        """An index that is affine in the value's own index, beside scalars that are loaded."""
        found = symbolic(node, index, self.values)
        if found is not None:
            return found
        if product(node.shape) == 1:
            return scalar(node)
        if node in self.values or not node.dtype.is_integer:
            return None
        if node.op in MOVEMENT:
            inner, conditions = MOVEMENT[node.op](node, index)
            return None if conditions else self.exact(node.inputs[0], inner, scalar)
        parts = [self.exact(i, index, scalar) for i in node.inputs]
        if any(p is None for p in parts) or node.op not in (ops.add, ops.subtract, ops.cast):
            return None
        if node.op is ops.cast:
            return parts[0]
        return combine(parts[0], parts[1], 1 if node.op is ops.add else -1)

    def scalar(self, node: Node) -> Size:
        """A loaded scalar as an index."""
        if node not in self.scalars:
            value = self.b.cast(self.e.value(node, (0,) * len(node.shape)), int64)
            self.scalars[node] = self.b.atom("at", value, -(1 << 40), 1 << 40)
        return self.scalars[node]

    def position(self, node: Node, index: Index) -> Size:
        """An index as an Expr; a loaded one may be out of range."""
        exact = self.exact(node, index, self.scalar)
        if exact is not None:
            return exact
        value = self.b.cast(self.e.value(node, index), int64)
        found = self.b.atom("at", value, -(1 << 40), 1 << 40)
        if value.shape:
            self.e.lane_atoms.add(found)  # type: ignore[arg-type]
        return found

    def places(self, number: Size) -> tuple[dict[int, Size], Node | None]:
        """Where index number `number` points, by axis, and whether that is inside."""
        index = unravel(number, self.index_shape)
        found = {a: self.position(n, index) for n, a in zip(self.indices, self.axes)}
        conditions = [Condition(found[a], self.state.shape[a]) for a in self.axes]
        conditions = [c for c in conditions if not c.holds()]
        return found, self.e.conditions(conditions) if conditions else None

    def destination(self, number: Size) -> Node:
        """The linear number of the place, -1 where it is outside."""
        found, inside = self.places(number)
        shape = [self.state.shape[a] for a in self.axes]
        linear = ravel([found[a] for a in self.axes], shape)
        key = self.b.cast(self.b.index(linear), self.key_dtype)
        if inside is None:
            return key
        return self.b.apply("where", inside, key, self.b.constant(-1, self.key_dtype))

    def offset(self, places: dict[int, Size], inner: Index) -> Size:
        """The element of the state at some places and an index of the other axes."""
        rest = iter(inner)
        full = tuple(places[a] if a in places else next(rest) for a in range(len(self.state.shape)))
        return offset_of(self.state, full)

    def combine(self, old: Node, x: Node) -> Node:
        """One value taken into what the state holds."""
        return x if self.mode == "set" else self.b.apply(NAMES[self.mode], old, x)

    def read(self, number: Size, inner: Index) -> Node:
        """The value to write."""
        return self.e.value(self.value, unravel(number, self.index_shape) + inner)

    def inner(self, lane: Size, head: Size = 0) -> Index:
        """The index of an unindexed element, by its number in a span."""
        return unravel(head * self.span + lane, self.value.shape[self.rank :])

    def cut(self, lanes: int, rows: Size) -> tuple[Size, Size, Size, Size]:
        """A program for each span, of so many rows, in blocks: (grid, row, head, base)."""
        blocks = ceil_divide(self.span, lanes)
        each = self.heads * blocks
        p = self.b.program(0, rows * each)
        rest = modulo(p, each)
        base = modulo(rest, blocks) * lanes
        return rows * each, floor_divide(p, each), floor_divide(rest, blocks), base
