"""Write attention that no kernel of the Target takes in ordinary ops.

Runs after recognition, which may have found it in ordinary ops. Invariant: each
`attention` that is left has a kernel; the log says why the others have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ..core.target import Target
from ..graph import attention, ops
from ..graph.simplify import STRIP
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet, any_, of
from ..ir.rewrite import Log, rewrite
from ..schedule.families import why_not


def expand_attention(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""

    @cache
    def written_out(node: Node) -> list[Node]:
        reason = why_not(node, target)
        if not reason:
            return []
        log.count(f"{node.op.name} ({reason})")
        return attention.decompose(node)

    def expand(m: Match) -> Node | None:
        found = written_out(m.x)
        return found[m.root.attrs["index"]] if found else None

    whole = any_("x", ops=(ops.attention, ops.attention_backward))
    found = Rule("expand", of(ops.get, whole), expand)
    return rewrite(results, RuleSet("expand", [found, *STRIP.rules]))
