"""Weights of files on a GPU, with a fake driver whose kernels are interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
from test_bound_cuda import cuda, fresh
from test_stored import file_of, layer_of

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.format import Q4_1
from tilegrad.nn.functional import silu
from tilegrad.tensor.placement import values

__all__ = ["cuda"]  # the fixture


class Feed(nn.Module):
    """A table, gates and a product, all over weights of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.files = [file_of(Q4_1, *s) for s in ((40, 32), (32, 32), (32, 32), (32, 32))]
        self.table = nn.Embedding(40, 32).requires_grad_(False)
        self.table.weight.node = layer_of(self.files[0]).weight.node
        self.gate, self.up, self.down = (layer_of(f) for f in self.files[1:])

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        return x + self.down(silu(self.gate(x)) * self.up(x))

    def wanted(self, ids: np.ndarray) -> np.ndarray:
        table, gate, up, down = (f.values().astype(np.float64) for f in self.files)
        x = table[ids]
        inner = x @ gate.T
        return x + (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def test_prepared_on_the_device_and_never_raw(cuda) -> None:
    model = Feed().to(device="cuda")
    ids = np.array([3, 39], np.int32)
    step = tg.jit(lambda model, ids: model(ids))
    sources = [values[p.node.inputs[0]] for p in model.parameters()]
    raw = sum(s.bytes for s in sources)
    got, want = step(model, fresh(ids)), model.wanted(ids)
    assert got.device == "cuda:0"
    np.testing.assert_allclose(got.numpy(), want, atol=1e-3 * np.abs(want).max())
    bound = step.bind(model, fresh(ids))
    bound.run()
    np.testing.assert_array_equal(bound.outputs.numpy(), got.numpy())
    np.testing.assert_array_equal(model(fresh(ids)).numpy(), got.numpy())
    assert all(s._pointer == 0 for s in sources)  # nobody asked for the bytes themselves
    state = model.state_dict()["gate.weight"]
    np.testing.assert_array_equal(state.numpy(), model.files[1].values())
    assert all(s._pointer == 0 for s in sources) and raw
