"""schedule/dot_wide.py: when a dot takes the library's wide matmul, and what it computes then.

Schedules for an H200 run on the Tile interpreter and are held to the Graph interpreter; every
placed Body has passed the checks before launch on its way (config().verify).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreted import Machine, run_interpreted
from judge import TOLERANCE, compare

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from simulated import TEXTS, assembled, check_graph  # noqa: F401 (a fixture)

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.config import config
from tilegrad.core.dtype import BY_NUMPY, DType, bfloat16, float8_e4m3, float32, int8, int32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.matmul import matvec
from tilegrad.kernels.matmul import wide as matmul
from tilegrad.schedule.schedule import Launch, Schedule
from tilegrad.tile.check import walk

BF16 = ml_dtypes.bfloat16
Made = Callable[..., "Node | Sequence[Node]"]


def numbers(*shape: int, seed: int = 0, dtype: object = BF16) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def is_wide(schedule: Schedule) -> bool:
    """Whether a launch runs the wide matmul, or for one row the library's matvec."""
    plans = (matmul.WidePlan, matvec.MatvecPlan)
    return any(
        isinstance(s, Launch) and isinstance(s.body.notes.get("plan"), plans)
        for k in schedule.kernels
        for s in k.steps
    )


def check(function: Made, *values: np.ndarray, wide: bool = True, target: Target = H200) -> int:
    """Compare with the Graph interpreter; gives the number of kernels."""
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
    made = function(*nodes)
    outputs = [made] if isinstance(made, Node) else list(made)
    schedule = schedule_for(nodes, outputs, target)
    assert is_wide(schedule) == wide
    expected = interpret(outputs, dict(zip(nodes, values)))
    low = max(TOLERANCE.get(n.dtype.name, 0.0) for n in nodes)  # products are not rounded between
    for node, got, want in zip(outputs, run_interpreted(target, nodes, outputs, values), expected):
        compare(node, got, want, max(1.0, low / TOLERANCE.get(node.dtype.name, 1.0)))
    return len(schedule.kernels)


def dot(a: Node, b: Node, turn_a: bool = False, turn_b: bool = False, batch: int = 0) -> Node:
    """a @ b with either stored the other way, over leading axes of a batch."""
    lead = tuple(range(batch))
    at = (batch if turn_a else batch + 1, batch + 1 if turn_b else batch)
    return build.dot(a, b, batch=(lead, lead), contract=((at[0],), (at[1],)))


A, B, BIAS, REST = numbers(136, 72), numbers(96, 72, seed=1), numbers(96, seed=2), numbers(136, 96)
FEW = numbers(5, 72, seed=4)


@pytest.mark.parametrize("turn_a", (False, True))
@pytest.mark.parametrize("turn_b", (False, True))
@pytest.mark.parametrize("m", (8, 136))
def test_transposes(turn_a: bool, turn_b: bool, m: int) -> None:
    """Each operand stored either way, many rows and few."""
    a, b = np.ascontiguousarray(A[:m]), B
    a = np.ascontiguousarray(a.T) if turn_a else a
    b = b if turn_b else np.ascontiguousarray(b.T)
    assert check(lambda x, y: dot(x, y, turn_a, turn_b), a, b) == 1


def test_permuted_operands() -> None:
    """A transpose or a reshape before the dot is only another way to read."""
    check(lambda x, y: build.matmul(x, build.transpose(y)), A, B)
    check(
        lambda x, y: build.matmul(build.reshape(x, (136, 72)), build.transpose(y)),
        np.ascontiguousarray(A.reshape(4, 34, 72)),
        B,
    )


def test_computed_operands() -> None:
    """What is not stored is computed first, by a kernel of its own."""
    a = numbers(136, 72, dtype=np.float32)
    assert check(lambda x, y: dot(build.cast(x, bfloat16), y, turn_b=True), a, B) == 2


def test_batches() -> None:
    """Matrices one after another, and those of heads side by side."""
    a, b = numbers(3, 40, 72), numbers(3, 72, 48, seed=1)
    check(lambda x, y: dot(x, y, batch=1), a, b)
    check(
        lambda x, y: dot(x, build.expand(build.reshape(y, (1, 72, 48)), (3, 72, 48)), batch=1),
        a,
        np.ascontiguousarray(b[0]),
    )  # one product of all rows
    check(
        lambda x, y: dot(
            x, build.expand(build.reshape(y, (2, 1, 64, 40)), (2, 3, 64, 40)), batch=2
        ),
        numbers(2, 3, 24, 64),
        numbers(2, 64, 40),
    )  # heads that share one
    heads = numbers(40, 2, 64), numbers(48, 2, 64, seed=1)
    check(lambda x, y: build.dot(x, y, batch=((1,), (1,)), contract=((2,), (2,))), *heads)


@pytest.mark.parametrize("dtype", (BF16, np.float16))
def test_dtypes(dtype: object) -> None:
    """16-bit floats, results in their own dtype and in float32."""
    a, b = A.astype(dtype), B.astype(dtype)
    check(lambda x, y: dot(x, y, turn_b=True), a, b)
    check(lambda x, y: build.cast(dot(x, y, turn_b=True), float32), a, b)


# ---- epilogues --------------------------------------------------------------------------------


def relu(x: Node) -> Node:
    """max(x, 0)."""
    return build.maximum(x, build.like(x, 0))


def silu(x: Node) -> Node:
    """x / (1 + exp(-x))."""
    return build.divide(x, build.add(build.like(x, 1), build.unary(ops.exp, build.negative(x))))


def over_rows(bias: Node, like: Node) -> Node:
    """A row added to every row."""
    return build.expand(build.reshape(bias, (1, like.shape[1])), like.shape)


def with_bias(x: Node, w: Node, bias: Node) -> Node:
    """Bias."""
    product = dot(x, w, turn_b=True)
    return build.add(product, over_rows(bias, product))


EPILOGUES: dict[str, tuple[Made, tuple[np.ndarray, ...]]] = {
    "bias": (with_bias, (BIAS,)),
    "bias, relu": (lambda x, w, c: relu(with_bias(x, w, c)), (BIAS,)),
    "silu": (lambda x, w: silu(dot(x, w, turn_b=True)), ()),
    "scaled": (lambda x, w: build.multiply(dot(x, w, turn_b=True), 0.125), ()),
    "reshaped": (lambda x, w: build.reshape(dot(x, w, turn_b=True), (x.shape[0], 4, 24)), ()),
    "several": (lambda x, w: [p := dot(x, w, turn_b=True), relu(p), build.cast(p, float32)], ()),
    "bias per row of a batch": (
        lambda x, w, c: build.multiply(with_bias(x, w, c), with_bias(x, w, c)),
        (BIAS,),
    ),
}


@pytest.mark.parametrize("rows", (A, FEW), ids=("many", "few"))
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, rows: np.ndarray) -> None:
    """What follows a dot is computed in its kernel."""
    function, more = EPILOGUES[name]
    assert check(function, rows, B, *more) == 1


@pytest.mark.parametrize("rows", (A, FEW), ids=("many", "few"))
def test_residual(rows: np.ndarray) -> None:
    """A matrix of the result's shape is added."""
    rest = np.ascontiguousarray(REST[: len(rows)])
    assert (
        check(lambda x, w, c, r: relu(build.add(with_bias(x, w, c), r)), rows, B, BIAS, rest) == 1
    )


def residual(m: int, dtype: DType = bfloat16, batch: tuple[int, ...] = ()) -> tuple[int, int]:
    """How many copies and loads read what is added to a product of m rows."""
    shapes = ((m, 256), (512, 256), (m, 512))
    x, w, r = (build.input_((*batch, *s), d) for s, d in zip(shapes, (bfloat16, bfloat16, dtype)))
    product = dot(x, w, turn_b=True, batch=len(batch))
    (kernel,) = schedule_for([x, w, r], [build.add(product, build.cast(r, bfloat16))], H200).kernels
    (body,) = (s.body for s in kernel.steps if isinstance(s, Launch))
    nodes = [node for node, _ in walk(body.block)]
    copies = [n for n in nodes if n.op.name in ("copy_async", "copy_multicast")]
    added = [n for n in copies if n.inputs[1].attrs["name"].startswith("in2")]
    return len(added), sum(n.op.name == "load" for n in nodes)


def test_what_is_added_comes_through_the_ring() -> None:
    """For many rows, in the operands' dtype; few rows and other dtypes are loaded."""
    assert residual(2048) == (2, 0)
    assert residual(256, batch=(3,)) == (2, 0)
    for copies, loads in (residual(16), residual(2048, float32)):
        assert copies == 0 and loads > 0


def test_several_read_matrices() -> None:
    """Two matrices of the result's shape, of which one is read twice, and a batch of them."""
    other = numbers(*REST.shape, seed=9)
    check(
        lambda x, w, r, s: build.add(build.multiply(dot(x, w, turn_b=True), s), build.add(r, s)),
        A,
        B,
        REST,
        other,
    )
    a, b, r = numbers(2, 72, 64), numbers(2, 64, 48, seed=1), numbers(2, 72, 48, seed=2)
    check(lambda x, y, z: build.add(dot(x, y, batch=1), z), a, b, r)


@pytest.mark.parametrize("rows", (A, FEW), ids=("many", "few"))
def test_gated(rows: np.ndarray) -> None:
    """silu(x @ gate) * (x @ up)."""
    up = numbers(96, 72, seed=5)
    check(
        lambda x, g, u: build.multiply(silu(dot(x, g, turn_b=True)), dot(x, u, turn_b=True)),
        rows,
        B,
        up,
    )


def test_symbolic_rows() -> None:
    """Rows that are known only when it runs."""
    m = symbol("m", 1, 200)
    a, b = build.input_((m, 72), bfloat16), build.input_((96, 72), bfloat16)
    output = relu(dot(a, b, turn_b=True))
    assert is_wide(schedule_for([a, b], [output], H200))
    for rows in (1, 136):
        (found,) = run_interpreted(H200, [a, b], [output], [A[:rows].copy(), B], {"m": rows})
        want = np.maximum(A[:rows].astype(np.float64) @ B.T.astype(np.float64), 0)
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=1e-2, atol=1e-1)


def test_simulated(assembled: None) -> None:  # noqa: F811
    """Down to PTX: epilogues that read and compute, of many rows and of few."""
    few, rest = np.ascontiguousarray(A[:8]), np.ascontiguousarray(REST[:8])

    def residual(x: Node, w: Node, bias: Node, r: Node) -> Node:
        return silu(build.add(with_bias(x, w, bias), r))

    check_graph(residual, np.ascontiguousarray(A[:72]), B, BIAS, np.ascontiguousarray(REST[:72]))
    check_graph(residual, few, B, BIAS, rest)
    check_graph(lambda x, w: [p := dot(x, w, turn_b=True), relu(p)], few, B)
    assert len(TEXTS) == 3 and all("wgmma" in text for text in TEXTS)


# ---- what the plain matmul takes instead --------------------------------------------------------


def half(x: Node, start: int) -> Node:
    """64 columns from some column on."""
    return build.slice_axis(x, 1, start, start + 64)


PLAIN: dict[str, tuple[Made, tuple[np.ndarray, ...]]] = {
    "rows that are no multiple of 16 bytes": (build.matmul, (numbers(24, 36), numbers(36, 40))),
    "results whose rows are none": (build.matmul, (numbers(24, 40), numbers(40, 36))),
    "an operand that begins within a row": (
        lambda x, y: build.matmul(half(x, 8), y),
        (numbers(24, 72), numbers(64, 40)),
    ),
    "a padded operand": (
        lambda x, y: build.matmul(build.pad(x, (0, 8), (0, 0)), y),
        (numbers(24, 56), numbers(64, 40)),
    ),
    "integers": (
        build.matmul,
        (
            np.arange(24 * 64, dtype=np.int8).reshape(24, 64),
            np.arange(64 * 48, dtype=np.int8).reshape(64, 48),
        ),
    ),
    "a batch that has no stride": (
        lambda x, y: build.dot(x, y, batch=((0, 2), (0, 1)), contract=((3,), (2,))),
        (numbers(2, 24, 3, 64), numbers(2, 3, 64, 40)),
    ),
    "results of 64 bits": (
        lambda x, y: build.cast(build.matmul(x, y), BY_NUMPY[np.dtype(np.int64)]),
        ((numbers(24, 64) > 1).astype(BF16), (numbers(64, 40) > 1).astype(BF16)),
    ),
}


@pytest.mark.parametrize("name", ["int8", "int32"])
def test_whole_results(name: str) -> None:
    """A product of floats may be stored as whole numbers."""
    values = ((numbers(24, 64) > 1).astype(BF16), (numbers(64, 48) > 1).astype(BF16))
    check(lambda x, y: build.cast(build.matmul(x, y), BY_NUMPY[np.dtype(name)]), *values)


@pytest.mark.parametrize("why", PLAIN)
def test_falls_back(why: str) -> None:
    """To the plain tiled matmul, with the same numbers."""
    function, values = PLAIN[why]
    check(function, *values, wide=False)


def test_targets_without_such_units() -> None:
    """Only asynchronous matrix units take it."""
    check(lambda x, y: dot(x, y, turn_b=True), A, B, wide=False, target=A100)
    check(lambda x, y: dot(x, y, turn_b=True), A, B, wide=False, target=replace(H200, matrix=()))


def test_symbolic_columns() -> None:
    """Columns must be known: tensor maps and tiles are made for them."""
    n = symbol("n", 8, 96)
    a, b = build.input_((136, 72), bfloat16), build.input_((72, n), bfloat16)
    output = build.matmul(a, b)
    assert not is_wide(schedule_for([a, b], [output], H200))


# ---- checks -------------------------------------------------------------------------------------


def test_a_kernel_that_races_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under verify every placed Body passes the checks before launch."""
    assert config().verify
    monkeypatch.setattr(matmul.WideMatmul, "release", lambda self, stage: None)
    nodes = [build.input_(s, bfloat16) for s in ((2048, 4096), (4096, 2048))]
    with pytest.raises(InternalError, match="deadlock"):
        schedule_for(nodes, [build.matmul(*nodes)], H200)


def test_launches_are_marked() -> None:
    """Weights that no kernel writes are constants: they may be read before the dependency."""
    nodes = [build.input_(v.shape, bfloat16) for v in (A, B)]
    machine = Machine(schedule_for(nodes, [dot(*nodes, turn_b=True)], H200), [A, B], {}, H200)
    machine.run()
    (body,) = machine.bodies
    uses = {p.attrs["name"]: p.type.use for p in body.parameters}
    assert sorted(uses.values()) == ["constant", "constant", "result"]


@pytest.mark.parametrize(
    "rows,columns,depth,wide",
    [
        (1, 40, 6400, True),
        (1, 40, 6401, False),
        (5, 1, 6401, False),
        (1, 1, 6401, False),
    ],
)
def test_one_row_or_column_of_a_long_product(
    rows: int, columns: int, depth: int, wide: bool
) -> None:
    """Rows too long for a program stay dots: by the library, by plain tiles if unaligned."""
    check(
        lambda x, w: dot(x, w, turn_b=True),
        numbers(rows, depth),
        numbers(columns, depth, seed=1),
        wide=wide,
    )


@pytest.mark.parametrize("k", [4096, 5120])
def test_one_row_stores_several_results(k: int) -> None:
    """Programs of one weight's row (long ones) store elements; shorter rows come in fours."""

    def stored(x: Node, w: Node) -> list[Node]:
        product = dot(x, w, turn_b=True)
        wide = build.cast(product, float32)
        return [product, build.multiply(wide, 0.5), build.unary(ops.exp, wide)]

    weights = numbers(512, k, seed=1, dtype=np.float32) * k**-0.5
    assert check(stored, numbers(1, k), weights.astype(BF16)) == 1


@pytest.mark.parametrize("target", [A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("k", [576, 640, 768, 2560])
def test_rows_of_any_lines(k: int, target: Target) -> None:
    """One token times weights whose rows are lines of 256, 128 or 64: streamed, behind a norm."""

    def normed(x: Node, w: Node, weight: Node) -> Node:
        square = build.multiply(build.cast(x, float32), build.cast(x, float32))
        mean = build.multiply(build.sum_(square, 1, keep=True), build.constant(1 / k, float32))
        root = ops.square_root(build.add(mean, build.constant(1e-5, float32)))
        rows = build.cast(build.divide(build.cast(x, float32), root), x.dtype)
        return dot(build.multiply(rows, w), weight, turn_b=True)

    values = numbers(1, k), numbers(1, k, seed=1), numbers(256, k, seed=2)
    check(normed, *values, target=target)


@pytest.mark.parametrize("target", [A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("kind", [float8_e4m3, int8], ids=str)
@pytest.mark.parametrize("k", [576, 1024, 12288])
@pytest.mark.parametrize("sizes", [(64,), (64, 12)], ids=str)
def test_codes_that_their_products_make(
    sizes: tuple[int, ...], k: int, kind: DType, target: Target
) -> None:
    """One token's codes are made where they are multiplied, in rows of any length, also where
    another product of them takes no lines of weights."""
    random, scale = np.random.default_rng(k), 1 if kind.is_float else 20
    token = (random.standard_normal((1, k)) * scale).astype(ml_dtypes.bfloat16)
    weights = [(random.standard_normal((n, k)) * scale).astype(kind.numpy) for n in sizes]
    x, *given = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in (token, *weights)]
    codes, sums = build.cast(build.multiply(x, 2.0), kind), float32 if kind.is_float else int32
    products = [build.dot(codes, w, ((), ()), ((1,), (1,)), sums) for w in given]
    found = run_interpreted(target, [x, *given], products, [token, *weights])
    exact = (token.astype(np.float32) * 2).astype(kind.numpy).astype(np.float64)
    for got, weight in zip(found, weights):
        wanted = exact @ weight.astype(np.float64).T
        away = np.linalg.norm(got - wanted)
        assert away <= (1e-3 if kind.is_float else 0) * np.linalg.norm(wanted)
