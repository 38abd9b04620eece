"""Object code into this process without LLVM: sections are mapped, references filled in.

What our kernels compile to is small: code, constants, and references between them or to a few
functions of libc and libm. Loading that needs no linker, and a process whose code is in the Store
starts without LLVM (its library takes 40 MB of memory and a tenth of a second).

Invariant: an object that has anything else (another machine, another kind of reference, data to
write, a name nobody has) is not loaded here: `place` gives None, and LLVM's own linker takes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from typing import Any

HEAD = b"\x7fELF\x02\x01"
MACHINES = {"x86_64": 62, "aarch64": 183}
CODE, SYMBOLS, RELOCATIONS, ZEROS = 1, 2, 4, 8  # kinds of sections
WRITABLE, ALLOCATED = 1, 2  # flags of sections
FUNCTION = 0x12  # info of a symbol: a function that others may call
STUB, ALIGNED = 16, 64
# A jump to the address that follows it, which fills the rest of a stub.
JUMPS = {
    "x86_64": (b"\xff\x25\x00\x00\x00\x00", b"\0\0"),
    "aarch64": (struct.pack("<II", 0x58000050, 0xD61F0200), b""),  # ldr x16, .+8; br x16
}
# Kinds of references. x86-64: 64 bits; 32 bits from here; the same to a function.
ABSOLUTE, NEAR, CALL = 1, 2, 4
# Arm: 64 bits; 32 from here; the page from here; places in a page of 1 << shift bytes; calls.
ARM_ABSOLUTE, ARM_NEAR, ARM_PAGE = 257, 261, 275
ARM_IN_PAGE = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
ARM_JUMPS = (282, 283)
Entry = tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """An object in memory: where its functions are. The mapping lives as long as this."""

    functions: dict[str, int]
    mapping: Any


def place(data: bytes) -> Placed | None:
    """Load an object; None if it is for LLVM to load."""
    if not sys.platform.startswith("linux") or data[:6] != HEAD or len(data) < 64:
        return None
    machine = os.uname().machine
    if struct.unpack_from("<H", data, 18)[0] != MACHINES.get(machine):
        return None
    return Object(data, machine).place()


class Object:
    """One 64-bit ELF object of this machine."""

    def __init__(self, data: bytes, machine: str) -> None:
        self.data, self.machine = data, machine
        (at,) = struct.unpack_from("<Q", data, 40)
        width, count = struct.unpack_from("<HH", data, 58)
        self.sections: list[Entry] = [
            struct.unpack_from("<IIQQQQIIQQ", data, at + i * width) for i in range(count)
        ]
        self.symbols: list[tuple[str, int, int, int]] = []  # name, info, section, value
        for section in self.sections:
            if section[1] == SYMBOLS:
                self.symbols = self._read_symbols(section)

    def _read_symbols(self, section: Entry) -> list[tuple[str, int, int, int]]:
        strings, found = self.sections[section[6]][4], []
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, where, value, _ = struct.unpack_from("<IBBHQQ", self.data, at)
            end = self.data.index(b"\0", strings + name)
            found.append((self.data[strings + name : end].decode(), info, where, value))
        return found

    def place(self) -> Placed | None:
        """Map what is to be in memory, fill references in, and make it code."""
        offsets, size = self._layout()
        outside = {n: address_of(n) for n, _, where, _ in self.symbols if n and not where}
        if offsets is None or None in outside.values():
            return None
        stubs = {name: size + i * STUB for i, name in enumerate(outside)}
        image = bytearray(size + len(stubs) * STUB)
        for number, offset in offsets.items():
            _, kind, _, _, at, length, *_ = self.sections[number]
            if kind != ZEROS:
                image[offset : offset + length] = self.data[at : at + length]
        for name, offset in stubs.items():
            jump, rest = JUMPS[self.machine]
            image[offset : offset + STUB] = jump + struct.pack("<Q", outside[name]) + rest
        try:
            mapping = mmap.mmap(
                -1,
                max(1, len(image)),
                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except OSError:
            return None
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if not self._fill(image, base, offsets, stubs):
            return None
        mapping[: len(image)] = bytes(image)
        if _protect()(base, len(mapping), mmap.PROT_READ | mmap.PROT_EXEC):
            return None  # the system does not let data become code
        _forget_code(base, len(mapping))
        functions = {
            name: base + offsets[where] + value
            for name, info, where, value in self.symbols
            if info == FUNCTION and where in offsets
        }
        return Placed(functions, mapping)

    def _layout(self) -> tuple[dict[int, int] | None, int]:
        """Where each section goes that is to be in memory, and the bytes of all."""
        offsets, size = {}, 0
        for number, (_, kind, flags, _, _, length, _, _, align, _) in enumerate(self.sections):
            if not flags & ALLOCATED or kind not in (CODE, ZEROS):
                continue  # tables for unwinding are not needed
            if flags & WRITABLE or align > mmap.PAGESIZE:
                return None, 0
            step = max(ALIGNED, align)
            offsets[number] = -(-size // step) * step
            size = offsets[number] + length
        return offsets, -(-size // STUB) * STUB

    def _fill(
        self, image: bytearray, base: int, offsets: dict[int, int], stubs: dict[str, int]
    ) -> bool:
        """Write what references come to into the image; whether all are of a known kind."""
        for _, kind, _, _, at, length, _, target, *_ in self.sections:
            if kind != RELOCATIONS or target not in offsets:
                continue
            for entry in range(at, at + length, 24):
                offset, info, more = struct.unpack_from("<QQq", self.data, entry)
                name, _, where, value = self.symbols[info >> 32]
                there = stubs.get(name) if not where else offsets.get(where)
                if there is None:
                    return False
                what = info & 0xFFFFFFFF
                if not where and what != CALL and what not in ARM_JUMPS:
                    return False
                here = offsets[target] + offset
                found = there + (value if where else 0) + more
                write = _write_arm if self.machine == "aarch64" else _write_x86
                if not write(image, what, base, here, found):
                    return False
        return True


def _write_x86(image: bytearray, what: int, base: int, here: int, found: int) -> bool:
    """Fill in one reference of x86-64 to what is `found` bytes from the base."""
    if what == ABSOLUTE:
        struct.pack_into("<Q", image, here, base + found)
    elif what in (NEAR, CALL):
        struct.pack_into("<i", image, here, found - here)
    else:
        return False
    return True


def _write_arm(image: bytearray, what: int, base: int, here: int, found: int) -> bool:
    """Fill in one reference of 64-bit Arm; most are fields of instructions."""
    if what == ARM_ABSOLUTE:
        struct.pack_into("<Q", image, here, base + found)
        return True
    if what == ARM_NEAR:
        struct.pack_into("<i", image, here, found - here)
        return True
    (word,) = struct.unpack_from("<I", image, here)
    if what == ARM_PAGE:
        pages = ((base + found) >> 12) - ((base + here) >> 12)
        word = word & 0x9F00001F | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    elif what in ARM_IN_PAGE:
        place = (base + found & 0xFFF) >> ARM_IN_PAGE[what]
        word = word & 0xFFC003FF | place << 10
    elif what in ARM_JUMPS:
        word = word & 0xFC000000 | (found - here >> 2) & 0x3FFFFFF
    else:
        return False
    struct.pack_into("<I", image, here, word)
    return True


def _forget_code(base: int, size: int) -> None:
    """Let the processor read code anew where it does not see writes by itself."""
    if os.uname().machine == "aarch64":
        with contextlib.suppress(OSError, AttributeError):
            clear = getattr(ctypes.CDLL("libgcc_s.so.1"), "__clear_cache")
            clear.argtypes, clear.restype = (ctypes.c_void_p, ctypes.c_void_p), None
            clear(base, base + size)


@functools.cache
def _libraries() -> list[Any]:
    found = [ctypes.CDLL(None)]
    with contextlib.suppress(OSError):
        found.append(ctypes.CDLL("libm.so.6"))
    return found


@functools.cache
def address_of(name: str) -> int | None:
    """The address of a function of libc or libm; None if neither has it."""
    for library in _libraries():
        function = getattr(library, name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


@functools.cache
def _protect() -> Any:
    function = ctypes.CDLL(None).mprotect
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), int
    return function
