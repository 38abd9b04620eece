"""Arithmetic of the simulator against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from ptxsim.values import fma64

SPECIAL = [0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 2.0**-1022, 1.7e308, -1.7e308, 2.0**-537, 3e-200]


def exact(a: float, b: float, c: float) -> float:
    """a * b + c rounded once."""
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:
        return a * b + c if a * b == 0 and (a == 0 or b == 0) else 0.0
    try:
        return float(total) or (-0.0 if total < 0 else 0.0)
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")


@pytest.mark.parametrize("kind", ["near", "cancelling", "bits", "special"])
def test_fma64_rounds_once(kind: str) -> None:
    random = np.random.default_rng(5)
    a, b, c = random.standard_normal((3, 2000)) * 2.0 ** random.integers(-60, 60, (3, 2000))
    if kind == "cancelling":
        c = -(a * b) * (1 + random.integers(-2, 3, 2000) * 2.0**-52)
    elif kind == "bits":
        a, b, c = random.integers(0, 2**64, (3, 2000), np.uint64).view(np.float64)
        keep = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        a, b, c = a[keep], b[keep], c[keep]
    elif kind == "special":
        a, b, c = (each.ravel() for each in np.meshgrid(SPECIAL, SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        found = fma64(a, b, c)
    wanted = np.array([exact(*each) for each in zip(a.tolist(), b.tolist(), c.tolist())])
    np.testing.assert_array_equal(found.view(np.int64), wanted.view(np.int64))


def test_fma64_of_what_is_not_finite() -> None:
    a = np.array([np.inf, np.nan, 0.0, np.inf])
    with np.errstate(invalid="ignore"):
        found = fma64(a, np.array([2.0, 1.0, np.inf, 1.0]), np.array([1.0, 1.0, 1.0, -np.inf]))
    assert found[0] == np.inf and np.isnan(found[1:]).all()
