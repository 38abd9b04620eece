"""One GPU as the driver sees it: its facts, its context, its streams, memory and events.

It is opened on its primary context (the one torch uses too), with one stream, which waits for the
legacy default stream and is waited for by it: work handed over from or to torch on its default
stream is in order without events. Invariant: a call with a Context makes it current in the calling
thread first.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import numpy as np

from ...runtime import device as runtime
from ...runtime.fault import FaultWords
from .cuda_api import api, available, call
from .memory import Pool, Staging, mapped_words

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
    if not available():
        return []
    return [facts_of(number) for number in range(int(call("cuDeviceGetCount")))]


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
        self.staging = Staging(self.activate)
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
        """Memory of the host that kernels write to, all 0."""
        self.activate()
        return mapped_words(bytes)

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
