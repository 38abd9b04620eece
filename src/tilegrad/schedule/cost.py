"""What a Kernel costs: FLOPs with everything fused counted, and the bytes it moves at least.

Invariant: counts come from shapes alone, so they are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import DType, float32
from ..graph import ops
from ..ir.node import Node, topological
from ..ir.symbol import Size
from ..ir.types import Array, product

FREE = ("leaf", "movement", "tuple", "order", "index", "control", "call")  # without FLOPs


def work_of(reads: Sequence[Node], stored: Sequence[Node]) -> tuple[Size, DType]:
    """FLOPs of a Kernel, fused values included, and the dtype whose peak rate they run at."""
    stop = set(reads)
    flops: Size = 0
    dtype: DType = float32
    for node in topological(stored, stop=stop.__contains__):
        if node not in stop and node.op.category == "attention":
            flops, dtype = flops + attention_flops(node), node.inputs[0].dtype
        if node in stop or not isinstance(node.type, Array):
            continue
        flops = flops + _flops(node)
        if node.op.category == "dot":
            dtype = node.inputs[0].dtype
        elif dtype is float32 and node.dtype.is_float and node.dtype.bits == 64:
            dtype = node.dtype
    return flops, dtype


def _flops(node: Node) -> Size:
    if node.op is ops.dot:
        depth: Any = 1
        for axis in node.attrs["contract"][0]:
            depth = depth * node.inputs[0].shape[axis]
        return product(node.shape) * depth * 2
    if node.op in (ops.grouped_dot, ops.sparse_dot):
        return product(node.shape) * node.inputs[0].shape[1] * 2
    if node.op.category in FREE:
        return 0
    source = node.inputs[0] if node.op.category == "reduce" else node
    return product(source.shape)


def bytes_moved(nodes: Sequence[Node]) -> Size:
    """Bytes of arrays read or written once."""
    moved: Size = 0
    for n in nodes:
        if isinstance(n.type, Array):
            moved = moved + product(n.shape) * n.dtype.size
    return moved


def attention_flops(node: Node) -> Size:
    """FLOPs of an attention or attention_backward Node, as if every key were seen."""
    from ..graph.attention_types import sizes

    s = sizes(node.inputs, node.attrs["orders"])
    products = (1, 1) if node.op is ops.attention else (3, 2)  # of width and of value width
    widths = (s.width * products[0]) + (s.value_width * products[1])
    return product(s.scores) * widths * 2
