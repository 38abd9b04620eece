"""Attention whose copies and products the threads make themselves: softmax(scale q k^T) v (sm_80).

A program keeps a block of tokens of one side, the rows of every product, and takes blocks of the
other side's tokens, from the last that is seen to the first, those that a mask cuts in loops of
their own (`ThreadBlocks`; `threads_backward` has the gradients). They come by copies of 16 bytes a
thread while others are multiplied: with two stages both matrices a whole step ahead, and the
threads meet once a step.

`thread_attention` is for GPUs whose matrix units belong to a warp, in the way of FlashAttention-2:
a program has a block of queries of one head, its warps 16 rows of it in turns. With one stage the
values come beside the scores and the next keys beside the values. Scores stay in registers, where
the running softmax turns them into the left operand of the product with values.

Costs of m queries over n keys: reads (m + 2 n) width elements, 4 m n width operations on the matrix
units, m n exponentials. Two programs share a core: one's softmax runs beside the other's products.
Invariant: the order of a sum depends on the Plan and on which tokens a program sees alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import DType, float32
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Array, Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.plan import Plan
from ...tile.value import index_of
from ..matmul.shape import swizzle_of
from . import softmax
from .holes import Holes
from .shape import AttentionShape, Parameters, parameters, unit_why_not
from .tile_order import Seen, seen_by

DEPTH = 16  # of one product of the matrix units


@dataclass(frozen=True)
class WarpPlan:
    """Choices: tokens that are kept and that are taken a step, warps, blocks at hand."""

    tile: tuple[int, int]
    warps: int = 4
    stages: int = 2


def padded(width: int) -> int:
    """A width as it lies in shared memory: the next power of two from 16 on."""
    return max(DEPTH, 1 << (width - 1).bit_length())


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
    """Plans that fit, the likeliest first; results leave through the place of queries, if they are
    as wide."""
    kept = {padded(x.width), padded(x.value_width)}
    return fitting(x, tiles(x), sum(kept), target)


def fitting(
    x: AttentionShape, tiles: Sequence[tuple[int, int, int]], kept: int, target: Target
) -> list[WarpPlan]:
    """Plans of tiles (with their warps) that fit shared memory beside so many columns of what is
    kept: first those of which two programs share a core, and of these the ones with two stages."""
    core, most = target.limits["shared_bytes_per_core"], target.memories["shared"].bytes

    def bytes_of(plan: WarpPlan) -> int:
        """What aligns it included."""
        (rows, columns), wide = plan.tile, padded(x.width) + padded(x.value_width)
        return (rows * kept + plan.stages * columns * wide) * x.dtype.size + 1024

    made = [WarpPlan((r, c), warps, stages) for r, c, warps in tiles for stages in (2, 1)]
    fits = [plan for plan in made if bytes_of(plan) <= most]
    return sorted(fits, key=lambda p: (2 * (bytes_of(p) + 1024) >= core, p.stages == 1))


# ---- what all programs do ----------------------------------------------------------------------


def shared_place(dtype: DType, *shape: int) -> Any:
    """A place whose rows matrices are read from without two wanting one bank."""
    return tile.shared(shape, dtype, swizzle_of(shape[-1], dtype))


def multiply(
    total: Any, operands: tuple[Any, Any], left: Any, right: Any, depth: int, warps: int
) -> None:
    """total += left @ right^T over so many columns, which go through the registers of operands."""
    for start in range(0, depth, DEPTH):
        tile.load_operand(operands[0], left, start)
        tile.load_operand(operands[1], right, start)
        tile.matrix_sync(total, *operands, (warps, 1))


def traced(definition: Definition, given: Parameters, target: Target, **how: Any) -> Body:
    """The Body of a kernel for its parameters, which bear their names."""
    arrays = {name: Array(m.shape, m.dtype) for name, m in given if m.use == "value"}
    bound = definition.bind((), {**arrays, **how}, Plan())
    ((body, _),) = definition.callee(bound, Plan(), target).launches
    return body


class ThreadBlocks:
    """A program's steps over blocks of the other side; `sees` is the attention as it sees them."""

    step: Any  # the method that takes a block: step(j, whether a mask cuts it)
    first: Any  # token that is kept
    holes: Holes
    limit: Any  # keys there are
    seen: Seen
    last: Any  # block

    def __init__(
        self, x: AttentionShape, plan: WarpPlan, sees: AttentionShape, other: Sequence[str]
    ) -> None:
        """`other` are the names of both matrices of a block."""
        self.x, self.plan, self.sees, self.other = x, plan, sees, other
        self.rows, self.columns = plan.tile
        self.widths = padded(x.width), padded(x.value_width)
        self.most = max(0, -(-high(sees.keys) // self.columns) - 1)  # number of the last block
        self.past = x.ends(self.columns if sees is x else self.rows)  # blocks may reach past keys

    def allocate_ring(self) -> None:
        """Stages of both matrices of a block."""
        dtype, sizes = self.x.dtype, (self.plan.stages, self.columns)
        self.ring = [shared_place(dtype, *sizes, width) for width in self.widths]

    def look(self, limit: Any) -> None:
        """Find the blocks that are seen, of so many tokens."""
        sees = self.sees
        band = tuple(None if side is None else index_of(side) for side in sees.band)
        cuts = band[1] is not None or sees.ends(self.columns)
        given = (self.first, index_of(sees.queries), limit)
        self.seen = seen_by((band[0], band[1]), self.plan.tile, *given, 0, cuts)
        last = tile.minimum(self.seen.start + self.seen.count - 1, self.most)
        self.last = tile.index(last, 0, self.most)

    def steps(self, always: bool) -> None:
        """All steps, which a mask `always` may cut or only at their ends."""
        self.seen.steps(self.step, 0, (True, self.sees.band[0] is not None), always)

    def load(self, numbers: Sequence[int], j: Any, later: bool = False) -> None:
        """Matrices of step j, in a group of their own. Of a `later` one than the first no block
        reaches past the last token; past the last step nobody reads it."""
        end = max(0, self.most - 1) if later else self.most
        block = tile.index(tile.maximum(self.last - j, 0), 0, end)
        for number in numbers if self.most or not later else ():
            place = self.ring[number][j % self.plan.stages]
            token = block * self.columns
            tile.copy_threads(place, self.holes.tokens(self.other[number], token, place.shape))
        tile.commit_threads()

    def meet(self) -> None:
        """All that was copied is there, and nobody reads what was there before."""
        tile.wait_threads(0)
        tile.named_sync(0, 32 * self.plan.warps)

    def scored(self, s: Any, row: Any, key: Any, cut: bool) -> Any:
        """Scores from a query and a key on, -inf where a key is not seen."""
        s, holes = self.holes.score(s, row, key), self.holes
        seen = holes.seen(s.shape, row, key, self.limit, self.past) if cut else None
        return s if seen is None else tile.where(seen, s, -tile.INF)

    def add_weighed(self, total: Any, weights: Sequence[Any], below: Any, place: Any) -> None:
        """total += weights @ a matrix of a block."""
        for number, left in enumerate(weights):
            tile.load_operand(below, place.T, DEPTH * number)
            tile.matrix_sync(total, left, below, (self.plan.warps, 1))


# ---- forward -------------------------------------------------------------------------------------


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
    memory = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **extras}
    holes = Holes(x, memory, lane // x.heads, lane % x.heads, lanes=DEPTH)
    one = _Block(x, plan, holes, tile.hold(block) * rows)
    with tile.role("threads", plan.warps):
        one.begin()
        one.steps("mask" in extras)
        one.finish()


class _Block(ThreadBlocks):
    """A block of queries: its places, and the steps over blocks of keys."""

    def __init__(self, x: AttentionShape, plan: WarpPlan, holes: Holes, first: Any) -> None:
        super().__init__(x, plan, x, "kv")
        self.holes, self.first = holes, first
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
        tile.copy_threads(self.queries, self.holes.tokens("q", self.first, self.queries.shape))
        self.load((0,), 0)
        if self.plan.stages > 1:
            self.load((1,), 0)

    # ---- a step -----------------------------------------------------------------------------

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block, its softmax, and its values, weighed."""
        stage, key = j % self.plan.stages, tile.hold((self.last - j) * self.columns)
        self.meet()
        if self.plan.stages > 1:
            self.load((0,), j + 1, later=True)
            self.load((1,), j + 1, later=True)
        else:
            self.load((1,), j)
        keys, values = (ring[stage] for ring in self.ring)
        tile.write(self.scores, tile.zeros((self.rows, self.columns)))
        operands, warps = (self.left, self.right), self.plan.warps
        multiply(self.scores, operands, self.queries, keys, self.x.width, warps)
        if self.plan.stages == 1:
            self.meet()
            self.load((0,), j + 1, later=True)
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
            scores.append(self.scored(s, self.first, key + start, cut))
        most = scores[0]
        for s in scores[1:]:
            most = tile.maximum(most, s)
        now = tile.maximum(before, tile.max(most, 1, keep=True))
        top = softmax.top_of(now, factor, cut or "bias" in self.x.extras)
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

    # ---- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Divide by the sums; results and log-sum-exps go out."""
        holes = self.holes
        sums = tile.sum(tile.read(self.sums), 1, keep=True)
        top = tile.read(self.largest) * holes.factor  # -inf where nothing was seen
        over, sums, top = softmax.finished(sums, top, holes.begun(), holes.grown)
        at = (holes.batch, holes.head, self.first)
        tile.store(holes.memory["lse"], at, tile.reshape(softmax.log_sums(sums, top), (self.rows,)))
        self.meet()
        tile.write(self.staged, tile.cast(tile.read(self.total) * over, self.x.dtype))
        tile.named_sync(0, 32 * self.plan.warps)
        tile.store_threads(holes.tokens("out", self.first, self.staged.shape), self.staged)


def attend(x: AttentionShape, plan: WarpPlan, target: Target, more: Sequence[Memory] = ()) -> Body:
    """The Body; its parameters bear the names of q, k, v, the extras, out and lse."""
    return traced(thread_attention, parameters(x, more), target, x=x, plan=plan)
