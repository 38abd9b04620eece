"""The Batcher: which requests run, with which pages, and what each has in the next step.

Requests wait by priority, then by arrival. One begins when a slot is free, its tokens fit into
pages (those of a known prefix are there already), and one more is left for each that runs and
will want one. A step has a budget of tokens. Those that decode have one each, the rest goes
to prompts in order of rank: there is no other difference between them. Answers grow page by page;
when no page is left the last in rank is sent back to wait, and its tokens are computed again later.
Nothing here knows a device.
Invariant: the first in rank is never sent back, so it comes to its end; nobody is passed over more
than PATIENCE times; slots and pages of what does not run are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from functools import reduce

from ..core.errors import InternalError
from .ongoing import PATIENCE, Ongoing
from .pages import PagePool
from .request import Request
from .sampling_limits import Variant


@dataclass(slots=True)
class Batch:
    """What one step runs: some requests and how many tokens of each."""

    ongoing: list[Ongoing]
    counts: list[int]
    slots: list[int]
    tails: list[int]  # pages of their last tokens
    columns: list[int]  # where these stand in the table
    whole: list[bool]  # no token is left then, so the next id counts
    decodes: bool  # each has one token, which is on the device
    variant: Variant
    room: int  # how often it can be run as it is: before a page is full or somebody is done
    guesses: list[list[int]] | None = None  # tokens after the next of each, to be verified

    @property
    def keys(self) -> int:
        """The most keys of a request in this step, or in the one after it."""
        return max(w.fed + c for w, c in zip(self.ongoing, self.counts)) + 1

    @property
    def constrained(self) -> bool:
        """Whether what may come next depends on the ids of this step."""
        return any(work.matcher is not None for work in self.ongoing)


class Batcher:
    """Requests that wait and run, over a PagePool."""

    def __init__(
        self, slots: int, pool: PagePool, budget: int, prefixes: bool = True, kind: str = ""
    ) -> None:
        """`kind` is what pages of this cache depend on besides their requests."""
        self.kind = kind
        self.pool, self.budget = pool, max(budget, slots)
        self.shares = prefixes  # whether pages with the same tokens are shared
        self.running: dict[Hashable, Ongoing] = {}
        self.waiting: dict[Hashable, Ongoing] = {}
        self.slots = list(range(slots - 1, -1, -1))  # free; the last is taken first
        self.preemptions = 0
        self._heap: list[
            tuple[tuple[int, int, int], int, Ongoing]
        ] = []  # of `waiting`; some are stale
        self._arrivals = self._pushed = 0
        self._mixed = False  # priorities differ
        # of the last step, if all decode and nobody came or went
        self._repeatable: Batch | None = None

    # ---- requests -----------------------------------------------------------------------------

    def add(self, request: Request) -> Ongoing:
        """A request that waits from now on."""
        self._arrivals += 1
        self._mixed = self._mixed or request.priority != 0
        work = Ongoing(request, self._arrivals, self.kind)
        self._wait(work)
        return work

    def find(self, id: Hashable) -> Ongoing | None:
        """The Ongoing of a request that runs or waits."""
        return self.running.get(id) or self.waiting.get(id)

    def end(self, work: Ongoing, *, wrong: bool = False) -> None:
        """Take back all that a request has; what it computed is `wrong` if it failed."""
        if self.waiting.get(work.request.id) is work:
            del self.waiting[work.request.id]
            return
        del self.running[work.request.id]
        if wrong:
            self.pool.forget(work.pages)
        self._leave(work)

    def _wait(self, work: Ongoing) -> None:
        self.waiting[work.request.id] = work
        self._push(work)

    def _push(self, work: Ongoing) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (work.rank, self._pushed, work))

    def _leave(self, work: Ongoing) -> None:
        self._repeatable = None
        self.pool.give_back(work.pages)
        self.slots.append(work.slot)
        work.rise()

    def _preempt(self, work: Ongoing) -> None:
        """Send one that runs back to wait; its pages may be found again by their keys."""
        del self.running[work.request.id]
        self._leave(work)
        work.preempted += 1
        self.preemptions += 1
        self._wait(work)

    # ---- admission ------------------------------------------------------------------------------

    def admit(self) -> Ongoing | None:
        """Seat the first that waits, if there is room for it."""
        work = self._first() if self.slots else None
        if work is None:
            return None
        pool = self.pool
        known = self._known(work)
        fresh = pool.needed(work.total) - len(known)
        idle = sum(not pool.counts[page] for page in known)
        growing = sum(w.will_grow(pool.page) for w in self.running.values())
        if fresh + idle + growing > pool.available:
            return None
        heapq.heappop(self._heap)
        del self.waiting[work.request.id]
        for page in known:
            pool.share(page)
        if work.cached < 0:
            pool.prefixes.asked += work.total
            pool.prefixes.found += len(known) * pool.page
        work.sit(self.slots.pop(), known, [pool.take() for _ in range(fresh)], pool.page)
        self.running[work.request.id] = work
        self._repeatable = None
        self._overtake(work)
        return work

    def _first(self) -> Ongoing | None:
        """The first in rank that waits."""
        while self._heap:
            rank, _, work = self._heap[0]
            if self.waiting.get(work.request.id) is work and work.rank == rank:
                return work
            heapq.heappop(self._heap)
        return None

    def _known(self, work: Ongoing) -> list[int]:
        """Pages of its first tokens that are there; the last token is computed in any case."""
        if not self.shares:
            return []
        page = self.pool.page
        return self.pool.prefixes.find(work.keys(page, (work.total - 1) // page))

    def _overtake(self, begun: Ongoing) -> None:
        """Note whom a later request passed: nobody is passed over for ever."""
        if not self._mixed:
            return
        for work in self.waiting.values():
            if work.number < begun.number:
                work.overtaken += 1
                if work.overtaken == PATIENCE:
                    self._push(work)
        for work in self.running.values():
            work.overtaken += work.number < begun.number and not work.decodes

    # ---- steps ----------------------------------------------------------------------------------

    def batch(self, under_way: bool = False) -> Batch | None:
        """What the next step runs; None if nothing can.

        While a step is under way nobody is sent back (its id is not known): None where one must.
        """
        last = self._repeatable
        if last is not None and last.room > 0:
            return last
        self._repeatable = None
        ranked = sorted(self.running.values(), key=lambda work: work.rank)
        ready = [w for w in ranked if w.owed > 0]
        if not self._grow(ready, under_way):
            return None
        ready = [w for w in ready if w.slot >= 0]  # the others were sent back
        chosen = self._share_out(ready)
        if not chosen:
            return None
        page = self.pool.page
        decodes = all(work.decodes for work, _ in chosen)
        columns = [(work.fed + count - 1) // page for work, count in chosen]
        batch = Batch(
            [work for work, _ in chosen],
            [count for _, count in chosen],
            [work.slot for work, _ in chosen],
            [work.pages[column] for (work, _), column in zip(chosen, columns)],
            columns,
            [work.left == count for work, count in chosen],
            decodes,
            reduce(Variant.joined, {work.variant for work, _ in chosen}),
            min(min(page - w.fed % page, w.owed) for w, _ in chosen) if decodes else 0,
        )
        if decodes:
            self._repeatable = batch
        return batch

    def _grow(self, ready: list[Ongoing], under_way: bool) -> bool:
        """A page for each that needs one, in order of rank; whether all that run have theirs."""
        for work in ready:
            while work.slot >= 0 and len(work.pages) * self.pool.page < work.total:
                if self.pool.available:
                    work.pages.append(self.pool.take())
                elif under_way:
                    return False
                else:
                    self._preempt(max(self.running.values(), key=lambda w: w.rank))
        return True

    def _share_out(self, ready: list[Ongoing]) -> list[tuple[Ongoing, int]]:
        """The next token of those that decode, then prompts, within the budget."""
        chosen = [(work, 1) for work in ready if work.decodes]
        room = self.budget - len(chosen)
        for work in ready:
            if not work.decodes and room:
                count = min(room, work.left)
                chosen.append((work, count))
                room -= count
        return chosen

    def begun(self, batch: Batch) -> None:
        """Take note of a step that was begun: its tokens are fed, and ids are on their way."""
        batch.room -= 1
        for work, count in zip(batch.ongoing, batch.counts):
            work.fed += count
            if work.fed == work.total:
                work.total += 1
                work.decodes = True
            if not batch.decodes:
                self._name(work)

    def took(self, work: Ongoing, token: int) -> None:
        """Take note of an id that was read."""
        work.known.append(token)
        self._name(work)

    def stretch(self, work: Ongoing, more: int) -> int:
        """Pages for so many tokens after its next one, if nobody needs them; how many fit."""
        pool = self.pool
        spare = pool.available - len(self.running)
        while len(work.pages) * pool.page < work.total + more and spare > 0:
            work.pages.append(pool.take())
            spare -= 1
        return max(0, min(more, len(work.pages) * pool.page - work.total))

    def came_true(self, work: Ongoing, count: int) -> None:
        """Take note of guesses that a step has fed."""
        work.fed += count
        work.total += count
        self._repeatable = None
        self._name(work)

    def _name(self, work: Ongoing) -> None:
        """Tell the prefix cache of pages that became full."""
        if self.shares:
            for page, key in work.new_keys(self.pool.page):
                self.pool.prefixes.add(page, key)

    # ---- for tests and the canary ---------------------------------------------------------------

    def check(self) -> None:
        """An InternalError unless slots and pages have just the users that run."""
        users: dict[int, int] = {}
        for work in self.running.values():
            for page in work.pages:
                users[page] = users.get(page, 0) + 1
        self.pool.check(users)
        taken = [work.slot for work in self.running.values()] + self.slots
        if len(set(taken)) != len(taken) or any(w.slot >= 0 for w in self.waiting.values()):
            raise InternalError("batcher", f"slots {sorted(taken)} are not each in one place")


__all__ = ["Batch", "Batcher"]
