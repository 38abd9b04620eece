"""Memory planning: Slots whose lives do not meet share bytes of one arena.

Invariant: two scratch Slots that live at the same Kernel never overlap; offsets are multiples
of 64 bytes.
"""

from __future__ import annotations

from .schedule import Schedule, Slot

LINE = 64


def plan_memory(schedule: Schedule) -> int:
    """Give every scratch Slot an offset, largest first; returns the arena's bytes (the peak)."""
    placed: list[Slot] = []
    top = 0
    waiting = [s for s in schedule.slots if s.kind == "scratch" and s.alias is None]
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


def lower_bound(schedule: Schedule) -> int:
    """Bytes alive at once at the busiest Kernel: no plan can need less."""
    peak = 0
    for number in range(len(schedule.kernels)):
        alive = sum(s.bytes for s in schedule.slots
                    if s.kind == "scratch" and s.alias is None and s.first <= number <= s.last)  # fmt: skip
        peak = max(peak, alive)
    return peak
