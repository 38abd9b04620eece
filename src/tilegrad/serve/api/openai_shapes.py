"""What OpenAI's routes share in their answers: usage, logprobs, reasons to end.

Invariant: numbers in an answer are finite; a logprob of minus infinity is written as -9999.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.generation import Generation
from ..model import ServedModel

LEAST_LOGPROB = -9999.0


def finite(value: float) -> float:
    """A logprob that JSON can hold."""
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB


def usage_of(ones: Sequence[Generation], n: int) -> dict[str, Any]:
    """Tokens of a response: prompts are counted once, answers all."""
    prompt = sum(one.prompt for one in ones[::n])
    made = sum(len(one.made) for one in ones)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in ones[::n])},
    }


def chat_logprob(model: ServedModel, token: int, more: Any, shown: int) -> dict[str, Any]:
    """The logprob of a token in a chat."""
    logprob, top = more

    def one(id: int, value: float) -> dict[str, Any]:
        data = model.pieces.piece(id, show_special=True)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(value), "bytes": list(data)}

    return {
        **one(token, logprob),
        "top_logprobs": [one(id, value) for id, value in top[:shown]],
    }


class CompletionLogprobs:
    """The logprobs of a completion: lists beside each other, with where each token's text is.

    A token without one (the first of a prompt) has null.
    """

    def __init__(self, model: ServedModel, shown: int, offset: int) -> None:
        self.model, self.shown, self.offset = model, shown, offset

    def of(self, tokens: Sequence[tuple[int, Any]]) -> dict[str, Any]:
        """The object for some tokens that follow one another."""
        texts = [self.model.token_text(token) for token, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if more is None else finite(more[0]) for _, more in tokens],
            "top_logprobs": [None if more is None else self._top(more[1]) for _, more in tokens],
            "text_offset": offsets,
        }

    def _top(self, top: Any) -> dict[str, float]:
        return {self.model.token_text(id): finite(value) for id, value in top[: self.shown]}

    def of_prompt(self, one: Generation) -> list[tuple[int, Any]]:
        """The tokens of a prompt that was scored; the first has no logprob. Those of an answer
        that another replica began are not known any more, and were sent."""
        tokens = one.spec["tokens"]
        scores = [None] * (len(tokens) - 1) if one.scores is None else one.scores
        return list(zip(tokens, [None, *scores], strict=True))


__all__ = ["CompletionLogprobs", "chat_logprob", "usage_of"]
