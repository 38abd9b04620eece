"""Which replica a request goes to: the one that has probably read its start, unless it is too busy.

Invariant: a replica that is down, or that was tried for this request, is never chosen; of those
left none has more than `limit` requests more than the least busy one when it is chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from .prefixes import Prefixes

LIMIT = 16  # requests that one replica may have more than another for the sake of its cache


@dataclass(eq=False)
class Replica:
    """One server behind the router."""

    name: str
    url: str = ""  # none while it is not started
    up: bool = False
    load: int = 0  # requests on their way
    sent: int = 0
    failed: int = 0  # times it could not be reached, or died before an answer began
    prefixes: Prefixes = field(default_factory=Prefixes)

    def moved(self, url: str) -> None:
        """It was started anew, at another address."""
        if url != self.url:
            self.url, self.up = url, False
            self.prefixes.clear()


class Balance:
    """Chooses among replicas."""

    def __init__(self, replicas: list[Replica], limit: int = LIMIT) -> None:
        self.replicas, self.limit = replicas, limit
        self._turns = itertools.count()

    def choose(self, hashes: list[bytes], tried: Collection[Replica] = ()) -> Replica | None:
        """The replica for a prompt; None if none is left."""
        left = [one for one in self.replicas if one.up and one not in tried]
        if not left:
            return None
        least = min(one.load for one in left)
        near = [one for one in left if one.load - least <= self.limit]
        matches = {one.name: one.prefixes.match(hashes) for one in near}
        longest = max(matches.values())
        if longest:
            best = [one for one in near if matches[one.name] == longest]
        else:  # nobody knows it: whoever has least to do, and least to remember
            best = [one for one in near if one.load == least]
            fewest = min(len(one.prefixes) for one in best)
            best = [one for one in best if len(one.prefixes) == fewest]
        idle = min(one.load for one in best)
        best = [one for one in best if one.load == idle]
        return best[next(self._turns) % len(best)]


__all__ = ["LIMIT", "Balance", "Replica"]
