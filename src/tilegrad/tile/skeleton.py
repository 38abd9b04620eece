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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..core.errors import InternalError
from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import Expr, atoms, evaluate, high, low
from .build import Body
from .scalars import (
    ARITHMETIC,
    COMPARES,
    EXTREMES,
    Periods,
    Scalars,
    Scenario,
    computable,
    uses,
)

Event = tuple[Node, dict[Node, Any]]
MOST_EVENTS = 60_000


class TooLong(InternalError):
    """A trace has more events than anyone wants to wait for."""


def _convert(node: Node) -> Callable[[Any], Any]:
    dtype = node.dtype
    if dtype.kind == "bool":
        return bool
    return float if dtype.is_float else int


# ---- the code of a skeleton ---------------------------------------------------------------------

(APPLY, DATA, EVENT, LOOP, BRANCH, ROLES) = range(6)
Code = list[tuple[Any, ...]]


class Skeleton(Scalars):
    """The scalars and events of a Body, ready to be traced."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.events = 0  # of all traces so far
        self.numbers: dict[Node, int] = {}
        self.start: list[Any] = []
        self.programs: list[tuple[int, int]] = []
        self.ranks: list[int] = []
        self.symbols: list[tuple[int, Any]] = []
        self.has_data = False
        self.periods = Periods(self, None)
        self.code = self._block(body.block)

    def number(self, node: Node) -> int:
        """Where the value of a scalar stands."""
        if node not in self.numbers:
            self.numbers[node] = len(self.start)
            self.start.append(None)
        return self.numbers[node]

    def _block(self, block: Block) -> Code:
        code: Code = []
        for node in block.nodes:
            name = node.op.name
            if name == "role":
                if not (code and code[-1][0] == ROLES):
                    code.append((ROLES, []))
                code[-1][1].append((node, self._block(node.blocks[0])))
            elif name == "loop":
                self._loop(code, node)
            elif name == "branch":
                self._branch(code, node)
            else:
                found = uses(node, self.tracked)
                if found is not None:
                    scalars = list(dict.fromkeys([*found[0], *found[1]]))
                    code.append((EVENT, node, [(n, self.number(n)) for n in scalars]))
                if node in self.needed and name != "get":
                    self._scalar(code, node)
        return code

    def _scalar(self, code: Code, node: Node) -> None:
        name, out = node.op.name, self.number(node)
        if name == "constant":
            self.start[out] = node.attrs["value"]
        elif name == "program":
            self.programs.append((out, node.attrs["axis"]))
        elif name == "cluster_rank":
            self.ranks.append(out)
        elif name == "symbol":
            self.symbols.append((out, node.attrs["value"]))
        elif not computable(node):
            self.has_data = True
            index = [self.number(i) for i in self.parts(node) if i.dtype.kind != "bool"]
            code.append((DATA, out, tuple(index), _convert(node)))
        else:
            function = _convert(node) if name == "cast" else ARITHMETIC[name]
            watched = node if name in (*COMPARES, *EXTREMES) else None
            code.append((APPLY, out, function, [self.number(i) for i in node.inputs], watched))

    def _loop(self, code: Code, node: Node) -> None:
        block = node.blocks[0]
        carried = []
        for k, given in enumerate(block.arguments[1:]):
            if given in self.needed:
                ends = (given, node.inputs[2 + k], block.results[k])
                carried.append(tuple([self.number(x) for x in ends]))
        inner = self._block(block)
        if not inner and not carried:
            return
        index = self.number(block.arguments[0])
        bounds = (self.number(node.inputs[0]), self.number(node.inputs[1]))
        results = self._gets(node, [block.arguments[1:]])
        code.append((LOOP, node, index, *bounds, node.attrs["step"], inner, carried, results))

    def _gets(self, node: Node, values: list[Sequence[Node]]) -> list[tuple[int, ...]]:
        """Where results of a loop or a branch stand, and the values that each may be."""
        gets = [g for g in self.needed if g.op.name == "get" and g.inputs[0] is node]
        return [
            tuple([self.number(x) for x in (g, *[v[g.attrs["index"]] for v in values])])
            for g in gets
        ]

    def _branch(self, code: Code, node: Node) -> None:
        arms = [self._block(b) for b in node.blocks]
        results = self._gets(node, [b.results for b in node.blocks])
        if any(arms) or results:
            code.append((BRANCH, self.number(node.inputs[0]), *arms, results))

    # ---- scenarios --------------------------------------------------------------------------

    def scenarios(self) -> list[Scenario]:
        """The last and the first program, others as extras; Symbols and data at the ends and just
        inside."""
        names: dict[str, Expr] = {}
        for value in (*[e for _, e in self.symbols], *self.body.grid, *self._sizes()):
            names.update({a.name: a for a in atoms(value) if a.kind == "symbol"})
        picks = (0,) if not names and not self.has_data else (0, 1, 2)
        found: dict[Any, Scenario] = {}
        for extra in (False, True):
            for pick in picks:
                bound = {
                    n: (low(s), min(low(s) + 1, high(s)), high(s))[pick] for n, s in names.items()
                }
                grid = [evaluate(size, bound) for size in self.body.grid]
                if any(size < 1 for size in grid):
                    continue
                data = (0, 1, 3001)[pick] if self.has_data else 0
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

    def _sizes(self) -> Iterator[Any]:
        for parameter in self.tracked:
            yield from parameter.shape

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
        self.count = 0
        self.signs: list[int] = []
        self.extremes: list[tuple[Node, int]] = []

    def start(self) -> list[Any]:
        """Run the Body."""
        values = list(self.skeleton.start)
        for number, axis in self.skeleton.programs:
            values[number] = self.scenario.program[axis]
        for number in self.skeleton.ranks:
            values[number] = self.scenario.rank
        for number, value in self.skeleton.symbols:
            values[number] = evaluate(value, self.scenario.symbols)
        events: list[Any] = []
        self.run(self.skeleton.code, values, events)
        self.skeleton.events += len(events) + sum(
            len(done) for item in events if item[0] == "roles" for _, done in item[1]
        )
        return events

    def run(self, code: Code, v: list[Any], out: list[Any]) -> None:
        """Run code; `v` holds the scalars."""
        for item in code:
            kind = item[0]
            if kind == APPLY:
                _, to, function, inputs, watched = item
                v[to] = function(*[v[i] for i in inputs])
                if watched is not None:
                    self.watch(watched, *[v[i] for i in inputs])
            elif kind == EVENT:
                out.append((item[1], {n: v[s] for n, s in item[2]}))
            elif kind == LOOP:
                self.loop(item, v, out)
            elif kind == BRANCH:
                taken = 0 if v[item[1]] else 1
                self.run(item[2 + taken], v, out)
                for result in item[4]:
                    v[result[0]] = v[result[1 + taken]]
            elif kind == DATA:
                base, index = self.scenario.data, sum(int(v[s]) for s in item[2])
                v[item[1]] = item[3](base & 1 if item[3] is bool else base * (1 + index % 4))
            else:
                self.roles(item[1], v, out)

    def watch(self, node: Node, a: Any, b: Any) -> None:
        """Note which of two is larger: for a comparison, or for the extreme of them."""
        sign = (a > b) - (a < b)
        if node.op.name in COMPARES:
            self.signs.append(sign)
        else:
            self.extremes.append((node, sign))

    def roles(self, roles: list[tuple[Node, Code]], v: list[Any], out: list[Any]) -> None:
        """Trace roles that run at the same time, one after another."""
        found = []
        for node, code in roles:
            events: list[Any] = []
            self.run(code, v, events)
            found.append((node, events))
        out.append(("roles", found))

    def loop(self, item: tuple[Any, ...], v: list[Any], out: list[Any]) -> None:
        """Run a loop, leaving out the middle of a long one that repeats."""
        _, node, index, lower, upper, step, code, carried, results = item
        i, stop = v[lower], v[upper]
        first, skipped, period = self.periods.middle(node, i, stop)
        if node not in self.repeating or not skipped:
            if skipped and any(
                self.periods.depths[n] == self.periods.depths[node] for n in self.repeating
            ):
                raise _Turned(node)  # others of its depth would leave out what it does not
            first, skipped = stop, 0
        seen: dict[int, list[int]] = {}
        for given, init, _ in carried:
            v[given] = v[init]
        jumped = False
        while i < stop:
            if i >= first and not jumped:
                i, jumped = i + skipped, True
                continue
            v[index] = i
            before, extremes = len(self.signs), len(self.extremes)
            self.run(code, v, out)
            if skipped and i >= first - period:
                signs = self.signs[before:]
                if not jumped:
                    seen[i] = signs
                elif seen.get(i - skipped - period, signs) != signs:
                    raise _Turned(node)
                expected = self.periods.expected[node]
                if any(expected.get(n, sign) == -sign != 0 for n, sign in self.extremes[extremes:]):
                    raise _Turned(node)
            carried_values = [v[result] for _, _, result in carried]
            for (given, _, _), value in zip(carried, carried_values):
                v[given] = value
            i += step
            self.count += 1
            if len(out) > MOST_EVENTS or self.count > 4 * MOST_EVENTS:
                raise TooLong("tile.skeleton", f"{self.skeleton.body.name} has too many events")
        for to, given in results:
            v[to] = v[given]
