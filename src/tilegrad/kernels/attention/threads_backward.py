"""Backward of attention on the matrix units of a warp: gradients of q, k and v, in two launches.

With p = exp(s - lse) recomputed and ds = p (dout v^T - delta): dv = p^T dout, dk = scale ds^T q,
dq = scale ds k. `thread_backward` keeps a block of tokens of one side and loops over blocks of the
other: of keys, it gives dk and dv, over all query heads that share them; of queries, dq. What is
kept are the rows of every product, so p and ds are left operands in the registers they were made
in. Blocks of the other side come as in `threads`. Both launches recompute the scores: 7
products instead of 5, no sums between programs, and the same inputs give the same bits.

Invariant: what is outside of the tokens, of the band or of a row without a seen key adds exactly 0;
sums over blocks go in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ... import tile
from ...core.target import Target
from ...ir.symbol import combine, high
from ...ir.types import Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.value import index_of
from . import threads
from .holes import Holes
from .shape import AttentionShape, backward_parameters
from .softmax import LOG2_E
from .threads import DEPTH, ThreadBlocks, WarpPlan, fitting, multiply, padded, shared_place, traced

SIDES = ("keys", "queries")  # whose tokens a program keeps


def why_not(x: AttentionShape) -> str:
    """Why the kernel does not take a case; '' where it does."""
    wide = max(x.width, x.value_width) > 128
    return "heads are wider than 128" if wide else threads.why_not(x)


def tiles(x: AttentionShape, side: str) -> tuple[int, int]:
    """(tokens kept, taken a step): as much as registers hold beside what edges and extras take."""
    wide = max(padded(x.width), padded(x.value_width)) > 64
    if x.softcap or x.extras:
        return (64, 32)
    if side == "queries":
        return (64, 64) if wide else (128, 32)
    if wide:
        return (64, 32)
    return (128, 32) if x.band == (None, None) else (64, 64)


def plans(x: AttentionShape, target: Target, side: str) -> list[WarpPlan]:
    """Plans of a side that fit, the likeliest first."""
    kept = padded(x.width) + padded(x.value_width)
    return fitting(x, [(*tiles(x, side), 4)], kept, target)


# ---- the kernel ------------------------------------------------------------------------------


@Definition
def thread_backward(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    *,
    x: AttentionShape,
    plan: WarpPlan,
    side: str,
    **extras: Any,
) -> None:
    """(dk, dv) or (dq,) of a side's tokens."""
    of_keys = side == "keys"
    tokens, heads = (x.keys, x.key_heads) if of_keys else (x.queries, x.heads)
    blocks = tile.ceil_divide(index_of(tokens), plan.tile[0])
    block, lane = tile.grid(blocks, index_of(x.batch) * heads)
    results = [
        tile.result(tuple(map(index_of, x.sizes(n))), x.dtype, name=f"d{n}", fill="none")
        for n in (("k", "v") if of_keys else ("q",))
    ]
    if not of_keys and x.band[1] is not None:  # the last queries see most: they begin first
        block = blocks - 1 - block
    group = x.group if of_keys else 1
    batch, head = tile.hold(lane // heads), tile.hold(lane % heads)
    kept = _Kept(x, plan, of_keys, (q, k, v, dout, lse, delta), extras)
    with tile.role("threads", plan.warps):
        kept.begin(batch, head, tile.hold(block) * plan.tile[0])
        for member in tile.range(0, group):
            kept.begin_head(head * group + member)
            kept.steps(kept.always_cut)
        kept.finish(results)


class _Kept(ThreadBlocks):
    """Tokens of one side, and the steps over blocks of the other."""

    def __init__(
        self,
        x: AttentionShape,
        plan: WarpPlan,
        of_keys: bool,
        memories: Sequence[Any],
        extras: dict[str, Any],
    ) -> None:
        self.of_keys, self.extras = of_keys, extras
        q, k, v, dout, self.lse, self.delta = memories
        pairs = [((q, 0), (dout, 3)), ((k, 1), (v, 2))]  # memories, and their orders
        self.own, other = pairs[::-1] if of_keys else pairs
        sees = x
        if of_keys:  # queries i that a key j sees: -high <= i - j <= -low
            least, most = (None if s is None else combine(0, s, -1) for s in x.band)
            sees = replace(x, queries=x.keys, keys=x.queries, band=(most, least), extras=())
        super().__init__(x, plan, sees, other)
        self.kept = [shared_place(x.dtype, self.rows, w) for w in self.widths]
        self.allocate_ring()
        more = {"mask", "key_lengths"} if of_keys else {"mask"}
        self.always_cut = bool(more & set(extras))

    # ---- copies -----------------------------------------------------------------------------

    def begin(self, batch: Any, head: Any, first: Any) -> None:
        """Sums; what is kept is on its way."""
        x, rows, columns = self.x, self.rows, self.columns
        self.batch, self.first = batch, first
        self.products = [tile.register((rows, columns)) for _ in range(2)]  # scores, dout v^T
        wide = self.widths if self.of_keys else self.widths[:1]
        self.totals = [tile.register((rows, w), fill=0.0) for w in wide]
        steps = range(columns // DEPTH)
        self.weights = [[tile.register((rows, DEPTH), x.dtype) for _ in steps] for _ in wide]
        self.left, self.right = (tile.register((size, DEPTH), x.dtype) for size in (rows, columns))
        self.below = [tile.register((w, DEPTH), x.dtype) for w in wide]
        self.own_head = head
        for place, source in zip(self.kept, self.own):
            tile.copy_threads(place, self.part(*source, head, first, place.shape))
        tile.commit_threads()

    def begin_head(self, query_head: Any) -> None:
        """The blocks of the other side that are seen, for one query head; one is under way."""
        self.head = query_head
        self.holes = Holes(self.x, self.extras, self.batch, query_head, self.of_keys, lanes=DEPTH)
        self.limit = self.holes.limit
        self.look(index_of(self.x.queries) if self.of_keys else self.limit)
        self.other_head = query_head if self.of_keys else query_head // self.x.group
        if not self.of_keys:
            known = self.of_queries(self.first, self.rows)
            self.known = [tuple(x[:, None] for x in known)] * (self.columns // DEPTH)
        if self.plan.stages > 1:
            self.meet()  # nobody reads or writes the blocks of the head before
            self.load((0, 1), self.other_head, 0)

    def of_queries(self, row: Any, count: int) -> tuple[Any, Any]:
        """(-lse as the exponent of 2 has it, delta) of some queries, 0 past the last one."""
        if isinstance(row, int) and row >= high(self.x.queries):
            return tile.zeros((count,)), tile.zeros((count,))
        lse, delta = (
            tile.fill(tile.load(m, (self.batch, self.head, row), (count,)), 0.0)
            for m in (self.lse, self.delta)
        )
        return tile.where(lse == -tile.INF, 0.0, lse * -LOG2_E), delta

    # ---- a step -----------------------------------------------------------------------------

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block again, weights and their changes, and the products with both."""
        stage, at = j % self.plan.stages, tile.hold((self.last - j) * self.columns)
        if self.plan.stages == 1:
            tile.named_sync(0, 32 * self.plan.warps)
            self.load((0, 1), self.other_head, j)
        if self.of_keys:
            starts = range(0, self.columns, DEPTH)
            known = [self.of_queries(at + start, DEPTH) for start in starts]
            self.known = [tuple(x[None, :] for x in one) for one in known]
        self.meet()
        if self.plan.stages > 1:
            self.load((0, 1), self.other_head, j + 1, later=True)
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
            if self.of_keys:
                dropped = tile.cast(holes.weight(p, *where), x.dtype)
                tile.write(self.weights[1][number], dropped)
            if x.dropout:
                dp = holes.weight(dp, *where) * holes.grown
            ds = p * (dp - delta)
            slope = holes.slope(raw)
            ds = ds if slope is None else ds * slope
            tile.write(self.weights[0][number], tile.cast(ds, x.dtype))

    # ---- the end ----------------------------------------------------------------------------

    def finish(self, results: Sequence[Any]) -> None:
        """Sums go out through the places of what was kept."""
        self.meet()
        orders = (1, 2) if self.of_keys else (0,)
        grown = Holes(self.x, {}, self.batch, self.own_head).grown
        for total, place, factor in zip(self.totals, self.kept, (self.x.scale, grown)):
            tile.write(place, tile.cast(tile.read(total) * factor, self.x.dtype))
        tile.named_sync(0, 32 * self.plan.warps)
        for result, place, order in zip(results, self.kept, orders):
            target = self.part(result, order, self.own_head, self.first, place.shape)
            tile.store_threads(target, place)


def backward(
    x: AttentionShape, plan: WarpPlan, target: Target, side: str, more: Sequence[Memory] = ()
) -> Body:
    """The Body of a side; its parameters bear the names of `backward_parameters`."""
    given = backward_parameters(x, more)
    return traced(thread_backward, given, target, x=x, plan=plan, side=side)
