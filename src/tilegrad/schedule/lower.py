"""From a Graph to a Schedule: fuse, lower each group to Bodies, order, plan memory.

Groups of equal structure are lowered once and share their Bodies, so the time to compile does
not grow with the depth of a model. Invariant: the Schedule computes the results of the Graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import InternalError
from ..core.target import Target
from ..ir.fingerprint import Place, digest, structure
from ..ir.node import Node, topological
from ..ir.passes import Pass, Stage
from ..ir.symbol import high
from ..ir.types import Tuple, product
from .attention import lower_attention
from .call import lower_call, state_behind, states_of, work_of_body
from .control import Frame, lower_control
from .cost import bytes_moved, work_of
from .dot import lower_dot
from .fuse import DOTS, Fuser, Group
from .join import lower_join
from .loops import LoopLowering
from .rows import lower_cumulative, lower_sort
from .schedule import Kernel, Launch, Schedule, Slot
from .state import hold, hold_states, shares_slot
from .threads.lower import lower_threads
from .threads.update import lower_update as threads_update
from .update import lower_update


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
    ) -> None:
        self.arguments, self.results, self.target = list(arguments), list(results), target
        self.steps = steps
        self.fuser: Fuser  # made by the first pass
        self.ordered: list[Group] = []  # the Regions, once they are in order
        self.in_place: set[tuple[Node, int]] = set()  # (writer, number of the result)
        self.wanted = set(self.results)
        self.donated = {self.arguments[i] for i in donated}
        self.strict = set(self.donated)  # a copy of these would break a promise
        self.rounded: set[Node] = set()  # of which only 16 bits are ever seen
        self.bodies: Any = {} if bodies is None else bodies  # dict or Recent
        self.frame = Frame()
        self.slots, self.kernels = self.frame.slots, self.frame.kernels
        self.depth = 0
        self.slot_of: dict[Node, int] = {}
        self.targets: dict[Node, Callable[[], int]] | None = None  # where a Block's results go

    def run(self) -> Schedule:
        """The Schedule."""
        for a in self.arguments:
            self.slot_of[a] = self.new_slot(a.type, "input")
        self.lower_all()
        outputs = [self.output_slot(r) for r in self.results]
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
            "Regions": len(self.ordered or fuser.groups) if fuser else 0,
            "values of which 16 bits are seen": len(self.rounded),
            "states in place": len(self.in_place),
            "Kernels": len(self.kernels),
        }

    def nested(self, arguments: Sequence[Node], results: Sequence[Node]) -> Lowering:
        """A Lowering of a Block, into the same list of Kernels and over the same Slots."""
        inner = Lowering(arguments, results, self.target, self.steps, (), self.bodies)
        inner.frame, inner.slots, inner.kernels = self.frame, self.slots, self.kernels
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

    def output_slot(self, node: Node) -> int:
        """The Slot a result is read from."""
        if node not in self.slot_of:
            raise InternalError("schedule.lower", f"{node!r} was never stored")
        return self.slot_of[node]

    # ---- groups ---------------------------------------------------------------------------

    def reads_of(self, group: Group) -> list[Node]:
        """Stored values a group reads, in the order its structure names them."""
        inside = set(group.values)
        values = self.fuser.values

        def stop(node: Node) -> bool:
            return node in values and node not in inside

        order = topological(group.stored or group.values, stop)
        return [n for n in order if stop(n)]

    def lower(self, group: Group) -> None:
        """Add the Kernel of a group."""
        if group.kind == "control":
            lower_control(self, group)
            return
        reads = self.reads_of(group)
        for v in group.stored:
            if not isinstance(v.type, Tuple) and not shares_slot(self, v):
                self.slot_of[v] = self.place(v)
        if group.kind == "update":
            self.lower_state(group, reads)
            return
        if group.kind == "join":
            lower_join(self, group, reads)
            return
        group.rounded = self.rounded
        if group.kind in DOTS and not self.depth and self.target.has_threads:
            group.constants = {r for r in reads if r in self.arguments and r not in self.donated}
        key = self.key(group, reads)
        found = self.bodies.get(key)
        if found is None:
            tag = digest(self.key(group, reads, {}))[:8]  # the same wherever it was written
            made = self.lower_bodies(group, reads, tag)
            found = self.bodies[key] = self.finished(made, group.kind)
        self.add_kernel(group, reads, key, found)

    def finished(self, made: Any, kind: str) -> Any:
        """Bodies after all passes over them."""
        found = []
        for body, roles in made:
            for one, stage in self.steps.tiles:
                body = one.function(body, kind, self.target)
                stage.fired["Bodies"] = stage.fired.get("Bodies", 0) + 1
                stage.changed = True
            found.append((body, roles))
        return found

    def key(
        self, group: Group, reads: Sequence[Node], places: dict[Place, int] | None = None
    ) -> Any:
        """Equal for groups that can share Bodies."""
        results = [v for v in (group.stored or group.values)]
        constant = tuple(r in group.constants for r in reads)
        inside = [n for n in topological(results, set(reads).__contains__) if n not in reads]
        rounded = tuple(n in group.rounded for n in inside) if group.rounded else ()
        return (
            group.kind,
            group.order,
            group.rows,
            constant,
            rounded,
            structure(reads, results, places),
        )

    def lower_bodies(self, group: Group, reads: list[Node], tag: str) -> Any:
        """Bodies with, for each parameter, ('read', i), ('store', i) or ('scratch', type)."""
        group.reads = set(reads)
        stored = [v for v in group.stored if not isinstance(v.type, Tuple)]
        given = [("read", i) for i in range(len(reads))] + [
            ("store", i) for i in range(len(stored))
        ]
        if any(product(v.shape) == 0 for v in stored) and len(stored) == len(group.stored):
            if all(product(v.shape) == 0 for v in stored):
                return []
        if group.kind == "call":
            return lower_call(group, reads, self.target)
        name = f"{group.kind}_{_title(group)}_{tag}"
        if group.kind == "attention":
            return lower_attention(group.values[0], reads, stored, self.target, name)
        if self.target.has_threads:
            return lower_threads(group, reads, self.fuser.values, self.target, name)
        if group.kind in ("loops", "mixed"):
            lowering = LoopLowering(group, self.fuser.values, self.target, name)
            lowering.reads = reads
            return [(lowering.lower(), given)]
        if group.kind == "dot":
            return lower_dot(group, reads, self.fuser.values, self.target, name)
        if group.kind == "cumulative":
            return [(lower_cumulative(group, reads, self.fuser.values, self.target, name), given)]
        if group.kind == "sort":
            return lower_sort(group, reads, self.fuser.values, self.target, name)
        raise InternalError("schedule.lower", f"no lowering for {group.kind}: {group.values}")

    def add_kernel(self, group: Group, reads: Sequence[Node], key: Any, bodies: Any) -> None:
        """Put a group's launches into the Schedule."""
        stored = [v for v in group.stored if not isinstance(v.type, Tuple)]
        name = bodies[0][0].name if bodies else f"{group.kind}_empty"
        kernel = Kernel(name, group.kind, (tuple(reads), tuple(stored)), depth=self.depth)
        kernel.flops = work_of(reads, stored)[0]
        moved = [*reads, *stored]
        held: dict[int, int] = {}
        if group.kind == "call":
            for body, _ in bodies:
                kernel.flops = kernel.flops + work_of_body(body)
            held, kernel.steps = hold_states(self, group.values[0], stored)
            states = {state for _, state in states_of(group.values[0])}  # of which little moves
            moved = [v for v in moved if v not in states and state_behind(v) is None]
        kernel.bytes = bytes_moved(moved)
        kernel.notes["group"] = group
        scratch: dict[Any, int] = {}
        for body, roles in bodies:
            slots = []
            for role, what in roles:
                if role == "read":
                    slots.append(self.slot_of[reads[what]])
                elif role == "store":
                    slots.append(self.slot_of[stored[what]])
                elif role == "state":
                    slots.append(held[what])
                else:
                    if (role, what) not in scratch:  # an Array, or one with a name
                        type_ = what[0] if isinstance(what, tuple) else what
                        scratch[(role, what)] = self.new_slot(type_, "scratch")
                    slots.append(scratch[(role, what)])
            kernel.steps.append(Launch(body, tuple(slots)))
        kernel.key = name
        self.kernels.append(kernel)

    # ---- updates ----------------------------------------------------------------------------

    def lower_state(self, group: Group, reads: list[Node]) -> None:
        """update: in place, or on a copy."""
        node = group.values[0]
        slot = self.slots[self.slot_of[node]]
        state = node.inputs[0]
        steps = hold(self, slot, node, 0, state)
        launches = self.update_launches(group, reads, slot.number, state in self.slot_of)
        steps += launches
        name = launches[-1].body.name if launches else "update"
        kernel = Kernel(name, "update", (tuple(reads), (node,)), steps, depth=self.depth)
        kernel.flops = product(node.inputs[1].shape)
        kernel.bytes = bytes_moved([r for r in reads if r is not state])
        kernel.notes["group"] = group
        self.kernels.append(kernel)

    def update_launches(self, group: Group, reads: list[Node], slot: int, stored: bool) -> Any:
        """The launches of an update into a Slot, those that fill it first included."""
        if self.target.has_threads:
            return self.threads_update(group, reads, slot, stored)
        body, body_reads, fills = lower_update(group, reads, self.fuser.values, self.target, stored)
        found = [*fills, *([] if body is None else [(body, body_reads)])]
        return [Launch(b, (*(self.slot_of[r] for r in rs), slot)) for b, rs in found]

    def threads_update(self, group: Group, reads: list[Node], slot: int, stored: bool) -> Any:
        """The same for programs of threads: several launches over scratch."""
        scratch: dict[Any, int] = {}
        launches = []
        key = ("update", stored, self.key(group, reads))
        found = self.bodies.get(key)
        if found is None:
            values = self.fuser.values
            made = threads_update(group, reads, values, self.target, stored)
            found = self.bodies[key] = self.finished(made, group.kind)
        for body, roles in found:
            slots = []
            for role, what in roles:
                if role == "scratch" and what not in scratch:
                    scratch[what] = self.new_slot(what[0], "scratch")
                slots.append(
                    self.slot_of[reads[what]]
                    if role == "read"
                    else slot
                    if role == "state"
                    else scratch[what]
                )
            launches.append(Launch(body, tuple(slots)))
        return launches


def _title(group: Group) -> str:
    names = [v.op.name for v in group.values]
    return "_".join(dict.fromkeys(names[:4]))


def tiny(schedule: Schedule) -> bool:
    """Whether waking workers would cost more than it saves."""
    cost = sum((high(k.flops) + high(k.bytes)) * k.times for k in schedule.kernels)
    return cost < 400_000


def lower_graph(
    arguments: Sequence[Node],
    results: Sequence[Node],
    target: Target,
    steps: Steps,
    donated: Sequence[int] = (),
    bodies: Any = None,
) -> Schedule:
    """The Schedule of a Graph by the passes of the page (see compiler/pipeline.py)."""
    return Lowering(arguments, results, target, steps, donated, bodies).run()


def lower_regions(lowering: Lowering) -> None:
    """The pass: add the Kernels of every Region, in order."""
    for group in lowering.ordered:
        lowering.lower(group)
