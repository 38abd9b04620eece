"""Long rows that are read and written: a program takes many, and reads the next as it writes one.

A row that a program reduces and then writes (softmax, cross-entropy with its gradient) fills the
shared memory of a core, so no second program would fill the pauses. Here a program takes every
so-many-th row. While it writes a row from shared memory it puts the next one in its place, tile
by tile, and reduces it: memory reads and writes at all times, and everything is read once. Of a
row shared memory holds the most; the rest of it stays in registers from its reduction to its
writing, where it is not longer than a turn. Tiles are asked for one turn ahead.

Cost of a row of n elements: n read, n written; 2 meetings of the threads for each stage.

Invariant: which rows a program takes, and so the order of every sum, depends on shapes and the
Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.node import Node
from ...ir.symbol import Size, high
from ..access import atom_of
from ..family import Bodies
from ..lines import Sweep
from .space_threads import ThreadSpace
from .sweep import Kept, Part, Sweeper, busy, lanes_of, reread, sweeps_of
from .tiles import ThreadSheet, ask, have, lane_numbers

TILES = 4  # of a turn
WARPS = 16  # of a program: half the threads a core has, so that each has twice the registers
SPARE = 3 << 10  # bytes of shared memory that are left to reductions
LEAST_ROWS = 2  # rows of a program

Raw = list[list[Node]]  # for each tile the reads that are kept, as they lie in memory


def plan_stream(space: ThreadSpace, rows: Size, columns: Size) -> Kept | None:
    """What is kept, where rows are many and so long that one takes most of a core."""
    shared = space.target.memories["shared"].bytes
    if not isinstance(rows, int) or not isinstance(columns, int):
        return None
    if space.inner != columns or rows < LEAST_ROWS * space.target.cores:
        return None
    row, lane = (atom_of(name, size) for name, size in (("row", rows), ("lane", columns)))
    lanes = lanes_of(space, WARPS)
    found = busy(sweeps_of(space, row, lanes))
    if len(found) != 2 or found[0].writes or found[1].reduces:
        return None
    reads = reread(found, lane)
    step, each = TILES * lanes, sum(n.dtype.size for n, _ in reads)
    if not reads or 2 * columns * each <= shared:
        return None
    size = min((shared - SPARE) // each, columns) // step * step
    if size < 2 * step or 2 * size < columns:
        return None
    return Kept(size, (row, lane), reads)


class StreamedRows(Sweeper):
    """Lowers Regions of long rows that one sweep reduces and another writes."""

    def __init__(self, space: ThreadSpace, sheet: ThreadSheet, kept: Kept) -> None:
        super().__init__(space, sheet, WARPS, kept)
        self.rows, self.columns = high(space.region.row_count), high(space.region.columns)
        self.values: list[Node] = []  # of the row that is about to end, and what is left of it
        self.rest: Raw = []

    def lower(self) -> Bodies:
        """Every so-many-th row a program."""
        b, rows = self.b, self.rows
        programs = -(-rows // -(-rows // self.space.target.cores))  # as many rows for each
        p = b.program(0, programs)
        first = self.sweeps_at(p)[0]
        self.kept.allocate(b)
        with self.e.scope():
            values = self.start(first)
            self.width, found = len(values), self.fill(first, values)
        bounds = (0, rows - 1 - programs)
        for row in b.each("row", p, rows - programs, programs, found, bounds=bounds):
            with self.e.scope():
                after = self.sweeps_at(row + programs)[0]
                ahead = self.asked(after, 0, TILES)
                second = self.end_row(row, found)
                found[:] = self.exchange(second, after, self.start(after), ahead)
        whole = (rows - 1 - p) // programs
        last = whole * programs + p
        second = self.end_row(last, found)
        self.empty(second)
        return [self.sheet.end(programs, warps=WARPS, resident=1)]

    def sweeps_at(self, row: Size) -> list[Sweep]:
        """The two sweeps over a row."""
        return busy(sweeps_of(self.space, row, self.lanes))

    # ---- tiles ----------------------------------------------------------------------------

    def left(self) -> tuple[int, int]:
        """How many tiles of a row are not in shared memory, and how many of those are whole."""
        rest = self.columns - self.kept.size
        return -(-rest // self.lanes), rest // self.lanes

    def asked(self, sweep: Sweep, base: Size, count: int, whole: int = TILES) -> Raw:
        """Tiles of a row from memory."""
        found = []
        for k in range(count):
            with self.tile(sweep, base + k * self.lanes, self.columns, k < whole) as (_, lane):
                found.append(ask(self.e, self.kept.at(sweep.row, lane)))
        return found

    def asked_rest(self, sweep: Sweep) -> Raw:
        """What shared memory does not hold of a row, where registers do."""
        count, whole = self.left()
        return self.asked(sweep, self.kept.size, count, whole) if count <= TILES else []

    def take_tile(self, sweep: Sweep, at: Size, whole: bool, values: Sequence[Node]) -> list[Part]:
        """What a sweep does with one tile that is there."""
        with self.tile(sweep, at, self.columns, whole) as (_, lane):
            have(self.e, self.kept.at(sweep.row, lane), values)
            return self.taken(sweep, lane)

    def take_tiles(
        self, sweep: Sweep, base: Size, whole: int, tiles: Raw, values: list[Node]
    ) -> list[Node]:
        """Accumulators with tiles that are there taken in."""
        starts = (base + k * self.lanes for k in range(len(tiles)))
        parts = [
            self.take_tile(sweep, at, k < whole, tile)
            for k, (at, tile) in enumerate(zip(starts, tiles))
        ]
        return self.combine_parts(sweep, parts, values)

    def keep_tiles(self, base: Size, tiles: Raw) -> None:
        """Tiles of a turn into shared memory."""
        for k, tile in enumerate(tiles):
            for place, x in zip(self.kept.held, tile):
                self.b.store(place, x, (base + k * self.lanes,))

    def kept_tiles(self, base: Size) -> Raw:
        """Tiles of a turn from shared memory."""
        starts = (base + k * self.lanes for k in range(TILES))
        return [[self.b.load(p, (at,), (self.lanes,)) for p in self.kept.held] for at in starts]

    def write_tiles(self, sweep: Sweep, base: Size, tiles: Raw, whole: int = TILES) -> None:
        """What a sweep writes of tiles that are there. Where it asks which lane is at a place, it
        is asked in the turn that has the place: in all others no lane is."""

        def write(outside: bool) -> list[Node]:
            self.e.outside = outside
            for k, tile in enumerate(tiles):
                self.take_tile(sweep, base + k * self.lanes, k < whole, tile)
            self.e.outside = False
            return []

        near = self.has_place(sweep, base, len(tiles))
        if near is None:
            write(False)
        else:
            self.b.branch(near, lambda: write(False), lambda: write(True))

    def has_place(self, sweep: Sweep, base: Size, count: int) -> Node | None:
        """Whether some tiles have a place that a sweep compares with; None where it does not."""
        b, e, found = self.b, self.e, None
        with self.tile(sweep, base, self.columns, True) as (_, lane):
            numbers = [
                number
                for node, index in sweep.expressions(lane)
                for number in lane_numbers(e, node, index)
            ]
        for number in numbers:
            past = b.apply("less_equal", 0, number)
            inside = b.apply("bit_and", past, b.apply("less", number, count * self.lanes))
            found = inside if found is None else b.apply("bit_or", found, inside)
        return found

    def tiles_of(self, flat: Sequence[Node]) -> Raw:
        """Tiles as a loop carries them."""
        width = len(self.kept.held)
        return [list(flat[i : i + width]) for i in range(0, len(flat), width)]

    # ---- rows -----------------------------------------------------------------------------

    def fill(self, sweep: Sweep, values: list[Node]) -> list[Node]:
        """The first row: into shared memory, reduced; its rest asked for. Gives the accumulators
        and the rest, as a loop carries them."""
        for base in self.b.each("i", 0, self.kept.size, TILES * self.lanes, values):
            with self.e.scope():
                tiles = self.asked(sweep, base, TILES)
                self.keep_tiles(base, tiles)
                values[:] = self.take_tiles(sweep, base, TILES, tiles, values)
        return [*values, *_flat(self.asked_rest(sweep))]

    def end_row(self, row: Size, carried: list[Node]) -> Sweep:
        """Reduce and write what shared memory does not hold of a row, with what the row has one
        of; gives the sweep that writes the others."""
        found = sweeps_of(self.space, row, self.lanes)
        self.ask_row(found)
        self.values, rest = carried[: self.width], carried[self.width :]
        self.rest = self.tiles_of(rest)
        self.over_row(row, found)
        return next(w for _, w in found if w.writes)

    def swept(self, sweep: Sweep) -> list[Node]:
        """Accumulators after the rest of a row."""
        start, (base, whole) = self.start(sweep), (self.kept.size, self.left()[1])
        values = self.values if sweep.reduces else start  # of what is the same for the whole row
        if not self.rest:
            sweep.tiles = TILES
            return self.sweep(sweep, base, self.columns, values)
        if sweep.reduces:
            return self.take_tiles(sweep, base, whole, self.rest, values)
        self.write_tiles(sweep, base, self.rest, whole)
        return values

    def exchange(self, writes: Sweep, sweep: Sweep, values: list[Node], ahead: Raw) -> list[Node]:
        """Write a row from shared memory and put the next one there, which a sweep reduces."""
        count, step = self.width, TILES * self.lanes
        found = [*values, *_flat(ahead)]

        def trip(base: Size, last: bool) -> None:
            with self.e.scope():
                tiles = self.tiles_of(found[count:])
                new = self.asked_rest(sweep) if last else self.asked(sweep, base + step, TILES)
                old = self.kept_tiles(base)
                self.keep_tiles(base, tiles)
                self.write_tiles(writes, base, old)
                taken = self.take_tiles(sweep, base, TILES, tiles, found[:count])
                found[:] = [*taken, *_flat(new)]

        end = self.kept.size - step
        for base in self.b.each("i", 0, end, step, found):
            trip(base, False)
        trip(end, True)
        return found

    def empty(self, writes: Sweep) -> None:
        """Write the last row from shared memory."""
        for base in self.b.each("i", 0, self.kept.size, TILES * self.lanes):
            with self.e.scope():
                self.write_tiles(writes, base, self.kept_tiles(base))


def _flat(tiles: Raw) -> list[Node]:
    return [x for tile in tiles for x in tile]
