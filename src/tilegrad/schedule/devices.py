"""One Schedule over several Devices: Schedules of its parts joined, with Transfers between them.

Each part was scheduled for its own Device; what one leaves and another reads becomes one Slot.
What goes away from the Schedule's own Device goes as soon as its last Kernel there is done with it,
what comes to it comes right before its first use, so that its memory holds as little as can be.
Memory is then planned anew, an arena for each Device. Invariant: a Kernel touches Slots of its own
Device alone; values of the results are those of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.config import config
from ..ir.node import Node
from .check import check_schedule
from .reuse import Life, plan_memory, widen
from .schedule import Control, Kernel, Label, Schedule, Slot, Transfer


@dataclass
class Part:
    """The Schedule of what one Device computes; `inputs` and `outputs` are the values of the whole
    Graph that those of the Schedule are."""

    device: str  # '' is the Schedule's own
    schedule: Schedule
    inputs: list[Node]
    outputs: list[Node]

    def touches(self, slot: int) -> list[int]:
        """Numbers of the Kernels that touch the memory of a Slot: the first and the last of all
        where there are loops or branches, or where none does."""
        schedule, last = self.schedule, len(self.schedule.kernels) - 1
        if any(isinstance(s, Label) for k in schedule.kernels for s in k.steps):
            return [0, last]
        owner = schedule.storage(slot)
        found = []
        for number, kernel in enumerate(schedule.kernels):
            if any(schedule.storage(s) == owner for x in kernel.steps for s in x.slots):
                found.append(number)
        return found or [last]


@dataclass
class Move:
    """A value that goes to a Device: `value` is the transfer, `source` what it is of."""

    value: Node
    source: Node
    device: str


@dataclass
class Joiner(Schedule):
    """The whole as far as it is there."""

    results: set[Node] = field(default_factory=set)
    slot_of: dict[Node, int] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)
    waiting: dict[Node, Move] = field(default_factory=dict)  # not copied before they are read
    labels: int = 0

    def new_slot(self, value: Node, kind: str, device: str) -> int:
        """A Slot for a value."""
        slot = Slot(len(self.slots), value.type, kind, device=device)  # type: ignore[arg-type]
        self.slots.append(slot)
        self.slot_of[value] = slot.number
        return slot.number

    def widen(self, slot: int, first: int, last: int) -> None:
        """Let the memory of a Slot live over some Kernels too."""
        widen(self.lives, self.storage(slot), (first, last))

    def place(self, value: Node) -> int:
        """The Slot of a value; that of a Move that waits is there before the copy."""
        if value not in self.slot_of:
            self.new_slot(value, "scratch", self.waiting[value].device)
        return self.slot_of[value]

    def move(self, move: Move) -> None:
        """Add the Kernel of a transfer."""
        self.waiting.pop(move.value, None)
        if move.source in self.waiting:
            self.move(self.waiting[move.source])
        source, target = self.slot_of[move.source], self.slot_of.get(move.value)
        if target is None:
            target = self.new_slot(move.value, "scratch", move.device)
        at = len(self.kernels)
        kernel = Kernel("transfer", "transfer", ((move.source,), (move.value,)))
        kernel.steps = [Transfer((source, target))]
        kernel.bytes, kernel.device = self.slots[target].type.bytes * 2, move.device
        self.kernels.append(kernel)
        for slot in (source, target):
            self.widen(slot, at, at)

    # ---- parts ----------------------------------------------------------------------------

    def add(self, part: Part, leaving: Sequence[Move]) -> None:
        """Add a part, the Moves that it waits for, and those that leave as soon as they can."""
        number = self._numbers(part)
        kernels = part.schedule.kernels
        firsts: dict[int, list[Move]] = {}
        for value, slot in zip(part.inputs, part.schedule.inputs):
            if value in self.waiting:
                firsts.setdefault(part.touches(slot)[0], []).append(self.waiting[value])
        lasts: dict[int, list[Move]] = {}
        for move in leaving:
            slot = part.schedule.outputs[part.outputs.index(move.source)]
            lasts.setdefault(part.touches(slot)[-1], []).append(move)
        index: list[int] = []
        for n, kernel in enumerate(kernels):
            for move in firsts.pop(n, ()):
                self.move(move)
            index.append(len(self.kernels))
            steps = [_renumbered(s, number, self.labels) for s in kernel.steps]
            self.kernels.append(replace(kernel, steps=steps, device=part.device))
            for move in lasts.pop(n, ()):
                self.move(move)
        for moves in (*firsts.values(), *lasts.values()):
            for move in moves:
                self.move(move)
        self._live(part, number, index)
        self.labels += 1 + max(
            (s.number for k in kernels for s in k.steps if isinstance(s, Label)), default=-1
        )

    def _numbers(self, part: Part) -> list[int]:
        """The Slot of the whole that each Slot of a part is."""
        schedule = part.schedule
        number = [-1] * len(schedule.slots)
        for at, value in zip(schedule.inputs, part.inputs):
            number[at] = self.place(value)
        fresh = [slot for slot in schedule.slots if number[slot.number] < 0]
        for count, slot in enumerate(fresh):
            number[slot.number] = len(self.slots) + count
        outputs = set(schedule.outputs)
        for slot in fresh:
            alias = None if slot.alias is None else number[slot.alias]
            inside = slot.kind == "output" and slot.number in outputs  # but for results
            made = replace(slot, number=number[slot.number], alias=alias, offset=None)
            made.kind, made.device = "scratch" if inside else slot.kind, part.device
            self.slots.append(made)
        for at, value in zip(schedule.outputs, part.outputs):
            self.slot_of[value] = number[at]
        return number

    def _live(self, part: Part, number: Sequence[int], index: Sequence[int]) -> None:
        """Take over when the Slots of a part live."""
        for slot in part.schedule.slots:
            if slot.alias is None and slot.first <= slot.last and index:
                last = min(slot.last, len(index) - 1)
                self.widen(number[slot.number], index[slot.first], index[last])


def _renumbered(step: Any, number: Sequence[int], labels: int) -> Any:
    if isinstance(step, Label):
        return Label(step.number + labels)
    moved = replace(step, slots=tuple(number[s] for s in step.slots))
    if isinstance(step, Control) and step.label >= 0:
        moved.label += labels
    return moved


def join(
    arguments: Sequence[tuple[Node, str]], results: Sequence[Node], course: Sequence[Part | Move]
) -> Schedule:
    """The Schedule of the whole: arguments with their Devices, and Parts and Moves in an order in
    which they can run."""
    whole = Joiner([], [], [], [], results=set(results))
    for value, device in arguments:
        whole.new_slot(value, "input", device)
    leaving: dict[Node, list[Move]] = {}
    left: set[Node] = set()
    for one in course:
        if isinstance(one, Move) and one.device:
            leaving.setdefault(one.source, []).append(one)
    for one in course:
        if isinstance(one, Part):
            moves = [m for value in dict.fromkeys(one.outputs) for m in leaving.get(value, ())]
            left |= {m.value for m in moves}
            whole.add(one, moves)
        elif one.value not in left:
            if one.device or one.value in whole.results:
                whole.move(one)
            else:
                whole.waiting[one.value] = one
    outputs = [whole.slot_of[value] for value in results]
    for slot in outputs:
        owner = whole.slots[whole.storage(slot)]
        owner.kind = "output" if owner.kind == "scratch" else owner.kind
        whole.widen(owner.number, len(whole.kernels), len(whole.kernels))
    for found in whole.slots:
        found.first, found.last = whole.lives.get(found.number, (0, -1))
    inputs = [whole.slot_of[value] for value, _ in arguments]
    schedule = Schedule(whole.slots, whole.kernels, inputs, outputs)
    plan_memory(schedule)
    if config().verify:
        check_schedule(schedule)
    return schedule
