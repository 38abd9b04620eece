"""Guesses of a smaller model, and which Proposer an `LLM` was asked for.

The smaller model has an Engine of its own. A request's tokens are a prompt there, of which the
prefix cache knows most; it draws with the request's own seed and positions, so where both models
think alike their draws are mostly the same, at any temperature.
Invariant: both models have the same words; a guess costs time at most.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ..core.errors import UserError
from ..models.decoder.model import Decoder
from ..models.tokens.tokenizer import Tokenizer
from .engine import Engine
from .load import load_model
from .request import Request
from .sampling_limits import Variant
from .speculative import NGRAM, Guessed, Lookup, Proposer
from .steps import Tell


class DraftModel:
    """Guesses what a smaller model would say."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = count()

    def guess(self, works: Sequence[Guessed], most: Sequence[int]) -> list[list[int]]:
        """The next tokens of each by the smaller model."""
        asked: dict[int, int] = {}  # the number of a request, its place among the works
        for place, (work, tokens) in enumerate(zip(works, most)):
            if tokens > 0 and self._takes(work, tokens):
                number = next(self._numbers)
                self.engine.add(_request(number, work, tokens))
                asked[number] = place
        found: list[list[int]] = [[] for _ in works]
        try:
            while self.engine.busy:
                for made in self.engine.step():
                    if made.error is None:
                        found[asked[made.id]].append(made.token)  # type: ignore[index]
        finally:
            for number in asked:  # those that an interrupt left
                self.engine.cancel(number)
        return found

    def _takes(self, work: Guessed, tokens: int) -> bool:
        """Whether the smaller model can read a request and go on so far."""
        bias = (work.request.sampling and work.request.sampling.logit_bias) or ()
        fits = len(work.known) + tokens <= self.engine.context
        return fits and max(*work.known, *bias, 0) < self.engine.config.vocabulary

    def prepare(self, tell: Tell, variants: Sequence[Variant]) -> None:
        """Make the steps of the smaller model."""
        self.engine.prepare(tell, variants)

    def forget(self, work: Guessed) -> None:
        """Nothing is kept but pages, which go as others need them."""


def _request(number: int, work: Guessed, tokens: int) -> Request:
    sampling = work.request.sampling
    return Request(
        number,
        tuple(work.known),
        None if sampling is None else replace(sampling, logprobs=0),
        max_tokens=tokens,
        salt=work.request.salt,
    )


def open_draft(wanted: Any, tokenizer: Tokenizer, device: str, tell: Tell) -> Decoder | None:
    """The smaller model that `LLM(speculate=...)` asks for; None where guesses need none."""
    if wanted is None or (isinstance(wanted, str) and wanted == NGRAM):
        return None
    if isinstance(wanted, str | os.PathLike):
        found = load_model(wanted, device, None, tell, None)
        model, other = found.model, found.tokenizer
    elif hasattr(wanted, "model") and hasattr(wanted, "tokenizer"):
        model, other = wanted.model, wanted.tokenizer
    else:
        raise UserError(
            "nothing can guess like that",
            op="LLM(speculate=...)",
            expected=f"{NGRAM!r}, an LLM, or the name or path of a model",
            got=type(wanted).__name__,
        )
    if other.texts != tokenizer.texts:
        raise UserError(
            "the model that guesses has other words",
            op="LLM(speculate=...)",
            expected=f"the {len(tokenizer)} tokens of the model",
            got=f"{len(other)} tokens, not the same",
        )
    return model


def proposer_of(draft: Decoder | None, context: int, **sizes: Any) -> Proposer:
    """What guesses, by a model or without one; `sizes` are arguments of its Engine."""
    if draft is None:
        return Lookup()
    return DraftModel(Engine(draft, context=min(context, draft.config.context), **sizes))


__all__ = ["DraftModel", "open_draft", "proposer_of"]
