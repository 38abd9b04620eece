"""The code in README.md and docs runs, and prints what the pages say it prints.

A ```python block is run; a ```text block right after it is what it printed, compared exactly. A
block in another language after it (```llvm, ```asm) is real output too, but depends on the
machine and is not compared. `python tests/test_docs.py` writes all of them anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [p for p in PAGES if "```python" in p.read_text()]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def run_page(path: Path) -> list[tuple[re.Match[str], str]]:
    """Run a page's code in order; each block of output with what was printed."""
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    space: dict[str, object] = {"__name__": "page"}
    found: list[tuple[re.Match[str], str]] = []
    printed, end = None, 0
    for block in FENCE.finditer(text):
        language, code = block.groups()
        if language == "python":
            lines_above = text[: block.start()].count("\n") + 1
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * lines_above + code, name, "exec"), space)
            printed = output.getvalue()
        elif printed is not None and not text[end : block.start()].strip():
            found.append((block, printed))
            printed = None
        end = block.end()
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_page(path: Path) -> None:
    for block, printed in run_page(path):
        if block[1] == "text":
            assert printed.rstrip() == block[2].rstrip(), "write anew: python tests/test_docs.py"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    found = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tempfile.gettempdir(),
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()


def test_results_are_of_the_files() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "bench" / "table.py"], capture_output=True, text=True, check=True
    )
    pages = [(ROOT / "docs" / f"results{end}.md").read_text() for end in ("", "-before")]
    assert made.stdout == "".join(pages), "write anew: python bench/table.py --write"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_names_what_there_is() -> None:
    """Commands, extras, functions, files, the version of Python and the size of the model."""
    import tilegrad as tg
    from tilegrad.cli.main import app
    from tilegrad.exchange import fetch

    text, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    groups = {group.name for group in app.registered_groups}
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    for command in re.findall(r"tilegrad (run|demo|doctor|chat|serve|explain|chip)\b", text):
        assert command in known | groups, command
    for extra in set(re.findall(r"\[([a-z,]+)\]\"", text)):
        assert all(f"\n{name} = [" in project for name in extra.split(",")), extra
    line = next(part for part in text.split("- **") if part.startswith("Transforms"))
    for name in re.findall(r"`(\w+)`", line):
        assert hasattr(tg, name), name
    for file in re.findall(r"\b((?:tests|examples|\.ci)/[\w./]+)", text):
        assert (ROOT / file.rstrip(".")).exists(), file
    (version,) = re.findall(r"Python (3\.\d+) or newer", text)
    assert f'requires-python = ">={version}"' in project
    (size,) = re.findall(r"\((\d+) MB, Apache-2.0\)", text)
    assert round(fetch.BUILT_IN["smollm2"].bytes / 1e6) == int(size)


def test_a_word_has_one_row() -> None:
    rows = re.findall(
        r"^\| ([^|]+?) \|", (ROOT / "docs" / "vocabulary.md").read_text(), re.MULTILINE
    )
    words = [word.strip() for row in rows for word in re.split(r"[/,]", row) if row != "---"]
    twice = {w for w in words if words.count(w) > 1 and w not in ("word", "-")}
    assert not twice


def test_links_lead_somewhere() -> None:
    broken = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in LINK.findall(path.read_text()):
            if not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, broken


def refresh(path: Path) -> None:
    """Write a page's blocks of output anew."""
    text = path.read_text()
    for block, printed in reversed(run_page(path)):
        body = printed.rstrip() + "\n"
        text = text[: block.start(2)] + body + text[block.end(2) :]
    path.write_text(text)


if __name__ == "__main__":
    for page in PAGES:
        refresh(page)
