"""Attention over a paged cache on CPUs: the kernels of `attention_cpu`, whose keys lie in pages.

Tokens of all requests lie one after the other, so a program first finds its request among the query
starts; a query's number is its place among the keys of its request. `attend` is for any number of
new tokens a request: keys and values are streamed page by page, once, as many keys at a time as
there are lanes, which all lie in one page; what a page holds past the keys that a token sees is
read but not used. `prefill` is for many.

Costs: the bytes of keys and values once, at what the caches beyond a core's own deliver: 1,000
keys of 3 heads of 64 float32 are 1.5 MB, 28 us at 55 GB/s, beside 16 us of arithmetic on 2 cores.
So values are asked for while scores are computed and the next keys while values are summed, a few
lines at a time: a burst of such requests holds up the loads behind it. `requests` steps of a loop
before a program begins.

Invariant: the meaning is that of `graph.paged_reference`; tokens of no request get 0. The
order of a request's sums depends on its own tokens and keys, the shape of the cache and the
Target's cores, never on other requests.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.config import invariant
from ...core.dtype import float32, int64
from ...core.target import Target
from ...ir.symbol import high
from ...tile.build import Body
from ..attention.shape import AttentionShape, Parameters
from ..attention.softmax import clamped
from ..attention.tile_order import block_at
from ..attention_cpu import engine, score_tiles
from ..attention_cpu.decode import LEAST_PART, plan_of, streamed
from ..attention_cpu.engine import CpuPlan
from ..attention_cpu.source import Place, Source
from .shape import STEP, PagedShape, attention_of, parameters

ROWS = 32  # of a program, about
# new tokens a request, as a rule, from which `prefill` is the quicker one
LEAST_NEW_TOKENS = 16


def prefill_why_not(x: PagedShape, target: Target) -> str:
    """Why `prefill` does not take a step; '' where it does."""
    if x.page % target.lanes(float32):
        return f"a page is a multiple of {target.lanes(float32)} keys"
    if x.cache is x.dtype:
        return ""
    if prefill_plan(x, target).unit or x.scaled or not x.cache.is_float:
        return "the cache has the queries' dtype, or on vectors another one of 16 bits or more"
    return ""


def choose(x: PagedShape, target: Target) -> CpuPlan:
    """The Plan for a shape."""
    rows = max(1, ROWS // x.group) * x.group
    return plan_of(rows, float32, x.value_width, target, invariant(), x.page)


def prefill_plan(x: PagedShape, target: Target) -> CpuPlan:
    """The Plan for many new tokens a request."""
    return engine.choose(shape_of(x), target)


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
    """q, k, v, scales (of a cache of 8 bits), table, lengths, query_starts, sinks (if there are
    any), out."""
    given = parameters(x, (*STEP, "out"), keys="value", values="value")
    return [({"keys": "k", "values": "v"}.get(name, name), memory) for name, memory in given]


def attend(x: PagedShape, plan: CpuPlan, parts: int = 1) -> list[Body]:
    """The Bodies; parameters as `attend_parameters` has them, and what several parts leave."""
    lead = x.tokens // (plan.queries // x.group) + x.requests
    given, name = attend_parameters(x), "paged_attention"
    return streamed(Pages(x, plan), given, lead, plan, name, parts)


def prefill(x: PagedShape, plan: CpuPlan) -> Body:
    """The kernel; parameters as `attend_parameters` has them."""
    return score_tiles.Forward(Pages(x, plan), attend_parameters(x), plan, "paged_prefill").build()


def shape_of(x: PagedShape) -> AttentionShape:
    """The tokens of a request over its keys."""
    band = (1 - x.window if x.window else None, 0)
    return attention_of(x, band=band, extras=("sinks",) if x.sinks else ())


class Pages(Source):
    """Keys and values in the pages of a request."""

    notes = {"fits": True}

    def __init__(self, p: PagedShape, plan: CpuPlan) -> None:
        super().__init__(shape_of(p), plan.lanes)
        self.p, self.run, self.several = p, plan.lanes, True

    def find(self, block: Any, per: int, of_keys: bool) -> tuple[Any, Any]:
        """See `Source`; the request, where its tokens begin, and how many keys it has."""
        self.request, first, spans = block_at(self.x, self.memory, block, per)
        ((start, count),) = spans
        length = tile.cast(self.memory["lengths"][self.request], int64)
        tokens, most = high(self.p.tokens), high(self.x.keys)
        self.keys = tile.hold(length, "length", (0, most))
        before = tile.hold(length - count, "before", (-tokens, most))
        self.query_start = start - before
        self.queries = before + first + clamped(count - first, 0, per)
        return before + first, self.queries

    def place(self, name: str, head: Any, token: Any) -> Place:
        """Where tokens lie; keys in one page."""
        if name not in ("k", "v"):
            return super().place(name, head, token)
        p = self.p
        number = tile.cast(self.memory["table"][self.request, token // p.page], int64)
        page = tile.hold(number, "page", (0, max(0, high(p.pages) - 1)))
        return Place(name, lambda _, i, d: [page, head, token % p.page + i, d])

    def scale(self, which: int, head: Any) -> Any | None:
        """The cache's scales belong to it."""
        return tile.load(self.memory["scales"][which, head]) if self.p.scaled else None
