"""One answer on its way in the HTTP process: tokens of the engine in, pieces of text out.

Invariant: a Generation ends once (`finish`), and its Listener hears nothing after that. What it
made so far is kept, so that an engine that was started anew can go on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ...models.tokens.detokenize import Detokenizer
from ..refused import Refused

MOST_DEATHS = 3  # of the engine, while it has this request

Top = tuple[tuple[int, float], ...]


class Listener(Protocol):
    """Who a Generation is made for."""

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """A token came; `more` is its logprob and the likeliest tokens, or None."""

    def ended(self, one: Generation) -> None:
        """It is finished, or failed."""


class Generation:
    """A request of the engine, and its text so far."""

    __slots__ = (
        "before",
        "begun",
        "cached",
        "deaths",
        "error",
        "finish",
        "first",
        "id",
        "index",
        "last",
        "leave",
        "listener",
        "made",
        "scores",
        "spec",
        "started",
        "text",
    )

    def __init__(
        self, spec: dict[str, Any], text: Detokenizer, listener: Listener, index: int
    ) -> None:
        self.id = -1
        self.spec, self.text, self.listener, self.index = spec, text, listener, index
        self.made: list[int] = []
        self.begun = time.perf_counter()
        self.started = self.first = self.last = self.before = 0.0  # 0: not yet
        self.finish: str | None = None
        self.error: Refused | None = None
        self.deaths = 0
        self.scores: list[Any] | None = None  # logprobs of the prompt, where they were asked for
        self.cached = 0  # tokens of the prompt that were in the prefix cache
        self.leave: Callable[[Generation], None] | None = None  # tells the engine to forget it

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec["tokens"])

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id that ended it, if one did that was asked for."""
        if self.finish != "stop":
            return None
        if self.text.stopped is not None:
            return self.text.stopped
        last = self.made[-1] if self.made else -1
        return last if last in self.spec.get("asked_stops", ()) else None

    def take(self, token: int, end: str, more: Any, now: float) -> None:
        """One more token; `end` says why it is the last."""
        if self.finish is not None:
            return
        self.made.append(token)
        self.last = now
        if end == "stop":  # the token that stops is no text
            text, token = "", -1
        else:
            text = self.text.add(token)
            if self.text.stopped is not None:
                end = "stop"
                if self.leave is not None:
                    self.leave(self)
        if end:
            text += self.text.finish()
            self.finish = end
        self.listener.piece(self, text, token, more)
        if end:
            self.listener.ended(self)

    def replay(self, tokens: list[int]) -> None:
        """Take tokens that another replica made."""
        more = (0.0, ()) if self.spec["sampling"].get("logprobs") else None
        for token in tokens:
            made, end = len(self.made) + 1, ""
            if token in self.spec["stop_tokens"] and made > self.spec["min_tokens"]:
                end = "stop"
            elif made >= self.spec["max_tokens"]:
                end = "length"
            self.take(token, end, more, self.begun)

    def fail(self, error: Refused) -> None:
        """End it in an error."""
        if self.finish is None:
            self.finish, self.error = "error", error
            self.listener.ended(self)

    # ---- an engine or a replica that died -------------------------------------------------------

    @property
    def resumes(self) -> bool:
        """Whether another engine can go on from what was made.

        Penalties count what is the answer's apart from the prompt, and a grammar stands where the
        answer is: both would begin anew.
        """
        if self.deaths > MOST_DEATHS:
            return False
        sampling = self.spec["sampling"]
        penalised = sampling.get("presence_penalty") or sampling.get("frequency_penalty")
        return not self.made or not (penalised or self.spec.get("constraint"))

    def rest(self) -> dict[str, Any]:
        """The request for what is still to be made."""
        made = len(self.made)
        spec = self.spec
        return {
            **spec,
            "scores": spec.get("scores", 0) if self.scores is None else 0,
            "id": self.id,
            "tokens": [*spec["tokens"], *self.made],
            "max_tokens": spec["max_tokens"] - made,
            "min_tokens": max(0, spec.get("min_tokens", 0) - made),
        }


__all__ = ["Generation", "Listener"]
