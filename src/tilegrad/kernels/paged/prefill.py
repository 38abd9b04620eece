"""Attention of many new tokens a request over a paged cache: prefill, whole or in chunks.

The kernel of `attention`, whose keys and values come page by page: a tile is 128 queries of one
head of one request, its blocks of keys are the pages that the request's row of the table names.
Query i of a request with n new tokens and `length` keys sees the keys up to length - n + i, the
last `window` of them if there is one. `paged_attention` takes requests with few new tokens, in a
launch beside this one.

Costs are those of `attention`: matrix units bound it. Invariant: values in pages of a request past
its last key are finite (`paged_append` leaves zeros there): their weights are 0, not their terms.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from ... import tile
from ...core.dtype import float32, int32
from ...core.target import Target
from ...ir.symbol import high, symbol
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ..attention import plan as attention_plan
from ..attention.forward import WideAttention
from ..attention.plan import AttentionPlan, fitted, padded
from ..attention.shape import AttentionShape
from ..attention.walk import Walk, Work, bounded
from .shape import PagedShape, cache_parameters
from .steps import page_numbers

LEAST = 64  # tokens of a step from which this kernel is worth a launch of its own
FEW = 8  # new tokens of a request below which `paged_attention` is the quicker one
TILES = ((128, 128), (128, 64), (64, 64))  # (queries, keys): blocks of keys are whole pages
Parameters = list[tuple[str, Memory]]


def shape_of(x: PagedShape) -> AttentionShape:
    """The attention that a step is: requests one after another, their diagonal at the end."""
    keys = x.most_pages * x.page
    last = symbol("offset", 0, high(keys))
    first = last - (x.window - 1) if x.window else None
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
        (first, last),
        x.softcap,
        extras=("query_starts", "key_starts"),
        orders=("bthd", "bhtd", "bhtd", "bthd"),
    )


def parameters(x: PagedShape) -> Parameters:
    """q (1, tokens, heads, width), keys, values, table, lengths, query_starts; out and lse."""
    keys, values = (memory for _, memory in cache_parameters(x))
    return [
        ("q", Memory((1, x.tokens, x.heads, x.width), x.dtype)),
        ("k", keys),
        ("v", values),
        ("table", Memory((x.requests, x.most_pages), int32)),
        ("lengths", Memory((x.requests,), int32)),
        ("query_starts", Memory((x.requests + 1,), int32)),
        ("out", Memory((1, x.tokens, x.heads, x.value_width), x.dtype, use="result")),
        ("lse", Memory((1, x.heads, x.tokens), float32, use="result")),
    ]


def why_not(x: PagedShape, target: Target) -> str:
    """Why the kernel does not take a step; '' where it does."""
    if x.cache is not x.dtype:
        return "the cache has the queries' dtype"
    if x.page % 8 or x.page & (x.page - 1):
        return "a page is a power of two, 8 or more"
    if not target.asynchronous_units:
        return "no matrix units that run beside the threads"
    return attention_plan.why_not(shape_of(x)) or ("" if choose(x, target) else "no tile fits")


def choose(x: PagedShape, target: Target) -> AttentionPlan | None:
    """The first Plan that fits; None if none does."""
    of = shape_of(x)
    for size in TILES:
        stages = 3 if padded(x.width) + padded(x.value_width) <= 128 else 2
        found = fitted(of, AttentionPlan(size, stages, target.cores or 132, dependent=True))
        if found is not None and found.staged and size[1] // x.page <= 32:
            return found
    return None


def prefill(
    x: PagedShape, plan: AttentionPlan, name: str = "paged_prefill", least: int = 1
) -> Body:
    """The kernel for requests with so many new tokens or more; parameters as `parameters` has
    them."""
    return _Prefill(x, plan, BodyBuilder(name, parameters(x)), least).build()


class _Requests(Walk):
    """The tiles of a step."""

    @functools.cached_property
    def window(self) -> Any:
        """How far the first key that a query sees lies before the last one; None: all do."""
        first, last = self.x.band
        return None if first is None or last is None else last - first

    def keys_of(self, sequence: Any, queries: Any) -> tuple[Any, Any]:
        """Keys of a request; where its queries' diagonal lies follows from how many there are."""
        limit = bounded(tile.load(self.memory["lengths"], (sequence,), ()), "limit", self.x.keys)
        last = tile.hold(tile.maximum(limit - queries, 0), "offset")
        self.low = None if self.window is None else last - self.window
        self.high = last
        return 0, limit


class _Prefill(WideAttention):
    """Writes one Body of `prefill`."""

    registers = {1: (0, 0), 2: (56, 224)}  # a producer that looks up pages needs more
    notes: ClassVar[dict[str, Any]] = {"distinct": True, "level": "placed"}

    def __init__(self, x: PagedShape, plan: AttentionPlan, b: BodyBuilder, least: int) -> None:
        self.paged, self.least = x, least
        super().__init__(shape_of(x), plan, b)

    def make_walk(self) -> Walk:
        """The tiles of requests."""
        return _Requests(self.x, self.plan, self.memory, 0, self.least)

    def load(self, which: int, work: Work, turn: Any, step: Any) -> None:
        """A block of keys (0) or values (1), page by page."""
        x, blocks, width = self.paged, self.blocks[which], (self.width, self.value_width)[which]
        key = tile.hold(self.walk.key_of(work, step), "key")
        count = max(1, self.keys // x.page)
        table, at = self.memory["table"], key // x.page
        pages = page_numbers(x, table, work.sequence, at, count, work.limit)
        stage = blocks.acquire(turn + step)
        blocks.full.expect(stage, self.ring[which][0].bytes)
        within = key % x.page if x.page > self.keys else 0
        rows = min(x.page, self.keys)
        head, memory = work.holes.head // self.x.group, self.memory["kv"[which]]
        source = memory[0, head, within : within + rows, 0:width]
        tile.copy_pages(self.ring[which][stage, 0], source, pages, blocks.full[stage])


__all__ = ["FEW", "LEAST", "choose", "parameters", "prefill", "shape_of", "why_not"]
