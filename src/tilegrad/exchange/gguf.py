"""GGUF files (versions 2 and 3, little-endian): metadata and tensors, mapped, nothing trusted.

Layout: "GGUF", u32 version, u64 tensor count, u64 metadata count; then key, type, value of each
metadata entry; then name, number of axes, axes (fastest first), type, offset of each tensor; then,
aligned, the tensors' bytes. A string is u64 length and UTF-8; an array is type, u64 count, items.

Invariant: every count, length, offset and product is held against the bytes that are left before
anything is read or made by it; whatever the bytes are, reading ends in a `GgufFile` or in a
`UserError` that names the file and the field, with memory in proportion to the file.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ..core import dtype as dtypes
from ..core import format as formats
from ..core.errors import UserError
from ..core.format import Format
from .mapped import MappedFile, Stored, view

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z")
# Limits far above what models need; a file beyond them is broken or hostile.
METADATA, TENSORS, AXES = 1 << 16, 1 << 16, 4
KEY_BYTES, NAME_BYTES, STRING_BYTES = (1 << 16) - 1, 255, 64 << 20
ARRAYS, STRINGS, DEPTH, LARGEST_ALIGNMENT = 1 << 16, 1 << 22, 4, 1 << 20
LARGEST = (1 << 63) - 1

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, tuple[str, struct.Struct]] = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", struct.Struct("<I")),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    7: ("bool", struct.Struct("<B")),
    10: ("uint64", struct.Struct("<Q")),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}
KINDS: dict[str, int] = {name: number for number, (name, _) in SCALARS.items()} | {
    "string": STRING,
    "array": ARRAY,
}
Kind = str | tuple[str, Any]  # "uint32", "string", ("array", "string"), ("array", ("array", ...))

FORMATS: dict[int, Format] = {
    0: formats.F32,
    1: formats.F16,
    2: formats.Q4_0,
    3: formats.Q4_1,
    6: formats.Q5_0,
    7: formats.Q5_1,
    8: formats.Q8_0,
    10: formats.Q2_K,
    11: formats.Q3_K,
    12: formats.Q4_K,
    13: formats.Q5_K,
    14: formats.Q6_K,
    24: formats.PLAIN[dtypes.int8],
    25: formats.PLAIN[dtypes.int16],
    26: formats.PLAIN[dtypes.int32],
    27: formats.PLAIN[dtypes.int64],
    28: formats.PLAIN[dtypes.float64],
    30: formats.BF16,
    39: formats.MXFP4,
}
NUMBERS: dict[str, int] = {form.name: number for number, form in FORMATS.items()}
# Types with a name that are not read, for the error.
UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says: metadata by key (with its kinds) and tensors by name, in file order.

    Numbers and strings are Python's; an array of numbers is a NumPy array, of strings a list.
    """

    path: str
    version: int
    alignment: int
    metadata: dict[str, Any] = field(repr=False)
    kinds: dict[str, Kind] = field(repr=False)
    tensors: dict[str, Stored] = field(repr=False)
    file: MappedFile = field(repr=False)

    @property
    def architecture(self) -> str:
        """The model family the file names, such as "llama"."""
        return str(self.get("general.architecture", str))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value of a Python type (`list` for arrays); without a default it must be."""
        found = self.metadata.get(key, default)
        if found is None:
            raise UserError(f"{self.path}: metadata {key!r} is missing", op="gguf")
        also = {float: int, list: np.ndarray}.get(kind, kind)
        right = isinstance(found, kind | also) and (kind is bool or not isinstance(found, bool))
        if key in self.metadata and not right:
            raise UserError(
                f"{self.path}: metadata {key!r} is of another type",
                op="gguf",
                expected=kind.__name__,
                got=type(found).__name__,
            )
        return found


def read_gguf(path: str | os.PathLike[str] | MappedFile) -> GgufFile:
    """Map a GGUF file and check all of it that says where things are.

    A model in several files is read by the name of its first; the tensors of all are given.
    """
    file = path if isinstance(path, MappedFile) else MappedFile.open(path)
    first = _Reader(file).read()
    count = first.metadata.get("split.count", 0)
    alone = isinstance(count, int) and count in (0, 1)
    return first if alone else _with_parts(first, count)


def _with_parts(first: GgufFile, count: Any) -> GgufFile:
    """The first of several files with the tensors of the others."""
    named = PART.search(first.path)
    if not named or int(named[1]) != 1 or not isinstance(count, int) or int(named[2]) != count:
        raise UserError(
            f"{first.path}: it is one of several files of a model",
            op="gguf",
            expected="the first, named ...-00001-of-0000N.gguf",
            got=f"split.count {str(count)[:100]}",
        )
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        path = f"{first.path[: named.start()]}-{number:05d}-of-{count:05d}.gguf"
        part = _Reader(MappedFile.open(path)).read()
        twice = tensors.keys() & part.tensors.keys()
        place = part.metadata.get("split.no")
        if twice or place != number - 1:
            raise UserError(
                f"{path}: it does not belong to {first.path}",
                op="gguf",
                expected=f"split.no {number - 1} and tensors of its own",
                got=f"split.no {str(place)[:99]}, {sorted(twice)[:3]}",
            )
        tensors |= part.tensors
    return replace(first, tensors=tensors)


class _Reader:
    """A position in a file; every step is held against the bytes left."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.buffer = file.data.data
        self.size = file.size
        self.position = 0
        self.arrays = self.strings = 0

    def fail(
        self,
        what: str,
        why: str,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> NoReturn:
        """Say which field of which file is wrong."""
        text = None if got is None else str(got)
        raise UserError(
            f"{self.file.path}: {what}: {why}",
            op="gguf",
            expected=expected,
            got=text if text is None or len(text) <= 200 else text[:200] + "...",
            hint=hint,
        )

    def take(self, size: int, what: str) -> memoryview:
        """The next bytes."""
        left = self.size - self.position
        if size > left:
            self.fail(
                what,
                "the file is cut off",
                f"{size} bytes at {self.position}",
                f"{left} bytes left",
            )
        begin = self.position
        self.position += size
        return self.buffer[begin : begin + size]

    def scalar(self, number: int, what: str) -> Any:
        """One number of a metadata type."""
        form = SCALARS[number][1]
        (value,) = form.unpack(self.take(form.size, what))
        if number == BOOL:
            if value > 1:
                self.fail(what, "not a bool", "0 or 1", value)
            return bool(value)
        return value

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A count of things that take at least so many bytes each."""
        value = int(self.scalar(10, what))
        left = self.size - self.position
        if value > limit or value * least_bytes > left:
            self.fail(
                what, "too many for the file", f"at most {min(limit, left // least_bytes)}", value
            )
        return value

    def string(self, what: str, limit: int = STRING_BYTES) -> str:
        """A string of UTF-8."""
        length = int(self.scalar(10, f"length of {what}"))
        if length > limit:
            self.fail(what, "the string is too long", f"at most {limit} bytes", length)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            self.fail(what, "not UTF-8", got=f"byte {error.start}: {error.reason}")

    # ---- metadata -----------------------------------------------------------------------------

    def kind(self, what: str) -> int:
        """The number of a metadata type."""
        number = int(self.scalar(4, f"type of {what}"))
        if number not in SCALARS and number not in (STRING, ARRAY):
            self.fail(f"type of {what}", "unknown metadata type", "0 to 12", number)
        return number

    def value(self, number: int, what: str, depth: int = 0) -> tuple[Any, Kind]:
        """A metadata value and its kind."""
        if number == STRING:
            return self.string(what), "string"
        if number != ARRAY:
            return self.scalar(number, what), SCALARS[number][0]
        self.arrays += 1
        if depth >= DEPTH or self.arrays > ARRAYS:
            self.fail(
                what,
                "too many arrays within arrays",
                f"depth {DEPTH}, {ARRAYS} in all",
                f"depth {depth + 1}, {self.arrays} in all",
            )
        inner = self.kind(f"items of {what}")
        if inner == STRING:
            return self.string_array(what), ("array", "string")
        if inner == ARRAY:
            count = self.count(f"count of {what}", ARRAYS, 12)
            items = [self.value(ARRAY, f"{what}[{i}]", depth + 1) for i in range(count)]
            return [item for item, _ in items], ("array", [kind for _, kind in items])
        return self.number_array(inner, what), ("array", SCALARS[inner][0])

    def number_array(self, number: int, what: str) -> np.ndarray[Any, Any]:
        """An array of numbers."""
        name, form = SCALARS[number]
        count = self.count(f"count of {what}", LARGEST, form.size)
        plain = np.uint8 if number == BOOL else np.dtype(name).newbyteorder("<")
        found = np.frombuffer(self.take(count * form.size, what), plain).copy()
        if number == BOOL:
            if count and found.max() > 1:
                self.fail(what, "not a bool", "0 or 1", found.max())
            return found.view(np.bool_)
        return found.astype(np.dtype(name), copy=False)

    def string_array(self, what: str) -> list[str]:
        """An array of strings: a tight loop, since vocabularies have hundreds of thousands."""
        count = self.count(f"count of {what}", STRINGS, 8)
        self.strings += count
        if self.strings > STRINGS:
            self.fail(what, "too many strings", f"at most {STRINGS} in all", self.strings)
        found = self._short_strings(count)
        if found is not None:
            return found
        result: list[str] = []
        data, end, size, unpack = self.buffer, self.position, self.size, SCALARS[10][1].unpack_from
        i = 0
        try:
            for i in range(count):
                start = end + 8
                if start > size:
                    self.fail(
                        f"length of {what}[{i}]", "the file is cut off", "8 bytes", size - end
                    )
                length = unpack(data, end)[0]
                end = start + length
                if end > size or length > STRING_BYTES:
                    most = min(STRING_BYTES, size - start)
                    self.fail(f"{what}[{i}]", "the string does not fit", f"at most {most}", length)
                result.append(str(data[start:end], "utf-8"))
        except UnicodeDecodeError as error:
            self.fail(f"{what}[{i}]", "not UTF-8", got=f"byte {error.start}: {error.reason}")
        self.position = end
        return result

    def _short_strings(self, count: int) -> list[str] | None:
        """The next strings, found all at once: a length below 256 is a byte before seven zeros.

        None where there are longer strings, or such zeros in one, or what is wrong: then they are
        read one by one.
        """
        window, at = np.zeros(0, np.uint8), np.zeros(0, np.intp)
        for size in (16 * count, 64 * count):
            if len(at) < count and size >= 8:
                whole = self.buffer[self.position : self.position + size]
                window = np.frombuffer(whole, np.uint8)
                zero = window == 0
                pairs = zero[1:-1] & zero[2:]
                at = np.flatnonzero(pairs[:-5] & pairs[2:-3] & pairs[4:-1] & zero[7:])
        starts = at[:count] + 8
        ends = starts + window[at[:count]]
        if len(starts) < count or not count or starts[0] != 8 or ends[-1] > len(window):
            return None
        if np.any(starts[1:] != ends[:-1] + 8):
            return None
        kept = np.ones(ends[-1], np.bool_)  # one zero of each length, which then parts strings
        for i in range(7):
            kept[at[:count] + i] = False
        try:
            found = window[: ends[-1]][kept].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return None
        if len(found) != count:  # a string has a zero in it
            return None
        self.position += int(ends[-1])
        return found

    def read_metadata(self, count: int) -> tuple[dict[str, Any], dict[str, Kind]]:
        """All metadata."""
        metadata: dict[str, Any] = {}
        kinds: dict[str, Kind] = {}
        for i in range(count):
            key = self.string(f"key of metadata {i}", KEY_BYTES)
            what = f"metadata {key[:100]!r}"
            if not key or key in metadata:
                self.fail(what, "the key is empty or stands twice", "keys that differ", repr(key))
            metadata[key], kinds[key] = self.value(self.kind(what), what)
        return metadata, kinds

    # ---- tensors ------------------------------------------------------------------------------

    def read_tensor(self, i: int) -> tuple[str, tuple[int, ...], Format, int]:
        """Name, shape (fastest axis last), Format and offset of one tensor."""
        name = self.string(f"name of tensor {i}", NAME_BYTES)
        what = f"tensor {name!r}"
        axes = int(self.scalar(4, f"axes of {what}"))
        if axes > AXES:
            self.fail(what, "too many axes", f"at most {AXES}", axes)
        sizes = [int(self.scalar(10, f"axis {a} of {what}")) for a in range(axes)]
        product = 1
        for size in sizes:
            product *= size
        if not 0 < product <= LARGEST:
            self.fail(what, "the shape is empty or overflows", f"1 to {LARGEST} elements", sizes)
        number = int(self.scalar(4, f"type of {what}"))
        form = FORMATS.get(number)
        if form is None:
            self.fail(
                what,
                "its format is not read",
                ", ".join(NUMBERS),
                UNREAD.get(number, f"type {number}"),
                "take another quantisation of the model, such as Q4_K_M or Q8_0",
            )
        row = sizes[0] if sizes else 1
        if row % form.block:
            self.fail(
                what,
                "a row is not a whole number of blocks",
                f"a multiple of {form.block} for {form}",
                row,
            )
        return name, tuple(reversed(sizes)), form, int(self.scalar(10, f"offset of {what}"))

    def read_tensors(self, count: int, alignment: int) -> dict[str, Stored]:
        """All tensors, none outside of the file and no two in one place."""
        found: dict[str, tuple[tuple[int, ...], Format, int]] = {}
        for i in range(count):
            name, shape, form, offset = self.read_tensor(i)
            if not name or name in found:
                self.fail(
                    f"tensor {i}",
                    "the name is empty or stands twice",
                    "names that differ",
                    repr(name),
                )
            found[name] = shape, form, offset
        start = -(-self.position // alignment) * alignment
        for name, (shape, form, offset) in found.items():
            size, left = form.storage_bytes(shape), self.size - start
            if offset % alignment:
                self.fail(
                    f"tensor {name!r}",
                    "the offset is not aligned",
                    f"a multiple of {alignment}",
                    offset,
                )
            if offset > max(left, 0) or size > left - offset:
                self.fail(
                    f"tensor {name!r}",
                    "it lies outside of the file",
                    f"offset + size at most {left}",
                    f"{offset} + {size}",
                )
        self.refuse_overlaps(found)
        return {
            name: view(self.file, name, shape, form, start + offset)
            for name, (shape, form, offset) in found.items()
        }

    def refuse_overlaps(self, found: dict[str, tuple[tuple[int, ...], Format, int]]) -> None:
        """No byte belongs to two tensors."""
        spans = sorted(
            (offset, form.storage_bytes(shape), name)
            for name, (shape, form, offset) in found.items()
        )
        end, owner = 0, ""
        for offset, size, name in spans:
            if size and offset < end:
                self.fail(
                    f"tensor {name!r}", f"it overlaps {owner!r}", f"an offset from {end} on", offset
                )
            if size:
                end, owner = offset + size, name

    def read(self) -> GgufFile:
        """The whole file."""
        magic = bytes(self.take(4, "magic"))
        if magic != MAGIC:
            self.fail("magic", "not a GGUF file", MAGIC, magic)
        version = int(self.scalar(4, "version"))
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "the file is big-endian" if swapped in VERSIONS else None
            self.fail("version", "this version is not read", "2 or 3", version, hint)
        tensors = self.count("tensor count", TENSORS, 24)
        entries = self.count("metadata count", METADATA, 13)
        metadata, kinds = self.read_metadata(entries)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        right = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not right or not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
            self.fail(
                "metadata 'general.alignment'",
                "not an alignment",
                f"a power of two up to {LARGEST_ALIGNMENT}",
                alignment,
            )
        stored = self.read_tensors(tensors, alignment)
        return GgufFile(self.file.path, version, alignment, metadata, kinds, stored, self.file)
