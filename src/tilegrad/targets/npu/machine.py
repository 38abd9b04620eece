"""The register-level simulator: front end, three units, memories and DRAM, a cycle at a time.

Invariant: `step` is one clock edge of the whole chip; `registers` is what the RTL's registers hold
before it, by name, and `events` what its write ports do in it. Memories that are read and written
at one address in one cycle give what was there before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.errors import UserError
from .arithmetic import bits_of, float_bits, seeded
from .check import check
from .count import Counters, Counts, counters_of
from .dma import Load, Store
from .dram import Dram
from .execute import Execute
from .front import HALT, Front, Queue, Tokens
from .instructions import QUEUES, Instruction
from .parameters import Parameters
from .unit import IDLE, RUN

WAITING = frozenset(
    ("token", "empty", "token_room")
)  # causes of a cycle in which a unit does nothing


class Machine:
    """An NPU with a program and a DRAM."""

    def __init__(
        self,
        p: Parameters,
        program: Sequence[Instruction],
        memory: np.ndarray,
        stalls: int | None = None,
    ) -> None:
        check(p, program)
        self.p = p
        self.dram = Dram(memory, p.dma_bytes, p.dram_latency, p.gap, stalls)
        self.queues = [Queue(p.queue) for _ in range(3)]
        self.tokens = Tokens(p.tokens)
        self.front = Front(p, program, self.queues)
        self.load = Load(p, self.queues[0], self.tokens, self.dram)
        self.execute = Execute(p, self.queues[1], self.tokens, self.load)
        self.store = Store(p, self.queues[2], self.tokens, self.dram, self.execute.sums)
        self.units = (self.load, self.execute, self.store)
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

    def step(self) -> None:
        """One clock edge."""
        with np.errstate(all="ignore"):  # infinities and NaNs are values here
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

    def run(self, most: int = 10_000_000) -> int:
        """Steps until all is done; the number of cycles."""
        with np.errstate(all="ignore"):
            return self._run(most)

    def _run(self, most: int) -> int:
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

    def registers(self) -> dict[str, Any]:
        """Registers that the RTL has too, before the edge."""
        x, s, ld = self.execute, self.store, self.load
        found: dict[str, Any] = {
            "pc": self.front.sequencer.pc,
            "front": self.front.state,
            "tokens": list(self.tokens.counts),
            "waiting": [len(q.items) for q in self.queues],
            "states": [u.state for u in self.units],
            "sums": self.bits(x.mesh.sums),
            "inputs": bits_of(x.mesh.inputs, self.p.element).astype(np.int64),
            "still": x.mesh.still_bits().astype(np.int64),
            "index": x.mesh.index.astype(np.int64),
            "arvalid": int(ld.asking),
            "araddr": ld.address if ld.asking else None,
            "arlen": ld.read[1] - 1 if ld.read else None,
            "awvalid": int(s.write is not None),
            "awaddr": s.write[0] if s.write else None,
            "awlen": s.write[1] - 1 if s.write else None,
            "wvalid": int(s.shown is not None),
            "wdata": s.shown[0] if s.shown else None,
            "wstrb": s.shown[1] if s.shown else None,
            "wlast": int(s.shown[2]) if s.shown else None,
        }
        return found

    def events(self) -> dict[str, Any]:
        """What was written in the cycle of the last step."""
        found: dict[str, Any] = {"scratchpad": None, "accumulator": None}
        if self.load.written is not None:
            row, bits, index = self.load.written
            found["scratchpad"] = (
                row,
                bits.astype(np.int64) | (index.astype(np.int64) << self.p.element_bits),
            )
        if self.execute.written is not None:
            row, values = self.execute.written
            found["accumulator"] = (row, self.bits(values))
        return found

    def bits(self, values: np.ndarray) -> np.ndarray:
        """The 32 bits of sums."""
        if self.p.floating:
            return float_bits(values).astype(np.int64)
        return values.view(np.uint32).astype(np.int64)

    def counts(self) -> Counts:
        """The events of the run so far."""
        x, d = self.execute, self.dram
        memories = (x.scratchpad_reads, x.accumulator_reads, x.accumulator_writes)
        return Counts(self.cycle, x.macs, *memories, x.lane_beats, d.read_bytes, d.written_bytes)

    def counters(self) -> Counters:
        """What the run did so far."""
        causes = {QUEUES[n]: dict(c) for n, c in enumerate(self.causes)}
        return counters_of(self.p, self.counts(), causes)


def run(p: Parameters, program: Sequence[Instruction], memory: np.ndarray) -> Machine:
    """Runs a program to its end; the Machine with its counters."""
    machine = Machine(p, program, memory)
    machine.run()
    return machine


__all__ = ["Counters", "Machine", "run"]
