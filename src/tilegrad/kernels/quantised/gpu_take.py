"""Rows of quantised weights, on GPUs: by number, which is what an embedding is, or all of them.

A program has a row; each thread takes a group of it apart and multiplies in the order of
`Format.unpack`, so that values are the Format's own bit for bit. Costs the bytes of a row read
and written. Invariant: ids are within the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...ir.symbol import Size
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .gpu_layout import GROUP, Groups, as_columns, groups_of, parts
from .shape import QuantisedShape, constants
from .words import there

MOST_GROUPS = 128  # that the threads of a program take at once


def take(shape: QuantisedShape) -> Body:
    """The kernel: ids (tokens,), the parts, out (tokens, columns)."""
    ids = Memory((shape.tokens,), int32)
    return rows_body(shape, "quantised_take", shape.tokens, [("ids", ids)])


def unpack(shape: QuantisedShape) -> Body:
    """The kernel: the parts, out (rows, columns)."""
    return rows_body(shape, "quantised_unpack", shape.rows, [])


def rows_body(
    shape: QuantisedShape, name: str, count: Size, ids: Sequence[tuple[str, Memory]]
) -> Body:
    """The kernel of so many rows: those that ids name, or all."""
    out = Memory((count, shape.columns), shape.dtype, use="result")
    b = BodyBuilder(name, [*ids, *constants(parts(shape)), ("out", out)])
    with tile.into(b):
        *given, result = map(tile.memory, b.parameters)
        to = row = tile.grid(count)
        if ids:
            row = tile.load(given.pop(0)[to]).to(tile.i64)
            row = tile.hold(row, "row", (0, shape.rows - 1))
        warps = write_row(shape, Groups(shape, given), row, result, to)
    return b.finish((count,), warps=warps)


@tile.function
def write_row(shape: QuantisedShape, weights: Groups, row: Any, out: Any, to: Any) -> int:
    """A row of the weights into a row of the result; gives how many warps do it."""
    count, groups = groups_of(shape), MOST_GROUPS
    while count % groups:
        groups //= 2
    wide = groups * GROUP
    for group in tile.range(0, count, groups):
        found = weights.values(weights.load(row, group, 1, groups), once=False)
        values = as_columns(list(found)).to(shape.dtype)
        values = tile.reshape(values, (wide,))
        first = group * GROUP
        mask = there((wide,), 0, first, shape.columns)
        tile.store(out[to, first : first + wide], values, mask=mask)
    return groups // 32
