"""nn/packed.py: layers over quantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16, float16
from tilegrad.core.errors import ShapeError
from tilegrad.exchange.mapped import Stored
from tilegrad.ir.node import topological
from tilegrad.tensor.quantised import Packed, pack


def weights(rows: int, columns: int, form: Any = formats.Q8_0) -> tuple[Packed, np.ndarray]:
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    raw = form.pack(values)
    return pack(Stored("w", (rows, columns), form, raw)), form.to_float32(raw)


def test_linear_and_embedding() -> None:
    packed, w = weights(48, 64)
    bias = np.arange(48, dtype=np.float32)
    layer, table = nn.PackedLinear(packed, tg.tensor(bias)), nn.PackedEmbedding(packed)
    x = np.random.default_rng(1).standard_normal((2, 5, 64)).astype(np.float32)
    np.testing.assert_allclose(layer(tg.tensor(x)).numpy(), x @ w.T + bias, atol=2e-3)
    np.testing.assert_array_equal(table(tg.tensor([3, 47])).numpy(), w[[3, 47]])
    assert (layer.in_features, layer.out_features) == (64, 48)
    assert "Q8_0" in repr(layer) and table.embedding_dim == 64


def test_parts_are_state_that_is_not_cast_nor_stored() -> None:
    packed, w = weights(48, 64)
    model = nn.Sequential(nn.PackedLinear(packed), nn.Linear(48, 16))
    tied = nn.ModuleList([model, nn.PackedEmbedding(packed)])
    assert len(tied.tensors()) == 2 + len(packed.parts)  # parts are counted once
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    model.to(bfloat16)
    assert packed.parts["scale"].dtype is float16
    assert model[1].weight.dtype is bfloat16
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    step = tg.jit(lambda layer, x: layer(x))
    got = step(model[0], tg.tensor(x))
    np.testing.assert_allclose(got.numpy(), x @ w.T, atol=2e-3)


def test_joint_is_one_product() -> None:
    packed, w = weights(80, 64)
    layers = [nn.PackedLinear(packed, rows=r) for r in ((0, 48), (48, 64), (64, 80))]
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    found = nn.joint(tg.tensor(x), *layers)
    assert [f.shape[-1] for f in found] == [48, 16, 16]
    calls = {n for f in found for n in topological([f.node]) if n.op.name == "call"}
    assert len(calls) == 1
    for layer, part in zip(layers, found):
        first, stop = layer.rows
        np.testing.assert_allclose(part.numpy(), (x @ w.T)[:, first:stop], atol=2e-3)
        np.testing.assert_array_equal(layer(tg.tensor(x)).numpy(), part.numpy())
    plain = nn.Linear(64, 8)
    both = nn.joint(tg.tensor(x), layers[0], plain)
    np.testing.assert_array_equal(both[1].numpy(), plain(tg.tensor(x)).numpy())


def test_rows_that_are_not_there() -> None:
    packed, _ = weights(48, 64)
    for rows in ((0, 49), (5, 5), (-1, 4)):
        with pytest.raises(ShapeError, match="no such rows"):
            nn.PackedLinear(packed, rows=rows)
