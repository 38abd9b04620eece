"""Which pages of a cache are whose: kept by the host, told to the device as rows of a table.

A request gets all pages that it can ever need before it begins (prompt and answer), so nothing
is uploaded while it decodes and no two requests can wait for each other. Pages given back last
are taken first: what was touched before is touched again, and the rest costs no memory.
Invariant: a page has one owner or is free; a pool never gives more pages than it has.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..core.errors import InternalError


class PagePool:
    """Free pages, and the pages of each owner in the order of its tokens."""

    def __init__(self, pages: int, page: int) -> None:
        if pages < 1 or page < 1:
            raise InternalError("pages", f"a pool of {pages} pages of {page} tokens")
        self.pages, self.page = pages, page
        self.free = list(range(pages - 1, -1, -1))  # the last is taken first
        self.owned: dict[Hashable, list[int]] = {}

    def __repr__(self) -> str:
        return f"PagePool({len(self.free)} of {self.pages} pages of {self.page} tokens free)"

    def needed(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page)

    def fits(self, tokens: int) -> bool:
        """Whether so many tokens fit now."""
        return self.needed(tokens) <= len(self.free)

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether so many tokens fit when everything else is gone."""
        return self.needed(tokens) <= self.pages

    def take(self, owner: Hashable, tokens: int) -> list[int]:
        """Pages for so many tokens of a new owner, in order."""
        if owner in self.owned:
            raise InternalError("pages", f"{owner!r} has pages already")
        if not self.fits(tokens):
            raise InternalError("pages", f"{self.needed(tokens)} pages wanted of {self!r}")
        count = self.needed(tokens)
        taken = [self.free.pop() for _ in range(count)]
        self.owned[owner] = taken
        return list(taken)

    def give_back(self, owner: Hashable) -> None:
        """Free all pages of an owner."""
        if owner not in self.owned:
            raise InternalError("pages", f"{owner!r} has no pages")
        self.free += reversed(self.owned.pop(owner))


__all__ = ["PagePool"]
