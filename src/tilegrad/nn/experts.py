"""Rows that go to experts, and come back: only what was picked is computed.

Each row is computed by the few experts that were picked for it, and the results are added up.
Rows are sorted by expert on the device, so that an expert's rows lie together and its weights are
read once (`tensor.matmul.grouped_dot`). Invariant: nothing is read back to the host, and a row's
results are added in the order that its experts were picked in, whatever other rows there are.
"""

from __future__ import annotations

from collections.abc import Callable

from ..tensor.maths import cast
from ..tensor.matmul import group_rows
from ..tensor.tensor import Tensor


def routed(
    x: Tensor,
    picked: Tensor,
    shares: Tensor,
    experts: int,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """(N, C), (N, K), (N, K) -> (N, D): what the K experts picked for a row make of it, each
    times its share.

    `compute(rows, offsets, owners)` gets rows (N * K, C) sorted by expert, those of expert e from
    offsets[e] to offsets[e + 1], and the expert of each; it gives (N * K, D).
    """
    count, each = picked.shape
    order, ranks, offsets = group_rows(picked.reshape(-1), experts)
    every = x.unsqueeze(1).expand(count, each, x.shape[1]).reshape(count * each, x.shape[1])
    owners = picked.reshape(-1).index_select(0, order)
    found = compute(every.index_select(0, order), offsets, owners)
    own = found.index_select(0, ranks).reshape(count, each, found.shape[1])
    return (own * cast(shares, own.dtype).unsqueeze(-1)).sum(1)


__all__ = ["routed"]
