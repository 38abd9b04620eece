"""Long rows: a program walks its row once for each stage that needs all of the one before.

A sum of exp(x - max) joins the walk that finds the max (see `online`): softmax needs two walks, a
logsumexp one. What a later walk reads again is kept in shared memory on the first, as much of the
row as fits there (`Kept`), so that only the rest comes from memory a second time.

Invariant: a row's sums are added in an order that depends on shapes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.config import invariant
from ...core.dtype import int64
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import (
    Expr,
    Size,
    coefficient,
    floor_divide,
    high,
    loop_index,
    low,
    modulo,
    named,
    substitute,
)
from ...tile import ops as tile_ops
from ...tile.build import Body
from ..access import Index, depends, offset_of, unravel
from ..evaluate import wide
from ..space import COMBINE, KINDS, identity, is_blocked, reduce_index
from .online import Online, Part, ThreadOnline
from .space import WARP, Roles, plain_reads

FAR_OFF = 1 << 62  # no place: above every index
SPARE = 16 << 10  # bytes of shared memory that are left to reductions


@dataclass
class Walk:
    """One walk over a row: what it reduces and writes, and the linear pieces it is made of."""

    row: Size
    inner: Size
    reduces: Sequence[Node]
    writes: Sequence[Node] = ()
    online: Sequence[Online] = ()
    tiles: int = 4  # taken in one turn


@dataclass
class Kept:
    """Reads that shared memory holds: the first `size` elements of a row."""

    size: int = 0
    lane: Expr | None = None  # the atom that stands for the lane in `places`
    places: dict[tuple[Node, Index], Node] = field(default_factory=dict)
    filled: bool = False

    def at(self, lane: Size) -> list[tuple[Node, Index, Node]]:
        """The reads at a lane, with their places."""
        assert self.lane is not None
        moved = {self.lane: lane}
        return [
            (n, tuple(substitute(i, moved) for i in index), place)
            for (n, index), place in self.places.items()
        ]


class ThreadSweep(ThreadOnline):
    """Walks over long rows, and the accumulators of reductions."""

    def stages(self) -> int:
        """Levels of reductions."""
        return max(self.levels[v] for v in self.reduces)

    # ---- walks ----------------------------------------------------------------------------

    def swept(self, rows: Size, columns: Size) -> list[tuple[Body, Roles]]:
        """One row a program, one loop over it a stage."""
        self.begin(self.name)
        row = self.b.program(0, rows)
        self.use_threads(16)
        walks = self.walks(row)
        kept = self.plan_kept(walks)
        self.ask_row(walks)
        self.row_results(row, 0)  # what needs no reduction
        for stage, walk in walks:
            if walk.reduces or walk.writes:
                values = self.start_walk(walk)
                if kept.size:
                    values = self.sweep(walk, 0, kept.size, values, kept)
                    kept.filled = True
                    walk.tiles = 4  # of the rest, all that registers hold is asked for at once
                values = self.sweep(walk, kept.size, columns, values)
                self.finish_walk(walk, values)
            self.row_results(row, stage)
        return [self.end((rows,), self.warps, self.roles())]

    def ask_row(self, walks: Sequence[tuple[int, Walk]]) -> None:
        """Ask for what a row has one of, so that nothing waits for it after a reduction."""
        lane = named("loop", "lane", 0, max(1, high(self.group.columns) - 1))
        for _, walk in walks:
            for node, index in plain_reads(self.expressions_at(walk, lane), self.inputs):
                if not any(depends(i, [lane]) for i in index):
                    self.e.value(node, index)

    def walks(self, row: Size) -> list[tuple[int, Walk]]:
        """The walks over a row in order, each with the stage whose results it ends."""
        online = self.find_online()
        done = {o.total for o in online}
        inner = self.inner if self.inner == self.group.columns else self._inner_of_walk()
        element = [v for v in self.group.stored if not self.is_row_level(v)]
        found = []
        for stage in range(1, self.stages() + 2):
            reduces = [v for v in self.reduces if self.levels[v] == stage and v not in done]
            writes = [v for v in element if self.levels[v] == stage - 1]
            own = [o for o in online if o.largest in reduces]
            found.append((stage, Walk(row, inner, reduces, writes, own, 1 if writes else 4)))
        return found

    def use_threads(self, warps: int) -> None:
        """Threads and lanes of a program that walks a long row."""
        self.warps = warps
        self.lanes = self.warps * WARP * self.vector()

    def _inner_of_walk(self) -> Size:
        """Linear pieces where they are long enough to fill a tile, else the whole row."""
        return self.inner if low(self.inner) * 2 >= self.lanes else self.group.columns

    def plan_kept(self, walks: Sequence[tuple[int, Walk]]) -> Kept:
        """Keep what the first walk reads and a later one reads again, as much as fits."""
        columns = self.group.columns
        lane = named("loop", "lane", 0, max(1, high(columns) - 1))
        first, *later = [
            self.reads_of_walk(w, lane, lane) for _, w in walks if w.reduces or w.writes
        ]
        again = [key for key in first if any(key in reads for reads in later)]
        shared = self.target.memories.get("shared")
        if not again or shared is None or not isinstance(columns, int) or self.inner != columns:
            return Kept()
        if invariant():
            return Kept()  # more threads would add in another order
        self.use_threads(32)  # one program has a core for itself
        room = (shared.bytes - SPARE) // sum(n.dtype.size for n, _ in again)
        size = min(room, columns) // self.lanes * self.lanes
        if size * 4 < columns:
            self.use_threads(16)
            return Kept()
        places = {(n, i): self.b.allocate((size,), n.dtype, "shared") for n, i in again}
        return Kept(size, lane, places)

    def reads_of_walk(self, walk: Walk, lane: Expr, column: Size) -> list[tuple[Node, Index]]:
        """The contiguous reads of a walk that nothing guards."""
        found = plain_reads(self.expressions_at(walk, column), self.inputs)
        return [(n, i) for n, i in found if coefficient(offset_of(n, i), lane) == 1]

    def expressions_at(self, walk: Walk, column: Size) -> list[tuple[Node, Index]]:
        """What a walk evaluates, and where."""
        found = [(v.inputs[0], reduce_index(v, walk.row, column)) for v in walk.reduces]
        return found + [(v, self.index_at(v, walk.row, column)) for v in walk.writes]

    def start_walk(self, walk: Walk) -> list[Node]:
        """Accumulators before a walk; what is the same for the whole row is evaluated here."""
        lane = named("loop", "lane", 0, max(1, high(walk.inner) - 1))
        outer = loop_index("outer", floor_divide(self.group.columns, walk.inner))
        column = outer * walk.inner + lane
        for node, index in self.expressions_at(walk, column):
            self.e.hoist(node, index, [a for a in (outer, lane) if isinstance(a, Expr)])
        return self.accumulators(walk)

    def accumulators(self, walk: Walk) -> list[Node]:
        """Accumulators that have taken nothing."""
        one, shifts = self.grouped(), [o.largest for o in walk.online]
        values = [
            x for v in walk.reduces for x in self.starts(v, one if v in shifts else (self.lanes,))
        ]
        return values + [x for o in walk.online for x in self.start_online(o)]

    def sweep(
        self, walk: Walk, start: Size, stop: Size, values: list[Node], kept: Kept | None = None
    ) -> list[Node]:
        """Accumulators after columns start to stop of a row."""
        outer_size = floor_divide(self.group.columns, walk.inner)
        span = (start, stop) if outer_size == 1 else (0, walk.inner)
        fresh = self.accumulators(walk)
        blocked = [is_blocked(v) for v in walk.reduces for _ in self.starts(v, ())]
        blocked += [False] * (len(fresh) - len(blocked))

        def piece(outer: Size, first: Size, last: Size, carried: list[Node]) -> list[Node]:
            return self.piece(walk, outer, first, last, carried, kept)

        return self.over_lines(blocked, fresh, outer_size, span, piece, values)

    def piece(
        self,
        walk: Walk,
        outer: Size,
        start: Size,
        stop: Size,
        values: list[Node],
        kept: Kept | None,
    ) -> list[Node]:
        """One linear piece: several tiles a turn; of the last turn only the last tile is masked.

        What is left is one turn too where its size is known: all of it is asked for at once.
        """
        b, lanes, step = self.b, self.lanes, walk.tiles * self.lanes
        span = stop - start
        middle = start + floor_divide(span, step) * step

        def one(count: int, whole: int) -> Any:
            return lambda base, carried: self.feed(
                walk, outer, base, stop, count, whole, carried, kept
            )

        values = b.loop("i", start, middle, step, one(walk.tiles, walk.tiles), values)
        left = modulo(span, step)
        if left == 0:
            return values
        if isinstance(left, int):
            return one(-(-left // lanes), left // lanes)(middle, values)
        return b.loop("rest", middle, stop, lanes, one(1, 0), values)

    def feed(
        self,
        walk: Walk,
        outer: Size,
        base: Size,
        stop: Size,
        count: int,
        whole: int,
        values: list[Node],
        kept: Kept | None,
    ) -> list[Node]:
        """Accumulators after `count` tiles from base on, of which the first `whole` need no mask;
        writes what is wanted there."""
        b, e = self.b, self.e
        parts: list[list[Part]] = []

        def tile(k: int) -> Any:
            at = base + k * self.lanes
            return e.tile(walk.row, 1, self.group.rows or 1, at, self.lanes, stop, k < whole)

        asked: list[list[tuple[Node, Index, Node]]] = [[] for _ in range(count)]
        for k in range(count if walk.writes and count > 1 else 0):  # before anything is written
            with tile(k) as (_, lane):
                column = outer * walk.inner + lane
                asked[k] = [
                    (n, i, b.cast(e.value(n, i), n.dtype))
                    for n, i in self.reads_of_walk(walk, lane, column)
                ]
        for k in range(count):
            at = base + k * self.lanes
            with tile(k) as (_, lane):
                column = outer * walk.inner + lane
                for node, index, x in asked[k]:
                    e.bind(node, index, b.cast(x, wide(node.dtype)))
                if kept is not None:
                    self.keep(kept, lane, at)
                parts.append(self.taken(walk, column))
        return self.combine_parts(walk, parts, values)

    def taken(self, walk: Walk, column: Size) -> list[Part]:
        """What a walk reduces of a tile; what it writes there is written."""
        b, e, found = self.b, self.e, []
        rests = [(o.total, o.x) for o in walk.online]
        for v, source in [*((v, v.inputs[0]) for v in walk.reduces), *rests]:
            x = e.value(source, reduce_index(v, walk.row, column))
            place = b.broadcast(b.index(column), (self.lanes,))
            found.append((b.broadcast(x, (self.lanes,)), place, e.lane_mask))
        for v in walk.writes:
            index = self.index_at(v, walk.row, column)
            e.store(self.outputs[v], e.value(v, index), offset_of(v, index))
        return found

    def keep(self, kept: Kept, lane: Size, at: Size) -> None:
        """Put a tile's reads into shared memory, or take them from there."""
        b, e = self.b, self.e
        for node, index, place in kept.at(lane):
            if kept.filled:
                x = b.load(place, (at,), (self.lanes,), (0,))
                e.bind(node, index, b.cast(x, wide(node.dtype)))
            else:
                b.store(place, b.cast(e.value(node, index), node.dtype), (at,), (0,))

    def row_results(self, row: Size, stage: int) -> None:
        """Write what is known of the row after a stage."""
        for v in self.group.stored:
            if self.is_row_level(v) and self.levels[v] == stage:
                index = unravel(row, v.shape)
                x = self.e.value(v, index)
                self.e.store(self.outputs[v], x, offset_of(v, index))

    # ---- accumulators ---------------------------------------------------------------------

    def starts(self, node: Node, shape: tuple[int, ...]) -> list[Node]:
        """Accumulators of a reduction before its walk."""
        dtype = wide(node.inputs[0].dtype)
        if node.op is ops.argmax:
            first = FAR_OFF if self.group.columns != 0 else 0  # of nothing: index 0
            return [
                self.b.constant(dtype.lowest, dtype, shape),
                self.b.constant(first, int64, shape),
            ]
        return [self.b.constant(identity(KINDS[node.op], dtype), dtype, shape)]

    def combine_parts(self, walk: Walk, parts: list[list[Part]], values: list[Node]) -> list[Node]:
        """Accumulators with the values of some tiles taken in."""
        result: list[Node] = []
        online = {o.largest for o in walk.online}
        shifts: dict[Node, Node] = {}  # the largest with these tiles
        position = 0
        for n, v in enumerate(walk.reduces):
            width = 2 if v.op is ops.argmax else 1
            new = values[position : position + width]
            if v in online:
                new = [self.take_largest(new[0], [p[n] for p in parts])]
                shifts[v] = new[0]
            else:
                for part in parts:
                    new = self.take(v, *part[n], new)
            result += new
            position += width
        for n, o in enumerate(walk.online):
            own = [part[len(walk.reduces) + n] for part in parts]
            old = values[position + 3 * n : position + 3 * n + 3]
            result += self.take_exponentials(shifts[o.largest], own, *old)
        return result

    def take(
        self, node: Node, x: Node, place: Node, mask: Node | None, old: list[Node]
    ) -> list[Node]:
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

    def finish_walk(self, walk: Walk, values: list[Node]) -> None:
        """Combine the lanes and say what each reduction gave."""
        position = 0
        tops: dict[Node, Node] = {}
        for v in walk.reduces:
            if v.op is ops.argmax:
                best, where = values[position : position + 2]
                position += 2
                index = unravel(walk.row, v.shape)
                self.e.bind(v, index, self.first_largest(best, where, None, 0))
                continue
            tops[v] = values[position]
            position += 1
        totals = [(v, self._all(x, KINDS[v.op])) for v, x in tops.items()]  # side by side
        for v, total in totals:
            self.e.bind(v, unravel(walk.row, v.shape), self.e.settled(total, v))
        for o in walk.online:
            self.finish_online(o, walk.row, tops[o.largest], *values[position : position + 3])
            position += 3

    def _all(self, x: Node, kind: str) -> Node:
        return self.b.add(tile_ops.reduce(x, axis=0, kind=kind)) if x.shape else x

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
