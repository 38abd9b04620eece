"""Every Rule of DECOMPOSE gives the op's values, special ones included, and the op is gone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rule_examples import agree, fires, given

from tilegrad.core.dtype import bfloat16, bool_, float16, float32, float64, int8, int32, uint8
from tilegrad.graph import build, ops
from tilegrad.graph.decompose import DECOMPOSE
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import topological
from tilegrad.ir.rewrite import rewrite


def f(dtype=float32):
    return given(200, dtype=dtype)


def custom():
    x = f()
    return build.custom(lambda xs: [ops.exp(xs[0]), ops.negative(xs[0])], [x], None)[1]


EXAMPLES = {
    "sign": lambda: ops.sign(f()),
    "sigmoid": lambda: ops.sigmoid(f()),
    "logit": lambda: ops.logit(f()),
    "asinh": lambda: ops.asinh(f()),
    "acosh": lambda: ops.acosh(f()),
    "atanh": lambda: ops.atanh(f()),
    "asin": lambda: ops.asin(f()),
    "acos": lambda: ops.acos(f()),
    "atan2": lambda: ops.atan2(f(), f()),
    "custom": custom,
}
SMALL = {
    ops.sign,
    ops.sigmoid,
    ops.logit,
    ops.asinh,
    ops.acosh,
    ops.atanh,
    ops.asin,
    ops.acos,
    ops.atan2,
    ops.custom,
}


def test_every_rule_has_an_example():
    assert sorted(EXAMPLES) == sorted(r.name for r in DECOMPOSE.rules)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rule(name):
    example = EXAMPLES[name]()
    after = rewrite([example], DECOMPOSE)
    assert not SMALL & {n.op for n in topological(after)}
    agree([example], [fires(DECOMPOSE, name, example)], close=1e-6)
    agree([example], after, close=1e-6)


@pytest.mark.parametrize("dtype", [bool_, uint8, int8, int32, float16, bfloat16])
def test_sign(dtype):
    x = ops.sign(f(dtype))
    agree([x], rewrite([x], DECOMPOSE))


def test_zeros_and_infinities():
    special = np.array([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, -3.0], np.float32)
    a, b = (v.ravel() for v in np.meshgrid(special, special))
    x, y = given(a.size, dtype=float32), given(a.size, dtype=float32)
    before = [
        ops.atan2(x, y),
        ops.asin(x),
        ops.sigmoid(x),
        ops.asinh(x),
        ops.acosh(x),
        ops.atanh(x),
        ops.logit(x),
    ]
    after = rewrite(before, DECOMPOSE)
    for old, new in zip(interpret(before, {x: a, y: b}), interpret(after, {x: a, y: b})):
        np.testing.assert_allclose(new, old, rtol=1e-6)
        known = ~np.isnan(old)
        np.testing.assert_array_equal(np.signbit(new)[known], np.signbit(old)[known])


def test_remainders_stay():
    for dtype in (int32, float32, float64):
        x, y = f(dtype), f(dtype)
        kept = [ops.remainder(x, y), ops.fmod(x, y), ops.floor_divide_(x, y), ops.absolute(x)]
        assert rewrite(kept, DECOMPOSE) == kept


def test_custom_inside_custom():
    x = f()

    def outer(xs):
        return build.custom(lambda ys: [ops.exp(ys[0])], [ops.negative(xs[0])], None)

    (before,) = build.custom(outer, [x], None)
    (after,) = rewrite([before], DECOMPOSE)
    assert after is ops.exp(ops.negative(x))
