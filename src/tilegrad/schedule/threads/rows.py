"""Reductions by rows: rows that fit are held in registers, longer ones are swept by a loop.

*Held*: a program takes one row, or several short ones, as one tile; every stage works on it, so
memory is read once and written once. *Swept*: a program walks its row once for each stage; a sum
of exp(x - max) joins the walk that finds the max (`Online`), so softmax and cross-entropy read a
row twice, and the logsumexp alone once. *Split*: few long rows are cut into parts, whose partial
results a second launch combines.

Invariant: a row's sums are added in an order that depends on shapes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import int64
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import (
    Expr,
    Size,
    ceil_divide,
    combine,
    floor_divide,
    high,
    loop_index,
    low,
    minimum,
    modulo,
    multiply,
    named,
)  # fmt: skip
from ...ir.types import Array, Memory, row_major
from ...tile import ops as tile_ops
from ...tile.build import Body
from ..access import MOVEMENT, Index, unravel
from ..evaluate import ravel_strides, wide
from ..space import COMBINE, KINDS, identity, reduce_index
from .space import WARP, Roles, ThreadSpace, plain_reads, turned_reads
from .tiles import power_of_two

HELD = 16384  # most elements of a row that is held
EACH = 16  # elements of a tile that a thread holds
FINITE = 3e38  # stands for an infinite largest: exp gives 0 or inf, not nan
FAR_OFF = 1 << 62  # no place: above every index


@dataclass
class Online:
    """A sum of exp(x - shift), found in the same walk as `largest`, on which the shift rests."""

    total: Node
    largest: Node
    x: Node
    shift: Node


class ThreadRows(ThreadSpace):
    """Lowers groups whose reductions run over trailing axes."""

    def by_rows(self) -> list[tuple[Body, Roles]]:
        """Held, split or swept."""
        rows, columns = self.group.rows, self.group.columns
        assert rows is not None
        if high(columns) <= HELD:
            return self.held(rows, columns)
        parts = self.row_parts(rows, columns)
        return self.swept(rows, columns) if parts == 1 else self.split(rows, columns, parts)

    def stages(self) -> int:
        """Levels of reductions."""
        return max(self.levels[v] for v in self.reduces)

    # ---- held -----------------------------------------------------------------------------

    def held(self, rows: Size, columns: Size) -> list[tuple[Body, Roles]]:
        """Rows as one tile, all stages on it."""
        self.begin(self.name)
        lanes = power_of_two(high(columns))
        each = EACH if self.many_reads() <= 3 else EACH // 2
        many = self.rows_held(high(rows), lanes, each)
        self.each = each
        middle = self.middle_of(rows, many, lanes)
        many = min(many, power_of_two(high(middle)))
        blocks = ceil_divide(middle, many)
        grid = multiply(floor_divide(rows, middle), blocks)
        p = self.b.program(0, grid)
        outer, base = multiply(floor_divide(p, blocks), middle), multiply(modulo(p, blocks), many)
        with self.e.tile(base, many, middle, 0, lanes, columns) as (at, lane):
            row = combine(outer, at, 1)
            self.load_first(row, lane)
            for stage in range(1, self.stages() + 1):
                for v in self.reduces:
                    if self.levels[v] == stage:
                        x = self.e.value(v.inputs[0], reduce_index(v, row, lane))
                        self.e.bind(v, unravel(row, v.shape), self.over_tile(v, x, lane))
            self.write_all(row, lane)
        threads = self.threads_for(many * lanes, each)
        return [self.end((grid,), threads // WARP, self.roles())]

    def load_first(self, row: Size, lane: Size) -> None:
        """Ask for everything a row needs before the first reduction makes threads wait."""
        if self.many_reads() > 3:
            return
        starts = [(v.inputs[0], reduce_index(v, row, lane)) for v in self.reduces]
        starts += [(v, self.index_at(v, row, lane)) for v in self.group.stored]
        for node, index in plain_reads(starts, self.inputs):
            self.e.value(node, index)

    def rows_held(self, rows: int, lanes: int, each: int) -> int:
        """Rows of a program: several where they are short, or where reads run across them."""
        most = power_of_two(max(1, rows))
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

    def over_tile(self, node: Node, x: Node, lane: Size) -> Node:
        """A reduction of a whole tile along its lanes: (rows, 1), or a scalar."""
        b, e = self.b, self.e
        x = b.broadcast(x, e.full)
        mask = e.inside()
        if node.op is ops.argmax:
            place = b.broadcast(b.index(lane), e.full)
            return self.first_largest(x, place, mask, len(e.full) - 1)
        if mask is not None:
            x = b.apply("where", mask, x, b.constant(identity(KINDS[node.op], x.dtype), x.dtype))
        return self.along(x, KINDS[node.op])

    def along(self, x: Node, kind: str) -> Node:
        """One axis of a tile reduced: the last one."""
        if not x.shape:
            return x
        if self.e.row is not None and self.e.lane is None:
            return x  # (rows, 1): nothing to add up
        found = self.b.add(tile_ops.reduce(x, axis=len(x.shape) - 1, kind=kind))
        return self.e.column(found) if found.shape else found

    def first_largest(self, x: Node, place: Node, mask: Node | None, axis: int) -> Node:
        """The first place of the largest value along an axis; nan is the largest."""
        b = self.b
        none = b.constant(FAR_OFF if self.group.columns != 0 else 0, int64)
        if not x.shape:
            return place
        kept = x if mask is None else b.apply("where", mask, x, b.constant(x.dtype.lowest, x.dtype))
        top = self._kept(b.add(tile_ops.reduce(kept, axis=axis, kind="max")), axis)
        best = b.apply("equal", x, top)
        if x.dtype.is_float:  # where the largest is nan, every nan is it
            is_nan = b.apply("bit_and", b.apply("not_equal", top, top), b.apply("not_equal", x, x))
            best = b.apply("bit_or", best, is_nan)
        best = b.apply("bit_and", best, mask) if mask is not None else best
        found = b.add(tile_ops.reduce(b.apply("where", best, place, none), axis=axis, kind="min"))
        return self._kept(found, axis) if axis == 1 else found

    def _kept(self, x: Node, axis: int) -> Node:
        """A reduced tile in a shape that broadcasts with what it was."""
        return self.e.column(x) if axis == 1 else x

    # ---- swept ----------------------------------------------------------------------------

    def swept(self, rows: Size, columns: Size) -> list[tuple[Body, Roles]]:
        """One row a program, one loop over it a stage."""
        self.begin(self.name)
        row = self.b.program(0, rows)
        self.use_threads()
        self.online = self.find_online()
        done = {o.total for o in self.online}
        element = [v for v in self.group.stored if not self.is_row_level(v)]
        for stage in range(1, self.stages() + 1):
            reduces = [v for v in self.reduces if self.levels[v] == stage and v not in done]
            writes = [v for v in element if self.levels[v] == stage - 1]
            if reduces or writes:
                found = self.sweep(row, 0, columns, reduces, writes)
                self.finish_sweep(row, reduces, found)
            self.row_results(row, stage)
        last = [v for v in element if self.levels[v] == self.stages()]
        if last:
            self.sweep(row, 0, columns, [], last)
        return [self.end((rows,), self.warps, self.roles())]

    def use_threads(self) -> None:
        """Threads and lanes of a program that walks a long row."""
        self.warps = 16
        self.lanes = self.warps * WARP * self.vector()

    def row_results(self, row: Size, stage: int) -> None:
        """Write what is known of the row after a stage."""
        for v in self.group.stored:
            if self.is_row_level(v) and self.levels[v] == stage:
                index = unravel(row, v.shape)
                x = self.e.value(v, index)
                self.e.store(self.outputs[v], x, ravel_strides(index, row_major(v.shape)))

    def find_online(self) -> list[Online]:
        """Sums of exp(x - max of the row): they need no walk of their own."""
        found = []
        for v in self.reduces:
            if v.op is not ops.sum_ or self.levels[v] != 2:
                continue
            e = _through_casts(v.inputs[0])
            if e.op is not ops.exp or e.inputs[0].op is not ops.subtract:
                continue
            x, shift = e.inputs[0].inputs
            if any(self.levels[u] for u in self.below(x)):
                continue
            first = [u for u in self.below(shift) if u.op is ops.max_ and self.levels[u] == 1]
            if first and self._per_row(shift):
                found.append(Online(v, first[0], x, shift))
        return found

    def below(self, node: Node) -> list[Node]:
        """The group's own values that an expression rests on, itself included."""
        found: dict[Node, None] = {}
        stack = [node]
        while stack:
            current = stack.pop()
            if current in self.members and current not in found:
                found[current] = None
            if current in self.members or current not in self.all_values:
                stack.extend(i for i in current.inputs if current not in self.reduces)
        return list(found)

    def _per_row(self, node: Node) -> bool:
        """Whether a value is the same for all columns of a row."""
        while node.op in MOVEMENT:
            if node.op is ops.expand and self.is_row_level(node.inputs[0]):
                return True
            node = node.inputs[0]
        return self.is_row_level(node)

    def sweep(self, row: Size, start: Size, stop: Size, reduces: Sequence[Node],
              writes: Sequence[Node]) -> list[Node]:  # fmt: skip
        """One walk over columns start to stop of a row; gives accumulators of its reductions."""
        b, e = self.b, self.e
        inner = self.inner if self.inner == self.group.columns else self._inner_of_sweep()
        outer_size = floor_divide(self.group.columns, inner)
        many = 1 if writes else 4
        step = many * self.lanes
        lane = named("loop", "lane", 0, max(1, high(inner) - 1))
        outer_atom = loop_index("outer", outer_size)
        column = combine(multiply(outer_atom, inner), lane, 1)
        for node, index in self.expressions_at(reduces, writes, row, column):
            e.hoist(node, index, [a for a in (outer_atom, lane) if isinstance(a, Expr)])
        online = [o for o in self.online if o.largest in reduces]

        def tiles(outer: Size, first: Size, end: Size, carried: list[Node]) -> list[Node]:
            def one(whole: bool, count: int, base: Size, values: list[Node]) -> Sequence[Node]:
                return self.feed(row, outer, inner, base, end, count, whole, reduces, writes,
                                 online, values)  # fmt: skip

            span = combine(end, first, -1)
            middle = combine(first, multiply(floor_divide(span, step), step), 1)
            values = b.loop("i", first, middle, step, lambda i, c: one(True, many, i, c), carried)
            if modulo(span, step) == 0:
                return values
            last = combine(first, multiply(floor_divide(span, self.lanes), self.lanes), 1)
            if many > 1 and isinstance(span, int):
                values = b.loop("few", middle, last, self.lanes, lambda i, c: one(True, 1, i, c),
                                values)  # fmt: skip
                middle = last
            return b.loop("rest", middle, end, self.lanes, lambda i, c: one(False, 1, i, c), values)

        values = [x for v in reduces for x in self.starts(v, (self.lanes,))]
        values += [b.constant(0.0, wide(o.total.dtype), (self.lanes,)) for o in online]
        if outer_size == 1:
            return tiles(0, start, stop, values)

        def nest(outer: Size, carried: list[Node]) -> Sequence[Node]:
            with e.scope():
                return tiles(outer, 0, inner, carried)

        return b.loop("outer", 0, outer_size, 1, nest, values)

    def _inner_of_sweep(self) -> Size:
        """Linear pieces where they are long enough to fill a tile, else the whole row."""
        return self.inner if low(self.inner) * 2 >= self.lanes else self.group.columns

    def expressions_at(self, reduces: Sequence[Node], writes: Sequence[Node], row: Size,
                       column: Size) -> list[tuple[Node, Index]]:  # fmt: skip
        """What a walk evaluates, and where."""
        found = [(v.inputs[0], reduce_index(v, row, column)) for v in reduces]
        return found + [(v, self.index_at(v, row, column)) for v in writes]

    def starts(self, node: Node, shape: tuple[int, ...]) -> list[Node]:
        """Accumulators of a reduction before its walk."""
        dtype = wide(node.inputs[0].dtype)
        if node.op is ops.argmax:
            first = FAR_OFF if self.group.columns != 0 else 0  # of nothing: index 0
            return [self.b.constant(dtype.lowest, dtype, shape),
                    self.b.constant(first, int64, shape)]  # fmt: skip
        return [self.b.constant(identity(KINDS[node.op], dtype), dtype, shape)]

    def feed(
        self, row: Size, outer: Size, inner: Size, base: Size, end: Size, count: int, whole: bool,
        reduces: Sequence[Node], writes: Sequence[Node], online: Sequence[Online],
        values: list[Node],
    ) -> list[Node]:  # fmt: skip
        """Accumulators after `count` tiles from base on; writes what is wanted there."""
        b, e = self.b, self.e
        parts: list[list[tuple[Node, Node, Node | None]]] = []  # of each tile: value, place, mask
        for k in range(count):
            at = combine(base, k * self.lanes, 1)
            with e.tile(row, 1, self.group.rows or 1, at, self.lanes, end, whole) as (_, lane):
                column = combine(multiply(outer, inner), lane, 1)
                parts.append([])
                for v in [*reduces, *(o.total for o in online)]:
                    x = v.inputs[0] if v in reduces else _x_of(v, online)
                    x = b.broadcast(e.value(x, reduce_index(v, row, column)), (self.lanes,))
                    place = b.broadcast(b.index(column), (self.lanes,))
                    parts[-1].append((x, place, e.lane_mask))
                for v in writes:
                    index = self.index_at(v, row, column)
                    e.store(self.outputs[v], e.value(v, index),
                            ravel_strides(index, row_major(v.shape)))  # fmt: skip
        return self.combine_parts(reduces, online, parts, values)

    def combine_parts(self, reduces: Sequence[Node], online: Sequence[Online],
                      parts: list[list[tuple[Node, Node, Node | None]]],
                      values: list[Node]) -> list[Node]:  # fmt: skip
        """Accumulators with the values of some tiles taken in."""
        result: list[Node] = []
        largest: dict[Node, tuple[Node, Node]] = {}  # running max before and after
        position = 0
        for n, v in enumerate(reduces):
            width = 2 if v.op is ops.argmax else 1
            new = old = values[position : position + width]
            for part in parts:
                new = self.take(v, *part[n], new)
            largest[v] = old[0], new[0]
            result += new
            position += width
        for n, o in enumerate(online):
            before, after = largest[o.largest]
            after = self.b.apply("maximum", after, self.b.constant(-FINITE, after.dtype))
            after = self.b.apply("minimum", after, self.b.constant(FINITE, after.dtype))
            total = self.b.apply("multiply", values[position + n], self._exp(before, after))
            for part in parts:
                x, _, mask = part[len(reduces) + n]
                grown = self.b.apply("add", total, self._exp(x, after))
                total = grown if mask is None else self.b.apply("where", mask, grown, total)
            result.append(total)
        return result

    def _exp(self, x: Node, largest: Node) -> Node:
        """exp(x - largest)."""
        return self.b.apply("exp", self.b.apply("subtract", x, largest))

    def take(self, node: Node, x: Node, place: Node, mask: Node | None,
             old: list[Node]) -> list[Node]:  # fmt: skip
        """One tile taken into the accumulators of a reduction."""
        b = self.b
        if node.op is not ops.argmax:
            new = b.apply(COMBINE[KINDS[node.op]], old[0], x)
            return [new if mask is None else b.apply("where", mask, new, old[0])]
        best, where = old
        better = b.apply("less", best, x)
        if x.dtype.is_float:
            is_new = b.apply("bit_and", b.apply("not_equal", x, x), b.apply("equal", best, best))
            better = b.apply("bit_or", better, is_new)
        better = b.apply("bit_or", better, b.apply("equal", where, b.constant(FAR_OFF, int64)))
        if mask is not None:
            better = b.apply("bit_and", better, mask)
        return [b.apply("where", better, x, best), b.apply("where", better, place, where)]

    def finish_sweep(self, row: Size, reduces: Sequence[Node], values: list[Node]) -> None:
        """Combine the lanes and say what each reduction gave."""
        position = 0
        tops: dict[Node, Node] = {}
        for v in reduces:
            index = unravel(row, v.shape)
            if v.op is ops.argmax:
                best, where = values[position : position + 2]
                position += 2
                self.e.bind(v, index, self.first_largest(best, where, None, 0))
                continue
            total = self._all(values[position], KINDS[v.op])
            tops[v] = values[position]
            position += 1
            self.e.bind(v, index, total)
        for o in self.online:
            if o.largest not in reduces:
                continue
            shift = self.e.value(o.shift, reduce_index(o.total, row, 0))
            scale = self.b.apply("exp", self.b.apply("subtract", tops[o.largest], shift))
            total = self._all(self.b.apply("multiply", values[position], scale), "sum")
            position += 1
            self.e.bind(o.total, unravel(row, o.total.shape), total)

    def _all(self, x: Node, kind: str) -> Node:
        return self.b.add(tile_ops.reduce(x, axis=0, kind=kind)) if x.shape else x

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
        self.use_threads()
        unit = self.lanes
        length = -(-high(columns) // (parts * unit)) * unit
        parts = -(-high(columns) // length)
        types = [Array((multiply(rows, parts),), wide(v.inputs[0].dtype)) for v in self.reduces]
        first = self.first_parts(rows, columns, parts, length, types)
        return [first, self.last_parts(rows, parts, types)]

    def scratch_roles(self, types: Sequence[Array]) -> Roles:
        """Roles of partial results: each has a Slot of its own."""
        return [("scratch", (t, f"part{n}")) for n, t in enumerate(types)]

    def first_parts(self, rows: Size, columns: Size, parts: int, length: int,
                    types: Sequence[Array]) -> tuple[Body, Roles]:  # fmt: skip
        """A part of a row a program."""
        after = [(f"part{n}", Memory(t.shape, t.dtype, "global", "result"))
                 for n, t in enumerate(types)]  # fmt: skip
        places = self.begin(f"{self.name}_parts", results=False, after=after)
        self.online = []
        p = self.b.program(0, multiply(rows, parts))
        row = floor_divide(p, parts)
        start = multiply(modulo(p, parts), length)
        stop = minimum(combine(start, length, 1), columns)
        self.finish_sweep(row, self.reduces, self.sweep(row, start, stop, self.reduces, []))
        for v, place in zip(self.reduces, places):
            self.e.store(place, self.e.value(v, unravel(row, v.shape)), p)
        roles = self.roles(results=False) + self.scratch_roles(types)
        return self.end((multiply(rows, parts),), self.warps, roles)

    def last_parts(self, rows: Size, parts: int, types: Sequence[Array]) -> tuple[Body, Roles]:
        """The parts of a row combined, and what follows from them."""
        extra = [(f"part{n}", Memory(t.shape, t.dtype)) for n, t in enumerate(types)]
        places = self.begin(f"{self.name}_whole", extra)
        row = self.b.program(0, rows)
        lanes = power_of_two(parts)
        with self.e.tile(row, 1, rows, 0, lanes, parts) as (_, lane):
            for v, place in zip(self.reduces, places):
                x = self.e._load(place, combine(multiply(row, parts), lane, 1))
                self.e.bind(v, unravel(row, v.shape), self.over_tile(v, x, lane))
            self.row_results(row, 1)
        given = self.roles()
        roles = given[: len(self.reads)] + self.scratch_roles(types) + given[len(self.reads) :]
        return self.end((rows,), self.threads_for(lanes, 4) // WARP, roles)


def _through_casts(node: Node) -> Node:
    """Below casts of floats to wider floats: exp is computed wide in any case."""
    while node.op is ops.cast and node.dtype.is_float and node.inputs[0].dtype.is_float:
        if node.dtype.bits < node.inputs[0].dtype.bits:
            break
        node = node.inputs[0]
    return node


def _x_of(node: Node, online: Sequence[Online]) -> Node:
    return next(o.x for o in online if o.total is node)
