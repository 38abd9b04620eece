"""Loops and branches of a kernel: what the rewritten `for` and `if` call.

Loops over `tile.range` and branches on scalar tiles become Blocks; the variables they change
become carried values, found by tracing the body until nothing new changes. Over plain Python
values both do what Python does. Invariant: a variable that leaves a Block was set before it, has
one type, and nothing it knows of itself depends on the inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError, TraceError, UserError
from ..ir.block import Block, argument
from ..ir.node import Node
from ..ir.symbol import Expr, atoms, combine, low
from ..ir.types import Tile
from . import ops
from .arithmetic import broadcast
from .build import BodyBuilder
from .inside import bounded
from .trace import Range, Tracer
from .value import (
    Edges,
    Index,
    MemoryValue,
    TileValue,
    Undefined,
    cast,
    number,
    tile_of,
)

Values = tuple[Any, ...]  # of variables
Names = tuple[str, ...]
Turn = Callable[..., Any]  # what a body of Python does to variables
Leaving = tuple[Tile, "Edges | None"]  # what a variable is after Blocks that set it


class Stage:
    """What rewritten Python calls; see `stage`."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    undefined = Undefined  # what a variable holds that is not set

    def plain_range(self, values: Any) -> Iterable[Any]:
        """What a loop with return, break or continue inside runs over."""
        if isinstance(values, Range):
            raise TraceError(
                "a loop over tile.range cannot be left early",
                hint="no return, break, continue or else in it: use tile.where, or "
                "a smaller upper bound",
            )
        return values

    def plain_test(self, value: Any) -> bool:
        """The condition of a branch with return, break or continue inside, or of a while."""
        if isinstance(value, (TileValue, Index)):
            raise TraceError(
                "the condition is known only when the kernel runs",
                got=repr(value),
                hint="such a branch cannot contain return, break or continue; loop with tile.range",
            )
        return bool(value)

    # ---- loops ----------------------------------------------------------------------------

    def loop(
        self,
        values: Any,
        body: Turn,
        given: Values,
        names: Names,
        index: str = "i",
    ) -> Values:
        """for: staged over a Range, else as Python does it; `index` is the loop's variable."""
        if not isinstance(values, Range):
            if isinstance(values, (TileValue, Index, MemoryValue)):
                raise TraceError(
                    "this cannot be looped over", got=repr(values), hint="use tile.range(n)"
                )
            for item in values:
                given = body(item, *given)
            return given
        if values.plain and values.upper - values.lower <= values.step:
            if values.upper <= values.lower:  # at most one trip, written out
                return given
            after = body(values.item(values.lower), *given)
            return tuple(_inside(n, *pair) for n, *pair in zip(names, given, after))
        shapes = [_count(g) for g in given]
        labels = [
            n if c is None else f"{n}{i}" for n, c in zip(names, shapes) for i in range(c or 1)
        ]

        def flat(item: Any, *inside: Any) -> Values:
            return _flat(body(item, *_deep(inside, shapes)), shapes, names)

        loop = _Loop(self.tracer, values, flat, _flat(given, shapes, names), tuple(labels), index)
        return tuple(_deep(loop.run(), shapes))

    # ---- branches -------------------------------------------------------------------------

    def branch(
        self,
        test: Any,
        then: Turn,
        otherwise: Turn,
        given: Values,
        names: Names,
    ) -> Values:
        """if: staged on a scalar tile, else as Python does it."""
        if isinstance(test, Undefined):
            raise test.fail()
        if not isinstance(test, TileValue):
            return then(*given) if test else otherwise(*given)
        if test.shape != () or test.dtype is not dtypes.bool_:
            raise DTypeError(
                "the condition is not a scalar",
                expected="a bool scalar",
                got=repr(test),
                hint="use tile.where for whole tiles",
            )
        b, known = self.tracer.builder, set(self.tracer.builder.atoms)
        sides: list[tuple[Block, Values]] = []
        for holds, name, function in ((True, "then", then), (False, "otherwise", otherwise)):
            self.tracer.branches.append((test.node, holds))
            with b.builder.block(name) as block:
                sides.append((block, function(*given)))
            self.tracer.branches.pop()
        found = [after for _, after in sides]
        changed = [i for i in range(len(given)) if any(_differs(given[i], f[i]) for f in found)]
        leaving = {
            i: _shared(names[i], [f[i] for f in found], known)
            for i in changed
            if not any(isinstance(f[i], Undefined) for f in found)
        }
        for block, values in sides:  # numbers become tiles, now that their types are known
            with b.builder.within(block):
                block.results = _fit(b, leaving, values)
        node = b.add(ops.branch(test.node, blocks=tuple(block for block, _ in sides)))
        answer = list(given)
        for i in changed:
            answer[i] = Undefined(names[i], "is set in only one branch")
        return _after(b, node, leaving, answer)


def _count(value: Any) -> int | None:
    """How many tiles a list holds; None for all else."""
    if isinstance(value, list) and value and all(isinstance(v, TileValue) for v in value):
        return len(value)
    return None


def _flat(values: Sequence[Any], counts: Sequence[int | None], names: Sequence[str]) -> Values:
    """Variables with the tiles of lists one by one."""
    found: list[Any] = []
    for value, count, name in zip(values, counts, names):
        if count is not None and _count(value) != count:
            raise ShapeError(
                f"the list {name!r} changes in a loop of the kernel",
                expected=f"{count} tiles",
                got=repr(value),
            )
        found += [value] if count is None else value
    return tuple(found)


def _deep(values: Sequence[Any], counts: Sequence[int | None]) -> list[Any]:
    """The other way round."""
    rest = iter(values)
    return [next(rest) if c is None else [next(rest) for _ in range(c)] for c in counts]


def _inside(name: str, before: Any, after: Any) -> Any:
    """A variable after a loop: one that was not set before it is not set by it."""
    if isinstance(before, Undefined):
        return Undefined(name, "is set only inside the loop")
    return after


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
                expected="a tile or a number",
                hint="only tiles and numbers can change in a loop or a branch of the kernel",
            )
    tiles = [v for v in values if isinstance(v, TileValue)]
    if not tiles:
        if all(isinstance(v, bool) for v in values):
            return Tile((), dtypes.bool_)
        some = any(isinstance(v, float) for v in values)
        return Tile((), dtypes.float32 if some else dtypes.int64)
    first = tiles[0].node.type
    for v in tiles[1:]:
        if v.node.type != first:
            raise ShapeError(
                f"the variable {name!r} changes its type",
                expected=first,
                got=v.node.type,
                hint="cast or broadcast it before",
            )
    assert isinstance(first, Tile)
    return first


def _shared(name: str, values: Sequence[Any], known: set[Expr]) -> Leaving:
    """What a variable with these values is outside of their Blocks."""
    type_ = _common(name, values)
    edges = _join(name, *[v.edges for v in values if isinstance(v, TileValue)])
    _check_leaving(name, edges, known)
    return type_, edges


def _fit(b: BodyBuilder, leaving: Mapping[int, Leaving], values: Sequence[Any]) -> tuple[Node, ...]:
    """Variables, by number, as Nodes of the types that they share."""
    return tuple([b.add(fitted(values[i], type_).node) for i, (type_, _) in leaving.items()])


def _after(b: BodyBuilder, node: Node, leaving: Mapping[int, Leaving], known: list[Any]) -> Values:
    """All variables after a loop or a branch, of which some are its results."""
    for place, (i, (_, edges)) in enumerate(leaving.items()):
        known[i] = TileValue(b.add(ops.get(node, index=place)), edges)
    return tuple(known)


def _join(name: str, *several: Edges | None) -> Edges | None:
    """Edges of a variable that two sides set: where one has an edge, both have."""
    known = [edges for edges in several if edges is not None]
    if not known:
        return None
    result = []
    for axis in zip(*known):
        found = list(dict.fromkeys([e for e in axis if e is not None]))
        if len(found) > 1:
            raise ShapeError(
                f"the variable {name!r} holds partial tiles that end in different places",
                hint="give it values first: tile.fill(x, 0)",
            )
        result.append(found[0] if found else None)
    return tuple(result)


def _check_leaving(name: str, edges: Edges | None, known: set[Expr]) -> None:
    """Edges that depend on what is known only inside of a Block cannot leave it."""
    for edge in edges or ():
        if edge is None:
            continue
        inside = [a for size in edge for a in atoms(size) if a.kind == "loop" and a not in known]
        if inside:
            raise ShapeError(
                f"the variable {name!r} carries a partial tile whose end moves",
                hint="give it values first: tile.fill(x, 0)",
            )


def fitted(value: Any, type_: Tile) -> TileValue:
    """A value as a tile of a type; numbers are repeated."""
    if number(value):
        return broadcast(cast(value, type_.dtype), type_.shape)
    return tile_of(value)


@dataclass
class _Loop:
    """One staged loop: traced until the carried variables and their types stand still."""

    tracer: Tracer
    values: Range
    body: Turn
    given: Values
    names: Names
    index: str

    def __post_init__(self) -> None:
        self.carried: dict[int, Leaving] = {}
        for i, value in enumerate(self.given):  # tiles that the body sets: most are carried
            if isinstance(value, TileValue):
                self.carried[i] = (value.node.type, value.edges)  # type: ignore[assignment]

    def run(self) -> Values:
        """Trace, and give the variables after the loop."""
        b = self.tracer.builder
        self.ends = b.index(self.values.lower), b.index(self.values.upper)
        for _ in range(8 + 2 * len(self.given)):
            known, serial = set(self.tracer.builder.atoms), self.tracer.builder.serial
            block, found = self.attempt()
            same = [i for i in self.carried if self.inside[i] is found[i]]
            for i in same:
                del self.carried[i]
            if not self.learn(known, found) and not same:
                return self.finish(block, found)
            self.carried = dict(sorted(self.carried.items()))
            self.tracer.builder.serial = serial
        raise UserError("the types of variables keep changing", got=list(self.names))

    def attempt(self) -> tuple[Block, Values]:
        """The body traced once with the carried variables known so far."""
        b, values = self.tracer.builder, self.values
        own = argument(self.index, Tile((), dtypes.int64))
        arguments = {i: argument(self.names[i], t) for i, (t, _) in self.carried.items()}
        empty = low(combine(values.upper, values.lower, -1)) < 1
        with b.builder.block(self.index, (own, *arguments.values())) as block:
            given = values.bounds
            number_ = own if given is None else bounded(self.tracer, own, *given)
            index = b.atom(self.index, number_, *values.ends())
            if isinstance(index, Expr):
                self.tracer.limits[index] = values.limit()
            if empty:
                self.tracer.empty.append(index if isinstance(index, Expr) else own)
            inside = list(self.given)
            for i, node in arguments.items():
                inside[i] = TileValue(node, self.carried[i][1])
            found = self.body(values.item(index), *inside)
            if empty:
                self.tracer.empty.pop()
            held = {
                i: what
                for i, what in self.carried.items()
                if isinstance(found[i], TileValue) or number(found[i])
            }
            block.results = _fit(b, held, found)
        self.inside = inside
        return block, found

    def learn(self, known: set[Expr], found: Values) -> bool:
        """Note variables that changed, and types that must be wider; whether any did."""
        news = False
        for i, (before, after) in enumerate(zip(self.inside, found)):
            if isinstance(before, Undefined) or not _differs(before, after):
                continue
            if isinstance(after, Undefined):
                raise after.fail()
            news |= self.note(i, *_shared(self.names[i], [after], known))
        return news

    def note(self, i: int, type_: Tile, edges: Edges | None) -> bool:
        name, start = self.names[i], self.given[i]
        if isinstance(start, TileValue):
            if start.node.type != type_:
                raise ShapeError(
                    f"the loop changes the type of {name!r}",
                    expected=f"{start.node.type}, as before the loop",
                    got=type_,
                    hint="cast or broadcast it before the loop",
                )
            edges = _join(name, start.edges, edges)
        elif not number(start):
            _common(name, [start])
        known = self.carried.get(i)
        if known is not None:
            if known[0] != type_ and known[0].shape != ():
                raise ShapeError(
                    f"the loop changes the type of {name!r}", expected=known[0], got=type_
                )
            edges = _join(name, known[1], edges)
            if known == (type_, edges):
                return False
        self.carried[i] = (type_, edges)
        return True

    def finish(self, block: Block, found: Values) -> Values:
        """Add the loop; gives the variables after it."""
        b, values = self.tracer.builder, self.values
        starts = _fit(b, self.carried, self.given)
        node = b.add(
            ops.loop(*self.ends, *starts, blocks=(block,), step=values.step, unroll=values.unroll)
        )
        answer = list(self.given)
        for i, (before, after) in enumerate(zip(self.given, found)):
            if not isinstance(after, Undefined):
                answer[i] = _inside(self.names[i], before, before)
        return _after(b, node, self.carried, answer)
