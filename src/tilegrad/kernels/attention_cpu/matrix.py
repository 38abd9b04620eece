"""Attention on CPUs with a matrix unit of 16 x 16 tiles (AMX), forward, for bfloat16.

As in `forward`, with queries along the columns of tiles: scores^T = keys @ queries^T and
result^T += values^T @ probabilities^T. Queries are packed in pairs of d once for a program; keys
are copied tile by tile; values are turned, in pairs of keys; probabilities are rounded and stored
in pairs of keys as they are made. Invariant: keys past the last one of a block have the
probability 0, and d past its end is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.config import invariant
from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import (
    Size,
    ceil_divide,
    combine,
    floor_divide,
    high,
    maximum,
    minimum,
    modulo,
    multiply,
)
from ...tile import ops
from ..attention.shape import AttentionShape
from .forward import Forward, fitting
from .tiles import Builder, CpuPlan

TILE = 16
PAIR = 2 * TILE
SPACE = 32  # elements after each row of probabilities


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


class MatrixTiles(Builder):
    """Tiles of a matrix unit: how operands are packed, and read."""

    count: Size  # of the keys of a block

    def rows(self) -> Size:
        """Keys of the block, up to a whole number of pairs of tiles."""
        return multiply(ceil_divide(self.count, PAIR), PAIR)

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

    def line(self, name: str, head: Size, token: Size, d: Size, size: int, width: int) -> Node:
        """`size` elements of a token, 0 past its width."""
        index = self.at(name, self.batch, head, token, d)
        axis = self.order(name).index("d")
        return self.b.load(self.memory[name], index, (size,), (axis,), self.below(d, size, width))

    def tile(self, memory: Node, *index: Size) -> Node:
        """A tile in the unit's registers."""
        b, shape = self.b, (TILE, PAIR if memory.dtype is bfloat16 else TILE)
        scalars = [b.index(i) for i in index]
        return b.add(ops.matrix_load(memory, *scalars, shape=shape, unit=self.plan.unit))


class MatrixForward(MatrixTiles, Forward):
    """Builds the forward Body on a matrix unit."""

    def places(self) -> None:
        """Scratch, in the layouts that the unit reads."""
        x, plan = self.x, self.plan
        self.deep = -(-x.width // PAIR)  # steps of a product over d
        self.wide = -(-x.value_width // TILE)  # tiles of the result
        line = (TILE, PAIR)
        self.packed = self.scratch(plan.queries // TILE, self.deep, *line, dtype=bfloat16)
        self.key_tiles = self.scratch(plan.keys // TILE, self.deep, *line, dtype=bfloat16)
        self.value_tiles = self.scratch(self.wide, plan.keys // PAIR, *line, dtype=bfloat16)
        self.pairs = self.scratch(plan.keys // 2, 2 * plan.strip + SPACE, dtype=bfloat16)
        self.scores = self.scratch(plan.keys, plan.strip + TILE)
        self.result = self.scratch(self.wide * TILE, plan.queries + TILE)
        self.most, self.total, self.decay = (self.scratch(plan.queries) for _ in range(3))

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """As for vectors, some queries at a time, so that their scores stay near."""
        self.key = key
        self.count = everything = minimum(combine(self.upper, key, -1), self.plan.keys)
        self.take_keys()
        self.take_values()
        first, stop = self.first, self.stop

        def strip(offset: Size, _: list[Node]) -> Sequence[Node]:
            self.offset, self.first = offset, combine(first, offset, 1)
            self.stop = minimum(combine(self.first, self.plan.strip, 1), stop)
            if self.x.band[1] is not None and not self.in_a_row:  # not all that others see
                seen = combine(combine(self.stop, self.x.band[1], 1), key, -1)
                self.count = maximum(0, minimum(everything, seen))
            self.score()
            self.change()
            self.soften()
            self.gather_values()
            return ()

        size, top = self.plan.strip, minimum(combine(stop, first, -1), self.plan.queries)
        self.b.loop("strip", 0, top, size, strip, bounds=(0, self.plan.queries - size))
        self.offset, self.first, self.stop = 0, first, stop
        return ()

    # ---- packing --------------------------------------------------------------------------

    def take_queries(self) -> None:
        """Pairs of d side by side, queries across; past the last query it is repeated."""
        b, x = self.b, self.x
        last = combine(x.queries, 1, -1)

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            start = combine(self.first, multiply(i, TILE), 1)

            def step(s: Size, _: list[Node]) -> Sequence[Node]:
                tokens = [minimum(combine(start, r, 1), last) for r in range(TILE)]
                lines = [
                    self.line("q", self.head, t, multiply(s, PAIR), PAIR, x.width) for t in tokens
                ]
                value = self.turn_pairs(b.add(ops.stack_rows(*lines)))
                b.store(self.packed, value, (i, s, 0, 0), (2, 3))
                return ()

            b.loop("step", 0, self.deep, 1, step)
            return ()

        b.loop("turn", 0, self.plan.queries // TILE, 1, some)

    def take_keys(self) -> None:
        """Keys tile by tile; past the last one it is repeated."""
        b, last = self.b, combine(self.upper, 1, -1)

        def row(r: Size, _: list[Node]) -> Sequence[Node]:
            token = minimum(combine(self.key, r, 1), last)
            for s in range(self.deep):
                part = self.line("k", self.key_head, token, s * PAIR, PAIR, self.x.width)
                b.store(self.key_tiles, part, (floor_divide(r, TILE), s, modulo(r, TILE), 0), (3,))
            return ()

        b.loop("row", 0, self.rows(), 1, row, bounds=(0, self.plan.keys - 1))

    def take_values(self) -> None:
        """Values turned, in pairs of keys; past the last one it is repeated."""
        b, last = self.b, combine(self.upper, 1, -1)

        def group(g: Size, _: list[Node]) -> Sequence[Node]:
            start = combine(self.key, multiply(g, PAIR), 1)

            def chunk(t: Size, _: list[Node]) -> Sequence[Node]:
                lines = [
                    self.line(
                        "v",
                        self.key_head,
                        minimum(combine(start, r, 1), last),
                        multiply(t, TILE),
                        TILE,
                        self.x.value_width,
                    )
                    for r in range(PAIR)
                ]
                rows = [self.beside(*lines[r : r + 2]) for r in range(0, PAIR, 2)]
                value = self.turn_pairs(b.add(ops.stack_rows(*rows)))
                b.store(self.value_tiles, value, (t, g, 0, 0), (2, 3))
                return ()

            b.loop("chunk", 0, self.wide, 1, chunk)
            return ()

        b.loop(
            "group",
            0,
            ceil_divide(self.count, PAIR),
            1,
            group,
            bounds=(0, self.plan.keys // PAIR - 1),
        )

    # ---- products -------------------------------------------------------------------------

    def multiply_tiles(
        self,
        rows: list[Size],
        column: Size,
        depth: Size,
        limit: int,
        load: tuple[str, str],
        sums: list[Node],
        place: Node,
        shift: Size,
    ) -> None:
        """A row or two of tiles by two columns: place = sums + product over depth.

        The columns of `place` are shifted by as many tiles as said.
        """
        b, unit = self.b, self.plan.unit
        left, right = (getattr(self, name) for name in load)

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            above = [left(r, s) for r in rows]
            beside = [right(combine(column, c, 1), s) for c in range(2)]
            return [
                b.add(ops.matrix_dot(total, above[n // 2], beside[n % 2], unit=unit))
                for n, total in enumerate(carried)
            ]

        found = b.loop("depth", 0, depth, 1, step, sums, bounds=(0, limit - 1))
        for n, total in enumerate(found):
            across = combine(combine(column, n % 2, 1), shift, 1)
            at = (multiply(rows[n // 2], TILE), multiply(across, TILE))
            b.add(ops.matrix_store(place, total, *(b.index(i) for i in at), unit=unit))

    def beyond(self) -> Size:
        """Tiles of queries before those at work."""
        return floor_divide(self.offset, TILE)

    def key_tile(self, row: Size, step: Size) -> Node:
        """16 keys, 32 of d."""
        return self.tile(self.key_tiles, row, step, 0, 0)

    def query_tile(self, column: Size, step: Size) -> Node:
        """32 of d in pairs, 16 queries."""
        return self.tile(self.packed, combine(column, self.beyond(), 1), step, 0, 0)

    def value_tile(self, row: Size, step: Size) -> Node:
        """16 of d, 32 keys."""
        return self.tile(self.value_tiles, row, step, 0, 0)

    def pair_tile(self, column: Size, step: Size) -> Node:
        """32 keys in pairs, 16 queries."""
        return self.tile(self.pairs, multiply(step, TILE), multiply(column, PAIR))

    def score(self) -> None:
        """scores[j, i] = key j times query i."""
        b, across = self.b, self.plan.strip // TILE

        def zero() -> Node:
            return b.add(ops.matrix_zero(shape=(TILE, TILE), dtype=self.sum, unit=self.plan.unit))

        def down(r: Size, _: list[Node]) -> Sequence[Node]:
            def column(c: Size, _: list[Node]) -> Sequence[Node]:
                self.multiply_tiles(
                    [r, combine(r, 1, 1)],
                    c,
                    self.deep,
                    self.deep,
                    ("key_tile", "query_tile"),
                    [zero() for _ in range(4)],
                    self.scores,
                    0,
                )
                return ()

            b.loop("across", 0, across, 2, column, bounds=(0, across - 2))
            return ()

        b.loop(
            "down",
            0,
            multiply(ceil_divide(self.count, PAIR), 2),
            2,
            down,
            bounds=(0, self.plan.keys // TILE - 2),
        )

    def gather_values(self) -> None:
        """result = decay * result + values^T @ probabilities^T."""
        b, across = self.b, self.plan.strip // TILE
        size, shift = self.plan.strip, self.beyond()
        decay = b.load(self.decay, (self.offset,), (size,), (0,))

        def fade(d: Size, _: list[Node]) -> Sequence[Node]:
            row = b.load(self.result, (d, self.offset), (size,), (1,))
            b.store(self.result, b.apply("multiply", row, decay), (d, self.offset), (1,))
            return ()

        b.loop("fade", 0, self.wide * TILE, 1, fade)

        def strip(rows: list[Size]) -> None:
            def column(c: Size, _: list[Node]) -> Sequence[Node]:
                own = combine(c, shift, 1)
                places = [
                    (multiply(r, TILE), multiply(combine(own, n, 1), TILE))
                    for r in rows
                    for n in range(2)
                ]
                sums = [self.tile(self.result, *place) for place in places]
                self.multiply_tiles(
                    rows,
                    c,
                    ceil_divide(self.count, PAIR),
                    self.plan.keys // PAIR,
                    ("value_tile", "pair_tile"),
                    sums,
                    self.result,
                    shift,
                )
                return ()

            b.loop("across", 0, across, 2, column, bounds=(0, across - 2))

        def down(r: Size, _: list[Node]) -> Sequence[Node]:
            strip([r, combine(r, 1, 1)])
            return ()

        even = self.wide // 2 * 2
        b.loop("down", 0, even, 2, down, bounds=(0, max(0, even - 2)))
        if self.wide > even:
            strip([even])

    # ---- softmax --------------------------------------------------------------------------

    def soften(self) -> None:
        """As for vectors; rows of scores past the last key are hidden first."""
        b = self.b
        hidden = b.constant(-math.inf, self.sum, (self.plan.strip,))

        def hide(j: Size, _: list[Node]) -> Sequence[Node]:
            b.store(self.scores, hidden, (j, 0), (1,))
            return ()

        b.loop("hide", self.count, self.rows(), 1, hide, bounds=(0, self.plan.keys - 1))
        super().soften()

    def powers(self, c: Size, width: int, base: Node, total: Node) -> Node:
        """Probabilities of some queries, two keys at a time, rounded; the sums of those not."""
        b = self.b

        def two(j: Size, carried: list[Node]) -> Sequence[Node]:
            found = [self.probability(combine(j, n, 1), c, width, base) for n in range(2)]
            rest = [self.dropped(p, combine(j, n, 1), c) for n, p in enumerate(found)]
            pair = self.beside(*(b.cast(p, bfloat16) for p in rest))
            b.store(self.pairs, pair, (floor_divide(j, 2), multiply(c, 2)), (1,))
            return [b.apply("add", carried[0], b.apply("add", *found))]

        return b.loop("powers", 0, self.rows(), 2, two, [total], bounds=(0, self.plan.keys - 2))[0]
