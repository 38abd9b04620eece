"""Lower a Region of elementwise values and reductions for a Target with blocks of threads.

Invariant: the Bodies together compute what the Region stores, and the order of every sum depends
on shapes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, high
from ..cut import Cut
from ..family import Bodies, Family, Offer
from ..region import Region
from .columns import by_columns
from .flat import FlatTiles
from .pair import Pair, lower_pair
from .rows import by_rows
from .space_threads import ThreadSpace

UNEVEN = 512  # rows below this are better cut without regard to rows than read off their vectors


def lower_loops(region: Region, target: Target, name: str) -> Bodies:
    """The Bodies of a Region."""
    space = ThreadSpace(region, target, name)
    space.settle(space.pick_inner())
    if space.reduces:
        return by_columns(space) if space.order == "column" else by_rows(space)
    if crooked(space.inner) and not space.turned() and not space.has_loaded_gather():
        space.settle(region.total)
    return FlatTiles(space, space.sheet(name)).lower()


def crooked(inner: Size) -> bool:
    """Whether rows are short and so uneven that no vector of theirs is aligned."""
    if not isinstance(inner, int):
        return high(inner) < 8
    return inner < 8 or (inner < UNEVEN and inner % 4 != 0)


class ThreadLoops(Family):
    """Generated loops for blocks of threads."""

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """Whether a value is read and written at the Region's own elements."""
        return cut.fits_loops(node, region, leaves)

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """Bodies, in the order they run."""
        if isinstance(region, Pair):
            return lower_pair(region, target, name)
        return lower_loops(region, target, name)
