"""A whole network whose layers run together where that costs less.

Chains of the Graph are cut into runs of at most a few layers; each run is searched together
(`explore/fuse.py`) and each layer alone, and the cut of least energy is taken. Invariant: never
more energy than each layer alone; equal runs are searched once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import UserError
from .explore.accelerator import Accelerator
from .explore.fuse import Fused, best_fusion, check_chain
from .explore.problem import Problem, Term
from .explore.search import Found, search
from .mapped import named
from .workload import Workload

MOST_LAYERS = 3  # layers of a run
Run = tuple[int, ...]  # Works by number
Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Together:
    """A Workload on an Accelerator: runs of layers, and how often each comes."""

    workload: Workload
    accelerator: Accelerator
    runs: tuple[tuple[Run, int, Found | Fused], ...]
    alone: float  # pJ of every layer alone

    @property
    def energy(self) -> float:
        """pJ of one run of the network."""
        return sum(count * made.energy for _, count, made in self.runs)

    @property
    def cycles(self) -> float:
        """Cycles of one run of the network."""
        return sum(count * made.cycles for _, count, made in self.runs)

    @property
    def seconds(self) -> float:
        """Seconds of one run of the network."""
        return self.cycles / self.accelerator.clock


def map_together(
    workload: Workload,
    accelerator: Accelerator,
    at: str,
    dataflow: str = "any",
    report: Report | None = None,
    **searching: Any,
) -> Together:
    """The best of each layer alone and of runs whose results stay in the Level `at`."""
    problems = workload.problems
    wanted = _wanted(workload)
    found: dict[Run, Found | Fused] = {}
    for done, run in enumerate(wanted):
        if report is not None:
            report(done, len(wanted), " -> ".join(named(problems[n]) for n in run))
        if len(run) == 1:
            found[run] = search(problems[run[0]], accelerator, dataflow, **searching)
            continue
        try:
            found[run] = best_fusion(_chain(workload, run), accelerator, at, dataflow, **searching)
        except UserError:
            continue  # what does not fit together runs alone
    if report is not None:
        report(len(wanted), len(wanted), "")
    runs: dict[Run, int] = {}
    for chain_of in workload.chains:
        for run in _cut(chain_of.works, found):
            runs[run] = runs.get(run, 0) + chain_of.count
    alone = sum(p.count * found[(n,)].energy for n, p in enumerate(problems))
    made = tuple((run, count, found[run]) for run, count in runs.items())
    return Together(workload, accelerator, made, alone)


def _wanted(workload: Workload) -> list[Run]:
    """Every layer, and every run of a few that can be a chain."""
    runs: dict[Run, None] = {(n,): None for n in range(len(workload.works))}
    for chain in workload.chains:
        works = chain.works
        for start in range(len(works)):
            for length in range(2, MOST_LAYERS + 1):
                run = works[start : start + length]
                if len(run) == length and run not in runs and _chains(workload, run):
                    runs[run] = None
    return list(runs)


def _chains(workload: Workload, run: Run) -> bool:
    try:
        check_chain(_chain(workload, run))
    except UserError:
        return False  # pooling or another change of shape lies between
    return True


def _chain(workload: Workload, run: Run) -> list[Problem]:
    """The Problems of a run; places that a product has in one row lie as its neighbours' do."""
    found = [workload.problems[n] for n in run]
    for number, problem in enumerate(found):
        if number and _is_flat(problem) and not _is_flat(found[number - 1]):
            sizes = found[number - 1].sizes
            found[number] = _laid(problem, sizes["N"], sizes["P"], sizes["Q"])
    for number in reversed(range(len(found) - 1)):
        if _is_flat(found[number]) and not _is_flat(found[number + 1]):
            batch = found[number + 1].sizes["N"]
            side = math.isqrt(found[number].sizes["P"] // batch)  # of square pictures
            found[number] = _laid(found[number], batch, side, side)
    return found


def _is_flat(problem: Problem) -> bool:
    """Whether all places are one loop: a product, or windows of 1 x 1."""
    return all(problem.sizes.get(loop, 1) == 1 for loop in "NQRS")


def _laid(problem: Problem, batch: int, rows: int, columns: int) -> Problem:
    """The same with its places in rows and columns."""
    if problem.sizes["P"] != batch * rows * columns:
        return problem
    operands = []
    for operand in problem.operands:
        axes: list[tuple[Term, ...]] = []
        for axis in operand.axes:
            spread = [(("N", 1),), (("P", 1),), (("Q", 1),)] if axis == (("P", 1),) else [axis]
            axes += [one for one in spread if one not in axes]
        operands.append(replace(operand, axes=tuple(axes)))
    sizes = {**problem.sizes, "N": batch, "P": rows, "Q": columns}
    return replace(problem, sizes=sizes, operands=tuple(operands))


def _cut(works: Sequence[int], found: dict[Run, Found | Fused]) -> list[Run]:
    """The cut of a chain into runs that costs least."""
    best: list[tuple[float, list[Run]]] = [(0.0, [])]
    for end in range(1, len(works) + 1):
        options = []
        for start in range(max(0, end - MOST_LAYERS), end):
            run = tuple(works[start:end])
            if run in found:
                energy, before = best[start]
                options.append((energy + found[run].energy, [*before, run]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


__all__ = ["Together", "map_together"]
