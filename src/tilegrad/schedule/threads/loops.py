"""Lower a group of elementwise values and reductions for a Target with blocks of threads.

Invariant: the Bodies together compute what the group stores, and the order of every sum depends
on shapes and the Target alone.
"""

from __future__ import annotations

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import high
from ...tile.build import Body
from ..fuse import Group
from .columns import ThreadColumns
from .space import Roles

UNEVEN = 512  # rows below this are better cut without regard to rows than read off their vectors


class ThreadLowering(ThreadColumns):
    """Lowers one group."""

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
    group: Group, reads: list[Node], values: set[Node], target: Target, name: str
) -> list[tuple[Body, Roles]]:
    """The Bodies of a group."""
    lowering = ThreadLowering(group, values, target, name)
    lowering.reads = reads
    return lowering.lower()
