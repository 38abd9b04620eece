# ruff: noqa: F401
"""Linear algebra of matrices on kernels of our own; public as `tilegrad.linalg`."""

from .norms import matrix_norm, norm, vector_norm
from .products import cross, matrix_power, multi_dot, vecdot
from .solve import (
    cholesky,
    det,
    inv,
    lstsq,
    lu,
    lu_factor,
    lu_solve,
    qr,
    slogdet,
    solve,
    solve_triangular,
    tensorinv,
    tensorsolve,
)
from .spectral import eigh, eigvalsh, svd, svdvals
