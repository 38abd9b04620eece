"""Functions and models whose weights go two a step through the mesh: int4, fp8, 2:4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from npu_programs import small

import tilegrad as tg
from tilegrad import nn, quant
from tilegrad.core.dtype import bfloat16, float32, int4, int8, int32, int64
from tilegrad.core.errors import UserError
from tilegrad.core.format import format_of
from tilegrad.quant.numbers import channels
from tilegrad.runtime.device import device
from tilegrad.targets.npu.device import NpuDevice
from tilegrad.targets.npu.kernel import LEVELS
from tilegrad.targets.npu.parameters import Parameters

RNG = np.random.default_rng(0)
FLOWS = ("ws", "os", "is")
WIDE = {"bank_rows": 128, "accumulator_rows": 64, "dma_bytes": 16, "dram_bandwidth": 64.0}


def chip(**given: object) -> Parameters:
    """A small chip with a port that hides what is loaded."""
    return small(program_words=512, **{**WIDE, **given})


def at_all_levels(p: Parameters, run: Callable[[str], tg.Tensor]) -> tuple[np.ndarray, list[str]]:
    """What a function gives on a chip, the same at all levels; and the rates of its Kernels."""
    found, rates = [], []
    for level in LEVELS:
        name = tg.device("npu", chip=p, level=level)
        machine = device(name)
        assert isinstance(machine, NpuDevice)
        machine.clear()
        found.append(run(name).to("cpu").to(float32).numpy())
        account = machine.account()
        rates.append([kernel.work.rate for kernel in machine.launched])
        assert 0 < account.utilisation <= 1
    assert account.simulated == account.counters.cycles > 0
    assert rates[0] == rates[1] == rates[2]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    return found[0], rates[0]


def narrowed(x: tg.Tensor, w: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
    """Sums with what the vector unit does to them."""
    sums = x.to(int32) @ w.to(int32) + b
    return tg.clip(((sums.to(int64) * 77 + 512) >> 10).to(int32), -128, 127).to(int8)


@pytest.mark.parametrize("weights_left", [False, True])
@pytest.mark.parametrize("flow", FLOWS)
def test_int4_tensors(flow: str, weights_left: bool) -> None:
    x = RNG.integers(-128, 128, (24, 137)).astype(np.int8)
    w = RNG.integers(-8, 8, (137, 9)).astype(ml_dtypes.int4)
    b = RNG.integers(-900, 900, 9).astype(np.int32)
    sums = x.astype(np.int64) @ w.astype(np.int64)
    given = (x, w, b)
    if weights_left:  # (9, 137) by (137, 24)
        given = (w.T.copy(), x.T.copy(), RNG.integers(-900, 900, 24).astype(np.int32))
        sums = sums.T
    expected = np.clip(((sums + given[2]) * 77 + 512) >> 10, -128, 127)

    def run(name: str) -> tg.Tensor:
        return tg.jit(narrowed)(*(tg.tensor(a, device=name) for a in given))

    found, rates = at_all_levels(chip(dataflow=flow, weights="int4"), run)
    np.testing.assert_array_equal(found, expected)
    assert rates == ["mixed"]
    found, rates = at_all_levels(chip(dataflow=flow), run)  # one a step where the chip has no other
    np.testing.assert_array_equal(found, expected)
    assert rates == [""]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_fp8_tensors(flow: str, element: str) -> None:
    kind = tg.bfloat16 if element == "bf16" else tg.float16
    x = tg.tensor(RNG.standard_normal((24, 37)).astype(np.float32)).to(kind)
    w = tg.tensor(RNG.standard_normal((37, 9)).astype(ml_dtypes.float8_e4m3fn))

    def run(name: str) -> tg.Tensor:
        return tg.jit(lambda x, w: x @ w.to(kind))(x.to(name), w.to(name))

    p = chip(dataflow=flow, element=element, weights="fp8")
    found, rates = at_all_levels(p, run)
    exact = x.to(float32).numpy() @ w.to(float32).numpy()
    np.testing.assert_allclose(found, exact, rtol=1e-2, atol=0.06)
    assert rates == ["mixed"]


FORMS = {
    "INT4": ({"weights": "int4"}, "mixed"),
    "INT8_SPARSE": ({"sparse": True}, "sparse"),
    "INT4_SPARSE": ({"sparse": True, "weights": "int4"}, "mixed"),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_in_a_format(form: str, flow: str) -> None:
    """Bytes of whole numbers, constant in the Graph."""
    given, rate = FORMS[form]
    weight = RNG.integers(-8, 8, (10, 48)).astype(np.float32)
    if "SPARSE" in form:
        weight = quant.prune.magnitude(weight)
    raw = format_of(form).pack(weight)
    assert raw.nbytes < weight.size
    x = RNG.integers(-128, 128, (24, 48)).astype(np.int8)

    def f(x: tg.Tensor, raw: tg.Tensor) -> tg.Tensor:
        return x.to(int32) @ quant.unpack(raw, form, int8).to(int32).mT

    expected = x.astype(np.int64) @ weight.T.astype(np.int64)
    np.testing.assert_array_equal(tg.jit(f)(tg.tensor(x), tg.tensor(raw)).numpy(), expected)

    def run(name: str) -> tg.Tensor:
        return tg.jit(f)(*(tg.tensor(a, device=name) for a in (x, raw)))

    found, rates = at_all_levels(chip(dataflow=flow, **given), run)
    np.testing.assert_array_equal(found, expected)
    assert rates == [rate]
    found, rates = at_all_levels(chip(dataflow=flow), run)
    np.testing.assert_array_equal(found, expected)
    assert rates == [""]


def by_hand(weight: np.ndarray, form: str, x: np.ndarray, scale: float, bias: np.ndarray) -> Any:
    """A linear layer in integers, in NumPy."""
    kept = quant.prune.magnitude(weight) if "SPARSE" in form else weight
    integers, scales = channels(kept, 4 if "INT4" in form else 8)
    sums = scales.astype(np.float64) * np.float64(np.float32(scale))
    codes = quant.numbers.to_int8_array(x, scale).astype(np.int64)
    wide = codes @ integers.T.astype(np.int64) + np.round(bias / sums).astype(np.int64)
    return wide.astype(np.float32) * sums.astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_layer(form: str) -> None:
    """A layer whose weights are stored so equals NumPy's integers, to the bit."""
    given, rate = FORMS[form]
    layer = nn.Linear(40, 12).requires_grad_(False)
    x = RNG.standard_normal((32, 40)).astype(np.float32)
    weight, bias = layer.weight.numpy(), layer.bias.numpy()
    model = nn.Sequential(layer)
    seen = quant.calibrate(model, [tg.tensor(x)])
    quant.quantise(model, seen, form=form)
    expected = by_hand(weight, form, x, float(quant.scale_of(seen["0"])), bias)

    def run(name: str) -> tg.Tensor:
        model.to(name)
        return tg.jit(model)(tg.tensor(x, device=name))

    found, rates = at_all_levels(chip(**given), run)
    np.testing.assert_array_equal(found, expected)
    assert rates == [rate]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model(form: str, flow: str) -> None:
    """Convolutions and linear layers: the CPU's bits at all levels, in fewer cycles than int8."""
    given, rate = FORMS[form]
    tg.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    rest = (nn.ReLU(), nn.Flatten(1, 2), nn.Linear(6, 7))
    model = nn.Sequential(first, nn.ReLU(), second, *rest).requires_grad_(False)
    x = tg.randn(1, 3, 8, 8)
    quant.quantise(model, quant.calibrate(model, [x]), form=form)
    expected = tg.jit(model)(x).numpy()

    def run(name: str) -> tg.Tensor:
        return tg.jit(model.to(name))(x.to(name))

    p = chip(dataflow=flow, **given)
    found, rates = at_all_levels(p, run)
    np.testing.assert_array_equal(found, expected)
    assert rates.count(rate) >= 2
    spent = device(tg.device("npu", chip=p, level="registers")).account()  # type: ignore[attr-defined]
    plain = chip(dataflow=flow)
    found, _ = at_all_levels(plain, run)
    np.testing.assert_array_equal(found, expected)
    before = device(tg.device("npu", chip=plain, level="registers")).account()  # type: ignore[attr-defined]
    assert spent.counters.cycles < before.counters.cycles


@pytest.mark.parametrize("form", ["INT4_ROW_F32", "INT8_ROW_F32", "INT8_ROW_F32_SPARSE"])
@pytest.mark.parametrize("inputs", ["INT8_ROW_F32", "INT8"])
def test_products_of_codes_with_scales(form: str, inputs: str) -> None:
    """Inputs in INT8 and weights with a scale a row: whole numbers on the array, scales behind
    them."""
    given = {"sparse": True} if "SPARSE" in form else {"weights": "int4"}
    rate = "" if form == "INT8_ROW_F32" else "sparse" if "SPARSE" in form else "mixed"
    weight = RNG.standard_normal((12, 48)).astype(np.float32)
    raw = format_of(form).pack(weight)
    x = RNG.standard_normal((24, 48)).astype(np.float32)
    x = np.round(9 * x).astype(np.int8) if inputs == "INT8" else x

    def f(x: tg.Tensor, raw: tg.Tensor) -> tg.Tensor:
        rounded = quant.unpack(quant.pack(x, inputs), inputs)
        return rounded @ quant.unpack(raw, form).mT

    def run(name: str) -> tg.Tensor:
        return tg.jit(f)(*(tg.tensor(a, device=name) for a in (x, raw)))

    found, rates = at_all_levels(chip(**given), run)
    given_form = format_of(inputs)
    values = given_form.to_float32(given_form.pack(x)), format_of(form).to_float32(raw)
    np.testing.assert_allclose(found, values[0] @ values[1].T, rtol=1e-4, atol=1e-4)
    assert rates == [rate]


def test_fp8_weights_with_scales() -> None:
    weight = RNG.standard_normal((12, 48)).astype(np.float32)
    raw = format_of("E4M3_ROW_F32").pack(weight)
    x = tg.tensor(RNG.standard_normal((24, 48)).astype(np.float32)).to(bfloat16)

    def f(x: tg.Tensor, raw: tg.Tensor) -> tg.Tensor:
        return x @ quant.unpack(raw, "E4M3_ROW_F32", bfloat16).mT

    def run(name: str) -> tg.Tensor:
        return tg.jit(f)(x.to(name), tg.tensor(raw, device=name))

    found, rates = at_all_levels(chip(element="bf16", weights="fp8"), run)
    values = format_of("E4M3_ROW_F32").to_float32(raw)
    np.testing.assert_allclose(found, x.to(float32).numpy() @ values.T, rtol=2e-2, atol=0.1)
    assert rates == ["mixed"]


def test_the_report_says_which_rate_and_why() -> None:
    def f(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
        return x.to(int32) @ w.to(int32)

    x = tg.zeros((24, 36), dtype=int8)
    both = chip(weights="int4", sparse=True)
    name = tg.device("npu", chip=both)
    narrow, wide = (tg.tensor(np.zeros((36, 9), k)) for k in (ml_dtypes.int4, np.int8))
    assert "array, 1 kernels: two int4 weights a step" in str(
        tg.placement(f, x, narrow, device=name)
    )
    told = str(tg.placement(f, x, wide, device=name))
    assert "one weight a step: no operand is known to be 2:4; operands are int8" in told
    words = tg.explain(f, x.to(name), narrow.to(name)).section("npu")
    assert "; two int4 weights a step" in words and "mixed=1" in words
    thin, many = tg.device("npu", chip=chip(weights="int4")), tg.zeros((36, 200), dtype=int32)
    told = str(tg.placement(f, x[:1], many.to(int4), device=thin))  # a row of inputs better stays
    assert "one weight a step: inputs stay, weights go by" in told
    assert "a step" not in str(tg.placement(f, x, wide, device=tg.device("npu", chip=chip())))


def test_weights_that_the_array_does_not_multiply_are_named() -> None:
    name = tg.device("npu", chip=chip(element="bf16"))
    raw = format_of("INT8_ROW_F32").pack(RNG.standard_normal((12, 48)).astype(np.float32))

    def f(x: tg.Tensor, raw: tg.Tensor) -> tg.Tensor:
        return x @ quant.unpack(raw, "INT8_ROW_F32", x.dtype).mT

    for dtype, other in ((bfloat16, "INT8"), (float32, "float32")):
        given = tg.zeros((24, 48), dtype=dtype, device=name), tg.tensor(raw, device=name)
        assert f"the array multiplies bfloat16, not {other}" in str(tg.explain(f, *given))


def test_floats_are_never_left_out() -> None:
    """An infinity times a pruned weight is no number, so 2:4 weights of floats go one a step."""
    weight = quant.prune.magnitude(RNG.standard_normal((12, 48)).astype(np.float32))
    raw = format_of("BF16_SPARSE").pack(weight)
    x = RNG.standard_normal((24, 48)).astype(np.float32)
    x[3, 5] = np.inf

    def f(x: tg.Tensor, raw: tg.Tensor) -> tg.Tensor:
        return x @ quant.unpack(raw, "BF16_SPARSE", bfloat16).mT

    name = tg.device("npu", chip=chip(element="bf16", sparse=True))
    given = tg.tensor(x, device=name).to(bfloat16), tg.tensor(raw, device=name)
    found = tg.jit(f)(*given).to("cpu").to(float32).numpy()
    with np.errstate(invalid="ignore"):
        here = x @ format_of("BF16_SPARSE").to_float32(raw).T
    np.testing.assert_array_equal(np.isnan(found), np.isnan(here))
    assert "integers alone" in str(tg.placement(f, *given, device=name))


def test_weights_that_are_no_whole_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    with pytest.raises(UserError, match="whole numbers"):
        quant.quantise(model, {"0": 1.0}, form="E4M3_ROW_F32")
