"""Weights in a Format that no kernel of a Target reads: they go to its Device as they are stored.

`AsStored` stands in a Graph where a `Preparation` of kernels would, and gives each Field of all
blocks as an array of its own; ordinary ops unpack them there. So what runs never reads a file, and
on a GPU weights are as small as in the file. Invariant: bytes are copied, and none is changed.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import numpy as np

from ..core.dtype import DType, uint8
from ..core.errors import ShapeError
from ..core.format import Format, format_of
from ..graph import build, ops
from ..graph.unpack import unpacked, values_of
from ..ir.callee import Callee
from ..ir.node import Node
from ..ir.text import ATTRIBUTE_PARSERS
from ..ir.types import Array, Type
from ..kernels.quantised.prepare import rows_of

NdArray = np.ndarray[Any, Any]
KIND = "as stored"


class AsStored(Callee):
    """The Fields of some rows of a Format."""

    text_name = "as_stored"
    once = True
    step = 1

    def __init__(self, form: str, rows: int, columns: int) -> None:
        self.form, self.rows, self.columns = form, (rows,), columns

    @property
    def name(self) -> str:
        """The name, for people."""
        return f"stored_{self.form}"

    @cached_property
    def key(self) -> str:
        """Everything that decides what is made."""
        return self.to_text()

    @property
    def format(self) -> Format:
        """How rows are stored."""
        return format_of(self.form)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.format.row_bytes(self.columns)

    def alone(self, member: int) -> AsStored:
        """There is one weight."""
        return self

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """Each Field of all blocks where a Format has them apart, else the bytes."""
        form, (rows,) = self.format, self.rows
        if not form.apart:
            return [("raw", (rows, self.row_bytes), uint8)]
        blocks = self.columns // form.block
        return [
            (part.name, (rows, 1 if part in form.row else blocks, part.count), part.dtype)
            for part in (*form.fields, *form.row)
        ]

    def pack(self, raw: NdArray) -> dict[str, NdArray]:
        """The parts of some rows of bytes."""
        found = self.format.split(raw) if self.format.apart else {"raw": raw}
        return {name: np.ascontiguousarray(x) for name, x in found.items()}

    def result_types(self, argument_types: tuple[Type, ...]) -> tuple[Type, ...]:
        """The types of the parts."""
        wanted = [(self.rows[0], self.row_bytes)]
        got = [rows_of(t) for t in argument_types if isinstance(t, Array)]
        if got != wanted:
            raise ShapeError("these are other weights", op=self.name, expected=wanted, got=got)
        return tuple(Array(shape, dtype) for _, shape, dtype in self.parts())

    def to_text(self) -> str:
        """The facts as JSON."""
        return json.dumps([KIND, self.form, self.rows[0], self.columns])

    def interpret(self, *arrays: Any) -> tuple[Any, ...]:
        """The parts."""
        made = self.pack(np.asarray(arrays[0]).reshape(-1, self.row_bytes))
        return tuple(made[name] for name, _, _ in self.parts())


def parse_as_stored(text: str) -> AsStored:
    """The AsStored that `to_text` wrote."""
    _, form, rows, columns = json.loads(text)
    return AsStored(form, rows, columns)


ATTRIBUTE_PARSERS["as_stored"] = parse_as_stored


def unpacked_there(node: Node) -> Node:
    """An `unpack` of an input by ordinary ops, of parts that are prepared."""
    form = format_of(node.attrs["format"])
    (raw,) = node.inputs
    fields = stored_fields(form, raw, node.shape[-1])
    if not form.apart:
        return build.reshape(unpacked(ops.unpack(fields["raw"], **node.attrs)), node.shape)
    return values_of(form, fields, node.shape, node.dtype)


def stored_fields(form: Format, raw: Node, columns: int) -> dict[str, Node]:
    """The parts of rows of bytes, as they are prepared."""
    assert isinstance(raw.type, Array)
    callee = AsStored(form.name, rows_of(raw.type)[0], columns)
    call = ops.call(raw, callee=callee)
    items = build.items(call) if len(callee.parts()) > 1 else [call]
    return {name: item for (name, _, _), item in zip(callee.parts(), items)}


__all__ = ["KIND", "AsStored", "parse_as_stored", "stored_fields", "unpacked_there"]
