"""What a Mapping does, turn by turn: the judge of `count.py`, for small Problems.

Every instance of every Level keeps the set of words of its box; boxes are found by running the
loops inside and taking what they touch, from the least to the most along each axis. Nothing here
uses the closed forms. Invariant: plain and slow; counts are whole numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from .accelerator import Accelerator
from .count import EXACT, Conventions
from .mapping import Mapping
from .problem import Operand, Problem

Index = dict[str, int]
Words = frozenset[tuple[int, ...]]
Tally = Counter[tuple[str, str, str]]  # (Level, Operand, kind of access)


class MappingRun:
    """One run of a Mapping."""

    def __init__(
        self,
        problem: Problem,
        accelerator: Accelerator,
        mapping: Mapping,
        conventions: Conventions = EXACT,
    ) -> None:
        self.problem, self.levels = problem, accelerator.levels
        self.mapping, self.conventions = mapping, conventions
        self.tally: Tally = Counter()
        self.loops = self._positions()

    def _positions(self) -> list[tuple[int, bool, str, int, int]]:
        """(level, side by side, loop, turns, distance of one turn), from the outermost in."""
        flat = []
        for number, cut in enumerate(self.mapping.cuts):
            flat += [(number, False, loop, bound) for loop, bound in cut.temporal]
            flat += [(number, True, loop, bound) for loop, bound in cut.columns + cut.rows]
        distance = dict.fromkeys(self.problem.loops, 1)
        found = []
        for number, side, loop, bound in reversed(flat):
            found.append((number, side, loop, bound, distance[loop]))
            distance[loop] *= bound
        return found[::-1]

    def run(self) -> Tally:
        """Count everything."""
        for operand in self.problem.operands:
            keeping = [i for i, v in enumerate(self.levels) if operand.name in v.keeps]
            for above, below in zip(keeping, [*keeping[1:], len(self.levels)]):
                if below == len(self.levels):
                    self._multipliers(operand, above)
                else:
                    self._level(operand, above, below)
        return self.tally

    # ---- places and boxes -------------------------------------------------------------------

    def _times(self, below: int) -> Iterator[tuple[int, ...]]:
        """Every state of the turns in time outside a Level, in order."""
        bounds = [b for number, side, _, b, _ in self.loops if not side and number < below]
        return itertools.product(*(range(b) for b in bounds))

    def _instances(self, below: int) -> list[tuple[int, ...]]:
        """Every instance of a Level, by its turns side by side."""
        bounds = [b for number, side, _, b, _ in self.loops if side and number < below]
        return list(itertools.product(*(range(b) for b in bounds)))

    def _words(self, operand: Operand, below: int, now: tuple, place: tuple) -> Words:
        """The box that an instance of a Level holds now."""
        times, sides = iter(now), iter(place)
        start = dict.fromkeys(self.problem.loops, 0)
        inner = []
        for number, side, loop, bound, distance in self.loops:
            if number < below:
                start[loop] += distance * next(sides if side else times)
            else:
                inner.append((loop, bound, distance))
        touched = []
        for turns in itertools.product(*(range(bound) for _, bound, _ in inner)):
            index = dict(start)
            for (loop, _, distance), turn in zip(inner, turns):
                index[loop] += distance * turn
            touched.append(_element(operand, index))
        return _box(touched)

    def _parent(self, place: tuple, above: int) -> tuple:
        return place[: len(self._instances(above)[0])]

    def _seen(self, operand: Operand, place: tuple, above: int, below: int) -> tuple:
        """Which of the turns side by side between two Levels concern the Operand."""
        sides = [(n, loop) for n, side, loop, _, _ in self.loops if side and n < below]
        return tuple(
            turn
            for (number, loop), turn in zip(sides, place)
            if number >= above and loop in operand.loops
        )

    # ---- counting ---------------------------------------------------------------------------

    def _add(self, level: int, operand: Operand, kind: str, words: int) -> None:
        self.tally[(self.levels[level].name, operand.name, kind)] += words

    def _new(self, old: Words, new: Words, alone: bool) -> Words:
        if self.conventions.halo == "innermost" and not alone and old != new:
            return new
        return new - old

    def _alone(self, before: tuple | None, now: tuple, below: int) -> bool:
        """Whether nothing runs inside the turn that just advanced."""
        if before is None:
            return True
        bounds = [b for number, side, _, b, _ in self.loops if not side and number < below]
        first = next(i for i, (a, b) in enumerate(zip(before, now)) if a != b)
        return all(bound == 1 for bound in bounds[first + 1 :])

    def _level(self, operand: Operand, above: int, below: int) -> None:
        instances = self._instances(below)
        held: dict[tuple, Words] = dict.fromkeys(instances, frozenset())
        unions: dict[tuple, Words] = {}
        result = operand is self.problem.result
        begun: set[tuple] = set()
        sharing = self.levels[above].sharing
        halo = sharing == "halo" and below == above + 1 and not result
        before = None
        for now in self._times(below):
            alone = self._alone(before, now, below)
            asked: set[tuple] = set()
            boxes: dict[tuple, list] = {}
            for place in instances:
                box = self._words(operand, below, now, place)
                fresh = self._new(held[place], box, alone)
                held[place] = box
                parent = self._parent(place, above)
                boxes.setdefault(parent, []).extend(box)
                group = () if sharing != "none" else place
                seen = self._seen(operand, place, above, below)
                asked |= {(parent, group, seen, word) for word in fresh}
                self._arrive(operand, below, place, fresh, begun, result)
            if halo:
                for parent, touched in boxes.items():
                    union = _box(touched)
                    fresh = self._new(unions.get(parent, frozenset()), union, alone)
                    unions[parent] = union
                    self._add(above, operand, "reads", len(fresh))
            else:
                self._serve(operand, above, [(a[0], a[-1]) for a in asked], begun, result)
            before = now

    def _arrive(
        self, operand: Operand, below: int, place: tuple, fresh: Words, begun: set, result: bool
    ) -> None:
        if not result:
            self._add(below, operand, "fills", len(fresh))
            return
        self._add(below, operand, "drains", len(fresh))  # what comes must leave again
        for word in fresh:
            key = (below, place, word)
            if key in begun:
                self._add(below, operand, "fills", 1)
            begun.add(key)

    def _serve(
        self,
        operand: Operand,
        above: int,
        asked: list[tuple],
        begun: set,
        result: bool,
        always: bool = False,
    ) -> None:
        if not result:
            self._add(above, operand, "reads", len(asked))
            return
        for parent, word in asked:
            key = (above, parent, word)
            self._add(above, operand, "updates", 1)
            if key in begun or always:
                self._add(above, operand, "reads", 1)
            begun.add(key)

    def _multipliers(self, operand: Operand, above: int) -> None:
        below = len(self.levels)
        instances = self._instances(below)
        begun: set[object] = set()
        for now in self._times(below):
            asked = set()
            for place in instances:
                (word,) = self._words(operand, below, now, place)
                group = () if self.levels[above].sharing != "none" else place
                seen = self._seen(operand, place, above, below)
                asked.add((self._parent(place, above), group, seen, word))
            pairs = [(a[0], a[-1]) for a in asked]
            result = operand is self.problem.result
            self._serve(operand, above, pairs, begun, result, self.conventions.first)


def _element(operand: Operand, index: Index) -> tuple[int, ...]:
    return tuple(sum(factor * index[loop] for loop, factor in axis) for axis in operand.axes)


def _box(touched: list[tuple[int, ...]]) -> Words:
    ranges = [range(min(axis), max(axis) + 1) for axis in zip(*touched)]
    return frozenset(itertools.product(*ranges))


__all__ = ["MappingRun", "Tally"]
