"""Attention on GPUs: the library's placed kernels, for matrix units that run beside the threads and
for those of a warp.

Invariant: as in `attention`; no launch keeps scores or probabilities in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.config import config, invariant
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from ..ir.types import Array, Memory
from ..kernels.attention import backward as attention_backward
from ..kernels.attention import forward as attention
from ..kernels.attention import plan as attention_plan
from ..kernels.attention import threads_backward, threads_forward
from ..kernels.attention.shape import AttentionShape
from ..tile.build import Body
from .attention import AttentionFamily, Given, memories

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
    ) -> Given:
        """Bodies, and what their parameters stand for: by the names that these have."""
        asynchronous, more = bool(target.asynchronous_units), memories(node)
        read, results, made = ["q", "k", "v"], ["out", "lse"], [_forward, _forward_of_warps]
        if node.op is not ops.attention:
            read += ["dout", "lse", "delta"]
            results = [f"d{n}" for n in ("q", "k", "v", *node.attrs["wanted"])]
            made = [_backward, _backward_of_warps]
        bodies, scratch = made[0 if asynchronous else 1](x, target, more, node, name)
        stands: dict[str, Any] = {n: ("input", i) for i, n in enumerate((*read, *x.extras))}
        stands |= {n: ("result", i) for i, n in enumerate(results)}
        stands |= {n: ("scratch", (Array(m.shape, m.dtype), n)) for n, m in scratch}
        return [(body, [stands[n] for n in names]) for body, names in bodies]


Launches = list[tuple[Body, Sequence[str]]]  # with the names of their parameters
Made = tuple[Launches, Sequence[tuple[str, Memory]]]  # and scratch that they share


def _named(*bodies: Body) -> Launches:
    return [(body, [p.attrs["name"] for p in body.parameters]) for body in bodies]


def _forward(x: AttentionShape, target: Target, more: Any, node: Node, name: str) -> Made:
    plan = attention_plan.choose(x, target)
    tiles = x.batch * x.heads * -(-high(x.queries) // plan.tile[0])
    plan = replace(plan, dependent=True, early=high(tiles) <= plan.programs)
    return _named(attention.wide_attention(x, plan, name, more)), ()


def _forward_of_warps(x: AttentionShape, target: Target, more: Any, node: Node, name: str) -> Made:
    plan = threads_forward.choose(x, target)
    assert plan is not None
    return _named(threads_forward.attend(x, plan, target, more)), ()


def _backward(x: AttentionShape, target: Target, more: Any, node: Node, name: str) -> Made:
    plan, wanted = attention_backward.choose(x, target, fast()), node.attrs["wanted"]
    made = attention_backward.attention_backward(x, plan, more, wanted, name)
    return [(one.body, one.arguments) for one in made.launches], made.scratch


def _backward_of_warps(x: AttentionShape, target: Target, more: Any, node: Node, name: str) -> Made:
    found = []
    for side in threads_backward.SIDES:
        plan = threads_backward.choose(x, target, side)
        assert plan is not None
        found.append(threads_backward.backward(x, plan, target, side, more))
    return _named(*found), ()
