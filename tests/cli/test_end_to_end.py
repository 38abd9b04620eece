"""Commands as people start them: real processes over a tiny real model, a terminal, a signal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegrad.cli.terminal import harmless
from tilegrad.core.config import config

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
COMMAND = [sys.executable, "-m", "tilegrad.cli.main"]
SECONDS = 600  # only against hanging


@pytest.fixture(scope="module")
def environment(commands_cache: str) -> dict[str, str]:
    return {
        **os.environ,
        "TILEGRAD_CACHE": commands_cache,
        "TILEGRAD_VERIFY": "0",
        "COLUMNS": "120",
        "TERM": "xterm",
        "PYTHONUNBUFFERED": "1",
    }


def start(words: list[str], environment: dict[str, str], **settings: Any) -> Any:
    return subprocess.run(
        [*COMMAND, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        **settings,
    )


def test_run_says_the_same_for_the_same_seed(tiny: Path, environment: dict[str, str]) -> None:
    words = ["run", str(tiny), "--max-tokens", "8", "--temperature", "1", "--seed", "5"]
    first = start([*words, "--json"], environment, input="the text\n")
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert record["finish"] == "length" and len(record["tokens"]) == 8
    plain = start([*words, "the text"], environment, stdin=subprocess.DEVNULL)
    assert plain.returncode == 0 and plain.stderr == ""
    assert plain.stdout.rstrip("\n") == harmless(record["text"]).rstrip("\n")
    assert not any(ord(c) < 32 and c not in "\n\t" for c in plain.stdout)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    tiny: Path, environment: dict[str, str]
) -> None:
    found = start(["run", str(tiny), "--raw"], environment, input="x" * 500)
    assert found.returncode == 1 and found.stdout == ""
    assert "500" in found.stderr and "128" in found.stderr and "Traceback" not in found.stderr


def test_a_reader_that_leaves_early_is_no_error(tiny: Path, environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(tiny), "hi", "--max-tokens", "64"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(SECONDS) in (0, 1) and "Traceback" not in said and "error" not in said


def hear_control_c() -> None:
    """What is started in the background of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Screen:
    """A command at a pseudo-terminal: type, and wait for what it shows."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            close_fds=True,
            preexec_fn=hear_control_c,
        )
        os.close(slave)
        self.text = ""

    def wait(self, come: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Take what is shown until something has come."""
        end = time.monotonic() + seconds
        while not come():
            assert time.monotonic() < end, f"{what} did not come:\n{self.text}"
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:
                    data = b""
                assert data, f"{what} did not come before the end:\n{self.text}"
                self.text += data.decode("utf-8", "replace")

    def until(self, words: str) -> str:
        """What was shown, once it has these words; they are then gone from what is waited for."""
        self.wait(lambda: words in self.text, repr(words))
        shown, _, self.text = self.text.partition(words)
        return shown + words

    def more(self, count: int) -> None:
        """Wait for some more characters."""
        self.wait(lambda: len(self.text) >= count, f"{count} characters")

    def type(self, text: str) -> None:
        """Type some keys."""
        os.write(self.master, text.encode())

    def interrupt(self, words: str) -> None:
        """Ctrl-C at a prompt until these words come: one between the prompt and the call that
        waits for keys is heard with the next key only (so is Python's own)."""
        for _ in range(40):
            time.sleep(0.3)
            os.killpg(self.process.pid, signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.wait(lambda: words in self.text, repr(words), 15)
                break
        self.until(words)

    def end(self) -> int:
        """The status with which it ends."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.master, 65536).decode("utf-8", "replace")
        return self.process.wait(SECONDS)

    def close(self) -> None:
        """End it, whatever happens."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def test_a_chat_at_a_terminal(tiny_long: Path, environment: dict[str, str], tmp_path: Path) -> None:
    # the likeliest token each time: drawn ones may end the answer before Ctrl-C comes
    words = ["chat", str(tiny_long), "--max-tokens", "4000", "--temperature", "0"]
    screen = Screen(words, environment)
    try:
        screen.until("16384 tokens of context")
        screen.until(">>> ")
        for _ in range(2):  # Ctrl-C ends an answer, and the next message is answered again
            screen.type("hello\n")
            screen.until("hello")
            screen.more(30)
            os.killpg(screen.process.pid, signal.SIGINT)
            screen.until("[stopped]")
            screen.until(">>> ")
        screen.interrupt("(Ctrl-D leaves)")
        screen.until(">>> ")
        screen.type(f"/save {tmp_path / 'talk.json'}\n")
        screen.until("[4 messages are in")
        screen.until(">>> ")
        screen.type("\x04")
        assert screen.end() == 0, screen.text
        assert "Traceback" not in screen.text
    finally:
        screen.close()
    roles = [m["role"] for m in json.loads((tmp_path / "talk.json").read_text())]
    assert roles == ["user", "assistant"] * 2


def test_control_c_ends_run_with_130(tiny_long: Path, environment: dict[str, str]) -> None:
    screen = Screen(["run", str(tiny_long), "hi", "--stats"], environment)
    try:
        screen.until("\x1b[?25h")  # the bars are gone: the answer begins
        screen.more(20)
        os.killpg(screen.process.pid, signal.SIGINT)
        assert screen.end() == 130, screen.text
        assert "Traceback" not in screen.text and " tokens, the first after" in screen.text
    finally:
        screen.close()


def kept() -> bool:
    """Whether smollm2 was fetched by somebody before: tests do not download it."""
    folder = config().cache_folder
    return bool(folder) and (Path(folder).expanduser() / "models" / "smollm2.gguf").is_file()


@pytest.mark.skipif(not kept(), reason="smollm2 was not fetched")
def test_the_programs_of_the_page(capsys: pytest.CaptureFixture) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "llm.md"
    programs = re.findall(r"^```py\n(.*?)^```\n```text\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(programs) == 3
    space: dict[str, Any] = {}
    for program, said in programs:
        exec(program, space)
        shown = capsys.readouterr().out
        assert shown.split()[:4] == said.split()[:4], "later words may differ by rounding"


@pytest.mark.skipif(not kept(), reason="smollm2 was not fetched")
def test_the_first_command_of_the_readme() -> None:
    found = subprocess.run(
        [*COMMAND, "run", "smollm2", "What is the capital of France?", "--max-tokens", "16"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert found.returncode == 0, found.stderr
    assert "Paris" in found.stdout
