"""The kernels of a paged cache as a Graph calls them: inference only, no derivative.

A list is made once a step (`work_list`, `tile_list`); `append` and attention (`listed`, `mixed`)
are called once a layer, the last with the list's results; or `step_attend` alone, for a step of few
requests; on CPUs attention or prefill of `attention_cpu`; that of `portable` where no other runs.
Those that append write keys and values in place: they are state.
Results of attention but the first are scratch. Its argument `counters` (zeros, int32) is written
while it runs and is zeros again afterwards; one array serves all layers of a stream.
Each is built once. Invariant: arguments stand in the order of the kernels' parameters, results in
the order that KERNELS says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...tile.build import Body
from ...tile.callee import KernelCallee
from ..attention.plan import AttentionPlan
from ..attention_cpu.decode import PARTIAL
from . import attention_cpu
from .append import append
from .attention import SCRATCH, attend
from .prefill import prefill, tile_list
from .shape import PagedPlan, PagedShape
from .short import step_attend
from .work import combine_parts, work_list


def listed(x: PagedShape, plan: PagedPlan) -> list[Body]:
    """The launches that take a list: (q, keys, values, scales if of 8 bits, table, sinks if there
    are any, items, and counters if parts are joined) -> (out, partial, sums)."""
    return [attend(x, plan)] if plan.joined else [attend(x, plan), combine_parts(x, plan)]


def mixed(x: PagedShape, plan: PagedPlan, many: AttentionPlan) -> list[Body]:
    """Requests with fewer new tokens than the Plan says by the list, the others by `prefill`, which
    takes tiles too and gives lse."""
    return [*listed(x, plan), prefill(x, many)]


STATE = ("keys", "values")
# by what writes the launches: the name of a call, its results, and what it writes in place
KERNELS: dict[Callable[..., Any], tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    work_list: ("paged_work", ("items",), ()),
    tile_list: ("paged_tiles", ("tiles",), ()),
    listed: ("paged_attention", ("out", *SCRATCH), ()),
    mixed: ("paged_attention", ("out", *SCRATCH, "lse"), ()),
    attention_cpu.attend: ("paged_attention", ("out", *PARTIAL), ()),
    attention_cpu.prefill: ("paged_prefill", ("out",), ()),
    append: ("paged_append", ("turned",), STATE),
    step_attend: ("paged_attention_short", ("out",), STATE),
}


@functools.lru_cache(maxsize=256)
def called(write: Callable[..., Any], *given: Any) -> KernelCallee:
    """A kernel with its Plan, as a Graph calls it."""
    (name, results, states), made = KERNELS[write], write(*given)
    return KernelCallee.named(name, made if isinstance(made, list) else [made], results, states)
