"""Schedule IR: Kernels in order, over Slots of planned storage.

A Kernel is a Region (the Graph Nodes it computes) with its launches; a launch is a Body and the
Slots its parameters stand for. Control (scan, while_loop, cond) is Kernels of jumps between
Labels, counters and moved Slots around the Kernels of its Blocks, all in one list. A Kernel runs on
one Device, on Slots of its memory; Transfers go between them (`devices`). Invariant: a Slot is
written before it is read, and two Slots share bytes of an arena only if their lives do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..ir.types import Array
from ..tile.build import Body


@dataclass
class Slot:
    """Storage planned at compile time."""

    number: int
    type: Array
    kind: str  # 'input', 'output', 'scratch', or 'view' into its alias, set by control
    name: str = ""
    alias: int | None = None  # the Slot whose storage this one takes over
    offset: int | None = None  # in the arena, for scratch
    first: int = 0  # Kernel numbers between which it lives
    last: int = 0
    device: str = ""  # whose memory it is in; '' is the Schedule's own

    @cached_property
    def bytes(self) -> int:
        """Bytes at the Symbols' upper bounds."""
        return high(self.type.bytes)


@dataclass
class Launch:
    """A Body and the Slots of its parameters."""

    body: Body
    slots: tuple[int, ...]


@dataclass
class Copy:
    """A plain copy of all of a Slot: source, target."""

    slots: tuple[int, int]


@dataclass
class Transfer(Copy):
    """A copy between Slots of two Devices."""


@dataclass
class Label:
    """A place that jumps go to."""

    number: int
    slots = ()


@dataclass
class Control:
    """One control step, by kind:

    jump (label); jump_unless (label, slots: a bool); set_counter, add_counter (numbers: counter,
    value); jump_counter_less (label, numbers: counter, bound); set_slot (slots: slot, base,
    numbers: counter or -1, stride, offset, in bytes); swap_slots (slots: two).
    """

    kind: str
    slots: tuple[int, ...] = ()
    numbers: tuple[Size, ...] = ()
    label: int = -1


@dataclass
class Kernel:
    """A Region with its launches."""

    name: str
    kind: str
    region: tuple[tuple[Node, ...], tuple[Node, ...]]  # what it reads, what it stores
    steps: list[Any] = field(default_factory=list)  # Launch, Copy, Control or Label
    key: str = ""  # equal for Kernels that share Programs
    flops: Size = 0
    bytes: Size = 0
    depth: int = 0  # Blocks around it
    times: int = 1  # about how often loops run it
    device: str = ""  # that runs it; '' is the Schedule's own
    host: str = ""  # the CPU beside an array, in its memory, where the array does not run it
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Schedule:
    """Ordered Kernels, Slots, and which Slots the inputs and outputs are."""

    slots: list[Slot]
    kernels: list[Kernel]
    inputs: list[int]
    outputs: list[int]
    arena_bytes: int = 0
    ends: dict[int, int] = field(default_factory=dict)  # of chains of aliases, as far as known
    given: list[int] | None = None  # Slots by number of the Graph's inputs; -1: only prepared
    preparing: list[Any] = field(default_factory=list)  # what inputs are prepared of
    arenas: dict[str, int] = field(default_factory=dict)  # bytes on the other Devices

    def storage(self, number: int) -> int:
        """The Slot that owns the bytes of a Slot, through aliases; an alias that is set stays."""
        links = []
        while (after := self.ends.get(number, self.slots[number].alias)) is not None:
            links.append(number)
            number = after
        for link in links:
            self.ends[link] = number
        return number


COUNTERS = 64


@dataclass
class Frame:
    """What the Lowerings of a Graph and of its Blocks share."""

    slots: list[Slot] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)  # Kernel numbers, inner first
    pairs: list[tuple[int, int]] = field(default_factory=list)  # Slots that are swapped
    always: set[int] = field(default_factory=set)  # Slots that jumps read: they are not reused
    moved: set[int] = field(default_factory=set)  # Slots whose pointers change
    swapped: set[int] = field(default_factory=set)  # those that change places with another
    labels: int = 0
    counters: int = 0  # in use by the loops we are inside of

    def label(self) -> int:
        """A new Label's number."""
        self.labels += 1
        return self.labels - 1

    def counter(self) -> int:
        """A free counter."""
        if self.counters == COUNTERS:
            raise InternalError("schedule.control", f"loops need more than {COUNTERS} counters")
        self.counters += 1
        return self.counters - 1


def show(schedule: Schedule) -> str:
    """The Schedule as text for people."""
    lines = [f"schedule: {len(schedule.kernels)} kernels, arena {schedule.arena_bytes} bytes"]
    for slot in schedule.slots:
        place = (
            f"alias %{slot.alias}"
            if slot.alias is not None
            else (f"arena+{slot.offset}" if slot.offset is not None else slot.kind)
        )
        place += f" on {slot.device}" if slot.device else ""
        lines.append(f"  %{slot.number}: {slot.type} {place}, kernels {slot.first}..{slot.last}")
    for number, kernel in enumerate(schedule.kernels):
        inner = "  " * kernel.depth
        named = kernel.host or kernel.device
        where = f" on {named}" if named else ""
        lines.append(
            f"  {inner}[{number}] {kernel.name} ({kernel.kind}){where}: flops {kernel.flops}, "
            f"bytes {kernel.bytes}"
        )
        for step in kernel.steps:
            if isinstance(step, Launch):
                slots = ", ".join(f"%{s}" for s in step.slots)
                lines.append(f"        {inner}{step.body.name}({slots}) grid {step.body.grid}")
            else:
                lines.append(f"        {inner}{step}")
    return "\n".join(lines)
