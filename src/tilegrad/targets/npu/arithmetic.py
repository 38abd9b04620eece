"""The arithmetic of the NPU, bit for bit: what the RTL computes, over NumPy arrays.

Integers are 32 bits and wrap. Floats are fp32 with subnormals taken as zero, before the product
and after each op; products of bf16 are exact in fp32. exp, reciprocal and reciprocal square root
are those of `core/fixed.py`, tables with a line between entries, which the RTL has too.
Invariant: every function here has a twin of the same name in the RTL, and the tests compare them
on the same words.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from ...core.fixed import FIXED

Array = np.ndarray
TINY = np.float32(2.0**-126)
NAN = 0x7FC00000


@cache
def values_of(element: str) -> Array:
    """The number of all bits of an element, as the multipliers take it: subnormals as zero."""
    if element == "int8":
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)
    bits = np.arange(65536, dtype=np.uint16)
    if element == "bf16":
        with np.errstate(invalid="ignore"):  # NaNs
            return from_bits(bits.astype(np.uint32) << np.uint32(16))
    found = bits.view(np.float16).astype(np.float32)
    return np.where(bits >> 10 & 31 == 0, np.copysign(np.float32(0), found), found)


@cache
def wide_of(weights: str, element: str) -> Array:
    """The bits of an element of all bits of weights of half as many; each is exact."""
    if weights == "int4":
        low = np.arange(16, dtype=np.uint16)
        return np.where(low > 7, low + 240, low).astype(np.uint16)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return bits_of(values, element)


@cache
def pairs_of(weights: str, element: str) -> Array:
    """The two numbers that the bits of an element are to a multiplier of mixed precision."""
    wide = values_of(element)[wide_of(weights, element)]
    numbers = np.arange(len(values_of(element)))
    return np.stack([wide[numbers % len(wide)], wide[numbers // len(wide)]])


def bits_of(x: Array, element: str) -> Array:
    """The bits of numbers that an element holds exactly, with one NaN."""
    if element == "int8":
        return x.astype(np.int64) & 0xFF
    if element == "bf16":
        return (float_bits(x) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7E00), x.astype(np.float16).view(np.uint16))


def wrapped(x: Array) -> Array:
    """The low 32 bits, signed."""
    return x.astype(np.int64).astype(np.uint64).astype(np.uint32).view(np.int32)


def flush(x: Array) -> Array:
    """Subnormals as zero of their sign."""
    return x * (np.abs(x) >= TINY)


def shifted(x: Array, shift: int, extra: Array | None = None) -> Array:
    """x / 2**shift to the nearest, halves up; or up with the chance that `extra` bits give."""
    if shift == 0:
        return x
    if extra is not None:
        return (x + (extra.astype(np.int64) & ((1 << shift) - 1))) >> shift
    return (x + (1 << (shift - 1))) >> shift


def float_add(a: Array, b: Array) -> Array:
    """fp32 sum, subnormals as zero."""
    with np.errstate(all="ignore"):
        return flush(np.add(a, b, dtype=np.float32))


def float_mul(a: Array, b: Array) -> Array:
    """fp32 product of normal numbers; what is below the smallest before rounding is zero."""
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) * b.astype(np.float64)
        kept = exact * (np.abs(exact) >= 2.0**-126)
        return kept.astype(np.float32)


def float_bits(x: Array) -> Array:
    """The bits of fp32, with one NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), np.uint32(NAN), bits)


def from_bits(bits: Array) -> Array:
    """fp32 of bits, subnormals as zero."""
    return flush(bits.astype(np.uint32).view(np.float32))


def wide_values(bits: Array, floating: bool) -> Array:
    """The numbers that rows of 32 bits are."""
    return from_bits(bits) if floating else bits.view(np.int32)


def first_of(kind: str, floating: bool) -> float:
    """What a reduction begins with."""
    return 0 if kind == "sum" else -np.inf if floating else -(2**31)


def _extreme(kind: str, a: Array, b: Array) -> Array:
    found = np.where((a > b) if kind == "max" else (a < b), a, b)
    return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), found)


def vector(kind: str, a: Array, b: Array, shift: int, floating: bool) -> Array:
    """One op of the vector unit."""
    if floating:
        if kind == "add":
            return float_add(a, b)
        if kind == "sub":
            return float_add(a, -b)
        if kind == "mul":
            return float_mul(a, b)
        return _extreme(kind, a, b)
    x, y = a.astype(np.int64), b.astype(np.int64)
    if kind == "add":
        return wrapped(x + y)
    if kind == "sub":
        return wrapped(x - y)
    if kind == "mul":
        return wrapped(shifted(x * y, shift))
    if kind in ("max", "min"):
        return np.maximum(a, b) if kind == "max" else np.minimum(a, b)
    return FIXED[kind](a)


FLOAT_KINDS = ("add", "sub", "max", "min", "mul", "take", "load")


def requantise(x: Array, scale: int, shift: int, relu: bool, extra: Array | None) -> Array:
    """int8 of int32 sums: times `scale`, over 2**shift, saturated."""
    y = shifted(x.astype(np.int64) * scale, shift, extra)
    return np.clip(y, 0 if relu else -128, 127).astype(np.int8)


def to_bf16(x: Array, relu: bool, extra: Array | None) -> Array:
    """The bits of bf16 of fp32 sums, to the nearest even, or by chance."""
    bits = float_bits(x)
    if relu:
        bits = np.where((bits >> 31 == 1) & ~np.isnan(x), np.uint32(0), bits)
    finite = np.isfinite(x)
    up = (extra & 0xFFFF) if extra is not None else 0x7FFF + ((bits >> 16) & 1)
    moved = (bits.astype(np.uint64) + np.where(finite, up, 0).astype(np.uint64)) >> np.uint64(16)
    return moved.astype(np.uint16)


def to_fp16(x: Array, relu: bool, extra: Array | None) -> Array:
    """The bits of fp16 of fp32 sums likewise; what is too small for a normal number before it is
    rounded is zero."""
    bits = float_bits(x).astype(np.int64)
    if relu:
        bits = np.where((bits >> 31 == 1) & ~np.isnan(x), 0, bits)
    sign, size = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    up = (extra & 0x1FFF).astype(np.int64) if extra is not None else 0xFFF + (size >> 13 & 1)
    moved = (size + up >> 13) - (112 << 10)
    found = np.where(size < 113 << 23, 0, np.minimum(moved, 0x7C00))
    return (sign | np.where(size > 0x7F800000, 0x7E00, found)).astype(np.uint16)


TO_NARROW = {"bf16": to_bf16, "fp16": to_fp16}


def xorshift(state: Array) -> Array:
    """The next state of each lane's random bits."""
    x = state.astype(np.uint32)
    x = x ^ (x << np.uint32(13))
    x = x ^ (x >> np.uint32(17))
    return x ^ (x << np.uint32(5))


def seeded(seed: int, lanes: int) -> Array:
    """The first state of each lane: never 0."""
    spread = (np.arange(1, lanes + 1, dtype=np.uint64) * 0x9E3779B9) & 0xFFFFFFFF
    return ((spread ^ seed) | 1).astype(np.uint32)
