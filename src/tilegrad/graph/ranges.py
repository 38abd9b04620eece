"""Ranges of integer values that a Graph shows: what an index surely is, whatever the data.

Invariant: in every run, a value lies within the range that is found for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..ir.node import Node, Op
from ..ir.symbol import Size, combine, floor_divide, high, low, maximum, minimum
from . import ops

Range = tuple[Size, Size]  # the least and the most
DEPTH = 12  # Nodes that are looked through
_found: WeakKeyDictionary[Node, Range] = WeakKeyDictionary()  # a Node never changes


def surely_inside(index: Node, size: Size) -> bool:
    """Whether an index is within 0 .. size-1, whatever the data."""
    found = range_of(index)
    if found is None:
        return False
    return low(found[0]) >= 0 and low(combine(size, found[1], -1)) >= 1


def range_of(node: Node, depth: int = DEPTH) -> Range | None:
    """The range of an integer value, or None where nothing is known."""
    if not depth or not (node.dtype.is_integer or node.dtype.kind == "bool"):
        return None
    found = _found.get(node)
    if found is None and (row := RANGES.get(node.op)) is not None:
        found = row(node, depth - 1)
        if found is not None:
            _found[node] = found
    if found is not None:
        return found
    bits, kind = node.dtype.bits, node.dtype.kind
    if kind == "bool":
        return 0, 1
    return (0, (1 << bits) - 1) if kind == "uint" and bits < 64 else None


def _same(node: Node, depth: int) -> Range | None:
    return range_of(node.inputs[0], depth)


def _hull(*found: Range | None) -> Range | None:
    least: Size | None = None
    most: Size | None = None
    for one in found:
        if one is None:
            return None
        least = one[0] if least is None else minimum(least, one[0])
        most = one[1] if most is None else maximum(most, one[1])
    return None if least is None or most is None else (least, most)


def _cast(node: Node, depth: int) -> Range | None:
    found = range_of(node.inputs[0], depth)
    if found is None or not node.dtype.is_integer:
        return None
    half = node.dtype.bits - (node.dtype.kind == "int")
    least = -(1 << half) if node.dtype.kind == "int" else 0
    return found if low(found[0]) >= least and high(found[1]) < 1 << half else None


def _get(node: Node, depth: int) -> Range | None:
    made = node.inputs[0]
    if made.op is ops.group_rows:  # places of rows, and where groups begin
        return 0, combine(made.inputs[0].shape[0], int(node.attrs["index"] < 2), -1)
    if made.op is not ops.sort:
        return None
    if node.attrs["index"] == 0:
        return range_of(made.inputs[0], depth)
    return 0, combine(made.inputs[0].shape[made.attrs["axis"]], 1, -1)


def _fits(node: Node, found: Range) -> Range | None:
    """A result that the dtype holds; else it wraps."""
    limit = 1 << (node.dtype.bits - 1)
    return found if low(found[0]) >= -limit and high(found[1]) < limit else None


def _arithmetic(node: Node, depth: int) -> Range | None:
    a, b = (range_of(i, depth) for i in node.inputs)
    if a is None or b is None or node.dtype.kind != "int":
        return None
    if node.op is ops.add:
        return _fits(node, (combine(a[0], b[0], 1), combine(a[1], b[1], 1)))
    return _fits(node, (combine(a[0], b[1], -1), combine(a[1], b[0], -1)))


def _clamped(node: Node, depth: int) -> Range | None:
    return _extreme(node, minimum if node.op is ops.minimum else maximum, node.inputs, depth)


def _extreme(
    node: Node, pick: Callable[[Any, Any], Size], inputs: Sequence[Node], depth: int
) -> Range:
    """Of the least or most of two values: bounded on one side if nothing is known of one."""
    limit = 1 << (node.dtype.bits - 1)
    wide: Range = (-limit, limit - 1) if node.dtype.kind == "int" else (0, 2 * limit - 1)
    a, b = (range_of(i, depth) or wide for i in inputs)
    return pick(a[0], b[0]), pick(a[1], b[1])


def _remainder(node: Node, depth: int) -> Range | None:
    by = range_of(node.inputs[1], depth)
    return None if by is None or low(by[0]) < 1 else (0, combine(by[1], 1, -1))


def _divided(node: Node, depth: int) -> Range | None:
    """By a constant: a power of two, for a shift."""
    found, by = range_of(node.inputs[0], depth), ops.constant_value(node.inputs[1])
    if found is None or by is None or not 0 < by < 1 << 32:
        return None
    if node.op is ops.shift_right:
        by = 1 << min(int(by), 63)
    return floor_divide(found[0], by), floor_divide(found[1], by)


def _where(node: Node, depth: int) -> Range | None:
    test, *branches = node.inputs
    if test.op is ops.less and set(test.inputs) == set(branches):  # the way clamp() is written
        pick = minimum if test.inputs[0] is branches[0] else maximum
        return _extreme(node, pick, branches, depth)
    return _hull(*(range_of(i, depth) for i in node.inputs[1:]))


def _joined(node: Node, depth: int) -> Range | None:
    return _hull(*(range_of(i, depth) for i in node.inputs))


def _padded(node: Node, depth: int) -> Range | None:
    return _hull(range_of(node.inputs[0], depth), (0, 0))


def _argmax(node: Node, depth: int) -> Range | None:
    return 0, combine(node.inputs[0].shape[node.attrs["axis"]], 1, -1)


RANGES: dict[Op, Callable[[Node, int], Range | None]] = {
    ops.constant: lambda node, _: (int(node.attrs["value"]),) * 2,
    ops.size: lambda node, _: (node.attrs["value"],) * 2,
    ops.iota: lambda node, _: (0, combine(node.attrs["size"], 1, -1)),
    ops.in_range: lambda node, _: (0, combine(node.attrs["size"], 1, -1)),
    ops.argmax: _argmax,
    ops.get: _get,
    ops.cast: _cast,
    ops.where: _where,
    ops.remainder: _remainder,
    ops.floor_divide_: _divided,
    ops.shift_right: _divided,
    ops.add: _arithmetic,
    ops.subtract: _arithmetic,
    ops.minimum: _clamped,
    ops.maximum: _clamped,
    ops.concatenate: _joined,
    ops.pad: _padded,
    **{
        op: _same
        for op in (
            ops.reshape,
            ops.permute,
            ops.expand,
            ops.slice_,
            ops.flip,
            ops.windows,
            ops.gather,
            ops.stop_gradient,
            ops.barrier,
            ops.transfer,
            ops.pruned,
        )
    },
}
