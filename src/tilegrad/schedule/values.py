"""Passes over values before Regions are cut: what is stored, handed on, computed again, rounded.

A sum over rows that was cut into blocks (see compiler/norms.py) needs no launch of its own where
the kernel of the product that makes the row can leave the sums of its blocks behind (`is_part`),
and those that multiply by what follows from the whole sum can add the blocks up before they begin
(`is_whole`). A value that is computed of a product and read more than once is stored by that
product's kernel, not computed again from more than it weighs itself.

Where arithmetic is cheap, an elementwise value that several Regions read is better computed again
by every reader, if what it is computed from is no more to read than the value itself.

A value of which all uses lead to a cast to a 16-bit float, through ops that keep relative errors
small, is computed by quick ops: products, quotients, roots, choices, sums of values that are not
negative.

Invariant: whole sums taken out of the set are read by the epilogues of products alone; what is an
argument, a result, or computed by anything but inlined elementwise ops stays a value; no value that
is stored in more than 16 bits, compared, or subtracted from another is among the rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import ops
from ..ir.node import Node, Op, topological, users, walk
from ..ir.symbol import high
from ..ir.types import Array, product
from ..kernels.matmul.matvec import STREAMED, warps_of
from .access import ELEMENTWISE, MOVEMENT, Readers, base_of, readers_through
from .cost import bytes_moved
from .lowering import Lowering
from .region import INLINE, cost, joins, leaves_of

MOST_PARTS = 256  # blocks of a row
MOVED = {*MOVEMENT, ops.cast}


def sums_last(node: Node) -> bool:
    """Whether a value is a sum over the last axis alone."""
    return node.op is ops.sum_ and node.attrs["axes"] == (len(node.inputs[0].shape) - 1,)


def is_part(node: Node) -> bool:
    """Whether a sum is one over blocks of columns: (..., blocks, block) -> (..., blocks)."""
    if not sums_last(node) or node.inputs[0].op is not ops.reshape:
        return False
    folded, source = node.inputs[0].shape, node.inputs[0].inputs[0].shape
    return len(folded) == len(source) + 1 and folded[:-2] == source[:-1]


def is_whole(node: Node) -> bool:
    """Whether a sum adds up the sums of all blocks of a row, or one row of one token; the largest
    of one token counts as its sum does."""
    if node.op not in (ops.sum_, ops.max_):
        return False
    parts = node.inputs[0]
    if node.size == 1 and parts.op.category in ELEMENTWISE:
        return node.attrs["axes"] == (len(parts.shape) - 1,)
    return sums_last(node) and is_part(parts) and high(parts.shape[-1]) <= MOST_PARTS


def hand_over(lowering: Lowering) -> None:
    """The pass: whole sums that products finish are no values, nor what lies between."""
    values, order = lowering.fuser.values, lowering.order()
    readers, given = users(order), {*lowering.arguments, *lowering.results}
    for node in order:
        if node in given or not is_whole(node):
            continue
        found = _until_products(node, readers, given)
        if found is None:
            continue
        dots = {dot for scaled in found[1] for i in scaled.inputs if (dot := _product(i))}
        dots |= found[2]
        if node.size == 1:  # each program reads the whole row
            if not all(map(streams, dots)):
                continue
            rows = {dot.inputs[0] for dot in dots}
            values -= {row for row in rows if _recomputed_by_all(row, readers, given)}
        values -= found[0]
        values |= {_rounded(scaled, readers) for scaled in found[1]}
    for dot in order:
        if _is_coded(dot):
            codes = base_of(dot.inputs[0])
            made = any(_product(leaf) for leaf in leaves_of(codes, values))
            if codes not in given and codes.op is ops.cast and not made:
                values.discard(codes)  # each program encodes the token


def _until_products(
    node: Node, readers: Readers, given: set[Node]
) -> tuple[set[Node], set[Node], set[Node]] | None:
    """What follows from a whole sum before products are multiplied by it, those, and the products
    of one token whose codes rest on it; None where anything else reads it."""

    def is_scaled(reader: Node) -> bool:
        return reader.op is ops.multiply and any(map(_product, reader.inputs))

    def follows(reader: Node) -> bool:
        return reader is node or reader.op in MOVEMENT or reader.op.category in ELEMENTWISE

    def step(current: Node) -> Sequence[Node]:
        return readers.get(current, ()) if follows(current) and not is_scaled(current) else ()

    reached = set(walk([node], step))
    scaled, coded = ({n for n in reached if ends(n)} for ends in (is_scaled, _is_coded))
    found = reached - scaled - coded
    taken = all(map(follows, found)) and found.isdisjoint(given)
    return (found, scaled, coded) if taken else None


def _is_coded(dot: Node) -> bool:
    """Whether a Node is a product of one token's codes, which each of its programs can make."""
    return dot.op is ops.dot and dot.inputs[0].dtype.size == 1 and streams(dot)


def _rounded(node: Node, readers: Readers) -> Node:
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
    if product(a.shape[:-1]) != 1 or a.dtype is not b.dtype or a.dtype not in STREAMED:
        return False
    n, k = b.shape
    whole = isinstance(n, int) and isinstance(k, int)
    return whole and high(n) % 8 == 0 and warps_of(high(k), a.dtype) > 0


def _recomputed_by_all(node: Node, readers: Readers, given: set[Node]) -> bool:
    """Whether a row is better computed by every program than stored: products alone read it."""
    made = node.op is ops.cast and node.inputs[0].op is ops.multiply and node not in given
    return made and all(r.op is ops.dot for r in readers.get(node, ()))


def keep_sums(lowering: Lowering) -> None:
    """The pass: what is read more than once and follows from a product (a residual sum), or from
    a gather, becomes a value: who made it stores it, and no later kernel computes it again."""
    values, results, order = lowering.fuser.values, lowering.results, lowering.order()
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
    return node.op.category == "dot" and node in values


def _many(node: Node, readers: Readers) -> bool:
    """Whether values of full size are read more than once, casts aside."""
    size = high(node.size)
    found = [r for r in readers_through(node, readers, MOVED) if r.op not in MOVED]
    return sum(not isinstance(r.type, Array) or high(r.size) <= size for r in found) > 1


# ---- computed again ------------------------------------------------------------------------------

SHORT = 1024  # places
KEPT = {ops.random_bits, ops.gather, ops.concatenate}  # much work, or reads that do not line up


def recompute_cheap(lowering: Lowering) -> None:
    """The pass: take such values out, as long as a Kernel does not grow too large."""
    extents, arguments, order = lowering.fuser.extents, set(lowering.arguments), lowering.order()
    given, values, readers = {*arguments, *lowering.results}, extents.values, users(order)
    for node in order:
        if (
            node in values
            and node not in given
            and _is_recomputed(node, readers, values, arguments)
        ):
            values.discard(node)
        extents.note(node)


def _is_recomputed(node: Node, readers: Readers, values: set[Node], arguments: set[Node]) -> bool:
    """Whether a value is better computed by each of its readers."""
    if node.op not in INLINE or node.op in KEPT:
        return False
    if not isinstance(node.type, Array) or node.op in MOVEMENT:
        return False
    if _is_index(node, readers, values, arguments):
        return True
    if any(_reads_stored(reader) for reader in readers_through(node, readers)):
        return False
    read = [leaf for leaf in leaves_of(node, values) if leaf is not node]
    return high(bytes_moved(read)) <= high(bytes_moved([node])) * 5 / 4


def _is_index(node: Node, readers: Readers, values: set[Node], arguments: set[Node]) -> bool:
    """Whether a value is a short line of places that little is done to, given from outside."""
    if not node.dtype.is_integer or high(node.size) > SHORT or cost(node, values) > 6:
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


# ---- rounded to 16 bits --------------------------------------------------------------------------

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
