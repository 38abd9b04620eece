"""Tile kernels of the factorisations: what goes column by column, one program for each matrix.

A panel is a block of columns that one tile holds whole. Its columns are done in order by a loop of
the kernel; everything between panels is a matrix product and stays in the Graph (`blocked`).
Each kernel takes a batch of matrices (batch, rows, columns) and runs wherever tiles run.

Invariant: no kernel divides by a zero pivot of a column that is zero; nan and inf of the input
spread as arithmetic spreads them.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core import dtype as dtypes
from ...core.dtype import DType
from ..kernel import Kernel, kernel

THREADS = 32  # of a warp
BYTES = 64  # of a panel that a thread of a GPU holds


def spread(panel: Kernel, rows: int, columns: int, dtype: DType) -> Kernel:
    """The kernel with as many warps as a panel of this size needs on a GPU."""
    return panel.warps(max(1, min(16, rows * columns * dtype.size // (THREADS * BYTES))))


@kernel
def cholesky_block(a: Any) -> None:
    """L of symmetric blocks (batch, w, w); nan where a block is not positive definite."""
    batch, w, _ = a.shape
    b = tile.grid(batch)
    x = tile.load(a, (b, 0, 0), (w, w))
    line = tile.arange(w, dtype=dtypes.int32)
    for j in tile.range(w):
        here = line[None, :] == j
        column = tile.sum(tile.where(here, x, 0.0), axis=1)
        root = tile.sqrt(tile.sum(tile.where(line == j, column, 0.0)))
        column = tile.where(line > j, column / root, 0.0)
        x = x - column[:, None] * column[None, :]
        x = tile.where(here, tile.where(line == j, root, column)[:, None], x)
    tile.store(tile.result((batch, w, w), a.dtype), (b, 0, 0), x)


@kernel
def solve_block(lower: Any, y: Any, *, unit: bool = False, block: int = 64) -> None:
    """x with L x = y: L (batch, w, w) lower triangular, y (batch, w, columns)."""
    batch, w, columns = y.shape
    b, c = tile.grid(batch, tile.ceil_divide(columns, block))
    out = tile.result((batch, w, columns), y.dtype)
    x = tile.fill(tile.load(y, (b, 0, c * block), (w, block)), 0.0)
    factor = tile.load(lower, (b, 0, 0), (w, w))
    line = tile.arange(w, dtype=dtypes.int32)
    for j in tile.range(w):
        here = line == j
        column = tile.sum(tile.where(here[None, :], factor, 0.0), axis=1)
        row = tile.sum(tile.where(here[:, None], x, 0.0), axis=0)
        if not unit:
            row = row / tile.sum(tile.where(here, column, 0.0))
        below = tile.where(line > j, column, 0.0)
        x = tile.where(here[:, None], row[None, :], x - below[:, None] * row[None, :])
    tile.store(out, (b, 0, c * block), x)


@kernel
def lu_panel(a: Any, first: Any) -> None:
    """L and U of a panel (batch, m, w) whose first pivot lies in row `first`, by columns.

    Rows stay where they are: `order` names the row that comes to each place, `swaps` the place
    that each pivot's place was swapped with. Among equal pivots the first is taken.
    """
    batch, m, w = a.shape
    b = tile.grid(batch)
    start = tile.load(first, (0,), ())
    rows, columns = tile.arange(m, dtype=dtypes.int32), tile.arange(w, dtype=dtypes.int32)
    x = tile.load(a, (b, 0, 0), (m, w))
    place, order, swaps = rows, rows, tile.zeros((w,), dtypes.int32)
    for j in tile.range(w):
        here = columns == j
        now = start + tile.cast(j, dtypes.int32)
        column = tile.sum(tile.where(here[None, :], x, 0.0), axis=1)
        size = tile.where(place >= now, tile.abs(column), -1.0)
        last = tile.full((), m - 1, dtypes.int32)
        found = tile.minimum(tile.min(tile.where(size == tile.max(size), place, m)), last)
        chosen = place == found
        row = tile.sum(tile.where(chosen[:, None], x, 0.0), axis=0)
        pivot = tile.sum(tile.where(here, row, 0.0))
        moved = tile.sum(tile.where(rows == now, order, 0))
        taken = tile.sum(tile.where(rows == found, order, 0))
        order = tile.where(rows == now, taken, tile.where(rows == found, moved, order))
        place = tile.where(chosen, now, tile.where(place == now, found, place))
        swaps = tile.where(here, found, swaps)
        below = place > now
        factor = tile.where(below, column / tile.where(pivot == 0.0, 1.0, pivot), 0.0)
        x = x - factor[:, None] * tile.where(columns > j, row, 0.0)[None, :]
        x = tile.where(here[None, :] & below[:, None], factor[:, None], x)
    tile.store(tile.result((batch, m, w), a.dtype), (b, 0, 0), x)
    tile.store(tile.result((batch, m), dtypes.int32), (b, 0), order)
    tile.store(tile.result((batch, w), dtypes.int32), (b, 0), swaps)


@kernel
def qr_panel(a: Any, first: Any) -> None:
    """Householder vectors V, R and T of a panel (batch, m, w) from row `first` on.

    The reflections of the panel together are 1 - V T V'. V (m, w) is zero above its diagonal,
    where it is one; the second result holds R in and above the diagonal.
    """
    batch, m, w = a.shape
    b = tile.grid(batch)
    start = tile.load(first, (0,), ())
    rows, columns = tile.arange(m, dtype=dtypes.int32), tile.arange(w, dtype=dtypes.int32)
    x = tile.load(a, (b, 0, 0), (m, w))
    t = tile.zeros((w, w), a.dtype)
    for j in tile.range(w):
        here = columns == j
        now = start + tile.cast(j, dtypes.int32)
        column = tile.sum(tile.where(here[None, :], x, 0.0), axis=1)
        below = tile.where(rows > now, column, 0.0)
        head = tile.sum(tile.where(rows == now, column, 0.0))
        top = tile.max(tile.abs(below))
        plain = top == 0.0  # nothing to remove: the reflection is the identity
        scale = tile.where(plain, 1.0, tile.maximum(top, tile.abs(head)))
        parts, short = below / scale, head / scale
        norm = tile.sqrt(tile.sum(parts * parts) + short * short) * scale
        beta = tile.where(plain, head, tile.where(head < 0.0, norm, -norm))
        tau = tile.where(plain, 0.0, (beta - head) / tile.where(plain, 1.0, beta))
        vector = tile.where(rows == now, 1.0, below / tile.where(plain, 1.0, head - beta))
        products = tile.sum(vector[:, None] * x, axis=0)  # with V before j, with a after it
        ahead = tile.where(columns > j, products, 0.0)
        x = x - (vector * tau)[:, None] * ahead[None, :]
        kept = tile.where(rows < now, column, tile.where(rows == now, beta, vector))
        x = tile.where(here[None, :], kept[:, None], x)
        behind = tile.where(columns < j, products, 0.0)
        joined = tile.sum(t * behind[None, :], axis=1) * -tau
        t = tile.where(here[None, :], tile.where(here, tau, joined)[:, None], t)
    diagonal = start + columns[None, :]
    place = tile.broadcast(rows[:, None], (m, w))
    vectors = tile.where(place > diagonal, x, tile.where(place == diagonal, 1.0, 0.0))
    tile.store(tile.result((batch, m, w), a.dtype), (b, 0, 0), vectors)
    tile.store(tile.result((batch, m, w), a.dtype), (b, 0, 0), x)
    tile.store(tile.result((batch, w, w), a.dtype), (b, 0, 0), t)


__all__ = ["cholesky_block", "lu_panel", "qr_panel", "solve_block", "spread"]
