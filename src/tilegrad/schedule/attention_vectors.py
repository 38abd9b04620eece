"""Attention on CPUs: which of the library's kernels takes a Node, and its launches.

Invariant: as in `attention`; what is taken needs memory that grows with tokens, not with their
square.
"""

from __future__ import annotations

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
        return ""

    def bodies(
        self, node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> list[Body]:
        """Few queries stream keys; others take tiles of scores. Backward has one Body for dq, one
        for dk and dv."""
        more = memories(node)
        if node.op is ops.attention_backward:
            plan = gradients.choose(x, target)
            sides = (({0}, "q", ("dq",)), ({1, 2}, "kv", ("dk", "dv")))
            return [
                gradients.backward(x, more, plan, f"{name}_{side}", gives)
                for numbers, side, gives in sides
                if wanted & numbers
            ]
        few = decode.choose(x, target)
        if few is not None:
            parts = decode.parts_of(x, target)
            return decode.decode(x, more, few, name, parts, 1 in wanted)
        plan = score_tiles.choose(x, target)
        return [score_tiles.forward(x, more, plan, name, 1 in wanted)]
