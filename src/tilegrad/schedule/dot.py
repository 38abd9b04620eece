"""Lower `dot` to packed, register-tiled matmul Bodies, with the epilogue fused.

Every dot is batch x (m, k) @ (k, n). A program computes a panel of `block_n` columns for a
range of rows: it packs its part of b into scratch (panels of `nr` columns, k-major), then runs
the register micro-kernel (mr x nr accumulators over the whole of k), and hands each finished
row to the epilogue. a is read where it lies if its k axis is contiguous, else it is packed
too. Small m takes the streaming form in `fuse` (a dot of one row is a reduction).

Invariant: the order of a sum over k depends on the Plan alone, never on workers or batch.

Long because packing, the micro-kernel and the epilogue of one Body share what `DotLowering` knows
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..core import dtype as dtypes
from ..core.config import invariant
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import (
    Size,
    ceil_divide,
    coefficient,
    floor_divide,
    high,
    loop_index,
    low,
    maximum,
    minimum,
    modulo,
    named,
    substitute,
)
from ..ir.types import Array, Memory, product
from ..tile import ops as tile_ops
from ..tile.build import BodyBuilder
from . import plan as plans
from . import sheet as parameters
from .access import Index, offset_of, reads_below
from .cut import Cut
from .evaluate import Evaluator, wide
from .family import Bodies, Family, Made, Offer, roofline
from .plan import Plan
from .problem import breaks_of_groups, power_of_two, problem_of, stride_of
from .region import Region
from .sheet import Parameter, Sheet

FEW_GROUPS = 4  # times the rows of a group if all had equal ones: more are for several programs
PAD = 16  # elements after each packed row of a: breaks power-of-two strides


class RowEvaluator(Evaluator):
    """Knows the dot's own element: an epilogue reads no other, however its index is written."""

    def __init__(self, body: BodyBuilder, memories: dict[Node, Node]) -> None:
        super().__init__(body, memories)
        self.own: dict[Node, Node] = {}

    def _value(self, node: Node, index: Index) -> Node:
        return self.own[node] if node in self.own else super()._value(node, index)


class RowSheet(Sheet):
    """A Body that hands rows of products to what is computed of them."""

    e: RowEvaluator
    evaluator = RowEvaluator


class DotLowering:
    """Lowers one dot Region."""

    keeps_sums = True  # whether sums over a part of k are kept in memory

    def __init__(
        self, group: Region, reads: Sequence[Node], values: set[Node], target: Target, name: str
    ) -> None:
        self.group, self.reads, self.values = group, list(reads), values
        self.target, self.name = target, name
        self.problem = problem_of(group.values[0])
        self.stored = group.stored
        self.accumulator = wide(dtypes.accumulator(group.values[0].inputs[0].dtype))

    def plan(self) -> Plan:
        """The cheapest Plan for these sizes."""
        problem = self.problem
        turned = problem.b.op is ops.permute or (problem.grouped and problem.k_last)
        sizes = plans.Problem(*problem.most, turned, not self.sums_in_result())
        plan = plans.choose_plan(sizes, self.target, self.accumulator)
        return replace(plan, block_m=self.rows_of_group(plan.mr)) if problem.grouped else plan

    def rows_of_group(self, unit: int) -> int:
        """Rows of a group that a program takes: of most groups all, whose weights it packs."""
        return -(-FEW_GROUPS * self.problem.most[1] // unit) * unit

    # ---- the Body -------------------------------------------------------------------------

    def lower(self) -> Made:
        """The Body."""
        plan = self.plan()
        self.parts = ceil_divide(self.problem.sizes[2], plan.block_k)
        given = [*parameters.reads(self.reads), *parameters.results(self.stored)]
        self.sheet = RowSheet(self.name, [*given, *self.partial_sums()])
        self.b, self.e, self.outputs = self.sheet.b, self.sheet.e, self.sheet.outputs
        self.partial = self.sheet.others.get("partial")
        if self.partial is None and self.parts != 1 and self.keeps_sums:
            self.partial = self.outputs[self.group.values[0]]
        return self.sheet.end(self.body(plan), plan=plan)

    def sums_in_result(self) -> bool:
        """Whether sums over a part of k can be kept where the result goes."""
        dot = self.group.values[0]
        return dot in self.stored and dot.dtype is self.accumulator

    def partial_sums(self) -> list[Parameter]:
        """Where sums over a part of k are kept apart from the result."""
        dot = self.group.values[0]
        if self.parts == 1 or not self.keeps_sums or self.sums_in_result():
            return []
        memory = Memory((product(dot.shape),), self.accumulator, "global", "state")
        return [Parameter("partial", memory, ("scratch", Array(dot.shape, self.accumulator)))]

    def body(self, plan: Plan) -> tuple[Size, ...]:
        """One program: for each block of k, pack b, then every row panel."""
        b = self.b
        _, _, k, n = self.problem.sizes
        grid, at_batch, row, column = self.problem.blocks(self.e, plan.block_m, plan.block_n)
        shape = (plan.block_n // plan.nr, plan.block_k, plan.nr)
        self.packed_b = b.allocate(shape, self.accumulator, "l2")
        self.turned_a = self.is_turned(at_batch)
        strip = (plan.mr, plan.block_k + PAD)
        if self.turned_a:
            strip = (plan.block_k, power_of_two(plan.mr))
        self.packed_a = b.allocate(strip, self.accumulator, "l1")
        self.strip = b.allocate((plan.mr, plan.nr), self.accumulator, "l1")
        live = ceil_divide(minimum(n - column, plan.block_n), plan.nr)
        stop = minimum(row + plan.block_m, self.problem.end)

        def part(at: Size, _: list[Node]) -> None:
            count = minimum(k - at, plan.block_k)
            with self.e.scope():
                self.pack_b(plan, at_batch, at, count, column, live)
                self.rows(plan, at_batch, at, count, row, stop, column, live)

        end = maximum(k, 1) if low(k) < 1 else k  # a sum of nothing is written too
        self.if_any(row, stop, lambda: b.loop("k_block", 0, end, plan.block_k, part))
        return (grid,)

    def if_any(self, row: Size, stop: Size, act: Callable[[], Any]) -> None:
        """Act, but for groups only where a program has rows: else weights would be read."""
        if self.problem.grouped:
            self.b.branch(self.b.less(row, stop), lambda: act() and None, lambda: None)
        else:
            act()

    def whole(self, plan: Plan) -> bool:
        """Whether row panels end where rows do."""
        m = self.problem.sizes[1]
        return not self.problem.grouped and modulo(m, plan.mr) == 0 and plan.block_m % plan.mr == 0

    def columns(self, plan: Plan, start: Size) -> Any:
        """A vector over the columns of a panel, masked past the end of n."""
        n = self.problem.sizes[3]
        return self.e.vector(start, plan.nr, n, modulo(n, plan.nr) == 0)

    def lies(self, plan: Plan, batch: Size) -> str:
        """How b lies: 'turned', with k along memory, in 'lines' along n, or in 'pieces'."""
        _, _, k, n = self.problem.sizes
        probe_k, probe_n = loop_index("probe_k", k), loop_index("probe_n", n)
        probe = self.problem.index_b(batch, probe_k, probe_n)
        along_n, along_k = (stride_of(self.e, self.problem.b, probe, p) for p in (probe_n, probe_k))
        even = isinstance(k, int) and k % plan.lanes == 0 and plan.block_k % plan.lanes == 0
        turned = (
            along_n not in (0, 1)
            and along_k == 1
            and even
            and modulo(n, plan.nr) == 0
            and plan.lanes & (plan.lanes - 1) == 0
            and plan.lanes > 1
        )
        return "turned" if turned else "lines" if along_n == 1 else "pieces"

    def pack_b(
        self, plan: Plan, batch: Size, at: Size, count: Size, column: Size, live: Size
    ) -> None:
        """packed[panel, i, :] = b[at + i, column + panel * nr ...]."""
        b, x, lies = self.b, self.problem.b, self.lies(plan, batch)
        bounds = (0, plan.block_k - 1)

        def square(j: Size, _: list[Node]) -> None:
            self.pack_turned(plan, batch, at, count, column + j * plan.nr, j)

        def piece(i: Size, j: Size) -> None:
            with self.columns(plan, column + j * plan.nr) as lane:
                value = self.e.value(x, self.problem.index_b(batch, at + i, lane))
                value = b.broadcast(b.cast(value, self.accumulator), (plan.nr,))
                b.store(self.packed_b, value, (j, i, 0), (2,))

        def line(i: Size, _: list[Node]) -> None:
            with self.e.scope():
                b.loop("panel", 0, live, 1, lambda j, _: piece(i, j))

        def panel(j: Size, _: list[Node]) -> None:
            b.loop("k", 0, count, 1, lambda i, _: piece(i, j), unroll=4, bounds=bounds)

        if lies == "turned":
            b.loop("panel", 0, live, 1, square)
        elif lies == "lines":  # k outside: memory is read in the order it lies
            b.loop("k", 0, count, 1, line, bounds=bounds)
        else:  # k inside: where the columns lie is computed once a panel
            b.loop("panel", 0, live, 1, panel)

    def pack_turned(
        self, plan: Plan, batch: Size, at: Size, count: Size, start: Size, j: Size
    ) -> None:
        """The same where b is contiguous along k: squares turned in registers."""
        b, e, lanes = self.b, self.e, plan.lanes
        k = self.problem.sizes[2]

        def square(i: Size, _: list[Node]) -> None:
            for piece in range(plan.across):
                rows = []
                for r in range(lanes):
                    n = start + (piece * lanes + r)
                    with e.vector(at + i, lanes, k, True) as lane:
                        x = e.value(self.problem.b, self.problem.index_b(batch, lane, n))
                        rows.append(b.cast(x, self.accumulator))
                turned = b.add(tile_ops.transpose(b.add(tile_ops.stack_rows(*rows)), order=(1, 0)))
                b.store(
                    self.packed_b,
                    b.add(tile_ops.reshape(turned, shape=(1, lanes, lanes))),
                    (j, i, piece * lanes),
                    (0, 1, 2),
                )

        b.loop("k", 0, count, lanes, square, bounds=(0, plan.block_k - 1))

    def pack_a(self, plan: Plan, batch: Size, at: Size, count: Size, places: list[Size]) -> None:
        """packed[r, i] = a[row r, at + i], or packed[i, r] where a is contiguous along m."""
        b, e = self.b, self.e
        k = self.problem.sizes[2]
        if self.turned_a:
            self.pack_a_columns(plan, batch, at, count, places[0])
            return
        for r, m in enumerate(places):

            def vector(i: Size, _: list[Node], r: int = r, m: Size = m) -> None:
                whole = modulo(k, plan.lanes) == 0 and plan.block_k % plan.lanes == 0
                with e.vector(at + i, plan.lanes, k, whole) as lane:
                    x = e.value(self.problem.a, self.problem.index_a(batch, m, lane))
                    x = b.broadcast(b.cast(x, self.accumulator), (plan.lanes,))
                    b.store(self.packed_a, x, (r, i), (1,))

            b.loop("k", 0, count, plan.lanes, vector, unroll=4, bounds=(0, plan.block_k - 1))

    def pack_a_columns(self, plan: Plan, batch: Size, at: Size, count: Size, row: Size) -> None:
        """packed[i, :] = a[row ..., at + i]: neighbouring rows of a at once."""
        b, e = self.b, self.e
        m = self.problem.sizes[1]
        width = power_of_two(plan.mr)

        def line(i: Size, _: list[Node]) -> None:
            with e.vector(row, width, m, False) as lane:
                x = e.value(self.problem.a, self.problem.index_a(batch, lane, at + i))
                b.store(
                    self.packed_a, b.broadcast(b.cast(x, self.accumulator), (width,)), (i, 0), (1,)
                )

        b.loop("k", 0, count, 1, line, unroll=4, bounds=(0, plan.block_k - 1))

    def is_turned(self, batch: Size) -> bool:
        """Whether a is contiguous along m rather than k."""
        probe_m, probe_k = (
            loop_index(n, s) for n, s in zip(("probe_m", "probe_k"), self.problem.sizes[1:3])
        )
        probe = self.problem.index_a(batch, probe_m, probe_k)
        along_m, along_k = (stride_of(self.e, self.problem.a, probe, x) for x in (probe_m, probe_k))
        return along_m == 1 and along_k != 1

    def rows(
        self,
        plan: Plan,
        batch: Size,
        at: Size,
        count: Size,
        row: Size,
        stop: Size,
        column: Size,
        live: Size,
    ) -> None:
        """Row panels times column panels; a panel past the end repeats its last row."""
        b = self.b
        m = self.problem.sizes[1]
        top = m - 1
        whole = self.whole(plan)

        def row_panel(i: Size, _: list[Node]) -> None:
            places = [i + r for r in range(plan.mr)]
            if not whole:
                places = [minimum(p, top) for p in places]
            self.pack_a(plan, batch, at, count, places)

            def column_panel(j: Size, _: list[Node]) -> None:
                start = column + j * plan.nr
                self.prefetch_rows(plan, batch, places, start)
                with self.e.scope():
                    ahead = self.rows_ahead(plan, batch, at, i, j)
                    acc = self.micro(plan, count, j, ahead)
                    acc = self.with_earlier(plan, acc, batch, at, places, start)
                    self.put(plan, acc, batch, at, i, stop, start)

            b.loop("column_panel", 0, live, 1, column_panel)

        b.loop("row_panel", row, stop, plan.mr, row_panel, bounds=(0, high(m) - 1))

    def with_earlier(
        self, plan: Plan, acc: Node, batch: Size, at: Size, places: list[Size], start: Size
    ) -> Node:
        """Add what earlier blocks of k left: read last, when what was asked for has come."""
        b = self.b
        if self.partial is None or isinstance(at, int):
            return acc

        def add() -> Sequence[Node]:
            assert self.partial is not None
            with self.columns(plan, start) as lane:
                rows = [
                    self.e._load(self.partial, self.problem.linear(batch, p, lane)) for p in places
                ]
                return [b.apply("add", acc, b.add(tile_ops.stack_rows(*rows)))]

        return b.branch(b.less(0, at), add, lambda: [acc])[0]

    def micro(self, plan: Plan, count: Size, j: Size, ahead: list[tuple[Node, Size]]) -> Node:
        """The register tile: acc += a[:, k] outer b[k, :] over a block of k."""
        b = self.b

        def step(i: Size, carried: list[Node]) -> Sequence[Node]:
            if self.turned_a:
                left = b.load(self.packed_a, (i, 0), (plan.mr, 1), (1, 0))
            else:
                left = b.load(self.packed_a, (0, i), (plan.mr, 1), (0, 1))
            line = b.load(self.packed_b, (j, i, 0), (1, plan.nr), (1, 2))
            return [b.add(tile_ops.dot(left, line, carried[0]))]

        def several(i: Size, carried: list[Node]) -> Sequence[Node]:
            for memory, offset in ahead:  # a line serves many steps: one of them asks for it
                b.prefetch(memory, offset + i)
            for t in range(plan.unroll):
                carried = list(step(i + t, carried))
            return carried

        acc = [b.constant(0, self.accumulator, (plan.mr, plan.nr))]
        whole = floor_divide(count, plan.unroll) * plan.unroll
        bounds = (0, plan.block_k - 1)
        acc = b.loop("k", 0, whole, plan.unroll, several, acc, bounds=bounds)
        if modulo(count, plan.unroll) != 0:
            acc = b.loop("k", whole, count, 1, step, acc, bounds=bounds)
        return acc[0]

    def rows_ahead(
        self, plan: Plan, batch: Size, at: Size, i: Size, j: Size
    ) -> list[tuple[Node, Size]]:
        """Where the next row panel will be packed from: this column panel's share of its rows."""
        _, m, k, _ = self.problem.sizes
        if self.turned_a or high(m) <= plan.mr:
            return []
        row = named("loop", "far_row", 0, max(1, high(m) - 1))
        place = named("loop", "far_k", 0, max(1, high(k) - 1))
        reads = reads_below(
            [(self.problem.a, self.problem.index_a(batch, row, place))], self.e.memories
        )
        share = -(-plan.mr // (plan.block_n // plan.nr))
        found: list[tuple[Node, Size]] = []
        for node, index in reads:
            offset = offset_of(node, index)
            if coefficient(offset, place) != 1 or coefficient(offset, row) in (0, None):
                continue
            for r in range(share):
                own = minimum(j * share + r, plan.mr - 1)
                far = i + plan.mr + own
                found.append((self.e.memories[node], substitute(offset, {row: far, place: at})))
        return found

    def put(
        self, plan: Plan, acc: Node, batch: Size, at: Size, i: Size, stop: Size, start: Size
    ) -> None:
        """Store a register tile: straight from registers where nothing is left to compute."""
        b, dot, m = self.b, self.group.values[0], self.problem.sizes[1]

        def by_rows() -> None:
            b.store(self.strip, acc, (0, 0), (0, 1))
            self.finish(plan, batch, at, i, stop, start)

        def straight(memory: Node) -> Any:
            def run() -> None:
                with self.e.scope(), self.columns(plan, start) as lane:
                    for r in range(plan.mr):
                        row = b.add(tile_ops.extract(acc, index=r))
                        self.e.store(memory, row, self.problem.linear(batch, i + r, lane))

            return run

        def whole_or_rows(memory: Node) -> Any:
            if self.whole(plan):
                return straight(memory)
            full = b.less_equal(i + plan.mr, stop)
            return lambda: b.branch(full, straight(memory), by_rows)

        if high(m) < plan.mr:
            by_rows()
        elif self.stored == [dot] and dot.dtype is self.accumulator:
            whole_or_rows(self.outputs[dot])()
        elif self.partial is None:
            by_rows()
        else:  # sums that are not complete go straight to where they are kept
            last = b.less_equal(self.problem.sizes[2], at + plan.block_k)
            b.branch(last, by_rows, whole_or_rows(self.partial))

    def finish(self, plan: Plan, batch: Size, at: Size, i: Size, stop: Size, start: Size) -> None:
        """Hand each row of the register tile to the epilogue, or keep it for the next block."""
        b = self.b
        k = self.problem.sizes[2]
        count = minimum(stop - i, plan.mr)

        def rows(action: Any) -> Any:
            def one(r: Size, _: list[Node]) -> None:
                with self.e.scope(), self.columns(plan, start) as lane:
                    acc = b.load(self.strip, (r, 0), (plan.nr,), (1,))
                    action(batch, i + r, lane, acc)

            def run() -> None:
                b.loop("r", 0, count, 1, one, bounds=(0, plan.mr - 1))

            return run

        if self.partial is None:
            rows(self.epilogue)()
            return
        last = b.less_equal(k, at + plan.block_k)
        b.branch(last, rows(self.epilogue), rows(self.keep))

    def keep(self, batch: Size, row: Size, lane: Size, acc: Node) -> None:
        """Store sums that are not complete yet."""
        assert self.partial is not None
        self.e.store(self.partial, acc, self.problem.linear(batch, row, lane))

    def epilogue(self, batch: Size, row: Size, lane: Size, acc: Node) -> None:
        """Evaluate and store what the Region wants of one row."""
        e = self.e
        dot = self.group.values[0]
        e.own[dot] = e.settled(self.b.cast(acc, wide(dot.dtype)), dot)
        for v in self.stored:
            self.sheet.write(v, self.problem.index_like(v.shape, v, batch, row, lane))

    def prefetch_rows(self, plan: Plan, batch: Size, places: list[Size], start: Size) -> None:
        """Ask for what the epilogue will read and write while the register tile is computed."""
        b = self.b
        _, m, _, n = self.problem.sizes
        row = named("loop", "far_row", 0, max(1, high(m) - 1))
        lane = named("loop", "far_lane", 0, max(1, high(n) - 1))
        linear = self.problem.linear(batch, row, lane)
        starts = [(v, self.problem.index_like(v.shape, v, batch, row, lane)) for v in self.stored]
        found = [(self.outputs[v], offset_of(v, i)) for v, i in starts]
        for node, index in reads_below(starts, self.e.memories):
            found.append((self.e.memories[node], offset_of(node, index)))
        if self.partial is not None:
            found.append((self.partial, linear))
        for memory, offset in dict.fromkeys(found):
            if coefficient(offset, lane) != 1 or coefficient(offset, row) in (0, None):
                continue
            line = 64 // memory.dtype.size
            for place in places:
                for column in range(0, plan.nr, line):
                    at = substitute(offset, {row: place, lane: start + column})
                    b.prefetch(memory, at)


class VectorProducts(Family):
    """Products on vectors, packed and register-tiled."""

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """Whether a value can be computed of the product on its way out."""
        return cut.follows(node, region, leaves)

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """Rows of groups that are mostly alone are no product."""
        return () if invariant() else breaks_of_groups(node, 1)

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """The roofline at the accumulator's rate: products are made in its dtype."""
        flops, _ = region.work
        rate = target.peak_flops(wide(dtypes.accumulator(region.anchor.inputs[0].dtype)))
        return [Offer(max(roofline(region, target), high(flops) / max(1.0, rate)))]

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Bodies."""
        return [DotLowering(region, region.inputs, region.known, target, name).lower()]
