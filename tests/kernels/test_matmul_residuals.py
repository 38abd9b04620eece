"""kernels/matmul/wide.py: matrices like the result that the epilogue reads come through the ring.

As in test_matmul: interpreted against NumPy, checked, broken in every place, simulated and
assembled; and the epilogue's reads are ldmatrix, not loads from memory.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

from assembled import assemble_all
from product_bodies import wide_matmul
from simulator import simulate
from wide_products import EARLY, LONE, NN, TN, TT, agree, break_all, errors, numbers, operands

from tilegrad.core.dtype import float16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.kernels.matmul.plan import choose
from tilegrad.kernels.matmul.shape import Operands, WidePlan, in_ring
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body, fill
from tilegrad.tile.check import verify_body


def residuals(x: Operands, plan: WidePlan, count: int = 1) -> Body:
    """a @ b + r0 + 2 r1 + 3 r2 ..."""

    def add(b, inputs, _):
        total = inputs[0]
        for number, r in enumerate(inputs[len(inputs) - count :]):
            scale = b.constant(number + 1.0, float32, total.shape)
            more = b.apply("multiply", b.cast(r, float32), scale)
            total = b.apply("add", total, more)
        return total

    return fill(wide_matmul(x, plan, residuals=count), "epilogue", add)


def given(x: Operands, count: int = 1) -> tuple[list[np.ndarray], np.ndarray]:
    """What the parameters hold, and the result in float64."""
    memories, product = numbers(x)
    draw = np.random.default_rng(1)
    near = [(3 * draw.standard_normal(product.shape)).astype(x.dtype.numpy) for _ in range(count)]
    wanted = product + sum((n + 1) * r.astype(np.float64) for n, r in enumerate(near))
    return [*memories, *near], wanted


CASES: dict[str, tuple[Operands, WidePlan, int]] = {
    "several tiles a program": (operands(264, 136, 200), WidePlan((128, 64, 64), 3, 2, 2), 1),
    "several chunks": (operands(136, 200, 136), WidePlan((128, 128, 64), 3, 2), 1),
    "more chunks than stages": (operands(72, 264, 72, **NN), WidePlan((64, 256, 64), 2, 1), 1),
    "two matrices": (operands(136, 136, 136), WidePlan((128, 128, 64), 3, 2), 2),
    "three matrices, narrow pieces": (operands(72, 96, 72),
                                      WidePlan((64, 96, 64), 2, 2, staged=16), 3),
    "a chunk that is half outside": (operands(72, 200, 136),
                                     WidePlan((128, 96, 64), 3, 2, staged=32), 1),
    "a (k, m) b (k, n)": (operands(136, 72, 136, **TN), WidePlan((128, 64, 64), 3, 2), 1),
    "a (k, m) b (n, k)": (operands(136, 72, 136, **TT), WidePlan((128, 64, 64), 3, 2), 1),
    "a (m, k) b (k, n)": (operands(136, 72, 136, **NN), WidePlan((128, 64, 64), 3, 2), 1),
    "depth 128": (operands(136, 136, 136), WidePlan((64, 128, 128), 2, 2), 1),
    "depth 128, two chunks in a stage": (operands(136, 264, 136),
                                         WidePlan((128, 256, 128), 2, 2), 1),
    "four chunks in a stage": (operands(72, 264, 72), WidePlan((64, 256, 64), 2, 2), 1),
    "several chunks, b (k, n)": (operands(136, 136, 136, **NN), WidePlan((128, 128, 64), 3, 2), 1),
    "batch": (operands(72, 136, 136, batch=3), WidePlan((128, 128, 64), 3, 4), 1),
    "float16 to float32": (operands(72, 72, 72, float16, float32),
                           WidePlan((64, 64, 64), 2, 3, staged=32), 1),
    "float32": (operands(72, 72, 72, float32), WidePlan((64, 64, 32), 3, 3, staged=32), 1),
    "pieces two at a time": (operands(72, 200, 72),
                             WidePlan((128, 192, 64), 3, 1, staged=32, together=2), 1),
    "few steps, early": (operands(136, 136, 64),
                         WidePlan((128, 128, 64), 4, 2), 1),
    "late": (operands(136, 72, 200), WidePlan((128, 64, 64), 3, 2, early=False), 1),
    "cluster along m": (operands(300, 136, 200),
                        WidePlan((128, 128, 64), 3, 2, cluster=2), 1),
    "cluster along n": (operands(136, 264, 200),
                        WidePlan((128, 128, 64), 3, 2, cluster=2, across=True), 2),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", CASES)
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    x, plan, count = CASES[label]
    body = residuals(x, plan, count)
    verify_body(body, "placed", H200)
    assert not errors(body)
    memories, wanted = given(x, count)
    interpret.run(body, memories, seed=list(CASES).index(label))
    agree(memories[2], wanted, x)


SIMULATED = (
    "more chunks than stages",
    "two matrices",
    "three matrices, narrow pieces",
    "a chunk that is half outside",
    "a (k, m) b (k, n)",
    "depth 128",
    "batch",
    "depth 128, two chunks in a stage",
    "four chunks in a stage",
    "float32",
    "pieces two at a time",
    "cluster along m",
    "cluster along n",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", SIMULATED)
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator, which checks races and fences of its own."""
    x, plan, count = CASES[label]
    text, entry = emit(residuals(x, plan, count), "matmul", H200)
    assert ("ldmatrix" in text or x.dtype is float32) and "ld.global" not in text
    memories, wanted = given(x, count)
    simulate(text, entry, memories)
    agree(memories[2], wanted, x, 1e-3 if x.dtype is float32 else 1e-5)  # products are of tf32


@pytest.mark.parametrize(
    "x, plan, dtype",
    [
        (operands(512, 8, 512, turned=True), WidePlan((64, 8, 64), 3, 1, staged=8), None),
        (operands(128, 64, 512), WidePlan((128, 64, 64), 2, 2, staged=32, split=2), None),
        (operands(512, 512, 512), WidePlan((128, 64, 64), 3), float32),
        (operands(512, 512, 512, a_along_k=False), WidePlan((128, 128, 128), 2), None),
        (operands(512, 512, 512), WidePlan((128, 32, 64), 3, staged=32), None),
    ],
)
def test_what_no_ring_brings(x: Operands, plan: WidePlan, dtype: object) -> None:
    """Turned operands, a split k, other dtypes and other widths: refused, if asked for."""
    assert not in_ring(x, plan, dtype or x.dtype)  # type: ignore[arg-type]
    if dtype is None:
        with pytest.raises(InternalError, match="no ring"):
            wide_matmul(x, plan, residuals=1)


BROKEN: dict[str, tuple[Operands, WidePlan, dict[str, str]]] = {
    "beside": (
        operands(128, 256, 128),
        WidePlan((128, 128, 64), 3, 1, staged=64),
        {"named_sync 2 number + 1": LONE, "named_sync 3 number + 1": LONE},
    ),
    "beside, cluster": (
        operands(256, 192, 128),
        WidePlan((128, 64, 64), 2, 2, staged=64, cluster=2),
        {"expect 0 next stage": EARLY, "named_sync 1 number + 1": LONE},
    ),
}


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), 6])
@pytest.mark.parametrize("name", BROKEN)
def test_every_mutant_is_caught(name: str, step: int) -> None:
    """Each barrier op, fence, wait and commit dropped or changed; the rest does no harm."""
    x, plan, harmless = BROKEN[name]
    break_all(name, residuals(x, plan), x, harmless, given, step)


def counted(text: str) -> Counter[str]:
    """Instructions by the first word of their names."""
    return Counter(re.findall(r"^\t(?:@!?%\w+ )?(ldmatrix|ld\.global|stmatrix)", text, re.M))


@pytest.mark.parametrize(
    "m", [2048, *(pytest.param(m, marks=pytest.mark.slow) for m in (512, 8192))]
)
def test_assembled(m: int) -> None:
    """What the model chooses for real sizes: checked, no spill, no stack frame, no C75xx."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the library's matmuls were not assembled")
    texts: dict[str, str] = {}
    for n, k in ((14336, 4096), (4096, 4096), (4096, 14336), (6144, 4096)):
        x = operands(m, n, k)
        plan = choose(x, H200).plan
        assert in_ring(x, plan, x.dtype)
        for count in (1, 2):
            body = residuals(x, plan, count)
            assert not errors(body), (x, plan)
            text = texts[f"{count} beside, {x}, {plan}"] = emit(body, "matmul", H200)[0]
            chunks = -(-plan.tile[1] // 64)
            assert counted(text)["ldmatrix"] == 2 * count * 4 * chunks
            assert not counted(text)["ld.global"]
    for label, made in assemble_all(texts, H200.cpu).items():
        made.check_library(label)
