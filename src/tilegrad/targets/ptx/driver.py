"""GPUs opened through the CUDA driver: memory, machine code and what runs it.

`open_device(number)` opens one. Machine code is loaded once by content; what was not used for long
is unloaded. Invariant: a process opens a GPU once, and not after a fork.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ...core.config import config
from ...core.errors import UserError
from ...core.lock import new_lock
from ...core.recent import Recent
from ...core.target import Target
from ...runtime import device as runtime
from ...runtime.buffer import Buffer
from ...runtime.recipe import Recipe
from ...runtime.store import content_key
from .context import Context, Event, Landing, Landings, Ring
from .cuda_api import call
from .launch import Module
from .launcher import CudaLauncher
from .target import target_of

MODULES = 8  # of machine code, that are kept for each Executable that is

_devices: dict[int, Device] = {}
_open_lock = new_lock()


def open_device(number: int = 0) -> Device:
    """The Device with this number, opened once per process."""
    found = _devices.get(number)
    if found is None:
        with _open_lock:
            found = _devices.get(number)
            if found is None:
                count = int(call("cuDeviceGetCount"))
                if not 0 <= number < count:
                    raise UserError(
                        "no such GPU",
                        op="cuda",
                        expected=f"cuda:0 to cuda:{count - 1}" if count else "a GPU",
                        got=f"cuda:{number}",
                    )
                found = _devices[number] = Device(number)
    if found.process != os.getpid():
        raise UserError(
            "a GPU that was opened before a fork cannot be used after it",
            op="cuda",
            expected="a process that was spawned",
            got="a forked process",
            hint='start processes with multiprocessing.get_context("spawn")',
        )
    return found


class Device(Context):
    """One opened GPU: its memory, loaded modules and launchers."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.landings = Landings(self)
        self.modules: Recent[Module] = Recent(lambda: MODULES * config().keep)

    def __repr__(self) -> str:
        return f"Device({self.name}, {self.attributes['name']})"

    @cached_property
    def target(self) -> Target:
        """The facts of this machine that the compiler uses."""
        return target_of(self.attributes)

    @property
    def arch(self) -> str:  # type: ignore[override]
        """The architecture to assemble for, with the features of exactly this one."""
        major = self.attributes["compute_capability_major"]
        minor = self.attributes["compute_capability_minor"]
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    # ---- memory ---------------------------------------------------------------------------

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """A new Buffer with uninitialised memory from the pool."""
        block = self.pool.take(bytes, label)
        return Buffer(block.pointer, bytes, block, self.name, label=label)

    def put(self, pointer: int, source: int, bytes: int) -> None:
        """Copy host memory to the GPU, before all work from now on; nobody waits."""
        self.ring.write(pointer, source, bytes)

    def get(self, target: int, pointer: int, bytes: int) -> None:
        """Copy memory of the GPU to the host, after all work so far."""
        self.landings.read(target, pointer, bytes)

    def copy_across(self, target: int, source: int, bytes: int, origin: runtime.Device) -> None:
        """Copy from another Device: straight from another GPU, else through the host."""
        if not isinstance(origin, Device):
            super().copy_across(target, source, bytes, origin)
        elif bytes:
            ready = Event(origin, timing=False).record()
            self.activate()
            ready.wait(self.stream)
            peers = (target, self.context, source, origin.context)
            call("cuMemcpyPeerAsync", *peers, bytes, self.stream)
            done = Event(self, timing=False).record()
            done.wait(origin.stream)  # what was read may be handed out again there

    def land(self, pointer: int, bytes: int) -> Landing:
        """A Landing of the bytes that are at an address after all work so far."""
        return Landing(self.landings, pointer, bytes)

    @cached_property
    def ring(self) -> Ring:
        """Pinned memory that copies to the GPU leave from."""
        return Ring(self)

    def fill(self, buffer: Buffer, byte: int = 0) -> None:
        """Set every byte of a Buffer."""
        if buffer.bytes:
            self.activate()
            call("cuMemsetD8Async", buffer.pointer, byte, buffer.bytes, self.stream)

    def trim(self) -> None:
        """Give memory that nothing holds back to the driver (waits for the GPU)."""
        self.pool.trim()

    # ---- code -----------------------------------------------------------------------------

    def load(self, code: bytes | str) -> Module:
        """The module of a cubin, or of PTX text that the driver compiles; loaded once."""
        data = code.encode() if isinstance(code, str) else code
        return self.keep(content_key(data), data)

    def loaded(self, key: str) -> Module | None:
        """A module that is loaded under a key."""
        return self.modules.get(key)

    def keep(self, key: str, code: bytes) -> Module:
        """The module of machine code under a key; those asked for longest ago are let go."""
        with self.lock:
            found = self.modules.get(key)
            if found is None:
                self._unload()
                found = self.modules[key] = Module(self, code)
            return found

    def _unload(self) -> None:
        """Unload modules that nobody uses any more; kernels of theirs may be under way."""
        if self.retired:
            self.activate()
            call("cuStreamSynchronize", self.stream)
            while self.retired:
                call("cuModuleUnload", self.retired.popleft())

    def launcher(self, recipe: Recipe, code: Mapping[str, Any]) -> CudaLauncher:
        """What runs a Recipe here: single launches, graphs, or step by step."""
        return CudaLauncher(recipe, code, self)
