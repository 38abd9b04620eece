"""Division of one integer by a literal: a product with its inverse, a shift or a mask.

ptxas divides even by constants. Invariant: what it gives is what `tile.division` gives.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError
from .element import constant, kind_of, literal, logic, unsigned, wrap
from .write import Writer

Row = Callable[..., str]
WORDS = {16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}
DIVISIONS = frozenset(
    {"divide", "floor_divide", "remainder", "unsigned_divide", "unsigned_remainder"}
)


def by_literal(w: Writer, row: Row, name: str, d: DType, a: str, b: str) -> str:
    """A division by a literal; `row` is the one for divisors in registers."""
    if name not in DIVISIONS or not d.is_integer or not a.startswith("%"):
        raise InternalError("ptx.rules", f"{name} of {d} takes no literal: {a}, {b}")
    divisor, kind, bits = int(b, 0), kind_of(d), max(16, d.bits)
    bare = name.startswith("unsigned") or d.kind == "uint"
    if divisor == 0 or (not bare and (divisor < 0 or name == "divide")):
        return row(w, d, a, constant(w, divisor, d))
    if bare:
        a, divisor = unsigned(w, d, a), divisor & ((1 << d.bits) - 1)
        quotient = _by_product(w, bits, d.bits, a, divisor)
        rest = name.endswith("remainder")
        result = _rest(w, bits, a, quotient, divisor) if rest else quotient
        return wrap(w, d, result) if d.kind == "int" else result
    if divisor & (divisor - 1) == 0:
        if name == "remainder":
            return w.value(f"and.{kind}", a, divisor - 1)
        return w.value(f"shr.s{bits}", a, divisor.bit_length() - 1)
    # below zero: floor(a / b) = ~((~a) / b), and ~a has a bit less
    sign = w.value(f"shr.s{bits}", a, bits - 1)
    folded = _by_product(w, bits, bits - 1, logic(w, d, "xor", a, sign), divisor)
    quotient = logic(w, d, "xor", folded, sign)
    return quotient if name == "floor_divide" else _rest(w, bits, a, quotient, divisor)


def _rest(w: Writer, bits: int, a: str, quotient: str, divisor: int) -> str:
    """a - quotient * divisor."""
    if divisor & (divisor - 1) == 0:
        return w.value(f"and.b{bits}", a, divisor - 1)
    return w.value(f"mad.lo.s{bits}", quotient, literal(-divisor, WORDS[bits]), a)


def _by_product(w: Writer, bits: int, known: int, a: str, divisor: int) -> str:
    """a / divisor for unsigned a below 2**known, by a product with 2**(bits + shift) / divisor.

    Rounded up by e / divisor, the inverse is right for all a where a * e < 2**(bits + shift).
    """
    if divisor & (divisor - 1) == 0:
        amount = divisor.bit_length() - 1
        return w.value(f"shr.u{bits}", a, amount) if amount else a
    for shift in range(bits):
        inverse = -(-(1 << (bits + shift)) // divisor)
        error = inverse * divisor - (1 << (bits + shift))
        if inverse < 1 << bits and error * ((1 << known) - 1) < 1 << (bits + shift):
            high = w.value(f"mul.hi.u{bits}", a, inverse)
            return w.value(f"shr.u{bits}", high, shift) if shift else high
    # the inverse has a bit too many: (a + high) / 2 without the carry
    shift = (divisor - 1).bit_length()
    inverse = -(-(1 << (bits + shift)) // divisor) - (1 << bits)
    high = w.value(f"mul.hi.u{bits}", a, inverse)
    half = w.value(f"shr.u{bits}", w.value(f"sub.u{bits}", a, high), "1")
    total = w.value(f"add.u{bits}", half, high)
    return w.value(f"shr.u{bits}", total, shift - 1) if shift > 1 else total
