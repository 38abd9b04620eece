"""The record of one Graph, or one Block of it, that is being lowered: what passes read and leave.

Invariant: Lowerings of a Graph and of its Blocks share their Slots and Kernels (`Frame`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import InternalError
from ..core.target import Target
from ..ir.node import Node, topological
from ..ir.passes import Pass, Stage
from .fuse import Fuser
from .region import Region
from .schedule import Frame, Schedule, Slot


class Steps:
    """The passes over Regions, Bodies and Kernels that run, each with its record."""

    def __init__(self, *parts: Sequence[tuple[Pass, str]]) -> None:
        self.stages: list[Stage] = []
        lists: list[list[tuple[Pass, Stage]]] = []
        for part in parts:
            made = [(one, Stage(one.name, skipped=skipped)) for one, skipped in part]
            self.stages += [stage for _, stage in made]
            lists.append([(one, stage) for one, stage in made if not stage.skipped])
        self.regions, self.tiles, self.kernels = lists


def note(stage: Stage, before: dict[str, int], after: dict[str, int]) -> None:
    """Add what a pass changed to its record: a Block of a loop has its own Regions."""
    for name, count in after.items():
        if count != before[name]:
            stage.fired[name] = stage.fired.get(name, 0) + count - before[name]
            stage.changed = True


def _counts(schedule: Schedule) -> dict[str, int]:
    return {
        "Kernels": len(schedule.kernels),
        "Slots in others' bytes": sum(slot.alias is not None for slot in schedule.slots),
        "bytes of the arena": schedule.arena_bytes,
    }


class Lowering:
    """Lowers one Graph for one Target."""

    def __init__(
        self,
        arguments: Sequence[Node],
        results: Sequence[Node],
        target: Target,
        steps: Steps,
        donated: Sequence[int] = (),
        bodies: Any = None,
        frame: Frame | None = None,
    ) -> None:
        self.arguments, self.results, self.target = list(arguments), list(results), target
        self.steps = steps
        self.fuser: Fuser  # made by the first pass
        self.ordered: list[Region] = []  # the Regions, once they are in order
        self.in_place: set[tuple[Node, int]] = set()  # (writer, number of the result)
        self.wanted = set(self.results)
        self.donated = {self.arguments[i] for i in donated}
        self.strict = set(self.donated)  # a copy of these would break a promise
        self.rounded: set[Node] = set()  # of which only 16 bits are ever seen
        self.bodies: Any = {} if bodies is None else bodies  # dict or Recent
        self.frame = frame or Frame()
        self.slots, self.kernels = self.frame.slots, self.frame.kernels
        self.depth = 0
        self.slot_of: dict[Node, int] = {}
        self.targets: dict[Node, Callable[[], int]] | None = None  # where a Block's results go

    def run(self) -> Schedule:
        """The Schedule."""
        for a in self.arguments:
            self.slot_of[a] = self.new_slot(a.type, "input")
        self.lower_all()
        outputs = [self.slot(r) for r in self.results]
        inputs = [self.slot_of[a] for a in self.arguments]
        schedule = Schedule(self.slots, self.kernels, inputs, outputs)
        for one, stage in self.steps.kernels:
            before = _counts(schedule)
            one.function(self, schedule)
            note(stage, before, _counts(schedule))
        return schedule

    def lower_all(self) -> None:
        """All passes over the Regions of this Graph or Block."""
        for one, stage in self.steps.regions:
            before = self.counts()
            one.function(self)
            note(stage, before, self.counts())

    def counts(self) -> dict[str, int]:
        """What `explain` says that a pass changed."""
        fuser: Fuser | None = getattr(self, "fuser", None)
        return {
            "values": len(fuser.values) if fuser else 0,
            "Regions": len(self.ordered or fuser.regions) if fuser else 0,
            "values of which 16 bits are seen": len(self.rounded),
            "states in place": len(self.in_place),
            "Kernels": len(self.kernels),
        }

    def order(self) -> list[Node]:
        """The Nodes, each after what it reads."""
        return topological(self.results, stop=set(self.arguments).__contains__)

    def nested(self, arguments: Sequence[Node], results: Sequence[Node]) -> Lowering:
        """A Lowering of a Block, into the same list of Kernels and over the same Slots."""
        inner = Lowering(arguments, results, self.target, self.steps, (), self.bodies, self.frame)
        inner.depth, inner.targets = self.depth + 1, {}
        return inner

    def new_slot(self, type_: Any, kind: str, name: str = "") -> int:
        """A new Slot."""
        slot = Slot(len(self.slots), type_, kind, name)
        self.slots.append(slot)
        return slot.number

    def place(self, node: Node) -> int:
        """The Slot a value is written to."""
        if self.targets is None:
            return self.new_slot(node.type, "output" if node in self.wanted else "scratch")
        found = self.targets.pop(node, None)
        return self.new_slot(node.type, "scratch") if found is None else found()

    def slot(self, node: Node) -> int:
        """Where a value is stored."""
        if node not in self.slot_of:
            raise InternalError("schedule.lower", f"{node!r} was never stored")
        return self.slot_of[node]
