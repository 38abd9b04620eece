"""Plans of matmul Kernels, ranked by a cost model.

A Plan fixes the register tile and the blocks a program computes. The model counts what a
worker does: multiply-adds of whole register tiles (waste at the edges included), elements
packed, and how evenly the programs fall on the workers. Invariant: a Plan depends on sizes,
dtypes, the Target and the level of determinism alone; at the level `invariant` blocks of k, which
set the order of a sum, depend on nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.config import invariant
from ..core.dtype import DType
from ..core.target import Target
from ..ir.symbol import ceil_divide, round_up

SCRATCH_B = 3 << 18  # bytes of packed b a program may hold: leaves room in a shared 2 MiB L2
DEPTHS = (512, 384, 256)  # blocks of k worth a look: shallow ones leave room for more columns
ONE_DEPTH = 512  # the block of k where a sum has one order, whatever the other sizes

# Relative cost of a multiply-add in a register tile of (rows, vectors across), measured.
WIDE_TILES = {(9, 3): 1.0, (6, 4): 1.02, (14, 2): 1.05, (24, 1): 1.25}
LANE_TILES = {(8, 2): 1.0, (6, 4): 1.15, (4, 4): 1.3}
WHOLE_TILES = {(6, 4): 1.0, (24, 1): 1.25}  # of integers, whose row factors take registers
NARROW_TILES = {(4, 3): 1.0, (6, 2): 1.0, (12, 1): 1.25}
VECTOR_TILES = WIDE_TILES | NARROW_TILES
# Seconds, relative to one multiply-add of one lane in a full register tile.
PACK_B, PACK_B_TURNED, PACK_A, FINISH = 16.0, 24.0, 7.0, 12.0
PACK_FAR = 48.0  # more for b that no cache of a core has any of: several times its L2
KEEP, KEEP_APART = 8.0, 30.0  # an unfinished sum, kept in the result or apart, and taken up again


@dataclass(frozen=True)
class Plan:
    """Tunable choices of a matmul Kernel: the register tile is mr x (across * lanes)."""

    mr: int
    across: int
    lanes: int
    block_m: int
    block_n: int
    block_k: int
    unit: str = ""  # a matrix unit of the Target, or vectors
    unroll: int = 4

    @property
    def nr(self) -> int:
        """Columns of the register tile."""
        return self.across * self.lanes


@dataclass(frozen=True)
class Problem:
    """What the choice depends on: sizes, the Target, the dtype of sums, whether b is packed by
    turning squares, and whether unfinished sums need a place apart from the result."""

    batch: int
    m: int
    k: int
    n: int
    target: Target
    accumulator: DType
    turned: bool = False
    apart: bool = False

    def best(self) -> Plan:
        """The cheapest Plan."""
        return min(self.candidates(), key=self.cost)

    def candidates(self) -> Iterator[Plan]:
        """Plans worth a look: every register tile, a few ways to cut k, m and n."""
        lanes, workers = self.target.lanes(self.accumulator), self.target.cores
        m, n = self.m, self.n
        depths = dict.fromkeys(block_of_k(self.k, depth) for depth in DEPTHS)
        if invariant():
            depths = {max(1, min(self.k, ONE_DEPTH)): None}
        for block_k, (mr, across) in itertools.product(depths, self.tiles()):
            nr = across * lanes
            rows = balanced(m, mr)
            fit = max(nr, SCRATCH_B // (block_k * self.accumulator.size) // nr * nr)
            least = ceil_divide(n, fit)
            counts = {least, round_up(least, workers), 2 * workers * ceil_divide(least, workers)}
            for count in counts:
                block_n = min(fit, ceil_divide(n, count * nr) * nr)
                for cuts in {1, workers, 2 * workers}:
                    block_m = ceil_divide(m, cuts * rows) * rows
                    block_m = min(block_m, m) if cuts == 1 else block_m
                    yield Plan(rows, across, lanes, block_m, block_n, block_k)

    def tiles(self) -> dict[tuple[int, int], float]:
        """Register tiles worth a look, with their relative costs."""
        if self.target.multiplies_by_lane:
            return LANE_TILES
        wide = WIDE_TILES if self.accumulator.is_float else WHOLE_TILES
        return wide if self.target.vector_registers >= 32 else NARROW_TILES

    def cost(self, plan: Plan) -> float:
        """Relative time of the slowest worker."""
        columns = _parts(self.n, plan.block_n)
        rows = _parts(self.m, plan.block_m)
        of_size = {(r, c): self.program(plan, r, c) for r in set(rows) for c in set(columns)}
        works = [of_size[r, c] for r in rows for c in columns]
        if len(works) * self.batch > 4096:
            return sum(works) * self.batch / self.target.cores
        loads = [0.0] * self.target.cores  # workers
        for work in works * self.batch:  # workers draw programs in order
            heapq.heapreplace(loads, loads[0] + work)
        return max(loads)

    def program(self, plan: Plan, rows: int, columns: int) -> float:
        """Work of one program."""
        k = max(1, self.k)
        width = round_up(columns, plan.nr)
        strips = ceil_divide(rows, plan.mr)
        results = width * strips * plan.mr
        pack = PACK_B_TURNED if self.turned else PACK_B
        if self.k * self.n * self.accumulator.size > 4 * self.target.memories["l2"].bytes:
            pack += PACK_FAR
        multiply = results * k * self.tile(plan)
        pack_a, pack_b = k * strips * plan.mr * PACK_A, k * width * pack
        kept = KEEP_APART if self.apart else KEEP
        finish = results * (FINISH + (ceil_divide(k, plan.block_k) - 1) * kept)
        return float(multiply + pack_b + pack_a + finish)

    def tile(self, plan: Plan) -> float:
        """Relative cost of a multiply-add in a Plan's register tile."""
        tiles = LANE_TILES if self.target.multiplies_by_lane else VECTOR_TILES
        short = max(0.0, 1.0 - plan.mr * plan.across / 24)  # does less per load of b
        return tiles.get((plan.mr, plan.across), 1.0 + 0.25 * short)


def block_of_k(k: int, depth: int) -> int:
    """How much of k is packed at a time: all of it, or parts of nearly equal size."""
    return max(1, k) if 2 * k <= 3 * depth else even(k, depth, 16)


def even(size: int, most: int, unit: int) -> int:
    """A block of nearly equal ones, each at most `most`, a multiple of the unit."""
    return round_up(ceil_divide(size, ceil_divide(size, max(unit, most // unit * unit))), unit)


def balanced(m: int, most: int) -> int:
    """Rows of a register tile so that the last panel wastes little."""
    if m <= most:
        return m
    options = range(most - 3, most + 1)
    return min(options, key=lambda r: (round_up(m, r) * (1 + 0.06 * (most - r)), -r))


def _parts(size: int, block: int) -> list[int]:
    return [min(block, size - start) for start in range(0, size, block)]
