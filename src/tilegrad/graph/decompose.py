"""Decomposition: ops that no target has a direct form for, written in ops that they have.

What stays: ops with an instruction (sqrt, floor, round, max, ...), functions every target
writes its own way (exp, log, sin, tan, sinh, atan, tanh, erf, erfc, erf_inverse, power, ...),
exact remainders, loops (scan, while_loop, cond) and whole-axis ops (argmax, prod, cumulative,
sort).
Invariant: values are those of the op, within its rounding; nan, inf and signs of zero too.
"""

from __future__ import annotations

import math

from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet, any_, of
from . import build, ops

LN2 = math.log(2.0)
x, a, b = any_("x"), any_("a"), any_("b")


def _sign(m: Match) -> Node:
    """(0 < x) - (x < 0): 0 for nan."""
    zero, dtype = build.like(m.x, 0), m.x.dtype
    above = build.cast(ops.less(zero, m.x), dtype)
    if dtype.kind in ("bool", "uint"):
        return above
    return ops.subtract(above, build.cast(ops.less(m.x, zero), dtype))


def _sigmoid(m: Match) -> Node:
    """1 / (1 + e ** -x): 0 where the power is infinite."""
    return ops.reciprocal(build.add(ops.exp(ops.negative(m.x)), 1))


def _negative_sign(x: Node) -> Node:
    """Whether x is below zero or -0.0: 1 / -0.0 is -inf."""
    return build.less(ops.where(build.equal(x, 0), ops.reciprocal(x), x), 0)


def _cathetus(x: Node) -> Node:
    """sqrt(1 - x**2) without cancellation."""
    return ops.square_root(ops.multiply(build.subtract(build.like(x, 1), x), build.add(x, 1)))


def _atan2(m: Match) -> Node:
    """The angle of (b, a): atan of the smaller ratio, then by octant and quadrant."""
    rise, run = ops.absolute(m.a), ops.absolute(m.b)
    steep = ops.less(run, rise)
    least, most = ops.minimum(rise, run), ops.maximum(rise, run)
    at_origin = build.equal(most, 0)
    at_infinity = build.equal(least, math.inf)
    ratio = ops.divide(least, most)
    ratio = build.where(at_origin, 0.0, build.where(at_infinity, 1.0, ratio))
    angle = ops.atan(ratio)
    angle = ops.where(steep, build.subtract(build.like(angle, math.pi / 2), angle), angle)
    behind = _negative_sign(m.b)
    angle = ops.where(behind, build.subtract(build.like(angle, math.pi), angle), angle)
    return ops.where(_negative_sign(m.a), ops.negative(angle), angle)


FAR = 1e9  # of which the square loses nothing, but might overflow


def _asinh(m: Match) -> Node:
    """log1p of a sum without cancellation, of |x|; the logarithm of 2|x| far out."""
    size = ops.absolute(m.x)
    near = build.where(build.less(size, FAR), size, 1.0)
    squared = ops.multiply(near, near)
    bend = build.add(ops.square_root(build.add(squared, 1)), 1)
    angle = ops.log1p(ops.add(near, ops.divide(squared, bend)))
    far = build.add(ops.log(build.maximum(size, 1)), LN2)
    result = ops.where(build.less(size, FAR), angle, far)
    return ops.where(_negative_sign(m.x), ops.negative(result), result)


def _acosh(m: Match) -> Node:
    """log1p of a sum without cancellation; the logarithm of 2x far out; nan below 1."""
    above = build.subtract(m.x, 1)
    near = build.where(build.less(above, FAR), above, 1.0)
    root = ops.square_root(ops.add(ops.multiply(near, near), build.multiply(near, 2)))
    far = build.add(ops.log(build.maximum(m.x, 1)), LN2)
    result = ops.where(build.less(above, FAR), ops.log1p(ops.add(near, root)), far)
    return build.where(build.less(m.x, 1), math.nan, result)


def _atanh(m: Match) -> Node:
    """Half the difference of two logarithms that are accurate near 1."""
    difference = ops.subtract(ops.log1p(m.x), ops.log1p(ops.negative(m.x)))
    return build.multiply(difference, 0.5)


def _logit(m: Match) -> Node:
    return ops.log(ops.divide(m.x, build.subtract(build.like(m.x, 1), m.x)))


def _inline(m: Match) -> Node:
    """The Block of a custom op: its derivative rules have been used by now."""
    return build.inline(m.x.blocks[0], m.x.inputs)[m.root.attrs["index"]]


DECOMPOSE = RuleSet(
    "decompose",
    [
        Rule("sign", of(ops.sign, x), _sign),
        Rule("sigmoid", of(ops.sigmoid, x), _sigmoid),
        Rule("logit", of(ops.logit, x), _logit),
        Rule("asinh", of(ops.asinh, x), _asinh),
        Rule("acosh", of(ops.acosh, x), _acosh),
        Rule("atanh", of(ops.atanh, x), _atanh),
        Rule("asin", of(ops.asin, x), lambda m: ops.atan2(m.x, _cathetus(m.x))),
        Rule("acos", of(ops.acos, x), lambda m: ops.atan2(_cathetus(m.x), m.x)),
        Rule("atan2", of(ops.atan2, a, b), _atan2),
        Rule("custom", of(ops.get, any_("x", ops=ops.custom)), _inline),
    ],
)
