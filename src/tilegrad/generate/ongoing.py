"""Ongoing: a Request on its way through the engine, from its arrival to its end.

It waits without a slot and without pages, runs with both, and may be sent back to wait: the tokens
it has made stay, and are fed like those of its prompt when it runs again. How far it is (`fed`,
`total`) counts steps that were begun, `known` the ids that were read: the host knows how long a
request is before it knows its last id.
Invariant: `known` only grows; `fed` < `total` while a token is owed.
"""

from __future__ import annotations

from .grammar import Matcher
from .prefix import first_key, next_key
from .request import Request

PATIENCE = 64  # later requests that may begin before one, for their priority


class Ongoing:
    """A Request, the tokens it has, and its slot and pages while it runs."""

    def __init__(self, request: Request, number: int, kind: str = "") -> None:
        self.request, self.number = request, number  # of its arrival
        self.kind = kind  # of the cache
        self.variant = request.variant
        self.prompt = len(request.tokens)  # how many it has
        self.known = list(request.tokens)  # and the ids that it made
        self.total = len(self.known)  # with ids that are being made
        self.fed = 0  # tokens whose keys are in pages, once all steps that were begun are over
        self.slot = -1  # none: it waits
        self.pages: list[int] = []
        self.decodes = False  # its last id is on the device
        self.cached = -1  # tokens of the prompt that the prefix cache had; it did not run yet
        self.overtaken = self.preempted = 0
        self.matcher: Matcher | None = None  # of its constraint
        self._keys: list[bytes] = []
        self._named = 0  # of its pages, that the prefix cache was told

    def __repr__(self) -> str:
        where = f"slot {self.slot}" if self.slot >= 0 else "waits"
        return f"<{self.request.id!r}: {self.fed} of {self.total} tokens in, {where}>"

    @property
    def made(self) -> int:
        """Ids that it made and that were read."""
        return len(self.known) - self.prompt

    @property
    def left(self) -> int:
        """Tokens that are not fed; 1 where it decodes."""
        return self.total - self.fed

    @property
    def owed(self) -> int:
        """Tokens that it may still make, besides those on their way."""
        return self.request.max_tokens - (self.total - self.prompt)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Whose turn it is: the smallest. One that was passed over too often comes first."""
        if self.overtaken >= PATIENCE:
            return (0, 0, self.number)
        return (1, self.request.priority, self.number)

    def will_grow(self, page: int) -> bool:
        """Whether it may want more pages than it has; its last token is never fed."""
        return len(self.pages) * page < self.request.most - 1

    def keys(self, page: int, count: int) -> list[bytes]:
        """Keys of its first pages, whose tokens are known."""
        keys = self._keys
        while len(keys) < count:
            own = (self.kind, self.request.salt, self.request.adapter)
            before = keys[-1] if keys else first_key(*own)
            at = len(keys) * page
            keys.append(next_key(before, self.known[at : at + page]))
        return keys[:count]

    def new_keys(self, page: int) -> list[tuple[int, bytes]]:
        """Pages that became full since this was asked, with their keys."""
        full = min(self.fed, len(self.known)) // page
        if full <= self._named:
            return []
        first, self._named = self._named, full
        return list(zip(self.pages[first:full], self.keys(page, full)[first:]))

    def sit(self, slot: int, known: list[int], fresh: list[int], page: int) -> None:
        """Begin to run, with pages that hold its first tokens already, and fresh ones."""
        self.slot, self.pages, self._named = slot, known + fresh, len(known)
        self.fed, self.total, self.decodes = len(known) * page, len(self.known), False
        if self.cached < 0:
            self.cached = self.fed

    def rise(self) -> None:
        """Run no more."""
        self.slot, self.pages, self.fed, self.decodes = -1, [], 0, False


__all__ = ["PATIENCE", "Ongoing"]
