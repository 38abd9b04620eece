"""Attention on CPUs, forward: tiles of scores that stay in the cache, queries along the lanes.

A program has a block of queries of one head. For each block of keys it computes scores^T (keys
down, queries across), so that the maximum and the sum of a row of softmax are plain vector
operations, then adds values^T @ probabilities^T to the result^T, some queries at a time on a matrix
unit. Queries are brought once for a program, keys and values once for each block, as the engine
reads them.

Invariant: a result depends on the Plan alone, never on workers, batch or other heads; a query
that sees nothing gives 0 and a log-sum-exp of -inf; nothing is read past the keys that are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

from ... import tile
from ...core.config import invariant
from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Memory
from ...tile.value import index_of
from ..attention.shape import AttentionShape, parameters
from ..attention.softmax import finite
from .engine import PAIR, TILE, CpuPlan, Product, Vectors, up
from .kernel import Scored, greater
from .source import Source, below


def fitting(x: AttentionShape, target: Target, most: int, least: int) -> int:
    """Queries of a program, a multiple of `least`: few enough that every worker has several."""
    count, heads = max(1, high(x.queries)), high(x.batch) * x.heads
    queries = most
    while queries > 2 * least and heads * -(-count // queries) < 4 * target.cores:
        queries //= 2
    return min(queries, up(count, least))


def unit_of(x: AttentionShape, target: Target) -> str:
    """The matrix unit that multiplies tiles of bfloat16, or ''."""
    found = [
        u.name
        for u in target.matrix_units(x.dtype, x.dtype)
        if (u.m, u.n, u.k) == (TILE, TILE, PAIR) and x.dtype is bfloat16
    ]
    return found[0] if found and target.lanes(x.sum_dtype) == TILE else ""


def choose(x: AttentionShape, target: Target) -> CpuPlan:
    """The Plan for a shape: blocks that leave scores, keys and values in the L2 cache."""
    lanes, unit = target.lanes(x.sum_dtype), unit_of(x, target)
    if unit:
        queries = fitting(x, target, 512, PAIR)
        block = 512 if 64 < max(x.width, x.value_width) <= 128 else 256
        keys = min(block, PAIR * max(1, -(-high(x.keys) // PAIR)))
        part = 64 if queries % 64 == 0 else PAIR
        return CpuPlan(queries, keys, TILE, 2, TILE, unit, part, invariant())
    rows, across = (13, 2) if target.vector_registers >= 32 else (5, 2)
    queries = fitting(x, target, 128 // (across * lanes) * across * lanes, across * lanes)
    keys = min(256 // rows * rows, up(high(x.keys), rows))
    return CpuPlan(queries, max(rows, keys), rows, across, lanes, aligned=invariant())


def forward(
    x: AttentionShape, more: Sequence[Memory], plan: CpuPlan, name: str, keeps: bool = True
) -> Any:
    """The Body; parameters q, k, v, the extras, out, and log-sum-exps if it `keeps` them."""
    given = parameters(x, more)
    return Forward(Source(x, plan.lanes), given if keeps else given[:-1], plan, name).build()


class Forward(Scored):
    """Writes the forward Body."""

    results = ("out",)

    def allocate_scratch(self, engine: Vectors) -> None:
        """Scratch."""
        x, plan, self.engine = self.x, self.plan, engine
        self.q = engine.queries("q", deep=False)
        self.k = engine.keys("k", plain=True, turned=False)
        self.v = engine.keys("v", plain=False, turned=True)
        self.scores = self.score_place()
        self.weights = engine.weights(self.scores, deep=True)
        self.result = engine.place(up(x.value_width, self.lanes), plan.queries, engine.pad)
        self.most, self.total, self.decay = (
            tile.scratch((plan.queries,), self.sum) for _ in range(3)
        )

    @tile.function
    def prepare(self) -> None:
        """Queries; sums as they begin."""
        queries = self.plan.queries
        self.q.take(self.head, self.first, self.stop)
        self.most[0:queries] = tile.full((queries,), -tile.INF, self.sum)
        self.total[0:queries] = tile.zeros((queries,), self.sum)
        for row in tile.range(self.result.shape[0]):
            self.result[row, 0:queries] = tile.zeros((queries,), self.sum)

    @tile.function
    def step(self) -> None:
        """Scores of a block of keys, softmax, and what they add to the result; of some queries at a
        time, so that their scores stay near."""
        x, plan, engine, size = self.x, self.plan, self.engine, self.plan.strip
        where = (self.key_head, self.key, self.count)
        self.k.take(*where)
        first, stop, count = self.first, self.stop, self.count
        strips: Any = (0,)
        if size < plan.queries:
            self.v.take(*where)
            strips = tile.range(0, stop - first, size, bounds=(0, plan.queries - size))
        for offset in strips:
            if size < plan.queries:
                self.first, self.stop = first + offset, tile.minimum(first + offset + size, stop)
                if x.band[1] is not None:  # not all that others see
                    seen = self.stop + index_of(x.band[1]) - self.key
                    self.count = tile.maximum(0, tile.minimum(count, seen))
            queries, rows = engine.shifted(self.q.plain, offset), engine.whole(self.count)
            engine.product(Product(rows, size, x.width, self.k.plain, queries, self.scores))
            self.change()
            self.soften(offset, rows)
            if size == plan.queries:
                self.v.take(*where)
            operands = (self.v.turned, self.weights.operand)
            sums = (self.result, True, self.decay, offset)
            engine.product(Product(x.value_width, size, self.count, *operands, *sums))
        self.first, self.stop = first, stop

    @tile.function
    def soften(self, offset: Any, rows: Any) -> None:
        """Scores to probabilities (not yet divided by their sum), vector by vector of queries."""
        strip, keys = self.plan.strip, self.plan.keys
        width = next(w for w in (4, 2, 1) if strip % (w * self.lanes) == 0) * self.lanes
        together = self.weights.keys
        if rows is not self.count:  # some are past the last key
            for j in tile.range(self.count, rows, bounds=(0, keys - 1)):
                self.scores[j, 0:strip] = tile.full((strip,), -tile.INF, self.sum)
        for c in tile.range(0, strip, width):
            at = offset + c
            before = tile.load(self.most, (at,), (width,))
            top = tile.full((width,), -tile.INF, self.sum)
            for j in tile.range(0, rows, unroll=4, bounds=(0, keys - 1)):
                top = greater(tile.load(self.scores[j, c : c + width]), top)
            most = greater(top * self.factor, before)
            base = finite(most)
            decay = self.power(before - base)
            total = self.total[at : at + width] * decay
            self.most[at : at + width] = most
            self.decay[at : at + width] = decay
            base = -base
            unroll, bounds = 2 // together, (0, keys - together)
            for j in tile.range(0, rows, together, unroll=unroll, bounds=bounds):
                found = [self.probability(j + n, c, width, base) for n in range(together)]
                kept = [self.kept(j + n, c, width) for n in range(together)]
                values = [p if keep is None else p * keep for p, keep in zip(found, kept)]
                self.weights.put(j, c, values)
                total = total + reduce(add, found)
            self.total[at : at + width] = total

    @tile.function
    def finish(self) -> None:
        """Divide by the sums, turn, store; log-sum-exps."""
        x, n, source = self.x, self.lanes, self.source
        for i in tile.range(0, self.plan.queries, n):
            token, begun = self.first + i, self.holes.begun()
            most, total = (tile.load(place, (i,), (n,)) for place in (self.most, self.total))
            share, sums = self.ended(most, total, begun)
            inside = below(token, n, source.queries)
            for d in tile.range(0, x.value_width, n):
                part = tile.load(self.result, (d, i), (n, n)) * share
                source.put(source.place("out", self.head, token), d, part.T, inside)
            if "lse" in self.memory:
                place = (source.batch, self.head, source.query_start + token)
                tile.store(self.memory["lse"], place, sums, axes=(2,), mask=inside)
