"""DTypes: how one element is stored, and how two of them promote.

Invariant: a DType is a frozen record, compared by identity; `promote` is symmetric and
follows PyTorch's categories (bool < integer < float), so mixed programs give PyTorch's dtypes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .errors import DTypeError, meant


class DType:
    """One element's storage: name, kind ('bool', 'int', 'uint', 'float') and bits."""

    __slots__ = ("bits", "kind", "name", "numpy", "rank")

    def __init__(self, name: str, kind: str, bits: int, numpy: Any, rank: int) -> None:
        self.name = name
        self.kind = kind
        self.bits = bits
        self.numpy = np.dtype(numpy)
        self.rank = rank

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (dtype_of, (self.name,))

    @property
    def size(self) -> int:
        """Bytes of one element held alone (int4 takes one byte unpacked)."""
        return max(1, self.bits // 8)

    def storage_bytes(self, count: int) -> int:
        """Bytes of `count` packed elements."""
        return (count * self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        """Whether the dtype is floating point."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether the dtype is an integer (bool is not)."""
        return self.kind in ("int", "uint")

    @property
    def wide(self) -> DType:
        """The dtype that its values are computed in: float32 for narrower floats."""
        return float32 if self.is_float and self.bits < 32 else self

    @property
    def lowest(self) -> float | int | bool:
        """The smallest value (-inf for floats that have it): the identity of max."""
        if self.kind == "bool":
            return False
        if self.is_float:
            return float("-inf") if self is not float8_e4m3 else -448.0
        return 0 if self.kind == "uint" else -(1 << (self.bits - 1))

    @property
    def highest(self) -> float | int | bool:
        """The largest value (inf for floats that have it): the identity of min."""
        if self.kind == "bool":
            return True
        if self.is_float:
            return float("inf") if self is not float8_e4m3 else 448.0
        return (1 << self.bits) - 1 if self.kind == "uint" else (1 << (self.bits - 1)) - 1


bool_ = DType("bool", "bool", 8, np.bool_, 0)
int4 = DType("int4", "int", 4, ml_dtypes.int4, 1)
uint8 = DType("uint8", "uint", 8, np.uint8, 2)
int8 = DType("int8", "int", 8, np.int8, 3)
uint16 = DType("uint16", "uint", 16, np.uint16, 4)
int16 = DType("int16", "int", 16, np.int16, 5)
uint32 = DType("uint32", "uint", 32, np.uint32, 6)
int32 = DType("int32", "int", 32, np.int32, 7)
uint64 = DType("uint64", "uint", 64, np.uint64, 8)
int64 = DType("int64", "int", 64, np.int64, 9)
float8_e5m2 = DType("float8_e5m2", "float", 8, ml_dtypes.float8_e5m2, 10)
float8_e4m3 = DType("float8_e4m3", "float", 8, ml_dtypes.float8_e4m3fn, 11)
float16 = DType("float16", "float", 16, np.float16, 12)
bfloat16 = DType("bfloat16", "float", 16, ml_dtypes.bfloat16, 13)
float32 = DType("float32", "float", 32, np.float32, 14)
float64 = DType("float64", "float", 64, np.float64, 15)

ALL: tuple[DType, ...] = (
    bool_,
    int4,
    uint8,
    int8,
    uint16,
    int16,
    uint32,
    int32,
    uint64,
    int64,
    float8_e5m2,
    float8_e4m3,
    float16,
    bfloat16,
    float32,
    float64,
)
BY_NAME: dict[str, DType] = {d.name: d for d in ALL}
ALIASES = {
    "f32": float32,
    "f64": float64,
    "f16": float16,
    "bf16": bfloat16,
    "half": float16,
    "float": float32,
    "double": float64,
    "long": int64,
    "int": int32,
    "i32": int32,
    "i64": int64,
    "i8": int8,
    "u8": uint8,
    "short": int16,
    "float8_e4m3fn": float8_e4m3,
}
BY_NUMPY: dict[np.dtype[Any], DType] = {d.numpy: d for d in ALL}


def dtype_of(value: Any) -> DType:
    """The DType named by a DType, a name, a NumPy dtype, a Python type or a torch dtype."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        found = BY_NAME.get(value) or ALIASES.get(value)
        if found is not None:
            return found
    if value is bool:
        return bool_
    if value is int:
        return int64
    if value is float:
        return float32
    text = str(value)
    if text.startswith("torch."):
        found = BY_NAME.get(text[6:]) or ALIASES.get(text[6:])
        if found is not None:
            return found
    try:
        return BY_NUMPY[np.dtype(value)]
    except (TypeError, KeyError):
        raise DTypeError(
            "unknown dtype",
            expected="one of " + ", ".join(BY_NAME),
            got=repr(value),
            hint="empty(), zeros() and ones() take sizes"
            if isinstance(value, int)
            else meant(text, [*BY_NAME, *ALIASES]),
        ) from None


def promote(a: DType, b: DType) -> DType:
    """The DType of an elementwise op on `a` and `b`."""
    if a is b:
        return a
    low, high = (a, b) if a.rank <= b.rank else (b, a)
    if high.is_float:
        if low.is_float:
            if high is bfloat16 and low is float16:
                return float32
            if high in (float8_e4m3,) and low is float8_e5m2:
                return float16
        return high
    if low.kind == "bool":
        return high
    if low.kind == high.kind:
        return low if low.bits > high.bits else high
    signed, unsigned = (low, high) if low.kind == "int" else (high, low)
    if signed.bits > unsigned.bits:
        return signed
    return {8: int16, 16: int32, 32: int64, 64: int64}[unsigned.bits]


def promote_scalar(dtype: DType, value: bool | int | float) -> DType:
    """The DType of an op between a tensor of `dtype` and a Python number."""
    if isinstance(value, (bool, np.bool_)):
        return dtype
    if isinstance(value, (int, np.integer)):
        return int64 if dtype is bool_ else dtype
    return dtype if dtype.is_float else float32


def accumulator(dtype: DType) -> DType:
    """The DType in which sums and dots over `dtype` are accumulated."""
    if dtype.is_float:
        return float64 if dtype is float64 else float32
    if dtype.kind == "bool":
        return int64
    return int64 if dtype.bits == 64 else (int32 if dtype.kind == "int" else uint32)
