"""Attention on CPUs for few queries (decode): keys and values are streamed once, as they lie.

A program has all queries of all heads that share one key head, and a part of the keys; d lies
along the lanes. Where there are fewer key heads than workers the keys are split, and a second
Body combines the parts. Invariant: the number of parts depends on the shape and the Target's
cores alone; parts are combined in their order.

Long because the kernel stands on one page: `Decode` writes one Body, and its steps share what they
keep in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...core.config import invariant
from ...core.dtype import int32, int64
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, combine, floor_divide, high, maximum, minimum, modulo, multiply
from ...ir.types import Array, Memory
from ...tile import ops
from ...tile.build import Body
from ..attention.shape import AttentionShape, parameters
from .tiles import LOG2_E, Builder, CpuPlan

KEYS = 64  # of a block: their values are still near when they are read again
MOST_ROWS = 16
AHEAD = 16  # keys that are asked for before they are read
LEAST_PART = 256  # keys below which a part costs more than it saves


def choose(x: AttentionShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape, or None where there are too many queries (or a query's sums must be
    those that it has among many)."""
    if "query_starts" in x.extras or x.dropout > 0.0 or invariant():
        return None
    if not isinstance(x.queries, int) or x.queries == 0 or x.queries * x.group > MOST_ROWS:
        return None
    lanes = target.lanes(x.sum_dtype)
    across = max(1, min(8 if target.vector_registers >= 32 else 4, -(-x.value_width // lanes)))
    rows = max(1, (24 if target.vector_registers >= 32 else 10) // across)
    return CpuPlan(x.queries * x.group, KEYS, rows, across, lanes)


def parts_of(x: AttentionShape, target: Target) -> int:
    """Into how many parts the keys are split: enough for every worker."""
    programs = high(x.batch) * x.key_heads
    workers = max(1, target.cores)
    if programs >= 2 * workers or workers == 1:
        return 1
    wanted = -(-2 * workers // max(1, programs))
    return max(1, min(wanted, high(x.keys) // LEAST_PART))


def partial_types(x: AttentionShape, plan: CpuPlan, parts: int) -> list[Array]:
    """What parts leave behind: results that are not divided yet, maxima and sums."""
    lead = (x.batch, x.key_heads, parts, plan.queries)
    rows = Array(lead, x.sum_dtype)
    return [Array((*lead, x.value_width), x.sum_dtype), rows, rows]


class Rows(Builder):
    """What both Bodies share: rows are the queries of the heads of one key head."""

    def row_at(self, r: Size) -> tuple[Size, Size]:
        """Head and query of a row."""
        x = self.x
        return (
            combine(multiply(self.key_head, x.group), floor_divide(r, x.queries), 1),
            modulo(r, x.queries),
        )

    def each_row(self, body: Callable[[Size], None]) -> None:
        """A loop over the rows."""

        def one(r: Size, _: list[Node]) -> Sequence[Node]:
            body(r)
            return ()

        self.b.loop("row", 0, self.live(), 1, one, bounds=(0, self.plan.queries - 1))

    def live(self) -> Size:
        """How many rows there are."""
        return self.plan.queries

    def share_of(self, total: Node) -> Node:
        """What sums of products are multiplied with in the end."""
        b = self.b
        none = b.apply("equal", total, self.constant(0.0))
        share = b.apply("divide", self.constant(1.0), total)
        return b.apply("where", none, self.constant(0.0), share)

    def store_line(self, r: Size, d: Size, part: Node) -> None:
        """Write a piece of a row of the result."""
        head, query = self.row_at(r)
        self.b.store(
            self.memory["out"],
            part,
            self.at("out", self.batch, head, query, d),
            (self.order("out").index("d"),),
            self.below(d, self.lanes, self.x.value_width),
        )

    def put(self, r: Size, line: Callable[[Size], Node], most: Node, total: Node) -> None:
        """Store a finished row: line(d) are sums of products not divided yet."""
        b, x = self.b, self.x
        share = self.share_of(total)

        def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
            self.store_line(r, d, b.cast(b.apply("multiply", line(d), share), x.dtype))
            return ()

        self.chunks(x.value_width, chunk)
        if "lse" in self.memory:
            sums = b.apply("add", most, b.apply("log2", total))
            none = b.apply("equal", total, self.constant(0.0))
            sums = b.apply("where", none, self.constant(-math.inf), sums)
            sums = b.apply("multiply", sums, self.constant(1 / LOG2_E))
            b.store(self.memory["lse"], sums, (self.batch, *self.row_at(r)))


class Decode(Rows):
    """Builds the Body that streams keys and values."""

    def __init__(
        self,
        x: AttentionShape,
        more: Sequence[Memory],
        plan: CpuPlan,
        name: str,
        parts: int,
        keeps_sums: bool = True,
    ) -> None:
        given = parameters(x, more)
        self.parts = parts
        if parts > 1:
            types = [Memory(t.shape, t.dtype, use="result") for t in partial_types(x, plan, parts)]
            given = [*given[:-2], *zip(("partial", "maxima", "sums"), types)]
        elif not keeps_sums:
            given = given[:-1]
        super().__init__(x, given, plan, name)

    def build(self) -> Body:
        """The Body: one program for each key head and part of the keys."""
        b, x, plan = self.b, self.x, self.plan
        grid = multiply(multiply(x.batch, x.key_heads), self.parts)
        p = b.program(0, grid)
        rest = floor_divide(p, self.parts)
        self.part = modulo(p, self.parts)
        self.key_head, self.batch = modulo(rest, x.key_heads), floor_divide(rest, x.key_heads)
        self.places()
        self.each_row(self.prepare)
        self.keys_of()
        b.loop(
            "keys",
            self.lower,
            self.upper,
            plan.keys,
            self.block,
            bounds=(0, max(0, high(x.keys) - 1)),
        )
        self.each_row(self.finish)
        return b.finish((grid,), plan=plan)

    def places(self) -> None:
        """Scratch."""
        x, plan = self.x, self.plan
        wide = plan.across * plan.lanes
        self.query_rows = self.scratch(plan.queries, -(-x.width // plan.lanes) * plan.lanes)
        self.scores = self.scratch(plan.queries, plan.keys)
        self.result = self.scratch(plan.queries, -(-x.value_width // wide) * wide)
        self.most, self.total = self.scratch(plan.queries), self.scratch(plan.queries)

    def query_line(self, r: Size, d: Size) -> Node:
        """A piece of a query, scaled."""
        b, x, n = self.b, self.x, self.lanes
        factor = x.scale / x.softcap if x.softcap else x.scale * LOG2_E
        index = self.at("q", self.batch, *self.row_at(r), d)
        part = b.load(
            self.memory["q"], index, (n,), (self.order("q").index("d"),), self.below(d, n, x.width)
        )
        return b.apply("multiply", b.cast(part, self.sum), self.constant(factor))

    def key_square(self, token: Size, d: Size, mask: Node | None) -> Node:
        """Neighbouring keys, a piece of each."""
        n, order = self.lanes, self.order("k")
        return self.b.load(
            self.memory["k"],
            self.at("k", self.batch, self.key_head, token, d),
            (n, n),
            (order.index("t"), order.index("d")),
            mask,
        )

    def value_line(self, token: Size, d: int, wide: int) -> Node:
        """A piece of a value."""
        return self.b.load(
            self.memory["v"],
            self.at("v", self.batch, self.key_head, token, d),
            (wide,),
            (self.order("v").index("d"),),
            self.below(d, wide, self.x.value_width),
        )

    def prepare(self, r: Size) -> None:
        """A query, scaled; its sums empty (or a sink in them)."""
        b, x, n = self.b, self.x, self.lanes
        head, _ = self.row_at(r)

        def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
            b.store(self.query_rows, self.query_line(r, d), (r, d), (1,))
            return ()

        self.chunks(x.width, chunk)
        zeros = b.constant(0, self.sum, (n,))
        size = self.result.shape[1]

        def clear(d: Size, _: list[Node]) -> Sequence[Node]:
            b.store(self.result, zeros, (r, d), (1,))
            return ()

        b.loop("clear", 0, size, n, clear, bounds=(0, high(size) - n))
        most, total = self.constant(-math.inf), self.constant(0.0)
        if "sinks" in x.extras:
            found = b.cast(b.load(self.memory["sinks"], (head,)), self.sum)
            counts = b.apply("not_equal", found, self.constant(-math.inf))
            if self.parts > 1:  # it counts once
                first = b.apply("equal", b.index(self.part), b.index(0))
                counts = b.apply("bit_and", counts, first)
            own = b.apply("multiply", found, self.constant(LOG2_E))
            most = b.apply("where", counts, own, most)
            total = b.apply("where", counts, self.constant(1.0), total)
        b.store(self.most, most, (r,))
        b.store(self.total, total, (r,))

    def keys_of(self) -> None:
        """The keys of this part that some query may see: lower <= j < upper."""
        b, x = self.b, self.x
        assert isinstance(x.queries, int)
        self.lower, self.upper = 0, x.keys
        if "key_lengths" in x.extras:
            length = b.cast(b.load(self.memory["key_lengths"], (self.batch,)), int64)
            length = b.apply("minimum", length, b.index(x.keys))
            self.upper = b.atom("length", length, 0, high(x.keys))
        low_band, high_band = x.band
        if high_band is not None:
            self.upper = minimum(self.upper, combine(high_band, x.queries, 1))
        if low_band is not None:
            self.lower = maximum(0, low_band)
        if self.parts > 1:
            span = -(-high(x.keys) // (self.parts * self.lanes)) * self.lanes
            start = multiply(self.part, span)
            self.lower = maximum(self.lower, start)
            self.upper = minimum(self.upper, combine(start, span, 1))

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """Scores, softmax and values of a block of keys."""
        b, n = self.b, self.lanes
        self.key = key
        self.count = minimum(combine(self.upper, key, -1), self.plan.keys)
        whole = multiply(floor_divide(self.count, n), n)

        def some(j: Size, _: list[Node]) -> Sequence[Node]:
            self.ask(combine(key, combine(j, AHEAD, 1), 1))
            self.each_row(lambda r: self.score(r, j, True))
            return ()

        def rest() -> Sequence[Node]:
            self.each_row(lambda r: self.score(r, whole, False))
            return ()

        b.loop("some", 0, whole, n, some, bounds=(0, self.plan.keys - n))
        if modulo(self.count, n) != 0:
            b.branch(b.less(whole, self.count), rest)
        self.each_row(self.soften)
        self.gather_values()
        return ()

    def ask(self, key: Size) -> None:
        """Bring keys near before they are read: rows of a tile are no stream, values are one."""
        b, width, line = self.b, self.x.width, 64 // self.x.dtype.size

        def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
            for r in range(self.lanes):
                index = self.at("k", self.batch, self.key_head, combine(key, r, 1), d)
                b.prefetch(self.memory["k"], *index)
            return ()

        b.loop("ask", 0, width, line, chunk, bounds=(0, width - 1))

    def score(self, r: Size, j: Size, whole: bool) -> None:
        """scores[r, j ...] of as many keys as there are lanes, or of those that are left."""
        b, x, n = self.b, self.x, self.lanes
        token = combine(self.key, j, 1)
        inside = None if whole else b.apply("less", self.steps(n, j), b.index(self.count))

        def chunk(d: Size, carried: list[Node]) -> Sequence[Node]:
            mask = self.both(inside, self.below(d, n, x.width), (n, n))
            keys = self.key_square(token, d, mask)
            query = b.load(self.query_rows, (r, d), (n,), (1,))
            return [b.apply("multiply_add", b.cast(keys, self.sum), query, carried[0])]

        top = -(-x.width // n) * n
        sums = b.loop(
            "chunk", 0, top, n, chunk, [b.constant(0, self.sum, (n, n))], bounds=(0, top - n)
        )[0]
        total = b.add(ops.reduce(sums, axis=1, kind="sum"))
        total = self.changed(total, r, j)
        if inside is not None:
            total = b.apply("where", inside, total, self.constant(-math.inf))
        b.store(self.scores, total, (r, j), (1,))

    def changed(self, score: Node, r: Size, j: Size) -> Node:
        """Scores with softcap, bias and slopes; -inf where not seen."""
        b, x, n = self.b, self.x, self.lanes
        head, query = self.row_at(r)
        key = combine(self.key, j, 1)
        apart = self.steps(n, combine(key, query, -1), int32)
        if x.softcap:
            score = b.apply("multiply", b.apply("tanh", score), self.constant(LOG2_E * x.softcap))
        if "bias" in x.extras:
            bias = b.cast(self.extra("bias", head, query, key), self.sum)
            score = b.apply("multiply_add", bias, self.constant(LOG2_E), score)
        if "slopes" in x.extras:
            slope = b.cast(b.load(self.memory["slopes"], (head,)), self.sum)
            slope = b.apply("multiply", slope, self.constant(LOG2_E))
            score = b.apply("multiply_add", b.cast(apart, self.sum), slope, score)
        seen = self.extra("mask", head, query, key) if "mask" in x.extras else None
        low_band, high_band = x.band
        if x.queries != 1 and high_band is not None:
            limit = b.cast(b.index(high_band), int32)
            seen = b.logical_and(seen, b.apply("less_equal", apart, limit))
        if x.queries != 1 and low_band is not None:
            limit = b.cast(b.index(low_band), int32)
            seen = b.logical_and(seen, b.apply("less_equal", limit, apart))
        return score if seen is None else b.apply("where", seen, score, self.constant(-math.inf))

    def extra(self, name: str, head: Size, query: Size, key: Size) -> Node:
        """Bias or mask for neighbouring keys, 0 (or false) past the last."""
        n, memory = self.lanes, self.memory[name]
        sizes = memory.shape
        place = (self.batch, head, query, key)
        index = [0 if size == 1 else at for size, at in zip(sizes, place)]
        if sizes[3] == 1:
            return self.b.load(memory, index)
        return self.b.load(memory, index, (n,), (3,), self.below(key, n, sizes[3]))

    def soften(self, r: Size) -> None:
        """Scores of a row to probabilities (not yet divided); its result and sum fade."""
        b, n = self.b, self.lanes
        stop = multiply(floor_divide(combine(self.count, n - 1, 1), n), n)
        bounds = (0, self.plan.keys - n)

        def largest(j: Size, carried: list[Node]) -> Sequence[Node]:
            return [self.greater(b.load(self.scores, (r, j), (n,), (1,)), carried[0])]

        start = b.constant(-math.inf, self.sum, (n,))
        found = b.loop("largest", 0, stop, n, largest, [start], bounds=bounds)[0]
        before = b.load(self.most, (r,))
        most = self.greater(b.add(ops.reduce(found, axis=0, kind="max")), before)
        hidden = b.apply("equal", most, self.constant(-math.inf))
        base = b.apply("where", hidden, self.constant(0.0), most)
        decay = self.power(b.apply("subtract", before, base))

        def powers(j: Size, carried: list[Node]) -> Sequence[Node]:
            score = b.load(self.scores, (r, j), (n,), (1,))
            value = self.power(b.apply("subtract", score, base))
            b.store(self.scores, value, (r, j), (1,))
            return [b.apply("add", carried[0], value)]

        zeros = b.constant(0, self.sum, (n,))
        sums = b.loop("powers", 0, stop, n, powers, [zeros], bounds=bounds)[0]
        total = b.apply("multiply", b.load(self.total, (r,)), decay)
        b.store(
            self.total, b.apply("add", total, b.add(ops.reduce(sums, axis=0, kind="sum"))), (r,)
        )
        b.store(self.most, most, (r,))
        size = self.result.shape[1]

        def fade(d: Size, _: list[Node]) -> Sequence[Node]:
            part = b.load(self.result, (r, d), (n,), (1,))
            b.store(self.result, b.apply("multiply", part, decay), (r, d), (1,))
            return ()

        b.loop("fade", 0, size, n, fade, bounds=(0, high(size) - n))

    def gather_values(self) -> None:
        """result[r, :] += probability of key j times value j."""
        self.gather_rows(0, self.plan.queries)

    def gather_rows(self, base: Size, count: int) -> None:
        """The same for some rows."""
        b, x, plan = self.b, self.x, self.plan
        wide = plan.across * plan.lanes

        def tile(first: Size, rows: int, d: int) -> None:
            def one(j: Size, sums: Node) -> Node:
                line = self.value_line(combine(self.key, j, 1), d, wide)
                line = b.add(ops.reshape(b.cast(line, self.sum), shape=(1, wide)))
                left = b.load(self.scores, (first, j), (rows, 1), (0, 1))
                return b.add(ops.dot(left, line, sums))

            def step(j: Size, carried: list[Node]) -> Sequence[Node]:
                return [one(combine(j, i, 1), sums) for i, sums in enumerate(carried)]

            ways = 2 if rows * plan.across < 8 else 1  # sums that do not wait for each other
            zeros = b.constant(0, self.sum, (rows, wide))
            sums = [b.load(self.result, (first, d), (rows, wide), (0, 1)), *[zeros] * (ways - 1)]
            even = multiply(floor_divide(self.count, ways), ways)
            sums = b.loop(
                "key", 0, even, ways, step, sums, unroll=4 // ways, bounds=(0, plan.keys - ways)
            )
            if ways > 1:
                total = b.apply("add", *sums)
                sums = b.loop("last", even, self.count, 1, step, [total], bounds=(0, plan.keys - 1))
            b.store(self.result, sums[0], (first, d), (0, 1))

        tiles = -(-count // plan.rows)
        for number in range(tiles):
            first, last = (count * (number + i) // tiles for i in range(2))
            for d in range(0, x.value_width, wide):
                tile(combine(base, first, 1), last - first, d)

    def finish(self, r: Size) -> None:
        """Store a row, or what it is before parts are combined."""
        b, n = self.b, self.lanes
        most, total = b.load(self.most, (r,)), b.load(self.total, (r,))

        def line(d: Size) -> Node:
            return b.load(self.result, (r, d), (n,), (1,))

        if self.parts == 1:
            self.put(r, line, most, total)
            return
        place = self.part_at(r)
        b.store(self.memory["maxima"], most, place)
        b.store(self.memory["sums"], total, place)

        def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
            b.store(
                self.memory["partial"],
                line(d),
                (*place, d),
                (4,),
                self.below(d, n, self.x.value_width),
            )
            return ()

        self.chunks(self.x.value_width, chunk)

    def part_at(self, r: Size) -> tuple[Size, ...]:
        """Where a row's part waits for the others."""
        return self.batch, self.key_head, self.part, r


class Combine(Rows):
    """Builds the Body that puts parts together."""

    def __init__(
        self, x: AttentionShape, plan: CpuPlan, name: str, parts: int, keeps_sums: bool = True
    ) -> None:
        given = [
            (n, Memory(t.shape, t.dtype))
            for n, t in zip(("partial", "maxima", "sums"), partial_types(x, plan, parts))
        ]
        given += parameters(x)[3:] if keeps_sums else parameters(x)[3:-1]
        super().__init__(x, given, plan, name)
        self.parts = parts

    def build(self) -> Body:
        """The Body: one program for each key head."""
        b, x = self.b, self.x
        grid = multiply(x.batch, x.key_heads)
        p = b.program(0, grid)
        self.key_head, self.batch = modulo(p, x.key_heads), floor_divide(p, x.key_heads)
        self.each_row(self.row)
        return b.finish((grid,), plan=self.plan)

    def row(self, r: Size) -> None:
        """One row: parts weighed by 2**(their maximum - the largest)."""
        b, n = self.b, self.lanes
        place = [(self.batch, self.key_head, part, r) for part in range(self.parts)]
        maxima = [b.load(self.memory["maxima"], at) for at in place]
        most = maxima[0]
        for other in maxima[1:]:
            most = self.greater(other, most)
        hidden = b.apply("equal", most, self.constant(-math.inf))
        base = b.apply("where", hidden, self.constant(0.0), most)
        weights = [self.power(b.apply("subtract", m, base)) for m in maxima]
        total = self.constant(0.0)
        for at, weight in zip(place, weights):
            total = b.apply("multiply_add", b.load(self.memory["sums"], at), weight, total)

        def line(d: Size) -> Node:
            value = b.constant(0, self.sum, (n,))
            for at, weight in zip(place, weights):
                part = b.load(
                    self.memory["partial"],
                    (*at, d),
                    (n,),
                    (4,),
                    self.below(d, n, self.x.value_width),
                )
                value = b.apply("multiply_add", part, weight, value)
            return value

        self.put(r, line, most, total)
