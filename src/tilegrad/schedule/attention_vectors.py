"""Attention on CPUs: which of the library's kernels takes a Node, and its launches.

Invariant: as in `attention`; what is taken needs memory that grows with tokens, not with their
square.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import bfloat16, float16, float32, float64
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..kernels.attention.shape import AttentionShape
from ..kernels.attention_cpu import decode, gradients, score_tiles
from ..tile.build import Body
from .attention import AttentionFamily, memories

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
    ) -> Sequence[Body]:
        """Bodies, in the order they run."""
        made = _forward if node.op is ops.attention else _backward
        return made(node, x, target, wanted, name)


def _forward(
    node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
) -> Sequence[Body]:
    more, keeps, few = memories(node), 1 in wanted, decode.choose(x, target)
    if few is None:
        return [score_tiles.forward(x, more, score_tiles.choose(x, target), name, keeps)]
    return decode.decode(x, more, few, name, decode.parts_of(x, target), keeps)


def _backward(
    node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
) -> Sequence[Body]:
    """One Body for dq, one for dk and dv."""
    more, plan = memories(node), gradients.choose(x, target)
    bodies = []
    if 0 in wanted:
        bodies.append(gradients.backward(x, more, plan, f"{name}_q", ("dq",)))
    if wanted & {1, 2}:
        bodies.append(gradients.backward(x, more, plan, f"{name}_kv", ("dk", "dv")))
    return bodies
