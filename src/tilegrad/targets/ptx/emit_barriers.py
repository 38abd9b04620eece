"""Roles, barriers and fences, and who waits for whom: threads, roles, programs and launches.

Every role of a Body is an arm of one branch over the block's warps; barriers are made ready before,
and programs of a cluster meet before the first role and after the last.

One lane arrives for its warp, so a barrier's count is multiplied by the warps of the roles that
arrive; where roles hand plain values to one another each thread arrives for itself.

`mbarrier.try_wait` without a scope acquires what the threads of one block did, not more. What is
sent (`st.async`) completes its bytes on the receiver's barrier by a release of the cluster's scope,
so the waits on that barrier acquire at that scope; there is no fence and no arrival. Arrivals at
other programs' barriers carry no stores and keep their plain forms.

Invariant: all who arrive at a barrier do it alike, and its count says how often; a warp runs one
role, with the registers that it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...core.dtype import int32
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Tile
from ...tile.build import Body
from ...tile.row import Touch, effects_of, memory_of
from .element import convert
from .emission import Emission
from .shared import Hazards


def barrier(e: Emission, node: Node) -> None:
    """An array of barriers."""
    e.barriers[node] = e.shared.reserve(8 * node.attrs["stages"], 8)


def barrier_address(e: Emission, barrier: Node, stage: Node) -> str:
    """The shared address of one barrier of an array."""
    base, at = e.shared.base, e.barriers[barrier]
    low, high = e.bounds.range(stage)
    if low == high:
        return e.add(base, at + 8 * int(low))
    return e.add(e.add(e.shl(e.values.index32(stage), 3), base), at)


def arrive(e: Emission, node: Node) -> None:
    """One lane for its warp, or each thread for itself: racecheck, which does not follow what
    lanes tell one another, then sees the order of their loads and stores."""
    address = barrier_address(e, *node.inputs)
    alone = node in telling(e) and not e.threads.single
    guard = "" if alone else e.threads.one_lane()
    e.put("mbarrier.arrive.shared::cta.b64", "_", f"[{address}]", guard=guard)


def arrive_remote(e: Emission, node: Node) -> None:
    """At the barrier of another program of the cluster."""
    address = barrier_address(e, *node.inputs[:2])
    remote = there(e, address, e.values.index32(node.inputs[2]))
    guard = e.threads.one_lane()
    e.put("mbarrier.arrive.shared::cluster.b64", "_", f"[{remote}]", guard=guard)


def there(e: Emission, address: str, rank: str) -> str:
    """An address like this program's own in the program of a rank."""
    return e.value("mapa.shared::cluster.u32", address, rank)


def expect(e: Emission, node: Node) -> None:
    """One thread arrives and says how many bytes will come."""
    where, bytes_ = f"[{barrier_address(e, *node.inputs)}]", node.attrs["bytes"]
    form = "mbarrier.arrive.expect_tx.shared::cta.b64"
    e.put(form, "_", where, bytes_, guard=e.threads.first())


def wait(e: Emission, node: Node) -> None:
    """Until a phase of a barrier is over."""
    address = barrier_address(e, *node.inputs[:2])
    parity = e.values.index32(node.inputs[2])
    head, done = e.label("wait"), e.new("pred")
    e.place(head)
    acquiring = e.memo.ever("acquiring", lambda: waits_for_sends(e.body))
    order = ".acquire.cluster" if node in acquiring else ""
    e.put(f"mbarrier.try_wait.parity{order}.shared::cta.b64", done, f"[{address}]", parity)
    e.put("bra", head, guard=f"!{done}")


def named_sync(e: Emission, node: Node) -> None:
    """Threads meet at a barrier of a number; at `named_arrive` they tell others, and go on."""
    waits, threads = node.op.name == "named_sync", node.attrs["threads"]
    e.put("bar.sync" if waits else "bar.arrive", node.attrs["number"] + 1, threads)
    if waits and threads == e.threads.count:  # all of this role and nobody else
        e.shared.hazards.meet()


named_arrive = named_sync


def fence(e: Emission, node: Node) -> None:
    """What was stored is seen by copies, or by other programs."""
    asynchronous = node.attrs["kind"] == "async"
    e.put("fence.proxy.async.shared::cta" if asynchronous else "fence.acq_rel.gpu")


def cluster_rank(e: Emission, node: Node) -> list[str]:
    """This program's number in its cluster."""
    rank = e.value("mov.u32", "%cluster_ctarank")
    return [convert(e, int32, e.values.dtype(node), rank)]


def cluster_meets(e: Emission) -> None:
    """All threads of all programs of a cluster meet."""
    e.put("barrier.cluster.arrive.aligned")
    e.put("barrier.cluster.wait.aligned")


# ---- counts -------------------------------------------------------------------------------------


def start_barriers(e: Emission, roles: Sequence[Node]) -> None:
    """One thread sets the counts of all barriers; then the block meets."""
    cluster = e.body.notes.get("cluster")
    if not e.barriers and not e.maps and not cluster:
        return
    first = e.test("eq.s32", e.threads.number, 0)
    skip = e.label("ready")
    e.put("bra", skip, guard=f"!{first}")
    for address in e.maps.values():
        e.put("prefetch.tensormap", f"[{address}]")
    factors = barrier_factors(roles, telling(e))
    for node, at in e.barriers.items():
        count = node.attrs["count"] * factors.get(node, 1)
        address = e.add(e.shared.base, at)
        for stage in range(node.attrs["stages"]):
            e.put("mbarrier.init.shared::cta.b64", f"[{address}+{8 * stage}]", count)
    e.put("fence.mbarrier_init.release.cluster")
    e.place(skip)
    if cluster:
        cluster_meets(e)
    else:
        e.put("bar.sync", "0")


def barrier_factors(roles: Sequence[Node], alone: set[Node]) -> dict[Node, int]:
    """For each barrier, how many arrivals of the machine one of the Body's stands for."""
    found: dict[Node, int] = {}
    for role in roles:
        single = one_thread(role)
        for node in role.blocks[0].find("arrive", "expect", "arrive_remote"):
            one = single or node.op.name == "expect"
            factor = 1 if one else role.attrs["warps"] * (32 if node in alone else 1)
            if found.setdefault(node.inputs[0], factor) != factor:
                raise InternalError("ptx.emit", "roles of different sizes arrive at one barrier")
    return found


def telling(e: Emission) -> set[Node]:
    """Arrivals at barriers where roles that hand plain values to one another through a shared place
    arrive; all who arrive at such a barrier do it alike."""
    return e.memo.ever("telling", lambda: _telling(e.body.block.find("role")))


def _telling(roles: Sequence[Node]) -> set[Node]:
    written, read = ([_shared_touched(role, way) for role in roles] for way in (True, False))
    arriving = [role.blocks[0].find("arrive") for role in roles]
    barriers: set[Node] = set()
    for i in range(len(roles)):
        others = [j for j in range(len(roles)) if j != i]
        if any(written[i] & read[j] or read[i] & written[j] for j in others):
            barriers |= {n.inputs[0] for n in arriving[i]}
    remote = (n for role in roles for n in role.blocks[0].find("arrive_remote"))
    barriers -= {n.inputs[0] for n in remote}
    return {n for found in arriving for n in found if n.inputs[0] in barriers}


def _shared_touched(role: Node, writes: bool) -> set[Node]:
    """The shared places that the role's own threads read or write, each as it comes to it."""
    effects = (x for node in role.blocks[0].all_nodes() for x in effects_of(node))
    touches = (x for x in effects if isinstance(x, Touch) and x.writes is writes)
    return {t.memory for t in touches if memory_of(t.memory).scope == "shared"}


# ---- clusters -----------------------------------------------------------------------------------


REACHING = ("arrive_remote", "copy_multicast")


def waits_for_sends(body: Body) -> set[Node]:
    """The waits that acquire what other programs sent."""
    landed = {n.inputs[2] for n in body.block.find("send")}
    return {n for n in body.block.find("wait") if n.inputs[0] in landed}


def ends_alone(body: Body) -> bool:
    """Whether a program may end before the others of its cluster do: they reach into it by sends
    only, for all of which it waits, as each of them does, right where it sends itself."""
    waited, sends = 0, len(body.block.find("send"))
    for block in (b for n in body.block.find("role") for b in n.blocks):
        for at, node in enumerate(block.nodes):
            later = {n.inputs[0] for n in block.nodes[at:] if n.op.name == "wait"}
            waited += node.op.name == "send" and node.inputs[2] in later
    return 0 < sends == waited and not body.block.find(*REACHING)


# ---- roles --------------------------------------------------------------------------------------


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


def roles(e: Emission, nodes: Sequence[Node]) -> None:
    """Barriers are made ready; then every role is an arm of one branch over the warps."""
    threads = e.threads
    start_barriers(e, nodes)
    whole, count = threads.number, threads.count
    warp = threads.alike(e.shr(whole, 5))
    join, first = e.label("join"), 0
    for number, node in enumerate(nodes):
        warps = node.attrs["warps"]
        after = e.label("role")
        if number + 1 < len(nodes):
            e.put("bra", after, guard=e.test("ge.u32", warp, first + warps))
        with e.memo.inside():
            threads.number = e.sub(whole, 32 * first) if first else whole
            threads.count, threads.role = 32 * warps, number
            e.shared.hazards = Hazards()
            role(e, node, join)
        e.put("bra", join)
        e.place(after)
        first += warps
    e.place(join)
    if dependent(e):  # warps without work wait too
        e.put("griddepcontrol.wait")
    if e.body.notes.get("cluster") and not ends_alone(e.body):
        cluster_meets(e)  # nobody leaves while another may still reach in
    threads.number, threads.count, threads.role, threads.single = whole, count, -1, False


def role(e: Emission, node: Node, join: str) -> None:
    """One role: its registers, then its Block."""
    registers = node.attrs["registers"]
    if registers:
        way = "inc" if registers > entry_registers(e.warps) else "dec"
        e.put(f"setmaxnreg.{way}.sync.aligned.u32", registers)
    e.threads.single = one_thread(node)
    if e.threads.single or one_warp(node):
        e.put("bra", join, guard=e.test("ge.u32", e.threads.number, 32))
    with e.memo.inside():
        e.block(node.blocks[0])


def one_thread(role: Node) -> bool:
    """Whether a role does nothing that needs more than one thread: one warp runs it."""
    copies = any(n.op.name.startswith("copy_") for n in role.blocks[0].all_nodes())
    return copies and _small(role, 1)


def one_warp(role: Node) -> bool:
    """Whether a role of copies needs the threads of one warp alone: the others leave. They would
    wait at barriers that come round without them, and one late by a round would wait for ever."""
    return (
        _small(role, 32, "copy_pages")
        and bool(role.blocks[0].find("copy_pages"))
        and not role.blocks[0].find("arrive", "arrive_remote", "named_sync")
    )


def _small(role: Node, most: int, *more: str) -> bool:
    """Whether a role has no tiles of more values than `most`, but for ops that one thread does, or
    more."""
    others = (n for n in role.blocks[0].all_nodes() if n.op.name not in (*ONE_THREAD, *more))
    return all(isinstance(n.type, Tile) and prod(n.type.shape) <= most for n in others)
