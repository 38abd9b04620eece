"""The parts of an answer: reasoning, content, and calls of tools with their arguments.

An AnswerParser takes the text of an answer in pieces cut anywhere and gives Parts as soon as they
are certain: `reasoning.py` splits off what was thought, `tools.py` finds the calls in the rest.
Invariant: Parts of one kind that follow each other, put together, do not depend on where the text
was cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

BLANKS = " \n\r\t"


@dataclass(frozen=True, slots=True)
class Part:
    """Text of a kind: "reasoning", "content", "call" (a tool's name) or "arguments" (JSON)."""

    kind: str
    text: str
    index: int = 0  # of the call
    id: str = ""  # of the call, where it begins


@dataclass
class ToolCall:
    """One call of a tool: its arguments are the JSON that the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """An answer as a client sees it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, parts: Iterable[Part]) -> Message:
        """This Message with more Parts."""
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            elif part.kind == "call":
                self.calls.append(ToolCall(part.id, part.text))
            else:
                self.calls[part.index].arguments += part.text
        return self


class PartParser(Protocol):
    """Text in, Parts out."""

    def add(self, text: str) -> list[Part]:
        """What is certain after one more piece of text."""

    def finish(self) -> list[Part]:
        """The rest, once the text is at its end."""


class AnswerParser:
    """Reasoning and tools, each if there is a parser for it; else everything is content."""

    def __init__(
        self, reasoning: PartParser | None = None, tools: PartParser | None = None
    ) -> None:
        self.reasoning, self.tools = reasoning, tools
        self.calls = 0  # that began so far

    def add(self, text: str) -> list[Part]:
        """What is certain after one more piece of text."""
        if self.reasoning is None:
            return self._content(text)
        return self._within(self.reasoning.add(text))

    def finish(self) -> list[Part]:
        """The rest, once the answer is at its end."""
        rest = [] if self.reasoning is None else self._within(self.reasoning.finish())
        return rest if self.tools is None else rest + self._counted(self.tools.finish())

    def whole(self, text: str) -> Message:
        """The Message of a whole text."""
        return Message().take([*self.add(text), *self.finish()])

    def _within(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found += self._content(part.text) if part.kind == "content" else [part]
        return found

    def _content(self, text: str) -> list[Part]:
        if self.tools is None:
            return [Part("content", text)] if text else []
        return self._counted(self.tools.add(text))

    def _counted(self, parts: list[Part]) -> list[Part]:
        self.calls += sum(part.kind == "call" for part in parts)
        return parts


class PartList:
    """Parts one after the other; neighbours of one kind and one call become one."""

    def __init__(self) -> None:
        self._parts: list[tuple[Part, list[str]]] = []

    def put(self, kind: str, text: str, index: int = 0, id: str = "") -> None:
        """Add text of a kind."""
        last = self._parts[-1][0] if self._parts else None
        if last is not None and kind != "call" and (last.kind, last.index) == (kind, index):
            self._parts[-1][1].append(text)
        elif text:
            self._parts.append((Part(kind, "", index, id), [text]))

    def take(self) -> list[Part]:
        """All of them, which are forgotten."""
        parts, self._parts = self._parts, []
        return [Part(part.kind, "".join(texts), part.index, part.id) for part, texts in parts]


class TagFinder:
    """Text up to the next of some tags; blanks before a tag and the begin of one are held back."""

    def __init__(self, *tags: str) -> None:
        """All begin with one character that they have once: a begin fails as a whole."""
        self.first = tags[0][0]
        assert all(tag[0] == self.first and self.first not in tag[1:] for tag in tags)
        self.tags = tags
        self.blank = self.part = ""

    def read(self, text: str, place: int) -> tuple[str, str | None, int]:
        """Text from a place on that is certain, the tag that ended it, and the place after that."""
        found: list[str] = []
        while place < len(text):
            if not self.part and text[place] != self.first:
                end = text.find(self.first, place)
                run = text[place:] if end < 0 else text[place:end]
                found.append(self._certain(run))
                place += len(run)
                continue
            part = self.part + text[place]
            if not any(tag.startswith(part) for tag in self.tags):
                found.append(self.drop())  # and the character may begin a tag itself
                continue
            place += 1
            self.part = "" if part in self.tags else part
            if not self.part:
                return "".join(found), part, place
        return "".join(found), None, place

    def _certain(self, run: str) -> str:
        kept = run.rstrip(BLANKS)
        if not kept:
            self.blank += run
            return ""
        text, self.blank = self.blank + kept, run[len(kept) :]
        return text

    def drop(self) -> str:
        """What is held back, which is forgotten."""
        text, self.blank, self.part = self.blank + self.part, "", ""
        return text


__all__ = ["AnswerParser", "Message", "Part", "PartList", "TagFinder", "ToolCall"]
