"""Large dots on a matrix unit of the Target (AMX on a CPU), for `legalize`.

The right operand is packed so that neighbours along k lie side by side, as the unit reads
them; up to 2 x 2 accumulators of the unit are carried over k. Invariant: only dots whose sizes
are whole tiles of the unit, and whose sums the unit keeps in the asked dtype, come here.
"""

from __future__ import annotations

from ..core.target import MatrixUnit, Target
from ..ir.node import Node
from ..ir.symbol import Size
from . import ops
from .pieces import Pieces, Source

SIDE = 16  # of the squares that are packed


def unit_for(target: Target, node: Node) -> MatrixUnit | None:
    """The unit that can do a dot, if there is one."""
    a, b, c = node.inputs
    (m, k), n = a.shape, b.shape[1]
    for unit in target.matrix_units(a.dtype, b.dtype):
        whole = m % unit.m == 0 and n % unit.n == 0 and k % unit.k == 0
        if whole and unit.accumulator is c.dtype:
            return unit
    return None


def matrix_dot(into: Pieces, node: Node, unit: MatrixUnit) -> Source:
    """a @ b + c."""
    b, shape, depth = into.b, node.shape, node.inputs[0].shape[1]
    a, together = into.kept(into.source(node.inputs[0])), 4 // node.inputs[0].dtype.size
    packed = _packed(into, into.source(node.inputs[1]), together)
    start = node.inputs[2]
    zero = start.op is ops.constant and start.attrs["value"] == 0
    begin = None if zero else into.kept(into.source(start))
    place = into.room(shape, node.dtype)
    rows, columns = (
        [n * step for n in range(2 if size % (2 * step) == 0 else 1)]
        for size, step in zip(shape, (unit.m, unit.n))
    )

    def taken(memory: Node, row: Size, column: Size, size: tuple[int, int]) -> Node:
        return b.do(ops.matrix_load, memory, row, column, shape=size, unit=unit.name)

    def first(corner: tuple[Size, Size]) -> Node:
        if begin is None:
            return b.do(ops.matrix_zero, shape=(unit.m, unit.n), dtype=node.dtype, unit=unit.name)
        return taken(begin, *corner, (unit.m, unit.n))

    for i, j in into.blocks(shape, (len(rows) * unit.m, len(columns) * unit.n)):
        corners = [(i + r, j + q) for r in rows for q in columns]
        sums = [first(corner) for corner in corners]
        for p in b.each("k", 0, depth, unit.k, sums, bounds=(0, depth - unit.k)):
            left = [taken(a, i + r, p, (unit.m, unit.k)) for r in rows]
            packs = (unit.k // together, unit.n * together)
            right = [taken(packed, p // together, (j + q) * together, packs) for q in columns]
            pairs = [(x, y) for x in left for y in right]
            sums[:] = [b.do(ops.matrix_dot, s, *xy, unit=unit.name) for s, xy in zip(sums, pairs)]
        for total, corner in zip(sums, corners):
            b.do(ops.matrix_store, place, total, *corner, unit=unit.name)
    return into.stored(place, shape)


def _packed(into: Pieces, source: Source, together: int) -> Node:
    """The right operand (k, n) as (k / together, n * together), neighbours along k side by side."""
    b, (depth, n) = into.b, source.shape
    place = into.room((depth // together, n * together), source.dtype)
    if source.turned is not None:  # from (n, k), where they lie side by side already
        inner = into.kept(source.turned)
        for p, j in into.blocks((depth // together, n), (SIDE, SIDE)):
            tile = b.load(inner, (j, p * together), (SIDE, SIDE * together), (0, 1))
            tile = b.do(ops.reshape, tile, shape=(SIDE, SIDE, together))
            tile = b.do(ops.transpose, tile, order=(1, 0, 2))
            tile = b.do(ops.reshape, tile, shape=(SIDE, SIDE * together))
            b.store(place, tile, (p, j * together), (0, 1))
        return place
    for p, j in into.blocks((depth // together, n), (1, SIDE)):
        rows = [source.piece((p * together + r, j), SIDE) for r in range(together)]
        lines = b.do(ops.transpose, b.do(ops.stack_rows, *rows), order=(1, 0))
        line = b.do(ops.reshape, lines, shape=(SIDE * together,))
        b.store(place, line, (p, j * together), (1,))
    return place
