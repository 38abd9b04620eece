"""The prefix cache: full pages by what their keys and values depend on.

That is every token up to the page's end, the request's salt, and whatever else changes keys and
values: all of it is in the page's *key*, a hash that goes on from the key of the page before. So
two pages have one key only if they have the same content, and a prompt finds its longest known
prefix by looking up one key after the other.
Invariant: a page has at most one key and a key at most one page; idle pages have keys.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from ..core.errors import InternalError

KEY_BYTES = 16


def first_key(*what: str) -> bytes:
    """What the keys of a request go on from: all that pages depend on besides tokens."""
    made = blake2b(digest_size=KEY_BYTES)
    for text in what:
        data = text.encode("utf-8", "surrogatepass")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a page with these tokens, after a page with that key."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Keys of pages; `idle` are those that nobody has, the one that waits longest first."""

    def __init__(self) -> None:
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.asked = self.found = 0  # tokens of prompts, and those that were there
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def knows(self, page: int) -> bool:
        """Whether a page has a key."""
        return page in self._key_of

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, as many as there are."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def add(self, page: int, key: bytes) -> None:
        """Tell the key of a page; where another page has it already, that one is kept."""
        if self._key_of.get(page, key) != key:
            raise InternalError("prefix", f"page {page} has another key")
        if self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Take its key from a page."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def evict(self) -> int:
        """The page that has been idle longest, which has no key any more."""
        page, _ = self.idle.popitem(last=False)
        self.forget(page)
        return page

    def check(self) -> None:
        """An InternalError unless the invariant holds."""
        inverse = {page: key for key, page in self._page_of.items()}
        if inverse != self._key_of or not self.idle.keys() <= inverse.keys():
            raise InternalError("prefix", "keys and pages do not match")


__all__ = ["PrefixCache", "first_key", "next_key"]
