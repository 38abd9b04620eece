"""Memory of a GPU: the pool that Buffers come from, and pinned host memory for copies.

All work of a Device is on one stream, so a block that was given back may be handed out at once:
what used it before comes first on the stream. Free blocks are kept last in first out, so that a
loop that makes and drops the same results gets the same addresses. Invariant: a block is held by
one owner or is in the pool; `in_use` counts those held.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from ...core.lock import new_lock
from ...runtime import buffer
from .cuda_api import OUT_OF_MEMORY, api, call, fail

GRANULE = 512
CHUNK = 8 << 20  # of one staged copy
SMALL = 16 << 10  # bytes of a copy that needs no staging


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


class Staging:
    """Pinned host memory that copies pass through, two chunks in turn."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self.activate = activate
        self.lock = new_lock()
        self._chunks: list[tuple[int, Any]] = []
        self._turn = 0

    def _next(self) -> tuple[int, Any]:
        """A chunk that no copy still reads: (host address, event)."""
        if len(self._chunks) < 2:
            self.activate()
            address = int(call("cuMemHostAlloc", CHUNK, 0))
            self._chunks.append((address, call("cuEventCreate", 2)))  # no timing
            self._turn = len(self._chunks) - 1
            return self._chunks[-1]
        self._turn = 1 - self._turn
        chunk = self._chunks[self._turn]
        call("cuEventSynchronize", chunk[1], during="copy to the GPU")
        return chunk

    def upload(self, pointer: int, source: int, bytes: int, stream: Any) -> None:
        """Copy host memory to the GPU; `source` may be changed when this returns."""
        if bytes <= SMALL:  # the driver takes these bytes at once and waits for nothing
            call("cuMemcpyHtoDAsync", pointer, source, bytes, stream)
            return
        with self.lock:
            for at in range(0, bytes, CHUNK):
                part = min(CHUNK, bytes - at)
                address, event = self._next()
                ctypes.memmove(address, source + at, part)
                call("cuMemcpyHtoDAsync", pointer + at, address, part, stream)
                call("cuEventRecord", event, stream)

    def download(self, target: int, pointer: int, bytes: int, stream: Any) -> None:
        """Copy GPU memory to the host; the values are there when this returns."""
        with self.lock:
            waiting: list[tuple[int, int, int, Any]] = []
            for at in range(0, bytes, CHUNK):
                part = min(CHUNK, bytes - at)
                if len(waiting) == 2:
                    _arrive(waiting.pop(0))
                address, event = self._next()
                call("cuMemcpyDtoHAsync", address, pointer + at, part, stream)
                call("cuEventRecord", event, stream)
                waiting.append((target + at, address, part, event))
            for copy in waiting:
                _arrive(copy)


def _arrive(copy: tuple[int, int, int, Any]) -> None:
    target, address, part, event = copy
    call("cuEventSynchronize", event, during="copy to the host")
    ctypes.memmove(target, address, part)
