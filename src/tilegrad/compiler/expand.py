"""Write attention that no kernel of the Target takes in ordinary ops.

Runs after recognition, which may have found it in ordinary ops. Invariant: each
`attention` that is left has a kernel; the log says why the others have none.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    done: dict[Node, list[Node] | str] = {}

    def expand(m: Match) -> Node | None:
        node = m.x
        if node not in done:
            reason = why_not(node, target)
            done[node] = attention.decompose(node) if reason else ""
            if reason:
                name = f"{node.op.name} ({reason})"
                log.fired[name] = log.fired.get(name, 0) + 1
        found = done[node]
        return found[m.root.attrs["index"]] if isinstance(found, list) else None

    whole = any_("x", ops=(ops.attention, ops.attention_backward))
    found = Rule("expand", of(ops.get, whole), expand)
    return rewrite(results, RuleSet("expand", [found, *STRIP.rules]))
