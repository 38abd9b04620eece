"""The ragged step: new tokens of several requests through a decoder, and the next id of each.

Prefill, a chunk of it, decode and any mix of them are this one function at different sizes. What
a request has so far lies on the device: pages and their table, lengths, the id it got last, how it
samples. So a decode step, where every request has one token, needs nothing from the host, and the
host needs nothing from it but the ids.

R rows of a step are requests, T tokens are theirs, one request's after the other's. A *slot* is a
request's row of the device's state; the last slot is nobody's. A row that only pads has that slot
and no tokens, tokens that only pad belong to no row.
Invariant: a step writes the pages and the state of the slots it names, and of no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import nn
from ...compiler.dispatch import device as opened
from ...core.dtype import float32, int32
from ...tensor.creation import arange, tensor
from ...tensor.elementwise import maximum, where
from ...tensor.maths import cast
from ...tensor.reduce import log_softmax
from ...tensor.select import gather
from ...tensor.tensor import Tensor
from ..decoder import Decoder, paged


class Rows:
    """What the device knows of each slot besides its pages: the id that it got last."""

    def __init__(self, slots: int, device: str) -> None:
        self.last = tensor(np.zeros(slots, np.int32), device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Its state by name, for `jit`."""
        return {"last": self.last}


def step(
    model: Decoder, cache: nn.PagedCache, rows: Rows, slots: Tensor, into: Tensor, starts: Tensor,
    owner: Tensor | None = None, given: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The next id (R,) of each row.

    Row r has the request of slots[r] (R,) and the tokens starts[r] to starts[r + 1] (R + 1,); its
    next id goes to slot into[r] (R,), the slot that is nobody's if its prompt is not whole yet.
    Token t belongs to row owner[t] (T,) and is given[t] (T,), or the last id of its request where
    that is negative; without both each row has the one token it got last.
    """
    lengths = cache.lengths[slots] + starts[1:] - starts[:-1]  # (R,)
    if owner is None or given is None:
        tokens, positions, ends = rows.last[slots], lengths - 1, None
    else:
        tokens = where(given < 0, rows.last[slots[owner]], given)
        positions = lengths[owner] - starts[1:][owner] + arange(given.shape[0], dtype=int32)
        ends = maximum(starts[1:] - 1, 0)
    attend = paged(model.config, cache, cache.table[slots], lengths, starts)
    logits = model.step(tokens, maximum(positions, 0), attend, ends, turned=False)  # (R, V)
    ids = cast(logits.argmax(-1), int32)
    cache.lengths.assign(cache.lengths.index_copy(0, slots, lengths))
    rows.last.assign(rows.last.index_copy(0, into, ids))
    return ids


def score(
    model: Decoder, cache: nn.PagedCache, slots: Tensor, starts: Tensor, given: Tensor,
    following: Tensor,
) -> Tensor:  # fmt: skip
    """The logprob (T,) of the token `following` each given one (T,) of a single request."""
    lengths = cache.lengths[slots] + starts[1:] - starts[:-1]
    positions = lengths - starts[1:] + arange(given.shape[0], dtype=int32)
    attend = paged(model.config, cache, cache.table[slots], lengths, starts)
    logits = model.step(given, maximum(positions, 0), attend, turned=False)
    cache.lengths.assign(cache.lengths.index_copy(0, slots, lengths))
    return gather(log_softmax(cast(logits, float32), -1), -1, following[:, None])[:, 0]


def write(target: Tensor, first: int, values: np.ndarray[Any, Any]) -> None:
    """Put values into a Tensor from row `first` on, in place: a small copy from the host."""
    array = np.ascontiguousarray(values, target.dtype.numpy)
    buffer, row = target.buffer(), 1
    for size in target.shape[1:]:
        row *= int(size)
    part = buffer.part(first * row * array.itemsize, array.nbytes)
    if buffer.device == "cpu":
        part.array(array.shape, array.dtype)[...] = array
    else:
        opened(buffer.device).write(part, array)


__all__ = ["Rows", "score", "step", "write"]
