"""One generation: what is asked for, and what a step made of it.

Invariant: a Request is whole and consistent when it is made (tokens, limits); whatever depends
on an engine (its context, its vocabulary) is checked where it is added.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..core.errors import Location, UserError, user_location
from .sampling_limits import Sampling


@dataclass(frozen=True)
class Request:
    """Tokens to go on from, how to pick the next ones, and when to stop."""

    id: Hashable
    tokens: tuple[int, ...]
    sampling: Sampling | None = None  # None: the likeliest token
    stop_tokens: frozenset[int] = frozenset()
    max_tokens: int = 16
    location: Location | None = field(default_factory=user_location, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "tokens", tuple(int(t) for t in self.tokens))
        put(self, "stop_tokens", frozenset(int(t) for t in self.stop_tokens))
        if not self.tokens:
            raise UserError(
                "a request has no tokens",
                op="Request",
                expected="at least one token",
                hint="an empty prompt needs at least the model's first token",
            )
        if (
            isinstance(self.max_tokens, bool)
            or not isinstance(self.max_tokens, int)
            or self.max_tokens < 1
        ):
            raise UserError(
                "bad max_tokens",
                op="Request",
                expected="a whole number from 1 on",
                got=self.max_tokens,
            )

    @property
    def most(self) -> int:
        """The most tokens it can come to, its prompt included."""
        return len(self.tokens) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Produced:
    """One token of a request; `finished` says why it was the last ("stop", "length", "error").

    A request that ends in an error has no token (-1).
    """

    id: Hashable
    token: int = -1
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their logprobs
    finished: str | None = None
    error: Exception | None = None


__all__ = ["Produced", "Request"]
