"""Offsets that are a box of their array, written out: rows times columns plus columns, and a mask.

`offset = row[:, None] * columns + column[None, :]` with `row < rows` and `column < columns` in its
mask touches what a box at (row, column) does. Seen so, it is proved inside and apart from other
programs' as boxes are. Invariant: the offsets are those of the box, element by element, and where
the mask holds each is inside of the array along every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..ir.node import Node, topological
from ..ir.symbol import Expr, Size, combine, floor_divide, multiply
from .trace import Tracer


class Lines(NamedTuple):
    """A tile whose elements are `base` plus each coordinate times its factor."""

    factors: tuple[Size, ...]
    base: Size


class Box(NamedTuple):
    """Where offsets begin along each axis of the array, and which tile axis lies along which."""

    start: tuple[Size, ...]
    axes: tuple[int, ...]
    cut: bool  # the mask leaves out more than what lies beyond the ends


def lines_of(t: Tracer, node: Node) -> Lines | None:
    """A tile of integers as Lines, if it is one."""
    known = t.lines
    atoms_ = {n: e for e, n in t.builder.atoms.items()}
    for one in topological([node], stop=known.__contains__):
        if one not in known:
            known[one] = _lines(t, one, atoms_)
    return known[node]


def _lines(t: Tracer, node: Node, atoms_: dict[Node, Expr]) -> Lines | None:
    name, attrs = node.op.name, node.attrs
    if node in atoms_:
        return Lines((0,) * len(node.shape), atoms_[node])
    if getattr(node.type, "dtype", None) is None or not node.dtype.is_integer:
        return None
    if name == "program":
        return Lines((), t.programs[attrs["axis"]])
    if name == "symbol":
        return Lines((), attrs["value"])
    if name == "constant":
        return Lines((0,) * len(node.shape), int(attrs["value"]))
    if name == "iota":
        return Lines((1,), 0)
    given = [t.lines.get(i) for i in node.inputs]
    if not given or any(g is None for g in given):
        return None
    first = given[0]
    assert first is not None
    if name == "cast" and node.inputs[0].dtype.bits <= node.dtype.bits:
        return first
    if name in ("broadcast", "reshape"):
        return _moved(first, node)
    if name in ("add", "subtract", "multiply"):
        second = given[1]
        assert second is not None
        return _combined(name, first, second)
    return None


def _moved(given: Lines, node: Node) -> Lines | None:
    """A tile after a broadcast, or after a reshape that adds or drops axes of size 1."""
    own, to = node.inputs[0].shape, node.shape
    if node.op.name == "broadcast":
        held = [
            0 if s == 1 < n else f for s, n, f in zip(own, to[len(to) - len(own) :], given.factors)
        ]
        return Lines((*[0] * (len(to) - len(own)), *held), given.base)
    if [s for s in own if s != 1] != [s for s in to if s != 1]:
        return None
    live = iter([f for f, s in zip(given.factors, own) if s != 1])
    return Lines(tuple(0 if s == 1 else next(live) for s in to), given.base)


def _combined(name: str, a: Lines, b: Lines) -> Lines | None:
    if name != "multiply":
        sign = 1 if name == "add" else -1
        pairs = zip(a.factors, b.factors)
        return Lines(tuple(combine(x, y, sign) for x, y in pairs), combine(a.base, b.base, sign))
    if any(a.factors):
        a, b = b, a
    if any(a.factors):
        return None
    return Lines(tuple(multiply(f, a.base) for f in b.factors), multiply(b.base, a.base))


Inside = Callable[[Size, Size], tuple[bool, bool]]


def box_of(
    t: Tracer, shape: Sequence[Size], offset: Node, mask: Node | None, inside: Inside
) -> Box | None:
    """The Box that offsets are; `inside(index, size)` says what bounds prove of an index: whether
    it is at least 0, and whether it is below the size."""
    whole = lines_of(t, offset)
    if whole is None or not shape or any(f == 0 for f in whole.factors):
        return None
    tests, others = _tests(t, mask)
    index: list[Size] = []
    along: list[int | None] = []
    rest, used = whole.base, 0
    for size, stride in zip(shape, _strides(shape)):
        axis = next(
            (a for a, f in enumerate(whole.factors) if f == stride and a not in along), None
        )
        test = next((v for v, limit in tests if limit == size and _counts(v, axis)), None)
        start = test.base if test is not None else floor_divide(rest, stride)
        end = combine(start, 0 if axis is None else offset.shape[axis] - 1, 1)
        if not inside(start, size)[0] or (test is None and not inside(end, size)[1]):
            return None
        index.append(start)
        along.append(axis)
        used += test is not None
        rest = combine(rest, multiply(start, stride), -1)
    if rest != 0 or any(a not in along for a in range(len(whole.factors))):
        return None
    axes = tuple(along.index(a) for a in range(len(whole.factors)))
    return Box(tuple(index), axes, others > 0 or used < len(tests))


def _strides(shape: Sequence[Size]) -> list[Size]:
    found: list[Size] = [1]
    for size in reversed(shape[1:]):
        found.insert(0, multiply(found[0], size))
    return found


def _counts(v: Lines, axis: int | None) -> bool:
    """Whether a coordinate counts up along one axis of the tile, or along none."""
    return all(f == (1 if a == axis else 0) for a, f in enumerate(v.factors))


def _tests(t: Tracer, mask: Node | None) -> tuple[list[tuple[Lines, Size]], int]:
    """The comparisons (coordinate, limit) that a mask is made of, as wide as it is; and how many
    other conditions it has."""
    found: list[tuple[Lines, Size]] = []
    others = 0
    stack: list[tuple[Node, tuple[Node, ...]]] = [] if mask is None else [(mask, ())]
    while stack:
        one, around = stack.pop()
        if one.op.name == "bit_and":
            stack += [(i, around) for i in one.inputs]
        elif one.op.name in ("broadcast", "reshape"):
            stack.append((one.inputs[0], (*around, one)))
        else:
            test = _test(t, one, around)
            others += test is None
            found += [] if test is None else [test]
    return found, others


def _test(t: Tracer, test: Node, around: Sequence[Node]) -> tuple[Lines, Size] | None:
    if test.op.name != "less":
        return None
    value, limit = (lines_of(t, i) for i in test.inputs)
    if limit is None or any(f != 0 for f in limit.factors):
        return None
    for node in reversed(around):
        if value is not None:
            value = _moved(value, node)
    return None if value is None else (value, limit.base)
