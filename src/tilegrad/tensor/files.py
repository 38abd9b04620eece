"""Tensors on disk: safetensors files, written whole and read without copies.

A dict of Tensors is a plain safetensors file. Any other nest of dicts, lists, tuples, Tensors and
plain values keeps its Tensors under dotted names, and how it is nested as JSON in the metadata.
Invariant: a file at a path is complete or not there (temporary file, then rename); reading maps
the file and trusts nothing in its header: every offset is checked before it is used. No code is
ever read from a file.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, UserError
from .tensor import Tensor, from_array, lift, realize, wrap

NAMES: dict[str, DType] = {
    "BOOL": dtypes.bool_,
    "U8": dtypes.uint8,
    "I8": dtypes.int8,
    "U16": dtypes.uint16,
    "I16": dtypes.int16,
    "U32": dtypes.uint32,
    "I32": dtypes.int32,
    "U64": dtypes.uint64,
    "I64": dtypes.int64,
    "F8_E5M2": dtypes.float8_e5m2,
    "F8_E4M3": dtypes.float8_e4m3,
    "F16": dtypes.float16,
    "BF16": dtypes.bfloat16,
    "F32": dtypes.float32,
    "F64": dtypes.float64,
}
BY_DTYPE = {dtype: name for name, dtype in NAMES.items()}
METADATA, NESTING = "__metadata__", "tilegrad.nesting"
Place = str | os.PathLike[str] | IO[bytes]


# ---- writing ---------------------------------------------------------------------------------


def save(value: Any, path: Place, metadata: Mapping[str, str] | None = None) -> None:
    """Write a nest of Tensors as a safetensors file, at a path or into a binary file object.

    The nest has dicts, lists, tuples, Tensors, arrays, numbers, strings and None; `load` gives it
    back, arrays as Tensors.
    """
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str) or key == NESTING:
            raise DTypeError(
                "metadata is text",
                op="save",
                expected="a dict of str by str",
                got=f"{key!r}: {text!r}",
            )
    found: dict[str, Any] = {}
    described = dict(metadata or {})
    if _is_plain(value):
        found = dict(value)
    else:
        described[NESTING] = json.dumps(_describe(value, "", found, []), separators=(",", ":"))
    tensors = {name: lift(x) for name, x in found.items()}
    realize(list(tensors.values()))
    header: dict[str, Any] = {METADATA: described} if described else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in BY_DTYPE:
            raise DTypeError(
                f"{name!r} cannot be saved",
                op="save",
                got=tensor.dtype.name,
                expected="a dtype that safetensors files have",
            )
        end = offset + tensor.dtype.size * tensor.numel()
        header[name] = {
            "dtype": BY_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    if isinstance(path, (str, os.PathLike)):
        try:
            _replace(os.fspath(path), written, list(tensors.values()))
        except OSError as error:
            words = f"cannot write the file: {error.strerror}"
            raise UserError(words, op="save", got=os.fspath(path)) from None
    else:
        _write(_binary(path, "save"), written, list(tensors.values()))


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, np.generic)) or hasattr(value, "__dlpack__")


def _is_plain(value: Any) -> bool:
    """Whether a value is what a safetensors file holds by itself: named arrays."""
    return isinstance(value, Mapping) and all(
        isinstance(k, str) and k != METADATA and _is_array(v) for k, v in value.items()
    )


def _describe(value: Any, path: str, found: dict[str, Any], above: list[Any]) -> Any:
    """A nest as JSON, its arrays put into `found` by name: plain values stand for themselves, a
    list for a list, and a table with one entry for all else."""
    if _is_array(value):
        name = path or "value"
        while name in found or name == METADATA:
            name += "~"
        found[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if any(value is outer for outer in above):
        raise UserError("a container contains itself", op="save", got=_at(path))
    above = [*above, value]
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_key(k, path), _describe(v, _below(path, k), found, above)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [_describe(v, _below(path, i), found, above) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise DTypeError(
        f"{_at(path)} cannot be saved",
        op="save",
        got=type(value).__name__,
        expected="dicts, lists, tuples, Tensors, arrays, numbers, strings and None",
        hint="save its state_dict()" if hasattr(value, "state_dict") else None,
    )


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _at(path: str) -> str:
    return repr(path) if path else "the value"


def _key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, (bool, int, str)):
        return key
    raise DTypeError(
        "a key cannot be saved",
        op="save",
        expected="str, int, bool or None",
        got=f"{key!r} in {_at(path)}",
    )


def _replace(path: str, header: bytes, tensors: list[Tensor]) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, header, tensors)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _write(file: Any, header: bytes, tensors: list[Tensor]) -> None:
    file.write(struct.pack("<Q", len(header)))
    file.write(header)
    for tensor in tensors:
        file.write(
            np.ascontiguousarray(tensor.numpy()).view(np.uint8).data
            if tensor.ndim
            else tensor.numpy().tobytes()
        )


def _binary(file: Any, op: str) -> Any:
    if isinstance(file, io.TextIOBase) or not hasattr(file, "write" if op == "save" else "read"):
        raise DTypeError(
            "not a place for Tensors",
            op=op,
            got=type(file).__name__,
            expected="a path, or a file opened in binary mode",
        )
    return file


# ---- reading ---------------------------------------------------------------------------------


def load(path: Place) -> Any:
    """What was saved: a dict of named Tensors, or the nest of them. A file at a path is mapped.

    Of a file object just the bytes of one `save` are read, so several may follow each other.
    """
    header, data, where = _open(path)
    result = {}
    for name, facts in header.items():
        if name != METADATA:
            part = _part(data, name, facts, where)
            result[name] = wrap(from_array(part, adapts=False))
    nesting = _metadata(header, where).get(NESTING)
    if nesting is None:
        return result
    try:
        return _nest(json.loads(nesting), result)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _bad(where, "its nesting is not understood") from None


def load_metadata(path: Place) -> dict[str, str]:
    """The metadata of a safetensors file."""
    header, _, where = _open(path)
    return {k: v for k, v in _metadata(header, where).items() if k != NESTING}


def _metadata(header: dict[str, Any], where: str) -> dict[str, str]:
    found = header.get(METADATA) or {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise _bad(where, "the metadata is not text by name")
    return found


def _nest(described: Any, tensors: dict[str, Tensor]) -> Any:
    """What `_describe` described."""
    if isinstance(described, list):
        return [_nest(item, tensors) for item in described]
    if not isinstance(described, dict):
        return described
    ((kind, inside),) = described.items()
    if kind == "dict":
        return {key: _nest(item, tensors) for key, item in inside}
    if kind == "tuple":
        return tuple([_nest(item, tensors) for item in inside])
    return tensors[inside] if kind == "tensor" else float(inside)


def _bad(path: str, why: str) -> UserError:
    return UserError(
        f"not a safetensors file: {why}", op="load", expected="a safetensors file", got=path
    )


def _open(path: Place) -> tuple[dict[str, Any], np.ndarray[Any, Any], str]:
    """The header, the bytes behind it, and how the file is called."""
    if not isinstance(path, (str, os.PathLike)):
        file, where = _binary(path, "load"), str(getattr(path, "name", type(path).__name__))
        size = _read(file, 8)
        length = int.from_bytes(size, "little")
        header = _header(size, _read(file, length), length, where)
        return header, np.frombuffer(_read(file, _end(header, where)), np.uint8), where
    where = os.fspath(path)
    try:
        total = os.path.getsize(where)
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", op="load", got=where) from None
    data = np.memmap(where, np.uint8, "r") if total else np.zeros(0, np.uint8)
    size = data[:8].tobytes()
    length = int.from_bytes(size, "little")
    header = _header(size, data[8 : 8 + length].tobytes(), length, where)
    return header, data[8 + length :], where


def _read(file: Any, count: int) -> bytes:
    """Up to `count` bytes, in pieces: a count that a file claims may be any number."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, 1 << 26))):
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _header(size: bytes, text: bytes, length: int, where: str) -> dict[str, Any]:
    if len(size) < 8:
        raise _bad(where, "shorter than its header")
    if len(text) < length:
        raise _bad(where, "the header is cut off")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _bad(where, "the header is not JSON") from None
    if not isinstance(header, dict):
        raise _bad(where, "the header is not a table")
    return header


def _end(header: dict[str, Any], where: str) -> int:
    """Where the last of the Tensors ends."""
    try:
        return max(
            [int(f["data_offsets"][1]) for n, f in header.items() if n != METADATA], default=0
        )
    except (KeyError, IndexError, TypeError, ValueError):
        raise _bad(where, "an entry is not understood") from None


def _part(data: np.ndarray[Any, Any], name: str, facts: Any, path: str) -> np.ndarray[Any, Any]:
    try:
        dtype, shape = NAMES[facts["dtype"]], tuple(int(s) for s in facts["shape"])
        start, end = (int(v) for v in facts["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise _bad(path, f"entry {name!r} is not understood") from None
    right = 0 <= start <= end <= len(data) and end - start == math.prod(shape) * dtype.size
    if not right or any(s < 0 for s in shape):
        raise _bad(path, f"entry {name!r} lies outside of the file")
    part = np.asarray(data[start:end])
    if start % dtype.size or part.ctypes.data % dtype.size:
        part = part.copy()
    return part.view(dtype.numpy).reshape(shape)
