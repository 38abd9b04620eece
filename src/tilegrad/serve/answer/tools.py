"""Calls of tools in the text of an answer, and the Constraint that makes a model call one.

Two forms are known. *hermes* (Hermes, Qwen2.5, Qwen3): `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>` anywhere in the text, as often as the model likes. *llama* (Llama 3): the answer
is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not, several with `;` between.
Both words for arguments are taken in both.

A call begins once its name, which must be one of the request's tools, and the begin of its
arguments are there; from then on its arguments go out as they come, as the model writes them.
What fails before that is content, as it was written. What breaks later stays a call with broken
arguments: it cannot be taken back from a stream, and the whole answer says the same.
Invariant: a parser does the same for a text however it is cut; a character is looked at once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import UserError
from ...generate.constraint import Constraint
from ...generate.grammar import WHITESPACE
from ...models.tokens.tokenizer import Tokenizer
from .parts import BLANKS, Part, PartList, TagFinder

ARGUMENTS = ("arguments", "parameters")
OUTSIDE = frozenset(BLANKS + '{}[]":,+-.0123456789eEtrufalsn')  # of the strings in JSON
MOST_CALLS = 8  # that a model is made to write at most
PYTHON_TAG = "<|python_tag|>"
Reader = Generator[None, str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call."""

    name: str
    argument: str  # the word for arguments
    opens: str = ""
    closes: str = ""


HERMES = ToolFormat("hermes", "arguments", "<tool_call>", "</tool_call>")
LLAMA = ToolFormat("llama", "parameters")


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """How a model writes calls, by its template and its words; None: it was not made for tools."""
    template = tokenizer.template_text or ""
    if "tools" not in template or "<function=" in template:
        return None
    if HERMES.opens in template:
        return HERMES
    if PYTHON_TAG in template or PYTHON_TAG in tokenizer.ids:
        return LLAMA
    return None


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of tools, given as OpenAI has them."""
    return frozenset(tool["function"]["name"] for tool in tools)


def constraint_of(
    tools: Sequence[Mapping[str, Any]], choice: str, form: ToolFormat, parallel: bool = True
) -> Constraint:
    """What an answer must look like that calls a tool: `choice` is "required", or a tool's name."""
    if choice != "required":
        tools = [tool for tool in tools if tool["function"]["name"] == choice]
    if not tools:
        raise UserError("no such tool", op="tool_choice", got=choice[:80])
    rules = [f"tool_{i}: {_rule(tool['function'], form)}" for i, tool in enumerate(tools)]
    one = " | ".join(f"tool_{i}" for i in range(len(tools)))
    several = f' ("\\n" call)~0..{MOST_CALLS - 1}' if parallel and form.opens else ""
    begin = f"{json.dumps(form.opens + chr(10))} " if form.opens else ""
    end = f" {json.dumps(chr(10) + form.closes)}" if form.closes else ""
    lines = [f"start: call{several}", f"call: {begin}({one}){end}", *rules]
    return Constraint("ebnf", "\n".join(lines))


def _rule(function: Mapping[str, Any], form: ToolFormat) -> str:
    """A call of one tool, in the notation of Lark."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    told = json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
    start = f'{{"name": {json.dumps(function["name"])}, "{form.argument}": '
    return f'{json.dumps(start)} %json {told} "}}"'


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Text in; Parts of kind "content", "call" and "arguments" out."""

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.names, self.new_id = frozenset(names), new_id
        self.calls = 0
        self._parts = PartList()
        self._finder = TagFinder(*((form.opens, form.closes) if form.opens else (PYTHON_TAG,)))
        self._call: Reader | None = None  # a call that is read
        self._swallowed: list[str] = []  # what is content again if that fails
        self._begun = False  # it is a call
        self._name: str | None = None
        self._held: str | None = None  # its arguments, while its name is not known
        self._closes = False  # a closing tag belongs to the last call
        self._bare = not form.opens  # calls stand where the answer begins, without tags
        self._plain = False  # there are no calls any more

    def add(self, text: str) -> list[Part]:
        """What is certain after one more piece of text."""
        place = 0
        while place < len(text):
            if self._call is not None:
                place = self._read(text, place)
            elif self._plain:
                self._parts.put("content", text[place:])
                break
            elif self._bare:
                place = self._look(text, place)
            else:
                place = self._find(text, place)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """The rest, once the text is at its end."""
        if self._call is not None:
            self._fail()
        part, rest = self._finder.part, self._finder.drop()
        if part or not self.calls:  # blanks after calls belong to the form
            self._parts.put("content", rest)
        return self._parts.take()

    # ---- between calls ----------------------------------------------------------------------

    def _find(self, text: str, place: int) -> int:
        """Content up to the next call between tags."""
        more, tag, place = self._finder.read(text, place)
        self._parts.put("content", more)
        if more:
            self._closes = False
        if tag is None:
            return place
        if tag == self._finder.tags[0]:
            self._start(self._finder.drop() + tag)
        elif self._closes:
            self._closes = False
            self._finder.drop()
        else:
            self._parts.put("content", self._finder.drop() + tag)
        return place

    def _look(self, text: str, place: int) -> int:
        """Whether a call without tags begins here."""
        letter, finder = text[place], self._finder
        if not finder.part and (letter in BLANKS or (self.calls and letter in ";,")):
            finder.blank += letter
            return place + 1
        if not finder.part and letter == "{":
            self._start(finder.drop())
            return place
        if PYTHON_TAG.startswith(finder.part + letter) and PYTHON_TAG not in finder.blank:
            finder.part += letter
            if finder.part == PYTHON_TAG:
                finder.blank, finder.part = finder.blank + PYTHON_TAG, ""
            return place + 1
        self._plain = True
        self._parts.put("content", finder.drop())
        return place

    # ---- calls ------------------------------------------------------------------------------

    def _start(self, before: str) -> None:
        """Read what should be a call; `before` is content if it is none."""
        self._swallowed, self._begun = [before], False
        self._call = self._object()
        next(self._call)

    def _read(self, text: str, place: int) -> int:
        """More of a call, up to its end or to the character where it fails."""
        assert self._call is not None
        for at in range(place, len(text)):
            try:
                self._call.send(text[at])
            except StopIteration as ended:
                if not self._begun:
                    self._fail()
                    return at
                self._call, self._closes = None, True
                return at + 1 if ended.value else at  # what does not belong to it is looked at
            if not self._begun:
                self._swallowed.append(text[at])
        return len(text)

    def _fail(self) -> None:
        """What was read is content, unless it is a call already."""
        if not self._begun:
            self._parts.put("content", "".join(self._swallowed))
            self._plain = self._bare
        self._call = None

    def _begin(self, name: str, arguments: str) -> None:
        self._begun, self._swallowed = True, []
        self._parts.put("call", name, self.calls, self.new_id())
        self.calls += 1
        self._parts.put("arguments", arguments, self.calls - 1)

    def _object(self) -> Reader:
        """The object of a call; whether it ended as it should."""
        self._name = self._held = None
        if (yield from _solid()) != "{":
            return False
        letter = yield from _solid()
        while letter == '"':
            key = yield from _string()
            if (yield from _solid()) != ":":
                return False
            letter = yield from self._member(key, (yield from _solid()))
            if letter == ",":
                letter = yield from _solid()
            elif letter != "}":
                return False
        if letter == "}" and self._name is not None and not self._begun:
            self._begin(self._name, "{}")
        return letter == "}"

    def _member(self, key: Any, letter: str) -> Reader:
        """A value from its first character on; the character after it, or "" where it fails."""
        if key == "name" and letter == '"' and self._name is None:
            name = yield from _string()
            if name not in self.names:
                return ""
            self._name = name
            if self._held is not None:
                self._begin(name, self._held)
            return (yield from _solid())
        if key in ARGUMENTS and letter == "{" and self._name is not None and not self._begun:
            self._begin(self._name, letter)
            whole = yield from self._stream()
            return (yield from _solid()) if whole else ""
        text, letter = yield from _value(letter)
        if key in ARGUMENTS and self._held is None and not self._begun:
            self._held = _arguments(text)
            if self._held is None:
                return ""
            if self._name is not None:
                self._begin(self._name, self._held)
        return letter

    def _stream(self) -> Reader:
        """Arguments after their first brace, as they come; whether they were whole."""
        depth, index = 1, self.calls - 1
        while depth:
            letter = yield
            if letter not in OUTSIDE:
                return False
            self._parts.put("arguments", letter, index)
            depth += (letter in "{[") - (letter in "}]")
            escaped, inside = False, letter == '"'
            while inside:
                letter = yield
                self._parts.put("arguments", letter, index)
                inside = escaped or letter != '"'
                escaped = letter == "\\" and not escaped
        return True


# ---- JSON, a character at a time ------------------------------------------------------------


def _solid() -> Reader:
    """The next character that is no blank."""
    letter = yield
    while letter in BLANKS:
        letter = yield
    return letter


def _string() -> Reader:
    """A string after its first quote; None if it is no JSON."""
    letters, escaped = ['"'], False
    while True:
        letter = yield
        letters.append(letter)
        if letter == '"' and not escaped:
            return _loaded("".join(letters))
        escaped = letter == "\\" and not escaped


def _value(letter: str) -> Reader:
    """The text of a value from its first character on, and the next solid one after it."""
    letters: list[str] = []
    depth, inside, escaped = 0, False, False
    while inside or depth or letter not in ",}]" + BLANKS:
        letters.append(letter)
        if inside:
            inside = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        else:
            inside = letter == '"'
            depth += (letter in "{[") - (letter in "}]")
        letter = yield
    return "".join(letters), (yield from _solid()) if letter in BLANKS else letter


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(text: str) -> str | None:
    """The JSON of arguments: an object, one within a string, or nothing at all."""
    value = _loaded(text)
    if isinstance(value, str):
        text, value = value, _loaded(value)
    if value is None:
        return "{}" if text.strip() == "null" else None
    return text if isinstance(value, dict) else None


__all__ = ["ToolFormat", "ToolParser", "constraint_of", "format_of", "names_of", "new_call_id"]
