"""Which rows of the accumulators hold which value of a result.

A value has a block of rows, one for each row of the result, or a single row where it is the same
for all of them. A step writes over an operand that nothing reads after it. Invariant: two values
share a block only if the first is not read once the second is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...tile.array import VectorStep


@dataclass(frozen=True)
class Rows:
    """For each value its block, or -1 - number of its single row."""

    places: tuple[int, ...]
    blocks: int
    helds: int


def place_rows(
    product: bool, held: Sequence[bool], steps: Sequence[VectorStep], stored: Sequence[int]
) -> Rows:
    """Blocks by last use, in the order of the steps."""
    first = int(product)
    given = first + len(held)
    last = dict.fromkeys(range(given + len(steps)), -1)
    for at, step in enumerate(steps):
        for value in (step.first,) if step.number else (step.first, step.second):
            last[value] = at
    for value in stored:
        last[value] = len(steps)
    places: dict[int, int] = {0: 0} if product else {}
    free: list[int] = []
    blocks, helds = first, 0

    def block() -> int:
        nonlocal blocks
        if free:
            return free.pop()
        blocks += 1
        return blocks - 1

    def have(value: int) -> None:
        nonlocal helds
        if value in places:
            return
        if first <= value < given and held[value - first]:
            helds += 1
            places[value] = -helds
        else:
            places[value] = block()

    stored_held = {value for value in stored if first <= value < given}
    for at, step in enumerate(steps):
        used = [step.first] if step.number else [step.first, step.second]
        for value in used:
            have(value)
        ends = [v for v in dict.fromkeys(used) if last[v] == at and places[v] >= 0]
        for value in ends:
            free.append(places[value])
        have(given + at)
    for value in stored_held:
        have(value)
    order = tuple(places.get(v, 0) for v in range(given + len(steps)))
    return Rows(order, blocks, helds)


__all__ = ["Rows", "place_rows"]
