"""Which rows of the accumulators hold which value of a result.

A value has a block of rows, one for each row of the result; a line where it is one number for each
of them (in all columns); or a single row where it is the same for all of them. A step writes over
an operand that nothing reads after it. Invariant: two values share a block only if the first is not
read once the second is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...tile.array import ROWS, VectorStep

BLOCK, LINE, HELD = "block", "line", "held"


@dataclass(frozen=True)
class Rows:
    """For each value what it has and the number of that; and how many of each there are."""

    assigned: tuple[tuple[str, int], ...]
    counts: dict[str, int]


def kinds_of(product: bool, held: Sequence[bool], steps: Sequence[VectorStep]) -> list[str]:
    """What each value has: numbers of rows and of lines make lines."""
    kinds = [BLOCK] * product + [HELD if h else BLOCK for h in held]
    for step in steps:
        used = [kinds[step.first]] + ([] if step.number else [kinds[step.second]])
        along = step.kind in ROWS or all(kind == LINE for kind in used)
        kinds.append(LINE if along else BLOCK)
    return kinds


def place_rows(
    product: bool, held: Sequence[bool], steps: Sequence[VectorStep], stored: Sequence[int]
) -> Rows:
    """Blocks by last use, in the order of the steps."""
    kinds = kinds_of(product, held, steps)
    given = len(kinds) - len(steps)
    last = dict.fromkeys(range(len(kinds)), -1)
    for at, step in enumerate(steps):
        for value in (step.first,) if step.number else (step.first, step.second):
            last[value] = at
    for value in stored:
        last[value] = len(steps)
    assigned: dict[int, tuple[str, int]] = {}
    free: list[int] = []
    counts = dict.fromkeys((BLOCK, LINE, HELD), 0)

    def have(value: int) -> None:
        if value in assigned:
            return
        kind = kinds[value]
        if kind == BLOCK and free:
            assigned[value] = (kind, free.pop())
            return
        assigned[value] = (kind, counts[kind])
        counts[kind] += 1

    if product:
        have(0)
    for at, step in enumerate(steps):
        used = [step.first] if step.number else [step.first, step.second]
        for value in used:
            have(value)
        for value in dict.fromkeys(used):
            if last[value] == at and kinds[value] == BLOCK:
                free.append(assigned[value][1])
        have(given + at)
    for value in sorted(v for v in stored if v < given):
        have(value)
    if any(step.kind in ROWS for step in steps):
        counts[LINE] += 1  # the last: of one strip, before it is added to those before
    order = tuple(assigned.get(v, (BLOCK, 0)) for v in range(len(kinds)))
    return Rows(order, counts)
