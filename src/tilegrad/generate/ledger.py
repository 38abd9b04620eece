"""Small arrays on a device that the host writes together: one Buffer, one copy.

Each array is a Tensor over its own part of the Buffer, so steps read it where it is; the host has
the same bytes in `host`, changes those, and `send` copies what may have changed in one go.
Invariant: after `send` the device's arrays are those of `host`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.dtype import DType
from ..runtime.device import zeroed
from ..tensor.bound_copies import write as copy_to
from ..tensor.realize import from_buffer
from ..tensor.tensor import Tensor, wrap

ALIGNMENT = 256  # of parts, in bytes: as any device's kernels expect
Array = np.ndarray[Any, Any]


class Ledger:
    """Arrays by name, in the order in which they lie."""

    def __init__(self, parts: Mapping[str, tuple[tuple[int, ...], DType]], device: str) -> None:
        self.device, self._at, size = device, {}, 0
        for name, (shape, dtype) in parts.items():
            self._at[name] = (size, shape, dtype)
            bytes = int(np.prod(shape)) * dtype.size
            size += -(-bytes // ALIGNMENT) * ALIGNMENT
        self._row = {n: math.prod(s[1:]) * dtype.size for n, (_, s, dtype) in self._at.items()}
        self._bytes = np.zeros(size, np.uint8)
        self._buffer = zeroed(size, device, "ledger")
        self.host: dict[str, Array] = {
            name: np.ndarray(shape, dtype.numpy, self._bytes.data, at)
            for name, (at, shape, dtype) in self._at.items()
        }

    def tensor(self, name: str, size: int | None = None) -> Tensor:
        """The Tensor of an array, or of its first `size` rows."""
        at, shape, dtype = self._at[name]
        shape = shape if size is None else (size, *shape[1:])
        part = self._buffer.part(at, int(np.prod(shape)) * dtype.size)
        return wrap(from_buffer(part, shape, dtype))

    def send(self, last: str | None = None, size: int | None = None) -> None:
        """Copy all arrays to the device, or those up to the first `size` rows of one."""
        end = len(self._bytes)
        if last is not None:
            at, shape, _ = self._at[last]
            end = at + (shape[0] if size is None else size) * self._row[last]
        put(self.device, self._buffer.pointer, self._bytes[:end])


def put(device: str, pointer: int, array: Array) -> None:
    """Copy an array to an address, before all steps from now on: every write of a step is one."""
    copy_to(device, pointer, array)


def write(target: Tensor, first: int, values: Array) -> None:
    """Put rows into a Tensor from row `first` on, in place."""
    array = np.ascontiguousarray(values, target.dtype.numpy)
    buffer, row = target.buffer(), array[0].nbytes
    put(buffer.device, buffer.part(first * row, array.nbytes).pointer, array)


__all__ = ["Ledger", "put", "write"]
