"""Cut a Graph into Regions: which values are stored, and which are computed together.

First every Node is either *inlined* (recomputed where it is read: movement, cheap elementwise)
or a *value*. Then values join Regions in topological order; a Region becomes one Kernel. Inside
a Region a value is read only at its own element, so it needs no memory unless someone outside
wants it. A Region's elements are numbered by rows and columns: L = row * columns + column; a
reduction over trailing axes has one row per result ('row' Regions), one over leading axes one
column per result ('column' Regions).

Invariant: Regions form no cycle, and every read of a Region's own value is at the same element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.dtype import DType, float32
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, needs, topological, users
from ..ir.symbol import Size, floor_divide, high, loop_index
from ..ir.types import Array, Tuple, product
from .access import MOVEMENT, Index, Place, places, unravel
from .evaluate import DIRECT
from .extent import DEPTH, NODES, READS, Extents
from .families import KINDS, families_of
from .join import has_many_parts, joins, stored_part
from .order import bit, in_order, need

if TYPE_CHECKING:
    from .lower import Lowering

REDUCE = {ops.sum_, ops.prod, ops.max_, ops.min_, ops.argmax}
ALONE = {ops.graph.ops[op]: kind for op, kind in KINDS.items() if kind != "dot"}
COSTLY = {
    ops.exp,
    ops.exp2,
    ops.log,
    ops.log2,
    ops.log10,
    ops.expm1,
    ops.log1p,
    ops.sin,
    ops.cos,
    ops.tan,
    ops.asin,
    ops.acos,
    ops.atan,
    ops.sinh,
    ops.cosh,
    ops.tanh,
    ops.erf,
    ops.erfc,
    ops.erf_inverse,
    ops.power,
    ops.random_bits,
    ops.floor_divide_,
    ops.remainder,
    ops.fmod,
}
INLINE = {op for op in ops.graph.ops.values() if op in DIRECT or op in MOVEMENT} | {
    ops.where,
    ops.cast,
    ops.bitcast,
    ops.constant,
    ops.iota,
    ops.size,
    ops.stop_gradient,
    ops.concatenate,
    ops.gather,
    ops.in_range,
    ops.random_bits,
}
MOST_VALUES = 32  # of a Region of loops
SCALAR_COST = 64  # operations on one element that cost less than a launch
FEW = 1 << 20  # elements that take about as long as a launch
if "barrier" in ops.graph.ops:
    INLINE.add(ops.graph.ops["barrier"])


DOTS = ("dot", "dots", "gated")  # kinds of Regions with products: one, several, two that meet


@dataclass(eq=False)
class Region:
    """Values computed by one Kernel."""

    kind: str  # 'loops', one of DOTS, or a kind of ALONE
    values: list[Node] = field(default_factory=list)
    total: Size = 1  # elements
    rows: Size | None = None  # of a Region with reductions
    order: str = "row"  # where reductions run: 'row' = trailing, 'column' = leading
    number: int = 0
    needs: int = 0  # Regions, transitively: a bit for each number
    after: set[int] = field(default_factory=set)  # Regions that it needs itself
    reads: set[Node] = field(default_factory=set)  # stored values and inputs
    stored: list[Node] = field(default_factory=list)  # values someone outside wants
    constants: set[Node] = field(default_factory=set)  # reads that no kernel here writes
    rounded: set[Node] = field(default_factory=set)  # of which only 16 bits are ever seen
    nodes: int = 0  # of the Graph that it computes, about
    inputs: list[Node] = field(default_factory=list)  # the reads, in the order Bodies take them
    known: set[Node] = field(default_factory=set)  # all values of the Graph: none is inlined
    work: tuple[Size, DType] = (0, float32)  # FLOPs, and the dtype whose peak they run at
    filled: bool = True  # whether the state that it updates is stored

    @property
    def anchor(self) -> Node:
        """The Node that it started with."""
        return self.values[0]

    @property
    def arrays(self) -> list[Node]:
        """What it stores, tuples left out: their items are there."""
        return [v for v in self.stored if not isinstance(v.type, Tuple)]

    @property
    def roles(self) -> list[tuple[str, int]]:
        """Those of a Body that takes all inputs, then all that is stored."""
        reads = [("read", i) for i in range(len(self.inputs))]
        return reads + [("store", i) for i in range(len(self.arrays))]

    @property
    def columns(self) -> Size:
        """Elements of a row."""
        return self.total if self.rows is None else floor_divide(self.total, self.rows)


def cost(node: Node, values: set[Node], limit: int = 64) -> int:
    """About how many operations recomputing an inlined Node takes."""
    total, seen, stack = 0, {node}, [node]
    while stack and total < limit:
        current = stack.pop()
        if current.op in COSTLY:
            total += 12
        elif current.op not in MOVEMENT and current.op is not ops.constant:
            total += 1
        for i in current.inputs:
            if i not in values and i not in seen:
                seen.add(i)
                stack.append(i)
    return total


def leaves_of(node: Node, values: set[Node]) -> list[Node]:
    """The values (and inputs) an expression reads."""
    found: dict[Node, None] = {}
    stack, seen = list(needs(node)), set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in values:
            found[current] = None
        else:
            stack.extend(current.inputs)
    return list(found)


def choose_values(arguments: Sequence[Node], results: Sequence[Node]) -> Extents:
    """The Nodes that are values: outputs, reductions, dots, and what pays to keep."""
    order = topological(results, stop=set(arguments).__contains__)
    readers = users(order)
    values: set[Node] = set(arguments) | set(results)
    extents = Extents(values)
    for node in order:
        if node not in values and _is_value(node, readers, values):
            values.add(node)
        extents.note(node)
    for node in order:
        if node.op is ops.dot:
            for i in node.inputs:
                _store_below(i, values)
        elif node.op in _READS_STORED:
            values.update(needs(node))
        elif joins(node):
            values.update(stored_part(i) for i in node.inputs)
        elif node.op is ops.update:  # it may be in place: what reads the state is known before
            values.update(i for i in node.inputs[1:] if node.inputs[0] in leaves_of(i, values))
    return extents


def _is_value(node: Node, readers: dict[Node, list[Node]], values: set[Node]) -> bool:
    if node.op not in INLINE or has_many_parts(node):
        return True
    if node.op in MOVEMENT or node.op in (ops.constant, ops.iota, ops.size):
        return False
    return _wanted(node, readers, values)


_READS_STORED = {
    ops.scan,
    ops.cond,
    ops.while_loop,
    ops.call,
    ops.attention,
    ops.attention_backward,
}


def _store_below(node: Node, values: set[Node]) -> None:
    """A dot reads stored values through movement only."""
    while node.op is ops.pad or (node not in values and node.op in MOVEMENT):
        node = node.inputs[0]
    values.add(node)


def _real_readers(node: Node, readers: dict[Node, list[Node]]) -> tuple[set[Node], bool]:
    """The Nodes that read a value through movement, and whether one repeats it."""
    found: set[Node] = set()
    repeated = False
    stack = list(readers.get(node, ()))
    while stack:
        reader = stack.pop()
        if reader.op in MOVEMENT:
            repeated |= reader.op in (ops.expand, ops.windows)
            stack.extend(readers.get(reader, ()))
        else:
            found.add(reader)
    return found, repeated


def _wanted(node: Node, readers: dict[Node, list[Node]], values: set[Node]) -> bool:
    """Whether an elementwise Node should be a value: read by many, or repeated."""
    found, repeated = _real_readers(node, readers)
    gathered = any(r.op is ops.gather and r.inputs[0] is not node for r in found)
    if len(found) < 2 and not repeated:
        return False
    if gathered and len(found) < 2:
        return False
    work = cost(node, values, SCALAR_COST)
    if (node.dtype.kind == "bool" and work <= 4) or (
        product(node.shape) == 1 and work < SCALAR_COST
    ):
        return False
    return work > (3 if not repeated else 2)


def own_index(node: Node, row: Size, column: Size, group: Region) -> Index | None:
    """The index of a value's element at (row, column) of its Region, or None if none fits."""
    size = product(node.shape)
    if size == group.total:
        if group.order == "row" or group.rows is None:
            linear = row * group.columns + column if group.rows is not None else column
        else:
            linear = column * group.rows + row  # rows run fastest: reductions lead
        return _split_index(node, linear, row, column, group)
    if group.rows is not None and size == group.rows:
        return unravel(row, node.shape)
    return None


def _split_index(node: Node, linear: Size, row: Size, column: Size, group: Region) -> Index:
    """Unravel row and column apart where the shape has a boundary between them."""
    if group.rows is None:
        return unravel(linear, node.shape)
    first, second = (row, column) if group.order == "row" else (column, row)
    lead = group.rows if group.order == "row" else group.columns
    size: Size = 1
    for axis in range(len(node.shape) + 1):
        if size == lead and product(node.shape[:axis]) == lead:
            return unravel(first, node.shape[:axis]) + unravel(second, node.shape[axis:])
        if axis < len(node.shape):
            size = size * node.shape[axis]
    return unravel(linear, node.shape)


def reduce_split(node: Node) -> tuple[Size, str] | None:
    """Rows and order of a reduction whose axes are all trailing or all leading."""
    x = node.inputs[0]
    axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
    live = [a for a in range(len(x.shape)) if x.shape[a] != 1]
    reduced = [a for a in live if a in axes]
    kept = [a for a in live if a not in axes]
    rows = product(tuple(x.shape[a] for a in kept))
    if not reduced or not kept or min(reduced) > max(kept):
        return rows, "row"
    if max(reduced) < min(kept):
        return rows, "column"
    return None


def start(lowering: Lowering) -> None:
    """The pass: which Nodes of a Graph or Block are values."""
    lowering.fuser = Fuser(lowering.arguments, lowering.results, lowering.target)


def look_ahead(lowering: Lowering) -> None:
    """The pass: know what waits for each value, so that small Regions make no large ones wait."""
    lowering.fuser.look_ahead()


def fuse(lowering: Lowering) -> None:
    """The pass: put values into Regions."""
    lowering.fuser.run()


class Fuser:
    """Puts values into Regions."""

    def __init__(self, arguments: Sequence[Node], results: Sequence[Node], target: Target) -> None:
        self.arguments, self.results, self.target = list(arguments), list(results), target
        self.extents = choose_values(arguments, results)
        self.values = self.extents.values
        self.group_of: dict[Node, Region] = {}
        self.groups: list[Region] = []
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
                self.group_of[node] = self.group_of[node.inputs[0]]
                if node not in self.group_of[node].values:
                    self.group_of[node].values.append(node)
        self.mark_stored()

    def place(self, node: Node) -> None:
        """Join a Region, or start one."""
        leaves = leaves_of(node, self.values)
        for group in self.candidates(node, leaves):
            if self.fits(node, group, leaves):
                self.join(node, group, leaves)
                return
        group = self.start(node)
        self.groups.append(group)
        self.join(node, group, leaves)

    def start(self, node: Node) -> Region:
        """A new Region for a value."""
        kind = ALONE.get(node.op, "dot" if node.op is ops.dot else "loops")
        kind = "join" if joins(node) else kind
        group = Region(kind, number=len(self.groups))
        if node.op in REDUCE:
            group.total = product(node.inputs[0].shape)
            split = reduce_split(node)
            if split is None:
                group.kind, group.rows, group.order = "mixed", product(node.shape), "row"
            else:
                group.rows, group.order = split
        elif node.op in ALONE:
            group.total = 0
        else:
            group.total = product(node.shape)
        return group

    def candidates(self, node: Node, leaves: Sequence[Node]) -> list[Region]:
        """Regions worth joining: producers first (newest first), then those that share reads."""
        if node.op in ALONE or node.op is ops.dot or joins(node):
            return []
        found = {g.number: g for g in (self.group_of.get(leaf) for leaf in leaves) if g}
        near = sorted(found.values(), key=lambda g: -g.number)
        sharing: dict[int, Region] = {}
        for leaf in leaves:
            if isinstance(product(leaf.shape), int) and product(leaf.shape) < 1024:
                continue
            for g in self.readers_of.get(leaf, ())[-8:]:
                if g.number not in found and g.kind == "loops":
                    sharing[g.number] = g
        return near + sorted(sharing.values(), key=lambda g: -g.number)

    def look_ahead(self) -> None:
        """Know what waits for each value, so that small Regions do not make large ones wait."""
        order = topological(self.results, stop=set(self.arguments).__contains__)
        self.largest = dict.fromkeys(order, 0)
        for node in reversed(order):
            own = high(product(node.shape)) if isinstance(node.type, Array) else 0
            for i in needs(node):
                self.largest[i] = max(self.largest.get(i, 0), self.largest[node], own)

    def delays(self, node: Node, group: Region, leaves: Sequence[Node]) -> bool:
        """Whether what large values read would come later if a value joined a small Region.

        A launch more is better than a large array read once more.
        """
        limit = 16 * high(group.total)
        if not self.largest or group.kind != "loops" or limit > FEW:
            return False
        own = 0
        for other in (self.group_of.get(leaf) for leaf in leaves):
            own |= bit(other.number) | other.needs if other is not None else 0
        if own & ~group.needs & ~bit(group.number):
            return any(self.largest[v] > limit for v in group.values)
        return bool(group.needs & ~own) and self.largest[node] > limit

    def fits(self, node: Node, group: Region, leaves: Sequence[Node]) -> bool:
        """Whether a value may join a Region."""
        if self.delays(node, group, leaves):
            return False
        for leaf in leaves:
            other = self.group_of.get(leaf)
            if other is not None and other is not group and other.needs >> group.number & 1:
                return False
        if not self.has_room(node, group, leaves):
            return False
        families = families_of(group, self.target)
        return any(family.grow(group, node, leaves, self) for family in families)

    def fits_loops(self, node: Node, group: Region, leaves: Sequence[Node]) -> bool:
        """Whether a value may join a Region of generated loops."""
        if group.kind != "loops" or len(group.values) >= MOST_VALUES:
            return False
        shape = self.adapted(node, group)
        return shape is not None and self.aligned(node, shape, leaves)

    def has_room(self, node: Node, group: Region, leaves: Sequence[Node]) -> bool:
        """Whether a Region stays within what one Kernel computes."""
        extent = self.extents.of(node)
        return (
            group.nodes + extent.nodes <= NODES
            and len(group.reads) + len(leaves) <= READS
            and self.depth_in(node, group, leaves) <= DEPTH
        )

    def depth_in(self, node: Node, group: Region, leaves: Sequence[Node]) -> int:
        """How deep a value would be in a Region."""
        below = [self.depths.get(leaf, 0) for leaf in leaves if self.group_of.get(leaf) is group]
        return self.extents.of(node).depth + max(below, default=0)

    def follows(self, node: Node, group: Region, leaves: Sequence[Node]) -> bool:
        """Whether a value, no sum, can be computed of a product on its way out."""
        if group.kind != "dot" or node.op in REDUCE:
            return False
        return product(node.shape) == group.total and self.aligned(node, group, leaves)

    def adapted(self, node: Node, group: Region) -> Region | None:
        """The Region with rows set so that the value has a place in it, or None."""
        if node.op not in REDUCE:
            size = product(node.shape)
            if size == group.total or (group.rows is not None and size == group.rows):
                if group.order == "column" and size == group.total:
                    return None  # columns are walked once: no element-level results
                return group
            return None
        split = reduce_split(node)
        if split is None or product(node.inputs[0].shape) != group.total:
            return None
        rows, order = split
        if group.rows is None:
            if order == "column":
                return None
            return Region("loops", group.values, group.total, rows, order, group.number)
        return group if (rows, order) == (group.rows, group.order) else None

    def aligned(
        self, node: Node, group: Region, leaves: Sequence[Node], own: set[Node] | None = None
    ) -> bool:
        """Whether the value reads the Region's own values only at its own element."""
        mine = self.groups[group.number] if own is None else None
        inside = {x for x in leaves if (self.group_of.get(x) is mine if own is None else x in own)}
        if not inside:
            return True
        row = loop_index("row", group.rows if group.rows is not None else 1)
        column = loop_index("column", group.columns)
        source = node.inputs[0] if node.op in REDUCE else node
        start = own_index(source, row, column, group)
        if start is None:
            return False
        unknown: list[Node] = []  # what may read one of the Region's own elsewhere

        def step(current: Node, index: Index) -> Sequence[Place]:
            if current is not node and (current in inside or current in self.values):
                return ()
            if current.op in (ops.gather, ops.concatenate, ops.random_bits):
                unknown.extend(inside.intersection(leaves_of(current, self.values)))
                return ()
            if current.op not in MOVEMENT:
                return [(i, index) for i in current.inputs]
            found, conditions = MOVEMENT[current.op](current, index)
            unknown.extend(inside.intersection(current.inputs) if conditions else ())
            return [(current.inputs[0], found)]

        for current, index in places([(source, start)], step):
            if unknown:
                break
            if current in inside and own_index(current, row, column, group) != index:
                return False
        return not unknown

    def join(self, node: Node, group: Region, leaves: Sequence[Node]) -> None:
        """Put a value into a Region and bring the records up to date."""
        if group.kind == "loops" and node.op in REDUCE and group.rows is None:
            split = reduce_split(node)
            assert split is not None
            group.rows, group.order = split
        self.depths[node] = self.depth_in(node, group, leaves)
        group.nodes += self.extents.of(node).nodes
        group.values.append(node)
        self.group_of[node] = group
        others: dict[int, Region] = {}
        for leaf in leaves:
            other = self.group_of.get(leaf)
            if other is not None and other is not group:
                others[other.number] = other
            if other is not group:
                group.reads.add(leaf)
                self.readers_of.setdefault(leaf, []).append(group)
        for number, other in others.items():
            if number not in group.after:
                group.after.add(number)
                self.dependents.setdefault(number, []).append(group)
                need(group, bit(number) | other.needs, self.dependents)

    def mark_stored(self) -> None:
        """Values that outputs or other Regions read get storage."""
        wanted = set(self.results)
        for group in self.groups:
            wanted |= group.reads
        for group in self.groups:
            group.stored = [v for v in group.values if v in wanted]

    def in_order(self) -> list[Region]:
        """Regions sorted so that each comes after what it needs, else by number."""
        return in_order(self.groups)
