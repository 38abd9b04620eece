"""Attention as a Family: what its kernels for vectors and for threads have in common.

Each has a file of its own: a Family with `refusal`, why it does not take a Node, and `bodies`, the
launches. Parameters bear the names of what the Node takes and gives; what has another name is
scratch that they share.

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
from ..graph.attention_types import ATTRS, sizes
from ..ir.node import Node
from ..ir.types import Array, Memory
from ..kernels.attention.shape import AttentionShape
from ..tile.build import Body
from .family import Bodies, Family, Made, Offer, roofline
from .region import Region

BACKWARD = ("q", "k", "v", "dout", "lse", "delta")  # what a backward takes before the extras


class AttentionFamily(Family):
    """Attention by kernels of the library: each file has `refusal` and `bodies`."""

    def why_not(self, node: Node, target: Target) -> str:
        """Why no kernel of the Family takes a Node; '' where one does."""
        shape = shape_of(node)
        if not isinstance(shape.width, int) or not isinstance(shape.value_width, int):
            return "the head size is not known"
        if node.attrs.get("wanted"):
            return "gradients of " + " and ".join(node.attrs["wanted"])
        return self.refusal(node, shape, target)

    def refusal(self, node: Node, shape: AttentionShape, target: Target) -> str:
        """The same of a Node whose sizes are known."""
        raise InternalError("schedule.attention", f"{self.name} has no kernels")

    def bodies(
        self, node: Node, shape: AttentionShape, target: Target, wanted: set[int], name: str
    ) -> list[Body]:
        """The launches, in order, that give at least the results with these numbers."""
        raise InternalError("schedule.attention", f"{self.name} has no kernels")

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """The kernels of the library, by the roofline."""
        return self.why_not(region.anchor, target) or [Offer(roofline(region, target))]

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Bodies of a Node."""
        node, wanted = region.anchor, region.items
        given = ("q", "k", "v") if node.op is ops.attention else BACKWARD
        inputs = dict(zip((*given, *node.attrs["extras"]), node.inputs))
        results = ("out", "lse") if node.op is ops.attention else ("dq", "dk", "dv")

        def role(parameter: Node) -> tuple[str, Any]:
            own = parameter.attrs["name"]
            if own in inputs:
                return "read", region.inputs.index(inputs[own])
            if own in results and results.index(own) in wanted:
                return "store", wanted[results.index(own)]
            return "scratch", (Array(parameter.shape, parameter.dtype), own)

        made = self.bodies(node, shape_of(node), target, set(wanted), name)
        return [Made(body, [role(p) for p in body.parameters]) for body in made]


def memories(node: Node) -> list[Memory]:
    """The Memories that the extras of a Node lie in."""
    arrays = [x.type for x in extras_of(node).values()]
    return [Memory(t.shape, t.dtype) for t in arrays if isinstance(t, Array)]


def shape_of(node: Node) -> AttentionShape:
    """Sizes and options of an attention or attention_backward Node."""
    s = sizes(node.inputs, node.attrs["orders"])
    options = {name: node.attrs[name] for name in ATTRS}
    return AttentionShape(**vars(s), dtype=node.inputs[0].dtype, **options)
