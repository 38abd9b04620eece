"""Lower a Region of elementwise values and reductions for a Target with blocks of threads.

Invariant: the Bodies together compute what the Region stores, and the order of every sum depends
on shapes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import high
from ...tile.build import Body
from ..family import Bodies, Family, Offer
from ..fuse import Region
from .columns import ThreadColumns
from .space import Roles

if TYPE_CHECKING:
    from ..fuse import Fuser

UNEVEN = 512  # rows below this are better cut without regard to rows than read off their vectors


class ThreadLowering(ThreadColumns):
    """Lowers one Region."""

    def lower(self) -> list[tuple[Body, Roles]]:
        """Bodies, with the roles of their parameters."""
        self.inputs = {n: n for n in self.reads}  # until there are parameters
        self.inner = self.pick_inner()
        self.shape = self._shape(self.inner)
        if self.reduces:
            return self.by_columns() if self.order == "column" else self.by_rows()
        if self.crooked() and not self.turned() and not self.has_loaded_gather():
            self.inner = self.group.total
            self.shape = self._shape(self.inner)
        return self.flat()

    def crooked(self) -> bool:
        """Whether rows are short and so uneven that no vector of theirs is aligned."""
        if not isinstance(self.inner, int):
            return high(self.inner) < 8
        return self.inner < 8 or (self.inner < UNEVEN and self.inner % 4 != 0)


def lower_loops(
    group: Region, reads: list[Node], values: set[Node], target: Target, name: str
) -> list[tuple[Body, Roles]]:
    """The Bodies of a Region."""
    lowering = ThreadLowering(group, values, target, name)
    lowering.reads = reads
    return lowering.lower()


class ThreadLoops(Family):
    """Generated loops for blocks of threads."""

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], fuser: Fuser) -> bool:
        """Whether a value is read and written at the Region's own elements."""
        return fuser.fits_loops(node, region, leaves)

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """Bodies, in the order they run."""
        if region.kind == "pair":
            from .pair import Pair, lower_pair

            assert isinstance(region, Pair)
            return lower_pair(region, region.inputs, region.known, target, name)
        return lower_loops(region, region.inputs, region.known, target, name)
