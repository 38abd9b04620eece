"""The whole compiler against the interpreter: random Graphs, then every op's corners.

The judge is `graph.interpret`; integers agree exactly, floats to their dtype's tolerance.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from judge import check, compare, run
from random_graphs import CONTROL, STEPS, random_graph

from tilegrad.core import dtype as dtypes
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.symbol import evaluate, symbol

LOW = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
WHOLE = (
    ml_dtypes.int4,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.asarray(rng(seed).standard_normal(shape) * 2).astype(dtype)


def whole(*shape: int, low: int = -5, high: int = 6, seed: int = 0, dtype=np.int64) -> np.ndarray:
    return np.asarray(rng(seed).integers(low, high, shape)).astype(dtype)


def bools(*shape: int, seed: int = 0) -> np.ndarray:
    return whole(*shape, low=0, high=2, seed=seed, dtype=np.bool_)


def numbers(dtype, *shape: int, seed: int = 0) -> np.ndarray:
    """Small numbers of any dtype, not negative where it is unsigned."""
    x = floats(*shape, seed=seed) * 3
    return (np.abs(x) if np.dtype(dtype).kind == "u" else x).astype(dtype)


# ---- random Graphs --------------------------------------------------------------------------


def check_random(seed: int, kinds: tuple, dtype: dtypes.DType | None, looser: float) -> None:
    inputs, outputs, arrays = random_graph(seed, 4 + seed % 9, dtype, kinds)
    expected = interpret(outputs, dict(zip(inputs, arrays)))
    for node, got, want in zip(outputs, run(inputs, outputs, arrays), expected):
        compare(node, got, want, looser)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(60))
def test_random_floats(seed: int) -> None:
    check_random(seed, STEPS, None, 3)


@pytest.mark.parametrize("seed", range(100, 130))
def test_random_integers(seed: int) -> None:
    check_random(seed, STEPS, (dtypes.int32, dtypes.int64, dtypes.int8)[seed % 3], 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(200, 245))
def test_random_control(seed: int) -> None:
    check_random(seed, CONTROL, (None, None, dtypes.int32)[seed % 3], 5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(400, 424))
def test_random_narrow(seed: int) -> None:
    kinds = (*CONTROL, "dot", "dot", "dot")
    narrow = (dtypes.uint8, dtypes.int8, dtypes.bfloat16, dtypes.float16)
    check_random(seed, kinds, narrow[seed % 4], 3)


# ---- reductions -----------------------------------------------------------------------------

AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("op", [ops.sum_, ops.prod, ops.max_, ops.min_], ids=lambda o: o.name)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_reductions(op, axes) -> None:
    def both(x, y, z):
        return [build.reduce(op, v, axes) for v in (x, y, z)]

    check(both, floats(3, 5, 7), whole(3, 5, 7), bools(3, 5, 7))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_argmax(axis: int) -> None:
    some_nan = floats(3, 25, 37)
    some_nan[some_nan > 3] = np.nan
    lowest = np.full((3, 20, 4), -np.inf, np.float32)
    check(
        lambda *xs: [ops.argmax(x, axis=axis) for x in xs],
        floats(3, 25, 37),
        whole(3, 25, 37),
        bools(3, 25, 37),
        some_nan,
        lowest,
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_cumulative(axis: int, kind: str) -> None:
    check(
        lambda *xs: [ops.cumulative(x, axis=axis, kind=kind) for x in xs],
        floats(3, 5, 19) / 2,
        whole(3, 5, 19, dtype=np.int8),
        bools(3, 5, 19),
    )


# ---- no elements ----------------------------------------------------------------------------

EMPTY = {
    "elementwise": lambda a, m, b, c, i: build.add(a, a),
    "sum of nothing": lambda a, m, b, c, i: [build.sum_(a, 0), build.sum_(a), build.sum_(m, 1)],
    "no sums": lambda a, m, b, c, i: build.sum_(a, 1),
    "max of nothing": lambda a, m, b, c, i: build.max_(a, 0),
    "argmax of nothing": lambda a, m, b, c, i: ops.argmax(m, axis=1),
    "dot over nothing": lambda a, m, b, c, i: build.matmul(build.transpose(a), a),
    "dot of no rows": lambda a, m, b, c, i: build.matmul(a, build.transpose(b)),
    "cumulative": lambda a, m, b, c, i: ops.cumulative(m, axis=1, kind="sum"),
    "sort": lambda a, m, b, c, i: build.items(ops.sort(m, axis=1, descending=False)),
    "concatenate": lambda a, m, b, c, i: build.concatenate([a, b, a], 0),
    "gather": lambda a, m, b, c, i: build.gather(b, [i], [0]),
    "update": lambda a, m, b, c, i: build.update(b, a, [i], [0]),
    "pad": lambda a, m, b, c, i: build.pad(a, (1, 2), (2, 1)),
    "beside others": lambda a, m, b, c, i: [build.sum_(a), build.add(c, 1.0)],
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_elements(name: str) -> None:
    check(EMPTY[name], floats(0, 5), floats(3, 0, 5), floats(4, 5), floats(3), whole(0))


# ---- movement -------------------------------------------------------------------------------

MOVES = {
    "concatenate": lambda x, y: build.concatenate([x, y, build.negative(x)], 1),
    "concatenate first": lambda x, y: build.concatenate([y, x], 0),
    "sum of parts": lambda x, y: build.sum_(build.concatenate([build.multiply(x, x), y], 1), 1),
    "pad": lambda x, y: build.pad(x, (1, 2), (3, 0)),
    "sum of padded": lambda x, y: build.sum_(build.pad(build.unary(ops.exp, x), (1, 2), (3, 9)), 1),
    "pad twice": lambda x, y: build.pad(
        build.flip(build.pad(x, (1, 2), (3, 4)), (0, 1)), (2, 2), (1, 1)
    ),
    "slice of padded": lambda x, y: build.slice_(
        build.pad(x, (4, 4), (4, 4)), (2, 3), (9, 20), (2, 3)
    ),
    "windows": lambda x, y: build.windows(x, 1, 3, 2, 2),
    "windows twice": lambda x, y: build.windows(build.windows(x, 1, 3), 0, 2, 2),
    "max of windows": lambda x, y: build.max_(build.windows(x, 1, 5, 3), 2),
    "flip": lambda x, y: build.add(build.flip(x, (1,)), y),
    "permute": lambda x, y: build.add(build.permute(x, (1, 0)), build.transpose(y)),
    "reshape": lambda x, y: build.reshape(
        build.permute(build.reshape(x, (2, 3, 40)), (2, 0, 1)), (48, 5)
    ),
    "expand": lambda x, y: build.multiply(build.expand(build.unsqueeze(x, 1), (6, 3, 40)), 2.0),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16], ids=str)
def test_movement(name: str, dtype) -> None:
    if np.dtype(dtype).kind != "f" and "sum of padded" in name:
        pytest.skip("exp is of floats")
    check(MOVES[name], floats(6, 40, dtype=dtype), floats(6, 40, seed=1, dtype=dtype))


def test_convolution() -> None:
    def convolve(x, w):
        x = build.pad(x, (0, 0, 1, 1), (0, 0, 1, 1))
        x = build.windows(build.windows(x, 2, 3, 2), 3, 3, 2)
        return build.dot(x, w, ((), ()), ((1, 4, 5), (1, 2, 3)), dtypes.float32)

    check(convolve, floats(2, 3, 8, 9), floats(4, 3, 3, 3, seed=1))


# ---- dtypes ---------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*LOW, *WHOLE, np.float64], ids=lambda d: np.dtype(d).name)
def test_dtypes(dtype) -> None:
    def several(x, y, i):
        return [
            build.add(x, y),
            build.multiply(x, y),
            build.maximum(x, y),
            build.sum_(x, 1),
            build.sum_(x, 0),
            build.max_(x, 1),
            build.matmul(x, build.transpose(y)),
            build.where(build.less(x, y), x, y),
            build.pad(x, (1, 1), (2, 2)),
            build.gather(x, [i], [1]),
            ops.cumulative(x, axis=1, kind="max"),
            build.update(x, y, [build.slice_axis(i, 0, 0, 5)], [0], "add"),
        ]

    check(several, numbers(dtype, 5, 37), numbers(dtype, 5, 37, seed=1), whole(9, low=0, high=7))


@pytest.mark.parametrize(
    "source",
    [*LOW, np.int8, np.uint8, np.int64, np.float64, np.bool_],
    ids=lambda d: np.dtype(d).name,
)
def test_casts(source) -> None:
    wanted = (*LOW, np.int8, np.uint8, np.int64, np.float32, np.float64, np.bool_)
    targets = [dtypes.BY_NUMPY[np.dtype(d)] for d in wanted]
    check(lambda x: [build.cast(x, t) for t in targets], numbers(source, 300))


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_every_float8(name: str) -> None:
    dtype = dtypes.dtype_of(name)
    wide = lambda x: build.cast(ops.bitcast(x, dtype=dtype), dtypes.float32)  # noqa: E731
    check(wide, np.arange(256, dtype=np.uint8))
    spread = floats(3000) * np.exp(floats(3000, seed=1) * 2)
    edges = [
        448,
        449,
        464,
        464.1,
        480,
        57344,
        61439,
        61440,
        65536,
        1e9,
        np.inf,
        -np.inf,
        np.nan,
        0.0,
        -0.0,
        2**-9,
        2**-10,
        2**-10 * 1.01,
        2**-16,
        2**-17,
        2**-17 * 1.001,
    ]
    values = np.concatenate([spread, np.array(edges)]).astype(np.float32)
    back = lambda x: build.cast(build.cast(x, dtype), dtypes.float32)  # noqa: E731
    (got,) = check(back, values)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, values.astype(dtype.numpy).astype(np.float32))


def test_unsigned_wraps() -> None:
    def several(x, y):
        total = build.add(x, y)
        turned = build.unary(ops.absolute, build.negative(total))
        return [turned, build.subtract(turned, total), build.unary(ops.sign, turned)]

    check(several, numbers(np.uint8, 40) + np.uint8(200), numbers(np.uint8, 40, seed=1))


def test_random_bits() -> None:
    def bits(key, offset):
        one = ops.random_bits(key, offset, shape=(7, 33))
        other = build.permute(ops.random_bits(key, offset, shape=(33, 7)), (1, 0))
        return [one, build.add(one, other)]

    check(bits, np.uint32(12345), np.uint32(0xFFFFFFF0))
    check(bits, np.uint32(0), np.uint32(77))


# ---- gather and update ----------------------------------------------------------------------

GATHERS = {
    "rows": lambda x, i, j: build.gather(x, [i], [0]),
    "one row": lambda x, i, j: build.gather(x, [build.slice_axis(i, 0, 0, 1)], [0]),
    "columns": lambda x, i, j: build.gather(x, [j], [1]),
    "elements": lambda x, i, j: build.gather(x, [i, j], [0, 1]),
    "axes turned": lambda x, i, j: build.gather(x, [j, i], [1, 0]),
    "table of indices": lambda x, i, j: build.gather(x, [build.reshape(i, (3, 4))], [0]),
    "along": lambda x, i, j: build.gather(x, [build.iota(12), j], [0, 1]),
    "iota": lambda x, i, j: build.gather(x, [build.add(build.multiply(build.iota(6), 2), 1)], [1]),
    "iota out of range": lambda x, i, j: build.gather(x, [build.subtract(build.iota(50), 5)], [1]),
    "of computed": lambda x, i, j: build.add(build.gather(build.multiply(x, x), [i], [0]), 1.0),
    "computed index": lambda x, i, j: build.gather(x, [build.add(i, j)], [0]),
    "of padded": lambda x, i, j: build.gather(build.pad(x, (1, 2), (1, 2)), [i], [0]),
    "of gathered": lambda x, i, j: build.gather(build.gather(x, [i], [0]), [i], [0]),
    "summed": lambda x, i, j: build.sum_(build.gather(x, [i], [0]), 0),
    "into dot": lambda x, i, j: build.matmul(build.gather(x, [i], [0]), build.transpose(x)),
    "argmax": lambda x, i, j: build.gather(x, [ops.argmax(x, axis=1)], [1]),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gather(name: str) -> None:
    i, j = whole(12, low=-3, high=24), whole(12, low=-3, high=36, seed=1, dtype=np.int64)
    check(GATHERS[name], floats(20, 33), i, j)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8, np.uint64], ids=str)
def test_gather_index_dtypes(dtype) -> None:
    i = whole(12, low=0, high=20, dtype=dtype)
    check(lambda x, i: build.gather(x, [i], [0]), bools(20, 33), i)


UPDATES = {
    "elements": ([0, 1], (90,)),
    "rows": ([0], (9,)),
    "columns": ([1], (9,)),
    "one row": ([0], ()),
    "table": ([0], (3, 4)),
}


@pytest.mark.parametrize("mode", ["set", "add", "multiply", "max", "min"])
@pytest.mark.parametrize("name", UPDATES)
def test_update(mode: str, name: str) -> None:
    axes, shape = UPDATES[name]
    sizes = (20, 33)
    rest = tuple(s for a, s in enumerate(sizes) if a not in axes)
    indices = [whole(*shape, low=-3, high=sizes[a] + 3, seed=a) for a in axes]

    def several(state, value, *found):
        after = build.update(state, value, found, axes, mode)
        fresh = build.update(build.full(sizes, 1.0, dtypes.float32), value, found, axes, mode)
        computed = build.update(build.unary(ops.exp, state), value, found, axes, mode)
        twice = build.update(after, build.negative(value), found, axes, mode)
        return [after, fresh, computed, build.sum_(twice, 1)]

    check(several, floats(*sizes), floats(*shape, *rest, seed=1), *indices)


@pytest.mark.parametrize("mode", ["set", "add", "max"])
def test_update_at_known_places(mode: str) -> None:
    def several(state, value, start):
        places = build.iota(25)
        found = [build.subtract(places, 3), build.add(places, start), build.multiply(places, 2)]
        return [build.update(state, value, [f], [0], mode) for f in found]

    check(several, floats(20, 33), floats(25, 33, seed=1), np.int64(2))


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, ml_dtypes.bfloat16, np.float64], ids=str)
@pytest.mark.parametrize("mode", ["set", "max", "multiply"])
def test_update_dtypes(dtype, mode: str) -> None:
    check(
        lambda s, v, i: build.update(s, v, [i], [0], mode),
        numbers(dtype, 20),
        numbers(dtype, 40, seed=1),
        whole(40, low=-3, high=23),
    )


def test_update_reads_its_own_state() -> None:
    """What an update writes may come from the state it overwrites."""

    def shift(state, i):
        return build.update(state, build.gather(state, [i], [0]), [build.add(i, 1)], [0], "set")

    for donate in ((), (0,)):
        check(shift, floats(20, 33), whole(9, low=0, high=19), donate=donate)


# ---- sorts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("count", [1, 2, 12, 13, 25, 100, 4097])
def test_sort_lengths(count: int, descending: bool) -> None:
    x = floats(count)
    x[rng(1).random(count) < 0.2] = np.nan
    for value, seed in ((-0.0, 2), (0.0, 3), (np.inf, 4), (-np.inf, 5)):
        x[rng(seed).random(count) < 0.1] = value

    def both(*xs):
        return [v for x in xs for v in build.items(ops.sort(x, axis=0, descending=descending))]

    check(both, x, whole(count, low=-9, high=9))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.uint8, np.uint64, np.float64, np.bool_, *LOW[:3]],
    ids=lambda d: np.dtype(d).name,
)
def test_sort_dtypes(dtype, descending: bool) -> None:
    def both(x):
        return [
            v for axis in (0, 1) for v in build.items(ops.sort(x, axis=axis, descending=descending))
        ]

    check(both, numbers(dtype, 7, 50))


def test_sort_of_computed_values() -> None:
    def several(x):
        values, places = build.items(ops.sort(build.multiply(x, x), axis=1, descending=True))
        return [build.sum_(values, 1), places]

    check(several, floats(3, 20, 7))


# ---- symbolic sizes -------------------------------------------------------------------------

N, M = symbol("N", 0, 64), symbol("M", 1, 40)


def softmax(x, axis):
    e = build.unary(ops.exp, build.subtract(x, build.max_(x, axis, keep=True)))
    return build.divide(e, build.sum_(e, axis, keep=True))


def causal(x):
    return build.less_equal(build.iota_along(x.shape, 1), build.iota_along(x.shape, 0))


SYMBOLIC = {
    "add": (lambda x, y: build.add(x, y), (N, M), (M,)),
    "sums": (lambda x: [build.sum_(x, 1), build.sum_(x, 0), build.sum_(x)], (N, M)),
    "middle": (lambda x: build.sum_(x, 1), (3, N, M)),
    "softmax": (lambda x: softmax(x, 1), (N, M)),
    "softmax first": (lambda x: softmax(x, 0), (M, N)),
    "dot": (lambda x, y: build.matmul(x, y), (N, 16), (16, M)),
    "dot over N": (lambda x, y: build.matmul(x, y), (8, N), (N, 24)),
    "batched": (lambda x, y: build.matmul(x, build.transpose(y)), (N, 3, M), (N, 5, M)),
    "reshape": (lambda x: build.sum_(build.reshape(x, (N, 5, M)), 1), (N, 5 * M)),
    "permute": (lambda x: build.permute(x, (1, 0)), (N, M)),
    "pad": (lambda x: build.pad(x, (1, 2), (3, 4)), (N, M)),
    "concatenate": (lambda x, y: build.concatenate([x, y], 0), (N, 5), (M, 5)),
    "concatenate last": (lambda x, y: build.concatenate([x, y], 1), (5, N), (5, M)),
    "flip": (lambda x: build.flip(x, (0,)), (N, 5)),
    "causal": (lambda x: build.where(causal(x), x, -1.0), (N, N)),
    "cumulative": (lambda x: ops.cumulative(x, axis=1, kind="sum"), (3, N)),
    "sort": (lambda x: build.items(ops.sort(x, axis=1, descending=False)), (3, N)),
    "argmax": (lambda x: ops.argmax(x, axis=1), (N, M)),
    "update": (lambda x, v: build.update(x, v, [build.iota(M)], [0], "set"), (64, 5), (M, 5)),
    "mean": (
        lambda x: build.divide(build.sum_(x, 1), build.cast(build.size_value(M), dtypes.float32)),
        (N, M),
    ),
    "beside sums of rows": (
        lambda x, y: [build.add(build.sum_(x, 1), y), build.multiply(y, y)],
        (N, M),
        (N,),
    ),
    "beside sums of long rows": (
        lambda x, y: [build.add(build.sum_(x, 1), y), build.multiply(y, y)],
        (M, 9000),
        (M,),
    ),
    "beside sums of columns": (
        lambda x, y: [build.add(build.sum_(x, 0), y), build.multiply(y, y)],
        (N, M),
        (M,),
    ),
    "windows": (lambda x: build.sum_(build.windows(build.pad(x, (1,), (1,)), 0, 3), 1), (M,)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name: str) -> None:
    """One Executable serves every value of its Symbols."""
    function, *shapes = SYMBOLIC[name]
    nodes = [build.input_(s, dtypes.float32) for s in shapes]
    made = function(*nodes)
    outputs = list(made) if isinstance(made, list) else [made]
    for n, m in ((1, 1), (0, 2), (7, 5), (33, 17), (64, 40)):
        symbols = {"N": n, "M": m}
        values = [
            floats(*(evaluate(s, symbols) for s in shape), seed=i) for i, shape in enumerate(shapes)
        ]
        expected = interpret(outputs, dict(zip(nodes, values)), symbols)
        for node, got, want in zip(outputs, run(nodes, outputs, values, symbols), expected):
            compare(node, got, want)
