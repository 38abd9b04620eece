"""Benches that judge end with 1 where a bar is missed or a result is wrong, else with 0."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))


def status(bench: Any, monkeypatch: Any, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    return ended.value.code


@pytest.mark.parametrize(("seconds", "wanted"), [(1.0, 0), (2.0, 1)])
def test_two_trees(seconds: float, wanted: int, monkeypatch: Any) -> None:
    import beside

    times = beside.summary([[1.0], [seconds]])
    monkeypatch.setattr(beside, "imports", lambda *_: {"import": times})
    words = (".", "--quick", "--skip", "cases", "--skip", "compile")
    assert status(beside, monkeypatch, *words) == wanted


@pytest.mark.parametrize(("error", "wanted"), [(0.0, 0), (float("nan"), 1)])
def test_kernels_of_serving(error: float, wanted: int, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    import serve_kernels

    rows = [{"case": "one", "error": error}]
    made = SimpleNamespace(limits={}, rows=rows, bench=None)
    monkeypatch.setattr(serve_kernels, "Kernels", lambda _: made)
    monkeypatch.setattr(serve_kernels, "PARTS", {})
    assert status(serve_kernels, monkeypatch) == wanted


def test_verdicts(monkeypatch: Any) -> None:
    import verdict

    monkeypatch.setattr(verdict, "failures", [])
    assert (verdict.verdict(True), verdict.wrong(True)) == ("met", "")
    with pytest.raises(SystemExit) as ended:
        verdict.end()
    assert ended.value.code == 0
    assert (verdict.verdict(False), verdict.wrong(False)) == ("MISSED", " WRONG")
    with pytest.raises(SystemExit) as ended:
        verdict.end()
    assert ended.value.code == 1


def test_benches_that_judge_end_with_a_status() -> None:
    for path in sorted(BENCH.glob("*.py")):
        text = path.read_text()
        if "MISSED" in text or "WRONG" in text or "verdict(" in text:
            assert any(w in text for w in ("sys.exit(", "SystemExit(", "    end()")), path.name
