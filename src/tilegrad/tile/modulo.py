"""Exact remainders, however large the quotient: of a float by a float, of an angle by pi/2.

What `tile.functions` computes in a straight line holds while the quotient has few bits. These are
the other lanes' ways, which a kernel takes rarely: a long division that leaves the exact rest of a
mantissa's worth of quotient bits a turn, and the product of an angle with just those bits of 2/pi
that matter to it (Payne and Hanek's reduction). Both are written over `scope.Element`.

Invariant: a remainder is the exact one. An angle's is within 2**-60 (float32) or 2**-124 (float64)
of pi/2, which leaves 8 bits more than the mantissa has for the float nearest to a multiple of pi/2.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from .scope import (
    Element,
    multiply_add,
    multiply_high,
    shift_down,
    two_product,
    two_sum,
    where,
)

# The bits of 2/pi after the point in words of an integer's width, a word of zeros before them.
TWO_OVER_PI = {
    32: (0, 2734261102, 1313084713, 4230436817, 4113882560, 3680671129, 1011060801),
    64: (
        0,
        11743562013128004905,
        18169587780923219392,
        15808362127397457985,
        18325537948574664033,
        13196794004601950944,
        452944820249399836,
        18311050168422213438,
        16754012890938950788,
        16833452818741296705,
        4148332274289687028,
        11278244420634880059,
        2303758334597371919,
        17235013589178936607,
        7869616827067468215,
        5712322887342352941,
        8441921394348257659,
        4397547296490951402,
        7780917995555872008,
    ),
}
HIGHER = {32: (100, 100), 64: (500, 583)}  # powers of two that multiply a divisor


def far_modulo(x: Element, y: Element) -> Element:
    """|x| modulo |y|; NaN where x is infinite or y is 0, or one of them NaN.

    A quotient rounded towards zero leaves a remainder that is exact, whatever its size: one that
    rounded up, which a negative remainder tells, goes back by a unit. Where exponents lie far
    apart a multiple of y by a power of two is divided by first, so that no quotient overflows.
    """
    a, b = abs(x), abs(y)
    good = (a < math.inf) & (b > 0.0)
    divisor = where(good, b, 1.0)
    first, second = HIGHER[x.dtype.bits]
    higher = divisor * 2.0**first
    highest = higher * 2.0**second

    def going(rest: Element) -> Element:
        return divisor <= rest

    def step(rest: Element) -> Element:
        by = where(higher <= rest, higher, divisor)
        by = where(highest <= rest, highest, by)
        quotient = rest / by
        lost = multiply_add(-quotient, by, rest)
        less = (quotient.bits - 1).as_float()
        quotient = where(lost < 0.0, less, quotient).floor()
        return multiply_add(-quotient, by, rest)

    rest = x.machine.repeat(going, step, where(good, a, 0.0))
    return where(good, rest, math.nan)


def far_angle(x: Element) -> tuple[Element, Element, Element]:
    """x = n * pi/2 + r + r_low: low bits of n, and r in two parts; for |x| >= 4, NaN if infinite.

    The mantissa times 2/pi, as a fraction of four quarter turns in two words: what whole turns
    add is never computed, as their bits of 2/pi are left out.
    """
    table = x.table
    width = table.digits + table.bias.bit_length() + 2  # of an integer
    bits = abs(x).bits
    exponent = bits >> table.digits
    mantissa = bits & ((1 << table.digits) - 1)
    mantissa = mantissa | (1 << table.digits)
    mantissa = mantissa << (width - 1 - table.digits)  # its first bit is set
    start = exponent - (table.bias + 1)
    first, second, third = _window(start, width)
    high, low = _product(mantissa, first, second, third, width)
    # high and low: x * 2/pi modulo 4, in units of 2**-(2 * width - 2)
    quarter = high + (1 << (width - 3))
    n = shift_down(quarter, width - 2)
    high = high - (n << (width - 2))
    below = high >> (width - 1)  # all ones where the rest is negative
    r, r_low = _as_angle(high ^ below, low ^ below, width)
    sign = (below ^ x.bits) & table.sign_bit
    r, r_low = ((part.bits ^ sign).as_float() for part in (r, r_low))
    negative = x.bits >> (width - 1)
    n = (n ^ negative) - negative
    finite = abs(x) < math.inf
    return n, where(finite, r, math.nan), r_low


def _signed(word: int, width: int) -> int:
    """A word as the signed integer of its bits."""
    return word - (1 << width) if word >> (width - 1) else word


def _window(start: Element, width: int) -> list[Element]:
    """Three words of 2/pi from a bit on: the table moved by whole words, then by bits."""
    words: list[Any] = [start.constant(_signed(w, width)) for w in TWO_OVER_PI[width]]
    moves = (len(words) - 4).bit_length()
    for number in reversed(range(moves)):
        amount = 1 << number
        bit = start & (width << number)
        stays = bit == 0
        left = min(len(words) - amount, amount + 3)
        words = [where(stays, words[i], words[i + amount]) for i in range(left)]
    by = start & (width - 1)
    back = width - 1 - by
    found = []
    for word, following in pairwise(words):
        rest = shift_down(shift_down(following, 1), back)
        found.append((word << by) | rest)
    return found


def _product(
    m: Element, first: Element, second: Element, third: Element, width: int
) -> tuple[Element, Element]:
    """m * (first, second, third) without its highest word and its two lowest."""
    low, more = m * second, multiply_high(m, third)
    total = low + more
    common, either = low & more, low | more
    flipped = total ^ -1
    carry = common | (either & flipped)
    carry = shift_down(carry, width - 1)
    high = m * first + multiply_high(m, second)
    return high + carry, total


def _as_angle(high: Element, low: Element, width: int) -> tuple[Element, Element]:
    """pi/2 times a fraction in two words that is not negative, in two parts."""
    half = width // 2
    mask = (1 << half) - 1
    parts = [shift_down(high, half), high & mask, shift_down(low, half), low & mask]
    scales = [2.0 ** (2 - half - half * i) for i in range(4)]
    floats = [part.to_float() * scale for part, scale in zip(parts, scales)]
    total, lost = two_sum(floats[0], floats[1])
    total, more = two_sum(total, floats[2])
    rest = lost + more + floats[3]
    first, second, _ = high.table.half_pi
    r, r_low = two_product(total, first)
    r_low = multiply_add(total, second, r_low)
    return r, multiply_add(rest, first, r_low)
