"""DTypes: names, NumPy, promotion."""

import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest

from tilegrad.core import dtype as d
from tilegrad.core.errors import DTypeError


@pytest.mark.parametrize("dtype", d.ALL, ids=repr)
def test_names_numpy_and_pickle_lead_back(dtype):
    assert d.dtype_of(dtype.name) is dtype
    assert d.dtype_of(dtype.numpy) is dtype
    assert d.dtype_of(dtype) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert dtype.size == np.zeros(1, dtype.numpy).itemsize


def test_other_spellings():
    assert d.dtype_of("bf16") is d.bfloat16
    assert d.dtype_of(np.float32) is d.float32
    assert d.dtype_of(float) is d.float32
    assert d.dtype_of(int) is d.int64
    assert d.dtype_of(bool) is d.bool_
    assert d.dtype_of(ml_dtypes.float8_e4m3fn) is d.float8_e4m3
    with pytest.raises(DTypeError, match="unknown dtype"):
        d.dtype_of("float17")
    with pytest.raises(TypeError):
        d.dtype_of(object())


@pytest.mark.parametrize("a,b", list(itertools.combinations_with_replacement(d.ALL, 2)), ids=repr)
def test_promotion_is_symmetric_and_idempotent(a, b):
    both = d.promote(a, b)
    assert d.promote(b, a) is both
    assert d.promote(both, a) is both
    assert d.promote(both, b) is both
    assert both.is_float == (a.is_float or b.is_float)


@pytest.mark.parametrize(
    "a,b,expected",
    [
        (d.float16, d.bfloat16, d.float32),
        (d.int64, d.float16, d.float16),
        (d.uint8, d.int8, d.int16),
        (d.uint32, d.int32, d.int64),
        (d.bool_, d.uint8, d.uint8),
        (d.int32, d.int64, d.int64),
        (d.float8_e4m3, d.float8_e5m2, d.float16),
        (d.bfloat16, d.float32, d.float32),
    ],
)
def test_promotion_follows_pytorch(a, b, expected):
    assert d.promote(a, b) is expected


def test_promotion_with_python_numbers():
    assert d.promote_scalar(d.bfloat16, 2.5) is d.bfloat16
    assert d.promote_scalar(d.int32, 2.5) is d.float32
    assert d.promote_scalar(d.int8, 3) is d.int8
    assert d.promote_scalar(d.bool_, 3) is d.int64
    assert d.promote_scalar(d.uint8, True) is d.uint8


def test_storage():
    assert d.int4.storage_bytes(5) == 3
    assert d.bfloat16.storage_bytes(5) == 10
    assert d.float32.storage_bytes(0) == 0


@pytest.mark.parametrize("dtype", d.ALL, ids=repr)
def test_extremes_are_identities_of_max_and_min(dtype):
    low, high = dtype.lowest, dtype.highest
    assert np.array(low, np.float64) == np.array(low).astype(dtype.numpy).astype(np.float64)
    assert np.array(high, np.float64) == np.array(high).astype(dtype.numpy).astype(np.float64)
    assert low < high


def test_accumulators():
    assert d.accumulator(d.bfloat16) is d.float32
    assert d.accumulator(d.float64) is d.float64
    assert d.accumulator(d.int8) is d.int32
    assert d.accumulator(d.uint8) is d.uint32
    assert d.accumulator(d.bool_) is d.int64
