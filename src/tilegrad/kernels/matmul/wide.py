"""Matrix products on matrix units that run beside the threads: a @ b of 16-bit floats.

`wide_matmul` is the placed kernel for large m: persistent programs, one producer that fills a
ring of shared tiles by copies, and consumers of 64 rows each that multiply from the ring; results
leave through a staged tile while the next product begins. The hole `epilogue(acc, rows, columns)`
sees pieces of the accumulator and may read further parameters; matrices like the result that it
reads at the result's own places come through the ring too, as steps after the last of the product.

Costs of one (m, n) tile over k: reads (m + n) k elements through the ring, m n k products; what
is outside of the matrices reads as 0 and is not written, so any sizes do whose rows are a
multiple of 16 bytes. Invariant: the order of a sum over k depends on the Plan alone. It is long
because the kernel stands on one page.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.dtype import DType, bool_, float32, int64
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


@dataclass(frozen=True)
class WidePlan:
    """Choices of `wide_matmul`: the tile, the ring, programs, and how tiles are ordered."""

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    programs: int = 132
    group: int = 8  # rows of tiles that are walked together
    staged: int = 64  # columns of a piece of the result on its way out
    cluster: int = 1  # programs with neighbouring tiles that share what they read
    across: bool = False  # neighbours along n, who share a; else along m, who share b
    split: int = 1  # programs that share a tile, each with a part of k; one tile each
    dependent: bool = False  # waits for the launch before it by itself
    early: bool = True  # lets the next launch begin at its own start, not at its end
    together: int = 1  # pieces of the result that are staged at once


@dataclass(frozen=True)
class Operands:
    """a (m, k), b (k, n) and the result, as they lie: strides in elements, one of them 1."""

    m: Size
    n: Size
    k: Size
    dtype: DType
    result: DType
    a_along_k: bool = True  # a is stored (m, k), else (k, m)
    b_along_k: bool = True  # b is stored (n, k), else (k, n)
    batch: Size = 1
    turned: bool = False  # the result is stored (n, m): a are the weights, b few tokens
    weights: tuple[int, ...] = ()  # sizes of several b with one a; n is their sum, or each
    gated: bool = False  # the epilogue makes one result of the products with all weights

    def span(self, tile: tuple[int, int, int]) -> tuple[int, int]:
        """Rows and columns of results that a tile computes: those of each weight, if gated."""
        rows, columns, _ = tile
        parts = len(self.weights) if self.gated else 1
        return (rows // parts, columns) if self.turned else (rows, columns // parts)


Where = tuple[Size, Size, Size]  # batch, row, column
# (piece of 64 rows of each product, of each matrix beside, where they begin) -> what is stored
Epilogue = Callable[..., Node]
# (consumer, where its tokens begin, how many) -> before the first product: what epilogues share
Prologue = Callable[[int, Size, int], None]
# (rows and columns of a piece, where it begins): asks for what its epilogue will read
Ask = Callable[[tuple[int, int], Where], None]


def tile_counts(x: Operands, plan: WidePlan) -> tuple[Size, Size]:
    """Tiles along m and n, in what a cluster takes at once; no tile spans two weights."""
    rows, columns = x.span(plan.tile)
    near_m, near_n = (1, plan.cluster) if plan.across else (plan.cluster, 1)
    down, across = ceil_divide(x.m, rows * near_m), ceil_divide(x.n, columns * near_n)
    if x.weights and not x.gated and x.turned:
        down = -(-sum(-(-n // rows) for n in x.weights) // near_m)
    elif x.weights and not x.gated:
        across = -(-sum(-(-n // columns) for n in x.weights) // near_n)
    return down, across


def in_ring(x: Operands, plan: WidePlan, dtype: DType) -> bool:
    """Whether a matrix like the result that the epilogue reads can come through the ring.

    It takes a's place in a stage, 64 rows of columns that whole pieces divide, and b's below it
    where b lies along k.
    """
    _, tn, tk = plan.tile
    wide = tk if x.a_along_k else 64
    placed_as = x.a_along_k or tk == 64
    plain = not x.turned and not x.weights and plan.split == 1
    return plain and placed_as and dtype is x.dtype and wide % plan.staged == 0 and wide <= tn


def wide_matmul(x: Operands, plan: WidePlan, name: str = "wide_matmul", beside: int = 0) -> Body:
    """The Body with the hole `epilogue`; parameters a, b, c, then those that fill it.

    With `beside`, as many matrices like the result, in the operands' dtype, follow c and come
    through the ring; the hole's last inputs are their pieces.
    """
    lead = () if x.batch == 1 else (x.batch,)
    shapes = (
        (x.m, x.k) if x.a_along_k else (x.k, x.m),
        (x.n, x.k) if x.b_along_k else (x.k, x.n),
        (x.n, x.m) if x.turned else (x.m, x.n),
    )
    uses = ("constant", "value") if x.turned else ("value", "constant")
    b = PlacedBuilder(
        name,
        [
            ("a", Memory((*lead, *shapes[0]), x.dtype, use=uses[0])),
            ("b", Memory((*lead, *shapes[1]), x.dtype, use=uses[1])),
            ("c", Memory((*lead, *shapes[2]), x.result, use="result")),
            *((f"r{i}", Memory((*lead, *shapes[2]), x.dtype, use="value")) for i in range(beside)),
        ],
    )
    return WideMatmul(x, plan, b, b.parameters[:3], beside=b.parameters[3:]).build()


def waves(x: Operands, plan: WidePlan) -> int:
    """How many tiles a program has, at most."""
    tiles = high(x.batch) * high(multiply(*tile_counts(x, plan)))
    return -(-tiles // max(1, plan.programs // (plan.cluster * plan.split)))


def exchanged(plan: WidePlan) -> int:
    """Bytes that a program with a part of k gets from the others that share its tile."""
    return plan.tile[0] * plan.tile[1] // plan.split * (plan.split - 1) * float32.size


def places_out(x: Operands, plan: WidePlan) -> int:
    """Places of pieces on their way out: one for each where all pieces of a tile go at once (those
    of the tile before have left by then), else two in turn."""
    pieces = x.span(plan.tile)[1] // plan.split // plan.staged
    if plan.together >= pieces:
        return pieces
    return min(max(2, plan.together), waves(x, plan) * pieces)


def why_not(x: Operands, plan: WidePlan) -> str:
    """Why no Body with a Plan can be right; '' where one can."""
    tm, tn = x.span(plan.tile)
    wrong = [
        (plan.stages < 2, "a ring has two stages or more"),
        (plan.programs % (plan.cluster * plan.split), "programs come in whole clusters"),
        (tn % (8 * plan.split), "a split k divides the columns in eights"),
        (plan.split > 1 and waves(x, plan) > 1, "with a split k a program has one tile"),
        (tn // plan.split % plan.staged, "staged pieces divide the columns"),
        (plan.across and (tm // 64) % plan.cluster, "a shared a comes in 64 rows a program"),
    ]
    return next((why for is_wrong, why in wrong if is_wrong), "")


class WideMatmul:
    """Builds one Body of `wide_matmul`."""

    def __init__(
        self,
        x: Operands,
        plan: WidePlan,
        b: PlacedBuilder,
        memories: Sequence[Node],
        epilogue: Epilogue | None = None,
        costly: bool = False,
        beside: Sequence[Node] = (),
        prologue: Prologue | None = None,
        ask: Ask | None = None,
    ) -> None:
        self.x, self.plan, self.b, self.epilogue = x, plan, b, epilogue or self.hole
        self.prologue, self.ask = prologue, ask
        self.own = 0  # the consumer that is being built
        self.piece = 0  # the column of its tile that the epilogue's piece begins at
        self.beside = list(beside)  # matrices like the result that come through the ring
        self.costly = costly and not x.gated  # the epilogue needs many registers
        self.a, self.weight, self.c = memories
        self.check()
        self.span = x.span(plan.tile)
        self.halves = self.span[0] // 64
        self.steps = ceil_divide(ceil_divide(x.k, plan.tile[2]), plan.split)  # of one program
        self.wide = plan.tile[2] if x.a_along_k else 64  # columns of what a step brings beside
        self.chunks = -(-self.span[1] // self.wide) if self.beside else 0
        most = 1 + plan.tile[1] // self.span[0] if x.b_along_k else 1  # chunks that a stage holds
        self.fills = -(-self.chunks // most)
        self.per_fill = max(1, -(-self.chunks // max(1, self.fills)))
        self.turns = combine(self.steps, self.fills * len(self.beside), 1)  # of the ring, a tile
        self.tiles_m, self.tiles_n = tile_counts(x, plan)
        self.tiles = multiply(x.batch, multiply(self.tiles_m, self.tiles_n))

    def check(self) -> None:
        """Refuse a Plan that no Body can be right for."""
        why = why_not(self.x, self.plan)
        if not all(in_ring(self.x, self.plan, r.dtype) for r in self.beside):
            why = "no ring for what the epilogue reads"
        if why:
            raise InternalError("kernels.matmul.wide", f"{why}: {self.plan} for {self.x}")

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, plan, x = self.b, self.plan, self.x
        stages = plan.stages
        self.left, self.right = self.ring()
        piece = (plan.staged, 64) if x.turned else (64, plan.staged)
        layout = swizzle_of(piece[1], x.result)
        self.rooms = places_out(x, plan)
        self.staged = b.allocate((self.halves, self.rooms, *piece), x.result, "shared", layout)
        self.full = b.barrier("full", 1, stages)
        if plan.split > 1:
            shape = (self.halves * self.products, plan.split - 1, 64, self.span[1] // plan.split)
            self.partial = b.allocate(shape, float32, "shared", "held")
            self.gathered = b.barrier("gathered", 1, self.halves)
        self.empty = b.barrier("empty", self.halves * plan.cluster, stages)
        program = b.program(0, plan.programs)
        together = plan.cluster * plan.split
        rank = b.cluster_rank(together) if together > 1 else 0
        self.near, self.share = rank % plan.cluster, rank // plan.cluster  # which tile, part of k
        self.program, self.walkers = program // together, plan.programs // together
        few, registers = {1: (0, 0), 2: (40, 232), 3: (32, 160), 4: (0, 0)}[self.halves]
        b.role("producer", 4, few, self.producer)
        for own in range(self.halves):
            b.role(f"consumer{own}", 4, registers, lambda own=own: self.consumer(own))  # type: ignore[misc]
        notes = {"cluster": (together,)} if together > 1 else {}
        return b.finish((plan.programs,), plan=plan, **notes)

    products = 1  # accumulators of a consumer

    def ring(self) -> tuple[Node, Node]:
        """The stages' places of a and of b."""
        b, x, stages, (tm, tn, tk) = self.b, self.x, self.plan.stages, self.plan.tile
        half = (64, tk) if x.a_along_k else (tk, 64)
        side = (tn, tk) if x.b_along_k else (tk, tn)
        left = b.allocate((stages, tm // 64, *half), x.dtype, "shared", "swizzle128")
        return left, b.allocate((stages, *side), x.dtype, "shared", "swizzle128")

    # ---- which tile, which stage ------------------------------------------------------------

    def corner(self, number: Size) -> Where:
        """(batch, row, column) of a tile: groups of rows are walked down, then across."""
        tm, tn = self.span
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
        if self.plan.across:
            column = combine(multiply(column, self.plan.cluster), self.near, 1)
        else:
            row = combine(multiply(row, self.plan.cluster), self.near, 1)
        return batch, multiply(row, tm), multiply(column, tn)

    def turn(self, before: Size, step: Size) -> tuple[Size, Size]:
        """(stage, lap) of a step of a tile; `before` steps were those of earlier tiles."""
        turn = combine(before, step, 1)
        return turn % self.plan.stages, turn // self.plan.stages

    def for_tiles(self, body: object) -> None:
        """body(count, tile number) for every tile of this program."""
        mine = ceil_divide(combine(self.tiles, self.program, -1), self.walkers)

        def one(count: Size, _: list[Node]) -> Sequence[Node]:
            body(count, combine(multiply(count, self.walkers), self.program, 1))  # type: ignore[operator]
            return []

        self.b.loop("count", 0, mine, 1, one)

    # ---- roles ----------------------------------------------------------------------------

    def producer(self) -> None:
        """Fill the ring; the constant operand's first tiles come before the dependency."""
        b, plan = self.b, self.plan
        early = 0
        first = self.a if self.x.turned else self.weight
        constant = first.type.use == "constant"  # type: ignore[union-attr]
        if plan.dependent and constant and isinstance(self.steps, int):
            early = min(plan.stages, self.steps)
            some = b.less(self.program, self.tiles)
            b.branch(some, lambda: self.fill_early(early, True))
            b.do(placed.grid_dependency_wait)
            b.branch(some, lambda: self.fill_early(early, False))
        elif plan.dependent:
            b.do(placed.grid_dependency_wait)

        def tile(count: Size, number: Size) -> None:
            where = self.held_corner(number)
            turn = self.held("turn", multiply(count, self.turns))

            def step(s: Size, _: list[Node]) -> Sequence[Node]:
                stage, lap = self.turn(turn, s)
                b.wait(self.empty, stage, (lap + 1) % 2)
                b.expect(self.full, stage, self.stage_bytes)
                self.fill_left(stage, where, s)
                self.fill_right(stage, where, s)
                return []

            done = maximum(combine(early, multiply(count, early), -1), 0)
            b.loop("step", done, self.steps, 1, step)
            for fill in range(self.fills):
                self.fill_beside(turn, where, fill)

        self.for_tiles(tile)

    def fill_beside(self, turn: Size, where: Where, fill: int) -> None:
        """Some columns of what the epilogue reads, those of each matrix in a stage.

        Programs of a cluster bring each other's rows in equal parts: who has all of his then knows
        that the stage is free everywhere, and may say that it is free again.
        """
        b, (batch, row, column), cluster = self.b, where, self.plan.cluster
        lead, axes = ((), (0, 1)) if self.x.batch == 1 else ((batch,), (1, 2))
        count = 64 // cluster
        first = multiply(self.near, count)
        chunks = self.chunks_of(fill)
        for number, memory in enumerate(self.beside):
            stage, lap = self.turn(turn, self.beside_step(fill, number))
            b.wait(self.empty, stage, (lap + 1) % 2)
            b.expect(self.full, stage, len(chunks) * self.span[0] * self.wide * memory.dtype.size)
            for chunk, own, near in itertools.product(chunks, range(self.halves), range(cluster)):
                at = (combine(row, 64 * own, 1), combine(column, chunk * self.wide, 1))
                place, index, begin = self.beside_place(stage, chunk, own)
                if cluster == 1:
                    b.copy_async(
                        place, index, memory, (*lead, *at), axes, self.full, stage, (begin, 64)
                    )
                    continue
                at = self.of_neighbour(near, combine(at[0], first, 1), at[1])
                b.copy_multicast(
                    place,
                    index,
                    (combine(begin, first, 1), count),
                    memory,
                    (*lead, *at),
                    axes,
                    self.full,
                    stage,
                    1 << near,
                    self.first,
                )

    def chunks_of(self, fill: int) -> range:
        """The chunks of columns that come with one of the stages that a matrix beside takes."""
        return range(fill * self.per_fill, min(self.chunks, (fill + 1) * self.per_fill))

    def beside_place(self, stage: Size, chunk: int, own: int) -> tuple[Node, tuple[Size, ...], int]:
        """Where a consumer's rows of a chunk lie in a stage: the first chunk where a's tile does,
        others one below another where b's does. (place, leading index, first row)"""
        below = chunk % self.per_fill - 1
        if below < 0:
            return self.left, (stage, own), 0
        return self.right, (stage,), 64 * (below * self.halves + own)

    def of_neighbour(self, near: int, row: Size, column: Size) -> tuple[Size, Size]:
        """A row and column of this program's tile, in that of another of the cluster."""
        away = combine(near, self.near, -1)
        if self.plan.across:
            return row, combine(column, multiply(away, self.span[1]), 1)
        return combine(row, multiply(away, self.span[0]), 1), column

    def beside_step(self, fill: int, number: int) -> Size:
        """The step of a tile that brings columns of a matrix beside."""
        return combine(self.steps, fill * len(self.beside) + number, 1)

    def fill_early(self, count: int, constant: bool) -> None:
        """The first steps of the first tile: of the constant operand, or of the other."""
        b = self.b
        where = self.held_corner(self.program)

        def step(s: Size, _: list[Node]) -> Sequence[Node]:
            if constant:
                b.expect(self.full, s, self.stage_bytes)
            fill = self.fill_left if constant == self.x.turned else self.fill_right
            fill(s, where, s)
            return []

        b.loop("early", 0, count, 1, step)

    def held(self, name: str, value: Size) -> Size:
        """A value computed here, once."""
        if isinstance(value, int):
            return value
        return self.b.atom(name, self.b.index(value), low(value), high(value))

    def held_corner(self, number: Size) -> Where:
        """The corner of a tile, computed before the loop over its steps."""
        batch, row, column = self.corner(number)
        return self.held("batch", batch), self.held("row", row), self.held("column", column)

    @property
    def stage_bytes(self) -> int:
        """Bytes that land in one stage."""
        tm, tn, tk = self.plan.tile
        return (tm + tn) * tk * self.x.dtype.size

    def place_of(self, step: Size) -> Size:
        """Where along k a step of this program lies."""
        if self.plan.split > 1:
            step = combine(multiply(self.share, self.steps), step, 1)
        return multiply(step, self.plan.tile[2])

    def fill_left(self, stage: Size, where: Where, step: Size) -> None:
        """A tile of a, 64 rows a copy; shared along n, each program brings some for all."""
        b, x, plan = self.b, self.x, self.plan
        batch, row, _ = where
        lead, axes = ((), (0, 1)) if x.batch == 1 else ((batch,), (1, 2))
        k = self.place_of(step)
        shared = plan.across and plan.cluster > 1
        for own in range(self.halves // plan.cluster if shared else self.halves):
            half: Size = own
            if shared:
                half = combine(multiply(self.near, self.halves // plan.cluster), own, 1)
            at = combine(row, multiply(half, 64), 1)
            index = (*lead, *((at, k) if x.a_along_k else (k, at)))
            if shared:
                rows = (0, self.left.shape[2])
                b.copy_multicast(
                    self.left,
                    (stage, half),
                    rows,
                    self.a,
                    index,
                    axes,
                    self.full,
                    stage,
                    self.mask,
                    self.first,
                )
            else:
                b.copy_async(self.left, (stage, half), self.a, index, axes, self.full, stage)

    def fill_right(self, stage: Size, where: Where, step: Size, at: tuple[int, ...] = ()) -> None:
        """A tile of b; shared along m, each program brings some of its rows for all."""
        b, x, plan = self.b, self.x, self.plan
        batch, _, column = where
        lead, axes = ((), (0, 1)) if x.batch == 1 else ((batch,), (1, 2))
        k = self.place_of(step)
        index = (column, k) if x.b_along_k else (k, column)
        weight = self.weight
        if plan.cluster == 1 or plan.across:
            b.copy_async(self.right, (stage, *at), weight, (*lead, *index), axes, self.full, stage)
            return
        rows = self.right.shape[-2] // plan.cluster
        first = multiply(self.near, rows)
        index = (combine(index[0], first, 1), index[1])
        b.copy_multicast(
            self.right,
            (stage, *at),
            (first, rows),
            weight,
            (*lead, *index),
            axes,
            self.full,
            stage,
            self.mask,
            self.first,
        )

    @property
    def mask(self) -> int:
        """The programs that share what is read, as bits from `first` on."""
        return (1 << self.plan.cluster) - 1

    @property
    def first(self) -> Size:
        """The rank of the first program that shares what this one reads."""
        return multiply(self.share, self.plan.cluster)

    def release(self, stage: Size) -> None:
        """Give a stage back to every program that fills it."""
        if self.plan.cluster == 1:
            self.b.arrive(self.empty, stage)
        for near in range(self.plan.cluster) if self.plan.cluster > 1 else ():
            self.b.arrive_remote(self.empty, stage, combine(self.first, near, 1))

    def consumer(self, own: int) -> None:
        """Multiply 64 rows of every tile, and write them out."""
        b, plan = self.b, self.plan
        if plan.dependent:
            b.do(placed.grid_dependency_wait)
            if plan.early:
                b.do(placed.grid_launch_dependents)
        self.begin(own)
        totals = [b.register_tile((64, self.span[1]), float32) for _ in range(self.products)]

        def tile(count: Size, number: Size) -> None:
            turn = self.held("turn", multiply(count, self.turns))

            def step(s: Size, _: list[Node]) -> Sequence[Node]:
                stage, lap = self.turn(turn, s)
                b.wait(self.full, stage, lap % 2)
                b.do(placed.matrix_fence)
                for number_, total in enumerate(totals):
                    self.one_product(total, number_, own, stage, b.less(0, s))
                b.do(placed.matrix_commit)
                b.do(placed.matrix_wait, pending=1)
                before = self.turn(turn, combine(s, 1, -1))[0]
                b.branch(b.less(0, s), lambda: self.release(before))
                return []

            b.loop("step", 0, self.steps, 1, step)
            b.do(placed.matrix_wait, pending=0)
            self.release(self.turn(turn, combine(self.steps, 1, -1))[0])
            self.write(own, count, number, totals)

        self.for_tiles(tile)
        if plan.dependent and not plan.early:
            b.do(placed.grid_launch_dependents)
        b.do(placed.wait_copies, pending=0)

    def begin(self, own: int) -> None:
        """What the epilogues of a consumer share, where all tokens are in one tile; and what they
        read, where the program has one tile."""
        each = self.span[1] // self.plan.split
        if self.ask is not None and waves(self.x, self.plan) == 1:
            batch, row, column = self.held_corner(self.program)
            column = combine(column, multiply(self.share, each), 1)
            for start in range(0, each, self.plan.staged):
                self.own, self.piece = own, start
                at = (batch, combine(row, 64 * own, 1), combine(column, start, 1))
                self.ask((64, self.plan.staged), at)
        if self.prologue is None:
            return
        if self.x.turned:
            self.prologue(own, multiply(self.share, each) if self.plan.split > 1 else 0, each)
        else:
            self.prologue(own, 64 * own, 64)

    def one_product(self, total: Node, number: int, own: int, stage: Size, more: Node) -> None:
        """One product of a stage."""
        x, at = self.x, self.places(number, own, stage)
        self.b.matrix_async(
            total,
            self.left,
            self.right,
            more,
            at,
            transpose_a=not x.a_along_k,
            transpose_b=x.b_along_k,
        )

    def places(self, _: int, own: int, stage: Size) -> tuple[Size, ...]:
        """Where in the ring the operands of a product lie."""
        return stage, own, stage

    def write(self, own: int, count: Size, number: Size, totals: Sequence[Node]) -> None:
        """Bring a finished tile out."""
        where = self.held_corner(number)
        sums = [self.b.read(total) for total in totals]
        if self.plan.split > 1:
            sums = self.gather(own, sums, self.span[1] // self.plan.split)
        self.write_sums(own, count, where, sums)

    def write_sums(self, own: int, count: Size, where: Where, sums: Sequence[Node]) -> None:
        """Epilogue and cast; then `together` pieces at a time: stage, copy out."""
        b, plan = self.b, self.plan
        batch, row, column = where
        row = combine(row, 64 * own, 1)
        wide, tn = plan.staged, self.span[1] // plan.split
        if plan.split > 1:
            column = combine(column, multiply(self.share, tn), 1)
        pieces = tn // wide
        ahead = -(-pieces // 2) if self.costly else pieces
        ahead = self.wide // wide if self.beside else ahead
        near: list[list[Node]] = []  # of each matrix beside, the chunks of a stage
        for first in range(0, pieces, ahead):
            ready = []  # computed before the next barrier: what it reads comes at once
            fill, chunk = divmod(first // ahead, self.per_fill)
            if chunk == 0:
                near = [
                    self.read_beside(own, count, fill, i, sums[0]) for i in range(len(self.beside))
                ]
            for number_ in range(first, min(pieces, first + ahead)):
                turn = combine(multiply(count, pieces), number_, 1)
                place: tuple[Size, Size] = (own, modulo(turn, self.rooms))
                start = number_ * wide
                piece = [cut(b, s, start, wide) for s in sums]
                piece += [cut(b, chunks[chunk], start - first * wide, wide) for chunks in near]
                at = (batch, row, combine(column, start, 1))
                self.own, self.piece = own, start
                ready.append((b.cast(self.epilogue(*piece, at), self.x.result), at, place))
            for some in range(0, len(ready), plan.together):
                self.write_pieces(own, ready[some : some + plan.together])

    def read_beside(self, own: int, count: Size, fill: int, number: int, sums: Node) -> list[Node]:
        """Columns of a matrix that the ring brought, in chunks; their stage is given back."""
        b = self.b
        stage, lap = self.turn(multiply(count, self.turns), self.beside_step(fill, number))
        b.wait(self.full, stage, lap % 2)
        found = []
        for chunk in self.chunks_of(fill):
            place, index, begin = self.beside_place(stage, chunk, own)
            found.append(b.read(place, *index, rows=(begin, 64)))
        self.release(stage)
        if self.wide == self.plan.staged:
            return found
        return [self.held_as(value, sums) for value in found]

    def held_as(self, value: Node, sums: Node) -> Node:
        """A value, held in registers as the accumulator is: what is chosen never is the other."""
        b, shape = self.b, value.shape
        held = b.cast(b.add(ops.part(sums, start=(0, 0), shape=shape)), value.dtype)
        return b.apply("where", b.constant(False, bool_, shape), held, value)

    def gather(self, own: int, sums: Sequence[Node], wide: int) -> list[Node]:
        """Every program that shares the tile gives each other one its columns; a sum begins with
        a program's own part of k and goes on with those before it, around."""
        b, split = self.b, self.plan.split

        def rank(share: Size) -> Size:
            return combine(self.near, multiply(share, self.plan.cluster), 1)

        first = own * self.products
        others = [
            self.held("other", modulo(combine(self.share, away, 1), split))
            for away in range(1, split)
        ]
        b.expect(self.gathered, own, self.products * (split - 1) * 64 * wide * float32.size)
        for number, (slot, share) in itertools.product(range(self.products), enumerate(others)):
            piece = self.columns_of(sums[number], share, wide)
            b.send(
                self.partial, piece, self.gathered, own, rank(share), first + number, slot, to="one"
            )
        b.wait(self.gathered, own, 0)
        found = []
        for number in range(self.products):
            total = self.columns_of(sums[number], self.share, wide)
            for slot in range(split - 1):
                total = b.apply("add", total, b.read(self.partial, first + number, slot))
            found.append(total)
        return found

    def columns_of(self, sums: Node, share: Size, wide: int) -> Node:
        """The columns of an accumulator that a program owns: chosen, since registers have no
        index."""
        b = self.b
        found = cut(b, sums, (self.plan.split - 1) * wide, wide)
        for before in reversed(range(self.plan.split - 1)):
            chosen = b.broadcast(b.less(share, before + 1), found.shape)
            found = b.apply("where", chosen, cut(b, sums, before * wide, wide), found)
        return found

    def write_pieces(self, own: int, group: list[tuple[Node, Where, tuple[Size, Size]]]) -> None:
        """Pieces of a result on their way out: (value, where it begins, the staged place)."""
        b, x = self.b, self.x
        axes = (0, 1) if x.batch == 1 else (1, 2)
        b.do(placed.wait_copies, pending=max(0, self.rooms // self.plan.together - 1))
        for value, _, place in group:
            if x.turned:
                value = b.add(ops.transpose(value, order=(1, 0)))
            b.write(self.staged, value, *place)
        b.do(placed.fence, kind="async")
        b.do(placed.named_sync, number=own, threads=128)
        for _, (batch, row, column), place in group:
            lead = () if x.batch == 1 else (batch,)
            index = (column, row) if x.turned else (row, column)
            b.copy_store(self.c, (*lead, *index), axes, self.staged, place)
        b.do(placed.commit_copies)

    def hole(self, *given: Any) -> Node:
        """The hole `epilogue(piece, rows, columns)`, for whoever fills it."""
        piece, *near, (batch, row, column) = given
        b = self.b
        inputs = [
            piece,
            self.positions(64, row, (64, 1)),
            self.positions(piece.shape[1], column, (1, piece.shape[1])),
        ]
        if self.x.batch != 1:
            inputs.append(b.index(batch))
        return b.hole("epilogue", Tile(piece.shape, float32), *inputs, *near)

    def positions(self, size: int, start: Size, shape: tuple[int, int]) -> Node:
        """start, start + 1, ... as a column or a row."""
        b = self.b
        line = b.apply("add", b.add(ops.iota(size=size, dtype=int64)), b.index(start))
        return b.add(ops.reshape(line, shape=shape))


def cut(b: PlacedBuilder, value: Node, start: int, wide: int) -> Node:
    """Some columns of a Tile."""
    if value.shape[1] == wide:
        return value
    return b.add(ops.part(value, start=(0, start), shape=(value.shape[0], wide)))


def swizzle_of(columns: int, dtype: DType) -> str:
    """The swizzle whose span is one row (or a part) of so many columns; '' for none."""
    bytes_ = columns * dtype.size
    fits = [span for span in (128, 64, 32) if bytes_ % span == 0]
    return f"swizzle{fits[0]}" if fits and bytes_ & (bytes_ - 1) == 0 else ""
