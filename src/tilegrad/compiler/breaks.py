"""Breakpoints of Symbols: the values at which a Target would have other kernels for a Graph.

What is compiled for a Symbol must serve all of its values; where kernels differ, `jit` compiles a
range when it is first met. Invariant: a Symbol that no kernel asks about has one range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.format import format_of
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, topological
from ..ir.symbol import Expr
from ..runtime.device import target_for
from ..schedule.outside import OUTSIDE

if TYPE_CHECKING:
    from ..schedule.outside import Row

Breaks = dict[str, tuple[int, ...]]  # of a Symbol by name: where ranges begin, but the first


def breaks_of(outputs: Sequence[Node], device: str | Target) -> Breaks:
    """The breakpoints of a Graph on a device, or for a Target."""
    asking = [n for n in _nodes(outputs) if _asks(n)]
    if not asking:
        return {}
    target = device if isinstance(device, Target) else target_for(device)
    found: dict[str, set[int]] = {}
    for node in asking:
        for symbol, first in _breaks(node, target):
            if symbol.kind == "symbol" and symbol.low < first < symbol.high:
                found.setdefault(symbol.name, set()).add(first)
    return {name: tuple(sorted(firsts)) for name, firsts in found.items()}


def _nodes(outputs: Sequence[Node]) -> list[Node]:
    """Every Node, those of Blocks too."""
    found = topological(outputs)
    return [*found, *(n for node in found for b in node.blocks for n in _nodes(b.results))]


def _asks(node: Node) -> bool:
    """Whether kernels for a Node differ by sizes."""
    return node.op in (ops.paged_attention, ops.dot, ops.grouped_dot) or bool(_from_outside(node))


def _from_outside(node: Node) -> list[Row]:
    if not OUTSIDE.names():
        return []
    from ..schedule.families import outside_rows

    return outside_rows(node.op.name)


def _is_quantised(node: Node, target: Target) -> bool:
    """Whether it is a product of quantised weights with what is not: others are of codes, or of
    what matrix units take as it is kept."""
    if node.op is not ops.dot:
        return False
    from ..schedule.quantised import weight_of

    weights = [w for w in map(weight_of, node.inputs) if w.op is ops.unpack]
    form = format_of(weights[0].attrs["format"]) if len(weights) == 1 else None
    if form is None or not form.sparse:
        return form is not None
    from .sparse_weights import why_not

    return bool(why_not(form, weights[0].shape[-1], target))


def _breaks(node: Node, target: Target) -> list[tuple[Expr, int]]:
    from ..schedule.families import KINDS, family_of, rows_of

    rows = [row for row in _from_outside(node) if row.applies(target)]
    if not rows:
        op = "unpack" if _is_quantised(node, target) else node.op.name
        rows = list(rows_of(KINDS[op], op, target))
    found = [pair for row in rows for pair in family_of(row).breaks(node, target)]
    return [(size, first) for size, first in found if isinstance(size, Expr)]
