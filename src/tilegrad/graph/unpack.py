"""`unpack` and `pack` in smaller ops: the bytes of a Format taken apart, and made, by any machine.

A Format's own unpacking (core/format.py) and packing (core/scaled.py) are written over array
operations passed in; here they are Graph ops. Invariant: values are those of `Format.unpack`, bit
for bit, and bytes those of `Format.pack`, as far as a machine divides as NumPy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import DType, float32, uint8, uint16, uint32
from ..core.errors import InternalError
from ..core.format import Field, Format, format_of
from ..ir.node import Node
from . import build, ops


class GraphOperations:
    """The Operations of `core.format` over Nodes."""

    def shape(self, x: Node) -> tuple[Any, ...]:
        """The sizes of an array."""
        return x.shape

    def constant(self, value: int | float, dtype: DType) -> Node:
        """A scalar."""
        return build.constant(value, dtype)

    def iota(self, size: int, dtype: DType) -> Node:
        """0 .. size-1."""
        return build.iota(size, dtype)

    def cast(self, x: Node, dtype: DType) -> Node:
        """The values in another dtype."""
        return build.cast(x, dtype)

    def bitcast(self, x: Node, dtype: DType) -> Node:
        """The same bits as another dtype of that size."""
        return ops.bitcast(x, dtype=dtype)

    def reshape(self, x: Node, shape: tuple[Any, ...]) -> Node:
        """Another shape, row-major order kept."""
        return build.reshape(x, shape)

    def reduce(self, name: str, x: Node, axis: int) -> Node:
        """Over one axis, which stays with size 1."""
        return build.reduce(ops.graph.ops[name], x, axis % len(x.shape), True)

    def concatenate(self, xs: Sequence[Node]) -> Node:
        """Along the last axis."""
        return build.concatenate(list(xs), len(xs[0].shape) - 1)

    def expand(self, x: Node, shape: tuple[Any, ...]) -> Node:
        """Repeated to a shape."""
        return build.broadcast_to(x, shape)

    def apply(self, name: str, *inputs: Node) -> Node:
        """An elementwise op by name; operands are broadcast."""
        shape = build.broadcast_shapes(name, *(x.shape for x in inputs))
        return ops.graph.ops[name](*(build.broadcast_to(x, shape) for x in inputs))


GRAPH = GraphOperations()
WORDS = {2: uint16, 4: uint32}  # by bytes


def field_of(blocks: Node, part: Field, offset: int) -> Node:
    """A Field (..., count) of blocks of bytes (..., block bytes), at an offset of them."""
    axis, size = len(blocks.shape) - 1, part.dtype.size
    found = build.slice_axis(blocks, axis, offset, offset + part.count * size)
    if size == 1:
        return found if part.dtype is uint8 else ops.bitcast(found, dtype=part.dtype)
    word = WORDS.get(size)
    if word is None:
        raise InternalError("graph.unpack", f"a field of {part.dtype}")
    pieces = build.reshape(found, (*blocks.shape[:-1], part.count, size))
    whole: Node | None = None
    for place in range(size):  # little end first
        byte = build.slice_axis(pieces, axis + 1, place, place + 1)
        byte = build.cast(build.reshape(byte, (*blocks.shape[:-1], part.count)), word)
        if place:
            byte = GRAPH.apply("shift_left", byte, build.constant(8 * place, word))
        whole = byte if whole is None else ops.bit_or(whole, byte)
    assert whole is not None
    return ops.bitcast(whole, dtype=part.dtype)


def unpacked(node: Node) -> Node:
    """An `unpack` in smaller ops."""
    form: Format = format_of(node.attrs["format"])
    (raw,) = node.inputs
    return values_of(form, fields_of(form, raw), node.shape, node.dtype)


def fields_of(form: Format, raw: Node) -> dict[str, Node]:
    """The Fields (..., blocks, count) of rows of bytes."""
    lead, axis = raw.shape[:-1], len(raw.shape) - 1
    count = form.elements(raw.shape[-1]) // form.block
    if not form.apart:
        blocks = build.reshape(raw, (*lead, count, form.block_bytes))
        return {part.name: field_of(blocks, part, part.offset) for part in form.fields}
    found = {}
    for part, start, step in form.field_starts(count):
        size, times = part.count * part.dtype.size, count if step else 1
        plane = build.slice_axis(raw, axis, start, start + times * size)
        found[part.name] = field_of(build.reshape(plane, (*lead, times, size)), part, 0)
    return found


def values_of(form: Format, fields: dict[str, Node], shape: tuple[Any, ...], dtype: DType) -> Node:
    """The values of Fields, in a dtype."""
    values = form.unpack(GRAPH, fields)  # (..., blocks, elements of a block)
    return build.cast(build.reshape(values, shape), dtype)


def packed(node: Node) -> Node:
    """A `pack` in smaller ops."""
    from ..core.scaled import packed as pack

    made: Node = pack(
        format_of(node.attrs["format"]), GRAPH, *(build.cast(i, float32) for i in node.inputs)
    )
    return made


def encoded(node: Node) -> dict[str, Node]:
    """The Fields (..., groups, count) of what a `pack` packs, before they are joined to bytes."""
    from ..core.scaled import encoded as encode

    given = (build.cast(i, float32) for i in node.inputs)
    found: dict[str, Node] = encode(format_of(node.attrs["format"]), GRAPH, *given)
    return found


__all__ = ["encoded", "fields_of", "packed", "unpacked", "values_of"]
