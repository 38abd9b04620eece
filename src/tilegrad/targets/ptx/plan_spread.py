"""Choose the Spread of every Tile of a Body before anything is emitted.

Values that must be held alike (operands and results of elementwise ops, what loops carry, the
value and mask of a store) form a class; matrix products fix the Spread of their class; broadcasts,
reductions, transposes and reshapes derive one class from another; what is left takes the
default: runs of 16 bytes by neighbouring threads. Values that cost nothing to make again
(constants, counts, what is computed from scalars) are `free`: they are made in whatever Spread
is asked for. Invariant: every Tile value that is not free has a Spread over the threads of the
role that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...core.errors import InternalError
from ...ir.block import Block
from ...ir.node import Node
from ...ir.types import Memory, Tile
from ...tile.build import Body
from .spread import SCALAR, Spread, accumulator, accumulator_80, blocked

ELEMENTWISE = ("unary", "binary", "compare", "ternary")
DERIVED = ("broadcast", "reshape", "transpose")


@dataclass
class Relation:
    """`to` can be derived from `source` by `make`."""

    source: Node
    to: Node
    make: Callable[[Spread], Spread]


class SpreadPlan:
    """Spreads by Node, for one Body."""

    def __init__(self, body: Body, warps: int, wide_matrix: bool = True) -> None:
        self.warps, self.wide_matrix = warps, wide_matrix
        self.parent: dict[Node, Node] = {}
        self.threads: dict[Node, int] = {}
        self.anchors: dict[Node, Spread] = {}
        self.relations: list[Relation] = []
        self.sizes: dict[Node, int] = {}  # least bytes of an element that memory sees, by class
        self._free: dict[Node, bool] = {}
        self._walk(body.block, warps)
        self._resolve()

    # ---- questions ------------------------------------------------------------------------

    def free(self, node: Node) -> bool:
        """Whether the value is made again wherever it is wanted."""
        return self._free.get(node, False)

    def spread(self, node: Node) -> Spread:
        """How a Tile (or a place in registers) is held."""
        if node.type.shape == ():  # type: ignore[union-attr]
            return SCALAR
        return self.anchors[self._find(node)]

    # ---- classes --------------------------------------------------------------------------

    def _find(self, node: Node) -> Node:
        root = node
        while self.parent.get(root, root) is not root:
            root = self.parent[root]
        while self.parent.get(node, node) is not root:
            self.parent[node], node = root, self.parent.get(node, node)
        return root

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
            if b in self.sizes:
                self._size(a, self.sizes.pop(b))

    def _anchor(self, node: Node, spread: Spread) -> None:
        self.anchors.setdefault(self._find(node), spread)

    def _size(self, node: Node, bytes_: int) -> None:
        root = self._find(node)
        self.sizes[root] = min(bytes_, self.sizes.get(root, 16))

    def _walk(self, block: Block, warps: int) -> None:
        for node in block.nodes:
            inner = node.attrs["warps"] if node.op.name == "role" else warps
            self._visit(node, warps)
            for b in node.blocks:
                for a in b.arguments:
                    self.threads[a] = 32 * inner
                    self.parent.setdefault(a, a)
                self._walk(b, inner)
            if node.op.name == "loop":
                b = node.blocks[0]
                for given, argument, result in zip(node.inputs[2:], b.arguments[1:], b.results):
                    self._join(argument, result, given)
            self._after(node)

    def _visit(self, node: Node, warps: int) -> None:
        self.threads[node] = 32 * warps
        name, group = node.op.name, node.op.group
        tile = isinstance(node.type, Tile)
        if tile and (name in ("constant", "iota") or (
            (group in ELEMENTWISE or name in DERIVED)
            and all(i.shape == () or self.free(i) for i in node.inputs)
        )):  # fmt: skip
            self._free[node] = True
            return
        if self._holds(node):
            self.parent.setdefault(node, node)
        if group in ELEMENTWISE:
            self._join(node, *(i for i in node.inputs if i.shape == node.shape))
        elif name in DERIVED or name in ("reduce", "cumulative", "extract", "part"):
            self._shape(node)
        elif name in ("load", "gather", "store", "scatter", "atomic_add"):
            self._memory(node)
        elif name in ("matrix_async", "dot"):
            self._matrix(node, warps)
        elif name in ("read_place", "write_place"):
            self._place(node)
        elif name == "hole":
            self._join(node, *(i for i in node.inputs if i.shape == node.shape))

    def _after(self, node: Node) -> None:
        if node.op.name != "get":
            return
        source, index = node.inputs[0], node.attrs["index"]
        if source.op.name == "loop":
            self._join(node, source.blocks[0].arguments[1 + index])
        elif source.op.name == "branch":
            self._join(node, *(b.results[index] for b in source.blocks))

    def _shape(self, node: Node) -> None:
        x, name = node.inputs[0], node.op.name
        if name == "cumulative":
            self._join(node, x)
        elif name in ("reduce", "extract"):
            axis = node.attrs.get("axis", 0)
            self.relations.append(Relation(x, node, lambda s: s.drop(axis)))
        elif name == "part":
            start, shape = node.attrs["start"], node.attrs["shape"]
            self.relations.append(Relation(x, node, lambda s: s.part(start, shape)))
        elif name == "transpose":
            order = node.attrs["order"]
            back = [order.index(i) for i in range(len(order))]
            self.relations.append(Relation(x, node, lambda s: s.permute(order)))
            self.relations.append(Relation(node, x, lambda s: s.permute(back)))
        elif name == "reshape":
            to, own = node.shape, x.shape
            self.relations.append(Relation(x, node, lambda s: s.reshape(to)))
            self.relations.append(Relation(node, x, lambda s: s.reshape(own)))
        elif name == "broadcast":
            self.relations.append(Relation(node, x, lambda s: broadcast_source(s, x.shape)))

    def _memory(self, node: Node) -> None:
        name = node.op.name
        if name == "load":
            tiles = [node, *(node.inputs[-1:] if node.attrs["masked"] else ())]
        elif name == "store":
            tiles = [node.inputs[1], *(node.inputs[-1:] if node.attrs["masked"] else ())]
        elif name == "gather":
            tiles = [node, *node.inputs[1:]]
        else:
            tiles = [*node.inputs[1:], node]
        self._join(*tiles)
        size = max(1, node.inputs[0].dtype.size)
        for t in tiles:
            if self._holds(t):
                self._size(t, size)

    def _matrix(self, node: Node, warps: int) -> None:
        if node.op.name == "dot":
            self._join(node, node.inputs[2])
            rows, columns = node.shape
            if rows % 16 == 0 and columns % 8 == 0:
                down, across = warp_grid(rows, columns, warps)
                self._anchor(node, accumulator_80((rows, columns), down, across))
            return
        total, a = node.inputs[0], node.inputs[1]
        for place in (total, a):
            if place.type.scope == "register":  # type: ignore[union-attr]
                self._anchor(place, accumulator(place.type.shape, warps))  # type: ignore[union-attr, arg-type]

    def _place(self, node: Node) -> None:
        place = node.inputs[0]
        value = node if node.op.name == "read_place" else node.inputs[1]
        if place.type.scope == "register":  # type: ignore[union-attr]
            self._join(place, value)
        elif self._holds(value):
            self._size(value, max(1, place.dtype.size))

    # ---- resolution -----------------------------------------------------------------------

    def _resolve(self) -> None:
        waiting = self.relations
        roots = {self._find(n) for n in self.parent}
        missing = sorted((r for r in roots if r not in self.anchors and self._holds(r)),
                         key=lambda n: (-math.prod(n.type.shape), n.serial))  # type: ignore[union-attr]  # fmt: skip
        while True:
            waiting = self._derive(waiting)
            missing = [m for m in missing if m not in self.anchors]
            if not missing:
                return
            root = missing[0]
            vector = max(1, 16 // self.sizes.get(root, 4))
            self.anchors[root] = blocked(root.type.shape, self.threads[root], vector)  # type: ignore[union-attr, arg-type]

    def _derive(self, relations: list[Relation]) -> list[Relation]:
        """Apply relations as long as they say something new; gives those that have not."""
        progress = True
        while progress:
            progress, left = False, []
            for relation in relations:
                if self.free(relation.to) or relation.to.type.shape == ():  # type: ignore[union-attr]
                    continue
                to = self._find(relation.to)
                if to in self.anchors:
                    continue
                source = self._find(relation.source)
                if source not in self.anchors:
                    left.append(relation)
                    continue
                try:
                    self.anchors[to] = relation.make(self.anchors[source])
                    progress = True
                except InternalError:
                    pass  # cannot be derived: it takes the default and is moved where it is used
            relations = left
        return relations


def broadcast_source(spread: Spread, own: tuple[int, ...]) -> Spread:
    """What a broadcast to this Spread reads of a Tile of the shape `own`."""
    extra = len(spread.shape) - len(own)
    found = spread
    for _ in range(extra):
        found = found.drop(0)
    return found.squeeze([a for a, size in enumerate(own) if size == 1])


def warp_grid(rows: int, columns: int, warps: int) -> tuple[int, int]:
    """Warps down and across a Tile, as near to square pieces as they get."""
    best = None
    for down in (1 << i for i in range(warps.bit_length())):
        across = warps // down
        if rows % (16 * down) or columns % (8 * across):
            continue
        cost = rows // down + columns // across
        if best is None or cost < best[0]:
            best = (cost, down, across)
    if best is None:
        raise InternalError("ptx.spread", f"a dot of {rows}x{columns} does not fit {warps} warps")
    return best[1], best[2]
