"""Attention over a paged cache for every Target: one program for a token and a key head.

The program finds its request among the query starts, then loops over the pages of the keys that its
token sees with a running softmax; rows are the query heads that share the key head. Costs: the
keys and values of a request once for each of its new tokens; the placed kernels read them once for
many. So it serves machines that these do not run on. Invariant: the meaning is that of
`graph.paged_reference`; what pages hold past the keys of a request is read, and not used.
"""

from __future__ import annotations

import functools
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...core.target import Target
from ...ir.types import Array
from ...tile.callee import KernelCallee
from ...tile.define import Definition
from ...tile.plan import Plan
from ..attention.holes import Holes
from ..attention.shape import AttentionShape
from ..attention.softmax import times
from ..attention.threads import padded
from .shape import STEP, PagedShape, attention_of, parameters


@Definition
def paged_attention_portable(*, x: AttentionShape, window: int, **given: Any) -> None:
    """(tokens, heads, value_width) as q, of what a step has: scales for a cache of 8 bits alone,
    sinks where there are some."""
    q, keys, values, table = (given[name] for name in ("q", "keys", "values", "table"))
    tokens, heads, width = q.shape
    key_heads, page, value_width = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // key_heads
    out = tile.result((tokens, heads, value_width), q.dtype, fill="none")  # all is written
    token, head = tile.grid(tokens, key_heads)
    holes = Holes(x, {}, 0, 0, lanes=0)
    rows, block = padded(group), padded(page)
    request, seen = request_of(token, given["lengths"], given["query_starts"])
    first = tile.full((), 0, int32)
    if window:
        first = tile.maximum(seen - window, first)
    mine = tile.arange(rows) < group
    factors: Any = None, None
    if "scales" in given:
        factors = [tile.load(given["scales"][i, head]) for i in range(2)]
    row = tile.load(q, (token, head * group, 0), (rows, padded(width)))
    row = tile.fill(tile.fill(row, 0.0), 0.0)
    acc = tile.zeros((rows, padded(value_width)))
    most, total = tile.full((rows,), -tile.INF), tile.zeros((rows,))
    if "sinks" in given:  # the largest score and the sum of weights before the first key
        most = tile.fill(tile.load(given["sinks"], (head * group,), (rows,)), 0.0)
        total = tile.full((rows,), 1.0)
    lane = tile.cast(tile.arange(block), int32)
    for number in tile.range(first // page, (seen + (page - 1)) // page):
        at = tile.load(table[request, number])
        place = lane + tile.cast(number, int32) * page
        sees = (place < seen) & (place >= first) & (lane < page)
        k = tile.load(keys, (at, head, 0, 0), (block, padded(width)))
        v = tile.load(values, (at, head, 0, 0), (block, padded(value_width)))
        k, v = (tile.where(sees[:, None], tile.fill(x, 0.0), 0.0) for x in (k, v))
        scores = times(tile.dot(row, tile.transpose(tile.cast(k, q.dtype))), factors[0])
        scores = holes.bent(scores) * holes.unit
        scores = tile.where(sees[None, :], scores, -tile.INF)
        p, now, sums = tile.softmax_online(scores)
        acc, most, total = tile.softmax_accumulate(
            acc, most, total, p, tile.cast(v, q.dtype), now, sums
        )
    found = times(acc / tile.where(total > 0.0, total, 1.0)[:, None], factors[1])
    found = tile.cast(found, q.dtype)  # of the group's heads alone: no other program has them
    tile.store(out, (token, head * group, 0), found, mask=mine[:, None], unique=True)


@tile.function
def request_of(token: Any, lengths: Any, query_starts: Any) -> tuple[Any, Any]:
    """The request of a token, and how many keys it sees."""
    here = tile.cast(token, int32)
    request, seen = tile.full((), 0, int32), tile.full((), 0, int32)
    for number in tile.range(0, lengths.shape[0]):
        start, stop = (tile.load(query_starts[number + i]) for i in range(2))
        mine = (start <= here) & (here < stop)
        request = tile.where(mine, tile.cast(number, int32), request)
        known = tile.load(lengths[number]) - (stop - here) + 1
        seen = tile.where(mine, known, seen)
    return request, seen


@functools.lru_cache(maxsize=64)
def callee(x: PagedShape, target: Target) -> KernelCallee:
    """(q, keys, values, scales if of 8 bits, table, lengths, query_starts, sinks if there are any)
    -> out."""
    types = {name: Array(m.shape, m.dtype) for name, m in parameters(x, STEP)}
    how = {"x": attention_of(x), "window": x.window}
    plan, definition = Plan(), paged_attention_portable
    return definition.callee(definition.bind((), {**how, **types}, plan), plan, target)
