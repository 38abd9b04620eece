"""Benches that judge end with 1 where a bar is missed or a result is wrong, else with 0."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))


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
