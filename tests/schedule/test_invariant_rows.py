"""The level `invariant`, compiled: random row-wise programs give a row the same bits whatever the
number of rows, and whether that is known when they are compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreted import run_interpreted
from row_programs import RowProgram

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.config import override
from tilegrad.core.dtype import DType, bfloat16, float32
from tilegrad.core.target import A100, AVX2, AVX512, AVX512_AMX, H200, NEON, Target
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.schedule import Launch
from tilegrad.tile import ops as tile_ops
from tilegrad.tile.check import walk

COUNTS = (1, 3, 40)
MOST = 40


def outputs(program: RowProgram, level: str) -> dict[str, Any]:
    """Results for some numbers of rows, as bits of float32."""
    found = {}
    with override(determinism=level):
        for count in COUNTS:
            x = tg.tensor(program.rows(count)).to(program.dtype)
            found[str(count)] = tg.jit(program.__call__)(x).to(tg.float32).numpy().view(np.uint32)
        with override(threads=3):
            x = tg.tensor(program.rows(3)).to(program.dtype)
            found["threads"] = tg.jit(program.__call__)(x).to(tg.float32).numpy().view(np.uint32)
        run = tg.jit(program.__call__, dynamic={"x": {0: ("rows", 1, 128)}})
        for count in (1, MOST):
            x = tg.tensor(program.rows(count)).to(program.dtype)
            found[f"symbol {count}"] = run(x).to(tg.float32).numpy().view(np.uint32)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", (0, 1, 2, 4, 8, 9, 12, 17))
def test_rows_do_not_depend_on_their_number(seed: int) -> None:
    program = RowProgram(seed, tg.bfloat16 if seed % 3 == 2 else tg.float32)
    found = outputs(program, "invariant")
    whole = found[str(MOST)]
    assert np.isfinite(whole.view(np.float32)).all()
    for name, got in found.items():
        np.testing.assert_array_equal(got, whole[: len(got)], err_msg=f"{program.names}: {name}")


# ---- machines that are not here -----------------------------------------------------------------


WIDTH, HIDDEN = 64, 640  # more than one block of k


def row_graph(rows: Any, dtype: DType) -> tuple[list[Node], list[Node]]:
    """Norm, product, gate, product with a residual, softmax; inputs and outputs."""
    shapes = [(rows, WIDTH), (WIDTH,), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    x, weight, up, down = inputs = [build.input_(shape, dtype) for shape in shapes]

    def over(y: Node, like: Node) -> Node:
        return build.broadcast_to(build.reshape(y, (*like.shape[:-1], 1)), like.shape)

    wide = build.cast(x, float32)
    squares = build.sum_(build.multiply(wide, wide), (1,))
    root = ops.reciprocal(ops.square_root(build.add(build.multiply(squares, 1 / WIDTH), 1e-5)))
    norm = build.multiply(build.cast(build.multiply(wide, over(root, wide)), dtype), weight)
    inner = build.dot(norm, up, ((), ()), ((1,), (1,)), dtype)
    inner = build.multiply(inner, ops.sigmoid(inner))
    y = build.add(build.dot(inner, down, ((), ()), ((1,), (1,)), dtype), x)
    shifted = build.subtract(y, over(ops.max_(y, axes=(1,)), y))
    e = ops.exp(build.cast(shifted, float32))
    return inputs, [y, build.divide(e, over(build.sum_(e, (1,)), e))]


def drawn(dtype: DType, rows: int) -> list[Any]:
    random = np.random.default_rng(4)
    shapes = [(64, WIDTH), (WIDTH,), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    x, *weights = [(random.standard_normal(s) * s[-1] ** -0.25).astype(dtype.numpy) for s in shapes]
    return [x[:rows], *weights]


@pytest.mark.parametrize(
    ("target", "dtype"),
    [(AVX512, float32), (AVX512_AMX, bfloat16), (A100, bfloat16), (H200, bfloat16)],
    ids=["avx512", "amx", "a100", "h200"],
)
def test_rows_of_machines_that_are_not_here(target: Target, dtype: DType) -> None:
    """The Bodies of other machines, interpreted: one row, few, and as many as make two tiles."""
    found = []
    with override(determinism="invariant"):
        for rows in (1, 5, 40):
            inputs, outputs = row_graph(rows, dtype)
            found.append(run_interpreted(target, inputs, outputs, drawn(dtype, rows)))
    for got in found[:-1]:
        for a, b in zip(got, found[-1]):
            np.testing.assert_array_equal(a.view(np.uint8), b[: len(a)].view(np.uint8))


@pytest.mark.parametrize("target", [AVX512, A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["alone", "batch"])
def test_products_of_few(target: Target, lead: tuple[int, ...]) -> None:
    """Tiles are as large as those of many rows: of a result of one element, one is stored."""
    axis, random = len(lead), np.random.default_rng(0)
    for m, n in ((1, 1), (1, 2), (2, 1), (3, 5)):
        values = [random.standard_normal((*lead, s, 200)).astype(np.float32) for s in (m, n)]
        x, y = (build.input_(v.shape, float32) for v in values)
        batch = (tuple(range(axis)),) * 2
        result = build.add(build.dot(x, y, batch, ((axis + 1,), (axis + 1,)), float32), 1.0)
        with override(determinism="invariant"):
            (got,) = run_interpreted(target, [x, y], [result], values)
        np.testing.assert_allclose(got, values[0] @ values[1].swapaxes(-1, -2) + 1, 1e-4, 1e-4)


def orders(target: Target, rows: Any, dtype: DType) -> list[Any]:
    """Of every launch what sets the order of its sums: the steps of k of its Plan, its threads, and
    the lengths of what it reduces."""
    inputs, outputs = row_graph(rows, dtype)
    schedule = schedule_for(inputs, outputs, target)
    found: list[Any] = []
    for body in (s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)):
        reduced = [
            (n.attrs["kind"], n.inputs[0].shape[n.attrs["axis"]])
            for n, _ in walk(body.block)
            if n.op is tile_ops.reduce and n.attrs["kind"] == "sum"
        ]
        plan = body.notes.get("plan")
        if plan is None:
            found.append((reduced, body.notes.get("warps")))
        elif hasattr(plan, "block_k"):
            found.append((plan.block_k, plan.unit))
        else:
            found.append((getattr(plan, "tile", plan), getattr(plan, "split", 1), reduced))
    return found


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        (AVX2, float32),
        (AVX512, float32),
        (AVX512, bfloat16),
        (NEON, float32),
        (A100, bfloat16),
        (H200, bfloat16),
        (H200, float32),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_one_plan_whatever_the_number_of_rows(target: Target, dtype: DType) -> None:
    several = (1, 2, 40, 300, 5000, symbol("rows", 1, 4096))
    with override(determinism="invariant"):
        found = [orders(target, rows, dtype) for rows in several]
    assert all(one == found[0] for one in found), found
    others = [orders(target, rows, dtype) for rows in several]
    assert any(one != others[0] for one in others), "the level changes nothing here"
