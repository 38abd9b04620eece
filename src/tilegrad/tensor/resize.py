"""Resizing images: interpolation along each axis of space, and pixel shuffles.

Invariant: interpolation is separable; where to look and how much to weigh is computed once, in
the precision PyTorch uses, when the sizes are known. Space comes after batch and channels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.errors import ShapeError, UserError
from ..graph import build
from ..ir.requirement import require
from ..ir.whole import is_one, whole
from .maths import cast
from .movement import permute, reshape
from .pooling import adaptive_avg_pool, from_flat
from .tensor import Tensor, from_array, lift, wrap

Array = np.ndarray[Any, Any]
RANKS = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "area": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
}
LINEAR = ("linear", "bilinear", "trilinear")


def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """(batch, channels, *space) resized to a size or by a factor."""
    x = lift(input)
    rank = x.ndim - 2
    _check(x, rank, mode, align_corners, antialias)
    targets, scales = _targets(x, rank, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return adaptive_avg_pool(rank, x, targets)
    number = np.float64 if x.dtype is dtypes.float64 else np.float32
    result = x if mode.startswith("nearest") or x.dtype.bits >= 32 else x.float()
    for i, (target, scale) in enumerate(zip(targets, scales)):
        result = _along(result, 2 + i, target, scale, mode, bool(align_corners), number)
    return cast(result, x.dtype)


def upsample(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """`interpolate` by its older name."""
    return interpolate(input, size, scale_factor, mode, align_corners)


def upsample_nearest(input: Any, size: Any = None, scale_factor: Any = None) -> Tensor:
    """`interpolate` by the nearest element."""
    return interpolate(input, size, scale_factor)


def upsample_bilinear(input: Any, size: Any = None, scale_factor: Any = None) -> Tensor:
    """`interpolate` bilinearly, corner to corner."""
    return interpolate(input, size, scale_factor, "bilinear", align_corners=True)


def _check(x: Tensor, rank: int, mode: str, align_corners: bool | None, antialias: bool) -> None:
    if mode not in RANKS or rank not in RANKS[mode]:
        raise UserError(
            "the mode does not fit",
            op="interpolate",
            expected=", ".join(f"{m} ({'/'.join(map(str, r))}d)" for m, r in RANKS.items()),
            got=f"mode {mode!r} for shape {build.show(x.shape)}",
        )
    if align_corners is not None and mode not in (*LINEAR, "bicubic"):
        raise UserError(
            "align_corners has no meaning here",
            op="interpolate",
            expected="a linear or cubic mode",
            got=mode,
        )
    if antialias:
        raise UserError(
            "antialias is not supported", op="interpolate", expected="antialias=False", got=True
        )
    if not all(isinstance(s, int) for s in x.shape[2:]):
        raise ShapeError("needs known sizes", op="interpolate", got=build.show(x.shape))


def _targets(
    x: Tensor, rank: int, size: Any, factor: Any, recompute: bool | None
) -> tuple[list[int], list[float | None]]:
    """Target sizes, and the factors where those given count."""
    if (size is None) == (factor is None):
        raise UserError(
            "needs size or scale_factor",
            op="interpolate",
            expected="one of them",
            got="both" if size is not None else "neither",
        )
    given = size if factor is None else factor
    found = [given] * rank if is_one(given) else list(given)
    if factor is None:
        found = [whole(f, "interpolate", "size") for f in found]
    if len(found) != rank or not all(f > 0 for f in found):
        raise UserError(
            "bad size or scale_factor",
            op="interpolate",
            got=given,
            expected=f"a positive number or {rank} of them",
        )
    if factor is None:
        return found, [None] * rank
    sizes = [math.floor(s * f) for s, f in zip(x.shape[2:], found)]
    return sizes, [None] * rank if recompute else [float(f) for f in found]


def _along(
    x: Tensor, axis: int, target: int, factor: float | None, mode: str, align: bool, number: Any
) -> Tensor:
    """One axis resized."""
    size: Any = x.shape[axis]
    if size == target and factor in (None, 1.0):
        return x
    scale = number(1.0 / factor) if factor else number(size) / number(target)
    place = np.arange(target).astype(number)
    if mode == "nearest":
        return _take(x, axis, np.floor(place * scale), size)
    if mode == "nearest-exact":
        return _take(x, axis, np.floor((place + number(0.5)) * scale), size)
    if align:
        source = place * (number(size - 1) / number(target - 1) if target > 1 else number(0))
    else:
        source = scale * (place + number(0.5)) - number(0.5)
    if mode in LINEAR:
        return _linear(x, axis, np.maximum(source, number(0)), size)
    return _cubic(x, axis, source, size)


def _take(x: Tensor, axis: int, index: Array, size: int) -> Tensor:
    found = np.clip(index.astype(np.int64), 0, size - 1)
    return x.index_select(axis, from_flat(found))


def _weigh(x: Tensor, axis: int, weight: Array) -> Tensor:
    shape = [1] * x.ndim
    shape[axis] = weight.shape[0]
    return x * wrap(from_array(weight.astype(x.dtype.numpy).reshape(shape)))


def _linear(x: Tensor, axis: int, source: Array, size: int) -> Tensor:
    below = np.minimum(np.floor(source), size - 1).astype(source.dtype)
    share = np.clip(source - below, 0, 1)
    low, high = _take(x, axis, below, size), _take(x, axis, below + 1, size)
    return _weigh(low, axis, 1 - share) + _weigh(high, axis, share)


def _cubic(x: Tensor, axis: int, source: Array, size: int) -> Tensor:
    below = np.floor(source)
    total: Any = None
    for tap, weight in enumerate(_cubic_weights(source - below)):
        part = _weigh(_take(x, axis, below + (tap - 1), size), axis, weight)
        total = part if total is None else total + part
    return total


def _cubic_weights(t: Array, a: float = -0.75) -> list[Array]:
    """Keys' cubic convolution for the four neighbours of a point t past the second."""

    def near(d: Array) -> Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Array) -> Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


# ---- shuffles -------------------------------------------------------------------------------


def _image(op: str, x: Any) -> Tensor:
    found = lift(x)
    if found.ndim < 3:
        raise ShapeError(
            "needs an image",
            op=op,
            expected="(..., channels, height, width)",
            got=build.show(found.shape),
        )
    return found


def _divides(op: str, whole: Any, part: int, what: str) -> None:
    require(
        whole % part,
        ShapeError,
        "the {what} do not divide",
        op=op,
        expected="a multiple of {part}",
        got="{whole}",
        exact=True,
        what=what,
        part=part,
        whole=whole,
    )


def pixel_shuffle(x: Any, upscale_factor: int) -> Tensor:
    """(..., c * r * r, h, w) -> (..., c, h * r, w * r)."""
    found, r = _image("pixel_shuffle", x), whole(upscale_factor, "pixel_shuffle", "the factor")
    *lead, channels, height, width = found.shape
    _divides("pixel_shuffle", channels, r * r, "channels")
    n = len(lead)
    cut = reshape(found, *lead, channels // (r * r), r, r, height, width)
    permuted = permute(cut, *range(n), n, n + 3, n + 1, n + 4, n + 2)
    return reshape(permuted, *lead, channels // (r * r), height * r, width * r)


def pixel_unshuffle(x: Any, downscale_factor: int) -> Tensor:
    """(..., c, h * r, w * r) -> (..., c * r * r, h, w)."""
    found = _image("pixel_unshuffle", x)
    r = whole(downscale_factor, "pixel_unshuffle", "the factor")
    *lead, channels, height, width = found.shape
    _divides("pixel_unshuffle", height, r, "rows")
    _divides("pixel_unshuffle", width, r, "columns")
    n = len(lead)
    cut = reshape(found, *lead, channels, height // r, r, width // r, r)
    permuted = permute(cut, *range(n), n, n + 2, n + 4, n + 1, n + 3)
    return reshape(permuted, *lead, channels * r * r, height // r, width // r)


def channel_shuffle(x: Any, groups: int) -> Tensor:
    """Channels (axis 1) dealt out over groups."""
    found, groups = lift(x), whole(groups, "channel_shuffle", "groups")
    build.axis_of(found.node, 1, "channel_shuffle")
    _divides("channel_shuffle", found.shape[1], groups, "channels")
    cut = found.unflatten(1, (groups, found.shape[1] // groups))
    return reshape(cut.transpose(1, 2), found.shape)


__all__ = ["channel_shuffle", "interpolate", "pixel_shuffle", "pixel_unshuffle"]
