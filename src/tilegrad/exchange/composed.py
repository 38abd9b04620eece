"""Weights that a file keeps as several tensors (codes, scales, zero points), as one.

A `Composed` stands where a `Stored` would: rows of one Format, made from the file's tensors when
they are asked for, so that pages of the file are read once and dropped. Where no bit is lost, a
Format is chosen that kernels read: symmetric codes of 4 and 8 bits whose scales fit float16 are
Q4_0 and Q8_0 with a scale repeated, codes of 4 bits with zero points Q4_Z, and powers of two with
E2M1 are MXFP4.
Invariant: values are those of the file's own formula, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ..core.dtype import DType, bfloat16, float16, float32
from ..core.errors import UserError
from ..core.format import MXFP4, NUMPY, Q4_0, Q4_Z, Q8_0, Format, format_of
from ..core.scaled import digits, packed_bits
from .mapped import Stored

Array = np.ndarray[Any, Any]
Fields = dict[str, Array]
SCALE_NAMES: dict[DType, str] = {float16: "F16", bfloat16: "BF16", float32: "F32"}


@dataclass(frozen=True)
class Rounded:
    """How the inputs of a product are rounded: a Format, with the scale that a file gives."""

    format: str
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class Composed:
    """Weights (..., rows, columns) made of several tensors of a file."""

    name: str
    shape: tuple[int, ...]
    format: Format
    sources: tuple[Stored, ...] = field(repr=False)
    make: Callable[[], Array] = field(repr=False)  # bytes (..., rows, bytes of a row)
    order: Array | None = field(default=None, repr=False)  # which column each stored one is
    input: Rounded | None = None

    @property
    def raw(self) -> Array:
        """Bytes (..., rows, bytes of a row), made anew at every call."""
        return self.make()

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return sum(source.bytes for source in self.sources)

    def array(self) -> Array:
        """Refused: there are no plain elements."""
        raise UserError(
            "a quantised tensor has no plain elements",
            op=self.name,
            expected="a plain format",
            got=self.format,
            hint=".values() gives float32",
        )

    def values(self) -> Array:
        """All values as float32, columns in the model's order: a copy, for checks."""
        found = self.format.to_float32(self.raw).reshape(self.shape)
        if self.order is None:
            return found
        result = np.empty_like(found)
        result[..., self.order] = found
        return result

    def drop(self) -> None:
        """Let the system take back the pages of its tensors."""
        for source in self.sources:
            source.drop()


def fail(path: str, what: str, why: str, expected: object = None, got: object = None) -> NoReturn:
    """Say what is wrong with which tensor or field of which folder."""
    text = None if got is None else str(got)[:200]
    raise UserError(f"{path}: {what}: {why}", op="quantised", expected=expected, got=text)


class Group:
    """The tensors of one layer in a folder, by what follows the layer's name; `written` says what
    the folder calls those that have another name there."""

    def __init__(
        self, path: str, name: str, parts: dict[str, Stored], written: Mapping[str, str] = {}
    ) -> None:
        self.path, self.name, self.parts, self.written = path, name, parts, written
        self.used: set[str] = set()

    def fail(self, what: str, why: str, expected: object = None, got: object = None) -> NoReturn:
        """Say what is wrong with one of them."""
        there = self.written.get(what, what)
        fail(self.path, f"tensor {self.name}.{there}"[:150], why, expected, got)

    def get(self, suffix: str, *dtypes: str) -> Stored | None:
        """One of them, of one of some dtypes, if it is there."""
        found = self.parts.get(suffix)
        if found is None:
            return None
        if dtypes and found.format.name not in dtypes:
            self.fail(suffix, "another dtype", " or ".join(dtypes), found.format.name)
        self.used.add(suffix)
        return found

    def take(self, suffix: str, *dtypes: str) -> Stored:
        """One of them that must be there."""
        found = self.get(suffix, *dtypes)
        if found is None:
            given = ", ".join(self.written.get(part, part) for part in self.parts)
            self.fail(suffix, "it is missing", "a tensor", given)
        return found

    def shaped(self, suffix: str, shape: Sequence[int], *dtypes: str) -> Stored:
        """One that must be there, of a shape."""
        found = self.take(suffix, *dtypes)
        if tuple(found.shape) != tuple(shape):
            self.fail(suffix, "another shape", list(shape), list(found.shape))
        return found

    def scales(self, suffix: str) -> tuple[Stored, str]:
        """Scales, and what their dtype is called in names of Formats."""
        found = self.take(suffix, "F16", "BF16", "F32")
        assert found.format.dtype is not None
        return found, SCALE_NAMES[found.format.dtype]

    def composed(
        self, shape: Sequence[int], form: str, make: Callable[[], Fields], **more: Any
    ) -> Composed:
        """The layer's weight from the Fields of a Format."""
        sources = tuple(self.parts[s] for s in self.used)
        natural = format_of(form)
        twin = _twin(natural, make, shape)
        rows = shape[-2]

        def raw() -> Array:
            fields = make()
            if twin is not None:
                return _TWINS[twin.name](natural, fields, rows)
            return rows_of(natural, fields, rows)

        return Composed(f"{self.name}.weight", tuple(shape), twin or natural, sources, raw, **more)


def rows_of(form: Format, fields: Fields, rows: int) -> Array:
    """Bytes of rows from arrays (rows, ...) of each Field; what has one row is for all."""
    parts = []
    for part in (*form.fields, *form.row):
        given = np.ascontiguousarray(fields[part.name])
        if given.dtype != part.dtype.numpy:
            given = given.view(part.dtype.numpy)
        flat = given.reshape(len(given), -1).view(np.uint8)
        parts.append(np.broadcast_to(flat, (rows, flat.shape[1])))
    if form.row:
        last = form.row[-1]
        parts.append(np.zeros((rows, form.row_bytes_more - last.offset - last.dtype.size), "u1"))
    return np.concatenate(parts, axis=1)


def bits_of(words: Array, bits: int, count: int) -> Array:
    """The first so many numbers of `bits` bits in rows of int32 words, the lowest bits first."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    left = -(-count * bits // 8) - raw.shape[1]
    assert left <= 0, (words.shape, bits, count)
    whole = raw[:, : left or None]
    more = -whole.shape[1] % bits if 8 % bits else 0  # eight numbers at a time
    return np.asarray(digits(NUMPY, np.pad(whole, ((0, 0), (0, more))), bits))[:, :count]


def to_bits(codes: Array, bits: int) -> Array:
    """Numbers (rows, n) of so many bits as bytes of rows."""
    return np.asarray(packed_bits(NUMPY, np.ascontiguousarray(codes, np.uint8), bits))


def order_of(group: Group, suffix: str, columns: int, size: int) -> Array | None:
    """The columns in the order of their groups, from the group of each; None: as they are."""
    found = group.get(suffix, "I32", "I64")
    if found is None:
        return None
    if tuple(found.shape) != (columns,):
        group.fail(suffix, "another shape", [columns], list(found.shape))
    index = found.array().astype(np.int64)
    if (index == np.arange(columns) // size).all() or (index == -1).all():
        return None
    count = columns // size
    if index.min() < 0 or index.max() >= count:
        group.fail(suffix, "a group is out of range", f"0 to {count - 1}", index[:8])
    if (np.bincount(index, minlength=count) != size).any():
        group.fail(suffix, "groups are not of one size", f"{size} columns in each", index[:8])
    return np.argsort(index, kind="stable")


# ---- formats that kernels read --------------------------------------------------------------


def _twin(form: Format, make: Callable[[], Fields], shape: Sequence[int]) -> Format | None:
    """The Format in blocks of 32 that holds the same values, if there is one."""
    group = form.grain.columns
    if form.element is None or form.sparse or form.row or group % 32:
        return None
    if form.name == "E2M1_G32_E8M0":
        return MXFP4
    found = {"INT4": Q4_0, "INT8": Q8_0}.get(form.element.name)
    if not form.symmetric:
        found = {"INT4": Q4_Z}.get(form.element.name)
    if found is None or form.grain.rows != 1:
        return None
    if form.name.split("_")[2] != "F16":
        given = make()["scale"].astype(np.float32)
        with np.errstate(over="ignore"):
            if (given.astype(np.float16).astype(np.float32) != given).any():
                return None
    return found


def _halves(fields: Fields, rows: int) -> Array:
    """Nibbles in pairs side by side (rows, columns / 2) as halves of 16, (rows, blocks, 16)."""
    codes = digits(NUMPY, fields["codes"].reshape(rows, -1), 4).reshape(rows, -1, 2, 16)
    return np.asarray(codes[:, :, 0] | (codes[:, :, 1] << np.uint8(4)))


def _each_32(form: Format, fields: Fields, name: str = "scale") -> Array:
    found = fields[name].astype(np.float16)
    return np.repeat(found.reshape(len(found), -1), form.grain.columns // 32, 1)[..., None]


def _joined(rows: int, *parts: Array) -> Array:
    """Blocks (rows, blocks, bytes) of several parts as rows."""
    wide = [p.reshape(rows, p.shape[1], -1).view(np.uint8) for p in parts]
    return np.concatenate(wide, axis=2).reshape(rows, -1)


def _q4_0(form: Format, fields: Fields, rows: int) -> Array:
    return _joined(rows, _each_32(form, fields), _halves(fields, rows))


def _q4_z(form: Format, fields: Fields, rows: int) -> Array:
    scale, zero = (_each_32(form, fields, name) for name in ("scale", "zero"))
    return _joined(rows, scale, zero, _halves(fields, rows))


def _q8_0(form: Format, fields: Fields, rows: int) -> Array:
    codes = np.ascontiguousarray(fields["codes"]).view(np.int8).reshape(rows, -1, 32)
    return _joined(rows, _each_32(form, fields), codes)


def _mxfp4(form: Format, fields: Fields, rows: int) -> Array:
    scale = np.ascontiguousarray(fields["scale"]).reshape(rows, -1, 1)
    return _joined(rows, scale, _halves(fields, rows))


_TWINS = {"Q4_0": _q4_0, "Q4_Z": _q4_z, "Q8_0": _q8_0, "MXFP4": _mxfp4}

__all__ = ["Composed", "Group", "Rounded", "bits_of", "fail", "order_of", "rows_of", "to_bits"]
