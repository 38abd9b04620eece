"""Attention as a Family: what its kernels for vectors and for threads have in common.

Each has a file of its own: a Family with `refusal`, why it does not take a Node, and `launches`,
which gives Bodies and what their parameters stand for: an input of the Node by its number, a result
by its number, or scratch by its type.

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
from ..ir.types import Array, Memory, Tuple
from ..kernels.attention.shape import AttentionShape
from ..tile.build import Body
from .family import Bodies, Family, Made, Offer, roofline
from .region import Region

# Bodies with what each parameter stands for: ('input', i), ('result', i) or ('scratch', type)
Given = list[tuple[Body, list[Any]]]


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
    ) -> Given:
        """Bodies, and what their parameters stand for."""
        raise InternalError("schedule.attention", f"{self.name} has no kernels")

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """The kernels of the library, by the roofline."""
        return self.why_not(region.anchor, target) or [Offer(roofline(region, target))]

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Bodies of a Node."""
        node, stored = region.anchor, region.arrays
        wanted = {v.attrs["index"]: i for i, v in enumerate(stored) if v.op is ops.get}
        where = {x: i for i, x in enumerate(region.inputs)}
        found: Bodies = []
        for body, given in self.launches(node, shape_of(node), target, set(wanted), name):
            roles: list[tuple[str, Any]] = []
            for kind, what in given:
                if kind == "input":
                    roles.append(("read", where[node.inputs[what]]))
                elif kind == "result" and what in wanted:
                    roles.append(("store", wanted[what]))
                elif kind == "result":  # nobody wants it, the kernel still writes it
                    assert isinstance(node.type, Tuple)
                    roles.append(("scratch", (node.type.items[what], "result", what)))
                else:
                    roles.append((kind, what))
            found.append(Made(body, roles))
        return found


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
