"""tensor/stored.py: weights of files as Tensors, on the CPU."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler.compile import host
from tilegrad.core import format as formats
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float32, float64
from tilegrad.core.errors import AxisError, DTypeError, ShapeError, StateError
from tilegrad.core.format import QUANTISED, Format
from tilegrad.exchange.mapped import Stored
from tilegrad.ir.symbol import symbol
from tilegrad.runtime import prepared
from tilegrad.tensor.placement import values
from tilegrad.tensor.stored import bytes_to_prepare, stored, stored_in
from tilegrad.tensor.tensor import Tensor


def file_of(form: Format, rows: int, columns: int, seed: int = 0) -> Stored:
    draw = np.random.default_rng([seed, rows])
    if form.packer is not None:
        raw = form.pack(draw.standard_normal((rows, columns)).astype(np.float32))
    else:
        raw = draw.integers(0, 64, (rows, form.row_bytes(columns)), dtype=np.uint8)
    return Stored("w", (rows, columns), form, raw)


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def near(got: Tensor, want: np.ndarray, error: float = 1e-4) -> None:
    size = max(1e-30, np.abs(want).max())
    assert got.shape == want.shape
    assert np.abs(got.numpy().astype(np.float64) - want).max() / size < error


def layer_of(weights: Stored, bias: bool = False, dtype: Any = float32) -> nn.Linear:
    layer = nn.Linear(weights.shape[1], weights.shape[0], bias, dtype).requires_grad_(False)
    layer.weight.node = stored(weights, dtype).node
    return layer


@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_every_format(form: Format) -> None:
    weights = file_of(form, 40, 256)
    w = stored(weights)
    assert w.shape == (40, 256) and w.dtype is float32
    x, values = tokens(2, 3, 256), weights.values()
    with np.errstate(all="ignore"):
        near(tg.tensor(x) @ w.T, x.astype(np.float64) @ values.astype(np.float64).T)
    ids = np.array([[39, 0], [7, 7]])
    np.testing.assert_array_equal(w[tg.tensor(ids)].numpy(), values[ids])
    np.testing.assert_array_equal(w.numpy(), values)


def test_layers_in_a_compiled_function() -> None:
    weights = file_of(formats.Q8_0, 48, 64)
    layer, table = layer_of(weights, bias=True), nn.Embedding(48, 64).requires_grad_(False)
    table.weight = layer.weight
    x = tokens(2, 5, 64)
    step = tg.jit(lambda layer, table, x, ids: (layer(x), table(ids)))
    product, rows = step(layer, table, tg.tensor(x), tg.tensor([3, 47]))
    near(product, x.astype(np.float64) @ weights.values().T + layer.bias.numpy(), 2e-3)
    np.testing.assert_array_equal(rows.numpy(), weights.values()[[3, 47]])
    np.testing.assert_array_equal(layer(tg.tensor(x)).numpy(), product.numpy())
    with pytest.raises(AxisError):
        step(layer, table, tg.tensor(x), tg.tensor([3, 48]))[1].numpy()


def test_one_compiled_function_for_all_counts() -> None:
    weights = [file_of(formats.Q4_1, 64, 96), file_of(formats.Q8_0, 40, 64)]
    layers = nn.ModuleList(layer_of(w) for w in weights)
    count = symbol("tokens", 1, 64)
    step = tg.jit(lambda both, x: both[1](both[0](x)), dynamic={"x": {0: count}})
    for size in (1, 40, 3, 24, 25, 64, 2):
        x = tokens(size, 96)
        want = x.astype(np.float64) @ weights[0].values().T @ weights[1].values().T
        near(step(layers, tg.tensor(x)), want, 3e-4)
    assert step.traces == 1


def test_results_have_the_dtype_of_tokens() -> None:
    weights = file_of(formats.Q8_0, 32, 64)
    narrow = tg.tensor(tokens(3, 64)).to(bfloat16)
    layer = layer_of(weights).to(bfloat16)
    assert layer.weight.dtype is bfloat16 and stored_in(layer.parameters())
    got = layer(narrow)
    assert got.dtype is bfloat16
    near(got.float(), narrow.float().numpy().astype(np.float64) @ weights.values().T, 2e-2)
    assert layer.weight[tg.tensor([1])].dtype is bfloat16
    assert layer(narrow[0]).shape == (32,)


def test_what_no_kernel_takes() -> None:
    """float64 tokens: the weights are unpacked, with a word."""
    weights = file_of(formats.Q4_1, 32, 64)
    layer = layer_of(weights, dtype=float64)
    x = tg.tensor(tokens(3, 64).astype(np.float64))
    near(layer(x), x.numpy() @ weights.values().astype(np.float64).T, 1e-12)
    found = tg.explain(lambda layer, x: layer(x), layer, x)
    assert "unpacked to scratch by ordinary ops: tokens are" in found.section("passes")


def test_derivatives_flow_through_products() -> None:
    weights = file_of(formats.Q4_1, 32, 64)
    layer = layer_of(weights)
    x = tg.tensor(tokens(3, 64), requires_grad=True)
    (layer(x) ** 2).sum().backward()
    w = weights.values().astype(np.float64)
    near(x.grad, 2 * (x.numpy().astype(np.float64) @ w.T) @ w, 1e-3)


def test_state_dict_reads_the_file_again() -> None:
    weights = file_of(formats.Q4_1, 32, 64)
    layer = layer_of(weights, bias=True)
    layer(tg.tensor(tokens(1, 64))).numpy()
    state = layer.state_dict()
    assert set(state) == {"weight", "bias"}
    np.testing.assert_array_equal(state["weight"].numpy(), weights.values())
    assert stored_in(layer.parameters())  # and stays where it is
    plain = nn.Linear(64, 32)
    plain.load_state_dict(state)
    np.testing.assert_array_equal(plain.weight.numpy(), weights.values())


@pytest.mark.usefixtures("quick_collect")
def test_assigned_weights_are_let_go_and_traced_anew() -> None:
    weights, x = file_of(formats.Q4_1, 32, 64), tokens(2, 64)
    layer, step = layer_of(weights), tg.jit(lambda layer, x: layer(x))
    step(layer, tg.tensor(x)).numpy()
    gc.collect()
    before = len(prepared._table)
    with tg.no_grad():
        layer.weight.assign(tg.ones(32, 64))
    near(step(layer, tg.tensor(x)), x.astype(np.float64).sum(-1, keepdims=True).repeat(32, 1), 1e-5)
    gc.collect()
    assert len(prepared._table) == before - 1
    layer.weight.node = stored(weights).node
    near(step(layer, tg.tensor(x)), x.astype(np.float64) @ weights.values().T, 2e-3)


def test_other_weights_of_the_same_kind_are_followed() -> None:
    first, second = file_of(formats.Q4_1, 32, 64, 1), file_of(formats.Q4_1, 32, 64, 2)
    layer, x = layer_of(first), tg.tensor(tokens(2, 64))
    step = tg.jit(lambda layer, x: layer(x))
    bound = step.bind(layer, x)
    near(bound.run(), x.numpy().astype(np.float64) @ first.values().T, 2e-3)
    layer.weight.node = stored(second).node
    want = x.numpy().astype(np.float64) @ second.values().T
    near(step(layer, x), want, 2e-3)
    near(bound.run(), want, 2e-3)
    assert step.traces == 1
    layer.weight.node = tg.ones(32, 64).node
    with pytest.raises(StateError, match="assigned another value"):
        bound.run()


def test_captured_weights() -> None:
    weights, x = file_of(formats.Q4_1, 32, 64), tokens(2, 64)
    w = stored(weights)
    step = tg.jit(lambda x: x @ w.T)
    for _ in range(2):
        near(step(tg.tensor(x)), x.astype(np.float64) @ weights.values().T, 2e-3)
    bound = step.bind(tg.tensor(x))
    near(bound.run(), x.astype(np.float64) @ weights.values().T, 2e-3)


def test_bytes() -> None:
    weights = file_of(formats.Q4_1, 40, 64)
    layer = layer_of(weights, bias=True)
    assert bytes_to_prepare(layer.parameters(), "cpu") == weights.bytes * 48 // 40


def test_errors() -> None:
    with pytest.raises(DTypeError, match="not quantised"):
        stored(file_of(formats.F16, 4, 4))
    raw = formats.Q4_1.pack(np.ones((1, 2, 3, 32), np.float32))
    with pytest.raises(ShapeError, match="rows, columns"):
        stored(Stored("w", (1, 2, 3, 32), formats.Q4_1, raw))


def test_reading_values_leaves_the_weights_where_they_are() -> None:
    weights, x = file_of(formats.Q4_1, 32, 64), tg.tensor(tokens(2, 64))
    layer = layer_of(weights)
    node = layer.weight.node
    for read in (repr, tg.Tensor.numpy, tg.Tensor.tolist, tg.Tensor.realize, pickle.dumps):
        read(layer.weight)
        assert layer.weight.node is node and node not in values
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(layer)).weight.numpy(), weights.values()
    )
    twin = copy.deepcopy(layer)
    assert twin.weight is not layer.weight and twin.weight.node is node
    want = x.numpy().astype(np.float64) @ weights.values().T
    near(tg.jit(lambda w, x: x @ w.T)(layer.weight, x), want, 1e-5)  # an argument by itself
    near(tg.vmap(twin)(x), want, 2e-3)
    with override(eager_debug=True):
        near(layer(x), want, 1e-5)
    assert layer.weight.node is node


@pytest.mark.parametrize("count", [1, 9])
def test_tokens_are_rounded_as_the_setting_says(count: int) -> None:
    """A jitted product follows the setting: to 16 bits or to 8; a change compiles anew."""
    x, made = tg.tensor(tokens(count, 256)), stored(file_of(formats.Q8_0, 48, 256))
    product = tg.jit(lambda x: x @ made.T)
    want = x.numpy().astype(np.float64) @ made.numpy().astype(np.float64).T
    worst = {}
    for dots in ("exact", "int8", "exact"):
        with override(dots=dots):
            worst[dots] = np.abs(product(x).numpy() - want).max() / np.abs(want).max()
    assert worst["exact"] < 1e-4
    if "dotprod" in host().features or "avx512vnni" in host().features:
        assert 1e-4 < worst["int8"] < 2e-2
