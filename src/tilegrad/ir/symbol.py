"""Symbolic integers: sizes and indices known by their bounds, in one canonical form.

An `Expr` is a sum of integer multiples of products of atoms; an atom is a `Symbol`, or a
floor division, modulo, minimum or maximum that could not be simplified. Building an
expression simplifies it, so equal expressions are the same object and compare by identity.
Invariant: `low <= value <= high` for every binding of the Symbols within their bounds, and
building a canonical expression again from its parts gives the same object. The file is long
because the operations simplify through one another; `floor_divide` is one list of cases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import gcd
from typing import Any, Union, overload

from ..core.errors import InternalError, UserError

Size = Union[int, "Expr"]
Product = tuple["Expr", ...]  # atoms, sorted by serial number
remember = lru_cache(maxsize=1 << 15)  # lowering builds the same expressions again and again


class Expr:
    """A canonical integer expression; arithmetic on it gives an int or another Expr."""

    __slots__ = (
        "__weakref__",
        "args",
        "constant",
        "high",
        "kind",
        "low",
        "name",
        "serial",
        "terms",
    )

    kind: str  # 'symbol', 'loop', 'sum', 'div', 'mod', 'min', 'max'
    name: str
    args: tuple[Size, ...]
    terms: tuple[tuple[Product, int], ...]
    constant: int
    low: int
    high: int
    serial: int

    def __add__(self, other: Any) -> Any:
        return combine(self, other, 1) if isinstance(other, (int, Expr)) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return combine(self, other, -1) if isinstance(other, (int, Expr)) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return combine(multiply(self, -1), other, 1) if isinstance(other, int) else NotImplemented

    def __neg__(self) -> Any:
        return multiply(self, -1)

    def __mul__(self, other: Any) -> Any:
        return multiply(self, other) if isinstance(other, (int, Expr)) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return floor_divide(self, other) if isinstance(other, (int, Expr)) else NotImplemented

    def __rfloordiv__(self, other: Any) -> Any:
        return floor_divide(other, self) if isinstance(other, int) else NotImplemented

    def __mod__(self, other: Any) -> Any:
        return modulo(self, other) if isinstance(other, (int, Expr)) else NotImplemented

    def __rmod__(self, other: Any) -> Any:
        return modulo(other, self) if isinstance(other, int) else NotImplemented

    # Comparisons answer only what the bounds prove.
    def __lt__(self, other: Any) -> bool:
        return compare(self, other, "<")

    def __le__(self, other: Any) -> bool:
        return compare(self, other, "<=")

    def __gt__(self, other: Any) -> bool:
        return not compare(self, other, "<=")

    def __ge__(self, other: Any) -> bool:
        return not compare(self, other, "<")

    def __index__(self) -> int:
        raise UserError(
            f"the size {self} is symbolic and has no fixed value here",
            hint="make the argument static, or write the code without needing the number",
        )

    def __bool__(self) -> bool:
        if self.low > 0 or self.high < 0:
            return True
        return self.__index__() != 0

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> Any:
        if self.kind in ("symbol", "loop"):
            return (named, (self.kind, self.name, self.low, self.high))
        if self.kind == "sum":
            return (_unpickle_sum, (self.terms, self.constant))
        return (FUNCTIONS[self.kind], self.args)


_table: weakref.WeakValueDictionary[Any, Expr] = weakref.WeakValueDictionary()
_serial = 0


def _intern(key: Any, low: int, high: int, **fields: Any) -> Expr:
    found = _table.get(key)
    if found is not None:
        return found
    global _serial
    _serial += 1
    new = Expr.__new__(Expr)
    new.kind = key[0]
    new.name = fields.get("name", "")
    new.args = fields.get("args", ())
    new.constant = fields.get("constant", 0)
    new.low, new.high, new.serial = low, high, _serial
    new.terms = fields.get("terms") or (((new,), 1),)
    _table[key] = new
    return new


def named(kind: str, name: str, low: int, high: int) -> Expr:
    """A Symbol ('symbol') or a loop index ('loop') with inclusive bounds."""
    return _intern((kind, name, low, high), low, high, name=name)


def symbol(name: str, low: int, high: int) -> Size:
    """A Symbol with inclusive bounds; a single possible value gives the plain int."""
    if not hasattr(low, "__index__") or not hasattr(high, "__index__"):
        raise UserError(f"symbol {name}: a bound is no int", expected="ints", got=(low, high))
    low, high = low.__index__(), high.__index__()  # of NumPy too
    if low > high:
        raise UserError(f"symbol {name}: empty bounds", expected="low <= high", got=(low, high))
    return low if low == high else named("symbol", name, low, high)


def loop_index(name: str, size: Size) -> Size:
    """An index that runs over 0 .. size-1."""
    top = high(size) - 1
    return 0 if top <= 0 else named("loop", name, 0, top)


def low(value: Size) -> int:
    """The lower bound of a size."""
    return value if isinstance(value, int) else value.low


def high(value: Size) -> int:
    """The upper bound of a size."""
    return value if isinstance(value, int) else value.high


def _product_bounds(product: Product, factor: int) -> tuple[int, int]:
    lo, hi = factor, factor
    for atom in product:
        corners = (lo * atom.low, lo * atom.high, hi * atom.low, hi * atom.high)
        lo, hi = min(corners), max(corners)
    return lo, hi


def _make_sum(terms: dict[Product, int], constant: int) -> Size:
    live = {p: f for p, f in terms.items() if f}
    if len(live) > 1:
        constant = _merge_division(live, constant)
    if not live:
        return constant
    if constant == 0 and len(live) == 1:
        ((product, factor),) = live.items()
        if factor == 1 and len(product) == 1:
            return product[0]
    keyed = sorted([(tuple([a.serial for a in p]), p, f) for p, f in live.items()])
    lo = hi = constant
    for _, product, factor in keyed:
        a, b = _product_bounds(product, factor)
        lo, hi = lo + a, hi + b
    if lo == hi:
        return lo
    key = ("sum", tuple([(serials, f) for serials, _, f in keyed]), constant)
    found = _table.get(key)
    if found is not None:
        return found
    ordered = tuple([(p, f) for _, p, f in keyed])
    return _intern(key, lo, hi, terms=ordered, constant=constant)


def _merge_division(terms: dict[Product, int], constant: int) -> int:
    """Join quotients with their remainders, in place; returns the new constant.

    (x // c) * c * f + (x % c) * f becomes x * f, and
    ((x // c) % d) * c * f + (x % c) * f becomes (x % (c * d)) * f.
    """
    joins = True
    while joins:
        joins = False
        for product, factor in terms.items():
            for atom in product:
                if atom.kind != "mod":
                    continue
                joined = _join(terms, product, factor, atom)
                if joined is not None:
                    partner, value = joined
                    del terms[product], terms[partner]
                    more, extra = terms_of(value)
                    constant += extra
                    for p, f in more:
                        total = terms.pop(p, 0) + f
                        if total:
                            terms[p] = total
                    joins = True
                    break
            if joins:
                break
    return constant


def _join(
    terms: dict[Product, int], product: Product, factor: int, remainder: Expr
) -> tuple[Product, Size] | None:
    """The term that completes the remainder in `product`, and what the two are together."""
    numerator, divisor = remainder.args
    if isinstance(divisor, int):
        needed, wanted = list(product), factor * divisor
    elif len(divisor.terms) == 1 and divisor.constant == 0:
        ((atoms_, scale),) = divisor.terms
        needed, wanted = [*product, *atoms_], factor * scale
    else:
        return None
    needed.remove(remainder)
    quotient: Size | None = None
    for partner, other in terms.items():
        if other != wanted or len(partner) != len(needed) + 1:
            continue
        left = _without(partner, needed)
        if left is None or partner is product:
            continue
        if quotient is None:
            quotient = floor_divide(numerator, divisor)
        whole: Size
        if left[0] is quotient:
            whole = numerator
        elif left[0].kind == "mod" and left[0].args[0] is quotient:
            whole = modulo(numerator, multiply(divisor, left[0].args[1]))
        else:
            continue
        whole = multiply(whole, factor)
        for atom in _without(product, [remainder]) or ():
            whole = multiply(whole, atom)
        return partner, whole
    return None


def _without(product: Product, taken: list[Expr]) -> Product | None:
    """The product less the atoms taken from it, or None if one is not there."""
    left = list(product)
    for atom in taken:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def terms_of(value: Size) -> tuple[tuple[tuple[Product, int], ...], int]:
    """The terms of a sum, and its constant."""
    return ((), value) if isinstance(value, int) else (value.terms, value.constant)


@remember
def combine(a: Size, b: Size, sign: int) -> Size:
    """a + sign * b."""
    if isinstance(a, int) and isinstance(b, int):
        return a + sign * b
    terms_a, constant_a = terms_of(a)
    terms_b, constant_b = terms_of(b)
    total = dict(terms_a)
    for product, factor in terms_b:
        total[product] = total.get(product, 0) + sign * factor
    return _make_sum(total, constant_a + sign * constant_b)


@remember
def multiply(a: Size, b: Size) -> Size:
    """a * b, distributed over sums."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int):
        if b == 0:
            return 0
        if b == 1:
            return a
    terms_a, constant_a = terms_of(a)
    if isinstance(b, int):
        return _make_sum({p: f * b for p, f in terms_a}, constant_a * b)
    terms_b, constant_b = terms_of(b)
    total: dict[Product, int] = {}
    for pa, fa in (*terms_a, ((), constant_a)):
        for pb, fb in (*terms_b, ((), constant_b)):
            if fa * fb:
                product = tuple(sorted(pa + pb, key=lambda x: x.serial))
                total[product] = total.get(product, 0) + fa * fb
    constant = total.pop((), 0)
    return _make_sum(total, constant)


def _from_terms(terms: list[tuple[Product, int]], constant: int) -> Size:
    total: dict[Product, int] = {}
    for p, f in terms:
        total[p] = total.get(p, 0) + f
    return _make_sum(total, constant)


def _divisible(product: Product, factor: int, divisor: Size) -> tuple[Product, int] | None:
    """The term divided exactly by the divisor, if that is possible."""
    if isinstance(divisor, int):
        return (product, factor // divisor) if factor % divisor == 0 else None
    if len(divisor.terms) == 1 and divisor.constant == 0:
        ((inner, scale),) = divisor.terms
        rest = _without(product, list(inner)) if factor % scale == 0 else None
        if rest is not None:
            return rest, factor // scale
    return None


def _split(a: Expr, b: int) -> tuple[int, Size, Size] | None:
    """(g, q, r) with a = g * q + r, g > 1 a divisor of b and 0 <= r < g, if there is one."""
    for step in sorted({gcd(b, factor) for _, factor in a.terms}, reverse=True):
        if step == 1:
            return None
        lo = hi = a.constant % step
        for product, factor in a.terms:
            if factor % step:
                x, y = _product_bounds(product, factor)
                lo, hi = lo + x, hi + y
        if lo >= 0 and hi < step:
            whole = [(p, f // step) for p, f in a.terms if f % step == 0]
            rest = [(p, f) for p, f in a.terms if f % step]
            return (
                step,
                _from_terms(whole, a.constant // step),
                _from_terms(rest, a.constant % step),
            )
    return None


@remember
def floor_divide(a: Size, b: Size) -> Size:
    """a // b for b > 0; where b may be 0 nothing is there to index, and the result is 0.

    A divisor is a size, and requirements see to it that no size is negative: bounds that allow it
    only say that they are not tight.
    """
    if high(b) < 0:
        raise InternalError("symbol", f"division by {b}, which is negative")
    if isinstance(b, int) and b == 0:
        return 0
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    if low(a) >= 0 and (high(a) < low(b) or (isinstance(b, Expr) and proves_less(a, b))):
        return 0
    if isinstance(a, Expr) and a is b:
        return 1
    terms, constant = terms_of(a)
    whole: list[tuple[Product, int]] = []
    rest: list[tuple[Product, int]] = []
    for product, factor in terms:
        exact = _divisible(product, factor, b)
        if exact is not None:
            whole.append(exact)
        else:
            rest.append((product, factor))
    whole_constant, rest_constant = 0, constant
    if isinstance(b, int):
        whole_constant, rest_constant = constant // b, constant % b
    if whole or whole_constant:
        product_constant = sum(f for p, f in whole if not p)
        outer = _from_terms([t for t in whole if t[0]], whole_constant + product_constant)
        remainder = _from_terms(rest, rest_constant)
        return combine(outer, floor_divide(remainder, b), 1)
    if isinstance(a, Expr) and isinstance(b, int):
        if a.low // b == a.high // b:
            return a.low // b
        if a.kind == "div" and isinstance(a.args[1], int):  # (x // c) // b
            return floor_divide(a.args[0], a.args[1] * b)
        if a.kind == "mod" and isinstance(a.args[1], int) and a.args[1] % b == 0:
            return modulo(floor_divide(a.args[0], b), a.args[1] // b)  # (x % (c * b)) // b
        split = _split(a, b)
        if split is not None:
            return floor_divide(split[1], b // split[0])
    lo, hi = _quotient_bounds(a, b)
    return lo if lo == hi else _intern(("div", _id(a), _id(b)), lo, hi, args=(a, b))


def _quotient_bounds(a: Size, b: Size) -> tuple[int, int]:
    x, y, p, q = low(a), high(a), max(1, low(b)), max(1, high(b))
    corners = (x // p, x // q, y // p, y // q)
    return min(corners), max(corners)


def _id(value: Size) -> Any:
    return value if isinstance(value, int) else ("e", value.serial)


@remember
def modulo(a: Size, b: Size) -> Size:
    """a % b for b > 0, in 0 .. b-1; where b may be 0 nothing is there to index."""
    if high(b) < 0:
        raise InternalError("symbol", f"modulo by {b}, which is negative")
    if isinstance(b, int) and b == 0:
        return 0
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if b == 1 or (isinstance(a, Expr) and a is b):
        return 0
    if low(a) >= 0 and (high(a) < low(b) or (isinstance(b, Expr) and proves_less(a, b))):
        return a
    terms, constant = terms_of(a)
    kept = [(p, f) for p, f in terms if _divisible(p, f, b) is None]
    reduced = constant % b if isinstance(b, int) else constant
    if len(kept) != len(terms) or reduced != constant:
        return modulo(_from_terms(kept, reduced), b)
    lo, hi = _quotient_bounds(a, b)
    if lo == hi:
        return combine(a, multiply(b, lo), -1)
    if isinstance(a, Expr) and isinstance(b, int):
        if a.kind == "mod" and isinstance(a.args[1], int) and a.args[1] % b == 0:
            return modulo(a.args[0], b)
        split = _split(a, b)
        if split is not None:
            step, quotient, rest = split
            return combine(multiply(modulo(quotient, b // step), step), rest, 1)
    top = high(b) - 1 if low(a) < 0 else min(high(a), high(b) - 1)
    return _intern(("mod", _id(a), _id(b)), 0, top, args=(a, b))


def _order(value: Size) -> tuple[bool, int]:
    return (True, value) if isinstance(value, int) else (False, value.serial)


@remember
def minimum(a: Size, b: Size) -> Size:
    """The smaller of a and b."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if a is b or high(a) <= low(b):
        return a
    if high(b) <= low(a):
        return b
    difference = combine(b, a, -1)
    if low(difference) >= 0 or high(difference) <= 0:
        return a if low(difference) >= 0 else b
    a, b = sorted((a, b), key=_order)
    bounds = (min(low(a), low(b)), min(high(a), high(b)))
    return _intern(("min", _id(a), _id(b)), *bounds, args=(a, b))


@remember
def maximum(a: Size, b: Size) -> Size:
    """The larger of a and b."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if a is b or low(a) >= high(b):
        return a
    if low(b) >= high(a):
        return b
    difference = combine(b, a, -1)
    if low(difference) >= 0 or high(difference) <= 0:
        return b if low(difference) >= 0 else a
    a, b = sorted((a, b), key=_order)
    bounds = (max(low(a), low(b)), max(high(a), high(b)))
    return _intern(("max", _id(a), _id(b)), *bounds, args=(a, b))


@overload
def ceil_divide(a: int, b: int) -> int: ...
@overload
def ceil_divide(a: Size, b: Size) -> Size: ...
def ceil_divide(a: Size, b: Size) -> Size:
    """a / b rounded up."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b) if b else 0
    return floor_divide(combine(a, combine(b, 1, -1), 1), b)


def round_up(size: int, unit: int) -> int:
    """The least multiple of a unit that is no smaller."""
    return ceil_divide(size, unit) * unit


def power_of_two(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(0, size - 1).bit_length()


FUNCTIONS: dict[str, Callable[..., Size]] = {
    "div": floor_divide,
    "mod": modulo,
    "min": minimum,
    "max": maximum,
}


def _unpickle_sum(terms: Any, constant: int) -> Size:
    return _from_terms(list(terms), constant)


def compare(a: Size, b: Size, relation: str) -> bool:
    """Whether the bounds prove a < b or a <= b; an undecided question is the user's error."""
    difference = combine(b, a, -1)
    margin = 1 if relation == "<" else 0
    if low(difference) >= margin:
        return True
    if high(difference) < margin:
        return False
    raise UserError(
        f"whether {a} {relation} {b} depends on the value of a symbolic size",
        hint="give the symbol tighter bounds, or make the size static",
    )


def proves_less(a: Size, b: Size) -> bool:
    """Whether the bounds prove a < b (False when unknown)."""
    return low(combine(b, a, -1)) >= 1


def substitute(value: Size, mapping: Mapping[Expr, Size]) -> Size:
    """The value with Symbols or indices replaced."""
    if isinstance(value, int) or not mapping:
        return value
    return _substitute(value, mapping, {})


def _substitute(value: Expr, mapping: Mapping[Expr, Size], memo: dict[Expr, Size]) -> Size:
    if value in memo:
        return memo[value]
    if value in mapping:
        result: Size = mapping[value]
    elif value.kind in ("symbol", "loop"):
        result = value
    elif value.kind == "sum":
        result = value.constant
        for product, factor in value.terms:
            term: Size = factor
            for atom in product:
                term = multiply(term, _substitute(atom, mapping, memo))
            result = combine(result, term, 1)
    else:
        args = [a if isinstance(a, int) else _substitute(a, mapping, memo) for a in value.args]
        result = FUNCTIONS[value.kind](*args)
    memo[value] = result
    return result


def evaluate(value: Size, bindings: Mapping[str, int]) -> int:
    """The value with every Symbol bound by name."""
    if isinstance(value, int):
        return value
    if value.kind in ("symbol", "loop"):
        if value.name not in bindings:
            raise InternalError("symbol", f"{value.name} has no value")
        return bindings[value.name]
    if value.kind == "sum":
        total = value.constant
        for product, factor in value.terms:
            for atom in product:
                factor *= evaluate(atom, bindings)
            total += factor
        return total
    a, b = (evaluate(x, bindings) for x in value.args)
    if value.kind == "div":
        return a // b if b else 0
    if value.kind == "mod":
        return a % b if b else 0
    return min(a, b) if value.kind == "min" else max(a, b)


def fold(
    value: Expr,
    number: Callable[[int], str],
    part: Callable[[Size], str],
    apply: Callable[[str, str, str], str],
) -> str:
    """The text of a value that is no Symbol, from that of numbers and of parts: apply(name, a, b)
    for 'add', 'multiply', 'div', 'mod', 'min', 'max', in the same order in every process."""
    if value.kind != "sum":
        a, b = (part(x) for x in value.args)
        return apply(value.kind, a, b)
    total = number(value.constant)
    for product, factor in sorted(value.terms, key=repr):
        term = number(factor)
        for atom in sorted(product, key=repr):
            term = apply("multiply", term, part(atom))
        total = apply("add", total, term)
    return total


def atoms(value: Size, found: dict[Expr, None] | None = None) -> dict[Expr, None]:
    """Every Symbol and index in the value, in order of first sight."""
    found = {} if found is None else found
    if isinstance(value, Expr):
        if value.kind in ("symbol", "loop"):
            found[value] = None
        elif value.kind == "sum":
            for product, _ in value.terms:
                for atom in product:
                    atoms(atom, found)
        else:
            for arg in value.args:
                atoms(arg, found)
    return found


def coefficient(value: Size, index: Expr) -> Size | None:
    """The factor of `index` in the value if the value is linear in it, else None."""
    if isinstance(value, int):
        return 0
    total: Size = 0
    for product, factor in value.terms:
        inside = [a for a in product if index in atoms(a)]
        if not inside:
            continue
        if len(inside) != 1 or inside[0] is not index:
            return None
        rest: Size = factor
        for atom in product:
            if atom is not index:
                rest = multiply(rest, atom)
        total = combine(total, rest, 1)
    return total


def show(value: Size, name: Callable[[Expr], str] | None = None) -> str:
    """The text of a size, which `tilegrad.ir.text` parses back.

    Terms come in the order of their text, so it does not depend on what was built first;
    `name` gives the names of Symbols where their own are not unique.
    """
    if isinstance(value, int):
        return str(value)
    if value.kind in ("symbol", "loop"):
        return value.name if name is None else name(value)
    if value.kind != "sum":
        sign = {"div": "//", "mod": "%"}.get(value.kind)
        a, b = (show(x, name) for x in value.args)
        if sign is None and isinstance(value.args[1], Expr):
            a, b = sorted((a, b))
        return f"({a} {sign} {b})" if sign else f"{value.kind}({a}, {b})"
    parts = []
    for product, factor in value.terms:
        text = "*".join(sorted(show(a, name) for a in product))
        parts.append((text, text if factor == 1 else f"{factor}*{text}"))
    shown = [text for _, text in sorted(parts)]
    if value.constant:
        shown.append(str(value.constant))
    return "(" + " + ".join(shown) + ")"
