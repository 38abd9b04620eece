"""Reductions by rows: one row a program, one loop over its columns a stage.

Each loop feeds all reductions of its stage with vector accumulators, combined across lanes at
the end; later stages read what earlier ones found; a last loop writes element-level results.
The row stays in the cache, so memory is read once and written once. Sums of long rows go in
blocks: accumulators start anew in each, and their totals are added in float64. `row_stage` is
long because its loops share what is bound. Invariant: a row's sums are added in one fixed order,
few additions to one float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import int64
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Expr, Size, floor_divide, high, loop_index, named, substitute
from ..tile import ops as tile_ops
from .access import Index, Place, below, depends, offset_of, places, unravel
from .evaluate import wide
from .fuse import COSTLY
from .space import COMBINE, KINDS, LoopSpace, identity, is_blocked, reduce_index

STASH_BYTES = 256 << 10


class RowLoops(LoopSpace):
    """Lowers Regions whose reductions run over trailing axes."""

    def row_body(self) -> tuple[Size, ...]:
        """One row a program."""
        rows = self.group.rows
        assert rows is not None
        row = self.b.program(0, rows)
        stages = max(self.levels[v] for v in self.reduces)
        element = [v for v in self.group.stored if not self.is_row_level(v)]
        self.plan_stash(row, stages, element)
        self.row_results(row, 0)  # what needs no reduction
        for stage in range(1, stages + 1):
            reduces = [v for v in self.reduces if self.levels[v] == stage]
            writes = [v for v in element if self.levels[v] == stage - 1]
            self.row_stage(row, stage, reduces, writes)
            self.row_results(row, stage)
        last = [v for v in element if self.levels[v] == stages]
        if last:
            self.row_stage(row, stages + 1, [], last)
        return (rows,)

    def row_results(self, row: Size, stage: int) -> None:
        """Write what is known of the row after a stage."""
        for v in self.group.stored:
            if self.is_row_level(v) and self.levels[v] == stage:
                index = unravel(row, v.shape)
                x = self.e.value(v, index)
                self.e.store(self.outputs[v], x, offset_of(v, index))

    def loop_expressions(
        self, reduces: Sequence[Node], writes: Sequence[Node], row: Size, column: Size
    ) -> list[tuple[Node, Index]]:
        """What one loop evaluates, and where."""
        found = [(v.inputs[0], reduce_index(v, row, column)) for v in reduces]
        return found + [(v, self.index_at(v, row, column)) for v in writes]

    def plan_stash(self, row: Size, stages: int, element: Sequence[Node]) -> None:
        """Costly values that several loops need are kept in scratch, if a row is not too long."""
        self.stash: dict[Any, Node] = {}
        self.filled: set[Any] = set()
        columns = self.group.columns
        if not isinstance(columns, int) or columns * 4 > STASH_BYTES:
            return
        lane = named("loop", "lane", 0, max(1, high(self.inner) - 1))
        column = self._column(loop_index("outer", floor_divide(columns, self.inner)), lane)
        counts: dict[Any, int] = {}
        for stage in range(1, stages + 2):
            reduces = [v for v in self.reduces if self.levels[v] == stage]
            writes = [v for v in element if self.levels[v] == min(stage - 1, stages)]
            for key in self._costly(self.loop_expressions(reduces, writes, row, column), lane):
                counts[key] = counts.get(key, 0) + 1
        wanted = [k for k, n in counts.items() if n > 1][:4]
        for key in wanted:
            self.stash[key] = self.b.allocate((columns,), wide(key[0].dtype), "l1")

    def _column(self, outer: Size, lane: Size) -> Size:
        return outer * self.inner + lane

    def _costly(self, starts: Sequence[Place], lane: Expr) -> list[Place]:
        """The costly inlined Nodes an expression reaches, at lane-dependent indices."""

        def step(node: Node, index: Index) -> Sequence[Place]:
            return () if node in self.inputs or node in self.reduces else below(node, index)

        costly = [
            (n, i) for n, i in places(starts, step) if n.op in COSTLY and n not in self.inputs
        ]
        return [(n, index) for n, index in costly if any(depends(i, [lane]) for i in index)]

    def row_stage(
        self, row: Size, stage: int, reduces: Sequence[Node], writes: Sequence[Node]
    ) -> None:
        """One loop over the columns of a row."""
        e = self.e
        columns = self.group.columns
        outer_size = floor_divide(columns, self.inner)
        lane = named("loop", "lane", 0, max(1, high(self.inner) - 1))
        outer_atom = loop_index("outer", outer_size)
        at = self.loop_expressions(reduces, writes, row, self._column(outer_atom, lane))
        inner_atoms = [a for a in (outer_atom, lane) if isinstance(a, Expr)]
        for node, index in at:
            e.hoist(node, index, inner_atoms)
        start = [x for v in reduces for x in self.start_values(v)]
        needed = [key for key in self._costly(at, lane) if key in self.stash]
        fill = [key for key in needed if key not in self.filled]
        load = [key for key in needed if key in self.filled]

        def vectors(outer: Size, start: Size, stop: Size, values: list[Node]) -> list[Node]:
            column = self._column(outer, lane)

            def body(_: Size, carried: list[Node]) -> Sequence[Node]:
                for key in load:
                    node, index = self._moved(key, outer_atom, outer)
                    e.bind(node, index, e._load(self.stash[key], column))
                new = self.feed(reduces, row, column, carried)
                for v in writes:
                    index = self.index_at(v, row, column)
                    x = e.value(v, index)
                    e.store(self.outputs[v], x, offset_of(v, index))
                for key in fill:
                    e.store(self.stash[key], e.value(*self._moved(key, outer_atom, outer)), column)
                return new

            return self.lane_loop(start, stop, body, values, size=self.inner)

        blocked = [is_blocked(v) for v in reduces for _ in self.start_values(v)]
        values = self.over_lines(blocked, start, outer_size, (0, self.inner), vectors, start)
        self.filled.update(fill)
        self.finish_rows(row, reduces, values)

    def _moved(self, key: Any, outer_atom: Size, outer: Size) -> Any:
        node, index = key
        if not isinstance(outer_atom, Expr):
            return key
        return node, tuple(substitute(i, {outer_atom: outer}) for i in index)

    def start_values(self, node: Node) -> list[Node]:
        """Accumulators of a reduction before its loop."""
        dtype = wide(node.inputs[0].dtype)
        if node.op is ops.argmax:
            best = self.b.constant(dtype.lowest, dtype, (self.lanes,))
            first = 1 << 62 if self.group.columns != 0 else 0  # of nothing: index 0
            return [best, self.b.constant(first, int64, (self.lanes,))]
        return [self.b.constant(identity(KINDS[node.op], dtype), dtype, (self.lanes,))]

    def feed(
        self, reduces: Sequence[Node], row: Size, column: Size, carried: list[Node]
    ) -> list[Node]:
        """Accumulators after one vector."""
        b, e, result = self.b, self.e, []
        position = 0
        for v in reduces:
            x = e.value(v.inputs[0], reduce_index(v, row, column))
            x = b.broadcast(x, (self.lanes,))
            if v.op is ops.argmax:
                best, where = carried[position : position + 2]
                position += 2
                result += self.better(x, b.broadcast(b.index(column), (self.lanes,)), best, where)
                continue
            kind, acc = KINDS[v.op], carried[position]
            position += 1
            new = b.apply(COMBINE[kind], acc, x)
            result.append(new if e.mask is None else b.apply("where", e.mask, new, acc))
        return result

    def better(self, x: Node, place: Node, best: Node, where: Node) -> list[Node]:
        """The larger of two (value, index) pairs; the first nan wins, then the lower index."""
        b = self.b
        take = b.apply("less", best, x)
        if x.dtype.is_float:
            new_nan = b.apply("not_equal", x, x)
            old_number = b.apply("equal", best, best)
            take = b.apply("bit_or", take, b.apply("bit_and", new_nan, old_number))
        first = b.apply("equal", where, b.constant(1 << 62, int64))
        take = b.apply("bit_or", take, first)
        if self.e.mask is not None:
            take = b.apply("bit_and", take, self.e.mask)
        return [b.apply("where", take, x, best), b.apply("where", take, place, where)]

    def finish_rows(self, row: Size, reduces: Sequence[Node], values: list[Node]) -> None:
        """Combine lanes and say what each reduction gave."""
        b, position = self.b, 0
        for v in reduces:
            index = unravel(row, v.shape)
            if v.op is ops.argmax:
                best, where = values[position : position + 2]
                position += 2
                self.e.bind(v, index, self.best_lane(best, where))
                continue
            kind = KINDS[v.op]
            total = values[position]
            position += 1
            if total.shape:
                total = b.add(tile_ops.reduce(total, axis=0, kind=kind))
            self.e.bind(v, index, self.e.settled(total, v))

    def best_lane(self, best: Node, where: Node) -> Node:
        """The index of the first largest over lanes."""
        b = self.b
        if not best.shape:
            return where
        top = b.add(tile_ops.reduce(best, axis=0, kind="max"))
        same = b.apply("equal", best, b.broadcast(top, best.shape))
        if best.dtype.is_float:
            same = b.apply("bit_or", same, b.apply("not_equal", best, best))
            nan = b.broadcast(b.apply("not_equal", top, top), best.shape)
            number = b.apply("equal", best, best)
            same = b.apply("bit_and", same, b.apply("bit_not", b.apply("bit_and", nan, number)))
        place = b.apply("where", same, where, b.constant(1 << 62, int64))
        return b.add(tile_ops.reduce(place, axis=0, kind="min"))
