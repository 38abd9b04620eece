"""kernels/paged/prefill.py against NumPy: interpreted, checked, simulated, assembled.

Pages that belong to nobody hold nan; keys past a request's end hold nan too, values zeros, as
`paged_append` leaves them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from assembled import assemble_all
from simulator import simulate
from test_paged_attention import ROUNDING, Step, make_step, shape
from work_lists import tile_list, work_list

from tilegrad.compiler.pipeline import fitted
from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float8_e5m2, float16, int8
from tilegrad.core.target import H200
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.paged.call import called, mixed
from tilegrad.kernels.paged.prefill import FEW_NEW_TOKENS, choose, prefill, why_not
from tilegrad.kernels.paged.prefill import tile_list as tiles_body
from tilegrad.kernels.paged.shape import FIELDS, PagedShape
from tilegrad.kernels.paged.shape import choose as choose_list
from tilegrad.kernels.paged.shape import why_not as list_why_not
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.callee import parse_callee
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import check_body

LENGTHS, QUERIES = (0, 1, 130, 64, 300), (0, 1, 130, 3, 140)
CASES: dict[str, tuple[PagedShape, Sequence[int], Sequence[int]]] = {}


def case(
    label: str,
    heads: int,
    key_heads: int,
    page: int,
    lengths: Sequence[int] = LENGTHS,
    queries: Sequence[int] = QUERIES,
    nobody: int = 0,
    **more: Any,
) -> None:
    """Add a case; the last tokens belong to `nobody`."""
    x = shape(heads, key_heads, page, lengths, (*queries, nobody), **more)
    CASES[label] = (replace(x, requests=len(lengths)), lengths, queries)


case("page 16", 2, 1, 16)
case("page 64", 2, 2, 64)
case("page 256", 2, 1, 256)
case("page 8", 1, 1, 8)
case("tokens of no request", 2, 1, 16, nobody=140)
case("tokens of no request, sinks", 2, 1, 16, (100,), (90,), nobody=12, window=40, sinks=True)
case("whole prompts", 2, 1, 32, (150, 128, 20), (150, 128, 20))
case("one long chunk", 1, 1, 16, (700,), (129,))
case("wide", 2, 1, 16, (200, 90), (150, 90), width=128, value_width=128)
case("widest", 1, 1, 16, (150,), (100,), width=256, value_width=256)
case("e4m3, widest", 1, 1, 64, (150,), (100,), width=256, value_width=256, cache=float8_e4m3)
case("narrow", 2, 1, 16, (100, 70), (90, 70), width=40, value_width=32)
case("window", 2, 1, 16, window=70)
case("short window", 2, 1, 32, window=7)
case("softcap", 2, 1, 16, (100, 70), (90, 70), softcap=3.0)
case("sinks", 2, 1, 16, window=70, sinks=True)
case("sinks, softcap", 5, 1, 16, (100, 30), (90, 30), sinks=True, softcap=3.0)
case("float16", 2, 1, 16, (100, 70), (90, 70), dtype=float16, cache=float16)
CHUNK, WIDE = ((200, 90), (150, 90)), {"width": 128, "value_width": 128}
case("e4m3", 2, 1, 16, cache=float8_e4m3)
case("e4m3, page 256", 4, 2, 256, *CHUNK, cache=float8_e4m3)
case("e4m3, wide", 4, 2, 16, *CHUNK, cache=float8_e4m3, **WIDE)
case(
    "e4m3, narrow values",
    2,
    1,
    16,
    (100, 70),
    (90, 70),
    width=48,
    value_width=32,
    cache=float8_e4m3,
)
case("e4m3, nobody", 2, 1, 16, nobody=140, cache=float8_e4m3)
case("e4m3, float16, softcap", 2, 1, 32, *CHUNK, dtype=float16, cache=float8_e4m3, softcap=3.0)
case("e5m2", 2, 1, 64, *CHUNK, cache=float8_e5m2)
case("int8", 4, 2, 16, *CHUNK, cache=int8)
case("int8, width 96", 2, 1, 16, *CHUNK, width=96, value_width=96, cache=int8)
case("int8, window, sinks", 2, 1, 16, window=70, sinks=True, cache=int8, **WIDE)
case("int8, one long chunk", 1, 1, 8, (700,), (129,), cache=int8, **WIDE)


def cleaned(step: Step) -> Step:
    """Zeros for values past the end of a request within its last page."""
    for request, length in enumerate(step.lengths.tolist()):
        rest = length % step.x.page
        if rest:
            step.values[step.table[request, length // step.x.page], :, rest:] = 0
    return step


def run(step: Step, x: PagedShape, launch: Any) -> Any:
    """The result of one kernel; launch(body, memories) runs it."""
    plan = choose(x, H200)
    assert plan is not None
    out = np.full((step.x.tokens, x.heads, x.value_width), 7.0).astype(x.dtype.numpy)
    lse = np.zeros((1, x.heads, step.x.tokens), np.float32)
    given = [step.q, step.keys, step.values, *step.scales, step.table, *step.sinks]
    given.append(tiles_of(step, x, plan))
    launch(prefill(x, replace(plan, programs=3)), [*given, out, lse])
    return out


def tiles_of(step: Step, x: PagedShape, plan: Any, least: int = 1) -> Any:
    """The list of a step, as many rows as its sizes ask for."""
    found = tile_list(step.x, plan.tile, step.lengths, step.starts, least)
    most = step.x.tokens // plan.tile[0] + len(step.lengths) + 1
    return np.concatenate([found[:-1], np.zeros((most - len(found) + 1, 8), np.int32), found[-1:]])


def agree(step: Step, out: Any) -> None:
    """Up to the rounding of the weights and of the result."""
    near = 2 * ROUNDING[step.x.dtype]
    np.testing.assert_allclose(out.astype(np.float64), step.wanted(), rtol=near, atol=near)
    assert (out[step.starts[-1] :] == 0).all()  # tokens of no request


@pytest.mark.sampled(2, also=("sinks", "int8"))
@pytest.mark.parametrize("label", CASES)
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    x, lengths, queries = CASES[label]
    assert not why_not(x, H200)
    body = prefill(x, choose(x, H200))
    verify_body(body, "placed", H200)
    assert not [f for f in check_body(body, H200) if f.rule != "bank_conflict"]
    step = cleaned(make_step(x, lengths, queries))
    agree(step, run(step, x, lambda b, m: interpret.run(b, m, seed=len(label))))


SIMULATED = ("page 16", "page 256", "wide", "window", "sinks")
SIMULATED += ("e4m3, wide", "e5m2", "int8", "int8, window, sinks")


@pytest.mark.sampled(5, also=("sinks", "e4m3, wide", "int8"))
@pytest.mark.parametrize("label", (*SIMULATED, "int8, width 96"))
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator, which checks races and fences of its own."""
    x, lengths, queries = CASES[label]
    if lengths is LENGTHS:  # fewer tiles of the same kinds: `test_interpreted` has them all
        lengths, queries = (0, 1, 130, 64, 200), (0, 1, 130, 3, 20)
        x = replace(x, tokens=sum(queries))
    step = cleaned(make_step(x, lengths, queries))
    agree(
        step,
        run(step, x, lambda b, m: simulate(*emit(b, "kernel", H200), m, policy="random", seed=1)),
    )


@pytest.mark.parametrize("cache", (bfloat16, int8), ids=str)
def test_symbols(cache: DType) -> None:
    """Tokens, requests and pages may be Symbols; rows and tokens that only pad do no harm."""
    names = {n: symbol(n, 1, most) for n, most in (("tokens", 512), ("requests", 8), ("pages", 64))}
    lengths, queries = (90, 0, 70, 0), (80, 0, 70, 0)
    real = shape(2, 1, 16, lengths, queries, cache=cache)
    x = replace(real, **names)
    step = cleaned(make_step(real, lengths, queries))
    step.q = np.concatenate([step.q, np.full_like(step.q[:10], np.nan)])
    step.x = replace(real, tokens=len(step.q))
    values = {"tokens": len(step.q), "requests": 4, "pages": real.pages}
    for launch in (
        lambda b, m: interpret.run(b, m, values),
        lambda b, m: simulate(*emit(b, "kernel", H200), m, values),
    ):
        agree(step, run(step, x, launch))


LISTED = {
    "equal": ([1024] * 3, [1024] * 3, {}),
    "many": ([7, 0, 900, 2000, 3, 513, 128] * 9, [7, 0, 900, 130, 3, 513, 128] * 9, {}),
    "window": ([900, 2000, 300], [900, 700, 300], {"window": 256}),
    "nobody": ([5, 3], [5, 3], {}),
}


@pytest.mark.parametrize("simulated", (False, True))
@pytest.mark.parametrize("label", LISTED)
def test_the_list(label: str, simulated: bool) -> None:
    """Every tile of every request with enough new tokens, those with the most keys first."""
    lengths, queries, more = LISTED[label]
    x = shape(2, 1, 16, lengths, queries, **more)
    plan = choose(x, H200)
    assert plan is not None
    body = tiles_body(x, plan, FEW_NEW_TOKENS)
    verify_body(body, "portable", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    sizes = np.array(lengths, np.int32)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    wanted = tile_list(x, plan.tile, sizes, starts, FEW_NEW_TOKENS)
    found = np.full_like(wanted, -7)
    if simulated:
        simulate(*emit(body, "tiles", H200), [sizes, starts, found])
    else:
        interpret.run(body, [sizes, starts, found])
    count = wanted[-1, 0]
    assert found[-1, 0] == count
    assert (found[:count, :5] == wanted[:count, :5]).all()


def test_programs_share_the_keys() -> None:
    """Eight prompts of 1,024 tokens: no program has many more blocks than others."""
    lengths, starts = np.full(8, 1024), np.arange(9) * 1024
    x = shape(32, 8, 16, [1024] * 8, [1024] * 8, width=128, value_width=128)
    tiles = tile_list(x, (128, 128), lengths, starts)
    blocks = np.repeat(tiles[: tiles[-1, 0], 4] // 128 + 1, 32)
    programs = 132
    each = np.zeros(programs, int)
    for number, count in enumerate(blocks):
        turn, place = divmod(number, programs)
        each[programs - 1 - place if turn % 2 else place] += count
    assert each.max() <= 1.04 * each.mean()


MIXED = {
    "a prompt beside answers": ((300, 1, 90, 200), (130, 1, 1, FEW_NEW_TOKENS - 1)),
    "prompts alone": ((150, 128, 20), (150, 128, FEW_NEW_TOKENS)),
    "answers alone": ((150, 0, 33), (1, 0, 2)),
    "few of nobody": ((150, 3), (140, 1), 5),
    "many of nobody": ((150, 3), (140, 1), 140),
}
CACHES = {f"{label}, {cache}": (label, cache) for label in MIXED for cache in (bfloat16, int8)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", CACHES)
def test_called_by_a_graph(label: str) -> None:
    """As a Graph calls it, read back from its text too: requests with few tokens take the list, the
    others this kernel, and every token has one result."""
    lengths, queries, *nobody = MIXED[CACHES[label][0]]
    x = shape(4, 2, 32, lengths, (*queries, *nobody), cache=CACHES[label][1], **WIDE)
    x = replace(x, requests=len(lengths))
    step = cleaned(make_step(x, lengths, queries))
    few = replace(choose_list(x, H200, below=FEW_NEW_TOKENS), programs=4)
    items = work_list(x, few, step.lengths, step.starts)
    counters = [np.zeros((len(items), x.key_heads), np.int32)] if few.joined else []
    given = (step.q, step.keys, step.values, *step.scales, step.table, items, *counters)
    many = choose(x, H200)
    assert many is not None
    given = (*given, tiles_of(step, x, many, FEW_NEW_TOKENS))
    callee = called(mixed, x, few, replace(many, programs=3))
    assert [t.shape for t in callee.types("read")] == [g.shape for g in given]
    agree(step, parse_callee(callee.to_text()).interpret(*given)[0])
    for body, _ in callee.launches:
        verify_body(fitted(body, H200), "placed", H200)
    request, blocks = map(FIELDS.index, ("request", "blocks"))
    listed = {int(item[request]) for item in items if item[blocks]}
    assert listed == {r for r, n in enumerate((*queries, *nobody)) if 0 < n < FEW_NEW_TOKENS}


@pytest.mark.parametrize(
    ("tokens", "requests", "page", "pages"),
    [(40, 1, 16, 10), (64, 1, 64, 4), (100, 2, 64, 4), (64, 1, 64, 2), (200, 1, 64, 3)],
)
def test_small_sizes_are_proved(tokens: int, requests: int, page: int, pages: int) -> None:
    """Fewer tokens than a tile and no more blocks of keys than stages: lengths from memory,
    whatever they are, keep within what the arithmetic of stages was simplified for."""
    for cache in (bfloat16, float8_e4m3):
        x = PagedShape(8, 2, 128, 128, page, tokens, requests, 64, pages, 0.1, cache=cache)
        plan = choose(x, H200)
        assert plan is not None
        assert not [f for f in check_body(prefill(x, plan), H200) if f.severity == "error"]


def test_what_is_refused() -> None:
    """Odd pages go to the other kernel."""
    x = CASES["page 16"][0]
    assert "power of two" in list_why_not(replace(x, page=24), choose_list(x, H200))


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas")
def test_assembled() -> None:
    """No spills and no serialised products at the sizes of models."""
    texts = {}
    sizes = ((64, 64, 128), (128, 16, 0), (128, 64, 1024))
    kept = [*itertools.product(sizes, (bfloat16, float8_e4m3)), ((128, 16, 0), int8)]
    kept += [((256, 64, 0), cache) for cache in (bfloat16, float8_e4m3, int8)]
    for (width, page, window), cache in kept:
        x = PagedShape(
            32,
            8,
            width,
            width,
            page,
            symbol("tokens", 1, 8192),
            symbol("requests", 1, 64),
            4096,
            512,
            width**-0.5,
            bfloat16,
            cache,
            window,
            sinks=width == 64,
        )
        name = f"width {width}, pages of {page}, window {window}, {cache}"
        texts[name] = emit(prefill(x, choose(x, H200)), "prefill", H200)[0]
    for name, made in assemble_all(texts).items():
        made.check_library(name)
