"""What an attention reads beside q, k and v: a band, a mask, a bias, slopes, sinks, dropout.

Conditions on key - query become the band, all others one mask; slope * (key - query) becomes
slopes, what else is added one bias. Axes on which a mask or a bias does not depend keep size 1.
Invariant: the extras say what was read from the scores, for every query and key.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from ..ir.node import Node, is_shallow
from ..ir.symbol import Size, coefficient
from . import attention, build, ops
from .attention_types import EXTRAS, LEAST_SCORE, Band, sizes
from .axes import FIRST, READ, Axes, Place, flat, fresh, index_of, loops, size_of
from .recognize_mask import Condition, bands_of, meet, position, shows_all
from .recognize_scores import NoMatch, Scores, Term, summed, terms, with_added
from .recognize_softmax import Softmax


class Extras(NamedTuple):
    """Further inputs by name, the band, and what a query that sees nothing gives: the `mean` of
    all values, where a finite number hides, or nan, where -inf may have hidden `bare` rows."""

    more: dict[str, Node]
    band: Band
    mean: bool = False
    bare: bool = False


def extras_of(axes: Axes, softmax: Softmax, scores: Scores, derived: bool) -> Extras:
    """What an attention reads beside q, k and v."""
    alone = not softmax.sinks and softmax.bits is None
    found = _seen(axes, scores, bool(softmax.sinks), alone, derived)
    more = found.more
    if softmax.sinks:
        sinks = _by_head(summed(softmax.sinks, axes.scores), axes)
        if sinks is None:
            raise NoMatch("the sink is not one number for each head")
        more["sinks"] = sinks
    if softmax.bits is not None:
        bits = softmax.bits
        if bits.atoms != axes.scores or not bits.full:
            raise NoMatch("the random bits of dropout lie in another order than the scores")
        more["key"], more["offset"] = bits.node.inputs
    return found._replace(bare=found.bare and not softmax.guarded and not softmax.sinks)


def refined(node: Node) -> Node:
    """An attention Node (or its backward) whose mask and bias became a band where they are one."""
    given = attention.extras_of(node)
    own = {n: x for n, x in given.items() if n in ("mask", "bias")}
    every = fresh(sizes(node.inputs, node.attrs["orders"]).scores)
    b, h, i, j = (p.atoms for p in every)
    stays = node.attrs.get("wanted") or "query_starts" in given or not j  # one key
    if stays or not is_shallow(own.values(), READ):
        return node
    scores = Scores(Term(1.0, Place(node, ())))
    for name, x in own.items():
        place = Place(x, tuple([FIRST if s == 1 else p for s, p in zip(x.shape, every)]))
        if name == "mask":
            scores = scores.hiding(Condition(place), -math.inf)
        for term in terms(place) if name == "bias" else ():
            scores = with_added(scores, term)
    if "key_lengths" in given:  # it may hide what a finite number leaves
        scores = _as_added(scores)
    low = any(-math.inf < hidden.number < LEAST_SCORE for hidden in scores.hidden)
    for place in scores.values:
        place.depends()  # no Atom is split afterwards
    axes = Axes(*map(flat, (b, h, (), i, j)))
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
    bands, masks = bands_of(infinite, axes)
    low, other = bands_of([h.condition for h in finite], axes)
    band = meet([*bands, *low])
    by_term = [(_slope(term, axes, band, sinks), term) for term in scores.added]
    slopes = [slope for slope, _ in by_term if slope is not None]
    bias = [term for slope, term in by_term if slope is None]
    shown = shows_all(band, axes)
    mean = bool(finite and (not shown or other or masks or bias))
    if mean and all(h.added is not None for h in finite):
        if derived:
            raise NoMatch("a finite number that is added may hide all keys; use where, or -inf")
        return _seen(axes, _as_added(scores), sinks)
    in_place = all(h.number > -math.inf and h.added is None for h in scores.hidden)
    if mean and not (alone and in_place and not scores.added):
        raise NoMatch("a finite number hides keys beside what else hides or is added; use -inf")
    found = {"slopes": reduce(build.add, slopes)} if slopes else {}
    value = axes.on_scores(summed(bias, axes.scores)) if bias else None
    if value is not None and (sinks or not ops.is_constant(value)):
        found["bias"] = value  # without sinks, what all keys share changes nothing
    if masks or other:
        values = [(place.on_atoms(axes.scores), truth) for place, truth in (*masks, *other)]
        every = [value if truth else ops.bit_not(value) for value, truth in values]
        found["mask"] = axes.on_scores(reduce(attention.and_masks, every))
    bare = not mean and ("mask" in found or "bias" in found or not shown)
    return Extras(found, band, mean, bare)


def _as_added(scores: Scores) -> Scores:
    """The scores with finite numbers that hide keys as what they are: something that is added."""
    stay = [h for h in scores.hidden if h.added is None or h.number == -math.inf]
    added = [h.added for h in scores.hidden if h.added is not None and h not in stay]
    return replace(scores, added=(*scores.added, *added), hidden=tuple(stay))


def _by_head(value: Node, axes: Axes) -> Node | None:
    """A value on the axes of the scores that has only heads, as (heads,) of wide floats."""
    found = axes.on_scores(value)
    if found.shape != (1, found.shape[1], 1, 1):
        return None
    heads = size_of(axes.heads)
    found = build.reshape(build.expand(found, (1, heads, 1, 1)), (heads,))
    return build.cast(found, value.dtype.wide)


# ---- slopes ---------------------------------------------------------------------------------


def _slope(term: Term, axes: Axes, band: Band, sinks: bool) -> Node | None:
    """slope(head) * (j - i), as the slopes; a sink sees what all keys share, so none may."""
    factors = _factors(term.place)
    lines = [f for f in factors if f.changes_with(axes.keys)]
    line = _line(lines[0], axes, band) if len(lines) == 1 else None
    factor = None if line is None else coefficient(line, axes.keys[-1].index)
    if line is None or not isinstance(factor, int) or not factor:
        return None
    rest = loops(line - factor * index_of(axes.keys))
    if rest - {a.index for a in axes.queries} or (sinks and line != axes.difference * factor):
        return None
    wide = term.place.node.dtype.wide
    value = build.full((1,) * len(axes.scores), term.factor * factor, wide)
    for other in factors:
        if other not in lines:
            value = build.multiply(value, build.cast(other.on_atoms(axes.scores), wide))
    return _by_head(value, axes)


def _factors(place: Place) -> list[Place]:
    """What a value is the product of."""
    place = place.strip()
    if place.op is not ops.multiply:
        return [place]
    return [f for i in place.inputs for f in _factors(i)]


def _line(place: Place, axes: Axes, band: Band) -> Size | None:
    """A value that counts positions; |j - i| is within a band on one side of the diagonal."""
    found = position(place)
    if len(found) < 2:
        return found[0] if found else None
    difference, (least, most) = axes.difference, band
    if difference not in found:
        return None
    if isinstance(most, int) and most <= 0:
        return -difference
    return difference if isinstance(least, int) and least >= 0 else None
