"""Graphs compiled ahead by workers: what they store is what the compiler would, and is found."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler import ahead
from tilegrad.compiler.compile import circumstances, recipe_name
from tilegrad.compiler.loader import counters
from tilegrad.core.config import override
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
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
    monkeypatch.setattr(ahead, "LEAST_NODES", 1)
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


def test_threads_limit_workers(
    tmp_path: Path, puts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides: list[int] = []
    monkeypatch.setattr(ahead, "usable_cores", lambda: 64)
    monkeypatch.setattr(ahead, "job_of", lambda wanted, side: sides.append(side))
    for threads in (64, 8, 1):
        with override(cache_folder=str(tmp_path), threads=threads):
            assert ahead.compile_ahead(iter([lowered(3).wanted])) == 0
    assert sides == [5, 1]  # 64 threads for 12 workers, 8 for 8; with one nothing is looked at


def test_an_error_drops_what_is_queued(
    tmp_path: Path, puts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, ended = [], threading.Event()

    class Watched(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            if item is None:
                ended.set()

    def serve(jobs: Any) -> int:
        ended.wait(60)
        while (job := jobs.get()) is not None:
            served.append(job)
        return 0

    def graphs() -> Iterator[Any]:
        yield from range(9)
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    monkeypatch.setattr(ahead, "job_of", lambda wanted, side: {"name": wanted})
    monkeypatch.setattr(ahead, "_serve", serve)
    monkeypatch.setattr(ahead.queue, "SimpleQueue", Watched)
    with override(cache_folder=str(tmp_path), threads=3), pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead(graphs())
    assert not served


def test_checked_code_has_names_of_its_own() -> None:
    """Guards are compiled in: what has them is neither found nor stored as what has none."""
    names = set()
    for checked in (False, True):
        with override(checked=checked):
            given = ((), circumstances("cuda:0", H200))
            wanted = lowered(3).wanted
            graph = (wanted.inputs, wanted.outputs)
            names.add(recipe_name(*graph, given, wanted.requirements, H200, {}))
    assert len(names) == 2 and "checked" in ahead.SETTINGS


def test_a_worker_runs_no_file_of_the_current_folder(
    tmp_path: Path, puts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds modules where its caller does, whatever the environment says."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("numpy", "ml_dtypes", "json", "tilegrad"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(ahead.sys, "path", ["", *sys.path])
    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    with override(cache_folder=str(tmp_path / "cache"), threads=3):
        assert ahead.compile_ahead(iter([lowered(3).wanted])) == 1
    assert not (folder / "ran").exists()


def test_workers(
    tmp_path: Path, puts: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Two of them; a job that fails is told, and left to whoever needs it."""
    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    plain, made, other = ahead.job_of, lowered(3, 99), tg.jit(lambda x: x.exp().sum()).lower(X)

    def half_wrong(wanted: Any, side: int = 1) -> Any:
        job = plain(wanted, side)
        return {**job, "name": "recipe-0"} if wanted.outputs == other.outputs else job  # type: ignore[dict-item]

    with override(cache_folder=str(tmp_path), threads=3):
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
    changed = override(cache_folder=str(tmp_path), threads=3)
    with changed, caplog.at_level(logging.WARNING, "tilegrad.compile"):
        for program in ("/nowhere/python", "/bin/true"):
            caplog.clear()
            monkeypatch.setattr(ahead.sys, "executable", program)
            assert ahead.compile_ahead(iter([lowered(3).wanted])) == 0
            assert "a worker that compiles ahead ended" in caplog.text
