"""Take the factor that a norm has for each row behind the products that read the norm.

rms_norm(x) @ W is r * ((x * w) @ W) with r = 1 / root(mean(x^2) + epsilon), one number for each
row. So the product need not wait for the sum over the row, and the kernel that makes x can write x
* w at once. It also stores the sums of x^2 over blocks of columns; the kernel of the product adds
them up. This is done for rows of one tile or two, on machines whose matrix units run while their
threads go on, and in bfloat16, whose range is that of float32 (see docs/decisions/0020). Invariant:
every product that reads a changed norm is changed alike, and a norm that anything else reads stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.dtype import bfloat16, float32
from ..core.errors import InternalError
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node, topological, users
from ..ir.rewrite import Log, rebuild, replace
from ..ir.symbol import high
from ..ir.types import product
from ..kernels.matmul.plan import FITTED

TILE_ROWS = 128  # in one tile of the library's products
WIDE, NARROW = 64, 32  # columns of a block: rows of the weights, or columns of rows of tokens
FEW_ROWS = 16  # whose products have the weights as rows
EVEN = (24, 64)  # columns of blocks of which each core has one, least and most
LEAST_COLUMNS = 256  # columns of a row
RULE = "norm_behind_product"
MOVES = {ops.reshape, ops.expand}


@dataclass
class Norm:
    """A norm as core * factor a row: `total` is the sum of squares that the factor rests on."""

    core: Node  # (..., columns), in float32
    factor: Node  # (..., 1)
    total: Node  # (...)


FACTORS = 64  # more than any norm has


def factors_of(node: Node) -> list[Node]:
    """The factors of a product, in order; none of one of very many."""
    found: list[Node] = []
    stack = [node]
    while stack:
        if len(found) + len(stack) > FACTORS:
            return []
        current = stack.pop()
        if current.op is ops.multiply:
            stack += reversed(current.inputs)
        else:
            found.append(current)
    return found


def _is_row(node: Node) -> bool:
    """Whether a value is one number a row, repeated."""
    return node.op is ops.expand and node.inputs[0].shape == (*node.shape[:-1], 1)


def _total(factor: Node) -> Node | None:
    """The one sum that a factor rests on, through elementwise ops."""
    found: set[Node] = set()
    stack = [factor]
    while stack:
        node = stack.pop()
        if node.op is ops.sum_:
            found.add(node)
        elif node.op in MOVES or node.op.category in ("unary", "binary"):
            stack.extend(node.inputs)
        elif node.op is not ops.constant:
            return None
    return found.pop() if len(found) == 1 else None


def norm_of(node: Node) -> Norm | None:
    """The norm that a value is, or None."""
    if node.op is not ops.cast or node.dtype is not bfloat16 or node.inputs[0].dtype is not float32:
        return None
    factors = factors_of(node.inputs[0])
    rows = [f for f in factors if _is_row(f)]
    if len(rows) != 1 or len(factors) < 2 or len(node.shape) < 2:
        return None
    factor = rows[0].inputs[0]
    total, columns = _total(factor), node.shape[-1]
    if total is None or total.attrs["axes"] != (len(node.shape) - 1,):
        return None
    square = total.inputs[0]
    if square.op is not ops.multiply or square.inputs[0] is not square.inputs[1]:
        return None
    if square.inputs[0] not in factors or not isinstance(columns, int):
        return None
    if columns % WIDE or columns < LEAST_COLUMNS or not in_tiles(high(product(node.shape[:-1]))):
        return None
    rest = [f for f in factors if f is not rows[0]]
    core = rest[0]
    for f in rest[1:]:
        core = ops.multiply(core, f)
    return Norm(core, factor, total)


def in_tiles(rows: int) -> bool:
    """Whether rows are one tile or two: of those between, one tile has more consumers, whose
    registers do not hold what all rows are scaled by."""
    return rows <= TILE_ROWS or FITTED < rows <= 2 * TILE_ROWS


def block_of(columns: int, rows: int, cores: int) -> int:
    """Columns of a block: as many as the tile has that a core computes of a row, where cores can
    share a row evenly; for few rows, as many as a tile has rows of the weights."""
    tiles = -(-rows // TILE_ROWS)
    share = -(-columns * tiles // cores)
    even = -(-share // 8) * 8
    if rows > FEW_ROWS and EVEN[0] <= even <= EVEN[1] * tiles and columns % even == 0:
        return even
    return WIDE if rows <= WIDE else NARROW


def in_blocks(norm: Norm, cores: int) -> Node:
    """The factor, its sum cut into sums over blocks."""
    square = norm.total.inputs[0]
    *lead, columns = square.shape
    rows = high(product(tuple(lead)))
    if rows == 1:
        return norm.factor  # every program has the whole row
    block = block_of(columns, rows, cores)
    folded = build.reshape(square, (*lead, columns // block, block))
    parts = ops.sum_(folded, axes=(len(lead) + 1,))
    whole = ops.sum_(parts, axes=(len(lead),))
    return replace([norm.factor], {norm.total: whole})[0]


def _reads_rows(reader: Node, node: Node) -> bool:
    """Whether a reader is a product that takes a value's rows, as its first operand."""
    if reader.op is not ops.dot or reader.inputs[0] is not node or reader.inputs[1] is node:
        return False
    batch, contract = reader.attrs["batch"], reader.attrs["contract"]
    weight = reader.inputs[1]
    plain = batch == ((), ()) and contract[0] == (len(node.shape) - 1,)
    return plain and weight.dtype is bfloat16 and len(weight.shape) == 2


def _behind(dot: Node, cores: int) -> Node:
    """The product of a norm's core, times the norm's factor."""
    norm = norm_of(dot.inputs[0])
    if norm is None:
        raise InternalError("compiler.norms", f"{dot.inputs[0]!r} is a norm no longer")
    attrs = {**dot.attrs, "dtype": float32}
    made = ops.dot(build.cast(norm.core, bfloat16), dot.inputs[1], **attrs)
    factor = build.expand(in_blocks(norm, cores), made.shape)
    return build.cast(ops.multiply(made, factor), dot.dtype)


def norms_behind_products(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None = None
) -> list[Node]:
    """The pass."""
    order = topological(results)
    readers = users(order)
    done: dict[Node, Node] = {}
    for node in order:
        done[node] = rebuild(node, done)
        if node.op is not ops.dot or norm_of(node.inputs[0]) is None:
            continue
        norm = node.inputs[0]
        if norm not in results and all(_reads_rows(r, norm) for r in readers[norm]):
            done[node] = _behind(done[node], target.cores if target else 1)
            log.count(RULE)
    return [done[r] for r in results]
