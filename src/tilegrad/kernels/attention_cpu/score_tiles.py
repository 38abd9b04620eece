"""Attention on CPUs: what all its kernels have, forward and backward by tiles of scores.

Every kernel has parameters, a source, exponentials, and the end of a row (`BodyWriter`). Scores are
exponents of 2 but for the factor that the holes name. `Scored` has blocks of scores^T (keys down,
queries across the lanes) of a block of queries, between two products of an engine: the maximum and
the sum of a row of softmax are plain vector operations.

`Forward` has a block of queries of one head. For each block of keys it computes scores^T, which
stay in the cache, then adds values^T @ probabilities^T to the result^T, some queries at a time on a
matrix unit. Queries are brought once for a program, keys and values once for each block, as the
engine reads them.

Backward computes scores again, block by block, in two Bodies. `QueryGradient` has a block of
queries of one head and goes over the keys: the gradient of q. `KeyGradient` has a block of keys of
one key head and goes over the queries of all its heads: the gradients of k and v. Nothing is added
to memory that two programs share, so the order of every sum is fixed.

Invariant: a result depends on the Plan alone, never on workers, batch or other heads; what is not
seen is -inf, with a weight of 0, and a query that sees nothing gives 0 and a log-sum-exp of -inf;
nothing is read past the keys that are seen. A key that no query sees gets the gradient 0; queries
past the end have weights of 0 (their base is -inf).
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...ir.symbol import round_up
from ...tile.build import Body, BodyBuilder
from ..attention.shape import Parameters
from ..attention.softmax import clamped, finite, first_of, times
from ..attention.tile_order import block_count, reached
from .engine import CpuPlan, Product, TileUnit, Vectors, Weights
from .source import Source

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
    """Writes one Body: a program has a block of tokens of a head, or of all that share one."""

    of_keys = False  # whose tokens
    shared = False  # whether it has all heads that share a key head
    results: tuple[str, ...] = ("out",)  # what there is for each of the tokens
    take: Any  # methods: a block of tokens, a block of keys
    step: Any

    def __init__(
        self, source: Source, given: Parameters, plan: CpuPlan, name: str, parts: int = 1
    ) -> None:
        self.source, self.x, self.plan = source, source.x, plan
        self.parts = parts  # of the keys, which programs share
        self.lanes, self.sum = plan.lanes, source.x.dtype.wide
        self.b = BodyBuilder(name, given)
        self.memory = source.memory = tile.memories(self.b)
        self.factor = source.holes(0).factor

    @property
    def each(self) -> int:
        """Tokens of a block."""
        return self.plan.keys if self.of_keys else self.plan.queries

    def build(self) -> Body:
        """The Body."""
        x, heads = self.x, self.x.key_heads if self.shared else self.x.heads
        with tile.into(self.b):
            blocks = block_count(x, self.each, self.memory, self.of_keys)
            grid = (x.batch, heads, blocks, self.parts)
            self.source.batch, self.head, self.block, self.part = tile.grid(*grid)
            self.key_head = self.head if self.shared else self.head // x.group
            self.allocate_scratch()
            self.take_block()
        return self.b.finish(grid, plan=self.plan, **self.source.notes)

    def allocate_scratch(self) -> None:
        """Scratch of the program, if it needs some."""

    @tile.function
    def take_block(self) -> None:
        """The block of tokens by its number, if there is one; those of no sequence."""
        x, source = self.x, self.source
        each = x.group if self.shared and not self.of_keys else 1
        heads = [self.head * each + number for number in range(each)]
        first, stop = source.find(self.block, self.each, self.of_keys)
        if not source.several or first < stop:
            self.take(first, stop)
        if source.several and self.results[0] in self.memory:
            source.clear(self.block, self.of_keys, heads, self.results)

    def seen(self, first: Any, stop: Any, unit: int = 1) -> tuple[Any, Any]:
        """The keys that some of the queries first <= i < stop may see, or the queries that may see
        some of these keys: lower <= j < upper, from a multiple of the `unit` on."""
        count = self.source.queries if self.of_keys else self.source.keys
        lower, upper = reached(self.x.sides(self.of_keys), first, stop, count)
        unit = self.plan.keys if self.plan.aligned else max(1, unit)
        return lower // unit * unit, upper

    @tile.function
    def for_blocks(self, lower: Any, upper: Any) -> None:
        """`step` for blocks of the keys lower <= j < upper."""
        for key in tile.range(lower, upper, self.plan.keys):
            self.key, self.count = key, tile.minimum(upper - key, self.plan.keys)  # first, how many
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

    def weight(self, score: Any, most: Any) -> Any:
        """2**(factor * (score - most)): 1 where the score is the greatest, so that a key which
        weighs 1 leaves its value as it is."""
        return self.power((score - most) * self.factor)


class Scored(BodyWriter):
    """Blocks of scores of a block of queries: what is done to them between the products."""

    prepare: Any  # methods, before and after blocks of keys
    finish: Any

    scores: Any
    result: Any  # sums of each query, turned
    bends: Any | None = None  # where scores under a soft limit are kept for their derivative

    def __init__(self, source: Source, given: Parameters, plan: CpuPlan, name: str) -> None:
        super().__init__(source, given, plan, name)
        self.engine = (TileUnit if plan.unit else Vectors)(source, plan)

    def score_place(self) -> Any:
        """Scratch of a block of scores."""
        return self.engine.place(round_up(self.plan.keys, self.lanes), self.plan.strip)

    def take(self, first: Any, stop: Any) -> None:
        """All blocks of keys that some query of the block may see, and the result."""
        self.first, self.stop = first, stop  # queries at work: first <= i < stop
        self.holes = self.source.holes(self.head, True)
        self.prepare()
        self.for_blocks(*self.seen(first, stop))
        self.finish()

    @tile.function
    def change(self) -> None:
        """What the holes do to a block of scores: nothing where they only hide and all is seen."""
        n, holes = self.lanes, self.holes
        hidden: Any = holes.changed or "mask" in self.x.extras
        low, high_ = (None, None) if hidden else self.x.band
        if high_ is not None:
            hidden |= self.first + high_ < self.key + self.count - 1
        if low is not None:
            hidden |= self.key < self.stop - 1 + low
        if hidden:  # square by square of scores: lanes keys down, lanes queries across
            for j in tile.range(0, self.count, n, bounds=(0, round_up(self.plan.keys, n) - n)):
                for i in tile.range(0, self.plan.strip, n):
                    s, at = tile.load(self.scores, (j, i), (n, n)), (self.first + i, self.key + j)
                    if holes.changed:
                        s = holes.bent(s)
                        if self.bends is not None:
                            tile.store(self.bends, (j, i), s)
                        s = holes.raised(s, *at)
                    tile.store(self.scores, (j, i), holes.hidden(s, *at, 0, False))

    @tile.function
    def put(self, name: str, i: Any, factor: Any) -> tuple[Any, Any | None]:
        """Store what was summed for the queries from i on, times a factor, turned. Gives the first
        of them, and which there are."""
        n, source, token = self.lanes, self.source, self.first + i
        inside = first_of(n, source.queries - token)
        place = source.place(name, self.head, token)
        for d in tile.range(0, self.x.columns(name), n):
            part = self.result[d : d + n, i : i + n] * factor
            source.put(place, d, part.T, inside)
        return token, inside

    def kept(self, j: Any, c: Any, width: int) -> Any | None:
        """What probabilities of a key are multiplied by; None for 1."""
        keep = self.holes.kept((1, width), self.first + c, self.key + j)
        return None if keep is None else tile.reshape(keep, (width,))


# ---- forward ------------------------------------------------------------------------------------


class Forward(Scored):
    """Writes the forward Body."""

    def allocate_scratch(self) -> None:
        """Scratch."""
        x, plan, engine = self.x, self.plan, self.engine
        self.q = engine.queries("q", deep=False)
        self.k = engine.keys("k", plain=True, turned=False)
        self.v = engine.keys("v", plain=False, turned=True)
        self.scores = self.score_place()
        self.weights = engine.weights(self.scores, deep=True)
        self.result = engine.place(round_up(x.value_width, self.lanes), plan.queries, engine.pad)
        self.most, self.total, self.decay = (
            tile.scratch((plan.queries,), self.sum) for _ in range(3)
        )

    @tile.function
    def prepare(self) -> None:
        """Queries; sums as they begin."""
        queries = self.plan.queries
        self.q.take(self.head, self.first, self.stop - self.first)
        self.most[0:queries], self.total[0:queries] = -tile.INF, 0.0
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
                    self.count = clamped(count, 0, self.stop + x.band[1] - self.key)
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
                self.scores[j, 0:strip] = -tile.INF
        for c in tile.range(0, strip, width):
            at = offset + c
            before = tile.load(self.most, (at,), (width,))
            top = tile.full((width,), -tile.INF, self.sum)
            for j in tile.range(0, rows, unroll=4):
                top = greater(tile.load(self.scores[j, c : c + width]), top)
            most = greater(top, before)
            base = finite(most)
            decay = self.weight(before, base)
            total = self.total[at : at + width] * decay
            self.most[at : at + width] = most
            self.decay[at : at + width] = decay
            unroll, bounds = 2 // together, (0, keys - together)
            for j in tile.range(0, rows, together, unroll=unroll, bounds=bounds):
                scores = [self.scores[j + n, c : c + width] for n in range(together)]
                found = [self.weight(score, base) for score in scores]
                kept = [times(p, self.kept(j + n, c, width)) for n, p in enumerate(found)]
                self.weights.put(j, c, kept)
                total = total + reduce(add, found)
            self.total[at : at + width] = total

    @tile.function
    def finish(self) -> None:
        """Divide by the sums, turn, store; log-sum-exps."""
        n, source = self.lanes, self.source
        for i in tile.range(0, self.plan.queries, n):
            most, total = (tile.load(place, (i,), (n,)) for place in (self.most, self.total))
            share, sums = self.holes.ended(most, total)
            token, inside = self.put("out", i, share)
            if "lse" in self.memory:
                place = (source.batch, self.head, source.query_start + token)
                tile.store(self.memory["lse"], place, sums, axes=(2,), mask=inside)


# ---- backward -----------------------------------------------------------------------------------


class Backward(Scored):
    """What both Bodies share: probabilities and the gradient of scores of one block."""

    def allocate_scratch(self) -> None:
        """Scratch of a block of scores, of their gradients, and of what each query has one of."""
        plan, engine = self.plan, self.engine
        self.q, self.dout = (engine.queries(name, self.of_keys) for name in ("q", "dout"))
        self.k = engine.keys("k", plain=True, turned=not self.of_keys)
        self.v = engine.keys("v", plain=True, turned=False)
        self.scores, self.change_of = self.score_place(), self.score_place()
        self.bends = self.score_place() if self.x.softcap else None
        self.gradient = engine.weights(self.change_of, not self.of_keys)
        self.base, self.delta = (tile.scratch((plan.queries,), self.sum) for _ in range(2))

    @tile.function
    def take_queries(self) -> None:
        """Queries, gradients of their results; log-sum-exps as bases of powers, and deltas."""
        n = self.lanes
        for block in (self.q, self.dout):
            block.take(self.head, self.first, self.stop - self.first)
        for i in tile.range(0, self.plan.queries, n):
            token = self.first + i
            base, delta = self.holes.known(token, n, self.stop)
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
        for c in tile.range(0, plan.queries, plan.panel):
            base, delta = (
                tile.load(place, (c,), (plan.panel,)) for place in (self.base, self.delta)
            )
            unroll, bounds = 2 // together, (0, plan.keys - together)
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
        score = self.scores[j, c : c + width]
        p = self.power(tile.multiply_add(score, self.factor, base))
        keep = self.kept(j, c, width)
        found = p * (times(self.change_of[j, c : c + width], keep) - delta)
        if self.bends is not None:
            bent = tile.load(self.bends[j, c : c + width])
            found = times(found, self.holes.slope(bent))
        if self.gradient.keys > 1:
            found = tile.where(j < self.count, found, 0.0)
        return times(p, keep), found


class QueryGradient(Backward):
    """Writes the Body of dq."""

    results = ("dq",)

    def allocate_scratch(self) -> None:
        """Scratch."""
        super().allocate_scratch()
        wide = round_up(self.x.width, self.lanes)
        self.result = self.engine.place(wide, self.plan.queries, self.engine.pad)

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

    of_keys = shared = True
    results = ("dk", "dv")

    def allocate_scratch(self) -> None:
        """Scratch."""
        super().allocate_scratch()
        self.weights = self.engine.weights(self.scores, deep=False)
        wide = {name: round_up(self.x.columns(name), self.plan.panel) for name in self.results}
        self.sums = {n: self.engine.place(self.plan.keys, w, 0) for n, w in wide.items()}

    @tile.function
    def take(self, key: Any, stop: Any) -> None:
        """All blocks of queries that may see some key of the block, and the results."""
        x, source, plan = self.x, self.source, self.plan
        self.key, every = key, stop - key
        self.count = clamped(source.keys - key, 0, every)
        for place in self.sums.values():
            self.engine.clear(place, place.shape[1])
        for block in (self.k, self.v):
            block.take(self.key_head, key, self.count)
        lower, upper = self.seen(key, stop)
        for group in tile.range(x.group):
            self.head = self.key_head * x.group + group
            self.holes = source.holes(self.head, True)
            for first in tile.range(lower, upper, plan.queries):
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
            operands, width = (left.operand, right.turned), self.x.columns(name)
            self.engine.product(Product(rows, width, depth, *operands, self.sums[name], True))

    @tile.function
    def put_keys(self, name: str, every: Any) -> None:
        """Store the sums of the block; 0 for keys that are never seen."""
        n, source, sums = self.lanes, self.source, self.sums[name]
        scale = self.x.scale if name == "dk" else 1.0
        for r in tile.range(every):
            place = source.place(name, self.key_head, self.key + r)
            for d in range(0, self.x.columns(name), n):
                line = sums[r, d : d + n] * scale
                if "key_lengths" in self.x.extras:
                    line = tile.where(r < self.count, line, 0.0)
                source.put(place, d, line)


BACKWARD = (QueryGradient, KeyGradient)  # all gradients
