"""Every command typed at a terminal, with stdout the terminal, a pipe and a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple

import pytest

COMMAND = [sys.executable, "-m", "tilegrad.cli.main"]
SECONDS = 240
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PLACES = ("terminal", "pipe", "file")


class Typed(NamedTuple):
    """What came of a command: its status, what the terminal got and what stdout got."""

    status: int
    screen: str
    stdout: str


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache for all commands here: what one compiles the next ones find."""
    folder = tmp_path_factory.mktemp("cache")
    found = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "CI")}
    return {**found, "TILEGRAD_CACHE": str(folder), "TILEGRAD_VERIFY": "0", "TERM": "xterm",
            "PYTHONUNBUFFERED": "1"}  # fmt: skip


def typed(words: list[str], environment: dict[str, str], place: str, folder: Path,
          keys: str = "", columns: int = 100) -> Typed:  # fmt: skip
    """Run a command at a pseudo-terminal; its stdout goes to `place`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    file = folder / "out.txt"
    out = slave if place == "terminal" else (
        subprocess.PIPE if place == "pipe" else os.open(file, os.O_CREAT | os.O_WRONLY))
    process = subprocess.Popen([*COMMAND, *words], env=environment, stdin=slave, stdout=out,
                               stderr=slave, start_new_session=True)  # fmt: skip
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
    """What is left on a screen's lines, as far as the tests here care."""
    return ESCAPES.sub("", text).replace("\r\n", "\n")


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
    assert plain(screen.rpartition("\x1b[?25h")[2]).lstrip("\r\n").startswith(answer)
    for place in ("pipe", "file"):
        assert answer.strip() not in plain(found[place].screen)
