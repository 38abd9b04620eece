"""`tilegrad chat` over a model of a script: history, commands, Ctrl-C, a full context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad.cli import chat, main
from tilegrad.core.errors import UserError

RUNNER = CliRunner()


def invoke(*lines: str, words: tuple[str, ...] = ()) -> Any:
    return RUNNER.invoke(main.app, ["chat", "m", *words], input="".join(f"{n}\n" for n in lines))


def roles(messages: list[dict[str, str]]) -> list[str]:
    return [m["role"][0] + ":" + m["content"] for m in messages]


def test_history_goes_along(fake: Any) -> None:
    result = invoke("one", "", "two", words=("--system", "S", "--temperature", "0.5"))
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello.\nHello.\n" and result.stderr == ""
    assert [roles(asked[1]) for asked in fake.asked] == [
        ["s:S", "u:one"],
        ["s:S", "u:one", "a:Hello.", "u:two"],
    ]
    assert fake.asked[0][2] == {"temperature": 0.5}


def test_several_lines_are_one_message(fake: Any) -> None:
    invoke('"""a', "b", 'c"""', '"""one line"""', '"""never closed')
    assert [a[1][-1]["content"] for a in fake.asked] == ["a\nb\nc", "one line"]


def test_commands(fake: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    result = invoke(
        "one",
        "/stats",
        f"/save {file}",
        f"/save {file}",
        "/save",
        "/clear",
        "/system New.",
        "two",
        "/system",
        "/what",
        "/help",
        "/exit",
        "never said",
    )
    assert result.exit_code == 0
    assert roles(json.loads(file.read_text())) == ["u:one", "a:Hello."]
    assert [roles(a[1]) for a in fake.asked] == [["u:one"], ["s:New.", "u:two"]]
    for words in (
        "[3 tokens, the first after",
        "[8 of 64 tokens of the context are used]",
        "[2 messages are in",
        "is there already",
        "/save FILE",
        "is forgotten",
        "system message is set",
        "there is no system message",
        "there is no /what",
        "/clear",
    ):
        assert words in result.stderr, words
    assert result.stdout == "Hello.\nHello.\n"


def test_a_file_that_cannot_be_written(fake: Any) -> None:
    result = invoke("/save /no/such/folder/x.json", "one")
    assert "No such file" in result.stderr and result.stdout == "Hello.\n"


def test_control_c_ends_the_answer_and_keeps_the_chat(fake: Any) -> None:
    fake.script = ["par", "tial", KeyboardInterrupt()]
    result = invoke("one", "two")
    assert result.exit_code == 0 and result.stdout == "partial\npartial\n"
    assert result.stderr.count("[stopped]") == 2 and fake.closed == 2
    assert roles(fake.asked[1][1]) == ["u:one", "a:partial", "u:two"]


def test_a_message_without_an_answer_is_forgotten(fake: Any) -> None:
    fake.script = [KeyboardInterrupt()]
    invoke("one", "two")
    assert roles(fake.asked[1][1]) == ["u:two"]


def test_an_error_ends_a_message_and_not_the_chat(fake: Any) -> None:
    fake.script = [UserError("no", op="generate")]
    result = invoke("one", "two")
    assert result.exit_code == 0 and result.stderr == "error: generate: no\n" * 2
    assert roles(fake.asked[1][1]) == ["u:two"]


def test_control_c_at_the_mark_stays(fake: Any, capsys: pytest.CaptureFixture) -> None:
    typed: list[Any] = [KeyboardInterrupt(), "one", None]

    def read(mark: str) -> str | None:
        word = typed.pop(0)
        if isinstance(word, BaseException):
            raise word
        return word

    talk = chat.Chat(fake, {}, None, chat.Answers())
    chat.loop(talk, read)
    shown = capsys.readouterr()
    assert "Ctrl-D leaves" in shown.err and shown.out == "Hello.\n"


def test_a_full_context_loses_its_oldest_messages(fake: Any) -> None:
    fake.context = 20
    result = invoke("a b c d", "e f g", "h i j")
    assert [roles(a[1]) for a in fake.asked] == [["u:a b c d"], ["u:e f g"], ["u:h i j"]]
    assert "the context is full (20 tokens): the oldest 2 messages are forgotten" in result.stderr


def test_what_cannot_fit_is_refused_and_nothing_is_lost(fake: Any) -> None:
    fake.context = 20
    result = invoke("a", "w " * 30, "b", words=("--max-tokens", "2"))
    assert "longer than the context" in result.stderr
    assert "fewer than 20 tokens" in result.stderr and "33 tokens" in result.stderr
    assert [roles(a[1]) for a in fake.asked] == [["u:a"], ["u:a", "a:Hello.", "u:b"]]


def test_an_answer_cut_by_its_length_says_so(fake: Any) -> None:
    fake.script = ["a", ("b", "length")]
    assert "[ended at 2 tokens" in invoke("one").stderr


def test_words_of_a_model_cannot_act(fake: Any) -> None:
    fake.script = ["\x1b]0;title\x07"]
    assert invoke("one").stdout == "␛]0;title␇\n"
    assert "error" not in invoke("\x1b[A").stderr


def test_a_model_without_a_template_cannot_chat(fake: Any) -> None:
    fake.template = None
    result = invoke("one")
    assert result.exit_code == 1 and "--raw" in result.stderr and not fake.asked


def test_tokens_are_drawn_as_the_makers_advise(fake: Any) -> None:
    invoke("one")
    assert fake.asked[-1][2] == chat.UNADVISED
    invoke("one", words=("--top-p", "0.5"))
    assert fake.asked[-1][2] == {"temperature": 0.7, "top_p": 0.5}
    invoke("one", words=("--temperature", "0"))
    assert fake.asked[-1][2] == {"temperature": 0.0}
    fake.defaults = {"temperature": 0.6, "top_k": 20}  # of the model's own files
    invoke("one", words=("--seed", "3"))
    assert fake.asked[-1][2] == {"seed": 3}
    fake.defaults = {}
    assert chat.advised("smollm2", fake) == {"temperature": 0.2, "top_p": 0.9}
