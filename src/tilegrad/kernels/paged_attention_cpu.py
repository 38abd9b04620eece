"""Attention over a paged cache on CPUs: keys and values are streamed page by page, once.

A program has a key head and some tokens of one request (`per` at most); rows are their query
heads that share the key head. Tokens of all requests lie one after the other, so a program first
finds its request among the query starts. Keys are taken as many at a time as there are lanes,
which all lie in one page. No work list is needed: what the pages hold past the keys that a token
sees is read but not used. Costs `requests` steps of a loop before a program begins.

Invariant: the meaning is that of `paged_reference.attention`; tokens of no request get 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtype import float32, int32, int64
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import (
    Size,
    combine,
    floor_divide,
    high,
    maximum,
    minimum,
    modulo,
    multiply,
)
from ..ir.types import Memory
from ..tile import ops
from ..tile.build import Body
from ..tile.callee import KernelCallee
from .attention_cpu_decode import KEYS, Decode
from .attention_cpu_tiles import LOG2_E, Builder, CpuPlan
from .attention_shape import AttentionShape
from .paged_shape import PagedShape, cache_parameters

ROWS = 32  # of a program, about


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
    return CpuPlan(max(1, ROWS // x.group) * x.group, KEYS, rows, across, lanes)


def attend_parameters(x: PagedShape) -> list[tuple[str, Memory]]:
    """q, keys, values, scales (of a cache of 8 bits), table, lengths, query_starts, out."""
    made = [("q", Memory((x.tokens, x.heads, x.width), x.dtype)), *cache_parameters(x, "value")]
    if x.scaled:
        made.append(("scales", Memory((2,), float32)))
    made += [("table", Memory((x.requests, x.most_pages), int32)),
             ("lengths", Memory((x.requests,), int32)),
             ("query_starts", Memory((combine(x.requests, 1, 1),), int32))]  # fmt: skip
    return [*made, ("out", Memory((x.tokens, x.heads, x.value_width), x.dtype, use="result"))]


def attend(x: PagedShape, plan: CpuPlan, name: str = "paged_attention") -> Body:
    """The kernel; parameters as `attend_parameters` has them."""
    return _Attend(x, plan, name).build()


class Blocks:
    """Programs that have some tokens (`per` at most) of one request of a paged cache."""

    b: Any
    p: PagedShape
    x: AttentionShape
    memory: dict[str, Node]
    per: int
    lanes: int

    def blocks(self) -> Size:
        """Row blocks there may be, one for each token at most; the last one clears."""
        whole = combine(floor_divide(self.p.tokens, self.per), self.p.requests, 1)
        return combine(minimum(self.p.tokens, whole), 1, 1)

    def integer(self, name: str, *index: Size) -> Node:
        """An int32 of memory as an index."""
        return self.b.cast(self.b.load(self.memory[name], index), int64)

    def find(self, block: Size) -> None:
        """Request, first token and number of tokens of a row block; keys they see."""
        b, p = self.b, self.p
        zero, each = b.index(0), b.index(self.per)

        def look(r: Size, carried: list[Node]) -> Sequence[Node]:
            before, request, token, tokens = carried
            first, last = self.integer("query_starts", r), self.integer(
                "query_starts", combine(r, 1, 1))  # fmt: skip
            own = b.apply("subtract", last, first)
            count = b.apply("add", own, b.index(self.per - 1))
            count = b.apply("floor_divide", count, each)
            inside = b.apply("subtract", b.index(block), before)
            mine = b.apply("bit_and", b.apply("less_equal", zero, inside),
                           b.apply("less", inside, count))  # fmt: skip
            start = b.apply("multiply", inside, each)
            left = b.apply("minimum", b.apply("subtract", own, start), each)
            chosen = ((request, b.index(r)), (token, b.apply("add", first, start)), (tokens, left))
            return [b.apply("add", before, count),
                    *(b.apply("where", mine, new, old) for old, new in chosen)]  # fmt: skip

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
        self.upper = minimum(ends, self.x.keys)
        self.lower = 0
        if p.window:
            begin = maximum(0, combine(self.sees, p.window, -1))
            self.lower = multiply(floor_divide(begin, self.lanes), self.lanes)

    def page_at(self, key: Size) -> tuple[Size, Size]:
        """Page of a key and its place there."""
        p = self.p
        number = self.integer("table", self.request, floor_divide(key, p.page))
        return self.b.atom("page", number, 0, max(0, high(p.pages) - 1)), modulo(key, p.page)


class _Attend(Blocks, Decode):
    """Builds the Body: decode with keys and values looked up."""

    def __init__(self, p: PagedShape, plan: CpuPlan, name: str) -> None:
        x = AttentionShape(1, p.heads, p.key_heads, p.tokens, multiply(p.most_pages, p.page),
                           p.width, p.value_width, p.dtype, p.scale, softcap=p.softcap)  # fmt: skip
        Builder.__init__(self, x, attend_parameters(p), plan, name)
        self.p, self.parts, self.per = p, 1, plan.queries // p.group

    def build(self) -> Body:
        """The Body: a program for each row block there may be, and one for each token left."""
        b, p = self.b, self.p
        blocks = self.blocks()
        grid = multiply(blocks, p.key_heads)
        number = b.program(0, grid)
        self.key_head, self.part = modulo(number, p.key_heads), 0
        block = floor_divide(number, p.key_heads)
        self.places()
        self.find(block)
        self.each_row(self.prepare)
        b.loop("keys", self.lower, self.upper, self.plan.keys, self.block,
               bounds=(0, max(0, high(self.x.keys) - 1)))  # fmt: skip
        self.each_row(self.finish)
        last = b.apply("equal", b.index(combine(block, 1, 1)), b.index(blocks))
        b.branch(last, self.clear)
        return b.finish((grid,), plan=self.plan)

    # ---- which tokens ---------------------------------------------------------------------

    def live(self) -> Size:
        """Rows of the tokens that are there."""
        return multiply(self.tokens, self.p.group)

    def clear(self) -> Sequence[Node]:
        """0 for tokens past the last query start: nobody else writes them."""
        b, p, n = self.b, self.p, self.lanes
        end = b.atom("end", self.integer("query_starts", p.requests), 0, high(p.tokens))

        def token(t: Size, _: list[Node]) -> Sequence[Node]:
            for g in range(p.group):
                head = combine(multiply(self.key_head, p.group), g, 1)

                def chunk(d: Size, _: list[Node], head: Size = head) -> Sequence[Node]:
                    b.store(self.memory["out"], b.constant(0, p.dtype, (n,)), (t, head, d), (2,),
                            self.below(d, n, p.value_width))  # fmt: skip
                    return ()

                self.chunks(p.value_width, chunk)
            return ()

        b.loop("clear", end, p.tokens, 1, token, bounds=(0, max(0, high(p.tokens) - 1)))
        return ()

    # ---- what rows, keys and values are ----------------------------------------------------

    def row_at(self, r: Size) -> tuple[Size, Size]:
        """Head and token of a row."""
        group = self.p.group
        return (combine(multiply(self.key_head, group), modulo(r, group), 1),
                combine(self.token, floor_divide(r, group), 1))  # fmt: skip

    def query_line(self, r: Size, d: Size) -> Node:
        """A piece of a query, scaled (by the keys' scale too)."""
        b, p, n = self.b, self.p, self.lanes
        head, token = self.row_at(r)
        part = b.load(self.memory["q"], (token, head, d), (n,), (2,), self.below(d, n, p.width))
        factor = self.constant(p.scale / p.softcap if p.softcap else p.scale * LOG2_E)
        if p.scaled:
            factor = b.apply("multiply", factor, b.load(self.memory["scales"], (0,)))
        return b.apply("multiply", b.cast(part, self.sum), factor)

    def key_square(self, token: Size, d: Size, mask: Node | None) -> Node:
        """Neighbouring keys, a piece of each: `score` asks page by page."""
        page, place = self.current
        n = self.lanes
        columns = self.both(None, self.below(d, n, self.p.width), (n, n))
        return self.b.load(self.memory["keys"], (page, self.key_head, place, d), (n, n), (2, 3),
                           columns)  # fmt: skip

    def value_line(self, token: Size, d: int, wide: int) -> Node:
        """A piece of a value."""
        page, place = self.page_at(token)
        return self.b.load(self.memory["values"], (page, self.key_head, place, d), (wide,), (3,),
                           self.below(d, wide, self.p.value_width))  # fmt: skip

    def share_of(self, total: Node) -> Node:
        """The values' scale belongs to it."""
        share = super().share_of(total)
        if not self.p.scaled:
            return share
        return self.b.apply("multiply", share, self.b.load(self.memory["scales"], (1,)))

    def store_line(self, r: Size, d: Size, part: Node) -> None:
        """Write a piece of a row of the result."""
        head, token = self.row_at(r)
        self.b.store(self.memory["out"], part, (token, head, d), (2,),
                     self.below(d, self.lanes, self.p.value_width))  # fmt: skip

    # ---- a block of keys ------------------------------------------------------------------

    def block(self, key: Size, _: list[Node]) -> Sequence[Node]:
        """Scores, softmax and values of a block of keys."""
        b, n = self.b, self.lanes
        self.key = key
        self.count = minimum(combine(self.upper, key, -1), self.plan.keys)

        def some(j: Size, _: list[Node]) -> Sequence[Node]:
            self.current = self.page_at(combine(key, j, 1))
            self.near(*self.current)
            self.each_row(lambda r: self.score(r, j, True))
            return ()

        b.loop("some", 0, self.count, n, some, bounds=(0, self.plan.keys - n))
        self.each_row(self.soften)

        def token(t: Size, _: list[Node]) -> Sequence[Node]:
            self.gather_rows(multiply(t, self.p.group), self.p.group)
            return ()

        b.loop("token", 0, self.tokens, 1, token, bounds=(0, self.per - 1))
        return ()

    def near(self, page: Size, place: Size) -> None:
        """Ask for the values of some keys while their scores are computed."""
        b, line = self.b, 64 // self.p.cache.size

        def chunk(d: Size, _: list[Node]) -> Sequence[Node]:
            for r in range(self.lanes):
                index = (page, self.key_head, combine(place, r, 1), d)
                b.add(ops.prefetch(self.memory["values"], *(b.index(i) for i in index)))
            return ()

        b.loop("near", 0, self.p.value_width, line, chunk, bounds=(0, self.p.value_width - 1))

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
            seen = b.logical_and(seen, b.apply("less_equal", b.index(begin), places))
        return b.apply("where", seen, score, self.constant(-math.inf))


def callee(x: PagedShape, target: Target) -> KernelCallee:
    """The kernel as a Graph calls it, with the Plan for a Target."""
    count = len(attend_parameters(x)) - 1
    roles = (*(("read", i) for i in range(count)), ("store", 0))
    return KernelCallee("paged_attention", ((attend(x, choose(x, target)), roles),))
