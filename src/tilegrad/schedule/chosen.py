"""Families of single ops, whose kernels a pass chooses before Regions are cut.

A paged cache, drawing a token and quantised weights are computed by kernels alone. The pass asks
the Families of such an op what they offer (`offers_for`), and the one that is selected writes the
op as calls of its kernels (`replacements`). Invariant: the Verdict goes with every call that is
made, so that `explain` tells who offered what for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import UserError
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node, users
from ..ir.rewrite import Log
from ..ir.symbol import Size, high
from ..ir.types import Tuple
from ..tile.callee import KernelCallee
from ..tile.define import Definition
from ..tile.plan import Plan
from .cost import bytes_moved
from .families import CHOICES, family_of, rows_of
from .family import Family, Offer, Offers, Verdict, judged, refusals


@dataclass(frozen=True)
class Listed:
    """Rows in groups as kernels take them: a list of blocks of so many rows; and, where they were
    sorted with their ids, the order of rows by group and what row of `each` it was made of."""

    blocks: Node
    block: int
    order: Node | None = None
    rows: Node | None = None
    each: int = 0


@dataclass(eq=False)
class Surroundings:
    """What a pass knows around the Nodes of one Block, and the calls that it makes there."""

    order: Sequence[Node]
    results: set[Node]
    log: Log
    joined: dict[Node, Node] = field(default_factory=dict)  # computed with a Node before it
    listed: dict[Node, Listed] = field(default_factory=dict)  # by the offsets of groups
    verdict: Verdict | None = None  # of the Node that is being replaced

    def __post_init__(self) -> None:
        self.readers = users(self.order)

    def fired(self, name: str) -> None:
        """Count what was chosen."""
        self.log.count(name)

    def call(self, *inputs: Node, callee: KernelCallee) -> list[Node]:
        """The results of a kernel; it is counted, and told by whom it was chosen."""
        self.fired(callee.name)
        callee.verdict = self.verdict
        made = ops.call(*inputs, callee=callee)
        return build.items(made) if isinstance(made.type, Tuple) else [made]

    def launch(
        self, kernel: Definition, given: Sequence[Node], plan: Plan, target: Target, **static: Any
    ) -> list[Node]:
        """The results of a kernel that is written in tiles."""
        bound = kernel.bind([n.type for n in given], static, plan)
        return self.call(*given, callee=kernel.callee(bound, plan, target))


# what the results of an op become, of its inputs
Writer = Callable[[Sequence[Node], Surroundings], list[Node]]


class Chosen(Family):
    """A Family of single ops."""

    def offers_for(self, node: Node, near: Surroundings, target: Target) -> Offers:
        """Plans for an op with their seconds, or why there is none."""
        return [Offer(roofline_of(node, target))]

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """What an op's results become, by an offer of this Family, whose Plan writes it."""
        write: Writer = offer.plan
        return write(inputs, near)


def choose(node: Node, inputs: Sequence[Node], near: Surroundings, target: Target) -> list[Node]:
    """What the results of an op become, by the Family with the best offer."""
    if node in near.joined:
        return [near.joined[node]]
    rows = rows_of(CHOICES[node.op.name], node.op.name, target)
    families = [f for f in map(family_of, rows) if isinstance(f, Chosen)]
    answers = [(family, family.offers_for(node, near, target)) for family in families]
    why = refusals(answers)
    if why:
        raise UserError(
            f"no kernel takes this: {why}",
            op=node.op.name,
            got=str(node.type),
            location=node.location,
        )
    family, offer, near.verdict = judged(answers)
    assert isinstance(family, Chosen)
    return family.replacements(node, inputs, offer, near, target)


def roofline_of(node: Node, target: Target, flops: Size = 0) -> float:
    """Seconds at the Target's peak rates, of an op that reads its inputs once."""
    arrays = [*node.inputs, *([] if isinstance(node.type, Tuple) else [node])]
    moved = high(bytes_moved(arrays)) / max(1.0, target.peak_bytes())
    return max(moved, high(flops) / max(1.0, target.peak_flops(node.inputs[0].dtype)))
