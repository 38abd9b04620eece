"""Formats: how a quantised tensor is stored, and its unpacking written once.

A row of a tensor is cut into blocks of `block` elements; each takes `block_bytes` bytes, laid out
as named Fields. A value is `scale * code + offset`: `codes` gives the whole numbers of a block
(they fit int8), `scales` the scale and the offset of each `group` of elements. Both are written
over array `Operations` passed in, by the names of Tile IR's elementwise ops: NumPy here, the tile
builder inside kernels. Fields come as (..., count), codes leave as (..., block).

Three ways to lay out a row: plain elements; blocks one after the other, each with all of its
Fields (the table below); and `apart`: the codes of all blocks, then their scales, and so on, then
`row` Fields that the whole row has once (`core/scaled.py`: any element with any granularity).

| format | block | bytes | fields in order; value                                               |
|--------|-------|-------|----------------------------------------------------------------------|
| Q4_0   | 32    | 18    | f16 d, 16 nibble bytes; d * (q - 8)                                  |
| Q4_1   | 32    | 20    | f16 d, f16 m, 16 nibble bytes; d * q + m                             |
| Q4_Z   | 32    | 20    | f16 d, f16 z, 16 nibble bytes; d * (q - z), z whole (AWQ, GPTQ)      |
| Q5_0/1 | 32    | 22/24 | f16 d [f16 m], 4 bytes of fifth bits, 16 nibble bytes                |
| Q8_0   | 32    | 34    | f16 d, 32 int8; d * q                                                |
| Q2_K   | 256   | 84    | 16 scale and minimum nibbles, 64 bytes of 2 bits, f16 d, f16 dmin    |
| Q3_K   | 256   | 110   | 32 bytes of third bits, 64 of 2 bits, 12 of 6-bit scales, f16 d      |
| Q4_K   | 256   | 144   | f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, 128 of nibbles |
| Q5_K   | 256   | 176   | as Q4_K, with 32 bytes of fifth bits before the nibbles              |
| Q6_K   | 256   | 210   | 128 bytes of nibbles, 64 of 2 bits, 16 int8 scales, f16 d            |
| MXFP4  | 32    | 17    | power of two (E8M0), 16 bytes of E2M1 nibbles                        |

Nibbles: the low one of byte j is element j of its run, the high one comes a whole run later.
Q4_Z is our own, the others are llama.cpp's.
Invariant: unpacking gives the float32 values of the `gguf` package, bit for bit (which NaN a NaN
is may differ); a Format never reads outside of the bytes of its block. The file is long because
every layout has its few lines in this one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from . import block_packing as packing
from . import dtype as dtypes
from .dtype import DType, float16, float32, int8, int32, uint8, uint32
from .errors import DTypeError, ShapeError, UserError

Array = np.ndarray[Any, Any]


class Operations(Protocol):
    """What unpacking asks of arrays; elementwise ops broadcast, axes counted from the right."""

    def shape(self, x: Any) -> tuple[int, ...]: ...
    def constant(self, value: int | float, dtype: DType) -> Any: ...
    def iota(self, size: int, dtype: DType) -> Any: ...
    def cast(self, x: Any, dtype: DType) -> Any: ...
    def bitcast(self, x: Any, dtype: DType) -> Any: ...
    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any: ...
    def apply(self, name: str, *inputs: Any) -> Any: ...


class ArrayOperations(Operations, Protocol):
    """What packing asks besides: of NumPy and of a Graph, never of kernels."""

    def reduce(self, name: str, x: Any, axis: int) -> Any:
        """Over one axis, which stays with size 1, in x's dtype."""

    def concatenate(self, xs: Sequence[Any]) -> Any:
        """Along the last axis."""

    def expand(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Repeated to a shape."""


class NumpyOperations:
    """The Operations over NumPy arrays."""

    NAMES: dict[str, Callable[..., Any]] = {
        "add": np.add,
        "subtract": np.subtract,
        "multiply": np.multiply,
        "bit_and": np.bitwise_and,
        "bit_or": np.bitwise_or,
        "shift_left": np.left_shift,
        "shift_right": np.right_shift,
        "less": np.less,
        "equal": np.equal,
        "where": np.where,
        "negative": np.negative,
        "divide": np.divide,
        "maximum": np.maximum,
        "minimum": np.minimum,
        "absolute": np.abs,
        "round": np.round,
        "less_equal": np.less_equal,
    }
    REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}

    def shape(self, x: Array) -> tuple[int, ...]:
        """The sizes of an array."""
        return x.shape

    def constant(self, value: int | float, dtype: DType) -> Any:
        """A scalar."""
        return dtype.numpy.type(value)

    def iota(self, size: int, dtype: DType) -> Array:
        """0 .. size-1."""
        return np.arange(size, dtype=dtype.numpy)

    def cast(self, x: Array, dtype: DType) -> Array:
        """The values in another dtype."""
        return x.astype(dtype.numpy)

    def bitcast(self, x: Array, dtype: DType) -> Array:
        """The same bits as another dtype of that size."""
        return np.ascontiguousarray(x).view(dtype.numpy)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Another shape, row-major order kept."""
        return x.reshape(shape)

    def apply(self, name: str, *inputs: Any) -> Array:
        """An elementwise op by name."""
        result: Array = self.NAMES[name](*inputs)
        return result

    def reduce(self, name: str, x: Array, axis: int) -> Array:
        """Over one axis, which stays with size 1, in x's dtype."""
        found: Array = self.REDUCE[name](x, axis=axis, keepdims=True)
        return found.astype(x.dtype)

    def concatenate(self, xs: Sequence[Array]) -> Array:
        """Along the last axis."""
        return np.concatenate(list(xs), axis=-1)

    def expand(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Repeated to a shape."""
        return np.broadcast_to(x, shape)


NUMPY = NumpyOperations()
Fields = Mapping[str, Any]
Codes = Callable[[Operations, Fields], Any]
Scales = Callable[[Operations, Fields], tuple[Any, Any]]
Packer = Callable[[Array], dict[str, Array]]


@dataclass(frozen=True)
class Field:
    """A run of `count` elements of one dtype at a byte `offset` of a block."""

    name: str
    dtype: DType
    count: int
    offset: int


@dataclass(frozen=True)
class Element:
    """What a code is: a whole number of `bits`, a small float, or an entry of a table."""

    name: str
    bits: int
    dtype: DType | None = None  # that codes are stored as; without one they are packed bits


@dataclass(frozen=True)
class Grain:
    """Elements that share a scale: so many rows and columns; 0 for all there are."""

    rows: int = 1
    columns: int = 0

    def __str__(self) -> str:
        if not self.columns:
            return "ROW" if self.rows else "TENSOR"
        return f"G{self.columns}" if self.rows == 1 else f"{self.rows}X{self.columns}"


@dataclass(frozen=True)
class Format:
    """How a tensor is stored: plain elements of a `dtype`, or blocks of codes and scales."""

    name: str
    block: int
    block_bytes: int
    fields: tuple[Field, ...]
    group: int = 1
    dtype: DType | None = None
    codes: Codes | None = field(default=None, repr=False, compare=False)
    scales: Scales | None = field(default=None, repr=False, compare=False)
    packer: Packer | None = field(default=None, repr=False, compare=False)
    element: Element | None = None
    grain: Grain = Grain()
    apart: bool = False  # whether each Field of all blocks lies together
    row: tuple[Field, ...] = ()  # what a row has once, at its end
    row_bytes_more: int = 0  # that they take
    sparse: bool = False  # two of every four elements are kept, `places` says which

    def __reduce__(self) -> tuple[Any, ...]:
        return (format_of, (self.name,))

    def __repr__(self) -> str:
        return self.name

    @property
    def quantised(self) -> bool:
        """Whether elements are codes with scales; plain elements otherwise."""
        return self.dtype is None

    @property
    def whole(self) -> bool:
        """Whether values are whole numbers: codes without scales, as int8 holds them."""
        names = {part.name for part in (*self.fields, *self.row)}
        kind = self.element.name if self.element is not None else ""
        return kind.startswith("INT") and names <= {"codes", "places"}

    @property
    def bits(self) -> float:
        """Bits an element takes, its share of the scales included."""
        return 8 * self.block_bytes / self.block

    @property
    def symmetric(self) -> bool:
        """Whether values are a scale times a code, with no offset or zero point."""
        names = {part.name for part in (*self.fields, *self.row)}
        return not names & {"minimum", "minima", "zero"} and self.name != "Q2_K"

    def elements(self, row_bytes: int) -> int:
        """Elements of a row of so many bytes, which must be whole blocks."""
        whole = row_bytes - self.row_bytes_more
        if whole < 0 or whole % self.block_bytes:
            raise ShapeError(
                "bytes are not a whole number of blocks",
                op=self.name,
                expected=f"{self.row_bytes_more} and a multiple of {self.block_bytes}",
                got=row_bytes,
            )
        return whole // self.block_bytes * self.block

    def row_bytes(self, size: int) -> int:
        """Bytes of a row of `size` elements, which must be whole blocks."""
        if size < 0 or size % self.block:
            raise ShapeError(
                "a row is not a whole number of blocks",
                op=self.name,
                expected=f"a multiple of {self.block}",
                got=size,
            )
        return size // self.block * self.block_bytes + self.row_bytes_more

    def storage_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in bytes of a tensor of `shape`: its last axis becomes bytes."""
        if not shape:
            return (self.row_bytes(1),)
        return (*shape[:-1], self.row_bytes(shape[-1]))

    def storage_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of `shape`."""
        total = 1
        for size in self.storage_shape(shape):
            total *= size
        return total

    def whole_scales(self, fields: dict[str, Array]) -> tuple[Array, Array | None]:
        """Scales and offsets of groups in units of a block's own: whole numbers."""
        assert self.scales is not None
        ones: dict[str, Array] = {
            n: np.ones_like(fields[n]) for n in ("scale", "minimum") if n in fields
        }
        scales, minima = self.scales(NUMPY, {**fields, **ones})
        return scales, minima

    def split(self, raw: Array) -> dict[str, Array]:
        """The Fields (..., blocks, count) of bytes (..., row bytes), as views where possible."""
        if raw.dtype != np.uint8 or not raw.ndim:
            raise ShapeError(
                "not bytes", op=self.name, expected="uint8", got=f"{raw.dtype}{list(raw.shape)}"
            )
        if raw.strides[-1] != 1:
            raw = np.ascontiguousarray(raw)
        lead, blocks = raw.shape[:-1], self.elements(raw.shape[-1]) // self.block
        result = {}
        for part, start, step in self.field_starts(blocks):
            count = 1 if part in self.row else blocks
            begin = raw[..., start:] if raw.size else raw
            shape = (*lead, count, part.count * part.dtype.size)
            steps = (*raw.strides[:-1], step, 1)
            view = np.lib.stride_tricks.as_strided(begin, shape, steps, writeable=False)
            result[part.name] = view.view(part.dtype.numpy)
        return result

    def field_starts(self, blocks: int) -> list[tuple[Field, int, int]]:
        """Where each Field of a row's first block lies, and how far away that of the next is."""
        if not self.apart:
            return [(part, part.offset, self.block_bytes) for part in self.fields]
        found, start = [], 0
        for part in self.fields:
            size = part.count * part.dtype.size
            found.append((part, start, size))
            start += blocks * size
        return found + [(part, start + part.offset, 0) for part in self.row]

    def unpack(self, operations: Operations, fields: Fields) -> Any:
        """The float32 values (..., block) of blocks whose Fields are (..., count)."""
        if self.codes is None or self.scales is None:
            return operations.cast(fields["value"], float32)
        codes = operations.cast(self.codes(operations, fields), float32)
        scale, offset = self.scales(operations, fields)
        lead = operations.shape(codes)[:-1]
        groups = self.block // self.group

        def over(x: Any) -> Any:  # what the whole row has once is there for all blocks
            return operations.reshape(x, (*operations.shape(x)[:-1], groups, 1))

        values = operations.apply(
            "multiply", over(scale), operations.reshape(codes, (*lead, groups, self.group))
        )
        if offset is not None:
            offset = over(offset)
            values = operations.apply("add", values, offset)
        return operations.reshape(values, (*lead, self.block))

    def to_float32(self, raw: Array) -> Array:
        """The float32 values (..., elements) of bytes (..., row bytes), in NumPy."""
        with np.errstate(all="ignore"):
            values: Array = self.unpack(NUMPY, self.split(raw))
        return values.reshape(*raw.shape[:-1], self.elements(raw.shape[-1]))

    def pack(self, values: Array) -> Array:
        """The bytes (..., row bytes) that hold `values` (..., elements) best, in NumPy."""
        if self.dtype is not None:
            plain = np.ascontiguousarray(values, self.dtype.numpy)
            return plain.view(np.uint8).reshape(self.storage_shape(values.shape))
        shape = self.storage_shape(values.shape)
        if self.apart:
            from .scaled import pack_array

            return pack_array(self, values)
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, self.block)
        if not np.isfinite(blocks).all():
            raise UserError("values to pack must be finite", op=self.name)
        with np.errstate(all="ignore"):
            assert self.packer is not None
            packed = self.packer(blocks)
            found = [np.ascontiguousarray(packed[p.name], p.dtype.numpy) for p in self.fields]
        raw = np.zeros((len(blocks), self.block_bytes), np.uint8)
        for part, data in zip(self.fields, found):
            if part.dtype.is_float and not np.isfinite(data.astype(np.float32)).all():
                raise UserError(
                    "values to pack are too large",
                    op=self.name,
                    expected=f"scales within {part.dtype}",
                )
            raw[:, part.offset : part.offset + part.count * part.dtype.size] = data.view(np.uint8)
        return raw.reshape(shape)


# ---- pieces ---------------------------------------------------------------------------------


def _and(operations: Operations, x: Any, mask: int) -> Any:
    return operations.apply("bit_and", x, operations.constant(mask, uint8))


def _shift(operations: Operations, name: str, x: Any, by: int) -> Any:
    return operations.apply(name, x, operations.constant(by, uint8))


def _spread(operations: Operations, x: Any, bits: int, count: int, run: int) -> Any:
    """Codes of `bits` bits, `count` in a byte: those of a run of bytes, then the next above."""
    lead, size = operations.shape(x)[:-1], operations.shape(x)[-1]
    x = operations.reshape(x, (*lead, size // run, 1, run))
    steps = operations.apply(
        "multiply", operations.iota(count, uint8), operations.constant(bits, uint8)
    )
    x = operations.apply("shift_right", x, operations.reshape(steps, (count, 1)))
    return operations.reshape(_and(operations, x, (1 << bits) - 1), (*lead, size * count))


def _join(operations: Operations, low: Any, high: Any, bits: int) -> Any:
    """`low` with the bits of `high` above its `bits`."""
    return operations.apply("bit_or", low, _shift(operations, "shift_left", high, bits))


def _concatenated(operations: Operations, first: Any, second: Any) -> Any:
    """Two arrays (..., n) as one (..., 2n)."""
    lead, size = operations.shape(first)[:-1], operations.shape(first)[-1]
    index = operations.reshape(operations.iota(2, uint8), (2, 1))
    chosen = operations.apply(
        "where",
        operations.apply("equal", index, operations.constant(0, uint8)),
        operations.reshape(first, (*lead, 1, size)),
        operations.reshape(second, (*lead, 1, size)),
    )
    return operations.reshape(chosen, (*lead, 2 * size))


def _centred(operations: Operations, codes: Any, middle: int) -> Any:
    return operations.apply(
        "subtract", operations.cast(codes, int8), operations.constant(middle, int8)
    )


def _float(operations: Operations, x: Any) -> Any:
    return operations.cast(x, float32)


def _product(operations: Operations, scale: Any, small: Any) -> Any:
    return operations.apply("multiply", _float(operations, scale), _float(operations, small))


def _minus(operations: Operations, x: Any) -> Any:
    return operations.apply("negative", x)


# ---- blocks of 32 ---------------------------------------------------------------------------


def _scale(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    return _float(operations, fields["scale"]), None


def _scale_minimum(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    return _float(operations, fields["scale"]), _float(operations, fields["minimum"])


def _scale_zero(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    scale, zero = (_float(operations, fields[name]) for name in ("scale", "zero"))
    return scale, operations.apply("negative", operations.apply("multiply", scale, zero))


def _nibbles(operations: Operations, fields: Fields) -> Any:
    return _spread(operations, fields["nibbles"], 4, 2, 16)


def _fifth(operations: Operations, fields: Fields) -> Any:
    high = _spread(operations, fields["fifth"], 1, 8, 1)
    return _join(operations, _nibbles(operations, fields), high, 4)


def _q4_0(operations: Operations, fields: Fields) -> Any:
    return _centred(operations, _nibbles(operations, fields), 8)


def _q4_1(operations: Operations, fields: Fields) -> Any:
    return operations.cast(_nibbles(operations, fields), int8)


def _q5_0(operations: Operations, fields: Fields) -> Any:
    return _centred(operations, _fifth(operations, fields), 16)


def _q5_1(operations: Operations, fields: Fields) -> Any:
    return operations.cast(_fifth(operations, fields), int8)


def _q8_0(operations: Operations, fields: Fields) -> Any:
    return fields["codes"]


def _e2m1(operations: Operations, fields: Fields) -> Any:
    return _e2m1_of(operations, _nibbles(operations, fields))


def _e2m1_of(operations: Operations, nibbles: Any) -> Any:
    """Twice the value of sign, two exponent bits, one mantissa bit: 0 1 2 3 4 6 8 12."""
    one = operations.constant(1, uint8)
    mantissa = _and(operations, nibbles, 1)
    exponent = _and(operations, _shift(operations, "shift_right", nibbles, 1), 3)
    small = operations.apply("less", exponent, one)
    # (2 + mantissa) << (exponent - 1), written so that no shift is negative
    large = operations.apply("shift_left", _join(operations, mantissa, one, 1), exponent)
    large = _shift(operations, "shift_right", large, 1)
    size = operations.cast(operations.apply("where", small, mantissa, large), int8)
    negative = operations.apply("less", operations.constant(7, uint8), nibbles)
    return operations.apply("where", negative, _minus(operations, size), size)


def _e8m0(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    """2 ** (e - 128), half of the power, since codes are doubled; the least two are subnormal."""
    e = operations.cast(fields["power"], uint32)
    two = operations.constant(2, uint32)
    low = operations.apply("less", e, two)
    e_low = operations.apply("where", low, e, two)
    subnormal = operations.apply("shift_left", operations.constant(0x00200000, uint32), e_low)
    bits = operations.apply(
        "shift_left",
        operations.apply("subtract", e, operations.constant(1, uint32)),
        operations.constant(23, uint32),
    )
    return operations.bitcast(operations.apply("where", low, subnormal, bits), float32), None


# ---- blocks of 256 --------------------------------------------------------------------------


def _q2_k(operations: Operations, fields: Fields) -> Any:
    return operations.cast(_spread(operations, fields["pairs"], 2, 4, 32), int8)


def _q2_k_scales(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    small = fields["scales"]
    scale = _product(operations, fields["scale"], _and(operations, small, 15))
    high = _shift(operations, "shift_right", small, 4)
    return scale, _minus(operations, _product(operations, fields["minimum"], high))


def _q3_k(operations: Operations, fields: Fields) -> Any:
    low = _spread(operations, fields["pairs"], 2, 4, 32)
    third = _spread(operations, fields["third"], 1, 8, 32)
    return _centred(operations, _join(operations, low, third, 2), 4)


def _q3_k_scales(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    low = _spread(operations, fields["scales"], 4, 2, 8)
    high = _spread(operations, fields["high_scales"], 2, 4, 4)
    small = _centred(operations, _join(operations, low, high, 4), 32)
    return _product(operations, fields["scale"], small), None


def _q4_k(operations: Operations, fields: Fields) -> Any:
    return operations.cast(_spread(operations, fields["nibbles"], 4, 2, 32), int8)


def _q4_k_scales(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    """Six bits each: sub-blocks 0..3 whole, 4..7 in nibbles with their top bits in the others."""
    small = []
    for own, nibble in (("scales", 0), ("minima", 4)):
        top = _and(operations, _shift(operations, "shift_right", fields[own], 2), 0x30)
        low = _and(operations, _shift(operations, "shift_right", fields["both"], nibble), 15)
        later = operations.apply("bit_or", low, top)
        small.append(_concatenated(operations, _and(operations, fields[own], 63), later))
    scale = _product(operations, fields["scale"], small[0])
    return scale, _minus(operations, _product(operations, fields["minimum"], small[1]))


def _q5_k(operations: Operations, fields: Fields) -> Any:
    low = _spread(operations, fields["nibbles"], 4, 2, 32)
    high = _spread(operations, fields["fifth"], 1, 8, 32)
    return operations.cast(_join(operations, low, high, 4), int8)


def _q6_k(operations: Operations, fields: Fields) -> Any:
    low = _spread(operations, fields["nibbles"], 4, 2, 64)
    high = _spread(operations, fields["pairs"], 2, 4, 32)
    return _centred(operations, _join(operations, low, high, 4), 32)


def _q6_k_scales(operations: Operations, fields: Fields) -> tuple[Any, Any]:
    return _product(operations, fields["scale"], fields["scales"]), None


# ---- the table ------------------------------------------------------------------------------


def _blocks(
    name: str,
    block: int,
    group: int,
    fields: Sequence[tuple[str, DType, int]],
    codes: Codes,
    scales: Scales,
    packer: Packer | None = None,
) -> Format:
    offset, found = 0, []
    for part, dtype, count in fields:
        found.append(Field(part, dtype, count, offset))
        offset += dtype.size * count
    return Format(name, block, offset, tuple(found), group, None, codes, scales, packer)


def _plain(name: str, dtype: DType) -> Format:
    return Format(name, 1, dtype.size, (Field("value", dtype, 1, 0),), dtype=dtype)


PLAIN: dict[DType, Format] = {
    dtype: _plain(name, dtype)
    for name, dtype in (
        ("F32", float32),
        ("F16", float16),
        ("BF16", dtypes.bfloat16),
        ("F64", dtypes.float64),
        ("F8_E4M3", dtypes.float8_e4m3),
        ("F8_E5M2", dtypes.float8_e5m2),
        ("BOOL", dtypes.bool_),
        ("I8", int8),
        ("I16", dtypes.int16),
        ("I32", int32),
        ("I64", dtypes.int64),
        ("U8", uint8),
        ("U16", dtypes.uint16),
        ("U32", uint32),
        ("U64", dtypes.uint64),
    )
}
F32, F16, BF16 = PLAIN[float32], PLAIN[float16], PLAIN[dtypes.bfloat16]

_SCALE, _MINIMUM, _NIBBLES = ("scale", float16, 1), ("minimum", float16, 1), ("nibbles", uint8, 16)
_SIX_BITS = (("scales", uint8, 4), ("minima", uint8, 4), ("both", uint8, 4))

Q4_0 = _blocks("Q4_0", 32, 32, (_SCALE, _NIBBLES), _q4_0, _scale, packing.pack_q4_0)
Q4_1 = _blocks(
    "Q4_1", 32, 32, (_SCALE, _MINIMUM, _NIBBLES), _q4_1, _scale_minimum, packing.pack_q4_1
)
Q4_Z = _blocks(
    "Q4_Z",
    32,
    32,
    (_SCALE, ("zero", float16, 1), _NIBBLES),
    _q4_1,
    _scale_zero,
    packing.pack_q4_z,
)
Q5_0 = _blocks(
    "Q5_0", 32, 32, (_SCALE, ("fifth", uint8, 4), _NIBBLES), _q5_0, _scale, packing.pack_q5_0
)
Q5_1 = _blocks(
    "Q5_1",
    32,
    32,
    (_SCALE, _MINIMUM, ("fifth", uint8, 4), _NIBBLES),
    _q5_1,
    _scale_minimum,
    packing.pack_q5_1,
)
Q8_0 = _blocks("Q8_0", 32, 32, (_SCALE, ("codes", int8, 32)), _q8_0, _scale, packing.pack_q8_0)
Q2_K = _blocks(
    "Q2_K",
    256,
    16,
    (("scales", uint8, 16), ("pairs", uint8, 64), _SCALE, _MINIMUM),
    _q2_k,
    _q2_k_scales,
    packing.pack_q2_k,
)
Q3_K = _blocks(
    "Q3_K",
    256,
    16,
    (
        ("third", uint8, 32),
        ("pairs", uint8, 64),
        ("scales", uint8, 8),
        ("high_scales", uint8, 4),
        _SCALE,
    ),
    _q3_k,
    _q3_k_scales,
    packing.pack_q3_k,
)
Q4_K = _blocks(
    "Q4_K",
    256,
    32,
    (_SCALE, _MINIMUM, *_SIX_BITS, ("nibbles", uint8, 128)),
    _q4_k,
    _q4_k_scales,
    packing.pack_q4_k,
)
Q5_K = _blocks(
    "Q5_K",
    256,
    32,
    (_SCALE, _MINIMUM, *_SIX_BITS, ("fifth", uint8, 32), ("nibbles", uint8, 128)),
    _q5_k,
    _q4_k_scales,
    packing.pack_q5_k,
)
Q6_K = _blocks(
    "Q6_K",
    256,
    16,
    (("nibbles", uint8, 128), ("pairs", uint8, 64), ("scales", int8, 16), _SCALE),
    _q6_k,
    _q6_k_scales,
    packing.pack_q6_k,
)
MXFP4 = _blocks("MXFP4", 32, 32, (("power", uint8, 1), _NIBBLES), _e2m1, _e8m0, packing.pack_mxfp4)

QUANTISED: tuple[Format, ...] = (
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    MXFP4,
    Q4_Z,
)
ALL: tuple[Format, ...] = (*PLAIN.values(), *QUANTISED)
BY_NAME: dict[str, Format] = {f.name: f for f in ALL}


def format_of(value: Format | DType | str) -> Format:
    """The Format of a name, of a DType's plain elements, or a Format itself."""
    if isinstance(value, Format):
        return value
    found = PLAIN.get(value) if isinstance(value, DType) else BY_NAME.get(str(value).upper())
    if found is None and isinstance(value, str):
        from .scaled import parsed

        found = parsed(value.upper())
    if found is None:
        raise DTypeError("unknown format", expected="one of " + ", ".join(BY_NAME), got=repr(value))
    return found
