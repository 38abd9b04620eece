"""Schedule IR: Kernels in order, over Slots of planned storage.

A Kernel is a Region (the Graph Nodes it computes) with its launches; a launch is a Body and the
Slots its parameters stand for. Control (scan, while_loop, cond) holds Schedules of its own.
Invariant: a Slot is written before it is read, and two Slots share bytes of the arena only if
their lives do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..ir.node import Node
from ..ir.symbol import Size
from ..ir.types import Array, bytes_bound
from ..tile.build import Body


@dataclass
class Slot:
    """Storage planned at compile time."""

    number: int
    type: Array
    kind: str  # 'input', 'output' or 'scratch'
    name: str = ""
    alias: int | None = None  # the Slot whose storage this one takes over
    offset: int | None = None  # in the arena, for scratch
    first: int = 0  # Kernel numbers between which it lives
    last: int = 0

    @property
    def bytes(self) -> int:
        """Bytes at the Symbols' upper bounds."""
        return bytes_bound(self.type)


@dataclass
class Launch:
    """A Body and the Slots of its parameters."""

    body: Body
    slots: tuple[int, ...]


@dataclass
class Copy:
    """A plain copy between Slots."""

    source: int
    target: int
    bytes: Size


@dataclass
class Kernel:
    """A Region with its launches; `key` is equal for Kernels that share Programs."""

    name: str
    kind: str
    region: tuple[tuple[Node, ...], tuple[Node, ...]]  # what it reads, what it stores
    steps: list[Any] = field(default_factory=list)  # Launch, Copy or control records
    key: str = ""
    flops: Size = 0
    bytes: Size = 0
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Schedule:
    """Ordered Kernels, Slots, and which Slots the inputs and outputs are."""

    slots: list[Slot]
    kernels: list[Kernel]
    inputs: list[int]
    outputs: list[int]
    arena_bytes: int = 0

    def storage(self, number: int) -> int:
        """The Slot that owns the bytes of a Slot, through aliases."""
        while self.slots[number].alias is not None:
            number = self.slots[number].alias  # type: ignore[assignment]
        return number


def show(schedule: Schedule) -> str:
    """The Schedule as text for people."""
    lines = [f"schedule: {len(schedule.kernels)} kernels, arena {schedule.arena_bytes} bytes"]
    for slot in schedule.slots:
        place = f"alias %{slot.alias}" if slot.alias is not None else (
            f"arena+{slot.offset}" if slot.offset is not None else slot.kind)  # fmt: skip
        lines.append(f"  %{slot.number}: {slot.type} {place}, kernels {slot.first}..{slot.last}")
    for number, kernel in enumerate(schedule.kernels):
        lines.append(f"  [{number}] {kernel.name} ({kernel.kind}): flops {kernel.flops}, "
                     f"bytes {kernel.bytes}")  # fmt: skip
        for step in kernel.steps:
            if isinstance(step, Launch):
                slots = ", ".join(f"%{s}" for s in step.slots)
                lines.append(f"        {step.body.name}({slots}) grid {step.body.grid}")
            else:
                lines.append(f"        {step}")
    return "\n".join(lines)
