"""The scalars that the control and protocol of a Body hang on, and their arithmetic over integers.

Loop bounds, conditions, stages, parities and leading indices: what `skeleton` runs. `needed` holds
every scalar that a needed one follows from. `Periods` says which loops repeat: after how many
indices a trip does the same again.

Every scalar of a loop's Block is seen as a function f of the loop's trip with f(trip + period) =
f(trip) + shift: the index itself shifts by the step, a remainder of it has shift 0 and a period, a
quotient shifts less often. A loop repeats if all scalars that the protocol hangs on (stages,
parities, leading indices, conditions, bounds of inner loops) have shift 0. A comparison of scalars
that shift against each other changes at most once (twice for equality) as the trip grows: the trace
compares the signs of all comparisons at both ends of what it leaves out, and where they agree they
were constant between.

The smaller or larger of two that shift apart is, in the middle, the one that shifts further that
way; `expected` has the sign that the trace must then see.

Loops of one depth share a period in indices and a rule for what is left out, which looks only at
the bounds: so a producer that takes 0, 1, 2, ... and consumers that take every other index leave
out the same range. Invariant: the middle is a whole number of periods; before it one period (in
which every ring that the loop turns comes round) and two indices are kept, in an innermost loop at
least `2 * stages + 2`, and after it two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any

from ..ir.node import Node
from ..ir.symbol import evaluate
from ..ir.types import Tile
from .build import Body
from .check import walk, written_parameters
from .numeric import COMPARE
from .row import Arrive, Land, Scalar, Wait, constant_of, effects_of, is_place, touches_of


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
            names = ("stage", "parity", "first")
            scalars += [getattr(effect, name, None) for name in names]
    for touch in touches_of(node):
        scalars.append(touch.when)
        if not touch.some and is_place(touch.memory):
            scalars += touch.index
        elif not touch.some and touch.pages is None and touch.memory in tracked:
            boxes += touch.index
    first, second = ([s for s in part if isinstance(s, Node)] for part in (scalars, boxes))
    return first, second


def deciding(node: Node) -> Sequence[Node]:
    """The bounds of a loop, or the condition of a branch."""
    return node.inputs[: {"loop": 2, "branch": 1}.get(node.op.name, 0)]


# ---- scalar arithmetic --------------------------------------------------------------------------

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "negative": operator.neg,
    "absolute": abs,
    "bit_not": lambda a: not a if isinstance(a, bool) else ~a,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    **dict.fromkeys(("floor_divide", "unsigned_divide"), lambda a, b: a // b if b else 0),
    **dict.fromkeys(("remainder", "unsigned_remainder"), lambda a, b: a % b if b else 0),
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
    "where": lambda c, a, b: a if c else b,
    "multiply_add": lambda a, b, c: a * b + c,
}
EXTREMES = ("minimum", "maximum")


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
    if any(i.dtype.is_float for i in node.inputs) and name not in COMPARE:
        return False
    return name in ARITHMETIC


class Scalars:
    """The scalars of a Body that events, bounds and conditions hang on."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.tracked = written_parameters(body)
        self.owner: dict[Node, tuple[Node, int]] = {}  # Block argument: loop, position
        for node in body.block.find("loop"):
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
            stack += deciding(node)
        while stack:
            node = stack.pop()
            if node in self.needed or not is_scalar(node):
                continue
            self.needed.add(node)
            stack += self.parts(node)

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


# ---- loops that repeat --------------------------------------------------------------------------


Shift = tuple[int, int]  # period in trips, shift after it
CONSTANT: Shift = (1, 0)
LONGEST = 1 << 12


class Periods:
    """The period of a skeleton's loops."""

    def __init__(self, skeleton: Scalars, scenario: Scenario | None) -> None:
        self.skeleton, self.scenario = skeleton, scenario
        self.repeating: set[Node] = set()
        self.expected: dict[Node, dict[Node, int]] = {}
        self.periods: dict[int, int] = {}  # by the number of loops around
        self.fronts: dict[int, int] = {}
        self.depths: dict[Node, int] = {}
        stages, holding = 1, set[Node]()
        for node, around in walk(skeleton.body.block):
            if node.op.name == "barrier":
                stages = max(stages, node.attrs["stages"])
            elif node.op.name == "loop":
                self._loop(node, sum(n.op.name == "loop" for n in around))
                holding.update(around)
        inner = {self.depths[n] for n in self.repeating - holding}
        for depth, period in self.periods.items():
            self.fronts[depth] = max(period + 2, 2 * stages + 2 if depth in inner else 0)

    def _loop(self, node: Node, depth: int) -> None:
        loop = _Loop(self.skeleton, self.scenario, node)
        found = loop.find()
        self.depths[node] = depth
        period = self.periods.setdefault(depth, 2)
        if found is not None:
            self.periods[depth] = lcm(period, found * node.attrs["step"])
            self.repeating.add(node)
            self.expected[node] = loop.expected

    def middle(self, loop: Node, lower: int, upper: int) -> tuple[int, int, int]:
        """The first index that may be left out, how many indices are, and the period."""
        depth = self.depths[loop]
        period = self.periods[depth]
        first = lower // period * period + self.fronts[depth]
        count = (upper - 2 - first) // period
        return first, max(0, count) * period, period


class _Loop:
    """The shifts of the scalars within one loop, by its trip."""

    def __init__(self, skeleton: Scalars, scenario: Scenario | None, loop: Node) -> None:
        self.skeleton, self.scenario, self.loop = skeleton, scenario, loop
        self.inside: set[Node] = set(loop.blocks[0].arguments)
        for node in loop.blocks[0].all_nodes():
            self.inside.update([node], *[inner.arguments for inner in node.blocks])
        self.memory: dict[Node, Shift | None] = {}
        self.expected: dict[Node, int] = {}  # signs of a - b for minimum and maximum of a and b

    def find(self) -> int | None:
        """The period in trips, if the loop repeats."""
        period = 1
        for node, _ in walk(self.loop.blocks[0]):
            found = uses(node, self.skeleton.tracked)
            for scalar in (*(found[0] if found is not None else ()), *deciding(node)):
                shift = self.shift(scalar)
                if shift is None or shift[1] != 0:
                    return None
                period = lcm(period, shift[0])
                if period > LONGEST:
                    return None
        return period

    def shift(self, node: Node) -> Shift | None:
        """How a scalar moves with the trip; None where that is not known."""
        if node not in self.inside:
            return CONSTANT
        if node not in self.memory:
            self.memory[node] = None  # a carried value that leads back to itself
            self.memory[node] = self._shift(node)
        return self.memory[node]

    def _shift(self, node: Node) -> Shift | None:
        name = node.op.name
        if name in ("constant", "program", "symbol", "cluster_rank"):
            return CONSTANT
        if node in self.skeleton.owner:
            return self._argument(*self.skeleton.owner[node])
        if name == "get":
            return self._get(node)
        parts = [self.shift(i) for i in self.skeleton.parts(node)]
        if any(p is None for p in parts):
            return None
        known: list[Shift] = [p for p in parts if p is not None]
        if not known or not computable(node):
            steady = all(p[1] == 0 for p in known)
            return (lcm(*[p[0] for p in known]), 0) if known and steady else None
        return self._arithmetic(node, name, known)

    def _argument(self, loop: Node, position: int) -> Shift | None:
        """A loop's index or carried value."""
        if loop is self.loop and position == 0:
            return 1, loop.attrs["step"]
        if position == 0:
            return self.shift(loop.inputs[0])  # at the same trip of the inner loop
        given, result = loop.blocks[0].arguments[position], loop.blocks[0].results[position - 1]
        more = _added(given, result)
        if loop is self.loop:
            return None if more is None else (1, more)
        return None if more is None else self.shift(loop.inputs[1 + position])

    def _get(self, node: Node) -> Shift | None:
        made, index = node.inputs[0], node.attrs["index"]
        if made.op.name == "loop":
            return self.shift(made.blocks[0].arguments[1 + index])
        parts = [self.shift(p) for p in (made.inputs[0], *[b.results[index] for b in made.blocks])]
        return self._same(parts[0], parts[1:])

    def _same(self, condition: Shift | None, values: list[Shift | None]) -> Shift | None:
        """One of several values that move alike, by a condition that repeats."""
        if condition is None or condition[1] != 0 or any(v is None for v in values):
            return None
        known: list[Shift] = [v for v in values if v is not None]
        period = lcm(condition[0], *[k[0] for k in known])
        shifts = {k[1] * (period // k[0]) for k in known}
        return (period, shifts.pop()) if len(shifts) == 1 else None

    def _arithmetic(self, node: Node, name: str, parts: list[Shift]) -> Shift | None:
        period = lcm(*[p[0] for p in parts])
        shifts = [p[1] * (period // p[0]) for p in parts]
        if name in COMPARE:
            return period, 0  # the trace looks at their signs
        if name == "where":
            return self._same(parts[0], list(parts[1:]))
        if all(s == 0 for s in shifts):
            return period, 0
        if name in EXTREMES and shifts[0] != shifts[1]:
            self.expected[node] = 1 if shifts[0] > shifts[1] else -1
        if name in (*EXTREMES, "add", "subtract", "negative", "cast"):
            return period, ARITHMETIC.get(name, int)(*shifts)
        by = [self.constant(i) for i in node.inputs]
        if name == "multiply" and any(b is not None for b in by):
            return (period, shifts[0] * by[1]) if by[1] is not None else (period, shifts[1] * by[0])
        divisor = by[1] if len(by) > 1 else None
        if divisor and name.endswith(("divide", "remainder")):
            more = abs(divisor) // gcd(divisor, shifts[0])
            divides = name.endswith("divide")
            return period * more, shifts[0] * more // divisor if divides else 0
        return None

    def constant(self, node: Node) -> Any:
        """The value of a scalar that is the same all along, if it is known."""
        name = node.op.name
        if name == "constant":
            return int(node.attrs["value"])
        if self.scenario is None or node in self.skeleton.owner:
            return None
        if name == "symbol":
            return evaluate(node.attrs["value"], self.scenario.symbols)
        if name not in ARITHMETIC or not computable(node):
            return None
        parts = [self.constant(i) for i in node.inputs]
        return None if None in parts else ARITHMETIC[name](*parts)


def _added(given: Node, result: Node) -> Any:
    """The constant a carried value grows by each trip, if it does."""
    if result is given:
        return 0
    if result.op.name == "add" and given in result.inputs:
        other = result.inputs[1] if result.inputs[0] is given else result.inputs[0]
        return constant_of(other)
    return None
