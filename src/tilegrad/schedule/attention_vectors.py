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
from ..kernels.attention.shape import AttentionShape
from ..kernels.attention_cpu import backward as attention_cpu_backward
from ..kernels.attention_cpu import decode as attention_cpu_decode
from ..kernels.attention_cpu import forward as attention_cpu
from ..kernels.attention_cpu import matrix as attention_cpu_matrix
from ..kernels.attention_cpu import matrix_backward as attention_cpu_matrix_backward
from ..kernels.attention_cpu.backward import KeyGradient, QueryGradient
from ..kernels.attention_cpu.decode import Combine, Decode
from ..kernels.attention_cpu.forward import Forward
from ..kernels.attention_cpu.matrix import MatrixForward
from ..kernels.attention_cpu.matrix_backward import MatrixKeyGradient, MatrixQueryGradient
from ..tile.build import Body
from .attention import AttentionFamily, Given

DTYPES = (float32, float64, bfloat16, float16)


def why_not(node: Node, x: AttentionShape, target: Target) -> str:
    """Why no kernel takes the Node; '' where one does."""
    if x.dtype not in DTYPES:
        return f"no kernel for {x.dtype.name}"
    others = [name for name in x.extras if name not in attention_cpu.TAKEN]
    if others:
        return " and ".join(others)
    if x.heads == 0 or x.width == 0 or x.value_width == 0:
        return "nothing to compute"
    if node.op is ops.attention_backward and node.attrs["wanted"]:
        return "gradients of " + " and ".join(node.attrs["wanted"])
    return ""


def launches(
    node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
) -> list[tuple[Body, list[Any]]]:
    """Bodies, and what their parameters stand for."""
    if node.op is ops.attention_backward:
        return backward(node, x, target, wanted, name)
    more = [memory_of(i) for i in node.inputs[3:]]
    inputs: list[Any] = [("input", i) for i in range(len(node.inputs))]
    keeps = 1 in wanted
    results: list[Any] = [("result", 0), *([("result", 1)] if keeps else [])]
    few = attention_cpu_decode.choose(x, target)
    matrix = attention_cpu_matrix.choose(x, target)
    if few is not None:
        parts = attention_cpu_decode.parts_of(x, target)
        body = Decode(x, more, few, name, parts, keeps).build()
        if parts == 1:
            return [(body, [*inputs, *results])]
        types = attention_cpu_decode.partial_types(x, few, parts)
        scratch = [("scratch", (t, i)) for i, t in enumerate(types)]
        last = Combine(x, few, f"{name}_combine", parts, keeps).build()
        return [(body, [*inputs, *scratch]), (last, [*scratch, *results])]
    if matrix is not None:
        return [(MatrixForward(x, more, matrix, name, keeps).build(), [*inputs, *results])]
    plan = attention_cpu.choose(x, target)
    return [(Forward(x, more, plan, name, keeps).build(), [*inputs, *results])]


def backward(
    node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
) -> list[tuple[Body, list[Any]]]:
    """The Bodies of attention_backward: one for dq, one for dk and dv."""
    more = [memory_of(i) for i in node.inputs[6:]]
    plan = attention_cpu_matrix_backward.choose(x, target)
    queries, keys = (
        (QueryGradient, KeyGradient) if plan is None else (MatrixQueryGradient, MatrixKeyGradient)
    )
    plan = attention_cpu_backward.choose(x, target) if plan is None else plan
    inputs: list[Any] = [("input", i) for i in range(len(node.inputs))]
    found: list[tuple[Body, list[Any]]] = []
    if 0 in wanted:
        body = queries(x, more, plan, f"{name}_q", ("dq",)).build()
        found.append((body, [*inputs, ("result", 0)]))
    if wanted & {1, 2}:
        body = keys(x, more, plan, f"{name}_kv", ("dk", "dv")).build()
        found.append((body, [*inputs, ("result", 1), ("result", 2)]))
    return found


def memory_of(node: Node) -> Memory:
    """The Memory an input lies in."""
    assert isinstance(node.type, Array)
    return Memory(node.type.shape, node.type.dtype)


class VectorAttention(AttentionFamily):
    """Attention on vectors."""

    def refusal(self, node: Node, shape: AttentionShape, target: Target) -> str:
        """Why no kernel takes a Node; '' where one does."""
        return why_not(node, shape, target)

    def launches(
        self, node: Node, shape: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> Given:
        """Bodies, and what their parameters stand for."""
        return launches(node, shape, target, wanted, name)
