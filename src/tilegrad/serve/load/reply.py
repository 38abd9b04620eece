"""What one request of a load came to: when its parts came, how many tokens, or why it failed.

Invariant: times are seconds of one clock; a Reply with an error counts in no latency.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Reply:
    """One request of a load, as the client saw it."""

    begun: float
    asked_tokens: int  # the answer's length that was asked for
    parts: list[float] = field(default_factory=list)  # when each part with a token came
    end: float = 0.0  # when the last token came, or the error
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, from the endpoint's cache
    counted: bool = False  # the endpoint said how many tokens; else parts were counted
    status: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds until the first token: TTFT."""
        return self.parts[0] - self.begun if self.parts else 0.0

    @property
    def whole(self) -> float:
        """Seconds from the request to its last token: end to end."""
        return self.end - self.begun

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first: TPOT; None for an answer of one token."""
        if self.answer_tokens < 2:
            return None
        return (self.whole - self.first) / (self.answer_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between parts that came after each other: ITL."""
        return [after - before for before, after in pairwise(self.parts)]


__all__ = ["Reply"]
