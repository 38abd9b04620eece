"""Arithmetic on the values of a kernel: promotion, broadcasting, edges, elementwise ops.

Invariant: floats narrower than 32 bits are computed in float32 and rounded once an op; where
operands have no element, the result has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import DType, promote, promote_scalar
from ..core.errors import ShapeError
from ..ir.symbol import minimum
from ..ir.types import Shape
from . import numeric
from .value import (
    ABOVE,
    Edge,
    Edges,
    Index,
    TileValue,
    cast,
    current,
    number,
    tile_of,
)


def common_dtype(values: Sequence[Any]) -> DType:
    """The dtype that operands promote to."""
    known = [v.dtype for v in values if isinstance(v, TileValue)]
    dtype = reduce(promote, known) if known else None
    for v in values:
        if number(v):
            plain = 0 if isinstance(v, Index) else v
            own = dtypes.float32 if isinstance(v, float) else dtypes.int64
            dtype = own if dtype is None else promote_scalar(dtype, plain)
    return dtypes.float32 if dtype is None else dtype


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape that shapes broadcast to, or an error that names them."""
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    result = []
    for sizes in zip(*padded):
        live = {s for s in sizes if s != 1}
        if len(live) > 1:
            raise ShapeError(
                "the shapes of tiles do not fit",
                expected="equal sizes, or 1",
                got=" and ".join(map(str, shapes)),
            )
        result.append(live.pop() if live else 1)
    return tuple(result)


def broadcast(x: TileValue, shape: Shape) -> TileValue:
    """x repeated to a shape; edges of axes that are repeated vanish."""
    if x.shape == shape:
        return x
    pad = len(shape) - len(x.shape)
    edges = tuple(
        None if i < pad or x.shape[i - pad] == 1 else x.edges[i - pad] for i in range(len(shape))
    )
    zero = (False,) * pad + x.zero
    return TileValue(current().builder.broadcast(x.node, shape), edges, zero)


def aligned(tiles: Sequence[TileValue]) -> list[TileValue]:
    """Tiles repeated to the shape that they have in common."""
    shape = broadcast_shape([t.shape for t in tiles])
    return [broadcast(t, shape) for t in tiles]


def join_edges(values: Sequence[TileValue]) -> Edges:
    """The edges of an elementwise result: an element is one where all operands have one."""
    result: list[Edge | None] = []
    for axis in range(len(values[0].shape)):
        found = [edge for v in values if (edge := v.edges[axis]) is not None]
        starts = {edge.start for edge in found}
        if len(starts) > 1:
            raise ShapeError(
                f"partial tiles that end in different places along axis {axis}",
                hint="give one of them values first: tile.fill(x, 0)",
            )
        limits = [edge.limit for edge in found]
        result.append(Edge(starts.pop(), reduce(minimum, limits)) if found else None)
    return tuple(result)


FLOAT_RESULT = {"divide", *numeric.OF_FLOATS}


def elementwise(name: str, *values: Any) -> Any:
    """An elementwise op on tiles, indices and numbers: promoted, broadcast, floats in float32."""
    values = tuple([v if number(v) else tile_of(v) for v in values])
    if name == "power" and values[1].__class__ is int and 1 <= values[1] <= 4:
        return _small_power(values[0], values[1])
    dtype = common_dtype(values)
    if name in FLOAT_RESULT and not dtype.is_float:
        dtype = dtypes.float32
    b = current().builder
    tiles = aligned([cast(v, dtype) for v in values])
    node = b.apply(name, *(b.cast(t.node, dtype.wide) for t in tiles))
    if node.dtype is dtype.wide:
        node = b.cast(node, dtype)
    return TileValue(node, join_edges(tiles))


def _small_power(x: Any, count: int) -> Any:
    """x * x * ...: exact for integers, and cheaper than a power."""
    square = elementwise("multiply", x, x) if count > 1 else x
    if count == 4:
        return elementwise("multiply", square, square)
    return elementwise("multiply", square, x) if count == 3 else square


ABOVE["elementwise"] = elementwise
