"""An Executable on Buffers that stay, as one graph.

A run is one launch of a graph that holds every kernel and copy with its pointers. Results that
state must have in the Buffer it has are copied there at the graph's end. Invariant: it keeps
addresses of the Buffers that were given and holds none of them; who runs it sees to it that they
live. All of a run is on the Device's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ...core.config import config
from ...core.errors import UserError
from ...ir.symbol import evaluate
from ...runtime.buffer import Buffer
from ...runtime.executable import Back
from ...runtime.profile import Profile, in_order
from .driver import Event
from .graph import Operation, Replay, run_directly

if TYPE_CHECKING:
    from .step import Executable


class Fixed:
    """`buffers` are the inputs and, after them, more that `placed` and `back` name.

    `placed` says which output is written straight into which of the Buffers, `back` what is
    copied where at the end of a run.
    """

    def __init__(
        self,
        executable: Executable,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> None:
        if executable.on_host:
            raise UserError(
                "a value on the GPU decides the course of this function",
                op="bind",
                expected="a course known before it runs",
                got="a while_loop or cond",
                hint="call the jitted function, or loop on the host",
            )
        self.executable, self.device = executable, executable.device
        self.placed, self.back = dict(placed), list(back)
        with self.device.lock:
            self.device.activate()
            self.binding = executable.bound_to(symbols)
            self._results()
            self.operations = self._operations(buffers)
            self.replay = Replay(self.device, self.operations)

    @property
    def launches(self) -> int:
        """Kernels and copies of a run."""
        return len(self.operations)

    def _results(self) -> None:
        """Buffers of outputs that have none, and of results that only the run itself needs."""
        executable, device = self.executable, self.device
        self.arena = device.arena(executable.recipe.arena_bytes) if executable.scratch else None
        self.made: dict[int, Buffer] = {}  # by Slot
        taken = {executable.owners[o] for o in self.placed}
        for owner, size in zip(executable.owners, self.binding.output_bytes):
            if owner not in executable.input_of and owner not in taken and owner not in self.made:
                self.made[owner] = device.allocate(size, "bound results")
        for number, size in self.binding.hidden:
            self.made[number] = device.allocate(size, "bound results")

    def _operations(self, buffers: Sequence[Buffer]) -> list[Operation]:
        """What a run puts on the stream; the Device's lock is held."""
        executable = self.executable
        slots, recipe = executable.slots, executable.recipe
        for number, buffer in zip(recipe.inputs, buffers):
            slots[number] = buffer.pointer
        for number, buffer in self.made.items():
            slots[number] = buffer.pointer
        if self.arena is not None:
            for number, offset in executable.scratch:
                slots[number] = self.arena.pointer + offset
        for output, at in self.placed.items():
            slots[executable.owners[output]] = buffers[at].pointer
        for number, owner in executable.aliases:
            slots[number] = slots[owner]
        found = list(executable.walk(self.binding))
        for copy in self.back:
            source = (
                slots[executable.owners[copy.number]]
                if copy.is_output
                else buffers[copy.number].pointer
            )
            found.append(Operation(None, (buffers[copy.target].pointer, source), copy.bytes))
        return found

    def result(self, output: int) -> Buffer:
        """A Buffer over the memory of an output that is in none of those given."""
        made = self.made[self.executable.owners[output]]
        return made.part(0, made.bytes)

    def point(self, buffers: Sequence[Buffer]) -> None:
        """Use these Buffers from now on, for those that were given first."""
        with self.device.lock:
            self.device.activate()
            operations = self._operations(buffers)
            if operations != self.operations and not self.replay.patch(operations):
                self.replay = Replay(self.device, operations)
            self.operations = operations

    def run(self) -> None:
        """Put a run on the stream; waits for nothing."""
        device = self.device
        with device.lock:
            device.activate()
            if not config().cuda_sync:
                self.replay.launch()
                return
            after_kernel = False
            for operation in self.operations:
                run_directly(device, operation, after_kernel)
                after_kernel = operation.prepared is not None

    # ---- profiles -------------------------------------------------------------------------

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of the operations of `runs` runs (the median counts), from a graph that has an
        event after each; `restore` puts back what a run changed."""
        device = self.device
        with device.lock:
            device.activate()
            timed = Replay(device, self.operations, timed=True)
            whole, times = [], []
            for turn in range(runs + 1):  # the first does not count
                restore()
                start, stop = Event(device), Event(device)
                start.record()
                self.run()
                stop.record()
                restore()
                timed.launch()
                device.synchronize()
                if turn:
                    whole.append(1e6 * stop.seconds_since(start))
                    times.append(timed.times())
            restore()
        empty = median([taken[0] for taken in times])
        us = [max(0.0, median(several) - empty) for several in zip(*[t[1:] for t in times])]
        records = in_order(
            (n, r, t, b, f) for (n, r, b, f), t in zip(map(self._part, self.operations), us)
        )
        how = "events between the kernels of a graph, none overlapping, an event's cost taken off"
        return Profile(name, device.name, how, records, median(whole))

    def _part(self, operation: Operation) -> tuple[str, str, int, int]:
        """(name, region, bytes, FLOPs) of an operation."""
        named = operation.prepared.entry.name if operation.prepared else "copy"
        if operation.step < 0:
            return named, "copy of state to its place", 2 * operation.bytes, 0
        if operation.prepared is None:
            return named, "copy", 2 * operation.bytes, 0
        step, symbols = self.executable.recipe.steps[operation.step], self.binding.symbols
        return (
            named,
            step.region,
            int(evaluate(step.bytes, symbols)),
            int(evaluate(step.flops, symbols)),
        )


__all__ = ["Fixed"]
