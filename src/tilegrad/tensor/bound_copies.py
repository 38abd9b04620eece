"""Small copies to and from fixed memory, which the host does not wait for on a GPU.

Invariant: what `write` was given may be changed when it returns; what a Pending gives is the value
at the time it was asked for, whatever runs after.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime.buffer import HOST, Buffer
from ..runtime.device import device as opened


class Pending:
    """Values that are on their way; `wait` gives them."""

    __slots__ = ("_dtype", "_landing", "_shape", "_value")

    def __init__(self, landing: Any, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self._landing, self._value, self._shape, self._dtype = landing, value, shape, dtype

    def wait(self) -> np.ndarray[Any, Any]:
        """The values, as soon as they are here."""
        if self._landing is not None:
            self._value, self._landing = self._landing.wait(), None
        return self._value.view(self._dtype).reshape(self._shape)


def write(device: str, pointer: int, array: np.ndarray[Any, Any]) -> None:
    """Copy a contiguous array to an address, before all that is run from now on."""
    if device == HOST:
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)
    else:
        opened(device).post(pointer, array)


def read_later(buffer: Buffer, shape: Sequence[Any], dtype: Any) -> Pending:
    """The values of a Buffer after all that was run so far."""
    shape, kind = tuple(shape), np.dtype(dtype.numpy)
    count = kind.itemsize
    for size in shape:
        count *= size
    if buffer.device != HOST:
        landing = opened(buffer.device).land(buffer.pointer, count)
        return Pending(landing, None, shape, kind)
    value = np.empty(count, np.uint8)
    ctypes.memmove(value.ctypes.data, buffer.pointer, count)
    return Pending(None, value, shape, kind)


__all__ = ["Pending", "read_later", "write"]
