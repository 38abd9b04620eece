"""A consumer of the attention kernel: products, turns, the softmax between them, the results.

Weights of a block come from its scores while the maximum and the sums move on; at the end of a tile
the sums over values are divided, and leave by copies from a staged place. Invariant: where
sequences lie one after another nothing is written past the end of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import tile
from ...core.dtype import float32
from . import softmax
from .holes import ADDED
from .tile_order import Work


class Consumer:
    """Writes one consumer; `kernel` is the WideAttention it is of."""

    def __init__(self, kernel: Any, own: int) -> None:
        self.k, self.own, self.x, self.plan = kernel, own, kernel.x, kernel.plan
        self.queries, self.keys, self.values = kernel.pipes.values()
        late, dtype = self.plan.late, kernel.operand
        self.scores = self.first_scores = tile.register((64, kernel.keys))
        self.columns = kernel.columns[own]  # of the first block
        if self.columns < kernel.keys:
            self.first_scores = tile.register((64, self.columns))
        self.piece = kernel.keys // kernel.pieces
        self.weights = [tile.register((64, self.piece), dtype) for _ in range(kernel.pieces)]
        self.total = tile.register((64, kernel.value_width), float32, 0.0 if late else None)
        self.shrink = tile.register((64, 1)) if late else None
        self.largest = tile.register((64, 1))
        self.sums = tile.register((64, softmax.LANES))
        self.turns = kernel.halves > 1  # whether consumers take turns

    def run(self) -> None:
        """Every tile; consumers take turns from the first on."""
        if self.turns and self.own == self.k.halves - 1:
            tile.named_arrive(0, 256)
        if self.plan.chained:
            self.begin(0, 0)
        _, turn = self.k.for_tiles(self.one)
        if self.plan.chained:
            tile.matrix_wait(0)
            self.keys.release(turn)

    def one(self, count: Any, work: Work, turn: Any) -> None:
        """One tile: scores of a block beside the values of the one before it. The rings stood at
        `turn` before; `first` is the step from which its queries see keys."""
        self.work, self.turn, self.stage = work, turn, self.queries.stage(count)
        self.first = first = self.skip()
        if not self.plan.chained:
            self.begin(count, turn + first)
        tile.matrix_wait(0)
        self.keys.release(turn + first)
        p, _ = self.softmax(first, self.k.cut_first, True)
        if self.shrink is not None:
            tile.write(self.shrink, tile.full((64, 1), 1.0))
        self.write_weights(p)
        self.values.wait(turn + first)
        self.steps()
        last = turn + work.count - 1
        if self.plan.staged:
            self.queries.empty.arrive(self.stage)
        self.rescale_late()
        self.multiply_values(work.count - 1)
        if self.plan.chained:
            self.begin(count + 1, (turn + work.count) % (2 * self.plan.stages))
        tile.matrix_wait(int(self.plan.chained))
        self.values.release(last)
        self.finish()

    @tile.function
    def steps(self) -> None:
        """All steps of a tile after the first."""
        work, turn = self.work, self.turn

        def step(j: Any, cut: bool, columns: int = 0) -> None:
            """Scores of a block and the values of the one before, of which some keys count."""
            self.keys.wait(turn + j)
            self.take_turn()
            tile.matrix_fence()
            self.multiply_keys(self.stage, turn + j, self.scores)
            self.rescale_late()
            self.multiply_values(j - 1, columns)
            self.give_turn()
            tile.matrix_wait(1)
            self.keys.release(turn + j)
            p, shrink = self.softmax(j, cut, False)
            # wanted in the next step; here, where a loop that waits begins, assemblers keep the
            # softmax before the wait for the product that runs beside it
            self.values.wait(turn + j)
            tile.matrix_wait(0)
            self.values.release(turn + j - 1)
            if self.shrink is not None:
                tile.write(self.shrink, shrink)
            else:
                self.rescale(shrink)
            self.write_weights(p)

        if self.columns < self.k.keys:  # the second step has the first block's values
            work = replace(work, right=tile.hold(tile.minimum(2, work.count), "second"))
            for second in tile.range(1, work.right):
                step(second, False, self.columns)
        self.k.steps(work, step, self.first)

    # ---- products ---------------------------------------------------------------------------

    def begin(self, count: Any, step: Any) -> None:
        """Issue the first scores of a tile."""
        stage = self.queries.wait(count)
        self.keys.wait(step)
        tile.matrix_fence()
        self.multiply_keys(stage, step, self.first_scores)

    def multiply_keys(self, query_stage: Any, step: Any, scores: Any) -> None:
        """Scores of a block."""
        keys = self.k.ring["k"][self.keys.stage(step), 0]
        tile.matrix_async(scores, self.k.ring["q"][query_stage, self.own], keys.T, False)
        tile.matrix_commit()

    def multiply_values(self, step: Any, columns: int = 0) -> None:
        """Add the values of a block's first keys, weighed, to those since the first step."""
        stage, count = self.values.stage(self.turn + step), (columns or self.k.keys) // self.piece
        tile.matrix_fence()
        for piece, weights in enumerate(self.weights[:count]):
            more = piece > 0 or self.first < step
            tile.matrix_async(self.total, weights, self.k.ring["v"][stage, piece], more)
        tile.matrix_commit()

    # ---- turns ------------------------------------------------------------------------------

    def take_turn(self) -> None:
        """Wait until the consumer before has issued its products."""
        if self.turns:
            tile.named_sync(self.own, 256)

    def give_turn(self) -> None:
        """Let the next consumer issue its products."""
        if self.turns:
            tile.named_arrive((self.own + 1) % self.k.halves, 256)

    @tile.function
    def skip(self) -> Any:
        """Give back what this consumer's queries do not see; gives the first step that they do."""
        if not self.plan.narrow or self.plan.chained:
            return 0
        count = self.k.skipped(self.work, self.own)
        for skip in tile.range(count):
            for blocks in (self.keys, self.values):
                blocks.wait(self.turn + skip)  # else it would count for the lap before
                blocks.release(self.turn + skip)
            self.take_turn()
            self.give_turn()
        return count

    # ---- softmax ----------------------------------------------------------------------------

    def softmax(self, step: Any, cut: bool, first: bool) -> tuple[Any, Any]:
        """Weights of a block, and the factor for what was summed before; max and sums move on."""
        work = self.work
        holes, row, key = work.holes, self.row, self.k.key_of(work, step)
        factor = holes.factor
        s = tile.read(self.first_scores if first else self.scores)
        if cut or ADDED & set(self.x.extras):
            key = tile.hold(key, "key")
        s = holes.score(s, row, key)
        if cut:
            s = holes.hidden(s, row, key, work.limit, self.k.ends)
        now = tile.max(softmax.folded(tile.maximum, s), 1, keep=True)
        before = now if first else tile.read(self.largest)
        if not first:
            now = tile.maximum(before, now)
        tile.write(self.largest, now)
        top = softmax.top_of(now, factor, cut or "bias" in self.x.extras)
        p = softmax.weights(s, factor, top)
        sums = softmax.folded(lambda a, b: a + b, p)
        p = holes.weight(p, row, key)
        if first:
            tile.write(self.sums, sums)
            return p, now
        shrink = softmax.weights(before, factor, top)
        tile.write(self.sums, tile.multiply_add(tile.read(self.sums), shrink, sums))
        return p, shrink

    @property
    def row(self) -> Any:
        """The first query of this consumer."""
        return self.work.first + 64 * self.own

    def rescale(self, shrink: Any) -> None:
        """What was summed so far, for a larger maximum."""
        tile.write(self.total, tile.read(self.total) * shrink)

    def rescale_late(self) -> None:
        """The same by the factor that was kept, if it was."""
        if self.shrink is not None:
            self.rescale(tile.read(self.shrink))

    def write_weights(self, p: Any) -> None:
        """The weights of a block, rounded, where the product finds them; 0 beyond their end."""
        narrow = tile.cast(p, self.k.operand)
        for number, place in enumerate(self.weights):
            start, stop = number * self.piece, (number + 1) * self.piece
            inside = stop <= p.shape[1]
            zeros = tile.zeros(place.shape, self.k.operand)
            tile.write(place, narrow[:, start:stop] if inside else zeros)

    # ---- the end of a tile ------------------------------------------------------------------

    @tile.function
    def finish(self) -> None:
        """Divide by the sums; results and log-sum-exps go out."""
        x, holes, left = self.x, self.work.holes, self.work.queries - self.row
        sums, largest = tile.sum(tile.read(self.sums), 1, keep=True), tile.read(self.largest)
        over, natural = holes.ended(largest, sums, holes.grown)
        over = softmax.times(over, self.k.scale(1, self.work))
        result = tile.cast(tile.read(self.total) * over, x.dtype)
        # what lies after the last row of several sequences is another one's
        inside = softmax.first_of(64, left)
        if x.packed and left < 64:
            some = result[:, : x.value_width]
            tile.store(holes.tokens("out", self.row, some.shape), some, mask=inside[:, None])
        else:
            self.write_out(result)
        at = (holes.batch, holes.head, holes.query_start + self.row)
        tile.store(self.k.memory["lse"], at, tile.reshape(natural, (64,)), mask=inside)

    def write_out(self, result: Any) -> None:
        """Results on their way out, piece by piece."""
        k, staged = self.k, self.plan.staged
        place = k.staged[self.own] if staged else k.ring["q"][self.stage, self.own]
        wide = place.shape[1]
        for start in range(0, k.value_width, wide):
            if staged:
                tile.wait_copies(0)
            tile.write(place, result[:, start : start + wide])
            tile.fence("async")
            tile.named_sync(k.halves + self.own, 128)
            tile.copy_store(self.work.holes.tokens("out", self.row, place.shape, start), place)
            tile.commit_copies()
        if not staged:
            tile.wait_copies(0)
            self.queries.empty.arrive(self.stage)
