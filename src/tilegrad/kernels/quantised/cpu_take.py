"""Rows of quantised weights by number, on CPUs: what an embedding is.

A program has a token; it reads the words of its row's lane, quad by quad, and multiplies in the
order of `Format.unpack`, so that values are the Format's own bit for bit. Invariant: ids are
within the rows.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...core.target import Target
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .cpu_decode import Weights
from .cpu_parts import QUADS, ROWS, STEP, parts
from .shape import QuantisedShape, constants
from .words import doubled, moved, shifted


class Lane(Weights):
    """Reads one row's words: a tile of words is that of neighbouring quads."""

    lane: Any = 0

    def steps_codes(self, block: Any, step: Any) -> Any:
        """Codes (8 quads,) of a step as words."""
        first, low, total = 0, 0, None
        for bits in self.layout.planes:
            at = (block, step, first, self.lane)
            lines = tile.load(self.memory["codes"], at, bits, axes=(2,))
            found = [moved(lines, bits, place * bits - low, low) for place in range(8 // bits)]
            whole = found[0] if len(found) == 1 else tile.reshape(tile.stack(found), (QUADS,))
            total = whole if total is None else total | whole
            first, low = first + bits, low + bits
        return doubled(total) if self.layout.doubled else total

    def line(self, name: str, *index: Any) -> Any:
        """The row's own element: `scale` then gives a scalar."""
        return tile.load(self.memory[name], (*index, self.lane))


def take(shape: QuantisedShape, target: Target, name: str = "quantised_take") -> Body:
    """The kernel; parameters are ids, the parts and the result (tokens, columns)."""
    given = [
        ("ids", Memory((shape.tokens,), int32)),
        *constants(parts(shape)),
        ("out", Memory((shape.tokens, shape.columns), shape.dtype, use="result")),
    ]
    b = BodyBuilder(name, given)
    with tile.into(b):
        write_row(shape, {p.attrs["name"]: tile.memory(p) for p in b.parameters})
    return b.finish((shape.tokens,))


@tile.function
def write_row(shape: QuantisedShape, memory: dict[str, Any]) -> None:
    """The row that a token names, step by step."""
    token, rows = tile.grid(shape.tokens), Lane(shape, memory)
    number = tile.load(memory["ids"], token).to(tile.i64)
    row = tile.hold(number, "row", (0, shape.rows - 1))
    block, rows.lane = row // ROWS, row % ROWS
    for step in tile.range(shape.columns // STEP):
        values = values_of(rows, block, step).to(shape.dtype)
        tile.store(memory["out"], (token, step * STEP), values)


def values_of(rows: Lane, block: Any, step: Any) -> Any:
    """The 32 values of a step."""
    layout, words = rows.layout, rows.steps_codes(block, step)
    found = [shifted(words, 8 * i) & 255 for i in range(4)]
    codes = tile.stack(found).T - layout.centre  # (quads, 4)
    codes = tile.reshape(codes, (STEP // layout.group, layout.group))
    made = []
    for g, (_, scale, least) in enumerate(rows.groups(block, step)):
        value = scale * codes[g].to(float32)
        made.append(value if least is None else value + least)
    return tile.reshape(made[0] if len(made) == 1 else tile.stack(made), (STEP,))
