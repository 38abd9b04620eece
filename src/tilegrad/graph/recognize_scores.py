"""Scores as people write them, read down to the dot of queries and keys.

Scales, a softcap, what is added, masks by `where`, by adding and by multiplying.
Invariant: what is read gives the values of what was written, up to rounding; else NoMatch says
why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.node import Node
from . import build, ops
from .axes import Atoms, Indices, depends, flat, strip
from .recognize_mask import Choice, Condition, choice, known
from .recognize_terms import NoMatch, Term, holds_dot, terms

LEAST_SCORE = -1e38  # kernels multiply scores by log2(e): lower ones would be -inf
LOWEST = -3e4  # a number this low in place of a score means: not seen


@dataclass(frozen=True)
class Scores:
    """softcap(dot * factor * rows) + added, -inf where a mask does not hold.

    `masks` are conditions; `finite` those where the score becomes a finite number instead.
    `choices` are added masks: 0 or a very low number. Where `zeroed` does not hold the scores
    were multiplied by 0: one of the choices must go with it. `adds` says whether -inf was added
    to the scores, not put in their place: then it reaches their derivatives.
    """

    dot: Term
    rows: tuple[tuple[Node, Indices, bool], ...] = ()
    cap: float | None = None
    added: tuple[Term, ...] = ()
    masks: tuple[Condition, ...] = ()
    finite: tuple[Condition, ...] = ()
    choices: tuple[tuple[Choice, Term], ...] = ()
    zeroed: Condition | None = None
    adds: bool = False

    @property
    def hiding(self) -> tuple[Condition, ...]:
        """All conditions that must hold for a key to be seen: `masks`, then those of numbers."""
        return (*self.masks, *self.finite, *[c.condition for c, _ in self.choices])

    @property
    def bare(self) -> bool:
        """Whether nothing is added, and nothing hides."""
        return not self.added and not self.hiding


def find_scores(found: Sequence[Term], keys: Atoms) -> Scores:
    """The sum of terms as scores: one of them holds the dot."""
    reason = NoMatch("no dot of queries and keys below softmax")
    holding = [t for t in found if holds_dot(t.node)]
    for term in holding:
        try:
            scores = _scores(term, keys)
        except NoMatch as why:
            reason = why
            continue
        for other in found:
            if other is not term:
                scores = with_added(scores, other)
        return _joined(scores)
    raise reason


def _joined(scores: Scores) -> Scores:
    """scores * mask + (1 - mask) * low is where(mask, scores, low)."""
    if scores.zeroed is None:
        return scores
    for pair in scores.choices:
        if pair[0].condition == scores.zeroed:
            choices = tuple(p for p in scores.choices if p is not pair)
            finite = (*scores.finite, scores.zeroed)
            return replace(scores, choices=choices, finite=finite, zeroed=None)
    raise NoMatch("the scale depends on the key")


def with_added(scores: Scores, term: Term) -> Scores:
    """A bias, or a mask that is written as one."""
    node, indices = strip(term.node, term.indices)
    found = choice(node, indices)
    if found is not None:
        then, otherwise = (float(v) * term.factor for v in (found.then, found.otherwise))
        condition = found.condition
        if then < otherwise:
            then, otherwise = otherwise, then
            condition = condition._replace(truth=not condition.truth)
        if then == 0.0 and otherwise == -math.inf:
            return replace(scores, masks=(*scores.masks, condition), adds=True)
        if then == 0.0 and otherwise <= LOWEST:
            read = Choice(condition, then, otherwise)
            if otherwise < LEAST_SCORE:
                kept = build.maximum(build.multiply(node, term.factor), LEAST_SCORE)
                term = Term(1.0, kept, indices)
            return replace(scores, choices=(*scores.choices, (read, term)))
    if node.op is ops.where and term.factor > 0:
        for value, other, truth in ((1, 2, True), (2, 1, False)):
            if known(node.inputs[other], indices) == -math.inf:
                condition = Condition(node.inputs[0], indices, truth)
                scores = replace(scores, masks=(*scores.masks, condition), adds=True)
                return with_added(scores, Term(term.factor, node.inputs[value], indices))
    if known(node, indices) == 0:
        return scores
    return replace(scores, added=(*scores.added, Term(term.factor, node, indices)))


def _scores(term: Term, keys: Atoms) -> Scores:
    factor, (node, indices) = term.factor, strip(term.node, term.indices)
    if node.op is ops.dot:
        return Scores(Term(factor, node, indices))
    if node.op is ops.where:
        return _masked(term._replace(node=node, indices=indices), keys)
    if node.op is ops.tanh:
        inner = find_scores(terms(node.inputs[0], indices), keys)
        if inner.cap is not None or not inner.bare:
            raise NoMatch("something is added or masked before the softcap")
        sign = -1.0 if factor < 0 else 1.0
        dot = inner.dot._replace(factor=inner.dot.factor * sign)
        return replace(inner, dot=dot, cap=abs(factor))
    if node.op in (ops.multiply, ops.divide):
        return _row_factor(node, indices, factor, keys)
    raise NoMatch(f"{node.op.name} stands between the dot and softmax")


def _masked(term: Term, keys: Atoms) -> Scores:
    """where(mask, scores, -inf)."""
    node, indices = term.node, term.indices
    for value, other, truth in ((1, 2, True), (2, 1, False)):
        number = known(node.inputs[other], indices)
        if number is None:
            continue
        number = float(number) * term.factor
        if number > LOWEST or math.isnan(number):
            raise NoMatch(f"where a mask does not hold the score becomes {number:g}")
        inner = find_scores(terms(node.inputs[value], indices, term.factor), keys)
        condition = Condition(node.inputs[0], indices, truth)
        if number == -math.inf:
            return replace(inner, masks=(*inner.masks, condition))
        return replace(inner, finite=(*inner.finite, condition))
    raise NoMatch("the scores are chosen between values")


def _row_factor(node: Node, indices: Indices, factor: float, keys: Atoms) -> Scores:
    """Scores times something that each query has one of: it goes to the queries."""
    sides = [(node.inputs[0], node.inputs[1])]
    if node.op is ops.multiply:
        sides.append((node.inputs[1], node.inputs[0]))
    for scores, other in sides:
        if not holds_dot(scores):
            continue
        if depends(other, indices) & set(flat(keys)):
            return _zeroed(scores, other, indices, factor, keys)
        inner = find_scores(terms(scores, indices, factor), keys)
        if inner.cap is not None or not inner.bare:
            raise NoMatch("a scale that is no constant follows a softcap, a bias or a mask")
        row = (other, indices, node.op is ops.divide)
        return replace(inner, rows=(*inner.rows, row))
    raise NoMatch("no dot of queries and keys below softmax")


def _zeroed(scores: Node, mask: Node, indices: Indices, factor: float, keys: Atoms) -> Scores:
    """Scores times a mask of ones and zeros."""
    found = choice(*strip(mask, indices))
    if found is None or (found.then, found.otherwise) not in ((1, 0), (0, 1)):
        raise NoMatch("the scale depends on the key")
    inner = find_scores(terms(scores, indices, factor), keys)
    if not inner.bare or inner.zeroed:
        raise NoMatch("masked scores are multiplied by a mask")
    condition = found.condition._replace(truth=found.then == 1)
    return replace(inner, zeroed=condition)


def cap_and_scale(scores: Scores) -> tuple[float, float]:
    """(softcap, scale) of cap * tanh(factor * dot), or (0, factor)."""
    if scores.cap is None:
        return 0.0, scores.dot.factor
    return scores.cap, scores.cap * scores.dot.factor
