"""Products of matrices, and what the vector unit makes of them, as programs with data laid out.

Each result of the Layout becomes loads, a few `matmul`, vector steps on its rows and stores; with
K = 0 vector steps are all there is. Invariant: the values are those of the machine's arithmetic in
this order, the times those of `timeline`; each program fits the chip's program memory and starts
with no tokens; addresses of DRAM do not change times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from .check import prove
from .instructions import Words, instruction
from .layout import Layout, too_small
from .machine import Machine
from .result import Result
from .timing import Counts, counts_of

HALT = instruction("halt")

ResultAt = tuple[int, int]  # a result: which rows, which tile of columns


class Product(Layout):
    """A product as programs."""

    def shares(self) -> Iterator[list[ResultAt]]:
        """The results of each program, one after the other."""
        one = Result(self, 0, 0, 2, 2)
        each = len(one.words(one.loads(0)))
        room = (self.p.program_words - 1) // each
        if room < 1:
            raise too_small("program_words", 1 << each.bit_length(), self.p.program_words)
        found: list[ResultAt] = []
        for outer in range(self.outers):
            for column in range(self.columns):
                found.append((outer, column))
                if len(found) == room:
                    yield found
                    found = []
        if found:
            yield found

    def words(self, share: Sequence[ResultAt]) -> Words:
        """The program of some results: the loads of a step stand before the work of the one before
        it, so that a queue that is full does not hold them back."""
        per = max(1, len(self.parts()))
        results = [
            Result(self, outer, column, i * per, i) for i, (outer, column) in enumerate(share)
        ]
        made = results[0].loads(0)
        for i, one in enumerate(results):
            made += one.words(results[i + 1].loads(0) if i + 1 < len(results) else [])
        return [*made, HALT]

    def program(self) -> Iterator[Words]:
        """Programs that the chip runs one after the other."""
        for share in self.shares():
            yield self.words(share)

    # ---- running ----

    def run(self, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, int]:
        """The result and the cycles, by the register-level simulator."""
        memory, cycles = self.pack(left, right), 0
        for words in self.program():
            cycles += Machine(self.p, words, memory).run()
        return self.unpack(memory), cycles

    @cached_property
    def _times(self) -> Counter[tuple[tuple[bool, bool], ...]]:
        """How often there is a program with these results: whether of the last rows, columns."""
        last = (self.outers - 1, self.columns - 1)
        return Counter(
            tuple((o == last[0], c == last[1]) for o, c in share) for share in self.shares()
        )

    def over_programs(self, measure: Callable[[Words], Counts]) -> Counts:
        """The sum of a measure of all programs; equal ones are measured once."""
        total = Counts()
        last = (self.outers - 1, self.columns - 1)
        for kinds, times in self._times.items():
            share = [(last[0] if o else 0, last[1] if c else 0) for o, c in kinds]
            total = total.plus(measure(self.words(share)), times)
        return total

    def about(self) -> float:
        """About how many cycles, in one step: the longest of what the three units do."""
        p = self.p
        results, steps = self.outers * self.columns, len(self.parts())
        rows, beats = self.m * self.strips, p.columns // p.lanes
        left, right = (bytes // p.dma_bytes for bytes in (self.row, self.right_row))  # of a row
        planes = [self.planes(i) for i in range(len(self.vector_operands))]
        wide = sum(n for n, held in zip(planes, self.held) if not held)
        vector = rows * (len(self.steps) * (beats + 4) + wide + 2 * self.held.count(False))
        if p.dataflow == "os":
            mesh = results * (self.k + 2 * p.rows + p.columns)
            loads = results * self.k * (left + right)
        else:
            tiles = self.depths * self.columns
            mesh = tiles * (self.m + self.outers * (2 * p.rows + p.columns + 4))
            loads = tiles * (self.m * left + self.outers * p.rows * right)
        moves = 1 + (self.tiles if self.left_apart and p.dataflow != "os" else 1)  # of a step
        loads += (
            rows * wide + results * (steps * moves + len(self.vector_operands)) * p.dram_latency
        )
        stores = rows * sum(2 + beats + s // p.dma_bytes + 1 for s in self.strides)
        return float(max(mesh + vector, loads * p.gap, stores))

    @cached_property
    def counts(self) -> Counts:
        """Cycles and events by closed forms, of programs that are proved to end without races."""

        def counted(words: Words) -> Counts:
            return counts_of(self.p, words, prove(self.p, words).cycles)

        return self.over_programs(counted)

    def cycles(self) -> int:
        """The cycles by closed forms."""
        return self.counts.cycles
