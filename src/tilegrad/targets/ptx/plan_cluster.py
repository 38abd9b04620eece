"""What programs of a cluster tell one another: which arrivals, waits and fences carry stores.

`mbarrier.arrive` and `try_wait` without a scope order what the threads of one block did, not more.
Stores to another program are handed on by a fence of the cluster's scope and, after it, an arrival
that is relaxed, but of that scope; they are taken over by a wait that acquires at that scope,
and then the fence after the wait is no instruction. Invariant: only in straight runs of ops in
which nothing is stored or read, so that the fence before the run orders all there is; elsewhere
arrivals and waits keep their plain forms, and a fence is a fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.block import Block
from ...ir.node import Node
from ...tile.build import Body


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
    return found


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
