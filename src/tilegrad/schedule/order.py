"""The order of Regions: what each needs, kept up to date while they grow, and a way to run them.

A Region knows those that it needs itself (`after`) and, in one number with a bit for each, all
that those need in turn (`needs`). Invariant: `needs` is transitive, so that one test says whether
joining two Regions would close a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.errors import InternalError
from .region import Region


def bit(number: int) -> int:
    """The bit of a Region."""
    return 1 << number


def numbers_in(needs: int) -> list[int]:
    """The Regions whose bits are set."""
    found = []
    while needs:
        lowest = needs & -needs
        found.append(lowest.bit_length() - 1)
        needs ^= lowest
    return found


def need(group: Region, more: int, dependents: Mapping[int, Sequence[Region]]) -> None:
    """Let a Region need more Regions, and with it all that need it."""
    waiting = [group]
    while waiting:
        current = waiting.pop()
        if more & ~current.needs:  # else those behind it need all that too
            current.needs |= more
            waiting += dependents.get(current.number, ())


def in_order(groups: Sequence[Region]) -> list[Region]:
    """Regions, each after what it needs: in rounds of those that can run, by number."""
    known = {g.number for g in groups}
    behind: dict[int, list[Region]] = {}
    missing: dict[int, int] = {}
    for g in groups:
        before = g.after & known
        missing[g.number] = len(before)
        for number in before:
            behind.setdefault(number, []).append(g)
    place = {g.number: i for i, g in enumerate(groups)}
    ready = [g for g in groups if not missing[g.number]]
    found: list[Region] = []
    while ready:
        found += ready
        freed: list[Region] = []
        for g in ready:
            for other in behind.get(g.number, ()):
                missing[other.number] -= 1
                if not missing[other.number]:
                    freed.append(other)
        ready = sorted(freed, key=lambda g: place[g.number])
    if len(found) < len(groups):
        raise InternalError("schedule.order", "Regions need one another in a circle")
    return found
