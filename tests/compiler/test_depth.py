"""Deep and wide Graphs: no pass recurses over depth, and work grows as the Graph does.

Work is counted in lines of Python that run, not in seconds: twice the Graph may take about twice
as many. The limit of recursion is Python's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.flatten import program_text, recipe_of
from tilegrad.core.dtype import bfloat16, float32, int64
from tilegrad.core.target import AVX512, H200, SSE2, Target
from tilegrad.graph import build, ops
from tilegrad.graph.batch import batched
from tilegrad.graph.forward import tangents
from tilegrad.graph.grad import gradients
from tilegrad.graph.interpret import interpret
from tilegrad.graph.recognize import recognize
from tilegrad.ir.block import pure_block
from tilegrad.ir.fingerprint import digest, structure
from tilegrad.ir.node import Node, topological
from tilegrad.ir.rewrite import replace
from tilegrad.ir.text import parse_block, print_block
from tilegrad.ir.verify import verify
from tilegrad.runtime.recipe import Recipe
from tilegrad.tile.check import verify_body
from tilegrad.tile.legalize import legalize
from tilegrad.tile.text import body_text, parse_body

Made = Callable[[int], tuple[list[Node], list[Node]]]
TARGETS = [AVX512.with_cores(2), H200]


def given(*shape: int) -> Node:
    """An input."""
    return build.input_(shape, float32)


def chain(n: int) -> tuple[list[Node], list[Node]]:
    """n elementwise ops in a row."""
    x = z = given(4, 8)
    for i in range(n):
        z = (build.multiply(z, 1.01), build.add(z, 0.5), build.unary(ops.sin, z))[i % 3]
    return [x], [z]


def total(n: int) -> tuple[list[Node], list[Node]]:
    """The sum of n arrays."""
    xs = [given(4, 8) for _ in range(n)]
    z = xs[0]
    for x in xs[1:]:
        z = build.add(z, x)
    return xs, [z]


def parts(n: int) -> tuple[list[Node], list[Node]]:
    """n arrays behind one another, along both axes."""
    xs = [given(4, 8) for _ in range(n)]
    return xs, [build.concatenate(xs, 0), build.concatenate(xs, 1)]


def computed_parts(n: int) -> tuple[list[Node], list[Node]]:
    """n sums, and n numbers, behind one another."""
    xs, numbers = [given(4, 8) for _ in range(n)], [given() for _ in range(n)]
    sums = [build.add(x, 1.0) for x in xs]
    rows = [build.broadcast_to(x, (1, 8)) for x in numbers]
    return [*xs, *numbers], [build.concatenate(sums, 0), build.concatenate(rows, 0)]


def updates(n: int) -> tuple[list[Node], list[Node]]:
    """n writes into a state."""
    state = z = given(8)
    for i in range(n):
        place = build.full((1,), i % 8, int64)
        z = ops.update(z, build.full((1,), float(i), float32), place, axes=(0,), mode="set")
    return [state], [z]


def rows(n: int) -> tuple[list[Node], list[Node]]:
    """n times divided by the sum of each row."""
    x = z = given(4, 8)
    for _ in range(n):
        z = build.divide(z, build.broadcast_to(build.sum_(z, (1,), True), (4, 8)))
    return [x], [z]


def recurrent(n: int) -> tuple[list[Node], list[Node]]:
    """The derivative of n steps of a recurrent network by its weight."""
    x, w, h = given(n, 2, 8), given(8, 8), build.full((2, 8), 0.0, float32)
    for i in range(n):
        step = build.reshape(build.slice_axis(x, 0, i, i + 1), (2, 8))
        product = build.dot(h, w, batch=((), ()), contract=((1,), (0,)))
        h = build.unary(ops.tanh, build.add(product, step))
    return [x, w], [g for g in gradients([h], [build.like(h, 1.0)], [w]) if g is not None]


GRAPHS: dict[str, Made] = {
    f.__name__: f for f in (chain, total, parts, computed_parts, updates, rows, recurrent)
}


def calls(function: Callable[[], Any]) -> int:
    """How many functions were called and how often one was left to go on later."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


SIZES = [(name, 25 if name == "recurrent" else 50) for name in GRAPHS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(
    "name, size", [*SIZES, *(pytest.param(n, 2 * s, marks=pytest.mark.slow) for n, s in SIZES)]
)
def test_work_grows_as_the_graph_does(name: str, size: int, target: Target) -> None:
    counts = []
    for n in (size, 2 * size):
        inputs, outputs = GRAPHS[name](n)

        def compiled(inputs: Sequence[Node] = inputs, outputs: Sequence[Node] = outputs) -> None:
            structure(inputs, outputs)
            recipe, _ = recipe_of(schedule_for(inputs, outputs, target), target)
            Recipe.from_text(recipe.to_text())

        counts.append(calls(compiled))
    assert counts[1] <= 2.5 * counts[0]


# ---- depth -----------------------------------------------------------------------------------

DEPTH = 1100  # one frame of Python each would be too many


def deep(step: Callable[[Node, int], Node], x: Node) -> Node:
    """`step` taken many times."""
    for i in range(DEPTH):
        x = step(x, i)
    return x


X, Y, W = given(4, 8), given(4, 8), given(8, 8)
PLACES = build.iota_along((4, 8), 1)
CHAINS: dict[str, Node] = {
    "elementwise": deep(lambda z, i: build.unary(ops.sin, z) if i % 2 else build.add(z, Y), X),
    "sum": deep(lambda z, i: build.add(z, build.multiply(Y, float(i))), X),
    "movement": deep(lambda z, i: build.permute(build.reshape(z, (8, 4)), (1, 0)), X),
    "masks": deep(lambda z, i: build.where(build.less(PLACES, i % 9), z, Y), X),
    "conditions": build.where(
        deep(
            lambda m, i: build.binary(ops.bit_and, m, build.less(PLACES, i % 9)),
            build.less(PLACES, 7),
        ),
        X,
        Y,
    ),
    "places": build.where(build.less(deep(lambda z, i: build.add(z, 1 + i % 3), PLACES), 9), X, Y),
    "rows": deep(
        lambda z, i: build.subtract(z, build.broadcast_to(build.max_(z, (1,), True), (4, 8))), X
    ),
    "products": deep(lambda z, i: build.multiply(z, Y), X),
    "dots": deep(
        lambda z, i: (
            build.dot(z, W, batch=((), ()), contract=((1,), (0,)))
            if i % 50 == 0
            else build.maximum(z, Y)
        ),
        X,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_nothing_recurses_over_a_graph(name: str) -> None:
    root = CHAINS[name]
    inputs = [n for n in topological([root]) if n.op is ops.input_]
    digest(structure(inputs, [root]))
    block = pure_block("deep", (), (root,))
    verify(block, ops.graph)
    text = print_block(block, "graph", locations=True)
    assert print_block(parse_block(text), "graph", locations=True) == text
    replace([root], {X: Y})
    recognize([root])
    gradients([root], [build.like(root, 1.0)], [X])
    tangents([root], [X], [Y])
    batched([root], {X: build.input_((3, 4, 8), float32)}, 3)
    interpret([root], {n: np.ones(n.shape, n.dtype.numpy) for n in inputs})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("name", CHAINS)
def test_no_pass_recurses_over_a_graph(name: str, target: Target) -> None:
    root = CHAINS[name]
    inputs = [n for n in topological([root]) if n.op is ops.input_]
    assert schedule_for(inputs, [root], target).kernels


SCORES = (1, 2, 16, 16)
ROWS, COLUMNS = build.iota_along(SCORES, 2), build.iota_along(SCORES, 3)
BIAS = given(*SCORES)
MASKED: dict[str, Callable[[Node], Node]] = {
    "biases": lambda s: deep(lambda z, i: build.add(z, BIAS), s),
    "scales": lambda s: deep(lambda z, i: build.multiply(z, 1 + i * 1e-6), s),
    "softcaps": lambda s: deep(lambda z, i: build.unary(ops.tanh, z), s),
    "masks in masks": lambda s: deep(
        lambda z, i: build.where(build.less(COLUMNS, build.add(ROWS, i + 1)), z, -1e30), s
    ),
    "conditions": lambda s: build.where(
        deep(
            lambda m, i: build.binary(ops.bit_and, m, build.less(COLUMNS, build.add(ROWS, i))),
            build.less(COLUMNS, ROWS),
        ),
        s,
        float("-inf"),
    ),
    "places": lambda s: build.where(
        build.less(deep(lambda z, i: build.add(z, build.multiply(ROWS, i % 3)), COLUMNS), 9),
        s,
        float("-inf"),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MASKED)
def test_deep_scores_are_no_attention_and_no_trouble(name: str) -> None:
    q, k, v = (given(1, 2, 16, 8) for _ in range(3))
    batch = ((0, 1), (0, 1))
    s = MASKED[name](build.dot(q, k, batch=batch, contract=((3,), (3,))))
    top = build.broadcast_to(build.max_(s, (3,), True), SCORES)
    e = build.unary(ops.exp, build.subtract(s, top))
    p = build.divide(e, build.broadcast_to(build.sum_(e, (3,), True), SCORES))
    root = build.dot(p, v, batch=batch, contract=((3,), (2,)))
    schedule = schedule_for([q, k, v, BIAS], [root], H200)
    assert len(schedule.kernels) > 1  # attention would be one


@pytest.mark.parametrize("op", [ops.add, ops.multiply])
def test_what_doubles_is_not_written_out(op: Any) -> None:
    """z + z, 60 times, is 61 Nodes and 2**60 terms."""
    z = x = given(4, 64)
    for _ in range(60):
        z = build.multiply(op(z, z), 0.5)
    w = build.input_((64, 64), bfloat16)
    dot = build.dot(build.cast(z, bfloat16), w, batch=((), ()), contract=((1,), (0,)))
    assert len(schedule_for([x, w], [build.sum_(z, (1,)), dot], H200).kernels) < 100


def test_nothing_recurses_over_a_body() -> None:
    @kernel
    def long(x):
        i, out = tile.grid(4), tile.result(x.shape, x.dtype)
        z = tile.load(x, (i, 0), (64,))
        for k in range(DEPTH):
            z = z * 1.01 + 0.5 if k % 2 else tile.sin(z)
        tile.store(out, (i, 0), z)

    x = tg.ones(4, 64)
    bound, tensors = long._bind([x], {})
    body = long._callee(bound, tensors, long.plan).launches[0][0]
    again = parse_body(body_text(body))
    assert body_text(again) == body_text(body)
    for target in (SSE2, AVX512):
        verify_body(legalize(again, target), "portable", target)
    long.interpret(x)
    for target in TARGETS:
        program_text(body, target)


def test_the_limit_of_recursion_is_python_s_own() -> None:
    assert sys.getrecursionlimit() <= 1000
