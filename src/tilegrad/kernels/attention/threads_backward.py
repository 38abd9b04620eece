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

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ... import tile
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.value import index_of
from . import threads
from .holes import Holes
from .shape import AttentionShape, backward_parameters
from .softmax import times
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
    results = {
        f"d{n}": tile.result(tuple(map(index_of, x.sizes(n))), x.dtype, name=f"d{n}", fill="none")
        for n in ("kv" if of_keys else "q")
    }
    if not of_keys and x.band[1] is not None:  # the last queries see most: they begin first
        block = blocks - 1 - block
    group = x.group if of_keys else 1
    batch, head = tile.hold(lane // heads), tile.hold(lane % heads)
    memory = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, **extras}
    memory |= results
    kept = _Kept(plan, Holes(x, memory, batch, head * group, of_keys, lanes=DEPTH))
    with tile.role("threads", plan.warps):
        kept.begin(tile.hold(block) * plan.tile[0])
        for member in tile.range(0, group):
            kept.begin_head(head * group + member)
            kept.steps(kept.always_cut)
        kept.finish(results)


class _Kept(ThreadBlocks):
    """Tokens of one side, and the steps over blocks of the other."""

    def __init__(self, plan: WarpPlan, holes: Holes) -> None:
        self.holes, self.of_keys, x = holes, holes.turned, holes.x
        pairs = [("q", "dout"), ("k", "v")]
        self.own, other = pairs[::-1] if self.of_keys else pairs
        sees, more = x, {"mask"}
        if self.of_keys:  # queries that a key sees
            sees = replace(x, queries=x.keys, keys=x.queries, band=x.sides(True), extras=())
            more = {"mask", "key_lengths"}
        super().__init__(x, plan, sees, other)
        self.kept = [shared_place(x.dtype, self.rows, w) for w in self.widths]
        self.allocate_ring()
        self.always_cut = bool(more & set(x.extras))

    # ---- copies -----------------------------------------------------------------------------

    def begin(self, first: Any) -> None:
        """Sums; what is kept is on its way."""
        x, rows, columns, self.first = self.x, self.rows, self.columns, first
        self.products = [tile.register((rows, columns)) for _ in range(2)]  # scores, dout v^T
        wide = self.widths if self.of_keys else self.widths[:1]
        self.totals = [tile.register((rows, w), fill=0.0) for w in wide]
        steps = range(columns // DEPTH)
        self.weights = [[tile.register((rows, DEPTH), x.dtype) for _ in steps] for _ in wide]
        self.left, self.right = (tile.register((size, DEPTH), x.dtype) for size in (rows, columns))
        self.below = [tile.register((w, DEPTH), x.dtype) for w in wide]
        for place, name in zip(self.kept, self.own):
            tile.copy_threads(place, self.holes.tokens(name, first, place.shape))
        tile.commit_threads()

    def begin_head(self, query_head: Any) -> None:
        """The blocks of the other side that are seen, for one query head; one is under way."""
        self.holes = replace(self.holes, head=query_head)
        self.limit = self.holes.limit
        self.look(index_of(self.x.queries) if self.of_keys else self.limit)
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
                tile.write(self.weights[1][number], tile.cast(times(p, keep), x.dtype))
            ds = times(p * (times(dp, keep) - delta), holes.slope(raw))
            tile.write(self.weights[0][number], tile.cast(ds, x.dtype))

    # ---- the end ----------------------------------------------------------------------------

    def finish(self, names: Iterable[str]) -> None:
        """Sums go out through the places of what was kept."""
        self.meet()
        for total, place, factor in zip(self.totals, self.kept, (self.x.scale, 1.0)):
            tile.write(place, tile.cast(tile.read(total) * factor, self.x.dtype))
        tile.named_sync(0, 32 * self.plan.warps)
        for name, place in zip(names, self.kept):
            tile.store_threads(self.holes.tokens(name, self.first, place.shape), place)


def backward(
    x: AttentionShape, plan: WarpPlan, target: Target, side: str, more: Sequence[Memory] = ()
) -> Body:
    """The Body of a side; its parameters bear the names of `backward_parameters`."""
    given = backward_parameters(x, more)
    return traced(thread_backward, given, target, x=x, plan=plan, side=side)
