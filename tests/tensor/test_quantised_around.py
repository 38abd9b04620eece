"""tensor/quantised_around.py: one launch on a GPU and Tensor operations elsewhere mean the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
from quantised_rows import random_rows

from tilegrad.core.dtype import float32
from tilegrad.core.format import Q4_1
from tilegrad.core.target import H200
from tilegrad.graph.interpret import interpret
from tilegrad.kernels.quantised import gpu as quantised_gpu
from tilegrad.kernels.quantised.shape import QuantisedShape
from tilegrad.tensor import quantised_around as around
from tilegrad.tensor.creation import tensor
from tilegrad.tensor.quantised import Packed, pack
from tilegrad.tensor.tensor import Tensor, node_of

ROWS, COLUMNS = 64, 96


class Stored:
    """Rows of a Format in memory."""

    def __init__(self) -> None:
        self.raw = random_rows(Q4_1, ROWS, COLUMNS)
        self.shape, self.format = (ROWS, COLUMNS), Q4_1

    def drop(self) -> None:
        """Nothing to hand back."""


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def wanted(x: np.ndarray, w: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """In float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    norm = case.get("norm")
    if norm is not None:
        weight = norm.weight.numpy().astype(np.float64) + norm.offset
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.epsilon) * weight
    found = x @ w.T + case.get("bias", 0)
    if case.get("gated"):
        gate, up = found[..., : ROWS // 2], found[..., ROWS // 2 :]
        found = gate / (1 + np.exp(-gate)) * up
    return found + case.get("residual", 0)


def cases() -> dict[str, dict[str, Any]]:
    norm = around.Norm(tensor(values(COLUMNS, seed=1)), 1e-5, 1.0)
    return {
        "nothing": {},
        "norm": {"norm": norm},
        "bias and residual": {"bias": values(ROWS), "residual": values(1, 2, ROWS)},
        "gated": {"norm": norm, "gated": "silu", "residual": values(1, 2, ROWS // 2)},
    }


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Packed:
    """Weights as a GPU's kernels want them, and the GPU's kernels for them."""
    stored = Stored()
    monkeypatch.setattr(around, "_target", lambda packed: H200)
    shape = QuantisedShape(Q4_1, ROWS, COLUMNS, 1, float32)
    parts = {n: tensor(a) for n, a in quantised_gpu.pack(shape, stored.raw).items()}
    return Packed(Q4_1, (ROWS, COLUMNS), parts, "cpu")


def computed(results: Sequence[Tensor], *leaves: Any) -> list[np.ndarray]:
    """Results by the interpreters, from Tensors that hold values."""
    known = [t.weight if isinstance(t, around.Norm) else t for t in leaves]
    return interpret([node_of(r) for r in results], {node_of(t): t.numpy() for t in known})


@pytest.mark.parametrize("name", cases())
def test_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = cases()[name], values(1, 2, COLUMNS, seed=2)
    w = Q4_1.to_float32(Stored().raw)
    given = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    want = wanted(x, w, case)
    allowed = {"rtol": 1e-4, "atol": 1e-4 * np.abs(want).max()}
    written = around.surrounded_matmul(tensor(x), pack(Stored(), "cpu"), **given)
    np.testing.assert_allclose(written.numpy(), want, **allowed)
    leaf, packed = tensor(x), on_a_gpu(monkeypatch)
    made = around.surrounded_matmul(leaf, packed, **given)
    assert node_of(made).inputs[0].attrs["callee"].name == "quantised_around"
    more = [v for v in given.values() if not isinstance(v, str)]
    (found,) = computed([made], leaf, *packed.parts.values(), *more)
    np.testing.assert_allclose(found, want, **allowed)


def test_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = values(2, COLUMNS), Q4_1.to_float32(Stored().raw)
    norm = around.Norm(tensor(values(COLUMNS, seed=1)), 1e-5)
    want = wanted(x, w, {"norm": norm})
    allowed = {"rtol": 1e-4, "atol": 1e-4 * np.abs(want).max()}
    written = around.split_matmul(tensor(x), pack(Stored(), "cpu"), (32, 16, 16), norm)
    leaf, packed = tensor(x), on_a_gpu(monkeypatch)
    made = around.split_matmul(leaf, packed, (32, 16, 16), norm)
    found = computed(made, leaf, *packed.parts.values(), norm)
    start = 0
    for one, other in zip(written, found):
        stop = start + one.shape[1]
        np.testing.assert_allclose(one.numpy(), want[:, start:stop], **allowed)
        np.testing.assert_allclose(other, want[:, start:stop], **allowed)
        start = stop
    assert start == ROWS


def test_many_tokens_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = QuantisedShape(Q4_1, ROWS, COLUMNS, 64, float32)
    assert quantised_gpu.why_not_around(shape, H200, around.Around(residual=True))
    packed = pack(Stored(), "cpu")
    x, residual = values(64, COLUMNS), values(64, ROWS)
    found = around.surrounded_matmul(tensor(x), packed, residual=tensor(residual))
    want = wanted(x, Q4_1.to_float32(Stored().raw), {"residual": residual})
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
