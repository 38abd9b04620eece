"""The tile language against NumPy: by the interpreter, compiled, and cut up for few registers.

Every kernel runs four ways through `check`: as traced in the Tile interpreter, compiled for this
machine, and legalized for machines with few and with many vector registers in the interpreter.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sampled

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.core.target import AVX512, AVX512_AMX, SSE2
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.legalize import legalize, limit_of
from tilegrad.tile.text import body_text, parse_body

RANDOM = np.random.default_rng(7)


def normal(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def judged(name, got, expected, tolerance):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, name
    np.testing.assert_allclose(
        got.astype(np.float64),
        expected.astype(np.float64),
        rtol=tolerance,
        atol=tolerance,
        err_msg=name,
    )


def check(function, *arrays, expected, tolerance=1e-5, compiled=True, **static):
    """Run a kernel every way we have and compare."""
    tensors = [tg.tensor(a) for a in arrays]
    wanted = expected if isinstance(expected, tuple) else (expected,)
    ways = {"interpreted": function.interpret(*tensors, **static)}
    if compiled:
        found = function(*tensors, **static)
        ways["compiled"] = (
            tuple(t.numpy() for t in found) if isinstance(found, tuple) else found.numpy()
        )
    for target in (SSE2, AVX512):
        ways[target.name] = legalized(function, arrays, target, static)
    for way, results in ways.items():
        several = results if isinstance(results, tuple) else (results,)
        for got, one in zip(several, wanted, strict=True):
            judged(way, got, one, tolerance)


def legalized(function, arrays, target, static):
    """The results of the Bodies after `legalize`, by the interpreter."""
    given, tensors = function._bind([tg.tensor(a) for a in arrays], static)
    callee = function._callee(given, tensors, function.plan)
    results = [np.zeros(t.shape, t.dtype.numpy) for t in callee.types("store")]
    for body, roles in callee.launches:
        again = parse_body(body_text(body))
        assert body_text(again) == body_text(body)
        new = legalize(again, target)
        verify_body(new, "portable", target)
        run(
            new,
            [
                np.ascontiguousarray(arrays[i]) if kind == "read" else results[i]
                for kind, i in roles
            ],
        )
    return tuple(results)


# ---- loads, stores, edges ---------------------------------------------------------------------


@kernel
def copy(x, *, block: int = 64):
    rows, columns = x.shape
    i, j = tile.grid(rows, tile.ceil_divide(columns, block))
    out = tile.result(x.shape, x.dtype)
    out[i, j * block : (j + 1) * block] = tile.load(x, (i, j * block), (block,))


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "float16", "bool"])
def test_copy(columns, dtype):
    x = (normal(3, columns) * 3).astype(dtype)
    check(copy, x, expected=x, compiled=columns == 65)


def test_bfloat16_is_copied():
    x = normal(2, 70).astype(ml_dtypes.bfloat16)
    check(copy, x, expected=x)


@kernel
def triton_add(x, y, *, block: int):
    """Offsets and masks, as a person coming from Triton writes it."""
    (size,) = x.shape
    (pid,) = (tile.grid(tile.ceil_divide(size, block)),)
    offsets = pid * block + tile.arange(0, block)
    mask = offsets < size
    out = tile.result((size,), x.dtype)
    total = tile.load(x, offsets, mask=mask) + tile.load(y, offsets, mask=mask)
    tile.store(out, offsets, total, mask=mask)


def test_offsets_and_masks():
    x, y = normal(100), normal(100)
    check(triton_add, x, y, expected=x + y, block=32)
    (body,) = triton_add.lower(tg.tensor(x), tg.tensor(y), block=32)
    names = {n.op.name for n in body.block.nodes}
    assert "load" in names and "gather" not in names  # following offsets need no gather


@kernel
def gather_rows(x, index):
    rows, columns = x.shape
    (count,) = index.shape
    i = tile.grid(count)
    row = tile.load(index, (i,))
    out = tile.result((count, columns), x.dtype)
    out[i, 0:columns] = x[row, 0:columns]
    assert rows == x.shape[0]


def test_a_loaded_index():
    x, index = normal(6, 40), np.array([5, 0, 3, 3], np.int32)
    check(gather_rows, x, index, expected=x[index])


@kernel
def paged(cache, table):
    """A page table: a loaded integer in index arithmetic."""
    pages, size = cache.shape
    (count,) = table.shape
    i = tile.grid(count)
    page = tile.index(tile.load(table, (i,)), 0, pages - 1)
    start = page % 2 * 4
    out = tile.result((count, 4), cache.dtype)
    tile.store(out, (i, 0), cache[page, start : start + 4] + 0.0)
    assert size == 8


def test_page_tables():
    cache, table = normal(5, 8), np.array([4, 1, 1, 0], np.int32)
    expected = np.stack([cache[p, p % 2 * 4 : p % 2 * 4 + 4] for p in table])
    check(paged, cache, table, expected=expected)


@kernel
def permute(x, places):
    (size,) = x.shape
    tile.grid(1)
    at = tile.load(places, (0,), (64,))
    out = tile.result((size,), x.dtype, fill=-1.0)
    value = tile.load(x, at, mask=at >= 0, other=5.0)
    tile.store(out, tile.arange(64) * 2, value, mask=tile.arange(64) < size // 2)


def test_gather_and_scatter():
    x, places = normal(128), RANDOM.integers(-3, 128, 64)
    expected = np.full(128, -1, np.float32)
    expected[0:128:2] = np.where(places >= 0, x[np.maximum(places, 0)], 5)
    check(permute, x, places, expected=expected)


@kernel
def other_value(x):
    tile.grid(1)
    out = tile.result((2, 16), x.dtype)
    part = tile.load(x, (0, 0), (2, 16), mask=tile.arange(16) % 2 == 0, other=-2.0)
    tile.store(out, (0, 0), part)


def test_other():
    x = normal(2, 16)
    check(other_value, x, expected=np.where(np.arange(16) % 2 == 0, x, -2))


@kernel
def axes_of(x):
    a, b, c = x.shape
    i = tile.grid(b)
    out = tile.result((b, c, a), x.dtype)
    tile.store(out, (i, 0, 0), tile.load(x, (0, i, 0), (c, a), axes=(2, 0)))


def test_axes_in_any_order():
    x = normal(4, 3, 8)
    check(axes_of, x, expected=x.transpose(1, 2, 0))


@kernel
def negative_start(x, *, shift: int):
    (size,) = x.shape
    i = tile.grid(tile.ceil_divide(size, 16))
    out = tile.result((size,), x.dtype)
    out[i * 16 : i * 16 + 16] = tile.fill(tile.load(x, (i * 16 - shift,), (16,)), 9.0)


def test_a_tile_before_the_start():
    x = normal(40)
    expected = np.concatenate([np.full(5, 9, np.float32), x[:-5]])
    check(negative_start, x, expected=expected, shift=5)


@kernel
def count_up(x, *, bins: int):
    (size,) = x.shape
    i = tile.grid(tile.ceil_divide(size, 32))
    counts = tile.result((bins,), tile.i32, fill=0)
    total = tile.result((), tile.f32, fill=1.0)
    values = tile.load(x, (i * 32,), (32,))
    tile.atomic_add(counts, values, 1, mask=values < bins - 1)
    tile.atomic_add(total, (), tile.sum(tile.cast(values, tile.f32)))


def test_atomics():
    x = RANDOM.integers(0, 10, 100).astype(np.int32)
    counts = np.bincount(x, minlength=10).astype(np.int32)
    counts[9:] = 0
    check(count_up, x, expected=(counts, np.float32(1 + x.sum())), bins=10)


@kernel
def through_shared(x):
    rows, columns = x.shape
    tile.grid(1)
    out = tile.result((columns, rows), x.dtype)
    place = tile.shared((16, 32), x.dtype)
    place[0:16, 0:32] = tile.load(x, (0, 0), (16, 32))
    tile.store(out, (0, 0), tile.transpose(tile.load(place, (0, 0), (16, 32))))


def test_shared_places():
    x = normal(16, 32)
    check(through_shared, x, expected=x.T)


@kernel
def rows_before(x):
    """Row 0 and the rows of x but the last: each turn adds what the turn before stored."""
    tile.grid(1)
    place = tile.shared((2, 16), x.dtype)
    tile.store(place, (0, 0), tile.load(x, (0, 0), (16,)))
    total = tile.load(place, (0, 0), (16,))
    for i in tile.range(4):
        if i > 0:
            total += tile.load(place, (1, 0), (16,))
        tile.store(place, (1, 0), tile.load(x, (i, 0), (16,)))
    tile.store(tile.result((16,), x.dtype), (0,), total)


def test_a_place_carried_from_turn_to_turn():
    x = normal(4, 16)
    check(rows_before, x, expected=x[0] + x[:3].sum(0))


# ---- elementwise ------------------------------------------------------------------------------

UNARY = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "expm1": np.expm1,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "sign": np.sign,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@kernel
def unary(x, *, name: str):
    (size,) = x.shape
    tile.grid(1)
    out = tile.result((size,), x.dtype)
    out[0:size] = getattr(tile, name)(x[0:size])


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("size", [16, 300])
def test_unary(name, size):
    x = np.abs(normal(size)) + 0.1
    check(unary, x, expected=UNARY[name](x), tolerance=1e-5, name=name, compiled=size == 300)


BINARY = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "//": np.floor_divide,
    "%": np.remainder,
    "**": np.power,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
SYMBOLS = [*BINARY, "&", "|", "^", "<<", ">>"]
OPERATORS = {name: eval(f"lambda a, b: a {name} b") for name in SYMBOLS}


@kernel
def binary(x, y, *, name: str):
    (size,) = x.shape
    tile.grid(1)
    value = OPERATORS[name](x[0:size], y[0:size])
    out = tile.result((size,), value.dtype)
    out[0:size] = value


@pytest.mark.parametrize("name", BINARY)
def test_operators(name):
    x, y = np.abs(normal(48)) + 0.5, normal(48) * 2
    x[:4] = y[:4] = 1.5
    check(binary, x, y, expected=BINARY[name](x, y), tolerance=1e-4, name=name)


@pytest.mark.parametrize("name", ["+", "*", "//", "%", "&", "|", "^", "<<", ">>", "<"])
def test_integer_operators(name):
    x, y = RANDOM.integers(-99, 99, 40).astype(np.int32), RANDOM.integers(1, 9, 40).astype(np.int32)
    check(binary, x, y, expected=OPERATORS[name](x, y), name=name)


@kernel
def mixed(x, n):
    (size,) = x.shape
    i = tile.grid(1)
    line = tile.arange(size)
    value = tile.where(line % 2 == 0, 1 - x[0:size], 2 / (x[0:size] + 3.0)) * (i + 2)
    value = -abs(value) + tile.maximum(value, 0.5) + tile.minimum(3, value)
    value = tile.multiply_add(value, 2.0, n) + ~(line < 4)
    out = tile.result((size,), value.dtype)
    out[0:size] = value


def test_numbers_take_the_dtype_of_their_partner():
    x, n = np.abs(normal(32)), np.float32(0.25)
    line = np.arange(32)
    v = np.where(line % 2 == 0, 1 - x, 2 / (x + 3)) * 2
    v = -abs(v) + np.maximum(v, 0.5) + np.minimum(3, v)
    check(mixed, x, n.reshape(()), expected=(v * 2 + n + ~(line < 4)).astype(np.float32))


@kernel
def powers(x):
    (size,) = x.shape
    tile.grid(1)
    out = tile.result((6, size), x.dtype)
    value = tile.load(x, (0,), (size,))
    for n in range(6):
        out[n, 0:size] = value**n


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_powers(dtype):
    x = (normal(20) * 3).astype(dtype)
    check(powers, x, expected=np.stack([x**n for n in range(6)]), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_round_once_an_op(dtype):
    x, y = normal(64).astype(dtype), normal(64).astype(dtype)
    wide = x.astype(np.float32) * y.astype(np.float32)
    check(binary, x, y, expected=wide.astype(dtype), tolerance=0, name="*")


@kernel
def converted(x, *, dtype):
    (size,) = x.shape
    tile.grid(1)
    out = tile.result((size,), dtype)
    out[0:size] = tile.cast(x[0:size], dtype)


@pytest.mark.parametrize("dtype", ["int32", "float16", "bool", "float64", "int8", "float8_e4m3"])
def test_cast(dtype):
    x = (normal(50) * 20).astype(np.float32)
    expected = tg.tensor(x).to(getattr(tg, "bool_" if dtype == "bool" else dtype)).numpy()
    check(converted, x, expected=expected, tolerance=0, dtype=dtype)


# ---- shape, reductions, scans -----------------------------------------------------------------


@kernel
def shapes(x):
    a, b = x.shape
    tile.grid(1)
    value = tile.load(x, (0, 0), (a, b))
    turned, flat = tile.transpose(value), tile.reshape(value, (a * b,))
    out, line = tile.result((b, a), x.dtype), tile.result((a * b,), x.dtype)
    repeated = tile.result((3, a, b), x.dtype)
    tile.store(out, (0, 0), turned)
    tile.store(line, (0,), flat + 1.0)
    tile.store(repeated, (0, 0, 0), tile.broadcast(value, (3, a, b)))


@pytest.mark.parametrize("shape", [(4, 8), (16, 16), (32, 48), (33, 20)])
def test_shapes(shape):
    x = normal(*shape)
    check(
        shapes, x, expected=(x.T, x.reshape(-1) + 1, np.stack([x] * 3)), compiled=shape != (33, 20)
    )


@kernel
def permuted(x):
    tile.grid(1)
    a, b, c = x.shape
    value = tile.load(x, (0, 0, 0), (a, b, c))
    first, second = tile.result((b, a, c), x.dtype), tile.result((c, a, b), x.dtype)
    tile.store(first, (0, 0, 0), tile.transpose(value, (1, 0, 2)))
    tile.store(second, (0, 0, 0), tile.transpose(value, (2, 0, 1)))


def test_permutations():
    x = normal(4, 8, 16)
    check(permuted, x, expected=(x.transpose(1, 0, 2), x.transpose(2, 0, 1)))


REDUCTIONS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
SCANS = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
}


@kernel
def reduced(x, *, name: str, axis, shape):
    tile.grid(1)
    value = tile.load(x, (0,) * x.ndim, shape)
    found = getattr(tile, name)(value, axis)
    out = tile.result(
        [s for i, s in enumerate(x.shape) if axis is not None and i != axis % x.ndim], x.dtype
    )
    tile.store(out, (0,) * out.ndim, found)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(REDUCTIONS)),
    axis=st.sampled_from([0, 1, -1, None]),
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    padded=st.booleans(),
)
def test_reductions(name, axis, rows, columns, padded):
    x = (normal(rows, columns) * 0.3 + 1).astype(np.float32)
    shape = (32, 64) if padded else (rows, columns)  # what lies beyond the array does not count
    check(
        reduced,
        x,
        expected=np.asarray(REDUCTIONS[name](x, axis)),
        tolerance=1e-4,
        compiled=False,
        name=name,
        axis=axis,
        shape=shape,
    )


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("size", [(7, 12), (24, 100)])
def test_reductions_compiled(name, axis, size):
    x = (normal(*size) * 0.2 + 1).astype(np.float32)
    found = reduced(tg.tensor(x), name=name, axis=axis, shape=(32, 128)).numpy()
    judged(name, found, REDUCTIONS[name](x, axis), 1e-4)


def test_reductions_of_other_dtypes():
    for dtype in (np.int32, np.float64, np.float16):
        x = (normal(5, 9) * 4).astype(dtype)
        for name in ("sum", "max", "min"):
            expected = REDUCTIONS[name](x, 1)
            if dtype is np.float16:
                expected = REDUCTIONS[name](x.astype(np.float32), 1).astype(dtype)
            check(
                reduced,
                x,
                expected=expected.astype(dtype),
                tolerance=2e-3,
                name=name,
                axis=1,
                shape=(8, 16),
                compiled=name == "sum",
            )


@kernel
def scanned(x, *, name: str, axis: int):
    tile.grid(1)
    a, b = x.shape
    out = tile.result(x.shape, x.dtype)
    tile.store(out, (0, 0), getattr(tile, name)(tile.load(x, (0, 0), (32, 32)), axis))
    assert a * b


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("axis", [0, 1])
def test_scans(name, axis):
    x = (normal(20, 25) * 0.2 + 1).astype(np.float32)
    check(scanned, x, expected=SCANS[name](x, axis), tolerance=1e-4, name=name, axis=axis)


@kernel
def product(a, b, *, shape):
    m, n, k = shape
    tile.grid(1)
    out = tile.result((a.shape[0], b.shape[1]), tile.f32)
    left, right = tile.load(a, (0, 0), (m, k)), tile.load(b, (0, 0), (k, n))
    tile.store(out, (0, 0), tile.dot(left, right, 1.0))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(m=st.integers(1, 20), n=st.integers(1, 20), k=st.integers(1, 20), padded=st.booleans())
def test_dot(m, n, k, padded):
    a, b = normal(m, k), normal(k, n)
    shape = (32, 32, 32) if padded else (m, n, k)
    check(product, a, b, expected=a @ b + 1, tolerance=1e-4, compiled=False, shape=shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 48, 32), (7, 64, 5), (1, 96, 64)])
def test_dot_compiled(dtype, shape):
    m, n, k = shape
    a, b = normal(m, k).astype(dtype), normal(k, n).astype(dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64) + 1
    judged("dot", product(tg.tensor(a), tg.tensor(b), shape=shape).numpy(), exact, 2e-5)


@kernel
def two_products(a, b, c, *, turned: bool):
    (m, k), n = a.shape, c.shape[1]
    tile.grid(1)
    left, start = tile.load(a, (0, 0), (m, k)), tile.load(c, (0, 0), (m, n))
    right = tile.load(b, (0, 0), b.shape)
    if turned:
        right = tile.transpose(right)
    out, plain = tile.result((m, n), c.dtype), tile.result((m, n), c.dtype)
    tile.store(out, (0, 0), tile.dot(left, right, start * 2))
    tile.store(plain, (0, 0), tile.dot(left, right, dtype=c.dtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize(
    ("shape", "turned"),
    sampled(
        itertools.product([(16, 16, 64), (32, 48, 128), (64, 32, 64)], [False, True]),
        lambda case: case in (((16, 16, 64), True), ((32, 48, 128), False)),
    ),
)
def test_dots_on_a_matrix_unit(dtype, shape, turned):
    m, n, k = shape
    sums = np.float32 if dtype is ml_dtypes.bfloat16 else np.int32
    a, b = (normal(m, k) * 9).astype(dtype), (normal(k, n) * 9).astype(dtype)
    c = (normal(m, n) * 5).astype(sums)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    given = [a, np.ascontiguousarray(b.T) if turned else b, c]
    wanted = ((exact + 2 * c).astype(sums), exact.astype(sums))
    check(two_products, *given, expected=wanted, tolerance=1e-3, turned=turned)
    for got, one in zip(legalized(two_products, given, AVX512_AMX, {"turned": turned}), wanted):
        judged("amx", got, one, 1e-3)
    (body,) = two_products.lower(*[tg.tensor(x) for x in given], turned=turned)
    text = body_text(legalize(body, AVX512_AMX))
    assert "matrix_dot" in text and " dot(" not in text


# ---- control ----------------------------------------------------------------------------------


@kernel
def loops(x, *, block: int):
    rows, columns = x.shape
    i = tile.grid(rows)
    total, count, least = 0.0, 0, tile.full((), tile.INF)
    squares = tile.zeros((block,))
    for j in tile.range(0, columns, block):
        part = tile.load(x, (i, j), (block,))
        for power in (1, 2):  # plain Python: unrolled
            total = total + tile.sum(part**power)
        squares += tile.fill(part, 0) * part
        least = tile.minimum(least, tile.min(part))
        count += 1
    out = tile.result((rows, 4))
    tile.store(out, (i, 0), total)
    tile.store(out, (i, 1), count)
    tile.store(out, (i, 2), least)
    tile.store(out, (i, 3), tile.sum(squares))


@pytest.mark.parametrize("columns", [8, 10, 33])
def test_loops_carry_what_they_change(columns):
    x = normal(3, columns)
    expected = np.stack(
        [(x + x * x).sum(1), np.full(3, -(-columns // 8)), x.min(1), (x * x).sum(1)], 1
    )
    if columns % 8:
        with pytest.raises(tg.ShapeError, match="'squares' carries a partial tile"):
            loops.interpret(tg.tensor(x), block=8)
    else:
        check(loops, x, expected=expected.astype(np.float32), tolerance=1e-4, block=8)


@kernel
def branches(x, *, add: bool):
    (size,) = x.shape
    i = tile.grid(size)
    value = tile.load(x, (i,))
    sign = 1
    if value < 0:
        value = -value
        sign = -1
    elif i == 2:
        value = value * 100
    else:
        sign = 2
    if add:
        value = value + 0.5
    out = tile.result((size, 2))
    tile.store(out, (i, 0), value)
    tile.store(out, (i, 1), sign)


@pytest.mark.parametrize("add", [False, True])
def test_branches(add):
    x = np.array([1, -2, 3, -4, 5], np.float32)
    value = np.abs(x) * np.where((np.arange(5) == 2), 100, 1) + add * 0.5
    sign = np.where(x < 0, -1, np.where(np.arange(5) == 2, 1, 2))
    check(branches, x, expected=np.stack([value, sign], 1).astype(np.float32), add=add)


@kernel
def large_branch(x, flag):
    rows, columns = x.shape
    tile.grid(1)
    value = tile.load(x, (0, 0), (rows, columns))
    if tile.load(flag, ()) > 0:
        value = value + 1.0
    else:
        for _ in tile.range(3):
            value = value * 2.0
    out = tile.result(x.shape, x.dtype)
    tile.store(out, (0, 0), value)


@pytest.mark.parametrize("flag", [0, 1])
def test_large_tiles_in_branches_and_loops(flag):
    x = normal(32, 64)
    check(large_branch, x, np.array(flag, np.int32), expected=x + 1 if flag else x * 8)


@kernel
def swapping(x, *, trips: int):
    tile.grid(1)
    rows, columns = x.shape
    a = tile.load(x, (0, 0), (rows, columns))
    b = a * 2.0
    for i in tile.range(trips):
        a, b = b, a + i * 1.0
    out = tile.result((2, rows, columns))
    tile.store(out, (0, 0, 0), tile.reshape(a, (1, rows, columns)))
    tile.store(out, (1, 0, 0), tile.reshape(b, (1, rows, columns)))


def test_carried_tiles_change_places():
    x = normal(16, 32)
    a, b = x, x * 2
    for i in range(5):
        a, b = b, a + i
    check(swapping, x, expected=np.stack([a, b]), trips=5)


@tile.function
def power(x, n):
    """A helper with a loop of its own."""
    result = x * 0.0 + 1.0
    for _ in tile.range(n):
        result = result * x
    return result


@kernel
def with_helper(x, n):
    (size,) = x.shape
    tile.grid(1)
    out = tile.result((size,))
    out[0:size] = power(tile.load(x, (0,), (size,)), tile.load(n, (0,)))


def test_functions_of_tiles_and_loaded_bounds():
    x = normal(16)
    check(with_helper, x, np.array([3], np.int32), expected=x**3)


def make_scaled(factor):
    @kernel
    def scaled(x):
        def times(value):
            for _ in range(2):
                value = value * factor
            return value

        (size,) = x.shape
        tile.grid(1)
        out = tile.result((size,))
        out[0:size] = times(tile.load(x, (0,), (size,)))

    return scaled


def test_closures_and_static_values_are_told_apart():
    factor = 2.0

    @kernel
    def times(x, *, more=1):
        (size,) = x.shape
        value = tile.full((size,), 7, tile.i32) * more * factor
        tile.store(tile.result((size,), value.dtype), (0,), value)

    x = normal(4)
    assert times(tg.tensor(x)).dtype is tg.float32
    factor = 3
    assert times(tg.tensor(x)).tolist() == [21] * 4
    assert times(tg.tensor(x)).dtype is tg.int32
    assert times(tg.tensor(x), more=1.0).dtype is tg.float32


def test_closures():
    x = normal(16)
    check(make_scaled(3.0), x, expected=x * 9)
    check(make_scaled(0.5), x, expected=x / 4)


# ---- whole kernels ----------------------------------------------------------------------------


@kernel
def online_softmax(x):
    rows, columns = x.shape
    T = tile.context()
    first = tile.grid(tile.ceil_divide(rows, T.m)) * T.m
    out = tile.result(x.shape, x.dtype)
    m, total = tile.full((T.m,), -tile.INF), tile.zeros((T.m,))
    for j in tile.range(0, columns, T.n):
        _, m_now, sum_now = tile.softmax_online(tile.load(x, (first, j), (T.m, T.n)))
        new = tile.maximum(m, m_now)
        total = total * tile.exp(m - new) + sum_now * tile.exp(m_now - new)
        m = new
    for j in tile.range(0, columns, T.n):
        part = tile.load(x, (first, j), (T.m, T.n))
        tile.store(out, (first, j), tile.exp(part - m[:, None]) / total[:, None])


@pytest.mark.parametrize("shape", [(5, 7), (40, 200), (32, 64)])
def test_softmax(shape):
    x = normal(*shape) * 4
    e = np.exp(x - x.max(1, keepdims=True))
    check(online_softmax, x, expected=e / e.sum(1, keepdims=True))


def test_programs_are_numbered():
    @kernel
    def numbers():
        tile.grid(3, 4)
        out = tile.result((3, 4, 2), tile.i32)
        i, j = tile.program_id(0), tile.program_id(1)
        tile.store(out, (i, j, 0), i * tile.num_programs(1) + j)
        tile.store(out, (i, j, 1), tile.maximum(i, j) - tile.minimum(i, 1) + (i * 7 + 3) // 2 % 5)

    i, j = np.meshgrid(range(3), range(4), indexing="ij")
    expected = np.stack([i * 4 + j, np.maximum(i, j) - np.minimum(i, 1) + (i * 7 + 3) // 2 % 5], -1)
    check(numbers, expected=expected.astype(np.int32))


def test_the_largest_tile_in_registers():
    assert limit_of(AVX512) == 128 and limit_of(SSE2) == 16
