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
from ..ir.types import Array
from ..kernels.attention.shape import AttentionShape
from ..kernels.attention_cpu import backward, decode, forward, matrix, matrix_backward
from .attention import AttentionFamily, Given, memories

DTYPES = (float32, float64, bfloat16, float16)


class VectorAttention(AttentionFamily):
    """Attention on vectors."""

    def refusal(self, node: Node, x: AttentionShape, target: Target) -> str:
        """Why no kernel takes a Node; '' where one does."""
        if x.dtype not in DTYPES:
            return f"no kernel for {x.dtype.name}"
        if x.heads == 0 or x.width == 0 or x.value_width == 0:
            return "nothing to compute"
        if node.op is ops.attention_backward and node.attrs["wanted"]:
            return "gradients of " + " and ".join(node.attrs["wanted"])
        return ""

    def launches(
        self, node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> Given:
        """Bodies, and what their parameters stand for."""
        made = _forward if node.op is ops.attention else _backward
        return made(node, x, target, wanted, name)


def _forward(node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str) -> Given:
    more, keeps = memories(node), 1 in wanted
    inputs: list[Any] = [("input", i) for i in range(len(node.inputs))]
    results: list[Any] = [("result", 0), *([("result", 1)] if keeps else [])]
    few, unit = decode.choose(x, target), matrix.choose(x, target)
    if few is None:
        kind, plan = forward.Forward, unit or forward.choose(x, target)
        if unit is not None:
            kind = matrix.MatrixForward
        return [(kind(x, more, plan, name, keeps).build(), [*inputs, *results])]
    parts = decode.parts_of(x, target)
    body = decode.Decode(x, more, few, name, parts, keeps).build()
    if parts == 1:
        return [(body, [*inputs, *results])]
    left = decode.partial_parameters(x, x.batch, few, parts)
    scratch = [("scratch", (Array(t.shape, t.dtype), i)) for i, (_, t) in enumerate(left)]
    last = decode.Combine(x, few, f"{name}_combine", parts, keeps).build()
    return [(body, [*inputs, *scratch]), (last, [*scratch, *results])]


def _backward(node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str) -> Given:
    """One Body for dq, one for dk and dv."""
    more, unit = memories(node), matrix_backward.choose(x, target)
    plan = backward.choose(x, target) if unit is None else unit
    queries, keys = backward.QueryGradient, backward.KeyGradient
    if unit is not None:
        queries, keys = matrix_backward.MatrixQueryGradient, matrix_backward.MatrixKeyGradient
    inputs: list[Any] = [("input", i) for i in range(len(node.inputs))]
    found: Given = []
    if 0 in wanted:
        body = queries(x, more, plan, f"{name}_q", ("dq",)).build()
        found.append((body, [*inputs, ("result", 0)]))
    if wanted & {1, 2}:
        body = keys(x, more, plan, f"{name}_kv", ("dk", "dv")).build()
        found.append((body, [*inputs, ("result", 1), ("result", 2)]))
    return found
