"""The page pool and the prefix cache against plain models: counts, keys, who goes first."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np
import pytest

from tilegrad import nn
from tilegrad.core.dtype import float32
from tilegrad.core.errors import InternalError
from tilegrad.generate.pages import PagePool
from tilegrad.generate.prefix import PrefixCache, first_key, next_key
from tilegrad.generate.resident import Resident


def test_random_takes_shares_and_returns_lose_nothing() -> None:
    chance, pool = random.Random(0), PagePool(24, 4, idle=9)
    users: list[list[int]] = []
    named = 0
    for _ in range(3000):
        if chance.random() < 0.5 and pool.available >= 3:
            known = [page for page in range(24) if pool.prefixes.knows(page)]
            shared = chance.sample(known, min(len(known), chance.randrange(3)))
            for page in shared:
                pool.share(page)
            fresh = [pool.take() for _ in range(min(2, pool.available))]
            for page in fresh:
                if chance.random() < 0.6:
                    named += 1
                    pool.prefixes.add(page, next_key(b"", [named]))
            users.append(shared + fresh)
        elif users:
            pages = users.pop(chance.randrange(len(users)))
            if chance.random() < 0.1:
                pool.forget(pages)
            pool.give_back(pages)
        counts: dict[int, int] = {}
        for pages in users:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        pool.check(counts)
        assert pool.available == 24 - len(counts) and len(pool.prefixes.idle) <= 9
    for pages in users:
        pool.give_back(pages)
    pool.check({})
    assert named > 500 and pool.available == 24


def test_free_pages_are_taken_before_idle_ones_and_the_oldest_idle_first() -> None:
    pool = PagePool(5, 4)
    first, second = [pool.take(), pool.take()], [pool.take()]
    for page in (*first, *second):
        pool.prefixes.add(page, next_key(b"", [page]))
    pool.give_back(first)
    pool.give_back(second)
    assert pool.available == 5 and list(pool.prefixes.idle) == [first[1], first[0], second[0]]
    taken = [pool.take() for _ in range(3)]
    assert taken[2] == first[1] and not pool.prefixes.knows(first[1])
    assert set(taken[:2]) == {3, 4} and pool.prefixes.knows(first[0])
    assert pool.can_ever_fit(20) and not pool.can_ever_fit(21) and pool.needed(9) == 3


def test_what_is_wrong_is_an_error() -> None:
    pool = PagePool(1, 4)
    page = pool.take()
    wrong = [
        pool.take,
        lambda: pool.give_back([page, page]),
        lambda: PagePool(0, 4),
        lambda: PagePool(2, 4).share(0),
        lambda: PagePool(2, 4).check({1: 1}),
    ]
    for work in wrong:
        with pytest.raises(InternalError):
            work()
    cache = PrefixCache()
    cache.add(0, b"a")
    with pytest.raises(InternalError, match="another key"):
        cache.add(0, b"b")
    cache.idle[7] = None
    with pytest.raises(InternalError, match="match"):
        cache.check()


def test_keys_depend_on_all_before_them_and_on_the_salt() -> None:
    def keys(salt: str, *pages: list[int]) -> list[bytes]:
        found = [first_key(salt)]
        for page in pages:
            found.append(next_key(found[-1], page))
        return found[1:]

    plain = keys("", [1, 2], [3, 4])
    assert plain == keys("", [1, 2], [3, 4]) and len(set(plain)) == 2
    others = [
        keys("salt", [1, 2], [3, 4]),
        keys("", [1, 3], [3, 4]),
        keys("", [3, 4], [1, 2]),
        keys("", [1, 2, 3, 4]),
        keys("", [1, 2], [], [3, 4])[1:],
    ]
    assert not any(plain[1] in other for other in others)
    assert first_key("a", "b") != first_key("ab") != first_key("ab", "")


def test_a_prefix_ends_where_a_page_is_missing() -> None:
    cache, keys = PrefixCache(), [bytes([i]) for i in range(4)]
    for page in (0, 1, 3):
        cache.add(page, keys[page])
    cache.add(9, keys[0])  # the same content again: the first page is kept
    assert cache.find(keys) == [0, 1] and not cache.knows(9) and len(cache) == 3
    cache.forget(0)
    assert cache.find(keys) == [] and len(cache) == 2


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say")
def test_memory_is_taken_a_quarter_ahead_and_nothing_is_changed() -> None:
    pool, size = PagePool(40, 64), 2 << 20  # bytes of keys and values of a page
    cache = nn.PagedCache(1, 40, 64, 8, 512, requests=2, most_pages=20, dtype=float32, device="cpu")
    arrays = [t.buffer().array(tuple(t.shape), np.float32) for t in (*cache.keys, *cache.values)]
    follower = Resident(cache, pool)
    follower.follow()
    assert follower.taken == pool.touched == 0
    taken = [pool.take() for _ in range(16)]
    for array in arrays:
        array[3, 0, 0] = 1.0  # of one that is in use
    before = resident()
    follower.follow()
    assert sorted(taken) == list(range(16)) and pool.touched == 16 and follower.taken == 20
    assert 19 * size < resident() - before < 22 * size
    assert all(array.sum() == 512 and array[3, 0, 0].all() for array in arrays)
    pool.give_back(taken)
    taken = [pool.take() for _ in range(20)]
    assert pool.touched == 20  # those that were given back come first
    follower.follow()
    assert follower.taken == 20
    taken += [pool.take() for _ in range(16)]
    follower.follow()
    assert pool.touched == 36 and follower.taken == 40  # no more than there are
