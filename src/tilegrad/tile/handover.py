"""Programs that hand work to one another: stored, fenced, met, counted; counted, fenced, read.

A parameter that a placed Body both stores to and reads is *handed over* if the Body counts with
`atomic_add`: who counts last reads what other programs stored. Before an atomic_add the role's
stores have a fence('global') after them, and then its warps meet (one thread counts for all);
after it, a fence('global') comes before any read. Nodes are judged in the order they stand in, of
a loop twice. Invariant: a Body without atomic_add has no Findings, nor has one that reads only
what it does not store to.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.block import Block
from ..ir.node import Node
from .build import Body
from .finding import Finding, finding
from .row import Touch, effects_of, is_place


@dataclass
class _State:
    """What one role has done since its last count."""

    warps: int
    stored: Node | None = None
    fenced: bool = False
    met: bool = False
    counted: Node | None = None


def check_handover(body: Body) -> list[Finding]:
    """Counts without a fence or a meeting before them, and reads without a fence after one."""
    nodes = list(body.block.all_nodes())
    if not any(node.op.name == "atomic_add" for node in nodes):
        return []
    stored, read = ({m for n in nodes for m in _plain(n, writes)} for writes in (True, False))
    counters = {n.inputs[0] for n in nodes if n.op.name == "atomic_add"}
    exchanged = (stored & read) - counters
    found: dict[Finding, None] = {}
    for role in [n for n in nodes if n.op.name == "role"]:
        _walk(role.blocks[0], _State(role.attrs["warps"]), exchanged, found)
    return list(found)


def _plain(node: Node, writes: bool) -> set[Node]:
    """Parameters that a Node itself stores to, or reads."""
    plain = [e for e in effects_of(node) if isinstance(e, Touch) and e.writes is writes]
    return {touch.memory for touch in plain if not is_place(touch.memory)}


def _walk(block: Block, state: _State, exchanged: set[Node], found: dict[Finding, None]) -> None:
    for node in block.nodes:
        _visit(node, state, exchanged, found)
        for inner in node.blocks:
            for _ in range(2 if node.op.name == "loop" else 1):
                _walk(inner, state, exchanged, found)


def _visit(node: Node, state: _State, exchanged: set[Node], found: dict[Finding, None]) -> None:
    name = node.op.name
    if name == "fence" and node.attrs["kind"] == "global":
        state.fenced, state.counted = True, None
    elif name == "named_sync" and node.attrs["threads"] >= 32 * state.warps:
        state.met = state.fenced
    elif name == "atomic_add":
        if state.stored is not None and not (state.fenced and (state.met or state.warps == 1)):
            what = state.stored.inputs[0].attrs["name"]
            text = "is stored and counted without a fence('global') and a meeting of the warps"
            hint = "fence('global') after the stores, then named_sync of the role, then count"
            found[finding("fence", f"{what} {text} between", node, state.stored, hint)] = None
        state.stored, state.counted = None, node
    elif _plain(node, True) & exchanged:
        state.stored, state.fenced, state.met = node, False, False
    elif _plain(node, False) & exchanged and state.counted is not None:
        text = "is read after a count without a fence('global') between"
        hint = "fence('global') after the atomic_add, before what other programs stored is read"
        what = node.inputs[0].attrs["name"]
        found[finding("fence", f"{what} {text}", node, state.counted, hint)] = None
