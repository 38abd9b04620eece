"""How each elementwise Tile op becomes PTX: one table, one row per op.

A row gets the writer, the DType of the operands and a register each, and gives the register of
the result (a predicate for comparisons). What they compute is what `tile.numeric` says; floats
narrower than 32 bits are widened, computed in float32 and rounded. Functions that no instruction
computes are expanded through `tile.functions`; exp, exp2 and tanh of float32 rest on the fast
ex2.approx, within the ulps stated in the tests. Invariant: every float instruction names its
rounding, so that ptxas never contracts a product and a sum. The file is long because it is one
table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...tile import division, functions
from ...tile.numeric import COMPARE, FUNCTIONS
from ...tile.scope import Element, Rare, multiply_add, polynomial, where
from .division import by_literal
from .element import (
    convert,
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
from .write import Writer, several

Row = Callable[..., str]
F32, F64 = dtypes.float32, dtypes.float64


def apply(w: Writer, name: str, dtype: DType, *inputs: str, near: bool = False) -> str:
    """One elementwise op on one element; `dtype` is that of the operands (of `where`: a, b).

    Operands are registers. Only the divisor of integers may be a literal: a product then does.
    Where an op has another way for far arguments, `near` leaves it out.
    """
    if name in RARE and dtype.is_float and not near:
        (found,) = apply_all(w, name, dtype, [inputs])
        return found
    logical = dtype.kind == "bool" and name in BOOLS
    row = _function(BOOLS[name]) if logical else ROWS[name]
    if not all(x.startswith("%") for x in inputs) and dtype is not dtypes.int4:
        return by_literal(w, row, name, dtype, *inputs)
    wide = dtype
    if dtype is dtypes.int4:
        wide = dtypes.int8
    elif name not in ON_BITS and not (dtype.bits == 16 and name in EXTREMES):
        wide = dtype.wide
    result = row(w, wide, *[convert(w, dtype, wide, x) for x in inputs])
    return result if name in COMPARE else convert(w, wide, dtype, result)


# ---- functions over one register ------------------------------------------------------------


@dataclass(eq=False)
class Machine:
    """What `tile.functions` compute with, as PTX instructions on registers and literals."""

    clamps = frozenset({F32})
    writer: Writer

    def constant(self, value: float, dtype: DType) -> str:
        """A literal."""
        return literal(value, dtype)

    def apply(self, name: str, dtype: DType, *values: str) -> str:
        """A Tile op by its row, but where values may be literals."""
        w = self.writer
        if name == "where":
            return select(w, dtype, *values)
        if name not in ("shift_left", "shift_right"):
            return ROWS[name](w, dtype, *values)
        x, amount = values
        if dtype.bits == 64 and amount.startswith("%"):
            amount = w.value("cvt.u32.u64", amount)
        form = f"shl.{kind_of(dtype)}" if name == "shift_left" else f"shr.{type_of(dtype)}"
        return w.value(form, x, amount)

    def bitcast(self, x: str, source: DType, target: DType) -> str:
        """The same register."""
        return x

    def convert(self, x: str, source: DType, target: DType) -> str:
        """The nearest number."""
        return convert(self.writer, source, target, x)

    def kept(self, x: Element) -> Element:
        """The value in a register that may be written again."""
        return Element(self, self.writer.copy(kind_of(x.dtype), x.held), x.dtype)

    def set(self, held: list[Element], values: Iterable[Element], guard: str = "") -> None:
        """Write what is held again."""
        for one, value in zip(held, values):
            self.writer.put(f"mov.{kind_of(one.dtype)}", one.held, value.held, guard=guard)

    def repeat(
        self, going: Callable[[Element], Element], step: Callable[[Element], Element], x: Element
    ) -> Element:
        """A loop of each thread."""
        w, current = self.writer, self.kept(x)
        with w.loop("again", "enough") as leave:
            leave("!" + going(current).held)
            self.set([current], [step(current)])
        return current

    def rarely(self, rare: Rare, *inputs: Element) -> Element:
        """What is made of the near values: `apply_all` sees to the far ones."""
        return rare.done(*inputs, *rare.near(*inputs)[1:])


class Asked(Machine):
    """Gives what a function asks of `rarely` as it is."""

    def rarely(self, rare: Rare, *inputs: Element) -> Any:
        """The question itself."""
        return rare, inputs


def apply_all(w: Writer, name: str, dtype: DType, several: list[tuple[str, ...]]) -> list[str]:
    """An op of RARE on several elements: its way for far arguments is written once, in a loop over
    the elements that a thread enters where one of its own is far."""
    function, wide, masks, held = getattr(functions, name), dtype.wide, [], []
    asked = [
        function(*[Element(Asked(w), convert(w, dtype, wide, x), wide) for x in inputs])
        for inputs in several
    ]
    for rare, inputs in asked:
        mask, *values = rare.near(*inputs)
        masks.append(mask)
        held.append([mask.machine.kept(value) for value in values])
    _mend(rare, [inputs for _, inputs in asked], masks, held)
    found = [rare.done(*inputs, *mine) for (rare, inputs), mine in zip(asked, held)]
    return [convert(w, wide, dtype, r.held) for r in found]


def _mend(
    rare: Rare,
    several: list[tuple[Element, ...]],
    masks: list[Element],
    held: list[list[Element]],
) -> None:
    """What is far put into the registers held: in a loop over the elements where there are some."""
    m: Any = masks[0].machine
    w, some = m.writer, reduce(operator.or_, masks)
    if len(several) == 1:
        end = w.label(f"near_{rare.name}")
        w.put("bra", end, guard="!" + some.held)
        m.set(held[0], rare.far(*several[0]))
        w.place(end)
        return
    head, end = w.label(f"far_{rare.name}"), w.label(f"near_{rare.name}")
    w.put("bra", end, guard="!" + some.held)
    number = w.copy("b32", 0)
    w.place(head)
    turns = [w.value("setp.eq.s32", number, i) for i in range(len(several))]
    inputs = list(several[0])
    for own, turn in zip(several[1:], turns[1:]):
        mask = Element(m, turn, dtypes.bool_)
        inputs = [
            before if mine.held == before.held else where(mask, mine, before)
            for mine, before in zip(own, inputs)
        ]
    values = rare.far(*inputs)
    for turn, mask, registers in zip(turns, masks, held):
        m.set(registers, values, (Element(m, turn, dtypes.bool_) & mask).held)
    w.put("add.s32", number, number, "1")
    more = w.value("setp.lt.s32", number, len(several))
    w.put("bra", head, guard=more)
    w.place(end)


def _function(function: Callable[..., Element]) -> Row:
    """A row that is written over Elements."""
    return lambda w, d, *inputs: function(*[Element(Machine(w), i, d) for i in inputs]).held


def _by_kind(of_floats: Row, of_integers: Row) -> Row:
    """A row of floats, and another one of integers."""
    return lambda w, d, *x: (of_floats if d.is_float else of_integers)(w, d, *x)


def _integers(function: Callable[..., Element]) -> Row:
    """A division of integers."""

    def raw(name: str, a: Element, b: Element) -> Element:
        m, d, kind = a.machine, a.dtype, name[0]
        assert isinstance(m, Machine)
        given = [unsigned(m.writer, d, x.held) if kind == "u" else x.held for x in (a, b)]
        found = m.writer.value(f"{name[1:]}.{kind}{max(16, d.bits)}", *given)
        return Element(m, wrap(m.writer, d, found), d)

    return _function(partial(function, raw))


def _raw(form: str, x: Element, *numbers: float) -> Element:
    """An instruction as it is."""
    m = x.machine
    assert isinstance(m, Machine)
    found = m.writer.value(form, x.held, *[literal(n, x.dtype) for n in numbers])
    return Element(m, found, x.dtype)


LOG2_E, LN2, LN2_LOW = 1.4426950408889634, 0.693147182464599609375, -1.9046542e-09
EXP_HIGHEST = 88.722839  # the first float32 whose exponential is past the largest


def _exp(x: Element) -> Element:
    """e**x = 2**t * (1 + r) where t = x * log2(e) is rounded and r = x - t * ln(2) is its error.

    Above the clamp 2**t is infinite and r, at its constant, positive: no nan arises.
    """
    x = _raw("min.NaN.f32", _raw("max.NaN.f32", x, -104.0), EXP_HIGHEST)
    t = x * LOG2_E
    rest = multiply_add(t, -LN2_LOW, multiply_add(t, -LN2, x))
    power = _raw("ex2.approx.f32", t)
    return multiply_add(power, rest, power)


def _quick_exp(x: Element) -> Element:
    """2**(x log2(e)) with the product rounded: off by |x| 2**-24 or so."""
    return _raw("ex2.approx.ftz.f32", x * LOG2_E)


def _single(of_float32: Row | str, otherwise: Row) -> Row:
    """A row that float32 has of its own: another one, or an instruction."""
    own = _words(of_float32) if isinstance(of_float32, str) else of_float32
    return lambda w, d, *x: (own if d is F32 else otherwise)(w, d, *x)


def _words(form: str) -> Row:
    """A row that is one instruction, whatever the dtype."""
    return lambda w, d, *inputs: w.value(form, *inputs)


_exp2 = _single("ex2.approx.f32", _function(functions.exp2))


TANH_SPLIT = 0.55
TANH_NEAR = (0.01643758, -0.052671812, 0.13320725, -0.33332947)  # of x**2: tanh(x) / x - 1


def _tanh(x: Element) -> Element:
    """A polynomial near zero, then 1 - 2 / (e**(2|x|) + 1)."""
    square = x * x
    near = multiply_add(square * polynomial(square, TANH_NEAR), x, x)
    a = abs(x)
    grown = _raw("ex2.approx.ftz.f32", a * (2 * LOG2_E))
    far = multiply_add(_raw("rcp.approx.ftz.f32", grown + 1.0), -2.0, 1.0)
    return where(a < TANH_SPLIT, near, far).copy_sign(x)  # of -0.0 too


# ---- arithmetic -----------------------------------------------------------------------------


def _arithmetic(form: str, integer: str = "") -> Row:
    """A row that is one instruction: `form.rn` of floats, `integer` of integers."""
    return lambda w, d, *x: typed(w, d, f"{form}.rn" if d.is_float else integer or form, *x)


_divide = _by_kind(_arithmetic("div"), _integers(division.divide))


def _rounding(direction: str) -> Row:
    """To a whole number; integers are whole already."""

    def row(w: Writer, d: DType, x: str) -> str:
        return typed(w, d, f"cvt.{direction}.{type_of(d)}", x) if d.is_float else x

    return row


def _negative(w: Writer, d: DType, x: str) -> str:
    if d.is_float and d.bits < 32:
        return w.value("xor.b16", x, 1 << (d.bits - 1))
    return typed(w, d, "sub", "0", x) if d.kind == "uint" else typed(w, d, "neg", x)


def _absolute(w: Writer, d: DType, x: str) -> str:
    if d.is_float and d.bits < 32:
        return w.value("and.b16", x, (1 << (d.bits - 1)) - 1)
    return typed(w, d, "abs", x) if d.kind in ("float", "int") else x


def _extreme(form: str) -> Row:
    """Maximum or minimum; nan if either is, and 0 is above -0."""

    def row(w: Writer, d: DType, a: str, b: str) -> str:
        if not d.is_float:
            return w.value(f"{form}.{type_of(d)}", a, b)
        if d is not F64:
            return typed(w, d, f"{form}.NaN", a, b)
        found = typed(w, d, form, a, b)
        return select(w, d, test(w, d, "nan", a, b), literal(math.nan, d), found)

    return row


def _one(kind: Row, form: str) -> Row:
    """A row that is one instruction of a kind."""
    return lambda w, d, *inputs: kind(w, d, form, *inputs)


def _bit_not(w: Writer, d: DType, x: str) -> str:
    result = logic(w, d, "not", x)
    return wrap(w, d, result) if d.kind == "uint" else result


def _shift(name: str) -> Row:
    """PTX clamps the amount, a u32, at the width, so only wide amounts need care."""

    def row(w: Writer, d: DType, x: str, amount: str) -> str:
        if d.bits == 64:
            amount = w.value("min.u64", amount, "64")
            amount = w.value("cvt.u32.u64", amount)
        elif d.bits < 32:
            amount = w.value("cvt.u32.u16", amount)
        if name == "shift_right":
            return w.value(f"shr.{type_of(d)}", x, amount)
        return wrap(w, d, logic(w, d, "shl", x, amount))

    return row


def _multiply_high(w: Writer, d: DType, a: str, b: str) -> str:
    """The upper half of the unsigned product."""
    if d.bits >= 16:
        return w.value(f"mul.hi.u{d.bits}", a, b)
    product = w.value("mul.lo.u16", unsigned(w, d, a), unsigned(w, d, b))
    return wrap(w, d, w.value("shr.u16", product, "8"))


def _byte_permute(w: Writer, d: DType, a: str, b: str, chosen: str) -> str:
    """Four of the eight bytes of two registers; a digit's highest bit counts for nothing."""
    return w.value("prmt.b32", a, b, w.value("and.b32", chosen, "30583"))


def _where(w: Writer, d: DType, mask: str, a: str, b: str) -> str:
    return w.value(f"selp.{kind_of(d)}", a, b, mask)


# ---- power ----------------------------------------------------------------------------------


def _power(w: Writer, d: DType, a: str, b: str) -> str:
    """Integers by squaring; the product wraps, a negative exponent gives 0 (or 1 or -1)."""
    kind, letter = kind_of(d), type_of(d)
    rest, base, result = several(w, kind, 3)
    if d.kind == "int":
        w.put(f"max.{letter}", rest, b, "0")
    else:
        w.put(f"mov.{kind}", rest, b)
    w.move((base, result), (a, "1"), kind)
    with w.loop("power", "power_end") as leave:
        leave(test(w, d, "eq", rest, "0"))
        odd = test(w, d, "ne", logic(w, d, "and", rest, "1"), "0")
        w.put(f"mul.lo.{letter}", result, result, base, guard=odd)
        w.put(f"mul.lo.{letter}", base, base, base)
        w.put(f"shr.u{kind[1:]}", rest, rest, "1")
    if d.kind == "uint":
        return wrap(w, d, result)
    odd = test(w, d, "ne", logic(w, d, "and", b, "1"), "0")
    unit = select(w, d, odd, "-1", "1")
    small = select(w, d, test(w, d, "eq", a, "-1"), unit, "0")
    small = select(w, d, test(w, d, "eq", a, "1"), "1", small)
    return select(w, d, test(w, d, "lt", b, "0"), small, wrap(w, d, result))


ROWS: dict[str, Row] = {
    "negative": _negative,
    "absolute": _absolute,
    "square_root": _arithmetic("sqrt"),
    "reciprocal": _arithmetic("rcp"),
    "sign": _function(functions.sign),
    "floor": _rounding("rmi"),
    "ceil": _rounding("rpi"),
    "round": _rounding("rni"),
    "trunc": _rounding("rzi"),
    "bit_not": _bit_not,
    "add": _arithmetic("add"),
    "subtract": _arithmetic("sub"),
    "multiply": _arithmetic("mul", integer="mul.lo"),
    "divide": _divide,
    **{
        name: _by_kind(_function(getattr(functions, name)), _integers(getattr(division, name)))
        for name in ("floor_divide", "remainder", "fmod")
    },
    "unsigned_divide": _integers(division.unsigned_divide),
    "unsigned_remainder": _integers(division.unsigned_remainder),
    "power": _by_kind(_function(functions.power), _power),
    "maximum": _extreme("max"),
    "minimum": _extreme("min"),
    "bit_and": _one(logic, "and"),
    "bit_or": _one(logic, "or"),
    "bit_xor": _one(logic, "xor"),
    "shift_left": _shift("shift_left"),
    "shift_right": _shift("shift_right"),
    "multiply_high": _multiply_high,
    "equal": _one(test, "eq"),
    "not_equal": _by_kind(_one(test, "neu"), _one(test, "ne")),
    "less": _one(test, "lt"),
    "less_equal": _one(test, "le"),
    "where": _where,
    "multiply_add": _arithmetic("fma", integer="mad.lo"),
    "byte_dot": _words("dp4a.u32.s32"),  # of bytes, the first ones' with this sign
    "signed_byte_dot": _words("dp4a.s32.s32"),
    "byte_permute": _byte_permute,
    "pair_multiply_add_bfloat16": _words("fma.rn.bf16x2"),
    "pair_multiply_add_float16": _words("fma.rn.f16x2"),
    "exp": _single(_function(_exp), _function(functions.exp)),
    "exp2": _exp2,
    "quick_exp": _single(_function(_quick_exp), _function(functions.exp)),
    "quick_exp2": _single("ex2.approx.ftz.f32", _exp2),
    "quick_reciprocal": _single("rcp.approx.ftz.f32", _arithmetic("rcp")),
    # within 2 units of the last place over the whole range
    "quick_divide": _single("div.full.ftz.f32", _divide),
    "tanh": _single(_function(_tanh), _function(functions.tanh)),
}
ROWS = {**{name: _function(getattr(functions, name)) for name in FUNCTIONS}, **ROWS}
BOOLS: dict[str, Callable[..., Element]] = {  # what bools have instead
    "negative": lambda x: x,
    "add": operator.or_,
    "subtract": operator.xor,
    "multiply": operator.and_,
    "maximum": operator.or_,
    "minimum": operator.and_,
    "equal": lambda a, b: ~(a ^ b),
    "not_equal": operator.xor,
    "less": lambda a, b: ~a & b,
    "less_equal": lambda a, b: ~a | b,
    "where": lambda mask, a, b: mask & a | ~mask & b,
    "multiply_add": lambda a, b, c: a & b | c,
}
# Of floats: these have another way for far arguments, which their rows leave out.
RARE = frozenset({"sin", "cos", "tan", "fmod", "remainder", "floor_divide"})
EXTREMES = frozenset({"maximum", "minimum"})
# Rows that treat a narrow float as its bits.
ON_BITS = frozenset({"where", "negative", "absolute"})
