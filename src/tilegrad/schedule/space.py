"""The space a Region of elementwise values and reductions is computed over.

Which axis the vectors run along, how many lanes they have, and loops over them. What every
lowering of loops stands on. Invariant: the vector axis is one along which every read is linear,
where there is such an axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from ..core.config import invariant
from ..core.errors import InternalError
from ..graph import ops
from ..ir.node import Node, topological
from ..ir.symbol import (
    Expr,
    Size,
    atoms,
    coefficient,
    floor_divide,
    high,
    loop_index,
    modulo,
    multiply,
)
from .access import (
    MOVEMENT,
    Index,
    Place,
    atom_of,
    below,
    offset_of,
    placed,
    spread,
    symbolic,
    unravel,
    walk_down,
)
from .region import COSTLY, REDUCE, Region, axes_of, leaves_of, own_index
from .sheet import Sheet

KINDS = {ops.sum_: "sum", ops.prod: "prod", ops.max_: "max", ops.min_: "min"}


def reduce_index(node: Node, row: Size, column: Size) -> Index:
    """Where a reduction reads its input for result number `row`, reduced element `column`."""
    x, axes = node.inputs[0], axes_of(node)
    kept = [a for a in range(len(x.shape)) if a not in axes]
    return spread(x, (kept, row), (axes, column))


def is_blocked(node: Node) -> bool:
    """Whether a long reduction is a sum whose error grows with each addition to one accumulator:
    it is added in blocks of `CHAIN` additions, whose totals are added in float64."""
    return node.op is ops.sum_ and node.inputs[0].dtype.is_float


def fitting(lanes: int, size: Size) -> int:
    """Vector lanes that are not twice as many as what they run along, halved until they fit."""
    while lanes > 1 and lanes >= 2 * high(size):
        lanes //= 2
    return lanes


def lines_in(shapes: Iterable[Sequence[Size]]) -> list[Size]:
    """Neighbouring elements that the last axes of shapes have: of one axis, of two, ..."""
    return [size for shape in shapes for size in accumulate(reversed(shape), multiply)]


class Space:
    """A Region and the shape of its work: rows and columns, and the axis of vectors."""

    shape: Region
    inner: Size
    strict = False  # whether loaded indices must not vary along a line
    least_line = 32  # elements of a line that is worth being one

    def __init__(self, region: Region) -> None:
        self.region, self.target, self.name = region, region.target, region.name
        self.members, self.all_values = set(region.values), region.known
        self.reads, self.stored_reads = region.inputs, set(region.inputs)
        self.reduces, self.order = region.reduces, region.order
        if region.kind == "mixed":
            node = region.anchor
            last = len(node.inputs[0].shape) - 1
            self.order = "row" if last in axes_of(node) else "column"
        self.levels = self._levels()

    # ---- shape of the work ----------------------------------------------------------------

    def _levels(self) -> dict[Node, int]:
        """For each value, how many reductions of the Region must come before it is known."""
        found: dict[Node, int] = {}
        for v in self.region.values:
            inside = [u for u in leaves_of(v, self.all_values) if u in self.members]
            before = max((found[u] for u in inside), default=0)
            found[v] = before + 1 if v in self.reduces else before
        return found

    def is_per_row(self, node: Node) -> bool:
        """Whether a value has one element per row of a Region with reductions."""
        rows = self.region.rows
        return bool(self.reduces) and (
            node in self.reduces or (node.size == rows and rows != self.region.total)
        )

    def index_at(self, node: Node, row: Size, column: Size) -> Index:
        """The element of a value at (row, column)."""
        found = own_index(node, row, column, self.shape)
        if found is None:
            raise InternalError("schedule.loops", f"{node!r} has no place in {self.region}")
        return found

    def stages(self) -> int:
        """Levels of reductions."""
        return max(self.levels[v] for v in self.reduces)

    def at_stage(self, stage: int) -> list[Node]:
        """The reductions of a level."""
        return [v for v in self.reduces if self.levels[v] == stage]

    def elements(self) -> list[Node]:
        """What is stored of every element, not of rows."""
        return [v for v in self.region.stored if not self.is_per_row(v)]

    def expressions_at(
        self, reduces: Sequence[Node], writes: Sequence[Node], row: Size, column: Size
    ) -> list[Place]:
        """What a loop evaluates that reduces and writes some values, and where."""
        found = [(v.inputs[0], reduce_index(v, row, column)) for v in reduces]
        return found + [(v, self.index_at(v, row, column)) for v in writes]

    def pick_inner(self) -> Size:
        """How many neighbouring elements the vector axis has: as many as stay linear. Loaded
        indices change between lines, if those are long enough."""
        extent, ordered = self.cuts()
        if self.reduces and self.order == "row" and invariant():
            return extent  # the order of a sum follows from its length alone
        for self.strict in (True, False):
            for inner in ordered:
                if self.strict and high(inner) < self.least_line:
                    continue
                if modulo(extent, inner) == 0 and self._linear(extent, inner):
                    return inner
        exact = [c for c in ordered if isinstance(c, int)]
        smallest = [c for c in exact if c > 1 and extent % c == 0]
        return min(smallest, default=extent)

    def cuts(self) -> tuple[Size, list[Size]]:
        """The elements along which vectors may run, and where that may be cut, longest first."""
        region = self.region
        if not self.reduces:
            extent, shapes = region.total, [v.shape for v in region.values]
        elif self.order == "row":
            extent = region.columns
            shapes = [tuple(v.inputs[0].shape[a] for a in axes_of(v)) for v in self.reduces]
        else:
            extent = region.row_count
            shapes = [v.shape for v in self.reduces]
        candidates = dict.fromkeys(size for size in (extent, *lines_in(shapes)) if size != 1)
        exact = sorted((c for c in candidates if isinstance(c, int)), reverse=True)
        others = [c for c in candidates if not isinstance(c, int) and c is not extent]
        return extent, [extent, *others, *exact]

    def _linear(self, extent: Size, inner: Size) -> bool:
        """Whether every stored value is read linearly along an inner axis of this size."""
        if inner == 1 or inner == 0:
            return True
        lane = atom_of("lane", inner)
        outer = loop_index("outer", floor_divide(extent, inner))
        along = outer * inner + lane
        self.shape = self._shape(inner)
        by_row = self.reduces and self.order == "row"
        if by_row:
            row, column = loop_index("row", self.region.row_count), along
        elif self.reduces:
            row, column = along, loop_index("column", self.region.columns)
        else:
            row, column = outer, lane
        stored = [v for v in self.region.stored if v not in self.reduces]
        writes = [v for v in stored if not (by_row and self.is_per_row(v))]
        starts = self.expressions_at(self.reduces, writes, row, column)
        return all(self._reads_linear(start, lane) for start in starts)

    def _shape(self, inner: Size) -> Region:
        """The Region with rows filled in for elementwise work cut at `inner`."""
        region = self.region
        return region if self.reduces else replace(region, rows=floor_divide(region.total, inner))

    def _reads_linear(self, start: Place, lane: Expr) -> bool:
        """Whether all that is stored and read below a value is read linearly along the lane."""
        crooked: list[Node] = []

        def step(node: Node, index: Index) -> Sequence[Place]:
            if node in self.all_values and not (node is start[0] and node in self.members):
                if node not in self.members and coefficient(offset_of(node, index), lane) is None:
                    crooked.append(node)
                return ()
            if node.op in MOVEMENT:
                return below(node, index)
            if node.op is ops.gather:
                found = self._gather_reads(node, index, lane)
                crooked.extend([node] if found is None else [])
                return found or ()
            return [(i, index) for i in node.inputs] if node.op is not ops.random_bits else ()

        for _ in walk_down([start], step):
            if crooked:
                break
        return not crooked

    def _gather_reads(self, node: Node, index: Index, lane: Expr) -> list[Place] | None:
        """Where a gather goes on: at its source where its indices do not vary along the lane; None
        where they are loaded ones that do, if that counts."""
        rank = len(node.inputs[1].shape)
        if any(lane in atoms(i) for i in index[:rank]):
            known = not self.strict or all(
                symbolic(i, index[:rank], self.all_values) is not None for i in node.inputs[1:]
            )
            return [] if known else None
        x, axes = node.inputs[0], node.attrs["axes"]
        exact = (symbolic(i, index[:rank], self.all_values) for i in node.inputs[1:])
        at = {a: 0 if i is None else i for a, i in zip(axes, exact)}
        return [(x, placed(at, len(x.shape), index[rank:]))]

    def pick_lanes(self, inner: Size) -> int:
        """Vector lanes: a few registers' worth, fewer where much is computed."""
        widest = 4
        work = 0
        for node in self._inlined():
            if node.dtype.bits > 32 and (node.dtype.is_float or node.op in REDUCE):
                widest = 8
            work += 4 if node.op in COSTLY else 1
        many = 4 if work <= (24 if self.reduces else 12) else 2 if work <= 48 else 1
        if self.reduces and (self.order == "column" or invariant()):
            many = 4
        if self.reduces and self.order == "row" and invariant():
            widest = 8  # whatever else is computed in the same loop
        return fitting(self.target.vector_bytes // widest * many, inner)

    def _inlined(self) -> list[Node]:
        def read(node: Node) -> bool:
            return node in self.all_values and node not in self.members

        return [n for n in topological(self.region.values, read) if not read(n)]

    def settle(self, inner: Size) -> None:
        """Take an axis of vectors."""
        self.inner, self.shape = inner, self._shape(inner)


class Part:
    """A piece of a lowering: the space it works in, and the Body that it writes to."""

    def __init__(self, space: Space, sheet: Sheet) -> None:
        self.space, self.sheet, self.b, self.e = space, sheet, sheet.b, sheet.e

    def write_rows(self, values: Sequence[Node], row: Size) -> None:
        """Evaluate and store values that rows have one of."""
        for v in values:
            self.sheet.write(v, unravel(row, v.shape))

    def row_results(self, row: Size, stage: int) -> None:
        """Write what is known of a row after a stage."""
        space = self.space
        known = [v for v in space.region.stored if space.is_per_row(v)]
        self.write_rows([v for v in known if space.levels[v] == stage], row)
