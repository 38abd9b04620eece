"""Lower a Region of elementwise values and reductions for a Target with blocks of threads.

Invariant: the Bodies together compute what the Region stores, and the order of every sum depends
on shapes and the Target alone.
"""

from __future__ import annotations

from ...core.target import Target
from ...ir.symbol import Size, high
from ..family import Bodies
from ..region import Region
from .columns import by_columns
from .flat import FlatTiles
from .pair import Pair, lower_pair
from .rows import by_rows
from .space_threads import ThreadSpace

UNEVEN = 512  # rows below this are better cut without regard to rows than read off their vectors


def lower_loops(region: Region, target: Target, name: str) -> Bodies:
    """The Bodies of a Region."""
    if isinstance(region, Pair):
        return lower_pair(region, target, name)
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
