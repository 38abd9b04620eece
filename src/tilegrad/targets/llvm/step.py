"""Bind a Recipe to this process: load Programs, lay out the table, run it.

One call fills the pointers of inputs and outputs and walks the table natively. Scratch lives in
one arena for the process, since one step runs at a time. Invariant: a call never leaves
pointers of its inputs behind that a later call could use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import AxisError, InternalError
from ...core.lock import new_lock
from ...ir.requirement import check_all
from ...ir.symbol import evaluate
from ...runtime.buffer import Buffer
from ...runtime.executable import Back, Recipe
from ...runtime.fault import Faults, fault_slots
from .driver import LoadedModule
from .fixed import Fixed
from .table import DYNAMIC, GRID_SCALAR, SINGLE, VALUE_SCALAR, TableBuilder
from .workers import RECORD, worker_pool

_arena: Buffer | None = None
_arena_lock = new_lock()


def arena(bytes: int) -> Buffer:
    """The process's scratch arena, at least this large."""
    global _arena
    with _arena_lock:
        if _arena is None or _arena.bytes < bytes:
            _arena = None
            _arena = Buffer.allocate(max(bytes, 64), "arena")
        return _arena


class Executable:
    """A Recipe bound to loaded Programs."""

    def __init__(self, recipe: Recipe, modules: Mapping[str, LoadedModule]) -> None:
        self.recipe = recipe
        self.modules = modules
        self.lock = new_lock()
        self.arena: Buffer | None = None
        self.inline = recipe.inline
        self.symbolic = bool(recipe.requirements)
        self.symbols: Mapping[str, int] | None = None  # those that the scalars and sizes are of
        self.checked: Mapping[str, int] | None = None  # those that meet the requirements
        self.sizes: list[int] = []  # of the outputs, and of those that stay inside
        self.hidden_sizes: list[tuple[int, int]] = []
        self.scalars: list[Any] = []  # ints, Symbol names or Exprs
        self._build()

    def _build(self) -> None:
        recipe = self.recipe
        builder = TableBuilder()
        for step in recipe.steps:
            self._entry(builder, step)
        self.n_slots = max(1, len(recipe.slots))
        table, index = builder.finish(self.n_slots, len(self.scalars))
        self.table, self.index = table, index
        self.n_slots = max(1, len(recipe.slots))
        self.slots = (ctypes.c_uint64 * self.n_slots)()
        self.scalar_values = (ctypes.c_int64 * max(1, len(self.scalars)))()
        for i, value in enumerate(self.scalars):
            if isinstance(value, int):
                self.scalar_values[i] = value
            else:
                self.symbolic = True
        self.faults = Faults.on_host(recipe)
        self.point_faults(self.slots, self.faults)
        self.record = ctypes.create_string_buffer(RECORD.size)
        RECORD.pack_into(
            self.record,
            0,
            table.ctypes.data,
            len(table),
            index.ctypes.data,
            ctypes.addressof(self.slots),
            self.n_slots,
            ctypes.addressof(self.scalar_values),
        )
        self.record_at = ctypes.addressof(self.record)
        owners = recipe.owners()
        self.output_bytes = [recipe.slots[owners[o]].bytes for o in recipe.outputs]
        self.symbolic |= any(not isinstance(b, int) for b in self.output_bytes)
        self.owners = [owners[o] for o in recipe.outputs]
        self.input_of = {slot: i for i, slot in enumerate(recipe.inputs)}
        self.kept = [
            (n, s) for n, s in enumerate(recipe.slots) if s.kind == "output" and s.alias < 0
        ]
        self.hidden = [(n, s.bytes) for n, s in self.kept if n not in self.owners]
        self.aliases = [(n, owners[n]) for n, s in enumerate(recipe.slots) if s.alias >= 0]
        self.scratch = [
            (n, s.offset) for n, s in enumerate(recipe.slots) if s.kind == "scratch" and s.alias < 0
        ]

    def point_faults(self, slots: Any, faults: Faults | None) -> None:
        """Point the Slots of fault words at those of a run."""
        if faults is not None:
            for number, sites in fault_slots(self.recipe):
                slots[number] = faults.add(sites)

    def _scalar(self, value: Any) -> int:
        self.scalars.append(value)
        return len(self.scalars) - 1

    def _entry(self, builder: TableBuilder, step: Any) -> None:
        if step.kind == "kernel":
            name, key = self.recipe.programs[step.program]
            address = self.modules[key].address(name)
            at = len(self.scalars)
            self.scalars += list(step.symbols)
            fixed = isinstance(step.grid, int)
            flags = SINGLE if step.small else DYNAMIC
            grid = step.grid
            if not fixed:
                flags, grid = flags | GRID_SCALAR, self._scalar(step.grid)
            grain = max(1, step.grid // 16) if fixed else 1
            builder.kernel(address, step.slots, grid, grain=grain, flags=flags, scalars=at)
        elif step.kind == "copy":
            target, source = step.slots
            fixed = isinstance(step.grid, int)
            grid = step.grid if fixed else self._scalar(step.grid)
            flags = (SINGLE if step.small else 0) | (0 if fixed else GRID_SCALAR)
            builder.copy(target, source, grid, flags=flags)
        else:
            self._control(builder, step)

    def _control(self, builder: TableBuilder, step: Any) -> None:
        n = step.numbers
        if step.kind == "jump":
            builder.jump(n[0])
        elif step.kind == "jump_unless":
            builder.jump_unless(step.slots[0], n[0])
        elif step.kind == "set_counter":
            self._counter(builder.set_counter, n)
        elif step.kind == "add_counter":
            self._counter(builder.add_counter, n)
        elif step.kind == "jump_counter_less":
            fixed = isinstance(n[1], int)
            bound = n[1] if fixed else self._scalar(n[1])
            builder.jump_counter_less(n[0], bound, n[2], flags=0 if fixed else VALUE_SCALAR)
        elif step.kind == "set_slot":
            builder.set_slot(step.slots[0], step.slots[1], n[0], n[1], n[2])
        elif step.kind == "swap_slots":
            builder.swap_slots(*step.slots)
        else:
            raise InternalError("llvm.step", f"unknown step {step.kind}")

    def _counter(self, method: Any, n: list[Any]) -> None:
        fixed = isinstance(n[1], int)
        method(n[0], n[1] if fixed else self._scalar(n[1]), flags=0 if fixed else VALUE_SCALAR)

    # ---- running --------------------------------------------------------------------------

    def run(
        self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
    ) -> list[Buffer]:
        """Run once; new Buffers for the outputs (or those of inputs they alias)."""
        with self.lock:
            slots = self.slots
            for number, buffer in zip(self.recipe.inputs, buffers):
                slots[number] = buffer.pointer
            if self.arena is None:
                self.prepare()
            output_bytes = self.output_bytes
            hidden = self.hidden
            if self.symbolic:
                if symbols is None or symbols != self.symbols:
                    self._set_symbols(symbols or {})
                output_bytes, hidden = self.sizes, self.hidden_sizes
            outputs, made = [], {}
            for owner, size in zip(self.owners, output_bytes):
                if owner in self.input_of:
                    outputs.append(buffers[self.input_of[owner]].part(0, size))
                elif owner in made:
                    outputs.append(made[owner])
                else:
                    buffer = made[owner] = Buffer.allocate(size)
                    slots[owner] = buffer.pointer
                    outputs.append(buffer)
            extra = []
            for number, size in hidden:
                extra.append(Buffer.allocate(size))
                slots[number] = extra[-1].pointer
            for number, owner in self.aliases:
                slots[number] = slots[owner]
            try:
                worker_pool().run_step(self.record_at, self.n_slots, self.inline, self.faults)
            except AxisError as error:
                if self.faults is not None and not self.faults.open_end:
                    error.results = outputs
                raise
            return outputs

    def fix(
        self,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> Fixed:
        """Bound to Buffers that stay, to run again and again."""
        self.check(symbols)
        return Fixed(self, buffers, symbols, placed, back)

    def prepare(self) -> None:
        """Point scratch Slots into the arena."""
        pool = worker_pool()
        pool.reserve(self.recipe.scratch_bytes)
        self.arena = arena(self.recipe.arena_bytes)
        for number, offset in self.scratch:
            self.slots[number] = self.arena.pointer + offset

    def check(self, symbols: Mapping[str, int] | None) -> None:
        """Raise unless what the ops need of these Symbols holds."""
        if self.recipe.requirements and symbols != self.checked:
            check_all(self.recipe.requirements, symbols)
            self.checked = dict(symbols or {})

    def _set_symbols(self, symbols: Mapping[str, int]) -> None:
        """What depends on the Symbols alone; calls with the same ones find it done."""
        self.check(symbols)
        self.symbols = None
        for i, value in enumerate(self.scalars):
            if isinstance(value, str):
                self.scalar_values[i] = symbols[value]
            elif not isinstance(value, int):
                self.scalar_values[i] = evaluate(value, symbols)
        self.sizes = [evaluate(b, symbols) for b in self.output_bytes]
        self.hidden_sizes = [(n, evaluate(b, symbols)) for n, b in self.hidden]
        self.symbols = dict(symbols)
