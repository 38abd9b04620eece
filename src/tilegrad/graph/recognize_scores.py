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
from .axes import Atoms, Indices, below, depends, flat, on_atoms, strip
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
    node: Node
    indices: Indices

    def on(self, atoms: Atoms) -> bool:
        """Whether it changes with any of the Atoms."""
        return bool(depends(self.node, self.indices) & set(flat(atoms)))


def terms(node: Node, indices: Indices, factor: float = 1.0) -> list[Term]:
    """A value as a sum of terms, through movement, casts and constant factors."""
    node, indices = strip(node, indices)
    op = node.op
    if abs(factor) != 1.0 and not holds_dot(node):
        return [Term(factor, node, indices)]  # c * (1 - mask) is not c - c * mask for a large c
    if op is ops.add or op is ops.subtract:
        a, b = node.inputs
        other = factor if op is ops.add else -factor
        return [*terms(a, indices, factor), *terms(b, indices, other)]
    scaled = constant_factor(node, indices)
    if scaled is not None and (op is ops.negative or holds_dot(scaled[1])):
        return terms(scaled[1], indices, factor * scaled[0])
    return [Term(factor, node, indices)]


def constant_factor(node: Node, indices: Indices) -> tuple[float, Node] | None:
    """-x, x * c or x / c as (c, x), for a c that is neither 0 nor infinite."""
    if node.op is ops.negative:
        return -1.0, node.inputs[0]
    if node.op not in (ops.multiply, ops.divide):
        return None
    sides = [node.inputs] if node.op is ops.divide else [node.inputs, node.inputs[::-1]]
    for x, c in sides:
        value = known(c, indices)
        if value is not None and value != 0 and math.isfinite(value):
            return (float(value) if node.op is ops.multiply else 1.0 / float(value)), x
    return None


def summed(found: Sequence[Term], axes: Atoms) -> Node:
    """The sum of terms with one axis for each Atom (see `on_atoms`)."""
    values = [(on_atoms(t.node, t.indices, axes), t.factor) for t in found]
    return reduce(build.add, [x if c == 1.0 else build.multiply(x, c) for x, c in values])


def holds_dot(node: Node) -> bool:
    """Whether elementwise ops and movement lead down to a dot."""
    return ops.dot in [n.op for n in below([node])]


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
    rows: tuple[tuple[Node, Indices, bool], ...] = ()
    softcap: float = 0.0
    added: tuple[Term, ...] = ()
    hidden: tuple[Hidden, ...] = ()

    @property
    def bare(self) -> bool:
        """Whether nothing is added, and nothing hides."""
        return not self.added and not self.hidden

    def hiding(self, condition: Condition, number: float, added: Term | None = None) -> Scores:
        """The scores, hidden where a condition does not hold too."""
        return replace(self, hidden=(*self.hidden, Hidden(condition, number, added)))


def find_scores(found: Sequence[Term], keys: Atoms) -> Scores:
    """The sum of terms as scores: one of them holds the dot."""
    reason = NoMatch("no dot of queries and keys below softmax")
    for term in found:
        if not holds_dot(term.node):
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
        raise NoMatch(
            f"where a mask that depends on the key does not hold the score becomes {high.number:g}"
        )
    return scores


def with_added(scores: Scores, term: Term) -> Scores:
    """A bias, or a mask that is written as one."""
    node, indices = strip(term.node, term.indices)
    found = choice(node, indices)
    if found is not None:
        numbers = [float(v) * term.factor for v in (found.then, found.otherwise)]
        low = min(numbers)
        if max(numbers) == 0.0 and low <= LOWEST:
            condition = found.condition._replace(truth=numbers[0] == 0.0)
            if -math.inf < low < LEAST_SCORE:
                kept = build.maximum(build.multiply(node, term.factor), LEAST_SCORE)
                term = Term(1.0, kept, indices)
            return scores.hiding(condition, low, term)
    if node.op is ops.where and term.factor > 0:
        for condition, value, number in _sides(node, indices):
            if number == -math.inf:
                scores = scores.hiding(condition, number, term)
                return with_added(scores, Term(term.factor, value, indices))
    if known(node, indices) == 0:
        return scores
    return replace(scores, added=(*scores.added, Term(term.factor, node, indices)))


def _sides(node: Node, indices: Indices) -> Iterator[tuple[Condition, Node, float]]:
    """where(condition, value, number), and the other way round."""
    test, then, otherwise = node.inputs
    for value, other, truth in ((then, otherwise, True), (otherwise, then, False)):
        number = known(other, indices)
        if number is not None:
            yield Condition(test, indices, truth), value, float(number)


def _scores(term: Term, keys: Atoms) -> Scores:
    factor, (node, indices) = term.factor, strip(term.node, term.indices)
    if node.op is ops.dot:
        return Scores(Term(factor, node, indices))
    if node.op is ops.where:
        for condition, value, number in _sides(node, indices):
            inner = find_scores(terms(value, indices, factor), keys)
            return inner.hiding(condition, number * factor)
        raise NoMatch("the scores are chosen between values")
    if node.op is ops.tanh:
        inner = find_scores(terms(node.inputs[0], indices), keys)
        if inner.softcap or not inner.bare:
            raise NoMatch("something is added or masked before the softcap")
        dot = inner.dot._replace(factor=inner.dot.factor * factor)
        return replace(inner, dot=dot, softcap=abs(factor))
    if node.op in (ops.multiply, ops.divide):
        return _multiplied(node, indices, factor, keys)
    raise NoMatch(f"{node.op.name} stands between the dot and softmax")


def _multiplied(node: Node, indices: Indices, factor: float, keys: Atoms) -> Scores:
    """Scores times what each query has one of, which goes to the queries; or times a mask."""
    divides = node.op is ops.divide
    for value, other in [node.inputs] if divides else [node.inputs, node.inputs[::-1]]:
        if not holds_dot(value):
            continue
        inner = find_scores(terms(value, indices, factor), keys)
        of_keys = Term(1.0, other, indices).on(keys)
        if not inner.bare or (inner.softcap and not of_keys):
            raise NoMatch("a scale that is no constant follows a softcap, a bias or a mask")
        if not of_keys:
            return replace(inner, rows=(*inner.rows, (other, indices, divides)))
        mask = None if divides else choice(*strip(other, indices))
        if mask is None or {mask.then, mask.otherwise} != {0, 1}:
            raise NoMatch("the scale depends on the key")
        return inner.hiding(mask.condition._replace(truth=mask.then == 1), 0.0)
    raise NoMatch("no dot of queries and keys below softmax")
