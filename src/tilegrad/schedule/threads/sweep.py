"""Long rows: a program sweeps its row once for each stage that needs all of the one before.

What a later sweep reads again is kept in shared memory on the first, as much of the row as fits
there (`Kept`), so that only the rest comes from memory a second time. A sum of exp(x - max) joins
the sweep that finds the max: softmax needs two sweeps, a logsumexp one. A thread keeps one largest
value of all its elements so far, and the sum of what it took with respect to that; a larger one
shrinks the sum. The tiles of a turn are first combined element by element (maxima of 16-bit floats
as they are, two at a time), so that a turn has one shift, and one exponential for shrinking, in
each thread.

Invariant: a row's sums are added in an order that depends on shapes and the Target alone; the
shift of a sum is finite, so that an infinite element gives inf or 0, not nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ...core.config import invariant
from ...core.dtype import DType, float32
from ...graph import ops
from ...ir.node import Node, walk
from ...ir.symbol import Expr, Size, coefficient, substitute
from ...tile import ops as tile_ops
from ...tile.build import BodyBuilder
from ..access import MOVEMENT, Place, atom_of, depends, offset_of, unravel
from ..family import Bodies
from ..lines import Lines, Online, RowSweeps, Sweep, shared_out, sweeps
from ..space import reduce_index
from .space_threads import WARP, ThreadPart, ThreadSpace, plain_reads
from .tiles import ThreadSheet, ask, have

WARPS, MANY_WARPS = 16, 32  # of a program; many where it has a core for itself
SPARE = 16 << 10  # bytes of shared memory that are left to reductions


@dataclass
class Kept:
    """Reads that shared memory holds: the first `size` elements of a row."""

    size: int = 0
    atoms: tuple[Expr, ...] = ()  # that stand in `reads` for the lane, or for row and lane
    reads: Sequence[Place] = ()
    held: Sequence[Node] = ()  # where they lie
    within: bool = False  # whether a sweep is over those elements now
    filled: bool = False

    def allocate(self, b: BodyBuilder) -> None:
        """Places in a Body."""
        self.held = [b.allocate((self.size,), n.dtype, "shared") for n, _ in self.reads]

    def at(self, *index: Size) -> list[Place]:
        """The reads, with their atoms replaced."""
        moved = dict(zip(self.atoms, index))
        return [(n, tuple(substitute(i, moved) for i in at)) for n, at in self.reads]


def sweeps_of(space: ThreadSpace, row: Size, lanes: int) -> list[tuple[int, Sweep]]:
    """The sweeps over a row, with sums of exponentials in those that find their shifts."""
    return sweeps(space, row, lanes, find_online(space))


def reads_of_sweep(sweep: Sweep, lane: Expr, column: Size) -> list[Place]:
    """The contiguous reads of a sweep that nothing guards."""
    found = plain_reads(sweep.expressions(column), sweep.space.stored_reads)
    return [place for place in found if coefficient(offset_of(*place), lane) == 1]


def busy(sweeps: Sequence[tuple[int, Sweep]]) -> list[Sweep]:
    """Those that do something."""
    return [sweep for _, sweep in sweeps if sweep.reduces or sweep.writes]


def reread(sweeps: Sequence[Sweep], lane: Expr) -> list[Place]:
    """What the first of some sweeps reads along the lanes, and a later one as well."""
    first, *later = [reads_of_sweep(sweep, lane, lane) for sweep in sweeps]
    return [place for place in first if any(place in reads for reads in later)]


def lanes_of(space: ThreadSpace, warps: int) -> int:
    """Lanes of the tiles of a program that sweeps a long row."""
    return warps * WARP * min(space.vector(), space.room())


def swept(space: ThreadSpace, rows: Size) -> Bodies:
    """One row a program, one loop over it a stage."""
    sheet = space.sheet(space.name)
    row = sheet.b.program(0, rows)
    found = sweeps_of(space, row, lanes_of(space, WARPS))
    warps, kept = plan_kept(space, found)
    kept.allocate(sheet.b)
    sweeper = Sweeper(space, sheet, warps, kept)
    sweeper.ask_row(found)
    sweeper.over_row(row, found)
    return [sheet.end(rows, warps=warps)]


def plan_kept(space: ThreadSpace, sweeps: Sequence[tuple[int, Sweep]]) -> tuple[int, Kept]:
    """Keep what the first sweep reads and a later one reads again, as much as fits; and the warps
    of a program."""
    columns = space.region.columns
    lane = atom_of("lane", columns)
    kept = reread(busy(sweeps), lane)
    if not kept or not isinstance(columns, int) or space.inner != columns:
        return WARPS, Kept()
    lanes = lanes_of(space, MANY_WARPS)
    room = (space.target.memories["shared"].bytes - SPARE) // sum(n.dtype.size for n, _ in kept)
    size = min(room, columns) // lanes * lanes
    # more threads would have too few registers, or add in another order
    if space.room() < space.vector() or size * 4 < columns or invariant():
        return WARPS, Kept()
    return MANY_WARPS, Kept(size, (lane,), kept)


class Sweeper(RowSweeps, ThreadPart):
    """Sweeps over long rows in one Body."""

    def __init__(self, space: ThreadSpace, sheet: ThreadSheet, warps: int, kept: Kept) -> None:
        super().__init__(space, sheet, lanes_of(space, warps))
        self.online, self.kept = OnlineSums(space, sheet, self.lanes), kept

    def ask_row(self, sweeps: Sequence[tuple[int, Sweep]]) -> None:
        """Ask for what a row has one of, so that nothing waits for it after a reduction."""
        lane = atom_of("lane", self.space.region.columns)
        for _, sweep in sweeps:
            for node, index in plain_reads(sweep.expressions(lane), self.space.stored_reads):
                if not any(depends(i, [lane]) for i in index):
                    self.e.value(node, index)

    def swept(self, sweep: Sweep) -> list[Node]:
        """Accumulators after a whole sweep: what is kept first."""
        values, kept = self.start(sweep), self.kept
        if kept.size:
            kept.within = True
            values = self.sweep(sweep, 0, kept.size, values)
            kept.within, kept.filled = False, True
            sweep.tiles = 4  # of the rest, all that registers hold is asked for at once
        return self.sweep(sweep, kept.size, self.space.region.columns, values)

    def accumulators(self, sweep: Sweep) -> list[Node]:
        """Accumulators that have taken nothing."""
        one, shifts = self.online.per_thread(), [o.largest for o in sweep.online]
        values = [
            x
            for v in sweep.reduces
            for x in self.sums.starts([v], one if v in shifts else (self.lanes,))
        ]
        return values + [x for o in sweep.online for x in self.online.start(o)]

    def piece(
        self, sweep: Sweep, outer: Size, start: Size, stop: Size, values: list[Node]
    ) -> list[Node]:
        """One linear piece: several tiles a turn; of the last turn only the last tile is masked.

        What is left is one turn too where its size is known: all of it is asked for at once.
        """
        b, e, lanes, step = self.b, self.e, self.lanes, sweep.tiles * self.lanes
        span = stop - start
        middle = start + span // step * step
        values = list(values)

        def turn(base: Size, count: int, whole: int) -> None:
            """Tiles from base on, of which the first `whole` need no mask."""
            starts = [(base + k * lanes, k < whole) for k in range(count)]
            asked: list[tuple[list[Place], list[Node]]] = [([], [])] * count
            for k in range(count if sweep.writes and count > 1 else 0):  # before any is written
                with self.tile(sweep, starts[k][0], stop, starts[k][1]) as (_, lane):
                    reads = reads_of_sweep(sweep, lane, outer * sweep.inner + lane)
                    asked[k] = reads, ask(e, reads)
            parts = []
            for (at, inside), known in zip(starts, asked):
                with self.tile(sweep, at, stop, inside) as (_, lane):
                    have(e, *known)
                    if self.kept.within:
                        self.keep(lane, at)
                    parts.append(self.taken(sweep, outer * sweep.inner + lane))
            values[:] = self.combine_parts(sweep, parts, values)

        for base in b.each("i", start, middle, step, values):
            turn(base, sweep.tiles, sweep.tiles)
        left = span % step
        if not isinstance(left, int):
            for base in b.each("rest", middle, stop, lanes, values):
                turn(base, 1, 0)
        elif left:
            turn(middle, -(-left // lanes), left // lanes)
        return values

    def tile(self, sweep: Sweep, at: Size, stop: Size, whole: bool) -> Any:
        """Lanes of a sweep's row from a place on; yields (row, lane)."""
        rows = self.space.region.row_count
        return self.e.tile(sweep.row, 1, rows, at, self.lanes, stop, whole)

    def taken(self, sweep: Sweep, column: Size) -> list[Part]:
        """What a sweep reduces of a tile; what it writes there is written."""
        b, e, found = self.b, self.e, []
        rests = [(o.total, o.x) for o in sweep.online]
        for v, source in [*((v, v.inputs[0]) for v in sweep.reduces), *rests]:
            x = e.value(source, reduce_index(v, sweep.row, column))
            place = b.broadcast(b.index(column), (self.lanes,))
            found.append((b.broadcast(x, (self.lanes,)), place, e.lane_mask))
        for v in sweep.writes:
            self.sheet.write(v, self.space.index_at(v, sweep.row, column))
        return found

    def keep(self, lane: Size, at: Size) -> None:
        """Put a tile's reads into shared memory, or take them from there."""
        for read, place in zip(self.kept.at(lane), self.kept.held):
            if self.kept.filled:
                have(self.e, [read], [self.b.load(place, (at,), (self.lanes,))])
            else:
                self.b.store(place, ask(self.e, [read])[0], (at,))

    def combine_parts(
        self, sweep: Sweep, parts: list[list[Part]], values: list[Node]
    ) -> list[Node]:
        """Accumulators with the values of some tiles taken in."""
        result: list[Node] = []
        online = {o.largest for o in sweep.online}
        shifts: dict[Node, Node] = {}  # the largest with these tiles
        for n, (v, new) in enumerate(shared_out(sweep.reduces, values)):
            if v in online:
                new = [self.online.take_largest(new[0], [p[n] for p in parts])]
                shifts[v] = new[0]
            else:
                for part in parts:
                    new = self.sums.take(v, *part[n], new)
            result += new
        first = len(result)
        for n, o in enumerate(sweep.online):
            own = [part[len(sweep.reduces) + n] for part in parts]
            old = values[first + 3 * n : first + 3 * n + 3]
            result += self.online.take_exponentials(shifts[o.largest], own, old)
        return result

    def finish(self, sweep: Sweep, values: list[Node]) -> None:
        """Combine the lanes and say what each reduction gave."""
        super().finish(sweep, values)
        tops = {v: own[0] for v, own in shared_out(sweep.reduces, values)}
        rest = values[len(values) - 3 * len(sweep.online) :]
        for n, o in enumerate(sweep.online):
            self.online.finish(o, sweep.row, tops[o.largest], rest[3 * n : 3 * n + 3])


# ---- sums of exponentials ------------------------------------------------------------------------

FINITE, FINITE_WIDE = 3.4028234663852886e38, 1.7e308  # least and most of a shift

Part = tuple[Node, Node, "Node | None"]  # of a tile: values, their places, a mask


def find_online(space: ThreadSpace) -> list[Online]:
    """Sums of exp(x - max of the row): they need no sweep of their own."""
    found = []
    for v in space.reduces:
        if v.op is not ops.sum_ or space.levels[v] != 2:
            continue
        e = _through_casts(v.inputs[0])
        if e.op is not ops.exp or e.inputs[0].op is not ops.subtract:
            continue
        x, shift = e.inputs[0].inputs
        if any(space.levels[u] for u in own_below(space, x)):
            continue
        first = [u for u in own_below(space, shift) if u.op is ops.max_ and space.levels[u] == 1]
        if first and _per_row(space, shift):
            found.append(Online(v, first[0], x, shift))
    return found


def own_below(space: ThreadSpace, node: Node) -> list[Node]:
    """The Region's own values that an expression rests on, itself included."""

    def step(current: Node) -> Sequence[Node]:
        own = current in space.members or current not in space.all_values
        return current.inputs if own and current not in space.reduces else ()

    return [n for n in walk([node], step) if n in space.members]


def _per_row(space: ThreadSpace, node: Node) -> bool:
    """Whether a value is the same for all columns of a row."""
    while node.op in MOVEMENT:
        if node.op is ops.expand and space.is_per_row(node.inputs[0]):
            return True
        node = node.inputs[0]
    return space.is_per_row(node)


class OnlineSums(Lines, ThreadPart):
    """Accumulators of sums of exponentials, beside the largest value on which they rest."""

    def per_thread(self) -> tuple[int]:
        """The shape of what each thread has one of."""
        return (self.lanes // self.space.vector(),)

    def run(self) -> int:
        """Neighbours that a thread holds: as many as rows are aligned to."""
        run = self.space.vector()
        while self.space.region.columns % run != 0:
            run //= 2
        return run

    def start(self, online: Online) -> list[Node]:
        """The sum, and the factor and level of its terms, before a sweep."""
        dtype = online.total.dtype.wide
        return [self.b.constant(x, dtype, self.per_thread()) for x in (0.0, 1.0, -_most(dtype))]

    def take_largest(self, old: Node, parts: Sequence[Part]) -> Node:
        """The largest of each thread's elements with some tiles taken in."""
        b = self.b
        given = [x for x, _, _ in parts]
        if all(_narrow(x) for x in given):  # rounding to more bits keeps their order
            given = [x.inputs[0] for x in given]
        tiles = [b.where(mask, x, float("-inf")) for x, (_, _, mask) in zip(given, parts)]
        most = reduce(lambda x, y: b.apply("maximum", x, y), tiles)
        own = self._within(self._by_thread(most), "max")
        return b.apply("maximum", old, b.cast(own, old.dtype))

    def take_exponentials(
        self, largest: Node, parts: Sequence[Part], old: Sequence[Node]
    ) -> list[Node]:
        """The sum, its factor and scaled shift with some tiles taken in, whose largest is known."""
        b, (total, before, scaled_shift) = self.b, old
        factor, after = self.e.exponent(largest)
        most = _most(after.dtype)
        after = b.apply("minimum", b.apply("maximum", after, -most), most)
        columns = [b.reshape(x, (1, *x.shape, 1)) for x in (factor, after)]
        terms = []
        for x, _, mask in parts:
            term = self.e.raised(self._by_thread(x), *columns)
            own = None if mask is None else self._by_thread(mask)
            terms.append(b.where(own, term, 0.0))
        grown = reduce(lambda x, y: b.apply("add", x, y), terms)
        grown = self._within(grown, "sum")
        shrink = self.e.power(b.apply("subtract", scaled_shift, after))
        if factor.dtype is float32:  # a vast largest has come: nothing before weighs
            shrink = b.where(b.apply("equal", before, factor), shrink, 0.0)
        return [b.apply("multiply_add", total, shrink, grown), factor, after]

    def finish(self, online: Online, row: Size, largest: Node, own: Sequence[Node]) -> None:
        """Combine the lanes, by the shift of the whole row."""
        b, (total, before, scaled_shift) = self.b, own
        shift = self.e.value(online.shift, reduce_index(online.total, row, 0))
        factor, after = self.e.exponent(shift)
        apart = b.apply("subtract", scaled_shift, after)
        if factor.dtype is float32:  # one of them is vast: so is the difference
            same = b.apply("equal", before, factor)
            apart = b.where(same, apart, b.apply("subtract", largest, shift))
        scale = self.e.power(apart)
        whole = b.reduce(b.apply("multiply", total, scale), 0, "sum")
        self.e.bind(online.total, unravel(row, online.total.shape), whole)

    def _by_thread(self, x: Node) -> Node:
        """A line of lanes as (rounds, threads, neighbours)."""
        (threads,), run = self.per_thread(), self.run()
        return self.b.reshape(x, (self.lanes // threads // run, threads, run))

    def _within(self, x: Node, kind: str) -> Node:
        """What each thread holds, reduced."""
        x = self.b.reduce(x, 2, kind)
        return self.b.reduce(x, 0, kind)


def _most(dtype: DType) -> float:
    return FINITE if dtype is float32 else FINITE_WIDE


def _narrow(x: Node) -> bool:
    """Whether a tile is one of 16-bit floats, cast."""
    return x.op is tile_ops.cast and x.inputs[0].dtype.is_float and x.inputs[0].dtype.bits == 16


def _through_casts(node: Node) -> Node:
    """Below casts of floats to wider floats: exp is computed wide in any case."""
    while node.op is ops.cast and node.dtype.is_float and node.inputs[0].dtype.is_float:
        if node.dtype.bits < node.inputs[0].dtype.bits:
            break
        node = node.inputs[0]
    return node
