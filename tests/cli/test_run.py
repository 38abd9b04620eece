"""`tilegrad run` over a model of a script: prompts, stdin, streaming, JSON, errors, Ctrl-C."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad.cli import main, run
from tilegrad.core.errors import InternalError, UserError

RUNNER = CliRunner()


def invoke(*words: str, stdin: str | bytes | None = None) -> Any:
    return RUNNER.invoke(main.app, ["run", *words], input=stdin)


def test_an_answer_goes_to_stdout_and_nothing_else(fake: Any) -> None:
    result = invoke("m.gguf", "Hi")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello.\n" and result.stderr == ""
    assert fake.opened == [{"path": "m.gguf", "requests": 1}]
    assert fake.asked == [("chat", [{"role": "user", "content": "Hi"}], {})]
    assert fake.closed == 1


def test_options_reach_the_model(fake: Any) -> None:
    result = invoke(
        "m",
        "Hi",
        "--system",
        "Be brief.",
        "--max-tokens",
        "9",
        "--temperature",
        "0.5",
        "--top-k",
        "4",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--seed",
        "7",
        "--stop",
        "a",
        "--stop",
        "b",
        "--repetition-penalty",
        "1.1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--threads",
        "2",
        "--context",
        "99",
        "--speculate",
        "ngram",
        "--guesses",
        "5",
    )
    assert result.exit_code == 0, result.output
    assert fake.opened == [
        {
            "path": "m",
            "requests": 1,
            "device": "cpu",
            "dtype": "float32",
            "threads": 2,
            "context": 99,
            "speculate": "ngram",
            "guesses": 5,
        }
    ]
    _, messages, sampling = fake.asked[0]
    assert [m["role"] for m in messages] == ["system", "user"]
    assert sampling == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "repetition_penalty": 1.1,
    }


@pytest.mark.parametrize(
    ("words", "stdin", "prompt"),
    [
        (["m"], "from stdin\n", "from stdin"),
        (["m", "-"], "two\nlines\n", "two\nlines"),
        (["m", "Sum up:"], "a text\n", "Sum up:\n\na text"),
        (["m", "Hi"], "", "Hi"),
        (["m", "Hi"], " \n", "Hi"),
        (["m"], "é 中 🙂", "é 中 🙂"),
    ],
)
def test_stdin(fake: Any, words: list[str], stdin: str, prompt: str) -> None:
    assert invoke(*words, stdin=stdin).exit_code == 0
    assert fake.asked[0][1][-1]["content"] == prompt


def test_no_prompt_is_bad_usage(fake: Any) -> None:
    for words in (["m"], ["m", "-"]):
        result = invoke(*words, stdin=" \n")
        assert result.exit_code == 2 and "no prompt" in result.stderr
    assert not fake.opened, "nothing is loaded for a usage error"


@pytest.mark.parametrize(
    "words",
    [
        ["--top-p", "2"],
        ["--temperature", "-1"],
        ["--max-tokens", "0"],
        ["--threads", "0"],
        ["--no-such"],
        ["--raw", "--system", "x"],
    ],
)
def test_bad_options_are_bad_usage(fake: Any, words: list[str]) -> None:
    result = invoke("m", "Hi", *words)
    assert result.exit_code == 2 and not fake.opened


def test_stdin_that_is_no_text(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("m", stdin=b"\xff\xfe")
    assert result.exit_code == 1 and "stdin is not UTF-8" in result.stderr
    monkeypatch.setattr(run, "MOST_BYTES", 4)
    result = invoke("m", stdin="12345")
    assert result.exit_code == 1 and "too long" in result.stderr


def test_arguments_are_utf8_whatever_the_locale(fake: Any) -> None:
    assert invoke("m", "a\udcc3\udca9", "--system", "\udcff").exit_code == 0
    assert [m["content"] for m in fake.asked[0][1]] == ["\ufffd", "aé"]


def test_a_context_beyond_the_model_is_told(fake: Any) -> None:
    fake.most = 50
    result = invoke("m", "Hi", "--context", "99")
    assert result.exit_code == 0 and "the context is 50 tokens" in result.stderr


def test_raw(fake: Any) -> None:
    assert invoke("m", "Once upon", "--raw").stdout == "Hello.\n"
    assert fake.asked == [("stream", "Once upon", {})]


def test_a_model_without_a_template_goes_on(fake: Any) -> None:
    fake.template = None
    result = invoke("m", "Once")
    assert fake.asked[0][:2] == ("stream", "Once") and "no chat template" in result.stderr
    assert invoke("m", "Once", "--raw").stderr == ""


def test_words_of_a_model_cannot_act(fake: Any) -> None:
    fake.script = ["a\x1b[2J", "b\x07\x9bc\r", "\nd\re\t\x00\x7f", "\ud800"]
    result = invoke("m", "Hi")
    assert result.stdout == "a␛[2Jb␇\ufffdc\nd␍e\t␀␡\ufffd\n"
    assert json.loads(invoke("m", "Hi", "--json").stdout)["text"] == "".join(fake.script)


def test_json(fake: Any) -> None:
    fake.script = ["A", ("B", "length")]
    result = invoke("m", "Hi", "--json")
    record = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert record["prompt_tokens"] == 4
    assert record["text"] == "AB" and record["finish"] == "length" and record["tokens"] == [0, 1]
    fake.script = ["A", ("", "stop")]
    assert json.loads(invoke("m", "Hi", "--json").stdout)["tokens"] == [0], "the end is no word"
    assert record["model"] == "m" and record["tokens_per_second"] > 0


def test_errors_have_a_message_and_no_traceback(fake: Any) -> None:
    fake.script = ["some ", UserError("too long", op="generate", expected="64", got="99")]
    result = invoke("m", "Hi")
    assert result.exit_code == 1 and result.stdout == "some \n"
    assert result.stderr == "error: generate: too long\n  expected: 64\n  got: 99\n"
    fake.script = [InternalError("pass", "broken")]
    result = invoke("m", "Hi")
    assert result.exit_code == 1 and "internal error in pass" in result.stderr
    fake.script = [MemoryError()]
    assert "memory ran out" in invoke("m", "Hi").stderr
    result = invoke("missing", "Hi")
    assert result.exit_code == 1 and "no such model" in result.stderr
    assert "Traceback" not in result.output and "\n  at " not in result.stderr


def test_control_c_keeps_what_was_written(fake: Any) -> None:
    fake.script = ["half an ", "ans", KeyboardInterrupt()]
    result = invoke("m", "Hi")
    assert result.exit_code == 130 and result.stdout == "half an ans\n" and fake.closed == 1
    result = invoke("m", "Hi", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["finish"] == "cancelled"


def test_control_c_while_loading(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(fake), "__call__", stopped)
    result = invoke("m", "Hi")
    assert result.exit_code == 130 and result.stdout == ""


def test_stats_go_to_stderr(fake: Any) -> None:
    result = invoke("m", "Hi", "--stats")
    assert result.stdout == "Hello.\n"
    assert result.stderr.startswith("[a prompt of 4 tokens]\n[3 tokens, the first after")


class Terminal(io.StringIO):
    """A terminal that keeps what it was shown."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_pieces_are_shown_as_they_come(fake: Any) -> None:
    shown = []
    out = run.Answers(Terminal())
    pieces = iter([type("P", (), {"text": t, "token": 1, "finish": None}) for t in ("a", "b")])

    def watched() -> Any:
        for piece in pieces:
            yield piece
            shown.append(out.file.getvalue())

    answer = run.Answer("m", watched(), out)
    answer.take(run.Bars())
    assert shown == ["a", "ab"] and out.file.getvalue() == "ab\n"


def test_bars_only_at_a_terminal_and_gone_before_the_answer(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = invoke("m", "Hi")
    assert "load" not in quiet.output
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with run.Bars() as bars:
        bars.stage("load [x]", 1, 2)
        bars.line("a licence [y]\x1b")
        assert bars.drawn is not None and bars.tasks
        bars.stage("load [x]", 2, 2)
        assert not bars.tasks
        bars.close()
        bars.stage("compile", 0, 1)
        assert bars.drawn is None, "nothing is drawn over an answer"
    assert "load [x]" in screen.getvalue() and "a licence [y]␛" in screen.getvalue()


def test_a_length_is_told_at_a_terminal(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    piece = type("P", (), {"text": "a", "token": 1, "finish": "length"})
    answer = run.Answer("m", iter([piece]), run.Answers(io.StringIO()))
    answer.take(run.Bars())
    answer.finish(False, 4)
    assert "--max-tokens" in screen.getvalue()


def test_an_adapter_reaches_the_model(fake: Any) -> None:
    assert invoke("m.gguf", "Hi", "--lora", "some/folder").exit_code == 0
    assert fake.opened[0]["adapters"] == {"lora": "some/folder"}
    assert fake.asked[0][-1] == {"adapter": "lora"}
