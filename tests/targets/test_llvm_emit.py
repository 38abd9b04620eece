"""targets/llvm against the interpreter: the same Body through both, over ops and dtypes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from looped import looped
from sampled import sampled

from tilegrad.core import dtype as dtypes
from tilegrad.core.dtype import DType
from tilegrad.core.target import AVX2, NEON, SSE2, Target
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Memory
from tilegrad.targets.llvm import driver
from tilegrad.targets.llvm.emit import emit
from tilegrad.targets.llvm.target import host_target
from tilegrad.tile import interpret, ops
from tilegrad.tile.build import Body, BodyBuilder, body_symbols

HOST = host_target()
FLOATS = [dtypes.float32, dtypes.float64]
NARROW = [dtypes.float16, dtypes.bfloat16, dtypes.float8_e4m3, dtypes.float8_e5m2]
INTEGERS = [
    dtypes.int8,
    dtypes.uint8,
    dtypes.int16,
    dtypes.uint16,
    dtypes.int32,
    dtypes.uint32,
    dtypes.int64,
    dtypes.uint64,
]
LANES = (1, 6, 16)


def run_native(
    body: Body,
    memories: Sequence[np.ndarray],
    symbols: Mapping[str, int] | None = None,
    target: Target = HOST,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Compile the Body and run its programs on this thread."""
    text, scratch_bytes = emit(body, "kernel")
    module = driver.load(driver.compile_text(text, target))
    bound = dict(symbols or {})
    pointers = (ctypes.c_void_p * max(1, len(memories)))(*[m.ctypes.data for m in memories])
    values = [bound[s.name] for s in body_symbols(body)]
    scalars = (ctypes.c_int64 * max(1, len(values)))(*values)
    scratch = np.zeros(scratch_bytes + 128, np.uint8)
    aligned = scratch.ctypes.data + (-scratch.ctypes.data) % 64
    if stop is None:
        stop = int(np.prod([interpret.evaluate(s, bound) for s in body.grid]))
    function = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    )(module.address("kernel"))
    function(ctypes.addressof(pointers), ctypes.addressof(scalars), start, stop, aligned)


def both(
    body: Body,
    memories: Sequence[np.ndarray],
    symbols: Mapping[str, int] | None = None,
    ulps: float = 0,
    target: Target = HOST,
) -> list[np.ndarray]:
    """Run the Body through both and compare every memory."""
    ours = [np.array(m, order="C") for m in memories]
    theirs = [np.array(m, order="C") for m in memories]
    interpret.run(body, ours, symbols)
    run_native(body, theirs, symbols, target)
    for parameter, a, b in zip(body.parameters, ours, theirs):
        close(b, a, ulps, parameter.attrs["name"])
    return ours


def close(got: np.ndarray, expected: np.ndarray, ulps: float, name: str = "") -> None:
    """Equal (nan is nan), or within some ulp of the expected values."""
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected, err_msg=name)
        return
    a, b = got.astype(np.float64), expected.astype(np.float64)
    if not ulps:
        np.testing.assert_array_equal(a, b, err_msg=name)
        return
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=name)
    with np.errstate(all="ignore"):
        unit = np.spacing(np.abs(expected.astype(got.dtype))).astype(np.float64)
        off = np.where(a == b, 0, np.abs(a - b) / unit)
    assert np.nanmax(off, initial=0) <= ulps, (name, np.nanmax(off), a.ravel(), b.ravel())


def sample(dtype: DType, count: int, seed: int = 0) -> np.ndarray:
    """Values of a dtype: ordinary ones and its edges."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "bool":
        return rng.integers(0, 2, count).astype(np.bool_)
    if dtype.is_float:
        x = rng.standard_normal(count) * rng.choice([0.1, 1, 10], count)
        edges = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 2.5, -2.5]
        x[: min(count, 10)] = edges[: min(count, 10)]
        return rng.permutation(x).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    x = rng.integers(info.min, info.max, count, dtype.numpy, endpoint=True)
    small = rng.integers(max(info.min, -3), 9, count).astype(dtype.numpy)
    x = np.where(rng.random(count) < 0.5, x, small)
    edges = np.array([info.min, info.max, 0, 1], dtype.numpy)
    x[: min(count, 4)] = edges[: min(count, 4)]
    return rng.permutation(x)


def elementwise_body(
    function: Callable[..., Node], inputs: Sequence[DType], output: DType, count: int, lanes: int
) -> Body:
    """out[i] = function(a[i], b[i], ...), a vector of lanes at a time, with a masked tail."""
    parameters = [(f"in{i}", Memory((count,), d)) for i, d in enumerate(inputs)]
    b = BodyBuilder("elementwise", [*parameters, ("out", Memory((count,), output, use="result"))])
    programs = -(-count // lanes)
    first = b.program(0, programs) * lanes
    if lanes == 1:
        values = [b.load(p, (first,)) for p in b.parameters[:-1]]
        b.store(b.parameters[-1], function(b, *values), (first,))
        return b.finish((programs,))
    position = b.add(ops.iota(size=lanes, dtype=dtypes.int64))
    mask = b.apply("less", b.apply("add", position, b.index(first)), b.index(count))
    values = [b.load(p, (first,), (lanes,), (0,), mask) for p in b.parameters[:-1]]
    b.store(b.parameters[-1], function(b, *values), (first,), (0,), mask)
    return b.finish((programs,))


def apply(name: str) -> Callable[..., Node]:
    """A builder function of one elementwise op."""
    return lambda b, *inputs: b.apply(name, *inputs)


ULPS = {
    "exp": 2,
    "quick_exp": 2,
    "exp2": 2,
    "quick_exp2": 2,
    "log": 2,
    "log2": 3,
    "log10": 3,
    "expm1": 3,
    "sinh": 3,
    "cosh": 3,
    "erfc": 3,
    "log1p": 3,
    "sin": 2,
    "cos": 2,
    "tan": 4,
    "asin": 3,
    "acos": 3,
    "atan": 3,
    "tanh": 4,
    "erf": 4,
    "erf_inverse": 6,
    "power": 3,
}
FLOAT_ONLY = {"square_root", "reciprocal", "quick_reciprocal", *(set(ULPS) - {"power"})}
INTEGER_ONLY = {
    "shift_left",
    "shift_right",
    "multiply_high",
    "unsigned_divide",
    "unsigned_remainder",
}
BITS = {"bit_and", "bit_or", "bit_xor", "bit_not"}


def domain(name: str, dtype: DType) -> bool:
    """Whether the op is defined on the dtype."""
    if name.startswith("pair_"):  # of GPUs alone
        return False
    if name in ("byte_dot", "signed_byte_dot", "byte_permute"):
        return dtype is dtypes.int32
    if dtype.is_float:
        return name not in INTEGER_ONLY | BITS
    if dtype.kind == "bool":
        plain = {
            "negative",
            "absolute",
            "sign",
            "add",
            "subtract",
            "multiply",
            "maximum",
            "minimum",
            "multiply_add",
            "where",
            *ops.COMPARE,
        }
        return name in BITS | plain
    return name not in FLOAT_ONLY


def operands(name: str, dtype: DType, count: int) -> list[np.ndarray]:
    """Inputs on which the op is defined."""
    number = {"unary": 1, "binary": 2, "compare": 2, "ternary": 3}[ops.ELEMENTWISE[name].category]
    found = [sample(dtype, count, seed) for seed in range(number)]
    if name == "where":
        found[0] = sample(dtypes.bool_, count, 7)
    if name in ("asin", "acos", "erf_inverse"):
        found[0] = np.where(np.abs(found[0]) <= 1, found[0], np.tanh(found[0]))
    return [
        np.ascontiguousarray(f.astype(dtype.numpy if f.dtype != np.bool_ else np.bool_))
        for f in found
    ]


CASES = [
    (name, d)
    for name in ops.ELEMENTWISE
    for d in (*FLOATS, *INTEGERS, dtypes.bool_)
    if domain(name, d)
]


MOST = (*FLOATS, dtypes.int8, dtypes.int32, dtypes.uint64, dtypes.bool_)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name,dtype", sampled(CASES, lambda case: case[1] in MOST), ids=str)
def test_elementwise(name: str, dtype: DType) -> None:
    """Every elementwise op on every dtype, in one lane, odd lanes and full ones."""
    for lanes in LANES:
        arrays = operands(name, dtype, 45)
        output = dtypes.bool_ if ops.ELEMENTWISE[name].category == "compare" else dtype
        types = [dtypes.dtype_of(a.dtype) for a in arrays]
        body = elementwise_body(apply(name), types, output, 45, lanes)
        result = np.zeros(45, output.numpy)
        both(body, [*arrays, result], ulps=ULPS.get(name, 0) if dtype.is_float else 0)


EVERY = [*FLOATS, *NARROW, *INTEGERS, dtypes.bool_]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", EVERY, ids=str)
def test_cast(source: DType) -> None:
    """Every conversion between dtypes."""
    for target, lanes in itertools.product(EVERY, (1, 16)):
        x = sample(source, 60)
        if source.is_integer and target in (dtypes.float16, dtypes.bfloat16):
            x = np.clip(x, 0 if source.kind == "uint" else -100, 100).astype(source.numpy)
        body = elementwise_body(
            lambda b, v, target=target: b.cast(v, target), [source], target, 60, lanes
        )
        both(body, [x, np.zeros(60, target.numpy)])


def test_float8_every_value() -> None:
    """All 256 values of both fp8 dtypes, and rounding of many floats to them."""
    for d in (dtypes.float8_e4m3, dtypes.float8_e5m2):
        every = np.arange(256, dtype=np.uint8).view(d.numpy)
        widen = lambda b, v: b.cast(v, dtypes.float32)  # noqa: E731
        body = elementwise_body(widen, [d], dtypes.float32, 256, 16)
        both(body, [every, np.zeros(256, np.float32)])
        rng = np.random.default_rng(0)
        many = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 6, 4096)).astype(np.float32)
        body = elementwise_body(lambda b, v, d=d: b.cast(v, d), [dtypes.float32], d, 4096, 16)
        both(body, [many, np.zeros(4096, d.numpy)])


def test_bitcast() -> None:
    """Bits of a float as an integer and back."""
    for a, c in (
        (dtypes.float32, dtypes.int32),
        (dtypes.int64, dtypes.float64),
        (dtypes.bfloat16, dtypes.uint16),
        (dtypes.uint8, dtypes.float8_e4m3),
    ):
        body = elementwise_body(lambda b, v, c=c: b.add(ops.bitcast(v, dtype=c)), [a], c, 33, 16)
        both(body, [sample(a, 33), np.zeros(33, c.numpy)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize(
    "dtype", [*FLOATS, dtypes.int8, dtypes.int32, dtypes.uint8, dtypes.int64, dtypes.bool_], ids=str
)
def test_reduce(kind: str, dtype: DType) -> None:
    """Reductions along every axis of tiles of rank 1 to 3."""
    for shape in ((16,), (5,), (4, 8), (3, 7), (2, 3, 4), (2, 6, 12), (6, 1), (1, 6)):
        for axis in range(len(shape)):
            rest = shape[:axis] + shape[axis + 1 :]
            b = BodyBuilder(
                "reduce", [("x", Memory(shape, dtype)), ("out", Memory(rest, dtype, use="result"))]
            )
            x = b.load(b.parameters[0], (0,) * len(shape), shape, tuple(range(len(shape))))
            y = b.add(ops.reduce(x, axis=axis, kind=kind))
            b.store(b.parameters[1], y, (0,) * len(rest), tuple(range(len(rest))))
            data = sample(dtype, int(np.prod(shape)), axis)
            if dtype.is_float:
                data = np.random.default_rng(1).random(data.size).astype(dtype.numpy) + 0.5
            memories = [data.reshape(shape), np.zeros(rest, dtype.numpy)]
            both(b.finish((1,)), memories, ulps=8 if kind in ("sum", "prod") else 0)


def test_reduce_nan_and_zero() -> None:
    """max and min give nan where one is."""
    for kind in ("max", "min"):
        b = BodyBuilder(
            "reduce", [("x", Memory((8,), dtypes.float32)), ("out", Memory((), dtypes.float32))]
        )
        y = b.add(ops.reduce(b.load(b.parameters[0], (0,), (8,), (0,)), axis=0, kind=kind))
        b.store(b.parameters[1], y, ())
        x = np.array([1, 2, np.nan, 4, 5, 6, 7, 8], np.float32)
        assert np.isnan(both(b.finish((1,)), [x, np.zeros((), np.float32)])[1])


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_cumulative(kind: str) -> None:
    """Running reductions along either axis."""
    cases = itertools.product((dtypes.float32, dtypes.int32), (0, 1), (8, 6, 7))
    for dtype, axis, columns in cases:
        shape = (4, columns)
        b = BodyBuilder("running", [("x", Memory(shape, dtype)), ("out", Memory(shape, dtype))])
        x = b.load(b.parameters[0], (0, 0), shape, (0, 1))
        b.store(b.parameters[1], b.add(ops.cumulative(x, axis=axis, kind=kind)), (0, 0), (0, 1))
        data = np.random.default_rng(0).integers(1, 9, shape).astype(dtype.numpy)
        both(b.finish((1,)), [data, np.zeros(shape, dtype.numpy)], ulps=4)


def test_strided_and_transposed_loads() -> None:
    """Tiles that take Memory axes in another order, from strided Memories."""
    for dtype in (dtypes.float32, dtypes.int8, dtypes.bfloat16, dtypes.bool_):
        memory = Memory((6, 5), dtype, strides=(1, 7))
        b = BodyBuilder(
            "strided",
            [
                ("x", memory),
                ("rows", Memory((4, 3), dtype)),
                ("columns", Memory((3, 4), dtype)),
                ("line", Memory((5,), dtype)),
            ],
        )
        x, rows, columns, line = b.parameters
        b.store(rows, b.load(x, (1, 1), (4, 3), (0, 1)), (0, 0), (0, 1))
        tile = b.load(x, (1, 1), (3, 4), (1, 0))
        b.store(columns, tile, (0, 0), (0, 1))
        b.store(rows, tile, (0, 0), (1, 0))
        b.store(line, b.load(x, (2, 0), (5,), (1,)), (0,), (0,))
        data = sample(dtype, 40)
        both(
            b.finish((1,)),
            [
                data,
                np.zeros((4, 3), dtype.numpy),
                np.zeros((3, 4), dtype.numpy),
                np.zeros(5, dtype.numpy),
            ],
        )


def test_masked_tails_in_two_axes() -> None:
    """A 2-D tile over a ragged edge reads 0 and writes nothing outside."""
    for dtype in (dtypes.float32, dtypes.bfloat16, dtypes.int8, dtypes.bool_, dtypes.int64):
        rows, columns = 10, 13
        b = BodyBuilder(
            "ragged",
            [("x", Memory((rows, columns), dtype)), ("out", Memory((rows, columns), dtype))],
        )
        i, j = b.program(0, 3) * 4, b.program(1, 2) * 8
        row = b.add(ops.reshape(b.add(ops.iota(size=4, dtype=dtypes.int64)), shape=(4, 1)))
        column = b.add(ops.iota(size=8, dtype=dtypes.int64))
        mask = b.logical_and(
            b.apply("less", b.apply("add", row, b.index(i)), b.index(rows)),
            b.apply("less", b.apply("add", column, b.index(j)), b.index(columns)),
        )
        tile = b.load(b.parameters[0], (i, j), (4, 8), (0, 1), mask)
        b.store(b.parameters[1], tile, (i, j), (0, 1), mask)
        x = sample(dtype, rows * columns).reshape(rows, columns)
        out = both(b.finish((3, 2)), [x, np.zeros_like(x)])[1]
        np.testing.assert_array_equal(out.astype(np.float64), x.astype(np.float64))


def test_masked_strided_and_scalar() -> None:
    """Masks on strided tiles, by one bool for the tile, and on scalars."""
    for dtype in (dtypes.float32, dtypes.bfloat16, dtypes.float64, dtypes.bool_, dtypes.int16):
        b = BodyBuilder(
            "masked",
            [
                ("x", Memory((8, 4), dtype)),
                ("y", Memory((8, 4), dtype)),
                ("one", Memory((4,), dtype)),
            ],
        )
        x, y, one = b.parameters
        p = b.program(0, 4)
        mask = b.apply("less", b.add(ops.iota(size=8, dtype=dtypes.int64)), b.index(p * 2))
        b.store(y, b.load(x, (0, p), (8,), (0,), mask), (0, p), (0,), mask)
        some = b.less(p, 2)
        b.store(y, b.load(x, (0, 0), (2, 4), (0, 1), some), (6, 0), (0, 1), some)
        b.store(one, b.load(x, (p, p), mask=some), (p,), mask=b.less(1, p))
        both(
            b.finish((4,)),
            [sample(dtype, 32).reshape(8, 4), np.zeros((8, 4), dtype.numpy), sample(dtype, 4, 3)],
        )


@pytest.mark.parametrize(
    "dtype",
    [
        dtypes.float32,
        dtypes.float64,
        dtypes.bfloat16,
        dtypes.int8,
        dtypes.int32,
        dtypes.bool_,
        dtypes.int64,
    ],
    ids=str,
)
def test_gather_and_scatter(dtype: DType) -> None:
    """Gathers with masks; scatters with equal offsets."""
    for lanes in (1, 8):
        b = BodyBuilder(
            "scattered",
            [
                ("x", Memory((32,), dtype)),
                ("at", Memory((16,), dtypes.int64)),
                ("to", Memory((12,), dtype)),
            ],
        )
        x, at, to = b.parameters
        first = b.program(0, 16 // lanes) * lanes
        shape, axes = ((), ()) if lanes == 1 else ((lanes,), (0,))
        offset = b.load(at, (first,), shape, axes)
        mask = b.apply("less_equal", b.constant(0, dtypes.int64), offset)
        value = b.gather(x, b.apply("add", offset, b.constant(3, dtypes.int64)))
        value = b.gather(x, offset, mask) if lanes > 1 else value
        b.scatter(to, value, offset, mask)
        offsets = np.array([3, 1, 3, 3, -1, 7, 0, 11, 2, 2, -2, 5, 5, 9, 10, 3])
        data = np.random.default_rng(0).integers(0, 3, 32).astype(dtype.numpy)
        both(b.finish((16 // lanes,)), [data, offsets, np.ones(12, dtype.numpy)])


def test_loop_with_unroll_and_carried() -> None:
    """Loops: steps, unrolling with a rest, several carried tiles, symbolic bounds, nesting."""
    n = symbol("n", 0, 64)
    for unroll, step in itertools.product((1, 2, 4), (1, 3)):
        b = BodyBuilder(
            "looped",
            [("x", Memory((64, 8), dtypes.float32)), ("out", Memory((3, 8), dtypes.float32))],
        )
        x, out = b.parameters

        def inside(i: object, carried: list[Node], b: BodyBuilder = b, x: Node = x) -> list[Node]:
            total, best, count = carried
            row = b.load(x, (i, 0), (8,), (1,))
            more = looped(
                b, "j", 0, 3, 1, lambda j, c: [b.apply("add", c[0], row)], [total], unroll=2
            )
            return [
                more[0],
                b.apply("maximum", best, row),
                b.apply("add", count, b.constant(1, dtypes.int64)),
            ]

        zero = b.constant(0, dtypes.float32, (8,))
        low = b.constant(-np.inf, dtypes.float32, (8,))
        total, best, count = looped(
            b, "i", 0, n, step, inside, [zero, low, b.constant(0, dtypes.int64)], unroll
        )
        b.store(out, total, (0, 0), (1,))
        b.store(out, best, (1, 0), (1,))
        wide = b.broadcast(b.cast(count, dtypes.float32), (8,))
        b.store(out, wide, (2, 0), (1,))
        body = b.finish((1,))
        x_data = np.random.default_rng(0).integers(-9, 9, (64, 8)).astype(np.float32)
        for value in (0, 1, 5, 12, 64):
            both(body, [x_data, np.zeros((3, 8), np.float32)], {"n": value})


def test_branch() -> None:
    """Branches with results, nested, and without."""
    b = BodyBuilder(
        "branched", [("x", Memory((6, 4), dtypes.int32)), ("out", Memory((6, 4), dtypes.int32))]
    )
    x, out = b.parameters
    p = b.program(0, 6)
    row = b.load(x, (p, 0), (4,), (1,))

    def inner() -> list[Node]:
        return b.branch(
            b.less(p, 1), lambda: [b.apply("negative", row)], lambda: [b.apply("add", row, row)]
        )

    (y,) = b.branch(b.less(p, 3), inner, lambda: [row])
    b.branch(b.less(p, 5), lambda: b.store(out, y, (p, 0), (1,)) or ())
    both(b.finish((6,)), [np.arange(24, dtype=np.int32).reshape(6, 4), np.zeros((6, 4), np.int32)])


def test_shapes() -> None:
    """Transposes, reshapes and broadcasts of tiles up to rank 3."""
    cases = [
        ((4, 8), (1, 0)),
        ((3, 5), (1, 0)),
        ((2, 3, 4), (2, 0, 1)),
        ((2, 3, 4), (1, 2, 0)),
        ((1, 6), (1, 0)),
        ((6, 1), (1, 0)),
        ((5, 16), (1, 0)),
    ]
    kinds = (dtypes.float32, dtypes.int8, dtypes.bool_)
    for dtype, (shape, order) in itertools.product(kinds, cases):
        turned = tuple(shape[a] for a in order)
        size = int(np.prod(shape))
        b = BodyBuilder(
            "shapes",
            [
                ("x", Memory(shape, dtype)),
                ("t", Memory(turned, dtype)),
                ("flat", Memory((size,), dtype)),
                ("wide", Memory((2, *shape), dtype)),
            ],
        )
        source, t, flat, wide = b.parameters
        rank = tuple(range(len(shape)))
        x = b.load(source, (0,) * len(shape), shape, rank)
        b.store(t, b.add(ops.transpose(x, order=order)), (0,) * len(shape), rank)
        b.store(flat, b.add(ops.reshape(x, shape=(size,))), (0,), (0,))
        b.store(wide, b.broadcast(x, (2, *shape)), (0,) * (len(shape) + 1), (*rank, len(shape)))
        memories = [
            sample(dtype, size).reshape(shape),
            np.zeros(turned, dtype.numpy),
            np.zeros(size, dtype.numpy),
            np.zeros((2, *shape), dtype.numpy),
        ]
        both(b.finish((1,)), memories)


def test_stack_and_extract() -> None:
    """Rows stacked into a tile, rows and lanes taken out."""
    b = BodyBuilder(
        "stacked",
        [
            ("x", Memory((3, 8), dtypes.float32)),
            ("out", Memory((3, 8), dtypes.float32)),
            ("one", Memory((), dtypes.float32)),
            ("six", Memory((2, 6), dtypes.float32)),
        ],
    )
    x, out, one, six = b.parameters
    rows = [b.load(x, (i, 0), (8,), (1,)) for i in (2, 0, 1)]
    whole = b.add(ops.stack_rows(*rows))
    b.store(out, whole, (0, 0), (0, 1))
    row = b.add(ops.extract(whole, index=1))
    lanes = [b.add(ops.extract(row, index=i)) for i in (5, 1, 0, 7, 2, 2)]
    b.store(one, lanes[0], ())
    b.prefetch(x, 999, 0)
    b.prefetch(x, 999, 0, to="l2")
    b.store(six, b.add(ops.stack(*lanes)), (0, 0), (1, 0))
    b.store(six, b.add(ops.stack_rows(*lanes)), (1, 0), (1,))
    both(
        b.finish((1,)),
        [
            sample(dtypes.float32, 24).reshape(3, 8),
            np.zeros((3, 8), np.float32),
            np.zeros((), np.float32),
            np.zeros((2, 6), np.float32),
        ],
    )


@pytest.mark.parametrize(
    "dtype",
    [
        dtypes.float32,
        dtypes.float64,
        dtypes.int32,
        dtypes.int64,
        dtypes.uint8,
        dtypes.int8,
        dtypes.bool_,
    ],
    ids=str,
)
def test_sort(dtype: DType) -> None:
    """Stable, in both directions, nan on top, counts of every kind (the lowering widens narrow
    floats before it sorts them)."""
    for descending, count in itertools.product((False, True), (0, 1, 2, 7, 33, 100)):
        b = BodyBuilder(
            "sorted",
            [
                ("keys", Memory((100,), dtype)),
                ("places", Memory((100,), dtypes.int64)),
                ("more", Memory((100,), dtype)),
                ("other", Memory((100,), dtypes.int64)),
            ],
        )
        b.add(ops.sort_rows(*b.parameters, b.index(count), size=100, descending=descending))
        body = b.finish((1,))
        keys = np.random.default_rng(count).integers(0, 20, 100).astype(dtype.numpy)
        if dtype.is_float:
            keys[::9] = np.nan
            keys[1::9] = -0.0
        ours, theirs = ([keys.copy(), np.arange(100), keys.copy(), np.arange(100)] for _ in "ab")
        interpret.run(body, ours)
        run_native(body, theirs)
        for a, c in zip(ours[:2], theirs[:2]):
            close(c, a, 0)


def test_broadcast_kinds() -> None:
    """Scalars, rows and columns repeated."""
    b = BodyBuilder(
        "broadcasts",
        [
            ("row", Memory((8,), dtypes.float32)),
            ("column", Memory((4, 1), dtypes.float32)),
            ("out", Memory((4, 8), dtypes.float32)),
        ],
    )
    row = b.load(b.parameters[0], (0,), (8,), (0,))
    column = b.load(b.parameters[1], (0, 0), (4, 1), (0, 1))
    one = b.load(b.parameters[0], (3,))
    b.store(b.parameters[2], b.apply("multiply_add", column, row, one), (0, 0), (0, 1))
    both(
        b.finish((1,)),
        [
            sample(dtypes.float32, 8),
            sample(dtypes.float32, 4).reshape(4, 1),
            np.zeros((4, 8), np.float32),
        ],
    )


DOTS = [
    (dtypes.float32, dtypes.float32),
    (dtypes.float64, dtypes.float64),
    (dtypes.bfloat16, dtypes.float32),
    (dtypes.float16, dtypes.float32),
    (dtypes.int8, dtypes.int32),
    (dtypes.uint8, dtypes.int32),
    (dtypes.int64, dtypes.int64),
]


@pytest.mark.parametrize("source,target", DOTS, ids=str)
def test_dot(source: DType, target: DType) -> None:
    """Small products, also of one row, column or k."""
    sizes = (
        (4, 3, 16),
        (1, 5, 8),
        (3, 4, 1),
        (2, 1, 4),
        (1, 1, 1),
        (6, 8, 32),
        (3, 6, 24),
        (2, 7, 5),
    )
    for m, k, n in sizes:
        b = BodyBuilder(
            "product",
            [
                ("a", Memory((m, k), source)),
                ("b", Memory((k, n), source)),
                ("c", Memory((m, n), target)),
            ],
        )
        left, right, total = (b.load(p, (0, 0), p.type.shape, (0, 1)) for p in b.parameters)
        b.store(b.parameters[2], b.add(ops.dot(left, right, total)), (0, 0), (0, 1))
        rng = np.random.default_rng(0)
        a, c = (rng.integers(0, 7, s).astype(source.numpy) for s in ((m, k), (k, n)))
        both(b.finish((1,)), [a, c, rng.integers(-5, 5, (m, n)).astype(target.numpy)])


def test_allocated_scratch() -> None:
    """Private places: written by store and scatter, read back by load and gather."""
    b = BodyBuilder(
        "private", [("x", Memory((4, 8), dtypes.float32)), ("out", Memory((4, 8), dtypes.float32))]
    )
    p = b.program(0, 4)
    place, other = (b.allocate((2, 8), d, "l1") for d in (dtypes.float32, dtypes.int8))
    row = b.load(b.parameters[0], (p, 0), (8,), (1,))
    b.store(place, row, (1, 0), (1,))
    b.store(other, b.cast(row, dtypes.int8), (0, 0), (1,))
    lanes = b.add(ops.iota(size=8, dtype=dtypes.int64))
    back = b.gather(place, b.apply("subtract", b.constant(15, dtypes.int64), lanes))
    more = b.cast(b.load(other, (0, 0), (8,), (1,)), dtypes.float32)
    b.store(b.parameters[1], b.apply("add", back, more), (p, 0), (1,))
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    both(b.finish((4,)), [x, np.zeros_like(x)])


def test_symbolic_sizes_and_grid() -> None:
    """Shapes, strides and grids over Symbols; the last grid axis runs fastest."""
    n, m = symbol("n", 1, 100), symbol("m", 1, 100)
    b = BodyBuilder(
        "symbolic", [("x", Memory((n, m), dtypes.float32)), ("out", Memory((m, n), dtypes.float32))]
    )
    i, j = b.program(0, n), b.program(1, m)
    b.store(b.parameters[1], b.load(b.parameters[0], (i, j)), (j, i))
    x = np.arange(35, dtype=np.float32).reshape(5, 7)
    out = both(b.finish((n, m)), [x, np.zeros((7, 5), np.float32)], {"n": 5, "m": 7})[1]
    np.testing.assert_array_equal(out, x.T)


def test_index_arithmetic() -> None:
    """Quotients, remainders, minima and maxima of indices."""
    n = symbol("n", 1, 50)
    b = BodyBuilder("indices", [("out", Memory((50, 4), dtypes.int64))])
    i = b.program(0, n)
    for column, value in enumerate((i // 3, i % 7, b.index(i - 9), (i * 5 + 2) // 4)):
        node = value if isinstance(value, Node) else b.index(value)
        if column == 2:
            node = b.apply("floor_divide", node, b.constant(4, dtypes.int64))
        b.store(b.parameters[0], node, (i, column))
    both(b.finish((n,)), [np.zeros((50, 4), np.int64)], {"n": 37})


@pytest.mark.parametrize("target", [SSE2, AVX2, NEON], ids=lambda t: t.name)
def test_smaller_machines(target: Target) -> None:
    """The same text compiles and runs without the wide instructions."""
    if target.triple.split("-")[0] != HOST.triple.split("-")[0]:
        pytest.skip("code of another machine")

    def function(b: BodyBuilder, x: Node, y: Node) -> Node:
        return b.apply("tanh", b.apply("multiply_add", x, y, b.apply("exp", y)))

    body = elementwise_body(function, [dtypes.float32] * 2, dtypes.float32, 45, 8)
    memories = [sample(dtypes.float32, 45), sample(dtypes.float32, 45, 1), np.zeros(45, np.float32)]
    both(body, memories, ulps=8, target=target)


# ---- random programs ------------------------------------------------------------------------


def random_step(b: BodyBuilder, rng: np.random.Generator, pool: list[Node]) -> Node:
    """One more tile made of those in the pool."""
    x = pool[rng.integers(len(pool))]
    alike = [p for p in pool if p.shape == x.shape]
    y, kind = alike[rng.integers(len(alike))], int(rng.integers(8))
    axis, fold = int(rng.integers(len(x.shape))), str(rng.choice(["max", "min", "sum"]))
    if kind < 2:
        name = str(rng.choice(["add", "multiply", "maximum", "minimum", "subtract"]))
        return b.apply(name, x, y)
    if kind == 2:
        order = tuple(int(i) for i in rng.permutation(len(x.shape)))
        return b.add(ops.transpose(x, order=order))
    if kind == 3:
        size = int(np.prod(x.shape))
        rows = int(rng.choice([f for f in range(1, size + 1) if size % f == 0]))
        return b.add(ops.reshape(x, shape=(rows, size // rows)))
    if kind == 4:
        line = b.add(ops.reduce(x, axis=axis, kind=fold))
        kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        return b.apply("subtract", x, b.add(ops.reshape(line, shape=kept)))
    if kind == 5:
        return b.add(ops.cumulative(x, axis=axis, kind=fold))
    if kind == 6:
        upper, step, unroll = (int(rng.integers(*r)) for r in ((2, 7), (1, 3), (1, 4)))
        return looped(
            b,
            "i",
            0,
            upper,
            step,
            lambda i, c: [b.apply("add", c[0], b.cast(b.index(i), x.dtype))],
            [x],
            unroll,
        )[0]
    return b.apply("where", b.apply("less", x, y), y, b.apply("negative", x))


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Chains of shape ops, reductions, loops and arithmetic on odd shapes."""
    rng = np.random.default_rng(seed)
    dtype = (dtypes.float32, dtypes.float64, dtypes.int32, dtypes.int64)[seed % 4]
    shapes = [(4, 8), (3, 6), (2, 16), (5, 4), (8, 8), (1, 12), (6, 1), (2, 3, 4), (7,)]
    shape = shapes[rng.integers(len(shapes))]
    size, axes = int(np.prod(shape)), tuple(range(len(shape)))
    b = BodyBuilder(
        "random",
        [("x", Memory(shape, dtype)), ("y", Memory(shape, dtype)), ("out", Memory((size,), dtype))],
    )
    pool = [b.load(p, (0,) * len(shape), shape, axes) for p in b.parameters[:2]]
    for _ in range(rng.integers(3, 12)):
        pool.append(random_step(b, rng, pool))
    b.store(b.parameters[2], b.add(ops.reshape(pool[-1], shape=(size,))), (0,), (0,))
    x, y = (rng.integers(-4, 5, shape).astype(dtype.numpy) for _ in "xy")
    both(b.finish((1,)), [x, y, np.zeros(size, dtype.numpy)], ulps=4)


# ---- AMX ------------------------------------------------------------------------------------

AMX = [(unit, carried) for unit in HOST.matrix for carried in (False, True)]


@pytest.mark.parametrize("unit,carried", AMX, ids=lambda v: getattr(v, "name", str(v)))
def test_matrix_unit(unit: object, carried: bool) -> None:
    """2 x 2 accumulators, straight or carried through a loop; groups of k packed along rows."""
    m, n, k = unit.m, unit.n, unit.k
    group = 4 // unit.inputs[0].size
    steps = 3
    b = BodyBuilder(
        "tiles",
        [
            ("a", Memory((2 * m, steps * k), unit.inputs[0])),
            ("b", Memory((steps * k // group, 2 * n * group), unit.inputs[1])),
            ("c", Memory((2 * m, 2 * n), unit.accumulator)),
        ],
    )
    pa, pb, pc = b.parameters
    zeros = [
        b.add(ops.matrix_zero(shape=(m, n), dtype=unit.accumulator, unit=unit.name))
        for _ in range(4)
    ]

    def step(i: object, acc: list[Node]) -> list[Node]:
        left = [
            b.add(ops.matrix_load(pa, b.index(r * m), b.index(i * k), shape=(m, k), unit=unit.name))
            for r in range(2)
        ]
        right = [
            b.add(
                ops.matrix_load(
                    pb,
                    b.index(i * (k // group)),
                    b.index(c * n * group),
                    shape=(k // group, n * group),
                    unit=unit.name,
                )
            )
            for c in range(2)
        ]
        return [
            b.add(ops.matrix_dot(acc[r * 2 + c], left[r], right[c], unit=unit.name))
            for r in range(2)
            for c in range(2)
        ]

    acc = looped(b, "k", 0, steps, 1, step, zeros) if carried else step(0, zeros)
    for number, value in enumerate(acc):
        where = (b.index(number // 2 * m), b.index(number % 2 * n))
        b.add(ops.matrix_store(pc, value, *where, unit=unit.name))
    rng = np.random.default_rng(0)
    shapes = [p.type.shape for p in b.parameters]
    left, right = (rng.integers(0, 9, s).astype(d.numpy) for s, d in zip(shapes, unit.inputs))
    out = both(b.finish((1,)), [left, right, np.zeros(shapes[2], unit.accumulator.numpy)])[2]
    used = steps * k if carried else k
    plain = right.reshape(steps * k // group, 2 * n, group).transpose(0, 2, 1)
    plain = plain.reshape(steps * k, 2 * n)
    expected = left[:, :used].astype(np.float64) @ plain[:used].astype(np.float64)
    np.testing.assert_array_equal(out.astype(np.float64), expected)
