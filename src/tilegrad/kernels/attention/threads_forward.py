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
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import DType, bfloat16, float16, float32
from ...core.target import Target
from ...ir.symbol import high, low
from ...ir.types import Array, Memory
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.plan import Plan
from ...tile.value import index_of
from ..matmul.shape import swizzle_of
from . import softmax
from .holes import EXTRAS, Holes
from .shape import AttentionShape, tokens_of

DEPTH = 16  # of one product of the matrix units


@dataclass(frozen=True)
class ThreadAttentionPlan:
    """Choices of `thread_attention`: the tile (queries, keys), warps, blocks of keys at hand."""

    tile: tuple[int, int] = (128, 64)
    warps: int = 4
    stages: int = 2


def padded(width: int) -> int:
    """A width as it lies in shared memory: the next power of two from 16 on."""
    return max(DEPTH, 1 << (width - 1).bit_length())


def shared_bytes(x: AttentionShape, plan: ThreadAttentionPlan) -> int:
    """Bytes of shared memory that a Plan takes, what aligns it included."""
    (rows, keys), width, value_width = plan.tile, padded(x.width), padded(x.value_width)
    staged = 0 if width == value_width else rows * value_width
    elements = rows * width + staged + plan.stages * keys * (width + value_width)
    return elements * x.dtype.size + 1024


def why_not(x: AttentionShape) -> str:
    """Why the kernel does not take a case; '' where it does."""
    wrong = [
        (x.dtype not in (bfloat16, float16), f"the matrix units take no {x.dtype}"),
        (max(x.width, x.value_width) > 256, "heads are wider than 256"),
        (x.width % 8 != 0 or x.value_width % 8 != 0, "rows are no multiple of 16 bytes"),
        (x.scale <= 0 or not math.isfinite(x.scale), "the scale is not above 0"),
        (x.heads % x.key_heads != 0, "heads are not a multiple of key heads"),
        (low(x.keys) < 1, "there may be no keys"),
        (not set(x.extras) <= set(EXTRAS), f"{sorted(set(x.extras) - set(EXTRAS))}"),
        ((x.dropout > 0.0) != ("key" in x.extras), "dropout has a rate, a key and an offset"),
        (any(o[-1] != "d" for o in x.orders), "rows are not dense"),
    ]
    return next((why for is_wrong, why in wrong if is_wrong), "")


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


def plans(x: AttentionShape, target: Target) -> list[ThreadAttentionPlan]:
    """Plans that fit, the likeliest first: those of which two programs share a core."""
    made = [
        ThreadAttentionPlan((rows, keys), warps, stages)
        for rows, keys, warps in tiles(x)
        for stages in (2, 1)
    ]
    core = target.limits["shared_bytes_per_core"]
    fits = [p for p in made if shared_bytes(x, p) <= target.memories["shared"].bytes]
    return sorted(fits, key=lambda p: (2 * (shared_bytes(x, p) + 1024) >= core, p.stages == 1))


def choose(x: AttentionShape, target: Target) -> ThreadAttentionPlan | None:
    """The likeliest Plan; None where none fits."""
    return next(iter(plans(x, target)), None)


# ---- the kernel ------------------------------------------------------------------------------


@Definition
def thread_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    slopes: Any = None,
    sinks: Any = None,
    key_lengths: Any = None,
    key: Any = None,
    offset: Any = None,
    *,
    x: AttentionShape,
    plan: ThreadAttentionPlan,
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
    given = (bias, mask, slopes, sinks, key_lengths, key, offset)
    extras = {name: m for name, m in zip(EXTRAS, given) if m is not None}
    holes = Holes(x, extras, lane // x.heads, lane % x.heads, lanes=DEPTH)
    one = _Block(x, plan, (q, k, v, out, lse), holes, tile.hold(block) * rows)
    with tile.role("threads", plan.warps):
        seen = one.begin()
        for j in tile.range(0, seen.right):
            one.step(j, True)
        for j in tile.range(seen.right, seen.left):
            one.step(j, "mask" in extras)
        if x.band[0] is not None:
            for j in tile.range(seen.left, seen.count):
                one.step(j, True)
        one.finish()


@dataclass(frozen=True)
class Seen:
    """Blocks of keys that some queries see. Step j takes the block `last` - j; the steps before
    `right`, and from `left` on, are cut by a mask."""

    last: Any
    count: Any
    right: Any
    left: Any
    limit: Any  # keys there are


def seen_by(x: AttentionShape, first: Any, rows: int, keys: int, limit: Any) -> Seen:
    """The blocks of keys that the queries from `first` on see."""
    lowest, highest = (None if s is None else index_of(s) for s in x.band)
    start: Any = 0
    stop, plain = limit, limit if x.ends(keys) else index_of(x.keys)
    if lowest is not None:
        start = tile.hold(tile.maximum(first + lowest, 0) // keys)
    if highest is not None:
        last = tile.minimum(first + rows, index_of(x.queries))
        stop = tile.maximum(tile.minimum(stop, last + highest), 0)
        plain = tile.maximum(tile.minimum(plain, first + highest + 1), 0)
    count = tile.hold(tile.maximum(tile.ceil_divide(stop, keys) - start, 1))
    end = start + count
    right: Any = 0
    if highest is not None or x.ends(keys):
        right = tile.hold(tile.minimum(tile.maximum(end - plain // keys, 0), count))
    left = count
    if lowest is not None:
        reach = tile.ceil_divide(tile.maximum(first + lowest + (rows - 1), 0), keys)
        left = tile.hold(tile.minimum(tile.maximum(end - reach, right), count))
    most = last_block(x, keys)
    return Seen(tile.index(tile.minimum(end - 1, most), 0, most), count, right, left, limit)


def last_block(x: AttentionShape, keys: int) -> int:
    """The number of the last block of keys, at most."""
    return max(0, -(-high(x.keys) // keys) - 1)


def shared_place(dtype: DType, *shape: int) -> Any:
    """A place whose rows matrices are read from without two wanting one bank."""
    return tile.shared(shape, dtype, swizzle_of(shape[-1], dtype))


class _Block:
    """A block of queries: its places, and the steps over blocks of keys."""

    def __init__(
        self, x: AttentionShape, plan: ThreadAttentionPlan, memories: Any, holes: Holes, first: Any
    ) -> None:
        self.x, self.plan, self.holes, self.first = x, plan, holes, first
        self.q, self.k, self.v, self.out, self.lse = memories
        self.rows, self.keys = plan.tile
        width, value_width = padded(x.width), padded(x.value_width)
        self.width, self.value_width = width, value_width
        self.queries = shared_place(x.dtype, self.rows, width)
        self.staged = self.queries
        if width != value_width:
            self.staged = shared_place(x.dtype, self.rows, value_width)
        self.ring = [
            shared_place(x.dtype, plan.stages, self.keys, columns)
            for columns in (width, value_width)
        ]

    # ---- copies -----------------------------------------------------------------------------

    def begin(self) -> Seen:
        """Accumulators; the queries and the first block of keys are on their way."""
        x, rows, keys = self.x, self.rows, self.keys
        self.seen = seen_by(x, self.first, rows, keys, self.holes.limit)
        self.scores = tile.register((rows, keys))
        self.total = tile.register((rows, self.value_width), fill=0.0)
        self.largest = tile.register((rows, 1), fill=-math.inf)
        self.sums = tile.register((rows, 4), fill=0.0)
        self.weights = [tile.register((rows, DEPTH), x.dtype) for _ in range(keys // DEPTH)]
        self.left, self.right, self.below = (
            tile.register((size, DEPTH), x.dtype) for size in (rows, keys, self.value_width)
        )
        tile.copy_threads(self.queries, self.part(0, self.first))
        self.load(0, 0)
        if self.plan.stages > 1:
            self.load(1, 0)
        return self.seen

    def load(self, which: int, j: Any, later: bool = False) -> None:
        """The keys (0) or values (1) of step j, in a group of their own. Of a `later` one than the
        first no block reaches past the last key; past the last step nobody reads it."""
        most = last_block(self.x, self.keys)
        end = max(0, most - 1) if later else most
        block = tile.index(tile.maximum(self.seen.last - j, 0), 0, end)
        if most or not later:
            place = self.ring[which][j % self.plan.stages]
            tile.copy_threads(place, self.part(1 + which, block * self.keys))
        tile.commit_threads()

    def part(self, which: int, token: Any) -> Any:
        """Tokens of q, k, v or the result."""
        memory = (self.q, self.k, self.v, self.out)[which]
        of_keys = which in (1, 2)
        head = self.holes.head // self.x.group if of_keys else self.holes.head
        rows = self.keys if of_keys else self.rows
        width = self.width if which < 2 else self.value_width
        at = (self.holes.batch, head, token)
        return tokens_of(memory, self.x.orders[which], at, (rows, width))

    def meet(self) -> None:
        """All that was copied is there, and nobody reads what was there before."""
        tile.wait_threads(0)
        tile.named_sync(0, 32 * self.plan.warps)

    # ---- a step -----------------------------------------------------------------------------

    def step(self, j: Any, cut: bool) -> None:
        """Scores of a block, its softmax, and its values, weighed."""
        stage, key = j % self.plan.stages, tile.hold((self.seen.last - j) * self.keys)
        self.meet()
        if self.plan.stages > 1:
            self.load(0, j + 1, later=True)
            self.load(1, j + 1, later=True)
        else:
            self.load(1, j)
        self.multiply_keys(stage)
        if self.plan.stages == 1:
            self.meet()
            self.load(0, j + 1, later=True)
        self.softmax(key, cut)
        self.multiply_values(stage)

    def multiply_keys(self, stage: Any) -> None:
        """Scores of a block."""
        tile.write(self.scores, tile.zeros((self.rows, self.keys)))
        for start in range(0, self.x.width, DEPTH):
            tile.load_operand(self.left, self.queries, start)
            tile.load_operand(self.right, self.ring[0][stage], start)
            tile.matrix_sync(self.scores, self.left, self.right, (self.plan.warps, 1))

    def softmax(self, key: Any, cut: bool) -> None:
        """Weights of a block; the maximum, the sums and what was summed before move on.

        Columns are taken 16 at a time, so that few of them are held twice.
        """
        holes, factor, whole = self.holes, self.holes.factor, tile.read(self.scores)
        before = tile.read(self.largest)
        scores = []
        for start in range(0, self.keys, DEPTH):
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
        past, limit = self.x.ends(self.keys), self.seen.limit
        return tile.where(self.holes.seen(s.shape, self.first, key, limit, past), s, -tile.INF)

    def multiply_values(self, stage: Any) -> None:
        """Add the values of a block, weighed."""
        for number, weights in enumerate(self.weights):
            tile.load_operand(self.below, self.ring[1][stage].T, DEPTH * number)
            tile.matrix_sync(self.total, weights, self.below, (self.plan.warps, 1))

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
        tile.store_threads(self.part(3, self.first), self.staged)


def attend(
    x: AttentionShape, plan: ThreadAttentionPlan, target: Target, more: Sequence[Memory] = ()
) -> Body:
    """The Body; its parameters bear the names of q, k, v, the extras, out and lse."""
    given: dict[str, Any] = {name: Array(x.sizes(name), x.dtype) for name in ("q", "k", "v")}
    given |= {name: Array(m.shape, m.dtype) for name, m in zip(x.extras, more)}
    bound = thread_attention.bind((), {**given, "x": x, "plan": plan}, Plan())
    ((body, _),) = thread_attention.callee(bound, Plan(), target).launches
    return body
