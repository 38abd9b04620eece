"""Arithmetic with directed rounding in the simulator, lane by lane in fractions.

Rare in what we emit, so exact and slow. Invariant: the result is the exact value rounded once
in the direction asked; where an operand or the result is not finite, as NumPy has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .values import TYPES, Array

FORMATS = {"f32": (24, -149, 127), "f64": (53, -1074, 1023)}  # digits, least and greatest exponent


def root(value: Fraction) -> Fraction:
    """A square root to more digits than any format has, the last one odd if it is not exact."""
    shift = 2 * (1200 + value.denominator.bit_length())
    scaled = (value.numerator << shift) // value.denominator
    whole = math.isqrt(scaled)
    exact = whole * whole == scaled and (value.numerator << shift) % value.denominator == 0
    return Fraction(2 * whole + (0 if exact else 1), 2 << shift // 2)


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": root,
    "fma": lambda a, b, c: a * b + c,
}
PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "fma": lambda a, b, c: a * b + c,
}


def toward(value: Fraction, type_: str, mode: str) -> float:
    """A fraction that is not 0, rounded in a direction."""
    digits, least, most = FORMATS[type_]
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - digits + 1, least)
    up = mode == "rp" if value > 0 else mode == "rm"  # away from zero
    count = math.ceil(size / step) if up else math.floor(size / step)
    result = count * step
    top = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** most
    found = math.inf if result > top and up else float(min(result, top))
    return found if value > 0 else -found


def directed(name: str, type_: str, mode: str) -> Callable[..., Array]:
    """An operation on lanes with rounding mode rz, rm or rp."""
    exact, plain = EXACT[name], PLAIN[name]

    def run(*values: Array) -> Array:
        result = np.array(plain(*values), TYPES[type_])
        finite = np.logical_and.reduce([np.isfinite(v) for v in values])
        if name in ("div", "rcp", "sqrt"):
            finite &= values[-1] > 0 if name == "sqrt" else values[-1] != 0
        for lane in np.flatnonzero(finite):
            value = exact(*[Fraction(float(v[lane])) for v in values])
            if value:
                result[lane] = toward(value, type_, mode)
            elif mode == "rm" and name in ("add", "sub", "fma") and not np.signbit(result[lane]):
                same = all(v[lane] == 0 for v in values)
                result[lane] = 0.0 if same and name != "sub" else -0.0
        return result

    return run
