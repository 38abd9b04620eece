"""Tokens as whole numbers of two bytes, or one: what products of bytes on CPUs read.

A token is a line of words of 32 bits. First come its columns, four to a word: all high bytes, then
all low ones, both signed, for 256 * high + low; with the setting `dots="int8"` a byte is all. Then
come a scale for every step of 32 columns, and for every group what codes stand above their values
(`centre`) times the sum of the group, and that sum in float32, where a Layout has them. Invariant:
a line is the same whoever writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.config import config
from ...core.dtype import float32, int8, int32
from ...ir.symbol import Size, round_up
from ...ir.types import Memory
from .cpu_parts import STEP
from .layout import Layout

LIMITS = (127, 32639)  # the largest that one signed byte holds, and two: 127 * 256 + 127
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000  # 1.5 * 2**23: its low bits count whole numbers
MAGNITUDE = 0x7FFFFFFF  # bits of a float32 without its sign
TINY, LARGE = 2.0**-60, 2.0**60


@dataclass
class Line:
    """Where everything of a token lies in its line."""

    columns: int
    layout: Layout

    def __post_init__(self) -> None:
        self.depth = 1 if config().dots == "int8" else 2  # bytes of an element
        groups = self.columns // self.layout.group
        self.scales = self.depth * self.columns // 4
        self.aboves = self.scales + self.columns // STEP
        self.sums = self.aboves + (groups if self.layout.centre else 0)
        self.width = round_up(self.sums + (groups if self.layout.least else 0), 16)

    def memory(self, tokens: Size, use: str) -> Memory:
        """Lines of tokens as a parameter."""
        return Memory((tokens, self.width), int32, use=use)

    # ---- writing ----------------------------------------------------------------------------

    def put(self, lines: Any, row: Any, step: Any, x: Any) -> None:
        """Write a step of a token, 32 elements."""
        bits = tile.bitcast(x, int32) & MAGNITUDE
        most = tile.bitcast(tile.max(bits, 0), float32)  # in the order of sizes; nan is largest
        small = most < TINY
        factor, back = (tile.where(small, f, 1.0) for f in (LARGE, TINY))
        near = most * factor
        limit = LIMITS[self.depth - 1]
        inverse = limit / tile.where(near == 0.0, 1.0, near)
        whole = tile.bitcast(x * factor * inverse + MAGIC, int32) - MAGIC_BITS
        scale = near * (1 / limit) * back
        tile.store(lines, (row, self.scales + step), tile.bitcast(scale, int32))
        self.put_sums(lines, row, step, whole, scale)
        for part, value in enumerate([whole + 128 >> 8, whole][-self.depth :]):
            at = part * self.columns // 4 + step * (STEP // 4)
            tile.store(lines, (row, at), tile.words(value.to(int8)))

    def put_sums(self, lines: Any, row: Any, step: Any, whole: Any, scale: Any) -> None:
        """Sums of the groups of a step, of the whole numbers: what a token was rounded by then
        counts as much as the values of weights, and not as much as their codes."""
        size = self.layout.group
        if not (self.layout.centre or self.layout.least):
            return
        at, groups = step * (STEP // size), STEP // size
        total = tile.sum(tile.reshape(whole, (groups, size)), 1)  # (groups,)
        if self.layout.centre:
            tile.store(lines, (row, self.aboves + at), total * -self.layout.centre)
        if self.layout.least:
            value = tile.bitcast(total.to(float32) * scale, int32)
            tile.store(lines, (row, self.sums + at), value)

    # ---- reading ----------------------------------------------------------------------------

    def words(self, lines: Any, row: Any, part: int, index: Any, count: Any = ()) -> Any:
        """A word of four columns of the high or the low bytes, or several."""
        return tile.load(lines, (row, part * self.columns // 4 + index), count)

    def scale(self, lines: Any, row: Any, step: Any) -> Any:
        """The scale of a step."""
        return tile.bitcast(tile.load(lines, (row, self.scales + step)), float32)

    def above(self, lines: Any, row: Any, group: Any) -> Any:
        """What is added to the products with the codes of a group."""
        return tile.load(lines, (row, self.aboves + group))

    def sum(self, lines: Any, row: Any, group: Any) -> Any:
        """The sum of a group."""
        return tile.bitcast(tile.load(lines, (row, self.sums + group)), float32)
