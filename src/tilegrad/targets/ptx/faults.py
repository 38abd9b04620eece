"""Fault words of a GPU: in pinned memory of the host, where a kernel's store shows without a copy.

A launch with Sites has a word of its own; nobody writes it but a condition that does not hold, so
it costs a pointer. `check` looks at all words after work on the stream was waited for anyway.
Invariant: a word is never handed out twice, so a fault is reported with its own line even when its
Executable is gone.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import Site
from ...core.lock import new_lock
from ...runtime.fault import WORD_BYTES, Faults
from .calls import call

if TYPE_CHECKING:
    from .driver import Device

PART = 4096  # bytes of pinned memory at a time
MAPPED = 3  # of cuMemHostAlloc: every context sees it, and so do kernels


class DeviceFaults:
    """The fault words of one Device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.parts: list[Faults] = []
        self._lock = new_lock()

    def add(self, sites: list[Site]) -> int:
        """The address of a new word for a launch with these Sites."""
        with self._lock:
            if not self.parts or len(self.parts[-1].sites) * WORD_BYTES == PART:
                self.device.activate()
                address = int(call("cuMemHostAlloc", PART, MAPPED))
                memory = np.ctypeslib.as_array((ctypes.c_uint8 * PART).from_address(address))
                memory[:] = 0
                self.parts.append(Faults(memory))
            return self.parts[-1].add(sites)

    def check(self) -> None:
        """Raise the error of a condition that did not hold in the work done so far."""
        for part in self.parts:
            part.check()
