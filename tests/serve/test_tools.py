"""Calls of tools in text: forms, cuts anywhere, malformed ones, constraints, a scripted model."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from scripted_model import call_pieces, write_scripted

from tilegrad.core.errors import UserError
from tilegrad.generate.grammar import Grammars
from tilegrad.generate.llm import LLM
from tilegrad.models.tokens.tokenizer import Tokenizer
from tilegrad.serve.answer.parts import AnswerParser, Message
from tilegrad.serve.answer.reasoning import ReasoningParser
from tilegrad.serve.answer.tools import (
    HERMES,
    LLAMA,
    ToolFormat,
    ToolParser,
    constraint_of,
    format_of,
    names_of,
    new_call_id,
)

NAMES = ("get", "put")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "put"}},
]


def parser(form: ToolFormat) -> AnswerParser:
    numbers = itertools.count()
    return AnswerParser(tools=ToolParser(form, NAMES, lambda: f"id{next(numbers)}"))


def parsed(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    found = parser(form).whole(text)
    assert [call.id for call in found.calls] == [f"id{i}" for i in range(len(found.calls))]
    return found.content, [(call.name, call.arguments) for call in found.calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(p, len(text)) for p in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


GOOD = '<tool_call>\n{"name": "get", "arguments": {"a": [1, {"b": "}\\"<"}]}}\n</tool_call>'
ARGUMENTS = '{"a": [1, {"b": "}\\"<"}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain < text <tool", "plain < text <tool", []),
        (GOOD, "", [("get", ARGUMENTS)]),
        (f"I look. \n{GOOD}", "I look.", [("get", ARGUMENTS)]),
        (f"{GOOD}\n{GOOD}\n", "", [("get", ARGUMENTS)] * 2),
        (f"{GOOD} and then", " and then", [("get", ARGUMENTS)]),
        ('<tool_call>{"name":"put"}</tool_call>', "", [("put", "{}")]),
        ('<tool_call>{"name":"put","parameters":null}</tool_call>', "", [("put", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "get"}', "", [("get", '{"x": 1}')]),
        ('<tool_call>{"name":"get","arguments":"{\\"x\\": 1}"}', "", [("get", '{"x": 1}')]),
        (
            '<tool_call>{"id": 7, "type": "function", "name": "put", "arguments": {}, "x": [1]}',
            "",
            [("put", "{}")],
        ),
        # cut off, or broken after the call began
        ('<tool_call>{"name": "get", "arguments": {"a": "b', "", [("get", '{"a": "b')]),
        ('<tool_call>{"name": "get", "arguments": {"a": x}}', "x}}", [("get", '{"a": ')]),
        ('<tool_call>{"name":"get","arguments":{}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name":"get","arguments":{</tool_call>', "", [("get", "{")]),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(HERMES, text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>no JSON</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "get", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "get"',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name" "get"}</tool_call>',
        "</tool_call> alone",
        'not tagged {"name": "get", "arguments": {}}',
        "<tool_call>{'name': 'get'}</tool_call>",
    ],
)
def test_what_is_malformed_is_content_as_it_was_written(text: str) -> None:
    assert parsed(HERMES, text) == (text, [])
    assert parsed(HERMES, text + GOOD) == (text, [("get", ARGUMENTS)])


def test_a_call_after_one_that_fails() -> None:
    assert parsed(HERMES, "<tool_call>" + GOOD) == ("<tool_call>", [("get", ARGUMENTS)])


BARE = '{"name": "get", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (BARE, "", [("get", '{"a": 1}')]),
        (f"<|python_tag|>{BARE}", "", [("get", '{"a": 1}')]),
        (f"\n {BARE}; {BARE}\n", "", [("get", '{"a": 1}')] * 2),
        ('{"name": "put", "arguments": {}}', "", [("put", "{}")]),
        ('{"type": "function", "name": "put"}', "", [("put", "{}")]),
        (f"text {BARE}", f"text {BARE}", []),
        ('{"name": "Bob", "age": 4} ' + BARE, '{"name": "Bob", "age": 4} ' + BARE, []),
        ("<|python_tag|>get.call(1)", "<|python_tag|>get.call(1)", []),
        ("<|python", "<|python", []),
        (" ", " ", []),
        (f"{BARE} and", " and", [("get", '{"a": 1}')]),
    ],
)
def test_llama(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(LLAMA, text) == (content, calls)


WORDS = some.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<", "{", "}", "[", "]", '"', ":", ",", "\\", "\n", " "),
        *('"name"', '"get"', '"arguments"', "{}", "null", "a", "1", GOOD, BARE, "<|python_tag|>"),
        *("<think>", "</think>", '{"name":"get","arguments":{', "é", ";"),
    ]
)
TEXTS = some.lists(WORDS, max_size=14).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS, some.lists(some.integers(0, 200), max_size=12), some.sampled_from([HERMES, LLAMA]))
@example(GOOD, list(range(200)), HERMES)
@example(f"<|python_tag|>{BARE};{BARE}", list(range(200)), LLAMA)
def test_cuts_do_not_matter(text: str, places: list[int], form: ToolFormat) -> None:
    """Pieces cut anywhere give what the whole text gives, and nothing is given twice or lost."""
    for make in (
        lambda: parser(form),
        lambda: AnswerParser(ReasoningParser(), parser(form).tools),
        lambda: AnswerParser(ReasoningParser(opened=True), parser(form).tools),
        lambda: AnswerParser(ReasoningParser()),
    ):
        whole, streamed, one = make().whole(text), Message(), make()
        for piece in cut(text, places):
            streamed.take(one.add(piece))
        streamed.take(one.finish())
        assert streamed == whole and one.calls == len(whole.calls)
        if not whole.calls and not whole.reasoning and one.reasoning is None:
            assert whole.content == text


def test_arguments_come_as_they_are_written() -> None:
    """A call begins before its arguments are whole, and no content waits longer than it must."""
    one = parser(HERMES)
    assert [p.text for p in one.add("I look <")] == ["I look"]
    assert [p.text for p in one.add("b")] == [" <b"]
    assert one.add('<tool_call>\n{"name": "get", "argum') == []
    begun = one.add('ents": {"city": "Os')
    assert [(p.kind, p.text, p.index) for p in begun] == [
        ("call", "get", 0),
        ("arguments", '{"city": "Os', 0),
    ]
    assert [(p.kind, p.text) for p in one.add('lo"}}\n</tool_call>')] == [("arguments", 'lo"}')]
    assert one.finish() == [] and one.calls == 1
    assert new_call_id() != new_call_id() and new_call_id().startswith("call_")


def test_a_long_hostile_answer_takes_linear_time() -> None:
    """Begins of calls within one another: each character is looked at once."""
    steps = []
    for count in (1000, 4000):
        one = ToolParser(HERMES, NAMES)
        seen = 0
        read = one._read

        def counted(text: str, place: int, read: Any = read) -> int:
            nonlocal seen
            end = read(text, place)
            seen += end - place
            return end

        one._read = counted  # type: ignore[method-assign]
        text = '<tool_call>{"a":[' * count
        assert AnswerParser(tools=one).whole(text).content == text
        steps.append(seen)
    assert steps[1] <= 4.1 * steps[0]


# ---- what a model is made to write ----------------------------------------------------------


class Bytes:
    def encode(self, text: str, first: bool) -> list[int]:
        return list(text.encode())


def byte_tokenizer(template: str | None = None, words: tuple[str, ...] = ()) -> Tokenizer:
    tokens = [bytes([b]) for b in range(256)] + [w.encode() for w in words] + [b"<|end|>"]
    texts = [*(f"b{i}" for i in range(256)), *words, "<|end|>"]
    return Tokenizer(texts, tokens, [], Bytes(), ends=[len(tokens) - 1], chat_template=template)


def fits(grammars: Grammars, constraint: Any, text: str) -> bool:
    matcher = grammars.matcher(constraint)
    for byte in text.encode():
        if not matcher.words()[byte // 32] >> (byte % 32) & 1:
            return False
        matcher.take(byte)
    return matcher.is_whole


def test_a_constraint_makes_a_call_of_the_tools() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    grammars = Grammars(byte_tokenizer(), 300)
    get = '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    put = '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
    required = constraint_of(TOOLS, "required", HERMES)
    assert all(fits(grammars, required, t) for t in (get, put, f"{get}\n{put}"))
    assert not any(fits(grammars, required, t) for t in (bad, "", f"Well. {get}"))
    single = constraint_of(TOOLS, "required", HERMES, parallel=False)
    assert fits(grammars, single, get) and not fits(grammars, single, f"{get}\n{put}")
    named = constraint_of(TOOLS, "put", HERMES)
    assert fits(grammars, named, put) and not fits(grammars, named, get)
    llama = constraint_of(TOOLS, "required", LLAMA)
    text = '{"name": "get", "parameters": {"city": "Rome"}}'
    assert fits(grammars, llama, text) and parsed(LLAMA, text)[1]
    with pytest.raises(UserError, match="no such tool"):
        constraint_of(TOOLS, "drop", HERMES)


def test_the_form_of_a_model() -> None:
    hermes = "{% if tools %}<tool_call>{% endif %}"
    assert format_of(byte_tokenizer(hermes)) is HERMES
    assert format_of(byte_tokenizer("{% if tools %}x{% endif %}", ("<|python_tag|>",))) is LLAMA
    assert format_of(byte_tokenizer("{{ messages }}", ("<|python_tag|>",))) is None
    assert format_of(byte_tokenizer(hermes + "<function=")) is None
    assert format_of(byte_tokenizer()) is None
    assert names_of(TOOLS) == {"get", "put"}


# ---- through the engine ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model") / "scripted.gguf"
    scripts = {
        "<|call|>": ["Let me", " see", ".\n\n", *call_pieces("get", {"city": "Oslo", "days": 12})],
        "<|after|>": ["It ", "is ", "warm", " in", " Os", "lo!"],
        "<|talk|>": ["<think>\n", "Hm.", "\n</th", "ink>\n\nYes", ", hello"],
    }
    return LLM(write_scripted(path, scripts), requests=4)


def streamed(llm: LLM, chat: list[dict[str, Any]], **settings: Any) -> Message:
    """An answer, parsed as its pieces come."""
    tools = settings.pop("tools", None)
    ids = llm.tokenizer.encode_chat(chat, tools=tools)
    form = format_of(llm.tokenizer)
    assert form is HERMES
    one = AnswerParser(ReasoningParser(), ToolParser(form, names_of(tools or [])))
    message = Message()
    for piece in llm.stream(ids, **settings):
        message.take(one.add(piece.text))
    message.take(one.finish())
    return message


def test_a_scripted_model_calls_a_tool_and_goes_on(llm: LLM) -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    found = streamed(llm, chat, tools=TOOLS, max_tokens=99)
    assert found.content == "Let me see." and [c.name for c in found.calls] == ["get"]
    arguments = json.loads(found.calls[0].arguments)
    assert arguments == {"city": "Oslo", "days": 12}
    call = {"function": {"name": "get", "arguments": arguments}, "id": found.calls[0].id}
    chat += [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "21 C", "tool_call_id": found.calls[0].id},
    ]
    assert '"days": 12' in llm.tokenizer.render_chat(chat)
    found = streamed(llm, chat, tools=TOOLS, max_tokens=99)
    assert (found.content, found.calls) == ("It is warm in Oslo!", [])


def test_a_scripted_model_thinks(llm: LLM) -> None:
    found = streamed(llm, [{"role": "user", "content": "Hi"}], max_tokens=99)
    assert (found.reasoning, found.content) == ("Hm.", "Yes, hello")


@pytest.mark.parametrize("choice", ["required", "put"])
def test_the_model_is_made_to_call(llm: LLM, choice: str) -> None:
    """The script says something else; the constraint has its way, in one batch with others."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    constraint = constraint_of(TOOLS, choice, HERMES, parallel=False)
    talk = llm.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    tasks = [
        llm._task(talk, ebnf=constraint.text, max_tokens=300, temperature=1.0, seed=1),
        llm._task(talk, max_tokens=99),
    ]
    made, other = llm._tasks.answers(tasks)
    found = AnswerParser(tools=ToolParser(HERMES, names_of(TOOLS))).whole(made.text)
    assert made.finish == "stop" and found.content == "" and len(found.calls) == 1
    assert found.calls[0].name in ({"get", "put"} if choice == "required" else {"put"})
    json.loads(found.calls[0].arguments)
    assert other.text == "<think>\nHm.\n</think>\n\nYes, hello"


def test_the_file_of_a_scripted_model_refuses_a_piece_that_comes_twice(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="comes twice"):
        write_scripted(tmp_path / "x.gguf", {"<|talk|>": ["a", "a"]})
