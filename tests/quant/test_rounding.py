"""quant/rounding.py, ops.pack and weights of formats that no kernel takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn, quant
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.format import format_of
from tilegrad.exchange.mapped import Stored
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret
from tilegrad.tensor.stored import bytes_to_prepare, stored

NAMES = ["INT3_G32_F16_ZERO", "INT4_G128_BF16_ZERO", "INT8_ROW_F32", "E4M3_TENSOR_F32"]
NAMES += ["E4M3_2X128_F32", "E2M1_G16_E4M3_TOTAL", "E2M1_G32_E8M0", "E4M3_ROW_F32_SPARSE"]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_interpreted_and_numpy_agree(name: str) -> None:
    form, x = format_of(name), values(4, 256)
    wanted = form.pack(x)
    raw = quant.pack(x, name)
    np.testing.assert_array_equal(raw.numpy(), wanted)
    np.testing.assert_array_equal(quant.unpack(raw, name).numpy(), form.to_float32(wanted))
    given = build.input_((4, 256), float32)
    (found,) = interpret([build.pack(given, name)], {given: x})
    np.testing.assert_array_equal(found, wanted)


def test_a_scale_that_is_given() -> None:
    x, scale = values(3, 64), np.full((1, 1), 0.05, np.float32)
    found = quant.rounded(x, "INT8_TENSOR_F32", scale).numpy()
    wanted = np.clip(np.round(x / np.float32(0.05)), -128, 127) * np.float32(0.05)
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_batched_rows() -> None:
    x = values(5, 2, 32)
    found = tg.vmap(lambda t: quant.rounded(t, "INT4_ROW_F32"))(tg.tensor(x)).numpy()
    form = format_of("INT4_ROW_F32")
    np.testing.assert_array_equal(found, form.to_float32(form.pack(x)))


def test_derivatives_go_straight_through_only_where_asked() -> None:
    x = values(2, 32)

    def loss(t: Any, asked: bool) -> Any:
        return (quant.rounded(t, "INT4_G32_F16", straight_through=asked) * 3.0 + t).sum()

    np.testing.assert_allclose(tg.grad(loss)(tg.tensor(x), True).numpy(), np.full_like(x, 4.0))
    np.testing.assert_allclose(tg.grad(loss)(tg.tensor(x), False).numpy(), np.ones_like(x))


def test_what_pack_refuses() -> None:
    for name, shape in (("INT4_G128_F16", (2, 64)), ("Q8_0", (2, 64)), ("F16", (2, 64))):
        with pytest.raises((InternalError, tg.UserError), match="pack"):
            quant.pack(values(*shape), name)
    weight = nn.Linear(64, 8).weight
    for name, better in (("INT4", "INT4_ROW_F32"), ("INT8_SPARSE", "INT8_ROW_F32_SPARSE")):
        for pack in (quant.pack, quant.rounded, lambda x, form: format_of(form).pack(x.numpy())):
            with pytest.raises(tg.UserError, match=f"hint: {better} has a scale"):
                pack(weight.detach(), name)
    whole = np.arange(-8, 8, dtype=np.int8).reshape(1, 16)
    np.testing.assert_array_equal(quant.rounded(whole, "INT4").numpy(), whole)


@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("name", ["INT4_G64_F16_ZERO", "E4M3_ROW_F32", "E2M1_G16_E4M3_TOTAL"])
def test_weights_of_a_file(name: str, dtype: Any) -> None:
    form, w = format_of(name), values(48, 128, seed=1)
    weights = Stored("w", w.shape, form, form.pack(w))
    layer = nn.Linear(128, 48, dtype=dtype).requires_grad_(False)
    layer.weight.node = stored(weights, dtype).node
    x = values(3, 128)
    step = tg.jit(lambda layer, x: layer(x))
    found = step(layer, tg.tensor(x).to(dtype)).to(float32).numpy()
    exact = weights.values().astype(dtype.numpy).astype(np.float64)
    given = x.astype(dtype.numpy).astype(np.float64)
    wanted = given @ exact.T + layer.bias.to(float32).numpy()
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert error < (1e-6 if dtype is float32 else 6e-3)
    bound = step.bind(layer, tg.tensor(x).to(dtype))  # it reads what was prepared, not the file
    np.testing.assert_array_equal(bound.run().to(float32).numpy(), found)
    plain = weights.values().astype(dtype.numpy)
    np.testing.assert_array_equal(layer.weight.numpy(), plain)
    size = bytes_to_prepare([layer.weight], "cpu")
    assert weights.bytes - 48 * 16 <= size <= weights.bytes + 256


def test_what_cannot_be_packed_is_said() -> None:
    with pytest.raises(UserError, match=r"scales lie within the blocks(.|\n)*Q4_1"):
        quant.pack(values(64, 64), "Q4_1")
    with pytest.raises(UserError, match="multiple of 32"):
        quant.pack(values(64, 40), "INT3_G32_F16_ZERO")
