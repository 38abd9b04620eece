"""Is an index of a kernel inside of its array: proved, refused while it is traced, or guarded.

A part of an array that reaches beyond its ends has no elements there (see `value`); what is judged
here is an index along an axis that a part has not, and every offset of a tile of offsets. Bounds of
program numbers, loop indices and Symbols prove most of them. One that some program surely gets
wrong is an error at the kernel's line. What only the data decides is guarded where the Tracer has
`guards` (on a CPU, and on a GPU under `checked=True`): a `require` with the kernel's line, and the
access masked or its index clamped. Invariant: with guards no access leaves its array.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import product as corners_of
from typing import Any

import numpy as np

from ..core.dtype import int64
from ..core.errors import AxisError, user_location
from ..ir.node import Node, topological
from ..ir.symbol import Expr, Size, atoms, combine, high, low, substitute
from ..ir.types import product
from .bounds import WIDE, Range, node_range
from .linear import Box, box_of
from .row import TileOp, compute
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
    room = combine(combine(size, 1, -1), most, -1)
    below, above = (
        (low(least) >= 0 or low(index) >= 0) and high(index) <= WIDE[1],  # else it may wrap
        low(room) >= 0 or (low(combine(size, index, -1)) >= 1),
    )
    wrong = high(index) < 0 or high(combine(combine(size, 1, -1), index, -1)) < 0
    wrong |= sure and (high(least) < 0 or high(room) < 0)
    return below, above, wrong


def _error(op: str, name: str, size: Size, axis: int, got: object) -> AxisError:
    return AxisError(
        f"an index of {name} is out of bounds",
        op=f"tile.{op}",
        expected=f"0 <= index < {size} along axis {axis}",
        got=got,
        hint="a mask, or a branch, keeps a program from what is not there",
    )


def message(op: str, name: str, size: Size, axis: int | None = None) -> str:
    """What the error of a guard says."""
    if axis is None:
        return (
            f"tile.{op}: an offset into {name} is out of bounds\n  expected: 0 <= offset < {size}"
        )
    return (
        f"tile.{op}: an index of {name} is out of bounds\n"
        f"  expected: 0 <= index < {size} along axis {axis}"
    )


def within(op: str, box: Window, mask: Node | None, masked: bool) -> tuple[tuple[Size, ...], Any]:
    """The index of a box and its mask, so that it stays inside along axes that the box has not;
    `masked` says that the kernel gave a mask of its own."""
    t = tracer(op)
    if t.trusts:
        return box.index, mask
    index, b, name = list(box.index), t.builder, box.memory.name
    certain = not (masked or t.maybe)
    sizes = box.memory.type.shape
    for axis, (at, size) in enumerate(zip(box.index, sizes)):
        if axis in box.axes:
            length = box.shape[box.axes.index(axis)]
            outside = high(at) + length <= 0 or low(combine(at, size, -1)) >= 0
            if certain and outside and low(size) > 0:
                raise _error(op, name, size, axis, f"{at} .. {combine(at, length, 1)}")
            continue
        below, above, wrong = _halves(t, at, size)
        if below and above:
            continue
        if wrong and certain:
            raise _error(op, name, size, axis, _shown(t, at))
        if not t.guards:
            continue
        inside = _between(t, at, size, below, above)
        b.require(inside, message(op, name, size, axis), user_location(), mask)
        if op == "load" and low(size) > 0:
            safe = b.apply("where", inside, b.index(at), b.constant(0, int64))
            index[axis] = b.atom("at", safe, 0, high(size) - 1)
        else:
            mask = b.logical_and(mask, inside)
    return tuple(index), mask


def _shown(t: Tracer, at: Size) -> str:
    least, most, _ = extremes(t, at)
    return f"{at}" if least is most or least == most else f"{least} .. {most}"


def _between(t: Tracer, at: Size, size: Size, below: bool, above: bool) -> Node:
    """0 <= at < size, of which some halves are known."""
    b = t.builder
    parts = [] if below else [b.less_equal(0, at)]
    parts += [] if above else [b.less(at, size)]
    return reduce(lambda x, y: b.apply("bit_and", x, y), parts)


# ---- offsets as tiles --------------------------------------------------------------------------


def range_at(t: Tracer, node: Node) -> Range:
    """The least and the most that elements of an integer tile can be."""
    known, grid = t.ranges, t.grid or (1,)
    atoms_ = {n: e for e, n in t.builder.atoms.items() if isinstance(e, Expr)}
    for one in topological([node], stop=known.__contains__):
        if one in atoms_:
            known.setdefault(one, (atoms_[one].low, atoms_[one].high))
        elif one not in known and getattr(one.type, "dtype", None) and one.dtype.is_integer:
            known[one] = node_range(one, known, grid)
    return known[node]


def _plain(node: Node) -> Node:
    """A tile without what only repeats, reshapes or widens it."""
    while node.op.name == "broadcast" or (
        node.op.name == "cast"
        and node.inputs[0].dtype.is_integer
        and node.inputs[0].dtype.bits <= node.dtype.bits
    ):
        node = node.inputs[0]
    return node


def _conditions(mask: Node | None) -> Iterator[Node]:
    """The comparisons that all hold where a mask does."""
    stack = [] if mask is None else [mask]
    while stack:
        one = _plain(stack.pop())
        if one.op.name == "bit_and":
            stack += one.inputs
        else:
            yield one


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
    for test in _conditions(mask):
        if test.op.name not in ("less", "less_equal"):
            continue
        strict, (a, b) = test.op.name == "less", test.inputs
        if _plain(a) is own:
            limit = combine(_bound(t, b, False), int(not strict), 1)
            above |= low(combine(count, limit, -1)) >= 0
        if _plain(b) is own:
            below |= low(_bound(t, a, True)) >= (-1 if strict else 0)
    return below, above


def offsets_within(
    op: str, memory: MemoryValue, offset: Node, mask: Node | None
) -> tuple[Node, Node | None, Box | None]:
    """Offsets and mask of an access, so that it stays inside, and the Box that they are."""
    t, shape = tracer(op), memory.type.shape
    box = box_of(t, shape, offset, mask, lambda at, size: _halves(t, at, size)[:2])
    if box is not None:
        return offset, mask, box
    return *_guarded(t, op, memory, offset, mask), None


def _guarded(
    t: Tracer, op: str, memory: MemoryValue, offset: Node, mask: Node | None
) -> tuple[Node, Node | None]:
    """Offsets that are no Box, and their mask."""
    count = product(memory.type.shape)
    below, above = proved(t, offset, count, mask)
    if below and above:
        return offset, mask
    bad = None if t.maybe or not isinstance(count, int) else _wrong(t, offset, count, mask)
    if bad is not None:
        raise AxisError(
            f"an offset into {memory.name} is out of bounds",
            op=f"tile.{op}",
            expected=f"0 <= offset < {count}",
            got=bad,
            hint="a mask keeps elements that are not there out",
        )
    if not t.guards:
        return offset, mask
    b = t.builder
    inside = None if below else b.apply("less_equal", b.constant(0, int64), offset)
    if not above:
        inside = b.logical_and(inside, b.apply("less", offset, b.index(count)))
    assert inside is not None
    b.require(inside, message(op, memory.name, count), user_location(), mask)
    if op == "load" and mask is None and low(count) > 0:  # quicker than a mask
        return b.apply("where", inside, offset, b.constant(0, int64)), None
    return offset, b.logical_and(mask, inside)


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


def value_of(node: Node, program: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
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
    kept = b.apply("maximum", wide, b.constant(least, int64))
    kept = b.apply("minimum", kept, b.constant(most, int64))
    b.require(
        b.apply("equal", wide, kept),
        f"tile.index: a number is out of its bounds\n  expected: {least} <= number <= {most}",
        user_location(),
    )
    return kept
