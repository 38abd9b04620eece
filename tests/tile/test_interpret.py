"""tile/interpret.py and tile/numeric.py: exact semantics, and suspicion."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import InternalError
from tilegrad.ir.types import Memory
from tilegrad.tile import interpret, numeric, ops
from tilegrad.tile.build import BodyBuilder

F32, F64, I8, I64 = dtypes.float32, dtypes.float64, dtypes.int8, dtypes.int64


def apply(name: str, dtype: dtypes.DType, *values: object) -> list[object]:
    """One elementwise op on lists of numbers."""
    with np.errstate(all="ignore"):
        arrays = [np.array(v).astype(dtype.numpy) for v in values]
        return numeric.elementwise(name, dtype, arrays).tolist()


def test_integers() -> None:
    """Wrapping, division of every sign, zero divisors, shifts past the width, powers."""
    assert apply("add", I8, [127], [1]) == [-128]
    assert apply("absolute", I8, [-128, -3]) == [-128, 3]
    assert apply("divide", I8, [7, -7, 7, -7, 5], [2, 2, -2, -2, 0]) == [3, -3, -3, 3, 0]
    assert apply("floor_divide", I8, [7, -7, 7, -7, 5], [2, 2, -2, -2, 0]) == [3, -4, -4, 3, 0]
    assert apply("remainder", I8, [7, -7, 7, -7, 5], [3, 3, -3, -3, 0]) == [1, 2, -2, -1, 0]
    assert apply("floor_divide", I8, [-128], [-1]) == [-128]
    assert apply("unsigned_divide", I8, [-1], [2]) == [127]
    assert apply("shift_left", I8, [1, 1, 1], [7, 8, -1]) == [-128, 0, 0]
    assert apply("shift_right", I8, [-128, -128, 64], [7, 9, 9]) == [-1, -1, 0]
    assert apply("power", I64, [2, 3, -1, -1, 5, 0], [64, 41, -3, -2, -1, 0]) == [
        0,
        3**41 - 2**64 * ((3**41 + 2**63) // 2**64),
        -1,
        1,
        0,
        1,
    ]
    assert apply("multiply_high", dtypes.uint32, [2**31], [6]) == [3]
    assert apply("multiply_high", dtypes.int32, [-1], [-1]) == [-2]
    assert apply("multiply_add", I8, [100], [3], [1]) == [45]


def test_floats() -> None:
    """nan, infinities and signed zeros."""
    most = apply("maximum", F32, [math.nan, 0.0, -0.0], [1.0, -0.0, -0.0])
    assert str(most) == "[nan, 0.0, -0.0]"
    assert str(apply("minimum", F32, [math.nan, 0.0], [1.0, -0.0])) == "[nan, -0.0]"
    assert str(apply("sign", F32, [-0.0, math.nan, -2.0])) == "[-0.0, nan, -1.0]"
    assert apply("remainder", F32, [5.5, -5.5, 5.5], [2, 2, -2]) == [1.5, 0.5, -0.5]
    assert apply("round", F32, [0.5, 1.5, -2.5]) == [0, 2, -2]
    assert apply("less", F32, [math.nan, 1], [1, math.nan]) == [False, False]
    assert apply("not_equal", F32, [math.nan], [math.nan]) == [True]


def test_multiply_add_rounds_once() -> None:
    """Where two roundings would differ from one."""
    a = 1 + 2.0**-12
    assert apply("multiply_add", F32, [a], [a], [-1 - 2.0**-11]) == [2.0**-24]
    one = 1 + 2.0**-30
    assert apply("multiply_add", F64, [one], [one], [-1 - 2.0**-29]) == [2.0**-60]
    # the sum lies just below the middle of two floats, where float64 would put it in the middle
    below = apply("multiply_add", F32, [1 + 2.0**-23], [1 - 2.0**-23], [2.0**24 + 2])
    assert below == [2.0**24 + 2]


def test_erf_inverse() -> None:
    """The inverse of erf, to the last digits."""
    x = np.array([-0.999999, -0.5, -1e-8, 1e-3, 0.3, 0.9, 0.9999999])
    y = apply("erf_inverse", F64, x)
    np.testing.assert_allclose([math.erf(v) for v in y], x, rtol=1e-14)
    assert str(apply("erf_inverse", F32, [1.0, -1.0, -0.0, 1.5])) == "[inf, -inf, -0.0, nan]"


def test_casts() -> None:
    """Saturate, wrap, and round through float32."""
    big = np.array([1e30, -1e30, np.nan, 300.7, -1.9], np.float32)
    with np.errstate(all="ignore"):
        assert numeric.cast(big, F32, dtypes.int32).tolist() == [2**31 - 1, -(2**31), 0, 300, -1]
        assert numeric.cast(big, F32, dtypes.int8).tolist() == [-1, 0, 0, 44, -1]
        assert numeric.cast(big, F32, I64).tolist()[:2] == [2**63 - 1, -(2**63)]
    truth = numeric.cast(np.array([0.5, np.nan, 0.0]), F64, dtypes.bool_)
    assert truth.tolist() == [True, True, False]
    assert numeric.cast(np.array([200, -3]), I64, dtypes.int4).astype(int).tolist() == [-8, -3]


def test_low_precision_is_computed_in_float32() -> None:
    """bfloat16 sums of many small numbers do not stall."""
    x = np.full(1000, 0.01, ml_dtypes.bfloat16)
    total = numeric.fold(x, dtypes.bfloat16, "sum", 0, True)
    assert abs(float(total) - 10) < 0.1


def test_index_out_of_range_names_op_and_index() -> None:
    """Unmasked access outside of the Memory is an error; masked off it is not."""
    for body_index, shape in (((3, 0), (2, 4)), ((-1, 0), (1, 4)), ((0, 2), (1, 3))):
        b = BodyBuilder("outside", [("x", Memory((4, 4), F32))])
        b.load(b.parameters[0], body_index, shape, (0, 1))
        message = r"load at \(-?\d, \d\) of tile .* leaves x"
        with pytest.raises(InternalError, match=message) as caught:
            interpret.run(b.finish((1,)), [np.zeros((4, 4), np.float32)])
        assert str(body_index) in str(caught.value)
    b = BodyBuilder("masked", [("x", Memory((4, 4), F32))])
    no = b.constant(False, dtypes.bool_)
    b.store(b.parameters[0], b.load(b.parameters[0], (9, 9), mask=no), (7, 7), mask=no)
    interpret.run(b.finish((1,)), [np.zeros((4, 4), np.float32)])


def test_gather_outside_is_an_error() -> None:
    """Linear offsets are checked against the storage."""
    b = BodyBuilder("outside", [("x", Memory((4,), F32))])
    b.gather(b.parameters[0], b.constant(4, I64, (2,)))
    with pytest.raises(InternalError, match="gather at offset 4 of x, which has 4 elements"):
        interpret.run(b.finish((1,)), [np.zeros(4, np.float32)])


def test_uninitialised_places_show() -> None:
    """A place nobody wrote is nan, or garbage."""
    b = BodyBuilder("fresh", [("x", Memory((2,), F32)), ("y", Memory((2,), dtypes.int32))])
    for parameter in b.parameters:
        place = b.allocate((2,), parameter.dtype, "l1")
        b.store(parameter, b.load(place, (0,), (2,), (0,)), (0,), (0,))
    x, y = np.zeros(2, np.float32), np.zeros(2, np.int32)
    interpret.run(b.finish((1,)), [x, y])
    assert np.isnan(x).all() and (y == np.int32(-1515870811)).all()


def test_sort() -> None:
    """Stable in both directions, nan on top; only the first `count` move."""
    row = np.array([3, 1, np.nan, 1, 2, -9], np.float32)
    for descending, order in ((False, [1, 3, 4, 0, 2, 5]), (True, [2, 0, 4, 1, 3, 5])):
        b = BodyBuilder("sorted", [("keys", Memory((6,), F32)), ("places", Memory((6,), I64))])
        scratch = [b.allocate((6,), d, "l1") for d in (F32, I64)]
        b.add(ops.sort_rows(*b.parameters, *scratch, b.index(5), size=6, descending=descending))
        keys, places = row.copy(), np.arange(6)
        interpret.run(b.finish((1,)), [keys, places])
        assert places.tolist() == order
        np.testing.assert_array_equal(keys, row[order])


def test_matrix_dot_groups() -> None:
    """Plain, pairs and quads of k side by side give the same product."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-5, 5, (4, 8)), rng.integers(-5, 5, (8, 3))
    for group in (1, 2, 4):
        packed = b.reshape(8 // group, group, 3).transpose(0, 2, 1).reshape(8 // group, 3 * group)
        zero = np.zeros((4, 3), np.int32)
        result = numeric.matrix_dot(zero, a.astype(np.int8), packed.astype(np.int8))
        np.testing.assert_array_equal(result, a @ b)
    with pytest.raises(InternalError, match="matrix_dot"):
        numeric.matrix_dot(zero, a, b[:, :2])


def test_programs_may_be_chosen() -> None:
    """Only the listed programs run, numbered row-major."""
    b = BodyBuilder("chosen", [("x", Memory((2, 3), I64))])
    i, j = b.program(0, 2), b.program(1, 3)
    b.store(b.parameters[0], b.index(10 * i + j), (i, j))
    x = np.full((2, 3), -1)
    interpret.run(b.finish((2, 3)), [x], programs=[1, 5])
    assert x.tolist() == [[-1, 1, -1], [-1, -1, 12]]


def test_memories_are_checked() -> None:
    """The wrong number, dtype or a view that is not contiguous."""
    b = BodyBuilder("memories", [("x", Memory((4,), F32))])
    body = b.finish((1,))
    for wrong in ([], [np.zeros(4)], [np.zeros(8, np.float32)[::2]]):
        with pytest.raises(InternalError, match=r"tile\.interpret"):
            interpret.run(body, wrong)
