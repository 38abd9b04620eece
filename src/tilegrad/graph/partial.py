"""Partial derivatives of the elementwise ops, and the pieces both derivative modes share.

`PARTIAL` has one row per elementwise op and one function per input: (node, g) -> g times the
derivative of the node by that input. They are linear in g, so reverse mode applies them to
cotangents and forward mode to tangents. Values follow PyTorch (sqrt at 0 gives inf, |x| at 0
gives 0, ties of maximum share by halves). Invariant: rules build ordinary Nodes, so
derivatives of derivatives need nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..core.dtype import int64
from ..ir.node import Node, Op
from ..ir.types import Array, Type, product
from . import build, ops

LN2, LN10 = math.log(2.0), math.log(10.0)
Partial = Callable[[Node, Node], Node] | None


def zeros(type_: Type) -> Node:
    """An array of zeros of the type."""
    assert isinstance(type_, Array)
    return build.full(type_.shape, 0, type_.dtype)


def times(a: Node, b: Node) -> Node:
    """a * b of one type, without multiplying by ones."""
    if ops.constant_value(a) == 1:
        return b
    return a if ops.constant_value(b) == 1 else ops.multiply(a, b)


def _square(x: Node) -> Node:
    return ops.multiply(x, x)


def _power_base(n: Node, g: Node) -> Node:
    base, exponent = n.inputs
    value = ops.constant_value(exponent)
    if value is None:
        # b * a ** (b - 1), and 0 where b is 0, with no 0 * inf on the way
        safe = build.where(build.equal(exponent, 0), 0.0, build.subtract(exponent, 1.0))
        return times(g, ops.multiply(exponent, ops.power(base, safe)))
    if value == 0:
        return zeros(g.type)
    if value == 1:
        return g
    rest = base if value == 2 else ops.power(base, build.like(base, value - 1))
    return times(g, build.multiply(rest, value))


def _power_exponent(n: Node, g: Node) -> Node:
    base, exponent = n.inputs
    settled = ops.bit_and(build.equal(base, 0), build.less_equal(build.like(base, 0), exponent))
    return times(g, ops.multiply(n, ops.log(build.where(settled, 1.0, base))))


def _extreme(first: int, largest: bool) -> Callable[[Node, Node], Node]:
    def rule(n: Node, g: Node) -> Node:
        mine, other = n.inputs[first], n.inputs[1 - first]
        loses = ops.less(mine, other) if largest else ops.less(other, mine)
        shared = build.where(ops.equal(mine, other), build.multiply(g, 0.5), g)
        return build.where(loses, 0.0, shared)

    return rule


def _atan2(first: int) -> Callable[[Node, Node], Node]:
    def rule(n: Node, g: Node) -> Node:
        a, b = n.inputs
        norm = ops.add(_square(a), _square(b))  # 0 where both are, or their squares
        inverse = build.where(build.equal(norm, 0), 0.0, ops.reciprocal(norm))
        return times(g, ops.multiply(ops.negative(a) if first else b, inverse))

    return rule


def _hyperbolic(one: float) -> Callable[[Node, Node], Node]:
    """g / sqrt(x**2 + one)."""
    return lambda n, g: ops.divide(g, ops.square_root(build.add(_square(n.inputs[0]), one)))


def _logit(n: Node, g: Node) -> Node:
    """g / (x (1 - x)) from 0 to 1, nan outside."""
    x = n.inputs[0]
    inside = ops.bit_and(ops.less_equal(build.like(x, 0), x), ops.less_equal(x, build.like(x, 1)))
    return build.where(inside, ops.divide(g, ops.multiply(x, build.subtract(1.0, x))), math.nan)


def _acos(n: Node, g: Node) -> Node:
    return ops.negative(_asin(n, g))


def _asin(n: Node, g: Node) -> Node:
    return ops.divide(g, ops.square_root(build.subtract(1.0, _square(n.inputs[0]))))


def _erf(n: Node, g: Node) -> Node:
    density = ops.exp(ops.negative(_square(n.inputs[0])))
    return times(g, build.multiply(density, 2 / math.sqrt(math.pi)))


def _divide_right(n: Node, g: Node) -> Node:
    return ops.negative(times(g, ops.divide(n, n.inputs[1])))


def _remainder_right(n: Node, g: Node) -> Node:
    return ops.negative(times(g, ops.floor_divide_(*n.inputs)))


def _fmod_right(n: Node, g: Node) -> Node:
    return ops.negative(times(g, ops.trunc(ops.divide(*n.inputs))))


def _same(n: Node, g: Node) -> Node:
    return g


def _minus(n: Node, g: Node) -> Node:
    return ops.negative(g)


def _cast(n: Node, g: Node) -> Node:
    return build.cast(g, n.inputs[0].dtype)


PARTIAL: dict[Op, tuple[Partial, ...]] = {
    ops.negative: (_minus,),
    ops.reciprocal: (lambda n, g: ops.negative(times(g, _square(n))),),
    ops.absolute: (lambda n, g: times(g, ops.sign(n.inputs[0])),),
    ops.square_root: (lambda n, g: ops.divide(g, build.multiply(n, 2.0)),),
    ops.exp: (lambda n, g: times(g, n),),
    ops.log: (lambda n, g: ops.divide(g, n.inputs[0]),),
    ops.exp2: (lambda n, g: times(g, build.multiply(n, LN2)),),
    ops.log2: (lambda n, g: ops.divide(g, build.multiply(n.inputs[0], LN2)),),
    ops.log10: (lambda n, g: ops.divide(g, build.multiply(n.inputs[0], LN10)),),
    ops.expm1: (lambda n, g: times(g, ops.exp(n.inputs[0])),),
    ops.log1p: (lambda n, g: ops.divide(g, build.add(n.inputs[0], 1.0)),),
    ops.sin: (lambda n, g: times(g, ops.cos(n.inputs[0])),),
    ops.cos: (lambda n, g: ops.negative(times(g, ops.sin(n.inputs[0]))),),
    ops.tan: (lambda n, g: times(g, build.add(_square(n), 1.0)),),
    ops.asin: (_asin,),
    ops.acos: (_acos,),
    ops.atan: (lambda n, g: ops.divide(g, build.add(_square(n.inputs[0]), 1.0)),),
    ops.sinh: (lambda n, g: times(g, ops.cosh(n.inputs[0])),),
    ops.cosh: (lambda n, g: times(g, ops.sinh(n.inputs[0])),),
    ops.tanh: (lambda n, g: times(g, build.subtract(1.0, _square(n))),),
    ops.asinh: (_hyperbolic(1.0),),
    ops.acosh: (_hyperbolic(-1.0),),
    ops.atanh: (lambda n, g: ops.divide(g, build.subtract(1.0, _square(n.inputs[0]))),),
    ops.logit: (_logit,),
    ops.sigmoid: (lambda n, g: times(g, ops.multiply(n, build.subtract(1.0, n))),),
    ops.erf: (_erf,),
    ops.erfc: (lambda n, g: ops.negative(_erf(n, g)),),
    ops.erf_inverse: (
        lambda n, g: times(g, build.multiply(ops.exp(_square(n)), math.sqrt(math.pi) / 2)),
    ),
    ops.add: (_same, _same),
    ops.subtract: (_same, _minus),
    ops.multiply: (
        lambda n, g: times(g, n.inputs[1]),
        lambda n, g: times(g, n.inputs[0]),
    ),
    ops.divide: (lambda n, g: ops.divide(g, n.inputs[1]), _divide_right),
    ops.remainder: (_same, _remainder_right),
    ops.fmod: (_same, _fmod_right),
    ops.power: (_power_base, _power_exponent),
    ops.maximum: (_extreme(0, True), _extreme(1, True)),
    ops.minimum: (_extreme(0, False), _extreme(1, False)),
    ops.atan2: (_atan2(0), _atan2(1)),
    ops.where: (
        None,
        lambda n, g: build.where(n.inputs[0], g, 0.0),
        lambda n, g: build.where(n.inputs[0], 0.0, g),
    ),
    ops.cast: (_cast,),
}

# Ops through which nothing flows: leaves, steps, comparisons and bits.
CONSTANT: tuple[Op, ...] = (
    ops.input_, ops.constant, ops.size, ops.iota, ops.random_bits, ops.sign, ops.floor, ops.ceil,
    ops.round_, ops.trunc, ops.bit_not, ops.floor_divide_, ops.bit_and, ops.bit_or, ops.bit_xor,
    ops.shift_left, ops.shift_right, ops.equal, ops.not_equal, ops.less, ops.less_equal,
    ops.bitcast, ops.fixed, ops.stop_gradient, ops.argmax, ops.in_range, ops.unpack, ops.pack,
    ops.pruned, ops.draw, ops.top_k, ops.group_rows,
)  # fmt: skip

# ---- shared pieces --------------------------------------------------------------------------


def carries_derivative(type_: Type) -> bool:
    """Whether values of the type can have a derivative: a float array."""
    return isinstance(type_, Array) and type_.dtype.is_float


def outputs_of(node: Node) -> list[Node]:
    """The arrays a Node gives: its items, or itself."""
    return [node] if isinstance(node.type, Array) else build.items(node)


def keep_axes(x: Node, axes: Sequence[int], shape: tuple) -> Node:
    """A reduced x repeated back to the shape it had before its axes went away."""
    ones = tuple(1 if i in axes else s for i, s in enumerate(shape))
    return build.expand(build.reshape(x, ones), shape)


def along(index: Node, axis: int) -> list[Node]:
    """Indices for every axis, `index` for the given one: as NumPy's take_along_axis."""
    count = len(index.shape)
    return [index if i == axis else build.iota_along(index.shape, i, int64) for i in range(count)]


def take_along(x: Node, index: Node, axis: int) -> Node:
    """x at `index` along the axis."""
    return build.gather(x, along(index, axis), range(len(x.shape)))


def put_along(state: Node, value: Node, index: Node, axis: int) -> Node:
    """state with value added at `index` along the axis."""
    return build.update(state, value, along(index, axis), range(len(state.shape)), "add")


def exclusive_product(x: Node, axis: int) -> Node:
    """The product of what comes before each element along the axis."""
    first = build.full(tuple(1 if i == axis else s for i, s in enumerate(x.shape)), 1, x.dtype)
    rest = build.slice_axis(x, axis, 0, build.offset_size(x.shape[axis], -1))
    return ops.cumulative(build.concatenate([first, rest], axis), axis=axis, kind="prod")


def product_of_others(x: Node, axes: Sequence[int]) -> Node:
    """For each element, the product over the axes of all the others; right with zeros."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    order = [*kept, *axes]
    moved = build.permute(x, order)
    total = product(tuple(x.shape[i] for i in axes))
    if product(x.shape) == 0:
        return x
    flat = build.reshape(moved, tuple(x.shape[i] for i in kept) + (total,))
    last = len(kept)
    before = exclusive_product(flat, last)
    after = build.flip(exclusive_product(build.flip(flat, (last,)), last), (last,))
    others = build.reshape(ops.multiply(before, after), moved.shape)
    return build.permute(others, [order.index(i) for i in range(len(order))])


def ties(x: Node, extreme: Node, axes: Sequence[int]) -> tuple[Node, Node]:
    """Where x is its extreme over the axes, and how many such there are (reduced, as x)."""
    mask = ops.equal(x, keep_axes(extreme, axes, x.shape))
    return mask, build.sum_(build.cast(mask, x.dtype), axes)


def extreme_index(x: Node, running: Node, axis: int) -> Node:
    """For a running max or min, where along the axis its value came from (the last tie)."""
    here = build.iota_along(x.shape, axis, int64)
    fresh = ops.bit_or(ops.equal(x, running), ops.not_equal(x, x))
    return ops.cumulative(build.where(fresh, here, 0), axis=axis, kind="max")
