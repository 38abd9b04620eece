"""Reasoning split off: tags cut anywhere, opened by the prompt, never closed, blanks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tilegrad.models.tokens.tokenizer import Tokenizer
from tilegrad.serve.answer.parts import AnswerParser, Message
from tilegrad.serve.answer.reasoning import ReasoningParser, is_opened, reasons


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>a\nb</think>c", False, "a\nb", "c"),
        ("\n<think>\n a \n</think>\n\n c\n", False, "a", "c\n"),
        ("a</think>\nc", True, "a", "c"),
        ("<think>a < b </thin> </think>", False, "a < b </thin>", ""),
        ("<think>never closed ", False, "never closed", ""),
        ("<think></think>c", False, "", "c"),
        ("no <think>x</think>", False, "", "no <think>x</think>"),
        ("c", False, "", "c"),
        ("  <thi", False, "", "  <thi"),
        ("", True, "", ""),
        ("a<think>b</think>c</think>", True, "a<think>b", "c</think>"),
    ],
)
def test_parts(text: str, opened: bool, reasoning: str, content: str) -> None:
    found = AnswerParser(ReasoningParser(opened)).whole(text)
    assert (found.reasoning, found.content) == (reasoning, content)
    streamed, one = Message(), AnswerParser(ReasoningParser(opened))
    for letter in text:
        streamed.take(one.add(letter))
    assert streamed.take(one.finish()) == found


@settings(max_examples=200, deadline=None)
@given(some.lists(some.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n", "a"])))
def test_nothing_is_lost_but_tags_and_blanks(words: list[str]) -> None:
    text = "".join(words)
    found = AnswerParser(ReasoningParser()).whole(text)
    kept = (found.reasoning + found.content).split()
    left = text.lstrip().removeprefix("<think>") if text.lstrip().startswith("<think>") else text
    if left != text:
        left = left.replace("</think>", "", 1)
    assert "".join(kept) == "".join(left.split())


def test_reasoning_comes_as_it_is_written() -> None:
    one = ReasoningParser()
    assert one.add("<think>") == [] and one.add("\n") == []
    assert [p.text for p in one.add("so \n")] == ["so"]
    assert [p.text for p in one.add("far</")] == [" \nfar"]
    assert one.add("think>\n") == []
    assert [(p.kind, p.text) for p in one.add(" yes")] == [("content", "yes")]


class Bytes:
    def encode(self, text: str, first: bool) -> list[int]:
        return list(text.encode())


def test_what_the_prompt_opened() -> None:
    tokens = [bytes([b]) for b in range(256)]
    texts = [f"b{i}" for i in range(256)]
    plain = Tokenizer(texts, tokens, [], Bytes())
    thinks = Tokenizer(texts, tokens, [], Bytes(), chat_template="x<think>y</think>")
    assert reasons(thinks) and not reasons(plain)
    assert is_opened(plain, plain.encode("assistant\n<think>\n"))
    assert not is_opened(plain, plain.encode("<think>\n\n</think>\n\n"))
    assert not is_opened(plain, plain.encode("hello"))
