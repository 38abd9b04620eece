"""The parts of an attention that was found: which axes are what, and the Node built of them.

Axes that the keys and values have, or that nobody has, are batches; axes that only queries have
are queries or heads that share a key head. What lies in another way than `orders` can say is
permuted first; what is broadcast is repeated, except the heads.
Invariant: the Node built has the type of the dot it replaces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

from ..core.dtype import DType, bfloat16, float16, float32, float64, promote
from ..ir.node import Node
from ..ir.symbol import Size
from . import attention, build, ops
from .axes import Atom, Atoms, Axes, AxisIndex, Place, flat, fresh, loops, size_of
from .recognize_extras import extras_of
from .recognize_mask import comparisons, conditions
from .recognize_scores import NoMatch, Term, find_scores, unscaled
from .recognize_softmax import Softmax, find_softmax

FLOATS = (float16, bfloat16, float32, float64)
ORDERS = ("bhtd", "bthd", "hbtd", "thbd", "tbhd", "htbd")  # where one is empty, the first is meant
ByLetter = dict[str, Atoms]


def operands(dot: Place) -> tuple[list[Place], Atoms]:
    """Both sides of a dot, and the Atoms of what is contracted."""
    batch, contract = dot.node.attrs["batch"], dot.node.attrs["contract"]
    inner = fresh([dot.node.inputs[0].shape[a] for a in contract[0]])
    rest = iter(dot.indices[len(batch[0]) :])
    sides: list[Place] = []
    for side, x in enumerate(dot.node.inputs):
        of = {**dict(zip(batch[side], dot.indices)), **dict(zip(contract[side], inner))}
        indices = [of[a] if a in of else next(rest) for a in range(len(x.shape))]
        sides.append(Place(x, tuple(indices)))
    return sides, tuple([a for p in inner for a in p.atoms])


def below_top(root: Node, top: Node) -> tuple[Place, Atoms]:
    """A dot, and the Atoms of its result in the order of the last that moves or casts it."""
    place = Place(top, fresh(top.shape))
    lies = place.atoms
    while place.node is not root:
        below = place.inputs[0] if place.op is ops.cast else place.down()
        if below is None:
            return below_top(root, root)
        place = below
    return place, lies


def _dtype(root: Node, last: DType, sides: Sequence[Term]) -> DType:
    """The dtype of the attention: a narrow one where all sides have it and the result gets it."""
    own = [x.place.node.dtype for x in sides]
    narrow = last in FLOATS and all(d is last for d in own)
    found = last if narrow else reduce(promote, own, root.dtype)
    if found not in FLOATS:
        raise NoMatch(f"the result is {found}")
    return found


def in_order(order: str, by_letter: ByLetter) -> Atoms:
    """The Atoms of a value that lies in an order."""
    return tuple([a for letter in order for a in by_letter[letter]])


def order_of(lies: Atoms, by_letter: ByLetter) -> str | None:
    """The first of the ORDERS in which a value lies."""
    return next((order for order in ORDERS if in_order(order, by_letter) == lies), None)


def placed(x: Place, by_letter: ByLetter, dtype: DType) -> tuple[Node, str]:
    """A side as four axes, and their order."""
    order = order_of(x.atoms, by_letter) or "bhtd"
    every = in_order(order, by_letter)
    node = build.expand(x.on_leaf(every), tuple([a.size for a in every]))
    shape = tuple([size_of(by_letter[letter]) for letter in order])
    return build.cast(build.reshape(node, shape), dtype), order


def _row_scaled(q: Node, order: str, axes: Axes, row: Place, divides: bool) -> Node:
    """Queries times (or over) what each of them has one of."""
    wide = q.dtype.wide
    value = axes.on_scores(row.on_atoms(axes.scores))  # (b, h, i, 1)
    value = build.cast(attention.as_order(value, order), wide)
    scaled = (build.divide if divides else build.multiply)(build.cast(q, wide), value)
    return build.cast(scaled, q.dtype)


def _mean(v: Node, heads: Size) -> Node:
    """The mean of all values, (b, h, 1, d): what equal scores give."""
    batch, key_heads, keys, width = v.shape
    wide = v.dtype.wide
    total = build.sum_(build.cast(v, wide), 2, keep=True)
    mean = build.divide(total, build.cast(build.size_value(keys), wide))
    group = heads // key_heads
    mean = build.expand(build.unsqueeze(mean, 2), (batch, key_heads, group, 1, width))
    return build.cast(build.reshape(mean, (batch, heads, 1, width)), v.dtype)


def _probabilities(sides: Sequence[Place], near: Sequence[int], keys: Atoms) -> tuple[int, Softmax]:
    """Which side of the last dot is a softmax, and of what."""
    reason: NoMatch | None = None
    for side in near:
        try:
            return side, find_softmax(sides[side], keys)
        except NoMatch as why:
            reason = why if reason is None or reason.quiet else reason
    raise reason or NoMatch("no side of the last dot is a softmax")


# ---- which axis is what ---------------------------------------------------------------------


class Match:
    """An attention that ends in a dot: its parts, which axes are what, the Node; NoMatch where
    there is none. `near` are the sides of the dot that may be a softmax, `top` is the result
    after movement and casts; what is `derived` afterwards has its derivatives."""

    def __init__(self, root: Node, near: Sequence[int], top: Node, derived: bool) -> None:
        self.derived, self.last = derived, top.dtype
        self.root, self.lies = below_top(root, top)
        sides, keys = operands(self.root)
        if not keys:
            raise NoMatch("there is one key only")
        side, self.softmax = _probabilities(sides, near, keys)
        self.scores = find_scores(self.softmax.scores, keys)
        dot = self.scores.dot.place
        if not dot.full:
            raise NoMatch("only a part of the scores is used")
        pair, widths = operands(dot)
        if set(flat(keys)) & set(pair[0].atoms):
            pair.reverse()
        self.q, self.k = (unscaled(x, exact=True) for x in pair)
        self.v = Term(1.0, sides[1 - side].strip(exact=True))
        for place in (*self.scores.values, *[t.place for t in self.softmax.sinks]):
            place.depends()  # no Atom is split afterwards
        own = set(sides[side].atoms)
        self.keys, self.inner = flat(keys), set(flat(widths))
        self.values = tuple([a for a in self.root.atoms if a not in own])
        self.lying = [flat(p.atoms) for p in self.softmax.power.indices]  # the axes of the scores
        self.axes = self.find_axes()

    def find_axes(self) -> Axes:
        """Which Atoms are what."""
        keys, inner = self.keys, self.inner
        on_q, on_k, on_v = (set(x.place.atoms) for x in (self.q, self.k, self.v))
        if not inner <= on_q or not inner <= on_k or not inner:
            raise NoMatch("the dot of queries and keys contracts a repeated axis")
        if on_q & set(keys) or not set(keys) <= on_k or not set(keys) <= on_v:
            raise NoMatch("the keys are not an axis of keys and values alone")
        order = [a for atoms in self.lying for a in atoms if a not in keys]
        missing = (on_q | on_k | on_v) - set(order) - set(keys) - inner - set(self.values)
        if missing:
            raise NoMatch("an axis of queries, keys or values is not one of the scores")
        own = [a for a in order if a in on_q and a not in on_k and a not in on_v]
        queries = self.find_queries(own)
        group = tuple([a for a in own if a not in queries])
        rest = [a for a in order if a not in own]
        if not queries and not set(rest) <= on_k:
            raise NoMatch("each query has values of its own, for keys that all share")
        key_heads = self.find_key_heads(rest, queries)
        if not all(isinstance(a.size, int) for a in (*group, *key_heads)):
            raise NoMatch("the number of heads is not known")
        width = tuple([a for a in self.q.place.atoms if a in inner])
        batch = tuple([a for a in rest if a not in key_heads])
        return Axes(batch, key_heads, group, queries, keys, width, self.values)

    def find_queries(self, own: list[Atom]) -> Atoms:
        """Of the axes that only queries have: the one masks compare with keys, or that is next."""
        parts = [part for hidden in self.scores.hidden for part in conditions(hidden.condition)]
        numbers = [loops(number) for part in parts for number in comparisons(part) or ()]
        of_keys = {a.index for a in self.keys}
        compared = set().union(*[found for found in numbers if found & of_keys])
        found = tuple([a for a in own if a.index in compared])
        if found:
            return found
        last = next((n for n, atoms in enumerate(self.lying) if set(atoms) & set(self.keys)), 0)
        if last > 0:
            found = tuple([a for a in own if a in self.lying[last - 1]])
            if found or not self.lying[last - 1]:
                return found
        return tuple(own[-1:])

    def find_key_heads(self, rest: list[Atom], queries: Atoms) -> Atoms:
        """Of the axes that keys have: those of the last but the first axis of the scores."""
        needed = {a for t in self.softmax.sinks for a in t.place.depends()}
        asked = tuple([a for a in rest if a in needed])
        if asked:
            return asked
        taken = {*self.keys, *queries}
        lead = [atoms for atoms in self.lying if not set(atoms) & taken]
        if lead and not lead[-1] and not queries:
            lead.pop()  # the axis of one query
        number = max([n for n, atoms in enumerate(lead) if set(atoms) & set(rest)], default=0)
        found = [a for a in lead[number] if a in rest] if lead else []
        if number == 0:  # a batch, or that and heads as one
            found = found[1:][-1:]
        return tuple([a for a in found if isinstance(a.size, int)])

    # ---- the Node ---------------------------------------------------------------------------

    def built(self) -> Node:
        """What replaces the last dot."""
        axes, scores, root = self.axes, self.scores, self.root.node
        dtype = _dtype(root, self.last, (self.q, self.k, self.v))
        of_k = {"b": axes.batch, "h": axes.key_heads, "t": axes.keys, "d": axes.width}
        of_q = {**of_k, "h": axes.heads, "t": axes.queries}
        of_v = {**of_k, "d": axes.value_width}
        pairs = ((self.q, of_q), (self.k, of_k), (self.v, of_v))
        (q, order_q), (k, order_k), (v, order_v) = (placed(x.place, of, dtype) for x, of in pairs)
        for row, divides in scores.rows:
            q = _row_scaled(q, order_q, axes, row, divides)
        extras = extras_of(axes, self.softmax, scores, self.derived)
        of_out = {**of_q, "d": axes.value_width}
        orders = [order_of(lies, of_out) for lies in (flat(self.lies), self.root.atoms)]
        order = orders[0] or orders[1] or "bhtd"
        scale = scores.dot.factor * self.q.factor * self.k.factor
        if scale < 0:
            q, scale = build.negative(q), -scale
        out, lse = attention.attention(
            q,
            k,
            v,
            extras.more,
            scale=scale,
            band=extras.band,
            softcap=scores.softcap,
            dropout=self.softmax.dropout,
            orders=(order_q, order_k, order_v, order),
        )

        if extras.mean or extras.bare:
            nothing = attention.as_order(build.unsqueeze(build.equal(lse, -math.inf), 3), order)
            mean = _mean(attention.heads_first(v, order_v), size_of(axes.heads))
            by_adding = any(h.added is not None and h.number == -math.inf for h in scores.hidden)
            if extras.mean or (self.derived and not by_adding):
                out = build.where(nothing, attention.as_order(mean, order), out)
            if extras.bare:  # all derivatives become nan; of a mean, those of the values alone
                one = build.constant(1.0, out.dtype)
                out = build.multiply(out, build.where(nothing, math.nan, one))
        indices = tuple([AxisIndex(of_out[letter]) for letter in order])
        out = build.reshape(Place(out, indices).on_leaf(self.root.atoms), root.shape)
        return build.cast(out, root.dtype)
