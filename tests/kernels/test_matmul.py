"""kernels/matmul/wide.py: every kind of Plan against NumPy, checked, broken, simulated, assembled.

The interpreter runs roles (and the programs of a cluster) in a random order; the static check
finds no fault in any Body. Emitted PTX runs on the simulator at small sizes, and what the
model chooses for real sizes is assembled: no spill, no stack frame, no serialised wgmma.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))
sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))

from assembled import assemble_all
from interpreted import run_interpreted
from placed_builder import PlacedBuilder
from product_bodies import wide_matmul
from simulator import simulate
from wide_products import (
    EARLY,
    LONE,
    NN,
    ROUNDING,
    TN,
    TT,
    agree,
    break_all,
    errors,
    numbers,
    operands,
)

from tilegrad.core.dtype import bfloat16, float8_e4m3, float16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.graph import build
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.plan import choose, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.emit_placed import STORE
from tilegrad.tile import interpret
from tilegrad.tile.build import Body, fill
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import check_body


def matmul(x: Operands, plan: WidePlan) -> Body:
    """The kernel with an epilogue that changes nothing."""
    return fill(wide_matmul(x, plan), "epilogue", lambda b, inputs, added: inputs[0])


TURNED = {"turned": True}
E4M3 = {"dtype": float8_e4m3, "result": bfloat16}
CASES: dict[str, tuple[Operands, WidePlan]] = {
    "several tiles a program": (operands(264, 136, 200), WidePlan((128, 64, 64), 3, 2, 2)),
    "a (m, k) b (k, n)": (operands(136, 72, 136, **NN), WidePlan((128, 64, 64), 3, 2)),
    "a (k, m) b (n, k)": (operands(136, 72, 136, **TT), WidePlan((128, 64, 64), 3, 2)),
    "a (k, m) b (k, n)": (operands(136, 72, 136, **TN), WidePlan((128, 64, 64), 3, 2)),
    "batch": (operands(72, 72, 136, batch=3), WidePlan((128, 64, 64), 3, 4)),
    "batch, b (k, n)": (operands(72, 72, 72, batch=2, **NN), WidePlan((64, 64, 64), 2, 3)),
    "float16": (operands(72, 72, 72, float16), WidePlan((64, 64, 64), 2, 3)),
    "float16 to float32": (operands(72, 72, 72, float16, float32),
                           WidePlan((64, 64, 64), 2, 3, staged=32)),
    "bfloat16 to float32": (operands(72, 72, 72, bfloat16, float32),
                            WidePlan((128, 64, 64), 2, 1, staged=32)),
    "bfloat16 to float16": (operands(72, 72, 72, bfloat16, float16), WidePlan((128, 64, 64), 2, 1)),
    "float32": (operands(72, 72, 72, float32), WidePlan((64, 64, 32), 3, 3, staged=32)),
    "float8": (operands(72, 72, 208, **E4M3), WidePlan((64, 64, 128), 2, 3)),
    "float8 to float32": (operands(72, 72, 400, float8_e4m3, float32),
                          WidePlan((128, 64, 256), 2, 1, staged=32)),
    "float8, cluster along m": (operands(300, 72, 400, **E4M3),
                                WidePlan((128, 64, 128), 3, 2, cluster=2)),
    "float8, turned split": (operands(136, 16, 800, **E4M3, **TURNED),
                             WidePlan((64, 16, 128), 3, 6, 1, 8, split=2)),
    "one row of everything": (operands(1, 8, 8), WidePlan((64, 64, 64), 2, 1)),
    "odd rows": (operands(77, 72, 104), WidePlan((64, 64, 64), 4, 3)),
    "more programs than tiles": (operands(64, 64, 200), WidePlan((64, 64, 64), 2, 5)),
    "width 96": (operands(72, 200, 72), WidePlan((128, 96, 64), 3, 2, staged=32)),
    "width 160": (operands(72, 168, 72), WidePlan((128, 160, 64), 3, 2, staged=32)),
    "width 192": (operands(72, 200, 72), WidePlan((128, 192, 64), 3, 1)),
    "width 256": (operands(72, 264, 72), WidePlan((128, 256, 64), 3, 1)),
    "pieces three at a time": (operands(136, 200, 72),
                               WidePlan((128, 64, 64), 3, 2, staged=16, together=3)),
    "pieces two at a time": (operands(72, 200, 72), WidePlan((128, 192, 64), 3, 1, together=2)),
    "pieces two at a time, turned": (operands(200, 48, 72, **TURNED),
                                     WidePlan((64, 48, 64), 3, 1, 1, 16, together=2)),
    "late": (operands(136, 72, 200), WidePlan((128, 64, 64), 3, 2, early=False)),
    "early": (operands(136, 72, 200), WidePlan((128, 64, 64), 3, 2)),
    "few steps, early": (operands(136, 72, 64), WidePlan((128, 64, 64), 4, 2)),
    "turned": (operands(200, 24, 136, **TURNED), WidePlan((64, 24, 64), 3, 2, 1, 24)),
    "turned, one token": (operands(136, 1, 136, **TURNED),
                          WidePlan((64, 8, 128), 3, 2, 1, 8)),
    "turned, 256 rows": (operands(264, 8, 136, **TURNED), WidePlan((256, 8, 64), 3, 2, 1, 8)),
    "turned, weights (k, n)": (operands(136, 8, 136, a_along_k=False, **TURNED),
                               WidePlan((64, 8, 64), 3, 2, 1, 8)),
    "cluster along m": (operands(300, 72, 200), WidePlan((128, 64, 64), 3, 2, cluster=2)),
    "cluster along m, b (k, n)": (operands(300, 72, 136, **NN),
                                  WidePlan((128, 64, 64), 3, 2, cluster=2)),
    "cluster along m, dependent": (operands(300, 72, 200),
                                   WidePlan((128, 64, 64), 3, 2, cluster=2)),
    "cluster along n": (operands(136, 136, 200),
                        WidePlan((128, 64, 64), 3, 2, cluster=2, across=True)),
    "cluster along n, a (k, m)": (operands(136, 136, 200, **TT),
                                  WidePlan((128, 64, 64), 3, 2, cluster=2, across=True)),
    "cluster of four": (operands(200, 40, 200), WidePlan((64, 64, 64), 3, 4, cluster=4)),
    "cluster and batch": (operands(200, 72, 72, batch=2), WidePlan((128, 64, 64), 2, 4, cluster=2)),
    "turned cluster": (operands(200, 16, 136, **TURNED),
                       WidePlan((64, 16, 64), 3, 4, 1, 16, cluster=2)),
    "rows of tokens, width 40": (operands(24, 200, 200),
                                 WidePlan((64, 40, 128), 3, 5, staged=40)),
    "rows of tokens, width 72": (operands(77, 136, 136), WidePlan((128, 72, 64), 3, 2, staged=72)),
    "width 48 to float32": (operands(40, 96, 72, bfloat16, float32),
                            WidePlan((64, 48, 64), 3, 2, staged=48)),
    "width 104, batch": (operands(40, 104, 72, batch=2), WidePlan((64, 104, 64), 3, 2, staged=104)),
    "three consumers": (operands(150, 136, 136),
                        WidePlan((192, 72, 64), 3, 2, staged=72)),
    "three consumers, split": (operands(192, 80, 400),
                               WidePlan((192, 80, 64), 3, 2, staged=40, split=2)),
    "split 2, rows of tokens": (operands(40, 96, 400),
                                WidePlan((64, 48, 128), 2, 4, staged=24, split=2)),
    "split 2": (operands(72, 72, 200), WidePlan((64, 64, 64), 2, 8, staged=32, split=2)),
    "split 3": (operands(72, 96, 328), WidePlan((128, 96, 64), 2, 3, staged=32, split=3)),
    "split 4": (operands(72, 64, 520), WidePlan((128, 64, 64), 2, 4, staged=16, split=4)),
    "split, a part with nothing": (operands(72, 64, 136),
                                   WidePlan((128, 64, 64), 2, 4, staged=16, split=4)),
    "turned split": (operands(136, 16, 400, **TURNED),
                     WidePlan((64, 16, 64), 3, 6, 1, 8, split=2)),
    "split and cluster along m": (operands(200, 64, 200),
                                  WidePlan((64, 64, 64), 2, 8, staged=32, split=2, cluster=2)),
    "split and cluster along n": (operands(72, 200, 200),
                                  WidePlan((128, 96, 64), 2, 8, staged=48, split=2, cluster=2,
                                           across=True)),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", CASES)
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    x, plan = CASES[label]
    body = matmul(x, plan)
    verify_body(body, "placed", H200)
    assert not errors(body)
    memories, product = numbers(x)
    interpret.run(body, memories, seed=list(CASES).index(label))
    agree(memories[2], product, x)


@pytest.mark.parametrize(
    "plan, why",
    [
        (WidePlan((128, 64, 64), stages=1), "two stages"),
        (WidePlan((128, 64, 64), programs=3, cluster=2), "whole clusters"),
        (WidePlan((128, 64, 64), programs=3, split=3), "in eights"),
        (WidePlan((128, 64, 64), programs=2, split=2, staged=32), "one tile"),
        (WidePlan((128, 96, 64), staged=64), "staged pieces"),
        (WidePlan((64, 64, 64), programs=2, cluster=2, across=True), "64 rows a program"),
    ],
)
def test_plans_that_cannot_be_kept(plan: WidePlan, why: str) -> None:
    """Each is refused with its reason."""
    with pytest.raises(InternalError, match=why):
        wide_matmul(operands(512, 512, 512), plan)


@pytest.mark.parametrize("more", ({}, NN, TT, TN, {"batch": 2}))
def test_portable_twin(more: dict[str, object]) -> None:
    """The plain tiled matmul that every Target takes gives the same product."""
    x = operands(40, 48, 72, bfloat16, float32, **more)
    (a, b, _), product = numbers(x)
    lead = int(x.batch != 1)
    batch = ((0,), (0,)) if lead else ((), ())
    nodes = [build.input_(v.shape, x.dtype) for v in (a, b)]
    dot = build.dot(*nodes, batch=batch, contract=((lead + x.a_along_k,), (lead + x.b_along_k,)))
    plain = replace(H200, matrix=())
    (found,) = run_interpreted(plain, nodes, [build.cast(dot, float32)], [a, b])
    memories, _ = numbers(x)
    interpret.run(matmul(x, WidePlan((64, 64, 64), 2, 2, staged=32)), memories)
    rounded = memories[2].astype(dot.dtype.numpy).astype(np.float32)
    agree(found, product, replace(x, result=dot.dtype))
    np.testing.assert_allclose(found, rounded, rtol=2 * ROUNDING[dot.dtype], atol=1e-4)


# ---- broken in one place ------------------------------------------------------------------------

ONCE = "a program with a split k has one tile: nobody waits for the last stage it gives back"
FIRST = "a program with a split k writes each staged place once: no copy out of it came before"
BROKEN: dict[str, tuple[Operands, WidePlan, dict[str, str]]] = {
    "plain": (
        operands(192, 192, 320),
        WidePlan((128, 64, 64), 3, 3, staged=32),
        {
            "expect 0 next stage": EARLY,
            "named_sync 2 number + 1": LONE,
            "named_sync 3 number + 1": LONE,
        },
    ),
    "cluster": (
        operands(256, 128, 256),
        WidePlan((128, 64, 64), 2, 2, staged=32, cluster=2),
        {
            "expect 0 next stage": EARLY,
            "named_sync 2 number + 1": LONE,
            "named_sync 3 number + 1": LONE,
        },
    ),
    "split": (
        operands(128, 64, 320),
        WidePlan((128, 64, 64), 2, 2, staged=32, split=2),
        {
            "expect 0 next stage": EARLY,
            "named_sync 1 number + 1": LONE,
            "arrive 1 dropped": ONCE,
            "arrive 3 dropped": ONCE,
            "matrix_wait after arrive (22)": ONCE,
            "matrix_wait after arrive (42)": ONCE,
            "wait_copies 0 dropped": FIRST,
            "wait_copies 0 one more pending": FIRST,
            "wait_copies 2 dropped": FIRST,
            "wait_copies 2 one more pending": FIRST,
            "wait_copies after write_place (27)": FIRST,
            "wait_copies after write_place (47)": FIRST,
        },
    ),
}


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), 6])
@pytest.mark.parametrize("name", BROKEN)
def test_every_mutant_is_caught(name: str, step: int) -> None:
    """Each barrier op, fence, wait and commit dropped or changed; the rest does no harm."""
    x, plan, harmless = BROKEN[name]
    break_all(name, matmul(x, plan), x, harmless, step=step)


# ---- PTX ----------------------------------------------------------------------------------------

SIMULATED = (
    "a (k, m) b (k, n)",
    "float16 to float32",
    "odd rows",
    "turned, one token",
    "split 3",
    "split 4",
    "rows of tokens, width 40",
    "rows of tokens, width 72",
    "split 2, rows of tokens",
    "cluster along m, dependent",
    "cluster along n",
    "split and cluster along n",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", SIMULATED)
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator, which checks races and fences of its own."""
    x, plan = CASES[label]
    text, entry = emit(matmul(x, plan), "matmul", H200)
    memories, product = numbers(x)
    simulate(text, entry, memories)
    agree(memories[2], product, x)


def test_simulated_tf32() -> None:
    """float32 operands lose 13 bits of their fractions to tf32, and nothing more."""
    x, plan = CASES["float32"]
    text, entry = emit(matmul(x, plan), "matmul", H200)
    memories, product = numbers(x)
    simulate(text, entry, memories)
    agree(memories[2], product, x, inner=2e-3)
    assert np.abs(memories[2] - product).max() > 1e-5 * np.abs(product).max()


@pytest.mark.parametrize("split, wide", [(2, 32), (4, 16)])
def test_parts_are_exchanged_as_threads_hold_them(split: int, wide: int) -> None:
    """16 bytes a thread, side by side; a program's own part stays where it is."""
    body = matmul(operands(128, 64, 512), WidePlan((128, 64, 64), 3, split, 8, wide, split=split))
    text, _ = emit(body, "matmul", H200)
    each = (split - 1) * 64 * wide // 128 // 4  # of one consumer's threads
    for form in (STORE, "ld.shared"):
        found = re.findall(rf"\t{re.escape(form)}\S*", text)
        assert found == [f"\t{form}.v4.b32"] * (2 * each)
    assert "st.shared::cluster" not in text
    assert not [f for f in check_body(body, H200) if f.rule == "bank_conflict"]


def test_a_place_as_threads_hold_it_is_read_alike() -> None:
    """It can be read and written whole, by who holds the Tile in the same way; by nobody else."""

    def body(order: tuple[int, int], copied: bool) -> Body:
        b = PlacedBuilder(
            "held",
            [
                ("x", Memory((64, 64), float32, use="value")),
                ("y", Memory((64, 64), float32, use="result")),
            ],
        )
        place = b.allocate((64, 64), float32, "shared", "held")
        b.write(place, b.load(b.parameters[0], (0, 0), (64, 64), (0, 1)))
        if copied:
            b.copy_store(b.parameters[1], (0, 0), (0, 1), place)
        b.store(b.parameters[1], b.read(place), (0, 0), order)
        return b.finish((1,))

    text, entry = emit(body((0, 1), False), "held", H200)
    values = [np.arange(4096, dtype=np.float32).reshape(64, 64), np.zeros((64, 64), np.float32)]
    simulate(text, entry, values)
    np.testing.assert_array_equal(values[0], values[1])
    for order, copied in (((1, 0), False), ((0, 1), True)):
        with pytest.raises(InternalError, match="held"):
            emit(body(order, copied), "held", H200)


LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SIZES = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)


def real_sizes() -> Iterator[Operands]:
    """The layers of an LLM, and sizes that no table holds; other dtypes and transposes."""
    for n, k in LAYERS:
        yield from (operands(m, n, k) for m in SIZES)
    draw = random.Random(0)
    for number in range(20):
        n, k = draw.randrange(1024, 16384, 64), draw.randrange(1024, 16384, 64)
        yield operands((1, 8, 32, 64, 128, 192, 512, 2048, 8192)[number % 9], n, k)
    for m in (8, 64, 128, 2048):
        yield operands(m, 4096, 4096, float16, float32)
        yield operands(m, 4096, 4096, float32)
        yield from (operands(m, n, k, **E4M3) for n, k in ((4096, 14336), (28672, 4096)))
        yield operands(m, 4096, 4096, **NN)


def test_assembled() -> None:
    """What the model chooses for real sizes: checked, no spill, no stack frame, no C75xx."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the library's matmuls were not assembled")
    texts: dict[str, str] = {}
    for x in real_sizes():
        choice = choose(x, H200)
        own = transposed(x) if choice.turned else x
        # what only counts tiles and steps changes constants of the text, not its shape
        label = str((replace(choice.plan, programs=0, group=0), replace(own, m=0, n=0, k=0)))
        if label not in texts:
            body = matmul(own, choice.plan)
            assert not errors(body), label
            texts[label] = emit(body, "matmul", H200)[0]
    for label, made in assemble_all(texts, H200.cpu).items():
        made.check_library(label)
