"""Attention on GPUs: the library's placed kernels, for matrix units that run beside the threads and
for those of a warp.

Invariant: as in `attention`; no launch keeps scores or probabilities in memory.
"""

from __future__ import annotations

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
from ..kernels.attention import threads, threads_backward
from ..kernels.attention.shape import AttentionShape
from .attention import AttentionFamily, Given


def why_not(node: Node, x: AttentionShape, target: Target) -> str:
    """Why no kernel takes the Node; '' where one does."""
    if node.op is ops.attention and invariant():
        return "invariant: its Plan depends on the number of queries"
    if not target.asynchronous_units:
        return _of_warps(node, x, target)
    if node.op is ops.attention:
        return attention_plan.why_not(x) or _no_plan(x, target)
    wanted = node.attrs["wanted"]
    return attention_backward.why_not(x, None, wanted) or (
        "" if attention_backward.candidates(x, target, fast()) else "no Plan fits shared memory"
    )


def _of_warps(node: Node, x: AttentionShape, target: Target) -> str:
    if not target.matrix_units(x.dtype, x.dtype):
        return f"{target.name} has no matrix units for {x.dtype}"
    if node.op is not ops.attention:
        chosen = [threads_backward.choose(x, target, side) for side in threads_backward.SIDES]
        return threads_backward.why_not(x, node.attrs["wanted"]) or (
            "" if all(chosen) else "no Plan fits shared memory"
        )
    return threads.why_not(x) or ("" if threads.choose(x, target) else "no Plan fits shared memory")


def _no_plan(x: AttentionShape, target: Target) -> str:
    return "" if next(attention_plan.plans(x, target), None) else "no Plan fits shared memory"


def fast() -> bool:
    """Whether sums may differ in their order from run to run."""
    return config().determinism == "fast"


def launches(node: Node, x: AttentionShape, target: Target, wanted: set[int], name: str) -> Given:
    """Bodies, and what their parameters stand for."""
    made = _forward if node.op is ops.attention else _backward
    return made(node, x, target, name)


def _forward(node: Node, x: AttentionShape, target: Target, name: str) -> Given:
    if not target.asynchronous_units:
        return _forward_of_warps(node, x, target)
    plan = attention_plan.choose(x, target)
    rows = plan.tile[0]
    tiles = x.batch * x.heads * -(-high(x.queries) // rows)
    plan = replace(plan, dependent=True, early=high(tiles) <= plan.programs)
    body = attention.wide_attention(x, plan, name, [memory_of(i) for i in node.inputs[3:]])
    inputs: list[Any] = [("input", i) for i in range(len(node.inputs))]
    return [(body, [*inputs, ("result", 0), ("result", 1)])]


def _forward_of_warps(node: Node, x: AttentionShape, target: Target) -> Given:
    plan = threads.choose(x, target)
    assert plan is not None
    body = threads.attend(x, plan, target, [memory_of(i) for i in node.inputs[3:]])
    stands: dict[str, Any] = {n: ("input", i) for i, n in enumerate(("q", "k", "v", *x.extras))}
    stands |= {"out": ("result", 0), "lse": ("result", 1)}
    return [(body, [stands[p.attrs["name"]] for p in body.parameters])]


def _backward_of_warps(node: Node, x: AttentionShape, target: Target) -> Given:
    more = [memory_of(i) for i in node.inputs[6:]]
    names = ("q", "k", "v", "dout", "lse", "delta", *x.extras)
    stands: dict[str, Any] = {n: ("input", i) for i, n in enumerate(names)}
    stands |= {f"d{n}": ("result", i) for i, n in enumerate("qkv")}
    found: Given = []
    for side in threads_backward.SIDES:
        plan = threads_backward.choose(x, target, side)
        assert plan is not None
        body = threads_backward.backward(x, plan, target, side, more)
        found.append((body, [stands[p.attrs["name"]] for p in body.parameters]))
    return found


def _backward(node: Node, x: AttentionShape, target: Target, name: str) -> Given:
    if not target.asynchronous_units:
        return _backward_of_warps(node, x, target)
    plan = attention_backward.choose(x, target, fast())
    more = [memory_of(i) for i in node.inputs[6:]]
    wanted = node.attrs["wanted"]
    made = attention_backward.attention_backward(x, plan, more, wanted, name)
    stands: dict[str, Any] = {
        n: ("input", i) for i, n in enumerate(("q", "k", "v", "dout", "lse", "delta", *x.extras))
    }
    stands |= {f"d{n}": ("result", i) for i, n in enumerate(("q", "k", "v", *wanted))}
    for n, memory in made.scratch:
        stands[n] = ("scratch", (Array(memory.shape, memory.dtype), n))
    return [(one.body, [stands[n] for n in one.arguments]) for one in made.launches]


def memory_of(node: Node) -> Memory:
    """The Memory an input lies in."""
    assert isinstance(node.type, Array)
    return Memory(node.type.shape, node.type.dtype)


class ThreadAttention(AttentionFamily):
    """Attention on blocks of threads."""

    def refusal(self, node: Node, shape: AttentionShape, target: Target) -> str:
        """Why no kernel takes a Node; '' where one does."""
        return why_not(node, shape, target)

    def launches(
        self, node: Node, shape: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> Given:
        """Bodies, and what their parameters stand for."""
        return launches(node, shape, target, wanted, name)
