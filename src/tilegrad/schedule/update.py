"""Lower `update`: write values at indices of a state, in place.

Indices that are affine in the value's own index (slices, iotas) touch each place at most once,
so any order will do; loaded indices may repeat, so their elements are taken in order by one
program per block of the other axes. Invariant: 'set' keeps the last writer and 'add' adds in
index order, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, coefficient, high, loop_index, minimum, round_up
from ..ir.types import product
from ..tile.build import BodyBuilder
from ..tile.numeric import COMBINE
from . import sheet as parameters
from .access import Condition, Index, offset_of, placed, symbolic, unravel
from .evaluate import Evaluator
from .family import Bodies, Made
from .loops import lower_loops
from .region import Region, leaves_of
from .sheet import Sheet
from .space import fitting

BLOCK = 1024


Loops = Callable[[Region], Bodies]


class Update:
    """An update: its state, values and indices, and where the values go."""

    sheet: Sheet
    b: BodyBuilder
    e: Evaluator

    def __init__(self, region: Region, reads: list[Node]) -> None:
        self.node = node = region.anchor
        self.reads, self.values, self.target = reads, region.known, region.target
        self.state, self.value, *self.indices = node.inputs
        self.index_shape = self.indices[0].shape
        self.rank = len(self.index_shape)
        self.axes, self.mode = node.attrs["axes"], node.attrs["mode"]
        self.name = f"update_{self.mode}"
        shape = self.value.shape
        self.count, self.rest = product(shape[: self.rank]), product(shape[self.rank :])

    def once(self) -> bool:
        """Whether every index is known from the value's own index and hits a place once."""
        probe = tuple(loop_index(f"probe{i}", s) for i, s in enumerate(self.index_shape))
        found = [f for f in (self.probed(i, probe) for i in self.indices) if f is not None]
        if len(found) < len(self.indices):
            return False
        used = [p for p in probe if not isinstance(p, int)]
        for p in used:  # each own axis moves exactly one state axis
            moving = [f for f in found if coefficient(f, p) != 0]
            if len(moving) != 1 or coefficient(moving[0], p) is None:
                return False
        return all(len([p for p in used if coefficient(f, p) != 0]) <= 1 for f in found)

    def probed(self, node: Node, index: Index) -> Size | None:
        """An index at the value's own index, where it is known from that."""
        return self.exact(node, index)

    def exact(self, node: Node, index: Index) -> Size | None:
        """An index that is affine in the value's own index."""
        return symbolic(node, index, self.values)

    def position(self, node: Node, index: Index) -> Size:
        """An index as an Expr; a loaded one may be out of range."""
        exact = self.exact(node, index)
        if exact is not None:
            return exact
        return self.e.place(self.e.value(node, index))

    def positions(self, number: Size) -> tuple[dict[int, Size], Node | None]:
        """Where index number `number` points, by axis, and whether that is inside."""
        index = unravel(number, self.index_shape)
        found = {a: self.position(n, index) for n, a in zip(self.indices, self.axes)}
        conditions = [Condition(found[a], self.state.shape[a]) for a in self.axes]
        conditions = [c for c in conditions if not c.holds()]
        return found, self.e.conditions(conditions) if conditions else None

    def offset(self, positions: dict[int, Size], inner: Index) -> Size:
        """The element of the state at some positions and an index of the other axes."""
        return offset_of(self.state, placed(positions, len(self.state.shape), inner))

    def combine(self, old: Node, x: Node) -> Node:
        """One value taken into what the state holds."""
        return x if self.mode == "set" else self.b.apply(COMBINE.get(self.mode, self.mode), old, x)

    def old(self, offset: Size) -> Node:
        """What the state holds, as values are computed."""
        found = self.e._load(self.sheet.others["state"], offset)
        return self.b.cast(found, self.value.dtype.wide)

    def read(self, number: Size, inner: Index) -> Node:
        """The value to write."""
        return self.e.value(self.value, unravel(number, self.index_shape) + inner)


def update_bodies(region: Region, kind: Any, loops: Loops) -> Bodies:
    """The Bodies of a kind of Update; where the state is not stored, Bodies of `loops` that
    write it come first."""
    node, reads, values = region.anchor, region.inputs, region.known
    state = node.inputs[0]
    found: Bodies = []
    if not region.filled and state.size != 0:
        known, total = values | {state}, state.size
        fill = Region("loops", region.target, known, [state], total, stored=[state])
        wanted, fill.name = leaves_of(state, values), f"fill_{state.op.name}"
        fill.inputs = [r for r in reads if r in wanted]
        found += [_of_update(one, fill.inputs, reads) for one in loops(fill)]
    if node.inputs[1].size != 0:
        rereads = any(i is state or state in leaves_of(i, values) for i in node.inputs[1:])
        own = [r for r in reads if r is not state or rereads]
        found += [_of_update(one, own, reads) for one in kind(region, own).lower()]
    return found


def _of_update(made: Made, used: list[Node], reads: list[Node]) -> Made:
    """A Body that reads some of the update's inputs, and stores its state."""
    of = {"read": lambda i: ("read", reads.index(used[i])), "store": lambda i: ("state", 0)}
    return Made(made.body, [of[r](i) if r in of else (r, i) for r, i in made.roles])


def lower_update(region: Region) -> Bodies:
    """The Body that scatters; where the state is not stored, one that writes it comes first."""
    return update_bodies(region, VectorUpdate, lower_loops)


class VectorUpdate(Update):
    """Lowers one update."""

    def lower(self) -> Bodies:
        """The Body: one program per block of the value's unindexed elements (and per index, where
        order is free)."""
        given = [*parameters.reads(self.reads), parameters.state(self.state)]
        self.sheet = Sheet(self.name, given)
        self.b, self.e = self.sheet.b, self.sheet.e
        lanes = fitting(self.target.vector_bytes // 4, self.rest)
        block = max(lanes, min(BLOCK, ceil_divide(high(self.rest), 4)))
        block = round_up(block, lanes)
        blocks = ceil_divide(self.rest, block)
        if self.once():
            grid, (number, own) = self.sheet.programs(self.count, blocks)
            self.row(number, own * block, block, lanes)
            return [self.sheet.end(grid)]
        start = self.b.program(0, blocks) * block
        for i in self.b.each("i", 0, self.count):
            with self.e.scope():
                self.row(i, start, block, lanes)
        return [self.sheet.end(blocks)]

    def row(self, i: Size, start: Size, block: int, lanes: int) -> None:
        """All writes of index number i within a block."""
        positions, inside = self.positions(i)
        stop = minimum(start + block, self.rest)

        def write(lane: Size) -> None:
            inner = unravel(lane, self.value.shape[self.rank :])
            x, offset = self.read(i, inner), self.offset(positions, inner)
            if self.mode != "set":
                x = self.combine(self.old(offset), x)
            self.e.store(self.sheet.others["state"], x, offset)

        def all_lanes() -> None:
            if lanes == 1 and high(self.rest) == 1:
                write(0)
                return
            for base in self.b.each("j", start, stop, lanes):
                with self.e.vector(base, lanes, self.rest, self.rest % lanes == 0) as lane:
                    write(lane)

        if inside is None:
            all_lanes()
        else:
            self.b.branch(inside, all_lanes)
