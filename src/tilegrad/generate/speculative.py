"""Guesses of the next tokens of a request, and which of them come true.

A Proposer guesses; the engine feeds the guesses after a request's last token in one step, with a
row of logits for each, and every row draws its own token as it always does: by the request's seed
and the token's position. A guess that equals the draw before it makes the next row's draw the one
that plain decoding would have made; the first that differs is thrown away with all after it.
Invariant: what a request gets is drawn from the model's own logits after its own tokens, never
from a guess: its distribution is that of plain decoding, and so are its draws.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .. import nn
from ..models.decoder.model import Decoder
from .batcher import Batch, Batcher
from .features import Features
from .ongoing import Ongoing
from .request import Request
from .sampling_limits import Variant
from .steps import Tell

NGRAM = "ngram"  # the name of guesses that are looked up
LONGEST, SHORTEST = 4, 2  # tokens that are looked up
MOST_GUESSES = 16  # of all requests in one step, unless one may have more


class Guessed(Protocol):
    """A request on its way, as a Proposer sees it."""

    request: Request
    known: list[int]  # its prompt and what it made
    fed: int  # of these, tokens whose keys are in pages
    slot: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step had of a request: so many tokens, from this one of the step's on."""

    work: Ongoing
    first: int
    count: int


class Proposer(Protocol):
    """Guesses how requests go on."""

    def guess(self, works: Sequence[Guessed], most: Sequence[int]) -> list[list[int]]:
        """At most so many next tokens of each; none where it has no idea."""

    def forget(self, work: Guessed) -> None:
        """A request is over."""

    def prepare(self, tell: Tell, variants: Sequence[Variant]) -> None:
        """Compile what it needs, before the first request."""

    def attach(self, model: Decoder, cache: nn.PagedCache, tokens: int) -> Features | None:
        """Be part of an engine whose steps have so many tokens at most; the features that it wants
        of each step, if it reads them."""

    def saw(self, seen: Sequence[Seen]) -> None:
        """What the last step had of requests that go on; only where features are read."""


class Lookup:
    """Guesses that what followed the last few tokens before follows them again."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._seen: dict[int, Runs] = {}  # by the identity of a request on its way

    def guess(self, works: Sequence[Guessed], most: Sequence[int]) -> list[list[int]]:
        """The tokens after the last place that had the same tokens before it."""
        return [self._one(work, count) for work, count in zip(works, most)]

    def forget(self, work: Guessed) -> None:
        """Drop the runs of a request that is over."""
        self._seen.pop(id(work), None)

    def prepare(self, tell: Tell, variants: Sequence[Variant]) -> None:
        """Nothing is compiled."""

    def attach(self, model: Decoder, cache: nn.PagedCache, tokens: int) -> None:
        """It reads tokens alone."""

    def saw(self, seen: Sequence[Seen]) -> None:
        """It reads tokens alone."""

    def _one(self, work: Guessed, count: int) -> list[int]:
        if count < 1:
            return []
        runs = self._seen.setdefault(id(work), Runs(self.sizes))
        return runs.after(work.known, count)


class Runs:
    """Where each run of a few tokens was last followed by something."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._noted = 0  # tokens that runs end before

    def after(self, known: Sequence[int], count: int) -> list[int]:
        """What followed the longest run that the tokens end in; it may run into itself."""
        for end in range(self._noted, len(known)):
            for size in self.sizes:
                if end >= size:
                    self._ends[tuple(known[end - size : end])] = end
        self._noted = len(known)
        for size in self.sizes:
            place = self._ends.get(tuple(known[-size:])) if len(known) >= size else None
            if place is not None:
                period = len(known) - place
                return [known[place + i % period] for i in range(count)]
        return []


class Trust:
    """How many guesses a request is worth: more while they come true, fewer when they do not."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most

    def learn(self, guessed: int, true: int) -> None:
        """Take note of guesses that were looked at."""
        if guessed:
            self.now = min(self.most, 2 * self.now) if true == guessed else max(1, true + 1)


class Speculation:
    """Guesses for Batches that decode, and how far they were true; what requests it is for.

    A request with a Constraint or with penalties has none: what may come, or how likely it is,
    depends on guesses before they are known to be true.
    """

    def __init__(self, proposer: Proposer, most: int, requests: int) -> None:
        """At most so many guesses a request, and in all no more than a step can well hold."""
        self.proposer, self.most = proposer, most
        self.room = max(most, min(most * requests, MOST_GUESSES))
        self.asked = self.guessed = self.true = 0  # so far: guesses of a request are asked for once
        self.reads = False  # the features of steps
        self._seen: list[Seen] = []  # of the last step
        self._trust: dict[int, Trust] = {}

    def seeded(self, request: Request) -> Request:
        """A request with a seed, so that a Proposer can draw with it too."""
        sampling = request.sampling
        if sampling is None or sampling.greedy or sampling.seed is not None:
            return request
        return replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))

    def guess(self, batch: Batch, batcher: Batcher) -> list[list[int]] | None:
        """The guesses for each request of a Batch; None: there are none."""
        if not batch.decodes:
            return None
        left, wanted = self.room, []
        for place, work in enumerate(batch.ongoing):
            trust = self._trust.setdefault(id(work), Trust(self.most))
            share = -(-left // (len(batch.ongoing) - place))
            count = min(share, trust.now, work.owed - 1) if _may_guess(work) else 0
            count = batcher.stretch(work, count) if count > 0 else 0
            left -= count
            wanted.append(count)
        found = self.proposer.guess(batch.ongoing, wanted)
        return found if any(found) else None

    def true_rows(
        self, batch: Batch, drawn: Sequence[int]
    ) -> Iterator[tuple[Ongoing, Sequence[int]]]:
        """Each request of a Batch with the rows whose ids it gets: those after true tokens."""
        first, self._seen = 0, []
        for work, guesses in zip(batch.ongoing, batch.guesses or ()):
            true = came_true(guesses, drawn[first : first + len(guesses)])
            self._trust[id(work)].learn(len(guesses), true)
            self.asked += bool(guesses)
            self.guessed, self.true = self.guessed + len(guesses), self.true + true
            self._seen.append(Seen(work, first, true + 1))
            yield work, range(first, first + true + 1)
            first += len(guesses) + 1

    def attach(self, model: Decoder, cache: nn.PagedCache, chunk: int) -> Features | None:
        """The features that steps must keep, if something reads them."""
        found = self.proposer.attach(model, cache, chunk + self.room)
        self.reads = found is not None
        return found

    def stepped(self, batch: Batch) -> None:
        """Take note of a step without guesses."""
        firsts = [sum(batch.counts[:i]) for i in range(len(batch.counts))]
        self._seen = [Seen(*one) for one in zip(batch.ongoing, firsts, batch.counts)]

    def saw(self, running: Mapping[Hashable, Ongoing]) -> None:
        """Show the Proposer what the last step had of requests that still run."""
        seen = [s for s in self._seen if running.get(s.work.request.id) is s.work]
        self._seen = []
        if self.reads and seen:
            self.proposer.saw(seen)

    def forget(self, work: Ongoing) -> None:
        """A request is over."""
        self._trust.pop(id(work), None)
        self.proposer.forget(work)


def came_true(guesses: Sequence[int], drawn: Sequence[int]) -> int:
    """How many guesses are what was drawn in their places, before the first that is not."""
    pairs = enumerate(zip(guesses, drawn))
    return next((i for i, (guess, id) in pairs if guess != id), len(guesses))


def _may_guess(work: Ongoing) -> bool:
    sampling = work.request.sampling
    return work.matcher is None and (sampling is None or not sampling.penalised)


def orders_of(
    works: Sequence[Ongoing], guesses: Sequence[Sequence[int]], page: int
) -> dict[str, list[int]]:
    """What `verify` takes: a row for each request's last token and for each guess after it."""
    found: dict[str, list[int]] = {"slots": [], "tails": [], "given": [], "lengths": []}
    for work, guessed in zip(works, guesses):
        for i, token in enumerate((work.known[-1], *guessed)):
            found["slots"].append(work.slot)
            found["given"].append(token)
            found["lengths"].append(work.fed + 1 + i)
            found["tails"].append(work.pages[(work.fed + i) // page])
    return found


__all__ = ["NGRAM", "Guessed", "Lookup", "Proposer", "Seen", "Speculation", "orders_of"]
