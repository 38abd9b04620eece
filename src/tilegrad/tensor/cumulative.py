"""Running reductions along an axis, and order statistics.

Invariant: as in `reduce`, integers add in int64 and low precision is rounded once at the end;
extremes that tell their place take their derivative at that place alone.
"""

from __future__ import annotations

import math
from typing import Any, overload

from ..core import dtype as dtypes
from ..core.dtype import dtype_of
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build, ops
from ..ir.requirement import require
from ..ir.whole import whole
from .maths import cast, one_rounding, pick
from .movement import narrow, reshape
from .padding import pad
from .reduce import Extremes, amin, axes_of, shared_extreme, sum_
from .tensor import Tensor, lift, method, node_of, wrap


def _running(x: Tensor, dim: int, kind: str) -> Tensor:
    axes = axes_of(x, dim, f"cum{kind}")
    if not axes:
        return wrap(node_of(x), x)
    return wrap(ops.cumulative(node_of(x), axis=axes[0], kind=kind), x)


def _totals(x: Any, dtype: Any) -> Tensor:
    tensor = lift(x)
    if dtype is not None:
        return cast(tensor, dtype_of(dtype))
    return tensor if tensor.dtype.is_float else cast(tensor, dtypes.int64)


@method()
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> Tensor:
    """The running sum; of integers in int64."""
    return _running(_totals(x, dtype), dim, "sum")


@method()
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Tensor:
    """The running product; of integers in int64."""
    return _running(_totals(x, dtype), dim, "prod")


@method()
def cummax(x: Any, dim: int) -> Extremes:
    """The running maximum and where it was last met."""
    return _running_extreme(lift(x), dim, "max")


@method()
def cummin(x: Any, dim: int) -> Extremes:
    """The running minimum and where it was last met."""
    return _running_extreme(lift(x), dim, "min")


def _running_extreme(x: Tensor, dim: int, kind: str) -> Extremes:
    axes = axes_of(x, dim, f"cum{kind}")
    if not axes:
        return Extremes(x, wrap(build.constant(0, dtypes.int64)))
    best = wrap(ops.cumulative(x.node, axis=axes[0], kind=kind))
    here = wrap(build.iota_along(x.shape, axes[0]))
    met = pick((x.detach() == best) | (x != x), here, 0)
    indices = wrap(ops.cumulative(met.node, axis=axes[0], kind="max"))
    return Extremes(x.take_along_dim(indices, axes[0]), indices)


@method()
@one_rounding
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The running log(sum(exp(x))): pairs at distance 1, 2, 4, ... are joined."""
    axes = axes_of(x, dim, "logcumsumexp")
    if not axes:
        return x
    axis, distance = axes[0], 1
    size = x.shape[axis]
    if not isinstance(size, int):
        raise UserError(
            "the axis is symbolic", op="logcumsumexp", expected="a known size", got=size
        )
    amounts = [0] * (2 * (x.ndim - axis))
    while distance < size:
        amounts[-2] = distance
        before = pad(narrow(x, axis, 0, size - distance), amounts, value=-math.inf)
        x = x.logaddexp(before)
        distance *= 2
    return x


# ---- order statistics -----------------------------------------------------------------------


@method()
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Extremes:
    """The k-th smallest (from 1) along an axis, and where it is."""
    tensor = lift(x)
    if not tensor.ndim:
        return Extremes(*[r.reshape(()) for r in kthvalue(tensor.reshape(1), k, dim)])
    axis = build.axis_of(tensor.node, dim, "kthvalue")
    size, k = tensor.shape[axis], whole(k, "kthvalue", "k")
    for room in (k - 1, size - k):
        require(
            room,
            UserError,
            "k is out of range",
            op="kthvalue",
            expected="1 <= k <= {size}",
            got="{k}",
            size=size,
            k=k,
        )
    _, order = build.items(ops.sort(tensor.node, axis=axis, descending=False))
    return _pick_at(tensor, wrap(order), axis, k - 1, keepdim)


def _pick_at(x: Tensor, order: Tensor, axis: int, place: int, keepdim: bool) -> Extremes:
    indices = narrow(order, axis, place, 1)
    values = x.take_along_dim(indices, axis)
    if keepdim:
        return Extremes(values, indices)
    return Extremes(values.squeeze(axis), indices.squeeze(axis))


@overload
def median(x: Any, dim: None = None, keepdim: bool = False) -> Tensor: ...
@overload
def median(x: Any, dim: int, keepdim: bool = False) -> Extremes: ...
@method()
def median(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower median of all, or (values, indices) along an axis; nan wins."""
    tensor = lift(x)
    if dim is None:
        return _median_of_all(tensor)
    if not tensor.ndim:
        return kthvalue(tensor, 1, dim)
    axis = build.axis_of(tensor.node, dim, "median")
    size: Any = tensor.shape[axis]
    lower = kthvalue(tensor, (size + 1) // 2, axis, True)
    if tensor.dtype.is_float:  # nan sorts last, and its first place counts
        last = kthvalue(tensor, size, axis, True)
        bad = last.values != last.values
        first = wrap(build.unsqueeze(ops.argmax(tensor.node, axis=axis), axis))
        indices = pick(bad, first, lower.indices)
        lower = Extremes(tensor.take_along_dim(indices, axis), indices)
    if keepdim:
        return lower
    return Extremes(lower.values.squeeze(axis), lower.indices.squeeze(axis))


def _median_of_all(x: Tensor) -> Tensor:
    """The lower median; elements equal to it share its derivative."""
    if x.dtype.is_float and isinstance(x.numel(), int) and x.numel() == 0:
        return sum_(x) + math.nan
    line = reshape(x, -1)
    middle = median(line.detach(), 0).values
    if not x.requires_grad:
        return middle
    equal = (line == middle) | ((line != line) & (middle != middle))
    above = shared_extreme(pick(equal, line, -math.inf), True)
    lowest = amin(pick(line == -math.inf, line, math.inf))
    return pick(middle == -math.inf, lowest, above)


INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")


@method()
def quantile(
    x: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Values below which a share q of the elements lies; a 1-d q adds an axis in front."""
    tensor = lift(x)
    share = Tensor(q, tensor.dtype) if isinstance(q, (int, float)) else lift(q)
    if tensor.dtype not in (dtypes.float32, dtypes.float64):
        raise DTypeError(
            "needs floats",
            op="quantile",
            expected="float32 or float64",
            got=tensor.dtype,
            hint="use x.float()",
        )
    if interpolation not in INTERPOLATIONS:
        raise UserError(
            "unknown interpolation",
            op="quantile",
            got=repr(interpolation),
            expected=", ".join(INTERPOLATIONS),
        )
    flat = dim is None or not build.axes_of(tensor.node, dim, "quantile")
    line = reshape(tensor, -1) if flat else tensor.movedim(dim, -1)
    result = _quantiles(line, cast(share.reshape(-1), tensor.dtype), interpolation)
    if keepdim:
        axis = 0 if dim is None else dim
        result = (
            result.reshape(-1, *[1] * tensor.ndim)
            if flat
            else result.unsqueeze(1 + axis if axis >= 0 else axis)
        )
    return result if share.ndim else result.squeeze(0)


def _quantiles(line: Tensor, share: Tensor, interpolation: str) -> Tensor:
    """Quantiles of the last axis; the shares become axis 0."""
    size: Any = line.shape[-1]
    require(
        line.numel() - 1,
        ShapeError,
        "there is nothing to choose from",
        op="quantile",
        expected="at least one element",
        got="{shape}",
        shape=line.shape,
    )
    ordered = wrap(
        build.items(ops.sort(node_of(line), axis=line.ndim - 1, descending=False))[0], line
    )
    place = share * (size - 1)
    if interpolation in ("lower", "higher", "nearest"):
        place = getattr(
            place, {"lower": "floor", "higher": "ceil", "nearest": "round"}[interpolation]
        )()
    below = place.floor()
    weight = place - below if interpolation != "midpoint" else pick(place == below, 0.0, 0.5)
    low = ordered.index_select(-1, below.long()).movedim(-1, 0)
    high = ordered.index_select(-1, place.ceil().long()).movedim(-1, 0)
    shape = (-1,) + (1,) * (line.ndim - 1)
    result = low.lerp(high, cast(weight.reshape(shape), line.dtype))
    bad = sum_(line != line, -1) > 0
    return pick(bad, narrow(ordered, -1, size - 1, 1).squeeze(-1), result)
