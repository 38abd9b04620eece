"""Reductions for blocks of threads, by rows and by columns.

By rows: *Held*: a program takes one row, or several short ones, as one tile; every stage works on
it, so memory is read once and written once. *Swept*: see `sweep`. *Streamed*: see `stream`.
*Split*: few long rows are cut into parts, whose partial results a second launch combines.

By columns: a program takes a block of neighbouring results and sweeps the reduced axis a tile at a
time with the accumulators in registers; the rows of the tile are added up at the end. Where there
are few results the reduced axis is cut into parts as well: partial results go to scratch and a
second launch adds them, part by part in order.

Invariant: sums are added in an order that depends on shapes and the Target alone, those of a row at
the level `invariant` on its length alone: held by itself, or swept; no atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.config import invariant
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, minimum, power_of_two
from ...tile.numeric import identity
from ..access import Place, unravel
from ..family import Bodies, Made
from ..lines import Accumulators, Reductions, Sweep
from ..space import KINDS, reduce_index
from .space_threads import WARP, ThreadPart, ThreadSpace, parts_of, plain_reads
from .stream import StreamedRows, plan_stream
from .sweep import WARPS, Kept, Sweeper, lanes_of, swept
from .tiles import ThreadSheet

HELD = 16384  # most elements of a row that is held
COSTLY = 100  # instructions of an element of which a thread with half the registers holds few
EACH = 16  # elements of a tile that a thread holds
MANY = 3  # words of each that it reads before it computes, at most


def by_rows(space: ThreadSpace) -> Bodies:
    """Held, split, streamed or swept."""
    rows, columns = space.region.row_count, space.region.columns
    if high(columns) <= HELD >> (3 if space.room() < EACH else space.instructions() >= COSTLY):
        return held(space, rows, columns)
    if invariant():
        return swept(space, rows)
    parts = row_parts(space, rows, columns)
    if parts > 1:
        return split(space, rows, columns, parts)
    kept = plan_stream(space, rows, columns)
    if kept is None:
        return swept(space, rows)
    return StreamedRows(space, space.sheet(space.name), kept).lower()


# ---- held ---------------------------------------------------------------------------------------


def held(space: ThreadSpace, rows: Size, columns: Size) -> Bodies:
    """Rows as one tile, all stages on it."""
    sheet = space.sheet(space.name, constants=space.region.constants)
    lanes = power_of_two(high(columns))
    few = high(rows) <= space.target.cores  # threads wait for one another more than for work
    each = EACH << few if space.words_read(rows, columns) <= MANY and not invariant() else EACH // 2
    many = rows_held(space, high(rows), lanes, each)
    middle, many = space.middle_of(rows, many, lanes)
    blocks = ceil_divide(middle, many)
    grid, (outer, block) = sheet.programs(rows // middle, blocks)
    with sheet.e.tile(block * many, many, middle, 0, lanes, columns) as (at, lane):
        row, tile = outer * middle + at, HeldRows(space, sheet)
        tile.load_first(row, lane)
        tile.reduce_stages(row, lane)
        tile.write_all(row, lane)
    return [sheet.end(grid, warps=space.warps_for(many * lanes, each))]


def rows_held(space: ThreadSpace, rows: int, lanes: int, each: int) -> int:
    """Rows of a program: several where they are short, or where reads run across them."""
    most = power_of_two(rows)
    if invariant():
        return 1  # how a tile lies in threads sets the order of its sums
    if space.turned() and lanes <= 1024:
        return min(most, 16 if lanes > 64 else 32)
    if lanes > WARP * each:
        return 1
    many = min(most, 4 * WARP * each // lanes)
    while many > 1 and rows < space.programs_wanted() // 2 * many:
        many //= 2
    return many


class HeldRows(ThreadPart):
    """Reductions of rows that are one tile."""

    def load_first(self, row: Size, lane: Size) -> None:
        """Ask for the whole row before the first reduction makes threads wait, for constants
        before all else: the launch before need not have ended. What many rows share comes after
        the reductions: it is near, and would take registers from other rows."""
        region, found = self.space.region, self.reads_at(row, lane)
        if self.space.words_read(region.row_count, region.columns) > MANY:
            return
        for node, index in sorted(found, key=lambda place: place[0] not in region.constants):
            if node in region.constants or node.size in (region.total, region.rows):
                self.e.value(node, index)

    def reads_at(self, row: Size, lane: Size) -> list[Place]:
        """What is read at a row without a guard."""
        return plain_reads(self.starts_at(row, lane), self.space.stored_reads)

    def starts_at(self, row: Size, lane: Size) -> list[Place]:
        """What is evaluated at a row."""
        space = self.space
        return space.expressions_at(space.reduces, space.region.stored, row, lane)

    def reduce_stages(self, row: Size, lane: Size) -> None:
        """All reductions, a stage after the other; sums and the like of a stage side by side:
        threads may meet once for all of them."""
        sums, last = Accumulators(self.b, self.space.region.columns != 0), len(self.e.full) - 1
        for stage in range(1, self.space.stages() + 1):
            found = self.space.at_stage(stage)
            values = [(v, self.e.value(v.inputs[0], reduce_index(v, row, lane))) for v in found]
            filled = [(v, self.filled(v, x)) for v, x in values if v.op is not ops.argmax]
            totals = [(v, sums.total(v, x, last)) for v, x in filled]
            for v, total in totals:
                total = self.e.column(total) if len(total.shape) == 1 else total
                self.e.bind(v, unravel(row, v.shape), self.e.settled(total, v))
            for v, x in values:
                if v.op is ops.argmax:
                    x, place = (self.b.broadcast(i, self.e.full) for i in (x, self.b.index(lane)))
                    best = sums.first_largest(x, place, self.e.inside(), last)
                    self.e.bind(v, unravel(row, v.shape), best)

    def filled(self, node: Node, x: Node) -> Node:
        """A whole tile in which what is outside changes nothing."""
        x = self.b.broadcast(x, self.e.full)
        return self.b.where(self.e.inside(), x, identity(KINDS[node.op], x.dtype))


# ---- split --------------------------------------------------------------------------------------


def row_parts(space: ThreadSpace, rows: Size, columns: Size) -> int:
    """Into how many parts each row is cut: 1 unless rows are few and one sweep is all."""
    per_row = all(space.is_per_row(v) for v in space.region.stored)
    if not per_row or space.inner != columns or not isinstance(columns, int):
        return 1
    if not space.in_one_stage():
        return 1
    most = columns // HELD
    return max(1, min(most, space.programs_wanted() // 2 // max(1, high(rows)), 1024))


def split(space: ThreadSpace, rows: Size, columns: Size, parts: int) -> Bodies:
    """Parts of rows into scratch, one a program, then a launch that combines them."""
    length, parts = in_parts(columns, parts, lanes_of(space, WARPS))
    sheet = space.parts_sheet(space.reduces, rows * parts)
    grid, (row, part) = sheet.programs(rows, parts)
    start = part * length
    stop = minimum(start + length, columns)
    sweep, sweeper = Sweep(space, row, columns, space.reduces), Sweeper(space, sheet, WARPS, Kept())
    sweeper.finish(sweep, sweeper.sweep(sweep, start, stop, sweeper.start(sweep)))
    sheet.store_parts(space.reduces, row, part * rows + row)
    return [sheet.end(grid, warps=WARPS), sum_parts(space, rows, parts)]


def in_parts(count: Size, parts: int, unit: int) -> tuple[int, int]:
    """How long parts are, a multiple of a unit, and how many of about so many there are then."""
    length = -(-high(count) // (parts * unit)) * unit
    return length, -(-high(count) // length)


# ---- by columns ----------------------------------------------------------------------------------

LINE = 256  # bytes of neighbouring results that a program reads at once, at least


def by_columns(space: ThreadSpace) -> Bodies:
    """One launch, or parts and a launch that adds them."""
    results, count = space.region.row_count, space.region.columns
    block = min(power_of_two(high(space.inner)), max(32, 2 * LINE * space.vector() // 16))
    deep = max(2, min(8 * WARP * EACH // block, power_of_two(high(count))))
    programs = high(results // space.inner) * -(-high(space.inner) // block)
    parts = 1
    if space.in_one_stage():
        most = high(count) // (4 * deep)
        parts = max(1, min(most, space.programs_wanted() // max(1, programs), 256))
    length = count
    if parts > 1:
        length, parts = in_parts(count, parts, deep)
    split = parts > 1
    sheet = space.parts_sheet(space.reduces, results * parts) if split else space.sheet(space.name)
    grid = Columns(space, sheet, block, deep).programs(length, parts)
    first = sheet.end(grid, warps=space.warps_for(block * deep, EACH))
    return [first, sum_parts(space, results, parts)] if split else [first]


def sum_parts(space: ThreadSpace, results: Size, parts: int) -> Made:
    """Partial results of rows or columns combined, and what follows from them: a block of results
    a program, parts tile by tile."""
    left = parts_of(space.reduces, results * parts, "value")
    sheet = space.sheet(f"{space.name}_whole", left)
    b, e, block = sheet.b, sheet.e, min(32, power_of_two(high(results)))
    deep = min(power_of_two(parts), max(64, 1024 // block))
    columns = Columns(space, sheet, block, deep)
    grid = ceil_divide(results, block)
    base = b.program(0, grid) * block
    with e.vector(base, block, results) as lane:
        totals = columns.sums.starts(space.reduces, (deep, block))
        for at, whole in b.steps("part", 0, parts, deep, totals):
            # only what is left is masked: other loads do not wait on each other
            size = at + deep if whole else parts
            with e.tile(at, deep, size, base, block, results) as (part, own):
                offset = part * results + own
                loaded = [e._load(place, offset) for place in sheet.others.values()]
                for n, (v, x) in enumerate(zip(space.reduces, loaded)):
                    (totals[n],) = columns.sums.take(v, x, x, e.inside(), [totals[n]])
        columns.bind(space.reduces, lane, totals)
        columns.write_rows(space.region.stored, lane)
    return sheet.end(grid, warps=space.warps_for(deep * block, EACH))


class Columns(Reductions, ThreadPart):
    """Tiles of `deep` reduced elements by a `block` of neighbouring results."""

    def __init__(self, space: ThreadSpace, sheet: ThreadSheet, block: int, deep: int) -> None:
        super().__init__(space, sheet, deep)
        self.block = block

    def programs(self, length: Size, parts: int) -> Size:
        """One program: its block of results over its part, so long, of the reduced axis."""
        space, count = self.space, self.space.region.columns
        results, inner = space.region.row_count, space.inner
        blocks = ceil_divide(inner, self.block)
        sizes = (results // inner, blocks, parts)
        grid, (outer, block, part) = self.sheet.programs(*sizes)
        base = block * self.block
        start, stop = (minimum(end * length, count) for end in (part, part + 1))
        with self.e.vector(base, self.block, inner) as lane:
            row = outer * inner + lane
            for stage in range(1, space.stages() + 1):
                self.reduce_part(space.at_stage(stage), row, outer, base, start, stop)
            if parts == 1:
                self.write_rows(space.region.stored, row)
            else:
                self.sheet.store_parts(space.reduces, row, part * results + row)
        return grid

    def reduce_part(
        self, reduces: Sequence[Node], row: Size, outer: Size, base: Size, start: Size, stop: Size
    ) -> None:
        """Take the reduced elements from start to stop and bind what the reductions gave."""
        b, e, inner, deep = self.b, self.e, self.space.inner, self.lanes
        span = stop - start
        middle = start + span // deep * deep

        def take(at: Size, size: Size, carried: list[Node]) -> list[Node]:
            with e.tile(at, deep, size, base, self.block, inner) as (column, lane):
                return self.feed(reduces, outer * inner + lane, column, carried)

        fresh = self.sums.starts(reduces, (deep, self.block))
        values = list(fresh)
        for _, first, last in self.over_lines(reduces, fresh, 1, (start, middle), values):
            for i in b.each("column", first, last, deep, values, 2):
                values[:] = take(i, i + deep, values)
        if span % deep != 0:
            for i in b.each("rest", middle, stop, deep, values):
                values[:] = take(i, stop, values)
        self.bind(reduces, row, values)

    def bind(self, reduces: Sequence[Node], row: Size, values: list[Node]) -> None:
        """Add up the rows of the accumulators and say what each reduction gave."""
        for v, x in self.combined(reduces, values).items():
            if x.shape == (1,):  # a block of one result is a scalar
                x = self.b.reshape(x, ())
            self.e.bind(v, unravel(row, v.shape), x)
