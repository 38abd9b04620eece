"""Picking and placing by index along an axis: gather, scatter, masks and their kin.

Invariant: an index out of range is an error: now, where its value is known, else of the run that
reads it (on a GPU at the next read of any value); nothing outside of a Tensor is touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.node import Node
from ..ir.requirement import require
from ..ir.symbol import Size
from .index import index_node, mask_indices
from .maths import cast, pick
from .operands import number_for
from .tensor import Tensor, from_array, in_place, lift, method, node_of, wrap

REDUCTIONS = {
    "sum": "add",
    "add": "add",
    "prod": "multiply",
    "multiply": "multiply",
    "amax": "max",
    "amin": "min",
    "mean": "add",
}


def _all_axes(index: Node, axis: int) -> list[Node]:
    """Indices of every axis: the given one, and each element's own place on the others."""
    shape = index.shape
    return [index if i == axis else build.iota_along(shape, i) for i in range(len(shape))]


def _checked_index(x: Tensor, dim: int, index: Any, op: str) -> tuple[int, Node]:
    axis = build.axis_of(x.node, dim, op)
    found = lift(index)
    if found.ndim != x.ndim:
        raise ShapeError(
            "the index has another rank",
            op=op,
            expected=f"{x.ndim} axes",
            got=f"index of shape {build.show(found.shape)}",
        )
    return axis, index_node(found, x.shape[axis], axis, op)


def _fits(op: str, part: tuple[Size, ...], whole: tuple[Size, ...], but: int = -1) -> None:
    for axis, (a, b) in enumerate(zip(part, whole)):
        if axis != but:
            require(
                b - a,
                ShapeError,
                "the index is larger than the Tensor",
                op=op,
                expected="at most {whole} off the axis",
                got="{part}",
                whole=whole,
                part=part,
            )


@method()
def gather(x: Any, dim: int, index: Any) -> Tensor:
    """result[i][j] = x[index[i][j]][j] for dim 0, and so on for other axes."""
    tensor = lift(x)
    if not tensor.ndim:
        return gather(tensor.reshape(1), dim, lift(index).reshape(-1)).reshape(lift(index).shape)
    axis, indices = _checked_index(tensor, dim, index, "gather")
    _fits("gather", indices.shape, tensor.shape, axis)
    return wrap(build.gather(node_of(tensor), _all_axes(indices, axis), range(tensor.ndim)), tensor)


@method()
def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Tensor:
    """gather, with the other axes broadcast; without an axis on the flattened Tensor."""
    tensor, index = lift(x), lift(indices)
    if dim is None:
        return gather(tensor.reshape(-1), 0, index.reshape(-1))
    axis = build.axis_of(tensor.node, dim, "take_along_dim")
    ours, theirs = list(tensor.shape), list(index.shape)
    ours[axis] = theirs[axis] = 1
    shape = list(build.broadcast_shapes("take_along_dim", tuple(ours), tuple(theirs)))
    wide, tall = list(shape), list(shape)
    wide[axis], tall[axis] = tensor.shape[axis], index.shape[axis]
    return gather(tensor.expand(*wide), axis, index.expand(*tall))


@method()
def scatter(
    x: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> Tensor:
    """x with src (or one value) written where `gather` with the index would read."""
    source = value if src is None else src
    mode = "set" if reduce is None else _reduction(reduce, "scatter")
    return _scattered(lift(x), dim, index, source, mode, "scatter")


def _reduction(name: str, op: str) -> str:
    if name not in REDUCTIONS:
        raise UserError("unknown reduction", op=op, expected=", ".join(REDUCTIONS), got=repr(name))
    return REDUCTIONS[name]


def _scattered(x: Tensor, dim: int, index: Any, src: Any, mode: str, op: str) -> Tensor:
    if not x.ndim:
        line = lift(index).reshape(1)
        source = lift(src, x.dtype).reshape(1)
        return _scattered(x.reshape(1), dim, line, source, mode, op).reshape(())
    axis, indices = _checked_index(x, dim, index, op)
    _fits(op, indices.shape, x.shape, axis)
    source = lift(src, x.dtype)
    node = build.cast(node_of(source), x.dtype)
    if source.ndim:
        if source.ndim != x.ndim:
            raise ShapeError(
                "the source has another rank",
                op=op,
                expected=f"{x.ndim} axes",
                got=f"source of shape {build.show(source.shape)}",
            )
        _fits(op, indices.shape, source.shape)
        node = build.slice_(node, (0,) * x.ndim, indices.shape)
    node = build.broadcast_to(node, indices.shape, op)
    every = _all_axes(indices, axis)
    return wrap(build.update(node_of(x), node, every, range(x.ndim), mode), x, source)


@method()
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Tensor:
    """x with src added where `gather` with the index would read."""
    return _scattered(lift(x), dim, index, src, "add", "scatter_add")


@method()
def scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Tensor:
    """x with src joined in: 'sum', 'prod', 'mean', 'amax' or 'amin'; low precision in float32."""
    tensor = lift(x)
    if tensor.dtype.is_float and tensor.dtype.bits < 32:
        wide = cast(tensor, dtypes.float32)
        joined = scatter_reduce(wide, dim, index, src, reduce, include_self=include_self)
        return cast(joined, tensor.dtype)
    mode = _reduction(reduce, "scatter_reduce")
    start = tensor
    if not include_self:
        neutral = {
            "add": 0,
            "multiply": 1,
            "max": tensor.dtype.lowest,
            "min": tensor.dtype.highest,
        }[mode]
        start = _scattered(tensor, dim, index, neutral, "set", "scatter_reduce")
    result = _scattered(start, dim, index, src, mode, "scatter_reduce")
    if reduce != "mean":
        return result
    count = wrap(build.full(tensor.shape, int(include_self), dtypes.int64))
    count = _scattered(count, dim, index, 1, "add", "scatter_reduce").clamp(min=1)
    if result.dtype.is_float:
        return result / cast(count, result.dtype)
    return cast(result // count, result.dtype)


# ---- whole slices ---------------------------------------------------------------------------


def _line(x: Tensor, dim: int, index: Any, op: str) -> tuple[int, Node]:
    axis = build.axis_of(x.node, dim, op)
    indices = index_node(
        index if isinstance(index, Tensor) else np.asarray(index), x.shape[axis], axis, op
    )
    if len(indices.shape) > 1:
        raise ShapeError(
            "the index is not a line", op=op, expected="1 axis", got=build.show(indices.shape)
        )
    return axis, build.reshape(indices, (-1,))


@method()
def index_select(x: Any, dim: int, index: Any) -> Tensor:
    """Slices of an axis, by a line of indices."""
    tensor = lift(x)
    if not tensor.ndim:
        return index_select(tensor.reshape(1), dim, index).reshape(())
    axis, indices = _line(tensor, dim, index, "index_select")
    found = build.gather(node_of(tensor), [indices], [axis])
    return wrap(build.move_axis(found, 0, axis), tensor)


def _index_write(x: Any, dim: int, index: Any, source: Any, mode: str, op: str) -> Tensor:
    tensor = lift(x)
    value = lift(source, tensor.dtype)
    if not tensor.ndim:
        line = value.reshape(-1) if value.ndim else value
        return _index_write(tensor.reshape(1), dim, index, line, mode, op).reshape(())
    axis, indices = _line(tensor, dim, index, op)
    shape = (*tensor.shape[:axis], *indices.shape, *tensor.shape[axis + 1 :])
    if value.ndim and value.shape != shape:
        raise ShapeError(
            "the source does not fit",
            op=op,
            expected=build.show(shape),
            got=build.show(value.shape),
        )
    node = build.broadcast_to(build.cast(node_of(value), tensor.dtype), shape, op)
    node = build.move_axis(node, axis, 0)
    return wrap(build.update(node_of(tensor), node, [indices], [axis], mode), tensor, value)


@method()
def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Tensor:
    """x with slices added at indices of an axis."""
    tensor = lift(source, lift(x).dtype)
    scaled = tensor if alpha == 1 else tensor * number_for(alpha, tensor.dtype)
    return _index_write(x, dim, index, scaled, "add", "index_add")


@method()
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Tensor:
    """x with slices written at indices of an axis."""
    return _index_write(x, dim, index, source, "set", "index_copy")


@method()
def index_fill(x: Any, dim: int, index: Any, value: Any) -> Tensor:
    """x with one value at indices of an axis."""
    return _index_write(x, dim, index, value, "set", "index_fill")


@method()
def index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Tensor:
    """x with slices joined in at indices of an axis: 'prod', 'mean', 'amax' or 'amin'."""
    tensor, value = lift(x), lift(source)
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise UserError(
            "unknown reduction",
            op="index_reduce",
            expected="prod, mean, amax or amin",
            got=repr(reduce),
        )
    axis, indices = _line(tensor, dim, index, "index_reduce")
    shape = [1] * value.ndim
    shape[axis] = indices.shape[0]
    wide = wrap(build.reshape(indices, tuple(shape))).expand(*value.shape)
    return scatter_reduce(tensor, axis, wide, value, reduce, include_self=include_self)


@method()
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Tensor:
    """x with values written (or added) where x[indices] would read."""
    tensor = lift(x)
    value = lift(values, tensor.dtype)
    if tensor.dtype is not value.dtype:
        raise DTypeError(
            "the dtypes differ", op="index_put", expected=tensor.dtype, got=value.dtype
        )
    key = tuple(slice(None) if i is None else i for i in indices)
    if not accumulate:
        result = wrap(node_of(tensor), tensor)
        result[key] = value
        return result
    numbers = wrap(build.reshape(build.iota(tensor.numel()), tensor.shape))
    targets = numbers[key]
    flat = value.expand(*targets.shape).reshape(-1)
    return index_add(tensor.reshape(-1), 0, targets.reshape(-1), flat).reshape(tensor.shape)


@method()
def take(x: Any, index: Any) -> Tensor:
    """Elements of the flattened Tensor, in the index' shape."""
    return lift(x).reshape(-1)[lift(index)]


@method()
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Tensor:
    """x with elements of the flattened Tensor written or added."""
    tensor = lift(x)
    mode = "add" if accumulate else "set"
    flat, targets = tensor.reshape(-1), lift(index).reshape(-1)
    return _index_write(
        flat, 0, targets, lift(source, tensor.dtype).reshape(-1), mode, "put"
    ).reshape(tensor.shape)


# ---- masks ----------------------------------------------------------------------------------


@method()
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """x with one value where the mask holds."""
    tensor = lift(x)
    filler = lift(value, tensor.dtype)
    if filler.ndim:
        raise ShapeError(
            "the value is not one number",
            op="masked_fill",
            expected="a scalar",
            got=build.show(filler.shape),
        )
    return pick(lift(mask), cast(filler, tensor.dtype), tensor)


@method()
def masked_select(x: Any, mask: Any) -> Tensor:
    """The elements where the mask holds, in a line; reads the mask."""
    tensor, chosen = lift(x), lift(mask)
    shape = build.broadcast_shapes("masked_select", tensor.shape, chosen.shape) or (1,)
    indices = mask_indices(chosen.expand(*shape), "masked_select")
    return wrap(build.gather(node_of(tensor.expand(*shape)), indices, range(len(shape))), tensor)


@method()
def masked_scatter(x: Any, mask: Any, source: Any) -> Tensor:
    """x with the source's elements, in order, where the mask holds."""
    tensor, chosen, value = lift(x), lift(mask), lift(source)
    chosen = chosen.expand(*tensor.shape)
    flat = value.reshape(-1)
    order = (chosen.reshape(-1).cumsum(0) - 1).clamp(min=0, max=max(_length(flat) - 1, 0))
    found = wrap(build.gather(node_of(flat), [order.node], [0]), value)
    return pick(chosen, cast(found.reshape(tensor.shape), tensor.dtype), tensor)


def _length(line: Tensor) -> Any:
    return line.shape[0]


@method()
def nonzero(x: Any, *, as_tuple: bool = False) -> Any:
    """The indices of nonzero elements, (count, ndim) or one line per axis; reads x."""
    tensor = cast(lift(x), dtypes.bool_)
    if not tensor.ndim:
        if as_tuple:
            return nonzero(tensor.reshape(1), as_tuple=True)
        return wrap(from_array(np.zeros((int(bool(tensor)), 0), np.int64)))
    lines = [wrap(p) for p in mask_indices(tensor, "nonzero")]
    if as_tuple:
        return tuple(lines)
    table = np.stack([line.numpy() for line in lines], axis=1)
    return wrap(from_array(table))


argwhere = method("argwhere")(nonzero)
in_place(
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "index_reduce",
    "masked_fill",
    "masked_scatter",
    "put",
    "tril",
    "triu",
)
