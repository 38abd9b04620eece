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
        self.factor: Any = None  # of a norm, for each token of a consumer

    def add_up(self, own: int, start: Any, count: int) -> None:
        """The factors of a norm, for a consumer that brings out results."""
        if own < self.kernel.halves:
            squares = self.memory["squares"]
            self.factor = factors(squares, start, count, self.around, self.shape)

    def ask(self, size: tuple[int, int], where: Any) -> None:
        """Ask for what a piece is added to."""
        if self.kernel.own < self.kernel.halves:
            self.brought[self.kernel.own, self.kernel.piece] = self.residual(size, where)

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

    def line(self, name: str, row: Any) -> Any:
        """A constant of each row of a piece."""
        mask = there((64,), 0, row, self.kernel.x.m)
        return tile.load(self.memory[name], row, 64, mask=mask)[:, None]

    def surrounded(self, *given: Any) -> Any:
        """A piece of the results with what is around it."""
        *sums, where = given
        size, at = sums[0].shape, self.kernel.piece
        bias = self.line("bias", where[1]) if self.around.bias else None
        if (residual := self.brought.get((self.kernel.own, at))) is None:
            residual = self.residual(size, where)
        factor = None if self.factor is None else self.factor[at : at + size[1]][None, :]
        value = surrounded(sums, bias, residual, quick=True, factor=factor)
        return self.hand_on(value.to(self.shape.dtype), where) if self.around.hands_on else value

    def hand_on(self, value: Any, where: Any) -> Any:
        """A piece as it is stored, once what a norm takes of it is."""
        (_, row, column), mask = where, self.mask_of(value.shape[::-1], where)
        scaled, squares = for_norm(value, self.line("next", row), self.around)
        tile.store(self.memory["scaled"], (column, row), scaled.T, mask=mask)
        sums, block = tile.sum(squares, 0)[:, None], row // 64
        mask = and_masks(
            there(sums.shape, 0, column, self.kernel.x.n),
            there(sums.shape, 1, block, self.kernel.x.m // 64),
        )
        tile.store(self.memory["sums"], (column, block), sums, mask=mask)
        return value
