"""What a launch moves and what it is for, noted in a Recipe for profiles.

Invariant: counts come from shapes alone; of an array that is only gathered from, what is gathered
counts, and not the array.
"""

from __future__ import annotations

from ..graph import ops
from ..ir.node import Node, topological
from ..ir.symbol import Size, high, multiply
from ..ir.types import Array, product
from ..schedule.schedule import Copy, Kernel, Launch

LONGEST = 72  # characters of a Region's text


def moved(kernel: Kernel) -> Size:
    """Bytes that a Kernel reads and writes."""
    reads, stored = kernel.region
    gathered = _gathered(reads, stored)
    if not gathered:
        return kernel.bytes
    total = kernel.bytes
    for read, size in gathered.items():
        whole = _bytes(read)
        if high(size) < high(whole):
            total = total - whole + size
    return total


def _gathered(reads: tuple[Node, ...], stored: tuple[Node, ...]) -> dict[Node, Size]:
    """Bytes taken from reads that nothing but gathers use."""
    stop = set(reads)
    found: dict[Node, Size] = {}
    others: set[Node] = set()
    for node in topological(stored, stop=lambda n: n in stop):
        if node in stop:
            continue
        for place, value in enumerate(node.inputs):
            if node.op is ops.gather and place == 0 and value in stop:
                found[value] = found.get(value, 0) + _bytes(node)
            else:
                others.add(value)
    return {read: size for read, size in found.items() if read not in others}


def _bytes(node: Node) -> Size:
    if not isinstance(node.type, Array):
        return 0
    return multiply(product(node.shape), node.dtype.size)


def shares(kernel: Kernel) -> list[tuple[Size, Size]]:
    """(bytes, FLOPs) of each launch of a Kernel; several share them evenly."""
    count = sum(isinstance(step, Launch) for step in kernel.steps)
    if not count:
        return []
    size, flops = moved(kernel), kernel.flops
    if count == 1:
        return [(size, flops)]
    return [(high(size) // count, high(flops) // count)] * count


def region_text(kernel: Kernel) -> str:
    """The ops of a Kernel and its results, in short."""
    reads, stored = kernel.region
    stop = set(reads)
    inside = [n for n in topological(stored, stop=lambda n: n in stop) if n not in stop]
    names = list(dict.fromkeys(n.op.name for n in inside if n.op.category not in ("leaf", "tuple")))
    types = ", ".join(repr(n.type) for n in stored[:2])
    text = f"{kernel.kind}: {' '.join(names)}"
    room = LONGEST - len(types) - 4
    text = text if len(text) <= room else text[: room - 3] + "..."
    return f"{text} -> {types}"


def copy_text(copy: Copy) -> str:
    """The same of a plain copy."""
    return f"copy of {copy.bytes} bytes"


__all__ = ["copy_text", "moved", "region_text", "shares"]
