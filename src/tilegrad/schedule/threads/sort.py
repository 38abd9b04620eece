"""Ops that go along an axis in order, for blocks of threads: sorts and running sums.

A sort is a network of compare-and-exchange steps on (key, place) pairs. Places make all pairs
different, so the network, which is not stable by itself, gives the one stable order. Lines up to
`LOCAL` elements are sorted by one program: pairs in registers, partners read through shared memory.
Longer lines lie in scratch, padded to a power of two: chunks are sorted first, then every doubling
takes one launch for each distance between partners that is longer than a chunk and one that
finishes within chunks. Padding sorts to the end, since its keys come last and its places are the
highest.

Of a running sum the shape is seen as (outer, axis, inner). Where inner is long a tile is (axis,
inner), else (lines, axis); the tile is scanned and what came before it is carried along.

Invariant: nan is above every number, and equal keys keep their order, ascending or descending;
results depend on shapes and the Target alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ... import tile
from ...core.dtype import DType, int32, int64
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, power_of_two
from ...ir.types import Array
from ...tile import ops as tile_ops
from ...tile.build import BodyBuilder
from ...tile.numeric import COMBINE, identity
from ...tile.value import TileValue
from .. import sheet as parameters
from ..access import offset_of
from ..evaluate import running
from ..family import Bodies, Made
from ..region import Region
from ..scan_sort import Axis
from ..sheet import Sheet
from .space_threads import warps_for
from .tiles import ThreadSheet

LOCAL = 4096  # elements that one program sorts
FAR_TILE = 1024  # partners that one program exchanges
Pair = list[Node]  # keys, places


def key_dtype(dtype: DType) -> DType:
    """The dtype keys are compared in."""
    found = dtype.wide
    return found if found.is_float or found.bits >= 32 else int32


class Network:
    """Compare-and-exchange steps of a tile of pairs in one Body."""

    def __init__(self, b: BodyBuilder, size: int, dtype: DType, descending: bool = False) -> None:
        self.b, self.size, self.dtype, self.descending = b, size, dtype, descending

    def last(self) -> object:
        """A key that nothing comes after."""
        if self.dtype.is_float:
            return float("-inf") if self.descending else float("nan")
        return self.dtype.lowest if self.descending else self.dtype.highest

    def before(self, one: Pair, other: Pair) -> Node:
        """Where a pair comes before another."""
        with tile.into(self.b):
            (x, at_x), (y, at_y) = map(TileValue, one), map(TileValue, other)
            if self.descending:
                x, y = y, x
            less, same = x < y, x == y
            if self.dtype.is_float:
                x_nan, y_nan = x != x, y != y
                less, same = less | y_nan & ~x_nan, same | x_nan & y_nan
            return (less | same & (at_x < at_y)).node

    def allocate_shared(self) -> Sequence[Node]:
        """Shared places that partners are read from."""
        return [self.b.allocate((self.size,), d, "shared") for d in (self.dtype, int32)]

    def exchange(
        self, pair: Pair, shared: Sequence[Node], numbers: Node, distance: Node, run: Node
    ) -> Pair:
        """One step: partners at `distance`; runs of `run` elements rise and fall by turns.

        `numbers` are the elements' places in the whole line, of which the tile is a part.
        """
        b = self.b
        own = b.iota(self.size, int32)
        for memory, x in zip(shared, pair):
            b.store(memory, x, (0,))
        at = b.cast(b.apply("bit_xor", own, distance), int64)
        other = [b.gather(memory, at) for memory in shared]
        lower = b.apply("equal", b.apply("bit_and", own, distance), 0)
        rises = b.apply("equal", b.apply("bit_and", numbers, run), 0)
        first = b.apply("equal", lower, rises)  # this place gets the earlier one
        keep = b.apply("equal", self.before(pair, other), first)
        return [b.where(keep, x, y) for x, y in zip(pair, other)]

    def numbers(self, start: Size) -> Node:
        """The places of a tile's elements in a line, from a start on."""
        own = self.b.iota(self.size, int32)
        return self.b.apply("add", own, self.b.cast(self.b.index(start), int32))

    def power(self, exponent: Size) -> Node:
        """2 ** exponent."""
        return self.b.apply("shift_left", 1, self.b.cast(self.b.index(exponent), int32))

    def sorted(self, pair: Pair, numbers: Node) -> Pair:
        """The tile sorted; it rises or falls by its place in the line."""
        shared, found = self.allocate_shared(), list(pair)
        for s in self.b.each("s", 1, self.size.bit_length(), 1, found):
            found[:] = self.merge(found, shared, numbers, s, self.power(s))
        return found

    def merge(
        self, pair: Pair, shared: Sequence[Node], numbers: Node, levels: Size, run: Node
    ) -> Pair:
        """Steps of distance 2 ** (levels - 1) down to 1."""
        found = list(pair)
        for t in self.b.each("t", 0, levels, 1, found):
            found[:] = self.exchange(found, shared, numbers, self.power(levels - 1 - t), run)
        return found


def warps_of(size: int) -> int:
    """Warps of a program that has a tile of pairs."""
    return warps_for(size, 4, 16)


class ScratchSort:
    """Lines of pairs in scratch, sorted by several launches."""

    stored: Sequence[Node] = ()  # what the last launch writes; else pairs stay in scratch
    descending = False
    # A tile of a line from a place on as pairs, padded, and the elements' places in the line; and
    # what writes sorted pairs as results.
    take: Callable[[ThreadSheet, Network, Size, Size], tuple[Pair, Node]]
    give: Callable[[ThreadSheet, Size, Size, Pair], None]

    def __init__(
        self, name: str, reads: list[Node], lines: Size, padded: int, dtype: DType
    ) -> None:
        self.name, self.reads, self.lines = name, reads, lines
        self.padded, self.dtype = padded, dtype
        size = lines * padded
        self.scratch = [("keys", Array((size,), dtype)), ("numbers", Array((size,), int32))]

    def launches(self) -> Bodies:
        """Chunks sorted into scratch, then doublings over it."""
        found = [self.chunks()]
        levels, local = self.padded.bit_length() - 1, LOCAL.bit_length() - 1
        for log_run in range(local + 1, levels + 1):
            for far in range(log_run - 1, local - 1, -1):
                found.append(self.far(log_run, far))
            found.append(self.near(log_run, log_run == levels and bool(self.stored)))
        return found

    def network(self, b: BodyBuilder, size: int) -> Network:
        """The steps of this sort."""
        return Network(b, size, self.dtype, self.descending)

    def chunk(self, sheet: ThreadSheet) -> tuple[Size, Size, Size, Size]:
        """A program for each chunk of each line: (grid, place, line, start in it)."""
        grid, (line, chunk) = sheet.programs(self.lines, self.padded // LOCAL)
        return grid, line * self.padded + chunk * LOCAL, line, chunk * LOCAL

    def chunks(self) -> Made:
        """Every chunk of a line, sorted, into scratch."""
        pairs = parameters.scratch(self.scratch, "result")
        sheet = ThreadSheet(f"{self.name}_chunks", [*parameters.reads(self.reads), *pairs])
        net = self.network(sheet.b, LOCAL)
        grid, place, line, start = self.chunk(sheet)
        pair, numbers = self.take(sheet, net, line, start)
        for memory, x in zip(sheet.others.values(), net.sorted(pair, numbers)):
            sheet.b.store(memory, x, (place,))
        return sheet.end(grid, warps=warps_of(LOCAL))

    def far(self, log_run: int, far: int) -> Made:
        """Partners 2 ** far apart, farther than a chunk: both are in memory."""
        pairs = parameters.scratch(self.scratch, "state")
        sheet, distance = Sheet(f"{self.name}_far_{log_run}_{far}", pairs), 1 << far
        b, memories = sheet.b, sheet.b.parameters
        grid, (line, part) = sheet.programs(self.lines, self.padded // 2 // FAR_TILE)
        q = part * FAR_TILE
        low = q // distance * (2 * distance) + q % distance
        start = line * self.padded + low
        ends = [start, start + distance]
        one, other = ([b.load(m, (at,), (FAR_TILE,)) for m in memories] for at in ends)
        rises = b.apply("equal", b.index(low // (1 << log_run) % 2), 0)  # for the whole tile
        keep = b.apply("equal", self.network(b, FAR_TILE).before(one, other), rises)
        for m, x, y in zip(memories, one, other):
            b.store(m, b.where(keep, x, y), (ends[0],))
            b.store(m, b.where(keep, y, x), (ends[1],))
        return sheet.end(grid, warps=4)

    def near(self, log_run: int, last: bool) -> Made:
        """The rest of a doubling within chunks; the last one writes the results."""
        pairs = parameters.scratch(self.scratch, "value" if last else "state")
        stored = parameters.results(self.stored if last else [])
        sheet = ThreadSheet(f"{self.name}_near_{log_run}", [*pairs, *stored])
        b, memories = sheet.b, sheet.others.values()
        net = self.network(b, LOCAL)
        grid, place, line, start = self.chunk(sheet)
        pair = [b.load(m, (place,), (LOCAL,)) for m in memories]
        numbers = net.numbers(start)
        shared = net.allocate_shared()
        run = b.constant(1 << log_run, int32)
        pair = net.merge(pair, shared, numbers, LOCAL.bit_length() - 1, run)
        if last:
            self.give(sheet, line, start, pair)
        else:
            for memory, x in zip(memories, pair):
                b.store(memory, x, (place,))
        return sheet.end(grid, warps=warps_of(LOCAL))


class SortLowering(ScratchSort):
    """Lowers one sort."""

    def __init__(self, region: Region) -> None:
        self.axis, x = Axis(region.anchor), region.anchor.inputs[0]
        padded = max(2, power_of_two(high(self.axis.size)))
        super().__init__(region.name, region.inputs, self.axis.lines, padded, key_dtype(x.dtype))
        self.stored = region.arrays
        self.descending = region.anchor.attrs["descending"]

    def lower(self) -> Bodies:
        """Every line by one program, or by several launches."""
        if self.padded > LOCAL:
            return self.launches()
        stored = parameters.results(self.stored)
        sheet = ThreadSheet(self.name, [*parameters.reads(self.reads), *stored])
        net, line = self.network(sheet.b, self.padded), sheet.b.program(0, self.lines)
        pair, numbers = self.take(sheet, net, line, 0)
        self.give(sheet, line, 0, net.sorted(pair, numbers))
        return [sheet.end(self.lines, warps=warps_of(self.padded))]

    def take(self, sheet: ThreadSheet, net: Network, line: Size, start: Size) -> tuple[Pair, Node]:
        """See `ScratchSort`."""
        b, e, axis = sheet.b, sheet.e, self.axis
        with e.vector(start, net.size, axis.size) as lane:
            x = b.broadcast(e.value(axis.x, axis.line_index(line, lane)), (net.size,))
            x = b.where(e.lane_mask, b.cast(x, self.dtype), net.last())
            numbers = b.cast(b.index(lane), int32)
        return [x, numbers], numbers

    def give(self, sheet: ThreadSheet, line: Size, start: Size, pair: Pair) -> None:
        """See `ScratchSort`."""
        e, axis = sheet.e, self.axis
        with e.vector(start, pair[0].shape[0], axis.size) as lane:
            for v, memory in sheet.outputs.items():
                place = offset_of(axis.x, axis.line_index(line, lane))
                e.store(memory, pair[v.attrs["index"]], place)


def lower_sort(region: Region) -> Bodies:
    """A sort of every line by blocks of threads."""
    return SortLowering(region).lower()


# ---- running sums --------------------------------------------------------------------------------

ELEMENTS = 2048  # of a tile
LONG = 16  # inner sizes from which tiles lie along them


def lower_scan(region: Region) -> Bodies:
    """A running sum, product, maximum or minimum."""
    node, axis = region.anchor, Axis(region.anchor)
    kind, dtype = node.attrs["kind"], node.dtype.wide
    kept = running(node.dtype, kind)
    sheet = ThreadSheet.of(region)
    b, e, inner, size = sheet.b, sheet.e, high(axis.inner), high(axis.size)
    across = inner >= LONG  # tiles of (axis, inner), else of (lines, axis)
    if across:
        lanes = min(32, power_of_two(inner))
        rows = max(2, min(ELEMENTS // lanes, power_of_two(size)))
        sizes: tuple[Size, ...] = (axis.outer, ceil_divide(axis.inner, lanes))
    else:
        lanes = max(2, min(ELEMENTS, power_of_two(size)))
        many = min(ELEMENTS // lanes, power_of_two(high(axis.lines)))
        rows = 1 if lanes > 256 else many
        sizes = (ceil_divide(axis.lines, rows),)
    grid, (first, *block) = sheet.programs(*sizes)
    shape = (lanes,) if across else (rows, 1) if rows > 1 else ()
    before = [b.constant(identity(kind, kept), kept, shape)]
    for at in b.each("k", 0, axis.size, rows if across else lanes, before):
        along = (at, rows, axis.size, block[0] * lanes, lanes, axis.inner) if across else ()
        own = along or (first * rows, rows, axis.lines, at, lanes, axis.size)
        with e.tile(*own) as (row, lane):
            index = axis.index(first, row, lane) if across else axis.line_index(row, lane)
            x = b.broadcast(b.cast(e.value(axis.x, index), dtype), e.full)
            x = b.where(e.inside(), x, identity(kind, dtype))  # what is outside changes nothing
            last = 0 if across else len(e.full) - 1
            run = b.add(tile_ops.cumulative(x, axis=last, kind=kind))
            run = b.apply(COMBINE[kind], b.cast(before[0], dtype), run)
            e.store(sheet.outputs[node], run, offset_of(axis.x, index))
            total = b.reduce(x, last, kind)
            total = e.column(total) if last and total.shape else total
        before[0] = b.apply(COMBINE[kind], before[0], b.cast(total, kept))
    return [sheet.end(grid, warps=warps_for(rows * lanes))]
