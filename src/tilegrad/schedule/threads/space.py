"""The space of a Region on a Target whose programs are blocks of threads, and flat Regions.

A flat Region is cut into tiles of rows x lanes, a few vectors a thread, so that a thread has
several independent loads in flight and the grid covers the machine several times. How many
threads a program has goes into `notes["warps"]`. Invariant: tile sizes are powers of two and
depend on shapes, dtypes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from ...core.config import invariant
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import (
    Expr,
    Size,
    ceil_divide,
    coefficient,
    floor_divide,
    high,
    loop_index,
    modulo,
    named,
)
from ...ir.types import Memory, product
from ...tile.build import Body
from ..access import (
    MOVEMENT,
    Condition,
    Index,
    Place,
    below,
    joined,
    offset_of,
    places,
    reads_below,
)
from ..evaluate import symbolic
from ..instructions import instructions
from ..space import LoopSpace, reduce_index
from .tiles import TileEvaluator, Viewed, power_of_two

WARP = 32
UNROLLED = 4096  # instructions of a thread, about: more elements at once would fill its registers
Roles = list[tuple[str, Any]]


class ThreadSpace(LoopSpace):
    """A Region, its Bodies under construction, and how its work is cut into tiles."""

    b: Viewed
    e: TileEvaluator
    least_line = 1

    def begin(
        self,
        name: str,
        extra: Sequence[tuple[str, Memory]] = (),
        results: bool = True,
        after: Sequence[tuple[str, Memory]] = (),
    ) -> list[Node]:
        """Start a Body: reads, `extra`, the Region's results, `after`; gives the added ones."""
        parameters = [(f"in{i}", self._memory(n, "value")) for i, n in enumerate(self.reads)]
        stored = self.group.stored if results else []
        parameters += list(extra)
        parameters += [(f"out{i}", self._memory(n, "result")) for i, n in enumerate(stored)]
        parameters += list(after)
        self.b = Viewed(name, parameters)
        given = self.b.parameters
        start = len(self.reads) + len(extra)
        self.inputs = dict(zip(self.reads, given))
        self.outputs = dict(zip(stored, given[start:]))
        self.e = TileEvaluator(self.b, self.inputs)
        self.e.rounded, self.e.values = self.group.rounded, self.all_values
        return [*given[len(self.reads) : start], *given[start + len(stored) :]]

    def end(
        self, grid: Sequence[Size], warps: int, roles: Roles, **notes: Any
    ) -> tuple[Body, Roles]:
        """The Body and the roles of its parameters, from those of the parameters begun with."""
        body = self.b.finish(grid, warps=warps, **notes)
        return body, [roles[n] for n in self.b.numbers]

    def roles(self, results: bool = True) -> Roles:
        """The roles of reads and results."""
        found: Roles = [("read", i) for i in range(len(self.reads))]
        return found + [("store", i) for i in range(len(self.group.stored if results else []))]

    # ---- where vectors run ----------------------------------------------------------------

    def pick_middle(self, rows: Size) -> Size:
        """How many neighbouring rows stay linear too: tiles of several rows lie within them."""
        lane = named("loop", "lane", 0, max(1, high(self.inner) - 1))
        sizes: dict[Size, None] = {rows: None}
        for v in [*self.group.values, *self.reads]:
            size: Size = 1
            for s in reversed(v.shape):
                size = size * s
                if isinstance(size, int) and isinstance(self.inner, int) and size % self.inner == 0:
                    sizes[size // self.inner] = None
        self.strict = True
        exact = sorted((s for s in sizes if isinstance(s, int) and s > 1), reverse=True)
        for middle in dict.fromkeys([rows, *exact]):
            if modulo(rows, middle) != 0:
                continue
            own = named("loop", "row", 0, max(1, high(middle) - 1))
            outer = loop_index("outer", floor_divide(rows, middle))
            row = outer * middle + own
            if all(self._reads_linear(start, own) for start in self.starts_at(row, lane)):
                return middle
        return rows

    def starts_at(self, row: Size, lane: Size) -> list[tuple[Node, Index]]:
        """What a tile evaluates, and where."""
        found = [(v.inputs[0], reduce_index(v, row, lane)) for v in self.reduces]
        stored = [v for v in self.group.stored if v not in self.reduces]
        return found + [(v, self.index_at(v, row, lane)) for v in stored]

    # ---- sizes ----------------------------------------------------------------------------

    def vector(self) -> int:
        """Elements one thread moves at once: a vector of the narrowest array of full size."""
        if self.reduces and invariant():
            return max(1, self.target.vector_bytes // 4)  # whatever else is read
        sizes = [
            n.dtype.size
            for n in [*self.reads, *self.group.stored]
            if high(product(n.shape)) * 4 >= high(self.group.total)
        ]
        return max(1, self.target.vector_bytes // min(sizes, default=4))

    def many_reads(self) -> int:
        """Arrays of about full size that are read."""
        return sum(1 for n in self.reads if high(product(n.shape)) * 4 >= high(self.group.total))

    def threads_for(self, elements: int, each: int) -> int:
        """Threads that hold a tile with about `each` elements apiece."""
        most = self.target.limits.get("threads_per_block", 1024)
        return min(most, max(WARP, power_of_two(elements // each)))

    def programs_wanted(self) -> int:
        """Programs that keep every core busy to the end."""
        return 4 * max(1, self.target.cores)

    # ---- flat -----------------------------------------------------------------------------

    def flat(self) -> list[tuple[Body, Roles]]:
        """Elementwise: tiles of rows x lanes."""
        self.begin(self.name)
        rows, inner = self.shape.rows, self.inner
        assert rows is not None
        many, lanes = self.flat_tile(rows, inner)
        pieces = self.pieces()
        if pieces > 1:
            inner = floor_divide(inner, pieces)
            many, lanes = self.cut_tile(many * lanes // pieces, rows, inner)
            self.each //= pieces
        middle = self.middle_of(rows, many, lanes)
        many = min(many, power_of_two(high(middle)))
        row_blocks, blocks = ceil_divide(middle, many), ceil_divide(inner, lanes)
        grid = floor_divide(rows, middle) * row_blocks * blocks
        p = self.b.program(0, grid)
        line, base = floor_divide(p, blocks), modulo(p, blocks) * lanes
        outer = floor_divide(line, row_blocks) * middle
        row = modulo(line, row_blocks) * many

        def write(whole: bool) -> list[Node]:
            with self.e.tile(row, many, middle, base, lanes, inner, whole) as (at, lane):
                columns = [inner * k + lane for k in range(pieces)]
                self.write_all(outer + at, *columns)
            return []

        if many == 1 and not self._tail_fits(inner, lanes):
            stop = base + lanes
            self.b.branch(self.b.less_equal(stop, inner), lambda: write(True), lambda: write(False))
        else:
            write(False)
        warps = self.threads_for(many * lanes, self.each) // WARP
        return [self.end((grid,), warps, self.roles())]

    def middle_of(self, rows: Size, many: int, lanes: int) -> Size:
        """Rows within which a tile of several lies, where a tile is large enough so."""
        if many == 1:
            return rows
        middle = self.pick_middle(rows)
        full = min(many, power_of_two(high(middle))) * lanes
        return middle if full >= min(many * lanes, 4 * WARP * self.vector()) else rows

    def _tail_fits(self, inner: Size, lanes: int) -> bool:
        """Whether a masked tile costs nothing: vectors are wholly inside or outside."""
        if high(inner) <= lanes:
            return True
        return modulo(inner, 16) == 0

    def flat_tile(self, rows: Size, inner: Size) -> tuple[int, int]:
        """(rows, lanes) of a program's tile; sets how many elements a thread has."""
        vector, total = self.vector(), high(rows * inner)
        sizes = [high(product(n.shape)) for n in self.reads]
        reads, whole = (sum(1 for s in sizes if s > least) for least in (vector, total // 2))
        self.each = min(32, vector * (4 if reads <= 1 else 2 if reads <= 3 and whole <= 1 else 1))
        while self.each > 1 and self.each * self.instructions() > UNROLLED:
            self.each //= 2
        size = 4 * WARP * self.each
        while self.each > vector and total < self.programs_wanted() * size:
            self.each, size = self.each // 2, size // 2
        turned = self.turned()
        if turned:
            side = 64 if max(n.dtype.size for n in turned) <= 2 else 32
            return (min(side, power_of_two(high(rows))), min(side, power_of_two(high(inner))))
        if high(rows) <= 1:
            return 1, min(size, power_of_two(high(inner)))
        if high(inner) >= 4 * WARP and self.has_loaded_gather():
            self.each = min(self.each, max(vector, power_of_two(high(inner)) // (4 * WARP)))
            return 1, min(size, power_of_two(high(inner)))
        return self.cut_tile(size, rows, inner)

    def instructions(self) -> int:
        """About how many instructions an element takes."""
        return instructions(self.group.stored, set(self.reads), self.group.rounded)

    def cut_tile(self, size: int, rows: Size, inner: Size) -> tuple[int, int]:
        """(rows, lanes) of about `size` elements."""
        lanes = min(size, tight(high(inner)))
        return max(1, min(size // lanes, power_of_two(high(rows)))), lanes

    def pieces(self) -> int:
        """Into how many equal pieces lines are cut so that each lies within one part of whatever
        is joined or padded along them; one thread then has an element of every piece, reads what
        several of them want once, and masks nothing. 1 where nothing is gained."""
        rows, vector = self.shape.rows, self.vector()
        if not isinstance(self.inner, int) or self.has_loaded_gather() or self.turned():
            return 1
        row = named("loop", "row", 0, max(1, high(rows or 1) - 1))

        def undecided(count: int) -> int:
            size = self.inner // count
            lane = named("loop", "lane", 0, max(1, size - 1))
            starts = [
                (v, self.index_at(v, row, lane + k * size))
                for v in self.group.stored
                for k in range(count)
            ]
            return open_conditions(starts, self.inputs)

        most = self.each // vector
        if most < 2 or self.inner < 4 * vector or not undecided(1):
            return 1
        for count in (2, 4, 8):
            whole = self.inner % (count * 2 * vector) == 0
            if count <= most and whole and not undecided(count):
                return count
        return 1

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
        rows = self.shape.rows
        if rows is None or high(rows) < 4 or high(self.inner) < 4:
            return []
        lane = named("loop", "lane", 0, max(1, high(self.inner) - 1))
        row = named("loop", "row", 0, max(1, high(rows) - 1))
        starts = [(v, self.index_at(v, row, lane)) for v in self.group.stored]
        return turned_reads(starts, self.inputs, row, lane)

    def write_all(self, row: Size, *columns: Size) -> None:
        """Evaluate every wanted value at a row and some columns, then store them."""
        found = []
        for v, lane in ((v, lane) for v in self.group.stored for lane in columns):
            index = self.index_at(v, row, lane)
            found.append((v, index, self.e.value(v, index)))
        for v, index, x in found:
            self.e.store(self.outputs[v], x, offset_of(v, index))


def tight(size: int) -> int:
    """A power of two of which few cover a size with little waste: at least a vector's worth."""
    whole = power_of_two(size)
    part = whole
    while part > 64 and -(-size // part) * part * 8 > size * 9:
        part //= 2
    return part if -(-size // part) * part * 16 < whole * 15 else whole


def plain_reads(starts: Sequence[Place], stored: Container[Node]) -> list[Place]:
    """Reads of stored values below some, where nothing guards them, in the order of inputs."""
    return reads_below(starts, stored, guarded=False, forward=True)


def open_conditions(starts: Sequence[Place], stored: Container[Node]) -> int:
    """How many conditions of padding and joining the bounds of the indices do not decide."""
    found: list[Condition] = []

    def step(node: Node, index: Index) -> Sequence[Place]:
        if node in stored:
            return ()
        if node.op in MOVEMENT:
            parts = [(node.inputs[0], *MOVEMENT[node.op](node, index))]
        elif node.op is ops.concatenate:
            parts = [(x, at, [condition]) for x, at, condition in joined(node, index)]
        else:
            return below(node, index)
        met = [part for part in parts if not any(c.fails() for c in part[2])]
        found.extend(c for part in met for c in part[2] if not c.holds())
        return [(value, at) for value, at, _ in met]

    for _ in places(starts, step):
        pass
    return len(found)


def turned_reads(
    starts: Sequence[Place], stored: Container[Node], row: Expr, lane: Expr
) -> list[Node]:
    """Stored values below some that are contiguous along the row and jump along the lane."""
    found: dict[Node, None] = {}
    for node, index in plain_reads(starts, stored):
        offset = offset_of(node, index)
        if coefficient(offset, row) == 1 and coefficient(offset, lane) not in (None, 0, 1):
            found[node] = None
    return list(found)
