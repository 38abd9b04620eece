"""Elementary functions, written once over array operations that the caller passes in.

The compiler passes a builder that emits vector instructions, the tests pass NumPy. A function
sees its values only through `Operations`, so what the tests measure is what a kernel computes.

Invariant: each is one straight line of operations for a dtype, elementwise, with `select` where
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

from .scope import Coefficients, Integer, Mask, Operations, Scope, Value


def exp(operations: Operations, x: Value) -> Value:
    """e**x, underflowing gradually."""
    return _exponential(Scope(operations, x), x, 1.0)


def _exponential(scope: Scope, x: Value, factor: float) -> Value:
    """factor * e**x: e**x = 2**n * e**r with |r| <= ln(2) / 2."""
    operations, table = scope.operations, scope.table
    lowest, highest = table.exp_range
    gone = operations.less(x, scope.constant(lowest))  # underflows to 0: skip, subnormals are slow
    x = operations.minimum(scope.constant(highest), operations.select(gone, scope.constant(0.0), x))
    bits, n = scope.nearest_integer(x, table.log2_e, 2 * table.bias)
    r = scope.multiply_add(n, scope.constant(-table.ln2[0]), x)  # exact
    r = scope.multiply_add(n, scope.constant(-table.ln2[1]), r)
    result = scope.polynomial(r, (*table.exp, 1.0, 1.0))
    if factor != 1.0:
        result = operations.multiply(result, scope.constant(factor))
    result = scope.scale_by_power(result, bits)
    return operations.select(gone, scope.constant(0.0), result)


def exp2(operations: Operations, x: Value) -> Value:
    """2**x, exact where x is an integer."""
    scope = Scope(operations, x)
    x = scope.clamp(x, scope.table.exp2_range)
    bits, n = scope.nearest_integer(x, 1.0, 2 * scope.table.bias)
    result = scope.polynomial(operations.subtract(x, n), (*scope.table.exp2, 1.0))
    return scope.scale_by_power(result, bits)


def expm1(operations: Operations, x: Value) -> Value:
    """e**x - 1, accurate near zero."""
    scope = Scope(operations, x)
    table = scope.table
    held = scope.clamp(x, table.expm1_range)
    bits, n = scope.nearest_integer(held, table.log2_e, table.bias - 1)
    first = scope.multiply_add(n, scope.constant(-table.ln2[0]), held)  # exact
    low = scope.constant(-table.ln2[1])
    r = scope.multiply_add(n, low, first)
    error = scope.multiply_add(n, low, operations.subtract(first, r))
    square = operations.multiply(r, r)
    tail = scope.multiply_add(square, scope.polynomial(r, table.exp), error)
    half = scope.power_of_two(bits)  # 2**(n - 1), so that n may be bias + 1
    rest = operations.add(half, scope.constant(-0.5))
    result = scope.multiply_add(half, operations.add(r, tail), rest)
    tiny = operations.less(operations.absolute(x), scope.constant(2.0 ** (-table.digits - 3)))
    return operations.select(tiny, x, operations.add(result, result))


def tanh(operations: Operations, x: Value) -> Value:
    """Hyperbolic tangent: a polynomial, then 1 - 2 / (e**(2|x|) + 1)."""
    scope = Scope(operations, x)
    table = scope.table
    one = scope.constant(1.0)
    a = operations.minimum(scope.constant(table.tanh_limit), operations.absolute(x))
    square = operations.multiply(a, a)
    bend = operations.multiply(square, scope.polynomial(square, table.tanh))
    near = scope.multiply_add(a, bend, a)
    bits, n = scope.nearest_integer(a, 2.0 * table.log2_e, table.bias)
    r = scope.multiply_add(n, scope.constant(-0.5 * table.ln2[0]), a)  # n is small: enough
    half = scope.polynomial(r, table.tanh_exp)  # e**(2 r) / 2
    divisor = scope.multiply_add(half, scope.power_of_two(bits), 0.5)
    far = operations.subtract(one, operations.divide(one, divisor))
    result = operations.select(operations.less(a, scope.constant(table.tanh_split)), near, far)
    return scope.copy_sign(result, x)


def sinh(operations: Operations, x: Value) -> Value:
    """Hyperbolic sine."""
    scope = Scope(operations, x)
    a = operations.absolute(x)
    square = operations.multiply(a, a)
    cube = operations.multiply(square, a)
    near = scope.multiply_add(cube, scope.polynomial(square, scope.table.sinh), a)
    half = _exponential(scope, a, 0.5)
    far = operations.subtract(half, operations.divide(scope.constant(0.25), half))
    result = operations.select(operations.less(a, scope.constant(1.0)), near, far)
    return scope.copy_sign(result, x)


def cosh(operations: Operations, x: Value) -> Value:
    """Hyperbolic cosine."""
    scope = Scope(operations, x)
    half = _exponential(scope, operations.absolute(x), 0.5)
    return operations.add(half, operations.divide(scope.constant(0.25), half))


def _reduce_logarithm(scope: Scope, x: Value) -> tuple[Integer, Value]:
    """e and m with x = 2**e * m and 2/3 <= m < 4/3, for normal x."""
    operations, table = scope.operations, scope.table
    bits = operations.bitcast_int(x)
    above = operations.int_subtract(bits, scope.integer(table.two_thirds_bits))
    e = operations.int_shift_right(above, table.digits)
    m = operations.int_subtract(bits, operations.int_shift_left(e, table.digits))
    return e, operations.bitcast_float(m)


def _reduce_any(scope: Scope, x: Value) -> tuple[Value, Value]:
    """e as a float and f = m - 1 for positive x, subnormals included."""
    operations, digits = scope.operations, scope.table.digits
    small = operations.less(x, scope.constant(2.0 ** (2 - scope.table.bias)))
    scaled = operations.select(small, scope.scale(x, 2.0 ** (digits + 2)), x)
    e, m = _reduce_logarithm(scope, scaled)
    zero, shift = scope.constant(0.0), scope.constant(-digits - 2.0)
    e = operations.add(operations.to_float(e), operations.select(small, shift, zero))
    return e, operations.subtract(m, scope.constant(1.0))


def _logarithm_rest(scope: Scope, f: Value) -> Value:
    """log(1 + f) - f for |f| <= 1/3."""
    operations = scope.operations
    if scope.dtype == "float32":
        inner = scope.multiply_add(scope.polynomial(f, scope.table.log), f, -0.5)
        return operations.multiply(inner, operations.multiply(f, f))
    # float64: log(1 + f) = 2 atanh(s); dividing is cheaper than twice the degree
    s = operations.divide(f, operations.add(f, scope.constant(2.0)))
    w = operations.multiply(s, s)
    half_square = operations.multiply(scope.scale(f, 0.5), f)
    tail = scope.multiply_add(w, scope.polynomial(w, scope.table.log), half_square)
    return scope.multiply_add(s, tail, operations.negative(half_square))


def _logarithm(scope: Scope, e: Value, f: Value, f_low: Value | None = None) -> Value:
    """e * ln(2) + log(1 + f + f_low)."""
    rest = _logarithm_rest(scope, f)
    if f_low is not None:
        rest = scope.operations.add(rest, f_low)
    low = scope.multiply_add(e, scope.constant(scope.table.ln2[1]), rest)
    return scope.multiply_add(e, scope.constant(scope.table.ln2[0]), scope.operations.add(f, low))


def _logarithm_edges(scope: Scope, x: Value, result: Value) -> Value:
    """-infinity at x = 0, NaN below; infinity and NaN stay what they are."""
    operations = scope.operations
    zero = scope.constant(0.0)
    result = operations.select(operations.less(x, scope.constant(math.inf)), result, x)
    infinity, nan = scope.constant(-math.inf), scope.constant(math.nan)
    edge = operations.select(operations.equal(x, zero), infinity, nan)
    return operations.select(operations.less_equal(x, zero), edge, result)


def log(operations: Operations, x: Value) -> Value:
    """Natural logarithm."""
    scope = Scope(operations, x)
    e, f = _reduce_any(scope, x)
    return _logarithm_edges(scope, x, _logarithm(scope, e, f))


def log2(operations: Operations, x: Value) -> Value:
    """Logarithm to base 2, exact at powers of two."""
    scope = Scope(operations, x)
    e, f = _reduce_any(scope, x)
    high, low = (0.5 * part for part in scope.table.two_log2_e)
    result = operations.add(e, _scaled_logarithm(scope, f, (high, low)))
    return _logarithm_edges(scope, x, result)


def log10(operations: Operations, x: Value) -> Value:
    """Logarithm to base 10."""
    scope = Scope(operations, x)
    e, f = _reduce_any(scope, x)
    high, low = (scope.constant(part) for part in scope.table.log10_2)
    rest = scope.multiply_add(e, low, _scaled_logarithm(scope, f, scope.table.log10_e))
    return _logarithm_edges(scope, x, scope.multiply_add(e, high, rest))


def _scaled_logarithm(scope: Scope, f: Value, factor: tuple[float, float]) -> Value:
    """factor * log(1 + f)."""
    rest = scope.scale(_logarithm_rest(scope, f), factor[0])
    rest = scope.multiply_add(f, scope.constant(factor[1]), rest)
    return scope.multiply_add(f, scope.constant(factor[0]), rest)


def log1p(operations: Operations, x: Value) -> Value:
    """log(1 + x), accurate near zero."""
    scope = Scope(operations, x)
    table = scope.table
    one = scope.constant(1.0)
    u = operations.add(one, x)
    e, m = _reduce_logarithm(scope, u)
    # f + f_low = (1 + x) * 2**-e - 1 from x itself; for large x the 1 is lost anyway.
    shifted = operations.int_shift_left(e, table.digits)
    k = operations.bitcast_float(operations.int_subtract(scope.integer(table.one_bits), shifted))
    k_less = operations.subtract(k, one)
    f = scope.multiply_add(x, k, k_less)
    f_low = scope.multiply_add(x, k, operations.subtract(k_less, f))
    large = operations.less(scope.constant(2.0 ** (2 * table.digits)), x)
    f = operations.select(large, operations.subtract(m, one), f)
    f_low = operations.select(large, scope.constant(0.0), f_low)
    result = _logarithm(scope, operations.to_float(e), f, f_low)
    result = _logarithm_edges(scope, u, result)
    return operations.select(operations.equal(x, scope.constant(0.0)), x, result)


def power(operations: Operations, x: Value, y: Value) -> Value:
    """x**y = 2**(y * log2|x|) with log2 in two parts, and the sign and edges of C99 pow."""
    scope = Scope(operations, x)
    zero, infinity = scope.constant(0.0), scope.constant(math.inf)
    a = operations.absolute(x)
    high, low = _logarithm2_parts(scope, a)
    finite = operations.logical_and(operations.less(zero, a), operations.less(a, infinity))
    edge = operations.select(operations.equal(a, zero), scope.constant(-math.inf), a)
    high = operations.select(finite, high, edge)
    product, error = scope.two_product(y, high)
    error = scope.multiply_add(y, low, error)
    limits = scope.table.exp2_range
    inside = operations.less(operations.absolute(product), scope.constant(limits[1] - limits[0]))
    error = operations.select(operations.logical_and(inside, finite), error, zero)
    exponent = scope.clamp(product, limits)
    bits, n = scope.nearest_integer(exponent, 1.0, 2 * scope.table.bias)
    r = operations.add(operations.subtract(exponent, n), error)
    result = scope.polynomial(r, (*scope.table.exp2, 1.0))
    result = scope.scale_by_power(result, bits)
    return _power_edges(scope, x, y, result)


def _logarithm2_parts(scope: Scope, x: Value) -> tuple[Value, Value]:
    """log2(x) for positive finite x as an unrounded sum of two values."""
    operations, table = scope.operations, scope.table
    e, f = _reduce_any(scope, x)
    d, d_low = scope.two_sum(scope.constant(2.0), f)
    s = operations.divide(f, d)  # log(m) = 2 s (1 + w/3 + w**2 * tail), w = s**2
    residue = scope.multiply_add(operations.negative(s), d, f)
    residue = scope.multiply_add(operations.negative(s), d_low, residue)
    s_low = operations.divide(residue, d)
    w, w_low = scope.two_product(s, s)
    w_low = scope.multiply_add(operations.add(s, s), s_low, w_low)
    third, third_low = (scope.constant(part) for part in table.third)
    t, t_low = scope.two_product(w, third)
    t_low = scope.multiply_add(w, third_low, t_low)
    t_low = scope.multiply_add(w_low, third, t_low)
    tail = operations.multiply(operations.multiply(w, w), scope.polynomial(w, table.power))
    t_low = operations.add(t_low, tail)
    c, c_low = (scope.constant(part) for part in table.two_log2_e)
    p, p_low = scope.two_product(s, c)
    p_low = scope.multiply_add(s, c_low, p_low)
    p_low = scope.multiply_add(s_low, c, p_low)
    q, q_low = scope.two_product(p, t)  # p * (1 + t)
    q_low = scope.multiply_add(p, t_low, q_low)
    q_low = scope.multiply_add(p_low, t, q_low)
    head, lost = scope.two_sum(e, p)
    total, more = scope.two_sum(head, q)
    rest = operations.add(operations.add(lost, more), operations.add(p_low, q_low))
    return scope.two_sum(total, rest)


def _power_edges(scope: Scope, x: Value, y: Value, result: Value) -> Value:
    """The sign of a negative base, and the cases where C99 answers 1."""
    operations = scope.operations
    zero, one = scope.constant(0.0), scope.constant(1.0)
    whole = operations.equal(operations.floor(y), y)
    half = scope.scale(y, 0.5)
    odd = operations.logical_and(
        whole, operations.logical_not(operations.equal(operations.floor(half), half))
    )
    result = operations.select(odd, scope.copy_sign(result, x), result)
    finite = operations.less(scope.constant(-math.inf), x)
    negative = operations.logical_and(operations.less(x, zero), finite)
    bad = operations.logical_and(negative, operations.logical_not(whole))
    result = operations.select(bad, scope.constant(math.nan), result)
    infinite = operations.equal(operations.absolute(y), scope.constant(math.inf))
    minus_one = operations.logical_and(operations.equal(x, scope.constant(-1.0)), infinite)
    answer = operations.logical_or(operations.equal(x, one), operations.equal(y, zero))
    return operations.select(operations.logical_or(answer, minus_one), one, result)


def erf(operations: Operations, x: Value) -> Value:
    """Error function."""
    scope = Scope(operations, x)
    table = scope.table
    a = operations.minimum(scope.constant(table.erf_limit), operations.absolute(x))
    square = operations.multiply(a, a)
    near = scope.multiply_add(a, scope.polynomial(square, table.erf), a)
    if scope.dtype == "float32":  # the polynomial is erfc(a)**(1/4)
        root = scope.polynomial(a, table.erf_tail)
        root = operations.multiply(root, root)
        far = scope.multiply_add(operations.negative(root), root, 1.0)
    else:  # the polynomial is erfc(a) * e**(a*a)
        tail = scope.polynomial(operations.subtract(a, scope.constant(2.5)), table.erf_tail)
        decay = _exponential(scope, operations.negative(square), -1.0)
        far = scope.multiply_add(decay, tail, 1.0)
    result = operations.select(operations.less(a, scope.constant(table.erf_split)), near, far)
    return scope.copy_sign(result, x)


def erfc(operations: Operations, x: Value) -> Value:
    """1 - erf(x), accurate where erf is near 1: e**(-a*a) * (1 + polynomial) / (1 + 2 a), a = |x|.

    The square and the divisor have low parts, and the power of two comes last.
    """
    scope = Scope(operations, x)
    table, o = scope.table, operations
    one, zero = scope.constant(1.0), scope.constant(0.0)
    a = o.minimum(scope.constant(table.erfc_limit), o.absolute(x))
    square, square_low = scope.two_product(a, a)
    center = scope.constant(table.erfc_center)
    q = o.divide(o.subtract(a, center), o.add(a, center))
    bend = scope.polynomial(q, table.erfc)
    double = o.add(a, a)
    divisor = o.add(double, one)
    divisor_low = o.subtract(one, o.subtract(divisor, double))  # exact for double >= 1, ...
    small = o.subtract(double, o.subtract(divisor, one))  # ... and this below
    divisor_low = o.select(o.less(double, one), small, divisor_low)
    inverse = o.divide(one, divisor)
    lost = scope.multiply_add(o.negative(inverse), divisor, one)
    lost = scope.multiply_add(o.negative(inverse), divisor_low, lost)
    tail = scope.multiply_add(inverse, bend, o.multiply(inverse, lost))
    whole = o.add(inverse, tail)
    tail = scope.multiply_add(o.negative(whole), square_low, tail)
    bits, n = scope.nearest_integer(o.negative(square), table.log2_e, 2 * table.bias)
    r = scope.multiply_add(n, scope.constant(-table.ln2[0]), o.negative(square))
    r = scope.multiply_add(n, scope.constant(-table.ln2[1]), r)
    power = scope.polynomial(r, (*table.exp, 1.0, 1.0))
    result = scope.multiply_add(power, inverse, o.multiply(power, tail))
    result = scope.scale_by_power(result, bits)
    near = o.subtract(one, scope.multiply_add(a, scope.polynomial(square, table.erf), a))
    result = o.select(o.less(a, scope.constant(0.5)), near, result)
    return o.select(o.less(x, zero), o.subtract(scope.constant(2.0), result), result)


def erf_inverse(operations: Operations, x: Value) -> Value:
    """The y with erf(y) = x: a rational function of x**2, then of sqrt(-log(1 - |x|))."""
    scope = Scope(operations, x)
    table = scope.table
    one = scope.constant(1.0)
    a = operations.absolute(x)
    center = scope.multiply_add(operations.negative(a), a, 0.5625)
    s, s_low = _root_of_logarithm(scope, operations.subtract(one, a))
    top, bottom = _ratio(scope, operations.subtract(s, scope.constant(1.175)), table.inverse_middle)
    if table.inverse_tail[0]:
        far = operations.less(scope.constant(table.inverse_middle_end), s)
        moved = operations.subtract(s, scope.constant(table.inverse_middle_end))
        far_top, far_bottom = _ratio(scope, moved, table.inverse_tail)
        top = operations.select(far, far_top, top)
        bottom = operations.select(far, far_bottom, bottom)
    near_top, near_bottom = _ratio(scope, center, table.inverse_center)
    near = operations.less_equal(a, scope.constant(0.75))
    top = operations.select(near, near_top, top)
    bottom = operations.select(near, near_bottom, bottom)
    bend = operations.divide(top, bottom)  # y / a - 1 near zero, else y - s
    beyond = operations.add(s, operations.add(bend, s_low))  # dy/ds is within 5% of 1
    result = operations.select(near, scope.multiply_add(a, bend, a), beyond)
    result = operations.select(operations.equal(a, one), scope.constant(math.inf), result)
    return scope.copy_sign(result, x)


def _root_of_logarithm(scope: Scope, u: Value) -> tuple[Value, Value]:
    """sqrt(-log(u)) in two parts for 0 < u < 1; NaN for negative u."""
    operations = scope.operations
    e, f = _reduce_any(scope, u)
    ln2, ln2_low = (scope.constant(-part) for part in scope.table.ln2)
    product, low = scope.two_product(e, ln2)
    low = scope.multiply_add(e, ln2_low, low)
    total, lost = scope.two_sum(product, operations.negative(f))
    rest = operations.subtract(operations.add(lost, low), _logarithm_rest(scope, f))
    total, rest = scope.two_sum(total, rest)
    nan = scope.constant(math.nan)
    total = operations.select(operations.less(u, scope.constant(0.0)), nan, total)
    root = operations.square_root(total)
    residue = scope.multiply_add(operations.negative(root), root, total)
    return root, operations.divide(operations.add(residue, rest), operations.add(root, root))


def _ratio(
    scope: Scope, x: Value, tables: tuple[Coefficients, Coefficients]
) -> tuple[Value, Value]:
    """Numerator and denominator of a rational function."""
    return scope.polynomial(x, tables[0]), scope.polynomial(x, tables[1])


def _near_angle(scope: Scope, x: Value) -> tuple[Integer, Value, Value]:
    """x = n * pi/2 + r + r_low below angle_limit: low bits of n, and r in two parts.

    pi/2 in three parts leaves r relatively accurate however close x is to a multiple of it.
    """
    operations, table = scope.operations, scope.table
    bits, n = scope.nearest_integer(x, 2.0 / math.pi, 0)
    first, second, third = (scope.constant(-part) for part in table.half_pi)
    exact = scope.multiply_add(n, first, x)
    product, product_low = scope.two_product(n, second)
    r = operations.add(exact, product)
    part = operations.subtract(r, exact)
    lost = operations.subtract(exact, operations.subtract(r, part))
    lost = operations.add(lost, operations.subtract(product, part))
    return bits, r, scope.multiply_add(n, third, operations.add(lost, product_low))


def _of_angle(name: str, operations: Operations, x: Value, done: Callable[..., Value]) -> Value:
    """done(scope, x, n, r, r_low) for the angle x = n * pi/2 + r + r_low."""

    def near(o: Operations, x: Value) -> tuple[Any, ...]:
        scope = Scope(o, x)
        inside = o.less(o.absolute(x), scope.constant(scope.table.angle_limit))
        return o.logical_not(inside), *_near_angle(scope, x)

    def far(o: Operations, x: Value) -> tuple[Any, ...]:
        from .modulo import far_angle

        return far_angle(Scope(o, x), x)

    def end(o: Operations, x: Value, *parts: Any) -> Value:
        return done(Scope(o, x), x, *parts)

    return operations.rarely(name, near, far, end, x)


def _sine_and_cosine(scope: Scope, r: Value, r_low: Value) -> tuple[Value, Value]:
    """sin and cos of r + r_low for |r| <= pi/4."""
    operations, table = scope.operations, scope.table
    w = operations.multiply(r, r)
    cube = operations.multiply(w, r)
    sine = operations.add(r, scope.multiply_add(cube, scope.polynomial(w, table.sin), r_low))
    half = scope.multiply_add(w, scope.constant(-0.5), 1.0)
    lost = scope.multiply_add(
        w, scope.constant(-0.5), operations.subtract(scope.constant(1.0), half)
    )
    tail = scope.multiply_add(operations.negative(r), r_low, lost)
    square = operations.multiply(w, w)
    tail = scope.multiply_add(square, scope.polynomial(w, table.cos), tail)
    return sine, operations.add(half, tail)


def _quadrant(scope: Scope, bits: Integer, r: Value, r_low: Value) -> Value:
    """sin(n * pi/2 + r + r_low), where `bits` has the low bits of n."""
    operations, table = scope.operations, scope.table
    sine, cosine = _sine_and_cosine(scope, r, r_low)
    odd = operations.int_equal(operations.int_and(bits, scope.integer(1)), scope.integer(1))
    result = operations.select(odd, cosine, sine)
    half_turn = operations.int_and(bits, scope.integer(2))
    sign = operations.int_shift_left(half_turn, table.digits + table.bias.bit_length())
    return operations.bitcast_float(operations.int_xor(operations.bitcast_int(result), sign))


def sin(operations: Operations, x: Value) -> Value:
    """Sine."""

    def done(scope: Scope, x: Value, bits: Integer, r: Value, r_low: Value) -> Value:
        result = _quadrant(scope, bits, r, r_low)
        zero = scope.operations.equal(x, scope.constant(0.0))
        return scope.operations.select(zero, x, result)

    return _of_angle("sin", operations, x, done)


def cos(operations: Operations, x: Value) -> Value:
    """Cosine."""

    def done(scope: Scope, x: Value, bits: Integer, r: Value, r_low: Value) -> Value:
        return _quadrant(scope, scope.operations.int_add(bits, scope.integer(1)), r, r_low)

    return _of_angle("cos", operations, x, done)


def tan(operations: Operations, x: Value) -> Value:
    """Tangent."""

    def done(scope: Scope, x: Value, bits: Integer, r: Value, r_low: Value) -> Value:
        operations = scope.operations
        w = operations.multiply(r, r)
        cube = operations.multiply(w, r)
        slope = scope.multiply_add(r_low, w, r_low)  # derivative 1 + tan**2, near enough
        tail = scope.multiply_add(cube, scope.polynomial(w, scope.table.tan), slope)
        result = operations.add(r, tail)
        odd = operations.int_equal(operations.int_and(bits, scope.integer(1)), scope.integer(1))
        inverse = operations.divide(scope.constant(-1.0), result)
        result = operations.select(odd, inverse, result)
        return operations.select(operations.equal(x, scope.constant(0.0)), x, result)

    return _of_angle("tan", operations, x, done)


# ---- remainders -----------------------------------------------------------------------------


def _of_remainder(
    name: str, operations: Operations, x: Value, y: Value, done: Callable[..., Value]
) -> Value:
    """done(scope, x, y, rest) for the exact remainder of x by y that has the sign of x.

    A quotient below 2**(digits + 1) is at most one too large when it is rounded to a whole
    number, and what it leaves is a float: so is what adding the divisor once makes of that.
    """

    def near(o: Operations, x: Value, y: Value) -> tuple[Any, ...]:
        scope = Scope(o, x)
        a, b = o.absolute(x), o.absolute(y)
        quotient = o.divide(a, b)
        whole = o.floor(quotient)
        rest = scope.multiply_add(o.negative(whole), b, a)
        rest = o.select(o.less(rest, scope.constant(0.0)), o.add(rest, b), rest)
        rest = o.select(o.equal(whole, scope.constant(0.0)), a, rest)  # b may be infinite
        few = o.less(quotient, scope.constant(2.0 ** (scope.table.digits + 1)))
        return o.logical_not(few), rest

    def far(o: Operations, x: Value, y: Value) -> tuple[Any, ...]:
        from .modulo import far_modulo

        return (far_modulo(Scope(o, x), x, y),)

    def end(o: Operations, x: Value, y: Value, rest: Value) -> Value:
        scope = Scope(o, x)
        return done(scope, x, y, scope.copy_sign(rest, x))

    return operations.rarely(name, near, far, end, x, y)


def _crosses(scope: Scope, rest: Value, y: Value) -> Mask:
    """Whether a remainder that is not zero has another sign than the divisor."""
    operations = scope.operations
    sign = operations.int_xor(operations.bitcast_int(rest), operations.bitcast_int(y))
    other = operations.int_less(sign, scope.integer(0))
    none = operations.equal(rest, scope.constant(0.0))
    return operations.logical_and(other, operations.logical_not(none))


def fmod(operations: Operations, x: Value, y: Value) -> Value:
    """The remainder of x by y with the sign of x, exact."""
    return _of_remainder("fmod", operations, x, y, lambda scope, x, y, rest: rest)


def remainder(operations: Operations, x: Value, y: Value) -> Value:
    """The remainder of x by y with the sign of y; fmod plus y, rounded, where fmod's is another."""

    def done(scope: Scope, x: Value, y: Value, rest: Value) -> Value:
        moved = scope.operations.add(rest, y)
        return scope.operations.select(_crosses(scope, rest, y), moved, rest)

    return _of_remainder("remainder", operations, x, y, done)


def floor_divide(operations: Operations, x: Value, y: Value) -> Value:
    """x / y rounded down, by its remainder; x / y where y is 0."""

    def done(scope: Scope, x: Value, y: Value, rest: Value) -> Value:
        o = scope.operations
        zero, one = scope.constant(0.0), scope.constant(1.0)
        ratio = o.divide(x, y)
        quotient = o.divide(o.subtract(x, rest), y)
        quotient = o.subtract(quotient, o.select(_crosses(scope, rest, y), one, zero))
        whole = o.floor(quotient)
        up = o.less(scope.constant(0.5), o.subtract(quotient, whole))
        whole = o.add(whole, o.select(up, one, zero))
        none = o.bitcast_float(o.int_and(o.bitcast_int(ratio), scope.integer(scope.table.sign_bit)))
        whole = o.select(o.equal(quotient, zero), none, whole)
        return o.select(o.equal(y, zero), ratio, whole)

    return _of_remainder("floor_divide", operations, x, y, done)


def atan(operations: Operations, x: Value) -> Value:
    """Inverse tangent."""
    scope = Scope(operations, x)
    one = scope.constant(1.0)
    a = operations.absolute(x)
    z = operations.divide(operations.minimum(one, a), operations.maximum(one, a))
    w = operations.multiply(z, z)
    tail = operations.multiply(operations.multiply(z, w), scope.polynomial(w, scope.table.atan))
    high, low, _ = scope.table.half_pi
    rest = operations.subtract(scope.constant(low), tail)
    beyond = operations.add(operations.subtract(scope.constant(high), z), rest)
    beyond_one = operations.less(one, a)
    result = operations.select(beyond_one, beyond, operations.add(z, tail))
    return scope.copy_sign(result, x)


def _arc(scope: Scope, a: Value) -> tuple[Mask, Value]:
    """Whether a > 1/2, and then asin(sqrt((1 - a) / 2)), else asin(a)."""
    operations = scope.operations
    half = scope.constant(0.5)
    big = operations.less(half, a)
    folded = operations.multiply(operations.subtract(scope.constant(1.0), a), half)
    z = operations.select(big, folded, operations.multiply(a, a))
    s = operations.select(big, operations.square_root(folded), a)
    tail = operations.multiply(operations.multiply(s, z), scope.polynomial(z, scope.table.asin))
    return big, operations.add(s, tail)


def asin(operations: Operations, x: Value) -> Value:
    """Inverse sine; NaN outside [-1, 1]."""
    scope = Scope(operations, x)
    big, arc = _arc(scope, operations.absolute(x))
    high, low, _ = scope.table.half_pi
    folded = scope.multiply_add(arc, scope.constant(-2.0), high)
    result = operations.select(big, operations.add(folded, scope.constant(low)), arc)
    return scope.copy_sign(result, x)


def acos(operations: Operations, x: Value) -> Value:
    """Inverse cosine; NaN outside [-1, 1]."""
    scope = Scope(operations, x)
    big, arc = _arc(scope, operations.absolute(x))
    high, low, _ = scope.table.half_pi
    signed = scope.copy_sign(arc, x)
    near = operations.subtract(
        scope.constant(high), operations.subtract(signed, scope.constant(low))
    )
    double = operations.add(arc, arc)
    far = operations.subtract(
        scope.constant(2.0 * high), operations.subtract(double, scope.constant(2.0 * low))
    )
    far = operations.select(operations.less(x, scope.constant(0.0)), far, double)
    return operations.select(big, far, near)
