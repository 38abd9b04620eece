"""Reverse rules of movement, reductions, dot and indexing: each the transpose of its op.

A rule takes (node, cotangent, wanted) and gives one cotangent per input, None where none is
wanted or none flows. Transposes of movement are movement and sums, so that a convolution's
backward pass fuses like its forward pass. Invariant: a cotangent has the type of its input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.dtype import bool_, int64
from ..ir.node import Node
from ..ir.symbol import Size, combine, minimum, multiply
from ..ir.types import product
from . import build, ops
from .partial import (
    exclusive_product,
    extreme_index,
    keep_axes,
    product_of_others,
    put_along,
    ties,
    times,
    zeros,
)
from .ranges import surely_inside

Wanted = tuple[bool, ...]
Cotangents = Sequence[Node | None]

# ---- movement -------------------------------------------------------------------------------


def reshape(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Back to the input's shape."""
    return [build.reshape(g, node.inputs[0].shape)]


def permute(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """The inverse order."""
    order = node.attrs["order"]
    return [build.permute(g, [order.index(i) for i in range(len(order))])]


def expand(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Sums over the repeated axes."""
    return [build.sum_to(g, node.inputs[0].shape)]


def pad(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """The part that is not padding."""
    start = node.attrs["low"]
    stop = [combine(a, s, 1) for a, s in zip(start, node.inputs[0].shape)]
    return [build.slice_(g, start, stop)]


def spread(x: Node, axis: int, step: int) -> Node:
    """x with step-1 zeros after each element of the axis."""
    if step == 1:
        return x
    apart = build.unsqueeze(x, axis + 1)
    none = [0] * len(apart.shape)
    after = [step - 1 if i == axis + 1 else 0 for i in range(len(apart.shape))]
    shape = x.shape[:axis] + (multiply(x.shape[axis], step),) + x.shape[axis + 1 :]
    return build.reshape(build.pad(apart, none, after), shape)


def fit(x: Node, axis: int, before: Size, size: Size) -> Node:
    """x after `before` zeros along the axis, then cut or filled with zeros to the size."""
    room = combine(size, before, -1)
    kept = minimum(x.shape[axis], room)
    x = build.slice_axis(x, axis, 0, kept)
    rank = range(len(x.shape))
    start: list[Size] = [before if i == axis else 0 for i in rank]
    stop: list[Size] = [combine(room, kept, -1) if i == axis else 0 for i in rank]
    return build.pad(x, start, stop)


def slice_(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Zeros where nothing was read."""
    x, attrs = node.inputs[0], node.attrs
    if all(s == 1 for s in attrs["step"]):
        high_ = [combine(s, b, -1) for s, b in zip(x.shape, attrs["stop"])]
        return [build.pad(g, attrs["start"], high_)]
    for axis, (start, step) in enumerate(zip(attrs["start"], attrs["step"])):
        g = fit(spread(g, axis, step), axis, start, x.shape[axis])
    return [g]


def flip(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """The same axes reversed."""
    return [build.flip(g, node.attrs["axes"])]


def windows(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Windows laid over each other and summed."""
    axis, width = node.attrs["axis"], node.attrs["width"]
    step, dilation = node.attrs["step"], node.attrs["dilation"]
    size = node.inputs[0].shape[axis]
    last = len(g.shape) - 1
    if dilation == 1 and step >= width:  # they do not overlap: side by side
        apart = build.move_axis(fit(g, last, 0, step), last, axis + 1)
        shape = apart.shape[:axis] + (multiply(apart.shape[axis], step),) + apart.shape[axis + 2 :]
        return [fit(build.reshape(apart, shape), axis, 0, size)]
    g = spread(g, axis, step)
    if width > 16:
        return [fit(_skewed_sum(g, axis, width, dilation), axis, 0, size)]
    total: Node | None = None
    for offset in range(width):
        one = build.squeeze(build.slice_axis(g, last, offset, offset + 1), (last,))
        shifted = fit(one, axis, offset * dilation, size)
        total = shifted if total is None else ops.add(total, shifted)
    return [total]


def _skewed_sum(g: Node, axis: int, width: int, dilation: int) -> Node:
    """Sum over the last axis, its k-th column shifted by k * dilation along the axis.

    Rows of length n + dilation read as rows of length n are shifted by dilation each.
    """
    g = build.move_axis(g, len(g.shape) - 1, axis)
    n = combine(g.shape[axis + 1], (width - 1) * dilation, 1)
    g = fit(g, axis + 1, 0, combine(n, dilation, 1))
    flat_size = multiply(g.shape[axis + 1], width)
    flat = build.reshape(g, g.shape[:axis] + (flat_size,) + g.shape[axis + 2 :])
    flat = build.slice_axis(flat, axis, 0, multiply(n, width))
    rows = build.reshape(flat, flat.shape[:axis] + (width, n) + flat.shape[axis + 1 :])
    return build.sum_(rows, axis)


def concatenate(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Each its own part."""
    axis = node.attrs["axis"]
    parts, start = [], 0
    for x, want in zip(node.inputs, wanted):
        stop = combine(start, x.shape[axis], 1)
        parts.append(build.slice_axis(g, axis, start, stop) if want else None)
        start = stop  # type: ignore[assignment]
    return parts


# ---- reductions, dot ------------------------------------------------------------------------


def sum_(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """The same for every summand."""
    return [keep_axes(g, node.attrs["axes"], node.inputs[0].shape)]


def prod(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Times the product of the others."""
    x, axes = node.inputs[0], node.attrs["axes"]
    return [times(keep_axes(g, axes, x.shape), product_of_others(x, axes))]


def extreme(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Shared evenly among ties; nan, which equals nothing, for all where nan won."""
    x, axes = node.inputs[0], node.attrs["axes"]
    mask, count = ties(x, node, axes)
    other = build.where(build.equal(count, 0.0), math.nan, build.like(count, 0.0))
    share, other = (keep_axes(v, axes, x.shape) for v in (ops.divide(g, count), other))
    return [build.where(mask, share, other)]


def cumulative(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Sums from the other end; for prod a backward recurrence, right with zeros."""
    x, axis, kind = node.inputs[0], node.attrs["axis"], node.attrs["kind"]
    if kind == "sum":
        back = ops.cumulative(build.flip(g, (axis,)), axis=axis, kind="sum")
        return [build.flip(back, (axis,))]
    if product(x.shape) == 0:
        return [g]
    if kind == "prod":
        return [ops.multiply(exclusive_product(x, axis), _tail_products(x, g, axis))]
    return [put_along(zeros(x.type), g, extreme_index(x, node, axis), axis)]


def _tail_products(x: Node, g: Node, axis: int) -> Node:
    """s[i] = g[i] + x[i+1] * s[i+1] along the axis."""
    size = x.shape[axis]
    following = build.slice_axis(x, axis, 1, size)
    following = fit(following, axis, 0, size)

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        total = ops.add(slices[0], ops.multiply(slices[1], carries[0]))
        return [total], [total]

    slices = [build.move_axis(g, axis, 0), build.move_axis(following, axis, 0)]
    first = build.full(slices[0].shape[1:], 0, x.dtype)
    _, (stacked,) = build.scan(body, [first], slices, size, reverse=True)
    return build.move_axis(stacked, 0, axis)


def sort(node: Node, g: Sequence[Node | None], wanted: Wanted) -> Cotangents:
    """Back to where the values came from."""
    if g[0] is None:
        return [None]
    index = ops.get(node, index=1)
    return [put_along(zeros(node.inputs[0].type), g[0], index, node.attrs["axis"])]


def dot(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Two dots with the other operand."""
    a, b = node.inputs
    batch, contract = node.attrs["batch"], node.attrs["contract"]
    lead = len(batch[0])
    rest_a = len(a.shape) - lead - len(contract[0])
    rest = (range(lead, lead + rest_a), range(lead + rest_a, len(g.shape)))
    results: list[Node | None] = [None, None]
    for side, (mine, other) in enumerate(((a, b), (b, a))):
        if not wanted[side]:
            continue
        # narrow operands (16 bits) keep their dots narrow
        ct = build.cast(g, other.dtype) if other.dtype.bits >= 16 else g
        far = 1 - side
        free = [i for i in range(len(other.shape)) if i not in batch[far] + contract[far]]
        part = build.dot(ct, other, (range(lead), batch[far]), (rest[far], free), mine.dtype)
        results[side] = build.permute(part, _order(mine, batch, contract, side))
    return results


def grouped_dot(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Rows by the weights the other way, and of each group the products of its rows."""
    (x, weights, offsets), axis = node.inputs[:3], node.attrs["axis"]
    pair = (x, g) if axis == 1 else (g, x)
    return [
        ops.grouped_dot(g, weights, offsets, axis=3 - axis, block=0) if wanted[0] else None,
        ops.grouped_outer(*pair, offsets) if wanted[1] else None,
        *[None] * (len(node.inputs) - 2),
    ]


def grouped_outer(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Rows of the other by the cotangent of their group."""
    x, y, offsets = node.inputs
    left = ops.grouped_dot(y, g, offsets, axis=2, block=0) if wanted[0] else None
    right = ops.grouped_dot(x, g, offsets, axis=1, block=0) if wanted[1] else None
    return [left, right, None]


def _order(
    x: Node,
    batch: tuple[tuple[int, ...], ...],
    contract: tuple[tuple[int, ...], ...],
    side: int,
) -> list[int]:
    """Where each axis of x is in (batch, x's rest, contracted axes as the other orders them)."""
    rest = [i for i in range(len(x.shape)) if i not in batch[side] + contract[side]]
    pairs = sorted(zip(contract[1 - side], contract[side]))
    lies = [*batch[side], *rest, *(mine for _, mine in pairs)]
    return [lies.index(i) for i in range(len(x.shape))]


# ---- indexing -------------------------------------------------------------------------------


def gather(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """Added where it was read."""
    x, indices = node.inputs[0], node.inputs[1:]
    back = _way_back(indices[0]) if node.attrs["axes"] == (0,) else None
    if back is not None and back.shape[0] == x.shape[0]:
        return [build.gather(g, [back], [0]), None]
    state = build.update(zeros(x.type), g, indices, node.attrs["axes"], "add")
    return [state, *[None] * len(indices)]


def _way_back(index: Node) -> Node | None:
    """The inverse of an index that is the order of rows by group, or their places."""
    while index.op is ops.cast:
        index = index.inputs[0]
    if index.op is not ops.get or index.inputs[0].op is not ops.group_rows:
        return None
    number = index.attrs["index"]
    return ops.get(index.inputs[0], index=1 - number) if number < 2 else None


def _iota_axis(index: Node) -> int | None:
    """The axis of a repeated iota, if the index is one."""
    while index.op is ops.expand:
        index = index.inputs[0]
    source = index.inputs[0] if index.op is ops.reshape else index
    if source.op is not ops.iota:
        return None
    found = [i for i, s in enumerate(index.shape) if s == source.shape[0] and s != 1]
    return found[0] if len(found) == 1 and product(index.shape) == source.shape[0] else None


def inside(node: Node) -> Node | None:
    """Where an update's indices are in range; None if they all surely are."""
    mask: Node | None = None
    for index, axis in zip(node.inputs[2:], node.attrs["axes"]):
        size = node.shape[axis]
        if not surely_inside(index, size):
            wide = build.cast(index, int64)
            end = build.broadcast_to(build.size_value(size), wide.shape)
            here = ops.bit_and(build.less_equal(build.like(wide, 0), wide), ops.less(wide, end))
            mask = here if mask is None else ops.bit_and(mask, here)
    return mask


def masked(value: Node, mask: Node | None) -> Node:
    """The value, zero where the mask (over its leading axes) is False."""
    if mask is None:
        return value
    lead = build.reshape(mask, mask.shape + (1,) * (len(value.shape) - len(mask.shape)))
    return build.where(build.broadcast_to(lead, value.shape), value, False)


def written(node: Node) -> Node | None:
    """Where an update's values reach the state: in range and, for 'set', not overwritten."""
    indices, mask = node.inputs[2:], inside(node)
    found = {_iota_axis(i) for i in indices}
    shape = indices[0].shape
    distinct = all(s == 1 or i in found for i, s in enumerate(shape))
    if node.attrs["mode"] != "set" or distinct:
        return mask
    sizes = tuple(node.shape[a] for a in node.attrs["axes"])
    position = build.reshape(build.iota(product(shape), int64), shape)
    owner = build.update(build.full(sizes, -1, int64), position, indices, range(len(sizes)), "max")
    last = ops.equal(build.gather(owner, indices, range(len(sizes))), position)
    return last if mask is None else ops.bit_and(mask, last)


def update(node: Node, g: Node, wanted: Wanted) -> Cotangents:
    """By mode; see the functions below."""
    rule = {"set": _set, "add": _add, "multiply": _multiply, "max": _limit, "min": _limit}
    state, value = rule[node.attrs["mode"]](node, g, wanted)
    return [state, value, *[None] * (len(node.inputs) - 2)]


def _read(node: Node, x: Node) -> Node:
    """x (shaped as the state) at the indices of an update."""
    return build.gather(x, node.inputs[2:], node.attrs["axes"])


def _write(node: Node, state: Node, value: Node, mode: str) -> Node:
    return build.update(state, value, node.inputs[2:], node.attrs["axes"], mode)


def _set(node: Node, g: Node, wanted: Wanted) -> tuple[Node | None, Node | None]:
    value = node.inputs[1]
    state = _write(node, g, zeros(value.type), "set") if wanted[0] else None
    return state, masked(_read(node, g), written(node)) if wanted[1] else None


def _add(node: Node, g: Node, wanted: Wanted) -> tuple[Node | None, Node | None]:
    return g, masked(_read(node, g), inside(node)) if wanted[1] else None


def factors(node: Node) -> tuple[Node, Node]:
    """For 'multiply': the product written to each place, and of the others for each value."""
    value = node.inputs[1]
    ones = build.like(node, 1)
    is_zero = build.equal(value, 0)
    nonzero = build.where(is_zero, 1.0, value)
    counts = _write(node, zeros(node.type), build.cast(is_zero, node.dtype), "add")
    rest = _write(node, ones, nonzero, "multiply")  # product of what is not zero
    none, one = (_read(node, build.cast(build.equal(counts, c), bool_)) for c in (0, 1))
    here = _read(node, rest)
    alone = build.where(ops.bit_and(is_zero, one), here, 0.0)
    others = build.where(ops.bit_and(ops.bit_not(is_zero), none), ops.divide(here, nonzero), alone)
    return _write(node, ones, value, "multiply"), others


def _multiply(node: Node, g: Node, wanted: Wanted) -> tuple[Node | None, Node | None]:
    whole, others = factors(node)
    state = times(g, whole) if wanted[0] else None
    if not wanted[1]:
        return state, None
    part = ops.multiply(_read(node, times(g, node.inputs[0])), others)
    return state, masked(part, inside(node))


def winners(node: Node) -> tuple[Node, Node, Node]:
    """For 'max' and 'min': who equals the result (state, values), and how many do."""
    state, value = node.inputs[:2]
    kept = ops.equal(state, node)
    won = ops.equal(value, _read(node, node))
    mask = inside(node)
    if mask is not None:
        won = masked(won, mask)
    count = _write(node, build.cast(kept, node.dtype), build.cast(won, node.dtype), "add")
    return kept, won, count


def _limit(node: Node, g: Node, wanted: Wanted) -> tuple[Node | None, Node | None]:
    kept, won, count = winners(node)
    share = ops.divide(g, count)
    return build.where(kept, share, 0.0), build.where(won, _read(node, share), 0.0)
