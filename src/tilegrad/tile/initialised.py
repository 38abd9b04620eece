"""Places that are read before anything wrote them, by the order of the code.

For Bodies of the portable level, where one thread of control runs. An element counts as written
from the first store that may reach it; a loop counts as run at least once unless its bounds say
that it is not (a loop that may be empty is as a rule empty for the reader too). What is not read
in every turn of a loop (in a branch, or in a loop that may be empty) may read what the turn before
wrote. `protocol` judges the placed level. Invariant: an 'error' is a read that comes before every
write on all paths, a 'warning' one that does on some.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import high, low
from .build import Body
from .check import Finding, finding, place_name
from .row import Touch, is_place, read_by, touches_of, written_by

MANY = 1 << 22  # elements of a place that are looked at one by one


def check_initialised(body: Body) -> list[Finding]:
    """Reads of places that nothing has written."""
    walker = _Walker()
    walker.block(body.block, set(), set())
    return list(walker.found.values())


class _Walker:
    def __init__(self) -> None:
        self.found: dict[Node, Finding] = {}
        self.reached: dict[Node, Any] = {}  # elements of places that some store may reach
        self.loops: tuple[Block, ...] = ()  # around the Node that is walked
        self.turns: tuple[Block, ...] = ()  # of these, those that may be in a later turn

    def block(self, block: Block, surely: set[Node], maybe: set[Node]) -> None:
        """Walk a Block; the sets of written places grow."""
        for node in block.nodes:
            name = node.op.name
            if name == "branch":
                self.branch(node, surely, maybe)
            elif name == "loop":
                lower, upper = (i.attrs.get("value") for i in node.inputs[:2])
                empty = runs = False
                if lower is not None and upper is not None:
                    empty, runs = high(upper) <= low(lower), low(upper) > high(lower)
                loops, turns = self.loops, self.turns
                if not runs:
                    self.turns = loops
                self.loops = (*loops, node.blocks[0])
                self.block(node.blocks[0], set(surely) if empty else surely, maybe)
                self.loops, self.turns = loops, turns
            elif node.blocks:
                for inner in node.blocks:
                    self.block(inner, surely, maybe)
            else:
                self.node(node, surely, maybe)

    def branch(self, node: Node, surely: set[Node], maybe: set[Node]) -> None:
        arms = []
        turns, self.turns = self.turns, self.loops
        for inner in node.blocks:
            arm = set(surely)
            self.block(inner, arm, maybe)
            arms.append(arm)
        self.turns = turns
        surely |= set.intersection(*arms)
        maybe |= set.union(*arms)

    def node(self, node: Node, surely: set[Node], maybe: set[Node]) -> None:
        for memory in filter(is_place, read_by(node)):
            if memory not in surely and memory not in self.found:
                text = f"{place_name(memory)} is read before anything wrote it"
                severity = "error"
                if memory in maybe or any(t.memory is memory for t in self.carried()):
                    severity, text = "warning", text + " on some paths"
                self.found[memory] = finding("uninitialised", text, node, memory, severity=severity)
        for touch in touches_of(node):
            if is_place(touch.memory) and prod(touch.memory.shape) <= MANY:
                self.elements(node, touch)
        surely |= written_by(node)
        maybe |= written_by(node)

    def carried(self) -> list[Touch]:
        """What a turn before may have stored."""
        nodes = (n for block in self.turns for n in block.all_nodes())
        return [t for n in nodes for t in touches_of(n) if t.writes]

    def elements(self, node: Node, touch: Touch) -> None:
        """Note what a store may reach, or that a load has elements no store before it reaches."""
        place, part = touch.memory, _part(touch)
        reached = self.reached.setdefault(place, np.zeros(place.shape, np.bool_))
        if touch.writes:
            reached[part or ...] = True
        elif part is not None and not reached[part].all() and place not in self.found:
            reached = reached.copy()
            for other in (t for t in self.carried() if t.memory is place):
                reached[_part(other) or ...] = True
            if reached[part].all():
                return
            text = f"some of {place_name(place)} is read that nothing wrote"
            self.found[place] = finding("uninitialised", text, node, place)


def _part(touch: Touch) -> tuple[slice, ...] | None:
    """The box of a place that is touched, if it is known and has no mask."""
    at: list[Any] = [getattr(i, "attrs", {"value": i}).get("value") for i in touch.index or ()]
    if touch.mask is not None or not at or not all(isinstance(i, int) for i in at):
        return None
    return tuple(
        slice(i, i + (touch.shape[touch.axes.index(a)] if a in touch.axes else 1))
        for a, i in enumerate(at)
    )
