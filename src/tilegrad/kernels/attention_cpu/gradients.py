"""Attention on CPUs, backward: scores are computed again, block by block; two Bodies.

The first has a block of queries of one head and goes over the keys: the gradient of q. The second
has a block of keys of one key head and goes over the queries of all its heads: the gradients of k
and v. Both make scores^T with queries across, as forward does. Nothing is added to memory that two
programs share, so the order of every sum is fixed. Invariant: a key that no query sees gets the
gradient 0; queries past the end have weights of 0 (their base is -inf).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Memory
from ...tile.build import Body
from ..attention.holes import steepness
from ..attention.shape import AttentionShape, backward_parameters
from ..attention.softmax import times
from .engine import PAIR, TILE, CpuPlan, Product, Vectors, Weights, up
from .score_tiles import Scored, fitting, register_tile, unit_of
from .source import Source, below


def choose(x: AttentionShape, target: Target) -> CpuPlan:
    """The Plan for a shape: as forward, with fewer keys, since more lies beside them."""
    unit = unit_of(x, target)
    if unit:
        keys = min(128, PAIR * max(1, -(-high(x.keys) // PAIR)))
        return CpuPlan(fitting(x, target, 128, PAIR), keys, TILE, 2, TILE, unit)
    lanes = target.lanes(x.sum_dtype)
    rows, across = register_tile(target)
    panel = across * lanes
    queries = max(panel, min(128, up(high(x.queries), panel)))
    keys = min(130 // rows * rows, rows * max(1, -(-high(x.keys) // rows)))
    return CpuPlan(queries, keys, rows, across, lanes)


def backward(
    x: AttentionShape, more: Sequence[Memory], plan: CpuPlan, name: str, results: Sequence[str]
) -> Body:
    """The Body of some results: dq, or dk and dv."""
    given = backward_parameters(x, more, results)
    kind = QueryGradient if "dq" in results else KeyGradient
    return kind(Source(x, plan.lanes), given, plan, name).build()


class Backward(Scored):
    """What both Bodies share: probabilities and the gradient of scores of one block."""

    deep = False  # whether queries go deep in a product

    def allocate_scratch(self, engine: Vectors) -> None:
        """Scratch of a block of scores, of their gradients, and of what each query has one of."""
        plan, self.engine = self.plan, engine
        self.q, self.dout = (engine.queries(name, self.deep) for name in ("q", "dout"))
        self.k = engine.keys("k", plain=True, turned=not self.deep)
        self.v = engine.keys("v", plain=True, turned=False)
        self.scores, self.change_of = self.score_place(), self.score_place()
        self.bends = self.score_place() if self.x.softcap else None
        self.gradient = engine.weights(self.change_of, not self.deep)
        self.base, self.delta = (tile.scratch((plan.queries,), self.sum) for _ in range(2))

    @tile.function
    def take_queries(self) -> None:
        """Queries, gradients of their results; log-sum-exps as bases of powers, and deltas."""
        n = self.lanes
        for block in (self.q, self.dout):
            block.take(self.head, self.first, self.stop)
        for i in tile.range(0, self.plan.queries, n):
            token = self.first + i
            base, delta = self.holes.known(token, n, below(token, n, self.stop))
            self.base[i : i + n], self.delta[i : i + n] = base, delta

    @tile.function
    def gradients(self, weights: Weights | None) -> None:
        """Probabilities as they weigh values, if they are wanted, and the gradient of raw scores
        (without scale), as operands."""
        x, plan, engine, together = self.x, self.plan, self.engine, self.gradient.keys
        rows = engine.whole(self.count)
        for left, right, width, place in (
            (self.k, self.q, x.width, self.scores),
            (self.v, self.dout, x.value_width, self.change_of),
        ):
            engine.product(Product(rows, plan.queries, width, left.plain, right.plain, place))
        self.change()
        bounds, unroll = (0, plan.keys - together), 2 // together
        for c in tile.range(0, plan.queries, plan.panel):
            base, delta = (
                tile.load(place, (c,), (plan.panel,)) for place in (self.base, self.delta)
            )
            for j in tile.range(0, rows, together, unroll=unroll, bounds=bounds):
                of_keys = [
                    self.probability_and_gradient(j + i, c, base, delta) for i in range(together)
                ]
                if weights is not None:
                    weights.put(j, c, [p for p, _ in of_keys])
                self.gradient.put(j, c, [found for _, found in of_keys])

    def probability_and_gradient(self, j: Any, c: Any, base: Any, delta: Any) -> tuple[Any, Any]:
        """Probabilities of a key as they weigh values, and the gradient of its raw scores: 0 past
        the last key, where keys go deep."""
        width = self.plan.panel
        p, keep = self.probability(j, c, width, base), self.kept(j, c, width)
        found = p * (times(tile.load(self.change_of[j, c : c + width]), keep) - delta)
        if self.bends is not None:
            found = found * steepness(tile.load(self.bends[j, c : c + width]))
        if self.gradient.keys > 1:
            found = tile.where(tile.less(j, self.count), found, 0.0)
        return times(p, keep), found


class QueryGradient(Backward):
    """Writes the Body of dq."""

    results = ("dq",)

    def allocate_scratch(self, engine: Vectors) -> None:
        """Scratch."""
        super().allocate_scratch(engine)
        self.result = engine.place(up(self.x.width, self.lanes), self.plan.queries, engine.pad)

    def prepare(self) -> None:
        """Queries; an empty sum."""
        self.take_queries()
        self.engine.clear(self.result, self.plan.queries)

    def step(self) -> None:
        """What a block of keys adds: result^T += keys^T @ gradient of scores^T."""
        for block in (self.k, self.v):
            block.take(self.key_head, self.key, self.count)
        self.gradients(None)
        operands, sizes = (self.k.turned, self.gradient.operand), (self.x.width, self.plan.queries)
        self.engine.product(Product(*sizes, self.count, *operands, self.result, adds=True))

    @tile.function
    def finish(self) -> None:
        """Scale, turn, store."""
        for i in tile.range(0, self.plan.queries, self.lanes):
            self.put("dq", i, self.x.scale)


class KeyGradient(Backward):
    """Writes the Body of dk and dv."""

    deep = True
    of = "key"
    results = ("dk", "dv")

    def allocate_scratch(self, engine: Vectors) -> None:
        """Scratch."""
        super().allocate_scratch(engine)
        self.weights = engine.weights(self.scores, deep=False)
        self.sums = {
            name: engine.place(self.plan.keys, up(self.source.width(name), self.plan.panel), 0)
            for name in ("dk", "dv")
        }

    @tile.function
    def take(self, key: Any, stop: Any) -> None:
        """All blocks of queries that may see some key of the block, and the results."""
        x, source, plan = self.x, self.source, self.plan
        self.key, every = key, stop - key
        self.count = tile.maximum(0, tile.minimum(source.keys - key, every))
        for place in self.sums.values():
            self.engine.clear(place, place.shape[1])
        for block in (self.k, self.v):
            block.take(self.key_head, key, self.count)
        lower, upper = self.seen(key, stop, of_keys=True)
        most = max(0, high(x.queries) - 1)
        for group in tile.range(x.group):
            self.head = self.key_head * x.group + group
            self.holes = source.holes(self.head, True)
            for first in tile.range(lower, upper, plan.queries, bounds=(0, most)):
                self.first, self.stop = first, tile.minimum(first + plan.queries, upper)
                self.step()
        for name in self.sums:
            self.put_keys(name, every)

    def step(self) -> None:
        """What a block of queries adds."""
        self.take_queries()
        self.gradients(self.weights)
        rows, depth = self.engine.whole(self.count), self.stop - self.first
        for name, left, right in (("dv", self.weights, self.dout), ("dk", self.gradient, self.q)):
            operands, width = (left.operand, right.turned), self.source.width(name)
            self.engine.product(Product(rows, width, depth, *operands, self.sums[name], True))

    @tile.function
    def put_keys(self, name: str, every: Any) -> None:
        """Store the sums of the block; 0 for keys that are never seen."""
        n, source, sums = self.lanes, self.source, self.sums[name]
        bounds, scale = (0, self.plan.keys - 1), self.x.scale if name == "dk" else 1.0
        zeros = tile.zeros((n,), self.sum)
        seen, unseen = (0, self.count, True), (self.count, every, False)
        for first, stop, there in (seen, unseen) if "key_lengths" in self.x.extras else (seen,):
            for r in tile.range(first, stop, bounds=bounds):
                place = source.place(name, self.key_head, self.key + r)
                for d in range(0, source.width(name), n):
                    line = tile.load(sums, (r, d), (n,), axes=(1,)) if there else zeros
                    source.put(place, d, line * scale)
