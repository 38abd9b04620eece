"""kernels/quantised_gpu_ring.py: programs that stay, against float64 products on the interpreter
and as PTX on the simulator; protocol errors that the checks find; what an 8B model's shapes
assemble to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_quantised_gpu import AROUND, BY_NAME, Product, checked, reference_around

from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import A100, H200
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.kernels import quantised_gpu as kernels
from tilegrad.kernels.quantised_gpu_ring import (
    RingPlan,
    ring_tokens,
    shared_bytes,
    stage_bytes,
    why_not,
)
from tilegrad.kernels.quantised_gpu_rows import parameters
from tilegrad.kernels.quantised_shape import Around, QuantisedShape
from tilegrad.targets.ptx.assemble import assemble_all, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.simulate import simulate
from tilegrad.tile.build import Body
from tilegrad.tile.placed import PlacedBuilder, rebuild
from tilegrad.tile.prove import check_body

SMALL = RingPlan(16, 32, 2, 2, 2)
WIDE = RingPlan(16, 64, 2, 2, 2)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_formats(form: Format) -> None:
    """Several laps of the ring, and programs of unequal numbers of blocks."""
    case = Product(form, 44, 2048, 2)
    body = ring_tokens(case.shape, WIDE)
    found = case.interpret(body)
    case.few(found)
    np.testing.assert_array_equal(case.simulate(body), found)


PLANS = {
    "a stage is a row's groups": (48, 1024, SMALL),
    "more stages than turns": (48, 1024, RingPlan(16, 32, 5, 3, 2)),
    "two turns at once": (32, 2048, WIDE),
    "a program a block": (48, 2048, RingPlan(16, 32, 3, 3, 2)),
    "rows of several warps": (64, 1024, RingPlan(32, 32, 2, 1, 4)),
    "one warp": (16, 2048, RingPlan(8, 32, 3, 1, 1)),
    "crews": (96, 2048, RingPlan(16, 32, 4, 2, 2, crews=2)),
    "crews of unequal shares": (64, 3072, RingPlan(16, 32, 4, 2, 4, crews=2)),
    "helpers": (48, 2048, RingPlan(16, 32, 3, 2, 2, helpers=1)),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q4_K"])
def test_plans(name: str, form: str) -> None:
    rows, columns, plan = PLANS[name]
    case = Product(BY_NAME[form], rows, columns, 1)
    body = ring_tokens(case.shape, plan)
    found = case.interpret(body)
    case.few(found)
    np.testing.assert_array_equal(case.simulate(body), found)
    assert emit(body, "entry", H200)[1].shared_bytes <= shared_bytes(case.shape, plan) + 1024


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_tokens(tokens: int) -> None:
    case = Product(formats.Q4_1, 32, 1024, tokens)
    body = ring_tokens(case.shape, SMALL)
    found = case.interpret(body)
    case.few(found)
    np.testing.assert_array_equal(case.simulate(body), found)


def test_tokens_of_a_symbol() -> None:
    case = Product(formats.Q4_1, 32, 1024, 2, size=symbol("tokens", 1, 4))
    body = ring_tokens(case.shape, SMALL)
    case.few(case.interpret(body))
    case.few(case.simulate(body))


@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("name", AROUND)
def test_around(name: str, dtype: Any) -> None:
    """A norm before, a bias, gates and a residual after, against float64."""
    around = AROUND[name]
    case = Product(formats.Q4_1, 32, 1024, 2, dtype)
    given, want = reference_around(case, around)
    body = ring_tokens(case.shape, RingPlan(16, 32, 2, 2, 2), around=around)
    sizes = around.results(case.shape)
    order = [name for name, _ in parameters(case.shape, around)][: -len(sizes)]
    out = [np.zeros((2, size), dtype.numpy) for size in sizes]
    simulate(*emit(checked(body), "entry", H200), [*map(given.get, order), *out])
    last = 2.0**-8 if dtype is bfloat16 else 2.0**-15
    np.testing.assert_allclose(np.concatenate(out, 1).astype(np.float64), want, rtol=last,
                               atol=2.0**-13 * np.abs(want).max())  # fmt: skip


def test_what_does_not_fit() -> None:
    shape = QuantisedShape(formats.Q4_1, 48, 1024, 1, bfloat16)
    assert why_not(shape, SMALL) == ""
    assert "tokens" in why_not(replace(shape, tokens=5), SMALL)
    assert "groups" in why_not(shape, RingPlan(16, 64, 2, 2, 2))
    assert "results" in why_not(shape, RingPlan(32, 32, 2, 2, 2))
    assert "warps" in why_not(shape, RingPlan(16, 32, 2, 2, 16), Around(gated="silu"))
    assert "results" in why_not(shape, SMALL, Around(splits=(24, 24)))
    assert "crews" in why_not(shape, RingPlan(16, 32, 3, 2, 2, crews=2))
    assert "crews" in why_not(shape, RingPlan(16, 32, 4, 2, 4, crews=2))
    assert "bulk" in why_not(QuantisedShape(formats.Q6_K, 48, 1024, 1, bfloat16), SMALL)
    with pytest.raises(InternalError, match="do not fit"):
        ring_tokens(shape, RingPlan(32, 32, 2, 2, 2))


# ---- what the checks find -----------------------------------------------------------------------


def without(body: Body, name: str, which: int = 0) -> Body:
    """The Body without the n-th op of a name."""
    seen = 0

    def replace_(b: PlacedBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        nonlocal seen
        if node.op.name != name:
            return None
        seen += 1
        return inputs[0] if seen == which + 1 and inputs else None

    return rebuild(body, replace_)


def errors(body: Body) -> set[str]:
    return {f.rule for f in check_body(body, H200) if f.level == "error"}


def changed(body: Body, change: Any) -> Body:
    """The Body with attributes of some ops changed."""

    def replace_(b: PlacedBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        attrs = change(node)
        if attrs is None:
            return None
        return b.add(node.op.make(inputs, {**node.attrs, **attrs}, location=node.location))

    return rebuild(body, replace_)


MUTANTS = {
    "no arrival": lambda body: without(body, "arrive"),
    "no wait for a stage": lambda body: without(body, "wait", 0),
    "no wait for room": lambda body: without(body, "wait", 1),
    "no copy of scales": lambda body: without(body, "copy_async", 1),
    "fewer bytes": lambda body: changed(
        body, lambda n: {"bytes": n.attrs["bytes"] - 16} if n.op.name == "expect" else None),
    "an arrival too many": lambda body: changed(
        body, lambda n: {"count": 2} if n.op.name == "barrier" else None),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name: str) -> None:
    shape = QuantisedShape(formats.Q4_1, 96, 1024, 1, bfloat16)
    body = ring_tokens(shape, SMALL)
    assert not errors(body)
    assert errors(MUTANTS[name](body))


# ---- an 8B model --------------------------------------------------------------------------------


SHAPES = {
    "q+k+v": (6144, 4096, Around(norm=1e-5, splits=(4096, 1024, 1024))),
    "o": (4096, 4096, Around(residual=True)),
    "gate+up": (28672, 4096, Around(norm=1e-5, gated="silu")),
    "down": (4096, 14336, Around(residual=True)),
}


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("Q2_K", "Q3_K")])
def test_assembled(name: str) -> None:
    """The Plans of an 8B model: proved, no spills, and two programs fit a core."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts, most = {}, {}
    for label, (rows, columns, around) in SHAPES.items():
        shape = QuantisedShape(BY_NAME[name], rows, columns, 1, bfloat16)
        plan = kernels.ring_plan(shape, H200, around)
        assert plan is not None and plan.stages >= kernels.LEAST_STAGES[plan.crews], label
        body = kernels.around_callee(shape, H200, around).launches[0][0]
        assert body.grid == (132,) and not errors(body)
        text, entry = emit(body, "entry", H200)
        assert 2 * (entry.shared_bytes + 1024) <= H200.limits["shared_bytes_per_core"]
        meetings = 1 + plan.crews + plan.helpers  # once at the start, once when x is rounded
        assert text.count("bar.sync") == meetings
        texts[label], most[label] = text, 65536 // (2 * entry.threads) // 8 * 8
    for label, made in assemble_all(texts, H200.cpu).items():
        for report in made.reports.values():
            spilled = (report.spill_stores, report.spill_loads, report.stack_bytes)
            assert spilled == (0, 0, 0) and report.registers <= most[label], label


def test_who_stays() -> None:
    """One token of weights with rows for most cores, on a machine that has the copy engine."""
    shape = QuantisedShape(formats.Q4_1, 4096, 4096, 1, bfloat16)
    assert kernels.ring_plan(shape, H200).crews == 2
    assert kernels.ring_plan(replace(shape, columns=14336), H200).helpers == 1
    assert kernels.ring_plan(replace(shape, columns=1536), H200).crews == 1
    assert kernels.ring_plan(shape, A100) is None
    assert kernels.ring_plan(replace(shape, tokens=2), H200) is None
    assert kernels.ring_plan(replace(shape, rows=512), H200) is None
    assert kernels.ring_plan(replace(shape, format=formats.Q2_K), H200) is None
    assert kernels.ring_plan(replace(shape, columns=1 << 16), H200) is None
    assert kernels.ring_plan(replace(shape, format=formats.Q6_K, columns=14336), H200).rows == 8
    assert kernels.callee(shape, A100).launches[0][0].grid != (132,)


def test_stage_bytes() -> None:
    shape = QuantisedShape(formats.Q4_1, 4096, 4096, 1, bfloat16)
    assert stage_bytes(shape, RingPlan(16, 32)) == 16 * 32 * 20
    shape = replace(shape, format=formats.Q4_K)
    assert stage_bytes(shape, RingPlan(16, 64)) == 16 * 64 * 18 + 16 * 8 * 4
