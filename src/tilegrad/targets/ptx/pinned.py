"""Pinned host memory for small copies that the host does not wait for.

What goes to the GPU leaves from a Ring, whose parts are used again when the GPU has read them;
what comes from it lands in a Landing, which is read once its event has come. Invariant: a place
that a copy may still read or write is neither handed out nor shown.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ...core.lock import new_lock
from .context import Context, Event
from .cuda_api import call

PART = 256 << 10
PARTS = 4


class Ring:
    """Pinned memory in parts; an event at the end of each says when it may be used again."""

    def __init__(self, device: Context, part: int = PART, parts: int = PARTS) -> None:
        self.device, self.part, self.parts = device, part, parts
        self.lock = new_lock()
        device.activate()
        self.base = int(call("cuMemHostAlloc", part * parts, 0))
        self.events: list[Event | None] = [None] * parts
        self.turn = self.used = 0

    def write(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array to the GPU; it may be changed when this returns."""
        bytes = array.nbytes
        if not bytes:
            return
        self.device.activate()
        if bytes > self.part:
            self.device.staging.upload(pointer, array.ctypes.data, bytes, self.device.stream)
            return
        with self.lock:
            place = self._place(bytes)
            ctypes.memmove(place, array.ctypes.data, bytes)
            call("cuMemcpyHtoDAsync", pointer, place, bytes, self.device.stream)

    def _place(self, bytes: int) -> int:
        if self.used + bytes > self.part:
            event = self.events[self.turn] or Event(self.device, timing=False)
            self.events[self.turn] = event.record()
            self.turn, self.used = (self.turn + 1) % self.parts, 0
            before = self.events[self.turn]
            if before is not None:
                before.synchronize()
        place = self.base + self.turn * self.part + self.used
        self.used += -(-bytes // 64) * 64
        return place


class Landing:
    """Values on their way from the GPU."""

    def __init__(self, owner: Landings, pointer: int, bytes: int) -> None:
        self.owner, self.bytes = owner, bytes
        self.place, self.event, self.room = owner.take(bytes)
        device = owner.device
        device.activate()
        if bytes:
            call("cuMemcpyDtoHAsync", self.place, pointer, bytes, device.stream)
        self.event.record()

    def wait(self) -> np.ndarray[Any, Any]:
        """The bytes, once they are here."""
        self.event.synchronize()
        self.owner.device.faults.check()
        found = np.empty(self.bytes, np.uint8)
        ctypes.memmove(found.ctypes.data, self.place, self.bytes)
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

    def start(self, pointer: int, bytes: int) -> Landing:
        """Let bytes come from an address of the GPU, after all work so far."""
        return Landing(self, pointer, bytes)

    def take(self, bytes: int) -> tuple[int, Event, int]:
        """(address, event, bytes really there)."""
        room = max(256, 1 << max(0, bytes - 1).bit_length())
        kept = self.free.get(room)
        try:
            return (*kept.pop(), room)  # type: ignore[union-attr]
        except (AttributeError, IndexError):
            self.device.activate()
            return int(call("cuMemHostAlloc", room, 0)), Event(self.device, timing=False), room
