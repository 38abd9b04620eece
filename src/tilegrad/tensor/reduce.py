"""Reductions: sums, extremes, moments, norms, softmax.

Invariant: integers sum in int64, floats of low precision in float32 with one rounding at the
end. `dim` is an axis, several or None for all; `keepdim` leaves them with size 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Union, overload

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build, ops
from ..ir.node import Node
from ..ir.requirement import require
from ..ir.symbol import Size
from ..ir.types import product
from .maths import abs_, cast, exp, floating, largest_finite, log, one_rounding, pick, sqrt
from .numpy_names import numpy_names
from .tensor import Tensor, lift, method, mode, node_of, wrap

Dim = Union[int, Sequence[int], None]


class Extremes(NamedTuple):
    """What a reduction that also tells the place gives."""

    values: Tensor
    indices: Tensor


class MinMax(NamedTuple):
    """The smallest and the largest."""

    min: Tensor
    max: Tensor


def axes_of(x: Tensor, dim: Dim, op: str) -> tuple[int, ...]:
    """The axes that dim names; () and None name all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(x.ndim))
    return build.axes_of(x.node, dim, op)


def _reduce(op: Any, x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if not axes:
        return wrap(node_of(x), x)
    return wrap(build.reduce(op, node_of(x), axes, keep), x)


def count_of(x: Tensor, axes: tuple[int, ...]) -> Size:
    """How many elements meet in one result."""
    return product(tuple(x.shape[a] for a in axes))


def divided(x: Tensor, count: Size) -> Tensor:
    """x / count, where the count may be symbolic."""
    if isinstance(count, int):
        return x / float(count)
    return x / wrap(build.cast(build.size_value(count), x.dtype))


def _total_dtype(dtype: DType, wanted: Any) -> DType:
    if wanted is not None:
        return dtype_of(wanted)
    return dtype if dtype.is_float else dtypes.int64


# ---- sums -----------------------------------------------------------------------------------


@method("sum")
def sum_(
    x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, axis: Dim = None
) -> Tensor:
    """The sum; of integers in int64."""
    tensor = lift(x)
    tensor = cast(tensor, _total_dtype(tensor.dtype, dtype))
    return _reduce(ops.sum_, tensor, axes_of(tensor, _either(dim, axis), "sum"), keepdim)


def _either(dim: Dim, axis: Dim) -> Dim:
    return axis if dim is None else dim


@method()
def prod(
    x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, axis: Dim = None
) -> Tensor:
    """The product; of integers in int64."""
    tensor = lift(x)
    tensor = cast(tensor, _total_dtype(tensor.dtype, dtype))
    return _reduce(ops.prod, tensor, axes_of(tensor, _either(dim, axis), "prod"), keepdim)


def _floats(x: Any, op: str, dtype: Any = None) -> Tensor:
    """x as floats: an error for integers unless a dtype is given."""
    tensor = lift(x)
    if dtype is not None:
        tensor = cast(tensor, dtype_of(dtype))
    if not tensor.dtype.is_float:
        raise DTypeError(
            "needs floats",
            op=op,
            expected="a float dtype",
            got=tensor.dtype,
            hint=f"use x.float().{op}()",
        )
    return tensor


def _wide(x: Tensor) -> Tensor:
    return cast(x, dtypes.float32) if x.dtype.bits < 32 else x


@method()
def mean(
    x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, axis: Dim = None
) -> Tensor:
    """The mean of floats."""
    tensor = _floats(x, "mean", dtype)
    axes = axes_of(tensor, _either(dim, axis), "mean")
    total = _reduce(ops.sum_, _wide(tensor), axes, keepdim)
    return cast(divided(total, count_of(tensor, axes)), tensor.dtype)


@method()
def nansum(x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum of what is not nan."""
    tensor = lift(x)
    return sum_(pick(tensor != tensor, 0, tensor), dim, keepdim, dtype=dtype)


@method()
def nanmean(x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean of what is not nan."""
    tensor = _floats(x, "nanmean", dtype)
    count = sum_(tensor == tensor, dim, keepdim)
    total = nansum(_wide(tensor), dim, keepdim)
    return cast(total / count, tensor.dtype)


@method()
def count_nonzero(x: Any, dim: Dim = None) -> Tensor:
    """How many elements are not zero."""
    return sum_(lift(x) != 0, dim)


@method()
def var(
    x: Any,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    axis: Dim = None,
) -> Tensor:
    """The variance; the sum of squares is divided by count - correction."""
    return var_mean(x, _either(dim, axis), unbiased, keepdim, correction=correction)[0]


@method()
def std(
    x: Any,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    axis: Dim = None,
) -> Tensor:
    """The standard deviation."""
    tensor = _floats(x, "std")
    wide = var(_wide(tensor), _either(dim, axis), unbiased, keepdim, correction=correction)
    return cast(safe_sqrt(wide), tensor.dtype)


@numpy_names
def std_mean(
    x: Any,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean."""
    moments = var_mean(x, dim, unbiased, keepdim, correction=correction)
    return safe_sqrt(moments[0]), moments[1]


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root, with derivative 0 at 0."""
    zero = x == 0
    return pick(zero, 0.0, sqrt(pick(zero, 1.0, x)))


@method()
def var_mean(
    x: Any,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    tensor = _floats(x, "var")
    if isinstance(dim, bool):  # PyTorch's var(unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 0 if unbiased is False else 1
    axes = axes_of(tensor, dim, "var")
    wide, count = _wide(tensor), count_of(tensor, axes)
    middle = divided(_reduce(ops.sum_, wide, axes, True), count)
    away = wide - middle
    total = _reduce(ops.sum_, away * away, axes, keepdim)
    if isinstance(count, int):
        spread = total / float(max(count - correction, 0))
    else:
        left_over = wrap(build.cast(build.size_value(count), wide.dtype)) - correction
        spread = total / left_over.clamp(min=0)
    kept = middle if keepdim else middle.reshape(total.shape)
    return cast(spread, tensor.dtype), cast(kept, tensor.dtype)


# ---- extremes -------------------------------------------------------------------------------


def _filled(x: Tensor, axes: tuple[int, ...], op: str) -> None:
    """Refuse to take an extreme of nothing."""
    for axis in axes:
        require(
            x.shape[axis] - 1,
            ShapeError,
            "there is nothing to choose from",
            op=op,
            expected="at least one element on the axis",
            got="shape {shape}, axis {axis}",
            hint="an empty axis has no extreme",
            shape=x.shape,
            axis=axis,
        )


@method()
def amax(x: Any, dim: Dim = None, keepdim: bool = False, *, axis: Dim = None) -> Tensor:
    """The largest; ties share the derivative."""
    tensor = lift(x)
    axes = axes_of(tensor, _either(dim, axis), "amax")
    _filled(tensor, axes, "amax")
    return _reduce(ops.max_, tensor, axes, keepdim)


@method()
def amin(x: Any, dim: Dim = None, keepdim: bool = False, *, axis: Dim = None) -> Tensor:
    """The smallest; ties share the derivative."""
    tensor = lift(x)
    axes = axes_of(tensor, _either(dim, axis), "amin")
    _filled(tensor, axes, "amin")
    return _reduce(ops.min_, tensor, axes, keepdim)


@method()
def aminmax(x: Any, *, dim: Dim = None, keepdim: bool = False) -> MinMax:
    """The smallest and the largest."""
    return MinMax(amin(x, dim, keepdim), amax(x, dim, keepdim))


@overload
def max_(x: Any, dim: Tensor | None = None, keepdim: bool = False) -> Tensor: ...
@overload
def max_(x: Any, dim: int, keepdim: bool = False) -> Extremes: ...
@overload
def max_(x: Any, *, axis: int, keepdim: bool = False) -> Extremes: ...
@method("max")
def max_(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Dim = None) -> Any:
    """The largest of all; with an axis (values, indices); with a Tensor the larger of both."""
    if isinstance(dim, Tensor):
        return lift(x).maximum(dim)
    return _extreme(lift(x), _either(dim, axis), keepdim, True)


@overload
def min_(x: Any, dim: Tensor | None = None, keepdim: bool = False) -> Tensor: ...
@overload
def min_(x: Any, dim: int, keepdim: bool = False) -> Extremes: ...
@overload
def min_(x: Any, *, axis: int, keepdim: bool = False) -> Extremes: ...
@method("min")
def min_(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Dim = None) -> Any:
    """The smallest of all; with an axis (values, indices); with a Tensor the smaller of both."""
    if isinstance(dim, Tensor):
        return lift(x).minimum(dim)
    return _extreme(lift(x), _either(dim, axis), keepdim, False)


def _extreme(x: Tensor, dim: Any, keepdim: bool, largest: bool) -> Any:
    name = "max" if largest else "min"
    if dim is None:
        _filled(x, axes_of(x, None, name), name)
        if x.requires_grad and mode.grad_enabled:
            return shared_extreme(x, largest)
        return amax(x) if largest else amin(x)
    indices = _extreme_index(x, dim, True, largest, name)
    if not x.ndim:
        return Extremes(x, indices)
    values = x.take_along_dim(indices, dim)
    if keepdim:
        return Extremes(values, indices)
    return Extremes(values.squeeze(dim), indices.squeeze(dim))


def shared_extreme(x: Tensor, largest: bool) -> Tensor:
    """The extreme of all, whose derivative nans share evenly where there are some."""
    bad = x != x
    count = sum_(cast(bad, x.dtype))
    return pick(count > 0, sum_(pick(bad, x, 0.0)) / count, _of_numbers(x, None, False, largest))


def _of_numbers(x: Tensor, dim: Dim, keepdim: bool, largest: bool) -> Tensor:
    """The extreme of what is not nan."""
    numbers = pick(x != x, -math.inf if largest else math.inf, x)
    return amax(numbers, dim, keepdim) if largest else amin(numbers, dim, keepdim)


def reversed_order(node: Node) -> Node:
    """Values whose order is the opposite one."""
    return ops.negative(node) if node.dtype.is_float else ops.bit_not(node)


def _extreme_index(x: Tensor, dim: int, keepdim: bool, largest: bool, op: str) -> Tensor:
    axes = axes_of(x, dim, op)
    if not axes:
        return wrap(build.constant(0, dtypes.int64))
    _filled(x, axes, op)
    node = x.node if largest else reversed_order(x.node)
    found = ops.argmax(node, axis=axes[0])
    return wrap(build.unsqueeze(found, axes[0]) if keepdim else found)


@method()
def argmax(
    x: Any, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None
) -> Tensor:
    """The index of the first largest, in the flattened Tensor or along an axis."""
    return _argument(lift(x), dim if axis is None else axis, keepdim, True, "argmax")


@method()
def argmin(
    x: Any, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None
) -> Tensor:
    """The index of the first smallest, in the flattened Tensor or along an axis."""
    return _argument(lift(x), dim if axis is None else axis, keepdim, False, "argmin")


def _argument(x: Tensor, dim: int | None, keepdim: bool, largest: bool, op: str) -> Tensor:
    if dim is not None:
        return _extreme_index(x, dim, keepdim, largest, op)
    found = _extreme_index(x.reshape(-1), 0, False, largest, op)
    return found.reshape((1,) * x.ndim) if keepdim else found


@method("any")
def any_(x: Any, dim: Dim = None, keepdim: bool = False, *, axis: Dim = None) -> Tensor:
    """Whether one element is nonzero."""
    return _logical(ops.max_, lift(x), _either(dim, axis), keepdim, "any")


@method("all")
def all_(x: Any, dim: Dim = None, keepdim: bool = False, *, axis: Dim = None) -> Tensor:
    """Whether all elements are nonzero."""
    return _logical(ops.min_, lift(x), _either(dim, axis), keepdim, "all")


def _logical(op: Any, x: Tensor, dim: Dim, keepdim: bool, name: str) -> Tensor:
    result = _reduce(op, cast(x, dtypes.bool_), axes_of(x, dim, name), keepdim)
    return cast(result, dtypes.uint8) if x.dtype is dtypes.uint8 else result


# ---- norms ----------------------------------------------------------------------------------


@method()
def norm(x: Any, p: Any = 2, dim: Dim = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The p-norm of the elements; p may be 'fro', 0, inf or -inf."""
    tensor = _floats(x, "norm", dtype)
    wide = _wide(tensor)
    if p in ("fro", None):
        p = 2
    if not isinstance(p, (int, float, np.integer, np.floating)):
        raise UserError("unknown norm", op="norm", expected="a number or 'fro'", got=repr(p))
    return cast(_norm(wide, float(p), dim, keepdim), tensor.dtype)


def _norm(x: Tensor, p: float, dim: Dim, keepdim: bool) -> Tensor:
    if p == 2:
        return safe_sqrt(sum_(x * x, dim, keepdim))
    size = abs_(x)
    if p == 1:
        return sum_(size, dim, keepdim)
    if abs(p) == math.inf:
        top = amax(size, dim, keepdim) if p > 0 else amin(size, dim, keepdim)
        if not x.requires_grad:
            return top
        return pick(top != top, math.nan, _of_numbers(size, dim, keepdim, p > 0))
    if p == 0:
        return sum_(cast(x != 0, x.dtype), dim, keepdim)
    if p < 1:  # the derivative of |x|**p is infinite at 0; a zero's is 0 there
        zero = x == 0
        powers = pick(zero, 0.0 if p > 0 else math.inf, pick(zero, 1.0, size) ** p)
    else:
        powers = size**p
    total = sum_(powers, dim, keepdim)
    if p < 0:
        _filled(x, axes_of(x, dim, "norm"), "norm")
        return total ** (1.0 / p)
    zero = total == 0
    return pick(zero, 0.0, pick(zero, 1.0, total) ** (1.0 / p))


# ---- softmax --------------------------------------------------------------------------------


def _shifted(x: Tensor, dim: int, op: str) -> tuple[Tensor, tuple[int, ...]]:
    """x minus its maximum along the axis, which has no derivative."""
    axes = axes_of(x, dim, op)
    if isinstance(count_of(x, axes), int) and count_of(x, axes) == 0:
        return x, axes
    return x - _reduce(ops.max_, x, axes, True).detach(), axes


def _as(x: Any, dtype: Any) -> Tensor:
    return floating(x) if dtype is None else cast(lift(x), dtype_of(dtype))


@method()
def softmax(x: Any, dim: int = -1, dtype: Any = None) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis."""
    return _softmax(_as(x, dtype), dim)


@one_rounding
def _softmax(x: Tensor, dim: int) -> Tensor:
    shifted, axes = _shifted(x, dim, "softmax")
    powers = exp(shifted)
    return powers / _reduce(ops.sum_, powers, axes, True)


@method()
def softmin(x: Any, dim: int = -1, dtype: Any = None) -> Tensor:
    """softmax of -x."""
    return softmax(-lift(x), dim, dtype)


@method()
def log_softmax(x: Any, dim: int = -1, dtype: Any = None) -> Tensor:
    """log(softmax(x)) along an axis."""
    return _log_softmax(_as(x, dtype), dim)


@one_rounding
def _log_softmax(x: Tensor, dim: int) -> Tensor:
    shifted, axes = _shifted(x, dim, "log_softmax")
    return shifted - log(_reduce(ops.sum_, exp(shifted), axes, True))


@method()
@one_rounding
def logsumexp(x: Tensor, dim: Dim, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) along axes."""
    axes = axes_of(x, dim, "logsumexp")
    if count_of(x, axes) == 0:
        return log(_reduce(ops.sum_, exp(x), axes, keepdim))
    top = _reduce(ops.max_, x, axes, True).detach()
    top = pick(abs_(top) <= largest_finite(x.dtype), top, 0.0)
    total = log(_reduce(ops.sum_, exp(x - top), axes, keepdim))
    return total + (top if keepdim else top.reshape(total.shape))
