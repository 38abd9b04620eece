"""schedule/side_by_side.py: small launches as one, on the Tile interpreter and the simulator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from interpreted import run_interpreted

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from simulated import run_graph

from tilegrad.compiler.compile import schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core import format as formats
from tilegrad.core.target import H200
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.kernels.quantised import gpu as kernels
from tilegrad.kernels.quantised.shape import Around, QuantisedShape

TABLE = np.arange(40 * 24, dtype=np.float32).reshape(40, 24)
PLACES = np.array([3, 39, 0, 7, 7], np.int32)
OTHER = np.linspace(-1, 1, 300, dtype=np.float32).reshape(3, 100)


def pieces(table: Node, places: Node, other: Node) -> list[Node]:
    """Three values that have nothing to do with one another, and one that needs two of them."""
    rows = build.gather(table, [places], [0])
    sums = build.sum_(build.multiply(other, other), 1)
    zeros = build.add(places, 1)
    late = build.multiply(sums, build.reshape(build.sum_(rows, (0, 1)), (1,)))
    return [rows, sums, zeros, late]


def interpreted(*given: object) -> list[np.ndarray]:
    """Runs for an H200."""
    return run_interpreted(H200, *given)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [interpreted, run_graph])
def test_side_by_side(run: Callable) -> None:
    values = [TABLE, PLACES, OTHER]
    nodes = [build.input_(v.shape, dtypes.BY_NUMPY[v.dtype]) for v in values]
    outputs = pieces(*nodes)
    expected = interpret(outputs, dict(zip(nodes, values)))
    for got, wanted in zip(run(nodes, outputs, values), expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    names = [k.name for k in schedule_for(nodes, outputs, H200).kernels]
    assert len(names) <= 2 and "_and_" in names[0], names


def test_other_shapes_are_left_to_vanish() -> None:
    """Reshapes between kernels that are called have no launch: two of them are not made one."""
    first, second = (
        QuantisedShape(formats.Q4_1, 2 * columns, columns, tokens, dtypes.bfloat16)
        for columns, tokens in ((64, 1), (32, 2))
    )
    x = build.input_((1, 64), dtypes.bfloat16)
    parts = [[build.input_(s, d) for _, s, d in kernels.parts(q)] for q in (first, second)]
    callee = kernels.callee(first, H200, Around(splits=(64, 64)))
    halves = build.items(ops.call(x, *parts[0], callee=callee))
    turned = [build.reshape(y, (2, 32)) for y in halves]
    last = kernels.callee(second, H200)
    outputs = [ops.call(y, *parts[1], callee=last) for y in turned]
    found = schedule_for([x, *parts[0], *parts[1]], outputs, H200).kernels
    assert [k.name for k in found if k.steps and k.kind == "loops"] == []
