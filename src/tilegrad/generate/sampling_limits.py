"""How a request samples, checked when it is made; and which step a set of requests needs.

Invariant: a Sampling that exists is within its ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import UserError

COLD = 1e-5  # temperatures below are 0
MOST_LOGPROBS = 20
MOST_BIASED = 512  # tokens that a request may bias


@dataclass(frozen=True)
class Sampling:
    """What a request wants of its tokens; the first that applies comes first.

    To logits, in this order: those of tokens that a Constraint does not allow become -inf;
    `logit_bias` is added; tokens that the prompt or the output has are
    divided (where positive, else multiplied) by `repetition_penalty`; `frequency_penalty` is
    taken off as often as the output has the token, `presence_penalty` once if it has it; all is
    divided by `temperature`. Of the probabilities, `min_p` times the largest is the least that
    stays; then the `top_k` largest stay (0 or -1: all); then, of what is left, the fewest whose
    share is at least `top_p`. Of equals the one with the lower id comes first. At temperature 0
    the largest logit is taken. What is random about a draw is that of `seed` and of the token's
    position alone. `logprobs` asks for the logprob of the token, and of that many of
    the likeliest, under the logits as the model gave them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    logprobs: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0)
        _integer("top_k", self.top_k, -1, (1 << 31) - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _check_bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the largest is taken."""
        return self.temperature < COLD

    @property
    def penalised(self) -> bool:
        """Whether it matters which tokens there were."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Variant:
    """What a step has to do for its rows; a step is compiled for each that occurs."""

    draws: bool = False  # a row has a temperature
    penalties: bool = False
    bias: bool = False
    logprobs: int = 0  # of so many tokens a row
    masks: bool = False  # a row has a Constraint

    def joined(self, other: Variant) -> Variant:
        """What serves the rows of both."""
        return Variant(
            self.draws or other.draws,
            self.penalties or other.penalties,
            self.bias or other.bias,
            max(self.logprobs, other.logprobs),
            self.masks or other.masks,
        )


WITH_BIAS = Variant(draws=True, penalties=True, bias=True)


SERVED = (  # a server compiles these two, and uses the first that does what is needed
    Variant(draws=True),
    Variant(draws=True, penalties=True, bias=True, logprobs=MOST_LOGPROBS, masks=True),
)


def needs(samplings: Iterable[Sampling | None]) -> Variant:
    """The Variant that serves all of them: greedy, drawing, or all there is.

    Few are told apart, so that few are compiled: penalties and bias come together, and logprobs
    of 1 token or of the most.
    """
    found = Variant()
    for s in samplings:
        if s is not None:
            many = 0 if not s.logprobs else 1 if s.logprobs == 1 else MOST_LOGPROBS
            found = found.joined(Variant(draws=not s.greedy, logprobs=many))
            if s.penalised or s.logit_bias:
                found = found.joined(WITH_BIAS)
    return found


def _wrong(name: str, expected: str, got: Any) -> UserError:
    return UserError(f"{name} is out of range", op="Sampling", expected=expected, got=repr(got))


def _number(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    fits = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
        and not (above and value == low)
    )
    if not fits:
        end = "a finite number" if high == math.inf else f"at most {high:g}"
        raise _wrong(name, f"{'more than' if above else 'at least'} {low:g}, {end}", value)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, f"an int from {low} to {high}", value)


def _check_bias(bias: Any) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping) or len(bias) > MOST_BIASED:
        raise _wrong("logit_bias", f"a dict of at most {MOST_BIASED} tokens", bias)
    for token, value in bias.items():
        _integer("a token of logit_bias", token, 0, (1 << 31) - 1)
        if value != -math.inf:
            _number(f"logit_bias of {token}", value, -1e30, 1e30)


__all__ = [
    "COLD",
    "MOST_BIASED",
    "MOST_LOGPROBS",
    "SERVED",
    "WITH_BIAS",
    "Sampling",
    "Variant",
    "needs",
]
