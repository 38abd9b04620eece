"""`tilegrad bench`: what a round counts, how numbers are put together, a tiny model for real."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tilegrad.cli import bench, main
from tilegrad.core.errors import UserError
from tilegrad.generate.request import Produced
from tilegrad.runtime.profile import Profile
from tilegrad.serve.engine import roofline

RUNNER = CliRunner()


class FakeEngine:
    """Takes prompts 8 tokens a step, then makes a token a step for each request."""

    def __init__(self) -> None:
        self.running: dict[Any, list[int]] = {}  # tokens of the prompt and of the answer left
        self.added: list[Any] = []

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request: Any) -> None:
        self.added.append(request)
        self.running[request.id] = [len(request.tokens), request.max_tokens]

    def step(self) -> list[Any]:
        made = []
        for id, left in list(self.running.items()):
            left[0] = max(0, left[0] - 8)
            if not left[0]:
                left[1] -= 1
                made.append(Produced(id, 0))
                if not left[1]:
                    del self.running[id]
        return made


def test_a_round_is_prefill_until_all_have_a_token() -> None:
    llm = SimpleNamespace(engine=FakeEngine(), config=SimpleNamespace(vocabulary=50))
    found = bench.one_round(llm, 20, 5, 3, 7)
    assert found.steps == 4 and found.decoded == 12 and found.prefill > 0 < found.decode
    assert len({r.id for r in llm.engine.added}) == 3
    assert all(len(r.tokens) == 20 and max(r.tokens) < 50 for r in llm.engine.added)
    assert llm.engine.added[0].tokens != llm.engine.added[1].tokens
    assert not llm.engine.added[0].stop_tokens


def test_a_tiny_model(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(roofline, "read_rate", lambda *_, **__: roofline.Rate(1e9, "of this test"))
    words = [
        "bench",
        str(tiny),
        "--prompt",
        "8",
        "--tokens",
        "4",
        "--repeats",
        "2",
        "--profile",
        str(tmp_path / "trace.json"),
    ]
    result = RUNNER.invoke(main.app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert len(record["rounds"]) == 2 and record["rounds"][0]["decoded"] == 3
    assert record["launches_per_step"] > 0 and record["device"] == "cpu"
    rate = record["bytes_per_step"] / record["step_seconds"]
    assert record["bytes_per_second"] == pytest.approx(rate)
    assert record["share_of_limit"] == pytest.approx(rate / 1e9)
    kernels = record["kernels"]
    assert sum(k["calls"] for k in kernels) == record["launches_per_step"]
    paged = [k for k in kernels if bench.PAGED in k["kernel"]]
    assert sum(k["bytes"] for k in paged) == 2 * 2 * 32 * 4 * (8 + 2), "two layers, ten tokens"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e.get("cat") == "kernel" for e in events) == record["launches_per_step"]
    text = bench.columns(bench.lines(record))
    for word in ("prompt", "answer", "tokens/s", "% of 1.0 GB/s (of this test)", "a step"):
        assert word in text
    assert [word for word, _ in bench.lines(record | {"busy": True})][-1] == "busy"


def test_the_cache_that_is_measured_is_counted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(roofline, "read_rate", lambda *_, **__: roofline.Rate(1e9, "of this test"))
    words = ["bench", str(tiny), "--prompt", "8", "--tokens", "4", "--repeats", "1", "--json"]
    words += ["--profile", str(tmp_path / "trace.json"), "--kv-cache-dtype"]
    plain, small = (
        json.loads(RUNNER.invoke(main.app, [*words, kept]).stdout) for kept in ("float32", "fp8")
    )
    assert (plain["kv_cache_dtype"], small["kv_cache_dtype"]) == ("float32", "fp8")
    tokens = 8 + 4 // 2
    assert plain["bytes_per_step"] - small["bytes_per_step"] == 2 * 2 * 32 * (4 - 1) * tokens
    paged = [k for k in small["kernels"] if bench.PAGED in k["kernel"]]
    assert sum(k["bytes"] for k in paged) == 2 * 2 * 32 * (8 + 2), "two layers, ten tokens"


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written: "):
        bench.save(Profile("step", "cpu", "not at all"), tmp_path / "file" / "trace.json")


def test_what_does_not_fit_is_refused(tiny: Path) -> None:
    result = RUNNER.invoke(main.app, ["bench", str(tiny), "--prompt", "500"])
    assert result.exit_code == 1 and "128" in result.stderr and "500 + 128" in result.stderr
    assert RUNNER.invoke(main.app, ["bench", str(tiny), "--batch", "0"]).exit_code == 2
