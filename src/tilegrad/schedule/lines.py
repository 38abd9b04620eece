"""Loops over lines of elements, the accumulators that reductions carry through them, and the
sweeps over a row that all forms of reductions share.

Lines are vectors with a masked last one; long sums run in blocks. An argmax has two accumulators,
the largest value and its place; all others have one. A row is swept once for each stage of
reductions that needs all of the one before, and once more for what is written at the end; a
Target's own form says how one linear piece of a row is taken (`piece`).

Invariant: accumulators of sums whose error grows take few additions, their totals are float64; the
first nan is the largest, then the lower place wins; of nothing the place is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..core.dtype import float64, int64
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Expr, Size, ceil_divide, floor_divide, high, loop_index, low
from ..tile.build import BodyBuilder
from ..tile.numeric import COMBINE, identity
from .access import Place, atom_of, unravel
from .sheet import Sheet
from .space import KINDS, Part, Space, is_blocked, reduce_index

FAR_OFF = 1 << 62  # no place: above every index
CHAIN = 64  # additions to one accumulator before it is added to a total


class Lines(Part):
    """Loops of one Body whose vectors or tiles have so many lanes."""

    def __init__(self, space: Space, sheet: Sheet, lanes: int) -> None:
        super().__init__(space, sheet)
        self.lanes = lanes

    def vectors(
        self, start: Size, stop: Size, size: Size, values: list[Node] | None = None
    ) -> Iterator[Size]:
        """Vectors over [start, stop) of an axis of `size`, as `for` writes them: whole ones, then
        one that is masked. Gives the lane; `values` are carried."""
        for base, whole in self.b.steps("i", start, stop, self.lanes, values, "tail"):
            with self.e.vector(base, self.lanes, size if whole else stop, whole) as lane:
                yield lane

    def over_lines(
        self,
        reduces: Sequence[Node],
        fresh: Sequence[Node],
        lines: Size,
        span: tuple[Size, Size],
        values: list[Node],
    ) -> Iterator[tuple[Size, Size, Size]]:
        """(line, first, last) over the span of each line of `inner` elements, as `for` writes them;
        `values` are the accumulators, first those of `reduces`.

        Those of sums whose error grows start anew, as `fresh` ones, after CHAIN additions.
        """
        b, e = self.b, self.e
        blocked = [is_blocked(v) for v in reduces for _ in range(width_of(v))]
        blocked += [False] * (len(values) - len(blocked))
        turns = ceil_divide(high(span[1] - span[0]), self.lanes)

        def each(first: Size, last: Size) -> Iterator[Size]:
            for line in b.each("outer", first, last, 1, values):
                with e.scope():
                    yield line

        if high(lines) * turns <= CHAIN or not any(blocked):
            for line in each(0, lines) if lines != 1 else [0]:
                yield line, *span
            return
        values[:] = [b.cast(x, float64) if t else x for t, x in zip(blocked, values)]
        if lines != 1 and turns <= CHAIN:
            for some in self.in_blocks(blocked, fresh, (0, lines), CHAIN // turns, values):
                for line in each(*some):
                    yield line, *span
        else:
            for line in each(0, lines):
                for some in self.in_blocks(blocked, fresh, span, CHAIN * self.lanes, values):
                    yield line, *some
        values[:] = [b.cast(x, own.dtype) for x, own in zip(values, fresh)]

    def in_blocks(
        self,
        blocked: Sequence[bool],
        fresh: Sequence[Node],
        span: tuple[Size, Size],
        block: int,
        values: list[Node],
    ) -> Iterator[tuple[Size, Size]]:
        """(first, last) of the blocks of a span; what accumulators take there is added to them."""
        b, (start, stop) = self.b, span

        def added(first: Size, last: Size) -> Iterator[tuple[Size, Size]]:
            totals = list(values)
            values[:] = [f if t else x for t, f, x in zip(blocked, fresh, totals)]
            yield first, last
            values[:] = [
                b.apply("add", x, b.cast(new, float64)) if t else new
                for t, x, new in zip(blocked, totals, values)
            ]

        middle = start + (stop - start) // block * block
        for at in b.each("block", start, middle, block, values):
            with self.e.scope():
                yield from added(at, at + block)
        if (stop - start) % block != 0:
            yield from added(middle, stop)


# ---- accumulators -------------------------------------------------------------------------------


def width_of(reduce: Node) -> int:
    """How many accumulators a reduction has."""
    return 2 if reduce.op is ops.argmax else 1


def shared_out(
    reduces: Sequence[Node], values: Sequence[Node]
) -> Iterator[tuple[Node, list[Node]]]:
    """Each reduction with its accumulators among those of all."""
    at = 0
    for v in reduces:
        yield v, list(values[at : at + width_of(v)])
        at += width_of(v)


class Accumulators:
    """The accumulators of reductions in one Body; `some`: whether there is anything to reduce."""

    def __init__(self, b: BodyBuilder, some: bool) -> None:
        self.b, self.none = b, FAR_OFF if some else 0

    def starts(self, reduces: Sequence[Node], shape: tuple[int, ...]) -> list[Node]:
        """Those of reductions that have taken nothing."""
        b, found = self.b, []
        for node in reduces:
            dtype, kind = node.inputs[0].dtype.wide, KINDS.get(node.op, "max")
            found.append(b.constant(identity(kind, dtype), dtype, shape))
            if node.op is ops.argmax:
                found.append(b.constant(self.none, int64, shape))
        return found

    def take(
        self, node: Node, x: Node, place: Node, mask: Node | None, old: list[Node]
    ) -> list[Node]:
        """Those of a reduction with values, which are at places, taken in where a mask holds."""
        b = self.b
        if node.op is not ops.argmax:
            new = b.apply(COMBINE[KINDS[node.op]], old[0], x)
            return [b.where(mask, new, old[0])]
        best, where = old
        better = b.apply("less", best, x)
        if x.dtype.is_float:
            is_new = b.apply("bit_and", b.apply("not_equal", x, x), b.apply("equal", best, best))
            better = b.apply("bit_or", better, is_new)
        better = b.apply("bit_or", better, b.apply("equal", where, FAR_OFF))
        better = b.logical_and(better, mask)
        return [b.where(better, x, best), b.where(better, place, where)]

    def total(self, node: Node, x: Node, axis: int = 0) -> Node:
        """A sum or the like over an axis."""
        return self.b.reduce(x, axis, KINDS[node.op]) if x.shape else x

    def first_largest(self, x: Node, place: Node, mask: Node | None, axis: int) -> Node:
        """The first place of the largest value along an axis; nan is the largest."""
        b = self.b
        if not x.shape:
            return place
        kept = b.where(mask, x, x.dtype.lowest)
        top = self._kept(b.reduce(kept, axis, "max"), axis)
        best = b.apply("equal", x, top)
        if x.dtype.is_float:  # where the largest is nan, every nan is it
            is_nan = b.apply("bit_and", b.apply("not_equal", top, top), b.apply("not_equal", x, x))
            best = b.apply("bit_or", best, is_nan)
        best = b.logical_and(best, mask)
        found = b.reduce(b.where(best, place, self.none), axis, "min")
        return self._kept(found, axis)

    def _kept(self, x: Node, axis: int) -> Node:
        """A reduced tile in a shape that broadcasts with what it was."""
        return self.b.reshape(x, (*x.shape, 1)) if axis == 1 else x


# ---- sweeps -------------------------------------------------------------------------------------


@dataclass
class Online:
    """A sum of exp(x - shift), found in the same sweep as `largest`, on which the shift rests."""

    total: Node
    largest: Node
    x: Node
    shift: Node


@dataclass
class Sweep:
    """One sweep over a row: what it reduces and writes, and the linear pieces it is made of."""

    space: Space
    row: Size
    inner: Size
    reduces: Sequence[Node]
    writes: Sequence[Node] = ()
    online: Sequence[Online] = ()
    tiles: int = 4  # taken in one turn

    def expressions(self, column: Size) -> list[Place]:
        """What it evaluates at a column, and where."""
        return self.space.expressions_at(self.reduces, self.writes, self.row, column)

    def atoms(self) -> tuple[Size, Expr]:
        """Those that stand for the number of a piece, and for the lane in it."""
        pieces = floor_divide(self.space.region.columns, self.inner)
        return loop_index("outer", pieces), atom_of("lane", self.inner)


def sweeps(
    space: Space, row: Size, lanes: int = 0, online: Sequence[Online] = ()
) -> list[tuple[int, Sweep]]:
    """The sweeps over a row in order, each with the stage whose results it ends. Linear pieces are
    swept where they are long enough to fill a tile of so many lanes, else the whole row."""
    done = {o.total for o in online}
    inner = space.inner if low(space.inner) * 2 >= lanes else space.region.columns
    found = []
    for stage in range(1, space.stages() + 2):
        reduces = [v for v in space.at_stage(stage) if v not in done]
        writes = [v for v in space.elements() if space.levels[v] == stage - 1]
        own = [o for o in online if o.largest in reduces]
        found.append((stage, Sweep(space, row, inner, reduces, writes, own, 1 if writes else 4)))
    return found


class Reductions(Lines):
    """Reductions in one Body, of tiles with so many lanes."""

    def __init__(self, space: Space, sheet: Sheet, lanes: int) -> None:
        super().__init__(space, sheet, lanes)
        self.sums = Accumulators(self.b, space.region.columns != 0)

    def feed(
        self, reduces: Sequence[Node], row: Size, column: Size, carried: Sequence[Node]
    ) -> list[Node]:
        """Accumulators after one tile."""
        b, e, result = self.b, self.e, []
        for v, old in shared_out(reduces, carried):
            x = b.broadcast(e.value(v.inputs[0], reduce_index(v, row, column)), e.full)
            place = x if v.op is not ops.argmax else b.broadcast(b.index(column), e.full)
            result += self.sums.take(v, x, place, e.inside(), old)
        return result

    def combined(self, reduces: Sequence[Node], values: Sequence[Node]) -> dict[Node, Node]:
        """What each reduction gave: its accumulators, along their first axis."""
        own = dict(shared_out(reduces, values))
        first = [v for v in reduces if v.op is ops.argmax]
        found = {v: self.sums.first_largest(own[v][0], own[v][1], None, 0) for v in first}
        sums = {v: self.sums.total(v, own[v][0]) for v in reduces if v not in found}  # side by side
        return {**found, **sums}


class RowSweeps(Reductions):
    """Sweeps over a row."""

    # Accumulators after one linear piece (sweep, outer, start, stop, accumulators); it writes what
    # is wanted there.
    piece: Callable[[Sweep, Size, Size, Size, list[Node]], list[Node]]

    def over_row(self, row: Size, found: Sequence[tuple[int, Sweep]]) -> None:
        """All sweeps over a row, and what is known of it after each."""
        self.row_results(row, 0)  # what needs no reduction
        for stage, sweep in found:
            if sweep.reduces or sweep.writes:
                self.finish(sweep, self.swept(sweep))
            self.row_results(row, stage)

    def swept(self, sweep: Sweep) -> list[Node]:
        """Accumulators after a whole sweep."""
        return self.sweep(sweep, 0, self.space.region.columns, self.start(sweep))

    def start(self, sweep: Sweep) -> list[Node]:
        """Accumulators before a sweep; what is the same for the whole row is evaluated here."""
        outer, lane = sweep.atoms()
        for node, index in sweep.expressions(outer * sweep.inner + lane):
            self.e.hoist(node, index, [a for a in (outer, lane) if isinstance(a, Expr)])
        return self.accumulators(sweep)

    def accumulators(self, sweep: Sweep) -> list[Node]:
        """Accumulators that have taken nothing."""
        return self.sums.starts(sweep.reduces, (self.lanes,))

    def sweep(self, sweep: Sweep, start: Size, stop: Size, values: list[Node]) -> list[Node]:
        """Accumulators after columns start to stop of a row."""
        outer_size = floor_divide(self.space.region.columns, sweep.inner)
        span = (start, stop) if outer_size == 1 else (0, sweep.inner)
        fresh = self.accumulators(sweep)
        values = list(values)
        for place in self.over_lines(sweep.reduces, fresh, outer_size, span, values):
            values[:] = self.piece(sweep, *place, values)
        return values

    def finish(self, sweep: Sweep, values: list[Node]) -> None:
        """Combine the lanes and say what each reduction gave."""
        for v, x in self.combined(sweep.reduces, values).items():
            self.e.bind(v, unravel(sweep.row, v.shape), self.e.settled(x, v))
