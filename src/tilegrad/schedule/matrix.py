"""Lower `dot` to a matrix unit with tiles of its own (AMX): 2 x 2 tiles of 16 x 16 results.

b is packed so that groups of k values (pairs of bf16, quads of int8) stand side by side, a is
copied tile by tile. Four accumulators go over the whole of k while enough columns of b fit into the
cache; a longer k is cut into blocks so short that a row panel of a stays in the nearest cache, and
sums wait in scratch for the next block. After the last they go to a strip from which the epilogue
takes rows. Invariant: rows past the end of m repeat the last row and are never stored; k past its
end is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.config import invariant
from ..core.target import MatrixUnit, Target
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, floor_divide, high, loop_index, minimum, modulo
from ..tile import ops as tile_ops
from .access import Condition, Index
from .cut import Cut
from .dot import DotLowering
from .family import Bodies, Family, Offer, roofline
from .plan import Plan
from .problem import breaks_of_groups, stride_of
from .region import Region

SCRATCH = 1 << 20  # bytes of packed b
FEW_COLUMNS = 256  # of b at a time: fewer read a from afar too often
NEAR = 1 << 14  # bytes of a row panel of a block of k
SUMS, WIDE = 1 << 20, 512  # bytes of sums that wait for the next block of k, columns of them
CHUNK = 4  # panels packed side by side
TILE = 16


def unit_for(group: Region, target: Target) -> MatrixUnit | None:
    """The matrix unit that can run a dot, if the work is large enough for it."""
    a, b = group.values[0].inputs[:2]
    units = [u for u in target.matrix_units(a.dtype, b.dtype) if u.m == TILE and u.n == TILE]
    return units[0] if units else None


class MatrixLowering(DotLowering):
    """Lowers one dot Region to a matrix unit."""

    keeps_sums = False  # they stay in the program's own scratch

    def __init__(self, unit: MatrixUnit, *rest: Any) -> None:
        super().__init__(*rest)
        self.unit = unit
        self.accumulator = unit.accumulator
        self.input = unit.inputs[0]
        self.together = unit.k // TILE  # k values that stand side by side

    def plan(self) -> Plan:
        """Blocks: of k what stays near, of m and n as much as their sums may take."""
        batch, m, k, n = self.problem.most
        side, workers = 2 * TILE, max(1, self.target.cores)
        block_k, parts = max(1, -(-k // self.unit.k)) * self.unit.k, 1
        fit = max(side, SCRATCH // (block_k * self.input.size) // side * side)
        if fit < min(n, FEW_COLUMNS) and m > side and isinstance(self.problem.sizes[2], int):
            parts = -(-side * block_k * self.input.size // NEAR)
            block_k = rounded(-(-k // parts), self.unit.k)
            fit = max(side, SCRATCH // (block_k * self.input.size) // side * side)
        block_n, block_m = min(fit, rounded(n, side)), max(1, m)
        if parts > 1:
            block_n = even(n, min(fit, WIDE), side)
            block_m = even(m, SUMS // (block_n * self.accumulator.size), side)
        programs = batch * (1 if parts == 1 else -(-m // block_m) * -(-n // block_n))
        if programs < 2 * workers and workers > 1:
            if m >= 2 * n or n <= workers * side:
                block_m = min(block_m, max(side, rounded(-(-m // workers), side)))
            else:
                count = rounded(-(-n // block_n), workers)
                block_n = min(block_n, max(side, rounded(-(-n // count), side)))
        if self.problem.grouped:
            block_m = self.rows_of_group(side)
        return Plan(side, 2, TILE, block_m, block_n, block_k, self.unit.name)

    def places(self, plan: Plan) -> None:
        """Scratch in the layouts the unit reads."""
        b, steps = self.b, plan.block_k // self.unit.k
        line, panels = TILE * self.together, plan.block_n // plan.nr
        self.packed_b = b.allocate((panels, steps, 2, TILE, line), self.input, "l2")
        self.packed_a = b.allocate((steps, 2, TILE, line), self.input, "l1")
        self.strip = b.allocate((plan.mr, plan.nr), self.accumulator, "l1")
        self.blocks = max(1, self.parts) if isinstance(self.parts, int) else 1
        if self.blocks > 1:
            rows = -(-plan.block_m // plan.mr)
            self.sums = b.allocate((rows, panels, 4, TILE, TILE), self.accumulator, "l2")

    def body(self, plan: Plan) -> tuple[Size, ...]:
        """One program: for each block of k, pack b, then every row panel."""
        b = self.b
        _, _, k, n = self.problem.sizes
        grid, at_batch, row, column = self.problem.blocks(self.e, plan.block_m, plan.block_n)
        self.turned_a = self.is_turned(at_batch)
        self.places(plan)
        live = ceil_divide(minimum(n - column, plan.block_n), plan.nr)
        stop = minimum(row + plan.block_m, self.problem.end)
        whole, each = ceil_divide(k, self.unit.k), plan.block_k // self.unit.k

        def part(block: Size, ends: str) -> None:
            self.first = block * each
            self.steps = minimum(whole - self.first, each)
            with self.e.scope():
                self.pack_columns(plan, at_batch, column, live)
                self.panels(plan, at_batch, (row, stop), column, live, ends)

        def parts() -> None:
            last = self.blocks - 1
            if last:
                part(0, "first")
            if last > 1:
                b.loop("k_block", 1, last, 1, lambda block, _: part(block, ""))
            part(last, "last" if last else "first last")

        self.if_any(row, stop, parts)
        return (grid,)

    def operand(self, x: Node, index: Index, k: Size, lanes: int) -> Node:
        """An operand in the unit's dtype, zero where k is past its end."""
        size = self.problem.sizes[2]
        if modulo(size, self.unit.k) == 0:
            value = self.e.value(x, index)
        else:
            condition = Condition(k, size)
            value = (
                self.e.value(x, index)
                if condition.holds()
                else self.e._guarded(x, index, [condition])
            )
        return self.b.broadcast(self.b.cast(value, self.input), (lanes,))

    def pack_columns(self, plan: Plan, batch: Size, column: Size, live: Size) -> None:
        """packed[panel, step, half, group, :] = groups of k for 16 columns."""
        b, x = self.b, self.problem.b
        _, _, k, n = self.problem.sizes
        probe_k, probe_n = loop_index("probe_k", k), loop_index("probe_n", n)
        probe = self.problem.index_b(batch, probe_k, probe_n)
        along_k, along_n = (stride_of(self.e, x, probe, at) for at in (probe_k, probe_n))
        turned = (
            along_k == 1 != along_n
            and modulo(k, self.unit.k) == 0
            and modulo(n, plan.nr) == 0
            and self.together == 2
        )

        def one(j: Size, s: Size, g: Size = 0) -> None:
            start = column + j * plan.nr
            if turned:
                self.turned_step(plan, batch, start, j, s)
            else:
                self.plain_group(plan, batch, start, (j, s, g))

        def panel(j: Size, _: list[Node]) -> None:
            b.loop("step", 0, self.steps, 1, lambda s, _: one(j, s))

        def chunk(c: Size, _: list[Node]) -> None:
            top = minimum(c + CHUNK, live)

            def group(s: Size, g: Size) -> None:
                with self.e.scope():
                    b.loop(
                        "panel", c, top, 1, lambda j, _: one(j, s, g), bounds=(0, high(live) - 1)
                    )

            b.loop(
                "step",
                0,
                self.steps,
                1,
                lambda s, _: b.loop("group", 0, TILE, 1, lambda g, _: group(s, g)),
            )

        if turned:
            b.loop("panel", 0, live, 1, panel)
        else:  # neighbouring lines of memory together
            b.loop("chunk", 0, live, CHUNK, chunk)

    def plain_group(self, plan: Plan, batch: Size, start: Size, at: Sequence[Size]) -> None:
        """A group of k where b is read along n: rows are interleaved."""
        b, x, together = self.b, self.problem.b, self.together
        j, s, g = at
        base = (self.first + s) * self.unit.k + g * together
        rows = []
        for t in range(together):
            k = base + t
            with self.columns(plan, start) as lane:
                rows.append(self.operand(x, self.problem.index_b(batch, k, lane), k, plan.nr))
        wide = b.add(tile_ops.transpose(b.add(tile_ops.stack_rows(*rows)), order=(1, 0)))
        value = b.add(tile_ops.reshape(wide, shape=(2, TILE * together)))
        b.store(self.packed_b, value, (j, s, 0, g, 0), (2, 4))

    def turned_step(self, plan: Plan, batch: Size, start: Size, j: Size, s: Size) -> None:
        """A step of k where b is contiguous along k: pairs are turned as one."""
        b, x = self.b, self.problem.b
        base = (self.first + s) * self.unit.k
        for half in range(2):
            rows = []
            for r in range(TILE):
                n = start + (half * TILE + r)
                with self.e.vector(base, self.unit.k, self.problem.sizes[2], True) as lane:
                    value = self.e.value(x, self.problem.index_b(batch, lane, n))
                    rows.append(b.cast(value, self.input))
            stacked = b.add(tile_ops.stack_rows(*rows))
            pairs = b.add(tile_ops.reshape(stacked, shape=(TILE, TILE, 2)))
            turned = b.add(tile_ops.transpose(pairs, order=(1, 0, 2)))
            value = b.add(tile_ops.reshape(turned, shape=(TILE, 2 * TILE)))
            b.store(self.packed_b, value, (j, s, half, 0, 0), (3, 4))

    def pack_rows(self, plan: Plan, batch: Size, places: list[Size]) -> None:
        """packed[step, half, row, :] = a[row, (first + step) * k ...]."""
        b, x = self.b, self.problem.a
        k = self.problem.sizes[2]

        def step(s: Size, _: list[Node]) -> None:
            for r, m in enumerate(places):
                base = (self.first + s) * self.unit.k
                with self.e.vector(base, self.unit.k, k, modulo(k, self.unit.k) == 0) as lane:
                    value = self.e.value(x, self.problem.index_a(batch, m, lane))
                    value = b.broadcast(b.cast(value, self.input), (self.unit.k,))
                    if self.e.mask is not None:
                        zero = b.constant(0, self.input)
                        value = b.apply("where", self.e.mask, value, zero)
                    b.store(self.packed_a, value, (s, r // TILE, r % TILE, 0), (3,))

        b.loop("step", 0, self.steps, 1, step)

    def panels(
        self, plan: Plan, batch: Size, rows: tuple[Size, Size], column: Size, live: Size, ends: str
    ) -> None:
        """Row panels times column panels."""
        b, (row, stop) = self.b, rows
        m = self.problem.sizes[1]
        whole, top = self.whole(plan), m - 1
        at = self.first * self.unit.k

        def row_panel(i: Size, _: list[Node]) -> None:
            places = [i + r for r in range(plan.mr)]
            if not whole:
                places = [minimum(p, top) for p in places]
            self.pack_rows(plan, batch, places)
            panel = floor_divide(i - row, plan.mr)

            def column_panel(j: Size, _: list[Node]) -> None:
                start = column + j * plan.nr
                if "last" in ends:
                    self.prefetch_rows(plan, batch, places, start)
                with self.e.scope():
                    self.matrix_micro((panel, j), self.rows_ahead(plan, batch, at, i, j), ends)
                    if "last" in ends:
                        self.finish(plan, batch, at, i, stop, start)

            b.loop("column_panel", 0, live, 1, column_panel)

        b.loop("row_panel", row, stop, plan.mr, row_panel, bounds=(0, high(m) - 1))

    def matrix_micro(
        self, panels: tuple[Size, Size], ahead: list[tuple[Node, Size]], ends: str
    ) -> None:
        """Four accumulators over a block of k, from and to the sums; at last to the strip."""
        b, name, (panel, j) = self.b, self.unit.name, panels
        line, steps = TILE * self.together, int(self.packed_a.shape[0])
        each = -(-4 * TILE // steps)

        def load(memory: Node, *index: Size, width: int = line) -> Node:
            scalars = [b.index(i) for i in index]
            return b.add(tile_ops.matrix_load(memory, *scalars, shape=(TILE, width), unit=name))

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            left = [load(self.packed_a, s, t, 0, 0) for t in range(2)]
            right = [load(self.packed_b, j, s, t, 0, 0) for t in range(2)]
            for row in range(0, 2 * TILE):
                b.prefetch(self.packed_b, j, s + 2, row // TILE, row % TILE, 0)
            for q in range(0 if "first" in ends else each):  # the next panel's sums
                own = s * each + q
                b.prefetch(self.sums, panel, j + 1, 0, own, 0)
            for memory, offset in ahead:
                b.prefetch(memory, offset + s * self.unit.k, to="l2")
            return [
                b.add(tile_ops.matrix_dot(c, left[i // 2], right[i % 2], unit=name))
                for i, c in enumerate(carried)
            ]

        if "first" in ends:
            begin = [
                b.add(tile_ops.matrix_zero(shape=(TILE, TILE), dtype=self.accumulator, unit=name))
                for _ in range(4)
            ]
        else:
            begin = [load(self.sums, panel, j, i, 0, 0, width=TILE) for i in range(4)]
        for i, c in enumerate(b.loop("s", 0, self.steps, 1, step, begin)):
            corner, kept = (i // 2 * TILE, i % 2 * TILE), (panel, j, i, 0, 0)
            memory, at = (self.strip, corner) if "last" in ends else (self.sums, kept)
            b.add(tile_ops.matrix_store(memory, c, *map(b.index, at), unit=name))


def rounded(size: int, unit: int) -> int:
    """The least multiple of a unit that is no smaller."""
    return -(-size // unit) * unit


def even(size: int, most: int, unit: int) -> int:
    """A block of nearly equal ones, each at most `most`, a multiple of the unit."""
    return rounded(-(-size // -(-size // max(unit, most // unit * unit))), unit)


class TileProducts(Family):
    """Products on a matrix unit with tiles of its own."""

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """Whether a value can be computed of the product on its way out."""
        return cut.follows(node, region, leaves)

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """Rows of groups that are mostly alone are no product."""
        return () if invariant() else breaks_of_groups(node, 1)

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """The first unit for the dtypes."""
        unit = unit_for(region, target)
        if unit is None:
            a, b = (x.dtype.name for x in region.anchor.inputs[:2])
            return f"no unit of {TILE} x {TILE} multiplies {a} by {b}"
        return [Offer(roofline(region, target), unit)]

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Bodies."""
        given = (region, region.inputs, region.known, target, name)
        return [MatrixLowering(offer.plan, *given).lower()]
