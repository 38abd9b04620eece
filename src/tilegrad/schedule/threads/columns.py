"""Reductions by columns: tiles of (some reduced elements) x (neighbouring results).

A program takes a block of neighbouring results and sweeps the reduced axis a tile at a time with
the accumulators in registers; the rows of the tile are added up at the end. Where there are few
results the reduced axis is cut into parts as well: partial results go to scratch and a second
launch adds them, part by part in order. Invariant: a result's sum is added in an order that
depends on shapes and the Target alone; no atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, floor_divide, high, minimum, modulo
from ...tile import ops as tile_ops
from ..access import unravel
from ..family import Bodies, Made
from ..lines import Reductions, blocked, shared_out
from ..problem import power_of_two
from .rows import EACH
from .space_threads import WARP, ThreadPart, ThreadSpace, parts_of
from .tiles import ThreadSheet

LINE = 256  # bytes of neighbouring results that a program reads at once, at least


def by_columns(space: ThreadSpace) -> Bodies:
    """One launch, or parts and a launch that adds them."""
    results, count = space.region.rows, space.region.columns
    assert results is not None
    block = min(power_of_two(high(space.inner)), max(32, 2 * LINE * space.vector() // 16))
    deep = max(1, min(8 * WARP * EACH // block, power_of_two(high(count))))
    warps = space.threads_for(block * deep, EACH) // WARP
    programs = high(floor_divide(results, space.inner)) * -(-high(space.inner) // block)
    parts = 1
    if all(v.op is not ops.argmax and space.levels[v] == 1 for v in space.reduces):
        most = high(count) // (4 * deep)
        parts = max(1, min(most, space.programs_wanted() // max(1, programs), 256))
    if parts == 1:
        sheet = space.sheet(space.name)
        grid = Columns(space, sheet, block, deep).programs(count, 1, None)
        return [sheet.end((grid,), warps=warps)]
    length = -(-high(count) // (parts * deep)) * deep
    parts = -(-high(count) // length)
    left = parts_of(space.reduces, results * parts, "result")
    sheet = space.sheet(f"{space.name}_parts", results=False, after=left)
    grid = Columns(space, sheet, block, deep).programs(count, parts, list(sheet.others.values()))
    return [sheet.end((grid,), warps=warps), sum_parts(space, results, parts)]


def sum_parts(space: ThreadSpace, results: Size, parts: int) -> Made:
    """Partial results added up: a block of results a program, all parts as one tile."""
    sheet = space.sheet(f"{space.name}_whole", parts_of(space.reduces, results * parts, "value"))
    b, e = sheet.b, sheet.e
    block, deep = min(32, power_of_two(high(results))), min(power_of_two(parts), 64)
    columns = Columns(space, sheet, block, deep)
    grid = ceil_divide(results, block)
    base = b.program(0, grid) * block
    with e.tile(0, 1, 1, base, block, results) as (_, lane):
        totals = columns.sums.starts(space.reduces, columns.tile_shape())
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
    return sheet.end((grid,), warps=space.threads_for(deep * block, EACH) // WARP)


class Columns(Reductions, ThreadPart):
    """Tiles of `deep` reduced elements by a `block` of neighbouring results."""

    def __init__(self, space: ThreadSpace, sheet: ThreadSheet, block: int, deep: int) -> None:
        super().__init__(space, sheet, deep)
        self.block, self.deep = block, deep

    def programs(self, count: Size, parts: int, partials: Sequence[Node] | None) -> Size:
        """One program: its block of results over its part of the reduced axis."""
        space = self.space
        results, inner = space.region.rows, space.inner
        assert results is not None
        blocks = ceil_divide(inner, self.block)
        sizes = (floor_divide(results, inner), blocks, parts)
        grid, (outer, block, part) = self.sheet.programs(*sizes)
        base = block * self.block
        length = -(-high(count) // (parts * self.deep)) * self.deep
        start: Size = part * length
        stop = minimum(start + length, count) if parts > 1 else count
        with self.e.tile(0, 1, 1, base, self.block, inner) as (_, lane):
            row = outer * inner + lane
            for stage in range(1, space.stages() + 1):
                self.reduce_part(space.at_stage(stage), row, outer, base, start, stop)
            if partials is None:
                self.write_rows(space.region.stored, row)
            else:
                for v, place in zip(space.reduces, partials):
                    offset = part * results + row
                    self.e.store(place, self.e.value(v, unravel(row, v.shape)), offset)
        return grid

    def reduce_part(
        self, reduces: Sequence[Node], row: Size, outer: Size, base: Size, start: Size, stop: Size
    ) -> None:
        """Take the reduced elements from start to stop and bind what the reductions gave."""
        b, e, inner, deep = self.b, self.e, self.space.inner, self.deep
        span = stop - start
        middle = start + floor_divide(span, deep) * deep

        def take(at: Size, size: Size, carried: list[Node]) -> list[Node]:
            with e.tile(at, deep, size, base, self.block, inner) as (column, lane):
                return self.feed(reduces, outer * inner + lane, column, carried)

        def whole(_: Size, first: Size, last: Size, carried: list[Node]) -> list[Node]:
            return b.loop(
                "column", first, last, deep, lambda i, x: take(i, i + deep, x), carried, 2
            )

        fresh = self.sums.starts(reduces, self.tile_shape())
        values = self.lines.over_lines(blocked(reduces), fresh, 1, (start, middle), whole, fresh)
        if modulo(span, deep) != 0:
            values = b.loop("rest", middle, stop, deep, lambda i, x: take(i, stop, x), values)
        self.bind(reduces, row, values)

    def tile_shape(self) -> tuple[int, ...]:
        """The shape of a tile."""
        if self.deep > 1:
            return (self.deep, self.block)
        return (self.block,) if self.block > 1 else ()

    def bind(self, reduces: Sequence[Node], row: Size, values: list[Node]) -> None:
        """Add up the rows of the accumulators and say what each reduction gave."""
        alone = {v: own[-1] for v, own in shared_out(reduces, values)}
        found = self.combined(reduces, values) if self.deep > 1 else alone
        for v, x in found.items():
            if x.shape == (1,):  # a block of one result is a scalar
                x = self.b.add(tile_ops.reshape(x, shape=()))
            self.e.bind(v, unravel(row, v.shape), x)
