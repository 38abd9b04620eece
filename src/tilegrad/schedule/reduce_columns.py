"""Reductions by columns: a block of neighbouring results a program.

The reduced axis is taken a few elements at a time with accumulators in scratch memory, so
memory is read in order; long sums go in blocks, whose totals are added in float64. Invariant: a
result's sum is added in one fixed order, few additions to one float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.dtype import float64, int64
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import (
    Size,
    ceil_divide,
    coefficient,
    floor_divide,
    high,
    minimum,
    modulo,
    substitute,
)
from .access import offset_of, reads_below, unravel
from .evaluate import wide
from .lines import CHAIN, Reductions, Step
from .space import is_blocked

MANY = 8  # reduced elements that are added between reading and writing running results
COLUMN_BLOCK = 1024  # results of a column program: a 4 KiB page of float32 is read by one


class ColumnLoops(Reductions):
    """Lowers Regions whose reductions run over leading axes."""

    def body(self) -> tuple[Size, ...]:
        """A block of neighbouring results a program."""
        space = self.space
        rows, inner = space.region.rows, space.inner
        assert rows is not None
        outer_size = floor_divide(rows, inner)
        block = min(COLUMN_BLOCK, max(self.lanes, high(inner)))
        if high(inner) >= 2 * self.lanes:
            parts = 2 * max(2, space.target.cores)
            share = max(4 * self.lanes, -(-high(inner) // parts // self.lanes) * self.lanes)
            block = min(block, max(self.lanes, share))
        grid, (self.outer_row, number) = self.sheet.programs(outer_size, ceil_divide(inner, block))
        self.start = number * block
        self.stop = minimum(self.start + block, inner)
        self.running = {v: self.accumulators(v, block) for v in space.reduces}
        stages = space.stages()
        for stage in range(1, stages + 1):
            self.column_stage(space.at_stage(stage), stage)
        self.column_results(stages)
        return (grid,)

    def accumulators(self, node: Node, block: int) -> list[Node]:
        """Scratch for the running results of a reduction."""
        size = -(-block // self.lanes) * self.lanes
        scratch = [self.b.allocate((size,), wide(node.inputs[0].dtype), "l1")]
        if node.op is ops.argmax:
            scratch.append(self.b.allocate((size,), int64, "l1"))
        return scratch

    def over_block(self, body: Callable[[Size, Size], None]) -> None:
        """body(row, place in the block) for each vector of results."""

        def run(lane: Size, _: list[Node]) -> None:
            row = self.outer_row * self.space.inner + lane
            body(row, lane - self.start)

        self.lines.lane_loop(self.start, self.stop, run, size=self.space.inner)

    def peek(self, memory: Node, place: Size) -> Node:
        """Running results; the scratch is a whole number of vectors, so no mask is needed."""
        return self.b.load(memory, (self.first(place),), (self.lanes,), (0,))

    def poke(self, memory: Node, value: Node, place: Size) -> None:
        """Put running results back."""
        value = self.b.broadcast(value, (self.lanes,))
        self.b.store(memory, value, (self.first(place),), (0,))

    def first(self, place: Size) -> Size:
        """The place of the first lane."""
        return substitute(place, {self.e.lane: self.e.base}) if self.e.lane is not None else place

    def known_results(self, stage: int, row: Size, place: Size) -> None:
        """Bind the reductions of earlier stages at this place."""
        for v in self.space.reduces:
            if self.space.levels[v] < stage:
                index = unravel(row, v.shape)
                found = self.peek(self.running[v][-1], place)
                self.e.bind(v, index, self.e.settled(found, v))

    def column_stage(self, reduces: Sequence[Node], stage: int) -> None:
        """Take the reduced elements, a few at a time, over the block."""

        def clear(row: Size, place: Size) -> None:
            for v in reduces:
                for memory, x in zip(self.running[v], self.sums.starts([v], (self.lanes,))):
                    self.poke(memory, x, place)

        self.over_block(clear)
        many = MANY if high(self.space.region.columns) >= 2 * MANY else 1

        def taking(count: int) -> Step:
            def at(column: Size, _: list[Node]) -> None:
                def body(row: Size, place: Size) -> None:
                    self.known_results(stage, row, place)
                    values = [self.peek(m, place) for v in reduces for m in self.running[v]]
                    for k in range(count):
                        values = self.feed(reduces, row, column + k, values)
                        if count > 1:
                            self.ask_ahead(reduces, row, column + (count + k))
                    memories = [m for v in reduces for m in self.running[v]]
                    for memory, x in zip(memories, values):
                        self.poke(memory, x, place)

                with self.e.scope():
                    self.over_block(body)

            return at

        self.over_columns(reduces, many, taking)

    def over_columns(
        self, reduces: Sequence[Node], many: int, taking: Callable[[int], Step]
    ) -> None:
        """All reduced elements, `many` at a time; long sums of floats in blocks."""
        b, columns = self.b, self.space.region.columns
        whole = floor_divide(columns, many) * many
        long = [v for v in reduces if is_blocked(v)] if high(columns) > CHAIN else []
        totals = {v: b.allocate(self.running[v][0].shape, float64, "l1") for v in long}

        def block(at: Size, _: list[Node]) -> None:
            b.loop("column", at, minimum(at + CHAIN, whole), many, taking(many))
            self.over_block(lambda _, place: self.to_totals(totals, place))

        if long:
            self.over_block(lambda _, place: self.to_totals(totals, place, first=True))
            b.loop("block", 0, whole, CHAIN, block)
        else:
            b.loop("column", 0, whole, many, taking(many))
        if modulo(columns, many) != 0:
            b.loop("rest", whole, columns, 1, taking(1))
        if long:
            self.over_block(lambda _, place: self.to_totals(totals, place, last=True))

    def to_totals(
        self, totals: dict[Node, Node], place: Size, first: bool = False, last: bool = False
    ) -> None:
        """Add what a block gave to its total and start anew; at last put the total back."""
        b = self.b
        for v, memory in totals.items():
            own, (none,) = self.running[v][0], self.sums.starts([v], (self.lanes,))
            new = b.cast(none if first else self.peek(own, place), float64)
            new = new if first else b.apply("add", self.peek(memory, place), new)
            if last:
                self.poke(own, b.cast(new, none.dtype), place)
            else:
                self.poke(memory, new, place)
                self.poke(own, none, place)

    def ask_ahead(self, reduces: Sequence[Node], row: Size, column: Size) -> None:
        """Prefetch what a later turn reads: each row is a page of its own, unknown to hardware."""
        e, b = self.e, self.b
        assert e.lane is not None
        starts = self.space.expressions_at(reduces, (), row, column)
        for node, index in reads_below(starts, self.sheet.inputs):
            offset = offset_of(node, index)
            if coefficient(offset, e.lane) != 1:
                continue
            for part in range(0, self.lanes, max(1, 64 // node.dtype.size)):
                at = substitute(offset, {e.lane: e.base + part})
                b.prefetch(self.sheet.inputs[node], at)

    def column_results(self, stages: int) -> None:
        """Write results and what follows from them."""

        def body(row: Size, place: Size) -> None:
            self.known_results(stages + 1, row, place)
            self.write_rows(self.space.region.stored, row)

        self.over_block(body)
