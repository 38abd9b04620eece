"""Every command typed at a terminal, with stdout the terminal, a pipe and a file; progress."""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tilegrad.cli import progress

fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))
COLOURS = {"COLUMNS", "NO_COLOR", "CI", "GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"}
COMMAND = [sys.executable, "-m", "tilegrad.cli.main"]
SECONDS = 600  # only against hanging
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PLACES = ("terminal", "pipe", "file")


class Typed(NamedTuple):
    """What came of a command: its status, what the terminal got and what stdout got."""

    status: int
    screen: str
    stdout: str


@pytest.fixture(scope="module")
def environment(commands_cache: str) -> dict[str, str]:
    found = {k: v for k, v in os.environ.items() if k not in COLOURS}
    return {
        **found,
        "TILEGRAD_CACHE": commands_cache,
        "TILEGRAD_VERIFY": "0",
        "TERM": "xterm",
        "PYTHONUNBUFFERED": "1",
    }


def typed(
    words: list[str],
    environment: dict[str, str],
    place: str,
    folder: Path,
    keys: str = "",
    columns: int = 100,
) -> Typed:
    """Run a command at a pseudo-terminal; its stdout goes to `place`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    file = folder / "out.txt"
    out = (
        slave
        if place == "terminal"
        else (subprocess.PIPE if place == "pipe" else os.open(file, os.O_CREAT | os.O_WRONLY))
    )
    process = subprocess.Popen(
        [*COMMAND, *words],
        env=environment,
        stdin=slave,
        stdout=out,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    if place == "file":
        os.close(out)
    streams = {master: b""} | ({process.stdout.fileno(): b""} if process.stdout else {})
    os.write(master, keys.encode())
    watched, end = set(streams), time.monotonic() + SECONDS
    while watched and time.monotonic() < end:
        for stream in select.select(list(watched), [], [], 0.5)[0]:
            data = b""
            with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
                data = os.read(stream, 65536)
            streams[stream] += data
            watched -= set() if data else {stream}
    if watched:
        process.kill()
    status = process.wait()
    if process.stdout:
        process.stdout.close()
    os.close(master)
    screen = streams.pop(master).decode("utf-8", "replace")
    held = file.read_bytes() if place == "file" else b"".join(streams.values())
    shown = screen if place == "terminal" else held.decode()
    assert not watched, f"did not end:\n{screen}"
    assert "Traceback" not in screen and "Traceback" not in shown, screen
    assert place == "terminal" or "\x1b" not in shown, "colours and bars are for terminals"
    return Typed(status, screen, shown)


def plain(text: str) -> str:
    """What is left on a screen's lines: a carriage return begins its line anew."""
    return re.sub(r"[^\n]*\r(?!\n)", "", ESCAPES.sub("", text).replace("\r\n", "\n"))


def test_run_writes_its_answer_where_stdout_goes(
    tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["run", str(tiny), "hi", "--max-tokens", "24", "--temperature", "1", "--seed", "5"]
    found = {place: typed(words, environment, place, tmp_path) for place in PLACES}
    assert all(f.status == 0 for f in found.values()), found
    answer = found["pipe"].stdout
    assert len(answer) >= 20 and answer == found["file"].stdout
    screen = found["terminal"].screen
    assert "\x1b[?25l" in screen, "a bar was drawn"
    assert plain(screen.rpartition("\x1b[?25h")[2]).lstrip("\n").startswith(answer)
    for place in ("pipe", "file"):
        assert answer.strip() not in plain(found[place].screen)


# words of a command, its status, and a line that its stdout has
COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "version": (["--version"], 0, r"^tilegrad \d+\.\d+\.\d+ \(Python 3"),
    "help": (["--help"], 0, r"Usage: tilegrad \[OPTIONS\] COMMAND"),
    "doctor": (["doctor"], 0, r"^self-test passed: "),
    "models": (["models"], 0, r"^smollm2 .*not fetched yet$"),
    "info": (["info", "TINY"], 0, r"^speed .* tokens/s"),
    "json": (["run", "TINY", "hi", "--max-tokens", "2", "--json"], 0, r'^\{"model": .*\}$'),
    "bench": (
        ["bench", "TINY", "--prompt", "4", "--tokens", "4", "--repeats", "1"],
        0,
        r"^answer .* tokens/s",
    ),
    "demo": (["demo", "--steps", "2"], 0, r"^2 steps, loss \d"),
    "tune": (["tune", "matmul", "--shape", "8x64x64", "--device", "cuda:99"], 1, ""),
    "missing": (["run", "no-such-model", "hi"], 1, ""),
    "option": (["run", "--no-such-option"], 2, ""),
}


@pytest.mark.parametrize(
    "name", [*(n for n in COMMANDS if n != "demo"), pytest.param("demo", marks=pytest.mark.slow)]
)
def test_results_go_to_stdout_and_the_rest_does_not(
    name: str, tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words, status, line = COMMANDS[name]
    words = [str(tiny) if word == "TINY" else word for word in words]
    for place in PLACES if name == "json" else ("terminal", "file"):  # a pipe is as a file
        found = typed(words, environment, place, tmp_path)
        assert found.status == status, found
        if not status:
            assert re.search(line, plain(found.stdout), re.M), found
            assert place == "terminal" or not re.search(line, plain(found.screen), re.M), found
        else:
            assert "error" in found.screen.lower(), found
            assert place == "terminal" or not found.stdout, found
        if name == "demo":
            assert "compiling" in found.screen and "compiling" not in (
                "" if place == "terminal" else found.stdout
            )
        if name == "tune":
            assert "GPU" in found.screen, "says what is missing"


def test_a_chat_writes_its_answers_where_stdout_goes(
    tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["chat", str(tiny), "--max-tokens", "6", "--temperature", "1", "--seed", "5"]
    keys = "hi\n/exit\n"
    answers = [typed(words, environment, place, tmp_path, keys) for place in ("pipe", "file")]
    assert all(found.status == 0 and ">>> " in found.screen for found in answers), answers
    assert answers[0].stdout == answers[1].stdout != ""
    assert typed(words, environment, "terminal", tmp_path, keys).status == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("models >&-", "error: tilegrad: stdout is closed\n"),
        ("cache >&-", "error: tilegrad: stdout is closed\n"),
        ("doctor >&-", "error: tilegrad: stdout is closed\n"),
        ("chip compare resnet-50 --chips h200 >&-", "error: tilegrad: stdout is closed\n"),
        ("explain tilegrad:sin 'float32[3]' >&-", "error: tilegrad: stdout is closed\n"),
        ("info no-such 2>&-", ""),
    ],
)
def test_a_stream_that_is_closed(words: str, said: str, environment: dict[str, str]) -> None:
    found = subprocess.run(
        ["sh", "-c", f'"$@" {words}', "sh", *COMMAND],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1 and found.stdout == "", "what is for stderr is not put there"
    assert found.stderr.startswith(said) and bool(found.stderr) == bool(said)


@pytest.mark.parametrize("stdin", ["<&-", "</dev/null", "0>/dev/null"])
@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_stdin_that_nobody_writes(
    command: str, stdin: str, tiny: Path, environment: dict[str, str]
) -> None:
    """Closed, ended, or not to be read (as nohup leaves it): a chat is over, a prompt whole."""
    words = [command, str(tiny), *(["hi"] if command == "run" else []), "--max-tokens", "8"]
    found = subprocess.run(
        ["sh", "-c", f'"$@" --temperature 0 {stdin}', "sh", *COMMAND, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert found.returncode == 0 and "rror" not in found.stderr, found.stderr
    assert bool(found.stdout) == (command == "run")


# ---- progress ------------------------------------------------------------------------------------


def test_lines_where_no_bar_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def told(count: int) -> list[str]:
        lines: list[str] = []
        end = time.monotonic() + SECONDS
        while len(lines) < count and time.monotonic() < end:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
        return lines

    with progress.Bars() as bars:
        bars.stage("load", 0, 1)
        bars.stage("load", 1, 1)
    assert capsys.readouterr() == ("", ""), "what is quick has none"
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.Bars() as bars:
        bars.stage("compile", 0, 1)
        assert all(re.fullmatch(r"\[compiling; \d+ s\]", line) for line in told(2))
        bars.stage("compile", 1, 1)
        bars.stage("training", 25.0, 100.0, "step 7")
        assert re.fullmatch(r"\[training, 25%, step 7; \d+ s\]", told(3)[-1])
        bars.put("a result")
        bars.close()
        bars.stage("load", 0, 1)
    assert bars.told is None and capsys.readouterr().out == "a result\n"


def test_bars_make_room_for_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(progress, "is_terminal", lambda stream: True)
    before = sys.stdout
    with progress.Bars() as bars:
        bars.stage("a [bold]name", 1, 4, "a note")
        assert sys.stdout is before, "what writes to stdout still does"
        bars.put("one")
        bars.stage("a [bold]name", 4, 4)
        bars.put("two")
    assert capsys.readouterr().out == "one\ntwo\n"
