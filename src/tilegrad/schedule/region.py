"""Regions: the values that one Kernel computes, and where in it an element of each is.

Inside a Region a value is read only at its own element, so it needs no memory unless someone
outside wants it. A Region's elements are numbered by rows and columns: L = row * columns + column;
a reduction over trailing axes has one row per result ('row' Regions), one over leading axes one
column per result ('column' Regions). `Cut` is what is known of a Graph while it is cut into
Regions, and what Families ask of that. Invariant: `own_index` of (row, column) is one to one; where
a Cut says that a value fits, it reads the Region's own values at their own element only.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter

from ..core.dtype import DType, float32
from ..core.errors import InternalError
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, needs, topological, walk
from ..ir.symbol import Size, floor_divide, loop_index
from ..ir.types import Tuple, product
from ..tile.numeric import FUNCTIONS
from .access import MOVEMENT, Index, Place, base_of, moved, unravel, walk_down
from .evaluate import DIRECT, ROWS

REDUCE = {ops.sum_, ops.prod, ops.max_, ops.min_, ops.argmax}
COSTLY = {op for op in DIRECT if op.name in FUNCTIONS}  # many operations each
COSTLY |= {ops.power, ops.floor_divide_, ops.remainder, ops.fmod, ops.random_bits, ops.fixed}
INLINE = {*DIRECT, *MOVEMENT, *ROWS, ops.constant}  # computed where they are read
JOINED = 16  # parts of a concatenation that is computed where it is read
DOTS = ("dot", "dots", "gated")  # kinds of Regions with products: one, several, two that meet


@dataclass(eq=False)
class Region:
    """Values computed by one Kernel."""

    kind: str  # 'loops', one of DOTS, or a kind of ALONE
    target: Target
    known: set[Node]  # all values of the Graph: none is inlined
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
    name: str = ""  # of its Bodies
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
    def reduces(self) -> list[Node]:
        """Its reductions."""
        return [v for v in self.values if v.op in REDUCE]

    @property
    def items(self) -> dict[int, int]:
        """Where among them each result of its op is, by number: 0 for an op of one result."""
        return {v.attrs.get("index", 0): i for i, v in enumerate(self.arrays)}

    def find_inputs(self) -> list[Node]:
        """The values that it reads, in the order its structure names them."""
        own = set(self.values)

        def outside(node: Node) -> bool:
            return node in self.known and node not in own

        self.inputs = list(filter(outside, topological(self.stored or self.values, outside)))
        return self.inputs

    @property
    def row_count(self) -> Size:
        """Its rows; 1 of a Region without reductions."""
        return 1 if self.rows is None else self.rows

    @property
    def columns(self) -> Size:
        """Elements of a row."""
        return floor_divide(self.total, self.row_count)


def cost(node: Node, values: set[Node], limit: int = 64) -> int:
    """About how many operations recomputing an inlined Node takes."""
    total = 0
    for current in walk([node], lambda n: [i for i in n.inputs if i not in values]):
        if current.op in COSTLY:
            total += 12
        elif current.op not in MOVEMENT and current.op is not ops.constant:
            total += 1
        if total >= limit:
            break
    return total


def leaves_of(node: Node, values: set[Node]) -> list[Node]:
    """The values (and inputs) an expression reads."""
    found = walk(needs(node), lambda n: () if n in values else n.inputs)
    return [n for n in found if n in values]


def reads_of(
    starts: Sequence[Place], values: set[Node], inside: Container[Node] = ()
) -> Iterator[tuple[Node, Index | None]]:
    """Values (but those `inside`) that are read below some places, and where: None where that is
    not plain to see, of what is picked, joined, drawn or padded."""
    hidden: list[Node] = []

    def step(node: Node, index: Index) -> Sequence[Place]:
        if node in values and node not in inside:
            return ()
        moves = moved(node, index) if node.op in MOVEMENT else None
        if (moves and moves[1]) or node.op in (ops.gather, ops.concatenate, ops.random_bits):
            hidden.extend(leaves_of(node, values))
            return ()
        return [(node.inputs[0], moves[0])] if moves else [(i, index) for i in node.inputs]

    for node, index in walk_down(starts, step):
        if node in values and node not in inside:
            yield node, index
    for node in hidden:
        yield node, None


def own_index(node: Node, row: Size, column: Size, region: Region) -> Index | None:
    """The index of a value's element at (row, column) of its Region, or None if none fits; row and
    column are unravelled apart where the shape has a boundary between them."""
    shape = node.shape
    if node.size != region.total:
        return unravel(row, shape) if node.size == region.rows else None
    pairs = [(row, region.row_count), (column, region.columns)]
    if region.order == "column":  # rows run fastest: reductions lead
        pairs.reverse()
    (first, lead), (second, inner) = pairs
    for axis in range(len(shape) + 1):
        if product(shape[:axis]) == lead:
            return unravel(first, shape[:axis]) + unravel(second, shape[axis:])
    return unravel(first * inner + second, shape)


def axes_of(node: Node) -> tuple[int, ...]:
    """The axes that a reduction runs over."""
    return node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)


def reduce_split(node: Node) -> tuple[Size, str] | None:
    """Rows and order of a reduction whose axes are all trailing or all leading."""
    x, axes = node.inputs[0], axes_of(node)
    live = [a for a in range(len(x.shape)) if x.shape[a] != 1]
    reduced = [a for a in live if a in axes]
    kept = [a for a in live if a not in axes]
    if not reduced or not kept or min(reduced) > max(kept):
        return node.size, "row"
    if max(reduced) < min(kept):
        return node.size, "column"
    return None


# ---- order --------------------------------------------------------------------------------------
# A Region knows those that it needs itself (`after`) and, in one number with a bit for each, all
# that those need in turn (`needs`): one test says whether joining two would close a cycle.


def bit(number: int) -> int:
    """The bit of a Region."""
    return 1 << number


def need(region: Region, more: int, dependents: Mapping[int, Sequence[Region]]) -> None:
    """Let a Region need more Regions, and with it all that need it."""
    waiting = [region]
    while waiting:
        current = waiting.pop()
        if more & ~current.needs:  # else those behind it need all that too
            current.needs |= more
            waiting += dependents.get(current.number, ())


def in_order(regions: Sequence[Region]) -> list[Region]:
    """Regions, each after what it needs: in rounds of those that can run, by number."""
    place = {r.number: i for i, r in enumerate(regions)}
    sorter = TopologicalSorter({r.number: r.after & place.keys() for r in regions})
    try:
        sorter.prepare()
    except CycleError as error:
        raise InternalError("schedule.region", "Regions need one another in a circle") from error
    found: list[Region] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        found += [regions[place[number]] for number in ready]
        sorter.done(*ready)
    return found


# ---- many parts ---------------------------------------------------------------------------------
# A concatenation of few parts is computed where it is read, each element asking which part it is
# of. Many parts that lie behind one another in memory are copied there as they are;
# `compiler/split.py` cuts other concatenations of many parts into ones of few.


def has_many_parts(node: Node) -> bool:
    """Whether a Node is a concatenation that is not computed where it is read."""
    return node.op is ops.concatenate and len(node.inputs) > JOINED


def joins(node: Node) -> bool:
    """Whether a Node is a concatenation of many parts that lie behind one another."""
    return has_many_parts(node) and lies_in_line(node)


def lies_in_line(node: Node) -> bool:
    """Whether the parts of a concatenation lie behind one another in memory."""
    known = all(isinstance(size, int) for x in node.inputs for size in x.shape)
    return known and product(node.shape[: node.attrs["axis"]]) == 1


def stored_part(node: Node) -> Node:
    """The value whose bytes a part is: another shape has the same ones."""
    return base_of(node, passing=(ops.reshape,))


# ---- while a Graph is cut ------------------------------------------------------------------------

MOST_VALUES = 32  # of a Region of loops


class Cut:
    """Values, and the Regions they are in so far."""

    def __init__(self, values: set[Node], target: Target) -> None:
        self.values, self.target = values, target
        self.region_of: dict[Node, Region] = {}
        self.regions: list[Region] = []
        self.leaves = cache(partial(leaves_of, values=values))  # of a value, found once

    def fits_loops(self, node: Node, region: Region) -> bool:
        """Whether a value may join a Region of generated loops."""
        if region.kind != "loops" or len(region.values) >= MOST_VALUES:
            return False
        shape = self.adapted(node, region)
        return shape is not None and self.aligned(node, shape)

    def follows(self, node: Node, region: Region) -> bool:
        """Whether a value, no sum, can be computed of a product on its way out."""
        if region.kind != "dot" or node.op in REDUCE:
            return False
        return node.size == region.total and self.aligned(node, region)

    def adapted(self, node: Node, region: Region) -> Region | None:
        """The Region with rows set so that the value has a place in it, or None."""
        if node.op not in REDUCE:
            if region.order == "column" and node.size == region.total:
                return None  # columns are swept once: no element-level results
            return region if node.size in (region.total, region.rows) else None
        split = reduce_split(node)
        if split is None or node.inputs[0].size != region.total:
            return None
        rows, order = split
        if region.rows is None:
            if order == "column":
                return None
            return replace(region, rows=rows, order=order)
        return region if (rows, order) == (region.rows, region.order) else None

    def aligned(self, node: Node, region: Region) -> bool:
        """Whether the value reads the Region's own values only at its own element."""
        inside = set(region.values).intersection(self.leaves(node))
        if not inside:
            return True
        row = loop_index("row", region.row_count)
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
