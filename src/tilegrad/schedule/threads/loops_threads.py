"""Lower a Region of elementwise values and reductions for a Target with blocks of threads.

Flat Regions are tiles of rows x lanes, a few vectors a thread: so a thread has several independent
loads in flight, and the grid covers the machine several times. Invariant: the Bodies together
compute what the Region stores, each element once, and the order of every sum depends on shapes and
the Target alone.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, power_of_two
from ..access import MOVEMENT, Condition, Index, Place, atom_of, below, joined, moved, walk_down
from ..family import Bodies
from ..region import Region
from .pair import Pair, lower_pair
from .reductions import by_columns, by_rows
from .space_threads import WARP, ThreadPart, ThreadSpace

UNEVEN = 512  # rows below this are better cut without regard to rows than read off their vectors


def lower_loops(region: Region) -> Bodies:
    """The Bodies of a Region."""
    if isinstance(region, Pair):
        return lower_pair(region)
    space = ThreadSpace(region)
    space.settle(space.pick_inner())
    if space.reduces:
        return by_columns(space) if space.order == "column" else by_rows(space)
    if crooked(space.inner) and not space.turned() and not space.has_loaded_gather():
        space.settle(region.total)
    return FlatTiles(space, space.sheet(region.name)).lower()


def crooked(inner: Size) -> bool:
    """Whether rows are short and so uneven that no vector of theirs is aligned."""
    if not isinstance(inner, int):
        return high(inner) < 8
    return inner < 8 or (inner < UNEVEN and inner % 4 != 0)


# ---- flat ----------------------------------------------------------------------------------------

UNROLLED = 4096  # instructions of a thread, about: more elements at once would fill its registers
ASKED = 128  # registers of a thread that what it reads takes, at most


class FlatTiles(ThreadPart):
    """Lowers Regions without reductions."""

    def lower(self) -> Bodies:
        """Elementwise: tiles of rows x lanes."""
        space = self.space
        rows, inner = space.shape.row_count, space.inner
        many, lanes = self.flat_tile(rows, inner)
        pieces = self.pieces()
        if pieces > 1:
            inner = inner // pieces
            many, lanes = self.cut_tile(many * lanes // pieces, rows, inner)
            self.each //= pieces
        middle, many = space.middle_of(rows, many, lanes)
        row_blocks, blocks = ceil_divide(middle, many), ceil_divide(inner, lanes)
        sizes = (rows // middle, row_blocks, blocks)
        grid, (outer, row_block, block) = self.sheet.programs(*sizes)
        row, base = row_block * many, block * lanes

        def write(whole: bool) -> list[Node]:
            with self.e.tile(row, many, middle, base, lanes, inner, whole) as (at, lane):
                columns = [inner * k + lane for k in range(pieces)]
                self.write_all(outer * middle + at, *columns)
            return []

        fits = high(inner) <= lanes or inner % 16 == 0  # vectors are in or out: no mask costs
        if many == 1 and not fits:
            stop = base + lanes
            self.b.branch(self.b.less_equal(stop, inner), lambda: write(True), lambda: write(False))
        else:
            write(False)
        return [self.sheet.end(grid, warps=space.warps_for(many * lanes, self.each))]

    def flat_tile(self, rows: Size, inner: Size) -> tuple[int, int]:
        """(rows, lanes) of a program's tile; sets how many elements a thread has."""
        vector, total = self.space.vector(), high(rows * inner)
        sizes = [high(n.size) for n in self.space.reads]
        reads, whole = (sum(1 for s in sizes if s > least) for least in (vector, total // 2))
        self.each = min(32, vector * (4 if reads <= 1 else 2 if reads <= 3 and whole <= 1 else 1))
        cost, words = self.space.instructions(), self.space.words_read(rows, inner)
        while self.each > 1 and (self.each * cost > UNROLLED or self.each * words > ASKED):
            self.each //= 2
        size = 4 * WARP * self.each
        while self.each > vector and total < self.space.programs_wanted() * size:
            self.each, size = self.each // 2, size // 2
        turned = self.space.turned()
        if turned:
            side = 64 if max(n.dtype.size for n in turned) <= 2 else 32
            return (min(side, power_of_two(high(rows))), min(side, power_of_two(high(inner))))
        if high(rows) <= 1:
            return 1, min(size, power_of_two(high(inner)))
        if high(inner) >= 4 * WARP and self.space.has_loaded_gather():
            self.each = min(self.each, max(vector, power_of_two(high(inner)) // (4 * WARP)))
            return 1, min(size, power_of_two(high(inner)))
        return self.cut_tile(size, rows, inner)

    def cut_tile(self, size: int, rows: Size, inner: Size) -> tuple[int, int]:
        """(rows, lanes) of about `size` elements."""
        lanes = min(size, tight(high(inner)))
        return min(size // lanes, power_of_two(high(rows))), lanes

    def pieces(self) -> int:
        """Into how many equal pieces lines are cut so that each lies within one part of whatever
        is joined or padded along them; one thread then has an element of every piece, reads what
        several of them want once, and masks nothing. 1 where nothing is gained."""
        rows, vector = self.space.shape.row_count, self.space.vector()
        if (
            not isinstance(self.space.inner, int)
            or self.space.has_loaded_gather()
            or self.space.turned()
        ):
            return 1
        row = atom_of("row", rows)

        def undecided(count: int) -> int:
            size = self.space.inner // count
            lane = atom_of("lane", size)
            starts = [
                (v, self.space.index_at(v, row, lane + k * size))
                for v in self.space.region.stored
                for k in range(count)
            ]
            return open_conditions(starts, self.space.stored_reads)

        most = self.each // vector
        if most < 2 or self.space.inner < 4 * vector or not undecided(1):
            return 1
        for count in (2, 4, 8):
            whole = self.space.inner % (count * 2 * vector) == 0
            if count <= most and whole and not undecided(count):
                return count
        return 1


def tight(size: int) -> int:
    """A power of two of which few cover a size with little waste: at least a vector's worth."""
    whole = power_of_two(size)
    part = whole
    while part > 64 and -(-size // part) * part * 8 > size * 9:
        part //= 2
    return part if -(-size // part) * part * 16 < whole * 15 else whole


def open_conditions(starts: Sequence[Place], stored: Container[Node]) -> int:
    """How many conditions of padding and joining the bounds of the indices do not decide."""
    found: list[Condition] = []

    def step(node: Node, index: Index) -> Sequence[Place]:
        if node in stored:
            return ()
        if node.op in MOVEMENT:
            parts = [(node.inputs[0], *moved(node, index))]
        elif node.op is ops.concatenate:
            parts = [(x, at, [condition]) for x, at, condition in joined(node, index)]
        else:
            return below(node, index)
        met = [part for part in parts if not any(c.fails() for c in part[2])]
        found.extend(c for part in met for c in part[2] if not c.holds())
        return [(value, at) for value, at, _ in met]

    for _ in walk_down(starts, step):
        pass
    return len(found)
