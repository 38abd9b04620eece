"""Accesses of each Level for each Operand: the one routine, exact, for many Mappings at once.

A Level holds a box of an Operand. When a loop outside it turns, all loops inside that one start
again, and the box moves by a known distance along each axis: what the old and the new box share
stays (a halo; all of it where the loop does not concern the Operand: stationary), the rest is
brought. So the words brought are a sum over loops of how often each turns times what is new then.
Partial sums go up when their box moves on and come back when it returns; the first addition to a
word needs no read. Invariant: equal to `interpret.py`, which runs the loops, to the integer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .accelerator import Accelerator
from .mapping import Mappings, Vector, axis_length
from .problem import Operand, Problem


@dataclass(frozen=True)
class Conventions:
    """What is counted, where published models differ.

    `halo`: `always` keeps what two successive boxes share, `innermost` only where no loop runs
    inside the one that turns. `drains`: a partial sum that leaves is read first. `fills`: bringing
    a word is a write. `first`: a multiplier's first addition to a word reads it too. `gated`:
    turns beyond a loop's size, which only pad it, ask the innermost Level for nothing.
    """

    halo: str = "always"
    drains: bool = True
    fills: bool = True
    first: bool = False
    gated: bool = False


EXACT = Conventions()
TIMELOOP = Conventions(halo="innermost", drains=False)
EYERISS = Conventions(drains=False, fills=False, first=True, gated=True)


class Turn(NamedTuple):
    """A loop at its place in the nest: turns, how far one moves, how often it advances."""

    loop: str
    bound: Vector
    step: Vector
    advances: Vector


@dataclass
class Access:
    """Words of one Operand at one Level, of all instances together."""

    reads: Vector  # for the Level below; for results, partial sums that go on
    fills: Vector  # brought from the Level above
    updates: Vector  # results that come from below
    drains: Vector  # results that leave upwards
    moved: Vector  # brought to and from Levels below over their network


@dataclass
class Counts:
    """All accesses of some Mappings."""

    table: dict[tuple[int, str], Access]
    cycles: Vector  # turns in time: what the multipliers need
    instances: list[Vector]  # used, of each Level and of the multipliers
    levels: tuple[str, ...] = field(default=())

    def at(self, level: str, operand: str) -> Access:
        """The accesses of a Level by name."""
        return self.table[(self.levels.index(level), operand)]


def count(
    problem: Problem, accelerator: Accelerator, many: Mappings, conventions: Conventions = EXACT
) -> Counts:
    """Accesses of every Level for every Operand."""
    nest = Nest(problem, many)
    names = tuple(level.name for level in accelerator.levels)
    found = Counts({}, nest.cycles, nest.instances, names)
    zero = np.zeros(many.size)
    for operand in problem.operands:
        keeping = [i for i, v in enumerate(accelerator.levels) if operand.name in v.keeps]
        for level in keeping:
            found.table[(level, operand.name)] = Access(zero, zero, zero, zero, zero)
        for above, below in zip(keeping, [*keeping[1:], len(accelerator.levels)]):
            brought, shared = _brought(nest, accelerator, operand, above, below, conventions)
            if operand is problem.result:
                _count_results(found, nest, operand, above, below, brought, shared, conventions)
            else:
                upper = found.table[(above, operand.name)]
                upper.reads, upper.moved = shared, brought
                if below < len(accelerator.levels):
                    found.table[(below, operand.name)].fills = brought
    return found


class Nest:
    """What all Operands share: the turns outside each Level, extents, instances."""

    def __init__(self, problem: Problem, many: Mappings) -> None:
        self.problem, self.many = problem, many
        self.extents = many.extents(problem)
        self.spatial: list[dict[str, Vector]] = []
        self.instances = [np.ones(many.size)]
        for level in range(len(many.temporal)):
            sides = {loop: many.spatial(level, loop) for loop in problem.loops}
            kept = {loop: side for loop, side in sides.items() if side is not None}
            self.spatial.append(kept)
            self.instances.append(_times(self.instances[-1], *kept.values()))
        self.turns: list[Turn] = []  # from the outermost in
        self.outside = [0]  # how many turns lie outside each Level, and outside the multipliers
        self.cycles = np.ones(many.size)
        for level in range(len(many.temporal)):
            self._add_turns(level)
            self.outside.append(len(self.turns))

    def _add_turns(self, level: int) -> None:
        for loop in self.many.orders[level]:
            bound = self.many.temporal[level].get(loop)
            if bound is None or bound.max() == 1:
                continue
            step = self.extents[level + 1][loop]
            if loop in self.spatial[level]:
                step = step * self.spatial[level][loop]
            self.turns.append(Turn(loop, bound, step, self.cycles * (bound - 1)))
            self.cycles = self.cycles * bound

    def copies(self, operand: Operand, first: int, last: int) -> Vector:
        """Instances of a Level `last` below one of `first` that hold the same of an Operand."""
        kept = [
            side
            for level in range(first, last)
            for loop, side in self.spatial[level].items()
            if loop not in operand.loops
        ]
        return _times(np.ones(self.many.size), *kept)


def _brought(
    nest: Nest,
    accelerator: Accelerator,
    operand: Operand,
    above: int,
    below: int,
    conventions: Conventions,
) -> tuple[Vector, Vector]:
    """Words that all instances below get, and what the Level above reads (or adds up) for them."""
    sharing = accelerator.levels[above].sharing
    instances = nest.instances[below]
    if below == len(accelerator.levels):  # a multiplier keeps nothing: it asks at every turn
        each = nest.cycles
        if conventions.gated:
            each = np.minimum(each, nest.problem.macs / instances)
    else:
        each = new_words(operand, nest, below, nest.extents[below], conventions)
    total = each * instances
    if sharing == "none":
        return total, total
    neighbours = below == above + 1 and below < len(accelerator.levels)
    if sharing == "halo" and neighbours and operand is not nest.problem.result:
        union = dict(nest.extents[below])
        for loop, side in nest.spatial[above].items():
            union[loop] = union[loop] * side
        shared = new_words(operand, nest, below, union, conventions) * nest.instances[above]
        return total, shared
    return total, total / nest.copies(operand, above, below)


def new_words(
    operand: Operand, nest: Nest, level: int, extents: dict[str, Vector], conventions: Conventions
) -> Vector:
    """Words brought over time into a box of such extents, as the turns outside a Level move it."""
    lengths = [axis_length(axis, extents) for axis in operand.axes]
    place = {loop: (i, f) for i, axis in enumerate(operand.axes) for loop, f in axis}
    volume = _times(*lengths)
    total = volume
    back = [np.zeros(())] * len(lengths)  # how far loops inside have moved the box
    stays = list(lengths)  # what the box shares with itself moved back so far
    moves, alone = False, np.ones((), bool)
    for turn in reversed(nest.turns[: nest.outside[level]]):
        if turn.loop in place:
            axis, factor = place[turn.loop]
            reach = turn.step if factor == 1 else factor * turn.step
            stay = np.maximum(lengths[axis] - np.abs(reach - back[axis]), 0.0)
            common = _times(stay, *(s for i, s in enumerate(stays) if i != axis))
            back[axis] = back[axis] + (turn.bound - 1) * reach
            stays[axis] = np.maximum(lengths[axis] - back[axis], 0.0)
            moves = True
        elif moves:
            common = _times(*stays)
        else:
            common = volume
        if conventions.halo == "innermost":
            common = np.where(alone | (common == volume), common, 0.0)
            alone = alone & (turn.bound == 1)
        if common is not volume:
            total = total + turn.advances * (volume - common)
    return total


def _count_results(
    found: Counts,
    nest: Nest,
    operand: Operand,
    above: int,
    below: int,
    brought: Vector,
    shared: Vector,
    conventions: Conventions,
) -> None:
    """Partial sums: what goes up, and what comes back to be added to."""
    words = _times(*(axis_length(axis, nest.extents[0]) for axis in operand.axes))

    def begun(level: int) -> Vector:
        """Words that instances of a Level begin: there is nothing to read yet."""
        return words * nest.copies(operand, 0, level)

    upper = found.table[(above, operand.name)]
    upper.updates, upper.moved = shared, brought
    inner = below < len(found.levels)
    upper.reads = shared if conventions.first and not inner else shared - begun(above)
    if inner:
        lower = found.table[(below, operand.name)]
        lower.fills, lower.drains = brought - begun(below), brought


def _times(first: Vector, *others: Vector) -> Vector:
    for other in others:
        first = first * other
    return first


__all__ = ["EXACT", "EYERISS", "TIMELOOP", "Access", "Conventions", "Counts", "Nest", "count"]
