"""Elements in registers: their kinds, constants of them, and the smallest instructions on them.

An integer narrower than its register is kept extended (by its sign or by zeros), a float of 8
bits is its raw byte, a bool is a predicate. Invariant: a function here gives a register that is
extended as its DType asks, except `logic`, which works on bits alone.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError
from .write import Writer

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


def refuse(name: str, d: DType) -> InternalError:
    """What to raise where an op has no meaning for a DType."""
    return InternalError("ptx.rules", f"{name} has no meaning for {d}")


def typed(w: Writer, d: DType, form: str, *operands: str) -> str:
    """An instruction typed by the DType, and the integer it gives extended."""
    return wrap(w, d, w.value(f"{form}.{type_of(d)}", *operands))


def test(w: Writer, d: DType, form: str, a: str, b: str) -> str:
    """A comparison."""
    return w.value(f"setp.{form}.{type_of(d)}", a, b)


def select(w: Writer, d: DType, mask: str, a: str, b: str) -> str:
    """a where the mask holds, else b."""
    kind = kind_of(d)
    return w.value(f"selp.{type_of(d) if d in FLOATS else kind}", a, b, mask)


def logic(w: Writer, form: str, d: DType, *inputs: str) -> str:
    """An instruction on bits."""
    return w.value(f"{form}.{kind_of(d)}", *inputs)
