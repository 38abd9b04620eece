"""Attention on GPUs: the library's placed kernels, for matrix units that run beside the threads and
for those of a warp.

Invariant: as in `attention`; no launch keeps scores or probabilities in memory.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.config import config, invariant
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from ..kernels.attention import backward_plan, threads_backward, threads_forward
from ..kernels.attention import plan as attention_plan
from ..kernels.attention.backward import attention_backward
from ..kernels.attention.forward import wide_attention
from ..kernels.attention.shape import AttentionShape
from ..tile.build import Body
from .attention import AttentionFamily, memories

NO_PLAN = "no Plan fits shared memory"


def fast() -> bool:
    """Whether sums may differ in their order from run to run."""
    return config().determinism == "fast"


class ThreadAttention(AttentionFamily):
    """Attention on blocks of threads."""

    def refusal(self, node: Node, x: AttentionShape, target: Target) -> str:
        """Why no kernel takes a Node; '' where one does."""
        units, forward = bool(target.asynchronous_units), node.op is ops.attention
        if forward and invariant():
            return "invariant: its Plan depends on the number of queries"
        if not units and not target.matrix_units(x.dtype, x.dtype):
            return f"{target.name} has no matrix units for {x.dtype}"
        if forward:
            kernel = attention_plan if units else threads_forward
            return kernel.why_not(x) or ("" if any(kernel.plans(x, target)) else NO_PLAN)
        if units:
            return backward_plan.why_not(x)
        sides = [threads_backward.plans(x, target, side) for side in threads_backward.SIDES]
        return threads_backward.why_not(x) or ("" if all(sides) else NO_PLAN)

    def bodies(
        self, node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> list[Body]:
        """By the units that the Target has."""
        units, more = bool(target.asynchronous_units), memories(node)
        if node.op is ops.attention and units:
            plan = attention_plan.choose(x, target)
            tiles = x.batch * x.heads * -(-high(x.queries) // plan.tile[0])
            plan = replace(plan, dependent=True, early=high(tiles) <= plan.programs)
            return [wide_attention(x, plan, name, more)]
        if node.op is ops.attention:
            return [threads_forward.attend(x, threads_forward.plans(x, target)[0], target, more)]
        if units:
            return attention_backward(x, backward_plan.choose(x, fast()), more, name)
        return [
            threads_backward.backward(
                x, threads_backward.plans(x, target, side)[0], target, side, more
            )
            for side in threads_backward.SIDES
        ]
