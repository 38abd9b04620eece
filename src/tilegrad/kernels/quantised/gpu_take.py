"""Rows of quantised weights, on GPUs: by number, which is what an embedding is, or all of them.

A program has a row; each thread takes a group of it apart and multiplies in the order of
`Format.unpack`, so that values are the Format's own bit for bit. Costs the bytes of a row read
and written. Invariant: ids are within the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import float32, int32, int64
from ...ir.node import Node
from ...ir.symbol import Size
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .gpu_layout import GROUP, Groups, groups_of, part_parameters
from .shape import QuantisedShape

MOST_GROUPS = 128  # that the threads of a program take at once


def take(shape: QuantisedShape, name: str = "quantised_take") -> Body:
    """The kernel: ids (tokens,), the parts, out (tokens, columns)."""
    b = BodyBuilder(
        name,
        [
            ("ids", Memory((shape.tokens,), int32)),
            *part_parameters(shape),
            ("out", Memory((shape.tokens, shape.columns), shape.dtype, use="result")),
        ],
    )
    token = b.program(0, shape.tokens)
    row = b.atom("row", b.cast(b.load(b.parameters[0], (token,)), int64), 0, shape.rows - 1)
    warps = _write_row(b, shape, Groups(b, shape, b.parameters[1:-1]), row, token)
    return b.finish((shape.tokens,), warps=warps)


def unpack(shape: QuantisedShape, name: str = "quantised_unpack") -> Body:
    """The kernel: the parts, out (rows, columns)."""
    b = BodyBuilder(
        name,
        [
            *part_parameters(shape),
            ("out", Memory((shape.rows, shape.columns), shape.dtype, use="result")),
        ],
    )
    row = b.program(0, shape.rows)
    warps = _write_row(b, shape, Groups(b, shape, b.parameters[:-1]), row, row)
    return b.finish((shape.rows,), warps=warps)


def _write_row(b: BodyBuilder, shape: QuantisedShape, weights: Groups, row: Size, to: Size) -> int:
    """A row of the weights into a row of the result; gives how many warps do it."""
    count, columns = groups_of(shape), shape.columns
    groups = MOST_GROUPS
    while count % groups:
        groups //= 2

    def turn(group: Size, _: list[Node]) -> Sequence[Node]:
        found = weights.named(weights.load(row, group, 1, groups))
        values = b.cast(weights.beside(unpacked(weights, found)), shape.dtype)
        values = b.add(ops.reshape(values, shape=(groups * GROUP,)))
        mask = None
        if count * GROUP != columns:
            line = b.add(ops.iota(size=groups * GROUP, dtype=int64))
            at = b.apply("add", line, b.index(group * GROUP))
            mask = b.apply("less", at, b.constant(columns, int64))
        b.store(b.parameters[-1], values, (to, group * GROUP), (1,), mask)
        return ()

    b.loop("group", 0, count, groups, turn)
    return groups // 32


def unpacked(weights: Groups, found: dict[str, Node]) -> list[Node]:
    """The values of groups by element, in the order of operations of the Format."""
    b, scales = weights.b, weights.scales(found)
    made = []
    for element, code in enumerate(weights.codes(found)):
        scale, minimum = scales[element * len(scales) // GROUP]
        value = b.apply("multiply", scale, code)
        made.append(value if minimum is None else b.apply("add", value, minimum))
    return [b.cast(v, float32) for v in made]
