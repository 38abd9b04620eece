"""Lower a Region of elementwise values and reductions to one Body of vector loops.

Regions without reductions are flat: rows of neighbouring elements, long rows in blocks; reads
that run across the rows go through square tiles turned in registers. Regions with reductions are
lowered by rows (`reduce_rows`) or by columns (`reduce_columns`). `turned_body` is long because
its squares share what is bound.

Invariant: the order of every sum depends on shapes and the Plan alone, never on the number of
workers, so results are the same bits run to run.
"""

from __future__ import annotations

from ..core.dtype import float32
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import (
    Expr,
    Size,
    ceil_divide,
    coefficient,
    high,
    loop_index,
    minimum,
    substitute,
)
from ..tile import ops as tile_ops
from . import sheet as parameters
from .access import Index, atom_of, offset_of, reads_below
from .evaluate import wide
from .family import Bodies
from .lines import Lines
from .reduce_rows import RowLoops
from .region import Region
from .sheet import Sheet
from .space import Part, Space

BLOCK = 8192  # elements of a flat elementwise program


def lower_loops(region: Region, target: Target, name: str) -> Bodies:
    """The Body of a Region; its parameters are what it reads, then what is stored."""
    space = Space(region, target, name)
    sheet = Sheet(name, parameters.of_region(region))
    inner = space.pick_inner()
    space.settle(inner)
    lanes = space.pick_lanes(inner)
    if space.reduces and space.order == "column":
        from .reduce_columns import ColumnLoops  # few Regions need it

        return [sheet.end(ColumnLoops(space, sheet, lanes).body(), lanes=lanes, inner=inner)]
    if space.reduces:
        return [sheet.end(RowLoops(space, sheet, lanes).body(), lanes=lanes, inner=inner)]
    flat = FlatLoops(space, sheet, lanes)
    turned = flat.turned_reads()
    grid = flat.turned_body(turned) if turned else flat.body()
    return [sheet.end(grid, lanes=flat.lanes, inner=inner)]


class FlatLoops(Part):
    """Lowers Regions without reductions."""

    def __init__(self, space: Space, sheet: Sheet, lanes: int) -> None:
        super().__init__(space, sheet)
        self.lanes, self.lines = lanes, Lines(sheet, lanes)

    def body(self) -> tuple[Size, ...]:
        """Elementwise: rows of `inner` elements, long rows in blocks."""
        rows, inner = self.space.shape.rows, self.space.inner
        assert rows is not None
        block = BLOCK
        blocks: Size = ceil_divide(inner, block) if high(inner) > 2 * block else 1
        grid, (row, number) = self.sheet.programs(rows, blocks)

        def body(lane: Size, _: list[Node]) -> None:
            self.write_all(row, lane)

        lane = atom_of("lane", inner)
        with self.e.scope():
            for v in self.space.region.stored:
                self.e.hoist(v, self.space.index_at(v, row, lane), [lane])
            if blocks == 1:
                self.lines.lane_loop(0, inner, body)
            else:
                start = number * block
                stop = minimum(start + block, inner)
                self.lines.lane_loop(start, stop, body, size=inner)
        return (grid,)

    # ---- turned: reads that run across the rows -------------------------------------------

    def turned_reads(self) -> list[tuple[Node, Index]]:
        """Reads that jump along the lanes but are contiguous along rows: worth turning."""
        side, inner, rows = self.sizes()
        if not isinstance(inner, int) or not isinstance(rows, int) or side < 4:
            return []
        if inner < side or rows % side or inner * rows < 1 << 12:
            return []
        lane = atom_of("lane", inner)
        block, turn = loop_index("block", rows // side), atom_of("turn", side)
        row = block * side + turn
        found: dict[tuple[Node, Index], None] = {}
        for v in self.space.region.stored:
            start = (v, self.space.index_at(v, row, lane))
            for node, index in reads_below([start], self.sheet.inputs):
                offset = offset_of(node, index)
                if coefficient(offset, lane) in (0, 1):
                    continue
                if coefficient(offset, turn) != 1 or coefficient(offset, lane) is None:
                    return []
                found[(node, index)] = None
        return list(found)

    def turned_body(self, reads: list[tuple[Node, Index]]) -> tuple[Size, ...]:
        """Square tiles: read along rows, turned in registers, computed and written along lanes."""
        side, inner, rows = self.sizes()
        assert isinstance(inner, int) and isinstance(rows, int)
        self.lanes = side
        b, e = self.b, self.e
        p = b.program(0, rows // side)
        lane = atom_of("lane", inner)
        block, turn = loop_index("block", rows // side), atom_of("turn", side)

        def place(index: Index, at_lane: Size, at_turn: Size) -> Index:
            mapping = {lane: at_lane, turn: at_turn}
            if isinstance(block, Expr):
                mapping[block] = p
            return tuple(substitute(i, mapping) for i in index)

        for base in b.each("i", 0, inner // side * side, side):
            lines: list[list[Node]] = []
            for node, index in reads:
                rows_ = []
                for k in range(side):
                    at = place(index, base + k, 0)
                    offset = offset_of(node, at)
                    rows_.append(b.load(self.sheet.inputs[node], (offset,), (side,), (0,)))
                turned = b.add(tile_ops.transpose(b.add(tile_ops.stack_rows(*rows_)), order=(1, 0)))
                lines.append([b.add(tile_ops.extract(turned, index=k)) for k in range(side)])
            for k in range(side):
                row = p * side + k
                with e.vector(base, side, inner, True) as own:
                    for (node, index), line in zip(reads, lines):
                        e.bind(node, place(index, own, k), b.cast(line[k], wide(node.dtype)))
                    self.write_all(row, own)
        for number in b.each("turn", 0, side) if inner % side else ():
            with e.scope(), e.vector(inner // side * side, side, inner, False) as own:
                self.write_all(p * side + number, own)
        return (rows // side,)

    def sizes(self) -> tuple[int, Size, Size | None]:
        """The side of a square that is turned, elements of a row, rows."""
        return self.space.target.lanes(float32), self.space.inner, self.space.shape.rows

    def write_all(self, row: Size, lane: Size) -> None:
        """Evaluate and store every wanted value at (row, lane)."""
        for v in self.space.region.stored:
            self.sheet.write(v, self.space.index_at(v, row, lane))
