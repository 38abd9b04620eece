"""Elements in registers: kinds, constants, the smallest instructions on them, and casts.

An integer narrower than its register is kept extended (by its sign or by zeros), a float of 8 bits
is its raw byte, a bool is a predicate.

Casts, of one element or of two packed, mean what `tile.numeric.cast` says: floats narrower than 32
bits go through float32; floats become integers by truncation that saturates at int32 or int64, nan
gives 0, and then they wrap. Invariant: a function here gives a register that is extended as its
DType asks, except `logic`, which works on bits alone. Casts from float8_e4m3 and to either float of
8 bits need sm_89 or later.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError
from ...ir.node import Node
from ...tile.row import constant_of
from .write import Writer, halves_of

FLOATS = (dtypes.float32, dtypes.float64)


@cache
def type_of(dtype: DType) -> str:
    """The letter and bits by which an instruction names an operand; a float of 8 bits is bits."""
    if dtype.kind == "bool":
        return "pred"
    letter = {"int": "s", "uint": "u", "float": "b" if dtype.bits == 8 else "f"}[dtype.kind]
    return f"{'bf' if dtype is dtypes.bfloat16 else letter}{max(16, dtype.bits)}"


def kind_of(dtype: DType) -> str:
    """The kind of register that holds one element."""
    if dtype.kind == "bool":
        return "pred"
    return f"b{max(16, dtype.bits)}"


def literal(value: Any, dtype: DType) -> str:
    """One constant element as an operand; a float of 16 or 8 bits is the integer of its bits."""
    if dtype.kind == "bool":
        return "1" if value else "0"
    if dtype is dtypes.float64:
        return "0d" + struct.pack(">d", float(value)).hex().upper()
    if not dtype.is_float:
        return str(_held(int(value), dtype))
    with np.errstate(over="ignore"):
        rounded = np.asarray(value).astype(np.float32)
        if dtype is dtypes.float32:
            return "0f" + struct.pack(">I", int(rounded.view(np.uint32))).hex().upper()
        bits = rounded.astype(dtype.numpy).view(f"u{dtype.size}")
    return f"0x{int(bits):04X}"


def _held(value: int, dtype: DType) -> int:
    """The integer a DType keeps of a value."""
    low = value & ((1 << dtype.bits) - 1)
    return low - (1 << dtype.bits) if dtype.kind == "int" and low >> (dtype.bits - 1) else low


def constant(w: Writer, value: Any, dtype: DType) -> str:
    """A register that holds a constant."""
    kind = kind_of(dtype)
    if kind == "pred":
        return w.value("setp.eq.s32" if value else "setp.ne.s32", "0", "0")
    return w.copy(kind, literal(value, dtype))


def wrap(w: Writer, dtype: DType, x: str) -> str:
    """An integer in its register, extended again after arithmetic in 16 bits."""
    if dtype is dtypes.int8:
        return w.value("cvt.s16.s8", x)
    if dtype is dtypes.uint8:
        return w.value("and.b16", x, "255")
    if dtype is dtypes.int4:
        return w.value("shr.s16", w.value("shl.b16", x, "12"), "12")
    return x


def unsigned(w: Writer, dtype: DType, x: str) -> str:
    """An integer in its register, extended by zeros."""
    return w.value("and.b16", x, "255") if dtype is dtypes.int8 else x


def typed(w: Writer, d: DType, form: str, *operands: str) -> str:
    """An instruction typed by the DType, and the integer it gives extended."""
    return wrap(w, d, w.value(f"{form}.{type_of(d)}", *operands))


def test(w: Writer, d: DType, form: str, a: str, b: str) -> str:
    """A comparison."""
    return w.value(f"setp.{form}.{type_of(d)}", a, b)


def select(w: Writer, d: DType, mask: str, a: str, b: str) -> str:
    """a where the mask holds, else b."""
    return w.value(f"selp.{type_of(d) if d in FLOATS else kind_of(d)}", a, b, mask)


def logic(w: Writer, d: DType, form: str, *inputs: str) -> str:
    """An instruction on bits."""
    return w.value(f"{form}.{kind_of(d)}", *inputs)


# ---- casts --------------------------------------------------------------------------------------


# The first magnitude that rounds past the largest 8-bit float, and the comparison that finds it:
# halfway goes to the even neighbour, which is 448 (e4m3) but infinity (e5m2).
PAST = {"float8_e4m3": ("setp.gt.f32", 464.0), "float8_e5m2": ("setp.ge.f32", 61440.0)}
MOST_FINITE = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}
PAIRS = {"float8_e4m3": "e4m3x2", "float8_e5m2": "e5m2x2"}


def convert(w: Writer, source: DType, target: DType, x: str) -> str:
    """One element converted, as `tile.cast` does."""
    if source is target:
        return x
    if source.is_float and source.bits < 32:
        return convert(w, dtypes.float32, target, widen(w, source, x))
    if target.is_float and target.bits < 32:
        return narrow(w, target, convert(w, source, dtypes.float32, x))
    if target.kind == "bool":
        form = "setp.neu" if source.is_float else "setp.ne"
        return w.value(f"{form}.{type_of(source)}", x, literal(0, source))
    if source.kind == "bool":
        return w.value(f"selp.{kind_of(target)}", literal(1, target), literal(0, target), x)
    if source.is_float and target.is_float:
        if target is dtypes.float64:
            return w.value("cvt.f64.f32", x)
        return w.value("cvt.rn.f32.f64", x)
    if source.is_float:
        return _to_integer(w, source, target, x)
    if target.is_float:
        return w.value(f"cvt.rn.{type_of(target)}.{type_of(source)}", x)
    return _between_integers(w, source, target, x)


def _between_integers(w: Writer, source: DType, target: DType, x: str) -> str:
    """An integer widened by its own sign, or cut."""
    before, after = max(16, source.bits), max(16, target.bits)
    if after > before:
        letter = type_of(source)[0]
        return w.value(f"cvt.{letter}{after}.{type_of(source)}", x)
    if after < before:
        x = w.value(f"cvt.u{after}.u{before}", x)
    elif target.bits == after or (source.bits < target.bits and source.kind == target.kind):
        return x  # all bits of the register are kept
    return wrap(w, target, x)


def _to_integer(w: Writer, source: DType, target: DType, x: str) -> str:
    """Truncated and saturated by the instruction; a nan is 0 by itself only from f32 to s32."""
    wide = dtypes.int64 if target.bits >= 32 and target is not dtypes.int32 else dtypes.int32
    kind = kind_of(wide)
    whole = w.value(f"cvt.rzi.{type_of(wide)}.{type_of(source)}", x)
    if source is dtypes.float64 or wide is dtypes.int64:
        is_nan = w.value(f"setp.nan.{type_of(source)}", x, x)
        whole = w.value(f"selp.{kind}", "0", whole, is_nan)
    return _between_integers(w, wide, target, whole) if wide is not target else whole


def widen(w: Writer, source: DType, x: str) -> str:
    """A float narrower than 32 bits as a float32, exactly."""
    if source is dtypes.bfloat16:
        if x in w.parts:  # of a word: one instruction rather than one to cut and one to move
            word, number = w.parts[x]
            form, by = ("and.b32", "-65536") if number else ("shl.b32", "16")
            return w.value(form, word, by)
        return w.value("cvt.f32.bf16", x)
    if source is dtypes.float8_e5m2:
        x = w.value("shl.b16", x, "8")
    elif source is dtypes.float8_e4m3:
        pair = w.value("cvt.rn.f16x2.e4m3x2", x)
        x = w.value("cvt.u16.u32", pair)
    return w.value("cvt.f32.f16", x)


def narrow(w: Writer, target: DType, x: str) -> str:
    """A float32 rounded to a narrower float; past the largest: infinity, or nan without one."""
    if target.bits == 16:
        return w.value(f"cvt.rn.{type_of(target)}.f32", x)
    held, (form, limit) = cut_pair(w, target, x, literal(0, dtypes.float32)), PAST[target.name]
    # the instruction stops at the largest value: one step on where x rounds past it
    over = w.value(form, w.value("abs.f32", x), literal(limit, dtypes.float32))
    beyond = w.value("add.u16", held, 1)
    return w.value("selp.b16", beyond, held, over)


def convert_pair(w: Writer, source: DType, target: DType, low: str, high: str) -> str | None:
    """Two neighbouring elements in one register, packed, where an instruction does both."""
    if (source.name in PAIRS or source is dtypes.int8) and target is dtypes.float16:
        (word, first), (other, second) = (w.parts.get(x, ("", -1)) for x in (low, high))
        if first % 2 or second != first + 1 or word != other:
            return None
        if source is dtypes.int8:
            return whole_pair(w, *lifted(w, word), NEIGHBOURS[first // 2], w.new("b32"))
        return w.value(f"cvt.rn.f16x2.{PAIRS[source.name]}", halves_of(w, word)[first // 2])
    if source is not dtypes.float32 or not target.is_float or target.bits != 16:
        return None
    return w.value(f"cvt.rn.{type_of(target)}x2.f32", high, low)


def widen_word(w: Writer, source: DType, word: str, apart: bool, low: str, high: str) -> None:
    """Four values of 8 bits to float16 in two registers: neighbours in one, or every other."""
    if source.name in PAIRS:
        if apart:
            word = w.value("prmt.b32", word, word, 0x3120)
        for into, half in zip((low, high), halves_of(w, word)):
            w.put(f"cvt.rn.f16x2.{PAIRS[source.name]}", into, half)
        return
    if source is not dtypes.int8:
        raise InternalError("ptx.element", f"no words of {source}")
    given = lifted(w, word)
    for into, four in zip((low, high), EVERY_OTHER if apart else NEIGHBOURS):
        whole_pair(w, *given, four, into)


NEIGHBOURS, EVERY_OTHER = (0x4140, 0x4342), (0x4240, 0x4341)  # bytes of a pair, each below a 0x64


def lifted(w: Writer, word: str) -> tuple[str, str]:
    """Four int8 x as x + 128, from 0 on; and 1152 twice."""
    return w.value("xor.b32", word, -0x7F7F7F80), w.copy("b32", 0x64806480)


def whole_pair(w: Writer, moved: str, base: str, four: int, into: str) -> str:
    """Two of what was lifted as float16: 1024 + x + 128 less 1152."""
    held = w.value("prmt.b32", moved, 0x64646464, four)
    w.put("sub.rn.f16x2", into, held, base)
    return into


def cut_pair(w: Writer, target: DType, low: str, high: str) -> str:
    """Two float32 as floats of 8 bits, in a 16-bit register; past the largest: the largest."""
    return w.value(f"cvt.rn.satfinite.{PAIRS[target.name]}.f32", high, low)


def uncut(node: Node, target: DType) -> Node | None:
    """What a value is that ends at the largest float of 8 bits, without its ends."""
    if target.name not in PAIRS or node.dtype is not dtypes.float32:
        return None
    most = MOST_FINITE[target.name]
    for name, end in (("maximum", -most), ("minimum", most)):
        if node.op.name != name or constant_of(node.inputs[1]) != end:
            return None
        node = node.inputs[0]
    return node


def bitcast(w: Writer, source: DType, target: DType, x: str) -> str:
    """The same bits as another DType of the same width."""
    if source is target:
        return x
    if source.bits != target.bits or dtypes.int4 in (source, target):
        raise InternalError("ptx.element", f"{source} and {target} differ in width")
    if target.kind == "bool":
        return w.value("setp.ne.s16", x, "0")
    if source.kind == "bool":
        return w.value("selp.b16", "1", "0", x)
    if target is dtypes.int8:
        return wrap(w, target, x)
    return unsigned(w, source, x)
