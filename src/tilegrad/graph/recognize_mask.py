"""What a mask says: comparisons of positions, read from the many ways people write them.

A mask is taken apart into conditions that must all hold (`conditions`). One that compares
positions is a Comparison, sum(coefficient * index) + constant <= 0, from which a band is read;
others stay values. Values that only choose between two constants by one condition, such as
(1 - tril(ones)) * -1e9, are read as that choice (`choice`).
Invariant: all conditions together hold exactly where the mask does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

from ..core.dtype import bool_
from ..ir.node import Node
from ..ir.symbol import Size, combine, floor_divide, high, low, maximum, minimum
from . import build, ops
from .attention_types import Band
from .axes import ELEMENTWISE, Atom, Atoms, Indices, down, flat, strip
from .notation import fold

COMPARES = (ops.less, ops.less_equal, ops.equal, ops.not_equal)


class Condition(NamedTuple):
    """A bool value that must be `truth`."""

    node: Node
    indices: Indices
    truth: bool = True


# ---- constants, and choices between two -----------------------------------------------------


class Choice(NamedTuple):
    """`then` where the condition holds, else `otherwise`."""

    condition: Condition
    then: Any
    otherwise: Any


def known(node: Node, indices: Indices, given: Condition | None = None) -> Any:
    """The one value a Node has everywhere, under the condition given; None where it has more."""
    found = _evaluated(node, indices, given)
    return ops.constant_value(found) if isinstance(found, Node) else None


def choice(node: Node, indices: Indices) -> Choice | None:
    """A value that is one of two constants, by one condition."""
    found = _evaluated(node, indices)
    if not isinstance(found, Condition):
        return None
    then, otherwise = (known(node, indices, found._replace(truth=t)) for t in (True, False))
    return None if then is None or otherwise is None else Choice(found, then, otherwise)


def _evaluated(
    node: Node, indices: Indices, given: Condition | None = None
) -> Node | Condition | None:
    """The constant a value is, or the one condition beside constants that it is made of."""

    @cache
    def visit(node: Node, indices: Indices) -> Node | Condition | None:
        if given is not None and (node, indices) == given[:2]:
            return build.constant(given.truth, bool_)
        if ops.is_constant(node):
            return node
        if node.op in COMPARES and _compares_positions(node, indices):
            return Condition(node, indices)
        below = down(node, indices)
        if below is not None:
            return visit(*below)
        if node.op.category not in ELEMENTWISE:
            return Condition(node, indices) if node.dtype is bool_ else None
        values: list[Node | Condition] = []
        for i in node.inputs:
            value = visit(i, indices)
            if value is None:
                return None
            if node.op is ops.where and not values and isinstance(value, Node):
                return visit(node.inputs[1 if ops.constant_value(value) else 2], indices)
            values.append(value)
        chosen = {v for v in values if isinstance(v, Condition)}
        if chosen:
            return chosen.pop() if len(chosen) == 1 else None
        return fold(node.op, [v for v in values if isinstance(v, Node)], node.attrs)

    return visit(node, indices)


# ---- affine functions of positions ----------------------------------------------------------


@dataclass(frozen=True)
class Affine:
    """sum(coefficient * index) + constant."""

    terms: dict[Atom, Size]
    constant: Size = 0

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """The sum, or the difference."""
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            terms[atom] = combine(terms.get(atom, 0), c, sign)
        terms = {a: c for a, c in terms.items() if c != 0}
        return Affine(terms, combine(self.constant, other.constant, sign))

    def times(self, factor: Size) -> Affine:
        """The product with a number."""
        terms = {a: c * factor for a, c in self.terms.items()}
        return Affine({a: c for a, c in terms.items() if c != 0}, self.constant * factor)


def affine(node: Node, indices: Indices) -> Affine | None:
    """A value of whole numbers as an affine function of indices."""
    op = node.op
    if op is ops.constant or ops.is_constant(node):
        value = ops.constant_value(node)
        whole = node.dtype.kind != "bool" and value == value and abs(value) < 2**62
        return Affine({}, int(value)) if whole and int(value) == value else None
    if op is ops.size:
        return Affine({}, node.attrs["value"])
    if op is ops.iota:
        line = index_of(flat(indices[0].atoms))
        return line.times(indices[0].step).plus(Affine({}, indices[0].start))
    if op is ops.cast or op is ops.stop_gradient:
        inner = node.inputs[0]
        return (
            None if inner.dtype.kind == "bool" or node.dtype.bits < 32 else affine(inner, indices)
        )
    if op is ops.negative:
        found = affine(node.inputs[0], indices)
        return None if found is None else found.times(-1)
    if op in (ops.add, ops.subtract, ops.multiply) and node.dtype.kind not in ("bool", "uint"):
        a, b = (affine(i, indices) for i in node.inputs)
        if a is None or b is None:
            return None
        if op is not ops.multiply:
            return a.plus(b, 1 if op is ops.add else -1)
        if b.terms:
            a, b = b, a
        return None if b.terms else a.times(b.constant)
    below = down(node, indices)
    return None if below is None else affine(*below)


def _compares_positions(node: Node, indices: Indices) -> bool:
    sides = [position(i, indices) for i in node.inputs]
    return all(sides) and any(s[0].terms for s in sides)


def position(node: Node, indices: Indices) -> list[Affine]:
    """Affine values of which a value is the largest: two for |x|, none where it is no such."""
    found = affine(node, indices)
    if found is not None:
        return [found]
    node, indices = strip(node, indices)
    while node.op is ops.cast:
        node, indices = strip(node.inputs[0], indices)
    found = affine(node.inputs[0], indices) if node.op is ops.absolute else None
    return [] if found is None else [found, found.times(-1)]


# ---- conditions -----------------------------------------------------------------------------


def conditions(condition: Condition) -> list[Condition]:
    """Conditions that hold together exactly where the one does."""
    node, indices, truth = condition
    op = node.op
    if ops.is_constant(node) and bool(ops.constant_value(node)) == truth:
        return []
    if op is ops.bit_not or (op is ops.cast and node.inputs[0].dtype is bool_):
        return conditions(Condition(node.inputs[0], indices, truth != (op is ops.bit_not)))
    conjunction = op in (ops.bit_and, ops.multiply, ops.minimum)
    disjunction = op in (ops.bit_or, ops.add, ops.maximum)
    if node.dtype is bool_ and ((conjunction and truth) or (disjunction and not truth)):
        return [c for i in node.inputs for c in conditions(Condition(i, indices, truth))]
    below = down(node, indices)
    if below is not None:
        return conditions(Condition(*below, truth))
    found = choice(node, indices)
    if found is None or found.condition.node is node:
        return [condition]
    if found.then == found.otherwise:
        return [] if found.then == truth else [condition]
    return conditions(found.condition._replace(truth=bool(found.then) == truth))


def comparisons(condition: Condition) -> list[Affine] | None:
    """Affine functions that must all be <= 0 for the condition to hold, or None."""
    node, indices, truth = condition
    if node.op not in COMPARES:
        return None
    left, right = (position(i, indices) for i in node.inputs)
    if node.op in (ops.equal, ops.not_equal):
        if truth != (node.op is ops.equal) or len(left) != 1 or len(right) != 1:
            return None
        return [left[0].plus(right[0], -1), right[0].plus(left[0], -1)]
    strict = node.op is ops.less
    if not truth:  # not a < b is b <= a
        left, right, strict = right, left, not strict
    if not left or len(right) != 1:
        return None  # c <= |x| is no conjunction
    margin = Affine({}, 1 if strict else 0)
    return [x.plus(right[0], -1).plus(margin) for x in left]


def _always(function: Affine) -> bool:
    """Whether the bounds prove that it is <= 0 at every index."""
    most = function.constant
    for atom, c in function.terms.items():
        if low(c) >= 0:
            most = most + c * (atom.size - 1)
        elif high(c) > 0:
            return False
    return high(most) <= 0


# ---- bands ----------------------------------------------------------------------------------


def index_of(atoms: Atoms) -> Affine:
    """The row-major index of some Atoms."""
    terms: dict[Atom, Size] = {}
    stride: Size = 1
    for atom in reversed(atoms):
        terms[atom] = stride
        stride = stride * atom.size
    return Affine(terms)


def _bounds(function: Affine, difference: Affine, last: Atom) -> Band | None:
    """The band of key - query (a `difference`, 1 for the last key's Atom) in which the function is
    <= 0, if it is a function of that."""
    factor = function.terms.get(last)
    if not isinstance(factor, int) or function.terms != difference.times(factor).terms:
        return None
    limit = floor_divide(function.constant * -1, abs(factor))
    return (None, limit) if factor > 0 else (limit * -1, None)


def bands_of(
    found: Sequence[Condition], difference: Affine, last: Atom
) -> tuple[list[Band], list[Condition]]:
    """Bands of key - query in which conditions hold, and those conditions that are none."""
    bands: list[Band] = []
    general: list[Condition] = []
    for part in [part for condition in found for part in conditions(condition)]:
        functions = comparisons(part)
        read = [_bounds(f, difference, last) for f in functions or () if not _always(f)]
        if functions is None or None in read:
            general.append(part)
        else:
            bands += [b for b in read if b is not None]
    return bands, general


def meet(bands: Sequence[Band]) -> Band:
    """The band in which all bands hold."""
    least = [a for a, _ in bands if a is not None]
    most = [b for _, b in bands if b is not None]
    return reduce(maximum, least) if least else None, reduce(minimum, most) if most else None


def shows_all(band: Band, queries: Size, keys: Size) -> bool:
    """Whether the bounds prove that every query sees at least one key."""
    least, most = band
    if low(keys) < 1:
        return False
    if most is not None and low(most) < 0:
        return False
    if least is not None and low(keys - queries - least) < 0:
        return False
    return least is None or most is None or low(most - least) >= 0
