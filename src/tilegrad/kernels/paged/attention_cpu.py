"""Attention over a paged cache on CPUs: keys and values are streamed page by page, once.

A program has a key head, some tokens of one request (`per` at most) and a part of the keys they
see; rows are their query heads that share the key head. Tokens of all requests lie one after the
other, so a program first finds its request among the query starts. Keys are taken as many at a
time as there are lanes, which all lie in one page. No work list is needed: what the pages hold
past the keys that a token sees is read but not used. Where key heads do not go evenly into the
workers, keys are split, and a second Body puts the parts together.

Costs: the bytes of keys and values once, at what the caches beyond a core's own deliver: 1,000
keys of 3 heads of 64 float32 are 1.5 MB, 28 us at 55 GB/s, beside 16 us of arithmetic on 2 cores.
So values are asked for while scores are computed and the next keys while values are summed, a few
lines at a time: a burst of such requests holds up the loads behind it. Keys that are no float32
are widened once for all rows. `requests` steps of a loop before a program begins.

Invariant: the meaning is that of `graph.paged_reference`; tokens of no request get 0. The
order of a request's sums depends on its own tokens and keys, the shape of the cache and the
Target's cores, never on other requests.

Long because the kernel stands on one page: `_Attend` writes one Body.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core.config import invariant
from ...core.dtype import float32, int32, int64
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import (
    Size,
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
from ...tile.callee import KernelCallee
from ..attention.shape import AttentionShape
from ..attention_cpu.decode import LEAST_PART, Combine, Decode
from ..attention_cpu.decode import Rows as DecodeRows
from ..attention_cpu.tiles import LOG2_E, Builder, CpuPlan
from .shape import PagedShape, cache_parameters

ROWS = 32  # of a program, about
KEYS = 64  # of a block
LINE, ASKED = 64, 256  # bytes; of so many only the first line is asked for


def why_not(x: PagedShape, target: Target) -> str:
    """Why no Body can be right; '' where one can."""
    if x.page % target.lanes(float32) or KEYS % target.lanes(float32):
        return f"a page is a multiple of {target.lanes(float32)} keys"
    if x.heads % x.key_heads:
        return "heads are a multiple of key heads"
    return ""


def choose(x: PagedShape, target: Target) -> CpuPlan:
    """The Plan for a shape."""
    lanes = target.lanes(float32)
    many = target.vector_registers >= 32
    across = max(1, min(8 if many else 4, -(-x.value_width // lanes)))
    rows = max(1, (24 if many else 10) // across)
    return CpuPlan(
        max(1, ROWS // x.group) * x.group, KEYS, rows, across, lanes, aligned=invariant()
    )


def parts_of(x: PagedShape, target: Target) -> int:
    """Into how many parts keys are split, so that workers have as much to do each. That does not
    depend on how many requests there are: a request's sums do not depend on its neighbours. Where
    they depend on nothing else either, keys are not split."""
    if invariant():
        return 1
    workers, most = max(1, target.cores), high(x.most_pages) * x.page // LEAST_PART
    for parts in range(1, most + 1):
        if parts * x.key_heads % workers == 0 or parts * x.key_heads >= 4 * workers:
            return parts
    return max(1, most)


def attend_parameters(x: PagedShape) -> list[tuple[str, Memory]]:
    """q, keys, values, scales (of a cache of 8 bits), table, lengths, query_starts, out."""
    made = [("q", Memory((x.tokens, x.heads, x.width), x.dtype)), *cache_parameters(x, "value")]
    if x.scaled:
        made.append(("scales", Memory((2,), float32)))
    made += [
        ("table", Memory((x.requests, x.most_pages), int32)),
        ("lengths", Memory((x.requests,), int32)),
        ("query_starts", Memory((combine(x.requests, 1, 1),), int32)),
    ]
    return [*made, ("out", Memory((x.tokens, x.heads, x.value_width), x.dtype, use="result"))]


def partial_parameters(
    x: PagedShape, plan: CpuPlan, parts: int, use: str = "value"
) -> list[tuple[str, Memory]]:
    """What parts leave behind: results that are not divided yet, maxima and sums."""
    lead = (row_blocks(x, plan.queries // x.group), x.key_heads, parts, plan.queries)
    rows = Memory(lead, float32, use=use)
    return [
        ("partial", Memory((*lead, x.value_width), float32, use=use)),
        ("maxima", rows),
        ("sums", rows),
    ]


def attend(x: PagedShape, plan: CpuPlan, name: str = "paged_attention", parts: int = 1) -> Body:
    """The kernel; parameters as `attend_parameters` has them, parts instead of out if several."""
    return _Attend(x, plan, name, parts).build()


def combine_parts(x: PagedShape, plan: CpuPlan, parts: int, name: str = "paged_combine") -> Body:
    """Puts parts together: partial, maxima, sums, scales, lengths, query_starts, out."""
    return _Combine(x, plan, name, parts).build()


def shape_of(x: PagedShape) -> AttentionShape:
    """The attention that a step is, as far as programs share it."""
    return AttentionShape(
        1,
        x.heads,
        x.key_heads,
        x.tokens,
        multiply(x.most_pages, x.page),
        x.width,
        x.value_width,
        x.dtype,
        x.scale,
        softcap=x.softcap,
    )


def row_blocks(x: PagedShape, per: int) -> Size:
    """Row blocks of `per` tokens there may be, one for each token at most; the first one clears."""
    return minimum(x.tokens, combine(floor_divide(x.tokens, per), x.requests, 1))


class Blocks(Builder):
    """Programs that have some tokens (`per` at most) of one request of a paged cache."""

    p: PagedShape
    per: int

    def blocks(self) -> Size:
        """Row blocks there may be."""
        return row_blocks(self.p, self.per)

    def integer(self, name: str, *index: Size) -> Node:
        """An int32 of memory as an index."""
        return self.b.cast(self.b.load(self.memory[name], index), int64)

    def find(self, block: Size) -> None:
        """Request, first token and number of tokens of a row block; keys they see."""
        b, p = self.b, self.p
        zero, each = b.index(0), b.index(self.per)

        def look(r: Size, carried: list[Node]) -> Sequence[Node]:
            before, request, token, tokens = carried
            first, last = (
                self.integer("query_starts", r),
                self.integer("query_starts", combine(r, 1, 1)),
            )
            own = b.apply("subtract", last, first)
            count = b.apply("add", own, b.index(self.per - 1))
            count = b.apply("floor_divide", count, each)
            inside = b.apply("subtract", b.index(block), before)
            mine = b.apply(
                "bit_and", b.apply("less_equal", zero, inside), b.apply("less", inside, count)
            )
            start = b.apply("multiply", inside, each)
            left = b.apply("minimum", b.apply("subtract", own, start), each)
            chosen = ((request, b.index(r)), (token, b.apply("add", first, start)), (tokens, left))
            return [
                b.apply("add", before, count),
                *(b.apply("where", mine, new, old) for old, new in chosen),
            ]

        _, request, token, tokens = b.loop("look", 0, p.requests, 1, look, [zero] * 4)
        self.request = b.atom("request", request, 0, max(0, high(p.requests) - 1))
        self.token = b.atom("token", token, 0, max(0, high(p.tokens) - 1))
        self.tokens = b.atom("tokens", tokens, 0, self.per)
        last = self.integer("query_starts", combine(self.request, 1, 1))
        sees = b.apply("subtract", self.integer("lengths", self.request), last)
        sees = b.apply("add", sees, b.index(combine(self.token, 1, 1)))
        most = high(self.x.keys)
        self.sees = b.atom("sees", sees, -high(p.tokens), most)  # keys the first token sees
        ends = combine(combine(self.sees, self.tokens, 1), 1, -1)
        self.upper = multiply(minimum(ends, self.x.keys), minimum(self.tokens, 1))
        self.lower = 0
        if p.window:
            begin = maximum(0, combine(self.sees, p.window, -1))
            self.lower = self.plan.begin(begin, self.lanes)

    def page_at(self, key: Size) -> tuple[Size, Size]:
        """Page of a key and its place there."""
        p = self.p
        number = self.integer("table", self.request, floor_divide(key, p.page))
        return self.b.atom("page", number, 0, max(0, high(p.pages) - 1)), modulo(key, p.page)

    def clear(self: Any) -> Sequence[Node]:
        """0 for tokens past the last query start: nobody else writes them."""
        b, p, n = self.b, self.p, self.lanes
        end = b.atom("end", self.integer("query_starts", p.requests), 0, high(p.tokens))

        def token(t: Size, _: list[Node]) -> Sequence[Node]:
            for head in self.heads():

                def chunk(d: Size, _: list[Node], head: Size = head) -> Sequence[Node]:
                    b.store(
                        self.memory["out"],
                        b.constant(0, p.dtype, (n,)),
                        (t, head, d),
                        (2,),
                        self.below(d, n, p.value_width),
                    )
                    return ()

                self.chunks(p.value_width, chunk)
            return ()

        b.loop("clear", end, p.tokens, 1, token, bounds=(0, max(0, high(p.tokens) - 1)))
        return ()


class Rows(Blocks, DecodeRows):
    """Rows of a program are the heads of a key head, token by token."""

    row_block: Size

    def live(self) -> Size:
        """Rows of the tokens that are there."""
        return multiply(self.tokens, self.p.group)

    def heads(self) -> list[Size]:
        """The heads of this program's rows."""
        group = self.p.group
        return [combine(multiply(self.key_head, group), g, 1) for g in range(group)]

    def clears(self) -> Node:
        """Whether this program clears tokens of no request."""
        b = self.b
        return b.apply("equal", b.index(self.row_block), b.index(0))

    def row_at(self, r: Size) -> tuple[Size, Size]:
        """Head and token of a row."""
        group = self.p.group
        return (
            combine(multiply(self.key_head, group), modulo(r, group), 1),
            combine(self.token, floor_divide(r, group), 1),
        )

    def share_of(self, total: Node) -> Node:
        """The values' scale belongs to it."""
        share = super().share_of(total)
        if not self.p.scaled:
            return share
        return self.b.apply("multiply", share, self.b.load(self.memory["scales"], (1,)))

    def store_line(self, r: Size, d: Size, part: Node) -> None:
        """Write a piece of a row of the result."""
        head, token = self.row_at(r)
        self.b.store(
            self.memory["out"],
            part,
            (token, head, d),
            (2,),
            self.below(d, self.lanes, self.p.value_width),
        )


class _Attend(Rows, Decode):
    """Builds the Body that streams keys and values, looked up page by page."""

    def __init__(self, p: PagedShape, plan: CpuPlan, name: str, parts: int = 1) -> None:
        given = attend_parameters(p)
        if parts > 1:
            given = [*given[:-1], *partial_parameters(p, plan, parts, "result")]
        Builder.__init__(self, shape_of(p), given, plan, name)
        self.p, self.parts, self.per = p, parts, plan.queries // p.group

    def build(self) -> Body:
        """The Body: programs for each row block there may be, each key head and part."""
        b, p = self.b, self.p
        blocks = self.blocks()
        grid = multiply(multiply(blocks, p.key_heads), self.parts)
        number = b.program(0, grid)
        self.part = modulo(number, self.parts)
        pair = floor_divide(number, self.parts)
        self.key_head, self.row_block = modulo(pair, p.key_heads), floor_divide(pair, p.key_heads)
        self.places()
        self.find(self.row_block)
        self.own_part()
        self.each_row(self.prepare)
        b.loop(
            "keys",
            self.lower,
            self.upper,
            self.plan.keys,
            self.block,
            bounds=(0, max(0, high(self.x.keys) - 1)),
        )
        self.each_row(self.finish)
        if self.parts == 1:
            b.branch(self.clears(), self.clear)
        return b.finish((grid,), plan=self.plan, fits=True)

    def own_part(self) -> None:
        """Of the keys that the tokens see, those of this part."""
        if self.parts == 1:
            return
        unit = self.parts * self.lanes
        count = maximum(0, combine(self.upper, self.lower, -1))
        span = multiply(floor_divide(combine(count, unit - 1, 1), unit), self.lanes)
        self.lower = combine(self.lower, multiply(self.part, span), 1)
        self.upper = minimum(self.upper, combine(self.lower, span, 1))

    def places(self) -> None:
        """Scratch; keys of another dtype than the sums are widened there, once for all rows."""
        super().places()
        wide = self.query_rows.shape[1]
        self.wide_keys = self.scratch(self.lanes, wide) if self.widens else None

    @property
    def widens(self) -> bool:
        """Whether keys are widened once: where several rows read them."""
        return self.p.cache is not self.sum and self.plan.queries > 1

    def query_line(self, r: Size, d: Size) -> Node:
        """A piece of a query, scaled (by the keys' scale too)."""
        b, p, n = self.b, self.p, self.lanes
        head, token = self.row_at(r)
        part = b.load(self.memory["q"], (token, head, d), (n,), (2,), self.below(d, n, p.width))
        factor = self.constant(p.scale / p.softcap if p.softcap else p.scale * LOG2_E)
        if p.scaled:
            factor = b.apply("multiply", factor, b.load(self.memory["scales"], (0,)))
        return b.apply("multiply", b.cast(part, self.sum), factor)

    # ---- a block of keys ------------------------------------------------------------------

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """Scores, softmax and values of a block of keys."""
        b, n = self.b, self.lanes
        self.key = key
        self.count = minimum(combine(self.upper, key, -1), self.plan.keys)

        def some(j: Size, _: list[Node]) -> Sequence[Node]:
            self.current = self.page_at(combine(key, j, 1))
            self.widen()
            self.each_row(lambda r: self.score(r, j, True))
            return ()

        b.loop("some", 0, self.count, n, some, bounds=(0, self.plan.keys - n))
        self.each_row(self.soften)

        def token(t: Size, _: list[Node]) -> Sequence[Node]:
            self.gather_rows(multiply(t, self.p.group), self.p.group)
            return ()

        b.loop("token", 0, self.tokens, 1, token, bounds=(0, self.per - 1))
        return ()

    def ask_for(self, name: str, place: tuple[Size, Size], row: Size) -> None:
        """Ask for a key or value that is read soon; of a long one machines bring neighbouring lines
        with the first."""
        b, memory, size = self.b, self.memory[name], self.p.cache.size
        width: int = memory.shape[3]
        step = LINE if width * size < ASKED else ASKED
        for d in range(0, width, step // size):
            index = (place[0], self.key_head, combine(place[1], row, 1), d)
            b.prefetch(memory, *index)

    def key_square(self, token: Size, d: Size, mask: Node | None) -> Node:
        """Neighbouring keys, a piece of each: of the current page."""
        page, place = self.current
        n = self.lanes
        columns = self.both(None, self.below(d, n, self.p.width), (n, n))
        return self.b.load(
            self.memory["keys"], (page, self.key_head, place, d), (n, n), (2, 3), columns
        )

    def widen(self) -> None:
        """Neighbouring keys in the dtype of the sums."""
        b = self.b
        if not self.widens:
            return

        def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
            assert self.wide_keys is not None
            b.store(self.wide_keys, b.cast(self.key_square(0, d, None), self.sum), (0, d), (0, 1))
            return ()

        self.chunks(self.p.width, chunk)

    def score(self, r: Size, j: Size, whole: bool) -> None:
        """scores[r, j ...] of as many keys as there are lanes; asks for its share of values."""
        b, x, n = self.b, self.x, self.lanes
        for row in range(0, n, self.p.group):
            self.ask_for("values", self.current, combine(modulo(r, self.p.group), row, 1))

        def chunk(d: Size, carried: list[Node]) -> Sequence[Node]:
            keys = (
                b.load(self.wide_keys, (0, d), (n, n), (0, 1))
                if self.wide_keys is not None
                else b.cast(self.key_square(0, d, None), self.sum)
            )
            query = b.load(self.query_rows, (r, d), (n,), (1,))
            return [b.apply("multiply_add", keys, query, carried[0])]

        top = -(-x.width // n) * n
        sums = b.loop(
            "chunk", 0, top, n, chunk, [b.constant(0, self.sum, (n, n))], bounds=(0, top - n)
        )[0]
        total = b.add(ops.reduce(sums, axis=1, kind="sum"))
        b.store(self.scores, self.changed(total, r, j), (r, j), (1,))

    def changed(self, score: Node, r: Size, j: Size) -> Node:
        """Scores with softcap; -inf where not seen."""
        b, p, n = self.b, self.p, self.lanes
        if p.softcap:
            score = b.apply("multiply", b.apply("tanh", score), self.constant(LOG2_E * p.softcap))
        end = combine(self.sees, floor_divide(r, p.group), 1)
        places = self.steps(n, combine(self.key, j, 1))
        seen = b.apply("less", places, b.index(end))
        if p.window:
            begin = combine(end, p.window, -1)
            after = b.apply("less_equal", b.index(begin), places)
            seen = b.apply("bit_and", seen, after)
        return b.apply("where", seen, score, self.constant(-math.inf))

    def gather_rows(self, base: Size, count: int) -> None:
        """result[r, :] += probability of key j times value j, for the rows of a token."""
        plan = self.plan
        wide, tiles = plan.across * plan.lanes, -(-count // plan.rows)
        for number in range(tiles):
            first, last = (count * (number + i) // tiles for i in range(2))
            for d in range(0, self.x.value_width, wide):
                self.gather_tile(combine(base, first, 1), last - first, d, number + d == 0)

    def gather_tile(self, first: Size, rows: int, d: int, asks: bool) -> None:
        """A tile of rows by vectors; the first one asks for the next block's keys."""
        b, plan, n = self.b, self.plan, self.lanes
        wide = plan.across * n

        def one(i: Size, j: Size, page: Size, place: Size, sums: Node) -> Node:
            line = b.load(
                self.memory["values"],
                (page, self.key_head, combine(place, i, 1), d),
                (wide,),
                (3,),
                self.below(d, wide, self.p.value_width),
            )
            line = b.add(ops.reshape(b.cast(line, self.sum), shape=(1, wide)))
            left = b.load(self.scores, (first, combine(j, i, 1)), (rows, 1), (0, 1))
            return b.add(ops.dot(left, line, sums))

        def some(j: Size, carried: list[Node]) -> Sequence[Node]:
            page, place = self.page_at(combine(self.key, j, 1))
            ahead = minimum(
                combine(combine(self.key, j, 1), plan.keys, 1), combine(self.upper, 1, -1)
            )
            following = self.page_at(multiply(floor_divide(ahead, n), n))

            def step(i: Size, own: list[Node]) -> Sequence[Node]:
                if asks:
                    self.ask_for("keys", following, i)
                return [one(i, j, page, place, own[0])]

            here = minimum(combine(self.count, j, -1), n)
            return b.loop("key", 0, here, 1, step, carried, unroll=4, bounds=(0, n - 1))

        sums = [b.load(self.result, (first, d), (rows, wide), (0, 1))]
        sums = b.loop("some", 0, self.count, n, some, sums, bounds=(0, plan.keys - n))
        b.store(self.result, sums[0], (first, d), (0, 1))

    # ---- results --------------------------------------------------------------------------

    def part_at(self, r: Size) -> tuple[Size, ...]:
        """Where a row's part waits for the others."""
        return self.row_block, self.key_head, self.part, r


class _Combine(Rows, Combine):
    """Builds the Body that puts parts together, in their order."""

    def __init__(self, p: PagedShape, plan: CpuPlan, name: str, parts: int) -> None:
        names = ("scales", "lengths", "query_starts", "out")
        given = [
            *partial_parameters(p, plan, parts),
            *(x for x in attend_parameters(p) if x[0] in names),
        ]
        Builder.__init__(self, shape_of(p), given, plan, name)
        self.p, self.parts, self.per = p, parts, plan.queries // p.group

    def build(self) -> Body:
        """The Body: a program for each row block there may be and each key head."""
        b, p = self.b, self.p
        blocks = self.blocks()
        grid = multiply(blocks, p.key_heads)
        number = b.program(0, grid)
        self.key_head, self.batch = modulo(number, p.key_heads), floor_divide(number, p.key_heads)
        self.row_block = self.batch
        self.find(self.row_block)
        self.each_row(self.row)
        b.branch(self.clears(), self.clear)
        return b.finish((grid,), plan=self.plan, fits=True)


def callee(x: PagedShape, target: Target) -> KernelCallee:
    """The kernel as a Graph calls it, with the Plan for a Target; results but the first are
    scratch."""
    plan, parts = choose(x, target), parts_of(x, target)
    names = [name for name, _ in attend_parameters(x)[:-1]]
    bodies = [attend(x, plan, parts=parts)]
    if parts > 1:
        bodies.append(combine_parts(x, plan, parts))
    results = ("out", "partial", "maxima", "sums")[: 1 if parts == 1 else 4]

    def role(name: str) -> tuple[str, int]:
        return ("store", results.index(name)) if name in results else ("read", names.index(name))

    return KernelCallee(
        "paged_attention",
        tuple((body, tuple(role(p.attrs["name"]) for p in body.parameters)) for body in bodies),
    )
