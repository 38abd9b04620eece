"""The tokenizer of a model that came without one: it works on ids, and text is refused.

Invariant: whatever needs words is a UserError that says where they were looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ...core.errors import UserError
from .detokenize import Detokenizer
from .tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """No words at all; `place` is what should have had them, `others` what else lies there."""

    def __init__(self, place: str, ends: Iterable[int] = (), others: Sequence[str] = ()) -> None:
        super().__init__([], [], [], self, ends=ends)
        self.place, self.others = place, tuple(others)

    def __repr__(self) -> str:
        return f"NoTokenizer({self.place!r})"

    def _refuse(self, what: str) -> NoReturn:
        there = f"{', '.join(self.others)} cannot be read; " if self.others else ""
        raise UserError(
            f"this model has no tokenizer, so {what}",
            op="tokenizer",
            expected=self.place,
            got="no such file",
            hint=f"{there}give ids: generate([1, 2, 3]), and read them from the answer's tokens",
        )

    def encode(self, *given: Any, **settings: Any) -> list[int]:
        """Text cannot become ids."""
        self._refuse("text cannot become ids")

    encode_parts = encode

    def encode_chat(self, *given: Any, **settings: Any) -> list[int]:
        """A chat cannot become ids."""
        self._refuse("a chat cannot become ids")

    def decode(self, *given: Any, **settings: Any) -> str:
        """Ids cannot become text."""
        self._refuse("ids cannot become text")

    def piece(self, token: int, *, show_special: bool = False) -> bytes:
        """The text of an answer is empty."""
        return b""

    def detokenizer(self, *, stop: Sequence[str] = (), **settings: Any) -> Detokenizer:
        """Empty text, which no stop string can end."""
        if stop:
            self._refuse("stop strings cannot be found")
        return Detokenizer(self, **settings)


__all__ = ["NoTokenizer"]
