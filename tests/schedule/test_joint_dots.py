"""schedule/dot_joint.py: which dots join one launch, and that they compute the same.

Schedules for an H200 run on the Tile interpreter (some on the PTX simulator) and are held to the
Graph interpreter; kernels are counted with and without joining.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted
from judge import compare

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from assembled import assemble_all
from simulated import run_graph

from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.explain import explain_graph
from tilegrad.core import dtype as dtypes
from tilegrad.core.target import A100, H200, target_named
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.schedule import Schedule
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.prove import require

BF16 = ml_dtypes.bfloat16


def dot(x: Node, w: Node) -> Node:
    """x @ w^T."""
    return build.dot(x, w, batch=((), ()), contract=((1,), (1,)))


def silu(x: Node) -> Node:
    """x * sigmoid(x)."""
    below = build.add(build.unary(ops.exp, build.multiply(x, -1.0)), 1.0)
    return build.multiply(x, build.unary(ops.reciprocal, below))


def draw(*shape: int, seed: int = 0, dtype: object = BF16) -> np.ndarray:
    """Random numbers."""
    return (np.random.default_rng(seed + sum(shape)).standard_normal(shape) / 4).astype(dtype)


def graph(function: Callable, values: Sequence[np.ndarray]) -> tuple[list[Node], list[Node]]:
    """Inputs and outputs of a Graph."""
    nodes = [build.input_(v.shape, dtypes.BY_NUMPY[v.dtype]) for v in values]
    made = function(*nodes)
    return nodes, [made] if isinstance(made, Node) else list(made)


def kinds(schedule: Schedule) -> list[str]:
    """The kinds of a Schedule's Kernels, in order."""
    return [k.kind for k in schedule.kernels]


def check(function: Callable, *values: np.ndarray, run: Callable | None = None) -> list[str]:
    """Compare with the Graph interpreter; gives the kinds of Kernels."""
    nodes, outputs = graph(function, values)
    expected = interpret(outputs, dict(zip(nodes, values)))
    if run is None:
        got = run_interpreted(H200, nodes, outputs, values)
    else:
        got = run(nodes, outputs, values)
    for node, a, b in zip(outputs, got, expected):
        compare(node, a, b)
    return kinds(schedule_for(nodes, outputs, H200))


def qkv(x: Node, q: Node, k: Node, v: Node) -> list[Node]:
    return [dot(x, q), dot(x, k), dot(x, v)]


def with_biases(x: Node, q: Node, k: Node, v: Node, *biases: Node) -> list[Node]:
    return [build.add(y, b) for y, b in zip(qkv(x, q, k, v), biases)]


def gated(x: Node, g: Node, u: Node) -> Node:
    return build.multiply(silu(dot(x, g)), dot(x, u))


WEIGHTS = (draw(136, 136), draw(72, 136, seed=1), draw(40, 136, seed=2))
PAIR = (draw(200, 136), draw(200, 136, seed=1))


@pytest.mark.parametrize("m", [8, 200])
def test_results_stay_apart(m: int) -> None:
    assert check(qkv, draw(m, 136), *WEIGHTS) == ["dots"]
    biases = [draw(w.shape[0], seed=5) for w in WEIGHTS]
    assert check(with_biases, draw(m, 136), *WEIGHTS, *biases) == ["dots"]


@pytest.mark.parametrize("m", [8, 200])
def test_gated(m: int) -> None:
    assert check(gated, draw(m, 136), *PAIR) == ["gated"]

    def other_way(x, g, u):
        return build.multiply(dot(x, u), build.unary(ops.tanh, build.add(dot(x, g), 1.0)))

    assert check(other_way, draw(m, 136), *PAIR) == ["gated"]


@pytest.mark.parametrize("m", [8, 130])
def test_gated_with_products_stored(m: int) -> None:
    def several(x, g, u):
        a, b = dot(x, g), dot(x, u)
        return [build.multiply(silu(a), b), a, b]

    assert check(several, draw(m, 136), *PAIR) == ["gated"]


def test_only_the_gated_result_is_stored() -> None:
    values = (draw(16, 136), *PAIR)
    schedule = schedule_for(*graph(gated, values), H200)
    assert [s.kind for s in schedule.slots] == ["input"] * 3 + ["output"]
    assert schedule.arena_bytes == 0


def test_gated_and_apart_of_one_input() -> None:
    def both(x, q, k, g, u):
        return [dot(x, q), gated(x, g, u), dot(x, k)]

    assert sorted(check(both, draw(24, 136), *WEIGHTS[:2], *PAIR)) == ["dots", "gated"]


def test_results_that_later_kernels_read() -> None:
    def layer(x, g, u, d):
        h = dot(gated(x, g, u), d)
        return [build.add(h, x), build.sum_(h, 1)]

    assert check(layer, draw(24, 136), *PAIR, draw(136, 200))[0] == "gated"


@pytest.mark.parametrize("n", [64, 72, 200])
def test_pieces_beyond_the_last_column(n: int) -> None:
    """A tile wider than its matrix reads and writes nothing beside it."""

    def one(x, w, r):
        y = dot(x, w)
        return [build.add(y, r), build.multiply(y, r)]

    def two(x, w, u, r):
        return build.multiply(build.add(dot(x, w), r), dot(x, u))

    x, w, u, r = draw(200, 128), draw(n, 128), draw(n, 128, seed=1), draw(200, n, seed=2)
    assert check(one, x, w, r) == ["dot"]
    assert check(two, x, w, u, r) == ["gated"]


def test_shapes_of_heads() -> None:
    def heads(x, q, k):
        return [
            build.permute(build.reshape(dot(x, w), (24, w.shape[0] // 8, 8)), (1, 0, 2))
            for w in (q, k)
        ]

    assert check(heads, draw(24, 136), *WEIGHTS[:2])[0] == "dots"


def test_more_weights_than_one_launch_takes() -> None:
    def many(x, *weights):
        return [dot(x, w) for w in weights]

    weights = [draw(40, 64, seed=i) for i in range(6)]
    assert check(many, draw(16, 64), *weights) == ["dots", "dots"]


def test_symbolic_tokens() -> None:
    m = symbol("tokens", 1, 300)
    x = build.input_((m, 136), dtypes.bfloat16)
    weights = [build.input_(w.shape, dtypes.bfloat16) for w in (*WEIGHTS, *PAIR)]
    outputs = [*qkv(x, *weights[:3]), gated(build.multiply(x, 2.0), *weights[3:])]
    schedule = schedule_for([x, *weights], outputs, H200)
    assert sorted(k for k in kinds(schedule) if k != "loops") == ["dots", "gated"]
    values = [draw(70, 136), *WEIGHTS, *PAIR]
    got = run_interpreted(H200, [x, *weights], outputs, values, {"tokens": 70})
    fixed = [build.input_((70, 136), dtypes.bfloat16), *weights]
    wanted = [*qkv(fixed[0], *weights[:3]), gated(build.multiply(fixed[0], 2.0), *weights[3:])]
    for node, a, b in zip(wanted, got, interpret(wanted, dict(zip(fixed, values)))):
        compare(node, a, b)


@pytest.mark.parametrize("name", ["apart", "gated"])
def test_simulated(name: str) -> None:
    if name == "apart":
        biases = [draw(w.shape[0], seed=5) for w in WEIGHTS]
        found = check(with_biases, draw(8, 136), *WEIGHTS, *biases, run=run_graph)
    else:
        found = check(gated, draw(130, 136), *PAIR, run=run_graph)
    assert found == ["dots" if name == "apart" else "gated"]


# ---- what does not join ---------------------------------------------------------------------


def test_other_inputs() -> None:
    def two(x, y, a, b):
        return [dot(x, a), dot(y, b)]

    found = check(two, draw(24, 136), draw(24, 136, seed=9), *WEIGHTS[:2])
    assert found == ["dot", "dot"]


def test_one_needs_the_other() -> None:
    def chain(x, a, b):  # a weight computed of a product
        y = dot(x, a)
        return [dot(x, build.permute(build.matmul(build.permute(y, (1, 0)), y), (1, 0))), b]

    assert "dots" not in check(chain, draw(24, 136), draw(136, 136), draw(8, 8))


def test_products_that_are_not_read_at_their_own_element() -> None:
    def turned(x, g, u):
        return build.multiply(build.flip(dot(x, g), (1,)), dot(x, u))

    assert "gated" not in check(turned, draw(24, 136), *PAIR)

    def summed(x, g, u):
        total = build.sum_(dot(x, g), 1, keep=True)
        return build.multiply(build.expand(total, (24, 200)), dot(x, u))

    assert "gated" not in check(summed, draw(24, 136), *PAIR)


def test_what_the_library_does_not_take() -> None:
    odd = [draw(n, 136, seed=n) for n in (37, 41)]

    def two(x, a, b):
        return [dot(x, a), dot(x, b)]

    assert check(two, draw(24, 136), *odd) == ["dot", "dot"]
    wide = [draw(n, 64, dtype=np.float32) for n in (24, 40, 48)]
    assert check(two, *wide) == ["dot", "dot"]


def test_other_result_dtypes_stay_apart() -> None:
    def two(x, a, b):
        return [dot(x, a), build.cast(dot(x, b), dtypes.float32)]

    values = (draw(24, 136), *WEIGHTS[:2])
    assert kinds(schedule_for(*graph(two, values), H200)) == ["dot", "dot"]


def test_pairs_that_would_need_each_other() -> None:
    """Each pair may join alone; joined, either would stand between the groups of the other."""

    def crossed(x, y, a, b, c, d):
        first, third = dot(x, a), dot(y, c)
        second = build.multiply(build.subtract(first, third), dot(x, b))
        return [second, build.multiply(build.subtract(third, first), dot(y, d))]

    weights = [draw(40, 64, seed=i) for i in range(4)]
    found = check(crossed, draw(24, 64), draw(24, 64, seed=9), *weights)
    assert sorted(found) == ["dot", "dot", "gated"]
    found = check(lambda x, *w: crossed(x, x, *w), draw(24, 64), *weights)
    assert sorted(found) == ["dot", "dot", "gated"]


@pytest.mark.parametrize("target", [A100, target_named("avx2")], ids=lambda t: t.name)
def test_other_machines_stay_as_they_are(target) -> None:
    values = (draw(24, 136), *WEIGHTS)
    assert "dots" not in kinds(schedule_for(*graph(qkv, values), target))
    values = (draw(24, 136), *PAIR)
    assert "gated" not in kinds(schedule_for(*graph(gated, values), target))


# ---- a transformer's block ------------------------------------------------------------------

SIZES = (64, 32, 128)  # model, keys and values, inner


def norm(x: Node, w: Node) -> Node:
    wide = build.cast(x, dtypes.float32)
    mean = build.divide(build.sum_(build.multiply(wide, wide), 1, keep=True), float(x.shape[1]))
    scale = build.unary(ops.reciprocal, build.unary(ops.square_root, build.add(mean, 1e-5)))
    return build.multiply(build.cast(build.multiply(wide, scale), x.dtype), w)


def attention(q: Node, k: Node, v: Node, size: int) -> Node:
    tokens, heads = q.shape[0], q.shape[1] // size
    shared = k.shape[1] // size
    q = build.reshape(q, (tokens, shared, heads // shared, size))
    k, v = (build.reshape(x, (tokens, shared, size)) for x in (k, v))
    scores = build.dot(q, k, batch=((1,), (1,)), contract=((3,), (2,)))  # shared, t, heads, t
    shifted = build.subtract(scores, build.max_(scores, 3, keep=True))
    powers = build.unary(ops.exp, build.cast(shifted, dtypes.float32))
    share = build.divide(powers, build.sum_(powers, 3, keep=True))
    mixed = build.dot(build.cast(share, q.dtype), v, batch=((0,), (1,)), contract=((3,), (0,)))
    return build.reshape(build.permute(mixed, (1, 0, 2, 3)), (tokens, heads * size))


def block(x, first, q, k, v, o, second, g, u, d) -> Node:
    h = norm(x, first)
    x = build.add(x, dot(attention(*qkv(h, q, k, v), 16), o))
    return build.add(x, dot(gated(norm(x, second), g, u), d))


def block_values(tokens: int) -> list[np.ndarray]:
    model, shared, inner = SIZES
    shapes = [
        (tokens, model),
        (model,),
        (model, model),
        (shared, model),
        (shared, model),
        (model, model),
        (model,),
        (inner, model),
        (inner, model),
        (model, inner),
    ]
    return [draw(*s, seed=i) for i, s in enumerate(shapes)]


def test_kernels_of_a_block() -> None:
    values = block_values(24)
    found = check(block, *values)
    assert found.count("dots") == found.count("gated") == 1
    before = kinds(schedule_for(*graph(block, values), H200, without=["join dots"]))
    assert len(before) - len(found) == 3  # k and v with q; gate with up
    assert (len(before), len(found)) == (10, 7)  # attention is one of them


def test_explain_shows_joint_kernels() -> None:
    nodes, outputs = graph(block, block_values(24))
    shown = str(explain_graph(nodes, outputs, target=H200, level="summary"))
    assert "dots_dot" in shown and "gated_dot" in shown


# ---- sizes of a real model ------------------------------------------------------------------


def real(name: str, m: int) -> Schedule:
    """q/k/v with biases, or gate/up with its products stored, of 4096 wide inputs."""
    x = build.input_((m, 4096), dtypes.bfloat16)
    sizes = (4096, 1024, 1024) if name == "apart" else (14336, 14336)
    weights = [build.input_((n, 4096), dtypes.bfloat16) for n in sizes]
    if name == "apart":
        biases = [build.input_((n,), dtypes.bfloat16) for n in sizes]
        return schedule_for([x, *weights, *biases], with_biases(x, *weights, *biases), H200)
    a, b = (dot(x, w) for w in weights)
    outputs = [build.multiply(silu(a), b), *([a, b] if name == "stored" else [])]
    return schedule_for([x, *weights], outputs, H200)


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
def test_real_sizes_assemble() -> None:
    texts = {}
    for name in ("apart", "stored"):
        for m in (16, 512, 4096):
            schedule = real(name, m)
            assert kinds(schedule) == ["dots" if name == "apart" else "gated"], (name, m)
            body = schedule.kernels[0].steps[0].body
            assert {f.rule for f in require(body, H200)} <= {"bank_conflict"}
            texts[f"{name} {m}"], _ = emit(body, "joint", H200)
    for name, made in assemble_all(texts, H200.cpu).items():
        assert made.warnings == [], name
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0, name
