"""What programs of a cluster tell one another: which arrivals, waits and fences carry stores.

`mbarrier.arrive` and `try_wait` without a scope order what the threads of one block did, not more.
Stores to another program are handed on by a fence of the cluster's scope and, after it, an arrival
that is relaxed, but of that scope; they are taken over by a wait that acquires at that scope,
and then the fence after the wait is no instruction. What is sent lands on a barrier whose waits
acquire at the cluster's scope, and needs no fence. Invariant: only in straight runs of ops in
which nothing is stored or read, so that the fence before the run orders all there is; elsewhere
arrivals and waits keep their plain forms, and a fence is a fence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...ir.block import Block
from ...ir.node import Node
from ...tile.build import Body

REACHING = ("arrive_remote", "write_remote", "copy_multicast")

@dataclass
class Handed:
    """Ops of a Body that hand stores on or take them over."""

    arrivals: set[Node] = field(default_factory=set)  # relaxed: a fence stands before them
    waits: set[Node] = field(default_factory=set)  # acquire what other programs stored
    fences: set[Node] = field(default_factory=set)  # done by the waits before them


def handed_over(body: Body) -> Handed:
    """The arrivals, waits and fences of every block."""
    found = Handed()
    _walk(body.block, found)
    landed = {n.inputs[2] for n in all_nodes(body.block) if n.op.name == "send"}
    found.waits.update(n for n in all_nodes(body.block)
                       if n.op.name == "wait" and n.inputs[0] in landed)  # fmt: skip
    return found


def ends_alone(body: Body) -> bool:
    """Whether a program may end before the others of its cluster do: they reach into it by sends
    only, for all of which it waits, as each of them does, right where it sends itself."""
    nodes, waited = list(all_nodes(body.block)), 0
    for block in (b for n in nodes if n.op.name == "role" for b in n.blocks):
        for at, node in enumerate(block.nodes):
            later = {n.inputs[0] for n in block.nodes[at:] if n.op.name == "wait"}
            waited += node.op.name == "send" and node.inputs[2] in later
    sends = sum(n.op.name == "send" for n in nodes)
    return 0 < sends == waited and not any(n.op.name in REACHING for n in nodes)


def all_nodes(block: Block) -> Iterator[Node]:
    """Every Node of a Block, those of inner Blocks too."""
    for node in block.nodes:
        yield node
        for inner in node.blocks:
            yield from all_nodes(inner)


def _walk(block: Block, found: Handed) -> None:
    fenced, waits = False, []
    for node in block.nodes:
        for inner in node.blocks:
            _walk(inner, found)
        name = node.op.name
        if name == "fence" and node.attrs["kind"] == "cluster":
            if fenced and waits:
                found.fences.add(node)
                found.waits.update(waits)
            fenced, waits = True, []
        elif name == "arrive_remote" and fenced:
            found.arrivals.add(node)
        elif name == "wait" and fenced:
            waits.append(node)
        elif node.op.effect or node.blocks:
            fenced, waits = False, []
