"""The logprobs of tokens that are there already, such as a prompt's, a part at a time.

Steps of the engine may come between two parts: a Scoring has a slot and pages of its own, and tells
the device before each part how long it is. Invariant: both are free again once it is closed; at the
level `invariant` the numbers are those that decoding gives, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.config import override
from .ledger import write
from .steps import SCORED

if TYPE_CHECKING:
    from .engine import Engine

Top = tuple[tuple[int, float], ...]


class Scoring:
    """Tokens that are scored: `step` until it is done, then close it."""

    def __init__(
        self, engine: Engine, tokens: Sequence[int], shown: int, slot: int, pages: list[int]
    ) -> None:
        self.engine, self.tokens, self.shown = engine, tokens, shown
        self.slot, self.pages = slot, pages
        self.done = 0  # tokens whose next one is scored
        self._parts: list[list[np.ndarray[Any, Any]]] = []

    def __enter__(self) -> Scoring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self) -> bool:
        """Score the next part; whether it was the last."""
        engine, end = self.engine, len(self.tokens) - 1
        given = self.tokens[self.done : min(self.done + SCORED, end)]
        following = self.tokens[self.done + 1 : self.done + 1 + len(given)]
        write(engine.cache.lengths, self.slot, np.full(1, self.done))
        with override(**engine.numerics):
            self._parts.append(engine.steps.score(self.slot, given, following, self.shown))
        self.done += len(given)
        return self.done == end

    def close(self) -> None:
        """Give back what it has; what it scored is kept."""
        pages, self.pages = self.pages, []
        if pages:
            self.engine.pool.give_back(pages)
            self.engine.batcher.slots.append(self.slot)

    @property
    def logprobs(self) -> np.ndarray[Any, Any]:
        """The logprob of each token but the first, as float32."""
        return np.concatenate([part[0] for part in self._parts])

    @property
    def top(self) -> list[Top]:
        """The likeliest tokens beside each of them, where they were asked for."""
        found: list[Top] = []
        for _, ids, values in self._parts:
            rows = zip(ids.tolist(), values.tolist(), strict=True)
            found += [tuple(zip(*row, strict=True)) for row in rows]
        return found


__all__ = ["Scoring"]
