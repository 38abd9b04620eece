"""int8 layers: the bits of NumPy's integers on every device, near the floats they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn, quant
from tilegrad.core.errors import UserError
from tilegrad.models.resnet import Basic, resnet
from tilegrad.quant.calibrate import layers_of
from tilegrad.quant.numbers import channels, requantise_array, to_int8_array
from tilegrad.runtime.device import device
from tilegrad.targets.npu import arithmetic
from tilegrad.targets.npu.parameters import Parameters

RNG = np.random.default_rng(0)
TINY = Parameters.of({"preset": "edge", "name": "tiny", "rows": 4, "columns": 4, "dma_bytes": 4})


def test_scales_and_integers() -> None:
    x = RNG.standard_normal((5, 7)).astype(np.float32)
    x[0, 0], x[0, 1] = 9.0, -9.0
    scale = float(quant.scale_of(4.0))
    found = quant.to_int8(tg.tensor(x), scale).numpy()
    np.testing.assert_array_equal(found, to_int8_array(x, scale))
    assert found[0, 0] == 127 and found[0, 1] == -128
    inside = np.abs(x) <= 4.0
    assert np.abs(found * scale - x)[inside].max() <= scale / 2 * 1.001
    assert quant.scale_of(0.0) == 1.0
    with pytest.raises(UserError, match="bad absmax"):
        quant.scale_of(float("nan"))


def test_requantising_is_the_vector_units() -> None:
    """Tensors, NumPy and the NPU's own arithmetic agree on every bit, wrapped sums too."""
    sums = RNG.integers(-(2**31), 2**31, (40, 6)).astype(np.int32)
    made = quant.Requantised.of([3e-9, 1e-7, 1e-6, 2.5e-6, 4e-6, 1e-5])
    want = requantise_array(sums, made.factors, made.shift)
    found = quant.requantise(tg.tensor(sums), tg.tensor(made.factors), made.shift).numpy()
    unit = arithmetic.vector("mul", sums, made.factors, made.shift, False)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(arithmetic.requantise(unit, 1, 0, False, None), want)
    real = made.factors / 2.0**made.shift
    np.testing.assert_allclose(real[1:], [1e-7, 1e-6, 2.5e-6, 4e-6, 1e-5], rtol=1e-4)
    with pytest.raises(UserError, match="bad factors"):
        quant.Requantised.of([0.0])


def by_hand(layer: Any, x: np.ndarray) -> np.ndarray:
    """A Linear in int8, in NumPy."""
    given = to_int8_array(x, layer.input_scale).astype(np.int32)
    sums = given @ layer.weight.numpy().astype(np.int32).T
    if layer.bias is not None:
        sums = sums + layer.bias.numpy()
    if layer.output_scale is None:
        found = sums.astype(np.float32) * layer.factors.numpy()
        return np.maximum(found, 0) if layer.relu else found
    return requantise_array(sums, layer.factors.numpy(), layer.shift, layer.relu)


@pytest.mark.parametrize("output", [None, 0.02])
@pytest.mark.parametrize("where", ["cpu", "compiled", "registers"])
def test_linear_is_numpys(output: float | None, where: str) -> None:
    name = where if where == "cpu" else tg.device("npu", chip=TINY, level=where)
    tg.manual_seed(0)
    float_layer = nn.Linear(13, 6)
    layer = quant.Int8Linear.of(float_layer, float(quant.scale_of(3.0)), output, relu=True)
    x = RNG.uniform(-3, 3, (5, 13)).astype(np.float32)
    want = by_hand(layer, x)
    found = tg.jit(layer.to(name))(tg.tensor(x, device=name)).numpy()
    np.testing.assert_array_equal(found, want)
    near = np.maximum(float_layer(tg.tensor(x)).numpy(), 0)
    np.testing.assert_allclose(found * (output or 1.0), near, atol=0.05)


@pytest.mark.parametrize("where", ["cpu", "words"])
def test_a_convolution_is_its_windows(where: str) -> None:
    name = where if where == "cpu" else tg.device("npu", chip=TINY, level=where)
    tg.manual_seed(0)
    layer = quant.Int8Conv.of(nn.Conv2d(3, 5, 3, 2, 1), float(quant.scale_of(3.0)), 0.03)
    x = RNG.standard_normal((2, 3, 7, 7)).astype(np.float32)
    padded = np.pad(to_int8_array(x, layer.input_scale), ((0, 0), (0, 0), (1, 1), (1, 1)))
    views = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    wide = [a.astype(np.int32) for a in (views, layer.weight.numpy())]
    sums = np.einsum("bchwij,ocij->bohw", *wide) + layer.bias.numpy().reshape(1, -1, 1, 1)
    want = requantise_array(sums, layer.factors.numpy().reshape(1, -1, 1, 1), layer.shift)
    found = tg.jit(layer.to(name))(tg.tensor(x, device=name)).numpy()
    np.testing.assert_array_equal(found, want)


def test_channels_have_their_own_scales() -> None:
    weight = np.array([[1.0, -0.5], [0.001, 0.0005], [0.0, 0.0]], np.float32)
    integers, scales = channels(weight)
    np.testing.assert_array_equal(integers, [[127, -64], [127, 64], [0, 0]])
    np.testing.assert_allclose(scales, [1 / 127, 0.001 / 127, 1.0], rtol=1e-6)


def test_calibration_leaves_the_model_and_sees_every_layer() -> None:
    tg.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    before = list(model.modules())
    samples = [RNG.standard_normal((3, 8)).astype(np.float32) for _ in range(2)]
    found = quant.calibrate(model, [tg.tensor(s) for s in samples])
    assert list(model.modules()) == before
    assert found["0"] == pytest.approx(max(np.abs(s).max() for s in samples))
    expected = model(tg.tensor(samples[0])).numpy()
    quant.quantise(model, found, skip=lambda name: name == "2")
    assert isinstance(model[0], quant.Int8Linear) and isinstance(model[2], nn.Linear)
    np.testing.assert_allclose(model(tg.tensor(samples[0])).numpy(), expected, atol=0.03)
    with pytest.raises(UserError, match="no such layer"):
        quant.quantise(model, {"9": 1.0})
    with pytest.raises(UserError, match="nothing to quantise"):
        quant.calibrate(nn.ReLU(), [])


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["block", "whole"]
)
def test_a_small_resnet_through_the_chips_words(whole: bool) -> None:
    """Every layer on the array; bit for bit what the CPU gives."""
    tg.manual_seed(0)
    model = resnet(18, width=4) if whole else Basic(3, 4, 2, True)
    quant.quantise(model.requires_grad_(False), dict.fromkeys(layers_of(model), 4.0))
    picture = RNG.standard_normal((1, 3, 32, 32)).astype(np.float32)
    want = tg.jit(model)(tg.tensor(picture)).numpy()
    name = tg.device("npu", chip="16x16", level="words")
    device(name).clear()  # type: ignore[attr-defined]
    found = tg.jit(model.to(name))(tg.tensor(picture, device=name)).numpy()
    np.testing.assert_array_equal(found, want)
    launches = device(name).account().launches  # type: ignore[attr-defined]
    assert launches == (21 if whole else 3)


def test_resnet_18_is_compiled_whole() -> None:
    with nn.init.skipped():
        model = resnet(18).requires_grad_(False)
    quant.quantise(model, dict.fromkeys(layers_of(model), 4.0))
    found = tg.placement(model, tg.zeros((1, 3, 224, 224)), device="npu")
    assert found.host_share < 0.05
    assert len(found.kernels) - len(found.host) == 21
    assert found.total("macs") == 1_814_073_344
    assert 0.7 < found.utilisation < 1.0
