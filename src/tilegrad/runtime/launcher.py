"""Launchers: what runs the steps of a Recipe on a Device, over Slots that hold addresses.

A Launcher is made once for a Recipe; `bind` gives what depends on the Symbols alone, `launch` runs
the steps over the addresses in `slots`, and `capture` makes them ready to be run again and again on
addresses that stay. The one here takes the steps on the host and launches each Program through its
Device; one that can do better (a native loop, a graph of launches) overrides `launch` and
`capture`. Invariant: `operations` gives every launch and copy that does something, in the order in
which the Recipe says it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import InternalError, UserError
from ..ir.symbol import evaluate
from .buffer import Buffer
from .fault import fault_slots
from .recipe import Recipe, Step

if TYPE_CHECKING:
    from .device import Device
    from .profile import Profile

COUNTERS = 64


@dataclass(frozen=True, slots=True)
class Operation:
    """A launch (`prepared` with the pointers of its parameters), or a copy of `bytes` bytes
    (pointers: target, source)."""

    prepared: Any
    pointers: tuple[int, ...]
    bytes: int = 0
    step: int = -1  # of the Recipe, that it comes from


@dataclass(frozen=True)
class SlotCopy:
    """A copy of bytes between two Slots, by number, at the end of a run."""

    target: int
    source: int
    bytes: int


class Steps:
    """What the steps of a Recipe are for one choice of Symbols: launches but for pointers, of
    which steps with the same Program share one."""

    def __init__(self, launcher: Launcher, symbols: Mapping[str, int]) -> None:
        steps = launcher.recipe.steps
        self.symbols = symbols
        kernels = {s.program: s for s in steps if s.kind == "kernel"}
        made = {number: launcher.prepare(s, symbols) for number, s in kernels.items()}
        self.launches: list[Any] = [made[s.program] if s.kind == "kernel" else None for s in steps]
        self.grids = [int(evaluate(s.grid, symbols)) for s in steps]
        self.numbers = [[int(evaluate(n, symbols)) for n in s.numbers] for s in steps]


class Launcher:
    """Runs a Recipe step by step; see the module's docstring."""

    steps_class: type[Steps] = Steps

    def __init__(self, recipe: Recipe, code: Mapping[str, Any], device: Device) -> None:
        self.recipe, self.device, self.lock = recipe, device, device.lock
        self.slots: MutableSequence[int] = [0] * max(1, len(recipe.slots))
        for number, sites in fault_slots(recipe):
            self.slots[number] = device.faults.add(sites)
        self.code = [code[key] for _, key in recipe.programs]
        self.decided = any(s.kind == "jump_unless" for s in recipe.steps)  # by values, as it runs
        self.symbolic = not recipe.is_static()
        self.spare: dict[tuple[int, int], Buffer] = {}  # aligned copies, for launches to come

    def prepare(self, step: Step, symbols: Mapping[str, int]) -> Any:
        """A kernel step as a launch but for its pointers."""
        number = step.program
        entry = self.recipe.entries[number] if self.recipe.entries else ""
        name = self.recipe.programs[number][0]
        return self.device.prepare(self.code[number], name, entry, symbols)

    def bind(self, symbols: Mapping[str, int]) -> Any:
        """What depends on the Symbols alone."""
        return self.steps_class(self, symbols)

    def quick(self, executable: Any) -> Callable[[], list[Buffer]] | None:
        """A shorter way to run this Executable once its inputs are in `slots`, if there is one."""
        return None

    def keeps_results(self) -> bool:
        """Whether all results are there when a run ends in a fault."""
        return False

    def launch(self, steps: Any) -> None:
        """Run once over the addresses in `slots`; the lock is held."""
        for operation in self.operations(steps):
            self.start(operation)

    def start(self, operation: Operation) -> None:
        """Run one operation."""
        if operation.prepared is None:
            target, source = operation.pointers
            self.device.copy_bytes(target, source, operation.bytes)
        else:
            operation.prepared.launch(operation.pointers)

    def capture(self, steps: Any, slots: Sequence[int], copies: Sequence[SlotCopy]) -> Any:
        """The steps and some copies after them, over addresses that stay."""
        self.refuse_decided("bind")
        return Captured(self, steps, slots, copies)

    def refuse_decided(self, op: str) -> None:
        """An error where a value decides which steps run."""
        if self.decided:
            raise UserError(
                "a value on the device decides the course of this function",
                op=op,
                expected="a course known before it runs",
                got="a while_loop or cond",
                hint="call the jitted function, or loop on the host",
            )

    # ---- the course of the steps ----------------------------------------------------------

    def operations(self, bound: Steps, slots: Sequence[int] | None = None) -> Iterator[Operation]:
        """Every launch and copy that does something, in order; control is followed on the host."""
        addresses = list(self.slots if slots is None else slots)
        counters = [0] * COUNTERS
        steps, at, unaligned = self.recipe.steps, 0, self.device.alignment - 1
        while at < len(steps):
            step, here = steps[at], at
            at += 1
            if step.kind == "kernel":
                prepared = bound.launches[here]
                if not prepared.empty:
                    pointers = tuple([addresses[s] for s in step.slots])
                    if any([p & unaligned for p in pointers]):
                        yield from self._aligned(bound, prepared, here, pointers)
                    else:
                        yield Operation(prepared, pointers, 0, here)
            elif step.kind == "copy":
                target, source = step.slots
                if bound.grids[here]:
                    yield Operation(
                        None, (addresses[target], addresses[source]), bound.grids[here], here
                    )
            else:
                at = self._control(step, bound.numbers[here], addresses, counters, at)

    def _aligned(
        self, bound: Steps, prepared: Any, here: int, pointers: tuple[int, ...]
    ) -> Iterator[Operation]:
        """A launch on parts of arrays that begin at odd places: it works on aligned copies."""
        moved = {}
        unaligned = self.device.alignment - 1
        for slot, pointer in zip(self.recipe.steps[here].slots, pointers):
            if pointer & unaligned:
                bytes = int(evaluate(self.recipe.slots[slot].bytes, bound.symbols))
                if (slot, bytes) not in self.spare:
                    self.spare[slot, bytes] = self.device.allocate(bytes, "aligned copies")
                moved[pointer] = (self.spare[slot, bytes].pointer, bytes)
        for pointer, (there, bytes) in moved.items():
            yield Operation(None, (there, pointer), bytes, here)
        there_too = tuple([moved[p][0] if p in moved else p for p in pointers])
        yield Operation(prepared, there_too, 0, here)
        for pointer, (there, bytes) in moved.items():
            yield Operation(None, (pointer, there), bytes, here)

    def _control(
        self, step: Step, n: list[int], slots: list[int], counters: list[int], at: int
    ) -> int:
        """Do a control step; gives the number of the next one."""
        kind = step.kind
        if kind == "jump":
            return n[0]
        if kind == "jump_unless":
            return at if self._read_bool(slots[step.slots[0]]) else n[0]
        if kind == "set_counter":
            counters[n[0]] = n[1]
        elif kind == "add_counter":
            counters[n[0]] += n[1]
        elif kind == "jump_counter_less":
            return n[2] if counters[n[0]] < n[1] else at
        elif kind == "set_slot":
            moved = counters[n[0]] * n[1] if n[0] >= 0 else 0
            slots[step.slots[0]] = slots[step.slots[1]] + moved + n[2]
        elif kind == "swap_slots":
            a, b = step.slots
            slots[a], slots[b] = slots[b], slots[a]
        else:
            raise InternalError("launcher", f"unknown step {kind}")
        return at

    def _read_bool(self, pointer: int) -> bool:
        """A bool on the Device, after all work so far."""
        place = Buffer(pointer, 1, None, self.device.name)
        return bool(self.device.download(place)[0])

    # ---- profiles -------------------------------------------------------------------------

    def described(self, number: int, symbols: Mapping[str, int]) -> tuple[str, str, int, int]:
        """(name, region, bytes, FLOPs) of a step."""
        step = self.recipe.steps[number]
        named = step.kind
        if step.kind == "kernel":
            named = self.recipe.programs[step.program][0]
        sizes = [int(evaluate(s, symbols)) for s in (step.bytes, step.flops)]
        return named, step.region, sizes[0], sizes[1]


class Captured:
    """Steps of a Recipe, and copies after them, over addresses that stay; here they are gone
    through anew at each run."""

    def __init__(
        self, launcher: Launcher, steps: Any, slots: Sequence[int], copies: Sequence[SlotCopy]
    ) -> None:
        self.launcher, self.steps, self.copies = launcher, steps, list(copies)
        self.device = launcher.device
        self.operations = self._operations(slots)

    @property
    def launches(self) -> int:
        """Kernels and copies of a run."""
        return len(self.operations)

    def _operations(self, slots: Sequence[int]) -> list[Operation]:
        found = list(self.launcher.operations(self.steps, slots))
        for copy in self.copies:
            pointers = (slots[copy.target], slots[copy.source])
            found.append(Operation(None, pointers, copy.bytes))
        return found

    def point(self, slots: Sequence[int]) -> None:
        """Use these addresses from now on; the lock is held."""
        self.operations = self._operations(slots)

    def launch(self) -> None:
        """Run once more."""
        with self.launcher.lock:
            for operation in self.operations:
                self.launcher.start(operation)
        self.device.faults.check()

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of the operations of `runs` runs, each waited for (the median counts); `restore`
        puts back what a run changed."""
        from .profile import measured, timed

        def whole() -> None:
            self.launch()
            self.device.synchronize()

        def one(operation: Operation) -> None:
            self.launcher.start(operation)
            self.device.synchronize()

        return measured(
            (name, self.device.name, "each step waited for"),
            [self.described(operation) for operation in self.operations],
            runs,
            restore,
            lambda: timed(whole),
            lambda: [timed(partial(one, operation)) for operation in self.operations],
        )

    def described(self, operation: Operation) -> tuple[str, str, int, int]:
        """(name, region, bytes, FLOPs) of an operation."""
        if operation.step < 0:
            return "copy", "copy of state to its place", 2 * operation.bytes, 0
        if operation.prepared is None:
            return "copy", "copy", 2 * operation.bytes, 0
        return self.launcher.described(operation.step, self.steps.symbols)


__all__ = ["Captured", "Launcher", "Operation", "SlotCopy", "Steps"]
