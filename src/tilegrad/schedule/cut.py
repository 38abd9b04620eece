"""What is known of a Graph while it is cut into Regions, and what Families ask of that.

Invariant: the Region's own values are read at their own element only, wherever the answer is yes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import loop_index
from ..ir.types import product
from .region import REDUCE, Region, own_index, reads_of, reduce_split

MOST_VALUES = 32  # of a Region of loops


class Cut:
    """Values, and the Regions they are in so far."""

    def __init__(self, values: set[Node], target: Target) -> None:
        self.values, self.target = values, target
        self.region_of: dict[Node, Region] = {}
        self.regions: list[Region] = []

    def fits_loops(self, node: Node, region: Region, leaves: Sequence[Node]) -> bool:
        """Whether a value may join a Region of generated loops."""
        if region.kind != "loops" or len(region.values) >= MOST_VALUES:
            return False
        shape = self.adapted(node, region)
        return shape is not None and self.aligned(node, shape, leaves)

    def follows(self, node: Node, region: Region, leaves: Sequence[Node]) -> bool:
        """Whether a value, no sum, can be computed of a product on its way out."""
        if region.kind != "dot" or node.op in REDUCE:
            return False
        return product(node.shape) == region.total and self.aligned(node, region, leaves)

    def adapted(self, node: Node, region: Region) -> Region | None:
        """The Region with rows set so that the value has a place in it, or None."""
        if node.op not in REDUCE:
            size = product(node.shape)
            if size == region.total or (region.rows is not None and size == region.rows):
                if region.order == "column" and size == region.total:
                    return None  # columns are swept once: no element-level results
                return region
            return None
        split = reduce_split(node)
        if split is None or product(node.inputs[0].shape) != region.total:
            return None
        rows, order = split
        if region.rows is None:
            if order == "column":
                return None
            return Region("loops", region.values, region.total, rows, order, region.number)
        return region if (rows, order) == (region.rows, region.order) else None

    def aligned(
        self, node: Node, region: Region, leaves: Sequence[Node], own: set[Node] | None = None
    ) -> bool:
        """Whether the value reads the Region's own values only at its own element."""
        mine = self.regions[region.number] if own is None else None
        inside = {x for x in leaves if (self.region_of.get(x) is mine if own is None else x in own)}
        if not inside:
            return True
        row = loop_index("row", region.rows if region.rows is not None else 1)
        column = loop_index("column", region.columns)
        source = node.inputs[0] if node.op in REDUCE else node
        start = own_index(source, row, column, region)
        if start is None:
            return False
        found = reads_of([(source, start)], self.values, {node})
        return all(
            index is not None and own_index(v, row, column, region) == index
            for v, index in found
            if v in inside
        )
