"""Eigenvalues and singular values: not computed here yet, and refused with a word.

Invariant: every function here raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ...core.errors import UserError


def _refused(op: str) -> NoReturn:
    raise UserError(
        "eigenvalues and singular values are not computed",
        op=f"linalg.{op}",
        expected="cholesky, qr, lu, solve, inv, det",
        hint="x.numpy() and numpy.linalg have it; nothing is differentiated there",
    )


def eigh(A: Any, UPLO: str = "L") -> NoReturn:
    """Refused."""
    _refused("eigh")


def eigvalsh(A: Any, UPLO: str = "L") -> NoReturn:
    """Refused."""
    _refused("eigvalsh")


def svd(A: Any, full_matrices: bool = True) -> NoReturn:
    """Refused."""
    _refused("svd")


def svdvals(A: Any) -> Any:
    """Refused."""
    _refused("svdvals")
