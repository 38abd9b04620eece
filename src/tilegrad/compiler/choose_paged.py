"""The kernels of a paged cache for a Target: which append, which attend, and what they share.

Machines whose matrix units run beside the threads: many new tokens a request take the prefill
kernel; else the work is first shared out evenly by a list, one Node for all layers that ask for the
same one. Where every request has one token and none has many keys, appending and attention are one
launch. Machines of vectors have kernels that need no list; others have the portable one.
Invariant: what no kernel takes is an error with the reason, at the user's line; keys and values
that are state stay so, since the kernels that append write them in place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ..core.config import invariant
from ..core.dtype import int32
from ..core.errors import UserError
from ..core.target import Target
from ..graph import build, ops
from ..graph.paged_types import APPEND, ATTEND, named
from ..ir.node import Node, users
from ..ir.rewrite import Log
from ..ir.symbol import high
from ..ir.types import Tuple
from ..kernels.paged import attention_cpu, portable, prefill, prefill_cpu
from ..kernels.paged.append import Rotary
from ..kernels.paged.call import append_callee, attention_callee, list_callee, short_callee
from ..kernels.paged.shape import (
    PagedPlan,
    PagedShape,
    ShortPlan,
    choose,
    choose_short,
    item_rows,
    spread,
    why_not,
)
from ..tile.callee import KernelCallee
from .paged_shape import shape_of


def chooser(target: Target, order: Sequence[Node], results: Sequence[Node], log: Log) -> Paged:
    """The choices for the Nodes of one Block."""
    return Paged(target, order, results, log)


class Paged:
    """See `choose.Chooser`."""

    def __init__(
        self, target: Target, order: Sequence[Node], results: Sequence[Node], log: Log
    ) -> None:
        self.target, self.log = target, log
        self.readers, self.results = users(order), set(results)
        self.joined: dict[Node, Node] = {}  # attention that is computed with its append

    def choose(self, node: Node, done: dict[Node, Node]) -> list[Node]:
        """The results of an append, or of an attention."""
        if node.op is ops.paged_append:
            return self._append(node, done)
        return [self.joined[node] if node in self.joined else self._attend(node, done)]

    def _call(self, *inputs: Node, callee: KernelCallee) -> list[Node]:
        self.log.fired[callee.name] = self.log.fired.get(callee.name, 0) + 1
        made = ops.call(*inputs, callee=callee)
        return build.items(made) if isinstance(made.type, Tuple) else [made]

    def _refused(self, what: str, why: str) -> bool:
        """False: take note of what is not taken at the level `invariant`."""
        note = f"invariant: not {what}: {why}"
        if note not in self.log.notes:
            self.log.notes.append(note)
        return False

    # ---- append -------------------------------------------------------------------------------

    def _append(self, node: Node, done: dict[Node, Node]) -> list[Node]:
        inputs, rotary = [done[i] for i in node.inputs], Rotary(**node.attrs)
        attention = self._attention_of(node)
        if attention is not None:
            x = shape_of(attention)
            plan = choose_short(x, self.target, high(attention.attrs["most_keys"]) or None)
            if plan is not None:
                out, keys, values = self._call(*inputs, callee=_short(x, plan, rotary))
                self.joined[attention] = out
                return [out, keys, values]  # nothing reads the first but that attention
        return self._call(*inputs, callee=_append(shape_of(node), rotary))

    def _attention_of(self, node: Node) -> Node | None:
        """The attention of single tokens that alone reads the queries of an append, and reads the
        same cache in the same places; None if there is no such."""
        if not self.target.asynchronous_units or invariant():
            return None
        items = {n.attrs["index"]: n for n in self.readers.get(node, [])}
        readers = self.readers.get(items.get(0, node), [])
        if 0 not in items or len(readers) != 1 or items[0] in self.results:
            return None
        found = readers[0]
        if found.op is not ops.paged_attention or not found.attrs["single"]:
            return None
        appended = {
            **named(APPEND, node.inputs),
            **dict(zip(("q", "keys", "values"), (items.get(i) for i in range(3)))),
        }
        same = all(appended[n] is i for n, i in named(ATTEND, found.inputs).items())
        return found if same else None

    # ---- attention ----------------------------------------------------------------------------

    def _attend(self, node: Node, done: dict[Node, Node]) -> Node:
        x, target = shape_of(node), self.target
        inputs = [done[i] for i in node.inputs]
        queries = 1 if node.attrs["single"] else node.attrs["queries"] or _queries(x)
        if not target.has_threads:
            _refuse(node, attention_cpu.why_not(x, target), x)
            many = queries >= prefill_cpu.LEAST and not prefill_cpu.why_not(x, target)
            if many and invariant():
                many = self._refused("paged_prefill", "its sums are not those of single tokens")
            made = _cpu_prefill(x, target) if many else _cpu(x, target, invariant())
            return self._call(*inputs, callee=made)[0]
        if not target.asynchronous_units or invariant():
            if target.asynchronous_units:
                self._refused("kernels with a work list", "keys are cut by who else is there")
            _refuse(node, portable.why_not(x), x)
            return self._call(*inputs, callee=_portable(x, target))[0]
        if queries >= prefill.LEAST and not prefill.why_not(x, target):
            q = build.reshape(inputs[0], (1, *inputs[0].shape))
            out = self._call(q, *inputs[1:], callee=_prefill(x, target))[0]
            return build.reshape(out, node.shape)
        plan = choose(x, target, queries)
        _refuse(node, why_not(x, plan), x)
        *cache, table, lengths, starts = inputs
        shared = self._work(x, plan, lengths, starts)
        return self._call(*cache, table, *shared, callee=_attention(x, plan))[0]

    def _work(self, x: PagedShape, plan: PagedPlan, lengths: Node, starts: Node) -> list[Node]:
        """The list of a step, and zeros that programs count in or pairs that were cut; the same
        Nodes for all layers that differ in nothing that the list depends on."""
        listed = replace(x, scale=1.0, softcap=0.0)
        items, last = build.items(ops.call(lengths, starts, callee=_list(listed, plan)))
        if plan.joined:
            last = build.full((item_rows(x, plan), spread(x, plan)), 0, int32)
        return [items, last]


def _queries(x: PagedShape) -> int:
    """New tokens of a request, as the sizes tell."""
    one = x.tokens is x.requests or x.tokens == x.requests
    return 1 if one else max(1, high(x.tokens) // max(1, high(x.requests)))


def _refuse(node: Node, why: str, x: PagedShape) -> None:
    if why:
        raise UserError(
            f"no kernel takes this: {why}", op=node.op.name, got=str(x), location=node.location
        )


# ---- kernels, built once ------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _list(x: PagedShape, plan: PagedPlan) -> KernelCallee:
    return list_callee(x, plan)


@functools.lru_cache(maxsize=64)
def _attention(x: PagedShape, plan: PagedPlan) -> KernelCallee:
    return attention_callee(x, plan)


@functools.lru_cache(maxsize=64)
def _prefill(x: PagedShape, target: Target) -> KernelCallee:
    plan = prefill.choose(x, target)
    assert plan is not None
    return prefill.prefill_callee(x, plan)


@functools.lru_cache(maxsize=64)
def _cpu(x: PagedShape, target: Target, fixed: bool) -> KernelCallee:
    return attention_cpu.callee(x, target)  # by the level, which `fixed` stands for


@functools.lru_cache(maxsize=64)
def _cpu_prefill(x: PagedShape, target: Target) -> KernelCallee:
    return prefill_cpu.callee(x, target)


@functools.lru_cache(maxsize=64)
def _portable(x: PagedShape, target: Target) -> KernelCallee:
    return portable.callee(x, target)


@functools.lru_cache(maxsize=64)
def _append(x: PagedShape, rotary: Rotary) -> KernelCallee:
    return append_callee(x, rotary)


@functools.lru_cache(maxsize=64)
def _short(x: PagedShape, plan: ShortPlan, rotary: Rotary) -> KernelCallee:
    return short_callee(x, plan, rotary)
