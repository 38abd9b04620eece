"""Pooling: windows (movement) and a reduction over the places within them.

Invariant: the derivative of a maximum goes to the first largest element alone, as in PyTorch;
padding never wins a maximum, and counts in a mean only where asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build, ops
from ..ir.whole import is_one, wholes
from .convolution import Sizes, check_fits, per_axis, windows_of
from .maths import cast, pick
from .matmul import matmul
from .padding import pad as pad_tensor
from .reduce import amax, sum_
from .tensor import Tensor, from_array, lift, node_of, wrap

# ---- where the windows lie ------------------------------------------------------------------


class Frame:
    """The windows of one pooling: sizes, steps, dilations and the padding on both sides."""

    def __init__(
        self,
        op: str,
        x: Tensor,
        rank: int,
        kernel_size: Sizes,
        stride: Sizes | None,
        padding: Sizes,
        dilation: Sizes,
        ceil_mode: bool,
    ) -> None:
        self.op, self.rank, self.shape = op, rank, x.shape[x.ndim - rank :]
        self.widths = per_axis(op, "kernel_size", kernel_size, rank, 1)
        self.steps = per_axis(op, "stride", stride if stride else kernel_size, rank, 1)
        self.padding = per_axis(op, "padding", padding, rank, 0)
        self.dilations = per_axis(op, "dilation", dilation, rank, 1)
        self.extra = [self._extra(i) if ceil_mode else 0 for i in range(rank)]
        if any(p > w // 2 for p, w in zip(self.padding, self.widths)):
            raise UserError(
                "padding is too large",
                op=op,
                expected="at most half the kernel size",
                got=self.padding,
            )

    def _extra(self, axis: int) -> int:
        """What the last, partial window reaches beyond the padding."""
        size, step, edge = self.shape[axis], self.steps[axis], self.padding[axis]
        if not isinstance(size, int):
            raise UserError("ceil_mode needs known sizes", op=self.op, got=size)
        reach = self.dilations[axis] * (self.widths[axis] - 1) + 1
        count = -(-(size + 2 * edge - reach) // step) + 1
        if (count - 1) * step >= size + edge:  # it must start inside
            count -= 1
        return max((count - 1) * step + reach - (size + 2 * edge), 0)

    def windows(self, x: Tensor, fill: float) -> Tensor:
        """(..., *windows, *places within)."""
        amounts = []
        for edge, extra in zip(reversed(self.padding), reversed(self.extra)):
            amounts += [edge, edge + extra]
        padded = pad_tensor(x, amounts, value=fill)
        first = x.ndim - self.rank
        check_fits(self.op, padded.shape[first:], self.widths, self.dilations)
        node = windows_of(node_of(padded), first, self.widths, self.steps, self.dilations)
        return wrap(node, padded)

    def positions(self, counts: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """For each axis, the element (window, place) stands on; outside may be padding."""
        return [
            np.arange(c)[:, None] * s + np.arange(w)[None, :] * d - p
            for c, s, w, d, p in zip(counts, self.steps, self.widths, self.dilations, self.padding)
        ]


def _checked(op: str, input: Any, rank: int) -> Tensor:
    x = lift(input)
    if x.ndim not in (rank + 1, rank + 2):
        raise ShapeError(
            "wrong number of axes",
            op=op,
            expected=f"(batch, channels, {rank} of space), batch optional",
            got=build.show(x.shape),
        )
    return x


# ---- maximum --------------------------------------------------------------------------------


def _largest(spread: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest of each window and its place among the flattened places."""
    flat = spread.flatten(spread.ndim - rank)
    place = wrap(ops.argmax(flat.node, axis=flat.ndim - 1))
    here = wrap(build.iota(flat.shape[-1])) == place.unsqueeze(-1)
    return sum_(pick(here, flat, 0), -1, dtype=flat.dtype), place


def _flat_positions(
    positions: Sequence[np.ndarray[Any, Any]], shape: Sequence[Any], place: Tensor
) -> Tensor:
    """The element chosen by `place`, counted in the flattened space."""
    rank = len(positions)
    total: Any = np.zeros((1,) * (2 * rank), np.int64)
    for axis, found in enumerate(positions):
        spread = [1] * (2 * rank)
        spread[axis], spread[rank + axis] = found.shape
        total = total * shape[axis] + found.reshape(spread)
    table = total.reshape(*total.shape[:rank], -1)
    wide = wrap(from_array(np.ascontiguousarray(table))).expand(*place.shape, table.shape[-1])
    return wide.take_along_dim(place.unsqueeze(-1), -1).squeeze(-1)


def _max_pool(
    rank: int,
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    return_indices: bool,
) -> Any:
    op = f"max_pool{rank}d"
    x = _checked(op, input, rank)
    frame = Frame(op, x, rank, kernel_size, stride, padding, dilation, ceil_mode)
    spread = frame.windows(x, x.dtype.lowest)
    inside = tuple(range(spread.ndim - rank, spread.ndim))
    if not return_indices and not x.requires_grad:
        return amax(spread, inside)
    values, place = _largest(spread, rank)
    if not return_indices:
        return values
    counts: Any = values.shape[values.ndim - rank :]
    return values, _flat_positions(frame.positions(counts), frame.shape, place)


def max_pool1d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest of each window of (..., channels, length)."""
    return _max_pool(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest of each window of (..., channels, height, width)."""
    return _max_pool(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest of each window of (..., channels, depth, height, width)."""
    return _max_pool(3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


# ---- mean -----------------------------------------------------------------------------------


def _sums(frame: Frame, x: Tensor) -> Tensor:
    spread = frame.windows(x, 0)
    return sum_(spread, tuple(range(spread.ndim - frame.rank, spread.ndim)))


def _divisor(frame: Frame, counts: Sequence[Any], include_pad: bool, dtype: Any) -> Any:
    """How many elements each window has: a number, or a Tensor (*windows)."""
    whole = float(np.prod(frame.widths))
    if not any(frame.extra) and (include_pad or not any(frame.padding)):
        return whole
    if not all(isinstance(c, int) for c in counts):
        raise UserError("a mean without padding needs known sizes", op=frame.op, got=counts)
    table: Any = np.ones(())
    for found, size, edge in zip(frame.positions(counts), frame.shape, frame.padding):
        low, high = (-edge, size + edge) if include_pad else (0, size)
        inside = ((found >= low) & (found < high)).sum(1)
        table = np.multiply.outer(table, inside)
    return wrap(from_array(table.astype(dtype.numpy)))


def _avg_pool(
    rank: int,
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    op = f"avg_pool{rank}d"
    x = _checked(op, input, rank)
    if not x.dtype.is_float:
        raise DTypeError("needs floats", op=op, expected="a float dtype", got=x.dtype)
    wide = x.float() if x.dtype.bits < 32 else x
    frame = Frame(op, x, rank, kernel_size, stride, padding, 1, ceil_mode)
    total = _sums(frame, wide)
    if divisor_override is not None:
        if divisor_override == 0:
            raise UserError("divisor_override is 0", op=op, expected="another number", got=0)
        divisor: Any = float(divisor_override)
    else:
        counts = total.shape[total.ndim - rank :]
        divisor = _divisor(frame, counts, count_include_pad, wide.dtype)
    return cast(total / divisor, x.dtype)


def avg_pool1d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window of (..., channels, length)."""
    return _avg_pool(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


def avg_pool2d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window of (..., channels, height, width)."""
    return _avg_pool(
        2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def avg_pool3d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window of (..., channels, depth, height, width)."""
    return _avg_pool(
        3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def _lp_pool(
    rank: int,
    input: Any,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None,
    ceil_mode: bool,
) -> Tensor:
    op = f"lp_pool{rank}d"
    x = _checked(op, input, rank)
    frame = Frame(op, x, rank, kernel_size, stride, 0, 1, ceil_mode)
    total = _sums(frame, x ** float(norm_type))
    zero = total <= 0
    return pick(zero, 0.0, pick(zero, 1.0, total) ** (1.0 / norm_type))


def lp_pool1d(
    input: Any,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """(sum of x ** p) ** (1 / p) over each window of (..., channels, length)."""
    return _lp_pool(1, input, norm_type, kernel_size, stride, ceil_mode)


def lp_pool2d(
    input: Any,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """(sum of x ** p) ** (1 / p) over each window of (..., channels, height, width)."""
    return _lp_pool(2, input, norm_type, kernel_size, stride, ceil_mode)


# ---- adaptive -------------------------------------------------------------------------------


def _targets(op: str, x: Tensor, rank: int, output_size: Any) -> tuple[int, ...]:
    """The sizes wanted; None keeps a size."""
    given = (
        (output_size,) * rank
        if output_size is None or is_one(output_size)
        else (tuple(output_size))
    )
    given = wholes(given, op, "output_size", none=True)
    shape = x.shape[x.ndim - rank :]
    if not all(isinstance(s, int) for s in shape):
        raise UserError("needs known sizes", op=op, got=build.show(shape))
    if len(given) != rank or not all(g is None or (isinstance(g, int) and g > 0) for g in given):
        raise UserError(
            "bad output_size", op=op, expected=f"an int or {rank} ints > 0", got=output_size
        )
    return tuple(s if g is None else g for s, g in zip(shape, given))


def _bounds(size: int, target: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """First and past-the-last element of each of `target` windows over `size` elements."""
    index = np.arange(target)
    return index * size // target, -(-(index + 1) * size // target)


def adaptive_avg_pool(rank: int, input: Any, output_size: Any) -> Tensor:
    """The means of nearly equal windows, so many along each of the last axes."""
    op = f"adaptive_avg_pool{rank}d"
    x = _checked(op, input, rank)
    targets = _targets(op, x, rank, output_size)
    result = x.float() if x.dtype.bits < 32 else x
    for i, target in enumerate(targets):
        axis = x.ndim - rank + i
        size: Any = x.shape[axis]
        if size % target == 0:
            parts = result.unflatten(axis, (target, size // target))
            result = sum_(parts, axis + 1) / float(size // target)
            continue
        first, past = _bounds(size, target)
        place = np.arange(size)[:, None]
        share = ((place >= first) & (place < past)) / (past - first)  # (size, target)
        matrix = wrap(from_array(share.astype(result.dtype.numpy)))
        result = matmul(result.movedim(axis, -1), matrix).movedim(-1, axis)
    return cast(result, x.dtype)


def adaptive_max_pool(rank: int, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """The largest of nearly equal windows, so many along each of the last axes."""
    op = f"adaptive_max_pool{rank}d"
    x = _checked(op, input, rank)
    targets = _targets(op, x, rank, output_size)
    spread, positions = x, []
    for i, target in enumerate(targets):
        axis = x.ndim - rank + i
        size: Any = x.shape[axis]
        first, past = _bounds(size, target)
        found = np.minimum(first[:, None] + np.arange((past - first).max()), past[:, None] - 1)
        positions.append(found)
        parts = spread.index_select(axis, from_flat(found))
        spread = parts.unflatten(axis, found.shape).movedim(axis + 1, -1)
    values, place = _largest(spread, rank)
    if not return_indices:
        return values
    return values, _flat_positions(positions, x.shape[x.ndim - rank :], place)


def from_flat(index: np.ndarray[Any, Any]) -> Tensor:
    """An int64 Tensor of an array of indices, flattened."""
    return wrap(from_array(np.ascontiguousarray(index.reshape(-1), np.int64)))


def adaptive_avg_pool1d(input: Any, output_size: Any) -> Tensor:
    """Means over nearly equal windows of (..., channels, length)."""
    return adaptive_avg_pool(1, input, output_size)


def adaptive_avg_pool2d(input: Any, output_size: Any) -> Tensor:
    """Means over nearly equal windows of (..., channels, height, width)."""
    return adaptive_avg_pool(2, input, output_size)


def adaptive_avg_pool3d(input: Any, output_size: Any) -> Tensor:
    """Means over nearly equal windows of (..., channels, depth, height, width)."""
    return adaptive_avg_pool(3, input, output_size)


def adaptive_max_pool1d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Largest of nearly equal windows of (..., channels, length)."""
    return adaptive_max_pool(1, input, output_size, return_indices)


def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Largest of nearly equal windows of (..., channels, height, width)."""
    return adaptive_max_pool(2, input, output_size, return_indices)


def adaptive_max_pool3d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Largest of nearly equal windows of (..., channels, depth, height, width)."""
    return adaptive_max_pool(3, input, output_size, return_indices)


__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "lp_pool1d",
    "lp_pool2d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]
