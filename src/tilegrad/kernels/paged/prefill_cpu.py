"""Attention of many new tokens a request over a paged cache, on CPUs: prefill in chunks.

The kernels of `attention_cpu` (forward, matrix), whose keys and values are looked up: a
program has a head and some tokens of one request, which it finds among the query starts. Token i
of those sees `sees` + i keys, the last `window` of them if there is one; within a program tokens
count from 0. `paged.attention_cpu` is for few new tokens a request.

Invariant: the meaning is that of `graph.paged_reference`; tokens of no request get 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, combine, floor_divide, high, minimum, modulo, multiply
from ...tile.build import Body
from ...tile.callee import KernelCallee
from ..attention.shape import AttentionShape
from ..attention_cpu import forward, matrix
from ..attention_cpu.forward import Forward
from ..attention_cpu.matrix import MatrixForward
from ..attention_cpu.tiles import Builder, CpuPlan
from .attention_cpu import Blocks, attend_parameters
from .shape import PagedShape

LEAST = 16  # new tokens a request, as a rule, from which these kernels are the quicker ones
NAMES = {"keys": "k", "values": "v"}


def why_not(x: PagedShape, target: Target) -> str:
    """Why no Body can be right; '' where one can."""
    plan = choose(x, target)
    if plan is None or not x.dtype.is_float:
        return "no Plan"
    if x.cache is not x.dtype and (plan.unit or x.scaled or not x.cache.is_float):
        return "the cache has the queries' dtype, or on vectors another one of 16 bits or more"
    return ""


def shape_of(x: PagedShape) -> AttentionShape:
    """One request's tokens over its keys; where its diagonal lies is known to a program."""
    keys = multiply(x.most_pages, x.page)
    return AttentionShape(
        1,
        x.heads,
        x.key_heads,
        x.tokens,
        keys,
        x.width,
        x.value_width,
        x.dtype,
        x.scale,
        (0 if x.window else None, 0),
        x.softcap,
        orders=("thd", "bhtd", "bhtd", "thd"),
    )


def choose(x: PagedShape, target: Target) -> CpuPlan | None:
    """The Plan for a shape: on a matrix unit where there is one."""
    of = replace(shape_of(x), queries=high(x.tokens), keys=high(shape_of(x).keys))
    return matrix.choose(of, target) or forward.choose(of, target)


def prefill(x: PagedShape, plan: CpuPlan, name: str = "paged_prefill") -> Body:
    """The kernel; parameters as `attention_cpu.attend_parameters` has them."""
    return (_Matrix if plan.unit else _Vectors)(x, plan, name).build()


def callee(x: PagedShape, target: Target) -> KernelCallee:
    """The kernel as a Graph calls it: (q, keys, values, table, lengths, query_starts) -> out."""
    plan = choose(x, target)
    assert plan is not None
    roles = (*(("read", i) for i in range(len(attend_parameters(x)) - 1)), ("store", 0))
    return KernelCallee("paged_prefill", ((prefill(x, plan), roles),))


class _Prefill(Blocks):
    """What both kinds of kernel share: which tokens, and where keys lie."""

    def __init__(self, p: PagedShape, plan: CpuPlan, name: str) -> None:
        given = [(NAMES.get(n, n), memory) for n, memory in attend_parameters(p)]
        Builder.__init__(self, shape_of(p), given, plan, name)
        self.p, self.per = p, plan.queries
        self.set_factor()  # type: ignore[attr-defined]

    def build(self: Any) -> Body:
        """The Body: programs for each row block there may be and each head."""
        b, p = self.b, self.p
        blocks = self.blocks()
        grid = multiply(blocks, p.heads)
        number = b.program(0, grid)
        self.head, self.batch, self.first = modulo(number, p.heads), 0, 0
        self.key_head = floor_divide(self.head, p.group)
        block = floor_divide(number, p.heads)
        self.places()
        self.find(block)
        low = combine(self.sees, p.window, -1) if p.window else None
        self.x = replace(self.x, queries=self.tokens, band=(low, combine(self.sees, 1, -1)))
        b.branch(b.less(0, self.tokens), self.work)
        b.branch(b.apply("equal", b.index(block), b.index(0)), self.clear)
        return b.finish((grid,), plan=self.plan, fits=True)

    def work(self: Any) -> Sequence[Node]:
        """All of a block that has tokens."""
        self.prepare()
        self.stop = minimum(self.plan.queries, self.tokens)
        self.b.loop(
            "keys",
            self.lower,
            self.upper,
            self.plan.keys,
            self.block,
            bounds=(0, max(0, high(self.x.keys) - 1)),
        )
        self.finish()
        return ()

    def at(self, name: str, batch: Size, head: Size, token: Size, d: Size) -> list[Size]:
        """Where a token lies: in its page, or after the program's first one."""
        if name in ("k", "v"):
            page, place = self.page_at(token)
            return [page, head, place, d]
        return [combine(self.token, token, 1), head, d]

    def heads(self: Any) -> list[Size]:
        """The head of this program's tokens."""
        return [self.head]


class _Matrix(_Prefill, MatrixForward):
    """On a matrix unit."""


class _Vectors(_Prefill, Forward):
    """On vectors."""


__all__ = ["LEAST", "callee", "choose", "prefill", "why_not"]
