"""Rows of quantised weights by number, on CPUs: what an embedding is.

A program has a token; it reads the words of its row's lane, quad by quad, and multiplies in the
order of `Format.unpack`, so that values are the Format's own bit for bit. Invariant: ids are
within the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import float32, int32, int64
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, floor_divide, modulo, multiply
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .cpu_decode import Weights
from .cpu_parts import QUADS, ROWS, STEP, parts
from .shape import QuantisedShape


class Lane(Weights):
    """Reads one row's words: a tile of words is that of neighbouring quads."""

    lane: Size = 0

    def column(self, block: Size, step: Size, first: int, count: int) -> Node:
        """The words of the row in neighbouring vectors."""
        index = (block, step, first, self.lane)
        return self.b.load(self.memory["codes"], index, (count,), (2,))

    def steps_codes(self, block: Size, step: Size) -> Node:
        """Codes (8 quads,) of a step as words."""
        b, first, low, total = self.b, 0, 0, None
        for bits in self.layout.planes:
            lines = self.column(block, step, first, bits)
            found = [self._bits(lines, bits, place * bits - low, low) for place in range(8 // bits)]
            whole = found[0]
            if len(found) > 1:
                whole = b.add(ops.reshape(b.add(ops.stack_rows(*found)), shape=(QUADS,)))
            total = whole if total is None else b.apply("bit_or", total, whole)
            first, low = first + bits, low + bits
        assert total is not None
        return self._doubled(total) if self.layout.doubled else total

    def one(self, name: str, *index: Size) -> Node:
        """An element of a part."""
        return self.b.load(self.memory[name], (*index, self.lane))

    def line(self, name: str, *index: Size) -> Node:
        """The row's own element: `scale` then gives a scalar."""
        return self.one(name, *index)


def take(shape: QuantisedShape, target: Target, name: str = "quantised_take") -> Body:
    """The kernel; parameters are ids, the parts and the result (tokens, columns)."""
    given = [
        ("ids", Memory((shape.tokens,), int32)),
        *((n, Memory(s, d)) for n, s, d in parts(shape)),
        ("out", Memory((shape.tokens, shape.columns), shape.dtype, use="result")),
    ]
    b = BodyBuilder(name, given)
    memory = dict(zip((n for n, _ in given), b.parameters))
    rows = Lane(b, shape, memory)
    token = b.program(0, shape.tokens)
    number = b.cast(b.load(memory["ids"], (token,)), int64)
    row = b.atom("row", number, 0, shape.rows - 1)
    block, rows.lane = floor_divide(row, ROWS), modulo(row, ROWS)

    def step(s: Size, _: list[Node]) -> Sequence[Node]:
        values = _values(rows, block, s)
        b.store(memory["out"], b.cast(values, shape.dtype), (token, multiply(s, STEP)), (1,))
        return ()

    b.loop("step", 0, shape.columns // STEP, 1, step)
    return b.finish((shape.tokens,))


def _values(rows: Lane, block: Size, step: Size) -> Node:
    """The 32 values of a step."""
    b, layout = rows.b, rows.layout
    words = rows.steps_codes(block, step)
    found = [
        b.apply("bit_and", rows.shifted(words, 8 * i), b.constant(255, int32)) for i in range(4)
    ]
    codes = b.add(ops.transpose(b.add(ops.stack_rows(*found)), order=(1, 0)))  # (quads, 4)
    codes = b.apply("subtract", codes, b.constant(layout.centre, int32))
    groups = rows.groups(step)
    each = QUADS // len(groups)
    codes = b.add(ops.reshape(codes, shape=(len(groups), 4 * each)))
    parts_: list[Node] = []
    for g, group in enumerate(groups):
        part = b.add(ops.extract(codes, index=g))
        part = b.apply("multiply", rows.scale(block, step, group), b.cast(part, float32))
        if layout.minimum:
            part = b.apply("add", part, rows.scale(block, step, group, "minimum"))
        parts_.append(part)
    whole = parts_[0] if len(parts_) == 1 else b.add(ops.stack_rows(*parts_))
    return b.add(ops.reshape(whole, shape=(STEP,)))


__all__ = ["take"]
