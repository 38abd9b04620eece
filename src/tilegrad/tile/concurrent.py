"""Roles at the same time, with data (`interpret`) or without (`prove`): turns, things in flight.

Every role is a generator that stops where it waits, in the interpreter after each effect too; a
scheduler picks who goes next, a role or the head of a queue of asynchronous work, in turn or by a
seeded random choice. Who may touch what is decided by an Order (`ordering`) and not by luck: it is
told of every effect, and the first error that a Judge finds ends the run. Invariant: a race shows
whichever turn was taken, and a deadlock names every role and what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..core.errors import InternalError
from ..ir.block import Block
from ..ir.node import Node
from ..ir.types import Shape
from .access import Place, Region
from .check import Finding
from .ordering import Order, Role, Waiting
from .row import Touch

Steps = Generator["Waiting | list[Node] | None", None, Any]


class Program(Protocol):
    """A program of the grid that is being run."""

    rank: int  # within its cluster
    frame: Frame

    def block(self, frame: Frame, block: Block) -> Steps:
        """Run the Nodes of a Block."""


def cluster_of(program: Shape, size: int) -> list[Shape]:
    """The programs of the cluster of one: neighbours along the first axis of the grid."""
    if not program:
        return [()] * size
    first = program[0] // size * size
    return [(first + rank, *program[1:]) for rank in range(size)]


class RaceError(InternalError):
    """Two agents touch an element with nothing that orders them, or a fence is missing."""


class DeadlockError(InternalError):
    """No role can go on."""

    def __init__(self, waits: Sequence[Waiting]) -> None:
        self.waits = waits
        super().__init__("tile.interpret", "deadlock: " + "; ".join(map(str, waits)))


class Frame(NamedTuple):
    """Values of a program or of one of its roles."""

    role: Role
    values: dict[Node, Any]


class Judge(Order):
    """An Order of a run with data: it knows elements, not only boxes, and raises what it finds."""

    def note(self, key: object, found: Finding) -> None:
        """End the run; what nothing has written shows in the data itself."""
        if found.severity == "error" and found.rule != "uninitialised":
            kind = InternalError if found.rule in ("index", "arrivals") else RaceError
            raise kind("tile.interpret", f"{found.rule}: {found.message}")

    def may_touch(self, role: Role) -> bool:
        """Whether a role has itself waited for the launches before."""
        return role.waited

    def chosen(
        self, place: Place, node: Node, touch: Touch, values: Mapping[Node, Any]
    ) -> Region | None:
        """The elements that are touched."""
        storage = values[touch.memory]
        if storage.type.strides is not None or not touch.memory.shape:
            return super().chosen(place, node, touch, values)
        offset, mask = storage.elements(touch, values, node)
        return place.chosen(offset.reshape(-1) if mask is None else offset[mask])


@dataclass(eq=False)
class Task:
    """A program or a role being run."""

    program: Program
    steps: Steps
    waiting: Waiting | None = None
    roles: Sequence[Node] = ()  # that a program has come to
    done: bool = False

    def step(self) -> None:
        """Run to the next effect."""
        try:
            found = next(self.steps)
            self.waiting = None if isinstance(found, list) else found
            self.roles = found if isinstance(found, list) else ()
        except StopIteration:
            self.done = True


class Machine:
    """Turns and asynchronous work of one program, or of those of a cluster.

    Programs of a cluster run up to their roles, then these run at the same time; a cluster's
    first roles begin together and its programs end together, as on the machine.
    """

    def __init__(self, seed: int | None, order: Order) -> None:
        self.order = order
        self.random = None if seed is None else np.random.default_rng(seed)
        self.eager = 0.5 if self.random is None else float(self.random.choice([0.02, 0.3, 0.8]))
        self.programs: Sequence[Program] = ()
        self.queues: dict[Any, list[tuple[int, Callable[[], None]]]] = {}
        if isinstance(order, Judge):
            order.late = []

    # ---- turns ------------------------------------------------------------------------------

    def run(self, programs: Sequence[Program]) -> None:
        """Run programs together to their ends."""
        self.programs = programs
        mains = [Task(p, p.block(p.frame, self.order.body.block)) for p in programs]
        while not all(task.done for task in mains):
            self.schedule(mains)
            self.run_roles([t for t in mains if t.roles])
        self.finish()
        self.order.end()

    def run_roles(self, met: list[Task]) -> None:
        """Run the roles that programs have come to at the same time until all have ended."""
        if not met:
            return
        self.order.begin([task.program.rank for task in met])
        roles, tasks = [], []
        for task in met:
            program = task.program
            for node in task.roles:
                role = self.order.fork(program.rank, node)
                inner = Frame(role, dict(program.frame.values))
                roles.append(role)
                tasks.append(Task(program, program.block(inner, node.blocks[0])))
            task.roles = ()
        self.schedule(tasks)
        for role in roles:
            self.order.ended(role)
        self.finish()

    def schedule(self, tasks: list[Task]) -> None:
        """Give turns until all tasks are done, or have come to roles."""
        turn = 0
        weights = np.ones(len(tasks))
        if self.random is not None:  # some roles hardly get a turn
            weights = self.random.choice([1.0, 0.03], len(tasks))
        while going := [t for t in tasks if not t.done and not t.roles]:
            ready = [t for t in going if t.waiting is None or t.waiting.ready()]
            if not ready and not self.queues:
                raise DeadlockError([t.waiting for t in going if t.waiting is not None])
            if self.random is None:
                if ready:
                    ready[turn % len(ready)].step()
                    turn += 1
                else:
                    self.complete(next(iter(self.queues)))
                continue
            if self.queues and (not ready or self.random.random() < self.eager):
                keys = list(self.queues)
                self.complete(keys[int(self.random.integers(len(keys)))])
            else:
                chances = np.array([weights[tasks.index(t)] for t in ready])
                ready[int(self.random.choice(len(ready), p=chances / chances.sum()))].step()

    # ---- asynchronous work ------------------------------------------------------------------

    def issue(self, key: Any, number: int, action: Callable[[], None]) -> None:
        """Queue work, which is done in order among that of one key."""
        self.queues.setdefault(key, []).append((number, action))

    def complete(self, key: Any, until: int | None = None) -> None:
        """Finish the oldest work of a queue, or all up to a number."""
        queue = self.queues.get(key, [])
        while queue and (until is None or queue[0][0] <= until):
            queue.pop(0)[1]()
            if until is None:
                break
        if not queue:
            self.queues.pop(key, None)

    def finish(self) -> None:
        """Let everything in flight land."""
        while self.queues:
            self.complete(next(iter(self.queues)))
