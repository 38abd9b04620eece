"""Run PTX on the CPU: every CTA of a small grid, lanes in NumPy, faults reported.

The judge of PTX where there is no GPU: the same text that ptxas assembles is run by
its meaning, asynchronous copies and products included, and held to the rules of the machine:
bounds, alignment, races, proxy fences, waits before use, whole warpgroups, barrier counts,
deadlock. When asynchronous work lands and who runs next is a policy, so that tests can shake
out what works by luck. Invariant: memories change only by what the program stores, and with
`check` a program that breaks a rule raises under every policy that reaches the place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .bulk import Map
from .decode import decode, layout
from .errors import DeadlockError, LimitError, SimulationError, TextError
from .launch import Launch
from .machine import Cluster, Cta
from .matrix import unfinished
from .memory import Space
from .values import (
    GLOBAL,
    GLOBAL_STEP,
    SHARED_START,
    Array,
)

POLICIES = ("round", "far", "random")
ORDERED = {"volatile", "relaxed", "acquire", "release"}  # accesses that can order CTAs
RESIDENT = 132  # CTAs that run at the same time
SLICE = 20_000  # instructions of a cluster before the next gets a turn


def simulate(
    text: str,
    launch: Launch,
    memories: Sequence[Array | int],
    *,
    check: bool = True,
    limit: int = 20_000_000,
    policy: str = "round",
    seed: int = 0,
    constants: Sequence[int] | None = None,
) -> None:
    """Run a launch over its grid, changing memories in place.

    `memories` are what the pointers point to (an int is a pointer to nothing). `policy` is
    'round' (warps in turn), 'far' (one warp as far as it can go, asynchronous work as late as
    possible) or 'random' with a seed. `limit` bounds the instructions of the whole run.
    `constants`, if given, numbers the memories that a dependent launch may read before its wait.
    """
    if policy not in POLICIES:
        raise SimulationError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    with np.errstate(all="ignore"):
        grid = Grid(text, launch, memories, check, limit, policy, seed)
        for number, space in enumerate(grid.memories):
            space.constant = constants is None or number in constants
        grid.run()


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = [*values, 1, 1, 1][:3]
    return x, y, z


class Grid:
    """One launch."""

    def __init__(
        self,
        text: str,
        launch: Launch,
        memories: Sequence[Array | int],
        check: bool,
        limit: int,
        policy: str,
        seed: int,
    ) -> None:
        self.module, self.code = decode(text, launch.shared_bytes)
        self.launch, self.check, self.limit, self.policy = launch, check, limit, policy
        self.registers, self.slots = self.module.registers, self.module.slots
        self.grid = _three(launch.grid)
        self.cluster = _three(launch.cluster or (1,))
        self.random = np.random.default_rng(seed)
        self.steps = 0
        self.leader = seed if policy == "random" else 0  # which lane elect.sync chooses
        self.eager = float(self.random.choice([0.02, 0.3, 0.8]))
        self.fences = any(i.name.startswith("fence.proxy.async") for i in self.module.code)
        self.ordered = any(
            i.words[0] in ("atom", "red")
            or i.name.startswith("cp.reduce")
            or (i.words[0] in ("ld", "st") and ORDERED & set(i.words))
            for i in self.module.code
        )
        self.memories = [self._global(n, m) for n, m in enumerate(memories)]
        self.maps: dict[int, Any] = {}
        self.parameters = self._parameters()
        self._check_launch()

    def _global(self, number: int, memory: Array | int) -> Space:
        if isinstance(memory, int):
            return Space(f"memory {number}", np.zeros(0, np.uint8), check=self.check)
        if not memory.flags.c_contiguous:
            raise SimulationError(f"memory {number} is not contiguous")
        data = memory.reshape(-1).view(np.uint8)
        return Space(
            f"memory {number}", data, check=self.check, writeable=bool(memory.flags.writeable)
        )

    def _parameters(self) -> Space:
        """The bytes of the parameters, in the order of arguments."""
        given, wanted = self.launch.arguments, self.module.parameters
        if len(given) != len(wanted) or self.module.entry != self.launch.name:
            raise TextError(
                f"entry {self.module.entry} has {len(wanted)} parameters, the Launch "
                f"{self.launch.name} names {len(given)}"
            )
        size = max((p.offset + p.bytes for p in wanted), default=0)
        data = np.zeros(size, np.uint8)
        for (kind, value), parameter in zip(given, wanted):
            place = slice(parameter.offset, parameter.offset + parameter.bytes)
            if kind == "map":
                if parameter.bytes != 128 or parameter.align < 64:
                    raise TextError(f"tensor map {parameter.name} is not 128 bytes aligned to 64")
                self.maps[parameter.offset] = Map(value, self)
                continue
            if parameter.bytes != 8:
                raise TextError(f"parameter {parameter.name} is {parameter.bytes} bytes, not 8")
            number = GLOBAL + (int(value) << GLOBAL_STEP) if kind == "pointer" else int(value)
            data[place] = np.array([number], np.int64).view(np.uint8)
        return Space("the parameters", data, writeable=False, check=self.check)

    def _check_launch(self) -> None:
        threads = self.launch.threads
        most = self.module.directives.get("maxntid") or self.module.directives.get("reqntid")
        if most and threads > math.prod(int(x) for x in most.split(",")):
            raise TextError(f"{threads} threads, but the entry allows {most}")
        if not 1 <= threads <= 1024:
            raise TextError(f"{threads} threads in a CTA")
        if any(g % c for g, c in zip(self.grid, self.cluster)):
            raise TextError(f"grid {self.grid} is not made of clusters {self.cluster}")
        asked = self.module.directives.get("reqnctapercluster")
        if asked and _three([int(x) for x in asked.split(",")]) != self.cluster:
            raise TextError(f"cluster {self.cluster}, but the entry asks for {asked}")

    def shared_space(self, cta: Cta) -> Space:
        """Shared memory for a CTA."""
        _, end = layout(self.module, self.launch.shared_bytes)
        if end - SHARED_START > 232_448:
            raise TextError(f"{end - SHARED_START} bytes of shared memory, at most 232448")
        end = -(-end // 16) * 16
        return Space(
            f"shared memory of {cta.name}",
            np.full(end, 0xCB, np.uint8),
            start=SHARED_START,
            shared=True,
            check=self.check,
        )

    def impatient(self) -> bool:
        """Whether a try_wait gives up early this time."""
        return self.policy == "random" and self.random.random() < 0.1

    # ---- turns ------------------------------------------------------------------------------

    def clusters(self) -> Any:
        """The clusters of the grid, x fastest."""
        counts = [g // c for g, c in zip(self.grid, self.cluster)]
        for number, (z, y, x) in enumerate(itertools.product(*map(range, counts[::-1]))):
            corner = [i * c for i, c in zip((x, y, z), self.cluster)]
            inside = itertools.product(*map(range, self.cluster[::-1]))
            indices = [(corner[0] + i, corner[1] + j, corner[2] + k) for k, j, i in inside]
            yield Cluster(self, number, indices)

    def run(self) -> None:
        """Run all clusters; a long one shares its time with those that come after it."""
        waiting = self.clusters()
        running: list[Any] = []
        most = max(1, RESIDENT // math.prod(self.cluster))
        more = True
        while more or running:
            if more and len(running) < most:
                fresh = next(waiting, None)
                if fresh is None:
                    more = False
                else:
                    running.append(fresh)
            for cluster in list(running):
                self.slice(cluster)
                if cluster.done:
                    running.remove(cluster)

    def slice(self, cluster: Cluster) -> None:
        """Let a cluster run until it is done or its time is over."""
        end = self.steps + SLICE
        while not cluster.done and self.steps < end:
            ready = [w for w in cluster.warps if w.groups and w.can_go()]
            if not ready and not cluster.queues:
                for warp in cluster.warps:
                    warp.loose = len(warp.groups) > 1
                ready = [w for w in cluster.warps if w.loose and w.can_go()]
            if not ready and not cluster.queues:
                unfinished(cluster)
                if any(w.active for w in cluster.warps):
                    raise DeadlockError(f"deadlock: {cluster.stuck()}")
                break
            getattr(self, f"_turn_{self.policy}")(cluster, ready)
            if self.steps > self.limit:
                lines = sorted(
                    {self.code[g.pc].instruction.line for w in cluster.warps for g in w.groups}
                )
                raise LimitError(f"more than {self.limit} instructions; running at {lines}")

    def _turn_round(self, cluster: Cluster, ready: list[Any]) -> None:
        for warp in ready:
            if warp.groups and warp.can_go():
                self.steps += warp.run(16)
        if cluster.queues:
            keys = list(cluster.queues)
            cluster.complete(keys[cluster.turn % len(keys)])
            cluster.turn += 1

    def _turn_far(self, cluster: Cluster, ready: list[Any]) -> None:
        if not ready:
            cluster.complete(next(iter(cluster.queues)))
            return
        cluster.turn += 1
        warp = ready[0] if cluster.turn % 64 else ready[cluster.turn // 64 % len(ready)]
        self.steps += warp.run(1000)

    def _turn_random(self, cluster: Cluster, ready: list[Any]) -> None:
        if cluster.queues and (not ready or self.random.random() < self.eager):
            keys = list(cluster.queues)
            cluster.complete(keys[int(self.random.integers(len(keys)))])
            return
        warp = ready[int(self.random.integers(len(ready)))]
        self.steps += warp.run(int(self.random.choice([1, 4, 30, 300])))


__all__ = ["POLICIES", "simulate"]
