"""`tilegrad.linalg`: factorisations, solves and what follows from them, by PyTorch's names.

Values are computed when they are read, so a matrix that has no factorisation is no error: a matrix
that is not positive definite gives nan, a singular one inf or nan where one divides by its zero
pivot. Invariant: results and gradients are PyTorch's; kernels see one batch axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core import dtype as dtypes
from ...core.errors import ShapeError, UserError
from ...graph import build
from ..control import scan
from ..creation import arange, empty, eye, ones, zeros
from ..elementwise import where
from ..maths import cast
from ..movement import broadcast_shapes, broadcast_to, cat, movedim
from ..tensor import Tensor, lift
from . import factor
from .factor import LOWER, UPPER, transpose_of
from .matrix import floats, is_empty, matrix, same_dtype, squared, stacked, unstacked


class QR(NamedTuple):
    """Q with orthonormal columns, R upper triangular."""

    Q: Tensor
    R: Tensor


class LU(NamedTuple):
    """A = P L U."""

    P: Tensor
    L: Tensor
    U: Tensor


class LUFactor(NamedTuple):
    """L and U in one matrix; the row that each was swapped with, counted from 1."""

    LU: Tensor
    pivots: Tensor


class LogDeterminant(NamedTuple):
    """Sign and logarithm of the size of a determinant."""

    sign: Tensor
    logabsdet: Tensor


class LeastSquares(NamedTuple):
    """A solution, and the squared sizes of what it leaves over."""

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


# ---- factorisations -------------------------------------------------------------------------


def cholesky(A: Any, *, upper: bool = False) -> Tensor:
    """L with L L' = A of symmetric positive definite A (its lower triangle is read)."""
    a = matrix("cholesky", A, square=True)
    if is_empty(a):
        return zeros(*a.shape, dtype=a.dtype)
    lower = unstacked(factor.cholesky(stacked(transpose_of(a) if upper else a)), a.shape[:-2])
    return transpose_of(lower) if upper else lower


def lu_factor(A: Any, *, pivot: bool = True) -> LUFactor:
    """L (without its ones) and U in one matrix, and the row swaps."""
    a = _pivoted("lu_factor", A, pivot)
    lead, least = a.shape[:-2], min(a.shape[-2:])
    if is_empty(a):
        return LUFactor(zeros(*a.shape, dtype=a.dtype), zeros(*lead, least, dtype=dtypes.int32))
    packed, _, swaps = factor.lu(stacked(a))
    return LUFactor(unstacked(packed, lead), unstacked(swaps + 1, lead))


def _pivoted(op: str, A: Any, pivot: bool) -> Tensor:
    if not pivot:
        raise UserError(
            "LU is computed with row swaps only",
            op=f"linalg.{op}",
            expected="pivot=True",
            got=False,
        )
    return matrix(op, A)


def lu(A: Any, *, pivot: bool = True) -> LU:
    """P, L, U with A = P L U: P a permutation, L lower with ones, U upper triangular."""
    a = _pivoted("lu", A, pivot)
    lead, (m, n) = a.shape[:-2], a.shape[-2:]
    k: int = min(m, n)
    if is_empty(a):
        unit = broadcast_to(eye(m, dtype=a.dtype), (*lead, m, m))
        return LU(unit, zeros(*lead, m, k, dtype=a.dtype), zeros(*lead, k, n, dtype=a.dtype))
    packed, order, _ = factor.lu(stacked(a))
    place = cast(order.unsqueeze(-2) == arange(m).unsqueeze(-1), a.dtype)
    parts = place, factor.lower_of(packed), packed[:, :k].triu()
    return LU(*[unstacked(p, lead) for p in parts])


def lu_solve(LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """X with A X = B (X A = B if not left, A' for A if adjoint) from what lu_factor gave."""
    packed, b = matrix("lu_solve", LU, square=True), matrix("lu_solve", B)
    if not left:
        return transpose_of(lu_solve(packed, pivots, transpose_of(b), adjoint=not adjoint))
    packed, b, lead = _together("lu_solve", packed, b)
    if is_empty(packed, b):
        return zeros(*lead, *b.shape[-2:], dtype=b.dtype)
    swaps = broadcast_to(lift(pivots), (*lead, packed.shape[-1])).reshape(-1, packed.shape[-1])
    order = _order(cast(swaps, dtypes.int64) - 1)
    if adjoint:
        x = factor.triangular(transpose_of(packed), b, LOWER, False)
        x = factor.in_order(
            factor.triangular(transpose_of(packed), x, UPPER, True), order.argsort(-1)
        )
    else:
        x = factor.triangular(packed, factor.in_order(b, order), LOWER, True)
        x = factor.triangular(packed, x, UPPER, False)
    return unstacked(x, lead)


def _order(swaps: Tensor) -> Tensor:
    """The row at each place after swaps (batch, n), counted from 0."""
    positions = arange(swaps.shape[-1])

    def step(order: Tensor, one: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        k, other = one[0], one[1].unsqueeze(-1)
        first = where(positions == k, order, 0).sum(-1, keepdim=True)
        second = where(positions == other, order, 0).sum(-1, keepdim=True)
        return where(positions == k, second, where(positions == other, first, order)), None

    return scan(step, broadcast_to(positions, swaps.shape), (positions, movedim(swaps, 1, 0)))[0]


def qr(A: Any, mode: str = "reduced") -> QR:
    """A = Q R; mode "complete" gives a square Q, mode "r" gives R alone."""
    a = matrix("qr", A)
    if mode not in ("reduced", "complete", "r"):
        raise UserError(
            "unknown mode", op="linalg.qr", got=repr(mode), expected='"reduced", "complete" or "r"'
        )
    lead, (m, n) = a.shape[:-2], a.shape[-2:]
    k: int = m if mode == "complete" else min(m, n)
    if is_empty(a):
        q = broadcast_to(eye(m, k, dtype=a.dtype), (*lead, m, k))
        r = zeros(*lead, k, n, dtype=a.dtype)
    else:
        q, r = (unstacked(x, lead) for x in _qr(stacked(a), k))
    return QR(empty(0, dtype=a.dtype) if mode == "r" else q, r)


def _qr(a: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n = a.shape[-1]
    if k > n:
        return factor.complete_qr(a)
    if n == k:
        return factor.qr(a)
    q, r = factor.qr(a[:, :, :k])
    return q, cat([r, transpose_of(q) @ a[:, :, k:]], 2)


# ---- solves ---------------------------------------------------------------------------------


def _together(op: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Both with one batch axis, after their leading axes were broadcast; these."""
    same_dtype(op, a, b)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            "the sizes do not fit",
            op=f"linalg.{op}",
            expected=f"{a.shape[-1]} rows",
            got=build.show(b.shape),
        )
    lead = tuple(broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    a = broadcast_to(a, (*lead, *a.shape[-2:]))
    b = broadcast_to(b, (*lead, *b.shape[-2:]))
    return stacked(a), stacked(b), lead


def _solved(op: str, a: Tensor, b: Tensor, function: Any, *options: Any) -> Tensor:
    a, b, lead = _together(op, a, b)
    if is_empty(a, b):
        return zeros(*lead, *b.shape[-2:], dtype=b.dtype)
    return unstacked(function(a, b, *options), lead)


def solve_triangular(
    A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """X with A X = B (X A = B if not left) of a triangular A: the other triangle is not read."""
    a, b = matrix("solve_triangular", A, square=True), matrix("solve_triangular", B)
    if left:
        kind = UPPER if upper else LOWER
        return _solved("solve_triangular", a, b, factor.triangular, kind, unitriangular)
    kind = LOWER if upper else UPPER
    a, b = transpose_of(a), transpose_of(b)
    return transpose_of(_solved("solve_triangular", a, b, factor.triangular, kind, unitriangular))


def solve(A: Any, B: Any, *, left: bool = True) -> Tensor:
    """X with A X = B (X A = B if not left); B may be vectors."""
    a, b = matrix("solve", A, square=True), floats("solve", B)
    if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):
        if not left:
            raise ShapeError(
                "vectors stand right of A",
                op="linalg.solve",
                expected="left=True",
                got=build.show(b.shape),
            )
        return solve(a, matrix("solve", b.unsqueeze(-1))).squeeze(-1)
    b = matrix("solve", b)
    if left:
        return _solved("solve", a, b, factor.solved)
    return transpose_of(_solved("solve", a, transpose_of(b), factor.solved, True))


def inv(A: Any) -> Tensor:
    """The inverse of square matrices."""
    a = matrix("inv", A, square=True)
    return _solved("inv", a, eye(a.shape[-1], dtype=a.dtype), factor.solved)


def det(A: Any) -> Tensor:
    """The determinant of square matrices."""
    a = matrix("det", A, square=True)
    if is_empty(a):
        return ones(*a.shape[:-2], dtype=a.dtype)
    return unstacked(factor.determinant(stacked(a)), a.shape[:-2])


def slogdet(A: Any) -> LogDeterminant:
    """Sign and logarithm of the size of the determinant."""
    a = matrix("slogdet", A, square=True)
    lead = a.shape[:-2]
    if is_empty(a):
        return LogDeterminant(ones(*lead, dtype=a.dtype), zeros(*lead, dtype=a.dtype))
    return LogDeterminant(*[unstacked(x, lead) for x in factor.log_determinant(stacked(a))])


def lstsq(A: Any, B: Any, rcond: float | None = None, *, driver: str | None = None) -> LeastSquares:
    """The X of least size that brings A X nearest to B, for A of full rank (driver "gels")."""
    a, b = matrix("lstsq", A), matrix("lstsq", B)
    if driver not in (None, "gels") or rcond is not None:
        raise UserError(
            "only matrices of full rank are solved",
            op="linalg.lstsq",
            expected='driver="gels" without rcond',
            got=driver or rcond,
        )
    same_dtype("lstsq", a, b)
    m, n = a.shape[-2:]
    if b.shape[-2] != m:
        raise ShapeError(
            "the sizes do not fit", op="linalg.lstsq", expected=f"{m} rows", got=build.show(b.shape)
        )
    none = empty(0, dtype=a.dtype)
    if m >= n:
        q, r = qr(a)
        x = solve_triangular(r, transpose_of(q) @ b, upper=True)
        over = b - a @ x
        left = (over * over).sum(-2) if m > n else none
        return LeastSquares(x, left, empty(0, dtype=dtypes.int64), none)
    q, r = qr(transpose_of(a))
    x = q @ solve_triangular(transpose_of(r), b, upper=False)
    return LeastSquares(x, none, empty(0, dtype=dtypes.int64), none)


def tensorinv(A: Any, ind: int = 2) -> Tensor:
    """The inverse for tensordot(A, x, ind): the first `ind` axes stand for the rows."""
    a = floats("tensorinv", A)
    rows, columns = a.shape[:ind], a.shape[ind:]
    count = _product("tensorinv", rows)
    flat = a.reshape(count, -1)
    squared("tensorinv", flat)
    return inv(flat).reshape(*columns, *rows)


def tensorsolve(A: Any, B: Any, dims: Any = None) -> Tensor:
    """X with tensordot(A, X, X.ndim) = B."""
    a, b = floats("tensorsolve", A), floats("tensorsolve", B)
    if dims is not None:
        a = movedim(a, tuple(dims), tuple(range(a.ndim - len(dims), a.ndim)))
    rest = a.shape[b.ndim :]
    flat = a.reshape(_product("tensorsolve", b.shape), -1)
    squared("tensorsolve", flat)
    return solve(flat, b.reshape(-1)).reshape(*rest)


def _product(op: str, sizes: Any) -> int:
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            raise ShapeError("the sizes must be known now", op=f"linalg.{op}", got=str(size))
        count *= size
    return count
