"""Products on a matrix unit with tiles of its own: Plans, and results over blocks of k, m and n.

Run by the interpreter, so on any machine. Invariant: whatever the blocks, a product of bf16 is the
float64 one to the rounding of its result, a product of int8 is exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted

from tilegrad.compiler import compile as compile_module
from tilegrad.compiler.compile import schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.target import AVX512_AMX, Target
from tilegrad.graph import build
from tilegrad.ir.node import Node
from tilegrad.schedule import matrix
from tilegrad.schedule.plan import Plan

AMX = dataclasses.replace(AVX512_AMX, cores=2)


def product(sizes: tuple[int, ...], turned: bool, dtype: Any) -> tuple[list[Node], Node]:
    """Inputs (of a batch where there are four sizes), and a @ b or a @ b^T."""
    *batch, m, k, n = sizes
    a, b = (
        build.input_(tuple(s), dtype)
        for s in ((*batch, m, k), (*batch, n, k) if turned else (*batch, k, n))
    )
    return [a, b], build.matmul(a, build.transpose(b) if turned else b)


def plan_of(m: int, k: int, n: int, target: Target = AMX) -> Plan:
    """The Plan of a bf16 product."""
    inputs, dot = product((m, k, n), False, dtypes.bfloat16)
    (kernel,) = schedule_for(inputs, [dot], target).kernels
    return kernel.steps[0].body.notes["plan"]  # type: ignore[union-attr, no-any-return]


@pytest.mark.parametrize("k", [64, 1024, 2048])
def test_all_of_k_stays_in_the_accumulators_while_many_columns_fit(k: int) -> None:
    plan = plan_of(2048, k, 2048)
    assert plan.block_k == k and plan.block_m == 2048
    assert plan.block_n >= matrix.FEW_COLUMNS and plan.block_n * k * 2 <= matrix.SCRATCH


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (300, 5000, 700), (4096, 14336, 1024)])
def test_a_long_k_is_cut_so_that_rows_stay_near(sizes: tuple[int, int, int]) -> None:
    plan = plan_of(*sizes)
    assert plan.mr * plan.block_k * 2 <= matrix.NEAR + plan.mr * 32 * 2 and plan.block_k % 32 == 0
    assert plan.block_m * plan.block_n * 4 <= matrix.SUMS
    assert plan.block_n % plan.nr == 0 and plan.block_m % plan.mr == 0
    programs = -(-sizes[0] // plan.block_m) * -(-sizes[2] // plan.block_n)
    assert programs >= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("turned", [False, True], ids=["along n", "along k"])
@pytest.mark.parametrize("sizes", [(64, 256, 64), (70, 300, 75), (33, 131, 97), (2, 40, 200, 64)])
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.int8], ids=str)
def test_blocks_of_k_give_the_product(
    dtype: Any, sizes: tuple[int, ...], turned: bool, monkeypatch: Any
) -> None:
    """Two, three or more blocks of k, sums of several rows and columns of panels, an epilogue."""
    for name, value in {"SCRATCH": 4096, "NEAR": 4096, "SUMS": 1 << 13, "WIDE": 64}.items():
        monkeypatch.setattr(matrix, name, value)
    monkeypatch.setattr(compile_module, "_bodies", {})  # which these are no part of the key of
    inputs, dot = product(sizes, turned, dtype)
    result = build.multiply(dot, build.like(dot, 2))
    random = np.random.default_rng(0)
    values = [
        random.integers(-9, 9, n.shape).astype(np.int8)
        if dtype is dtypes.int8
        else random.standard_normal(n.shape).astype(ml_dtypes.bfloat16)
        for n in inputs
    ]
    (kernel,) = schedule_for(inputs, [result], AMX).kernels
    plan = kernel.steps[0].body.notes["plan"]  # type: ignore[union-attr]
    assert plan.unit and plan.block_k < sizes[-2]
    (got,) = run_interpreted(AMX, inputs, [result], values)
    wide = [v.astype(np.float64) for v in values]
    expected = 2 * wide[0] @ (wide[1].swapaxes(-1, -2) if turned else wide[1])
    bound = 0 if dtype is dtypes.int8 else 2.0**-8 * np.abs(expected).max()
    if dtype is dtypes.int8:
        expected = expected.astype(np.int64).astype(got.dtype)
    np.testing.assert_allclose(
        got.reshape(expected.shape).astype(np.float64),
        expected.astype(np.float64),
        rtol=0,
        atol=bound,
    )
