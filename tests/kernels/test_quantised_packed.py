"""kernels/quantised/gpu_packed.py: against float64 products, on the Tile interpreter and as PTX on
the simulator; what is around a product; Plans of an 8B model's shapes assembled."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from assembled import assemble_all
from quantised_rows import random_rows
from simulator import simulate

from tilegrad.core import format as formats
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float16, float32
from tilegrad.core.format import QUANTISED
from tilegrad.core.target import A100, H200
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.quantised import gpu as kernels
from tilegrad.kernels.quantised.gpu_packed import PackedPlan, plans, why_not
from tilegrad.kernels.quantised.shape import NOTHING, Around, QuantisedShape
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.budget import shared_bytes
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import check_body

BY_NAME = {form.name: form for form in QUANTISED}
ERRORS = {bfloat16: 5e-3, float16: 6e-4}


class Case:
    """A product with random weights and what is around it."""

    def __init__(
        self,
        form: str,
        sizes: tuple[int, int, int],
        around: Around = NOTHING,
        dtype: Any = bfloat16,
        size: Any = None,
    ) -> None:
        rows, columns, tokens = sizes
        self.shape = QuantisedShape(BY_NAME[form], rows, columns, size or tokens, dtype)
        self.around, self.symbols = around, {"tokens": tokens} if size is not None else {}
        raw, rng = random_rows(BY_NAME[form], rows, columns), np.random.default_rng(1)
        self.raw, made = raw, kernels.pack(self.shape, raw)
        results = around.results(self.shape)
        x, bias, residual = (
            rng.standard_normal(s).astype(dtype.numpy)
            for s in ((tokens, columns), (rows,), (tokens, results[0]))
        )
        self.given = [x, *(made[name] for name, _, _ in kernels.parts(self.shape))]
        want = x.astype(np.float64) @ BY_NAME[form].to_float32(raw).astype(np.float64).T
        if around.bias:
            self.given.append(bias)
            want = want + bias.astype(np.float64)
        if around.gated:
            gate, up = want[:, : rows // 2], want[:, rows // 2 :]
            want = gate / (1 + np.exp(-gate)) * up
        if around.residual:
            self.given.append(residual)
            want = want + residual.astype(np.float64)
        self.want, self.dtype = want, dtype
        self.out = [np.full((tokens, size), np.nan, dtype.numpy) for size in results]

    def check(self, plan: PackedPlan) -> None:
        """Both runs of a Plan are near the float64 product, and proved."""
        body = kernels.body_of(self.shape, plan, "entry", self.around)
        verify_body(body, "placed", H200)
        assert not [f for f in check_body(body, H200) if f.severity == "error"]
        for simulated in (False, True):
            out = [o.copy() for o in self.out]
            if simulated:
                simulate(*emit(body, "entry", H200), [*self.given, *out], self.symbols)
            else:
                run(body, [*self.given, *out], self.symbols)
            found = np.concatenate(out, 1).astype(np.float64)
            error = np.linalg.norm(found - self.want) / np.linalg.norm(self.want)
            assert error < ERRORS[self.dtype], error


def plan_of(rows: int, wide: int, programs: int, **more: Any) -> PackedPlan:
    given = {"staged": wide, **more}
    return PackedPlan((rows, wide, 256), 2, programs, 1, **given)


CASES = {
    "one tile": (("Q4_1", (64, 512, 5)), plan_of(64, 8, 1)),
    "bytes": (("Q8_0", (144, 320, 3)), plan_of(128, 8, 2)),
    "bytes, float16": (("Q8_0", (64, 256, 9), NOTHING, float16), plan_of(64, 16, 1, ways=2)),
    "no minimum, rows and columns that end within": (("Q4_0", (144, 320, 3)), plan_of(128, 8, 2)),
    "consumers of the same rows": (("Q4_1", (128, 512, 9)), plan_of(64, 16, 2, ways=2)),
    "several tiles of a program": (("Q4_1", (320, 512, 9)), plan_of(64, 16, 2, ways=2)),
    "64 tokens": (("Q4_1", (128, 256, 64)), plan_of(128, 64, 1)),
    "parts of k": (("Q4_1", (64, 1024, 9)), plan_of(64, 16, 2, split=2, staged=8, ways=2)),
    "float16": (("Q4_1", (64, 256, 9), NOTHING, float16), plan_of(64, 16, 1)),
    "gates": (("Q4_1", (256, 256, 5), Around(gated="silu")), plan_of(128, 8, 2, ways=2)),
    "residual": (("Q4_0", (64, 512, 9), Around(residual=True)), plan_of(64, 16, 1)),
    "bias": (("Q4_1", (128, 256, 9), Around(bias=True)), plan_of(64, 16, 2)),
    "results": (("Q4_1", (192, 256, 9), Around(splits=(64, 64, 64))), plan_of(64, 16, 3)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    given, plan = CASES[name]
    Case(*given).check(plan)


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0"])
def test_a_number_of_tokens_that_the_step_knows(form: str) -> None:
    case = Case(form, (64, 256, 11), size=symbol("tokens", 9, 16))
    case.check(plan_of(64, 16, 1))


def test_who_takes_it() -> None:
    shape = QuantisedShape(formats.Q4_1, 4096, 4096, 8, bfloat16)
    assert not why_not(shape, H200) and why_not(shape, A100)
    assert why_not(QuantisedShape(formats.Q4_1, 4096, 4096, 8, float32), H200)
    assert why_not(QuantisedShape(formats.Q6_K, 4096, 4096, 8, bfloat16), H200)
    assert "norm" in why_not(shape, H200, Around(norm=1e-5))
    assert why_not(shape, H200, Around(splits=(4000, 96)))
    with override(determinism="invariant"):
        assert "invariant" in why_not(shape, H200)


@pytest.mark.parametrize("tokens", [2, 8, 100])
def test_plans_count_what_they_allocate(tokens: int) -> None:
    """Every Plan that is offered fits into shared memory, barriers and alignment included.

    Each form has each of what is around once, with one of the numbers of tokens.
    """
    forms, turn = ("Q4_0", "Q4_1", "Q8_0"), [2, 8, 100].index(tokens)
    arounds = (NOTHING, Around(residual=True), Around(gated="silu"), Around(splits=(384, 192)))
    for number, around in enumerate(arounds):
        shape = QuantisedShape(BY_NAME[forms[(turn + number) % 3]], 576, 576, tokens, bfloat16)
        found = plans(shape, around, H200)
        assert found
        for plan in found:
            body = kernels.body_of(shape, plan, around=around)
            assert not shared_bytes(body, H200), plan


@pytest.mark.slow
def test_assembled() -> None:
    """The Plans of an 8B model's shapes: no spills, products that run beside the threads."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {}
    for rows, columns, around in (
        (4096, 14336, Around(residual=True)),
        (28672, 4096, Around(gated="silu")),
    ):
        for form, tokens in itertools.product((formats.Q4_1, formats.Q8_0), (9, 32, 64, 128, 256)):
            shape = QuantisedShape(form, rows, columns, tokens, bfloat16)
            plan = plans(shape, around, H200)[0]
            body = kernels.body_of(shape, plan, "entry", around)
            texts[f"{form.name} {rows} {tokens}"] = emit(body, "entry", H200)[0]
    for name, made in assemble_all(texts, H200.cpu).items():
        made.check_library(name)
