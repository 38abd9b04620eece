"""Parts of a pair become its result: weighted by their sums of weights, in the order of the keys.

A program takes one row of a pair that was cut; there are no more of these than programs of
`attend`, which finished all others. All parts (up to 32 at a time) are read at once: costs
parts * value_width reads of float32 for each row. Invariant: a row without any weight gives 0,
and the order of the sum depends on the number of parts alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.dtype import float32, int64
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..ir.types import Memory
from ..tile import ops
from ..tile.build import Body, BodyBuilder
from .paged_shape import (
    CUT_HEAD,
    CUT_PARTS,
    CUT_SLOT,
    CUT_TOKEN,
    CUT_TOKENS,
    PagedPlan,
    PagedShape,
    per,
    scratch_parameters,
    spread,
    walkers,
    work_parameters,
)

TOGETHER = 32  # parts that are read at once


def combine_parameters(x: PagedShape, plan: PagedPlan) -> list[tuple[str, Memory]]:
    """cuts, partial, sums, out (of which whole pairs are there)."""
    return [work_parameters(x, plan)[1], *scratch_parameters(x, plan),
            ("out", Memory((x.tokens, x.heads, x.value_width), x.dtype, use="state"))]  # fmt: skip


def combine_parts(x: PagedShape, plan: PagedPlan, name: str = "paged_combine") -> Body:
    """The kernel."""
    b = BodyBuilder(name, combine_parameters(x, plan))
    records, partial, sums, out = b.parameters
    rows = per(x, plan) * x.group
    near = spread(x, plan)
    cut, row = b.program(0, plan.programs), b.program(1, rows)
    slots = high(partial.type.shape[0])  # type: ignore[union-attr]

    def field(number: int, most: int) -> Size:
        found = b.cast(b.load(records, (cut // near, number)), int64)
        return b.atom(f"field{number}", found, 0, most)

    slot, parts = field(CUT_SLOT, slots - 1), field(CUT_PARTS, walkers(x, plan))
    token, tokens = field(CUT_TOKEN, high(x.tokens) - 1), field(CUT_TOKENS, per(x, plan))
    head = field(CUT_HEAD, x.key_heads // near - 1) + cut % near

    def mix() -> Sequence[Node]:
        _mix(b, x, (partial, sums, out), (slot, parts, cut % near, row),
             (token + row // x.group, head * x.group + row % x.group))  # fmt: skip
        return ()

    some = b.apply("bit_and", b.less(1, parts), b.less(row // x.group, tokens))
    b.branch(some, mix)
    return b.finish((plan.programs, rows), warps=4)


def _mix(
    b: BodyBuilder, x: PagedShape, memories: tuple[Node, Node, Node],
    where: tuple[Size, Size, Size, Size], place: tuple[Size, Size],
) -> None:  # fmt: skip
    """One row of one pair."""
    (partial, sums, out), (slot, parts, *which), wide = memories, where, x.value_width
    nothing = b.constant(-math.inf, float32)

    def some(start: Size, carried: list[Node]) -> Sequence[Node]:
        best, total, mixed = carried
        line = b.apply("add", b.add(ops.iota(size=TOGETHER, dtype=int64)), b.index(start))
        there = b.apply("less", line, b.index(parts))
        logs = b.load(sums, (slot + start, *which), (TOGETHER,), (0,), there)
        tall = b.broadcast(b.add(ops.reshape(there, shape=(TOGETHER, 1))), (TOGETHER, wide))
        found = b.load(partial, (slot + start, *which, 0), (TOGETHER, wide), (0, 3), tall)
        logs = b.apply("where", there, logs, nothing)
        now = b.apply("maximum", best, b.add(ops.reduce(logs, axis=0, kind="max")))
        none = b.apply("equal", now, nothing)
        base = b.apply("where", none, b.constant(0.0, float32), now)
        weights = b.apply("exp2", b.apply("subtract", logs, base))
        shrink = b.apply("exp2", b.apply("subtract", best, base))
        more = b.apply("multiply", found, b.add(ops.reshape(weights, shape=(TOGETHER, 1))))
        mixed = b.apply("multiply_add", mixed, b.broadcast(shrink, (wide,)),
                        b.add(ops.reduce(more, axis=0, kind="sum")))  # fmt: skip
        total = b.apply("multiply_add", total, shrink,
                        b.add(ops.reduce(weights, axis=0, kind="sum")))  # fmt: skip
        return [now, total, mixed]

    start = [nothing, b.constant(0.0, float32), b.constant(0.0, float32, (wide,))]
    _, total, mixed = b.loop("part", 0, parts, TOGETHER, some, start)
    there = b.apply("less", b.constant(0.0, float32), total)
    safe = b.apply("where", there, total, b.constant(1.0, float32))
    b.store(out, b.cast(b.apply("divide", mixed, safe), x.dtype), (*place, 0), (2,))
