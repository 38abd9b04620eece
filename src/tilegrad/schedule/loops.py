"""Lower a Region of elementwise values and reductions to one Body of vector loops.

Regions without reductions are flat: rows of neighbouring elements, long rows in blocks; reads
that run across the rows go through square tiles turned in registers. `turned_body` is long because
its squares share what is bound.

Reductions by rows: one row a program, one loop over its columns a stage. Each loop feeds all
reductions of its stage with vector accumulators, combined across lanes at the end; later stages
read what earlier ones found; a last loop writes element-level results. The row stays in the cache,
so memory is read once and written once; costly values that several loops need are kept in scratch.

Reductions by columns: a block of neighbouring results a program. The reduced axis is taken a few
elements at a time with accumulators in scratch memory, so memory is read in order.

Sums go in blocks where they are long: accumulators start anew in each, and their totals are added
in float64. Invariant: the order of every sum depends on shapes and the Plan alone, never on the
number of workers, so results are the same bits run to run; few additions go to one float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.dtype import float32, float64, int64
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import (
    Expr,
    Size,
    ceil_divide,
    coefficient,
    high,
    minimum,
    round_up,
    substitute,
)
from .access import (
    Index,
    Place,
    atom_of,
    below,
    depends,
    offset_of,
    reads_below,
    unravel,
    walk_down,
)
from .family import Bodies
from .lines import CHAIN, Lines, Reductions, RowSweeps, Sweep, sweeps
from .region import COSTLY, Region
from .sheet import Sheet
from .space import Space, is_blocked

BLOCK = 8192  # elements of a flat elementwise program


def lower_loops(region: Region) -> Bodies:
    """The Body of a Region; its parameters are what it reads, then what is stored."""
    space = Space(region)
    sheet = Sheet.of(region)
    inner = space.pick_inner()
    space.settle(inner)
    lanes = space.pick_lanes(inner)
    kinds = {"row": RowLoops, "column": ColumnLoops} if space.reduces else {}
    loops: Any = kinds.get(space.order, FlatLoops)(space, sheet, lanes)
    return [sheet.end(loops.body(), lanes=loops.lanes, inner=inner)]


class FlatLoops(Lines):
    """Lowers Regions without reductions."""

    def body(self) -> Size:
        """Elementwise: rows of `inner` elements, long rows in blocks; or turned squares."""
        rows, inner, turned = self.space.shape.row_count, self.space.inner, self.turned_reads()
        if turned:
            return self.turned_body(turned)
        blocks: Size = ceil_divide(inner, BLOCK) if high(inner) > 2 * BLOCK else 1
        grid, (row, number) = self.sheet.programs(rows, blocks)

        lane, start = atom_of("lane", inner), number * BLOCK
        with self.e.scope():
            for v in self.space.region.stored:
                self.e.hoist(v, self.space.index_at(v, row, lane), [lane])
            stop = inner if blocks == 1 else minimum(start + BLOCK, inner)
            for at in self.vectors(start, stop, inner):
                self.write_all(row, at)
        return grid

    # ---- turned: reads that run across the rows -------------------------------------------

    def turned_reads(self) -> list[Place]:
        """Reads that jump along the lanes but are contiguous along rows: worth turning."""
        side, space = self.space.target.lanes(float32), self.space
        inner, rows = space.inner, space.shape.rows
        if not isinstance(inner, int) or not isinstance(rows, int):
            return []
        if inner < side or rows % side or inner * rows < 1 << 12:
            return []
        sizes = (("lane", inner), ("turn", side), ("block", rows // side))
        self.square, self.atoms = (side, inner, rows), [atom_of(*size) for size in sizes]
        lane, turn, block = self.atoms
        found: dict[Place, None] = {}
        for v in space.region.stored:
            start = (v, space.index_at(v, block * side + turn, lane))
            for node, index in reads_below([start], self.sheet.inputs):
                offset = offset_of(node, index)
                if coefficient(offset, lane) in (0, 1):
                    continue
                if coefficient(offset, turn) != 1 or coefficient(offset, lane) is None:
                    return []
                found[(node, index)] = None
        return list(found)

    def turned_body(self, reads: list[Place]) -> Size:
        """Square tiles: read along rows, turned in registers, computed and written along lanes."""
        b, e, (side, inner, rows) = self.b, self.e, self.square
        self.lanes, p = side, b.program(0, rows // side)

        def place(index: Index, *at: Size) -> Index:  # at a lane and a turn
            mapping = dict(zip(self.atoms, (*at, p)))
            return tuple(substitute(i, mapping) for i in index)

        for base in b.each("i", 0, inner // side * side, side):
            lines: list[list[Node]] = []
            for node, index in reads:
                starts = [offset_of(node, place(index, base + k, 0)) for k in range(side)]
                memory = self.sheet.inputs[node]
                turned = b.turned([b.load(memory, (start,), (side,)) for start in starts])
                lines.append([b.extract(turned, k) for k in range(side)])
            for k in range(side):
                row = p * side + k
                with e.vector(base, side, inner, True) as own:
                    for (node, index), line in zip(reads, lines):
                        e.bind(node, place(index, own, k), b.cast(line[k], node.dtype.wide))
                    self.write_all(row, own)
        for number in b.each("turn", 0, side) if inner % side else ():
            with e.scope(), e.vector(inner // side * side, side, inner, False) as own:
                self.write_all(p * side + number, own)
        return rows // side

    def write_all(self, row: Size, lane: Size) -> None:
        """Evaluate and store every wanted value at (row, lane)."""
        for v in self.space.region.stored:
            self.sheet.write(v, self.space.index_at(v, row, lane))


# ---- by rows -------------------------------------------------------------------------------------

STASH_BYTES = 256 << 10


class RowLoops(RowSweeps):
    """Lowers Regions whose reductions run over trailing axes."""

    def body(self) -> Size:
        """One row a program."""
        rows = self.space.region.row_count
        row = self.b.program(0, rows)
        found = sweeps(self.space, row)
        self.plan_stash(found)
        self.over_row(row, found)
        return rows

    def plan_stash(self, found: Sequence[tuple[int, Sweep]]) -> None:
        """Costly values that several loops need are kept in scratch, if a row is not too long."""
        self.stash: dict[Place, Node] = {}
        self.filled: set[Place] = set()
        columns = self.space.region.columns
        if not isinstance(columns, int) or columns * 4 > STASH_BYTES:
            return
        counts = Counter(key for _, sweep in found for key in self.costly(sweep))
        for key in [k for k, n in counts.items() if n > 1][:4]:
            self.stash[key] = self.b.allocate((columns,), key[0].dtype.wide, "l1")

    def costly(self, sweep: Sweep) -> list[Place]:
        """The costly inlined Nodes that a sweep reaches, at indices that depend on the lane."""
        stored, (outer, lane) = self.space.stored_reads, sweep.atoms()

        def step(node: Node, index: Index) -> Sequence[Place]:
            known = node in stored or node in self.space.reduces
            return () if known else below(node, index)

        starts = sweep.expressions(outer * sweep.inner + lane)
        found = [p for p in walk_down(starts, step) if p[0].op in COSTLY and p[0] not in stored]
        return [(n, index) for n, index in found if any(depends(i, [lane]) for i in index)]

    def piece(
        self, sweep: Sweep, outer: Size, start: Size, stop: Size, values: list[Node]
    ) -> list[Node]:
        """Vectors over one linear piece."""
        e, (atom, own_lane) = self.e, sweep.atoms()
        column = outer * sweep.inner + own_lane
        needed = [key for key in self.costly(sweep) if key in self.stash]

        def moved(place: Place) -> Place:
            if not isinstance(atom, Expr):
                return place
            return place[0], tuple(substitute(i, {atom: outer}) for i in place[1])

        values = list(values)
        for _ in self.vectors(start, stop, sweep.inner, values):
            for key in needed:
                if key in self.filled:
                    e.bind(*moved(key), e._load(self.stash[key], column))
            values[:] = self.feed(sweep.reduces, sweep.row, column, values)
            for v in sweep.writes:
                self.sheet.write(v, self.space.index_at(v, sweep.row, column))
            for key in needed:
                if key not in self.filled:
                    e.store(self.stash[key], e.value(*moved(key)), column)
        return values

    def finish(self, sweep: Sweep, values: list[Node]) -> None:
        """Combine lanes; what the loop has kept is there for later ones."""
        self.filled.update(key for key in self.costly(sweep) if key in self.stash)
        super().finish(sweep, values)


# ---- by columns ----------------------------------------------------------------------------------

MANY = 8  # reduced elements that are added between reading and writing running results
COLUMN_BLOCK = 1024  # results of a column program: a 4 KiB page of float32 is read by one


class ColumnLoops(Reductions):
    """Lowers Regions whose reductions run over leading axes."""

    def body(self) -> Size:
        """A block of neighbouring results a program."""
        space = self.space
        rows, inner = space.region.row_count, space.inner
        outer_size = rows // inner
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
        for row, place in self.over_block():
            self.known_results(stages + 1, row, place)
            self.write_rows(space.region.stored, row)
        return grid

    def accumulators(self, node: Node, block: int) -> list[Node]:
        """Scratch for the running results of a reduction."""
        size = round_up(block, self.lanes)
        scratch = [self.b.allocate((size,), node.inputs[0].dtype.wide, "l1")]
        if node.op is ops.argmax:
            scratch.append(self.b.allocate((size,), int64, "l1"))
        return scratch

    def over_block(self) -> Iterator[tuple[Size, Size]]:
        """(row, first place in the block) of each vector of results, as `for` writes them."""
        for lane in self.vectors(self.start, self.stop, self.space.inner):
            yield self.outer_row * self.space.inner + lane, self.e.base - self.start

    def peek(self, memory: Node, place: Size) -> Node:
        """Running results; the scratch is a whole number of vectors, so no mask is needed."""
        return self.b.load(memory, (place,), (self.lanes,))

    def poke(self, memory: Node, value: Node, place: Size) -> None:
        """Put running results back."""
        self.b.store(memory, self.b.broadcast(value, (self.lanes,)), (place,))

    def known_results(self, stage: int, row: Size, place: Size) -> None:
        """Bind the reductions of earlier stages at this place."""
        for v in self.space.reduces:
            if self.space.levels[v] < stage:
                index = unravel(row, v.shape)
                found = self.peek(self.running[v][-1], place)
                self.e.bind(v, index, self.e.settled(found, v))

    def column_stage(self, reduces: Sequence[Node], stage: int) -> None:
        """Take the reduced elements, a few at a time, over the block."""
        memories = [m for v in reduces for m in self.running[v]]
        for _, place in self.over_block():
            for memory, x in zip(memories, self.sums.starts(reduces, (self.lanes,))):
                self.poke(memory, x, place)
        for column, count in self.turns(reduces):
            with self.e.scope():
                for row, place in self.over_block():
                    self.known_results(stage, row, place)
                    values = [self.peek(m, place) for m in memories]
                    for k in range(count):
                        values = self.feed(reduces, row, column + k, values)
                        if count > 1:
                            self.ask_ahead(reduces, row, column + (count + k))
                    for memory, x in zip(memories, values):
                        self.poke(memory, x, place)

    def turns(self, reduces: Sequence[Node]) -> Iterator[tuple[Size, int]]:
        """(first, how many) of the reduced elements, as `for` writes loops over them: MANY at a
        time where there are enough; long sums of floats in blocks."""
        b, columns = self.b, self.space.region.columns
        many = MANY if high(columns) >= 2 * MANY else 1
        whole = columns // many * many
        long = [v for v in reduces if is_blocked(v)] if high(columns) > CHAIN else []
        totals = {v: b.allocate(self.running[v][0].shape, float64, "l1") for v in long}
        if long:
            self.to_totals(totals, first=True)
            for at in b.each("block", 0, whole, CHAIN):
                for column in b.each("column", at, minimum(at + CHAIN, whole), many):
                    yield column, many
                self.to_totals(totals)
        else:
            for column in b.each("column", 0, whole, many):
                yield column, many
        if columns % many != 0:
            for column in b.each("rest", whole, columns):
                yield column, 1
        if long:
            self.to_totals(totals, last=True)

    def to_totals(self, totals: dict[Node, Node], first: bool = False, last: bool = False) -> None:
        """Add what a block gave to its total and start anew; at last put the total back."""
        b = self.b
        for _, place in self.over_block():
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
            for part in range(0, self.lanes, 64 // node.dtype.size):
                at = substitute(offset, {e.lane: e.base + part})
                b.prefetch(self.sheet.inputs[node], at)
