"""The consumers of the attention kernel: products, the running softmax, results.

A consumer has 64 queries. It issues the scores of a block and the values of the block before
together, and computes the softmax of the one while the other is multiplied; or, in order, one
after another. Invariant: registers of a product that is under way are neither read nor written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.dtype import float32, int32, int64, uint32
from ...ir.node import Node
from ...ir.symbol import Size, minimum, modulo
from ...tile import ops, placed
from . import dropout, parts
from .walk import Work

if TYPE_CHECKING:
    from .forward import WideAttention


@dataclass(frozen=True)
class Tile:
    """A tile as a consumer walks it: steps before it, the stage of its queries, its first step."""

    work: Work
    turn: Size
    stage: Size
    first: Size


class Consumer:
    """Builds one consumer."""

    def __init__(self, kernel: WideAttention, own: int) -> None:
        self.k, self.own = kernel, own
        self.b, self.x, self.plan = kernel.b, kernel.x, kernel.plan
        b = self.b
        self.scores = b.register_tile((64, kernel.keys), float32)
        self.columns = kernel.columns(own)  # of the first block
        self.first_scores = self.scores
        if self.columns < kernel.keys:
            self.first_scores = b.register_tile((64, self.columns), float32)
        self.piece = kernel.keys // kernel.pieces
        self.weights = [
            b.register_tile((64, self.piece), self.x.dtype) for _ in range(kernel.pieces)
        ]
        late = self.plan.late
        self.total = b.register_tile((64, kernel.value_width), float32, 0.0 if late else None)
        self.shrink = b.register_tile((64, 1), float32) if late else None
        self.largest = b.register_tile((64, 1), float32)
        self.sums = b.register_tile((64, parts.LANES), float32)

    def run(self) -> None:
        """Every tile; consumers take turns from the first on."""
        if self.turns and self.own == self.k.halves - 1:
            self.b.do(placed.named_arrive, number=0, threads=256)
        if self.plan.chained:
            self.begin(0, 0)
        _, turn = self.k.for_tiles(self.tile if self.plan.overlap else self.tile_in_order)
        if self.plan.chained:
            self.b.do(placed.matrix_wait, pending=0)
            self.release(0, turn, 0)

    @property
    def turns(self) -> bool:
        """Whether consumers take turns."""
        return self.plan.turns and self.k.halves > 1

    def take_turn(self) -> None:
        """Wait until the consumer before has issued its products."""
        if self.turns:
            self.b.do(placed.named_sync, number=self.own, threads=256)

    def give_turn(self) -> None:
        """Let the next consumer issue its products."""
        if self.turns:
            self.b.do(placed.named_arrive, number=(self.own + 1) % self.k.halves, threads=256)

    def skip(self, work: Work, turn: Size) -> Size:
        """Give back what this consumer's queries do not see; gives the first step that they do."""
        b, plan = self.b, self.plan
        if not plan.narrow or plan.chained:
            return 0
        count = self.k.skipped(work, self.own)

        def one(j: Size, _: list[Node]) -> Sequence[Node]:
            for which in (0, 1):
                self.wait_full(which, turn, j)  # else it would count for the lap before
                self.release(which, turn, j)
            self.take_turn()
            self.give_turn()
            return []

        b.loop("skip", 0, count, 1, one)
        return count

    def begin(self, count: Size, turn: Size, first: Size = 0) -> None:
        """Issue the first scores of a tile."""
        b, k = self.b, self.k
        stage, lap = k.query_stage(count)
        b.wait(k.query_full, stage, lap % 2)
        self.wait_full(0, turn, first)
        b.do(placed.matrix_fence)
        self.multiply_keys(stage, turn, first, self.first_scores)

    def tile(self, count: Size, work: Work, turn: Size) -> None:
        """One tile: scores of a block beside the values of the one before it."""
        b, k = self.b, self.k
        stage, _ = k.query_stage(count)
        first = self.skip(work, turn)
        if not self.plan.chained:
            self.begin(count, turn, first)
        b.do(placed.matrix_wait, pending=0)
        self.release(0, turn, first)
        p, _ = self.softmax(work, first, k.cut_first, True)
        if self.shrink is not None:
            b.write(self.shrink, b.constant(1.0, float32, (64, 1)))
        self.write_weights(p)
        self.wait_full(1, turn, first)
        at = Tile(work, turn, stage, first)
        self.steps(at)
        last = work.count - 1
        if self.plan.staged:
            b.arrive(k.query_empty, stage)
        self.rescale_late()
        self.multiply_values(turn, last, k.keys, first)
        if self.plan.chained:
            after = modulo(turn + work.count, 2 * self.plan.stages)
            self.begin(count + 1, after)
        b.do(placed.matrix_wait, pending=int(self.plan.chained))
        self.release(1, turn, last)
        self.finish(work, stage)

    def steps(self, at: Tile) -> None:
        """All steps of a tile after the first."""
        k, work = self.k, at.work
        if self.columns < k.keys:  # the second step has the first block's values
            work = replace(work, right=k.held("second", minimum(2, work.count)))

            def second(j: Size, _: list[Node]) -> Sequence[Node]:
                self.step(at, j, False, self.columns)
                return []

            self.b.loop("second", 1, work.right, 1, second)
        k.steps(work, lambda j, cut: self.step(at, j, cut, k.keys), at.first)

    def step(self, at: Tile, j: Size, cut: bool, columns: int) -> None:
        """Scores of a block and the values of the one before, of which `columns` keys count."""
        b, turn, before = self.b, at.turn, j - 1
        self.wait_full(0, turn, j)
        self.take_turn()
        b.do(placed.matrix_fence)
        self.multiply_keys(at.stage, turn, j, self.scores)
        self.rescale_late()
        self.multiply_values(turn, before, columns, at.first)
        self.give_turn()
        b.do(placed.matrix_wait, pending=1)
        self.release(0, turn, j)
        p, shrink = self.softmax(at.work, j, cut, False)
        # wanted in the next step; here, where a loop that waits begins, assemblers keep the
        # softmax before the wait for the product that runs beside it
        self.wait_full(1, turn, j)
        b.do(placed.matrix_wait, pending=0)
        self.release(1, turn, before)
        if self.shrink is not None:
            b.write(self.shrink, shrink)
        else:
            self.rescale(shrink)
        self.write_weights(p)

    def tile_in_order(self, count: Size, work: Work, turn: Size) -> None:
        """One tile: scores, softmax, values, one after another; only consumers overlap."""
        b, k = self.b, self.k
        stage, lap = k.query_stage(count)
        b.wait(k.query_full, stage, lap % 2)

        def step(j: Size, cut: bool) -> None:
            first = j == 0
            self.wait_full(0, turn, j)
            self.take_turn()
            b.do(placed.matrix_fence)
            self.multiply_keys(stage, turn, j, self.scores)
            b.do(placed.matrix_wait, pending=0)
            self.release(0, turn, j)
            self.give_turn()
            p, shrink = self.softmax(work, j, cut, first)
            if not first:
                self.rescale(shrink)
            self.write_weights(p)
            self.wait_full(1, turn, j)
            self.multiply_values(turn, j, k.keys)
            b.do(placed.matrix_wait, pending=0)
            self.release(1, turn, j)

        step(0, k.cut_first)
        k.steps(work, step)
        if self.plan.staged:
            b.arrive(k.query_empty, stage)
        self.finish(work, stage)

    # ---- products ---------------------------------------------------------------------------

    def wait_full(self, which: int, turn: Size, step: Size) -> None:
        """Until a block has come."""
        stage, lap = self.k.stage(turn, step)
        self.b.wait(self.k.full[which], stage, lap % 2)

    def release(self, which: int, turn: Size, step: Size) -> None:
        """Give a block's stage back."""
        self.b.arrive(self.k.empty[which], self.k.stage(turn, step)[0])

    def multiply_keys(self, query_stage: Size, turn: Size, step: Size, scores: Node) -> None:
        """Scores of a block."""
        at = (query_stage, self.own, self.k.stage(turn, step)[0], 0)
        self.b.matrix_async(scores, self.k.queries, self.k.rings[0], False, at, transpose_b=True)
        self.b.do(placed.matrix_commit)

    def multiply_values(self, turn: Size, step: Size, columns: int, first: Size = 0) -> None:
        """Add the values of a block's first keys, weighed."""
        stage, ring = self.k.stage(turn, step)[0], self.k.rings[1]
        self.b.do(placed.matrix_fence)
        for piece, weights in enumerate(self.weights[: columns // self.piece]):
            more = self.b.less(first, step) if piece == 0 else True
            self.b.matrix_async(self.total, weights, ring, more, (stage, piece))
        self.b.do(placed.matrix_commit)

    def rescale(self, shrink: Node) -> None:
        """What was summed so far, for a larger maximum."""
        self.b.write(self.total, self.b.apply("multiply", self.b.read(self.total), shrink))

    def rescale_late(self) -> None:
        """The same by the factor that was kept, if it was."""
        if self.shrink is not None:
            self.rescale(self.b.read(self.shrink))

    def write_weights(self, p: Node) -> None:
        """The weights of a block, rounded, where the product finds them; 0 beyond their end."""
        b, size = self.b, self.piece
        narrow = b.cast(p, self.x.dtype)
        for number, place in enumerate(self.weights):
            start = number * size
            if start >= p.shape[1]:
                b.write(place, b.constant(0.0, self.x.dtype, (64, size)))
            elif size == p.shape[1]:
                b.write(place, narrow)
            else:
                b.write(place, b.add(ops.part(narrow, start=(0, start), shape=(64, size))))

    # ---- softmax ----------------------------------------------------------------------------

    def softmax(self, work: Work, step: Size, cut: bool, first: bool) -> tuple[Node, Node]:
        """Weights of a block, and the factor for what was summed before; max and sums move on."""
        b, factor = self.b, self.k.factor
        s = self.adjusted(work, step, b.read(self.first_scores if first else self.scores))
        if cut:
            s = parts.hidden(b, s, self.seen(work, step, s.shape[1]))
        now = parts.row_max(b, s)
        before = now if first else b.read(self.largest)
        if not first:
            now = b.apply("maximum", before, now)
        b.write(self.largest, now)
        guarded = cut or "bias" in self.x.extras
        top = parts.top(b, now, factor, guarded)
        p = parts.weights(b, s, factor, top)
        sums = parts.folded(b, "add", p)
        p = self.dropped(work, step, p)
        if first:
            b.write(self.sums, sums)
            return p, now
        shrink = parts.weights(b, before, factor, top)
        b.write(self.sums, b.apply("multiply_add", b.read(self.sums), shrink, sums))
        return p, shrink

    def dropped(self, work: Work, step: Size, p: Node) -> Node:
        """Weights, 0 where dropout drops them; the rest grows when the tile is finished."""
        b, k, x = self.b, self.k, self.x
        if not x.dropout:
            return p
        row = work.first + 64 * self.own + work.query_start
        key = k.key_of(work, step) + work.key_start
        lane = work.batch * x.heads + work.head
        start = (lane * x.queries + row) * x.keys + key
        down, across = (b.add(ops.iota(size=n, dtype=int64)) for n in p.shape)
        down = parts.column(b, b.apply("multiply", down, b.index(x.keys)))
        linear = b.apply("add", b.apply("add", down, across), b.index(start))
        key_, offset = (b.load(k.memory[name], ()) for name in ("key", "offset"))
        drawn = dropout.bits(b, key_, offset, linear)
        drawn = b.apply("shift_right", drawn, b.constant(8, uint32))
        kept = b.apply("less", b.constant(dropout.threshold(x.dropout), uint32), drawn)
        return b.apply("where", kept, p, parts.number(b, 0.0))

    def seen(self, work: Work, step: Size, columns: int) -> Node:
        """Which of a block's first keys each query sees."""
        b, k = self.b, self.k
        shape = (64, columns)
        key = k.held("key", k.key_of(work, step))
        apart = work.first + 64 * self.own - key
        limits = [None if side is None else side + apart for side in (k.low, k.high)]
        end = work.limit - key if k.ends else None
        seen = parts.within(b, shape, limits[0], limits[1], end)
        if "mask" in self.x.extras:
            given = self.beside("mask", work, key)
            seen = b.apply("bit_and", seen, given)
        return seen

    def adjusted(self, work: Work, step: Size, s: Node) -> Node:
        """Scores with soft limit, bias and slopes, but for the factor of the exponent."""
        b, x, k = self.b, self.x, self.k
        more = {"bias", "slopes"} & set(x.extras)
        if x.softcap:
            s = parts.quick_tanh(b, s, x.scale / x.softcap)
        if not more:
            return s
        s = parts.scaled(b, s, x.softcap or x.scale)
        key = k.held("key", k.key_of(work, step))
        if "bias" in x.extras:
            s = b.apply("add", s, b.cast(self.beside("bias", work, key), float32))
        if "slopes" in x.extras:
            slope = b.load(self.k.memory["slopes"], (work.head,))
            apart = key - (work.first + 64 * self.own)
            far = b.apply(
                "subtract", parts.line(b, s.shape[1], apart), parts.column(b, parts.line(b, 64))
            )
            s = b.apply("multiply_add", b.cast(far, float32), slope, s)
        return s

    def beside(self, name: str, work: Work, key: Size) -> Node:
        """A block of the bias or mask, 0 beyond its ends."""
        b, k = self.b, self.k
        memory = k.memory[name]
        sizes = memory.shape
        row = work.first + 64 * self.own
        index = [
            0 if size == 1 else at for size, at in zip(sizes, (work.batch, work.head, row, key))
        ]
        axes = tuple(a for a in (2, 3) if sizes[a] != 1)
        shape = tuple((64, k.keys)[a - 2] for a in axes)
        inside: Node | None = None
        if 2 in axes:
            down = b.apply("less", parts.line(b, 64, row), b.cast(b.index(sizes[2]), int32))
            inside = parts.column(b, down) if 3 in axes else down
        if 3 in axes:
            across = b.apply("less", parts.line(b, k.keys, key), b.cast(b.index(sizes[3]), int32))
            inside = b.logical_and(inside, across)
        found = b.load(memory, index, shape, axes, inside)
        if axes == (2,):
            found = parts.column(b, found)
        return b.broadcast(found, (64, k.keys))

    # ---- the end of a tile ------------------------------------------------------------------

    def finish(self, work: Work, stage: Size) -> None:
        """Divide by the sums; results and log-sum-exps go out."""
        b, x, k = self.b, self.x, self.k
        sums, largest = parts.row_sum(b, b.read(self.sums)), b.read(self.largest)
        top = parts.scaled(b, largest, k.factor)  # -inf where nothing was seen
        zero = parts.number(b, 0.0)
        inverse: Node | None = None
        if "sinks" in x.extras:
            more = b.cast(b.load(k.memory["sinks"], (work.head,)), float32)
            more = parts.scaled(b, more, parts.LOG2_E)
            most = b.apply("maximum", top, more)
            safe = b.apply("where", b.apply("equal", most, parts.number(b, -math.inf)), zero, most)
            shrink = b.apply("quick_exp2", b.apply("subtract", top, safe))
            extra = b.apply("quick_exp2", b.apply("subtract", more, safe))
            sums = b.apply("multiply_add", sums, shrink, extra)
            top, inverse = most, shrink
        some = b.apply("less", zero, sums)
        whole = b.apply("where", some, sums, parts.number(b, 1.0))
        over = b.apply("quick_reciprocal", whole)
        over = b.apply("multiply", over, inverse) if inverse is not None else over
        over = parts.scaled(b, over, 1 / (1 - x.dropout)) if x.dropout else over
        result = b.cast(b.apply("multiply", b.read(self.total), over), x.dtype)
        if k.packed:  # what lies after the last row is another sequence's
            past = work.first + 64 * (self.own + 1) - work.queries
            b.branch(
                b.less(0, past),
                lambda: self.write_rows(work, result),
                lambda: self.write_out(work, stage, result),
            )
        else:
            self.write_out(work, stage, result)
        natural = parts.scaled(b, b.apply("add", top, b.apply("log2", whole)), parts.LN2)
        self.write_sums(work, b.apply("where", some, natural, parts.number(b, -math.inf)))

    def write_sums(self, work: Work, natural: Node) -> None:
        """The log-sum-exps of the tile's queries."""
        b, x = self.b, self.x
        row = work.first + 64 * self.own
        mask = None
        if self.k.packed or not (isinstance(x.queries, int) and x.queries % self.k.rows == 0):
            mask = self.rows_inside(work)
        flat = b.add(ops.reshape(natural, shape=(64,)))
        at = (work.batch, work.head, work.query_start + row)
        b.store(self.k.memory["lse"], flat, at, (2,), mask)

    def rows_inside(self, work: Work) -> Node:
        """Which rows are queries that there are, (64,)."""
        row = work.first + 64 * self.own
        count = self.b.cast(self.b.index(work.queries - row), int32)
        return self.b.apply("less", parts.line(self.b, 64), count)

    def write_rows(self, work: Work, result: Node) -> None:
        """Those rows of the results that are queries, from registers."""
        b, k, x = self.b, self.k, self.x
        index, axes = k.index(3, work, work.first + 64 * self.own)
        mask = parts.column(b, self.rows_inside(work))
        if x.value_width != k.value_width:
            result = b.add(ops.part(result, start=(0, 0), shape=(64, x.value_width)))
        b.store(k.memory["out"], result, index, axes, b.broadcast(mask, result.shape))

    def write_out(self, work: Work, stage: Size, result: Node) -> None:
        """Results on their way out, piece by piece."""
        b, k, plan = self.b, self.k, self.plan
        wide = plan.staged or k.value_width
        place, pieces = (k.staged, plan.together) if plan.staged else (k.queries, 1)
        for first in range(0, k.value_width, wide * pieces):
            if plan.staged:
                b.do(placed.wait_copies, pending=0)
            at = [
                ((self.own, i) if plan.staged else (stage, self.own), first + i * wide)
                for i in range(pieces)
            ]
            for where, start in at:
                piece = result
                if wide != k.value_width:
                    piece = b.add(ops.part(result, start=(0, start), shape=(64, wide)))
                b.write(place, piece, *where)
            b.do(placed.fence, kind="async")
            b.do(placed.named_sync, number=k.halves + self.own, threads=128)
            for where, start in at:
                index, axes = k.index(3, work, work.first + 64 * self.own)
                b.copy_store(k.memory["out"], (*index[:3], start), axes, place, where)
            b.do(placed.commit_copies)
        if not plan.staged:
            b.do(placed.wait_copies, pending=0)
            b.arrive(k.query_empty, stage)
