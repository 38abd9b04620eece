"""Races and deadlock across roles: what each op of the placed level does to clocks and barriers.

`check_protocol` runs the skeleton of a Body (no data) on the Machine of `ordering`, which finds
races, missing fences, uninitialised boxes, phases that are not certain, deadlock and accesses
before the dependency wait, whatever the order in which roles run. Invariant: HANDLERS has one row
per op that `skeleton` makes an event of.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ..ir.node import Node
from .access import join
from .finding import Finding, place_name
from .ordering import Handler, Machine, Role
from .skeleton import Scenario, Skeleton, is_place

# ---- what each op does ------------------------------------------------------------------------


def _barrier(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    if (role.rank, node) in machine.made:
        text = f"the barrier {node.attrs['name']} is set up several times"
        machine.report("unproved", text, node, None, "warning", "set it up once, before the roles")
    machine.made.add((role.rank, node))


def _allocate(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    machine.place(role.rank, node).fresh()


def _arrive(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    rank = values[1] if node.op.name == "arrive_remote" else role.rank
    if not 0 <= rank < machine.ranks:
        machine.report("index", f"arrive_remote to rank {rank} of {machine.ranks}", node)
        return
    bar = machine.bar(rank, node.inputs[0], node, values[0])
    if bar is not None:
        machine.come(role, bar, node, 1, node.attrs.get("bytes", 0), 0)


def _wait(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> bool:
    bar = machine.bar(role.rank, node.inputs[0], node, values[0])
    if bar is None:
        return True
    over = len(bar.over)
    if over % 2 == values[1]:
        return False
    if role.clock[bar.agent] < over - 1:
        machine.report(
            "phase",
            f"{role.name} waits on {bar.name} for phase {over - 1} without knowing that "
            "the phase before is over: it may go on too early",
            node,
        )
    bar.waits.append((over, role.number, role.epoch, node))
    if over:
        ended = bar.over[over - 1]
        role.synced = max(role.synced, ended[role.number])
        join(role.clock, ended)
    return True


def _named(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> bool:
    threads = node.attrs["threads"]
    round_ = machine.rounds[role.rank, node.attrs["number"]]
    if role.joined is None:
        if role.clock[round_.agent] < len(round_.over):
            machine.report(
                "phase",
                f"{role.name} arrives at named barrier {round_.number} without knowing "
                "that the round before is over: it may count for the wrong one",
                node,
                round_.node,
            )
        if round_.arrived and threads != round_.threads:
            machine.report(
                "arrivals",
                f"named barrier {round_.number} is used with {round_.threads} and "
                f"with {threads} threads",
                node,
                round_.node,
            )
        role.joined = len(round_.over)
        round_.threads, round_.node = threads, node
        round_.arrived += 32 * role.warps
        if round_.coming is None:
            round_.coming = list(role.clock)
        else:
            join(round_.coming, role.clock)
        if round_.arrived > threads:
            machine.report(
                "arrivals",
                f"named barrier {round_.number}: {round_.arrived} of {threads} threads came",
                node,
            )
        if round_.arrived >= threads:
            round_.coming[round_.agent] = len(round_.over) + 1
            round_.over.append(round_.coming)
            round_.coming, round_.arrived = None, 0
    joined = role.joined
    if node.op.name == "named_sync":
        if len(round_.over) <= joined:
            return False
        role.synced = max(role.synced, role.epoch)
        join(role.clock, round_.over[joined])
        copies = role.groups["copy_threads"]  # what each thread waited for, all now know of
        role.clock[copies.agent] = max(role.clock[copies.agent], copies.known)
    role.joined = None
    return True


def _fence(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    if node.attrs["kind"] == "async":
        for plain in role.unfenced:
            plain.fence = role.epoch
        role.unfenced = []


def _lead(machine: Machine, rank: int, node: Node, memory: Node, lead: Any) -> Any:
    """The place and box at a leading index."""
    place = machine.place(rank, memory)
    region = place.at(lead)
    if region is None:
        machine.report(
            "index", f"{node.op.name} at {list(lead)} leaves {place_name(memory)}", node, memory
        )
    return place, region


def _some_rows(place: Any, lead: Any, row: int, shape: tuple[int, ...]) -> Any:
    """The box of some rows of what lies at a leading index."""
    axes = tuple(range(len(lead), len(lead) + len(shape)))
    return place.boxed((*lead, row, *[0] * (len(shape) - 1)), shape, axes)


def _copy_async(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    into, memory, barrier = node.inputs[:3]
    machine.depends(role, memory, node, False)
    shape, mask = node.attrs["shape"], node.attrs.get("mask", 1 << role.rank)
    leads = len(into.shape) - len(shape)
    lead, box = values[1 : 1 + leads], values[1 + leads :]
    row = node.attrs.get("row", 0)
    if node.op.name == "copy_multicast":
        row, mask, box = box[0], node.attrs["mask"] << box[1], box[2:]
    for rank in range(machine.ranks):
        bar = machine.bar(rank, barrier, node, values[0]) if mask >> rank & 1 else None
        if bar is None:
            continue
        place, region = _lead(machine, rank, node, into, lead)
        if region is None:
            continue
        region = _some_rows(place, lead, row, shape)
        epoch = len(bar.over) + 1
        if box and rank == role.rank:
            source = machine.place(rank, memory)
            part = source.boxed(box, shape, node.attrs["axes"])
            machine.asynchronous(source, part, role, node, False, bar.agent, epoch)
        machine.asynchronous(place, region, role, node, True, bar.agent, epoch)
        machine.come(role, bar, node, 0, 0, into.dtype.storage_bytes(prod(shape)))


def _copy_pages(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    into, memory, barrier = node.inputs[:3]
    machine.depends(role, memory, node, False)
    bar = machine.bar(role.rank, barrier, node, values[0])
    place, region = _lead(machine, role.rank, node, into, values[1:])
    if bar is None or region is None:
        return
    epoch = len(bar.over) + 1
    if memory in machine.skeleton.tracked:
        source = machine.place(role.rank, memory)
        part = source.at(())
        assert part is not None
        machine.asynchronous(source, part, role, node, False, bar.agent, epoch)
    machine.asynchronous(place, region, role, node, True, bar.agent, epoch)
    count = node.inputs[4].shape[0] * prod(node.attrs["shape"])
    machine.come(role, bar, node, 0, 0, into.dtype.storage_bytes(count))


def _send(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    into, barrier, lead = node.inputs[0], node.inputs[2], values[1:]
    to, ranks = node.attrs["to"], [*range(machine.ranks)]
    if to == "one":
        ranks, lead = [lead[0]], lead[1:]
        if not 0 <= ranks[0] < machine.ranks:
            machine.report("index", f"send to rank {ranks[0]} of {machine.ranks}", node)
            return
    shape = into.shape[len(lead) :]
    if to == "shares" and node.inputs[1].shape[0] != shape[0] * machine.ranks:
        machine.report("index", f"send of {node.inputs[1].shape} to {machine.ranks} programs", node)
        return
    for rank in ranks:
        bar = machine.bar(rank, barrier, node, values[0])
        place, region = _lead(machine, rank, node, into, lead)
        if bar is None or region is None:
            return
        machine.asynchronous(place, region, role, node, True, bar.agent, len(bar.over) + 1)
        bytes_ = into.dtype.storage_bytes(prod(shape))
        machine.come(role, bar, node, 0, 0, bytes_, tells=False)


def _issue(role: Role, kind: str, node: Node) -> tuple[int, int]:
    """A new op of an engine: its agent and number."""
    group = role.groups[kind]
    group.issued += 1
    group.last = node
    return group.agent, group.issued


def _copy_store(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    memory, place_node = node.inputs[:2]
    machine.depends(role, memory, node, True)
    rank = len(memory.shape)
    lead, index = values[: len(values) - rank], values[len(values) - rank :]
    place, region = _lead(machine, role.rank, node, place_node, lead)
    engine = _issue(role, "copy_store", node)
    if region is not None:
        machine.asynchronous(place, region, role, node, False, *engine)
    into = machine.place(role.rank, memory)
    box = into.boxed(index, node.attrs["shape"], node.attrs["axes"])
    machine.asynchronous(into, box, role, node, True, *engine)


def _matrix_async(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    accumulate, rest = values[0], values[1:]
    engine = _issue(role, "matrix_async", node)
    found = []
    for memory in node.inputs[:3]:
        count = len(memory.shape) - 2
        lead, rest = rest[:count], rest[count:]
        place, region = _lead(machine, role.rank, node, memory, lead)
        if region is None:
            return
        if place.scope == "register" and (memory in role.registers or not role.fenced):
            machine.report(
                "matrix_fence",
                f"{role.name} uses {place_name(memory)} in matrix_async without matrix_fence",
                node,
                memory,
            )
        found.append((place, region))
    for place, region in found[1:]:
        machine.asynchronous(place, region, role, node, False, *engine)
    if accumulate:
        machine.asynchronous(*found[0], role, node, False, *engine)
    machine.asynchronous(*found[0], role, node, True, *engine)


def _matrix_fence(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    role.registers.clear()
    role.fenced = True


def _commit(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    group = role.groups[GROUPS[node.op.name]]
    group.committed.append(group.issued)


def _group_wait(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    group = role.groups[GROUPS[node.op.name]]
    covered = len(group.committed) - node.attrs["pending"]
    if covered > 0:
        group.known = max(group.known, group.committed[covered - 1])
        if node.op.name != "wait_threads":  # else each thread knows of its own, until they meet
            role.clock[group.agent] = group.known


def _copy_threads(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    into, memory = node.inputs[:2]
    machine.depends(role, memory, node, False)
    shape, row = node.attrs["shape"], node.attrs["row"]
    leads = len(into.shape) - len(shape)
    lead, box = values[:leads], values[leads:]
    place, region = _lead(machine, role.rank, node, into, lead)
    engine = _issue(role, "copy_threads", node)
    if region is None:
        return
    if box:
        source = machine.place(role.rank, memory)
        machine.plain(source, source.boxed(box, shape, node.attrs["axes"]), role, node, False)
    axes = tuple(range(leads, leads + len(shape)))
    region = place.boxed((*lead, row, *[0] * (len(shape) - 1)), shape, axes)
    machine.crossed(place, region, role, node)
    machine.touch(place, region, role, node, True, *engine)
    region.plain = None


def _store_threads(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    memory, place_node = node.inputs[:2]
    machine.depends(role, memory, node, True)
    rank = len(memory.shape)
    lead, index = values[: len(values) - rank], values[len(values) - rank :]
    place, region = _lead(machine, role.rank, node, place_node, lead)
    if region is not None:
        machine.plain(place, region, role, node, False)
    into = machine.place(role.rank, memory)
    machine.plain(
        into, into.boxed(index, node.attrs["shape"], node.attrs["axes"]), role, node, True
    )


def _load_operand(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    operand, place_node = node.inputs[:2]
    place, region = _lead(machine, role.rank, node, place_node, values)
    if region is not None:
        machine.plain(place, region, role, node, False)
    place, region = _lead(machine, role.rank, node, operand, ())
    machine.plain(place, region, role, node, True)


def _matrix_sync(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    for memory, writes in (
        (node.inputs[1], False),
        (node.inputs[2], False),
        (node.inputs[0], False),
        (node.inputs[0], True),
    ):
        place, region = _lead(machine, role.rank, node, memory, ())
        machine.plain(place, region, role, node, writes)


def _read_place(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    place, region = _lead(machine, role.rank, node, node.inputs[0], values)
    if region is not None:
        if node.attrs.get("rows"):
            region = _some_rows(place, values, node.attrs["rows"][0], node.shape)
        machine.plain(place, region, role, node, node.op.name != "read_place")


def _load(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    memory, writes = node.inputs[0], node.op.name == "store"
    machine.depends(role, memory, node, writes)
    if not values or (node.attrs["masked"] and not is_place(memory)):
        return  # nobody writes it, or the mask says which part
    place = machine.place(role.rank, memory)
    shape = node.inputs[1].shape if writes else node.attrs["shape"]
    machine.plain(place, place.boxed(values, shape, node.attrs["axes"]), role, node, writes)


def _whole(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    name = node.op.name
    writes = name in ("scatter", "atomic_add", "matrix_store", "sort", "store_add")
    for memory in node.inputs[: 2 if name == "sort" else 1]:
        machine.depends(role, memory, node, writes)
        if not is_place(memory):
            continue
        place, region = _lead(machine, role.rank, node, memory, ())
        if name != "matrix_store" and not (writes and node.attrs.get("mode") == "set"):
            if not place.touched():
                machine.require(place, region, role, node)
            machine.touch(place, region, role, node, False, role.number, role.epoch)
        if writes:
            machine.plain(place, region, role, node, True)


def _grid(machine: Machine, role: Role, node: Node, values: tuple[Any, ...]) -> None:
    role.clock[machine.grid] = 1


GROUPS = {
    "matrix_commit": "matrix_async",
    "matrix_wait": "matrix_async",
    "commit_copies": "copy_store",
    "wait_copies": "copy_store",
    "commit_threads": "copy_threads",
    "wait_threads": "copy_threads",
}
HANDLERS: dict[str, Handler] = {
    "barrier": _barrier, "allocate": _allocate, "register_tile": _allocate, "arrive": _arrive,
    "expect": _arrive, "arrive_remote": _arrive, "wait": _wait, "named_sync": _named,
    "named_arrive": _named, "fence": _fence, "copy_async": _copy_async,
    "copy_multicast": _copy_async, "copy_pages": _copy_pages, "send": _send,
    "copy_store": _copy_store, "commit_copies": _commit, "wait_copies": _group_wait,
    "matrix_async": _matrix_async,
    "matrix_fence": _matrix_fence, "matrix_commit": _commit, "matrix_wait": _group_wait,
    "read_place": _read_place, "write_place": _read_place, "clear_rows": _read_place,
    "load": _load, "store": _load,
    "gather": _whole, "scatter": _whole, "atomic_add": _whole, "store_add": _whole,
    "matrix_load": _whole,
    "matrix_store": _whole, "sort": _whole, "grid_dependency_wait": _grid,
    "copy_threads": _copy_threads, "commit_threads": _commit, "wait_threads": _group_wait,
    "store_threads": _store_threads, "load_operand": _load_operand, "matrix_sync": _matrix_sync,
}  # fmt: skip


def check_protocol(skeleton: Skeleton, scenario: Scenario, whole: bool = False) -> list[Finding]:
    """Races, deadlock, fences, uninitialised places and the dependency wait of one scenario."""
    ranks, program = prod(skeleton.body.notes.get("cluster", (1,))), scenario.program
    first = program[0] // ranks * ranks if program else 0
    traces = []
    for rank in range(ranks):
        own = (first + rank, *program[1:]) if program else ()
        traces.append(skeleton.trace(replace(scenario, program=own, rank=rank), whole))
    return Machine(skeleton, scenario, HANDLERS, ranks).run(traces)
