"""The pass that chooses what reads weights which are stored quantised; see `weights_calls`.

Invariant: after it no `unpack` is left; where there was none, nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, topological
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..runtime.device import target_for


def _unpacked(m: Match) -> Node:
    from ..graph.unpack import unpacked

    return unpacked(m.root)


APART = RuleSet("unpack", [Rule("unpack_to_scratch", ops.unpack, _unpacked)])


def choose_weights(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass; without a Target, weights are taken apart by ordinary ops."""
    if not _any_unpack(results):
        return results
    if target is not None:
        from .weights_calls import Weights

        results = Weights(arguments, results, target, log).run()
    return rewrite(results, APART, log)


def _any_unpack(results: Sequence[Node]) -> bool:
    return any(
        n.op is ops.unpack or any(_any_unpack(b.results) for b in n.blocks)
        for n in topological(results)
    )


def bytes_to_prepare(form: str, rows: int, columns: int, device: str) -> int:
    """Bytes that weights take on a device once they are prepared."""
    from ..kernels.quantised.prepare import Preparation, kind_of
    from ..runtime.prepared import prepared_bytes

    return prepared_bytes(Preparation(kind_of(target_for(device)), form, (rows,), columns))


__all__ = ["bytes_to_prepare", "choose_weights"]
