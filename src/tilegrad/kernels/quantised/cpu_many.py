"""Products of many tokens with quantised weights on CPUs by integer dot products of bytes.

`Take` writes the lines of all tokens (`cpu_tokens`), some in each program. A program of `Many` has
some blocks of 16 rows; it unpacks a block once for as many tokens as the cache holds lines of.
Invariant: sums are those of `cpu_decode.Decode`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...core.target import Target
from ...ir.symbol import Size, ceil_divide, high
from ...tile.build import Body
from .cpu_decode import Decode, Lines, Weights
from .cpu_parts import ALL_SIGNS, QUADS, ROWS, STEP
from .cpu_tokens import Line
from .shape import QuantisedShape, parameters
from .words import BYTES

TAKEN_TOKENS = 8  # whose lines a program makes, where there are many
MANY_TOKENS = 48  # that are taken for a block of rows at a time, where there are many


class Panel(Weights):
    """A block of rows, unpacked once: a byte for each code, scales and minima in float32.

    Where bytes have a sign, codes are their values."""

    def __init__(self, weights: Weights, signed: bool) -> None:
        super().__init__(weights.shape, {}, signed)
        self.stored, self.signed = weights, signed
        if signed:
            self.layout = replace(self.layout, centre=0)

    def allocate(self) -> None:
        """Scratch for it."""
        columns, layout = self.shape.columns, self.layout
        self.memory["codes"] = tile.scratch((columns // 4, ROWS), int32)
        for name in ("scale", "minimum") if layout.least else ("scale",):
            self.memory[name] = tile.scratch((columns // layout.group, ROWS))

    @tile.function
    def unpack(self, block: Any) -> None:
        """Write it."""
        centre = self.stored.layout.centre if self.signed else 0
        for step in tile.range(self.shape.columns // STEP):
            for j, quad in enumerate(self.stored.quads(block, step)):
                if centre:
                    quad = (quad | ALL_SIGNS) - centre * BYTES ^ ALL_SIGNS
                tile.store(self.memory["codes"], (step * QUADS + j, 0), quad)
            for group, *values in self.stored.groups(block, step):
                for name, value in zip(("scale", "minimum"), values):
                    if value is not None:
                        tile.store(self.memory[name], (group, 0), value)

    def near(self, block: Any, step: Any, ahead: int) -> None:
        """All of it is."""

    def quads(self, block: Any, step: Any) -> list[Any]:
        """The codes of a step."""
        return [self.line("codes", step * QUADS + j) for j in range(QUADS)]

    def scale(self, block: Any, step: Any, group: Any, name: str = "scale") -> Any:
        """Scale (or minimum) of a group of rows."""
        return self.line(name, group)


class Take(Lines):
    """Writes the Body that makes lines of tokens, some for each program."""

    def __init__(self, shape: QuantisedShape, target: Target) -> None:
        x, *_ = parameters(shape, ())
        line = Line(shape.columns, shape.layout)
        given = [x, ("split", line.memory(shape.tokens, "result"))]
        super().__init__(shape, target, given, "quantised_split")
        self.line, self.lines = line, self.memory["split"]
        self.programs = ceil_divide(shape.tokens, TAKEN_TOKENS)

    @tile.function
    def work(self, program: Any) -> None:
        """Token by token."""
        start, last = program * TAKEN_TOKENS, high(self.shape.tokens) - 1
        stop = tile.minimum(start + TAKEN_TOKENS, self.shape.tokens)
        for token in tile.range(start, stop, bounds=(0, last)):
            self.take(token)


class Many(Decode):
    """The kernel for many tokens, whose lines `Take` wrote."""

    def __init__(self, shape: QuantisedShape, target: Target) -> None:
        super().__init__(shape, target, MANY_TOKENS, "quantised_many", split=True)
        self.in_registers -= self.in_registers == 4  # beside codes that are read at a time
        self.lines = self.memory["split"]
        self.weights = self.panel = Panel(self.weights, self.signed)
        self.layout = self.panel.layout
        self.turns = [range(first, first + 1) for first in self.turns[0]]

    def allocate_scratch(self) -> None:
        """The panel."""
        self.panel.allocate()

    def take_all(self) -> None:
        """They are there."""

    def row(self, token: Any) -> Any:
        """Where the line of a token at work is."""
        return self.first + token

    @tile.function
    def rows(self, block: Any) -> None:
        """Unpack a block, then multiply all tokens by it."""
        self.panel.unpack(self.base + block)
        super().rows(block)

    def lots(self, tokens: Sequence[Any]) -> list[Sequence[Any]]:
        """All of them: each reads all codes."""
        return [tokens]


def many(shape: QuantisedShape, target: Target, share: Size = 1) -> list[Body]:
    """The kernel for many tokens: Bodies whose parameters are named x, split, the parts, out0."""
    return [kernel(shape, target).build(share) for kernel in (Take, Many)]
