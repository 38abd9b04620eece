"""Cut a Graph into Regions: which values are stored, and which are computed together.

First every Node is either *inlined* (recomputed where it is read: movement, cheap elementwise)
or a *value*. Then values join Regions in topological order; a Region becomes one Kernel.

Invariant: Regions form no cycle, and every read of a Region's own value is at the same element.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, needs, topological, users, walk
from ..ir.symbol import high
from ..ir.types import Array
from .access import MOVEMENT, Readers, readers_through
from .cost import DEPTH, DOUBLE, HELD, NODES, READS, Extents
from .families import KINDS, families_of
from .region import (
    INLINE,
    REDUCE,
    Cut,
    Region,
    bit,
    cost,
    has_many_parts,
    joins,
    need,
    reduce_split,
    stored_part,
)

ALONE = {ops.graph.ops[op] for op, kind in KINDS.items() if kind != "dot"}
PRODUCTS = {ops.graph.ops[op] for op, kind in KINDS.items() if kind == "dot"}
SCALAR_COST = 64  # operations on one element that cost less than a launch
FEW_ELEMENTS = 1 << 20  # elements that take about as long as a launch


def choose_values(arguments: Sequence[Node], results: Sequence[Node], has_threads: bool) -> Extents:
    """The Nodes that are values: outputs, reductions, dots, and what pays to keep."""
    order = topological(results, stop=set(arguments).__contains__)
    readers = users(order)
    values: set[Node] = set(arguments) | set(results)
    extents = Extents(values, has_threads)
    for node in order:
        found = _is_value(node, readers, values) or _narrows(node, readers, results)
        if node not in values and found:
            values.add(node)
        extents.note(node)
    for node in order:
        if node.op in PRODUCTS:
            for i in node.inputs:
                _store_below(i, values)
        elif node.op.category in _READS_STORED:
            values.update(needs(node))
        elif joins(node):
            values.update(stored_part(i) for i in node.inputs)
        elif node.op is ops.update:  # it may be in place: what reads the state is known before
            state, *others = node.inputs
            values.update(i for i in others if i not in values and _reads(i, state, values))
    return extents


def _reads(node: Node, state: Node, values: set[Node]) -> bool:
    """Whether an expression reads a state, which may be stored later than it is asked."""
    below = walk(needs(node), lambda n: () if n in values or n is state else n.inputs)
    return any(n is state for n in below)


def _is_value(node: Node, readers: Readers, values: set[Node]) -> bool:
    if node.op not in INLINE or has_many_parts(node):
        return True
    if node.op in MOVEMENT or node.op in (ops.constant, ops.iota, ops.size):
        return False
    return _wanted(node, readers, values)


def _narrows(node: Node, readers: Readers, results: Sequence[Node]) -> bool:
    """Whether a cast to a float of fewer bits is all that is read of a product: it is stored."""
    if node.op is not ops.cast or not node.dtype.is_float or node.dtype.bits < 16:
        return False
    below = node.inputs[0]
    while below.op is ops.reshape and len(readers[below]) == 1:
        below = below.inputs[0]
    alone = len(readers[below]) == 1 and below not in results
    return alone and below.op in PRODUCTS and node.dtype.bits < below.dtype.bits


_READS_STORED = ("control", "call", "attention")  # categories of ops


def _store_below(node: Node, values: set[Node]) -> None:
    """A dot reads stored values through movement only."""
    while node.op is ops.pad or (node not in values and node.op in MOVEMENT):
        node = node.inputs[0]
    values.add(node)


def _wanted(node: Node, readers: Readers, values: set[Node]) -> bool:
    """Whether an elementwise Node should be a value: read by many, or repeated."""
    through = set(readers_through(node, readers))
    repeated = any(r.op in (ops.expand, ops.windows) for r in through)
    found = {r for r in through if r.op not in MOVEMENT}
    gathered = any(r.op is ops.gather and r.inputs[0] is not node for r in found)
    if len(found) < 2 and (gathered or not repeated):
        return False
    work = cost(node, values, SCALAR_COST)
    if (node.dtype.kind == "bool" and work <= 4) or (node.size == 1 and work < SCALAR_COST):
        return False
    return work > (3 if not repeated else 2)


class Fuser(Cut):
    """Puts values into Regions."""

    def __init__(self, arguments: Sequence[Node], results: Sequence[Node], target: Target) -> None:
        self.arguments, self.results = list(arguments), list(results)
        self.extents = choose_values(arguments, results, target.has_threads)
        super().__init__(self.extents.values, target)
        self.readers_of: dict[Node, list[Region]] = {}
        self.largest: dict[Node, int] = {}  # elements of the largest reader, direct or not
        self.depths: dict[Node, int] = {}  # of values, within their Regions
        self.dependents: dict[int, list[Region]] = {}  # Regions that need a Region themselves

    def run(self) -> None:
        """Make the Regions."""
        given = set(self.arguments)
        for node in topological(self.results, stop=given.__contains__):
            if node in self.values and node not in given and node.op is not ops.get:
                self.place(node)
            elif node.op is ops.get and node not in given:
                self.region_of[node] = self.region_of[node.inputs[0]]
                if node not in self.region_of[node].values:
                    self.region_of[node].values.append(node)
        self.mark_stored()

    def place(self, node: Node) -> None:
        """Join a Region, or start one."""
        for region in self.candidates(node):
            if self.fits(node, region):
                self.join(node, region)
                return
        region = self.start(node)
        self.regions.append(region)
        self.join(node, region)

    def start(self, node: Node) -> Region:
        """A new Region for a value."""
        kind = "join" if joins(node) else KINDS.get(node.op.name, "loops")
        region = Region(kind, self.target, self.values, number=len(self.regions))
        if node.op in REDUCE:
            region.total = node.inputs[0].size
            split = reduce_split(node)
            if split is None:
                region.kind, region.rows, region.order = "mixed", node.size, "row"
            else:
                region.rows, region.order = split
        elif node.op in ALONE:
            region.total = 0
        else:
            region.total = node.size
        return region

    def candidates(self, node: Node) -> list[Region]:
        """Regions worth joining: producers first (newest first), then those that share reads."""
        if node.op in ALONE or node.op in PRODUCTS or joins(node):
            return []
        leaves = self.leaves(node)
        near = {r for r in map(self.region_of.get, leaves) if r is not None}
        large = [leaf for leaf in leaves if not isinstance(leaf.size, int) or leaf.size >= 1024]
        sharing = {r for leaf in large for r in self.readers_of.get(leaf, ())[-8:]}
        others = {r for r in sharing - near if r.kind == "loops"}
        return [r for some in (near, others) for r in sorted(some, key=lambda r: -r.number)]

    def look_ahead(self) -> None:
        """Know what waits for each value, so that small Regions do not make large ones wait."""
        order = topological(self.results, stop=set(self.arguments).__contains__)
        self.largest = dict.fromkeys(order, 0)
        for node in reversed(order):
            own = high(node.size) if isinstance(node.type, Array) else 0
            for i in needs(node):
                self.largest[i] = max(self.largest.get(i, 0), self.largest[node], own)

    def delays(self, node: Node, region: Region) -> bool:
        """Whether what large values read would come later if a value joined a small Region.

        A launch more is better than a large array read once more.
        """
        limit = 16 * high(region.total)
        if not self.largest or region.kind != "loops" or limit > FEW_ELEMENTS:
            return False
        own = 0
        for other in (self.region_of.get(leaf) for leaf in self.leaves(node)):
            own |= bit(other.number) | other.needs if other is not None else 0
        if own & ~region.needs & ~bit(region.number):
            return any(self.largest[v] > limit for v in region.values)
        return bool(region.needs & ~own) and self.largest[node] > limit

    def fits(self, node: Node, region: Region) -> bool:
        """Whether a value may join a Region."""
        if self.delays(node, region):
            return False
        for leaf in self.leaves(node):
            other = self.region_of.get(leaf)
            if other is not None and other is not region and other.needs >> region.number & 1:
                return False
        if not self.has_room(node, region):
            return False
        families = families_of(region)
        return any(family.grow(region, node, self) for family in families)

    def has_room(self, node: Node, region: Region) -> bool:
        """Whether a Region stays within what one Kernel computes."""
        count = region.nodes + self.extents.of(node).nodes
        if count > HELD // DOUBLE and (region.rows is not None or node.op in REDUCE):
            if self.extents.holds_much({*region.values, node}, high(region.total)):
                return False
        return (
            count <= NODES
            and len(region.reads) + len(self.leaves(node)) <= READS
            and self.depth_in(node, region) <= DEPTH
        )

    def depth_in(self, node: Node, region: Region) -> int:
        """How deep a value would be in a Region."""
        own = [leaf for leaf in self.leaves(node) if self.region_of.get(leaf) is region]
        below = max((self.depths.get(leaf, 0) for leaf in own), default=0)
        return self.extents.of(node).depth + below

    def join(self, node: Node, region: Region) -> None:
        """Put a value into a Region and bring the records up to date."""
        if region.kind == "loops" and node.op in REDUCE and region.rows is None:
            split = reduce_split(node)
            assert split is not None
            region.rows, region.order = split
        self.depths[node] = self.depth_in(node, region)
        region.nodes += self.extents.of(node).nodes
        region.values.append(node)
        self.region_of[node] = region
        for leaf in self.leaves(node):
            other = self.region_of.get(leaf)
            if other is region:
                continue
            region.reads.add(leaf)
            self.readers_of.setdefault(leaf, []).append(region)
            if other is not None and other.number not in region.after:
                region.after.add(other.number)
                self.dependents.setdefault(other.number, []).append(region)
                need(region, bit(other.number) | other.needs, self.dependents)

    def mark_stored(self) -> None:
        """Values that outputs or other Regions read get storage."""
        wanted = set(self.results)
        for region in self.regions:
            wanted |= region.reads
        for region in self.regions:
            region.stored = [v for v in region.values if v in wanted]
