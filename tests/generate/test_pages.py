"""The pool of pages: no page has two owners, and all come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegrad.core.errors import InternalError
from tilegrad.generate.pages import PagePool

DEEDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60)


@given(pages=st.integers(1, 12), page=st.integers(1, 9), deeds=DEEDS)
@settings(max_examples=200, deadline=None)
def test_pages_have_one_owner_and_all_come_back(
    pages: int, page: int, deeds: list[tuple[int, int]]
) -> None:
    pool = PagePool(pages, page)
    owned: dict[int, list[int]] = {}
    for owner, tokens in deeds:
        if owner in owned:
            pool.give_back(owner)
            del owned[owner]
        elif pool.fits(tokens):
            owned[owner] = pool.take(owner, tokens)
            assert len(owned[owner]) * page >= tokens > (len(owned[owner]) - 1) * page
        else:
            before = list(pool.free)
            with pytest.raises(InternalError):
                pool.take(owner, tokens)
            assert pool.free == before and owner not in pool.owned
        taken = [p for mine in owned.values() for p in mine]
        assert sorted([*taken, *pool.free]) == list(range(pages))
        assert pool.owned == owned
    for owner in list(owned):
        pool.give_back(owner)
    assert sorted(pool.free) == list(range(pages)) and not pool.owned


def test_pages_used_last_are_used_first() -> None:
    pool = PagePool(8, 4)
    assert pool.take("a", 9) == [0, 1, 2]
    pool.give_back("a")
    assert pool.take("b", 5) == [0, 1]
    assert pool.can_ever_fit(32) and not pool.can_ever_fit(33)
    assert pool.fits(24) and not pool.fits(25)


def test_misuse_is_an_error() -> None:
    pool = PagePool(2, 4)
    pool.take("a", 1)
    for wrong in (lambda: pool.take("a", 1), lambda: pool.give_back("b"), lambda: PagePool(0, 4)):
        with pytest.raises(InternalError):
            wrong()
