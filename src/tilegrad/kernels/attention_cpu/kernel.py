"""What all attention kernels on CPUs have: parameters, a source, exponentials, the end of a row.

Scores are exponents of 2 but for the factor that the holes name. `Scored` has blocks of scores^T
(keys down, queries across the lanes) of a block of queries, between two products of an engine.
Invariant: what is not seen is -inf, with a weight of 0.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...ir.symbol import Size, high
from ...tile.build import Body, BodyBuilder
from ...tile.value import index_of
from ..attention.shape import Parameters
from ..attention.softmax import LN2, finite
from .engine import CpuPlan, Vectors, engine_of, up
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
        self.memory = {n: tile.memory(p) for (n, _), p in zip(given, self.b.parameters)}
        source.memory = self.memory
        self.factor = source.holes(0).factor

    def build(self) -> Body:
        """The Body."""
        with tile.into(self.b):
            grid = self.write()
        return self.b.finish((grid,), plan=self.plan, **self.source.notes)

    def keys_seen(self, first: Any, stop: Any, unit: int = 1) -> tuple[Any, Any]:
        """The keys that some of the queries first <= i < stop may see: lower <= j < upper, from a
        multiple of the `unit` on."""
        lower, upper, (low, high_) = 0, self.source.keys, self.x.band
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
        of rows; their sums began with an exponent of 2, if one is given."""
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

    results: tuple[str, ...]  # what there is for each query
    allocate_scratch: Any  # methods; the others come before and after blocks of keys
    prepare: Any
    finish: Any

    engine: Vectors
    first: Any  # queries at work: first <= i < stop
    stop: Any
    scores: Any
    bends: Any | None = None  # where scores under a soft limit are kept for their derivative

    def write(self) -> Size:
        """One program for each block of queries of a head."""
        x, plan = self.x, self.plan
        grid, self.block, self.head, _ = self.source.program("query", plan.queries, x.heads)
        self.key_head = self.head // x.group
        self.allocate_scratch(engine_of(self.source, plan))
        self.work()
        return grid

    def score_place(self) -> Any:
        """Scratch of a block of scores."""
        return self.engine.place(up(self.plan.keys, self.lanes), self.plan.strip)

    @tile.function
    def work(self) -> None:
        """All blocks of keys that some query of the block may see, and the result."""
        x, source, plan, block = self.x, self.source, self.plan, self.block
        if x.band[1] is not None and not source.several:  # those with most keys first
            block = tile.ceil_divide(index_of(x.queries), plan.queries) - 1 - block
        self.first, self.stop = source.find(block, plan.queries)
        if not source.several or tile.less(self.first, self.stop):
            self.holes = source.holes(self.head, True)
            self.prepare()
            self.for_blocks(*self.keys_seen(self.first, self.stop))
            self.finish()
        if source.several:
            source.clear(self.block, "query", [self.head], self.results)

    @tile.function
    def change(self) -> None:
        """What the holes do to a block of scores: nothing where they only hide and all is seen."""
        low, high_ = (None if side is None else index_of(side) for side in self.x.band)
        hidden: Any = self.holes.everywhere
        if not hidden and high_ is not None:
            hidden = tile.less(self.first + high_, self.key + self.count - 1)
        if not self.holes.everywhere and low is not None:
            early = tile.less(self.key, self.stop - 1 + low)
            hidden = early if hidden is False else hidden | early
        if hidden:
            self.change_squares()

    @tile.function
    def change_squares(self) -> None:
        """Square by square of scores: lanes keys down, lanes queries across."""
        n, holes, bounds = self.lanes, self.holes, (0, up(self.plan.keys, self.lanes) - self.lanes)
        for j in tile.range(0, self.count, n, bounds=bounds):
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

    def probability(self, j: Any, c: Any, width: int, base: Any) -> Any:
        """2**(factor * score + base)."""
        score = self.scores[j, c : c + width]
        return self.power(tile.multiply_add(score, self.factor, base))

    def kept(self, j: Any, c: Any, width: int) -> Any | None:
        """What probabilities of a key are multiplied by; None for 1."""
        if not self.x.dropout:
            return None
        keep = self.holes.kept((1, width), self.first + c, self.key + j)
        return tile.where(
            tile.reshape(keep, (width,)), tile.full((), self.holes.grown, self.sum), 0.0
        )
