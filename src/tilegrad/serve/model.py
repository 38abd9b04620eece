"""What the HTTP process knows of the model: its words, its limits, its defaults.

Only the tokenizer is read here; weights are the engine process's. Invariant: once the engine is
ready all of it is known, and it is the same for every engine that is started later.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UserError
from ..exchange.fetch import open_model
from ..generate.grammar import Grammars
from ..generate.load import config_of, ends_of, tokenizer_of
from ..models.tokens.detokenize import Detokenizer
from ..models.tokens.tokenizer import Tokenizer
from ..runtime.bundle import is_bundle
from .refused import Refused, refused_by


class CachedPieces:
    """A Tokenizer as a Detokenizer sees it, with the bytes of tokens kept once they were met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.strips_first_space = tokenizer, tokenizer.strips_first_space
        self.shown: dict[int, bytes] = {}
        self.all: dict[int, bytes] = {}

    def piece(self, token: int, *, show_special: bool = False) -> bytes:
        """The bytes of one token."""
        known = self.all if show_special else self.shown
        found = known.get(token)
        if found is None:
            found = known[token] = self.tokenizer.piece(token, show_special=show_special)
        return found


class ServedModel:
    """The model of a server."""

    def __init__(self, name: str, tokenizer: Tokenizer, sampling: dict[str, Any]) -> None:
        self.name = name
        self.adapters: tuple[str, ...] = ()  # as the engine has them
        self.tokenizer, self.pieces = tokenizer, CachedPieces(tokenizer)
        self.sampling = sampling  # where neither the client nor the model's files say
        self.context = self.vocabulary = self.requests = 1
        self.defaults: dict[str, Any] = dict(sampling)
        self.facts: dict[str, Any] = {}
        self.grammars = Grammars(tokenizer, len(tokenizer))

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may call the model: its own name, and those of its adapters."""
        return (self.name, *self.adapters)

    def learn(self, facts: dict[str, Any]) -> None:
        """Take what the engine says of itself when it is ready."""
        self.facts = facts
        self.context, self.vocabulary = facts["context"], facts["vocabulary"]
        self.requests, self.adapters = facts["requests"], tuple(facts["adapters"])
        self.grammars = Grammars(self.tokenizer, self.vocabulary)
        said = facts["defaults"]
        self.defaults = dict(said) if "temperature" in said else {**self.sampling, **said}

    def detokenizer(
        self, stop: tuple[str, ...], include_stop: bool, show_special: bool, least: int
    ) -> Detokenizer:
        """What makes the text of one answer."""
        return Detokenizer(
            self.pieces,  # type: ignore[arg-type]
            stop=stop,
            include_stop=include_stop,
            show_special=show_special,
            minimum_tokens=least,
            continues=True,
        )

    def token_text(self, token: int) -> str:
        """One token as text, special ones too."""
        return self.pieces.piece(token, show_special=True).decode("utf-8", "replace")

    def encode(self, text: str, param: str, most: int, **choices: Any) -> list[int]:
        """Ids of a text; one that can never fit is refused before it is looked at."""
        if len(text) > self.context * most:
            raise Refused(
                f"'{param}' is too long for a context of {self.context} tokens",
                param=param,
                code="context_length_exceeded",
            )
        try:
            return self.tokenizer.encode(text, **choices)
        except UserError as error:
            raise refused_by(error, param) from None

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Any, most: int, **flags: Any
    ) -> list[int]:
        """Ids of a chat by the model's template."""
        if sum(len(str(m)) for m in messages) > self.context * most:
            raise Refused(
                f"'messages' are too long for a context of {self.context} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        if self.tokenizer.template_text is None:
            raise Refused("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self.tokenizer.encode_chat(messages, tools=tools, **flags)
        except UserError as error:
            raise refused_by(error, "messages") from None


def read_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a model that is on this machine."""
    if is_bundle(path):
        from ..generate.bundle import open_bundled

        bundled = open_bundled(path)
        path = str(bundled.model) if bundled is not None else path
    files = open_model(path, weights=False)
    return tokenizer_of(files, ends_of(files, config_of(files)))


__all__ = ["ServedModel", "read_tokenizer"]
