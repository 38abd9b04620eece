"""Updates at many loaded indices: destinations put in order, then each run taken by its owner.

Pairs of (destination, number) are sorted by destination, equal ones by number: by comparing all
with all while there are few enough, else by the sorting network. The lengths of runs of equal
destinations are found by bisection. Whoever holds the first pair of a run takes the run's values
in the order of their numbers and writes the destination once.

Invariant: 'set' keeps the last writer and 'add' adds in index order, whatever the grid.
"""

from __future__ import annotations

from ...core.dtype import int32, int64
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, floor_divide, high, modulo
from ...ir.types import product
from ...tile import ops as tile_ops
from ..access import unravel
from ..evaluate import wide
from ..family import Bodies, Made
from ..problem import power_of_two
from .destination import WIDE, UpdateDestinations
from .sort import Network, Pair, ScratchSort
from .space_threads import WARP
from .tiles import ThreadSheet


class DestinationSort(ScratchSort):
    """Pairs of (destination, number) of an update."""

    def __init__(self, update: UpdateDestinations) -> None:
        super().__init__(update.name, update.reads, 1, update.padded, update.key_dtype)
        self.update = update

    def take(self, sheet: ThreadSheet, net: Network, line: Size, start: Size) -> tuple[Pair, Node]:
        """See `ScratchSort`."""
        self.update.write_to(sheet)
        b, e, numbers = sheet.b, sheet.e, net.numbers(start)
        with e.tile(0, 1, 1, start, net.size, self.update.count) as (_, lane):
            key = b.broadcast(self.update.destination(lane), (net.size,))
            return [b.where(e.lane_mask, key, net.last()), numbers], numbers


class OrderedUpdate(UpdateDestinations):
    """The launches of an update whose indices may repeat."""

    # ---- indices in order -----------------------------------------------------------------

    def ranks(self) -> Made:
        """The rank of every index among all, by comparing each with each."""
        memory = self.begin(f"{self.name}_ranks", writes=("keys", "numbers"))
        rows, lanes = 32, 128
        grid = ceil_divide(self.count, rows)
        first = self.b.program(0, grid) * rows
        b, e = self.b, self.e

        with e.tile(first, rows, self.count, 0, 1, 1) as (row, _):
            key = b.broadcast(self.destination(row), (rows, 1))
            number = b.cast(b.index(row), int32)
            found = [b.constant(0, int32, (rows, lanes))]

            def count(base: Size, size: Size) -> None:
                with e.tile(0, 1, 1, base, lanes, size) as (_, lane):
                    other = self.destination(lane)
                    ahead, same = b.apply("less", other, key), b.apply("equal", other, key)
                    sooner = b.apply("less", b.cast(b.index(lane), int32), number)
                    ahead = b.apply("bit_or", ahead, b.apply("bit_and", same, sooner))
                    if e.lane_mask is not None:
                        ahead = b.apply("bit_and", ahead, e.lane_mask)
                found[0] = b.apply("add", found[0], b.cast(ahead, int32))

            for i, whole in b.steps("i", 0, self.count, lanes, found):
                count(i, i + lanes if whole else self.count)
            rank = b.cast(b.add(tile_ops.reduce(found[0], axis=1, kind="sum")), int64)
            mask = None if e.row_mask is None else e.column(e.row_mask)
            b.scatter(memory["keys"], key, e.column(rank), mask)
            b.scatter(memory["numbers"], number, e.column(rank), mask)
        return self.sheet.end((grid,), warps=8)

    def sorts(self) -> Bodies:
        """The same by a sorting network over pairs in scratch."""
        return DestinationSort(self).launches()

    def runs(self) -> Made:
        """How many pairs have the same destination, at the first of them; 0 at the others."""
        memory = self.begin(f"{self.name}_runs", ("keys", "numbers"), ("lengths",))
        b, e, lanes = self.b, self.e, 256
        grid = ceil_divide(self.count, lanes)
        base = b.program(0, grid) * lanes
        with e.tile(0, 1, 1, base, lanes, self.count) as (_, lane):
            at = b.broadcast(b.index(lane), (lanes,))
            one = b.constant(1, int64)
            key = e._load(memory["keys"], lane)
            none = b.constant(0, int64)
            left = b.apply("maximum", b.apply("subtract", at, one), none)
            before = b.gather(memory["keys"], left, e.lane_mask)
            first = b.apply("bit_or", b.apply("equal", at, none), b.apply("not_equal", before, key))
            first = b.apply("bit_and", first, b.apply("less_equal", b.constant(0, key.dtype), key))
            ends = [at, b.broadcast(b.index(self.count), (lanes,))]  # keys[0] <= key < keys[1]
            for _ in b.each("halve", 0, high(self.count).bit_length(), 1, ends):
                middle = b.apply("shift_right", b.apply("add", *ends), one)
                there = b.gather(memory["keys"], middle, e.lane_mask)
                same = b.apply("less_equal", there, key)
                ends[0] = b.apply("where", same, middle, ends[0])
                ends[1] = b.apply("where", same, ends[1], middle)
            length = b.apply("where", first, b.apply("subtract", ends[1], at), none)
            e.store(memory["lengths"], b.cast(length, int32), lane)
        return self.sheet.end((grid,), warps=4)

    # ---- runs taken by their owners -------------------------------------------------------

    def owned(self) -> Made:
        """Each run of equal destinations, by whoever has its first pair."""
        memory = self.begin(f"{self.name}_owned", ("keys", "numbers", "lengths"), state=True)
        if high(self.rest) >= WIDE:
            return self.owned_lines(memory)
        return self.owned_elements(memory)

    def split(self, key: Node) -> dict[int, Size]:
        """A destination as places by axis."""
        to = self.b.atom("to", key, 0, max(1, high(product(self.indexed)) - 1))
        if key.shape:
            self.e.lane_atoms.add(to)  # type: ignore[arg-type]
        return dict(zip(self.axes, unravel(to, self.indexed)))

    def owned_lines(self, memory: dict[str, Node]) -> Made:
        """A program for each pair and block of unindexed elements."""
        b, e = self.b, self.e
        lanes = min(1024, power_of_two(high(self.span)))
        grid, at, head, base = self.cut(lanes, self.count)
        length = b.cast(b.load(memory["lengths"], (at,)), int64)
        longest = b.atom("length", length, 0, high(self.count))
        with b.when(b.apply("less", b.constant(0, int64), length)):
            key = b.cast(b.load(memory["keys"], (at,)), int64)
            positions = self.split(key)
            with e.tile(0, 1, 1, base, lanes, self.span) as (_, lane):
                inner = self.inner(lane, head)
                where = self.offset(positions, inner)
                total = [b.cast(e._load(memory["state"], where), wide(self.value.dtype))]
                start, bounds = longest - 1 if self.mode == "set" else 0, (0, high(self.count) - 1)
                for t in b.each("t", start, longest, 1, total, 4, bounds):
                    with e.scope():
                        x = self.read(self.number(memory, at + t), inner)
                        total[0] = b.broadcast(self.combine(total[0], x), (lanes,))
                e.store(memory["state"], total[0], where)
        return self.sheet.end((grid,), warps=max(1, min(8, lanes // (8 * WARP))))

    def number(self, memory: dict[str, Node], at: Size) -> Size:
        """The index number at a place in the order."""
        node = self.b.cast(self.e._load(memory["numbers"], at), int64)
        found = self.b.atom("number", node, 0, max(1, high(self.count) - 1))
        if node.shape:
            self.e.lane_atoms.add(found)  # type: ignore[arg-type]
        return found

    def owned_elements(self, memory: dict[str, Node]) -> Made:
        """Tiles over (pairs, unindexed elements) in one line: as many turns as the longest run."""
        b, e, lanes = self.b, self.e, 256
        total = self.count * self.rest
        grid = ceil_divide(total, lanes)
        base = b.program(0, grid) * lanes
        with e.tile(0, 1, 1, base, lanes, total) as (_, lane):
            at, inner = floor_divide(lane, self.rest), self.inner(modulo(lane, self.rest))
            length = b.broadcast(b.cast(e._load(memory["lengths"], at), int64), (lanes,))
            owns = b.apply("less", b.constant(0, int64), length)
            key = b.cast(e._load(memory["keys"], at), int64)
            key = b.apply("maximum", key, b.constant(0, int64))
            where = self.offset(self.split(key), inner)
            longest = b.atom(
                "longest", b.add(tile_ops.reduce(length, axis=0, kind="max")), 0, high(self.count)
            )
            old = b.cast(e._gathered(memory["state"], where, owns), wide(self.value.dtype))
            found = [b.broadcast(old, (lanes,))]
            for t in b.each("t", 0, longest, 1, found, bounds=(0, high(self.count) - 1)):
                with e.scope():
                    live = b.apply("less", b.index(t), length)
                    spot = b.apply("add", b.index(at), b.index(t))
                    spot = b.apply("where", live, spot, b.constant(0, int64))
                    place = b.atom("spot", spot, 0, max(1, high(self.count) - 1))
                    e.lane_atoms.add(place)  # type: ignore[arg-type]
                    new = self.combine(found[0], self.read(self.number(memory, place), inner))
                    found[0] = b.apply("where", live, new, found[0])
            e.store(memory["state"], found[0], where, owns)
        return self.sheet.end((grid,), warps=4)
