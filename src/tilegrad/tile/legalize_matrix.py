"""Large dots on a matrix unit of the Target (AMX on a CPU), for `legalize`.

The right operand is packed so that groups of values along k lie side by side, as the unit reads
them; up to 2 x 2 accumulators of the unit are carried over k. Invariant: only dots whose sizes
are whole tiles of the unit, and whose sums the unit keeps in the asked dtype, come here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import DType
from ..core.target import MatrixUnit
from ..ir.node import Node
from ..ir.symbol import Size
from . import ops
from .pieces import Pieces, Source


class MatrixPieces(Pieces):
    """Dots by a matrix unit."""

    def unit_for(self, node: Node) -> MatrixUnit | None:
        """The unit that can do a dot, if there is one."""
        a, b, c = node.inputs
        (m, k), n = a.shape, b.shape[1]
        for unit in self.target.matrix_units(a.dtype, b.dtype):
            whole = m % unit.m == 0 and n % unit.n == 0 and k % unit.k == 0
            if whole and unit.accumulator is c.dtype:
                return unit
        return None

    def matrix_dot(self, node: Node, a: Node, unit: MatrixUnit) -> Node:
        """The place of a @ b + c; `a` is the place of the left operand."""
        (m, n), depth = node.shape, node.inputs[0].shape[1]
        group = 4 // node.inputs[0].dtype.size
        packed = self.packed(self.source(node.inputs[1]), group)
        start = node.inputs[2]
        zero = start.op is ops.constant and start.attrs["value"] == 0
        begin = None if zero else self.kept(self.source(start))
        place = self.b.allocate((m, n), node.dtype, self.scope)
        rows = [r * unit.m for r in range(2 if m % (2 * unit.m) == 0 else 1)]
        columns = [q * unit.n for q in range(2 if n % (2 * unit.n) == 0 else 1)]

        def tile(i: Size, j: Size) -> None:
            corners = [(i + r, j + q) for r in rows for q in columns]

            def step(p: Size, sums: list[Node]) -> list[Node]:
                left = [self.taken(a, i + r, p, (unit.m, unit.k), unit) for r in rows]
                shape = (unit.k // group, unit.n * group)
                right = [
                    self.taken(packed, p // group, (j + q) * group, shape, unit) for q in columns
                ]
                pairs = [(x, y) for x in left for y in right]
                return [
                    self.b.add(ops.matrix_dot(s, x, y, unit=unit.name))
                    for s, (x, y) in zip(sums, pairs)
                ]

            shape = (unit.m, unit.n)
            first = [
                self.zero(shape, node.dtype, unit)
                if begin is None
                else self.taken(begin, *c, shape, unit)
                for c in corners
            ]
            bounds = (0, depth - unit.k)
            sums = self.b.loop("k", 0, depth, unit.k, step, first, bounds=bounds)
            for total, corner in zip(sums, corners):
                where = [self.b.index(x) for x in corner]
                self.b.add(ops.matrix_store(place, total, *where, unit=unit.name))

        self.blocks((m, n), (len(rows) * unit.m, len(columns) * unit.n), tile)
        return place

    def zero(self, shape: tuple[int, int], dtype: DType, unit: MatrixUnit) -> Node:
        """A tile of zeros of its own."""
        return self.b.add(ops.matrix_zero(shape=shape, dtype=dtype, unit=unit.name))

    def taken(
        self, memory: Node, row: Size, column: Size, shape: tuple[int, int], unit: MatrixUnit
    ) -> Node:
        """A tile in the unit's registers."""
        where = [self.b.index(row), self.b.index(column)]
        return self.b.add(ops.matrix_load(memory, *where, shape=shape, unit=unit.name))

    def kept(self, source: Source) -> Node:
        """The place of a value."""
        found = source if source.place is not None else self.keep(source)
        assert found.place is not None
        return found.place

    def packed(self, source: Source, group: int) -> Node:
        """The right operand (k, n) as (k / group, n * group), groups of k side by side."""
        depth, n = source.shape
        place = self.b.allocate((depth // group, n * group), source.dtype, self.scope)
        side = 16

        def turned(p: Size, j: Size) -> None:  # from (n, k), where groups lie together already
            tile = self.b.load(inner, (j, p * group), (side, side * group), (0, 1))
            tile = self.b.add(ops.reshape(tile, shape=(side, side, group)))
            tile = self.b.add(ops.transpose(tile, order=(1, 0, 2)))
            tile = self.b.add(ops.reshape(tile, shape=(side, side * group)))
            self.b.store(place, tile, (p, j * group), (0, 1))

        def plain(p: Size, j: Size) -> None:
            rows = [source.piece((p * group + r, j), side) for r in range(group)]
            lines = self.b.add(ops.transpose(self.b.add(ops.stack_rows(*rows)), order=(1, 0)))
            line = self.b.add(ops.reshape(lines, shape=(side * group,)))
            self.b.store(place, line, (p, j * group), (1,))

        if source.turned is not None:
            inner = self.kept(source.turned)
            self.blocks((depth // group, n), (side, side), turned)
        else:
            self.blocks((depth // group, n), (1, side), plain)
        return place

    def blocks(self, sizes: tuple[int, int], steps: tuple[int, int], act: object) -> None:
        """Run act(i, j) for the corner of every block."""

        def outer(i: Size, _: list[Node]) -> Sequence[Node]:
            def inner(j: Size, _: list[Node]) -> Sequence[Node]:
                act(i, j)  # type: ignore[operator]
                return []

            self.b.loop("column", 0, sizes[1], steps[1], inner, bounds=(0, sizes[1] - steps[1]))
            return []

        self.b.loop("row", 0, sizes[0], steps[0], outer, bounds=(0, sizes[0] - steps[0]))
