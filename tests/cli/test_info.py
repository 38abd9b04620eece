"""`tilegrad info` and `tilegrad models`: numbers of a tiny model, of kept ones, the roofline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oss_folder import write_folder
from safetensors.numpy import save_file
from typer.testing import CliRunner

from tilegrad.cli import info, main, models, terminal
from tilegrad.core.config import override
from tilegrad.core.errors import UserError
from tilegrad.exchange.gguf import read_gguf
from tilegrad.generate import load
from tilegrad.generate.load import CacheFacts
from tilegrad.serve.engine import roofline

RUNNER = CliRunner()


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads ten million bytes a second."""
    monkeypatch.setattr(roofline, "read_rate", lambda *_: roofline.Rate(1e7, "of this test"))


def test_numbers(tiny: Path, rate: None) -> None:
    result = RUNNER.invoke(main.app, ["info", str(tiny), "--context", "100", "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    table, layer = 259 * 64, 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert record["parameters"] == table + 2 * layer + 5 * 64
    assert record["formats"] == {
        "Q4_1": {"tensors": 14, "bytes": 2 * layer * 20 // 32},
        "Q8_0": {"tensors": 1, "bytes": table * 34 // 32},
        "F32": {"tensors": 5, "bytes": 1280},
    }
    needs = record["needs"]
    weights = 2 * layer * 20 // 32 + table * 34 // 32 + 1280
    assert needs["weights"] == needs["read_first"] == weights == record["bytes"]
    assert needs["cache"] == 2 * 2 * 32 * 4 * 100 and needs["total"] == weights + needs["cache"]
    assert record["speed"]["tokens_per_second"] == pytest.approx(1e7 / weights, rel=1e-3)
    assert record["speed"]["tokens_per_second_full"] < record["speed"]["tokens_per_second"]
    assert record["context"] == 100 and record["trained_context"] == 128


def test_text(tiny: Path, rate: None) -> None:
    result = RUNNER.invoke(main.app, ["info", str(tiny)])
    assert result.exit_code == 0 and "\x1b" not in result.output
    for words in (
        "Tiny␛[31m",
        "Q4_1: ",
        " in 14 tensors",
        "Q8_0: ",
        "1 tensor\n",
        "mit",
        "2 layers, width 64, 2 heads (1 for keys), 259 tokens",
        "context     128 tokens",
        "cpu reads 10.0 MB/s (of this test)",
        "tokens/s",
    ):
        assert words in result.stdout, words


def test_a_folder(tmp_path: Path, rate: None) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = np.zeros((100, 32), np.float16)
    save_file(
        {"model.embed_tokens.weight": table, "lm_head.weight": table},
        tmp_path / "model.safetensors",
    )
    result = RUNNER.invoke(main.app, ["info", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["formats"] == {"F16": {"tensors": 2, "bytes": 12800}}
    assert record["needs"]["weights"] == 12800 and record["needs"]["read_first"] == 6400 + 64
    assert record["needs"]["cache_a_token"] == 2 * 16 * 2, "as the weights are"
    wide = RUNNER.invoke(main.app, ["info", str(tmp_path), "--json", "--dtype", "float32"])
    assert json.loads(wide.stdout)["needs"]["weights"] == 25600


def test_the_dtype_of_the_cache_counts(tiny: Path, rate: None) -> None:
    result = RUNNER.invoke(main.app, ["info", str(tiny), "--dtype", "bfloat16", "--json"])
    assert json.loads(result.stdout)["needs"]["cache_a_token"] == 2 * 2 * 32 * 2


def test_what_a_token_reads() -> None:
    form = SimpleNamespace(quantised=True, dtype=None)
    config = SimpleNamespace(
        tied=False, experts=8, experts_used=2, layers=1, key_heads=1, head_width=1
    )
    tensors = {
        "token_embd.weight": SimpleNamespace(shape=(100, 4), bytes=400, format=form),
        "blk.0.ffn_up_exps.weight": SimpleNamespace(shape=(8, 2, 2), bytes=800, format=form),
        "output.weight": SimpleNamespace(shape=(100, 4), bytes=400, format=form),
    }
    needs = info.needs_of(config, tensors, "float32", "cpu")
    assert needs.weights == 1600 and needs.weights_a_token == 4 + 200 + 400
    config.tied = True
    assert info.needs_of(config, tensors, "float32", "cpu").weights_a_token == 400 + 200 + 400


def test_a_model_that_cannot_run_is_still_described(tiny: Path) -> None:
    opened = read_gguf(tiny)
    opened.metadata["general.architecture"] = "unheard"
    record = info.describe(opened, None, None, "cpu")
    assert "unknown architecture" in record["cannot_run"] and record["parameters"] > 0
    assert ("cannot run", record["cannot_run"]) in info.lines(record)


def test_a_cache_that_is_not_known_is_described(tiny: Path, monkeypatch: Any) -> None:
    facts = CacheFacts({"type": "float", "num_bits": 8, "dynamic": True}, {})
    monkeypatch.setattr(load, "cache_facts", lambda _: facts)
    record = info.describe(read_gguf(tiny), None, None, "cpu")
    assert "keys and values" in record["cannot_run"] and record["parameters"] > 0
    off = info.describe(read_gguf(tiny), None, None, "cpu", "float32")
    assert off["kv_cache"] == "" and off["needs"]["cache_a_token"] == 2 * 2 * 32 * 4
    other = info.describe(read_gguf(tiny), None, None, "cpu", "float16")
    assert "no such dtype" in other["cannot_run"]


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03")
    for name in (str(tmp_path / "broken.gguf"), str(tmp_path / "none.gguf"), "no-such"):
        result = RUNNER.invoke(main.app, ["info", name])
        assert result.exit_code == 1 and result.stderr.startswith("error: ")
        assert "Traceback" not in result.output


# ---- the roofline --------------------------------------------------------------------------------


def test_a_rate_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(size: int) -> float:
        calls.append(size)
        return 1e9 + len(calls)

    monkeypatch.setattr(roofline, "measure", measure)
    monkeypatch.setattr(roofline, "core_times", lambda: [])
    with override(cache_folder=str(tmp_path)):
        first = roofline.read_rate("cpu", 1)
        again = roofline.read_rate("cpu", 2)
        fresh = roofline.read_rate("cpu", 1, fresh=True)
    assert calls == [64 << 20, 64 << 20]
    assert first.bytes_per_second == again.bytes_per_second == 1e9 + 1
    assert "measured here" in first.how and "kept" in again.how
    assert fresh.bytes_per_second == 1e9 + 2 and "kept" not in fresh.how


def test_a_busy_machine_is_named_and_its_rate_is_not_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"used": 0.0, "idle": 0.0}

    def measure(size: int) -> float:
        clock["used"] += 3.0  # of four seconds of all cores
        clock["idle"] += 1.0
        return 1e9

    monkeypatch.setattr(roofline, "measure", measure)
    monkeypatch.setattr(roofline, "core_times", lambda: [clock["used"], 0, 0, clock["idle"], 0])
    with override(cache_folder=str(tmp_path)):
        shown = RUNNER.invoke(main.app, ["info", str(tiny)]).stdout
        again = json.loads(RUNNER.invoke(main.app, ["info", str(tiny), "--json"]).stdout)
    assert re.search(r"while other programs used 7\d% of the CPU\)", shown)
    assert "the machine is busy" in shown and "at most" not in shown and "about " in shown
    assert again["speed"]["busy"] and "kept" not in again["speed"]["how"]


def test_what_other_programs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    times = roofline.core_times()
    assert not times or (len(times) == 8 and min(times) >= 0)
    seconds = iter([[10.0, 0, 0, 10, 0, 0, 0, 0], [11.0, 1, 1, 15, 1, 0, 0, 1]])
    monkeypatch.setattr(roofline, "core_times", lambda: next(seconds))
    monkeypatch.setattr(roofline.time, "process_time", iter([1.0, 3.0]).__next__)
    assert roofline.Others().share() == pytest.approx((4 - 2) / 10)
    monkeypatch.undo()
    monkeypatch.setattr(roofline, "core_times", lambda: [])
    assert roofline.Others().share() == 0.0


def test_a_block_is_as_large_as_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "free_bytes", lambda: 8 << 30)
    assert roofline.block_size(1) == 64 << 20
    assert roofline.block_size(100 << 20) == 128 << 20
    assert roofline.block_size(1 << 40) == 1024 << 20
    monkeypatch.setattr(roofline, "free_bytes", lambda: 1 << 30)
    assert roofline.block_size(1 << 40) == 256 << 20


def test_measuring_gives_a_rate() -> None:
    assert 1e7 < roofline.measure(1 << 20) < 1e13


# ---- models --------------------------------------------------------------------------------------


def test_models_are_listed_and_removed(tiny: Path, tmp_path: Path) -> None:
    with override(cache_folder=str(tmp_path)):
        result = RUNNER.invoke(main.app, ["models"])
        assert result.exit_code == 0 and "not fetched yet" in result.stdout
        folder = tmp_path / "models"
        folder.mkdir()
        (folder / "own.gguf").write_bytes(tiny.read_bytes())
        (folder / "bad.gguf").write_bytes(b"nothing")
        shown = RUNNER.invoke(main.app, ["models", "list"]).stdout
        assert "mit" in shown and "own" in shown and "cannot be read" in shown
        records = json.loads(RUNNER.invoke(main.app, ["models", "--json"]).stdout)
        assert {r["name"]: r["licence"] for r in records}["smollm2"] == "Apache-2.0"
        result = RUNNER.invoke(main.app, ["models", "remove", "own"])
        assert result.exit_code == 0 and "own is removed" in result.stderr
        assert not (folder / "own.gguf").exists()
        result = RUNNER.invoke(main.app, ["models", "remove", "own"])
        assert result.exit_code == 1 and "no such model in the cache" in result.stderr


def test_a_licence_cannot_act(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": "a\x1bb", "bytes": 1, "licence": "l\nm\x07", "path": "p"}
    monkeypatch.setattr(models, "found_models", lambda: [row])
    shown = RUNNER.invoke(main.app, ["models"]).stdout
    assert "a␛b" in shown and "l m␇" in shown


def test_words() -> None:
    assert [terminal.size_text(n) for n in (5, 1500, 98.36e6, 474e6, 3.2e9, 4e12)] == [
        "5 B",
        "1.5 kB",
        "98.4 MB",
        "474 MB",
        "3.2 GB",
        "4.0 TB",
    ]
    assert terminal.count_text(134_515_008) == "134.5 million" and terminal.count_text(7) == "7"
    assert terminal.columns([]) == ""
    error: Any = UserError("no", op="x", hint="y")
    assert terminal.error_text(error) == "x: no\n  hint: y"


def test_how_experts_are_quantised(tmp_path: Path, rate: None) -> None:
    """By Format, and whose they are; memory counts them as they are stored."""
    write_folder(tmp_path)
    result = RUNNER.invoke(main.app, ["info", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "MXFP4: " in result.stdout and "in 4 tensors, all of experts" in result.stdout
    record = json.loads(RUNNER.invoke(main.app, ["info", str(tmp_path), "--json"]).stdout)
    stored = record["formats"]["MXFP4"]
    assert stored == {"tensors": 4, "bytes": 2 * 3 * 192 * 64 * 17 // 32, "experts": 4}
    assert record["needs"]["weights"] == record["bytes"] > stored["bytes"]
