"""Scores as people write them: sums of terms, read down to the dot of queries and keys.

Movement, casts between floats and constant factors are read through. Scales, a softcap, what is
added, masks by `where`, by adding and by multiplying.
Invariant: what is read gives the values of what was written, up to rounding; else NoMatch says
why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

from ..ir.node import Node
from . import build, ops
from .attention_types import LEAST_SCORE
from .axes import Atoms, Place, below
from .recognize_mask import Condition, choice, known

LOWEST = -3e4  # a number this low in place of a score means: not seen


class NoMatch(Exception):
    """Why something that looks like attention is not; `quiet` where it hardly looks so."""

    def __init__(self, reason: str, quiet: bool = False) -> None:
        super().__init__(reason)
        self.quiet = quiet


# ---- sums of terms --------------------------------------------------------------------------


class Term(NamedTuple):
    """factor * value."""

    factor: float
    place: Place


def terms(place: Place, factor: float = 1.0) -> list[Term]:
    """A value as a sum of terms, through movement, casts and constant factors."""
    place = place.strip()
    op = place.op
    if abs(factor) != 1.0 and not holds_dot(place):
        return [Term(factor, place)]  # c * (1 - mask) is not c - c * mask for a large c
    if op is ops.add or op is ops.subtract:
        a, b = place.inputs
        return [*terms(a, factor), *terms(b, factor if op is ops.add else -factor)]
    scaled = constant_factor(place)
    if scaled is not None and (op is ops.negative or holds_dot(scaled.place)):
        return terms(scaled.place, factor * scaled.factor)
    return [Term(factor, place)]


def pairs(place: Place) -> list[tuple[Place, Place]]:
    """(x, y) of x / y, and of x * y both ways."""
    if place.op not in (ops.multiply, ops.divide):
        return []
    x, y = place.inputs
    return [(x, y)] if place.op is ops.divide else [(x, y), (y, x)]


def constant_factor(place: Place) -> Term | None:
    """-x, x * c or x / c as a term of x, for a c that is neither 0 nor infinite."""
    if place.op is ops.negative:
        return Term(-1.0, place.inputs[0])
    for x, c in pairs(place):
        value = known(c)
        if value is not None and value != 0 and math.isfinite(value):
            return Term(float(value) if place.op is ops.multiply else 1.0 / float(value), x)
    return None


def unscaled(place: Place, exact: bool = False) -> Term:
    """A value through movement, casts (see `Place.strip`) and constant factors."""
    place = place.strip(exact)
    found = constant_factor(place)
    if found is None:
        return Term(1.0, place)
    inner = unscaled(found.place, exact)
    return inner._replace(factor=found.factor * inner.factor)


def summed(found: Sequence[Term], axes: Atoms) -> Node:
    """The sum of terms with one axis for each Atom (see `on_atoms`)."""
    values = [(t.place.on_atoms(axes), t.factor) for t in found]
    return reduce(build.add, [x if c == 1.0 else build.multiply(x, c) for x, c in values])


def holds_dot(place: Place) -> bool:
    """Whether elementwise ops and movement lead down to a dot."""
    return ops.dot in [n.op for n in below(place.node)]


# ---- scores ---------------------------------------------------------------------------------


class Hidden(NamedTuple):
    """Where a condition does not hold, a number stands in place of the score, or is `added`."""

    condition: Condition
    number: float
    added: Term | None = None


@dataclass(frozen=True)
class Scores:
    """softcap(dot * rows) + added, and what hides keys.

    A row is a value that each query has one of, and whether it divides; a softcap of 0 is none.
    """

    dot: Term
    rows: tuple[tuple[Place, bool], ...] = ()
    softcap: float = 0.0
    added: tuple[Term, ...] = ()
    hidden: tuple[Hidden, ...] = ()

    @property
    def values(self) -> list[Place]:
        """All values beside the dot."""
        added = [*self.added, *[h.added for h in self.hidden if h.added is not None]]
        conditions = [h.condition.place for h in self.hidden]
        return [t.place for t in added] + conditions + [row for row, _ in self.rows]

    def hiding(self, condition: Condition, number: float, added: Term | None = None) -> Scores:
        """The scores, hidden where a condition does not hold too."""
        return replace(self, hidden=(*self.hidden, Hidden(condition, number, added)))


def find_scores(found: Sequence[Term], keys: Atoms) -> Scores:
    """The sum of terms as scores: one of them holds the dot."""
    reason = NoMatch("no dot of queries and keys below softmax")
    for term in found:
        if not holds_dot(term.place):
            continue
        try:
            scores = _scores(term, keys)
            for other in found:
                scores = scores if other is term else with_added(scores, other)
            return _joined(scores)
        except NoMatch as why:
            reason = why
    raise reason


def _joined(scores: Scores) -> Scores:
    """where(mask, scores, 0) + where(mask, 0, low) is where(mask, scores, low)."""
    for high in scores.hidden:
        if high.number <= LOWEST:
            continue
        for low in scores.hidden:
            if low.added is not None and low.condition == high.condition and high.number == 0.0:
                rest = [h for h in scores.hidden if h is not high and h is not low]
                return _joined(replace(scores, hidden=(*rest, low._replace(added=None))))
        raise NoMatch(f"the score becomes {high.number:g} by a mask that depends on the key")
    return scores


def with_added(scores: Scores, term: Term) -> Scores:
    """A bias, or a mask that is written as one."""
    place = term.place.strip()
    found = choice(place)
    if found is not None:
        numbers = [float(v) * term.factor for v in (found.then, found.otherwise)]
        low = min(numbers)
        if max(numbers) == 0.0 and low <= LOWEST:
            condition = found.condition._replace(truth=numbers[0] == 0.0)
            if -math.inf < low < LEAST_SCORE:
                kept = build.maximum(build.multiply(place.node, term.factor), LEAST_SCORE)
                term = Term(1.0, Place(kept, place.indices))
            return scores.hiding(condition, low, term)
    if term.factor > 0:
        for condition, value, number in _sides(place):
            if number == -math.inf:
                scores = scores.hiding(condition, number, term)
                return with_added(scores, Term(term.factor, value))
    if known(place) == 0:
        return scores
    return replace(scores, added=(*scores.added, Term(term.factor, place)))


def _sides(place: Place) -> Iterator[tuple[Condition, Place, float]]:
    """where(condition, value, number), and the other way round."""
    if place.op is ops.where:
        test, then, otherwise = place.inputs
        for value, other, truth in ((then, otherwise, True), (otherwise, then, False)):
            number = known(other)
            if number is not None:
                yield Condition(test, truth), value, float(number)


def _scores(term: Term, keys: Atoms) -> Scores:
    factor, place = term.factor, term.place.strip()
    op = place.op
    if op is ops.dot:
        return Scores(Term(factor, place))
    for condition, value, number in _sides(place):
        return find_scores(terms(value, factor), keys).hiding(condition, number * factor)
    if op is ops.tanh:
        inner = find_scores(terms(place.inputs[0]), keys)
        if inner.softcap or inner.added or inner.hidden:
            raise NoMatch("something is added or masked before the softcap")
        dot = inner.dot._replace(factor=inner.dot.factor * factor)
        return replace(inner, dot=dot, softcap=abs(factor))
    return _multiplied(place, factor, keys)


def _multiplied(place: Place, factor: float, keys: Atoms) -> Scores:
    """Scores times what each query has one of, which goes to the queries; or times a mask."""
    divides = place.op is ops.divide
    for value, other in pairs(place):
        if not holds_dot(value):
            continue
        inner = find_scores(terms(value, factor), keys)
        of_keys = other.changes_with(keys)
        if inner.added or inner.hidden or (inner.softcap and not of_keys):
            raise NoMatch("a scale that is no constant follows a softcap, a bias or a mask")
        if not of_keys:
            return replace(inner, rows=(*inner.rows, (other, divides)))
        mask = None if divides else choice(other.strip())
        if mask is None or {mask.then, mask.otherwise} != {0, 1}:
            raise NoMatch("the scale depends on the key")
        return inner.hiding(mask.condition._replace(truth=mask.then == 1), 0.0)
    raise NoMatch(f"{place.op.name} stands between the dot and softmax")
