"""Division of integers, written once over Elements and a target's own instructions.

`raw(name, a, b)` is an instruction as it is: 'sdiv', 'udiv' or 'urem'. Integers divided by zero
give 0, and so do their remainders; the lowest by -1 wraps. A floored quotient and its remainder
follow the sign of the divisor. Invariant: no instruction sees a zero divisor or a quotient that
overflows.
"""

from __future__ import annotations

from collections.abc import Callable

from .scope import Element, where

Raw = Callable[[str, Element, Element], Element]


def _divided(raw: Raw, a: Element, b: Element) -> tuple[Element, Element, Element, Element]:
    """The truncated quotient, the remainder, a divisor that cannot trap, whether b is 0."""
    none, signed = b == 0, a.dtype.kind == "int"
    safe = where(none, 1, b)
    if signed:  # the lowest by -1 would trap: divide it by 1 instead
        safe = where((a == int(a.dtype.lowest)) & (safe == -1), 1, safe)
    quotient = raw("sdiv" if signed else "udiv", a, safe)
    return quotient, a - quotient * safe, safe, none


def _crossed(rest: Element, divisor: Element) -> Element:
    """Whether a non-zero remainder has another sign than the divisor."""
    return ((rest ^ divisor) < 0) & (rest != 0)


def divide(raw: Raw, a: Element, b: Element) -> Element:
    """The quotient truncated."""
    quotient, _, _, none = _divided(raw, a, b)
    return where(none, 0, quotient)


def floor_divide(raw: Raw, a: Element, b: Element) -> Element:
    """The quotient rounded down."""
    quotient, rest, divisor, none = _divided(raw, a, b)
    if a.dtype.kind == "int":
        quotient = where(_crossed(rest, divisor), quotient - 1, quotient)
    return where(none, 0, quotient)


def remainder(raw: Raw, a: Element, b: Element) -> Element:
    """What a floored quotient leaves."""
    _, rest, divisor, none = _divided(raw, a, b)
    if a.dtype.kind == "int":
        rest = where(_crossed(rest, divisor), rest + divisor, rest)
    return where(none, 0, rest)


def fmod(raw: Raw, a: Element, b: Element) -> Element:
    """What a truncated quotient leaves."""
    return _divided(raw, a, b)[1]  # a zero divisor was taken for 1


def unsigned_divide(raw: Raw, a: Element, b: Element) -> Element:
    """The quotient of operands seen as unsigned."""
    none = b == 0
    return where(none, 0, raw("udiv", a, where(none, 1, b)))


def unsigned_remainder(raw: Raw, a: Element, b: Element) -> Element:
    """What that leaves."""
    return raw("urem", a, where(b == 0, 1, b))  # by 1 nothing is left
