"""Codes with a scale for each block, unpacked by ordinary ops: for kernels that read any value.

Invariant: an operand is its codes times their scales in float32, rounded nowhere else.
"""

from __future__ import annotations

from ..core.dtype import float32
from ..ir.node import Node
from . import build, ops


def scales_of(dot: Node) -> tuple[Node, ...]:
    """The scales of both operands of a product in blocks; none of another product."""
    if dot.op is ops.block_dot:
        return dot.inputs[2:]
    found = ops.group_scales(dot) if dot.op is ops.grouped_dot else ()
    return found if len(found) == 2 else ()


def grain_of(dot: Node) -> tuple[int, int]:
    """Rows of the weights and columns that have one scale."""
    if dot.op is ops.block_dot:
        return dot.attrs["rows"], dot.attrs["block"]
    (groups, rows, columns), scale = dot.inputs[1].shape, scales_of(dot)[1]
    return groups * rows // scale.shape[0], columns // scale.shape[1]


def operand_of(dot: Node, side: int) -> Node:
    """The left (0) or right (1) operand of a product in blocks."""
    codes, scale = dot.inputs[side], scales_of(dot)[side]
    (down, across), (rows, columns) = scale.shape, grain_of(dot)
    rows = rows if side else 1
    wide = build.broadcast_to(
        build.reshape(scale, (down, 1, across, 1)), (down, rows, across, columns)
    )
    factors = build.reshape(wide, (down * rows, across * columns))
    if len(codes.shape) == 2:
        for axis, size in enumerate(codes.shape):
            factors = build.slice_axis(factors, axis, 0, size)
    return build.multiply(build.cast(codes, float32), build.reshape(factors, codes.shape))


__all__ = ["grain_of", "operand_of", "scales_of"]
