"""Split long reductions with few results into parts that can run side by side.

sum over n becomes a sum over `parts` of sums over n / parts. The number of parts depends on the
shape alone, so the order of additions does not depend on the number of workers. On a GPU the place
of the largest of few long rows (the next token of an answer) is found in parts too. Concatenations
of many parts become ones of few.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..ir.symbol import high
from ..ir.types import product
from ..schedule.region import JOINED, has_many_parts, lies_in_line

PARTS = 32
LEAST_ELEMENTS = 1 << 15  # elements of a reduction worth splitting


def _split(m: Match) -> Node | None:
    node = m.root
    x, axes = node.inputs[0], node.attrs["axes"]
    rows = product(node.shape)
    count = product(tuple(x.shape[a] for a in axes))
    if not all(isinstance(s, int) for s in x.shape) or count < LEAST_ELEMENTS:
        return None  # rows of a norm stay whole: one launch that reads them once
    if rows >= PARTS:
        return None
    kept = [i for i in range(len(x.shape)) if i not in axes]
    if kept and max(kept) > min(axes):
        return None  # only trailing reductions: others are swept by columns
    parts = next((p for p in range(PARTS, 1, -1) if count % p == 0), None)
    if parts is None:
        return None
    shape = tuple(x.shape[i] for i in kept)
    folded = build.reshape(x, (*shape, parts, count // parts))
    inner = node.op(folded, axes=(len(shape) + 1,))
    return build.reshape(node.op(inner, axes=(len(shape),)), node.shape)


SPLIT = RuleSet(
    "split",
    [Rule(f"split_{op.name}", op, _split) for op in (ops.sum_, ops.max_, ops.min_, ops.prod)],
)


def _split_argmax(m: Match) -> Node | None:
    """The first of the parts with the largest value, and the first place of it there."""
    node = m.root
    x, axis = node.inputs[0], node.attrs["axis"]
    *lead, count = x.shape
    if axis != len(lead) or not isinstance(count, int) or count < LONG_ROW:
        return None
    if high(product(tuple(lead))) > FEW_ROWS:
        return None
    parts = next((p for p in range(MOST_PARTS, 1, -1) if count % p == 0), None)
    if parts is None:
        return None
    folded = build.reshape(x, (*lead, parts, count // parts))
    best = ops.max_(folded, axes=(axis + 1,))
    place, which = ops.argmax(folded, axis=axis + 1), ops.argmax(best, axis=axis)
    numbers = build.iota_along((*lead, parts), axis)
    mine = build.equal(numbers, build.unsqueeze(which, axis))
    found = ops.sum_(build.where(mine, place, build.like(place, 0)), axes=(axis,))
    return build.add(build.multiply(which, count // parts), found)


FEW_ROWS, LONG_ROW, MOST_PARTS = 128, 1 << 14, 64  # rows, elements of one, parts of one
ARGMAX = RuleSet("split argmax", [Rule("split_argmax", ops.argmax, _split_argmax)])


def _split_parts(m: Match) -> Node | None:
    """A concatenation of many parts that do not lie behind one another: one of ones of few."""
    node = m.root
    if not has_many_parts(node) or lies_in_line(node):
        return None
    axis, parts = node.attrs["axis"], node.inputs
    return build.concatenate(
        [build.concatenate(parts[at : at + JOINED], axis) for at in range(0, len(parts), JOINED)],
        axis,
    )


PARTED = RuleSet("parts", [Rule("split_parts", ops.concatenate, _split_parts)])


def split_parts(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass: no Kernel asks of an element which of many parts it is of."""
    return rewrite(results, PARTED, log)


def split_argmax(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass for programs of threads."""
    return rewrite(results, ARGMAX, log)


def split_reductions(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    return rewrite(results, SPLIT, log)
