"""Choose how a matmul by threads runs: a small space of Plans, ranked by a model of their time.

A step of k takes a multiprocessor the longest of its products, of its shared memory (operands are
read once for each warp beside another, and written once) and a fixed time in which the warps meet;
bytes through the L2 cache and from memory bound the whole. What starts and ends a tile is hidden
where two programs share a multiprocessor, and half of it where programs are persistent. The
constants stand for an A100 and for an H200 that is held to a warp's matrix units. Invariant:
every Plan in the space is one that `thread_matmul` can build for these operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.symbol import high, low, modulo, multiply
from .shape import Choice, Operands
from .threads_matmul import ThreadPlan

SPARE_BYTES = 1024  # of shared memory of a program: alignment
OWN_BYTES = 1024  # of shared memory that the machine takes for each program
SUSTAINED = 0.92  # of a warp's matrix units, at the clock that power allows
WARP_SHARE = 0.62  # of the peak of a machine with wider matrix units, by those of a warp
CACHE_SHARE = 2.0  # bytes a second that are only read from the L2 cache, of those copied through it
SHARED_SHARE = 0.9  # of the bytes a clock of shared memory
STEP_SECONDS = 4e-8  # of a step in which warps meet, per program on a multiprocessor
TILE_SECONDS = 2.5e-6  # from a program's start to its first product, and after its last one
START_SECONDS = 3e-6
GROUP_ROWS = 2048  # taken together: what they read again should still be in the L2 cache
TILES = (  # tile of m and n, warps down and across
    (128, 256, 2, 4),
    (256, 128, 4, 2),
    (128, 128, 2, 2),
    (64, 256, 1, 4),
    (256, 64, 4, 1),
    (64, 128, 2, 2),
    (64, 64, 2, 2),
    (32, 128, 1, 4),
    (32, 64, 1, 4),
    (16, 128, 1, 4),
    (16, 64, 1, 4),
)


def applies(x: Operands) -> bool:
    """Whether rows of both operands and of the result end with a piece of 16 bytes."""
    each = 16 // x.dtype.size
    dense = (x.k if x.a_along_k else x.m, x.k if x.b_along_k else x.n)
    whole = all(modulo(size, each) == 0 for size in dense)
    return whole and not x.turned and modulo(multiply(x.n, x.result.size), 16) == 0


def ranked_threads(x: Operands, target: Target) -> list[Choice[ThreadPlan]]:
    """All Plans of the space, the most promising first; operands are never turned."""
    plans = dict.fromkeys(space(x, target))
    found = [Choice(plan, False, expected(x, plan, target)) for plan in plans]
    return sorted(found, key=lambda c: c.seconds)


def space(x: Operands, target: Target) -> Iterator[ThreadPlan]:
    """Plans to consider."""
    if not applies(x):
        return
    most = target.memories["shared"].bytes
    for tm, tn, down, across in TILES:
        small = tm * tn <= 128 * 128
        if (tm > 16 and tm >= 2 * high(x.m)) or (tn > 64 and tn >= 2 * high(x.n)):
            continue
        for tk in (32, 64, 128) if tm <= 32 else (32, 64):
            for resident in (1, 2) if small else (1,):
                room = (most + OWN_BYTES) // resident - OWN_BYTES - SPARE_BYTES
                plan = fitted(x, (tm, tn, tk), (down, across), room, 8192 // resident)
                plan = plan or fitted(x, (tm, tn, tk), (down, across), room, 4096)
                if plan is None:
                    continue
                yield plan
                tiles = math.prod(-(-high(a) // b) for a, b in ((x.m, tm), (x.n, tn)))
                steps = -(-low(x.k) // tk)
                if resident == 1 and not small and steps >= plan.stages - 1:
                    if tiles * high(x.batch) > target.cores:
                        yield replace(plan, programs=target.cores)


def fitted(
    x: Operands, tile: tuple[int, int, int], warps: tuple[int, int], room: int, staged: int
) -> ThreadPlan | None:
    """The Plan of a tile with as many stages as there is room for beside pieces of the result."""
    tm, tn, tk = tile
    wide = max(16 * warps[1], 64 * 2 // x.result.size)
    down = tm if tm * wide <= staged else max(16 * warps[0], staged // wide)
    if tn % wide or tm % down:
        return None
    left = room - 2 * down * wide * x.result.size
    stages = min(8 if tm > 32 else 12, left // ((tm + tn) * tk * x.dtype.size))
    if stages < 3:
        return None
    return ThreadPlan(tile, warps, stages, max(4, GROUP_ROWS // tm), (down, wide))


def shared_bytes(x: Operands, plan: ThreadPlan) -> int:
    """Bytes of shared memory that a program takes."""
    tm, tn, tk = plan.tile
    staged = 2 * math.prod(plan.staged) * x.result.size
    return plan.stages * (tm + tn) * tk * x.dtype.size + staged + SPARE_BYTES + OWN_BYTES


def residents(x: Operands, plan: ThreadPlan, target: Target) -> int:
    """Programs that a multiprocessor holds at a time."""
    threads = 32 * plan.warps[0] * plan.warps[1]
    registers = plan.tile[0] * plan.tile[1] // threads + 100
    file = target.limits.get("registers_per_core", 65536) // (threads * registers)
    shared = (target.memories["shared"].bytes + OWN_BYTES) // shared_bytes(x, plan)
    return max(1, min(shared, file))


def matrix_rate(target: Target) -> float:
    """FLOP/s of a warp's matrix units of one multiprocessor."""
    share = WARP_SHARE if target.asynchronous_units else 1.0  # else the peak is their own
    return SUSTAINED * share * target.peak_flops(bfloat16) / target.cores


def expected(x: Operands, plan: ThreadPlan, target: Target) -> float:
    """Seconds the model expects."""
    m, n, k, batch = (high(s) for s in (x.m, x.n, x.k, x.batch))
    (tm, tn, tk), (down, across), size = plan.tile, plan.warps, x.dtype.size
    tiles, steps = batch * -(-m // tm) * -(-n // tn), -(-k // tk)
    together = residents(x, plan, target)
    product = 2 * tm * tn * tk / matrix_rate(target)
    moved = (tm * across + tn * down + tm + tn) * tk * size
    shared = moved / (SHARED_SHARE * (target.memories["shared"].bytes_per_second or 1e12))
    step = max(product, shared) + STEP_SECONDS / together
    ends = TILE_SECONDS / (2 * together if plan.programs else together)
    whole, rest = divmod(tiles, target.cores * together)
    seconds = (whole * together + -(-rest // target.cores)) * (steps * step + ends)
    through = tiles * steps * (tm + tn) * tk * size
    cache = through / (CACHE_SHARE * (target.memories["l2"].bytes_per_second or 5e12))
    memory = batch * (m * k + n * k) * size + batch * m * n * x.result.size
    return max(seconds, cache, memory / target.peak_bytes()) + START_SECONDS
