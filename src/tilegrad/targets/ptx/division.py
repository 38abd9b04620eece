"""Division of one element: quotients of integers and floats, remainders of integers.

Integers divided by zero give 0, and so do their remainders; the lowest by -1 wraps. A floored
quotient and its remainder follow the sign of the divisor. Invariant: no instruction sees a zero
divisor or an integer quotient that overflows, whose results PTX leaves open.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError
from .element import (
    constant,
    kind_of,
    literal,
    logic,
    select,
    test,
    type_of,
    typed,
    unsigned,
    wrap,
)
from .write import Writer

Row = Callable[..., str]
F64 = dtypes.float64
WORDS = {16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}


DIVISIONS = frozenset(
    {"divide", "floor_divide", "remainder", "unsigned_divide", "unsigned_remainder"}
)


def divide(w: Writer, d: DType, a: str, b: str) -> str:
    """Division; of integers truncated, and 0 by 0."""
    if d.is_float:
        return typed(w, d, "div.rn", a, b)
    quotient, _, _ = _quotient(w, d, a, b)
    return wrap(w, d, quotient) if d.kind == "int" else quotient


def _quotient(w: Writer, d: DType, a: str, b: str) -> tuple[str, str, str]:
    """The truncated quotient (0 of a zero divisor, -a of -1); that by a safe divisor, and it."""
    kind, bits = kind_of(d), max(16, d.bits)
    special, safe = _safe(w, d, b)
    raw = w.value(f"div.{type_of(d)}", a, safe)
    product = "0"
    if d.kind == "int":
        product = w.value(f"mul.lo.s{bits}", raw, b)  # by 0 or -1, where raw is a
    return w.value(f"selp.{kind}", product, raw, special), raw, safe


def _safe(w: Writer, d: DType, b: str) -> tuple[str, str]:
    """Whether a divisor is 0 (or -1, by which the lowest overflows), and 1 in its place."""
    kind, bits = kind_of(d), max(16, d.bits)
    if d.kind == "uint":
        special = test(w, d, "eq", b, "0")
    else:
        above = w.value(f"add.s{bits}", b, "1")
        special = w.value(f"setp.le.u{bits}", above, "1")
    return special, w.value(f"selp.{kind}", "1", b, special)


def _crossed(w: Writer, d: DType, remainder: str, divisor: str) -> str:
    """Whether a non-zero remainder has another sign than the divisor."""
    differ = test(w, d, "lt", logic(w, "xor", d, remainder, divisor), "0")
    return w.value("and.pred", differ, test(w, d, "ne", remainder, "0"))


def floor_divide(w: Writer, d: DType, a: str, b: str) -> str:
    """The quotient of integers rounded down; 0 of a zero divisor."""
    quotient, raw, safe = _quotient(w, d, a, b)
    if d.kind == "uint":
        return quotient
    letter = type_of(d)
    back = w.value(f"mul.lo.{letter}", raw, safe)
    rest = w.value(f"sub.{letter}", a, back)
    less = w.value(f"sub.{letter}", quotient, "1")
    return wrap(w, d, select(w, d, _crossed(w, d, rest, safe), less, quotient))


def remainder(w: Writer, d: DType, a: str, b: str) -> str:
    """Of integers, with the sign of the divisor; 0 of a zero divisor."""
    _, safe = _safe(w, d, b)
    rest = w.value(f"rem.{type_of(d)}", a, safe)
    if d.kind == "uint":
        return rest
    more = w.value(f"add.{type_of(d)}", rest, safe)
    return select(w, d, _crossed(w, d, rest, safe), more, rest)


def fmod(w: Writer, d: DType, a: str, b: str) -> str:
    """Of integers, with the sign of the dividend; 0 of a zero divisor."""
    return w.value(f"rem.{type_of(d)}", a, _safe(w, d, b)[1])


def unsigned_division(form: str) -> Row:
    """Of operands seen as unsigned; a zero divisor gives 0."""

    def row(w: Writer, d: DType, a: str, b: str) -> str:
        kind, letter = kind_of(d), f"u{max(16, d.bits)}"
        a, b = unsigned(w, d, a), unsigned(w, d, b)
        bad = w.value(f"setp.eq.{letter}", b, "0")
        safe = w.value(f"selp.{kind}", "1", b, bad)
        result = w.value(f"{form}.{letter}", a, safe)
        if form == "div":  # a remainder by 1 is 0 already
            result = w.value(f"selp.{kind}", "0", result, bad)
        return wrap(w, d, result) if d.kind == "int" else result

    return row


# ---- by a literal ----------------------------------------------------------------------------


def by_literal(w: Writer, row: Row, name: str, d: DType, a: str, b: str) -> str:
    """A division by a literal: a product with its inverse, a shift or a mask where one will do.

    ptxas divides even by constants. `row` is the one for divisors in registers.
    """
    if name not in DIVISIONS or not d.is_integer or not a.startswith("%"):
        raise InternalError("ptx.rules", f"{name} of {d} takes no literal: {a}, {b}")
    divisor, kind, bits = int(b, 0), kind_of(d), max(16, d.bits)
    if divisor in (0, -1):
        return row(w, d, a, constant(w, divisor, d))
    if name.startswith("unsigned") or d.kind == "uint":
        a, divisor = unsigned(w, d, a), divisor & ((1 << d.bits) - 1)
        quotient = _by_product(w, bits, d.bits, a, divisor)
        rest = name.endswith("remainder")
        result = _rest(w, bits, a, quotient, divisor) if rest else quotient
        return wrap(w, d, result) if d.kind == "int" else result
    if name == "divide" or divisor < 0:
        return _by_instruction(w, name, d, a, b)
    if divisor & (divisor - 1) == 0:
        if name == "remainder":
            return w.value(f"and.{kind}", a, str(divisor - 1))
        return w.value(f"shr.s{bits}", a, str(divisor.bit_length() - 1))
    # below zero: floor(a / b) = ~((~a) / b), and ~a has a bit less
    sign = w.value(f"shr.s{bits}", a, str(bits - 1))
    folded = _by_product(w, bits, bits - 1, logic(w, "xor", d, a, sign), divisor)
    quotient = logic(w, "xor", d, folded, sign)
    return quotient if name == "floor_divide" else _rest(w, bits, a, quotient, divisor)


def _rest(w: Writer, bits: int, a: str, quotient: str, divisor: int) -> str:
    """a - quotient * divisor."""
    if divisor & (divisor - 1) == 0:
        return w.value(f"and.b{bits}", a, str(divisor - 1))
    return w.value(f"mad.lo.s{bits}", quotient, literal(-divisor, WORDS[bits]), a)


def _by_product(w: Writer, bits: int, known: int, a: str, divisor: int) -> str:
    """a / divisor for unsigned a below 2**known, by a product with 2**(bits + shift) / divisor.

    Rounded up by e / divisor, the inverse is right for all a where a * e < 2**(bits + shift).
    """
    if divisor & (divisor - 1) == 0:
        amount = divisor.bit_length() - 1
        return w.value(f"shr.u{bits}", a, str(amount)) if amount else a
    for shift in range(bits):
        inverse = -(-(1 << (bits + shift)) // divisor)
        error = inverse * divisor - (1 << (bits + shift))
        if inverse < 1 << bits and error * ((1 << known) - 1) < 1 << (bits + shift):
            high = w.value(f"mul.hi.u{bits}", a, str(inverse))
            return w.value(f"shr.u{bits}", high, str(shift)) if shift else high
    # the inverse has a bit too many: (a + high) / 2 without the carry
    shift = (divisor - 1).bit_length()
    inverse = -(-(1 << (bits + shift)) // divisor) - (1 << bits)
    high = w.value(f"mul.hi.u{bits}", a, str(inverse))
    half = w.value(f"shr.u{bits}", w.value(f"sub.u{bits}", a, high), "1")
    total = w.value(f"add.u{bits}", half, high)
    return w.value(f"shr.u{bits}", total, str(shift - 1)) if shift > 1 else total


def _by_instruction(w: Writer, name: str, d: DType, a: str, b: str) -> str:
    """A signed division by a literal other than 0 and -1."""
    letter = type_of(d)
    result = w.value(f"{'rem' if name == 'remainder' else 'div'}.{letter}", a, b)
    if name == "divide":
        return result
    rest = result
    if name == "floor_divide":
        back = w.value(f"mul.lo.{letter}", result, b)
        rest = w.value(f"sub.{letter}", a, back)
    moved = w.value(f"add.{letter}", result, b if name == "remainder" else "-1")
    return select(w, d, _crossed(w, d, rest, b), moved, result)
