"""An Executable on Buffers that stay: every table and pointer is made ready once.

A run is one native call or one launch of a graph, over addresses of its own, so that two Replays of
one Executable, and plain runs of it, do not disturb each other. Results that state must have in the
Buffer it has are copied there at the end of a run. Invariant: it keeps addresses of the Buffers
that were given and holds none of them; who runs it sees to it that they live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .buffer import Buffer
from .launcher import SlotCopy
from .profile import Profile
from .recipe import Back

if TYPE_CHECKING:
    from .executable import Executable


class Replay:
    """`buffers` are the inputs and, after them, more that `placed` and `back` name.

    `placed` says which output is written straight into which of the Buffers, `back` what is
    copied where at the end of a run. `run` runs once more.
    """

    def __init__(
        self,
        executable: Executable,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> None:
        self.executable, self.placed = executable, dict(placed)
        recipe = executable.recipe
        first = len(recipe.slots)  # Slots of the Buffers that are not inputs
        self.slot_of = [*recipe.inputs, *range(first, first + len(buffers) - len(recipe.inputs))]
        copies = [
            SlotCopy(
                self.slot_of[c.target],
                executable.owners[c.number] if c.is_output else self.slot_of[c.number],
                c.bytes,
            )
            for c in back
        ]
        with executable.lock:
            self.binding = executable.bound_to(symbols)
            self._results()
            slots = self._slots(buffers)
            self.captured = executable.launcher.capture(self.binding.steps, slots, copies)
        self.run: Callable[[], None] = self.captured.launch

    @property
    def launches(self) -> int:
        """Kernels and copies of a run."""
        return self.captured.launches

    def _results(self) -> None:
        """Buffers of outputs that have none, and of results that only the run itself needs."""
        executable = self.executable
        self.made: dict[int, Buffer] = {}  # by Slot
        taken = {executable.owners[o] for o in self.placed}
        for (owner, given, allocate), size in zip(executable.outputs, self.binding.output_bytes):
            if given < 0 and owner not in taken and owner not in self.made:
                self.made[owner] = allocate(size, "bound results")
        for owner, size, allocate in self.binding.hidden:
            self.made[owner] = allocate(size, "bound results")

    def _slots(self, buffers: Sequence[Buffer]) -> list[int]:
        """The addresses of all Slots; the lock is held."""
        executable = self.executable
        slots = [*executable.slots[: len(executable.recipe.slots)]]
        slots += [0] * (len(self.slot_of) - len(executable.inputs))
        self.arenas = [arena.point(slots) for arena in executable.arenas]
        for number, buffer in zip(self.slot_of, buffers):
            slots[number] = buffer.pointer
        for number, buffer in self.made.items():
            slots[number] = buffer.pointer
        for output, at in self.placed.items():
            slots[executable.owners[output]] = buffers[at].pointer
        for number, owner in executable.aliases:
            slots[number] = slots[owner]
        return slots

    def result(self, output: int) -> Buffer:
        """A Buffer over the memory of an output that is in none of those given."""
        made = self.made[self.executable.owners[output]]
        return made.part(0, made.bytes)

    def point(self, buffers: Sequence[Buffer]) -> None:
        """Use these Buffers from now on, for those that were given first."""
        with self.executable.lock:
            self.captured.point(self._slots(buffers))

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of what a run does, from `runs` runs; `restore` puts back what one changed."""
        return self.captured.profile(name, runs, restore)


__all__ = ["Replay"]
