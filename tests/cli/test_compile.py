"""`tilegrad compile`: models and functions into folders that run without the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from without_compiler import WITHOUT_COMPILER

from tilegrad.cli.main import app
from tilegrad.compiler.loader import leave_bundle, opened_bundles
from tilegrad.targets.ptx.assemble import find_ptxas

RUNNER = CliRunner()
BLOCKED = f"""{WITHOUT_COMPILER}
from tilegrad.cli.main import main
sys.argv = ["tilegrad", *sys.argv[1:]]
main()
"""


def invoke(*words: str) -> Any:
    found = RUNNER.invoke(app, list(words))
    assert found.exit_code == 0, found.output + str(found.exception)
    return found


@pytest.fixture(autouse=True)
def no_bundles() -> Any:
    yield
    for opened in opened_bundles():
        leave_bundle(opened.bundle)


def test_a_model(tiny: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "tiny.bundle")
    said = invoke("compile", str(tiny), "--out", folder, "--requests", "2")
    assert "written" in said.output
    options = ["--max-tokens", "6", "--temperature", "0", "--raw"]
    expected = invoke("run", str(tiny), "hello", *options).stdout
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "run", folder, "hello", *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TILEGRAD_CACHE": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == expected and expected.strip()
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    assert manifest["model"] == "tiny.gguf" and manifest["llm"]["requests"] == 2
    other = RUNNER.invoke(app, ["run", folder, "hello", "--context", "64"])
    assert other.exit_code == 1 and "another context" in other.output


def test_a_function(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def f(a, b):\n    return (a @ b).relu()\n")
    words = ["compile", f"{source}:f", "float32[8,8]", "float32[8,4]"]
    invoke(*words, "--out", str(tmp_path / "here"))
    invoke(*words, "--out", str(tmp_path / "arm"), "--target", "aarch64")
    if find_ptxas() is not None:
        invoke(*words, "--out", str(tmp_path / "gpu"), "--target", "sm_80")
    manifest = json.loads((tmp_path / "arm" / "manifest.json").read_text())
    assert "aarch64" in manifest["target"] and manifest["device"] == "cpu"


def test_what_is_refused(tiny: Path, tmp_path: Path) -> None:
    found = RUNNER.invoke(app, ["compile", str(tiny)])
    assert found.exit_code == 2 and "--out" in found.output
    out = ["--out", str(tmp_path / "b")]
    found = RUNNER.invoke(app, ["compile", str(tiny), *out, "--target", "z80"])
    assert found.exit_code == 1 and "unknown Target" in found.output
    found = RUNNER.invoke(app, ["compile", str(tiny), "float32[4]", *out])
    assert found.exit_code == 2 and "float32[4]" in found.output and not (tmp_path / "b").exists()
    (tmp_path / "b").mkdir(exist_ok=True)
    found = RUNNER.invoke(app, ["run", str(tmp_path / "b"), "hello"])
    assert found.exit_code == 1


def test_options_of_models_are_refused_for_functions(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def f(a):\n    return a + 1\n")
    words = ["compile", f"{source}:f", "float32[4]", "--out", str(tmp_path / "b")]
    found = RUNNER.invoke(app, [*words, "--guesses", "3", "--kv-cache-dtype", "fp8"])
    assert found.exit_code == 2 and not (tmp_path / "b").exists()
    assert "--kv-cache-dtype, --guesses" in found.output


@pytest.mark.parametrize(("context", "guesses"), [("8", "20"), ("64", "100000")])
def test_guesses_fit_the_context(tiny: Path, tmp_path: Path, context: str, guesses: str) -> None:
    words = ["compile", str(tiny), "--out", str(tmp_path / "b"), "--context", context]
    found = RUNNER.invoke(app, [*words, "--guesses", guesses])
    assert found.exit_code == 1 and not (tmp_path / "b").exists()
    assert "more guesses than the context holds" in found.output
