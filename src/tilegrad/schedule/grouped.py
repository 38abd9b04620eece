"""Families of rows in groups: their sort, and the outer products of each group.

Products of groups are dots among others (`problem.py`); what is around them are kernels in tiles
that run on every Target. Invariant: sizes of blocks follow from sizes and Target alone, and no sum
is cut by them but along a group's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from ..kernels import grouped as kernels
from ..kernels import route as routes
from ..tile.define import Definition
from ..tile.plan import Plan
from .chosen import Chosen, Listed, Surroundings
from .family import Offer

FEWEST_IDS, MOST_IDS = 64, 1024  # that a program takes at a time
EACH = 128  # of them for a warp
SIDE, STEP = 64, 32  # of a tile of outer products, and rows of a group at a time
# tokens: of one launch, that spread over programs of 8, and else
ALONE_TOKENS, FEW_TOKENS, MANY_TOKENS = 16, 512, 64
MOST_EXPERTS, HELD, THREAD = 512, 1 << 13, 2  # scores: of a token, a program and a thread


class Groups(Chosen):
    """Programs of any Target."""

    def why_not(self, node: Node, target: Target) -> str:
        """Scores of a program are in registers."""
        if node.op is not ops.route or kernels.lanes_of(node.inputs[0].shape[1]) <= MOST_EXPERTS:
            return ""
        return "too many experts"

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """One launch, or two where many tokens are routed."""

        def call(definition: Definition, given: Sequence[Node], plan: Plan, **static: Any) -> Any:
            return near.launch(definition, given, plan, target, **static)

        if node.op is ops.grouped_outer:
            return call(kernels.grouped_outer, inputs, Plan().with_(m=SIDE, n=SIDE, k=STEP))
        if node.op is ops.group_rows:
            wanted = 1 << (high(node.inputs[0].shape[0]) - 1).bit_length()
            block = min(MOST_IDS, max(FEWEST_IDS, wanted))
            block = block if target.has_threads else FEWEST_IDS
            plan = Plan().with_(warps=max(1, block // EACH))
            return call(kernels.group_rows, inputs, plan, block=block, **node.attrs)
        tokens, experts = inputs[0].shape
        count, powers, shared = node.attrs.values()
        most, lanes = high(tokens), kernels.lanes_of(experts)
        each = 8 if most <= FEW_TOKENS else min(MANY_TOKENS, HELD // lanes)
        each = 1 << (most - 1).bit_length() if most <= ALONE_TOKENS else each
        plan = Plan().with_(warps=min(32, max(1, each * lanes // (32 * THREAD))))
        how = {"count": count, "powers": powers, "shared": shared, "tokens": each}
        listed = bool(target.asynchronous_units)  # kernels read a list of blocks
        sizes = kernels.list_sizes(tokens * count, high(experts))
        sizes = sizes if listed else {"block": 0, "most": 0}
        if most <= ALONE_TOKENS:
            shares, *found = call(routes.route, inputs, plan, **how, **sizes)
        else:
            shares, *given = call(routes.count_routes, inputs, plan, **how)
            found = call(routes.place_routes, given, plan, tokens=each, **sizes)
        order, inverse, rows, offsets, *blocks = found
        if listed:
            near.listed[offsets] = Listed(blocks[0], sizes["block"], order, rows, count)
        return [shares, order, inverse, offsets]
