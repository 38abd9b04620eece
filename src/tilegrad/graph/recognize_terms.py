"""Values as sums of terms: what reading a softmax and reading scores share.

Movement, casts between floats and constant factors are read through. Invariant: the terms add
up to the value, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..core.dtype import bool_
from ..ir.node import Node
from . import build, ops
from .axes import ELEMENTWISE, Atoms, Indices, on_atoms, strip
from .recognize_mask import known


class NoMatch(Exception):
    """Why something that looks like attention is not; `quiet` where it hardly looks so."""

    def __init__(self, reason: str, quiet: bool = False) -> None:
        super().__init__(reason)
        self.quiet = quiet


class Term(NamedTuple):
    """factor * value."""

    factor: float
    node: Node
    indices: Indices


def terms(node: Node, indices: Indices, factor: float = 1.0) -> list[Term]:
    """A value as a sum of terms, through movement, casts and constant factors."""
    node, indices = strip(node, indices)
    op = node.op
    if abs(factor) != 1.0 and not holds_dot(node):
        return [Term(factor, node, indices)]  # c * (1 - mask) is not c - c * mask for a large c
    if op is ops.add or op is ops.subtract:
        a, b = node.inputs
        other = factor if op is ops.add else -factor
        return [*terms(a, indices, factor), *terms(b, indices, other)]
    if op is ops.negative:
        return terms(node.inputs[0], indices, -factor)
    scaled = constant_factor(node, indices)
    usual = scaled is not None and scaled[0] != 0.0 and math.isfinite(scaled[0])
    if scaled is not None and usual and holds_dot(scaled[1]):
        return terms(scaled[1], indices, factor * scaled[0])
    return [Term(factor, node, indices)]


def constant_factor(node: Node, indices: Indices) -> tuple[float, Node] | None:
    """x * c or x / c as (c, x)."""
    if node.op is ops.multiply:
        for a, b in (node.inputs, node.inputs[::-1]):
            value = known(b, indices)
            if value is not None:
                return float(value), a
    if node.op is ops.divide:
        value = known(node.inputs[1], indices)
        if value:
            return 1.0 / float(value), node.inputs[0]
    return None


def summed(found: Sequence[Term], axes: Atoms) -> Node:
    """The sum of terms with one axis for each Atom (see `on_atoms`)."""
    total: Node | None = None
    for term in found:
        value = on_atoms(term.node, term.indices, axes)
        if term.factor != 1.0:
            value = build.multiply(value, term.factor)
        total = value if total is None else build.add(total, value)
    if total is None:
        raise NoMatch("nothing to add")
    return total


def holds_dot(node: Node) -> bool:
    """Whether elementwise ops and movement lead down to a dot."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op is ops.dot:
            return True
        if node.op.category in ELEMENTWISE or node.op.category == "movement":
            stack.extend(i for i in node.inputs if i.dtype is not bool_)
    return False
