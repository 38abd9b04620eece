"""The Batcher with a model that is no model: a state machine over requests, and cases by hand.

The fake model's next token is a hash of all tokens before it, read through the pages: if a page
had other tokens than it should, the next token would be another.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilegrad.generate.batcher import Batch, Batcher
from tilegrad.generate.ongoing import PATIENCE, Ongoing
from tilegrad.generate.pages import PagePool
from tilegrad.generate.request import Request
from tilegrad.generate.sizes import (
    decode_sizes,
    next_size,
    powers_up_to,
    prompt_sizes,
    rare_prompt_sizes,
    sizes_up_to,
)

PAGE, PAGES, SLOTS, BUDGET = 4, 10, 3, 9


def next_token(tokens: list[int]) -> int:
    """What the fake model says after some tokens; 0 ends."""
    found = 7
    for token in tokens:
        found = (found * 31 + token + 1) % 1009
    return found % 11


def answer(request: Request) -> list[int]:
    """What a request gets when it is alone."""
    known = list(request.tokens)
    while len(known) - len(request.tokens) < request.max_tokens:
        known.append(next_token(known))
        if known[-1] in request.stop_tokens:
            break
    return known[len(request.tokens) :]


class Fake:
    """A Batcher, the pages of a device, and steps that write and read them."""

    def __init__(self, prefixes: bool = True, overlaps: bool = False, **sizes: Any) -> None:
        sizes = {"slots": SLOTS, "pages": PAGES, "budget": BUDGET, "idle": None} | sizes
        pool = PagePool(sizes["pages"], PAGE, sizes["idle"])
        self.batcher = Batcher(sizes["slots"], pool, sizes["budget"], prefixes)
        self.pages = [[-1] * PAGE for _ in range(sizes["pages"])]
        self.overlaps = overlaps
        self.under_way: deque[tuple[Batch, list[int]]] = deque()
        self.last: dict[int, int] = {}  # by slot, as on the device
        self.sent: dict[Any, list[int]] = {}
        self.steps = 0

    def begin(self) -> None:
        """Begin the next step."""
        while self.batcher.admit() is not None:
            pass
        batch = self.batcher.batch(bool(self.under_way))
        if batch is None:
            return
        assert sum(batch.counts) <= self.batcher.budget
        ids = []
        for work, count, tail in zip(batch.ongoing, batch.counts, batch.tails):
            for at in range(work.fed, work.fed + count):
                token = self.last[work.slot] if work.decodes else work.known[at]
                self.pages[work.pages[at // PAGE]][at % PAGE] = token
            assert tail == work.pages[(work.fed + count - 1) // PAGE]
            length = work.fed + count
            read = [self.pages[work.pages[at // PAGE]][at % PAGE] for at in range(length)]
            ids.append(next_token(read))
            if length == work.total:
                self.last[work.slot] = ids[-1]
        self.batcher.begun(batch)
        self.under_way.append((batch, ids))

    def step(self) -> None:
        """As the engine does: begin one step or two, read one."""
        self.steps += 1
        while len(self.under_way) < 1 + self.overlaps:
            before = len(self.under_way)
            self.begin()
            if len(self.under_way) == before:
                break
        if not self.under_way:
            return
        batch, ids = self.under_way.popleft()
        for work, id, whole in zip(batch.ongoing, ids, batch.whole):
            if whole and self.batcher.running.get(work.request.id) is work:
                self.take(work, id)

    def take(self, work: Ongoing, id: int) -> None:
        """An id that was read."""
        self.batcher.took(work, id)
        self.sent.setdefault(work.request.id, []).append(id)
        if id in work.request.stop_tokens or work.made >= work.request.max_tokens:
            self.end(work)

    def end(self, work: Ongoing) -> None:
        self.batcher.end(work)
        if not self.batcher.running:
            self.under_way.clear()

    def finish(self, most: int = 5000) -> None:
        """Run all to their ends; those that wait for ever are an error."""
        while self.batcher.running or self.batcher.waiting:
            self.step()
            self.batcher.check()
            assert self.steps < most, "somebody waits for ever"


class Machine(RuleBasedStateMachine):
    """Requests come, go and run in any order: nothing is lost, and each gets what it gets alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fake: Fake | None = None
        self.requests: dict[int, Request] = {}
        self.over: set[int] = set()

    @precondition(lambda self: self.fake is None)
    @rule(
        prefixes=st.booleans(),
        overlaps=st.booleans(),
        pages=st.integers(7, 14),
        idle=st.sampled_from([None, 0, 3]),
    )
    def begin(self, **how: Any) -> None:
        self.fake = Fake(**how)

    @precondition(lambda self: self.fake is not None)
    @rule(
        start=st.integers(0, 2),
        length=st.integers(1, 18),
        salt=st.sampled_from(["", "", "key"]),
        priority=st.sampled_from([0, 0, -1, 2]),
        most=st.integers(1, 10),
        stops=st.booleans(),
    )
    def add(
        self, start: int, length: int, salt: str, most: int, priority: int, stops: bool
    ) -> None:
        assert self.fake is not None
        number = len(self.requests)
        tokens = tuple((start * 5 + i) % 13 for i in range(length))
        ends = frozenset({0}) if stops else frozenset()
        request = Request(
            number, tokens, stop_tokens=ends, max_tokens=most, salt=salt, priority=priority
        )
        self.requests[number] = request
        self.fake.batcher.add(request)

    @precondition(lambda self: self.fake is not None)
    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        assert self.fake is not None
        for _ in range(count):
            self.fake.step()
            self.fake.batcher.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert self.fake is not None
        work = self.fake.batcher.find(data.draw(st.sampled_from(sorted(self.requests))))
        if work is not None:
            self.over.add(work.request.id)  # type: ignore[arg-type]
            self.fake.end(work)

    @invariant()
    def all_is_well(self) -> None:
        if self.fake is None:
            return
        batcher = self.fake.batcher
        batcher.check()
        for number, sent in self.fake.sent.items():
            assert sent == answer(self.requests[number])[: len(sent)]  # nothing sent ever changes
        for work in batcher.running.values():
            assert len(work.pages) * PAGE >= work.fed and work.fed < work.total
        assert all(w.overtaken <= PATIENCE + SLOTS for w in batcher.waiting.values())

    def teardown(self) -> None:
        if self.fake is None:
            return
        self.fake.finish()
        self.all_is_well()
        for number, request in self.requests.items():
            if number not in self.over:
                assert self.fake.sent[number] == answer(request)
        pool = self.fake.batcher.pool
        assert pool.available == pool.pages and not any(pool.counts)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def asked(fake: Fake, count: int, length: int = 6, most: int = 8, **fields: Any) -> list[Request]:
    made = []
    for i in range(count):
        number = len(fake.batcher.waiting) + len(fake.batcher.running) + 100 * i
        tokens = tuple((7 * i + j) % 13 for j in range(length))
        made.append(Request(number, tokens, max_tokens=most, **fields))
        fake.batcher.add(made[-1])
    return made


@pytest.mark.parametrize("overlaps", (False, True))
@pytest.mark.parametrize("prefixes", (False, True))
def test_too_few_pages_send_the_youngest_back(prefixes: bool, overlaps: bool) -> None:
    """Three of up to 14 tokens over six pages of four: they begin, and do not all fit."""
    fake = Fake(prefixes, overlaps, pages=6)
    requests = asked(fake, 3)
    oldest = fake.batcher.find(requests[0].id)
    fake.finish()
    assert fake.batcher.preemptions > 0 and oldest is not None and oldest.preempted == 0
    for request in requests:
        assert fake.sent[request.id] == answer(request)


def test_priority_comes_first_then_arrival() -> None:
    fake = Fake(slots=1)
    for number, priority in enumerate((1, 0, 1, -3, 0)):
        fake.batcher.add(Request(number, (1, 2), max_tokens=1, priority=priority))
    fake.finish()
    assert list(fake.sent) == [3, 1, 4, 0, 2]


def test_nobody_waits_for_ever_for_those_of_better_priority() -> None:
    """One of better priority comes before each step; the old one begins all the same."""
    fake = Fake(slots=1)
    fake.batcher.add(Request("old", (1, 2, 3), max_tokens=1, priority=5))
    for number in range(3 * PATIENCE):
        fake.batcher.add(Request(number, (4, 5), max_tokens=1))
        fake.step()
        if "old" in fake.sent:
            break
    assert len(fake.sent) == PATIENCE + 1
    fake.finish()


def test_a_large_request_is_not_passed_by_small_ones() -> None:
    """The first in rank waits for its pages, and those behind it wait too."""
    fake = Fake(pages=8)
    fake.batcher.add(Request("a", tuple(range(10)), max_tokens=6))
    fake.batcher.add(Request("large", tuple(range(24)), max_tokens=4))
    fake.batcher.add(Request("small", (1, 2), max_tokens=1))
    fake.step()
    assert list(fake.batcher.running) == ["a"]
    fake.finish()
    assert list(fake.sent) == ["a", "large", "small"]


def test_the_budget_is_shared_by_decode_and_prompts() -> None:
    fake = Fake(pages=30)
    fake.batcher.add(Request("a", tuple(range(5)), max_tokens=9))
    fake.begin()
    fake.batcher.add(Request("b", tuple(range(20)), max_tokens=2))
    fake.step()
    shares = []
    while "b" not in fake.sent:
        fake.begin()
        batch = fake.under_way[-1][0]
        shares.append({w.request.id: c for w, c in zip(batch.ongoing, batch.counts)})
        fake.step()
    assert shares[0] == {"a": 1, "b": 8} and all(s["a"] == 1 for s in shares)
    assert sum(s.get("b", 0) for s in shares) == 20 - 4 or shares[-1]["b"] <= 8
    fake.finish()


def test_a_shared_prefix_is_computed_once_and_never_across_salts() -> None:
    fake = Fake(pages=30)
    prefix = tuple(i % 13 for i in range(16))
    cached = {}
    for id, tokens, salt in (
        ("first", prefix, ""),
        ("same", prefix, ""),
        ("longer", (*prefix, 1, 2, 3), ""),
        ("salted", prefix, "key"),
        ("salted again", prefix, "key"),
        ("other", (5, *prefix), ""),
    ):
        fake.batcher.add(Request(id, tokens, max_tokens=2, salt=salt))
        work = fake.batcher.find(id)
        fake.finish()
        assert work is not None
        cached[id] = work.cached
    assert cached == {
        "first": 0,
        "same": 12,  # the last token is computed: its page is not taken from the cache
        "longer": 16,
        "salted": 0,
        "salted again": 12,
        "other": 0,
    }
    assert fake.batcher.pool.prefixes.found == 12 + 16 + 12
    assert fake.batcher.pool.prefixes.asked == 5 * 16 + 19 + 1


def test_what_failed_is_found_by_nobody() -> None:
    fake = Fake(pages=30)
    tokens = tuple(range(13))
    fake.batcher.add(Request("bad", tokens, max_tokens=4))
    fake.step()
    fake.batcher.end(fake.batcher.running["bad"], wrong=True)
    fake.under_way.clear()
    work = fake.batcher.add(Request("good", tokens, max_tokens=4))
    fake.finish()
    assert work.cached == 0


def test_sizes() -> None:
    assert decode_sizes(5) == [1, 2, 3, 4, 5]
    assert decode_sizes(20) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    assert decode_sizes(400)[-4:] == [256, 320, 384, 400] and len(decode_sizes(256)) == 22
    assert sizes_up_to(1, ((8, 1),)) == [1]
    pairs = prompt_sizes(512, 64)
    assert {r for r, _ in pairs} == {8, 64} and max(t for _, t in pairs) == 512
    assert all(tokens > 8 for rows, tokens in pairs if rows == 64)
    rare = rare_prompt_sizes(512, 64)
    assert rare == [(64, 8), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256), (64, 512)]
    assert rare_prompt_sizes(4, 2) == [(2, 4)] and powers_up_to(5) == [1, 2, 4, 5]
    assert powers_up_to(1) == [1] and powers_up_to(8) == [1, 2, 4, 8]
    for rows, tokens in ((1, 1), (2, 2), (9, 9), (64, 64), (64, 512)):
        for sizes in (pairs, rare):
            row = next_size(sorted({r for r, _ in sizes}), rows)
            assert next_size([t for r, t in sizes if r == row], tokens) >= tokens
