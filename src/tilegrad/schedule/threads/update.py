"""Lower `update` for blocks of threads: write values at indices of a state, in place.

Indices that are affine in the value's own index, or a single one, touch each place at most once:
tiles are written in any order. Loaded indices may repeat. They are put in order first: pairs of
(destination, number) sorted by destination, equal ones by number. Then the programs that hold the
first of a run of equal destinations own that destination: they take the run's values one after
another, in the order of their numbers, and write the destination once. No atomics.

Cost beside the values, which are read once, and the destinations, read and written once: n
indices are ranked by n * n comparisons spread over the machine while n is at most `RANKED`
(16384: 0.27e9 comparisons), above by the sorting network, log2(n)**2 / 2 passes over n pairs.

Invariant: 'set' keeps the last writer and 'add' adds in index order, whatever the grid.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import DType, int32, int64
from ...core.target import Target
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
    multiply,
)  # fmt: skip
from ...ir.types import Array, Memory, product, row_major
from ...tile import ops as tile_ops
from ...tile.build import Body
from ..access import Condition, Index, unravel
from ..evaluate import ravel_strides, symbolic, wide
from ..fuse import Group, leaves_of
from . import sort as sorting
from .loops import lower_loops
from .sort import LOCAL, Network
from .space import WARP, Roles
from .tiles import TileEvaluator, Viewed, power_of_two

RANKED = 1 << 15  # indices that are ranked by comparing all with all
WIDE = 32  # unindexed elements from which a tile lies along them
NAMES = {"add": "add", "multiply": "multiply", "max": "maximum", "min": "minimum"}


class UpdateLowering:
    """Lowers one update."""

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

    def lower(self) -> list[tuple[Body, Roles]]:
        """The Bodies in order."""
        if high(self.count) <= 1 or self.once():
            return [self.any_order()]
        size = high(self.count)
        order = [self.ranks()] if size <= RANKED else self.sorts()
        return [*order, self.runs(), self.owned()]

    # ---- Bodies and scratch ---------------------------------------------------------------

    def begin(self, name: str, extra: Sequence[str] = (), writes: Sequence[str] = (),
              state: bool = False) -> dict[str, Node]:  # fmt: skip
        """Start a Body over the reads, some scratch that is read or written, and the state."""
        parameters = [(f"in{i}", Memory((product(r.shape),), r.dtype))
                      for i, r in enumerate(self.reads)]  # fmt: skip
        self.roles: Roles = [("read", i) for i in range(len(self.reads))]
        for names, use in ((extra, "value"), (writes, "state")):
            for n in names:
                t = self.scratch(n)
                parameters.append((n, Memory(t.shape, t.dtype, "global", use)))
                self.roles.append(("scratch", (t, n)))
        if state:
            size = (product(self.state.shape),)
            parameters.append(("state", Memory(size, self.state.dtype, "global", "state")))
            self.roles.append(("state", None))
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
        return max(LOCAL, power_of_two(high(self.count)))

    def scratch(self, name: str) -> Array:
        """The type of one scratch: destinations and numbers in order, lengths of runs."""
        size: Size = self.count if high(self.count) <= RANKED else self.padded
        return Array((size,), self.key_dtype if name == "keys" else int32)

    # ---- where things go ------------------------------------------------------------------

    def once(self) -> bool:
        """Whether every index is known from the value's own index and hits a place once."""
        probe = tuple(loop_index(f"probe{i}", s) for i, s in enumerate(self.index_shape))
        found = [symbolic(i, probe, self.values) for i in self.indices]
        if any(f is None for f in found):
            return False
        used = [p for p in probe if not isinstance(p, int)]
        for p in used:  # each own axis moves exactly one state axis
            moving = [f for f in found if f is not None and coefficient(f, p) not in (0,)]
            if len(moving) != 1 or coefficient(moving[0], p) is None:
                return False
        return all(len([p for p in used if coefficient(f, p) != 0]) <= 1  # type: ignore[arg-type]
                   for f in found)  # fmt: skip

    def position(self, node: Node, index: Index) -> Size:
        """An index as an Expr; a loaded one may be out of range."""
        exact = symbolic(node, index, self.values)
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
        strides = row_major(tuple(self.state.shape[a] for a in self.axes))
        linear = ravel_strides(tuple(found[a] for a in self.axes), strides)
        key = self.b.cast(self.b.index(linear), self.key_dtype)
        if inside is None:
            return key
        return self.b.apply("where", inside, key, self.b.constant(-1, self.key_dtype))

    def offset(self, places: dict[int, Size], inner: Index) -> Size:
        """The element of the state at some places and an index of the other axes."""
        rest = iter(inner)
        full = tuple(places[a] if a in places else next(rest)
                     for a in range(len(self.state.shape)))  # fmt: skip
        return ravel_strides(full, row_major(self.state.shape))

    def combine(self, old: Node, x: Node) -> Node:
        """One value taken into what the state holds."""
        return x if self.mode == "set" else self.b.apply(NAMES[self.mode], old, x)

    def read(self, number: Size, inner: Index) -> Node:
        """The value to write."""
        return self.e.value(self.value, unravel(number, self.index_shape) + inner)

    def inner(self, lane: Size) -> Index:
        """The index of an unindexed element."""
        return unravel(lane, self.value.shape[self.rank :])

    # ---- each place once ------------------------------------------------------------------

    def any_order(self) -> tuple[Body, Roles]:
        """Tiles of (indices, unindexed elements), or of indices alone."""
        memory = self.begin(self.name, state=True)["state"]
        lines, lanes, rows, size = self.count, 1, 1, self.rest
        if high(self.rest) == 1:
            lines, size = 1, self.count
        lanes = min(2048, power_of_two(high(size)))
        rows = max(1, min(2048 // lanes, power_of_two(high(lines))))
        blocks = ceil_divide(size, lanes)
        grid = multiply(ceil_divide(lines, rows), blocks)
        p = self.b.program(0, grid)
        row, base = multiply(floor_divide(p, blocks), rows), multiply(modulo(p, blocks), lanes)
        with self.e.tile(row, rows, lines, base, lanes, size) as (at, lane):
            number, own = (lane, 0) if high(self.rest) == 1 else (at, lane)
            places, inside = self.places(number)
            inner = self.inner(own)

            def write() -> Sequence[Node]:
                where = self.offset(places, inner)
                x = self.read(number, inner)
                if self.mode != "set":
                    self.e.mask = inside if inside is not None and inside.shape else None
                    old = self.b.cast(self.e._load(memory, where), x.dtype)
                    self.e.mask = None
                    x = self.combine(old, x)
                self.e.only = inside if inside is not None and inside.shape else None
                self.e.store(memory, x, where)
                self.e.only = None
                return ()

            if inside is not None and not inside.shape:
                self.b.branch(inside, write)
            else:
                write()
        return self.end(grid, max(1, min(8, rows * lanes // (8 * WARP))))

    # ---- indices in order -----------------------------------------------------------------

    def ranks(self) -> tuple[Body, Roles]:
        """The rank of every index among all, by comparing each with each."""
        memory = self.begin(f"{self.name}_ranks", writes=("keys", "numbers"))
        rows, lanes = 32, 128
        grid = ceil_divide(self.count, rows)
        first = multiply(self.b.program(0, grid), rows)
        b, e = self.b, self.e

        with e.tile(first, rows, self.count, 0, 1, 1) as (row, _):
            key = b.broadcast(self.destination(row), (rows, 1))
            number = b.cast(b.index(row), int32)

            def step(base: Size, carried: list[Node], size: Size) -> Sequence[Node]:
                with e.tile(0, 1, 1, base, lanes, size) as (_, lane):
                    other = self.destination(lane)
                    ahead, same = b.apply("less", other, key), b.apply("equal", other, key)
                    sooner = b.apply("less", b.cast(b.index(lane), int32), number)
                    ahead = b.apply("bit_or", ahead, b.apply("bit_and", same, sooner))
                    if e.lane_mask is not None:
                        ahead = b.apply("bit_and", ahead, e.lane_mask)
                return [b.apply("add", carried[0], b.cast(ahead, int32))]

            whole = multiply(floor_divide(self.count, lanes), lanes)
            found = [b.constant(0, int32, (rows, lanes))]
            found = b.loop("i", 0, whole, lanes, lambda i, c: step(i, c, combine(i, lanes, 1)),
                           found)  # fmt: skip
            if modulo(self.count, lanes) != 0:
                found = b.loop("rest", whole, self.count, lanes,
                               lambda i, c: step(i, c, self.count), found)  # fmt: skip
            rank = b.cast(b.add(tile_ops.reduce(found[0], axis=1, kind="sum")), int64)
            mask = None if e.row_mask is None else e.column(e.row_mask)
            b.scatter(memory["keys"], key, e.column(rank), mask)
            b.scatter(memory["numbers"], number, e.column(rank), mask)
        return self.end(grid, 8)

    def sorts(self) -> list[tuple[Body, Roles]]:
        """The same by a sorting network over pairs in scratch."""
        found = [self.chunks()]
        levels, local = self.padded.bit_length() - 1, LOCAL.bit_length() - 1
        for level in range(local + 1, levels + 1):
            for far in range(level - 1, local - 1, -1):
                memory = self.begin(f"{self.name}_far_{level}_{far}", writes=("keys", "numbers"))
                net = Network(self.b, sorting.FAR_TILE, self.key_dtype, False)
                grid = net.far_programs(list(memory.values()), self.padded, 1, level, far)
                found.append(self.end(grid, 4))
            found.append(self.chunks(level))
        return found

    def chunks(self, level: int = 0) -> tuple[Body, Roles]:
        """Chunks of pairs: made and sorted (level 0), or the rest of a doubling."""
        memory = self.begin(f"{self.name}_chunks_{level}", writes=("keys", "numbers"))
        b, e = self.b, self.e
        net = Network(b, LOCAL, self.key_dtype, False)
        p = b.program(0, self.padded // LOCAL)
        base = multiply(p, LOCAL)
        numbers = b.apply("add", b.add(tile_ops.iota(size=LOCAL, dtype=int32)),
                          b.cast(b.index(base), int32))  # fmt: skip
        if level:
            pair = [b.load(m, (base,), (LOCAL,), (0,)) for m in memory.values()]
            run = b.constant(1 << level, int32)
            pair = net.merge(pair, net.places(), numbers, LOCAL.bit_length() - 1, run)
        else:
            with e.tile(0, 1, 1, base, LOCAL, self.count) as (_, lane):
                key = b.broadcast(self.destination(lane), (LOCAL,))
                if e.lane_mask is not None:
                    key = b.apply("where", e.lane_mask, key, b.constant(net.last(), key.dtype))
            pair = net.sorted([key, numbers], numbers)
        for m, x in zip(memory.values(), pair):
            b.store(m, x, (base,), (0,))
        return self.end(self.padded // LOCAL, 16)

    def runs(self) -> tuple[Body, Roles]:
        """How many pairs have the same destination, at the first of them; 0 at the others."""
        memory = self.begin(f"{self.name}_runs", ("keys", "numbers"), ("lengths",))
        b, e, lanes = self.b, self.e, 256
        grid = ceil_divide(self.count, lanes)
        base = multiply(b.program(0, grid), lanes)
        with e.tile(0, 1, 1, base, lanes, self.count) as (_, lane):
            at = b.broadcast(b.index(lane), (lanes,))
            one = b.constant(1, int64)
            key = e._load(memory["keys"], lane)
            none = b.constant(0, int64)
            left = b.apply("maximum", b.apply("subtract", at, one), none)
            before = b.gather(memory["keys"], left, e.lane_mask)
            first = b.apply("bit_or", b.apply("equal", at, none), b.apply("not_equal", before, key))
            first = b.apply("bit_and", first, b.apply("less_equal", b.constant(0, key.dtype), key))
            low, end = at, b.broadcast(b.index(self.count), (lanes,))

            def halve(_: Size, carried: list[Node]) -> Sequence[Node]:  # keys[low] <= key < [high]
                low, high_ = carried
                middle = b.apply("shift_right", b.apply("add", low, high_), one)
                there = b.gather(memory["keys"], middle, e.lane_mask)
                same = b.apply("less_equal", there, key)
                return [b.apply("where", same, middle, low), b.apply("where", same, high_, middle)]

            steps = high(self.count).bit_length()
            _, end = b.loop("halve", 0, steps, 1, halve, [low, end])
            length = b.apply("where", first, b.apply("subtract", end, at), none)
            e.store(memory["lengths"], b.cast(length, int32), lane)
        return self.end(grid, 4)

    # ---- runs taken by their owners -------------------------------------------------------

    def owned(self) -> tuple[Body, Roles]:
        """Each run of equal destinations, by whoever has its first pair."""
        memory = self.begin(f"{self.name}_owned", ("keys", "numbers", "lengths"), state=True)
        if high(self.rest) >= WIDE:
            return self.owned_lines(memory)
        return self.owned_elements(memory)

    def split(self, key: Size) -> dict[int, Size]:
        """A destination as places by axis."""
        shape = tuple(self.state.shape[a] for a in self.axes)
        return dict(zip(self.axes, unravel(key, shape)))

    def owned_lines(self, memory: dict[str, Node]) -> tuple[Body, Roles]:
        """A program for each pair and block of unindexed elements."""
        b, e = self.b, self.e
        lanes = min(1024, power_of_two(high(self.rest)))
        blocks = ceil_divide(self.rest, lanes)
        p = b.program(0, multiply(self.count, blocks))
        at, base = floor_divide(p, blocks), multiply(modulo(p, blocks), lanes)
        length = b.cast(b.load(memory["lengths"], (at,)), int64)
        longest = b.atom("length", length, 0, high(self.count))

        def take() -> Sequence[Node]:
            key = b.cast(b.load(memory["keys"], (at,)), int64)
            limit = max(1, high(product(tuple(self.state.shape[a] for a in self.axes))) - 1)
            places = self.split(b.atom("to", key, 0, limit))
            with e.tile(0, 1, 1, base, lanes, self.rest) as (_, lane):
                inner = self.inner(lane)
                where = self.offset(places, inner)
                old = b.cast(e._load(memory["state"], where), wide(self.value.dtype))

                def step(t: Size, carried: list[Node]) -> Sequence[Node]:
                    with e.scope():
                        x = self.read(self.number(memory, combine(at, t, 1)), inner)
                        return [b.broadcast(self.combine(carried[0], x), (lanes,))]

                start = combine(longest, 1, -1) if self.mode == "set" else 0
                total = b.loop("t", start, longest, 1, step, [old], 4, (0, high(self.count) - 1))
                e.store(memory["state"], total[0], where)
            return ()

        b.branch(b.apply("less", b.constant(0, int64), length), take)
        return self.end(multiply(self.count, blocks), max(1, min(8, lanes // (8 * WARP))))

    def number(self, memory: dict[str, Node], at: Size) -> Size:
        """The index number at a place in the order."""
        node = b_number = self.b.cast(self.e._load(memory["numbers"], at), int64)
        found = self.b.atom("number", b_number, 0, max(1, high(self.count) - 1))
        if node.shape and not isinstance(found, int):
            self.e.lane_atoms.add(found)
        return found

    def owned_elements(self, memory: dict[str, Node]) -> tuple[Body, Roles]:
        """Tiles over (pairs, unindexed elements) in one line: as many turns as the longest run."""
        b, e, lanes = self.b, self.e, 256
        total = multiply(self.count, self.rest)
        grid = ceil_divide(total, lanes)
        base = multiply(b.program(0, grid), lanes)
        with e.tile(0, 1, 1, base, lanes, total) as (_, lane):
            at, inner = floor_divide(lane, self.rest), self.inner(modulo(lane, self.rest))
            length = b.broadcast(b.cast(e._load(memory["lengths"], at), int64), (lanes,))
            owns = b.apply("less", b.constant(0, int64), length)
            key = b.cast(e._load(memory["keys"], at), int64)
            limit = max(1, high(product(tuple(self.state.shape[a] for a in self.axes))) - 1)
            to = b.atom("to", b.apply("maximum", key, b.constant(0, int64)), 0, limit)
            e.lane_atoms.add(to)  # type: ignore[arg-type]
            where = self.offset(self.split(to), inner)
            longest = b.atom("longest", b.add(tile_ops.reduce(length, axis=0, kind="max")), 0,
                             high(self.count))  # fmt: skip
            e.mask = owns
            old = b.cast(e._load(memory["state"], where), wide(self.value.dtype))
            old = b.broadcast(old, (lanes,))
            e.mask = None

            def step(t: Size, carried: list[Node]) -> Sequence[Node]:
                with e.scope():
                    live = b.apply("less", b.index(t), length)
                    spot = b.apply("add", b.index(at), b.index(t))
                    spot = b.apply("where", live, spot, b.constant(0, int64))
                    place = b.atom("spot", spot, 0, max(1, high(self.count) - 1))
                    e.lane_atoms.add(place)  # type: ignore[arg-type]
                    x = self.read(self.number(memory, place), inner)
                    new = self.combine(carried[0], x)
                    return [b.apply("where", live, new, carried[0])]

            found = b.loop("t", 0, longest, 1, step, [old], bounds=(0, high(self.count) - 1))
            e.only = owns
            e.store(memory["state"], found[0], where)
            e.only = None
        return self.end(grid, 4)


def lower_update(
    group: Group, reads: list[Node], values: set[Node], target: Target, stored: bool
) -> list[tuple[Body, Roles]]:
    """The Bodies of an update; ('state', None) is the Slot that is written.

    Where the state is not stored, a Body that writes it comes first.
    """
    node = group.values[0]
    state = node.inputs[0]
    found: list[tuple[Body, Roles]] = []
    if not stored:
        fill = Group("loops", [state], product(state.shape))
        fill.stored = [state]
        wanted = set(leaves_of(state, values))
        numbers = [i for i, r in enumerate(reads) if r in wanted]
        given = [reads[i] for i in numbers]
        for body, roles in lower_loops(fill, given, values | {state}, target, _name(state, "fill")):
            found.append((body, [("read", numbers[what]) if role == "read" else ("state", None)
                                 for role, what in roles]))  # fmt: skip
    if product(node.inputs[1].shape) == 0:
        return found
    own = [i for i, r in enumerate(reads) if r is not state or _reads_state(node, values)]
    name = _name(node, node.attrs["mode"])
    lowering = UpdateLowering(node, [reads[i] for i in own], values, name)
    for body, roles in lowering.lower():
        found.append((body, [(role, own[what] if role == "read" else what)
                             for role, what in roles]))  # fmt: skip
    return found


def _name(node: Node, what: str) -> str:
    return f"{what}_{node.op.name}" if node.op is not ops.update else f"update_{what}"


def _reads_state(node: Node, values: set[Node]) -> bool:
    state = node.inputs[0]
    return any(i is state or state in leaves_of(i, values) for i in node.inputs[1:])
