"""Attention whose copies and products the threads make themselves: softmax(scale q k^T) v (sm_80).

A program keeps a block of tokens of one side, the rows of every product, and takes blocks of the
other side's tokens, from the last that is seen to the first, those that a mask cuts in loops of
their own (`ThreadBlocks`). They come by copies of 16 bytes a thread while others are multiplied:
with two stages both matrices a whole step ahead, and the threads meet once a step.

The forward is for GPUs whose matrix units belong to a warp, in the way of FlashAttention-2: a
program has a block of queries of one head, its warps 16 rows of it in turns. With one stage the
values come beside the scores and the next keys beside the values. Scores stay in registers, where
the running softmax turns them into the left operand of the product with values.

Costs of m queries over n keys: reads (m + 2 n) width elements, 4 m n width operations on the matrix
units, m n exponentials. Two programs share a core: one's softmax runs beside the other's products.

The backward has a launch for each side, whose programs keep a block of tokens of it. With p =
exp(s - lse) recomputed and ds = p (dout v^T - delta): dv = p^T dout, dk = scale ds^T q, dq = scale
ds k. Of keys, it gives dk and dv, over all query heads that share them; of queries, dq. What is
kept are the rows of every product, so p and ds are left operands in the registers they were made
in. Both launches recompute the scores: 7 products instead of 5, no sums between programs, and the
same inputs give the same bits.

Invariant: the order of a sum depends on the Plan and on which tokens a program sees alone; what is
outside of the tokens, of the band or of a row without a seen key adds exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from ... import tile
from ...core.dtype import DType
from ...core.target import Target
from ...ir.symbol import high, power_of_two
from ...ir.types import Array, Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.plan import Plan
from ..matmul.shape import swizzle_of
from . import softmax
from .shape import FORWARD, AttentionShape, first_wrong, parameters, unit_why_not
from .tile_order import Tokens, block_count, tokens_at

DEPTH = 16  # of one product of the matrix units


class Launch(NamedTuple):
    """What there is of a program's own tokens, both matrices of a block of the other side's, and
    which of these the results are sums over."""

    results: tuple[str, ...]
    own: tuple[str, ...]
    other: tuple[str, str]
    summed: slice


LAUNCHES = {  # the forward, and the sides of a backward: whose tokens a program keeps
    "": Launch(FORWARD, ("q",), ("k", "v"), slice(1, 2)),
    "keys": Launch(("dk", "dv"), ("k", "v"), ("q", "dout"), slice(0, 2)),
    "queries": Launch(("dq",), ("q", "dout"), ("k", "v"), slice(0, 1)),
}
SIDES = ("keys", "queries")


@dataclass(frozen=True)
class WarpPlan:
    """Choices: tokens that are kept and that are taken a step, warps, blocks at hand."""

    tile: tuple[int, int]
    warps: int = 4
    stages: int = 2


def padded(width: int) -> int:
    """A width as it lies in shared memory: the next power of two from 16 on."""
    return max(DEPTH, power_of_two(width))


def why_not(x: AttentionShape, backward: bool = False) -> str:
    """Why the kernel does not take a case; '' where it does."""
    return first_wrong(
        (backward and max(x.width, x.value_width) > 128, "heads are wider than 128"),
        (x.packed, "sequences one after another"),
        (True, unit_why_not(x)),
    )


def tiles(x: AttentionShape, side: str) -> list[tuple[int, int, int]]:
    """(tokens kept, taken a step, warps) worth a look, the likeliest first: as much as registers
    hold. A warp with 32 rows multiplies what it reads twice; edges, masks and extras take registers
    too."""
    wide, whole = max(padded(x.width), padded(x.value_width)), x.band == (None, None)
    if side:
        if x.softcap or x.extras:
            return [(64, 32, 4)]
        if side == "queries":
            return [(64, 64, 4) if wide > 64 else (128, 32, 4)]
        return [(64, 32, 4) if wide > 64 else (128, 32, 4) if whole else (64, 64, 4)]
    plain = not x.softcap and not set(x.extras) - {"sinks", "key_lengths"}
    even = plain and all(isinstance(n, int) and n % 128 == 0 for n in (x.queries, x.keys))
    if wide > 128:
        return [(128, 32, 8), (128, 16, 8)]
    if high(x.queries) <= 64 or x.dropout:
        return [(64, 64, 4), (64, 32, 4)]
    if wide > 64:
        return [*([(128, 48, 4)] if even else []), *([(128, 32, 4)] if plain else []), (64, 64, 4)]
    return [*([(128, 128 if whole else 96, 4)] if even else []), (128, 64, 4), (64, 64, 4)]


def shared_bytes(x: AttentionShape, plan: WarpPlan, side: str = "") -> int:
    """Shared memory of a program, what aligns it included: of what is kept (results of a forward
    leave through the place of queries, if they are as wide) and of the ring."""
    (rows, columns), widths = plan.tile, [padded(x.width), padded(x.value_width)]
    kept = sum(widths if side else set(widths))
    return (rows * kept + plan.stages * columns * sum(widths)) * x.dtype.size + 1024


def plans(x: AttentionShape, target: Target, side: str = "") -> list[WarpPlan]:
    """Plans of the forward or of a side of the backward that fit shared memory: first those of
    which two programs share a core, of these the ones with two stages, the likeliest first."""
    core, most = target.limits["shared_bytes_per_core"], target.memories["shared"].bytes
    made = [WarpPlan((r, c), warps, stages) for r, c, warps in tiles(x, side) for stages in (2, 1)]
    sizes = {plan: shared_bytes(x, plan, side) for plan in made}
    fits = [plan for plan in made if sizes[plan] <= most]
    return sorted(fits, key=lambda p: (2 * (sizes[p] + 1024) >= core, p.stages == 1))


# ---- what all programs do ----------------------------------------------------------------------


def shared_place(dtype: DType, *shape: int) -> Any:
    """A place whose rows matrices are read from without two wanting one bank."""
    return tile.shared(shape, dtype, swizzle_of(shape[-1], dtype))


def multiply(total: Any, left: Any, right: Any, depth: int, warps: int) -> None:
    """total += left @ right^T over so many columns, which go through registers."""
    rows, columns = (tile.register((size, DEPTH), left.dtype) for size in total.shape)
    for start in range(0, depth, DEPTH):
        tile.load_operand(rows, left, start)
        tile.load_operand(columns, right, start)
        tile.matrix_sync(total, rows, columns, (warps, 1))


def attend(
    x: AttentionShape, plan: WarpPlan, target: Target, more: Sequence[Memory] = (), side: str = ""
) -> Body:
    """The Body of the forward, or of a side of the backward; parameters bear the names that
    `parameters` has."""
    given = parameters(x, more, LAUNCHES[side].results)
    arrays = {name: Array(m.shape, m.dtype) for name, m in given if m.use == "value"}
    known = {"x": x, "plan": plan, "side": side}
    ((body, _),) = thread_attention.callee(known | arrays, Plan(), target).launches
    return body


@Definition
def thread_attention(*, x: AttentionShape, plan: WarpPlan, side: str, **memory: Any) -> None:
    """(out, log-sum-exps) of q, k, v and the extras that `x` names, or gradients of a side."""
    launch, of_keys, rows = LAUNCHES[side], side == "keys", plan.tile[0]
    _, heads, _ = x.side(of_keys)
    block, lane = tile.grid(block_count(x, rows, memory, of_keys), x.batch * heads)
    for name, m in parameters(x, (), launch.results):
        if m.use == "result":
            memory[name] = tile.result(m.shape, m.dtype, name=name, fill="none")
    own = tokens_at(x, memory, lane, block, rows, of_keys)
    one = (_Kept if side else _Block)(plan, own, launch)
    with tile.role("threads", plan.warps):
        one.begin()
        one.run()


class ThreadBlocks:
    """A program's tokens, and its steps over blocks of the other side's."""

    step: Any  # the method that takes a block: step(j, whether a mask cuts it)

    def __init__(self, plan: WarpPlan, own: Tokens, launch: Launch) -> None:
        self.holes = holes = replace(own.holes, lanes=DEPTH)
        self.x = x = holes.x
        self.plan, self.first, self.limit, self.launch = plan, own.first, own.limit, launch
        (self.rows, self.columns), self.own = plan.tile, own
        self.widths = [padded(x.width), padded(x.value_width)]
        kept = self.widths if len(launch.own) > 1 else dict.fromkeys(self.widths)
        self.kept = [shared_place(x.dtype, self.rows, width) for width in kept]
        stages = (plan.stages, self.columns)
        self.ring = [shared_place(x.dtype, *stages, width) for width in self.widths]
        self.sees = x  # the attention as these tokens see it: keys see queries
        if holes.turned:
            self.sees = replace(x, queries=x.keys, keys=x.queries, band=x.sides(True), extras=())
            self.own = replace(own, queries=x.keys, limit=x.queries)
        self.most = max(0, -(-high(self.sees.keys) // self.columns) - 1)  # number of the last block
        # blocks may reach past keys
        self.past = x.ends(self.rows if holes.turned else self.columns)

    def operand(self, size: int) -> Any:
        """Registers of a product's left or right side."""
        return tile.register((size, DEPTH), self.x.dtype)

    def begin(self) -> None:
        """Accumulators and operands; what is kept is on its way."""
        rows, columns, summed = self.rows, self.columns, self.widths[self.launch.summed]
        self.products = [tile.register((rows, columns)) for _ in self.launch.own]
        self.totals = [tile.register((rows, w), fill=0.0) for w in summed]
        self.weights = [[self.operand(rows) for _ in range(columns // DEPTH)] for _ in summed]
        for place, name in zip(self.kept, self.launch.own):
            tile.copy_threads(place, self.holes.tokens(name, self.first, place.shape))

    def look(self) -> None:
        """Find the blocks that are seen."""
        sees = self.sees
        cuts = sees.band[1] is not None or sees.ends(self.columns)
        self.seen = self.own.seen(sees.band, self.plan.tile, 0, cuts)
        last = tile.minimum(self.seen.start + self.seen.count - 1, self.most)
        self.last = tile.index(last, 0, self.most)  # block

    def steps(self) -> None:
        """All steps; those at the ends may be cut by a mask, or all of them."""
        everywhere = {"mask", "key_lengths"} if self.holes.turned else {"mask"}
        cuts = (True, self.sees.band[0] is not None)
        self.seen.steps(self.step, 0, cuts, bool(everywhere & set(self.x.extras)))

    def load(self, numbers: Sequence[int], j: Any, later: bool = False) -> None:
        """Matrices of step j, in a group of their own. Of a `later` one than the first no block
        reaches past the last token; past the last step nobody reads it."""
        end = max(0, self.most - 1) if later else self.most
        block = tile.index(tile.maximum(self.last - j, 0), 0, end)
        for number in numbers if self.most or not later else ():
            place = self.ring[number][j % self.plan.stages]
            token, name = block * self.columns, self.launch.other[number]
            tile.copy_threads(place, self.holes.tokens(name, token, place.shape))
        tile.commit_threads()

    def meet(self) -> None:
        """All that was copied is there, and nobody reads what was there before."""
        tile.wait_threads(0)
        tile.named_sync(0, 32 * self.plan.warps)

    # ---- products ---------------------------------------------------------------------------

    def multiply(self, stage: Any) -> None:
        """What is kept times the matrices of a block."""
        depths = (self.x.width, self.x.value_width)
        for total, kept, ring, depth in zip(self.products, self.kept, self.ring, depths):
            tile.write(total, tile.zeros((self.rows, self.columns)))
            multiply(total, kept, ring[stage], depth, self.plan.warps)

    def scored(self, s: Any, row: Any, key: Any, cut: bool) -> Any:
        """Scores from a query and a key on, -inf where a key is not seen."""
        s = self.holes.score(s, row, key)
        return self.holes.hidden(s, row, key, self.limit, self.past) if cut else s

    def add_weighed(self, stage: Any) -> None:
        """totals += weights @ matrices of a block."""
        rings = self.ring[self.launch.summed]
        for total, weights, ring in zip(self.totals, self.weights, rings):
            below = self.operand(total.shape[1])
            for number, left in enumerate(weights):
                tile.load_operand(below, ring[stage].T, DEPTH * number)
                tile.matrix_sync(total, left, below, (self.plan.warps, 1))

    def leave(self, staged: Sequence[Any], factors: Sequence[Any]) -> None:
        """Results go out through staged places: totals times factors."""
        self.meet()
        for place, total, factor in zip(staged, self.totals, factors):
            tile.write(place, tile.cast(tile.read(total) * factor, self.x.dtype))
        tile.named_sync(0, 32 * self.plan.warps)
        for name, place in zip(self.launch.results, staged):
            tile.store_threads(self.holes.tokens(name, self.first, place.shape), place)


class _Block(ThreadBlocks):
    """A block of queries, and the steps over blocks of keys."""

    def run(self) -> None:
        """All steps, then the results."""
        self.look()
        self.largest = tile.register((self.rows, 1), fill=-math.inf)
        self.sums = tile.register((self.rows, 4), fill=0.0)
        self.load((0, 1) if self.plan.stages > 1 else (0,), 0)
        self.steps()
        self.finish()

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block, its softmax, and its values, weighed."""
        stage, key = j % self.plan.stages, tile.hold((self.last - j) * self.columns)
        self.meet()
        if self.plan.stages > 1:
            self.load((0, 1), j + 1, later=True)
        else:
            self.load((1,), j)
        self.multiply(stage)
        if self.plan.stages == 1:
            self.meet()
            self.load((0,), j + 1, later=True)
        self.softmax(key, cut)
        self.add_weighed(stage)

    def softmax(self, key: Any, cut: bool) -> None:
        """Weights of a block; the maximum, the sums and what was summed before move on.

        Columns are taken 16 at a time, so that few of them are held twice.
        """
        holes, factor, whole = self.holes, self.holes.factor, tile.read(self.products[0])
        before, total = tile.read(self.largest), self.totals[0]
        scores = []
        for start in range(0, self.columns, DEPTH):
            s = whole[:, start : start + DEPTH]
            scores.append(self.scored(s, self.first, key + start, cut))
        most = reduce(tile.maximum, scores)
        now = tile.maximum(before, tile.max(most, 1, keep=True))
        top = softmax.top_of(now, factor, cut or "bias" in self.x.extras)
        shrink = softmax.weights(before, factor, top)
        tile.write(self.largest, now)
        tile.write(total, tile.read(total) * shrink)
        sums = tile.read(self.sums) * shrink
        for number, s in enumerate(scores):
            p = softmax.weights(s, factor, top)
            apart = tile.sum(tile.reshape(p, (self.rows, DEPTH // 8, 4, 2)), 3)
            sums = sums + tile.sum(apart, 1)
            left = holes.weight(p, self.first, key + DEPTH * number)
            tile.write(self.weights[0][number], tile.cast(left, self.x.dtype))
        tile.write(self.sums, sums)

    def finish(self) -> None:
        """Divide by the sums; results and log-sum-exps go out."""
        holes = self.holes
        sums = tile.sum(tile.read(self.sums), 1, keep=True)
        over, natural = holes.ended(tile.read(self.largest), sums, holes.grown)
        at = (holes.batch, holes.head, self.first)
        tile.store(holes.memory["lse"], at, tile.reshape(natural, (self.rows,)))
        self.leave(self.kept[-1:], [over])


class _Kept(ThreadBlocks):
    """Tokens of one side, and the steps over blocks of the other, in a backward."""

    @tile.function
    def run(self) -> None:
        """All steps of all query heads, then the gradients."""
        first, (_, _, group) = self.holes.head, self.x.side(self.holes.turned)
        for member in tile.range(0, group):
            self.begin_head(first + member)
            self.steps()
        self.leave(self.kept, (self.x.scale, 1.0))

    def begin_head(self, query_head: Any) -> None:
        """The blocks of the other side that are seen, for one query head; one is under way."""
        self.holes = replace(self.holes, head=query_head)
        self.look()
        if not self.holes.turned:
            known = self.of_queries(self.first, self.rows)
            self.known = [tuple(x[:, None] for x in known)] * (self.columns // DEPTH)
        if self.plan.stages > 1:
            self.meet()  # nobody reads or writes the blocks of the head before
            self.load((0, 1), 0)

    def of_queries(self, row: Any, count: int) -> list[Any]:
        """What is known of some queries, 0 past the last one."""
        if isinstance(row, int) and row >= high(self.x.queries):
            return [tile.zeros((count,))] * 2
        return self.holes.known(row, count)

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block again, weights and their changes, and the products with both."""
        stage, at = j % self.plan.stages, tile.hold((self.last - j) * self.columns)
        if self.plan.stages == 1:
            tile.named_sync(0, 32 * self.plan.warps)
            self.load((0, 1), j)
        if self.holes.turned:
            starts = range(0, self.columns, DEPTH)
            known = [self.of_queries(at + start, DEPTH) for start in starts]
            self.known = [tuple(x[None, :] for x in one) for one in known]
        self.meet()
        if self.plan.stages > 1:
            self.load((0, 1), j + 1, later=True)
        self.multiply(stage)
        self.weigh(at, cut)
        self.add_weighed(stage)

    def weigh(self, at: Any, cut: bool) -> None:
        """Left operands from the products of a block: ds, and p for the gradient of values."""
        holes, of_keys, x = self.holes, self.holes.turned, self.x
        scores, changes = (tile.read(total) for total in self.products)
        for number, (top, delta) in enumerate(self.known):
            start = DEPTH * number
            across = slice(start, start + DEPTH)
            where = (at + start, self.first) if of_keys else (self.first, at + start)
            raw, dp = scores[:, across], changes[:, across]
            s = self.scored(raw, *where, cut)
            p = tile.quick_exp2(tile.multiply_add(s, holes.factor, top))
            keep = holes.kept(p.shape, *where)
            if of_keys:
                tile.write(self.weights[1][number], tile.cast(softmax.times(p, keep), x.dtype))
            ds = p * (softmax.times(dp, keep) - delta)
            ds = softmax.times(ds, holes.slope(holes.bent(raw)))
            tile.write(self.weights[0][number], tile.cast(ds, x.dtype))
