"""What is around the sums of `gpu_packed`, piece by piece: some rows of some tokens.

A consumer asks for what its pieces are added to before its first product, and adds up what the
factors of a norm follow from, so that neither waits behind the sums. What a norm takes of a result
leaves as the accumulator holds it: an element and a row at a time, beside the piece itself that
goes by shared memory.

Invariant: what is handed on is made of the result as it is stored.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ..matmul.ring import Moving
from .shape import Around, QuantisedShape
from .words import and_masks, factors, for_norm, surrounded, there


class Pieces:
    """The holes of the kernel; `kernel.own` and `kernel.piece` say which piece is meant."""

    def __init__(
        self, kernel: Moving, shape: QuantisedShape, around: Around, memory: dict[str, Any]
    ) -> None:
        self.kernel, self.shape, self.around, self.memory = kernel, shape, around, memory
        self.brought: dict[tuple[int, int], Any] = {}  # residuals that were asked for
        self.asked: dict[int, dict[str, Any]] = {}  # constants of a consumer's rows
        self.factor: Any = None  # of a norm, for each token of a consumer

    def add_up(self, own: int, start: Any, count: int) -> None:
        """The factors of a norm, for a consumer that brings out results."""
        if own < self.kernel.halves:
            squares = self.memory["squares"]
            self.factor = factors(squares, start, count, self.around, self.shape)

    def ask(self, size: tuple[int, int], where: Any) -> None:
        """Ask for what a piece is added to, and for what its rows have."""
        own, piece = self.kernel.own, self.kernel.piece
        if own < self.kernel.halves:
            self.brought[own, piece] = self.residual(size, where)
            self.asked[own] = self.asked.get(own) or self.constants(where[1])

    def residual(self, size: tuple[int, int], where: Any) -> Any:
        """What a piece is added to; None for nothing."""
        if not self.around.residual:
            return None
        (_, row, column), mask = where, self.mask_of(size[::-1], where)
        memory = self.memory["residual"]
        return tile.load(memory, (column, row), size[::-1], mask=mask).T

    def mask_of(self, size: tuple[int, ...], where: Any) -> Any:
        """Which elements (tokens, rows) of a piece there are; None for all."""
        (_, row, column), x = where, self.kernel.x
        return and_masks(there(size, 0, column, x.n), there(size, 1, row, x.m))

    def constants(self, row: Any) -> dict[str, Any]:
        """What each row of a piece has: a bias, the weight of a norm."""
        mask, names = there((64,), 0, row, self.kernel.x.m), {"bias", "next"} & {*self.memory}
        return {n: tile.load(self.memory[n], row, 64, mask=mask)[:, None] for n in sorted(names)}

    def surrounded(self, *given: Any) -> Any:
        """A piece of the results with what is around it."""
        *sums, where = given
        size, own, at = sums[0].shape, self.kernel.own, self.kernel.piece
        lines = self.asked.get(own) or self.constants(where[1])
        if (residual := self.brought.get((own, at))) is None:
            residual = self.residual(size, where)
        factor = None if self.factor is None else self.factor[at : at + size[1]][None, :]
        value = surrounded(sums, lines.get("bias"), residual, quick=True, factor=factor)
        if not self.around.hands_on:
            return value
        return self.hand_on(value.to(self.shape.dtype), lines["next"], where)

    def hand_on(self, value: Any, weight: Any, where: Any) -> Any:
        """A piece as it is stored, once what a norm takes of it is."""
        (_, row, column), mask = where, self.mask_of(value.shape[::-1], where)
        scaled, squares = for_norm(value, weight, self.around)
        tile.store(self.memory["scaled"], (column, row), scaled.T, mask=mask)
        sums, block = tile.sum(squares, 0)[:, None], row // 64
        mask = and_masks(
            there(sums.shape, 0, column, self.kernel.x.n),
            there(sums.shape, 1, block, self.kernel.x.m // 64),
        )
        tile.store(self.memory["sums"], (column, block), sums, mask=mask)
        return value
