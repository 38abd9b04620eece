"""The register-level simulator: front end, three units, memories and DRAM, a cycle at a time.

Invariant: `step` is one clock edge of the whole chip, and what the units hold before it the RTL's
registers do. Memories that are read and written at one address in one cycle give what was there
before.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...core.errors import UserError
from .arithmetic import Array, seeded
from .check import check
from .dma import IDLE, RUN, Dram, Load, Memories, Store
from .execute import Execute
from .front import HALT, Front, Tokens
from .instructions import QUEUES, Code
from .parameters import Parameters
from .timing import Counters, Counts, counters_of

WAITING = frozenset(
    ("token", "empty", "token_room")
)  # causes of a cycle in which a unit does nothing


class Machine:
    """An NPU with a program and a DRAM."""

    def __init__(
        self,
        p: Parameters,
        program: Code,
        memory: Array,
        stalls: int | None = None,
    ) -> None:
        check(p, program)
        self.p = p
        self.dram = Dram(memory, p.dma_bytes, p.dram_latency, p.gap, stalls)
        self.tokens, self.memories = Tokens(p.tokens), Memories(p)
        given = (p, self.tokens, self.memories, self.dram)
        self.load, self.execute, self.store = Load(*given), Execute(*given), Store(*given)
        self.units = (self.load, self.execute, self.store)
        self.queues = [unit.queue for unit in self.units]
        self.front = Front(program, self.queues)
        self.cycle = 0
        self.causes: list[Counter[str]] = [Counter() for _ in range(3)]
        self.spans: list[list[tuple[str, int, int]]] = [[], [], []]
        self._began = [0, 0, 0]

    @property
    def done(self) -> bool:
        """Whether the program halted and all units are idle."""
        if self.front.state != HALT:
            return False
        return all(u.state == IDLE and not u.queue.items for u in self.units)

    @np.errstate(all="ignore")  # infinities and NaNs are values here
    def step(self) -> None:
        """One clock edge."""
        self._step()

    def _step(self) -> None:
        load, execute, store = self.units
        before = load.state, execute.state, store.state
        read, write, beat = load.read, store.write, store.shown
        load.written = None
        store.step()
        execute.step()
        load.step()
        if self.front.state != HALT:
            self.front.step()
            if self.front.sequencer.seed is not None:
                store.random = seeded(self.front.sequencer.seed, self.p.lanes)
        self.dram.step(read, before[0] == RUN, write, beat, True)
        for queue in self.queues:
            if queue.popped or queue.pushed is not None:
                queue.commit()
        self.tokens.commit()
        for causes, unit in zip(self.causes, self.units):
            causes[unit.cause] += 1
        if before != (load.state, execute.state, store.state):
            self._note(before)
        self.cycle += 1

    def _note(self, before: tuple[int, ...]) -> None:
        """Units that began or ended in this cycle."""
        for number, unit in enumerate(self.units):
            if before[number] == IDLE != unit.state:
                self._began[number] = self.cycle
            elif before[number] != IDLE == unit.state:
                self.spans[number].append((unit.word.op, self._began[number], self.cycle))

    @np.errstate(all="ignore")
    def run(self, most: int = 10_000_000) -> int:
        """Steps until all is done; the number of cycles."""
        moved, quiet = self.cycle, 0
        while not self.done:
            self._step()
            held = self.front.state == HALT or self.front.stalled
            if held and all(u.cause in WAITING for u in self.units):
                quiet += 1
            else:
                quiet = 0
            if quiet > 2:
                waits = ", ".join(f"{QUEUES[n]} {u.cause}" for n, u in enumerate(self.units))
                raise UserError("the queues wait for each other", op="npu", got=waits)
            if self.cycle - moved > most:
                raise UserError("too many cycles", op="npu", expected=f"at most {most}")
        return self.cycle

    def counts(self) -> Counts:
        """The events of the run so far."""
        x, d = self.execute, self.dram
        memories = (x.scratchpad_reads, x.accumulator_reads, x.accumulator_writes)
        return Counts(self.cycle, x.macs, *memories, x.lane_beats, d.read_bytes, d.written_bytes)

    def counters(self) -> Counters:
        """What the run did so far."""
        causes = {QUEUES[n]: dict(c) for n, c in enumerate(self.causes)}
        return counters_of(self.p, self.counts(), causes)
