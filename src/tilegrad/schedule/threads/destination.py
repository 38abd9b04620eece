"""Where the values of an `update` go: indices as Exprs, destinations as numbers.

Invariant: a destination is -1 exactly where an index is out of range; nothing is written there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import DType, int32, int64
from ...ir.node import Node
from ...ir.symbol import (
    Size,
    ceil_divide,
    floor_divide,
    high,
)
from ...ir.types import Array, product
from .. import sheet as parameters
from ..access import Index, ravel, symbolic, unravel
from ..problem import power_of_two
from ..update import Update
from . import sort as sorting
from .tiles import ThreadSheet, TileEvaluator, Viewed

WIDE = 32  # unindexed elements from which a tile lies along them
RANKED = 1 << 15  # indices that are ranked by comparing all with all


class UpdateDestinations(Update):
    """One update, its Bodies under construction, and where its values go."""

    sheet: ThreadSheet
    b: Viewed
    e: TileEvaluator

    def __init__(self, node: Node, reads: list[Node], values: set[Node], name: str) -> None:
        super().__init__(node, values)
        self.reads, self.name = reads, name
        self.indexed = tuple(self.state.shape[a] for a in self.axes)
        after = max(self.axes, default=-1) + 1  # what follows lies in one piece in the state
        tail = product(self.state.shape[after:])
        self.span = tail if high(tail) >= WIDE else self.rest
        self.heads = floor_divide(self.rest, self.span) if high(self.rest) else 1

    # ---- Bodies and scratch ---------------------------------------------------------------

    def begin(
        self, name: str, extra: Sequence[str] = (), writes: Sequence[str] = (), state: bool = False
    ) -> dict[str, Node]:
        """Start a Body over the reads, some scratch that is read or written, and the state."""
        given = parameters.reads(self.reads)
        for names, use in ((extra, "value"), (writes, "state")):
            given += parameters.scratch([(n, self.scratch(n)) for n in names], use)
        given += [parameters.state(self.state)] if state else []
        return self.write_to(ThreadSheet(name, given))

    def write_to(self, sheet: ThreadSheet) -> dict[str, Node]:
        """Go on with a Body that was begun; gives its scratch and the state."""
        self.scalars: dict[Node, Size] = {}
        self.sheet, self.b, self.e = sheet, sheet.b, sheet.e
        return sheet.others

    @property
    def key_dtype(self) -> DType:
        """Of destinations: how many there are decides."""
        return int32 if high(product(self.indexed)) < 1 << 31 else int64

    @property
    def padded(self) -> int:
        """Pairs, at a power of two where they are sorted."""
        return max(sorting.LOCAL, power_of_two(high(self.count)))

    def scratch(self, name: str) -> Array:
        """The type of one scratch: destinations and numbers in order, lengths of runs."""
        size: Size = self.count if high(self.count) <= RANKED else self.padded
        return Array((size,), self.key_dtype if name == "keys" else int32)

    # ---- where things go ------------------------------------------------------------------

    def probed(self, node: Node, index: Index) -> Size | None:
        """See `Update`: a start that is loaded does not matter."""
        return symbolic(node, index, self.values, lambda _: 0)

    def exact(self, node: Node, index: Index) -> Size | None:
        """An index that is affine in the value's own index, beside scalars that are loaded."""
        return symbolic(node, index, self.values, self.scalar)

    def scalar(self, node: Node) -> Size:
        """A loaded scalar as an index."""
        if node not in self.scalars:
            value = self.b.cast(self.e.value(node, (0,) * len(node.shape)), int64)
            self.scalars[node] = self.b.atom("at", value, -(1 << 40), 1 << 40)
        return self.scalars[node]

    def destination(self, number: Size) -> Node:
        """The linear number of the place, -1 where it is outside."""
        found, inside = self.positions(number)
        linear = ravel([found[a] for a in self.axes], self.indexed)
        key = self.b.cast(self.b.index(linear), self.key_dtype)
        if inside is None:
            return key
        return self.b.apply("where", inside, key, self.b.constant(-1, self.key_dtype))

    def inner(self, lane: Size, head: Size = 0) -> Index:
        """The index of an unindexed element, by its number in a span."""
        return unravel(head * self.span + lane, self.value.shape[self.rank :])

    def cut(self, lanes: int, rows: Size) -> tuple[Size, Size, Size, Size]:
        """A program for each span, of so many rows, in blocks: (grid, row, head, base)."""
        sizes = (rows, self.heads, ceil_divide(self.span, lanes))
        grid, (row, head, block) = self.sheet.programs(*sizes)
        return grid, row, head, block * lanes
