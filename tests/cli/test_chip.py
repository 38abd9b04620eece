"""The command `tilegrad chip compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilegrad.cli import main

RUNNER = CliRunner()


def compare(*words: str) -> tuple[int, str]:
    result = RUNNER.invoke(main.app, ["chip", "compare", *words])
    return result.exit_code, result.output


def test_a_table_of_chips_and_a_file(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    mine = tmp_path / "mine.toml"
    mine.write_text("bf16 = 50\nmemory = 24\n[bandwidth]\nvalue = 0.5\nsource = 'a guess'\n")
    code, text = compare("smollm2-135m", "--chips", f"h200,tpu-v5e,{mine}", "--ops")
    assert code == 0, text
    for word in ("h200", "tpu-v5e", "mine", "prefill", "decode", "training", "tokens/s"):
        assert word in text
    assert "predicted" in text and "FLOP/byte" in text


def test_json_has_the_figures_and_null_for_what_is_not_known() -> None:
    code, text = compare("smollm2-135m", "--chips", "h200,tpu-v5e", "--batch", "2", "--json")
    assert code == 0, text
    record = json.loads(text)
    assert record["predicted"] and record["sizes"]["batch"] == 2
    h200, v5e = record["chips"]
    assert h200["figures"]["bf16"]["kind"] == "dense" and h200["figures"]["bf16"]["source"]
    assert h200["decode"]["tokens_per_second"] > v5e["decode"]["tokens_per_second"] > 0
    assert v5e["decode"]["dollars_per_million"] is None and "rows" not in v5e["decode"]


def test_a_plot_and_a_page_are_written(tmp_path: Path) -> None:
    plot, page = tmp_path / "a.svg", tmp_path / "a.html"
    words = ["smollm2-135m", "--chips", "h200, tpu-v5e", "--price", "tpu-v5e=1.2"]
    code, text = compare(*words, "--plot", str(plot), "--page", str(page))
    assert code == 0, text
    row = next(
        line for line in text.splitlines() if line.startswith("tpu-v5e") and "decode" in line
    )
    assert " - " not in row.rsplit("decode", 1)[1].rsplit(maxsplit=1)[0]  # it has a cost now
    assert plot.read_text().startswith("<svg") and page.read_text().startswith("<!doctype html>")
    assert compare(*words, "--plot", str(plot / "a.svg"))[0] == 1
    assert compare("smollm2-135m", "--price", "h200")[0] == 1
    assert compare("smollm2-135m", "--price", "tpu-v9=3")[0] == 1


def test_pictures_have_no_decoding() -> None:
    code, text = compare("resnet-50", "--chips", "h200,wse-3")
    assert code == 0 and "decode" not in text and "forward" in text and "inputs/s" in text
    assert "sparse values alone" in text


def test_errors_are_messages(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"bf16": -3, "memory": 1, "bandwidth": 1}')
    for words in (
        ["--chips", "h300"],
        ["--chips", str(bad)],
        ["--count", "1", "--chips", "groq-lpu"],
    ):
        code, text = compare("smollm2-135m", *words)
        assert code == 1, text


def test_map_a_model_onto_an_array(tmp_path: Path) -> None:
    array = tmp_path / "edge.json"
    levels = [
        {"name": "DRAM", "read": 64, "write": 64, "word_bits": 8, "read_bandwidth": 16},
        {"name": "buffer", "bytes": 2e5, "read": 2, "rows": 16, "columns": 16, "area": 1.5},
    ]
    array.write_text(json.dumps({"mac": 0.2, "level": levels}))
    words = ["chip", "map", "bert-base", "--array", str(array), "--dataflow", "os"]
    result = RUNNER.invoke(main.app, words)
    assert result.exit_code == 0, result.output
    for word in ("bert-base on edge", "energy:", "Mappings seen", "area: 1.5 mm2", "busy"):
        assert word in result.output
    record = json.loads(RUNNER.invoke(main.app, [*words, "--json"]).stdout)
    assert record["predicted"] and sum(row["count"] for row in record["products"]) == 96
    total = sum(row["count"] * row["energy_pj"] for row in record["products"])
    assert record["energy_pj"] == pytest.approx(total)
    result = RUNNER.invoke(main.app, [*words, "--fuse", "DRAM"])
    assert result.exit_code == 1  # nothing stays in the outermost
    result = RUNNER.invoke(main.app, [*words, "--fuse", "buffer"])
    assert result.exit_code == 0, result.output
    assert "less than each layer alone" in result.output
    levels[1]["rows"] = 0
    array.write_text(json.dumps({"level": levels}))
    result = RUNNER.invoke(main.app, words)
    assert result.exit_code == 1


def test_explore_designs(tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    words = ["chip", "explore", "mobilenet-v1", "--vary", "rows=8,16", "--vary", "lanes=4,3"]
    result = RUNNER.invoke(main.app, [*words, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "of 2 designs are beaten by none" in result.output
    assert "left out: rows 8, lanes 3: npu: bad lanes" in result.output
    assert plot.read_text().startswith("<svg")
    said = "weights of half the bits, two a step"
    narrow = RUNNER.invoke(main.app, [*words[:3], "--vary", "weights=int8,int4"])
    assert said in narrow.output and said not in result.output
    record = json.loads(RUNNER.invoke(main.app, [*words, "--json"]).stdout)
    assert len(record["points"]) == 2 and record["front"] and record["predicted"]
    assert "yes" in RUNNER.invoke(main.app, [*words, "--all"]).output
    for bad in (["--vary", "rows"], ["--vary", "rows=0"], ["--vary", "speed=3"], ["--chip", "x"]):
        assert RUNNER.invoke(main.app, [*words[:3], *bad]).exit_code == 1


def test_systemverilog_by_one_command(tmp_path: Path) -> None:
    words = ["chip", "rtl", "edge", "--out", str(tmp_path / "made"), "--tiny"]
    result = RUNNER.invoke(main.app, words)
    assert result.exit_code == 0, result.output
    paths = [Path(line) for line in result.output.splitlines()]
    assert paths[0].name == "npu_words.sv" and all(path.is_file() for path in paths)
    assert "edge: generated" in (tmp_path / "made" / "npu_top.sv").read_text()
    assert (tmp_path / "made" / "tiny" / "info.yaml").is_file()
    taken = tmp_path / "file"
    taken.write_text("")
    result = RUNNER.invoke(main.app, ["chip", "rtl", "edge", "--out", str(taken)])
    assert result.exit_code == 1 and "cannot be written" in result.output


def test_a_preset_is_a_chip_and_rows_are_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    from tilegrad.cli import chip

    monkeypatch.setattr(chip, "table_console", lambda: Console(highlight=False, width=40))
    code, text = compare("smollm2-135m", "--chips", "h200,tpu-like")
    assert code == 0 and "tpu-like" in text and "training" in text
    assert "\u2026" not in text and "$/M tokens" in text


def test_no_chips_are_no_table() -> None:
    code, text = compare("resnet-50", "--chips", " ,")
    assert code == 1 and "no chips" in text


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    plot = tmp_path / "new" / "x.svg"
    result = RUNNER.invoke(main.app, ["chip", "compare", "resnet-50", "--plot", str(plot)])
    assert result.exit_code == 0 and plot.read_text().startswith("<svg")
