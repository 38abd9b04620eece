"""Every elementwise function over special values, random bits and the ends of ranges.

Errors are at most 2 units of the last place, or torch's own where those are larger; nan,
infinities and signs of zeros are torch's; so are derivatives at special points.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
table = pytest.importorskip("accuracy_table")

import tilegrad as tg  # noqa: E402

FLOATS = ("float32", "float64", "bfloat16", "float16")
COUNT = {"float32": 25, "float64": 25, "bfloat16": 8, "float16": 8}
PARTS = 4  # rows of a dtype are spread over as many tests


def test_every_function_has_a_row() -> None:
    missing = table.missing()
    assert not missing, f"add rows to tests/tensor/accuracy_table.py: {sorted(missing)}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions(dtype: str, part: int) -> None:
    wrong = []
    for row in table.ROWS[part::PARTS]:
        if dtype in row.dtypes:
            wrong += table.measure(row, dtype, COUNT[dtype], few=True).wrong
    assert not wrong, "\n".join(wrong)


# ---- integers ---------------------------------------------------------------------------------

WHOLE = ("int8", "int16", "int32", "int64", "uint8")


@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_quotients_and_remainders(dtype: str) -> None:
    ends = np.iinfo(dtype)
    values = [0, 1, 2, 3, 7, 10, ends.max, ends.max - 1, ends.max // 2, ends.min, ends.min + 1]
    values += [] if dtype == "uint8" else [-1, -2, -3, -7, -10, ends.min // 2]
    random = np.random.default_rng(0).integers(ends.min, ends.max, 200, dtype=dtype)
    pool = np.concatenate([np.array(values, dtype), random[:40]])
    x, y = (g.ravel() for g in np.meshgrid(pool, pool))
    x, y = x[y != 0], y[y != 0]
    exact = [(int(a), int(b)) for a, b in zip(x, y)]
    wanted = {
        "fmod": [abs(a) % abs(b) * (-1 if a < 0 else 1) for a, b in exact],
        "remainder": [a % b for a, b in exact],
        "floor_divide": [a // b for a, b in exact],
        "trunc": [abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in exact],
    }
    a, b = tg.tensor(x), tg.tensor(y)
    got = {
        "fmod": tg.fmod(a, b),
        "remainder": a % b,
        "floor_divide": a // b,
        "trunc": tg.div(a, b, rounding_mode="trunc"),
    }
    for name, result in got.items():
        found = result.numpy()
        assert found.dtype == x.dtype
        whole = np.array(wanted[name], object).astype(np.uint64 if dtype == "uint8" else object)
        wrapped = np.array([int(v) & (2 ** (8 * x.itemsize) - 1) for v in whole], np.uint64)
        same = found.astype(dtype).view(f"u{x.itemsize}") == wrapped.astype(f"u{x.itemsize}")
        assert same.all(), [(name, exact[i], found[i]) for i in np.flatnonzero(~same)[:5]]


def test_isclose_of_integers_and_bools() -> None:
    a, b = [1, 2, 100000, -5, 2**31 - 1], [1, 3, 100001, -5, 2**31 - 2]
    for dtype in ("int32", "int64"):
        x, y = (torch.tensor(v, dtype=getattr(torch, dtype)) for v in (a, b))
        got = tg.isclose(tg.from_torch(x), tg.from_torch(y)).numpy()
        assert np.array_equal(got, torch.isclose(x, y).numpy())
    p, q = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    got = tg.isclose(tg.from_torch(p), tg.from_torch(q)).numpy()
    assert np.array_equal(got, torch.isclose(p, q).numpy())


# ---- derivatives ------------------------------------------------------------------------------

INFINITY, NAN = math.inf, math.nan
POINTS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    -2.0,
    3.0,
    -3.0,
    6.0,
    -6.0,
    INFINITY,
    -INFINITY,
    NAN,
    1e30,
    -1e30,
    1e-30,
    -1e-30,
    20.0,
    -20.0,
    100.0,
    -100.0,
    0.1,
    1.57,
)
PAIRS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, INFINITY, -INFINITY, NAN, 1e30, 1e-30, 7.0)
# Ours are the finite limits where torch has nan: of logaddexp at equal infinities, and of copysign
# at an infinity. Of two operands that are no numbers no derivative is asked for, nor of nan that is
# held between bounds: it is 1 where torch's is 0, and another would cost as much as the function.
SPARED = {"logaddexp", "copysign"}
BOUNDED = {
    "clamp",
    "clamp_min",
    "clamp_max",
    "hardtanh",
    "relu6",
    "hardsigmoid",
    "hardswish",
    "hardshrink",
}


def _theirs(row: object, inputs: list[np.ndarray], dtype: object) -> list[np.ndarray] | None:
    xs = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in inputs]
    try:
        result = row.call(torch, *xs)
    except RuntimeError:
        return None
    if not result.is_floating_point() or not result.requires_grad:
        return None
    found = torch.autograd.grad(result, xs, torch.ones_like(result), allow_unused=True)
    return [np.zeros_like(x) if g is None else g.double().numpy() for g, x in zip(found, inputs)]


@pytest.mark.parametrize("part", range(PARTS))
def test_derivatives_at_special_points(part: int) -> None:
    wrong = []
    for row in [r for r in table.ROWS if r.covers not in SPARED][part::PARTS]:
        pool = {1: POINTS, 2: PAIRS, 3: PAIRS[:8]}[row.count]
        values = [pool] * row.count
        inputs = [g.ravel() for g in np.meshgrid(*[np.float32(v).astype(float) for v in values])]
        clear = sum(~np.isfinite(x) for x in inputs) < 2
        if row.covers in BOUNDED:
            clear &= ~np.isnan(inputs[0])
        inputs = [x[clear] for x in inputs]
        whole = "floor" in row.name or row.name == "//"
        near = None if whole else _theirs(row, inputs, torch.float32)
        if near is None:
            continue
        wide = _theirs(row, inputs, torch.float64)  # where float32 overflows or cancels on the way
        xs = [tg.tensor(x.astype(np.float32)) for x in inputs]
        places = tuple(range(row.count))
        ours = tg.grad(lambda *xs, row=row: row.call(tg, *xs).sum(), argnums=places)(*xs)
        for place, (got, a, b) in enumerate(zip(ours, near, wide)):
            g = got.numpy().astype(np.float64)
            with np.errstate(all="ignore"):
                good = [
                    (g == t)
                    | (np.isnan(g) & np.isnan(t))
                    | (np.abs(g - t) <= 1e-5 * np.abs(t))
                    | (np.abs(g - t) < 1e-37)
                    for t in (a, b)
                ]
                nearer = np.abs(g - b) <= np.abs(a - b)  # to float64 than torch's float32
            for i in np.flatnonzero(~(good[0] | good[1] | nearer))[:3]:
                at = tuple(float(x[i]) for x in inputs)
                wrong.append(f"{row.name}{at} by {place}: {g[i]}, torch {a[i]} or {b[i]}")
    assert not wrong, "\n".join(wrong)
