"""Write dots with a side of one row as reductions: they stream a matrix, nothing is reused.

A product of a vector and a matrix reads every element of the matrix once, so packing it would
only copy it. As a sum of products it becomes one pass over memory. Runs after recognition.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import accumulator
from ..graph import build, ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..ir.types import product


def _thin(m: Match) -> Node | None:
    node = m.root
    a, b = node.inputs
    batch, contract = node.attrs["batch"], node.attrs["contract"]
    free_a = [i for i in range(len(a.shape)) if i not in batch[0] + contract[0]]
    free_b = [i for i in range(len(b.shape)) if i not in batch[1] + contract[1]]
    rows = product(tuple(a.shape[i] for i in free_a))
    columns = product(tuple(b.shape[i] for i in free_b))
    if rows != 1 and columns != 1:
        return None
    if not contract[0]:
        return None
    keep = accumulator(node.inputs[0].dtype)
    left = build.permute(build.cast(a, keep), [*batch[0], *free_a, *contract[0]])
    right = build.permute(build.cast(b, keep), [*batch[1], *free_b, *contract[1]])
    lead = tuple(a.shape[i] for i in batch[0])
    inner = tuple(a.shape[i] for i in contract[0])
    shape_a = (*lead, *(a.shape[i] for i in free_a), *(1 for _ in free_b), *inner)
    shape_b = (*lead, *(1 for _ in free_a), *(b.shape[i] for i in free_b), *inner)
    total = build.multiply(build.reshape(left, shape_a), build.reshape(right, shape_b))
    rank = len(lead) + len(free_a) + len(free_b)
    axes = range(rank, rank + len(inner))
    return build.cast(build.sum_(total, tuple(axes)), node.dtype)


THIN = RuleSet("thin", [Rule("dot_of_a_row", ops.dot, _thin)])


def thin_dots(arguments: Sequence[Node], results: list[Node], log: Log) -> list[Node]:
    """The pass."""
    return rewrite(results, THIN, log)
