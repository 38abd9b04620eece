"""Joining many arrays: each part is copied to its place, by no Kernel of its own.

A concatenation of few parts is computed where it is read, each element asking which part it is of.
Of many parts that would be much code and much asking. Where parts lie behind one another in
memory, they are copied there as they are; `compiler/split.py` cuts other concatenations of many
parts into ones of few. Invariant: every byte of the result is copied once.
"""

from __future__ import annotations

from ..graph import ops
from ..ir.node import Node
from ..ir.types import product

FEW = 16  # parts of a concatenation that is computed where it is read


def has_many_parts(node: Node) -> bool:
    """Whether a Node is a concatenation that is not computed where it is read."""
    return node.op is ops.concatenate and len(node.inputs) > FEW


def joins(node: Node) -> bool:
    """Whether a Node is a concatenation of many parts that lie behind one another."""
    return has_many_parts(node) and lies_in_line(node)


def lies_in_line(node: Node) -> bool:
    """Whether the parts of a concatenation lie behind one another in memory."""
    known = all(isinstance(size, int) for x in node.inputs for size in x.shape)
    return known and product(node.shape[: node.attrs["axis"]]) == 1


def stored_part(node: Node) -> Node:
    """The value whose bytes a part is: another shape has the same ones."""
    while node.op is ops.reshape:
        node = node.inputs[0]
    return node
