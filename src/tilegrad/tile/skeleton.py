"""The control skeleton of a Body: what each role does in order, run with scalars and no data.

Control and protocol of a Body hang on scalars: loop bounds, stages, parities, leading indices.
`Skeleton` cuts out just these, and `trace` runs them for one program and gives every role's
events as a list. A scalar that comes from memory is *data*: a Scenario says what to take for it
(the same in every role), as it says which value within its bounds a Symbol has.

Long loops are not run whole. Where `scalars` proves that a trip does the same to the protocol
as the trip `period` later, the middle of the loop is left out, a whole number of periods, and the
same index range in every role; `trace` checks that comparisons which may turn in the middle say
the same at both of its ends, and runs the loop whole if one does not.

Invariant: an event carries the Node and the values of the scalars `uses` lists for it, and the
trace of a role does not depend on any other role.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.errors import InternalError
from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import Expr, atoms, evaluate, high, low
from .build import Body
from .numeric import COMPARE
from .scalars import (
    ARITHMETIC,
    EXTREMES,
    Periods,
    Scalars,
    Scenario,
    computable,
    uses,
)

Event = tuple[Node, dict[Node, Any]]
MOST_EVENTS = 60_000
WATCHED = {*COMPARE, *EXTREMES}


class TooLong(InternalError):
    """A trace has more events than anyone wants to wait for."""


def _convert(node: Node) -> Callable[[Any], Any]:
    dtype = node.dtype
    if dtype.kind == "bool":
        return bool
    return float if dtype.is_float else int


OF_RUN: dict[str, Callable[[Any, Any], int]] = {  # scalars that a run of a program decides
    "program": lambda run, attrs: run.program[attrs["axis"]],
    "cluster_rank": lambda run, attrs: run.rank,
    "symbol": lambda run, attrs: evaluate(attrs["value"], run.symbols),
}
STEADY = {"constant": lambda run, attrs: attrs["value"], **OF_RUN}  # in all of a run


class Skeleton(Scalars):
    """The scalars and events of a Body, ready to be traced."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.events = 0  # of all traces so far
        self.steady = [n for n in self.needed if n.op.name in STEADY]
        self.symbols = [n.attrs["value"] for n in self.steady if n.op.name == "symbol"]
        self.functions: dict[Node, Callable[..., Any]] = {}  # of scalars that are computed
        self.data: set[Node] = set()  # scalars that come from memory
        for node in self.needed - {*self.steady, *self.owner}:
            if computable(node):
                self.functions[node] = ARITHMETIC.get(node.op.name) or _convert(node)
            elif node.op.name != "get":
                self.data.add(node)
        self.scalars: dict[Node, list[Node]] = {}  # of events
        self.steps: dict[Block, list[Node]] = {}  # Nodes of each that matter
        self._cut(body.block, {n.inputs[0] for n in self.needed if n.op.name == "get"})
        self.periods = Periods(self, None)

    def _cut(self, block: Block, read: set[Node]) -> bool:
        """Find the events, and what they hang on; whether a Block has any. `read` are the loops and
        branches whose results are."""
        kept = self.steps[block] = []
        for node in block.nodes:
            inside = [self._cut(inner, read) for inner in node.blocks]
            found = uses(node, self.tracked)
            if found is not None:
                self.scalars[node] = list(dict.fromkeys([*found[0], *found[1]]))
            own = node in self.needed and node.op.name not in STEADY
            if own or found is not None or any(inside) or node in read or node.op.name == "role":
                kept.append(node)
        return bool(kept)

    # ---- scenarios --------------------------------------------------------------------------

    def scenarios(self) -> list[Scenario]:
        """The last and the first program, others as extras; Symbols and data at the ends and just
        inside."""
        names: dict[str, Expr] = {}
        sizes = [size for parameter in self.tracked for size in parameter.shape]
        for value in (*self.symbols, *self.body.grid, *sizes):
            names.update({a.name: a for a in atoms(value) if a.kind == "symbol"})
        picks = (0,) if not names and not self.data else (0, 1, 2)
        found: dict[Any, Scenario] = {}
        for extra in (False, True):
            for pick in picks:
                bound = {
                    n: (low(s), min(low(s) + 1, high(s)), high(s))[pick] for n, s in names.items()
                }
                grid = [evaluate(size, bound) for size in self.body.grid]
                if any(size < 1 for size in grid):
                    continue
                data = (0, 1, 3001)[pick] if self.data else 0
                for program in self._programs(grid, extra):
                    key = (program, tuple(bound.items()), data)
                    found.setdefault(key, Scenario(program, bound, data, extra=extra))
        return list(found.values())

    def _programs(self, grid: list[int], extra: bool) -> list[tuple[int, ...]]:
        """Programs to run: one where they all do the same."""
        last = tuple([size - 1 for size in grid])
        if not self.by_program:
            return [] if extra else [last]
        if not extra:
            return [last, tuple([0 for _ in grid])]
        inner = [[1 for _ in grid], [s // 2 for s in grid], [s // 2 + 1 for s in grid]]
        return [tuple(map(min, last, program)) for program in inner]

    def periods_of(self, scenario: Scenario) -> Periods:
        """The periods of loops; those that hang on Symbols are found for their values."""
        if not self.symbols or len(self.periods.repeating) == len(self.periods.depths):
            return self.periods
        return Periods(self, scenario)

    def trace(self, scenario: Scenario, whole: bool = False) -> list[Any]:
        """Events of the program; a ('roles', [(Node, events)...]) stands where roles run."""
        periods = self.periods_of(scenario)
        kept = set(periods.repeating)
        while True:
            run = _Run(self, scenario, periods, set() if whole else kept)
            try:
                return run.start()
            except _Turned as turned:
                depth = periods.depths[turned.loop]
                kept = {loop for loop in kept if periods.depths[loop] != depth}


class _Turned(InternalError):
    """A comparison changed in the part of a loop that was left out."""

    def __init__(self, loop: Node) -> None:
        self.loop = loop
        super().__init__("tile.skeleton", f"{loop!r} does not repeat")


class _Run:
    """One trace under way."""

    def __init__(
        self, skeleton: Skeleton, scenario: Scenario, periods: Periods, repeating: set[Node]
    ) -> None:
        self.skeleton, self.scenario, self.repeating = skeleton, scenario, repeating
        self.periods = periods
        self.values: dict[Node, Any] = {
            node: STEADY[node.op.name](scenario, node.attrs) for node in skeleton.steady
        }
        self.count = 0
        self.signs: list[int] = []
        self.extremes: list[tuple[Node, int]] = []

    def start(self) -> list[Any]:
        """Run the Body."""
        events: list[Any] = []
        self.block(self.skeleton.body.block, events)
        self.skeleton.events += len(events) + sum(
            len(done) for item in events if item[0] == "roles" for _, done in item[1]
        )
        return events

    def block(self, block: Block, out: list[Any]) -> None:
        """Run what matters of a Block."""
        v, scalars, before = self.values, self.skeleton.scalars, ""
        for node in self.skeleton.steps[block]:
            name = node.op.name
            if name == "loop":
                self.loop(node, out)
            elif name == "branch":
                chosen = node.blocks[0 if v[node.inputs[0]] else 1]
                self.block(chosen, out)
                v[node] = [v.get(r) for r in chosen.results]
            elif name == "role":
                self.role(node, out, before == "role")
            else:
                if node in scalars:
                    out.append((node, {n: v[n] for n in scalars[node]}))
                if node in self.skeleton.needed:
                    v[node] = self.value(node)
            before = name

    def value(self, node: Node) -> Any:
        """A scalar, by those that it follows from."""
        v, function = self.values, self.skeleton.functions.get(node)
        if function is not None:
            inputs = [v[i] for i in node.inputs]
            if node.op.name in WATCHED:
                self.watch(node, *inputs)
            return function(*inputs)
        if node.op.name == "get":
            return v[node.inputs[0]][node.attrs["index"]]
        index = sum(int(v[i]) for i in self.skeleton.parts(node) if i.dtype.kind != "bool")
        convert, base = _convert(node), self.scenario.data
        return convert(base & 1 if convert is bool else base * (1 + index % 4))

    def watch(self, node: Node, a: Any, b: Any) -> None:
        """Note which of two is larger: for a comparison, or for the extreme of them."""
        sign = (a > b) - (a < b)
        if node.op.name in COMPARE:
            self.signs.append(sign)
        else:
            self.extremes.append((node, sign))

    def role(self, node: Node, out: list[Any], joins: bool) -> None:
        """Trace a role, which may run at the same time as the one before."""
        events: list[Any] = []
        self.block(node.blocks[0], events)
        if not joins:
            out.append(("roles", []))
        out[-1][1].append((node, events))

    def loop(self, node: Node, out: list[Any]) -> None:
        """Run a loop, leaving out the middle of a long one that repeats."""
        v, block = self.values, node.blocks[0]
        i, stop = v[node.inputs[0]], v[node.inputs[1]]
        carried = [
            (argument, given, result)
            for argument, given, result in zip(block.arguments[1:], node.inputs[2:], block.results)
            if argument in self.skeleton.needed
        ]
        first, skipped, period = self.periods.middle(node, i, stop)
        if node not in self.repeating or not skipped:
            if skipped and any(
                self.periods.depths[n] == self.periods.depths[node] for n in self.repeating
            ):
                raise _Turned(node)  # others of its depth would leave out what it does not
            first, skipped = stop, 0
        seen: dict[int, list[int]] = {}
        v.update([(argument, v[given]) for argument, given, _ in carried])
        jumped = False
        while i < stop:
            if i >= first and not jumped:
                i, jumped = i + skipped, True
                continue
            v[block.arguments[0]] = i
            before, extremes = len(self.signs), len(self.extremes)
            self.block(block, out)
            if skipped and i >= first - period:
                signs = self.signs[before:]
                if not jumped:
                    seen[i] = signs
                elif seen.get(i - skipped - period, signs) != signs:
                    raise _Turned(node)
                expected = self.periods.expected[node]
                if any(expected.get(n, sign) == -sign != 0 for n, sign in self.extremes[extremes:]):
                    raise _Turned(node)
            v.update([(argument, v[result]) for argument, _, result in carried])
            i += node.attrs["step"]
            self.count += 1
            if len(out) > MOST_EVENTS or self.count > 4 * MOST_EVENTS:
                raise TooLong("tile.skeleton", f"{self.skeleton.body.name} has too many events")
        v[node] = [v.get(argument) for argument in block.arguments[1:]]
