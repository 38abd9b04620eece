"""Searching a whole network: the best Mapping of each of its Problems, and what all cost.

Invariant: equal Problems are searched once and counted as often as the network has them; the same
seed gives the same Mappings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .explore.accelerator import Accelerator
from .explore.count import EXACT, Conventions
from .explore.dataflow import Dataflow
from .explore.problem import Problem
from .explore.search import Found, search
from .workload import Workload


@dataclass(frozen=True)
class Mapped:
    """A Workload on an Accelerator: what was found for each Problem."""

    workload: Workload
    accelerator: Accelerator
    found: tuple[Found, ...]

    @property
    def energy(self) -> float:
        """pJ of one run."""
        return sum(f.problem.count * f.energy for f in self.found)

    @property
    def cycles(self) -> float:
        """Cycles of one run, Problem after Problem."""
        return sum(f.problem.count * f.cycles for f in self.found)

    @property
    def seconds(self) -> float:
        """Seconds of one run."""
        return self.cycles / self.accelerator.clock

    @property
    def seen(self) -> int:
        """How many Mappings were looked at."""
        return sum(f.seen for f in self.found)

    @property
    def utilisation(self) -> float:
        """Multiplications done of those the array could do in that time."""
        most = self.cycles * self.accelerator.multipliers * self.accelerator.macs_a_cycle
        return sum(f.problem.count * f.problem.macs for f in self.found) / most

    def parts(self) -> dict[str, float]:
        """pJ by Level, multiplications, networks and leakage."""
        total: dict[str, float] = {}
        for found in self.found:
            for name, value in found.cost.parts.items():
                total[name] = total.get(name, 0.0) + found.problem.count * float(value[0])
        return total


def map_network(
    workload: Workload,
    accelerator: Accelerator,
    dataflow: str | Dataflow = "any",
    *,
    objective: str = "product",
    conventions: Conventions = EXACT,
    seed: int = 0,
    rounds: int = 8,
    samples: int = 2048,
    report: Callable[[int, int, str], None] | None = None,
) -> Mapped:
    """The best Mapping found for every Problem of a Workload.

    `report` is told how many are done, of how many, and which comes.
    """
    found = []
    problems = workload.problems
    for done, problem in enumerate(problems):
        if report is not None:
            report(done, len(problems), named(problem))
        found.append(
            search(
                problem,
                accelerator,
                dataflow,
                objective=objective,
                conventions=conventions,
                seed=seed,
                rounds=rounds,
                samples=samples,
            )
        )
    if report is not None:
        report(len(problems), len(problems), "")
    return Mapped(workload, accelerator, tuple(found))


def named(problem: Problem) -> str:
    """A Problem by its loops that turn."""
    return " ".join(f"{loop}{size}" for loop, size in problem.sizes.items() if size > 1)


__all__ = ["Mapped", "map_network", "named"]
