"""Reductions by columns: tiles of (some reduced elements) x (neighbouring results).

A program takes a block of neighbouring results and walks the reduced axis a tile at a time with
the accumulators in registers; the rows of the tile are added up at the end. Where there are few
results the reduced axis is cut into parts as well: partial results go to scratch and a second
launch adds them, part by part in order. Invariant: a result's sum is added in an order that
depends on shapes and the Target alone; no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, floor_divide, high, minimum, modulo
from ...ir.types import Array, Memory
from ...tile import ops as tile_ops
from ...tile.build import Body
from ..access import offset_of, unravel
from ..evaluate import wide
from ..space import CHAIN, KINDS, is_blocked, reduce_index
from .rows import EACH, ThreadRows
from .space import WARP, Roles
from .tiles import power_of_two

LINE = 256  # bytes of neighbouring results that a program reads at once, at least


class ThreadColumns(ThreadRows):
    """Lowers Regions whose reductions run over leading axes."""

    def by_columns(self) -> list[tuple[Body, Roles]]:
        """One launch, or parts and a launch that adds them."""
        results, count = self.group.rows, self.group.columns
        assert results is not None
        self.pick_block(count)
        programs = high(floor_divide(results, self.inner)) * -(-high(self.inner) // self.block)
        parts = 1
        if all(v.op is not ops.argmax and self.levels[v] == 1 for v in self.reduces):
            most = high(count) // (4 * self.deep)
            parts = max(1, min(most, self.programs_wanted() // max(1, programs), 256))
        if parts == 1:
            self.begin(self.name)
            grid = self.column_programs(count, 1, None)
            return [self.end((grid,), self.warps, self.roles())]
        return self.in_parts(results, count, parts)

    def pick_block(self, count: Size) -> None:
        """Neighbouring results and reduced elements of a tile, and threads for it."""
        elements = 8 * WARP * EACH
        wanted = max(32, 2 * LINE * self.vector() // 16)
        self.block = min(power_of_two(high(self.inner)), wanted)
        self.deep = max(1, min(elements // self.block, power_of_two(high(count))))
        self.warps = self.threads_for(self.block * self.deep, EACH) // WARP

    def column_programs(self, count: Size, parts: int, places: Sequence[Node] | None) -> Size:
        """One program: its block of results over its part of the reduced axis."""
        results, inner = self.group.rows, self.inner
        assert results is not None
        blocks = ceil_divide(inner, self.block)
        grid = floor_divide(results, inner) * blocks * parts
        p = self.b.program(0, grid)
        part, block = modulo(p, parts), floor_divide(p, parts)
        outer, base = floor_divide(block, blocks), modulo(block, blocks) * self.block
        length = -(-high(count) // (parts * self.deep)) * self.deep
        start: Size = part * length
        stop = minimum(start + length, count) if parts > 1 else count
        with self.e.tile(0, 1, 1, base, self.block, inner) as (_, lane):
            row = outer * inner + lane
            for stage in range(1, self.stages() + 1):
                wanted = [v for v in self.reduces if self.levels[v] == stage]
                self.walk(wanted, row, outer, base, start, stop)
            if places is None:
                self.column_results(row)
            else:
                for v, place in zip(self.reduces, places):
                    offset = part * results + row
                    self.e.store(place, self.e.value(v, unravel(row, v.shape)), offset)
        return grid

    def walk(
        self, reduces: Sequence[Node], row: Size, outer: Size, base: Size, start: Size, stop: Size
    ) -> None:
        """Walk the reduced elements from start to stop and bind what the reductions gave."""
        b, e, inner = self.b, self.e, self.inner
        full = self.tile_shape(self.deep, self.block)

        def step(whole: bool) -> Callable[[Size, list[Node]], Sequence[Node]]:
            def run(at: Size, values: list[Node]) -> Sequence[Node]:
                size = at + self.deep if whole else stop
                with e.tile(at, self.deep, size, base, self.block, inner) as (column, lane):
                    result_row = outer * inner + lane
                    place = b.broadcast(b.index(column), full)
                    result, position = [], 0
                    for v in reduces:
                        x = e.value(v.inputs[0], reduce_index(v, result_row, column))
                        x = b.broadcast(x, full)
                        width = 2 if v.op is ops.argmax else 1
                        old = values[position : position + width]
                        result += self.take(v, x, place, e.inside(), old)
                        position += width
                    return result

            return run

        span = stop - start
        middle = start + floor_divide(span, self.deep) * self.deep
        fresh = [x for v in reduces for x in self.starts(v, full)]
        blocked = [is_blocked(v) for v in reduces for _ in self.starts(v, ())]

        def run(first: Size, last: Size, carried: list[Node]) -> list[Node]:
            return b.loop("column", first, last, self.deep, step(True), carried, 2)

        values = self.over_span(blocked, fresh, (start, middle), CHAIN * self.deep, run)
        if modulo(span, self.deep) != 0:
            values = b.loop("rest", middle, stop, self.deep, step(False), values)
        self.bind_columns(reduces, row, values)

    def tile_shape(self, deep: int, block: int) -> tuple[int, ...]:
        """The shape of a tile of so many reduced elements and results."""
        if deep > 1:
            return (deep, block)
        return (block,) if block > 1 else ()

    def bind_columns(self, reduces: Sequence[Node], row: Size, values: list[Node]) -> None:
        """Add up the rows of the accumulators."""
        position = 0
        for v in reduces:
            index = unravel(row, v.shape)
            if v.op is ops.argmax:
                best, where = values[position : position + 2]
                position += 2
                found = self.first_of(best, where)
            else:
                found = values[position]
                position += 1
                if self.deep > 1:
                    found = self.b.add(tile_ops.reduce(found, axis=0, kind=KINDS[v.op]))
            self.e.bind(v, index, self._scalar(found))

    def _scalar(self, x: Node) -> Node:
        """A block of one result is a scalar."""
        return self.b.add(tile_ops.reshape(x, shape=())) if x.shape == (1,) else x

    def first_of(self, best: Node, where: Node) -> Node:
        """The first place of the largest over the rows of the accumulators."""
        if self.deep == 1:
            return where
        return self.first_largest(best, where, None, 0)

    def column_results(self, row: Size) -> None:
        """Write results and what follows from them."""
        for v in self.group.stored:
            index = unravel(row, v.shape)
            x = self.e.value(v, index)
            self.e.store(self.outputs[v], x, offset_of(v, index))

    # ---- parts ----------------------------------------------------------------------------

    def in_parts(self, results: Size, count: Size, parts: int) -> list[tuple[Body, Roles]]:
        """Partial results into scratch, then their sums."""
        length = -(-high(count) // (parts * self.deep)) * self.deep
        parts = -(-high(count) // length)
        types = [Array((results * parts,), wide(v.inputs[0].dtype)) for v in self.reduces]
        after = [
            (f"part{n}", Memory(t.shape, t.dtype, "global", "result")) for n, t in enumerate(types)
        ]
        places = self.begin(f"{self.name}_parts", results=False, after=after)
        grid = self.column_programs(count, parts, places)
        roles = self.roles(results=False) + self.scratch_roles(types)
        first = self.end((grid,), self.warps, roles)
        return [first, self.sum_parts(results, parts, types)]

    def sum_parts(self, results: Size, parts: int, types: Sequence[Array]) -> tuple[Body, Roles]:
        """A block of results a program: all parts as one tile."""
        extra = [(f"part{n}", Memory(t.shape, t.dtype)) for n, t in enumerate(types)]
        places = self.begin(f"{self.name}_whole", extra)
        block = min(32, power_of_two(high(results)))
        self.deep = deep = min(power_of_two(parts), 64)
        p = self.b.program(0, ceil_divide(results, block))
        base = p * block
        with self.e.tile(0, 1, 1, base, block, results) as (_, lane):

            def step(at: Size, totals: list[Node], whole: bool = True) -> Sequence[Node]:
                found = []
                size = at + deep if whole else parts
                with self.e.tile(at, deep, size, base, block, results) as (part, own):
                    loaded = [self.e._load(place, part * results + own) for place in places]
                    for v, x, total in zip(self.reduces, loaded, totals):
                        found += self.take(v, x, x, self.e.inside(), [total])
                return found

            full = self.tile_shape(deep, block)
            starts = [x for v in self.reduces for x in self.starts(v, full)]
            last = parts // deep * deep
            totals = self.b.loop("part", 0, last, deep, step, starts)
            if last < parts:  # only what is left is masked: other loads do not wait on each other
                totals = list(step(last, totals, whole=False))
            self.bind_columns(self.reduces, lane, totals)
            self.column_results(lane)
        given = self.roles()
        roles = given[: len(self.reads)] + self.scratch_roles(types) + given[len(self.reads) :]
        grid = (ceil_divide(results, block),)
        return self.end(grid, self.threads_for(deep * block, EACH) // WARP, roles)
