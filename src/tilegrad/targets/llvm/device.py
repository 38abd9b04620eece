"""The CPU as a Device: memory from the pool of the host, one step at a time on its workers.

Invariant: its memory is the host's, so values are seen without a copy; a run is over when it
returns, so there is nothing to wait for. Loaded code goes with the Executables that use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from ...core.config import config
from ...core.errors import UserError
from ...core.target import Target
from ...runtime import buffer as memory
from ...runtime.buffer import HOST, Buffer
from ...runtime.device import Device, copy_host
from ...runtime.recipe import Recipe
from .driver import LoadedModule, load
from .launcher import NativeLauncher
from .target import host_target


class CpuDevice(Device):
    """This computer's CPU; another name stands for a Device of its own on the same machine."""

    def __init__(self, name: str = HOST) -> None:
        super().__init__(name)
        self.modules: weakref.WeakValueDictionary[str, LoadedModule] = weakref.WeakValueDictionary()

    @property
    def target(self) -> Target:
        """The facts of this CPU, with the Config's number of workers."""
        return host_target().with_cores(config().threads)

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """A new Buffer with uninitialised memory from the pool."""
        block = memory.POOL.take(bytes, label)
        return Buffer(block.pointer, bytes, block, self.name, label=label)

    def put(self, pointer: int, source: int, bytes: int) -> None:
        """Copy host memory to an address here."""
        copy_host(pointer, source, bytes)

    def get(self, target: int, pointer: int, bytes: int) -> None:
        """Copy bytes at an address here to host memory."""
        copy_host(target, pointer, bytes)

    def copy_bytes(self, target: int, source: int, bytes: int) -> None:
        """Copy between addresses."""
        copy_host(target, source, bytes)

    def copy_across(self, target: int, source: int, bytes: int, origin: Device) -> None:
        """Copy from an address of another Device: it can write here itself."""
        origin.get(target, source, bytes)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes: what Buffers hold is not free."""
        total = host_target().memories["global"].bytes
        return max(0, total - memory.memory_in_use()), total

    def trim(self) -> None:
        """Give memory that nothing holds back to the system."""
        memory.POOL.trim()

    def loaded(self, key: str) -> LoadedModule | None:
        """Code that some Executable holds."""
        return self.modules.get(key)

    def keep(self, key: str, code: bytes) -> LoadedModule:
        """Object code linked into this process."""
        found = self.modules[key] = load(code)
        return found

    def launcher(self, recipe: Recipe, code: Mapping[str, Any]) -> NativeLauncher:
        """A native loop over the steps of a Recipe."""
        return NativeLauncher(recipe, code, self)


class Kind:
    """The one CPU."""

    def __init__(self) -> None:
        self.device: CpuDevice | None = None

    def count(self) -> int:
        """One."""
        return 1

    def open(self, number: int) -> CpuDevice:
        """The CPU."""
        if number:
            raise UserError("no such CPU", op="device", expected=HOST, got=f"{HOST}:{number}")
        if self.device is None:
            self.device = CpuDevice()
        return self.device


KIND = Kind()
