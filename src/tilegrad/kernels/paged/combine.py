"""Parts of a pair become its result: weighted by their sums of weights, in the order of the keys.

A program takes one row of a pair that was cut; there are no more of these than programs of
`attend`, which finished all others. All parts (up to 32 at a time) are read at once: costs
parts * value_width reads of float32 for each row. Invariant: a row without any weight gives 0,
and the order of the sum depends on the number of parts alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtype import float32, int64
from ...ir.node import Node
from ...ir.symbol import Size, high
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .shape import (
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
    return [
        work_parameters(x, plan)[1],
        *scratch_parameters(x, plan),
        ("out", Memory((x.tokens, x.heads, x.value_width), x.dtype, use="state")),
    ]


def combine_parts(x: PagedShape, plan: PagedPlan, name: str = "paged_combine") -> Body:
    """The kernel."""
    b = BodyBuilder(name, combine_parameters(x, plan))
    records, partial, sums, out = b.parameters
    rows = per(x, plan) * x.group
    near = spread(x, plan)
    cut, row = b.program(0, plan.programs), b.program(1, rows)
    slots = high(partial.shape[0])

    def field(number: int, most: int) -> Size:
        found = b.cast(b.load(records, (cut // near, number)), int64)
        return b.atom(f"field{number}", found, 0, most)

    slot, parts = field(CUT_SLOT, slots - 1), field(CUT_PARTS, walkers(x, plan))
    token, tokens = field(CUT_TOKEN, high(x.tokens) - 1), field(CUT_TOKENS, per(x, plan))
    head = field(CUT_HEAD, x.key_heads // near - 1) + cut % near

    def mix() -> Sequence[Node]:
        shape = (TOGETHER, 1, x.value_width)
        result = mixed(b, (partial, sums), (slot, cut % near, row), parts, shape, 1)
        place = (token + row // x.group, head * x.group + row % x.group, 0)
        b.store(out, b.cast(result, x.dtype), place, (1, 2))
        return ()

    some = b.apply("bit_and", b.less(1, parts), b.less(row // x.group, tokens))
    b.branch(some, mix)
    return b.finish((plan.programs, rows), warps=4)


def mixed(
    b: BodyBuilder,
    memories: tuple[Node, Node],
    where: tuple[Size, Size, Size],
    parts: Size,
    shape: tuple[int, int, int],
    real: int,
) -> Node:
    """Results (rows, width) of the parts from a slot on: `memories` are partial and sums, `where`
    is (slot, near, row), `shape` (parts at a time, rows, width), of which `real` rows count."""
    (partial, sums), (slot, *which), (together, rows, wide) = memories, where, shape
    nothing, zero = b.constant(-math.inf, float32), b.constant(0.0, float32)

    def some(start: Size, carried: list[Node]) -> Sequence[Node]:
        best, total, result = carried
        there = _there(b, start, parts, (together, rows), real)
        logs = b.load(sums, (slot + start, *which), (together, rows), (0, 2), there)
        tall = b.broadcast(b.add(ops.reshape(there, shape=(together, rows, 1))), shape)
        found = b.load(partial, (slot + start, *which, 0), shape, (0, 2, 3), tall)
        logs = b.apply("where", there, logs, nothing)
        now = b.apply("maximum", best, b.add(ops.reduce(logs, axis=0, kind="max")))
        base = b.apply("where", b.apply("equal", now, nothing), zero, now)
        weights = b.apply("exp2", b.apply("subtract", logs, base))
        shrink = b.apply("exp2", b.apply("subtract", best, base))
        by_row = b.add(ops.reshape(shrink, shape=(rows, 1)))
        more = b.apply("multiply", found, b.add(ops.reshape(weights, shape=(together, rows, 1))))
        result = b.apply(
            "multiply_add",
            result,
            b.broadcast(by_row, (rows, wide)),
            b.add(ops.reduce(more, axis=0, kind="sum")),
        )
        total = b.apply(
            "multiply_add", total, shrink, b.add(ops.reduce(weights, axis=0, kind="sum"))
        )
        return [now, total, result]

    start = [
        b.constant(-math.inf, float32, (rows,)),
        b.constant(0.0, float32, (rows,)),
        b.constant(0.0, float32, (rows, wide)),
    ]
    _, total, result = b.loop("part", 0, parts, together, some, start)
    safe = b.apply("where", b.apply("less", zero, total), total, b.constant(1.0, float32))
    return b.apply("divide", result, b.add(ops.reshape(safe, shape=(rows, 1))))


def _there(b: BodyBuilder, start: Size, parts: Size, shape: tuple[int, int], real: int) -> Node:
    """Which of some parts and rows there are."""
    together, rows = shape
    part = b.apply("add", b.add(ops.iota(size=together, dtype=int64)), b.index(start))
    part = b.apply("less", part, b.index(parts))
    found = b.add(ops.reshape(part, shape=(together, 1)))
    if real < rows:
        row = b.apply("less", b.add(ops.iota(size=rows, dtype=int64)), b.constant(real, int64))
        found = b.apply("bit_and", found, b.add(ops.reshape(row, shape=(1, rows))))
    return b.broadcast(found, shape)
