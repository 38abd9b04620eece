"""A person's program passes `mypy --strict` and pyright, and wrong names and arguments do not.

The program (`tests/typed/user_program.py`) also runs, so what the checkers take is what works.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilegrad

SOURCE = Path(tilegrad.__file__).resolve().parents[1]
PROGRAM = Path(__file__).parent / "typed" / "user_program.py"
MISTAKES = {
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("# error")
}
# As a person has it who installed the package: its own files are read, not judged.
CONFIG = """
[mypy]
strict = True
mypy_path = {source}
cache_dir = {cache}
[mypy-tilegrad.*]
ignore_errors = True
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A checker's answer."""
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


def test_mypy_takes_the_program_and_refuses_its_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG.format(source=SOURCE, cache=tmp_path / "cache"))
    found = run(
        sys.executable, "-m", "mypy", "--config-file", str(config), str(PROGRAM), folder=tmp_path
    )
    assert not found.stderr, found.stderr
    lines = {int(n) for n in re.findall(r"user_program\.py:(\d+): error:", found.stdout)}
    assert lines == MISTAKES, found.stdout


def test_pyright_takes_the_program_and_refuses_its_mistakes(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    if shutil.which("node") is None:
        pytest.skip("pyright needs node, which is not installed")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SOURCE)]}))
    pyright = (sys.executable, "-m", "pyright")
    if run(*pyright, "--version", folder=tmp_path).returncode:
        pytest.skip("pyright cannot fetch its own program here")
    shutil.copy(PROGRAM, tmp_path)
    found = run(*pyright, "--outputjson", "--pythonpath", sys.executable, folder=tmp_path)
    told = json.loads(found.stdout)["generalDiagnostics"]
    errors = {d["range"]["start"]["line"] + 1 for d in told if d["severity"] == "error"}
    assert errors == MISTAKES, found.stdout


def test_the_program_runs(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("user_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    found = program.main(tmp_path)
    assert len(found["losses"]) == 5 and found["text"].startswith("tilegrad-ir")
    assert found["gradient"] > 0 and len(found["chosen"]) == 8
