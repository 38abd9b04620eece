"""What memory bounds on blocks of threads: long rows in a stream, sums side by side, joined halves.

A small Target (two cores, little shared memory, programs of two warps) makes rows long at sizes
that the Tile interpreter and the PTX simulator run in a moment; sizes of real work are assembled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted
from judge import compare
from simulator import simulate

from tilegrad.compiler.compile import schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.dtype import BY_NUMPY
from tilegrad.core.target import H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.schedule.schedule import Launch
from tilegrad.schedule.threads import reductions as thread_rows
from tilegrad.schedule.threads import stream
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body
from tilegrad.tile.check import walk

BF16 = ml_dtypes.bfloat16
KEPT = 12 << 10  # bytes of rows that the small Target keeps


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A Target of two cores whose shared memory holds little, and programs of two warps."""
    monkeypatch.setattr("tilegrad.compiler.compile._bodies", {})
    monkeypatch.setattr(stream, "WARPS", 2)
    monkeypatch.setattr(thread_rows, "HELD", 1024)
    shared = replace(H200.memories["shared"], bytes=KEPT + stream.SPARE)
    memories = MappingProxyType({**H200.memories, "shared": shared})
    yield replace(H200, name="small", cores=2, memories=memories)


def floats(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 2).astype(dtype)


def made(function, *values: np.ndarray) -> tuple[list[Node], list[Node]]:
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
    found = function(*nodes)
    return nodes, [found] if isinstance(found, Node) else list(found)


def bodies(function, *types: tuple, target: Target = H200) -> list[Body]:
    nodes = [build.input_(shape, dtype) for shape, dtype in types]
    found = function(*nodes)
    schedule = schedule_for(nodes, [found] if isinstance(found, Node) else list(found), target)
    return [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


def count(body: Body, name: str, inside: str = "") -> int:
    return sum(
        1
        for n, around in walk(body.block)
        if n.op.name == name and (not inside or any(a.op.name == inside for a in around))
    )


def check(target: Target, function, *values: np.ndarray, looser: float = 1.0) -> None:
    """Interpret the Bodies of a Graph and compare with the Graph interpreter."""
    nodes, outputs = made(function, *values)
    expected = interpret(outputs, dict(zip(nodes, values)))
    for node, a, b in zip(outputs, run_interpreted(target, nodes, outputs, values), expected):
        compare(node, a, b, looser)


def report(body: Body):
    """ptxas on a Body: what it says of its one entry."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    (found,) = assemble(emit(body, "entry", H200)[0], H200.cpu).reports.values()
    return found


# ---- rows in a stream -----------------------------------------------------------------------


def softmax(x):
    wide = build.cast(x, dtypes.float32)
    e = build.unary(ops.exp, build.subtract(wide, build.max_(wide, 1, keep=True)))
    return build.cast(build.divide(e, build.sum_(e, 1, keep=True)), x.dtype)


def entropy(x, targets):
    """Cross-entropy of each row, and its derivative."""
    rows, columns = x.shape
    wide = build.cast(x, dtypes.float32)
    largest = build.max_(wide, 1, keep=True)
    e = build.unary(ops.exp, build.subtract(wide, largest))
    total = build.sum_(e, 1, keep=True)
    place = build.expand(build.reshape(build.iota(columns), (1, columns)), (rows, columns))
    wanted = build.expand(build.reshape(targets, (rows, 1)), (rows, columns))
    chosen = build.where(build.equal(place, wanted), 1.0, 0.0)
    loss = build.add(build.unary(ops.log, total), largest)
    return [loss, build.cast(build.subtract(build.divide(e, total), chosen), x.dtype)]


def mean_square(x, w):
    wide = build.cast(x, dtypes.float32)
    scale = build.divide(build.sum_(build.multiply(wide, wide), 1, keep=True), float(x.shape[1]))
    inverse = build.unary(ops.reciprocal, build.unary(ops.square_root, build.add(scale, 1e-5)))
    return build.cast(build.multiply(build.multiply(wide, inverse), w), x.dtype)


STREAMED = [(8, 6144), (9, 6152), (11, 7000), (8, 8191), (13, 10000)]


@pytest.mark.parametrize("shape", STREAMED, ids=str)
def test_rows_in_a_stream(small: Target, shape) -> None:
    """The rest of a row in registers (none, some, a part of a vector), or longer than that."""
    x, targets = floats(*shape, dtype=BF16), np.arange(shape[0], dtype=np.int64) * 700
    found = bodies(softmax, (shape, dtypes.bfloat16), target=small)
    assert found[0].grid == (2,) and count(found[0], "allocate") == 1
    check(small, softmax, x)
    check(small, entropy, x, targets)
    check(small, mean_square, x, floats(shape[1], seed=1))


def test_wide_elements_in_a_stream(small: Target) -> None:
    check(small, softmax, floats(9, 4000))
    check(
        small,
        lambda x, y: softmax(build.multiply(x, y)),
        floats(9, 3000, dtype=BF16),
        floats(9, 3000, seed=1, dtype=BF16),
    )


def test_infinite_and_missing_values_in_a_stream(small: Target) -> None:
    x = floats(9, 7000)
    x[1, 5], x[2, 6999], x[3, :] = np.inf, np.nan, -np.inf
    nodes, outputs = made(softmax, x.astype(BF16))
    with np.errstate(invalid="ignore"):
        (got,) = run_interpreted(small, nodes, outputs, [x.astype(BF16)])
    missing = np.isnan(got.astype(np.float32)).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(missing), [1, 2, 3])


def test_far_and_lowest_values_in_a_stream(small: Target) -> None:
    """Rows far from 0, and rows of the least finite number, as masks leave them."""
    x = floats(9, 7000)
    x[1] += 2000
    x[2] -= 30000
    x[3], x[4, 100:] = float(ml_dtypes.finfo(BF16).min), float(ml_dtypes.finfo(BF16).min)
    x[5, 17] = float(ml_dtypes.finfo(BF16).max)
    for values in (x.astype(BF16), np.tile(x[:, :4500], (1, 1))):
        check(small, softmax, values, looser=2.0)
    check(small, entropy, x.astype(BF16), np.arange(9, dtype=np.int64) * 700, looser=2.0)


@pytest.mark.parametrize("function", [softmax, entropy], ids=["softmax", "entropy"])
def test_streams_on_the_simulator(small: Target, function) -> None:
    """As PTX: no race between the row that goes and the one that comes."""
    values = [floats(8, 6666, dtype=BF16), np.arange(8, dtype=np.int64) * 800]
    values = values[: 2 if function is entropy else 1]
    nodes, outputs = made(function, *values)
    expected = interpret(outputs, dict(zip(nodes, values)))
    for node, a, b in zip(outputs, simulated(small, nodes, outputs, values), expected):
        compare(node, a, b)


def simulated(target, nodes, outputs, values) -> list[np.ndarray]:
    """The outputs of a Graph whose launches run as PTX."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
    import simulated as machines

    plain = machines.interpreted.Machine
    machines.interpreted.Machine = machines.Machine  # type: ignore[misc]
    try:
        return run_interpreted(target, nodes, outputs, values)
    finally:
        machines.interpreted.Machine = plain  # type: ignore[misc]


def test_entropy_over_a_vocabulary() -> None:
    """32 rows a program; the row is read once, a turn ahead; nothing spills. Only the turn that
    has the target compares places."""
    shape = (4096, 128256)
    body = next(
        b
        for b in bodies(entropy, (shape, dtypes.bfloat16), ((4096,), dtypes.int64))
        if b.grid == (128,)
    )
    (place,) = (n for n, _ in walk(body.block) if n.op.name == "allocate")
    assert place.type.shape[0] > 0.89 * shape[1]
    outer = [n for n in body.block.nodes if n.op.name == "loop"]
    (inner,) = (n for n, around in walk(body.block) if n.op.name == "loop" and around)
    assert len(outer) == 3  # the first row in, all others, the last one out
    scopes = [n.inputs[0].type.scope for n in inner.blocks[0].nodes if n.op.name == "load"]
    assert sorted(scopes) == ["global"] * 4 + ["shared"] * 4
    (branch,) = (n for n in inner.blocks[0].nodes if n.op.name == "branch")
    asked, plain = ([n.op.name for n in b.nodes] for b in branch.blocks)
    assert asked.count("equal") == 4 and "equal" not in plain and "where" not in plain
    names = [n.op.name for n in inner.blocks[0].nodes] + plain
    assert names.count("quick_exp2") == 2 * 4 + 1  # and once for the sum so far
    assert "quick_exp" not in names and names.count("less") == 2  # one shift and one place
    found = report(body)
    assert found.spill_stores == found.spill_loads == 0 and found.registers <= 128


@pytest.mark.parametrize("columns", [50257, 50260, 50304])
def test_threads_find_their_largest_alone(columns: int) -> None:
    """However rows are aligned, lanes meet for the largest and for the sum of a row, no more."""

    def log_sum(x):
        wide = build.cast(x, dtypes.float32)
        largest = build.max_(wide, 1, keep=True)
        e = build.unary(ops.exp, build.subtract(wide, largest))
        return build.add(build.unary(ops.log, build.sum_(e, 1, keep=True)), largest)

    (body,) = bodies(log_sum, ((4096, columns), dtypes.bfloat16))
    assert emit(body, "entry", H200)[0].count("shfl") == 2 * 5
    assert report(body).spill_stores == 0


def test_few_or_short_rows_are_no_stream() -> None:
    for shape in ((256, 128256), (4096, 40000)):
        assert all(b.grid == (shape[0],) for b in bodies(softmax, (shape, dtypes.bfloat16)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_places_are_compared_with_any_value(dtype: str) -> None:
    """Chosen places inside and outside of the row, of every sign and size."""
    kind = getattr(dtypes, dtype)

    def chosen(x, wanted):
        rows, columns = x.shape
        place = build.cast(build.iota(columns), kind)
        place = build.expand(build.reshape(place, (1, columns)), (rows, columns))
        same = build.equal(place, build.expand(build.reshape(wanted, (rows, 1)), (rows, columns)))
        return [build.where(same, x, 0.0), build.sum_(build.where(same, x, 0.0), 1)]

    limits = np.iinfo(np.dtype(dtype))
    wanted = np.array([0, 1, 99, 100, limits.max, limits.min, limits.max - 1], dtype)
    check(H200, chosen, floats(7, 100), wanted)
    check(H200, chosen, floats(7, 1500), wanted)


# ---- sums side by side ----------------------------------------------------------------------


def norm_gradients(x, dy, w):
    """A layer norm's derivatives as reverse mode leaves them."""
    n = float(x.shape[1])
    x, dy, w = (build.cast(i, dtypes.float32) for i in (x, dy, w))
    mean = build.divide(build.sum_(x, 1, keep=True), n)
    d = build.subtract(x, mean)
    root = build.unary(
        ops.square_root,
        build.add(build.divide(build.sum_(build.multiply(d, d), 1, keep=True), n), 1e-5),
    )
    inverse = build.unary(ops.reciprocal, root)
    g = build.multiply(dy, w)
    pull = build.sum_(build.multiply(g, d), 1, keep=True)
    slope = build.divide(
        build.unary(ops.negative, build.multiply(pull, build.multiply(inverse, inverse))),
        build.multiply(root, n),
    )
    direct = build.add(build.multiply(g, inverse), build.multiply(d, slope))
    shift = build.divide(build.sum_(build.unary(ops.negative, direct), 1, keep=True), n)
    by_x = build.cast(build.add(direct, shift), dtypes.bfloat16)
    scaled = build.multiply(dy, build.multiply(d, inverse))
    return [by_x, build.sum_(scaled, 0), build.sum_(dy, 0)]


def test_a_norm_gradient_meets_twice_a_row() -> None:
    types = ((16384, 4096), dtypes.bfloat16), ((16384, 4096), dtypes.bfloat16)
    body = bodies(norm_gradients, *types, ((4096,), dtypes.bfloat16))[0]
    assert count(body, "reduce", "loop") == 4
    text, _ = emit(body, "entry", H200)
    assert text.count("bar.sync") == 2  # one for two sums
    found = report(body)
    assert found.spill_stores == found.spill_loads == 0 and found.registers <= 128


@pytest.mark.parametrize("shape", [(300, 700), (260, 1024)], ids=str)
def test_norm_gradients(shape) -> None:
    values = [floats(*shape) + 3, floats(*shape, seed=1), floats(shape[1], seed=2)]
    check(H200, norm_gradients, *(v.astype(BF16) for v in values), looser=4)


def square_gradients(x, dy, w):
    """A root mean square norm's derivatives: two sums of a row, neither needs the other."""
    n = float(x.shape[1])
    g = build.multiply(dy, w)
    squares = build.divide(build.sum_(build.multiply(x, x), 1, keep=True), n)
    inverse = build.unary(ops.reciprocal, build.unary(ops.square_root, build.add(squares, 1e-5)))
    pull = build.divide(build.sum_(build.multiply(g, x), 1, keep=True), n)
    cube = build.multiply(build.multiply(inverse, inverse), build.multiply(inverse, pull))
    by_x = build.subtract(build.multiply(g, inverse), build.multiply(x, cube))
    return [by_x, build.sum_(build.multiply(dy, build.multiply(x, inverse)), 0)]


def test_one_exchange_a_row_is_one_meeting() -> None:
    """What the threads of one row leave behind is not where those of the next write."""
    types = ((16384, 4096), dtypes.float32), ((16384, 4096), dtypes.float32)
    body = bodies(square_gradients, *types, ((4096,), dtypes.float32))[0]
    assert count(body, "reduce", "loop") == 2
    assert emit(body, "entry", H200)[0].count("bar.sync") == 1


@pytest.mark.parametrize("function", [norm_gradients, square_gradients], ids=["layer", "square"])
def test_norm_gradients_on_the_simulator(small: Target, function) -> None:
    """As PTX, several rows a program: what one row leaves in shared memory is no other's."""
    shape = (256, 600)
    values = [floats(*shape) + 1, floats(*shape, seed=1), floats(shape[1], seed=2)]
    nodes, outputs = made(function, *values)
    expected = interpret(outputs, dict(zip(nodes, values)))
    for node, a, b in zip(outputs, simulated(small, nodes, outputs, values), expected):
        compare(node, a, b, looser=20)


def test_sums_side_by_side_are_one_exchange() -> None:
    def several(x):
        return [build.sum_(x, 1), build.max_(x, 1), build.sum_(build.multiply(x, x), 1)]

    x = floats(5, 4000)
    nodes, outputs = made(several, x)
    (body,) = (s.body for k in schedule_for(nodes, outputs, H200).kernels for s in k.steps)
    text, entry = emit(body, "entry", H200)
    assert text.count("bar.sync") == 1
    memories = [x.reshape(-1), *(np.zeros(5, np.float32) for _ in outputs)]
    simulate(text, entry, memories, {})
    for got, want in zip(memories[1:], (x.sum(1), x.max(1), (x * x).sum(1))):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


# ---- lines joined of parts ------------------------------------------------------------------


def rotary(q, cos, sin):  # (tokens, heads, size), (tokens, size)
    tokens, heads, size = q.shape
    half = size // 2
    low, high = (
        build.slice_(q, (0, 0, 0), (tokens, heads, half)),
        build.slice_(q, (0, 0, half), (tokens, heads, size)),
    )
    turned = build.concatenate([build.unary(ops.negative, high), low], 2)
    cos, sin = (build.expand(build.reshape(i, (tokens, 1, size)), q.shape) for i in (cos, sin))
    return build.add(build.multiply(q, cos), build.multiply(turned, sin))


def test_rotary_reads_each_element_once() -> None:
    types = [((16384, 32, 128), dtypes.bfloat16), *[((16384, 128), dtypes.bfloat16)] * 2]
    (body,) = bodies(rotary, *types)
    assert body.grid == (32768,) and body.notes["warps"] == 4  # 16 elements a thread
    assert count(body, "load") == 6 and count(body, "store") == 2
    assert not any(n.attrs["masked"] for n, _ in walk(body.block) if n.op.name == "load")
    assert count(body, "where") == 0 and report(body).registers <= 40


@pytest.mark.parametrize(
    "shape", [(3, 5, 128), (2, 3, 64), (7, 1, 256), (3, 2, 6), (2, 3, 24)], ids=str
)
def test_joined_halves(shape) -> None:
    tables = floats(shape[0], shape[2], seed=1), floats(shape[0], shape[2], seed=2)
    check(H200, rotary, floats(*shape), *tables)
    check(H200, rotary, *(v.astype(BF16) for v in (floats(*shape), *tables)))


def test_joined_and_padded_parts() -> None:
    """Parts of other sizes, several joints, padding inside: pieces where they fit, masks else."""

    def several(x, y):
        joined = build.concatenate([x, y, x], 1)
        padded = build.add(build.pad(x, (0, 64), (0, 128)), build.pad(y, (0, 128), (0, 64)))
        uneven = build.concatenate([build.slice_(x, (0, 0), (x.shape[0], 40)), y], 1)
        return [joined, padded, uneven]

    check(H200, several, floats(9, 64), floats(9, 64, seed=1))
    check(H200, several, floats(9, 64, dtype=BF16), floats(9, 64, seed=1, dtype=BF16))
