"""Which Plan an attention takes: the tile, what shared memory is spent on, and the tiles' order.

A model of the time: matrix units and exponentials of a block of keys overlap as far as the Plan
lets them; a tile has a fixed cost beside its blocks; programs take tiles in turns, and the
slowest one ends the launch. Invariant: a chosen Plan is one that `why_not` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import high
from .forward import AttentionPlan, padded, why_not
from .shape import AttentionShape

FLOPS = 4096  # of the matrix units of one program in a cycle
EXPONENTIALS = 16  # in a cycle
ROW_CYCLES = 30  # of a tile's row, before and after its blocks
STEP_CYCLES = 240  # of a block, beside its products
SHORT = 1024  # queries below which a tile's first and last blocks are most of it
HIDDEN = {1: 0.4, 2: 0.6, 3: 0.8}  # of a step's smaller part, by consumers that overlap
NEAR = 32 << 20  # bytes of keys and values that stay in L2 while tiles are mixed


def tiles(x: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Tiles (queries, keys) worth a look, the most likely first."""
    wide = max(padded(x.width), padded(x.value_width))
    if high(x.queries) <= 64:
        return ((64, 128), (64, 64), (64, 32))
    if wide <= 64 and (x.softcap or {"bias", "mask", "slopes", "key"} & set(x.extras)):
        return ((128, 128), (128, 96), (128, 64), (64, 128))  # more than 160 registers
    if wide <= 64:
        return ((192, 128), (128, 192), (128, 128), (192, 96), (64, 128))
    if wide <= 128:
        cut = x.band != (None, None)
        return (
            ((128, 128), (128, 176), (128, 144), (64, 128))
            if cut
            else ((128, 176), (128, 128), (128, 160), (64, 128))
        )
    if wide <= 192:
        return ((128, 112), (128, 96), (128, 80), (128, 64))
    return ((128, 80), (128, 64), (128, 48))


def fitted(x: AttentionShape, plan: AttentionPlan) -> AttentionPlan | None:
    """The Plan with as much of shared memory put to use as there is; None if it does not fit."""
    value_width = padded(x.value_width)
    piece = next(p for p in (64, 32, 16) if value_width % p == 0)
    for query_stages, pieces in (
        (2, value_width // piece),
        (2, 1),
        (1, value_width // piece),
        (1, 1),
        (1, 0),
    ):
        staged = piece if pieces else 0
        found = replace(plan, query_stages=query_stages, staged=staged, together=max(1, pieces))
        if not why_not(x, found):
            return found
    return None


def sections(x: AttentionShape) -> list[int]:
    """How many pairs of batch and head to mix: those whose keys and values stay near, or all."""
    lanes = high(x.batch) * x.heads
    if x.band == (None, None):
        return [1]
    bytes_ = high(x.keys) * (x.width + x.value_width) * x.dtype.size
    near = max(1, min(lanes, NEAR // max(1, bytes_) * x.group))
    return sorted({*range(1, min(near, 8) + 1), *range(8, near + 1, 4), near, lanes})


def even(x: AttentionShape, plan: AttentionPlan) -> AttentionPlan:
    """The Plan with tiles mixed such that programs end together."""
    tried = [replace(plan, section=n) for n in sections(x)]
    return min(tried, key=lambda plan: cycles(x, plan))


def blocks_of(x: AttentionShape, plan: AttentionPlan) -> np.ndarray:
    """Blocks of keys of each tile of one pair of batch and head, by the tiles' order."""
    rows, keys = plan.tile
    first = np.arange(0, max(1, high(x.queries)), rows)
    stop = np.full_like(first, high(x.keys))
    start = np.zeros_like(first)
    lowest, highest = x.band
    if highest is not None:
        stop = np.clip(np.minimum(first + rows, high(x.queries)) + high(highest), 0, stop)
    if lowest is not None:
        start = np.maximum(first + high(lowest), 0) // keys
    found = np.maximum(-(-stop // keys) - start, 1)
    return found[::-1] if highest is not None else found


def cycles(x: AttentionShape, plan: AttentionPlan) -> float:
    """Cycles of a launch, as the model sees it."""
    rows, keys = plan.tile
    width = padded(x.width) + padded(x.value_width)
    products = 2 * rows * keys * width / FLOPS
    rest = rows * keys / EXPONENTIALS + STEP_CYCLES
    hidden = HIDDEN[rows // 64] - (0.0 if plan.overlap else 0.2)
    step = max(products, rest) + (1 - hidden) * min(products, rest)
    lanes, each = high(x.batch) * x.heads, blocks_of(x, plan)
    count = min(lanes, max(64, plan.section))  # a longer list is more of the same
    work = ROW_CYCLES * rows + step * each
    group = max(1, min(plan.section, count))
    whole = np.concatenate(
        [np.repeat(work, min(group, count - at)) for at in range(0, count, group)]
    )
    whole = np.tile(whole, 1 if count == lanes else -(-lanes // count))[: lanes * len(each)]
    programs = plan.programs
    filled = np.zeros(-(-len(whole) // programs) * programs)
    filled[: len(whole)] = whole
    grid = filled.reshape(-1, programs)
    grid[1::2] = grid[1::2, ::-1]
    return float(grid.sum(0).max())


def plans(x: AttentionShape, target: Target) -> Iterator[AttentionPlan]:
    """Plans for every tile that fits."""
    rings = (4, 3, 2) if max(padded(x.width), padded(x.value_width)) <= 64 else (2,)
    for tile in tiles(x):
        for stages in rings:
            made = fitted(x, AttentionPlan(tile, stages, target.cores))
            if made is not None:
                yield even(x, made)
                break


def choose(x: AttentionShape, target: Target) -> AttentionPlan:
    """The Plan the model likes best."""
    found = sorted(plans(x, target), key=lambda plan: cycles(x, plan))
    if not found:
        raise InternalError("kernels.attention.plan", f"no Plan for {x}: {why_not(x)}")
    return ordered(x, found[0])


def ordered(x: AttentionShape, plan: AttentionPlan) -> AttentionPlan:
    """The Plan with the order of its steps: what was quickest on an H200 for each kind of shape."""
    wide = max(padded(x.width), padded(x.value_width)) > 64
    cut, long = x.band[1] is not None, high(x.queries) >= SHORT
    late = plan.tile[0] > 64 and (wide or plan.tile[0] > 128) and not (cut and not (wide and long))
    tried = [
        replace(plan, narrow=cut, late=late, chained=cut and late),
        replace(plan, narrow=cut, late=late),
        replace(plan, narrow=cut),
        plan,
    ]
    return next(p for p in tried if not why_not(x, p))


def candidates(x: AttentionShape, target: Target) -> list[AttentionPlan]:
    """Plans to measure: every tile, with and without turns and overlap, other rings and orders."""
    found: dict[AttentionPlan, None] = {}
    for made in plans(x, target):
        both = replace(made, chained=True, narrow=True)
        tried = [
            ordered(x, made),
            made,
            replace(made, chained=True),
            replace(made, narrow=True),
            both,
            replace(both, turns=False),
            replace(made, late=True),
            replace(both, late=True),
            replace(made, late=True, narrow=True),
            replace(made, turns=False),
            replace(made, overlap=False),
            replace(made, overlap=False, turns=False),
            replace(made, query_stages=1),
            replace(made, stages=made.stages + 1),
            replace(made, section=max(1, made.section // 4)),
            replace(made, section=4 * made.section),
        ]
        for plan in tried:
            if not why_not(x, plan) and (not plan.narrow or x.band[1] is not None):
                found[plan] = None
    return list(found)
