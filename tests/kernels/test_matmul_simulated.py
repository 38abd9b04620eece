"""The PTX of the wide matmul on the simulator, in every way programs share what they read."""

from __future__ import annotations

import numpy as np
import pytest
from product_bodies import wide_matmul
from simulator import simulate

from tilegrad.core.dtype import bfloat16, float8_e4m3, int8, int32
from tilegrad.core.target import H200
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import fill

NN, TN = {"b_along_k": False}, {"a_along_k": False, "b_along_k": False}


def operands(m: int, n: int, k: int, **more: object) -> Operands:
    return Operands(m, n, k, bfloat16, bfloat16, **more)  # type: ignore[arg-type]


CASES = {
    "alone": (operands(200, 136, 136), WidePlan((128, 128, 64), 3, 2, 2)),
    "alone, b (k, n)": (operands(136, 136, 136, **NN), WidePlan((128, 128, 64), 3, 1, 2)),
    "cluster": (operands(256, 136, 136), WidePlan((128, 128, 64), 3, 2, 2, cluster=2)),
    "cluster, b (k, n)": (
        operands(256, 136, 136, **NN),
        WidePlan((128, 128, 64), 3, 2, 2, cluster=2),
    ),
    "cluster, both along others, batch": (
        operands(256, 128, 72, batch=2, **TN),
        WidePlan((128, 128, 64), 2, 2, 2, cluster=2),
    ),
    "cluster along n, a (k, m)": (
        operands(128, 136, 136, a_along_k=False),
        WidePlan((128, 64, 64), 3, 2, 2, cluster=2, across=True),
    ),
    "three consumers": (
        operands(150, 72, 136),
        WidePlan((192, 72, 64), 3, 1, 1, 72),
    ),
    "fp8 cluster": (
        Operands(256, 136, 272, float8_e4m3, bfloat16),
        WidePlan((128, 128, 128), 3, 2, 2, cluster=2),
    ),
    "fp8 split": (
        Operands(128, 64, 400, float8_e4m3, bfloat16),
        WidePlan((128, 64, 128), 2, 2, 1, 32, split=2),
    ),
    "int8 cluster": (
        Operands(256, 136, 272, int8, int32),
        WidePlan((128, 128, 128), 3, 2, 2, 32, cluster=2),
    ),
    "int8 split, turned": (
        Operands(136, 16, 800, int8, int32, turned=True),
        WidePlan((64, 16, 128), 3, 6, 1, 8, split=2),
    ),
    "split": (operands(128, 64, 200), WidePlan((128, 64, 64), 2, 2, 1, 32, split=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_simulated(name: str) -> None:
    x, plan = CASES[name]
    body = fill(wide_matmul(x, plan), "epilogue", lambda b, inputs, attrs: inputs[0])
    rng = np.random.default_rng(0)
    scale = 1 if x.dtype.is_float else 40
    a, b = (
        (scale * rng.standard_normal((x.batch, *shape))).astype(x.dtype.numpy)
        for shape in ((x.m, x.k), (x.k, x.n))
    )
    shape = (x.batch, x.n, x.m) if x.turned else (x.batch, x.m, x.n)
    c = np.full(shape, np.nan if x.result.is_float else -1, x.result.numpy)
    given = [
        a if x.a_along_k else np.swapaxes(a, 1, 2).copy(),
        np.swapaxes(b, 1, 2).copy() if x.b_along_k else b,
        c,
    ]
    simulate(*emit(body, "matmul", H200), [g[0] if x.batch == 1 else g for g in given])
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    wanted = np.swapaxes(wanted, 1, 2) if x.turned else wanted
    if not x.dtype.is_float:
        return np.testing.assert_array_equal(c, wanted)
    np.testing.assert_allclose(c.astype(np.float32), wanted, rtol=1e-2, atol=0.3)
