"""Choose how products with picked weights are computed; see `graph/picked.py`.

Vectors have little to gain from a product with all weights: rows read their own, unless there is
one weight. Units for matrices are fed by many rows: up to as many as there are weights read their
own, more make one product. Rows of groups that are mostly alone read their own weights too, but
where a kernel takes blocks of few rows. Invariant: at the level `invariant` rows always read their
own, and groups are always products.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.config import invariant
from ..core.target import Target
from ..graph import ops
from ..graph.picked import by_all, by_rows, ids_of
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..ir.symbol import high


def choose_picked(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    threads = target is not None and target.has_threads

    def chosen(m: Match) -> Node:
        rows, count = high(m.root.shape[0]), high(m.root.inputs[1].shape[0])
        most = count if threads else 0 if count == 1 else rows
        return by_rows(m.root) if invariant() or rows <= most else by_all(m.root)

    def alone(m: Match) -> Node | None:
        (x, weights, offsets, *blocks), axis = m.root.inputs, m.root.attrs["axis"]
        if target is not None and target.asynchronous_units and x.dtype.bits == 16:
            listed = None if blocks else _listed(x, offsets, target)
            return listed and ops.grouped_dot(x, weights, offsets, listed, axis=axis)
        if invariant() or high(x.shape[0]) > high(weights.shape[0]):
            return None
        return by_rows(ops.picked_dot(x, weights, ids_of(offsets, x.shape[0]), axis=axis))

    picked = Rule("picked_dot", ops.picked_dot, chosen)
    grouped = Rule("rows_alone", ops.grouped_dot, alone)
    return rewrite(results, RuleSet("picked", [picked, grouped]), log)


def _listed(x: Node, offsets: Node, target: Target) -> Node:
    """The list of blocks of rows, which products of the same groups share."""
    from ..kernels import grouped
    from ..tile.plan import Plan

    rows, groups, plan = x.shape[0], high(offsets.shape[0]) - 1, Plan().with_(warps=4)
    block = grouped.block_rows(rows, groups)
    static = {"block": block, "most": grouped.most_blocks(rows, groups, block)}
    bound = grouped.block_list.bind([offsets.type], static, plan)
    return ops.call(offsets, callee=grouped.block_list.callee(bound, plan, target))


__all__ = ["choose_picked"]
