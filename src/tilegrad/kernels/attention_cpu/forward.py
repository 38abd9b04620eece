"""Attention on CPUs, forward: tiles of scores that stay in the cache, queries along the lanes.

A program has a block of queries of one head. For each block of keys it computes scores^T (keys
down, queries across the lanes of vectors), so that the maximum and the sum of a row of softmax
are plain vector operations, then adds values^T @ probabilities^T to the result^T. Queries are
turned once for a program; keys and values are copied as they lie, once for each block, widened
to the accumulator's dtype. Scores are kept in powers of two (times log2 e).

Invariant: a result depends on the Plan alone, never on workers, batch or other heads; a query
that sees nothing gives 0 and a log-sum-exp of -inf; nothing is read past the keys that are seen.

Long because the kernel stands on one page: `Forward` writes one Body.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.config import invariant
from ...core.dtype import float32, int32, int64
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
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body
from ..attention.dropout import keep as dropout_keep
from ..attention.shape import AttentionShape, parameters
from .tiles import LOG2_E, PAD, Builder, CpuPlan

# extras that these kernels read
TAKEN = (
    "bias",
    "mask",
    "slopes",
    "sinks",
    "key_lengths",
    "query_starts",
    "key_starts",
    "key",
    "offset",
)
FAR = 1 << 30  # more than any token's number


def fitting(x: AttentionShape, target: Target, most: int, least: int) -> int:
    """Queries of a program, a multiple of `least`: few enough that every worker has several."""
    count, heads = max(1, high(x.queries)), high(x.batch) * x.heads
    queries = most
    while queries > 2 * least and heads * -(-count // queries) < 4 * target.cores:
        queries //= 2
    return min(queries, -(-count // least) * least)


def choose(x: AttentionShape, target: Target) -> CpuPlan:
    """The Plan for a shape: blocks that leave scores, keys and values in the L2 cache."""
    lanes = target.lanes(x.sum_dtype)
    rows, across = (13, 2) if target.vector_registers >= 32 else (5, 2)
    queries = fitting(x, target, 128 // (across * lanes) * across * lanes, across * lanes)
    keys = min(256 // rows * rows, rows * -(-high(x.keys) // rows))
    return CpuPlan(queries, max(rows, keys), rows, across, lanes, aligned=invariant())


class Forward(Builder):
    """Builds the forward Body."""

    def __init__(
        self,
        x: AttentionShape,
        more: Sequence[Memory],
        plan: CpuPlan,
        name: str,
        keeps_sums: bool = True,
    ) -> None:
        given = parameters(x, more)
        super().__init__(x, given if keeps_sums else given[:-1], plan, name)
        self.set_factor()

    def set_factor(self) -> None:
        """How raw scores become powers of two."""
        x = self.x
        # What is done to scores besides hiding some: then they are scaled in a pass of their own.
        self.changed = bool(x.softcap) or x.scale <= 0 or bool({"bias", "slopes"} & {*x.extras})
        self.factor = 1.0 if self.changed else x.scale * LOG2_E
        self.offset: Size = 0  # of the queries at work among those of the program
        self.in_a_row = "query_starts" in x.extras  # sequences one after the other
        if self.in_a_row:
            self.limits = self.b.allocate((3, self.plan.queries), int32, "l2")

    def build(self) -> Body:
        """The Body: one program for each block of queries, those with most keys first."""
        b, x, plan = self.b, self.x, self.plan
        blocks = ceil_divide(x.queries, plan.queries)
        grid = multiply(multiply(x.batch, x.heads), blocks)
        p = b.program(0, grid)
        block = modulo(p, blocks)
        if x.band[1] is not None:
            block = combine(combine(blocks, 1, -1), block, -1)
        rest = floor_divide(p, blocks)
        self.head, self.batch = modulo(rest, x.heads), floor_divide(rest, x.heads)
        self.key_head = floor_divide(self.head, x.group)
        self.first = multiply(block, plan.queries)
        self.places()
        self.prepare()
        self.keys_of()
        b.loop(
            "keys",
            self.lower,
            self.upper,
            plan.keys,
            self.block,
            bounds=(0, max(0, high(x.keys) - 1)),
        )
        self.finish()
        return b.finish((grid,), plan=plan)

    def places(self) -> None:
        """Scratch."""
        x, plan, n = self.x, self.plan, self.lanes
        deep = -(-x.width // n) * n
        wide = -(-x.value_width // n) * n
        tall = -(-plan.keys // n) * n
        self.turned = self.scratch(deep, plan.queries)
        self.key_rows = self.scratch(plan.keys, deep + PAD)
        self.value_rows = self.scratch(plan.keys, wide + PAD)
        self.scores = self.scratch(max(tall, plan.keys), plan.queries + PAD)
        self.result = self.scratch(wide, plan.queries)
        self.most, self.total, self.decay = (self.scratch(plan.queries) for _ in range(3))

    def prepare(self) -> None:
        """Queries turned; sums empty (or a sink in them)."""
        b, x, plan = self.b, self.x, self.plan
        self.take_queries()
        most, total = self.constant(-math.inf), self.constant(0.0)
        if "sinks" in x.extras:
            found = b.cast(b.load(self.memory["sinks"], (self.head,)), self.sum)
            most = b.apply("multiply", found, self.constant(LOG2_E))
            seen = b.apply("not_equal", found, self.constant(-math.inf))
            total = b.apply("where", seen, self.constant(1.0), total)
        for place, value in ((self.most, most), (self.total, total)):
            b.store(place, b.broadcast(value, (plan.queries,)), (0,), (0,))
        zeros = b.constant(0, self.sum, (plan.queries,))

        def clear(r: Size, _: list[Node]) -> Sequence[Node]:
            b.store(self.result, zeros, (r, 0), (1,))
            return ()

        b.loop("clear", 0, self.result.shape[0], 1, clear)

    def take_queries(self) -> None:
        """Queries as the products read them."""
        x = self.x
        self.turn_rows("q", self.batch, self.head, self.first, x.queries, x.width, self.turned)

    def keys_of(self) -> None:
        """The keys that some query of the block may see: lower <= j < upper."""
        b, x, plan = self.b, self.x, self.plan
        self.stop = minimum(combine(self.first, plan.queries, 1), x.queries)
        if self.in_a_row:
            self.find_limits()
            return
        self.lower, self.upper = 0, x.keys
        if "key_lengths" in x.extras:
            length = b.cast(b.load(self.memory["key_lengths"], (self.batch,)), int64)
            length = b.apply("minimum", length, b.index(x.keys))
            self.upper = b.atom("length", length, 0, high(x.keys))
        low_band, high_band = x.band
        if high_band is not None:
            self.upper = minimum(self.upper, combine(self.stop, high_band, 1))
        if low_band is not None:
            self.lower = plan.begin(maximum(0, combine(self.first, low_band, 1)))

    def find_limits(self) -> None:
        """The keys that each query sees; those of the block are from the least to the most."""
        b, x, queries = self.b, self.x, self.plan.queries
        self.each_limit()
        rows = [b.load(self.limits, (number, 0), (queries,), (1,)) for number in range(2)]
        wanted = ((0, "min"), (1, "max"), (0, "max"), (1, "min"))
        found = [
            b.cast(b.add(ops.reduce(rows[row], axis=0, kind=kind)), int64) for row, kind in wanted
        ]
        found[1] = b.apply("minimum", found[1], b.index(combine(x.keys, 1, -1)))
        found[0] = b.apply("maximum", found[0], b.index(0))
        top = max(1, high(x.keys))
        self.lower = self.plan.begin(b.atom("lower", found[0], 0, FAR))
        self.upper = combine(b.atom("upper", found[1], -1, top - 1), 1, 1)
        self.all_see = b.atom("begin", found[2], 0, FAR), b.atom("last", found[3], -1, FAR)

    def each_limit(self) -> None:
        """For each query the first and the last key it sees, and how far its sequences are apart.

        A query of no sequence sees keys FAR to -1: none.
        """
        b, n, queries = self.b, self.lanes, self.plan.queries
        count = combine(self.memory["query_starts"].shape[0], 1, -1)

        def some(c: Size, _: list[Node]) -> Sequence[Node]:
            token = self.steps(n, combine(self.first, c, 1), int32)

            def sequence(number: Size, carried: list[Node]) -> Sequence[Node]:
                own, *limits = self.limits_in(number, token)
                return [b.apply("where", own, new, old) for new, old in zip(limits, carried)]

            begin = [b.constant(value, int32, (n,)) for value in (FAR, -1, 0)]
            found = b.loop("sequence", 0, count, 1, sequence, begin)
            for number, value in enumerate(found):
                b.store(self.limits, value, (number, c), (1,))
            return ()

        b.loop("limits", 0, queries, n, some, bounds=(0, queries - n))

    def limits_in(self, number: Size, token: Node) -> list[Node]:
        """Which tokens belong to a sequence; the keys these see, and how far it is shifted."""
        b, band = self.b, self.x.band
        index = (number, combine(number, 1, 1))
        first, end = (b.load(self.memory["query_starts"], (i,)) for i in index)
        key, stop = (b.load(self.memory["key_starts"], (i,)) for i in index)
        own = b.apply("less_equal", first, token)
        own = b.apply("bit_and", own, b.apply("less", token, end))
        shift = b.apply("subtract", first, key)  # of a query's number to its key's
        place = b.apply("subtract", token, shift)
        least, most = key, b.apply("subtract", stop, b.constant(1, int32))
        if band[0] is not None:
            near = b.apply("add", place, b.cast(b.index(band[0]), int32))
            least = b.apply("maximum", least, near)
        if band[1] is not None:
            near = b.apply("add", place, b.cast(b.index(band[1]), int32))
            most = b.apply("minimum", most, near)
        return [own, least, most, shift]

    # ---- a block of keys ------------------------------------------------------------------

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """Scores, softmax, and what they add to the result."""
        self.key = key
        self.count = minimum(combine(self.upper, key, -1), self.plan.keys)
        self.take_keys()
        self.score()
        self.change()
        self.soften()
        self.take_values()
        self.gather_values()
        return ()

    def take_keys(self) -> None:
        """A block of keys in scratch."""
        self.copy_rows(
            "k", self.batch, self.key_head, self.key, self.count, self.x.width, self.key_rows
        )

    def take_values(self) -> None:
        """A block of values in scratch."""
        self.copy_rows(
            "v",
            self.batch,
            self.key_head,
            self.key,
            self.count,
            self.x.value_width,
            self.value_rows,
        )

    def score(self) -> None:
        """scores[j, i] = key j times query i."""

        def left(step: Size, first: Size, rows: int) -> Node:
            return self.b.load(self.key_rows, (first, step), (rows, 1), (0, 1))

        self.product(self.count, self.x.width, left, self.turned, self.scores)

    def change(self) -> None:
        """Scale, cap, bias; hide what is not seen."""
        x, b = self.x, self.b
        if self.changed or "mask" in x.extras:
            self.change_squares()
            return
        low_band, high_band = x.band
        hidden: Node | None = None
        last = combine(combine(self.key, self.count, 1), 1, -1)
        if self.in_a_row:
            begin, end = self.all_see
            hidden = b.apply("bit_or", b.less(self.key, begin), b.less(end, last))
            b.branch(hidden, lambda: self.change_squares())
            return
        if high_band is not None:
            hidden = b.less(combine(self.first, high_band, 1), last)
        if low_band is not None:
            low_hidden = b.less(self.key, combine(combine(self.stop, 1, -1), low_band, 1))
            hidden = low_hidden if hidden is None else b.apply("bit_or", hidden, low_hidden)
        if hidden is not None:
            b.branch(hidden, lambda: self.change_squares())

    def change_squares(self) -> None:
        """Square by square of scores: lanes keys down, lanes queries across."""
        b, n = self.b, self.lanes

        def down(j: Size, _: list[Node]) -> Sequence[Node]:
            def across(i: Size, _: list[Node]) -> Sequence[Node]:
                score = b.load(self.scores, (j, i), (n, n), (0, 1))
                b.store(self.scores, self.changed_square(score, j, i), (j, i), (0, 1))
                return ()

            b.loop("square", 0, self.plan.strip, n, across, bounds=(0, self.plan.strip - n))
            return ()

        b.loop("squares", 0, self.count, n, down, bounds=(0, self.plan.keys - 1))

    def changed_square(self, score: Node, j: Size, i: Size) -> Node:
        """One square: keys key + j ..., queries first + i ...."""
        b, x, n = self.b, self.x, self.lanes
        steps = b.add(ops.iota(size=n, dtype=int32))
        apart = b.apply("subtract", self.column(steps), steps)  # of key and query, in the square
        ahead = combine(combine(self.key, j, 1), combine(self.first, i, 1), -1)
        if self.changed:
            score = self.scaled(score, apart, ahead, j, i)
        nothing = self.constant(-math.inf)
        if "mask" in x.extras:
            seen = self.extra("mask", j, i)
            score = b.apply("where", seen, score, nothing)
        if self.in_a_row:
            key = self.column(self.steps(n, combine(self.key, j, 1), int32))
            least, most = (self.limit(number, i) for number in range(2))
            score = b.apply("where", b.apply("less_equal", least, key), score, nothing)
            return b.apply("where", b.apply("less_equal", key, most), score, nothing)
        low_band, high_band = x.band
        if high_band is not None:
            limit = b.cast(b.index(combine(high_band, ahead, -1)), int32)
            score = b.apply("where", b.apply("less_equal", apart, limit), score, nothing)
        if low_band is not None:
            limit = b.cast(b.index(combine(low_band, ahead, -1)), int32)
            score = b.apply("where", b.apply("less_equal", limit, apart), score, nothing)
        return score

    def scaled(self, score: Node, apart: Node, ahead: Size, j: Size, i: Size) -> Node:
        """Scores times log2 e with softcap, bias and slopes."""
        b, x = self.b, self.x
        factor = LOG2_E * x.scale
        if x.softcap:
            score = b.apply("multiply", score, self.constant(x.scale / x.softcap))
            score, factor = b.apply("tanh", score), LOG2_E * x.softcap
            self.keep(score, j, i)
        score = b.apply("multiply", score, self.constant(factor))
        if "bias" in x.extras:
            bias = b.cast(self.extra("bias", j, i), self.sum)
            score = b.apply("multiply_add", bias, self.constant(LOG2_E), score)
        if "slopes" in x.extras:
            slope = b.cast(b.load(self.memory["slopes"], (self.head,)), self.sum)
            slope = b.apply("multiply", slope, self.constant(LOG2_E))
            distance = b.apply("add", apart, b.cast(b.index(ahead), int32))
            if self.in_a_row:
                distance = b.apply("add", distance, self.limit(2, i))
            score = b.apply("multiply_add", b.cast(distance, self.sum), slope, score)
        return score

    def limit(self, number: int, i: Size) -> Node:
        """What `find_limits` left for neighbouring queries."""
        return self.b.load(self.limits, (number, combine(self.offset, i, 1)), (self.lanes,), (1,))

    def keep(self, part: Node, j: Size, i: Size) -> None:
        """What a derivative wants to know of a square: its tanh."""

    def extra(self, name: str, j: Size, i: Size) -> Node:
        """A square of bias or mask, keys down; a mask as bool. 0 (or false) past the ends."""
        b, n, memory = self.b, self.lanes, self.memory[name]
        sizes = memory.shape
        place = [self.batch, self.head, combine(self.first, i, 1), combine(self.key, j, 1)]
        index = [0 if size == 1 else at for size, at in zip(sizes, place)]
        inside = [None if sizes[a] == 1 else self.below(index[a], n, sizes[a]) for a in (2, 3)]
        if sizes[2] == 1 and sizes[3] == 1:
            return b.load(memory, index)
        if sizes[2] == 1:  # one for all queries
            return self.column(b.load(memory, index, (n,), (3,), inside[1]))
        if sizes[3] == 1:
            return b.load(memory, index, (n,), (2,), inside[0])
        mask = self.both(inside[0], inside[1], (n, n))
        found = b.load(memory, index, (n, n), (2, 3), mask)
        if not found.dtype.is_float:
            one = b.apply("where", found, self.constant(1.0), self.constant(0.0))
            return b.apply("not_equal", self.turn(one), self.constant(0.0))
        return self.turn(b.cast(found, self.sum))

    # ---- softmax --------------------------------------------------------------------------

    def soften(self) -> None:
        """Scores to probabilities (not yet divided by their sum), vector by vector of queries."""
        b, plan = self.b, self.plan
        width = min(plan.strip, 4 * self.lanes)
        while plan.strip % width:
            width //= 2

        def across(c: Size, _: list[Node]) -> Sequence[Node]:
            at = combine(self.offset, c, 1)
            before = b.load(self.most, (at,), (width,), (0,))

            def largest(j: Size, carried: list[Node]) -> Sequence[Node]:
                return [self.greater(b.load(self.scores, (j, c), (width,), (1,)), carried[0])]

            start = b.constant(-math.inf, self.sum, (width,))
            found = b.loop(
                "largest", 0, self.rows(), 1, largest, [start], unroll=4, bounds=(0, plan.keys - 1)
            )[0]
            if self.factor != 1.0:
                found = b.apply("multiply", found, self.constant(self.factor))
            most = self.greater(found, before)
            hidden = b.apply("equal", most, self.constant(-math.inf))
            base = b.apply("where", hidden, self.constant(0.0), most)
            decay = self.power(b.apply("subtract", before, base))
            total = b.apply("multiply", b.load(self.total, (at,), (width,), (0,)), decay)
            b.store(self.most, most, (at,), (0,))
            b.store(self.decay, decay, (at,), (0,))
            total = self.powers(c, width, b.apply("negative", base), total)
            b.store(self.total, total, (at,), (0,))
            return ()

        b.loop("soften", 0, plan.strip, width, across)

    def rows(self) -> Size:
        """Rows of scores that count."""
        return self.count

    def powers(self, c: Size, width: int, base: Node, total: Node) -> Node:
        """Each score of some queries to 2**(factor * score + base), in place; their sums."""
        b = self.b

        def row(j: Size, carried: list[Node]) -> Sequence[Node]:
            found = self.probability(j, c, width, base)
            b.store(self.scores, self.dropped(found, j, c), (j, c), (1,))
            return [b.apply("add", carried[0], found)]

        return b.loop(
            "powers", 0, self.count, 1, row, [total], unroll=2, bounds=(0, self.plan.keys - 1)
        )[0]

    def probability(self, j: Size, c: Size, width: int, base: Node) -> Node:
        """2**(factor * score + base)."""
        b = self.b
        score = b.load(self.scores, (j, c), (width,), (1,))
        if self.factor == 1.0:
            return self.power(b.apply("add", score, base))
        return self.power(b.apply("multiply_add", score, self.constant(self.factor), base))

    def kept(self, j: Size, c: Size, width: int) -> Node | None:
        """What probabilities are multiplied by where there is dropout: 0 or 1 / (1 - rate)."""
        b, x = self.b, self.x
        if x.dropout == 0.0:
            return None
        row = combine(multiply(self.batch, x.heads), self.head, 1)
        row = combine(combine(multiply(row, x.queries), self.first, 1), c, 1)
        start = combine(combine(multiply(row, x.keys), self.key, 1), j, 1)
        steps = b.apply("multiply", self.steps(width), b.index(x.keys))
        key, offset = (b.load(self.memory[name], ()) for name in ("key", "offset"))
        linear = b.apply("add", steps, b.index(start))
        keep = dropout_keep(b, key, offset, linear, x.dropout)
        keep = b.apply("not_equal", keep, b.constant(0, float32))
        return b.apply("where", keep, self.constant(1 / (1 - x.dropout)), self.constant(0.0))

    def dropped(self, x: Node, j: Size, c: Size) -> Node:
        """Probabilities after dropout."""
        keep = self.kept(j, c, x.shape[0])
        return x if keep is None else self.b.apply("multiply", x, keep)

    # ---- values ---------------------------------------------------------------------------

    def gather_values(self) -> None:
        """result[d, i] = decay[i] * result[d, i] + sum over keys of value and probability."""
        b, panel = self.b, self.plan.panel

        def left(step: Size, first: Size, rows: int) -> Node:
            return b.load(self.value_rows, (step, first), (rows, 1), (1, 0))

        def start(first: Size, c: Size, rows: int) -> Node:
            before = b.load(self.result, (first, c), (rows, panel), (0, 1))
            return b.apply("multiply", before, b.load(self.decay, (c,), (panel,), (0,)))

        self.product(self.x.value_width, self.count, left, self.scores, self.result, start)

    def finish(self) -> None:
        """Divide by the sums, turn, store; log-sum-exps."""
        b, x, plan, n = self.b, self.x, self.plan, self.lanes
        order = self.order("out")
        axes = (order.index("t"), order.index("d"))

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            token = combine(self.first, i, 1)
            inside = self.below(token, n, x.queries)
            total = b.load(self.total, (i,), (n,), (0,))
            none = b.apply("equal", total, self.constant(0.0))
            share = b.apply("divide", self.constant(1.0), total)
            share = b.apply("where", none, self.constant(0.0), share)

            def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
                part = b.load(self.result, (d, i), (n, n), (0, 1))
                part = self.turn(b.apply("multiply", part, share))
                mask = self.both(inside, self.below(d, n, x.value_width), (n, n))
                b.store(
                    self.memory["out"],
                    b.cast(part, x.dtype),
                    self.at("out", self.batch, self.head, token, d),
                    axes,
                    mask,
                )
                return ()

            self.chunks(x.value_width, chunk)
            if "lse" in self.memory:
                most = b.load(self.most, (i,), (n,), (0,))
                sums = b.apply("add", most, b.apply("log2", total))
                sums = b.apply("where", none, self.constant(-math.inf), sums)
                sums = b.apply("multiply", sums, self.constant(1 / LOG2_E))
                b.store(self.memory["lse"], sums, (self.batch, self.head, token), (2,), inside)
            return ()

        b.loop("finish", 0, plan.queries, n, some, bounds=(0, plan.queries - n))
