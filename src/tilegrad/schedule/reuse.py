"""Memory planning: Slots whose lives do not meet share bytes of one arena.

A life is a run of Kernel numbers. What a loop reads from outside, or leaves behind, lives over
the whole loop; Slots that a loop swaps live as one. An elementwise result takes over the storage of
an input that dies there: only in flat Kernels, where each element of the input is read exactly
where its element of the result is written, and the result is the last the Kernel stores. A Kernel
that only gives elements another shape has no launch left then. Invariant: two scratch Slots that
live at the same Kernel never overlap, and nobody reads what was overwritten; offsets are multiples
of 64 bytes.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from ..ir.node import Node
from ..ir.symbol import loop_index, round_up
from .access import base_of, ravel, unravel
from .lowering import Lowering
from .region import Region, reads_of
from .schedule import Kernel, Launch, Schedule, Slot

LINE = 64
FAR = 1 << 62  # behind all places
MANY = 2048  # scratch Slots, from which on each is not held against all others
Life = tuple[int, int]


def find_lives(lowering: Lowering, schedule: Schedule) -> None:
    """The pass: first and last Kernel of each Slot: as touched, widened over loops (inner ones
    first), equal for pairs that are swapped, all of the run for those that jumps read. Aliases
    count for owners."""
    frame, last = lowering.frame, len(schedule.kernels)
    lives: dict[int, Life] = {}
    touched = [(n, s) for n, k in enumerate(schedule.kernels) for x in k.steps for s in x.slots]
    touched += [(last, out) for out in schedule.outputs]
    touched += [(n, s) for s in frame.always for n in (0, last)]
    for number, slot in touched:
        widen(lives, schedule.storage(slot), (number, number))
    before: dict[int, Life] = {}
    while before != lives:
        before = dict(lives)
        for pair in frame.pairs:
            for slot, other in permutations(map(schedule.storage, pair)):
                if other in lives:
                    widen(lives, slot, lives[other])
        for loop in frame.loops:
            for slot, (first, end) in lives.items():
                meets = first <= loop[1] and loop[0] <= end
                if meets and not (loop[0] <= first and end <= loop[1]):
                    widen(lives, slot, loop)
    for found_slot in schedule.slots:
        found_slot.first, found_slot.last = lives.get(found_slot.number, (0, -1))


def plan_arena(lowering: Lowering, schedule: Schedule) -> None:
    """The pass: an offset in the arena for each scratch Slot."""
    plan_memory(schedule)


def widen(lives: dict[int, Life], slot: int, life: Life) -> None:
    """Let a Slot live over some Kernels too."""
    first, end = lives.get(slot, life)
    lives[slot] = (min(first, life[0]), max(end, life[1]))


def plan_memory(schedule: Schedule) -> None:
    """Give every scratch Slot an offset in the arena of its Device."""
    waiting: dict[str, list[Slot]] = {"": []}
    for s in schedule.slots:
        if s.kind == "scratch" and s.alias is None and s.first <= s.last:
            waiting.setdefault(s.device, []).append(s)
    for device, slots in waiting.items():
        top = largest_first(slots) if len(slots) <= MANY else in_turn(slots)
        schedule.arenas[device] = round_up(top, LINE)
    schedule.arena_bytes = schedule.arenas.pop("")


def largest_first(waiting: Sequence[Slot]) -> int:
    """Each Slot, largest first, at the lowest place free over its life: tight, and each looks at
    all that were placed before."""
    placed = np.empty((4, 0), np.int64)  # starts, ends, first and last Kernels, by their starts
    for slot in sorted(waiting, key=lambda s: (-s.bytes, s.number)):
        living = (placed[2] <= slot.last) & (placed[3] >= slot.first)
        free = np.maximum.accumulate(np.append(0, placed[1, living]))  # behind all before
        fits = np.append(placed[0, living], FAR) - free >= slot.bytes
        slot.offset = int(free[fits.argmax()])
        end = round_up(slot.offset + slot.bytes, LINE)
        at = placed[0].searchsorted(slot.offset)
        placed = np.insert(placed, at, (slot.offset, end, slot.first, slot.last), axis=1)
    return int(placed[1].max(initial=0))


def in_turn(waiting: Sequence[Slot]) -> int:
    """Slots in the order they are written, each in the first gap that holds it: for many."""
    gaps: list[tuple[int, int]] = []  # (offset, bytes) below the top, in order, none touching
    ending: list[tuple[int, int, Slot]] = []
    top = 0
    for slot in sorted(waiting, key=lambda s: (s.first, -s.bytes, s.number)):
        while ending and ending[0][0] < slot.first:
            over = heapq.heappop(ending)[2]
            assert over.offset is not None
            _give_back(gaps, over.offset, round_up(over.bytes, LINE))
        size = round_up(slot.bytes, LINE)
        at = next((i for i, gap in enumerate(gaps) if gap[1] >= size), None)
        if at is None:
            slot.offset, top = top, top + size
        else:
            slot.offset, room = gaps[at]
            gaps[at : at + 1] = [(slot.offset + size, room - size)] if room > size else []
        heapq.heappush(ending, (slot.last, slot.number, slot))
    return top


def _give_back(gaps: list[tuple[int, int]], offset: int, size: int) -> None:
    """Add a gap, as one with those that it touches."""
    at = bisect.bisect(gaps, (offset, size))
    if at < len(gaps) and offset + size == gaps[at][0]:
        size += gaps.pop(at)[1]
    if at and sum(gaps[at - 1]) == offset:
        at -= 1
        offset, size = gaps[at][0], gaps.pop(at)[1] + size
    gaps.insert(at, (offset, size))


# ---- in place ------------------------------------------------------------------------------------


def take_over(lowering: Lowering, schedule: Schedule) -> None:
    """The pass: results take over dying inputs, and lives are found anew."""
    count = 0
    for number, kernel in enumerate(schedule.kernels):
        if any(first <= number <= last for first, last in lowering.frame.loops):
            continue
        count += _kernel(schedule, number, kernel)
    if count:
        find_lives(lowering, schedule)


def _kernel(schedule: Schedule, number: int, kernel: Kernel) -> int:
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
        same = owner.type.dtype.size == result.type.dtype.size and owner.bytes == result.bytes
        dies = owner.kind == "scratch" and owner.first < number == owner.last
        if same and dies and at_own_element(region, read):
            result.alias = owner.number
            owner.last = max(owner.last, result.last)
            if len(stored) == 1 and only_moves(stored[0], read):
                kernel.steps.clear()  # every element is where it was: another shape, no work
            return 1
    return 0


def only_moves(node: Node, read: Node) -> bool:
    """Whether a value is another one's elements, moved and nothing else."""
    return base_of(node, {read}) is read


def at_own_element(region: Region, read: Node) -> bool:
    """Whether a Region reads a value only at the element it is writing."""
    column = loop_index("column", region.total)
    starts = [(v, unravel(column, v.shape)) for v in region.stored]
    return all(
        index is not None and ravel(index, node.shape) == column
        for node, index in reads_of(starts, region.known, set(region.values))
        if node is read
    )
