"""Products of matrices, and what the vector unit makes of them, as programs with data laid out.

Each result of the Layout becomes loads, a few `matmul`, vector steps on its rows and stores; with
K = 0 vector steps are all there is. Invariant: the values are those of the machine's arithmetic in
this order, the times those of `timeline`; each program fits the chip's program memory and starts
with no tokens; addresses of DRAM do not change times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from .arithmetic import Array
from .check import prove
from .front import words
from .instructions import Words, instruction
from .layout import Layout, too_small
from .machine import Machine
from .result import Result
from .timing import Counts, counts_of, run_cycles

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

    def run(self, left: Array, right: Array) -> tuple[Array, int]:
        """The result and the cycles, by the register-level simulator."""
        memory, cycles = self.pack(left, right), 0
        for program in self.program():
            cycles += Machine(self.p, program, memory).run()
        return self.unpack(memory), cycles

    def about(self) -> float:
        """About how many cycles, in one step: the longest of what the three units do. All results
        of some rows are taken for the first of them."""
        busy: Counter[int | None] = Counter()
        for outer, times in {0: self.outers - 1, self.outers - 1: 1}.items():
            one = Result(self, outer, 0, 2, 2)
            for word in words([*one.loads(0), *one.words([]), HALT]):
                busy[word.queue] += times * self.columns * run_cycles(self.p, word)
        return float(max(busy.values()))

    @cached_property
    def counts(self) -> Counts:
        """Cycles and events by closed forms, of programs that are proved to end without races;
        those are equal whose results are alike in being of the last rows, and columns."""
        total, last = Counts(), (self.outers - 1, self.columns - 1)
        kinds = Counter(
            tuple((last[0] * (o == last[0]), last[1] * (c == last[1])) for o, c in share)
            for share in self.shares()
        )
        for share, times in kinds.items():
            program = self.words(share)
            counted = counts_of(self.p, program, prove(self.p, program).cycles)
            total = total.plus(counted, times)
        return total

    def cycles(self) -> int:
        """The cycles by closed forms."""
        return self.counts.cycles
