"""Sorts for blocks of threads: a network of compare-and-exchange steps on (key, place) pairs.

Places make all pairs different, so the network, which is not stable by itself, gives the one
stable order. Lines up to `LOCAL` elements are sorted by one program: pairs in registers, partners
read through shared memory. Longer lines lie in scratch, padded to a power of two: chunks are
sorted first, then every doubling takes one launch for each distance between partners that is
longer than a chunk and one that finishes within chunks. Padding sorts to the end, since its keys
come last and its places are the highest. Invariant: nan is above every number, and equal keys
keep their order, ascending or descending.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import DType, int32, int64
from ...core.target import Target
from ...graph import ops
from ...ir.node import Node
from ...ir.symbol import Size, floor_divide, high, modulo
from ...ir.types import Array, Memory, product
from ...tile import ops as tile_ops
from ...tile.build import Body, BodyBuilder
from ..evaluate import wide
from ..family import Bodies, Family, Offer
from ..fuse import Region
from .axis import Axis
from .space import WARP, Roles
from .tiles import TileEvaluator, Viewed, power_of_two

LOCAL = 4096  # elements that one program sorts
FAR_TILE = 1024  # partners that one program exchanges
Pair = list[Node]  # keys, places


def key_dtype(dtype: DType) -> DType:
    """The dtype keys are compared in."""
    found = wide(dtype)
    return found if found.is_float or found.bits >= 32 else int32


class Network:
    """Compare-and-exchange steps of a tile of pairs in one Body."""

    def __init__(self, b: BodyBuilder, size: int, dtype: DType, descending: bool) -> None:
        self.b, self.size, self.dtype, self.descending = b, size, dtype, descending

    def last(self) -> object:
        """A key that nothing comes after."""
        if self.dtype.is_float:
            return float("-inf") if self.descending else float("nan")
        return self.dtype.lowest if self.descending else self.dtype.highest

    def before(self, one: Pair, other: Pair) -> Node:
        """Where a pair comes before another."""
        b = self.b
        (x, at_x), (y, at_y) = one, other
        if self.descending:
            x, y = y, x
        less, same = b.apply("less", x, y), b.apply("equal", x, y)
        if self.dtype.is_float:
            x_nan, y_nan = b.apply("not_equal", x, x), b.apply("not_equal", y, y)
            less = b.apply("bit_or", less, b.apply("bit_and", y_nan, b.apply("bit_not", x_nan)))
            same = b.apply("bit_or", same, b.apply("bit_and", x_nan, y_nan))
        earlier = b.apply("less", at_x, at_y)
        return b.apply("bit_or", less, b.apply("bit_and", same, earlier))

    def places(self) -> Sequence[Node]:
        """Shared places that partners are read from."""
        return [self.b.allocate((self.size,), d, "shared") for d in (self.dtype, int32)]

    def exchange(
        self, pair: Pair, shared: Sequence[Node], numbers: Node, distance: Node, run: Node
    ) -> Pair:
        """One step: partners at `distance`; runs of `run` elements rise and fall by turns.

        `numbers` are the elements' places in the whole line, of which the tile is a part.
        """
        b = self.b
        own = b.add(tile_ops.iota(size=self.size, dtype=int32))
        zero = b.constant(0, int32)
        for memory, x in zip(shared, pair):
            b.store(memory, x, (0,), (0,))
        at = b.cast(b.apply("bit_xor", own, distance), int64)
        other = [b.gather(memory, at) for memory in shared]
        lower = b.apply("equal", b.apply("bit_and", own, distance), zero)
        rises = b.apply("equal", b.apply("bit_and", numbers, run), zero)
        first = b.apply("equal", lower, rises)  # this place gets the earlier one
        keep = b.apply("equal", self.before(pair, other), first)
        return [b.apply("where", keep, x, y) for x, y in zip(pair, other)]

    def power(self, exponent: Size) -> Node:
        """2 ** exponent."""
        return self.b.apply(
            "shift_left", self.b.constant(1, int32), self.b.cast(self.b.index(exponent), int32)
        )

    def sorted(self, pair: Pair, numbers: Node) -> Pair:
        """The tile sorted; it rises or falls by its place in the line."""
        shared = self.places()

        def stage(s: Size, carried: list[Node]) -> Sequence[Node]:
            return self.merge(carried, shared, numbers, s, self.power(s))

        levels = self.size.bit_length() - 1
        return self.b.loop("s", 1, levels + 1, 1, stage, pair)

    def merge(
        self, pair: Pair, shared: Sequence[Node], numbers: Node, levels: Size, run: Node
    ) -> Pair:
        """Steps of distance 2 ** (levels - 1) down to 1."""

        def step(t: Size, carried: list[Node]) -> Sequence[Node]:
            distance = self.power(levels - 1 - t)
            return self.exchange(carried, shared, numbers, distance, run)

        return self.b.loop("t", 0, levels, 1, step, pair)

    def far_programs(
        self, memories: Sequence[Node], padded: int, lines: Size, level: int, far: int
    ) -> Size:
        """Partners 2 ** far apart, farther than a tile: both are in memory; gives the grid."""
        b, size, distance = self.b, self.size, 1 << far
        half = padded // 2 // size
        p = b.program(0, lines * half)
        line, q = floor_divide(p, half), modulo(p, half) * size
        low = floor_divide(q, distance) * (2 * distance) + modulo(q, distance)
        start = line * padded + low
        ends = [start, start + distance]
        one, other = ([b.load(m, (at,), (size,), (0,)) for m in memories] for at in ends)
        run = modulo(floor_divide(low, 1 << level), 2)  # the same for the whole tile
        rises = b.broadcast(b.apply("equal", b.index(run), b.constant(0, int64)), (size,))
        keep = b.apply("equal", self.before(one, other), rises)
        for m, x, y in zip(memories, one, other):
            b.store(m, b.apply("where", keep, x, y), (ends[0],), (0,))
            b.store(m, b.apply("where", keep, y, x), (ends[1],), (0,))
        return lines * half


class SortLowering:
    """Lowers one sort."""

    def __init__(self, group: Region, reads: Sequence[Node], name: str) -> None:
        self.node, self.reads, self.name = group.values[0], list(reads), name
        self.x = self.node.inputs[0]
        self.stored = [v for v in group.stored if v.op is ops.get]
        self.dtype = key_dtype(self.x.dtype)
        self.descending = self.node.attrs["descending"]
        self.padded = max(2, power_of_two(high(self.x.shape[self.node.attrs["axis"]])))

    def lower(self) -> list[tuple[Body, Roles]]:
        """One launch, or chunks and then doublings."""
        if self.padded <= LOCAL:
            walk = Axis(self.node, self.reads, [v.type for v in self.stored], self.name)  # type: ignore[misc]
            net = self.network(walk.b, self.padded)
            lines = walk.outer * walk.inner
            line = walk.b.program(0, lines)
            pair, numbers = self.take(walk, net, line, 0)
            self.give(walk, line, 0, net.sorted(pair, numbers))
            body = walk.b.finish((lines,), warps=self.warps(self.padded))
            roles: Roles = [("read", i) for i in range(len(self.reads))]
            roles += [("store", i) for i in range(len(self.stored))]
            return [(body, [roles[n] for n in walk.b.numbers])]
        return self.long()

    def network(self, b: BodyBuilder, size: int) -> Network:
        """The steps of this sort."""
        return Network(b, size, self.dtype, self.descending)

    def warps(self, size: int) -> int:
        """Warps of a program that has a tile of pairs."""
        return max(1, min(16, size // (4 * WARP)))

    def take(self, walk: Axis, net: Network, line: Size, start: Size) -> tuple[Pair, Node]:
        """A tile of a line as pairs, padded; and the elements' places in the line."""
        b, e = walk.b, walk.e
        with e.tile(line, 1, 1, start, net.size, walk.size) as (_, lane):
            x = b.broadcast(e.value(walk.x, walk.line_index(line, lane)), (net.size,))
            x = b.cast(x, self.dtype)
            if e.lane_mask is not None:
                x = b.apply("where", e.lane_mask, x, b.constant(net.last(), self.dtype))
            numbers = b.cast(b.index(lane), int32)
        return [x, numbers], numbers

    def give(self, walk: Axis, line: Size, start: Size, pair: Pair) -> None:
        """Write sorted pairs as the op's results."""
        e = walk.e
        with e.tile(line, 1, 1, start, pair[0].shape[0], walk.size) as (_, lane):
            for memory, v in zip(walk.results, self.stored):
                x = pair[0] if v.attrs["index"] == 0 else pair[1]
                e.store(memory, x, walk.offset(walk.line_index(line, lane)))

    # ---- long lines -----------------------------------------------------------------------

    def long(self) -> list[tuple[Body, Roles]]:
        """Chunks sorted, then doublings over scratch."""
        walk = Axis(self.node, self.reads, [], f"{self.name}_size")
        lines = walk.outer * walk.inner
        walk.b.finish(())
        found = [self.chunks(lines)]
        levels, local = self.padded.bit_length() - 1, LOCAL.bit_length() - 1
        for level in range(local + 1, levels + 1):
            for far in range(level - 1, local - 1, -1):
                found.append(self.far(lines, level, far))
            found.append(self.near(lines, level, level == levels))
        return found

    def scratch(self, lines: Size) -> list[Array]:
        """Where pairs lie between launches."""
        size = lines * self.padded
        return [Array((size,), self.dtype), Array((size,), int32)]

    def pairs(self, lines: Size, use: str) -> tuple[list[tuple[str, Memory]], Roles]:
        """Parameters and roles of the scratch."""
        types = self.scratch(lines)
        names = ("keys", "places")
        return (
            [(n, Memory(t.shape, t.dtype, "global", use)) for n, t in zip(names, types)],
            [("scratch", (t, n)) for n, t in zip(names, types)],
        )

    def chunks(self, lines: Size) -> tuple[Body, Roles]:
        """Every chunk of a line, sorted, into scratch."""
        types = self.scratch(lines)
        walk = Axis(self.node, self.reads, types, f"{self.name}_chunks")
        net = self.network(walk.b, LOCAL)
        count = self.padded // LOCAL
        p = walk.b.program(0, lines * count)
        line, start = floor_divide(p, count), modulo(p, count) * LOCAL
        pair, numbers = self.take(walk, net, line, start)
        for memory, x in zip(walk.results, net.sorted(pair, numbers)):
            walk.b.store(memory, x, (p * LOCAL,), (0,))
        body = walk.b.finish((lines * count,), warps=self.warps(LOCAL))
        roles: Roles = [("read", i) for i in range(len(self.reads))] + self.pairs(lines, "")[1]
        return body, [roles[n] for n in walk.b.numbers]

    def far(self, lines: Size, level: int, far: int) -> tuple[Body, Roles]:
        """Partners 2 ** far apart, farther than a chunk: both are in memory."""
        parameters, roles = self.pairs(lines, "state")
        b = BodyBuilder(f"{self.name}_far_{level}_{far}", parameters)
        net = self.network(b, FAR_TILE)
        grid = net.far_programs(b.parameters, self.padded, lines, level, far)
        return b.finish((grid,), warps=4), roles

    def near(self, lines: Size, level: int, last: bool) -> tuple[Body, Roles]:
        """The rest of a doubling within chunks; the last one writes the results."""
        parameters, roles = self.pairs(lines, "value" if last else "state")
        walk = Axis(self.node, [], [], f"{self.name}_sizes")
        walk.b.finish(())
        if last:
            parameters += [
                (f"out{i}", Memory((product(v.shape),), v.dtype, "global", "result"))
                for i, v in enumerate(self.stored)
            ]
            roles = roles + [("store", i) for i in range(len(self.stored))]
        b = Viewed(f"{self.name}_near_{level}", parameters)
        walk.b, walk.e, walk.results = b, TileEvaluator(b, {}), b.parameters[2:]
        net = self.network(b, LOCAL)
        count = self.padded // LOCAL
        p = b.program(0, lines * count)
        line, start = floor_divide(p, count), modulo(p, count) * LOCAL
        pair = [b.load(m, (p * LOCAL,), (LOCAL,), (0,)) for m in b.parameters[:2]]
        numbers = b.apply(
            "add", b.add(tile_ops.iota(size=LOCAL, dtype=int32)), b.cast(b.index(start), int32)
        )
        shared = net.places()
        run = b.constant(1 << level, int32)
        pair = net.merge(pair, shared, numbers, LOCAL.bit_length() - 1, run)
        if last:
            self.give(walk, line, start, pair)
        else:
            for memory, x in zip(b.parameters, pair):
                b.store(memory, x, (p * LOCAL,), (0,))
        body = b.finish((lines * count,), warps=self.warps(LOCAL))
        return body, [roles[n] for n in b.numbers]


def lower_sort(group: Region, reads: Sequence[Node], name: str) -> list[tuple[Body, Roles]]:
    """A stable sort of every line along the axis: values and indices."""
    return SortLowering(group, reads, name).lower()


class ThreadSort(Family):
    """A sort of every line by blocks of threads."""

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """Bodies, in the order they run."""
        return lower_sort(region, region.inputs, name)
