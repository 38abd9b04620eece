"""The space of Mappings that a search looks through.

Each loop has a list of chains: its factors at all places that the Dataflow allows, pruned of what
cannot fit by itself. A Mapping is one chain of each loop and an order of each Level. Invariant: a
Mapping of the space obeys its Dataflow; what does not fit together is told by `fits`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...core.errors import UserError
from .accelerator import Accelerator
from .dataflow import Dataflow, array_level, order_for
from .mapping import Mappings, Vector, held_bytes
from .problem import Problem

WASTE = 1.3  # most turns of a loop that is padded to fill the array, over its size
SLACK = 1.02  # the same of a loop that is padded to be cut in time
Orders = tuple[tuple[str, ...], ...]


class Space:
    """The chains of each loop: an array (chains, 3 places of each Level) of factors."""

    def __init__(
        self,
        problem: Problem,
        accelerator: Accelerator,
        flow: Dataflow,
        pad: float = WASTE,
        slack: float = SLACK,
    ) -> None:
        self.problem, self.accelerator, self.flow = problem, accelerator, flow
        self.pad, self.slack = pad, min(pad, slack)
        self.array = array_level(accelerator)
        self.chains = {loop: self._chains(loop) for loop in problem.loops}
        self._spread()
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
            most = max(left, int(self.slack * size / spread))
            for times in self._times(loop, left, most):
                found.add(tuple(v for t, (a, b) in zip(times, sides) for v in (t, a, b)))
        return np.array(sorted(found), float).reshape(len(found), 3 * len(levels))

    def _spread(self) -> None:
        """Keep the chains of loops that the Dataflow spreads as far as the array goes."""
        level = self.accelerator.levels[self.array]
        columns, rows, at = level.columns, level.rows, 3 * self.array
        for loop in self.flow.spread:
            chains = self.chains.get(loop, np.zeros((0, 0)))
            if len(chains):
                across, down = chains[:, at + 1], chains[:, at + 2]
                fits = (across <= columns) & (down <= rows)
                chains = chains[fits & (across * down == (across * down)[fits].max())]
                self.chains[loop] = chains
                columns //= int(chains[:, at + 1].min())
                rows //= int(chains[:, at + 2].min())

    def _sides(self, level: int, loop: str, size: int) -> list[tuple[int, int]]:
        """Turns (along columns, along rows) below a Level."""
        record = self.accelerator.levels[level]
        across = _sides(size, record.columns if loop in self.flow.columns else 1, self.pad)
        down = _sides(size, record.rows if loop in self.flow.rows else 1, self.pad)
        pairs = itertools.product(across, down)
        return [(a, b) for a, b in pairs if a * b <= size * self.pad]

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


__all__ = ["SLACK", "WASTE", "Orders", "Space"]
