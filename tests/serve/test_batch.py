"""Batches: lines in, lines out, errors a line each, runs that go on where one ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad.cli import main
from tilegrad.core.errors import UserError
from tilegrad.generate.llm import LLM
from tilegrad.serve.batch.batch_run import Counts, run_batch
from tilegrad.serve.batch.file import Answered, check_ids, read_lines
from tilegrad.serve.settings import Settings

HERE = Path(__file__).parent
RUNNER = CliRunner()
LONG = 600.0  # seconds; only against hanging


def chat(name: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def answers(path: Path) -> dict[str, Any]:
    """The answers of a file by their ids; every line must be whole."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = {record["custom_id"]: record for record in records}
    assert len(found) == len(records), "an id was answered twice"
    return found


def text_of(record: Any) -> str:
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def settings(model: Path, **opening: Any) -> Settings:
    command = (sys.executable, str(HERE / "scripted_engine.py"))
    return Settings(str(model), "tiny", command=command, opening={"requests": 4, **opening})


def run(model: Path, source: Path, out: Path, again: bool = False) -> Counts:
    counts = Counts()
    work = run_batch(settings(model), source, Answered(out, again), counts)
    asyncio.run(asyncio.wait_for(work, LONG))
    return counts


def test_all_shapes_of_lines(tiny_path: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        chat("a", "SAY one"),
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "SAY two"}},
        {"prompt": "SAY three", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "SAY four"}]},
        "",
        {"custom_id": "many", "prompt": ["SAY x", "SAY y"]},
    ]
    out = tmp_path / "out.jsonl"
    counts = run(tiny_path, write(tmp_path / "in.jsonl", lines), out)
    found = answers(out)
    assert (counts.good, counts.failed, counts.total) == (5, 0, 5)
    assert [text_of(found[n]) for n in ("a", "b", "line-3", "line-4")] == [
        "one",
        "two",
        "thr",
        "four",
    ]
    body = found["many"]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["x", "y"]
    assert found["a"]["response"]["status_code"] == 200 and found["a"]["error"] is None
    assert found["a"]["response"]["body"]["model"] == "tiny"
    assert counts.answer_tokens == sum(
        record["response"]["body"]["usage"]["completion_tokens"] for record in found.values()
    )


def test_errors_are_lines(tiny_path: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        "{not json",
        "[1]",
        {"custom_id": 5, "prompt": "x"},
        {"custom_id": "url", "url": "/v1/files", "body": {}},
        {"custom_id": "body", "url": "/v1/completions", "body": "x"},
        chat("hot", "x", temperature=9),
        chat("streamed", "x", stream=True),
        chat("nan", "NAN"),
        {"custom_id": "long", "prompt": "x" * 600},
        chat("fine", "SAY fine"),
    ]
    out = tmp_path / "out.jsonl"
    counts = run(tiny_path, write(tmp_path / "in.jsonl", lines), out)
    found = answers(out)
    assert (counts.good, counts.failed) == (1, 9) and text_of(found["fine"]) == "fine"
    for name in ("line-1", "line-2", "line-3", "url"):
        assert found[name]["response"] is None and found[name]["error"]["message"]
    errors = {n: r["response"] for n, r in found.items() if r["response"]}
    assert errors["hot"]["status_code"] == 400
    assert errors["hot"]["body"]["error"]["param"] == "temperature"
    assert "not for batches" in errors["streamed"]["body"]["error"]["message"]
    assert "not finite" in errors["nan"]["body"]["error"]["message"]
    assert errors["long"]["body"]["error"]["code"] == "context_length_exceeded"
    # They are answered: another run asks for nothing, unless it is told to.
    before = out.read_bytes()
    assert run(tiny_path, tmp_path / "in.jsonl", out).skipped == 10 and out.read_bytes() == before
    write(tmp_path / "in.jsonl", [*lines[:-2], chat("long", "SAY short"), lines[-1]])
    again = run(tiny_path, tmp_path / "in.jsonl", out, again=True)
    assert (again.skipped, again.good, again.failed) == (1, 1, 8)
    assert text_of(answers(out)["long"]) == "short"


def test_a_run_that_was_cut_off_goes_on(tiny_path: Path, tmp_path: Path) -> None:
    """The first two lines are answered, the others held until it is cut off."""
    lines = [chat(f"n{i}", f"{'HOLD ' * (i > 1)}SAY {'x' * (5 + 8 * i)}") for i in range(12)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    counts, hold = Counts(), tmp_path / "hold"
    hold.touch()

    async def cut_off() -> None:
        held = settings(tiny_path, hold=str(hold), requests=12)  # room for all
        work = asyncio.create_task(run_batch(held, source, Answered(out), counts))
        while counts.good < 2:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(asyncio.wait_for(cut_off(), LONG))
    first = answers(out)
    assert set(first) == {"n0", "n1"}
    with out.open("ab") as file:
        file.write(b'{"custom_id": "n11", "resp')  # as a process that was killed leaves it
    assert Answered(out).torn and not Answered(out).torn, "the first repaired it"
    counts = run(tiny_path, source, out)
    assert counts.skipped == len(first) and counts.good == 12 - len(first)
    found = answers(out)
    assert {n: found[n] for n in first} == first
    assert [text_of(found[f"n{i}"]) for i in range(12)] == ["x" * (5 + 8 * i) for i in range(12)]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice", [{"custom_id": "a", "prompt": "x"}] * 2)
    with pytest.raises(UserError, match="two lines have one custom_id"):
        check_ids(twice)
    with pytest.raises(UserError, match="cannot be read"):
        list(read_lines(tmp_path / "none"))
    other = write(tmp_path / "other", [{"a": 1}])
    with pytest.raises(UserError, match="line 1 is no answer of a batch"):
        Answered(other)
    assert other.read_text() == '{"a": 1}\n'
    with pytest.raises(UserError, match="cannot be written"):
        Answered(tmp_path / "no" / "such").__enter__()
    mine = tmp_path / "mine"
    for text in ("one line of mine", '{"custom_id": "a", "prompt": "x"}\n', '{"custom_id": "a"'):
        mine.write_text(text)  # requests too: IN for OUT
        with pytest.raises(UserError, match="line 1 is no answer of a batch"):
            Answered(mine)
        assert mine.read_text() == text, "nothing of it is cut off"


def test_the_command(tiny_path: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"line {i}", "max_tokens": 4, "temperature": 0} for i in range(6)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    words = ["batch", str(source), str(out), "--model", str(tiny_path), "--threads", "1"]
    words += ["--requests", "4"]
    result = RUNNER.invoke(main.app, words)
    assert result.exit_code == 0, result.output
    assert "6 of 6 answered" in result.stderr and len(answers(out)) == 6
    assert "6 by an earlier run" in RUNNER.invoke(main.app, words).stderr
    assert RUNNER.invoke(main.app, ["batch", str(source), str(out)]).exit_code == 2


def test_the_level_of_determinism(tiny_path: Path, tmp_path: Path) -> None:
    """At `invariant`, answers made beside one another have the logprobs of each alone."""
    more = {"max_tokens": 5, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    lines = [{"custom_id": text, "prompt": text, **more} for text in ("a", "bcd" * 20, "ef" * 9)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    words = ["batch", str(source), str(out), "--model", str(tiny_path), "--threads", "1"]
    words += ["--requests", "3", "--determinism"]
    assert RUNNER.invoke(main.app, [*words, "most"]).exit_code == 2
    result = RUNNER.invoke(main.app, [*words, "invariant"])
    assert result.exit_code == 0, result.output
    llm = LLM(tiny_path, requests=1, threads=1, determinism="invariant")
    found = answers(out)
    assert len(found) == 3
    given = {"max_tokens": 5, "temperature": 0, "logprobs": 2, "ignore_end": True}
    for text, record in found.items():
        alone = llm.generate(text, **given)
        choice = record["response"]["body"]["choices"][0]
        assert choice["text"] == alone.text
        assert choice["logprobs"]["token_logprobs"] == list(alone.logprobs)


def test_ctrl_c(tiny_path: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "x", "max_tokens": 4 + 40 * i, "ignore_eos": True} for i in range(5)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tilegrad.cli.main", "batch", str(source), str(out)]
    command += ["--model", str(tiny_path), "--threads", "1", "--requests", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    end = time.monotonic() + LONG
    while not (out.exists() and out.stat().st_size) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=LONG)[1]
    found = answers(out)
    if process.returncode == 0:  # it was quicker than the signal
        assert len(found) == 5
    else:
        assert process.returncode == 130 and "goes on from there" in said, said
        assert 1 <= len(found) <= 5
