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
from collections.abc import Iterator

from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high
from ..attention.shape import AttentionShape
from . import matrix
from .backward import Backward, KeyGradient, QueryGradient
from .forward import fitting
from .matrix import PAIR, SPACE, TILE, Unit, whole
from .tiles import CpuPlan, up


def choose(x: AttentionShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape, or None where no matrix unit of the Target fits."""
    forward = matrix.choose(x, target)
    if forward is None:
        return None
    keys = min(128, PAIR * max(1, -(-high(x.keys) // PAIR)))
    return CpuPlan(fitting(x, target, 128, PAIR), keys, TILE, 2, TILE, forward.unit)


class MatrixBackward(Backward):
    """Products and packing of both Bodies."""

    def columns(self, width: int) -> int:
        """A width, up to a whole number of pairs of tiles."""
        return up(width, PAIR)

    def block_places(self) -> None:
        """Scratch of a block of scores."""
        x, plan = self.x, self.plan
        self.unit = unit = Unit(self.source, plan)
        self.deep, self.wide = (-(-w // PAIR) for w in (x.width, x.value_width))
        self.packed = unit.tiles(plan.queries // TILE, self.deep)
        self.packed_out = unit.tiles(plan.queries // TILE, self.wide)
        self.key_tiles = unit.tiles(plan.keys // TILE, self.deep)
        self.value_tiles = unit.tiles(plan.keys // TILE, self.wide)
        self.score_places(plan.keys, plan.queries + TILE)

    def take_queries(self) -> None:
        """Queries and gradients of their results; what each query has one of."""
        b, x, n = self.b, self.x, self.lanes
        where = (self.head, self.first, self.stop - 1)
        self.unit.pack_columns("q", *where, x.width, self.packed)
        self.unit.pack_columns("dout", *where, x.value_width, self.packed_out)
        self.take_sums()
        for i in self.v.chunks("past", self.plan.queries):
            inside = b.apply("less", self.v.steps(n, self.first + i), b.index(self.stop))
            base = b.load(self.base, (i,), (n,), (0,))
            base = b.apply("where", inside, base, self.v.constant(-math.inf))
            b.store(self.base, base, (i,), (0,))

    def take_keys(self) -> None:
        """A block of keys."""
        self.unit.pack_rows("k", *self.keys_at_work(), self.x.width, self.key_tiles)

    def take_values(self) -> None:
        """A block of values."""
        self.unit.pack_rows("v", *self.keys_at_work(), self.x.value_width, self.value_tiles)

    def keys_at_work(self) -> tuple[Size, Size, Size, Size]:
        """Key head, first and last key of the block, and how many it has."""
        return self.key_head, self.key, self.key + self.count - 1, self.count

    def gradient_of_scores(self) -> None:
        """Raw scores, and the gradient of probabilities; then what each Body wants of them."""
        across, down = self.plan.queries // TILE, whole(self.count) // TILE
        for left, right, steps, place in (
            (self.key_tiles, self.packed, self.deep, self.scores),
            (self.value_tiles, self.packed_out, self.wide, self.change_of),
        ):
            operands = self.unit.packed_in(left), self.unit.packed_in(right)
            self.unit.product(down, across, steps, *operands, place, adds=False)
        self.change()
        self.round_scores()

    def round_scores(self) -> None:
        """Probabilities and gradients of scores as the next products read them: each Body's own."""

    def rounds(self, step: int) -> Iterator[tuple[Size, Size, Node, Node]]:
        """(key, first query, base, delta) for all rows, 32 queries at a time."""
        b, bounds = self.b, (0, self.plan.keys - step)
        for c in b.each("gradients", 0, self.plan.queries, PAIR):
            base, delta = (b.load(m, (c,), (PAIR,), (0,)) for m in (self.base, self.delta))
            for j in b.each("gradient", 0, whole(self.count), step, bounds=bounds):
                yield j, c, base, delta


class MatrixQueryGradient(MatrixBackward, QueryGradient):
    """Builds the Body of dq on a matrix unit."""

    def places(self) -> None:
        """Scratch."""
        x, plan = self.x, self.plan
        self.block_places()
        self.turned_keys = self.unit.tiles(self.columns(x.width) // TILE, plan.keys // PAIR)
        self.pairs = self.scratch(plan.keys // 2, 2 * plan.queries + SPACE, dtype=bfloat16)
        self.result = self.scratch(self.columns(x.width), plan.queries + TILE)

    def block(self) -> None:
        """What a block of keys adds: result^T += keys^T @ gradient of scores^T."""
        x = self.x
        self.take_keys()
        self.take_values()
        self.unit.pack_turned("k", *self.keys_at_work(), x.width, self.turned_keys)
        self.gradient_of_scores()
        self.unit.product(
            self.columns(x.width) // TILE,
            self.plan.queries // TILE,
            ceil_divide(self.count, PAIR),
            self.unit.packed_in(self.turned_keys),
            self.unit.pairs_in(self.pairs),
            self.result,
            adds=True,
        )

    def round_scores(self) -> None:
        """Gradients of scores in pairs of keys; 0 for keys past the last."""
        b = self.b
        for j, c, base, delta in self.rounds(2):
            found = []
            for n in range(2):
                one = self.both_of(j + n, c, PAIR, base, delta)[1]
                there = b.broadcast(b.less(j + n, self.count), (PAIR,))
                found.append(b.apply("where", there, one, self.v.constant(0.0)))
            pair = self.unit.beside(*(b.cast(p, bfloat16) for p in found))
            b.store(self.pairs, pair, (j // 2, c * 2), (1,))


class MatrixKeyGradient(MatrixBackward, KeyGradient):
    """Builds the Body of dk and dv on a matrix unit."""

    def block_places(self) -> None:
        """Scratch of a block, and of what the sums are made of."""
        super().block_places()
        x, plan = self.x, self.plan
        shape = (plan.keys, plan.queries + SPACE)
        self.left = {name: self.scratch(*shape, dtype=bfloat16) for name in ("dv", "dk")}
        self.right = {
            name: self.unit.tiles(plan.queries // PAIR, self.columns(width) // TILE)
            for name, width in (("dv", x.value_width), ("dk", x.width))
        }

    def add_block(self) -> None:
        """What a block of queries adds."""
        x = self.x
        where = (self.head, self.first, self.stop - 1)
        self.unit.pack_pairs("dout", *where, x.value_width, self.right["dv"])
        self.unit.pack_pairs("q", *where, x.width, self.right["dk"])
        self.gradient_of_scores()
        for name in ("dv", "dk"):
            self.unit.product(
                whole(self.count) // TILE,
                self.columns(self.widths[name]) // TILE,
                self.plan.queries // PAIR,
                self.unit.rows_in(self.left[name]),
                self.unit.steps_in(self.right[name]),
                self.sums[name],
                adds=True,
            )

    def round_scores(self) -> None:
        """Probabilities and gradients of scores, row by row."""
        b = self.b
        for j, c, base, delta in self.rounds(1):
            for name, value in zip(("dv", "dk"), self.both_of(j, c, PAIR, base, delta)):
                b.store(self.left[name], b.cast(value, bfloat16), (j, c), (1,))
