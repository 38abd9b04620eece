"""The compiled steps of one decoder over one cache, bound to sizes that pad.

A decode step (every row has one token, which is on the device) is compiled for its number of rows.
Every other step is one compiled function over Symbols, bound to sizes of rows and tokens (`sizes`).
What a step takes is one Ledger that all of them read: the host writes it once a step, or not at
all where a decode step goes on as the last. Sizes are made when they are first met, or all of them
before by `prepare`; then nothing is compiled or bound any more, whatever comes.
The most keys of a request are a Symbol of a decode step, so a size has one for each range of keys
that `jit` compiles. Invariant: results are those of `step`, whatever the size.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import nn
from ..compiler.loader import counters
from ..core.collector import no_collection
from ..core.dtype import int32
from ..core.errors import user_location
from ..ir.node import located
from ..ir.symbol import symbol
from ..models.decoder.model import Decoder
from ..runtime.buffer import POOL
from ..runtime.prepared import telling
from ..tensor.bound import Bound, Pending
from ..tensor.creation import tensor
from ..tensor.jit import jit
from ..tensor.lowered import Lowered
from ..tensor.tensor import Tensor, no_grad
from .ledger import Ledger
from .sampling import SamplingState, Variant
from .sizes import (
    by_rows,
    decode_sizes,
    next_power,
    next_size,
    powers_up_to,
    prompt_sizes,
    rare_prompt_sizes,
    verify_sizes,
)
from .step import Rows, decode, score, step, verify

SCORED = 128  # tokens of a step that gives logprobs of all: their logits are held at once
ROWS = ("slots", "tails", "columns", "starts", "into", "lengths")  # of a step, an entry a row
TOKENS = ("owner", "given")
Array = np.ndarray[Any, Any]
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class Part:
    """What one request has in a step with prompts."""

    slot: int
    tail: int  # the page of its last token
    length: int  # keys that it has after the step
    tokens: Sequence[int] | None = None  # None: the last id, which is on the device
    whole: bool = True  # no token is left, so its next id counts


class Found(NamedTuple):
    """What a step gave, on the host: `Sampled` as arrays. An id may be NO_TOKEN."""

    ids: Array
    logprob: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was begun."""

    ids: Pending  # of all slots, or of the rows
    results: list[Pending]
    slots: Sequence[int]
    by_row: bool = False

    def wait(self) -> Found:
        """What it gave."""
        rows, ids = len(self.slots), self.ids.wait()
        ids = ids[:rows] if self.by_row else ids[list(self.slots)]
        return Found(ids, *(result.wait()[:rows] for result in self.results))


class Steps:
    """Runs steps; slots are rows of the cache's table, of which the last is nobody's."""

    def __init__(
        self,
        model: Decoder,
        cache: nn.PagedCache,
        rows: Rows,
        chunk: int,
        tell: Tell,
        words: int | None = None,
        guesses: int = 0,
    ) -> None:
        """Ids from `words` on, which no tokenizer knows, are never picked.

        `verify` has at most so many `guesses` more than there are requests.
        """
        self.model, self.cache, self.rows = model, cache, rows
        self.chunk, self.tell = chunk, tell
        self.words = words if words is not None and words < model.config.vocabulary else None
        self.nobody = cache.requests - 1
        self._sampling: SamplingState | None = None  # made when a request needs one
        shapes = {name: ((cache.requests + 1 + guesses,), int32) for name in ROWS}
        shapes |= {name: ((chunk + guesses,), int32) for name in TOKENS}
        self._orders = Ledger(shapes, cache.device)
        self._ragged = _ragged_step(chunk, self.nobody)
        several = symbol("tokens", 1, SCORED)
        dynamic = {"given": {0: several}, "following": {0: several}}
        self._score = jit(score, static=("shown",), dynamic=dynamic)
        self.most_keys = cache.most_pages * cache.page
        keys = symbol("keys", 1, self.most_keys)
        self._decode = jit(
            decode, name="decode", static=("variant", "words"), dynamic={"most": keys}
        )
        self._prompts = by_rows(prompt_sizes(chunk, self.nobody))
        self._rare_prompts = by_rows(rare_prompt_sizes(chunk, self.nobody))
        self._verify = jit(
            verify, name="verify", static=("variant", "words"), dynamic={"most": keys}
        )
        self._guessed = verify_sizes(self.nobody, guesses) if guesses else []
        self._decoding: dict[tuple[int, Variant], list[Bound]] = {}  # one for each range of keys
        self._verifying: dict[tuple[int, Variant], list[Bound]] = {}
        self._chunks: dict[tuple[int, int, Variant], Bound] = {}  # by rows and tokens
        self._compiled: set[Any] = set()
        self._served: tuple[Variant, ...] = ()
        self._preparing: tuple[Variant, ...] = ()  # until something was compiled
        self._written: tuple[Any, ...] = ()  # the decode step that the Ledger has

    def sampling(self) -> SamplingState:
        """How slots sample; they take the likeliest token until they are told otherwise."""
        if self._sampling is None:
            self._sampling = SamplingState(
                self.nobody + 1, self.model.config.vocabulary, self.cache.device
            )
            self._sampling.close_row(self.nobody)
        return self._sampling

    # ---- decode ---------------------------------------------------------------------------------

    def decode(
        self,
        slots: Sequence[int],
        tails: Sequence[int],
        columns: Sequence[int],
        variant: Variant,
        keys: int | None = None,
    ) -> Launched:
        """Begin a step that gives each slot its next id, from its last one.

        `tails` are the pages of those last ones, in these `columns` of the table; none has more
        than so many keys then. Lists of slots and tails that are those of the step before are not
        written again. On a GPU nobody waits.
        """
        variant = self._serving(variant)
        most = self.most_keys if keys is None else min(keys, self.most_keys)
        size, bound = self._decode_bound(len(slots), variant, most)
        if not self._written or self._written[0] is not slots or self._written[1:] != (tails, size):
            host, count = self._orders.host, len(slots)
            given = {"slots": slots, "tails": tails, "columns": columns}
            for name, numbers in given.items():
                host[name][count:size] = self.nobody if name == "slots" else 0
                host[name][:count] = numbers
            host["starts"][: size + 1] = np.minimum(np.arange(size + 1), count)
            self._orders.send("starts", size + 1)
            self._written = (slots, tails, size)
        bound.run()
        return Launched(bound.read_later("rows.last"), _read(bound, variant), slots)

    def bound(self, rows: int) -> Bound | None:
        """The decode step of so many rows that take the likeliest token, once one has run."""
        sizes = [s for s, v in self._decoding if s >= rows and v == Variant()]
        found = self._decoding[min(sizes), Variant()] if sizes else []
        return min(found, key=lambda b: b.ranges.get("keys", (0, 0)), default=None)

    def _decode_bound(self, rows: int, variant: Variant, most: int) -> tuple[int, Bound]:
        """The smallest decode step there is, or a new one: of a size that is served, else of the
        next power of two, or of all."""
        if variant in self._served:
            size = next_size(self._decode_sizes(variant), rows)
        else:
            size = min(next_power(rows), self.nobody)
            made = [s for s, v in self._decoding if v == variant and rows <= s <= size]
            size = min(made, default=size)
        several = self._decoding.setdefault((size, variant), [])
        found = next((b for b in several if b.covers("keys", most)), None)
        if found is None:
            found = self._bind_decode(size, variant, most)
            several.append(found)
        return size, found

    def _decode_sizes(self, variant: Variant) -> list[int]:
        if variant in self._served[1:]:
            return powers_up_to(self.nobody)
        return decode_sizes(self.nobody)

    def _bind_decode(self, size: int, variant: Variant, most: int) -> Bound:
        key = ("decode", size, variant, len(self._decoding.get((size, variant), ())))
        given = self._decode_arguments(size, variant, most)
        found: Bound = self._first(lambda: key, partial(self._decode.bind, *given))
        return found

    def _decode_arguments(self, size: int, variant: Variant, most: int) -> tuple[Any, ...]:
        orders = self._orders
        given = (orders.tensor("slots", size), orders.tensor("starts", size + 1))
        last = (orders.tensor("tails", size), orders.tensor("columns", size))
        return (*self._state(variant), most, self.words, *given, *last)

    def _state(self, variant: Variant) -> tuple[Any, ...]:
        """What every step takes first."""
        return self.model, self.cache, self.rows, self._sampler(variant), variant

    # ---- guesses --------------------------------------------------------------------------------

    def verify(
        self, orders: Mapping[str, Sequence[int]], variant: Variant, keys: int | None = None
    ) -> Launched:
        """Begin a step whose rows have one given token each; rows of a slot follow each other.

        `orders` has `slots`, `tails`, `given` and `lengths`, as `step` takes them.
        """
        variant, count = self._serving(variant), len(orders["slots"])
        most = self.most_keys if keys is None else min(keys, self.most_keys)
        size, host = next_size(self._guessed, count), self._orders.host
        bound = self._verify_bound(size, variant, most)
        for name, padding in (("slots", self.nobody), ("tails", 0), ("given", 0), ("lengths", 0)):
            host[name][:count], host[name][count:size] = orders[name], padding
        host["starts"][: size + 1] = np.minimum(np.arange(size + 1), count)
        self._orders.send("given", size)
        self._written = ()
        bound.run()
        results = _read(bound, variant, 1)
        return Launched(bound.read_later(0), results, orders["slots"], by_row=True)

    def _verify_bound(self, size: int, variant: Variant, most: int) -> Bound:
        several = self._verifying.setdefault((size, variant), [])
        found = next((b for b in several if b.covers("keys", most)), None)
        if found is None:
            found = self._bind_verify(size, variant, most)
            several.append(found)
        return found

    def _bind_verify(self, size: int, variant: Variant, most: int) -> Bound:
        key = ("verify", size, variant, len(self._verifying.get((size, variant), ())))
        given = self._verify_arguments(size, variant, most)
        found: Bound = self._first(lambda: key, partial(self._verify.bind, *given))
        return found

    def _verify_arguments(self, size: int, variant: Variant, most: int) -> tuple[Any, ...]:
        names = {"slots": 0, "starts": 1, "tails": 0, "given": 0, "lengths": 0}
        given = [self._orders.tensor(name, size + more) for name, more in names.items()]
        return (*self._state(variant), most, self.words, *given)

    # ---- prompts --------------------------------------------------------------------------------

    def ragged(self, parts: Sequence[Part], variant: Variant) -> Launched:
        """Begin a step over any tokens of requests; one that is not whole has no id."""
        variant = self._serving(variant)
        counts = [1 if p.tokens is None else len(p.tokens) for p in parts]
        bound, rows, tokens = self._ragged_bound(len(parts), sum(counts), variant)
        self._put(parts, counts, rows, tokens)
        bound.run()
        slots = [p.slot for p in parts]
        return Launched(bound.read_later("rows.last"), _read(bound, variant), slots)

    def _put(self, parts: Sequence[Part], counts: list[int], rows: int, tokens: int) -> None:
        """Write what a step with prompts takes; what is left of its size pads."""
        host, used, total = self._orders.host, len(parts), sum(counts)
        for name in ("slots", "into"):
            host[name][used:rows] = self.nobody
        for name in ("tails", "columns"):
            host[name][used:rows] = 0
        host["lengths"][used:rows], host["starts"][used + 1 : rows + 1] = 0, total
        host["slots"][:used] = [p.slot for p in parts]
        host["tails"][:used] = [p.tail for p in parts]
        host["columns"][:used] = [(p.length - 1) // self.cache.page for p in parts]
        host["into"][:used] = [p.slot if p.whole else self.nobody for p in parts]
        host["lengths"][:used] = [p.length for p in parts]
        host["starts"][: used + 1] = np.cumsum([0, *counts])
        host["owner"][:total] = np.repeat(np.arange(used), counts)
        host["owner"][total:tokens], host["given"][total:tokens] = -1, 0
        ids = [(-1,) if p.tokens is None else p.tokens for p in parts]
        host["given"][:total] = np.concatenate([np.asarray(i, np.int32) for i in ids])
        self._orders.send("given", tokens)
        self._written = ()

    def _ragged_bound(self, rows: int, tokens: int, variant: Variant) -> tuple[Bound, int, int]:
        """The step of the next larger size."""
        sizes = self._prompt_sizes(variant)
        row = next_size(list(sizes), rows)
        size = next_size(sizes[row], tokens)
        bound = self._chunks.get((row, size, variant))
        if bound is None:
            bound = self._chunks[row, size, variant] = self._bind_ragged(row, size, variant)
        return bound, row, size

    def _prompt_sizes(self, variant: Variant) -> dict[int, list[int]]:
        return self._rare_prompts if variant in self._served[1:] else self._prompts

    def _bind_ragged(self, rows: int, tokens: int, variant: Variant) -> Bound:
        given = self._ragged_arguments(rows, tokens)
        found: Bound = self._first(
            lambda: ("ragged", variant, self._ragged.range_of("tokens", tokens)),
            partial(self._ragged.bind, *self._state(variant), **given),
        )
        return found

    def _ragged_arguments(self, rows: int, tokens: int) -> dict[str, Any]:
        sizes = {name: rows + (name == "starts") for name in ROWS}
        sizes |= dict.fromkeys(TOKENS, tokens)
        given = {name: self._orders.tensor(name, size) for name, size in sizes.items()}
        return {**given, "words": self.words}

    # ---- before the first request ---------------------------------------------------------------

    def prepare(self, variants: Sequence[Variant], tell: Tell) -> None:
        """Make all sizes for these Variants, the only ones from now on; those but the first are
        rarely needed, so they have few sizes."""
        self.serve(variants)
        work: list[tuple[Any, ...]] = []
        for variant in variants:
            decoding = reversed(self._decode_sizes(variant))
            work += [(self._make_decode, size, variant) for size in decoding]
            for rows, tokens in reversed(self._prompt_sizes(variant).items()):
                work += [(self._ragged_bound, rows, size, variant) for size in reversed(tokens)]
            work += [(self._make_verify, size, variant) for size in reversed(self._guessed)]
        self._preparing = self._served
        try:
            with no_collection():
                for number, (make, *sizes) in enumerate(work):
                    tell("prepare", number, len(work))
                    make(*sizes)
                gc.freeze()  # all of it stays: no collection looks at it again
        finally:
            self._preparing = ()
        tell("prepare", len(work), len(work))

    def _compile_ahead(self, variants: Sequence[Variant]) -> None:
        """Compile what the Store has not, side by side, before it is bound one by one."""
        from ..compiler.ahead import compile_ahead

        with no_grad(), located(user_location()):
            compile_ahead(one.wanted for one in self._traced(variants))

    def _traced(self, variants: Sequence[Variant]) -> Iterator[Lowered]:
        """The traces of all decode steps, of all steps with prompts and of all that verify
        guesses, each range once."""
        for variant in variants:
            for size in reversed(self._decode_sizes(variant)):
                given = partial(self._decode_arguments, size, variant)
                yield from self._traced_ranges(self._decode, given)
            known: list[tuple[int, int]] = []
            sizes = self._prompt_sizes(variant)
            for rows, tokens in [(row, size) for row in sizes for size in sizes[row]]:
                if not any(low <= tokens <= high for low, high in known):
                    orders = self._ragged_arguments(rows, tokens)
                    found = self._ragged.lower(*self._state(variant), **orders)
                    yield found
                    known.append(found.ranges.get("tokens", (1, self.chunk)))
            for size in reversed(self._guessed):
                given = partial(self._verify_arguments, size, variant)
                yield from self._traced_ranges(self._verify, given)

    def _traced_ranges(
        self, step: Any, given: Callable[[int], tuple[Any, ...]]
    ) -> Iterator[Lowered]:
        """The traces of a step, one for each range of keys."""
        most = 1
        while most <= self.most_keys:
            found = step.lower(*given(most))
            yield found
            most = found.ranges.get("keys", (1, self.most_keys))[1] + 1

    def _make_decode(self, size: int, variant: Variant) -> None:
        """The decode steps of one size, for all ranges of keys."""
        several = self._decoding.setdefault((size, variant), [])
        self._make_ranges(several, partial(self._bind_decode, size, variant))

    def _make_verify(self, size: int, variant: Variant) -> None:
        """The same of steps that verify guesses."""
        several = self._verifying.setdefault((size, variant), [])
        self._make_ranges(several, partial(self._bind_verify, size, variant))

    def _make_ranges(self, several: list[Bound], bind: Callable[[int], Bound]) -> None:
        most = 1
        while most <= self.most_keys:
            found = next((b for b in several if b.covers("keys", most)), None)
            if found is None:
                found = bind(most)
                several.append(found)
            most = found.ranges.get("keys", (1, self.most_keys))[1] + 1

    def serve(self, variants: Sequence[Variant]) -> None:
        """Use these Variants alone from now on; they are made when a request first needs them."""
        self._served = tuple(variants)

    def _serving(self, wanted: Variant) -> Variant:
        """The Variant that does what is wanted: that one, or the first served that does."""
        return next((v for v in self._served if v.joined(wanted) == v), wanted)

    # ---- scores ---------------------------------------------------------------------------------

    def score(
        self, slot: int, given: Sequence[int], following: Sequence[int], shown: int = 0
    ) -> list[Array]:
        """What `step.score` gives for the next tokens of a slot, SCORED at most."""
        where = (self._whole([slot]), self._whole([0, len(given)]))
        tokens = (self._whole(given), self._whole(following))
        state = (self.model, self.cache, self.rows.adapters)
        work = partial(self._score, *state, *where, *tokens, shown)
        return [np.array(one.numpy()) for one in self._first(lambda: ("score", shown), work)]

    def scored_alike(self, count: int) -> tuple[int, int]:
        """The least and most tokens that are scored by the same step as so many."""
        found: tuple[int, int] = self._score.range_of("tokens", count)
        return found

    def _sampler(self, variant: Variant) -> SamplingState | None:
        return None if variant == Variant() else self.sampling()

    def _first(self, key: Callable[[], Any], work: Callable[[], Any]) -> Any:
        """Do something; the first time of each kind it compiles, which is told."""
        with no_grad(), located(user_location()):
            if key() in self._compiled:
                return work()
            self.tell("compile", 0, 1)
            before = counters["compiled"]
            with telling(self.tell):  # weights are prepared then
                found = work()
        self._compiled.add(key())  # its range is known now
        POOL.trim()  # compiling leaves much behind
        self.tell("compile", 1, 1)
        if self._preparing and counters["compiled"] > before:  # others will be missing too
            variants, self._preparing = self._preparing, ()
            self._compile_ahead(variants)
        return found

    def _whole(self, values: Any) -> Tensor:
        return tensor(np.asarray(values, np.int32), device=self.cache.device)


def _ragged_step(most: int, nobody: int) -> Any:
    """The jitted step over so many tokens."""
    tokens, requests = symbol("tokens", 1, most), symbol("requests", 1, max(2, nobody))
    rows = {name: {0: requests} for name in ROWS} | {"starts": {0: requests + 1}}
    dynamic = {**rows, **{name: {0: tokens} for name in TOKENS}}
    return jit(step, name="step", static=("variant", "words"), dynamic=dynamic)


def _read(bound: Bound, variant: Variant, first: int = 0) -> list[Pending]:
    """What a step gives besides ids, from its first result of that kind on."""
    return [bound.read_later(first + i) for i in range(3 if variant.logprobs else 0)]


__all__ = ["SCORED", "Found", "Launched", "Part", "Steps", "Tell"]
