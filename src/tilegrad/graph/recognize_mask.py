"""What a mask says: comparisons of positions, read from the many ways people write them.

A mask is taken apart into conditions that must all hold (`conditions`). One that compares
positions says that numbers in terms of the Atoms' indices are <= 0, from which a band is read;
others stay values. Values that only choose between two constants by one condition, such as
(1 - tril(ones)) * -1e9, are read as that choice (`choice`).
Invariant: all conditions together hold exactly where the mask does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

from ..core.dtype import bool_
from ..ir.node import Node
from ..ir.symbol import Size, coefficient, floor_divide, high, low, maximum, minimum, substitute
from . import build, ops
from .attention_types import Band
from .axes import ELEMENTWISE, Axes, Place, index_of, loops, size_of
from .notation import fold

COMPARES = (ops.less, ops.less_equal, ops.equal, ops.not_equal)


class Condition(NamedTuple):
    """A bool value that must be `truth`."""

    place: Place
    truth: bool = True


# ---- constants, and choices between two -----------------------------------------------------


class Choice(NamedTuple):
    """`then` where the condition holds, else `otherwise`."""

    condition: Condition
    then: Any
    otherwise: Any


def known(place: Place, given: Condition | None = None) -> Any:
    """The one value that is everywhere, under the condition given; None where there are more."""
    found = _evaluated(place, given)
    return ops.constant_value(found) if isinstance(found, Node) else None


def choice(place: Place) -> Choice | None:
    """A value that is one of two constants, by one condition."""
    found = _evaluated(place)
    if not isinstance(found, Condition):
        return None
    then, otherwise = (known(place, found._replace(truth=t)) for t in (True, False))
    return None if then is None or otherwise is None else Choice(found, then, otherwise)


def _evaluated(place: Place, given: Condition | None = None) -> Node | Condition | None:
    """The constant a value is, or the one condition beside constants that it is made of."""

    @cache
    def visit(place: Place) -> Node | Condition | None:
        node = place.node
        if given is not None and place == given.place:
            return build.constant(given.truth, bool_)
        if ops.is_constant(node):
            return node
        if node.op in COMPARES and _compares_positions(place):
            return Condition(place)
        below = place.down()
        if below is not None:
            return visit(below)
        if node.op.category not in ELEMENTWISE:
            return Condition(place) if node.dtype is bool_ else None
        values: list[Node | Condition] = []
        for i in place.inputs:
            value = visit(i)
            if value is None:
                return None
            if node.op is ops.where and not values and isinstance(value, Node):
                return visit(place.inputs[1 if ops.constant_value(value) else 2])
            values.append(value)
        chosen = {v for v in values if isinstance(v, Condition)}
        if chosen:
            return chosen.pop() if len(chosen) == 1 else None
        return fold(node.op, [v for v in values if isinstance(v, Node)], node.attrs)

    return visit(place)


# ---- positions ------------------------------------------------------------------------------


def whole(place: Place) -> Size | None:
    """A value of whole numbers in terms of the Atoms' indices."""
    node, op = place.node, place.op
    if ops.is_constant(node):
        value = ops.constant_value(node)
        fits = node.dtype.kind != "bool" and value == value and abs(value) < 2**62
        return int(value) if fits and int(value) == value else None
    if op is ops.size:
        return node.attrs["value"]
    if op is ops.iota:
        (along,) = place.indices
        return along.start + along.step * index_of(along.atoms)
    if op is ops.cast or op is ops.stop_gradient:
        kept = node.inputs[0].dtype.kind != "bool" and node.dtype.bits >= 32
        return whole(place.inputs[0]) if kept else None
    if op is ops.negative:
        found = whole(place.inputs[0])
        return None if found is None else -found
    if op in (ops.add, ops.subtract, ops.multiply) and node.dtype.kind not in ("bool", "uint"):
        a, b = (whole(i) for i in place.inputs)
        if a is None or b is None:
            return None
        if op is ops.multiply:
            return None if loops(a) and loops(b) else a * b
        return a + b if op is ops.add else a - b
    below = place.down()
    return None if below is None else whole(below)


def _compares_positions(place: Place) -> bool:
    sides = [position(i) for i in place.inputs]
    return all(sides) and any(loops(s[0]) for s in sides)


def position(place: Place) -> list[Size]:
    """Numbers of which a value is the largest: two for |x|, none where it is no such."""
    found = whole(place)
    if found is not None:
        return [found]
    place = place.strip()
    while place.op is ops.cast:
        place = place.inputs[0].strip()
    found = whole(place.inputs[0]) if place.op is ops.absolute else None
    return [] if found is None else [found, -found]


# ---- conditions -----------------------------------------------------------------------------


def conditions(condition: Condition) -> list[Condition]:
    """Conditions that hold together exactly where the one does."""
    place, truth = condition
    node, op = place.node, place.op
    if ops.is_constant(node) and bool(ops.constant_value(node)) == truth:
        return []
    if op is ops.bit_not or (op is ops.cast and node.inputs[0].dtype is bool_):
        return conditions(Condition(place.inputs[0], truth != (op is ops.bit_not)))
    conjunction = op in (ops.bit_and, ops.multiply, ops.minimum)
    disjunction = op in (ops.bit_or, ops.add, ops.maximum)
    if node.dtype is bool_ and ((conjunction and truth) or (disjunction and not truth)):
        return [c for i in place.inputs for c in conditions(Condition(i, truth))]
    below = place.down()
    if below is not None:
        return conditions(Condition(below, truth))
    found = choice(place)
    if found is None or found.condition.place.node is node:
        return [condition]
    if found.then == found.otherwise:
        return [] if found.then == truth else [condition]
    return conditions(found.condition._replace(truth=bool(found.then) == truth))


def comparisons(condition: Condition) -> list[Size] | None:
    """Numbers that must all be <= 0 for the condition to hold, or None."""
    (place, truth), op = condition, condition.place.op
    if op not in COMPARES:
        return None
    left, right = (position(i) for i in place.inputs)
    if op in (ops.equal, ops.not_equal):
        if truth != (op is ops.equal) or len(left) != 1 or len(right) != 1:
            return None
        return [left[0] - right[0], right[0] - left[0]]
    strict = op is ops.less
    if not truth:  # not a < b is b <= a
        left, right, strict = right, left, not strict
    if not left or len(right) != 1:
        return None  # c <= |x| is no conjunction
    return [x - right[0] + int(strict) for x in left]


def _always(number: Size, axes: Axes) -> bool:
    """Whether the bounds prove that it is <= 0 at every index."""
    inside = loops(number)
    for atom in [a for a in axes.scores if a.index in inside]:
        factor = coefficient(number, atom.index)
        if factor is None or low(factor) < 0 < high(factor):
            return False
        number = substitute(number, {atom.index: atom.size - 1 if low(factor) >= 0 else 0})
    return high(number) <= 0


# ---- bands ----------------------------------------------------------------------------------


def _bounds(number: Size, axes: Axes) -> Band | None:
    """The band of key - query in which the number is <= 0, if it is made of that."""
    if _always(number, axes):
        return None, None
    factor = coefficient(number, axes.keys[-1].index)
    if not isinstance(factor, int) or not factor:
        return None
    rest = number - factor * axes.difference
    if loops(rest):
        return None
    limit = floor_divide(-rest, abs(factor))
    return (None, limit) if factor > 0 else (-limit, None)


def bands_of(found: Sequence[Condition], axes: Axes) -> tuple[list[Band], list[Condition]]:
    """Bands of key - query in which conditions hold, and those conditions that are none."""
    bands: list[Band] = []
    general: list[Condition] = []
    for part in [part for condition in found for part in conditions(condition)]:
        numbers = comparisons(part)
        read = [_bounds(n, axes) for n in numbers or ()]
        if numbers is None or None in read:
            general.append(part)
        else:
            bands += [b for b in read if b is not None]
    return bands, general


def meet(bands: Sequence[Band]) -> Band:
    """The band in which all bands hold."""
    least = [a for a, _ in bands if a is not None]
    most = [b for _, b in bands if b is not None]
    return reduce(maximum, least) if least else None, reduce(minimum, most) if most else None


def shows_all(band: Band, axes: Axes) -> bool:
    """Whether the bounds prove that every query sees at least one key."""
    least, most = band
    queries, keys = size_of(axes.queries), size_of(axes.keys)
    first = -queries if least is None else least
    last = keys if most is None else most
    return all(low(x) >= 0 for x in (keys - 1, last, keys - queries - first, last - first))
