"""The factorisations and solves with their derivatives, on batches (batch, rows, columns).

A factorisation has its forward derivative by a rule; the reverse one is the transpose of it. A
solve has both, since each is a solve again. Rules call these same functions, so derivatives of
any order exist, and what was factored is not factored again. Invariant: a rule uses only what the
triangle it stands for holds; the gradient of a triangle is zero outside of it, that of a symmetric
matrix is symmetric.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes

from ...core.errors import UserError
from ..creation import arange, eye
from ..elementwise import where
from ..maths import abs_, cast, log, sign
from ..movement import cat, swapaxes
from ..padding import diag_embed
from ..tensor import Tensor
from . import blocked
from .blocked import in_order
from .derived import Derived

LOWER, UPPER = "lower", "upper"
OPPOSITE = {LOWER: UPPER, UPPER: LOWER}
Tensors = tuple[Tensor, ...]


def transpose_of(a: Tensor) -> Tensor:
    """The matrices transposed."""
    return swapaxes(a, -1, -2)


# ---- triangular solves ----------------------------------------------------------------------


def _triangular(a: Tensor, b: Tensor, kind: str, unit: bool) -> Tensor:
    return (blocked.solve_lower if kind == LOWER else blocked.solve_upper)(a, b, unit)


def _triangle(x: Tensor, kind: str, unit: bool) -> Tensor:
    """The part of a matrix that a solve reads."""
    return x.tril(-1 if unit else 0) if kind == LOWER else x.triu(1 if unit else 0)


def _triangular_tangent(
    inputs: Tensors, outputs: Tensors, moved: Tensors, kind: str, unit: bool
) -> Tensors:
    change = _triangle(moved[0], kind, unit) @ outputs[0]
    return (triangular(inputs[0], moved[1] - change, kind, unit),)


def _triangular_cotangent(
    inputs: Tensors, outputs: Tensors, given: Tensors, kind: str, unit: bool
) -> Tensors:
    y = triangular(transpose_of(inputs[0]), given[0], OPPOSITE[kind], unit)
    return -_triangle(y @ transpose_of(outputs[0]), kind, unit), y


# x with a x = b: a (batch, n, n) triangular, b (batch, n, columns), kind, unit diagonal or not.
triangular = Derived(_triangular, _triangular_tangent, _triangular_cotangent)


def lower_quotient(a: Tensor, b: Tensor, unit: bool = False) -> Tensor:
    """a^-1 b of a lower triangular a."""
    return triangular(a, b, LOWER, unit)


def upper_quotient(b: Tensor, a: Tensor) -> Tensor:
    """b a^-1 of an upper triangular a."""
    return transpose_of(triangular(transpose_of(a), transpose_of(b), LOWER, False))


# ---- LU and general solves ------------------------------------------------------------------


def lower_of(packed: Tensor) -> Tensor:
    """L (batch, m, k) of a matrix that holds L and U, with its ones."""
    _, m, n = packed.shape
    k: int = min(m, n)
    return packed[:, :, :k].tril(-1) + eye(m, k, dtype=packed.dtype)


def _lu_tangent(inputs: Tensors, outputs: Tensors, moved: Tensors) -> tuple[Any, ...]:
    """dL = L times the lower part of L^-1 dA U^-1, dU its upper part times U."""
    packed, order, _ = outputs
    change = in_order(moved[0], order)
    _, m, n = packed.shape
    k: int = min(m, n)
    lower, upper = lower_of(packed), packed[:, :k].triu()
    square, corner = lower[:, :k], upper[:, :, :k]
    inner = upper_quotient(lower_quotient(square, change[:, :k, :k], True), corner)
    left, right = square @ inner.tril(-1), inner.triu() @ corner
    found = left + right
    if n > k:
        rest = change[:, :, k:] - left @ upper[:, :, k:]
        found = cat([found, lower_quotient(square, rest, True)], 2)
    if m > k:
        found = cat([found, upper_quotient(change[:, k:] - lower[:, k:] @ right, corner)], 1)
    return found, None, None


# (L and U in one matrix, the row at each place, what each place was swapped with)
lu = Derived(blocked.lu, _lu_tangent)


def _general(a: Tensor, packed: Tensor, order: Tensor, b: Tensor, transposed: bool) -> Tensor:
    if not transposed:
        return blocked.solve_upper(packed, blocked.solve_lower(packed, in_order(b, order), True))
    x = blocked.solve_upper(
        transpose_of(packed), blocked.solve_lower(transpose_of(packed), b), True
    )
    return in_order(x, order.argsort(-1))


def _general_tangent(
    inputs: Tensors, outputs: Tensors, moved: Tensors, transposed: bool
) -> Tensors:
    a, packed, order, _ = inputs
    change = (transpose_of(moved[0]) if transposed else moved[0]) @ outputs[0]
    return (general(a, packed, order, moved[3] - change, transposed),)


def _general_cotangent(
    inputs: Tensors, outputs: Tensors, given: Tensors, transposed: bool
) -> tuple[Any, ...]:
    a, packed, order, _ = inputs
    y = general(a, packed, order, given[0], not transposed)
    change = outputs[0] @ transpose_of(y) if transposed else y @ transpose_of(outputs[0])
    return -change, None, None, y


# x with a x = b (a' x = b if transposed) by the LU of a, which is no variable of its own.
general = Derived(_general, _general_tangent, _general_cotangent)


def solved(a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
    """x with a x = b (a' x = b if transposed): a (batch, n, n), b (batch, n, columns)."""
    packed, order, _ = lu(a.detach())
    return general(a, packed, order, b, transposed)


# ---- determinants ---------------------------------------------------------------------------


def sign_of(swaps: Tensor, like: Tensor) -> Tensor:
    """1 or -1 for each permutation (batch, k): an odd number of swaps turns the sign."""
    moved = (swaps != arange(swaps.shape[-1], dtype=swaps.dtype)).sum(-1)
    return cast(1 - moved % 2 * 2, like.dtype)


def _determinant(a: Tensor, packed: Tensor, order: Tensor, swaps: Tensor) -> Tensor:
    return packed.diagonal(0, 1, 2).prod(-1) * sign_of(swaps, a)


def _determinant_tangent(inputs: Tensors, outputs: Tensors, moved: Tensors) -> Tensors:
    """The sum of cofactors times dA; a zero pivot is taken as a very small one."""
    a, packed, order, swaps = inputs
    pivots = packed.diagonal(0, 1, 2)
    small = float(ml_dtypes.finfo(a.dtype.numpy).eps)
    added = where(pivots == 0.0, small, 0.0)
    unit = eye(a.shape[-1], dtype=a.dtype).expand(*a.shape)
    inverse = general(a, packed + diag_embed(added), order, unit, False)
    size = ((pivots + added).prod(-1) * sign_of(swaps, a)).reshape(-1, 1, 1)
    where_zero = (added != 0.0).any(-1)
    value = where(where_zero, size[:, 0, 0], outputs[0]).reshape(-1, 1, 1)
    return ((transpose_of(inverse) * value * moved[0]).sum((-1, -2)),)


_by_lu = Derived(_determinant, _determinant_tangent)


def determinant(a: Tensor) -> Tensor:
    """The determinant (batch,) of a (batch, n, n)."""
    return _by_lu(a, *lu(a.detach()))


def _logarithm(a: Tensor, packed: Tensor, order: Tensor, swaps: Tensor) -> Tensors:
    pivots = packed.diagonal(0, 1, 2)
    return sign(pivots).prod(-1) * sign_of(swaps, a), log(abs_(pivots)).sum(-1)


def _logarithm_tangent(inputs: Tensors, outputs: Tensors, moved: Tensors) -> Tensors:
    """The trace of A^-1 dA; the sign does not move."""
    change = general(*inputs[:3], moved[0], False)
    return outputs[0] * 0.0, change.diagonal(0, 1, 2).sum(-1)


_logarithm_by_lu = Derived(_logarithm, _logarithm_tangent)


def log_determinant(a: Tensor) -> Tensors:
    """Sign and logarithm of the size of the determinant, (batch,) each."""
    return _logarithm_by_lu(a, *lu(a.detach()))


# ---- Cholesky and QR ------------------------------------------------------------------------


def _cholesky_tangent(inputs: Tensors, outputs: Tensors, moved: Tensors) -> Tensors:
    """dL = L times the lower half of L^-1 dA L^-T."""
    (lower,) = outputs
    change = (moved[0] + transpose_of(moved[0])) * 0.5
    inner = lower_quotient(lower, transpose_of(lower_quotient(lower, change)))
    return (lower @ (inner.tril() + inner.tril(-1)) * 0.5,)


# Lower L with L L' = a: (batch, n, n)
cholesky = Derived(blocked.cholesky, _cholesky_tangent)


def _qr_tangent(inputs: Tensors, outputs: Tensors, moved: Tensors) -> Tensors:
    """dQ and dR of a = Q R: Q' dQ is antisymmetric, dR upper triangular."""
    q, r = outputs
    quotient = upper_quotient(moved[0], r)
    inner = transpose_of(q) @ quotient
    skew = inner.tril(-1) - transpose_of(inner.tril(-1))
    return quotient - q @ (inner - skew), (inner - skew) @ r


# Q (batch, m, n) and R (batch, n, n) of a (batch, m, n) with m >= n
qr = Derived(blocked.qr, _qr_tangent)


def _complete_qr(a: Tensor) -> tuple[Tensor, Tensor]:
    return blocked.qr(a, complete=True)


def _no_tangent(inputs: Tensors, outputs: Tensors, moved: Tensors) -> Tensors:
    raise UserError(
        "the complete Q has no derivative: its last columns are not unique",
        op="linalg.qr",
        hint='use mode="reduced"',
    )


# Q (batch, m, m) and R (batch, m, n) with m > n
complete_qr = Derived(_complete_qr, _no_tangent)
