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
from pathlib import Path
from typing import Any

from .. import nn
from ..core.errors import UserError
from ..exchange.folder import read_folder
from ..models.decoder.config import DecoderConfig
from ..models.decoder.eagle import EagleHead, is_eagle, refuse_other
from ..models.decoder.model import Decoder
from ..models.tokens.tokenizer import Tokenizer
from ..nn import init
from ..runtime.buffer import HOST
from .eagle import Eagle
from .engine import Engine
from .load import Weights, load_model
from .request import Request
from .sampling_limits import Variant
from .speculative import NGRAM, Guessed, Lookup, Proposer, Seen
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

    def attach(self, model: Decoder, cache: nn.PagedCache, tokens: int) -> None:
        """It reads tokens alone."""

    def saw(self, seen: Sequence[Seen]) -> None:
        """It reads tokens alone."""

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


def open_draft(
    wanted: Any, target: Decoder, tokenizer: Tokenizer, device: str, tell: Tell
) -> Decoder | EagleHead | None:
    """The model or head that `LLM(speculate=...)` asks for; None where guesses need none."""
    if wanted is None or (isinstance(wanted, str) and wanted == NGRAM):
        return None
    if isinstance(wanted, str | os.PathLike):
        head = load_head(wanted, target, device, tell)
        if head is not None:
            return head
        found = load_model(wanted, device, None, tell, None)
        model, other = found.model, found.tokenizer
    elif hasattr(wanted, "model") and hasattr(wanted, "tokenizer"):
        model, other = wanted.model, wanted.tokenizer
    else:
        raise UserError(
            "nothing can guess like that",
            op="LLM(speculate=...)",
            expected=f"{NGRAM!r}, an LLM, or the name or path of a model or of an EAGLE head",
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


def load_head(
    path: str | os.PathLike[str], target: Decoder, device: str, tell: Tell
) -> EagleHead | None:
    """The EAGLE head of a folder, in the dtype of the model it is for; None where it is another
    kind of model."""
    place = Path(path)
    if not place.is_dir() or not (place / "config.json").is_file():
        return None
    files = read_folder(place)
    if not is_eagle(files.tensors):
        return None
    config = DecoderConfig.from_huggingface({"model_type": "llama", **files.config})
    refuse_other(config, target.config)
    dtype = target.norm.weight.dtype
    with init.skipped():
        own = {"bias": "fc.bias" in files.tensors, "embeds": "embed_tokens.weight" in files.tensors}
        head = EagleHead(config, dtype, **own).requires_grad_(False).eval()
    head.load(Weights(files.tensors, dtype, tell))
    return head if device == HOST else head.to(device=device)


def proposer_of(draft: Decoder | EagleHead | None, context: int, **sizes: Any) -> Proposer:
    """What guesses, by a model or without one; `sizes` are arguments of its Engine."""
    if draft is None:
        return Lookup()
    if isinstance(draft, EagleHead):
        return Eagle(draft)
    return DraftModel(Engine(draft, context=min(context, draft.config.context), **sizes))


__all__ = ["DraftModel", "open_draft", "proposer_of"]
