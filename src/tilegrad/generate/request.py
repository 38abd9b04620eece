"""One generation: what is asked for, and what a step made of it.

Invariant: a Request is whole and consistent when it is made (tokens, limits); whatever depends
on an engine (its context, its vocabulary) is checked where it is added.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import Location, UserError, user_location
from .constraint import Constraint
from .sampling_limits import MOST_BIASED, WITH_BIAS, Sampling, Variant, needs


@dataclass(frozen=True)
class Request:
    """Tokens to go on from, how to pick the next ones, and when to stop."""

    id: Hashable
    tokens: tuple[int, ...]
    sampling: Sampling | None = None  # None: the likeliest token
    stop_tokens: frozenset[int] = frozenset()
    max_tokens: int = 16
    priority: int = 0  # lower runs first; equals in the order they came
    salt: str = ""  # only requests with the same salt share pages of a prefix
    min_tokens: int = 0  # stop tokens are not picked before so many tokens
    constraint: Constraint | None = None  # what the answer has to look like
    adapter: str = ""  # of the engine's, by name; none
    location: Location | None = field(default_factory=user_location, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "tokens", tuple(map(int, self.tokens)))
        put(self, "stop_tokens", frozenset(map(int, self.stop_tokens)))
        if not self.tokens:
            raise UserError(
                "a request has no tokens",
                op="Request",
                expected="at least one token",
                hint="an empty prompt needs at least the model's first token",
            )
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("priority", self.priority, None, None)
        for name in ("salt", "adapter"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise UserError(
                    f"bad {name}", op="Request", expected="text", got=type(value).__name__
                )
        if self.constraint is not None and self.min_tokens:
            raise UserError(
                "a constrained answer ends where its grammar does",
                op="Request",
                expected="no min_tokens",
                got=self.min_tokens,
            )
        if self.held_back and len(self.held_back) + len(self._bias) > MOST_BIASED:
            raise UserError(
                "min_tokens holds back too many stop tokens",
                op="Request",
                expected=f"at most {MOST_BIASED} with those of logit_bias",
                got=len(self.held_back) + len(self._bias),
            )

    @property
    def _bias(self) -> Mapping[int, float]:
        return (self.sampling and self.sampling.logit_bias) or {}

    @property
    def held_back(self) -> frozenset[int]:
        """Tokens that are not picked before `min_tokens` tokens."""
        return self.stop_tokens if self.min_tokens else frozenset()

    @property
    def variant(self) -> Variant:
        """What a step has to do for it."""
        found = needs([self.sampling]).joined(WITH_BIAS if self.held_back else Variant())
        return found.joined(Variant(masks=self.constraint is not None))

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
    cached: int = 0  # tokens of the prompt that were in the prefix cache


def _whole(name: str, value: Any, least: int | None, most: int | None) -> None:
    """Refuse what is no whole number within limits."""
    fits = isinstance(value, int) and not isinstance(value, bool)
    if fits and (least is None or value >= least) and (most is None or value <= most):
        return
    limits = [f"from {least} on"] * (least is not None) + [f"at most {most}"] * (most is not None)
    raise UserError(
        f"bad {name}", op="Request", expected=" ".join(["a whole number", *limits]), got=value
    )


__all__ = ["Produced", "Request"]
