"""From a Graph to a Schedule: fuse, lower each Region to Bodies, order, plan memory.

Regions of equal structure are lowered once and share their Bodies, so the time to compile does
not grow with the depth of a model. Invariant: the Schedule computes the results of the Graph.
"""

from __future__ import annotations

from typing import Any

from ..ir.fingerprint import UserLine, digest, structure
from ..ir.node import topological
from ..ir.symbol import high
from ..ir.types import Tuple
from ..runtime.buffer import HOST
from .cost import bytes_moved, work_of
from .families import families_of
from .family import Bodies, Made, Verdict, select
from .fuse import Fuser
from .lowering import Lowering
from .region import DOTS, Region, in_order, stored_part
from .schedule import Control, Copy, Kernel, Launch, Schedule
from .state import hold_states, shares_slot, state_behind, states_of


def start(lowering: Lowering) -> None:
    """The pass: which Nodes of a Graph or Block are values."""
    lowering.fuser = Fuser(lowering.arguments, lowering.results, lowering.target)


def look_ahead(lowering: Lowering) -> None:
    """The pass: know what waits for each value, so that small Regions make no large ones wait."""
    lowering.fuser.look_ahead()


def fuse(lowering: Lowering) -> None:
    """The pass: put values into Regions."""
    lowering.fuser.run()


def order_regions(lowering: Lowering) -> None:
    """The pass: each Region after what it needs."""
    lowering.ordered = in_order(lowering.fuser.regions)


def lower_region(lowering: Lowering, region: Region) -> None:
    """Add the Kernel of a Region."""
    if region.kind == "control":
        from .control import lower_control

        lower_control(lowering, region)
        return
    if region.kind == "call":  # in the order of its results, whoever wants them first
        region.stored.sort(key=lambda v: v.attrs.get("index", -1))
    region.find_inputs()
    for v in region.stored:
        if not isinstance(v.type, Tuple) and not shares_slot(lowering, v):
            lowering.slot_of[v] = lowering.place(v)
    if region.kind == "join":
        lower_join(lowering, region)
        return
    complete(lowering, region)
    key = key_of(region)
    found = lowering.bodies.get(key)
    if found is None:
        tag = digest(key_of(region, {}))[:8]  # the same wherever it was written
        found = lowering.bodies[key] = lower_bodies(lowering, region, tag)
    add_kernel(lowering, region, *found)


def complete(lowering: Lowering, region: Region) -> None:
    """What is known of a Region now that all are cut, for the Families."""
    reads, region.rounded = region.inputs, lowering.rounded
    region.work = work_of(reads, region.arrays)
    target, rows = lowering.target, region.rows if region.kind == "loops" else None
    early = region.kind in DOTS or (rows is not None and high(rows) <= target.cores)
    if early and not lowering.depth and target.has_threads:  # they are asked for before a wait
        region.constants = {
            r for r in reads if r in lowering.arguments and r not in lowering.donated
        }
    if region.kind == "update":
        region.filled = region.anchor.inputs[0] in lowering.slot_of


def finished(lowering: Lowering, made: Bodies, kind: str) -> Bodies:
    """Bodies after all passes over them."""
    found: Bodies = []
    for body, roles in made:
        for one, stage in lowering.steps.tiles:
            if one.on and kind not in one.on:
                continue
            body = one.function(body, kind, lowering.target)
            stage.fired["Bodies"] = stage.fired.get("Bodies", 0) + 1
            stage.changed = True
        found.append(Made(body, roles))
    return found


def key_of(region: Region, lines: dict[UserLine, int] | None = None) -> Any:
    """Equal for Regions that can share Bodies."""
    reads, results = region.inputs, region.stored or region.values
    constant = tuple(r in region.constants for r in reads)
    inside = [n for n in topological(results, set(reads).__contains__) if n not in reads]
    rounded = tuple(n in region.rounded for n in inside) if region.rounded else ()
    found = (
        region.kind,
        region.order,
        region.rows,
        constant,
        rounded,
        structure(reads, results, lines),
    )
    return found if region.filled else (*found, "empty state")


def lower_bodies(lowering: Lowering, region: Region, tag: str) -> tuple[Bodies, Verdict | None]:
    """The Bodies of a Region by the Family with the best offer, and who offered what."""
    stored = region.arrays
    region.reads = set(region.inputs)
    if stored and len(stored) == len(region.stored) and region.kind != "update":
        if all(v.size == 0 for v in stored):
            return [], None
    family, offer, verdict = select(families_of(region), region)
    title = "_".join(dict.fromkeys(v.op.name for v in region.values[:4]))
    region.name = f"{region.kind}_{title}_{tag}"
    return finished(lowering, family.lower(region, offer), region.kind), verdict


def add_kernel(lowering: Lowering, region: Region, bodies: Bodies, verdict: Verdict | None) -> None:
    """Put a Region's launches into the Schedule."""
    reads, stored = region.inputs, region.arrays
    name = bodies[-1 if region.kind == "update" else 0][0].name if bodies else ""
    name = name or ("update" if region.kind == "update" else f"{region.kind}_empty")
    kernel = Kernel(name, region.kind, (tuple(reads), tuple(stored)), depth=lowering.depth)
    kernel.key = "" if region.kind == "update" else name
    held = count_work(lowering, kernel, region, bodies)
    kernel.notes["region"], kernel.notes["verdict"] = region, verdict
    if lowering.target.array is not None and not any("array" in b.notes for b, _ in bodies):
        kernel.host = HOST
    scratch: dict[Any, int] = {}

    def slot(role: str, what: Any) -> int:
        if role == "state":
            return held[what]
        if role != "scratch":
            return lowering.slot_of[(reads if role == "read" else stored)[what]]
        if what not in scratch:
            scratch[what] = lowering.new_slot(what[0], "scratch")
        return scratch[what]

    for body, roles in bodies:
        kernel.steps.append(Launch(body, tuple(slot(*role) for role in roles)))
    lowering.kernels.append(kernel)


def count_work(
    lowering: Lowering, kernel: Kernel, region: Region, bodies: Bodies
) -> dict[int, int]:
    """FLOPs and bytes of a Kernel; the Slots of states that it writes, by argument, with the
    copies that need be as its first steps."""
    node, moved, (kernel.flops, _) = region.anchor, [*region.inputs, *region.arrays], region.work
    if region.kind == "call":
        from .call import work_of_body

        for body, _ in bodies:
            kernel.flops = kernel.flops + work_of_body(body)
    elif region.kind == "update":  # the state itself is written in few places
        kernel.flops = node.inputs[1].size
    if region.kind in ("call", "update"):
        states = {state for *_, state in states_of(node)}  # of which little moves
        moved = [v for v in moved if v not in states and state_behind(v) is None]
    kernel.bytes = bytes_moved(moved)
    held, kernel.steps = hold_states(lowering, node, region.arrays)
    return held


def lower_join(lowering: Lowering, region: Region) -> None:
    """Add the Kernel of a concatenation: a copy for each part."""
    node = region.anchor
    whole = lowering.slot_of[node]
    steps: list[Any] = []
    place = 0
    for part in node.inputs:
        if not part.size:
            continue
        view = lowering.new_slot(part.type, "view")
        lowering.slots[view].alias = whole
        steps.append(Control("set_slot", (view, whole), (-1, 0, place)))
        steps.append(Copy((lowering.slot_of[stored_part(part)], view)))
        place += part.bytes
    kernel = Kernel("join", "join", (tuple(region.inputs), (node,)), steps, depth=lowering.depth)
    kernel.bytes = 2 * place
    kernel.notes["region"] = region
    lowering.kernels.append(kernel)


def tiny(schedule: Schedule) -> bool:
    """Whether waking workers would cost more than it saves."""
    cost = sum((high(k.flops) + high(k.bytes)) * k.times for k in schedule.kernels)
    return cost < 400_000


def lower_regions(lowering: Lowering) -> None:
    """The pass: add the Kernels of every Region, in order."""
    for region in lowering.ordered:
        lower_region(lowering, region)
