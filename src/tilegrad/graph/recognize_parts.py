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
from .attention_types import sum_dtype
from .axes import (
    Atom,
    Atoms,
    AxisIndex,
    Indices,
    atoms_of,
    depends,
    flat,
    fresh,
    full,
    moved,
    on_leaf,
    size_of,
    split,
)
from .recognize_extras import Axes, extras_of, look_through
from .recognize_mask import comparisons, conditions
from .recognize_scores import NoMatch, Term, constant_factor, find_scores, summed
from .recognize_softmax import Softmax, find_softmax
from .simplify import holds

FLOATS = (float16, bfloat16, float32, float64)
ORDERS = ("bhtd", "bthd", "hbtd", "thbd", "tbhd", "htbd")  # where one is empty, the first is meant
ByLetter = dict[str, Atoms]


def operand_indices(dot: Node, result: Indices) -> tuple[list[Indices], Indices]:
    """Indices of both sides of a dot, and those of what is contracted."""
    batch, contract = dot.attrs["batch"], dot.attrs["contract"]
    inner = fresh([dot.inputs[0].shape[a] for a in contract[0]])
    rest = iter(result[len(batch[0]) :])
    sides: list[Indices] = []
    for side, x in enumerate(dot.inputs):
        of = {**dict(zip(batch[side], result)), **dict(zip(contract[side], inner))}
        sides.append(tuple([of[a] if a in of else next(rest) for a in range(len(x.shape))]))
    return sides, inner


def _probabilities(root: Node, sides: list[Indices], keys: Atoms) -> tuple[int, Softmax]:
    reasons: list[NoMatch] = []
    for side in (0, 1):
        try:
            return side, find_softmax(root.inputs[side], sides[side], keys)
        except NoMatch as reason:
            reasons.append(reason)
    told = [r for r in reasons if ", not a softmax" not in str(r)]
    raise (told or reasons)[0]


def operand(node: Node, indices: Indices, scaled: bool = True) -> Term:
    """A side of a dot down to what it moves, widens and multiplies by a constant."""
    factor = 1.0
    while True:
        source = node.inputs[0] if node.inputs else node
        if node.op is ops.cast and source.dtype in FLOATS and holds(node.dtype, source.dtype):
            node = source
            continue
        found = constant_factor(node, indices) if scaled else None
        if found is not None:
            node, factor = found[1], factor * found[0]
            continue
        below = moved(node, indices)
        if below is None:
            return Term(factor, node, indices)
        node, indices = below


def _layouts(result: Indices, above: Sequence[Node]) -> list[Atoms]:
    """The order of the result's Atoms as it is moved, the last first."""
    axes = [p.atoms for p in result]
    found = [flat(atoms_of(result))]
    for node in above:
        if node.op is ops.permute:
            axes = [axes[a] for a in node.attrs["order"]]
        elif node.op is ops.reshape:
            parts = split([a for axis in axes for a in axis], node.shape)
            if parts is None:
                break
            axes = parts
        found.append(tuple([a for axis in axes for a in axis]))
    return [flat(f) for f in reversed(found)]


def _dtype(root: Node, last: DType, sides: Sequence[Term]) -> DType:
    """The dtype of the attention: a narrow one where all sides have it and the result gets it."""
    own = [x.node.dtype for x in sides]
    if all(d is last for d in own) and last in FLOATS:
        return last
    found = reduce(promote, own, root.dtype)
    if found not in FLOATS:
        raise NoMatch(f"the result is {found}")
    return found


def order_of(lies: Atoms, by_letter: ByLetter) -> str | None:
    """The first of the ORDERS in which a value lies."""
    for order in ORDERS:
        if lies == tuple([a for letter in order for a in by_letter[letter]]):
            return order
    return None


def placed(x: Term, by_letter: ByLetter, dtype: DType) -> tuple[Node, str]:
    """A side as four axes, and their order."""
    node = x.node
    order = order_of(atoms_of(x.indices), by_letter) if full(node, x.indices) else None
    if order is None:
        order = "bhtd"
        every = tuple([a for letter in order for a in by_letter[letter]])
        node = build.expand(on_leaf(node, x.indices, every), tuple([a.size for a in every]))
    shape = tuple([size_of(by_letter[letter]) for letter in order])
    return build.cast(build.reshape(node, shape), dtype), order


def _row_scaled(q: Node, order: str, axes: Axes, row: Term, divides: bool) -> Node:
    """Queries times (or over) what each of them has one of."""
    wide = sum_dtype(q.dtype)
    value = axes.on_scores(summed([row], axes.scores))  # (b, h, i, 1)
    value = build.cast(attention.as_order(value, order), wide)
    scaled = (build.divide if divides else build.multiply)(build.cast(q, wide), value)
    return build.cast(scaled, q.dtype)


def _mean(v: Node, heads: Size) -> Node:
    """The mean of all values, (b, h, 1, d): what equal scores give."""
    batch, key_heads, keys, width = v.shape
    wide = sum_dtype(v.dtype)
    total = build.sum_(build.cast(v, wide), 2, keep=True)
    mean = build.divide(total, build.cast(build.size_value(keys), wide))
    group = heads // key_heads
    mean = build.expand(build.unsqueeze(mean, 2), (batch, key_heads, group, 1, width))
    return build.cast(build.reshape(mean, (batch, heads, 1, width)), v.dtype)


# ---- which axis is what ---------------------------------------------------------------------


class Match:
    """An attention that ends in a dot: its parts, which axes are what, the Node; NoMatch where
    there is none. `above` is how the result is moved and cast; what is `derived` afterwards has
    its derivatives."""

    def __init__(self, root: Node, above: Sequence[Node], derived: bool) -> None:
        self.root, self.derived = root, derived
        self.last = next((n.dtype for n in above if n.op is ops.cast), root.dtype)
        self.result = fresh(root.shape)
        sides, inner = operand_indices(root, self.result)
        keys = tuple([a for p in inner for a in p.atoms])
        if not keys:
            raise NoMatch("there is one key only")
        side, self.softmax = _probabilities(root, sides, keys)
        self.scores = find_scores(self.softmax.scores, keys)
        dot = self.scores.dot.node
        if not full(dot, self.scores.dot.indices):
            raise NoMatch("only a part of the scores is used")
        pair, widths = operand_indices(dot, self.scores.dot.indices)
        first = 0 if set(flat(keys)) & set(atoms_of(pair[1])) else 1
        self.q = operand(dot.inputs[first], pair[first])
        self.k = operand(dot.inputs[1 - first], pair[1 - first])
        self.v = operand(root.inputs[1 - side], sides[1 - side], scaled=False)
        layouts = _layouts(self.result, above)
        look_through(self.scores, self.softmax.sinks)
        own = set(atoms_of(sides[side]))
        self.keys = flat(keys)
        self.inner = set(atoms_of(widths))
        self.values = flat(tuple([a for a in flat(atoms_of(self.result)) if a not in own]))
        self.axes = self.find_axes()
        self.lies = [flat(x) for x in layouts]

    def find_axes(self) -> Axes:
        """Which Atoms are what."""
        keys, softmax, inner = self.keys, self.softmax, self.inner
        on_q, on_k, on_v = (set(atoms_of(x.indices)) for x in (self.q, self.k, self.v))
        if not inner <= on_q or not inner <= on_k or not inner:
            raise NoMatch("the dot of queries and keys contracts a repeated axis")
        if on_q & set(keys) or not set(keys) <= on_k or not set(keys) <= on_v:
            raise NoMatch("the keys are not an axis of keys and values alone")
        order = [a for a in atoms_of(softmax.power[1]) if a not in keys]
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
        width = tuple([a for a in atoms_of(self.q.indices) if a in inner])
        batch = tuple([a for a in rest if a not in key_heads])
        return Axes(batch, key_heads, group, queries, keys, width, self.values)

    def find_queries(self, own: list[Atom]) -> Atoms:
        """Of the axes that only queries have: the one masks compare with keys, or that is next."""
        keys, (power, indices) = self.keys, self.softmax.power
        compared: set[Atom] = set()
        for hidden in self.scores.hidden:
            for part in conditions(hidden.condition):
                for function in comparisons(part) or ():
                    if set(function.terms) & set(keys):
                        compared |= set(function.terms)
        found = tuple([a for a in own if a in compared])
        if found:
            return found
        last = next((n for n, p in enumerate(indices) if set(flat(p.atoms)) & set(keys)), 0)
        if last > 0:
            before = flat(indices[last - 1].atoms)
            found = tuple([a for a in own if a in before])
            if found or power.shape[last - 1] == 1:
                return found
        return tuple(own[-1:])

    def find_key_heads(self, rest: list[Atom], queries: Atoms) -> Atoms:
        """Of the axes that keys have: those of the last but the first axis of the scores."""
        power, indices = self.softmax.power
        needed = {a for t in self.softmax.sinks for a in depends(t.node, t.indices)}
        asked = tuple([a for a in rest if a in needed])
        if asked:
            return asked
        taken = {*self.keys, *queries}
        lead = [p for n, p in enumerate(indices) if not set(flat(p.atoms)) & taken]
        if lead and power.shape[indices.index(lead[-1])] == 1 and not queries:
            lead = lead[:-1]  # the axis of one query
        for number in range(len(lead) - 1, -1, -1):
            found = tuple([a for a in flat(lead[number].atoms) if a in rest])
            if found:
                if number > 0:
                    return tuple([a for a in found if isinstance(a.size, int)])
                return found[-1:] if len(found) > 1 and isinstance(found[-1].size, int) else ()
        return ()

    # ---- the Node ---------------------------------------------------------------------------

    def built(self) -> Node:
        """What replaces the last dot."""
        axes, scores = self.axes, self.scores
        dtype = _dtype(self.root, self.last, (self.q, self.k, self.v))
        of_k = {"b": axes.batch, "h": axes.key_heads, "t": axes.keys, "d": axes.width}
        of_q = {**of_k, "h": axes.heads, "t": axes.queries}
        of_v = {**of_k, "d": axes.value_width}
        pairs = ((self.q, of_q), (self.k, of_k), (self.v, of_v))
        (q, order_q), (k, order_k), (v, order_v) = (placed(*pair, dtype) for pair in pairs)
        for node, indices, divides in scores.rows:
            q = _row_scaled(q, order_q, axes, Term(1.0, node, indices), divides)
        extras = extras_of(axes, self.softmax, scores, self.derived)
        of_out = {**of_q, "d": axes.value_width}
        order = next((o for x in self.lies if (o := order_of(x, of_out)) is not None), "bhtd")
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
            dropout=0.0 if self.softmax.dropout is None else self.softmax.dropout.rate,
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
        out = build.reshape(on_leaf(out, indices, atoms_of(self.result)), self.root.shape)
        return build.cast(out, self.root.dtype)
