"""How much one Kernel computes at most: Regions are cut where they would grow past it.

A chain of a thousand elementwise ops would fuse into one Kernel, which takes long to compile, has
more values than registers, and is walked by functions that call themselves. So an expression that
is deep, large, or reads many arrays is stored on the way, and a Region takes no more than so much.
A thread of a GPU holds many elements at once where they are reduced, scanned or sorted, with all
that computes them; there an element may take less.

Invariant: no Region is deeper than `DEPTH` or reads more than `READS` arrays by what is inlined in
it, whatever the Graph; so what recurses over a Region does not recurse over a Graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high
from ..ir.types import Array, product
from .access import MOVEMENT
from .instructions import evaluated, weight_of
from .region import INLINE

DEPTH = 64  # Nodes from a result of a Region to what it reads
NODES = 512  # Nodes of a Region; costly functions count as many
HELD = 80  # the same for one of the elements that a thread holds
READS = 64  # arrays that a Region reads
LEAVES = {ops.constant, ops.iota, ops.size, ops.input_}


@dataclass(frozen=True, slots=True)
class Extent:
    """Depth of an expression, its Nodes and the reads in it; what is shared may count each time."""

    depth: int = 0
    nodes: int = 0
    reads: int = 0

    @property
    def exceeds(self) -> bool:
        """Whether it is too much for one Region."""
        return self.depth > DEPTH or self.nodes > NODES or self.reads > READS


READ = Extent(0, 0, 1)
NOTHING = Extent()


class Extents:
    """The extents of expressions, given which Nodes are values; Nodes are noted inputs first."""

    def __init__(self, values: set[Node], has_threads: bool) -> None:
        self.values, self.has_threads = values, has_threads
        self.own: dict[Node, Extent] = {}

    def of(self, node: Node) -> Extent:
        """The extent of a value's own expression, down to other values."""
        return self.own.get(node, NOTHING)

    def note(self, node: Node) -> None:
        """Find the extent of a Node; of one that is too much, inputs become values."""
        if node.op in LEAVES:
            return
        self.own[node] = self._of(node)
        if self.own[node].exceeds:
            self.own[node] = self._once(node)
        if self.own[node].exceeds:
            for i in sorted(node.inputs, key=lambda i: -self.below(i).nodes):
                if self.own[node].exceeds and i not in self.values:
                    self._store(i)
                    if len(node.inputs) <= READS:  # else all are stored, however many
                        self.own[node] = self._of(node)
            self.own[node] = self._of(node)
        if node.op not in INLINE and self.own[node].nodes > HELD:
            inside = [i for i in node.inputs if i not in self.values]
            if self.holds_much(inside, max([high(product(i.shape)) for i in inside], default=0)):
                for i in inside:
                    self._store(i)
                self.own[node] = self._of(node)

    def holds_much(self, held: Collection[Node], size: int, most: int = HELD) -> bool:
        """Whether values of so many elements take too much for a thread that holds many. What has
        fewer elements is computed once for several of them."""
        if not self.has_threads:
            return False
        total = 0
        for node in evaluated(held, self.values):
            counts = node in held or node not in self.values
            if counts and node.op not in MOVEMENT and isinstance(node.type, Array):
                total += weight_of(node) if high(product(node.shape)) >= size else 0
            if total > most:
                return True
        return False

    def below(self, node: Node) -> Extent:
        """What a Node adds to the extent of its reader."""
        return READ if node in self.values else self.own.get(node, NOTHING)

    def _of(self, node: Node) -> Extent:
        depth, nodes, reads = 0, weight_of(node), 0
        for i in node.inputs:
            below = self.below(i)
            depth = max(depth, below.depth)
            nodes += below.nodes
            reads += below.reads
        return Extent(depth + 1, nodes, reads)

    def _once(self, node: Node) -> Extent:
        """The same with what is computed once counted once, as far as it matters."""
        nodes = reads = 0
        for below in evaluated([node], self.values):
            if below is not node and below in self.values:
                reads += 1
            else:
                nodes += weight_of(below)
            if nodes + reads > NODES + READS:
                break
        return Extent(self.own[node].depth, nodes, reads)

    def _store(self, node: Node) -> None:
        """Make a value of a Node, or of what it only moves: it may repeat that."""
        moved: list[Node] = []
        while node.op in MOVEMENT and node not in self.values and len(moved) < DEPTH // 2:
            moved.append(node)
            node = node.inputs[0]
        if node in self.own and isinstance(node.type, Array):
            self.values.add(node)
        for between in reversed(moved):
            self.own[between] = self._of(between)
