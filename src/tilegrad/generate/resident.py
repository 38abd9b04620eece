"""Pages of a CPU that are in memory: the system gives a page memory when it is first written.

How many pages requests need at once goes up and down by chance, so the most so far would rise for
hours by a page now and then, and memory with it. Whenever the most rises, memory for a quarter more
is taken at once: it settles within the first minute of a load, and is never more than a quarter
above what was needed.
Invariant: pages below `taken` have memory, all of it; nothing in them is changed.
"""

from __future__ import annotations

import mmap

import numpy as np

from .. import nn
from .pages import PagePool

AHEAD = 4  # one page more for so many


class Resident:
    """How many pages of a cache have memory; pages are first taken in their order."""

    def __init__(self, cache: nn.PagedCache, pool: PagePool) -> None:
        self.cache, self.pool, self.taken = cache, pool, 0

    def follow(self) -> None:
        """Take memory ahead if more pages than ever are in use."""
        needed = self.pool.touched
        if needed <= self.taken:
            return
        last = min(self.pool.pages, needed + needed // AHEAD)
        for tensor in (*self.cache.keys, *self.cache.values):
            size = tensor.numel() // self.pool.pages * tensor.dtype.size
            bytes = (last - self.taken) * size
            part = tensor.buffer().part(self.taken * size, bytes).array((bytes,), np.uint8)
            part[:: mmap.PAGESIZE] |= 0  # written, and as it was
            part[-1] |= 0
        self.taken = last


__all__ = ["Resident"]
