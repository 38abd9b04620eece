"""The words of a program in an order in which they may run, with the proof that any other does too.

Load, execute and store meet by tokens alone, and each channel has one queue that posts and one that
waits: the n-th token taken is the n-th posted, whatever memory does to times. So whether the queues
end does not depend on times, and who knows of whom is decided by the clocks of Tile IR's checks
(`tile/access`). Invariant: a program whose words all come has no deadlock, with queues and channels
as long as the chip's, and no two queues that touch a row without a token between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...core.errors import UserError
from ...tile.access import Clock, join
from .front import CHANNELS, posts, waits
from .instructions import EXECUTE, LOAD, QUEUES, STORE, Instruction, text
from .parameters import Parameters
from .timing import Event, Queues, row_beats

MEMORIES = {  # the two queues that touch each, the one that writes first
    "scratchpad": (LOAD, EXECUTE),
    "accumulators": (EXECUTE, STORE),
    "DRAM": (STORE, LOAD),
}
Rows = Any  # numbers of rows: a slice or an array


def touches(p: Parameters, one: Instruction) -> Iterator[tuple[str, Rows]]:
    """The memories that a word shares with another queue, and which rows (beats of DRAM)."""
    count = one["rows"] if one.op in ("move_in", "move_out", "preload") else one["count"]
    here = slice(one["local"], one["local"] + count)
    if one.op in ("move_in", "move_out"):
        yield ("scratchpad" if one.op == "move_in" else "accumulators"), here
        starts = (one["dram"] + np.arange(count) * one["stride"]) // p.dma_bytes
        yield "DRAM", (starts[:, None] + np.arange(row_beats(p, one))).ravel()
    elif one.op == "preload":
        yield "scratchpad", here
    elif one.op == "matmul":
        yield "scratchpad", here
        if p.dataflow == "os":
            yield "scratchpad", slice(one["second"], one["second"] + count)
            count = one["rows"] * one["drain"]
        yield "accumulators", slice(one["result"], one["result"] + count)
    elif one.op in ("vector", "reduce"):
        if one.op == "vector" and one.kind in ("take", "load"):
            read = (1 if one["hold_first"] else count) * (1 if one.kind == "take" else p.planes)
            yield "scratchpad", slice(one["local"], one["local"] + read)
        yield "accumulators", slice(one["result"], one["result"] + count)


class Order(Queues):
    """The same with what each queue knows of the others."""

    def __init__(self, p: Parameters, program: Sequence[Instruction], timed: bool = True) -> None:
        super().__init__(p, program, timed)
        self.clocks: list[Clock] = [[0] * len(QUEUES) for _ in QUEUES]
        self.tokens: list[deque[Clock]] = [deque() for _ in CHANNELS]
        sizes = {"scratchpad": p.scratchpad_rows, "accumulators": p.accumulator_rows, "DRAM": 0}
        # by memory and queue: the count of the word that touched a row last
        self.last = {
            (m, q): np.zeros(size, np.int64) for m, size in sizes.items() for q in MEMORIES[m]
        }

    def post(self, number: int) -> bool:
        """A token tells what its queue knows."""
        event, done = self.running[number], super().post(number)
        if event is not None and done:
            for c in posts(number, event.word["tokens"]):
                self.tokens[c].append(list(self.clocks[number]))
        return done

    def take(self, number: int) -> Event | None:
        """An error where a word touches what another queue touched, and no token says when."""
        event = super().take(number)
        if event is None:
            return None
        one, clock = event.word, self.clocks[number]
        for c in waits(number, one["tokens"]):
            join(clock, self.tokens[c].popleft())
        clock[number] += 1
        for memory, rows in touches(self.p, one) if one.op != "sync" else ():
            pair = MEMORIES[memory]
            other = pair[pair[0] == number]
            if memory == "DRAM":
                self._grow(int(rows.max()) + 1)
            seen = self.last[memory, other][rows]
            latest = int(seen.max()) if seen.size else 0
            if latest > clock[other]:
                raise UserError(
                    f"{QUEUES[number]} and {QUEUES[other]} race in the {memory}",
                    op="npu",
                    got=f"{text(one)}; {text(self.events[other][latest - 1].word)}",
                    hint="a token posted by the one and waited for by the other orders them",
                )
            self.last[memory, number][rows] = clock[number]
        return event

    def _grow(self, beats: int) -> None:
        for q in MEMORIES["DRAM"]:
            known = self.last["DRAM", q]
            if len(known) < beats:
                self.last["DRAM", q] = np.zeros(2 * beats, np.int64)
                self.last["DRAM", q][: len(known)] = known


def prove(p: Parameters, program: Sequence[Instruction]) -> Order:
    """That a program ends and that its queues do not race, whatever memory does to times."""
    made = Order(p, program)
    for _ in made.words():
        pass
    return made
