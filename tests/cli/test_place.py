"""Commands that write a file or a folder say before their work that it cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad.cli import bench, bench_serve, chip_explore, main
from tilegrad.core import place
from tilegrad.core.errors import UserError
from tilegrad.generate import llm, quantise

RUNNER = CliRunner()
FILES = {
    "quantize": ["quantize", "TINY", "--to", "q8_0", "--out"],
    "bench": ["bench", "TINY", "--profile"],
    "explore": ["chip", "explore", "resnet-50", "--plot"],
    "compare": ["chip", "compare", "resnet-50", "--page"],
    "serve": ["bench", "serve", "--url", "http://127.0.0.1:9", "--out"],
    "plot": ["bench", "serve", "--url", "http://127.0.0.1:9", "--plot"],
}
FOLDERS = {"compile": ["compile", "TINY", "--out"]}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be done for the result fails the test."""

    def worked(*words: Any, **more: Any) -> None:
        pytest.fail("work was done for a result that has no place")

    monkeypatch.setattr(llm, "LLM", worked)
    monkeypatch.setattr(bench, "open_llm", worked)
    monkeypatch.setattr(bench_serve, "loading", worked)
    monkeypatch.setattr(quantise, "_opened", worked)
    monkeypatch.setattr("tilegrad.chip.pareto.explore_npu", worked)
    monkeypatch.setattr("tilegrad.chip.catalogue.predict", worked)


@pytest.mark.parametrize("command", [*FILES, *FOLDERS])
def test_a_place_is_asked_for_before_the_work(
    command: str, tiny: Path, tmp_path: Path, no_work: None
) -> None:
    words = [str(tiny) if w == "TINY" else w for w in (FILES | FOLDERS)[command]]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").write_text("mine")
    for where in ("file/below", "file" if command in FOLDERS else "folder"):
        found = RUNNER.invoke(main.app, [*words, str(tmp_path / where)])
        assert found.exit_code == 1, found.output
        said = ("cannot be written", "there is something already")
        assert any(text in found.output for text in said) and "Errno" not in found.output
    if command in FOLDERS:
        found = RUNNER.invoke(main.app, [*words, str(tmp_path / "folder")])
        assert found.exit_code == 1 and "other files" in found.output


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.check_place(tmp_path / "new" / "file", "op")
    place.check_place(tmp_path, "op", folder=True)
    monkeypatch.setattr(place.os, "access", lambda path, mode: False)  # root may do all
    with pytest.raises(UserError, match="does not allow it"):
        place.check_place(tmp_path / "new" / "file", "op")
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_files_of_results_make_their_folders(tmp_path: Path) -> None:
    class Traced:
        def save(self, path: Path) -> None:
            path.write_text("a trace")

    saves = [
        lambda path: bench.save(Traced(), path),
        lambda path: bench_serve.save(path, "numbers"),
        lambda path: chip_explore.save(path, "a plot"),
    ]
    (tmp_path / "file").write_text("mine")
    for number, save in enumerate(saves):
        save(tmp_path / str(number) / "new" / "made")
        assert (tmp_path / str(number) / "new" / "made").read_text()
        with pytest.raises(UserError, match="cannot be written"):
            save(tmp_path / "file" / "made")


def test_a_link_to_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "made")
    place.check_place(tmp_path / "link", "op")
    with pytest.raises(UserError, match="it is a file"):
        place.check_place(tmp_path / "link", "op", folder=True)


def test_a_quantised_file_makes_its_folder(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "made.gguf"
    found = RUNNER.invoke(main.app, ["quantize", str(tiny), "--to", "q8_0", "--out", str(out)])
    assert found.exit_code == 0 and out.is_file(), found.output


@pytest.mark.parametrize(
    ("content", "said"), [(b" \n", "has no text"), (b"\xff\xfe", "is not UTF-8"), (None, "No such")]
)
def test_a_text_that_is_none(content: bytes | None, said: str, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    words = ["quantize", str(tiny), "--to", "gptq-int4", "--out", str(tmp_path / "made.gguf")]
    found = RUNNER.invoke(main.app, [*words, "--text", str(text)])
    assert found.exit_code == 1 and said in found.output and "Errno" not in found.output
