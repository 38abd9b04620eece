"""Attention whose copies and products the threads make themselves: softmax(scale q k^T) v.

`thread_attention` is for GPUs whose matrix units belong to a warp (sm_80), in the way of
FlashAttention-2: a program has a block of queries of one head, its warps 16 rows of it in turns. A
block of keys and one of values come by copies of 16 bytes a thread while the block before is
multiplied: with two stages both a whole step ahead, and the threads meet once a step; with one
the values come beside the scores and the next keys beside the values. Scores stay in registers,
where the running softmax turns them into the left operand of the product with values. Blocks go
from the last to the first, those that a mask cuts in loops of their own.

Costs of m queries over n keys: reads (m + 2 n) width elements, 4 m n width operations on the matrix
units, m n exponentials. Two programs share a core: one's softmax runs beside the other's products.
Invariant: the order of a sum over keys depends on the Plan and on which keys a tile sees alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import float32
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.value import index_of
from . import softmax
from .holes import Holes
from .shape import AttentionShape, parameters, unit_why_not
from .threads import DEPTH, ThreadBlocks, WarpPlan, fitting, multiply, padded, shared_place, traced


def shared_bytes(x: AttentionShape, plan: WarpPlan) -> int:
    """Bytes of shared memory that a Plan takes, what aligns it included."""
    (rows, keys), width, value_width = plan.tile, padded(x.width), padded(x.value_width)
    staged = 0 if width == value_width else rows * value_width
    elements = rows * width + staged + plan.stages * keys * (width + value_width)
    return elements * x.dtype.size + 1024


def why_not(x: AttentionShape) -> str:
    """Why the kernel does not take a case; '' where it does."""
    packed = "query_starts" in x.extras
    return "sequences one after another" if packed else unit_why_not(x)


def tiles(x: AttentionShape) -> list[tuple[int, int, int]]:
    """(queries, keys, warps) worth a look, the likeliest first: as much as registers hold. A warp
    with 32 rows multiplies what it reads twice; edges, masks and extras take registers too."""
    wide = max(padded(x.width), padded(x.value_width))
    plain = not x.softcap and not set(x.extras) - {"sinks", "key_lengths"}
    even = plain and all(isinstance(n, int) and n % 128 == 0 for n in (x.queries, x.keys))
    if wide > 128:
        return [(128, 32, 8), (128, 16, 8)]
    if high(x.queries) <= 64 or x.dropout:
        return [(64, 64, 4), (64, 32, 4)]
    if wide > 64:
        return [*([(128, 48, 4)] if even else []), *([(128, 32, 4)] if plain else []), (64, 64, 4)]
    whole = x.band == (None, None)
    return [*([(128, 128 if whole else 96, 4)] if even else []), (128, 64, 4), (64, 64, 4)]


def plans(x: AttentionShape, target: Target) -> list[WarpPlan]:
    """Plans that fit, the likeliest first: those of which two programs share a core."""
    made = [
        WarpPlan((rows, keys), warps, stages) for rows, keys, warps in tiles(x) for stages in (2, 1)
    ]
    return fitting([(shared_bytes(x, plan), plan) for plan in made], target)


# ---- the kernel ------------------------------------------------------------------------------


@Definition
def thread_attention(
    q: Any, k: Any, v: Any, *, x: AttentionShape, plan: WarpPlan, **extras: Any
) -> None:
    """(out, log-sum-exps) of q, k, v and the extras that `x` names."""
    rows = plan.tile[0]
    blocks = tile.ceil_divide(index_of(x.queries), rows)
    block, lane = tile.grid(blocks, index_of(x.batch) * x.heads)
    shapes = [tuple(map(index_of, sizes)) for sizes in (x.sizes("out"), x.rows)]
    out = tile.result(shapes[0], x.dtype, name="out", fill="none")
    lse = tile.result(shapes[1], float32, name="lse", fill="none")
    if x.band[1] is not None:  # the last queries see most: they begin first
        block = blocks - 1 - block
    holes = Holes(x, extras, lane // x.heads, lane % x.heads, lanes=DEPTH)
    one = _Block(x, plan, (q, k, v, out, lse), holes, tile.hold(block) * rows)
    with tile.role("threads", plan.warps):
        one.begin()
        one.steps("mask" in extras)
        one.finish()


class _Block(ThreadBlocks):
    """A block of queries: its places, and the steps over blocks of keys."""

    def __init__(
        self, x: AttentionShape, plan: WarpPlan, memories: Any, holes: Holes, first: Any
    ) -> None:
        self.q, k, v, self.out, self.lse = memories
        super().__init__(x, plan, x, ((k, 1), (v, 2)))
        self.holes, self.batch, self.first = holes, holes.batch, first
        self.key_head = holes.head // x.group
        self.queries = self.staged = shared_place(x.dtype, self.rows, self.widths[0])
        if self.widths[0] != self.widths[1]:
            self.staged = shared_place(x.dtype, self.rows, self.widths[1])
        self.allocate_ring()

    def begin(self) -> None:
        """Accumulators; the queries and the first block of keys are on their way."""
        x, rows, keys, wide = self.x, self.rows, self.columns, self.widths[1]
        self.limit = self.holes.limit
        self.look(self.limit)
        self.scores = tile.register((rows, keys))
        self.total = tile.register((rows, wide), fill=0.0)
        self.largest = tile.register((rows, 1), fill=-math.inf)
        self.sums = tile.register((rows, 4), fill=0.0)
        self.weights = [tile.register((rows, DEPTH), x.dtype) for _ in range(keys // DEPTH)]
        self.left, self.right, self.below = (
            tile.register((size, DEPTH), x.dtype) for size in (rows, keys, wide)
        )
        part = self.part(self.q, 0, self.holes.head, self.first, self.queries.shape)
        tile.copy_threads(self.queries, part)
        self.load((0,), self.key_head, 0)
        if self.plan.stages > 1:
            self.load((1,), self.key_head, 0)

    # ---- a step -----------------------------------------------------------------------------

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block, its softmax, and its values, weighed."""
        stage, key = j % self.plan.stages, tile.hold((self.last - j) * self.columns)
        self.meet()
        if self.plan.stages > 1:
            self.load((0,), self.key_head, j + 1, later=True)
            self.load((1,), self.key_head, j + 1, later=True)
        else:
            self.load((1,), self.key_head, j)
        keys, values = (ring[stage] for ring in self.ring)
        tile.write(self.scores, tile.zeros((self.rows, self.columns)))
        operands, warps = (self.left, self.right), self.plan.warps
        multiply(self.scores, operands, self.queries, keys, self.x.width, warps)
        if self.plan.stages == 1:
            self.meet()
            self.load((0,), self.key_head, j + 1, later=True)
        self.softmax(key, cut)
        self.add_weighed(self.total, self.weights, self.below, values)

    def softmax(self, key: Any, cut: bool) -> None:
        """Weights of a block; the maximum, the sums and what was summed before move on.

        Columns are taken 16 at a time, so that few of them are held twice.
        """
        holes, factor, whole = self.holes, self.holes.factor, tile.read(self.scores)
        before = tile.read(self.largest)
        scores = []
        for start in range(0, self.columns, DEPTH):
            s = whole[:, start : start + DEPTH]
            scores.append(self.scored(s, key + start, cut))
        most = scores[0]
        for s in scores[1:]:
            most = tile.maximum(most, s)
        now = tile.maximum(before, tile.max(most, 1, keep=True))
        top = softmax.top_of(now, factor, cut or "bias" in holes.extras)
        shrink = softmax.weights(before, factor, top)
        tile.write(self.largest, now)
        tile.write(self.total, tile.read(self.total) * shrink)
        sums = tile.read(self.sums) * shrink
        for number, s in enumerate(scores):
            p = softmax.weights(s, factor, top)
            apart = tile.sum(tile.reshape(p, (self.rows, DEPTH // 8, 4, 2)), 3)
            sums = sums + tile.sum(apart, 1)
            left = holes.weight(p, self.first, key + DEPTH * number)
            tile.write(self.weights[number], tile.cast(left, self.x.dtype))
        tile.write(self.sums, sums)

    def scored(self, s: Any, key: Any, cut: bool) -> Any:
        """Some columns of the scores, -inf where a key is not seen."""
        s = self.holes.score(s, self.first, key)
        if not cut:
            return s
        past = self.x.ends(self.columns)
        return tile.where(self.holes.seen(s.shape, self.first, key, self.limit, past), s, -tile.INF)

    # ---- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Divide by the sums; results and log-sum-exps go out."""
        holes = self.holes
        sums = tile.sum(tile.read(self.sums), 1, keep=True)
        top = tile.read(self.largest) * holes.factor  # -inf where nothing was seen
        over, sums, top = softmax.finished(sums, top, holes.begun(), holes.grown)
        at = (holes.batch, holes.head, self.first)
        tile.store(self.lse, at, tile.reshape(softmax.log_sums(sums, top), (self.rows,)))
        self.meet()
        tile.write(self.staged, tile.cast(tile.read(self.total) * over, self.x.dtype))
        tile.named_sync(0, 32 * self.plan.warps)
        part = self.part(self.out, 3, holes.head, self.first, self.staged.shape)
        tile.store_threads(part, self.staged)


def attend(x: AttentionShape, plan: WarpPlan, target: Target, more: Sequence[Memory] = ()) -> Body:
    """The Body; its parameters bear the names of q, k, v, the extras, out and lse."""
    return traced(thread_attention, parameters(x, more), target, x=x, plan=plan)
