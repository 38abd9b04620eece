"""Fixed point: compiled kernels give the bits of the tables; softmax and norms come near floats."""

from __future__ import annotations

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.core.errors import DTypeError, UserError
from tilegrad.core.fixed import FIXED
from tilegrad.quant import fixed

RNG = np.random.default_rng(0)
EDGES = [0, 1, -1, 2, 3, 2**31 - 1, -(2**31), 65535, 65536, -65536, 2**30, 2**30 - 1]


@pytest.mark.parametrize("kind", FIXED)
def test_kernels_have_the_bits_of_the_tables(kind: str) -> None:
    every = [np.arange(-(1 << 17), 300)] if kind == "exp" else [np.arange(1, 1 << 17)]
    scales = 2.0 ** RNG.uniform(0, 31, 20000)
    x = np.concatenate([EDGES, *every, scales, -scales[:99]]).astype(np.int32)
    found = tg.jit(getattr(fixed, kind))(tg.tensor(x)).numpy()
    np.testing.assert_array_equal(found, FIXED[kind](x))


BYTES, INTS, FLOATS = (tg.ones((2, 4), dtype=d) for d in (tg.int8, tg.int32, tg.float32))
OTHERS = {
    "exp": lambda: fixed.exp(tg.tensor([0, -5])),
    "reciprocal": lambda: fixed.reciprocal(FLOATS),
    "rsqrt": lambda: fixed.rsqrt(FLOATS),
    "softmax": lambda: fixed.softmax(FLOATS, 1.0),
    "mask": lambda: fixed.softmax(INTS, 1.0, FLOATS),
    "product": lambda: fixed.rounded_product(FLOATS, 3, 1),
    "factor": lambda: fixed.rounded_product(INTS, FLOATS, 1),
    "rms norm": lambda: fixed.rms_norm(FLOATS, INTS, 20),
    "factors": lambda: fixed.rms_norm(BYTES, FLOATS, 20),
    "layer norm": lambda: fixed.layer_norm(INTS, INTS, 20),
    "bias": lambda: fixed.layer_norm(BYTES, INTS, 20, FLOATS),
    "attention": lambda: fixed.attention(BYTES, BYTES, FLOATS, 1.0),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_dtypes_are_refused(case: str) -> None:
    with pytest.raises(DTypeError, match=r"expected: a Tensor of int(8|32)\n  got: (int|float)"):
        OTHERS[case]()


def rows(columns: int, dtype: tg.DType = tg.int8) -> tg.Tensor:
    return tg.zeros((1, columns), dtype=dtype)


SUMS = {
    "softmax": (32767, lambda n: fixed.softmax(rows(n, tg.int32), 1e-3)),
    "attention": (
        32767,
        lambda n: fixed.attention(rows(2), *[tg.zeros((n, 2), dtype=tg.int8)] * 2, 1e-3),
    ),
    "width": (131071, lambda n: fixed.attention(rows(n), rows(n), rows(3), 1e-3)),
    "rms norm": (131071, lambda n: fixed.rms_norm(rows(n), rows(n, tg.int32), 20)),
    "layer norm": (16384, lambda n: fixed.layer_norm(rows(n), rows(n, tg.int32), 20)),
    "factors": (131071, lambda n: fixed.norm_factors(np.ones(n), 1.0)),
}


@pytest.mark.parametrize("case", SUMS)
def test_columns_whose_sum_wraps_are_refused(case: str) -> None:
    most, function = SUMS[case]
    function(most)
    for columns in (0, most + 1):
        with pytest.raises(UserError, match=f"1 to {most} columns"):
            function(columns)


def test_the_longest_sums() -> None:
    """All columns as large as they can be."""
    chances = fixed.softmax(rows(32767, tg.int32), 1e-3).numpy()
    assert (chances == 0).all()
    x = tg.tensor(np.full((1, 131071), -128, np.int8))
    real = fixed.norm_factors(np.ones(131071), 1 / 100)
    found = fixed.rms_norm(x, tg.tensor(real.factors), real.shift).numpy()
    np.testing.assert_allclose(found, -100, atol=1)


FAR = 2**31 - 1


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1.0, 100.0])
def test_a_mask_decides_over_any_score(scale: float) -> None:
    hidden = fixed.HIDDEN
    scores = [[5_000_000, 0], [FAR, -FAR - 1], [0, FAR], [-FAR - 1, -FAR - 1], [FAR, -FAR]]
    mask = [[hidden, 0], [hidden, 0], [0, 0], [hidden, 0], [0, 0]]
    given = (tg.tensor(np.array(a, np.int32)) for a in (scores, mask))
    found = tg.jit(lambda x, m: fixed.softmax(x, scale, m))(*given).numpy()
    assert found.tolist() == [[0, 127], [0, 127], [0, 127], [0, 127], [127, 0]]


def test_a_scale_without_a_score_in_range() -> None:
    with pytest.raises(UserError, match="below 8160"):
        fixed.softmax(INTS, 9000.0)


def floats_softmax(x: np.ndarray) -> np.ndarray:
    found = np.exp(x - x.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(5, 7), (3, 1), (2, 3, 100)])
def test_softmax_is_near(shape: tuple[int, ...]) -> None:
    scores = RNG.integers(-4000, 4000, shape).astype(np.int32)
    hidden = np.where(RNG.random(shape) < 0.2, fixed.HIDDEN, 0).astype(np.int32)
    hidden[..., 0] = 0
    found = tg.jit(lambda x, m: fixed.softmax(x, 1e-3, m))(tg.tensor(scores), tg.tensor(hidden))
    want = floats_softmax(np.where(hidden < 0, -np.inf, scores * 1e-3))
    np.testing.assert_allclose(found.numpy() / 127, want, atol=0.6 / 127)
    assert (found.numpy()[hidden < 0] == 0).all()


@pytest.mark.parametrize("columns", [3, 64, 576])
def test_norms_are_near(columns: int) -> None:
    x = RNG.integers(-90, 128, (6, columns)).astype(np.int8)
    x[0] = 0
    weight, bias = RNG.standard_normal(columns), RNG.standard_normal(columns)
    scale = 4 / 127
    real = fixed.norm_factors(weight, scale)
    factors = tg.tensor(real.factors)
    wide = x.astype(np.float64)
    want = wide / np.sqrt(np.maximum((wide**2).mean(-1, keepdims=True), 1e-9)) * weight / scale
    found = tg.jit(lambda x, f: fixed.rms_norm(x, f, real.shift))(tg.tensor(x), factors)
    np.testing.assert_allclose(found.numpy(), np.clip(want, -128, 127), atol=0.6)
    moved = wide - wide.mean(-1, keepdims=True)
    want = moved / np.maximum(moved.std(-1, keepdims=True), 1e-9) * weight + bias
    shift = np.round(bias / scale * 256).astype(np.int32)
    found = tg.jit(lambda x, f, b: fixed.layer_norm(x, f, real.shift, b))(
        tg.tensor(x), factors, tg.tensor(shift)
    )
    np.testing.assert_allclose(found.numpy(), np.clip(want / scale, -128, 127), atol=0.8)


def test_a_layer_norm_that_does_not_fit() -> None:
    with pytest.raises(UserError, match="a shift of 9"):
        fixed.layer_norm(tg.zeros((2, 4), dtype=tg.int8), tg.ones(4, dtype=tg.int32), 8)


def test_attention_is_near() -> None:
    q, k, v = (RNG.integers(-128, 128, (2, 9, 16)).astype(np.int8) for _ in range(3))
    found = tg.jit(lambda *x: fixed.attention(*x, 1e-4))(*map(tg.tensor, (q, k, v))).numpy()
    chances = floats_softmax(q.astype(float) @ k.transpose(0, 2, 1) * 1e-4)
    np.testing.assert_allclose(found / 127, chances @ v, atol=9)
