"""Reductions by rows: rows that fit are held in registers, longer ones are swept by a loop.

*Held*: a program takes one row, or several short ones, as one tile; every stage works on it, so
memory is read once and written once. *Swept*: see `sweep`. *Streamed*: see `stream`. *Split*: few
long rows are cut into parts, whose partial results a second launch combines.

Invariant: a row's sums are added in an order that depends on shapes and the Target alone, and at
the level `invariant` on the length of the row alone: held by itself, or swept.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.config import invariant
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, floor_divide, high, minimum, modulo, named
from ...ir.types import Array, Memory, product
from ...tile import ops as tile_ops
from ...tile.build import Body
from ..access import unravel
from ..evaluate import wide
from ..space import KINDS, identity, reduce_index
from .space import WARP, Roles, plain_reads, turned_reads
from .stream import ThreadStream
from .sweep import Walk
from .tiles import power_of_two

HELD = 16384  # most elements of a row that is held
EACH = 16  # elements of a tile that a thread holds


class ThreadRows(ThreadStream):
    """Lowers Regions whose reductions run over trailing axes."""

    def by_rows(self) -> list[tuple[Body, Roles]]:
        """Held, split or swept."""
        rows, columns = self.group.rows, self.group.columns
        assert rows is not None
        if high(columns) <= HELD:
            return self.held(rows, columns)
        if invariant():
            return self.swept(rows, columns)
        parts = self.row_parts(rows, columns)
        if parts > 1:
            return self.split(rows, columns, parts)
        stream = self.plan_stream(rows, columns)
        return self.swept(rows, columns) if stream is None else self.streamed(stream)

    # ---- held -----------------------------------------------------------------------------

    def held(self, rows: Size, columns: Size) -> list[tuple[Body, Roles]]:
        """Rows as one tile, all stages on it."""
        self.begin(self.name)
        lanes = power_of_two(high(columns))
        each = EACH if self.many_reads() <= 3 and not invariant() else EACH // 2
        many = self.rows_held(high(rows), lanes, each)
        self.each = each
        middle = self.middle_of(rows, many, lanes)
        many = min(many, power_of_two(high(middle)))
        blocks = ceil_divide(middle, many)
        grid = floor_divide(rows, middle) * blocks
        p = self.b.program(0, grid)
        outer, base = floor_divide(p, blocks) * middle, modulo(p, blocks) * many
        with self.e.tile(base, many, middle, 0, lanes, columns) as (at, lane):
            row = outer + at
            self.load_first(row, lane)
            for stage in range(1, self.stages() + 1):
                self.reduce_stage(stage, row, lane)
            self.write_all(row, lane)
        threads = self.threads_for(many * lanes, each)
        return [self.end((grid,), threads // WARP, self.roles())]

    def load_first(self, row: Size, lane: Size) -> None:
        """Ask for the whole row before the first reduction makes threads wait. What all rows
        share comes after the reductions: it is near, and would take registers from other rows."""
        if self.many_reads() > 3:
            return
        starts = [(v.inputs[0], reduce_index(v, row, lane)) for v in self.reduces]
        starts += [(v, self.index_at(v, row, lane)) for v in self.group.stored]
        for node, index in plain_reads(starts, self.inputs):
            if product(node.shape) in (self.group.total, self.group.rows):
                self.e.value(node, index)

    def rows_held(self, rows: int, lanes: int, each: int) -> int:
        """Rows of a program: several where they are short, or where reads run across them."""
        most = power_of_two(max(1, rows))
        if invariant():
            return 1  # how a tile lies in threads sets the order of its sums
        if self._across() and lanes <= 1024:
            return min(most, 16 if lanes > 64 else 32)
        if lanes > WARP * each:
            return 1
        many = min(most, max(1, 4 * WARP * each // lanes))
        while many > 1 and rows < self.programs_wanted() // 2 * many:
            many //= 2
        return many

    def _across(self) -> bool:
        """Whether something is contiguous along the rows and not along the columns."""
        group = self.group
        if group.rows is None or high(group.rows) < 4 or high(group.columns) < 4:
            return False
        row = named("loop", "row", 0, high(group.rows) - 1)
        lane = named("loop", "lane", 0, high(group.columns) - 1)
        starts = [(v.inputs[0], reduce_index(v, row, lane)) for v in self.reduces]
        return bool(turned_reads(starts, self.inputs, row, lane))

    def reduce_stage(self, stage: int, row: Size, lane: Size) -> None:
        """All reductions of a stage over a tile."""
        found = [v for v in self.reduces if self.levels[v] == stage]
        values = [(v, self.e.value(v.inputs[0], reduce_index(v, row, lane))) for v in found]
        self.bind_totals(row, [(v, x) for v, x in values if v.op is not ops.argmax])
        for v, x in values:
            if v.op is ops.argmax:
                x, place = (self.b.broadcast(i, self.e.full) for i in (x, self.b.index(lane)))
                best = self.first_largest(x, place, self.e.inside(), len(self.e.full) - 1)
                self.e.bind(v, unravel(row, v.shape), best)

    def bind_totals(self, row: Size, values: Sequence[tuple[Node, Node]]) -> None:
        """Sums and the like of tiles, side by side: threads may meet once for all of them."""
        filled = [(v, self.filled(v, x)) for v, x in values]
        totals = [(v, self.along(x, KINDS[v.op])) for v, x in filled]
        for v, total in totals:
            total = self.e.column(total) if len(total.shape) == 1 else total
            self.e.bind(v, unravel(row, v.shape), self.e.settled(total, v))

    def filled(self, node: Node, x: Node) -> Node:
        """A whole tile in which what is outside changes nothing."""
        x, mask = self.b.broadcast(x, self.e.full), self.e.inside()
        if mask is None:
            return x
        nothing = self.b.constant(identity(KINDS[node.op], x.dtype), x.dtype)
        return self.b.apply("where", mask, x, nothing)

    def along(self, x: Node, kind: str) -> Node:
        """One axis of a tile reduced: the last one."""
        if not x.shape or (self.e.row is not None and self.e.lane is None):
            return x  # (rows, 1): nothing to add up
        return self.b.add(tile_ops.reduce(x, axis=len(x.shape) - 1, kind=kind))

    # ---- split ----------------------------------------------------------------------------

    def row_parts(self, rows: Size, columns: Size) -> int:
        """Into how many parts each row is cut: 1 unless rows are few and one walk is all."""
        plain = all(v.op is not ops.argmax and self.levels[v] == 1 for v in self.reduces)
        level = all(self.is_row_level(v) for v in self.group.stored)
        if not plain or not level or self.inner != columns or not isinstance(columns, int):
            return 1
        most = columns // HELD
        return max(1, min(most, self.programs_wanted() // 2 // max(1, high(rows)), 1024))

    def split(self, rows: Size, columns: Size, parts: int) -> list[tuple[Body, Roles]]:
        """Parts of rows into scratch, then a launch that combines them."""
        self.use_threads(16)
        unit = self.lanes
        length = -(-high(columns) // (parts * unit)) * unit
        parts = -(-high(columns) // length)
        types = [Array((rows * parts,), wide(v.inputs[0].dtype)) for v in self.reduces]
        first = self.first_parts(rows, columns, parts, length, types)
        return [first, self.last_parts(rows, parts, types)]

    def scratch_roles(self, types: Sequence[Array]) -> Roles:
        """Roles of partial results: each has a Slot of its own."""
        return [("scratch", (t, f"part{n}")) for n, t in enumerate(types)]

    def first_parts(
        self, rows: Size, columns: Size, parts: int, length: int, types: Sequence[Array]
    ) -> tuple[Body, Roles]:
        """A part of a row a program."""
        after = [
            (f"part{n}", Memory(t.shape, t.dtype, "global", "result")) for n, t in enumerate(types)
        ]
        places = self.begin(f"{self.name}_parts", results=False, after=after)
        p = self.b.program(0, rows * parts)
        row = floor_divide(p, parts)
        start = modulo(p, parts) * length
        stop = minimum(start + length, columns)
        walk = Walk(row, columns, self.reduces)
        self.finish_walk(walk, self.sweep(walk, start, stop, self.start_walk(walk)))
        for v, place in zip(self.reduces, places):
            self.e.store(place, self.e.value(v, unravel(row, v.shape)), p)
        roles = self.roles(results=False) + self.scratch_roles(types)
        return self.end((rows * parts,), self.warps, roles)

    def last_parts(self, rows: Size, parts: int, types: Sequence[Array]) -> tuple[Body, Roles]:
        """The parts of a row combined, and what follows from them."""
        extra = [(f"part{n}", Memory(t.shape, t.dtype)) for n, t in enumerate(types)]
        places = self.begin(f"{self.name}_whole", extra)
        row = self.b.program(0, rows)
        lanes = power_of_two(parts)
        with self.e.tile(row, 1, rows, 0, lanes, parts) as (_, lane):
            at = row * parts + lane
            self.bind_totals(
                row, [(v, self.e._load(place, at)) for v, place in zip(self.reduces, places)]
            )
            self.row_results(row, 1)
        given = self.roles()
        roles = given[: len(self.reads)] + self.scratch_roles(types) + given[len(self.reads) :]
        return self.end((rows,), self.threads_for(lanes, 4) // WARP, roles)
