"""Matvecs and quantised products at small sizes for sanitize.py: few tokens, many, rows by number.

Cases are those of sanitize_attention.py (`Steps`), results judged against float64, bounds in parts
of the largest element. Quantised kernels get the numbers of every Format's own values. Invariant: a
case gives the same results when its launches run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sanitize_attention import Array, Memories, Steps, drawn

from tilegrad.compiler.pipeline import fitted
from tilegrad.core import format as formats
from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float16, float32
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import H200
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.matvec import LINES, WARPS, Matvec, MatvecPlan, choose, line_of
from tilegrad.kernels.matmul.shape import Operands
from tilegrad.kernels.quantised import gpu as quantised_gpu
from tilegrad.kernels.quantised.gpu_matrix import MatrixPlan
from tilegrad.kernels.quantised.gpu_rows import RowsPlan
from tilegrad.kernels.quantised.shape import NOTHING, Around, QuantisedShape, parameters
from tilegrad.tile.build import Body, BodyBuilder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from quantised_rows import random_rows

STEP = {bfloat16: 2.0**-8, float16: 2.0**-10, float32: 2.0**-14}


class Products(Steps):
    """Steps whose bounds are parts of the largest element of a result."""

    def check(self, found: Memories) -> None:
        """What was found is what is wanted."""
        for name, (value, bound) in self.wanted.items():
            np.testing.assert_allclose(
                found[name].astype(np.float64),
                value,
                rtol=0,
                atol=bound * np.abs(value).max(),
                err_msg=name,
            )


def unwritten(dtype: DType, *shape: int) -> Array:
    """A result that nothing has been stored to."""
    return np.full(shape, np.nan, np.float32).astype(dtype.numpy)


# ---- one token ------------------------------------------------------------------------------


WHOLE = WARPS[0] * LINES[0] // 2  # elements of a row that all warps share evenly


def vector(n: int, k: int = WHOLE, dtype: DType = bfloat16, **more: Any) -> Operands:
    """Operands of a matvec."""
    return Operands(1, n, k, dtype, bfloat16 if dtype is float8_e4m3 else dtype, **more)


def matvec(x: Operands, plan: MatvecPlan | None = None, use: str = "constant") -> Products:
    """Products of a token; gated, one of both results."""
    line, sizes = line_of(x.k, x.dtype), x.weights or (x.n,)
    lines = x.k // line
    kept = sizes[:1] if x.gated else sizes
    named = [f"w{i}" for i in range(len(sizes))], [f"c{i}" for i in range(len(kept))]
    b = BodyBuilder(
        "matvec",
        [
            ("x", Memory((lines, line), x.dtype)),
            *(
                (name, Memory((n * lines, line), x.dtype, use=use))
                for name, n in zip(named[0], sizes)
            ),
            *((name, Memory((1, n), x.result, use="result")) for name, n in zip(named[1], kept)),
        ],
    )

    def token(row: Any) -> Node:
        found = b.load(b.parameters[0], (0, 0), (lines, line), (0, 1))
        return found if x.dtype.size == 1 else b.cast(found, float32)

    def epilogue(*given: Any) -> Node:
        return given[0] if len(given) == 2 else b.apply("multiply", *given[:2])

    last = 1 + len(sizes)
    body = Matvec(
        x,
        plan or choose(x, H200).plan,
        b,
        token,
        b.parameters[1:last],
        b.parameters[last:],
        [epilogue] * len(kept),
    ).build()
    given = {"x": drawn(0, lines, line).astype(x.dtype.numpy)}
    given |= {
        name: drawn(1 + i, n * lines, line).astype(x.dtype.numpy)
        for i, (name, n) in enumerate(zip(named[0], sizes))
    }
    one = given["x"].reshape(-1).astype(np.float64)
    made = [given[name].reshape(-1, x.k).astype(np.float64) @ one for name in named[0]]
    made = [made[0] * made[1]] if x.gated else made
    wanted = {name: (value[None, :], STEP[x.result]) for name, value in zip(named[1], made)}
    given |= {name: unwritten(x.result, 1, len(value)) for name, value in zip(named[1], made)}
    return Products([(body, ["x", *named[0], *named[1]])], given, wanted)


MATVEC: dict[str, Callable[[], Products]] = {
    "one weight": lambda: matvec(vector(72)),
    "one weight, long rows": lambda: matvec(vector(8, 3 * WHOLE)),
    "three weights": lambda: matvec(vector(96, weights=(48, 16, 32))),
    "gated": lambda: matvec(vector(40, weights=(40, 40), gated=True)),
    "gated, long rows": lambda: matvec(vector(8, 4 * WHOLE, weights=(8, 8), gated=True)),
    "float16": lambda: matvec(vector(16, dtype=float16)),
    "e4m3": lambda: matvec(vector(16, 2 * WHOLE, float8_e4m3)),
    "e4m3, long rows": lambda: matvec(vector(8, 7 * WHOLE, float8_e4m3)),
    "e4m3, gated": lambda: matvec(vector(16, dtype=float8_e4m3, weights=(16, 16), gated=True)),
    "e4m3, shared out": lambda: matvec(vector(72, 2 * WHOLE, float8_e4m3), MatvecPlan(8, 8, 4)),
    "weights that are no constants": lambda: matvec(vector(16), use="value"),
    "rows for four warps": lambda: matvec(vector(8, 5 * WHOLE // 2)),
    "few warps": lambda: matvec(vector(32, 3 * LINES[0] // 2), MatvecPlan(2, 4)),
    "one warp": lambda: matvec(vector(32, 3 * LINES[0] // 2)),
    "short lines": lambda: matvec(vector(32, 9 * LINES[-1] // 2)),
}


# ---- quantised ------------------------------------------------------------------------------


class Weights:
    """Random rows of a Format: their parts by name, and their values."""

    def __init__(self, shape: QuantisedShape) -> None:
        raw = random_rows(shape.format, shape.rows, shape.columns)
        self.parts: Memories = quantised_gpu.pack(shape, raw)
        self.names = [name for name, _, _ in quantised_gpu.parts(shape)]
        self.values = shape.format.to_float32(raw)


def sized(
    form: Format,
    rows: int,
    blocks: int,
    tokens: int,
    dtype: DType = bfloat16,
) -> QuantisedShape:
    """A shape of so many blocks (of 256 columns; or of 32, three times as many)."""
    columns = form.block * blocks * (1 if form.block > 32 else 3)
    return QuantisedShape(form, rows, columns, tokens, dtype)


def surrounded(x: QuantisedShape, around: Around, given: Memories, values: Array) -> Array:
    """The product and what is around it, in float64."""
    wide = {name: given[name].astype(np.float64) for name in ("x", "norm", "bias", "residual")}
    own = wide["x"]
    if around.norm is not None:
        own = own / np.sqrt((own**2).mean(-1, keepdims=True) + around.norm)
        own = own * (wide["norm"] + around.offset)
    made = own @ values.astype(np.float64).T + (wide["bias"] if around.bias else 0)
    if around.gated:
        gate, up = np.split(made, 2, axis=1)
        made = gate / (1 + np.exp(-gate)) * up
    return made + (wide["residual"] if around.residual else 0)


def few(x: QuantisedShape, plan: RowsPlan | None = None, around: Around = NOTHING) -> Products:
    """Few tokens, by byte products."""
    weights, sizes = Weights(x), around.results(x)
    body = quantised_gpu.body_of(x, plan or quantised_gpu.rows_plan(x, H200), around=around)
    shapes = {
        "x": (x.tokens, x.columns),
        "norm": (x.columns,),
        "bias": (x.rows,),
        "residual": (x.tokens, sum(sizes)),
    }
    given = {
        name: drawn(i, *map(int, shape)).astype(x.dtype.numpy)
        for i, (name, shape) in enumerate(shapes.items())
    }
    whole = surrounded(x, around, given, weights.values)
    names = [name for name, _ in parameters(x, quantised_gpu.parts(x), around)]
    made = np.split(whole, np.cumsum(sizes)[:-1], axis=1)
    results = names[len(names) - len(sizes) :]
    given |= weights.parts
    given |= {name: unwritten(x.dtype, *part.shape) for name, part in zip(results, made)}
    return Products(
        [(fitted(body, H200), names)],
        {name: given[name] for name in names},
        {name: (part, STEP[x.dtype]) for name, part in zip(results, made)},
    )


def plain(x: QuantisedShape, body: Body, first: Array, wanted: Array, bound: float) -> Products:
    """A kernel of one input, the parts, and one result."""
    weights = Weights(x)
    given = {"first": first, **weights.parts, "out": unwritten(x.dtype, *wanted.shape)}
    return Products(
        [(fitted(body, H200), ["first", *weights.names, "out"])], given, {"out": (wanted, bound)}
    )


def many(x: QuantisedShape, plan: MatrixPlan | None = None) -> Products:
    """Many tokens, by matrix units: weights are rounded, too."""
    body = quantised_gpu.body_of(x, plan or quantised_gpu.matrix_plan(x))
    tokens = drawn(0, int(x.tokens), x.columns).astype(x.dtype.numpy)  # type: ignore[arg-type]
    wanted = tokens.astype(np.float64) @ Weights(x).values.astype(np.float64).T
    return plain(x, body, tokens, wanted, 2 * STEP[x.dtype])


def whole(x: QuantisedShape) -> Products:
    """All weights as numbers, bit for bit."""
    weights = Weights(x)
    wanted = weights.values.astype(x.dtype.numpy).astype(np.float64)
    given = {**weights.parts, "out": unwritten(x.dtype, *wanted.shape)}
    return Products(
        [
            (
                fitted(quantised_gpu.unpack_callee(x, H200).launches[0][0], H200),
                [*weights.names, "out"],
            )
        ],
        given,
        {"out": (wanted, 0.0)},
    )


def rows(x: QuantisedShape, ids: Sequence[int]) -> Products:
    """Rows by number, bit for bit."""
    values = Weights(x).values[list(ids)].astype(x.dtype.numpy).astype(np.float64)
    return plain(
        x, quantised_gpu.take_callee(x, H200).launches[0][0], np.array(ids, np.int32), values, 0.0
    )


SMALL = RowsPlan(8, 1, 32)
SHARED = RowsPlan(8, 1, 32, programs=3)
AROUND = {
    "norm with an offset, bias": Around(norm=1e-5, offset=1.0, bias=True),
    "gated": Around(gated="silu"),
    "residual": Around(residual=True),
    "norm, gated, residual": Around(norm=1e-6, gated="silu", residual=True),
    "several results": Around(norm=1e-5, bias=True, splits=(16, 16)),
}


def quantised() -> Iterator[tuple[str, Callable[[], Products]]]:
    """Every Format by every kernel; Plans and what may be around a product."""
    for form in QUANTISED:
        yield f"few tokens: {form}", lambda f=form: few(sized(f, 20, 3, 2), SMALL)
        yield (
            f"many tokens: {form}",
            lambda f=form: many(sized(f, 20, 1, 19), MatrixPlan(16, 16, 2, 1)),
        )
        yield f"rows: {form}", lambda f=form: rows(sized(f, 21, 2, 3, float32), (20, 0, 7))
        yield f"all rows: {form}", lambda f=form: whole(sized(f, 21, 2, 3))
    for form, columns in ((formats.Q4_1, 1536), (formats.Q8_0, 1536), (formats.Q4_K, 1024)):
        for tokens in (1, 3):
            x = QuantisedShape(form, 40, columns, tokens, bfloat16)
            yield f"few tokens: {form}, {tokens}, its own Plan", lambda x=x: few(x)
    x = QuantisedShape(formats.Q4_1, 16, 3072, 1, bfloat16)
    yield "few tokens: turns", lambda: few(x, RowsPlan(8, 2, 32, stages=2))
    yield "few tokens: blocks shared out", lambda: few(x, RowsPlan(4, 2, 32, stages=2, programs=3))
    yield "few tokens: last turn cut", lambda: few(x, RowsPlan(8, 4, 64))
    several = QuantisedShape(formats.Q4_1, 16, 1024, 3, bfloat16)
    yield (
        "few tokens: of several programs",
        lambda: few(several, RowsPlan(8, 1, 32, tokens=2, together=1)),
    )
    for name, around in AROUND.items():
        for dtype in (bfloat16, float32):
            own = QuantisedShape(formats.Q4_1, 32, 1024, 2, dtype)
            yield f"around: {name}, {dtype}", lambda x=own, a=around: few(x, SMALL, a)
            yield f"around: {name}, {dtype}, shared", lambda x=own, a=around: few(x, SHARED, a)
    for form in (formats.Q4_1, formats.Q8_0):
        long = QuantisedShape(form, 64, 288, 70, bfloat16)
        yield f"many tokens: {form}, its own Plan", lambda x=long: many(x)


def cases() -> Iterator[tuple[str, Callable[[], Steps]]]:
    """Every case by name."""
    for name, make in MATVEC.items():
        yield f"matvec: {name}", make
    for name, steps in quantised():
        yield f"quantised: {name}", steps
