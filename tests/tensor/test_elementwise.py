"""Elementwise functions against torch: values, dtypes, promotion, special values."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
from torch_tables import FLOATS, INTEGERS, compare, data, torch

import tilegrad as tg

ALL = (*FLOATS, *INTEGERS, "bool")

UNARY_FLOAT = [
    "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf",
    "erfc", "reciprocal", "deg2rad", "rad2deg", "logit",
]  # fmt: skip
UNARY_ANY = [
    "abs",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "isnan",
    "isinf",
    "isfinite",
    "logical_not",
    "nan_to_num",
    "signbit",
    "square",
    "positive",
]
ACTIVATIONS = [
    "relu",
    "silu",
    "softplus",
    "elu",
    "selu",
    "celu",
    "hardtanh",
    "relu6",
    "hardswish",
    "hardsigmoid",
    "mish",
    "softsign",
    "logsigmoid",
    "leaky_relu",
    "gelu",
    "softshrink",
    "hardshrink",
    "tanhshrink",
]
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def unary(name):
    return (name, lambda m, x: getattr(m, name)(x))


def functional(name, **options):
    def run(m, x):
        home = torch.nn.functional if m is torch else tg
        return getattr(home, name)(x, **options)

    return (f"{name}{options or ''}", run)


@pytest.mark.parametrize("dtype", ALL)
def test_unary(dtype):
    x = data(dtype, (3, 5))
    skip = ["positive"] if dtype == "bool" else []
    compare([unary(n) for n in UNARY_FLOAT], x)
    compare([unary(n) for n in UNARY_ANY], x, skip=skip)


@pytest.mark.parametrize("dtype", FLOATS)
def test_unary_edges(dtype):
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, 1.5, 2.5, -2.5, 1e-3]
    special = torch.tensor([*values, 80.0, -80.0], dtype=getattr(torch, dtype))
    names = [n for n in UNARY_FLOAT if n not in ("tan", "sin", "cos")]
    compare([unary(n) for n in names + UNARY_ANY], special)
    compare([functional(n) for n in ACTIVATIONS], special, skip=["mish", "hardswish", "gelu"])
    compare([("erfinv", lambda m, x: m.erfinv(x / 100))], special.nan_to_num(0.5, 0.3, 0.2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations(dtype):
    x = data(dtype, (4, 6), low=-8, high=8)
    cases = [functional(n) for n in ACTIVATIONS]
    cases += [
        functional("gelu", approximate="tanh"),
        functional("softplus", beta=2.0, threshold=5.0),
        functional("leaky_relu", negative_slope=0.2),
        functional("elu", alpha=0.5),
        functional("celu", alpha=2.0),
        functional("hardtanh", min_val=-2.0, max_val=0.5),
        functional("glu"),
        functional("glu", dim=0),
    ]
    compare(cases, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding(dtype):
    x = data(dtype, (3, 5), low=-40, high=40)
    compare(
        [
            ("round", lambda m, x: m.round(x)),
            ("frac", lambda m, x: m.frac(x)),
            ("halves", lambda m, x: m.round(m.floor(x) + 0.5)),
        ],
        x,
    )
    if dtype in ("float32", "float64"):
        compare(
            [
                ("decimals 2", lambda m, x: m.round(x, decimals=2)),
                ("decimals -1", lambda m, x: m.round(x, decimals=-1)),
            ],
            x,
        )


# One of each kind of promotion: arithmetic, division (which makes floats), comparison (bools).
KINDS = ("add", "div", "lt")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ALL)
def test_promotion(dtype, whole):
    x, scalar = data(dtype, (3, 5)), data(dtype, (), 3)
    rows = [data(other, (5,), 1) for other in ALL]
    scalars = [data(other, (), 2) for other in ALL]
    cases = []
    for i, other in enumerate(ALL):
        for name, f in BINARY.items():
            if name == "sub" and "bool" in (dtype, other):
                continue  # torch refuses, we only for two bools
            if not whole and name not in KINDS and other != dtype:
                continue
            cases += [
                (f"{name} {other}", lambda m, x, s, *r, f=f, i=i: f(x, r[i])),
                (f"{name} scalar {other}", lambda m, x, s, *r, f=f, i=i: f(x, r[i + len(ALL)])),
                (f"scalars {name} {other}", lambda m, x, s, *r, f=f, i=i: f(r[i + len(ALL)], s)),
            ]
    compare(cases, x, scalar, *rows, *scalars)


@pytest.mark.parametrize("dtype", ALL)
def test_python_numbers(dtype):
    x = data(dtype, (3, 5))
    cases = []
    for number in (2, 1.5, True):
        for name, function in BINARY.items():
            if name == "sub" and (number is True or dtype == "bool"):
                continue  # torch refuses these
            cases += [
                (f"x {name} {number}", lambda m, x, f=function, n=number: f(x, n)),
                (f"{number} {name} x", lambda m, x, f=function, n=number: f(n, x)),
            ]
    compare(cases, x)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64"])
def test_division(dtype):
    a, b = data(dtype, (4, 5), 0, -9, 9), data(dtype, (4, 5), 1, -9, 9)
    b = torch.where(b == 0, torch.ones_like(b), b)
    compare(
        [
            ("floor", lambda m, x, y: x // y),
            ("remainder", lambda m, x, y: x % y),
            ("fmod", lambda m, x, y: m.fmod(x, y)),
            ("mode floor", lambda m, x, y: m.div(x, y, rounding_mode="floor")),
            ("mode trunc", lambda m, x, y: m.div(x, y, rounding_mode="trunc")),
            ("floor number", lambda m, x, y: x // 3),
            ("number floor", lambda m, x, y: 7 // y),
            ("remainder number", lambda m, x, y: x % 4),
            ("number remainder", lambda m, x, y: 7 % y),
        ],
        a,
        b,
    )


def test_division_edges():
    a = torch.tensor([1.0, -1.0, 0.0, math.inf, -math.inf, 5.0, -5.0, 1.0, -1.0, 0.3, 7.0])
    b = torch.tensor([0.0, 0.0, 0.0, 2.0, 2.0, math.inf, math.inf, -math.inf, 3.0, 0.1, -3.5])
    compare(
        [
            ("floor", lambda m, x, y: x // y),
            ("fmod", lambda m, x, y: m.fmod(x, y)),
            ("true", lambda m, x, y: x / y),
        ],
        a,
        b,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "int64"])
def test_pow(dtype):
    x, y = data(dtype, (3, 5), 0, 0.2, 3), data(dtype, (3, 5), 1, 0, 1.5)
    cases = [(f"** {e}", lambda m, x, y, e=e: x**e) for e in (0, 1, 2, 3, 4, 0.5, 2.5)]
    cases += [("tensor", lambda m, x, y: x**y), ("number", lambda m, x, y: 2**y)]
    cases += [("pow", lambda m, x, y: m.pow(x, 2))]
    if dtype.startswith(("float", "bfloat")):
        cases += [(f"** {e}", lambda m, x, y, e=e: x**e) for e in (-1, -0.5, -2)]
    cases += [("float_power", lambda m, x, y: m.float_power(x.float(), 2))]
    compare(cases, x, y)


@pytest.mark.parametrize("dtype", FLOATS)
def test_two_operands(dtype):
    a, b = data(dtype, (3, 5)), data(dtype, (3, 5), 1)
    compare(
        [
            ("maximum", lambda m, x, y: m.maximum(x, y)),
            ("minimum", lambda m, x, y: m.minimum(x, y)),
            ("fmax", lambda m, x, y: m.fmax(x, y)),
            ("fmin", lambda m, x, y: m.fmin(x, y)),
            ("atan2", lambda m, x, y: m.atan2(x, y)),
            ("logaddexp", lambda m, x, y: m.logaddexp(x, y)),
            ("hypot", lambda m, x, y: m.hypot(x, y)),
            ("copysign", lambda m, x, y: m.copysign(x, y)),
            ("lerp", lambda m, x, y: m.lerp(x, y, 0.3)),
            ("lerp far", lambda m, x, y: m.lerp(x, y, 0.8)),
            ("clamp", lambda m, x, y: m.clamp(x, -1, 1.5)),
            ("clamp min", lambda m, x, y: x.clamp(min=0.25)),
            ("clamp tensors", lambda m, x, y: m.clamp(x, y - 1, y)),
            ("where", lambda m, x, y: m.where(x > y, x, y)),
            ("where numbers", lambda m, x, y: m.where(x > 0, 1.0, 0.0)),
            ("where ints", lambda m, x, y: m.where(x > 0, 1, 0)),
            ("where scalar", lambda m, x, y: m.where(x > 0, x, 0)),
            ("isclose", lambda m, x, y: m.isclose(x, x + 1e-7)),
        ],
        a,
        b,
    )
    if dtype in ("float32", "float64"):
        compare(
            [
                ("addcmul", lambda m, x, y: m.addcmul(x, x, y, value=0.5)),
                ("addcdiv", lambda m, x, y: m.addcdiv(x, x, y, value=0.5)),
                ("add alpha", lambda m, x, y: m.add(x, y, alpha=3)),
                ("sub alpha", lambda m, x, y: m.sub(x, y, alpha=0.5)),
            ],
            a,
            b,
        )


def test_nan_and_infinite_pairs():
    a = torch.tensor([math.nan, 1.0, math.inf, -math.inf, math.inf, 0.0, -0.0])
    b = torch.tensor([1.0, math.nan, math.inf, -math.inf, -math.inf, -0.0, 2.0])
    compare(
        [
            (n, lambda m, x, y, n=n: getattr(m, n)(x, y))
            for n in (
                "maximum",
                "minimum",
                "fmax",
                "fmin",
                "logaddexp",
                "hypot",
                "copysign",
                "atan2",
            )
        ],
        a,
        b,
    )
    assert tg.isclose(tg.tensor([math.nan]), tg.tensor([math.nan]), equal_nan=True).item()
    assert not tg.allclose(tg.tensor([1.0]), tg.tensor([1.1]))
    assert tg.equal(tg.tensor([1.0]), tg.tensor([1.0])) and not tg.equal(tg.ones(2), tg.ones(3))


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_bits(dtype):
    a, b = data(dtype, (3, 5)), data(dtype, (3, 5), 1)
    cases = [
        ("and", lambda m, x, y: x & y),
        ("or", lambda m, x, y: x | y),
        ("xor", lambda m, x, y: x ^ y),
        ("not", lambda m, x, y: ~x),
        ("logical_and", lambda m, x, y: m.logical_and(x, y)),
        ("logical_or", lambda m, x, y: m.logical_or(x, y)),
        ("logical_xor", lambda m, x, y: m.logical_xor(x, y)),
    ]
    if dtype != "bool":
        cases += [
            ("left", lambda m, x, y: x << 2),
            ("right", lambda m, x, y: x >> 1),
            ("mask", lambda m, x, y: x & 6),
        ]
    compare(cases, a, b)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (), (1,), (7, 1, 3)])
def test_shapes(shape):
    x = data("float32", shape)
    compare(
        [
            ("exp", lambda m, x: m.exp(x)),
            ("add", lambda m, x: x + x),
            ("number", lambda m, x: 2 * x - 1),
            ("compare", lambda m, x: x > 0),
            ("broadcast", lambda m, x: x * m.ones(1)),
        ],
        x,
    )


def test_non_contiguous():
    x = data("float32", (5, 7)).t()[::2]
    compare([("exp", lambda m, x: m.exp(x)), ("sum", lambda m, x: x + x.mT.mT)], x)


def test_in_place():
    def steps(m, x):
        y = x.clone()
        z = y
        y += 1
        y *= 2
        y -= 0.5
        y /= 4
        y.clamp_(0, 1).exp_()
        return [y, z]

    compare([("steps", steps)], data("float32", (3, 5)))
    x = tg.arange(3)
    with pytest.raises(tg.DTypeError, match="the result does not fit in place"):
        x += 1.5


@pytest.mark.parametrize("dtype", ALL)
def test_conversions(dtype):
    x = data(dtype, (3, 5), low=0)
    names = ["float", "double", "half", "bfloat16", "int", "long", "bool", "byte", "short", "char"]
    cases = [(n, lambda m, x, n=n: getattr(x, n)()) for n in names]
    cases += [
        ("to", lambda m, x: x.to(m.float64)),
        ("to cpu", lambda m, x: x.to("cpu")),
        ("to both", lambda m, x: x.to("cpu", m.float16)),
        ("to other", lambda m, x: x.to(x + 0.5)),
        ("type_as", lambda m, x: x.type_as(m.ones(1))),
    ]
    compare(cases, x)


def test_bitcast():
    x = data("float32", (3, 4))
    compare(
        [
            ("int32", lambda m, x: x.view(m.int32)),
            ("int16", lambda m, x: x.view(m.int16)),
            ("uint8", lambda m, x: x.view(m.uint8)),
            ("int64", lambda m, x: x.view(m.int64)),
            ("back", lambda m, x: x.view(m.uint8).view(m.float32)),
        ],
        x,
    )


def test_numpy_operands():
    x = tg.tensor([1.0, 2.0])
    assert (np.array([1.0, 2.0], np.float32) + x).tolist() == [2.0, 4.0]
    assert (np.float64(2) * x).dtype is tg.float32
    assert isinstance(np.ones(2, np.float32) * x, tg.Tensor)


def test_bytes_as_bools_and_back():
    given = np.array([0, 1, 2, 255, 128], np.uint8)
    for name in ("uint8", "int8"):
        x = tg.tensor(given.view(name))
        assert x.view(tg.bool).tolist() == [False, True, True, True, True]
        truth = tg.tensor(given > 1)
        assert truth.view(getattr(tg, name)).tolist() == [0, 0, 1, 1, 1]
        assert truth.view(getattr(tg, name)).view(tg.bool).tolist() == (given > 1).tolist()


@pytest.mark.parametrize("name", ["floor_divide", "remainder", "fmod"])
def test_no_integers_by_0(name: str) -> None:
    """None divided by a known 0 are none, as in PyTorch; some are an error."""
    for shape, by in (((0,), 0), ((0, 3), 0), ((0, 3), (3,)), ((1,), (0,))):
        found, expected = (
            getattr(m, name)(
                m.zeros(shape, dtype=m.int32),
                by if by == 0 else m.zeros(by, dtype=m.int32),
            )
            for m in (tg, torch)
        )
        assert found.numpy().shape == tuple(expected.shape)
    with pytest.raises(tg.UserError, match="divided by 0"):
        getattr(tg, name)(tg.ones((2,), dtype=tg.int32), 0)
