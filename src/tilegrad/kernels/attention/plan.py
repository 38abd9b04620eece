"""Which Plan an attention takes: the tile, what shared memory is spent on, and the tiles' order.

A model of the time: matrix units and exponentials of a block of keys overlap as far as consumers
let them; a tile has a fixed cost beside its blocks; programs take tiles in turns, and the
slowest one ends the launch. Invariant: a chosen Plan is one that `why_not` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import high
from .shape import AttentionShape, first_wrong, unit_why_not

FLOPS = 4096  # of the matrix units of one program in a cycle
EXPONENTIALS = 16  # in a cycle
ROW_CYCLES = 30  # of a tile's row, before and after its blocks
STEP_CYCLES = 240  # of a block, beside its products
SHORT = 1024  # queries below which a tile's first and last blocks are most of it
HIDDEN = {1: 0.4, 2: 0.6, 3: 0.8}  # of a step's smaller part, by consumers that overlap
NEAR = 32 << 20  # bytes of keys and values that stay in L2 while tiles are mixed


SHARED_BYTES = 232_448 - 1_024  # of a program, less what aligns it
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}  # of producer and consumers, by consumers


@dataclass(frozen=True)
class AttentionPlan:
    """Choices of `wide_attention`: the tile (queries, keys), rings, and the order of all."""

    tile: tuple[int, int] = (128, 128)
    stages: int = 2  # of keys and of values
    programs: int = 132
    query_stages: int = 1
    staged: int = 64  # columns of a piece of the result on its way out; 0: where queries lay
    together: int = 1  # pieces that are staged at once
    late: bool = False  # sums shrink after the next scores are issued, not before
    chained: bool = False  # a tile's first scores are multiplied beside the last values before
    narrow: bool = False  # of a tile's last block only the keys that a consumer's queries see
    section: int = 1  # (batch, head) pairs whose tiles are mixed, longest first
    dependent: bool = False  # waits for the launch before it by itself
    early: bool = True  # lets the next launch begin at its own start, not at its end


def padded(width: int) -> int:
    """A width as it lies in shared memory: whole steps of the matrix units."""
    return -(-width // 16) * 16


def shared_bytes(x: AttentionShape, plan: AttentionPlan) -> int:
    """Bytes of shared memory that a Plan takes."""
    rows, keys = plan.tile
    width, value_width = padded(x.width), padded(x.value_width)
    elements = plan.query_stages * rows * width + plan.stages * keys * (width + value_width)
    elements += rows * plan.together * plan.staged
    return elements * x.dtype.size + 16 * (plan.query_stages + 2 * plan.stages)


def why_not(x: AttentionShape, plan: AttentionPlan | None = None) -> str:
    """Why the kernel does not take a case, or not with a Plan; '' where it does."""
    packed = "query_starts" in x.extras
    if packed and {"bias", "mask"} & set(x.extras):
        return unit_why_not(x) or "sequences one after another, with a bias or mask"
    if plan is None:
        return unit_why_not(x)
    (rows, keys), value_width = plan.tile, padded(x.value_width)
    apart = not plan.staged and value_width != padded(x.width)
    rest = value_width % (plan.staged * plan.together) if plan.staged else 0
    return unit_why_not(x) or first_wrong(
        (rows % 64 != 0 or rows // 64 not in REGISTERS, "1 to 3 consumers have 64 rows each"),
        (keys % 16 != 0 or not 16 <= keys <= 256, "a block has up to 256 keys, in sixteens"),
        (plan.stages < 2, "a ring has two stages or more"),
        (rest, "staged pieces divide the columns"),
        (apart, "results are wider or narrower than the place of queries"),
        (plan.chained and plan.query_stages < 2, "a chain needs queries of two tiles"),
        (plan.chained and packed, "a chain has no empty tiles"),
        (not plan.staged and packed, "an end within a tile is staged"),
        (shared_bytes(x, plan) > SHARED_BYTES, "it does not fit shared memory"),
    )


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
        if x.band != (None, None):
            return ((128, 128), (128, 176), (128, 144), (64, 128))
        return ((128, 176), (128, 128), (128, 160), (64, 128))
    if wide <= 192:
        return ((128, 112), (128, 96), (128, 80), (128, 64))
    return ((128, 80), (128, 64), (128, 48))


def fitted(x: AttentionShape, plan: AttentionPlan) -> AttentionPlan | None:
    """The Plan with as much of shared memory put to use as there is; None if it does not fit."""
    value_width = padded(x.value_width)
    piece = next(p for p in (64, 32, 16) if value_width % p == 0)
    every = value_width // piece
    for query_stages, pieces in ((2, every), (2, 1), (1, every), (1, 1), (1, 0)):
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
    step = max(products, rest) + (1 - HIDDEN[rows // 64]) * min(products, rest)
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
            if made is not None:  # tiles are mixed such that programs end together
                mixed = [replace(made, section=n) for n in sections(x)]
                yield min(mixed, key=lambda plan: cycles(x, plan))
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
