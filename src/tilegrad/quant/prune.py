"""Pruning to 2:4: of every four weights of a row the two that matter most stay.

`magnitude` goes by the size of weights alone, `wanda` by size times how large the inputs of the
column are (Sun et al. 2023). Invariant: what stays is as it was; a Format ending in SPARSE holds
what is pruned without a bit lost, given that it holds its values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import UserError

Array = np.ndarray[Any, Any]


def kept(scores: Array) -> Array:
    """Which two of every four columns have the largest scores (the first of equals)."""
    if scores.ndim != 2 or scores.shape[1] % 4:
        expected = "(rows, a multiple of 4)"
        raise UserError("not whole fours", op="prune", expected=expected, got=scores.shape)
    fours = scores.reshape(len(scores), -1, 4)
    rank = np.argsort(np.argsort(-fours, axis=-1, kind="stable"), axis=-1, kind="stable")
    return np.asarray((rank < 2).reshape(scores.shape))


def magnitude(weight: Array) -> Array:
    """Weights (rows, columns) with the smaller two of every four set to 0."""
    return np.where(kept(np.abs(weight)), weight, np.float32(0))


def wanda(weight: Array, products: Array) -> Array:
    """The same by size times the norm of the inputs of a column; `products` is x.T @ x."""
    norms = np.sqrt(np.maximum(np.diag(products), 0)).astype(np.float32)
    if norms.shape != weight.shape[1:]:
        raise UserError(
            "products of other columns", op="prune", expected=weight.shape[1:], got=norms.shape
        )
    return np.where(kept(np.abs(weight) * norms), weight, np.float32(0))


__all__ = ["kept", "magnitude", "wanda"]
