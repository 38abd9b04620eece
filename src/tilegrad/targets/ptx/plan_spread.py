"""Choose the Spread of every Tile of a Body before anything is emitted.

Values that must be held alike (operands and results of elementwise ops, what loops carry, the
value and mask of a store) form a class; matrix products fix the Spread of their class; broadcasts,
reductions, transposes and reshapes derive one class from another; what is left takes the
default: runs of 16 bytes by neighbouring threads; stacks come after what is stacked. Values that
cost nothing to make again (constants, counts, what is computed from scalars) are `free`: they are
made in whatever Spread is asked for. Invariant: every Tile value that is not free has a Spread
over the threads of the role that computes it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...core.dtype import bfloat16, float16, float32, int32
from ...core.errors import InternalError
from ...ir.block import Block
from ...ir.node import Node
from ...ir.symbol import high
from ...ir.types import Memory, Shape, Tile, product
from ...tile.bounds import Bounds, chosen_from, divisor_of
from ...tile.build import Body
from ...tile.placed import apart
from ...tile.row import Touch, memory_of, moved_tile, touch_of
from .spread import (
    SCALAR,
    Spread,
    accumulator,
    accumulator_80,
    accumulator_turns,
    blocked,
    grid,
    lines,
    operand_pairs,
    operand_rows,
    operand_words,
)

ELEMENTWISE = ("unary", "binary", "compare", "ternary")
DERIVED = ("broadcast", "reshape", "transpose", "words")
WARP = 32
NEAR = 1 << 18  # elements of a Memory that caches keep


Make = Callable[[Spread], Spread]
Relation = tuple[Node, Node, Make]  # the second can be derived from the first


@dataclass
class Wish:
    """What a class would have of its Spread: where nothing fixes it, these choose."""

    size: int = 16  # least bytes of an element that memory sees
    moved: Counter[int] = field(default_factory=Counter)  # bytes by the size of their elements
    together: int = 0  # most neighbours that move at once as they are aligned; 0 for any number
    inner: Counter[int] = field(default_factory=Counter)  # axes along which memory is contiguous
    reduced: set[int] = field(default_factory=set)  # axes that are reduced
    scanned: int = -1  # an axis with a running sum

    def merge(self, other: Wish) -> None:
        """Both wishes."""
        self.size = min(self.size, other.size)
        known = [w.together for w in (self, other) if w.moved or w.together]
        self.together = 0 if 0 in known else max(known, default=0)
        self.moved.update(other.moved)
        self.inner.update(other.inner)
        self.reduced |= other.reduced
        self.scanned = max(self.scanned, other.scanned)

    def spread(self, shape: Shape, threads: int) -> Spread:
        """The Spread that serves it."""
        if self.scanned >= 0:
            return lines(shape, threads, self.scanned)
        last = len(shape) - 1
        inner = max(self.inner, key=lambda a: (self.inner[a], a), default=last)
        kept = [a for a in range(len(shape)) if a not in self.reduced]
        warps_along = max(kept, key=lambda a: shape[a]) if self.reduced and kept else -1
        return blocked(shape, threads, self.vector(), -1 if inner == last else inner, warps_along)

    def vector(self) -> int:
        """Neighbours a thread holds: 16 bytes of what most bytes consist of, since threads that
        take more of it at once leave gaps in each of their accesses."""
        if self.together:
            return self.together
        size = self.size
        if size < 4 and self.moved[4] > sum(b for s, b in self.moved.items() if s < 4):
            size = 4
        return max(1, 16 // min(size, 16))


class SpreadPlan:
    """Spreads by Node, for one Body."""

    def __init__(self, body: Body, bounds: Bounds, warps: int) -> None:
        self.bounds = bounds
        self.parent: dict[Node, Node] = {}
        self.threads: dict[Node, int] = {}
        self.anchors: dict[Node, Spread] = {}
        self.relations: list[Relation] = []
        self.wishes: dict[Node, Wish] = {}
        self.dots: list[Node] = []
        self._free: set[Node] = set()
        self.late: set[Node] = set()  # stacks, and what is seen of them
        self.depth = 0  # of loops
        self._walk(body.block, warps)
        self._resolve()

    # ---- questions ------------------------------------------------------------------------

    def free(self, node: Node) -> bool:
        """Whether the value is made again wherever it is wanted."""
        return node in self._free

    def spread(self, node: Node) -> Spread:
        """How a Tile (or a place in registers) is held."""
        if node.shape == ():
            return SCALAR
        return self.anchors[self._find(node)]

    # ---- classes --------------------------------------------------------------------------

    def _find(self, node: Node) -> Node:
        while (above := self.parent.get(node, node)) is not node:
            self.parent[node] = self.parent.get(above, above)
            node = above
        return node

    def _holds(self, node: Node) -> bool:
        return (isinstance(node.type, Tile) and node.type.shape != () and not self.free(node)) or (
            isinstance(node.type, Memory) and node.type.scope == "register"
        )

    def _join(self, *nodes: Node) -> None:
        held = [n for n in nodes if self._holds(n)]
        for other in held[1:]:
            a, b = self._find(held[0]), self._find(other)
            if a is b:
                continue
            self.parent[b] = a
            if b in self.anchors:
                self._anchor(a, self.anchors.pop(b))
            if b in self.wishes:
                self._wish(a).merge(self.wishes.pop(b))

    def _anchor(self, node: Node, spread: Spread) -> None:
        self.anchors.setdefault(self._find(node), spread)

    def _wish(self, node: Node) -> Wish:
        return self.wishes.setdefault(self._find(node), Wish())

    def _walk(self, block: Block, warps: int) -> None:
        for node in block.nodes:
            inner = node.attrs["warps"] if node.op.name == "role" else warps
            self._visit(node, warps)
            for b in node.blocks:
                for a in b.arguments:
                    self.threads[a] = 32 * inner
                    self.parent.setdefault(a, a)
                self.depth += node.op.name == "loop"
                self._walk(b, inner)
                self.depth -= node.op.name == "loop"
            if node.op.name == "loop":
                b = node.blocks[0]
                for given, argument, result in zip(node.inputs[2:], b.arguments[1:], b.results):
                    self._join(argument, result, given)

    def _visit(self, node: Node, warps: int) -> None:
        self.threads[node] = 32 * warps
        name, category = node.op.name, node.op.category
        tile = isinstance(node.type, Tile)
        if tile and (
            name in ("constant", "iota", "stack")
            or (
                (category in ELEMENTWISE or name in DERIVED)
                and all(i.shape == () or self.free(i) for i in node.inputs)
            )
        ):
            self._free.add(node)
            return
        if self._holds(node):
            self.parent.setdefault(node, node)
        if name == "stack_rows" or (name in DERIVED and node.inputs[0] in self.late):
            self.late.add(node)
        if category in ELEMENTWISE:
            self._join(node, *(i for i in node.inputs if i.shape == node.shape))
        elif name in DERIVED or name in ("reduce", "cumulative", "extract", "part", "stack_rows"):
            self._shape(node)
        elif name in ("load", "gather", "store", "scatter", "atomic_add", "store_add"):
            self._memory(node)
        elif name in ("matrix_async", "matrix_sync", "dot"):
            self._matrix(node, warps)
        elif name in ("read_place", "write_place"):
            self._place(node)
        elif name == "copy_pages" and self._holds(node.inputs[4]):
            self._anchor(node.inputs[4], blocked(node.inputs[4].shape, WARP, 1))
        elif name == "get":
            self._join(node, *chosen_from(node))

    def _shape(self, node: Node) -> None:
        x, name = node.inputs[0], node.op.name
        if name == "cumulative":
            self._join(node, x)
            self._wish(node).scanned = node.attrs["axis"]
            return
        if name == "reduce" and self._holds(x):
            self._wish(x).reduced.add(node.attrs["axis"])
        if name == "stack_rows":
            self._join(*node.inputs)
        self.relations.append((node, x, partial(seen, node)))
        self.relations.append((x, node, partial(shown, node)))

    def _memory(self, node: Node) -> None:
        touch = touch_of(node)
        moved = (moved_tile(node), touch.offsets, touch.mask, node)
        tiles = [tile for tile in moved if tile is not None]
        self._join(*tiles)
        held = next((t for t in tiles if self._holds(t)), None)
        if held is None:
            return
        size, wish = max(1, touch.memory.dtype.size), self._wish(held)
        wish.merge(Wish(size))
        if node.op.name in ("load", "store"):
            type_ = memory_of(touch.memory)
            strides, far = type_.element_strides(), high(product(type_.shape)) >= NEAR
            wish.inner.update(i for i, axis in enumerate(touch.axes) if strides[axis] == 1)
            if self._holds(tiles[0]) and type_.scope == "global" and far:
                bytes_ = Counter({size: size * 8**self.depth})
                wish.merge(Wish(moved=bytes_, together=self._together(touch)))

    def _together(self, touch: Touch) -> int:
        """How many neighbours an access moves at once at most; 0 where 16 bytes are aligned."""
        type_ = memory_of(touch.memory)
        most = max(1, 16 // max(1, type_.dtype.size))
        found = most
        for axis, (stride, index) in enumerate(zip(type_.element_strides(), touch.nodes)):
            step = divisor_of(stride)
            if axis in touch.axes:
                found = math.gcd(found, step) if step != 1 else found
            found = math.gcd(found, step * self.bounds.divisor(index))
        return 0 if found == most else found

    def _matrix(self, node: Node, warps: int) -> None:
        if node.op.name == "dot":
            self._join(node, node.inputs[2])
            self.dots.append(node)
            return
        total, a = node.inputs[0], node.inputs[1]
        if node.op.name == "matrix_sync" and apart(total, node.inputs[2], node.attrs["warps"]):
            down = node.attrs["warps"][0]
            self._anchor(total, accumulator_80(total.shape, down, 1))
            self._anchor(a, operand_words(a.shape, down))
            self._anchor(node.inputs[2], operand_rows(node.inputs[2].shape, down))
            return
        if node.op.name == "matrix_sync":
            self._anchor(total, accumulator_turns(total.shape, *node.attrs["warps"]))
            if node.attrs["warps"][1] == 1:  # a left operand may be written as a result is held
                self._anchor(a, accumulator_turns(a.shape, *node.attrs["warps"]))
            return
        for place, packed in ((total, False), (a, a.dtype is int32)):
            if place.type.scope == "register":  # type: ignore[union-attr]
                held = operand_pairs if packed else accumulator
                self._anchor(place, held(place.shape, warps))

    def _place(self, node: Node) -> None:
        place = node.inputs[0]
        value = node if node.op.name == "read_place" else node.inputs[1]
        if place.type.scope == "register":  # type: ignore[union-attr]
            self._join(place, value)
        elif self._holds(value):
            wish = self._wish(value)
            size = max(1, place.dtype.size)
            if place.type.layout.startswith("swizzle") and wish.size < size:  # type: ignore[union-attr]
                wish.together = 16 // size  # of what is widened: no more than is exchanged as one
            wish.size = min(wish.size, size)

    # ---- resolution -----------------------------------------------------------------------

    def _resolve(self) -> None:
        for node in self.dots:
            whole_rows, a = 1 in self._wishes(self._find(node)).reduced, node.inputs[0]
            if self._holds(a) and by_matrix(node):  # what one warp holds it can multiply at once
                rows, columns = node.shape
                down, _ = warp_grid(rows, columns, self.threads[node] // 32, True)
                before = self.anchors.get(self._find(a))
                whole_rows |= before == accumulator_80(a.shape, down, 1)
            self._anchor(node, dot_spread(node, self.threads[node], whole_rows))
        waiting = self.relations
        roots = {self._find(n) for n in self.parent}
        late = {self._find(n) for n in self.late}
        missing = sorted(
            (r for r in roots if r not in self.anchors and self._holds(r)),
            key=lambda n: (
                n in late,
                -math.prod(n.shape),
                not self._wishes(n).moved,  # what goes to or comes from far memory before others
                not self._wishes(n).inner,  # then what goes to or comes from any
                n.serial,
            ),
        )
        while True:
            waiting = self._derive(waiting)
            missing = [m for m in missing if m not in self.anchors]
            if not missing:
                return
            root = missing[0]
            self.anchors[root] = self._wishes(root).spread(root.shape, self.threads[root])

    def _wishes(self, root: Node) -> Wish:
        """What a class wishes: 4 bytes an element if nothing."""
        return self.wishes.get(root) or Wish(4)

    def _derive(self, relations: list[Relation]) -> list[Relation]:
        """Apply relations as long as they say something new; gives those that have not."""
        progress = True
        while progress:
            progress, left = False, []
            for relation in relations:
                source, to, make = relation
                if self.free(to) or to.shape == ():
                    continue
                source, to = self._find(source), self._find(to)
                if to in self.anchors:
                    continue
                if source not in self.anchors:
                    left.append(relation)
                    continue
                try:
                    self.anchors[to] = make(self.anchors[source])
                    progress = True
                except InternalError:
                    pass  # cannot be derived: it takes the default and is moved where it is used
            relations = left
        return relations


def seen(node: Node, spread: Spread) -> Spread:
    """How what a Node sees otherwise is held, where the Node is held as this Spread."""
    shape = node.inputs[0].shape
    match node.op.name:
        case "broadcast":
            return spread.before_repeat(shape)
        case "reshape":
            return spread.reshape(shape)
        case "transpose":
            order = node.attrs["order"]
            return spread.permute([order.index(axis) for axis in range(len(order))])
        case "words":
            return spread.apart(shape)
        case "part":
            return spread.whole(shape)
        case "stack_rows" if all(axis for _, _, axis, _ in spread.fields):
            return spread.drop(0)
    raise InternalError("ptx.spread", f"{node.op} does not say how {shape} is held")


def shown(node: Node, spread: Spread) -> Spread:
    """How a Node is held, where what it sees otherwise is held as this Spread."""
    match node.op.name:
        case "reduce" | "extract":
            return spread.drop(node.attrs.get("axis", 0))
        case "stack_rows":
            return spread.stack(len(node.inputs))
        case "reshape":
            return spread.reshape(node.shape)
        case "transpose":
            return spread.permute(node.attrs["order"])
        case "words":
            return spread.words(node.shape)
        case "part":
            return spread.part(node.attrs["start"], node.shape)
    raise InternalError("ptx.spread", f"{node.op} does not say how {node.shape} is held")


def by_matrix(node: Node) -> bool:
    """Whether a dot is one that the matrix units of a warp take."""
    a, b, c = node.inputs
    (m, k), n = a.shape, b.shape[1]
    return (
        a.dtype is b.dtype
        and a.dtype in (bfloat16, float16)
        and c.dtype is float32
        and m % 16 == 0
        and n % 8 == 0
        and k % 16 == 0
    )


def dot_spread(node: Node, threads: int, whole_rows: bool = False) -> Spread:
    """How a dot holds its result; `whole_rows` keeps each row within one warp."""
    rows, columns = node.shape
    if not by_matrix(node):
        return grid((rows, columns), threads)
    down, across = warp_grid(rows, columns, threads // 32, whole_rows)
    return accumulator_80((rows, columns), down, across)


def warp_grid(rows: int, columns: int, warps: int, whole_rows: bool = False) -> tuple[int, int]:
    """Warps down and across a Tile, as near to square pieces as they get.

    A Tile too small for all of them is held by fewer, and the others do the same work.
    """
    powers = [1 << i for i in range(warps.bit_length())]
    *_, down, across = min(
        (-down * across, rows // down + columns // across, down, across)
        for down, across in itertools.product(powers, powers[:1] if whole_rows else powers)
        if down * across <= warps and not rows % (16 * down) and not columns % (8 * across)
    )
    return down, across
