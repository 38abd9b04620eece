"""Lower `update` for blocks of threads: write values at indices of a state, in place.

Indices that are affine in the value's own index (from a loaded start on, too), or a single one,
touch each place at most once: tiles are written in any order. Other loaded indices may repeat.
Few of them are compared by whoever writes (`few`). More are put in order first: pairs of
(destination, number) sorted by destination, equal ones by number. Then the programs that hold the
first of a run of equal destinations own that destination: they take the run's values one after
another, in the order of their numbers, and write the destination once. No atomics.

Cost beside the values, which are read once, and the destinations, read and written once: n
indices are ranked by n * n comparisons spread over the machine while n is at most `RANKED`
(16384: 0.27e9 comparisons), above by the sorting network, log2(n)**2 / 2 passes over n pairs.

Invariant: 'set' keeps the last writer and 'add' adds in index order, whatever the grid.
"""

from __future__ import annotations

from functools import partial

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, floor_divide, high, modulo
from ...tile import ops as tile_ops
from ..access import Index
from ..evaluate import wide
from ..family import Bodies, Made
from ..problem import power_of_two
from ..region import Region
from ..update import update_bodies
from . import destination as sizes
from .destination import WIDE
from .loops_threads import lower_loops
from .ordered import OrderedUpdate
from .space_threads import WARP

FEW_INDICES = 64  # indices that every program compares itself
FEWER = 256  # indices of single elements that are set by a program each
FEW_SET = 2048  # the same where the last one is all that counts


class UpdateLowering(OrderedUpdate):
    """Lowers one update."""

    def lower(self) -> Bodies:
        """The Bodies in order."""
        if high(self.count) <= 1 or self.once():
            return [self.any_order()]
        size = high(self.count)
        lines = high(self.rest) >= WIDE or (self.mode == "set" and size <= FEWER)
        if lines and size <= (FEW_SET if self.mode == "set" else FEW_INDICES):
            return [self.few_lines()]
        if size <= FEW_INDICES and size * high(self.rest) <= 2048:
            return [self.few_elements()]
        order = [self.ranks()] if size <= sizes.RANKED else self.sorts()
        return [*order, self.runs(), self.owned()]

    # ---- each place once ------------------------------------------------------------------

    def any_order(self) -> Made:
        """Tiles of (indices, unindexed elements), or of indices alone."""
        memory = self.begin(self.name, state=True)["state"]
        alone = high(self.rest) == 1  # a tile of indices
        lines: Size = 1 if alone else self.count
        size = self.count if alone else self.span
        lanes = min(2048, power_of_two(high(size)))
        rows = max(1, min(2048 // lanes, power_of_two(high(lines))))
        if alone:
            self.span = size
        grid, row, head, base = self.cut(lanes, ceil_divide(lines, rows))
        with self.e.tile(row * rows, rows, lines, base, lanes, size) as (at, lane):
            number = lane if alone else at
            positions, inside = self.positions(number)
            inner = self.inner(0) if alone else self.inner(lane, head)

            def write() -> None:
                where = self.offset(positions, inner)
                x = self.read(number, inner)
                each = inside if inside is not None and inside.shape else None
                if self.mode != "set":
                    self.e.mask = each
                    old = self.b.cast(self.e._load(memory, where), x.dtype)
                    self.e.mask = None
                    x = self.combine(old, x)
                self.e.store(memory, x, where, each)

            if inside is not None and not inside.shape:
                self.b.branch(inside, write)
            else:
                write()
        return self.sheet.end((grid,), warps=max(1, min(8, rows * lanes // (8 * WARP))))

    # ---- few indices ----------------------------------------------------------------------

    def few_lines(self) -> Made:
        """A program for each index and block of unindexed elements; one of equal ones writes."""
        memory = self.begin(self.name, state=True)["state"]
        b, e, size = self.b, self.e, max(2, power_of_two(high(self.count)))
        lanes = min(1024, power_of_two(high(self.span)))
        grid, at, head, base = self.cut(lanes, self.count)
        key = self.destination(at)
        with e.tile(0, 1, 1, 0, size, self.count) as (_, lane):
            order = (
                (lane, at) if self.mode != "set" else (at, lane)
            )  # who comes before us, or after
            rival = b.apply(
                "bit_and", b.apply("equal", self.destination(lane), key), b.less(*order)
            )
            rival = rival if e.lane_mask is None else b.apply("bit_and", rival, e.lane_mask)
            lost = b.add(tile_ops.reduce(b.broadcast(rival, (size,)), axis=0, kind="max"))
        wins = b.apply(
            "bit_and",
            b.apply("bit_not", lost),
            b.apply("less_equal", b.constant(0, key.dtype), key),
        )
        positions, _ = self.positions(at)
        with b.when(wins), e.tile(0, 1, 1, base, lanes, self.span) as (_, lane):
            inner = self.inner(lane, head)
            where = self.offset(positions, inner)
            x = self.read(at, inner)
            if self.mode != "set":
                x = self.take_equal(memory, key, at, inner, where, lanes)
            e.store(memory, x, where)
        return self.sheet.end((grid,), warps=max(1, min(8, lanes // (8 * WARP))))

    def take_equal(
        self, memory: Node, key: Node, at: Size, inner: Index, where: Size, lanes: int
    ) -> Node:
        """What the state holds with the values of all equal destinations taken in."""
        b, e = self.b, self.e
        old = b.cast(e._load(memory, where), wide(self.value.dtype))
        total = [b.broadcast(old, (lanes,))]

        def take(j: Size) -> list[Node]:
            with e.scope():
                return [b.broadcast(self.combine(total[0], self.read(j, inner)), (lanes,))]

        for j in b.each("j", at, self.count, 1, total):
            with e.scope():
                same = b.apply("equal", self.destination(j), key)
            total[:] = b.branch(same, partial(take, j), lambda: total)
        return total[0]

    def few_elements(self) -> Made:
        """One program: every element takes all values of its destination; the first of equal
        ones writes it."""
        memory = self.begin(self.name, state=True)["state"]
        b, e = self.b, self.e
        total = self.count * self.rest
        lanes = max(2, power_of_two(high(total)))
        with e.tile(0, 1, 1, 0, lanes, total) as (_, lane):
            at, inner = floor_divide(lane, self.rest), self.inner(modulo(lane, self.rest))
            key = b.broadcast(self.destination(at), (lanes,))
            positions, _ = self.positions(at)
            where = self.offset(positions, inner)
            owns = b.apply("less_equal", b.constant(0, key.dtype), key)
            e.mask = owns
            old = b.cast(e._load(memory, where), wide(self.value.dtype))
            e.mask = None
            state = [b.broadcast(old, (lanes,)), owns]
            for j in b.each("j", 0, self.count, 1, state):
                with e.scope():
                    same = b.apply("equal", self.destination(j), key)
                    x = self.combine(state[0], self.read(j, inner))
                    state[0] = b.apply("where", same, b.broadcast(x, (lanes,)), state[0])
                    sooner = b.apply("bit_and", same, b.broadcast(b.less(j, at), (lanes,)))
                    state[1] = b.apply("bit_and", state[1], b.apply("bit_not", sooner))
            e.store(memory, state[0], where, state[1])
        return self.sheet.end((1,), warps=max(1, min(8, lanes // (4 * WARP))))


def lower_update(region: Region, target: Target, name: str) -> Bodies:
    """An update by blocks of threads."""

    def write(reads: list[Node]) -> Bodies:
        own = f"update_{region.anchor.attrs['mode']}"
        return UpdateLowering(region.anchor, reads, region.known, own).lower()

    return update_bodies(region, target, lower_loops, write)
