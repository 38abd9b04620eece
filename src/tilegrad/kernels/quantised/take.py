"""Rows of quantised weights, by number, which is what an embedding is, or all of them.

A program has a row; how a machine's kernel writes it stands in `cpu_take` and `gpu_take`: in the
order of `Format.unpack`, so that values are the Format's own bit for bit. Invariant: ids are within
the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .shape import Part, QuantisedShape, constants

# (the shape, the parts by name, the number of a row, where it goes) -> notes of the Body
WriteRow = Callable[[QuantisedShape, dict[str, Any], Any, Any], dict[str, Any]]


def rows_body(
    shape: QuantisedShape, parts: Sequence[Part], write: WriteRow, numbered: bool = True
) -> Body:
    """The kernel: ids (tokens,) where rows are numbered, the parts, out (rows, columns)."""
    count = shape.tokens if numbered else shape.rows
    ids = [("ids", Memory((count,), int32))] if numbered else []
    out = ("out", Memory((count, shape.columns), shape.dtype, use="result"))
    name = "quantised_take" if numbered else "quantised_unpack"
    b = BodyBuilder(name, [*ids, *constants(parts), out])
    with tile.into(b):
        memory = tile.memories(b)
        to = row = tile.grid(count)
        if numbered:
            number = tile.load(memory["ids"][to]).to(tile.i64)
            row = tile.hold(number, "row", (0, shape.rows - 1))
        notes = write(shape, memory, row, memory["out"][to])
    return b.finish((count,), **notes)
