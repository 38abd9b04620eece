"""`tilegrad explain` and `tilegrad compile` given a person's function: its errors are theirs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad.cli import program
from tilegrad.cli.main import app

RUNNER = CliRunner()
Ask = Callable[..., Any]


@pytest.fixture(params=["explain", "compile"])
def ask(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """A command on a function, where one stands in a folder of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def asked(name: str, *words: str) -> Any:
        out = ["--out", str(tmp_path / "made")] if request.param == "compile" else []
        found = RUNNER.invoke(app, [request.param, name, *words, *out])
        assert "internal error" not in found.output and "Traceback" not in found.output
        assert found.exit_code == 0 or not (tmp_path / "made").exists()
        return found

    yield asked
    for name in ("mine", "beside", "my file"):
        sys.modules.pop(name, None)


def write(name: str, *lines: str) -> None:
    Path(name).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return a + [1, 2][7]", "IndexError: list index out of range"),
        ("return a.reluu()", "AttributeError: 'Tensor' object has no attribute 'reluu'"),
        ("return np.zeros((2, 3)).reshape(7)", "ValueError: cannot reshape array of size 6"),
        ("return a @ tg.ones(7, 7)", "matmul: inner sizes differ"),
        ("return a if a.sum() > 0 else -a", "value of a Tensor was read"),
        ("raise SystemExit(3)", "it ended the program: SystemExit: 3"),
        ("raise RuntimeError", "got: RuntimeError"),
    ],
)
def test_what_a_function_raises_is_told_with_its_line(ask: Ask, body: str, said: str) -> None:
    write("mine.py", "import numpy as np, tilegrad as tg", "def f(a):", "    return g(a)", "")
    with open("mine.py", "a") as file:
        file.write(f"def g(a):\n    {body}\n")
    for name in ("mine.py:f", "mine:f"):
        sys.modules.pop("mine", None)
        found = ask(name, "float32[3,3]")
        assert found.exit_code == 1 and said in found.output, found.output
        assert "mine.py:6" in found.output and len(found.output.splitlines()) < 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = x / 0", "ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(a:", "SyntaxError"),
        ("\nimport no_such_module", "No module named 'no_such_module'"),
        ("\nfrom os import no_such_name", "cannot import name 'no_such_name'"),
        ("import sys\nsys.exit('bye')", "it ended the program: SystemExit: bye"),
        ("import tilegrad as tg\ntg.ones(3) + tg.ones(4)", "shapes do not broadcast"),
    ],
)
def test_a_file_that_cannot_be_read(ask: Ask, text: str, said: str) -> None:
    write("mine.py", text, "def f(a):", "    return a")
    found = ask("mine.py:f", "float32[3]")
    assert found.exit_code == 1 and said in found.output, found.output
    assert "mine.py:2" in found.output


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("mine.py:fumction", ["float32[3]"], "did you mean mine.py:function?"),
        ("mine.py:number", ["float32[3]"], "number is no function"),
        ("nope.py:f", ["float32[3]"], "no such file"),
        ("nope:f", ["float32[3]"], "no module named nope"),
        ("mine.py:function", ["float32[3]"], "missing a required argument: 'b'"),
        ("mine.py:function", ["float32[3]"] * 3, "got: (Tensor, Tensor, Tensor)"),
        ("mine.py:function", ["float32(3)"], "float32[256,256]"),
        ("mine.py:later", ["float32[3]"], "an async function"),
        ("mine.py:each", ["float32[3]"], "a generator"),
    ],
)
def test_what_is_no_function_of_these(ask: Ask, name: str, words: list[str], said: str) -> None:
    lines = ["def function(a, b):", "    return a + b", "number = 3"]
    write("mine.py", *lines, "async def later(a):", "    return a", "def each(a):", "    yield a")
    found = ask(name, *words)
    assert found.exit_code == 1 and said in found.output, found.output


@pytest.mark.parametrize(
    ("level", "target", "status"),
    [("ptx", "avx2", 1), ("llvm", "h200", 1), ("llvm", "avx2", 0), ("ptx", "h200", 0)],
)
def test_a_level_that_a_target_does_not_have(level: str, target: str, status: int) -> None:
    words = ["explain", "tilegrad:sin", "float32[8]", "--level", level, "--target", target]
    found = RUNNER.invoke(app, words)
    assert found.exit_code == status, found.output
    assert status == 0 or ("no text of this level" in found.output and level in found.output)


def test_a_file_may_have_neighbours_and_dataclasses(ask: Ask) -> None:
    write("beside.py", "def twice(a):", "    return a * 2")
    write(
        "my file.py",
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "from beside import twice",
        "@dataclass",
        "class Sizes:",
        "    factor: int = 3",
        "def f(a):",
        "    return twice(a) * Sizes().factor",
    )
    found = ask("my file.py:f", "float32[3]")
    assert found.exit_code == 0, found.output


def test_a_module_lies_where_one_stands(tmp_path: Path) -> None:
    """The command is a script elsewhere: its folder is not where a person's modules are."""
    (tmp_path / "mine.py").write_text("def f(a):\n    return a + 1\n")
    code = "import sys; sys.path.remove(''); from tilegrad.cli.main import main; main()"
    package = str(Path(program.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", "mine:f", "float32[3]"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": package},
    )
    assert done.returncode == 0 and "f for" in done.stdout, done.stderr


def test_what_our_code_raises_stays_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def f(a):\n    return a.exp()\n")
    explaining = importlib.import_module("tilegrad.tensor.explain")
    monkeypatch.setattr(explaining, "explain_graph", None)
    found = RUNNER.invoke(app, ["explain", f"{tmp_path / 'mine.py'}:f", "float32[3]"])
    assert isinstance(found.exception, TypeError)
