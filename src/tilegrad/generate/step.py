"""The ragged step: new tokens of several requests through a decoder, and the next id of each.

Prefill, a chunk of it, decode and any mix of them are this one function at different sizes. What
a request has so far lies on the device: pages and their table, lengths, the id it got last, how it
samples. So a decode step, where every request has one token, needs nothing from the host, and the
host needs nothing from it but the ids, which are state: the last of each request.

R rows of a step are requests, T tokens are theirs, one request's after the other's. A *slot* is a
request's row of the device's state; the last slot is nobody's. A row that only pads has that slot
and no tokens, tokens that only pad belong to row -1. Answers grow by a page now and then: a step is
told the page of each row's last token, and puts it into the table.
Invariant: a step writes the pages and the state of the slots it names, and of no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import nn
from ..core.dtype import float32, int32
from ..graph import build
from ..ir.symbol import high
from ..models.decoder.model import Decoder, paged
from ..runtime.buffer import HOST
from ..tensor.creation import arange, tensor
from ..tensor.elementwise import maximum, where
from ..tensor.maths import cast
from ..tensor.reduce import logsumexp
from ..tensor.select import gather
from ..tensor.tensor import Tensor, node_of, wrap
from .adapters import Adapters, picking
from .canary import Marks
from .features import Features
from .sampling import SamplingState, Variant, greedy, likeliest, possible, sample

Results = tuple[Tensor | None, ...]  # what Sampled has, without ids but where rows have theirs


class Rows:
    """What the device knows of each slot besides its pages: the id it got last, or NO_TOKEN."""

    def __init__(
        self,
        slots: int,
        device: str,
        marks: Marks | None = None,
        adapters: Adapters | None = None,
        features: Features | None = None,
    ) -> None:
        self.last = tensor(np.zeros(slots, np.int32), device=device)
        self.marks = marks  # of the canary, if there is one
        self.adapters = adapters  # if the engine has some
        self.features = features  # if a head reads them

    def tensors(self) -> dict[str, Tensor]:
        """Its state by name, for `jit`."""
        others = (self.marks, self.adapters, self.features)
        parts = [part.tensors() for part in others if part is not None]
        return {"last": self.last, **{n: t for part in parts for n, t in part.items()}}


def step(
    model: Decoder,
    cache: nn.PagedCache,
    rows: Rows,
    sampling: SamplingState | None,
    variant: Variant,
    slots: Tensor,
    starts: Tensor,
    into: Tensor | None = None,
    owner: Tensor | None = None,
    given: Tensor | None = None,
    most: Any = None,
    words: int | None = None,
    tails: Tensor | None = None,
    lengths: Tensor | None = None,
    by_row: bool = False,
    columns: Tensor | None = None,
) -> Results:
    """Give each row its next id, picked as its slot's sampling says; what `Sampled` has besides.

    Row r has the request of slots[r] (R,) and the tokens starts[r] to starts[r + 1] (R + 1,); its
    next id goes to slot into[r] (R,), the slot that is nobody's if its prompt is not whole yet.
    Token t belongs to row owner[t] (T,) and is given[t] (T,), or the last id of its request where
    that is negative. Without `into` and `owner` every row has one token: given[r], or the id it got
    last; rows may then share a slot, one token of it after the other. No request
    has more keys than `most`, a number or a Symbol, if that is known. Ids from `words` on are never
    picked. Where `tails` (R,) are given they are the pages of the rows' last tokens, to be found in
    the `columns` (R,) of the table, and where `lengths` (R,) are, how many keys each row has after
    this step: else as the device knows.
    `by_row` gives the ids of rows too: a slot has the last of its rows' alone.
    """
    # slots count from 0: index_select, unlike [], need not look for negative ones
    if lengths is None:
        lengths = cache.lengths.index_select(0, slots) + starts[1:] - starts[:-1]  # (R,)
    shared = owner is None and given is not None  # rows may have one slot
    if columns is None:
        columns = maximum(lengths - 1, 0) // cache.page
    table = _tables(cache, slots, columns, tails, shared)
    if into is None or owner is None or given is None:
        last = rows.last.index_select(0, slots)
        tokens = last if given is None else given  # (R,)
        positions, ends, into, row = lengths - 1, None, slots, None
    else:
        row = maximum(owner, 0)
        tokens = where(given < 0, rows.last[slots[row]], given)  # (T,)
        positions = lengths[row] - starts[1:][row] + arange(given.shape[0], dtype=int32)
        positions = where(owner < 0, 0, positions)  # what pads may be past any position
        ends = maximum(starts[1:] - 1, 0)
    if rows.marks is not None:
        rows.marks.put(cache.page, table, starts, slots, owner, positions, tokens)
    # a GPU's kernel for single tokens appends and attends in one go: no row sees another's token
    alone = ends is None and (given is None or cache.device == HOST)
    attend = paged(
        model.config,
        cache,
        table,
        lengths,
        starts,
        single=alone,
        most=most,
    )
    # NO_TOKEN is read as 0: a step begun before its request ended has that row still
    with picking(rows.adapters, slots, row):
        x, y = model.attended(maximum(tokens, 0), maximum(positions, 0), attend, rotated=False)
    if ends is not None and rows.features is None and high(ends.shape[0]) < high(x.shape[0]):
        # only tokens whose ids follow go on; products of no fewer rows would be no faster
        x, y, ends, row = x.index_select(0, ends), y.index_select(0, ends), None, None
    with picking(rows.adapters, slots, row):
        x = model.finished(x, y)
        if rows.features is not None:
            rows.features.put(model.norm(x))
        logits = model.logits(x if ends is None else x.index_select(0, ends))  # (R, V)
    logits = logits if words is None else possible(logits, words)
    found = greedy(logits) if sampling is None else sample(logits, sampling, into, lengths, variant)
    cache.lengths.assign(cache.lengths.index_copy(0, slots, lengths))
    rows.last.assign(rows.last.index_copy(0, into, found.ids))
    return found if by_row else found[1:]


def decode(
    model: Decoder,
    cache: nn.PagedCache,
    rows: Rows,
    sampling: SamplingState | None,
    variant: Variant,
    most: Any,
    words: int | None,
    slots: Tensor,
    starts: Tensor,
    tails: Tensor,
    columns: Tensor,
) -> Results:
    """`step` where every row has one token at most, the id it got last."""
    return step(
        model,
        cache,
        rows,
        sampling,
        variant,
        slots,
        starts,
        most=most,
        words=words,
        tails=tails,
        columns=columns,
    )


def verify(
    model: Decoder,
    cache: nn.PagedCache,
    rows: Rows,
    sampling: SamplingState | None,
    variant: Variant,
    most: Any,
    words: int | None,
    slots: Tensor,
    starts: Tensor,
    tails: Tensor,
    given: Tensor,
    lengths: Tensor,
) -> Results:
    """`step` where every row has one token, which is given; rows of a slot follow each other.

    The last id and the length of a slot with several rows mean nothing afterwards.
    """
    return step(
        model,
        cache,
        rows,
        sampling,
        variant,
        slots,
        starts,
        given=given,
        most=most,
        words=words,
        tails=tails,
        lengths=lengths,
        by_row=True,
    )


def _tables(
    cache: nn.PagedCache, slots: Tensor, columns: Tensor, tails: Tensor | None, shared: bool
) -> Tensor:
    """The rows' pages (R, P), with the page (R,) of each row's last token, which the table gets
    too; most are there already. Only rows that share a slot need what others put there."""
    found = cache.table.index_select(0, slots)
    if tails is None:
        return found
    at = [node_of(slots), node_of(columns)]
    table = build.update(node_of(cache.table), node_of(tails), at, [0, 1], "set")
    cache.table.assign(wrap(table))
    if shared:
        return cache.table.index_select(0, slots)
    last = arange(found.shape[1], dtype=int32) == columns[:, None]
    return where(last, tails[:, None], found)


def score(
    model: Decoder,
    cache: nn.PagedCache,
    adapters: Adapters | None,
    slots: Tensor,
    starts: Tensor,
    given: Tensor,
    following: Tensor,
    shown: int = 0,
) -> tuple[Tensor, ...]:
    """The logprob (T,) of the token `following` each given one (T,) of a single request, and where
    some are to be shown the likeliest ids and their logprobs (T, shown)."""
    lengths = cache.lengths[slots] + starts[1:] - starts[:-1]
    positions = lengths - starts[1:] + arange(given.shape[0], dtype=int32)
    attend = paged(model.config, cache, cache.table[slots], lengths, starts)
    with picking(adapters, slots, given * 0):  # all tokens are of row 0
        logits = model.step(given, maximum(positions, 0), attend, rotated=False)
    cache.lengths.assign(cache.lengths.index_copy(0, slots, lengths))
    raw = cast(logits, float32)  # as `sample` has it: the bits are the same
    total = logsumexp(raw, -1, keepdim=True)
    chosen = (gather(raw, -1, following[:, None]) - total)[:, 0]
    if not shown:
        return (chosen,)
    ids, top = likeliest(raw, shown, total)
    return chosen, ids, top


__all__ = ["Rows", "decode", "score", "step", "verify"]
