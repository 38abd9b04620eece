"""compiler/norms.py: where a norm's factor goes behind the products, and where it stays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tilegrad.compiler.norms import RULE, block_of, norm_of, norms_behind_products
from tilegrad.compiler.pipeline import GRAPH
from tilegrad.core import dtype as dtypes
from tilegrad.core.dtype import DType
from tilegrad.core.target import A100, H200
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.rewrite import Log


def norm(x: Node, w: Node) -> Node:
    """RMS norm, as models write it."""
    wide = build.cast(x, dtypes.float32)
    mean = build.multiply(build.sum_(build.multiply(wide, wide), 1, keep=True), 1.0 / x.shape[-1])
    factor = build.unary(ops.reciprocal, build.unary(ops.square_root, build.add(mean, 1e-5)))
    found = build.multiply(build.multiply(wide, factor), build.cast(w, dtypes.float32))
    return build.cast(found, x.dtype)


def dot(x: Node, w: Node) -> Node:
    """x @ w^T."""
    return build.dot(x, w, batch=((), ()), contract=((1,), (1,)))


def inputs(rows: int, columns: int = 256, dtype: DType = dtypes.bfloat16) -> list[Node]:
    """x, the norm's weight, two matrices."""
    return [
        build.input_(s, dtype) for s in ((rows, columns), (columns,), (64, columns), (32, columns))
    ]


def fired(results: list[Node]) -> tuple[list[Node], int]:
    """The Graph after the pass, and how many products it changed."""
    log = Log()
    return norms_behind_products([], results, log), log.fired.get(RULE, 0)


@pytest.mark.parametrize("rows", [1, 8, 72, 200])
def test_values_stay(rows: int) -> None:
    nodes = inputs(rows)
    y = norm(*nodes[:2])
    before = [dot(y, nodes[2]), build.multiply(dot(y, nodes[3]), 2.0)]
    after, count = fired(before)
    assert count == 2
    draw = np.random.default_rng(rows)
    values = {n: (3 * draw.standard_normal(n.shape)).astype(ml_dtypes.bfloat16) for n in nodes}
    for got, wanted in zip(interpret(after, values), interpret(before, values)):
        scale = np.abs(wanted.astype(np.float64)).max()
        assert np.abs(got.astype(np.float64) - wanted.astype(np.float64)).max() < 1e-2 * scale


def test_sums_are_cut_where_rows_are_several() -> None:
    for rows, blocks in ((1, 0), (8, 4), (128, 8)):
        nodes = inputs(rows)
        after, _ = fired([dot(norm(*nodes[:2]), nodes[2])])
        sums = [n.shape for n in topological(after) if n.op is ops.sum_]
        assert sums == ([(rows, blocks), (rows,)] if blocks else [(rows,)])


def test_what_stays_as_it_is() -> None:
    for rows in (129, 192, 257):
        many = inputs(rows)
        assert fired([dot(norm(*many[:2]), many[2])])[1] == 0
    half = inputs(8, dtype=dtypes.float16)
    assert fired([dot(norm(*half[:2]), half[2])])[1] == 0
    x, w, a, _ = inputs(8)
    y = norm(x, w)
    assert norm_of(y) is not None
    assert fired([dot(y, a), y])[1] == 0, "a result wants the norm itself"
    assert fired([dot(y, a), build.sum_(y, 0)])[1] == 0, "a sum reads it too"
    assert fired([dot(x, a)])[1] == 0


def test_for_machines_whose_products_run_beside_the_threads() -> None:
    (norms,) = [one for one in GRAPH if one.name == "norms"]
    assert norms.applies is not None and norms.applies(H200)
    assert not norms.applies(A100) and not norms.applies(None)


@pytest.mark.parametrize(
    "columns, rows, wanted",
    [
        (4096, 16, 64),
        (4096, 32, 32),
        (5120, 64, 40),
        (8192, 128, 64),
        (1024, 64, 64),
        (1024, 96, 32),
        (5120, 256, 80),
        (4096, 200, 64),
        (1024, 256, 32),
    ],
)
def test_each_core_has_a_block_where_there_are_enough(columns: int, rows: int, wanted: int) -> None:
    """Else a product would split its k, or leave cores idle, to have whole blocks in its tiles."""
    assert block_of(columns, rows, H200.cores) == wanted
    assert columns % wanted == 0
