"""Accesses: where in its inputs an element of a Graph value comes from.

Movement ops never copy: reading element `index` of a moved value is reading another index of
its source, perhaps under a condition (padding). Everything here is Expr arithmetic on indices, and
every walk down from a value at an index goes by `walk_down`, `reads_below` or `through`.
Invariant: the composed index is in range wherever the conditions hold.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import InternalError
from ..graph import ops
from ..ir.node import Node, Op, walk
from ..ir.symbol import (
    Expr,
    Size,
    atoms,
    coefficient,
    combine,
    floor_divide,
    high,
    low,
    modulo,
    named,
)
from ..ir.types import product, row_major

Index = tuple[Size, ...]
Place = tuple[Node, Index]  # a value at an index
Readers = dict[Node, list[Node]]  # of each Node
Loaded = Callable[[Node], Size]  # the index that a loaded scalar is
ELEMENTWISE = ("unary", "binary", "compare", "ternary")  # ops that read at their own index


@dataclass(frozen=True)
class Condition:
    """0 <= value < size."""

    value: Size
    size: Size

    def holds(self) -> bool:
        """Whether the bounds prove it."""
        return low(self.value) >= 0 and low(self.size - self.value) >= 1

    def fails(self) -> bool:
        """Whether the bounds prove that it never holds."""
        return high(self.value) < 0 or low(self.value - self.size) >= 0


def ravel(index: Sequence[Size], shape: Sequence[Size]) -> Size:
    """The row-major linear index."""
    total: Size = 0
    for i, s in zip(index, shape):
        total = total * s + i
    return total


def unravel(linear: Size, shape: Sequence[Size]) -> Index:
    """The index of a row-major linear index that is in range."""
    found: list[Size] = [0] * len(shape)
    first, *others = [axis for axis, s in enumerate(shape) if s != 1] or [-1]
    for axis in reversed(others):
        found[axis] = modulo(linear, shape[axis])
        linear = floor_divide(linear, shape[axis])
    if first >= 0:
        found[first] = linear
    return tuple(found)


def placed(at: Mapping[int, Size], rank: int, rest: Iterable[Size] = ()) -> Index:
    """An index of so many axes that is known at some of them; others take the rest in turn."""
    others = iter(rest)
    return tuple(at[axis] if axis in at else next(others) for axis in range(rank))


def spread(x: Node, *parts: tuple[Sequence[int], Size]) -> Index:
    """An index of a value by parts: some of its axes, and the number of an element along them."""
    at: dict[int, Size] = {}
    for axes, number in parts:
        at.update(zip(axes, unravel(number, [x.shape[a] for a in axes])))
    return placed(at, len(at))


def _reshape(node: Node, index: Index) -> Index:
    """Align runs of axes with equal sizes, so that only what really mixes is divided. What is left
    at the end is equal by a requirement (N as N // 2 rows of 2)."""
    source, target = node.inputs[0].shape, node.shape
    if product(source) == 0:
        return (0,) * len(source)  # nothing is ever read
    found: list[Size] = []
    i = j = 0
    while i < len(source) or j < len(target):
        a, b = i, j
        size_a: Size = source[i] if i < len(source) else 1
        size_b: Size = target[j] if j < len(target) else 1
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while size_a != size_b:
            if _smaller(size_a, size_b) and i < len(source):
                size_a, i = size_a * source[i], i + 1
            elif j < len(target):
                size_b, j = size_b * target[j], j + 1
            elif i < len(source):
                size_a, i = size_a * source[i], i + 1
            elif isinstance(size_a, Expr) or isinstance(size_b, Expr):
                break
            else:
                raise InternalError("access", f"cannot align {source} with {target}")
        found += unravel(ravel(index[b:j], target[b:j]), source[a:i])
    return tuple(found)


def _smaller(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return isinstance(a, int) or (not isinstance(b, int) and high(a) < high(b))


def _flip(node: Node, index: Index) -> Index:
    axes = node.attrs["axes"]
    return tuple(s - 1 - i if n in axes else i for n, (i, s) in enumerate(zip(index, node.shape)))


def _windows(node: Node, index: Index) -> Index:
    axis, a = node.attrs["axis"], node.attrs
    inner = index[axis] * a["step"] + index[-1] * a["dilation"]
    return index[:axis] + (inner,) + index[axis + 1 : -1]


MOVEMENT: dict[Op, Callable[[Node, Index], Index]] = {
    ops.reshape: _reshape,
    ops.permute: lambda node, index: placed(dict(zip(node.attrs["order"], index)), len(index)),
    ops.expand: lambda node, index: tuple(
        0 if s == 1 else i for i, s in zip(index, node.inputs[0].shape)
    ),
    ops.pad: lambda node, index: tuple(i - a for i, a in zip(index, node.attrs["low"])),
    ops.slice_: lambda node, index: tuple(
        i * step + start for i, start, step in zip(index, node.attrs["start"], node.attrs["step"])
    ),
    ops.flip: _flip,
    ops.windows: _windows,
    ops.pruned: lambda node, index: index,
}


def moved(node: Node, index: Index) -> tuple[Index, list[Condition]]:
    """The index that a movement reads, and the conditions under which it does (padding)."""
    inner = MOVEMENT[node.op](node, index)
    conditions = map(Condition, inner, node.inputs[0].shape) if node.op is ops.pad else ()
    return inner, [c for c in conditions if not c.holds()]


def atom_of(name: str, size: Size) -> Expr:
    """The atom that stands for any index along an axis, of two elements at least."""
    return named("loop", name, 0, max(1, high(size) - 1))


def depends(value: Size, inner: Sequence[Expr]) -> bool:
    """Whether an index mentions any of the atoms."""
    if isinstance(value, int):
        return False
    found = atoms(value)
    return any(i in found for i in inner)


def offset_of(node: Node, index: Index) -> Size:
    """The linear offset of an element of a stored value."""
    total: Size = 0
    for i, s in zip(index, row_major(node.shape)):
        total = total + i * s
    return total


def strides_of(
    node: Node, index: Index, values: Container[Node], probes: Sequence[Size]
) -> tuple[Node, list[Size], Size] | None:
    """Which of some values one is only moved of, how many elements its offset moves along atoms,
    and what is left of that; None where there is no such, or it is not linear in them."""
    place = through(node, index, values)
    if place is None:
        return None
    found, offset = list[Size](), offset_of(*place)
    for probe in probes:
        stride = coefficient(offset, probe) if isinstance(probe, Expr) else 0
        if stride is None:
            return None
        found.append(stride)
        offset = offset - probe * stride
    return place[0], found, offset


def joined(node: Node, index: Index) -> Iterator[tuple[Node, Index, Condition]]:
    """What a concatenate joins, each with its own index and the condition that it is meant."""
    axis, at = node.attrs["axis"], index[node.attrs["axis"]]
    for x in node.inputs:
        yield x, (*index[:axis], at, *index[axis + 1 :]), Condition(at, x.shape[axis])
        at = at - x.shape[axis]


# ---- walks down from values -----------------------------------------------------------------


def base_of(node: Node, values: Container[Node] = (), passing: Container[Op] = MOVEMENT) -> Node:
    """What a value is only moved of (or what ops that are passed by have made of it), down to one
    of some values."""
    while node not in values and node.op in passing:
        node = node.inputs[0]
    return node


def readers_through(
    node: Node, readers: Readers, passing: Container[Op] = MOVEMENT
) -> Iterator[Node]:
    """What reads a Node, and what reads it through movement, or other ops of one input."""
    stack = list(readers.get(node, ()))
    while stack:
        reader = stack.pop()
        yield reader
        if reader.op in passing:
            stack.extend(readers.get(reader, ()))


def through(node: Node, index: Index, values: Container[Node]) -> Place | None:
    """The place of one of some values that is read through movement alone, without padding."""
    while node not in values:
        if node.op not in MOVEMENT:
            return None
        index, conditions = moved(node, index)
        if conditions:
            return None
        node = node.inputs[0]
    return node, index


def below(node: Node, index: Index, guarded: bool = True) -> list[Place]:
    """What movement and elementwise ops read for an element; of what is padded only where
    `guarded` reads count."""
    if node.op in MOVEMENT:
        inner, conditions = moved(node, index)
        return [] if conditions and not guarded else [(node.inputs[0], inner)]
    return [(i, index) for i in node.inputs] if node.op.category in ELEMENTWISE else []


def walk_down(
    starts: Iterable[Place],
    step: Callable[[Node, Index], Sequence[Place]],
    forward: bool = False,
) -> Iterator[Place]:
    """Some places and all below them; see `walk`."""
    return walk(starts, lambda place: step(*place), forward)


def reads_below(
    starts: Iterable[Place], stored: Container[Node], guarded: bool = True, forward: bool = False
) -> list[Place]:
    """The reads of stored values below some places, where that is plain to see."""

    def step(node: Node, index: Index) -> Sequence[Place]:
        return () if node in stored else below(node, index, guarded)

    return [place for place in walk_down(starts, step, forward) if place[0] in stored]


def symbolic(node: Node, index: Index, stored: Any, loaded: Loaded | None = None) -> Size | None:
    """An integer value that is an affine function of the index, as an Expr; where it is said what
    scalars that are loaded are, one with those added too."""
    if loaded is None or node.size != 1:
        return _symbolic(node, index, stored, loaded)
    found = _symbolic(node, index, stored, None)
    return loaded(node) if found is None else found


def _symbolic(node: Node, index: Index, stored: Any, loaded: Loaded | None) -> Size | None:
    if node in stored:
        return None
    if node.op in MOVEMENT:
        inner, conditions = moved(node, index)
        return None if conditions else symbolic(node.inputs[0], inner, stored, loaded)
    if node.op is ops.in_range:
        place = symbolic(node.inputs[0], index, stored)
        proved = place is not None and Condition(place, node.attrs["size"]).holds()
        return place if proved else None
    if node.op is ops.iota and node.dtype.is_integer:
        return index[0]
    if node.op is ops.constant and node.dtype.is_integer:
        return int(node.attrs["value"])
    if node.op is ops.size:
        return node.attrs["value"]
    if node.op in (ops.add, ops.subtract, ops.multiply) and node.dtype.is_integer:
        added = None if node.op is ops.multiply else loaded
        a, b = (symbolic(i, index, stored, added) for i in node.inputs)
        if a is None or b is None:
            return None
        if node.op is ops.multiply:
            return a * b
        return combine(a, b, 1 if node.op is ops.add else -1)
    if node.op is ops.cast and node.dtype.is_integer and node.inputs[0].dtype.is_integer:
        return symbolic(node.inputs[0], index, stored, loaded)
    return None
