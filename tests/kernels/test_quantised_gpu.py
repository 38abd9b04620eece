"""kernels/quantised/gpu*.py: every Format against Format.to_float32 and float64 products, on the
Tile interpreter and as PTX on the simulator; work counted in the PTX of an 8B model's shapes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from assembled import assemble_all
from quantised_rows import decode_bound, random_rows
from simulator import simulate

from tilegrad.compiler.pipeline import fitted
from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16, float16, float32, int32
from tilegrad.core.errors import InternalError
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import A100, H200, Target
from tilegrad.ir.symbol import round_up, symbol
from tilegrad.kernels.quantised import gpu as kernels
from tilegrad.kernels.quantised.gpu_layout import bytes_of
from tilegrad.kernels.quantised.gpu_matrix import MatrixPlan
from tilegrad.kernels.quantised.gpu_rows import RowsPlan, shared_bytes
from tilegrad.kernels.quantised.shape import NOTHING, Around, QuantisedShape, parameters
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body
from tilegrad.tile.callee import KernelCallee, parse_callee
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import check_body

BY_NAME = {form.name: form for form in QUANTISED}
SMALL = RowsPlan(8, 1, 32)
SHARED = replace(SMALL, programs=3)  # which share blocks of rows out, some one more than others


def packed(shape: QuantisedShape, raw: np.ndarray) -> list[np.ndarray]:
    """The parts in order."""
    found = kernels.pack(shape, raw)
    for name, sizes, dtype in kernels.parts(shape):
        assert found[name].shape == sizes and found[name].dtype == dtype.numpy, name
    return [found[name] for name, _, _ in kernels.parts(shape)]


def checked(body: Body) -> Body:
    """A Body that is well formed, proved, and as the Schedule would launch it."""
    verify_body(body, body.notes.get("level", "portable"), H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    return fitted(body, H200)


def tokens_of(count: int, columns: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(dtype)


class Product:
    """A product with random weights: by the interpreter, by the simulator, in float64."""

    def __init__(
        self,
        form: Format,
        rows: int,
        columns: int,
        tokens: int,
        dtype: Any = bfloat16,
        size: Any = None,
    ) -> None:
        self.shape = QuantisedShape(form, rows, columns, size or tokens, dtype)
        self.symbols = {"tokens": tokens} if size is not None else {}
        raw = random_rows(form, rows, columns)
        self.weights = form.to_float32(raw).astype(np.float64)
        self.x = tokens_of(tokens, columns, dtype.numpy)
        self.parts = packed(self.shape, raw)
        self.out = np.full((tokens, rows), np.nan, dtype.numpy)

    def interpret(self, body: Body) -> np.ndarray:
        out = self.out.copy()
        run(checked(body), [self.x, *self.parts, out], self.symbols)
        return out

    def simulate(self, body: Body) -> np.ndarray:
        out = self.out.copy()
        simulate(*emit(checked(body), "entry", H200), [self.x, *self.parts, out], self.symbols)
        return out

    def few(self, found: np.ndarray) -> None:
        """Within what rounding x to 16 bits may do, and the result to its dtype."""
        x = self.x.astype(np.float64)
        want = x @ self.weights.T
        wide = np.zeros((len(x), -(-x.shape[1] // 32) * 32))
        wide[:, : x.shape[1]] = x
        weights = np.zeros((len(self.weights), wide.shape[1]))
        weights[:, : x.shape[1]] = self.weights
        # products may be wider than the weights by what their offset takes off again
        allowed = 2 * decode_bound(wide, weights) + 2.0**-16 * np.abs(wide).max() * np.abs(
            weights
        ).max() * np.sqrt(wide.shape[1])
        self.close(found, want, allowed)

    def many(self, found: np.ndarray) -> None:
        """Within what rounding weights to the dtype of x may do."""
        x = np.abs(self.x.astype(np.float64))
        each = 2.0**-22 if self.shape.dtype is float32 else 2.0**-8
        self.close(
            found,
            self.x.astype(np.float64) @ self.weights.T,
            each * np.sqrt(x.shape[1]) * x.max() * np.abs(self.weights).max(),
        )

    def close(self, found: np.ndarray, want: np.ndarray, allowed: Any) -> None:
        last = {bfloat16: 2.0**-8, float16: 2.0**-11, float32: 2.0**-22}[self.shape.dtype]
        error = np.abs(found.astype(np.float64) - want)
        assert (error <= allowed + last * np.abs(want)).all(), error.max()


# ---- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_rows_by_number(form: Format) -> None:
    """Bit for bit the Format's own values, whatever the bytes: so the parts hold all of them."""
    rows, columns = 21, 2 * form.block + (0 if form.block > 32 else 32)
    shape = QuantisedShape(form, rows, columns, 3, float32)
    raw = np.random.default_rng(0).integers(0, 256, (rows, shape.row_bytes), dtype=np.uint8)
    raw[0] = 0
    ids, out = np.array([20, 0, 7], np.int32), np.zeros((3, columns), np.float32)
    body = checked(kernels.take_callee(shape, H200).launches[0][0])
    with np.errstate(all="ignore"):
        run(body, [ids, *packed(shape, raw), out])
        simulated = np.zeros_like(out)
        simulate(*emit(body, "entry", H200), [ids, *packed(shape, raw), simulated])
    wanted = form.to_float32(raw)[ids]
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(simulated, wanted)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_parts_of_chunks(form: Format) -> None:
    shape = QuantisedShape(form, 40, 2 * form.block)
    raw = random_rows(form, 40, shape.columns)
    whole = kernels.pack(shape, raw)
    for start in range(0, 40, kernels.ROWS):
        chunk = raw[start : start + kernels.ROWS]
        for name, array in kernels.pack(shape, chunk).items():
            first = start * len(whole[name]) // 48
            np.testing.assert_array_equal(array, whole[name][first : first + len(array)])


def test_bytes() -> None:
    """As many as the file has, but for scales of six bits."""
    for name, more in (
        ("Q4_0", 0),
        ("Q4_1", 0),
        ("Q8_0", 0),
        ("Q6_K", 0),
        ("Q2_K", 0),
        ("MXFP4", 0),
        ("Q5_1", 0),
        ("Q4_K", 0.125),
        ("Q5_K", 0.125),
        ("Q3_K", 0.125),
    ):
        shape = QuantisedShape(BY_NAME[name], 4096, 4096)
        assert 8 * bytes_of(shape) / 4096**2 == shape.format.bits + more, name


# ---- few tokens ---------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_few_tokens(form: Format) -> None:
    case = Product(form, 20, 3 * form.block if form.block > 32 else 288, 2)
    body = kernels.body_of(case.shape, SMALL)
    found = case.interpret(body)
    case.few(found)
    np.testing.assert_array_equal(case.simulate(body), found)


PLANS = {
    "turns": (1024 * 3, RowsPlan(8, 2, 32, stages=2)),
    "all asked for at once": (1024 * 2, RowsPlan(4, 1, 32, stages=2)),
    "last turn cut": (1024 * 3, RowsPlan(8, 4, 64, stages=1)),
    "rows of several warps": (1024, RowsPlan(16, 4, 32)),
    "resident": (1024, RowsPlan(8, 2, 32, resident=4)),
    "blocks shared out": (1024, RowsPlan(4, 1, 32, programs=3)),
    "turns of shared blocks": (1024 * 3, RowsPlan(4, 2, 32, stages=2, programs=3)),
    "all blocks of one program": (1024 * 2, RowsPlan(4, 1, 32, stages=2, programs=1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q4_K"])
def test_plans(name: str, form: str) -> None:
    columns, plan = PLANS[name]
    case = Product(BY_NAME[form], 16, columns, 1)
    body = kernels.body_of(case.shape, plan)
    found = case.interpret(body)
    case.few(found)
    np.testing.assert_array_equal(case.simulate(body), found)
    assert emit(body, "entry", H200)[1].shared_bytes <= shared_bytes(case.shape, plan) + 1024


@pytest.mark.parametrize("dtype", [float32, float16], ids=str)
def test_other_tokens(dtype: Any) -> None:
    case = Product(formats.Q4_1, 16, 1024, 1, dtype)
    body = kernels.body_of(case.shape, SMALL)
    case.few(case.interpret(body))
    case.few(case.simulate(body))


@pytest.mark.parametrize("tokens", [3, 4])
def test_tokens_of_several_programs(tokens: int) -> None:
    case = Product(formats.Q4_1, 16, 1024, tokens)
    body = kernels.body_of(case.shape, RowsPlan(8, 1, 32, tokens=2, together=1))
    assert body.grid == (2, 2)
    found = case.interpret(body)
    case.few(found)
    np.testing.assert_array_equal(case.simulate(body), found)


@pytest.mark.parametrize("each", [2, 4])
def test_few_of_a_symbol(each: int) -> None:
    case = Product(formats.Q4_1, 16, 1024, 3, size=symbol("tokens", 1, 4))
    body = kernels.body_of(case.shape, RowsPlan(8, 1, 32, tokens=each))
    case.few(case.interpret(body))
    case.few(case.simulate(body))


def test_hostile_tokens() -> None:
    """Zeros, the least and the largest numbers; what is not finite leaves other tokens alone."""
    case = Product(formats.Q4_1, 16, 1024, 4)
    case.x[0] = 0
    case.x[1] = np.where(np.arange(1024) % 2, 3e38, -3e38).astype(ml_dtypes.bfloat16)
    case.x[2, 5] = np.inf
    with np.errstate(all="ignore"):
        found = case.interpret(kernels.body_of(case.shape, SMALL)).astype(np.float64)
    assert (found[0] == 0).all()
    wanted = case.x[1].astype(np.float64) @ case.weights.T
    near = np.isfinite(found[1])
    np.testing.assert_allclose(found[1][near], wanted[near], rtol=0.02, atol=3e38 * 0.02)
    assert not np.isfinite(found[2]).any() and np.isfinite(found[3]).all()


def test_a_plan_that_does_not_fit() -> None:
    with pytest.raises(InternalError, match="do not fit"):
        kernels.body_of(QuantisedShape(formats.Q4_1, 16, 1024), RowsPlan(32, 1, 32))


AROUND = {
    "norm": Around(norm=1e-5),
    "norm with an offset, bias": Around(norm=1e-5, offset=1.0, bias=True),
    "gated": Around(gated="silu"),
    "residual": Around(residual=True),
    "all of a feed-forward": Around(norm=1e-6, gated="silu", residual=True),
    "several results": Around(norm=1e-5, bias=True, splits=(16, 16)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [SMALL, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("name", AROUND)
def test_around(name: str, dtype: Any, plan: RowsPlan) -> None:
    """A norm before, a bias, gates and a residual after, against float64."""
    around = AROUND[name]
    case = Product(formats.Q4_1, 32, 1024, 1, dtype)
    assert kernels.why_not_around(case.shape, H200, around) == ""
    rng = np.random.default_rng(3)
    results = 16 if around.gated else 32
    norm, bias, residual = (
        rng.standard_normal(size).astype(dtype.numpy) for size in (1024, 32, (1, results))
    )
    given: dict[str, Any] = {"x": case.x, "norm": norm, "bias": bias, "residual": residual}
    given |= dict(zip((n for n, _, _ in kernels.parts(case.shape)), case.parts))
    x = case.x.astype(np.float64)
    if around.norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + around.norm)
        x = x * (norm.astype(np.float64) + around.offset)
    want = x @ case.weights.T + (bias.astype(np.float64) if around.bias else 0)
    if around.gated:
        want = want[:, :16] / (1 + np.exp(-want[:, :16])) * want[:, 16:]
    want = want + (residual.astype(np.float64) if around.residual else 0)
    body = kernels.body_of(case.shape, plan, around=around)
    sizes = around.results(case.shape)
    order = [name for name, _ in parameters(case.shape, kernels.parts(case.shape), around)][
        : -len(sizes)
    ]
    callee = KernelCallee.named("quantised_around", [body], around.names(case.shape))
    found = callee.interpret(*map(given.get, order))
    simulated = [np.zeros((1, size), dtype.numpy) for size in sizes]
    simulate(*emit(checked(body), "entry", H200), [*map(given.get, order), *simulated])
    for out in (np.concatenate(found, 1), np.concatenate(simulated, 1)):
        last = 2.0**-8 if dtype is bfloat16 else 2.0**-15
        np.testing.assert_allclose(
            out.astype(np.float64), want, rtol=last, atol=2.0**-13 * np.abs(want).max()
        )


def test_what_is_not_around() -> None:
    shape = QuantisedShape(formats.Q4_1, 48, 64, 1, bfloat16)
    assert kernels.why_not_around(shape, H200, Around(gated="silu"))
    assert kernels.why_not_around(shape, H200, Around(gated="gelu"))
    more = replace(shape, tokens=64)
    assert kernels.why_not_around(more, H200, Around(norm=1e-5))
    assert kernels.why_not_around(replace(more, format=formats.Q5_0), H200, Around())
    assert kernels.why_not_around(shape, H200, Around(splits=(24, 24)))
    with pytest.raises(InternalError, match="do not fit"):
        kernels.body_of(shape, SMALL, around=Around(gated="silu"))


# ---- many tokens --------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_many_tokens(form: Format) -> None:
    case = Product(form, 20, form.block + (0 if form.block > 32 else 64), 19)
    body = kernels.body_of(case.shape, MatrixPlan(16, 16, 2, 1))
    case.many(case.interpret(body))
    case.many(case.simulate(body))


def test_many_of_a_symbol() -> None:
    case = Product(formats.Q8_0, 32, 96, 37, size=symbol("tokens", 1, 512))
    body = kernels.body_of(case.shape, MatrixPlan(32, 32, 2, 2))
    case.many(case.interpret(body))
    case.many(case.simulate(body))


def test_many_float32() -> None:
    case = Product(formats.Q4_1, 16, 128, 16, float32)
    body = kernels.body_of(case.shape, MatrixPlan(16, 16, 2, 1))
    case.many(case.interpret(body))
    case.many(case.simulate(body))


# ---- callees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 8, 12])
def test_callee(tokens: int) -> None:
    case = Product(formats.Q4_1, 40, 576, tokens)
    assert kernels.why_not(case.shape, H200) == ""
    callee = kernels.callee(case.shape, H200)
    assert parse_callee(callee.to_text()).content == callee.content
    (found,) = callee.interpret(case.x, *case.parts)
    (case.few if tokens == 1 else case.many)(found)


def test_take_callee() -> None:
    shape = QuantisedShape(formats.Q8_0, 20, 64, 2, float32)
    raw = random_rows(formats.Q8_0, 20, 64)
    ids = np.array([3, 19], np.int32)
    callee = kernels.take_callee(shape, H200)
    assert callee.types("read")[0].dtype is int32
    (found,) = callee.interpret(ids, *packed(shape, raw))
    np.testing.assert_array_equal(found, formats.Q8_0.to_float32(raw)[ids])


def test_what_is_refused() -> None:
    plain = QuantisedShape(formats.F16, 16, 64)
    assert "not quantised" in kernels.why_not(plain, H200)
    assert "tokens are" in kernels.why_not(QuantisedShape(formats.Q4_1, 16, 64, 1, int32), H200)
    assert kernels.why_not(QuantisedShape(formats.Q4_1, 0, 64), H200)


# ---- an 8B model --------------------------------------------------------------------------------

# lane instructions of PTX for a further weight, and for one with all that a program does (ptxas
# joins some: on the machine they are fewer)
WORK = {
    "Q4_0": (1.5, 2.7),
    "Q4_1": (1.65, 2.9),
    "Q8_0": (1.4, 2.6),
    "Q4_K": (1.95, 3.2),
    "Q6_K": (2.7, 4.0),
}


def lines_of(shape: QuantisedShape, plan: RowsPlan) -> list[str]:
    text = emit(kernels.body_of(shape, plan), "entry", H200)[0]
    lines = (re.sub(r"^@!?%p\d+ ", "", line.strip()) for line in text.splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(".")]


@pytest.mark.parametrize("name", WORK)
def test_instructions(name: str) -> None:
    """The products of a weight fit beside its bytes; weights are asked for 16 bytes at a time,
    those of all stages before the wait."""
    shape = QuantisedShape(BY_NAME[name], 28672, 4096, 1, bfloat16)
    plan = replace(kernels.rows_plan(shape, H200), warps=8, programs=0)
    lines, more = (lines_of(shape, p) for p in (plan, replace(plan, rows=2 * plan.rows)))
    weights = plan.rows * 4096 // (32 * plan.warps)  # of a thread
    further, whole = WORK[name]
    assert (len(more) - len(lines)) / weights <= further
    assert len(lines) / weights <= whole
    counts = [Counter(line.split()[0] for line in found) for found in (lines, more)]
    assert counts[1]["dp4a.u32.s32"] - counts[0]["dp4a.u32.s32"] == weights // 2
    asked = [i for i, line in enumerate(lines) if "L1::no_allocate.v4" in line]
    assert 16 * len(asked) == weights * (8 if name == "Q8_0" else 4) // 8
    ahead = [i for i in asked if i < lines.index("griddepcontrol.wait;")]
    assert len(ahead) == len(asked) * plan.stages * plan.groups * 32 // 4096


def test_assembled() -> None:
    """The Plans of an 8B model's shapes: no spills, no local memory."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {}
    for name in ("Q4_1", "Q8_0"):
        for columns in (4096, 14336):
            shape = QuantisedShape(BY_NAME[name], 4096, columns, 1, bfloat16)
            body = kernels.callee(shape, H200).launches[0][0]
            texts[f"{name} {columns}"] = emit(body, "entry", H200)[0]
    for tokens in (16, 32, symbol("tokens", 1, 512)):
        for form in (formats.Q4_K, formats.Q6_K, formats.Q8_0):
            shape = QuantisedShape(form, 4096, 4096, tokens, bfloat16)
            body = kernels.callee(shape, H200).launches[0][0]
            texts[f"many {form.name} {tokens}"] = emit(body, "entry", H200)[0]
    shape = QuantisedShape(formats.Q8_0, 128256, 4096, 1, bfloat16)
    texts["take"] = emit(kernels.take_callee(shape, H200).launches[0][0], "entry", H200)[0]
    older = {}
    for tokens in (1, 64):
        shape = QuantisedShape(formats.Q4_1, 4096, 4096, tokens, bfloat16)
        text, entry = emit(kernels.callee(shape, A100).launches[0][0], "entry", A100)
        older[f"older {tokens}"] = text
        assert not entry.dependent and "griddepcontrol" not in text
    found = {**assemble_all(texts, H200.cpu), **assemble_all(older, A100.cpu)}
    for name, made in found.items():
        for report in made.reports.values():
            spilled = (report.spill_stores, report.spill_loads, report.stack_bytes)
            assert spilled == (0, 0, 0), name


ALL_AROUND = (
    NOTHING,
    Around(norm=1e-5, bias=True, splits=(-128, 64, 64)),
    Around(norm=1e-5, gated="silu"),
    Around(bias=True, residual=True),
)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("target", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_Z", "Q5_0", "Q8_0", "Q4_K", "Q6_K"])
def test_few_tokens_keep_to_registers(name: str, tokens: int, target: Target) -> None:
    """What is chosen for few tokens has no spills, whatever is around it."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {}
    for (rows, columns), around, dtype in itertools.product(
        ((576, 576), (4096, 4096), (4096, 14336), (28672, 4096)), ALL_AROUND, (bfloat16, float32)
    ):
        form = BY_NAME[name]
        shape = QuantisedShape(form, rows, round_up(columns, form.block), tokens, dtype)
        if around.splits:
            around = replace(around, splits=(rows - 128, 64, 64))
        if not kernels.why_not_around(shape, target, around):
            plan = kernels.plans_for(shape, target, around)[0]
            body = kernels.body_of(shape, plan, "entry", around)
            texts[f"{shape} {around}"] = emit(body, "entry", target)[0]
    for key, made in assemble_all(texts, target.cpu).items():
        made.check_library(key)
