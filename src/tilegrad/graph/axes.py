"""Where the axes of a value lie in a larger one: values followed through movement.

Each axis of the value one starts from is an Atom. Going down through permutes, reshapes,
expands, slices and concatenations, every axis of what is met has an AxisIndex: the Atoms it
counts, row-major, with a start and a step. A reshape may ask for an Atom in parts; then it is
split, and everybody who holds it sees the parts (`flat`).
Invariant: the value of a Node at its Indices is the value one started from, at every index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.symbol import Size, floor_divide, low
from ..ir.types import product
from . import build, ops
from .movement import axis_groups

ELEMENTWISE = ("unary", "binary", "compare", "ternary")


class Atom:
    """An index 0..size-1; `parts` are the outer and the inner one where it was split."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.parts: tuple[Atom, Atom] | None = None


Atoms = tuple[Atom, ...]


class AxisIndex(NamedTuple):
    """The index of an axis: start + step * (the row-major index of the Atoms)."""

    atoms: Atoms = ()
    start: Size = 0
    step: int = 1

    @property
    def plain(self) -> bool:
        """Whether the index is just that of the Atoms."""
        return self.start == 0 and self.step == 1


Indices = tuple[AxisIndex, ...]
FIRST = AxisIndex()


def flat(atoms: Sequence[Atom]) -> Atoms:
    """The Atoms with those that were split replaced by their parts."""
    found: list[Atom] = []
    for atom in atoms:
        found.extend((atom,) if atom.parts is None else flat(atom.parts))
    return tuple(found)


def atoms_of(indices: Indices) -> Atoms:
    """The Atoms of all Indices, in order."""
    return flat([a for p in indices for a in p.atoms])


def size_of(atoms: Sequence[Atom]) -> Size:
    """How many indices the Atoms have together."""
    return product(tuple(a.size for a in atoms))


def fresh(shape: Sequence[Size]) -> Indices:
    """An AxisIndex of its own for each axis; axes of size 1 need none."""
    return tuple([FIRST if s == 1 else AxisIndex((Atom(s),)) for s in shape])


def full(node: Node, indices: Indices) -> bool:
    """Whether every axis is covered by Atoms of its own, each once."""
    atoms = atoms_of(indices)
    return len(set(atoms)) == len(atoms) and all(
        p.plain and size_of(p.atoms) == s for p, s in zip(indices, node.shape)
    )


# ---- going down -----------------------------------------------------------------------------


def moved(node: Node, indices: Indices) -> tuple[Node, Indices] | None:
    """What a permute, expand or reshape moves, with its Indices."""
    op = node.op
    if op is ops.permute:
        order = node.attrs["order"]
        source = node.inputs[0]
        return source, tuple([indices[order.index(a)] for a in range(len(order))])
    if op is ops.expand:
        source = node.inputs[0]
        pairs = zip(source.shape, node.shape, indices)
        return source, tuple([FIRST if a == 1 and b != 1 else p for a, b, p in pairs])
    if op is ops.reshape:
        found = _through_reshape(node.inputs[0], node, indices)
        return None if found is None else (node.inputs[0], found)
    return None


def down(node: Node, indices: Indices) -> tuple[Node, Indices] | None:
    """What any movement moves: slices, and concatenations where one part is met, too."""
    if node.op is ops.slice_:
        a = node.attrs
        return node.inputs[0], tuple(
            [
                AxisIndex(p.atoms, start + p.start * step, p.step * step)
                for p, start, step in zip(indices, a["start"], a["step"])
            ]
        )
    if node.op is ops.concatenate:
        return _through_concatenate(node, indices)
    return moved(node, indices)


def _through_reshape(source: Node, node: Node, indices: Indices) -> Indices | None:
    groups = axis_groups(source.shape, node.shape)
    if groups is None:
        return None
    found: list[AxisIndex] = [FIRST] * len(source.shape)
    for old, new in groups:
        if len(old) == len(new) == 1:
            found[old[0]] = indices[new[0]]
            continue
        if any(not indices[a].plain or size_of(indices[a].atoms) != node.shape[a] for a in new):
            return None
        atoms = flat([x for a in new for x in indices[a].atoms])
        parts = split(atoms, [source.shape[a] for a in old])
        if parts is None:
            return None
        for axis, part in zip(old, parts):
            found[axis] = AxisIndex(part)
    return tuple(found)


def _through_concatenate(node: Node, indices: Indices) -> tuple[Node, Indices] | None:
    axis = node.attrs["axis"]
    index = indices[axis]
    last = (size_of(index.atoms) - 1) * index.step
    offset: Size = 0
    for part in node.inputs:
        start = index.start - offset
        rest = part.shape[axis] - start - last
        if low(start) >= 0 and low(rest) >= 1:
            inside = AxisIndex(index.atoms, start, index.step)
            return part, (*indices[:axis], inside, *indices[axis + 1 :])
        offset = offset + part.shape[axis]
    return None


def split(atoms: Sequence[Atom], sizes: Sequence[Size]) -> list[Atoms] | None:
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


# ---- what a value depends on ----------------------------------------------------------------


def below(values: Iterable[Node], most: int | None = None) -> list[Node]:
    """What elementwise ops and movement lead down to, the nearest first; no conditions."""
    seen: dict[Node, None] = {}
    waiting = deque(values)
    while waiting and len(seen) != most:
        node = waiting.popleft()
        if node in seen:
            continue
        seen[node] = None
        if node.op.category in ("unary", "binary", "ternary", "movement"):
            waiting.extend(node.inputs[1:] if node.op is ops.where else node.inputs)
    return list(seen)


def strip(node: Node, indices: Indices) -> tuple[Node, Indices]:
    """The value under movement and casts between floats."""
    while True:
        if node.op is ops.cast and node.dtype.is_float and node.inputs[0].dtype.is_float:
            node = node.inputs[0]
            continue
        found = down(node, indices)
        if found is None:
            return node, indices
        node, indices = found


def depends(node: Node, indices: Indices) -> frozenset[Atom]:
    """The Atoms a value changes with, as far as elementwise ops and movement show it."""
    known: dict[tuple[Node, Indices], frozenset[Atom]] = {}

    def visit(node: Node, indices: Indices) -> frozenset[Atom]:
        key = (node, indices)
        if key in known:
            return known[key]
        below = down(node, indices)
        if node.op is ops.constant:
            found: frozenset[Atom] = frozenset()
        elif below is not None:
            found = visit(*below)
        elif node.op.category in ELEMENTWISE:
            found = frozenset().union(*[visit(i, indices) for i in node.inputs])
        else:
            found = frozenset(atoms_of(indices))
        known[key] = found
        return found

    return frozenset(flat(tuple(visit(node, indices))))


def on_atoms(node: Node, indices: Indices, axes: Atoms) -> Node:
    """The value with one axis for each Atom, of size 1 where it does not depend on it.

    Elementwise ops are computed on the small side where that drops an axis.
    """
    known: dict[tuple[Node, Indices], Node] = {}

    def visit(node: Node, indices: Indices) -> Node:
        key = (node, indices)
        if key not in known:
            known[key] = make(node, indices)
        return known[key]

    def make(node: Node, indices: Indices) -> Node:
        below = down(node, indices)
        if below is not None:
            return visit(*below)
        if node.op is ops.constant:
            return build.reshape(node, (1,) * len(axes))
        if node.op.category in ELEMENTWISE and not (
            full(node, indices) and depends(node, indices) == set(atoms_of(indices))
        ):
            inputs = [visit(i, indices) for i in node.inputs]
            shape = tuple(
                [next((s for s in sizes if s != 1), 1) for sizes in zip(*[i.shape for i in inputs])]
            )
            return node.op.make(tuple([build.expand(i, shape) for i in inputs]), node.attrs)
        return on_leaf(node, indices, axes)

    return visit(node, indices)


def on_leaf(node: Node, indices: Indices, axes: Atoms) -> Node:
    """A Node itself with one axis for each Atom, of size 1 where it has none."""
    own = atoms_of(indices)
    if len(set(own)) != len(own) or not set(own) <= set(axes):
        raise InternalError("graph.axes", f"{node!r} has an axis twice, or one that is not asked")
    for axis, p in enumerate(indices):
        count = size_of(p.atoms)
        if p.plain and count == node.shape[axis]:
            continue
        stop = p.start + (count - 1) * p.step + 1
        node = build.slice_axis(node, axis, p.start, stop, p.step)
    node = build.reshape(node, tuple([a.size for a in own]))
    node = build.permute(node, [own.index(a) for a in axes if a in own])
    return build.reshape(node, tuple([a.size if a in own else 1 for a in axes]))


def grouped(node: Node, axes: Atoms, groups: Sequence[Atoms]) -> Node:
    """A value on Atoms (`on_atoms`) with one axis for each group, of size 1 where it has none."""
    shape: list[Size] = []
    wanted: list[Size] = []
    number_of = {a: n for n, a in enumerate(axes)}
    for group in groups:
        on = [node.shape[number_of[a]] != 1 for a in group]
        some = any(on)
        wanted.extend(a.size if some else 1 for a in group)
        shape.append(size_of(group) if some else 1)
    order = [number_of[a] for group in groups for a in group]
    return build.reshape(build.expand(build.permute(node, order), tuple(wanted)), tuple(shape))
