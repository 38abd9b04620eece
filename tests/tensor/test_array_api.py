"""The array API namespace against array-api-strict: every name, values, shapes and dtypes."""

from __future__ import annotations

import inspect
import math
import operator

import numpy as np
import pytest

import tilegrad as tg

strict = pytest.importorskip("array_api_strict")
xp = tg.tensor([1.0]).__array_namespace__()

RANDOM = np.random.default_rng(11)
F = RANDOM.uniform(-2.0, 2.0, (3, 4))
F[0, :3] = 0.0, 1.0, -1.0
SPECIAL = np.array([0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, 1e30, 0.5])
N = RANDOM.integers(-5, 6, (3, 4))
U = RANDOM.integers(0, 9, (3, 4)).astype(np.uint8)
B = RANDOM.integers(0, 2, (3, 4)).astype(bool)
FLOATS, INTS = (np.float32, np.float64), (np.int8, np.int32, np.int64, np.uint8, np.uint16)
NO_FUNCTIONS = {
    "e",
    "inf",
    "nan",
    "newaxis",
    "pi",
    "bool",
    "complex64",
    "complex128",
    "float32",
    "float64",
    *[f"{k}{b}" for k in ("int", "uint") for b in (8, 16, 32, 64)],
    "ModuleType",
    "ArrayAPIStrictFlags",
    "Device",
    "get_array_api_strict_flags",
    "set_array_api_strict_flags",
    "reset_array_api_strict_flags",
    "linalg",
    "fft",
}


def given(m, value):
    """Arrays of the namespace in place of NumPy's, and its dtypes in place of NumPy's."""
    if isinstance(value, np.ndarray):
        return m.asarray(value)
    if isinstance(value, (tuple, list)) and any(isinstance(v, np.ndarray) for v in value):
        return type(value)(given(m, v) for v in value)
    if isinstance(value, np.dtype):
        return getattr(m, value.name)
    return value


def shown(m, value):
    """(shape, dtype, array) of every array in a result."""
    if isinstance(value, (tuple, list)):
        return [one for v in value for one in shown(m, v)]
    array = np.asarray(value.numpy() if m is xp else value)
    return [(tuple(value.shape), array.dtype.name, array)]


def check(name, *args, tolerance=None, **options):
    results = []
    for m in (xp, strict):
        named = {k: given(m, v) for k, v in options.items()}
        results.append(shown(m, getattr(m, name)(*[given(m, a) for a in args], **named)))
    assert len(results[0]) == len(results[1])
    for (shape, dtype, found), (their_shape, their_dtype, wanted) in zip(*results):
        where = f"{name} {[getattr(a, 'dtype', a) for a in args]} {options}"
        assert (shape, dtype) == (their_shape, their_dtype), where
        close = tolerance or (2e-6 if found.dtype == np.float32 else 1e-12)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(found, wanted, close, close, err_msg=where)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # theirs, of NumPy
CASES: list[tuple] = []


def case(names, *args, **options):
    CASES.extend((name, args, options) for name in names.split())


# elementwise
for dtype in FLOATS:
    f, s = F.astype(dtype), SPECIAL.astype(dtype)
    case(
        "abs acos asin atan atanh ceil cos cosh exp expm1 floor isfinite isinf isnan log log1p "
        "log2 log10 negative positive reciprocal round sign signbit sin sinh sqrt square tan tanh "
        "trunc asinh acosh conj",
        f,
    )
    case(
        "abs ceil exp floor isfinite isinf isnan log negative round sign signbit sqrt square tanh "
        "trunc atan",
        s,
    )
    case(
        "add subtract multiply divide maximum minimum atan2 copysign hypot logaddexp equal "
        "not_equal less less_equal greater greater_equal floor_divide remainder nextafter",
        f,
        f[::-1].copy() + dtype(0.25),
    )
    case("pow", np.abs(f), f)
    case("add multiply less nextafter maximum", s, s[::-1].copy())
    case("clip", f, -1.0, 1.0)
    case("clip", f, None, 0.5)
    case("where", B, f, f * 2)
for dtype in INTS:
    i = (np.abs(N) if np.dtype(dtype).kind == "u" else N).astype(dtype)
    other = (np.abs(N[::-1]) + 1).astype(dtype)
    case("abs ceil floor trunc round sign square positive isfinite isinf isnan bitwise_invert", i)
    case(
        "add subtract multiply floor_divide remainder maximum minimum equal not_equal less "
        "greater_equal bitwise_and bitwise_or bitwise_xor",
        i,
        other,
    )
    case("pow", i, (other % 3).astype(dtype))
    case("bitwise_left_shift bitwise_right_shift", i, (other % 4).astype(dtype))
    case("sum prod cumulative_sum", i.reshape(-1)[:5])
    case("max min argmax argmin sort argsort unique_values", i.reshape(-1))
case("logical_and logical_or logical_xor bitwise_and bitwise_or equal", B, B[::-1].copy())
case("logical_not bitwise_invert all any count_nonzero", B)

# reductions
for options in ({}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 1)}):
    case("sum prod max min mean var std all any count_nonzero", F, **options)
    case("sum prod max min all any count_nonzero", N, **options)
    case("sum", U, **options)
case("sum prod", N, dtype=np.dtype(np.float64))
case("var std", F, correction=1)
for options in ({}, {"axis": 1}, {"axis": 0, "keepdims": True}):
    case("argmax argmin", F, **options)
case("cumulative_sum cumulative_prod", F, axis=1)
case("cumulative_sum cumulative_prod", F, axis=0, include_initial=True)
case("cumulative_sum", U.reshape(-1))
case("diff", F)
case("diff", N, axis=0, n=2)
case("diff", F, axis=1, prepend=F[:, :1], append=F[:, 1:2])

# creation
case("zeros ones", (2, 3), dtype=np.dtype(np.int16))
case("zeros ones", 3, dtype=np.dtype(np.float64))
case("full", (2, 2), 7)
case("full", (2,), 1.5, dtype=np.dtype(np.float32))
case("full", (2,), True)
case("zeros_like ones_like", N)
case("full_like", F, 2)
case("arange", 5)
case("arange", 2, 10, 3)
case("arange", 5, 2, -1)
case("arange", 5, 2)
case("arange", 0.0, 1.0, 0.25, dtype=np.dtype(np.float64))
case("linspace", 0.0, 1.0, 5, dtype=np.dtype(np.float64))
case("linspace", 0.0, 1.0, 4, endpoint=False, dtype=np.dtype(np.float64))
case("linspace", 2, 3, 1, dtype=np.dtype(np.float32))
for k in (0, 1, -2, 9):
    case("eye", 3, 4, k=k, dtype=np.dtype(np.float64))
case("eye", 2, dtype=np.dtype(np.int32))
case("tril triu", F, k=1)
case("tril triu", N)
case("meshgrid", F[0], N[:, 0].copy().astype(np.float64))
case("meshgrid", F[0], F[1], indexing="ij")
case("asarray", F)
case("asarray", [[1, 2], [3, 4]])
case("asarray", [True, False])
case("asarray", 3, dtype=np.dtype(np.float64))
case("astype", F, np.dtype(np.int32))
case("astype", N, np.dtype(bool))

# movement
case("broadcast_to", F[0], (2, 4))
case("broadcast_arrays", F, F[0])
case("concat", (F, F[:1]))
case("concat", (F, F[:, :2]), axis=1)
case("concat", (F, F[0]), axis=None)
case("stack", (F, F))
case("stack", (F, F), axis=-1)
case("unstack", F, axis=1)
case("expand_dims", F, axis=1)
case("expand_dims", F, axis=-1)
case("squeeze", F[:1], axis=0)
case("squeeze", F[:1, :1], axis=(0, 1))
case("flip", F)
case("flip", F, axis=-1)
case("flip", F, axis=(0, 1))
case("moveaxis", np.stack([F, F]), 0, -1)
case("moveaxis", np.stack([F, F]), (0, 1), (2, 0))
case("permute_dims", F, (1, 0))
case("matrix_transpose", np.stack([F, F]))
case("reshape", F, (2, -1))
case("roll", F, 2)
case("roll", F, (1, -1), axis=(0, 1))
case("roll", F, 1, axis=-1)
case("repeat", F, 2)
case("repeat", F, 3, axis=1)
case("repeat", F[0], np.array([1, 0, 2, 1]))
case("tile", F, (2, 1, 3))
case("tile", F, (2,))

# products, searching, sets
case("matmul", F, F.T.copy())
case("matmul", N, N.T.copy())
case("tensordot", F, F, axes=2)
case("tensordot", F, F, axes=((1,), (1,)))
case("vecdot", F, F[0])
case("vecdot", N, N, axis=-2)
case("sort argsort", F, axis=0)
case("sort argsort", N, descending=True)
case("nonzero", F)
case("nonzero", N)
case("searchsorted", np.sort(F[0]), F[1])
case("searchsorted", np.sort(F[0]), F[0], side="right")
case("searchsorted", F[0], F[1], sorter=np.argsort(F[0]))
case("isin", N, np.array([1, 2, 3]))
case("take", F, np.array([2, 0, 0]), axis=0)
case("take", F, np.array([1, 3]), axis=1)
case("take", F[0], np.array([1, 3]))
case("take_along_axis", F, np.argsort(F, 1))
case("take_along_axis", F, np.argsort(F, 0), axis=0)
case("unique_all unique_counts unique_inverse unique_values", N)
case("unique_all unique_counts unique_inverse unique_values", np.round(F))
case("unique_values unique_counts", np.array([1.0, np.nan, 1.0, np.nan]))
case("count_nonzero", np.zeros((0, 3)))
case("sum prod any all", np.zeros((0, 3)), axis=0)

TESTED_APART = {
    "finfo",
    "iinfo",
    "isdtype",
    "result_type",
    "can_cast",
    "from_dlpack",
    "empty",
    "empty_like",
    "broadcast_shapes",
    "real",
    "imag",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted({name for name, _, _ in CASES}))
def test_functions(name):
    for other, args, options in CASES:
        if other == name:
            check(name, *args, **options)


def test_every_name_is_here_and_tested():
    names = {n for n in dir(strict) if not n.startswith("_")} - NO_FUNCTIONS
    assert not [n for n in names if not hasattr(xp, n)]
    assert names - {n for n, _, _ in CASES} - TESTED_APART == set()
    constants = ("e", "inf", "pi", "newaxis", "float32", "float64", "int8", "uint64", "bool")
    assert all(hasattr(xp, n) for n in constants) and math.isnan(xp.nan)


def test_arguments_are_the_standards():
    """Every argument that the standard names can be given as it says."""
    for name in {n for n in dir(strict) if not n.startswith("_")} - NO_FUNCTIONS:
        function = getattr(xp, name)
        ours, theirs = (inspect.signature(f).parameters for f in (function, getattr(strict, name)))
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        missing = [p for p, v in theirs.items() if v.kind in kinds and p not in ours]
        assert not missing, (name, missing)


def test_dtypes():
    names = [
        *[f"{k}{b}" for k in ("int", "uint") for b in (8, 16, 32, 64)],
        "float32",
        "float64",
        "bool",
    ]
    kinds = [
        "bool",
        "signed integer",
        "unsigned integer",
        "integral",
        "real floating",
        "numeric",
        "complex floating",
        ("bool", "integral"),
    ]
    for a in names:
        for kind in kinds:
            assert xp.isdtype(getattr(xp, a), kind) == strict.isdtype(getattr(strict, a), kind)
        for b in names:
            try:
                wanted = strict.result_type(getattr(strict, a), getattr(strict, b))
            except TypeError:
                continue  # not the standard's to say
            pair = getattr(xp, a), getattr(xp, b)
            assert xp.result_type(*pair).name == str(wanted).split(".")[-1], (a, b)
            theirs = strict.can_cast(getattr(strict, a), getattr(strict, b))
            assert xp.can_cast(*pair) == theirs, (a, b)
    for name in ("float32", "float64"):
        ours, theirs = xp.finfo(getattr(xp, name)), strict.finfo(getattr(strict, name))
        for fact in ("bits", "eps", "max", "min", "smallest_normal"):
            assert getattr(ours, fact) == getattr(theirs, fact)
    for name in ("int8", "uint16", "int64", "uint64"):
        ours, theirs = xp.iinfo(getattr(xp, name)), strict.iinfo(getattr(strict, name))
        assert (ours.bits, ours.min, ours.max) == (theirs.bits, theirs.min, theirs.max)
    assert xp.broadcast_shapes((3, 1), (4,)) == (3, 4)
    assert xp.isin(tg.tensor([1, 5]), tg.tensor([5]), invert=True).tolist() == [True, False]


def test_complex_is_refused_with_a_word():
    assert not hasattr(xp, "complex64") and not hasattr(xp, "linalg")
    with pytest.raises(AttributeError, match="no complex dtype"):
        xp.complex128  # noqa: B018
    with pytest.raises(tg.DTypeError, match="no complex dtype"):
        xp.imag(tg.ones(2))
    assert (xp.real(tg.ones(2)) == 1).all().item()


def test_the_array_itself():
    x = tg.tensor(F)
    assert x.__array_namespace__(api_version="2023.12") is xp
    with pytest.raises(tg.UserError):
        x.__array_namespace__(api_version="1999.01")
    assert xp.from_dlpack(np.arange(3)).tolist() == [0, 1, 2]
    assert xp.empty((2, 3)).shape == xp.empty_like(tg.ones(2, 3)).shape == (2, 3)
    assert x.to_device("cpu").device == "cpu" and x.T.shape == x.mT.shape == (4, 3)
    assert complex(tg.tensor(2.0)) == 2 + 0j
    info = xp.__array_namespace_info__()
    assert set(info.dtypes(kind="real floating")) == {"float32", "float64"}
    assert info.default_dtypes()["real floating"] is xp.float32
    assert "cpu" in info.devices() and info.default_device() in info.devices()
    assert xp.zeros(2).dtype is info.default_dtypes()["real floating"]
    assert xp.asarray([1, 2]).dtype is info.default_dtypes()["integral"]
    y = strict.asarray(F)
    for function in (
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.floordiv,
        operator.mod,
        operator.lt,
        operator.ne,
    ):
        ours, theirs = function(x, x * 2 + 0.25), function(y, y * 2 + 0.25)
        np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), 1e-12)


def test_a_program_that_knows_only_the_standard():
    """What a library does with whatever array it is given."""

    def standardised(x):
        space = x.__array_namespace__()
        mean = space.mean(x, axis=0, keepdims=True)
        spread = space.std(x, axis=0, keepdims=True)
        return space.where(spread > 0, (x - mean) / spread, space.zeros_like(x))

    found = standardised(tg.tensor(F)).numpy()
    np.testing.assert_allclose(found, np.asarray(standardised(strict.asarray(F))), 1e-12)
    gradient = tg.grad(lambda x: standardised(x).sum())(tg.tensor(F))
    assert gradient.shape == F.shape
