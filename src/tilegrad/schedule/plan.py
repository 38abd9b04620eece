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
    """What the choice depends on: sizes, whether b is packed by turning squares, and whether
    unfinished sums need a place apart from the result."""

    batch: int
    m: int
    k: int
    n: int
    turned: bool = False
    apart: bool = False


def choose_plan(problem: Problem, target: Target, accumulator: DType) -> Plan:
    """The cheapest Plan."""
    return min(
        candidates(problem, target, accumulator),
        key=lambda plan: cost(plan, problem, target, accumulator),
    )


def block_of_k(k: int, depth: int) -> int:
    """How much of k is packed at a time: all of it, or parts of nearly equal size."""
    if 2 * k <= 3 * depth:
        return max(1, k)
    parts = ceil_divide(k, depth)
    part = ceil_divide(k, parts)
    return round_up(part, 16)


def tiles_of(target: Target, accumulator: DType) -> dict[tuple[int, int], float]:
    """Register tiles worth a look, with their relative costs."""
    if target.multiplies_by_lane:
        return LANE_TILES
    wide = WIDE_TILES if accumulator.is_float else WHOLE_TILES
    return wide if target.vector_registers >= 32 else NARROW_TILES


def candidates(problem: Problem, target: Target, accumulator: DType) -> Iterator[Plan]:
    """Plans worth a look: every register tile, a few ways to cut k, m and n."""
    lanes = target.lanes(accumulator)
    tiles = tiles_of(target, accumulator)
    workers = max(1, target.cores)
    m, n = max(1, problem.m), max(1, problem.n)
    depths = dict.fromkeys(block_of_k(problem.k, depth) for depth in DEPTHS)
    if invariant():
        depths = {max(1, min(problem.k, ONE_DEPTH)): None}
    for block_k, (mr, across) in itertools.product(depths, tiles):
        nr = across * lanes
        rows = balanced(m, mr)
        fit = max(nr, SCRATCH_B // (block_k * accumulator.size) // nr * nr)
        least = ceil_divide(n, fit)
        for count in {least, round_up(least, workers), 2 * workers * ceil_divide(least, workers)}:
            block_n = max(nr, ceil_divide(n, count * nr) * nr)
            for cuts in {1, workers, 2 * workers}:
                block_m = max(rows, ceil_divide(m, cuts * rows) * rows)
                yield Plan(
                    rows,
                    across,
                    lanes,
                    min(block_m, m) if cuts == 1 else block_m,
                    min(block_n, fit),
                    block_k,
                )


def balanced(m: int, most: int) -> int:
    """Rows of a register tile so that the last panel wastes little."""
    if m <= most:
        return max(1, m)
    options = range(max(1, most - 3), most + 1)
    return min(options, key=lambda r: (round_up(m, r) * (1 + 0.06 * (most - r)), -r))


def cost(plan: Plan, problem: Problem, target: Target, accumulator: DType) -> float:
    """Relative time of the slowest worker."""
    workers = max(1, target.cores)
    m, n = max(1, problem.m), max(1, problem.n)
    columns, rows = _parts(n, plan.block_n), _parts(m, plan.block_m)
    pack = PACK_B_TURNED if problem.turned else PACK_B
    if problem.k * n * accumulator.size > 4 * target.memories["l2"].bytes:
        pack += PACK_FAR
    tile = _tile(plan, target)
    of_size = {
        (r, c): _program(plan, problem, r, c, tile, pack) for r in set(rows) for c in set(columns)
    }
    works = [of_size[r, c] for r in rows for c in columns]
    if len(works) * problem.batch > 4096:
        return sum(works) * problem.batch / workers
    loads = [0.0] * workers
    for work in works * problem.batch:  # workers draw programs in order
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads)


def _parts(size: int, block: int) -> list[int]:
    return [min(block, size - start) for start in range(0, size, block)]


def _tile(plan: Plan, target: Target) -> float:
    """Relative cost of a multiply-add in a Plan's register tile."""
    tiles = LANE_TILES if target.multiplies_by_lane else WIDE_TILES | NARROW_TILES
    known = tiles.get((plan.mr, plan.across))
    if known is None:  # a shorter tile does less per load of b
        known = 1.0 + 0.25 * max(0.0, 1.0 - plan.mr * plan.across / 24)
    return known


def _program(
    plan: Plan, problem: Problem, rows: int, columns: int, tile: float, pack: float
) -> float:
    """Work of one program; `tile` is that of a multiply-add, `pack` of packing an element of b."""
    k = max(1, problem.k)
    panels, strips = ceil_divide(columns, plan.nr), ceil_divide(rows, plan.mr)
    multiply = panels * plan.nr * strips * plan.mr * k * tile
    pack_b = k * panels * plan.nr * pack
    pack_a = k * strips * plan.mr * PACK_A
    finish = panels * plan.nr * strips * plan.mr * FINISH
    kept = KEEP_APART if problem.apart else KEEP
    finish += panels * plan.nr * strips * plan.mr * (ceil_divide(k, plan.block_k) - 1) * kept
    return float(multiply + pack_b + pack_a + finish)
