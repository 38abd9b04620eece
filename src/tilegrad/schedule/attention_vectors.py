"""Attention on CPUs: which of the library's kernels takes a Node, and its launches.

Invariant: as in `attention`; what is taken needs memory that grows with tokens, not with their
square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import bfloat16, float16, float32, float64
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.types import Array
from ..kernels.attention.shape import AttentionShape
from ..kernels.attention_cpu import decode, gradients, score_tiles
from ..tile.build import Body
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
    more, keeps, few = memories(node), 1 in wanted, decode.choose(x, target)
    if few is None:
        plan = score_tiles.choose(x, target)
        return _launches(x, [score_tiles.forward(x, more, plan, name, keeps)])
    return _launches(x, decode.decode(x, more, few, name, decode.parts_of(x, target), keeps))


def _backward(node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str) -> Given:
    """One Body for dq, one for dk and dv."""
    more, plan = memories(node), gradients.choose(x, target)
    bodies = []
    if 0 in wanted:
        bodies.append(gradients.backward(x, more, plan, f"{name}_q", ("dq",)))
    if wanted & {1, 2}:
        bodies.append(gradients.backward(x, more, plan, f"{name}_kv", ("dk", "dv")))
    return _launches(x, bodies, ("dout", "lse", "delta"))


def _launches(x: AttentionShape, bodies: Sequence[Body], given: Sequence[str] = ()) -> Given:
    """Bodies, and what their parameters stand for, by name."""
    inputs, left = ["q", "k", "v", *given, *x.extras], decode.PARTIAL
    results = ["dq", "dk", "dv"] if given else ["out", "lse"]

    def role(parameter: Node) -> tuple[str, Any]:
        name = parameter.attrs["name"]
        if name in left:
            return "scratch", (Array(parameter.shape, parameter.dtype), left.index(name))
        if name in inputs:
            return "input", inputs.index(name)
        return "result", results.index(name)

    return [(body, [role(p) for p in body.parameters]) for body in bodies]
