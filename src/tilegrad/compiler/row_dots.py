"""Write dots with a side of one row as reductions: they stream a matrix, nothing is reused.

A product of a vector and a matrix reads every element of the matrix once, so packing it would
only copy it. As a sum of products it becomes one pass over memory. A dot over an axis of one
element is a plain product, whatever its other sizes. Runs after recognition. On a GPU, rows too
long for the registers of a program stay dots where the library has a kernel that streams them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import accumulator, bfloat16, float8_e4m3, float16, int8
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..ir.symbol import high
from ..ir.types import product
from ..schedule.values import streams


def _as_sum(m: Match) -> Node | None:
    node = m.root
    a, b = node.inputs
    batch, contract = node.attrs["batch"], node.attrs["contract"]
    free_a = [i for i in range(len(a.shape)) if i not in batch[0] + contract[0]]
    free_b = [i for i in range(len(b.shape)) if i not in batch[1] + contract[1]]
    rows = product(tuple(a.shape[i] for i in free_a))
    columns = product(tuple(b.shape[i] for i in free_b))
    if rows != 1 and columns != 1 and contract[0]:
        return None
    keep = accumulator(node.inputs[0].dtype)
    matrix, side = (b, 1) if rows == 1 else (a, 0)
    inner_last = bool(contract[side]) and max(contract[side]) == len(matrix.shape) - 1
    lead = tuple(a.shape[i] for i in batch[0])
    inner = tuple(a.shape[i] for i in contract[0])
    sides = []
    for x, s, free, own in ((a, 0, free_a, 0), (b, 1, free_b, 1)):
        sizes = tuple(x.shape[i] for i in free)
        ones_a, ones_b = (1,) * len(free_a), (1,) * len(free_b)
        outer = (*sizes, *ones_b) if own == 0 else (*ones_a, *sizes)
        axes = [*batch[s], *free, *contract[s]] if inner_last else [*batch[s], *contract[s], *free]
        shape = (*lead, *outer, *inner) if inner_last else (*lead, *inner, *outer)
        sides.append(build.reshape(build.permute(build.cast(x, keep), axes), shape))
    start = len(lead) + (len(free_a) + len(free_b) if inner_last else 0)
    total = build.multiply(*sides)
    if inner:
        total = build.sum_(total, tuple(range(start, start + len(inner))))
    return build.cast(total, node.dtype)


def _short_as_sum(m: Match) -> Node | None:
    node = m.root
    inner = product(tuple(node.inputs[0].shape[i] for i in node.attrs["contract"][0]))
    lead = product(tuple(node.inputs[0].shape[i] for i in node.attrs["batch"][0]))
    a, b = node.inputs
    low_bits = a.dtype in (bfloat16, float16) and a.dtype is b.dtype
    library = streams(node) and high(b.shape[0]) >= STREAMED_ROWS
    streamed = low_bits and (high(inner) > LONGEST or library)
    streamed |= a.dtype is b.dtype and a.dtype in (float8_e4m3, int8)  # matrix units take the codes
    streamed &= not any(_is_picked(x) for x in (a, b))
    streamed &= product(node.shape) != lead and bool(node.attrs["contract"][0])
    return None if streamed else _as_sum(m)


def _is_picked(x: Node) -> bool:
    """Whether a matrix is rows of another by number: the library would have it copied first."""
    while x.op in (ops.reshape, ops.permute, ops.cast):
        x = x.inputs[0]
    return x.op is ops.gather


STREAMED_ROWS = 256  # rows of a matrix that the library streams
LONGEST = 6144  # elements of a row that a program of a GPU holds well
ROWS = RuleSet("dots of a row", [Rule("dot_of_a_row", ops.dot, _as_sum)])
SHORT_ROWS = RuleSet("dots of a short row", [Rule("dot_of_a_short_row", ops.dot, _short_as_sum)])


def dots_of_a_row(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass; a product that an array takes stays one, whatever its rows, and one of bytes where
    a kernel streams them."""
    if target is None or (target.array is None and not target.multiplies_bytes):
        return rewrite(results, ROWS, log)
    from ..schedule.array_steps import takes_product
    from ..schedule.dot_bytes import of_bytes, streams_bytes

    def not_taken(m: Match) -> Node | None:
        if target.array is None:
            taken = of_bytes(m.root) and streams_bytes(m.root)
        else:
            taken = not takes_product(m.root, target)
        return None if taken else _as_sum(m)

    return rewrite(results, RuleSet(ROWS.name, [Rule("dot_of_a_row", ops.dot, not_taken)]), log)


def dots_of_a_short_row(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass for programs of threads, where longer rows have kernels of the library."""
    return rewrite(results, SHORT_ROWS, log)
