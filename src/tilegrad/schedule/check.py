"""The verifier of Schedules: every Slot is written before it is read, lives do not collide.

Kernels are read in their order; a jump back reads nothing that was not written on the way there.
Invariant: a Schedule that passes has no step that reads bytes nobody wrote, no two living
scratch Slots on the same bytes, and no jump without its Label.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.errors import InternalError
from ..ir.types import Memory, product
from .lowering import Lowering
from .schedule import Control, Copy, Label, Launch, Schedule, Slot, Transfer


def check_lowered(lowering: Lowering, schedule: Schedule) -> None:
    """The pass: the verifier."""
    check_schedule(schedule)


def check_schedule(schedule: Schedule) -> None:
    """Raise InternalError where a Schedule breaks its promises."""
    for check in (_order, _touches, _arena, _jumps, _results):
        for fault in check(schedule):
            raise InternalError("schedule.check", fault)


def reads_writes(step: object) -> tuple[list[int], list[int]]:
    """The Slots whose bytes a step reads, and those it writes."""
    if isinstance(step, Copy):
        return [step.slots[0]], [step.slots[1]]
    if isinstance(step, Control):
        return list(step.slots) if step.kind == "jump_unless" else [], []
    if not isinstance(step, Launch):
        return [], []
    uses = [parameter.type.use for parameter in step.body.parameters]  # type: ignore[union-attr]
    touched = [(slot, use in ("result", "state")) for slot, use in zip(step.slots, uses)]
    return [slot for slot, own in touched if not own], [slot for slot, own in touched if own]


def _order(schedule: Schedule) -> Iterator[str]:
    written = {schedule.storage(i) for i in schedule.inputs}
    for number, kernel in enumerate(schedule.kernels):
        for step in kernel.steps:
            if isinstance(step, Launch) and len(step.slots) != len(step.body.parameters):
                yield (
                    f"kernel {number} {kernel.name}: {step.body.name} has "
                    f"{len(step.body.parameters)} parameters"
                )
            if isinstance(step, Control) and step.kind == "swap_slots":
                written.update(schedule.storage(s) for s in step.slots)
            reads, writes = reads_writes(step)
            for slot in reads:
                if schedule.storage(slot) not in written and not _empty(schedule.slots[slot]):
                    yield f"kernel {number} {kernel.name} reads Slot %{slot} before it is written"
            written.update(schedule.storage(s) for s in writes)
    for slot in schedule.outputs:
        if schedule.storage(slot) not in written and not _empty(schedule.slots[slot]):
            yield f"the output Slot %{slot} is never written"


def _empty(slot: Slot) -> bool:
    return slot.type.size == 0


def _results(schedule: Schedule) -> Iterator[str]:
    """Every Body uses the results it says it writes."""
    for body in {
        id(s.body): s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)
    }.values():
        used = {x for node in body.block.all_nodes() for x in node.inputs}
        for number, parameter in enumerate(body.parameters):
            memory = parameter.type
            if isinstance(memory, Memory) and memory.use == "result" and parameter not in used:
                if product(memory.shape) != 0:
                    yield f"{body.name} never writes its parameter {number}, a result"


def _touches(schedule: Schedule) -> Iterator[str]:
    """A Kernel touches Slots that live, and of its Device alone, unless it is a Transfer."""
    for number, kernel in enumerate(schedule.kernels):
        for step, touched in ((s, slot) for s in kernel.steps for slot in s.slots):
            owner, device = (
                schedule.slots[schedule.storage(touched)],
                schedule.slots[touched].device,
            )
            if not owner.first <= number <= owner.last:
                yield (
                    f"kernel {number} {kernel.name} touches Slot %{touched}, which "
                    f"lives in kernels {owner.first}..{owner.last}"
                )
            if device != kernel.device and not isinstance(step, Transfer):
                yield (
                    f"kernel {number} {kernel.name} runs on {kernel.device!r} and touches Slot "
                    f"%{touched} of {device!r}"
                )


def _arena(schedule: Schedule) -> Iterator[str]:
    arenas = {"": schedule.arena_bytes, **schedule.arenas}
    placed = [s for s in schedule.slots if s.kind == "scratch" and s.offset is not None]
    placed.sort(key=lambda s: s.offset or 0)
    for i, a in enumerate(placed):
        end = (a.offset or 0) + a.bytes
        if end > arenas[a.device]:
            yield f"Slot %{a.number} ends after the arena of {arenas[a.device]} bytes"
        for b in placed[i + 1 :]:
            if (b.offset or 0) >= end:
                break
            if a.device == b.device and a.first <= b.last and b.first <= a.last and b.bytes:
                yield f"Slots %{a.number} and %{b.number} share bytes while both live"


def _jumps(schedule: Schedule) -> Iterator[str]:
    steps = [s for k in schedule.kernels for s in k.steps]
    labels = [s.number for s in steps if isinstance(s, Label)]
    if len(set(labels)) != len(labels):
        yield "a Label is there twice"
    for step in steps:
        if isinstance(step, Control) and step.kind.startswith("jump") and step.label not in labels:
            yield f"{step} has no Label to go to"
