"""The pass that chooses what reads weights which are stored quantised; see `weights_products`.

Invariant: after it no `unpack` and no `pack` is left; where there was none, nothing of it is
imported.
"""

from __future__ import annotations

import math
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


def _packed(m: Match) -> Node:
    from ..graph.unpack import packed

    return packed(m.root)


APART = RuleSet(
    "unpack",
    [Rule("unpack_to_scratch", ops.unpack, _unpacked), Rule("pack_by_ops", ops.pack, _packed)],
)


def choose_weights(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass; without a Target, weights are taken apart by ordinary ops."""
    if not _any_unpack(results):
        return results
    if target is not None and any(n.op is ops.unpack for n in topological(results)):
        from .weights_products import Weights

        results = Weights(arguments, results, target, log).run()
    return rewrite(results, APART, log)


def _any_unpack(results: Sequence[Node]) -> bool:
    return any(
        n.op is ops.unpack or n.op is ops.pack or any(_any_unpack(b.results) for b in n.blocks)
        for n in topological(results)
    )


def bytes_to_prepare(form: str, sizes: Sequence[int], device: str) -> int:
    """Bytes that weights (..., rows, columns) take on a device once they are prepared."""
    from ..core.format import format_of
    from ..kernels.quantised.prepare import Preparation, kind_of
    from ..kernels.quantised.shape import QuantisedShape
    from ..runtime.prepared import prepared_bytes
    from ..schedule.quantised import families_of
    from .as_stored import AsStored

    target, columns, rows = target_for(device), sizes[-1], math.prod(sizes[:-1])
    shape = QuantisedShape(format_of(form), rows, columns, groups=rows // sizes[-2])
    if families_of(target)[1].why_not_shape(shape, target):
        return prepared_bytes(AsStored(form, rows, columns))
    return prepared_bytes(Preparation(kind_of(target), form, (rows,), columns))


def multiplies_groups(form: str, given: str, sizes: Sequence[int], device: str) -> bool:
    """Whether a device multiplies rows that are rounded to one Format with weights (groups, rows,
    columns) of their own as another has them stored."""
    from ..core.dtype import bfloat16, int32, uint8
    from ..core.format import format_of
    from ..graph import build
    from .code_products import why_not

    (count, rows, columns), stored = sizes, format_of(form)
    raw = build.input_((count, rows, stored.row_bytes(columns)), uint8)
    x = build.unpack(build.pack(build.input_((1, columns), bfloat16), given), given, bfloat16)
    ends = build.input_((count + 1,), int32)
    weights = build.unpack(raw, form, bfloat16)
    dot = ops.grouped_dot(x, weights, ends, axis=2, block=0)
    return not why_not(dot, target_for(device))


__all__ = ["bytes_to_prepare", "choose_weights", "multiplies_groups"]
