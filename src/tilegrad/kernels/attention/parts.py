"""Steps that attention kernels share: what is seen, the running softmax, sums along rows.

Scores lie in Tiles (rows, keys). Sums and maxima along rows go through eight columns first: on
matrix accumulators those are additions within a thread, and only what is left goes across threads.
Invariant: a weight is 2**(factor * score - top) where top is factor * the row's largest score, so
that one multiplication and addition leads to the exponential; a row that has seen nothing yet has
the top 0 and weights 0.
"""

from __future__ import annotations

import math

from ...core.dtype import bool_, float32, int32
from ...ir.node import Node
from ...ir.symbol import Size
from ...tile import ops
from ...tile.build import BodyBuilder

LOG2_E = math.log2(math.e)
LN2 = math.log(2)
LANES = 8  # columns that sums along a row are kept in


def line(b: BodyBuilder, size: int, start: Size = 0) -> Node:
    """start, start + 1, ... as a Tile (size,) of int32."""
    steps = b.add(ops.iota(size=size, dtype=int32))
    return steps if start == 0 else b.apply("add", steps, b.cast(b.index(start), int32))


def column(b: BodyBuilder, x: Node) -> Node:
    """A Tile (n,) as (n, 1)."""
    return b.add(ops.reshape(x, shape=(*x.shape, 1)))


def number(b: BodyBuilder, value: float) -> Node:
    """A float32."""
    return b.constant(value, float32)


def scaled(b: BodyBuilder, x: Node, factor: float) -> Node:
    """x times a number."""
    return b.apply("multiply", x, b.constant(factor, x.dtype))


def quick_tanh(b: BodyBuilder, x: Node, factor: float) -> Node:
    """tanh(factor * x) = 1 - 2 / (e**(2 factor x) + 1), off by 2**-22 or so."""
    grown = b.apply("quick_exp2", scaled(b, x, 2 * factor * LOG2_E))
    inverse = b.apply("quick_reciprocal", b.apply("add", grown, number(b, 1.0)))
    return b.apply("multiply_add", inverse, number(b, -2.0), number(b, 1.0))


# ---- what is seen ----------------------------------------------------------------------------


def within(
    b: BodyBuilder,
    shape: tuple[int, int],
    lowest: Size | None,
    highest: Size | None,
    end: Size | None,
) -> Node:
    """Whether keys are seen: columns lie in [row + lowest, row + highest] and below `end`.

    Rows and columns count from the Tile's corner; None is no limit. Columns are compared eight at
    a time with limits that move, so that no thread keeps the numbers of all its columns.
    """
    rows, columns = shape
    pieces = (rows, columns // LANES, LANES)
    across = b.add(ops.reshape(line(b, LANES), shape=(1, 1, LANES)))
    down = b.add(ops.reshape(line(b, rows), shape=(rows, 1, 1)))
    steps = b.apply("multiply", line(b, columns // LANES), b.constant(LANES, int32))
    steps = b.add(ops.reshape(steps, shape=(1, columns // LANES, 1)))

    def limit(at: Size, moving: bool) -> Node:
        """A limit as it is seen from every piece of eight columns."""
        found = b.cast(b.index(at), int32)
        found = b.apply("add", down, found) if moving else found
        return b.apply("subtract", found, steps)

    seen: Node | None = None
    if highest is not None:
        seen = b.logical_and(seen, b.apply("less_equal", across, limit(highest, True)))
    if lowest is not None:
        seen = b.logical_and(seen, b.apply("less_equal", limit(lowest, True), across))
    if end is not None:
        seen = b.logical_and(seen, b.apply("less", across, limit(end, False)))
    if seen is None:
        return b.constant(True, bool_, shape)
    return b.add(ops.reshape(b.broadcast(seen, pieces), shape=shape))


def hidden(b: BodyBuilder, scores: Node, seen: Node) -> Node:
    """Scores, -inf where they are not seen."""
    return b.apply("where", seen, scores, number(b, -math.inf))


# ---- rows ------------------------------------------------------------------------------------


def folded(b: BodyBuilder, name: str, x: Node) -> Node:
    """Columns 8 apart combined by an op, in order: (rows, columns) -> (rows, 8)."""
    rows, columns = x.shape
    total: Node | None = None
    for start in range(0, columns, LANES):
        piece = b.add(ops.part(x, start=(0, start), shape=(rows, LANES)))
        total = piece if total is None else b.apply(name, total, piece)
    assert total is not None
    return total


def row_max(b: BodyBuilder, scores: Node) -> Node:
    """The largest score of every row, (rows, 1)."""
    return column(b, b.add(ops.reduce(folded(b, "maximum", scores), axis=1, kind="max")))


def row_sum(b: BodyBuilder, sums: Node) -> Node:
    """Sums kept in eight columns, as (rows, 1)."""
    return column(b, b.add(ops.reduce(sums, axis=1, kind="sum")))


# ---- softmax ---------------------------------------------------------------------------------


def top(b: BodyBuilder, largest: Node, factor: float, guarded: bool) -> Node:
    """factor * the largest score; 0 where nothing was seen, if that may be."""
    found = scaled(b, largest, factor)
    if not guarded:
        return found
    nothing = b.apply("equal", largest, number(b, -math.inf))
    return b.apply("where", nothing, number(b, 0.0), found)


def weights(b: BodyBuilder, scores: Node, factor: float, top_: Node) -> Node:
    """2**(factor * scores - top)."""
    minus = b.apply("negative", top_)
    return b.apply("quick_exp2", b.apply("multiply_add", scores, number(b, factor), minus))
