"""Exact remainders, however large the quotient: of a float by a float, of an angle by pi/2.

What `tile.functions` computes in a straight line holds while the quotient has few bits. These are
the other lanes' ways, which a kernel takes rarely: a long division that leaves the exact rest of a
mantissa's worth of quotient bits a turn, and the product of an angle with just those bits of 2/pi
that matter to it (Payne and Hanek's reduction). Both are written over `scope.Operations`.

Invariant: a remainder is the exact one. An angle's is within 2**-60 (float32) or 2**-124 (float64)
of pi/2, which leaves 8 bits more than the mantissa has for the float nearest to a multiple of pi/2.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from .scope import Integer, Mask, Scope, Value

# The bits of 2/pi after the point in words of an integer's width, a word of zeros before them.
TWO_OVER_PI = {
    "float32": (0x00000000, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041),
    "float64": (
        0x0000000000000000,
        0xA2F9836E4E441529,
        0xFC2757D1F534DDC0,
        0xDB6295993C439041,
        0xFE5163ABDEBBC561,
        0xB7246E3A424DD2E0,
        0x06492EEA09D1921C,
        0xFE1DEB1CB129A73E,
        0xE88235F52EBB4484,
        0xE99C7026B45F7E41,
        0x3991D639835339F4,
        0x9C845F8BBDF9283B,
        0x1FF897FFDE05980F,
        0xEF2F118B5A0A6D1F,
        0x6D367ECF27CB09B7,
        0x4F463F669E5FEA2D,
        0x7527BAC7EBE5F17B,
        0x3D0739F78A5292EA,
        0x6BFB5FB11F8D5D08,
    ),
}
HIGHER = {"float32": (100, 100), "float64": (500, 583)}  # powers of two that multiply a divisor


def far_modulo(scope: Scope, x: Value, y: Value) -> Value:
    """|x| modulo |y|; NaN where x is infinite or y is 0, or one of them NaN.

    A quotient rounded towards zero leaves a remainder that is exact, whatever its size: one that
    rounded up, which a negative remainder tells, goes back by a unit. Where exponents lie far
    apart a multiple of y by a power of two is divided by first, so that no quotient overflows.
    """
    o = scope.operations
    a, b = o.absolute(x), o.absolute(y)
    good = o.logical_and(o.less(a, scope.constant(math.inf)), o.less(scope.constant(0.0), b))
    divisor = o.select(good, b, scope.constant(1.0))
    first, second = HIGHER[scope.dtype]
    higher = scope.scale(divisor, 2.0**first)
    highest = scope.scale(higher, 2.0**second)

    def going(rest: Value) -> Mask:
        return o.less_equal(divisor, rest)

    def step(rest: Value) -> Value:
        by = o.select(o.less_equal(higher, rest), higher, divisor)
        by = o.select(o.less_equal(highest, rest), highest, by)
        quotient = o.divide(rest, by)
        lost = scope.multiply_add(o.negative(quotient), by, rest)
        less = o.bitcast_float(o.int_subtract(o.bitcast_int(quotient), scope.integer(1)))
        quotient = o.floor(o.select(o.less(lost, scope.constant(0.0)), less, quotient))
        return scope.multiply_add(o.negative(quotient), by, rest)

    rest = o.repeat(going, step, o.select(good, a, scope.constant(0.0)))
    return o.select(good, rest, scope.constant(math.nan))


def far_angle(scope: Scope, x: Value) -> tuple[Integer, Value, Value]:
    """x = n * pi/2 + r + r_low: low bits of n, and r in two parts; for |x| >= 4, NaN if infinite.

    The mantissa times 2/pi, as a fraction of four quarter turns in two words: what whole turns
    add is never computed, as their bits of 2/pi are left out.
    """
    o, table = scope.operations, scope.table
    width = table.digits + table.bias.bit_length() + 2  # of an integer
    bits = o.bitcast_int(o.absolute(x))
    exponent = o.int_shift_right(bits, table.digits)
    mantissa = o.int_and(bits, scope.integer((1 << table.digits) - 1))
    mantissa = o.int_or(mantissa, scope.integer(1 << table.digits))
    mantissa = o.int_shift_left(mantissa, width - 1 - table.digits)  # its first bit is set
    start = o.int_subtract(exponent, scope.integer(table.bias + 1))
    first, second, third = _window(scope, start, width)
    high, low = _product(scope, mantissa, first, second, third, width)
    # high and low: x * 2/pi modulo 4, in units of 2**-(2 * width - 2)
    quarter = o.int_add(high, scope.integer(1 << (width - 3)))
    n = o.int_shift_right_unsigned(quarter, width - 2)
    high = o.int_subtract(high, o.int_shift_left(n, width - 2))
    below = o.int_shift_right(high, width - 1)  # all ones where the rest is negative
    r, r_low = _as_angle(scope, o.int_xor(high, below), o.int_xor(low, below), width)
    sign = o.int_and(o.int_xor(below, o.bitcast_int(x)), scope.integer(table.sign_bit))
    r, r_low = (o.bitcast_float(o.int_xor(o.bitcast_int(part), sign)) for part in (r, r_low))
    negative = o.int_shift_right(o.bitcast_int(x), width - 1)
    n = o.int_subtract(o.int_xor(n, negative), negative)
    finite = o.less(o.absolute(x), scope.constant(math.inf))
    return n, o.select(finite, r, scope.constant(math.nan)), r_low


def _signed(word: int, width: int) -> int:
    """A word as the signed integer of its bits."""
    return word - (1 << width) if word >> (width - 1) else word


def _window(scope: Scope, start: Integer, width: int) -> list[Integer]:
    """Three words of 2/pi from a bit on: the table moved by whole words, then by bits."""
    o = scope.operations
    table = TWO_OVER_PI[scope.dtype]
    words: list[Any] = [scope.integer(_signed(word, width)) for word in table]
    moves = (len(words) - 4).bit_length()
    for number in reversed(range(moves)):
        amount = 1 << number
        bit = o.int_and(start, scope.integer(width << number))
        stays = o.int_equal(bit, scope.integer(0))
        left = min(len(words) - amount, amount + 3)
        words = [o.select(stays, words[i], words[i + amount]) for i in range(left)]
    by = o.int_and(start, scope.integer(width - 1))
    back = o.int_subtract(scope.integer(width - 1), by)
    found = []
    for word, following in pairwise(words):
        rest = o.int_shift_right_by(o.int_shift_right_unsigned(following, 1), back)
        found.append(o.int_or(o.int_shift_left_by(word, by), rest))
    return found


def _product(
    scope: Scope, m: Integer, first: Integer, second: Integer, third: Integer, width: int
) -> tuple[Integer, Integer]:
    """m * (first, second, third) without its highest word and its two lowest."""
    o = scope.operations
    low, more = o.int_multiply(m, second), o.int_multiply_high(m, third)
    total = o.int_add(low, more)
    both, either = o.int_and(low, more), o.int_or(low, more)
    flipped = o.int_xor(total, scope.integer(-1))
    carry = o.int_or(both, o.int_and(either, flipped))
    carry = o.int_shift_right_unsigned(carry, width - 1)
    high = o.int_add(o.int_multiply(m, first), o.int_multiply_high(m, second))
    return o.int_add(high, carry), total


def _as_angle(scope: Scope, high: Integer, low: Integer, width: int) -> tuple[Value, Value]:
    """pi/2 times a fraction in two words that is not negative, in two parts."""
    o, half = scope.operations, width // 2
    mask = scope.integer((1 << half) - 1)
    parts = [
        o.int_shift_right_unsigned(high, half),
        o.int_and(high, mask),
        o.int_shift_right_unsigned(low, half),
        o.int_and(low, mask),
    ]
    scales = [2.0 ** (2 - half - half * i) for i in range(4)]
    floats = [scope.scale(o.to_float(part), scale) for part, scale in zip(parts, scales)]
    total, lost = scope.two_sum(floats[0], floats[1])
    total, more = scope.two_sum(total, floats[2])
    rest = o.add(o.add(lost, more), floats[3])
    first, second, _ = (scope.constant(part) for part in scope.table.half_pi)
    r, r_low = scope.two_product(total, first)
    r_low = scope.multiply_add(total, second, r_low)
    return r, scope.multiply_add(rest, first, r_low)
