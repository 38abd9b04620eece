"""The scalars that the control and protocol of a Body hang on, and their arithmetic over integers.

Loop bounds, conditions, stages, parities and leading indices: what `skeleton` runs and `periodic`
finds the periods of. Invariant: `needed` holds every scalar that a needed one follows from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir.node import Node, walk
from ..ir.types import Tile
from .build import Body
from .check import written_parameters
from .row import Arrive, Land, Scalar, Wait, effects_of, is_place, touches_of


@dataclass(frozen=True)
class Scenario:
    """One run: the program, values of Symbols by name, and what loaded scalars are."""

    program: tuple[int, ...]
    symbols: Mapping[str, int] = field(default_factory=dict)
    data: int = 0
    rank: int = 0  # of the program within its cluster
    extra: bool = False  # worth a run only where runs are short


# ---- which scalars an op hangs on ---------------------------------------------------------------


def uses(node: Node, tracked: set[Node]) -> tuple[list[Node], list[Node]] | None:
    """Scalars that say what an event does to the protocol, then those that only say which part of
    a parameter it touches; None where the op is no event."""
    effects = effects_of(node)
    if not effects:
        return None
    scalars: list[Scalar | None] = []
    boxes: list[Scalar | None] = []
    for effect in effects:
        if isinstance(effect, (Arrive, Wait, Land)):
            names = ("stage", "parity", "rank", "first")
            scalars += [getattr(effect, name, None) for name in names]
    for touch in touches_of(node):
        scalars.append(touch.when)
        if not touch.some and is_place(touch.memory):
            scalars += touch.index
        elif not touch.some and touch.pages is None and touch.memory in tracked:
            boxes += touch.index
    first, second = ([s for s in part if isinstance(s, Node)] for part in (scalars, boxes))
    return first, second


# ---- scalar arithmetic --------------------------------------------------------------------------

UNARY: dict[str, Callable[[Any], Any]] = {
    "negative": operator.neg,
    "absolute": abs,
    "bit_not": lambda a: not a if isinstance(a, bool) else ~a,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "floor_divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
    "unsigned_divide": lambda a, b: a // b if b else 0,
    "unsigned_remainder": lambda a, b: a % b if b else 0,
    "minimum": min,
    "maximum": max,
    "bit_and": operator.and_,
    "bit_or": operator.or_,
    "bit_xor": operator.xor,
    "shift_left": lambda a, b: a << b if 0 <= b < 64 else 0,
    "shift_right": lambda a, b: a >> b if 0 <= b < 64 else 0,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "less": operator.lt,
    "less_equal": operator.le,
}
EXTREMES = ("minimum", "maximum")
COMPARES = ("equal", "not_equal", "less", "less_equal")
TERNARY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "where": lambda c, a, b: a if c else b,
    "multiply_add": lambda a, b, c: a * b + c,
}


def is_scalar(node: Node) -> bool:
    """Whether a Node is one value."""
    return isinstance(node.type, Tile) and node.type.shape == ()


def computable(node: Node) -> bool:
    """Whether a scalar follows from its inputs by arithmetic of this module."""
    name = node.op.name
    if not all(is_scalar(i) for i in node.inputs):
        return False
    if name == "cast":
        return True
    if any(i.dtype.is_float for i in node.inputs) and name not in COMPARES:
        return False
    return name in UNARY or name in BINARY or name in TERNARY


class Scalars:
    """The scalars of a Body that events, bounds and conditions hang on."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.tracked = written_parameters(body)
        self.owner: dict[Node, tuple[Node, int]] = {}  # Block argument: loop, position
        for node in body.block.all_nodes():
            if node.op.name == "loop":
                for position, a in enumerate(node.blocks[0].arguments):
                    self.owner[a] = (node, position)
        self.needed: set[Node] = set()
        self._need(False)
        self.by_program = any(n.op.name == "program" for n in self.needed)
        self._need(True)

    def _need(self, boxes: bool) -> None:
        """Gather the scalars that events, bounds and conditions hang on, boxes of parameters too
        if asked."""
        stack: list[Node] = []
        for node in self.body.block.all_nodes():
            found = uses(node, self.tracked)
            if found is not None:
                stack += [*found[0], *(found[1] if boxes else ())]
            if node.op.name == "loop":
                stack += node.inputs[:2]
            elif node.op.name == "branch":
                stack.append(node.inputs[0])
        below = walk(stack, lambda n: self.parts(n) if is_scalar(n) else ())
        self.needed.update(n for n in below if is_scalar(n))

    def parts(self, node: Node) -> Sequence[Node]:
        """The scalars that a scalar follows from."""
        name = node.op.name
        if node in self.owner:
            loop, position = self.owner[node]
            if position == 0:
                return loop.inputs[:2]
            return (loop.inputs[1 + position], loop.blocks[0].results[position - 1])
        if name == "get":
            made, index = node.inputs[0], node.attrs["index"]
            given = [b.results[index] for b in made.blocks]
            if made.op.name == "loop":
                return (*given, made.inputs[2 + index], made.blocks[0].arguments[1 + index])
            return (*given, *made.inputs[:1])
        if name == "load":
            return [i for i in node.inputs[1:] if is_scalar(i)]
        return node.inputs if computable(node) else ()
