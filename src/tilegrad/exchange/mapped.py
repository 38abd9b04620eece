"""Files mapped into memory, and the tensors stored in them.

Invariant: a `Stored` tensor's bytes lie within its file, whose size was checked when it was
mapped; nothing is copied until somebody asks for values. A file that others cut short while it is
mapped is beyond what a reader can guard against.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..core.format import Format

Array = np.ndarray[Any, Any]
PAGE = mmap.PAGESIZE


class MappedFile:
    """The bytes of a file, read where they are looked at."""

    def __init__(self, path: str, data: Array, mapping: mmap.mmap | None = None) -> None:
        self.path = path
        self.data = data
        self.mapping = mapping

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> MappedFile:
        """Map a file."""
        name = os.fspath(path)
        try:
            with open(name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not size:
                    return cls(name, np.zeros(0, np.uint8))
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read the file: {why}", op="open", got=name) from None
        return cls(name, np.frombuffer(mapping, np.uint8), mapping)

    @classmethod
    def of(cls, data: bytes, path: str = "<bytes>") -> MappedFile:
        """Bytes that are in memory already, as if they were a file."""
        return cls(path, np.frombuffer(data, np.uint8))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    def drop(self, offset: int, size: int) -> None:
        """Let the system take back the whole pages of a range; later reads bring them again."""
        begin, end = -(-offset // PAGE) * PAGE, (offset + size) // PAGE * PAGE
        if self.mapping is not None and end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def expect(self, offset: int, size: int) -> None:
        """Tell the system that a range is read soon."""
        begin, end = offset // PAGE * PAGE, min(offset + size, self.size)
        if self.mapping is not None and end > begin and hasattr(mmap, "MADV_WILLNEED"):
            self.mapping.madvise(mmap.MADV_WILLNEED, begin, end - begin)


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file: shape (last axis fastest), Format and raw bytes.

    `raw` is uint8 of shape (*shape[:-1], bytes of a row), a view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    raw: Array = field(repr=False)
    file: MappedFile | None = field(default=None, repr=False)
    offset: int = 0

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.raw.size

    @property
    def order(self) -> None:
        """The order of columns: as they are."""
        return None

    @property
    def input(self) -> None:
        """How inputs are rounded: not at all."""
        return None

    def array(self) -> Array:
        """The elements of a plain Format, as a view where alignment lets it be one."""
        if self.format.dtype is None:
            raise UserError(
                "a quantised tensor has no plain elements",
                op=self.name,
                expected="a plain format",
                got=self.format,
                hint=".values() gives float32",
            )
        raw = self.raw
        if raw.size and raw.ctypes.data % self.format.dtype.size:
            raw = raw.copy()
        return raw.view(self.format.dtype.numpy).reshape(self.shape)

    def values(self) -> Array:
        """All values as float32: a copy, for checks and small tensors."""
        return self.format.to_float32(self.raw).reshape(self.shape)

    def drop(self) -> None:
        """Let the system take back this tensor's pages."""
        if self.file is not None:
            self.file.drop(self.offset, self.raw.size)


def view(file: MappedFile, name: str, shape: Sequence[int], form: Format, offset: int) -> Stored:
    """The tensor at a byte offset; the range must have been checked."""
    size = form.storage_bytes(shape)
    raw = file.data[offset : offset + size].reshape(form.storage_shape(shape))
    return Stored(name, tuple(shape), form, raw, file, offset)
