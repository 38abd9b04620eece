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
from dataclasses import dataclass

from ...core.dtype import float32, int64
from ...core.errors import InternalError
from ...ir.symbol import Size, ceil_divide
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from . import parts
from .backward_plan import BackwardPlan, candidates, choose, columns_of, why_not
from .backward_walk import Walk
from .shape import AttentionShape, backward_parameters

__all__ = [
    "Backward",
    "BackwardPlan",
    "Launch",
    "attention_backward",
    "candidates",
    "choose",
    "why_not",
]


@dataclass(frozen=True)
class Launch:
    """One Body and the names of its arguments: of parameters or scratch."""

    body: Body
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Backward:
    """Launches in order, and the scratch between them."""

    launches: tuple[Launch, ...]
    scratch: tuple[tuple[str, Memory], ...] = ()


def attention_backward(
    x: AttentionShape,
    plan: BackwardPlan,
    more: Sequence[Memory] = (),
    wanted: Sequence[str] = (),
    name: str = "attention_backward",
) -> Backward:
    """All launches; arguments are named as `backward_parameters` names them."""
    why = why_not(x, plan, wanted)
    if why:
        raise InternalError("kernels.attention.backward", f"{why}: {plan} for {x}")
    given = dict(backward_parameters(x, more, wanted))
    inputs = [n for n in given if n not in ("dq", "dk", "dv")]
    if plan.fast:
        given["sums"] = Memory(sums_shape(x, plan), float32, use="state")
        names = (*inputs, "dk", "dv", "sums")
        body = Walk(x, plan, ("dk", "dv"), [(n, given[n]) for n in names], f"{name}_keys").build()
        return Backward(
            (
                Launch(clear(x, plan, f"{name}_clear"), ("sums",)),
                Launch(body, names),
                Launch(rounded(x, plan, given["dq"], f"{name}_round"), ("sums", "dq")),
            ),
            (("sums", given["sums"]),),
        )
    launches = []
    for side, gives in sides(plan):
        names = (*inputs, *gives)
        body = Walk(x, plan, gives, [(n, given[n]) for n in names], f"{name}_{side}").build()
        launches.append(Launch(body, names))
    return Backward(tuple(launches))


def sides(plan: BackwardPlan) -> list[tuple[str, tuple[str, ...]]]:
    """Names of the launches without sums between programs, and what each gives."""
    of_keys: list[tuple[str, tuple[str, ...]]] = [("keys", ("dk", "dv"))]
    if plan.apart:
        of_keys = [("values", ("dv",)), ("keys", ("dk",))]
    return [*of_keys, ("queries", ("dq",))]


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
    at = [b.program(axis, size) for axis, size in enumerate(shape[:3])]
    zero = b.constant(0.0, float32, shape[3:])  # type: ignore[arg-type]
    b.store(b.parameters[0], zero, (*at, *[0] * 6), tuple(range(3, 9)))
    return b.finish(shape[:3])


def rounded(x: AttentionShape, plan: BackwardPlan, dq: Memory, name: str) -> Body:
    """dq from its sums."""
    shape = sums_shape(x, plan)
    b = BodyBuilder(name, [("sums", Memory(shape, float32)), ("dq", dq)])
    line, block, half = (b.program(axis, size) for axis, size in enumerate(shape[:3]))
    sums = b.load(
        b.parameters[0],
        (line, block, half, *[0] * 6),
        shape[3:],  # type: ignore[arg-type]
        tuple(range(3, 9)),
    )
    columns = 8 * int(shape[3])
    lines = b.add(ops.transpose(sums, order=(1, 4, 2, 0, 3, 5)))
    value = parts.scaled(b, b.add(ops.reshape(lines, shape=(64, columns))), x.scale)
    apart = plan.queries == 64  # the halves are columns, else queries
    token = block * plan.queries
    token = token if apart else token + half * 64
    column = half * 64 if apart else 0
    order = x.orders[0]
    of = {"b": line // x.heads, "h": line % x.heads, "t": token, "d": column}
    mask = None
    if not isinstance(x.queries, int) or x.queries % plan.queries:
        rows = b.apply("add", b.add(ops.iota(size=64, dtype=int64)), b.index(token))
        mask = parts.column(b, b.apply("less", rows, b.index(x.queries)))
    if x.width != columns_of(x, plan)[0]:
        across = b.apply("add", b.add(ops.iota(size=columns, dtype=int64)), b.index(column))
        mask = b.logical_and(mask, b.apply("less", across, b.index(x.width)))
    b.store(
        b.parameters[1],
        b.cast(value, x.dtype),
        tuple(of[a] for a in order),
        (order.index("t"), 3),
        mask,
    )
    return b.finish(shape[:3])
