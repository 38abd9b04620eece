"""Attention as a Family: what its kernels for vectors and for threads have in common.

Each has a file of its own: a Family with `refusal`, why it does not take a Node, and `launches`,
which gives Bodies; their parameters bear the names of inputs and results of the Node, all others
are scratch.

Invariant: `why_not` is '' exactly for Nodes that the Schedule lowers to a kernel; all others are
written in ordinary ops before they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import InternalError
from ..core.target import Target
from ..graph import ops
from ..graph.attention import extras_of
from ..graph.attention_types import sizes
from ..ir.node import Node
from ..ir.types import Array, Memory
from ..kernels.attention.shape import AttentionShape
from ..tile.build import Body
from .family import Bodies, Family, Made, Offer, roofline
from .region import Region


class AttentionFamily(Family):
    """Attention by kernels of the library: each file has `refusal` and `launches`."""

    def why_not(self, node: Node, target: Target) -> str:
        """Why no kernel of the Family takes a Node; '' where one does."""
        shape = shape_of(node)
        if not isinstance(shape.width, int) or not isinstance(shape.value_width, int):
            return "the head size is not known"
        return self.refusal(node, shape, target)

    def refusal(self, node: Node, shape: AttentionShape, target: Target) -> str:
        """The same of a Node whose sizes are known."""
        raise InternalError("schedule.attention", f"{self.name} has no kernels")

    def launches(
        self, node: Node, shape: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> Sequence[Body]:
        """Bodies, in the order they run; `wanted` are the numbers of results."""
        raise InternalError("schedule.attention", f"{self.name} has no kernels")

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """The kernels of the library, by the roofline."""
        return self.why_not(region.anchor, target) or [Offer(roofline(region, target))]

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Bodies of a Node."""
        node, wanted = region.anchor, region.items
        shape, backward = shape_of(node), node.op is ops.attention_backward
        more = ("dout", "lse", "delta") if backward else ()
        read = dict(zip(("q", "k", "v", *more, *shape.extras), node.inputs))
        results = ["out", "lse"]
        if backward:
            results = [f"d{n}" for n in ("q", "k", "v", *node.attrs["wanted"])]

        def role(parameter: Node) -> tuple[str, Any]:
            own = parameter.attrs["name"]
            if own in read:
                return "read", region.inputs.index(read[own])
            if own in results and results.index(own) in wanted:
                return "store", wanted[results.index(own)]
            return "scratch", (Array(parameter.shape, parameter.dtype), own)  # or of no use

        made = self.launches(node, shape, target, set(wanted), name)
        return [Made(body, [role(p) for p in body.parameters]) for body in made]


def memories(node: Node) -> list[Memory]:
    """The Memories that the extras of a Node lie in."""
    arrays = [x.type for x in extras_of(node).values()]
    return [Memory(t.shape, t.dtype) for t in arrays if isinstance(t, Array)]


def shape_of(node: Node) -> AttentionShape:
    """Sizes and options of an attention or attention_backward Node."""
    q, k, v = node.inputs[:3]
    s = sizes(q, k, v, node.attrs["orders"])
    options = {
        name: node.attrs[name]
        for name in ("scale", "band", "softcap", "dropout", "extras", "orders")
    }
    return AttentionShape(
        s.batch,
        s.heads,
        s.key_heads,
        s.queries,
        s.keys,
        s.width,  # type: ignore[arg-type]
        s.value_width,  # type: ignore[arg-type]
        q.dtype,
        **options,
    )
