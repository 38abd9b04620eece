"""Writes a row of quantised weights on a CPU: the words of its lane, quad by quad; see `take`."""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import float32
from .cpu_decode import Weights
from .cpu_parts import QUADS, ROWS, STEP
from .shape import QuantisedShape
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


@tile.function
def write_row(shape: QuantisedShape, memory: dict[str, Any], row: Any, out: Any) -> dict[str, Any]:
    """A row of the weights, step by step."""
    rows = Lane(shape, memory)
    block, rows.lane = row // ROWS, row % ROWS
    for step in tile.range(shape.columns // STEP):
        values = values_of(rows, block, step).to(shape.dtype)
        tile.store(out, step * STEP, values)
    return {}


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
