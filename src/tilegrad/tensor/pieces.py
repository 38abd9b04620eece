"""Pieces of Tensors by PyTorch's other names: cut apart, written back, looked at with strides.

Invariant: as in `movement` there are no views. `as_strided` gives the elements that PyTorch's view
of a Tensor in row-major order has, and refuses what would need one element twice in writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from ..core import dtype as dtypes
from ..core.errors import AxisError, ShapeError, UserError
from ..graph import build
from ..ir.symbol import Size, high
from ..ir.whole import is_one, whole, wholes
from .maths import cast
from .movement import _at_least, cat, expand, narrow, reshape, tensor_split, unsqueeze
from .tensor import Tensor, lift, method, node_of, wrap

# ---- rank -----------------------------------------------------------------------------------


def _each(rank: int, tensors: tuple[Any, ...]) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    elif len(tensors) == 1:
        return _at_least(tensors[0], rank)
    return tuple(_at_least(x, rank) for x in tensors)


@overload
def atleast_1d(x: Tensor, /) -> Tensor: ...
@overload
def atleast_1d(*tensors: Any) -> tuple[Tensor, ...]: ...
def atleast_1d(*tensors: Any) -> Any:
    """Each Tensor with one axis or more."""
    return _each(1, tensors)


@overload
def atleast_2d(x: Tensor, /) -> Tensor: ...
@overload
def atleast_2d(*tensors: Any) -> tuple[Tensor, ...]: ...
def atleast_2d(*tensors: Any) -> Any:
    """Each Tensor with two axes or more."""
    return _each(2, tensors)


@overload
def atleast_3d(x: Tensor, /) -> Tensor: ...
@overload
def atleast_3d(*tensors: Any) -> tuple[Tensor, ...]: ...
def atleast_3d(*tensors: Any) -> Any:
    """Each Tensor with three axes or more; a matrix gets its new axis at the end."""
    return _each(3, tensors)


def column_stack(tensors: Sequence[Any]) -> Tensor:
    """Joined along axis 1; lines become columns."""
    found = [lift(x) for x in tensors]
    return cat([reshape(x, -1, 1) if x.ndim < 2 else x for x in found], 1)


# ---- cutting --------------------------------------------------------------------------------


def _split_along(op: str, x: Any, where: Any, axis: int, least: int) -> tuple[Tensor, ...]:
    tensor = lift(x)
    if tensor.ndim < least:
        raise AxisError("too few axes", op=op, expected=f"at least {least}", got=tensor.ndim)
    size = tensor.shape[axis]
    where = whole(where, op, "a count") if is_one(where) else where
    if isinstance(where, int) and isinstance(size, int) and (where < 1 or size % where):
        raise ShapeError(
            "the axis does not divide",
            op=op,
            expected=f"a divisor of {size}",
            got=where,
            hint="tensor_split takes any number of pieces",
        )
    return tensor_split(tensor, where, axis)


@method()
def hsplit(x: Any, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Cut along axis 1, or axis 0 where there is no other."""
    axis = 1 if lift(x).ndim > 1 else 0
    return _split_along("hsplit", x, indices_or_sections, axis, 1)


@method()
def vsplit(x: Any, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Cut along axis 0."""
    return _split_along("vsplit", x, indices_or_sections, 0, 2)


@method()
def dsplit(x: Any, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Cut along axis 2."""
    return _split_along("dsplit", x, indices_or_sections, 2, 3)


@method()
def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbours along an axis, n times."""
    tensor = lift(x)
    if not tensor.ndim:
        raise AxisError("needs an axis", op="diff", expected="at least 1", got=0)
    axis = build.axis_of(tensor.node, dim, "diff")
    around = [lift(p) for p in (prepend, tensor, append) if p is not None]
    tensor = cat(around, axis) if len(around) > 1 else tensor
    for _ in range(whole(n, "diff", "n")):
        size = tensor.shape[axis]
        if isinstance(size, int) and size == 0:
            break
        after, before = narrow(tensor, axis, 1, size - 1), narrow(tensor, axis, 0, size - 1)
        tensor = after ^ before if tensor.dtype.kind == "bool" else after - before
    return tensor


@method()
def sum_to_size(self: Tensor, *size: Any) -> Tensor:
    """The sum down to a shape that would broadcast to this one."""
    from .movement import sizes_of

    shape = sizes_of("sum_to_size", size)
    extra = self.ndim - len(shape)
    fits = extra >= 0 and all(s in (1, own) for s, own in zip(shape, self.shape[extra:]))
    if not fits:
        raise ShapeError(
            "the shape does not broadcast to this one",
            op="sum_to_size",
            expected=build.show(self.shape),
            got=build.show(shape),
        )
    axes = [extra + i for i, s in enumerate(shape) if s != self.shape[extra + i]]
    summed = extra or axes or not shape
    return reshape(self.sum(tuple(range(extra)) + tuple(axes)) if summed else self, shape)


# ---- strides --------------------------------------------------------------------------------


@method()
def stride(self: Tensor, dim: int | None = None) -> Any:
    """How many elements apart neighbours of each axis lie: Tensors are in row-major order."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(self.shape):
        strides.insert(0, step)
        step = step * (size if not isinstance(size, int) else max(size, 1))
    return tuple(strides) if dim is None else strides[build.axis_of(self.node, dim, "stride")]


@method()
def as_strided(
    x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
) -> Tensor:
    """Elements at `storage_offset + sum(index * stride)` of the Tensor in row-major order."""
    tensor = lift(x)
    size, stride = wholes(size, "as_strided", "a size"), wholes(stride, "as_strided", "a stride")
    storage_offset = whole(storage_offset, "as_strided", "the offset")
    if len(size) != len(stride) or any(s < 0 for s in (*size, *stride, storage_offset)):
        raise ShapeError(
            "bad sizes or strides",
            op="as_strided",
            got=(size, stride),
            expected="as many strides as sizes, none negative",
        )
    last = storage_offset + sum((s - 1) * t for s, t in zip(size, stride)) if 0 not in size else 0
    if isinstance(tensor.numel(), int) and last >= high(tensor.numel()) and 0 not in size:
        raise AxisError(
            "reaches past the Tensor",
            op="as_strided",
            got=f"element {last}",
            expected=f"at most element {high(tensor.numel()) - 1}",
        )
    place = wrap(build.full(tuple(size), storage_offset, dtypes.int64))
    for axis, step in enumerate(stride):
        place = place + wrap(build.iota_along(tuple(size), axis)) * step
    return reshape(tensor, -1)[place]


# ---- written back ---------------------------------------------------------------------------


@method()
def slice_scatter(
    x: Any,
    source: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """x with the source in the place of x[start:end:step] of an axis."""
    tensor, value = lift(x), lift(source)
    axis = build.axis_of(tensor.node, dim, "slice_scatter")
    ends = wholes((start, end, step), "slice_scatter", "a place", none=True)
    key = (slice(None),) * axis + (slice(*ends),)
    return _written(tensor, key, value, tensor[key].shape, "slice_scatter")


@method()
def select_scatter(x: Any, source: Any, dim: int, index: int) -> Tensor:
    """x with the source in the place of one slice of an axis."""
    tensor, value = lift(x), lift(source)
    key = (slice(None),) * build.axis_of(tensor.node, dim, "select_scatter")
    key += (whole(index, "select_scatter", "the index"),)
    return _written(tensor, key, value, tensor[key].shape, "select_scatter")


def _written(x: Tensor, key: Any, source: Tensor, shape: Any, op: str) -> Tensor:
    if source.shape != shape:
        raise ShapeError(
            "the source does not fit",
            op=op,
            expected=build.show(shape),
            got=build.show(source.shape),
        )
    copy = wrap(node_of(x), x)
    copy[key] = source
    return copy


@method()
def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """x with the source in the place of a diagonal."""
    tensor, value = lift(x), lift(source)
    first = build.axis_of(tensor.node, dim1, "diagonal_scatter")
    second = build.axis_of(tensor.node, dim2, "diagonal_scatter")
    offset = whole(offset, "diagonal_scatter", "the offset")
    shape = tensor.diagonal(offset, first, second).shape
    if value.shape != shape:
        raise ShapeError(
            "the source does not fit",
            op="diagonal_scatter",
            expected=build.show(shape),
            got=build.show(value.shape),
        )
    moved = tensor.movedim((first, second), (-2, -1))
    rows = wrap(build.iota(shape[-1])) + max(-offset, 0)
    columns = wrap(build.iota(shape[-1])) + max(offset, 0)
    written = _written(moved, (..., rows, columns), value, shape, "diagonal_scatter")
    return written.movedim((-2, -1), (first, second))


@method()
def fill_diagonal(x: Any, value: Any, wrap: bool = False) -> Tensor:
    """x with one value on its main diagonal (all axes of one index)."""
    tensor = lift(x)
    if wrap:
        raise UserError(
            "the diagonal of a tall matrix is not wrapped",
            op="fill_diagonal",
            expected="wrap=False",
            got=True,
        )
    if tensor.ndim < 2:
        raise AxisError("too few axes", op="fill_diagonal", expected="at least 2", got=tensor.ndim)
    least = min(high(s) for s in tensor.shape)
    line = expand(unsqueeze(lift(value, tensor.dtype), 0), least)
    index = tuple(_line(least) for _ in tensor.shape)
    return _written(tensor, index, cast(line, tensor.dtype), (least,), "fill_diagonal")


def _line(count: int) -> Tensor:
    return wrap(build.iota(count))


__all__ = [
    "as_strided",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "column_stack",
    "diagonal_scatter",
    "diff",
    "dsplit",
    "fill_diagonal",
    "hsplit",
    "select_scatter",
    "slice_scatter",
    "stride",
    "sum_to_size",
    "vsplit",
]
