"""Lower `update`: write values at indices of a state, in place.

Indices that are affine in the value's own index (slices, iotas) touch each place at most once,
so any order will do; loaded indices may repeat, so their elements are taken in order by one
program per block of the other axes. Invariant: 'set' keeps the last writer and 'add' adds in
index order, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, high, minimum, modulo
from ..ir.types import Memory, product
from ..tile.build import Body, BodyBuilder
from .access import Condition, offset_of, unravel
from .evaluate import Evaluator, symbolic
from .family import Bodies, Family, Offer, Roles
from .fuse import Region
from .loops import LoopLowering

BLOCK = 1024


class VectorUpdates(Family):
    """Updates over vectors."""

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Body that scatters; where the state is not stored, one that writes it comes first."""
        node, reads, values = region.anchor, region.inputs, region.known
        state = node.inputs[0]
        found: Bodies = []
        if not region.filled:
            body, needed = _fill(state, reads, values, target)
            found.append((body, _roles(needed, reads)))
        own = [r for r in reads if r is not state or _reads_state(node, values)]
        if product(node.inputs[1].shape) != 0:
            body = UpdateLowering(node, own, values, target).lower()
            found.append((body, _roles(own, reads)))
        return found


def _roles(used: Sequence[Node], reads: Sequence[Node]) -> Roles:
    return [*(("read", reads.index(r)) for r in used), ("state", 0)]


def _reads_state(node: Node, values: set[Node]) -> bool:
    from .fuse import leaves_of

    state = node.inputs[0]
    return any(i is state or state in leaves_of(i, values) for i in node.inputs[1:])


def _fill(
    state: Node, reads: Sequence[Node], values: set[Node], target: Target
) -> tuple[Body, list[Node]]:
    """A Body that writes the (inlined) state."""
    from .fuse import leaves_of

    group = Region("loops", [state], product(state.shape))
    group.stored = [state]
    needed = [r for r in reads if r in leaves_of(state, values)]
    lowering = LoopLowering(group, values | {state}, target, f"fill_{state.op.name}")
    lowering.reads = needed
    return lowering.lower(), needed


class UpdateLowering:
    """Lowers one update."""

    def __init__(self, node: Node, reads: list[Node], values: set[Node], target: Target) -> None:
        self.node, self.reads, self.values, self.target = node, reads, values, target
        self.state, self.value, *self.indices = node.inputs
        self.rank = len(self.indices[0].shape)
        self.axes, self.mode = node.attrs["axes"], node.attrs["mode"]

    def lower(self) -> Body:
        """The Body: one program per block of the value's unindexed elements."""
        parameters = [
            (f"in{i}", Memory((product(r.shape),), r.dtype)) for i, r in enumerate(self.reads)
        ]
        parameters.append(
            ("state", Memory((product(self.state.shape),), self.state.dtype, "global", "state"))
        )
        self.b = BodyBuilder(f"update_{self.mode}", parameters)
        self.e = Evaluator(self.b, dict(zip(self.reads, self.b.parameters)))
        self.memory = self.b.parameters[-1]
        shape = self.value.shape
        lead, rest = product(shape[: self.rank]), product(shape[self.rank :])
        grid = self.body(lead, rest, self._affine())
        return self.b.finish(grid)

    def _affine(self) -> bool:
        """Whether every index is known from the value's own index and hits a place once."""
        shape = self.indices[0].shape
        from ..ir.symbol import loop_index

        probe = tuple(loop_index(f"probe{i}", s) for i, s in enumerate(shape))
        found = [symbolic(i, probe, self.values) for i in self.indices]
        if any(f is None for f in found):
            return False
        used = [p for p in probe if not isinstance(p, int)]
        from ..ir.symbol import coefficient

        for p in used:  # each own axis moves exactly one state axis
            moving = [f for f in found if f is not None and coefficient(f, p) not in (0,)]
            if len(moving) != 1 or coefficient(moving[0], p) is None:
                return False
        return all(
            len([p for p in used if coefficient(f, p) != 0]) <= 1  # type: ignore[arg-type]
            for f in found
        )

    def body(self, lead: Size, rest: Size, any_order: bool) -> tuple[Size, ...]:
        """Grid over blocks of the rest (and over the indices, where order is free)."""
        lanes = self.lanes(rest)
        block = max(lanes, min(BLOCK, -(-high(rest) // 4)))
        block = -(-block // lanes) * lanes
        blocks = ceil_divide(rest, block)
        if any_order:
            p = self.b.program(0, lead * blocks)
            start = modulo(p, blocks) * block
            self.row(p // blocks if blocks != 1 else p, start, rest, block, lanes)
            return (lead * blocks,)
        p = self.b.program(0, blocks)
        start = p * block

        def walk(i: Size, _: list[Node]) -> Sequence[Node]:
            with self.e.scope():
                self.row(i, start, rest, block, lanes)
            return ()

        self.b.loop("i", 0, lead, 1, walk)
        return (blocks,)

    def lanes(self, rest: Size) -> int:
        """Vector lanes along the unindexed elements."""
        lanes = max(1, self.target.vector_bytes // 4)
        while lanes > 1 and lanes >= 2 * high(rest):
            lanes //= 2
        return lanes

    def row(self, i: Size, start: Size, rest: Size, block: int, lanes: int) -> None:
        """All writes of index number i within a block."""
        index = unravel(i, self.indices[0].shape)
        places = dict(
            zip(
                self.axes,
                (
                    self.position(n, index, self.state.shape[a])
                    for n, a in zip(self.indices, self.axes)
                ),
            )
        )
        conditions = [Condition(places[a], self.state.shape[a]) for a in self.axes]
        conditions = [c for c in conditions if not self._in_range(c)]
        stop = minimum(start + block, rest)

        def write(lane: Size) -> None:
            inner = unravel(lane, self.value.shape[self.rank :])
            x = self.e.value(self.value, index + inner)
            inner_places = iter(inner)
            full = tuple(
                places[a] if a in places else next(inner_places)
                for a in range(len(self.state.shape))
            )
            self.combine(x, offset_of(self.state, full))

        def all_lanes() -> Sequence[Node]:
            if lanes == 1 and high(rest) == 1:
                write(0)
                return ()

            def vector(base: Size, _: list[Node]) -> Sequence[Node]:
                whole = modulo(rest, lanes) == 0
                with self.e.vector(base, lanes, rest, whole) as lane:
                    write(lane)
                return ()

            self.b.loop("j", start, stop, lanes, vector)
            return ()

        if conditions:
            self.b.branch(self.e.conditions(conditions), all_lanes)
        else:
            all_lanes()

    def _in_range(self, condition: Condition) -> bool:
        return condition.holds() and not self._loaded(condition.value)

    def _loaded(self, value: Size) -> bool:
        from ..ir.symbol import atoms

        return any(a.name.startswith("at") for a in atoms(value))

    def position(self, node: Node, index: tuple[Size, ...], size: Size) -> Size:
        """An index as an Expr; a loaded one may be out of range."""
        from ..core.dtype import int64

        exact = symbolic(node, index, self.values)
        if exact is not None:
            return exact
        value = self.b.cast(self.e.value(node, index), int64)
        return self.b.atom("at", value, -(1 << 40), 1 << 40)

    def combine(self, x: Node, offset: Size) -> None:
        """state[offset] = mode(state[offset], x)."""
        if self.mode != "set":
            name = {"add": "add", "multiply": "multiply", "max": "maximum", "min": "minimum"}
            old = self.e._load(self.memory, offset)
            old = self.b.cast(old, x.dtype)
            x = self.b.apply(name[self.mode], old, x)
        self.e.store(self.memory, x, offset)
