"""Codes with a scale for each block, unpacked by ordinary ops: for kernels that read any value.

Invariant: an operand is its codes times their scales in float32, rounded nowhere else.
"""

from __future__ import annotations

from ..core.dtype import float32
from ..ir.node import Node
from . import build


def operand_of(dot: Node, side: int) -> Node:
    """The left (0) or right (1) operand of a `block_dot`."""
    codes, scale = dot.inputs[side], dot.inputs[2 + side]
    down, across = scale.shape
    rows, columns = dot.attrs["rows"] if side else 1, dot.attrs["block"]
    wide = build.broadcast_to(
        build.reshape(scale, (down, 1, across, 1)), (down, rows, across, columns)
    )
    factors = build.reshape(wide, (down * rows, across * columns))
    for axis, size in enumerate(codes.shape):
        factors = build.slice_axis(factors, axis, 0, size)
    return build.multiply(build.cast(codes, float32), factors)


__all__ = ["operand_of"]
