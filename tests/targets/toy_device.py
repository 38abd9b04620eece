"""A machine of its own, from outside the package by its public interface alone: facts, a Language
whose programs are the text of Tile IR, and a Device whose memory is apart from the host's and whose
launches parse that text and run it by the Tile interpreter."""

from __future__ import annotations

import ctypes
import itertools
import json

import numpy as np

from tilegrad.core.errors import AxisError, Site
from tilegrad.core.target import MemorySpace, Target
from tilegrad.ir.passes import Pass
from tilegrad.ir.symbol import evaluate
from tilegrad.runtime.buffer import Buffer
from tilegrad.runtime.device import KINDS, Device
from tilegrad.runtime.language import LANGUAGES, Language, ProgramText, as_it_is
from tilegrad.tile import interpret
from tilegrad.tile.build import Body, body_sites, body_symbols
from tilegrad.tile.text import body_text, parse_body

TARGET = Target(
    "toy",
    "toy",
    vector_bytes=32,
    vector_registers=8,
    cores=3,
    memories={
        "register": MemorySpace(256, 32, ("load", "store")),
        "l1": MemorySpace(16 << 10, 32, ("prefetch",), 1e9),
        "l2": MemorySpace(128 << 10, 32, ("prefetch",), 1e9),
        "global": MemorySpace(1 << 30, 32, ("load", "store"), 1e8, shared=True),
    },
    flops={"float32": 1e9},
)
BASE = 1 << 40  # addresses that no host has


def stamp(body: Body, kind: str, target: Target) -> Body:
    """A pass of this target's own: notes what a Body was lowered from."""
    body.notes["stamped"] = kind
    return body


def emit(body, name, target) -> ProgramText:
    symbols = [s.name for s in body_symbols(body)]
    bare = Body(name, body.block, body.grid, {})
    return ProgramText(body_text(bare), 0, json.dumps({"symbols": symbols}))


def compile_text(text, target, arch) -> bytes:
    return text.encode()


LANGUAGE = Language(
    emit,
    lambda body: [s.name for s in body_symbols(body)],
    compile_text,
    {"toy": as_it_is},
    [Pass("stamp", stamp)],
)


class ToyDevice(Device):
    """Memory is a dict of arrays; everything happens at once."""

    alignment = 16
    target = TARGET

    def __init__(self, number: int) -> None:
        super().__init__(f"toy:{number}")
        self.memory: dict[int, np.ndarray] = {}
        self.next = itertools.count(BASE, 1 << 30)
        self.copies: list[tuple[str, int]] = []
        self.launches: list[str] = []

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        pointer = next(self.next)
        whole = np.full(bytes + 64, 0xA5, np.uint8)
        self.memory[pointer] = whole[-whole.ctypes.data % 64 :][:bytes]
        return Buffer(pointer, bytes, object(), self.name, label=label)

    def at(self, pointer: int, bytes: int | None = None) -> np.ndarray:
        """The bytes at an address."""
        base = max(p for p in self.memory if p <= pointer)
        found = self.memory[base][pointer - base :]
        assert bytes is None or len(found) >= bytes, "outside of what was allocated"
        return found if bytes is None else found[:bytes]

    def put(self, pointer: int, source: int, bytes: int) -> None:
        self.copies.append(("put", bytes))
        ctypes.memmove(self.at(pointer, bytes).ctypes.data, source, bytes)

    def get(self, target: int, pointer: int, bytes: int) -> None:
        self.copies.append(("get", bytes))
        ctypes.memmove(target, self.at(pointer, bytes).ctypes.data, bytes)

    def copy_bytes(self, target: int, source: int, bytes: int) -> None:
        self.at(target, bytes)[:] = self.at(source, bytes)

    def memory_info(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def prepare(self, code, name, entry, symbols) -> ToyLaunch:
        return ToyLaunch(self, code, entry, symbols)


class ToyLaunch:
    """A Body with its Symbols bound."""

    def __init__(self, device, code, entry, symbols) -> None:
        self.device, self.body = device, parse_body(code.decode())
        self.symbols = {name: symbols[name] for name in json.loads(entry)["symbols"]}
        self.empty = any(evaluate(size, self.symbols) == 0 for size in self.body.grid)

    def launch(self, pointers) -> None:
        body, memories = self.body, []
        self.device.launches.append(body.name)
        for pointer, parameter in zip(pointers, body.parameters):
            kind = parameter.dtype.numpy
            found = self.device.at(pointer)
            memories.append(found[: found.size // kind.itemsize * kind.itemsize].view(kind))
        try:
            interpret.run(body, memories, self.symbols)
        except AxisError as error:
            told = [str(Site(**n.attrs).error()) for n in body_sites(body)]
            word = (ctypes.c_uint32 * 4).from_address(pointers[-1])
            word[0] = 1 + told.index(str(error))


class ToyKind:
    """Two of them."""

    def __init__(self) -> None:
        self.devices: dict[int, ToyDevice] = {}

    def count(self) -> int:
        return 2

    def open(self, number: int) -> ToyDevice:
        if number not in self.devices:
            self.devices[number] = ToyDevice(number)
        return self.devices[number]


def install():
    """Both registries within a block: `with a, b`."""
    return KINDS.replaced("toy", ToyKind()), LANGUAGES.replaced("toy", LANGUAGE)
