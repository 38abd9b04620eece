"""What `Engine.prepare` compiles for an H200 that is not here, counted: nothing twice."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tilegrad.compiler import ahead, compile
from tilegrad.core.config import override
from tilegrad.generate.engine import Engine
from tilegrad.generate.sampling_limits import SERVED
from tilegrad.generate.sizes import verify_sizes
from tilegrad.generate.speculative import Lookup
from tilegrad.generate.steps import Steps
from tilegrad.graph import build
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.runtime.device import KINDS
from tilegrad.targets.ptx import assemble, language

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from prepare import Kind
from shapes import SHAPES


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What ptxas was given; it is not run."""
    given: Counter[str] = Counter()

    def run(ptxas: Path, text: str, arch: str) -> assemble.Assembly:
        given[text] += 1
        return assemble.Assembly(text.encode())

    monkeypatch.setattr(language, "find_ptxas", lambda: Path("ptxas"))
    monkeypatch.setattr(assemble, "find_ptxas", lambda: Path("ptxas"))
    monkeypatch.setattr(assemble, "_version", lambda ptxas: "0")
    monkeypatch.setattr(assemble, "_run", run)
    return given


def made(layers: int, folder: Path, proposer: Any = None) -> dict[str, int]:
    """Prepare an engine as a process of its own would; what it compiled."""
    shape = {**SHAPES["tiny"], "num_hidden_layers": layers}
    compile._memory.clear()
    with KINDS.replaced("cuda", Kind()), override(cache_folder=str(folder)):
        model = Decoder(DecoderConfig.from_huggingface(shape), "bfloat16").to(device="cuda:0")
        sizes: dict[str, Any] = {"requests": 2, "context": 64, "pages": 8, "chunk": 64}
        engine = Engine(model, device="cuda:0", **sizes, proposer=proposer, guesses=1)
        for parameter in model.parameters():
            parameter.realize()
        engine.steps.sampling()  # whose Buffers are filled by programs too
        before = dict(compile.counters)
        try:
            engine.prepare(variants=SERVED[:1])
        finally:
            assert not engine.steps._preparing  # nor after a failure
        return {name: count - before[name] for name, count in compile.counters.items()}


def test_equal_programs_are_assembled_once(texts: Counter[str], tmp_path: Path) -> None:
    """Two sizes to decode and one of prompts, that draw; layers cost no program."""
    few = made(2, tmp_path / "few")
    assert few["compiled"] == 3 and few["loaded"] == 0
    assert set(texts.values()) == {1} and few["programs"] <= len(texts)
    assert few["programs"] <= 60
    warm = made(2, tmp_path / "few")
    assert warm == {"compiled": 0, "loaded": 3, "programs": 0}
    texts.clear()
    assert made(3, tmp_path / "more") == few


@pytest.mark.parametrize("guesses", [False, True])
def test_missing_steps_are_handed_to_workers(
    texts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: bool
) -> None:
    """After the first that is missing, all others that are: each Graph once."""
    jobs: list[Any] = []

    def compile_ahead(graphs: Any) -> int:
        for wanted in graphs:
            job = ahead.job_of(wanted)
            if job is not None:
                jobs.append(job["name"])
                ahead.do(job)
        return len(jobs)

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(ahead, "LEAST_NODES", 1)
    monkeypatch.setattr(build.Transfers, "used", False)  # by tests before this one
    found = made(2, tmp_path, Lookup() if guesses else None)
    others = 2 + guesses * len(verify_sizes(2, 2))
    assert found["compiled"] == 1 and found["loaded"] == others
    assert len(jobs) == len(set(jobs)) == others and set(texts.values()) == {1}


def test_a_failure_leaves_nothing_to_compile_ahead(
    texts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled after it is compiled when it is met."""

    def fail(*given: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Steps, "_make_decode", fail)
    with pytest.raises(MemoryError):
        made(2, tmp_path)
