"""Rows and columns at once: reductions by columns fused into the rows they share elements with.

The backward pass of a norm wants, of the same arrays, sums along rows (for the input's derivative)
and along columns (for the weight's). A program takes every so-many-th row, holds it in registers
as `HeldRows` does, and adds what the columns want to accumulators that stay in registers from row
to row; they go to scratch at the end and a second launch adds them up. The next row is asked for
before this one is reduced. So the arrays are read once, not twice.

Invariant: which rows a program takes, and so the order of every sum, depends on shapes and the
Target alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Expr, Size, coefficient, high, minimum, power_of_two
from ...tile.numeric import COMBINE
from ..access import Place, atom_of, depends, offset_of
from ..family import Bodies, Made
from ..lines import Accumulators
from ..lowering import Lowering
from ..region import REDUCE, Region, bit, leaves_of, own_index, reads_of
from ..space import KINDS, reduce_index
from .reductions import HeldRows, sum_parts
from .space_threads import WARP, ThreadSpace, parts_of
from .tiles import ThreadSheet, ask, have

SHORTEST, LONGEST = 512, 8192  # columns of rows of which a program holds one and accumulates
EACH = 8  # elements of a row that a thread holds: it has accumulators beside them
MANY = 16  # the same where a row has many reductions, whose steps all threads take
BUSY = 8192  # elements of rows that a core is at work on
MOST_ACCUMULATORS = 4  # accumulators that stay in registers
HELD = 64  # instructions of an element that is held beside accumulators (a layer norm's take 50)


@dataclass(eq=False)
class Pair(Region):
    """A Region by rows and one by columns over the same elements, as one Kernel."""

    first: Region = field(kw_only=True)
    second: Region = field(kw_only=True)


def pair_up(lowering: Lowering) -> None:
    """The pass: neighbours that share their elements are joined."""
    regions, values, results = lowering.ordered, lowering.fuser.values, lowering.results
    extents = lowering.fuser.extents
    found: list[Region] = list(regions)
    for second in regions:
        if second.order != "column" or second not in found:
            continue
        for at, region in enumerate(found):
            first = region.first if isinstance(region, Pair) else region
            shared = any(n.size == first.total for n in first.reads & second.reads)
            if not second.needs >> first.number & 1 and not shared:
                continue
            joined = _with(region.second, second) if isinstance(region, Pair) else second
            if not _fits(first, joined, values):
                continue
            if extents.holds_much({*first.values, *joined.values}, high(first.total), HELD):
                continue
            found[at] = _join(first, joined, found, results)
            found.remove(second)
            break
    lowering.ordered = found


def _with(one: Region, other: Region) -> Region:
    """Two Regions by columns as one, the first of which is known to fit."""
    return replace(
        other,
        values=[*one.values, *other.values],
        needs=one.needs | other.needs,
        after=one.after | other.after,
        reads=one.reads | other.reads,
        stored=[*one.stored, *other.stored],
    )


def _join(
    first: Region, second: Region, regions: Sequence[Region], results: Sequence[Node]
) -> Pair:
    """One Kernel; what only the columns read of the rows is not stored."""
    wanted, values = set(results), [*first.values, *second.values]
    for r in regions:
        if not set(values) & set(r.values):
            wanted |= r.reads
    first.stored = [v for v in first.stored if v in wanted]
    together = replace(
        first,
        kind="pair",
        values=values,
        stored=[*first.stored, *second.stored],
        reads=first.reads | second.reads,
    )
    return Pair(**vars(together), first=first, second=second)


def _fits(first: Region, second: Region, values: set[Node]) -> bool:
    """Whether a Region by columns can be computed along with one by rows."""
    if first.kind != "loops" or second.kind != "loops" or first.order != "row":
        return False
    if first.rows is None or first.total != second.total or first.columns != second.rows:
        return False
    if second.needs & ~bit(first.number) & ~first.needs or first.needs >> second.number & 1:
        return False
    columns = first.columns
    if not isinstance(columns, int) or not SHORTEST < columns <= LONGEST or high(first.rows) < 256:
        return False
    reduces = second.reduces
    if not reduces or len(reduces) > MOST_ACCUMULATORS or any(v.op is ops.argmax for v in reduces):
        return False
    return bool(first.reduces) and all(_aligned(v, first, second, values) for v in reduces)


def _aligned(reduce: Node, first: Region, second: Region, values: set[Node]) -> bool:
    """Whether a reduction by columns reads what the rows hold at its own element only."""
    if reduce.size != first.columns:
        return False
    row = atom_of("row", first.row_count)
    lane = atom_of("lane", first.columns)
    inside, others = set(first.values), set(second.values)
    for node, index in reads_of([(reduce.inputs[0], reduce_index(reduce, lane, row))], values):
        if node in others:
            return False  # a second stage
        if node in inside:
            if index is None or own_index(node, row, lane, first) != index:
                return False
        elif index is not None and node.size == first.total:
            if coefficient(offset_of(node, index), lane) != 1:
                return False
    return True


def lower_pair(pair: Pair) -> Bodies:
    """The launch over rows, with the columns along, and the one that adds up the columns."""
    values, rows, columns = pair.known, pair.first.rows, pair.first.columns
    assert rows is not None and isinstance(columns, int)
    pair.first.inputs, pair.first.name, pair.second.name = pair.inputs, pair.name, pair.name
    space = ThreadSpace(pair.first)
    space.settle(columns)
    sums = pair.second.reduces
    lanes = power_of_two(columns)
    each = EACH if len(space.reduces) < 3 else MANY
    warps = space.warps_for(lanes, each)
    resident = max(1, BUSY // (warps * WARP * each))  # programs of a core, within its registers
    programs = min(resident * pair.target.cores, high(rows) // 8)
    sheet = space.sheet(pair.name, parts_of(sums, programs * columns, "result"))
    PairRows(space, sheet, sums).over_rows(rows, columns, lanes, programs)
    first = sheet.end(programs, warps=warps, resident=resident)
    apart = {*pair.first.values, *pair.second.values}  # the columns read these, and their sums
    after = [v for v in pair.second.stored if v.op not in REDUCE]
    own = [n for v in after for n in leaves_of(v, values) if n not in apart]
    own = pair.second.inputs = list(dict.fromkeys(own))
    last = ThreadSpace(pair.second)
    last.settle(columns)
    body, given = sum_parts(last, columns, programs)
    start = len(pair.first.stored)
    renumbered = {"read": lambda n: pair.inputs.index(own[n]), "store": lambda n: start + n}
    return [first, Made(body, [(role, renumbered.get(role, lambda n: n)(n)) for role, n in given])]


class PairRows(HeldRows):
    """Rows that are held, with sums by columns along."""

    def __init__(self, space: ThreadSpace, sheet: ThreadSheet, sums: Sequence[Node]) -> None:
        super().__init__(space, sheet)
        self.sums = sums

    def over_rows(self, rows: Size, columns: int, lanes: int, programs: int) -> None:
        """Every `programs`-th row, the accumulators of the columns carried along."""
        b, e = self.b, self.e
        p = b.program(0, programs)
        with e.vector(0, lanes, columns) as lane:
            for node, index in self.reads_at(p, lane):
                if not any(depends(i, [p]) for i in index if isinstance(p, Expr)):
                    e.value(node, index)  # the same for all rows
            asked = ask(e, self.first_reads(p, lane))
            state, count = Accumulators(b, True).starts(self.sums, (lanes,)), len(self.sums)
            state += asked
            bounds = (0, max(0, high(rows) - 1))
            for row in b.each("row", p, rows, programs, state, bounds=bounds):
                with e.scope():
                    have(e, self.first_reads(row, lane), state[count:])
                    after = minimum(row + programs, rows - 1)
                    ahead = ask(e, self.first_reads(after, lane))
                    self.reduce_stages(row, lane)
                    self.write_all(row, lane)
                    state[:] = [*self.added(row, lane, state[:count]), *ahead]
            for x, place in zip(state, self.sheet.others.values()):
                e.store(place, x, p * columns + lane)

    def first_reads(self, row: Size, lane: Size) -> list[Place]:
        """Full rows that are read at a row, in a fixed order: they are asked for ahead."""
        found = self.reads_at(row, lane)
        return [(n, i) for n, i in found if n.size == self.space.region.total][:3]

    def starts_at(self, row: Size, lane: Size) -> list[Place]:
        """What the columns add is evaluated too."""
        own = [(v.inputs[0], reduce_index(v, lane, row)) for v in self.sums]
        return super().starts_at(row, lane) + own

    def added(self, row: Size, lane: Size, sums: Sequence[Node]) -> list[Node]:
        """The accumulators with one more row."""
        found = []
        for v, total in zip(self.sums, sums):
            x = self.e.value(v.inputs[0], reduce_index(v, lane, row))
            if v.op is ops.sum_ and x.op.name == "multiply" and x.dtype.is_float:
                found.append(self.b.apply("multiply_add", *x.inputs, total))
            else:
                found.append(self.b.apply(COMBINE[KINDS[v.op]], total, x))
        return found
