"""Attention whose copies and products the threads make themselves: softmax(scale q k^T) v (sm_80).

A program keeps a block of tokens of one side, the rows of every product, and takes blocks of the
other side's tokens, from the last that is seen to the first, those that a mask cuts in loops of
their own (`ThreadBlocks`). They come by copies of 16 bytes a thread while others are multiplied:
with two stages both matrices a whole step ahead, and the threads meet once a step.

`thread_attention` is for GPUs whose matrix units belong to a warp, in the way of FlashAttention-2:
a program has a block of queries of one head, its warps 16 rows of it in turns. With one stage the
values come beside the scores and the next keys beside the values. Scores stay in registers, where
the running softmax turns them into the left operand of the product with values.

Costs of m queries over n keys: reads (m + 2 n) width elements, 4 m n width operations on the matrix
units, m n exponentials. Two programs share a core: one's softmax runs beside the other's products.

`thread_backward` keeps a block of tokens of one side and loops over blocks of the other. With p =
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
from typing import Any

from ... import tile
from ...core.dtype import DType
from ...core.target import Target
from ...ir.symbol import high, power_of_two
from ...ir.types import Array, Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.plan import Plan
from ...tile.value import index_of
from ..matmul.shape import swizzle_of
from . import softmax
from .holes import Holes
from .shape import (
    AttentionShape,
    Parameters,
    backward_parameters,
    first_wrong,
    parameters,
    unit_why_not,
)
from .tile_order import seen_by

SIDES = ("keys", "queries")  # of a backward: whose tokens a program keeps
DEPTH = 16  # of one product of the matrix units


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
        ("query_starts" in x.extras, "sequences one after another"),
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


def multiply(
    total: Any, operands: tuple[Any, Any], left: Any, right: Any, depth: int, warps: int
) -> None:
    """total += left @ right^T over so many columns, which go through the registers of operands."""
    for start in range(0, depth, DEPTH):
        tile.load_operand(operands[0], left, start)
        tile.load_operand(operands[1], right, start)
        tile.matrix_sync(total, *operands, (warps, 1))


def attend(
    x: AttentionShape, plan: WarpPlan, target: Target, more: Sequence[Memory] = (), side: str = ""
) -> Body:
    """The Body of the forward, or of a side of the backward; parameters bear the names that
    `parameters` or `backward_parameters` have."""
    given = (backward_parameters if side else parameters)(x, more)
    arrays = {name: Array(m.shape, m.dtype) for name, m in given if m.use == "value"}
    definition = thread_backward if side else thread_attention
    how = {"side": side} if side else {}
    bound = definition.bind((), {"x": x, "plan": plan, **how, **arrays}, Plan())
    ((body, _),) = definition.callee(bound, Plan(), target).launches
    return body


def located(
    x: AttentionShape, rows: int, memory: dict[str, Any], given: Parameters, of_keys: bool = False
) -> tuple[Any, Any]:
    """The block of so many tokens, and the number of batch and head, that a program takes; results
    that are `given` come to the memory."""
    tokens, heads = (x.keys, x.key_heads) if of_keys else (x.queries, x.heads)
    blocks = tile.ceil_divide(index_of(tokens), rows)
    block, lane = tile.grid(blocks, index_of(x.batch) * heads)
    for name, m in given:
        if m.use == "result":
            shape = tuple(map(index_of, m.shape))
            memory[name] = tile.result(shape, m.dtype, name=name, fill="none")
    if not of_keys and x.band[1] is not None:  # the last queries see most: they begin first
        block = blocks - 1 - block
    return block, lane


class ThreadBlocks:
    """A program's steps over blocks of the other side; `sees` is the attention as it sees them."""

    step: Any  # the method that takes a block: step(j, whether a mask cuts it)
    first: Any  # token that is kept
    holes: Holes

    def __init__(
        self, holes: Holes, plan: WarpPlan, sees: AttentionShape, other: Sequence[str], every: bool
    ) -> None:
        """`other` are the names of both matrices of a block; there are places for what is kept of
        `every` width, also if they are equal, and for stages of both matrices."""
        x, self.holes, self.plan, self.sees, self.other = holes.x, holes, plan, sees, other
        self.x, (self.rows, self.columns) = x, plan.tile
        self.widths = padded(x.width), padded(x.value_width)
        kept = self.widths if every else dict.fromkeys(self.widths)
        self.kept = [shared_place(x.dtype, self.rows, width) for width in kept]
        stages = (plan.stages, self.columns)
        self.ring = [shared_place(x.dtype, *stages, width) for width in self.widths]
        self.most = max(0, -(-high(sees.keys) // self.columns) - 1)  # number of the last block
        self.past = x.ends(self.columns if sees is x else self.rows)  # blocks may reach past keys

    def operand(self, size: int) -> Any:
        """Registers of a product's left or right side."""
        return tile.register((size, DEPTH), self.x.dtype)

    def operands(self) -> list[Any]:
        """The left sides of products with a matrix of a block."""
        return [self.operand(self.rows) for _ in range(self.columns // DEPTH)]

    def look(self) -> None:
        """Find the blocks that are seen."""
        sees, self.limit = self.sees, self.holes.limit  # keys there are
        band = tuple(None if side is None else index_of(side) for side in sees.band)
        cuts = band[1] is not None or sees.ends(self.columns)
        limit = self.limit if sees is self.x else index_of(sees.keys)
        given = (self.first, index_of(sees.queries), limit)
        self.seen = seen_by((band[0], band[1]), self.plan.tile, *given, 0, cuts)
        last = tile.minimum(self.seen.start + self.seen.count - 1, self.most)
        self.last = tile.index(last, 0, self.most)  # block

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
        s = self.holes.score(s, row, key)
        return self.holes.hidden(s, row, key, self.limit, self.past) if cut else s

    def add_weighed(self, total: Any, weights: Sequence[Any], below: Any, place: Any) -> None:
        """total += weights @ a matrix of a block."""
        for number, left in enumerate(weights):
            tile.load_operand(below, place.T, DEPTH * number)
            tile.matrix_sync(total, left, below, (self.plan.warps, 1))

    def leave(self, names: Sequence[str], staged: Any, totals: Any, factors: Any) -> None:
        """Results go out through staged places: totals times factors."""
        self.meet()
        for place, total, factor in zip(staged, totals, factors):
            tile.write(place, tile.cast(tile.read(total) * factor, self.x.dtype))
        tile.named_sync(0, 32 * self.plan.warps)
        for name, place in zip(names, staged):
            tile.store_threads(self.holes.tokens(name, self.first, place.shape), place)


# ---- forward -------------------------------------------------------------------------------------


@Definition
def thread_attention(*, x: AttentionShape, plan: WarpPlan, **memory: Any) -> None:
    """(out, log-sum-exps) of q, k, v and the extras that `x` names."""
    rows = plan.tile[0]
    block, lane = located(x, rows, memory, parameters(x))
    holes = Holes(x, memory, lane // x.heads, lane % x.heads, lanes=DEPTH)
    one = _Block(plan, holes, tile.hold(block) * rows)
    with tile.role("threads", plan.warps):
        one.begin()
        one.steps("mask" in memory)
        one.finish()


class _Block(ThreadBlocks):
    """A block of queries: its places, and the steps over blocks of keys."""

    def __init__(self, plan: WarpPlan, holes: Holes, first: Any) -> None:
        super().__init__(holes, plan, holes.x, "kv", every=False)
        self.first, self.queries, self.staged = first, self.kept[0], self.kept[-1]

    def begin(self) -> None:
        """Accumulators; the queries and the first block of keys are on their way."""
        rows, keys, wide = self.rows, self.columns, self.widths[1]
        self.look()
        self.scores = tile.register((rows, keys))
        self.total = tile.register((rows, wide), fill=0.0)
        self.largest = tile.register((rows, 1), fill=-math.inf)
        self.sums = tile.register((rows, 4), fill=0.0)
        self.weights = self.operands()
        self.left, self.right, self.below = map(self.operand, (rows, keys, wide))
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
        most = reduce(tile.maximum, scores)
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
        self.leave(["out"], [self.staged], [self.total], [over])


# ---- backward ------------------------------------------------------------------------------------


@Definition
def thread_backward(*, x: AttentionShape, plan: WarpPlan, side: str, **memory: Any) -> None:
    """(dk, dv) or (dq,) of a side's tokens."""
    of_keys = side == "keys"
    names = ("dk", "dv") if of_keys else ("dq",)
    given = backward_parameters(x, (), names)
    block, lane = located(x, plan.tile[0], memory, given, of_keys)
    heads, group = (x.key_heads, x.group) if of_keys else (x.heads, 1)
    batch, head = tile.hold(lane // heads), tile.hold(lane % heads)
    kept = _Kept(plan, Holes(x, memory, batch, head * group, of_keys, lanes=DEPTH))
    with tile.role("threads", plan.warps):
        kept.begin(tile.hold(block) * plan.tile[0])
        for member in tile.range(0, group):
            kept.begin_head(head * group + member)
            kept.steps(kept.always_cut)
        kept.leave(names, kept.kept, kept.totals, (x.scale, 1.0))


class _Kept(ThreadBlocks):
    """Tokens of one side, and the steps over blocks of the other."""

    def __init__(self, plan: WarpPlan, holes: Holes) -> None:
        self.of_keys, x = holes.turned, holes.x
        pairs = [("q", "dout"), ("k", "v")]
        self.own, other = pairs[::-1] if self.of_keys else pairs
        sees, more = x, {"mask"}
        if self.of_keys:  # queries that a key sees
            sees = replace(x, queries=x.keys, keys=x.queries, band=x.sides(True), extras=())
            more = {"mask", "key_lengths"}
        super().__init__(holes, plan, sees, other, every=True)
        self.always_cut = bool(more & set(x.extras))

    # ---- copies -----------------------------------------------------------------------------

    def begin(self, first: Any) -> None:
        """Sums; what is kept is on its way."""
        rows, columns, self.first = self.rows, self.columns, first
        self.products = [tile.register((rows, columns)) for _ in range(2)]  # scores, dout v^T
        wide = self.widths if self.of_keys else self.widths[:1]
        self.totals = [tile.register((rows, w), fill=0.0) for w in wide]
        self.weights = [self.operands() for _ in wide]
        self.left, self.right = map(self.operand, (rows, columns))
        self.below = [self.operand(w) for w in wide]
        for place, name in zip(self.kept, self.own):
            tile.copy_threads(place, self.holes.tokens(name, first, place.shape))
        tile.commit_threads()

    def begin_head(self, query_head: Any) -> None:
        """The blocks of the other side that are seen, for one query head; one is under way."""
        self.holes = replace(self.holes, head=query_head)
        self.look()
        if not self.of_keys:
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

    # ---- a step -----------------------------------------------------------------------------

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block again, weights and their changes, and the products with both."""
        stage, at = j % self.plan.stages, tile.hold((self.last - j) * self.columns)
        if self.plan.stages == 1:
            tile.named_sync(0, 32 * self.plan.warps)
            self.load((0, 1), j)
        if self.of_keys:
            starts = range(0, self.columns, DEPTH)
            known = [self.of_queries(at + start, DEPTH) for start in starts]
            self.known = [tuple(x[None, :] for x in one) for one in known]
        self.meet()
        if self.plan.stages > 1:
            self.load((0, 1), j + 1, later=True)
        depths, operands = (self.x.width, self.x.value_width), (self.left, self.right)
        for total, kept, ring, depth in zip(self.products, self.kept, self.ring, depths):
            tile.write(total, tile.zeros((self.rows, self.columns)))
            multiply(total, operands, kept, ring[stage], depth, self.plan.warps)
        self.weigh(at, cut)
        for total, weights, below, ring in zip(self.totals, self.weights, self.below, self.ring):
            self.add_weighed(total, weights, below, ring[stage])

    def weigh(self, at: Any, cut: bool) -> None:
        """Left operands from the products of a block: ds, and p for the gradient of values."""
        holes, x = self.holes, self.x
        scores, changes = (tile.read(total) for total in self.products)
        for number, (top, delta) in enumerate(self.known):
            start = DEPTH * number
            across = slice(start, start + DEPTH)
            where = (at + start, self.first) if self.of_keys else (self.first, at + start)
            raw, dp = scores[:, across], changes[:, across]
            s = self.scored(raw, *where, cut)
            p = tile.quick_exp2(tile.multiply_add(s, holes.factor, top))
            keep = holes.kept(p.shape, *where)
            if self.of_keys:
                tile.write(self.weights[1][number], tile.cast(softmax.times(p, keep), x.dtype))
            ds = softmax.times(p * (softmax.times(dp, keep) - delta), holes.slope(raw))
            tile.write(self.weights[0][number], tile.cast(ds, x.dtype))
