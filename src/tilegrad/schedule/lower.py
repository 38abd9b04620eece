"""From a Graph to a Schedule: fuse, lower each Region to Bodies, order, plan memory.

Regions of equal structure are lowered once and share their Bodies, so the time to compile does
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
from ..runtime.buffer import HOST
from .cost import bytes_moved, work_of
from .families import families_of
from .family import Bodies, Made, Verdict, select
from .fuse import DOTS, Fuser, Region
from .join import lower_join
from .schedule import Frame, Kernel, Launch, Schedule, Slot
from .state import hold, hold_states, shares_slot, state_behind, states_of


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
        self.ordered: list[Region] = []  # the Regions, once they are in order
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

    # ---- Regions --------------------------------------------------------------------------

    def reads_of(self, region: Region) -> list[Node]:
        """Stored values a Region reads, in the order its structure names them."""
        inside = set(region.values)
        values = self.fuser.values

        def stop(node: Node) -> bool:
            return node in values and node not in inside

        order = topological(region.stored or region.values, stop)
        return [n for n in order if stop(n)]

    def lower(self, region: Region) -> None:
        """Add the Kernel of a Region."""
        if region.kind == "control":
            from .control import lower_control

            lower_control(self, region)
            return
        reads = self.reads_of(region)
        for v in region.stored:
            if not isinstance(v.type, Tuple) and not shares_slot(self, v):
                self.slot_of[v] = self.place(v)
        if region.kind == "join":
            lower_join(self, region, reads)
            return
        self.complete(region, reads)
        key = self.key(region, reads)
        found = self.bodies.get(key)
        if found is None:
            tag = digest(self.key(region, reads, {}))[:8]  # the same wherever it was written
            found = self.bodies[key] = self.lower_bodies(region, tag)
        self.add_kernel(region, *found)

    def complete(self, region: Region, reads: list[Node]) -> None:
        """What is known of a Region now that all are cut, for the Families."""
        region.rounded, region.known = self.rounded, self.fuser.values
        region.inputs, region.work = reads, work_of(reads, region.arrays)
        if region.kind in DOTS and not self.depth and self.target.has_threads:
            region.constants = {r for r in reads if r in self.arguments and r not in self.donated}
        if region.kind == "update":
            region.filled = region.anchor.inputs[0] in self.slot_of

    def finished(self, made: Bodies, kind: str) -> Bodies:
        """Bodies after all passes over them."""
        found: Bodies = []
        for body, roles in made:
            for one, stage in self.steps.tiles:
                if one.on and kind not in one.on:
                    continue
                body = one.function(body, kind, self.target)
                stage.fired["Bodies"] = stage.fired.get("Bodies", 0) + 1
                stage.changed = True
            found.append(Made(body, roles))
        return found

    def key(
        self, region: Region, reads: Sequence[Node], places: dict[Place, int] | None = None
    ) -> Any:
        """Equal for Regions that can share Bodies."""
        results = [v for v in (region.stored or region.values)]
        constant = tuple(r in region.constants for r in reads)
        inside = [n for n in topological(results, set(reads).__contains__) if n not in reads]
        rounded = tuple(n in region.rounded for n in inside) if region.rounded else ()
        found = (
            region.kind,
            region.order,
            region.rows,
            constant,
            rounded,
            structure(reads, results, places),
        )
        return found if region.filled else (*found, "empty state")

    def lower_bodies(self, region: Region, tag: str) -> tuple[Bodies, Verdict | None]:
        """The Bodies of a Region by the Family with the best offer, and who offered what."""
        stored = region.arrays
        region.reads = set(region.inputs)
        if stored and len(stored) == len(region.stored) and region.kind != "update":
            if all(product(v.shape) == 0 for v in stored):
                return [], None
        families = families_of(region, self.target)
        family, offer, verdict = select(families, region, self.target)
        made = family.lower(region, offer, self.target, f"{region.kind}_{_title(region)}_{tag}")
        return self.finished(made, region.kind), verdict

    def add_kernel(self, region: Region, bodies: Bodies, verdict: Verdict | None) -> None:
        """Put a Region's launches into the Schedule."""
        reads, stored = region.inputs, region.arrays
        name = bodies[-1 if region.kind == "update" else 0][0].name if bodies else ""
        name = name or ("update" if region.kind == "update" else f"{region.kind}_empty")
        kernel = Kernel(name, region.kind, (tuple(reads), tuple(stored)), depth=self.depth)
        kernel.key = "" if region.kind == "update" else name
        held = self.count_work(kernel, region, bodies)
        kernel.notes["group"], kernel.notes["verdict"] = region, verdict
        if self.target.array is not None and not any("array" in b.notes for b, _ in bodies):
            kernel.beside = HOST
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
        self.kernels.append(kernel)

    def count_work(self, kernel: Kernel, region: Region, bodies: Bodies) -> dict[int, int]:
        """FLOPs and bytes of a Kernel; the Slots of states that it writes, by argument, with the
        copies that need be as its first steps."""
        reads, stored = region.inputs, region.arrays
        kernel.flops, _ = region.work
        if region.kind == "update":  # the state itself is written in few places
            node, state = region.anchor, region.anchor.inputs[0]
            slot = self.slots[self.slot_of[node]]
            kernel.steps = hold(self, slot, node, 0, state)
            kernel.flops = product(node.inputs[1].shape)
            kernel.bytes = bytes_moved([r for r in reads if r is not state])
            return {0: slot.number}
        if region.kind != "call":
            kernel.bytes = bytes_moved([*reads, *stored])
            return {}
        from .call import work_of_body

        for body, _ in bodies:
            kernel.flops = kernel.flops + work_of_body(body)
        held, kernel.steps = hold_states(self, region.anchor, stored)
        states = {state for _, state in states_of(region.anchor)}  # of which little moves
        moved = [v for v in [*reads, *stored] if v not in states and state_behind(v) is None]
        kernel.bytes = bytes_moved(moved)
        return held


def _title(group: Region) -> str:
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
