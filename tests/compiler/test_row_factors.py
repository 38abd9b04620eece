"""Sums freed of what a row has one of: what is rewritten, what is not, and that values stay."""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.compiler.row_factors import Depths, shallow_sums
from tilegrad.core import dtype as dtypes
from tilegrad.core.target import AVX2, H200
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.rewrite import Log


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def levelled(function, *values: np.ndarray) -> tuple[list[Node], list[Node]]:
    """The results before and after the pass, which must agree."""
    nodes = [build.input_(v.shape, dtypes.float32) for v in values]
    before = [function(*nodes)]
    after = shallow_sums(nodes, before, Log())
    given = dict(zip(nodes, values))
    for a, b in zip(interpret(before, given), interpret(after, given)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    return before, after


def depth(results: list[Node]) -> int:
    depths = Depths()
    return max(depths(n) for n in results)


def mean(x: Node) -> Node:
    return build.divide(build.sum_(x, 1, keep=True), float(x.shape[1]))


def test_a_factor_of_the_row_comes_out() -> None:
    def product(x, y):
        total = build.sum_(build.multiply(x, x), 1, keep=True)
        return build.sum_(build.multiply(y, build.multiply(x, total)), 1)

    before, after = levelled(product, rows(5, 33), rows(5, 33, seed=1))
    assert depth(before) == 2 and depth(after) == 1


def test_a_factor_of_all_rows_comes_out() -> None:
    def product(x, y):
        return build.sum_(build.multiply(y, build.reduce(ops.min_, x, (0, 1), keep=True)), 1)

    before, after = levelled(product, rows(5, 33), rows(5, 33, seed=1))
    assert depth(before) == 2 and depth(after) == 1


def test_a_softmax_gradient_waits_once_less() -> None:
    def pull(x, dy):
        e = build.unary(ops.exp, build.subtract(x, build.max_(x, 1, keep=True)))
        inverse = build.unary(ops.reciprocal, build.sum_(e, 1, keep=True))
        return build.sum_(build.multiply(dy, build.multiply(e, inverse)), 1)

    before, after = levelled(pull, rows(5, 33), rows(5, 33, seed=1))
    assert depth(before) == 3 and depth(after) == 2


def test_deviations_from_the_mean_are_nothing() -> None:
    given = []

    def shift(x, g):
        given.append(g)
        d = build.subtract(x, mean(x))
        scale = build.unary(ops.reciprocal, mean(build.multiply(d, d)))
        direct = build.add(build.multiply(g, scale), build.multiply(scale, d))
        return build.sum_(build.unary(ops.negative, direct), 1)

    before, after = levelled(shift, rows(5, 32) + 3, rows(5, 32, seed=1))
    totals = [n for n in topological(after) if n.op is ops.sum_ and n.inputs[0] is given[0]]
    assert depth(before) == 3 and len(totals) == 1  # the sum of g alone


@pytest.mark.parametrize("name", ["another mean", "largest", "two terms", "columns", "whole"])
def test_what_stays(name: str) -> None:
    """Sums that would cancel otherwise, become two, or are not of rows."""

    def function(x, y):
        top = build.max_(x, 1, keep=True)
        if name == "another mean":
            return build.sum_(build.multiply(build.subtract(x, mean(y)), top), 1)
        if name == "largest":
            return build.sum_(build.subtract(x, top), 1)
        if name == "two terms":
            return build.sum_(build.add(build.multiply(x, top), y), 1)
        if name == "columns":
            return build.sum_(build.multiply(x, build.max_(x, 0, keep=True)), 0)
        whole = build.cast(build.multiply(x, 4.0), dtypes.int32)
        return build.sum_(build.multiply(whole, build.max_(whole, 1, keep=True)), 1)

    before, after = levelled(function, rows(6, 32), rows(6, 32, seed=1))
    assert before == after


def test_what_is_added_twice_is_doubled() -> None:
    def twice(x, y):
        term = build.multiply(x, build.sum_(y, 1, keep=True))
        return build.add(build.add(y, term), term)

    _, (after,) = levelled(twice, rows(5, 32), rows(5, 32, seed=1))
    assert after.op is ops.add and after.inputs[0].op is ops.input_


def test_only_gpus_want_it() -> None:
    x = build.input_((5, 32), dtypes.float32)
    total = build.sum_(build.multiply(x, build.max_(x, 1, keep=True)), 1)
    for target, there in ((H200, True), (AVX2, False), (None, False)):
        _, stages = run_pipeline([x], [total], target)
        assert any(s.name == "shallow sums" and s.changed for s in stages) == there
