"""The command line: versions, cache, doctor, errors, and a short demo."""

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilegrad import __version__
from tilegrad.cli import doctor, main
from tilegrad.core.config import override
from tilegrad.core.errors import UserError

RUNNER = CliRunner()


def test_version() -> None:
    result = RUNNER.invoke(main.app, ["version"])
    assert result.exit_code == 0 and result.output.startswith(f"tilegrad {__version__} ")


def test_help_lists_the_commands() -> None:
    result = RUNNER.invoke(main.app, ["--help"])
    assert all(name in result.output for name in ("demo", "doctor", "cache", "version"))


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
    assert not doctor.has_module("no_such_package.part")


def test_an_error_ends_with_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail() -> None:
        raise UserError("no", op="demo", expected="this", got="that")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 1
    assert "error: demo: no\n  expected: this\n  got: that" in capsys.readouterr().err


def test_demo() -> None:
    from rich.console import Console

    from tilegrad.train.demo import read_text, run_demo

    text = io.StringIO()
    made = run_demo(steps=3, console=Console(file=text, width=100))
    assert made.history.steps == 3 and not made.history.stopped
    assert made.history.losses[0] == pytest.approx(4.17, abs=0.15)
    assert "sample" in text.getvalue() and "tokens/s" in text.getvalue()
    assert set(made.sample) <= set(read_text())
    with pytest.raises(UserError, match="nothing to do"):
        run_demo(steps=0)
