"""kernels/quantised/gpu_warps.py: against float64 products, on the Tile interpreter and as PTX on
the simulator; who takes it; Plans of an 8B model's shapes assembled."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from assembled import assemble_all
from simulator import simulate
from test_quantised_packed import ERRORS, Case

from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16, float16
from tilegrad.core.target import A100, H200
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.quantised import gpu as kernels
from tilegrad.kernels.quantised.gpu_warps import WarpsPlan, plans, why_not
from tilegrad.kernels.quantised.shape import NOTHING, Around, QuantisedShape
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import check_body


def plan(rows: int, warps: int, stages: int) -> WarpsPlan:
    return WarpsPlan(rows, warps, 4 * warps, stages)


def check(case: Case, plan: WarpsPlan) -> None:
    """Both runs of a Plan are near the float64 product, and proved."""
    body = kernels.body_of(case.shape, plan, "entry", case.around)
    verify_body(body, "placed", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    for simulated in (False, True):
        out = [o.copy() for o in case.out]
        if simulated:
            simulate(*emit(body, "entry", H200), [*case.given, *out], case.symbols)
        else:
            run(body, [*case.given, *out], case.symbols)
        found = np.concatenate(out, 1).astype(np.float64)
        error = np.linalg.norm(found - case.want) / np.linalg.norm(case.want)
        assert error < ERRORS[case.dtype], error


CASES: dict[str, tuple[tuple[Any, ...], WarpsPlan]] = {
    "one turn": (("Q4_1", (64, 512, 5)), plan(32, 8, 2)),
    "bytes": (("Q8_0", (96, 3072, 5)), plan(32, 8, 2)),
    "gates of bytes": (("Q8_0", (128, 1024, 8), Around(gated="silu")), plan(64, 8, 4)),
    "turns in a loop": (("Q4_1", (32, 5120, 8)), plan(32, 8, 2)),
    "turns before a loop": (("Q4_1", (32, 8192, 3)), plan(32, 8, 6)),
    "stages of a part of a turn": (("Q4_1", (64, 3072, 8)), plan(64, 8, 2)),
    "sixteen warps": (("Q4_1", (96, 4096, 8)), plan(32, 16, 2)),
    "no minimum, ends within": (
        ("Q4_0", (144, 1056, 3), Around(residual=True)),
        plan(16, 4, 3),
    ),
    "float16": (("Q4_1", (32, 1024, 8), NOTHING, float16), plan(32, 8, 1)),
    "gates": (("Q4_1", (128, 1024, 5), Around(gated="silu")), plan(64, 8, 4)),
    "bias": (("Q4_1", (64, 512, 2), Around(bias=True)), plan(32, 8, 1)),
    "results": (("Q4_1", (96, 512, 5), Around(splits=(32, 32, 32))), plan(32, 8, 1)),
    "gates of an odd number of blocks": (
        ("Q4_1", (224, 4096, 8), Around(gated="silu")),
        plan(112, 8, 4),
    ),
    "gates of bytes, an odd number of blocks": (
        ("Q8_0", (96, 1024, 3), Around(gated="silu")),
        plan(48, 8, 3),
    ),
    "programs with rows of two results": (
        ("Q4_1", (192, 1024, 8), Around(splits=(64, 32, 96))),
        plan(48, 8, 3),
    ),
    "a residual, rows that are no power of two": (
        ("Q4_1", (96, 512, 8), Around(bias=True, residual=True)),
        plan(96, 8, 6),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    given, own = CASES[name]
    check(Case(*given), own)


def test_a_number_of_tokens_that_the_step_knows() -> None:
    case = Case("Q4_1", (64, 256, 3), size=symbol("tokens", 2, 8))
    check(case, plans(case.shape, NOTHING, H200)[0])


def test_scales_of_float16_that_are_large() -> None:
    """Scales of 128 and more, with tokens of 16 bits."""
    case = Case("Q4_1", (32, 512, 5), NOTHING, float16)
    large = np.float16(300.0).view(np.uint16).astype(np.int32)
    scales = case.given[2]
    scales[...] = large
    codes = formats.Q4_1.split(case.raw)["nibbles"]
    digits = np.concatenate([codes & 15, codes >> 4], -1).reshape(32, -1)
    case.given[0] = x = (case.given[0] * 0.01).astype(np.float16)
    case.want = x.astype(np.float64) @ (300.0 * digits.astype(np.float64)).T
    check(case, plan(32, 8, 1))


def test_who_takes_it() -> None:
    shape = QuantisedShape(formats.Q4_1, 4096, 4096, 8, bfloat16)
    assert not why_not(shape, H200) and why_not(shape, A100)
    assert "norm" in why_not(shape, H200, Around(norm=1e-5))
    assert why_not(replace(shape, tokens=9), H200)
    assert why_not(replace(shape, tokens=1), H200)


@pytest.mark.slow
def test_assembled() -> None:
    """The Plans of an 8B model's shapes: no spills."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {}
    for rows, columns, around in (
        (6144, 4096, Around(splits=(4096, 1024, 1024))),
        (4096, 4096, Around(residual=True)),
        (28672, 4096, Around(gated="silu")),
        (4096, 14336, Around(residual=True)),
        (128256, 4096, NOTHING),
    ):
        for form, tokens in itertools.product((formats.Q4_0, formats.Q4_1, formats.Q8_0), (2, 8)):
            shape = QuantisedShape(form, rows, columns, tokens, bfloat16)
            body = kernels.body_of(shape, plans(shape, around, H200)[0], "entry", around)
            texts[f"{form.name} {tokens} {rows} {columns} {around}"] = emit(body, "entry", H200)[0]
    for name, made in assemble_all(texts, H200.cpu).items():
        made.check_library(name)
