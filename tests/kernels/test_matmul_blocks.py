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
from product_bodies import block_matmul, joint_matmul
from simulated import assembled, check_body

from tilegrad.core.dtype import bfloat16, float8_e4m3, float32
from tilegrad.core.target import H200
from tilegrad.ir.symbol import high
from tilegrad.kernels.matmul.plan import BLOCK, BLOCK_WIDE, ranked, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan, tile_counts
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body, fill
from tilegrad.tile.prove import check_body as proved

E4M3 = ml_dtypes.float8_e4m3fn


def plain(x: Operands, plan: WidePlan, turned: bool) -> Body:
    """With nothing around the products; gated, their sum."""
    x = transposed(x) if turned else x
    if x.gated:
        body = joint_matmul(x, plan)
        return fill(body, "epilogue", lambda b, inputs, added: b.apply("add", *inputs[:2]))
    if x.weights:
        body = joint_matmul(x, plan)
        for number in range(len(x.weights)):
            body = fill(body, f"epilogue{number}", lambda b, inputs, added: inputs[0])
        return body
    return fill(block_matmul(x, plan), "epilogue", lambda b, inputs, added: inputs[0])


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


JOINT = {
    "weights as rows": (20, (144, 80, 16), 384, (64, 24, 128), True, {}),
    "few tiles of rows": (9, (272, 48), 256, (128, 16, 128), True, {"programs": 2}),
    "parts of k": (8, (80, 144), 384, (128, 16, 128), True, {"split": 2, "staged": 8}),
    "tokens as rows": (70, (144, 80), 256, (128, 64, 128), False, {}),
    "neighbours share tokens": (70, (256, 128), 256, (128, 128, 128), False, {"cluster": 2}),
    "gated, weights as rows": (20, (144, 144), 384, (256, 24, 128), True, {}),
    "gated, one consumer": (9, (80, 80), 256, (128, 16, 128), True, {}),
    "gated, tokens as rows": (70, (144, 144), 256, (128, 128, 128), False, {}),
    "gated, three consumers": (150, (80, 80), 256, (192, 128, 128), False, {}),
}


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize("name", JOINT)
def test_several_weights(name: str) -> None:
    """Each tile has the scales of its own weight; gated, of both."""
    m, weights, k, tile, turned, more = JOINT[name]
    gated = name.startswith("gated")
    n = weights[0] if gated else sum(weights)
    x = Operands(m, n, k, float8_e4m3, float32, weights=weights, gated=gated, scaled=True)
    own = transposed(x) if turned else x
    plan = WidePlan(tile, 2, 1, staged=8 if turned else 32, across=not turned)
    plan = replace(plan, **more)
    down, across = tile_counts(own, plan)
    tiles = high(down) * high(across) * plan.cluster * plan.split
    body = plain(x, replace(plan, programs=more.get("programs", tiles)), turned)
    assert not [f for f in proved(body) if f.severity == "error"]
    rng = np.random.default_rng(0)
    tokens, *stored = (rng.standard_normal((s, k)).astype(E4M3) for s in (m, *weights))
    scales = [
        rng.uniform(0.5, 2, (s, k // BLOCK)).astype(np.float32)
        for s in (m, *(-(-n // BLOCK) for n in weights))
    ]
    results = [np.full((m, n), np.nan, np.float32) for n in weights[: 1 if gated else None]]
    found = check_body(body, tokens, *stored, *results, *scales, rounding=1e-6)
    left = tokens.astype(np.float64) * np.repeat(scales[0], BLOCK, 1)
    rights = [np.repeat(np.repeat(s, BLOCK, 0), BLOCK, 1) for s in scales[1:]]
    wanted = [left @ (w * s[: len(w)]).T for w, s in zip(stored, rights)]
    wanted = [sum(wanted)] if gated else wanted
    for number, exact in enumerate(wanted):
        got = found[1 + len(weights) + number]
        assert np.abs(got - exact).max() <= 1e-6 * np.abs(exact).max()


KINDS: list[tuple[int, tuple[int, ...], bool]] = [
    (4096, (), False),
    (6144, (4096, 1024, 1024), False),
    (2048, (2048, 2048), True),
]


def problem(m: int, n: int, weights: tuple[int, ...], gated: bool) -> Operands:
    """What large layers have."""
    more: dict = {"weights": weights, "gated": gated, "scaled": True}
    return Operands(m, n, 7168, float8_e4m3, bfloat16, **more)


@pytest.mark.parametrize("kind", KINDS, ids=["one", "joint", "gated"])
@pytest.mark.parametrize("m", [1, 20, 64, 128, 200, 1000, 4096])
def test_plans(m: int, kind: tuple[int, tuple[int, ...], bool]) -> None:
    """A step is a block, and a consumer's weights have one scale each: few tokens are columns."""
    x = problem(m, *kind)
    found = ranked(x, H200)
    assert found and (x.weights or found[0].turned == (m <= 64))
    for choice in found:
        own = transposed(x) if choice.turned else x
        rows, columns = own.span(choice.plan.tile)
        assert choice.plan.tile[2] == BLOCK and (choice.turned or BLOCK % columns == 0)
        assert columns * x.products <= BLOCK_WIDE[rows // 64]


@pytest.mark.parametrize("kind", KINDS, ids=["one", "joint", "gated"])
def test_assembled(kind: tuple[int, tuple[int, ...], bool]) -> None:
    """What large layers have, without spills; Plans that differ in no more than their programs
    once."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: nothing was assembled")
    found: dict = {}
    for m in (1, 16, 64, 128, 256, 4096):
        x = problem(m, *kind)
        tiles = {(c.turned, c.plan.tile): c for c in reversed(ranked(x, H200))}
        for choice in tiles.values():
            found.setdefault((choice.turned, replace(choice.plan, programs=0)), (x, choice.plan))
    texts = {}
    for number, ((turned, _), (x, plan)) in enumerate(found.items()):
        texts[f"{x.m} {number}"] = emit(plain(x, plan, turned), "entry", H200)[0]
    for made in assemble_all(texts, H200.cpu).values():
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0
