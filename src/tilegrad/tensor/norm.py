"""Normalisation and embedding, in plain ops that later recognition finds.

Invariant: statistics are computed in at least float32 and the result is rounded
once to the input's dtype; only `batch_norm` and `instance_norm` change state, by assigning to
the running statistics they are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.requirement import require
from ..ir.symbol import Size
from ..ir.whole import whole, wholes
from .elementwise import clamp
from .index import row_node
from .maths import cast, pick, rsqrt
from .movement import reshape
from .padding import pad, unfold
from .reduce import count_of, divided, mean
from .reduce import norm as vector_norm
from .tensor import Tensor, lift, mode, no_grad, node_of, realize, wrap

# ---- shared ---------------------------------------------------------------------------------


def _float(op: str, x: Any) -> Tensor:
    tensor = lift(x)
    if not tensor.dtype.is_float:
        raise DTypeError("needs floats", op=op, expected="a float dtype", got=tensor.dtype)
    return tensor


def _wide(x: Tensor) -> Tensor:
    return cast(x, dtypes.float32) if x.dtype.bits < 32 else x


def _scaled(op: str, x: Tensor, weight: Any, bias: Any, shape: tuple[Size, ...]) -> Tensor:
    """x * weight + bias, each under `shape`."""
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        found = cast(lift(value), x.dtype)
        if found.numel() != math.prod(shape):
            raise ShapeError(
                f"the {name} does not fit",
                op=op,
                expected=build.show(shape),
                got=build.show(found.shape),
            )
        found = reshape(found, shape)
        x = x * found if name == "weight" else x + found
    return x


def _standard(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """x minus its mean, over its standard deviation."""
    away = x - mean(x, axes, True)
    return away * rsqrt(mean(away * away, axes, True) + eps)


def _last_axes(op: str, x: Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    wanted = wholes(normalized_shape, op, "a size")
    if not wanted or x.shape[-len(wanted) :] != wanted:
        raise ShapeError(
            "the last axes differ",
            op=op,
            expected=f"(..., {build.show(wanted)[1:]}",
            got=build.show(x.shape),
        )
    return tuple(range(x.ndim - len(wanted), x.ndim))


# ---- normalisation --------------------------------------------------------------------------


def layer_norm(
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 over the last axes, then weight and bias."""
    tensor = _float("layer_norm", x)
    axes = _last_axes("layer_norm", tensor, normalized_shape)
    result = _standard(_wide(tensor), axes, eps)
    shape = tuple(tensor.shape[a] for a in axes)
    return cast(_scaled("layer_norm", result, weight, bias, shape), tensor.dtype)


def rms_norm(
    x: Any, normalized_shape: int | Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """x over the root of its mean square over the last axes, times weight."""
    tensor = _float("rms_norm", x)
    axes = _last_axes("rms_norm", tensor, normalized_shape)
    wide = _wide(tensor)
    small = float(ml_dtypes.finfo(tensor.dtype.numpy).eps) if eps is None else eps
    result = wide * rsqrt(mean(wide * wide, axes, True) + small)
    shape = tuple(tensor.shape[a] for a in axes)
    return cast(_scaled("rms_norm", result, weight, None, shape), tensor.dtype)


def batch_norm(
    x: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 for each channel (axis 1), from the batch or the running statistics.

    In training the running statistics, where given, move towards the batch's by `momentum`.
    """
    tensor = _float("batch_norm", x)
    if tensor.ndim < 2:
        raise ShapeError(
            "needs a batch and channels",
            op="batch_norm",
            expected="ndim >= 2",
            got=build.show(tensor.shape),
        )
    channel = (1, tensor.shape[1]) + (1,) * (tensor.ndim - 2)
    wide = _wide(tensor)
    if training:
        axes = (0, *range(2, tensor.ndim))
        middle, spread = _moments("batch_norm", wide, axes)
        _follow(
            tensor, (running_mean, running_var), (middle, spread), count_of(tensor, axes), momentum
        )
    elif running_mean is None or running_var is None:
        raise UserError(
            "needs running statistics",
            op="batch_norm",
            got=None,
            expected="running_mean and running_var when training is False",
        )
    else:
        middle = reshape(cast(running_mean, wide.dtype), channel)
        spread = reshape(cast(running_var, wide.dtype), channel)
    result = (wide - middle) * rsqrt(spread + eps)
    return cast(_scaled("batch_norm", result, weight, bias, channel), tensor.dtype)


def _moments(op: str, x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance over axes, which stay with size 1. Of no values at all there is nothing to
    scale, and that is fine; one value alone has no variance."""
    count: Any = count_of(x, axes)
    require(
        count * (count - 2),  # negative for 1 alone
        ShapeError,
        "needs more than one value for each channel in training",
        op=op,
        got="{shape}",
        hint="use eval() or a larger batch",
        shape=x.shape,
    )
    middle = mean(x, axes, True)
    away = x - middle
    return middle, mean(away * away, axes, True)


def _follow(
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    found: tuple[Tensor, Tensor],
    count: Size,
    momentum: Any,
) -> None:
    """Move the running mean and (unbiased) variance towards those of a batch, if it has any."""
    changed = [r for r in running if r is not None]
    if isinstance(count, int) and not count:
        return
    with no_grad():
        middle, spread = (f.detach() for f in found)
        spread = (
            spread * (count / (count - 1))
            if isinstance(count, int)
            else (divided(spread * wrap(build.size_value(count)), count - 1))
        )
        for state, new in zip(running, (middle, spread)):
            if state is not None:
                near = cast(reshape(new, state.shape), state.dtype)
                moved = state * (1.0 - momentum) + near * momentum
                if not isinstance(count, int):
                    moved = pick(wrap(build.size_value(count)) > 0, moved, state)
                state.assign(moved)
    if mode.trace is None and not mode.depth:
        realize([x, *changed])  # else each step would stand on the Graph of the one before


def instance_norm(
    x: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 for each channel of each example."""
    tensor = _float("instance_norm", x)
    if not use_input_stats:
        return batch_norm(tensor, running_mean, running_var, weight, bias, False, momentum, eps)
    if tensor.ndim < 3:
        raise ShapeError(
            "needs a batch, channels and space",
            op="instance_norm",
            expected="ndim >= 3",
            got=build.show(tensor.shape),
        )
    channel = (1, tensor.shape[1]) + (1,) * (tensor.ndim - 2)
    wide = _wide(tensor)
    axes = tuple(range(2, tensor.ndim))
    middle, spread = _moments("instance_norm", wide, axes)
    if running_mean is not None or running_var is not None:
        batch = (mean(middle, 0), mean(spread, 0))
        _follow(tensor, (running_mean, running_var), batch, count_of(tensor, axes), momentum)
    result = (wide - middle) * rsqrt(spread + eps)
    return cast(_scaled("instance_norm", result, weight, bias, channel), tensor.dtype)


def group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Mean 0 and variance 1 over groups of channels of each example."""
    tensor, num_groups = _float("group_norm", x), whole(num_groups, "group_norm", "num_groups")
    if tensor.ndim < 2 or tensor.shape[1] % num_groups != 0:
        raise ShapeError(
            "the channels do not divide into groups",
            op="group_norm",
            expected=f"(batch, a multiple of {num_groups}, ...)",
            got=build.show(tensor.shape),
        )
    channels, space = tensor.shape[1], tensor.shape[2:]
    grouped = reshape(_wide(tensor), tensor.shape[0], num_groups, channels // num_groups, *space)
    result = _standard(grouped, tuple(range(2, grouped.ndim)), eps)
    channel = (1, channels) + (1,) * len(space)
    result = reshape(result, tensor.shape)
    return cast(_scaled("group_norm", result, weight, bias, channel), tensor.dtype)


def local_response_norm(
    x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """x over (k + alpha * mean square of neighbouring channels) ** beta."""
    tensor, size = _float("local_response_norm", x), whole(size, "local_response_norm", "size")
    wide = _wide(tensor)
    amounts = [0, 0] * (tensor.ndim - 2) + [size // 2, (size - 1) // 2]
    around = mean(unfold(pad(wide * wide, amounts), 1, size, 1), -1)
    return cast(wide / (around * alpha + k) ** beta, tensor.dtype)


def normalize(x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """x over its p-norm along an axis (at least eps)."""
    tensor = _float("normalize", x)
    wide = _wide(tensor)
    return cast(wide / clamp(vector_norm(wide, p, dim, True), min=eps), tensor.dtype)


# ---- embedding ------------------------------------------------------------------------------


def embedding(input: Any, weight: Any, padding_idx: int | None = None) -> Tensor:
    """Rows of the weight by index; the row `padding_idx` gets no gradient."""
    index, table = lift(input), lift(weight)
    if not index.dtype.is_integer:
        raise DTypeError(
            "indices are not integers",
            op="embedding",
            expected="integers",
            got=index.dtype,
            hint="the arguments are embedding(indices, weight)",
        )
    if table.ndim != 2:
        raise ShapeError(
            "the weight is not a table",
            op="embedding",
            expected="(rows, features)",
            got=build.show(table.shape),
        )
    row_numbers = row_node(index, table.shape[0], 0, "embedding")
    rows = wrap(build.gather(node_of(table), [row_numbers], (0,)), table)
    if padding_idx is None:
        return rows
    padding_idx, count = whole(padding_idx, "embedding", "padding_idx"), table.shape[0]
    if not -count <= padding_idx < count:
        raise ShapeError(
            "padding_idx is not a row",
            op="embedding",
            expected=f"-{count} <= padding_idx < {count}",
            got=padding_idx,
        )
    padded = (index == padding_idx % count).unsqueeze(-1)
    return pick(padded, rows.detach(), rows)


def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    mode: str = "mean",
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The sum, mean or max of rows of the weight in each bag: a row of indices, or, of a line of
    indices, those from one offset to the next; `padding_idx` counts for nothing."""
    index, table = lift(input), lift(weight)
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        raise UserError(
            "bad mode",
            op="embedding_bag",
            got=mode,
            expected="sum, mean or max; weights of samples with sum",
        )
    if index.ndim == 2 and offsets is None:
        count: Any = index.shape[0]
        bag = wrap(build.iota_along(index.shape, 0)).reshape(-1)
    elif index.ndim == 1 and offsets is not None:
        starts = lift(offsets)
        starts = starts[:-1] if include_last_offset else starts
        count = starts.shape[0]
        positions = wrap(build.iota(index.shape[0]))
        bag = (starts.unsqueeze(0) <= positions.unsqueeze(1)).sum(1) - 1
    else:
        raise ShapeError(
            "no bags",
            op="embedding_bag",
            got=build.show(index.shape),
            expected="rows of indices, or a line with offsets",
        )
    if padding_idx is not None:
        padding_idx = whole(padding_idx, "embedding_bag", "padding_idx")
    rows = embedding(index.reshape(-1), table, padding_idx)
    kept = None if padding_idx is None else (index.reshape(-1) != padding_idx % table.shape[0])
    return _bagged(rows, bag, count, mode, per_sample_weights, kept)


def _bagged(
    rows: Tensor, bag: Tensor, count: Any, mode: str, weights: Any, kept: Tensor | None
) -> Tensor:
    """Rows joined by the number of their bag."""
    if weights is not None:
        rows = rows * lift(weights).reshape(-1, 1)
    if kept is not None:  # what does not count goes to a bag of its own
        bag = pick(kept, bag, count)
    start = wrap(build.full((count + 1, rows.shape[1]), 0.0, rows.dtype))
    ones = wrap(build.full((count + 1,), 0.0, rows.dtype))
    number = ones.index_add(0, bag, ones.new_ones(rows.shape[0]))[:count].unsqueeze(1)
    if mode == "max":
        joined = start.index_reduce(0, bag, rows, "amax", include_self=False)[:count]
        return pick(number > 0, joined, 0.0)
    joined = start.index_add(0, bag, rows)[:count]
    return joined if mode == "sum" else joined / number.clamp(min=1.0)


__all__ = [
    "batch_norm",
    "embedding",
    "embedding_bag",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "local_response_norm",
    "normalize",
    "rms_norm",
]
