"""Jitted functions in a bench on a GPU: their launches, to be captured in the bench's own graphs.

A call of a jitted function of several kernels replays a graph of its own, which another capture
cannot hold; `Launches` puts the same operations on the stream one by one, with the same
dependent launches, on Buffers that stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilegrad.runtime.buffer import Buffer
from tilegrad.runtime.executable import Executable
from tilegrad.targets.ptx.driver import Device
from tilegrad.targets.ptx.launcher import Operation, run_directly
from tilegrad.tensor.container import flatten


class Launches:
    """A jitted function bound to arguments: call it to put its operations on the stream."""

    def __init__(self, device: Device, function: Any, *args: Any) -> None:
        lowered = function.lower(*args)
        leaves, _ = flatten(args)
        executable = lowered.compiled()
        buffers = lowered._buffers(leaves, {})
        self.device = device
        self.operations, outputs, kept = operations(executable, buffers)
        self.results = [lowered._value(p, buffers, outputs, None, None) for p in lowered.outcomes]
        self.programs = sorted({o.prepared.entry.name for o in self.operations if o.prepared})
        self._held = (args, buffers, kept)

    @property
    def kernels(self) -> int:
        """How many launches a call makes."""
        return sum(o.prepared is not None for o in self.operations)

    @property
    def copies(self) -> int:
        """How many copies of memory a call makes."""
        return len(self.operations) - self.kernels

    def __call__(self) -> None:
        after_kernel = self.operations[-1].prepared is not None  # the call before this one
        run_directly(self.device, self.operations, after_kernel)


def operations(
    executable: Executable, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
) -> tuple[list[Operation], list[Buffer], list[Buffer]]:
    """What a run on these Buffers puts on the stream, for a caller's own graph: operations,
    outputs, and all Buffers that must live as long as the operations are used."""
    launcher = executable.launcher
    launcher.refuse_decided("operations")
    held = executable.fitting(buffers)
    with executable.lock:
        binding = executable.bound_to(symbols)
        for (number, _, _), buffer in zip(executable.inputs, held):
            executable.slots[number] = buffer.pointer
        outputs, extra = executable.place(binding, held)
        extra += [arena.buffer for arena in executable.arenas if arena.buffer is not None]
        return list(launcher.operations(binding.steps)), outputs, [*held, *outputs, *extra]
