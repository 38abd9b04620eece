"""kernels/matmul/wide_blocks.py: products with scales of blocks, interpreted and as PTX."""

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
from product_bodies import block_matmul
from simulated import assembled, check_body

from tilegrad.core.dtype import bfloat16, float8_e4m3, float32
from tilegrad.core.target import H200
from tilegrad.ir.symbol import high
from tilegrad.kernels.matmul.plan import BLOCK, ranked, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body, fill
from tilegrad.tile.prove import check_body as proved

E4M3 = ml_dtypes.float8_e4m3fn


def plain(x: Operands, plan: WidePlan, turned: bool) -> Body:
    """With nothing around the product."""
    body = block_matmul(transposed(x) if turned else x, plan)
    return fill(body, "epilogue", lambda b, inputs, added: inputs[0])


CASES = {
    "weights as rows": (20, 144, 384, (64, 24, 128), True, {}),
    "weights as rows, parts of k": (9, 80, 384, (128, 16, 128), True, {"split": 2, "staged": 8}),
    "tokens as rows": (70, 144, 256, (128, 128, 128), False, {}),
    "neighbours share weights": (200, 144, 256, (128, 128, 128), False, {"cluster": 2}),
    "three consumers": (150, 128, 256, (192, 128, 128), False, {}),
    "tiles in turn": (72, 200, 128, (64, 64, 128), False, {"programs": 1}),
}


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    m, n, k, tile, turned, more = CASES[name]
    x = Operands(m, n, k, float8_e4m3, float32, scaled=True)
    own = transposed(x) if turned else x
    plan = WidePlan(tile, 2, 1, staged=8 if turned else 32)
    plan = replace(plan, **more)
    tiles = -(-high(own.m) // tile[0]) * -(-high(own.n) // tile[1])
    programs = -(-tiles // plan.cluster) * plan.cluster * plan.split
    plan = replace(plan, programs=more.get("programs", programs))
    body = plain(x, plan, turned)
    assert not [f for f in proved(body) if f.severity == "error"]
    rng = np.random.default_rng(0)
    tokens, weights = (rng.standard_normal(s).astype(E4M3) for s in ((m, k), (n, k)))
    down = -(-n // BLOCK)
    scales = [rng.uniform(0.5, 2, (s, k // BLOCK)).astype(np.float32) for s in (m, down)]
    result = np.full((m, n), np.nan, np.float32)
    given = (weights, tokens) if turned else (tokens, weights)
    found = check_body(body, *given, result, *scales, rounding=1e-6)[2]
    left, right = (np.repeat(s.astype(np.float64), BLOCK, 1) for s in scales)
    right = np.repeat(right, BLOCK, 0)[:n]
    wanted = (tokens.astype(np.float64) * left) @ (weights.astype(np.float64) * right).T
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("m", [1, 20, 64, 128, 200, 1000, 4096])
def test_plans(m: int) -> None:
    """A step is a block, and a consumer's weights have one scale: few tokens are columns."""
    found = ranked(Operands(m, 4096, 7168, float8_e4m3, bfloat16, scaled=True), H200)
    assert found and found[0].turned == (m <= 64)
    for choice in found:
        _, columns, depth = choice.plan.tile
        assert depth == BLOCK and (choice.turned or BLOCK % columns == 0)


def test_assembled() -> None:
    """What large layers have, without spills."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: nothing was assembled")
    texts = {}
    for m in (1, 16, 64, 128, 256, 4096):
        x = Operands(m, 4096, 7168, float8_e4m3, bfloat16, scaled=True)
        kinds = {(c.turned, c.plan.tile): c for c in reversed(ranked(x, H200))}
        for number, choice in enumerate(kinds.values()):
            body = plain(x, choice.plan, choice.turned)
            texts[f"{m} {number}"] = emit(body, "entry", H200)[0]
    for made in assemble_all(texts, H200.cpu).values():
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0
