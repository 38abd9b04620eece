"""kernels/matmul/matvec.py: Bodies on the Tile interpreter, checked, assembled; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from simulator import simulate

from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float32, int8, int32
from tilegrad.core.target import A100, H200
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.matvec import Matvec, MatvecPlan, choose, line_of, why_not
from tilegrad.kernels.matmul.shape import Operands
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body, BodyBuilder
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import require

CASES = {
    "one": Operands(1, 80, 512, bfloat16, float32),
    "three": Operands(1, 96, 256, bfloat16, float32, weights=(48, 16, 32)),
    "gated": Operands(1, 48, 512, bfloat16, float32, weights=(48, 48), gated=True),
    "odd lines": Operands(1, 32, 768, bfloat16, float32),
    "short lines": Operands(1, 32, 576, bfloat16, float32),
    "codes": Operands(1, 40, 2048, float8_e4m3, float32),
    "codes, odd lines": Operands(1, 16, 3584, float8_e4m3, float32),
    "bytes": Operands(1, 40, 2048, int8, int32),
    "codes, gated": Operands(1, 40, 1024, float8_e4m3, float32, weights=(40, 40), gated=True),
}
SHARED = MatvecPlan(8, 8, 2)  # of blocks of rows that do not come out even
NEAR = {bfloat16: 1e-5, float8_e4m3: 1e-3, int8: 0.0}  # of codes halves add up neighbours
SIMULATED = [
    ("three", MatvecPlan(8, 8)),
    ("odd lines", MatvecPlan(4, 1)),
    ("short lines", MatvecPlan(4, 1)),
    ("codes", MatvecPlan(8, 8, 2)),
    ("bytes", MatvecPlan(8, 8, 2)),
    ("codes, odd lines", MatvecPlan(4, 4)),
]


def drawing(seed: int) -> Callable[..., np.ndarray]:
    """Draws arrays of the operands' dtype."""
    random = np.random.default_rng(seed)

    def draw(x: Operands, *shape: int) -> np.ndarray:
        scale = 1.0 if x.dtype.is_float else 60.0
        return (random.standard_normal(shape) * scale).astype(x.dtype.numpy)

    return draw


def body_of(x: Operands, plan: MatvecPlan) -> Body:
    """A Body whose epilogue gives the sum of its pieces."""
    line, sizes = line_of(x.k, x.dtype), x.weights or (x.n,)
    lines = x.k // line
    kept = sizes[:1] if x.gated else sizes
    b = BodyBuilder(
        "matvec",
        [
            ("x", Memory((lines, line), x.dtype)),
            *(
                (f"w{i}", Memory((n * lines, line), x.dtype, use="constant"))
                for i, n in enumerate(sizes)
            ),
            *((f"c{i}", Memory((1, n), x.result, use="result")) for i, n in enumerate(kept)),
        ],
    )

    def token(row):
        found = b.load(b.parameters[0], (0, 0), (lines, line), (0, 1))
        return found if x.dtype.size == 1 else b.cast(found, float32)

    def epilogue(*given):
        *pieces, _ = given
        return pieces[0] if len(pieces) == 1 else b.apply("add", *pieces)

    last = 1 + len(sizes)
    return Matvec(
        x, plan, b, token, b.parameters[1:last], b.parameters[last:], [epilogue] * len(kept)
    ).build()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "plan", [MatvecPlan(2, 4), MatvecPlan(8, 8), MatvecPlan(4, 8), MatvecPlan(8, 3), SHARED]
)
def test_products(name: str, plan: MatvecPlan) -> None:
    x = CASES[name]
    sizes = x.weights or (x.n,)
    draw = drawing(0)
    token, weights = draw(x, 1, x.k), [draw(x, n, x.k) for n in sizes]
    wanted = [(w.astype(np.float64) @ token[0].astype(np.float64)) for w in weights]
    if x.gated:
        wanted = [sum(wanted)]
    found = [np.full((1, *w.shape), -7, x.result.numpy) for w in wanted]
    body = body_of(x, plan)
    assert {f.rule for f in require(body, H200)} <= {"bank_conflict"}
    line = line_of(x.k, x.dtype)
    run(body, [token.reshape(-1, line), *(w.reshape(-1, line) for w in weights), *found])
    for got, expected in zip(found, wanted):
        assert np.linalg.norm(got[0] - expected) <= NEAR[x.dtype] * np.linalg.norm(expected)


@pytest.mark.parametrize("size", [448.0, 2.0**-9], ids=["largest", "least"])
def test_codes_at_the_ends_of_their_range(size: float) -> None:
    """Halves hold sums of the largest products, and none of the least is lost."""
    x = Operands(1, 16, 1024, float8_e4m3, float32)
    line, given = line_of(x.k, x.dtype), np.float32(size)
    token = np.full((x.k // line, line), given).astype(x.dtype.numpy)
    weights = np.full((16 * x.k // line, line), given).astype(x.dtype.numpy)
    found = np.full((1, 16), np.nan, np.float32)
    run(body_of(x, MatvecPlan(8, 8)), [token, weights, found])
    np.testing.assert_allclose(found[0], x.k * size * size, rtol=1e-6)


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas")
@pytest.mark.parametrize("dtype", [bfloat16, float8_e4m3], ids=str)
@pytest.mark.parametrize("k", [4096, 14336])
def test_weights_come_before_the_wait(k: int, dtype: DType) -> None:
    x = Operands(1, 4096, k, dtype, bfloat16)
    text, entry = emit(body_of(x, choose(x, H200).plan), "matvec", H200)
    (report,) = assemble(text, H200.cpu).reports.values()
    assert report.spill_stores == report.spill_loads == 0
    assert 2 * entry.threads * report.registers <= 1 << 16, "two programs on a core"
    before, after = text.split("griddepcontrol.wait")
    each = 8 if dtype.size == 1 and k == 14336 else 16  # bytes that a thread reads at once
    held = choose(x, H200).plan.rows * k * dtype.size // (each * entry.threads)
    assert before.count("ld.global") == held, "all weights are asked for first"
    assert "st.global" not in before and "ld.global" in after


@pytest.mark.parametrize("name, plan", SIMULATED)
def test_simulated(name: str, plan: MatvecPlan) -> None:
    x = CASES[name]
    draw, line, sizes = drawing(1), line_of(x.k, x.dtype), x.weights or (x.n,)
    token, weights = draw(x, x.k // line, line), [draw(x, n * x.k // line, line) for n in sizes]
    found = [np.full((1, n), -7, x.result.numpy) for n in sizes]
    simulate(*emit(body_of(x, plan), "matvec", H200), [token, *weights, *found])
    for got, w in zip(found, weights):
        wanted = w.reshape(got.size, -1).astype(np.float64) @ token.reshape(-1).astype(np.float64)
        assert np.linalg.norm(got[0] - wanted) <= NEAR[x.dtype] * np.linalg.norm(wanted)


def test_what_it_refuses() -> None:
    x = Operands(1, 4096, 4096, bfloat16, bfloat16)
    assert why_not(x, H200) == ""
    assert why_not(x, A100) == ""
    for other in (
        {"m": 2},
        {"k": 4000},
        {"n": 4092},
        {"k": 1 << 15},
        {"b_along_k": False},
        {"dtype": float32},
        {"scaled": True},
        {"sparse": True},
    ):
        assert why_not(replace(x, **other), H200), other
