"""The steps of a Recipe as one table that workers run natively.

A launch is one native call over a table of entries and an array of Slots; loops and branches are
entries too. Invariant: a table with Symbols has a record of scalars for each choice of them, so
launches with different ones do not disturb each other; a Captured has Slots of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InternalError
from ...core.lock import new_lock
from ...ir.symbol import evaluate
from ...runtime.device import Device
from ...runtime.fault import Faults, fault_slots
from ...runtime.launcher import Launcher, SlotCopy
from ...runtime.recipe import Recipe, Step
from .table import (
    CONTROL,
    COUNTED,
    GRID_SCALAR,
    MOST_GRAIN,
    SINGLE,
    VALUE_SCALAR,
    TableBuilder,
)
from .workers import RECORD, worker_pool

if TYPE_CHECKING:
    from ...runtime.profile import Profile

SMALL_COPY = 60_000  # bytes, below which one worker copies alone


class Record:
    """A table with Slots and scalars, packed as the native loop takes it."""

    def __init__(self, table: np.ndarray, index: np.ndarray, slots: Any, scalars: Any) -> None:
        self.held = (table, index, slots, scalars)
        self.memory = ctypes.create_string_buffer(RECORD.size)
        addresses = (ctypes.addressof(slots), len(slots), ctypes.addressof(scalars))
        RECORD.pack_into(
            self.memory, 0, table.ctypes.data, len(table), index.ctypes.data, *addresses
        )
        self.at = ctypes.addressof(self.memory)


class NativeSteps:
    """The scalars of a table for one choice of Symbols, and the record of a plain run."""

    def __init__(self, launcher: NativeLauncher, symbols: Mapping[str, int]) -> None:
        self.symbols = symbols
        self.scalars = (ctypes.c_int64 * max(1, len(launcher.scalars)))()
        for i, value in enumerate(launcher.scalars):
            self.scalars[i] = (
                symbols[value] if isinstance(value, str) else int(evaluate(value, symbols))
            )
        self.record = Record(launcher.table, launcher.index, launcher.slots, self.scalars)


class NativeLauncher(Launcher):
    """Runs a Recipe by the native loop."""

    def __init__(self, recipe: Recipe, code: Mapping[str, Any], device: Device) -> None:
        self.recipe, self.device, self.modules = recipe, device, code
        self.lock = new_lock()  # of this one's Slots: the workers have a lock of their own
        self.decided = False  # the native loop reads what decides
        self.inline = recipe.inline
        self.scalars: list[Any] = []  # ints, names of Symbols or Exprs
        builder = TableBuilder()
        for step in recipe.steps:
            self._entry(builder, step)
        self.n_slots = max(1, len(recipe.slots))
        self.table, self.index = builder.finish(self.n_slots, len(self.scalars))
        self.slots: Any = (ctypes.c_uint64 * self.n_slots)()
        self.symbolic = not recipe.is_static()
        self.faults = Faults.on_host(recipe)
        self.point_faults(self.slots, self.faults)
        worker_pool().reserve(recipe.scratch_bytes)

    def point_faults(self, slots: Any, faults: Faults | None) -> None:
        """Point the Slots of fault words at those of a run."""
        if faults is not None:
            for number, sites in fault_slots(self.recipe):
                slots[number] = faults.add(sites)

    def _scalar(self, value: Any) -> int:
        self.scalars.append(value)
        return len(self.scalars) - 1

    def _entry(self, builder: TableBuilder, step: Step) -> None:
        if step.kind in CONTROL:
            values, flags = [*step.slots, *step.numbers], 0
            if step.kind in COUNTED and not isinstance(values[1], int):
                values[1], flags = self._scalar(values[1]), VALUE_SCALAR
            builder.control(step.kind, *values, flags=flags)
            return
        at = len(self.scalars)
        self.scalars += list(step.symbols)
        grid, grain, flags = step.grid, 1, SINGLE if step.small else 0
        if isinstance(grid, int):
            grain = min(max(1, grid // 16), MOST_GRAIN)
        else:
            flags, grid = flags | GRID_SCALAR, self._scalar(grid)
        if step.kind == "kernel":
            name, key = self.recipe.programs[step.program]
            address = self.modules[key].address(name)
            builder.kernel(address, step.slots, grid, grain=grain, flags=flags, scalars=at)
        elif step.kind == "copy":
            to, source = step.slots
            builder.copy(to, source, grid, flags=flags)
        else:
            raise InternalError("llvm launcher", f"unknown step {step.kind}")

    # ---- running --------------------------------------------------------------------------

    def bind(self, symbols: Mapping[str, int]) -> NativeSteps:
        """The scalars for these Symbols."""
        return NativeSteps(self, symbols)

    def keeps_results(self) -> bool:
        """A fault is raised when the run is over, unless values decide how long that takes."""
        return self.faults is not None and not self.faults.open_end

    def launch(self, steps: NativeSteps) -> None:
        """Run the table once."""
        worker_pool().run_step(steps.record.at, self.n_slots, self.inline, self.faults)

    def capture(
        self, steps: NativeSteps, slots: Sequence[int], copies: Sequence[SlotCopy]
    ) -> NativeCaptured:
        """The table, and the copies as entries at its end, over Slots of its own."""
        return NativeCaptured(self, steps, slots, copies)


class NativeCaptured:
    """A table over Slots of its own; see `Captured`."""

    def __init__(
        self,
        launcher: NativeLauncher,
        steps: NativeSteps,
        slots: Sequence[int],
        copies: Sequence[SlotCopy],
    ) -> None:
        self.launcher, self.steps, self.copies = launcher, steps, list(copies)
        self.n_slots = len(slots)
        self.slots: Any = (ctypes.c_uint64 * self.n_slots)()
        self.faults = Faults.on_host(launcher.recipe)
        launcher.point_faults(self.slots, self.faults)
        self.fault_words = [(n, self.slots[n]) for n, _ in fault_slots(launcher.recipe)]
        self.table = self._table()
        self.record = Record(self.table, launcher.index, self.slots, steps.scalars)
        self.point(slots)

    @property
    def launches(self) -> int:
        """Kernels and copies in the table; loops run theirs more than once."""
        steps = self.launcher.recipe.steps
        return sum(s.kind in ("kernel", "copy") for s in steps) + len(self.copies)

    def _table(self) -> np.ndarray:
        builder = TableBuilder()
        for copy in self.copies:
            flags = SINGLE if copy.bytes < SMALL_COPY else 0
            builder.copy(copy.target, copy.source, copy.bytes, flags=flags)
        copies, _ = builder.finish(self.n_slots, len(self.launcher.scalars))
        return np.concatenate([self.launcher.table, copies])

    def point(self, slots: Sequence[int]) -> None:
        """Use these addresses from now on; the fault words stay its own."""
        self.slots[:] = slots
        for number, address in self.fault_words:
            self.slots[number] = address

    def launch(self) -> None:
        """Run once more."""
        worker_pool().run_step(self.record.at, self.n_slots, self.launcher.inline, self.faults)

    # ---- profiles -------------------------------------------------------------------------

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of the entries of `runs` runs, each entry run by itself (the median counts);
        `restore` puts back what a run changed. A table with control is one Record."""
        from ...runtime.profile import measured, timed

        launcher = self.launcher
        steps = launcher.recipe.steps
        parts = [launcher.described(i, self.steps.symbols) for i in range(len(steps))]
        parts += [("copy", "copy of state to its place", 2 * c.bytes, 0) for c in self.copies]
        control = any(step.kind not in ("kernel", "copy") for step in steps)
        if control:
            sums = (sum(p[2] for p in parts), sum(p[3] for p in parts))
            parts = [(name, "all of it: loops decide what runs", *sums)]
        spans = [(0, len(self.table))] if control else [(i, 1) for i in range(len(self.table))]
        how = "each entry run by itself, the cost of an empty run taken off"
        empty = median([timed(partial(self._run_entries, 0, 0)) for _ in range(20)])
        return measured(
            (name, launcher.device.name, how),
            parts,
            runs,
            restore,
            lambda: timed(self.launch),
            lambda: [timed(partial(self._run_entries, *span)) for span in spans],
            empty,
        )

    def _run_entries(self, first: int, count: int) -> None:
        """Run some entries of the table, on as many workers as a run has."""
        part = self.table[first : first + count]
        record = Record(part, self.launcher.index, self.slots, self.steps.scalars)
        worker_pool().run_step(record.at, self.n_slots, self.launcher.inline)
