"""Cycles of a systolic array, in closed form: skewed operands through a grid of multipliers.

A product of (M, K) and (K, N) is cut into tiles of the array; each tile fills the skew, streams and
drains before the next begins. Invariant: the counts are those that SCALE-Sim prints as total
cycles of a run without stalls: the last cycle's number, counted from 0.
"""

from __future__ import annotations

from ...core.errors import UserError
from .problem import Problem


def cycles(dataflow: str, rows: int, columns: int, M: int, N: int, K: int) -> int:
    """Cycles of a product: `os` keeps sums in place, `ws` weights, `is` inputs.

    With sums in place a tile streams K deep through a skew of rows + columns - 2. With weights or
    inputs in place they are loaded first, a row a cycle.
    """
    if dataflow not in ("os", "ws", "is"):
        raise UserError("unknown dataflow", op="chip", expected="os, ws, is", got=repr(dataflow))
    for name, value in (("rows", rows), ("columns", columns), ("M", M), ("N", N), ("K", K)):
        if value < 1:
            raise UserError(f"bad {name}", op="chip", expected="at least 1", got=value)
    skew = rows + columns - 2
    if dataflow == "os":
        return _tiles(M, rows) * _tiles(N, columns) * (K + skew) - 1
    if dataflow == "ws":
        return _tiles(K, rows) * _tiles(N, columns) * (M + rows + skew) - 1
    return _tiles(K, rows) * _tiles(M, columns) * (N + rows + skew) - 1


def _tiles(size: int, side: int) -> int:
    return -(-size // side)


def problem_cycles(problem: Problem, dataflow: str, rows: int, columns: int) -> int:
    """The same for a Problem: a convolution as the product of its windows, groups in turn."""
    sizes = problem.sizes
    positions = sizes["N"] * sizes["P"] * sizes["Q"]
    depth = sizes["C"] * sizes["R"] * sizes["S"]
    each = cycles(dataflow, rows, columns, positions, sizes["M"], depth) + 1
    return sizes.get("G", 1) * each - 1


__all__ = ["cycles", "problem_cycles"]
