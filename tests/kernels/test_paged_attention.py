"""kernels/paged_*.py against NumPy: interpreted, checked, simulated, assembled.

A step's cache holds nan wherever no key of a request lies, and its table far pages past each
request's end, so that nothing is right by luck. The interpreter runs roles in a random order; the
static check finds no fault in any Body.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import mutants
import work_lists
from assembled import assemble_all
from cache_numbers import agree_stored, scales_of, sinks_of, stored
from simulator import simulate

from tilegrad.compiler.pipeline import fitted
from tilegrad.core.dtype import bfloat16, float8_e4m3, float16, float32, int8
from tilegrad.core.errors import InternalError
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import paged_reference
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.paged.append import HeadNorms, Rotary, append
from tilegrad.kernels.paged.attention import attend
from tilegrad.kernels.paged.call import called, listed
from tilegrad.kernels.paged.shape import FIELDS, PagedPlan, PagedShape, choose, why_not
from tilegrad.kernels.paged.work import combine_parts, work_list
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.callee import parse_callee
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import check_body

START, STOP, BLOCKS, PARTIAL = map(FIELDS.index, ("start", "stop", "blocks", "partial"))
ROUNDING = {bfloat16: 2.0**-8, float16: 2.0**-10}


@dataclass
class Step:
    """A step's inputs."""

    x: PagedShape
    q: Any
    keys: Any
    values: Any
    table: Any
    lengths: Any
    starts: Any

    @property
    def sinks(self) -> list[Any]:
        """The score that each head has more, if it has one."""
        return sinks_of(self.x)

    @property
    def scales(self) -> list[Any]:
        """What a cache of 8 bits has beside it."""
        return [scales_of(self.x)] if self.x.scaled else []

    def wanted(self) -> Any:
        """The result in float64."""
        given = (self.q, self.keys, self.values, self.table, self.lengths, self.starts)
        return paged_reference.attention(self.x, *given, scales_of(self.x), *self.sinks)


def make_step(x: PagedShape, lengths: Sequence[int], queries: Sequence[int], seed: int = 0) -> Step:
    """Random numbers; nan where no key lies, pages that do not exist past each request's end."""
    draw = np.random.default_rng(seed)
    q = draw.standard_normal((x.tokens, x.heads, x.width)).astype(x.dtype.numpy)
    lead = (x.pages, x.key_heads, x.page)
    keys = draw.standard_normal((*lead, x.width)).astype(np.float32)
    values = draw.standard_normal((*lead, x.value_width)).astype(np.float32)
    order, at = draw.permutation(x.pages), 0
    table = np.full((x.requests, x.most_pages), 10**6, np.int32)
    used = np.zeros((x.pages, x.page), np.bool_)
    for request, length in enumerate(lengths):
        count = -(-length // x.page)
        table[request, :count] = order[at : at + count]
        for j in range(length):
            used[order[at + j // x.page], j % x.page] = True
        at += count
    for cache in (keys, values):
        cache.swapaxes(1, 2)[~used] = np.nan
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Step(
        x,
        q,
        stored(x, keys),
        stored(x, values),
        table,
        np.array(lengths, np.int32),
        starts,
    )


def shape(
    heads: int,
    key_heads: int,
    page: int,
    lengths: Sequence[int],
    queries: Sequence[int],
    width: int = 64,
    value_width: int = 64,
    **more: Any,
) -> PagedShape:
    """A shape that fits a step."""
    pages = sum(-(-n // page) for n in lengths) + 2
    most = max(-(-n // page) for n in lengths) + 1
    return PagedShape(
        heads,
        key_heads,
        width,
        value_width,
        page,
        sum(queries),
        len(lengths),
        pages,
        most,
        width**-0.5,
        **more,
    )


ONES = (1, 1, 1, 1, 1)
LENGTHS = (0, 1, 130, 64, 200)
SMALL = PagedPlan(8, 64, 2, 4, 6)
CASES: dict[str, tuple[PagedShape, PagedPlan, Sequence[int], Sequence[int]]] = {}


def case(
    label: str,
    heads: int,
    key_heads: int,
    page: int,
    plan: PagedPlan = SMALL,
    lengths: Sequence[int] = LENGTHS,
    queries: Sequence[int] = ONES,
    nobody: int = 0,
    **more: Any,
) -> None:
    """Add a case; the last tokens belong to `nobody`."""
    x = shape(heads, key_heads, page, lengths, (*queries, nobody), **more)
    CASES[label] = (replace(x, requests=len(lengths)), plan, lengths, queries)


case("page 16", 8, 2, 16)
case("page 32", 8, 2, 32)
case("page 64", 8, 2, 64)
case("page 128", 8, 2, 128)
case("page 256", 8, 2, 256)
case("page 8", 2, 1, 8)
case("group 1", 2, 2, 16)
case("group 8", 8, 1, 16)
case("group 3", 6, 2, 16)
case("group 12, 16 rows", 12, 1, 32, replace(SMALL, rows=16))
case("blocks of 128 keys", 4, 1, 16, replace(SMALL, block=128))
case("few blocks", 8, 4, 32, PagedPlan(8, 64, 2, 4, 80))
case("one range", 6, 3, 16, PagedPlan(8, 64, 2, 4, 3))
case("8 warps", 4, 1, 16, PagedPlan(8, 128, 2, 8, 5), width=128, value_width=128)
case("long items", 4, 1, 16, replace(SMALL, programs=1, stages=5), (900, 333), (1, 1))
case("one program", 4, 1, 16, replace(SMALL, programs=1, stages=3))
case("more programs than blocks", 4, 1, 16, replace(SMALL, programs=40))
case("combined by another launch", 8, 2, 16, replace(SMALL, joined=False))
case("parts in turns", 4, 1, 16, replace(SMALL, programs=40, rows=64))
case("narrow", 4, 1, 16, width=32, value_width=40)
case("values wider", 4, 1, 16, width=64, value_width=128)
case("keys wider", 2, 1, 16, width=192, value_width=64)
case("float16", 4, 1, 16, dtype=float16, cache=float16)
case("window", 4, 1, 16, window=70)
case("window within a block", 4, 1, 32, window=7)
case("softcap", 4, 1, 16, softcap=3.0)
case("8 bits", 4, 1, 16, cache=float8_e4m3)
case("int8, two heads", 8, 2, 16, cache=int8)
case(
    "8 bits, wide",
    4,
    1,
    64,
    PagedPlan(8, 128, 2, 8, 3),
    width=128,
    value_width=128,
    cache=float8_e4m3,
)
case("sinks", 8, 2, 16, sinks=True)
case("sinks, a window, after", 6, 2, 16, replace(SMALL, joined=False), sinks=True, window=70)
case("sinks, several queries", 8, 2, 16, sinks=True, queries=(0, 1, 5, 2, 3))
case("sinks, 8 bits", 8, 1, 16, cache=float8_e4m3, sinks=True, softcap=3.0)
case("several queries", 8, 2, 16, queries=(0, 1, 5, 2, 3))
case("several queries, 16 rows", 8, 2, 16, replace(SMALL, rows=16), queries=(0, 1, 5, 2, 3))
case("prefill", 4, 1, 16, replace(SMALL, rows=64), (0, 70, 130), (0, 70, 21))
case(
    "prefill with a window", 4, 1, 16, replace(SMALL, rows=32), (0, 70, 130), (0, 70, 21), window=33
)
case("requests without queries", 4, 1, 16, queries=(0, 1, 0, 0, 1))
case("tokens of no request", 4, 1, 16, queries=(0, 1, 0, 0, 1), nobody=3)
case("tokens of no request, several", 4, 2, 16, SMALL, (100, 70), (3, 20), 21, window=30)
WARPS = PagedPlan(16, 64, 2, 4, 6, threads=True)  # copies and products by the threads: sm_80
case("threads, tokens of no request", 4, 1, 16, WARPS, queries=(0, 1, 0, 0, 1), nobody=3)
case("threads", 8, 2, 16, WARPS)
case("threads, page 256", 4, 1, 256, replace(WARPS, stages=3))
case(
    "threads, wide, combined after",
    4,
    1,
    32,
    replace(WARPS, joined=False),
    width=128,
    value_width=128,
)
case("threads, long items", 4, 1, 16, replace(WARPS, programs=1, stages=4), (900, 333), (1, 1))
case("threads, window, softcap", 4, 1, 16, WARPS, window=70, softcap=3.0)
case("threads, several queries", 8, 2, 16, WARPS, queries=(0, 1, 5, 2, 3))
case("threads, sinks", 8, 2, 16, WARPS, sinks=True, softcap=3.0, window=9)
case("threads, float16", 2, 1, 8, WARPS, dtype=float16, cache=float16)


def target_of(plan: PagedPlan) -> Target:
    """A machine that has what a Plan asks for, and no more."""
    return A100 if plan.threads else H200


def kernels(x: PagedShape, plan: PagedPlan) -> tuple[Body, Body, Body]:
    """The three Bodies of a step."""
    return work_list(x, plan), attend(x, plan), combine_parts(x, plan)


def run_step(
    step: Step, plan: PagedPlan, run: Any, bodies: tuple[Body, Body, Body] | None = None
) -> tuple[Any, Any]:
    """(result, items) of the three kernels; run(body, memories) runs one."""
    x = step.x
    items = np.zeros_like(work_lists.work_list(x, plan, step.lengths, step.starts))
    work, main, combine = bodies or kernels(x, plan)
    run(work, [step.lengths, step.starts, items])
    out = np.full((x.tokens, x.heads, x.value_width), 7.0).astype(x.dtype.numpy)
    lead = (len(items), x.key_heads, plan.rows)
    partial = np.full((*lead, x.value_width), np.nan, np.float32)
    sums = np.full(lead, np.nan, np.float32)
    counters = [np.zeros(lead[:2], np.int32)] if plan.joined else []
    run(
        main,
        [
            step.q,
            step.keys,
            step.values,
            *step.scales,
            step.table,
            *step.sinks,
            items,
            out,
            partial,
            sums,
            *counters,
        ],
    )
    if not plan.joined:
        run(combine, [items, partial, sums, out])
    assert not np.any(counters)
    return out, items


def same_list(step: Step, plan: PagedPlan, items: Any) -> None:
    """Items as the reference has them."""
    wanted = work_lists.work_list(step.x, plan, step.lengths, step.starts)
    np.testing.assert_array_equal(items, wanted)


def agree(step: Step, out: Any) -> None:
    """Up to the rounding of the weights and of the result."""
    near = 2 * ROUNDING[step.x.dtype]
    np.testing.assert_allclose(out.astype(np.float64), step.wanted(), rtol=near, atol=near)
    assert (out[step.starts[-1] :] == 0).all()  # tokens of no request


@pytest.mark.sampled(2, also=("sinks", "sinks, a window, after"))
@pytest.mark.parametrize("label", CASES)
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    x, plan, lengths, queries = CASES[label]
    for body, level in zip(kernels(x, plan), ("portable", "placed", "portable")):
        verify_body(body, level, target_of(plan))
        found = [f for f in check_body(body, target_of(plan)) if f.rule != "bank_conflict"]
        assert not found, found
    step = make_step(x, lengths, queries)
    seed = list(CASES).index(label)
    out, items = run_step(step, plan, lambda b, m: interpret.run(b, m, seed=seed))
    same_list(step, plan, items)
    agree(step, out)


SIMULATED = (
    "page 16",
    "few blocks",
    "combined by another launch",
    "page 128",
    "group 3",
    "8 warps",
    "8 bits",
    "int8, two heads",
    "window",
    "sinks",
    "sinks, a window, after",
    "sinks, several queries",
    "threads, sinks",
    "prefill",
    "threads",
    "threads, page 256",
    "threads, window, softcap",
)


@pytest.mark.sampled(2, also=("8 bits", "threads", "sinks"))
@pytest.mark.parametrize("label", SIMULATED)
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator, which checks races and fences of its own."""
    x, plan, lengths, queries = CASES[label]
    step = make_step(x, lengths, queries)
    out, items = run_step(
        step,
        plan,
        lambda b, m: simulate(*emit(b, "kernel", target_of(plan)), m, policy="random", seed=1),
    )
    same_list(step, plan, items)
    agree(step, out)


def test_large_logits() -> None:
    """Scores of hundreds: the largest key wins, nothing overflows."""
    x, plan, lengths, queries = CASES["page 16"]
    step = make_step(x, lengths, queries)
    step.q = (step.q.astype(np.float32) * 200).astype(x.dtype.numpy)
    out, _ = run_step(step, plan, lambda b, m: interpret.run(b, m))
    agree(step, out)


# ---- the work list ------------------------------------------------------------------------------


def draws() -> Iterator[tuple[PagedShape, PagedPlan, Any, Any]]:
    """Random steps of many requests."""
    draw = np.random.default_rng(1)
    for number in range(6):
        requests = int(draw.integers(1, 70))
        lengths = np.exp(draw.uniform(0, np.log(5000), requests)).astype(np.int32)
        queries = draw.integers(0, 9, requests) if number % 2 else np.ones(requests, np.int64)
        lengths = np.maximum(lengths, queries).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        window = (0, 0, 900)[number % 3]
        x = PagedShape(
            32, 8, 128, 128, 16, max(1, int(starts[-1])), requests, 1 << 16, 400, 1.0, window=window
        )
        plan = PagedPlan(
            8,
            (128, 64)[number % 2],
            programs=(128, 56, 1000)[number % 3],
            below=(0, 4, 0, 0, 8, 2)[number],
        )
        yield x, plan, lengths, starts


@pytest.mark.parametrize("number", range(6))
def test_work_list(number: int) -> None:
    """The kernel's list is the reference's, and no program has two blocks more than another."""
    x, plan, lengths, starts = list(draws())[number]
    wanted = work_lists.work_list(x, plan, lengths, starts)
    items = np.zeros_like(wanted)
    interpret.run(work_list(x, plan), [lengths, starts, items])
    np.testing.assert_array_equal(items, wanted)
    sizes, covered = [], 0
    many = plan.ranges(x)
    for p in range(many):
        start, stop = int(items[p, START]), int(items[p, STOP])
        rows = [p, *[many + g - p - 1 for g in range(start + 1, stop + 1)]]
        sizes.append(int(items[rows[: stop - start + 1], BLOCKS].sum()))
        covered += stop - start + 1
        assert all(
            items[r, PARTIAL] in (-1, start + i) for i, r in enumerate(rows[: stop - start + 1])
        )
    busy = [s for s in sizes if s]
    assert max(busy) - min(busy) <= 1
    there = items[items[:, BLOCKS] > 0]
    assert covered == len(there)
    leads = items[:many][items[:many, START] <= items[:many, STOP]]
    seconds = leads[leads[:, PARTIAL] == leads[:, FIELDS.index("from")] + 1]
    assert int(seconds[:, FIELDS.index("parts")].sum()) == int((there[:, PARTIAL] >= 0).sum())


@pytest.mark.parametrize("joined", (True, False))
def test_symbols(joined: bool) -> None:
    """Tokens, requests and pages may be Symbols: one set of kernels serves any batch within the
    bounds, interpreted and simulated."""
    bounds = {"tokens": 64, "requests": 64, "pages": 512}
    names = {name: symbol(name, 1, most) for name, most in bounds.items()}
    plan = PagedPlan(8, 64, 2, 4, 6, joined=joined)
    x = PagedShape(8, 2, 64, 64, 16, most_pages=14, scale=0.125, **names)
    for body, level in zip(kernels(x, plan), ("portable", "placed", "portable")):
        verify_body(body, level, H200)
        assert not [f for f in check_body(body, H200) if f.severity == "error"]
    real = CASES["page 16"][0]
    step = make_step(real, LENGTHS, ONES)
    values = {name: getattr(real, name) for name in names}
    for run in (
        lambda b, m: interpret.run(b, m, values),
        lambda b, m: simulate(*emit(b, "kernel", H200), m, values),
    ):
        out, items = run_step(step, plan, run, kernels(x, plan))
        same_list(step, plan, items)
        agree(step, out)


# ---- called by a Graph ---------------------------------------------------------------------------


@pytest.mark.parametrize("label", ("page 16", "combined by another launch", "sinks, 8 bits"))
def test_callees(label: str) -> None:
    """The list and the attention as a Graph calls them, read back from their text too; each Body
    is what the scheduler takes for a GPU."""
    x, plan, lengths, queries = CASES[label]
    step = make_step(x, lengths, queries)
    for again in (False, True):
        makers = [called(work_list, x, plan), called(listed, x, plan)]
        if again:
            makers = [parse_callee(c.to_text()) for c in makers]
        (items,) = makers[0].interpret(step.lengths, step.starts)
        counters = [np.zeros((len(items), x.key_heads), np.int32)] if plan.joined else []
        given = (step.q, step.keys, step.values, *step.scales, step.table, *step.sinks)
        given = (*given, items, *counters)
        assert [t.shape for t in makers[1].types("read")] == [g.shape for g in given]
        agree(step, makers[1].interpret(*given)[0])
    for callee in makers:
        for body, _ in callee.launches:
            fitted(body, H200)


# ---- appending ----------------------------------------------------------------------------------

APPENDED = {
    "halves": (8, 2, Rotary(64), {}),
    "interleaved": (8, 2, Rotary(64, interleaved=True), {}),
    "some of a head": (6, 2, Rotary(32, factor=1.25), {"width": 96}),
    "no rotation": (2, 2, Rotary(0), {}),
    "8 bits": (4, 2, Rotary(64), {"cache": float8_e4m3}),
    "int8": (4, 2, Rotary(64), {"cache": int8}),
    "norms": (8, 2, Rotary(64), {}),
}


def normed(x: Any, weight: Any, epsilon: float) -> Any:
    """Heads by their norm, in x's dtype."""
    wide = x.astype(np.float64)
    root = np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon)
    return (wide / root * weight).astype(x.dtype)


@pytest.mark.sampled(2, also=("norms",))
@pytest.mark.parametrize("simulated", (False, True))
@pytest.mark.parametrize("each", (1, 2))
@pytest.mark.parametrize("label", APPENDED)
def test_append(label: str, each: int, simulated: bool) -> None:
    """New tokens are turned and land in their pages; the rest of the cache stays as it is."""
    heads, key_heads, rotary, more = APPENDED[label]
    each = min(each, key_heads)
    lengths, queries = (0, 1, 130, 64, 200), (0, 1, 5, 2, 20)
    x = shape(heads, key_heads, 16, lengths, (*queries, 3), **more)
    x = replace(x, requests=5)  # the last tokens belong to nobody
    step = make_step(x, lengths, queries)
    draw = np.random.default_rng(3)
    k, v = (
        draw.standard_normal((x.tokens, key_heads, w)).astype(x.dtype.numpy)
        for w in (x.width, x.value_width)
    )
    frequencies = (10000.0 ** (-np.arange(max(1, rotary.width // 2)) / 32)).astype(np.float32)
    turned = np.full(step.q.shape, 7.0).astype(x.dtype.numpy)
    wide = [m.astype(np.float64) for m in (step.keys, step.values)]
    scales = scales_of(x)
    norms = HeadNorms((1e-6, 0.5), float32) if label == "norms" else None
    weights = [draw.standard_normal(x.width).astype(np.float32) for _ in "qk" if norms]
    given = (step.q, k) if norms is None else map(normed, (step.q, k), weights, norms.epsilons)
    wanted = paged_reference.append(
        rotary, *given, v, frequencies, step.table, step.lengths, step.starts, *wide, scales
    )
    body = append(x, replace(rotary, norms=norms), each)
    verify_body(body, "portable", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    memories = [
        step.q,
        k,
        v,
        frequencies,
        *weights,
        *step.scales,
        step.table,
        step.lengths,
        step.starts,
        step.keys,
        step.values,
        turned,
    ]
    if simulated:
        simulate(*emit(body, "append", H200), memories)
    else:
        interpret.run(body, memories)
    count, rounding = int(step.starts[-1]), 2.0**-8
    np.testing.assert_allclose(
        turned[:count].astype(np.float64), wanted[:count], rtol=rounding, atol=rounding / 16
    )
    assert (turned[count:] == 0).all()
    for found, right in zip((step.keys, step.values), wide):
        agree_stored(x, found, right, rounding)


# ---- Plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, why",
    [
        (replace(SMALL, rows=12), "multiple of 8"),
        (replace(SMALL, stages=1), "two stages"),
        (replace(SMALL, warps=8), "share a block"),
        (PagedPlan(8, 192, 2, 4), "a power of two"),
    ],
)
def test_plans_that_cannot_be_kept(plan: PagedPlan, why: str) -> None:
    """Each is refused with its reason."""
    x = CASES["page 16"][0]
    assert why in why_not(x, plan)
    with pytest.raises(InternalError, match=why):
        attend(x, plan)


@pytest.mark.parametrize(
    "requests, queries, joined",
    ((1, 1, True), (15, 1, True), (1, 2, False), (7, 2, False), (16, 1, True), (128, 1, True)),
)
def test_pairs_that_are_all_cut(requests: int, queries: int, joined: bool) -> None:
    """Another launch combines them; else, and where each has one token, who has the last part."""
    x = PagedShape(32, 8, 128, 128, 16, requests, requests, 4096, 2048, 128**-0.5)
    plan = choose(x, H200, queries)
    assert plan.ranges(x) == 16 and plan.joined is joined


def real_shapes(target: Target) -> Iterator[tuple[PagedShape, int]]:
    """Heads of models, pages, and how many new tokens a request has."""
    base = PagedShape(32, 8, 128, 128, 16, 16, 16, 4096, 2048, 128**-0.5)
    wide = {"width": 64, "value_width": 64}
    yield replace(base, heads=64, window=128, sinks=True, **wide), 1
    for page in (16, 64, 256):
        yield replace(base, page=page), 1
    yield replace(base, cache=float8_e4m3), 1
    yield replace(base, cache=int8), 4
    yield replace(base, heads=64), 1
    yield replace(base, heads=8), 1
    yield replace(base, width=64, value_width=64), 1
    yield replace(base, width=256, value_width=256, softcap=50.0, window=4096), 1
    yield replace(base, width=192), 1
    yield replace(base, width=96, value_width=96), 1
    yield base, 4
    yield base, 64
    yield replace(base, tokens=1, requests=1), 1
    yield replace(base, tokens=1024, requests=1024), 1
    yield replace(base, tokens=8192, requests=256), 64
    if not target.asynchronous_units:  # others have the prefill kernel
        yield replace(base, tokens=2048, requests=8), 2048
        yield replace(base, width=256, value_width=256, tokens=2048, requests=8), 2048


# An A100 with the shared memory of smaller GPUs of its kind.
SMALL_A100 = replace(
    A100,
    name="small_a100",
    memories={**A100.memories, "shared": replace(A100.memories["shared"], bytes=99 << 10)},
)


def expected_refusal(x: PagedShape, target: Target) -> str:
    """Why threads cannot take a real shape; '' if they can."""
    if target is H200:
        return ""
    if x.scaled:
        return "8 bits"
    if x.width == 192:
        return "a power of two"
    return "fit shared memory" if target is SMALL_A100 and x.width == 256 else ""


MACHINES = (H200, A100, SMALL_A100)


@pytest.mark.parametrize("target", MACHINES, ids=lambda t: t.name)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), 5])
def test_assembled(step: int, target: Target) -> None:
    """What is chosen for real sizes: checked, no spill, no stack frame, no serialised product.
    Where not all are, each machine has others."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the kernels of a paged cache were not assembled")
    texts = {}
    first = MACHINES.index(target) % step
    for x, queries in list(real_shapes(target))[first::step]:
        plan = choose(x, target, queries)
        if why := expected_refusal(x, target):
            assert why in why_not(x, plan)
            continue
        assert not why_not(x, plan)
        bodies = [*kernels(x, plan), append(replace(x, sinks=False), Rotary(x.width))]
        for body in bodies:
            errors = [f for f in check_body(body, target) if f.severity == "error"]
            assert not errors, (x, plan, errors)
            text, entry = emit(body, "kernel", target)
            assert entry.shared_bytes <= target.memories["shared"].bytes
            if text not in texts.values():
                texts[f"{body.name} {x} {plan}"] = text
    for label, made in assemble_all(texts, target.cpu).items():
        made.check_library(label)


@pytest.mark.parametrize("target", [A100, SMALL_A100], ids=lambda t: t.name)
@pytest.mark.parametrize("width", (64, 128, 256))
@pytest.mark.parametrize("queries", (1, 4, 2048))
def test_shared_memory_of_threads(queries: int, width: int, target: Target) -> None:
    """A Plan fits, and has two stages; or it is refused and the portable kernel takes the shape."""
    x = PagedShape(32, 8, width, width, 16, 2048, 8, 4096, 128, width**-0.5)
    plan = choose(x, target, queries)
    if target is SMALL_A100 and width == 256:
        assert "fit shared memory" in why_not(x, plan)
        return
    assert not why_not(x, plan) and plan.stages >= 2
    _, entry = emit(attend(x, plan), "kernel", target)
    assert entry.shared_bytes <= target.memories["shared"].bytes


# ---- broken in one place ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "label, meetings", [("page 16", 3), pytest.param("8 bits", 3, marks=pytest.mark.slow)]
)
def test_mutants(label: str, meetings: int) -> None:
    """Every barrier, fence and wait is needed: the check sees each one missing or changed, but
    that the one barrier of the one role that has one may have any number."""
    x, plan, _, _ = CASES[label]
    alive = [
        name
        for name, body in mutants.mutants(attend(x, plan))
        if not any(f.severity == "error" for f in check_body(body, H200))
    ]
    assert alive == [f"named_sync {i} number + 1" for i in range(meetings)]
