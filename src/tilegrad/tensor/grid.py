"""Sampling images at places of a grid: `grid_sample`, and `affine_grid`, which makes one.

Invariant: points are in [-1, 1] along each axis, x first, as in PyTorch; what lies outside is 0,
the border's value, or the reflection's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import ShapeError, UserError
from ..graph import build
from .creation import linspace, ones_like
from .elementwise import remainder
from .maths import cast, floor, pick, round_
from .movement import stack
from .tensor import Tensor, lift

PADDINGS = ("zeros", "border", "reflection")


def affine_grid(theta: Any, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Where each element of an image of a size comes from under an affine map."""
    matrix = lift(theta)
    space = tuple(size)[2:]
    if len(space) not in (2, 3):
        raise ShapeError(
            "not the size of an image",
            op="affine_grid",
            got=tuple(size),
            expected="(batch, channels, [depth,] height, width)",
        )
    lines = []
    for count in space:
        line = linspace(-1.0, 1.0, count, dtype=matrix.dtype)
        lines.append(line if align_corners else line * ((count - 1) / count))
    axes = [
        line.reshape(*[-1 if i == j else 1 for j in range(len(space))]).expand(*space)
        for i, line in enumerate(lines)
    ]
    points = stack([*reversed(axes), ones_like(axes[0])], -1)  # (*space, rank + 1)
    flat = points.reshape(1, -1, len(space) + 1) @ matrix.transpose(1, 2)
    return flat.reshape(size[0], *space, len(space))


def grid_sample(
    input: Any,
    grid: Any,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """(batch, channels, *space) looked at in the places of a grid (batch, *out, rank)."""
    x, points = lift(input), lift(grid)
    rank = x.ndim - 2
    if rank not in (2, 3) or points.ndim != x.ndim or points.shape[-1] != rank:
        raise ShapeError(
            "the grid does not fit",
            op="grid_sample",
            expected=f"(batch, *out, {rank})",
            got=build.show(points.shape),
        )
    if mode not in ("bilinear", "nearest") or padding_mode not in PADDINGS:
        raise UserError(
            "unknown mode",
            op="grid_sample",
            got=f"{mode!r}, {padding_mode!r}",
            expected="bilinear or nearest; " + ", ".join(PADDINGS),
        )
    corners = bool(align_corners)
    found = [
        _place(points[..., rank - 1 - i], x.shape[2 + i], padding_mode, corners)
        for i in range(rank)
    ]
    if mode == "nearest":
        return _picked(x, [round_(p) for p in found], padding_mode)
    low = [floor(p).detach() for p in found]
    total: Any = 0.0
    for corner in itertools.product((0, 1), repeat=rank):
        weight: Any = 1.0
        for place, base, up in zip(found, low, corner):
            weight = weight * ((place - base) if up else (base + 1.0 - place))
        part = _picked(x, [base + up for base, up in zip(low, corner)], padding_mode)
        total = total + part * weight.unsqueeze(1)
    return cast(total, x.dtype)


def _place(unit: Tensor, size: Any, padding: str, corners: bool) -> Tensor:
    """Places in [-1, 1] as places among elements, brought inside where the padding says so."""
    place = (unit + 1.0) * ((size - 1) / 2) if corners else ((unit + 1.0) * size - 1.0) / 2
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
        if span == 0:
            place = place * 0.0
        else:
            away = (place - low).abs()
            phase = remainder(away, 2 * span)
            place = pick(phase > span, 2 * span - phase, phase) + low
    return place if padding == "zeros" else place.clamp(0.0, size - 1.0)


def _picked(x: Tensor, points: list[Tensor], padding: str) -> Tensor:
    """Elements at whole places, (batch, channels, *out); 0 outside."""
    inside: Any = None
    indices = []
    for place, size in zip(points, x.shape[2:]):
        here = (place >= 0) & (place <= size - 1)  # false for nan too
        inside = here if inside is None else inside & here
        indices.append(cast(pick(here, place, 0.0), dtypes.int64))
    batch = lift(list(range(int(x.shape[0])))).reshape(-1, *[1] * (x.ndim - 2))
    moved = x.movedim(1, -1)  # (batch, *space, channels)
    found = moved[(batch, *indices)].movedim(-1, 1)
    return pick(inside.unsqueeze(1), found, 0.0) if padding == "zeros" else found


__all__ = ["affine_grid", "grid_sample"]
