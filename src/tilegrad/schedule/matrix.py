"""Lower `dot` to a matrix unit with tiles of its own (AMX): 2 x 2 tiles of 16 x 16 results.

b is packed so that neighbours along k (pairs of bf16, quads of int8) stand side by side, a is
copied tile by tile. Four accumulators go over the whole of k while enough columns of b fit into the
cache; a longer k is cut into blocks so short that a row panel of a stays in the nearest cache, and
sums wait in scratch for the next block. After the last they go to a strip from which the epilogue
takes rows. Invariant: rows past the end of m repeat the last row and are never stored; k past its
end is zero.
"""

from __future__ import annotations

from ..core.target import MatrixUnit
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, high, minimum, round_up
from ..tile import ops as tile_ops
from .dot import DotLowering, VectorProducts
from .family import Bodies, Offer, Offers, roofline
from .plan import Plan, even
from .problem import A, B
from .region import Region

SCRATCH = 1 << 20  # bytes of packed b
FEW_COLUMNS = 256  # of b at a time: fewer read a from afar too often
NEAR = 1 << 14  # bytes of a row panel of a block of k
SUMS, WIDE = 1 << 20, 512  # bytes of sums that wait for the next block of k, columns of them
CHUNK = 4  # panels packed side by side
TILE = 16


class MatrixLowering(DotLowering):
    """Lowers one dot Region to a matrix unit."""

    keeps_sums = False  # they stay in the program's own scratch

    def __init__(self, unit: MatrixUnit, region: Region) -> None:
        super().__init__(region)
        self.unit = unit
        self.accumulator = unit.accumulator
        self.input, self.step = unit.inputs[0], unit.k
        self.together = unit.k // TILE  # k values that stand side by side

    def choose(self) -> Plan:
        """Blocks: of k what stays near, of m and n as much as their sums may take."""
        batch, m, k, n = self.problem.most
        side, workers = 2 * TILE, self.target.cores
        block_k, parts = max(1, ceil_divide(k, self.unit.k)) * self.unit.k, 1

        def columns() -> int:
            return max(side, SCRATCH // (block_k * self.input.size) // side * side)

        fit = columns()
        if fit < min(n, FEW_COLUMNS) and m > side and isinstance(self.problem.sizes[2], int):
            parts = ceil_divide(side * block_k * self.input.size, NEAR)
            block_k = round_up(ceil_divide(k, parts), self.unit.k)
            fit = columns()
        block_n, block_m = min(fit, round_up(n, side)), m
        if parts > 1:
            block_n = even(n, min(fit, WIDE), side)
            block_m = even(m, SUMS // (block_n * self.accumulator.size), side)
        programs = batch * (1 if parts == 1 else ceil_divide(m, block_m) * ceil_divide(n, block_n))
        if programs < 2 * workers and workers > 1:
            if m >= 2 * n or n <= workers * side:
                block_m = min(block_m, round_up(ceil_divide(m, workers), side))
            else:
                count = round_up(ceil_divide(n, block_n), workers)
                block_n = min(block_n, round_up(ceil_divide(n, count), side))
        if self.problem.grouped:
            block_m = self.rows_of_group(side)
        return Plan(side, 2, TILE, block_m, block_n, block_k, self.unit.name)

    def allocate_scratch(self) -> None:
        """Scratch in the layouts the unit reads."""
        b, plan, steps = self.b, self.plan, self.plan.block_k // self.unit.k
        line, panels = TILE * self.together, plan.block_n // plan.nr
        self.packed_b = b.allocate((panels, steps, 2, TILE, line), self.input, "l2")
        self.packed_a = b.allocate((steps, 2, TILE, line), self.input, "l1")
        self.strip = b.allocate((plan.mr, plan.nr), self.accumulator, "l1")
        self.blocks = max(1, self.parts) if isinstance(self.parts, int) else 1
        if self.blocks > 1:
            rows = ceil_divide(plan.block_m, plan.mr)
            self.sums = b.allocate((rows, panels, 4, TILE, TILE), self.accumulator, "l2")

    def blocks_of_k(self) -> None:
        """All blocks of k: the first clears its sums, the last hands them on."""
        last = self.blocks - 1
        if last:
            self.part(0, "first")
        if last > 1:
            for block in self.b.each("k_block", 1, last):
                self.part(block, "")
        self.part(last, "last" if last else "first last")

    def part(self, block: Size, ends: str) -> None:
        """One block of k, in steps of the unit."""
        whole = ceil_divide(self.problem.sizes[2], self.unit.k)
        each = self.plan.block_k // self.unit.k
        first, self.ends = block * each, ends
        self.steps = minimum(whole - first, each)
        with self.e.scope():
            self.pack_b(first * self.unit.k, self.steps)
            self.panels(first * self.unit.k, self.steps)

    def pack_b(self, at: Size, count: Size) -> None:
        """packed[panel, step, half, k, :] = neighbours along k of 16 columns."""
        b, (_, _, k, n) = self.b, self.problem.sizes
        along_k, along_n = self.strides(B)
        if (
            along_k == 1 != along_n
            and k % self.unit.k == 0
            and n % self.plan.nr == 0
            and self.together == 2
        ):
            for j in b.each("panel", 0, self.live):
                for s in b.each("step", 0, count):
                    self.turned_step(j, s, at)
            return
        for c in b.each("chunk", 0, self.live, CHUNK):  # neighbouring lines of memory together
            top, bounds = minimum(c + CHUNK, self.live), (0, high(self.live) - 1)
            for s in b.each("step", 0, count):
                for g in b.each("group", 0, TILE):
                    with self.e.scope():
                        for j in b.each("panel", c, top, bounds=bounds):
                            self.interleave(j, s, g, at)

    def interleave(self, j: Size, s: Size, g: Size, at: Size) -> None:
        """Neighbours along k where b is read along n: rows are interleaved."""
        b, together, nr = self.b, self.together, self.plan.nr
        base = at + s * self.unit.k + g * together
        with self.columns(self.column + j * nr) as lane:
            wide = b.turned([self.packed(B, base + t, lane, nr) for t in range(together)])
        value = b.reshape(wide, (2, TILE * together))
        b.store(self.packed_b, value, (j, s, 0, g, 0), (2, 4))

    def turned_step(self, j: Size, s: Size, at: Size) -> None:
        """A step of k where b is contiguous along k: pairs are turned as one."""
        b, start = self.b, self.column + j * self.plan.nr
        for half in range(2):
            columns = [start + (half * TILE + r) for r in range(TILE)]
            k = at + s * self.unit.k
            rows = [self.line(B, k, column, self.unit.k) for column in columns]
            stacked = b.add(tile_ops.stack_rows(*rows))
            pairs = b.reshape(stacked, (TILE, TILE, 2))
            turned = b.add(tile_ops.transpose(pairs, order=(1, 0, 2)))
            value = b.reshape(turned, (TILE, 2 * TILE))
            b.store(self.packed_b, value, (j, s, half, 0, 0))

    def pack_a(self, at: Size, count: Size, rows: list[Size]) -> None:
        """packed[step, half, row, :] = a[row, at + step * k ...]."""
        b, unit, k = self.b, self.unit.k, self.problem.sizes[2]
        for s in b.each("step", 0, count):
            for r, m in enumerate(rows):
                value = self.line(A, at + s * unit, m, unit, k % unit == 0)
                b.store(self.packed_a, value, (s, r // TILE, r % TILE, 0))

    def panel(self, at: Size, count: Size, rows: list[Size], i: Size, j: Size) -> None:
        """One register tile."""
        start = self.column + j * self.plan.nr
        if "last" in self.ends:
            self.prefetch_rows(rows, start)
        with self.e.scope():
            number = (i - self.row) // self.plan.mr
            self.accumulate(number, j, self.rows_ahead(at, i, j))
            if "last" in self.ends:
                self.finish(at, i, start)

    def accumulate(self, panel: Size, j: Size, ahead: list[tuple[Node, Size]]) -> None:
        """Four accumulators over a block of k, from and to the sums; at last to the strip."""
        b, name = self.b, self.unit.name
        line, steps = TILE * self.together, int(self.packed_a.shape[0])
        each = 0 if "first" in self.ends else ceil_divide(4 * TILE, steps)

        def load(memory: Node, *index: Size, width: int = line) -> Node:
            return b.do(tile_ops.matrix_load, memory, *index, shape=(TILE, width), unit=name)

        if "first" in self.ends:
            zero = {"shape": (TILE, TILE), "dtype": self.accumulator, "unit": name}
            sums = [b.do(tile_ops.matrix_zero, **zero) for _ in range(4)]
        else:
            sums = [load(self.sums, panel, j, i, 0, 0, width=TILE) for i in range(4)]
        for s in b.each("s", 0, self.steps, 1, sums):
            left = [load(self.packed_a, s, t, 0, 0) for t in range(2)]
            right = [load(self.packed_b, j, s, t, 0, 0) for t in range(2)]
            for row in range(0, 2 * TILE):
                b.prefetch(self.packed_b, j, s + 2, row // TILE, row % TILE, 0)
            for q in range(each):  # the next panel's sums
                b.prefetch(self.sums, panel, j + 1, 0, s * each + q, 0)
            for memory, offset in ahead:
                b.prefetch(memory, offset + s * self.unit.k, to="l2")
            for i, c in enumerate(sums):
                operands = (c, left[i // 2], right[i % 2])
                sums[i] = b.do(tile_ops.matrix_dot, *operands, unit=name)
        for i, c in enumerate(sums):
            corner, kept = (i // 2 * TILE, i % 2 * TILE), (panel, j, i, 0, 0)
            memory, at = (self.strip, corner) if "last" in self.ends else (self.sums, kept)
            b.do(tile_ops.matrix_store, memory, c, *at, unit=name)


class TileProducts(VectorProducts):
    """Products on a matrix unit with tiles of its own."""

    def offers(self, region: Region) -> Offers:
        """The first unit for the dtypes."""
        a, b = (x.dtype for x in region.anchor.inputs[:2])
        for unit in region.target.matrix_units(a, b):
            if unit.m == unit.n == TILE:
                return [Offer(roofline(region), unit)]
        return f"no unit of {TILE} x {TILE} multiplies {a.name} by {b.name}"

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The Bodies."""
        return [MatrixLowering(offer.plan, region).lower()]
