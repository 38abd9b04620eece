"""What one product's kernel hands to the next: sums over blocks of columns, and each sum once.

A sum over rows that was cut into blocks (see compiler/norms.py) needs no launch of its own where
the kernel of the product that makes the row can leave the sums of its blocks behind (`is_part`),
and those that multiply by what follows from the whole sum can add the blocks up before they begin
(`is_whole`). A value that is computed of a product and read more than once is stored by that
product's kernel, not computed again from more than it weighs itself.

Invariant: values taken out of the set are read by the epilogues of products alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import ops
from ..ir.node import Node, topological, users, walk
from ..ir.symbol import high
from ..ir.types import Array, product
from ..kernels.matmul.matvec import warps_of
from .access import ELEMENTWISE, MOVEMENT, base_of, readers_through
from .cost import bytes_moved
from .lowering import Lowering
from .region import leaves_of

MOST_PARTS = 256  # blocks of a row
MOVED = {*MOVEMENT, ops.cast}


def is_part(node: Node) -> bool:
    """Whether a sum is one over blocks of columns: (..., blocks, block) -> (..., blocks)."""
    if node.op is not ops.sum_ or node.inputs[0].op is not ops.reshape:
        return False
    folded, source = node.inputs[0].shape, node.inputs[0].inputs[0].shape
    last = node.attrs["axes"] == (len(folded) - 1,)
    return last and len(folded) == len(source) + 1 and folded[:-2] == source[:-1]


def is_whole(node: Node) -> bool:
    """Whether a sum adds up the sums of all blocks of a row, or one row of one token."""
    if node.op is not ops.sum_:
        return False
    if product(node.shape) == 1 and node.inputs[0].op.category in ELEMENTWISE:
        return node.attrs["axes"] == (len(node.inputs[0].shape) - 1,)
    if not is_part(node.inputs[0]):
        return False
    parts = node.inputs[0].shape
    return node.attrs["axes"] == (len(parts) - 1,) and high(parts[-1]) <= MOST_PARTS


def hand_over(lowering: Lowering) -> None:
    """The pass: whole sums that products finish are no values, nor what lies between."""
    values, arguments, results = lowering.fuser.values, lowering.arguments, lowering.results
    given = set(arguments) | set(results)
    order = topological(results, stop=set(arguments).__contains__)
    readers = users(order)
    for node in order:
        if node in given or not is_whole(node):
            continue
        found = _until_products(node, readers, given)
        if found is None:
            continue
        dots = {_product(i) for scaled in found[1] for i in scaled.inputs} - {None}
        if product(node.shape) == 1:  # each program reads the whole row
            if not all(streams(dot) for dot in dots if dot is not None):
                continue
            values -= {
                dot.inputs[0]
                for dot in dots
                if dot is not None and _recomputed_by_all(dot.inputs[0], readers, given)
            }
        values -= found[0]
        values |= {_rounded(scaled, readers) for scaled in found[1]}


def _until_products(
    node: Node, readers: dict[Node, list[Node]], given: set[Node]
) -> tuple[set[Node], set[Node]] | None:
    """What follows from a whole sum before products are multiplied by it, and those; None where
    anything else reads it."""

    def is_scaled(reader: Node) -> bool:
        return reader.op is ops.multiply and any(map(_product, reader.inputs))

    def follows(reader: Node) -> bool:
        return reader is node or reader.op in MOVEMENT or reader.op.category in ELEMENTWISE

    def step(current: Node) -> Sequence[Node]:
        return readers.get(current, ()) if follows(current) and not is_scaled(current) else ()

    reached = set(walk([node], step))
    scaled = {n for n in reached if is_scaled(n)}
    found = reached - scaled
    return (found, scaled) if all(map(follows, found)) and found.isdisjoint(given) else None


def _rounded(node: Node, readers: dict[Node, list[Node]]) -> Node:
    """The value that what follows from a product is stored as: rounded, where all want it so."""
    found = readers.get(node, [])
    while len(found) == 1 and found[0].op is ops.multiply:  # by another factor
        node, found = found[0], readers.get(found[0], [])
    rounds = len(found) == 1 and found[0].op is ops.cast and found[0].dtype.bits < node.dtype.bits
    return found[0] if rounds else node


def _product(node: Node) -> Node | None:
    """The product that a value is, rounded or reshaped."""
    node = base_of(node, passing=MOVED)
    return node if node.op is ops.dot else None


def streams(dot: Node) -> bool:
    """Whether the library's matvec takes a product: one row, weights in lines along the sum."""
    a, b = dot.inputs
    batch, contract = dot.attrs["batch"], dot.attrs["contract"]
    if batch != ((), ()) or contract != ((len(a.shape) - 1,), (1,)) or len(b.shape) != 2:
        return False
    if product(a.shape[:-1]) != 1 or a.dtype is not b.dtype or a.dtype.size != 2:
        return False
    n, k = b.shape
    whole = isinstance(n, int) and isinstance(k, int)
    return whole and high(n) % 8 == 0 and warps_of(high(k)) > 0


def _recomputed_by_all(node: Node, readers: dict[Node, list[Node]], given: set[Node]) -> bool:
    """Whether a row is better computed by every program than stored: products alone read it."""
    made = node.op is ops.cast and node.inputs[0].op is ops.multiply and node not in given
    return made and all(r.op is ops.dot for r in readers.get(node, ()))


def keep_sums(lowering: Lowering) -> None:
    """The pass: what is read more than once and follows from a product (a residual sum), or from
    a gather, becomes a value: who made it stores it, and no later kernel computes it again."""
    values, arguments, results = lowering.fuser.values, lowering.arguments, lowering.results
    order = topological(results, stop=set(arguments).__contains__)
    readers = users(order)
    for node in order:
        if node in values or not isinstance(node.type, Array):
            continue
        sums = node.op.category == "binary" and any(_is_made(i, values) for i in node.inputs)
        kept = _rounded(node, readers)
        if (sums or node.op is ops.gather) and _many(kept, readers):
            if sums and high(bytes_moved(leaves_of(kept, values))) <= high(bytes_moved([kept])):
                continue  # the product itself is no more to read
            values.add(kept)
            values -= {
                r
                for r in readers[kept]
                if r.op is ops.cast
                and r not in results
                and all(_inlines(u) for u in readers.get(r, ()))
            }


def _inlines(reader: Node) -> bool:
    """Whether a reader takes values that are computed where they are read."""
    return reader.op in MOVEMENT or reader.op.category in (*ELEMENTWISE, "reduce")


def _is_made(node: Node, values: set[Node]) -> bool:
    """Whether a value is a product's, as wide as it, that only this sum reads in its kernel."""
    node = base_of(node, passing={ops.cast})
    return node.op is ops.dot and node in values


def _many(node: Node, readers: dict[Node, list[Node]]) -> bool:
    """Whether values of full size are read more than once, casts aside."""
    size = high(product(node.shape))
    found = [r for r in readers_through(node, readers, MOVED) if r.op not in MOVED]
    return sum(not isinstance(r.type, Array) or high(product(r.shape)) <= size for r in found) > 1
