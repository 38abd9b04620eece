"""Sums of a few gathered rows as additions: what experts made of a token comes back to it.

A sum over an axis in the middle is a Kernel of its own. Of few parts it is an expression like any
other, which is computed where it is read: with the residual, and with the norm of the next layer.
Invariant: parts are added in order, whatever their number of rows, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import accumulator
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite

MOST_PARTS, MOST_NODES = 16, 64  # parts of a sum, and Nodes of each
ELEMENTWISE = ("unary", "binary", "ternary")


def add_gathered(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""

    def added(m: Match) -> Node | None:
        x = m.root.inputs[0]
        along = len(x.shape) - 2
        if m.root.attrs["axes"] != (along,) or along > 1:
            return None
        count = x.shape[along]
        if not isinstance(count, int) or not 1 < count <= MOST_PARTS or not _is_gathered(x):
            return None
        wide = accumulator(x.dtype)
        known: dict[tuple[Node, int], Node] = {}
        total, *others = [build.cast(part(x, n, known), wide) for n in range(count)]
        for other in others:
            total = ops.add(total, other)
        return build.cast(total, x.dtype)

    return rewrite(results, RuleSet("gathered", [Rule("gathered_sum", ops.sum_, added)]), log)


def _is_gathered(x: Node) -> bool:
    """Whether an expression (N, K, C), or (K, C), has gathered rows in it, and is no long one."""
    seen, stack, found = {x}, [x], False
    while stack and len(seen) <= MOST_NODES:
        node = stack.pop()
        if _is_elementwise(node):
            new = set(node.inputs) - seen
            seen |= new
            stack += new
        found = found or _rows(node) is not None
    return found and not stack


def _is_elementwise(x: Node) -> bool:
    return x.op.category in ELEMENTWISE or x.op is ops.cast


def _rows(x: Node) -> Node | None:
    """Rows (N K, C) that were gathered, if that is all."""
    found = x.inputs[0] if x.op is ops.reshape else x
    if found.op is not ops.gather or found.attrs["axes"] != (0,) or len(found.shape) != 2:
        return None
    fits = found.inputs[1].shape == found.shape[:1] and x.shape[-1] == found.shape[1]
    return found if fits else None


def part(x: Node, number: int, known: dict[tuple[Node, int], Node]) -> Node:
    """Rows of a number, (N, C) or (C,): from below, so that nothing is read by several parts."""
    found = known.get((x, number))
    if found is None:
        found = known[x, number] = _part(x, number, known)
    return found


def _part(x: Node, number: int, known: dict[tuple[Node, int], Node]) -> Node:
    *lead, count, columns = x.shape
    shape = (*lead, columns)
    if _is_elementwise(x):
        return x.op.make(tuple([part(i, number, known) for i in x.inputs]), x.attrs)
    if x.op is ops.expand:
        source = x.inputs[0]
        own = part(source, number if source.shape[-2] != 1 else 0, known)
        return build.broadcast_to(own, shape)
    rows = _rows(x)
    if rows is not None:
        index = build.reshape(rows.inputs[1], (*lead, count))
        index = build.slice_axis(index, len(lead), number, number + 1)
        return build.gather(rows.inputs[0], [build.reshape(index, tuple(lead))], [0])
    found = build.slice_axis(x, len(lead), number, number + 1)
    return build.reshape(found, shape)


__all__ = ["add_gathered"]
