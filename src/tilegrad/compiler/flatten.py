"""Flatten a Schedule to a Recipe: one list of steps, Labels turned into entry numbers.

Each Body is emitted once, however many launches share it. What a launch moves and what it is for
are noted for profiles. Invariant: the same Schedule gives the same Recipe and the same target text;
counts come from shapes alone, and of an array that is only gathered from, what is gathered counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..core.errors import Site
from ..core.target import Target
from ..graph import ops
from ..ir.fingerprint import digest
from ..ir.node import Node, topological
from ..ir.requirement import Requirement
from ..ir.symbol import Size, high, multiply
from ..ir.types import Array, product
from ..runtime.device import target_for
from ..runtime.fault import WORD_BYTES
from ..runtime.language import language_of
from ..runtime.recipe import Recipe, Step, Storage
from ..schedule.lower import tiny
from ..schedule.schedule import Control, Copy, Kernel, Label, Launch, Schedule, Slot, Transfer
from ..tile.build import Body, body_sites

SMALL_WORK = 60_000  # FLOPs + bytes below which one worker runs a kernel alone
LONGEST = 72  # characters of a Region's text


def recipe_of(
    schedule: Schedule, target: Target, requirements: Sequence[Requirement] = ()
) -> tuple[Recipe, dict[str, str]]:
    """A Schedule as plain data, and the target text of each object it needs by key."""
    recipe, texts = recipe_and_texts(schedule, target, requirements)
    return recipe, texts.get("", {})


def recipe_and_texts(
    schedule: Schedule, target: Target, requirements: Sequence[Requirement] = ()
) -> tuple[Recipe, dict[str, dict[str, str]]]:
    """The same with the texts by Device; '' is the Schedule's own."""
    flat = Flattener(target, schedule.slots)
    for kernel in schedule.kernels:
        flat.begin(kernel)
        for step in kernel.steps:
            flat.add(step, kernel)
    for jump, label in flat.jumps:
        jump.numbers.append(flat.labels[label])
    storage = [storage_of(slot) for slot in schedule.slots]
    storage += [
        Storage("fault", WORD_BYTES, i * WORD_BYTES, device=d) for i, d in enumerate(flat.faults)
    ]
    recipe = Recipe(
        flat.table,
        storage,
        flat.steps,
        schedule.inputs if schedule.given is None else schedule.given,
        schedule.outputs,
        schedule.arena_bytes,
        flat.scratch,
        tiny(schedule),
        entries=flat.entries if any(flat.entries) else [],
        sites=flat.sites if any(flat.sites) else [],
        requirements=list(requirements),
        preparing=schedule.preparing,
        arenas=schedule.arenas,
    )
    return recipe, flat.texts


def storage_of(slot: Slot) -> Storage:
    """A Slot as plain data."""
    size = multiply(product(slot.type.shape), slot.type.dtype.size)
    alias = -1 if slot.alias is None else slot.alias
    return Storage(slot.kind, size, slot.offset or 0, alias, slot.device)


class Flattener:
    """Steps, Programs and texts gathered so far."""

    def __init__(self, target: Target, slots: Sequence[Slot]) -> None:
        self.targets, self.slots = {"": target}, slots  # by Device
        self.faults: list[str] = []  # of launches with a fault word; their Slots follow the others
        self.sites: list[list[Site]] = []  # of the Programs
        self.programs: dict[tuple[str, int], int] = {}  # Device, Body -> its place in the table
        self.table: list[tuple[str, str]] = []
        self.entries: list[str] = []  # of the same place
        self.texts: dict[str, dict[str, str]] = {}  # by Device and key
        self.scratch = 0
        self.steps: list[Step] = []
        self.labels: dict[int, int] = {}  # Label -> entry
        self.jumps: list[tuple[Step, int]] = []
        self.known: dict[Any, tuple[str, list[tuple[Size, Size]]]] = {}  # by kind and Bodies
        self.region = ""
        self.shares: list[tuple[Size, Size]] = []  # of the launches to come of a Kernel

    def target_of(self, device: str) -> Target:
        """The Target of a Device."""
        if device not in self.targets:
            self.targets[device] = target_for(device)
        return self.targets[device]

    def begin(self, kernel: Kernel) -> None:
        """Note what the launches of a Kernel are for; Kernels of the same Bodies share that."""
        key = (kernel.kind, *(id(s.body) for s in kernel.steps if isinstance(s, Launch)))
        if key not in self.known:
            self.known[key] = region_text(kernel), shares(kernel)
        self.region, self.shares = self.known[key][0], list(self.known[key][1])

    def add(self, step: Any, kernel: Kernel) -> None:
        """Append one step of a Kernel."""
        if isinstance(step, Launch):
            self.launch(step, kernel)
        elif isinstance(step, Copy):
            source, target = step.slots
            bytes_ = self.slots[target].type.bytes
            self.steps.append(
                Step(
                    "transfer" if isinstance(step, Transfer) else "copy",
                    -1,
                    [target, source],
                    bytes_,
                    small=high(bytes_) < SMALL_WORK,
                    region=f"copy of {bytes_} bytes",
                    bytes=multiply(bytes_, 2),
                    device=kernel.device,
                )
            )
        elif isinstance(step, Label):
            self.labels[step.number] = len(self.steps)
        elif isinstance(step, Control):
            self.steps.append(Step(step.kind, -1, list(step.slots), numbers=list(step.numbers)))
            self.steps[-1].device = kernel.device
            if step.label >= 0:
                self.jumps.append((self.steps[-1], step.label))

    def launch(self, step: Launch, kernel: Kernel) -> None:
        """Append a kernel entry, its Program emitted if it is new."""
        body, device = step.body, kernel.device
        target = self.target_of(device)
        if (device, id(body)) not in self.programs:
            name, key, text, need, entry = program_text(body, target)
            self.programs[device, id(body)] = len(self.table)
            self.table.append((name, key))
            self.entries.append(entry)
            self.sites.append(
                [Site(n.attrs["message"], n.attrs["location"]) for n in body_sites(body)]
            )
            self.texts.setdefault(device, {})[key] = text
            body.notes["scratch"] = need
        self.scratch = max(self.scratch, body.notes["scratch"])
        symbols = language_of(target).symbols(body)
        small = high(kernel.flops) + high(kernel.bytes) < SMALL_WORK
        moved, flops = self.shares.pop(0)
        program, slots = self.programs[device, id(body)], list(step.slots)
        if self.sites[program]:
            slots.append(len(self.slots) + len(self.faults))
            self.faults.append(device)
        self.steps.append(
            Step(
                "kernel",
                program,
                slots,
                product(body.grid),
                symbols,
                small,
                region=self.region,
                bytes=moved,
                flops=flops,
                device=device,
            )
        )


def program_text(body: Body, target: Target) -> tuple[str, str, str, int, str]:
    """(function name, key, target text, scratch bytes, Entry) of a Body, emitted once."""
    known, found = body.notes.get("program", ("", None))
    if found is None or known != target.key:
        program = language_of(target).emit(body, "KERNEL_NAME", target)
        tag = digest(program.text)[:12]
        name = f"{re.sub(r'[^A-Za-z0-9_]', '_', body.name[:48])}_{tag}"
        program = program.renamed("KERNEL_NAME", name)
        text = program.text
        found = (name, digest(text, target.key), text, program.scratch, program.entry)
        body.notes["program"] = (target.key, found)
    return found


# ---- notes for profiles -----------------------------------------------------------------------


def moved(kernel: Kernel) -> Size:
    """Bytes that a Kernel reads and writes."""
    reads, stored = kernel.region
    gathered = _gathered(reads, stored)
    if not gathered:
        return kernel.bytes
    total = kernel.bytes
    for read, size in gathered.items():
        whole = _bytes(read)
        if high(size) < high(whole):
            total = total - whole + size
    return total


def _gathered(reads: tuple[Node, ...], stored: tuple[Node, ...]) -> dict[Node, Size]:
    """Bytes taken from reads that nothing but gathers use."""
    stop = set(reads)
    found: dict[Node, Size] = {}
    others: set[Node] = set()
    for node in topological(stored, stop=lambda n: n in stop):
        if node in stop:
            continue
        for place, value in enumerate(node.inputs):
            if node.op is ops.gather and place == 0 and value in stop:
                found[value] = found.get(value, 0) + _bytes(node)
            else:
                others.add(value)
    return {read: size for read, size in found.items() if read not in others}


def _bytes(node: Node) -> Size:
    if not isinstance(node.type, Array):
        return 0
    return multiply(product(node.shape), node.dtype.size)


def shares(kernel: Kernel) -> list[tuple[Size, Size]]:
    """(bytes, FLOPs) of each launch of a Kernel; several share them evenly."""
    count = sum(isinstance(step, Launch) for step in kernel.steps)
    if not count:
        return []
    size, flops = moved(kernel), kernel.flops
    if count == 1:
        return [(size, flops)]
    return [(high(size) // count, high(flops) // count)] * count


def region_text(kernel: Kernel) -> str:
    """The ops of a Kernel and its results, in short."""
    reads, stored = kernel.region
    stop = set(reads)
    inside = [n for n in topological(stored, stop=lambda n: n in stop) if n not in stop]
    names = list(dict.fromkeys(n.op.name for n in inside if n.op.category not in ("leaf", "tuple")))
    types = ", ".join(repr(n.type) for n in stored[:2])
    text = f"{kernel.kind}: {' '.join(names)}"
    room = LONGEST - len(types) - 4
    text = text if len(text) <= room else text[: room - 3] + "..."
    return f"{text} -> {types}"
