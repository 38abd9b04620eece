"""The NPU's arithmetic: tables near the functions they stand for, floats as fp32 has them."""

from __future__ import annotations

import numpy as np

from tilegrad.core import fixed
from tilegrad.targets.npu import arithmetic as ar

RNG = np.random.default_rng(0)


def test_exp_is_near() -> None:
    x = np.concatenate([-RNG.integers(0, 20 << 16, 2000), [0, 5, -1, -(2**31)]]).astype(np.int32)
    expected = np.exp(np.minimum(x, 0) / 65536.0) * 65536
    np.testing.assert_allclose(fixed.exp(x), expected, atol=2.0)


def test_reciprocal_and_rsqrt_are_near() -> None:
    x = (2.0 ** RNG.uniform(0, 31, 4000)).astype(np.int64).clip(1, 2**31 - 1).astype(np.int32)
    np.testing.assert_allclose(fixed.reciprocal(x), 2.0**30 / x, rtol=4e-5, atol=1.0)
    np.testing.assert_allclose(fixed.rsqrt(x), 2.0**24 / np.sqrt(x), rtol=6e-5, atol=1.0)
    bad = np.array([0, -1, -(2**31)], np.int32)
    assert (fixed.reciprocal(bad) == 2**31 - 1).all() and (fixed.rsqrt(bad) == 2**31 - 1).all()


def test_integers_wrap_and_round_halves_up() -> None:
    a = np.array([2**31 - 1, -(2**31), 3, -3], np.int32)
    b = np.array([1, -1, 1, 1], np.int32)
    assert ar.vector("add", a, b, 0, False).tolist() == [-(2**31), 2**31 - 1, 4, -2]
    assert ar.vector("mul", a[2:], b[2:], 1, False).tolist() == [2, -1]


def test_requantised_sums_saturate() -> None:
    x = np.array([1000, -1000, 100, -100], np.int32)
    assert ar.requantise(x, 1, 1, False, None).tolist() == [127, -128, 50, -50]
    assert ar.requantise(x, 1, 1, True, None).tolist() == [127, 0, 50, 0]


def test_rounding_by_chance_has_the_right_mean() -> None:
    state, total = ar.seeded(7, 1000), 0.0
    for _ in range(50):
        state = ar.xorshift(state)
        total += ar.requantise(np.full(1000, 37, np.int32), 1, 4, False, state).mean()
    assert abs(total / 50 - 37 / 16) < 0.02


def test_floats_have_no_subnormals() -> None:
    a = np.array([2.0**-100, 2.0**-126, 1.5, -(2.0**-100)], np.float32)
    b = np.array([2.0**-100, -(2.0**-126) * 1.5, 2.0, 2.0**-100], np.float32)
    assert ar.float_mul(a, b).tolist() == [0.0, 0.0, 3.0, 0.0]
    assert ar.float_add(a, b).tolist()[1] == 0.0
    assert np.signbit(ar.float_mul(a, b)).tolist() == [False, True, False, True]


def test_bf16_rounds_to_even() -> None:
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, np.nan, -2.0], np.float32)
    assert ar.to_bf16(x, False, None).tolist() == [0x3F80, 0x3F82, 0x7F80, 0x7FC0, 0xC000]
    assert ar.to_bf16(x, True, None).tolist()[-1] == 0


def test_fp16_rounds_as_numpy_does() -> None:
    """Normal numbers; what is smaller is zero, what is larger infinite."""
    x = RNG.standard_normal(4000).astype(np.float32) * np.float32(2.0) ** RNG.integers(
        -13, 14, 4000
    )
    x = x[np.abs(x) >= 2.0**-14].astype(np.float32)
    np.testing.assert_array_equal(ar.to_fp16(x, False, None), x.astype(np.float16).view(np.uint16))
    ends = np.array([65519.0, 65520.0, -np.inf, np.nan, 2.0**-15, -(2.0**-15), -3.0], np.float32)
    found = ar.to_fp16(ends, False, None).tolist()
    assert found == [0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0, 0x8000, 0xC200]
    assert ar.to_fp16(ends, True, None).tolist() == [0x7BFF, 0x7C00, 0, 0x7E00, 0, 0, 0]


def test_two_weights_have_the_bits_of_an_element() -> None:
    low, high = ar.pairs_of("int4", "int8")[:, 0x9F]
    assert (low, high) == (-1, -7)
    for element in ("bf16", "fp16"):
        low, high = ar.pairs_of("fp8", element)[:, 0xB838]
        assert (low, high) == (1.0, -1.0)
        back = ar.bits_of(ar.values_of(element), element)
        again = ar.values_of(element)[back]
        np.testing.assert_array_equal(again, ar.values_of(element))
