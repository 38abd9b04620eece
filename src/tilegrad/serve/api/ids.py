"""Ids in an answer: random, or the same again where another replica goes on with it.

Invariant: two answers have no id in common; the ids of one follow from its seed, from whom they are
for and from how many came before.
"""

from __future__ import annotations

import hashlib
import secrets


class Ids:
    """Ids of one answer, or of one part of it."""

    def __init__(self, seed: str = "") -> None:
        self.seed, self.count = seed or secrets.token_hex(16), 0

    def new(self, prefix: str, size: int = 32) -> str:
        """One more."""
        self.count += 1
        return prefix + self._hex(str(self.count))[:size]

    def part(self, name: object) -> Ids:
        """Ids for a part that does not know how many others had."""
        return Ids(self._hex(f"part {name}"))

    def _hex(self, text: str) -> str:
        return hashlib.sha256(f"{self.seed} {text}".encode()).hexdigest()


__all__ = ["Ids"]
