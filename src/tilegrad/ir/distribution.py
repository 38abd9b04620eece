"""Distributions: which thread holds which element of a Tile, and in which of its registers.

A Distribution is a Layout with three modes, (warp, lane, register), to the row-major index of an
element in the Tile. Invariant: the Layout has exactly these three modes and stays within the
Tile; where it is not injective, elements are held by several threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ..core.errors import UserError
from .layout import Layout, inverse, is_injective


@dataclass(frozen=True, slots=True)
class Distribution:
    """A Tile's `shape` and the Layout from (warp, lane, register) to its elements."""

    shape: tuple[int, ...]
    layout: Layout

    def __post_init__(self) -> None:
        if self.layout.rank != 3 or not self.layout.cosize <= prod(self.shape):
            raise UserError(
                "bad Distribution",
                expected=f"a Layout of (warp, lane, register) within {prod(self.shape)} elements",
                got=self.layout,
            )

    @property
    def warps(self) -> int:
        """Number of warps."""
        return int(self.layout[0].size)

    @property
    def lanes(self) -> int:
        """Number of lanes of a warp."""
        return int(self.layout[1].size)

    @property
    def registers(self) -> int:
        """Elements that each thread holds."""
        return int(self.layout[2].size)

    def coordinate(self, warp: int, lane: int, register: int) -> tuple[int, ...]:
        """The element of the Tile that a register of a thread holds."""
        index = int(self.layout(warp, lane, register))
        found: list[int] = []
        for size in reversed(self.shape):
            found.append(index % size)
            index //= size
        return tuple(reversed(found))

    def owner(self, *coordinate: int) -> tuple[int, int, int]:
        """The (warp, lane, register) that holds an element; each must have one holder."""
        if not self.is_exact:
            raise UserError("owner: elements have no holder or several", got=self)
        index = 0
        for c, size in zip(coordinate, self.shape):
            index = index * size + c
        thread = int(inverse(self.layout)(index))
        warp, rest = thread % self.warps, thread // self.warps
        return warp, rest % self.lanes, rest // self.lanes

    @property
    def is_exact(self) -> bool:
        """Whether every element of the Tile is held exactly once."""
        count = self.warps * self.lanes * self.registers
        return count == prod(self.shape) and is_injective(self.layout)

    def elements(self) -> np.ndarray:
        """Row-major element indices, an array (warp, lane, register)."""
        return self.layout.offsets()

    def vectors(self) -> Iterator[tuple[int, int]]:
        """(first register, count) of each run of registers that are neighbours in a row."""
        row = self.elements()[0, 0]
        start = 0
        for register in range(1, len(row) + 1):
            if register == len(row) or row[register] != row[register - 1] + 1:
                yield start, register - start
                start = register

    def to_text(self) -> str:
        """The text, which `from_text` reads back."""
        return "x".join(map(str, self.shape)) + " " + self.layout.to_text()

    def __repr__(self) -> str:
        return self.to_text()

    @staticmethod
    def from_text(text: str) -> Distribution:
        """The Distribution that a text describes."""
        sizes, _, layout = text.partition(" ")
        return Distribution(tuple(map(int, sizes.split("x"))), Layout.from_text(layout))


def wgmma_accumulator(columns: int) -> Distribution:
    """D of a Hopper wgmma m64nN: 64 rows by N columns over the four warps of a warpgroup.

    row = 16 warp + lane / 4 + 8 ((i >> 1) & 1), column = 8 (i >> 2) + 2 (lane % 4) + (i & 1).
    """
    if columns % 8 or not 8 <= columns <= 256:
        raise UserError("wgmma: bad N", expected="a multiple of 8 in 8..256", got=columns)
    n = columns
    layout = Layout((4, (4, 8), (2, 2, n // 8)), (16 * n, (2, n), (1, 8 * n, 8)))
    return Distribution((64, n), layout)


def mma_accumulator(rows: int, columns: int, warps: tuple[int, int]) -> Distribution:
    """C of mma.m16n8 (sm_80) repeated over a Tile, its warps in a grid of rows and columns.

    Each warp owns a contiguous part of the Tile; registers run over the columns of one m16n8
    block (pairs, then the row 8 below), then over blocks along the columns, then along the rows.
    """
    down, across = warps
    if rows % (16 * down) or columns % (8 * across):
        raise UserError(
            "mma: the Tile does not fit the warps",
            expected=f"multiples of {16 * down} by {8 * across}",
            got=f"{rows} by {columns}",
        )
    high, wide, n = rows // down, columns // across, columns
    warp = ((across, down), (wide, high * n))
    register = ((2, 2, wide // 8, high // 16), (1, 8 * n, 8, 16 * n))
    layout = Layout((warp[0], (4, 8), register[0]), (warp[1], (2, n), register[1]))
    return Distribution((rows, columns), layout)


def rows_of_vectors(
    rows: int, columns: int, warps: int, vector: int, lanes: int = 32
) -> Distribution:
    """A Tile read or written in rows: each thread holds vectors, neighbours hold neighbours."""
    threads = warps * lanes
    if columns % vector or rows * columns % (threads * vector):
        raise UserError(
            "the Tile does not fit the threads",
            expected=f"a multiple of {threads} vectors of {vector}",
            got=f"{rows} by {columns}",
        )
    count = rows * columns // (threads * vector)
    step = lanes * vector
    layout = Layout((warps, lanes, (vector, count)), (step, vector, (1, warps * step)))
    return Distribution((rows, columns), layout)
