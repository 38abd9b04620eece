"""Norms of vectors and matrices.

Invariant: floats below float32 are summed in float32 and rounded once; a norm of no elements is
0 where it has a zero, else an error, as PyTorch has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core.dtype import dtype_of
from ...core.errors import AxisError, DTypeError, ShapeError, UserError
from ...graph import build
from ...ir.whole import wholes
from ..maths import abs_, cast
from ..movement import movedim
from ..reduce import amax, amin
from ..reduce import norm as elements_norm
from ..tensor import Tensor
from .matrix import floats
from .spectral import svdvals

Dim = int | Sequence[int] | None


def _widened(op: str, x: Tensor, dtype: Any) -> Tensor:
    """x in the dtype asked for, which must hold all that x holds."""
    if dtype is None:
        return x
    wanted = dtype_of(dtype)
    if not wanted.is_float or wanted.bits < x.dtype.bits:
        raise DTypeError(
            "the dtype would lose digits",
            op=f"linalg.{op}",
            expected=f"{x.dtype} or wider",
            got=wanted,
        )
    return cast(x, wanted)


def vector_norm(
    x: Any, ord: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The norm of all elements, or along axes: the sum of |x| ** ord, to the power 1 / ord."""
    tensor = _widened("vector_norm", floats("vector_norm", x, low=True), dtype)
    if isinstance(ord, (str, bool)):
        raise UserError("unknown norm", op="linalg.vector_norm", expected="a number", got=repr(ord))
    sizes = [tensor.shape[a] for a in build.axes_of(tensor.node, dim, "vector_norm")]
    if 0 in sizes and (ord < 0 or ord == math.inf):
        raise ShapeError(
            f"no elements have no {ord} norm", op="linalg.vector_norm", got=build.show(tensor.shape)
        )
    return elements_norm(tensor, ord, dim, keepdim)


def _two_axes(op: str, x: Tensor, dim: Any) -> tuple[int, int]:
    axes = [build.axis_of(x.node, d, op) for d in dim]
    if len(axes) != 2 or axes[0] == axes[1]:
        raise AxisError(
            "a matrix has two axes", op=f"linalg.{op}", expected="two axes", got=tuple(dim)
        )
    return axes[0], axes[1]


def matrix_norm(
    A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Norms of matrices: "fro", "nuc", inf, -inf, 1, -1, 2, -2."""
    a = floats("matrix_norm", A, low=True)
    if a.ndim < 2:
        raise ShapeError(
            "needs matrices",
            op="linalg.matrix_norm",
            expected="at least 2 axes",
            got=build.show(a.shape),
        )
    a = _widened("matrix_norm", a, dtype)
    rows, columns = _two_axes("matrix_norm", a, dim)
    if ord == "fro":
        return vector_norm(a, 2, (rows, columns), keepdim)
    if ord in ("nuc", 2, -2):
        return _spectral_norm(a, ord, (rows, columns), keepdim)
    if ord not in (1, -1, math.inf, -math.inf):
        raise UserError(
            "unknown norm",
            op="linalg.matrix_norm",
            got=repr(ord),
            expected='"fro", "nuc", inf, -inf, 1, -1, 2 or -2',
        )
    added, compared = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = abs_(a).sum(added, keepdim=True)
    if sums.shape[compared] == 0:
        if ord < 0:
            raise ShapeError(
                f"no elements have no {ord} norm", op="linalg.matrix_norm", got=build.show(a.shape)
            )
        found = sums.sum(compared, keepdim=True)
    else:
        found = (amax if ord > 0 else amin)(sums, compared, True)
    return found if keepdim else found.squeeze((rows, columns))


def _spectral_norm(a: Tensor, ord: Any, axes: tuple[int, int], keepdim: bool) -> Tensor:
    """Norms of the singular values."""
    values = svdvals(movedim(a, axes, (-2, -1)))
    found = values.sum(-1) if ord == "nuc" else (amax if ord > 0 else amin)(values, -1)
    if keepdim:
        for axis in sorted(axes):
            found = found.unsqueeze(axis)
    return found


def norm(
    A: Any, ord: Any = None, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The norm of a vector or a matrix, by `ord` and the number of axes."""
    a = floats("norm", A, low=True)
    if dim is None and ord is not None and a.ndim not in (1, 2):
        raise ShapeError(
            "an order needs a vector or a matrix",
            op="linalg.norm",
            expected="1 or 2 axes, or dim=",
            got=build.show(a.shape),
        )
    axes = tuple(range(a.ndim)) if dim is None else wholes(dim, "linalg.norm", "axis")
    if isinstance(ord, str) or (ord is not None and len(axes) == 2):
        if a.ndim < 2:
            raise ShapeError(
                "needs matrices",
                op="linalg.norm",
                expected="at least 2 axes",
                got=build.show(a.shape),
            )
        return matrix_norm(a, ord, axes, keepdim, dtype=dtype)
    return vector_norm(a, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
