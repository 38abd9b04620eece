"""Attention over a paged cache for every Target: one program for a token and a key head.

The program finds its request among the query starts, then loops over the pages of the keys that its
token sees with a running softmax; rows are the query heads that share the key head. Costs: the
keys and values of a request once for each of its new tokens; the placed kernels read them once for
many. So it serves machines that these do not run on. Invariant: the meaning is that of
`graph.paged_reference`; what pages hold past the keys of a request is read, and not used.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import int32
from ...core.target import Target
from ...ir.types import Array
from ...tile.callee import KernelCallee
from ...tile.define import Definition
from ...tile.plan import Plan
from ..attention.holes import Holes
from ..attention.softmax import line, some_sum, times
from ..attention.threads import padded
from .shape import STEP, PagedShape, attention_of, parameters
from .work import request_of


@Definition
def paged_attention_portable(*, x: PagedShape, **given: Any) -> None:
    """(tokens, heads, value_width) as q, of what a step has: scales for a cache of 8 bits alone,
    sinks where there are some."""
    q, keys, values, table = (given[name] for name in ("q", "keys", "values", "table"))
    tokens, page, group = q.shape[0], x.page, x.group
    # all of it is written
    out = tile.result((tokens, x.heads, x.value_width), x.dtype, name="out", fill="none")
    token, head = tile.grid(tokens, x.key_heads)
    holes = Holes(attention_of(x), {}, 0, 0, lanes=0)
    rows, block = padded(group), padded(page)
    lengths, starts = given["lengths"], given["query_starts"]
    request = request_of(token, starts, x.requests)
    known = request < x.requests
    length, stop = (tile.load(m, request + i, mask=known) for i, m in enumerate((lengths, starts)))
    seen = tile.where(known, length - stop + tile.cast(token, int32) + 1, 0)
    first = tile.maximum(seen - x.window, 0) if x.window else 0
    mine = tile.arange(rows) < group
    factors: Any = None, None
    if "scales" in given:
        factors = [tile.load(given["scales"][i, head]) for i in range(2)]
    row = tile.load(q, (token, head * group, 0), (rows, padded(x.width)))
    row = tile.fill(tile.fill(row, 0.0), 0.0)
    acc = tile.zeros((rows, padded(x.value_width)))
    most, total = tile.full((rows,), -tile.INF), tile.zeros((rows,))
    if "sinks" in given:  # the largest score and the sum of weights before the first key
        most = tile.fill(tile.load(given["sinks"], (head * group,), (rows,)), 0.0)
        total = tile.full((rows,), 1.0)
    lane = line(block)
    for number in tile.range(first // page, (seen + (page - 1)) // page):
        at = tile.load(table[request, number])
        place = lane + tile.cast(number, int32) * page
        sees = (place < seen) & (place >= first) & (lane < page)
        k = tile.load(keys, (at, head, 0, 0), (block, padded(x.width)))
        v = tile.load(values, (at, head, 0, 0), (block, padded(x.value_width)))
        k, v = (tile.where(sees[:, None], tile.fill(m, 0.0), 0.0) for m in (k, v))
        scores = times(tile.dot(row, tile.cast(k, x.dtype).T), factors[0])
        scores = holes.bent(scores) * holes.unit
        scores = tile.where(sees[None, :], scores, -tile.INF)
        p, now, sums = tile.softmax_online(scores)
        acc, most, total = tile.softmax_accumulate(
            acc, most, total, p, tile.cast(v, x.dtype), now, sums
        )
    found = times(acc / some_sum(total)[:, None], factors[1])
    found = tile.cast(found, x.dtype)  # of the group's heads alone: no other program has them
    tile.store(out, (token, head * group, 0), found, mask=mine[:, None], unique=True)


def attend(x: PagedShape, target: Target) -> KernelCallee:
    """(q, keys, values, scales if of 8 bits, table, lengths, query_starts, sinks if there are any)
    -> out."""
    types = {name: Array(m.shape, m.dtype) for name, m in parameters(x, STEP)}
    return paged_attention_portable.callee({"x": x, **types}, Plan(), target)
