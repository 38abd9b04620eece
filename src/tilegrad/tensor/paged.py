"""A paged cache of keys and values on Tensors: append new tokens to it, and attend over it.

Tokens of all requests lie one after the other; `query_starts` (requests + 1) says where each
request's begin and the last one's end. `lengths` (requests) counts the keys of each request, its
new tokens included. Key j of request r lies in page `table[r, j // page]` at place j % page of
keys (pages, key_heads, page, width) and values (pages, key_heads, page, value_width). Sizes of
tokens and requests may be Symbols, so that one compiled step serves any batch.

On a GPU the work of few tokens a request is first shared out evenly: a list, made once for a step,
since layers that ask for the same list share one Node. Many tokens, or a CPU, need none; nor do
few requests with one token each, whose new keys and attention are one launch (`paged_step`).
Invariant: what a kernel cannot take is an error here with its reason; nothing is copied where
keys and values are state of a jitted function.
`_shape` is long: a list of conditions, one after the other.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.config import config
from ..core.errors import DTypeError, ShapeError, UserError
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.symbol import Size, combine, high
from ..ir.types import Tuple
from ..kernels.paged import attention_cpu as cpu
from ..kernels.paged import prefill
from ..kernels.paged import prefill_cpu as cpu_prefill
from ..kernels.paged.append import Rotary
from ..kernels.paged.call import append_callee, attention_callee, list_callee, short_callee
from ..kernels.paged.shape import (
    PagedPlan,
    PagedShape,
    ShortPlan,
    cache_parameters,
    choose,
    choose_short,
    item_rows,
    short_keys,
    spread,
)
from ..kernels.paged.shape import why_not as gpu_why_not
from ..tile.callee import KernelCallee
from .kernel import target_of
from .tensor import Tensor, lift, node_of, wrap


@dataclass(frozen=True)
class PagedWork:
    """How the work of a step is shared out: for every layer with the same sizes and window."""

    shape: PagedShape
    plan: PagedPlan
    items: Tensor
    last: Tensor  # zeros that programs count in and leave as zeros; or pairs that were cut


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
    queries: int | None = None,
    work: PagedWork | None = None,
) -> Tensor:
    """Attention of new tokens q (tokens, heads, width) over the pages of their requests.

    A token sees the keys up to its own, the last `window` of them if that is not 0. Scores are
    `scale` (1 / sqrt(width)) times products, capped by softcap * tanh(score / softcap). A cache
    of 8 bits has `scales` (2,) that keys and values are multiplied with. `queries` says how many
    new tokens a request has as a rule; `work` is what `paged_work` gives, made here if not given.
    """
    given = [lift(x) for x in (q, keys, values, table, lengths, query_starts)]
    x = _shape("paged_attention", given, scale, window, softcap)
    target = _target(given)
    nodes = [node_of(t) for t in given]
    more = _scales("paged_attention", x, scales)
    if target.kind != "gpu":
        _refuse("paged_attention", cpu.why_not(x, target), x)
        many = _queries(x, queries) >= cpu_prefill.LEAST and not cpu_prefill.why_not(x, target)
        callee = (_cpu_prefill_callee if many else _cpu_callee)(x, target)
        made = ops.call(*nodes[:3], *more, *nodes[3:], callee=callee)
        return wrap(build.items(made)[0] if isinstance(made.type, Tuple) else made, *given)
    if work is None and _has_many(x, queries) and not prefill.why_not(x, target):
        made = ops.call(
            build.reshape(nodes[0], (1, *nodes[0].shape)),
            *nodes[1:],
            callee=_prefill_callee(x, target),
        )
        return wrap(build.reshape(build.items(made)[0], (x.tokens, x.heads, x.value_width)), *given)
    if work is None:
        work = _listed(x, _plan(x, target, queries), given[4], given[5])
    elif work.shape != _listed_shape(x):
        raise ShapeError(
            "the work list is of another step",
            op="paged_attention",
            expected=_listed_shape(x),
            got=work.shape,
        )
    callee = _attention_callee(x, work.plan)
    made = ops.call(
        *nodes[:3], *more, nodes[3], node_of(work.items), node_of(work.last), callee=callee
    )
    return wrap(build.items(made)[0], *given)


def paged_work(
    q: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    query_starts: Any,
    *,
    window: int = 0,
    queries: int | None = None,
) -> PagedWork | None:
    """The work list of a step for `paged_attention` with arguments like these; None where it needs
    none.

    It depends on lengths and query_starts, and on the sizes of the others.
    """
    given = [lift(x) for x in (q, keys, values, table, lengths, query_starts)]
    x, target = _shape("paged_work", given, 1.0, window, 0.0), _target(given)
    many = _has_many(x, queries) and not prefill.why_not(x, target)
    if target.kind != "gpu" or many:
        return None
    return _listed(x, _plan(x, target, queries), given[4], given[5])


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
    """(q turned, keys, values) with the new tokens' k and v in their pages, in one launch.

    Pairs of the first elements of each head of q and k turn by place * frequency: element i with
    i + len(frequencies), or neighbours where `interleaved`; cosines and sines are multiplied by
    `factor`. Keys and values are written in place where they are donated.
    """
    op = "paged_append"
    given = [lift(x) for x in (q, keys, values, table, lengths, query_starts)]
    x = _shape(op, given, 1.0, 0, 0.0)
    new, speeds, rotary = _new_tokens(op, x, k, v, frequencies, interleaved, factor)
    nodes = [node_of(t) for t in given]
    made = ops.call(
        nodes[0],
        *(node_of(t) for t in new),
        speeds,
        *_scales(op, x, scales),
        *nodes[3:],
        *nodes[1:3],
        callee=_append_callee(x, rotary),
    )
    assert isinstance(made.type, Tuple)
    turned, after_keys, after_values = (wrap(n, *given, *new) for n in build.items(made))
    return turned, after_keys, after_values


def paged_step(
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
    single: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    queries: int | None = None,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(attention of the new tokens, keys, values): `paged_append`, then `paged_attention`.

    `single` says that no request has more than one new token; then few requests with few keys, as
    the size of the table tells or `most` says of all of them, are one launch on a GPU.
    """
    op = "paged_step"
    turning = {"frequencies": frequencies, "interleaved": interleaved, "factor": factor}
    places = (table, lengths, query_starts)
    given = [lift(t) for t in (q, keys, values, *places)]
    x, target = _shape(op, given, scale, window, softcap), _target(given)
    plan = choose_short(x, target, most) if single and target.kind == "gpu" else None
    if plan is None:
        turned, *after = paged_append(q, k, v, keys, values, *places, **turning, scales=scales)
        out = paged_attention(
            turned,
            *after,
            *places,
            scale=scale,
            window=window,
            softcap=softcap,
            scales=scales,
            queries=1 if single else queries,
        )
        return out, *after  # type: ignore[return-value]
    new, speeds, rotary = _new_tokens(op, x, k, v, frequencies, interleaved, factor)
    nodes = [node_of(t) for t in given]
    made = ops.call(
        nodes[0],
        *(node_of(t) for t in new),
        speeds,
        *_scales(op, x, scales),
        *nodes[3:],
        *nodes[1:3],
        callee=_short_callee(x, plan, rotary),
    )
    out, after_keys, after_values = (wrap(n, *given, *new) for n in build.items(made))
    return out, after_keys, after_values


def few_keys(keys: Tensor, values: Tensor, requests: int, heads: int, dtype: Any) -> int:
    """With how many keys of a request at most a step of a token each is one launch; 0 where it
    never is."""
    (pages, key_heads, page, width), target = keys.shape, _target([keys])
    x = PagedShape(
        heads,
        key_heads,
        width,
        values.shape[3],
        page,
        requests,
        requests,
        pages,
        1,
        1.0,
        dtype,
        keys.dtype,
    )
    return short_keys(x, target) if target.kind == "gpu" else 0


def _new_tokens(
    op: str, x: PagedShape, k: Any, v: Any, frequencies: Any, interleaved: bool, factor: float
) -> tuple[list[Tensor], Node, Rotary]:
    """k and v, frequencies, and how they turn; refused where they do not fit."""
    new = [lift(k), lift(v)]
    turning = lift(_no_frequencies() if frequencies is None else frequencies)
    width = 0 if frequencies is None else 2 * int(turning.shape[0])
    for name, tensor, last in (("k", new[0], x.width), ("v", new[1], x.value_width)):
        if tensor.shape != (x.tokens, x.key_heads, last) or tensor.dtype is not x.dtype:
            raise ShapeError(
                f"{name} does not fit",
                op=op,
                got=tensor.node.type,
                expected=f"{x.dtype}[{x.tokens}, {x.key_heads}, {last}]",
            )
    if width > x.width:
        raise ShapeError(
            "more frequencies than pairs", op=op, expected=f"at most {x.width // 2}", got=width // 2
        )
    speeds = build.cast(node_of(turning), dtypes.float32)
    return new, speeds, Rotary(width, interleaved, float(factor))


# ---- sizes --------------------------------------------------------------------------------------


def _shape(
    op: str, given: list[Tensor], scale: float | None, window: int, softcap: float
) -> PagedShape:
    """The sizes that the arguments agree on."""
    q, keys, values, table, lengths, starts = given
    for name, tensor, rank in (
        ("q", q, 3),
        ("keys", keys, 4),
        ("values", values, 4),
        ("table", table, 2),
        ("lengths", lengths, 1),
        ("query_starts", starts, 1),
    ):
        if tensor.ndim != rank:
            raise ShapeError(
                f"{name} has {tensor.ndim} axes",
                op=op,
                expected=f"{rank} axes",
                got=build.show(tensor.shape),
            )
    (tokens, heads, width), (pages, key_heads, page, _) = q.shape, keys.shape
    if not key_heads or heads % key_heads:
        raise ShapeError(
            "the heads do not divide",
            op=op,
            got=f"{heads} heads",
            expected=f"a multiple of {key_heads} key heads",
        )
    if scale is None:
        scale = 1.0 / math.sqrt(max(1, width))
    x = PagedShape(
        heads,
        key_heads,
        width,
        values.shape[3],
        page,
        tokens,
        lengths.shape[0],
        pages,
        table.shape[1],
        float(scale),
        q.dtype,
        keys.dtype,
        int(window),
        float(softcap),
    )
    integers = ((x.requests, x.most_pages), (x.requests,), (combine(x.requests, 1, 1),))
    wanted: list[tuple[str, Tensor, Any, Any]] = [
        (n, t, m.shape, m.dtype) for (n, m), t in zip(cache_parameters(x), (keys, values))
    ]
    wanted += [
        (n, t, s, dtypes.int32)
        for n, t, s in zip(("table", "lengths", "query_starts"), given[3:], integers)
    ]
    for name, tensor, shape, dtype in wanted:
        if tensor.shape != shape:
            raise ShapeError(
                f"{name} does not fit",
                op=op,
                expected=build.show(shape),
                got=build.show(tensor.shape),
            )
        if tensor.dtype is not dtype:
            raise DTypeError(f"{name} has another dtype", op=op, expected=dtype, got=tensor.dtype)
    return x


def _scales(op: str, x: PagedShape, scales: Any) -> list[Node]:
    """The scales of a cache of 8 bits, as a kernel takes them."""
    if (scales is None) is x.scaled:
        raise UserError(
            "scales belong to a cache of 8 bits",
            op=op,
            got=x.cache,
            expected="scales (2,) with it, and none without",
        )
    return [] if scales is None else [build.cast(node_of(lift(scales)), dtypes.float32)]


def _refuse(op: str, why: str, x: PagedShape) -> None:
    if why:
        raise UserError(f"no kernel takes this: {why}", op=op, got=str(x))


def _target(given: list[Tensor]) -> Target:
    return target_of(given[0].device, config().threads)


def _queries(x: PagedShape, queries: int | None) -> int:
    """New tokens of a request, as a rule."""
    if queries is not None:
        return queries
    one = x.tokens is x.requests or x.tokens == x.requests
    return 1 if one else max(1, high(x.tokens) // max(1, high(x.requests)))


def _has_many(x: PagedShape, queries: int | None) -> bool:
    """Whether requests have so many new tokens that the matrix units bound a step."""
    return _queries(x, queries) >= prefill.LEAST


def _plan(x: PagedShape, target: Target, queries: int | None) -> PagedPlan:
    """The Plan for requests with so many new tokens each."""
    plan = choose(x, target, _queries(x, queries))
    _refuse("paged_attention", gpu_why_not(x, plan), x)
    return plan


# ---- kernels, built once ------------------------------------------------------------------------


def _listed_shape(x: PagedShape) -> PagedShape:
    """What a work list depends on: layers that differ in the rest share it."""
    return replace(x, scale=1.0, softcap=0.0)


def _listed(x: PagedShape, plan: PagedPlan, lengths: Tensor, starts: Tensor) -> PagedWork:
    """The list, and zeros that the programs of a step count in."""
    callee = _list_callee(_listed_shape(x), plan)
    made = ops.call(node_of(lengths), node_of(starts), callee=callee)
    items, last = (wrap(n, lengths) for n in build.items(made))
    if plan.joined:
        size: tuple[Size, ...] = (item_rows(x, plan), spread(x, plan))
        last = wrap(build.full(size, 0, dtypes.int32), lengths)
    return PagedWork(_listed_shape(x), plan, items, last)


@functools.lru_cache(maxsize=64)
def _list_callee(x: PagedShape, plan: PagedPlan) -> KernelCallee:
    return list_callee(x, plan)


@functools.lru_cache(maxsize=64)
def _attention_callee(x: PagedShape, plan: PagedPlan) -> KernelCallee:
    return attention_callee(x, plan)


@functools.lru_cache(maxsize=64)
def _prefill_callee(x: PagedShape, target: Target) -> KernelCallee:
    plan = prefill.choose(x, target)
    assert plan is not None
    return prefill.prefill_callee(x, plan)


@functools.lru_cache(maxsize=64)
def _cpu_callee(x: PagedShape, target: Target) -> KernelCallee:
    return cpu.callee(x, target)


@functools.lru_cache(maxsize=64)
def _cpu_prefill_callee(x: PagedShape, target: Target) -> KernelCallee:
    return cpu_prefill.callee(x, target)


@functools.lru_cache(maxsize=64)
def _append_callee(x: PagedShape, rotary: Rotary) -> KernelCallee:
    return append_callee(x, rotary)


@functools.lru_cache(maxsize=64)
def _short_callee(x: PagedShape, plan: ShortPlan, rotary: Rotary) -> KernelCallee:
    return short_callee(x, plan, rotary)


def _no_frequencies() -> Any:
    """What stands for frequencies where nothing is turned."""
    return np.zeros(1, np.float32)


__all__ = ["PagedWork", "paged_append", "paged_attention", "paged_step", "paged_work"]
