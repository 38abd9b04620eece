"""Reductions by rows: one row a program, one loop over its columns a stage.

Each loop feeds all reductions of its stage with vector accumulators, combined across lanes at
the end; later stages read what earlier ones found; a last loop writes element-level results.
The row stays in the cache, so memory is read once and written once; costly values that several
loops need are kept in scratch. Sums of long rows go in blocks: accumulators start anew in each, and
their totals are added in float64. Invariant: a row's sums are added in one fixed order, few
additions to one float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..ir.node import Node
from ..ir.symbol import Expr, Size, substitute
from .access import Index, Place, below, depends, walk_down
from .evaluate import wide
from .lines import RowSweeps, Sweep, sweeps
from .region import COSTLY

STASH_BYTES = 256 << 10


class RowLoops(RowSweeps):
    """Lowers Regions whose reductions run over trailing axes."""

    def body(self) -> tuple[Size, ...]:
        """One row a program."""
        rows = self.space.region.rows
        assert rows is not None
        row = self.b.program(0, rows)
        found = sweeps(self.space, row)
        self.plan_stash(found)
        self.over_row(row, found)
        return (rows,)

    def plan_stash(self, found: Sequence[tuple[int, Sweep]]) -> None:
        """Costly values that several loops need are kept in scratch, if a row is not too long."""
        self.stash: dict[Place, Node] = {}
        self.filled: set[Place] = set()
        columns = self.space.region.columns
        if not isinstance(columns, int) or columns * 4 > STASH_BYTES:
            return
        counts = Counter(key for _, sweep in found for key in self.costly(sweep))
        for key in [k for k, n in counts.items() if n > 1][:4]:
            self.stash[key] = self.b.allocate((columns,), wide(key[0].dtype), "l1")

    def costly(self, sweep: Sweep) -> list[Place]:
        """The costly inlined Nodes that a sweep reaches, at indices that depend on the lane."""
        stored, (outer, lane) = self.space.stored_reads, sweep.atoms(self.space)

        def step(node: Node, index: Index) -> Sequence[Place]:
            known = node in stored or node in self.space.reduces
            return () if known else below(node, index)

        starts = sweep.expressions(self.space, outer * sweep.inner + lane)
        found = [p for p in walk_down(starts, step) if p[0].op in COSTLY and p[0] not in stored]
        return [(n, index) for n, index in found if any(depends(i, [lane]) for i in index)]

    def piece(
        self, sweep: Sweep, outer: Size, start: Size, stop: Size, values: list[Node]
    ) -> list[Node]:
        """Vectors over one linear piece."""
        e, (atom, own_lane) = self.e, sweep.atoms(self.space)
        column = outer * sweep.inner + own_lane
        needed = [key for key in self.costly(sweep) if key in self.stash]

        def moved(place: Place) -> Place:
            if not isinstance(atom, Expr):
                return place
            return place[0], tuple(substitute(i, {atom: outer}) for i in place[1])

        def body(_: Size, carried: list[Node]) -> Sequence[Node]:
            for key in needed:
                if key in self.filled:
                    e.bind(*moved(key), e._load(self.stash[key], column))
            new = self.feed(sweep.reduces, sweep.row, column, carried)
            for v in sweep.writes:
                self.sheet.write(v, self.space.index_at(v, sweep.row, column))
            for key in needed:
                if key not in self.filled:
                    e.store(self.stash[key], e.value(*moved(key)), column)
            return new

        return self.lines.lane_loop(start, stop, body, values, size=sweep.inner)

    def finish(self, sweep: Sweep, values: list[Node]) -> None:
        """Combine lanes; what the loop has kept is there for later ones."""
        self.filled.update(key for key in self.costly(sweep) if key in self.stash)
        super().finish(sweep, values)
