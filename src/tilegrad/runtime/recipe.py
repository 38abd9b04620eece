"""Recipes: an Executable as plain data: what to run, over which Slots, in which order.

A Recipe names Programs by their object code's key, so it can be stored as text and bound
again in another process without compiling. A Launcher turns it into something that runs.
Invariant: `Recipe.from_text(recipe.to_text())` runs the same Programs on the same Slots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import Site
from ..ir.literal import read_size, size_text
from ..ir.requirement import Requirement
from ..ir.symbol import Size


@dataclass
class Storage:
    """One Slot: its kind ('input', 'output', 'scratch', 'fault'), bytes, and place."""

    kind: str
    bytes: Size
    offset: int = 0  # in the arena
    alias: int = -1  # the Slot whose memory it shares
    device: str = ""  # whose memory it is in; '' is the Recipe's own


@dataclass
class Step:
    """One entry: a kernel, a copy, a transfer between Devices, or control."""

    kind: str
    program: int = -1
    slots: list[int] = field(default_factory=list)
    grid: Size = 0  # programs of a kernel, bytes of a copy
    symbols: list[str] = field(default_factory=list)
    small: bool = False  # not worth sharing between workers
    numbers: list[Any] = field(default_factory=list)  # of control entries
    region: str = ""  # for people: what it computes
    bytes: Size = 0  # that it reads and writes, and FLOPs: estimates, for profiles
    flops: Size = 0
    device: str = ""  # that runs it; '' is the Recipe's own


@dataclass(frozen=True)
class Back:
    """A copy at the end of a run: output (or input) `number` to Buffer `target`."""

    is_output: bool
    number: int
    target: int
    bytes: int


@dataclass
class Preparing:
    """Inputs that are prepared once for all runs; see `prepared`."""

    sources: list[int]  # numbers of the inputs that hold the bytes
    layout: str  # how, as text
    slots: list[int]  # of what is made, in order


@dataclass
class Recipe:
    """A compiled Schedule."""

    programs: list[tuple[str, str]]  # (function, key of its object code)
    slots: list[Storage]
    steps: list[Step]
    inputs: list[int]  # Slots; -1 for an input that is only prepared
    outputs: list[int]
    arena_bytes: int
    scratch_bytes: int
    inline: bool
    peak_bytes: int = 0
    entries: list[str] = field(default_factory=list)  # of programs: what a launch must know
    # Conditions of each program that are checked while it runs; a launch of one that has some
    # takes a Slot of the kind 'fault' last. Empty where no program has any.
    sites: list[list[Site]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # lines that the Graph names, in its order
    requirements: list[Requirement] = field(default_factory=list)  # of the Symbols of a call
    preparing: list[Preparing] = field(default_factory=list)
    arenas: dict[str, int] = field(default_factory=dict)  # bytes on Devices that are not its own

    def owners(self) -> list[int]:
        """Of every Slot the one whose memory it has, through aliases."""
        return owners_of([slot.alias for slot in self.slots])

    def devices(self) -> list[str]:
        """The other Devices that it uses."""
        named = [s.device for s in self.steps] + [s.device for s in self.slots]
        return [name for name in dict.fromkeys(named) if name]

    def part(self, first: int, stop: int) -> Recipe:
        """Some steps as a Recipe over the same Slots: what one Device runs in a go."""
        steps = [replace(s, numbers=list(s.numbers)) for s in self.steps[first:stop]]
        used = list(dict.fromkeys(s.program for s in steps if s.program >= 0))
        for step in steps:
            step.program = used.index(step.program) if step.program >= 0 else -1
            if step.kind.startswith("jump"):
                step.numbers[-1] -= first
        return replace(
            self,
            programs=[self.programs[i] for i in used],
            entries=[e for i in used if self.entries and (e := self.entries[i])],
            sites=[self.sites[i] for i in used] if self.sites else [],
            steps=steps,
        )

    def is_static(self) -> bool:
        """Whether nothing in it depends on a Symbol."""
        if self.requirements or any(step.symbols for step in self.steps):
            return False
        sizes: list[Any] = [slot.bytes for slot in self.slots]
        for step in self.steps:
            sizes += (step.grid, *step.numbers)
        return all(isinstance(size, int) for size in sizes)

    def ends_before(self, first: int, second: int) -> bool:
        """Whether no step touches the memory of Slot `first` once one touched that of `second`."""
        if any(step.kind not in ("kernel", "copy") for step in self.steps):
            return False
        owners = self.owners()
        touched = [{owners[s] for s in step.slots} for step in self.steps]
        early = [i for i, slots in enumerate(touched) if owners[first] in slots]
        late = [i for i, slots in enumerate(touched) if owners[second] in slots]
        return not early or not late or early[-1] < late[0]

    def move(self, lines: Sequence[str]) -> None:
        """Take other lines for those of the Graph it was made of: an equal one has them."""
        moved = dict(zip(self.lines, lines))
        self.sites = [
            [Site(s.message, moved.get(s.location, s.location)) for s in sites]
            for sites in self.sites
        ]
        self.lines = list(lines)

    def to_text(self) -> str:
        """The Recipe as JSON."""
        slots = [{**vars(s), "bytes": size_text(s.bytes)} for s in self.slots]
        steps = []
        for s in self.steps:
            sizes = {name: size_text(getattr(s, name)) for name in ("grid", "bytes", "flops")}
            steps.append({**vars(s), **sizes, "numbers": [size_text(n) for n in s.numbers]})
        needs = [r.to_text() for r in self.requirements]
        ready = [vars(p) for p in self.preparing]
        parts = {"slots": slots, "steps": steps, "requirements": needs, "preparing": ready}
        return json.dumps({**vars(self), **parts})

    @staticmethod
    def from_text(text: str) -> Recipe:
        """The Recipe that `to_text` wrote."""
        record = json.loads(text)
        slots = [Storage(**{**s, "bytes": read_size(s["bytes"])}) for s in record["slots"]]
        steps = []
        for s in record["steps"]:
            numbers = [read_size(n) for n in s["numbers"]]
            sizes = {name: read_size(s[name]) for name in ("grid", "bytes", "flops")}
            steps.append(Step(**{**s, **sizes, "numbers": numbers}))
        record["programs"] = [tuple(p) for p in record["programs"]]
        record["sites"] = [[Site(*s) for s in sites] for sites in record["sites"]]
        record["requirements"] = [Requirement.from_text(r) for r in record["requirements"]]
        record["preparing"] = [Preparing(**p) for p in record["preparing"]]
        return Recipe(**{**record, "slots": slots, "steps": steps})


def owners_of(aliases: Sequence[int]) -> list[int]:
    """Where each chain of aliases (-1 for none) ends; no link is followed twice."""
    owners = [-1] * len(aliases)
    for number in range(len(aliases)):
        chain = []
        at = number
        while owners[at] < 0 and aliases[at] >= 0:
            chain.append(at)
            at = aliases[at]
        owner = owners[at] if owners[at] >= 0 else at
        owners[at] = owner
        for link in chain:
            owners[link] = owner
    return owners
