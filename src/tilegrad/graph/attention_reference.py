"""What `attention` and `attention_backward` mean, in NumPy: the judge of decomposition and kernels.

Everything is computed in float64 with keys and values repeated for every head, the probabilities
whole, and rounded once at the end. Invariant: written from the definition alone, sharing nothing
with the decomposition but the rule of dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .attention_types import dropout_threshold

Ndarray = np.ndarray[Any, Any]
Bits = Callable[[list[Any], dict[str, Any]], Any]  # the reference of random_bits


def _plain(x: Ndarray, order: str) -> Ndarray:
    return x.transpose([order.index(axis) for axis in "bhtd"]).astype(np.float64)


def _as(x: Ndarray, order: str) -> Ndarray:
    return x.transpose(["bhtd".index(axis) for axis in order])


def _numbers(count: int, starts: Ndarray | None) -> tuple[Ndarray, Ndarray]:
    """The number of each token in its sequence, and of the sequence; -1 for none."""
    number, sequence = np.arange(count), np.zeros(count, np.int64)
    if starts is not None:
        sequence[:] = -1
        for n, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
            sequence[start:end] = n
            number[start:end] = np.arange(max(min(end, count) - start, 0))
    return number, sequence


class Attention:
    """One attention on arrays: scores, probabilities, what was kept."""

    def __init__(
        self,
        q: Ndarray,
        k: Ndarray,
        v: Ndarray,
        more: list[Ndarray],
        attrs: dict[str, Any],
        bits: Bits,
    ) -> None:
        self.attrs, self.more = attrs, dict(zip(attrs["extras"], more))
        self.q, k, v = (_plain(x, o) for x, o in zip((q, k, v), attrs["orders"]))
        self.key_heads = k.shape[1]
        self.group = self.q.shape[1] // max(self.key_heads, 1)
        self.k, self.v = (np.repeat(x, self.group, axis=1) for x in (k, v))
        self.shape = (*self.q.shape[:3], k.shape[2])  # (b, h, i, j)
        i, of_i = _numbers(self.shape[2], self.more.get("query_starts"))
        j, of_j = _numbers(self.shape[3], self.more.get("key_starts"))
        self.difference = j[None, :] - i[:, None]
        together = (of_i[:, None] == of_j[None, :]) & (of_i >= 0)[:, None]
        self.scores = self._scores(self._seen() & together)
        self.keep = self._keep(bits)

    def _seen(self) -> Ndarray:
        seen = np.ones(self.shape, np.bool_)
        low, high = self.attrs["band"]
        if low is not None:
            seen &= self.difference >= low
        if high is not None:
            seen &= self.difference <= high
        if "key_lengths" in self.more:
            lengths = self.more["key_lengths"][:, None, None, None]
            seen &= np.arange(self.shape[3]) < lengths
        if "mask" in self.more:
            seen &= self.more["mask"]
        return seen

    def _scores(self, seen: Ndarray) -> Ndarray:
        scores = np.einsum("bhid,bhjd->bhij", self.q, self.k) * self.attrs["scale"]
        cap = self.attrs["softcap"]
        self.capping = np.ones(self.shape)  # the derivative of the softcap
        if cap > 0.0:
            scores = cap * np.tanh(scores / cap)
            self.capping = 1.0 - (scores / cap) ** 2
        if "bias" in self.more:
            scores = scores + self.more["bias"].astype(np.float64)
        if "slopes" in self.more:
            scores = scores + self._by_head("slopes") * self.difference
        return np.where(seen, scores, -np.inf)

    def _by_head(self, name: str) -> Ndarray:
        return self.more[name].astype(np.float64)[None, :, None, None]

    def _keep(self, bits: Bits) -> Ndarray:
        """The factor of each probability: 0 or 1 / (1 - rate)."""
        rate = self.attrs["dropout"]
        if rate == 0.0:
            return np.ones(self.shape)
        drawn = bits([self.more["key"], self.more["offset"]], {"shape": self.shape})
        return ((drawn >> np.uint32(8)) > dropout_threshold(rate)) / (1.0 - rate)

    def lse(self) -> Ndarray:
        """log of the sum of exp of the scores and the sink, (b, h, i)."""
        scores = self.scores
        if "sinks" in self.more:
            sinks = np.broadcast_to(self._by_head("sinks"), (*self.shape[:3], 1))
            scores = np.concatenate([scores, sinks], axis=3)
        top = np.max(scores, axis=3, initial=-np.inf)
        safe = np.where(top == -np.inf, 0.0, top)
        with np.errstate(divide="ignore"):  # nothing is seen
            return np.log(np.sum(np.exp(scores - safe[..., None]), axis=3)) + safe

    def probabilities(self, lse: Ndarray) -> Ndarray:
        """exp(scores - lse), 0 in a row that sees nothing."""
        return np.exp(self.scores - np.where(lse == -np.inf, 0.0, lse)[..., None])


def attention(inputs: list[Any], attrs: dict[str, Any], bits: Bits) -> tuple[Ndarray, ...]:
    """(out, lse)."""
    q, k, v, *more = inputs
    x = Attention(q, k, v, more, attrs, bits)
    lse = x.lse()
    out = np.einsum("bhij,bhje->bhie", x.probabilities(lse) * x.keep, x.v)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    return _as(out, attrs["orders"][3]).astype(q.dtype), lse.astype(wide)


def attention_backward(inputs: list[Any], attrs: dict[str, Any], bits: Bits) -> tuple[Ndarray, ...]:
    """(dq, dk, dv, gradients of the wanted extras)."""
    q, k, v, dout, lse, delta, *more = inputs
    x = Attention(q, k, v, more, attrs, bits)
    lse, delta = lse.astype(np.float64), delta.astype(np.float64)[..., None]
    p = x.probabilities(lse)
    given = _plain(dout, attrs["orders"][3])
    ds = p * (np.einsum("bhie,bhje->bhij", given, x.v) * x.keep - delta)
    raw = ds * x.capping * attrs["scale"]
    shared = (x.q.shape[0], x.key_heads, x.group, x.shape[3], -1)
    dv = np.einsum("bhij,bhie->bhje", p * x.keep, given).reshape(shared[:-1] + (v.shape[-1],))
    dk = np.einsum("bhij,bhid->bhjd", raw, x.q).reshape(shared[:-1] + (k.shape[-1],))
    dq = np.einsum("bhij,bhjd->bhid", raw, x.k)
    found = [_as(g, o).astype(q.dtype) for g, o in zip((dq, dk.sum(2), dv.sum(2)), attrs["orders"])]
    for name in attrs["wanted"]:
        found.append(_extra(x, name, ds, lse, delta).astype(x.more[name].dtype))
    return tuple(found)


def _extra(x: Attention, name: str, ds: Ndarray, lse: Ndarray, delta: Ndarray) -> Ndarray:
    if name == "slopes":
        return np.sum(ds * x.difference, axis=(0, 2, 3))
    if name == "sinks":
        sinks = x._by_head("sinks")
        p = np.exp(sinks - np.where(lse == -np.inf, 0.0, lse)[..., None])
        return np.sum(-p * delta, axis=(0, 2, 3))
    axes = tuple(i for i, s in enumerate(x.more["bias"].shape) if s == 1)
    return np.sum(ds, axis=axes, keepdims=True)
