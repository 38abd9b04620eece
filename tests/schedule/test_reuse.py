"""schedule/reuse.py: Slots that live at the same time share no bytes, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegrad.core.dtype import uint8
from tilegrad.ir.types import Array
from tilegrad.runtime.recipe import owners_of
from tilegrad.schedule.reuse import LINE, in_turn, largest_first
from tilegrad.schedule.schedule import Schedule, Slot

LIVES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(1, 400)), min_size=1, max_size=40
)


def slots(lives: Sequence[tuple[int, int, int]]) -> list[Slot]:
    """Scratch Slots of these (first, further Kernels, bytes)."""
    return [
        Slot(i, Array((size,), uint8), "scratch", first=first, last=first + more)
        for i, (first, more, size) in enumerate(lives)
    ]


@pytest.mark.parametrize("plan", [largest_first, in_turn])
@given(lives=LIVES)
def test_slots_that_live_together_are_apart(
    plan: Callable[[Sequence[Slot]], int], lives: list[tuple[int, int, int]]
) -> None:
    made = slots(lives)
    top = plan(made)
    peak = max(sum(s.bytes for s in made if s.first <= k <= s.last) for k in range(30))
    assert peak <= top <= sum(s.bytes + LINE for s in made)
    for i, a in enumerate(made):
        assert a.offset is not None and a.offset % LINE == 0 and a.offset + a.bytes <= top
        for b in made[:i]:
            if a.first <= b.last and b.first <= a.last:
                assert a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset


def test_many_slots_in_turn_take_what_they_need() -> None:
    """A chain: two live at a time, so two places are enough for thousands."""
    made = slots([(i, 1, 64) for i in range(5000)])
    assert in_turn(made) == 2 * 64


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
def test_chains_of_aliases_end_where_following_them_ends(wanted: list[int]) -> None:
    aliases = [a if a < i else -1 for i, a in enumerate(wanted)]  # no circle
    expected = []
    for number in range(len(aliases)):
        while aliases[number] >= 0:
            number = aliases[number]
        expected.append(number)
    assert owners_of(aliases) == expected
    made = slots([(0, 0, 1)] * len(aliases))
    for slot, alias in zip(made, aliases):
        slot.alias = None if alias < 0 else alias
    schedule = Schedule(made, [], [], [])
    assert [schedule.storage(i) for i in range(len(made))] == expected
    assert [schedule.storage(i) for i in range(len(made))] == expected  # as known by now
