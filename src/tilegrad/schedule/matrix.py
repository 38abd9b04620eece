"""Lower `dot` to a matrix unit with tiles of its own (AMX): 2 x 2 tiles of 16 x 16 results.

b is packed so that groups of k values (pairs of bf16, quads of int8) stand side by side, a is
copied tile by tile; the whole of k stays in four accumulators, which go to a strip of scratch
from which the epilogue takes rows. Invariant: rows past the end of m repeat the last row and
are never stored; k past its end is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.target import MatrixUnit, Target
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, combine, high, loop_index, minimum, modulo, multiply
from ..tile import ops as tile_ops
from .access import Condition, Index
from .dot import DotLowering
from .fuse import Group
from .plan import Plan
from .problem import stride_of

SCRATCH = 1 << 20
TILE = 16


def unit_for(group: Group, target: Target) -> MatrixUnit | None:
    """The matrix unit that can run a dot, if the work is large enough for it."""
    a, b = group.values[0].inputs
    units = [u for u in target.matrix_units(a.dtype, b.dtype) if u.m == TILE and u.n == TILE]
    return units[0] if units else None


class MatrixLowering(DotLowering):
    """Lowers one dot group to a matrix unit."""

    def __init__(self, unit: MatrixUnit, *rest: Any) -> None:
        super().__init__(*rest)
        self.unit = unit
        self.accumulator = unit.accumulator
        self.input = unit.inputs[0]
        self.together = unit.k // TILE  # k values that stand side by side

    def plan(self) -> Plan:
        """Blocks: the whole of k, as many columns as the cache holds."""
        batch, m, k, n = (high(s) for s in self.problem.sizes)
        block_k = max(1, -(-k // self.unit.k)) * self.unit.k
        side = 2 * TILE
        workers = max(1, self.target.cores)
        fit = max(side, SCRATCH // (block_k * self.input.size) // side * side)
        block_n = min(fit, -(-n // side) * side)
        block_m = max(1, m)
        if batch < 2 * workers and workers > 1:
            if m >= 2 * n or n <= workers * side:
                block_m = max(side, -(-m // (workers * side)) * side)
            else:
                blocks = -(-n // block_n)
                count = -(-blocks // workers) * workers
                block_n = min(block_n, max(side, -(-n // (count * side)) * side))
        return Plan(side, 2, TILE, block_m, block_n, block_k, self.unit.name)

    def places(self, plan: Plan) -> None:
        """Scratch in the layouts the unit reads."""
        b, steps = self.b, plan.block_k // self.unit.k
        line = TILE * self.together
        self.packed_b = b.allocate(
            (plan.block_n // plan.nr, steps, 2, TILE, line), self.input, "l2"
        )
        self.packed_a = b.allocate((steps, 2, TILE, line), self.input, "l1")
        self.strip = b.allocate((plan.mr, plan.nr), self.accumulator, "l1")

    def body(self, plan: Plan) -> tuple[Size, ...]:
        """One program: pack b, then every row panel."""
        b = self.b
        batch, m, k, n = self.problem.sizes
        blocks_m, blocks_n = ceil_divide(m, plan.block_m), ceil_divide(n, plan.block_n)
        p = b.program(0, multiply(batch, multiply(blocks_m, blocks_n)))
        at_batch = p // multiply(blocks_m, blocks_n)
        rest = modulo(p, multiply(blocks_m, blocks_n))
        row = multiply(rest // blocks_n, plan.block_m)
        column = multiply(modulo(rest, blocks_n), plan.block_n)
        self.places(plan)
        self.steps = ceil_divide(k, self.unit.k)
        live = ceil_divide(minimum(combine(n, column, -1), plan.block_n), plan.nr)
        stop = minimum(combine(row, plan.block_m, 1), m)
        self.pack_columns(plan, at_batch, column, live)
        self.panels(plan, at_batch, row, stop, column, live)
        return (multiply(batch, multiply(blocks_m, blocks_n)),)

    def operand(self, x: Node, index: Index, k: Size, lanes: int) -> Node:
        """An operand in the unit's dtype, zero where k is past its end."""
        size = self.problem.sizes[2]
        if modulo(size, self.unit.k) == 0:
            value = self.e.value(x, index)
        else:
            condition = Condition(k, size)
            value = self.e.value(x, index) if condition.holds() else self.e._guarded(
                x, index, [condition])  # fmt: skip
        return self.b.broadcast(self.b.cast(value, self.input), (lanes,))

    def pack_columns(self, plan: Plan, batch: Size, column: Size, live: Size) -> None:
        """packed[panel, step, half, group, :] = groups of k for 16 columns."""
        b, x = self.b, self.problem.b
        _, _, k, n = self.problem.sizes
        probe_k, probe_n = loop_index("probe_k", k), loop_index("probe_n", n)
        probe = self.problem.index_b(batch, probe_k, probe_n)
        turned = (stride_of(self.e, x, probe, probe_k) == 1
                  and stride_of(self.e, x, probe, probe_n) != 1
                  and modulo(k, self.unit.k) == 0 and modulo(n, plan.nr) == 0
                  and self.together == 2)  # fmt: skip

        def panel(j: Size, _: list[Node]) -> Sequence[Node]:
            start = combine(column, multiply(j, plan.nr), 1)

            def step(s: Size, _: list[Node]) -> Sequence[Node]:
                if turned:
                    self.turned_step(plan, batch, start, j, s)
                else:
                    self.plain_step(plan, batch, start, j, s)
                return ()

            b.loop("step", 0, self.steps, 1, step)
            return ()

        b.loop("panel", 0, live, 1, panel)

    def plain_step(self, plan: Plan, batch: Size, start: Size, j: Size, s: Size) -> None:
        """A step of k where b is read along n: rows are interleaved."""
        b, x, together = self.b, self.problem.b, self.together
        base = multiply(s, self.unit.k)

        def group(g: Size, _: list[Node]) -> Sequence[Node]:
            rows = []
            for t in range(together):
                k = combine(combine(base, multiply(g, together), 1), t, 1)
                with self.columns(plan, start) as lane:
                    rows.append(self.operand(x, self.problem.index_b(batch, k, lane), k, plan.nr))
            wide = b.add(tile_ops.transpose(b.add(tile_ops.stack_rows(*rows)), order=(1, 0)))
            value = b.add(tile_ops.reshape(wide, shape=(2, TILE * together)))
            b.store(self.packed_b, value, (j, s, 0, g, 0), (2, 4))
            return ()

        b.loop("group", 0, TILE, 1, group)

    def turned_step(self, plan: Plan, batch: Size, start: Size, j: Size, s: Size) -> None:
        """A step of k where b is contiguous along k: pairs are turned as one."""
        b, x = self.b, self.problem.b
        base = multiply(s, self.unit.k)
        for half in range(2):
            rows = []
            for r in range(TILE):
                n = combine(start, half * TILE + r, 1)
                with self.e.vector(base, self.unit.k, self.problem.sizes[2], True) as lane:
                    value = self.e.value(x, self.problem.index_b(batch, lane, n))
                    rows.append(b.cast(value, self.input))
            stacked = b.add(tile_ops.stack_rows(*rows))
            pairs = b.add(tile_ops.reshape(stacked, shape=(TILE, TILE, 2)))
            turned = b.add(tile_ops.transpose(pairs, order=(1, 0, 2)))
            value = b.add(tile_ops.reshape(turned, shape=(TILE, 2 * TILE)))
            b.store(self.packed_b, value, (j, s, half, 0, 0), (3, 4))

    def pack_rows(self, plan: Plan, batch: Size, places: list[Size]) -> None:
        """packed[step, half, row, :] = a[row, step * k ...]."""
        b, x = self.b, self.problem.a
        k = self.problem.sizes[2]

        def step(s: Size, _: list[Node]) -> Sequence[Node]:
            for r, m in enumerate(places):
                base = multiply(s, self.unit.k)
                with self.e.vector(base, self.unit.k, k, modulo(k, self.unit.k) == 0) as lane:
                    value = self.e.value(x, self.problem.index_a(batch, m, lane))
                    value = b.broadcast(b.cast(value, self.input), (self.unit.k,))
                    if self.e.mask is not None:
                        zero = b.constant(0, self.input)
                        value = b.apply("where", self.e.mask, value, zero)
                    b.store(self.packed_a, value, (s, r // TILE, r % TILE, 0), (3,))
            return ()

        b.loop("step", 0, self.steps, 1, step)

    def panels(self, plan: Plan, batch: Size, row: Size, stop: Size, column: Size,
               live: Size) -> None:  # fmt: skip
        """Row panels times column panels."""
        b = self.b
        m = self.problem.sizes[1]
        whole = modulo(m, plan.mr) == 0 and plan.block_m % plan.mr == 0
        top = combine(m, 1, -1)

        def row_panel(i: Size, _: list[Node]) -> Sequence[Node]:
            places = [combine(i, r, 1) for r in range(plan.mr)]
            if not whole:
                places = [minimum(p, top) for p in places]
            self.pack_rows(plan, batch, places)

            def column_panel(j: Size, _: list[Node]) -> Sequence[Node]:
                start = combine(column, multiply(j, plan.nr), 1)
                self.prefetch_rows(plan, batch, places, start)
                with self.e.scope():
                    self.matrix_micro(j)
                    self.finish(plan, batch, 0, i, stop, start)
                return ()

            b.loop("column_panel", 0, live, 1, column_panel)
            return ()

        b.loop("row_panel", row, stop, plan.mr, row_panel, bounds=(0, high(m) - 1))

    def matrix_micro(self, j: Size) -> None:
        """Four accumulators over all of k, then to the strip."""
        b, name = self.b, self.unit.name
        line = TILE * self.together
        zero = tile_ops.matrix_zero(shape=(TILE, TILE), dtype=self.accumulator, unit=name)

        def load(memory: Node, *index: Size) -> Node:
            scalars = [b.index(i) for i in index]
            return b.add(tile_ops.matrix_load(memory, *scalars, shape=(TILE, line), unit=name))

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            left = [load(self.packed_a, s, t, 0, 0) for t in range(2)]
            right = [load(self.packed_b, j, s, t, 0, 0) for t in range(2)]
            for row in range(0, 2 * TILE):
                ahead = [b.index(x) for x in (j, combine(s, 2, 1), row // TILE, row % TILE, 0)]
                b.add(tile_ops.prefetch(self.packed_b, *ahead))
            return [b.add(tile_ops.matrix_dot(c, left[i // 2], right[i % 2], unit=name))
                    for i, c in enumerate(carried)]  # fmt: skip

        start = [b.add(zero)] * 4
        acc = b.loop("s", 0, self.steps, 1, step, start)
        for i, c in enumerate(acc):
            at = [b.index(x) for x in (i // 2 * TILE, i % 2 * TILE)]
            b.add(tile_ops.matrix_store(self.strip, c, *at, unit=name))
