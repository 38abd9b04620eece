"""Passes that rewrite the Graph with a RuleSet of `graph/`.

Rules are imported where a Graph has ops for them. Invariant: every
value stays what it is, as each Rule says of itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph.simplify import SIMPLIFY, STRIP
from ..ir.node import Node
from ..ir.rewrite import Log, rewrite

Nodes = list[Node]
ATTENTION = {"attention", "band of attention"}  # what recognition says that it found


def strip(arguments: Sequence[Node], results: Nodes, log: Log, target: Target | None) -> Nodes:
    """What only derivatives need goes."""
    return rewrite(results, STRIP, log)


def inline(arguments: Sequence[Node], results: Nodes, log: Log, target: Target | None) -> Nodes:
    """Custom functions, and ops that no Target has, are written out."""
    from ..graph.decompose import DECOMPOSE

    return rewrite(results, DECOMPOSE, log)


def simplify(arguments: Sequence[Node], results: Nodes, log: Log, target: Target | None) -> Nodes:
    """Algebra."""
    return rewrite(results, SIMPLIFY, log)


def strength(arguments: Sequence[Node], results: Nodes, log: Log, target: Target | None) -> Nodes:
    """Costly ops become cheap ones."""
    from ..graph.strength import STRENGTH

    return rewrite(results, STRENGTH, log)


def recognize_big(
    arguments: Sequence[Node], results: Nodes, log: Log, target: Target | None
) -> Nodes:
    """Big ops found; an attention that a derivative has found before becomes one with it."""
    from ..graph.recognize import recognize

    found = recognize(results, log)
    return rewrite(found, SIMPLIFY) if ATTENTION & set(log.fired) else found
