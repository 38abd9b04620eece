"""Values of the simulator: how registers hold types, operands as functions, exact rounding.

A register is an array of 32 lanes of `bool`, `uint16`, `uint32` or `uint64`; an instruction
reads it as the type it names and writes it back whole. Invariant: arrays in registers are never
changed in place, so a value read is a value kept; float results are rounded once, from an exact
or an odd-rounded float64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .errors import TextError
from .text import Instruction, Module, Operand

if TYPE_CHECKING:
    from .machine import Waiting, Warp

Array = np.ndarray[Any, Any]
Mask = Array | None
Run = Callable[["Warp", Mask], "Waiting | None"]
Read = Callable[["Warp"], Array]
Put = Callable[["Warp", Mask, Array], None]

LANES = 32
CONTAINERS = {
    "pred": np.dtype(np.bool_),
    "b16": np.dtype(np.uint16),
    "b32": np.dtype(np.uint32),
    "b64": np.dtype(np.uint64),
}
BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "bf16": BF16,
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "tf32": np.dtype(np.float32),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "s16x2": np.dtype(np.uint32),
    "u16x2": np.dtype(np.uint32),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
for _bits in (8, 16, 32, 64):
    TYPES[f"u{_bits}"] = TYPES[f"b{_bits}"] = np.dtype(f"uint{_bits}")
    TYPES[f"s{_bits}"] = np.dtype(f"int{_bits}")
FLOATS = ("f16", "bf16", "f32", "f64")
UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
# Where things lie: parameters, the shared window and global memories in generic addresses.
PARAMETERS, SHARED_WINDOW, GLOBAL = 0x7D00_0000_0000, 0x7E00_0000_0000, 0x7F00_0000_0000
GLOBAL_STEP = 40  # bits of an address within one global memory
PARAMETER_START = 0x210  # of the parameters in their own space
RANK_STEP = 24  # bits of a shared address within one CTA of the cluster
SHARED_START = 1024  # as on Hopper, the first KiB belongs to the system


def number(text: str, type_: str) -> Any:
    """An immediate as a NumPy scalar of a type."""
    dtype = TYPES[type_]
    raw: int | None = None
    value: float
    if text[:2] in ("0f", "0F"):
        raw, value = int(text[2:], 16), struct.unpack("<f", struct.pack("<I", int(text[2:], 16)))[0]
    elif text[:2] in ("0d", "0D"):
        raw, value = int(text[2:], 16), struct.unpack("<d", struct.pack("<Q", int(text[2:], 16)))[0]
    elif text.lower().lstrip("-").startswith("0x") or not any(x in text for x in ".eE"):
        whole = int(text.rstrip("U"), 0)
        if type_ in FLOATS:
            return np.array(whole, dtype)[()]
        bits = 8 * dtype.itemsize
        return np.array([whole & ((1 << bits) - 1)], UNSIGNED[dtype.itemsize]).view(dtype)[0]
    else:
        value = float(text)
    if type_ in FLOATS:
        return np.array(value, dtype)[()]
    if raw is None:
        raise TextError(f"the number {text} is not of type {type_}")
    return np.array([raw], UNSIGNED[dtype.itemsize]).view(dtype)[0]


class Decoder:
    """What decoders of instructions need: the module, and where its names lie."""

    def __init__(self, module: Module, names: dict[str, int]) -> None:
        self.module, self.names = module, names

    def read(self, operand: Operand, type_: str) -> Read:
        """A function that gives the lanes of an operand as a type."""
        dtype = TYPES[type_]
        if operand.kind == "register":
            return self.read_register(operand, type_, dtype)
        if operand.kind == "number":
            constant = np.full(LANES, number(operand.text, type_), dtype)
            return lambda warp: constant
        if operand.kind == "special":
            name = operand.text
            return lambda warp: warp.special(name).astype(dtype, copy=False)
        if operand.kind == "name":
            where = np.full(LANES, self.place(operand), dtype)
            if operand.text in {v.name for v in self.module.shared}:
                return lambda warp: where + dtype.type(warp.cta.first_address)
            return lambda warp: where
        if operand.kind == "not":
            inner = self.read(operand.parts[0], "pred")
            return lambda warp: ~inner(warp)
        if operand.kind == "vector":
            return self.read_vector(operand, dtype)
        raise TextError(f"an operand of kind {operand.kind} cannot be read as {type_}")

    def read_register(self, operand: Operand, type_: str, dtype: np.dtype[Any]) -> Read:
        """A register as a type of its size or narrower."""
        slot, have = operand.slot, CONTAINERS[operand.size]
        if (type_ == "pred") != (operand.size == "pred") or have.itemsize < dtype.itemsize:
            raise TextError(f"{operand.text} of size {operand.size} does not hold {type_}")
        if type_ == "pred":
            return lambda warp: warp.registers[slot].view(dtype)
        if have.itemsize == dtype.itemsize:
            return lambda warp: warp.registers[slot].view(dtype)
        narrow = UNSIGNED[dtype.itemsize]
        return lambda warp: warp.registers[slot].astype(narrow).view(dtype)

    def read_vector(self, operand: Operand, dtype: np.dtype[Any]) -> Read:
        """Registers in braces as one wide value, the first lowest."""
        size = dtype.itemsize // len(operand.parts)
        parts = [self.read(part, f"b{8 * size}") for part in operand.parts]

        def run(warp: Warp) -> Array:
            return np.stack([part(warp) for part in parts], 1).reshape(-1).view(dtype)

        return run

    def put(self, operand: Operand, type_: str) -> Put:
        """A function that writes lanes of a type into an operand where the mask holds."""
        dtype = TYPES[type_]
        if operand.kind == "sink":
            return lambda warp, mask, value: None
        if operand.kind == "vector":
            return self.put_vector(operand, dtype)
        if operand.kind != "register":
            raise TextError(f"cannot write to an operand of kind {operand.kind}")
        slot, have = operand.slot, CONTAINERS[operand.size]
        if (type_ == "pred") != (operand.size == "pred") or have.itemsize < dtype.itemsize:
            raise TextError(f"{operand.text} of size {operand.size} does not hold {type_}")
        signed = np.dtype(f"int{8 * have.itemsize}") if type_[0] == "s" else have
        narrow = have.itemsize > dtype.itemsize
        plain = dtype if dtype.kind in "iu" else UNSIGNED.get(dtype.itemsize, dtype)

        def run(warp: Warp, mask: Mask, value: Array) -> None:
            if narrow:
                value = value.view(plain).astype(signed)
            value = value.view(have)
            if mask is not None:
                old = warp.registers[slot]
                value = np.where(mask, value, np.zeros(LANES, have) if old is None else old)
            warp.registers[slot] = value

        return run

    def put_vector(self, operand: Operand, dtype: np.dtype[Any]) -> Put:
        """One wide value into registers in braces, the lowest first."""
        size = dtype.itemsize // len(operand.parts)
        parts = [self.put(part, f"b{8 * size}") for part in operand.parts]

        def run(warp: Warp, mask: Mask, value: Array) -> None:
            split = np.ascontiguousarray(value).view(UNSIGNED[size]).reshape(LANES, len(parts))
            for number, part in enumerate(parts):
                part(warp, mask, np.ascontiguousarray(split[:, number]))

        return run

    def place(self, operand: Operand) -> int:
        """The address of a name."""
        if operand.text == "WARP_SZ":
            return LANES
        if operand.text not in self.names:
            raise TextError(f"unknown name {operand.text!r}")
        return self.names[operand.text] + operand.offset

    def address(self, operand: Operand) -> Read:
        """A function that gives the addresses of a memory operand as int64."""
        if operand.kind != "memory":
            raise TextError(f"an address in brackets is expected, not {operand.text!r}")
        base, offset = operand.parts[0], operand.offset
        if base.kind in ("name", "number"):
            start = self.place(base) if base.kind == "name" else int(base.text, 0)
            constant = np.full(LANES, start + offset, np.int64)
            return lambda warp: constant
        if base.kind != "register" or base.size not in ("b32", "b64"):
            raise TextError(f"{base.text!r} is not an address")
        slot = base.slot
        return lambda warp: warp.registers[slot].astype(np.int64) + offset


def reads_and_writes(instruction: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """The slots an instruction reads and writes, its guard among the read ones."""
    operands = instruction.operands
    read: list[int] = [instruction.guard[0]] if instruction.guard else []
    written: list[int] = []
    for number_, operand in enumerate(operands):
        first = number_ == 0 and operand.kind in ("register", "vector", "pair")
        if first and instruction.words[0] not in ("bar", "barrier", "nanosleep", "st", "red"):
            written += operand.registers()
        else:
            read += operand.registers()
    return frozenset(read), frozenset(written)


# ---- rounding -------------------------------------------------------------------------------


def odd_sum(a: Array, b: Array) -> Array:
    """a + b of float64, rounded to odd: a later rounding to fewer bits is as if exact."""
    total, error = exact_sum(a, b)
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    fixed = np.where(away, bits + 1, bits - 1).view(np.float64)
    use = np.isfinite(total) & (error != 0) & ((bits & 1) == 0) & np.isfinite(error)
    return np.where(use, fixed, total)


def odd_float32(value: Array) -> Array:
    """float64 to float32, rounded to odd."""
    near = value.astype(np.float32)
    error = value - near.astype(np.float64)
    bits = near.view(np.int32)
    away = (error > 0) == (near > 0)
    zero = near == 0
    fixed = np.where(away, bits + 1, bits - 1)
    tiny = np.where(value > 0, 1, np.int32(-0x7FFFFFFF)).astype(np.int32)
    fixed = np.where(zero, tiny, fixed).astype(np.int32).view(np.float32)
    use = np.isfinite(near) & (error != 0) & ((bits & 1) == 0)
    return np.where(use, fixed, near)


def rounded(value: Array, type_: str, mode: str = "rn") -> Array:
    """float64 (exact or odd-rounded) to a float type by a rounding mode."""
    if type_ == "f64":
        return value
    if type_ == "bf16":
        near = odd_float32(value).astype(BF16)
    else:
        near = value.astype(TYPES[type_])
    if mode == "rn":
        return near
    wide = near.astype(np.float64)
    if mode == "rz":
        wrong, to = np.abs(wide) > np.abs(value), 0.0
    elif mode == "rm":
        wrong, to = wide > value, -np.inf
    elif mode == "rp":
        wrong, to = wide < value, np.inf
    else:
        raise TextError(f"rounding mode {mode}")
    return np.where(wrong, np.nextafter(near, np.full_like(near, to)), near)


def flush(value: Array) -> Array:
    """Subnormal float32 to zero of their sign."""
    tiny = np.abs(value) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), value), value)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """fma of float32: through float64 where that cannot round twice, else through an odd sum."""
    total = np.multiply(a, b, dtype=np.float64) + c
    tie = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if tie.any() or np.minimum.reduce(np.abs(total)) < 2.0**-125:  # between two, or subnormal
        total = odd_sum(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))
    return total.astype(np.float32)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """fma of float64: by exact parts, or in fractions where a part could leave float64's range."""
    most = 2.0**400
    sizes = np.abs(np.stack([a, b, c]))
    sizes[2][sizes[2] == 0] = 1.0
    inside = (sizes.min(0) >= 1 / most) & (sizes.max(0) <= most)
    if inside.all():
        return fma64_inside(a, b, c)
    result = np.asarray(a * b + c)
    result[inside] = fma64_inside(a[inside], b[inside], c[inside])
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for lane in np.flatnonzero(finite & ~inside & (a != 0) & (b != 0)):
        exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
        try:
            result[lane] = float(exact)
        except OverflowError:
            result[lane] = np.inf if exact > 0 else -np.inf
        if result[lane] == 0:
            result[lane] = -0.0 if exact < 0 else 0.0
    return result


def fma64_inside(a: Array, b: Array, c: Array) -> Array:
    """fma of float64 of 2**-400 to 2**400 (c may be 0): only the last sum rounds."""
    product, lost = exact_product(a, b)
    small, smaller = exact_sum(c, lost)
    total, left = exact_sum(product, small)
    return total + odd_sum(smaller, left)


def exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b of float64 as the rounded sum and what rounding lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def exact_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b of float64 as the rounded product and what rounding lost (halves of 26 bits)."""
    product = a * b
    high, top = (each * 134217729.0 - (each * 134217729.0 - each) for each in (a, b))
    low, bottom = a - high, b - top
    return product, ((high * top - product) + high * bottom + low * top) + low * bottom
