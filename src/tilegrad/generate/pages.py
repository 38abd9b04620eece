"""Which pages of a cache are used, and by how many: kept by the host.

A page is taken when tokens need it and may be shared by requests whose prompts begin alike. One
that nobody has any more is free, or *idle*: its tokens are known to the prefix cache, so the next
request that begins with them has it for nothing, and until then it is the first to be given away.
Free pages given back last are taken first: what was touched before is touched again.
Invariant: a page is free, idle or has as many users as its count says; a pool never gives more
pages than it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import InternalError
from .prefix import PrefixCache


class PagePool:
    """Pages by number: free, idle or counted; `prefixes` knows the tokens of some."""

    def __init__(self, pages: int, page: int, idle: int | None = None) -> None:
        """At most `idle` pages are kept for their tokens when nobody has them; None: all."""
        if pages < 1 or page < 1:
            raise InternalError("pages", f"a pool of {pages} pages of {page} tokens")
        self.pages, self.page = pages, page
        self.most_idle = pages if idle is None else idle
        self.free = list(range(pages - 1, -1, -1))  # the last is taken first
        self.counts = [0] * pages
        self.touched = 0  # pages that anybody ever had: the first so many
        self.prefixes = PrefixCache()

    def __repr__(self) -> str:
        return (
            f"PagePool({len(self.free)} of {self.pages} pages of {self.page} tokens free, "
            f"{len(self.prefixes.idle)} idle)"
        )

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self.free) + len(self.prefixes.idle)

    def needed(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page)

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether so many tokens fit when everything else is gone."""
        return self.needed(tokens) <= self.pages

    def take(self) -> int:
        """One more page: a free one, else the one that has been idle longest."""
        if not self.free and not self.prefixes.idle:
            raise InternalError("pages", f"no page is left of {self!r}")
        page = self.free.pop() if self.free else self.prefixes.evict()
        self.counts[page] = 1
        self.touched = max(self.touched, page + 1)
        return page

    def share(self, page: int) -> None:
        """One more user of a page that the prefix cache knows."""
        if not self.counts[page] and page not in self.prefixes.idle:
            raise InternalError("pages", f"page {page} is shared, and nobody has it")
        self.prefixes.idle.pop(page, None)
        self.counts[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less of each; of a prompt's pages the last go first."""
        for page in reversed(pages):
            if self.counts[page] < 1:
                raise InternalError("pages", f"page {page} is given back, and nobody has it")
            self.counts[page] -= 1
            if self.counts[page]:
                continue
            if self.prefixes.knows(page):
                self.prefixes.idle[page] = None
            else:
                self.free.append(page)
        while len(self.prefixes.idle) > self.most_idle:
            self.free.append(self.prefixes.evict())

    def forget(self, pages: Sequence[int]) -> None:
        """Nobody else gets these pages for their tokens: those that have them may be wrong."""
        for page in pages:
            self.prefixes.forget(page)
            if not self.counts[page] and page in self.prefixes.idle:
                del self.prefixes.idle[page]
                self.free.append(page)

    def check(self, users: dict[int, int]) -> None:
        """An InternalError unless pages have just these users, and no page is lost or twice."""
        idle, free = set(self.prefixes.idle), set(self.free)
        if len(free) != len(self.free) or free & idle:
            raise InternalError("pages", "a page is free twice")
        for page, count in enumerate(self.counts):
            wanted = users.get(page, 0)
            if count != wanted or (not count) != (page in free or page in idle):
                raise InternalError("pages", f"page {page} counts {count} users of {wanted}")
        self.prefixes.check()


__all__ = ["PagePool"]
