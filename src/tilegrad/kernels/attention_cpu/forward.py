"""Attention on CPUs, forward: tiles of scores that stay in the cache, queries along the lanes.

A program has a block of queries of one head. For each block of keys it computes scores^T (keys
down, queries across the lanes of vectors), so that the maximum and the sum of a row of softmax
are plain vector operations, then adds values^T @ probabilities^T to the result^T. Queries are
turned once for a program; keys and values are copied as they lie, once for each block, widened
to the accumulator's dtype. Scores are kept in powers of two (times log2 e).

Invariant: a result depends on the Plan alone, never on workers, batch or other heads; a query
that sees nothing gives 0 and a log-sum-exp of -inf; nothing is read past the keys that are seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ...core.config import invariant
from ...core.dtype import int32, int64
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum, minimum
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body
from ..attention.shape import AttentionShape, parameters
from .tiles import PAD, CpuPlan, Kernel, Pairs, Source, Vectors, product, up

FAR = 1 << 30  # more than any token's number


def fitting(x: AttentionShape, target: Target, most: int, least: int) -> int:
    """Queries of a program, a multiple of `least`: few enough that every worker has several."""
    count, heads = max(1, high(x.queries)), high(x.batch) * x.heads
    queries = most
    while queries > 2 * least and heads * -(-count // queries) < 4 * target.cores:
        queries //= 2
    return min(queries, up(count, least))


def choose(x: AttentionShape, target: Target) -> CpuPlan:
    """The Plan for a shape: blocks that leave scores, keys and values in the L2 cache."""
    lanes = target.lanes(x.sum_dtype)
    rows, across = (13, 2) if target.vector_registers >= 32 else (5, 2)
    queries = fitting(x, target, 128 // (across * lanes) * across * lanes, across * lanes)
    keys = min(256 // rows * rows, up(high(x.keys), rows))
    return CpuPlan(queries, max(rows, keys), rows, across, lanes, aligned=invariant())


class Sequences:
    """Sequences one after the other in the queries and keys: which keys each query sees."""

    def __init__(self, v: Vectors, source: Source, plan: CpuPlan) -> None:
        self.v, self.source, self.plan = v, source, plan
        self.limits = v.b.allocate((3, plan.queries), int32, "l2")

    def find(self, first: Size) -> tuple[Size, Size, tuple[Size, Size]]:
        """The keys that queries from the first on see: those of the block are from the least to the
        most, lower <= j < upper; and those that all of them see, from the first to the last."""
        b, keys, queries = self.v.b, self.source.x.keys, self.plan.queries
        self.each_limit(first)
        rows = [b.load(self.limits, (number, 0), (queries,), (1,)) for number in range(2)]
        wanted = ((0, "min"), (1, "max"), (0, "max"), (1, "min"))
        found = [
            b.cast(b.add(ops.reduce(rows[row], axis=0, kind=kind)), int64) for row, kind in wanted
        ]
        found[1] = b.apply("minimum", found[1], b.index(keys - 1))
        found[0] = b.apply("maximum", found[0], b.index(0))
        lower = self.plan.begin(b.atom("lower", found[0], 0, FAR))
        upper = b.atom("upper", found[1], -1, max(1, high(keys)) - 1) + 1
        return lower, upper, (b.atom("begin", found[2], 0, FAR), b.atom("last", found[3], -1, FAR))

    def each_limit(self, first: Size) -> None:
        """For each query the first and the last key it sees, and how far its sequences are apart.

        A query of no sequence sees keys FAR to -1: none.
        """
        v, b, n = self.v, self.v.b, self.v.lanes
        for c in v.chunks("limits", self.plan.queries):
            token = v.steps(n, first + c, int32)
            found = [b.constant(value, int32, (n,)) for value in (FAR, -1, 0)]
            sequences = self.source.memory["query_starts"].shape[0] - 1
            for number in b.each("sequence", 0, sequences, carried=found):
                own, *limits = self.limits_in(number, token)
                found[:] = [b.apply("where", own, new, old) for new, old in zip(limits, found)]
            for number, value in enumerate(found):
                b.store(self.limits, value, (number, c), (1,))

    def limits_in(self, number: Size, token: Node) -> list[Node]:
        """Which tokens belong to a sequence; the keys these see, and how far it is shifted."""
        b, band, memory = self.v.b, self.source.x.band, self.source.memory
        first, end = (b.load(memory["query_starts"], (number + i,)) for i in range(2))
        key, stop = (b.load(memory["key_starts"], (number + i,)) for i in range(2))
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

    def limit(self, number: int, i: Size) -> Node:
        """What was found for neighbouring queries, from number i of the program on."""
        return self.v.b.load(self.limits, (number, i), (self.v.lanes,), (1,))


class Scored(Kernel):
    """Blocks of scores of a block of queries: what is done to them between the products."""

    scores: Node
    key_rows: Node
    value_rows: Node
    turned: Node
    stop: Size  # where the queries at work end
    all_see: tuple[Size, Size]  # the first and last key that all of them see, of sequences in a row

    def prepare_scores(self) -> None:
        """How raw scores become powers of two: a factor as they are read, or a pass before."""
        self.changed = not self.holes.plain
        self.factor = 1.0 if self.changed else self.holes.first
        self.offset: Size = 0  # of the queries at work among those of the program
        self.sequences: Sequences | None = None
        if "query_starts" in self.x.extras:
            self.sequences = Sequences(self.v, self.source, self.plan)

    # ---- scores ---------------------------------------------------------------------------

    def take_keys(self) -> None:
        """A block of keys in scratch."""
        self.source.copy_rows("k", self.key_head, self.key, self.count, self.x.width, self.key_rows)

    def take_values(self) -> None:
        """A block of values in scratch."""
        width = self.x.value_width
        self.source.copy_rows("v", self.key_head, self.key, self.count, width, self.value_rows)

    def score(self) -> None:
        """scores[j, i] = key j times query i."""

        def left(step: Size, first: Size, rows: int) -> Node:
            return self.b.load(self.key_rows, (first, step), (rows, 1), (0, 1))

        product(self.v, self.plan, self.count, self.x.width, left, self.turned, self.scores)

    def change(self) -> None:
        """What the holes do to a block of scores: nothing where they only hide and all is seen."""
        x, b = self.x, self.b
        if self.holes.everywhere:
            self.change_squares()
            return
        low, high_ = x.band
        hidden: list[Node] = []
        last = self.key + self.count - 1
        if self.sequences is not None:
            hidden = [b.less(self.key, self.all_see[0]), b.less(self.all_see[1], last)]
        else:
            if high_ is not None:
                hidden.append(b.less(self.first + high_, last))
            if low is not None:
                hidden.append(b.less(self.key, self.stop - 1 + low))
        if hidden:
            with b.when(hidden[0] if len(hidden) == 1 else b.apply("bit_or", *hidden)):
                self.change_squares()

    def change_squares(self) -> None:
        """Square by square of scores: lanes keys down, lanes queries across."""
        b, n, strip = self.b, self.lanes, self.plan.strip
        for j in b.each("squares", 0, self.count, n, bounds=(0, self.plan.keys - 1)):
            for i in b.each("square", 0, strip, n, bounds=(0, strip - n)):
                s = b.load(self.scores, (j, i), (n, n), (0, 1))
                at = Square(self, j, i)
                if self.changed:
                    s = self.holes.score(s, at, keep=partial(self.keep, j=j, i=i))
                b.store(self.scores, self.holes.hidden(s, at), (j, i), (0, 1))

    def keep(self, bend: Node, j: Size, i: Size) -> None:
        """What a derivative wants to know of a square."""

    def probability(self, j: Size, c: Size, width: int, base: Node) -> Node:
        """2**(factor * score + base)."""
        b = self.b
        score = b.load(self.scores, (j, c), (width,), (1,))
        if self.factor == 1.0:
            return self.v.power(b.apply("add", score, base))
        return self.v.power(b.apply("multiply_add", score, self.v.constant(self.factor), base))

    def kept(self, j: Size, c: Size, width: int) -> Node | None:
        """What probabilities of a key are multiplied by; None for 1."""
        b, x = self.b, self.x

        def linear() -> Node:
            row = (self.source.batch * x.heads + self.head) * x.queries + self.first + c
            steps = b.apply("multiply", self.v.steps(width), b.index(x.keys))
            return b.apply("add", steps, b.index(row * x.keys + self.key + j))

        return self.holes.weight(linear)


class Square(Pairs):
    """A square of a block of scores: keys key + j ..., queries first + i ...."""

    def __init__(self, of: Scored, j: Size, i: Size) -> None:
        super().__init__(of, of.head, of.first + i, of.key + j, square=True)
        self.sequences, self.i = of.sequences, of.offset + i

    def apart(self) -> tuple[Node, Size]:
        """Numbers count within a sequence."""
        tile, ahead = super().apart()
        if self.sequences is not None:
            tile = self.of.b.apply("add", tile, self.sequences.limit(2, self.i))
        return tile, ahead

    def limits(self) -> list[Node] | None:
        """The keys of a query's own sequence."""
        v, b = self.of.v, self.of.b
        if self.sequences is None:
            return None
        key = v.column(v.steps(v.lanes, self.key, int32))
        least, most = (self.sequences.limit(number, self.i) for number in range(2))
        return [b.apply("less_equal", least, key), b.apply("less_equal", key, most)]


class Forward(Scored):
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
        self.prepare_scores()

    def build(self) -> Body:
        """The Body: one program for each block of queries, those with most keys first."""
        b, x, plan = self.b, self.x, self.plan
        blocks = ceil_divide(x.queries, plan.queries)
        grid, block = self.program(blocks, x.heads)
        if x.band[1] is not None:
            block = blocks - 1 - block
        self.key_head = self.head // x.group
        self.first = block * plan.queries
        self.places()
        self.prepare()
        self.keys_of()
        self.walk()
        return b.finish((grid,), plan=plan)

    def walk(self) -> None:
        """All blocks of keys, and the result."""
        for _ in self.each_block():
            self.block()
        self.finish()

    def places(self) -> None:
        """Scratch."""
        x, plan, n = self.x, self.plan, self.lanes
        deep, wide = up(x.width, n), up(x.value_width, n)
        self.turned = self.scratch(deep, plan.queries)
        self.key_rows = self.scratch(plan.keys, deep + PAD)
        self.value_rows = self.scratch(plan.keys, wide + PAD)
        self.scores = self.scratch(up(plan.keys, n), plan.queries + PAD)
        self.result = self.scratch(wide, plan.queries)
        self.most, self.total, self.decay = (self.scratch(plan.queries) for _ in range(3))

    def prepare(self) -> None:
        """Queries turned; sums as they begin."""
        b, queries = self.b, self.plan.queries
        self.take_queries()
        for place, value in zip((self.most, self.total), self.holes.start(self.head)):
            b.store(place, b.broadcast(value, (queries,)), (0,), (0,))
        self.v.clear(self.result, queries)

    def take_queries(self) -> None:
        """Queries as the products read them."""
        x = self.x
        self.source.turn_rows("q", self.head, self.first, x.queries, x.width, self.turned)

    def keys_of(self) -> None:
        """The keys that some query of the block may see: lower <= j < upper."""
        x, plan = self.x, self.plan
        self.stop = minimum(self.first + plan.queries, x.queries)
        if self.sequences is not None:
            self.lower, self.upper, self.all_see = self.sequences.find(self.first)
            return
        self.lower, self.upper = 0, self.source.key_length()
        low, high_ = x.band
        if high_ is not None:
            self.upper = minimum(self.upper, self.stop + high_)
        if low is not None:
            self.lower = plan.begin(maximum(0, self.first + low))

    def block(self) -> None:
        """Scores, softmax, and what they add to the result."""
        self.take_keys()
        self.score()
        self.change()
        self.soften()
        self.take_values()
        self.gather_values()

    # ---- softmax --------------------------------------------------------------------------

    def soften(self) -> None:
        """Scores to probabilities (not yet divided by their sum), vector by vector of queries."""
        b, plan = self.b, self.plan
        width = min(plan.strip, 4 * self.lanes)
        while plan.strip % width:
            width //= 2
        for c in b.each("soften", 0, plan.strip, width):
            at, bounds = self.offset + c, (0, plan.keys - 1)
            before = b.load(self.most, (at,), (width,), (0,))
            top = [b.constant(-math.inf, self.sum, (width,))]
            for j in b.each("largest", 0, self.rows(), 1, top, unroll=4, bounds=bounds):
                top[0] = self.v.greater(b.load(self.scores, (j, c), (width,), (1,)), top[0])
            found = top[0]
            if self.factor != 1.0:
                found = b.apply("multiply", found, self.v.constant(self.factor))
            most = self.v.greater(found, before)
            base = self.v.base_of(most)
            decay = self.v.power(b.apply("subtract", before, base))
            total = b.apply("multiply", b.load(self.total, (at,), (width,), (0,)), decay)
            b.store(self.most, most, (at,), (0,))
            b.store(self.decay, decay, (at,), (0,))
            total = self.powers(c, width, b.apply("negative", base), total)
            b.store(self.total, total, (at,), (0,))

    def rows(self) -> Size:
        """Rows of scores that count."""
        return self.count

    def powers(self, c: Size, width: int, base: Node, total: Node) -> Node:
        """Each score of some queries to 2**(factor * score + base), in place; their sums."""
        b, sums, bounds = self.b, [total], (0, self.plan.keys - 1)
        for j in b.each("powers", 0, self.count, 1, sums, unroll=2, bounds=bounds):
            found = self.probability(j, c, width, base)
            b.store(self.scores, self.dropped(found, j, c), (j, c), (1,))
            sums[0] = b.apply("add", sums[0], found)
        return sums[0]

    def dropped(self, x: Node, j: Size, c: Size) -> Node:
        """Probabilities as they weigh values."""
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

        product(
            self.v, self.plan, self.x.value_width, self.count, left, self.scores, self.result, start
        )

    def finish(self) -> None:
        """Divide by the sums, turn, store; log-sum-exps."""
        b, x, n = self.b, self.x, self.lanes
        for i in self.v.chunks("finish", self.plan.queries):
            token = self.first + i
            inside = self.v.below(token, n, x.queries)
            total = b.load(self.total, (i,), (n,), (0,))
            share, width = self.v.share_of(total), x.value_width
            self.source.put_turned("out", self.head, token, self.result, i, width, share)
            if "lse" in self.memory:
                sums = self.v.log_sum(b.load(self.most, (i,), (n,), (0,)), total)
                b.store(
                    self.memory["lse"], sums, (self.source.batch, self.head, token), (2,), inside
                )
