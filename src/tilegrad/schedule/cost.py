"""What a Kernel costs, and how much of it is too much.

FLOPs with everything fused counted, the bytes it moves at least, and how many instructions of a GPU
one element of a value takes: divisions and roots that are rounded exactly are counted apart, with
branches, since they have a slow path, and an assembler that has many sums in registers needs long
for each.

A chain of a thousand elementwise ops would fuse into one Kernel, which takes long to compile, has
more values than registers, and is walked by functions that call themselves. So an expression that
is deep, large, or reads many arrays is stored on the way, and a Region takes no more than so much
(`Extents`). A thread of a GPU holds many elements where they are reduced, scanned or sorted,
with all that computes them; there an element may take less.

Invariant: counts come from shapes alone, so they are the same on every machine; what is emitted for
a float32 is at most twice what the table of instructions says; no Region is deeper than `DEPTH` or
reads more than `READS` arrays by what is inlined in it, so what recurses over a Region does not
recurse over a Graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtype import DType, float32, float64
from ..graph import ops
from ..ir.node import Node, Op, topological, walk
from ..ir.symbol import Size, high
from ..ir.types import Array, product
from .access import MOVEMENT, base_of
from .region import INLINE

FREE = ("leaf", "movement", "tuple", "order", "index", "control", "call")  # without FLOPs


def work_of(reads: Sequence[Node], stored: Sequence[Node]) -> tuple[Size, DType]:
    """FLOPs of a Kernel, fused values included, and the dtype whose peak rate they run at."""
    stop = set(reads)
    flops: Size = 0
    dtype: DType = float32
    for node in topological(stored, stop=stop.__contains__):
        if node not in stop and node.op.category == "attention":
            flops, dtype = flops + attention_flops(node), node.inputs[0].dtype
        if node in stop or not isinstance(node.type, Array):
            continue
        flops = flops + _flops(node)
        if node.op.category == "dot":
            dtype = node.inputs[0].dtype
        elif dtype is float32 and node.dtype.is_float and node.dtype.bits == 64:
            dtype = node.dtype
    return flops, dtype


def _flops(node: Node) -> Size:
    if node.op is ops.dot:
        depth: Any = 1
        for axis in node.attrs["contract"][0]:
            depth = depth * node.inputs[0].shape[axis]
        return node.size * depth * 2
    if node.op in (ops.grouped_dot, ops.sparse_dot, ops.block_dot):
        return node.size * node.inputs[0].shape[1] * 2
    if node.op.category in FREE:
        return 0
    source = node.inputs[0] if node.op.category == "reduce" else node
    return source.size


def bytes_moved(nodes: Sequence[Node]) -> Size:
    """Bytes of arrays read or written once."""
    moved: Size = 0
    for n in nodes:
        if isinstance(n.type, Array):
            moved = moved + n.bytes
    return moved


def attention_flops(node: Node) -> Size:
    """FLOPs of an attention or attention_backward Node, as if every key were seen."""
    from ..graph.attention_types import sizes

    s = sizes(node.inputs, node.attrs["orders"])
    products = (1, 1) if node.op is ops.attention else (3, 2)  # of width and of value width
    widths = (s.width * products[0]) + (s.value_width * products[1])
    return product(s.scores) * widths * 2


# ---- instructions --------------------------------------------------------------------------------

DOUBLE = 8  # what one of float64 weighs: it takes twice the registers, and functions more steps
EXACT = 96  # what an exactly rounded division or root weighs, in instructions that do not branch
QUICK = {ops.divide, ops.reciprocal, ops.sigmoid}  # without a slow path where 16 bits are seen
# (instructions; divisions, roots, branches) of a float32 element, for ops that take more than one
INSTRUCTIONS: dict[Op, tuple[int, int]] = {
    ops.exp: (6, 0),
    ops.log: (30, 0),
    ops.expm1: (22, 0),
    ops.log1p: (38, 0),
    ops.sin: (57, 1),
    ops.cos: (57, 1),
    ops.tan: (51, 2),
    ops.asin: (52, 5),
    ops.acos: (52, 5),
    ops.atan: (23, 1),
    ops.tanh: (16, 0),
    ops.sigmoid: (10, 1),
    ops.erf: (24, 0),
    ops.erf_inverse: (74, 3),
    ops.power: (116, 2),
    ops.atan2: (48, 4),
    ops.sign: (5, 0),
    ops.divide: (1, 1),
    ops.reciprocal: (1, 1),
    ops.square_root: (1, 1),
    ops.remainder: (37, 3),
    ops.floor_divide_: (50, 5),
}


def instructions(stored: Iterable[Node], known: set[Node], rounded: set[Node]) -> int:
    """About how many instructions compute one element of values, from those that are known."""
    found = list(stored)
    each = [i for n in found for i in (n.inputs if n.op.category == "reduce" else (n,))]
    size = max((n.size for n in each), key=high, default=0)
    total = 0  # what is one for a row counts little
    for node in evaluated([n for n in found if n not in known], known):
        if node in known or node.op in MOVEMENT or not node.inputs or node.size == 1:
            continue
        plain, exact = INSTRUCTIONS.get(node.op, (1, 0))
        short = node in rounded or node.dtype.bits <= 16
        quick = node.dtype.is_integer or (short and node.op in QUICK)
        plain *= DOUBLE if node.dtype is float64 else 1
        total += plain + EXACT * (0 if quick or node.size != size else exact)
    return total


def evaluated(stored: Iterable[Node], known: set[Node]) -> Iterator[Node]:
    """The Nodes that one element of some values takes, as often as each is read or computed.

    What is reached over different movements is read at different elements, so it is computed for
    each; what is reached twice over the same ones, once. Nothing below what is known is computed,
    but once below those of it that are asked for.
    """
    moves: dict[tuple[int, Node], int] = {}  # a way down through movements has a number
    roots = dict.fromkeys(stored)

    def step(at: tuple[Node, int]) -> Sequence[tuple[Node, int]]:
        node, way = at
        if node in known and (way or node not in roots):
            return ()
        if node.op in MOVEMENT:
            way = moves.setdefault((way, node), len(moves) + 1)
        return [(i, way) for i in node.inputs]

    return (node for node, _ in walk([(node, 0) for node in roots], step))


def registers(stored: Sequence[Node], known: set[Node]) -> int:
    """The most registers of 32 bits that one element of values takes at once, computed in order."""
    size = max(high(n.size) for n in stored)
    held, most = set(stored), 0
    for node in reversed(topological(stored, stop=known.__contains__)):
        if node not in held:
            continue  # movement, which takes none
        most = max(most, sum(1 + (n.dtype.bits == 64) for n in held if high(n.size) == size))
        held.discard(node)
        if node not in known:
            held.update(base_of(i, known) for i in node.inputs)
    return most


def weight_of(node: Node) -> int:
    """What a Node counts in a Region, in the least that one counts: an addition counts 1, and a
    Region of many such fills a program as one of fewer costly functions does."""
    plain, exact = INSTRUCTIONS.get(node.op, (1, 0))
    return max(1, (plain + 24 * exact) * 2 // 5)


# ---- how much one Kernel computes ----------------------------------------------------------------

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
        if node.op not in INLINE and self.own[node].nodes > HELD // DOUBLE:
            inside = [i for i in node.inputs if i not in self.values]
            if self.holds_much(inside, max([high(i.size) for i in inside], default=0)):
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
                each = weight_of(node) * (DOUBLE if node.dtype is float64 else 1)
                total += each if high(node.size) >= size else 0
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
