"""Choose how a wide matmul runs: a small space of Plans, ranked by a model of their time.

The model takes the largest of four times, none of which a Plan can beat: bytes from memory once
(no faster than what is asked for ahead of its use allows), bytes through the L2 cache as often
as tiles ask for them (a cluster asks once), bytes into one multiprocessor, and products; and adds
what is not overlapped: starting, the last tile's way out, exchanging parts of a split k. Its
constants were read off one H200 (bench/gemm.py --sweep).
Invariant: every Plan in the space is one that `wide_matmul` can build for these operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.dtype import bfloat16
from ..core.target import Target
from ..ir.symbol import high
from .matmul import Operands, WidePlan, tile_counts

SPAN_BYTES = 128  # of a swizzled row
SPARE_BYTES = 1024 + 512  # of shared memory: alignment and barriers
READ_SHARE = 1.04  # a pure read runs faster than the copy rate the Target tells
CACHE_RATE = 1.15e13  # bytes/s out of the L2 cache
INGRESS_RATE = 1.12e11  # bytes/s into one multiprocessor
MEMORY_SECONDS = 1.7e-6  # from asking for bytes of a busy memory to having them
START_SECONDS = 3.0e-6  # launch, first copies, last stores
DEPENDENT_GAIN = 1.2e-6  # what beginning before the launch before has ended saves
SPLIT_SECONDS, EXCHANGE_RATE = 1e-7, 1.2e10  # of exchanging parts, and bytes/s of it
CLUSTER_SECONDS = 6e-7  # programs of a cluster start and end together
NOT_SHARED = 1.015  # products of many tiles run so much longer where neighbours do not share
TURNED_SECONDS = 3e-7  # storing the turned result, where tokens are many
STREAM_RATE = 6.2e10  # bytes/s of memory that one program with 64 rows takes in
GATED = 0.985  # of the rate, where each product has a part of the tile's columns (not measured)
SUSTAINED = 0.84  # of the matrix units' peak, at the clock that power allows
STEP_SECONDS = 2.0e-8  # of a step of k that nothing hides
PIECE_SECONDS = 6e-11  # of an element of 64 rows of a finished tile on its way out
EFFICIENCY = {256: 0.98, 224: 0.98, 192: 0.97, 160: 0.95, 128: 0.94, 112: 0.92, 96: 0.9,
              64: 0.85}  # fmt: skip
CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 29, 6: 18, 8: 14}  # that run at once, one program a core


@dataclass(frozen=True)
class Choice:
    """A Plan, whether the operands are turned (weights as rows), and the time expected."""

    plan: WidePlan
    turned: bool
    seconds: float


def choose(x: Operands, target: Target) -> Choice:
    """The Plan with the least expected time."""
    return ranked(x, target)[0]


def ranked(x: Operands, target: Target) -> list[Choice]:
    """All Plans of the space, the most promising first; `x` is not turned."""
    found = [Choice(plan, turned, expected(x, plan, turned, target))
             for plan, turned in space(x, target)]  # fmt: skip
    return sorted(found, key=lambda c: c.seconds)


def turn(x: Operands) -> Operands:
    """The same product with b's columns as rows: (a b)^T = b^T a^T."""
    return Operands(x.n, x.m, x.k, x.dtype, x.result, x.b_along_k, x.a_along_k, x.batch, True,
                    x.weights, x.gated)  # fmt: skip


def space(x: Operands, target: Target) -> Iterator[tuple[WidePlan, bool]]:
    """Plans to consider."""
    found: list[Iterator[tuple[WidePlan, bool]]] = []
    if high(x.m) <= 128:
        found.append(few_tokens(x, target))
    if high(x.m) > 32 or not x.a_along_k:
        found.append(many_tokens(x, target))
    for plan, turned in itertools.chain(*found):
        if in_spans(turn(x) if turned else x, plan):
            yield plan, turned


def in_spans(x: Operands, plan: WidePlan) -> bool:
    """Whether rows of shared tiles are whole spans of their swizzle; tf32 goes along k only."""
    _, tn, tk = plan.tile
    rows = (tk if x.a_along_k else 64, tk if x.b_along_k else tn)
    along = x.dtype.size == 2 or (x.a_along_k and x.b_along_k)
    return along and all(row * x.dtype.size % SPAN_BYTES == 0 for row in rows)


def few_tokens(x: Operands, target: Target) -> Iterator[tuple[WidePlan, bool]]:
    """Weights as rows of 64 to 256, all tokens as columns."""
    m = high(x.m)
    size, cores = x.dtype.size, target.cores
    for rows, split in itertools.product((128, 256) if x.gated else (64, 128, 256), (1, 2, 3, 4)):
        wide = max(1, -(-m // (8 * split))) * 8 * split
        depth = 128 if rows + wide <= 160 else 64
        depth = depth * 2 // size
        tiles = tiles_of(x, WidePlan((rows, wide, depth)), True)
        if split > 1 and tiles > CLUSTERS[split]:
            continue
        staged = wide // split if split > 1 else wide if wide <= 64 else 64
        if wide % (staged * split):
            continue
        consumers = turn(x).span((rows, wide, depth))[0] // 64
        room = room_for(target, consumers * 2 * staged * 64 * x.result.size,
                        rows * wide * 4 if split > 1 else 0)  # fmt: skip
        stages = min(24, room // ((rows + wide) * depth * size))
        if stages >= 3:
            programs = tiles * split if split > 1 else min(cores, tiles)
            yield WidePlan((rows, wide, depth), stages, programs, 1, staged, split=split,
                           dependent=True, early=tiles <= cores), True  # fmt: skip


def many_tokens(x: Operands, target: Target) -> Iterator[tuple[WidePlan, bool]]:
    """Tiles of 128 rows of tokens."""
    m = high(x.m)
    size, tm = x.dtype.size, 128
    depth = 128 // size
    for tn, (cluster, across), split in itertools.product(
        EFFICIENCY, ((1, False), (2, False), (2, True)), (1, 2, 3, 4)
    ):
        tile = (tm, tn, depth)
        tiles = tiles_of(x, WidePlan(tile, cluster=cluster, across=across), False)
        columns = x.span(tile)[1]
        shared_b = cluster > 1 and not across
        if columns % (8 * split) or (cluster * split > 4) or (shared_b and m <= tm):
            continue
        if x.gated and columns % (16 if x.b_along_k else 128 // size):
            continue
        if split > 1 and tiles > CLUSTERS[cluster * split]:
            continue
        even = 64 if columns % 64 == 0 else 32 if columns % 32 == 0 else 16
        staged = columns // split if split > 1 else even
        staged = staged * 2 // x.result.size if split == 1 else staged
        room = room_for(target, tm // 64 * 2 * 64 * staged * x.result.size,
                        tm * tn * 4 if split > 1 else 0)  # fmt: skip
        stages = min(8, room // ((tm + tn) * depth * size))
        if stages < 3 or (cluster > 1 and (columns // cluster) % 8):
            continue
        limit = target.cores // (cluster * split)
        if cluster > 1 and m >= 2048:
            limit = limit // 8 * 8  # a few idle cores leave power to the others
        walkers = tiles if split > 1 else min(limit, -(-tiles // -(-tiles // limit)))
        programs = walkers * cluster * split
        yield WidePlan(tile, stages, programs, group_of(x), staged, cluster,
                       across, split, True), False  # fmt: skip


def tiles_of(x: Operands, plan: WidePlan, turned: bool) -> int:
    """Tiles, in what a cluster takes at once."""
    down, across = tile_counts(turn(x) if turned else x, plan)
    return high(x.batch) * high(down) * high(across)


def group_of(x: Operands) -> int:
    """Rows of tiles walked together: what they read again should still be in the L2 cache."""
    return 16 if 2048 <= high(x.m) <= 4096 and high(x.k) <= 8192 else 8


def room_for(target: Target, staged: int, partial: int) -> int:
    """Shared bytes left for the ring."""
    return target.memories["shared"].bytes - SPARE_BYTES - staged - partial


def matrix_rate(x: Operands, target: Target) -> float:
    """FLOP/s of one multiprocessor: float32 operands are rounded to tf32, at half the rate."""
    return SUSTAINED * target.peak_flops(bfloat16) / target.cores * 2 / x.dtype.size


def expected(x: Operands, plan: WidePlan, turned: bool, target: Target) -> float:
    """Seconds the model expects."""
    m, n, k, batch = (high(s) for s in (x.m, x.n, x.k, x.batch))
    size = x.dtype.size
    tm, tn, tk = plan.tile
    columns = (turn(x) if turned else x).span(plan.tile)[1]
    groups = tiles_of(x, plan, turned)
    walkers = plan.programs // (plan.cluster * plan.split)
    waves = -(-groups // walkers)
    steps = math.ceil(math.ceil(k / tk) / plan.split)
    rate = matrix_rate(x, target) * EFFICIENCY.get(tn, 0.85) * (GATED if x.gated else 1.0)
    product = 2 * tm * tn * tk / rate
    ingress = (tm + tn) * tk * size / INGRESS_RATE
    alone = NOT_SHARED if plan.cluster == 1 and m >= 2048 else 1.0
    tile = steps * (max(product, ingress) * alone + STEP_SECONDS)
    read = (tm / (plan.cluster if plan.across else 1)) + (tn / (1 if plan.across else plan.cluster))
    through = groups * plan.cluster * plan.split * steps * read * tk * size / CACHE_RATE
    read_once = n * len(x.weights) if x.gated else n
    once = batch * (m * k + read_once * k + m * n) * size
    ahead = plan.programs * plan.stages * (tm if turned else tn) * tk * size / MEMORY_SECONDS
    stream = plan.programs * STREAM_RATE * min(2, tm // 64)
    limit = min(ahead, stream) if m <= 256 else target.peak_bytes() * READ_SHARE
    memory = once / min(target.peak_bytes() * READ_SHARE, limit)
    out = 64 * columns * PIECE_SECONDS
    seconds = max(waves * (tile + out), through, memory)
    seconds += START_SECONDS - (DEPENDENT_GAIN if plan.dependent and plan.early else 0)
    if plan.split > 1:
        seconds += SPLIT_SECONDS + tm * tn * 4 / EXCHANGE_RATE
    seconds += TURNED_SECONDS if turned and m > 64 else 0
    return seconds + (CLUSTER_SECONDS if plan.cluster > 1 else 0)
