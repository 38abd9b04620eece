"""Finding a good Mapping: exhaustive where the pruned space is small, else seeded.

Each loop has a list of chains: its factors at all places that the Dataflow allows, pruned of what
cannot fit by itself. A Mapping is one chain of each loop and an order of each Level. What does not
fit together is thrown out before it is costed. Invariant: the same seed gives the same Mapping; a
Found says how many Mappings were looked at, and whether those were all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import UserError
from .accelerator import Accelerator
from .cost import Cost, cost
from .count import EXACT, Conventions
from .dataflow import Dataflow, array_level, order_for
from .dataflow import dataflow as named_dataflow
from .mapping import Mapping, Mappings, Vector, held_bytes, mappings_of
from .problem import Problem

CHUNK = 2048  # Mappings costed at once: their arrays stay in the cache
WASTE = 1.3  # most turns of a loop that is padded to fill the array, over its size
SLACK = 1.02  # the same of a loop that is padded to be cut in time
OBJECTIVES = ("energy", "cycles", "product")
Orders = tuple[tuple[str, ...], ...]


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


class Space:
    """The chains of each loop: an array (chains, 3 places of each Level) of factors."""

    def __init__(
        self, problem: Problem, accelerator: Accelerator, flow: Dataflow, pad: float = WASTE
    ) -> None:
        self.problem, self.accelerator, self.flow, self.pad = problem, accelerator, flow, pad
        self.array = array_level(accelerator)
        self.chains = {loop: self._chains(loop) for loop in problem.loops}
        for loop, chains in self.chains.items():
            if not len(chains):
                raise self._none_fits(f"loop {loop} ({problem.sizes[loop]} turns) has no place")

    @property
    def size(self) -> int:
        """How many Mappings there are of one order."""
        return math.prod(len(chains) for chains in self.chains.values())

    def _chains(self, loop: str) -> np.ndarray:
        """Every way to cut a loop, pruned of what cannot fit by itself."""
        size, levels = self.problem.sizes[loop], self.accelerator.levels
        found = set()
        for sides in itertools.product(*(self._sides(i, loop, size) for i in range(len(levels)))):
            spread = math.prod(a * b for a, b in sides)
            left = math.ceil(size / spread)
            if left * spread > size * self.pad:
                continue
            most = max(left, int(min(self.pad, SLACK) * size / spread))
            for times in self._times(loop, left, most):
                found.add(tuple(v for t, (a, b) in zip(times, sides) for v in (t, a, b)))
        return np.array(sorted(found), float).reshape(len(found), 3 * len(levels))

    def _sides(self, level: int, loop: str, size: int) -> list[tuple[int, int]]:
        """Turns (along columns, along rows) below a Level."""
        record = self.accelerator.levels[level]
        across = _sides(size, record.columns if loop in self.flow.columns else 1, self.pad)
        down = _sides(size, record.rows if loop in self.flow.rows else 1, self.pad)
        both = itertools.product(across, down)
        return [(a, b) for a, b in both if a * b <= size * self.pad]

    def _times(self, loop: str, turns: int, most: int) -> Iterator[tuple[int, ...]]:
        """Ways to give turns in time to the Levels."""
        free = []
        for number in range(len(self.accelerator.levels)):
            inside = number > self.array
            allowed = loop in self.flow.inside if inside else loop not in self.flow.whole
            if number == 0 and self.array > 0:
                allowed = allowed and loop in self.flow.outermost
            free.append(allowed)
        return _splits(turns, free, most)

    def mappings(self, picks: np.ndarray, orders: Orders) -> Mappings:
        """The Mappings of (mappings, loops) numbers of chains."""
        levels = len(self.accelerator.levels)
        parts: list[list[dict[str, Vector]]] = [[{} for _ in range(levels)] for _ in range(3)]
        for column, loop in enumerate(self.problem.loops):
            chains = self.chains[loop]
            used = chains.max(0) > 1
            for place in np.flatnonzero(used):
                factors = np.ascontiguousarray(chains[picks[:, column], place])
                parts[place % 3][place // 3][loop] = factors
        temporal, columns, rows = (tuple(p) for p in parts)
        return Mappings(orders, temporal, columns, rows, len(picks))

    def fits(self, many: Mappings) -> np.ndarray:
        """Which Mappings fit the array and every Level."""
        good = np.ones(many.size, bool)
        for number, level in enumerate(self.accelerator.levels):
            for sides, bound in (
                (many.columns[number], level.columns),
                (many.rows[number], level.rows),
            ):
                if len(sides) > 1:
                    good &= math.prod(sides.values()) <= bound
        for level, held in zip(self.accelerator.levels, self._held(many)):
            if level.bytes is not None:
                good &= held <= level.bytes
        return good

    def _held(self, many: Mappings) -> list[Vector]:
        return held_bytes(self.problem, self.accelerator, many)

    def _none_fits(self, why: str) -> UserError:
        sizes = ", ".join(f"{v.name} {v.bytes:g}" for v in self.accelerator.levels if v.bytes)
        least = self._held(self.mappings(self._smallest(), self._any_order()))
        need = ", ".join(
            f"{v.name} {float(np.broadcast_to(held, (1,))[0]):g}"
            for v, held in zip(self.accelerator.levels, least)
            if v.bytes
        )
        return UserError(
            f"no Mapping of {self.problem.name} fits {self.accelerator.name}: {why}",
            op="chip",
            expected=f"tiles within bytes of: {sizes}",
            got=f"dataflow {self.flow.name}, loops {self.problem.sizes}",
            hint=f"the smallest tiles need bytes of: {need}",
        )

    def _smallest(self) -> np.ndarray:
        """The Mapping that holds least: all turns as far out as they may."""
        last = [
            int(np.lexsort(chains[:, ::-1].T)[-1]) if len(chains) else 0
            for chains in self.chains.values()
        ]
        return np.array([last])

    def _any_order(self) -> Orders:
        return (self.problem.loops,) * len(self.accelerator.levels)

    def orders(self, most: int, random: np.random.Generator) -> list[Orders]:
        """Orders of all Levels: in each, one of the Operands stays. The last one's is no matter."""
        levels = len(self.accelerator.levels)
        names = [o.name for o in self.problem.operands]
        choices = []
        for number in range(levels):
            stays = self.flow.stationary if number == self.array else ()
            choices.append(list(stays) or names)
        choices[-1] = choices[-1][:1] if levels > 1 else choices[-1]
        every = list(itertools.product(*choices))
        if len(every) > most:
            every = [every[i] for i in sorted(random.choice(len(every), most, replace=False))]
        return [tuple(order_for(self.problem, stays) for stays in one) for one in every]


def _parts(size: int) -> list[int]:
    """Sizes of equal parts, the last one smaller or not: ceil(size / k), rising."""
    return sorted({math.ceil(size / k) for k in range(1, size + 1)})


def _sides(size: int, bound: int, pad: float) -> list[int]:
    """How many turns may run side by side: what divides the size, or wastes little."""
    if bound == 1 or size == 1:
        return [1]
    return [f for f in _parts(size) if f <= bound and f * math.ceil(size / f) <= size * pad]


def _splits(turns: int, free: Sequence[bool], most: int) -> Iterator[tuple[int, ...]]:
    """All ways to cover `turns` by a product over the free places, of at most `most`."""
    if not any(free):
        if turns == 1:
            yield (1,) * len(free)
        return
    if not free[0]:
        yield from ((1, *rest) for rest in _splits(turns, free[1:], most))
        return
    if not any(free[1:]):
        yield (turns, *(1,) * (len(free) - 1))
        return
    for factor in _parts(turns):
        left = math.ceil(turns / factor)
        if factor * left <= most:
            yield from ((factor, *rest) for rest in _splits(left, free[1:], most // factor))


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
            both = np.concatenate([picks, np.unique(children, axis=0)])
            values = np.concatenate([scores, self.scores(both[len(picks) :], orders)])
            first = np.argsort(values, kind="stable")[:64]
            scores, picks = values[first], both[first]
        return scores, picks

    def polish(self, score: float, pick: np.ndarray, orders: Orders) -> tuple[float, np.ndarray]:
        """Try every chain of each loop, and of pairs where those are few, until nothing helps."""
        while True:
            before = score
            for loop, number in enumerate(self.counts):
                picks = np.repeat(pick[None], number, axis=0)
                picks[:, loop] = np.arange(number)
                scores = self.scores(picks, orders)
                if scores.min() < score:
                    score, pick = float(scores.min()), picks[scores.argmin()]
            if score >= before:
                return score, pick


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
) -> Found:
    """The best Mapping found: of all, if there are at most `most`, else by a seeded search.

    The seeded search draws `samples` of each order, then improves the best few for `rounds`.
    `objective` is `energy`, `cycles` or their `product`. A loop may be rounded up to `pad`
    times its size to fill the array; 1.0 asks for factors that divide.
    """
    if objective not in OBJECTIVES:
        raise UserError(
            "unknown objective", op="chip", expected=", ".join(OBJECTIVES), got=repr(objective)
        )
    flow = named_dataflow(dataflow) if isinstance(dataflow, str) else dataflow
    space = Space(problem, flow.restrict(accelerator), flow, pad)
    run = _Search(space, objective, conventions, seed, samples)
    orders = space.orders(27, run.random)
    whole = space.size * len(orders) <= most
    if whole:
        results = [(*run.every(order), order) for order in orders]
    else:
        results = _seeded(run, orders, rounds)
    score, pick, order = min(results, key=lambda result: result[0])
    if not np.isfinite(score):
        raise space._none_fits("no tiles are small enough together")
    mapping = space.mappings(pick[None], order).mapping(0)
    made = cost(problem, space.accelerator, mappings_of(problem, [mapping]), conventions)
    return Found(problem, space.accelerator, mapping, made, run.seen, whole)


def _seeded(
    run: _Search, orders: list[Orders], rounds: int
) -> list[tuple[float, np.ndarray, Orders]]:
    """Sample every order, improve the best few, and polish those."""
    tried = [(*run.sample(order), order) for order in orders]
    short = [(*run.improve(s, p, o, max(rounds // 8, 1)), o) for s, p, o in tried]
    short.sort(key=lambda one: float(one[0][0]))
    long = [(*run.improve(s, p, o, rounds), o) for s, p, o in short[:3]]
    return [(*run.polish(float(s[0]), p[0], o), o) for s, p, o in long]


__all__ = ["Found", "Space", "search"]
