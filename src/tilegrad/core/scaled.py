"""Formats of codes with scales beside them: any element, any granularity, by name.

A row lies as the codes of all blocks, their scales, zero points and places, then 16 bytes of what
the row has once. All that a row needs is in it: a scale that rows share is repeated in each.
A name says everything: ELEMENT, what shares a scale, the scale's dtype, and what there is besides.

| part of a name | means                                                                       |
|----------------|-----------------------------------------------------------------------------|
| INT2 .. INT8   | whole numbers around 0; with ZERO unsigned ones above a zero point           |
| E2M1 E4M3 E5M2 | floats of 4 and 8 bits                                                       |
| NF4            | the 16 quantiles of a normal distribution, from -1 to 1                      |
| BF16 F16       | plain elements, for SPARSE; INT2 .. INT8 without scales are whole numbers    |
| TENSOR ROW     | one scale for all; for a row (a channel of weights, a token)                 |
| G32 128X128    | a scale for so many columns of a row; of so many rows and columns            |
| F32 F16 BF16   | a scale's dtype; E4M3 too, and E8M0: a power of two                          |
| ZERO           | a zero point of 8 bits beside each scale: value = scale * (code - zero)      |
| TOTAL          | one more factor in float32, of the whole tensor                              |
| SPARSE         | two of each four elements are kept; `places` has 2 bits for the place of each |

Bits of packed codes follow one another, the lowest first, as bytes have them. Invariant: values are
those of the formula in float32, with zero points taken off before anything is rounded; unpacking
what was packed and packing it again with the same scales gives the same bytes. The file is long
because both ways of every element stand beside each other.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

import numpy as np

from .dtype import (
    DType,
    bfloat16,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    int8,
    uint8,
    uint16,
    uint32,
)
from .errors import ShapeError, UserError
from .format import (
    NUMPY,
    Array,
    ArrayOperations,
    Element,
    Field,
    Fields,
    Format,
    Grain,
    Operations,
    _centred,
    _e2m1_of,
    _float,
    _minus,
)

TAIL = 16  # bytes of what a row has once: rows stay aligned
ELEMENTS = {
    **{f"INT{bits}": Element(f"INT{bits}", bits) for bits in range(2, 8)},
    "INT8": Element("INT8", 8, int8),
    "E2M1": Element("E2M1", 4),
    "NF4": Element("NF4", 4),
    "E4M3": Element("E4M3", 8, float8_e4m3),
    "E5M2": Element("E5M2", 8, float8_e5m2),
    "BF16": Element("BF16", 16, bfloat16),
    "F16": Element("F16", 16, float16),
}
SCALES = {"F32": float32, "F16": float16, "BF16": bfloat16, "E4M3": float8_e4m3, "E8M0": uint8}
LARGEST = {"E2M1": 6.0, "NF4": 1.0, "E4M3": 448.0, "E5M2": 57344.0}  # of elements
LARGEST_POWER = {"E2M1": 2, "E4M3": 8, "E5M2": 15}
# Quantiles of a normal distribution, scaled to -1 .. 1, with 0 among them (QLoRA, appendix E).
NORMAL = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
NAME = re.compile(
    r"(INT[2-8]|E2M1|NF4|E4M3|E5M2|BF16|F16)"
    r"(?:_(TENSOR|ROW|G([1-9]\d{0,4})|([1-9]\d{0,3})X([1-9]\d{0,4}))"
    r"_(F32|F16|BF16|E4M3|E8M0)(_ZERO)?(_TOTAL)?)?"
    r"(_SPARSE)?\Z"
)


# ---- names --------------------------------------------------------------------------------------


@functools.cache
def parsed(name: str) -> Format | None:
    """The Format of a name, in capitals; None where the name is none."""
    found = NAME.match(name)
    if found is None:
        return None
    element, grain, group, rows, columns, scale, zero, total, sparse = found.groups()
    shared = Grain(0 if grain == "TENSOR" else int(rows or 1), int(group or columns or 0))
    return scaled(element, shared if grain else None, scale, bool(zero), bool(total), bool(sparse))


def scaled(
    element: str,
    grain: Grain | None = None,
    scale: str | None = "F32",
    zero: bool = False,
    total: bool = False,
    sparse: bool = False,
) -> Format:
    """The Format of an element with scales."""
    made = ELEMENTS[element]
    words = [element, *([] if grain is None else [str(grain), str(scale)])]
    words += [w for w, there in (("ZERO", zero), ("TOTAL", total), ("SPARSE", sparse)) if there]
    name = "_".join(words)
    block = _block_of(made, grain, scale, zero, sparse, name)
    stored = uint8 if made.dtype is None or (zero and made.bits == 8) else made.dtype
    kept = block // 2 if sparse else block
    fields = [Field("codes", stored, kept * made.bits // 8 // stored.size, 0)]
    per_row = [("total", float32)] if total else []
    if grain is not None:
        factors = [("scale", SCALES[str(scale)])] + ([("zero", uint8)] if zero else [])
        if grain.columns:
            fields += [Field(part, dtype, 1, 0) for part, dtype in factors]
        else:
            per_row += factors
    if sparse:
        fields.append(Field("places", uint8, block // 8, 0))
    row, offset = [], 0  # the widest comes first: nothing is between them
    for part, dtype in per_row:
        row.append(Field(part, dtype, 1, offset))
        offset += dtype.size
    return Format(
        name,
        block,
        sum(f.count * f.dtype.size for f in fields),
        tuple(fields),
        block,
        codes=_codes(made, block, zero, sparse, scale == "F32"),
        scales=_scales(made, scale, zero, total),
        element=made,
        grain=grain or Grain(),
        apart=True,
        row=tuple(row),
        row_bytes_more=TAIL if row else 0,
        sparse=sparse,
    )


def _block_of(
    made: Element, grain: Grain | None, scale: str | None, zero: bool, sparse: bool, name: str
) -> int:
    """Elements of a block; an error where there is no such Format."""
    least = math.lcm(8 // math.gcd(made.bits, 8) if made.dtype is None else 1, 8 if sparse else 1)
    if sparse and made.dtype is None:
        least = math.lcm(least, 2 * 8 // math.gcd(made.bits, 8))
    block = (grain.columns if grain else 0) or least
    plain = made.name in ("BF16", "F16")
    whole = made.name.startswith("INT") and grain is None and not zero
    if (
        block % least
        or (grain is None and not whole) != plain
        or (plain and not sparse)
        or (zero and not made.name.startswith("INT"))
        or (zero and scale in ("E4M3", "E8M0"))
    ):
        raise UserError(
            "no such format",
            op="format",
            expected=f"groups of whole bytes (a multiple of {least}), zero points of integers",
            got=name,
        )
    return block


# ---- unpacking ----------------------------------------------------------------------------------


def digits(operations: Operations, x: Any, bits: int) -> Any:
    """Bytes (..., n) as the numbers of so many bits that they hold, the lowest first."""
    if bits == 8:
        return x
    lead, size = operations.shape(x)[:-1], operations.shape(x)[-1]
    if 8 % bits == 0:
        return _shifted(operations, x, 8 // bits, bits)
    ones = operations.reshape(_shifted(operations, x, 8, 1), (*lead, size * 8 // bits, bits))
    ones = operations.apply("shift_left", ones, operations.iota(bits, uint8))
    wide: ArrayOperations = operations  # type: ignore[assignment]  # no kernel reads these yet
    return operations.reshape(wide.reduce("sum", ones, -1), (*lead, size * 8 // bits))


def _shifted(operations: Operations, x: Any, count: int, bits: int) -> Any:
    lead, size = operations.shape(x)[:-1], operations.shape(x)[-1]
    steps = operations.apply(
        "multiply", operations.iota(count, uint8), operations.constant(bits, uint8)
    )
    cut = operations.apply("shift_right", operations.reshape(x, (*lead, size, 1)), steps)
    mask = operations.constant((1 << bits) - 1, uint8)
    return operations.reshape(operations.apply("bit_and", cut, mask), (*lead, size * count))


def _codes(element: Element, block: int, zero: bool, sparse: bool, wide: bool) -> Any:
    def codes(operations: Operations, fields: Fields) -> Any:
        found = fields["codes"]
        if element.dtype is None:
            found = digits(operations, found, element.bits)
            if element.name == "E2M1":
                found = _e2m1_of(operations, found)
            elif element.name == "NF4":
                found = _normal(operations, found)
            elif not zero:
                found = _centred(operations, found, 1 << (element.bits - 1))
        if zero and wide:  # scale * code would be rounded before the zero point is taken off
            zeros = _float(operations, fields["zero"])
            found = operations.apply("subtract", _float(operations, found), zeros)
        return _spread_out(operations, found, fields["places"], block) if sparse else found

    return codes


def _scales(element: Element, scale: str | None, zero: bool, total: bool) -> Any:
    def scales(operations: Operations, fields: Fields) -> tuple[Any, Any]:
        if scale is None:
            return operations.constant(1.0, float32), None
        found = fields["scale"]
        found = power(operations, found) if scale == "E8M0" else _float(operations, found)
        if total:
            found = operations.apply("multiply", found, _float(operations, fields["total"]))
        offset = None
        if zero and scale != "F32":
            zeros = _float(operations, fields["zero"])
            offset = _minus(operations, operations.apply("multiply", found, zeros))
        if element.name == "E2M1":  # codes are doubled
            found = operations.apply("multiply", found, operations.constant(0.5, float32))
        return found, offset

    return scales


def power(operations: Operations, x: Any) -> Any:
    """2 ** (x - 127) of bytes, the least subnormal; 255 is no number."""
    wide = operations.cast(x, uint32)

    def word(value: int) -> Any:
        return operations.constant(value, uint32)

    bits = operations.apply("shift_left", wide, word(23))
    bits = operations.apply(
        "where", operations.apply("equal", wide, word(0)), word(0x00400000), bits
    )
    bits = operations.apply(
        "where", operations.apply("equal", wide, word(255)), word(0x7FC00000), bits
    )
    return operations.bitcast(bits, float32)


def _normal(operations: Operations, x: Any) -> Any:
    found = operations.constant(NORMAL[0], float32)
    for number in range(1, 16):
        here = operations.apply("equal", x, operations.constant(number, uint8))
        found = operations.apply("where", here, operations.constant(NORMAL[number], float32), found)
    return found


def _spread_out(operations: Operations, kept: Any, positions: Any, block: int) -> Any:
    """The two kept elements of each four at their places, zeros between."""
    lead = operations.shape(kept)[:-1]
    kept = operations.cast(kept, float32)
    kept = operations.reshape(kept, (*lead, block // 4, 1, 2))
    at = operations.reshape(_shifted(operations, positions, 4, 2), (*lead, block // 4, 1, 2))
    here = operations.apply("equal", at, operations.reshape(operations.iota(4, uint8), (4, 1)))
    wide: ArrayOperations = operations  # type: ignore[assignment]
    found = operations.apply("where", here, kept, operations.constant(0.0, float32))
    return operations.reshape(wide.reduce("sum", found, -1), (*lead, block))


# ---- packing ------------------------------------------------------------------------------------


def pack_array(form: Format, values: Array, scale: Array | None = None) -> Array:
    """Bytes (..., row bytes) of values (..., elements), in NumPy."""
    wide = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(wide).all():
        raise UserError("values to pack must be finite", op=form.name)
    if form.whole and (wide != np.round(wide)).any():
        raise not_whole(form, "fractions", form.name)
    form.row_bytes(wide.shape[-1] if wide.ndim else 1)
    with np.errstate(all="ignore"):
        found: Array = packed(form, NUMPY, wide, scale)
    return found


def not_whole(form: Format, got: str, op: str) -> UserError:
    """The error of values that a Format without scales would round to whole numbers."""
    element, *rest = form.name.split("_")
    return UserError(
        f"values of {form.name} are whole numbers: it has no scale",
        op=op,
        expected="integers",
        got=got,
        hint=f"{'_'.join((element, 'ROW_F32', *rest))} has a scale of each row",
    )


def packed(form: Format, operations: ArrayOperations, x: Any, scale: Any = None) -> Any:
    """Bytes of values (..., elements) in float32; `scale` (..., groups) where it is given."""
    if form.element is None or not form.apart:
        raise UserError("this format is not packed in a Graph", op="pack", got=form.name)
    fields = encoded(form, operations, x, scale)
    return _joined(form, operations, fields, operations.shape(x)[:-1])


def encoded(form: Format, operations: ArrayOperations, x: Any, scale: Any = None) -> dict[str, Any]:
    """The Fields (..., groups, count) of values in float32; codes of few bits are one a byte."""
    shape = operations.shape(x)
    lead, columns = shape[:-1], shape[-1]
    groups = columns // form.grain.columns if form.grain.columns else 1
    there = [f.name for f in (*form.fields, *form.row)]
    cut = operations.reshape(x, (*lead, groups, columns // groups))
    found: dict[str, Any] = {}
    if form.sparse:
        cut, found["places"] = _kept(operations, cut)
    if "scale" in there:
        if scale is None:
            stored, total, low = _scales_for(form, operations, cut)
        else:
            given = operations.reshape(scale, (*operations.shape(scale), 1))
            given = operations.expand(given, (*lead, groups, 1))
            stored, total, low = _stored(form, operations, given), None, None
        found["scale"] = stored
        real = _value_of(form, operations, stored)
        if "total" in there:
            one = operations.constant(1.0, float32)
            found["total"] = operations.expand(one if total is None else total, (*lead, 1, 1))
            real = operations.apply("multiply", real, found["total"])
        nothing = operations.apply("equal", real, operations.constant(0.0, float32))
        real = operations.apply("where", nothing, operations.constant(1.0, float32), real)
        if "zero" in there:
            found["zero"] = _zeros(form, operations, low, real, (*lead, groups, 1))
        cut = operations.apply("divide", cut, real)
    found["codes"] = _encoded(form, operations, cut, found.get("zero"))
    return found


def _joined(
    form: Format, operations: ArrayOperations, found: dict[str, Any], lead: tuple[int, ...]
) -> Any:
    """Arrays (..., groups, count) of each Field as bytes of a row."""
    rows = []
    for part in (*form.fields, *form.row):
        raw = found[part.name]
        if part.name == "codes" and form.element is not None and form.element.dtype is None:
            raw = packed_bits(operations, raw, form.element.bits)
        raw = bytes_of(operations, raw)
        size = math.prod(operations.shape(raw)[len(lead) :])
        rows.append(operations.reshape(raw, (*lead, size)))
    if form.row:
        used = form.row[-1].offset + form.row[-1].dtype.size
        rest = operations.constant(0, uint8)
        rows.append(operations.expand(rest, (*lead, form.row_bytes_more - used)))
    return operations.concatenate(rows)


def bytes_of(operations: Operations, x: Any) -> Any:
    """An array (..., n) as its bytes (..., n * size), the lowest first."""
    dtype = _dtype(x)
    if dtype is uint8:
        return x
    if dtype.size == 1:
        return operations.bitcast(x, uint8)
    word = {2: uint16, 4: uint32}[dtype.size]
    bits = operations.reshape(operations.bitcast(x, word), (*operations.shape(x), 1))
    steps = operations.apply(
        "multiply", operations.iota(dtype.size, word), operations.constant(8, word)
    )
    bits = operations.apply("shift_right", bits, steps)
    bits = operations.apply("bit_and", bits, operations.constant(255, word))
    shape = operations.shape(x)
    return operations.cast(operations.reshape(bits, (*shape[:-1], shape[-1] * dtype.size)), uint8)


def _dtype(x: Any) -> DType:
    from .dtype import dtype_of

    return dtype_of(x.dtype)


def packed_bits(operations: ArrayOperations, codes: Any, bits: int) -> Any:
    """Numbers (..., n) of so many bits as bytes, the lowest first."""
    if bits == 8:
        return codes
    lead, size = operations.shape(codes)[:-1], operations.shape(codes)[-1]
    count, each = (8 // bits, bits) if 8 % bits == 0 else (8, 1)
    if each == 1:
        codes = operations.reshape(codes, (*lead, size, 1))
        codes = operations.apply("shift_right", codes, operations.iota(bits, uint8))
        codes = operations.apply("bit_and", codes, operations.constant(1, uint8))
    codes = operations.reshape(codes, (*lead, size * bits // 8, count))
    steps = operations.apply(
        "multiply", operations.iota(count, uint8), operations.constant(each, uint8)
    )
    codes = operations.apply("shift_left", codes, steps)
    return operations.reshape(operations.reduce("sum", codes, -1), (*lead, size * bits // 8))


def _number(operations: Operations, value: float) -> Any:
    return operations.constant(value, float32)


def _over_rows(form: Format, operations: ArrayOperations, name: str, x: Any) -> Any:
    """(..., groups, n) reduced to (..., groups, 1), over the rows that share a scale too."""
    x = operations.reduce(name, x, -1)
    shape, rows = operations.shape(x), form.grain.rows
    if rows == 1:
        return x
    if not rows:
        flat = operations.reshape(x, (1,) * (len(shape) - 1) + (math.prod(shape),))
        return operations.expand(operations.reduce(name, flat, -1), shape)
    if len(shape) < 3 or shape[-3] % rows:
        raise ShapeError(
            "rows do not divide into blocks",
            op=form.name,
            expected=f"a multiple of {rows}",
            got=shape[:-2],
        )
    cut = operations.reshape(x, (*shape[:-3], shape[-3] // rows, rows, shape[-2], 1))
    found = operations.reduce(name, cut, len(shape) - 2)
    return operations.reshape(operations.expand(found, operations.shape(cut)), shape)


def most_of(form: Format) -> float:
    """The largest value of an element: what absmax is divided by."""
    assert form.element is not None
    found = LARGEST.get(form.element.name)
    return float((1 << (form.element.bits - 1)) - 1) if found is None else found


def _scales_for(form: Format, operations: ArrayOperations, cut: Any) -> tuple[Any, Any, Any]:
    """Scales as they are stored, the factor of all, and the least values (of zero points)."""
    assert form.element is not None
    if any(f.name == "zero" for f in (*form.fields, *form.row)):
        zero = _number(operations, 0.0)
        low = operations.apply("minimum", _over_rows(form, operations, "min", cut), zero)
        high = operations.apply("maximum", _over_rows(form, operations, "max", cut), zero)
        span = operations.apply("subtract", high, low)
        steps = _number(operations, float((1 << form.element.bits) - 1))
        return _stored(form, operations, operations.apply("divide", span, steps)), None, low
    absmax = _over_rows(form, operations, "max", operations.apply("absolute", cut))
    (kind,) = (f.dtype for f in (*form.fields, *form.row) if f.name == "scale")
    if kind is uint8:
        bits = operations.bitcast(absmax, uint32)
        bits = operations.apply("shift_right", bits, operations.constant(23, uint32))
        less = operations.constant(LARGEST_POWER[form.element.name], uint32)
        bits = operations.apply("maximum", bits, less)
        return operations.cast(operations.apply("subtract", bits, less), uint8), None, None
    scale = operations.apply("divide", absmax, _number(operations, most_of(form)))
    total = None
    if any(f.name == "total" for f in form.row):
        whole = Format(**{**form.__dict__, "grain": Grain(0, 0)})
        total = _over_rows(whole, operations, "max", scale)
        flat = operations.shape(total)
        total = operations.reshape(total, (*flat[:-2], 1, flat[-2]))
        total = operations.reduce("max", total, -1)
        total = operations.apply("divide", total, _number(operations, 448.0))
        none = operations.apply("equal", total, _number(operations, 0.0))
        total = operations.apply("where", none, _number(operations, 1.0), total)
        scale = operations.apply("divide", scale, total)
    return _stored(form, operations, scale), total, None


def _stored(form: Format, operations: ArrayOperations, scale: Any) -> Any:
    """Scales in the dtype they are stored in; powers of two are given as their bytes."""
    (kind,) = (f.dtype for f in (*form.fields, *form.row) if f.name == "scale")
    if kind is float8_e4m3:
        scale = operations.apply("minimum", scale, _number(operations, 448.0))
    return operations.cast(scale, kind)


def _value_of(form: Format, operations: Operations, stored: Any) -> Any:
    return power(operations, stored) if _dtype(stored) is uint8 else _float(operations, stored)


def _zeros(form: Format, operations: ArrayOperations, low: Any, real: Any, shape: Any) -> Any:
    assert form.element is not None
    if low is None:  # the scale is given: the middle
        half = operations.constant(1 << (form.element.bits - 1), uint8)
        return operations.expand(half, shape)
    zero = operations.apply("round", operations.apply("divide", _minus(operations, low), real))
    most = _number(operations, float((1 << form.element.bits) - 1))
    zero = operations.apply("minimum", zero, most)
    return operations.cast(operations.apply("maximum", zero, _number(operations, 0.0)), uint8)


def _encoded(form: Format, operations: ArrayOperations, x: Any, zero: Any) -> Any:
    """Values in units of the scale as codes: as they are stored, or one in a byte."""
    element = form.element
    assert element is not None
    if element.name in ("BF16", "F16"):
        return operations.cast(x, element.dtype)  # type: ignore[arg-type]
    if element.name in ("E4M3", "E5M2"):
        most = LARGEST[element.name]
        x = operations.apply("minimum", x, _number(operations, most))
        x = operations.apply("maximum", x, _number(operations, -most))
        return operations.cast(x, element.dtype)  # type: ignore[arg-type]
    if element.name == "E2M1":
        return _to_e2m1(operations, x)
    if element.name == "NF4":
        middles = [(a + b) / 2 for a, b in itertools.pairwise(NORMAL)]
        return _counted(operations, x, [(m, False) for m in middles])
    x = operations.apply("round", x)
    low, high = -float(1 << (element.bits - 1)), float((1 << (element.bits - 1)) - 1)
    if zero is not None:
        x = operations.apply("add", x, _float(operations, zero))
        low, high = 0.0, float((1 << element.bits) - 1)
    x = operations.apply("minimum", x, _number(operations, high))
    x = operations.apply("maximum", x, _number(operations, low))
    if zero is not None:
        return operations.cast(x, uint8)
    if element.dtype is not None:
        return operations.cast(x, int8)
    return operations.cast(operations.apply("subtract", x, _number(operations, low)), uint8)


def _to_e2m1(operations: ArrayOperations, x: Any) -> Any:
    """The nearest of 0 .5 1 1.5 2 3 4 6, halves to the even code, and the sign above."""
    size = operations.apply("absolute", x)
    ends = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    code = _counted(operations, size, [(e, i % 2 == 1) for i, e in enumerate(ends)])
    negative = operations.apply("less", x, _number(operations, 0.0))
    eight, none = operations.constant(8, uint8), operations.constant(0, uint8)
    sign = operations.apply("where", negative, eight, none)
    return operations.apply("bit_or", code, sign)


def _counted(operations: ArrayOperations, x: Any, ends: list[tuple[float, bool]]) -> Any:
    """How many ends lie below x; those that count at x itself too are marked."""
    found: Any = None
    for end, also in ends:
        above = operations.apply("less_equal" if also else "less", _number(operations, end), x)
        one = operations.cast(above, uint8)
        found = one if found is None else operations.apply("add", found, one)
    return found


def _kept(operations: ArrayOperations, cut: Any) -> tuple[Any, Any]:
    """The two largest of each four (the first of equals), and the bytes of their places."""
    shape = operations.shape(cut)
    lead, size = shape[:-1], shape[-1]
    four = operations.reshape(cut, (*lead, size // 4, 4))
    weight = operations.apply("absolute", four)
    here = operations.reshape(weight, (*lead, size // 4, 4, 1))
    other = operations.reshape(weight, (*lead, size // 4, 1, 4))
    index = operations.iota(4, uint8)
    mine, theirs = operations.reshape(index, (4, 1)), operations.reshape(index, (1, 4))
    more = operations.apply("less", here, other)
    equal = operations.apply("equal", here, other)
    before = operations.apply("less", theirs, mine)
    first = operations.apply("where", before, equal, operations.apply("less", mine, mine))
    beaten = operations.apply("bit_or", more, first)
    rank = operations.reduce("sum", operations.cast(beaten, uint8), -1)
    rank = operations.reshape(rank, (*lead, size // 4, 4))
    kept = operations.apply("less", rank, operations.constant(2, uint8))
    far, none = operations.constant(4, uint8), operations.constant(0, uint8)
    low = operations.reduce("min", operations.apply("where", kept, index, far), -1)
    high = operations.reduce("max", operations.apply("where", kept, index, none), -1)
    at = operations.concatenate([low, high])  # (..., fours, 2)
    at = operations.reshape(at, (*lead, size // 4, 2, 1))
    chosen = operations.apply("equal", at, index)
    four = operations.reshape(four, (*lead, size // 4, 1, 4))
    values = operations.apply("where", chosen, four, _number(operations, 0.0))
    values = operations.reduce("sum", values, -1)
    positions = operations.reshape(at, (*lead, size // 2))
    return (
        operations.reshape(values, (*lead, size // 2)),
        packed_bits(operations, positions, 2),
    )


__all__ = [
    "ELEMENTS",
    "NORMAL",
    "digits",
    "encoded",
    "not_whole",
    "pack_array",
    "packed",
    "parsed",
    "scaled",
]
