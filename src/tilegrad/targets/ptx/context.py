"""One GPU as the driver sees it: its facts, its context, its streams, memory and events.

It is opened on its primary context (the one torch uses too), with one stream, which waits for the
legacy default stream and is waited for by it: work handed over from or to torch on its default
stream is in order without events. Copies go through pinned memory: what goes to the GPU leaves from
a Ring, whose parts are used again when the GPU has read them; what comes from it lands in a
Landing, which is read once its event has come. Invariant: a place that a copy may still read or
write is neither handed out nor shown, and a call with a Context makes it current in the calling
thread first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from typing import Any

import numpy as np

from ...core.lock import new_lock
from ...runtime import device as runtime
from ...runtime.fault import FaultWords
from .cuda_api import api, call, count
from .memory import Pool

MAPPED = 3  # of cuMemHostAlloc: every context sees it, and so do kernels

# What `Context.attributes` holds: attributes of the driver by their names in lower case.
ATTRIBUTES = (
    "compute_capability_major",
    "compute_capability_minor",
    "multiprocessor_count",
    "max_threads_per_block",
    "max_threads_per_multiprocessor",
    "max_blocks_per_multiprocessor",
    "max_registers_per_block",
    "max_registers_per_multiprocessor",
    "warp_size",
    "max_shared_memory_per_block_optin",
    "max_shared_memory_per_multiprocessor",
    "l2_cache_size",
    "global_memory_bus_width",
    "memory_clock_rate",
)

_thread = threading.local()


def devices() -> list[dict[str, Any]]:
    """Facts of each GPU here, without opening it; empty where there is none."""
    return [facts_of(number) for number in range(count())]


def facts_of(number: int) -> dict[str, Any]:
    """What the driver knows of a GPU."""
    handle = call("cuDeviceGet", number)
    kinds = api().CUdevice_attribute
    name = call("cuDeviceGetName", 256, handle)
    facts: dict[str, Any] = {
        "name": name.split(b"\0")[0].decode(),
        "number": number,
        "total_memory": int(call("cuDeviceTotalMem", handle)),
        "driver_version": int(call("cuDriverGetVersion")),
    }
    for attribute in ATTRIBUTES:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{attribute.upper()}")
        facts[attribute] = int(call("cuDeviceGetAttribute", kind, handle))
    return facts


class Context(runtime.Device):
    """One opened GPU, but for what is loaded on it."""

    alignment = 16  # of the pointers that kernels get

    def __init__(self, number: int) -> None:
        super().__init__(f"cuda:{number}")
        self.number, self.process = number, os.getpid()
        self.attributes = facts_of(number)
        self.handle = call("cuDeviceGet", number)
        self.context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.activate()
        self.stream = call("cuStreamCreate", 0)  # in order with the legacy default stream
        # Graphs are captured on one of their own, which the legacy stream does not touch.
        self.capture_stream = call("cuStreamCreate", 1)
        self.pool = Pool(self.name, self.activate)
        self.retired: deque[Any] = deque()  # handles of modules that nobody uses any more
        self.faults = FaultWords(self._mapped)

    def activate(self) -> None:
        """Make the context current in this thread."""
        if getattr(_thread, "device", None) is not self:
            call("cuCtxSetCurrent", self.context)
            _thread.device = self

    def hand_over(self, stream: int) -> None:
        """Let another stream of this context wait for all work on ours."""
        Event(self, timing=False).record().wait(stream)

    def event(self, timing: bool = True) -> Event:
        """A new Event."""
        return Event(self, timing)

    def synchronize(self) -> None:
        """Wait until all work on the stream is done; a kernel's fault shows here."""
        self.activate()
        call("cuStreamSynchronize", self.stream)
        self.faults.check()

    def _mapped(self, bytes: int) -> np.ndarray[Any, Any]:
        """Pinned memory of the host that every context sees and kernels write to, all 0."""
        self.activate()
        address = int(call("cuMemHostAlloc", bytes, MAPPED))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * bytes).from_address(address))
        memory[:] = 0
        return memory

    def copy_bytes(self, target: int, source: int, bytes: int, stream: Any = None) -> None:
        """Copy between addresses of this GPU, on the stream."""
        if bytes:
            self.activate()
            there = self.stream if stream is None else stream
            call("cuMemcpyDtoDAsync", target, source, bytes, there)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes as the driver counts them."""
        self.activate()
        free, total = call("cuMemGetInfo")
        return int(free), int(total)


# ---- events ---------------------------------------------------------------------------------


class Event:
    """A point on a stream; two of them measure the time between."""

    __slots__ = ("device", "handle")

    def __init__(self, device: Context, timing: bool = True) -> None:
        self.device = device
        device.activate()
        self.handle = call("cuEventCreate", 0 if timing else 2)

    def record(self, stream: Any = None) -> Event:
        """Put the event on a stream, after all work so far; returns self."""
        self.device.activate()
        call("cuEventRecord", self.handle, self.device.stream if stream is None else stream)
        return self

    def record_within(self, stream: Any) -> None:
        """Let a graph that is being captured from a stream record the event at each launch."""
        call("cuEventRecordWithFlags", self.handle, stream, 1)  # external

    def synchronize(self) -> None:
        """Wait until the stream has come to the event."""
        call("cuEventSynchronize", self.handle)

    def wait(self, stream: Any) -> None:
        """Let a stream wait for the event."""
        call("cuStreamWaitEvent", stream, self.handle, 0)

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two recorded events; waits for this one."""
        self.synchronize()
        return float(call("cuEventElapsedTime", earlier.handle, self.handle)) * 1e-3

    def __del__(self) -> None:
        try:
            api().cuEventDestroy(self.handle)
        except Exception:
            return  # the interpreter is going down


# ---- pinned memory ------------------------------------------------------------------------------


PART = 4 << 20
PARTS = 2


class Ring:
    """Pinned memory in parts; an event at the end of each says when it may be used again."""

    def __init__(self, device: Context) -> None:
        self.device, self.lock = device, new_lock()
        device.activate()
        self.base = int(call("cuMemHostAlloc", PART * PARTS, 0))
        self.events: list[Event | None] = [None] * PARTS
        self.turn = self.used = 0

    def write(self, pointer: int, source: int, bytes: int) -> None:
        """Copy host memory to the GPU; it may be changed when this returns."""
        self.device.activate()
        for at in range(0, bytes, PART):
            part = min(PART, bytes - at)
            with self.lock:
                place = self._place(part)
                ctypes.memmove(place, source + at, part)
                call("cuMemcpyHtoDAsync", pointer + at, place, part, self.device.stream)

    def _place(self, bytes: int) -> int:
        if self.used + bytes > PART:
            event = self.events[self.turn] or Event(self.device, timing=False)
            self.events[self.turn] = event.record()
            self.turn, self.used = (self.turn + 1) % PARTS, 0
            before = self.events[self.turn]
            if before is not None:
                before.synchronize()
        place = self.base + self.turn * PART + self.used
        self.used += -(-bytes // 64) * 64
        return place


class Landing:
    """Bytes on their way from an address of the GPU, where they are after all work so far."""

    def __init__(self, owner: Landings, pointer: int, bytes: int) -> None:
        self.owner, self.bytes = owner, bytes
        self.place, self.event, self.room = owner.take(bytes)
        device = owner.device
        device.activate()
        if bytes:
            call("cuMemcpyDtoHAsync", self.place, pointer, bytes, device.stream)
        self.event.record()

    def read(self, target: int) -> None:
        """Copy the bytes to host memory, once they are here."""
        self.event.synchronize()
        ctypes.memmove(target, self.place, self.bytes)

    def wait(self) -> np.ndarray[Any, Any]:
        """The bytes, once they are here."""
        found = np.empty(self.bytes, np.uint8)
        self.read(found.ctypes.data)
        self.owner.device.faults.check()
        return found

    def __del__(self) -> None:
        # A copy that nobody waited for may still be under way. The next one into this place
        # comes after it on the stream.
        if hasattr(self, "room"):
            self.owner.free.setdefault(self.room, []).append((self.place, self.event))


class Landings:
    """Places in pinned memory with their events, kept by size for the next ones."""

    def __init__(self, device: Context) -> None:
        self.device = device
        self.free: dict[int, list[tuple[int, Event]]] = {}

    def take(self, bytes: int) -> tuple[int, Event, int]:
        """(address, event, bytes really there)."""
        room = max(256, 1 << max(0, bytes - 1).bit_length())
        kept = self.free.get(room)
        try:
            return (*kept.pop(), room)  # type: ignore[union-attr]
        except (AttributeError, IndexError):
            self.device.activate()
            return int(call("cuMemHostAlloc", room, 0)), Event(self.device, timing=False), room

    def read(self, target: int, pointer: int, bytes: int) -> None:
        """Copy from the GPU to host memory: while a part is read the next one is under way."""
        waiting: deque[tuple[Landing, int]] = deque()
        for at in range(0, bytes, PART):
            waiting.append((Landing(self, pointer + at, min(PART, bytes - at)), target + at))
            if len(waiting) > 1:
                Landing.read(*waiting.popleft())
        for landing, into in waiting:
            landing.read(into)
