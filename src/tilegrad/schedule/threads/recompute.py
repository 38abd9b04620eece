"""Which elementwise values are better computed again than stored, where arithmetic is cheap.

A value that several Regions read is stored by default. On a machine that computes many operations
in the time one element takes to come from memory, it is better computed again by every reader,
if what it is computed from is no more to read than the value itself. Invariant: what is an
argument, a result, or computed by anything but inlined elementwise ops stays a value.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph import ops
from ...ir.node import Node, topological, users
from ...ir.symbol import high
from ...ir.types import Array, product
from ..access import MOVEMENT, readers_through
from ..cost import bytes_moved
from ..lowering import Lowering
from ..region import INLINE, cost, joins, leaves_of

SHORT = 1024  # places
KEPT = {ops.random_bits, ops.gather, ops.concatenate}  # much work, or reads that do not line up


def recompute_cheap(lowering: Lowering) -> None:
    """The pass: take such values out, as long as a Kernel does not grow too large."""
    extents, arguments, results = lowering.fuser.extents, lowering.arguments, lowering.results
    given, values = set(arguments) | set(results), extents.values
    order = topological(results, stop=set(arguments).__contains__)
    readers = users(order)
    for node in order:
        if (
            node in values
            and node not in given
            and _is_recomputed(node, readers, values, arguments)
        ):
            values.discard(node)
        extents.note(node)


def _is_recomputed(
    node: Node, readers: dict[Node, list[Node]], values: set[Node], arguments: Sequence[Node]
) -> bool:
    """Whether a value is better computed by each of its readers."""
    if node.op not in INLINE or node.op in KEPT:
        return False
    if not isinstance(node.type, Array) or node.op in MOVEMENT:
        return False
    if _is_index(node, readers, values, set(arguments)):
        return True
    if any(_reads_stored(reader) for reader in readers_through(node, readers)):
        return False
    read = [leaf for leaf in leaves_of(node, values) if leaf is not node]
    return high(bytes_moved(read)) <= high(bytes_moved([node])) * 5 / 4


def _is_index(
    node: Node, readers: dict[Node, list[Node]], values: set[Node], arguments: set[Node]
) -> bool:
    """Whether a value is a short line of places that little is done to, given from outside."""
    if not node.dtype.is_integer or high(product(node.shape)) > SHORT or cost(node, values) > 6:
        return False
    if not all(leaf in arguments for leaf in leaves_of(node, values)):
        return False
    return all(
        r.op in (ops.gather, ops.update) and node in r.inputs[1:] for r in readers.get(node, ())
    )


def _reads_stored(reader: Node) -> bool:
    """Whether a Node only reads what is stored, or takes each element many times."""
    if reader.op in (ops.expand, ops.windows, ops.gather) or joins(reader):
        return True
    return reader.op not in INLINE and reader.op.category != "reduce"
