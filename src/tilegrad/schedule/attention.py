"""Attention as Families: which of the library's kernels takes a Node, on vectors and on threads.

Each Family says of a Node why it does not take it, or gives what writes the launches. Their
parameters bear the names of what the Node takes and gives; what has another name is scratch that
they share. Kernels are imported where a Family of the Target is asked.

Invariant: `why_not` is '' exactly for Nodes that the Schedule lowers to a kernel; all others are
written in ordinary ops before they come here. No launch keeps scores or probabilities in memory:
what is needed grows with tokens, not with their square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.config import config, invariant
from ..core.dtype import bfloat16, float16, float32, float64
from ..core.target import Target
from ..graph import ops
from ..graph.attention import extras_of
from ..graph.attention_types import ATTRS, sizes
from ..ir.node import Node
from ..ir.types import Array, Memory
from ..kernels.attention.shape import FORWARD, GRADIENTS, AttentionShape, parameters
from ..tile.build import Body
from .family import Bodies, Family, Made, Offer, Offers, roofline
from .region import Region

DTYPES = (float32, float64, bfloat16, float16)  # of kernels on vectors
NO_PLAN = "no Plan fits shared memory"
RESULTS = (FORWARD, ("dq",), ("dk", "dv"))  # of tokens of one side

# the launches, in order, that give at least these results; and their name
Writer = Callable[[set[str], str], list[Body]]


class AttentionFamily(Family):
    """Attention by kernels of the library."""

    # kernels(node, x, target): why no kernel takes a Node whose sizes are known, or what writes the
    # launches (a Writer)
    kernels: Any

    def why_not(self, node: Node, target: Target) -> str:
        """Why no kernel of the Family takes a Node; '' where one does."""
        shape = shape_of(node)
        if not isinstance(shape.width, int) or not isinstance(shape.value_width, int):
            return "the head size is not known"
        if node.attrs.get("wanted"):
            return "gradients of " + " and ".join(node.attrs["wanted"])
        found = self.kernels(node, shape, target)
        return found if isinstance(found, str) else ""

    def offers(self, region: Region) -> Offers:
        """The kernels of the library, by the roofline."""
        return self.why_not(region.anchor, region.target) or [Offer(roofline(region))]

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The Bodies of a Node."""
        node, x = region.anchor, shape_of(region.anchor)
        results = FORWARD if node.op is ops.attention else GRADIENTS
        given = [name for name, _ in parameters(x, memories(node), results)]  # as the Node has them
        inputs = dict(zip(given, node.inputs))
        stored = {results[number]: place for number, place in region.items.items()}

        def role(parameter: Node) -> tuple[str, Any]:
            own = parameter.attrs["name"]
            if own in inputs:
                return "read", region.inputs.index(inputs[own])
            if own in stored:
                return "store", stored[own]
            return "scratch", (Array(parameter.shape, parameter.dtype), own)

        write: Writer = self.kernels(node, x, region.target)
        return [Made(b, [role(p) for p in b.parameters]) for b in write(set(stored), region.name)]


class VectorAttention(AttentionFamily):
    """Attention on vectors: few queries stream keys, others take tiles of scores. Backward has one
    Body for dq, one for dk and dv."""

    def kernels(self, node: Node, x: AttentionShape, target: Target) -> str | Writer:
        """See `AttentionFamily`."""
        from ..kernels.attention_cpu import decode, engine, score_tiles
        from ..kernels.attention_cpu.source import Source

        if x.dtype not in DTYPES:
            return f"no kernel for {x.dtype.name}"
        if x.heads == 0 or x.width == 0 or x.value_width == 0:
            return "nothing to compute"
        more = memories(node)

        def forward(wanted: set[str], name: str) -> list[Body]:
            given = parameters(x, more, FORWARD if "lse" in wanted else FORWARD[:1])
            plan = decode.choose(x, target)
            if plan is not None:
                source, parts = Source(x, plan.lanes), decode.parts_of(x, target)
                return decode.streamed(source, given, x.batch, plan, name, parts)
            plan = engine.choose(x, target)
            return [score_tiles.Forward(Source(x, plan.lanes), given, plan, name).build()]

        def backward(wanted: set[str], name: str) -> list[Body]:
            plan = engine.choose(x, target, backward=True)
            return [
                kind(Source(x, plan.lanes), given, plan, f"{name}_{kind.results[0]}").build()
                for kind in score_tiles.BACKWARD
                if wanted.intersection(kind.results)
                for given in [parameters(x, more, kind.results)]
            ]

        return forward if node.op is ops.attention else backward


class ThreadAttention(AttentionFamily):
    """Attention on blocks of threads: matrix units that run beside them, or those of a warp."""

    def kernels(self, node: Node, x: AttentionShape, target: Target) -> str | Writer:
        """See `AttentionFamily`."""
        forward, more = node.op is ops.attention, memories(node)
        if forward and invariant():
            return "invariant: its Plan depends on the number of queries"
        if target.asynchronous_units:
            return _on_units(x, target, more, forward)
        if not target.matrix_units(x.dtype, x.dtype):
            return f"{target.name} has no matrix units for {x.dtype}"
        from ..kernels.attention import threads

        sides = ("",) if forward else threads.SIDES
        plans = {side: threads.plans(x, target, side) for side in sides}
        why = threads.why_not(x, not forward) or ("" if all(plans.values()) else NO_PLAN)
        return why or (
            lambda wanted, name: [
                threads.attend(x, fits[0], target, more, side) for side, fits in plans.items()
            ]
        )


def _on_units(
    x: AttentionShape, target: Target, more: Sequence[Memory], forward: bool
) -> str | Writer:
    """Kernels on matrix units that run beside the threads; where sequences lie one after another,
    tokens of none have launches of their own."""
    from ..kernels.attention import backward, plan
    from ..kernels.attention.forward import wide_attention
    from ..kernels.attention.outside import outside

    def write(wanted: set[str], name: str) -> list[Body]:
        if forward:
            bodies = [wide_attention(x, plan.choose(x, target), name, more)]
        else:
            chosen = plan.choose_backward(x, config().determinism == "fast")
            bodies = backward.attention_backward(x, chosen, more, name)
        sides = (RESULTS[:1] if forward else RESULTS[1:]) if x.packed else ()
        return bodies + [outside(x, more, of, f"{name}_outside_{of[0]}") for of in sides]

    if not forward:
        return plan.backward_why_not(x) or write
    return plan.why_not(x) or (write if any(plan.plans(x, target)) else NO_PLAN)


def memories(node: Node) -> list[Memory]:
    """The Memories that the extras of a Node lie in."""
    arrays = [x.type for x in extras_of(node).values()]
    return [Memory(t.shape, t.dtype) for t in arrays if isinstance(t, Array)]


def shape_of(node: Node) -> AttentionShape:
    """Sizes and options of an attention or attention_backward Node."""
    s = sizes(node.inputs, node.attrs["orders"])
    options = {name: node.attrs[name] for name in ATTRS}
    return AttentionShape(**vars(s), dtype=node.inputs[0].dtype, **options)
