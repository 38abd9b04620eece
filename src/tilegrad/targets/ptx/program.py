"""What a launch of an emitted entry needs to know, as plain data.

Invariant: `Entry.from_text(entry.to_text()) == entry`, so it can be stored beside the machine
code and bound in another process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...core.dtype import DType, dtype_of
from ...core.errors import InternalError
from ...ir.literal import read_size, size_text
from ...ir.symbol import Size
from ...ir.types import Shape


@dataclass(frozen=True)
class TensorMap:
    """A tensor map that the driver encodes for one pointer: sizes and strides outermost first.

    `parameter` numbers the Body's Memory parameter; `strides` are in elements, the last is 1;
    `box` is what one copy moves; `swizzle` is 0, 32, 64 or 128 bytes.
    """

    parameter: int
    dtype: DType
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: Shape
    swizzle: int = 0


@dataclass(frozen=True)
class Entry:
    """One entry point: its arguments in order, and how it is launched.

    Each argument is ('pointer', number of the Memory parameter), ('symbol', name of a Symbol, as
    an s64) or ('map', TensorMap, a 128-byte grid constant). `grid` holds one to three sizes, x
    first; `cluster` likewise. `dependent` says that the entry waits for its dependency itself
    (griddepcontrol), so it may be launched programmatically dependent.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...]
    grid: tuple[Size, ...]
    threads: int
    shared_bytes: int = 0
    cluster: Shape = ()
    dependent: bool = False

    def to_text(self) -> str:
        """The Entry as JSON."""
        arguments = [_written(*a) for a in self.arguments]
        grid = [size_text(s) for s in self.grid]
        return json.dumps({**vars(self), "arguments": arguments, "grid": grid})

    @staticmethod
    def from_text(text: str) -> Entry:
        """The Entry that `to_text` wrote."""
        record = json.loads(text)
        record["arguments"] = tuple(_read(*a) for a in record["arguments"])
        record["grid"] = tuple(read_size(s) for s in record["grid"])
        record["cluster"] = tuple(record["cluster"])
        return Entry(**record)


SIZED = ("sizes", "strides")  # of a TensorMap


def _written(kind: str, value: Any) -> list[Any]:
    """An argument as JSON."""
    if kind in ("pointer", "symbol"):
        return [kind, value]
    if kind != "map":
        raise InternalError("ptx program", f"unknown kind of argument {kind!r}")
    sizes = {name: [size_text(s) for s in getattr(value, name)] for name in SIZED}
    return [kind, {**vars(value), "dtype": value.dtype.name, **sizes}]


def _read(kind: str, value: Any) -> tuple[str, Any]:
    if kind != "map":
        return kind, value
    sizes = {name: tuple(read_size(s) for s in value[name]) for name in SIZED}
    given = {**value, **sizes, "dtype": dtype_of(value["dtype"]), "box": tuple(value["box"])}
    return kind, TensorMap(**given)
