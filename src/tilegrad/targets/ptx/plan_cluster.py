"""What programs of a cluster send one another: which waits acquire it, and who may end alone.

`mbarrier.try_wait` without a scope acquires what the threads of one block did, not more. What is
sent (`st.async`) completes its bytes on the receiver's barrier by a release of the cluster's scope,
so the waits on that barrier acquire at that scope; there is no fence and no arrival. Arrivals at
other programs' barriers carry no stores and keep their plain forms. Invariant: every wait on a
barrier that anything is sent to is found, whichever Block it stands in.
"""

from __future__ import annotations

from ...ir.node import Node
from ...tile.build import Body

REACHING = ("arrive_remote", "copy_multicast")


def waits_for_sends(body: Body) -> set[Node]:
    """The waits that acquire what other programs sent."""
    nodes = list(body.block.all_nodes())
    landed = {n.inputs[2] for n in nodes if n.op.name == "send"}
    return {n for n in nodes if n.op.name == "wait" and n.inputs[0] in landed}


def ends_alone(body: Body) -> bool:
    """Whether a program may end before the others of its cluster do: they reach into it by sends
    only, for all of which it waits, as each of them does, right where it sends itself."""
    nodes, waited = list(body.block.all_nodes()), 0
    for block in (b for n in nodes if n.op.name == "role" for b in n.blocks):
        for at, node in enumerate(block.nodes):
            later = {n.inputs[0] for n in block.nodes[at:] if n.op.name == "wait"}
            waited += node.op.name == "send" and node.inputs[2] in later
    sends = sum(n.op.name == "send" for n in nodes)
    return 0 < sends == waited and not any(n.op.name in REACHING for n in nodes)
