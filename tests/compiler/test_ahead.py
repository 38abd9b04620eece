"""Graphs compiled ahead by workers: what they store is what the compiler would, and is found."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler import ahead
from tilegrad.compiler.loader import counters
from tilegrad.core.config import override
from tilegrad.core.errors import InternalError
from tilegrad.runtime.store import Store, default_store
from tilegrad.tensor.lowered import Lowered

X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(8, 12)


def layered(x: tg.Tensor, i: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
    """A few Kernels, one of which looks for wrong indices and names its line."""
    for _ in range(3):
        x = (x @ x.T).softmax(-1) @ x
    return x, x[i]


def lowered(rows: int, most: int = 77) -> Lowered:
    index = tg.tensor(np.arange(rows, dtype=np.int64))
    return tg.jit(layered, dynamic={"i": {0: ("rows", 1, most)}}).lower(tg.tensor(X), index)


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something was stored, by kind and name."""
    found: Counter[str] = Counter()
    plain = Store.put

    def counted(self: Store, key: str, data: bytes) -> None:
        found[key] += 1
        plain(self, key, data)

    monkeypatch.setattr(Store, "put", counted)
    monkeypatch.setattr(ahead, "LONG", 1)
    return found


def test_a_worker_stores_what_the_compiler_would(tmp_path: Path, puts: Counter[str]) -> None:
    wanted = lowered(3).wanted
    stored: list[dict[str, bytes | None]] = []
    for name in ("here", "there"):
        with override(cache_folder=str(tmp_path / name)):
            puts.clear()
            if name == "here":
                lowered(3).compiled()
            else:
                job = ahead.job_of(wanted)
                assert job is not None
                ahead.do(job)
                assert ahead.job_of(wanted) is None  # it is there
            stored.append({key: default_store().get(key) for key in puts})
    assert stored[0] == stored[1] and len(stored[0]) > 2
    assert sum(key.startswith("recipe-") for key in stored[0]) == 1


def test_other_circumstances_are_refused(tmp_path: Path, puts: Counter[str]) -> None:
    with override(cache_folder=str(tmp_path)):
        job: Any = ahead.job_of(lowered(3).wanted)
        for changed in (
            {"settings": {**job["settings"], "determinism": "invariant"}},
            {"donate": (0,)},
            {"graph": job["graph"].replace("77", "78")},
        ):
            with pytest.raises(InternalError, match="is not recipe-"):
                ahead.do({**job, **changed})
    assert not puts


def test_what_is_small_is_left(tmp_path: Path) -> None:
    with override(cache_folder=str(tmp_path)):
        assert ahead.job_of(lowered(3).wanted) is None


def test_without_a_store_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    with override(cache_folder=""):
        assert ahead.compile_ahead(iter([lowered(3).wanted])) == 0


def test_workers(
    tmp_path: Path, puts: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Two of them; a job that fails is told, and left to whoever needs it."""
    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    plain, made, other = ahead.job_of, lowered(3, 99), tg.jit(lambda x: x.exp().sum()).lower(X)

    def half_wrong(wanted: Any, side: int = 1) -> Any:
        job = plain(wanted, side)
        return {**job, "name": "recipe-0"} if wanted.outputs == other.outputs else job  # type: ignore[dict-item]

    with override(cache_folder=str(tmp_path)):
        monkeypatch.setattr(ahead, "job_of", half_wrong)
        with caplog.at_level(logging.WARNING, "tilegrad.compile"):
            assert ahead.compile_ahead(iter([other.wanted, made.wanted])) == 1
        assert "not compiled ahead: InternalError" in caplog.text
        before = dict(counters)
        found = made.run([tg.tensor(X), tg.tensor(np.arange(3))], {}, {"rows": 3})
        assert counters["loaded"] == before["loaded"] + 1
        assert counters["compiled"] == before["compiled"]
    assert found[1].shape == (3, 12)


def test_a_worker_that_does_not_start_is_told(
    tmp_path: Path, puts: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    with override(cache_folder=str(tmp_path)), caplog.at_level(logging.WARNING, "tilegrad.compile"):
        for program in ("/nowhere/python", "/bin/true"):
            caplog.clear()
            monkeypatch.setattr(ahead.sys, "executable", program)
            assert ahead.compile_ahead(iter([lowered(3).wanted])) == 0
            assert "a worker that compiles ahead ended" in caplog.text
