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
from ...tile.build import Body
from ..attention.shape import AttentionShape, backward_parameters
from .forward import Forward
from .tiles import LOG2_E, PAD, Builder, CpuPlan


def choose(x: AttentionShape, target: Target) -> CpuPlan:
    """The Plan for a shape: as forward, with fewer keys, since more lies beside them."""
    lanes = target.lanes(x.sum_dtype)
    rows, across = (13, 2) if target.vector_registers >= 32 else (5, 2)
    panel = across * lanes
    queries = max(panel, min(128, panel * -(-high(x.queries) // panel)))
    keys = min(130 // rows * rows, rows * max(1, -(-high(x.keys) // rows)))
    return CpuPlan(queries, keys, rows, across, lanes)


class Backward(Forward):
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
        Builder.__init__(self, x, kept, plan, name)
        self.set_factor()

    def columns(self, width: int) -> int:
        """A width, up to a whole number of register tiles."""
        return -(-width // self.plan.panel) * self.plan.panel

    def block_places(self) -> None:
        """Scratch of a block of scores."""
        x, plan, n = self.x, self.plan, self.lanes
        tall = max(plan.keys, -(-plan.keys // n) * n)
        self.turned = self.scratch(self.columns(x.width), plan.queries)
        self.turned_out = self.scratch(self.columns(x.value_width), plan.queries)
        self.key_rows = self.scratch(plan.keys, self.columns(x.width) + PAD)
        self.value_rows = self.scratch(plan.keys, self.columns(x.value_width) + PAD)
        self.scores = self.scratch(tall, plan.queries + PAD)
        self.change_of = self.scratch(tall, plan.queries + PAD)  # gradient of the scores
        self.caps = self.scratch(tall, plan.queries + PAD) if x.softcap else None
        self.base, self.delta = self.scratch(plan.queries), self.scratch(plan.queries)

    def keep(self, part: Node, j: Size, i: Size) -> None:
        """The tanh of scores, for its derivative."""
        assert self.caps is not None
        self.b.store(self.caps, part, (j, i), (0, 1))

    def take_queries(self) -> None:
        """Queries and gradients of their results, turned; what each query has one of."""
        x, where = self.x, (self.batch, self.head, self.first, self.stop)
        self.turn_rows("q", *where, x.width, self.turned)
        self.turn_rows("dout", *where, x.value_width, self.turned_out)
        self.take_sums()

    def take_sums(self) -> None:
        """What each query has one of: its log-sum-exp, as a base of powers, and delta."""
        b, n = self.b, self.lanes

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            token = combine(self.first, i, 1)
            inside = self.below(token, n, self.stop)
            index = (self.batch, self.head, token)
            sums = b.load(self.memory["lse"], index, (n,), (2,), inside)
            none = b.apply("equal", sums, self.constant(-math.inf))
            base = b.apply("multiply", sums, self.constant(-LOG2_E))
            b.store(self.base, b.apply("where", none, self.constant(0.0), base), (i,), (0,))
            delta = b.load(self.memory["delta"], index, (n,), (2,), inside)
            b.store(self.delta, delta, (i,), (0,))
            return ()

        b.loop("rows", 0, self.plan.queries, n, some, bounds=(0, self.plan.queries - n))

    def gradient_of_scores(self) -> None:
        """scores become probabilities, change_of the gradient of raw scores (without scale)."""
        b, plan = self.b, self.plan
        self.score()
        self.change()

        def left(step: Size, first: Size, rows: int) -> Node:
            return b.load(self.value_rows, (first, step), (rows, 1), (0, 1))

        self.product(self.count, self.x.value_width, left, self.turned_out, self.change_of)
        width = plan.panel

        def across(c: Size, _: list[Node]) -> Sequence[Node]:
            base = b.load(self.base, (c,), (width,), (0,))
            delta = b.load(self.delta, (c,), (width,), (0,))

            def row(j: Size, _: list[Node]) -> Sequence[Node]:
                p, found = self.both_of(j, c, width, base, delta)
                b.store(self.scores, p, (j, c), (1,))
                b.store(self.change_of, found, (j, c), (1,))
                return ()

            b.loop("gradient", 0, self.count, 1, row, unroll=2, bounds=(0, plan.keys - 1))
            return ()

        b.loop("gradients", 0, plan.queries, width, across)

    def both_of(self, j: Size, c: Size, width: int, base: Node, delta: Node) -> tuple[Node, Node]:
        """Probabilities (after dropout) of a key, and the gradient of its raw scores."""
        b = self.b
        p = self.probability(j, c, width, base)
        found = b.load(self.change_of, (j, c), (width,), (1,))
        keep = self.kept(j, c, width)
        if keep is not None:
            found = b.apply("multiply", found, keep)
        found = b.apply("multiply", p, b.apply("subtract", found, delta))
        if self.caps is not None:
            t = b.load(self.caps, (j, c), (width,), (1,))
            slope = b.apply("subtract", self.constant(1.0), b.apply("multiply", t, t))
            found = b.apply("multiply", found, slope)
        return (p if keep is None else b.apply("multiply", p, keep)), found


class QueryGradient(Backward):
    """Builds the Body of dq."""

    def places(self) -> None:
        """Scratch."""
        self.block_places()
        self.result = self.scratch(self.columns(self.x.width), self.plan.queries)

    def prepare(self) -> None:
        """Queries turned; an empty sum."""
        b = self.b
        self.stop = minimum(combine(self.first, self.plan.queries, 1), self.x.queries)
        self.take_queries()
        zeros = b.constant(0, self.sum, (self.plan.queries,))

        def clear(r: Size, _: list[Node]) -> Sequence[Node]:
            b.store(self.result, zeros, (r, 0), (1,))
            return ()

        b.loop("clear", 0, self.result.shape[0], 1, clear)

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """What a block of keys adds: result^T += keys^T @ gradient of scores^T."""
        b, panel = self.b, self.plan.panel
        self.key = key
        self.count = minimum(combine(self.upper, key, -1), self.plan.keys)
        self.take_keys()
        self.take_values()
        self.gradient_of_scores()

        def left(step: Size, first: Size, rows: int) -> Node:
            return b.load(self.key_rows, (step, first), (rows, 1), (1, 0))

        def start(first: Size, c: Size, rows: int) -> Node:
            return b.load(self.result, (first, c), (rows, panel), (0, 1))

        self.product(self.x.width, self.count, left, self.change_of, self.result, start)
        return ()

    def finish(self) -> None:
        """Scale, turn, store."""
        b, x, n = self.b, self.x, self.lanes
        order = self.order("dq")
        axes = (order.index("t"), order.index("d"))

        def some(i: Size, _: list[Node]) -> Sequence[Node]:
            token = combine(self.first, i, 1)
            inside = self.below(token, n, x.queries)

            def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
                part = self.turn(b.load(self.result, (d, i), (n, n), (0, 1)))
                part = b.cast(b.apply("multiply", part, self.constant(x.scale)), x.dtype)
                mask = self.both(inside, self.below(d, n, x.width), (n, n))
                index = self.at("dq", self.batch, self.head, token, d)
                b.store(self.memory["dq"], part, index, axes, mask)
                return ()

            self.chunks(x.width, chunk)
            return ()

        b.loop("finish", 0, self.plan.queries, n, some, bounds=(0, self.plan.queries - n))


class KeyGradient(Backward):
    """Builds the Body of dk and dv."""

    def build(self) -> Body:
        """The Body: one program for each block of keys of a key head."""
        b, x, plan = self.b, self.x, self.plan
        blocks = ceil_divide(x.keys, plan.keys)
        grid = multiply(multiply(x.batch, x.key_heads), blocks)
        p = b.program(0, grid)
        self.key = multiply(modulo(p, blocks), plan.keys)
        rest = floor_divide(p, blocks)
        self.key_head, self.batch = modulo(rest, x.key_heads), floor_divide(rest, x.key_heads)
        self.block_places()
        self.sums = {
            "dk": self.scratch(plan.keys, self.columns(x.width)),
            "dv": self.scratch(plan.keys, self.columns(x.value_width)),
        }
        self.keys_of()
        self.clear()
        self.take_keys()
        self.take_values()
        b.loop("head", 0, x.group, 1, self.one_head)
        for name in ("dk", "dv"):
            self.put(name)
        return b.finish((grid,), plan=plan)

    def keys_of(self) -> None:
        """The keys of the block, and the queries that may see one: lower <= i < upper."""
        b, x, plan = self.b, self.x, self.plan
        self.all = minimum(combine(x.keys, self.key, -1), plan.keys)
        self.count = self.all
        if "key_lengths" in x.extras:
            length = b.cast(b.load(self.memory["key_lengths"], (self.batch,)), int64)
            length = b.apply("minimum", length, b.index(x.keys))
            length = b.apply("maximum", length, b.index(0))
            limit = b.atom("length", length, 0, high(x.keys))
            self.count = maximum(0, minimum(combine(limit, self.key, -1), plan.keys))
        low_band, high_band = x.band
        self.lower, self.upper = 0, x.queries
        if self.in_a_row:
            self.find_queries()
            return
        if high_band is not None:
            self.lower = maximum(0, combine(self.key, high_band, -1))
        if low_band is not None:
            end = combine(combine(self.key, self.all, 1), low_band, -1)
            self.upper = minimum(self.upper, end)

    def find_queries(self) -> None:
        """The queries of the sequences that the block's keys belong to."""
        b, x = self.b, self.x
        count = combine(self.memory["key_starts"].shape[0], 1, -1)
        first, stop = (b.index(i) for i in (self.key, combine(self.key, self.all, 1)))

        def sequence(number: Size, carried: list[Node]) -> Sequence[Node]:
            index = (number, combine(number, 1, 1))
            key, end = (b.cast(b.load(self.memory["key_starts"], (i,)), int64) for i in index)
            own = b.apply("bit_and", b.apply("less", key, stop), b.apply("less", first, end))
            lower, upper = (b.cast(b.load(self.memory["query_starts"], (i,)), int64) for i in index)
            least, most = (
                b.apply("minimum", carried[0], lower),
                b.apply("maximum", carried[1], upper),
            )
            return [b.apply("where", own, new, old) for new, old in zip((least, most), carried)]

        start = [b.index(x.queries), b.index(0)]
        lower, upper = b.loop("sequence", 0, count, 1, sequence, start)
        top = max(1, high(x.queries))
        upper = b.apply("minimum", upper, b.index(x.queries))
        self.lower, self.upper = b.atom("lower", lower, 0, top), b.atom("upper", upper, 0, top)

    def clear(self) -> None:
        """Empty sums."""
        b, n = self.b, self.lanes
        for place in self.sums.values():
            rows, width = place.shape

            def row(r: Size, _: list[Node], place: Node = place, width: int = width) -> tuple[()]:
                for d in range(0, width, n):
                    b.store(place, b.constant(0, self.sum, (n,)), (r, d), (1,))
                return ()

            b.loop("clear", 0, rows, 1, row)

    def one_head(self, g: Size, _: list[Node]) -> Sequence[Node]:
        """All queries of one head."""
        x = self.x
        self.head = combine(multiply(self.key_head, x.group), g, 1)
        self.b.loop(
            "queries",
            self.lower,
            self.upper,
            self.plan.queries,
            self.some_queries,
            bounds=(0, max(0, high(x.queries) - 1)),
        )
        return ()

    def some_queries(self, first: Size, _: list[Node]) -> Sequence[Node]:
        """What a block of queries adds."""
        b, x = self.b, self.x
        self.first = first
        self.stop = minimum(combine(first, self.plan.queries, 1), self.upper)
        depth = combine(self.stop, first, -1)
        self.take_queries()
        if self.in_a_row:
            keys = self.lower, self.upper
            self.find_limits()
            self.lower, self.upper = keys
        where = (self.batch, self.head, first, depth)
        self.query_rows = self.scratch(self.plan.queries, self.columns(x.width) + PAD)
        self.out_rows = self.scratch(self.plan.queries, self.columns(x.value_width) + PAD)
        self.copy_rows("q", *where, x.width, self.query_rows)
        self.copy_rows("dout", *where, x.value_width, self.out_rows)
        self.gradient_of_scores()
        for name, scores, rows in (
            ("dv", self.scores, self.out_rows),
            ("dk", self.change_of, self.query_rows),
        ):
            place = self.sums[name]

            def left(step: Size, at: Size, size: int, scores: Node = scores) -> Node:
                return b.load(scores, (at, step), (size, 1), (0, 1))

            def start(at: Size, c: Size, size: int, place: Node = place) -> Node:
                return b.load(place, (at, c), (size, self.plan.panel), (0, 1))

            width = place.shape[1]
            self.product(self.count, depth, left, rows, place, start, high(width))
        return ()

    def put(self, name: str) -> None:
        """Store the sums of the block; 0 for keys that are never seen."""
        b, x, n = self.b, self.x, self.lanes
        width = x.width if name == "dk" else x.value_width
        axis = self.order(name).index("d")

        def store(r: Size, value: Node, d: int) -> None:
            index = self.at(name, self.batch, self.key_head, combine(self.key, r, 1), d)
            b.store(
                self.memory[name], b.cast(value, x.dtype), index, (axis,), self.below(d, n, width)
            )

        def row(r: Size, _: list[Node]) -> Sequence[Node]:
            for d in range(0, width, n):
                part = b.load(self.sums[name], (r, d), (n,), (1,))
                if name == "dk":
                    part = b.apply("multiply", part, self.constant(x.scale))
                store(r, part, d)
            return ()

        def nothing(r: Size, _: list[Node]) -> Sequence[Node]:
            for d in range(0, width, n):
                store(r, b.constant(0, self.sum, (n,)), d)
            return ()

        bounds = (0, self.plan.keys - 1)
        b.loop("put", 0, self.count, 1, row, bounds=bounds)
        if self.count is not self.all:
            b.loop("nothing", self.count, self.all, 1, nothing, bounds=bounds)
