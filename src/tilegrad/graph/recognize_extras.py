"""What an attention reads beside q, k and v: a band, a mask, a bias, slopes, sinks, dropout.

Conditions on key - query become the band, all others one mask; slope * (key - query) becomes
slopes, what else is added one bias. Axes on which a mask or a bias does not depend keep size 1.
Invariant: the extras say what was read from the scores, for every query and key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from ..ir.node import Node, is_shallow
from . import attention, build, ops
from .attention_types import EXTRAS, LEAST_SCORE, Band, sizes, sum_dtype
from .axes import (
    FIRST,
    Atoms,
    Indices,
    atoms_of,
    depends,
    flat,
    fresh,
    full,
    grouped,
    on_atoms,
    size_of,
    strip,
)
from .recognize_mask import Affine, Condition, bands_of, index_of, meet, position, shows_all
from .recognize_scores import NoMatch, Scores, Term, summed, terms, with_added
from .recognize_softmax import Softmax


class Axes(NamedTuple):
    """Which Atoms are what: batch, key heads, heads of a group, queries, keys, widths."""

    batch: Atoms
    key_heads: Atoms
    group: Atoms
    queries: Atoms
    keys: Atoms
    width: Atoms
    value_width: Atoms

    @property
    def heads(self) -> Atoms:
        """All heads: those that share a key head lie side by side."""
        return self.key_heads + self.group

    @property
    def scores(self) -> Atoms:
        """The axes of the scores, in order."""
        return self.batch + self.heads + self.queries + self.keys

    @property
    def difference(self) -> Affine:
        """key - query."""
        return index_of(self.keys).plus(index_of(self.queries), -1)

    def on_scores(self, value: Node) -> Node:
        """A value on the axes of the scores as (b, h, i, j), sizes 1 where it has none."""
        return grouped(value, self.scores, (self.batch, self.heads, self.queries, self.keys))


# ---- masks, biases, sinks, dropout ----------------------------------------------------------


def look_through(scores: Scores, sinks: Sequence[Term]) -> None:
    """Follow all that is added or hides down to the end: no Atom is split afterwards."""
    chosen = [h.added for h in scores.hidden if h.added is not None]
    for term in (*scores.added, *sinks, *chosen):
        depends(term.node, term.indices)
    for node, indices, _ in (*[h.condition for h in scores.hidden], *scores.rows):
        depends(node, indices)


class Extras(NamedTuple):
    """Further inputs by name, the band, and what a query that sees nothing gives: the `mean` of
    all values, where a finite number hides, or nan, where -inf may have hidden `bare` rows."""

    more: dict[str, Node]
    band: Band
    mean: bool = False
    bare: bool = False


def extras_of(axes: Axes, softmax: Softmax, scores: Scores, derived: bool) -> Extras:
    """What an attention reads beside q, k and v."""
    alone = not softmax.sinks and softmax.dropout is None
    more, band, mean, _ = _seen(axes, scores, bool(softmax.sinks), alone, derived)
    if "bias" in more and not softmax.sinks and ops.is_constant(more["bias"]):
        del more["bias"]  # what all keys share changes nothing
    if softmax.sinks:
        sinks = _by_head(summed(softmax.sinks, axes.scores), axes)
        if sinks is None:
            raise NoMatch("the sink is not one number for each head")
        more["sinks"] = sinks
    if softmax.dropout is not None:
        bits = softmax.dropout
        if atoms_of(bits.indices) != axes.scores or not full(bits.bits, bits.indices):
            raise NoMatch("the random bits of dropout lie in another order than the scores")
        more["key"], more["offset"] = bits.bits.inputs
    shown = shows_all(band, size_of(axes.queries), size_of(axes.keys))
    bare = not mean and ("mask" in more or "bias" in more or not shown)
    return Extras(more, band, mean, bare and not softmax.guarded and not softmax.sinks)


def refined(node: Node) -> Node:
    """An attention Node (or its backward) whose mask and bias became a band where they are one."""
    given = attention.extras_of(node)
    own = {n: x for n, x in given.items() if n in ("mask", "bias")}
    if node.attrs.get("wanted") or "query_starts" in given:
        return node
    if not is_shallow(own.values(), set(ops.graph.ops.values()) - {ops.dot}):
        return node
    every = fresh(sizes(node.inputs, node.attrs["orders"]).scores)
    b, h, i, j = (p.atoms for p in every)
    if not j:
        return node  # one key
    scores = Scores(Term(1.0, node, ()))
    for name, x in own.items():
        indices = tuple([FIRST if s == 1 else p for s, p in zip(x.shape, every)])
        if name == "mask":
            scores = scores.hiding(Condition(x, indices), -math.inf)
        for term in terms(x, indices) if name == "bias" else ():
            scores = with_added(scores, term)
    if "key_lengths" in given:  # it may hide what a finite number leaves
        scores = _as_added(scores)
    low = any(-math.inf < hidden.number < LEAST_SCORE for hidden in scores.hidden)
    look_through(scores, ())
    axes = Axes(*map(flat, (b, h, (), i, j, (), ())))
    found = _seen(axes, scores, sinks=True)  # the log-sum-exp stays as it is
    more = {n: x for n, x in given.items() if n not in own} | found.more
    if "slopes" in given and "slopes" in found.more:
        more["slopes"] = build.add(given["slopes"], found.more["slopes"])
    band = meet([node.attrs["band"], found.band])
    shapes = [{n: x.shape for n, x in some.items()} for some in (more, given)]
    if band == node.attrs["band"] and shapes[0] == shapes[1] and not low:
        return node
    extras = tuple([n for n in EXTRAS if n in more])
    first = len(node.inputs) - len(given)
    inputs = (*node.inputs[:first], *[more[n] for n in extras])
    return node.op.make(inputs, {**node.attrs, "band": band, "extras": extras})


def _seen(
    axes: Axes, scores: Scores, sinks: bool, alone: bool = False, derived: bool = False
) -> Extras:
    """The band, a mask of conditions that are none, slopes, a bias.

    A very low finite number hides a key only where another one is seen: as a band, if it shows
    every query a key and nothing else may hide that. Where it was added it may stay so, except
    under a derivative, which would need the logarithm of a sum to more digits than it has. Where
    it stands in place of scores, and they are `alone`, rows that see nothing give the mean.
    """
    infinite = [h.condition for h in scores.hidden if h.number == -math.inf]
    finite = [h for h in scores.hidden if h.number > -math.inf]
    bands, masks = bands_of(infinite, axes.difference, axes.keys[-1])
    low, other = bands_of([h.condition for h in finite], axes.difference, axes.keys[-1])
    band = meet([*bands, *low])
    by_term = [(_slope(term, axes, band, sinks), term) for term in scores.added]
    slopes = [slope for slope, _ in by_term if slope is not None]
    bias = [term for slope, term in by_term if slope is None]
    shown = shows_all(band, size_of(axes.queries), size_of(axes.keys))
    if not finite or (shown and not other and not masks and not bias):
        return Extras(_named(axes, masks, bias, slopes), band)
    if all(h.added is not None for h in finite):
        if derived:
            raise NoMatch(
                "a finite number that hides keys is added to the scores, and may hide "
                "all; use where, or -inf"
            )
        return _seen(axes, _as_added(scores), sinks)
    if not alone or infinite or scores.added or any(h.added is not None for h in finite):
        raise NoMatch(
            "beside what else is added or masked, a mask of a finite number "
            "gives rows that see nothing other values; -inf does not"
        )
    return Extras(_named(axes, other, [], []), band, mean=True)


def _as_added(scores: Scores) -> Scores:
    """The scores with finite numbers that hide keys as what they are: something that is added."""
    chosen = [h for h in scores.hidden if h.added is not None and h.number > -math.inf]
    added = (*scores.added, *[h.added for h in chosen if h.added is not None])
    hidden = tuple([h for h in scores.hidden if h not in chosen])
    return replace(scores, added=added, hidden=hidden)


def _named(
    axes: Axes, masks: Sequence[Condition], bias: Sequence[Term], slopes: Sequence[Node]
) -> dict[str, Node]:
    """Extras of what hides and of what is added."""
    found = {"slopes": reduce(build.add, slopes)} if slopes else {}
    if bias:
        found["bias"] = axes.on_scores(summed(bias, axes.scores))
    if masks:
        values = [(on_atoms(m.node, m.indices, axes.scores), m.truth) for m in masks]
        every = [value if truth else ops.bit_not(value) for value, truth in values]
        found["mask"] = axes.on_scores(reduce(attention.and_masks, every))
    return found


def _by_head(value: Node, axes: Axes) -> Node | None:
    """A value on the axes of the scores that has only heads, as (heads,) of wide floats."""
    found = axes.on_scores(value)
    if found.shape != (1, found.shape[1], 1, 1):
        return None
    heads = size_of(axes.heads)
    found = build.reshape(build.expand(found, (1, heads, 1, 1)), (heads,))
    return build.cast(found, sum_dtype(value.dtype))


# ---- slopes ---------------------------------------------------------------------------------


def _slope(term: Term, axes: Axes, band: Band, sinks: bool) -> Node | None:
    """slope(head) * (j - i), as the slopes; a sink sees what all keys share, so none may."""
    factors = _factors(term.node, term.indices)
    lines = [f for f in factors if Term(1.0, *f).on(axes.keys)]
    line = _line(*lines[0], axes, band) if len(lines) == 1 else None
    factor = None if line is None else line.terms.get(axes.keys[-1])
    if line is None or not isinstance(factor, int):
        return None
    rest = line.plus(index_of(axes.keys).times(factor), -1)  # without the keys
    if not set(rest.terms) <= set(axes.queries):
        return None
    if sinks and line != axes.difference.times(factor):
        return None
    wide = sum_dtype(term.node.dtype)
    value = build.full((1,) * len(axes.scores), term.factor * factor, wide)
    for node, indices in factors:
        if (node, indices) not in lines:
            value = build.multiply(value, build.cast(on_atoms(node, indices, axes.scores), wide))
    return _by_head(value, axes)


def _factors(node: Node, indices: Indices) -> list[tuple[Node, Indices]]:
    """What a value is the product of."""
    node, indices = strip(node, indices)
    if node.op is not ops.multiply:
        return [(node, indices)]
    return [f for i in node.inputs for f in _factors(i, indices)]


def _line(node: Node, indices: Indices, axes: Axes, band: Band) -> Affine | None:
    """A value that is affine in positions; |j - i| is within a band on one side of the diagonal."""
    found = position(node, indices)
    if len(found) < 2:
        return found[0] if found else None
    difference, (least, most) = axes.difference, band
    if difference not in found:
        return None
    if isinstance(most, int) and most <= 0:
        return difference.times(-1)
    return difference if isinstance(least, int) and least >= 0 else None
