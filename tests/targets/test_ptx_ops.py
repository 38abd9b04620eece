"""A sample of the op suite's Graphs as programs for GPUs, by `bench/gpu_ops.py`; all of them take
hours. And Graphs that once could not be lowered for one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import recorded
from recorded import Case, recording, run_case

import tilegrad as tg
from tilegrad.core.target import A100, H200, Target
from tilegrad.targets.ptx.assemble import find_ptxas

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_ops.py"
FILES = ("tensor/test_matmul.py", "tensor/test_index.py", "tensor/test_norm.py")


def numbers(*shape: int) -> tg.Tensor:
    count = 1
    for size in shape:
        count *= size
    return (tg.arange(count, dtype=tg.float32).reshape(*shape) * 0.37).sin().realize()


CASES = {
    "einsum that sums nothing": lambda: tg.einsum("ij,ij->ji", numbers(5, 7), numbers(5, 7)),
    "outer product": lambda: tg.einsum("i,j->ij", numbers(5), numbers(70)),
    "batch of outer products": lambda: tg.einsum("bi,bj->bij", numbers(3, 5), numbers(3, 7)),
    "by the least": lambda: numbers(4, 1) @ numbers(5, 7).amin().reshape(1),
    "by a sum": lambda: numbers(4, 1, 1) @ numbers(5, 7).sum().reshape(1, 1),
    "rows by computed numbers": lambda: numbers(20, 3)[tg.arange(5) * 3],
    "by a number of each": lambda: numbers(3, 4, 1) @ numbers(3, 5).amax(1).reshape(3, 1, 1),
}


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
@pytest.mark.parametrize("target", [A100, H200], ids=lambda t: t.cpu)
@pytest.mark.parametrize("name", CASES)
def test_small_products(name: str, target: Target) -> None:
    with recording() as recorder:
        CASES[name]().realize()
    found = list(recorder.cases.values())
    assert found and all(run_case(case, target).simulated for case in found)


def test_noise_is_of_each_element() -> None:
    """A result may be elsewhere only where a last bit of its argument moves it."""
    given = np.array([0.25, 0.5, 0.501953125, 3000.0, 0.0, np.inf], np.float32)
    with recording() as recorder:
        x = tg.tensor(given).to(tg.bfloat16).realize()
        tg.where(x > 0.5, x.cos() + 4, 0.0).to(tg.float32).realize()
    noise = next(c for c in recorder.cases.values() if c.output.dtype is tg.float32).noise
    assert noise[0] == noise[4] == 0
    assert noise[1] > 4 and noise[2] > 4  # beside the jump
    assert noise[3] > 1  # a last bit is 16
    assert np.isfinite(noise).all()


def scores_of_one_key() -> Case:
    """The derivative of scores of which one alone counts: 0, of two terms that cancel."""
    scores, values = numbers(3, 5).requires_grad_(), numbers(5, 7) * 40
    counts = tg.arange(5) == 2
    weights = tg.nn.functional.softmax(scores.masked_fill(~counts, -1e4), -1)
    with recording() as recorder:
        (weights @ values).square().sum().backward()
        assert scores.grad is not None
        scores.grad.realize()
    return list(recorder.cases.values())[-1]


def test_noise_is_of_the_terms_that_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scores_of_one_key()
    assert case.output.shape == (3, 5) and not case.expected.any()
    terms = float((2 * (numbers(5, 7) * 40)[2].square()).sum())

    def judged(off: float) -> None:
        wrong = case.expected.copy()
        wrong[1, 2] += off * terms
        monkeypatch.setattr(recorded, "run_graph", lambda *_, **__: [wrong])
        run_case(case, H200)

    for off in (0.0, 3e-7, -3e-7):
        judged(off)
    for off in (1e-5, -1e-4, 1.0):
        with pytest.raises(AssertionError, match="Mismatched elements: 1 "):
            judged(off)
    wrong = case.expected.copy()
    wrong[1, 3] = 1e-6  # a key that does not count has no terms
    monkeypatch.setattr(recorded, "run_graph", lambda *_, **__: [wrong])
    with pytest.raises(AssertionError, match="Mismatched elements: 1 "):
        run_case(case, H200)


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
@pytest.mark.parametrize("count", [20, pytest.param(80, marks=pytest.mark.slow)])
def test_a_sample_of_the_op_suite(count: int) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--sample",
        str(count),
        "--seed",
        "3",
        "--files",
        *FILES,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    runs = re.search(rf"(\d+) runs of {count} graphs, (\d+) simulated", done.stdout)
    assert runs is not None and int(runs[1]) == 2 * count and int(runs[2]) > 1.5 * count
