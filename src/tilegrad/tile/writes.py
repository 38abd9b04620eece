"""Which program touches which elements of a result: all are written, none by two programs.

Every access of a result is noted while the kernel is traced, with its index as Exprs. First comes a
proof for all sizes: along some axis, for each axis of the grid, programs keep a distance that what
one of them touches does not fill; and blocks, put side by side by programs and loops, reach from
end to end. Where it does not hold, the accesses of all programs are counted out, in cells of which
every box is made, if they are known without data and are few. Invariant: 'owned' and 'whole' are
proofs; an error is a race or a hole that some element really has, or an access that data decides
and that nobody promised to be unique. The file is long because proof and count answer the same two
questions of the same accesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product as every
from math import gcd, prod
from typing import Any

import numpy as np

from ..ir.symbol import (
    Expr,
    Size,
    atoms,
    ceil_divide,
    coefficient,
    evaluate,
    high,
    low,
    terms_of,
)
from ..ir.types import Shape, row_major, unravel
from . import numeric
from .build import Body
from .check import Finding, Findings, finding
from .inside import extremes, lines_of, value_of
from .trace import Access, Limit, Tracer

FEW_BOXES = 1 << 15  # boxes that are counted out
SMALL = 1 << 22  # elements that are
NOBODY, SEVERAL = -1, -2  # of programs
HINT = (
    "let each program write its own part; where they add to one element: tile.atomic_add; "
    "where data makes them differ: tile.store(..., unique=True)"
)


def judge(t: Tracer, body: Body) -> tuple[Findings, set[str]]:
    """Races between programs and elements that nothing writes; the names of results that may not
    be written whole."""
    live = set(body.block.all_nodes())
    found: Findings = []
    partial: set[str] = set()
    for result in t.results:
        here = [a for node, a in t.accesses.items() if node in live and a.memory is result.node]
        filled = result.name in t.fills
        found += () if filled else _unset(result.name, here)
        found += races(t, result.name, here)
        if filled or result.name in t.loose or any(f.severity == "error" for f in found):
            continue
        state, hole = coverage(t, result.type.shape, here)
        if state == "hole":
            where = [a.node for a in here if a.writes]
            text = f"nothing writes {result.name}"
            if where:
                text = f"no program writes {result.name}{list(hole)}"
            found.append(finding("unwritten", text, (where or [result.node])[0]))
        elif state == "unknown" or not _reads_its_own(here):
            partial.add(result.name)
    return found, partial


def _unset(name: str, accesses: Sequence[Access]) -> Iterator[Finding]:
    """Elements that are added to, or read before anything is stored, have a value before."""
    before = next((a.kind for a in accesses if a.kind != "add"), "")
    unset = ("add",) if before == "store" else ("add", "load")
    first = next((a for a in accesses if a.kind in unset), None)
    if first is not None:
        done = {"add": "added to", "load": "read"}[first.kind]
        text = f"{name} is {done}, and nothing set it before"
        yield finding("uninitialised", text, first.node, hint="tile.result(..., fill=0)")


def _reads_its_own(accesses: Sequence[Access]) -> bool:
    """Whether each box that is read was stored before, as it is, by the same program."""
    return all(
        any(_same_box(s, a) for s in accesses[:n])
        for n, a in enumerate(accesses)
        if a.kind == "load"
    )


def _same_box(store: Access, load: Access) -> bool:
    """Whether a program that comes to a load has stored that very box."""
    return (
        store.kind == "store"
        and not store.cut
        and store.index is not None
        and (store.index, store.tile, store.axes) == (load.index, load.tile, load.axes)
        and store.branches == load.branches[: len(store.branches)]
        and set(store.empty) <= set(load.empty)
    )


# ---- races -------------------------------------------------------------------------------------


def races(t: Tracer, name: str, accesses: Sequence[Access]) -> Findings:
    """Elements that one program writes and another touches."""
    if not any(a.writes for a in accesses) or owned(t, accesses):
        return []
    clash, unsure = _count_races(t, accesses)
    if clash is not None:
        first, second, element = clash
        text = f"two programs touch {name}{list(element)}, and one of them writes it"
        return [finding("race", text, second.node, first.node, HINT)]
    if not unsure or t.placed or all(a.unique or not a.writes for a in accesses):
        return []
    where = next((a for a in unsure if a.writes and not a.unique), unsure[0])
    text = f"it is not known that programs write different elements of {name}"
    return [finding("race", text, where.node, None, HINT)]


def owned(t: Tracer, accesses: Sequence[Access]) -> bool:
    """Whether programs are proved to touch elements of their own, whatever the sizes are."""
    programs = [p for p in t.programs if isinstance(p, Expr)]
    if not programs or all(a.kind == "add" for a in accesses):
        return True
    if any(a.index is None for a in accesses):
        return False
    return all(_by_itself(t, p, accesses) for p in programs)


def _by_itself(t: Tracer, program: Expr, accesses: Sequence[Access]) -> bool:
    """Whether programs that differ in one number touch different elements: along an axis, or
    because one of them comes here alone, or by the parts that the number is taken apart into."""
    axes = range(len(accesses[0].index or ()))
    if any(_apart(t, program, accesses, axis) for axis in axes):
        return True
    alone = {_only(t, a, program) for a in accesses}
    if len(alone) == 1 and None not in alone:
        return True
    parts = dict.fromkeys(
        a
        for access in accesses
        for at in access.index or ()
        for a in _parts(at)
        if program in atoms(a)
    )
    whole_: Size = 0
    for part in parts:
        if any(_apart(t, part, accesses, axis) for axis in axes):
            whole_ = whole_ + part * _weight(part)
    return whole_ is program


def _only(t: Tracer, access: Access, program: Expr) -> Size | None:
    """The one program that comes to an access, by a branch on its number."""
    for test, side in access.branches:
        if not side or test.op.name != "equal":
            continue
        sides = [lines_of(t, i) for i in test.inputs]
        for one, other in (sides, sides[::-1]):
            if one is not None and other is not None and one.base is program:
                if all(a.kind == "symbol" for a in atoms(other.base)):
                    return other.base
    return None


def _parts(value: Size) -> list[Expr]:
    """Quotients and remainders that an index is made of."""
    terms, _ = terms_of(value)
    return [a for product_, _ in terms for a in product_ if a.kind in ("div", "mod")]


def _weight(part: Expr) -> Size:
    """What a quotient or remainder counts for in the number it was taken from."""
    inner = part.args[0] if part.kind == "mod" else part
    return inner.args[1] if isinstance(inner, Expr) and inner.kind == "div" else 1


def _apart(t: Tracer, program: Expr, accesses: Sequence[Access], axis: int) -> bool:
    """Whether what programs with different numbers touch is disjoint along an axis."""
    steps: set[int] = set()
    first: list[Size] = []
    last: list[Size] = []
    for access in accesses:
        assert access.index is not None
        at = access.index[axis]
        own = next((a for a in atoms(at) if interleaved_start(t, a) is program), program)
        step = _factor(at, own)
        steps.add(step)
        rest = at - own * step
        if step == 0 or any(p in atoms(rest) for p in (own, *t.programs)):
            return False
        least, most, _ = extremes(t, rest)
        if any(a.kind != "symbol" for end in (least, most) for a in atoms(end)):
            return False  # of a loaded number
        first.append(least)
        last.append(most + access.length(axis))
    if len(steps) > 1:
        return False
    reach = abs(steps.pop())
    return all(high(b - a) <= reach for a in first for b in last)


def _factor(value: Size, part: Expr) -> int:
    """The factor of a number, or a quotient or remainder of one, in an index."""
    terms, _ = terms_of(value)
    return next((f for product_, f in terms if product_ == (part,)), 0)


def interleaved_start(t: Tracer, atom: Expr) -> Expr | None:
    """The program's number that a loop starts at, if programs take turns in it: each has numbers
    of its own, and together they have all."""
    limit = t.limits.get(atom)
    if limit is None or limit.lower not in t.programs or not isinstance(limit.lower, Expr):
        return None
    return limit.lower if t.limits[limit.lower].upper + 1 == limit.step else None


Found = tuple[Access, Access, Shape]


def _count_races(t: Tracer, accesses: Sequence[Access]) -> tuple[Found | None, list[Access]]:
    """Two accesses of one element by different programs; else those that are not known."""
    cells = Cells(t, accesses)
    if not cells.few:
        return None, [a for a in accesses if a.writes]
    boxes = [(a, *cells.of(a)) for a in accesses]
    exact_ = [(n, a, found) for n, (a, found, exact) in enumerate(boxes) if exact]
    writer = np.full(cells.count, NOBODY)  # the program that changes a cell
    by = np.full(cells.count, NOBODY)  # and which access
    against, who = writer, by
    for kind in ("store", "add", "load"):
        if kind != "store":  # who adds is at odds with who stores, who loads with both
            against, who = writer.copy(), by.copy()
        for number_, access, found in exact_:
            if access.kind != kind:
                continue
            for program, touched in found:
                other = touched[(against[touched] != NOBODY) & (against[touched] != program)]
                if other.size:
                    first = accesses[who[other[0]]]
                    if kind != "store":
                        return (access, first, cells.element(int(other[0]))), []
                    if not (access.unique or first.unique):
                        return (first, access, cells.element(int(other[0]))), []
                if kind != "load":
                    alone = (writer[touched] == NOBODY) | (writer[touched] == program)
                    writer[touched], by[touched] = np.where(alone, program, SEVERAL), number_
    return None, [a for a, _, exact in boxes if not exact]


TouchedCells = list[tuple[int, Any]]


class Cells:
    """A result in cells: boxes without masks are made of whole ones, else a cell is an element."""

    def __init__(self, t: Tracer, accesses: Sequence[Access]) -> None:
        self.t, self.shape = t, accesses[0].memory.shape
        self.starts = {a: self._starts(a) for a in accesses}
        coarse = all(a.index is not None and not a.cut for a in accesses)
        self.unit = [self._unit(axis) if coarse else 1 for axis in range(len(self.shape))]
        self.few = all(isinstance(s, int) for s in self.shape)
        if self.few:
            self.sizes = tuple([-(-s // u) for s, u in zip(self.shape, self.unit)])
            self.count = prod(self.sizes)
            self.few = self.count <= SMALL

    def _unit(self, axis: int) -> int:
        """What divides every start and length along an axis."""
        found = [(a, at) for a, boxes in self.starts.items() for *_, at in boxes or ()]
        return gcd(*[n for a, at in found for n in (a.length(axis), at[axis])]) or 1

    def _starts(self, access: Access) -> list[tuple[int, Shape, Shape]] | None:
        """(program's number, program, index) of every box of an access; None where data decides, or
        too many."""
        t, grid = self.t, self.t.grid or (1,)
        own = [a for at in access.index or () for a in atoms(at) if a not in t.programs]
        loops = list(dict.fromkeys(own))
        trips = [_trips(t, atom) for atom in loops]
        if not all(isinstance(s, int) for s in grid) or None in trips:
            return None
        if prod(grid) * prod([len(s) for s in trips if s is not None]) > FEW_BOXES:
            return None
        found = []
        for number, program in enumerate(every(*[range(s) for s in grid])):
            env = {p.name: n for p, n in zip(t.programs, program) if isinstance(p, Expr)}
            for values in every(*[s for s in trips if s is not None]):
                env.update(zip([loop.name for loop in loops], values))
                box = tuple([evaluate(at, env) for at in access.index or ()])
                found.append((number, program, box))
        return found

    def of(self, access: Access) -> tuple[TouchedCells, bool]:
        """(program's number, cells) of the boxes of an access, and whether that is exact."""
        starts = self.starts[access]
        cells = prod([-(-n // u) for n, u in self._lengths(access)])
        if starts is None or len(starts) * cells > SMALL:
            return [], False
        found: TouchedCells = []
        for number, program, at in starts:
            taken = _taken(access, program)
            if taken is False:
                continue
            touched = self._touched(access, program, at) if taken else None
            if touched is None:
                return [], False
            found.append((number, touched))
        return found, True

    def _lengths(self, access: Access) -> list[tuple[int, int]]:
        if access.index is None:
            return [(n, 1) for n in access.tile]
        return [(access.length(axis), self.unit[axis]) for axis in access.axes]

    def _touched(self, access: Access, program: Shape, at: Shape) -> Any:
        """The cells that one box touches; None where data or a loop decides."""
        mask = _mask(access, program)
        if mask is None:
            return None
        if access.offsets is not None:
            value = value_of(access.offsets, program)
            if value is None:
                return None
            value = np.broadcast_to(value, access.tile)
            return value[mask & (value >= 0) & (value < self.count)]
        box = tuple([n // u for n, u in self._lengths(access)])
        start = tuple([i // u for i, u in zip(at, self.unit)])
        place, live = numeric.box(start, box, access.axes, self.sizes, row_major(self.sizes))
        return place[live & mask]

    def element(self, cell: int) -> Shape:
        """The first element of a cell."""
        return tuple([i * u for i, u in zip(unravel(cell, self.sizes), self.unit)])


def _trips(t: Tracer, atom: Expr) -> Sequence[int] | None:
    limit = t.limits.get(atom)
    if limit is None or not isinstance(limit.lower, int) or not isinstance(limit.upper, int):
        return None
    return range(limit.lower, limit.upper + 1, limit.step)


def _taken(access: Access, program: Shape) -> bool | None:
    """Whether a program comes to an access; None where data decides."""
    unsure = bool(access.empty)
    for test, side in access.branches:
        value = value_of(test, program)
        if value is None:
            unsure = True
        elif bool(value) is not side:
            return False
    return None if unsure else True


def _mask(access: Access, program: Shape) -> Any:
    """The mask of an access as a program has it; None where data or a loop decides."""
    if not access.cut or access.mask is None:
        return True
    value = value_of(access.mask, program)
    return None if value is None else np.broadcast_to(value, access.tile)


# ---- coverage ----------------------------------------------------------------------------------


def coverage(t: Tracer, shape: Sequence[Size], accesses: Sequence[Access]) -> tuple[str, Shape]:
    """'whole' if all elements are written, 'hole' (and where) if one is not, or 'unknown'."""
    stores = [a for a in accesses if a.kind == "store"]
    if any(s == 0 for s in shape) or any(whole(t, shape, a) for a in stores):
        return "whole", ()
    if not stores:
        return "hole", ()
    cells = Cells(t, stores)
    if not cells.few:
        return "unknown", ()
    written, certain = np.zeros(cells.count, np.bool_), True
    for access in stores:
        found, exact = cells.of(access)
        certain &= exact
        for _, touched in found:
            written[touched] = True
    if written.all():
        return "whole", ()
    if not certain:
        return "unknown", ()
    return "hole", cells.element(int(written.argmin()))


def whole(t: Tracer, shape: Sequence[Size], access: Access) -> bool:
    """Whether one store, by all programs and trips of its loops, is proved to reach all."""
    if access.index is None or access.cut or access.branches:
        return False
    used: list[Expr] = []
    for axis, (at, size) in enumerate(zip(access.index, shape)):
        mine = [a for a in atoms(at) if a.kind != "symbol"]
        used += [p for a in mine if (p := interleaved_start(t, a)) is not None]
        if set(mine) & set(used) or not _reaches(t, at, mine, access.length(axis), size):
            return False
        used += mine
    return all(atom in used for atom in access.empty)


def _reaches(t: Tracer, at: Size, mine: Sequence[Expr], length: int, size: Size) -> bool:
    """Whether blocks along an axis, side by side, reach from 0 to the size."""
    block: Size = length
    start = at
    parts = []
    for atom in mine:
        step, limit = coefficient(at, atom), t.limits.get(atom)
        if limit is not None and interleaved_start(t, atom) is not None:
            limit = Limit(0, limit.upper, True)
        if limit is None or not isinstance(step, int) or step < 1:
            return False
        start = start - (atom - limit.lower) * step
        parts.append((step * limit.step, step, limit))
    for apart, step, limit in sorted(parts, key=lambda part: part[0]):
        if low(block) < apart:
            return False  # a gap
        count = limit.upper - limit.lower + 1  # of trips, if the step is 1
        if limit.reached:
            if limit.step == 1 and count is ceil_divide(size, step) and low(start) == 0:
                return high(start) == 0 and len(parts) == 1
            block = (limit.upper - limit.lower) * step + block
        elif step == 1:
            block = count
        else:
            return False
    return high(start) <= 0 and low(start + block - size) >= 0
