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

__all__ = [
    "cholesky",
    "cross",
    "det",
    "eigh",
    "eigvalsh",
    "inv",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_norm",
    "matrix_power",
    "multi_dot",
    "norm",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svdvals",
    "tensorinv",
    "tensorsolve",
    "vecdot",
    "vector_norm",
]
