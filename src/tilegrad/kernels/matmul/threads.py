"""Matrix products whose copies and products the threads make themselves: a @ b of 16-bit floats.

`thread_matmul` is the placed kernel for machines whose matrix units belong to a warp: one role of
all warps, one tile a program or persistent programs. A ring of shared tiles is filled by copies of
16 bytes a thread; operands of the next 16 columns of k come to registers while those before are
multiplied, across the ends of stages and tiles too, so that the role meets once for each stage.
Results leave through a staged tile in rows of whole pieces. The hole `epilogue(acc, rows,
columns)` sees pieces of the accumulator and may read further parameters.

Costs of one (m, n) tile over k: reads (m + n) k elements through the ring, and of the ring again
as often as warps stand beside each other; m n k products. Whatever is outside of the matrices
reads as 0 and is not written, so any sizes do whose rows are a multiple of 16 bytes. Invariant:
the order of a sum over k is that of k, whatever the Plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import float32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import (
    Size,
    ceil_divide,
    combine,
    floor_divide,
    high,
    low,
    maximum,
    minimum,
    modulo,
    multiply,
)
from ...ir.types import Memory, Tile
from ...tile import ops, placed
from ...tile.build import Body
from ...tile.placed import PlacedBuilder
from .shape import Epilogue, Operands, swizzle_of

DEPTH = 16  # of k in one product of the matrix units
Corner = tuple[Size, Size, Size]  # batch, row, column
Source = tuple[Corner, Size]  # of copies: a tile, and where along k


@dataclass(frozen=True)
class ThreadPlan:
    """Choices of `thread_matmul`: the tile, warps, the ring, and how tiles are ordered."""

    tile: tuple[int, int, int] = (128, 256, 64)
    warps: tuple[int, int] = (2, 4)  # down and across the tile
    stages: int = 4
    group: int = 8  # rows of tiles that are walked together
    staged: tuple[int, int] = (128, 64)  # of a piece of the result on its way out
    programs: int = 0  # that walk the tiles; 0 for one each
    buffers: int = 2  # of operands in registers; 1 leaves room for larger tiles of a warp


def thread_matmul(x: Operands, plan: ThreadPlan, name: str = "thread_matmul") -> Body:
    """The Body with the hole `epilogue`; parameters a, b, c, then those that fill it."""
    lead = () if x.batch == 1 else (x.batch,)
    b = PlacedBuilder(
        name,
        [
            ("a", Memory((*lead, *((x.m, x.k) if x.a_along_k else (x.k, x.m))), x.dtype)),
            (
                "b",
                Memory(
                    (*lead, *((x.n, x.k) if x.b_along_k else (x.k, x.n))), x.dtype, use="constant"
                ),
            ),
            ("c", Memory((*lead, x.m, x.n), x.result, use="result")),
        ],
    )
    return ThreadMatmul(x, plan, b, b.parameters).build()


class ThreadMatmul:
    """Builds one Body of `thread_matmul`."""

    def __init__(
        self,
        x: Operands,
        plan: ThreadPlan,
        b: PlacedBuilder,
        memories: Sequence[Node],
        epilogue: Epilogue | None = None,
    ) -> None:
        self.x, self.plan, self.b, self.epilogue = x, plan, b, epilogue or self.hole
        self.a, self.weight, self.c = memories
        tm, tn, tk = plan.tile
        self.threads = 32 * plan.warps[0] * plan.warps[1]
        self.steps = ceil_divide(x.k, tk)
        self.groups = tk // DEPTH  # of products in a stage
        if plan.programs and low(self.steps) < plan.stages - 1:
            raise InternalError(
                "kernels.thread_matmul",
                f"{self.steps} steps of k are fewer than "
                f"a ring of {plan.stages} stages holds ahead",
            )
        self.tiles_m, self.tiles_n = ceil_divide(x.m, tm), ceil_divide(x.n, tn)
        self.tiles = multiply(x.batch, multiply(self.tiles_m, self.tiles_n))

    def build(self) -> Body:
        """Places and the role."""
        b, plan, x = self.b, self.plan, self.x
        tm, tn, tk = plan.tile
        left = (tm, tk) if x.a_along_k else (tk, tm)
        right = (tn, tk) if x.b_along_k else (tk, tn)
        self.left, self.right = (
            b.allocate((plan.stages, *side), x.dtype, "shared", swizzle_of(side[1], x.dtype))
            for side in (left, right)
        )
        layout = swizzle_of(plan.staged[1], x.result)
        self.staged = b.allocate((2, *plan.staged), x.result, "shared", layout)
        programs = plan.programs or self.tiles
        program = b.program(0, programs)
        b.role("threads", self.threads // 32, 0, lambda: self.role(program))
        return b.finish((programs,), plan=plan)

    # ---- which tile -------------------------------------------------------------------------

    def corner(self, number: Size) -> Corner:
        """(batch, row, column) of a tile: groups of rows are walked down, then across."""
        tm, tn, _ = self.plan.tile
        each = multiply(self.tiles_m, self.tiles_n)
        batch, rest = floor_divide(number, each), modulo(number, each)
        if self.x.batch == 1:
            batch, rest = 0, number
        group = self.plan.group
        wide = multiply(group, self.tiles_n)
        first = multiply(floor_divide(rest, wide), group)
        rows = maximum(minimum(combine(self.tiles_m, first, -1), group), 1)
        within = modulo(rest, wide)
        row = combine(first, modulo(within, rows), 1)
        column = floor_divide(within, rows)
        return (
            self.held("batch", batch, self.x.batch, 1),
            self.held("row", multiply(row, tm), self.tiles_m, tm),
            self.held("column", multiply(column, tn), self.tiles_n, tn),
        )

    def held(self, name: str, value: Size, count: Size = 0, each: int = 0) -> Size:
        """A value computed here, once, within `count` places; said where that is no Symbol."""
        if isinstance(count, int) and count and not isinstance(value, int):
            value = minimum(value, (count - 1) * each)
        if isinstance(value, int):
            return value
        return self.b.atom(name, self.b.index(value), low(value), high(value))

    # ---- the role ---------------------------------------------------------------------------

    def role(self, program: Size) -> None:
        """Fill the ring, then tile by tile multiply from it and write."""
        b, plan, x = self.b, self.plan, self.x
        tm, tn, tk = plan.tile
        where = self.corner(program)
        for step in range(plan.stages - 1):
            self.copy((where, step * tk), step, range(self.groups))
            b.do(placed.commit_threads)
        total = b.register_tile((tm, tn), float32)
        self.operands = [
            (b.register_tile((tm, DEPTH), x.dtype), b.register_tile((tn, DEPTH), x.dtype))
            for _ in range(plan.buffers)
        ]
        self.meet(plan.stages - 2)
        self.load(0, 0)
        if plan.programs:
            mine = ceil_divide(combine(self.tiles, program, -1), plan.programs)

            def tile(count: Size, _: list[Node]) -> Sequence[Node]:
                self.tile(total, count, combine(program, multiply(count, plan.programs), 1))
                return []

            b.loop("count", 0, mine, 1, tile)
        else:
            self.tile(total, 0, program, where)
        b.do(placed.wait_threads, pending=0)

    def tile(self, total: Node, count: Size, number: Size, where: Corner | None = None) -> None:
        """One tile; copies past its end are those of the next one."""
        b, plan = self.b, self.plan
        following = None
        if where is None:
            where = self.corner(number)
            last = combine(self.tiles, 1, -1)
            after = combine(number, plan.programs, 1)
            following = (b.less_equal(after, last), self.corner(minimum(after, last)))
        own = where
        b.write(total, b.constant(0.0, float32, total.shape))
        before = self.held("turn", multiply(count, self.steps))

        def step(s: Size, _: list[Node]) -> Sequence[Node]:
            turn = combine(before, s, 1)
            ahead = combine(s, plan.stages - 1, 1)
            source = self.source(ahead, own, following)
            for group in range(self.groups):
                last = group == self.groups - 1
                if last:
                    self.meet(plan.stages - 2)
                if plan.buffers == 1:
                    self.multiply(total, group)
                self.load(combine(turn, int(last), 1) % plan.stages, group + 1)
                if not last:
                    self.copy(source, combine(turn, plan.stages - 1, 1) % plan.stages, [group])
                if group == self.groups - 2:
                    b.do(placed.commit_threads)
                if plan.buffers > 1:
                    self.multiply(total, group)
            return []

        b.loop("step", 0, self.steps, 1, step)
        self.write(total, where)

    def source(self, ahead: Size, own: Corner, following: tuple[Node, Corner] | None) -> Source:
        """Where a step to come reads: in this tile, or past its end in the next one."""
        b, tk = self.b, self.plan.tile[2]
        k = multiply(ahead, tk)
        if following is None:
            return own, k
        more, corner = following
        here = b.less(ahead, self.steps)
        end = multiply(self.steps, tk)
        beyond = b.apply("where", more, b.index(combine(k, end, -1)), b.index(end))

        def choose(name: str, one: Size, other: Size) -> Size:
            if one == other:
                return one
            most = max(high(one), high(other))
            return b.atom(name, b.apply("where", here, b.index(one), b.index(other)), 0, most)

        found = tuple(choose("from", one, other) for one, other in zip(own, corner))
        k = b.atom("k", b.apply("where", here, b.index(k), beyond), 0, high(end))
        return found, k  # type: ignore[return-value]

    def meet(self, pending: int) -> None:
        """Copies but those of the last groups are there, for all threads."""
        self.b.do(placed.wait_threads, pending=pending)
        self.b.do(placed.named_sync, number=0, threads=self.threads)

    def load(self, stage: Size, group: int) -> None:
        """Registers for a group of products of a stage."""
        left, right = self.operands[group % self.plan.buffers]
        start = group % self.groups * DEPTH
        self.b.load_operand(left, self.left, (stage,), start, not self.x.a_along_k)
        self.b.load_operand(right, self.right, (stage,), start, not self.x.b_along_k)

    def multiply(self, total: Node, group: int) -> None:
        """A group of products."""
        operands = self.operands[group % self.plan.buffers]
        self.b.matrix_sync(total, *operands, self.plan.warps)

    def copy(self, source: Source, stage: Size, groups: Sequence[int]) -> None:
        """What is copied beside some groups of products; past the end of k that is zeros."""
        (batch, row, column), k = source
        sides = (
            (self.left, self.a, row, self.x.a_along_k),
            (self.right, self.weight, column, self.x.b_along_k),
        )
        parts = [(side, rows) for side in sides for rows in self.shares(side[0])]
        beside = max(1, self.groups - 1)
        for number, ((place, memory, at, along_k), rows) in enumerate(parts):
            if number * beside // len(parts) not in groups:
                continue
            index = [at, k] if along_k else [k, at]
            index[0] = combine(index[0], rows[0], 1)
            lead, axes = ((), (0, 1)) if self.x.batch == 1 else ((batch,), (1, 2))
            self.b.copy_threads(place, (stage,), memory, (*lead, *index), axes, rows)

    def shares(self, place: Node) -> list[tuple[int, int]]:
        """Rows (first, count) of a place that one round of all threads copies."""
        rows, columns = (int(s) for s in place.shape[1:])
        round_ = max(8, self.threads * 16 // (columns * self.x.dtype.size))
        return [(first, min(round_, rows)) for first in range(0, rows, round_)]

    # ---- the result -------------------------------------------------------------------------

    def write(self, total: Node, where: Corner) -> None:
        """Piece by piece: epilogue, cast, stage (two places in turn), store."""
        b, x = self.b, self.x
        (tm, tn, _), (down, wide) = self.plan.tile, self.plan.staged
        batch, row, column = where
        lead, axes = ((), (0, 1)) if x.batch == 1 else ((batch,), (1, 2))
        sums = b.read(total)
        corners = [(r, c) for r in range(0, tm, down) for c in range(0, tn, wide)]
        for number, (r, c) in enumerate(corners):
            piece = b.add(ops.part(sums, start=(r, c), shape=(down, wide)))
            at = (combine(row, r, 1), combine(column, c, 1))
            value = b.cast(self.epilogue(piece, (batch, *at)), x.result)
            b.write(self.staged, value, number % 2)
            b.do(placed.named_sync, number=0, threads=self.threads)
            b.store_threads(self.c, (*lead, *at), axes, self.staged, (number % 2,))

    def hole(self, piece: Node, where: tuple[Size, Size, Size]) -> Node:
        """The hole `epilogue(piece, rows, columns)`, for whoever fills it."""
        b, (batch, row, column) = self.b, where
        down, wide = piece.shape
        inputs = [
            piece,
            self.positions(down, row, (down, 1)),
            self.positions(wide, column, (1, wide)),
        ]
        if self.x.batch != 1:
            inputs.append(b.index(batch))
        return b.hole("epilogue", Tile(piece.shape, float32), *inputs)

    def positions(self, size: int, start: Size, shape: tuple[int, int]) -> Node:
        """start, start + 1, ... as a column or a row."""
        b = self.b
        line = b.apply("add", b.add(ops.iota(size=size, dtype=int64)), b.index(start))
        return b.add(ops.reshape(line, shape=shape))
