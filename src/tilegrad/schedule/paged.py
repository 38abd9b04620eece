"""Families of a paged cache: which kernels append, which attend, and what they share.

Machines whose matrix units run beside the threads: requests with many new tokens take the prefill
kernel; for others, and where warps have units of their own, the work is first shared out evenly by
a list, one Node for all layers that ask for the same one. Where every request has one token and
none has many keys, appending and attention are one launch. Machines of vectors have kernels that
need no list; others have the portable one. At the level `invariant` only kernels whose sums do not
depend on other requests offer.
Invariant: keys and values that are state stay so, since the kernels that append write them in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..core.config import invariant
from ..core.dtype import int32
from ..core.target import Target
from ..graph import build, ops
from ..graph.paged_types import APPEND, ATTEND, named
from ..graph.recognize_norm import LastNorm, last_norm
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..kernels.paged import attention_cpu, portable, prefill
from ..kernels.paged.append import HeadNorms, Rotary, heads_each
from ..kernels.paged.call import append, called, listed, mixed, step_attend
from ..kernels.paged.shape import PagedPlan, PagedShape, choose, choose_short, short_keys, why_not
from ..kernels.paged.work import work_list
from .access import base_of
from .chosen import Chosen, Surroundings, Writer, roofline_of
from .family import Offer, Offers

OTHER_SUMS = "at the level invariant: its sums are not those of single tokens"
CUT_KEYS = "at the level invariant: keys are cut by who else is there"


def shape_of(node: Node) -> PagedShape:
    """The sizes and options of an append or an attention."""
    append = node.op is ops.paged_append
    given = named(APPEND if append else ATTEND, node.inputs)
    q, keys, values, table = (given[n] for n in ("q", "keys", "values", "table"))
    (tokens, heads, width), (pages, key_heads, page, _) = q.shape, keys.shape
    requests, most_pages = table.shape
    of_heads = (heads, key_heads, width, values.shape[3], page)
    counts = (tokens, requests, pages, most_pages)
    how = {} if append else {n: node.attrs[n] for n in ("scale", "window", "softcap")}
    how |= {"dtype": q.dtype, "cache": keys.dtype, "sinks": "sinks" in given}
    return PagedShape(*of_heads, *counts, **how)


def queries_of(node: Node, most: bool = False) -> int:
    """New tokens of a request, as a rule or at most: as the op says, or as its sizes tell."""
    if node.attrs["single"]:
        return 1
    x = shape_of(node)
    if most and x.single:
        return 1
    requests = 1 if most else max(1, high(x.requests))
    return node.attrs["queries"] or max(1, high(x.tokens) // requests)


# ---- attention ----------------------------------------------------------------------------------


class Attention(Chosen):
    """Attention over a paged cache by one way."""

    # kernels(node, x, target): why the Family does not take this, or what writes the calls of its
    # kernels (a Writer)
    kernels: Any

    def offers_for(self, node: Node, near: Surroundings, target: Target) -> Offers:
        """The one Plan, by the roofline over all pages that a request may have, or why there is
        none."""
        x = shape_of(node)
        found = self.kernels(node, x, target)
        keys = min(high(x.most_pages), high(x.pages)) * x.page
        flops = 2 * high(x.tokens) * keys * x.heads * (x.width + x.value_width)
        return found if isinstance(found, str) else [Offer(roofline_of(node, target, flops), found)]


def _alone(kernel: Callable[..., Any], *of: Any) -> Writer:
    """One call, of a kernel that takes the op's inputs and gives its result first."""
    return lambda inputs, near: near.call(*inputs, callee=called(kernel, *of))[:1]


class ListAttention(Attention):
    """Few new tokens a request: a list shares the work out, one for all layers."""

    def kernels(self, node: Node, x: PagedShape, target: Target) -> str | Writer:
        """See `Attention`."""
        plan = choose(x, target, queries_of(node))

        def write(inputs: Sequence[Node], near: Surroundings) -> list[Node]:
            given, _ = _with_work(x, plan, inputs, near)
            return near.call(*given, callee=called(listed, x, plan))[:1]

        return (CUT_KEYS if invariant() else why_not(x, plan)) or write

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """Steps of single tokens and few keys are one launch a layer; with more keys the list
        shares them out: (the Symbol of the most keys, the first number that is many)."""
        if not node.attrs["single"] or invariant():
            return ()
        x = shape_of(node)
        few = short_keys(x, target)
        some = few and few < high(x.most_pages) * x.page
        return [(node.attrs["most_keys"], few + 1)] if some else ()


def _with_work(
    x: PagedShape, plan: PagedPlan, inputs: Sequence[Node], near: Surroundings
) -> tuple[list[Node], list[Node]]:
    """What attention by a list takes, the list of a step and zeros that programs count in, if they
    join parts, at its end; and the lengths and query starts, which a list is of."""
    given = named(ATTEND, inputs)
    of = [given.pop(name) for name in ("lengths", "query_starts")]
    items = _listed(near, of, work_list, x, plan)
    counters = build.full((plan.item_rows(x), x.key_heads), 0, int32)
    return [*given.values(), items, *([counters] if plan.joined else [])], of


def _listed(near: Surroundings, of: Sequence[Node], write: Any, x: PagedShape, *how: Any) -> Node:
    """The call of a list, by its kernel; the same Node for all layers that differ in nothing that
    the list depends on."""
    callee = called(write, replace(x, scale=1.0, softcap=0.0, sinks=False), *how)
    callee.verdict = near.verdict
    return ops.call(*of, callee=callee)


class UnitPrefill(Attention):
    """Any numbers of new tokens, on matrix units that run beside their threads: requests with few
    take the list, those with many a launch of their own."""

    def kernels(self, node: Node, x: PagedShape, target: Target) -> str | Writer:
        """See `Attention`."""
        least = prefill.FEW_NEW_TOKENS
        few = choose(x, target, below=least)

        def write(inputs: Sequence[Node], near: Surroundings) -> list[Node]:
            many = prefill.choose(x, target)
            assert many is not None
            given, of = _with_work(x, few, inputs, near)
            tiles = _listed(near, of, prefill.tile_list, x, many, least)
            return near.call(*given, tiles, callee=called(mixed, x, few, many))[:1]

        if invariant():
            return OTHER_SUMS
        if queries_of(node, most=True) < prefill.LEAST_TOKENS:
            return f"for {prefill.LEAST_TOKENS} new tokens and more"
        return prefill.why_not(x, target) or why_not(x, few) or write


class VectorPrefill(Attention):
    """Many new tokens a request, on vectors."""

    def kernels(self, node: Node, x: PagedShape, target: Target) -> str | Writer:
        """See `Attention`."""
        if queries_of(node) < attention_cpu.LEAST_NEW_TOKENS:
            return f"for {attention_cpu.LEAST_NEW_TOKENS} new tokens a request and more"
        why = attention_cpu.prefill_why_not(x, target) or (OTHER_SUMS if invariant() else "")
        return why or _alone(attention_cpu.prefill, x, attention_cpu.prefill_plan(x, target))


class VectorAttention(Attention):
    """Any number of new tokens, on vectors."""

    def kernels(self, node: Node, x: PagedShape, target: Target) -> str | Writer:
        """See `Attention`."""
        of = attention_cpu.choose(x, target), attention_cpu.parts_of(x, target)
        return _alone(attention_cpu.attend, x, *of)


class PortableAttention(Attention):
    """The kernel for any threads: a fallback."""

    def kernels(self, node: Node, x: PagedShape, target: Target) -> str | Writer:
        """See `Attention`."""
        callee = portable.attend(x, target)
        return lambda inputs, near: near.call(*inputs, callee=callee)


# ---- append -------------------------------------------------------------------------------------


class AppendAttend(Chosen):
    """An append with the attention of single tokens that follows it, in one launch."""

    def offers_for(self, node: Node, near: Surroundings, target: Target) -> Offers:
        """One launch for few keys, or why there is none; nothing reads the queries but that
        attention."""
        if invariant():
            return CUT_KEYS
        attention = attention_of(node, near)
        if attention is None:
            return "no attention of single tokens is all that reads the queries"
        x = shape_of(attention)
        plan = choose_short(x, target, high(attention.attrs["most_keys"]))
        if plan is None:
            return "too many keys for a cluster to each request"

        def write(inputs: Sequence[Node], near: Surroundings) -> list[Node]:
            given, rotary = with_norms(node, inputs, near, target)
            sinks = attention.inputs[-1:] if x.sinks else ()
            given = (*given[:-2], *sinks, *given[-2:])  # keys and values are the last
            out, keys, values = near.call(*given, callee=called(step_attend, x, plan, rotary))
            near.joined[attention] = out
            return [out, keys, values]

        return [Offer(roofline_of(node, target), write)]


class Append(Chosen):
    """An append by itself, with the norms of heads that nothing else reads where launches are
    dear."""

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """One launch."""
        x, (given, rotary) = shape_of(node), with_norms(node, inputs, near, target)
        return near.call(*given, callee=called(append, x, rotary, heads_each(x, target)))


def with_norms(
    node: Node, inputs: Sequence[Node], near: Surroundings, target: Target
) -> tuple[Sequence[Node], Rotary]:
    """What an append takes and how it turns heads: it does their norms too, where it may, and where
    queries and keys both have one, with weights of one dtype, that nothing but the append reads."""
    alone = [near.readers.get(i) == [node] and i not in near.results for i in node.inputs[:2]]
    found: list[LastNorm] = [n for n in map(last_norm, inputs[:2]) if n is not None]
    rotary, dtypes = Rotary(**node.attrs), {norm.weight.dtype for norm in found}
    may = target.has_threads and not invariant() and rotary.whole(shape_of(node))
    if not may or not all(alone) or len(dtypes) != 1 or len(found) != 2:
        return inputs, rotary
    (q, k), (_, _, v, speeds, *rest) = found, inputs
    norms = HeadNorms((q.epsilon, k.epsilon), q.weight.dtype)
    return (q.source, k.source, v, speeds, q.weight, k.weight, *rest), replace(rotary, norms=norms)


def attention_of(node: Node, near: Surroundings) -> Node | None:
    """The attention of single tokens that alone reads the queries of an append, and reads the
    same cache in the same places; None if there is no such."""
    items = {n.attrs["index"]: n for n in near.readers.get(node, [])}
    readers = near.readers.get(items.get(0, node), [])
    if 0 not in items or len(readers) != 1 or items[0] in near.results:
        return None
    found = readers[0]
    if found.op is not ops.paged_attention or not found.attrs["single"]:
        return None
    after = {name: items.get(i) for i, name in enumerate(("q", "keys", "values"))}
    appended = {**named(APPEND, node.inputs), **after}
    given = named(ATTEND, found.inputs)
    sinks = given.pop("sinks", None)
    if sinks is not None and base_of(sinks, passing=(ops.cast,)).inputs:
        return None  # they are computed, maybe of what comes after the append
    same = all(appended.get(n) is i for n, i in given.items())
    return found if same else None
