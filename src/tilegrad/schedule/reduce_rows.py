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
from .access import Index, Place, below, depends, unravel, walk_down
from .evaluate import wide
from .lines import FAR_OFF, Accumulators, Lines, shared_out
from .region import COSTLY
from .sheet import Sheet
from .space import Part, Space, is_blocked, reduce_index

STASH_BYTES = 256 << 10


class Reductions(Part):
    """Reductions over vectors: what rows and columns share."""

    def __init__(self, space: Space, sheet: Sheet, lanes: int) -> None:
        super().__init__(space, sheet)
        self.lanes, self.lines = lanes, Lines(sheet, lanes)
        self.sums = Accumulators(self.b, space.region.columns != 0)

    def feed(
        self, reduces: Sequence[Node], row: Size, column: Size, carried: list[Node]
    ) -> list[Node]:
        """Accumulators after one vector."""
        b, e, result = self.b, self.e, []
        for v, old in shared_out(reduces, carried):
            x = b.broadcast(e.value(v.inputs[0], reduce_index(v, row, column)), (self.lanes,))
            place = x if v.op is not ops.argmax else b.broadcast(b.index(column), (self.lanes,))
            result += self.sums.take(v, x, place, e.mask, old)
        return result


class RowLoops(Reductions):
    """Lowers Regions whose reductions run over trailing axes."""

    def body(self) -> tuple[Size, ...]:
        """One row a program."""
        space = self.space
        rows = space.region.rows
        assert rows is not None
        row = self.b.program(0, rows)
        stages, element = space.stages(), space.elements()
        self.plan_stash(row, stages, element)
        self.row_results(row, 0)  # what needs no reduction
        for stage in range(1, stages + 1):
            writes = [v for v in element if space.levels[v] == stage - 1]
            self.row_stage(row, stage, space.at_stage(stage), writes)
            self.row_results(row, stage)
        last = [v for v in element if space.levels[v] == stages]
        if last:
            self.row_stage(row, stages + 1, [], last)
        return (rows,)

    def plan_stash(self, row: Size, stages: int, element: Sequence[Node]) -> None:
        """Costly values that several loops need are kept in scratch, if a row is not too long."""
        self.stash: dict[Any, Node] = {}
        self.filled: set[Any] = set()
        columns = self.space.region.columns
        if not isinstance(columns, int) or columns * 4 > STASH_BYTES:
            return
        lane = named("loop", "lane", 0, max(1, high(self.space.inner) - 1))
        column = self._column(loop_index("outer", floor_divide(columns, self.space.inner)), lane)
        counts: dict[Any, int] = {}
        for stage in range(1, stages + 2):
            writes = [v for v in element if self.space.levels[v] == min(stage - 1, stages)]
            at = self.space.expressions_at(self.space.at_stage(stage), writes, row, column)
            for key in self._costly(at, lane):
                counts[key] = counts.get(key, 0) + 1
        wanted = [k for k, n in counts.items() if n > 1][:4]
        for key in wanted:
            self.stash[key] = self.b.allocate((columns,), wide(key[0].dtype), "l1")

    def _column(self, outer: Size, lane: Size) -> Size:
        return outer * self.space.inner + lane

    def _costly(self, starts: Sequence[Place], lane: Expr) -> list[Place]:
        """The costly inlined Nodes an expression reaches, at lane-dependent indices."""

        def step(node: Node, index: Index) -> Sequence[Place]:
            return (
                ()
                if node in self.space.stored_reads or node in self.space.reduces
                else below(node, index)
            )

        costly = [
            (n, i)
            for n, i in walk_down(starts, step)
            if n.op in COSTLY and n not in self.space.stored_reads
        ]
        return [(n, index) for n, index in costly if any(depends(i, [lane]) for i in index)]

    def row_stage(
        self, row: Size, stage: int, reduces: Sequence[Node], writes: Sequence[Node]
    ) -> None:
        """One loop over the columns of a row."""
        e = self.e
        columns = self.space.region.columns
        outer_size = floor_divide(columns, self.space.inner)
        lane = named("loop", "lane", 0, max(1, high(self.space.inner) - 1))
        outer_atom = loop_index("outer", outer_size)
        at = self.space.expressions_at(reduces, writes, row, self._column(outer_atom, lane))
        inner_atoms = [a for a in (outer_atom, lane) if isinstance(a, Expr)]
        for node, index in at:
            e.hoist(node, index, inner_atoms)
        start = [x for v in reduces for x in self.sums.starts(v, (self.lanes,))]
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
                    self.sheet.write(v, self.space.index_at(v, row, column))
                for key in fill:
                    e.store(self.stash[key], e.value(*self._moved(key, outer_atom, outer)), column)
                return new

            return self.lines.lane_loop(start, stop, body, values, size=self.space.inner)

        blocked = [is_blocked(v) for v, own in shared_out(reduces, start) for _ in own]
        values = self.lines.over_lines(
            blocked, start, outer_size, (0, self.space.inner), vectors, start
        )
        self.filled.update(fill)
        self.finish_rows(row, reduces, values)

    def _moved(self, key: Any, outer_atom: Size, outer: Size) -> Any:
        node, index = key
        if not isinstance(outer_atom, Expr):
            return key
        return node, tuple(substitute(i, {outer_atom: outer}) for i in index)

    def finish_rows(self, row: Size, reduces: Sequence[Node], values: list[Node]) -> None:
        """Combine lanes and say what each reduction gave."""
        for v, own in shared_out(reduces, values):
            if v.op is ops.argmax:
                found = self.best_lane(*own)
            else:
                found = self.e.settled(self.sums.total(v, own[0]), v)
            self.e.bind(v, unravel(row, v.shape), found)

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
        place = b.apply("where", same, where, b.constant(FAR_OFF, int64))
        return b.add(tile_ops.reduce(place, axis=0, kind="min"))
