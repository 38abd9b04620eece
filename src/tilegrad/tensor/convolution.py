"""Convolution and its transpose, as windows (movement) and one `dot`.

Invariant: no window is ever materialised here: the dot contracts channel and window axes of a
view of the input, its batch axis is the groups. The weight goes left, so that the last axis of
the result is the innermost axis of space. Low precision accumulates in float32, bias included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..graph.grad import gradients
from ..ir.node import Node
from ..ir.requirement import require
from ..ir.symbol import Size
from ..ir.whole import whole, wholes
from .maths import cast
from .matmul import matched
from .movement import flip, reshape
from .padding import pad as pad_tensor
from .tensor import Tensor, lift, node_of, wrap

Sizes = Union[int, Sequence[int]]


def per_axis(op: str, name: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    """One whole number for each axis of space, from one or several."""
    found = wholes(value, op, name)
    if len(found) == 1:
        found = found * rank
    if len(found) != rank or not all(isinstance(v, int) and v >= least for v in found):
        raise UserError(
            f"bad {name}", op=op, expected=f"an int or {rank} ints >= {least}", got=value
        )
    return found


def windows_of(
    node: Node, first: int, widths: Sequence[int], steps: Sequence[int], dilations: Sequence[int]
) -> Node:
    """Windows over the axes from `first` on; the places within them are new last axes."""
    for i, (width, step, dilation) in enumerate(zip(widths, steps, dilations)):
        node = build.windows(node, first + i, width, step, dilation)
    return node


def check_fits(
    op: str, shape: Sequence[Size], widths: Sequence[int], dilations: Sequence[int]
) -> None:
    """Refuse windows that are wider than the (padded) space."""
    for size, width, dilation in zip(shape, widths, dilations):
        reach = dilation * (width - 1) + 1
        require(
            size - reach,
            ShapeError,
            "the window does not fit",
            op=op,
            expected="padded sizes >= {reach}",
            got="{shape}",
            reach=reach,
            shape=tuple(shape),
        )


# ---- the core -------------------------------------------------------------------------------


def _window_dot(
    x: Tensor, weight: Tensor, steps: Sequence[int], dilations: Sequence[int]
) -> Tensor:
    """(batch, groups, in, *space) with (groups, out, in, *window): (batch, groups * out, *space).

    The result is in float32 for lower precision, before it is rounded.
    """
    rank = x.ndim - 3
    inside = tuple(range(rank))
    spread = windows_of(node_of(x), 3, weight.shape[3:], steps, dilations)
    contract = ([2, *(3 + i for i in inside)], [2, *(3 + rank + i for i in inside)])
    dtype = dtypes.float32 if x.dtype.is_float and x.dtype.bits < 32 else None
    groups = x.shape[1]
    if groups == 1:
        left = build.squeeze(node_of(weight), (0,))
        right = build.squeeze(spread, (1,))
        lower = tuple([[a - 1 for a in axes] for axes in contract])
        node = build.dot(left, right, ((), ()), lower, dtype)  # type: ignore[arg-type]
        node = build.move_axis(node, 1, 0)  # (out, batch, *space) -> (batch, out, *space)
    else:
        node = build.dot(node_of(weight), spread, ((0,), (1,)), contract, dtype)
        node = build.move_axis(node, 2, 0)  # (groups, out, batch, ...) -> (batch, groups, out, ...)
        shape = node.shape
        node = build.reshape(node, (shape[0], shape[1] * shape[2], *shape[3:]))
    return wrap(node, x, weight)


def _with_bias(op: str, result: Tensor, bias: Any, rank: int) -> Tensor:
    if bias is None:
        return result
    found = lift(bias)
    if found.shape != (result.shape[1],):
        raise ShapeError(
            "one bias for each output channel is needed",
            op=op,
            expected=f"({result.shape[1]},)",
            got=build.show(found.shape),
        )
    return result + reshape(cast(found, result.dtype), 1, -1, *(1,) * rank)


def _check_inputs(
    op: str, x: Tensor, weight: Tensor, groups: int, rank: int, transposed: bool
) -> int:
    """The groups, an int."""
    if x.ndim != rank + 2 or weight.ndim != rank + 2:
        raise ShapeError(
            "wrong number of axes",
            op=op,
            expected=f"input (batch, channels, {rank} of space) and a weight of {rank + 2} axes",
            got=f"{build.show(x.shape)} and {build.show(weight.shape)}",
        )
    groups = whole(groups, op, "groups")
    if groups < 1:
        raise UserError("bad groups", op=op, expected="an int >= 1", got=groups)
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != channels or weight.shape[0] % groups:
        raise ShapeError(
            "the channels do not fit",
            op=op,
            expected=f"{channels} input channels and a weight whose first size is a multiple of "
            f"groups={groups}",
            got=f"input {build.show(x.shape)}, weight {build.show(weight.shape)}",
        )
    return groups


def _batched(x: Tensor, rank: int) -> tuple[Tensor, bool]:
    """x with a batch axis, and whether it had none."""
    single = x.ndim == rank + 1
    return (x.unsqueeze(0) if single else x), single


# ---- convolution ----------------------------------------------------------------------------


def _padding(
    op: str, padding: Any, widths: Sequence[int], steps: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    """(before, after) for each axis of space."""
    rank = len(widths)
    if padding == "valid":
        return [(0, 0)] * rank
    if padding == "same":
        if any(s != 1 for s in steps):
            raise UserError(
                "padding='same' needs stride 1", op=op, expected="stride=1", got=tuple(steps)
            )
        totals = [d * (w - 1) for d, w in zip(dilations, widths)]
        return [(t // 2, t - t // 2) for t in totals]
    if isinstance(padding, str):
        raise UserError(
            "unknown padding", op=op, expected="ints, 'same' or 'valid'", got=repr(padding)
        )
    return [(p, p) for p in per_axis(op, "padding", padding, rank, 0)]


def _flat(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Amounts for `pad`: the last axis first."""
    return [amount for pair in reversed(pairs) for amount in pair]


def _convolve(
    rank: int,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Any,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    op = f"conv{rank}d"
    x, kernel = matched(op, input, weight)
    x, single = _batched(x, rank)
    groups = _check_inputs(op, x, kernel, groups, rank, False)
    steps = per_axis(op, "stride", stride, rank, 1)
    dilations = per_axis(op, "dilation", dilation, rank, 1)
    widths: Any = kernel.shape[2:]
    padded = pad_tensor(x, _flat(_padding(op, padding, widths, steps, dilations)))
    check_fits(op, padded.shape[2:], widths, dilations)
    grouped = reshape(padded, x.shape[0], groups, x.shape[1] // groups, *padded.shape[2:])
    shaped = reshape(kernel, groups, kernel.shape[0] // groups, *kernel.shape[1:])
    result = _with_bias(op, _window_dot(grouped, shaped, steps, dilations), bias, rank)
    result = cast(result, x.dtype)
    return result.squeeze(0) if single else result


def conv1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Any = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve (batch, in, length) with (out, in / groups, width)."""
    return _convolve(1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Any = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve (batch, in, height, width) with (out, in / groups, kernel height, width)."""
    return _convolve(2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Any = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve (batch, in, depth, height, width) with (out, in / groups, *kernel)."""
    return _convolve(3, input, weight, bias, stride, padding, dilation, groups)


# ---- its transpose --------------------------------------------------------------------------


def _spread_out(op: str, x: Tensor, axis: int, step: int) -> Tensor:
    """step - 1 zeros between the elements of an axis."""
    if step == 1:
        return x
    size = x.shape[axis]
    require(
        size - 1,
        ShapeError,
        "the space is empty",
        op=op,
        expected="sizes > 0",
        got="{shape}",
        shape=x.shape,
    )
    node = build.unsqueeze(node_of(x), axis + 1)
    high = [0] * len(node.shape)
    high[axis + 1] = step - 1
    node = build.pad(node, [0] * len(node.shape), high)
    node = build.reshape(node, (*x.shape[:axis], size * step, *x.shape[axis + 1 :]))
    return wrap(build.slice_axis(node, axis, 0, (size - 1) * step + 1), x)


def _convolve_transposed(
    rank: int,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    groups: int,
    dilation: Sizes,
) -> Tensor:
    op = f"conv_transpose{rank}d"
    x, kernel = matched(op, input, weight)
    x, single = _batched(x, rank)
    groups = _check_inputs(op, x, kernel, groups, rank, True)
    steps = per_axis(op, "stride", stride, rank, 1)
    dilations = per_axis(op, "dilation", dilation, rank, 1)
    cut = per_axis(op, "padding", padding, rank, 0)
    extra = per_axis(op, "output_padding", output_padding, rank, 0)
    if any(e >= max(s, d) for e, s, d in zip(extra, steps, dilations)):
        raise UserError(
            "output_padding is too large", op=op, got=extra, expected="less than stride or dilation"
        )
    widths: Any = kernel.shape[2:]
    for i, step in enumerate(steps):
        x = _spread_out(op, x, 2 + i, step)
    reach = [d * (w - 1) for d, w in zip(dilations, widths)]
    pairs = [(r - c, r - c + e) for r, c, e in zip(reach, cut, extra)]
    padded = pad_tensor(x, _flat(pairs))
    check_fits(op, padded.shape[2:], widths, dilations)
    grouped = reshape(padded, x.shape[0], groups, x.shape[1] // groups, *padded.shape[2:])
    shaped = reshape(kernel, groups, kernel.shape[0] // groups, *kernel.shape[1:])
    flipped = flip(shaped, *range(3, 3 + rank)).transpose(1, 2)  # (groups, out, in, *window)
    result = _with_bias(op, _window_dot(grouped, flipped, (1,) * rank, dilations), bias, rank)
    result = cast(result, x.dtype)
    return result.squeeze(0) if single else result


def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of `conv1d`; the weight is (in, out / groups, width)."""
    return _convolve_transposed(
        1, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of `conv2d`; the weight is (in, out / groups, height, width)."""
    return _convolve_transposed(
        2, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of `conv3d`; the weight is (in, out / groups, *kernel)."""
    return _convolve_transposed(
        3, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


# ---- windows as columns ---------------------------------------------------------------------


def _columns(
    op: str, node: Node, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes
) -> Node:
    """(batch, channels, h, w) -> (batch, channels * window, windows)."""
    widths = per_axis(op, "kernel_size", kernel_size, 2, 1)
    dilations = per_axis(op, "dilation", dilation, 2, 1)
    edges = [0, 0, *per_axis(op, "padding", padding, 2, 0)]
    steps = per_axis(op, "stride", stride, 2, 1)
    node = build.pad(node, edges, edges)
    check_fits(op, node.shape[2:], widths, dilations)
    spread = windows_of(node, 2, widths, steps, dilations)
    batch, channels, rows, columns, high, wide = spread.shape
    permuted = build.permute(spread, (0, 1, 4, 5, 2, 3))
    return build.reshape(permuted, (batch, channels * high * wide, rows * columns))


def unfold(
    input: Any, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor:
    """Windows of (batch, channels, h, w) as columns: (batch, channels * window, windows)."""
    x, single = _batched(lift(input), 2)
    if x.ndim != 4:
        raise ShapeError(
            "wrong number of axes",
            op="unfold",
            expected="(batch, channels, h, w)",
            got=build.show(x.shape),
        )
    result = wrap(_columns("unfold", node_of(x), kernel_size, dilation, padding, stride), x)
    return result.squeeze(0) if single else result


def fold(
    input: Any,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """Columns added back where `unfold` took them from: its transpose."""
    x, single = _batched(lift(input), 1)
    if not x.dtype.is_float:
        raise DTypeError("needs floats", op="fold", expected="a float dtype", got=x.dtype)
    sizes = per_axis("fold", "output_size", output_size, 2, 1)
    window = per_axis("fold", "kernel_size", kernel_size, 2, 1)
    place = window[0] * window[1]
    if x.ndim != 3 or x.shape[1] % place:
        raise ShapeError(
            "the columns do not fit",
            op="fold",
            got=build.show(x.shape),
            expected=f"(batch, a multiple of {place}, windows)",
        )
    image = build.input_((x.shape[0], x.shape[1] // place, *sizes), x.dtype)
    columns = _columns("fold", image, kernel_size, dilation, padding, stride)
    if columns.shape != x.shape:
        raise ShapeError(
            "the columns do not fit",
            op="fold",
            expected=build.show(columns.shape),
            got=build.show(x.shape),
        )
    (node,) = gradients([columns], [node_of(x)], [image])  # linear: the image itself drops out
    result = wrap(build.like(image, 0) if node is None else node, x)
    return result.squeeze(0) if single else result


__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "fold",
    "per_axis",
    "unfold",
    "windows_of",
]
