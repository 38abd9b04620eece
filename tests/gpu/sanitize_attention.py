"""Attention kernels at small sizes for sanitize.py: forward, backward in both modes, paged.

Each case is a few launches on named memories and what some of them hold afterwards, in float64.
Pages and places of a cache where no key lies hold nan, and the page table numbers that are no
pages, so that a tool (and the result) sees whoever reads there. Invariant: a case gives the same
results when its launches run again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

import work_lists

from tilegrad.core.dtype import bfloat16, dtype_of, float8_e4m3, float16, float32, int8
from tilegrad.core.target import H200
from tilegrad.graph import paged_reference
from tilegrad.ir.types import Memory
from tilegrad.kernels.attention.backward import attention_backward
from tilegrad.kernels.attention.forward import wide_attention
from tilegrad.kernels.attention.plan import AttentionPlan, BackwardPlan
from tilegrad.kernels.attention.shape import AttentionShape, parameters
from tilegrad.kernels.paged import prefill as paged_prefill
from tilegrad.kernels.paged.append import HeadNorms, Rotary, append
from tilegrad.kernels.paged.attention import attend
from tilegrad.kernels.paged.shape import PagedPlan, PagedShape
from tilegrad.kernels.paged.shape import parameters as step_parameters
from tilegrad.kernels.paged.short import step_attend
from tilegrad.kernels.paged.work import combine_parts, work_list
from tilegrad.tile.build import Body

Array = np.ndarray[Any, Any]
Memories = dict[str, Array]
STEP = {bfloat16: 2.0**-8, float16: 2.0**-11}


@dataclass
class Steps:
    """Launches in order, their memories by name, and (value, bound) that some hold afterwards."""

    launches: list[tuple[Body, list[str]]]
    memories: Memories
    wanted: dict[str, tuple[Array, float]]

    def check(self, found: Memories) -> None:
        """What was found is what is wanted."""
        for name, (value, bound) in self.wanted.items():
            got = found[name].astype(np.float64)
            np.testing.assert_allclose(got, value, rtol=bound, atol=bound, err_msg=name)


def run(device: Any, steps: Steps) -> str:
    """Launch twice on memory of exactly its size, the second time dependent; compare."""
    from tilegrad.runtime.buffer import Buffer
    from tilegrad.targets.ptx.assemble import assemble, find_ptxas
    from tilegrad.targets.ptx.cuda_api import call
    from tilegrad.targets.ptx.emit import emit
    from tilegrad.targets.ptx.launch import Prepared

    ready = []
    for body, names in steps.launches:
        text, entry = emit(body, "kernel", device.target)
        code: bytes | str = assemble(text, device.arch).cubin if find_ptxas() else text
        function = device.load(code).function("kernel")
        ready.append((Prepared(function, entry), names))
    places = {
        n: Buffer(int(call("cuMemAlloc", max(1, m.nbytes))), m.nbytes, None, device.name)
        for n, m in steps.memories.items()
    }
    try:
        for name, memory in steps.memories.items():
            device.write(places[name], memory)
        for dependent in (False, True):
            for prepared, names in ready:
                prepared.point([places[n].pointer for n in names])
                prepared.start(dependent=dependent)
        device.synchronize()
        steps.check(
            {
                n: device.download(places[n], steps.memories[n].shape, steps.memories[n].dtype)
                for n in steps.wanted
            }
        )
    finally:
        for place in places.values():
            call("cuMemFree", place.pointer)
    return ", ".join(f"{p.entry.grid} programs of {p.entry.threads} threads" for p, _ in ready)


# ---- forward and backward -------------------------------------------------------------------


def drawn(seed: int, *sizes: int) -> Array:
    """Random float32."""
    return np.random.default_rng([seed, *sizes]).standard_normal(sizes).astype(np.float32)


def shape(
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    width: int = 64,
    value_width: int = 0,
    **more: Any,
) -> AttentionShape:
    """A shape of bfloat16 with the usual scale."""
    given = {"batch": 1, "dtype": bfloat16, "scale": width**-0.5, **more}
    return AttentionShape(
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=keys,
        width=width,
        value_width=value_width or width,
        **given,
    )


STARTS = {"query_starts": (0, 70, 70, 71, 150), "key_starts": (0, 40, 60, 60, 150)}


def extra(x: AttentionShape, name: str) -> Array:
    """An option's tensor."""
    if name == "bias":
        made = drawn(5, x.batch, x.heads, x.queries, x.keys)
        made[..., 3::7] = -math.inf
        return made.astype(x.dtype.numpy)
    if name == "mask":
        holes = drawn(6, x.batch, 1, x.queries, x.keys) > 0
        holes[:, :, 5:9] = False
        return holes
    if name == "key_lengths":
        return np.resize(np.array([0, 1, x.keys], np.int32), x.batch)
    if name in STARTS:
        return np.array(STARTS[name], np.int32)
    return drawn(7, x.heads)  # slopes, sinks


class Formula:
    """Attention and its gradients in float64."""

    def __init__(self, x: AttentionShape, given: Memories) -> None:
        self.x, self.given = x, given
        self.q, self.k, self.v = (self.plain(n, o) for n, o in zip("qkv", x.orders))
        s = x.scale * np.einsum("bhid,bhjd->bhij", self.q, np.repeat(self.k, x.group, 1))
        self.slope: Any = 1.0
        if x.softcap:
            s = x.softcap * np.tanh(s / x.softcap)
            self.slope = 1 - (s / x.softcap) ** 2
        away, seen = self.seen()
        s = s + given.get("bias", np.zeros(1)).astype(np.float64)
        s = s + given.get("slopes", np.zeros(1)).astype(np.float64)[:, None, None] * away
        s = np.where(seen, s, -math.inf)
        sinks = given.get("sinks", np.full(x.heads, -math.inf)).astype(np.float64)
        whole = np.concatenate([s, np.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
        top = np.nan_to_num(whole.max(-1, keepdims=True), neginf=0.0)
        with np.errstate(divide="ignore"):
            self.lse = np.log(np.exp(whole - top).sum(-1, keepdims=True)) + top
        self.p = np.exp(s - np.where(np.isfinite(self.lse), self.lse, 0.0))
        self.out = np.einsum("bhij,bhjd->bhid", self.p, np.repeat(self.v, x.group, 1))

    def plain(self, name: str, order: str) -> Array:
        """(batch, heads, tokens, width) in float64."""
        return self.given[name].transpose([order.index(c) for c in "bhtd"]).astype(np.float64)

    def seen(self) -> tuple[Array, Array]:
        """j - i, and which keys a query sees."""
        x, given = self.x, self.given
        places = [np.arange(x.queries), np.arange(x.keys)]
        seen = np.ones((x.queries, x.keys), np.bool_)
        if "query_starts" in given:
            starts = [given[n] for n in STARTS]
            of = [np.searchsorted(s, p, "right") - 1 for s, p in zip(starts, places)]
            seen &= of[0][:, None] == of[1]
            places = [p - s[o] for p, s, o in zip(places, starts, of)]
        away = places[1][None] - places[0][:, None]
        low, high = x.band
        seen = seen & (away >= (-math.inf if low is None else low))
        seen = seen & (away <= (math.inf if high is None else high))
        seen = seen & given.get("mask", np.ones(1, np.bool_))
        if "key_lengths" in given:
            seen = seen & (places[1] < given["key_lengths"][:, None, None, None])
        return away, seen

    def gradients(self) -> dict[str, Array]:
        """Of q, k, v, as (batch, heads, tokens, width), and delta."""
        x = self.x
        dout = self.plain("dout", x.orders[3])
        delta = (dout * self.out).sum(-1)
        back = np.einsum("bhid,bhjd->bhij", dout, np.repeat(self.v, x.group, 1))
        ds = self.p * (back - delta[..., None]) * x.scale * self.slope
        dk = np.einsum("bhij,bhid->bhjd", ds, self.q)
        dv = np.einsum("bhij,bhid->bhjd", self.p, dout)
        summed = [a.reshape(x.batch, x.key_heads, x.group, *a.shape[2:]).sum(2) for a in (dk, dv)]
        dq = np.einsum("bhij,bhjd->bhid", ds, np.repeat(self.k, x.group, 1))
        return {"delta": delta, "dq": dq, "dk": summed[0], "dv": summed[1]}


def laid(a: Array, order: str) -> Array:
    """What lies (b, h, t, d) in another order."""
    return np.ascontiguousarray(a.transpose(["bhtd".index(c) for c in order]))


def inputs(x: AttentionShape) -> tuple[Memories, list[Memory]]:
    """q, k, v and the options, and the types of those."""
    given = {n: drawn(i, *x.sizes(n)).astype(x.dtype.numpy) for i, n in enumerate("qkv")}
    given |= {n: extra(x, n) for n in x.extras}
    return given, [Memory(given[n].shape, dtype_of(given[n].dtype)) for n in x.extras]


def forward(x: AttentionShape, plan: AttentionPlan) -> Steps:
    """One launch: result and log-sum-exps."""
    given, more = inputs(x)
    exact = Formula(x, given)
    body = wide_attention(x, plan, more=more)
    names = [n for n, _ in parameters(x, more)]
    given["out"] = np.full(x.sizes("out"), np.nan, np.float32).astype(x.dtype.numpy)
    given["lse"] = np.full(x.sizes("lse"), np.nan, np.float32)
    bound = 2 * STEP[x.dtype] * max(1.0, float(np.abs(exact.v).max()))
    return Steps(
        [(body, names)],
        given,
        {"out": (laid(exact.out, x.orders[3]), bound), "lse": (exact.lse[..., 0], 2e-5)},
    )


def backward(x: AttentionShape, plan: BackwardPlan) -> Steps:
    """The launches of a Plan: gradients of q, k, v."""
    given, more = inputs(x)
    given["dout"] = drawn(4, *x.sizes("out")).astype(x.dtype.numpy)
    exact = Formula(x, given)
    found = exact.gradients()
    given["lse"] = exact.lse[..., 0].astype(np.float32)
    given["delta"] = found.pop("delta").astype(np.float32)
    made = attention_backward(x, plan, more)
    wanted = {}
    for name, value in found.items():
        value = laid(value, x.orders["qkv".index(name[1])])
        given[name] = np.full(value.shape, np.nan, np.float32).astype(x.dtype.numpy)
        wanted[name] = (value, 2 * STEP[x.dtype] * max(1e-3, float(np.abs(value).max())))
    launches = [(body, [p.attrs["name"] for p in body.parameters]) for body in made]
    for p in (p for body in made for p in body.parameters if p.attrs["name"] == "sums"):
        given["sums"] = np.full(p.shape, np.nan, p.dtype.numpy)
    return Steps(launches, given, wanted)


CAUSAL = {"band": (None, 0)}
PACKED = {"extras": tuple(STARTS)}
SMALL = AttentionPlan((128, 64), programs=2)
FORWARD: dict[str, tuple[AttentionShape, AttentionPlan]] = {
    "full": (shape(2, 2, 130, 150), SMALL),
    "causal": (shape(2, 2, 200, 200, **CAUSAL), replace(SMALL, section=2)),
    "causal, chained": (
        shape(2, 2, 200, 200, **CAUSAL),
        replace(SMALL, query_stages=2, chained=True, section=2),
    ),
    "causal, narrow, three consumers": (
        shape(1, 1, 250, 250, **CAUSAL),
        replace(SMALL, tile=(192, 128), narrow=True),
    ),
    "late": (
        shape(1, 1, 150, 150, **CAUSAL),
        replace(SMALL, late=True, query_stages=2, chained=True),
    ),
    "window": (shape(1, 1, 200, 200, band=(-70, 0)), SMALL),
    "groups": (shape(6, 2, 70, 90, batch=2), SMALL),
    "groups, tokens before heads": (shape(4, 1, 70, 90, orders=("bthd",) * 4, **CAUSAL), SMALL),
    "lengths": (shape(1, 1, 70, 150, batch=3, extras=("key_lengths",), **CAUSAL), SMALL),
    "bias": (shape(2, 2, 100, 72, extras=("bias",)), SMALL),
    "mask": (shape(2, 2, 100, 72, batch=2, extras=("mask",)), SMALL),
    "slopes and sinks": (shape(2, 2, 100, 150, extras=("slopes", "sinks"), **CAUSAL), SMALL),
    "softcap": (shape(1, 1, 100, 100, softcap=2.0), SMALL),
    "packed": (shape(2, 1, 150, 150, **PACKED, **CAUSAL), SMALL),
    "width 128": (shape(1, 1, 130, 200, 128), AttentionPlan((128, 80), programs=1, staged=128)),
    "width 256, through the queries": (
        shape(2, 2, 64, 128, 256),
        AttentionPlan((64, 64), programs=2, staged=0),
    ),
    "width 40, values 72": (shape(1, 1, 77, 131, 40, 72), replace(SMALL, staged=16)),
    "float16": (shape(1, 1, 90, 150, dtype=float16, **CAUSAL), SMALL),
    "one query and key": (shape(5, 1, 1, 1), SMALL),
}
BLOCKS = BackwardPlan(queries=64, keys=64)
FAST, FAST_WIDE = BackwardPlan(128, late=True, fast=True), BackwardPlan(64, fast=True)
BACKWARD: dict[str, tuple[AttentionShape, BackwardPlan]] = {
    "full": (shape(1, 1, 130, 150), BLOCKS),
    "causal": (shape(2, 2, 150, 150, **CAUSAL), BLOCKS),
    "groups": (shape(4, 2, 70, 136, batch=2, **CAUSAL), BLOCKS),
    "window": (shape(1, 1, 200, 200, band=(-40, 10)), BLOCKS),
    "lengths": (shape(2, 1, 70, 150, batch=3, extras=("key_lengths",)), BLOCKS),
    "bias": (shape(2, 2, 70, 140, extras=("bias",)), BLOCKS),
    "packed": (shape(2, 1, 150, 150, **PACKED, **CAUSAL), BLOCKS),
    "softcap, sinks": (shape(1, 1, 70, 140, softcap=2.0, extras=("sinks",)), BLOCKS),
    "width 128": (shape(1, 1, 130, 140, 128, **CAUSAL), BackwardPlan()),
    "width 256": (shape(1, 1, 70, 100, 256, **CAUSAL), BackwardPlan(32, keys=32, apart=True)),
    "float16, tokens before heads": (
        shape(2, 1, 33, 150, dtype=float16, orders=("bthd",) * 4),
        BackwardPlan(128, 2, 96, late=True),
    ),
    "fast": (shape(1, 1, 200, 150), FAST),
    "fast, causal, groups": (shape(2, 1, 130, 136, **CAUSAL), FAST),
    "fast, lengths": (shape(1, 1, 130, 150, batch=3, extras=("key_lengths",), **CAUSAL), FAST),
    "fast, width 128": (shape(2, 1, 130, 140, 128, **CAUSAL), FAST_WIDE),
}


# ---- paged ----------------------------------------------------------------------------------

LENGTHS, ONES = (0, 1, 130, 64, 90), (1, 1, 1, 1, 1)
TURNS = PagedPlan(8, 64, 2, 4, 6)


def paged(
    heads: int,
    key_heads: int,
    page: int,
    queries: Sequence[int] = ONES,
    lengths: Sequence[int] = LENGTHS,
    width: int = 64,
    **more: Any,
) -> PagedShape:
    """A shape that fits a step of requests of these lengths."""
    counts = [-(-n // page) for n in lengths]
    return PagedShape(
        heads,
        key_heads,
        width,
        width,
        page,
        sum(queries),
        len(queries),
        sum(counts) + 2,
        max(counts) + 1,
        width**-0.5,
        **more,
    )


def cache(x: PagedShape, lengths: Sequence[int], queries: Sequence[int]) -> Memories:
    """A step's inputs; nan where no key lies."""
    draw, cached = np.random.default_rng(0), step_parameters(x, ("keys", "values"))
    found = {n: draw.standard_normal(m.shape).astype(np.float32) for n, m in cached}
    order, at = draw.permutation(x.pages), 0
    table = np.full((x.requests, x.most_pages), 10**6, np.int32)
    used = np.zeros((x.pages, x.page), np.bool_)
    for request, length in enumerate(lengths):
        count = -(-length // x.page)
        table[request, :count] = order[at : at + count]
        for j in range(length):
            used[order[at + j // x.page], j % x.page] = True
        at += count
    for value in found.values():
        value.swapaxes(1, 2)[~used] = np.nan
    q = draw.standard_normal((x.tokens, x.heads, x.width)).astype(x.dtype.numpy)
    wide = 1 if x.cache.is_float else 40
    made = {n: paged_reference.kept(m * wide, x.cache.numpy) for n, m in found.items()}
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return {
        **made,
        "q": q,
        "table": table,
        "lengths": np.array(lengths, np.int32),
        "query_starts": starts,
        "scales": scales_of(x),
    }


def scales_of(x: PagedShape) -> Any:
    """Of keys and values, other ones for each key head."""
    made = np.array([[0.5], [2.0]], np.float32) * (1 + np.arange(x.key_heads, dtype=np.float32) / 4)
    if not x.scaled:
        return np.ones_like(made)
    return made if x.cache.is_float else made / 32


def attended(
    x: PagedShape, plan: PagedPlan, queries: Sequence[int] = ONES, lengths: Sequence[int] = LENGTHS
) -> Steps:
    """The work list, attention, and the combining of parts."""
    given = cache(x, lengths, queries)
    items = work_lists.work_list(x, plan, given["lengths"], given["query_starts"])
    for name, type_ in step_parameters(x, ("items", "out", "counters"), plan):
        given[name] = np.zeros(type_.shape, type_.dtype.numpy)
    for name, type_ in step_parameters(x, ("partial", "sums"), plan):
        given[name] = np.full(type_.shape, np.nan, np.float32)
    out = paged_reference.attention(
        x,
        given["q"],
        given["keys"],
        given["values"],
        given["table"],
        given["lengths"],
        given["query_starts"],
        scales_of(x),
    )
    bodies = [work_list(x, plan), attend(x, plan)]
    wanted = {"items": (items, 0.0), "out": (out, 2 * STEP[x.dtype])}
    if plan.joined:
        wanted["counters"] = (np.zeros(given["counters"].shape), 0.0)
    else:
        bodies.append(combine_parts(x, plan))
    return Steps([(body, names_of(body)) for body in bodies], given, wanted)


def names_of(body: Body) -> list[str]:
    """The parameters of a Body."""
    return [p.attrs["name"] for p in body.parameters]


def appended(x: PagedShape, rotary: Rotary, queries: Sequence[int]) -> Steps:
    """New tokens are turned and land in their pages; the rest of the cache stays."""
    given = cache(x, LENGTHS, queries)
    frequencies = (10000.0 ** (-np.arange(max(1, rotary.width // 2)) / 32)).astype(np.float32)
    given |= {
        "k": drawn(8, x.tokens, x.key_heads, x.width).astype(x.dtype.numpy),
        "v": drawn(9, x.tokens, x.key_heads, x.value_width).astype(x.dtype.numpy),
        "frequencies": frequencies,
    }
    wide = [given[n].astype(np.float64) for n in ("keys", "values")]
    turned = paged_reference.append(
        rotary,
        given["q"],
        given["k"],
        given["v"],
        frequencies,
        given["table"],
        given["lengths"],
        given["query_starts"],
        *wide,
        scales_of(x),
    )
    body = append(x, rotary)
    names = names_of(body)
    given[names[-1]] = np.zeros(given["q"].shape, x.dtype.numpy)
    within = 2.0**-4 if x.scaled else STEP[x.dtype]
    return Steps(
        [(body, names)],
        given,
        {
            names[-1]: (turned, STEP[x.dtype]),
            "keys": (wide[0], within),
            "values": (wide[1], within),
        },
    )


def prefilled(
    x: PagedShape, lengths: Sequence[int], queries: Sequence[int], programs: int = 3
) -> Steps:
    """The kernel for many new tokens a request; values past a request's end are zeros."""
    given = cache(x, lengths, queries)
    out = paged_reference.attention(
        x,
        given["q"],
        given["keys"],
        given["values"],
        given["table"],
        given["lengths"],
        given["query_starts"],
        scales_of(x),
    )
    for request, length in enumerate(lengths):
        if length % x.page:
            page = given["table"][request, length // x.page]
            given["values"][page, :, length % x.page :] = 0
    plan = paged_prefill.choose(x, H200)
    assert plan is not None and not paged_prefill.why_not(x, H200)
    named = {"q": "q", "k": "keys", "v": "values"}
    names = [named.get(n, n) for n, _ in paged_prefill.parameters(x, plan)]
    most = [int(s) for s in paged_prefill.tiles_of(x, plan).shape]
    given["tiles"] = np.zeros(most, np.int32)
    listed = paged_prefill.tile_list(x, plan, 1)
    given["out"] = np.full(out.shape, np.nan).astype(x.dtype.numpy)
    given["lse"] = np.full((1, x.heads, x.tokens), np.nan, np.float32)
    body = paged_prefill.prefill(x, replace(plan, programs=programs))
    before = names_of(listed)
    return Steps(
        [(listed, before), (body, names)],
        {n: given[n] for n in (*before[:2], *names)},
        {"out": (out, 2 * STEP[x.dtype])},
    )


def prefills(
    heads: int,
    key_heads: int,
    page: int,
    lengths: Sequence[int],
    queries: Sequence[int],
    **more: Any,
) -> Callable[[], Steps]:
    """A case of `prefilled`."""
    return lambda: prefilled(
        paged(heads, key_heads, page, queries, lengths, **more), lengths, queries
    )


def normed(heads: Any, weight: Any, epsilon: float) -> Any:
    """Heads by their norm, as stored."""
    wide = heads.astype(np.float64)
    root = np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon)
    return (wide / root * weight).astype(heads.dtype)


def stepped(
    x: PagedShape,
    plan: PagedPlan,
    rotary: Rotary,
    queries: Sequence[int],
    lengths: Sequence[int],
    norms: HeadNorms | None = None,
) -> Steps:
    """Append and attention in one launch; a token at most for each request."""
    given = cache(x, lengths, queries)
    frequencies = (10000.0 ** (-np.arange(max(1, rotary.width // 2)) / 32)).astype(np.float32)
    given |= {
        "k": drawn(8, x.tokens, x.key_heads, x.width).astype(x.dtype.numpy),
        "v": drawn(9, x.tokens, x.key_heads, x.value_width).astype(x.dtype.numpy),
        "frequencies": frequencies,
    }
    wide = [given[n].astype(np.float64) for n in ("keys", "values")]
    places = [given[n] for n in ("table", "lengths", "query_starts")]
    heads = [given["q"], given["k"]]
    if norms is not None:
        weights = [np.abs(drawn(10 + i, x.width)) + np.float32(0.5) for i in range(2)]
        given |= dict(zip(("q_norm", "k_norm"), weights))
        heads = [normed(*each) for each in zip(heads, weights, norms.epsilons)]
    turned = paged_reference.append(
        rotary, *heads, given["v"], frequencies, *places, *wide, scales_of(x)
    )
    kept = [m.astype(x.cache.numpy) for m in wide]
    out = paged_reference.attention(x, turned.astype(x.dtype.numpy), *kept, *places, scales_of(x))
    body = step_attend(x, plan, replace(rotary, norms=norms))
    given["out"] = np.zeros(out.shape, x.dtype.numpy)
    within = 2.0**-4 if x.scaled else STEP[x.dtype]
    return Steps(
        [(body, names_of(body))],
        given,
        {"out": (out, 2 * STEP[x.dtype]), "keys": (wide[0], within), "values": (wide[1], within)},
    )


SEVERAL = (0, 1, 5, 2, 3)
FEW = (1, 65, 130, 64, 340)
CHUNKS = ((0, 1, 130, 64), (0, 1, 130, 3))  # keys and new tokens of each request
PREFILL: dict[str, Callable[[], Steps]] = {
    "page 16": prefills(2, 1, 16, *CHUNKS),
    "page 64": prefills(2, 2, 64, *CHUNKS),
    "page 256": prefills(2, 1, 256, *CHUNKS),
    "page 8": prefills(1, 1, 8, (300,), (40,)),
    "window": prefills(2, 1, 16, *CHUNKS, window=70),
    "softcap": prefills(2, 1, 16, (100, 70), (90, 70), softcap=3.0),
    "width 128": prefills(2, 1, 16, (200, 90), (150, 90), width=128),
    "width 256": prefills(1, 1, 16, (150,), (100,), width=256),
    "float16": prefills(2, 1, 16, (100, 70), (90, 70), dtype=float16, cache=float16),
    "8 bits": prefills(4, 2, 16, *CHUNKS, cache=float8_e4m3),
    "8 bits, width 128": prefills(2, 1, 64, *CHUNKS, width=128, cache=float8_e4m3),
    "8 bits, width 256": prefills(1, 1, 16, (150,), (100,), width=256, cache=float8_e4m3),
    "int8, window": prefills(4, 2, 16, *CHUNKS, width=128, window=70, cache=int8),
}
PAGED: dict[str, Callable[[], Steps]] = {
    "page 16, split": lambda: attended(paged(8, 2, 16), TURNS),
    "page 64, split": lambda: attended(paged(8, 2, 64), TURNS),
    "page 16, not split": lambda: attended(paged(4, 1, 16), replace(TURNS, programs=1)),
    "combined by another launch": lambda: attended(paged(8, 2, 16), replace(TURNS, joined=False)),
    "more programs than blocks": lambda: attended(paged(4, 1, 16), replace(TURNS, programs=20)),
    "8 warps, width 128": lambda: attended(paged(4, 1, 16, width=128), PagedPlan(8, 128, 2, 8, 5)),
    "window": lambda: attended(paged(4, 1, 16, window=70), TURNS),
    "8 bits": lambda: attended(paged(4, 1, 16, cache=float8_e4m3), TURNS),
    "int8": lambda: attended(paged(8, 2, 16, cache=int8), TURNS),
    "8 bits, width 128": lambda: attended(
        paged(8, 2, 32, width=128, cache=float8_e4m3), PagedPlan(8, 128, 4, 8, 4)
    ),
    "8 bits, several queries": lambda: attended(
        paged(8, 2, 16, SEVERAL, cache=float8_e4m3), replace(TURNS, rows=64), SEVERAL
    ),
    "several queries": lambda: attended(paged(8, 2, 16, SEVERAL), replace(TURNS, rows=16), SEVERAL),
    "prefill": lambda: attended(
        paged(4, 1, 16, (0, 70, 21), (0, 70, 130)),
        replace(TURNS, rows=64),
        (0, 70, 21),
        (0, 70, 130),
    ),
    "one launch": lambda: stepped(
        paged(8, 2, 16, ONES, FEW), PagedPlan(8, 64, 2, 4, cluster=2), Rotary(64), ONES, FEW
    ),
    "one launch, clusters of 8": lambda: stepped(
        paged(4, 1, 64, ONES, FEW, 128), PagedPlan(8, 64, 2, 4, cluster=8), Rotary(128), ONES, FEW
    ),
    "one launch, 8 bits": lambda: stepped(
        paged(4, 1, 16, ONES, FEW, cache=float8_e4m3),
        PagedPlan(8, 64, 2, 4, cluster=4),
        Rotary(64),
        ONES,
        FEW,
    ),
    "one launch, norms": lambda: stepped(
        paged(8, 2, 16, ONES, FEW, 128),
        PagedPlan(8, 64, 2, 4, cluster=2),
        Rotary(128),
        ONES,
        FEW,
        HeadNorms((1e-6, 0.5), float32),
    ),
    "append": lambda: appended(paged(8, 2, 16, SEVERAL), Rotary(64), SEVERAL),
    "append, 8 bits": lambda: appended(
        paged(4, 1, 16, SEVERAL, cache=float8_e4m3), Rotary(64), SEVERAL
    ),
}


def cases() -> Iterator[tuple[str, Callable[[], Steps]]]:
    """Every case by name."""
    for name, (x, plan) in FORWARD.items():
        yield f"attention: {name}", lambda x=x, p=plan: forward(x, p)
    for name, (x, steps) in BACKWARD.items():
        yield f"attention backward: {name}", lambda x=x, p=steps: backward(x, p)
    for name, make in PAGED.items():
        yield f"paged attention: {name}", make
    for name, make in PREFILL.items():
        yield f"attention, prefill over pages: {name}", make
