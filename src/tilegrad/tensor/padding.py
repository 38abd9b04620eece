"""Padding, windows and diagonals.

Invariant: made of movement ops (and one `where` for fill values), so nothing is materialised;
amounts and offsets are static, sizes may be symbolic where no corner depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import ShapeError, UserError
from ..graph import build, ops
from ..ir.requirement import require
from ..ir.symbol import Size, minimum
from ..ir.whole import whole, wholes
from .movement import cat, expand, flip, movedim, narrow, reshape, unsqueeze
from .tensor import Tensor, call, lift, method, node_of, wrap

MODES = ("constant", "reflect", "replicate", "circular")


@method()
def pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Elements added before and after axes, the last axis first; negative amounts cut."""
    tensor = lift(x)
    amounts = wholes(pad, "pad", "an amount")
    if len(amounts) % 2 or len(amounts) > 2 * tensor.ndim:
        raise ShapeError(
            "bad amounts",
            op="pad",
            got=amounts,
            expected=f"pairs for at most {tensor.ndim} axes",
        )
    if mode not in MODES:
        raise UserError("unknown mode", op="pad", expected=" or ".join(MODES), got=repr(mode))
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    for back, (low, high) in enumerate(pairs):
        axis = tensor.ndim - 1 - back
        tensor = _crop(tensor, axis, low, high)
        pairs[back] = (max(low, 0), max(high, 0))
    if mode == "constant":
        return _fill(tensor, pairs, 0.0 if value is None else value)
    for back, (low, high) in enumerate(pairs):
        if low or high:
            tensor = BORDERS[mode](tensor, tensor.ndim - 1 - back, low, high)
    return tensor


def _crop(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    start, cut = max(-low, 0), max(-low, 0) + max(-high, 0)
    if not cut:
        return x
    size = x.shape[axis] - cut
    require(
        size,
        ShapeError,
        "cuts more than there is",
        op="pad",
        got="{amounts}",
        expected="at most {size} on axis {axis}",
        amounts=(low, high),
        size=x.shape[axis],
        axis=axis,
    )
    return narrow(x, axis, start, size)


def _fill(x: Tensor, pairs: list[tuple[int, int]], value: float) -> Tensor:
    lows, highs = [0] * x.ndim, [0] * x.ndim
    for back, (low, high) in enumerate(pairs):
        lows[x.ndim - 1 - back], highs[x.ndim - 1 - back] = low, high
    node = node_of(x)
    padded = build.pad(node, lows, highs)
    if value != 0 and padded is not node:
        inside = build.pad(build.full(x.shape, True, dtypes.bool_), lows, highs)
        padded = build.where(inside, padded, build.constant(value, x.dtype))
    return wrap(padded, x)


def _checked_border(x: Tensor, axis: int, low: int, high: int, most: Size, mode: str) -> None:
    require(
        most - max(low, high),
        ShapeError,
        "the border is wider than {mode} can fill",
        op="pad",
        expected="at most {most} on axis {axis} of size {size}",
        got="{amounts}",
        mode=mode,
        most=most,
        axis=axis,
        size=x.shape[axis],
        amounts=(low, high),
    )


def _reflect(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    size = x.shape[axis]
    _checked_border(x, axis, low, high, size - 1, "reflect")
    before = flip(narrow(x, axis, 1, low), axis)
    after = flip(narrow(x, axis, size - 1 - high, high), axis)
    return cat([before, x, after], axis)


def _replicate(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    size, shape = x.shape[axis], list(x.shape)
    wide = max(low, high)  # of one element as of many, but of none nothing
    _checked_border(x, axis, low, high, minimum(size * wide, wide), "replicate")
    before = expand(narrow(x, axis, 0, 1), *shape[:axis], low, *shape[axis + 1 :])
    after = expand(narrow(x, axis, size - 1, 1), *shape[:axis], high, *shape[axis + 1 :])
    return cat([before, x, after], axis)


def _circular(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    size = x.shape[axis]
    _checked_border(x, axis, low, high, size, "circular")
    return cat([narrow(x, axis, size - low, low), x, narrow(x, axis, 0, high)], axis)


BORDERS = {"reflect": _reflect, "replicate": _replicate, "circular": _circular}


@method()
def unfold(x: Any, dimension: int, size: int, step: int) -> Tensor:
    """Sliding windows along an axis; the place within the window is a new last axis."""
    tensor = lift(x)
    if not tensor.shape:
        tensor = reshape(tensor, 1)
    axis = build.axis_of(tensor.node, dimension, "unfold")
    size, step = (whole(v, "unfold", name) for v, name in ((size, "size"), (step, "step")))
    total = tensor.shape[axis]
    for room in (size, step - 1, total - size):
        require(
            room,
            ShapeError,
            "the window does not fit",
            op="unfold",
            got="size {size}, step {step}",
            expected="size <= {total}, step >= 1",
            size=size,
            step=step,
            total=total,
        )
    return call(build.windows, tensor, axis=axis, width=size, step=step)


# ---- diagonals ------------------------------------------------------------------------------


@method()
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal of two axes, as a new last axis."""
    tensor = lift(x)
    if tensor.ndim < 2:
        raise ShapeError(
            "needs 2 axes", op="diagonal", expected="ndim >= 2", got=build.show(tensor.shape)
        )
    tensor = movedim(tensor, (dim1, dim2), (-2, -1))
    offset = whole(offset, "diagonal", "the offset")
    rows, columns = tensor.shape[-2:]
    top, left = max(-offset, 0), max(offset, 0)
    count = max(min(rows - top, columns - left), 0)
    if count == 0:
        return reshape(narrow(narrow(tensor, -1, 0, 0), -2, 0, 0), *tensor.shape[:-2], 0)
    square = narrow(narrow(tensor, -2, top, count), -1, left, count)
    line = reshape(square, *tensor.shape[:-2], count * count)
    return line[..., :: count + 1]


@method()
def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Matrices whose diagonal is the last axis of x."""
    tensor = lift(x)
    build.axis_of(tensor.node, -1, "diag_embed")
    offset = whole(offset, "diag_embed", "the offset")
    count = tensor.shape[-1] + abs(offset)
    before = (max(-offset, 0), max(offset, 0))
    rows = pad(unsqueeze(tensor, -1), [0, 0, before[0], before[1]])
    shape = (*tensor.shape[:-1], count, count)
    row = build.iota_along(shape, tensor.ndim - 1)
    column = build.iota_along(shape, tensor.ndim)
    on = build.equal(build.add(row, offset), column)
    wide = node_of(expand(rows, shape))
    result = wrap(ops.where(on, wide, build.like(wide, 0)), tensor)
    return movedim(result, (-2, -1), (dim1, dim2))


@method()
def diag(x: Any, diagonal: int = 0) -> Tensor:
    """The matrix of a diagonal, or the diagonal of a matrix."""
    tensor = lift(x)
    if tensor.ndim == 1:
        return diag_embed(tensor, diagonal)
    if tensor.ndim != 2:
        raise ShapeError(
            "needs 1 or 2 axes", op="diag", expected="ndim 1 or 2", got=build.show(tensor.shape)
        )
    return _diagonal(tensor, diagonal)


_diagonal = diagonal


@method()
def diagflat(x: Any, offset: int = 0) -> Tensor:
    """The matrix whose diagonal is x flattened."""
    return diag_embed(reshape(lift(x), -1), offset)


def trace(x: Any) -> Tensor:
    """The sum of a matrix's diagonal."""
    return _diagonal(x).sum()


def block_diag(*tensors: Any) -> Tensor:
    """Matrices along the diagonal of a larger one."""
    blocks = [x.reshape(1, -1) if x.ndim < 2 else x for x in map(lift, tensors)]
    width = sum(b.shape[1] for b in blocks)
    rows, left = [], 0
    for block in blocks:
        rows.append(pad(block, [left, width - left - block.shape[1]]))
        left += block.shape[1]
    return cat(rows, 0)
