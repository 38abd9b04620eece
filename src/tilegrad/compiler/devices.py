"""Cutting a Graph that uses several Devices into parts, one Device each, and joining what becomes
of them.

A value is computed where its inputs are; `transfer` takes it elsewhere. What is made of constants
and of arguments without axes alone is computed wherever it is needed. A part is all that one Device
can compute between the same transfers, so it goes through the whole page of passes for its own
Target. Invariant: no part has a transfer; an op whose inputs are on different Devices is an error
at its line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.errors import UserError
from ..graph import build, ops
from ..ir.node import Node, needs, topological
from ..ir.passes import Stage
from ..ir.rewrite import Log, replace
from ..schedule.devices import Move, Part, join
from ..schedule.schedule import Schedule
from .pipeline import transfers

Place = tuple[int, str]  # (transfers before it, Device)
Scheduled = Callable[
    [Sequence[Node], Sequence[Node], str, Sequence[int]], tuple[Schedule, list[Stage]]
]


@dataclass
class Cut:
    """Which part each value is in."""

    home: str  # the Graph's own Device
    place: dict[Node, Place | None] = field(default_factory=dict)  # None: wherever it is needed
    scalars: dict[Node, tuple[Node, ...]] = field(default_factory=dict)  # arguments below those

    def find(
        self, arguments: Sequence[Node], homes: Sequence[str], results: Sequence[Node]
    ) -> None:
        """Place every value below the results."""
        for node, device in zip(arguments, homes):
            adapts = not node.shape and device == self.home
            self.place[node] = None if adapts else (0, device)
            self.scalars[node] = (node,) if adapts else ()
        for node in topological(results):
            if node not in self.place:
                self.place[node] = self._placed(node)
                below = [s for n in needs(node) for s in self.scalars[n]]
                self.scalars[node] = tuple(dict.fromkeys(below)) if self.is_free(node) else ()

    def is_free(self, node: Node) -> bool:
        """Whether a value is computed wherever it is needed."""
        return self.place[node] is None

    def _placed(self, node: Node) -> Place | None:
        if node.op is ops.transfer:
            before = self.place[node.inputs[0]]
            device = node.attrs["device"]
            return (0, device) if before is None else (before[0] + 1, device)
        if any(transfers(block.results) for block in node.blocks):
            raise UserError(
                "a value goes to another device inside a loop or a branch",
                op=node.op.name,
                expected="transfers outside of it",
                location=node.location,
                hint="move the value before the loop, or its result after it",
            )
        found = {n: at for n in needs(node) if (at := self.place[n]) is not None}
        if not found:
            return None
        devices = {at[1] for at in found.values()}
        if len(devices) > 1:
            shown = ", ".join(f"{n.type} on {at[1]}" for n, at in found.items())
            raise UserError(
                "Tensors on different devices cannot be used together",
                op=node.op.name,
                expected="all of them on one device",
                got=shown,
                location=node.location,
                hint=f'move them first: x.to("{self.home}")',
            )
        return max(at[0] for at in found.values()), devices.pop()


def schedule_parts(
    arguments: Sequence[Node],
    results: Sequence[Node],
    home: str,
    homes: Sequence[str],
    donated: Sequence[int],
    scheduled: Scheduled,
) -> tuple[Schedule, list[Stage]]:
    """The Schedule of a Graph over several Devices, and what the passes did to each part; `homes`
    says where the arguments are, `scheduled` makes the Schedule of a part."""
    results = written_out(arguments, results)
    cut = Cut(home)
    cut.find(arguments, homes, results)
    found = Found(cut, set(arguments))
    found.look(results)
    may_end = {arguments[i] for i in donated} - {m.source for _, m in found.moves if not m.device}
    last = {read: at for at, reads in sorted(found.reads.items()) for read in reads}
    course: list[tuple[int, int, Part | Move]] = [
        (-1 if move.device and move.source in found.given else at, 0, move)
        for at, move in found.moves
    ]
    stages: list[Stage] = []
    for at, reads in sorted(found.reads.items()):
        outputs = found.outputs[at]
        if not outputs:
            continue
        fresh = {read: build.input_(read.shape, read.dtype) for read in reads}
        inside = replace(outputs, fresh)
        pinned = {n: n.inputs[0] for n in topological(inside) if n.op is ops.transfer}
        inside = replace(inside, pinned)
        ends = [i for i, read in enumerate(reads) if read in may_end and last[read] == at]
        schedule, own = scheduled(list(fresh.values()), inside, at[1], ends)
        if schedule.preparing:
            raise UserError(
                "weights of a file cannot be used in a function over several devices",
                op="transfer",
                expected="weights that were unpacked",
                hint="unpack them first, or move values outside of the jitted function",
            )
        stages += [_named(stage, at[1]) for stage in own]
        device = "" if at[1] == home else at[1]
        course.append((at[0], 1, Part(device, schedule, list(reads.values()), outputs)))
    course.sort(key=lambda step: step[:2])
    placed = [(n, "" if d == home else d) for n, d in zip(arguments, homes)]
    return join(placed, results, [step for _, _, step in course]), stages


def written_out(arguments: Sequence[Node], results: Sequence[Node]) -> list[Node]:
    """The Graph with transfers out of functions and short scans, as far as that can be."""
    from .rules import inline
    from .unroll import unroll_scans

    found = list(results)
    for one in (inline, unroll_scans):
        if any(transfers(b.results) for n in topological(found) for b in n.blocks):
            found = one(arguments, found, Log(), None)
    return found


class Found:
    """What each part reads of others and gives to them, and the transfers between them."""

    def __init__(self, cut: Cut, given: set[Node]) -> None:
        self.cut, self.given = cut, given
        self.reads: dict[Place, dict[Node, Node]] = {}  # by Node of the Graph: the value given
        self.outputs: dict[Place, list[Node]] = {}
        self.moves: list[tuple[int, Move]] = []  # with the number of transfers before
        self.pinned: set[Node] = set()  # transfers of what is computed wherever it is needed
        self.sent: dict[tuple[Node, str], Node] = {}  # arguments without axes, elsewhere

    def look(self, results: Sequence[Node]) -> None:
        """Go through the Graph."""
        cut, place = self.cut, self.cut.place
        for node in topological(results):
            at = place[node]
            if node in self.given or at is None:
                continue
            if node.op is ops.transfer and cut.is_free(node.inputs[0]):
                self.pinned.add(node)
            elif node.op is ops.transfer:
                self.leave(node.inputs[0])
                self.move(at, node)
                continue
            for read in needs(node):
                self.read(at, read)
        for node in results:
            self.leave(node)
            if cut.is_free(node):
                at = (0, cut.home)
                self.read(at, node)
                self.outputs[at].append(node)

    def move(self, at: Place, node: Node) -> None:
        """A transfer is a copy to another Device."""
        device = "" if at[1] == self.cut.home else at[1]
        self.moves.append((at[0], Move(node, node.inputs[0], device)))

    def read(self, at: Place, node: Node) -> None:
        """A part reads a value."""
        there = self.cut.place[node]
        self.outputs.setdefault(at, [])
        reads = self.reads.setdefault(at, {})
        if there is None:
            for scalar in self.cut.scalars[node]:
                reads[scalar] = self.scalar(scalar, at[1])
        elif there != at or self.is_outside(node):
            self.leave(node)
            reads[node] = node

    def scalar(self, node: Node, device: str) -> Node:
        """An argument without axes on a Device."""
        if device == self.cut.home:
            return node
        if (node, device) not in self.sent:
            self.sent[node, device] = sent = build.transfer(node, self.cut.home, device)
            self.move((0, device), sent)
        return self.sent[node, device]

    def leave(self, node: Node) -> None:
        """A value is needed outside of its part."""
        at = self.cut.place[node]
        if at is not None and not self.is_outside(node):
            self.reads.setdefault(at, {})
            given = self.outputs.setdefault(at, [])
            if node not in given:
                given.append(node)

    def is_outside(self, node: Node) -> bool:
        """Whether a value is computed by no part."""
        return node in self.given or (node.op is ops.transfer and node not in self.pinned)


def _named(stage: Stage, device: str) -> Stage:
    stage.name = f"{stage.name} ({device})"
    return stage


__all__ = ["schedule_parts"]
