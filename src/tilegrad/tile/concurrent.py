"""Roles at the same time, in the interpreter: turns, barriers, things in flight, and races.

Every role is a generator that stops after each effect; a scheduler picks who goes next, a role
or the head of a queue of asynchronous work, in turn or by a seeded random choice. Who may touch
what is decided by vector clocks and not by luck: an agent (a role, its matrix unit, its store
engine, one copy) has a clock; arriving at a barrier hands its clock on, waiting takes over what
the phase has seen. An access to an element whose last access by another agent is not known to
the clock is a race, whichever turn was taken. Besides: a plain store that an asynchronous reader
sees without a fence, a register tile used by a matrix op without a matrix_fence, and a global
access before `grid_dependency_wait`. Invariant: an error names the agents and the place, and a
deadlock names every role and what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import InternalError
from ..ir.node import Node

if TYPE_CHECKING:
    from .interpret import Frame, Interpreter, Storage

Array = np.ndarray[Any, Any]
Clock = dict[int, int]
Steps = Generator["Waiting | Roles | None", None, Any]


class RaceError(InternalError):
    """Two agents touch an element with nothing that orders them, or a fence is missing."""


class DeadlockError(InternalError):
    """No role can go on."""


@dataclass
class Waiting:
    """What a role waits for: a question, and words for people."""

    ready: Callable[[], bool]
    what: Callable[[], str]


@dataclass
class Roles:
    """Roles that a program has come to, to be run at the same time."""

    frame: Frame
    nodes: list[Node]


def join(into: Clock, other: Clock) -> None:
    """Take over all that another clock knows."""
    for agent, epoch in other.items():
        if into.get(agent, 0) < epoch:
            into[agent] = epoch


class Agent:
    """Something that touches memory in an order of its own."""

    def __init__(self, number: int, name: str, clock: Clock | None = None) -> None:
        self.number, self.name = number, name
        self.clock: Clock = dict(clock or {})
        self.clock[number] = 1
        self.role: Node | None = None
        self.asynchronous = True  # an engine or a copy, neither a program nor a role
        self.depends = False  # past grid_dependency_wait
        self.unfenced: list[tuple[Storage, Array]] = []  # plain stores since fence('async')
        self.fenced = False  # past a first matrix_fence
        self.registers: set[int] = set()  # register places touched since matrix_fence
        self.groups: dict[str, Groups] = {}

    @property
    def threads(self) -> int:
        """Threads of the role."""
        return 32 * int(self.role.attrs["warps"]) if self.role is not None else 0

    def release(self) -> Clock:
        """The clock as handed on; later accesses are not part of it."""
        handed = dict(self.clock)
        self.clock[self.number] += 1
        return handed


@dataclass
class Groups:
    """An engine of a role that works in order: ops not yet committed, groups under way."""

    engine: Agent
    open: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    done: int = 0  # the last op that is complete
    known: int = 0  # the last op the role has waited for

    def unknown(self) -> bool:
        """Whether the role has not waited for all of its ops."""
        return bool(self.open) or any(op > self.known for group in self.groups for op in group)


class History:
    """Who wrote and read each element of a storage last."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.writer = np.full(size, -1, np.int32)
        self.written = np.zeros(size, np.int32)
        self.readers: dict[int, Array] = {}
        self.plain = np.zeros(size, np.bool_)  # stored without a fence since

    def unordered_write(self, clock: Clock, offset: Array) -> int | None:
        """An agent whose write of these elements the clock does not know."""
        writers, epochs = self.writer[offset], self.written[offset]
        for agent in np.unique(writers):
            if agent >= 0 and epochs[writers == agent].max() > clock.get(int(agent), 0):
                return int(agent)
        return None

    def unordered_read(self, clock: Clock, offset: Array) -> int | None:
        """An agent whose read of these elements the clock does not know."""
        for agent, epochs in self.readers.items():
            if epochs[offset].max(initial=0) > clock.get(agent, 0):
                return agent
        return None


class Phases:
    """One barrier: the phase under way, what came, and the clock of completed phases."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.phase = self.arrived = self.bytes = 0
        self.coming: Clock = {}
        self.seen: Clock = {}

    def update(self, clock: Clock, arrivals: int, bytes_: int) -> None:
        """Arrivals, and bytes announced (positive) or landed (negative)."""
        join(self.coming, clock)
        self.arrived += arrivals
        self.bytes += bytes_
        if self.arrived > self.count:
            raise InternalError("tile.interpret", f"more than {self.count} arrivals: {self}")
        if self.arrived == self.count and self.bytes == 0:
            join(self.seen, self.coming)
            self.phase, self.arrived, self.coming = self.phase + 1, 0, {}

    def __str__(self) -> str:
        return (
            f"{self.name} (phase {self.phase}, {self.arrived} of {self.count} arrivals, "
            f"{self.bytes} bytes to land)"
        )


class Named:
    """A numbered barrier that counts threads."""

    def __init__(self, number: int) -> None:
        self.number, self.generation, self.arrived, self.threads = number, 0, 0, 0
        self.coming: Clock = {}
        self.seen: list[Clock] = []

    def arrive(self, agent: Agent, threads: int) -> int:
        """Arrive with a role's threads; gives the generation joined."""
        if self.arrived and threads != self.threads:
            raise InternalError(
                "tile.interpret",
                f"named barrier {self.number} is used with {self.threads} and {threads} threads",
            )
        self.threads, generation = threads, self.generation
        self.arrived += agent.threads
        join(self.coming, agent.release())
        if self.arrived > threads:
            raise InternalError(
                "tile.interpret", f"named barrier {self.number}: {self.arrived} of {threads} came"
            )
        if self.arrived == threads:
            self.seen.append(self.coming)
            self.generation, self.arrived, self.coming = generation + 1, 0, {}
        return generation


class Task:
    """A role being run."""

    def __init__(self, agent: Agent, steps: Steps) -> None:
        self.agent, self.steps = agent, steps
        self.waiting: Waiting | None = None
        self.roles: Roles | None = None  # a program that has come to roles
        self.done = False

    def can_go(self) -> bool:
        """Whether the next step would not wait."""
        return not self.done and (self.waiting is None or self.waiting.ready())

    def step(self) -> None:
        """Run to the next effect."""
        try:
            found = next(self.steps)
            if isinstance(found, Roles):
                self.waiting, self.roles = None, found
            else:
                self.waiting = found
        except StopIteration:
            self.done = True
            for kind, groups in self.agent.groups.items():
                if groups.unknown() and self.agent.role is not None:
                    raise RaceError(
                        "tile.interpret", f"{self.agent.name} ends with {kind} under way"
                    ) from None


def deadlock(tasks: list[Task]) -> DeadlockError:
    """The error that names every task and what it waits for."""
    waits = [
        f"{t.agent.name} waits on {t.waiting.what()}"
        for t in tasks
        if t.waiting is not None and not t.done
    ]
    return DeadlockError("tile.interpret", "deadlock: " + "; ".join(waits))


class Machine:
    """Agents, barriers and asynchronous work of one program, or of those of a cluster.

    Programs of a cluster run up to their roles, then these run at the same time; a cluster's
    first roles begin together and its programs end together, as on the machine.
    """

    def __init__(self, seed: int | None, dependent: bool) -> None:
        self.dependent = dependent
        self.random = None if seed is None else np.random.default_rng(seed)
        self.eager = 0.5 if self.random is None else float(self.random.choice([0.02, 0.3, 0.8]))
        self.names: list[str] = []
        self.programs: list[Interpreter] = []
        self.queues: dict[Any, list[Callable[[], None]]] = {}

    def agent(self, name: str, clock: Clock | None = None) -> Agent:
        """A new agent."""
        self.names.append(name)
        return Agent(len(self.names) - 1, name, clock)

    # ---- turns ------------------------------------------------------------------------------

    def run(self, programs: list[Interpreter]) -> None:
        """Run programs together to their ends."""
        self.programs = programs
        mains = [Task(p.frame.agent, p.block(p.frame, p.body.block)) for p in programs]
        begun = False
        while not all(task.done for task in mains):
            self.run_outside(mains)
            met = [(p, t) for p, t in zip(programs, mains) if t.roles is not None]
            handed = [task.agent.release() for _, task in met]
            if len(programs) > 1 and not begun:
                for clock in handed:
                    for other in handed:
                        join(clock, other)
            begun = True
            self.run_roles(met, handed)
        self.finish()

    def run_outside(self, mains: list[Task]) -> None:
        """Run programs to their next roles, or their ends."""
        while True:
            going = [t for t in mains if not t.done and t.roles is None]
            ready = [t for t in going if t.can_go()]
            if not going:
                return
            if ready:
                ready[0].step()
            elif self.queues:
                self.complete(next(iter(self.queues)))
            else:
                raise deadlock(going)

    def run_roles(self, met: list[tuple[Interpreter, Task]], handed: list[Clock]) -> None:
        """Run the roles that programs have come to at the same time until all have ended."""
        owned = []
        for (program, main), clock in zip(met, handed):
            roles, main.roles = main.roles, None
            assert roles is not None
            for node in roles.nodes:
                agent = self.agent(program.name(node.attrs["name"]), clock)
                agent.role, agent.depends = node, main.agent.depends
                agent.asynchronous = False
                inner = type(roles.frame)(agent, dict(roles.frame.values))
                owned.append((main, Task(agent, program.block(inner, node.blocks[0]))))
        if owned:
            self.schedule([task for _, task in owned])
        for main, task in owned:
            join(main.agent.clock, task.agent.clock)
        self.finish()

    def schedule(self, tasks: list[Task]) -> None:
        """Give turns until all tasks are done."""
        turn = 0
        weights = np.ones(len(tasks))
        if self.random is not None:  # some roles hardly get a turn
            weights = self.random.choice([1.0, 0.03], len(tasks))
        while any(not t.done for t in tasks):
            ready = [t for t in tasks if t.can_go()]
            if not ready and not self.queues:
                raise deadlock(tasks)
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

    def complete(self, key: Any) -> None:
        """Finish the oldest work of a queue."""
        queue = self.queues[key]
        queue.pop(0)()
        if not queue:
            del self.queues[key]

    def finish(self) -> None:
        """Let everything in flight land."""
        while self.queues:
            self.complete(next(iter(self.queues)))

    # ---- who touches what -------------------------------------------------------------------

    def race(self, agent: Agent, verb: str, storage: Storage, other: int, done: str) -> RaceError:
        """The error of two unordered accesses."""
        return RaceError(
            "tile.interpret",
            f"race: {agent.name} {verb} {storage.name} while {self.names[other]} {done} it, and "
            "no barrier or wait orders the two",
        )

    def depends(self, agent: Agent, storage: Storage, verb: str) -> None:
        """Global memory is touched only after the dependency wait, if the Body has one."""
        if self.dependent and not agent.depends and storage.type.scope == "global":
            if verb == "writes" or storage.type.use != "constant":
                raise RaceError(
                    "tile.interpret",
                    f"{agent.name} {verb} {storage.name} before grid_dependency_wait",
                )

    def note_read(self, agent: Agent, storage: Storage, offset: Array, mask: Any = None) -> None:
        """An agent reads elements."""
        self.depends(agent, storage, "reads")
        history = storage.history
        if history is None:
            return
        offset = offset.reshape(-1) if mask is None else offset[mask]
        other = history.unordered_write(agent.clock, offset)
        if other is not None:
            raise self.race(agent, "reads", storage, other, "writes")
        if agent.asynchronous and history.plain[offset].any():
            raise RaceError(
                "tile.interpret",
                f"{agent.name} reads {storage.name}, which was written by plain stores without "
                "fence('async')",
            )
        if storage.type.use in ("constant", "value"):
            return
        if storage.type.scope == "register":
            agent.registers.add(id(storage))
        if agent.number not in history.readers:
            history.readers[agent.number] = np.zeros(history.writer.size, np.int32)
        history.readers[agent.number][offset] = agent.clock[agent.number]

    def note_write(self, agent: Agent, storage: Storage, offset: Array, mask: Any = None) -> None:
        """An agent writes elements."""
        self.depends(agent, storage, "writes")
        history = storage.history
        if history is None:
            return
        offset = offset.reshape(-1) if mask is None else offset[mask]
        other = history.unordered_write(agent.clock, offset)
        if other is not None:
            raise self.race(agent, "writes", storage, other, "writes")
        other = history.unordered_read(agent.clock, offset)
        if other is not None:
            raise self.race(agent, "writes", storage, other, "reads")
        history.writer[offset] = agent.number
        history.written[offset] = agent.clock[agent.number]
        if storage.type.scope == "register":
            agent.registers.add(id(storage))
        elif not agent.asynchronous:
            history.plain[offset] = True
            agent.unfenced.append((storage, offset))
        else:
            history.plain[offset] = False

    def groups(self, agent: Agent, kind: str) -> Groups:
        """A role's engine of asynchronous work of one kind."""
        if kind not in agent.groups:
            agent.groups[kind] = Groups(self.agent(f"{kind} of {agent.name}"))
        return agent.groups[kind]

    def issue(self, agent: Agent, kind: str, action: Callable[[], None]) -> Agent:
        """Queue work on an engine, after what the role has done; gives the engine."""
        groups = self.groups(agent, kind)
        engine = groups.engine
        own = engine.clock[engine.number] + 1
        join(engine.clock, agent.release())
        engine.clock[engine.number], engine.depends = own, agent.depends
        groups.open.append(own)

        def work() -> None:
            action()
            groups.done = own

        self.queues.setdefault((agent.number, kind), []).append(work)
        return engine
