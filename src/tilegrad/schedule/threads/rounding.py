"""Which values are rounded to 16 bits before anybody sees them, so that quick ops will do.

A value counts if every use of it leads to a cast to a 16-bit float through ops that keep relative
errors small: products, quotients, roots, choices, sums of values that are not negative. Invariant:
no value that is stored in more than 16 bits, compared, or subtracted from another is in the set.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph import ops
from ...ir.node import Node, Op, topological, users
from ..access import MOVEMENT
from ..lowering import Lowering

KEEPS: set[Op] = {
    ops.multiply,
    ops.divide,
    ops.reciprocal,
    ops.negative,
    ops.absolute,
    ops.square_root,
    ops.maximum,
    ops.minimum,
}


def round_early(lowering: Lowering) -> None:
    """The pass: note the values of which only 16 bits are ever seen."""
    lowering.rounded = rounded_nodes(lowering.results)


def rounded_nodes(results: Sequence[Node]) -> set[Node]:
    """The values of a Graph that only 16 bits of are ever seen."""
    order = topological(results)
    readers, stored = users(order), set(results)
    found: set[Node] = set()
    positive = _not_negative(order)
    for node in reversed(order):
        if node in stored or not getattr(node.type, "dtype", None) or not node.dtype.is_float:
            continue
        if node in readers and all(_hides(r, node, found, positive) for r in readers[node]):
            found.add(node)
    return found


def _hides(user: Node, node: Node, found: set[Node], positive: set[Node]) -> bool:
    """Whether a use lets through no more than 16 bits of a value."""
    if user.op is ops.cast:
        return user.dtype.is_float and (user.dtype.bits <= 16 or user in found)
    if user not in found:
        return False
    if user.op in KEEPS or user.op in MOVEMENT:
        return True
    if user.op is ops.where:
        return node is not user.inputs[0]
    return user.op is ops.add and all(i in positive for i in user.inputs)


def _not_negative(order: Sequence[Node]) -> set[Node]:
    """The values that are 0 or more, of Nodes with inputs first."""
    found: set[Node] = set()
    for node in order:
        inputs = node.inputs
        if node.op is ops.constant:
            known = bool(node.attrs["value"] >= 0)
        elif node.op in MOVEMENT:
            known = inputs[0] in found
        elif node.op in (ops.add, ops.multiply):
            square = node.op is ops.multiply and inputs[0] is inputs[1]
            known = square or all(i in found for i in inputs)
        else:
            known = node.op in (ops.exp, ops.absolute, ops.square_root)
        if known:
            found.add(node)
    return found
