"""Devices: machines that are opened here, behind one interface.

A Device has memory (allocate, copies from and to the host and other Devices), a stream of work with
events on it, code that is loaded, and Launchers that run the steps of a Recipe over Slots or
capture them to be run again. What a new machine must say is `allocate`, `put`, `get`, `copy_bytes`
and `prepare`; the rest is written in terms of these, and a Device may do it better. A `DeviceKind`
says how many of them there are and opens one; `KINDS` is the table of them. Invariant: work on one
Device happens in the order it was given; what `get` gives is the value after all of it.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core.errors import InternalError, UserError, meant
from ..core.lock import new_lock, new_rlock
from .buffer import HOST, Buffer, untouched
from .fault import FaultWords
from .registry import Registry

if TYPE_CHECKING:
    from ..core.target import Target
    from .launcher import Launcher
    from .recipe import Recipe


class DeviceKind(Protocol):
    """Devices of one name: "cuda" for "cuda:0", "cuda:1"."""

    def count(self) -> int:
        """How many of them this machine has."""
        ...

    def open(self, number: int) -> Device:
        """The one with this number, the same object each time."""
        ...


class Event:
    """A point in the work of a Device; here all work before it is done when it is recorded."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> Event:
        """Put it after all work so far; returns self."""
        self.seconds = time.perf_counter()
        return self

    def synchronize(self) -> None:
        """Wait until the work has come to it."""

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two recorded events; waits for this one."""
        return self.seconds - earlier.seconds


class Landing:
    """Bytes on their way to the host; here they are there at once."""

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value = value

    def wait(self) -> np.ndarray[Any, Any]:
        """The bytes, once they are here."""
        return self.value


class Device:
    """One opened machine; see the module's docstring."""

    name: str
    alignment = 1  # pointers that kernels get are multiples of it
    arch = ""  # what object code depends on besides the Target
    stream: Any = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = new_rlock()
        self.faults = FaultWords()
        self.scratch: Buffer | None = None  # the arena, as large as it has become
        self._scratch_lock = new_lock()

    def __repr__(self) -> str:
        return f"Device({self.name})"

    @property
    def target(self) -> Target:
        """The facts of this machine that the compiler uses."""
        raise self._missing("target")

    # ---- memory ---------------------------------------------------------------------------

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """A new Buffer with uninitialised memory, which is free again when nothing holds it."""
        raise self._missing("allocate")

    def put(self, pointer: int, source: int, bytes: int) -> None:
        """Copy host memory to an address here; `source` may be changed when this returns."""
        raise self._missing("put")

    def get(self, target: int, pointer: int, bytes: int) -> None:
        """Copy bytes at an address here to host memory, after all work so far."""
        raise self._missing("get")

    def copy_bytes(self, target: int, source: int, bytes: int) -> None:
        """Copy between addresses of this Device, after all work so far."""
        raise self._missing("copy_bytes")

    def copy_across(self, target: int, source: int, bytes: int, origin: Device) -> None:
        """Copy from an address of another Device to one here: through the host."""
        if bytes:
            passing = np.empty(bytes, np.uint8)
            origin.get(passing.ctypes.data, source, bytes)
            self.put(target, passing.ctypes.data, bytes)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        raise self._missing("memory_info")

    def trim(self) -> None:
        """Give memory that nothing holds back to the system."""

    def write(self, buffer: Buffer, array: np.ndarray[Any, Any]) -> None:
        """Copy an array's bytes to the start of a Buffer."""
        array = np.ascontiguousarray(array)
        if array.nbytes > buffer.bytes:
            raise InternalError(f"{self.name} device", f"{array.nbytes} bytes into {buffer}")
        if array.nbytes:
            self.put(buffer.pointer, array.ctypes.data, array.nbytes)

    def fill(self, buffer: Buffer, byte: int = 0) -> None:
        """Set every byte of a Buffer."""
        self.write(buffer, np.full(buffer.bytes, byte, np.uint8))

    def upload(self, array: np.ndarray[Any, Any], label: str = "") -> Buffer:
        """A Buffer with a copy of an array's bytes in row-major order."""
        array = np.ascontiguousarray(array)
        buffer = self.allocate(array.nbytes, label)
        self.write(buffer, array)
        return buffer

    def download(
        self, buffer: Buffer, shape: Sequence[int] | None = None, dtype: Any = np.uint8
    ) -> np.ndarray[Any, Any]:
        """A copy of a Buffer's values in host memory, after all work so far; what a program of that
        work found wrong with its data is raised here."""
        result = host_bytes(buffer.bytes)
        if buffer.bytes:
            self.get(result.ctypes.data, buffer.pointer, buffer.bytes)
            self.faults.check()
        if shape is None:
            return result
        kind = np.dtype(getattr(dtype, "numpy", dtype))
        count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return result[:count].view(kind).reshape(shape)

    def copy(self, buffer: Buffer) -> Buffer:
        """A Buffer of its own with the same bytes."""
        fresh = self.allocate(buffer.bytes, buffer.label)
        self.copy_bytes(fresh.pointer, buffer.pointer, buffer.bytes)
        return fresh

    def receive(self, buffer: Buffer) -> Buffer:
        """The bytes of a Buffer of any Device in one of this Device (itself if it is here)."""
        if buffer.device == self.name:
            return buffer
        fresh = self.allocate(buffer.bytes, buffer.label)
        self.copy_across(fresh.pointer, buffer.pointer, buffer.bytes, device(buffer.device))
        return fresh

    def fitting(self, buffer: Buffer) -> Buffer:
        """A Buffer here, aligned as kernels expect: small values of the host come along at each
        call, and another library's memory may begin anywhere."""
        if buffer.device == self.name:
            pointer = buffer.pointer
            return buffer if pointer and not pointer % self.alignment else self.copy(buffer)
        if buffer.device != HOST:
            raise UserError(
                "a Buffer is on another device",
                op="run",
                expected=self.name,
                got=buffer.device,
                hint=f'.to("{self.name}")',
            )
        return self.receive(buffer)

    def arena(self, bytes: int) -> Buffer:
        """The Device's scratch, at least this large: one Executable runs on it at a time."""
        with self._scratch_lock:
            if self.scratch is None or self.scratch.bytes < bytes:
                self.scratch = None
                self.scratch = self.allocate(max(bytes, 512), "arena")
            return self.scratch

    # ---- small copies that the host does not wait for -----------------------------------------

    def post(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array to an address, before all work from now on."""
        self.put(pointer, array.ctypes.data, array.nbytes)

    def land(self, pointer: int, bytes: int) -> Any:
        """A Landing of the bytes that are at an address after all work so far."""
        value = np.empty(bytes, np.uint8)
        self.get(value.ctypes.data, pointer, bytes)
        return Landing(value)

    # ---- order ------------------------------------------------------------------------------

    def event(self, timing: bool = True) -> Any:
        """A new Event."""
        return Event()

    def synchronize(self) -> None:
        """Wait until all work is done; a kernel's fault shows here."""
        self.faults.check()

    # ---- code -------------------------------------------------------------------------------

    def loaded(self, key: str) -> Any:
        """Code that is loaded under a key; None if there is none."""
        return None

    def keep(self, key: str, code: bytes) -> Any:
        """Object code made ready for `prepare` and `launcher`, under its key."""
        return code

    def prepare(self, code: Any, name: str, entry: str, symbols: Mapping[str, int]) -> Any:
        """The function `name` of loaded code as a launch but for its pointers: an object with
        `launch(pointers)`, and `empty` where nothing would run. `entry` is what the Program says
        that a launch must know."""
        raise self._missing("prepare")

    def launcher(self, recipe: Recipe, code: Mapping[str, Any]) -> Launcher:
        """What runs the steps of a Recipe here; `code` has what was loaded, by key."""
        from .launcher import Launcher

        return Launcher(recipe, code, self)

    def _missing(self, what: str) -> InternalError:
        return InternalError(f"{self.name} device", f"{type(self).__name__} has no `{what}`")


def host_bytes(bytes: int) -> np.ndarray[Any, Any]:
    """Fresh host memory as a NumPy array of bytes, 64-byte aligned."""
    whole = np.empty(bytes + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + bytes]


def copy_host(target: int, source: int, bytes: int) -> None:
    """Copy between addresses of the host."""
    ctypes.memmove(target, source, bytes)


# ---- which there are -------------------------------------------------------------------------

KINDS: Registry[DeviceKind] = Registry(
    "device",
    "tilegrad.devices",
    {
        HOST: "tilegrad.targets.llvm.device:KIND",
        "cuda": "tilegrad.targets.ptx.device:KIND",
        "npu": "tilegrad.targets.npu.device:KIND",
    },
)
NAME = re.compile(r"([A-Za-z_][\w-]*)(?::(\d+))?\Z")


def device_name(device: Any, op: str = "device") -> str:
    """The full name of a device: "cpu", "cuda:0"; takes torch's devices too. Nothing is opened."""
    said = device if isinstance(device, str) else str(device)
    if said == HOST:
        return HOST
    found = NAME.match(said)
    if found is None or not KINDS.has(found[1]) or (found[1] == HOST and int(found[2] or 0)):
        raise UserError(
            "no such device",
            op=op,
            expected=", ".join(f'"{name}"' for name in sorted(KINDS.names()))
            + ' or "cuda:<number>"',
            got=repr(device),
            hint=meant(said.partition(":")[0], KINDS.names())
            or "`tilegrad doctor` shows what this machine has",
        )
    return HOST if found[1] == HOST else f"{found[1]}:{int(found[2] or 0)}"


def device(name: str) -> Device:
    """The Device of a full name, opened when it is first asked for."""
    kind, _, number = name.partition(":")
    return KINDS.get(kind).open(int(number or 0))


def zeroed(bytes: int, name: str, label: str) -> Buffer:
    """A Buffer of zeros; those of the host cost memory only where they are written."""
    if name == HOST:
        return untouched(bytes, label)
    there = device(name)
    buffer = there.allocate(bytes, label)
    there.fill(buffer)
    return buffer


def target_for(name: str) -> Target:
    """The Target of a Device, with the Config's number of workers on the CPU."""
    return device(name).target


def register(name: str, kind: DeviceKind | str) -> None:
    """Add a kind of Device: "name:0" is its first from now on."""
    KINDS.register(name, kind)


__all__ = ["Device", "DeviceKind", "device", "device_name", "register", "target_for", "zeroed"]
