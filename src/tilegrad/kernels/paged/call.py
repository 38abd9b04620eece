"""The kernels of a paged cache as a Graph calls them: inference only, no derivative.

`list_callee` is called once a step, `append_callee` and `attention_callee` once a layer, the last
with the list's results; or `short_callee` alone, for a step of few requests. Those that append
write keys and values in place: they are state.
Results of `attention_callee` but the first are scratch. Its argument `counters` (zeros, int32) is
written while it runs and is zeros again afterwards; one array serves all layers of a stream.
Each is built once. Invariant: arguments and results stand in the order that the docstrings say.
"""

from __future__ import annotations

import functools

from ...tile.build import Body
from ...tile.callee import KernelCallee
from ..attention.plan import AttentionPlan
from .append import Rotary, append
from .attention import SCRATCH, attend
from .prefill import prefill, tile_list
from .shape import PagedPlan, PagedShape
from .short import step_attend
from .work import combine_parts, work_list


@functools.lru_cache(maxsize=64)
def list_callee(x: PagedShape, plan: PagedPlan) -> KernelCallee:
    """(lengths, query_starts) -> items."""
    return KernelCallee.named("paged_work", (work_list(x, plan),), ("items",))


@functools.lru_cache(maxsize=64)
def attention_callee(x: PagedShape, plan: PagedPlan) -> KernelCallee:
    """(q, keys, values, scales if of 8 bits, table, sinks if there are any, items, and counters if
    parts are joined) -> (out, partial, sums)."""
    return KernelCallee.named("paged_attention", _listed(x, plan), ("out", *SCRATCH))


def _listed(x: PagedShape, plan: PagedPlan) -> tuple[Body, ...]:
    """The launches that take a list."""
    return (attend(x, plan),) if plan.joined else (attend(x, plan), combine_parts(x, plan))


@functools.lru_cache(maxsize=64)
def tiles_callee(x: PagedShape, plan: AttentionPlan, least: int) -> KernelCallee:
    """(lengths, query_starts) -> tiles."""
    return KernelCallee.named("paged_tiles", (tile_list(x, plan, least),), ("tiles",))


@functools.lru_cache(maxsize=64)
def mixed_callee(x: PagedShape, plan: PagedPlan, many: AttentionPlan) -> KernelCallee:
    """(q, keys, values, table, sinks if there are any, items, counters as
    `attention_callee` has them, tiles) -> (out, partial, sums, lse): requests with fewer new tokens
    than the Plan says by the list, the others by `prefill`. Queries and results are of a batch of
    one."""
    bodies = (*_listed(x, plan), prefill(x, many))
    return KernelCallee.named("paged_attention", bodies, ("out", *SCRATCH, "lse"))


@functools.lru_cache(maxsize=64)
def append_callee(x: PagedShape, rotary: Rotary, each: int = 1) -> KernelCallee:
    """(q, k, v, frequencies, weights of norms, scales if of 8 bits, table, lengths, query_starts,
    keys, values) -> (turned queries, keys, values)."""
    bodies = (append(x, rotary, each),)
    return KernelCallee.named("paged_append", bodies, ("turned",), ("keys", "values"))


@functools.lru_cache(maxsize=64)
def short_callee(x: PagedShape, plan: PagedPlan, rotary: Rotary) -> KernelCallee:
    """(q, k, v, frequencies, weights of norms if they have some, scales if of 8 bits, table,
    lengths, query_starts, sinks if there are any, keys, values) -> (out, keys, values): append and
    attention of a step with one token a request at most."""
    bodies = (step_attend(x, plan, rotary),)
    return KernelCallee.named("paged_attention_short", bodies, ("out",), ("keys", "values"))
