"""kernels/paged/short.py against NumPy: interpreted, checked, simulated, assembled, broken.

The cache holds nan wherever no earlier key of a request lies, the new token's own place included,
and the table far pages past each request's end, so that nothing is right by luck.
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
from assembled import assemble_all
from cache_numbers import agree_stored, scales_of, sinks_of, stored
from simulator import simulate

from ptxsim import SimulationError
from tilegrad.compiler.pipeline import fitted
from tilegrad.core.dtype import float8_e4m3, float16, float32, int8
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.graph import paged_reference as reference
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.paged.append import HeadNorms, Rotary
from tilegrad.kernels.paged.call import called
from tilegrad.kernels.paged.shape import (
    PagedPlan,
    PagedShape,
    choose_short,
    short_keys,
    why_not,
)
from tilegrad.kernels.paged.short import step_attend
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.callee import parse_callee
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import check_body


@dataclass
class Step:
    """A step's inputs, and what must come of it."""

    x: PagedShape
    rotary: Rotary
    given: list[Any]  # as the kernel takes them
    out: Any  # float64
    keys: Any
    values: Any
    tokens: int  # that belong to requests

    def agree(self) -> None:
        """The result, the cache, and zeros for tokens of no request."""
        *_, keys, values, out = self.given
        rounding = 2.0**-10 if self.x.dtype is float16 else 2.0**-8
        np.testing.assert_allclose(
            out[: self.tokens].astype(np.float64),
            self.out[: self.tokens],
            rtol=2 * rounding,
            atol=2 * rounding,
        )
        assert (out[self.tokens :] == 0).all()
        for found, right in ((keys, self.keys), (values, self.values)):
            agree_stored(self.x, found, right, rounding)


def normed(heads: Any, weight: Any, epsilon: float, dtype: Any) -> Any:
    """Heads by their norm, as a kernel of its own would store them."""
    wide = heads.astype(np.float64)
    root = np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon)
    return (wide / root * weight.astype(np.float64)).astype(dtype)


def make_step(
    x: PagedShape,
    rotary: Rotary,
    lengths: Sequence[int],
    queries: Sequence[int],
    norms: HeadNorms | None = None,
    seed: int = 0,
) -> Step:
    """Random numbers; nan where no earlier key lies, far pages past each request's end."""
    draw = np.random.default_rng(seed)
    q, k, v = (
        draw.standard_normal((x.tokens, heads, width)).astype(x.dtype.numpy)
        for heads, width in (
            (x.heads, x.width),
            (x.key_heads, x.width),
            (x.key_heads, x.value_width),
        )
    )
    lead = (x.pages, x.key_heads, x.page)
    cache = [draw.standard_normal((*lead, w)).astype(np.float32) for w in (x.width, x.value_width)]
    table = np.full((x.requests, x.most_pages), 10**6, np.int32)
    order, at = draw.permutation(x.pages), 0
    used = np.zeros((x.pages, x.page), np.bool_)
    for request, (length, new) in enumerate(zip(lengths, queries)):
        count = -(-length // x.page)
        table[request, :count] = order[at : at + count]
        for j in range(length - new):
            used[order[at + j // x.page], j % x.page] = True
        at += count
    for part in cache:
        part.swapaxes(1, 2)[~used] = np.nan
    keys, values = (stored(x, part) for part in cache)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    frequencies = (10000.0 ** (-np.arange(max(1, rotary.width // 2)) / 32)).astype(np.float32)
    scales = scales_of(x)
    sinks = sinks_of(x)
    wide = [part.astype(np.float64) for part in (keys, values)]
    sizes = np.array(lengths, np.int32)
    weights = [draw.uniform(0.5, 1.5, x.width).astype(np.float32) for _ in range(2)]
    weights = [w.astype(norms.dtype.numpy) for w in weights] if norms else []
    plain = [q, k]
    if norms:
        q, k = (normed(*g, x.dtype.numpy) for g in zip(plain, weights, norms.epsilons))
    turned = reference.append(rotary, q, k, v, frequencies, table, sizes, starts, *wide, scales)
    out = reference.attention(
        x,
        turned.astype(x.dtype.numpy),
        *(reference.kept(part, x.cache.numpy) for part in wide),
        table,
        sizes,
        starts,
        scales,
        *sinks,
    )
    more = [*weights, scales] if x.scaled else weights
    result = np.full((x.tokens, x.heads, x.value_width), 7.0).astype(x.dtype.numpy)
    given = [*plain, v, frequencies, *more, table, sizes, starts, *sinks, keys, values, result]
    return Step(x, rotary, given, out, *wide, int(starts[-1]))


def shape(
    heads: int,
    key_heads: int,
    page: int,
    lengths: Sequence[int],
    width: int = 64,
    value_width: int = 64,
    **more: Any,
) -> PagedShape:
    """A shape that fits a step; as many tokens as requests."""
    pages = sum(-(-n // page) for n in lengths) + 2
    most = max(-(-n // page) for n in lengths) + 1
    return PagedShape(
        heads,
        key_heads,
        width,
        value_width,
        page,
        len(lengths),
        len(lengths),
        pages,
        most,
        width**-0.5,
        **more,
    )


ALL = (1, 2, 64, 65, 66, 130, 200, 340)  # places at the edges of pages and blocks, and within
SOME = (1, 130, 65)
SMALL = PagedPlan(8, 64, 2, 4, cluster=2)
CASES: dict[str, tuple[PagedShape, PagedPlan, Rotary, Sequence[int], Sequence[int]]] = {}


def case(
    label: str,
    heads: int,
    key_heads: int,
    page: int,
    plan: PagedPlan = SMALL,
    lengths: Sequence[int] = SOME,
    queries: Sequence[int] = (),
    rotary: Rotary | None = None,
    **more: Any,
) -> None:
    """Add a case."""
    x = shape(heads, key_heads, page, lengths, **more)
    queries = queries or (1,) * len(lengths)
    CASES[label] = (x, plan, rotary or Rotary(x.width), lengths, queries)


case("page 16", 8, 2, 16, lengths=ALL)
case("page 32", 4, 1, 32, lengths=ALL)
case("page 64", 4, 1, 64, lengths=ALL)
case("page 128", 4, 1, 128, lengths=(1, 64, 65, 128, 129, 300))
case("page 8", 2, 1, 8)
case(
    "requests without a token",
    8,
    2,
    16,
    lengths=(40, 130, 0, 70, 20, 0),
    queries=(1, 0, 0, 1, 0, 0),
)
case("no keys at all", 4, 1, 16, lengths=(0, 0), queries=(0, 0))
case("long, few stages", 4, 1, 16, lengths=(1500, 700))
case("long, clusters of 4", 4, 1, 32, replace(SMALL, cluster=4, stages=3), lengths=(1100, 1025))
case("clusters of 8", 8, 2, 16, replace(SMALL, cluster=8), lengths=(1, 600, 512, 513))
case(
    "8 warps",
    4,
    1,
    32,
    PagedPlan(8, 128, 2, 8, cluster=8),
    lengths=(300, 1100, 1025),
    width=128,
    value_width=128,
)
case(
    "8 warps, clusters of 2",
    8,
    2,
    64,
    PagedPlan(8, 128, 2, 8, cluster=2),
    lengths=(300, 129),
    width=128,
    value_width=128,
)
case("group 1", 2, 2, 16)
case("group 3", 6, 2, 16)
case("group 8", 8, 1, 16)
case("group 12, 16 rows", 12, 1, 32, replace(SMALL, rows=16))
case("interleaved", 4, 1, 16, rotary=Rotary(64, interleaved=True))
case("some of a head", 6, 2, 16, width=96, rotary=Rotary(32, factor=1.25))
case("some of a head, interleaved", 6, 2, 16, rotary=Rotary(32, interleaved=True, factor=0.75))
case("no rotation", 4, 2, 16, rotary=Rotary(0))
case("narrow", 4, 1, 16, width=32, value_width=40)
case("values wider", 4, 1, 16, width=64, value_width=128)
case("keys wider", 2, 1, 16, width=192, value_width=64)
case("float16", 4, 1, 16, dtype=float16, cache=float16)
case("window", 4, 1, 16, lengths=(1, 130, 70, 200, 71), window=70)
case("window within a block", 4, 1, 32, lengths=(1, 7, 8, 130, 65), window=7)
case("window of one", 4, 1, 32, window=1)
case("softcap", 4, 1, 16, softcap=3.0)
case("sinks", 8, 2, 16, lengths=(1, 130, 70, 0), queries=(1, 1, 1, 0), sinks=True)
case("sinks, a window, 8 bits", 6, 2, 16, sinks=True, window=70, softcap=3.0, cache=float8_e4m3)
case("8 bits", 4, 1, 16, lengths=ALL, cache=float8_e4m3)
case("int8, two heads", 8, 2, 16, lengths=ALL, cache=int8)
case("8 bits, long", 4, 1, 16, lengths=(1500,), cache=float8_e4m3)
case(
    "8 bits, wide",
    4,
    1,
    64,
    PagedPlan(8, 128, 2, 8, cluster=2),
    width=128,
    value_width=128,
    cache=float8_e4m3,
)


case("norms", 8, 2, 16, lengths=ALL)
case("norms, 8 bits", 8, 2, 16, cache=float8_e4m3)
NORMS = {"norms": HeadNorms((1e-6, 0.5), float32), "norms, 8 bits": HeadNorms((0.1, 1e-5), float16)}


def body_of(label: str) -> Body:
    """The kernel of a case."""
    x, plan, rotary, _, _ = CASES[label]
    return step_attend(x, plan, replace(rotary, norms=NORMS.get(label)))


def step_of(label: str) -> Step:
    """The inputs of a case."""
    x, _, rotary, lengths, queries = CASES[label]
    return make_step(x, rotary, lengths, queries, NORMS.get(label))


@pytest.mark.sampled(4, also=("sinks", "sinks, a window, 8 bits"))
@pytest.mark.parametrize("label", CASES)
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    body = body_of(label)
    verify_body(body, "placed", H200)
    found = [f for f in check_body(body, H200) if f.rule != "bank_conflict"]
    assert not found, found
    step = step_of(label)
    interpret.run(body, step.given, seed=list(CASES).index(label))
    step.agree()


SIMULATED = (
    "page 32",
    "page 64",
    "requests without a token",
    pytest.param("clusters of 8", marks=pytest.mark.slow),
    "8 warps, clusters of 2",
    "some of a head",
    "interleaved",
    "8 bits",
    "int8, two heads",
    "window",
    "norms",
    "sinks",
)


@pytest.mark.sampled(3, also=("sinks",))
@pytest.mark.parametrize("label", SIMULATED)
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator, which checks races and fences of its own."""
    step = step_of(label)
    simulate(*emit(body_of(label), "kernel", H200), step.given, policy="random", seed=1)
    step.agree()


def test_large_logits() -> None:
    """Scores of hundreds: the largest key wins, nothing overflows."""
    x, plan, rotary, lengths, queries = CASES["page 32"]
    x = replace(x, scale=x.scale * 200)
    step = make_step(x, rotary, lengths, queries)
    interpret.run(step_attend(x, plan, rotary), step.given)
    step.agree()


def test_symbols() -> None:
    """Requests and pages may be Symbols."""
    bounds = {"requests": 16, "pages": 512}
    names = {name: symbol(name, 1, most) for name, most in bounds.items()}
    _, plan, rotary, lengths, queries = CASES["page 16"]
    real = CASES["page 16"][0]
    x = replace(real, tokens=names["requests"], most_pages=40, **names)
    body = step_attend(x, plan, rotary)
    verify_body(body, "placed", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    values = {name: getattr(real, name) for name in names}
    for run in (
        lambda b, m: interpret.run(b, m, values),
        lambda b, m: simulate(*emit(b, "kernel", H200), m, values),
    ):
        step = make_step(replace(real, most_pages=40), rotary, lengths, queries)
        run(body, step.given)
        step.agree()


@pytest.mark.parametrize("label", ("page 32", "8 bits"))
def test_callee(label: str) -> None:
    """As a Graph calls it, read back from its text too; the Body is what the scheduler takes."""
    x, plan, rotary, _, _ = CASES[label]
    for again in (False, True):
        callee = called(step_attend, x, plan, rotary)
        if again:
            callee = parse_callee(callee.to_text())
        step = step_of(label)
        out, keys, values = callee.interpret(*step.given[:-1])
        step.given[-3:] = [keys, values, out]
        step.agree()
    for body, _ in callee.launches:
        fitted(body, H200)


# ---- Plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, why",
    [
        (replace(SMALL, cluster=3), "a power of two"),
        (replace(SMALL, cluster=16), "share the values' width"),
        (replace(SMALL, stages=1), "two stages"),
        (replace(SMALL, warps=8), "share a block"),
    ],
)
def test_plans_that_cannot_be_kept(plan: PagedPlan, why: str) -> None:
    """Each is refused with its reason."""
    x = CASES["page 16"][0]
    assert why in why_not(x, plan)
    with pytest.raises(InternalError, match=why):
        step_attend(x, plan, Rotary(64))


BASE = PagedShape(32, 8, 128, 128, 32, 1, 1, 4096, 256, 128**-0.5)


def test_choice() -> None:
    """For few requests with as many tokens, and for no more than a GPU has room for."""
    assert choose_short(BASE, H200) is not None
    assert choose_short(replace(BASE, tokens=64, requests=64), H200) is None
    assert choose_short(replace(BASE, tokens=7), H200) is None
    found = [
        choose_short(replace(BASE, tokens=n, requests=n, most_pages=4096 // 32), H200)
        for n in (1, 2, 4, 8, 16)
    ]
    assert [plan and plan.cluster for plan in found] == [8, 4, 2, 2, None]
    for requests, keys, there in ((1, 8192, True), (1, 16384, False), (2, 8192, False)):
        x = replace(BASE, tokens=requests, requests=requests, most_pages=keys // 32)
        assert (choose_short(x, H200) is not None) is there
        assert choose_short(x, H200, 4096) is not None  # a promise
    long = replace(BASE, most_pages=1 << 16)
    assert [short_keys(replace(long, tokens=n, requests=n), H200) for n in (1, 2, 8, 16)] == [
        8192,
        4096,
        4096,
        0,
    ]
    assert short_keys(replace(long, cache=float32, dtype=float32), H200) == 0


def real_shapes() -> Iterator[PagedShape]:
    """Heads of models, and pages."""
    for page in (16, 32, 64, 256):
        yield replace(BASE, page=page, most_pages=8192 // page)
    yield replace(BASE, cache=float8_e4m3)
    yield replace(BASE, cache=int8)
    yield replace(BASE, heads=64)
    yield replace(BASE, heads=8)
    yield replace(BASE, heads=64, width=64, value_width=64, window=128, sinks=True)
    yield replace(BASE, width=256, value_width=256, softcap=50.0, window=4096, key_heads=4)
    yield replace(BASE, width=96, value_width=96)
    yield replace(BASE, heads=28, key_heads=4)


def test_assembled() -> None:
    """What is chosen for real sizes: checked, no spill, no stack frame, no serialised product."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the kernel of short steps was not assembled")
    texts = {}
    for x in real_shapes():
        plan = choose_short(x, H200)
        assert plan is not None and not why_not(x, plan), x
        body = step_attend(x, plan, Rotary(x.width))
        errors = [f for f in check_body(body, H200) if f.severity == "error"]
        assert not errors, (x, plan, errors)
        text, entry = emit(body, "kernel", H200)
        assert entry.shared_bytes <= 227 << 10
        texts[f"{x} {plan}"] = text
    for label, made in assemble_all(texts, H200.cpu).items():
        made.check_library(label)


# ---- broken in one place ------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label, waits", (("long, few stages", (4, 6)), ("8 bits, long", (3, 5))))
def test_mutants(label: str, waits: tuple[int, int]) -> None:
    """Every barrier, fence and wait is needed: the check sees each one missing or changed, but
    that the one barrier of the one role that has one may have any number; that a copy may wait
    for a stage that is given back later; and that warps look up the angles that others of them
    made, which the simulator sees."""
    alive = {
        name
        for name, body in mutants.mutants(body_of(label))
        if not any(f.severity == "error" for f in check_body(body, H200))
    }
    wanted = {f"named_sync {i} number + 1" for i in range(3)}
    wanted |= {f"wait {i} next stage" for i in waits}
    assert alive == wanted | {"named_sync 0 dropped"}


def test_angles_are_there_before_they_are_looked_up() -> None:
    """The meeting that the check does not miss."""
    broken = dict(mutants.mutants(body_of("group 8")))["named_sync 0 dropped"]
    with pytest.raises(SimulationError, match=r"race|nothing was written|no barrier"):
        simulate(*emit(broken, "kernel", H200), step_of("group 8").given, policy="random", seed=1)
