"""Attention in ordinary ops: how it is built, and what it and its backward decompose into.

Scores have the axes (batch, key heads, group, queries, keys): the query heads that share a key
head are an axis of their own, so keys and values are never repeated. Decompositions serve
derivatives of attention_backward, tangents, batches that do not fold into b, and Targets with
no kernel. Invariant: a row that sees nothing gives 0 and -inf, and no nan in any derivative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, reduce
from typing import Any

from ..core.dtype import bfloat16, int32, uint32
from ..ir.node import Node
from . import build, ops
from .attention_types import EXTRAS, dropout_threshold, sizes


def attention(q: Node, k: Node, v: Node, more: Mapping[str, Node], **attrs: Any) -> list[Node]:
    """The items (out, lse) of an attention Node; `more` gives the extras by name."""
    extras = tuple(sorted(more, key=list(EXTRAS).index))
    inputs = (q, k, v, *(more[name] for name in extras))
    return build.items(ops.attention(*inputs, **attrs, extras=extras))


def extras_of(node: Node) -> dict[str, Node]:
    """The further inputs of an attention or attention_backward Node by name."""
    extras = node.attrs["extras"]
    return dict(zip(extras, node.inputs[len(node.inputs) - len(extras) :]))


def heads_first(x: Node, order: str) -> Node:
    """x as (b, h, t, d)."""
    return build.permute(x, [order.index(axis) for axis in "bhtd"])


def as_order(x: Node, order: str) -> Node:
    """(b, h, t, d) in another order."""
    return build.permute(x, ["bhtd".index(axis) for axis in order])


class _Scores:
    """The scores of an attention Node and what they are made of; wide is their dtype."""

    def __init__(self, node: Node) -> None:
        self.attrs, self.extras = node.attrs, extras_of(node)
        self.dtype = node.inputs[0].dtype
        self.wide = self.dtype.wide
        self.low = bfloat16 if self.dtype.bits < 16 else self.dtype  # of what dots take
        q, k, v = node.inputs[:3]
        self.sizes = sizes(node.inputs, node.attrs["orders"])
        q, k, v = (heads_first(x, o) for x, o in zip((q, k, v), node.attrs["orders"]))
        self.q, self.k, self.v = self.grouped(q), k, v  # (b, hk, g, i, d), (b, hk, j, d or e)
        s = self.sizes
        self.shape = (s.batch, s.key_heads, s.group, s.queries, s.keys)

    def grouped(self, x: Node) -> Node:
        """(b, h, ...) as (b, hk, g, ...); a size 1 of h becomes two."""
        s = self.sizes
        heads = (1, 1) if x.shape[1] == 1 else (s.key_heads, s.group)
        return build.reshape(x, (x.shape[0], *heads, *x.shape[2:]))

    def added(self, name: str) -> Node:
        """A bias, slopes or sinks on the axes of the scores."""
        x = build.cast(self.extras[name], self.wide)
        return self.grouped(x if name == "bias" else build.reshape(x, (1, x.shape[0], 1, 1)))

    @cached_property
    def positions(self) -> tuple[Node, Node, Node | None]:
        """Numbers of queries (i, 1) and keys (1, j) in their sequences; which pairs share one."""
        i, j = build.iota(self.sizes.queries, int32), build.iota(self.sizes.keys, int32)
        together = None
        if "query_starts" in self.extras:
            i, of_i = _in_sequence(i, self.extras["query_starts"])
            j, of_j = _in_sequence(j, self.extras["key_starts"])
            last = build.size_value(build.offset_size(self.extras["key_starts"].shape[0], -1))
            before = build.less(of_j, build.cast(last, int32))
            inside = and_masks(build.less_equal(0, of_j), before)
            equal = build.equal(build.unsqueeze(of_i, 1), build.unsqueeze(of_j, 0))
            together = and_masks(equal, build.unsqueeze(inside, 0))
        return build.unsqueeze(i, 1), build.unsqueeze(j, 0), together

    @property
    def difference(self) -> Node:
        """j - i, (i, j)."""
        i, j, _ = self.positions
        return build.subtract(j, i)

    @cached_property
    def seen(self) -> Node | None:
        """Which keys a query sees, over axes that broadcast to the scores; None for all."""
        found = []
        for bound, low in zip(self.attrs["band"], (True, False)):
            if bound is not None:
                limit = build.cast(build.size_value(bound), int32)
                pair = (limit, self.difference) if low else (self.difference, limit)
                found.append(build.less_equal(*pair))
        if self.positions[2] is not None:
            found.append(self.positions[2])
        if "key_lengths" in self.extras:
            lengths = build.reshape(self.extras["key_lengths"], (self.sizes.batch, 1, 1, 1, 1))
            found.append(build.less(build.iota(self.sizes.keys, int32), lengths))
        if "mask" in self.extras:
            found.append(self.grouped(self.extras["mask"]))
        return reduce(and_masks, found) if found else None

    @cached_property
    def capped(self) -> Node:
        """Scaled scores after the softcap, before anything is added."""
        raw = build.dot(self.q, self.k, ((0, 1), (0, 1)), ((4,), (3,)), self.wide)
        if self.attrs["softcap"] == 0.0:
            return build.multiply(raw, self.attrs["scale"])
        cap = self.attrs["softcap"]
        return build.multiply(ops.tanh(build.multiply(raw, self.attrs["scale"] / cap)), cap)

    @cached_property
    def scores(self) -> Node:
        """The scores, -inf where nothing is seen."""
        total = self.capped
        if "bias" in self.extras:
            total = build.add(total, self.added("bias"))
        if "slopes" in self.extras:
            steps = build.cast(self.difference, self.wide)
            total = build.add(total, build.multiply(self.added("slopes"), steps))
        return total if self.seen is None else build.where(self.seen, total, -math.inf)

    def dropped(self, x: Node) -> Node:
        """x / (1 - rate) where dropout keeps it, else 0."""
        rate = self.attrs["dropout"]
        if rate == 0.0:
            return x
        bits = ops.random_bits(
            self.extras["key"], self.extras["offset"], shape=self.sizes.scores
        )  # the linear index of (b, h, i, j) is that of (b, hk, g, i, j)
        bits = build.reshape(bits, self.shape)
        top = ops.shift_right(bits, build.full(bits.shape, 8, uint32))
        keep = build.less(build.full((), dropout_threshold(rate), uint32), top)
        return build.where(keep, build.multiply(x, 1.0 / (1.0 - rate)), 0.0)


def and_masks(a: Node, b: Node) -> Node:
    """Where two masks hold."""
    return build.binary(ops.bit_and, a, b)


def _in_sequence(token: Node, starts: Node) -> tuple[Node, Node]:
    """Numbers of tokens in their sequences, and of those sequences: -1 or the last + 1 for none."""
    begun = build.less_equal(build.unsqueeze(starts, 0), build.unsqueeze(token, 1))
    sequence = build.subtract(build.sum_(build.cast(begun, int32), 1), 1)
    start = build.gather(starts, [build.maximum(sequence, 0)], (0,))
    return build.subtract(token, start), sequence


def decompose_attention(node: Node) -> list[Node]:
    """(out, lse) of an attention Node in ordinary ops."""
    x = _Scores(node)
    top = ops.stop_gradient(build.max_(x.scores, 4, keep=True))
    sinks = x.added("sinks") if "sinks" in x.extras else None
    if sinks is not None:
        top = build.maximum(top, ops.stop_gradient(sinks))
    top = build.where(build.equal(top, -math.inf), 0.0, top)
    powers = ops.exp(build.subtract(x.scores, top))
    total = build.sum_(powers, 4, keep=True)
    if sinks is not None:
        total = build.add(total, ops.exp(build.subtract(sinks, top)))
    nothing = build.equal(total, 0.0)
    safe = build.where(nothing, 1.0, total)
    kept = build.cast(x.dropped(powers), x.low)
    mixed = build.dot(kept, x.v, ((0, 1), (0, 1)), ((4,), (2,)), x.wide)
    out = build.cast(build.divide(mixed, safe), x.dtype)
    out = build.reshape(out, x.sizes.result("bhtd"))
    lse = build.where(nothing, -math.inf, build.add(ops.log(safe), top))
    return [as_order(out, x.attrs["orders"][3]), build.reshape(lse, x.sizes.rows)]


def decompose_attention_backward(node: Node) -> list[Node]:
    """The gradients of an attention_backward Node in ordinary ops."""
    x, orders = _Scores(node), node.attrs["orders"]
    dout = x.grouped(heads_first(node.inputs[3], orders[3]))  # (b, hk, g, i, e)
    lse, delta = (build.unsqueeze(x.grouped(n), 4) for n in node.inputs[4:6])  # (b, hk, g, i, 1)
    lse = build.where(build.equal(lse, -math.inf), 0.0, lse)
    p = ops.exp(build.subtract(x.scores, lse))
    dp = x.dropped(build.dot(dout, x.v, ((0, 1), (0, 1)), ((4,), (3,)), x.wide))
    ds = build.multiply(p, build.subtract(dp, delta))
    rows = ((2, 3), (2, 3))
    dv = build.dot(build.cast(x.dropped(p), x.low), dout, ((0, 1), (0, 1)), rows, x.wide)
    raw = ds
    if x.attrs["softcap"] > 0.0:
        part = build.multiply(x.capped, 1.0 / x.attrs["softcap"])
        raw = build.multiply(ds, build.subtract(1.0, build.multiply(part, part)))
    raw = build.cast(raw, x.low)
    dq = build.dot(raw, x.k, ((0, 1), (0, 1)), ((4,), (2,)), x.wide)
    dk = build.dot(raw, x.q, ((0, 1), (0, 1)), rows, x.wide)
    dq, dk = (build.multiply(g, x.attrs["scale"]) for g in (dq, dk))
    dq = build.reshape(dq, (*x.sizes.rows, x.sizes.width))
    found = [as_order(build.cast(g, x.dtype), o) for g, o in zip((dq, dk, dv), orders)]
    return found + [_extra_gradient(x, name, ds, lse, delta) for name in node.attrs["wanted"]]


def _extra_gradient(x: _Scores, name: str, ds: Node, lse: Node, delta: Node) -> Node:
    """The gradient of bias, slopes or sinks."""
    if name == "slopes":
        ds = build.multiply(ds, build.cast(x.difference, x.wide))
    elif name == "sinks":
        p = ops.exp(build.subtract(x.added("sinks"), lse))
        ds = build.multiply(p, build.negative(delta))
    total, given = build.sum_to(ds, x.added(name).shape), x.extras[name]
    return build.cast(build.reshape(total, given.shape), given.dtype)


def decompose(node: Node) -> list[Node]:
    """The items of an attention or attention_backward Node in ordinary ops."""
    return (decompose_attention if node.op is ops.attention else decompose_attention_backward)(node)
