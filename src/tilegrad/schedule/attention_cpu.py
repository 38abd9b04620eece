"""Attention on CPUs: which of the library's kernels takes a Node, and its launches.

Invariant: as in `attention`; what is taken needs memory that grows with tokens, not with their
square.
"""

from __future__ import annotations

from typing import Any

from ..core.dtype import bfloat16, float16, float32, float64
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.types import Array, Memory
from ..kernels import attention_cpu, attention_cpu_matrix
from ..kernels.attention_cpu import Forward
from ..kernels.attention_shape import AttentionShape
from ..tile.build import Body

DTYPES = (float32, float64, bfloat16, float16)


def why_not(node: Node, x: AttentionShape, target: Target) -> str:
    """Why no kernel takes the Node; '' where one does."""
    if x.dtype not in DTYPES:
        return f"no kernel for {x.dtype.name}"
    if x.dropout > 0.0:
        return "dropout"
    others = [name for name in x.extras if name not in attention_cpu.TAKEN]
    if others:
        return " and ".join(others)
    if x.heads == 0 or x.width == 0 or x.value_width == 0:
        return "nothing to compute"
    return "" if node.op is ops.attention else "no kernel for the backward yet"


def launches(
    node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
) -> list[tuple[Body, list[Any]]]:
    """Bodies, and what their parameters stand for."""
    more = [memory_of(i) for i in node.inputs[3:]]
    matrix = attention_cpu_matrix.choose(x, target)
    if matrix is not None:
        forward: Forward = attention_cpu_matrix.MatrixForward(x, more, matrix, name, 1 in wanted)
    else:
        plan = attention_cpu.choose(x, target)
        forward = Forward(x, more, plan, name, 1 in wanted)
    body = forward.build()
    inputs = [("input", i) for i in range(len(node.inputs))]
    return [(body, [*inputs, ("result", 0), *([("result", 1)] if 1 in wanted else [])])]


def memory_of(node: Node) -> Memory:
    """The Memory an input lies in."""
    assert isinstance(node.type, Array)
    return Memory(node.type.shape, node.type.dtype)
