"""kernels/quantised: products of groups of rows with quantised weights of their own, every Format
against float64, on CPUs and as PTX on the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from assembled import assemble_all
from quantised_rows import decode_bound, prefill_bound, random_rows
from simulated import run_graph
from simulator import simulate

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import fitted
from tilegrad.core import format as formats
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float16, float32, int32, uint8
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import A100, AVX2, AVX512, AVX512_AMX, H200, NEON, Target
from tilegrad.exchange.mapped import Stored
from tilegrad.graph import build, ops
from tilegrad.ir.symbol import high, symbol
from tilegrad.ir.types import product as product_of
from tilegrad.kernels.grouped import list_sizes, most_blocks
from tilegrad.kernels.quantised import cpu, gpu
from tilegrad.kernels.quantised.shape import QuantisedShape
from tilegrad.targets.llvm.emit import emit as emit_vectors
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor.matmul import grouped_dot
from tilegrad.tensor.stored import stored
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import check_body

OFFSETS = np.array([0, 3, 3, 30, 31, 33], np.int32)  # one group has no rows
GROUPS, COUNT = len(OFFSETS) - 1, int(OFFSETS[-1])


class Case:
    """Rows in groups with random weights, and their products in float64."""

    def __init__(self, form: Format, rows: int, columns: int, dtype: Any = np.float32) -> None:
        self.form, self.rows, self.columns = form, rows, columns
        self.raw = random_rows(form, GROUPS * rows, columns)
        self.weights = form.to_float32(self.raw).astype(np.float64).reshape(GROUPS, rows, columns)
        draw = np.random.default_rng(1).standard_normal((COUNT, columns))
        self.x = draw.astype(dtype)

    def shape(self, dtype: Any = float32, tokens: Any = COUNT) -> QuantisedShape:
        return QuantisedShape(
            self.form, GROUPS * self.rows, self.columns, tokens, dtype, groups=GROUPS
        )

    def each(self, function: Any) -> np.ndarray:
        """What a function gives of each group's rows and weights."""
        rows = np.split(self.x.astype(np.float64), OFFSETS[1:-1])
        given = zip(rows, self.weights)
        return np.concatenate([function(x, w) for x, w in given if len(x)])

    def error(self, got: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.abs(got.astype(np.float64) - self.each(lambda x, w: x @ w.T))
        return found

    def parts(self, kernels: Any) -> list[np.ndarray]:
        made = kernels.pack(self.shape(), self.raw)
        return [made[name] for name, _, _ in kernels.parts(self.shape())]

    def stored(self) -> Stored:
        shape = (GROUPS, self.rows, self.columns)
        return Stored("experts", shape, self.form, self.raw.reshape(GROUPS, self.rows, -1))


def close_on_cpu(case: Case, got: np.ndarray) -> None:
    bounds = (case.each(decode_bound), case.each(prefill_bound))
    assert (case.error(got) < np.maximum(*bounds)).all()


# ---- CPUs ---------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", QUANTISED, ids=str)
@pytest.mark.parametrize("target", [AVX512, AVX512_AMX, AVX2, NEON], ids=lambda t: t.name)
def test_interpreted(target: Target, form: Format) -> None:
    case = Case(form, 16, max(64, form.block))
    callee = cpu.grouped_callee(case.shape(), target, 0)
    for body, _ in callee.launches:
        verify_body(body, "portable", target)
        emit_vectors(fitted(body, target), "kernel", target)
    close_on_cpu(case, callee.interpret(case.x, OFFSETS, *case.parts(cpu))[0])


@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_on_this_machine(form: Format) -> None:
    """What a jitted function makes of weights of a file; nothing is unpacked."""
    case = Case(form, 48, 256)
    weights = stored(case.stored())

    @tg.jit
    def multiply(x: Any, offsets: Any) -> Any:
        return grouped_dot(x, weights, offsets)

    close_on_cpu(case, multiply(tg.tensor(case.x), tg.tensor(OFFSETS)).numpy())


def test_few_rows_and_one() -> None:
    case = Case(formats.Q4_0, 16, 64)
    weights = stored(case.stored())
    for offsets in ([0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]):
        ends = np.array(offsets, np.int32)
        x = case.x[: ends[-1]]
        got = grouped_dot(tg.tensor(x), weights, tg.tensor(ends)).numpy()
        owners = np.repeat(np.arange(GROUPS), np.diff(ends))
        want = np.stack([case.weights[g] @ row for g, row in zip(owners, x.astype(np.float64))])
        np.testing.assert_allclose(got, want, atol=1e-3)


def test_a_sum_is_the_same_for_any_number_of_rows() -> None:
    case = Case(formats.Q4_1, 32, 64)
    weights = stored(case.stored())
    few = np.minimum(OFFSETS, 3).astype(np.int32)
    with override(determinism="invariant"):
        whole = grouped_dot(tg.tensor(case.x), weights, tg.tensor(OFFSETS)).numpy()
        some = grouped_dot(tg.tensor(case.x[:3]), weights, tg.tensor(few)).numpy()
    np.testing.assert_array_equal(whole[:3], some)


def test_the_reason_for_no_kernel() -> None:
    shape = QuantisedShape(formats.Q4_0, 5 * 20, 64, 8, groups=5)
    for kernels, target in ((cpu, AVX512), (gpu, H200)):
        assert "rows of a group" in kernels.why_not(shape, target)


@pytest.mark.parametrize("target", [AVX512, NEON, A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_no_value_of_all_weights(target: Target, dtype: Any) -> None:
    """A Schedule reads the parts alone: no Slot holds what all groups' weights unpack to."""
    rows = symbol("rows", 1, 64)
    raw = build.input_((GROUPS, 256, formats.Q4_0.row_bytes(512)), uint8)
    x, offsets = build.input_((rows, 512), dtype), build.input_((GROUPS + 1,), int32)
    weights = build.unpack(raw, "Q4_0", dtype)
    product = ops.grouped_dot(x, weights, offsets, axis=2, block=0)
    found = schedule_for([x, offsets, raw], [product], target)
    sizes = [high(product_of(slot.type.shape)) for slot in found.slots]
    assert len(found.preparing) == 1 and max(sizes) < GROUPS * 256 * 512


# ---- GPUs ---------------------------------------------------------------------------------------


def blocks_of(block: int) -> np.ndarray:
    """The list of blocks; what is past the last is never read."""
    found = [
        (g, first, min(first + block, OFFSETS[g + 1]), 0)
        for g in range(GROUPS)
        for first in range(OFFSETS[g], OFFSETS[g + 1], block)
    ]
    made = np.full((1 + most_blocks(COUNT, GROUPS, block), 4), 1 << 30, np.int32)
    made[0] = (len(found), 0, 0, 0)
    made[1 : 1 + len(found)] = found
    return made


@pytest.mark.sampled(3, also=("MXFP4",))
@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [bfloat16, float16, float32], ids=str)
def test_blocks_of_a_list(form: Format, dtype: Any) -> None:
    case = Case(form, 32, max(64, form.block), dtype.numpy)
    shape, block = case.shape(dtype), 8 if dtype is bfloat16 else 32
    body = gpu.body_of(shape, gpu.matrix_plan(shape, block), "groups")
    verify_body(body, "placed", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    body = fitted(body, H200)
    given = [case.x, blocks_of(block), *case.parts(gpu)]
    rounded = 2.0**-22 if dtype is float32 else 2.0**-8
    largest = np.abs(case.x.astype(np.float64)).max() * np.abs(case.weights).max()
    for way in ("interpreter", "simulator"):
        out = np.full((COUNT, case.rows), np.nan, dtype.numpy)
        if way == "interpreter":
            run(body, [*given, out])
        else:
            simulate(*emit(body, "entry", H200), [*given, out], {})
        error = case.error(out)
        assert (error <= rounded * np.sqrt(case.columns) * largest).all(), (way, error.max())


@pytest.mark.parametrize("target", [A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("level", ["reproducible", "invariant"])
@pytest.mark.parametrize("offsets", [[0, 0, 0, 1], [0, 9, 9, 9], [0, 1, 4, 9]], ids=str)
def test_with_its_list(target: Target, dtype: Any, level: str, offsets: list[int]) -> None:
    """A Graph's launches: the list of blocks, then the product. One row, all rows of one group."""
    form, rows, columns = formats.MXFP4, 48, 96
    raw = random_rows(form, 3 * rows, columns)
    weights = form.to_float32(raw).astype(np.float64).reshape(3, rows, columns)
    x = np.random.default_rng(2).standard_normal((offsets[-1], columns)).astype(dtype.numpy)
    nodes = [
        build.input_(x.shape, dtype),
        build.input_((4,), int32),
        build.input_((3, rows, form.row_bytes(columns)), uint8),
    ]
    unpacked = build.unpack(nodes[2], form.name, dtype)
    product = ops.grouped_dot(nodes[0], unpacked, nodes[1], axis=2, block=0)
    given = [x, np.array(offsets, np.int32), raw.reshape(3, rows, -1)]
    with override(determinism=level):
        (found,) = run_graph(nodes, [product], given, target=target)
    owners = np.repeat(np.arange(3), np.diff(offsets))
    exact = np.stack([weights[g] @ row for g, row in zip(owners, x.astype(np.float64))])
    sums = np.stack([abs(weights[g]) @ row for g, row in zip(owners, abs(x.astype(np.float64)))])
    near = 2.0**-7 if dtype is bfloat16 else 2.0**-18
    assert (np.abs(found.astype(np.float64) - exact) <= near * sums).all()


def test_assembled() -> None:
    """gpt-oss-20b and Qwen3-30B-A3B: no spills, no local memory."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {}
    for form, experts, rows, columns in (
        (formats.MXFP4, 32, 2880, 2880),
        (formats.Q4_K, 128, 768, 2048),
        (formats.Q8_0, 128, 2048, 768),
    ):
        for tokens in (32, 1024, 8192):
            shape = QuantisedShape(form, experts * rows, columns, tokens, bfloat16, groups=experts)
            callee = gpu.grouped_callee(shape, H200, list_sizes(tokens, experts)["block"])
            texts[f"{form} {tokens}"] = emit(callee.launches[0][0], "entry", H200)[0]
    for name, made in assemble_all(texts, H200.cpu).items():
        for report in made.reports.values():
            spilled = (report.spill_stores, report.spill_loads, report.stack_bytes)
            assert spilled == (0, 0, 0), name
