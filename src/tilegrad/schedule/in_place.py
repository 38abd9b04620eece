"""In place: an elementwise result takes over the storage of an input that dies there.

Only flat Kernels do this, where each element of the input is read exactly where its element of
the result is written, and the result is the last the Kernel stores. A Kernel that only gives
elements another shape has no launch left then. Invariant: nobody reads the input after it was
overwritten.
"""

from __future__ import annotations

from ..ir.node import Node
from ..ir.symbol import loop_index
from .access import base_of, ravel, unravel
from .lowering import Lowering
from .region import Region, reads_of
from .reuse import find_lives
from .schedule import Kernel, Launch, Schedule, Slot


def take_over(lowering: Lowering, schedule: Schedule) -> None:
    """The pass: results take over dying inputs, and lives are found anew."""
    count = 0
    for number, kernel in enumerate(schedule.kernels):
        if any(first <= number <= last for first, last in lowering.frame.loops):
            continue
        count += _kernel(schedule, number, kernel, lowering.fuser.values)
    if count:
        find_lives(lowering, schedule)


def _kernel(schedule: Schedule, number: int, kernel: Kernel, values: set[Node]) -> int:
    region = kernel.notes.get("region")
    if not isinstance(region, Region) or region.kind != "loops" or region.rows is not None:
        return 0
    if len(kernel.steps) != 1 or not isinstance(kernel.steps[0], Launch):
        return 0
    reads, stored = kernel.region
    slots = kernel.steps[0].slots
    result = schedule.slots[slots[-1]]
    if not stored or result.kind != "scratch" or result.alias is not None:
        return 0
    for read, at in zip(reads, slots):
        owner = schedule.slots[schedule.storage(at)]
        if _may_take(result, owner, number) and at_own_element(region, read, values):
            result.alias = owner.number
            owner.last = max(owner.last, result.last)
            if len(stored) == 1 and only_moves(stored[0], read):
                kernel.steps.clear()  # every element is where it was: another shape, no work
            return 1
    return 0


def only_moves(node: Node, read: Node) -> bool:
    """Whether a value is another one's elements, moved and nothing else."""
    return base_of(node, {read}) is read


def _may_take(result: Slot, owner: Slot, number: int) -> bool:
    same = owner.type.dtype.size == result.type.dtype.size and owner.bytes == result.bytes
    return owner.kind == "scratch" and owner.first < number == owner.last and same


def at_own_element(region: Region, read: Node, values: set[Node]) -> bool:
    """Whether a Region reads a value only at the element it is writing."""
    column = loop_index("column", region.total)
    starts = [(v, unravel(column, v.shape)) for v in region.stored]
    return all(
        index is not None and ravel(index, node.shape) == column
        for node, index in reads_of(starts, values, set(region.values))
        if node is read
    )
