"""Memory of a GPU: the pool that Buffers come from, and pinned host memory for copies.

All work of a Device is on one stream, so a block that was given back may be handed out at once:
what used it before comes first on the stream. Free blocks are kept by size class, last in first
out, so that a loop that makes and drops the same results gets the same addresses. Invariant: a
block is held by one owner or is in the pool; `in_use` counts those held.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ...core.errors import MemoryLimitError
from ...core.lock import new_lock
from .cuda_api import OUT_OF_MEMORY, api, call, describe, fail

GRANULE = 512
CHUNK = 8 << 20  # of one staged copy
SMALL = 16 << 10  # bytes of a copy that needs no staging
BIG = 64 << 20  # above this, sizes are rounded to 2 MiB only
PAGE = 2 << 20
MAPPED = 3  # of cuMemHostAlloc: every context sees it, and so do kernels


def size_class(bytes: int) -> int:
    """The bytes set aside for a request: eight classes to a doubling, in granules of 512."""
    if bytes <= 8 * GRANULE:
        return max(GRANULE, -(-bytes // GRANULE) * GRANULE)
    step = PAGE if bytes > BIG else 1 << max(9, (bytes - 1).bit_length() - 4)
    return -(-bytes // step) * step


class Block:
    """Memory from the pool: goes back when nothing holds it."""

    __slots__ = ("__weakref__", "_pool", "bytes", "pointer")

    def __init__(self, pool: Pool, pointer: int, bytes: int) -> None:
        self._pool, self.pointer, self.bytes = pool, pointer, bytes

    def __del__(self) -> None:
        self._pool.give(self.pointer, self.bytes)


class Pool:
    """Free memory of one Device by size class, and the account of what is in use.

    `give` may run inside the garbage collector while this thread holds the lock, so it only
    queues; whoever has the lock next takes the queue in.
    """

    def __init__(self, name: str, activate: Callable[[], None], limit: int = 0) -> None:
        self.name, self.activate, self.limit = name, activate, limit
        self.in_use = self.peak = self.kept = self.reserved = 0
        self._free: dict[int, list[int]] = {}
        self._live: dict[int, tuple[int, str]] = {}
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = new_lock()

    def take(self, bytes: int, label: str = "", size: int = 0) -> Block:
        """A Block of at least `bytes` bytes; `size` is their size class where it is known."""
        size = size or size_class(bytes)
        returned = self._returned
        with self._lock:
            if len(returned) == 1 and not label and not self._live and returned[0][1] == size:
                return Block(self, returned.popleft()[0], size)  # what was given back just now
            if returned:
                self._settle()
            if self.limit and self.in_use + size > self.limit:
                self._refuse(bytes, f"the limit is {_mib(self.limit)}")
            free = self._free.get(size)
            if free:
                pointer = free.pop()
                self.kept -= size
            else:
                pointer = self._reserve(size, bytes)
            self.in_use += size
            if self.in_use > self.peak:
                self.peak = self.in_use
            if label:
                self._live[pointer] = (size, label)
        return Block(self, pointer, size)

    def give(self, pointer: int, bytes: int) -> None:
        """Return memory; never blocks."""
        self._returned.append((pointer, bytes))

    def trim(self) -> None:
        """Give all kept memory back to the driver (waits for the GPU)."""
        with self._lock:
            self._settle()
            self._trim()

    def settle(self) -> None:
        """Bring the account up to date."""
        with self._lock:
            self._settle()

    def holders(self, count: int = 5) -> list[tuple[str, int, int]]:
        """The largest holders as (label, bytes, Buffers), largest first; 0 Buffers: not counted."""
        totals: dict[str, list[int]] = {}
        for size, label in list(self._live.values()):
            entry = totals.setdefault(label, [0, 0])
            entry[0] += size
            entry[1] += 1
        rest = self.in_use - sum(size for size, _ in totals.values())
        if rest:
            totals["unnamed"] = [rest, 0]
        ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
        return [(label, size, number) for label, (size, number) in ranked]

    def _settle(self) -> None:
        returned, live, free = self._returned, self._live, self._free
        while returned:
            pointer, size = returned.popleft()
            if live:
                live.pop(pointer, None)
            self.in_use -= size
            self.kept += size
            if size in free:
                free[size].append(pointer)
            else:
                free[size] = [pointer]

    def _reserve(self, size: int, asked: int) -> int:
        self.activate()
        for attempt in range(2):
            status, pointer = api().cuMemAlloc(size)
            if not status:
                self.reserved += size
                return int(pointer)
            if int(status) != OUT_OF_MEMORY:
                fail("cuMemAlloc", status, f"{size} bytes")
            if not attempt:
                self._trim()
        self._refuse(asked, describe(status))

    def _trim(self) -> None:
        self.activate()
        for size, pointers in self._free.items():
            for pointer in pointers:
                call("cuMemFree", pointer)
                self.reserved -= size
        self._free.clear()
        self.kept = 0

    def _refuse(self, bytes: int, why: str) -> NoReturn:
        held = ", ".join(
            f"{label} {_mib(size)}" + (f" in {n}" if n else "") for label, size, n in self.holders()
        )
        raise MemoryLimitError(
            f"cannot allocate {_mib(bytes)} on {self.name}: {why}",
            op="Buffer.allocate",
            got=f"in use {_mib(self.in_use)}, peak {_mib(self.peak)}; largest: {held or 'none'}",
            hint="free or donate Buffers, or use a smaller batch",
        )


def _mib(bytes: int) -> str:
    return f"{bytes / (1 << 20):.1f} MiB"


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


def mapped_words(bytes: int) -> np.ndarray[Any, Any]:
    """Pinned memory of the host that every context sees and kernels write to, all 0."""
    address = int(call("cuMemHostAlloc", bytes, MAPPED))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * bytes).from_address(address))
    memory[:] = 0
    return memory
