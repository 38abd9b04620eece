"""What a model thinks before it answers, split off: `<think>...</think>` at the begin of an answer.

Some templates open the tag themselves, at the end of the prompt; `is_opened` sees that. Blanks
inside the tags at both ends, and after them, belong to the form and are dropped.
Invariant: nothing of an answer is lost but its tags and those blanks; one that never closes the tag
is reasoning alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...models.tokens.tokenizer import Tokenizer
from .parts import BLANKS, Part, PartList, TagFinder

OPEN, CLOSE = "<think>", "</think>"
LOOKED_AT = 16  # ids at the end of a prompt
FIRST, THINKING, BETWEEN, CONTENT = range(4)  # where an answer is


def reasons(tokenizer: Tokenizer) -> bool:
    """Whether a model was made to think: its template or its words have the tag."""
    return CLOSE in (tokenizer.template_text or "") or CLOSE in tokenizer.ids


def is_opened(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside the tag."""
    end = tokenizer.decode(ids[-LOOKED_AT:], show_special=True).rstrip(BLANKS)
    return end.endswith(OPEN)


class ReasoningParser:
    """Text in; Parts of kind "reasoning", then of kind "content" out."""

    def __init__(self, opened: bool = False) -> None:
        """`opened`: the prompt has opened the tag."""
        self._finder = TagFinder(CLOSE)
        self._head = ""  # what may be the begin of the tag
        self._where = THINKING if opened else FIRST
        self._begins = True  # no reasoning yet

    def add(self, text: str) -> list[Part]:
        """What is certain after one more piece of text."""
        found = PartList()
        if self._where == FIRST:
            text = self._look(text)
        if self._where == THINKING:
            more, tag, place = self._finder.read(text, 0)
            self._think(found, more)
            text = text[place:]
            if tag:
                self._finder.drop()
                self._where = BETWEEN
        if self._where == BETWEEN:
            text = text.lstrip(BLANKS)
            self._where = CONTENT if text else BETWEEN
        found.put("content", text)
        return found.take()

    def finish(self) -> list[Part]:
        """The rest, once the text is at its end."""
        found, rest = PartList(), self._finder.drop()
        if self._where == THINKING:
            self._think(found, rest.rstrip(BLANKS))
        elif self._where == FIRST:
            found.put("content", self._head)
        return found.take()

    def _look(self, text: str) -> str:
        """Whether the answer begins with the tag; the text after that."""
        self._head += text
        begun = self._head.lstrip(BLANKS)
        if begun.startswith(OPEN):
            self._where = THINKING
            return begun[len(OPEN) :]
        if not OPEN.startswith(begun):  # all of it is content
            self._where = CONTENT
            return self._head
        return ""

    def _think(self, found: PartList, text: str) -> None:
        if self._begins:
            text = text.lstrip(BLANKS)
        self._begins = self._begins and not text
        found.put("reasoning", text)


__all__ = ["ReasoningParser", "is_opened", "reasons"]
