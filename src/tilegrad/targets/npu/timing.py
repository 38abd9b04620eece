"""Closed forms: how long an instruction runs, and when each of a program does, without its values.

Times of a program follow from the lengths by rules of the form "not before": a word is sent when
its queue has room, taken when its unit is free and its tokens are there, and posts when there is
room for tokens. Invariant: `run_cycles` and `timeline` give what the register-level simulator does,
cycle for cycle, with DRAM that never stalls; a program that cannot end is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import UserError
from .front import CHANNELS, Sequencer, posts, waits
from .instructions import QUEUES, Instruction, text
from .parameters import BITS, Parameters


def row_bytes(p: Parameters, word: Instruction) -> int:
    """Bytes that a row of a move takes in DRAM."""
    columns = word["columns"]
    if word.op == "move_out":
        return columns * 4 if word["raw"] else columns * p.element_bits // 8
    bits = BITS[p.weights] if word["narrow"] else p.element_bits
    return (columns * bits + 7) // 8 + ((columns * 2 + 7) // 8 if word["indexed"] else 0)


def row_beats(p: Parameters, word: Instruction) -> int:
    """Beats of the port for a row."""
    return -(-row_bytes(p, word) // p.dma_bytes)


def burst(p: Parameters, address: int, left: int) -> int:
    """Beats of the next burst: to the end of the row or of 4096 bytes."""
    return min(left, (4096 - address % 4096) // p.dma_bytes, 256)


def run_cycles(p: Parameters, word: Instruction) -> int:
    """Cycles that a unit runs an instruction, without the one that takes and the one that posts."""
    skew = p.rows + p.columns
    if word.op == "preload":
        return p.rows + 1
    if word.op == "matmul":
        if p.dataflow != "os":
            return word["count"] + skew
        late = word["sparse"] if p.sparse else 0
        return word["count"] + skew - 1 + late + (p.rows if word["drain"] else 0)
    if word.op == "vector" and word.kind in ("take", "load"):
        return word["count"] * ((1 if word.kind == "take" else p.planes) + 2)
    if word.op in ("vector", "reduce"):
        return word["count"] * (p.columns // p.lanes + 4)
    beats = row_beats(p, word)
    if word.op == "move_in":
        return p.dram_latency + (word["rows"] * beats - 1) * p.gap + 2
    return _store_cycles(p, word, beats)


def _store_cycles(p: Parameters, word: Instruction, beats: int) -> int:
    """Reading and narrowing a row hide the port's gap, as far as it is long enough."""
    before = 2 + p.columns // p.lanes
    time, ready = 0, 0  # ready: when the port takes the next beat
    for row in range(word["rows"]):
        time += before
        address, left = word["dram"] + row * word["stride"], beats
        while left:
            count = burst(p, address, left)
            time += 1  # the address
            first = max(time, ready)
            time = first + (count - 1) * p.gap + 1
            ready = time - 1 + p.gap
            address, left = address + count * p.dma_bytes, left - count
    return time + p.dram_latency + 1


@dataclass
class Event:
    """One instruction of a run: cycles when it was sent, taken, and posted."""

    word: Instruction
    queue: int
    sent: int
    taken: int = -1
    posted: int = -1


@dataclass
class Timeline:
    """When everything happens; `cycles` from the first fetch until all is done."""

    events: list[Event] = field(default_factory=list)
    cycles: int = 0

    def of(self, queue: int) -> list[Event]:
        """The events of a queue, in order."""
        return [e for e in self.events if e.queue == queue]

    def busy(self, queue: int) -> int:
        """Cycles that a unit takes, runs and posts."""
        return sum(e.posted - e.taken + 1 for e in self.of(queue))


class _Solver:
    """Advances whatever can be: each queue by the next of its rules."""

    def __init__(self, p: Parameters, program: Sequence[Instruction]) -> None:
        self.p, self.sequencer = p, Sequencer(program)
        self.made = Timeline()
        self.queues: list[list[Event]] = [[], [], []]
        self.at = [0, 0, 0]  # the next of each queue to take
        self.open: list[bool] = [False] * 3  # taken, not yet posted
        self.ends = [0, 0, 0]
        self.free = [-1, -1, -1]  # when a unit posted last
        self.taken: list[list[int]] = [[] for _ in CHANNELS]
        self.put: list[list[int]] = [[] for _ in CHANNELS]
        self.cycle = 0  # of the next fetch
        self.halted = False
        self.known: dict[Instruction, int] = {}

    def fetch(self) -> bool:
        """Sends one word, if its queue has room at a time that is known."""
        if self.halted:
            return False
        one = self.sequencer.program[self.sequencer.pc]
        decode = self.cycle + 1
        if one.op == "halt":
            self.halted, self.cycle = True, decode
            return True
        if one.queue is None:
            self.sequencer.control()
            self.cycle = decode + 1
            return True
        queue = self.queues[one.queue]
        before = len(queue) - self.p.queue
        if before >= 0:
            if queue[before].taken < 0:
                return False
            decode = max(decode, queue[before].taken + 1)
        event = Event(self.sequencer.send(), one.queue, decode)
        queue.append(event)
        self.made.events.append(event)
        self.sequencer.pc += 1
        self.cycle = decode + 1
        return True

    def take(self, number: int) -> bool:
        """Begins the next instruction of a queue, if all it waits for is known."""
        if self.open[number] or self.at[number] == len(self.queues[number]):
            return False
        event = self.queues[number][self.at[number]]
        channels = waits(number, event.word["tokens"])
        when = max(event.sent, self.free[number]) + 1
        for c in channels:
            if len(self.put[c]) <= len(self.taken[c]):
                return False
            when = max(when, self.put[c][len(self.taken[c])] + 1)
        for c in channels:
            self.taken[c].append(when)
        event.taken = when
        self.open[number] = True
        self.ends[number] = when + 1 + self.length(event.word)
        return True

    def length(self, word: Instruction) -> int:
        """`run_cycles`, each once."""
        if word.op == "sync":
            return 0
        if word not in self.known:
            self.known[word] = run_cycles(self.p, word)
        return self.known[word]

    def post(self, number: int) -> bool:
        """Ends what runs, if there is room for its tokens at a time that is known."""
        if not self.open[number]:
            return False
        event = self.queues[number][self.at[number]]
        channels, when = posts(number, event.word["tokens"]), self.ends[number]
        for c in channels:
            before = len(self.put[c]) - self.p.tokens
            if before >= 0:
                if len(self.taken[c]) <= before:
                    return False
                when = max(when, self.taken[c][before] + 1)
        for c in channels:
            self.put[c].append(when)
        event.posted = self.free[number] = when
        self.open[number] = False
        self.at[number] += 1
        return True

    def solve(self) -> Timeline:
        """Until all is done, or nothing moves."""
        moving = True
        while moving:
            moving = False
            while self.fetch():
                moving = True
            for number in range(3):
                while self.take(number) or self.post(number):
                    moving = True
        waiting = [
            f"{QUEUES[n]}: {text(q[self.at[n]].word)}"
            for n, q in enumerate(self.queues)
            if self.at[n] < len(q)
        ]
        if waiting or not self.halted:
            raise UserError(
                "the queues wait for each other", op="npu", got="; ".join(waiting) or "no halt"
            )
        self.made.cycles = max([self.cycle, *self.free]) + 1
        return self.made


def timeline(p: Parameters, program: Sequence[Instruction]) -> Timeline:
    """When each instruction of a program runs, by closed forms."""
    return _Solver(p, program).solve()
