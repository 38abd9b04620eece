"""Forward mode against finite differences and against reverse mode."""

import numpy as np
import pytest
from cases import CASES, LOOPS, Case, evaluate, inner, or_zeros, pieces, seeded, slope

from tilegrad.compiler.share import share_scans
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import UserError
from tilegrad.graph import build, forward, grad, ops
from tilegrad.ir.node import topological
from tilegrad.ir.rewrite import Log


def moved_inputs(wrt, given, tangents):
    inputs = [build.input_(x.shape, x.dtype) for x in wrt]
    given.update(dict(zip(inputs, tangents)))
    return inputs


@pytest.mark.parametrize("case", CASES + LOOPS, ids=repr)
def test_first_order(case: Case) -> None:
    nodes, outputs, _, given, tangents = pieces(case)
    wrt = case.floats(nodes)
    moved = moved_inputs(wrt, given, tangents)
    values = evaluate(or_zeros(forward.tangents(outputs, wrt, moved), outputs), given)
    for got, expected in zip(values, slope(outputs, given, wrt, tangents)):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_agrees_with_reverse(case: Case) -> None:
    nodes, outputs, seeds, given, tangents = pieces(case)
    wrt = case.floats(nodes)
    moved = moved_inputs(wrt, given, tangents)
    ahead = evaluate(or_zeros(forward.tangents(outputs, wrt, moved), outputs), given)
    back = evaluate(or_zeros(grad.gradients(outputs, seeds, wrt), wrt), given)
    left = inner(ahead, [given[s] for s in seeds])
    assert left == pytest.approx(inner(back, tangents), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("case", CASES + LOOPS, ids=repr)
def test_forward_over_forward(case: Case) -> None:
    nodes, outputs, _, given, tangents = pieces(case)
    wrt = case.floats(nodes)
    first = moved_inputs(wrt, given, tangents)
    ahead = or_zeros(forward.tangents(outputs, wrt, first), outputs)
    rng = seeded("again" + repr(case))
    again = [np.asarray(rng.standard_normal(x.shape)) for x in wrt]
    second = moved_inputs(wrt, given, again)
    values = evaluate(or_zeros(forward.tangents(ahead, wrt, second), outputs), given)
    for got, expected in zip(values, slope(ahead, given, wrt, again)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_forward_over_reverse(case: Case) -> None:
    nodes, outputs, seeds, given, tangents = pieces(case)
    wrt = case.floats(nodes)
    first = or_zeros(grad.gradients(outputs, seeds, wrt), wrt)
    moved = moved_inputs(wrt, given, tangents)
    values = evaluate(or_zeros(forward.tangents(first, wrt, moved), wrt), given)
    for got, expected in zip(values, slope(first, given, wrt, tangents)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_scan_and_its_tangent_become_one() -> None:
    case = next(c for c in CASES if repr(c) == "scan-forward")
    nodes, outputs, _, given, tangents = pieces(case)
    moved = moved_inputs(nodes, given, tangents)
    roots = [*outputs, *forward.tangents(outputs, nodes, moved)]
    shared = share_scans(nodes, roots, Log())
    assert sum(n.op is ops.scan for n in topological(shared)) == 1
    for a, b in zip(evaluate(shared, given), evaluate(roots, given)):
        np.testing.assert_allclose(a, b)


def test_reverse_only_rules_say_so() -> None:
    class Rules:
        def vjp(self, inputs, outputs, cotangents):
            return cotangents

    x = build.input_((2,), dtypes.float64)
    (y,) = build.custom(lambda a: [ops.exp(a[0])], [x], Rules())
    with pytest.raises(UserError, match="custom_jvp"):
        forward.tangents([y], [x], [build.like(x, 1)])
