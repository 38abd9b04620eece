"""Parts of row blocks become results: those of paged attention that its work list cut.

Who counts the last part of a row block combines them (`mixed`), or another launch does
(`combine_parts`). Invariant: parts are added in the order of their keys.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import int64
from ...ir.symbol import high
from ...tile.build import Body, BodyBuilder
from ..attention.shape import memories
from ..attention.softmax import finite
from .shape import CUT_FIELDS, PagedPlan, PagedShape, parameters

TOGETHER = 32  # parts that are read at once


def combine_parts(x: PagedShape, plan: PagedPlan, name: str = "paged_combine") -> Body:
    """Parts of row blocks that were cut become results, weighted by their sums of weights in the
    order of keys; whole row blocks are in `out` already. A program takes a row of one; there are no
    more of these than programs of `attend`. All parts, up to 32 at a time, are read at once."""
    given = parameters(x, ("cuts", "partial", "sums", "out"), plan, out="state")
    b = BodyBuilder(name, given)
    rows = plan.per(x) * x.group
    with tile.into(b):
        _combine(x, plan, *tile.grid(plan.programs, rows), memories(b))
    return b.finish((plan.programs, rows), warps=4)


@tile.function
def _combine(x: PagedShape, plan: PagedPlan, cut: Any, row: Any, memory: dict[str, Any]) -> None:
    near, parts_of = x.key_heads, (memory["partial"], memory["sums"])

    def field(name: str, most: int) -> Any:
        number = CUT_FIELDS.index(name)
        found = tile.cast(tile.load(memory["cuts"], (cut // near, number), ()), int64)
        return tile.hold(found, f"field{number}", (0, most))

    first = field("partial", high(plan.item_rows(x)) - 1)
    parts = field("parts", plan.ranges(x))
    token, tokens = field("token", high(x.tokens) - 1), field("tokens", plan.per(x))
    head = cut % near
    if tile.less(1, parts) & tile.less(row // x.group, tokens):
        shape, where = (TOGETHER, 1, x.value_width), (first, head, row)
        place = (token + row // x.group, head * x.group + row % x.group, 0)
        tile.store(memory["out"], place, mixed(parts_of, where, parts, shape, 1))


@tile.function
def mixed(
    memories: tuple[Any, Any],
    where: tuple[Any, Any, Any],
    parts: Any,
    shape: tuple[int, int, int],
    real: int,
) -> Any:
    """Results (rows, width) of the parts from the first on: `memories` are partial and sums,
    `where` is (first, key head, row), `shape` (parts at a time, rows, width); `real` rows count."""
    (partial, sums), (first, *which), (together, rows, wide) = memories, where, shape
    nothing, zero = tile.full((), -tile.INF), tile.zeros(())
    best, total = tile.full((rows,), -tile.INF), tile.zeros((rows,))
    result = tile.zeros((rows, wide))
    for part in tile.range(0, parts, together):
        there = (tile.arange(together) + part < parts)[:, None]
        if real < rows:
            there = there & (tile.arange(rows) < real)[None, :]
        there = tile.broadcast(there, (together, rows))
        logs = tile.load(sums, (first + part, *which), (together, rows), axes=(0, 2), mask=there)
        at = (first + part, *which, 0)
        found = tile.load(partial, at, shape, axes=(0, 2, 3), mask=there[:, :, None])
        logs = tile.where(there, logs, nothing)
        now = tile.maximum(best, tile.max(logs, 0))
        base = finite(now)
        weights, shrink = tile.exp2(logs - base), tile.exp2(best - base)
        by_row, more = shrink[:, None], found * weights[:, :, None]
        by_row = tile.broadcast(by_row, result.shape)
        more = tile.multiply_add(result, by_row, tile.sum(more, 0))
        best, total, result = now, tile.multiply_add(total, shrink, tile.sum(weights, 0)), more
    return result / tile.where(zero < total, total, 1.0)[:, None]
