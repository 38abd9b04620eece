"""Memory of a GPU: the pool that Buffers come from.

All work of a Device is on one stream, so a block that was given back may be handed out at once:
what used it before comes first on the stream. Free blocks are kept last in first out, so that a
loop that makes and drops the same results gets the same addresses. Invariant: a block is held by
one owner or is in the pool; `in_use` counts those held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ...runtime import buffer
from .cuda_api import OUT_OF_MEMORY, api, call, fail

GRANULE = 512


class Pool(buffer.Pool):
    """Free memory of one Device by size class; all of it is kept until something needs it."""

    granule, why = GRANULE, "the GPU has no more memory"

    def __init__(self, name: str, activate: Callable[[], None]) -> None:
        super().__init__(sys.maxsize)
        self.place, self.activate, self.reserved = f" on {name}", activate, 0

    def take(self, bytes: int, label: str = "", size: int = 0) -> buffer.Block:
        """The same; what was given back just now without much ado."""
        returned = self._returned
        if len(returned) == 1 and not label and not self._live:
            with self._lock:
                if len(returned) == 1 and returned[0][1] == size:
                    return buffer.Block(self, returned.popleft()[0], size)
        return super().take(bytes, label, size)

    def give(self, pointer: int, bytes: int) -> None:
        """Return memory; never blocks."""
        self._returned.append((pointer, bytes))

    def _reserve(self, bytes: int) -> int:
        self.activate()
        status, pointer = api().cuMemAlloc(bytes)
        if status:
            if int(status) != OUT_OF_MEMORY:
                fail("cuMemAlloc", status, f"{bytes} bytes")
            return 0
        self.reserved += bytes
        return int(pointer)

    def _release(self, pointer: int, bytes: int) -> None:
        self.activate()
        call("cuMemFree", pointer)
        self.reserved -= bytes
