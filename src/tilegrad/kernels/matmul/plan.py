"""Choose how a wide matmul runs: a small space of Plans, ranked by a model of their time.

The model takes the largest of four times, none of which a Plan can beat: bytes from memory once
(no faster than what is asked for ahead of its use allows), bytes through the L2 cache as often
as tiles ask for them (a cluster asks once), bytes into one multiprocessor, and products; and adds
what is not overlapped: starting, the last tile's way out, exchanging parts of a split k. For few
tokens, where the first of them are near one another, they hinder one another: it takes a norm of
them. Its constants were read off one H200 (bench/gemm.py --sweep).
Invariant: every Plan in the space is one that `WideMatmul` can build for these operands.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.symbol import ceil_divide, high, round_up
from .shape import Choice, Operands, WidePlan, exchanged, staged_rooms, tile_counts

SPAN_BYTES = 128  # of a swizzled row
BLOCK = 128  # columns of k, and rows of weights, that have one scale
BLOCK_WIDE = {1: 128, 2: 128, 3: 128, 4: 32}  # columns of all promoted sums, by consumers
BLOCK_SECONDS = 2.45e-7  # of adding a block's sums to a total, and of waiting for them
BLOCK_SHARE = 1.14  # of the products' time, where others multiply meanwhile
BLOCK_SCALES = 4.4e-9  # of a column of tokens: each thread of a consumer loads scales of a fourth
SPARE_BYTES = 1024 + 512  # of shared memory: alignment and barriers
READ_SHARE = 1.04  # a pure read runs faster than the copy rate the Target tells
CACHE_RATE = 1.15e13  # bytes/s out of the L2 cache
INGRESS_RATE = 1.12e11  # bytes/s into one multiprocessor
MEMORY_SECONDS = 1.7e-6  # from asking for bytes of a busy memory to having them
START_SECONDS = 3.0e-6  # launch, first copies, last stores
EARLY_GAIN = 1.2e-6  # what the next launch saves that may begin before this one has ended
SPLIT_SECONDS, EXCHANGE_RATE = 1e-7, 1.2e10  # of exchanging parts, and bytes/s of it
CLUSTER_SECONDS = 6e-7  # programs of a cluster start and end together
NOT_SHARED = 1.015  # products of many tiles run so much longer where neighbours do not share
TURNED_SECONDS = 3e-7  # storing the turned result, where tokens are many
STREAM_RATE = 6.2e10  # bytes/s of memory that one program with 64 rows takes in
GATED = 0.985  # of the rate, where each product has a part of the tile's columns (not measured)
NARROW = 128  # columns of a tile at least, where tokens are several tiles: half, of two not shared
SUSTAINED = 0.84  # of the matrix units' peak, at the clock that power allows
STEP_SECONDS = 2.0e-8  # of a step of k that nothing hides
PIECE_SECONDS = 6e-11  # of an element of 64 rows of a finished tile on its way out
EFFICIENCY = {256: 0.98, 224: 0.98, 192: 0.97, 160: 0.95, 128: 0.94, 112: 0.92, 96: 0.9, 64: 0.85}
# few tokens: times of memory, of the L2 cache and of what is asked for ahead, in one norm
NORM, FEW_TOKENS = 3.7, 128
FITTED = 192  # tokens that one tile may hold beside weights as wide as a core's share of them
FILLED = 1024  # tokens in a few tiles, beside weights so wide that all cores have as many tiles
FEW_SHARE, FEW_IDLE = 0.98, 0.15  # of the copy rate; what idle cores cost it, as a power
FEW_CACHE, FEW_INGRESS = 2.7e13, 1.3e11  # bytes/s out of the L2 cache, into one multiprocessor
FEW_MEMORY_SECONDS, FEW_START, FEW_LATE = 1.2e-6, 1.47e-6, 7e-7
FEW_PIECE, FEW_TOKEN, FEW_CLUSTER = 7e-11, 1e-8, 1e-6
FEW_BEYOND = 2.3e-7  # of a box of 64 rows of 128 bytes some of which lie beyond the end
FEW_EMPTY = 2e-6  # of a gated product of codes with tokens as rows, the share that no token has
FEW_EXCHANGE = 9e10  # bytes/s of exchanging parts of a split k
Plans = Iterator[WidePlan]
CLUSTERS = {1: 132, 2: 66, 3: 40, 4: 29, 6: 18, 8: 14}  # that run at once, one program a core


def choose(x: Operands, target: Target) -> Choice[WidePlan]:
    """The Plan with the least expected time."""
    return ranked(x, target)[0]


@functools.lru_cache(maxsize=1024)  # layers, and the passes over one, ask for the same products
def ranked(x: Operands, target: Target) -> tuple[Choice[WidePlan], ...]:
    """All Plans of the space, the most promising first; `x` is not turned."""
    found = [
        Choice(plan, turned, expected(x, plan, turned, target))
        for plan, turned in dict.fromkeys(space(x, target))
    ]
    return tuple(sorted(found, key=lambda c: c.seconds))


def transposed(x: Operands) -> Operands:
    """The same product with b's columns as rows: (a b)^T = b^T a^T."""
    return replace(x, m=x.n, n=x.m, a_along_k=x.b_along_k, b_along_k=x.a_along_k, turned=True)


def space(x: Operands, target: Target) -> Iterator[tuple[WidePlan, bool]]:
    """Plans to consider, and whether operands are turned; of the stages that a Plan asks for it
    has as many as fit."""
    found: list[tuple[Plans, bool]] = []
    if high(x.m) <= 128:
        found.append((few_tokens(x, target), True))
    if (16 if not x.gated else 1) < high(x.m) <= FILLED:  # fewer wait for memory alone
        found.append((fitted_widths(x, target), False))
    if high(x.m) > 32 or not x.a_along_k:
        found.append((many_tokens(x, target), False))
    for plan, turned in ((plan, turned) for plans, turned in found for plan in plans):
        own = transposed(x) if turned else x
        stages = most_stages(own, plan, target)
        shared = own.span(plan.tile)[1] // plan.cluster % 8 == 0
        if stages >= 3 and shared and in_spans(own, plan):
            if not x.scaled or in_blocks(own, plan):
                yield replace(plan, stages=stages), turned


def in_blocks(x: Operands, plan: WidePlan) -> bool:
    """Whether registers hold sums twice, and a consumer's weights have one scale a step."""
    rows, columns = x.span(plan.tile)
    whole = (x.turned or BLOCK % columns == 0) and plan.tile[2] == BLOCK
    return whole and x.products * columns <= BLOCK_WIDE[rows // 64]


def depth_of(x: Operands, rows: int) -> int:
    """Columns of k of a step of so many rows of operands: a span or two; a block with a scale."""
    return (2 if rows <= 160 and not x.scaled else 1) * SPAN_BYTES // x.dtype.size


def width_step(x: Operands) -> int:
    """Columns that products come in: of integers above 32 in sixteens."""
    return 8 if x.dtype.is_float else 16


def in_spans(x: Operands, plan: WidePlan) -> bool:
    """Whether rows of shared tiles are whole spans of their swizzle; tf32 goes along k only. And
    whether there are products as wide as the sums are."""
    _, tn, tk = plan.tile
    if x.span(plan.tile)[1] % width_step(x):
        return False
    rows = (tk if x.a_along_k else 64, tk if x.b_along_k else tn)
    along = x.dtype.size == 2 or (x.a_along_k and x.b_along_k)
    return along and all(row * x.dtype.size % SPAN_BYTES == 0 for row in rows)


def few_tokens(x: Operands, target: Target) -> Plans:
    """Weights as rows of 64 to 256, all tokens as columns."""
    m = high(x.m)
    cores = target.cores
    for rows, split in itertools.product((128, 256) if x.gated else (64, 128, 256), (1, 2, 3, 4)):
        wide = round_up(m, width_step(x) * split)
        depth = depth_of(x, rows + wide)
        tiles = tiles_of(x, WidePlan((rows, wide, depth)), True)
        if split > 1 and tiles > CLUSTERS[split]:
            continue
        staged = wide // split if split > 1 else wide if wide <= 64 else 64
        if wide % (staged * split):
            continue
        programs = tiles * split if split > 1 else min(cores, tiles)
        tile, early = (rows, wide, depth), tiles <= cores
        yield WidePlan(tile, 24, programs, 1, staged, split=split, early=early)


def fitted_widths(x: Operands, target: Target) -> Plans:
    """Tokens as rows, and tiles of the weights so wide that each core has as many as others: one,
    or where that is too wide or tokens are many a few."""
    m = high(x.m)
    heights = [64 * ceil_divide(m, 64)] if m <= FITTED else []
    for tm in dict.fromkeys([*heights, *([128] if m > FEW_TOKENS else [])]):
        columns = high(x.batch) * high(x.n) * x.products * ceil_divide(m, tm)
        fewest = ceil_divide(columns, 256 * target.cores)
        most = fewest + 1 if m > FEW_TOKENS else 3
        if fewest == 1 or m <= 32:  # fewer rows are mostly beyond a box
            most = 1
        shares = [(split, 1) for split in (1, 2, 3, 4)]
        for split, rounds in (*shares, *((1, r) for r in range(2, most + 1))):
            for cluster in (1, 2) if tm < m and split == 1 else (1,):
                yield from fitted_width(x, target, tm, split, rounds, cluster)


def fitted_width(
    x: Operands, target: Target, tm: int, split: int, rounds: int, cluster: int
) -> Plans:
    """The narrowest tile of `tm` rows of which no core has more than `rounds`."""
    each = max(width_step(x), 16 // x.result.size)  # rows of a copy are 16 bytes or more
    unit = each * split * x.products
    limit = CLUSTERS[split] if split > 1 else rounds * (target.cores // cluster)
    least = high(x.batch) * high(x.n) // max(1, limit * cluster) // unit * unit
    if tm < high(x.m):
        narrow = NARROW if cluster > 1 or high(x.m) > 2 * tm else NARROW // 2
        least = max(least, round_up(narrow, unit))
    for tn in range(max(unit, least), 257, unit) if limit else ():
        tiles = tiles_of(x, WidePlan((tm, tn, 64), cluster=cluster), False)
        if tiles > limit:
            continue
        depth = depth_of(x, tm + tn)
        columns = x.span((tm, tn, depth))[1] // split
        staged = columns if columns % 32 or split > 1 else 32 if columns % 64 else 64
        staged = max(32, staged_of(x, staged, columns)) if columns % 32 == 0 else staged
        programs = ceil_divide(tiles, rounds) * split * cluster
        tile, group = (tm, tn, depth), group_of(x)
        yield WidePlan(tile, 24, programs, group, staged, cluster, split=split)
        return


def many_tokens(x: Operands, target: Target) -> Plans:
    """Tiles of 128 rows of tokens."""
    m = high(x.m)
    size = x.dtype.size
    depth = 128 // size
    for tm, tn, (cluster, across), split in itertools.product(
        (128, 192) if x.scaled else (128,),
        EFFICIENCY,
        ((1, False), (2, False), (2, True)),
        (1, 2, 3, 4),
    ):
        if across and tm // 64 % cluster:
            continue
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
        staged = columns // split
        if split == 1:
            even = 64 if columns % 64 == 0 else 32 if columns % 32 == 0 else 16
            staged = staged_of(x, even, columns)
        limit = target.cores // (cluster * split)
        if limit == 0:
            continue
        if cluster > 1 and m >= 2048 and limit >= 8:
            limit = limit // 8 * 8  # a few idle cores leave power to the others
        clusters = tiles if split > 1 else min(limit, ceil_divide(tiles, ceil_divide(tiles, limit)))
        at_once = x.gated and split == 1 and columns * x.result.size <= 256  # as two of 64 take
        programs, together = clusters * cluster * split, columns // staged if at_once else 1
        order = group_of(x), staged, cluster, across, split
        yield WidePlan(tile, 8, programs, *order, together=together)


def staged_of(x: Operands, staged: int, columns: int) -> int:
    """Columns of a piece as wide as so many of 16 bits, where such pieces divide the columns."""
    wide = staged * 2 // x.result.size
    return staged if columns % wide else wide


def tiles_of(x: Operands, plan: WidePlan, turned: bool) -> int:
    """Tiles, in what a cluster takes at once."""
    down, across = tile_counts(transposed(x) if turned else x, plan)
    return high(x.batch) * high(down) * high(across)


def group_of(x: Operands) -> int:
    """Rows of tiles taken together: what they read again should still be in the L2 cache."""
    return 16 if 2048 <= high(x.m) <= 4096 and high(x.k) <= 8192 else 8


def shared_bytes(x: Operands, plan: WidePlan) -> int:
    """Shared memory of a program: the ring, staged pieces, parts of a split k, barriers."""
    tm, tn, tk = plan.tile
    ring = plan.stages * (tm + tn) * tk * x.dtype.size
    staged = x.span(plan.tile)[0] * staged_rooms(x, plan) * plan.staged * x.result.size
    return ring + staged + exchanged(plan) + SPARE_BYTES


def most_stages(x: Operands, plan: WidePlan, target: Target, others: int = 0, step: int = 0) -> int:
    """How many of a Plan's stages, of `step` bytes (0: those of a and b), fit shared memory, with
    so many bytes left to others."""
    tm, tn, tk = plan.tile
    room = target.memories["shared"].bytes - others - shared_bytes(x, replace(plan, stages=0))
    return min(plan.stages, room // (step or (tm + tn) * tk * x.dtype.size))


def matrix_rate(x: Operands, target: Target) -> float:
    """FLOP/s of one multiprocessor: float32 operands are rounded to tf32, at half the rate."""
    return SUSTAINED * target.peak_flops(bfloat16) / target.cores * 2 / x.dtype.size


def efficiency(wide: int) -> float:
    """The share of the rate that products of so many columns reach."""
    widths, shares = zip(*sorted(EFFICIENCY.items()))
    return float(np.interp(wide, widths, shares))


def expected(x: Operands, plan: WidePlan, turned: bool, target: Target) -> float:
    """Seconds the model expects."""
    few = high(x.m) <= FEW_TOKENS
    return (expected_few if few else expected_many)(x, plan, turned, target)


def promoted(x: Operands, plan: WidePlan, turned: bool, seconds: float) -> float:
    """Seconds of a step's products, where each consumer adds its sums before it goes on."""
    rows, columns = (transposed(x) if turned else x).span(plan.tile)
    loads = rows / 64 * columns * BLOCK_SCALES if turned else 0.0
    own = 64 * seconds / rows + BLOCK_SECONDS
    return max(BLOCK_SHARE * seconds, own, loads) if x.scaled else seconds


def work_of(x: Operands, plan: WidePlan, turned: bool) -> tuple[int, int, int, int]:
    """Tiles, those of a program, steps of a tile, and bytes of operands and results."""
    m, n, k, batch = x.most
    tiles = tiles_of(x, plan, turned)
    rounds = ceil_divide(tiles, plan.programs // (plan.cluster * plan.split))
    steps = ceil_divide(ceil_divide(k, plan.tile[2]), plan.split)
    once = batch * ((m + n * x.products) * k * x.dtype.size + m * n * x.result.size)
    return tiles, rounds, steps, once


def expected_few(x: Operands, plan: WidePlan, turned: bool, target: Target) -> float:
    """Where tokens are few, all wait for the weights."""
    m, size, (tm, tn, tk) = high(x.m), x.dtype.size, plan.tile
    own, together = transposed(x) if turned else x, plan.cluster * plan.split
    tiles, rounds, steps, once = work_of(x, plan, turned)
    weights, tokens = (tm, min(tn, m)) if turned else (tn, min(tm, m))
    into = rounds * steps * (weights + tokens) * tk * size  # one multiprocessor
    busy = min(tiles / rounds * together, target.cores)
    memory = once / (FEW_SHARE * target.peak_bytes()) * (target.cores / busy) ** FEW_IDLE
    through = tiles * together * steps * (weights + tokens) * tk * size
    ahead = once / (plan.programs * plan.stages * weights * tk * size) * FEW_MEMORY_SECONDS
    rate = matrix_rate(x, target) * EFFICIENCY.get(tn, 0.85) * (GATED if x.gated else 1.0)
    product = rounds * steps * promoted(x, plan, turned, 2 * tm * tn * tk / rate)
    seconds = (memory**NORM + (through / FEW_CACHE) ** NORM + ahead**NORM) ** (1 / NORM)
    fits = m % 64 == 0 or (isinstance(x.m, int) and m < tm and plan.cluster == 1)
    boxes = rounds * steps * tk * size / 128
    beyond = 0 if turned or fits else boxes * FEW_BEYOND
    seconds = max(seconds, through / CACHE_RATE, into / FEW_INGRESS, product, beyond) + FEW_START
    seconds += rounds * 64 * own.span(plan.tile)[1] * FEW_PIECE + m * FEW_TOKEN
    seconds += 0 if plan.early else FEW_LATE
    seconds += FEW_EMPTY * (1 - tokens / tm) if x.gated and size == 1 and not turned else 0
    seconds += tm * tn * 4 / FEW_EXCHANGE if plan.split > 1 else 0
    return seconds + (FEW_CLUSTER if plan.cluster > 1 else 0)


def expected_many(x: Operands, plan: WidePlan, turned: bool, target: Target) -> float:
    """Where tokens are many, the longest of the times counts."""
    m, size, (tm, tn, tk) = high(x.m), x.dtype.size, plan.tile
    columns = (transposed(x) if turned else x).span(plan.tile)[1]
    tiles, rounds, steps, once = work_of(x, plan, turned)
    rate = matrix_rate(x, target) * efficiency(tn) * (GATED if x.gated else 1.0)
    product = promoted(x, plan, turned, 2 * tm * tn * tk / rate)
    ingress = (tm + tn) * tk * size / INGRESS_RATE
    alone = NOT_SHARED if plan.cluster == 1 and m >= 2048 else 1.0
    tile = steps * (max(product, ingress) * alone + STEP_SECONDS)
    read = (tm / (plan.cluster if plan.across else 1)) + (tn / (1 if plan.across else plan.cluster))
    through = tiles * plan.cluster * plan.split * steps * read * tk * size / CACHE_RATE
    ahead = plan.programs * plan.stages * (tm if turned else tn) * tk * size / MEMORY_SECONDS
    stream = plan.programs * STREAM_RATE * min(2, tm // 64)
    limit = min(ahead, stream) if m <= 256 else target.peak_bytes() * READ_SHARE
    memory = once / min(target.peak_bytes() * READ_SHARE, limit)
    out = 64 * columns * PIECE_SECONDS
    seconds = max(rounds * (tile + out), through, memory)
    seconds += START_SECONDS - (EARLY_GAIN if plan.early else 0)
    if plan.split > 1:
        seconds += SPLIT_SECONDS + tm * tn * 4 / EXCHANGE_RATE
    seconds += TURNED_SECONDS if turned and m > 64 else 0
    return seconds + (CLUSTER_SECONDS if plan.cluster > 1 else 0)
