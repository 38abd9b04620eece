"""Is an index of a kernel inside of its array: proved, refused while it is traced, or guarded.

A part of an array that reaches beyond its ends has no elements there (see `value`); what is judged
here is an index along an axis that a part has not, and every offset of a tile of offsets. Bounds of
program numbers, loop indices and Symbols prove most of them. One that some program surely gets
wrong is an error at the kernel's line. What only the data decides is guarded where the Tracer has
`guards` (on a CPU, and on a GPU under `checked=True`): a `require` with the kernel's line, and the
access masked or its index clamped. Invariant: with guards no access leaves its array.

Offsets may be a box of their array, written out. `offset = row[:, None] * columns + column[None,
:]` with `row < rows` and `column < columns` in its mask touches what a box at (row, column) does.
Seen so, it is proved inside and apart from other programs' as boxes are. The offsets are those of
the box, element by element, and where the mask holds each is inside of the array along every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product as corners_of
from typing import Any, NamedTuple

import numpy as np

from ..core.dtype import int64
from ..core.errors import AxisError, user_location
from ..ir.node import Node, topological
from ..ir.symbol import Expr, Size, atoms, floor_divide, high, low, proves_less, substitute
from ..ir.types import Shape, product, row_major
from .bounds import WIDE, Range, is_integer, node_range
from .row import TileOp, compute
from .scalars import ARITHMETIC
from .trace import Tracer, tracer
from .value import MemoryValue, Window

CORNERS = 16  # programs at the ends of the grid that are tried


# ---- indices as Exprs --------------------------------------------------------------------------


def extremes(t: Tracer, value: Size) -> tuple[Size, Size, bool]:
    """The least and the most an index is, as Exprs of Symbols, and whether both are reached."""
    found, sure = [value, value], True
    for atom in sorted(atoms(value), key=lambda a: -a.serial):
        if atom.kind == "symbol":
            continue
        limit = t.limits.get(atom)
        for side, now in enumerate(found):
            way = direction(now, atom)
            if limit is None or way is None:
                sure = False
                continue
            sure &= limit.reached
            upper = (side == 1) == (way >= 0)
            found[side] = substitute(now, {atom: limit.upper if upper else limit.lower})
    return found[0], found[1], sure


def direction(value: Size, atom: Expr) -> int | None:
    """1 if a value never falls as an atom grows, -1 if it never rises, 0 for both, None if it is
    not known."""
    if isinstance(value, int) or atom not in atoms(value):
        return 0
    if value is atom:
        return 1
    if value.kind == "div":
        return direction(value.args[0], atom) if isinstance(value.args[1], int) else None
    if value.kind in ("min", "max"):
        ways = {direction(a, atom) for a in value.args}
    elif value.kind == "sum":
        ways = set()
        for product_, factor in value.terms:
            inner = [direction(a, atom) for a in product_]
            if len(product_) == 1 and inner[0] is not None:
                ways.add(inner[0] * (1 if factor > 0 else -1))
            elif any(way != 0 for way in inner):
                return None
    else:
        return None
    ways -= {0}
    return None if None in ways or len(ways) > 1 else ways.pop() if ways else 0


def _halves(t: Tracer, index: Size, size: Size) -> tuple[bool, bool, bool]:
    """Whether 0 <= index is proved, whether index < size is, and whether one is surely wrong."""
    least, most, sure = extremes(t, index)
    below = (low(least) >= 0 or low(index) >= 0) and high(index) <= WIDE[1]  # else it may wrap
    above = proves_less(most, size) or proves_less(index, size)
    wrong = high(index) < 0 or low(index - size) >= 0
    wrong |= sure and (high(least) < 0 or low(most - size) >= 0)
    return below, above, wrong


HINT = "a mask, or a branch, keeps a program from what is not there"


def outside(name: str, size: Size, axis: int | None = None) -> tuple[str, str]:
    """What is wrong with an index along an axis (or with an offset), and what was expected."""
    what = f"an offset into {name}" if axis is None else f"an index of {name}"
    along = "offset" if axis is None else "index"
    where = "" if axis is None else f" along axis {axis}"
    return f"{what} is out of bounds", f"0 <= {along} < {size}{where}"


def _error(name: str, size: Size, axis: int | None, got: object) -> AxisError:
    what, expected = outside(name, size, axis)
    return AxisError(what, expected=expected, got=got, hint=HINT)


def within(op: str, box: Window, mask: Node | None, masked: bool) -> tuple[tuple[Size, ...], Any]:
    """The index of a box and its mask, so that it stays inside along axes that the box has not;
    `masked` says that the kernel gave a mask of its own."""
    t = tracer()
    if t.trusts:
        return box.index, mask
    index, b, name = list(box.index), t.builder, box.memory.name
    certain = not (masked or t.maybe)
    sizes = box.memory.type.shape
    for axis, (at, size) in enumerate(zip(box.index, sizes)):
        if axis in box.axes:
            length = box.shape[box.axes.index(axis)]
            beyond = high(at) + length <= 0 or low(at - size) >= 0
            if certain and beyond and low(size) > 0:
                raise _error(name, size, axis, f"{at} .. {at + length}")
            continue
        below, above, wrong = _halves(t, at, size)
        if below and above:
            continue
        if wrong and certain:
            least, most, _ = extremes(t, at)
            raise _error(name, size, axis, at if least == most else f"{least} .. {most}")
        if not t.guards:
            continue
        node = b.index(at)
        inside = _guard(t, op, outside(name, size, axis), node, size, (below, above), mask)
        if op == "load" and low(size) > 0:
            index[axis] = b.atom("at", b.where(inside, node, 0), 0, high(size) - 1)
        else:
            mask = b.logical_and(mask, inside)
    return tuple(index), mask


def _guard(
    t: Tracer,
    op: str,
    said: tuple[str, str],
    at: Node,
    size: Size,
    known: tuple[bool, bool],
    mask: Node | None,
) -> Node:
    """Whether 0 <= at < size, of which some halves are known: what a run requires."""
    b, (below, above) = t.builder, known
    inside = None if below else b.apply("less_equal", 0, at)
    if not above:
        inside = b.logical_and(inside, b.apply("less", at, size))
    assert inside is not None
    what, expected = said
    b.require(inside, f"tile.{op}: {what}\n  expected: {expected}", user_location(), mask)
    return inside


# ---- offsets as tiles --------------------------------------------------------------------------


def _follow(t: Tracer, node: Node, known: dict[Node, Any], of: Callable[..., Any]) -> Any:
    """What is known of a Node, once of(one, its Expr if it has one) was found for all that it
    follows from."""
    for one in topological([node], stop=known.__contains__):
        if one not in known:
            known[one] = of(one, t.builder.exprs.get(one))
    return known[node]


def range_at(t: Tracer, node: Node) -> Range:
    """The least and the most that elements of an integer tile can be."""

    def of(one: Node, expr: Expr | None) -> Range | None:
        if expr is not None:
            return expr.low, expr.high
        return node_range(one, t.ranges, t.grid or (1,)) if is_integer(one) else None

    return _follow(t, node, t.ranges, of)


def _plain(node: Node) -> Node:
    """A tile without what only repeats, reshapes or widens it."""
    while node.op.name == "broadcast" or (
        node.op.name == "cast"
        and node.inputs[0].dtype.is_integer
        and node.inputs[0].dtype.bits <= node.dtype.bits
    ):
        node = node.inputs[0]
    return node


def _conditions(mask: Node | None) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """The comparisons that all hold where a mask does, and what moves each to where it is one."""
    stack: list[tuple[Node, tuple[Node, ...]]] = [] if mask is None else [(mask, ())]
    while stack:
        one, around = stack.pop()
        if one.op.name == "bit_and":
            stack += [(i, around) for i in one.inputs]
        elif one.op.name in ("broadcast", "reshape"):
            stack.append((one.inputs[0], (*around, one)))
        else:
            yield one, around


def _bound(t: Tracer, node: Node, least: bool) -> Size:
    plain = _plain(node)
    if plain.op.name == "symbol":
        return plain.attrs["value"]
    return range_at(t, plain)[0 if least else 1]


def proved(t: Tracer, offset: Node, count: Size, mask: Node | None) -> tuple[bool, bool]:
    """Whether offsets are at least 0, and whether they are below the count, where a mask holds."""
    least, most = range_at(t, offset)
    below, above = least >= 0, low(count) > most
    own = _plain(offset)
    for test, around in _conditions(mask):
        turned = any(n.op.name == "reshape" for n in around)
        if turned or test.op.name not in ("less", "less_equal"):
            continue
        strict, (a, b) = test.op.name == "less", test.inputs
        if _plain(a) is own:
            above |= low(count - _bound(t, b, False)) >= (0 if strict else 1)
        if _plain(b) is own:
            below |= low(_bound(t, a, True)) >= (-1 if strict else 0)
    return below, above


def offsets_within(
    op: str, memory: MemoryValue, offset: Node, mask: Node | None
) -> tuple[Node, Node | None, dict[str, Any]]:
    """Offsets and mask of an access, so that it stays inside, and what is noted of it."""
    t = tracer()
    offset = t.builder.cast(offset, int64)
    at, cut = box_of(t, memory, offset, mask)
    if at is None:
        offset, mask = _guarded(t, op, memory, offset, mask)
        at = offset
    return offset, mask, {"at": at, "mask": mask, "cut": cut}


def _guarded(
    t: Tracer, op: str, memory: MemoryValue, offset: Node, mask: Node | None
) -> tuple[Node, Node | None]:
    """Offsets that are no box, and their mask."""
    count = product(memory.type.shape)
    known = proved(t, offset, count, mask)
    if all(known):
        return offset, mask
    bad = None if t.maybe or not isinstance(count, int) else _wrong(t, offset, count, mask)
    if bad is not None:
        raise _error(memory.name, count, None, bad)
    if not t.guards:
        return offset, mask
    inside = _guard(t, op, outside(memory.name, count), offset, count, known, mask)
    if op == "load" and mask is None and low(count) > 0:  # quicker than a mask
        return t.builder.where(inside, offset, 0), None
    return offset, t.builder.logical_and(mask, inside)


def _wrong(t: Tracer, offset: Node, count: int, mask: Node | None) -> int | None:
    """An offset that a program at a corner of the grid surely gets wrong."""
    grid = t.grid or (1,)
    if not all(isinstance(s, int) and s > 0 for s in grid) or 2 ** len(grid) > CORNERS:
        return None
    for program in corners_of(*[sorted({0, s - 1}) for s in grid]):
        found = value_of(offset, program)
        live = np.True_ if mask is None else value_of(mask, program)
        if found is None or live is None:
            return None
        bad = found[np.broadcast_to(live, found.shape) & ((found < 0) | (found >= count))]
        if bad.size:
            return int(bad.reshape(-1)[0])
    return None


def value_of(node: Node, program: Shape) -> np.ndarray[Any, Any] | None:
    """A tile as one program has it; None where it depends on data, Symbols or loops."""
    known: dict[Node, Any] = {}
    for one in topological([node]):
        if one.op.name == "program":
            known[one] = np.asarray(program[one.attrs["axis"]], np.int64)
        elif one.op.effect or not isinstance(one.op, TileOp) or one.op.numpy is None:
            return None
        else:
            known[one] = compute(one, [known[i] for i in one.inputs])
    return known[node]


# ---- bounds that a kernel states ---------------------------------------------------------------


def bounded(t: Tracer, node: Node, least: int, most: int) -> Node:
    """A number with the bounds that the kernel says it has: all proofs rely on them."""
    b, (own_least, own_most) = t.builder, range_at(t, node)
    if not t.guards or (least <= own_least and own_most <= most):
        return node
    wide = b.cast(node, int64)
    kept = b.apply("minimum", b.apply("maximum", wide, least), most)
    b.require(
        b.apply("equal", wide, kept),
        f"tile.index: a number is out of its bounds\n  expected: {least} <= number <= {most}",
        user_location(),
    )
    return kept


# ---- offsets that are a box ---------------------------------------------------------------------


class Lines(NamedTuple):
    """A tile whose elements are `base` plus each coordinate times its factor."""

    factors: tuple[Size, ...]
    base: Size


def lines_of(t: Tracer, node: Node) -> Lines | None:
    """A tile of integers as Lines, if it is one."""

    def of(one: Node, expr: Expr | None) -> Lines | None:
        return _lines(t, one) if expr is None else Lines((0,) * len(one.shape), expr)

    return _follow(t, node, t.lines, of)


def _lines(t: Tracer, node: Node) -> Lines | None:
    name, attrs = node.op.name, node.attrs
    if not is_integer(node):
        return None
    if name == "symbol":
        return Lines((), attrs["value"])
    if name == "constant":
        return Lines((0,) * len(node.shape), int(attrs["value"]))
    if name == "iota":
        return Lines((1,), 0)
    given = [lines for i in node.inputs if (lines := t.lines.get(i)) is not None]
    if not given or len(given) < len(node.inputs):
        return None
    if name == "cast" and range_at(t, node.inputs[0]) == range_at(t, node):
        return given[0]
    if name in ("broadcast", "reshape"):
        return _moved(given[0], node)
    return _combined(name, *given) if name in ("add", "subtract", "multiply") else None


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
        join = ARITHMETIC[name]
        return Lines(tuple(map(join, a.factors, b.factors)), join(a.base, b.base))
    if any(a.factors):
        a, b = b, a
    if any(a.factors):
        return None
    return Lines(tuple(f * a.base for f in b.factors), b.base * a.base)


def box_of(t: Tracer, memory: MemoryValue, offset: Node, mask: Node | None) -> tuple[Any, bool]:
    """The Window that offsets are, if bounds or the mask prove that it is inside; whether the mask
    leaves out more than what lies beyond the ends."""
    whole, shape = lines_of(t, offset), memory.type.shape
    if whole is None or not shape or any(f == 0 for f in whole.factors):
        return None, True
    found = [_test(t, *condition) for condition in _conditions(mask)]
    tests = [test for test in found if test is not None]
    index: list[Size] = []
    along: list[int | None] = []
    rest, used = whole.base, 0
    for size, stride in zip(shape, row_major(shape)):
        axis = next(
            (a for a, f in enumerate(whole.factors) if f == stride and a not in along), None
        )
        test = next((v for v, limit in tests if limit == size and _counts(v, axis)), None)
        start = test.base if test is not None else floor_divide(rest, stride)
        end = start + (0 if axis is None else offset.shape[axis] - 1)
        if not _halves(t, start, size)[0] or (test is None and not _halves(t, end, size)[1]):
            return None, True
        index.append(start)
        along.append(axis)
        used += test is not None
        rest = rest - start * stride
    if rest != 0 or any(a not in along for a in range(len(whole.factors))):
        return None, True
    axes = tuple(along.index(a) for a in range(len(whole.factors)))
    box = Window(memory, tuple(index), offset.shape, axes)
    return box, None in found or used < len(tests)


def _counts(v: Lines, axis: int | None) -> bool:
    """Whether a coordinate counts up along one axis of the tile, or along none."""
    return all(f == (1 if a == axis else 0) for a, f in enumerate(v.factors))


def _test(t: Tracer, test: Node, around: Sequence[Node]) -> tuple[Lines, Size] | None:
    """A comparison (coordinate, limit), as wide as the mask."""
    if test.op.name != "less":
        return None
    value, limit = (lines_of(t, i) for i in test.inputs)
    if limit is None or any(f != 0 for f in limit.factors):
        return None
    for node in reversed(around):
        if value is not None:
            value = _moved(value, node)
    return None if value is None else (value, limit.base)
