"""Attention on CPUs with a matrix unit of 16 x 16 tiles (AMX), backward, for bfloat16.

The two Bodies of `backward` with products of tiles. Scores^T and the gradient of
probabilities^T have keys down and queries across. The gradient of q takes the gradient of scores
in pairs of keys as its right side; those of k and v take it, and the probabilities, as their left
side, rounded, with queries and gradients of results in pairs of tokens on the right. Invariant:
queries past the last have probabilities of 0 (their base is -inf), keys past the last are hidden
or their rows are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, combine, floor_divide, high, minimum, modulo, multiply
from ...tile import ops
from ..attention.shape import AttentionShape
from . import matrix
from .backward import Backward, KeyGradient, QueryGradient
from .forward import fitting
from .matrix import PAIR, SPACE, TILE, MatrixTiles
from .tiles import CpuPlan


def choose(x: AttentionShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape, or None where no matrix unit of the Target fits."""
    forward = matrix.choose(x, target)
    if forward is None:
        return None
    keys = min(128, PAIR * max(1, -(-high(x.keys) // PAIR)))
    return CpuPlan(fitting(x, target, 128, PAIR), keys, TILE, 2, TILE, forward.unit)


def tiles_of(width: int) -> int:
    """Tiles across a width, an even number."""
    return 2 * -(-width // PAIR)


class MatrixBackward(MatrixTiles, Backward):
    """Products and packing of both Bodies."""

    def columns(self, width: int) -> int:
        """A width, up to a whole number of pairs of tiles."""
        return tiles_of(width) * TILE

    def tiles(self, *lead: int) -> Node:
        """Scratch of tiles."""
        return self.scratch(*lead, TILE, PAIR, dtype=bfloat16)

    def block_places(self) -> None:
        """Scratch of a block of scores."""
        x, plan = self.x, self.plan
        self.deep, self.wide = (-(-w // PAIR) for w in (x.width, x.value_width))
        self.packed = self.tiles(plan.queries // TILE, self.deep)
        self.packed_out = self.tiles(plan.queries // TILE, self.wide)
        self.key_tiles = self.tiles(plan.keys // TILE, self.deep)
        self.value_tiles = self.tiles(plan.keys // TILE, self.wide)
        shape = (plan.keys, plan.queries + TILE)
        self.scores, self.change_of = self.scratch(*shape), self.scratch(*shape)
        self.caps = self.scratch(*shape) if x.softcap else None
        self.base, self.delta = self.scratch(plan.queries), self.scratch(plan.queries)

    # ---- packing --------------------------------------------------------------------------

    def pack_queries(self, name: str, width: int, place: Node) -> None:
        """Pairs of d side by side, queries across; past the last query it is repeated."""
        b, last = self.b, combine(self.stop, 1, -1)

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            start = combine(self.first, multiply(i, TILE), 1)

            def step(s: Size, _: list[Node]) -> Sequence[Node]:
                tokens = [minimum(combine(start, r, 1), last) for r in range(TILE)]
                lines = [
                    self.line(name, self.head, t, multiply(s, PAIR), PAIR, width) for t in tokens
                ]
                value = self.turn_pairs(b.add(ops.stack_rows(*lines)))
                b.store(place, value, (i, s, 0, 0), (2, 3))
                return ()

            b.loop("step", 0, -(-width // PAIR), 1, step)
            return ()

        b.loop("turn", 0, self.plan.queries // TILE, 1, some)

    def pack_keys(self, name: str, width: int, place: Node) -> None:
        """Rows of keys or values tile by tile; past the last of the block it is repeated."""
        b = self.b
        last = combine(combine(self.key, self.count, 1), 1, -1)

        def row(r: Size, _: list[Node]) -> Sequence[Node]:
            token = minimum(combine(self.key, r, 1), last)
            for s in range(-(-width // PAIR)):
                part = self.line(name, self.key_head, token, s * PAIR, PAIR, width)
                b.store(place, part, (floor_divide(r, TILE), s, modulo(r, TILE), 0), (3,))
            return ()

        b.loop("row", 0, self.rows(), 1, row, bounds=(0, self.plan.keys - 1))

    def take_queries(self) -> None:
        """Queries and gradients of their results; what each query has one of."""
        b, x, n = self.b, self.x, self.lanes
        self.pack_queries("q", x.width, self.packed)
        self.pack_queries("dout", x.value_width, self.packed_out)
        self.take_sums()

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            inside = b.apply("less", self.steps(n, combine(self.first, i, 1)), b.index(self.stop))
            base = b.load(self.base, (i,), (n,), (0,))
            base = b.apply("where", inside, base, self.constant(-math.inf))
            b.store(self.base, base, (i,), (0,))
            return ()

        b.loop("past", 0, self.plan.queries, n, some, bounds=(0, self.plan.queries - n))

    def take_keys(self) -> None:
        """A block of keys."""
        self.pack_keys("k", self.x.width, self.key_tiles)

    def take_values(self) -> None:
        """A block of values."""
        self.pack_keys("v", self.x.value_width, self.value_tiles)

    # ---- products -------------------------------------------------------------------------

    def tile_product(
        self,
        down: Size,
        across: int,
        depth: Size,
        left: Callable[[Size, Size], Node],
        right: Callable[[Size, Size], Node],
        place: Node,
        adds: bool,
    ) -> None:
        """place (+)= product, in squares of two by two tiles; `depth` in steps of 32."""
        b, unit = self.b, self.plan.unit

        def square(r: Size, c: Size) -> None:
            both = [(combine(r, i, 1), combine(c, j, 1)) for i in range(2) for j in range(2)]
            spots = [[b.index(multiply(t, TILE)) for t in pair] for pair in both]
            shape: dict[str, Any] = {"shape": (TILE, TILE), "unit": unit}
            sums = [
                b.add(
                    ops.matrix_load(place, *spot, **shape)
                    if adds
                    else ops.matrix_zero(dtype=self.sum, **shape)
                )
                for spot in spots
            ]

            def step(s: Size, carried: list[Node]) -> Sequence[Node]:
                above = [left(combine(r, i, 1), s) for i in range(2)]
                beside = [right(combine(c, i, 1), s) for i in range(2)]
                return [
                    b.add(ops.matrix_dot(total, above[i // 2], beside[i % 2], unit=unit))
                    for i, total in enumerate(carried)
                ]

            found = b.loop("depth", 0, depth, 1, step, sums, bounds=(0, max(0, high(depth) - 1)))
            for total, spot in zip(found, spots):
                b.add(ops.matrix_store(place, total, *spot, unit=unit))

        def row(r: Size, _: list[Node]) -> Sequence[Node]:
            def column(c: Size, _: list[Node]) -> Sequence[Node]:
                square(r, c)
                return ()

            b.loop("across", 0, across, 2, column, bounds=(0, across - 2))
            return ()

        b.loop("down", 0, down, 2, row, bounds=(0, max(0, high(down) - 2)))

    def gradient_of_scores(self) -> None:
        """Raw scores, and the gradient of probabilities; then what each Body wants of them."""
        across, down = self.plan.queries // TILE, floor_divide(self.rows(), TILE)
        for left, right, steps, place in (
            (self.key_tiles, self.packed, self.deep, self.scores),
            (self.value_tiles, self.packed_out, self.wide, self.change_of),
        ):

            def above(r: Size, s: Size, left: Node = left) -> Node:
                return self.tile(left, r, s, 0, 0)

            def beside(c: Size, s: Size, right: Node = right) -> Node:
                return self.tile(right, c, s, 0, 0)

            self.tile_product(down, across, steps, above, beside, place, False)
        self.change()
        self.round_scores()

    def round_scores(self) -> None:
        """Probabilities and gradients of scores as the next products read them: each Body's own."""

    def rounds(self, step: int, body: Callable[[Size, Size, int, Node, Node], None]) -> None:
        """body(key, first query, queries, base, delta) for all rows, some queries at a time."""
        b, width = self.b, PAIR

        def across(c: Size, _: list[Node]) -> Sequence[Node]:
            base, delta = (b.load(m, (c,), (width,), (0,)) for m in (self.base, self.delta))

            def row(j: Size, _: list[Node]) -> Sequence[Node]:
                body(j, c, width, base, delta)
                return ()

            b.loop("gradient", 0, self.rows(), step, row, bounds=(0, self.plan.keys - step))
            return ()

        b.loop("gradients", 0, self.plan.queries, width, across)


class MatrixQueryGradient(MatrixBackward, QueryGradient):
    """Builds the Body of dq on a matrix unit."""

    def places(self) -> None:
        """Scratch."""
        x, plan = self.x, self.plan
        self.block_places()
        self.turned_keys = self.tiles(tiles_of(x.width), plan.keys // PAIR)
        self.pairs = self.scratch(plan.keys // 2, 2 * plan.queries + SPACE, dtype=bfloat16)
        self.result = self.scratch(self.columns(x.width), plan.queries + TILE)

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """What a block of keys adds: result^T += keys^T @ gradient of scores^T."""
        self.key = key
        self.count = minimum(combine(self.upper, key, -1), self.plan.keys)
        self.take_keys()
        self.take_values()
        self.turn_keys()
        self.gradient_of_scores()

        def left(r: Size, s: Size) -> Node:
            return self.tile(self.turned_keys, r, s, 0, 0)

        def right(c: Size, s: Size) -> Node:
            return self.tile(self.pairs, multiply(s, TILE), multiply(c, PAIR))

        self.tile_product(
            tiles_of(self.x.width),
            self.plan.queries // TILE,
            ceil_divide(self.count, PAIR),
            left,
            right,
            self.result,
            True,
        )
        return ()

    def turn_keys(self) -> None:
        """Keys turned, in pairs of keys; past the last one it is repeated."""
        b, last = self.b, combine(combine(self.key, self.count, 1), 1, -1)

        def group(g: Size, _: list[Node]) -> Sequence[Node]:
            start = combine(self.key, multiply(g, PAIR), 1)

            def chunk(t: Size, _: list[Node]) -> Sequence[Node]:
                lines = [
                    self.line(
                        "k",
                        self.key_head,
                        minimum(combine(start, r, 1), last),
                        multiply(t, TILE),
                        TILE,
                        self.x.width,
                    )
                    for r in range(PAIR)
                ]
                rows = [self.beside(*lines[r : r + 2]) for r in range(0, PAIR, 2)]
                value = self.turn_pairs(b.add(ops.stack_rows(*rows)))
                b.store(self.turned_keys, value, (t, g, 0, 0), (2, 3))
                return ()

            b.loop("chunk", 0, -(-self.x.width // TILE), 1, chunk)
            return ()

        b.loop(
            "group",
            0,
            ceil_divide(self.count, PAIR),
            1,
            group,
            bounds=(0, self.plan.keys // PAIR - 1),
        )

    def round_scores(self) -> None:
        """Gradients of scores in pairs of keys; 0 for keys past the last."""
        b = self.b

        def two(j: Size, c: Size, width: int, base: Node, delta: Node) -> None:
            found = []
            for n in range(2):
                key = combine(j, n, 1)
                one = self.both_of(key, c, width, base, delta)[1]
                there = b.broadcast(b.less(key, self.count), (width,))
                found.append(b.apply("where", there, one, self.constant(0.0)))
            pair = self.beside(*(b.cast(p, bfloat16) for p in found))
            b.store(self.pairs, pair, (floor_divide(j, 2), multiply(c, 2)), (1,))

        self.rounds(2, two)


class MatrixKeyGradient(MatrixBackward, KeyGradient):
    """Builds the Body of dk and dv on a matrix unit."""

    def block_places(self) -> None:
        """Scratch of a block, and of what the sums are made of."""
        super().block_places()
        x, plan = self.x, self.plan
        shape = (plan.keys, plan.queries + SPACE)
        self.left = {
            "dv": self.scratch(*shape, dtype=bfloat16),
            "dk": self.scratch(*shape, dtype=bfloat16),
        }
        self.right = {
            "dv": self.tiles(plan.queries // PAIR, tiles_of(x.value_width)),
            "dk": self.tiles(plan.queries // PAIR, tiles_of(x.width)),
        }

    def some_queries(self, first: Size, _: list[Node]) -> Sequence[Node]:
        """What a block of queries adds."""
        x, plan = self.x, self.plan
        self.first = first
        self.stop = minimum(combine(first, plan.queries, 1), self.upper)
        self.take_queries()
        if self.in_a_row:
            keys = self.lower, self.upper
            self.find_limits()
            self.lower, self.upper = keys
        self.pair_rows("dout", x.value_width, self.right["dv"])
        self.pair_rows("q", x.width, self.right["dk"])
        self.gradient_of_scores()
        for name, width in (("dv", x.value_width), ("dk", x.width)):

            def left(r: Size, s: Size, memory: Node = self.left[name]) -> Node:
                return self.tile(memory, multiply(r, TILE), multiply(s, PAIR))

            def right(c: Size, s: Size, memory: Node = self.right[name]) -> Node:
                return self.tile(memory, s, c, 0, 0)

            self.tile_product(
                floor_divide(self.rows(), TILE),
                tiles_of(width),
                plan.queries // PAIR,
                left,
                right,
                self.sums[name],
                True,
            )
        return ()

    def pair_rows(self, name: str, width: int, place: Node) -> None:
        """Tokens in pairs side by side, d across; the last one repeated past the end."""
        b, last = self.b, combine(self.stop, 1, -1)

        def two(i: Size, _: list[Node]) -> Sequence[Node]:
            tokens = [
                minimum(combine(self.first, combine(multiply(i, 2), n, 1), 1), last)
                for n in range(2)
            ]
            for t in range(-(-width // TILE)):
                lines = [
                    self.line(name, self.head, token, t * TILE, TILE, width) for token in tokens
                ]
                spot = (floor_divide(i, TILE), t, modulo(i, TILE), 0)
                b.store(place, self.beside(*lines), spot, (3,))
            return ()

        b.loop("pair", 0, self.plan.queries // 2, 1, two)

    def round_scores(self) -> None:
        """Probabilities and gradients of scores, row by row."""
        b = self.b

        def one(j: Size, c: Size, width: int, base: Node, delta: Node) -> None:
            found = self.both_of(j, c, width, base, delta)
            for name, value in zip(("dv", "dk"), found):
                b.store(self.left[name], b.cast(value, bfloat16), (j, c), (1,))

        self.rounds(1, one)
