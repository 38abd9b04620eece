"""Roles: every role of a Body is an arm of one branch over the block's warps.

Barriers are made ready before; programs of a cluster meet before the first role and after the
last. Invariant: a warp runs one role, with the registers that it asks for.
"""

from __future__ import annotations

from math import prod

from ...ir.node import Node
from ...ir.types import Memory
from .emission import Emission
from .emit_barriers import cluster_meets, start_barriers
from .plan_cluster import ends_alone
from .shared import Hazards

REGISTERS = 65_536  # of a multiprocessor
ONE_THREAD = {
    "wait",
    "expect",
    "arrive",
    "arrive_remote",
    "copy_async",
    "copy_multicast",
    "copy_store",
    "cluster_rank",
    "commit_copies",
    "wait_copies",
    "loop",
    "branch",
    "get",
    "grid_dependency_wait",
    "grid_launch_dependents",
    "program",
    "symbol",
    "constant",
    "fence",
}


def entry_registers(warps: int) -> int:
    """Registers that a thread has at entry where so many warps have the machine to themselves."""
    return min(255, REGISTERS // (32 * warps) // 8 * 8)


def dependent(e: Emission) -> bool:
    """Whether the Body waits for its dependency itself."""
    return e.overlaps and e.has("grid_dependency_wait")


def roles(e: Emission, nodes: list[Node]) -> None:
    """Barriers are made ready; then every role is an arm of one branch over the warps."""
    w, threads = e.w, e.threads
    start_barriers(e, [(node, one_thread(node)) for node in nodes])
    whole, count = threads.number, threads.count
    warp = threads.alike(w.shr(whole, 5))
    join, first = w.label("join"), 0
    for number, node in enumerate(nodes):
        warps = node.attrs["warps"]
        after = w.label("role")
        if number + 1 < len(nodes):
            w.put("bra", after, guard=w.test("ge.u32", warp, first + warps))
        with e.memo.inside():
            threads.number = w.sub(whole, 32 * first) if first else whole
            threads.count, threads.role = 32 * warps, number
            e.shared.hazards = Hazards()
            role(e, node, join)
        w.put("bra", join)
        w.place(after)
        first += warps
    w.place(join)
    if dependent(e):  # warps without work wait too
        w.put("griddepcontrol.wait")
    if e.body.notes.get("cluster") and not ends_alone(e.body):
        cluster_meets(e)  # nobody leaves while another may still reach in
    threads.number, threads.count, threads.role, threads.single = whole, count, -1, False


def role(e: Emission, node: Node, join: str) -> None:
    """One role: its registers, then its Block."""
    w, registers = e.w, node.attrs["registers"]
    if registers:
        way = "inc" if registers > entry_registers(e.warps) else "dec"
        w.put(f"setmaxnreg.{way}.sync.aligned.u32", str(registers))
    e.threads.single = one_thread(node)
    if e.threads.single or one_warp(node):
        w.put("bra", join, guard=w.test("ge.u32", e.threads.number, 32))
    with e.memo.inside():
        e.block(node.blocks[0])


def one_thread(role: Node) -> bool:
    """Whether a role does nothing that needs more than one thread: one warp runs it."""
    nodes = list(role.blocks[0].all_nodes())
    plain = all(n.op.name in ONE_THREAD or getattr(n.type, "shape", None) == () for n in nodes)
    return plain and any(n.op.name.startswith("copy_") for n in nodes)


def one_warp(role: Node) -> bool:
    """Whether a role of copies needs the threads of one warp alone: the others leave. They would
    wait at barriers that come round without them, and one late by a round would wait for ever."""
    nodes = list(role.blocks[0].all_nodes())
    small = all(n.op.name in (*ONE_THREAD, "copy_pages") or _elements(n) <= 32 for n in nodes)
    return (
        small
        and any(n.op.name == "copy_pages" for n in nodes)
        and not any(n.op.name in ("arrive", "arrive_remote", "named_sync") for n in nodes)
    )


def _elements(node: Node) -> int:
    """How many values a Node has in a role; many for what is no tile."""
    shape = getattr(node.type, "shape", None)
    return 64 if shape is None or isinstance(node.type, Memory) else prod(shape)
