"""Subscripts: x[...] read and assigned, basic and advanced, with PyTorch's placement rules.

A subscript is parsed once into one Entry per axis. Reading slices first and then gathers;
assignment is one `update`, or a `where` for a boolean mask. Invariant: only a mask whose number
of true elements decides a shape is read while building; all else can be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import dtype as dtypes
from ..core.errors import AxisError, DTypeError, ShapeError, TraceError, UserError
from ..graph import build, ops
from ..graph.ranges import range_of
from ..ir import symbol
from ..ir.node import Node
from ..ir.requirement import require
from ..ir.symbol import Expr, Size
from ..ir.types import product
from ..runtime.buffer import HOST
from .tensor import Tensor, from_array, lift, method, mode, node_of, values, wrap


class Entry(NamedTuple):
    """What a subscript says of one axis (of none, for a new one)."""

    kind: str  # 'new', 'int', 'at', 'slice', 'index', 'mask'
    axis: int = -1
    start: Size = 0  # of an int or a slice
    size: Size = 1
    step: int = 1
    value: Any = None  # the Node of 'at' and 'index', the Tensor of a mask
    full: bool = False


# ---- parsing --------------------------------------------------------------------------------


def parse(x: Tensor, key: Any, op: str) -> list[Entry]:
    """The Entries of a subscript, in order; every axis is covered."""
    items = list(key) if isinstance(key, tuple) else [key]
    items = [_item(i) for i in items]
    used = sum(_width(i) for i in items)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if used > x.ndim or len(dots) > 1:
        raise AxisError(
            "too many indices",
            op=op,
            expected=f"at most {x.ndim}, one '...'",
            got=f"{used} for shape {build.show(x.shape)}",
        )
    place = dots[0] if dots else len(items)
    items[place : place + 1] = [slice(None)] * (x.ndim - used)
    entries: list[Entry] = []
    axis = 0
    for item in items:
        entries.append(_entry(x, axis, item, op))
        axis += _width(item)
    return entries


def _item(item: Any) -> Any:
    """An item in one of the forms: None, Ellipsis, slice, size, Tensor, array."""
    if item is None or item is Ellipsis or isinstance(item, (slice, Expr, Tensor)):
        return item
    if isinstance(item, (bool, np.bool_)):
        return np.asarray(item)
    if isinstance(item, (int, np.integer)):
        return int(item)
    if isinstance(item, (list, tuple, range)):
        item = lift(list(item)) if _holds_tensors(item) else np.asarray(item)
        if isinstance(item, np.ndarray) and item.size == 0:
            item = item.astype(np.int64)
    if type(item).__module__ == "torch":
        item = item.numpy()
    if isinstance(item, np.ndarray) and not item.ndim and item.dtype.kind in "iu":
        return int(item)
    if isinstance(item, Tensor) or (isinstance(item, np.ndarray) and item.dtype.kind in "biu"):
        return item
    raise DTypeError(
        "cannot be an index",
        op="index",
        got=_named(item),
        expected="int, slice, None, ..., bool mask or integers",
    )


def _named(item: Any) -> str:
    return f"array of {item.dtype}" if isinstance(item, np.ndarray) else type(item).__name__


def _holds_tensors(item: Any) -> bool:
    return any(isinstance(i, Tensor) for i in item)


def _is_mask(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype.kind == "bool"
    return isinstance(item, np.ndarray) and item.dtype.kind == "b"


def _width(item: Any) -> int:
    """How many axes an item covers."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _entry(x: Tensor, axis: int, item: Any, op: str) -> Entry:
    if item is None:
        return Entry("new")
    if _is_mask(item):
        return _mask_entry(x, axis, lift(item), op)
    size = x.shape[axis]
    if isinstance(item, slice):
        return _slice_entry(axis, size, item)
    if isinstance(item, Expr):
        for room in (size + item, size - item - 1):
            _inside(room, item, size, axis, op)
        return Entry("int", axis, item if item.low >= 0 else symbol.modulo(item, size))
    if isinstance(item, int):
        return Entry("int", axis, in_range(item, size, axis, op))
    node = index_node(item, size, axis, op)
    if not node.shape:
        return Entry("at", axis, value=node)
    return Entry("index", axis, value=node)


def _mask_entry(x: Tensor, axis: int, mask: Tensor, op: str) -> Entry:
    shape = x.shape[axis : axis + mask.ndim]
    if mask.shape != shape:
        raise AxisError(
            "the mask does not fit",
            op=op,
            expected=f"shape {build.show(shape)}",
            got=f"a mask of shape {build.show(mask.shape)}",
        )
    return Entry("mask", axis, value=mask)


def in_range(index: int, size: Size, axis: int, op: str) -> Size:
    """A static index made non-negative, checked."""
    _inside(size + index if index < 0 else size - index - 1, index, size, axis, op)
    return index + size if index < 0 else index


def _inside(
    room: Size, index: Size, size: Size, axis: int, op: str, least: str = "-{size}"
) -> None:
    """An error unless there is room: an index is out of range by what is missing."""
    require(
        room,
        AxisError,
        "index {index} is out of range for axis {axis} of size {size}",
        op=op,
        expected=least + " <= index < {size}",
        got="{index}",
        index=index,
        axis=axis,
        size=size,
    )


def _slice_entry(axis: int, size: Size, item: slice) -> Entry:
    start, stop, step = (_bound(b) for b in (item.start, item.stop, item.step))
    step = 1 if step is None else step
    if isinstance(step, Expr) or step == 0:
        raise UserError("bad step", op="index", expected="a whole number other than 0", got=step)
    known = all(not isinstance(v, Expr) for v in (start, stop, size))
    if known:
        steps = range(*slice(start, stop, step).indices(size))
        first = (steps[0] if step > 0 else steps[-1]) if steps else 0
        whole = step == 1 and len(steps) == size
        return Entry("slice", axis, first, len(steps), step, full=whole)
    if step < 0:
        raise UserError(
            "a symbolic axis has no negative steps",
            op="index",
            expected="step > 0",
            got=step,
            hint="use flip()",
        )
    begin, end = _clamped(start, size, 0), _clamped(stop, size, size)
    length = symbol.maximum(end - begin, 0)
    whole = step == 1 and not isinstance(begin, Expr) and begin == 0 and length == size
    return Entry("slice", axis, begin, symbol.ceil_divide(length, step), step, full=whole)


def _bound(value: Any) -> Any:
    if value is None or isinstance(value, Expr):
        return value
    try:
        return value.__index__()
    except TraceError:
        raise TraceError(
            "a slice has a bound that is known only at run time",
            op="index",
            expected="ints",
            got="a traced Tensor",
            hint="use x.narrow(dim, start, length) with a fixed length",
        ) from None
    except AttributeError:
        raise DTypeError(
            "a bound is not an int", op="index", expected="int or None", got=type(value).__name__
        ) from None


def _clamped(value: Any, size: Size, default: Size) -> Size:
    if value is None:
        return default
    if isinstance(value, int) and value < 0:
        return symbol.maximum(size + value, 0)
    return symbol.minimum(value, size)


def index_node(item: Any, size: Size, axis: int, op: str) -> Node:
    """Indices as a Node of non-negative integers; known values are checked now, others when they
    are read."""
    if isinstance(item, Tensor):
        if not item.dtype.is_integer:
            raise DTypeError(
                "indices are not integers",
                op=op,
                expected="integers or bools",
                got=item.dtype,
                hint="cast with .long()",
            )
        buffer = values.get(item.node)  # on a GPU the run looks, not the host
        known = item.numpy() if buffer is not None and buffer.device == HOST else None
        node = item.node
    else:
        known, node = np.asarray(item), None
    low, count = 0, product(known.shape if node is None else node.shape)  # type: ignore[union-attr]
    require(
        symbol.minimum(size, 1) - symbol.minimum(count, 1),
        AxisError,
        "an axis of no elements has no index",
        op=op,
        got="axis {axis} of size {size}",
        expected="a size > 0 where there are indices",
        axis=axis,
        size=size,
    )
    if known is not None and known.size:
        low, high = int(known.min()), int(known.max())
        _inside(size - high - 1, high, size, axis, op)
        _inside(size + low, low, size, axis, op)
        if low >= 0 and node is not None:
            return node
        if node is None and isinstance(size, int):
            known = np.where(known < 0, known + size, known).astype(np.int64)
            low = 0
    if node is None:
        node = from_array(np.asarray(known, dtype=np.int64))
        if low >= 0:
            return node
    if node.dtype.kind == "uint":
        wide = build.cast(node, dtypes.int64) if node.dtype.bits < 64 else node
    else:
        wide = build.cast(node, dtypes.int64)
        found = range_of(wide)
        if found is None or symbol.low(found[0]) < 0:
            wide = build.where(build.less(wide, 0), build.add(wide, build.size_value(size)), wide)
    return wide if known is not None else build.in_range(wide, size, op, negative=True)


def row_node(index: Tensor, size: Size, axis: int, op: str) -> Node:
    """Indices that are never negative: known values are checked now, others when they are read."""
    node, buffer = index.node, values.get(index.node)
    if buffer is not None and buffer.device == HOST and (known := index.numpy()).size:
        low, high = int(known.min()), int(known.max())
        _inside(low, low, size, axis, op, "0")
        _inside(size - high - 1, high, size, axis, op, "0")
        return node
    return build.in_range(node, size, op)


def mask_indices(mask: Tensor, op: str) -> list[Node]:
    """The indices of a mask's true elements, one Node per axis; reads the mask."""
    try:
        found = np.nonzero(mask.numpy())
    except TraceError:
        raise TraceError(
            "the size of the result depends on the values of a boolean mask",
            op=op,
            expected="a result of known shape inside a jitted function",
            got=f"a traced mask of shape {build.show(mask.shape)}",
            hint="use where(mask, x, other), masked_fill() or x[mask] = value",
        ) from None
    return [from_array(np.ascontiguousarray(f, dtype=np.int64)) for f in found]


def _without_masks(entries: list[Entry], op: str) -> list[Entry]:
    """Masks become the indices of their true elements."""
    result: list[Entry] = []
    for entry in entries:
        if entry.kind != "mask":
            result.append(entry)
        elif entry.value.ndim:
            indices = mask_indices(entry.value, op)
            result += [Entry("index", entry.axis + i, value=p) for i, p in enumerate(indices)]
        else:  # a scalar: a new axis of size 1 or 0
            result.append(Entry("new", value=bool(entry.value)))
    return result


# ---- reading --------------------------------------------------------------------------------


@method("__getitem__")
def getitem(self: Tensor, key: Any) -> Tensor:
    """x[key]."""
    entries = _without_masks(parse(self, key, "index"), "index")
    node = node_of(self)
    for entry in reversed([e for e in entries if e.kind == "at"]):
        node = build.gather(node, [entry.value], [entry.axis])
    node, axes, indices = _sliced(node, [e for e in entries if e.kind != "at"])
    if indices:
        node = gather_at(node, indices, axes)
    return wrap(node, self)


def _sliced(node: Node, entries: list[Entry]) -> tuple[Node, list[int], list[Node]]:
    """The basic part of a subscript, and what is left to gather."""
    starts: list[Size] = []
    stops: list[Size] = []
    steps: list[int] = []
    shape: list[Size] = []
    flips: list[int] = []
    axes: list[int] = []
    indices: list[Node] = []
    for entry in entries:
        if entry.kind == "new":
            shape.append(1 if entry.value in (None, True) else 0)
            continue
        axis = len(starts)
        size = (
            entry.size
            if entry.kind == "slice"
            else (node.shape[axis] if entry.kind == "index" else 1)
        )
        step = abs(entry.step)
        starts.append(entry.start)
        stops.append(entry.start + _span(size, step))
        steps.append(step)
        if entry.step < 0:
            flips.append(axis)
        if entry.kind == "index":
            axes.append(len(shape))
            indices.append(entry.value)
        if entry.kind != "int":
            shape.append(size)
    node = build.flip(build.slice_(node, starts, stops, steps), flips)
    if any(isinstance(s, int) and s == 0 for s in shape) and 0 not in node.shape:
        return build.full(tuple(shape), 0, node.dtype), axes, indices
    return build.reshape(node, tuple(shape)), axes, indices


def _span(count: Size, step: int) -> Size:
    """From the first to just after the last of `count` elements `step` apart."""
    if isinstance(count, int) and count == 0:
        return 0
    return (count - 1) * step + 1


def gather_at(node: Node, indices: Sequence[Node], axes: Sequence[int]) -> Node:
    """Gather, the indices' axes put where PyTorch puts them."""
    shape = build.broadcast_shapes("index", *(i.shape for i in indices))
    result = build.gather(node, indices, axes)
    first, width = axes[0], len(shape)
    if list(axes) != list(range(first, first + len(axes))) or not first:
        return result
    rest = [width + i for i in range(len(result.shape) - width)]
    return build.permute(result, [*rest[:first], *range(width), *rest[first:]])


# ---- assignment -----------------------------------------------------------------------------


@method("__setitem__")
def setitem(self: Tensor, key: Any, value: Any) -> None:
    """x[key] = value: the Tensor is rebound to the changed value."""
    entries = parse(self, key, "assign")
    source = lift(value, self.dtype)
    node = _masked(self, entries, source)
    if node is None:
        node = _updated(self, _without_masks(entries, "assign"), source)
    self.rebind(node, source, op="assign")


def _masked(x: Tensor, entries: list[Entry], value: Tensor) -> Node | None:
    """Assignment through one mask without reading it, where the value allows it."""
    masks = [e for e in entries if e.kind == "mask"]
    if len(masks) != 1 or any(e.kind == "index" for e in entries):
        return None
    mask, axis = masks[0].value, masks[0].axis
    others = [e for e in entries if e.kind not in ("mask", "new") and not e.full]
    if value.ndim == 0 or all(isinstance(s, int) and s == 1 for s in value.shape):
        chosen = _lined_up(mask.node, x, axis)
        for entry in others:
            chosen = ops.bit_and(chosen, _member(x, entry))
        filler = build.cast(build.reshape(node_of(value), ()), x.dtype)
        return ops.where(chosen, build.broadcast_to(filler, x.shape), node_of(x))
    if others or axis or any(e.kind == "new" for e in entries):
        return None
    rest = x.shape[mask.ndim :]
    if any(isinstance(s, int) and s == 0 for s in value.shape):
        return node_of(x)
    source = build.cast(node_of(value), x.dtype)
    if value.ndim > len(rest) and not (isinstance(value.shape[0], int) and value.shape[0] == 1):
        source = spread(mask, value, rest, "assign")
        source = build.cast(source, x.dtype)
    elif value.ndim > len(rest):
        source = build.reshape(source, source.shape[1:])
    source = build.broadcast_to(source, x.shape, "assign")
    return ops.where(_lined_up(mask.node, x, 0), source, node_of(x))


def _lined_up(mask: Node, x: Tensor, axis: int) -> Node:
    """A mask of some axes over the whole shape."""
    after = x.ndim - axis - len(mask.shape)
    return build.broadcast_to(build.reshape(mask, mask.shape + (1,) * after), x.shape)


def _member(x: Tensor, entry: Entry) -> Node:
    """Where an axis' index is one of an Entry's."""
    place = build.iota_along(x.shape, entry.axis)
    if entry.kind == "at":
        return build.equal(place, entry.value)
    if entry.kind == "int":
        return build.equal(place, build.size_value(entry.start))
    start = build.size_value(entry.start)
    stop = build.size_value(entry.start + _span(entry.size, abs(entry.step)))
    inside = ops.bit_and(
        *build.promoted("assign", build.less_equal(start, place), build.less(place, stop))
    )
    beat = build.binary(ops.remainder, build.subtract(place, start), abs(entry.step))
    return ops.bit_and(inside, build.equal(beat, 0))


def spread(mask: Tensor, value: Tensor, rest: tuple[Size, ...], op: str) -> Node:
    """The rows of value laid out at the true elements of a mask, in order."""
    if mode.trace is None and mask.node in values:
        count = int(mask.numpy().sum())
        if isinstance(value.shape[0], int) and value.shape[0] != count:
            raise ShapeError(
                "as many values as true elements are needed",
                op=op,
                expected=f"{count} on axis 0",
                got=build.show(value.shape),
            )
    flat = build.cast(build.reshape(mask.node, (-1,)), dtypes.int64)
    order = build.subtract(ops.cumulative(flat, axis=0, kind="sum"), 1)
    order = build.maximum(order, 0)
    rows = build.broadcast_to(node_of(value), (value.shape[0], *rest), op)
    found = build.gather(rows, [order], [0])
    return build.reshape(found, mask.shape + rest)


def _updated(x: Tensor, entries: list[Entry], value: Tensor) -> Node:
    """Assignment as one update: every axis not whole has an index."""
    indices = [e.value for e in entries if e.kind == "index"]
    block = build.broadcast_shapes("assign", *(i.shape for i in indices)) if indices else ()
    tags = _layout(entries, len(block))
    sizes = {e.axis: e.size for e in entries if e.kind == "slice"}
    shape = tuple(block[-1 - t] if t < 0 else (sizes[t] if t < x.ndim else 1) for t in tags)
    if any(e.kind == "new" and e.value is False for e in entries):
        return node_of(x)
    source = build.cast(node_of(value), x.dtype)
    while len(source.shape) > len(shape) and source.shape[0] == 1:
        source = build.reshape(source, source.shape[1:])
    source = build.broadcast_to(source, shape, "assign")
    parts = [e for e in entries if e.kind == "slice" and not e.full]
    wanted = [-1 - i for i in range(len(block))] + [e.axis for e in parts]
    wanted += [e.axis for e in entries if e.kind == "slice" and e.full]
    new = [t for t in tags if t >= x.ndim]
    source = build.permute(source, [tags.index(t) for t in wanted + new])
    source = build.reshape(source, source.shape[: len(wanted)])
    for position, entry in enumerate(parts):
        if entry.step < 0:
            source = build.flip(source, [len(block) + position])
    targets = {
        e.axis: _place(e, len(block), parts)
        for e in entries
        if e.kind != "new" and not (e.kind == "slice" and e.full)
    }
    if not targets:
        return build.reshape(source, x.shape)
    if any(isinstance(s, int) and s == 0 for s in shape):
        return node_of(x)
    axes = sorted(targets)
    return build.update(node_of(x), source, [targets[a] for a in axes], axes)


def _layout(entries: list[Entry], width: int) -> list[int]:
    """The axes of the subscripted Tensor as tags: -1-i for axis i of the indices' block, an
    axis for a slice, and numbers from `rank` on for new ones."""
    rank = sum(e.kind != "new" for e in entries)
    tags: list[int] = []
    gathered: list[int] = []
    for number, entry in enumerate(entries):
        if entry.kind == "index":
            gathered.append(len(tags))
            tags.append(-100)
        elif entry.kind == "new":
            tags.append(rank + number)
        elif entry.kind == "slice":
            tags.append(entry.axis)
    block = [-1 - i for i in range(width)]
    first = gathered[0] if gathered else 0
    place = first if gathered == list(range(first, first + len(gathered))) else 0
    before = [t for t in tags[:place] if t != -100]
    after = [t for t in tags[place:] if t != -100]
    return before + block + after


def _place(entry: Entry, block: int, parts: list[Entry]) -> Node:
    """Where an Entry writes on its axis, shaped (block..., one axis per partial slice)."""
    if entry.kind == "int":
        return build.size_value(entry.start)
    if entry.kind == "at":
        return entry.value
    if entry.kind == "index":
        return build.reshape(entry.value, entry.value.shape + (1,) * len(parts))
    line = build.iota(entry.size)
    if abs(entry.step) != 1:
        line = build.multiply(line, abs(entry.step))
    if not (isinstance(entry.start, int) and entry.start == 0):
        line = build.add(line, build.size_value(entry.start))
    ones = [1] * len(parts)
    shape: list[Size] = list(ones)
    shape[parts.index(entry)] = entry.size
    return build.reshape(line, tuple(shape))
