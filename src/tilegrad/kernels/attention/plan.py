"""Which Plan an attention takes: the tile, what shared memory is spent on, and the tiles' order.

A model of the time: matrix units and exponentials of a block of keys overlap as far as consumers
let them; a tile has a fixed cost beside its blocks; programs take tiles in turns, and the
slowest one ends the launch.

A program of the backward keeps ROWS tokens and loops over blocks of the other side; accumulators,
scores and operands of two consumers of 64 tokens each share 240 registers a thread, which bounds
the blocks. Invariant: a chosen Plan is one that `why_not` takes; `backward_why_not` is '' exactly
where `attention_backward` gives Bodies that are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...core.target import Target
from ...ir.symbol import high, round_up
from .shape import AttentionShape, first_wrong, refuse, unit_why_not

FLOPS = 4096  # of the matrix units of one program in a cycle
EXPONENTIALS = 16  # in a cycle
ROW_CYCLES = 30  # of a tile's row, before and after its blocks
STEP_CYCLES = 240  # of a block, beside its products
SHORT = 1024  # queries below which a tile's first and last blocks are most of it
HIDDEN = {1: 0.4, 2: 0.6, 3: 0.8}  # of a step's smaller part, by consumers that overlap
NEAR = 32 << 20  # bytes of keys and values that stay in L2 while tiles are mixed
COSTLY = {"bias", "mask", "slopes", "key"}  # extras that need registers of their own

SHARED_BYTES = 232_448 - 1_024  # of a program, less what aligns it
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}  # of producer and consumers, by consumers


@dataclass(frozen=True)
class AttentionPlan:
    """Choices of `wide_attention`: the tile (queries, keys), rings, and the order of all."""

    tile: tuple[int, int] = (128, 128)
    stages: int = 2  # of keys and of values
    programs: int = 132
    query_stages: int = 1
    staged: int = 64  # columns of the result on their way out at once; 0: all, where queries lay
    late: bool = False  # sums shrink after the next scores are issued, not before
    chained: bool = False  # a tile's first scores are multiplied beside the last values before
    narrow: bool = False  # of a tile's last block only the keys that a consumer's queries see
    section: int = 1  # (batch, head) pairs whose tiles are mixed, longest first
    early: bool = True  # lets the next launch begin at its own start, not at its end


def padded(width: int) -> int:
    """A width as it lies in shared memory: whole steps of the matrix units."""
    return round_up(width, 16)


def shared_bytes(x: AttentionShape, plan: AttentionPlan) -> int:
    """Bytes of shared memory that a Plan takes."""
    rows, keys = plan.tile
    width, value_width = padded(x.width), padded(x.value_width)
    elements = plan.query_stages * rows * width + plan.stages * keys * (width + value_width)
    elements += rows * plan.staged
    return elements * x.dtype.size + 16 * (plan.query_stages + 2 * plan.stages)


def why_not(x: AttentionShape, plan: AttentionPlan | None = None) -> str:
    """Why the kernel does not take a case, or not with a Plan; '' where it does."""
    mixed = x.packed and {"bias", "mask"} & set(x.extras)
    why = unit_why_not(x) or ("sequences one after another, with a bias or mask" if mixed else "")
    if why or plan is None:
        return why
    (rows, keys), value_width = plan.tile, padded(x.value_width)
    apart = not plan.staged and value_width != padded(x.width)
    rest = plan.staged and value_width % plan.staged
    return first_wrong(
        (rows % 64 != 0 or rows // 64 not in REGISTERS, "1 to 3 consumers have 64 rows each"),
        (keys % 16 != 0 or not 16 <= keys <= 256, "a block has up to 256 keys, in sixteens"),
        (plan.stages < 2, "a ring has two stages or more"),
        (rest, "staged pieces divide the columns"),
        (apart, "results are wider or narrower than the place of queries"),
        (plan.chained and plan.query_stages < 2, "a chain needs queries of two tiles"),
        (plan.chained and x.packed, "a chain has no empty tiles"),
        (not plan.staged and x.packed, "an end within a tile is staged"),
        (shared_bytes(x, plan) > SHARED_BYTES, "it does not fit shared memory"),
    )


def tiles(x: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Tiles (queries, keys) worth a look, the most likely first."""
    wide = max(padded(x.width), padded(x.value_width))
    if high(x.queries) <= 64:
        return ((64, 128), (64, 64), (64, 32))
    if wide <= 64 and (x.softcap or COSTLY & set(x.extras)):
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


def fitted(x: AttentionShape, plan: AttentionPlan, taken: int = 0) -> AttentionPlan | None:
    """The Plan with as much of shared memory put to use as there is, beside so many bytes that are
    taken; None if it does not fit."""
    every = padded(x.value_width)
    piece = next(p for p in (64, 32, 16) if every % p == 0)
    for query_stages, staged in ((2, every), (2, piece), (1, every), (1, piece), (1, 0)):
        found = replace(plan, query_stages=query_stages, staged=staged)
        if not why_not(x, found) and shared_bytes(x, found) + taken <= SHARED_BYTES:
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


def cycles(x: AttentionShape, plan: AttentionPlan) -> float:
    """Cycles of a launch, as the model sees it."""
    rows, keys = plan.tile
    width = padded(x.width) + padded(x.value_width)
    products = 2 * rows * keys * width / FLOPS
    rest = rows * keys / EXPONENTIALS + STEP_CYCLES
    step = max(products, rest) + (1 - HIDDEN[rows // 64]) * min(products, rest)
    # blocks of keys of each tile of one pair of batch and head, by the tiles' order
    first = np.arange(0, max(1, high(x.queries)), rows)
    stop, start = np.full_like(first, high(x.keys)), np.zeros_like(first)
    lowest, highest = x.band
    if highest is not None:
        stop = np.clip(np.minimum(first + rows, high(x.queries)) + high(highest), 0, stop)
    if lowest is not None:
        start = np.maximum(first + high(lowest), 0) // keys
    each = np.maximum(-(-stop // keys) - start, 1)
    each = each[::-1] if highest is not None else each
    lanes = high(x.batch) * x.heads
    count = min(lanes, max(64, plan.section))  # a longer list is more of the same
    work = ROW_CYCLES * rows + step * each
    starts = range(0, count, plan.section)
    mixed = np.concatenate([np.repeat(work, min(plan.section, count - at)) for at in starts])
    whole = np.tile(mixed, -(-lanes // count))[: lanes * len(each)]
    grid = np.pad(whole, (0, -len(whole) % plan.programs)).reshape(-1, plan.programs)
    grid[1::2] = grid[1::2, ::-1]
    return float(grid.sum(0).max())


def plans(x: AttentionShape, target: Target) -> Iterator[AttentionPlan]:
    """Plans for every tile that fits."""
    stages = 4 if max(padded(x.width), padded(x.value_width)) <= 64 else 2
    for tile in tiles(x):
        made = fitted(x, AttentionPlan(tile, stages, target.cores))
        if made is not None:  # tiles are mixed such that programs end together
            mixed = [replace(made, section=n) for n in sections(x)]
            yield min(mixed, key=lambda plan: cycles(x, plan))


def choose(x: AttentionShape, target: Target) -> AttentionPlan:
    """The Plan the model likes best."""
    found = sorted(plans(x, target), key=lambda plan: cycles(x, plan))
    refuse("kernels.attention.plan", why_not(x) or ("" if found else "no Plan fits"), x)
    return ordered(x, found[0])


def ordered(x: AttentionShape, plan: AttentionPlan) -> AttentionPlan:
    """The Plan with the order of its steps: what was quickest on an H200 for each kind of shape."""
    wide = max(padded(x.width), padded(x.value_width)) > 64
    cut, long = x.band[1] is not None, high(x.queries) >= SHORT
    late = plan.tile[0] > 64 and (wide or plan.tile[0] > 128) and not (cut and not (wide and long))
    tiles = x.batch * x.heads * -(-high(x.queries) // plan.tile[0])
    plan = replace(plan, narrow=cut, late=late, early=high(tiles) <= plan.programs)
    chained = replace(plan, chained=cut and late)
    return plan if why_not(x, chained) else chained


# ---- backward -----------------------------------------------------------------------------------

ROWS = 128  # tokens a program keeps
OWN = 64  # of which a consumer has
KEY_STAGES = 2  # of the ring of programs of queries
NEAR_BYTES = 24 << 20  # that caches keep while programs of a backward loop


@dataclass(frozen=True)
class BackwardPlan:
    """Choices: blocks that are looped over, rings, what a launch gives."""

    queries: int = 64  # a block that programs of keys loop over
    query_stages: int = 2
    keys: int = 128  # a block that programs of queries loop over
    late: bool = False  # products with p wait for ds: fewer registers, less at the same time
    fast: bool = False  # programs of keys add up dq too, in no order; none of queries
    apart: bool = False  # dk and dv by launches of their own: heads of more than 128
    section: int = 1  # (batch, head) pairs whose programs are mixed, the longest first


def spanned(width: int) -> int:
    """Columns of a place that holds rows of so many elements: whole swizzled spans."""
    return round_up(width, 32)


def columns_of(x: AttentionShape, plan: BackwardPlan) -> tuple[int, int]:
    """Padded widths of queries and keys, and of values."""
    width = spanned(x.width)
    return (128 if plan.fast and width > 64 else width), spanned(x.value_width)


def backward_bytes(x: AttentionShape, plan: BackwardPlan) -> int:
    """About what a program needs, of keys or of queries."""
    wide = 2 * sum(columns_of(x, plan))
    of_keys = plan.query_stages * plan.queries * (wide + 8)
    of_queries = KEY_STAGES * plan.keys * wide
    ring = of_keys + 4 * ROWS * plan.queries if plan.fast else max(of_keys, of_queries)
    return ROWS * wide + 512 + ring


def backward_why_not(x: AttentionShape, plan: BackwardPlan | None = None) -> str:
    """Why no Body can be right for a shape (with a Plan); '' where one can."""
    why = unit_why_not(x, forward=False)
    if why or plan is None:
        return why
    odd = [b for b in (plan.queries, plan.keys) if b % 16 or not 16 <= b <= 256]
    whole = 128 if columns_of(x, plan)[0] <= 64 else 64
    unsummed = plan.apart or x.packed
    sums = [width // 2 for width in columns_of(x, plan)]  # registers of one consumer
    return first_wrong(
        (odd, "blocks are multiples of 16 up to 256"),
        (plan.fast and plan.queries != whole, f"dq is added up {whole} queries at a time"),
        (plan.fast and unsummed, "no sums of sequences in a row, or of wide heads"),
        ((max if plan.apart else sum)(sums) > 128, "accumulators do not fit the registers"),
        (plan.query_stages < 2, "a ring has two stages or more"),
        (plan.section < 1, "programs of one head or more are mixed"),
        (backward_bytes(x, plan) > SHARED_BYTES, "the ring does not fit shared memory"),
    )


def choose_backward(x: AttentionShape, fast: bool = False) -> BackwardPlan:
    """The Plan for a shape: wide blocks where accumulators leave registers for them."""
    wide = max(spanned(x.width), spanned(x.value_width))
    costly = len(COSTLY & set(x.extras)) + (x.softcap > 0)
    if wide > 128:
        plan = BackwardPlan(48, 2, 48, apart=True)
    elif costly > 1:
        plan = BackwardPlan(32, 4, 64)
    elif costly:
        plan = BackwardPlan(64 if wide <= 64 else 48, 3, 96)
    elif wide <= 64:
        plan = BackwardPlan(128, 2, 128, late=True)
    else:
        plan = BackwardPlan(64, 3, 128)
    if fast and wide <= 128 and not x.packed and not costly:
        block = 128 if spanned(x.width) <= 64 else 64
        plan = replace(plan, queries=block, query_stages=2, late=block == 128, fast=True)
    return replace(plan, section=backward_section(x))


def backward_section(x: AttentionShape) -> int:
    """How many heads' programs are mixed: where some go further than others, as many as what
    they loop over stays near."""
    if x.band == (None, None):
        return 1
    most = max(high(x.queries) * x.group, high(x.keys))
    bytes_ = most * (x.width + x.value_width) * x.dtype.size
    return max(1, min(high(x.batch) * x.key_heads, NEAR_BYTES // bytes_))
