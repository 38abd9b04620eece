"""Products of narrow operands for an array: casts below the movement of an operand are left out.

An array multiplies int8 (or bfloat16) and sums wide, which a Graph says as a product of casts. A
convolution's casts stand below its padding and windows; a cast commutes with movement, and a `dot`
of narrow operands sums wide anyway. Weights of half the bits (int4, fp8) stay so where the array
has a rate for them, else they become elements. Invariant: the values stay, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.dtype import DType, bfloat16, float8_e4m3, float16, int4, int8
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..schedule.access import MOVEMENT

HALVES = {int8: int4, bfloat16: float8_e4m3, float16: float8_e4m3}  # each exact in the element


def _below(node: Node, change: Callable[[Node], Node]) -> Node:
    """An operand with what is below its movement changed."""
    moves = []
    while node.op in MOVEMENT:
        moves.append(node)
        node = node.inputs[0]
    node = change(node)
    for one in reversed(moves):
        node = one.op.make((node,), one.attrs)
    return node


def _narrow(node: Node, element: DType) -> Node:
    """A value before its casts, as an element or as one of half the bits; itself where it is
    neither."""
    found = node
    while found.op is ops.cast and found.dtype is not HALVES[element]:
        inner = found.inputs[0]
        known = inner.dtype is element or inner.dtype is HALVES[element]
        wider = found.dtype.kind == inner.dtype.kind and found.dtype.bits > inner.dtype.bits
        if not known or not wider:
            break
        found = inner
    return found


def narrow_products(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    unit = None if target is None else target.array
    if target is None or unit is None:
        return results
    element = unit.inputs[0]
    mixed = any(one.inputs[1] is HALVES[element] for one in target.array_rates)

    def whole(node: Node) -> Node:
        return _below(node, lambda x: build.cast(x, element))

    def product(m: Match) -> Node | None:
        node = m.root
        if node.dtype is not unit.accumulator and node.dtype is not element:
            return None
        narrow = [_below(x, lambda x: _narrow(x, element)) for x in node.inputs]
        half = [x.dtype is HALVES[element] for x in narrow]
        if any(x.dtype is not element and not h for x, h in zip(narrow, half)):
            return None
        if not mixed:
            narrow = [whole(x) if h else x for x, h in zip(narrow, half)]
        elif all(half):
            narrow[0] = whole(narrow[0])
        if tuple(narrow) == node.inputs:
            return None
        return ops.dot.make(tuple(narrow), node.attrs)

    return rewrite(results, RuleSet("narrow", [Rule("narrow_product", ops.dot, product)]), log)


__all__ = ["narrow_products"]
