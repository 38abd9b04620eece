"""Bind a Recipe to a GPU: load its Programs, and run it as one launch, a graph, or step by step.

One kernel is launched as it is. A sequence whose course is known (counters included) becomes a
graph for each choice of Symbols, kept for a few sets of addresses and patched for others; where
a value on the GPU decides the course, the host walks the steps and reads it. Invariant: all of
a run is on the Device's stream; a call never leaves pointers behind that a later call could use
without having given them; every pointer that a kernel gets is a multiple of 16.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.config import config
from ...core.errors import InternalError, UserError
from ...ir.requirement import check_all
from ...ir.symbol import evaluate
from ...runtime.buffer import Buffer
from ...runtime.executable import Back, Recipe, Step
from ...runtime.fault import fault_slots
from .driver import Device
from .fixed import Fixed
from .graph import Operation, Replay, run_directly
from .memory import size_class
from .prepare import Prepared
from .program import Entry

BINDINGS = 64  # choices of Symbols kept
REPLAYS = 4  # graphs kept for one choice
COUNTERS = 64
CAPTURE_LIMIT = 20_000  # operations in a graph


class Binding:
    """What depends on the Symbols alone: launches but for pointers, sizes, graphs."""

    def __init__(self, executable: Executable, symbols: Mapping[str, int]) -> None:
        recipe = executable.recipe
        self.symbols = symbols
        self.launches = [
            Prepared(executable.functions[s.program], executable.entries[s.program], symbols)
            if s.kind == "kernel"
            else None
            for s in recipe.steps
        ]
        self.output_bytes = [int(evaluate(b, symbols)) for b in executable.output_bytes]
        self.hidden = [(n, int(evaluate(b, symbols))) for n, b in executable.hidden]
        self.grids = [int(evaluate(s.grid, symbols)) for s in recipe.steps]
        self.numbers = [[int(evaluate(n, symbols)) for n in s.numbers] for s in recipe.steps]
        self.replays: OrderedDict[tuple[int, ...], Replay] = OrderedDict()


class Executable:
    """A Recipe bound to a Device."""

    def __init__(self, recipe: Recipe, code: Mapping[str, bytes], device: Device) -> None:
        self.recipe, self.device = recipe, device
        self.entries = [Entry.from_text(text) for text in recipe.entries]
        if len(self.entries) != len(recipe.programs):
            raise InternalError("ptx step", "a Recipe of another target")
        self.functions = [
            device.load(code[key]).function(name, entry.shared_bytes, entry.cluster)
            for (name, key), entry in zip(recipe.programs, self.entries)
        ]
        owners = recipe.owners()
        self.output_bytes = [recipe.slots[owners[o]].bytes for o in recipe.outputs]
        self.owners = [owners[o] for o in recipe.outputs]
        self.input_of = {slot: i for i, slot in enumerate(recipe.inputs)}
        kept = [(n, s) for n, s in enumerate(recipe.slots) if s.kind == "output" and s.alias < 0]
        self.hidden = [(n, s.bytes) for n, s in kept if n not in self.owners]
        self.aliases = [(n, owners[n]) for n, s in enumerate(recipe.slots) if s.alias >= 0]
        self.scratch = [
            (n, s.offset) for n, s in enumerate(recipe.slots) if s.kind == "scratch" and s.alias < 0
        ]
        self.slots = [0] * max(1, len(recipe.slots))
        for number, sites in fault_slots(recipe):
            self.slots[number] = device.faults.add(sites)
        self.single = recipe.steps[0] if _is_single(recipe) else None
        self.on_host = any(s.kind == "jump_unless" for s in recipe.steps)
        self.fixed = _is_fixed(recipe, self.entries)
        self.spare: dict[tuple[int, int], Buffer] = {}  # aligned copies, for graphs to come
        self.bindings: OrderedDict[Any, Binding] = OrderedDict()
        self.quick = self._quick()

    def _quick(self) -> tuple[Prepared, list[int], int, int] | None:
        """For one kernel with one new result and no Symbols: its launch, where its pointers come
        from (numbers of inputs, -1: the result), bytes of the result and their size class."""
        if self.single is None or not self.fixed or self.hidden or self.aliases or self.scratch:
            return None
        if self.recipe.sites:
            return None
        if len(self.owners) != 1 or self.owners[0] in self.input_of:
            return None
        order = [-1 if s == self.owners[0] else self.input_of[s] for s in self.single.slots]
        binding = self.bound_to(None)
        prepared, size = binding.launches[0], binding.output_bytes[0]
        assert prepared is not None
        return prepared, order, size, size_class(size)

    # ---- running --------------------------------------------------------------------------

    def run(
        self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
    ) -> list[Buffer]:
        """Run once; new Buffers for the outputs (or those of inputs they alias)."""
        device = self.device
        name, pointers = device.name, []
        for buffer in buffers:
            pointer = buffer.pointer
            if buffer.device != name or pointer & 15:
                return self.run([self.here(b) for b in buffers], symbols)
            pointers.append(pointer)
        with device.lock:
            device.activate()
            if self.quick is not None:
                prepared, order, size, class_ = self.quick
                block = device.pool.take(size, "", class_)
                pointers.append(block.pointer)  # the last: number -1
                prepared.launch(tuple([pointers[i] for i in order]))
                return [Buffer(block.pointer, size, block, name)]
            binding = self.bound_to(symbols)
            outputs, extra = self._place(binding, buffers)
            if self.single is not None:
                prepared = binding.launches[0]
                assert prepared is not None
                prepared.launch(tuple([self.slots[s] for s in self.single.slots]))
            else:
                self._run_steps(binding)
            del extra  # the stream is past them when they are handed out again
            return outputs

    def operations(
        self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
    ) -> tuple[list[Operation], list[Buffer], list[Buffer]]:
        """What a run on these Buffers puts on the stream, for a caller's own graph: operations,
        outputs, and all Buffers that must live as long as the operations are used."""
        if self.on_host:
            raise UserError(
                "a value on the GPU decides the course of this function",
                op="operations",
                expected="a course known before it runs",
            )
        held = [self.here(b) for b in buffers]
        with self.device.lock:
            self.device.activate()
            binding = self.bound_to(symbols)
            outputs, extra = self._place(binding, held)
            if self.scratch:
                extra.append(self.device.arena(self.recipe.arena_bytes))
            return list(self.walk(binding)), outputs, [*held, *outputs, *extra]

    def fix(
        self,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> Fixed:
        """Bound to Buffers that stay, as one graph to launch again and again."""
        return Fixed(self, buffers, symbols, placed, back)

    def _place(
        self, binding: Binding, buffers: Sequence[Buffer]
    ) -> tuple[list[Buffer], list[Buffer]]:
        """Point the Slots at Buffers: those given, and new ones for outputs and for itself."""
        slots = self.slots
        for number, buffer in zip(self.recipe.inputs, buffers):
            slots[number] = buffer.pointer
        outputs, extra = self._outputs(binding, buffers)
        for number, owner in self.aliases:
            slots[number] = slots[owner]
        return outputs, extra

    def bound_to(self, symbols: Mapping[str, int] | None) -> Binding:
        """What depends on these Symbols alone."""
        key: Any = () if self.fixed else tuple(sorted((symbols or {}).items()))
        found = self.bindings.get(key)
        if found is None:
            check_all(self.recipe.requirements, symbols)
            found = self.bindings[key] = Binding(self, dict(symbols or {}))
            if len(self.bindings) > BINDINGS:
                self.bindings.popitem(last=False)
        return found

    def check(self, symbols: Mapping[str, int] | None) -> None:
        """Raise unless what the ops need of these Symbols holds."""
        if self.recipe.requirements:
            with self.device.lock:
                self.device.activate()
                self.bound_to(symbols)

    def here(self, buffer: Buffer) -> Buffer:
        """A Buffer on this Device, aligned as kernels expect: small values of the host come along
        at each call, and another library's memory may begin anywhere."""
        if buffer.device == self.device.name:
            return buffer if not buffer.pointer & 15 else self.device.copy(buffer)
        if buffer.device != "cpu":
            raise UserError(
                "a Buffer is on another GPU",
                op="run",
                expected=self.device.name,
                got=buffer.device,
                hint=f'.to("{self.device.name}")',
            )
        return self.device.upload(buffer.array((buffer.bytes,), np.uint8), buffer.label)

    def _outputs(
        self, binding: Binding, buffers: Sequence[Buffer]
    ) -> tuple[list[Buffer], list[Buffer]]:
        """Buffers of the outputs, and of results that only the run itself needs."""
        slots, device = self.slots, self.device
        if self.scratch:
            base = device.arena(self.recipe.arena_bytes).pointer
            for number, offset in self.scratch:
                slots[number] = base + offset
        outputs: list[Buffer] = []
        made: dict[int, Buffer] = {}
        for owner, size in zip(self.owners, binding.output_bytes):
            if owner in self.input_of:
                outputs.append(buffers[self.input_of[owner]].part(0, size))
            elif owner in made:
                outputs.append(made[owner])
            else:
                made[owner] = device.allocate(size)
                slots[owner] = made[owner].pointer
                outputs.append(made[owner])
        extra = []
        for number, size in binding.hidden:
            extra.append(device.allocate(size))
            slots[number] = extra[-1].pointer
        return outputs, extra

    def _run_steps(self, binding: Binding) -> None:
        if self.on_host or config().cuda_sync:
            after_kernel = False
            for operation in self.walk(binding):
                run_directly(self.device, operation, after_kernel)
                after_kernel = operation.prepared is not None
            return
        key = tuple(self.slots)
        replay = binding.replays.get(key)
        if replay is None:
            replay = self._replay(binding, key)
        elif len(binding.replays) > 1:
            binding.replays.move_to_end(key)
        replay.launch()

    def _replay(self, binding: Binding, key: tuple[int, ...]) -> Replay:
        """A graph for these addresses: the oldest one patched, or a new one."""
        operations = list(self.walk(binding))
        if len(operations) > CAPTURE_LIMIT:
            return Directly(self.device, operations)  # type: ignore[return-value]
        if len(binding.replays) >= REPLAYS:
            _, oldest = binding.replays.popitem(last=False)
            if oldest.patch(operations):
                binding.replays[key] = oldest
                return oldest
        made = binding.replays[key] = Replay(self.device, operations)
        return made

    # ---- the course of the steps ----------------------------------------------------------

    def walk(self, binding: Binding) -> Iterator[Operation]:
        """Every launch and copy that does something, in order; control is followed on the host."""
        slots, counters = list(self.slots), [0] * COUNTERS
        steps, at = self.recipe.steps, 0
        while at < len(steps):
            step, here = steps[at], at
            at += 1
            if step.kind == "kernel":
                prepared = binding.launches[here]
                if prepared is not None and not prepared.empty:
                    pointers = tuple([slots[s] for s in step.slots])
                    if any([p & 15 for p in pointers]):
                        yield from self._aligned(binding, prepared, here, pointers)
                    else:
                        yield Operation(prepared, pointers, 0, here)
            elif step.kind == "copy":
                target, source = step.slots
                if binding.grids[here]:
                    yield Operation(None, (slots[target], slots[source]), binding.grids[here], here)
            else:
                at = self._control(step, binding.numbers[here], slots, counters, at)

    def _aligned(
        self, binding: Binding, prepared: Prepared, here: int, pointers: tuple[int, ...]
    ) -> Iterator[Operation]:
        """A launch on parts of arrays that begin at odd places: it works on aligned copies."""
        moved = {}
        for slot, pointer in zip(self.recipe.steps[here].slots, pointers):
            if pointer & 15:
                bytes = int(evaluate(self.recipe.slots[slot].bytes, binding.symbols))
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
            raise InternalError("ptx step", f"unknown step {kind}")
        return at

    def _read_bool(self, pointer: int) -> bool:
        """A bool on the GPU, after all work so far."""
        place = Buffer(pointer, 1, None, self.device.name)
        return bool(self.device.download(place)[0])


class Directly:
    """Stands in for a Replay that would be too large."""

    def __init__(self, device: Device, operations: Sequence[Operation]) -> None:
        self.device, self.operations = device, operations

    def launch(self) -> None:
        """Run the operations one by one."""
        after_kernel = False
        for operation in self.operations:
            run_directly(self.device, operation, after_kernel)
            after_kernel = operation.prepared is not None


def _is_single(recipe: Recipe) -> bool:
    return len(recipe.steps) == 1 and recipe.steps[0].kind == "kernel"


def _is_fixed(recipe: Recipe, entries: Sequence[Entry]) -> bool:
    """Whether nothing in it depends on a Symbol."""
    if recipe.requirements:
        return False
    sizes: list[Any] = [slot.bytes for slot in recipe.slots]
    for step in recipe.steps:
        sizes += (step.grid, *step.numbers)
    for entry in entries:
        sizes += entry.grid
        for kind, value in entry.arguments:
            if kind == "map":
                sizes += (*value.sizes, *value.strides)
            elif kind == "symbol":
                return False
    return all(isinstance(size, int) for size in sizes)
