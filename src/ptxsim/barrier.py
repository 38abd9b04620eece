"""Barriers of the simulator: named ones and mbarriers.

An arrival hands the warp's clock on, a wait takes over what the phase has seen; of what st.async
stored, only a wait of the cluster's scope learns. Invariant: a phase completes when its arrivals
and its bytes are all there and never otherwise, and every barrier says in words how far it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    BarrierError,
    MisalignedError,
    ProxyFenceError,
    RaceError,
    TextError,
)
from .machine import AGENTS, Clock, Cta, Waiting
from .memory import one_for_all, shared_of
from .text import Instruction
from .values import LANES, RANK_STEP, SHARED_WINDOW, Array, Decoder, Mask, Run
from .warp import whole

if TYPE_CHECKING:
    from .machine import Warp


def nothing() -> Clock:
    """A clock that knows nothing."""
    return np.zeros(AGENTS, np.int32)


# ---- named barriers -------------------------------------------------------------------------


class Named:
    """A numbered barrier of a CTA that counts threads."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta, self.number, self.generation, self.arrived = cta, number, 0, 0
        self.threads: int | None = None
        self.came: set[int] = set()
        self.coming, self.votes = nothing(), 0
        self.every, self.some = True, False
        self.seen: dict[int, tuple[Clock, int, bool, bool]] = {}

    def arrive(self, warp: Warp, threads: int | None) -> int:
        """Arrive with a warp; gives the generation joined."""
        if self.arrived and threads != self.threads:
            raise BarrierError(
                f"barrier {self.number} is used with {self.threads} and {threads} "
                "threads in one phase"
            )
        if threads is not None and (threads % LANES or threads <= 0):
            raise BarrierError(
                f"barrier {self.number} with {threads} threads, which is not a "
                "positive multiple of 32"
            )
        if warp.number in self.came:
            raise BarrierError(f"a warp arrives twice at barrier {self.number} in one phase")
        self.threads = threads
        self.came.add(warp.number)
        self.arrived += LANES
        np.maximum(self.coming, warp.release(), out=self.coming)
        generation = self.generation
        self.settle()
        return generation

    def wanted(self) -> int:
        """Threads that complete the phase; for all of the CTA, those that have not exited."""
        if self.threads is not None:
            return self.threads
        return LANES * sum(w.active or w.number in self.came for w in self.cta.warps)

    def settle(self) -> None:
        """Complete the phase if all have come."""
        if self.arrived and self.arrived >= self.wanted():
            self.seen[self.generation] = (self.coming, self.votes, self.every, self.some)
            self.seen.pop(self.generation - 16, None)  # nobody waits for that any more
            self.generation += 1
            self.arrived, self.coming, self.came = 0, nothing(), set()
            self.votes, self.every, self.some = 0, True, False

    def passed(self, generation: int) -> bool:
        """Whether a generation is over."""
        self.settle()
        return self.generation > generation

    def __str__(self) -> str:
        return f"barrier {self.number} ({self.arrived} of {self.wanted()} threads came)"


def decode_bar(d: Decoder, i: Instruction) -> Run:
    """bar.sync, bar.arrive and bar.red."""
    red = "red" in i.words
    operands = i.operands[1:] if red else i.operands
    predicate = d.read(operands[-1], "pred") if red else None
    counts = operands[:-1] if red else operands
    number = d.read(counts[0], "u32")
    threads = d.read(counts[1], "u32") if len(counts) > 1 else None
    put = d.put(i.operands[0], "u32" if "popc" in i.words else "pred") if red else None

    def run(warp: Warp, mask: Mask) -> Waiting | None:
        whole(warp, mask, i.words[0])
        warp.meet()
        active = np.ones(LANES, np.bool_) if mask is None else mask
        lane = int(np.flatnonzero(active)[0])
        which = int(number(warp)[lane])
        if which >= 16:
            raise BarrierError(f"there are 16 barriers, not one of number {which}")
        barrier = warp.cta.named.setdefault(which, Named(warp.cta, which))
        if predicate is not None:
            votes = predicate(warp)[active]
            barrier.votes += int(votes.sum())
            barrier.every &= bool(votes.all())
            barrier.some |= bool(votes.any())
        count = int(threads(warp)[lane]) if threads is not None else None
        generation = barrier.arrive(warp, count)
        if "arrive" in i.words:
            return None

        def finish() -> None:
            clock, votes, every, some = barrier.seen[generation]
            np.maximum(warp.clock, clock, out=warp.clock)
            if put is not None:
                value: Any = (
                    np.uint32(votes) if "popc" in i.words else (every if "and" in i.words else some)
                )
                put(warp, mask, np.full(LANES, value))

        return Waiting(lambda: barrier.passed(generation), lambda: str(barrier), finish)

    return run


# ---- mbarriers ------------------------------------------------------------------------------


class Phases:
    """One mbarrier."""

    def __init__(self, cta: Cta, offset: int, count: int, warp: Warp) -> None:
        self.cta, self.offset, self.count = cta, offset, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.agent = cta.cluster.agent(f"copies that land on {cta.name}'s mbarrier {offset:#x}")
        self.coming, self.seen = nothing(), nothing()
        self.by, self.made = warp.agent, int(warp.clock[warp.agent])
        self.fenced: int | None = None
        self.stored = False  # by st.async, which is acquired at the cluster's scope

    def update(self, clock: Clock | None, arrivals: int, bytes_: int) -> None:
        """Arrivals, and bytes announced (positive) or landed (negative)."""
        if clock is not None:
            np.maximum(self.coming, clock, out=self.coming)
        if arrivals > self.pending:
            raise BarrierError(f"more arrivals than its count at {self}")
        self.pending -= arrivals
        self.bytes += bytes_
        if abs(self.bytes) >= 1 << 20:
            raise BarrierError(f"more than 2^20-1 bytes at {self}")
        if self.pending == 0 and self.bytes < 0:
            raise BarrierError(f"more bytes landed than were expected at {self}")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.coming[self.agent] = self.phase
            self.seen = np.maximum(self.seen, self.coming)
            self.pending, self.coming = self.count, nothing()

    def acquired(self, cluster: bool) -> Clock:
        """What a wait learns, of the cluster's scope or of the CTA's."""
        seen = self.seen
        if self.stored and not cluster:
            seen = seen.copy()
            seen[self.agent] = 0
        return seen

    def __str__(self) -> str:
        return (
            f"the mbarrier at {self.offset:#x} of {self.cta.name} (phase {self.phase}, "
            f"{self.count - self.pending} of {self.count} arrivals, {self.bytes} bytes to land)"
        )


def plain_address(address: int) -> int:
    """A shared address from a generic one."""
    return address - SHARED_WINDOW if address >= SHARED_WINDOW else address


def own_offset(warp: Warp, address: int) -> int:
    """The offset in a warp's own shared memory of an address in it."""
    address = plain_address(address)
    return address - warp.cta.first_address if address >> RANK_STEP else address


def phases_of(warp: Warp, address: int, proxy: bool = False) -> Phases:
    """The mbarrier at an address, which the warp must know to be initialised."""
    address = plain_address(address)
    _, offset = shared_of(warp, address)
    rank = address >> RANK_STEP
    cta = warp.cluster.ctas[rank - 1] if rank else warp.cta
    return known_barrier(warp, cta, offset, proxy or cta is not warp.cta)


def known_barrier(warp: Warp, cta: Cta, offset: int, proxy: bool) -> Phases:
    """The mbarrier of a CTA at an offset; `proxy` if it needs the fence after its init."""
    if offset % 8:
        raise MisalignedError(f"mbarrier address {offset:#x} is not a multiple of 8")
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        cta.shared.bounds(offset, offset + 8)
        raise BarrierError(f"no mbarrier was initialised at {offset:#x} of {cta.name}")
    if warp.cluster.check:
        if barrier.made > warp.clock[barrier.by]:
            raise RaceError(f"{barrier} is used, but nothing orders its init before")
        if proxy and (barrier.fenced is None or barrier.fenced > warp.clock[barrier.by]):
            raise ProxyFenceError(
                f"{barrier} was initialised without fence.mbarrier_init or "
                "fence.proxy.async before the barrier"
            )
    return barrier


def lanes_of(mask: Mask) -> Array:
    """The numbers of active lanes."""
    return np.arange(LANES) if mask is None else np.flatnonzero(mask)


def decode_mbarrier(d: Decoder, i: Instruction) -> Run:
    """mbarrier in all its forms."""
    kind = i.words[1]
    if kind == "init":
        return _init(d, i)
    if kind in ("arrive", "arrive_drop"):
        return _arrive(d, i)
    if kind in ("try_wait", "test_wait"):
        return _try_wait(d, i)
    if kind in ("expect_tx", "complete_tx"):
        where, count = d.address(i.operands[0]), d.read(i.operands[1], "u32")
        sign = 1 if kind == "expect_tx" else -1

        def run(warp: Warp, mask: Mask) -> None:
            for lane in lanes_of(mask):
                barrier = phases_of(warp, int(where(warp)[lane]))
                barrier.update(None, 0, sign * int(count(warp)[lane]))

        return run
    if kind == "inval":
        where = d.address(i.operands[0])

        def invalidate(warp: Warp, mask: Mask) -> None:
            for lane in lanes_of(mask):
                offset = own_offset(warp, int(where(warp)[lane]))
                phases_of(warp, offset)
                del warp.cta.mbarriers[offset]
                if warp.cta.shared.barriers is not None:
                    warp.cta.shared.barriers[offset : offset + 8] = False

        return invalidate
    raise TextError(f"mbarrier.{kind} is not simulated")


def _init(d: Decoder, i: Instruction) -> Run:
    where, count = d.address(i.operands[0]), d.read(i.operands[1], "u32")

    def run(warp: Warp, mask: Mask) -> None:
        space = warp.cta.shared
        for lane in lanes_of(mask):
            offset, number = own_offset(warp, int(where(warp)[lane])), int(count(warp)[lane])
            if offset % 8:
                raise MisalignedError(f"mbarrier address {offset:#x} is not a multiple of 8")
            space.bounds(offset, offset + 8)
            if not 1 <= number < 1 << 20:
                raise BarrierError(f"an mbarrier of count {number}")
            if offset in warp.cta.mbarriers:
                raise BarrierError(f"{warp.cta.mbarriers[offset]} is initialised twice")
            index = slice(offset, offset + 8)
            space.note_write(
                warp.cluster, index, warp.clock, warp.agent, int(warp.clock[warp.agent])
            )
            if space.barriers is None:
                space.barriers = np.zeros(space.data.size, np.bool_)
            space.barriers[index] = True
            barrier = Phases(warp.cta, offset, number, warp)
            warp.cta.mbarriers[offset] = barrier
            warp.pair.setdefault("inits", []).append(barrier)

    return run


def _arrive(d: Decoder, i: Instruction) -> Run:
    token = i.operands[0].kind != "memory"
    operands = i.operands[1:] if token else i.operands
    put = d.put(i.operands[0], "b64") if token else None
    where = d.address(operands[0])
    count = d.read(operands[1], "u32") if len(operands) > 1 else None
    expect = "expect_tx" in i.words
    drop, partial = i.words[1] == "arrive_drop", "noComplete" in i.words

    def run(warp: Warp, mask: Mask) -> None:
        tokens = np.zeros(LANES, np.uint64)
        address = where(warp)
        lanes = lanes_of(mask)
        if not expect:  # one that announces bytes speaks for copies
            one_for_all(warp, mask, "an arrival")
        barriers = [phases_of(warp, int(address[lane])) for lane in lanes]
        clock = warp.release()
        for lane, barrier in zip(lanes, barriers):
            number = int(count(warp)[lane]) if count is not None else (0 if expect else 1)
            tokens[lane] = barrier.phase
            if partial and number >= barrier.pending:
                raise BarrierError(f"arrive.noComplete completes {barrier}")
            if drop:
                barrier.count -= 1
            barrier.update(clock, 1 if expect else number, number if expect else 0)
        if put is not None:
            put(warp, mask, tokens)

    return run


def _try_wait(d: Decoder, i: Instruction) -> Run:
    put, where = d.put(i.operands[0], "pred"), d.address(i.operands[1])
    parity = "parity" in i.words
    given = d.read(i.operands[2], "u32" if parity else "b64")
    test, relaxed = i.words[1] == "test_wait", "relaxed" in i.words

    def run(warp: Warp, mask: Mask) -> Waiting | None:
        address, wanted = where(warp), given(warp)
        lanes = lanes_of(mask)
        checks = {(int(address[lane]), int(wanted[lane])) for lane in lanes}
        barriers = {a: phases_of(warp, a) for a, _ in checks}

        def over(lane: int) -> bool:
            barrier, value = barriers[int(address[lane])], int(wanted[lane])
            return (barrier.phase & 1) != (value & 1) if parity else barrier.phase > value

        def finish() -> None:
            result = np.zeros(LANES, np.bool_)
            for lane in lanes:
                result[lane] = over(lane)
            for place, barrier in barriers.items():
                saw = result & (address == place)
                if not relaxed and saw.any():
                    warp.learn(barrier.acquired("cluster" in i.words), saw)
            put(warp, mask, result)

        def ready() -> bool:
            return all(over(lane) for lane in lanes[:1]) and all(over(x) for x in lanes)

        if test:
            return Waiting(lambda: True, str, finish)  # gives the turn away
        again = (i.number, tuple(sorted(checks)), mask is None or mask.tobytes())
        if ready() or warp.pair.get("tried") != again or warp.cluster.grid.impatient():
            warp.pair["tried"] = again  # the first try of a wait that is not over gives up
            finish()
            return None
        return Waiting(
            ready,
            lambda: ", ".join(f"parity {value} of {barriers[a]}" for a, value in sorted(checks)),
            finish,
        )

    return run


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a barrier; None if it is not one."""
    if i.words[0] in ("bar", "barrier") and "cluster" not in i.words and "warp" not in i.words:
        return decode_bar(d, i)
    return decode_mbarrier(d, i) if i.words[0] == "mbarrier" else None
