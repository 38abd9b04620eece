"""Trace a kernel: run its rewritten Python once and collect the Body it describes.

A `Tracer` owns the builder, the grid, the results and the Plan of one Body. `Stage` is what the
rewritten `for` and `if` call: loops over `tile.range` and branches on scalar tiles become Blocks,
and the variables they change become carried values, found by tracing until nothing new changes.
Invariant: tracing the same function with the same types, static values and Plan gives a Body
with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, ShapeError, TraceError, UserError
from ..ir.block import Block, argument
from ..ir.node import Node
from ..ir.symbol import Size, atoms, ceil_divide, high, low
from ..ir.types import Memory, Tile
from . import ops
from .arithmetic import broadcast
from .build import Body
from .placed import PlacedBuilder
from .plan import Plan
from .value import (
    Edges,
    Index,
    MemoryValue,
    TileValue,
    Undefined,
    cast,
    index_of,
    number,
    size_of,
    state,
    tile_of,
)


@dataclass(frozen=True)
class Range:
    """What tile.range gives: a loop that is staged."""

    lower: Size
    upper: Size
    step: int
    unroll: int = 1
    block: int | None = None  # rows of each Rows, for tile.range_n


@dataclass(frozen=True)
class Rows:
    """Rows start .. start+count of an array: what a loop over blocks gives."""

    start: Size
    count: int

    @property
    def index(self) -> Any:
        """The first row."""
        return index_of(self.start)


class Tracer:
    """One Body being traced."""

    def __init__(
        self, name: str, parameters: Sequence[tuple[str, Memory]], plan: Plan,
        stated: Plan | None = None,
    ) -> None:  # fmt: skip
        self.name, self.plan = name, plan
        self.stated = plan if stated is None else stated  # what a person set of the Plan
        self.builder = PlacedBuilder(name, parameters)
        self.inputs = [
            MemoryValue(n, node, False) for (n, _), node in zip(parameters, self.builder.parameters)
        ]
        self.results: list[MemoryValue] = []
        self.fills: dict[str, float] = {}
        self.grid: tuple[Size, ...] | None = None
        self.programs: list[Size] = []
        self.hints: dict[str, Any] = {}  # notes that functions leave for the emitter
        self.depth = 0  # Blocks around
        self.placed = False
        self.rows: Rows | None = None  # of the program, where the grid is implied
        self.lead: tuple[Size, ...] = ()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this is the Tracer of the thread."""
        before, state.tracer = state.tracer, self
        try:
            yield
        finally:
            state.tracer = before

    # ---- grid and results -----------------------------------------------------------------

    def set_grid(self, sizes: Sequence[Size]) -> list[Size]:
        """Declare the grid; gives this program's numbers."""
        if self.grid is not None:
            raise TraceError("the grid is declared twice", op="tile.grid",
                             hint="tile.load(rows=...) implies a grid of row blocks")  # fmt: skip
        if self.depth:
            raise TraceError("the grid is declared inside a loop or a branch", op="tile.grid")
        self.grid = tuple(sizes)
        self.programs = [self.builder.program(i, s) for i, s in enumerate(sizes)]
        return self.programs

    def implied_rows(self) -> Rows:
        """This program's rows, where the grid follows from the first array: one program for
        each block of its rows, times the sizes of its leading axes."""
        if self.rows is None:
            if not self.inputs or self.inputs[0].ndim < 2:
                raise ShapeError("the grid cannot be implied", op="tile.load",
                                 expected="a first argument of shape (..., rows, columns)",
                                 got=repr(self.inputs[:1]), hint="declare it with tile.grid(...)",
                                 )  # fmt: skip
            *lead, rows, _ = self.inputs[0].type.shape
            block = self.block_of("m")
            numbers = self.set_grid([*lead, ceil_divide(rows, block)])
            self.lead = tuple(numbers[:-1])
            self.rows = Rows(numbers[-1] * block, block)
        return self.rows

    def block_of(self, name: str) -> int:
        """A block size of the Plan."""
        found = getattr(self.plan, name)
        if found is None:
            raise UserError(f"the Plan has no {name}", op="tile.context")
        return int(found)

    def add_result(
        self, shape: Sequence[Size], dtype: DType, name: str = "", fill: float | None = None
    ) -> MemoryValue:
        """A new array that the kernel gives back."""
        if self.depth:
            raise TraceError("a result is declared inside a loop or a branch", op="tile.result")
        name = name or f"out{len(self.results)}"
        type_ = Memory(tuple(shape), dtype, use="result" if fill is None else "state")
        node = argument(name, type_)
        self.builder.block.arguments = (*self.builder.block.arguments, node)
        self.builder.builder.known[0].add(id(node))
        if fill is not None:
            self.fills[name] = fill
        self.results.append(MemoryValue(name, node, True))
        return self.results[-1]

    def returned(self, value: Any) -> None:
        """Tiles that the function returns become results: blocks of rows of the first array."""
        if value is None:
            return
        for item in value if isinstance(value, tuple) else (value,):
            from .language import store_rows

            found = tile_of(item, op="return")
            rows = self.implied_rows()
            if not found.shape or found.shape[0] != rows.count or found.ndim > 2:
                raise ShapeError(
                    "a returned tile is not a block of rows", op="kernel",
                    expected=f"shape ({rows.count},) or ({rows.count}, columns)", got=repr(found),
                    hint="declare other results with tile.result and write them with tile.store",
                )  # fmt: skip
            *lead, count, _ = self.inputs[0].type.shape
            columns = [] if found.ndim == 1 else [self.columns_of(found)]
            out = self.add_result([*lead, count, *columns], found.dtype)
            store_rows(out, found)

    def columns_of(self, value: TileValue) -> Size:
        """How many columns of a returned tile are elements."""
        edge = value.edges[1]
        return value.shape[1] if edge is None else edge.limit

    def finish(self) -> Body:
        """The Body."""
        if not self.results:
            raise UserError(f"the kernel {self.name} has no result", op="kernel",
                            expected="tile.result(...), or a returned tile")  # fmt: skip
        notes = {k: v for k, v in {**self.plan.notes(), **self.hints}.items() if v is not None}
        level = "placed" if self.placed else "portable"
        body = self.builder.finish(self.grid or (1,), **notes, level=level)
        return body


class Stage:
    """What rewritten Python calls; see `stage`."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def undefined(self, name: str) -> Undefined:
        """The value of a variable that is not set."""
        return Undefined(name)

    def plain_range(self, values: Any) -> Iterable[Any]:
        """What a loop with return, break or continue inside runs over."""
        if isinstance(values, Range):
            raise TraceError("a loop over tile.range cannot be left early", op="kernel",
                             hint="no return, break, continue or else in it: use tile.where, or "
                             "a smaller upper bound")  # fmt: skip
        return values  # type: ignore[no-any-return]

    def plain_test(self, value: Any) -> bool:
        """The condition of a branch with return, break or continue inside, or of a while."""
        if isinstance(value, (TileValue, Index)):
            raise TraceError(
                "the condition is known only when the kernel runs", op="kernel", got=repr(value),
                hint="such a branch cannot contain return, break or continue; loop with tile.range",
            )  # fmt: skip
        return bool(value)

    # ---- loops ----------------------------------------------------------------------------

    def loop(
        self, values: Any, body: Callable[..., Any], given: tuple[Any, ...],
        names: tuple[str, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """for: staged over a Range, else as Python does it."""
        if not isinstance(values, Range):
            if isinstance(values, (TileValue, Index, MemoryValue)):
                raise TraceError("this cannot be looped over", op="kernel", got=repr(values),
                                 hint="use tile.range(n)")  # fmt: skip
            for item in values:
                given = body(item, *given)
            return given
        if isinstance(values.lower, int) and isinstance(values.upper, int):
            if values.upper - values.lower <= values.step:
                return self._once(values, body, given, names)
        return _Loop(self.tracer, values, body, given, names).run()

    def _once(
        self, values: Range, body: Callable[..., Any], given: tuple[Any, ...],
        names: tuple[str, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """A loop of at most one trip, written out."""
        if high(values.upper) <= low(values.lower):
            return given
        item = values.lower if values.block is None else Rows(values.lower, values.block)
        found = body(item, *given)
        return tuple(
            Undefined(name, "is set only inside the loop") if isinstance(before, Undefined)
            else after for name, before, after in zip(names, given, found)
        )  # fmt: skip

    # ---- branches -------------------------------------------------------------------------

    def branch(
        self, test: Any, then: Callable[..., Any], otherwise: Callable[..., Any],
        given: tuple[Any, ...], names: tuple[str, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """if: staged on a scalar tile, else as Python does it."""
        if isinstance(test, Undefined):
            raise test.fail()
        if not isinstance(test, TileValue):
            return then(*given) if test else otherwise(*given)  # type: ignore[no-any-return]
        if test.shape != () or test.dtype is not dtypes.bool_:
            raise DTypeError("the condition is not a scalar", op="if", expected="a bool scalar",
                             got=repr(test), hint="use tile.where for whole tiles")  # fmt: skip
        found = [self._part(f, given) for f in (then, otherwise)]
        changed = [i for i in range(len(given)) if any(_differs(given[i], f[i]) for f in found)]
        kept = [i for i in changed if not any(isinstance(f[i], Undefined) for f in found)]
        types = [_common(names[i], [f[i] for f in found]) for i in kept]
        edges = [_join(names[i], [f[i].edges for f in found if isinstance(f[i], TileValue)])
                 for i in kept]  # fmt: skip
        results = self._both(test, (then, otherwise), given, kept, types)
        answer = list(given)
        for i in changed:
            answer[i] = Undefined(names[i], "is set in only one branch")
        for i, node, edge in zip(kept, results, edges):
            answer[i] = TileValue(node, edge)
        return tuple(answer)

    def _part(self, function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, ...]:
        """A trial: what one side makes of the variables; its Nodes are thrown away."""
        with self.tracer.builder.builder.block("trial"), _deeper(self.tracer):
            return function(*given)  # type: ignore[no-any-return]

    def _both(
        self, test: TileValue, sides: Sequence[Callable[..., Any]], given: tuple[Any, ...],
        kept: list[int], types: list[Tile],
    ) -> list[Node]:  # fmt: skip
        def side(function: Callable[..., Any]) -> Callable[[], list[Node]]:
            def run() -> list[Node]:
                with _deeper(self.tracer):
                    found = function(*given)
                    return [fitted(found[i], t).node for i, t in zip(kept, types)]

            return run

        return self.tracer.builder.branch(test.node, side(sides[0]), side(sides[1]))


@contextmanager
def _deeper(tracer: Tracer) -> Iterator[None]:
    tracer.depth += 1
    try:
        yield
    finally:
        tracer.depth -= 1


def _differs(before: Any, after: Any) -> bool:
    if before is after:
        return False
    if isinstance(before, TileValue) and isinstance(after, TileValue):
        return before.node is not after.node or before.edges != after.edges
    if isinstance(before, Index) and isinstance(after, Index):
        return before.size is not after.size
    plain = (bool, int, float, str)
    if isinstance(before, plain) and type(before) is type(after):
        return bool(before != after)
    return True


def _common(name: str, values: Sequence[Any]) -> Tile:
    """The type that the values of a variable from two sides share."""
    for v in values:
        if not isinstance(v, TileValue) and not number(v):
            raise DTypeError(
                f"the variable {name!r} holds {type(v).__name__} after code that is staged",
                op="kernel", expected="a tile or a number",
                hint="only tiles and numbers can change in a loop or a branch of the kernel",
            )  # fmt: skip
    tiles = [v for v in values if isinstance(v, TileValue)]
    if not tiles:
        whole = not any(isinstance(v, float) for v in values)
        if all(isinstance(v, bool) for v in values):
            return Tile((), dtypes.bool_)
        return Tile((), dtypes.int64 if whole else dtypes.float32)
    first = tiles[0].node.type
    for v in tiles[1:]:
        if v.node.type != first:
            raise ShapeError(f"the variable {name!r} changes its type", op="kernel",
                             expected=first, got=v.node.type,
                             hint="cast or broadcast it before")  # fmt: skip
    assert isinstance(first, Tile)
    return first


def _join(name: str, several: Sequence[Edges]) -> Edges | None:
    """Edges of a variable that two sides set: where one has an edge, both have."""
    if not several:
        return None
    result = []
    for axis in zip(*several):
        found = list(dict.fromkeys([e for e in axis if e is not None]))
        if len(found) > 1:
            raise ShapeError(
                f"the variable {name!r} holds partial tiles that end in different places",
                op="kernel", hint="give it values first: tile.fill(x, 0)",
            )  # fmt: skip
        result.append(found[0] if found else None)
    return tuple(result)


def fitted(value: Any, type_: Tile) -> TileValue:
    """A value as a tile of a type; numbers are repeated."""
    found = tile_of(value, type_.dtype if number(value) else None)
    if number(value):
        found = broadcast(cast(found, type_.dtype), type_.shape)
    return found


class _Loop:
    """One staged loop: traced until the carried variables and their types stand still."""

    def __init__(
        self, tracer: Tracer, values: Range, body: Callable[..., Any], given: tuple[Any, ...],
        names: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.tracer, self.values, self.body = tracer, values, body
        self.given, self.names = given, names
        self.carried: dict[int, tuple[Tile, Edges | None]] = {}

    def run(self) -> tuple[Any, ...]:
        """Trace, and give the variables after the loop."""
        for _ in range(8 + 2 * len(self.given)):
            block, index, found = self.attempt()
            if not self.learn(index, found):
                return self.finish(block, found)
        raise UserError("the types of variables keep changing", op="for", got=list(self.names))

    def attempt(self) -> tuple[Block, Size, tuple[Any, ...]]:
        """The body traced once with the carried variables known so far."""
        b, values = self.tracer.builder, self.values
        own = argument("i", Tile((), dtypes.int64))
        arguments = {i: argument(self.names[i], t) for i, (t, _) in self.carried.items()}
        with b.builder.block("loop", (own, *arguments.values())) as block, _deeper(self.tracer):
            index = b.atom("i", own, *self.bounds())
            item = index_of(index)
            if values.block is not None:
                item = Rows(index, values.block)
            inside = list(self.given)
            for i, node in arguments.items():
                inside[i] = TileValue(node, self.carried[i][1])
            found = self.body(item, *inside)
            nodes = []
            for i, (type_, _) in self.carried.items():
                if isinstance(found[i], TileValue) or number(found[i]):
                    nodes.append(b.add(fitted(found[i], type_).node))
            block.results = tuple(nodes)
        self.inside = inside
        return block, index, found

    def bounds(self) -> tuple[int, int]:
        values = self.values
        lower, last = values.lower, high(values.upper) - 1
        if isinstance(lower, int) and isinstance(values.upper, int):
            last = lower + (values.upper - lower - 1) // values.step * values.step
        return low(lower), max(low(lower), last)

    def learn(self, index: Size, found: tuple[Any, ...]) -> bool:
        """Note variables that changed, and types that must be wider; whether any did."""
        news = False
        for i, (before, after) in enumerate(zip(self.inside, found)):
            if isinstance(before, Undefined) or not _differs(before, after):
                continue
            if isinstance(after, Undefined):
                raise after.fail()
            type_ = _common(self.names[i], [after])
            edges = after.edges if isinstance(after, TileValue) else None
            news |= self.note(i, type_, edges, index)
        return news

    def note(self, i: int, type_: Tile, edges: Edges | None, index: Size) -> bool:
        name, start = self.names[i], self.given[i]
        if edges is not None:
            for edge in edges:
                if edge is not None and not isinstance(index, int) and (
                    index in atoms(edge.start) or index in atoms(edge.limit)
                ):
                    raise ShapeError(
                        f"the variable {name!r} carries a partial tile whose end moves",
                        op="for", hint="give it values first: tile.fill(x, 0)",
                    )  # fmt: skip
        if isinstance(start, TileValue):
            if start.node.type != type_:
                raise ShapeError(f"the loop changes the type of {name!r}", op="for",
                                 expected=f"{start.node.type}, as before the loop",
                                 got=type_, hint="cast or broadcast it before the loop",
                                 )  # fmt: skip
            edges = _join(name, [e for e in (start.edges, edges) if e is not None])
        elif not number(start):
            _common(name, [start])
        known = self.carried.get(i)
        if known is not None:
            if known[0] != type_ and known[0].shape != ():
                raise ShapeError(f"the loop changes the type of {name!r}", op="for",
                                 expected=known[0], got=type_)  # fmt: skip
            edges = _join(name, [e for e in (known[1], edges) if e is not None])
            if known == (type_, edges):
                return False
        self.carried[i] = (type_, edges)
        return True

    def finish(self, block: Block, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add the loop; gives the variables after it."""
        b, values = self.tracer.builder, self.values
        order = list(self.carried)
        starts = [b.add(fitted(self.given[i], self.carried[i][0]).node) for i in order]
        lower, upper = b.index(values.lower), b.index(values.upper)
        node = b.add(ops.loop(lower, upper, *starts, blocks=(block,), step=values.step,
                              unroll=values.unroll))  # fmt: skip
        answer = list(self.given)
        for i, (before, after) in enumerate(zip(self.given, found)):
            if isinstance(before, Undefined) and not isinstance(after, Undefined):
                answer[i] = Undefined(self.names[i], "is set only inside the loop")
        for place, i in enumerate(order):
            result = b.add(ops.get(node, index=place))
            answer[i] = TileValue(result, self.carried[i][1])
        return tuple(answer)


def make_range(op: str, *given: Any, unroll: int = 1, block: int | None = None) -> Range:
    """tile.range(stop), (start, stop) or (start, stop, step)."""
    if not 1 <= len(given) <= 3:
        raise UserError("wrong number of bounds", op=op, expected="1, 2 or 3", got=len(given))
    lower, upper, step = (0, *given, 1) if len(given) == 1 else (*given, 1)[:3]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise UserError("the step is not a positive integer", op=op, got=repr(step))
    return Range(size_of(lower, "bound"), size_of(upper, "bound"), step, unroll, block)
