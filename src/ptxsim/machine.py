"""Warps, CTAs and clusters of the simulator: lanes in step, turns, clocks and waits.

A warp runs its lanes together; where a branch divides them, groups with a program counter of
their own run lowest counter first and meet again where the counters do. Who may touch what is
decided by vector clocks: every warp, and every engine that works on its own (the copies that
land on one mbarrier, a warpgroup's matrix unit, a thread's bulk stores), is an agent with a
number; arriving at a barrier hands the clock on, waiting takes it over. Invariant: a clock is
an array indexed by agent, and an agent's own entry grows at every release, so that what it does
later is not part of what it handed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    DependencyError,
    ExitedPeerError,
    PendingError,
    SimulationError,
    UninitialisedError,
)
from .text import Instruction
from .values import LANES, RANK_STEP, Array, Mask, Run

if TYPE_CHECKING:
    from .barrier import Named, Phases
    from .memory import Space

AGENTS = 2048
Clock = Array


@dataclass
class Waiting:
    """What a group of lanes waits for; `finish` runs when it is ready."""

    ready: Callable[[], bool]
    what: Callable[[], str]
    finish: Callable[[], None] = lambda: None


@dataclass
class Step:
    """A decoded instruction. `watched` are the registers of wgmma it reads or writes."""

    instruction: Instruction
    run: Run
    reads: frozenset[int]
    writes: frozenset[int]
    kind: str = ""  # 'branch', 'exit' or ''
    watched: frozenset[int] = frozenset()
    plain: bool = False  # no guard, no branch, nothing watched


class Group:
    """Lanes of a warp with one program counter."""

    __slots__ = ("full", "mask", "pc", "waiting")

    def __init__(self, pc: int, mask: Array) -> None:
        self.pc, self.mask = pc, mask
        self.full = bool(mask.all())
        self.waiting: Waiting | None = None


@dataclass
class Engine:
    """Work of one kind that a warp or a lane has given away: open ops, groups, what is known."""

    agent: int
    issued: int = 0  # ops
    done: int = 0  # ops that are complete, in order
    waited: int = 0  # ops the warp has waited for
    open: int = 0  # ops not yet committed
    groups: deque[int] = field(default_factory=deque)  # the last op of each group

    def commit(self) -> None:
        """Close the group."""
        self.groups.append(self.issued)
        self.open = 0

    def covered(self, pending: int) -> int:
        """The last op of the groups that are not among the `pending` newest."""
        groups = list(self.groups)
        old = groups[: len(groups) - pending] if pending else groups
        return old[-1] if old else 0


class Warp:
    """32 lanes."""

    def __init__(self, cta: Cta, number: int, lanes: Array, registers: int) -> None:
        self.cta, self.number, self.cluster = cta, number, cta.cluster
        self.name = f"{cta.name} warp {number}"
        self.registers: list[Any] = [None] * registers
        self.lanes = lanes
        self.groups = [Group(0, lanes)] if lanes.any() else []
        self.agent = self.cluster.agent(self.name)
        self.clock: Clock = np.zeros(AGENTS, np.int32)
        self.clock[self.agent] = 1
        self.unfenced: list[tuple[Space, Any, Any]] = []  # (space, bytes of rows, lanes of rows)
        self.engines: dict[tuple[str, int], Engine] = {}
        self.touched: set[int] = set()  # registers of wgmma touched since wgmma.fence
        self.fenced = False  # past a first wgmma.fence
        self.accumulators: dict[int, int] = {}  # slot -> wgmma op under way
        self.fragments: dict[int, int] = {}  # slot -> wgmma op that may still read it
        self.limit = cta.first_limit  # registers a thread may hold
        self.carry: Array = np.zeros(LANES, np.bool_)
        self.pair: dict[str, Any] = {}  # what a handler keeps between two steps
        self.depended = False
        self.accessed = np.zeros(LANES, np.bool_)  # lanes at shared memory since a warp barrier
        self.unseen: list[Array] | None = None  # agents, and how far `strangers` know them
        self.strangers = self.accessed
        self.loose = False  # lanes may run ahead of others that wait
        self._special: dict[str, Array] = {}

    def special(self, name: str) -> Array:
        """A special register."""
        if name in (
            "%clock",
            "%clock64",
            "%globaltimer",
            "%globaltimer_lo",
            "%clock_hi",
            "%globaltimer_hi",
        ):
            high = name.endswith("_hi")
            return np.full(LANES, 0 if high else self.cluster.grid.steps, np.uint64)
        if name not in self._special:
            self._special[name] = self.cta.special(name, self)
        return self._special[name]

    def engine(self, kind: str, lane: int = 0) -> Engine:
        """The engine of a kind of work."""
        if (kind, lane) not in self.engines:
            of = f" lane {lane}" if lane else ""
            agent = self.cluster.agent(f"{kind} of {self.name}{of}")
            self.engines[kind, lane] = Engine(agent)
        return self.engines[kind, lane]

    def release(self) -> Clock:
        """The clock as handed on; later accesses are not part of it."""
        handed = self.clock.copy()
        self.clock[self.agent] += 1
        return handed

    def learn(self, seen: Clock, mask: Mask) -> None:
        """Lanes have seen a phase complete; the others have not until the warp meets."""
        if mask is None or not (self.present() & ~mask).any():
            if self.unseen is not None:
                self.unseen[1] = np.maximum(self.unseen[1], seen[self.unseen[0]])
        else:
            agents = np.flatnonzero(seen > self.clock)
            before = self.clock[agents]
            if self.unseen is not None:  # what was not known then is not known now
                agents = np.concatenate([agents, self.unseen[0]])
                before = np.concatenate([before, self.unseen[1]])
                mask = mask & ~self.strangers
            self.unseen, self.strangers = [agents, before], self.present() & ~mask
        np.maximum(self.clock, seen, out=self.clock)

    def known(self, mask: Mask) -> Clock:
        """The clock of all of these lanes."""
        if (
            self.unseen is None
            or not (self.strangers if mask is None else self.strangers & mask).any()
        ):
            return self.clock
        clock = self.clock.copy()
        clock[self.unseen[0]] = self.unseen[1]
        return clock

    def meet(self) -> None:
        """All lanes have met: each knows what the others know and did."""
        self.accessed, self.unseen = np.zeros(LANES, np.bool_), None

    @property
    def active(self) -> bool:
        """Whether any lane is left."""
        return bool(self.groups)

    def present(self) -> Array:
        """The lanes that have not exited."""
        mask = np.zeros(LANES, np.bool_)
        for group in self.groups:
            mask |= group.mask
        return mask

    def can_go(self) -> bool:
        """Whether a group can run: the lowest one, or any of them if the warp is `loose`."""
        return self.pick() is not None

    def pick(self) -> Group | None:
        """The group to run. Lanes further on wait for those behind, so that they meet, unless
        nothing else in the cluster can go on."""
        if len(self.groups) > 1:
            self.merge()
        best = None
        for group in self.groups:
            if self.loose and group.waiting is not None and not group.waiting.ready():
                continue
            if best is None or group.pc < best.pc:
                best = group
        if best is None or best.waiting is None or best.waiting.ready():
            return best
        return None

    def merge(self) -> None:
        """Join groups that have met."""
        by_pc: dict[int, Group] = {}
        kept = []
        for group in self.groups:
            if group.waiting is None and group.pc in by_pc:
                other = by_pc[group.pc]
                other.mask = other.mask | group.mask
                other.full = bool(other.mask.all())
                continue
            if group.waiting is None:
                by_pc[group.pc] = group
            kept.append(group)
        self.groups = kept

    def run(self, budget: int) -> int:
        """Run up to so many instructions; gives how many ran."""
        code, count = self.cluster.grid.code, 0
        step = code[-1]
        try:
            while count < budget:
                group = self.groups[0] if len(self.groups) == 1 else self.pick()
                if group is None:
                    break
                step = code[group.pc]
                if step.plain and group.full and group.waiting is None:
                    count += 1
                    stop = step.run(self, None)
                    if stop is not None:
                        group.waiting = stop
                        break
                    group.pc += 1
                    continue
                if group.waiting is not None:
                    if not group.waiting.ready():
                        break
                    waiting, group.waiting = group.waiting, None
                    waiting.finish()
                    group.pc += 1
                    count += 1
                    continue
                count += 1
                if not self.step(group, step):
                    break
            self.loose = False
        except SimulationError as error:
            if error.instruction is None:
                raise type(error)(error.message, step.instruction, self.name) from None
            raise
        except (AttributeError, TypeError):
            for slot in step.reads:
                if self.registers[slot] is None:
                    name = next(n for n, s in self.cluster.grid.slots.items() if s == slot)
                    raise UninitialisedError(
                        f"register {name} is read but was never written",
                        step.instruction,
                        self.name,
                    ) from None
            raise
        return count

    def step(self, group: Group, step: Step) -> bool:
        """Run one instruction; False when the group has to wait or has ended."""
        mask: Mask = None if group.full else group.mask
        guard = step.instruction.guard
        if guard is not None:
            chosen = self.registers[guard[0]]
            chosen = chosen.view(np.bool_) if guard[1] else ~chosen
            if step.kind:
                return self.control(group, step, group.mask & chosen)
            if mask is not None:
                chosen = chosen & mask
            if not chosen.all():
                if not chosen.any():
                    group.pc += 1
                    return True
                mask = chosen
        elif step.kind:
            return self.control(group, step, group.mask)
        if step.watched:
            self.watch(step)
        waiting = step.run(self, mask)
        if waiting is None:
            group.pc += 1
            return True
        group.waiting = waiting
        return False

    def control(self, group: Group, step: Step, chosen: Array) -> bool:
        """Branch or exit with the chosen lanes."""
        rest = group.mask & ~chosen
        if not chosen.any():
            group.pc += 1
            return True
        if step.kind == "branch":
            if not rest.any():
                group.pc = step.instruction.target
                return True
            other = Group(step.instruction.target, chosen)
            group.mask, group.full, group.pc = rest, False, group.pc + 1
            self.groups.append(other)
            return True
        if rest.any():
            group.mask, group.full, group.pc = rest, False, group.pc + 1
            return True
        self.groups.remove(group)
        if not self.groups:
            self.leave(step)
        return bool(self.groups)

    def watch(self, step: Step) -> None:
        """Registers of wgmma are touched by another instruction."""
        if self.cluster.check:
            for slot in step.watched:
                op = self.accumulators.get(slot, 0)
                read = slot in step.writes and self.fragments.get(slot, 0)
                engine = self.engine("wgmma")
                if op > engine.waited:
                    raise PendingError(
                        "an accumulator of a wgmma under way is used before "
                        "wgmma.wait_group covers it"
                    )
                if read and read > engine.waited:
                    raise PendingError(
                        "a register that a wgmma under way reads (A, or what is kept of it) is "
                        "written before wgmma.wait_group covers it"
                    )
        self.touched |= step.watched

    def leave(self, step: Step) -> None:
        """The last lane has exited."""
        if self.cluster.check:
            for (kind, _), engine in self.engines.items():
                if kind != "cp.async" and engine.issued > engine.waited:
                    raise PendingError(
                        f"exit with {kind} work that was not waited for",
                        step.instruction,
                        self.name,
                    )
            if self.cluster.grid.launch.dependent and not self.depended:
                raise DependencyError(
                    "exit before griddepcontrol.wait", step.instruction, self.name
                )
        self.cta.leave(self, step)


class Cta:
    """One thread block: warps, shared memory, barriers."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> None:
        grid = cluster.grid
        self.cluster, self.rank, self.index = cluster, rank, index
        self.name = f"CTA {tuple(index)}"
        self.threads = grid.launch.threads
        count = -(-self.threads // LANES)
        asked = int(grid.module.directives.get("maxnreg") or 255)  # else as many as fit
        self.first_limit = min(asked, 65536 // max(1, LANES * count) // 8 * 8)
        self.free_registers = 65536 - LANES * count * self.first_limit
        self.shared: Space = grid.shared_space(self)
        self.named: dict[int, Named] = {}
        self.mbarriers: dict[int, Phases] = {}
        self.products: dict[tuple[int, int], list[Any]] = {}  # wgmma some warps have come to
        self.remote: dict[int, int] = {}  # agent of another CTA -> epoch of its last access
        self.exited = False
        alone = int(np.prod(grid.cluster)) == 1
        self.first_address = 0 if alone else (rank + 1) << RANK_STEP  # of its shared memory
        self.warps = []
        for number in range(count):
            lanes = np.arange(LANES) + LANES * number < self.threads
            self.warps.append(Warp(self, number, lanes, len(grid.registers)))

    def special(self, name: str, warp: Warp) -> Array:
        """A special register of one of its warps."""
        grid, cluster = self.cluster.grid, self.cluster
        lane = np.arange(LANES, dtype=np.uint32)
        axis = "xyz".find(name[-1]) if name[-2:-1] == "." else -1
        plain = name[:-2] if axis >= 0 else name
        if plain == "%tid":
            return lane + np.uint32(LANES * warp.number) if axis == 0 else lane * 0
        if name.startswith("%lanemask"):
            one = np.uint32(1) << lane
            below = one - np.uint32(1)
            return {"eq": one, "lt": below, "le": below | one, "gt": ~(below | one), "ge": ~below}[
                name[-2:]
            ]
        if name == "%laneid":
            return lane
        within = tuple(i % c for i, c in zip(self.index, grid.cluster))
        values: dict[str, Any] = {
            "%ntid": (self.threads, 1, 1),
            "%ctaid": self.index,
            "%nctaid": grid.grid,
            "%cluster_ctaid": within,
            "%cluster_nctaid": grid.cluster,
            "%clusterid": tuple(i // c for i, c in zip(self.index, grid.cluster)),
            "%nclusterid": tuple(i // c for i, c in zip(grid.grid, grid.cluster)),
            "%warpid": warp.number,
            "%nwarpid": len(self.warps),
            "%gridid": 0,
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": len(cluster.ctas) or 1,
            "%smid": (cluster.number * int(np.prod(grid.cluster)) + self.rank) % 132,
            "%nsmid": 132,
            "%is_explicit_cluster": int(np.prod(grid.cluster)) > 1,
            "%dynamic_smem_size": grid.launch.shared_bytes,
            "%total_smem_size": grid.launch.shared_bytes,
            "%aggr_smem_size": grid.launch.shared_bytes,
        }
        if plain not in values:
            raise SimulationError(f"special register {name} is not known")
        value = values[plain]
        return np.full(LANES, value[axis] if axis >= 0 else value, np.uint64)

    def leave(self, warp: Warp, step: Step) -> None:
        """A warp has ended."""
        if any(w.active for w in self.warps):
            return
        self.exited = True
        if not self.cluster.check:
            return
        known = np.maximum.reduce([w.clock for w in self.warps])
        for agent, epoch in self.remote.items():
            if epoch > known[agent]:
                raise ExitedPeerError(
                    f"{self.name} exits without having waited for what "
                    f"{self.cluster.agents[agent]} did in its shared memory",
                    step.instruction,
                    warp.name,
                )


class Cluster:
    """CTAs that run together, and their work in flight."""

    def __init__(self, grid: Any, number: int, indices: list[tuple[int, int, int]]) -> None:
        self.grid, self.number, self.check = grid, number, grid.check
        self.agents: list[str] = []
        self.queues: dict[Any, deque[Callable[[], None]]] = {}
        self.barrier: dict[str, Any] = {}
        self.ctas: list[Cta] = []
        for rank, index in enumerate(indices):
            self.ctas.append(Cta(self, rank, index))
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.turn = 0

    def agent(self, name: str) -> int:
        """A number for a new agent."""
        if len(self.agents) >= AGENTS - 1:
            raise SimulationError(f"more than {AGENTS} agents in a cluster")
        self.agents.append(name)
        return len(self.agents) - 1

    def later(self, key: Any, action: Callable[[], None], who: str, where: Instruction) -> None:
        """Queue work that completes on its own; queues of one key complete in order."""

        def run() -> None:
            try:
                action()
            except SimulationError as error:
                if error.instruction is None:
                    raise type(error)(error.message, where, who) from None
                raise

        self.queues.setdefault(key, deque()).append(run)

    def complete(self, key: Any) -> None:
        """Finish the oldest work of a queue."""
        queue = self.queues[key]
        queue.popleft()()
        if not queue:
            del self.queues[key]

    @property
    def done(self) -> bool:
        """Whether all warps have exited and nothing is in flight."""
        return not self.queues and not any(w.active for w in self.warps)

    def stuck(self) -> str:
        """What everyone waits for."""
        waits = []
        for warp in self.warps:
            for group in warp.groups:
                if group.waiting is not None:
                    line = self.grid.code[group.pc].instruction.line
                    waits.append(f"{warp.name} at line {line} waits for {group.waiting.what()}")
        return "; ".join(waits)
