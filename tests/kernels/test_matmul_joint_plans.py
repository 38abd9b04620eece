"""Plans of joint products: more kinds of them, what the model chooses, and sizes of a real model.

The interpreter runs each, the static check finds no fault in any Body, and what the model chooses
for the sizes of a real model is assembled: no spill, no stack frame, no serialised wgmma.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from assembled import assemble_all
from product_bodies import joint_matmul
from simulator import simulate

from tilegrad.core.dtype import DType, bfloat16, float16, float32
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.target import H200
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.joint import JointMatmul
from tilegrad.kernels.matmul.plan import choose, ranked, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan, tile_counts
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body, BodyBuilder, fill
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import require

ROUNDING = {float32: 1e-5, bfloat16: 2.0**-8, float16: 2.0**-10}


def together(
    m: int,
    weights: tuple[int, ...],
    k: int,
    gated: bool = False,
    along: bool = True,
    dtype: DType = bfloat16,
    result: DType | None = None,
) -> Operands:
    """The joint problem of m tokens."""
    n = weights[0] if gated else sum(weights)
    return Operands(m, n, k, dtype, result or dtype, along, along, weights=weights, gated=gated)


def gate(b, inputs: list[Node], _: object) -> Node:
    """silu(first) * second."""
    first, second = inputs[:2]
    one, zero = (b.constant(v, float32, first.shape) for v in (1.0, 0.0))
    below = b.apply("add", one, b.apply("exp", b.apply("subtract", zero, first)))
    return b.apply("multiply", b.apply("divide", first, below), second)


def body_of(x: Operands, plan: WidePlan) -> Body:
    """The kernel with epilogues that tell results apart: + the weight's number, or the gate."""
    body = joint_matmul(x, plan)
    if x.gated:
        return fill(body, "epilogue", gate)
    for i in range(len(x.weights)):

        def moved(b, inputs, _, i=i):
            return b.apply("add", inputs[0], b.constant(float(i), float32, inputs[0].shape))

        body = fill(body, f"epilogue{i}", moved)
    return body


def numbers(x: Operands, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the parameters hold, results unwritten; and the results in float64."""
    draw = np.random.default_rng(seed)
    tokens = x.n if x.turned else x.m
    along = (x.b_along_k, x.a_along_k) if x.turned else (x.a_along_k, x.b_along_k)
    made = [
        (draw.standard_normal((n, x.k)) / 4).astype(x.dtype.numpy) for n in (tokens, *x.weights)
    ]
    left, *right = (a.astype(np.float64) for a in made)
    products = [left @ w.T for w in right]
    expected = [p + i for i, p in enumerate(products)]
    if x.gated:
        expected = [products[0] / (1 + np.exp(-products[0])) * products[1]]
    stored = [
        np.ascontiguousarray(a if k else a.T)
        for a, k in zip(made, (along[0], *[along[1]] * len(right)))
    ]
    results = [np.full(e.shape, np.nan, np.float32).astype(x.result.numpy) for e in expected]
    return [*stored, *results], expected


def agree(found: list[np.ndarray], expected: list[np.ndarray], x: Operands) -> None:
    """Up to the rounding of the results and of the sums within."""
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            got.astype(np.float64),
            want,
            rtol=ROUNDING[x.result],
            atol=2e-5 * float(np.abs(want).max()),
        )


def proved(body: Body) -> None:
    """No fault, and nothing left unproved."""
    assert {f.rule for f in require(body, H200)} <= {"bank_conflict"}


def interpreted(x: Operands, plan: WidePlan, seed: int = 0) -> None:
    """Check the Body and run it on the Tile interpreter."""
    body = body_of(x, plan)
    verify_body(body, "placed", H200)
    proved(body)
    memories, expected = numbers(x, seed)
    interpret.run(body, memories, {})
    agree(memories[1 + len(x.weights) :], expected, x)


QKV, PAIR = (136, 72, 40), (136, 136)
PLANS = {
    "two tiles a program": (together(200, QKV, 136), WidePlan((128, 128, 64), 2, 2, 1, 32)),
    "dependent": (together(200, QKV, 200), WidePlan((128, 64, 64), 3, 3, 2, 32)),
    "two pieces at once": (together(130, QKV, 72),
                           WidePlan((128, 128, 64), 2, 2, 2, 32, together=2)),
    "all along rows": (together(200, (136, 72), 200, along=False),
                       WidePlan((128, 64, 64), 3, 2, 2, 64)),
    "float32 results": (together(100, (40, 24), 72, result=float32),
                        WidePlan((128, 64, 64), 2, 1, 1, 32)),
    "shared a": (together(200, QKV, 200), WidePlan((128, 64, 64), 3, 4, 2, 64, 2, True)),
    "turned, 128 rows": (transposed(together(8, (200, 40), 200)),
                         WidePlan((128, 8, 128), 3, 2, 1, 8)),
    "turned, split": (transposed(together(24, (136, 72), 400)),
                      WidePlan((64, 32, 64), 3, 10, 1, 16, split=2)),
    "gated, dependent": (together(136, PAIR, 72, True),
                         WidePlan((128, 128, 64), 2, 2, 2, 64)),
    "gated, float16": (together(72, PAIR, 72, True, dtype=float16),
                       WidePlan((128, 96, 64), 2, 1, 2, 16)),
    "gated, along rows": (together(200, PAIR, 200, True, False),
                          WidePlan((128, 128, 64), 3, 2, 2, 64)),
    "gated, shared a": (together(200, PAIR, 200, True),
                        WidePlan((128, 128, 64), 3, 2, 2, 64, 2, True)),
    "gated, turned, 256 rows": (transposed(together(24, PAIR, 200, True)),
                                WidePlan((256, 24, 64), 3, 2, 1, 24)),
    "gated, turned, split": (transposed(together(24, PAIR, 400, True)),
                             WidePlan((128, 32, 64), 3, 6, 1, 16, split=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    interpreted(*PLANS[name])


@pytest.mark.parametrize("name", ["shared a", "turned, split", "gated, turned, split"])
def test_simulated(name: str) -> None:
    x, plan = PLANS[name]
    text, entry = emit(body_of(x, plan), "joint", H200)
    memories, expected = numbers(x)
    simulate(text, entry, memories)
    agree(memories[1 + len(x.weights) :], expected, x)


@pytest.mark.parametrize("seed", range(8))
def test_what_the_model_chooses(seed: int) -> None:
    draw = random.Random(seed)
    m, k = draw.choice((1, 7, 33, 90, 129, 260)), 8 * draw.randint(1, 30)
    sizes = [8 * draw.randint(1, 30) for _ in range(3)]
    x = together(m, (sizes[0],) * 2 if seed % 2 else tuple(sizes), k, bool(seed % 2))
    found = choose(x, H200)
    interpreted(transposed(x) if found.turned else x, found.plan, seed)


def late(constant_first: bool) -> Body:
    """A kernel of which another one writes the second weight."""
    x = transposed(together(24, QKV, 200))
    uses = ("value", "constant", "value", "constant", "result", "result", "result")
    shapes = [(24, 200), *((n, 200) for n in QKV), *((24, n) for n in QKV)]
    b = BodyBuilder(
        "late",
        [(f"p{i}", Memory(s, bfloat16, use=u)) for i, (s, u) in enumerate(zip(shapes, uses))],
    )
    made = JointMatmul(
        x,
        WidePlan((64, 24, 64), 3, 5, 1, 24),
        b,
        b.parameters[0],
        b.parameters[1:4],
        b.parameters[4:],
        [lambda piece, where: piece] * 3,
    )
    if constant_first:
        made.a = made.weights[0]  # as if all weights were as the first
    return made.build()


def test_one_of_several_weights_varies() -> None:
    """A weight that another kernel writes is not read before that kernel is done."""
    proved(late(False))
    with pytest.raises(UserError, match="depend"):
        require(late(True), H200)


def test_refused() -> None:
    plan = WidePlan((128, 64, 64), 3, 2, 2, 32)
    with pytest.raises(InternalError, match="one size"):
        joint_matmul(replace(together(64, PAIR, 64, True), weights=(136, 128)), plan)
    with pytest.raises(InternalError, match="no batch"):
        joint_matmul(replace(together(64, QKV, 64), batch=2), plan)
    with pytest.raises(InternalError, match="64 rows"):
        joint_matmul(transposed(together(8, PAIR, 64, True)), WidePlan((64, 8, 64), 3, 2, 1, 8))


def test_no_tile_spans_two_weights() -> None:
    plan = WidePlan((128, 256, 64))
    assert tile_counts(together(256, (4096, 1000, 1000), 64), plan) == (2, 16 + 4 + 4)
    assert tile_counts(together(256, (300, 300), 64), plan) == (2, 4)
    assert tile_counts(together(256, (300, 300), 64, True), plan) == (2, 3)
    assert tile_counts(transposed(together(8, (300, 300), 64, True)), WidePlan((256, 8, 64))) == (
        3,
        1,
    )


# ---- sizes of a real model: 4096 -> 4096 / 1024 / 1024, and 4096 -> 2 x 14336 ------------------

TOKENS = (1, 16, 64, 512, 4096)


def real(m: int, gated: bool) -> Operands:
    """q/k/v or gate/up of a model with eight billion weights."""
    return together(m, (14336, 14336) if gated else (4096, 1024, 1024), 4096, gated)


@pytest.mark.parametrize("m", TOKENS)
def test_joint_is_expected_to_be_faster(m: int) -> None:
    apart = sum(
        choose(replace(real(m, False), n=n, weights=()), H200).seconds for n in (4096, 1024, 1024)
    )
    assert choose(real(m, False), H200).seconds < apart * (0.85 if m < 512 else 1.0)
    alone = 2 * choose(replace(real(m, True), weights=(), gated=False), H200).seconds
    again = m * 14336 * 2 / H200.peak_bytes()  # the products of one, read by the other
    assert choose(real(m, True), H200).seconds < alone + again


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
def test_real_sizes_assemble() -> None:
    texts = {}
    for m in TOKENS:
        for gated in (False, True):
            x = real(m, gated)
            best = ranked(x, H200)[0]
            body = body_of(transposed(x) if best.turned else x, best.plan)
            proved(body)
            texts[f"{m} {gated}"], _ = emit(body, "joint", H200)
    for name, made in assemble_all(texts, H200.cpu).items():
        assert made.warnings == [], name
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0, name
