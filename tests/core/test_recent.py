"""core/recent.py: a table that forgets what was not asked for longest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tilegrad.core.recent import Recent, SecondChance


def test_what_was_asked_for_last_stays() -> None:
    table: Recent[int] = Recent(lambda: 3)
    for i in range(3):
        table[i] = i + 10
    assert table.get(0) == 10  # now 1 is the oldest
    table[3] = 13
    assert [table.get(i) for i in range(4)] == [10, None, 12, 13]
    assert len(table) == 3


def test_a_smaller_bound_holds_from_the_next_entry_on() -> None:
    bound = [5]
    table: Recent[int] = Recent(lambda: bound[0])
    for i in range(5):
        table[i] = i
    bound[0] = 0
    table[9] = 9
    assert len(table) == 1 and table.get(9) == 9


def test_threads_share_one() -> None:
    table: Recent[int] = Recent(lambda: 16)

    def work(seed: int) -> None:
        for i in range(500):
            table[(seed * i) % 40] = i
            table.get(i % 40)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    assert len(table) == 16


class Value:
    """Something with the flag."""

    used = False


def test_what_was_used_gets_another_turn() -> None:
    table: SecondChance[Value] = SecondChance()
    for i in range(3):
        table.keep(i, Value(), 3)
    table[0].used = True
    table.keep(3, Value(), 3)
    assert sorted(table) == [0, 2, 3]
    assert not table[0].used
    for value in table.values():
        value.used = True
    table.keep(4, Value(), 2)  # all were used: the newest stays, and ends
    assert len(table) == 2 and 4 in table
