"""Choose how products with picked weights are computed; see `graph/picked.py`.

Vectors have little to gain from a product with all weights: rows read their own, unless there is
one weight. Units for matrices are fed by many rows: up to as many as there are weights read their
own, more make one product. Invariant: at the level `invariant` rows always read their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.config import invariant
from ..core.target import Target
from ..graph import ops
from ..graph.picked import by_all, by_rows
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

    picked = Rule("picked_dot", ops.picked_dot, chosen)
    return rewrite(results, RuleSet("picked", [picked]), log)


__all__ = ["choose_picked"]
