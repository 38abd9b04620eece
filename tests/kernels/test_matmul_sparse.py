"""kernels/matmul/wide_sparse.py: products with 2:4 weights, interpreted and as PTX."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))

from assembled import assemble_all
from product_bodies import sparse_matmul
from simulated import assembled, check_body

from tilegrad.core.dtype import bfloat16, float8_e4m3, float16
from tilegrad.core.kept import spread_out, words_of
from tilegrad.core.target import H200
from tilegrad.kernels.matmul.plan import transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.kernels.matmul.wide_sparse import ROWS, choose_sparse, depth_of, plans
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body, fill
from tilegrad.tile.prove import check_body as proved

PAIRS = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint8)
NUMPY = {bfloat16: ml_dtypes.bfloat16, float8_e4m3: ml_dtypes.float8_e4m3fn, float16: np.float16}


def plain(body: Body) -> Body:
    """With nothing around the product."""
    return fill(body, "epilogue", lambda b, inputs, added: inputs[0])


def weights(n: int, k: int, dtype: object, seed: int = 1) -> tuple[np.ndarray, ...]:
    """(the matrix, what is kept of it in whole tiles of rows, words)."""
    rng, rows, depth = np.random.default_rng(seed), -(-n // ROWS) * ROWS, depth_of(dtype)  # type: ignore[arg-type]
    wide = -(-k // depth) * depth
    places = PAIRS[rng.integers(0, 6, (rows, wide // 4))].reshape(rows, -1)
    kept = (rng.integers(-8, 9, (rows, k // 2)) / 4).astype(NUMPY[dtype])
    whole = spread_out(kept, places[:, : k // 2])[:n]
    return whole, kept, words_of(places, kept.dtype.itemsize, depth)


CASES = {
    "bf16": (bfloat16, 40, 128, 192, {}),
    "e4m3, odd sizes": (float8_e4m3, 40, 144, 288, {}),
    "two rows of tiles in a cluster": (float8_e4m3, 24, 256, 256, {"cluster": 2, "programs": 2}),
    "tiles in turn": (bfloat16, 72, 256, 64, {"programs": 1, "tile": (64, 64, 64), "staged": 32}),
}


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    dtype, m, n, k, more = CASES[name]
    x = Operands(m, n, k, dtype, bfloat16, sparse=True)
    choice = choose_sparse(x, H200)
    assert choice is not None and choice.turned
    body = plain(sparse_matmul(transposed(x), replace(choice.plan, **more)))
    assert not [f for f in proved(body) if f.severity == "error"]
    whole, kept, words = weights(n, k, dtype)
    tokens = (np.random.default_rng(2).integers(-8, 9, (m, k)) / 4).astype(NUMPY[dtype])
    result = np.full((m, n), np.nan, ml_dtypes.bfloat16)
    found = check_body(body, kept, tokens, result, words)[2]
    wanted = tokens.astype(np.float64) @ whole.astype(np.float64).T
    np.testing.assert_array_equal(found, wanted.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_plans() -> None:
    """Many tokens have tiles of 128 x 256, of neighbours that share them; few have one tile."""
    x = Operands(4096, 14336, 4096, float8_e4m3, bfloat16, sparse=True)
    choice = choose_sparse(x, H200)
    assert choice is not None
    assert (choice.plan.tile, choice.plan.cluster) == ((128, 256, 128), 2)
    assert choice.plan.stages >= 3
    for m in (1, 9, 70, 300):
        few = choose_sparse(replace(x, m=m), H200)
        assert few is not None and few.plan.tile[1] * -(-m // 256) >= m


def test_assembled() -> None:
    """What a layer of an 8B model has, without spills."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: nothing was assembled")
    texts = {}
    for dtype, n, k in ((float8_e4m3, 6144, 4096), (bfloat16, 4096, 14336)):
        x = Operands(2048, n, k, dtype, bfloat16, sparse=True)
        for number, plan in enumerate(plans(x, H200)):
            body = plain(sparse_matmul(transposed(x), plan))
            texts[f"{dtype}{n}{number}"] = emit(body, "entry", H200)[0]
    for made in assemble_all(texts, H200.cpu).values():
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0


def test_few_stages_are_refused() -> None:
    x = transposed(Operands(64, 128, 256, float8_e4m3, bfloat16, sparse=True))
    with pytest.raises(Exception, match="two stages"):
        sparse_matmul(x, WidePlan((128, 64, 128), 1))
