"""Unroll short scans of known length, so that their steps fuse with each other and around them.

A scan with stacked outputs is unrolled only if it is very short: joining many computed parts
costs more than the loop. Runs before simplification. Invariant: steps are taken in the scan's
order, each on what the step before gave.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet, any_, of
from ..ir.rewrite import Log, rewrite

STEPS = 8  # most steps of a scan that gives only its carries
STACKED_STEPS = 4  # and of one that stacks outputs
NODES = 256  # most Nodes that unrolling may make

_done: weakref.WeakKeyDictionary[Node, list[Node]] = weakref.WeakKeyDictionary()


def worth_unrolling(node: Node) -> bool:
    """Whether a scan is short and small enough."""
    length, block = node.attrs["length"], node.blocks[0]
    if not isinstance(length, int):
        return False
    stacks = len(block.results) > node.attrs["carries"]
    if any(n.blocks for n in block.nodes):
        return False
    return length <= (STACKED_STEPS if stacks else STEPS) and length * len(block.nodes) <= NODES


def unrolled(node: Node) -> list[Node]:
    """The results of a scan, written out."""
    count, length, block = node.attrs["carries"], node.attrs["length"], node.blocks[0]
    sliced = ops.scan_slices(node)
    carries = list(node.inputs[:count])
    whole = node.inputs[count : count + sliced]
    shared = node.inputs[count + sliced :]
    parts: dict[int, list[Node]] = {}
    for step in reversed(range(length)) if node.attrs["reverse"] else range(length):
        slices = [build.reshape(build.slice_axis(x, 0, step, step + 1), x.shape[1:]) for x in whole]
        found = build.inline(block, [*carries, *slices, *shared])
        carries, parts[step] = found[:count], found[count:]
    stacked = []
    for i, result in enumerate(block.results[count:]):
        if not length:
            stacked.append(build.full((0, *result.shape), 0, result.dtype))
            continue
        lines = [build.unsqueeze(parts[step][i], 0) for step in range(length)]
        stacked.append(build.concatenate(lines, 0))
    return [*carries, *stacked]


def _unroll(m: Match) -> Node | None:
    if not worth_unrolling(m.x):
        return None
    found = _done.get(m.x)
    if found is None:
        found = _done[m.x] = unrolled(m.x)
    return found[m.root.attrs["index"]]


UNROLL = RuleSet("unroll", [Rule("short_scan", of(ops.get, any_("x", ops=ops.scan)), _unroll)])


def unroll_scans(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    return rewrite(results, UNROLL, log)
