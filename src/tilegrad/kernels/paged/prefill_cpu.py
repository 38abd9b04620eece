"""Attention of many new tokens a request over a paged cache, on CPUs: prefill in chunks.

The kernels of `attention_cpu` (forward, matrix), whose keys and values are looked up: a
program has a head and some tokens of one request, which it finds among the query starts. Token i
of those sees `sees` + i keys, the last `window` of them if there is one; within a program tokens
count from 0. `paged.attention_cpu` is for few new tokens a request.

Invariant: the meaning is that of `graph.paged_reference`; tokens of no request get 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import high, minimum
from ...tile.build import Body
from ...tile.callee import KernelCallee
from ..attention.shape import AttentionShape
from ..attention_cpu import forward, matrix
from ..attention_cpu.forward import Forward
from ..attention_cpu.matrix import MatrixForward
from ..attention_cpu.tiles import CpuPlan, Kernel, Vectors
from .attention_cpu import Pages, attend_parameters, called, row_blocks, shape_of
from .shape import PagedShape

LEAST = 16  # new tokens a request, as a rule, from which these kernels are the quicker ones


def why_not(x: PagedShape, target: Target) -> str:
    """Why no Body can be right; '' where one can."""
    plan = choose(x, target)
    if plan is None or not x.dtype.is_float:
        return "no Plan"
    if x.cache is not x.dtype and (plan.unit or x.scaled or not x.cache.is_float):
        return "the cache has the queries' dtype, or on vectors another one of 16 bits or more"
    return ""


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
    return _built(x, plan)


@functools.lru_cache(maxsize=64)
def _built(x: PagedShape, plan: CpuPlan) -> KernelCallee:
    return called("paged_prefill", x, prefill(x, plan))


class _Vectors(Forward):
    """On vectors: the tokens of a block over their pages."""

    source: Pages

    def __init__(self, p: PagedShape, plan: CpuPlan, name: str) -> None:
        self.p = p
        Kernel.__init__(self, shape_of(p), attend_parameters(p), plan, name)
        self.prepare_scores()

    def source_of(self, v: Vectors, x: AttentionShape, memory: Mapping[str, Node]) -> Pages:
        """Pages."""
        return Pages(self.p, self.plan.queries, v, memory)

    def build(self) -> Body:
        """The Body: programs for each row block there may be and each head."""
        b, p, plan = self.b, self.p, self.plan
        grid = row_blocks(p, plan.queries) * p.heads
        number = b.program(0, grid)
        self.head, self.first = number % p.heads, 0
        self.key_head = self.head // p.group
        block = number // p.heads
        self.places()
        self.lower, self.upper = self.source.find(block, plan)
        with b.when(b.less(0, self.source.tokens)):
            self.prepare()
            self.stop = minimum(plan.queries, self.source.tokens)
            self.walk()
        self.source.clear_rest(block, [self.head])
        return b.finish((grid,), plan=plan, fits=True)


class _Matrix(_Vectors, MatrixForward):
    """On a matrix unit."""


__all__ = ["LEAST", "callee", "choose", "prefill", "why_not"]
