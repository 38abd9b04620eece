"""Prompts whose logprobs were asked for: scored before their requests begin, a part at a time.

Between two parts the engine runs a step for everybody else. Invariant: one prompt is scored at a
time, in the order they came; what it has of the engine is free again whatever ends it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...generate.request import Request
from ...generate.sampling_limits import MOST_LOGPROBS
from ...generate.scoring import Scoring


class Scores:
    """Requests that wait for the logprobs of their prompts."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.waiting: deque[tuple[int, Request, int]] = deque()  # id, request, how many are shown
        self.current: Scoring | None = None  # of the first that waits

    @property
    def first(self) -> int:
        """The id of the one that is scored next."""
        return self.waiting[0][0]

    def add(self, id: int, request: Request, shown: int) -> None:
        """One more; so many of the likeliest tokens are shown beside each of its own."""
        self.waiting.append((id, request, shown))

    def step(self) -> tuple[Request, list[Any]] | None:
        """Score the next part; a request whose prompt is done, with [logprob, top] of each token
        but the first."""
        _, request, shown = self.waiting[0]
        if len(request.tokens) == 1:
            self.drop()
            return request, []
        if self.current is None:
            self.current = self.engine.scoring(
                request.tokens, MOST_LOGPROBS, request.adapter
            )  # compiled once
        if self.current is None or not self.current.step():
            return None
        found = zip(self.current.logprobs.tolist(), self.current.top, strict=True)
        self.drop()
        return request, [[logprob, top[:shown]] for logprob, top in found]

    def drop(self) -> None:
        """Forget the first, and free what it has."""
        self.waiting.popleft()
        if self.current is not None:
            self.current.close()
            self.current = None

    def cancel(self, id: int) -> None:
        """Forget one, wherever it stands."""
        if self.waiting and self.first == id:
            self.drop()
        else:
            self.waiting = deque(one for one in self.waiting if one[0] != id)


__all__ = ["Scores"]
