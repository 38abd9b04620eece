"""Attention on GPUs: the library's placed kernels, for matrix units that run beside the threads and
for those of a warp.

Invariant: as in `attention`; no launch keeps scores or probabilities in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.config import config, invariant
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from ..ir.types import Memory
from ..kernels.attention import backward as attention_backward
from ..kernels.attention import forward as attention
from ..kernels.attention import plan as attention_plan
from ..kernels.attention import threads_backward, threads_forward
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
        asynchronous, forward = bool(target.asynchronous_units), node.op is ops.attention
        if forward and invariant():
            return "invariant: its Plan depends on the number of queries"
        if not asynchronous and not target.matrix_units(x.dtype, x.dtype):
            return f"{target.name} has no matrix units for {x.dtype}"
        if forward:
            kernel = attention_plan if asynchronous else threads_forward
            return kernel.why_not(x) or ("" if any(kernel.plans(x, target)) else NO_PLAN)
        wanted = node.attrs["wanted"]
        if asynchronous:
            why = attention_backward.why_not(x, None, wanted)
            return why or ("" if attention_backward.candidates(x, target, fast()) else NO_PLAN)
        chosen = [threads_backward.choose(x, target, side) for side in threads_backward.SIDES]
        return threads_backward.why_not(x, wanted) or ("" if all(chosen) else NO_PLAN)

    def launches(
        self, node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> Sequence[Body]:
        """Bodies, in the order they run."""
        more = memories(node)
        if not target.asynchronous_units:
            return _of_warps(x, target, more, node.op is ops.attention)
        if node.op is ops.attention:
            plan = attention_plan.choose(x, target)
            tiles = x.batch * x.heads * -(-high(x.queries) // plan.tile[0])
            plan = replace(plan, dependent=True, early=high(tiles) <= plan.programs)
            return [attention.wide_attention(x, plan, name, more)]
        back = attention_backward.choose(x, target, fast())
        made = attention_backward.attention_backward(x, back, more, node.attrs["wanted"], name)
        return [one.body for one in made.launches]


def _of_warps(
    x: AttentionShape, target: Target, more: Sequence[Memory], forward: bool
) -> Sequence[Body]:
    """Those of matrix units of a warp."""
    if forward:
        plan = threads_forward.choose(x, target)
        assert plan is not None
        return [threads_forward.attend(x, plan, target, more)]
    found = []
    for side in threads_backward.SIDES:
        back = threads_backward.choose(x, target, side)
        assert back is not None
        found.append(threads_backward.backward(x, back, target, side, more))
    return found
