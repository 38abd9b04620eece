"""Where masks change: what is seen of them says which runs of elements they never cut.

Invariant: a run that is called uncut has one value of its mask in every thread.
"""

from __future__ import annotations

import math

from ...ir.node import Node
from ...tile.bounds import Bounds
from .moves import Run
from .spread import Spread


def grain(bounds: Bounds, node: Node, axis: int) -> int:
    """Aligned groups of so many elements along an axis have one value of a mask: 0 for all.

    `less` of counted places and a bound both divisible by n changes only at multiples of n.
    """
    if node.shape == () or node.shape[axis] == 1 or node.op.name == "constant":
        return 0
    name = node.op.name
    if name == "broadcast":
        inner = axis - len(node.shape) + len(node.inputs[0].shape)
        return grain(bounds, node.inputs[0], inner) if inner >= 0 else 0
    if (
        name == "reshape"
        and node.shape[axis] == node.inputs[0].shape[-1]
        and (axis == len(node.shape) - 1)
    ):
        return grain(bounds, node.inputs[0], len(node.inputs[0].shape) - 1)
    if name in ("bit_and", "bit_or", "bit_xor", "bit_not"):
        return math.gcd(*(grain(bounds, i, axis) for i in node.inputs))
    if name in ("less", "less_equal"):
        counted, bound = node.inputs if name == "less" else reversed(node.inputs)
        start = counts(bounds, counted, axis)
        if start is not None and constant_along(bound, axis):
            return math.gcd(start, bounds.divisor(bound))
    return 1


def counts(bounds: Bounds, node: Node, axis: int) -> int | None:
    """What divides the start of a value that counts up along an axis; None where it does
    something else."""
    name = node.op.name
    if node.shape == () or node.shape[axis] == 1:
        return None
    if name == "iota":
        return 0
    if name == "broadcast":
        inner = axis - len(node.shape) + len(node.inputs[0].shape)
        return counts(bounds, node.inputs[0], inner) if inner >= 0 else None
    if name == "cast":
        return counts(bounds, node.inputs[0], axis)
    if name == "add":
        for one, other in (node.inputs, node.inputs[::-1]):
            start = counts(bounds, one, axis)
            if start is not None and constant_along(other, axis):
                return math.gcd(start, bounds.divisor(other))
    return None


def constant_along(node: Node, axis: int) -> bool:
    """Whether a value does not change along an axis."""
    if node.shape == () or node.shape[axis] == 1 or node.op.name == "constant":
        return True
    if node.op.name == "broadcast":
        inner = axis - len(node.shape) + len(node.inputs[0].shape)
        return inner < 0 or constant_along(node.inputs[0], inner)
    return node.op.category in ("unary", "binary") and all(
        constant_along(i, axis) for i in node.inputs
    )


def uncut(bounds: Bounds, mask: Node, spread: Spread, runs: list[Run]) -> bool:
    """Whether every run is wholly inside or outside of a mask."""
    for start, count in runs:
        if count == 1:
            continue
        run = spread.registers[start : start + count]
        for axis in range(len(spread.shape)):
            coordinates = sorted({at[axis] for at in run})
            many = len(coordinates)
            if many == 1:
                continue
            align = coordinates[0]
            for _, _, a, stride in spread.fields:
                align = math.gcd(align, stride) if a == axis else align
            near = coordinates == list(range(coordinates[0], coordinates[0] + many))
            if not near or align % many or grain(bounds, mask, axis) % many:
                return False
    return True
