"""An allocator for tests: every Buffer lies against a page that nothing may touch.

`install("end")` puts the last byte of each CPU Buffer right before such a page, `install("start")`
the first byte right after one, so a read or write outside of a Buffer ends the process at once. The
pages of a Buffer that is gone are given back: what still points there faults too.
"""

from __future__ import annotations

import ctypes
import mmap

from tilegrad.runtime import buffer
from tilegrad.runtime.device import Device

PAGE = mmap.PAGESIZE
NONE, READ_WRITE = 0, 3
PRIVATE_ANONYMOUS = 0x22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Pages:
    """Memory of one Buffer between two pages that nothing may touch."""

    def __init__(self, bytes: int, side: str) -> None:
        self.bytes = bytes
        inside = -(-bytes // PAGE) * PAGE
        self.length = inside + 2 * PAGE
        self.base = _libc.mmap(None, self.length, NONE, PRIVATE_ANONYMOUS, -1, 0)
        assert self.base not in (None, ctypes.c_void_p(-1).value), "no memory for guard pages"
        first = self.base + PAGE
        if inside:
            assert _libc.mprotect(first, inside, READ_WRITE) == 0
            ctypes.memset(first, 0xA5, inside)
        self.pointer = first if side == "start" else first + inside - bytes

    def __del__(self) -> None:
        _libc.munmap(self.base, self.length)


class GuardedPool(buffer.Pool):
    """A Pool that keeps nothing and gives exactly the bytes that were asked for."""

    def __init__(self, side: str) -> None:
        super().__init__(0)
        self.side = side

    def take(self, bytes: int, label: str = "") -> Pages:  # type: ignore[override]
        return Pages(bytes, self.side)


def install(side: str) -> None:
    """From now on, in this process, every CPU Buffer is guarded, and each Executable's arena."""
    buffer.POOL = GuardedPool(side)
    Device.arena = lambda self, bytes: self.allocate(bytes, "arena")
