"""How many instructions of a GPU one element of a value takes.

Divisions and roots that are rounded exactly are counted apart, with branches: they have a slow
path, and an assembler that has many sums in registers needs long for each. Invariant: what is
emitted for a float32 is at most twice what the table says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..core.dtype import float64
from ..graph import ops
from ..ir.node import Node, Op, walk
from ..ir.symbol import high
from ..ir.types import product
from .access import MOVEMENT

EXACT = 96  # what an exactly rounded division or root weighs, in instructions that do not branch
QUICK = {ops.divide, ops.reciprocal, ops.sigmoid}  # without a slow path where 16 bits are seen
# (instructions; divisions, roots, branches) of a float32 element, for ops that take more than one
INSTRUCTIONS: dict[Op, tuple[int, int]] = {
    ops.exp: (6, 0),
    ops.log: (30, 0),
    ops.expm1: (22, 0),
    ops.log1p: (38, 0),
    ops.sin: (57, 1),
    ops.cos: (57, 1),
    ops.tan: (51, 2),
    ops.asin: (52, 5),
    ops.acos: (52, 5),
    ops.atan: (23, 1),
    ops.tanh: (16, 0),
    ops.sigmoid: (10, 1),
    ops.erf: (24, 0),
    ops.erf_inverse: (74, 3),
    ops.power: (116, 2),
    ops.atan2: (48, 4),
    ops.sign: (5, 0),
    ops.divide: (1, 1),
    ops.reciprocal: (1, 1),
    ops.square_root: (1, 1),
    ops.remainder: (37, 3),
    ops.floor_divide_: (50, 5),
}


def instructions(stored: Iterable[Node], known: set[Node], rounded: set[Node]) -> int:
    """About how many instructions compute one element of values, from those that are known."""
    found = list(stored)
    each = [i for n in found for i in (n.inputs if n.op.category == "reduce" else (n,))]
    size = max((product(n.shape) for n in each), key=high, default=0)
    total = 0  # what is one for a row counts little
    for node in evaluated([n for n in found if n not in known], known):
        if node in known or node.op in MOVEMENT or not node.inputs or product(node.shape) == 1:
            continue
        plain, exact = INSTRUCTIONS.get(node.op, (1, 0))
        short = node in rounded or node.dtype.bits <= 16
        quick = node.dtype.is_integer or (short and node.op in QUICK)
        plain *= 2 if node.dtype is float64 else 1
        total += plain + EXACT * (0 if quick or product(node.shape) != size else exact)
    return total


def evaluated(stored: Iterable[Node], known: set[Node]) -> Iterator[Node]:
    """The Nodes that one element of some values takes, as often as each is read or computed.

    What is reached over different movements is read at different elements, so it is computed for
    each; what is reached twice over the same ones, once. Nothing below what is known is computed,
    but once below those of it that are asked for.
    """
    moves: dict[tuple[int, Node], int] = {}  # a way down through movements has a number
    roots = dict.fromkeys(stored)

    def step(at: tuple[Node, int]) -> Sequence[tuple[Node, int]]:
        node, way = at
        if node in known and (way or node not in roots):
            return ()
        if node.op in MOVEMENT:
            way = moves.setdefault((way, node), len(moves) + 1)
        return [(i, way) for i in node.inputs]

    return (node for node, _ in walk([(node, 0) for node in roots], step))


def weight_of(node: Node) -> int:
    """What a Node counts in a Region, in the least that one counts: an addition counts 1, and a
    Region of many such fills a program as one of fewer costly functions does."""
    plain, exact = INSTRUCTIONS.get(node.op, (1, 0))
    return max(1, (plain + 24 * exact) * 2 // 5)
