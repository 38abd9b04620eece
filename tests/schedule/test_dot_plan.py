"""Products on vectors: which Plans are chosen, and results over blocks of k, m and n.

Invariant: every Plan tried gives the float64 product to float32 rounding, whatever its blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import tilegrad
from tilegrad.compiler import compile as compile_module
from tilegrad.compiler.compile import compile_for, host, schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.target import AVX512
from tilegrad.graph import build
from tilegrad.ir.block import Block
from tilegrad.nn.functional import conv2d
from tilegrad.runtime.buffer import Buffer
from tilegrad.schedule import plan as plans
from tilegrad.schedule.dot import DotLowering
from tilegrad.schedule.plan import Plan


def chosen(m: int, k: int, n: int, cores: int = 2, **more: bool) -> Plan:
    """The Plan of a float32 product on a machine with 32 registers of 16 lanes."""
    target = dataclasses.replace(AVX512, cores=cores)
    return plans.Problem(1, m, k, n, target, dtypes.float32, **more).best()


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096])
def test_packed_columns_fit_and_leave_no_worker_idle(size: int) -> None:
    plan = chosen(size, size, size)
    assert plan.block_n * plan.block_k * 4 <= plans.SCRATCH_B
    rows, columns = -(-size // plan.block_m), -(-size // plan.block_n)
    assert rows * columns % 2 == 0


def test_a_shallow_block_lets_each_worker_pack_its_rows_once() -> None:
    plan = chosen(1024, 1024, 1024)
    assert (plan.block_m, plan.block_n) == (1024, 512) and plan.block_k < 512


@pytest.mark.parametrize("size", [2048, 4096])
def test_a_large_operand_is_packed_for_all_rows_at_once(size: int) -> None:
    plan = chosen(size, size, size)
    assert plan.block_m == size and plan.block_n * plan.block_k * 4 <= plans.SCRATCH_B


def test_sums_kept_apart_ask_for_deep_blocks() -> None:
    assert chosen(512, 768, 768, apart=True).block_k == 768
    assert chosen(512, 768, 768).block_k < 768


def test_the_slowest_worker_counts() -> None:
    plan = Plan(6, 4, 16, 512, 64, 512)
    targets = [dataclasses.replace(AVX512, cores=c) for c in (1, 2, 3)]
    one, two, three = (
        plans.Problem(1, 512, 512, 192, target, dtypes.float32).cost(plan) for target in targets
    )
    assert one == pytest.approx(3 * three) and two == pytest.approx(2 * three)


def product(m: int, k: int, n: int, plan: Plan, after: Any, monkeypatch: Any) -> Any:
    """after(a @ b) by a given Plan, and the same in float64."""
    monkeypatch.setattr(DotLowering, "choose", lambda self: plan)
    monkeypatch.setattr(compile_module, "_bodies", {})  # which a Plan is no part of the key of
    random = np.random.default_rng(0)
    values = [random.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n), (n,))]
    a, b, c = inputs = [build.input_(v.shape, dtypes.float32) for v in values]
    dot = build.dot(a, b, ((), ()), ((1,), (0,)))
    outputs = [after(dot, build.broadcast_to(c, (m, n)))]
    executable = compile_for(inputs, outputs, host())
    got = executable.run([Buffer.wrap(v) for v in values], None)[0].array((m, n), np.float32)
    wide = [v.astype(np.float64) for v in values]
    return got, wide[0] @ wide[1], wide[2]


BLOCKS = [(6, 2, 24, 64, 48), (6, 2, 40, 32, 16), (5, 3, 100, 96, 32), (4, 1, 8, 16, 400)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("sizes", [(24, 96, 64), (37, 101, 70), (7, 50, 33), (40, 3, 16)])
def test_blocks_of_every_kind_give_the_product(
    blocks: tuple[int, ...], sizes: tuple[int, int, int], monkeypatch: Any
) -> None:
    mr, across, block_m, block_n, block_k = blocks
    lanes = host().lanes(dtypes.float32)
    block_n = max(across * lanes, block_n // (across * lanes) * across * lanes)
    plan = Plan(min(mr, sizes[0]), across, lanes, block_m, block_n, block_k)
    got, expected, _ = product(*sizes, plan, lambda dot, c: dot, monkeypatch)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    got, expected, c = product(*sizes, plan, build.add, monkeypatch)  # sums are kept apart
    np.testing.assert_allclose(got, expected + c, rtol=0, atol=1e-5 * np.abs(expected).max())


def operations(block: Block, inside: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every Node of a Block with the names of the loops around it."""
    found = []
    for node in block.nodes:
        found.append((inside, node))
        for inner in node.blocks:
            found += operations(inner, (*inside, inner.name) if node.op.name == "loop" else inside)
    return found


def test_rows_of_the_next_panel_are_asked_for_while_this_one_is_computed() -> None:
    a, b = (build.input_((256, 256), dtypes.float32) for _ in range(2))
    dot = build.dot(a, b, ((), ()), ((1,), (0,)))
    (kernel,) = schedule_for((a, b), (dot,), AVX512).kernels
    body = kernel.steps[0].body
    inner = [
        node
        for names, node in operations(body.block)
        if names[-1:] == ("k",) and "column_panel" in names
    ]
    asked = [n for n in inner if n.op.name == "prefetch" and n.inputs[0] is body.parameters[0]]
    plan = body.notes["plan"]
    share = -(-plan.mr // (plan.block_n // plan.nr))  # rows by column panel
    assert len(asked) == share
    loads = [n for n in inner if n.op.name == "load"]
    assert not any(n.inputs[0] in body.parameters for n in loads)  # all others are packed


def test_a_long_sum_over_several_blocks() -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(s).astype(np.float32) for s in ((64, 1500), (1500, 96)))
    got = (tilegrad.tensor(a) @ tilegrad.tensor(b)).numpy()
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def packing(schedule: Any) -> set[tuple[str, ...]]:
    """The loops around the stores that pack b, of every Body with a Plan."""
    found = set()
    for kernel in schedule.kernels:
        for step in kernel.steps:
            body = getattr(step, "body", None)
            if body is None or not isinstance(body.notes.get("plan"), Plan):
                continue
            found |= {
                names[-2:]
                for names, node in operations(body.block)
                if node.op.name == "store" and names[-2:] in PACKING
            }
    return found


PACKING = {("k", "panel"), ("panel", "k")}


def test_lines_are_packed_in_order_and_windows_panel_by_panel() -> None:
    """Where the columns of a convolution lie is computed once a panel, not once an element."""
    a, b = (build.input_((256, 256), dtypes.float32) for _ in range(2))
    dot = build.dot(a, b, ((), ()), ((1,), (0,)))
    assert packing(schedule_for((a, b), (dot,), AVX512)) == {("k", "panel")}
    x, w = tilegrad.ones(1, 64, 28, 28), tilegrad.ones(64, 64, 3, 3)
    lowered = tilegrad.jit(lambda x, w: conv2d(x, w, padding=1)).lower(x, w)
    schedule = schedule_for(lowered.inputs, lowered.outputs, AVX512)
    assert packing(schedule) == {("panel", "k")}
