"""Lower `update` for blocks of threads: write values at indices of a state, in place.

Indices that are affine in the value's own index (from a loaded start on, too), or a single one,
touch each place at most once: tiles are written in any order. Other loaded indices may repeat.
Few of them are compared by whoever writes (`few`). More are put in order first: pairs of
(destination, number) sorted by destination, equal ones by number, by comparing all with all while
there are few enough, else by the sorting network. The lengths of runs of equal destinations are
found by bisection. Then the programs that hold the first of a run own its destination: they take
the run's values one after another, in the order of their numbers, and write the destination once.
No atomics. A destination is -1 where an index is out of range; nothing is written there.

Cost beside the values, which are read once, and the destinations, read and written once: n
indices are ranked by n * n comparisons spread over the machine while n is at most `RANKED`
(16384: 0.27e9 comparisons), above by the sorting network, log2(n)**2 / 2 passes over n pairs.

Invariant: 'set' keeps the last writer and 'add' adds in index order, whatever the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...core.dtype import DType, int32, int64
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum, power_of_two
from ...ir.types import Array, product
from .. import sheet as parameters
from ..access import Index, ravel, symbolic, unravel
from ..family import Bodies, Made
from ..region import Region
from ..update import Update, update_bodies
from .loops_threads import lower_loops
from .sort import LOCAL, Network, Pair, ScratchSort
from .space_threads import warps_for
from .tiles import ThreadSheet, TileEvaluator, Viewed

FEW_INDICES = 64  # indices that every program compares itself
FEWER = 256  # indices of single elements that are set by a program each
FEW_SET = 2048  # the same where the last one is all that counts
WIDE = 32  # unindexed elements from which a tile lies along them
RANKED = 1 << 15  # indices that are ranked by comparing all with all


class UpdateLowering(Update):
    """Lowers one update: its Bodies under construction, and where its values go."""

    sheet: ThreadSheet
    b: Viewed
    e: TileEvaluator

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.indexed = tuple(self.state.shape[a] for a in self.axes)
        after = max(self.axes, default=-1) + 1  # what follows lies in one piece in the state
        tail = product(self.state.shape[after:])
        self.span = tail if high(tail) >= WIDE else self.rest
        self.heads = self.rest // self.span if high(self.rest) else 1

    def lower(self) -> Bodies:
        """The Bodies in order."""
        if high(self.count) <= 1 or self.once():
            return [self.any_order()]
        size, lines = high(self.count), high(self.rest) >= WIDE
        most = FEW_INDICES if self.mode != "set" else FEW_SET if lines else FEWER
        if size <= most:
            return [self.few()]
        order = [self.ranks()] if size <= RANKED else self.sorts()
        return [*order, self.runs(), self.owned()]

    # ---- Bodies and scratch ---------------------------------------------------------------

    def begin(
        self, name: str, extra: Sequence[str] = (), writes: Sequence[str] = (), state: bool = False
    ) -> dict[str, Node]:
        """Start a Body over the reads, some scratch that is read or written, and the state."""
        given = parameters.reads(self.reads)
        for names, use in ((extra, "value"), (writes, "state")):
            given += parameters.scratch([(n, self.scratch(n)) for n in names], use)
        given += [parameters.state(self.state)] if state else []
        return self.write_to(ThreadSheet(name, given))

    def write_to(self, sheet: ThreadSheet) -> dict[str, Node]:
        """Go on with a Body that was begun; gives its scratch and the state."""
        self.scalars: dict[Node, Size] = {}
        self.sheet, self.b, self.e = sheet, sheet.b, sheet.e
        return sheet.others

    @property
    def key_dtype(self) -> DType:
        """Of destinations: how many there are decides."""
        return int32 if high(product(self.indexed)) < 1 << 31 else int64

    @property
    def padded(self) -> int:
        """Pairs, at a power of two where they are sorted."""
        return max(LOCAL, power_of_two(high(self.count)))

    def scratch(self, name: str) -> Array:
        """The type of one scratch: destinations and numbers in order, lengths of runs."""
        size: Size = self.count if high(self.count) <= RANKED else self.padded
        return Array((size,), self.key_dtype if name == "keys" else int32)

    # ---- where things go ------------------------------------------------------------------

    def probed(self, node: Node, index: Index) -> Size | None:
        """See `Update`: a start that is loaded does not matter."""
        return symbolic(node, index, self.values, lambda _: 0)

    def exact(self, node: Node, index: Index) -> Size | None:
        """An index that is affine in the value's own index, beside scalars that are loaded."""
        return symbolic(node, index, self.values, self.scalar)

    def scalar(self, node: Node) -> Size:
        """A loaded scalar as an index."""
        if node not in self.scalars:
            value = self.e.value(node, (0,) * len(node.shape))
            self.scalars[node] = self.e.place(value)
        return self.scalars[node]

    def destination(self, number: Size) -> Node:
        """The linear number of the place, -1 where it is outside."""
        found, inside = self.positions(number)
        linear = ravel([found[a] for a in self.axes], self.indexed)
        key = self.b.cast(self.b.index(linear), self.key_dtype)
        return self.b.where(inside, key, -1)

    def inner(self, lane: Size, head: Size = 0) -> Index:
        """The index of an unindexed element, by its number in a span."""
        return unravel(head * self.span + lane, self.value.shape[self.rank :])

    def cut(self, lanes: int, rows: Size) -> tuple[Size, Size, Size, Size]:
        """A program for each span, of so many rows, in blocks: (grid, row, head, base)."""
        sizes = (rows, self.heads, ceil_divide(self.span, lanes))
        grid, (row, head, block) = self.sheet.programs(*sizes)
        return grid, row, head, block * lanes

    # ---- each place once ------------------------------------------------------------------

    def any_order(self) -> Made:
        """Tiles of (indices, unindexed elements), or of indices alone."""
        memory = self.begin(self.name, state=True)["state"]
        alone = high(self.rest) == 1  # a tile of indices
        lines: Size = 1 if alone else self.count
        size = self.count if alone else self.span
        lanes = min(2048, power_of_two(high(size)))
        rows = min(2048 // lanes, power_of_two(high(lines)))
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
                    x = self.combine(self.old(where), x)
                    self.e.mask = None
                self.e.store(memory, x, where, each)

            if inside is not None and not inside.shape:
                self.b.branch(inside, write)
            else:
                write()
        return self.sheet.end(grid, warps=warps_for(rows * lanes))

    # ---- few indices ----------------------------------------------------------------------

    def few(self) -> Made:
        """A program for each index and block of unindexed elements; one of equal ones writes."""
        memory = self.begin(self.name, state=True)["state"]
        b, e, size = self.b, self.e, power_of_two(high(self.count))
        lanes = min(1024, power_of_two(high(self.span)))
        grid, at, head, base = self.cut(lanes, self.count)
        key = self.destination(at)
        with e.vector(0, size, self.count) as lane:
            order = (lane, at) if self.mode != "set" else (at, lane)  # the first counts, or last
            same = b.apply("equal", self.destination(lane), key)
            rival = b.logical_and(b.apply("bit_and", same, b.less(*order)), e.lane_mask)
            lost = b.reduce(b.broadcast(rival, (size,)), 0, "max")
        wins = b.apply("bit_and", b.apply("bit_not", lost), b.apply("less_equal", 0, key))
        positions, _ = self.positions(at)
        with b.when(wins), e.vector(base, lanes, self.span) as lane:
            inner = self.inner(lane, head)
            where = self.offset(positions, inner)
            x = self.read(at, inner)
            if self.mode != "set":
                x = self.take_equal(key, at, inner, where, lanes)
            e.store(memory, x, where)
        return self.sheet.end(grid, warps=warps_for(lanes))

    def take_equal(self, key: Node, at: Size, inner: Index, where: Size, lanes: int) -> Node:
        """What the state holds with the values of all equal destinations taken in."""
        b, e = self.b, self.e
        total = [b.broadcast(self.old(where), (lanes,))]

        def take(j: Size) -> list[Node]:
            with e.scope():
                return [b.broadcast(self.combine(total[0], self.read(j, inner)), (lanes,))]

        for j in b.each("j", at, self.count, 1, total):
            with e.scope():
                same = b.apply("equal", self.destination(j), key)
            total[:] = b.branch(same, partial(take, j), lambda: total)
        return total[0]

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
            for i, whole in b.steps("i", 0, self.count, lanes, found):
                with e.vector(i, lanes, i + lanes if whole else self.count) as lane:
                    other = [self.destination(lane), b.cast(b.index(lane), int32)]
                    ahead = Network(b, lanes, self.key_dtype).before(other, [key, number])
                    ahead = b.logical_and(ahead, e.lane_mask)
                found[0] = b.apply("add", found[0], b.cast(ahead, int32))
            rank = b.cast(b.reduce(found[0], 1, "sum"), int64)
            mask = None if e.row_mask is None else e.column(e.row_mask)
            b.scatter(memory["keys"], key, e.column(rank), mask)
            b.scatter(memory["numbers"], number, e.column(rank), mask)
        return self.sheet.end(grid, warps=8)

    def sorts(self) -> Bodies:
        """The same by a sorting network over pairs in scratch."""
        sort = ScratchSort(self.name, self.reads, 1, self.padded, self.key_dtype)
        sort.take = self.take
        return sort.launches()

    def take(self, sheet: ThreadSheet, net: Network, line: Size, start: Size) -> tuple[Pair, Node]:
        """Pairs of (destination, number); see `ScratchSort`."""
        self.write_to(sheet)
        b, e, numbers = sheet.b, sheet.e, net.numbers(start)
        with e.vector(start, net.size, self.count) as lane:
            key = b.broadcast(self.destination(lane), (net.size,))
            return [b.where(e.lane_mask, key, net.last()), numbers], numbers

    def runs(self) -> Made:
        """How many pairs have the same destination, at the first of them; 0 at the others."""
        memory = self.begin(f"{self.name}_runs", ("keys", "numbers"), ("lengths",))
        b, e, lanes = self.b, self.e, 256
        grid = ceil_divide(self.count, lanes)
        base = b.program(0, grid) * lanes
        with e.vector(base, lanes, self.count) as lane:
            at = b.broadcast(b.index(lane), (lanes,))
            key = e._load(memory["keys"], lane)
            before = e._load(memory["keys"], maximum(lane - 1, 0))
            first = b.apply("bit_or", b.apply("equal", at, 0), b.apply("not_equal", before, key))
            first = b.apply("bit_and", first, b.apply("less_equal", 0, key))
            ends = [at, b.broadcast(b.index(self.count), (lanes,))]  # keys[0] <= key < keys[1]
            for _ in b.each("halve", 0, high(self.count).bit_length(), 1, ends):
                middle = b.apply("shift_right", b.apply("add", *ends), 1)
                there = b.gather(memory["keys"], middle, e.lane_mask)
                same = b.apply("less_equal", there, key)
                ends[0] = b.where(same, middle, ends[0])
                ends[1] = b.where(same, ends[1], middle)
            length = b.where(first, b.apply("subtract", ends[1], at), 0)
            e.store(memory["lengths"], b.cast(length, int32), lane)
        return self.sheet.end(grid, warps=4)

    # ---- runs taken by their owners -------------------------------------------------------

    def owned(self) -> Made:
        """Each run of equal destinations, by whoever has its first pair."""
        memory = self.begin(f"{self.name}_owned", ("keys", "numbers", "lengths"), state=True)
        if high(self.rest) >= WIDE:
            return self.owned_lines(memory)
        return self.owned_elements(memory)

    def split(self, key: Node) -> dict[int, Size]:
        """A destination as places by axis."""
        to = self.e.atom("to", key, 0, max(1, high(product(self.indexed)) - 1))
        return dict(zip(self.axes, unravel(to, self.indexed)))

    def owned_lines(self, memory: dict[str, Node]) -> Made:
        """A program for each pair and block of unindexed elements."""
        b, e = self.b, self.e
        lanes = min(1024, power_of_two(high(self.span)))
        grid, at, head, base = self.cut(lanes, self.count)
        length = b.cast(b.load(memory["lengths"], (at,)), int64)
        longest = b.atom("length", length, 0, high(self.count))
        with b.when(b.apply("less", 0, length)):
            key = b.cast(b.load(memory["keys"], (at,)), int64)
            positions = self.split(key)
            with e.vector(base, lanes, self.span) as lane:
                inner = self.inner(lane, head)
                where = self.offset(positions, inner)
                total = [self.old(where)]
                start, bounds = longest - 1 if self.mode == "set" else 0, (0, high(self.count) - 1)
                for t in b.each("t", start, longest, 1, total, 4, bounds):
                    with e.scope():
                        x = self.read(self.number(memory, at + t), inner)
                        total[0] = b.broadcast(self.combine(total[0], x), (lanes,))
                e.store(memory["state"], total[0], where)
        return self.sheet.end(grid, warps=warps_for(lanes))

    def number(self, memory: dict[str, Node], at: Size) -> Size:
        """The index number at a place in the order."""
        node = self.b.cast(self.e._load(memory["numbers"], at), int64)
        return self.e.atom("number", node, 0, high(self.count) - 1)

    def owned_elements(self, memory: dict[str, Node]) -> Made:
        """Tiles over (pairs, unindexed elements) in one line: as many turns as the longest run."""
        b, e, lanes = self.b, self.e, 256
        total = self.count * self.rest
        grid = ceil_divide(total, lanes)
        base = b.program(0, grid) * lanes
        with e.vector(base, lanes, total) as lane:
            at, inner = lane // self.rest, self.inner(lane % self.rest)
            length = b.broadcast(b.cast(e._load(memory["lengths"], at), int64), (lanes,))
            owns = b.apply("less", 0, length)
            key = b.cast(e._load(memory["keys"], at), int64)
            key = b.apply("maximum", key, 0)
            where = self.offset(self.split(key), inner)
            longest = b.atom("longest", b.reduce(length, 0, "max"), 0, high(self.count))
            old = b.cast(e._gathered(memory["state"], where, owns), self.value.dtype.wide)
            found = [b.broadcast(old, (lanes,))]
            for t in b.each("t", 0, longest, 1, found, bounds=(0, high(self.count) - 1)):
                with e.scope():
                    live = b.apply("less", b.index(t), length)
                    spot = b.apply("add", b.index(at), b.index(t))
                    spot = b.where(live, spot, 0)
                    place = e.atom("spot", spot, 0, high(self.count) - 1)
                    new = self.combine(found[0], self.read(self.number(memory, place), inner))
                    found[0] = b.where(live, new, found[0])
            e.store(memory["state"], found[0], where, owns)
        return self.sheet.end(grid, warps=4)


def lower_update(region: Region) -> Bodies:
    """An update by blocks of threads."""
    return update_bodies(region, UpdateLowering, lower_loops)
