"""State: what is updated in place, and in which order Regions must run for that.

Invariant: a donated state is never copied silently: where it would have to be, an error names the
other reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import StateError
from ..graph import ops
from ..ir.block import Block
from ..ir.node import Node, needs
from ..ir.types import Tuple
from .lowering import Lowering
from .region import Region, bit, in_order, need
from .schedule import Copy


def order_updates(lowering: Lowering) -> None:
    """The pass: readers of a state run before it is overwritten, where that is possible."""
    regions = in_order(lowering.fuser.regions)
    readers: dict[Node, list[Region]] = {}
    dependents: dict[int, list[Region]] = {}
    for region in regions:
        for node in region.reads:
            readers.setdefault(node, []).append(region)
        for number in region.after:
            dependents.setdefault(number, []).append(region)
    for region in regions:
        for number, state, promised in overwritten(region):
            if not may_overwrite(lowering, state):
                continue
            others = [r for r in readers.get(state, ()) if r is not region]
            late = [r for r in others if r.needs >> region.number & 1]
            if needs(region.anchor).count(state) > 1:
                late = [region]  # it reads what it would overwrite
            if late or state in lowering.wanted:
                if state in lowering.strict and promised:
                    reader = late[0].values[0] if late else state
                    raise StateError(
                        "a donated state is read after it is updated: it would be copied",
                        op="update",
                        expected="no other reader after the update",
                        got=f"{reader.op.name} at {reader.location}",
                        hint="read the state before updating it, or use the updated one",
                    )
                continue
            lowering.in_place.add((region.anchor, number))
            for r in others:
                region.after.add(r.number)
                dependents.setdefault(r.number, []).append(region)
                need(region, bit(r.number) | r.needs, dependents)


def may_overwrite(lowering: Lowering, state: Node) -> bool:
    """Whether the storage of a state may be taken over."""
    if state in lowering.arguments:
        return state in lowering.donated
    return state in lowering.fuser.values and state in lowering.fuser.region_of


def shares_slot(lowering: Lowering, node: Node) -> bool:
    """Whether a state in place has the very Slot it had before: control may move it."""
    found = state_behind(node)
    if found is None or found[:2] not in lowering.in_place or found[2] not in lowering.slot_of:
        return False
    state = found[2]
    moved = lowering.slot_of[state] in lowering.frame.moved
    if not lowering.depth and moved and node in lowering.wanted:
        lowering.in_place.discard(found[:2])  # an output has a place of its own
        return False
    if lowering.depth or moved:
        lowering.slot_of[node] = lowering.slot_of[state]
        return True
    return False


def hold_states(
    lowering: Lowering, writer: Node, stored: Sequence[Node]
) -> tuple[dict[int, int], list[Any]]:
    """Slots of the states that a Node writes, by argument, and the copies that need be."""
    held: dict[int, int] = {}
    steps: list[Any] = []
    wanted = {found[1]: v for v in stored if (found := state_behind(v)) is not None}
    for argument, number, state in states_of(writer):
        after = wanted.get(number)  # None: nobody reads the state that is left
        at = lowering.new_slot(state.type, "scratch") if after is None else lowering.slot_of[after]
        held[argument], source_at = at, lowering.slot_of.get(state, at)
        slot, source = lowering.slots[at], lowering.slots[source_at]
        if source is slot:
            continue
        if (writer, number) not in lowering.in_place:
            steps.append(Copy((source_at, at)))
            continue
        if slot.kind == "output" and source.kind == "scratch" and source.alias is None:
            source.kind = "output"
        slot.alias = source_at
    return held, steps


def states_of(node: Node) -> list[tuple[int, int, Node]]:
    """(argument, place among the results, state) of each that is written in place."""
    if node.op is ops.update:
        return [(0, 0, node.inputs[0])]
    states = node.attrs["callee"].states if node.op is ops.call else ()
    results = len(node.type.items) if isinstance(node.type, Tuple) else 1
    first = results - len(states)
    return [(at, first + i, node.inputs[at]) for i, at in enumerate(states)]


def state_behind(node: Node) -> tuple[Node, int, Node] | None:
    """(what writes it, number of the result, state) of a value that is a written state."""
    writer, number = (node.inputs[0], node.attrs["index"]) if node.op is ops.get else (node, 0)
    found = [(writer, at, state) for _, at, state in states_of(writer) if at == number]
    return found[0] if found else None


def overwritten(region: Region) -> list[tuple[int, Node, bool]]:
    """(number, state, promised) of what a Region may overwrite; promised: a copy is an error."""
    node = region.anchor
    if region.kind == "control" and node.op is not ops.cond:
        body = node.blocks[-1]
        carries = node.attrs["carries"]
        return [(i, node.inputs[i], is_updated(body, i)) for i in range(carries)]
    return [(number, state, True) for _, number, state in states_of(node)]


def is_updated(body: Block, number: int) -> bool:
    """Whether a carry is a chain of updates of itself, or of kernels that write it in place."""
    node = body.results[number]
    found = False
    while (behind := state_behind(node)) is not None:
        node, found = behind[2], True
    return found and node is body.arguments[number]
