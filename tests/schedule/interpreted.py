"""Run a Schedule on NumPy: every launch through the Tile interpreter, control as written.

The judge of Schedules for Targets that this machine does not have. Invariant: every Slot that is
not an alias has bytes of its own, filled with nonsense before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilegrad.compiler.compile import layout_of, schedule_for
from tilegrad.core.target import Target
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import evaluate
from tilegrad.ir.types import product
from tilegrad.schedule.schedule import Control, Copy, Label, Launch, Schedule
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.check import PLACED_OPS, verify_body, walk

Pointer = tuple[np.ndarray, int]  # bytes, and where in them


class Machine:
    """Slots as pointers into byte arrays, and the steps of a Schedule run in order."""

    def __init__(
        self,
        schedule: Schedule,
        values: Sequence[np.ndarray],
        symbols: Mapping[str, int],
        target: Target,
    ) -> None:
        self.schedule, self.symbols, self.target = schedule, dict(symbols), target
        self.pointers: list[Pointer] = [(np.empty(0, np.uint8), 0)] * len(schedule.slots)
        self.counters = [0] * 64
        self.bodies: list[Body] = []  # as they ran
        for number, slot in enumerate(schedule.slots):
            if slot.alias is None:
                self.pointers[number] = (np.full(self.bytes(number), 0xA5, np.uint8), 0)
        for number, value in zip(schedule.inputs, values):
            self.pointers[number] = (np.array(value, order="C").reshape(-1).view(np.uint8), 0)
        for number in range(len(schedule.slots)):
            self.pointers[number] = self.pointers[schedule.storage(number)]

    def bytes(self, number: int) -> int:
        """Bytes of a Slot with these Symbols."""
        type_ = self.schedule.slots[number].type
        return evaluate(product(type_.shape), self.symbols) * type_.dtype.size

    def memory(self, number: int, parameter: Node) -> np.ndarray:
        """What a parameter of a launch sees."""
        data, start = self.pointers[number]
        return data[start : start + self.bytes(number)].view(parameter.dtype.numpy)

    def run(self) -> None:
        """All steps."""
        steps = [s for k in self.schedule.kernels for s in k.steps]
        labels = {s.number: i for i, s in enumerate(steps) if isinstance(s, Label)}
        at = 0
        while at < len(steps):
            step = steps[at]
            at += 1
            if isinstance(step, Launch):
                self.launch(step)
            elif isinstance(step, Copy):
                count = self.bytes(step.slots[1])
                (a, i), (b, j) = (self.pointers[slot] for slot in step.slots)
                b[j : j + count] = a[i : i + count]
            elif isinstance(step, Control) and self.control(step):
                at = labels[step.label]

    def launch(self, step: Launch) -> None:
        """One Body over its grid."""
        if not any(step.body is b for b in self.bodies):
            placed = any(n.op.name in PLACED_OPS for n, _ in walk(step.body.block))
            verify_body(step.body, "placed" if placed else "portable", self.target)
        self.bodies.append(step.body)
        memories = [self.memory(n, p) for n, p in zip(step.slots, step.body.parameters)]
        interpret.run(step.body, memories, self.symbols)

    def control(self, step: Control) -> bool:
        """One control step; whether it jumps."""
        numbers = [evaluate(n, self.symbols) for n in step.numbers]
        if step.kind == "set_counter":
            self.counters[numbers[0]] = numbers[1]
        elif step.kind == "add_counter":
            self.counters[numbers[0]] += numbers[1]
        elif step.kind == "jump_counter_less":
            return self.counters[numbers[0]] < numbers[1]
        elif step.kind == "jump_unless":
            data, start = self.pointers[step.slots[0]]
            return not data[start]
        elif step.kind == "set_slot":
            data, start = self.pointers[step.slots[1]]
            moved = self.counters[numbers[0]] * numbers[1] if numbers[0] >= 0 else 0
            self.pointers[step.slots[0]] = (data, start + moved + numbers[2])
        elif step.kind == "swap_slots":
            a, b = step.slots
            self.pointers[a], self.pointers[b] = self.pointers[b], self.pointers[a]
        return step.kind == "jump"


def prepared(schedule: Schedule, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the inputs of a Schedule hold: those that are given, and what is prepared of others."""
    if not schedule.preparing or schedule.given is None:
        return list(values)
    found = {slot: v for slot, v in zip(schedule.given, values) if slot >= 0}
    for one in schedule.preparing:
        layout = layout_of(one.layout, ())
        given = [values[i] for i in one.sources]
        made = layout.pack(np.concatenate([x.reshape(-1, x.shape[-1]) for x in given]))
        found.update(zip(one.slots, (made[name] for name, _, _ in layout.parts())))
    return [found[slot] for slot in schedule.inputs]


def run_interpreted(
    target: Target,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[np.ndarray],
    symbols: Mapping[str, int] | None = None,
    donate: tuple[int, ...] = (),
    without: Sequence[str] = (),
) -> list[np.ndarray]:
    """The outputs of a Graph scheduled for a Target and run on NumPy."""
    bound = dict(symbols or {})
    schedule = schedule_for(inputs, outputs, target, donate, without)
    machine = Machine(schedule, prepared(schedule, values), bound, target)
    machine.run()
    result = []
    for node, number in zip(outputs, schedule.outputs):
        shape = tuple(evaluate(s, bound) for s in node.shape)
        data, start = machine.pointers[number]
        size = int(np.prod(shape, dtype=np.int64)) * node.dtype.size
        found = data[start : start + size].view(node.dtype.numpy)
        result.append(found.reshape(shape).copy())
    return result
