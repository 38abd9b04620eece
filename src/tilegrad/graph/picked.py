"""`picked_dot` in other ops, two ways: rows read their own weights, or are multiplied with all.

The first does no more work than there is; its rows meet their weights one by one. The second is an
ordinary product with all weights side by side, of which a row keeps its own part: more work by the
number of weights, on units made for it. Invariant: a row's result depends on that row and on its
own weights alone (others count as zeros, and must be finite).
"""

from __future__ import annotations

from ..core.dtype import float32, int32
from ..ir.node import Node
from ..ir.symbol import Size
from . import build


def by_rows(node: Node) -> Node:
    """Each row times its own weights, read by its id."""
    (x, weights, ids), axis = node.inputs, node.attrs["axis"]
    wide = x.dtype if x.dtype.size >= 4 else float32
    own = build.gather(weights, [build.maximum(ids, 0)], [0])  # (T, rows, columns)
    columns = build.unsqueeze(build.cast(x, wide), 3 - axis)
    found = build.sum_(build.multiply(columns, build.cast(own, wide)), axis)
    picked = build.where(build.unsqueeze(build.less(ids, 0), 1), build.constant(0.0, wide), found)
    return build.cast(picked, x.dtype)


def ids_of(offsets: Node, rows: Size) -> Node:
    """(rows,): the group of each row, of offsets (groups + 1,)."""
    count = offsets.shape[0] - 1
    ends = build.slice_(offsets, [1], [count], [1])  # but the last, which all rows are before
    here = build.iota_along((rows, 1), 0, int32)
    passed = build.less_equal(build.unsqueeze(ends, 0), here)
    return build.sum_(build.cast(passed, int32), 1)


def by_all(node: Node) -> Node:
    """A product with all weights side by side, of which each row keeps its own part."""
    (x, weights, ids), axis = node.inputs, node.attrs["axis"]
    count, rows, columns = weights.shape
    zero = build.constant(0.0, x.dtype)
    every = build.iota_along((1, count, 1), 1, ids.dtype)
    own = build.equal(build.reshape(ids, (x.shape[0], 1, 1)), every)  # (T, count, 1)
    if axis == 1:
        parts = build.where(own, build.unsqueeze(x, 1), zero)  # (T, count, rows)
        flat = build.reshape(parts, (x.shape[0], count * rows))
        return build.matmul(flat, build.reshape(weights, (count * rows, columns)))
    transposed = build.transpose(build.reshape(weights, (count * rows, columns)))
    found = build.reshape(build.matmul(x, transposed), (x.shape[0], count, rows))
    return build.sum_(build.where(own, found, zero), 1)


__all__ = ["by_all", "by_rows", "ids_of"]
