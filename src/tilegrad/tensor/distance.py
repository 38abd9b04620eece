"""Distances between Tensors and between the rows of two of them; the cross product.

Invariant: distances are computed from differences, so near rows do not cancel; the derivative at
distance 0 is 0, as in PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.errors import ShapeError, UserError
from ..graph import build
from .elementwise import sub
from .maths import floating
from .reduce import norm
from .tensor import Tensor, lift, method


@method()
def dist(x: Any, other: Any, p: float = 2.0) -> Tensor:
    """The p-norm of x - other."""
    return norm(floating(sub(x, other)).reshape(-1), p)


def cdist(
    x1: Any, x2: Any, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> Tensor:
    """The p-norm of the difference of every row of x1 and every row of x2."""
    a, b = lift(x1), lift(x2)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ShapeError(
            "the rows do not fit",
            op="cdist",
            expected="(..., rows, features) twice",
            got=f"{build.show(a.shape)} and {build.show(b.shape)}",
        )
    if p < 0 or math.isnan(p):
        raise UserError("bad norm", op="cdist", expected="p >= 0", got=p)
    return norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


@method()
def cross(x: Any, other: Any, dim: int | None = None) -> Tensor:
    """The cross product along an axis of size 3: the first such axis unless told."""
    from .linalg.products import cross as along

    a, b = lift(x), lift(other)
    if dim is None:
        shape = build.broadcast_shapes("cross", a.shape, b.shape)
        found = [i - len(shape) for i, s in enumerate(shape) if isinstance(s, int) and s == 3]
        if not found:
            raise ShapeError("no axis of size 3", op="cross", got=build.show(shape))
        dim = found[0]
    return along(a, b, dim=dim)


__all__ = ["cdist", "cross", "dist"]
