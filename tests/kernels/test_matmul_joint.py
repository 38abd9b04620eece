"""kernels/matmul/joint.py: several weights as one launch, against NumPy, checked and broken.

As `test_matmul.py` does it for one weight; the epilogue of gated products multiplies them.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import mutants
from product_bodies import joint_matmul
from simulator import simulate

from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body, fill
from tilegrad.tile.check import Finding, verify_body
from tilegrad.tile.prove import check_body

Case = tuple[Operands, WidePlan]


def operands(m: int, n: int, k: int, **more: object) -> Operands:
    """bfloat16 in and out."""
    return Operands(m, n, k, bfloat16, bfloat16, **more)  # type: ignore[arg-type]


APART = {"weights": (72, 136)}
GATED = {"weights": (72, 72), "gated": True}
TURNED = {"turned": True}
CASES: dict[str, Case] = {
    "apart": (operands(136, 208, 136, **APART), WidePlan((128, 64, 64), 3, 2)),
    "apart, weights (k, n)": (
        operands(136, 208, 136, b_along_k=False, **APART),
        WidePlan((128, 64, 64), 3, 3),
    ),
    "apart, three": (operands(72, 88, 72, weights=(64, 8, 16)), WidePlan((64, 64, 64), 2, 2)),
    "apart, cluster": (
        operands(264, 208, 136, **APART),
        WidePlan((128, 64, 64), 3, 2, cluster=2),
    ),
    "apart, split": (
        operands(72, 208, 136, **APART),
        WidePlan((128, 64, 64), 2, 10, staged=32, split=2),
    ),
    "apart, turned": (
        operands(208, 8, 136, **APART, **TURNED),
        WidePlan((64, 8, 64), 3, 2, 1, 8),
    ),
    "gated": (operands(136, 72, 136, **GATED), WidePlan((128, 128, 64), 3, 2)),
    "gated, all pieces at once": (
        operands(264, 72, 136, **GATED),
        WidePlan((128, 96, 64), 3, 2, staged=16, together=3),
    ),
    "gated, cluster": (
        operands(264, 72, 136, **GATED),
        WidePlan((128, 128, 64), 3, 2, cluster=2),
    ),
    "gated, split": (
        operands(72, 72, 136, **GATED),
        WidePlan((128, 128, 64), 2, 4, staged=32, split=2),
    ),
    "gated, three consumers": (
        operands(136, 72, 136, **GATED),
        WidePlan((192, 96, 64), 3, 2, staged=16),
    ),
    "gated, turned": (
        operands(72, 5, 136, **GATED, **TURNED),
        WidePlan((128, 8, 64), 3, 2, 1, 8),
    ),
}


def kernel(x: Operands, plan: WidePlan) -> Body:
    """The Body with its holes filled: nothing, or the product of the pieces."""
    body = joint_matmul(x, plan)
    if x.gated:
        return fill(body, "epilogue", lambda b, i, added: b.apply("multiply", i[0], i[1]))
    for number in range(len(x.weights)):
        body = fill(body, f"epilogue{number}", lambda b, i, added: i[0])
    return body


def numbers(x: Operands) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The memories of a launch, and the results in float64."""
    draw = np.random.default_rng(0)
    tokens = x.n if x.turned else x.m
    a = draw.standard_normal((tokens, x.k)).astype(x.dtype.numpy)
    weights = [draw.standard_normal((n, x.k)).astype(x.dtype.numpy) for n in x.weights]
    products = [a.astype(np.float64) @ w.T.astype(np.float64) for w in weights]
    if x.gated:
        products = [products[0] * products[1]]
    along = x.a_along_k if x.turned else x.b_along_k
    stored = [w if along else np.ascontiguousarray(w.T) for w in weights]
    results = [np.full(p.shape, np.nan, np.float32).astype(x.result.numpy) for p in products]
    return [a, *stored, *results], products


def agree(memories: list[np.ndarray], products: list[np.ndarray]) -> None:
    """Every result, up to the rounding of bfloat16."""
    for found, product in zip(memories[-len(products) :], products):
        np.testing.assert_allclose(
            found.astype(np.float64),
            product,
            rtol=2.0**-8,
            atol=1e-4 * float(np.abs(product).max()),
        )


def errors(body: Body) -> list[Finding]:
    """Findings of level 'error'."""
    return [f for f in check_body(body, H200) if f.severity == "error"]


@pytest.mark.parametrize("label", CASES)
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    x, plan = CASES[label]
    body = kernel(x, plan)
    verify_body(body, "placed", H200)
    assert not errors(body)
    memories, products = numbers(x)
    interpret.run(body, memories, seed=list(CASES).index(label))
    agree(memories, products)


@pytest.mark.parametrize(
    "label", ("apart, three", "gated, split", "gated, turned", "gated, all pieces at once")
)
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator."""
    x, plan = CASES[label]
    text, entry = emit(kernel(x, plan), "matmul", H200)
    memories, products = numbers(x)
    simulate(text, entry, memories)
    agree(memories, products)


# ---- broken in one place ------------------------------------------------------------------------

LONE = "the barrier of the only consumer may have any number"
EARLY = "at the start all stages are expected before any is waited for"
BROKEN: dict[str, tuple[Operands, WidePlan, dict[str, str]]] = {
    "apart": (
        operands(128, 192, 256, weights=(128, 64)),
        WidePlan((64, 64, 64), 3, 1, staged=32),
        {
            "expect 0 next stage": EARLY,
            **{f"named_sync {number} number + 1": LONE for number in range(4)},
        },
    ),
    "gated": (
        operands(128, 64, 256, weights=(64, 64), gated=True),
        WidePlan((64, 128, 64), 3, 1, staged=32),
        {
            "expect 0 next stage": EARLY,
            **{f"named_sync {number} number + 1": LONE for number in range(2)},
        },
    ),
}


def judge(body: Body, x: Operands, expected: list[np.ndarray]) -> str:
    """Who says that a Body is broken."""
    if errors(body):
        return "check"
    for seed in (None, 0):
        memories, _ = numbers(x)
        try:
            interpret.run(body, memories, seed=seed)
        except InternalError:
            return "interpreter"
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(memories, expected)):
            return "interpreter"
    return "nobody"


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), 3])
@pytest.mark.parametrize("name", BROKEN)
def test_every_mutant_is_caught(name: str, step: int) -> None:
    """Each barrier op, fence, wait and commit dropped or changed; the rest does no harm."""
    x, plan, harmless = BROKEN[name]
    body = kernel(x, plan)
    expected, _ = numbers(x)
    interpret.run(body, expected)
    by, missed = Counter[str](), set()
    tried = list(mutants.mutants(body))[::step]
    for label, broken in tried:
        found = judge(broken, x, expected)
        by[found] += 1
        if found == "nobody":
            missed.add(label)
    print(f"{name}: {sum(by.values())} mutants, caught by {dict(by)}")
    assert len(tried) > 10 and missed == set(harmless) & {label for label, _ in tried}
