"""Families of rows in groups: their sort, and the outer products of each group.

Products of groups are dots among others (`problem.py`); what is around them are kernels in tiles
that run on every Target. Invariant: sizes of blocks follow from sizes and Target alone, and no sum
is cut by them but along a group's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from ..kernels import grouped as kernels
from ..tile.plan import Plan
from .chosen import Chosen, Surroundings
from .family import Offer

FEWEST, MOST = 64, 1024  # ids that a program takes at a time
EACH = 128  # of them for a warp
SIDE, STEP = 64, 32  # of a tile of outer products, and rows of a group at a time


class Groups(Chosen):
    """Programs of any Target."""

    def calls(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """One launch."""
        if node.op is ops.grouped_outer:
            plan = Plan().with_(m=SIDE, n=SIDE, k=STEP)
            definition, static = kernels.grouped_outer, {}
        else:
            definition, static = kernels.group_rows, dict(node.attrs)
            block = min(MOST, max(FEWEST, 1 << (high(node.inputs[0].shape[0]) - 1).bit_length()))
            static["block"] = block if target.has_threads else FEWEST
            plan = Plan().with_(warps=max(1, static["block"] // EACH))
        bound = definition.bind([n.type for n in inputs], static, plan)
        return near.call(*inputs, callee=definition.callee(bound, plan, target))


__all__ = ["Groups"]
