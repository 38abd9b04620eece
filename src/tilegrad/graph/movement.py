"""Rules of movement and reduction: merge movement, and compute on the small side of it.

The settled form is expand(reshape(permute(x))) from the outside in: repetition comes last, so
elementwise ops and reductions below it see the small value; reshapes that only add or drop
axes of size 1 come before it; permutes are innermost. Repeated constants are always
expand(reshape(constant)).
Invariant: sizes may be Symbols; a Rule that needs a comparison fires only where bounds prove it.
"""

from __future__ import annotations

from ..core.dtype import accumulator
from ..ir.node import Node, topological
from ..ir.pattern import Match, Rule, any_, of
from ..ir.symbol import Size, combine, low, multiply
from ..ir.types import product
from . import build, ops
from .notation import BINARY, REDUCE, TERNARY, UNARY, constant

x, y, z = any_("x"), any_("y"), any_("z")
c = constant("c")
Axes = tuple[int, ...]


def axis_groups(old: tuple[Size, ...], new: tuple[Size, ...]) -> list[tuple[Axes, Axes]] | None:
    """How a reshape maps axes: the finest groups of old axes that become groups of new ones.

    Axes of size 1 are in no group. None where a size is 0, since then anything maps to anything.
    """
    left = [i for i, s in enumerate(old) if s != 1]
    right = [i for i, s in enumerate(new) if s != 1]
    ends: dict[Size, int] = {}
    total: Size = 1
    for count, axis in enumerate(right, 1):
        total = multiply(total, new[axis])
        ends[total] = count
    if total == 0:
        return None
    groups: list[tuple[Axes, Axes]] = []
    from_left = from_right = 0
    total = 1
    for count, axis in enumerate(left, 1):
        total = multiply(total, old[axis])
        end = ends.get(total)
        if end is not None:
            groups.append((tuple(left[from_left:count]), tuple(right[from_right:end])))
            from_left, from_right = count, end
    return groups if from_left == len(left) and from_right == len(right) else None


def unit_map(old: tuple[Size, ...], new: tuple[Size, ...]) -> dict[int, int] | None:
    """New axis -> old axis where a reshape only adds and drops axes of size 1, else None."""
    left = [i for i, s in enumerate(old) if s != 1]
    right = [i for i, s in enumerate(new) if s != 1]
    if [old[i] for i in left] != [new[i] for i in right]:
        return None
    return dict(zip(right, left))


# ---- merging --------------------------------------------------------------------------------


def _permute_permute(m: Match) -> Node:
    inner = m.y.attrs["order"]
    return build.permute(m.x, [inner[a] for a in m.root.attrs["order"]])


def _same_shape(node: Node) -> bool:
    return bool(node.type == node.inputs[0].type)


def _keeps_order(node: Node) -> bool:
    """Whether a permute keeps the order of all axes longer than 1: then it is a reshape."""
    shape = node.inputs[0].shape
    kept = [a for a in node.attrs["order"] if shape[a] != 1]
    return kept == sorted(kept)


def _permute_reshape(m: Match) -> Node | None:
    """Permute first where the reshape below only adds or drops axes of size 1."""
    source = unit_map(m.x.shape, m.y.shape)
    if source is None:
        return None
    order = [source[a] for a in m.root.attrs["order"] if a in source]
    if order == sorted(order):
        return build.reshape(m.x, m.root.shape)
    order += [a for a in range(len(m.x.shape)) if a not in order]
    return build.reshape(build.permute(m.x, order), m.root.shape)


def _reshape_expand(m: Match) -> Node | None:
    """Reshape the small value where no group mixes repeated axes with others."""
    groups = axis_groups(m.y.shape, m.root.shape)
    if groups is None:
        return None
    inner: list[Size] = [1] * len(m.root.shape)
    for old, new in groups:
        repeated = [m.x.shape[a] == 1 for a in old]
        if not any(repeated):
            for a in new:
                inner[a] = m.root.shape[a]
        elif not all(repeated):
            return None
    return build.expand(build.reshape(m.x, inner), m.root.shape)


def _permute_expand(m: Match) -> Node:
    return build.expand(build.permute(m.x, m.root.attrs["order"]), m.root.shape)


def _pad_pad(m: Match) -> Node:
    low_, high_ = (
        [combine(a, b, 1) for a, b in zip(m.root.attrs[side], m.y.attrs[side])]
        for side in ("low", "high")
    )
    return build.pad(m.x, low_, high_)


def _flip_flip(m: Match) -> Node:
    return build.flip(m.x, sorted(set(m.root.attrs["axes"]) ^ set(m.y.attrs["axes"])))


def _flip_units(m: Match) -> Node | None:
    axes = [a for a in m.root.attrs["axes"] if m.x.shape[a] != 1]
    return None if len(axes) == len(m.root.attrs["axes"]) and axes else build.flip(m.x, axes)


def _flip_expand(m: Match) -> Node:
    axes = [a for a in m.root.attrs["axes"] if m.x.shape[a] != 1]
    return build.expand(build.flip(m.x, axes), m.root.shape)


def _repeat_constant(m: Match) -> Node:
    """Movement of one value everywhere."""
    return build.broadcast_to(_scalar(m.c), m.root.shape)


def _unchecked(node: Node) -> bool:
    """Whether no index of a gather is checked while it runs."""
    return not any(n.op is ops.in_range for n in topological(node.inputs[1:]))


def _scalar(node: Node) -> Node:
    while node.op is not ops.constant:
        node = node.inputs[0]
    return node


MOVES_CONSTANT = (ops.reshape, ops.permute, ops.expand, ops.slice_, ops.flip, ops.windows)
MERGE = [
    Rule("move_constant", of(MOVES_CONSTANT, c), _repeat_constant),
    Rule("gather_constant", of(ops.gather, c, x, test=_unchecked), _repeat_constant),
    Rule("reshape_same", of(ops.reshape, x, test=_same_shape), lambda m: m.x),
    Rule(
        "reshape_reshape",
        of(ops.reshape, of(ops.reshape, x)),
        lambda m: build.reshape(m.x, m.root.shape),
    ),
    Rule("reshape_expand", of(ops.reshape, of(ops.expand, x, name="y")), _reshape_expand),
    Rule("permute_permute", of(ops.permute, of(ops.permute, x, name="y")), _permute_permute),
    Rule(
        "permute_units",
        of(ops.permute, x, test=_keeps_order),
        lambda m: build.reshape(m.x, m.root.shape),
    ),
    Rule("permute_reshape", of(ops.permute, of(ops.reshape, x, name="y")), _permute_reshape),
    Rule("permute_expand", of(ops.permute, of(ops.expand, x)), _permute_expand),
    Rule("expand_same", of(ops.expand, x, test=_same_shape), lambda m: m.x),
    Rule(
        "expand_expand",
        of(ops.expand, of(ops.expand, x)),
        lambda m: build.expand(m.x, m.root.shape),
    ),
    Rule("pad_nothing", of(ops.pad, x, test=_same_shape), lambda m: m.x),
    Rule("pad_pad", of(ops.pad, of(ops.pad, x, name="y")), _pad_pad),
    Rule("pad_zeros", of(ops.pad, 0), lambda m: build.like(m.root, 0)),
    Rule("flip_units", of(ops.flip, x), _flip_units),
    Rule("flip_flip", of(ops.flip, of(ops.flip, x, name="y")), _flip_flip),
    Rule("flip_expand", of(ops.flip, of(ops.expand, x)), _flip_expand),
]

# ---- slices, windows and concatenations -----------------------------------------------------


def _slice_slice(m: Match) -> Node:
    """x[a:b:s][c:d:t] = x[a + c*s : ... : s*t]."""
    starts: list[Size] = []
    stops: list[Size] = []
    steps: list[int] = []
    inner, outer = m.y.attrs, m.root.attrs
    for axis, count in enumerate(m.root.shape):
        start = combine(
            inner["start"][axis], multiply(outer["start"][axis], inner["step"][axis]), 1
        )
        step = inner["step"][axis] * outer["step"][axis]
        span = 0 if count == 0 else combine(multiply(combine(count, 1, -1), step), 1, 1)
        starts.append(start)
        steps.append(step)
        stops.append(combine(start, span, 1))
    return build.slice_(m.x, starts, stops, steps)


def _slice_expand(m: Match) -> Node:
    attrs = m.root.attrs
    repeated = [a == 1 and b != 1 for a, b in zip(m.x.shape, m.y.shape)]
    start = [0 if r else s for r, s in zip(repeated, attrs["start"])]
    stop = [1 if r else s for r, s in zip(repeated, attrs["stop"])]
    step = [1 if r else s for r, s in zip(repeated, attrs["step"])]
    return build.expand(build.slice_(m.x, start, stop, step), m.root.shape)


def _slice_pad(m: Match) -> Node | None:
    """Slice what is padded, and pad what is left of the padding."""
    outer, padding = m.root.attrs, m.y.attrs
    starts, stops, lows, highs = [], [], [], []
    for axis, size in enumerate(m.x.shape):
        start, stop, step = (outer[k][axis] for k in ("start", "stop", "step"))
        before, after = padding["low"][axis], padding["high"][axis]
        start, stop = combine(start, before, -1), combine(stop, before, -1)
        whole = start == -before and stop == combine(size, after, 1) and step == 1
        if low(start) >= 0 and low(combine(size, stop, -1)) >= 0:
            before, after = 0, 0
        elif whole:
            start, stop = 0, size
        elif step == 1 and all(isinstance(v, int) for v in (start, stop, size)):
            before, after = max(0, -start), max(0, stop - size)
            start, stop = max(0, start), min(size, stop)
            if start >= stop:
                return build.like(m.root, 0)  # only padding is left
        else:
            return None
        starts.append(start)
        stops.append(stop)
        lows.append(before)
        highs.append(after)
    return build.pad(build.slice_(m.x, starts, stops, outer["step"]), lows, highs)


def _slice_concatenate(m: Match) -> Node | None:
    """A slice within one part."""
    joined, attrs = m.root.inputs[0], m.root.attrs
    axis = joined.attrs["axis"]
    offset: Size = 0
    for part in joined.inputs:
        start = combine(attrs["start"][axis], offset, -1)
        stop = combine(attrs["stop"][axis], offset, -1)
        offset = combine(offset, part.shape[axis], 1)
        if low(start) >= 0 and low(combine(part.shape[axis], stop, -1)) >= 0:
            starts, stops = list(attrs["start"]), list(attrs["stop"])
            starts[axis], stops[axis] = start, stop
            return build.slice_(part, starts, stops, attrs["step"])
    return None


def _windows_one(m: Match) -> Node:
    """Windows of one element are every step-th element."""
    axis, step = m.root.attrs["axis"], m.root.attrs["step"]
    last = multiply(combine(m.root.shape[axis], 1, -1), step)
    return build.reshape(build.slice_axis(m.x, axis, 0, combine(last, 1, 1), step), m.root.shape)


def _concatenate_parts(m: Match) -> Node:
    """Parts of parts, and no empty ones."""
    axis = m.root.attrs["axis"]
    parts: list[Node] = []
    for part in m.root.inputs:
        inner = part.op is ops.concatenate and part.attrs["axis"] == axis
        parts.extend(part.inputs if inner else (part,))
    some = [p for p in parts if p.shape[axis] != 0] or parts[:1]
    return build.concatenate(some, axis)  # the same Node where nothing changed


def _concatenate_slices(m: Match) -> Node | None:
    """x[a:b] and x[b:c] side by side are x[a:c]."""
    axis = m.root.attrs["axis"]
    parts: list[Node] = []
    for part in m.root.inputs:
        merged = _adjacent(parts[-1], part, axis) if parts else None
        parts[-1:] = [merged] if merged is not None else [*parts[-1:], part]
    return None if len(parts) == len(m.root.inputs) else build.concatenate(parts, axis)


def _adjacent(first: Node, second: Node, axis: int) -> Node | None:
    if first.op is not ops.slice_ or second.op is not ops.slice_:
        return None
    if first.inputs != second.inputs or first.attrs["step"] != second.attrs["step"]:
        return None
    for i, step in enumerate(first.attrs["step"]):
        if i == axis:
            if step != 1 or first.attrs["stop"][i] != second.attrs["start"][i]:
                return None
        elif any(first.attrs[k][i] != second.attrs[k][i] for k in ("start", "stop")):
            return None
    stop = list(first.attrs["stop"])
    stop[axis] = second.attrs["stop"][axis]
    return build.slice_(first.inputs[0], first.attrs["start"], stop, first.attrs["step"])


def _concatenate_constants(m: Match) -> Node | None:
    scalars = {_scalar(p) for p in m.root.inputs if ops.is_constant(p)}
    if len(scalars) != 1 or not all(map(ops.is_constant, m.root.inputs)):
        return None
    return build.broadcast_to(scalars.pop(), m.root.shape)


CUT = [
    Rule("slice_whole", of(ops.slice_, x, test=_same_shape), lambda m: m.x),
    Rule("slice_slice", of(ops.slice_, of(ops.slice_, x, name="y")), _slice_slice),
    Rule("slice_expand", of(ops.slice_, of(ops.expand, x, name="y")), _slice_expand),
    Rule("slice_pad", of(ops.slice_, of(ops.pad, x, name="y")), _slice_pad),
    Rule("slice_concatenate", of(ops.slice_, any_("x", ops=ops.concatenate)), _slice_concatenate),
    Rule("windows_one", of(ops.windows, x, width=1), _windows_one),
    Rule("concatenate_parts", ops.concatenate, _concatenate_parts),
    Rule("concatenate_slices", ops.concatenate, _concatenate_slices),
    Rule("concatenate_constants", ops.concatenate, _concatenate_constants),
]

# ---- computing on the small side ------------------------------------------------------------


def _elementwise_expand(m: Match) -> Node | None:
    """f(expand a, expand b) = expand(f(a, b)), repeating first only what one of them has."""
    root = m.root
    small = [i.inputs[0] for i in root.inputs]
    shape = tuple(
        [
            1 if all(s.shape[axis] == 1 for s in small) else size
            for axis, size in enumerate(root.shape)
        ]
    )
    if shape == root.shape:
        return None
    inputs = tuple([build.expand(s, shape) for s in small])
    return build.expand(root.op.make(inputs, root.attrs), root.shape)


BEFORE_EXPAND = [
    Rule("unary_expand", of(UNARY, of(ops.expand, x)), _elementwise_expand),
    Rule("binary_expand", of(BINARY, of(ops.expand, x), of(ops.expand, y)), _elementwise_expand),
    Rule(
        "ternary_expand",
        of(TERNARY, of(ops.expand, x), of(ops.expand, y), of(ops.expand, z)),
        _elementwise_expand,
    ),
]

# ---- reductions -----------------------------------------------------------------------------


def _over_few(node: Node) -> bool:
    """Whether an axis that is reduced has size 0 or 1, or there is none."""
    shape, axes = node.inputs[0].shape, node.attrs["axes"]
    return not axes or any(shape[a] == 1 or shape[a] == 0 for a in axes)


def _reduce_units(m: Match) -> Node | None:
    axes = m.root.attrs["axes"]
    kept = tuple([a for a in axes if m.x.shape[a] != 1])
    if len(kept) == len(axes) and axes:
        return None
    units = [a for a in axes if a not in kept]
    moved = tuple([a - sum(u < a for u in units) for a in kept])
    return build.reduce(m.root.op, build.squeeze(m.x, units), moved)


def _reduce_empty(m: Match) -> Node | None:
    """A reduction of nothing is the identity."""
    if all(m.x.shape[a] != 0 for a in m.root.attrs["axes"]):
        return None
    dtype = m.root.dtype
    values = {ops.sum_: 0, ops.prod: 1, ops.max_: dtype.lowest, ops.min_: dtype.highest}
    return build.like(m.root, values[m.root.op])


def _reduce_reduce(m: Match) -> Node | None:
    if m.y.op is not m.root.op:
        return None
    inner = m.y.attrs["axes"]
    kept = [a for a in range(len(m.x.shape)) if a not in inner]
    return build.reduce(m.root.op, m.x, (*inner, *[kept[a] for a in m.root.attrs["axes"]]))


def _reduce_permute(m: Match) -> Node:
    order, axes = m.y.attrs["order"], m.root.attrs["axes"]
    left = [order[a] for a in range(len(order)) if a not in axes]  # axes of x, as wanted
    result_axes = sorted(left)
    reduced = build.reduce(m.root.op, m.x, [order[a] for a in axes])
    return build.permute(reduced, [result_axes.index(a) for a in left])


def _reduce_reshape(m: Match) -> Node | None:
    """Reduce before the reshape where every group of axes is reduced wholly or not at all."""
    groups = axis_groups(m.x.shape, m.y.shape)
    if groups is None:
        return None
    reduced: list[int] = []
    for old, new in groups:
        gone = [a in m.root.attrs["axes"] for a in new]
        if all(gone):
            reduced.extend(old)
        elif any(gone):
            return None
    return build.reshape(build.reduce(m.root.op, m.x, reduced), m.root.shape)


def _reduce_expand(m: Match) -> Node | None:
    """Reduce the small value; n equal terms are a product, n equal extremes are one."""
    op, axes = m.root.op, m.root.attrs["axes"]
    count = product(tuple(m.y.shape[a] for a in axes if m.x.shape[a] == 1))
    integer = m.root.dtype.is_integer
    if low(count) < 1 and not (integer and op is ops.sum_):
        return None
    if count == 1 or op in (ops.max_, ops.min_) or m.root.dtype.kind == "bool":
        result: Node | None = build.reduce(op, m.x, axes)
    elif op is ops.sum_:
        result = _times(m.x, axes, count)
    else:
        result = _to_power(build.reduce(op, m.x, axes), count)
    return None if result is None else build.expand(result, m.root.shape)


def _times(x: Node, axes: Axes, count: Size) -> Node:
    wide = accumulator(x.dtype) if x.dtype.is_float else x.dtype
    total = build.sum_(build.cast(x, wide), axes)
    factor = build.cast(build.size_value(count), wide)
    return build.cast(ops.multiply(total, build.broadcast_to(factor, total.shape)), x.dtype)


def _to_power(x: Node, count: Size) -> Node | None:
    if not isinstance(count, int) or count > 127 or (x.dtype.is_float and x.dtype.bits < 16):
        return None
    return ops.power(x, build.like(x, count))


def _dot_empty(m: Match) -> Node | None:
    """A dot over no elements."""
    empty = any(m.x.shape[a] == 0 for a in m.root.attrs["contract"][0])
    return build.like(m.root, 0) if empty else None


def _one_long(m: Match) -> bool:
    return bool(m.x.shape[m.root.attrs["axis"]] == 1)


REDUCTION = [
    Rule("reduce_empty", of(REDUCE, x, test=_over_few), _reduce_empty),
    Rule("reduce_units", of(REDUCE, x, test=_over_few), _reduce_units),
    Rule("reduce_reduce", of(REDUCE, of(REDUCE, x, name="y")), _reduce_reduce),
    Rule("reduce_permute", of(REDUCE, of(ops.permute, x, name="y")), _reduce_permute),
    Rule("reduce_reshape", of(REDUCE, of(ops.reshape, x, name="y")), _reduce_reshape),
    Rule("reduce_expand", of(REDUCE, of(ops.expand, x, name="y")), _reduce_expand),
    Rule("argmax_one", of(ops.argmax, x), lambda m: build.like(m.root, 0), _one_long),
    Rule("cumulative_one", of(ops.cumulative, x), lambda m: m.x, _one_long),
    Rule("dot_empty", of(ops.dot, x, y), _dot_empty),
]

MOVEMENT = [*MERGE, *CUT, *BEFORE_EXPAND, *REDUCTION]
