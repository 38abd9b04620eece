"""Hand-built Bodies as PTX on the simulator, against the Tile interpreter, and assembled."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from looped import looped
from placed_builder import PlacedBuilder
from simulated import assembled, check_body, launch  # noqa: F401

from tilegrad import kernel, tile
from tilegrad.core import dtype as dtypes
from tilegrad.core.dtype import BY_NUMPY, bool_, float32, int32, int64
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.ir.symbol import combine, multiply, symbol
from tilegrad.ir.types import Memory
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import ops, placed
from tilegrad.tile.build import Body, BodyBuilder

pytestmark = pytest.mark.usefixtures("assembled")
ALL = ("round", "far", "random")


def floats(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 2).astype(dtype)


def whole(*shape: int, low: int = -5, high: int = 6, seed: int = 0, dtype=np.int32) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def memory(array: np.ndarray, use: str = "value") -> Memory:
    return Memory(array.shape, BY_NUMPY[array.dtype], "global", use)


def builder(*arrays: np.ndarray, results: int = 1) -> BodyBuilder:
    """A builder whose last parameters are results."""
    first = len(arrays) - results
    return BodyBuilder(
        "body",
        [(f"m{i}", memory(a, "value" if i < first else "state")) for i, a in enumerate(arrays)],
    )


def whole_tile(b: BodyBuilder, number: int):
    """All of a parameter as a tile."""
    m = b.parameters[number]
    shape = m.type.shape
    return b.load(m, (0,) * len(shape), shape, tuple(range(len(shape))))


def put(b: BodyBuilder, number: int, value) -> None:
    """All of a parameter written."""
    m = b.parameters[number]
    rank = len(m.type.shape)
    b.store(m, value, (0,) * rank, tuple(range(rank)))


# ---- shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("shape", [(8,), (1024,), (4, 32), (32, 4), (2, 4, 8), (1, 1)], ids=str)
def test_copies_transposes_and_reshapes(shape: tuple[int, ...], warps: int) -> None:
    x = floats(*shape)
    order = tuple(reversed(range(len(shape))))
    turned, flat = np.zeros(shape[::-1], np.float32), np.zeros(x.size, np.float32)
    b = builder(x, turned, flat, results=2)
    tile = whole_tile(b, 0)
    put(b, 1, b.add(ops.transpose(tile, order=order)))
    put(b, 2, b.add(ops.reshape(b.add(ops.transpose(tile, order=order)), shape=(x.size,))))
    check_body(b.finish((1,), warps=warps), x, turned, flat)


@pytest.mark.parametrize("shape", [(3,), (6,), (5, 96), (24, 5), (12, 7), (3, 1)], ids=str)
def test_sizes_that_are_no_powers_of_two(shape: tuple[int, ...]) -> None:
    x = whole(*shape, low=-99, high=99)
    results = [np.zeros_like(x), np.zeros(shape[1:] or (1,), np.int32), np.zeros_like(x)]
    b = builder(x, *results, results=3)
    tile = whole_tile(b, 0)
    put(b, 1, b.apply("multiply", tile, tile))
    total = b.add(ops.reduce(tile, axis=0, kind="sum"))
    put(b, 2, total if total.shape else b.broadcast(total, (1,)))
    put(b, 3, b.add(ops.cumulative(tile, axis=0, kind="sum")))
    check_body(b.finish((1,), warps=2), x, *results)


def test_a_tile_too_large_for_registers_is_refused() -> None:
    x = np.zeros((64, 1 << 12), np.float32)
    b = builder(x, x)
    put(b, 1, whole_tile(b, 0))
    with pytest.raises(InternalError, match="registers of each thread"):
        launch(b.finish((1,), warps=1), [x, x], {})


def test_parts_and_stacks() -> None:
    x = floats(16, 64)
    row, part, rows, column = (np.zeros(s, np.float32) for s in ((64,), (4, 16), (3, 64), (5, 1)))
    b = builder(x, row, part, rows, column, results=4)
    tile = whole_tile(b, 0)
    picked = [b.add(ops.extract(tile, index=i)) for i in (0, 7, 15)]
    put(b, 1, picked[1])
    put(b, 2, b.add(ops.part(tile, start=(8, 16), shape=(4, 16))))
    put(b, 3, b.add(ops.stack_rows(*picked)))
    scalars = [b.add(ops.extract(picked[2], index=i)) for i in (0, 63, 1, 30, 31)]
    put(b, 4, b.add(ops.stack(*scalars)))
    check_body(b.finish((1,), warps=4), x, row, part, rows, column, policies=ALL)


# ---- reductions and scans -------------------------------------------------------------------

KINDS = ("sum", "prod", "max", "min")
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float64, np.int8, np.int32, np.int64, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(8, 128), (128, 8)], ids=str)
def test_reductions(shape: tuple[int, int], dtype) -> None:
    x = whole(*shape, low=-1, high=2).astype(dtype)
    results = [np.zeros(shape[1 - axis], dtype) for axis in (0, 1) for _ in KINDS]
    b = builder(x, *results, results=len(results))
    tile = whole_tile(b, 0)
    for number, result in enumerate([(axis, kind) for axis in (0, 1) for kind in KINDS]):
        axis, kind = result
        put(b, number + 1, b.add(ops.reduce(tile, axis=axis, kind=kind)))
    check_body(b.finish((1,), warps=4 if dtype != np.int32 else 6), x, *results)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("warps", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_running_sums(kind: str, warps: int) -> None:
    x, y, z = whole(8, 256, low=-2, high=3), whole(64, 32, low=-2, high=3), np.tanh(floats(2048))
    outs = [np.zeros_like(a) for a in (x, y, z)]
    b = builder(x, y, z, *outs, results=3)
    for number, axis in enumerate((1, 0, 0)):
        put(b, number + 3, b.add(ops.cumulative(whole_tile(b, number), axis=axis, kind=kind)))
    check_body(b.finish((1,), warps=warps), x, y, z, *outs, rounding=1e-6, policies=ALL)


def test_narrow_and_wide_integers_meet() -> None:
    """int64 is held in 32 bits where its bounds fit, and in 64 where they do not."""
    x, out = whole(64, low=-9, high=9, dtype=np.int64), np.zeros(2, np.int64)
    b = builder(x, out)
    count = b.cast(b.add(ops.iota(size=64, dtype=int32)), int64)
    wide = b.apply("multiply", b.apply("add", count, b.constant(1 << 40, int64)), whole_tile(b, 0))
    total = b.add(ops.reduce(wide, axis=0, kind="sum"))
    most = b.add(ops.reduce(count, axis=0, kind="max"))
    last = looped(
        b,
        "i",
        0,
        b.atom("most", most, 0, 63),
        1,
        lambda i, c: [b.apply("add", c[0], b.index(i))],
        [total],
    )[0]
    b.store(b.parameters[1], last, (0,))
    b.store(b.parameters[1], most, (1,))
    check_body(b.finish((1,), warps=2), x, out)


# ---- dots -----------------------------------------------------------------------------------

SHAPES = [
    (16, 8, 16),
    (16, 16, 32),
    (64, 64, 32),
    (128, 32, 16),
    (32, 128, 64),
    (8, 4, 8),
    (64, 64, 2),
]


NAMES = ("bfloat16", "float16", "float32", "float64", "int32", "int8")
DOTS = [
    (name, shape)
    for name in NAMES
    for shape in SHAPES
    if ("float" in name and name != "float64") or np.prod(shape) <= 1 << 15
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name,shape", DOTS, ids=str)
def test_dot(name: str, shape: tuple[int, int, int], turned: bool) -> None:
    m, n, k = shape
    dtype = dtypes.dtype_of(name)
    total = {"int8": int32, "bfloat16": float32, "float16": float32}.get(name, dtype)
    a = (
        whole(k, m, low=-3, high=4).astype(dtype.numpy)
        if turned
        else (whole(m, k, low=-3, high=4).astype(dtype.numpy))
    )
    b_ = (
        whole(n, k, low=-3, high=4, seed=1).astype(dtype.numpy)
        if turned
        else (whole(k, n, low=-3, high=4, seed=1).astype(dtype.numpy))
    )
    c = whole(m, n, seed=2).astype(total.numpy)
    b = builder(a, b_, c)
    left, right = whole_tile(b, 0), whole_tile(b, 1)
    if turned:
        left, right = (b.add(ops.transpose(x, order=(1, 0))) for x in (left, right))
    put(b, 2, b.add(ops.dot(left, right, whole_tile(b, 2))))
    check_body(b.finish((1,), warps=4), a, b_, c)


def test_dot_of_floats_is_not_cut() -> None:
    """float32 products keep all bits: tf32 would be off by a thousandth."""
    a, b_, c = floats(16, 64), floats(64, 16, seed=1), np.zeros((16, 16), np.float32)
    b = builder(a, b_, c)
    put(b, 2, b.add(ops.dot(whole_tile(b, 0), whole_tile(b, 1), whole_tile(b, 2))))
    (_, _, got) = check_body(b.finish((1,), warps=4), a, b_, c, rounding=1e-6)
    exact = a.astype(np.float64) @ b_.astype(np.float64)
    assert np.abs(got - exact).max() < 1e-4


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=str)
def test_dot_in_a_loop(dtype, unroll: int) -> None:
    a, b_ = whole(32, 80).astype(dtype), whole(80, 32, seed=1).astype(dtype)
    c = np.zeros((32, 32), np.float32)
    b = builder(a, b_, c)

    def step(at, carried):
        left = b.load(b.parameters[0], (0, at), (32, 16), (0, 1))
        right = b.load(b.parameters[1], (at, 0), (16, 32), (0, 1))
        return [b.add(ops.dot(left, right, carried[0]))]

    put(b, 2, looped(b, "k", 0, 80, 16, step, [b.constant(0, float32, (32, 32))], unroll)[0])
    check_body(b.finish((1,), warps=4 if unroll == 1 else 3), a, b_, c, policies=ALL)


# ---- masks and strides ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_, np.float64],
    ids=lambda d: np.dtype(d).name,
)
@pytest.mark.parametrize("size", [1, 5, 16, 64, 100, 127, 128])
def test_masked_tails(size: int, dtype) -> None:
    x = whole(size, low=0, high=2, seed=size).astype(dtype)
    for length in (size, symbol("n", 0, 128)):
        memory_type = Memory((length,), BY_NUMPY[x.dtype])
        b = BodyBuilder(
            "tail",
            [("x", memory_type), ("y", Memory((length,), BY_NUMPY[x.dtype], "global", "result"))],
        )
        numbers = b.add(ops.iota(size=128, dtype=int64))
        mask = b.apply("less", numbers, b.index(length))
        tile = b.load(b.parameters[0], (0,), (128,), (0,), mask)
        b.store(b.parameters[1], tile, (0,), (0,), mask)
        check_body(b.finish((1,), warps=1), x, np.zeros_like(x), symbols={"n": size})


def test_masks_of_two_axes_and_scalars() -> None:
    x, y = floats(7, 30), np.zeros((7, 30), np.float32)
    b = builder(x, y)
    rows, lanes = (b.add(ops.iota(size=n, dtype=int64)) for n in (8, 32))
    column = b.add(ops.reshape(b.apply("less", rows, b.constant(7, int64)), shape=(8, 1)))
    mask = b.apply("bit_and", column, b.apply("less", lanes, b.constant(30, int64)))
    tile = b.load(b.parameters[0], (0, 0), (8, 32), (0, 1), mask)
    b.store(b.parameters[1], tile, (0, 0), (0, 1), mask)
    one = b.load(b.parameters[0], (6, 29), mask=b.constant(True, bool_))
    none = b.load(b.parameters[0], (8, 99), mask=b.constant(False, bool_))
    b.store(b.parameters[1], b.apply("add", one, none), (0, 0), mask=b.constant(True, bool_))
    check_body(b.finish((1,), warps=2), x, y)


def test_strides_that_symbols_give() -> None:
    n = symbol("n", 1, 64)
    for wide in (n, multiply(n, 8)):
        b = BodyBuilder(
            "views",
            [
                ("x", Memory((16, 16), float32, "global", "value", (wide, 1))),
                ("y", Memory((16, 16), float32, "global", "value", (1, wide))),
                ("z", Memory((16, 16), float32, "global", "result", (wide, 1))),
            ],
        )
        x, y = (b.load(m, (0, 0), (16, 16), (0, 1)) for m in b.parameters[:2])
        b.store(b.parameters[2], b.apply("add", x, y), (0, 0), (0, 1))
        body = b.finish((1,), warps=2)
        step = 17 if wide is n else 24
        arrays = [floats(16 * step), floats(16 * step, seed=1), np.zeros(16 * step, np.float32)]
        check_body(body, *arrays, symbols={"n": 17 if wide is n else 3})


def test_offsets_beyond_32_bits_are_reached() -> None:
    """Strides so long that a 32-bit offset would wrap: seen in the text, memory is not that big."""
    b = BodyBuilder(
        "far",
        [
            ("x", Memory((64, 1 << 26), float32)),
            ("y", Memory((64, 64), float32, "global", "result")),
        ],
    )
    put(b, 1, b.load(b.parameters[0], (0, 64), (64, 64), (0, 1)))
    text, _ = emit(b.finish((1,), warps=4), "far", H200)
    assert "mad.wide.s32" in text
    assert not any(len(word) > 9 for word in text.replace("]", "+").split("+") if word.isdigit())


def test_indices_a_constant_apart_share_an_address() -> None:
    """Near ones by the offset of the instruction, one far away by a sum of its own."""
    size, far = 128, 1 << 19  # elements: 2 MiB apart
    x, y = floats(far + 8 * size), np.zeros(8 * size, np.float32)
    b = builder(x, y)

    def step(i, carried):
        at = multiply(i, size)
        places = [combine(at, k, 1) for k in (0, size, 5, far + 2 * size)]
        total = None
        for place in places:
            part = b.load(b.parameters[0], (place,), (size,), (0,))
            total = part if total is None else b.apply("add", total, part)
        b.store(b.parameters[1], total, (at,), (0,))
        return []

    looped(b, "i", 0, 6, 1, step)
    body = b.finish((1,), warps=1)
    check_body(body, x, y)
    text = emit(body, "entry", H200)[0]
    assert text.count("mad.wide.s32") == 3  # near, far, and what is written


# ---- elements -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.int32, ml_dtypes.bfloat16, np.int8, np.float64],
    ids=lambda d: np.dtype(d).name,
)
def test_scatter_takes_equal_offsets_in_order(dtype) -> None:
    state, value = floats(16, dtype=dtype), floats(128, seed=1, dtype=dtype)
    offset, mask = whole(128, low=0, high=16, dtype=np.int64), whole(128, low=0, high=4) > 0
    b = builder(value, offset, mask, state)
    value_, offset_, mask_ = (whole_tile(b, i) for i in range(3))
    b.scatter(b.parameters[3], value_, offset_, mask_)
    check_body(b.finish((1,), warps=2), value, offset, mask, state, policies=ALL)


def test_scatter_at_counted_places_needs_no_order() -> None:
    from tilegrad.core.target import H200
    from tilegrad.targets.ptx.emit import emit

    state, value = floats(256), floats(64, seed=1)
    b = builder(value, state)
    count = b.add(ops.iota(size=64, dtype=int64))
    places = b.apply("add", b.apply("multiply", count, b.constant(3, int64)), b.constant(5, int64))
    b.scatter(b.parameters[1], whole_tile(b, 0), places)
    body = b.finish((1,), warps=2)
    assert "bar.sync" not in emit(body, "entry", H200)[0]
    check_body(body, value, state)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int32, np.int64, np.float64], ids=lambda d: np.dtype(d).name
)
def test_atomic_additions(dtype) -> None:
    total, value = np.zeros(4, dtype), whole(64).astype(dtype)
    offset = whole(64, low=0, high=4, seed=1, dtype=np.int64)
    seen = np.zeros(1, dtype)
    b = builder(value, offset, total, seen, results=2)
    b.add(placed.atomic_add(b.parameters[2], whole_tile(b, 0), whole_tile(b, 1)))
    before = b.add(
        placed.atomic_add(
            b.parameters[3], b.constant(3, BY_NUMPY[np.dtype(dtype)]), b.constant(0, int64)
        )
    )
    b.store(b.parameters[3], b.apply("add", before, before), (0,))
    check_body(b.finish((1,), warps=3), value, offset, total, seen)


def test_gather_in_shared_memory_and_prefetch() -> None:
    x, offset, y = floats(64), whole(64, low=0, high=64, dtype=np.int64), np.zeros(64, np.float32)
    b = builder(x, offset, y)
    b.prefetch(b.parameters[0], 32)
    b.prefetch(b.parameters[0], 4096)
    place = b.allocate((64,), float32, "shared")
    b.store(place, whole_tile(b, 0), (0,), (0,))
    put(b, 2, b.gather(place, whole_tile(b, 1)))
    check_body(b.finish((1,), warps=2), x, offset, y, policies=ALL)


# ---- control and shared memory --------------------------------------------------------------


@pytest.mark.parametrize("unroll", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_loops_swap_what_they_carry(count: int, unroll: int) -> None:
    x, y, z = floats(32), floats(32, seed=1), np.zeros((2, 32), np.float32)
    n = symbol("n", 0, 16)
    b = builder(x, y, z)

    def step(i, carried):
        scale = b.cast(b.index(i), float32)
        return [carried[1], b.apply("add", b.apply("multiply", carried[0], scale), carried[1])]

    found = looped(b, "i", 0, n, 1, step, [whole_tile(b, 0), whole_tile(b, 1)], unroll)
    put(b, 2, b.add(ops.stack_rows(*found)))
    check_body(b.finish((1,), warps=1), x, y, z, symbols={"n": count})


def test_branches_give_results() -> None:
    x, y = floats(64), np.zeros((4, 64), np.float32)
    b = builder(x, y)
    p = b.program(0, 4)
    tile = whole_tile(b, 0)

    def then():
        total = b.add(ops.reduce(tile, axis=0, kind="sum"))
        return [b.apply("multiply", tile, total), total]

    def otherwise():
        return [b.constant(1.5, float32, (64,)), b.constant(2.0, float32)]

    found = b.branch(b.less(p, 2), then, otherwise)
    total = b.add(ops.reduce(b.apply("add", *found), axis=0, kind="max"))
    b.store(b.parameters[1], b.broadcast(total, (64,)), (p, 0), (1,))
    check_body(b.finish((4,), warps=2), x, y, rounding=1e-6, policies=ALL)


def test_shared_places_are_met_in_order() -> None:
    """Written and read by other threads in turns of nested loops and one arm of a branch."""
    x, y = whole(128), np.zeros(128, np.int32)
    b = builder(x, y)
    place, other = (b.allocate((128,), int32, "shared") for _ in range(2))
    flipped = b.apply("subtract", b.constant(127, int64), b.add(ops.iota(size=128, dtype=int64)))

    def inner(j, carried):
        b.store(place, carried[0], (0,), (0,))
        turned = b.gather(place, flipped)

        def once():
            b.store(other, turned, (0,), (0,))
            return [b.gather(other, flipped)]

        odd = b.apply(
            "equal", b.apply("remainder", b.index(j), b.constant(2, int64)), b.constant(1, int64)
        )
        branched = b.branch(odd, once, lambda: [turned])[0]
        return [b.apply("add", branched, b.add(ops.reduce(turned, axis=0, kind="max")))]

    def outer(i, carried):
        return looped(b, "j", 0, combine(i, 2, 1), 1, inner, carried)

    put(b, 1, looped(b, "i", 0, 3, 1, outer, [whole_tile(b, 0)])[0])
    check_body(b.finish((1,), warps=4), x, y, policies=ALL)


@kernel
def halved_until_small(x, *, turns: int):
    """What is left of a row's sum after some turns, and its last elements' sum."""
    tile.grid(1)
    out = tile.result((2,))
    busy, left = tile.full((), 1, int32), tile.zeros((64,), float32) + x[0:64]
    for _ in tile.range(0, turns):
        if busy > 0:
            busy = tile.cast(tile.sum(left) > 40.0, int32)
            left = left * 0.5
    tile.store(out, (0,), tile.sum(left))
    tile.store(out, (1,), tile.max(x[64:128] * 2.0))


def test_scratch_that_only_some_turns_use() -> None:
    """A turn without an exchange leaves what an earlier one read for slow warps to read."""
    x = np.arange(128, dtype=np.float32) / 16
    for turns in range(1, 8):
        (body,) = halved_until_small.warps(2).lower(x, turns=turns)
        check_body(body, x, np.zeros(2, np.float32), rounding=1e-6)


def test_global_memory_that_is_written_and_read_again() -> None:
    x = whole(128)
    b = BodyBuilder("again", [("x", memory(x, "state"))])
    flipped = b.apply("subtract", b.constant(127, int64), b.add(ops.iota(size=128, dtype=int64)))

    def turn(_, carried):
        tile = b.gather(b.parameters[0], flipped)
        put(b, 0, b.apply("add", tile, b.constant(1, int32)))
        return []

    looped(b, "i", 0, 3, 1, turn)
    check_body(b.finish((1,), warps=4), x, policies=ALL)


# ---- products of products -------------------------------------------------------------------


@pytest.mark.parametrize("warps", [1, 4])
def test_a_product_of_what_a_warp_holds_needs_no_shared_memory_for_it(warps: int) -> None:
    """Rows that are reduced stay within a warp, and go into the next product from registers."""
    from tilegrad.core.target import H200
    from tilegrad.targets.ptx.emit import emit

    bf16 = ml_dtypes.bfloat16
    a, b_, v = (whole(64, 32, seed=s).astype(bf16) for s in range(3))
    out = np.zeros((64, 32), np.float32)
    b = builder(a, b_, v, out)
    turned = b.add(ops.transpose(whole_tile(b, 1), order=(1, 0)))
    scores = b.add(ops.dot(whole_tile(b, 0), turned, b.constant(0, float32, (64, 64))))
    top = b.add(ops.reshape(b.add(ops.reduce(scores, axis=1, kind="max")), shape=(64, 1)))
    weights = b.cast(b.apply("subtract", scores, top), dtypes.bfloat16)
    put(b, 3, b.add(ops.dot(weights, whole_tile(b, 2), b.constant(0, float32, (64, 32)))))
    body = b.finish((1,), warps=warps)
    text, _ = emit(body, "entry", H200)
    assert text.count("bar.sync") == 2
    laid = 3 * 64 * 32 * 2 // (16 * 32 * warps)  # vectors of the three that come from memory
    assert text.count("st.shared.v4") == text.count("st.shared") == laid
    check_body(body, a, b_, v, out, rounding=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.float16], ids=str)
def test_words_of_neighbours(dtype) -> None:
    """What was loaded as words is a word already; what was computed is put together."""
    each = 4 // np.dtype(dtype).itemsize
    x = whole(4, 256).astype(dtype)
    y = np.zeros((2, 4, 256 // each), np.int32)
    b = builder(x, y)
    tile = whole_tile(b, 0)
    found = [b.add(ops.words(given)) for given in (tile, b.apply("negative", tile))]
    put(b, 1, b.add(ops.stack_rows(*found)))
    check_body(b.finish((1,), warps=2), x, y)


def test_sums_and_extremes_meet_once() -> None:
    """The largest and the sum of one tile, each along both axes: what can wait for the other
    does, so that threads exchange both at once."""
    x, y = floats(8, 512), np.zeros(2, np.float32)
    b = builder(x, y)
    tile = whole_tile(b, 0)
    kinds = ("max", "sum")
    lines = [b.reduce(tile, 1, kind) for kind in kinds]
    totals = [b.reduce(line, 0, kind) for line, kind in zip(lines, kinds)]
    for at, total in enumerate(totals):
        b.store(b.parameters[1], total, (at,), ())
    body = b.finish((1,), warps=8)
    assert emit(body, "entry", H200)[0].count("bar.sync") == 1
    check_body(body, x, y, rounding=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int16, np.int8], ids=str)
def test_narrow_tiles_are_carried(dtype) -> None:
    x, y = whole(4, 256).astype(dtype), np.zeros((2, 256), dtype)
    b = builder(x, y)
    rows = [b.load(b.parameters[0], (i, 0), (256,), (1,)) for i in range(2)]

    def step(i, carried):
        return [carried[1], b.load(b.parameters[0], (i, 0), (256,), (1,))]

    put(b, 1, b.add(ops.stack_rows(*looped(b, "i", 1, 4, 1, step, rows))))
    check_body(b.finish((1,), warps=2), x, y)


# ---- roles ----------------------------------------------------------------------------------


def handed(reads: bool) -> Body:
    """One role stores what a second one loads, if it `reads`; a third one arrives beside it."""
    given, result = Memory((128,), float32, use="value"), Memory((128,), float32, use="result")
    b = PlacedBuilder("handed", [("x", given), ("out", result)])
    place = b.allocate((128,), float32, "shared")
    told, back = b.barrier("told", 1), b.barrier("back", 2)

    def writer() -> None:
        b.write(place, b.load(b.parameters[0], (0,), (128,), (0,)))
        b.arrive(told, 0)
        b.wait(back, 0, 0)

    def reader() -> None:
        b.wait(told, 0, 0)
        found = b.read(place) if reads else b.load(b.parameters[0], (0,), (128,), (0,))
        b.store(b.parameters[1], found, (0,), (0,))
        b.arrive(back, 0)

    def beside() -> None:
        b.wait(told, 0, 0)
        b.arrive(back, 0)

    for name, role in (("writer", writer), ("reader", reader), ("beside", beside)):
        b.role(name, 4, 0, role)
    return b.finish((1,))


@pytest.mark.parametrize("reads", [True, False])
def test_roles_that_hand_on_plain_values_arrive_thread_by_thread(reads: bool) -> None:
    """All who arrive at such a barrier do, whether they load or not; elsewhere one lane a warp."""
    text, _ = emit(handed(reads), "handed", H200)
    counts = [
        int(line.split()[-1].rstrip(";")) for line in text.splitlines() if "mbarrier.init" in line
    ]
    assert counts == ([128, 2 * 128] if reads else [4, 2 * 4])
    given, out = floats(128), np.zeros(128, np.float32)
    launch(handed(reads), [given, out], {})
    np.testing.assert_array_equal(out, given)
