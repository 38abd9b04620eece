"""Attention on CPUs, backward: scores are computed again, block by block; two Bodies.

The first has a block of queries of one head and goes over the keys: the gradient of q. The second
has a block of keys of one key head and goes over the queries of all its heads: the gradients of k
and v. Both make scores^T with queries along the lanes, as forward does. Nothing is added to
memory that two programs share, so the order of every sum is fixed. Invariant: a key that no query
sees gets the gradient 0; queries past the end have scores of 0 and gradients of 0, so they add 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtype import int64
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum, minimum
from ...ir.types import Memory
from ...tile.build import Body
from ..attention.shape import AttentionShape, backward_parameters
from .forward import Forward, Scored
from .holes import LOG2_E
from .tiles import PAD, CpuPlan, Kernel, product, up


def choose(x: AttentionShape, target: Target) -> CpuPlan:
    """The Plan for a shape: as forward, with fewer keys, since more lies beside them."""
    lanes = target.lanes(x.sum_dtype)
    rows, across = (13, 2) if target.vector_registers >= 32 else (5, 2)
    panel = across * lanes
    queries = max(panel, min(128, up(high(x.queries), panel)))
    keys = min(130 // rows * rows, rows * max(1, -(-high(x.keys) // rows)))
    return CpuPlan(queries, keys, rows, across, lanes)


class Backward(Scored):
    """What both Bodies share: probabilities and the gradient of scores of one block."""

    def __init__(
        self,
        x: AttentionShape,
        more: Sequence[Memory],
        plan: CpuPlan,
        name: str,
        results: Sequence[str],
    ) -> None:
        given = backward_parameters(x, more)
        kept = [(n, t) for n, t in given if t.use != "result" or n in results]
        Kernel.__init__(self, x, kept, plan, name)
        self.prepare_scores()

    def columns(self, width: int) -> int:
        """A width, up to a whole number of register tiles."""
        return up(width, self.plan.panel)

    def block_places(self) -> None:
        """Scratch of a block of scores."""
        x, plan = self.x, self.plan
        self.turned = self.scratch(self.columns(x.width), plan.queries)
        self.turned_out = self.scratch(self.columns(x.value_width), plan.queries)
        self.key_rows = self.scratch(plan.keys, self.columns(x.width) + PAD)
        self.value_rows = self.scratch(plan.keys, self.columns(x.value_width) + PAD)
        self.score_places(up(plan.keys, self.lanes), plan.queries + PAD)

    def score_places(self, *shape: int) -> None:
        """Scratch of scores, of their gradients, and of what these need; what each query has."""
        self.scores, self.change_of = self.scratch(*shape), self.scratch(*shape)
        self.bends = self.scratch(*shape) if self.holes.bent else None
        self.base, self.delta = (self.scratch(self.plan.queries) for _ in range(2))

    def keep(self, bend: Node, j: Size, i: Size) -> None:
        """What the derivative of scores is made of."""
        assert self.bends is not None
        self.b.store(self.bends, bend, (j, i), (0, 1))

    def take_queries(self) -> None:
        """Queries and gradients of their results, turned; what each query has one of."""
        x, where = self.x, (self.head, self.first, self.stop)
        self.source.turn_rows("q", *where, x.width, self.turned)
        self.source.turn_rows("dout", *where, x.value_width, self.turned_out)
        self.take_sums()

    def take_sums(self) -> None:
        """What each query has one of: its log-sum-exp, as a base of powers, and delta."""
        b, n = self.b, self.lanes
        for i in self.v.chunks("rows", self.plan.queries):
            token = self.first + i
            inside = self.v.below(token, n, self.stop)
            index = (self.source.batch, self.head, token)
            sums = b.load(self.memory["lse"], index, (n,), (2,), inside)
            none = b.apply("equal", sums, self.v.constant(-math.inf))
            base = b.apply("multiply", sums, self.v.constant(-LOG2_E))
            b.store(self.base, b.apply("where", none, self.v.constant(0.0), base), (i,), (0,))
            delta = b.load(self.memory["delta"], index, (n,), (2,), inside)
            b.store(self.delta, delta, (i,), (0,))

    def gradient_of_scores(self) -> None:
        """scores become probabilities, change_of the gradient of raw scores (without scale)."""
        b, plan = self.b, self.plan
        self.score()
        self.change()

        def left(step: Size, first: Size, rows: int) -> Node:
            return b.load(self.value_rows, (first, step), (rows, 1), (0, 1))

        product(
            self.v, self.plan, self.count, self.x.value_width, left, self.turned_out, self.change_of
        )
        width, bounds = plan.panel, (0, plan.keys - 1)
        for c in b.each("gradients", 0, plan.queries, width):
            base, delta = (b.load(place, (c,), (width,), (0,)) for place in (self.base, self.delta))
            for j in b.each("gradient", 0, self.count, unroll=2, bounds=bounds):
                p, found = self.both_of(j, c, width, base, delta)
                b.store(self.scores, p, (j, c), (1,))
                b.store(self.change_of, found, (j, c), (1,))

    def both_of(self, j: Size, c: Size, width: int, base: Node, delta: Node) -> tuple[Node, Node]:
        """Probabilities of a key as they weigh values, and the gradient of its raw scores."""
        b = self.b
        p = self.probability(j, c, width, base)
        found = b.load(self.change_of, (j, c), (width,), (1,))
        keep = self.kept(j, c, width)
        if keep is not None:
            found = b.apply("multiply", found, keep)
        found = b.apply("multiply", p, b.apply("subtract", found, delta))
        if self.bends is not None:
            slope = self.holes.slope(b.load(self.bends, (j, c), (width,), (1,)))
            found = b.apply("multiply", found, slope)
        return (p if keep is None else b.apply("multiply", p, keep)), found


class QueryGradient(Backward, Forward):
    """Builds the Body of dq."""

    def places(self) -> None:
        """Scratch."""
        self.block_places()
        self.result = self.scratch(self.columns(self.x.width), self.plan.queries)

    def prepare(self) -> None:
        """Queries turned; an empty sum."""
        self.stop = minimum(self.first + self.plan.queries, self.x.queries)
        self.take_queries()
        self.v.clear(self.result, self.plan.queries)

    def block(self) -> None:
        """What a block of keys adds: result^T += keys^T @ gradient of scores^T."""
        b, panel = self.b, self.plan.panel
        self.take_keys()
        self.take_values()
        self.gradient_of_scores()

        def left(step: Size, first: Size, rows: int) -> Node:
            return b.load(self.key_rows, (step, first), (rows, 1), (1, 0))

        def start(first: Size, c: Size, rows: int) -> Node:
            return b.load(self.result, (first, c), (rows, panel), (0, 1))

        product(
            self.v, self.plan, self.x.width, self.count, left, self.change_of, self.result, start
        )

    def finish(self) -> None:
        """Scale, turn, store."""
        x, scale = self.x, self.v.constant(self.x.scale)
        for i in self.v.chunks("finish", self.plan.queries):
            self.source.put_turned("dq", self.head, self.first + i, self.result, i, x.width, scale)


class KeyGradient(Backward):
    """Builds the Body of dk and dv."""

    def build(self) -> Body:
        """The Body: one program for each block of keys of a key head."""
        b, x, plan = self.b, self.x, self.plan
        grid, block = self.program(ceil_divide(x.keys, plan.keys), x.key_heads)
        self.key, self.key_head = block * plan.keys, self.head
        self.block_places()
        self.widths = {"dk": x.width, "dv": x.value_width}
        self.sums = {n: self.scratch(plan.keys, self.columns(w)) for n, w in self.widths.items()}
        self.keys_of()
        for place in self.sums.values():
            self.v.clear(place, high(place.shape[1]))
        self.take_keys()
        self.take_values()
        lower, upper, most = self.lower, self.upper, max(0, high(x.queries) - 1)
        for g in b.each("head", 0, x.group):
            self.head = self.key_head * x.group + g
            for first in b.each("queries", lower, upper, plan.queries, bounds=(0, most)):
                self.first, self.stop = first, minimum(first + plan.queries, upper)
                self.take_queries()
                if self.sequences is not None:
                    *_, self.all_see = self.sequences.find(first)
                self.add_block()
        for name in self.sums:
            self.put(name)
        return b.finish((grid,), plan=plan)

    def keys_of(self) -> None:
        """The keys of the block, and the queries that may see one: lower <= i < upper."""
        b, x, plan = self.b, self.x, self.plan
        self.count = self.all = minimum(x.keys - self.key, plan.keys)
        if "key_lengths" in x.extras:
            length = b.cast(b.load(self.memory["key_lengths"], (self.source.batch,)), int64)
            length = b.apply("minimum", length, b.index(x.keys))
            length = b.apply("maximum", length, b.index(0))
            limit = b.atom("length", length, 0, high(x.keys))
            self.count = maximum(0, minimum(limit - self.key, plan.keys))
        low, high_ = x.band
        self.lower, self.upper = 0, x.queries
        if self.sequences is not None:
            self.find_queries()
            return
        if high_ is not None:
            self.lower = maximum(0, self.key - high_)
        if low is not None:
            self.upper = minimum(self.upper, self.key + self.all - low)

    def find_queries(self) -> None:
        """The queries of the sequences that the block's keys belong to."""
        b, x = self.b, self.x
        first, stop = (b.index(i) for i in (self.key, self.key + self.all))
        found = [b.index(x.queries), b.index(0)]
        sequences = self.memory["key_starts"].shape[0] - 1

        def starts(name: str, number: Size) -> list[Node]:
            given = (b.load(self.memory[name], (number + i,)) for i in range(2))
            return [b.cast(start, int64) for start in given]

        for number in b.each("sequence", 0, sequences, carried=found):
            key, end = starts("key_starts", number)
            own = b.apply("bit_and", b.apply("less", key, stop), b.apply("less", first, end))
            lower, upper = starts("query_starts", number)
            wider = b.apply("minimum", found[0], lower), b.apply("maximum", found[1], upper)
            found[:] = [b.apply("where", own, new, old) for new, old in zip(wider, found)]
        top = max(1, high(x.queries))
        upper = b.apply("minimum", found[1], b.index(x.queries))
        self.lower, self.upper = b.atom("lower", found[0], 0, top), b.atom("upper", upper, 0, top)

    def add_block(self) -> None:
        """What a block of queries adds."""
        b, x, panel = self.b, self.x, self.plan.panel
        depth, queries = self.stop - self.first, self.plan.queries
        rows = {}
        for name, given, width in (("dk", "q", x.width), ("dv", "dout", x.value_width)):
            rows[name] = self.scratch(queries, self.columns(width) + PAD)
            self.source.copy_rows(given, self.head, self.first, depth, width, rows[name])
        self.gradient_of_scores()
        for name, scores in (("dv", self.scores), ("dk", self.change_of)):
            place = self.sums[name]

            def left(step: Size, at: Size, size: int, scores: Node = scores) -> Node:
                return b.load(scores, (at, step), (size, 1), (0, 1))

            def start(at: Size, c: Size, size: int, place: Node = place) -> Node:
                return b.load(place, (at, c), (size, panel), (0, 1))

            width = high(place.shape[1])
            product(self.v, self.plan, self.count, depth, left, rows[name], place, start, width)

    def put(self, name: str) -> None:
        """Store the sums of the block; 0 for keys that are never seen."""
        b, n, bounds, width = self.b, self.lanes, (0, self.plan.keys - 1), self.widths[name]
        for r in b.each("put", 0, self.count, bounds=bounds):
            for d in range(0, width, n):
                part = b.load(self.sums[name], (r, d), (n,), (1,))
                if name == "dk":
                    part = b.apply("multiply", part, self.v.constant(self.x.scale))
                self.source.put_line(name, self.key_head, self.key + r, d, part, width)
        if self.count is not self.all:
            for r in b.each("nothing", self.count, self.all, bounds=bounds):
                for d in range(0, width, n):
                    zeros = b.constant(0, self.sum, (n,))
                    self.source.put_line(name, self.key_head, self.key + r, d, zeros, width)
