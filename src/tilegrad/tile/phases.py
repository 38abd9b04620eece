"""Barriers and groups of asynchronous work as counts: what has come, and what each end made known.

Invariant: `over` holds one clock per phase (or round) that is over, and each clock's entry for the
barrier itself is the number of phases that are over with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.node import Node
from .access import Clock, join


class Bar:
    """One barrier: the phase under way, what came, and the clock of each phase that is over."""

    __slots__ = (
        "agent",
        "arrived",
        "coming",
        "count",
        "expected",
        "landed",
        "name",
        "over",
        "waits",
    )

    def __init__(self, name: str, count: int, agent: int) -> None:
        self.name, self.count, self.agent = name, count, agent
        self.arrived = self.expected = self.landed = 0
        self.coming: Clock | None = None
        self.over: list[Clock] = []
        self.waits: list[tuple[int, int, int, Node]] = []  # phases over, agent, epoch, op

    def come(self, clock: Clock, arrivals: int, expected: int, landed: int) -> None:
        """Something comes; it may end the phase."""
        if self.coming is None:
            self.coming = list(clock)
        else:
            join(self.coming, clock)
        self.arrived += arrivals
        self.expected += expected
        self.landed += landed
        if self.arrived == self.count and self.expected == self.landed:
            self.coming[self.agent] = len(self.over) + 1
            self.over.append(self.coming)
            self.coming, self.arrived, self.expected, self.landed = None, 0, 0, 0

    def __str__(self) -> str:
        text = f"{self.name} (phase {len(self.over)}: {self.arrived} of {self.count} arrivals"
        if self.expected or self.landed:
            text += f", {self.expected} bytes expected and {self.landed} copied"
        return text + ")"


class Round:
    """A named barrier: threads that came in the round under way, clocks of rounds that are over."""

    def __init__(self, number: int, agent: int) -> None:
        self.number, self.agent = number, agent
        self.arrived = self.threads = 0
        self.coming: Clock | None = None
        self.over: list[Clock] = []
        self.node: Node | None = None


@dataclass
class Group:
    """Asynchronous work of a role: ops issued, last op of each group, last op waited for."""

    agent: int
    issued: int = 0
    committed: list[int] = field(default_factory=list)
    known: int = 0
    last: Node | None = None
