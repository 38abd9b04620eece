"""Attention on CPUs: what all its kernels have, and forward by tiles of scores.

Every kernel has parameters, a source, exponentials, and the end of a row (`BodyWriter`). Scores are
exponents of 2 but for the factor that the holes name. `Scored` has blocks of scores^T (keys down,
queries across the lanes) of a block of queries, between two products of an engine: the maximum and
the sum of a row of softmax are plain vector operations.

`Forward` has a block of queries of one head. For each block of keys it computes scores^T, which
stay in the cache, then adds values^T @ probabilities^T to the result^T, some queries at a time on a
matrix unit. Queries are brought once for a program, keys and values once for each block, as the
engine reads them.

Invariant: a result depends on the Plan alone, never on workers, batch or other heads; what is not
seen is -inf, with a weight of 0, and a query that sees nothing gives 0 and a log-sum-exp of -inf;
nothing is read past the keys that are seen.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from ... import tile
from ...core.config import invariant
from ...core.dtype import bfloat16, float32, int32
from ...core.target import Target
from ...ir.symbol import Size, high
from ...tile.build import Body, BodyBuilder
from ...tile.value import index_of
from ..attention.shape import AttentionShape, Parameters, memories
from ..attention.softmax import LN2, finite, times
from .engine import PAIR, TILE, CpuPlan, Product, Vectors, engine_of, up
from .source import Source, below

MAGIC = 12582912.0  # 1.5 * 2**23: added to a small float32, its low bits are the nearest integer
# 2**x - 1 = x * (these, from the lowest power on), |x| <= 1/2; off by 9e-8 and 3e-6 of 2**x
EXACT = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
SHORT = (0.6931241750717163, 0.24024099111557007, 0.055906426161527634, 0.009582852944731712)


def greater(x: Any, y: Any) -> Any:
    """The greater of two; y where one is nan."""
    return tile.where(y < x, x, y)


class BodyWriter:
    """Writes one Body."""

    head: Any
    key_head: Any
    write: Any  # the method that says what a program does; it gives the grid
    step: Any  # the one that takes a block of keys
    key: Any  # the first key of the block, and how many it has
    count: Any

    def __init__(self, source: Source, given: Parameters, plan: CpuPlan, name: str) -> None:
        self.source, self.x, self.plan = source, source.x, plan
        self.lanes, self.sum = plan.lanes, source.x.sum_dtype
        self.b = BodyBuilder(name, given)
        self.memory = source.memory = memories(self.b)
        self.factor = source.holes(0).factor

    def build(self) -> Body:
        """The Body."""
        with tile.into(self.b):
            grid = self.write()
        return self.b.finish((grid,), plan=self.plan, **self.source.notes)

    def seen(self, first: Any, stop: Any, unit: int = 1, of_keys: bool = False) -> tuple[Any, Any]:
        """The keys that some of the queries first <= i < stop may see, or the queries that may see
        some of these keys: lower <= j < upper, from a multiple of the `unit` on."""
        low, high_ = self.x.sides(of_keys)
        lower, upper = 0, self.source.queries if of_keys else self.source.keys
        if high_ is not None:
            upper = tile.minimum(upper, stop + index_of(high_))
        if low is not None:
            lower = self.plan.begin(tile.maximum(0, first + index_of(low)), unit)
        return lower, upper

    @tile.function
    def for_blocks(self, lower: Any, upper: Any) -> None:
        """`step` for blocks of the keys lower <= j < upper."""
        most = max(0, high(self.x.keys) - 1)
        for key in tile.range(lower, upper, self.plan.keys, bounds=(0, most)):
            self.key, self.count = key, tile.minimum(upper - key, self.plan.keys)
            self.step()

    def power(self, x: Any) -> Any:
        """2**x for x <= 0 or little more: 0 where it would be less than the least normal number."""
        if self.sum is not float32:
            return tile.exp2(x)
        terms = EXACT if self.x.dtype is float32 else SHORT
        x = tile.where(x < -127.0, -127.0, x)  # a nan stays
        shifted = x + MAGIC
        rest = x - (shifted - MAGIC)
        total: Any = terms[-1]
        for term in (*terms[-2::-1], 1.0):
            total = tile.multiply_add(total, rest, term)
        exponent = tile.bitcast(shifted, int32) << 23
        return tile.bitcast(tile.bitcast(total, int32) + exponent, float32)

    def ended(self, most: Any, total: Any, begun: Any | None) -> tuple[Any, Any]:
        """What sums over values are multiplied by (0 where nothing was seen), and the log-sum-exp
        of rows; their sums began with an exponent of 2, if one is given. Where all scores are one
        that is far below 0, `power` gives any number, but one for all: a sum may be negative."""
        shrink: Any = 1.0
        if begun is not None:
            before, most = most, greater(begun, most)
            base = finite(most)
            shrink = self.power(before - base)
            total = tile.multiply_add(total, shrink, self.power(begun - base))
        none = total == 0.0
        sums = tile.where(none, -tile.INF, most + tile.log2(total)) * LN2
        return tile.where(none, 0.0, shrink / total), sums


class Scored(BodyWriter):
    """Blocks of scores of a block of queries: what is done to them between the products."""

    of = "query"  # whose tokens a program has, of one head or key head
    results: tuple[str, ...]  # what there is for each of them
    allocate_scratch: Any  # methods; the others come before and after blocks of keys
    prepare: Any
    finish: Any

    engine: Vectors
    first: Any  # queries at work: first <= i < stop
    stop: Any
    scores: Any
    result: Any  # sums of each query, turned
    bends: Any | None = None  # where scores under a soft limit are kept for their derivative

    def write(self) -> Size:
        """One program for each block of tokens of a head."""
        x, plan, of_keys = self.x, self.plan, self.of == "key"
        size, heads = (plan.keys, x.key_heads) if of_keys else (plan.queries, x.heads)
        grid, block, head, _ = self.source.program(self.of, size, heads)
        self.head, self.key_head = head, head if of_keys else head // x.group
        self.allocate_scratch(engine_of(self.source, plan))
        self.work(block, size, head)
        return grid

    def score_place(self) -> Any:
        """Scratch of a block of scores."""
        return self.engine.place(up(self.plan.keys, self.lanes), self.plan.strip)

    @tile.function
    def work(self, number: Any, size: int, head: Any) -> None:
        """A block of tokens by its number, if there is one; those of no sequence."""
        source, block = self.source, number
        if self.of == "query" and self.x.band[1] is not None and not source.several:
            block = tile.ceil_divide(index_of(self.x.queries), size) - 1 - block  # most keys first
        first, stop = source.find(block, size, self.of)
        if not source.several or tile.less(first, stop):
            self.take(first, stop)
        if source.several:
            source.clear(number, self.of, [head], self.results)

    def take(self, first: Any, stop: Any) -> None:
        """All blocks of keys that some query of the block may see, and the result."""
        self.first, self.stop = first, stop
        self.holes = self.source.holes(self.head, True)
        self.prepare()
        self.for_blocks(*self.seen(first, stop))
        self.finish()

    @tile.function
    def change(self) -> None:
        """What the holes do to a block of scores: nothing where they only hide and all is seen."""
        n, holes = self.lanes, self.holes
        hidden: Any = holes.changed or "mask" in self.x.extras
        band = (None, None) if hidden else self.x.band
        low, high_ = (None if side is None else index_of(side) for side in band)
        if high_ is not None:
            hidden = tile.less(self.first + high_, self.key + self.count - 1)
        if low is not None:
            early = tile.less(self.key, self.stop - 1 + low)
            hidden = early if hidden is False else hidden | early
        if hidden:  # square by square of scores: lanes keys down, lanes queries across
            for j in tile.range(0, self.count, n, bounds=(0, up(self.plan.keys, n) - n)):
                for i in tile.range(0, self.plan.strip, n):
                    s, at = tile.load(self.scores, (j, i), (n, n)), (self.first + i, self.key + j)
                    if holes.changed:
                        s = holes.bent(s)
                        if self.bends is not None:
                            tile.store(self.bends, (j, i), s)
                        s = holes.raised(s, *at)
                    seen = holes.seen((n, n), *at, 0, False)
                    if seen is not None:
                        s = tile.where(seen, s, -tile.INF)
                    tile.store(self.scores, (j, i), s)

    @tile.function
    def put(self, name: str, i: Any, factor: Any) -> tuple[Any, Any | None]:
        """Store what was summed for the queries from i on, times a factor, turned. Gives the first
        of them, and which there are."""
        n, source, token = self.lanes, self.source, self.first + i
        inside = below(token, n, source.queries)
        place = source.place(name, self.head, token)
        for d in tile.range(0, source.width(name), n):
            part = tile.load(self.result, (d, i), (n, n)) * factor
            source.put(place, d, part.T, inside)
        return token, inside

    def probability(self, j: Any, c: Any, width: int, base: Any) -> Any:
        """2**(factor * score + base)."""
        score = self.scores[j, c : c + width]
        return self.power(tile.multiply_add(score, self.factor, base))

    def kept(self, j: Any, c: Any, width: int) -> Any | None:
        """What probabilities of a key are multiplied by; None for 1."""
        keep = self.holes.kept((1, width), self.first + c, self.key + j)
        return None if keep is None else tile.reshape(keep, (width,))


# ---- forward ------------------------------------------------------------------------------------


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
    rows, across = register_tile(target)
    queries = fitting(x, target, 128 // (across * lanes) * across * lanes, across * lanes)
    keys = min(256 // rows * rows, up(high(x.keys), rows))
    return CpuPlan(queries, max(rows, keys), rows, across, lanes, aligned=invariant())


def register_tile(target: Target) -> tuple[int, int]:
    """Rows and vectors of a register tile."""
    if target.multiplies_by_lane:
        return 8, 2
    return (13, 2) if target.vector_registers >= 32 else (5, 2)


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
        self.engine.clear(self.result, queries)

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
                kept = [times(p, self.kept(j + n, c, width)) for n, p in enumerate(found)]
                self.weights.put(j, c, kept)
                total = total + reduce(add, found)
            self.total[at : at + width] = total

    @tile.function
    def finish(self) -> None:
        """Divide by the sums, turn, store; log-sum-exps."""
        n, source = self.lanes, self.source
        for i in tile.range(0, self.plan.queries, n):
            begun = self.holes.begun()
            most, total = (tile.load(place, (i,), (n,)) for place in (self.most, self.total))
            share, sums = self.ended(most, total, begun)
            token, inside = self.put("out", i, share)
            if "lse" in self.memory:
                place = (source.batch, self.head, source.query_start + token)
                tile.store(self.memory["lse"], place, sums, axes=(2,), mask=inside)
