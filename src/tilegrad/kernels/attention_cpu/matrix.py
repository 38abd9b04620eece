"""Attention on CPUs with a matrix unit of 16 x 16 tiles (AMX), forward, for bfloat16.

As in `forward`, with queries along the columns of tiles: scores^T = keys @ queries^T and
result^T += values^T @ probabilities^T. Queries are packed in pairs of d once for a program; keys
are copied tile by tile; values are turned, in pairs of keys; probabilities are rounded and stored
in pairs of keys as they are made. Invariant: keys past the last one of a block have the
probability 0, and d past its end is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...core.config import invariant
from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum, minimum
from ...tile import ops
from ..attention.shape import AttentionShape
from .forward import Forward, fitting
from .tiles import CpuPlan, Source

TILE = 16
PAIR = 2 * TILE
SPACE = 32  # elements after each row of probabilities

Operand = Callable[[Size, Size], Node]  # a tile of an operand: (row or column, step of the depth)


def choose(x: AttentionShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape, or None where no matrix unit of the Target fits."""
    units = [
        u
        for u in target.matrix_units(x.dtype, x.dtype)
        if (u.m, u.n, u.k) == (TILE, TILE, PAIR) and x.dtype is bfloat16
    ]
    if not units or target.lanes(x.sum_dtype) != TILE:
        return None
    queries = fitting(x, target, 512, PAIR)
    block = 512 if 64 < max(x.width, x.value_width) <= 128 else 256
    keys = min(block, PAIR * max(1, -(-high(x.keys) // PAIR)))
    part = 64 if queries % 64 == 0 else PAIR
    return CpuPlan(queries, keys, TILE, 2, TILE, units[0].name, part, invariant())


def whole(count: Size) -> Size:
    """A number of keys, up to a whole number of pairs of tiles."""
    return ceil_divide(count, PAIR) * PAIR


class Unit:
    """Tiles of a matrix unit: how operands are packed, read and multiplied."""

    def __init__(self, source: Source, plan: CpuPlan) -> None:
        self.source, self.plan = source, plan
        self.b, self.sum = source.v.b, source.v.sum

    def tiles(self, *lead: int) -> Node:
        """Scratch of tiles."""
        return self.b.allocate((*lead, TILE, PAIR), bfloat16, "l2")

    def tile(self, memory: Node, *index: Size) -> Node:
        """A tile in the unit's registers."""
        shape = (TILE, PAIR if memory.dtype is bfloat16 else TILE)
        return self.b.do(ops.matrix_load, memory, *index, shape=shape, unit=self.plan.unit)

    def packed_in(self, memory: Node) -> Operand:
        """An operand that lies tile by tile."""
        return lambda row, step: self.tile(memory, row, step, 0, 0)

    def pairs_in(self, memory: Node) -> Operand:
        """A right side that lies in rows of pairs."""
        return lambda column, step: self.tile(memory, step * TILE, column * PAIR)

    def rows_in(self, memory: Node) -> Operand:
        """A left side that lies row by row."""
        return lambda row, step: self.tile(memory, row * TILE, step * PAIR)

    def steps_in(self, memory: Node) -> Operand:
        """A right side that lies tile by tile, step by step."""
        return lambda column, step: self.tile(memory, step, column, 0, 0)

    def turn_pairs(self, x: Node) -> Node:
        """(16, 16 pairs) with the pairs of a column in a row."""
        b = self.b
        pairs = b.add(ops.reshape(x, shape=(TILE, TILE, 2)))
        turned = b.add(ops.transpose(pairs, order=(1, 0, 2)))
        return b.add(ops.reshape(turned, shape=(TILE, PAIR)))

    def beside(self, first: Node, second: Node) -> Node:
        """Two vectors, element by element beside each other."""
        b = self.b
        both = b.add(ops.transpose(b.add(ops.stack_rows(first, second)), order=(1, 0)))
        return b.add(ops.reshape(both, shape=(2 * first.shape[0],)))

    # ---- packing: tokens of a head from the first on; past the last it is repeated -----------

    def pack_columns(
        self, name: str, head: Size, first: Size, last: Size, width: int, place: Node
    ) -> None:
        """Pairs of d side by side, queries across."""
        b = self.b
        for i in b.each("turn", 0, self.plan.queries // TILE):
            for s in b.each("step", 0, -(-width // PAIR)):
                tokens = [minimum(first + i * TILE + r, last) for r in range(TILE)]
                lines = [self.source.line(name, head, t, s * PAIR, PAIR, width) for t in tokens]
                value = self.turn_pairs(b.add(ops.stack_rows(*lines)))
                b.store(place, value, (i, s, 0, 0), (2, 3))

    def pack_rows(
        self,
        name: str,
        head: Size,
        first: Size,
        last: Size,
        count: Size,
        width: int,
        place: Node,
    ) -> None:
        """So many keys or values, tile by tile."""
        b = self.b
        for r in b.each("row", 0, whole(count), bounds=(0, self.plan.keys - 1)):
            token = minimum(first + r, last)
            for s in range(-(-width // PAIR)):
                part = self.source.line(name, head, token, s * PAIR, PAIR, width)
                b.store(place, part, (r // TILE, s, r % TILE, 0), (3,))

    def pack_turned(
        self,
        name: str,
        head: Size,
        first: Size,
        last: Size,
        count: Size,
        width: int,
        place: Node,
    ) -> None:
        """So many keys or values turned, in pairs of keys."""
        b, most = self.b, self.plan.keys // PAIR - 1
        for g in b.each("group", 0, ceil_divide(count, PAIR), bounds=(0, most)):
            for t in b.each("chunk", 0, -(-width // TILE)):
                tokens = [minimum(first + g * PAIR + r, last) for r in range(PAIR)]
                lines = [self.source.line(name, head, i, t * TILE, TILE, width) for i in tokens]
                rows = [self.beside(*lines[r : r + 2]) for r in range(0, PAIR, 2)]
                value = self.turn_pairs(b.add(ops.stack_rows(*rows)))
                b.store(place, value, (t, g, 0, 0), (2, 3))

    def pack_pairs(
        self, name: str, head: Size, first: Size, last: Size, width: int, place: Node
    ) -> None:
        """Queries in pairs side by side, d across."""
        b = self.b
        for i in b.each("pair", 0, self.plan.queries // 2):
            tokens = [minimum(first + i * 2 + n, last) for n in range(2)]
            for t in range(-(-width // TILE)):
                lines = [self.source.line(name, head, at, t * TILE, TILE, width) for at in tokens]
                b.store(place, self.beside(*lines), (i // TILE, t, i % TILE, 0), (3,))

    # ---- products -------------------------------------------------------------------------

    def product(
        self,
        down: Size,
        across: int,
        depth: Size,
        left: Operand,
        right: Operand,
        place: Node,
        adds: bool,
        shift: Size = 0,
    ) -> None:
        """place (+)= product, in squares of two by two tiles; `depth` in steps of 32.

        The columns of `place` are shifted by as many tiles as said.
        """
        b, unit = self.b, self.plan.unit
        zero = ops.matrix_zero(shape=(TILE, TILE), dtype=self.sum, unit=unit)

        def row(rows: list[Size]) -> None:
            for c in b.each("across", 0, across, 2, bounds=(0, across - 2)):
                spots = [(r * TILE, (c + shift + n) * TILE) for r in rows for n in range(2)]
                sums = [self.tile(place, *spot) if adds else b.add(zero) for spot in spots]
                bounds = (0, max(0, high(depth) - 1))
                for s in b.each("depth", 0, depth, 1, sums, bounds=bounds):
                    above = [left(r, s) for r in rows]
                    beside = [right(c + n, s) for n in range(2)]
                    sums[:] = [
                        b.add(ops.matrix_dot(total, above[n // 2], beside[n % 2], unit=unit))
                        for n, total in enumerate(sums)
                    ]
                for total, spot in zip(sums, spots):
                    b.add(ops.matrix_store(place, total, *map(b.index, spot), unit=unit))

        even = down // 2 * 2 if isinstance(down, int) else down
        for r in b.each("down", 0, even, 2, bounds=(0, max(0, high(even) - 2))):
            row([r, r + 1])
        if even is not down:
            row([even])


class MatrixForward(Forward):
    """Builds the forward Body on a matrix unit."""

    def places(self) -> None:
        """Scratch, in the layouts that the unit reads."""
        x, plan = self.x, self.plan
        self.unit = unit = Unit(self.source, plan)
        self.deep = -(-x.width // PAIR)  # steps of a product over d
        self.wide = -(-x.value_width // TILE)  # tiles of the result
        self.packed = unit.tiles(plan.queries // TILE, self.deep)
        self.key_tiles = unit.tiles(plan.keys // TILE, self.deep)
        self.value_tiles = unit.tiles(self.wide, plan.keys // PAIR)
        self.pairs = self.scratch(plan.keys // 2, 2 * plan.strip + SPACE, dtype=bfloat16)
        self.scores = self.scratch(plan.keys, plan.strip + TILE)
        self.result = self.scratch(self.wide * TILE, plan.queries + TILE)
        self.most, self.total, self.decay = (self.scratch(plan.queries) for _ in range(3))

    def take_queries(self) -> None:
        """Queries as the products read them."""
        last, width = self.x.queries - 1, self.x.width
        self.unit.pack_columns("q", self.head, self.first, last, width, self.packed)

    def block(self) -> None:
        """As for vectors, some queries at a time, so that their scores stay near."""
        x, size = self.x, self.plan.strip
        where = (self.key_head, self.key, self.upper - 1, self.count)
        self.unit.pack_rows("k", *where, x.width, self.key_tiles)
        self.unit.pack_turned("v", *where, x.value_width, self.value_tiles)
        first, stop, everything = self.first, self.stop, self.count
        top = minimum(stop - first, self.plan.queries)
        for offset in self.b.each("strip", 0, top, size, bounds=(0, self.plan.queries - size)):
            self.offset, self.first = offset, first + offset
            self.stop = minimum(self.first + size, stop)
            if x.band[1] is not None and self.sequences is None:  # not all that others see
                self.count = maximum(0, minimum(everything, self.stop + x.band[1] - self.key))
            self.score()
            self.change()
            self.soften()
            self.gather_values()
        self.offset, self.first, self.stop = 0, first, stop

    def score(self) -> None:
        """scores[j, i] = key j times query i."""
        before, queries = self.offset // TILE, self.unit.packed_in(self.packed)
        self.unit.product(
            ceil_divide(self.count, PAIR) * 2,
            self.plan.strip // TILE,
            self.deep,
            self.unit.packed_in(self.key_tiles),
            lambda column, step: queries(column + before, step),
            self.scores,
            adds=False,
        )

    def gather_values(self) -> None:
        """result = decay * result + values^T @ probabilities^T."""
        b, size = self.b, self.plan.strip
        decay = b.load(self.decay, (self.offset,), (size,), (0,))
        for d in b.each("fade", 0, self.wide * TILE):
            row = b.load(self.result, (d, self.offset), (size,), (1,))
            b.store(self.result, b.apply("multiply", row, decay), (d, self.offset), (1,))
        self.unit.product(
            self.wide,
            size // TILE,
            ceil_divide(self.count, PAIR),
            self.unit.packed_in(self.value_tiles),
            self.unit.pairs_in(self.pairs),
            self.result,
            adds=True,
            shift=self.offset // TILE,
        )

    # ---- softmax --------------------------------------------------------------------------

    def soften(self) -> None:
        """As for vectors; rows of scores past the last key are hidden first."""
        b = self.b
        hidden = b.constant(-math.inf, self.sum, (self.plan.strip,))
        for j in b.each("hide", self.count, whole(self.count), bounds=(0, self.plan.keys - 1)):
            b.store(self.scores, hidden, (j, 0), (1,))
        super().soften()

    def rows(self) -> Size:
        """Rows of scores that count: whole pairs of tiles."""
        return whole(self.count)

    def powers(self, c: Size, width: int, base: Node, total: Node) -> Node:
        """Probabilities of some queries, two keys at a time, rounded; the sums of those not."""
        b, sums = self.b, [total]
        for j in b.each("powers", 0, whole(self.count), 2, sums, bounds=(0, self.plan.keys - 2)):
            found = [self.probability(j + n, c, width, base) for n in range(2)]
            rest = [self.dropped(p, j + n, c) for n, p in enumerate(found)]
            pair = self.unit.beside(*(b.cast(p, bfloat16) for p in rest))
            b.store(self.pairs, pair, (j // 2, c * 2), (1,))
            sums[0] = b.apply("add", sums[0], b.apply("add", *found))
        return sums[0]
