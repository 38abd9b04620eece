"""Lower `dot` to packed, register-tiled matmul Bodies, with the epilogue fused.

Every dot is batch x (m, k) @ (k, n). A program computes a panel of `block_n` columns for a
range of rows: it packs its part of b into scratch (panels of `nr` columns, k-major), then runs
the register micro-kernel (mr x nr accumulators over the whole of k), and hands each finished
row to the epilogue. a is read where it lies if its k axis is contiguous, else it is packed
too. Small m takes the streaming form in `fuse` (a dot of one row is a reduction).

Invariant: the order of a sum over k depends on the Plan alone, never on workers or batch.

The file is long because packing, the micro-kernel and the epilogue of one Body share what
`DotLowering` knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ..core import dtype as dtypes
from ..core.config import invariant
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import (
    Expr,
    Size,
    ceil_divide,
    coefficient,
    high,
    loop_index,
    low,
    maximum,
    minimum,
    power_of_two,
    round_up,
    substitute,
)
from ..ir.types import Array
from ..tile import ops as tile_ops
from . import plan as plans
from .access import Condition, Place, atom_of, offset_of, reads_below, through
from .family import Bodies, Family, Made, Offer, Offers, roofline
from .plan import Plan
from .problem import SIZE, A, B, breaks_of_groups, problem_of
from .region import Region
from .sheet import Sheet, scratch

FEW_GROUPS = 4  # times the rows of a group if all had equal ones: more are for several programs
PAD = 16  # elements after each packed row of a: breaks power-of-two strides


class DotLowering:
    """Lowers one dot Region: a record of what its one program knows of itself."""

    keeps_sums = True  # whether sums over a part of k are kept in memory
    word = 1  # neighbours along k that are packed as one element
    step = 1  # multiples of k that are packed: beyond the end of k they are 0
    plan: Plan
    batch: Size  # of the program, whose rows and columns begin here
    row: Size
    column: Size
    stop: Size  # the row after its last
    live: Size  # panels of columns that it has

    def __init__(self, region: Region) -> None:
        self.region, self.target = region, region.target
        self.problem = problem_of(region.anchor)
        self.stored = region.stored
        self.accumulator = dtypes.accumulator(region.anchor.inputs[0].dtype).wide
        self.input = self.accumulator  # what operands are packed as
        self.depth = ceil_divide(self.problem.sizes[2], self.word)  # k as it is packed

    def choose(self) -> Plan:
        """The cheapest Plan for these sizes."""
        problem = self.problem
        turned = problem.b.op is ops.permute or (problem.grouped and problem.k_last)
        batch, m, _, n = problem.most
        sizes, apart = (batch, m, high(self.depth), n), not self.sums_in_result()
        plan = plans.Problem(*sizes, self.target, self.accumulator, turned, apart).best()
        return replace(plan, block_m=self.rows_of_group(plan.mr)) if problem.grouped else plan

    def rows_of_group(self, unit: int) -> int:
        """Rows of a group that a program takes: of most groups all, whose weights it packs."""
        return round_up(FEW_GROUPS * self.problem.most[1], unit)

    # ---- the Body -------------------------------------------------------------------------

    def lower(self) -> Made:
        """The Body."""
        self.plan = self.choose()
        self.parts = ceil_divide(self.depth, self.plan.block_k)
        kept, dot = self.parts != 1 and self.keeps_sums, self.region.anchor
        apart = kept and not self.sums_in_result()
        sums = [("partial", Array((dot.size,), self.accumulator))] if apart else []
        self.sheet = Sheet.of(self.region, *scratch(sums, "state"))
        self.b, self.e, self.outputs = self.sheet.b, self.sheet.e, self.sheet.outputs
        in_result = self.outputs[dot] if kept and not apart else None
        self.partial = self.sheet.others.get("partial", in_result)
        return self.sheet.end(self.body(), plan=self.plan)

    def sums_in_result(self) -> bool:
        """Whether sums over a part of k can be kept where the result goes."""
        dot = self.region.anchor
        return dot in self.stored and dot.dtype is self.accumulator

    def body(self) -> Size:
        """One program: for each block of k, pack b, then every row panel. Of groups only where it
        has rows: else weights would be read."""
        b, p, plan = self.b, self.problem, self.plan
        grid, self.batch, self.row, self.column = p.blocks(self.e, plan.block_m, plan.block_n)
        self.live = ceil_divide(minimum(p.sizes[3] - self.column, plan.block_n), plan.nr)
        self.stop = minimum(self.row + plan.block_m, p.end)
        along_k, along_m = self.strides(A)
        self.along_m = along_m == 1 and along_k != 1  # a lies along m rather than along k
        # a register tile takes its rows of a from lanes of one vector: squares of a are turned for
        # it, so they must be whole
        squares = plan.mr % plan.lanes == 0 and self.even
        turns = along_k == 1 and self.target.multiplies_by_lane and squares
        self.lines_of_k = self.along_m or turns
        self.allocate_scratch()
        with b.when(b.less(self.row, self.stop)) if p.grouped else nullcontext():
            self.blocks_of_k()
        return grid

    @property
    def even(self) -> bool:
        """Whether k is whole vectors of what is packed, and its blocks are."""
        k, lanes = self.problem.sizes[2], self.plan.lanes
        return k % (lanes * self.word) == 0 and self.plan.block_k % lanes == 0

    def strides(self, side: int) -> list[Size | None]:
        """The strides of an operand along k and along its other axis, where it is linear there."""
        sizes = self.problem.sizes
        probes = loop_index("probe_k", sizes[2]), loop_index("probe_other", sizes[SIZE[side]])
        place = through(*self.place(side, *probes), self.e.memories)
        if place is None:
            return [None, None]
        offset = offset_of(*place)
        return [coefficient(offset, p) if isinstance(p, Expr) else 0 for p in probes]

    def allocate_scratch(self) -> None:
        """Scratch for what is packed, and for a register tile."""
        b, plan = self.b, self.plan
        shape = (plan.block_n // plan.nr, plan.block_k, plan.nr)
        self.packed_b = b.allocate(shape, self.accumulator, "l2")
        strip = (plan.mr, plan.block_k + PAD)
        if self.lines_of_k:
            strip = (plan.block_k, power_of_two(plan.mr))
        self.packed_a = b.allocate(strip, self.accumulator, "l1")
        self.strip = b.allocate((plan.mr, plan.nr), self.accumulator, "l1")

    def blocks_of_k(self) -> None:
        """All blocks of k, one after another."""
        k, block = self.depth, self.plan.block_k
        end = maximum(k, 1) if low(k) < 1 else k  # a sum of nothing is written too
        for at in self.b.each("k_block", 0, end, block):
            with self.e.scope():
                self.pack_b(at, minimum(k - at, block))
                self.panels(at, minimum(k - at, block))

    @property
    def whole(self) -> bool:
        """Whether row panels end where rows do."""
        m, plan = self.problem.sizes[1], self.plan
        return not self.problem.grouped and m % plan.mr == 0 and plan.block_m % plan.mr == 0

    def columns(self, start: Size) -> Any:
        """A vector over the columns of a panel, masked past the end of n."""
        n, nr = self.problem.sizes[3], self.plan.nr
        return self.e.vector(start, nr, n, n % nr == 0)

    def of_k(
        self, count: Size, step: int = 1, carried: list[Node] | None = None, unroll: int = 1
    ) -> Iterator[Size]:
        """Places in a block of k."""
        bounds = (0, self.plan.block_k - 1)
        return self.b.each("k", 0, count, step, carried, unroll, bounds)

    # ---- packing --------------------------------------------------------------------------

    def lies(self) -> str:
        """How b lies: 'turned', with k along memory, in 'lines' along n, or in 'pieces'."""
        (_, _, k, n), plan = self.problem.sizes, self.plan
        along_k, along_n = self.strides(B)
        turned = (
            along_n not in (0, 1)
            and along_k == 1
            and isinstance(k, int)
            and self.even
            and n % plan.nr == 0
        )
        return "turned" if turned else "lines" if along_n == 1 else "pieces"

    def place(self, side: int, k: Size, other: Size) -> Place:
        """Where a is read at a row, or b at a column."""
        p = self.problem
        return (p.a, p.b)[side], p.index(side, self.batch, other, k)

    def at(self, side: int, k: Size, other: Size) -> Node:
        """What is packed of an operand: 0 where k is past its end."""
        place, condition = self.place(side, k, other), Condition(k, self.problem.sizes[2])
        if condition.size % self.step == 0 or condition.holds():
            value = self.e.value(*place)
        else:
            value = self.e._guarded(*place, [condition])
        return self.b.cast(value, self.input)

    def packed(self, side: int, k: Size, other: Size, lanes: int) -> Node:
        """What is packed of one k, for each of some rows or columns."""
        return self.b.broadcast(self.at(side, k, other), (lanes,))

    def line(self, side: int, k: Size, other: Size, lanes: int, whole: bool = True) -> Node:
        """What is packed of neighbours along k, of one row or column."""
        with self.e.vector(k, lanes, self.problem.sizes[2], whole) as lane:
            value = self.b.broadcast(self.at(side, lane, other), (lanes,))
            return self.b.where(self.e.mask, value, 0) if self.step > 1 else value

    def pack_b(self, at: Size, count: Size) -> None:
        """packed[panel, i, :] = b[at + i, column + panel * nr ...]."""
        b, lies = self.b, self.lies()
        if lies == "lines":  # k outside: memory is read in the order it lies
            for i in self.of_k(count):
                with self.e.scope():
                    for j in b.each("panel", 0, self.live):
                        self.pack_line(at, i, j)
            return
        for j in b.each("panel", 0, self.live):  # where the columns lie is computed once a panel
            if lies == "turned":
                self.pack_turned(at, count, j)
                continue
            for i in self.of_k(count, unroll=4):
                self.pack_line(at, i, j)

    def pack_line(self, at: Size, i: Size, j: Size) -> None:
        """One row of one panel."""
        b, nr = self.b, self.plan.nr
        with self.columns(self.column + j * nr) as lane:
            value = self.packed(B, at + i, lane, nr)
            b.store(self.packed_b, value, (j, i, 0))

    def pack_turned(self, at: Size, count: Size, j: Size) -> None:
        """The same where b is contiguous along k: squares turned in registers."""
        b, lanes = self.b, self.plan.lanes
        start = self.column + j * self.plan.nr
        for i in self.of_k(count, lanes):
            for piece in range(0, self.plan.nr, lanes):
                columns = [start + (piece + r) for r in range(lanes)]
                square = b.turned([self.line(B, at + i, column, lanes) for column in columns])
                square = b.reshape(square, (1, lanes, lanes))
                b.store(self.packed_b, square, (j, i, piece))

    def pack_a(self, at: Size, count: Size, rows: list[Size]) -> None:
        """packed[r, i] = a[row r, at + i], or packed[i, r] in lines of k."""
        b, plan, m = self.b, self.plan, self.problem.sizes[1]
        if self.lines_of_k and not self.along_m:
            for i in self.of_k(count, plan.lanes):
                for r in range(0, plan.mr, plan.lanes):
                    some = rows[r : r + plan.lanes]
                    square = b.turned([self.line(A, at + i, row, plan.lanes) for row in some])
                    b.store(self.packed_a, square, (i, r))
            return
        if self.along_m:  # neighbouring rows at once
            width = power_of_two(plan.mr)
            for i in self.of_k(count, unroll=4):
                with self.e.vector(rows[0], width, m, False) as lane:
                    x = self.packed(A, at + i, lane, width)
                    b.store(self.packed_a, x, (i, 0))
            return
        for r, row in enumerate(rows):
            for i in self.of_k(count, plan.lanes, unroll=4):
                x = self.line(A, at + i, row, plan.lanes, self.even)
                b.store(self.packed_a, x, (r, i))

    # ---- panels ---------------------------------------------------------------------------

    def panels(self, at: Size, count: Size) -> None:
        """Row panels times column panels; a panel past the end repeats its last row."""
        b, m, mr = self.b, self.problem.sizes[1], self.plan.mr
        for i in b.each("row_panel", self.row, self.stop, mr, bounds=(0, high(m) - 1)):
            rows = [i + r if self.whole else minimum(i + r, m - 1) for r in range(mr)]
            self.pack_a(at, count, rows)
            for j in b.each("column_panel", 0, self.live):
                self.panel(at, count, rows, i, j)

    def panel(self, at: Size, count: Size, rows: list[Size], i: Size, j: Size) -> None:
        """One register tile."""
        start = self.column + j * self.plan.nr
        self.prefetch_rows(rows, start)
        with self.e.scope():
            acc = self.micro(count, j, self.rows_ahead(at, i, j))
            self.put(self.with_earlier(acc, at, rows, start), at, i, start)

    def with_earlier(self, acc: Node, at: Size, rows: list[Size], start: Size) -> Node:
        """Add what earlier blocks of k left: read last, when what was asked for has come."""
        b, partial = self.b, self.partial
        if partial is None or isinstance(at, int):
            return acc

        def add() -> Sequence[Node]:
            with self.columns(start) as lane:
                offsets = [self.problem.linear(self.batch, row, lane) for row in rows]
                kept = [self.e._load(partial, place) for place in offsets]
                return [b.apply("add", acc, b.add(tile_ops.stack_rows(*kept)))]

        return b.branch(b.less(0, at), add, lambda: [acc])[0]

    def micro(self, count: Size, j: Size, ahead: list[tuple[Node, Size]]) -> Node:
        """The register tile: acc += a[:, k] outer b[k, :] over a block of k."""
        b, plan = self.b, self.plan
        lanes = self.lines_of_k and self.target.multiplies_by_lane and self.word > 1

        def step(i: Size) -> None:
            if lanes:  # of floats this was 2 % slower
                left = b.reshape(b.load(self.packed_a, (i, 0), (plan.mr,)), (plan.mr, 1))
            else:
                at, axes = ((i, 0), (1, 0)) if self.lines_of_k else ((0, i), (0, 1))
                left = b.load(self.packed_a, at, (plan.mr, 1), axes)
            line = b.load(self.packed_b, (j, i, 0), (1, plan.nr))
            acc[0] = self.multiplied(left, line, acc[0])

        acc = [b.constant(0, self.accumulator, (plan.mr, plan.nr))]
        whole = count // plan.unroll * plan.unroll
        for i in self.of_k(whole, plan.unroll, acc):
            for memory, offset in ahead:  # a line serves many steps: one of them asks for it
                b.prefetch(memory, offset + i * self.word)
            for t in range(plan.unroll):
                step(i + t)
        if count % plan.unroll != 0:
            for i in b.each("k", whole, count, 1, acc, bounds=(0, plan.block_k - 1)):
                step(i)
        return acc[0]

    def multiplied(self, left: Node, line: Node, sums: Node) -> Node:
        """Sums with an outer product."""
        return self.b.add(tile_ops.dot(left, line, sums))

    def rows_ahead(self, at: Size, i: Size, j: Size) -> list[tuple[Node, Size]]:
        """Where the next row panel will be packed from: this column panel's share of its rows."""
        plan, m = self.plan, self.problem.sizes[1]
        if self.along_m or high(m) <= plan.mr:
            return []
        share = ceil_divide(plan.mr, plan.block_n // plan.nr)
        far = [i + plan.mr + minimum(j * share + r, plan.mr - 1) for r in range(share)]
        return self.read_along_k(A, at, far)

    def read_along_k(self, side: int, at: Size, others: list[Size]) -> list[tuple[Node, Size]]:
        """Where an operand is read along k from a place on, in some rows or columns."""
        sizes = self.problem.sizes
        other, k = atom_of("far_row", sizes[SIZE[side]]), atom_of("far_k", sizes[2])
        found: list[tuple[Node, Size]] = []
        for node, index in reads_below([self.place(side, k, other)], self.e.memories):
            offset = offset_of(node, index)
            if coefficient(offset, k) != 1 or coefficient(offset, other) in (0, None):
                continue
            for own in others:
                first = substitute(offset, {other: own, k: at * self.word})
                found.append((self.e.memories[node], first))
        return found

    # ---- what becomes of a register tile --------------------------------------------------

    def put(self, acc: Node, at: Size, i: Size, start: Size) -> None:
        """Store a register tile: straight from registers where nothing is left to compute."""
        b, dot, mr = self.b, self.region.anchor, self.plan.mr

        def by_rows() -> None:
            b.store(self.strip, acc, (0, 0))
            self.finish(at, i, start)

        def straight(memory: Node) -> None:
            with self.e.scope(), self.columns(start) as lane:
                for r in range(mr):
                    row = b.extract(acc, r)
                    self.e.store(memory, row, self.problem.linear(self.batch, i + r, lane))

        def whole_or_rows(memory: Node) -> Any:
            if self.whole:
                return lambda: straight(memory)
            full = b.less_equal(i + mr, self.stop)
            return lambda: b.branch(full, lambda: straight(memory), by_rows)

        if high(self.problem.sizes[1]) < mr:
            by_rows()
        elif self.stored == [dot] and dot.dtype is self.accumulator:
            whole_or_rows(self.outputs[dot])()
        elif self.partial is None:
            by_rows()
        else:  # sums that are not complete go straight to where they are kept
            b.branch(self.is_last(at), by_rows, whole_or_rows(self.partial))

    def is_last(self, at: Size) -> Node:
        """Whether a block of k is the last."""
        return self.b.less_equal(self.depth, at + self.plan.block_k)

    def finish(self, at: Size, i: Size, start: Size) -> None:
        """Hand each row of the register tile to the epilogue, or keep it for the next block."""
        b, plan = self.b, self.plan
        count = minimum(self.stop - i, plan.mr)

        def rows(action: Callable[[Size, Size, Node], None]) -> None:
            for r in b.each("r", 0, count, bounds=(0, plan.mr - 1)):
                with self.e.scope(), self.columns(start) as lane:
                    action(i + r, lane, b.load(self.strip, (r, 0), (plan.nr,)))

        if self.partial is None:
            rows(self.epilogue)
        else:
            b.branch(self.is_last(at), lambda: rows(self.epilogue), lambda: rows(self.keep))

    def keep(self, row: Size, lane: Size, acc: Node) -> None:
        """Store sums that are not complete yet."""
        assert self.partial is not None
        self.e.store(self.partial, acc, self.problem.linear(self.batch, row, lane))

    def epilogue(self, row: Size, lane: Size, acc: Node) -> None:
        """Evaluate and store what the Region wants of one row."""
        self.problem.write(self.sheet, self.stored, (self.batch, row, lane), acc)

    def prefetch_rows(self, rows: list[Size], start: Size) -> None:
        """Ask for what the epilogue will read and write while the register tile is computed."""
        p, (_, m, _, n) = self.problem, self.problem.sizes
        row, lane = atom_of("far_row", m), atom_of("far_lane", n)
        starts = [(v, p.index_like(v, self.batch, row, lane)) for v in self.stored]
        found = [(self.outputs[v], offset_of(v, i)) for v, i in starts]
        for node, index in reads_below(starts, self.e.memories):
            found.append((self.e.memories[node], offset_of(node, index)))
        if self.partial is not None:
            found.append((self.partial, p.linear(self.batch, row, lane)))
        for memory, offset in dict.fromkeys(found):
            if coefficient(offset, lane) != 1 or coefficient(offset, row) in (0, None):
                continue
            for own in rows:
                for column in range(0, self.plan.nr, 64 // memory.dtype.size):
                    self.b.prefetch(memory, substitute(offset, {row: own, lane: start + column}))


class VectorProducts(Family):
    """Products on vectors, packed and register-tiled."""

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """Rows of groups that are mostly alone are no product."""
        return () if invariant() else breaks_of_groups(node, 1)

    def offers(self, region: Region) -> Offers:
        """The roofline at the accumulator's rate: products are made in its dtype."""
        flops, _ = region.work
        rate = region.target.peak_flops(dtypes.accumulator(region.anchor.inputs[0].dtype).wide)
        return [Offer(max(roofline(region), high(flops) / max(1.0, rate)))]

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The Bodies."""
        return [DotLowering(region).lower()]
