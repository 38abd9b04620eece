"""The compiled steps of one decoder over one cache: decode by buckets, everything else ragged.

A decode step of n requests runs in the bucket of the next power of two, compiled once and run
again on the same Buffers: rows and starts are written when the requests change, and otherwise
nothing goes to the device. Every other step is one compiled function over Symbols: a chunk of 512
tokens costs the same as one compiled for just that size (measured with SmolLM2 on a CPU).
Invariant: results are those of `step`, whatever the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import nn
from ...ir.symbol import symbol
from ...tensor.creation import tensor
from ...tensor.jit import jit
from ...tensor.tensor import Tensor, no_grad
from ..decoder import Decoder
from .step import Rows, score, step, write

SCORED = 128  # tokens of a step that gives logprobs of all: their logits are held at once
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Part:
    """What one request has in a step: its slot, its tokens (None: the last id), if that is all."""

    slot: int
    tokens: Sequence[int] | None = None
    whole: bool = True  # its prompt ends here, so its next id counts


class Steps:
    """Runs steps; slots are rows of the cache's table, of which the last is nobody's."""

    def __init__(self, model: Decoder, cache: nn.PagedCache, rows: Rows, chunk: int,
                 tell: Tell) -> None:  # fmt: skip
        self.model, self.cache, self.rows, self.chunk = model, cache, rows, chunk
        self.nobody, self.tell = cache.requests - 1, tell
        tokens, requests = symbol("tokens", 1, chunk), symbol("requests", 1, max(2, self.nobody))
        self._ragged = jit(step, name="step", dynamic={
            "slots": {0: requests}, "into": {0: requests}, "starts": {0: requests + 1},
            "owner": {0: tokens}, "given": {0: tokens}})  # fmt: skip
        several = symbol("tokens", 1, SCORED)
        self._score = jit(score, dynamic={"given": {0: several}, "following": {0: several}})
        self._decode = jit(step, name="decode")
        self._buckets: dict[int, tuple[list[int], list[Tensor]]] = {}
        self._compiled: set[Any] = set()

    def decode(self, slots: Sequence[int]) -> np.ndarray[Any, Any]:
        """The next id of each slot, from its last one."""
        size = bucket_of(len(slots))
        if size not in self._buckets:
            fresh = [self._whole([self.nobody] * size), self._whole([0] * (size + 1))]
            self._buckets[size] = [], fresh
        members, (rows, starts) = self._buckets[size]
        if members != slots:
            members[:] = slots
            write(rows, 0, np.array([*slots, *[self.nobody] * (size - len(slots))]))
            write(starts, 0, np.minimum(np.arange(size + 1), len(slots)))
        found = self._run(("decode", size), self._decode, self.model, self.cache, self.rows, rows,
                          rows, starts)  # fmt: skip
        return found[: len(slots)]

    def ragged(self, parts: Sequence[Part]) -> np.ndarray[Any, Any]:
        """The next id of each part; that of one whose prompt goes on means nothing."""
        counts = [1 if p.tokens is None else len(p.tokens) for p in parts]
        given = [t for p in parts for t in ((-1,) if p.tokens is None else p.tokens)]
        found = self._run(
            "ragged", self._ragged, self.model, self.cache, self.rows,
            self._whole([p.slot for p in parts]),
            self._whole([p.slot if p.whole else self.nobody for p in parts]),
            self._whole(np.cumsum([0, *counts])),
            self._whole(np.repeat(np.arange(len(parts)), counts)), self._whole(given),
        )  # fmt: skip
        return found

    def score(self, slot: int, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """The logprob of each token but the first; the slot has no tokens yet."""
        found = []
        for first in range(0, len(tokens) - 1, SCORED):
            given = tokens[first : min(first + SCORED, len(tokens) - 1)]
            following = tokens[first + 1 : first + 1 + len(given)]
            found.append(self._run("score", self._score, self.model, self.cache,
                                   self._whole([slot]), self._whole([0, len(given)]),
                                   self._whole(given), self._whole(following)))  # fmt: skip
        return np.concatenate(found)

    def _run(self, key: Any, jitted: Any, *given: Any) -> np.ndarray[Any, Any]:
        """Call a jitted step; the first call of each kind compiles, which is told."""
        fresh = key not in self._compiled
        if fresh:
            self.tell("compile", 0, 1)
        with no_grad():
            found = jitted(*given)
        if fresh:
            self._compiled.add(key)
            self.tell("compile", 1, 1)
        return np.array(found.numpy())

    def _whole(self, values: Any) -> Tensor:
        return tensor(np.asarray(values, np.int32), device=self.cache.device)


def bucket_of(count: int) -> int:
    """The rows of the decode step for so many requests."""
    return 1 << (count - 1).bit_length()


__all__ = ["Part", "Steps", "bucket_of"]
