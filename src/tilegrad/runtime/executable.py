"""Executables: a Recipe bound to its Devices, with its Slots placed at each call.

The one place that says what a Slot points at: inputs at the Buffers given, outputs at new ones (or
at the input they take over), scratch in the arena of its Device, results that only the run itself
needs at Buffers of its own, aliases where their owners are. A Launcher then runs the steps.
Invariant: a call uses no pointer of an earlier call; a Buffer that is on another Device, or not
aligned as kernels expect, is never run on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import AxisError
from ..ir.requirement import check_all
from ..ir.symbol import evaluate
from .buffer import Buffer
from .recipe import Back, Recipe

if TYPE_CHECKING:
    from .device import Device
    from .launcher import Launcher
    from .replay import Replay

BINDINGS = 64  # choices of Symbols kept


class Binding:
    """What depends on the Symbols alone: sizes, and launches but for pointers."""

    __slots__ = ("hidden", "output_bytes", "steps", "symbols")

    def __init__(self, executable: Executable, symbols: Mapping[str, int]) -> None:
        self.symbols = symbols
        self.output_bytes = [int(evaluate(b, symbols)) for b in executable.output_bytes]
        self.hidden = [(n, int(evaluate(b, symbols)), a) for n, b, a in executable.hidden]
        self.steps = executable.launcher.bind(symbols)


class Arena:
    """The scratch Slots of an Executable on one Device."""

    def __init__(self, device: Device, bytes: int, offsets: Sequence[tuple[int, int]]) -> None:
        self.device, self.bytes, self.offsets = device, bytes, offsets
        self.buffer: Buffer | None = None  # that the Executable's own Slots point into

    def point(self, slots: Any) -> Buffer:
        """Point the Slots into what is the Device's arena now; gives it."""
        buffer = self.device.arena(self.bytes)
        for number, offset in self.offsets:
            slots[number] = buffer.pointer + offset
        return buffer


class Executable:
    """A Recipe bound to a Device; `code` has its Programs as the Device loaded them, by key.
    `others` are further Devices that it uses, by name, with the code that they loaded."""

    def __init__(
        self,
        recipe: Recipe,
        code: Mapping[str, Any],
        device: Device,
        others: Mapping[str, tuple[Device, Mapping[str, Any]]] | None = None,
    ) -> None:
        self.recipe, self.device = recipe, device
        self.machines = {"": device, **{name: one for name, (one, _) in (others or {}).items()}}
        self._lay_out()
        if others:
            from .relay import Relay

            self.launcher: Launcher = Relay(recipe, {"": (device, code), **others})
        else:
            self.launcher = device.launcher(recipe, code)
        self.lock, self.slots = self.launcher.lock, self.launcher.slots
        self.symbolic = self.launcher.symbolic
        self.bindings: OrderedDict[Any, Binding] = OrderedDict()
        self.last: Binding | None = None
        self.checked: Mapping[str, int] | None = None  # Symbols that meet the requirements
        self.keeps_results = self.launcher.keeps_results()
        self.quick = self.launcher.quick(self)

    def _lay_out(self) -> None:
        """What a call must know of the Slots: none of it depends on Buffers or Symbols."""
        recipe = self.recipe
        homes = [self.machines[slot.device] for slot in recipe.slots]
        owners = recipe.owners()
        self.inputs = [(s, homes[s].name, homes[s].alignment - 1) for s in recipe.inputs]
        self.input_of = {slot: i for i, slot in enumerate(recipe.inputs)}
        self.owners = [owners[o] for o in recipe.outputs]
        self.output_bytes = [recipe.slots[o].bytes for o in self.owners]
        self.outputs = [(o, self.input_of.get(o, -1), homes[o].allocate) for o in self.owners]
        own = [(n, s) for n, s in enumerate(recipe.slots) if s.alias < 0]
        self.hidden = [
            (n, s.bytes, homes[n].allocate)
            for n, s in own
            if s.kind == "output" and n not in self.owners
        ]
        self.aliases = [(n, owners[n]) for n, s in enumerate(recipe.slots) if s.alias >= 0]
        self.arenas = []
        for name, machine in self.machines.items():
            scratch = [(n, s.offset) for n, s in own if s.kind == "scratch" and s.device == name]
            if scratch:
                bytes = recipe.arenas[name] if name else recipe.arena_bytes
                self.arenas.append(Arena(machine, bytes, scratch))

    # ---- running --------------------------------------------------------------------------

    def run(
        self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
    ) -> list[Buffer]:
        """Run once; new Buffers for the outputs (or those of inputs they alias)."""
        slots = self.slots
        with self.lock:
            for (number, home, unaligned), buffer in zip(self.inputs, buffers):
                pointer = buffer._pointer  # 0 where the Buffer has ended
                if buffer.device != home or not pointer or pointer & unaligned:
                    break
                slots[number] = pointer
            else:
                if self.quick is not None:
                    return self.quick()
                binding = self.last
                if binding is None or (self.symbolic and binding.symbols != symbols):
                    binding = self.bound_to(symbols)
                outputs, extra = self.place(binding, buffers)
                try:
                    self.launcher.launch(binding.steps)
                except AxisError as error:
                    if self.keeps_results:
                        error.results = outputs
                    raise
                del extra  # whoever gets this memory next writes it after this run
                return outputs
        return self.run(self.fitting(buffers), symbols)

    def fitting(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Buffers where the inputs are expected, aligned as kernels expect."""
        slots = self.recipe.slots
        return [
            self.machines[slots[number].device].fitting(buffer)
            for (number, _, _), buffer in zip(self.inputs, buffers)
        ]

    def place(
        self, binding: Binding, buffers: Sequence[Buffer]
    ) -> tuple[list[Buffer], list[Buffer]]:
        """Point all Slots but the inputs'; gives Buffers of the outputs, and of results that only
        the run itself needs."""
        slots = self.slots
        for arena in self.arenas:
            if arena.buffer is not arena.device.scratch or arena.buffer is None:
                arena.buffer = arena.point(slots)
        outputs: list[Buffer] = []
        made: dict[int, Buffer] = {}
        for (owner, given, allocate), size in zip(self.outputs, binding.output_bytes):
            if given >= 0:
                outputs.append(buffers[given].part(0, size))
            elif owner in made:
                outputs.append(made[owner])
            else:
                buffer = made[owner] = allocate(size)
                slots[owner] = buffer._pointer
                outputs.append(buffer)
        extra = []
        for owner, size, allocate in binding.hidden:
            buffer = allocate(size)
            slots[owner] = buffer._pointer
            extra.append(buffer)
        for number, owner in self.aliases:
            slots[number] = slots[owner]
        return outputs, extra

    def bound_to(self, symbols: Mapping[str, int] | None) -> Binding:
        """What depends on these Symbols alone; the lock is held."""
        key: Any = tuple(sorted((symbols or {}).items())) if self.symbolic else ()
        found = self.bindings.get(key)
        if found is None:
            self.check(symbols)
            found = self.bindings[key] = Binding(self, dict(symbols or {}))
            if len(self.bindings) > BINDINGS:
                self.bindings.popitem(last=False)
        self.last = found
        return found

    def check(self, symbols: Mapping[str, int] | None) -> None:
        """Raise unless what the ops need of these Symbols holds."""
        if self.recipe.requirements and symbols != self.checked:
            check_all(self.recipe.requirements, symbols)
            self.checked = dict(symbols or {})

    def replay(
        self,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> Replay:
        """Bound to Buffers that stay, to run again and again."""
        from .replay import Replay

        return Replay(self, buffers, symbols, placed, back)


__all__ = ["Executable"]
