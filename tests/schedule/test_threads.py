"""Schedules for a Target whose programs are blocks of threads, run by the Tile interpreter.

The first part is every test of `test_against_interpreter` and of control again with that Target.
Then come sizes at which the lowerings change their form, and counts of what costs time: kernels,
launches, loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as every
from typing import Any

import judge
import ml_dtypes
import numpy as np
import pytest
import test_against_interpreter as cases
import test_control as control
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_interpreted
from judge import check
from test_against_interpreter import *  # noqa: F403
from test_against_interpreter import floats, softmax, whole
from test_control import (  # noqa: F401
    test_cond,
    test_nested_control,
    test_recurrent_layer,
    test_scan_carries,
    test_scan_lengths,
    test_scan_of_computed_values,
    test_scan_of_states,
    test_symbolic_scan,
    test_while_loop,
)

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.schedule import Launch
from tilegrad.schedule.threads import reductions as thread_rows
from tilegrad.schedule.threads import sort as thread_sort
from tilegrad.schedule.threads import update_threads
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body
from tilegrad.tile.check import walk

BF16 = ml_dtypes.bfloat16


def run_on_threads(inputs, outputs, values, symbols=None, donate=()):
    return run_interpreted(H200, inputs, outputs, values, symbols, donate)


@pytest.fixture(autouse=True, scope="module")
def on_threads() -> Iterator[None]:
    """Everything in this file runs on the Tile interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (judge, cases, control):
            patch.setattr(module, "run", run_on_threads)
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No Body made with other sizes is used again."""
    monkeypatch.setattr("tilegrad.compiler.compile._bodies", {})
    return monkeypatch


def bodies(function, *types: tuple) -> list[Body]:
    """The Bodies of all launches, in order."""
    nodes = [build.input_(shape, dtype) for shape, dtype in types]
    made = function(*nodes)
    outputs = [made] if isinstance(made, Node) else list(made)
    schedule = schedule_for(nodes, outputs, H200)
    return [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


def count(body: Body, name: str, inside: str = "") -> int:
    """How many Nodes of an op a Body has (within loops, where asked)."""
    return sum(
        1
        for n, around in walk(body.block)
        if n.op.name == name and (not inside or any(a.op.name == inside for a in around))
    )


# ---- rows -----------------------------------------------------------------------------------


def layer_norm(x, w):
    n = x.shape[-1]
    mean = build.divide(build.sum_(x, -1, keep=True), float(n))
    d = build.subtract(x, mean)
    scale = build.divide(build.sum_(build.multiply(d, d), -1, keep=True), float(n))
    inverse = build.unary(ops.reciprocal, build.unary(ops.square_root, build.add(scale, 1e-5)))
    return build.multiply(build.multiply(d, inverse), w)


def log_sum_exp(x):
    largest = build.max_(x, -1, keep=True)
    total = build.sum_(build.unary(ops.exp, build.subtract(x, largest)), -1, keep=True)
    return build.add(build.unary(ops.log, total), largest)


ROWS = [(1, 1), (3, 2), (70, 33), (9, 64), (300, 48), (2, 513), (5, 1000), (3, 4096), (2, 16384)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows_that_are_held(shape) -> None:
    def several(x, w):
        return [softmax(x, 1), layer_norm(x, w), build.sum_(x, 1), ops.argmax(x, axis=1)]

    check(several, floats(*shape), floats(shape[1], seed=1), looser=4)


@pytest.mark.parametrize("shape", [(2, 16385), (3, 20000), (1, 40000)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_rows_that_are_swept(shape, dtype) -> None:
    def several(x):
        wide = build.cast(x, dtypes.float32)
        return [softmax(wide, 1), log_sum_exp(wide), ops.argmax(x, axis=1), build.max_(x, 1)]

    check(several, floats(*shape, dtype=dtype), looser=4)


def test_online_sums_of_odd_values(fresh) -> None:
    """Infinities and nan end up where the form of two sweeps has them."""
    fresh.setattr(thread_rows, "HELD", 4)
    x = floats(9, 9000)
    x[0] = -np.inf
    x[1, 5] = np.inf
    x[2, 7000] = np.nan
    x[3, :8999] = -np.inf
    x[4] = -1e30
    x[5, ::2] = -np.inf
    x[6] = 3e38
    x[7, ::3], x[7, 1::3], x[8] = 2.1e9, 2.2e9, -2.2e9 - 300 * np.arange(9000) // 1000

    def several(x):
        largest = build.max_(x, 1, keep=True)
        finite = build.less(build.unary(ops.absolute, largest), float("inf"))
        shift = build.where(finite, largest, 0.0)
        total = build.sum_(build.unary(ops.exp, build.subtract(x, shift)), 1)
        return [softmax(x, 1), log_sum_exp(x), total]

    check(several, x, looser=4)


def test_short_rows_of_many_shapes() -> None:
    """Several rows a program: what is broadcast over leading axes, masks, turned reads."""
    mask = floats(3, 1, 40, 40, seed=3) > 0

    def several(x, mask, y):
        kept = build.where(build.expand(mask, (3, 4, 40, 40)), x, -1e9)
        turned = build.add(build.permute(x, (0, 1, 3, 2)), build.unsqueeze(y, 2))
        return [softmax(kept, 3), softmax(turned, 3), build.sum_(build.permute(x, (3, 1, 0, 2)), 3)]

    check(several, floats(3, 4, 40, 40), mask, floats(3, 4, 40, seed=2), looser=4)


# ---- columns and whole arrays ---------------------------------------------------------------

COLUMNS = [(1000, 300), (5000, 8), (3000, 1), (257, 64), (7, 2000), (4100, 33), (129, 1025)]


@pytest.mark.parametrize("shape", COLUMNS, ids=str)
def test_columns(shape) -> None:
    def several(x, y):
        return [
            build.sum_(x, 0),
            build.max_(build.multiply(x, y), 0),
            ops.argmax(x, axis=0),
            softmax(x, 0),
            build.add(build.sum_(y, 0), 1.0),
        ]

    check(several, floats(*shape), floats(*shape, seed=1), looser=8)


@pytest.mark.parametrize("shape", [(300_000,), (3, 70_001), (2, 40, 1000), (5, 7, 3001)], ids=str)
def test_long_sums(shape) -> None:
    check(lambda x: [build.sum_(x), build.max_(x, -1), build.sum_(x, 0)], floats(*shape), looser=50)


def test_sum_over_middle_axis() -> None:
    check(
        lambda x: [build.sum_(x, 1), build.max_(x, (0, 2)), build.sum_(x, (0, 2))],
        floats(5, 300, 37),
        looser=20,
    )


@pytest.mark.parametrize("count", [0, 1, 17, 700, 4095])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["first", "middle"])
def test_columns_of_any_length(lead: tuple, count: int) -> None:
    """Far fewer elements than there may be: parts of the axis that have none add nothing."""
    axis, value = len(lead), floats(*lead, count, 40)
    x = build.input_((*lead, symbol("N", 0, 4096), 40), dtypes.float32)
    outputs = [build.sum_(x, axis), build.max_(build.add(x, 1.0), axis), build.sum_(x)]
    expected = interpret(outputs, {x: value}, {"N": count})
    found = run_on_threads([x], outputs, [value], {"N": count})
    for node, got, want in zip(outputs, found, expected):
        judge.compare(node, got, want, 50)


# ---- movement -------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(33, 65), (64, 128), (100, 3), (3, 100), (130, 129)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int8, np.int64], ids=str)
def test_transposes(shape, dtype) -> None:
    x, y = floats(*shape, dtype=dtype), floats(*shape[::-1], seed=1, dtype=dtype)
    check(lambda x, y: [build.add(build.transpose(x), y), build.add(x, build.transpose(y))], x, y)


def test_rotary() -> None:
    def rotate(x, cos, sin):
        half = x.shape[-1] // 2
        turned = build.concatenate(
            [
                build.negative(build.slice_axis(x, 2, half, 2 * half)),
                build.slice_axis(x, 2, 0, half),
            ],
            2,
        )
        over = lambda t: build.expand(t, x.shape)  # noqa: E731
        return build.add(build.multiply(x, over(cos)), build.multiply(turned, over(sin)))

    shapes = (6, 4, 64), (6, 1, 64), (6, 1, 64)
    check(rotate, *(floats(*s, seed=i) for i, s in enumerate(shapes)))


SIZES = st.integers(1, 70)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(a=SIZES, b=SIZES, c=st.integers(1, 9), seed=st.integers(0, 99), kind=st.integers(0, 5))
def test_any_shape(a: int, b: int, c: int, seed: int, kind: int) -> None:
    """Broadcasts, reductions, turned and shifted reads of any sizes."""
    dtype = (np.float32, BF16, np.int32, np.float16, np.int8, np.float64)[seed % 6]

    def several(x, y, z):
        turned = build.permute(x, (1, 0, 2))
        return [
            [build.add(x, y), build.multiply(build.add(turned, z), turned)],
            [build.sum_(build.add(x, y), (kind % 3,)), build.max_(turned, (0,))],
            [
                build.pad(x, (1, 0, 2), (0, 3, 1)),
                build.sum_(build.pad(turned, (2, 2, 0), (1, 1, 1)), 1),
            ],
            [build.concatenate([x, x], 1), build.sum_(build.concatenate([turned, turned], 0), 2)],
            [build.flip(x, (1,)), build.reshape(turned, (a * c, b)), build.sum_(x)],
            [
                ops.cumulative(x, axis=seed % 3, kind="max"),
                build.sum_(build.reshape(x, (a * b, c)), 0),
            ],
        ][kind]

    shapes = (a, b, c), (b, 1), (a, c)
    check(
        several, *(cases.numbers(dtype, *s, seed=seed + i) for i, s in enumerate(shapes)), looser=6
    )


# ---- sorts, running sums, updates -----------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("size", [65, 128, 200, 1000])
def test_long_sorts(size: int, descending: bool, fresh) -> None:
    """Lines longer than one program sorts, with that made small."""
    fresh.setattr(thread_sort, "LOCAL", 64)
    fresh.setattr(thread_sort, "FAR_TILE", 32)
    x = whole(3, size, low=-9, high=9).astype(np.float32)
    x[0, ::7] = np.nan

    def both(*xs):
        return [v for x in xs for v in build.items(ops.sort(x, axis=1, descending=descending))]

    check(both, x, whole(2, size, low=-9, high=9))


def test_sort_longer_than_a_program() -> None:
    check(lambda x: build.items(ops.sort(x, axis=0, descending=True)), floats(5000))


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("axis", [0, 1])
def test_long_running_sums(kind: str, axis: int) -> None:
    shape = (3, 5000) if axis else (700, 50)
    check(lambda x: ops.cumulative(x, axis=axis, kind=kind), floats(*shape), looser=20)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["set", "add", "max"])
@pytest.mark.parametrize("rest", [(), (3,), (100,)], ids=str)
@pytest.mark.parametrize("sorts", [False, True], ids=["ranked", "sorted"])
def test_repeated_indices(mode: str, rest: tuple, sorts: bool, fresh) -> None:
    """As many as fill several programs, some outside; in index order, to the bit."""
    if sorts:
        fresh.setattr(update_threads, "RANKED", 50)
        fresh.setattr(update_threads, "LOCAL", 64)
        fresh.setattr(thread_sort, "LOCAL", 64)
        fresh.setattr(thread_sort, "FAR_TILE", 32)
    fresh.setattr(update_threads, "FEW_SET", 0)
    index = whole(500, low=-2, high=43)
    state, value = floats(40, *rest), floats(500, *rest, seed=1)
    (got,) = check(lambda s, v, i: build.update(s, v, [i], [0], mode), state, value, index)
    inside = (index >= 0) & (index < 40)
    expected = state.copy()
    if mode == "add":
        for i, v in zip(index[inside], value[inside]):
            expected[i] += v
        np.testing.assert_array_equal(got, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["set", "add", "multiply"])
@pytest.mark.parametrize("rest", [(), (3,), (100,)], ids=str)
@pytest.mark.parametrize("size", [2, 33, 500])
def test_few_indices(mode: str, rest: tuple, size: int) -> None:
    def both(state, value, index, other):
        once = build.update(state, value, [index], [0], mode)
        places = [index, other]
        table = build.update(
            build.full((9, 7, *rest), 1.0, dtypes.float32), value, places, [0, 1], mode
        )
        return [once, table]

    check(
        both,
        floats(9, *rest),
        floats(size, *rest, seed=1),
        whole(size, low=-2, high=11),
        whole(size, low=-1, high=8, seed=1),
    )


@pytest.mark.parametrize("start", [-2, 0, 3, 18])
def test_rows_from_a_loaded_start_on(start: int) -> None:
    """A cache that grows: one launch that writes plain rows, cut off at the end."""

    def append(cache, value, start):
        return build.update(cache, value, [build.add(build.iota(4), start)], [1])

    check(append, floats(3, 20, 40), floats(4, 3, 40, seed=1), np.int64(start))
    types = ((3, 20, 40), dtypes.float32), ((4, 3, 40), dtypes.float32), ((), dtypes.int64)
    (body,) = bodies(append, *types)
    assert count(body, "scatter") == count(body, "gather") == 0


# ---- what costs time ------------------------------------------------------------------------

WIDE = (2048, 4096)


def test_elementwise_is_one_load_of_each_input() -> None:
    (body,) = bodies(build.add, (WIDE, dtypes.bfloat16), (WIDE, dtypes.bfloat16))
    assert count(body, "load") == 2 and count(body, "store") == 1
    assert count(body, "loop") == count(body, "gather") == 0
    assert body.grid[0] >= 4 * H200.cores and body.notes["warps"] == 4


def test_vectors_are_of_what_most_bytes_are() -> None:
    """A thread takes 16 bytes of float32 at once, next to its neighbours', and 8 of bfloat16."""
    (body,) = bodies(
        lambda w, g: build.add(w, build.cast(g, dtypes.float32)),
        (WIDE, dtypes.float32),
        (WIDE, dtypes.bfloat16),
    )
    text, _ = emit(body, "mixed", H200)
    assert "ld.global.nc.v2" in text or "ld.global.v2" in text
    (body,) = bodies(lambda x: build.add(x, x), (WIDE, dtypes.bfloat16))
    assert ".v2." not in emit(body, "narrow", H200)[0]


def test_held_rows_are_read_once() -> None:
    (body,) = bodies(lambda x: softmax(x, 1), (WIDE, dtypes.bfloat16))
    assert count(body, "load") == 1 and count(body, "store") == 1 and count(body, "loop") == 0
    assert body.grid == (2048,) and body.notes["warps"] == 8
    (body,) = bodies(layer_norm, (WIDE, dtypes.bfloat16), ((4096,), dtypes.bfloat16))
    order = [n.op.name for n, _ in walk(body.block) if n.op.name in ("load", "reduce", "store")]
    assert order == ["load", "reduce", "reduce", "load", "store"]


def test_short_rows_share_a_program() -> None:
    (body,) = bodies(lambda x: softmax(x, 1), ((65536, 128), dtypes.bfloat16))
    assert count(body, "load") == 1 and body.grid == (4096,)
    assert next(n for n, _ in walk(body.block) if n.op.name == "load").shape == (16, 128)


def test_long_rows_are_swept_once_or_twice() -> None:
    def loss(x):
        return log_sum_exp(build.cast(x, dtypes.float32))

    (body,) = bodies(loss, ((512, 128256), dtypes.bfloat16))
    sweeps = [n for n in body.block.nodes if n.op.name == "loop"]
    assert len(sweeps) == 1  # one sweep: four tiles a turn, then what is left in one turn
    assert count(body, "load") == 8 and count(body, "load", "loop") == 4
    assert count(body, "allocate") == 0


def test_long_rows_are_kept_in_shared_memory() -> None:
    """What softmax reads again of a row comes from memory only where shared memory is full."""
    (body,) = bodies(
        lambda x: softmax(build.cast(x, dtypes.float32), 1), ((200, 128256), dtypes.bfloat16)
    )
    (place,) = (n for n in body.block.nodes if n.op.name == "allocate")
    kept = place.type.shape[0]
    assert place.type.scope == "shared" and 0.75 * 128256 < kept < 128256
    assert kept * 2 < H200.memories["shared"].bytes and body.notes["warps"] == 32
    loops = [n for n in body.block.nodes if n.op.name == "loop"]
    again = [n for n in loops if not n.inputs[2:]]  # the sweep that writes
    sources = [
        {i.inputs[0].type.scope for i in n.blocks[0].nodes if i.op.name == "load"} for n in again
    ]
    assert {"shared"} in sources


def entropy(x, weights):
    """The weighted mean of logsumexp by rows, and its gradient."""
    total = build.sum_(weights, 0)
    shares = softmax(build.cast(x, dtypes.float32), 1)
    each = build.reshape(build.divide(weights, total), (x.shape[0], 1))
    sums = build.reshape(log_sum_exp(build.cast(x, dtypes.float32)), weights.shape)
    loss = build.divide(build.sum_(build.multiply(sums, weights), 0), total)
    return [loss, build.cast(build.multiply(shares, each), x.dtype)]


def test_a_loss_and_its_gradient_sweep_long_rows_in_one_launch() -> None:
    """Small sums that the gradient waits for do not wait for the loss."""
    types = ((512, 128256), dtypes.bfloat16), ((512,), dtypes.float32)
    found = bodies(entropy, *types)
    large = [b for b in found if count(b, "allocate")]
    assert len(found) == 3 and len(large) == 1 and large[0].grid == (128,)
    text, _ = emit(large[0], "swept", H200)
    # of the sums, of all rows and of the last one: each thread keeps its own part of a row
    assert text.count("bar.sync") == 4


def test_column_sums_are_two_launches() -> None:
    first, last = bodies(
        lambda x: build.sum_(build.cast(x, dtypes.float32), 0), ((16384, 4096), dtypes.bfloat16)
    )
    assert 3 * H200.cores <= first.grid[0] <= 8 * H200.cores
    assert count(first, "load") == 1 and count(last, "load") == 1
    assert count(first, "gather") == count(first, "scatter") == 0


def test_whole_sums_spread_over_the_machine() -> None:
    found = bodies(build.sum_, ((1 << 24,), dtypes.float32))
    assert found[0].grid[0] >= H200.cores and len(found) <= 3


def norm_gradients(x, dy, w):
    n = float(x.shape[1])
    scale = build.divide(build.sum_(build.multiply(x, x), 1, keep=True), n)
    inverse = build.unary(ops.reciprocal, build.unary(ops.square_root, build.add(scale, 1e-5)))
    normed = build.multiply(x, inverse)
    g = build.multiply(dy, w)
    along = build.divide(build.sum_(build.multiply(g, normed), 1, keep=True), n)
    dx = build.multiply(build.subtract(g, build.multiply(normed, along)), inverse)
    return [dx, build.sum_(build.multiply(dy, normed), 0), build.sum_(dy, 0)]


def test_norm_gradients_read_their_arrays_once() -> None:
    types = ((16384, 4096), dtypes.bfloat16), ((16384, 4096), dtypes.bfloat16)
    found = bodies(norm_gradients, *types, ((4096,), dtypes.bfloat16))
    assert len(found) == 2
    assert count(found[0], "load", "loop") == 2  # the next row of x and of dy
    assert found[0].grid == (2 * H200.cores,)


@pytest.mark.parametrize("shape", [(300, 700), (1030, 513)], ids=str)
def test_norm_gradients(shape) -> None:
    values = floats(*shape), floats(*shape, seed=1), floats(shape[1], seed=2)
    check(norm_gradients, *values, looser=20)


def test_exp_of_logits_is_not_stored() -> None:
    """Cross-entropy with its derivative: the logits are read twice, written once."""

    def both(x):
        wide = build.cast(x, dtypes.float32)
        e = build.unary(ops.exp, build.subtract(wide, build.max_(wide, 1, keep=True)))
        total = build.sum_(e, 1, keep=True)
        mean = build.sum_(build.unary(ops.log, total))
        return [mean, build.cast(build.multiply(build.divide(e, total), mean), dtypes.bfloat16)]

    nodes = [build.input_((512, 32000), dtypes.bfloat16)]
    schedule = schedule_for(nodes, both(*nodes), H200)
    assert max(s.bytes for s in schedule.slots if s.kind == "scratch") < 1 << 16


def test_transposed_reads_are_turned_in_shared_memory() -> None:
    (body,) = bodies(build.transpose, ((4096, 2048), dtypes.bfloat16))
    load, place = (
        next(n for n, _ in walk(body.block) if n.op.name == name) for name in ("load", "allocate")
    )
    assert load.shape == (64, 64) and load.inputs[0].type.strides[-1] == 1
    assert place.attrs["scope"] == "shared" and place.type.shape == (64, 66)
    assert count(body, "gather") == 0


def test_gathered_rows_are_plain_loads() -> None:
    (body,) = bodies(
        lambda x, i: build.gather(x, [i], [0]),
        ((50000, 4096), dtypes.bfloat16),
        ((16384,), dtypes.int64),
    )
    assert count(body, "gather") == 0 and count(body, "load") == 2


def test_rows_added_at_indices_are_spread_over_the_machine() -> None:
    def gradient(value, index):
        state = build.full((50000, 4096), 0.0, dtypes.bfloat16)
        return build.update(state, value, [index], [0], "add")

    found = bodies(gradient, ((16384, 4096), dtypes.bfloat16), ((16384,), dtypes.int64))
    assert [b.name.rpartition("_")[2] for b in found] == ["expand", "ranks", "runs", "owned"]
    assert found[1].grid[0] >= 3 * H200.cores and found[3].grid[0] >= 16384
    assert not any(n.op.name == "atomic_add" for b in found for n, _ in walk(b.block))


def test_tiles_are_powers_of_two() -> None:
    for body in bodies(
        lambda x: [softmax(x, 1), build.sum_(x, 0), build.transpose(x)],
        ((37, 1000), dtypes.float32),
    ):
        for node, _ in walk(body.block):
            sizes = getattr(node.type, "shape", ()) if node.op.name != "allocate" else ()
            assert all(s & (s - 1) == 0 for s in sizes if isinstance(s, int))


EMPTY: dict[str, Any] = {
    "product": lambda x: x @ x.transpose(-1, -2) + 1,
    "softmax": lambda x: x.softmax(-1),
    "sums": lambda x: (x.sum(0), x.sum(-1), x.sum()),
    "running": lambda x: (x.cumsum(-1), x.cumsum(0)),
    "sort": lambda x: tg.sort(x, -1)[0],
    "added by index": lambda x: tg.zeros(5, x.shape[-1]).index_add(0, tg.arange(x.shape[0]) % 5, x),
    "read by index": lambda x: x[tg.arange(x.shape[0]), None, 1:],
    "joined and padded": lambda x: tg.nn.functional.pad(tg.cat([x, x], 0), (1, 1)) * 2,
}


@pytest.mark.parametrize("target", [H200, A100], ids=lambda t: t.name)
@pytest.mark.parametrize("name", EMPTY)
def test_arrays_without_elements(name: str, target: Target) -> None:
    """Values and derivatives have Bodies, or none, for sizes of 0."""

    def total(x: Any) -> Any:
        found = EMPTY[name](x)
        return sum(y.sum() for y in (found if isinstance(found, tuple) else (found,)))

    for shape, function in every(((0, 8), (8, 0), (0, 0), (1, 1)), (EMPTY[name], tg.grad(total))):
        lowered = tg.jit(function).lower(tg.ones(*shape))
        schedule = schedule_for(lowered.inputs, lowered.outputs, target, ())
        for kernel in schedule.kernels:
            for step in kernel.steps:
                assert not isinstance(step, Launch) or emit(step.body, "entry", target)[0]
