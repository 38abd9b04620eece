"""What comes back from a model: an Answer, or Pieces of one while it is made.

Invariant: the texts of an answer's Pieces, put together, are the text of the Answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens of one answer."""

    first: float = 0.0  # until the first token: waiting and the prompt
    total: float = 0.0
    prompt_tokens: int = 0
    made_tokens: int = 0

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt a second."""
        return self.prompt_tokens / self.first if self.first else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        rest = self.total - self.first
        return (self.made_tokens - 1) / rest if rest > 0 and self.made_tokens > 1 else 0.0


@dataclass(frozen=True)
class Answer:
    """A whole answer; `finish` is "stop", "length" or "cancelled"."""

    text: str
    tokens: tuple[int, ...] = field(repr=False)  # without the one that ended it
    finish: str
    prompt_tokens: int
    timing: Timing = field(repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)  # where they were asked for
    top: tuple[tuple[tuple[int, float], ...], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Piece:
    """What one more token adds to an answer; the last one says how it ended."""

    text: str
    token: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


__all__ = ["Answer", "Piece", "Timing"]
