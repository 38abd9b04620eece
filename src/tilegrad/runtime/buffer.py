"""Buffers: storage at run time, and the pool that CPU Buffers come from.

A Buffer points into memory that its `owner` keeps alive. Freeing or donating a Buffer ends the
Buffer, not the memory: NumPy views share the owner, so a view never dangles; the memory goes
back to the pool when the last holder is gone.

Invariant: a pointer read from a living Buffer is valid for `bytes` bytes; a freed or donated
Buffer raises StateError when read. CPU memory is 64-byte aligned, blocks of 1 MiB and more are
2 MiB aligned and ask for huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from typing import Any

import numpy as np

from ..core.config import config
from ..core.errors import Location, MemoryLimitError, ShapeError, StateError, user_location
from ..core.lock import new_lock

HOST = "cpu"  # the Device whose memory the host sees as it is
ALIGNMENT = 64
BIG_BYTES = 1 << 20
HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
HINTS = {
    "donated": "use the result that took its memory",
    "overwritten": "read it before a run that changes it, or build it anew after",
}


class Buffer:
    """Untyped storage on a Device; see the module's docstring."""

    __slots__ = (
        "__weakref__",
        "_pointer",
        "adapts",
        "bytes",
        "device",
        "ended",
        "label",
        "owner",
        "state",
        "writable",
    )
    is_source = False  # see `prepared.Source`

    def __init__(
        self,
        pointer: int,
        bytes: int,
        owner: object,
        device: str = HOST,
        *,
        label: str = "",
        writable: bool = True,
    ) -> None:
        self._pointer = pointer
        self.bytes = bytes
        self.owner: object | None = owner
        self.device = device
        self.label = label
        self.writable = writable
        self.adapts = False  # may be copied to whatever device it is needed on
        self.state = "alive"  # or 'freed', 'donated', 'overwritten'
        self.ended: Location | None = None  # where it ceased to be

    @staticmethod
    def allocate(bytes: int, label: str = "") -> Buffer:
        """A new CPU Buffer with uninitialised memory from the pool."""
        block = POOL.take(bytes, label)
        return Buffer(block.pointer, bytes, block, label=label)

    @staticmethod
    def wrap(array: np.ndarray, label: str = "") -> Buffer:
        """A Buffer over the memory of a C-contiguous NumPy array, without a copy."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise ShapeError(
                "cannot wrap this memory",
                op="Buffer.wrap",
                expected="a C-contiguous array",
                got=type(array).__name__,
                hint="numpy.ascontiguousarray makes one",
            )
        return Buffer(
            array.ctypes.data, array.nbytes, array, label=label, writable=array.flags.writeable
        )

    @property
    def pointer(self) -> int:
        """The address of the first byte."""
        if self.state != "alive":
            self._refuse()
        return self._pointer

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A NumPy view of the memory that keeps it alive; `dtype` is anything NumPy takes."""
        if self.device != HOST:
            raise StateError(
                f"a Buffer on {self.device} has no address here",
                op="Buffer.array",
                expected="a Buffer on the CPU",
                hint="copy it to the CPU first: x.cpu()",
            )
        kind = np.dtype(getattr(dtype, "numpy", dtype))
        count = 1
        for size in shape:
            count *= size
        if count * kind.itemsize > self.bytes:
            raise ShapeError(
                "the view is larger than the Buffer",
                op="Buffer.array",
                expected=f"at most {self.bytes} bytes",
                got=f"{shape} of {kind}",
            )
        span = _Span(self.pointer, count * kind.itemsize, self.owner, not self.writable)
        return np.asarray(span).view(kind).reshape(shape)

    def part(self, offset: int, bytes: int) -> Buffer:
        """A Buffer over `bytes` bytes from `offset`, sharing this one's memory."""
        if offset < 0 or offset + bytes > self.bytes:
            raise ShapeError(
                "the part does not lie in the Buffer",
                op="Buffer.part",
                expected=f"within {self.bytes} bytes",
                got=f"{bytes} bytes at {offset}",
            )
        return Buffer(
            self.pointer + offset,
            bytes,
            self.owner,
            self.device,
            label=self.label,
            writable=self.writable,
        )

    def donate(self, location: Location | None = None, state: str = "donated") -> Buffer:
        """End this Buffer and return a new one that has its memory."""
        heir = self.part(0, self.bytes)
        self._end(state, location)
        return heir

    def free(self, location: Location | None = None) -> None:
        """End this Buffer; its memory returns to the pool when no view holds it. May repeat."""
        if self.state == "alive":
            self._end("freed", location)

    def _end(self, state: str, location: Location | None) -> None:
        self.ended = location if location is not None else user_location()
        self.state, self.owner, self._pointer = state, None, 0

    def _refuse(self) -> None:
        name = f"Buffer {self.label!r}" if self.label else "a Buffer"
        raise StateError(
            f"{name} of {self.bytes} bytes was {self.state} at {self.ended} and cannot be read",
            hint=HINTS.get(self.state),
        )

    def __repr__(self) -> str:
        return f"Buffer({self.bytes} bytes, {self.device}, {self.label or '-'}, {self.state})"


class _Span:
    """What NumPy needs to make an array over memory that `owner` keeps alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, pointer: int, bytes: int, owner: object, read_only: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": (bytes,),
            "typestr": "|u1",
            "data": (pointer, read_only),
            "version": 3,
        }


class Block:
    """Memory from the pool: goes back when nothing holds it."""

    __slots__ = ("__weakref__", "_pool", "bytes", "pointer")

    def __init__(self, pool: Pool, pointer: int, bytes: int) -> None:
        self._pool = pool
        self.pointer = pointer
        self.bytes = bytes

    def __del__(self) -> None:
        self._pool.give(self.pointer, self.bytes)


def size_class(bytes: int, granule: int = ALIGNMENT) -> int:
    """The bytes really set aside for a request: eight classes to a doubling, in granules."""
    if bytes <= 8 * granule:
        return max(granule, -(-bytes // granule) * granule)
    step = max(granule, 1 << (bytes - 1).bit_length() - 4)
    step = HUGE_PAGE if bytes > 32 * HUGE_PAGE else step
    return -(-bytes // step) * step


class Pool:
    """Free memory of the CPU by size class, and the account of what is in use; a Device with
    memory of its own says how that is reserved and released.

    `give` may run inside the garbage collector while this thread holds the lock, so it only
    queues; whoever has the lock next takes the queue in.
    """

    granule, place, why = ALIGNMENT, "", "the system has no more memory"

    def __init__(self, keep_bytes: int | None = None) -> None:
        self.keep_bytes = _physical_bytes() // 8 if keep_bytes is None else keep_bytes
        self.in_use = self.peak = self.kept = 0
        self._free: dict[int, list[int]] = {}
        self._live: dict[int, tuple[int, str]] = {}
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = new_lock()

    def take(self, bytes: int, label: str = "", size: int = 0) -> Block:
        """A Block of at least `bytes` bytes; `size` is their size class where it is known."""
        size = size or size_class(bytes, self.granule)
        with self._lock:
            self._settle()
            limit = config().memory_bytes
            if limit and self.in_use + size > limit:
                self._refuse(bytes, f"the limit is {_mib(limit)} (TILEGRAD_MEMORY_MB)")
            free = self._free.get(size)
            if free:
                pointer = free.pop()
                self.kept -= size
            else:
                pointer = self._reserve(size)
                if not pointer:
                    self._trim()
                    pointer = self._reserve(size)
                if not pointer:
                    self._refuse(bytes, self.why)
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
            if label:
                self._live[pointer] = (size, label)
        return Block(self, pointer, size)

    def give(self, pointer: int, bytes: int) -> None:
        """Return memory; never blocks."""
        self._returned.append((pointer, bytes))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def trim(self) -> None:
        """Give all kept memory back to the system, and what C code has freed but holds."""
        with self._lock:
            self._settle()
            self._trim()
        if _malloc_trim is not None:
            _malloc_trim(0)

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
        while self._returned:
            pointer, size = self._returned.popleft()
            self._live.pop(pointer, None)
            self.in_use -= size
            if self.kept + size <= self.keep_bytes:
                self._free.setdefault(size, []).append(pointer)
                self.kept += size
            else:
                self._release(pointer, size)

    def _trim(self) -> None:
        for size, pointers in self._free.items():
            for pointer in pointers:
                self._release(pointer, size)
        self._free.clear()
        self.kept = 0

    def _reserve(self, bytes: int) -> int:
        """The address of new memory; 0 if there is none."""
        return _reserve(bytes)

    def _release(self, pointer: int, bytes: int) -> None:
        """Give memory back."""
        _free(pointer)

    def _refuse(self, bytes: int, why: str) -> None:
        held = ", ".join(
            f"{label} {_mib(size)}" + (f" in {n}" if n else "") for label, size, n in self.holders()
        )
        raise MemoryLimitError(
            f"cannot allocate {_mib(bytes)}{self.place}: {why}",
            op="Buffer.allocate",
            got=f"in use {_mib(self.in_use)}, peak {_mib(self.peak)}; largest: {held or 'none'}",
            hint="free or donate Buffers, or use a smaller batch",
        )


def untouched(bytes: int, label: str) -> Buffer:
    """Zeros of the host that cost memory only where they are written: a page of the system at a
    time. They come from no pool."""
    try:
        mapping = mmap.mmap(-1, max(1, bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryLimitError(
            f"the system has no memory for a {label}",
            op="untouched",
            got=f"{bytes} bytes",
            hint="a smaller one: of a cache, a shorter context",
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # advice that a system may not know
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return Buffer(address, bytes, mapping, label=label)


def _mib(bytes: int) -> str:
    return f"{bytes / (1 << 20):.1f} MiB"


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 << 30


_libc = ctypes.CDLL(None, use_errno=False)
_memalign = _libc.posix_memalign
_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_memalign.restype = ctypes.c_int
_free = _libc.free
_free.argtypes = (ctypes.c_void_p,)
_free.restype = None
_malloc_trim = getattr(_libc, "malloc_trim", None)  # of glibc
_madvise = getattr(_libc, "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _madvise.restype = ctypes.c_int


def _reserve(bytes: int) -> int:
    place = ctypes.c_void_p()
    big = bytes >= BIG_BYTES
    if _memalign(ctypes.byref(place), HUGE_PAGE if big else ALIGNMENT, bytes) != 0:
        return 0
    pointer = place.value or 0
    if big and _madvise is not None:
        _madvise(pointer, bytes, MADV_HUGEPAGE)  # advice: a refusal costs nothing
    return pointer


POOL = Pool()


def memory_in_use() -> int:
    """Bytes that living CPU Buffers and their views hold."""
    POOL.settle()
    return POOL.in_use


def memory_peak() -> int:
    """The most bytes that were ever in use at once (since `reset_peak`)."""
    return POOL.peak


def reset_peak() -> None:
    """Start measuring the peak anew from what is in use now."""
    POOL.settle()
    POOL.peak = POOL.in_use
