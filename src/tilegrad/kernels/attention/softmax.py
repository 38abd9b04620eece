"""The running softmax of attention kernels: masks, the sums along rows, the end of a row.

Scores lie in tiles (rows, keys). Sums and maxima along rows go through eight columns first: on
matrix accumulators those are additions within a thread, and only what is left goes across threads.
Invariant: a weight is 2**(factor * score - top) where top is factor * the row's largest score, so
that one multiplication and addition leads to the exponential; a row that has seen nothing yet has
the top 0 and weights 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ... import tile
from ...core.dtype import int32

LOG2_E = math.log2(math.e)
LN2 = math.log(2)
LANES = 8  # columns that sums along a row are kept in


def line(size: int) -> Any:
    """0, 1, ... as a tile (size,) of int32."""
    return tile.arange(0, size, int32)


def first_of(size: int, count: Any) -> Any:
    """Which of `size` are among the first `count`; None where bounds say that all are."""
    return None if tile.most(size - count) <= 0 else line(size) < tile.cast(count, int32)


def clamped(value: Any, least: Any, most: Any) -> Any:
    """A number, brought within bounds."""
    return tile.maximum(tile.minimum(value, most), least)


def times(x: Any, factor: Any | None) -> Any:
    """A product; None is a factor of 1."""
    return x if factor is None else x * factor


def and_masks(a: Any | None, b: Any | None) -> Any:
    """Where two masks hold; None holds everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def box_mask(rows: Any | None, columns: Any | None) -> Any | None:
    """Which elements of a tile lie in some rows and columns; None is all."""
    return and_masks(None if rows is None else rows[:, None], columns)


def folded(op: Callable[[Any, Any], Any], x: Any) -> Any:
    """Columns 8 apart combined, in order: (rows, columns) -> (rows, 8)."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total = op(total, x[:, start : start + LANES])
    return total


def finite(most: Any) -> Any:
    """What is subtracted from exponents: their maximum, or 0 where nothing was seen."""
    return tile.where(most == -tile.INF, 0.0, most)


def top_of(largest: Any, factor: float, guarded: bool) -> Any:
    """factor * the largest score; 0 where nothing was seen, if that may be."""
    top = largest * factor
    return tile.where(largest == -tile.INF, 0.0, top) if guarded else top


def weights(scores: Any, factor: float, top: Any) -> Any:
    """2**(factor * scores - top)."""
    return tile.quick_exp2(tile.multiply_add(scores, factor, -top))


def finished(sums: Any, top: Any, begun: Any | None, grown: float = 1.0) -> tuple[Any, Any, Any]:
    """(what sums over values are multiplied by, sums, tops) of rows at their end, from their sums
    and tops (-inf where nothing was seen); `begun` is the exponent of what each sum began with."""
    shrink = None
    if begun is not None:
        most = tile.maximum(top, begun)
        safe = finite(most)
        shrink = tile.quick_exp2(top - safe)
        extra = tile.quick_exp2(begun - safe)
        sums, top = tile.multiply_add(sums, shrink, extra), most
    over = times(tile.quick_reciprocal(some_sum(sums)), shrink)
    return over * grown if grown != 1.0 else over, sums, top


def some_sum(sums: Any) -> Any:
    """Sums, 1 where nothing was seen."""
    return tile.where(sums == 0.0, 1.0, sums)


def log_sums(sums: Any, top: Any, unit: float | None = LN2) -> Any:
    """The log-sum-exps of rows, natural or in another unit; -inf where nothing was seen."""
    found = times(top + tile.log2(some_sum(sums)), unit)
    return tile.where(sums == 0.0, -tile.INF, found)
