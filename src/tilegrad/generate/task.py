"""One answer on its way: tokens in, Pieces of text out.

Invariant: once a Task is finished nothing more comes out of it, and its text ends before the stop
string or the token that ended it. One that failed has the error instead of a last Piece.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from ..models.tokens.tokenizer import Tokenizer
from .answer import Answer, Piece, Timing
from .request import Produced, Request


class Task:
    """A Request, its text so far, and the Pieces that nobody took yet."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.request = request
        self.text = tokenizer.detokenizer(
            stop=stop, continues=True, minimum_tokens=request.min_tokens
        )
        self.pieces: deque[Piece] = deque()  # not taken yet
        self.taken: list[Piece] = []
        self.begun = self.first = self.last = time.perf_counter()
        self.finish: str | None = None
        self.error: Exception | None = None  # why it failed

    @property
    def has_news(self) -> bool:
        """Whether somebody who waits for it has something to do."""
        return bool(self.pieces or self.finish)

    def take(self, produced: Produced) -> None:
        """One more token, or the error that ends it."""
        if produced.error is not None:
            self.fail(produced.error)
        if self.finish:
            return
        self.last = time.perf_counter()
        if not self.taken:
            self.first = self.last
        finish, text = produced.finished, ""
        if finish != "stop":  # the token that stops is no text
            text = self.text.add(produced.token)
            if self.text.stopped is not None:
                finish = "stop"
        if finish:
            text += self.text.finish()
        self._put(Piece(text, produced.token, finish, produced.logprob, produced.top))

    def cancel(self) -> None:
        """End it where it is."""
        if not self.finish:
            self._put(Piece(self.text.finish(), -1, "cancelled"))

    def fail(self, error: Exception) -> None:
        """End it in an error; what came before it stays."""
        if not self.finish:
            self.finish, self.error = "error", error

    def _put(self, piece: Piece) -> None:
        self.finish = piece.finish
        self.pieces.append(piece)
        self.taken.append(piece)

    def answer(self) -> Answer:
        """What came out."""
        last = self.taken[-1].token if self.taken else 0
        stopped = self.finish == "stop" and last in self.request.stop_tokens
        made = self.taken[:-1] if last < 0 or stopped else self.taken
        asked = getattr(self.request.sampling, "logprobs", 0)
        count = len(self.request.tokens)
        return Answer(
            "".join(p.text for p in self.taken),
            tuple(p.token for p in made),
            self.finish or "cancelled",
            count,
            Timing(
                self.first - self.begun,
                self.last - self.begun,
                count,
                sum(p.token >= 0 for p in self.taken),
            ),
            tuple(p.logprob or 0.0 for p in made) if asked else (),
            tuple(p.top for p in made) if asked else (),
        )


__all__ = ["Task"]
