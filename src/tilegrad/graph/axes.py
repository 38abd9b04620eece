"""Where the axes of a value lie in a larger one: values followed through movement.

Each axis of the value one starts from is an Atom. A Place is a Node read at Indices: every axis has
an AxisIndex, the Atoms it counts, row-major, with a start and a step. Going down through permutes,
reshapes, expands, slices and concatenations leads from Place to Place. A reshape may ask for an
Atom in parts; then it is split, and everybody who holds it sees the parts (`flat`).
Invariant: the value of every Place is the value one started from, at every index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count
from typing import NamedTuple

from ..core.errors import InternalError
from ..ir.node import Node, Op, walk
from ..ir.symbol import Expr, Size, atoms, floor_divide, high, low, named
from ..ir.types import product
from . import build, ops
from .movement import axis_groups
from .simplify import holds

ELEMENTWISE = ("unary", "binary", "compare", "ternary")
# what Places may lie under, if that is shallow
READ = {op for op in ops.graph.ops.values() if op is not ops.dot and op.category != "control"}
_number = count()


class Atom:
    """An axis: its size and its `index` 0..size-1 as a number; `parts` are the outer and the inner
    one where it was split."""

    __slots__ = ("index", "parts", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.index = named("loop", f"atom{next(_number)}", 0, max(1, high(size) - 1))
        self.parts: tuple[Atom, Atom] | None = None


Atoms = tuple[Atom, ...]


def flat(atoms: Iterable[Atom]) -> Atoms:
    """The Atoms with those that were split replaced by their parts."""
    found: list[Atom] = []
    for atom in atoms:
        found.extend((atom,) if atom.parts is None else flat(atom.parts))
    return tuple(found)


def size_of(atoms: Sequence[Atom]) -> Size:
    """How many indices the Atoms have together."""
    return product(tuple(a.size for a in atoms))


def index_of(atoms: Iterable[Atom]) -> Size:
    """The row-major index of the Atoms as a number."""
    total: Size = 0
    for atom in flat(atoms):
        total = total * atom.size + atom.index
    return total


def loops(value: Size) -> set[Expr]:
    """The indices of Atoms that a number changes with."""
    return set() if isinstance(value, int) else {x for x in atoms(value) if x.kind == "loop"}


class AxisIndex(NamedTuple):
    """The index of an axis: start + step * (the row-major index of the Atoms)."""

    atoms: Atoms = ()
    start: Size = 0
    step: int = 1

    def covers(self, size: Size) -> bool:
        """Whether the Atoms alone index an axis of some size."""
        return self.start == 0 and self.step == 1 and size_of(self.atoms) == size


Indices = tuple[AxisIndex, ...]
FIRST = AxisIndex()


def fresh(shape: Sequence[Size]) -> Indices:
    """An AxisIndex of its own for each axis; axes of size 1 need none."""
    return tuple([FIRST if s == 1 else AxisIndex((Atom(s),)) for s in shape])


def below(value: Node, most: int | None = None) -> list[Node]:
    """What elementwise ops and movement lead down to, the nearest first; no conditions."""
    seen: dict[Node, None] = {}
    waiting = deque([value])
    while waiting and len(seen) != most:
        node = waiting.popleft()
        if node in seen:
            continue
        seen[node] = None
        if node.op.category in ("unary", "binary", "ternary", "movement"):
            waiting.extend(node.inputs[1:] if node.op is ops.where else node.inputs)
    return list(seen)


class Place(NamedTuple):
    """A Node at the Indices of its axes."""

    node: Node
    indices: Indices

    @property
    def op(self) -> Op:
        """The op of the Node."""
        return self.node.op

    @property
    def inputs(self) -> list[Place]:
        """What an elementwise op reads."""
        return [Place(i, self.indices) for i in self.node.inputs]

    @property
    def atoms(self) -> Atoms:
        """The Atoms of all axes, in order."""
        return flat([a for p in self.indices for a in p.atoms])

    @property
    def full(self) -> bool:
        """Whether every axis is covered by Atoms of its own, each once."""
        atoms = self.atoms
        return len(set(atoms)) == len(atoms) and all(
            p.covers(s) for p, s in zip(self.indices, self.node.shape)
        )

    # ---- going down -------------------------------------------------------------------------

    def down(self) -> Place | None:
        """What movement moves; of a concatenation where one part is met."""
        node, indices = self
        found: Sequence[AxisIndex] | None = None
        if node.op is ops.permute:
            order = node.attrs["order"]
            found = [indices[order.index(a)] for a in range(len(order))]
        elif node.op is ops.expand:
            found = [FIRST if s == 1 else p for s, p in zip(node.inputs[0].shape, indices)]
        elif node.op is ops.reshape:
            found = _through_reshape(node.inputs[0], node, indices)
        elif node.op is ops.slice_:
            parts = zip(indices, node.attrs["start"], node.attrs["step"])
            found = [AxisIndex(p.atoms, a + p.start * step, p.step * step) for p, a, step in parts]
        elif node.op is ops.concatenate:
            return _through_concatenate(node, indices)
        return None if found is None else Place(node.inputs[0], tuple(found))

    def strip(self, exact: bool = False) -> Place:
        """The value under movement and casts between floats; exact: those from 16 bits or more to
        what holds all their values."""
        place: Place | None = self
        while place is not None:
            last = place
            place = last.inputs[0] if _float_cast(last.node, exact) else last.down()
        return last

    def reads(self) -> list[Place]:
        """What movement and elementwise ops read."""
        found = self.down()
        if found is not None:
            return [found]
        return self.inputs if self.op.category in ELEMENTWISE else []

    def depends(self) -> frozenset[Atom]:
        """The Atoms it changes with, as far as elementwise ops and movement show it."""
        every = list(walk([self], Place.reads))
        return frozenset(flat([a for p in every if not p.reads() for a in p.atoms]))

    def changes_with(self, atoms: Atoms) -> bool:
        """Whether it changes with any of the Atoms."""
        return not self.depends().isdisjoint(flat(atoms))

    # ---- as a value of its own --------------------------------------------------------------

    def on_atoms(self, axes: Atoms) -> Node:
        """The value with one axis for each Atom, of size 1 where it does not depend on it.

        Elementwise ops are computed on the small side where that drops an axis.
        """

        @cache
        def visit(place: Place) -> Node:
            found = place.down()
            if found is not None:
                return visit(found)
            op = place.op
            if op.category not in ELEMENTWISE or (
                place.full and place.depends() == set(place.atoms)
            ):
                return place.on_leaf(axes)
            inputs = [visit(i) for i in place.inputs]
            shape = build.broadcast_shapes(op.name, *[i.shape for i in inputs])
            return op.make(tuple([build.expand(i, shape) for i in inputs]), place.node.attrs)

        return visit(self)

    def on_leaf(self, axes: Atoms) -> Node:
        """The Node itself with one axis for each Atom, of size 1 where it has none."""
        node, own = self.node, self.atoms
        if len(set(own)) != len(own) or not set(own) <= set(axes):
            raise InternalError("graph.axes", f"{node!r} has an axis twice, or one not asked for")
        for axis, p in enumerate(self.indices):
            if not p.covers(node.shape[axis]):
                stop = p.start + (size_of(p.atoms) - 1) * p.step + 1
                node = build.slice_axis(node, axis, p.start, stop, p.step)
        node = build.reshape(node, tuple([a.size for a in own]))
        node = build.permute(node, [own.index(a) for a in axes if a in own])
        return build.reshape(node, tuple([a.size if a in own else 1 for a in axes]))


def _float_cast(node: Node, exact: bool) -> bool:
    """Whether a Node is a cast that `strip` looks under."""
    source = node.inputs[0].dtype if node.op is ops.cast else None
    if source is None or not (source.is_float and node.dtype.is_float):
        return False
    return not exact or (source.bits >= 16 and holds(node.dtype, source))


def _through_reshape(source: Node, node: Node, indices: Indices) -> list[AxisIndex] | None:
    groups = axis_groups(source.shape, node.shape)
    if groups is None:
        return None
    found: list[AxisIndex] = [FIRST] * len(source.shape)
    for old, new in groups:
        if len(old) == len(new) == 1:
            found[old[0]] = indices[new[0]]
            continue
        if not all(indices[a].covers(node.shape[a]) for a in new):
            return None
        parts = split([x for a in new for x in indices[a].atoms], [source.shape[a] for a in old])
        if parts is None:
            return None
        for axis, part in zip(old, parts):
            found[axis] = AxisIndex(part)
    return found


def _through_concatenate(node: Node, indices: Indices) -> Place | None:
    axis = node.attrs["axis"]
    index = indices[axis]
    last = (size_of(index.atoms) - 1) * index.step
    start = index.start
    for part in node.inputs:
        size = part.shape[axis]
        if low(start) >= 0 and low(size - start - last) >= 1:
            return Place(part, (*indices[:axis], index._replace(start=start), *indices[axis + 1 :]))
        start = start - size
    return None


def split(atoms: Iterable[Atom], sizes: Sequence[Size]) -> list[Atoms] | None:
    """The Atoms cut into runs of these sizes, splitting some where that is needed."""
    rest = list(flat(atoms))
    found: list[Atoms] = []
    for size in sizes:
        run: list[Atom] = []
        left = size
        while left != 1:
            if not rest:
                return None
            atom = rest.pop(0)
            if _divides(atom.size, left):
                run.append(atom)
                left = floor_divide(left, atom.size)
            elif _divides(left, atom.size):
                atom.parts = (Atom(left), Atom(floor_divide(atom.size, left)))
                rest[:0] = atom.parts
            else:
                return None
        found.append(tuple(run))
    return None if rest else found


def _divides(a: Size, b: Size) -> bool:
    """Whether a * something is b, for sure."""
    return a == b or (a != 0 and floor_divide(b, a) * a == b)


# ---- the axes of attention ------------------------------------------------------------------


class Axes(NamedTuple):
    """Which Atoms are what: batch, key heads, heads of a group, queries, keys, widths."""

    batch: Atoms
    key_heads: Atoms
    group: Atoms
    queries: Atoms
    keys: Atoms
    width: Atoms = ()
    value_width: Atoms = ()

    @property
    def heads(self) -> Atoms:
        """All heads: those that share a key head lie side by side."""
        return self.key_heads + self.group

    @property
    def scores(self) -> Atoms:
        """The axes of the scores, in order."""
        return self.batch + self.heads + self.queries + self.keys

    @property
    def difference(self) -> Size:
        """key - query."""
        return index_of(self.keys) - index_of(self.queries)

    def on_scores(self, value: Node) -> Node:
        """A value on the Atoms of the scores as (b, h, i, j), of size 1 where it has none."""
        sizes = dict(zip(self.scores, value.shape))
        wanted: list[Size] = []
        shape: list[Size] = []
        for group in (self.batch, self.heads, self.queries, self.keys):
            some = any(sizes[a] != 1 for a in group)
            wanted.extend(a.size if some else 1 for a in group)
            shape.append(size_of(group) if some else 1)
        return build.reshape(build.expand(value, tuple(wanted)), tuple(shape))
