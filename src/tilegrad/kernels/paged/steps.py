"""What the warps that multiply do with a block of keys: scores, weights, sums of values.

Kernels of a paged cache share this: they differ in which blocks a program takes, in what order,
and in what becomes of the sums. Queries are few, so they are the short side of both products:
scores^T (keys, rows) = K Q^T, and out^T (width, rows) += V^T P^T with P^T through shared memory.
Two rings, of keys and of values, are filled by others.

Keys that nobody of a row block sees are masked, and values beside them count as zeros whatever
the cache holds there. Invariant: after a block, `total` holds the weighted sum of all values so
far and the carried (best, sums) the largest score and the sums of weights, of all keys or by key
of a block, as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtype import float16, float32, int64
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high
from ...tile import ops, placed
from ...tile.placed import PlacedBuilder
from .shape import PagedPlan, PagedShape, ShortPlan, padded

LOG2_E = 1.4426950408889634
BARRIER = 0  # at which the warps that multiply meet


class Steps:
    """The places of a program, and what happens with a block of keys."""

    def __init__(self, x: PagedShape, plan: PagedPlan | ShortPlan, b: PlacedBuilder) -> None:
        self.x, self.plan, self.b = x, plan, b
        self.memory = {p.attrs["name"]: p for p in b.parameters}
        self.q, self.table, self.out = (self.memory[n] for n in ("q", "table", "out"))
        self.cache = (self.memory["keys"], self.memory["values"])
        self.scales = self.memory.get("scales")
        self.factors: list[Node] = []  # of keys and values of 8 bits
        # float16 holds the floats of 8 bits exactly, and one instruction makes two of them
        self.operand = float16 if x.scaled else x.dtype
        self.per = 1  # tokens of a row block
        self.reach = x.window  # keys before its end that a token sees, if there is a window
        self.widths = (padded(x.width), padded(x.value_width))
        self.threads = 32 * plan.warps
        self.most_blocks = max(1, high(ceil_divide(x.most_pages * x.page, plan.block)))

    def make_places(self) -> None:
        """Rings with their barriers, and operands of the products."""
        b, plan, x = self.b, self.plan, self.x
        stages = plan.stages
        self.rings, self.full, self.empty = [], [], []
        for name, width in zip(("keys", "values"), self.widths):
            layout = "swizzle128" if width * x.cache.size >= 128 else "swizzle64"
            self.rings.append(b.allocate((stages, plan.block, width), x.cache, "shared", layout))
            self.full.append(b.barrier(f"{name}_full", 1, stages))
            self.empty.append(b.barrier(f"{name}_empty", 1, stages))
        self.operands, dtype = self.rings, self.operand
        if x.scaled:
            self.operands = [
                b.allocate((plan.block, width), dtype, "shared", "swizzle128")
                for width in self.widths
            ]
        self.queries = b.allocate((plan.rows, self.widths[0]), dtype, "shared", "swizzle128")
        self.weights = b.allocate((plan.rows, plan.block), dtype, "shared", "swizzle128")

    def make_tiles(self) -> None:
        """Places in the registers of the role that multiplies, and the scales of a cache."""
        b, rows = self.b, self.plan.rows
        self.scores = b.register_tile((self.plan.block, rows), float32)
        self.total = b.register_tile((self.widths[1], rows), float32)
        if self.scales is not None:
            self.factors = [b.load(self.scales, (i,)) for i in range(2)]

    def meet(self) -> None:
        """What the warps stored is there for their products."""
        self.b.do(placed.fence, kind="async")
        self.b.do(placed.named_sync, number=BARRIER, threads=self.threads)

    def slot(self, before: Size, step: Size) -> tuple[Size, Size]:
        """(stage, lap) of a block."""
        turn = before + step
        return turn % self.plan.stages, turn // self.plan.stages

    def within(self, value: Node, least: int, most: int) -> Node:
        """A number, brought within bounds."""
        b = self.b
        return b.apply("maximum", b.apply("minimum", value, b.index(most)), b.index(least))

    def counted(self, shape: tuple[int, int], axis: int, start: Size = 0) -> Node:
        """A number for every row or column, as a tile of one of them."""
        b = self.b
        line = b.add(ops.iota(size=shape[axis], dtype=int64))
        if not isinstance(start, int) or start:
            line = b.apply("add", line, b.index(start))
        only = tuple(size if a == axis else 1 for a, size in enumerate(shape))
        return b.add(ops.reshape(line, shape=only))

    # ---- a block ------------------------------------------------------------------------------

    def step(
        self, slot: tuple[Size, Size], block: Size, sees: Size, tokens: Size, carried: list[Node]
    ) -> Sequence[Node]:
        """One block of keys, in a (stage, lap) of the rings: the first token of the row block
        sees `sees` keys, the next one more."""
        b, plan = self.b, self.plan
        best, sums = carried
        stage, lap = slot
        key = b.atom("key", b.index(block * plan.block), 0, self.most_blocks * plan.block)
        scores = self.seen(self.scaled(self.products(slot)), sees, key)
        largest = b.add(ops.reduce(scores, axis=0, kind="max"))
        now = b.apply("maximum", best, b.add(ops.reshape(largest, shape=best.shape)))
        base = self.finite(now)
        p = b.apply("quick_exp2", b.apply("subtract", scores, base))
        shrink = b.apply("quick_exp2", b.apply("subtract", best, base))
        if sums.shape == p.shape:
            sums = b.apply("multiply_add", sums, b.broadcast(shrink, sums.shape), p)
        weights = b.add(ops.transpose(b.cast(p, self.operand), order=(1, 0)))
        b.write(self.weights, weights)
        self.clear_unseen(sees, tokens, key, slot)
        self.meet()
        b.write(self.total, b.apply("multiply", b.read(self.total), shrink))
        if not self.x.scaled:
            b.wait(self.full[1], stage, lap % 2)
        b.do(placed.matrix_fence)
        at = () if self.x.scaled else (stage,)
        b.matrix_async(
            self.total, self.operands[1], self.weights, True, at, transpose_a=True, transpose_b=True
        )
        b.do(placed.matrix_commit)
        if sums.shape != p.shape:  # while values are multiplied
            more = b.add(ops.reshape(b.add(ops.reduce(p, axis=0, kind="sum")), shape=sums.shape))
            sums = b.apply("multiply_add", sums, shrink, more)
        b.do(placed.matrix_wait, pending=0)
        if not self.x.scaled:
            b.arrive(self.empty[1], stage)
        return [now, sums]

    def products(self, slot: tuple[Size, Size]) -> Node:
        """Keys of a block times queries."""
        b, (stage, lap) = self.b, slot
        b.wait(self.full[0], stage, lap % 2)
        at = self.unpacked(0, stage)
        b.do(placed.matrix_fence)
        b.matrix_async(self.scores, self.operands[0], self.queries, False, at, transpose_b=True)
        b.do(placed.matrix_commit)
        b.do(placed.matrix_wait, pending=0)
        if not self.x.scaled:
            b.arrive(self.empty[0], stage)
        return b.read(self.scores)

    def unpacked(self, which: int, stage: Size) -> tuple[Size, ...]:
        """Where an operand lies: in the ring, or beside it once it is widened to 16 bits."""
        b = self.b
        if not self.x.scaled:
            return (stage,)
        wide = b.cast(b.read(self.rings[which], stage), self.operand)
        b.arrive(self.empty[which], stage)
        b.write(self.operands[which], wide)
        self.meet()
        return ()

    def scaled(self, scores: Node) -> Node:
        """Scores times log2(e) and the scale, softly capped if asked."""
        b, x = self.b, self.x
        if self.factors:
            scores = b.apply("multiply", scores, self.factors[0])
        if x.softcap:
            inner = b.apply("multiply", scores, b.constant(x.scale / x.softcap, float32))
            return b.apply(
                "multiply", b.apply("tanh", inner), b.constant(x.softcap * LOG2_E, float32)
            )
        return b.apply("multiply", scores, b.constant(x.scale * LOG2_E, float32))

    def seen(self, scores: Node, sees: Size, key: Size) -> Node:
        """Scores, -inf where a token does not see a key: as many keys as its place says, the
        last ones of them if there is a window."""
        b, x = self.b, self.x
        at = self.counted(scores.shape, 0, key)
        end = b.index(sees)
        if self.per > 1:
            row = self.counted(scores.shape, 1)
            token = b.apply("unsigned_divide", row, b.constant(x.group, int64))
            end = b.apply("add", token, end)
        inside = b.apply("less", at, end)
        if x.window:
            begin = b.apply("subtract", end, b.constant(self.reach, int64))
            inside = b.apply("bit_and", inside, b.apply("less_equal", begin, at))
        return b.apply(
            "where", b.broadcast(inside, scores.shape), scores, b.constant(-math.inf, float32)
        )

    def clear_unseen(self, sees: Size, tokens: Size, key: Size, slot: tuple[Size, Size]) -> None:
        """Values that no token of the row block sees become zeros: anything may lie there."""
        b, x, plan, (stage, lap) = self.b, self.x, self.plan, slot
        end = sees + tokens - 1
        begin: Size = sees - self.reach if x.window else 0

        def cleared(values: Node) -> Node:
            at = self.counted((plan.block, self.widths[1]), 0, key)
            inside = b.apply("less", at, b.index(end))
            if x.window:
                inside = b.apply("bit_and", inside, b.apply("less_equal", b.index(begin), at))
            return b.apply(
                "where", b.broadcast(inside, values.shape), values, b.constant(0.0, values.dtype)
            )

        def clear() -> Sequence[Node]:
            b.wait(self.full[1], stage, lap % 2)
            pieces = self.widths[1] * x.cache.size // 16
            if pieces & (pieces - 1):  # threads do not share rows of so many
                b.write(self.rings[1], cleared(b.read(self.rings[1], stage)), stage)
                return ()
            b.clear_rows(self.rings[1], end - key, plan.block, stage)
            if x.window:
                b.clear_rows(self.rings[1], 0, begin - key, stage)
            return ()

        partly = b.less(end, key + plan.block)
        if x.window:
            partly = b.apply("bit_or", partly, b.less(key, begin))
        if x.scaled:
            b.wait(self.full[1], stage, lap % 2)
            wide = b.cast(b.read(self.rings[1], stage), self.operand)
            b.arrive(self.empty[1], stage)
            b.branch(
                partly,
                lambda: b.write(self.operands[1], cleared(wide)),
                lambda: b.write(self.operands[1], wide),
            )
            return
        b.branch(partly, clear)

    def finite(self, best: Node) -> Node:
        """0 for -inf, so that differences are no nan."""
        b = self.b
        none = b.apply("equal", best, b.constant(-math.inf, float32))
        return b.apply("where", none, b.constant(0.0, float32), best)
