"""Closed forms: how long an instruction runs, and when each of a program does, without its values.

Times of a program follow from the lengths by rules of the form "not before": a word is sent when
its queue has room, taken when its unit is free and its tokens are there, and posts when there is
room for tokens. Invariant: `run_cycles` and `timeline` give what the register-level simulator does,
cycle for cycle, with DRAM that never stalls; a program that cannot end is an error.

What a program does (bytes of each memory, multiplications, energy) is counted from its words: these
counts are those of the register-level simulator at its end; `counters_of` is the one place where
counts become energy.

A run as a trace that Perfetto and chrome://tracing show is Trace Event JSON, times in microseconds
at the chip's clock, a lane for each queue, one event an instruction from when it is taken until it
posts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from ...core.errors import UserError
from .front import CHANNELS, Sequencer, posts, waits, words
from .instructions import QUEUES, Code, Instruction, text
from .parameters import BITS, Parameters


def row_bytes(p: Parameters, word: Instruction) -> int:
    """Bytes that a row of a move takes in DRAM."""
    columns = word["columns"]
    if word.op == "move_out":
        return columns * 4 if word["raw"] else columns * p.element_bits // 8
    bits = BITS[p.weights] if word["narrow"] else p.element_bits
    return (columns * bits + 7) // 8 + ((columns * 2 + 7) // 8 if word["indexed"] else 0)


def planes_of(p: Parameters, word: Instruction) -> int:
    """Rows of the scratchpad that the vector unit takes for each row of sums; 0 of other words."""
    if word.op != "vector":
        return 0
    return p.planes if word.kind == "load" else int(word.kind == "take")


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
    if planes := planes_of(p, word):
        return word["count"] * (planes + 2)
    if word.op in ("vector", "reduce"):
        return word["count"] * (p.columns // p.lanes + 4)
    beats = row_beats(p, word)
    if word.op == "move_in":
        return p.dram_latency + (word["rows"] * beats - 1) * p.gap + 2
    return _store_cycles(p, word, beats)


def _store_cycles(p: Parameters, word: Instruction, beats: int) -> int:
    """Reading and narrowing a row hide the port's gap, as far as it is long enough."""
    before, gap, width = 2 + p.columns // p.lanes, p.gap, p.dma_bytes
    start, stride = word["dram"], word["stride"]
    time, ready = 0, 0  # ready: when the port takes the next beat
    for row in range(word["rows"]):
        time += before
        address, left = start + row * stride, beats
        while left:
            count = burst(p, address, left)
            time += 1  # the address
            first = max(time, ready)
            time = first + (count - 1) * gap + 1
            ready = time - 1 + gap
            address, left = address + count * width, left - count
    return time + p.dram_latency + 1


@dataclass
class Event:
    """One instruction of a run: cycles when it was sent, taken, and posted."""

    word: Instruction
    sent: int
    taken: int = -1
    posted: int = -1


class Queues:
    """Three queues that wait for tokens: whatever can go on does, at the first cycle it may; not
    `timed`, as if no word took long."""

    def __init__(self, p: Parameters, program: Code, timed: bool = True) -> None:
        self.p, self.sequencer, self.timed = p, Sequencer(program), timed
        self.seed: int | None = None  # of stochastic rounding; none comes after a word that draws
        self.events: list[list[Event]] = [[] for _ in QUEUES]  # in the order of each queue
        self.next = [0] * len(QUEUES)  # of each queue, to be taken
        self.running: list[Event | None] = [None] * len(QUEUES)  # taken, not yet posted
        self.free = [-1] * len(QUEUES)  # when a unit posted last
        self.put: list[list[int]] = [[] for _ in CHANNELS]  # when tokens were posted
        self.got: list[list[int]] = [[] for _ in CHANNELS]  # and taken
        self.cycle = 0  # of the next fetch
        self.lengths: dict[Instruction, int] = {}

    @property
    def cycles(self) -> int:
        """From the first fetch until all is done."""
        return max(self.cycle + 1, *self.free) + 1

    def words(self) -> Iterator[Instruction]:
        """Each word as it is taken; an error where queues wait for each other."""
        moving = True
        while moving:
            moving = False
            while self.fetch():
                moving = True
            for number in range(len(QUEUES)):
                while (idle := self.running[number] is None) or self.post(number):
                    moving |= not idle
                    event = self.take(number)
                    if event is None:
                        break
                    moving = True
                    yield event.word
        late = [(n, self.events[n][at:]) for n, at in enumerate(self.next)]
        waiting = [f"{QUEUES[n]}: {text(events[0].word)}" for n, events in late if events]
        waiting += [f"{QUEUES[n]}: no room for a token" for n, e in enumerate(self.running) if e]
        if waiting:
            raise UserError("the queues wait for each other", op="npu", got="; ".join(waiting))

    def fetch(self) -> bool:
        """Sends one word, if its queue has room at a time that is known."""
        sequencer, decode = self.sequencer, self.cycle + 1
        one = sequencer.word
        if one.op == "halt":
            return False
        queue = [] if one.queue is None else self.events[one.queue]
        before = len(queue) - self.p.queue
        if before >= 0:
            if queue[before].taken < 0:
                return False
            decode = max(decode, queue[before].taken + 1)
        sent = sequencer.advance()
        if sent is not None:
            queue.append(Event(sent, decode))
        elif sequencer.seed is not None:
            self.seed, sequencer.seed = sequencer.seed, None
        self.cycle = decode + 1
        return True

    def take(self, number: int) -> Event | None:
        """Begins the next instruction of a queue, if all it waits for is known."""
        if self.next[number] == len(self.events[number]):
            return None
        event = self.events[number][self.next[number]]
        channels, when = waits(number, event.word["tokens"]), max(event.sent, self.free[number])
        for c in channels:
            token = len(self.got[c])
            if token == len(self.put[c]):
                return None
            when = max(when, self.put[c][token])
        event.taken = when + 1
        for c in channels:
            self.got[c].append(event.taken)
        self.running[number] = event
        self.next[number] += 1
        return event

    def post(self, number: int) -> bool:
        """Ends what runs, if there is room for its tokens at a time that is known."""
        event = self.running[number]
        assert event is not None
        channels, when = posts(number, event.word["tokens"]), event.taken + self.length(event.word)
        for c in channels:
            before = len(self.put[c]) - self.p.tokens
            if before >= len(self.got[c]):
                return False
            when = max(when, self.got[c][before]) if before >= 0 else when
        event.posted = when + 1
        for c in channels:
            self.put[c].append(event.posted)
        self.free[number], self.running[number] = event.posted, None
        return True

    def length(self, word: Instruction) -> int:
        """`run_cycles`, each once."""
        if word.op == "sync" or not self.timed:
            return 0
        if word not in self.lengths:
            self.lengths[word] = run_cycles(self.p, word)
        return self.lengths[word]


def timeline(p: Parameters, program: Code) -> Queues:
    """When each instruction of a program runs, by closed forms."""
    made = Queues(p, program)
    for _ in made.words():
        pass
    return made


# ---- counts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """What a run did: cycles of each unit by cause, bytes of each memory, energy in pJ by part."""

    cycles: int
    causes: dict[str, dict[str, int]]
    bytes: dict[str, int]
    macs: int  # of the whole mesh, padding too
    peak_macs: int  # a cycle
    energy: dict[str, float]


@dataclass(frozen=True)
class Counts:
    """Events: rows of memories read and written, beats of lanes, bytes of DRAM."""

    cycles: int = 0
    macs: int = 0
    scratchpad_reads: int = 0
    accumulator_reads: int = 0
    accumulator_writes: int = 0
    lane_beats: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def plus(self, other: Counts, times: int = 1) -> Counts:
        """The sum of these and some times others."""
        return Counts(
            *(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Counts))
        )


def word_counts(p: Parameters, one: Instruction) -> dict[str, int]:
    """What one word does, as its unit gets it."""
    count, os = one["count"], p.dataflow == "os"
    if one.op == "move_in":
        return {"read_bytes": one["rows"] * row_beats(p, one) * p.dma_bytes}
    if one.op == "move_out":
        return {"written_bytes": one["rows"] * row_bytes(p, one)}
    if one.op == "preload":
        return {"scratchpad_reads": one["rows"]}
    if one.op == "matmul":
        rows = one["rows"] * one["drain"] if os else count
        return {
            "macs": p.rows * p.columns * count * (1 + one["mixed"]),
            "scratchpad_reads": (1 + os) * count,
            "accumulator_writes": rows,
            "accumulator_reads": rows * one["accumulate"],
        }
    if planes := planes_of(p, one):
        return {"scratchpad_reads": count * planes, "accumulator_writes": count}
    if one.op not in ("vector", "reduce"):
        return {}
    reads = count * (1 if one.op == "reduce" else 2)
    beats = count * p.columns
    return {"accumulator_reads": reads, "accumulator_writes": count, "lane_beats": beats}


def counts_of(p: Parameters, program: Code, cycles: int) -> Counts:
    """The counts of a program that takes some cycles."""
    total: Counter[str] = Counter()
    for one in words(program):
        total.update(word_counts(p, one))
    return Counts(cycles, **total)


def counters_of(
    p: Parameters, counts: Counts, causes: dict[str, dict[str, int]] | None = None
) -> Counters:
    """Bytes and energy of counts."""
    e = p.energy
    row, sums = p.row_elements * p.stored_bits // 8, p.columns * 4
    made = {
        "dram_read": counts.read_bytes,
        "dram_written": counts.written_bytes,
        "scratchpad_read": counts.scratchpad_reads * row,
        "scratchpad_written": counts.read_bytes,
        "accumulator_read": counts.accumulator_reads * sums,
        "accumulator_written": counts.accumulator_writes * sums,
    }
    scratchpad = made["scratchpad_read"] + made["scratchpad_written"]
    accumulator = made["accumulator_read"] + made["accumulator_written"]
    energy = {
        "mac": counts.macs * e.mac,
        "scratchpad": scratchpad * e.scratchpad_byte,
        "accumulator": accumulator * e.accumulator_byte,
        "vector": counts.lane_beats * e.vector,
        "dram": (made["dram_read"] + made["dram_written"]) * e.dram_byte,
        "idle": counts.cycles * e.idle_cycle,
    }
    return Counters(counts.cycles, causes or {}, made, counts.macs, p.peak_macs, energy)


# ---- traces -------------------------------------------------------------------------------------


def perfetto(p: Parameters, made: Queues) -> str:
    """The trace of a timeline."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": n + 1, "name": "thread_name", "args": {"name": name}}
        for n, name in enumerate(QUEUES)
    ]
    for number, lane in enumerate(made.events):
        for one in lane:
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": number + 1,
                    "name": one.word.op,
                    "ts": one.taken / p.clock,
                    "dur": (one.posted - one.taken + 1) / p.clock,
                    "args": {"instruction": text(one.word), "cycle": one.taken},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
