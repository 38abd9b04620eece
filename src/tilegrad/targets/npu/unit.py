"""What load, execute and store share: take an instruction, run it, post tokens.

A unit is idle, runs or posts. It takes the head of its queue in an idle cycle, if the tokens that
the instruction waits for are there; runs a number of cycles that follows from the instruction and
the parameters; and posts in one more cycle, later if a channel is full. Invariant: registers change
in `step` alone, once a cycle.
"""

from __future__ import annotations

from .front import Queue, Tokens, posts, waits
from .instructions import Instruction
from .parameters import Parameters

IDLE, RUN, POST = 0, 1, 2
NOTHING = Instruction("halt")


class Unit:
    """The states of one unit."""

    number = 0

    def __init__(self, p: Parameters, queue: Queue, tokens: Tokens) -> None:
        self.p, self.queue, self.tokens = p, queue, tokens
        self.state = IDLE
        self.word = NOTHING
        self.cause = "empty"  # what this cycle was spent on

    def step(self) -> None:
        """One edge."""
        if self.state == IDLE:
            self._take()
        elif self.state == RUN:
            self.cause = "busy"
            if self.run():
                self.state = POST
        else:
            done = self.tokens.put(posts(self.number, self.word["tokens"]))
            self.cause = "busy" if done else "token_room"
            if done:
                self.state = IDLE

    def _take(self) -> None:
        if not self.queue.items:
            self.cause = "empty"
            return
        word = self.queue.items[0]
        if not self.tokens.take(waits(self.number, word["tokens"])):
            self.cause = "token"
            return
        self.cause = "busy"
        self.queue.popped = True
        self.word = word
        self.state = POST if word.op == "sync" else RUN
        if self.state == RUN:
            self.begin(word)

    def begin(self, word: Instruction) -> None:
        """Sets the registers of an instruction that runs from the next cycle on."""

    def run(self) -> bool:
        """One cycle of it; whether it was the last."""
        return True
