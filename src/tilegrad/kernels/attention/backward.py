"""Backward of attention on matrix units that run beside the threads: gradients of q, k and v.

With p = exp(s - lse) recomputed and ds = p (dout v^T - delta): dv = p^T dout, dk = scale ds^T q,
dq = scale ds k. By default there are two launches: programs of keys give dk and dv, programs of
queries give dq. Both recompute the scores: 7 products instead of 5, no sums between programs, and
the same inputs give the same bits. A `fast` Plan has 5 products: programs of keys also add dq to
float32 sums that a launch before clears and one after rounds; their order is nobody's.

Invariant: any sizes do whose rows are a multiple of 16 bytes; a query that sees no key (lse is
-inf) adds exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import tile
from ...core.dtype import float32
from ...core.errors import InternalError
from ...ir.symbol import Size, ceil_divide
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ...tile.value import index_of
from .backward_body import BackwardBody
from .backward_plan import BackwardPlan, columns_of, why_not
from .holes import Holes
from .shape import AttentionShape, backward_parameters
from .softmax import and_masks


def attention_backward(
    x: AttentionShape,
    plan: BackwardPlan,
    more: Sequence[Memory] = (),
    name: str = "attention_backward",
) -> list[Body]:
    """All launches; parameters as `backward_parameters` names them, and `sums` between launches."""
    why = why_not(x, plan)
    if why:
        raise InternalError("kernels.attention.backward", f"{why}: {plan} for {x}")
    given = dict(backward_parameters(x, more))
    given["sums"] = Memory(sums_shape(x, plan), float32, use="state")

    def body(side: str, *gives: str) -> Body:
        known = [(n, m) for n, m in given.items() if m.use == "value" or n in gives]
        return BackwardBody(x, plan, gives, known, f"{name}_{side}").build()

    if plan.fast:
        rounds = rounded(x, plan, given["dq"], f"{name}_round")
        return [clear(x, plan, f"{name}_clear"), body("keys", "dk", "dv", "sums"), rounds]
    if plan.apart:
        return [body("values", "dv"), body("keys", "dk"), body("queries", "dq")]
    return [body("keys", "dk", "dv"), body("queries", "dq")]


# ---- sums of dq ---------------------------------------------------------------------------------


def sums_shape(x: AttentionShape, plan: BackwardPlan) -> tuple[Size, ...]:
    """Sums of dq as threads hold an accumulator: (batch and head, block of queries, half of it,
    eight columns, warp, row, two columns, upper or lower eight rows, column)."""
    columns = min(64, columns_of(x, plan)[0])
    blocks = ceil_divide(x.queries, plan.queries)
    return (x.batch * x.heads, blocks, 2, columns // 8, 4, 8, 4, 2, 2)


def clear(x: AttentionShape, plan: BackwardPlan, name: str) -> Body:
    """Set all sums to 0."""
    shape = sums_shape(x, plan)
    b = BodyBuilder(name, [("sums", Memory(shape, float32, use="result"))])
    with tile.into(b):
        at = tile.grid(*shape[:3])
        tile.store(tile.memory(b.parameters[0])[(*at, ...)], tile.zeros(shape[3:]))
    return b.finish(shape[:3])


def rounded(x: AttentionShape, plan: BackwardPlan, dq: Memory, name: str) -> Body:
    """dq from its sums."""
    shape = sums_shape(x, plan)
    b = BodyBuilder(name, [("sums", Memory(shape, float32)), ("dq", dq)])
    with tile.into(b):
        sums, out = map(tile.memory, b.parameters)
        lane, block, half = tile.grid(*shape[:3])
        held = tile.load(sums[lane, block, half, ...])
        columns = 8 * int(shape[3])
        value = tile.reshape(tile.transpose(held, (1, 4, 2, 0, 3, 5)), (64, columns)) * x.scale
        apart = plan.queries == 64  # the halves are columns, else queries
        token = block * plan.queries
        token, column = (token, half * 64) if apart else (token + half * 64, 0)
        mask = None
        if not isinstance(x.queries, int) or x.queries % plan.queries:
            mask = (tile.arange(64) + token < index_of(x.queries))[:, None]
        if x.width != columns_of(x, plan)[0]:
            mask = and_masks(mask, tile.arange(columns) + column < x.width)
        holes = Holes(x, {"dq": out}, lane // x.heads, lane % x.heads)
        target = holes.tokens("dq", token, (64, columns), column)
        tile.store(target, tile.cast(value, x.dtype), mask=mask)
    return b.finish(shape[:3])
