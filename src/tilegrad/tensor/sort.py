"""Sorting and searching, and counting by value.

Invariant: sorts are stable and nan is largest. `unique`, and `bincount` outside of a trace,
read their operand, since the size of their result depends on its values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError, TraceError, UserError
from ..graph import build, ops
from ..ir.requirement import require
from ..ir.whole import whole
from .index import mask_indices
from .maths import cast, pick
from .movement import cat, narrow
from .operands import promoted_like
from .reduce import Extremes
from .tensor import Tensor, from_array, lift, method, node_of, wrap


@method()
def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Extremes:
    """Sorted along an axis, and where each element was."""
    tensor = lift(x)
    if not tensor.ndim:
        return Extremes(*[r.reshape(()) for r in sort(tensor.reshape(1), dim)])
    axis = build.axis_of(tensor.node, dim, "sort")
    pair = ops.sort(node_of(tensor), axis=axis, descending=bool(descending))
    ordered, order = build.items(pair)
    return Extremes(wrap(ordered, tensor), wrap(order))


@method()
def argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices that sort an axis."""
    return sort(x, dim, descending).indices


def msort(x: Any) -> Tensor:
    """Sorted along axis 0."""
    return sort(x, 0).values


@method()
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Extremes:
    """The k largest (or smallest) along an axis, and where they were."""
    tensor = lift(x)
    if not tensor.ndim:
        return Extremes(*[r.reshape(()) for r in topk(tensor.reshape(1), k, dim)])
    axis = build.axis_of(tensor.node, dim, "topk")
    size, k = tensor.shape[axis], whole(k, "topk", "k")
    for room in (k, size - k):
        require(
            room,
            UserError,
            "k is out of range",
            op="topk",
            expected="0 <= k <= {size}",
            got="{k}",
            size=size,
            k=k,
        )
    ordered = sort(tensor, axis, descending=largest)
    return Extremes(narrow(ordered.values, axis, 0, k), narrow(ordered.indices, axis, 0, k))


def searchsorted(
    sorted_sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Tensor:
    """Where values belong in sorted rows: before equals, or after them ('right'); rows that are
    not sorted have a `sorter`."""
    row = lift(sorted_sequence)
    row = row if sorter is None else _in_order(row, sorter)
    wanted = promoted_like(values, row)
    after = right or side == "right"
    if not row.ndim:
        raise ShapeError("needs an axis", op="searchsorted", expected="sorted rows", got="()")
    if row.ndim != 1 and row.shape[:-1] != wanted.shape[:-1]:
        raise ShapeError(
            "the leading axes differ",
            op="searchsorted",
            expected=build.show(row.shape[:-1]),
            got=build.show(wanted.shape[:-1]),
        )
    size = row.shape[-1]
    if not isinstance(size, int):
        raise UserError("the row is symbolic", op="searchsorted", expected="a known size", got=size)
    first = wrap(build.full(wanted.shape, 0, dtypes.int64))
    past = wrap(build.full(wanted.shape, size, dtypes.int64))
    for _ in range(size.bit_length()):  # binary search, all values at once
        middle = (first + past) >> 1
        place = middle.clamp(max=size - 1)
        found = row[place] if row.ndim == 1 else row.gather(-1, place)
        open_ = first < past
        here = (found > wanted) if after else (found >= wanted)  # never beside nan: it is last
        first = pick(open_ & ~here, middle + 1, first)
        past = pick(open_ & here, middle, past)
    return cast(first, dtypes.int32) if out_int32 else first


def _in_order(row: Tensor, sorter: Any) -> Tensor:
    """Rows put in the order that a sorter (as of argsort) says."""
    order = lift(sorter)
    if order.shape != row.shape or order.dtype is not dtypes.int64:
        raise ShapeError(
            "the sorter does not fit",
            op="searchsorted",
            expected=f"int64 of shape {build.show(row.shape)}",
            got=f"{order.dtype} of shape {build.show(order.shape)}",
        )
    return row.gather(-1, order)


def bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Which bucket between boundaries each element lies in."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@method()
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """How often each number occurs; in a trace the length is `minlength`, others are an error."""
    tensor = lift(x)
    if tensor.ndim != 1 or not tensor.dtype.is_integer:
        raise DTypeError(
            "needs a line of integers",
            op="bincount",
            expected="1-d integers",
            got=f"{tensor.dtype} of shape {build.show(tensor.shape)}",
        )
    length = _bins(tensor, whole(minlength, "bincount", "minlength"))
    if weights is None:
        ones = build.full(tensor.shape, 1, dtypes.int64)
        start = build.full((length,), 0, dtypes.int64)
    else:
        heavy = lift(weights)
        kept = dtypes.float32 if heavy.dtype is dtypes.float32 else dtypes.float64
        ones = build.cast(node_of(heavy), kept)
        start = build.full((length,), 0, kept)
    bins = build.in_range(build.cast(tensor.node, dtypes.int64), length, "bincount")
    return wrap(build.update(start, ones, [bins], [0], "add"), weights)


def _bins(x: Tensor, minlength: int) -> int:
    try:
        known = x.numpy()
    except TraceError:
        if minlength:
            return minlength
        raise TraceError(
            "the length of the result depends on values",
            op="bincount",
            expected="minlength > 0 inside a jitted function",
            got="a traced Tensor",
            hint="pass minlength=the number of bins",
        ) from None
    return max(int(known.max()) + 1 if known.size else 0, minlength)


@method()
def unique(
    x: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The distinct values in order (or slices of an axis), each nan apart; reads x."""
    tensor = lift(x)
    try:
        known = tensor.numpy()
    except TraceError:
        raise TraceError(
            "the size of the result depends on values",
            op="unique",
            expected="a result of known shape inside a jitted function",
            got="a traced Tensor",
            hint="call it outside of jit",
        ) from None
    if dim is not None:
        build.axis_of(tensor.node, dim, "unique")
    low = tensor.dtype.is_float and tensor.dtype.bits < 32  # which NumPy does not order with nan
    found = np.unique(
        known.astype(np.float32) if low else known,
        return_inverse=True,
        return_counts=True,
        axis=dim,
        equal_nan=False,
    )
    shape = known.shape if dim is None else (-1,)
    results = [found[0].astype(known.dtype)]
    if return_inverse:
        results.append(found[1].reshape(shape).astype(np.int64))
    if return_counts:
        results.append(found[2].astype(np.int64))
    tensors = tuple(wrap(from_array(r)) for r in results)
    return tensors if len(tensors) > 1 else tensors[0]


@method()
def unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Runs of equal values (or equal slices of an axis), each once; reads x."""
    tensor = lift(x)
    shape = tensor.shape
    axis = 0 if dim is None else build.axis_of(tensor.node, dim, "unique_consecutive")
    rows = tensor.reshape(-1) if dim is None else tensor.movedim(axis, 0)
    count: Any = rows.shape[0]
    if not count:
        starts = wrap(build.full((0,), True, dtypes.bool_))
    else:
        changed = (rows[1:] != rows[:-1]).reshape(count - 1, -1).any(-1)
        starts = cat([wrap(build.full((1,), True, dtypes.bool_)), changed])
    (firsts,) = mask_indices(starts, "unique_consecutive")
    results = [rows[wrap(firsts)].movedim(0, axis)]
    if return_inverse:
        inverse = starts.cumsum(0) - 1
        results.append(inverse.reshape(shape) if dim is None else inverse)
    if return_counts:
        ends = cat([wrap(firsts), wrap(build.full((1,), count, dtypes.int64))])
        results.append(ends[1:] - ends[:-1])
    return tuple(results) if len(results) > 1 else results[0]


@method()
def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """How many elements fall into each of so many bins from min to max (0 and 0: all there are);
    others are left out."""
    tensor, bins = lift(x).reshape(-1), whole(bins, "histc", "bins")
    if bins < 1 or min > max or not (math.isfinite(min) and math.isfinite(max)):
        raise UserError(
            "bad bins",
            op="histc",
            expected="bins >= 1, min <= max, both finite",
            got=f"bins={bins}, min={min}, max={max}",
        )
    low, high = wrap(build.constant(min, tensor.dtype)), wrap(build.constant(max, tensor.dtype))
    if min == max and tensor.numel():
        low, high = tensor.amin(), tensor.amax()
    same = low == high
    low, high = pick(same, low - 1, low), pick(same, high + 1, high)
    x, first, last = tensor, low, high
    if tensor.dtype.is_float:  # smaller by a power of 2 where a product with bins is too large
        factor = pick((high - low) * bins < math.inf, 1.0, 0.25 / (1 << bins.bit_length()))
        x, first, last = (cast(v * factor, tensor.dtype) for v in (x, first, last))
    place = cast((x - first) * bins / (last - first), dtypes.int64).clamp(0, bins - 1)
    inside = (tensor >= low) & (tensor <= high)
    start = build.full((bins + 1,), 0, tensor.dtype)
    place = pick(inside, place, bins)
    if min == max and tensor.dtype.is_float:
        right = ((low.abs() < math.inf) & (high.abs() < math.inf)).node
        wanted = "the range of the elements is not finite"
        place = wrap(build.where_right(right, place.node, bins + 1, "histc", wanted))
    ones = build.full(tensor.shape, 1, tensor.dtype)
    return wrap(build.update(start, ones, [place.node], [0], "add"))[:bins]


@method()
def isin(x: Any, test_elements: Any) -> Tensor:
    """Where x is one of the test elements."""
    tensor = lift(x)
    tests = promoted_like(test_elements, tensor).reshape(-1)
    return (tensor.unsqueeze(-1) == tests).any(-1)
