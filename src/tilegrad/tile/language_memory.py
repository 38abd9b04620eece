"""The words of the tile language that touch memory: load, store, atomic_add, places.

Where an access goes is a Window, a part of an array, or a tile of offsets of its elements; `inside`
judges both. Invariant: what lies beyond the end of an array is neither read nor written, and every
access of a result is noted for `writes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import dtype_of
from ..core.errors import AxisError, DTypeError, ShapeError, TraceError, UserError, user_location
from ..ir.node import Node
from ..ir.symbol import Size
from ..ir.types import Shape
from . import ops, placed
from .arithmetic import aligned, broadcast, broadcast_shape, join_edges
from .inside import lines_of, offsets_within, within
from .language import do, mask_of, masked, static, static_shape
from .trace import Rows, tracer
from .value import (
    ABOVE,
    Edges,
    MemoryValue,
    TileValue,
    Window,
    cast,
    index_of,
    named,
    size_of,
    tile_of,
)


def _sizes(index: Sequence[Any]) -> list[Size]:
    return [size_of(i, "index") for i in index]


def window(source: Any, index: Any, shape: Any, axes: Sequence[int] | None) -> Window:
    """The Window that load, store and copies mean."""
    if isinstance(source, Window):
        if index is not None:
            raise UserError("an index on top of subscripts", got=repr(index))
        return source
    if not isinstance(source, MemoryValue):
        raise DTypeError(
            "not an array", expected="an argument, a result or a place", got=repr(source)
        )
    start = (0,) * source.ndim if index is None else index
    start = start if isinstance(start, (tuple, list)) else (start,)
    if len(start) != source.ndim:
        raise ShapeError(
            f"{len(start)} indices for {source.name}",
            expected=f"{source.ndim}, one for each axis of {source.node.type}",
            got=len(start),
        )
    sizes = static_shape(() if shape is None else shape)
    along = tuple(range(source.ndim - len(sizes), source.ndim)) if axes is None else tuple(axes)
    if len(along) != len(sizes) or any(not 0 <= a < source.ndim for a in along):
        raise AxisError("axes do not fit the tile", expected=f"{len(sizes)} axes", got=along)
    shifted = tuple(a + len(source.lead) for a in along)
    return Window(source, (*source.lead, *_sizes(start)), sizes, shifted)


def _rows_window(memory: MemoryValue, rows: Any, cols: Any) -> Window:
    """Whole or partial rows of an array, at this program's block or at a loop's."""
    t = tracer()
    own = t.implied_rows()
    chosen = rows if isinstance(rows, Rows) else Rows(own.start, static(rows, "rows"))
    if memory.ndim < 2:
        return Window(memory, (chosen.start,), (chosen.count,), (0,))
    *lead, _, columns = memory.type.shape
    width = static(index_of(columns) if cols is None else cols, "cols")
    if len(lead) > len(t.lead):
        raise ShapeError(
            f"{memory.name} has more leading axes than the first argument",
            expected=t.inputs[0].node.type,
            got=memory.node.type,
        )
    first = t.lead[len(t.lead) - len(lead) :]
    grid_sizes = (t.grid or ())[len(t.lead) - len(lead) : len(t.lead)]
    for size, wanted in zip(lead, grid_sizes):
        if size != wanted and size != 1:
            raise ShapeError(
                f"the leading axes of {memory.name} differ from the grid's",
                expected=wanted,
                got=size,
            )
    index = [0 if size == 1 else i for i, size in zip(first, lead)]
    rank = memory.ndim
    return Window(memory, (*index, chosen.start, 0), (chosen.count, width), (rank - 2, rank - 1))


def _offsets(source: Any, index: Any) -> TileValue | None:
    """Linear offsets of elements, where an index is a tile of them (or a part of an array)."""
    if isinstance(index, Window) and index.shape:
        index = load(index)
    if isinstance(source, MemoryValue) and isinstance(index, TileValue) and index.shape:
        if not index.dtype.is_integer:
            raise DTypeError("offsets are not integers", got=index.dtype)
        return index
    return None


def _place(source: Any, index: Any, shape: Any, axes: Sequence[int] | None) -> Window | TileValue:
    """Where load and store go: a part of an array, or the offsets of elements."""
    offsets = _offsets(source, index)
    if offsets is None:
        return window(source, index, shape, axes)
    lines = lines_of(tracer(), offsets.node)
    if lines is None or lines.factors != (1,) or source.ndim != 1:
        return offsets
    return Window(source, (lines.base,), offsets.shape, (0,))  # they follow one another


def load(
    source: Any,
    index: Any = None,
    shape: Any = None,
    *,
    axes: Sequence[int] | None = None,
    mask: Any = None,
    other: Any = None,
    rows: Any = None,
    cols: Any = None,
    vector: int | None = None,
    prefetch: int | None = None,
) -> TileValue:
    """A tile of an array: `x[i, 0:64]`, an index and a shape, linear offsets, or rows and cols.

    Beyond the end of the array the tile has no elements (see `fill`); where a mask is false it
    holds `other` (0), and nothing is read. `vector` and `prefetch` are hints, which no machine
    needs: each chooses by itself.
    """
    t = tracer()
    rows = index if isinstance(index, Rows) else rows
    place = _place(source, index, shape, axes) if rows is None else _rows_window(source, rows, cols)
    whole, cut = _whole_mask(mask, place.shape, place.edges)
    if isinstance(place, Window):
        at, whole = within("load", place, whole, cut)
        node = t.builder.load(place.memory.node, at, place.shape, place.axes, whole)
        t.touch("load", place.memory, place, mask=whole, cut=cut)
    else:
        offsets, whole, known = offsets_within("load", source, place.node, whole)
        node = t.builder.gather(source.node, offsets, whole)
        t.touch("load", source, **known)
    return masked(TileValue(node, place.edges, (True,) * len(place.shape)), whole, other)


def _whole_mask(mask: Any, shape: Shape, edges: Edges) -> tuple[Node | None, bool]:
    """Which elements of a tile exist and are asked for, and whether the kernel gave a mask."""
    if mask is None or mask is True:
        return mask_of(shape, edges), False
    test = tile_of(mask, dtypes.bool_ if isinstance(mask, bool) else None)
    if test.shape or not tracer().trusts:  # else one answer for all elements
        test = broadcast(test, broadcast_shape([test.shape, shape]))
    return tracer().builder.logical_and(mask_of(shape, edges), test.node), True


def store(
    target: Any,
    *given: Any,
    mask: Any = None,
    axes: Sequence[int] | None = None,
    unique: bool = False,
) -> None:
    """Write a tile: store(out[i, 0:64], x), store(out, index, x) or store(out, offsets, x).

    What lies beyond the end of the array, or where the mask is false, is not written; offsets that
    follow one another are such a part too, others must be inside. No two programs may write one
    element; where only the data makes it so, `unique` promises it.
    """
    if len(given) not in (1, 2):
        raise UserError(
            "wrong number of arguments",
            expected="store(array[...], tile) or store(array, index, tile)",
            got=1 + len(given),
        )
    index, value = (None, given[0]) if len(given) == 1 else given
    memory = target.memory if isinstance(target, Window) else target
    if isinstance(memory, MemoryValue) and not memory.writable:
        raise TraceError(
            f"the argument {memory.name} is only read",
            hint="write to an array made by tile.result(...)",
        )
    if not isinstance(memory, MemoryValue):
        raise DTypeError("not an array", got=repr(target))
    tile = cast(value, memory.dtype)
    _put(memory, _place(target, index, tile.shape, axes), tile, mask, unique)


def _put(
    memory: MemoryValue,
    place: Window | TileValue,
    tile: TileValue,
    mask: Any = None,
    unique: bool = False,
) -> None:
    """Write a tile to a part of an array, or to its elements at offsets."""
    t = tracer()
    if isinstance(place, Window):
        tile = broadcast(tile, place.shape)
        edges = join_edges([tile, TileValue(tile.node, place.edges)])
        whole, cut = _whole_mask(mask, tile.shape, edges)
        at, whole = within("store", place, whole, cut)
        t.builder.store(memory.node, tile.node, at, place.axes, whole)
        cut |= edges != place.edges
        t.touch("store", memory, place, cut=cut, mask=whole, unique=unique)
    else:
        tile, place = aligned([tile, place])
        edges = join_edges([tile, place])
        whole, _ = _whole_mask(mask, tile.shape, edges)
        offsets, whole, known = offsets_within("store", memory, place.node, whole)
        t.builder.scatter(memory.node, tile.node, offsets, whole)
        t.touch("store", memory, **known, unique=unique)


def returned(value: Any) -> None:
    """Tiles that a kernel returns become results: blocks of rows of the first array."""
    t = tracer()
    for item in () if value is None else value if isinstance(value, tuple) else (value,):
        found = tile_of(item)
        rows = t.implied_rows()
        if not found.shape or found.shape[0] != rows.count or found.ndim > 2:
            raise ShapeError(
                "a returned tile is not a block of rows",
                expected=f"shape ({rows.count},) or ({rows.count}, columns)",
                got=repr(found),
                hint="declare other results with tile.result and write them with tile.store",
            )
        *lead, count, _ = t.inputs[0].type.shape
        wide = [e.limit if e else s for s, e in zip(found.shape, found.edges)]  # elements
        out = t.add_result([*lead, count, *wide[1:]], found.dtype)
        tail = (0,) * (found.ndim - 1)
        axes = tuple(range(out.ndim - found.ndim, out.ndim))
        _put(out, Window(out, (*t.lead, rows.start, *tail), found.shape, axes), found)


def atomic_add(memory: Any, index: Any, value: Any, mask: Any = None) -> TileValue:
    """Add to elements in one step each, as seen by all programs; gives the values before.

    `index` is a tile of linear offsets, or one integer for each axis.
    """
    if not isinstance(memory, MemoryValue) or not memory.writable:
        raise TraceError(
            "not an array the kernel writes",
            got=repr(memory),
            hint="tile.result(shape, dtype, fill=0)",
        )
    if memory.dtype.bits < 32 or memory.dtype.kind == "bool":
        raise DTypeError(
            "no atomic op on this dtype",
            expected="floats and integers of 32 or 64 bits",
            got=memory.dtype,
        )
    b = tracer().builder
    offsets, box = _offsets(memory, index), None
    if offsets is None:
        box = window(memory, index, (), None)
        strides = memory.type.element_strides()
        offsets = TileValue(b.index(sum(i * stride for i, stride in zip(box.index, strides))))
    tile = broadcast(cast(value, memory.dtype), offsets.shape)
    edges = join_edges([tile, offsets])
    whole, cut = _whole_mask(mask, offsets.shape, edges)
    wide_offsets = b.cast(offsets.node, dtypes.int64)
    if box is None:
        wide_offsets, whole, known = offsets_within("atomic_add", memory, wide_offsets, whole)
    else:
        _, whole = within("atomic_add", box, whole, cut)
        known = {"at": box, "mask": whole, "cut": cut}
    masks = [] if whole is None else [whole]
    node = do(placed.atomic_add, memory.node, tile.node, wide_offsets, *masks)
    tracer().touch("add", memory, **known)
    return TileValue(node, edges)


def require(condition: Any, message: str) -> None:
    """End the run in an index error at this line unless all elements of a bool tile hold.

    The program itself goes on: what must not happen needs a mask as well.
    """
    test = tile_of(condition)
    b = tracer().builder
    b.require(
        test.node, f"tile.require: {message}", user_location(), mask_of(test.shape, test.edges)
    )


def prefetch(memory: Any, index: Sequence[Any], to: str = "l1") -> None:
    """Bring the line at an index of an array into a cache."""
    do(ops.prefetch, memory.node, *_sizes(index), to=to)


def scratch(shape: Any, dtype: Any = dtypes.float32, scope: str = "l2") -> MemoryValue:
    """A place of the program's own in a cache, not initialised."""
    node = tracer().builder.allocate(static_shape(shape), dtype_of(dtype), scope)
    return MemoryValue("scratch", node, True)


def matrix_load(memory: Any, index: Sequence[Any], shape: Any, unit: str) -> TileValue:
    """A tile in the registers of a CPU's matrix unit."""
    sizes = static_shape(shape)
    return TileValue(do(ops.matrix_load, memory.node, *_sizes(index), shape=sizes, unit=unit))


def matrix_zero(shape: Any, dtype: Any, unit: str) -> TileValue:
    """A tile of a matrix unit, all 0."""
    sizes = static_shape(shape)
    return TileValue(do(ops.matrix_zero, shape=sizes, dtype=dtype_of(dtype), unit=unit))


def matrix_dot(total: TileValue, a: TileValue, b: TileValue, unit: str) -> TileValue:
    """total + a @ b, on a matrix unit."""
    return TileValue(do(ops.matrix_dot, total.node, a.node, b.node, unit=unit))


def matrix_store(memory: Any, index: Sequence[Any], value: TileValue, unit: str) -> None:
    """Write a tile of a matrix unit."""
    do(ops.matrix_store, memory.node, value.node, *_sizes(index), unit=unit)


def shared(shape: Any, dtype: Any = dtypes.float32, layout: str = "") -> MemoryValue:
    """A place that all of a program shares, not initialised: read and written as an array is."""
    node = tracer().builder.allocate(static_shape(shape), dtype_of(dtype), "shared", layout)
    return MemoryValue("shared", node, True)


ABOVE.update(
    load=named("tile.load", load),  # of a Window that is given as a value
    store=store,
)
