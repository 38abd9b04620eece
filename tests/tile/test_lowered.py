"""Bodies that the compiler makes from Graphs: they verify, print, parse, and the interpreter and
the machine compute the same with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from test_llvm_emit import HOST, body_symbols, run_native

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import bfloat16, float32, int8
from tilegrad.graph import build as g
from tilegrad.graph import ops as graph_ops
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import evaluate, symbol
from tilegrad.ir.types import Memory
from tilegrad.schedule.schedule import Launch
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.check import verify_body
from tilegrad.tile.text import body_text, parse_body

N = symbol("rows", 1, 40)


def x(*shape: object, dtype: object = float32) -> Node:
    """An input."""
    return g.input_(shape, dtype)


def softmax(a: Node) -> Node:
    """Along the last axis."""
    e = g.unary(graph_ops.exp, g.subtract(a, g.max_(a, -1, keep=True)))
    return g.divide(e, g.sum_(e, -1, keep=True))


CASES: dict[str, Callable[[], tuple[list[Node], Node]]] = {
    "chain": lambda: (i := [x(5, 7), x(5, 7), x(7)], g.sum_(g.add(g.multiply(i[0], i[1]), i[2]))),
    "softmax": lambda: (i := [x(6, 33)], softmax(i[0])),
    "symbolic softmax": lambda: (i := [x(N, 19)], softmax(i[0])),
    "column sums": lambda: (i := [x(13, 21)], g.sum_(i[0], 0)),
    "transpose": lambda: (i := [x(9, 13)], g.add(g.transpose(i[0]), 1.0)),
    "matmul": lambda: (i := [x(33, 47), x(47, 29)], g.matmul(i[0], i[1])),
    "symbolic matmul": lambda: (i := [x(N, 32), x(32, 48)], g.matmul(i[0], i[1])),
    "matrix vector": lambda: (i := [x(33, 47), x(47)], g.matmul(i[0], i[1])),
    "bfloat16": lambda: (
        i := [x(64, 96, dtype=bfloat16), x(96, 64, dtype=bfloat16)],
        g.matmul(i[0], i[1]),
    ),
    "int8": lambda: (i := [x(20, 70, dtype=int8), x(70, 30, dtype=int8)], g.matmul(i[0], i[1])),
    "concatenate": lambda: (i := [x(3, 4), x(2, 4)], g.concatenate(i, 0)),
    "slice": lambda: (i := [x(9, 13)], g.slice_axis(i[0], 1, 2, 11, 3)),
}


def fill(parameter: Node, bound: dict[str, int], seed: int) -> np.ndarray:
    """Random storage for a parameter."""
    type_ = parameter.type
    assert isinstance(type_, Memory)
    sizes = [evaluate(s, bound) for s in type_.shape]
    strides = [evaluate(s, bound) for s in type_.element_strides()]
    count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    values = np.random.default_rng(seed).standard_normal(max(1, count))
    return (values * (1 if type_.dtype.is_float else 4)).astype(type_.dtype.numpy)


def compare(body: Body, rows: int) -> None:
    """The same Body through both."""
    bound = {s.name: rows for s in body_symbols(body)}
    ours = [fill(p, bound, i) for i, p in enumerate(body.parameters)]
    theirs = [m.copy() for m in ours]
    interpret.run(body, ours, bound)
    run_native(body, theirs, bound)
    for parameter, a, b in zip(body.parameters, ours, theirs):
        loose = 2e-2 if parameter.dtype.bits < 32 else 2e-4
        np.testing.assert_allclose(
            b.astype(np.float64),
            a.astype(np.float64),
            rtol=loose,
            atol=1e-4,
            err_msg=parameter.attrs["name"],
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_lowered_bodies(name: str) -> None:
    """Every launch of a small Graph."""
    inputs, output = CASES[name]()
    schedule = schedule_for(inputs, [output], HOST)
    bodies = [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert bodies
    for body in bodies:
        verify_body(body, "portable", HOST)
        text = body_text(body)
        parsed = parse_body(text)
        assert body_text(parsed) == text
        verify_body(parsed, "portable", HOST)
        for rows in (1, 11, 40):
            compare(parsed, rows)
