"""Weights of which two of every four are kept, spread out by ordinary ops.

What `core.kept` does with NumPy, as Graph ops: for kernels that read any value, where none takes
what is kept. Invariant: values are those that are kept, bit for bit, and zeros.
"""

from __future__ import annotations

from ..core.dtype import bfloat16, int32
from ..core.kept import COLUMNS, DIGITS, LANES
from ..ir.node import Node
from . import build, ops
from .unpack import GRAPH


def weights_of(dot: Node) -> Node:
    """The weights (rows, k) of a `sparse_dot`; those of 8 bits in bfloat16, which holds them."""
    (_, kept, words), rows = dot.inputs, dot.attrs["rows"]
    half = kept.shape[1]
    positions = build.slice_axis(_positions(words, kept.dtype.size, dot.attrs["depth"]), 1, 0, half)
    values = build.cast(kept, bfloat16) if kept.dtype.size == 1 else kept
    at, pairs = (
        build.reshape(build.slice_axis(x, 0, 0, rows), (rows, half // 2, 2))
        for x in (positions, values)
    )
    found: Node = build.broadcast_to(build.constant(0, values.dtype), (rows, half // 2, 4))
    for number in range(2):
        place, value = (build.slice_axis(x, 2, number, number + 1) for x in (at, pairs))
        here = GRAPH.apply("equal", place, build.iota(4, int32))
        found = build.where(here, build.broadcast_to(value, found.shape), found)
    return build.reshape(found, (rows, 2 * half))


def _positions(words: Node, size: int, depth: int) -> Node:
    """The positions (m, k / 2) that words say; see `core.kept.order`."""
    (warps, half), each = words.shape, depth // COLUMNS
    steps = 2 * half // depth
    cut = build.reshape(words, (warps, steps, LANES, each, 1))
    shifts = build.multiply(build.iota(DIGITS, int32), 2)
    digits = GRAPH.apply("shift_right", cut, shifts)
    digits = ops.bit_and(digits, build.broadcast_to(build.constant(3, int32), digits.shape))
    if size == 1:  # lanes: row, half of the columns, half of the rows
        shape, order = (warps, steps, 8, 2, 2, each, DIGITS), (0, 4, 2, 1, 5, 3, 6)
    else:  # lanes: row, fourth of the columns; digits: half of the rows
        shape, order = (warps, steps, 8, 4, each, 2, DIGITS // 2), (0, 5, 2, 1, 4, 3, 6)
    found = build.permute(build.reshape(digits, shape), order)
    return build.reshape(found, (16 * warps, half))


__all__ = ["weights_of"]
