"""Memory planning: Slots whose lives do not meet share bytes of one arena.

A life is a run of Kernel numbers. What a loop reads from outside, or leaves behind, lives over
the whole loop; Slots that a loop swaps live as one. Invariant: two scratch Slots that live at
the same Kernel never overlap; offsets are multiples of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .schedule import Schedule, Slot, slots_of

LINE = 64
Life = tuple[int, int]


def set_lives(
    schedule: Schedule, loops: Sequence[Life] = (), pairs: Sequence[tuple[int, int]] = (),
    always: Iterable[int] = (),
) -> None:  # fmt: skip
    """First and last Kernel of each Slot: as touched, widened over `loops` (inner ones first),
    equal for `pairs` that are swapped, all of the run for `always`. Aliases count for owners."""
    last = len(schedule.kernels)
    lives: dict[int, Life] = {}
    touched = [(n, s) for n, k in enumerate(schedule.kernels) for x in k.steps for s in slots_of(x)]
    touched += [(last, out) for out in schedule.outputs]
    touched += [(n, s) for s in always for n in (0, last)]
    for number, slot in touched:
        _widen(lives, schedule.storage(slot), (number, number))
    before: dict[int, Life] = {}
    while before != lives:
        before = dict(lives)
        for a, b in pairs:
            found = [lives[x] for x in (schedule.storage(a), schedule.storage(b)) if x in lives]
            for x in (a, b):
                for life in found:
                    _widen(lives, schedule.storage(x), life)
        for loop in loops:
            for slot, (first, end) in lives.items():
                meets = first <= loop[1] and loop[0] <= end
                if meets and not (loop[0] <= first and end <= loop[1]):
                    _widen(lives, slot, loop)
    for found_slot in schedule.slots:
        found_slot.first, found_slot.last = lives.get(found_slot.number, (0, -1))


def _widen(lives: dict[int, Life], slot: int, life: Life) -> None:
    first, end = lives.get(slot, life)
    lives[slot] = (min(first, life[0]), max(end, life[1]))


def plan_memory(schedule: Schedule) -> int:
    """Give every scratch Slot an offset, largest first; returns the arena's bytes (the peak)."""
    placed: list[Slot] = []
    top = 0
    waiting = [s for s in schedule.slots
               if s.kind == "scratch" and s.alias is None and s.first <= s.last]  # fmt: skip
    for slot in sorted(waiting, key=lambda s: (-s.bytes, s.number)):
        neighbours = sorted(
            (s for s in placed if s.first <= slot.last and slot.first <= s.last),
            key=lambda s: s.offset or 0,
        )
        offset = 0
        for other in neighbours:
            assert other.offset is not None
            if offset + slot.bytes <= other.offset:
                break
            offset = max(offset, -(-(other.offset + other.bytes) // LINE) * LINE)
        slot.offset = offset
        placed.append(slot)
        top = max(top, offset + slot.bytes)
    schedule.arena_bytes = -(-top // LINE) * LINE
    return schedule.arena_bytes
