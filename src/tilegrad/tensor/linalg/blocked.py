"""Blocked factorisations of batches of matrices (batch, rows, columns): panels and products.

A `scan` loops over blocks of columns (or rows). Each step runs one panel kernel and changes the
rest by matrix products of the Graph, so nearly all work is products, and the number of Programs
does not grow with the size. Sizes are padded to whole blocks; padding never reaches a result.

Invariant: no function here is differentiable by itself; `factor` gives the derivatives.
"""

from __future__ import annotations

from ...core import dtype as dtypes
from ...graph import build
from ..control import scan
from ..creation import arange, eye, zeros
from ..elementwise import where
from ..maths import cast
from ..movement import flip, movedim, swapaxes
from ..padding import pad
from ..tensor import Tensor, node_of, wrap
from .panels import cholesky_block, lu_panel, qr_panel, solve_block, spread

BLOCK = 32  # rows of a diagonal block
TALL = 1024  # rows from which panels are narrower


def block_of(size: int) -> int:
    """Rows of a diagonal block: a small matrix is one block."""
    return BLOCK if size > BLOCK else max(4, 1 << (size - 1).bit_length())


def panel_width(rows: int, columns: int) -> int:
    """Columns of a panel that one tile holds whole."""
    most = 16 if rows <= TALL else 8
    return min(most, max(4, 1 << (columns - 1).bit_length()))


def whole(size: int, block: int) -> int:
    """A size rounded up to whole blocks."""
    return -(-size // block) * block


def padded(a: Tensor, rows: int, columns: int, diagonal: bool = False) -> Tensor:
    """Zeros after the rows and columns; ones on the diagonal of what is added if asked for."""
    more_rows, more_columns = rows - a.shape[-2], columns - a.shape[-1]
    if not more_rows and not more_columns:
        return a
    made = pad(a, (0, more_columns, 0, more_rows))
    if not diagonal:
        return made
    added = cast(arange(columns) >= a.shape[-1], a.dtype)
    return made + eye(rows, columns, dtype=a.dtype) * added


def columns_of(a: Tensor, width: int) -> Tensor:
    """Blocks of columns (blocks, batch, rows, width)."""
    batch, rows, columns = a.shape
    return movedim(a.reshape(batch, rows, columns // width, width), 2, 0)


def rows_of(a: Tensor, height: int) -> Tensor:
    """Blocks of rows (blocks, batch, height, columns)."""
    batch, rows, columns = a.shape
    return movedim(a.reshape(batch, rows // height, height, columns), 1, 0)


def at(a: Tensor, axis: int, index: Tensor) -> Tensor:
    """Slices along an axis by their numbers, which are in range by what they are made of."""
    return movedim(wrap(build.gather(node_of(a), [node_of(index)], (axis,)), a), 0, axis)


def in_order(a: Tensor, order: Tensor) -> Tensor:
    """Rows of each of a batch in another order (batch, rows)."""
    batch = arange(a.shape[0]).unsqueeze(-1)
    return wrap(build.gather(node_of(a), [node_of(batch), node_of(order)], (0, 1)), a)


def _solve(lower: Tensor, y: Tensor, unit: bool) -> Tensor:
    """x of one block, with programs over blocks of columns."""
    columns: int = y.shape[-1]
    block = min(64, max(4, 1 << (columns - 1).bit_length()))
    kernel = spread(solve_block, y.shape[-2], block, y.dtype)
    return kernel(lower, y, unit=unit, block=block)


def solve_lower(a: Tensor, b: Tensor, unit: bool = False) -> Tensor:
    """x with a x = b: a (batch, n, n) lower triangular, b (batch, n, columns)."""
    n: int = a.shape[-1]
    w = block_of(n)
    size = whole(n, w)
    lower, right = padded(a, size, size, True), padded(b, size, b.shape[-1])
    if size == w:
        return _solve(lower, right, unit)[:, :n]
    lines, inside = arange(size), arange(w)

    def step(x: Tensor, slices: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, None]:
        k, rows, y = slices  # (), (batch, w, n), (batch, w, columns)
        block = at(rows, 2, k * w + inside)
        found = _solve(block, y - rows @ x, unit)
        here = (lines // w == k).unsqueeze(-1)
        return where(here, at(found, 1, lines % w), x), None

    blocks = (arange(size // w), rows_of(lower, w), rows_of(right, w))
    x, _ = scan(step, zeros(*right.shape, dtype=a.dtype), blocks)
    return x[:, :n]


def solve_upper(a: Tensor, b: Tensor, unit: bool = False) -> Tensor:
    """x with a x = b: a (batch, n, n) upper triangular."""
    return flip(solve_lower(flip(a, (1, 2)), flip(b, (1,)), unit), (1,))


def cholesky(a: Tensor) -> Tensor:
    """Lower L with L L' = a, of the lower triangle of a (batch, n, n)."""
    n: int = a.shape[-1]
    w = block_of(n)
    size = whole(n, w)
    lower = a.tril()
    full = padded(lower + swapaxes(a.tril(-1), 1, 2), size, size, True)
    if size == w:
        return spread(cholesky_block, w, w, a.dtype)(full).tril()[:, :n, :n]
    lines, inside = arange(size), arange(w)

    def step(done: Tensor, slices: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        k, column = slices  # (), (batch, n, w)
        own = k * w + inside
        column = column - done @ swapaxes(at(done, 1, own), 1, 2)
        block = spread(cholesky_block, w, w, a.dtype)(at(column, 1, own)).tril()
        below = swapaxes(_solve(block, swapaxes(column, 1, 2), False), 1, 2)
        row = (lines // w).unsqueeze(-1)
        found = where(row == k, at(block, 1, lines % w), where(row > k, below, 0.0))
        return where(lines // w == k, at(found, 2, lines % w), done), None

    blocks = (arange(size // w), columns_of(full, w))
    found, _ = scan(step, zeros(*full.shape, dtype=a.dtype), blocks)
    return found[:, :n, :n]


def lu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(L below and U in one matrix, the row at each place, what each place was swapped with)."""
    batch, m, n = a.shape
    least: int = min(m, n)
    w = panel_width(m, least)
    height, width = whole(m, 16), whole(n, w)
    full = padded(a, height, width)
    rows, columns, inside = arange(height), arange(width), arange(w)
    panel = spread(lu_panel, height, w, a.dtype)

    def step(carry: tuple[Tensor, Tensor], k: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        matrix, order = carry
        own = k * w + inside
        found, chosen, swaps = panel(at(matrix, 2, own), _first(k, w))
        chosen = cast(chosen, dtypes.int64)
        found = in_order(found, chosen)
        matrix = in_order(matrix, chosen)
        right = columns >= k * w + w
        upper = _solve(at(found, 1, own), at(matrix, 1, own), True)
        upper = where(right, upper, 0.0)
        below = where((rows >= k * w + w).unsqueeze(-1), found, 0.0)
        matrix = matrix - below @ upper
        here = (rows // w == k).unsqueeze(-1) & right
        matrix = where(here, at(upper, 1, rows % w), matrix)
        matrix = where(columns // w == k, at(found, 2, columns % w), matrix)
        return (matrix, in_order(order, chosen)), swaps

    start = (full, arange(height).expand(batch, height))
    (matrix, order), swaps = scan(step, start, arange(whole(least, w) // w))
    swaps = movedim(swaps, 0, 1).reshape(batch, -1)[:, :least]
    return matrix[:, :m, :n], order[:, :m], swaps


def _first(k: Tensor, width: int) -> Tensor:
    """The row of a panel's first pivot, as its kernel takes it."""
    return cast(k * width, dtypes.int32).reshape(1)


def qr(a: Tensor, complete: bool = False) -> tuple[Tensor, Tensor]:
    """Q (batch, m, k) with orthonormal columns and R (batch, k, n): k = min(m, n), or m."""
    batch, m, n = a.shape
    least: int = min(m, n)
    w = panel_width(m, least)
    height, width = whole(m, 16), whole(n, w)
    columns, inside = arange(width), arange(w)
    panel = spread(qr_panel, height, w, a.dtype)

    def step(matrix: Tensor, k: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        own = k * w + inside
        vectors, found, t = panel(at(matrix, 2, own), _first(k, w))
        change = swapaxes(t, 1, 2) @ (swapaxes(vectors, 1, 2) @ matrix)
        right = columns >= k * w + w
        matrix = matrix - vectors @ where(right, change, 0.0)
        matrix = where(columns // w == k, at(found, 2, columns % w), matrix)
        return matrix, (vectors, t)

    r, reflections = scan(step, padded(a, height, width), arange(whole(least, w) // w))

    def back(q: Tensor, one: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        vectors, t = one
        return q - vectors @ (t @ (swapaxes(vectors, 1, 2) @ q)), None

    kept: int = m if complete else least
    start = eye(height, kept, dtype=a.dtype).expand(batch, height, kept)
    q, _ = scan(back, start, reflections, reverse=True)
    return q[:, :m], r[:, :kept, :n].triu()


__all__ = ["cholesky", "lu", "qr", "solve_lower", "solve_upper"]
