"""The front end, register by register: program memory, loops, queues and tokens.

A word takes two cycles, one to read it and one to send it to its queue; a full queue holds it.
`loop` and `end` repeat what is between them; each turn adds the steps of its level to the offsets
of three sets, and an instruction's addresses are moved by the set it names. No token orders `config
seed` and the store queue, which draws: after a word that rounds by chance it is refused. Invariant:
what a unit sees of queues and tokens is their state before the edge; `commit` is the edge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from ...core.errors import UserError
from .instructions import (
    FIELDS,
    POST_NEXT,
    POST_PREV,
    WAIT_NEXT,
    WAIT_PREV,
    Code,
    Instruction,
    text,
)

FETCH, DECODE, HALT = 1, 2, 3  # states of the front end; 0 before it is started
LEVELS, SETS = 4, 4
MOST_WORDS = 10_000_000  # that a program may run
# Channels of tokens: (from, to) by queue.
CHANNELS = ((0, 1), (1, 0), (1, 2), (2, 1))


@dataclass
class Queue:
    """Instructions that wait before a unit."""

    depth: int
    items: deque[Instruction] = field(default_factory=deque)
    pushed: Instruction | None = None
    popped: bool = False

    @property
    def full(self) -> bool:
        """Whether it takes no more in this cycle."""
        return len(self.items) == self.depth

    def commit(self) -> None:
        """The edge."""
        if self.popped:
            self.items.popleft()
            self.popped = False
        if self.pushed is not None:
            self.items.append(self.pushed)
            self.pushed = None


@cache
def waits(queue: int, tokens: int) -> tuple[int, ...]:
    """Channels that an instruction of a queue takes a token from."""
    wanted = {queue - 1: tokens & WAIT_PREV, queue + 1: tokens & WAIT_NEXT}
    return tuple(n for n, (of, to) in enumerate(CHANNELS) if to == queue and wanted[of])


@cache
def posts(queue: int, tokens: int) -> tuple[int, ...]:
    """Channels that it puts a token into."""
    wanted = {queue - 1: tokens & POST_PREV, queue + 1: tokens & POST_NEXT}
    return tuple(n for n, (of, to) in enumerate(CHANNELS) if of == queue and wanted[to])


class Tokens:
    """Four counters."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.counts = [0, 0, 0, 0]
        self.change = [0, 0, 0, 0]

    def take(self, channels: Sequence[int]) -> bool:
        """One of each, if all are there."""
        for c in channels:
            if not self.counts[c]:
                return False
        for c in channels:
            self.change[c] -= 1
        return True

    def put(self, channels: Sequence[int]) -> bool:
        """One into each, if all have room."""
        for c in channels:
            if self.counts[c] == self.most:
                return False
        for c in channels:
            self.change[c] += 1
        return True

    def commit(self) -> None:
        """The edge."""
        if any(self.change):
            self.counts = [a + b for a, b in zip(self.counts, self.change)]
            self.change = [0, 0, 0, 0]


def moved(one: Instruction, offsets: Sequence[tuple[int, int]]) -> Instruction:
    """An Instruction with its addresses moved by the offsets (local, dram) of its sets."""
    if not (one["set"] or one["second_set"] or one["result_set"]):
        return one
    values = dict(one.values)
    widths = {f.name: f.width for f in FIELDS[one.op]}
    sets = {"local": "set", "dram": "set", "second": "second_set", "result": "result_set"}
    for name, chosen in sets.items():
        if name in widths and one[chosen]:
            step = offsets[one[chosen]][name == "dram"]
            values[name] = (one[name] + step) % (1 << widths[name])
    return Instruction(one.op, tuple(values.items()))


class Sequencer:
    """Loops and offsets: the words of a program in the order they run."""

    def __init__(self, program: Code) -> None:
        self.program = program
        self.pc = 0
        self.offsets = [(0, 0)] * SETS
        self.steps = [[(0, 0)] * SETS for _ in range(LEVELS)]
        self.stack: list[tuple[int, int, list[tuple[int, int]]]] = []
        self.seed: int | None = None  # of a config that was run in this cycle
        self.drawn = False  # whether a word was sent that rounds by chance

    @property
    def word(self) -> Instruction:
        """The word at hand."""
        return self.program[self.pc]

    def advance(self) -> Instruction | None:
        """Goes on past the word at hand: gives it as its queue gets it, or runs one of no queue."""
        one = self.word
        self.pc += 1
        if one.queue is not None:
            self.drawn |= bool(one["stochastic"])
            return moved(one, self.offsets)
        if one.op == "config":
            if one["seed"] and self.drawn:
                why = "config and store race for the seed: it comes before all stochastic words"
                raise UserError(why, op="npu", got=text(one))
            if one["seed"]:
                self.seed = one["dram"]
            else:
                self.steps[one["level"]][one["set"]] = (one["local"], one["dram"])
        elif one.op == "loop":
            self.stack.append((self.pc, one["turns"] - 1, list(self.offsets)))
        elif one.op == "end":
            start, left, saved = self.stack.pop()
            if left:
                step = self.steps[len(self.stack)]
                self.stack.append((start, left - 1, saved))
                pairs = zip(self.offsets, step)
                self.offsets = [((a + c) % 65536, (b + d) % 2**32) for (a, b), (c, d) in pairs]
                self.pc = start
            else:
                self.offsets = saved
        return None


def words(program: Code) -> Iterator[Instruction]:
    """The words of a program as queues get them, in the order they are sent."""
    sequencer, count = Sequencer(program), 0
    while sequencer.word.op != "halt":
        count += 1
        if count > MOST_WORDS:
            raise UserError("the program runs too many words", op="npu", expected=MOST_WORDS)
        sent = sequencer.advance()
        if sent is not None:
            yield sent


class Front:
    """Fetch and decode."""

    def __init__(self, program: Code, queues: list[Queue]) -> None:
        self.sequencer = Sequencer(program)
        self.queues = queues
        self.state = FETCH
        self.stalled = False

    def step(self) -> None:
        """One edge."""
        self.sequencer.seed = None
        self.stalled = False
        if self.state == FETCH:
            self.state = DECODE
        elif self.state == DECODE:
            one = self.sequencer.word
            if one.op == "halt":
                self.state = HALT
                return
            queue = None if one.queue is None else self.queues[one.queue]
            if queue is not None and queue.full:
                self.stalled = True
                return
            sent = self.sequencer.advance()
            if queue is not None:
                queue.pushed = sent
            self.state = FETCH
