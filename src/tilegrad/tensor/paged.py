"""A paged cache of keys and values on Tensors: append new tokens to it, and attend over it.

Tokens of all requests lie one after the other; `query_starts` (requests + 1) says where each
request's begin and the last one's end. `lengths` (requests) counts the keys of each request, its
new tokens included. Key j of request r lies in page `table[r, j // page]` at place j % page of
keys (pages, key_heads, page, width) and values (pages, key_heads, page, value_width). Sizes of
tokens and requests may be Symbols, so that one compiled step serves any batch.

Invariant: which kernels compute this is the compiler's choice (`schedule/paged.py`), as is
an error where none does; nothing is copied where keys and values are state of a jitted function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError
from ..graph import build, ops
from ..graph.paged_types import APPEND, ATTEND
from ..ir.node import Node
from .maths import cast
from .tensor import Tensor, lift, node_of, wrap

Given = dict[str, Tensor]
PLACED = ("q", "keys", "values", "table", "lengths", "query_starts")


def paged_attention(
    q: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    query_starts: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    scales: Any = None,
    sinks: Any = None,
    queries: int | None = None,
    single: bool = False,
    most: Any = None,
) -> Tensor:
    """Attention of new tokens q (tokens, heads, width) over the pages of their requests.

    A token sees the keys up to its own, the last `window` of them if that is not 0. Scores are
    `scale` (1 / sqrt(width)) times products, capped by softcap * tanh(score / softcap); `sinks`
    (heads,) are one more score for each head, of a key that has no value. A cache of 8 bits has
    `scales` (2, key_heads), or (2,) for all of them, that keys and values are multiplied with;
    `paged_append` divides by them, rounds half to even and stops at the dtype's ends. `queries`
    says how many new tokens a request has as a rule, `single` that none has more than one, `most`
    (a number or a Symbol) how many keys a request has at most: a wrong answer of the last two is
    undefined.
    """
    given = _given(scales, q, keys, values, table, lengths, query_starts)
    starts = given["query_starts"].dtype
    if starts is not dtypes.int32:  # it tells a Node's query_starts from its sinks
        raise DTypeError(
            "query_starts has another dtype", op="paged_attention", expected="int32", got=starts
        )
    if sinks is not None:
        given["sinks"] = cast(lift(sinks), dtypes.float32)
    if scale is None:
        scale = 1.0 / math.sqrt(max((1, *given["q"].shape[-1:])))
    made = ops.paged_attention(
        *_nodes(ATTEND, given),
        scale=float(scale),
        window=int(window),
        softcap=float(softcap),
        queries=queries or 0,
        single=bool(single),
        most_keys=most or 0,
    )
    return wrap(made, *given.values())


def paged_append(
    q: Any,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    query_starts: Any,
    *,
    frequencies: Any = None,
    interleaved: bool = False,
    factor: float = 1.0,
    scales: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q rotated, keys, values) with the new tokens' k and v in their pages, in one launch.

    Pairs of the first elements of each head of q and k turn by place * frequency: element i with
    i + len(frequencies), or neighbours where `interleaved`; cosines and sines are multiplied by
    `factor`. Keys and values are written in place where they are donated.
    """
    given = _given(scales, q, keys, values, table, lengths, query_starts)
    speeds = lift(np.zeros(1, np.float32) if frequencies is None else frequencies)
    if speeds.ndim != 1:
        got = build.show(speeds.shape)
        raise ShapeError("frequencies have one axis", op="paged_append", expected="(n,)", got=got)
    given.update(k=lift(k), v=lift(v), frequencies=cast(speeds, dtypes.float32))
    made = ops.paged_append(
        *_nodes(APPEND, given),
        width=0 if frequencies is None else 2 * int(speeds.shape[0]),
        interleaved=bool(interleaved),
        factor=float(factor),
    )
    q_rotated, after_keys, after_values = (wrap(n, *given.values()) for n in build.items(made))
    return q_rotated, after_keys, after_values


def paged_step(
    q: Any,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    *pages: Any,
    scales: Any = None,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(attention of the new tokens, keys, values): `paged_append`, then `paged_attention`, of
    `pages`: table, lengths and query_starts; `how` has the options of both."""
    turn = {n: how.pop(n) for n in ("frequencies", "interleaved", "factor") if n in how}
    q_rotated, keys, values = paged_append(q, k, v, keys, values, *pages, **turn, scales=scales)
    return paged_attention(q_rotated, keys, values, *pages, scales=scales, **how), keys, values


def _given(scales: Any, *placed: Any) -> Given:
    """Arguments by the names that `graph.paged_types` has for them."""
    given = dict(zip(PLACED, map(lift, placed)))
    if scales is not None:
        found = cast(lift(scales), dtypes.float32)
        if found.ndim == 1 and given["keys"].ndim == 4:
            found = found[:, None].expand(found.shape[0], given["keys"].shape[1])
        given["scales"] = found
    return given


def _nodes(names: tuple[str, ...], given: Given) -> list[Node]:
    return [node_of(given[name]) for name in names if name in given]


__all__ = ["paged_append", "paged_attention", "paged_step"]
