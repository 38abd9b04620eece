"""Plans of the backward kernels of attention: which shapes they take, which blocks they loop over.

A program keeps ROWS tokens and loops over blocks of the other side; accumulators, scores and
operands of two consumers of 64 tokens each share 240 registers a thread, which bounds the blocks.
Invariant: `why_not` is '' exactly where `attention_backward` gives Bodies that are right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...ir.symbol import high
from .shape import AttentionShape, first_wrong, unit_why_not

ROWS = 128  # tokens a program keeps
OWN = 64  # of which a consumer has
SHARED_BYTES = 226 << 10
NEAR_BYTES = 24 << 20  # that caches keep while programs loop

COSTLY = {"bias", "mask", "slopes", "key"}  # they need registers of their own


@dataclass(frozen=True)
class BackwardPlan:
    """Choices: blocks that are looped over, rings, what a launch gives."""

    queries: int = 64  # a block that programs of keys loop over
    query_stages: int = 2
    keys: int = 128  # a block that programs of queries loop over
    key_stages: int = 2
    late: bool = False  # products with p wait for ds: fewer registers, less at the same time
    fast: bool = False  # programs of keys add up dq too, in no order; none of queries
    apart: bool = False  # dk and dv by launches of their own: heads of more than 128
    section: int = 1  # (batch, head) pairs whose programs are mixed, the longest first


def padded(width: int) -> int:
    """Columns of a place that holds rows of so many elements: whole swizzled spans."""
    return 32 * -(-width // 32)


def columns_of(x: AttentionShape, plan: BackwardPlan) -> tuple[int, int]:
    """Padded widths of queries and keys, and of values."""
    width = padded(x.width)
    return (128 if plan.fast and width > 64 else width), padded(x.value_width)


def shared_bytes(x: AttentionShape, plan: BackwardPlan, side: str) -> int:
    """About what a program of keys or of queries needs."""
    wide = 2 * sum(columns_of(x, plan))
    if side == "keys":
        changes = 4 * ROWS * plan.queries if plan.fast else 0
        return ROWS * wide + plan.query_stages * plan.queries * (wide + 8) + changes + 512
    return ROWS * wide + plan.key_stages * plan.keys * wide + 512


def accumulators(x: AttentionShape, plan: BackwardPlan) -> int:
    """Registers of the sums of one consumer."""
    width, value_width = (w // 2 for w in columns_of(x, plan))
    return max(width, value_width) if plan.apart else width + value_width


def why_not(x: AttentionShape, plan: BackwardPlan | None = None) -> str:
    """Why no Body can be right for a shape (with a Plan); '' where one can."""
    why = unit_why_not(x, forward=False)
    if why or plan is None:
        return why
    sides = ("keys",) if plan.fast else ("keys", "queries")
    most = max(shared_bytes(x, plan, side) for side in sides)
    odd = [b for b in (plan.queries, plan.keys) if b % 16 or not 16 <= b <= 256]
    whole = 128 if columns_of(x, plan)[0] <= 64 else 64
    unsummed = plan.apart or "query_starts" in x.extras
    return first_wrong(
        (odd, "blocks are multiples of 16 up to 256"),
        (plan.fast and plan.queries != whole, f"dq is added up {whole} queries at a time"),
        (plan.fast and unsummed, "no sums of sequences in a row, or of wide heads"),
        (accumulators(x, plan) > 128, "accumulators do not fit the registers"),
        (min(plan.query_stages, plan.key_stages) < 2, "a ring has two stages or more"),
        (plan.section < 1, "programs of one head or more are mixed"),
        (most > SHARED_BYTES, "the ring does not fit shared memory"),
    )


def choose(x: AttentionShape, fast: bool = False) -> BackwardPlan:
    """The Plan for a shape: wide blocks where accumulators leave registers for them."""
    wide = max(padded(x.width), padded(x.value_width))
    costly = len(COSTLY & set(x.extras)) + (x.softcap > 0)
    if wide > 128:
        plan = BackwardPlan(48, 2, 48, 2, apart=True)
    elif costly > 1:
        plan = BackwardPlan(32, 4, 64, 2)
    elif costly:
        plan = BackwardPlan(64 if wide <= 64 else 48, 3, 96, 2)
    elif wide <= 64:
        plan = BackwardPlan(128, 2, 128, 2, late=True)
    else:
        plan = BackwardPlan(64, 3, 128, 2)
    if fast and wide <= 128 and "query_starts" not in x.extras and not costly:
        block = 128 if padded(x.width) <= 64 else 64
        plan = replace(plan, queries=block, query_stages=2, late=block == 128, fast=True)
    return replace(plan, section=section(x))


def section(x: AttentionShape) -> int:
    """How many heads' programs are mixed: where some go further than others, as many as what
    they loop over stays near."""
    if x.band == (None, None):
        return 1
    most = max(high(x.queries) * x.group, high(x.keys))
    bytes_ = most * (x.width + x.value_width) * x.dtype.size
    return max(1, min(high(x.batch) * x.key_heads, NEAR_BYTES // bytes_))
