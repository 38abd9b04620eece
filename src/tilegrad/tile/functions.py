"""Elementary functions, written once over Tile ops on Elements: no target has another exp or erf.

A target's Machine computes an op by its row of the target's table, the tests' by NumPy. A function
sees its values only as Elements, so what the tests measure is what a kernel computes.

Invariant: each is one straight line of operations for a dtype, elementwise, with `where` where
the ranges of an argument need different formulas. NaN, infinities, signed zeros and subnormals give
what C99 asks for. No function branches on a value but those that say so with `rarely`: sin, cos and
tan of |x| from 2**21 (float32) or 2**45 (float64) on, and remainders with large quotients, go
another way (`modulo`), as few arguments need it and it costs several times the usual one. Error
bounds in ulp and the price of exp, tanh and erf stand in tests/tile/test_functions.py.

What they are written over, and their coefficients, stand in `scope`. The file is long because it
is one table of functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..core.dtype import float32
from .modulo import far_angle, far_modulo
from .scope import (
    Coefficients,
    Element,
    Rare,
    multiply_add,
    polynomial,
    two_product,
    two_sum,
    where,
)


def sign(x: Element) -> Element:
    """1, -1 or 0; nan and signed zeros stay."""
    if x.dtype.kind == "bool":
        return x
    rest = x if x.dtype.is_float else x.constant(0)
    if x.dtype.kind != "uint":
        rest = where(x < 0, -1, rest)
    return where(x > 0, 1, rest)


def exp(x: Element) -> Element:
    """e**x, underflowing gradually."""
    return _exponential(x, 1.0)


def _power_of_e(x: Element) -> tuple[Element, Element]:
    """e**x = e**r * 2**n with |r| <= ln(2) / 2: e**r, and bits that hold n + 2 * bias."""
    table = x.table
    bits, n = x.nearest_integer(table.log2_e, 2 * table.bias)
    r = multiply_add(n, -table.ln2[0], x)  # exact
    r = multiply_add(n, -table.ln2[1], r)
    return polynomial(r, (*table.exp, 1.0, 1.0)), bits


def _exponential(x: Element, factor: float) -> Element:
    """factor * e**x."""
    lowest, highest = x.table.exp_range
    gone = x < lowest  # underflows to 0: skip, subnormals are slow
    x = where(gone, 0.0, x).at_most(highest)
    result, bits = _power_of_e(x)
    if factor != 1.0:
        result = result * factor
    result = result.scale_by_power(bits)
    return where(gone, 0.0, result)


def exp2(x: Element) -> Element:
    """2**x, exact where x is an integer."""
    x = x.clamp(x.table.exp2_range)
    bits, n = x.nearest_integer(1.0, 2 * x.table.bias)
    result = polynomial(x - n, (*x.table.exp2, 1.0))
    return result.scale_by_power(bits)


def expm1(x: Element) -> Element:
    """e**x - 1, accurate near zero."""
    table = x.table
    held = x.clamp(table.expm1_range)
    bits, n = held.nearest_integer(table.log2_e, table.bias - 1)
    first = multiply_add(n, -table.ln2[0], held)  # exact
    low = -table.ln2[1]
    r = multiply_add(n, low, first)
    error = multiply_add(n, low, first - r)
    square = r * r
    tail = multiply_add(square, polynomial(r, table.exp), error)
    half = bits.power_of_two()  # 2**(n - 1), so that n may be bias + 1
    rest = half + -0.5
    result = multiply_add(half, r + tail, rest)
    tiny = abs(x) < 2.0 ** (-table.digits - 3)
    return where(tiny, x, result + result)


def tanh(x: Element) -> Element:
    """Hyperbolic tangent: a polynomial, then 1 - 2 / (e**(2|x|) + 1)."""
    table = x.table
    a = abs(x).at_most(table.tanh_limit)
    square = a * a
    bend = square * polynomial(square, table.tanh)
    near = multiply_add(a, bend, a)
    bits, n = a.nearest_integer(2.0 * table.log2_e, table.bias)
    r = multiply_add(n, -0.5 * table.ln2[0], a)  # n is small: enough
    half = polynomial(r, table.tanh_exp)  # e**(2 r) / 2
    divisor = multiply_add(half, bits.power_of_two(), 0.5)
    far = 1.0 - 1.0 / divisor
    result = where(a < table.tanh_split, near, far)
    return result.copy_sign(x)


def sinh(x: Element) -> Element:
    """Hyperbolic sine."""
    a = abs(x)
    square = a * a
    cube = square * a
    near = multiply_add(cube, polynomial(square, x.table.sinh), a)
    half = _exponential(a, 0.5)
    far = half - 0.25 / half
    result = where(a < 1.0, near, far)
    return result.copy_sign(x)


def cosh(x: Element) -> Element:
    """Hyperbolic cosine."""
    half = _exponential(abs(x), 0.5)
    return half + 0.25 / half


def _reduce_logarithm(x: Element) -> tuple[Element, Element]:
    """e and m with x = 2**e * m and 2/3 <= m < 4/3, for normal x."""
    table = x.table
    bits = x.bits
    above = bits - table.two_thirds_bits
    e = above >> table.digits
    m = bits - (e << table.digits)
    return e, m.as_float()


def _reduce_any(x: Element) -> tuple[Element, Element]:
    """e as a float and f = m - 1 for positive x, subnormals included."""
    digits = x.table.digits
    small = x < 2.0 ** (2 - x.table.bias)
    scaled = where(small, x * 2.0 ** (digits + 2), x)
    e, m = _reduce_logarithm(scaled)
    e = e.to_float() + where(small, x.constant(-digits - 2.0), 0.0)
    return e, m - 1.0


def _logarithm_rest(f: Element) -> Element:
    """log(1 + f) - f for |f| <= 1/3."""
    if f.dtype is float32:
        inner = multiply_add(polynomial(f, f.table.log), f, -0.5)
        return inner * (f * f)
    # float64: log(1 + f) = 2 atanh(s); dividing is cheaper than twice the degree
    s = f / (f + 2.0)
    w = s * s
    half_square = f * 0.5 * f
    tail = multiply_add(w, polynomial(w, f.table.log), half_square)
    return multiply_add(s, tail, -half_square)


def _logarithm(e: Element, f: Element, f_low: Element | None = None) -> Element:
    """e * ln(2) + log(1 + f + f_low)."""
    rest = _logarithm_rest(f)
    if f_low is not None:
        rest = rest + f_low
    high, low = f.table.ln2
    return multiply_add(e, high, f + multiply_add(e, low, rest))


def _logarithm_edges(x: Element, result: Element) -> Element:
    """-infinity at x = 0, NaN below; infinity and NaN stay what they are."""
    result = where(x < math.inf, result, x)
    edge = where(x == 0.0, x.constant(-math.inf), math.nan)
    return where(x <= 0.0, edge, result)


def log(x: Element) -> Element:
    """Natural logarithm."""
    e, f = _reduce_any(x)
    return _logarithm_edges(x, _logarithm(e, f))


def log2(x: Element) -> Element:
    """Logarithm to base 2, exact at powers of two."""
    e, f = _reduce_any(x)
    high, low = (0.5 * part for part in x.table.two_log2_e)
    result = e + _scaled_logarithm(f, (high, low))
    return _logarithm_edges(x, result)


def log10(x: Element) -> Element:
    """Logarithm to base 10."""
    e, f = _reduce_any(x)
    high, low = x.table.log10_2
    rest = multiply_add(e, low, _scaled_logarithm(f, x.table.log10_e))
    return _logarithm_edges(x, multiply_add(e, high, rest))


def _scaled_logarithm(f: Element, factor: tuple[float, float]) -> Element:
    """factor * log(1 + f)."""
    rest = _logarithm_rest(f) * factor[0]
    rest = multiply_add(f, factor[1], rest)
    return multiply_add(f, factor[0], rest)


def log1p(x: Element) -> Element:
    """log(1 + x), accurate near zero."""
    table = x.table
    u = 1.0 + x
    e, m = _reduce_logarithm(u)
    # f + f_low = (1 + x) * 2**-e - 1 from x itself; for large x the 1 is lost anyway.
    shifted = e << table.digits
    k = (table.one_bits - shifted).as_float()
    k_less = k - 1.0
    f = multiply_add(x, k, k_less)
    f_low = multiply_add(x, k, k_less - f)
    large = 2.0 ** (2 * table.digits) < x
    f = where(large, m - 1.0, f)
    f_low = where(large, 0.0, f_low)
    result = _logarithm(e.to_float(), f, f_low)
    result = _logarithm_edges(u, result)
    return where(x == 0.0, x, result)


def power(x: Element, y: Element) -> Element:
    """x**y = 2**(y * log2|x|) with log2 in two parts, and the sign and edges of C99 pow."""
    a = abs(x)
    high, low = _logarithm2_parts(a)
    finite = (a > 0.0) & (a < math.inf)
    edge = where(a == 0.0, -math.inf, a)
    high = where(finite, high, edge)
    product, error = two_product(y, high)
    error = multiply_add(y, low, error)
    limits = x.table.exp2_range
    inside = abs(product) < limits[1] - limits[0]
    error = where(inside & finite, error, 0.0)
    exponent = product.clamp(limits)
    bits, n = exponent.nearest_integer(1.0, 2 * x.table.bias)
    r = exponent - n + error
    result = polynomial(r, (*x.table.exp2, 1.0))
    result = result.scale_by_power(bits)
    return _power_edges(x, y, result)


def _logarithm2_parts(x: Element) -> tuple[Element, Element]:
    """log2(x) for positive finite x as an unrounded sum of two values."""
    table = x.table
    e, f = _reduce_any(x)
    d, d_low = two_sum(2.0, f)
    s = f / d  # log(m) = 2 s (1 + w/3 + w**2 * tail), w = s**2
    residue = multiply_add(-s, d, f)
    residue = multiply_add(-s, d_low, residue)
    s_low = residue / d
    w, w_low = two_product(s, s)
    w_low = multiply_add(s + s, s_low, w_low)
    t, t_low = _times(w, w_low, table.third)
    tail = w * w * polynomial(w, table.power)
    t_low = t_low + tail
    p, p_low = _times(s, s_low, table.two_log2_e)
    q, q_low = _times(p, p_low, (t, t_low))  # p * (1 + t)
    head, lost = two_sum(e, p)
    total, more = two_sum(head, q)
    rest = lost + more + (p_low + q_low)
    return two_sum(total, rest)


def _times(a: Element, a_low: Element, b: tuple[Any, Any]) -> tuple[Element, Element]:
    """The product of two values in two parts each, in two parts."""
    product, low = two_product(a, b[0])
    low = multiply_add(a, b[1], low)
    return product, multiply_add(a_low, b[0], low)


def _power_edges(x: Element, y: Element, result: Element) -> Element:
    """The sign of a negative base, and the cases where C99 answers 1."""
    whole = y.floor() == y
    half = y * 0.5
    odd = whole & ~(half.floor() == half)
    result = where(odd, result.copy_sign(x), result)
    finite = -math.inf < x
    negative = (x < 0.0) & finite
    bad = negative & ~whole
    result = where(bad, math.nan, result)
    infinite = abs(y) == math.inf
    minus_one = (x == -1.0) & infinite
    answer = (x == 1.0) | (y == 0.0)
    return where(answer | minus_one, 1.0, result)


def erf(x: Element) -> Element:
    """Error function."""
    table = x.table
    a = abs(x).at_most(table.erf_limit)
    square = a * a
    near = multiply_add(a, polynomial(square, table.erf), a)
    if x.dtype is float32:  # the polynomial is erfc(a)**(1/4)
        root = polynomial(a, table.erf_tail)
        root = root * root
        far = multiply_add(-root, root, 1.0)
    else:  # the polynomial is erfc(a) * e**(a*a)
        tail = polynomial(a - 2.5, table.erf_tail)
        decay = _exponential(-square, -1.0)
        far = multiply_add(decay, tail, 1.0)
    result = where(a < table.erf_split, near, far)
    return result.copy_sign(x)


def erfc(x: Element) -> Element:
    """1 - erf(x), accurate where erf is near 1: e**(-a*a) * (1 + polynomial) / (1 + 2 a), a = |x|.

    The square and the divisor have low parts, and the power of two comes last.
    """
    table = x.table
    a = abs(x).at_most(table.erfc_limit)
    square, square_low = two_product(a, a)
    q = (a - table.erfc_center) / (a + table.erfc_center)
    bend = polynomial(q, table.erfc)
    double = a + a
    divisor = double + 1.0
    divisor_low = 1.0 - (divisor - double)  # exact for double >= 1, ...
    small = double - (divisor - 1.0)  # ... and this below
    divisor_low = where(double < 1.0, small, divisor_low)
    inverse = 1.0 / divisor
    lost = multiply_add(-inverse, divisor, 1.0)
    lost = multiply_add(-inverse, divisor_low, lost)
    tail = multiply_add(inverse, bend, inverse * lost)
    whole = inverse + tail
    tail = multiply_add(-whole, square_low, tail)
    power, bits = _power_of_e(-square)
    result = multiply_add(power, inverse, power * tail)
    result = result.scale_by_power(bits)
    near = 1.0 - multiply_add(a, polynomial(square, table.erf), a)
    result = where(a < 0.5, near, result)
    return where(x < 0.0, 2.0 - result, result)


def erf_inverse(x: Element) -> Element:
    """The y with erf(y) = x: a rational function of x**2, then of sqrt(-log(1 - |x|))."""
    table = x.table
    a = abs(x)
    center = multiply_add(-a, a, 0.5625)
    s, s_low = _root_of_logarithm(1.0 - a)
    top, bottom = _ratio(s - 1.175, table.inverse_middle)
    if table.inverse_tail[0]:
        far = table.inverse_middle_end < s
        moved = s - table.inverse_middle_end
        far_top, far_bottom = _ratio(moved, table.inverse_tail)
        top = where(far, far_top, top)
        bottom = where(far, far_bottom, bottom)
    near_top, near_bottom = _ratio(center, table.inverse_center)
    near = a <= 0.75
    top = where(near, near_top, top)
    bottom = where(near, near_bottom, bottom)
    bend = top / bottom  # y / a - 1 near 0.0, else y - s
    beyond = s + (bend + s_low)  # dy/ds is within 5% of 1
    result = where(near, multiply_add(a, bend, a), beyond)
    result = where(a == 1.0, math.inf, result)
    return result.copy_sign(x)


def _root_of_logarithm(u: Element) -> tuple[Element, Element]:
    """sqrt(-log(u)) in two parts for 0 < u < 1; NaN for negative u."""
    e, f = _reduce_any(u)
    ln2, ln2_low = (-part for part in u.table.ln2)
    product, low = two_product(e, ln2)
    low = multiply_add(e, ln2_low, low)
    total, lost = two_sum(product, -f)
    rest = lost + low - _logarithm_rest(f)
    total, rest = two_sum(total, rest)
    total = where(u < 0.0, math.nan, total)
    root = total.root()
    residue = multiply_add(-root, root, total)
    return (root, (residue + rest) / (root + root))


def _ratio(x: Element, tables: tuple[Coefficients, Coefficients]) -> tuple[Element, Element]:
    """Numerator and denominator of a rational function."""
    return (polynomial(x, tables[0]), polynomial(x, tables[1]))


def _near_angle(x: Element) -> tuple[Element, Element, Element]:
    """x = n * pi/2 + r + r_low below angle_limit: low bits of n, and r in two parts.

    pi/2 in three parts leaves r relatively accurate however close x is to a multiple of it.
    """
    bits, n = x.nearest_integer(2.0 / math.pi, 0)
    first, second, third = (-part for part in x.table.half_pi)
    exact = multiply_add(n, first, x)
    product, product_low = two_product(n, second)
    r = exact + product
    part = r - exact
    lost = exact - (r - part)
    lost = lost + (product - part)
    return bits, r, multiply_add(n, third, lost + product_low)


def _of_angle(name: str, x: Element, done: Callable[..., Element]) -> Element:
    """done(x, n, r, r_low) for the angle x = n * pi/2 + r + r_low."""

    def near(x: Element) -> tuple[Any, ...]:
        inside = abs(x) < x.table.angle_limit
        return ~inside, *_near_angle(x)

    return x.machine.rarely(Rare(name, near, far_angle, done), x)


def _sine_and_cosine(r: Element, r_low: Element) -> tuple[Element, Element]:
    """sin and cos of r + r_low for |r| <= pi/4."""
    table = r.table
    w = r * r
    cube = w * r
    sine = r + multiply_add(cube, polynomial(w, table.sin), r_low)
    half = multiply_add(w, -0.5, 1.0)
    lost = multiply_add(w, -0.5, 1.0 - half)
    tail = multiply_add(-r, r_low, lost)
    square = w * w
    tail = multiply_add(square, polynomial(w, table.cos), tail)
    return sine, half + tail


def _quadrant(bits: Element, r: Element, r_low: Element) -> Element:
    """sin(n * pi/2 + r + r_low), where `bits` has the low bits of n."""
    table = r.table
    sine, cosine = _sine_and_cosine(r, r_low)
    odd = (bits & 1) == 1
    result = where(odd, cosine, sine)
    half_turn = bits & 2
    sign = half_turn << (table.digits + table.bias.bit_length())
    return (result.bits ^ sign).as_float()


def sin(x: Element) -> Element:
    """Sine."""

    def done(x: Element, bits: Element, r: Element, r_low: Element) -> Element:
        result = _quadrant(bits, r, r_low)
        return where(x == 0.0, x, result)

    return _of_angle("sin", x, done)


def cos(x: Element) -> Element:
    """Cosine."""

    def done(x: Element, bits: Element, r: Element, r_low: Element) -> Element:
        return _quadrant(bits + 1, r, r_low)

    return _of_angle("cos", x, done)


def tan(x: Element) -> Element:
    """Tangent."""

    def done(x: Element, bits: Element, r: Element, r_low: Element) -> Element:
        w = r * r
        cube = w * r
        slope = multiply_add(r_low, w, r_low)  # derivative 1 + tan**2, near enough
        tail = multiply_add(cube, polynomial(w, w.table.tan), slope)
        result = r + tail
        odd = (bits & 1) == 1
        inverse = -1.0 / result
        result = where(odd, inverse, result)
        return where(x == 0.0, x, result)

    return _of_angle("tan", x, done)


# ---- remainders -----------------------------------------------------------------------------


def _of_remainder(name: str, x: Element, y: Element, done: Callable[..., Element]) -> Element:
    """done(x, y, rest) for the exact remainder of x by y that has the sign of x.

    A quotient below 2**(digits + 1) is at most one too large when it is rounded to a whole
    number, and what it leaves is a float: so is what adding the divisor once makes of that.
    """

    def near(x: Element, y: Element) -> tuple[Any, ...]:
        a, b = abs(x), abs(y)
        quotient = a / b
        whole = quotient.floor()
        rest = multiply_add(-whole, b, a)
        rest = where(rest < 0.0, rest + b, rest)
        rest = where(whole == 0.0, a, rest)  # b may be infinite
        few = quotient < 2.0 ** (x.table.digits + 1)
        return ~few, rest

    def far(x: Element, y: Element) -> tuple[Any, ...]:
        return (far_modulo(x, y),)

    def end(x: Element, y: Element, rest: Element) -> Element:
        return done(x, y, rest.copy_sign(x))

    return x.machine.rarely(Rare(name, near, far, end), x, y)


def _crosses(rest: Element, y: Element) -> Element:
    """Whether a remainder that is not zero has another sign than the divisor."""
    return ((rest.bits ^ y.bits) < 0) & ~(rest == 0.0)


def fmod(x: Element, y: Element) -> Element:
    """The remainder of x by y with the sign of x, exact."""
    return _of_remainder("fmod", x, y, lambda x, y, rest: rest)


def remainder(x: Element, y: Element) -> Element:
    """The remainder of x by y with the sign of y; fmod plus y, rounded, where fmod's is another."""

    def done(x: Element, y: Element, rest: Element) -> Element:
        moved = rest + y
        return where(_crosses(rest, y), moved, rest)

    return _of_remainder("remainder", x, y, done)


def floor_divide(x: Element, y: Element) -> Element:
    """x / y rounded down, by its remainder; x / y where y is 0."""

    def done(x: Element, y: Element, rest: Element) -> Element:
        one = x.constant(1.0)
        ratio = x / y
        quotient = (x - rest) / y
        quotient = quotient - where(_crosses(rest, y), one, 0.0)
        whole = quotient.floor()
        up = quotient - whole > 0.5
        whole = whole + where(up, one, 0.0)
        none = (ratio.bits & x.table.sign_bit).as_float()
        whole = where(quotient == 0.0, none, whole)
        return where(y == 0.0, ratio, whole)

    return _of_remainder("floor_divide", x, y, done)


def atan(x: Element) -> Element:
    """Inverse tangent."""
    a = abs(x)
    z = a.at_most(1.0) / a.at_least(1.0)
    w = z * z
    tail = z * w * polynomial(w, x.table.atan)
    high, low, _ = x.table.half_pi
    rest = low - tail
    beyond = high - z + rest
    result = where(a > 1.0, beyond, z + tail)
    return result.copy_sign(x)


def _arc(a: Element) -> tuple[Element, Element]:
    """Whether a > 1/2, and then asin(sqrt((1 - a) / 2)), else asin(a)."""
    big = a > 0.5
    folded = (1.0 - a) * 0.5
    z = where(big, folded, a * a)
    s = where(big, folded.root(), a)
    tail = s * z * polynomial(z, a.table.asin)
    return big, s + tail


def asin(x: Element) -> Element:
    """Inverse sine; NaN outside [-1, 1]."""
    big, arc = _arc(abs(x))
    high, low, _ = x.table.half_pi
    folded = multiply_add(arc, -2.0, high)
    result = where(big, folded + low, arc)
    return result.copy_sign(x)


def acos(x: Element) -> Element:
    """Inverse cosine; NaN outside [-1, 1]."""
    big, arc = _arc(abs(x))
    high, low, _ = x.table.half_pi
    signed = arc.copy_sign(x)
    near = high - (signed - low)
    double = arc + arc
    far = 2.0 * high - (double - 2.0 * low)
    far = where(x < 0.0, far, double)
    return where(big, far, near)
