"""The space of a Region on a Target whose programs are blocks of threads.

How many threads a program has goes into `notes["warps"]`. Invariant: tile sizes are powers of two
and depend on shapes, dtypes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ...core.config import invariant
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, coefficient, high, loop_index, power_of_two
from ...ir.types import Array
from .. import sheet as parameters
from ..access import (
    Place,
    atom_of,
    offset_of,
    reads_below,
    symbolic,
)
from ..cost import instructions
from ..sheet import Parameter
from ..space import Part, Space, lines_in
from .tiles import ThreadSheet, TileEvaluator, Viewed

WARP = 32
WORDS, CROWDED = 24, 6  # that a thread reads at once where an element of a row reads so many


class ThreadSpace(Space):
    """A Region, and how its work is cut into tiles."""

    least_line = 1

    def sheet(
        self,
        name: str,
        more: Sequence[Parameter] = (),
        results: bool = True,
        constants: Container[Node] = (),
    ) -> ThreadSheet:
        """A Body: reads (`constants` marked), the Region's results, and more."""
        stored = parameters.results(self.region.stored if results else [])
        found = ThreadSheet(name, [*parameters.reads(self.reads, constants), *stored, *more])
        found.e.rounded, found.e.values = self.region.rounded, self.all_values
        return found

    def parts_sheet(self, reduces: Sequence[Node], size: Size) -> ThreadSheet:
        """A Body that stores so many partial results of reductions, in scratch."""
        return self.sheet(f"{self.name}_parts", parts_of(reduces, size, "result"), results=False)

    def in_one_stage(self) -> bool:
        """Whether parts of its reductions may be combined later."""
        return all(v.op is not ops.argmax and self.levels[v] == 1 for v in self.reduces)

    # ---- where vectors run ----------------------------------------------------------------

    def pick_middle(self, rows: Size) -> Size:
        """How many neighbouring rows stay linear too: tiles of several rows lie within them."""
        self.strict, lane = True, atom_of("lane", self.inner)
        ends = lines_in(v.shape for v in [*self.region.values, *self.reads])
        whole = [s for s in ends if isinstance(s, int) and isinstance(self.inner, int)]
        middles = {s // self.inner for s in whole if s % self.inner == 0} - {0, 1}
        stored = [v for v in self.region.stored if v not in self.reduces]
        for middle in [rows, *sorted(middles, reverse=True)]:
            own = atom_of("row", middle)
            row = loop_index("outer", rows // middle) * middle + own
            starts = self.expressions_at(self.reduces, stored, row, lane)
            if rows % middle == 0 and all(self._reads_linear(start, own) for start in starts):
                return middle
        return rows

    # ---- sizes ----------------------------------------------------------------------------

    def vector(self) -> int:
        """Elements one thread moves at once: a vector of the narrowest array of full size."""
        if self.reduces and invariant():
            return self.target.vector_bytes // 4  # whatever else is read
        sizes = [n.dtype.size for n in [*self.reads, *self.region.stored] if self.is_full(n)]
        return self.target.vector_bytes // min(sizes, default=4)

    def words_read(self, rows: Size, columns: Size) -> int:
        """Words of 32 bits that an element reads in arrays of about full size, each at every place
        of it."""
        row, lane = loop_index("row", rows), loop_index("lane", columns)
        starts = self.expressions_at(self.reduces, self.region.stored, row, lane)
        found = set(reads_below(starts, self.stored_reads))
        return sum(max(1, n.dtype.size // 4) for n, _ in found if self.is_full(n))

    def room(self) -> int:
        """Elements of a long row for which a thread has registers: few where each reads much."""
        words = 0 if invariant() else self.words_read(self.region.row_count, self.region.columns)
        return WORDS if words < CROWDED else max(1, power_of_two(WORDS // words + 1) // 2)

    def is_full(self, node: Node) -> bool:
        """Whether an array is about as large as the Region."""
        return high(node.size) * 4 >= high(self.region.total)

    def warps_for(self, elements: int, each: int) -> int:
        """Warps of a program whose threads hold a tile with about `each` elements apiece."""
        most = self.target.limits.get("threads_per_block", 1024)
        return warps_for(elements, each, most // WARP)

    def programs_wanted(self) -> int:
        """Programs that keep every core busy to the end."""
        return 4 * self.target.cores

    def middle_of(self, rows: Size, many: int, lanes: int) -> tuple[Size, int]:
        """Rows within which a tile lies (fewer than all if it is large enough so), and its own."""
        middle = self.pick_middle(rows) if many > 1 else rows
        own = min(many, power_of_two(high(middle)))
        if own * lanes < min(many * lanes, 4 * WARP * self.vector()):
            return rows, min(many, power_of_two(high(rows)))
        return middle, own

    def instructions(self) -> int:
        """About how many instructions an element takes."""
        return instructions(self.region.stored, set(self.reads), self.region.rounded)

    def has_loaded_gather(self) -> bool:
        """Whether something is gathered at indices that only memory knows."""
        for node in self._inlined():
            if node.op is not ops.gather:
                continue
            probe = tuple(loop_index(f"probe{i}", s) for i, s in enumerate(node.inputs[1].shape))
            if any(symbolic(i, probe, self.all_values) is None for i in node.inputs[1:]):
                return True
        return False

    def turned(self) -> list[Node]:
        """What is read with a jump along the lanes but contiguously along the rows."""
        rows, size = self.shape.rows, self.region.columns if self.reduces else self.inner
        if rows is None or high(rows) < 4 or high(size) < 4:
            return []
        row, lane = (atom_of(n, s) for n, s in (("row", rows), ("lane", size)))
        writes = [] if self.reduces else self.region.stored
        found: dict[Node, None] = {}
        starts = self.expressions_at(self.reduces, writes, row, lane)
        for node, index in plain_reads(starts, self.stored_reads):
            offset = offset_of(node, index)
            if coefficient(offset, row) == 1 and coefficient(offset, lane) not in (None, 0, 1):
                found[node] = None
        return list(found)


class ThreadPart(Part):
    """A piece of a lowering for blocks of threads."""

    space: ThreadSpace
    sheet: ThreadSheet
    b: Viewed
    e: TileEvaluator

    def write_all(self, row: Size, *columns: Size) -> None:
        """Evaluate every wanted value at a row and some columns, then store them."""
        found = []
        for v, lane in ((v, lane) for v in self.space.region.stored for lane in columns):
            index = self.space.index_at(v, row, lane)
            found.append((v, index, self.e.value(v, index)))
        for v, index, x in found:
            self.e.store(self.sheet.outputs[v], x, offset_of(v, index))


def warps_for(elements: int, each: int = 8, most: int = 8) -> int:
    """Warps of a program whose threads have about so many elements each."""
    return max(1, min(most, power_of_two(elements // each) // WARP))


def parts_of(reduces: Sequence[Node], size: Size, use: str) -> list[Parameter]:
    """Scratch for so many partial results of reductions."""
    types = [Array((size,), v.inputs[0].dtype.wide) for v in reduces]
    return parameters.scratch([(f"part{n}", t) for n, t in enumerate(types)], use)


def plain_reads(starts: Sequence[Place], stored: Container[Node]) -> list[Place]:
    """Reads of stored values below some, where nothing guards them, in the order of inputs."""
    return reads_below(starts, stored, guarded=False, forward=True)
