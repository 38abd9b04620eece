"""An Executable on Buffers that stay: every table and pointer is made ready once.

A run is one native call over this object's own table of Slots, so two of them over the same
Executable, and plain runs of it, do not disturb each other. Results that state must have in the
Buffer it has are copied there by entries at the end of the table. Invariant: it keeps addresses of
the Buffers that were given and holds none of them; who runs it sees to it that they live.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ...ir.symbol import evaluate
from ...runtime.buffer import Buffer
from ...runtime.executable import Back, Step
from ...runtime.fault import Faults
from ...runtime.profile import Profile, in_order
from .table import SINGLE, TableBuilder
from .workers import RECORD, worker_pool

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
        self.executable, self.symbols = executable, dict(symbols)
        self.placed, self.back = dict(placed), list(back)
        recipe = executable.recipe
        self.inputs = len(recipe.inputs)
        first = executable.n_slots  # Slots of the Buffers that are not inputs
        self.n_slots = first + max(0, len(buffers) - self.inputs)
        self.slot_of = [*recipe.inputs, *range(first, self.n_slots)]
        self.slots = (ctypes.c_uint64 * self.n_slots)()
        self.scalars = (ctypes.c_int64 * max(1, len(executable.scalars)))()
        for i, value in enumerate(executable.scalars):
            self.scalars[i] = (
                self.symbols[value]
                if isinstance(value, str)
                else int(evaluate(value, self.symbols))
            )
        self._results()
        self.table = self._table()
        self.record = ctypes.create_string_buffer(RECORD.size)
        RECORD.pack_into(
            self.record,
            0,
            self.table.ctypes.data,
            len(self.table),
            executable.index.ctypes.data,
            ctypes.addressof(self.slots),
            self.n_slots,
            ctypes.addressof(self.scalars),
        )
        self.record_at = ctypes.addressof(self.record)
        self.inline = executable.inline
        self.faults = Faults.on_host(recipe)
        executable.point_faults(self.slots, self.faults)
        self.point(buffers)

    @property
    def launches(self) -> int:
        """Kernels and copies in the table; loops run theirs more than once."""
        steps = self.executable.recipe.steps
        return sum(s.kind in ("kernel", "copy") for s in steps) + len(self.back)

    def _results(self) -> None:
        """Buffers of outputs that have none, and of results that only the run itself needs."""
        executable = self.executable
        if executable.arena is None:
            executable.prepare()
        assert executable.arena is not None
        self.arena = executable.arena
        for number, offset in executable.scratch:
            self.slots[number] = self.arena.pointer + offset
        self.made: dict[int, Buffer] = {}  # by Slot
        taken = {executable.owners[o] for o in self.placed}
        for owner, size in zip(executable.owners, executable.output_bytes):
            if owner not in executable.input_of and owner not in taken and owner not in self.made:
                self.made[owner] = Buffer.allocate(int(evaluate(size, self.symbols)))
        for number, size in executable.hidden:
            self.made[number] = Buffer.allocate(int(evaluate(size, self.symbols)))
        for number, buffer in self.made.items():
            self.slots[number] = buffer.pointer

    def _table(self) -> np.ndarray:
        if not self.back:
            return self.executable.table
        builder = TableBuilder()
        outputs = self.executable.recipe.outputs
        for copy in self.back:
            source = outputs[copy.number] if copy.is_output else self.slot_of[copy.number]
            builder.copy(
                self.slot_of[copy.target],
                source,
                copy.bytes,
                flags=SINGLE if copy.bytes < 60_000 else 0,
            )
        copies, _ = builder.finish(self.n_slots, len(self.executable.scalars))
        return np.concatenate([self.executable.table, copies])

    def result(self, output: int) -> Buffer:
        """A Buffer over the memory of an output that is in none of those given."""
        made = self.made[self.executable.owners[output]]
        return made.part(0, made.bytes)

    def point(self, buffers: Sequence[Buffer]) -> None:
        """Use these Buffers from now on, for those that were given first."""
        slots, executable = self.slots, self.executable
        for number, buffer in zip(self.slot_of, buffers):
            slots[number] = buffer.pointer
        for output, at in self.placed.items():
            slots[executable.owners[output]] = buffers[at].pointer
        for number, owner in executable.aliases:
            slots[number] = slots[owner]

    def run(self) -> None:
        """Run once more."""
        worker_pool().run_step(self.record_at, self.n_slots, self.inline, self.faults)

    # ---- profiles -------------------------------------------------------------------------

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of the entries of `runs` runs, each entry walked by itself (the median counts);
        `restore` puts back what a run changed. A table with control is one Record."""
        steps = self.executable.recipe.steps
        parts = [self._part(step) for step in steps]
        parts += [("copy", "copy of state to its place", 2 * c.bytes, 0) for c in self.back]
        control = any(step.kind not in ("kernel", "copy") for step in steps)
        if control:
            sums = [sum(p[i] for p in parts) for i in (2, 3)]
            parts = [(name, "all of it: loops decide what runs", *sums)]
        spans = [(0, len(self.table))] if control else [(i, 1) for i in range(len(self.table))]
        whole, times = [], [[] for _ in spans]
        for _ in range(runs):
            restore()
            start = perf_counter()
            self.run()
            whole.append(1e6 * (perf_counter() - start))
            restore()
            for taken, (first, count) in zip(times, spans):
                start = perf_counter()
                self._walk(first, count)
                taken.append(1e6 * (perf_counter() - start))
        restore()
        empty = median([self._empty() for _ in range(20)])
        us = [max(0.0, median(taken) - empty) for taken in times]
        records = in_order((n, r, t, b, f) for (n, r, b, f), t in zip(parts, us))
        how = "each entry walked by itself, the cost of an empty walk taken off"
        return Profile(name, "cpu", how, records, median(whole))

    def _part(self, step: Step) -> tuple[str, str, int, int]:
        """(name, region, bytes, FLOPs) of a step."""
        named = step.kind
        if step.kind == "kernel":
            named = self.executable.recipe.programs[step.program][0]
        sizes = [int(evaluate(s, self.symbols)) for s in (step.bytes, step.flops)]
        return named, step.region, sizes[0], sizes[1]

    def _walk(self, first: int, count: int) -> None:
        """Walk some entries of the table, on as many workers as a run has."""
        worker_pool().run(
            self.table.ctypes.data + first * self.table.itemsize,
            count,
            self.executable.index.ctypes.data,
            ctypes.addressof(self.slots),
            self.n_slots,
            ctypes.addressof(self.scalars),
            self.inline,
        )

    def _empty(self) -> float:
        start = perf_counter()
        self._walk(0, 0)
        return 1e6 * (perf_counter() - start)


__all__ = ["Fixed"]
