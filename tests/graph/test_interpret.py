"""The NumPy reference: dtypes, rounding, wrapping, edges, random bits, symbols and Blocks."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from cases import seeded

from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import InternalError
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import REFERENCE, interpret, philox
from tilegrad.ir.block import argument, pure_block
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Array

NAN, INF = float("nan"), float("inf")


def run(op, *values, dtype=None, **attrs):
    """One op on arrays, converted to the dtype first."""
    if op is ops.dot:
        attrs["dtype"], dtype = dtype, None
    arrays = [np.asarray(v) if dtype is None else np.asarray(v).astype(dtype) for v in values]
    nodes = [build.input_(a.shape, dtypes.BY_NUMPY[a.dtype]) for a in arrays]
    node = op(*nodes, **attrs)
    (found,) = interpret([node], dict(zip(nodes, arrays)))
    return found


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=repr)
def test_every_dtype_through_every_elementwise_op(dtype) -> None:
    x = build.input_((3,), dtype)
    value = np.array([1, 0, 1]).astype(dtype.numpy)
    bits = {"bit_not", "bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"}
    for op in ops.graph.ops.values():
        if op in (ops.cast, ops.bitcast, ops.fixed, ops.in_range) or op.category not in (
            "unary",
            "binary",
            "compare",
        ):
            continue
        if (dtype.is_float and op.name in bits) or (dtype.kind == "bool" and op is ops.negative):
            continue
        node = op(x) if op.category == "unary" else op(x, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (found,) = interpret([node], {x: value})
        assert found.dtype == node.dtype.numpy
    for other in dtypes.ALL:
        interpret([ops.cast(x, dtype=other)], {x: value})


def test_bfloat16_rounds_once_per_op() -> None:
    a, b = np.float32(1.0078125), np.float32(0.00390625)
    got = run(ops.add, a, b, dtype=ml_dtypes.bfloat16)
    assert got == (a + b).astype(ml_dtypes.bfloat16)


def test_low_precision_sums_accumulate_wide() -> None:
    ones = np.ones(5000)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        expected = np.float32(5000).astype(dtype)
        assert run(ops.sum_, ones, dtype=dtype, axes=(0,)) == expected
        pair = (ones[None], ones[:, None])
        dot = run(build.matmul, *pair, dtype=dtype)
        assert dot[0, 0] == expected


def test_integers_wrap() -> None:
    assert run(ops.add, [127], [1], dtype=np.int8) == -128
    assert run(ops.sum_, [200, 100], dtype=np.uint8, axes=(0,)) == 44
    assert run(ops.multiply, [5], [5], dtype=ml_dtypes.int4).astype(int) == -7
    assert run(ops.negative, [1], dtype=np.uint32) == 2**32 - 1
    assert run(ops.cumulative, [100, 100], dtype=np.int8, axis=0, kind="sum")[1] == -56
    x = np.full((1, 3), 100)
    assert run(build.matmul, x, x.T, dtype=np.int8)[0, 0] == np.int64(30000).astype(np.int8)


def test_integer_division() -> None:
    a, b = [7, -7, 7, -7, 5], [2, 2, -2, -2, 0]
    assert run(ops.floor_divide_, a, b).tolist() == [3, -4, -4, 3, 0]
    assert run(ops.remainder, a, b).tolist() == [1, 1, -1, -1, 0]
    assert run(ops.remainder, [5.5, -5.5, 5.5], [2.0, 2.0, -2.0]).tolist() == [1.5, 0.5, -0.5]
    assert run(ops.power, [2, -1, 1, 0, -1], [-1, -3, -2, 0, -2]).tolist() == [0, -1, 1, 1, 1]


def test_casts() -> None:
    x = np.array([1.9, -1.9, 0.0], np.float32)
    node = build.input_((3,), dtypes.float32)
    as_int, as_bool, as_fp8 = interpret(
        [ops.cast(node, dtype=d) for d in (dtypes.int8, dtypes.bool_, dtypes.float8_e4m3)],
        {node: x},
    )
    assert as_int.tolist() == [1, -1, 0] and as_bool.tolist() == [True, True, False]
    assert as_fp8.astype(float).tolist() == [1.875, -1.875, 0.0]
    (bits,) = interpret([ops.bitcast(node, dtype=dtypes.uint32)], {node: x})
    assert bits.tolist() == x.view(np.uint32).tolist()


def test_nan_rules() -> None:
    x = [1.0, NAN, 3.0, NAN]
    assert np.isnan(run(ops.max_, x, axes=(0,))) and np.isnan(run(ops.min_, x, axes=(0,)))
    assert run(ops.argmax, x, axis=0) == 1
    assert run(ops.argmax, [3, 1, 3], axis=0) == 0
    assert np.isnan(run(ops.maximum, [NAN, 1.0], [1.0, NAN])).all()
    assert run(ops.sign, [NAN, -2.0, 0.0]).tolist() == [0, -1, 0]


def test_reductions_of_nothing() -> None:
    empty = np.zeros((2, 0))
    assert run(ops.sum_, empty, axes=(1,)).tolist() == [0, 0]
    assert run(ops.prod, empty, axes=(1,)).tolist() == [1, 1]
    assert run(ops.max_, empty, axes=(1,)).tolist() == [-INF, -INF]
    assert run(ops.min_, empty, dtype=np.int8, axes=(1,)).tolist() == [127, 127]
    assert run(build.matmul, np.zeros((2, 0)), np.zeros((0, 1))).tolist() == [[0], [0]]


def test_sort_is_stable_and_nan_is_largest() -> None:
    x = build.input_((5,), dtypes.float32)
    value = np.array([2, NAN, 1, 2, NAN], np.float32)
    for descending, expected in ((False, [2, 0, 3, 1, 4]), (True, [1, 4, 0, 3, 2])):
        node = ops.sort(x, axis=0, descending=descending)
        (index,) = interpret([ops.get(node, index=1)], {x: value})
        assert index.tolist() == expected


def test_erf_inverse() -> None:
    y = np.array([0.0, 1e-20, 0.3, -0.999, 1.0, -1.0, 2.0])
    x = run(ops.erf_inverse, y)
    np.testing.assert_allclose(run(ops.erf, x[:6]), y[:6], rtol=1e-14)
    assert x[4] == INF and x[5] == -INF and np.isnan(x[6])


def test_update_modes() -> None:
    state, value, index = np.array([1.0, 2, 3]), np.array([5.0, 6, 7, 8]), np.array([1, 1, -1, 3])
    for mode, expected in (
        ("set", 6),
        ("add", 13),
        ("multiply", 60),
        ("max", 6),
        ("min", 2),
    ):
        got = run(ops.update, state, value, index, axes=(0,), mode=mode)
        assert got.tolist() == [1, expected, 3]
    assert state.tolist() == [1, 2, 3]


def test_gather_axes() -> None:
    x = seeded("gather").standard_normal((2, 3, 4))
    i, j = np.array([0, 2]), np.array([3, 1])
    got = run(ops.gather, x, j, i, axes=(2, 1))
    np.testing.assert_array_equal(got, x[:, i, j].T)
    line = x[0, 0]
    assert run(ops.gather, line, np.array([-1, 9]), axes=(0,)).tolist() == [line[0], line[3]]


def test_dot_against_einsum() -> None:
    rng = seeded("dot")
    a, b = rng.standard_normal((2, 3, 5, 4)), rng.standard_normal((4, 6, 3, 2))
    got = run(ops.dot, a, b, batch=((0,), (3,)), contract=((3, 1), (0, 2)), dtype=dtypes.float64)
    np.testing.assert_allclose(got, np.einsum("abcd,deba->ace", a, b))


def test_philox_known_answers() -> None:
    # from Random123's kat_vectors, philox2x32 with 10 rounds
    full = 0xFFFFFFFF
    for low, high, key, expected in (
        (0, 0, 0, 0xFF1DAE59),
        (full, full, full, 0x2C3F628B),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0xDD7CE038),
    ):
        assert philox(np.array([low]), np.array([high]), key)[0] == expected


def test_random_bits_depend_on_the_linear_index_only() -> None:
    key, offset = (build.input_((), dtypes.uint32) for _ in range(2))
    given = {key: np.uint32(5), offset: np.uint32(9)}
    flat, square = interpret(
        [ops.random_bits(key, offset, shape=s) for s in ((12,), (3, 4))], given
    )
    np.testing.assert_array_equal(flat, square.ravel())
    assert flat[3] == philox(np.array([3]), np.array([9]), 5)[0]
    assert len(set(flat.tolist())) == 12


def test_symbolic_sizes() -> None:
    n = symbol("n", 1, 64)
    x = build.input_((n, 2), dtypes.float32)
    flat = build.reshape(x, (n * 2,))
    wider = build.pad(x, (n, 0), (0, 0))
    results = [build.sum_(flat), build.size_value(n + 1), build.iota(n), wider]
    total, size, line, padded = interpret(results, {x: np.ones((3, 2), np.float32)}, {"n": 3})
    assert total == 6 and size == 4 and line.tolist() == [0, 1, 2] and padded.shape == (6, 2)


def test_blocks_and_missing_values() -> None:
    a, b = (argument(name, Array((2,), dtypes.float32)) for name in "ab")
    block = pure_block("f", (a, b), (ops.add(a, b),))
    one = np.ones(2, np.float32)
    assert interpret(block, {a: one, b: one})[0].tolist() == [2, 2]
    with pytest.raises(InternalError, match="has no value"):
        interpret(block, {a: one})
    with pytest.raises(InternalError, match="expected"):
        interpret(block, {a: one, b: np.ones(3, np.float32)})


def test_while_loop_and_cond() -> None:
    x = build.input_((), dtypes.int64)
    (power,) = build.while_loop(
        lambda c: build.less(c[0], x),
        lambda c: [ops.add(c[0], c[0])],
        [build.constant(1, dtypes.int64)],
    )
    (chosen,) = build.cond(build.less(x, 10), lambda: [power], lambda: [ops.negative(power)])
    assert interpret([power, chosen], {x: np.array(100)}) == [128, -128]
    assert interpret([power, chosen], {x: np.array(5)}) == [8, 8]


def test_depth_and_dead_values() -> None:
    x = build.input_((), dtypes.float32)
    y = x
    for _ in range(20000):
        y = ops.negative(y)
    assert interpret([y], {x: np.float32(2)})[0] == 2


def test_a_wrong_reference_is_found(monkeypatch) -> None:
    monkeypatch.setitem(REFERENCE, ops.exp, lambda inputs, attrs: inputs[0].astype(np.float64))
    with pytest.raises(InternalError, match="expected"):
        run(ops.exp, np.ones(2, np.float32))
