"""Tensors on disk: safetensors files, written whole and read without copies.

Invariant: a file is complete or not there (temporary file, then rename); reading maps the file
and trusts nothing in its header: every offset is checked before it is used.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, UserError
from .tensor import Tensor, from_array, lift, realize, wrap

NAMES: dict[str, DType] = {
    "BOOL": dtypes.bool_, "U8": dtypes.uint8, "I8": dtypes.int8, "U16": dtypes.uint16,
    "I16": dtypes.int16, "U32": dtypes.uint32, "I32": dtypes.int32, "U64": dtypes.uint64,
    "I64": dtypes.int64, "F8_E5M2": dtypes.float8_e5m2, "F8_E4M3": dtypes.float8_e4m3,
    "F16": dtypes.float16, "BF16": dtypes.bfloat16, "F32": dtypes.float32,
    "F64": dtypes.float64,
}  # fmt: skip
BY_DTYPE = {dtype: name for name, dtype in NAMES.items()}


def save(tensors: Mapping[str, Any], path: str | os.PathLike[str],
         metadata: Mapping[str, str] | None = None) -> None:  # fmt: skip
    """Write named Tensors as a safetensors file."""
    if not isinstance(tensors, Mapping):
        raise DTypeError("needs names", op="save", expected="a dict of Tensors",
                         got=type(tensors).__name__, hint="save({'x': x}, path)")  # fmt: skip
    found = {str(name): lift(value) for name, value in tensors.items()}
    realize(list(found.values()))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in found.items():
        end = offset + tensor.dtype.size * int(tensor.numel())  # type: ignore[call-overload]
        header[name] = {"dtype": BY_DTYPE[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, end]}  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write(os.fspath(path), text, list(found.values()))


def _write(path: str, header: bytes, tensors: list[Tensor]) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(struct.pack("<Q", len(header)))
            file.write(header)
            for tensor in tensors:
                file.write(np.ascontiguousarray(tensor.numpy()).view(np.uint8).data
                           if tensor.ndim else tensor.numpy().tobytes())  # fmt: skip
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The named Tensors of a safetensors file, mapped into memory."""
    header, data = _open(os.fspath(path))
    result = {}
    for name, facts in header.items():
        if name != "__metadata__":
            part = _part(data, name, facts, os.fspath(path))
            result[name] = wrap(from_array(part, adapts=False))
    return result


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file."""
    return dict(_open(os.fspath(path))[0].get("__metadata__", {}))


def _bad(path: str, why: str) -> UserError:
    return UserError(f"not a safetensors file: {why}", op="load", expected="a safetensors file",
                     got=path)  # fmt: skip


def _open(path: str) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", op="load", got=path) from None
    if size < 8:
        raise _bad(path, "shorter than its header")
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > size - 8:
        raise _bad(path, "the header is cut off")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError:
        raise _bad(path, "the header is not JSON") from None
    if not isinstance(header, dict):
        raise _bad(path, "the header is not a table")
    return header, data[8 + length :]


def _part(data: np.ndarray[Any, Any], name: str, facts: Any, path: str) -> np.ndarray[Any, Any]:
    try:
        dtype, shape = NAMES[facts["dtype"]], tuple(int(s) for s in facts["shape"])
        start, end = (int(v) for v in facts["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise _bad(path, f"entry {name!r} is not understood") from None
    count = int(np.prod(shape, dtype=np.int64))
    right = 0 <= start <= end <= len(data) and end - start == count * dtype.size
    if not right or any(s < 0 for s in shape):
        raise _bad(path, f"entry {name!r} lies outside of the file")
    part = np.asarray(data[start:end])
    if start % dtype.size or part.ctypes.data % dtype.size:
        part = part.copy()
    return part.view(dtype.numpy).reshape(shape)
