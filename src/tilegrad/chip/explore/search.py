"""Finding a good Mapping: exhaustive where the pruned space is small, else seeded.

What does not fit is thrown out before it is costed. A Level that Operands may skip makes several
spaces, and the best of all is found. Invariant: the same seed gives the same Mapping; a Found says
how many Mappings were looked at, and whether those were all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from ...core.errors import UserError
from .accelerator import Accelerator, Level
from .cost import Cost, cost
from .count import EXACT, Conventions
from .dataflow import Dataflow
from .dataflow import dataflow as named_dataflow
from .mapping import Mapping, Vector, mappings_of
from .problem import Problem
from .space import SLACK, WASTE, Orders, Space

CHUNK = 2048  # Mappings costed at once: their arrays stay in the cache
QUICK = 4  # fewer rounds ask for a quick look
SOME = 256  # chains of one loop that are tried where a first look is enough
OBJECTIVES = ("energy", "cycles", "product")


@dataclass
class Found:
    """The best Mapping of a search, its Cost, and how much was looked at."""

    problem: Problem
    accelerator: Accelerator
    mapping: Mapping
    cost: Cost
    seen: int
    exhaustive: bool

    @property
    def energy(self) -> float:
        """pJ of one such Problem."""
        return float(self.cost.energy[0])

    @property
    def cycles(self) -> float:
        """Cycles of one such Problem."""
        return float(self.cost.cycles[0])

    @property
    def utilisation(self) -> float:
        """Multiplications done of those the array could do in that time."""
        most = self.cycles * self.accelerator.multipliers * self.accelerator.macs_a_cycle
        return self.problem.macs / most


class _Search:
    """One search: what was seen, and the best so far of each order."""

    def __init__(
        self, space: Space, objective: str, conventions: Conventions, seed: int, samples: int
    ) -> None:
        self.space, self.objective, self.conventions = space, objective, conventions
        self.samples = samples
        self.random = np.random.default_rng(seed)
        self.counts = [len(chains) for chains in space.chains.values()]
        self.seen = 0

    def scores(self, picks: np.ndarray, orders: Orders) -> np.ndarray:
        """What each Mapping costs; infinite where it does not fit."""
        found = np.full(len(picks), np.inf)
        for start in range(0, len(picks), CHUNK):
            part = picks[start : start + CHUNK]
            good = np.flatnonzero(self.space.fits(self.space.mappings(part, orders)))
            if not len(good):
                continue
            made = cost(
                self.space.problem,
                self.space.accelerator,
                self.space.mappings(part[good], orders),
                self.conventions,
            )
            found[start + good] = self._score(made)
        self.seen += len(picks)
        return found

    def _score(self, made: Cost) -> Vector:
        if self.objective == "energy":
            return made.energy * (1 + 1e-9 * np.log2(made.cycles))  # of equals the faster
        if self.objective == "cycles":
            return made.cycles * (1 + 1e-9 * np.log2(made.energy + 1))
        return made.energy * made.cycles

    def every(self, orders: Orders) -> tuple[float, np.ndarray]:
        """The best of all."""
        best, pick = np.inf, np.zeros(len(self.counts), int)
        for start in range(0, self.space.size, 8 * CHUNK):
            numbers = np.arange(start, min(start + 8 * CHUNK, self.space.size))
            picks = np.stack(np.unravel_index(numbers, self.counts), axis=1)
            scores = self.scores(picks, orders)
            if scores.min() < best:
                best, pick = float(scores.min()), picks[scores.argmin()]
        return best, pick

    def sample(self, orders: Orders) -> tuple[np.ndarray, np.ndarray]:
        """Mappings drawn at random, with the one that holds least; scores, best first."""
        drawn = [self.random.integers(0, n, self.samples) for n in self.counts]
        picks = np.concatenate([np.stack(drawn, axis=1), self.space._smallest()])
        scores = self.scores(picks, orders)
        first = np.argsort(scores, kind="stable")[:64]
        return scores[first], picks[first]

    def improve(
        self, scores: np.ndarray, picks: np.ndarray, orders: Orders, rounds: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw one to three loops of good Mappings anew, and keep the best."""
        open_loops = [i for i, n in enumerate(self.counts) if n > 1]
        count = min(self.samples, CHUNK)
        for _ in range(rounds if open_loops else 0):
            children = picks[self.random.integers(0, len(picks), count)].copy()
            for times in range(3):
                rows = np.arange(0, count, times + 1)
                which = self.random.choice(open_loops, len(rows))
                limits = np.array(self.counts)[which]
                children[rows, which] = (self.random.random(len(rows)) * limits).astype(int)
            pool = np.concatenate([picks, np.unique(children, axis=0)])
            values = np.concatenate([scores, self.scores(pool[len(picks) :], orders)])
            first = np.argsort(values, kind="stable")[:64]
            scores, picks = values[first], pool[first]
        return scores, picks

    def polish(
        self, score: float, pick: np.ndarray, orders: Orders, loops: int = 2
    ) -> tuple[float, np.ndarray]:
        """Try every chain of each loop, and of two at once where that is few, while it helps.

        With `loops` 1 it is one loop at a time, and of a loop that has many chains some.
        """
        groups: list[tuple[int, ...]] = [(loop,) for loop in range(len(self.counts))]
        if loops == 2:
            pairs = itertools.combinations(range(len(self.counts)), 2)
            groups += [(a, b) for a, b in pairs if self.counts[a] * self.counts[b] <= CHUNK]
        while True:
            before = score
            for group in groups:
                numbers = self._numbers(group, some=loops == 1)
                picks = np.repeat(pick[None], numbers.shape[1], axis=0)
                picks[:, list(group)] = numbers.T
                scores = self.scores(picks, orders)
                if scores.min() < score:
                    score, pick = float(scores.min()), picks[scores.argmin()]
            if score >= before:
                return score, pick

    def _numbers(self, group: tuple[int, ...], some: bool) -> np.ndarray:
        """(loops of the group, tries) numbers of chains."""
        counts = [self.counts[loop] for loop in group]
        if some and counts[0] > SOME:
            return self.random.integers(0, counts[0], (1, SOME))
        return np.indices(counts).reshape(len(counts), -1)


def search(
    problem: Problem,
    accelerator: Accelerator,
    dataflow: str | Dataflow = "any",
    *,
    objective: str = "energy",
    conventions: Conventions = EXACT,
    seed: int = 0,
    most: int = 200_000,
    rounds: int = 40,
    samples: int = 2 * CHUNK,
    pad: float = WASTE,
    slack: float = SLACK,
) -> Found:
    """The best Mapping found: of all, if there are at most `most`, else by a seeded search.

    The seeded search draws `samples` of each order, then improves the best few for `rounds`.
    `objective` is `energy`, `cycles` or their `product`. A loop may be rounded up to `pad`
    times its size to fill the array, and up to `slack` times to be cut in time; 1.0 asks for
    factors that divide.
    """
    if objective not in OBJECTIVES:
        raise UserError(
            "unknown objective", op="chip", expected=", ".join(OBJECTIVES), got=repr(objective)
        )
    flow = named_dataflow(dataflow) if isinstance(dataflow, str) else dataflow
    runs, refused = [], []
    for machine in skipping(flow.restrict(accelerator)):
        try:
            space = Space(problem, machine, flow, pad, slack)
        except UserError as error:
            refused.append(error)
        else:
            runs.append(_Search(space, objective, conventions, seed, samples))
    if not runs:
        raise refused[0]
    return _best(runs, most, rounds)


def skipping(accelerator: Accelerator) -> list[Accelerator]:
    """The Accelerator with each choice of what is brought past Levels that may be skipped."""
    choices = []
    for level in accelerator.levels:
        parts = itertools.chain.from_iterable(
            itertools.combinations(level.skips, count) for count in range(len(level.skips) + 1)
        )
        choices.append([_without(level, set(part)) for part in parts])
    return [replace(accelerator, levels=levels) for levels in itertools.product(*choices)]


def _without(level: Level, skipped: set[str]) -> Level:
    kept = tuple(name for name in level.keeps if name not in skipped)
    return replace(level, keeps=kept, skips=())


Result = tuple[float, np.ndarray, Orders, _Search]


def _best(runs: list[_Search], most: int, rounds: int) -> Found:
    """The best Mapping of some Spaces."""
    cases = [(run, order) for run in runs for order in run.space.orders(27, run.random)]
    whole = sum(run.space.size for run, _ in cases) <= most
    if whole:
        results: list[Result] = [(*run.every(order), order, run) for run, order in cases]
    else:
        results = _seeded(cases, rounds)
    score, pick, order, run = min(results, key=lambda result: result[0])
    space = run.space
    if not np.isfinite(score):
        raise space._none_fits("no tiles are small enough together")
    mapping = space.mappings(pick[None], order).mapping(0)
    many = mappings_of(space.problem, [mapping])
    made = cost(space.problem, space.accelerator, many, run.conventions)
    seen = sum(run.seen for run in runs)
    return Found(space.problem, space.accelerator, mapping, made, seen, whole)


def _seeded(cases: list[tuple[_Search, Orders]], rounds: int) -> list[Result]:
    """Sample every order, improve all for a while, the best few for long, and polish those."""
    tried = []
    for run, order in cases:
        scores, picks = run.improve(*run.sample(order), order, max(rounds // 8, 1))
        scores[0], picks[0] = run.polish(float(scores[0]), picks[0], order, loops=1)
        tried.append((scores, picks, order, run))
    tried.sort(key=lambda one: float(one[0][0]))
    found: list[Result] = []
    for scores, picks, order, run in tried[: max(4, len(tried) // 4)]:
        scores, picks = run.improve(scores, picks, order, rounds)
        found.append((float(scores[0]), picks[0], order, run))
    found.sort(key=lambda one: one[0])
    most = 1 + min(len({id(run) for _, run in cases}), 3)
    at_once = 2 if rounds >= QUICK else 1
    return [(*run.polish(s, p, o, at_once), o, run) for s, p, o, run in found[:most]]


__all__ = ["Found", "search", "skipping"]
