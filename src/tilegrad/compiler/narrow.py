"""Products of narrow operands for an array: casts below the movement of an operand are left out.

An array multiplies int8 (or bfloat16) and sums wide, which a Graph says as a product of casts. A
convolution's casts stand below its padding and windows; a cast commutes with movement, and a `dot`
of narrow operands sums wide anyway. Invariant: the values stay, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..schedule.access import MOVEMENT


def _narrowed(node: Node) -> Node | None:
    """An operand before the cast below its movement; itself where there is none."""
    moves = []
    while node.op in MOVEMENT:
        moves.append(node)
        node = node.inputs[0]
    if node.op is not ops.cast:
        return None
    node = node.inputs[0]
    for one in reversed(moves):
        node = one.op.make((node,), one.attrs)
    return node


def narrow_products(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    unit = None if target is None else target.array
    if unit is None:
        return results

    def product(m: Match) -> Node | None:
        node = m.root
        if node.dtype is not unit.accumulator:
            return None
        narrow = [
            x if x.dtype is kind else _narrowed(x) for x, kind in zip(node.inputs, unit.inputs)
        ]
        if any(x is None or x.dtype is not kind for x, kind in zip(narrow, unit.inputs)):
            return None
        if tuple(narrow) == node.inputs:
            return None
        return ops.dot.make(tuple(x for x in narrow if x is not None), node.attrs)

    return rewrite(results, RuleSet("narrow", [Rule("narrow_product", ops.dot, product)]), log)


__all__ = ["narrow_products"]
