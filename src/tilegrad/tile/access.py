"""Who touched which box of a place last, and whether that is known to who touches it now.

A clock is a list with one entry per agent: how far its holder knows that agent to be. Agents are
roles (counted in events), the matrix unit and the store engine of each role (counted in ops) and
the barriers (counted in completed phases; a copy that lands on a barrier is known to whoever knows
that its phase is over). An access at an epoch of an agent is ordered before a clock if the clock's
entry for the agent has reached the epoch.

Invariant: a Region remembers its last write and all reads since; boxes of one place that overlap
are neighbours of each other.

Barriers and groups of asynchronous work are counts: what has come, and what each end made known.
Invariant: `over` holds one clock per phase (or round) that is over, and each clock's entry for the
barrier itself is the number of phases that are over with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ir.node import Node
from ..ir.types import Shape
from .check import place_name
from .row import memory_of

Clock = list[int]
Box = tuple[tuple[int, int], ...]  # start and stop along each axis
Elements = np.ndarray[Any, Any]


def join(into: Clock, other: Clock) -> None:
    """Take over all that another clock knows."""
    into[:] = map(max, into, other)


@dataclass(slots=True, eq=False)
class Touched:
    """One access: who, when by its own count, and by which op."""

    agent: int
    epoch: int
    node: Node
    plain: bool = False  # a load or store of threads, which asynchronous ops do not wait for
    fence: int | None = None  # when its role fenced it, so that they do


class Region:
    """A box of a place."""

    def __init__(self, place: Place, box: Box, elements: Elements | None = None) -> None:
        self.place, self.box = place, box
        self.elements = elements  # of the box, by their number in the place; None: all
        self.neighbours: list[Region] = []
        self.write: Touched | None = None
        self.reads: dict[int, Touched] = {}
        self.written = False  # whole, by anyone

    def __str__(self) -> str:
        place = self.place
        lead = [a for (a, b), s in zip(self.box, place.shape) if b - a == 1 and s > 1]
        return place_name(place.node) + (f" at {lead}" if lead and place.scope != "global" else "")

    def around(self) -> Iterator[Region]:
        """The box itself and all that overlap it."""
        yield self
        yield from self.neighbours


class Place:
    """A place or a parameter of one program, as boxes."""

    def __init__(self, node: Node, shape: Shape) -> None:
        self.node, self.shape, self.scope = node, shape, memory_of(node).scope
        self.regions: dict[Any, Region] = {}

    @property
    def whole(self) -> Region:
        """All of it."""
        return self.boxed((0,) * len(self.shape), self.shape, tuple(range(len(self.shape))))

    def boxed(self, index: Shape, shape: Shape, axes: Shape) -> Region:
        """The box of a tile at an index, as far as it lies inside."""
        key = ("box", index, shape, axes)
        found = self.regions.get(key)
        if found is None:
            spans = zip(_spans(index, shape, axes), self.shape)
            found = self._new(key, tuple([(max(0, a), min(s, b)) for (a, b), s in spans]))
        return found

    def leaves(self, index: Shape, shape: Shape, axes: Shape) -> bool:
        """Whether a box at an index is not wholly inside."""
        spans = _spans(index, shape, axes)
        return any(a < 0 or b > size for (a, b), size in zip(spans, self.shape))

    def chosen(self, elements: Elements) -> Region | None:
        """Some elements, by their number in the place."""
        elements = np.unique(elements)
        if not elements.size:
            return None
        key = ("chosen", elements.tobytes())
        whole = tuple([(0, size) for size in self.shape])
        return self.regions.get(key) or self._new(key, whole, elements)

    def _new(self, key: Any, box: Box, elements: Elements | None = None) -> Region:
        for other in self.regions.values():
            if other.box == box and other.elements is None and elements is None:
                self.regions[key] = other
                return other
        made = Region(self, box, elements)
        for other in dict.fromkeys(self.regions.values()):
            if self._meet(made, other):
                made.neighbours.append(other)
                other.neighbours.append(made)
        self.regions[key] = made
        return made

    def _meet(self, one: Region, other: Region) -> bool:
        """Whether two regions share elements."""
        if not all(a < d and c < b for (a, b), (c, d) in zip(one.box, other.box)):
            return False
        if one.elements is None and other.elements is None:
            return True
        return bool(np.intersect1d(self._elements(one), self._elements(other)).size)

    def _elements(self, region: Region) -> Elements:
        if region.elements is not None:
            return region.elements
        numbers = np.arange(int(np.prod(self.shape))).reshape(self.shape)
        return numbers[_slices(region.box)].reshape(-1)

    def fresh(self) -> None:
        """Allocated again: nothing is initialised."""
        for region in self.regions.values():
            region.written = False

    def initialised(self, region: Region) -> bool:
        """Whether all of a box was written."""
        if not region.written and region.neighbours:
            mask = np.zeros(self.shape, np.bool_)
            for other in region.neighbours:
                if other.written:
                    mask[_slices(other.box)] = True
            region.written = bool(mask[_slices(region.box)].all())
        return region.written

    def touched(self) -> bool:
        """Whether any box was written."""
        return any(r.written for r in self.regions.values())


def _spans(index: Shape, shape: Shape, axes: Shape) -> Box:
    length = dict(zip(axes, shape))
    return tuple([(i, i + length.get(axis, 1)) for axis, i in enumerate(index)])


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple([slice(a, b) for a, b in box])


# ---- barriers and groups ------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Bar:
    """One barrier: the phase under way, what came, and the clock of each phase that is over. Of a
    named one, whose arrivals are threads, a phase is a round, and each may have another count."""

    name: str
    count: int
    agent: int
    arrived: int = 0
    expected: int = 0
    landed: int = 0
    copies: int = 0  # the last phase over that had some
    coming: Clock | None = None
    over: list[Clock] = field(default_factory=list)
    node: Node | None = None  # what came last to a named one
    waits: list[tuple[int, int, int, Node]] = field(default_factory=list)  # over, agent, epoch, op

    def come(self, clock: Clock, arrivals: int, expected: int, landed: int) -> None:
        """Something comes; it may end the phase."""
        if self.coming is None:
            self.coming = list(clock)
        else:
            join(self.coming, clock)
        self.arrived += arrivals
        self.expected += expected
        self.landed += landed
        if self.arrived == self.count and self.expected == self.landed:
            self.coming[self.agent] = len(self.over) + 1
            self.over.append(self.coming)
            if self.landed:
                self.copies = len(self.over)
            self.coming, self.arrived, self.expected, self.landed = None, 0, 0, 0

    def __str__(self) -> str:
        if self.node is not None:
            return f"{self.name} ({self.arrived} of {self.count} threads came)"
        text = f"{self.name} (phase {len(self.over)}: {self.arrived} of {self.count} arrivals"
        if self.expected or self.landed:
            text += f", {self.expected} bytes expected and {self.landed} copied"
        return text + ")"


@dataclass
class Group:
    """Asynchronous work of a role: ops issued, last op of each group, last op waited for."""

    agent: int
    issued: int = 0
    committed: list[int] = field(default_factory=list)
    known: int = 0
    last: Node | None = None
