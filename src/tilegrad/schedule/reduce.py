"""What all forms of reductions share: how accumulators are fed, and the sweeps over a row.

A row is swept once for each stage of reductions that needs all of the one before, and once more
for what is written at the end; a Target's own form says how one linear piece of a row is taken
(`piece`). Invariant: a row's sums are added in an order that shapes and the Target alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import InternalError
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Expr, Size, floor_divide, high, loop_index, low, named
from .access import Place, unravel
from .lines import Accumulators, Lines, shared_out, width_of
from .sheet import Sheet
from .space import Part, Space, is_blocked, reduce_index


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

    row: Size
    inner: Size
    reduces: Sequence[Node]
    writes: Sequence[Node] = ()
    online: Sequence[Online] = ()
    tiles: int = 4  # taken in one turn

    def expressions(self, space: Space, column: Size) -> list[Place]:
        """What it evaluates at a column, and where."""
        return space.expressions_at(self.reduces, self.writes, self.row, column)

    def atoms(self, space: Space) -> tuple[Size, Expr]:
        """Those that stand for the number of a piece, and for the lane in it."""
        pieces = floor_divide(space.region.columns, self.inner)
        return loop_index("outer", pieces), lane_of(self.inner)


def lane_of(size: Size) -> Expr:
    """The atom of a lane of an axis."""
    return named("loop", "lane", 0, max(1, high(size) - 1))


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
        found.append((stage, Sweep(row, inner, reduces, writes, own, 1 if writes else 4)))
    return found


def blocked(reduces: Sequence[Node]) -> list[bool]:
    """Which accumulators of reductions are added up in blocks."""
    return [is_blocked(v) for v in reduces for _ in range(width_of(v))]


class Reductions(Part):
    """Reductions in one Body, of tiles with so many lanes."""

    def __init__(self, space: Space, sheet: Sheet, lanes: int) -> None:
        super().__init__(space, sheet)
        self.lanes, self.lines = lanes, Lines(sheet, lanes)
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


class RowSweeps(Reductions):
    """Sweeps over a row."""

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
        outer, lane = sweep.atoms(self.space)
        for node, index in sweep.expressions(self.space, outer * sweep.inner + lane):
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
        long = blocked(sweep.reduces)
        long += [False] * (len(fresh) - len(long))

        def piece(outer: Size, first: Size, last: Size, carried: list[Node]) -> list[Node]:
            return self.piece(sweep, outer, first, last, carried)

        return self.lines.over_lines(long, fresh, outer_size, span, piece, values)

    def piece(
        self, sweep: Sweep, outer: Size, start: Size, stop: Size, values: list[Node]
    ) -> list[Node]:
        """Accumulators after one linear piece; writes what is wanted there."""
        raise InternalError("schedule.reduce", f"{type(self).__name__} takes no piece of a row")

    def finish(self, sweep: Sweep, values: list[Node]) -> None:
        """Combine the lanes and say what each reduction gave."""
        tops: dict[Node, Node] = {}
        for v, own in shared_out(sweep.reduces, values):
            if v.op is ops.argmax:
                found = self.sums.first_largest(own[0], own[1], None, 0)
                self.e.bind(v, unravel(sweep.row, v.shape), found)
            else:
                tops[v] = own[0]
        totals = [(v, self.sums.total(v, x)) for v, x in tops.items()]  # side by side
        for v, total in totals:
            self.e.bind(v, unravel(sweep.row, v.shape), self.e.settled(total, v))
