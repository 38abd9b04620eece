"""The compiled steps of one decoder over one cache: decode by buckets, everything else ragged.

A decode step of n requests runs in the bucket of the next power of two, compiled once and run
again on the same Buffers: rows and starts are written when the requests change, and otherwise
nothing goes to the device. The most keys of a request are a Symbol of that step, so a bucket has
one for each range of keys that `jit` compiles. Every other step is one compiled function over
Symbols: a chunk of 512 tokens costs the same as one compiled for just that size (measured with
SmolLM2 on a CPU). Sizes that come twice in a row, those of a long prompt's chunks, are bound too.
Invariant: results are those of `step`, whatever the bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import nn
from ..ir.symbol import symbol
from ..models.decoder.model import Decoder
from ..runtime.buffer import POOL
from ..runtime.prepared import telling
from ..tensor.bound import Bound, Pending
from ..tensor.creation import tensor
from ..tensor.jit import jit
from ..tensor.tensor import Tensor, no_grad
from .sampling import SamplingState, Variant
from .step import Rows, decode, score, step

CHUNKS_BOUND = 4  # sizes of ragged steps that are kept bound
SCORED = 128  # tokens of a step that gives logprobs of all: their logits are held at once
Array = np.ndarray[Any, Any]
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Part:
    """What one request has in a step: its slot, its tokens (None: the last id), if that is all."""

    slot: int
    tokens: Sequence[int] | None = None
    whole: bool = True  # its prompt ends here, so its next id counts


class Found(NamedTuple):
    """What a step gave, on the host: `Sampled` as arrays. An id may be NO_TOKEN."""

    ids: Array
    logprob: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


@dataclass(frozen=True)
class Launched:
    """A step that was begun."""

    last: Pending  # of all slots
    results: list[Pending]
    slots: Sequence[int]

    def wait(self) -> Found:
        """What it gave."""
        rows = len(self.slots)
        return Found(
            self.last.wait()[list(self.slots)], *(result.wait()[:rows] for result in self.results)
        )


@dataclass
class Bucket:
    """A decode step bound to its Buffers, and the slots that are written there."""

    bound: Bound
    slots: list[int]


class Steps:
    """Runs steps; slots are rows of the cache's table, of which the last is nobody's."""

    def __init__(
        self,
        model: Decoder,
        cache: nn.PagedCache,
        chunk: int,
        tell: Tell,
        words: int | None = None,
    ) -> None:
        """Ids from `words` on, which no tokenizer knows, are never picked."""
        self.model, self.cache, self.chunk, self.tell = model, cache, chunk, tell
        self.words = words if words is not None and words < model.config.vocabulary else None
        self.nobody = cache.requests - 1
        self.rows = Rows(cache.requests, cache.device)
        self._sampling: SamplingState | None = None  # made when a request needs one
        self._ragged = _ragged_step(chunk, self.nobody)
        several = symbol("tokens", 1, SCORED)
        self._score = jit(score, dynamic={"given": {0: several}, "following": {0: several}})
        self.most_keys = cache.most_pages * cache.page
        keys = symbol("keys", 1, self.most_keys)
        self._decode = jit(
            decode, name="decode", static=("variant", "words"), dynamic={"most": keys}
        )
        self._buckets: dict[tuple[int, Variant], list[Bucket]] = {}  # a step for each range of keys
        self._compiled: set[Any] = set()
        self._chunks: OrderedDict[Any, Bound] = OrderedDict()  # ragged steps by their sizes
        self._last_sizes: Any = None

    def sampling(self) -> SamplingState:
        """How slots sample; they take the likeliest token until they are told otherwise."""
        if self._sampling is None:
            self._sampling = SamplingState(
                self.nobody + 1, self.model.config.vocabulary, self.cache.device
            )
        return self._sampling

    def decode(self, slots: Sequence[int], variant: Variant, keys: int | None = None) -> Found:
        """The next id of each slot, from its last one; none has more than so many keys then."""
        return self.launch(slots, variant, keys).wait()

    def launch(self, slots: Sequence[int], variant: Variant, keys: int | None = None) -> Launched:
        """Begin what `decode` does; on a GPU nobody waits."""
        size = bucket_of(len(slots))
        most = self.most_keys if keys is None else min(keys, self.most_keys)
        buckets = self._buckets.setdefault((size, variant), [])
        bucket = next((b for b in buckets if b.bound.covers("keys", most)), None)
        if bucket is None:
            bucket = self._bind(size, variant, most)
            buckets.append(bucket)
        bound = bucket.bound
        if bucket.slots != slots:
            bucket.slots = list(slots)
            bound.write("slots", np.array([*slots, *[self.nobody] * (size - len(slots))], np.int32))
            bound.write("starts", np.minimum(np.arange(size + 1, dtype=np.int32), len(slots)))
        bound.run()
        return Launched(bound.read_later("rows.last"), _read(bound, variant), bucket.slots)

    def bound(self, size: int) -> Bound | None:
        """The decode step of so many rows that take the likeliest token, once one has run."""
        found = [b.bound for b in self._buckets.get((bucket_of(size), Variant()), [])]
        return min(found, key=lambda b: b.ranges.get("keys", (0, 0)), default=None)

    def _bind(self, size: int, variant: Variant, most: int) -> Bucket:
        def make() -> Bound:
            return self._decode.bind(
                self.model,
                self.cache,
                self.rows,
                self._sampler(variant),
                variant,
                most,
                self.words,
                self._whole([self.nobody] * size),
                self._whole([0] * (size + 1)),
            )

        key = ("decode", size, variant, len(self._buckets[size, variant]))
        return Bucket(self._first(lambda: key, make), [])

    def ragged(self, parts: Sequence[Part], variant: Variant) -> Found:
        """The next id of each part; that of one whose prompt goes on means nothing."""
        arrays = _arrays(parts, self.nobody)
        sizes = (len(parts), len(arrays["given"]), variant)
        bound = self._chunks.get(sizes)
        if bound is None and sizes == self._last_sizes:  # a long prompt: it comes again
            bound = self._chunks[sizes] = self._ragged.bind(
                *self._ragged_arguments(sizes, arrays), words=self.words
            )
            if len(self._chunks) > CHUNKS_BOUND:
                self._chunks.popitem(last=False)
        self._last_sizes = sizes
        if bound is not None:
            for name, array in arrays.items():
                bound.write(name, array)
            bound.run()
            last, found = bound.read("rows.last"), [p.wait() for p in _read(bound, variant)]
        else:
            made = self._first(
                lambda: ("ragged", variant, self._ragged.range_of("tokens", sizes[1])),
                lambda: self._ragged(*self._ragged_arguments(sizes, arrays), words=self.words),
            )
            last = self.rows.last.numpy()
            found = [np.array(f.numpy()) for f in made if f is not None]
        return Found(last[[part.slot for part in parts]], *found)

    def _ragged_arguments(self, sizes: Any, arrays: dict[str, Array]) -> list[Any]:
        variant = sizes[-1]
        return [
            self.model,
            self.cache,
            self.rows,
            self._sampler(variant),
            variant,
            *(self._whole(a) for a in arrays.values()),
        ]

    def score(self, slot: int, tokens: Sequence[int]) -> Array:
        """The logprob of each token but the first; the slot has no tokens yet."""
        found = []
        for first in range(0, len(tokens) - 1, SCORED):
            given = tokens[first : min(first + SCORED, len(tokens) - 1)]
            following = tokens[first + 1 : first + 1 + len(given)]
            arguments = [self._whole(a) for a in ([slot], [0, len(given)], given, following)]
            made = self._first(
                lambda: "score", partial(self._score, self.model, self.cache, *arguments)
            )
            found.append(np.array(made.numpy()))
        return np.concatenate(found)

    def _sampler(self, variant: Variant) -> SamplingState | None:
        return None if variant == Variant() else self.sampling()

    def _first(self, key: Callable[[], Any], work: Callable[[], Any]) -> Any:
        """Do something; the first time of each kind it compiles, which is told."""
        with no_grad():
            if key() in self._compiled:
                return work()
            self.tell("compile", 0, 1)
            with telling(self.tell):  # weights are prepared then
                found = work()
        self._compiled.add(key())  # its range is known now
        POOL.trim()  # compiling leaves much behind
        self.tell("compile", 1, 1)
        return found

    def _whole(self, values: Any) -> Tensor:
        return tensor(np.asarray(values, np.int32), device=self.cache.device)


def _ragged_step(most: int, nobody: int) -> Any:
    """The jitted step over so many tokens."""
    tokens, requests = symbol("tokens", 1, most), symbol("requests", 1, max(2, nobody))
    return jit(
        step,
        name="step",
        static=("variant", "words"),
        dynamic={
            "slots": {0: requests},
            "into": {0: requests},
            "starts": {0: requests + 1},
            "owner": {0: tokens},
            "given": {0: tokens},
        },
    )


def _arrays(parts: Sequence[Part], nobody: int) -> dict[str, Array]:
    """What a ragged step takes, by the names of its arguments."""
    counts = [1 if p.tokens is None else len(p.tokens) for p in parts]
    given = [np.asarray((-1,) if p.tokens is None else p.tokens, np.int32) for p in parts]
    made = {
        "slots": [p.slot for p in parts],
        "starts": np.cumsum([0, *counts]),
        "into": [p.slot if p.whole else nobody for p in parts],
        "owner": np.repeat(np.arange(len(parts)), counts),
        "given": np.concatenate(given),
    }
    return {name: np.asarray(values, np.int32) for name, values in made.items()}


def bucket_of(count: int) -> int:
    """The rows of the decode step for so many requests."""
    return 1 << (count - 1).bit_length()


def _read(bound: Bound, variant: Variant) -> list[Pending]:
    """What a step gives besides ids."""
    return [bound.read_later(i) for i in range(3 if variant.logprobs else 0)]


__all__ = ["Found", "Launched", "Part", "Steps", "bucket_of"]
