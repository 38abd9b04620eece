"""Write GGUF files: metadata with its kinds, and tensors in their Formats.

Invariant: a file is complete or not there (temporary file, then rename), and `read_gguf` gives
back what was written: same keys, kinds, values, shapes, Formats and bytes, in the same order.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from ..core.dtype import dtype_of
from ..core.errors import DTypeError, UserError
from ..core.format import format_of
from .gguf import ALIGNMENT, KINDS, MAGIC, NUMBERS, SCALARS, VERSIONS, Kind
from .mapped import Stored

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def kind_of(value: Any) -> Kind:
    """The metadata kind that holds a value: the narrowest usual one for Python's numbers."""
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, str):
        return "string"
    if isinstance(value, np.generic):
        return str(value.dtype)
    if isinstance(value, int):
        if value < 0:
            return "int32" if value >= -(1 << 31) else "int64"
        return "uint32" if value < 1 << 32 else "uint64"
    if isinstance(value, float):
        return "float32"
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype))
    if isinstance(value, list | tuple):
        kinds = [kind_of(item) for item in value]
        if kinds and isinstance(kinds[0], tuple):
            return ("array", kinds)
        for kind in ("float32", "int64", "int32", "uint64"):  # the widest of mixed numbers
            if kind in kinds and "string" not in kinds and "bool" not in kinds:
                return ("array", kind)
        return ("array", kinds[0] if kinds else "string")
    raise DTypeError(
        "metadata cannot hold this",
        op="gguf",
        expected="a number, a string or a list",
        got=type(value).__name__,
    )


def _string(text: str) -> bytes:
    data = text.encode()
    return U64.pack(len(data)) + data


def _scalar(kind: str, value: Any) -> bytes:
    try:
        if kind == "string":
            return _string(value)
        if isinstance(value, bool | np.bool_):
            value = int(value)
        return SCALARS[KINDS[kind]][1].pack(value)
    except (KeyError, AttributeError, struct.error, TypeError, OverflowError):
        raise DTypeError(
            "metadata cannot hold this", op="gguf", expected=kind, got=repr(value)[:100]
        ) from None


def _array(kind: Any, value: Any) -> bytes:
    if isinstance(kind, list):  # arrays within
        parts = [_array(inner[1], item) for inner, item in zip(kind, value, strict=True)]
        return U32.pack(KINDS["array"]) + U64.pack(len(parts)) + b"".join(parts)
    head = U32.pack(KINDS[kind]) + U64.pack(len(value))
    return head + b"".join(_scalar(kind, item) for item in value)


def _entry(key: str, value: Any, kind: Kind) -> bytes:
    head = _string(key)
    if isinstance(kind, tuple):
        return head + U32.pack(KINDS["array"]) + _array(kind[1], value)
    if kind not in KINDS:
        raise DTypeError(
            "metadata cannot hold this", op="gguf", expected=", ".join(KINDS), got=kind
        )
    return head + U32.pack(KINDS[kind]) + _scalar(kind, value)


def stored(name: str, value: Any, form: Any = None) -> Stored:
    """An array packed into a Format (its own plain one where none is named)."""
    if isinstance(value, Stored):
        return value
    array = np.asarray(value)
    found = format_of(form if form is not None else dtype_of(array.dtype))
    return Stored(name, array.shape, found, found.pack(array))


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    kinds: Mapping[str, Kind] | None = None,
    alignment: int = ALIGNMENT,
    version: int = 3,
) -> None:
    """Write a GGUF file of metadata and of Stored tensors or plain arrays."""
    if version not in VERSIONS or alignment < 1 or alignment & (alignment - 1):
        raise UserError(
            "cannot be written",
            op="gguf",
            expected="version 2 or 3, a power of two",
            got=f"version {version}, alignment {alignment}",
        )
    entries = dict(metadata)
    if alignment != ALIGNMENT:
        entries["general.alignment"] = alignment
    head = [MAGIC, U32.pack(version), U64.pack(len(tensors)), U64.pack(len(entries))]
    head += [
        _entry(key, value, (kinds or {}).get(key) or kind_of(value))
        for key, value in entries.items()
    ]
    offset, ready = 0, []
    for name, value in tensors.items():
        tensor = stored(name, value)
        if tensor.format.name not in NUMBERS or len(tensor.shape) > 4 or 0 in tensor.shape:
            raise DTypeError(
                "GGUF cannot hold this tensor",
                op=name,
                expected="at most 4 axes, none empty, of " + ", ".join(NUMBERS),
                got=f"{tensor.format}{list(tensor.shape)}",
            )
        head += [
            _string(name),
            U32.pack(len(tensor.shape)),
            *(U64.pack(size) for size in reversed(tensor.shape)),
            U32.pack(NUMBERS[tensor.format.name]),
            U64.pack(offset),
        ]
        offset += -(-tensor.raw.size // alignment) * alignment
        ready.append(tensor)
    _replace(os.fspath(path), b"".join(head), ready, alignment)


def _replace(path: str, head: bytes, tensors: list[Stored], alignment: int) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head)
            for tensor in tensors:
                _pad(file, alignment)
                file.write(np.ascontiguousarray(tensor.raw).data)
            _pad(file, alignment)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
