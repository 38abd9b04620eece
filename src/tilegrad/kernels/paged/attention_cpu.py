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
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.config import invariant
from ...core.dtype import float32, int32, int64
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, high, maximum, minimum
from ...ir.types import Memory
from ...tile.build import Body
from ...tile.callee import KernelCallee
from ..attention.shape import AttentionShape, Parameters
from ..attention_cpu.decode import KEYS, LEAST_PART, Combine, Decode, partial_parameters, plan_of
from ..attention_cpu.decode import Rows as DecodeRows
from ..attention_cpu.tiles import CpuPlan, Kernel, Source, Vectors
from .shape import PagedShape, cache_parameters, scales_parameter

ROWS = 32  # of a program, about
LINE, ASKED = 64, 256  # bytes; of so many only the first line is asked for
PARTIAL = ("partial", "maxima", "sums")


def why_not(x: PagedShape, target: Target) -> str:
    """Why no Body can be right; '' where one can."""
    if x.page % target.lanes(float32) or KEYS % target.lanes(float32):
        return f"a page is a multiple of {target.lanes(float32)} keys"
    if x.heads % x.key_heads:
        return "heads are a multiple of key heads"
    return ""


def choose(x: PagedShape, target: Target) -> CpuPlan:
    """The Plan for a shape."""
    rows = max(1, ROWS // x.group) * x.group
    return plan_of(rows, float32, x.value_width, target, aligned=invariant())


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


def attend_parameters(x: PagedShape) -> Parameters:
    """q, k, v, scales (of a cache of 8 bits), table, lengths, query_starts, out."""
    keys, values = (memory for _, memory in cache_parameters(x, "value"))
    made = [("q", Memory((x.tokens, x.heads, x.width), x.dtype)), ("k", keys), ("v", values)]
    if x.scaled:
        made.append(("scales", scales_parameter(x)))
    made += [
        ("table", Memory((x.requests, x.most_pages), int32)),
        ("lengths", Memory((x.requests,), int32)),
        ("query_starts", Memory((x.requests + 1,), int32)),
    ]
    return [*made, ("out", Memory((x.tokens, x.heads, x.value_width), x.dtype, use="result"))]


def attend(x: PagedShape, plan: CpuPlan, name: str = "paged_attention", parts: int = 1) -> Body:
    """The kernel; parameters as `attend_parameters` has them, parts instead of out if several."""
    given = attend_parameters(x)
    if parts > 1:
        given = [*given[:-1], *_partial(x, plan, parts, "result")]
    return _Attend(x, given, plan, name, parts).build()


def combine_parts(x: PagedShape, plan: CpuPlan, parts: int, name: str = "paged_combine") -> Body:
    """Puts parts together: partial, maxima, sums, scales, lengths, query_starts, out."""
    names = ("scales", "lengths", "query_starts", "out")
    given = [*_partial(x, plan, parts), *(p for p in attend_parameters(x) if p[0] in names)]
    return _Combine(x, given, plan, name, parts).build()


def _partial(x: PagedShape, plan: CpuPlan, parts: int, use: str = "value") -> Parameters:
    return partial_parameters(shape_of(x), row_blocks(x, plan.queries // x.group), plan, parts, use)


def shape_of(x: PagedShape) -> AttentionShape:
    """One request's tokens over its keys; where its diagonal lies is known to a program."""
    return AttentionShape(
        1,
        x.heads,
        x.key_heads,
        x.tokens,
        x.most_pages * x.page,
        x.width,
        x.value_width,
        x.dtype,
        x.scale,
        (0 if x.window else None, 0),
        x.softcap,
        orders=("thd", "bhtd", "bhtd", "thd"),
    )


def row_blocks(x: PagedShape, per: int) -> Size:
    """Row blocks of `per` tokens there may be, one for each token at most; the first one clears."""
    return minimum(x.tokens, x.tokens // per + x.requests)


class Pages(Source):
    """The tokens of a row block (`per` at most, of one request), which count from 0, and the keys
    and values in the pages of the request."""

    def __init__(self, p: PagedShape, per: int, v: Vectors, memory: Mapping[str, Node]) -> None:
        super().__init__(v, shape_of(p), memory)
        self.p, self.per, self.batch = p, per, 0

    def integer(self, name: str, *index: Size) -> Node:
        """An int32 of memory as an index."""
        return self.v.b.cast(self.v.b.load(self.memory[name], index), int64)

    def find(self, block: Size, plan: CpuPlan) -> tuple[Size, Size]:
        """Request, first token and number of tokens of a row block; the keys they see: lower <= j <
        upper."""
        b, p, keys = self.v.b, self.p, self.x.keys
        zero, each = b.index(0), b.index(self.per)
        found = [zero] * 4
        for r in b.each("look", 0, p.requests, carried=found):
            before, request, token, tokens = found
            first, last = (self.integer("query_starts", r + i) for i in range(2))
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
            found[:] = [
                b.apply("add", before, count),
                *(b.apply("where", mine, new, old) for old, new in chosen),
            ]
        _, request, token, tokens = found
        self.request = b.atom("request", request, 0, max(0, high(p.requests) - 1))
        self.token = b.atom("token", token, 0, max(0, high(p.tokens) - 1))
        self.tokens = b.atom("tokens", tokens, 0, self.per)
        last = self.integer("query_starts", self.request + 1)
        sees = b.apply("subtract", self.integer("lengths", self.request), last)
        sees = b.apply("add", sees, b.index(self.token + 1))
        self.sees = b.atom("sees", sees, -high(p.tokens), high(keys))  # by the first token
        ends = self.sees + self.tokens - 1
        upper = minimum(ends, keys) * minimum(self.tokens, 1)
        lower: Size = 0
        if p.window:
            lower = plan.begin(maximum(0, self.sees - p.window), plan.lanes)
        band = (self.sees - p.window if p.window else None, self.sees - 1)
        self.x = replace(self.x, queries=self.tokens, band=band)
        return lower, upper

    def page_at(self, key: Size) -> tuple[Size, Size]:
        """Page of a key and its place there."""
        p = self.p
        number = self.integer("table", self.request, key // p.page)
        return self.v.b.atom("page", number, 0, max(0, high(p.pages) - 1)), key % p.page

    def at(self, name: str, head: Size, token: Size, d: Size) -> list[Size]:
        """Where a token lies: in its page, or after the program's first one."""
        if name in ("k", "v"):
            page, place = self.page_at(token)
            return [page, head, place, d]
        return [self.token + token, head, d]

    def clear_rest(self, block: Size, heads: Sequence[Size]) -> None:
        """0 for tokens past the last query start, by the first program of each head: nobody else
        writes them."""
        v, b, p, n = self.v, self.v.b, self.p, self.v.lanes
        with b.when(b.apply("equal", b.index(block), b.index(0))):
            end = b.atom("end", self.integer("query_starts", p.requests), 0, high(p.tokens))
            most = max(0, high(p.tokens) - 1)
            for t in b.each("clear", end, p.tokens, bounds=(0, most)):
                for head in heads:
                    for d in v.chunks("chunk", p.value_width):
                        zeros, inside = b.constant(0, p.dtype, (n,)), v.below(d, n, p.value_width)
                        b.store(self.memory["out"], zeros, (t, head, d), (2,), inside)


class Rows(DecodeRows):
    """Rows of a program are the heads of a key head, token by token."""

    source: Pages
    notes = {"fits": True}

    def __init__(
        self, p: PagedShape, given: Parameters, plan: CpuPlan, name: str, parts: int
    ) -> None:
        self.p, self.parts, self.per = p, parts, plan.queries // p.group
        Kernel.__init__(self, shape_of(p), given, plan, name)

    def source_of(self, v: Vectors, x: AttentionShape, memory: Mapping[str, Node]) -> Pages:
        """Pages."""
        return Pages(self.p, self.per, v, memory)

    def lead(self) -> Size:
        """A row block each."""
        return row_blocks(self.p, self.per)

    def begin(self) -> None:
        """The tokens."""
        self.lower, self.upper = self.source.find(self.source.batch, self.plan)

    def end(self) -> None:
        """Tokens of no request, where results are stored."""
        if "out" in self.memory:
            group = self.p.group
            self.source.clear_rest(
                self.source.batch, [self.key_head * group + g for g in range(group)]
            )

    def live(self) -> Size:
        """Rows of the tokens that are there."""
        return self.source.tokens * self.p.group

    def row_at(self, r: Size) -> tuple[Size, Size]:
        """Head and token of a row."""
        group = self.p.group
        return self.key_head * group + r % group, r // group

    def scaled(self, factor: Node, which: int) -> Node:
        """The cache's scales belong to it."""
        if not self.p.scaled:
            return factor
        own = self.b.load(self.memory["scales"], (which, self.key_head))
        return self.b.apply("multiply", factor, own)


class _Attend(Rows, Decode):
    """Builds the Body that streams keys and values, looked up page by page."""

    def begin(self) -> None:
        """Of the keys that the tokens see, those of this part."""
        super().begin()
        if self.parts == 1:
            return
        unit = self.parts * self.lanes
        count = maximum(0, self.upper - self.lower)
        span = (count + unit - 1) // unit * self.lanes
        self.lower = self.lower + self.part * span
        self.upper = minimum(self.upper, self.lower + span)

    def places(self) -> None:
        """Scratch; keys of another dtype than the sums are widened there, once for all rows."""
        super().places()
        self.wide_keys: Node | None = None
        if self.p.cache is not self.sum and self.plan.queries > 1:
            self.wide_keys = self.scratch(self.lanes, high(self.query_rows.shape[1]))

    # ---- a block of keys ------------------------------------------------------------------

    def block(self) -> None:
        """Scores, softmax and values of a block of keys."""
        b, n = self.b, self.lanes
        for j in b.each("some", 0, self.count, n, bounds=(0, self.plan.keys - n)):
            self.current = self.source.page_at(self.key + j)
            self.widen()
            for r in self.each_row():
                for row in range(0, n, self.p.group):
                    self.ask_for("v", self.current, r % self.p.group + row)
                self.score(r, j)
        for r in self.each_row():
            self.soften(r)
        for t in b.each("token", 0, self.source.tokens, bounds=(0, self.per - 1)):
            self.gather_rows(t * self.p.group, self.p.group)

    def ask_for(self, name: str, place: tuple[Size, Size], row: Size) -> None:
        """Ask for a key or value that is read soon; of a long one machines bring neighbouring lines
        with the first."""
        memory, size = self.memory[name], self.p.cache.size
        width: int = memory.shape[3]
        step = LINE if width * size < ASKED else ASKED
        for d in range(0, width, step // size):
            self.b.prefetch(memory, place[0], self.key_head, place[1] + row, d)

    def key_square(self, token: Size, d: Size, mask: Node | None, wide: bool = True) -> Node:
        """Neighbouring keys of the current page, a piece of each: widened, if they are."""
        n, (page, place) = self.lanes, self.current
        if wide and self.wide_keys is not None:
            return self.b.load(self.wide_keys, (0, d), (n, n), (0, 1))
        index = (page, self.key_head, place, d)
        return self.b.load(self.memory["k"], index, (n, n), (2, 3), mask)

    def widen(self) -> None:
        """Neighbouring keys in the dtype of the sums."""
        b, n = self.b, self.lanes
        if self.wide_keys is None:
            return
        for d in self.v.chunks("chunk", self.p.width):
            mask = self.v.both(None, self.v.below(d, n, self.p.width), (n, n))
            keys = b.cast(self.key_square(self.key, d, mask, wide=False), self.sum)
            b.store(self.wide_keys, keys, (0, d), (0, 1))

    def gather_tile(self, first: Size, rows: int, d: int) -> None:
        """A tile of rows by vectors; the first one asks for the next block's keys."""
        b, plan, n, wide = self.b, self.plan, self.lanes, self.plan.panel
        asks = d == 0 and first % self.p.group == 0
        sums = [b.load(self.result, (first, d), (rows, wide), (0, 1))]
        for j in b.each("some", 0, self.count, n, sums, bounds=(0, plan.keys - n)):
            page, place = self.source.page_at(self.key + j)
            ahead = minimum(self.key + j + plan.keys, self.upper - 1)
            following = self.source.page_at(ahead // n * n)
            here = minimum(self.count - j, n)
            for i in b.each("key", 0, here, 1, sums, unroll=4, bounds=(0, n - 1)):
                if asks:
                    self.ask_for("k", following, i)
                index = (page, self.key_head, place + i, d)
                inside = self.v.below(d, wide, self.p.value_width)
                line = b.load(self.memory["v"], index, (wide,), (3,), inside)
                sums[0] = self.weighed(first, rows, j + i, line, sums[0])
        b.store(self.result, sums[0], (first, d), (0, 1))


class _Combine(Rows, Combine):
    """Builds the Body that puts parts together, in their order."""


def callee(x: PagedShape, target: Target) -> KernelCallee:
    """The kernel as a Graph calls it, with the Plan for a Target; results but the first are
    scratch."""
    return _built(x, choose(x, target), parts_of(x, target))


@functools.lru_cache(maxsize=64)
def _built(x: PagedShape, plan: CpuPlan, parts: int) -> KernelCallee:
    bodies = [attend(x, plan, parts=parts)]
    if parts > 1:
        bodies.append(combine_parts(x, plan, parts))
    return called("paged_attention", x, *bodies)


def called(name: str, x: PagedShape, *bodies: Body) -> KernelCallee:
    """(q, keys, values, scales if of 8 bits, table, lengths, query_starts) -> out, and scratch."""
    names = [name for name, _ in attend_parameters(x)[:-1]]
    results = ("out", *PARTIAL)

    def role(name: str) -> tuple[str, int]:
        return ("store", results.index(name)) if name in results else ("read", names.index(name))

    launches = [(body, tuple(role(p.attrs["name"]) for p in body.parameters)) for body in bodies]
    return KernelCallee(name, tuple(launches))
