"""The command line: versions, cache, doctor, errors, and a short demo."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad import __version__
from tilegrad.cli import doctor, main
from tilegrad.core.config import override
from tilegrad.core.errors import UserError

RUNNER = CliRunner()


def test_as_a_module() -> None:
    """`python -m tilegrad` is the command."""
    command = [sys.executable, "-m", "tilegrad", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0 and said.stdout.startswith(f"tilegrad {__version__} ")


def test_version() -> None:
    result = RUNNER.invoke(main.app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith(f"tilegrad {__version__} ")


def test_help_lists_the_commands() -> None:
    result = RUNNER.invoke(main.app, ["--help"])
    assert all(name in result.output for name in ("demo", "doctor", "cache", "version"))


def test_help_shows_flags_as_flags() -> None:
    from typer.main import get_command

    def commands(command: Any, words: list[str]) -> Any:
        yield words
        for name, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, [*words, name])

    for words in commands(get_command(main.app), []):
        shown = RUNNER.invoke(main.app, [*words, "--help"])
        assert shown.exit_code == 0 and "--help" in shown.output, words
        assert "bool" not in shown.output.lower(), words


def test_cache(tmp_path: Path) -> None:
    from tilegrad.runtime.store import default_store

    with override(cache_folder=str(tmp_path)):
        default_store().put("a" * 64, b"x" * 2**20)
        shown = RUNNER.invoke(main.app, ["cache"]).output
        assert str(tmp_path) in shown and "1.0 of at most" in shown
        assert RUNNER.invoke(main.app, ["cache", "show"]).output == shown
        assert "freed 1.0 MiB" in RUNNER.invoke(main.app, ["cache", "clear"]).output
        assert "0.0 of at most" in RUNNER.invoke(main.app, ["cache"]).output
    with override(cache_folder=""):
        assert "off" in RUNNER.invoke(main.app, ["cache"]).output


def test_doctor() -> None:
    result = RUNNER.invoke(main.app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("python", "cpu", "threads", "memory", "cache", "self-test passed"):
        assert word in result.output


def test_doctor_offers_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    extras = page.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(doctor.EXTRAS) == set(re.findall(r"^(\w+) = ", extras, re.M))
    asked = [
        "numpy>=1",
        "no-such-package<14,>=13.0; extra == 'cuda'",
        "numpy; extra == 'test'",
        "no_such.other==1.*; (sys_platform == 'linux') and extra == 'cuda'",
        "not-for-this-python>=2; python_version < '3.9' and extra == 'cuda'",
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: asked)
    assert doctor.extra_line("cuda") == (
        'missing: pip install "no-such-package<14,>=13.0" "no_such.other==1.*"'
    )
    assert doctor.extra_line("test") == "here"


def test_an_error_ends_with_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(prog_name: str) -> None:
        raise UserError("no", op="demo", expected="this", got="that")

    monkeypatch.setattr(main, "chosen", lambda words: fail)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 1
    assert "error: demo: no\n  expected: this\n  got: that" in capsys.readouterr().err


SLOW = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
class Slow:
    def find_spec(self, name, *rest):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Slow())
from tilegrad_command import main
sys.argv = ["tilegrad", "doctor"]
main()
"""


@pytest.mark.parametrize(
    "at", ["numpy._core.umath", "tilegrad.tensor", "tilegrad.cli.commands", "tilegrad.cli.doctor"]
)
def test_control_c_while_modules_are_imported(at: str) -> None:
    found = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", SLOW.format(at=at)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 130 and not found.stdout and "Traceback" not in found.stderr, found


def test_control_c_in_a_demo_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from tilegrad.train import demo

    for stopped, status in ((False, 0), (True, 130)):
        made = SimpleNamespace(history=SimpleNamespace(stopped=stopped))
        monkeypatch.setattr(demo, "run_demo", lambda *_, made=made: made)
        assert RUNNER.invoke(main.app, ["demo"]).exit_code == status


def test_demo() -> None:
    from tilegrad.train.demo import read_text, run_demo

    said: list[str] = []
    stages: list[tuple[Any, ...]] = []
    made = run_demo(steps=3, say=said.append, stage=lambda *stage: stages.append(stage))
    assert made.history.steps == 3 and not made.history.stopped
    assert made.history.losses[0] == pytest.approx(4.17, abs=0.15)
    assert "tokens/s" in said[1] and made.sample in said[2]
    assert stages[:2] == [("compile", 0, 1), ("compile", 1, 1)]
    assert stages[2][:3] == ("training", 1.0, 3.0) and "step 1, loss 4." in stages[2][3]
    assert all(
        any(name == n and done == total for n, done, total, *_ in stages) for name, *_ in stages
    ), "every stage ends"
    assert set(made.sample) <= set(read_text())
    with pytest.raises(UserError, match="nothing to do"):
        run_demo(steps=0)


def test_adapters_of_a_server_are_names_and_folders() -> None:
    import os

    import typer

    from tilegrad.cli import options

    assert options.adapters(None) == {}
    found = options.adapters(["a=x", "b=y=z"])["adapters"]
    assert found == {"a": os.path.abspath("x"), "b": os.path.abspath("y=z")}
    for wrong in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(typer.BadParameter):
            options.adapters(wrong)
