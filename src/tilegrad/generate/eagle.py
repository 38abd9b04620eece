"""Guesses of an EAGLE head: it reads the decoder's features, and goes on from its own.

The head's keys and values have the numbers of the engine's pages, so a prefix that is known to the
engine is known to the head too. After each step of the engine `extend` feeds the features of all
tokens that count, each with the token after it, and gives the first guess of each request;
`guess_next` goes on from there, one guess at a time. Entries of guesses are written over when the
tokens are known. The last entry of a page that is shared has the next token of whoever wrote it:
guesses may be worse for it, answers are not.
Invariant: nothing here changes the engine's own state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import nn
from ..core.dtype import int32
from ..ir.symbol import symbol
from ..models.decoder.eagle import EagleHead
from ..models.decoder.model import Decoder, paged
from ..tensor.bound import Bound
from ..tensor.creation import tensor
from ..tensor.elementwise import maximum, where
from ..tensor.jit import jit
from ..tensor.tensor import Tensor, no_grad
from .features import Features
from .ledger import Ledger, write
from .sampling import greedy
from .sampling_limits import Variant
from .sizes import next_size, powers_up_to, prompt_sizes
from .speculative import Guessed, Seen
from .steps import Tell

ROWS = ("slots", "starts", "lengths")
TOKENS = ("owner", "at", "given")


class Goes:
    """Where the head is in each slot: its last feature (slots, C), and the guess made of it."""

    def __init__(self, slots: int, features: Features) -> None:
        shape, kind = (slots, int(features.all.shape[1])), features.all.dtype.numpy
        self.feature = tensor(np.zeros(shape, kind), device=features.all.device)
        self.guess = tensor(np.zeros(slots, np.int32), device=features.all.device)

    def tensors(self) -> dict[str, Tensor]:
        """Its state by name, for `jit`."""
        return {"feature": self.feature, "guess": self.guess}

    def take(self, model: Decoder, slots: Tensor, found: Tensor) -> None:
        """Go on from features (R, C) of some slots."""
        self.feature.assign(self.feature.index_copy(0, slots, found))
        ids = maximum(greedy(model.read(found)).ids, 0)
        self.guess.assign(self.guess.index_copy(0, slots, ids))


def extend(
    head: EagleHead,
    model: Decoder,
    cache: nn.PagedCache,
    features: Features,
    goes: Goes,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    owner: Tensor,
    at: Tensor,
    given: Tensor,
) -> None:
    """Feed entries of several slots: features at `at` (T,) with the tokens `given` (T,)."""
    attend = paged(head.config, cache, cache.table.index_select(0, slots), lengths, starts)
    read = features.all.index_select(0, at)
    found = head(where(owner < 0, 0, given), read, attend, model.embed)  # (T, C)
    goes.take(model, slots, found.index_select(0, maximum(starts[1:] - 1, 0)))


def guess_next(
    head: EagleHead,
    model: Decoder,
    cache: nn.PagedCache,
    goes: Goes,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
) -> None:
    """One guess more in each slot, from its last one."""
    table = cache.table.index_select(0, slots)
    attend = paged(head.config, cache, table, lengths, starts, single=True)
    tokens, read = goes.guess.index_select(0, slots), goes.feature.index_select(0, slots)
    goes.take(model, slots, head(tokens, read, attend, model.embed))


class Eagle:
    """A Proposer that is an EAGLE head."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self._first: dict[int, tuple[int, int]] = {}  # by work: tokens fed, and the guess then

    def attach(self, model: Decoder, cache: nn.PagedCache, tokens: int) -> Features:
        """Make what belongs to an engine: its model, its cache, the most tokens of a step."""
        config, kind = self.head.config, cache.keys[0]
        self.model, self.tokens, self.nobody = model, tokens, cache.requests - 1
        self.cache = nn.PagedCache(
            1,
            int(kind.shape[0]),
            cache.page,
            config.key_heads,
            config.head_width,
            requests=cache.requests,
            most_pages=cache.most_pages,
            dtype=kind.dtype,
            device=cache.device,
        )
        self.features = Features(tokens, config.width, model.norm.weight.dtype, cache.device)
        self.goes = Goes(cache.requests, self.features)
        shapes = {name: ((cache.requests + 1,), int32) for name in ROWS}
        shapes |= {name: ((tokens,), int32) for name in TOKENS}
        self._orders = Ledger(shapes, cache.device)
        self._table = np.zeros((cache.requests, cache.most_pages), np.int32)
        several, requests = symbol("tokens", 1, tokens), symbol("requests", 1, max(2, self.nobody))
        rows = {name: {0: requests} for name in ROWS} | {"starts": {0: requests + 1}}
        self._extend = jit(extend, dynamic=rows | {name: {0: several} for name in TOKENS})
        self._guess_next = jit(guess_next)
        self._sizes = prompt_sizes(tokens, self.nobody)
        self._bounds: dict[tuple[int, int], Bound] = {}  # by rows and tokens; 0: `guess_next`
        return self.features

    # ---- steps ----------------------------------------------------------------------------------

    def saw(self, seen: Sequence[Seen]) -> None:
        """Feed what the engine's last step had of each request; their first guesses."""
        self._tell_pages([s.work for s in seen])
        counts = [s.count for s in seen]
        used, total, host = len(seen), sum(counts), self._orders.host
        rows = next_size(sorted({r for r, _ in self._sizes}), used)
        tokens = next_size([t for r, t in self._sizes if r == rows], total)
        host["slots"][:rows], host["lengths"][:rows] = self.nobody, 0
        host["slots"][:used] = [s.work.slot for s in seen]
        host["lengths"][:used] = [s.work.fed for s in seen]
        host["starts"][: rows + 1] = total
        host["starts"][: used + 1] = np.cumsum([0, *counts])
        for name, padding in (("owner", -1), ("at", 0), ("given", 0)):
            host[name][total:tokens] = padding
        host["owner"][:total] = np.repeat(np.arange(used), counts)
        host["at"][:total] = np.concatenate([s.first + np.arange(s.count) for s in seen])
        host["given"][:total] = [
            token for s in seen for token in s.work.known[s.work.fed + 1 - s.count : s.work.fed + 1]
        ]
        self._orders.send("given", tokens)
        bound = self._bound(rows, tokens)
        bound.run()
        guesses = bound.read_later("goes.guess").wait()
        for s in seen:
            self._first[id(s.work)] = (s.work.fed, int(guesses[s.work.slot]))

    def guess(self, works: Sequence[Guessed], most: Sequence[int]) -> list[list[int]]:
        """The likeliest next tokens of each by the head."""
        found: list[list[int]] = [[] for _ in works]
        left = []
        for place, (work, count) in enumerate(zip(works, most)):
            fed, first = self._first.get(id(work), (-1, 0))
            if count > 0 and fed == work.fed:
                found[place].append(first)
                left.append(place)
        self._tell_pages([works[place] for place in left])
        while left := [place for place in left if len(found[place]) < most[place]]:
            guesses = self._go([(works[p].slot, works[p].fed + len(found[p])) for p in left])
            for place in left:
                found[place].append(int(guesses[works[place].slot]))
        return found

    def _go(self, rows: Sequence[tuple[int, int]]) -> Any:
        """Guesses of all slots after one more of some; (slot, entries that it has then)."""
        used, host = len(rows), self._orders.host
        size = next_size(powers_up_to(self.nobody), used)
        host["slots"][:size], host["lengths"][:size] = self.nobody, 0
        host["slots"][:used], host["lengths"][:used] = zip(*rows)
        host["starts"][: size + 1] = np.minimum(np.arange(size + 1), used)
        self._orders.send("lengths", size)
        bound = self._bound(size, 0)
        bound.run()
        return bound.read_later("goes.guess").wait()

    def _tell_pages(self, works: Sequence[Guessed]) -> None:
        for work in works:
            row = self._table[work.slot]
            if not np.array_equal(row[: len(work.pages)], work.pages):
                row[: len(work.pages)] = work.pages
                write(self.cache.table, work.slot, row[None])

    def _bound(self, rows: int, tokens: int) -> Bound:
        found = self._bounds.get((rows, tokens))
        if found is None:
            names = ROWS if not tokens else (*ROWS, *TOKENS)
            sizes = {name: rows + (name == "starts") for name in ROWS}
            sizes |= dict.fromkeys(TOKENS, tokens)
            given = {name: self._orders.tensor(name, sizes[name]) for name in names}
            state = (self.head, self.model, self.cache)
            bind = (
                partial(self._extend.bind, *state, self.features, self.goes, **given)
                if tokens
                else partial(self._guess_next.bind, *state, self.goes, **given)
            )
            with no_grad():
                found = self._bounds[rows, tokens] = bind()
        return found

    def prepare(self, tell: Tell, variants: Sequence[Variant]) -> None:
        """Make all sizes."""
        sizes = [*self._sizes, *((rows, 0) for rows in powers_up_to(self.nobody))]
        for number, (rows, tokens) in enumerate(reversed(sizes)):
            tell("prepare", number, len(sizes))
            self._bound(rows, tokens)
        tell("prepare", len(sizes), len(sizes))

    def forget(self, work: Guessed) -> None:
        """A request is over."""
        self._first.pop(id(work), None)


__all__ = ["Eagle"]
