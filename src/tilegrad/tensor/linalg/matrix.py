"""What the functions of this folder ask of matrices, and how batches of them are laid out.

Invariant: past these checks a matrix is float32 or float64, its sizes are plain integers, and a
batch is one axis; empty matrices and batches never reach a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core import dtype as dtypes
from ...core.errors import DTypeError, ShapeError
from ...graph import build
from ...ir.symbol import Size
from ..tensor import Tensor, lift


def floats(op: str, x: Any, low: bool = False) -> Tensor:
    """A Tensor of floats; those below float32 only where `low` says so."""
    tensor = lift(x)
    if not tensor.dtype.is_float or (not low and tensor.dtype not in _DTYPES):
        raise DTypeError(
            "the dtype does not fit",
            op=f"linalg.{op}",
            expected="floats" if low else "float32 or float64",
            got=tensor.dtype,
            hint="cast it first: x.to(tilegrad.float32)",
        )
    return tensor


_DTYPES = (dtypes.float32, dtypes.float64)


def matrix(op: str, x: Any, square: bool = False) -> Tensor:
    """A batch of matrices (..., rows, columns)."""
    tensor = floats(op, x)
    if tensor.ndim < 2:
        raise ShapeError(
            "needs matrices",
            op=f"linalg.{op}",
            expected="at least 2 axes",
            got=build.show(tensor.shape),
        )
    if not all(isinstance(s, int) for s in tensor.shape[-2:]):
        raise ShapeError(
            "the sizes of a matrix must be known now",
            op=f"linalg.{op}",
            expected="integers for rows and columns",
            got=build.show(tensor.shape),
        )
    if square:
        squared(op, tensor)
    return tensor


def squared(op: str, x: Tensor) -> None:
    """Refuse matrices that are not square."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(
            "the matrices are not square",
            op=f"linalg.{op}",
            expected="(..., n, n)",
            got=build.show(x.shape),
        )


def same_dtype(op: str, a: Tensor, b: Tensor) -> None:
    """Refuse two dtypes."""
    if a.dtype is not b.dtype:
        raise DTypeError(
            "the dtypes differ",
            op=f"linalg.{op}",
            expected=a.dtype,
            got=b.dtype,
            hint="cast with .to(dtype)",
        )


def is_empty(*tensors: Tensor) -> bool:
    """Whether one of the Tensors has no elements."""
    return any(0 in t.shape for t in tensors)


def stacked(a: Tensor) -> Tensor:
    """All leading axes as one: (batch, rows, columns)."""
    lead = a.shape[:-2]
    return a.reshape(math.prod(lead) if lead else 1, *a.shape[-2:])


def unstacked(a: Tensor, lead: Sequence[Size]) -> Tensor:
    """The leading axis as those it was made of."""
    return a.reshape(*lead, *a.shape[1:])


__all__ = ["floats", "is_empty", "matrix", "same_dtype", "squared", "stacked", "unstacked"]
