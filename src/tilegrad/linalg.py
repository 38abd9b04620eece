# ruff: noqa: F401
"""Linear algebra, with PyTorch's names and arguments (`torch.linalg`)."""

from .tensor.linalg import (
    cholesky,
    cross,
    det,
    eigh,
    eigvalsh,
    inv,
    lstsq,
    lu,
    lu_factor,
    lu_solve,
    matrix_norm,
    matrix_power,
    multi_dot,
    norm,
    qr,
    slogdet,
    solve,
    solve_triangular,
    svd,
    svdvals,
    tensorinv,
    tensorsolve,
    vecdot,
    vector_norm,
)
from .tensor.matmul import matmul
