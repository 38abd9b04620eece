"""What an attention reads beside q, k and v: a band, a mask, a bias, slopes, sinks, dropout.

Conditions on key - query become the band, all others one mask; slope * (key - query) becomes
slopes, what else is added one bias. Axes on which a mask or a bias does not depend keep size 1.
Invariant: the extras say what was read from the scores, for every query and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from ..ir.node import Node, is_shallow
from . import attention, build, ops
from .attention_types import EXTRAS, Band, sizes, sum_dtype
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
from .recognize_mask import (
    Affine,
    Condition,
    affine,
    always,
    bounds,
    comparisons,
    conditions,
    index_of,
    meet,
    shows_all,
)
from .recognize_scores import LEAST_SCORE, Scores, with_added
from .recognize_softmax import Softmax
from .recognize_terms import NoMatch, Term, summed, terms


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
    def parts(self) -> Axes:
        """The same axes after some were split."""
        return Axes(*map(flat, self))

    def on_scores(self, value: Node) -> Node:
        """A value on the axes of the scores as (b, h, i, j), sizes 1 where it has none."""
        return grouped(value, self.scores, (self.batch, self.heads, self.queries, self.keys))


class _FiniteMask(NoMatch):
    """A mask of a finite number that may hide all keys of a query."""


# ---- masks, biases, sinks, dropout ----------------------------------------------------------


def look_through(scores: Scores, sinks: Sequence[Term]) -> None:
    """Follow all that is added or hides down to the end: no Atom is split afterwards."""
    for term in (*scores.added, *sinks, *[t for _, t in scores.choices]):
        depends(term.node, term.indices)
    for node, indices, _ in (*scores.hiding, *scores.rows):
        depends(node, indices)


class Extras(NamedTuple):
    """Further inputs by name, the band, and, where a row that sees nothing takes the mean of all
    values, whether each row sees something: (b, h, i, 1). A `bare` row, which -inf may have hidden
    all keys from, gives nan."""

    more: dict[str, Node]
    band: Band
    seen: Node | None
    bare: bool = False


def extras_of(axes: Axes, softmax: Softmax, scores: Scores, derived: bool) -> Extras:
    """What an attention reads beside q, k and v."""
    seen = None
    try:
        band, masks, bias, slopes = _seen(axes, bool(softmax.sinks), scores, derived)
    except _FiniteMask:
        others = scores.masks or scores.added or scores.choices
        if others or softmax.sinks or softmax.dropout is not None:
            raise
        bands, masks = _read(scores.finite, axes)
        band, bias, slopes = meet(bands), [], []
        seen = build.max_(_mask(scores.finite, axes), 3, keep=True)
    more = _named(axes, masks, bias, slopes)
    if "bias" in more and not softmax.sinks and ops.is_constant(more["bias"]):
        del more["bias"]  # what all keys share changes nothing
    if softmax.sinks:
        more["sinks"] = _by_head(summed(softmax.sinks, axes.scores), axes, "the sink")
    if softmax.dropout is not None:
        bits = softmax.dropout
        if atoms_of(bits.indices) != axes.scores or not full(bits.bits, bits.indices):
            raise NoMatch("the random bits of dropout lie in another order than the scores")
        more["key"], more["offset"] = bits.bits.inputs
    shown = shows_all(band, size_of(axes.queries), size_of(axes.keys))
    bare = seen is None and ("mask" in more or "bias" in more or not shown)
    return Extras(more, band, seen, bare and not softmax.guarded and not softmax.sinks)


def refined(node: Node) -> Node:
    """An attention Node (or its backward) whose mask and bias became a band where they are one."""
    given = attention.extras_of(node)
    others = {n: x for n, x in given.items() if n not in ("mask", "bias")}
    if len(others) == len(given) or node.attrs.get("wanted") or "query_starts" in given:
        return node
    own = [x for n, x in given.items() if n in ("mask", "bias")]
    if not is_shallow(own, set(ops.graph.ops.values()) - {ops.dot}):
        return node
    axes, indices_of = _axes_of(node)
    if not axes.keys:
        return node  # one key
    scores = Scores(Term(1.0, node, ()))
    if "mask" in given:
        scores = replace(scores, masks=(Condition(given["mask"], indices_of["mask"]),))
    for term in terms(given["bias"], indices_of["bias"]) if "bias" in given else ():
        scores = with_added(scores, term)
    if "key_lengths" in given:  # it may hide what a finite number leaves
        added = (*scores.added, *[term for _, term in scores.choices])
        scores = replace(scores, added=added, choices=())
    look_through(scores, ())
    axes = axes.parts
    band, masks, bias, slopes = _seen(axes, True, scores)  # the log-sum-exp stays as it is
    if slopes and "slopes" in others:
        slopes = [others["slopes"], *slopes]
    others |= _named(axes, masks, bias, slopes)
    band = meet([node.attrs["band"], band])
    shapes = [{n: x.shape for n, x in some.items()} for some in (others, given)]
    low = any(read.otherwise < LEAST_SCORE for read, _ in scores.choices)
    if band == node.attrs["band"] and shapes[0] == shapes[1] and not low:
        return node
    extras = tuple([n for n in EXTRAS if n in others])
    first = 3 if node.op is ops.attention else 6
    inputs = (*node.inputs[:first], *[others[n] for n in extras])
    return node.op.make(inputs, {**node.attrs, "band": band, "extras": extras})


def _axes_of(node: Node) -> tuple[Axes, dict[str, Indices]]:
    """Axes of an attention Node, and the Indices of its mask and bias."""
    q, k, v = node.inputs[:3]
    found = sizes(q, k, v, node.attrs["orders"])
    own = fresh(found.scores)
    b, h, i, j = (p.atoms for p in own)
    axes = Axes(b, h, (), i, j, (), ())
    indices_of = {
        name: tuple([FIRST if s == 1 else p for s, p in zip(x.shape, own)])
        for name, x in attention.extras_of(node).items()
        if name in ("mask", "bias")
    }
    return axes, indices_of


def _seen(
    axes: Axes, sinks: bool, scores: Scores, derived: bool = False
) -> tuple[Band, list[Condition], list[Term], list[Node]]:
    """The band, conditions that are none, what is added, slopes.

    A very low finite number hides a key only where another one is seen: as a band, if it shows
    every query a key and nothing else may hide that. Where it was added it may stay so, except
    under a derivative, which would need the logarithm of a sum to more digits than it has.
    """
    bands, masks = _read(scores.masks, axes)
    finite = scores.hiding[len(scores.masks) :]
    low, other = _read(finite, axes)
    band = meet([*bands, *low])
    slopes, bias = _slopes(scores.added, axes, band, sinks)
    shown = shows_all(band, size_of(axes.queries), size_of(axes.keys))
    if finite and (other or masks or bias or not shown):
        if scores.finite:
            raise _FiniteMask(
                "beside what else is added or masked, a mask of a finite number "
                "gives rows that see nothing other values; -inf does not"
            )
        if derived:
            raise NoMatch(
                "a finite number that hides keys is added to the scores, and may hide "
                "all; use where, or -inf"
            )
        band = meet(bands)
        added = [*scores.added, *[term for _, term in scores.choices]]
        slopes, bias = _slopes(added, axes, band, sinks)
    return band, masks, bias, slopes


def _slopes(
    added: Sequence[Term], axes: Axes, band: Band, sinks: bool
) -> tuple[list[Node], list[Term]]:
    """Slopes, and terms that are none."""
    slopes: list[Node] = []
    bias: list[Term] = []
    for term in added:
        slope = _slope(term, axes, band, sinks)
        if slope is None:
            bias.append(term)
        else:
            slopes.append(slope)
    return slopes, bias


def _read(found: Sequence[Condition], axes: Axes) -> tuple[list[Band], list[Condition]]:
    """Bands, and conditions that are none."""
    bands: list[Band] = []
    general: list[Condition] = []
    for condition in found:
        for part in conditions(condition):
            functions = comparisons(part)
            if functions is None:
                general.append(part)
                continue
            read = [bounds(f, axes.queries, axes.keys) for f in functions if not always(f)]
            if any(b is None for b in read):
                general.append(part)
            else:
                bands += [b for b in read if b is not None]
    return bands, general


def _named(
    axes: Axes, masks: Sequence[Condition], bias: Sequence[Term], slopes: Sequence[Node]
) -> dict[str, Node]:
    """Extras of what hides and of what is added."""
    found = {"slopes": reduce(build.add, slopes)} if slopes else {}
    if bias:
        found["bias"] = axes.on_scores(summed(bias, axes.scores))
    if masks:
        found["mask"] = _mask(masks, axes)
    return found


def _mask(masks: Sequence[Condition], axes: Axes) -> Node:
    values = [(on_atoms(m.node, m.indices, axes.scores), m.truth) for m in masks]
    every = [value if truth else ops.bit_not(value) for value, truth in values]
    return axes.on_scores(reduce(attention.and_masks, every))


def _by_head(value: Node, axes: Axes, name: str) -> Node:
    """A value on the axes of the scores that has only heads, as (heads,) of wide floats."""
    shape = axes.on_scores(value).shape
    if shape[0] != 1 or shape[2] != 1 or shape[3] != 1:
        raise NoMatch(f"{name} is not one number for each head")
    heads = size_of(axes.heads)
    found = build.expand(axes.on_scores(value), (1, heads, 1, 1))
    return build.cast(build.reshape(found, (heads,)), sum_dtype(value.dtype))


def _slope(term: Term, axes: Axes, band: Band, sinks: bool) -> Node | None:
    """slope(head) * (j - i), as the slopes; a sink sees what all keys share, so none may."""
    rest, line = _line(term, axes, band)
    if line is None:
        return None
    keys, queries = index_of(axes.keys), index_of(axes.queries)
    factor = line.terms.get(axes.keys[-1])
    if not isinstance(factor, int):
        return None
    wanted = Affine(keys).times(factor)
    exact = wanted.plus(Affine(queries).times(factor), -1)
    of_rows = {a: c for a, c in line.terms.items() if a not in keys}
    if {a: c for a, c in line.terms.items() if a in keys} != wanted.terms:
        return None
    if (sinks and line != exact) or not set(of_rows) <= set(queries):
        return None
    wide = sum_dtype(term.node.dtype)
    value = build.full((1,) * len(axes.scores), term.factor * factor, wide)
    for node, indices in rest:
        value = build.multiply(value, build.cast(on_atoms(node, indices, axes.scores), wide))
    try:
        return _by_head(value, axes, "a slope")
    except NoMatch:
        return None


def _line(term: Term, axes: Axes, band: Band) -> tuple[list[tuple[Node, Indices]], Affine | None]:
    """The factors of a term without the one that is affine in the keys, and that one."""
    rest: list[tuple[Node, Indices]] = []
    line: Affine | None = None
    stack = [(term.node, term.indices)]
    while stack:
        node, indices = strip(*stack.pop())
        if node.op is ops.multiply:
            stack.extend((i, indices) for i in node.inputs)
            continue
        if not depends(node, indices) & set(axes.keys):
            rest.append((node, indices))
            continue
        found = affine(node, indices) or _one_side(node, indices, axes, band)
        if found is None or line is not None:
            return rest, None
        line = found
    return rest, line


def _one_side(node: Node, indices: Indices, axes: Axes, band: Band) -> Affine | None:
    """|j - i| within a band that lies on one side of the diagonal."""
    while node.op is ops.cast:
        node, indices = strip(node.inputs[0], indices)
    if node.op is not ops.absolute:
        return None
    found = affine(node.inputs[0], indices)
    difference = Affine(index_of(axes.keys)).plus(Affine(index_of(axes.queries)), -1)
    if found is None or found not in (difference, difference.times(-1)):
        return None
    least, most = band
    if most is not None and isinstance(most, int) and most <= 0:
        return difference.times(-1)
    return difference if isinstance(least, int) and least >= 0 else None
