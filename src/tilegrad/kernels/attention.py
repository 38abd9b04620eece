"""Attention on matrix units that run beside the threads: softmax(scale q k^T) v of 16-bit floats.

`wide_attention` is the placed kernel for GPUs with wgmma, in the way of FlashAttention-3:
persistent programs, one producer that copies a tile of queries and then blocks of keys and of
values into two rings, and consumers of 64 queries each. Scores are multiplied from shared memory;
softmax runs in registers, beside the product of the block before with its values, whose weights
are the product's left operand in registers; consumers take turns at the matrix units. Blocks of
keys go from the last to the first, those that a mask cuts in loops of their own; results leave
through a staged tile while the next begins.

Costs of a tile of m queries over n keys: reads (m + 2 n) width elements, 4 m n width operations on
the matrix units and m n exponentials. Invariant: the order of a sum over keys depends on the
Plan and on which keys a tile sees alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.dtype import bfloat16, float16, float32, int32, int64
from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.symbol import (
    Size,
    ceil_divide,
    combine,
    floor_divide,
    high,
    low,
    maximum,
    minimum,
    modulo,
    multiply,
)  # fmt: skip
from ..ir.types import Memory
from ..tile import ops, placed
from ..tile.build import Body
from ..tile.placed import PlacedBuilder
from . import attention_parts as parts
from .attention_shape import AttentionShape, parameters
from .matmul import swizzle_of

SHARED_BYTES = 232_448 - 1_024  # of a program, less what aligns it
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}  # of producer and consumers, by consumers
TAKEN = ("bias", "mask", "slopes", "sinks", "key_lengths")  # extras


@dataclass(frozen=True)
class AttentionPlan:
    """Choices of `wide_attention`: the tile (queries, keys), rings, turns, and the tiles' order."""

    tile: tuple[int, int] = (128, 128)
    stages: int = 2  # of keys and of values
    programs: int = 132
    query_stages: int = 1
    staged: int = 64  # columns of a piece of the result on its way out; 0: where queries lay
    together: int = 1  # pieces that are staged at once
    turns: bool = True  # consumers take turns at the matrix units
    overlap: bool = True  # softmax beside the product with values of the block before
    section: int = 1  # (batch, head) pairs whose tiles are mixed, longest first
    dependent: bool = False  # waits for the launch before it by itself
    early: bool = True  # lets the next launch begin at its own start, not at its end


def padded(width: int) -> int:
    """A width as it lies in shared memory: whole steps of the matrix units."""
    return -(-width // 16) * 16


def shared_bytes(x: AttentionShape, plan: AttentionPlan) -> int:
    """Bytes of shared memory that a Plan takes."""
    rows, keys = plan.tile
    width, value_width = padded(x.width), padded(x.value_width)
    elements = plan.query_stages * rows * width + plan.stages * keys * (width + value_width)
    elements += rows * plan.together * plan.staged
    return elements * x.dtype.size + 16 * (plan.query_stages + 2 * plan.stages)


def why_not(x: AttentionShape, plan: AttentionPlan | None = None) -> str:
    """Why the kernel does not take a case, or not with a Plan; '' where it does."""
    wrong = [
        (x.dtype not in (bfloat16, float16), f"the matrix units take no {x.dtype}"),
        (any(w % 8 or not 8 <= w <= 256 for w in (x.width, x.value_width)),
         "widths are multiples of 8 up to 256"),
        (x.scale <= 0 or not math.isfinite(x.scale), "the scale is not above 0"),
        (x.heads % x.key_heads != 0, "heads are not a multiple of key heads"),
        (low(x.keys) < 1, "there may be no keys"),
        (x.dropout != 0.0, "dropout"),
        (not set(x.extras) <= set(TAKEN), f"{sorted(set(x.extras) - set(TAKEN))}"),
        (any(o[-1] != "d" for o in x.orders), "rows are not dense"),
    ]  # fmt: skip
    if plan is not None:
        rows, keys = plan.tile
        value_width = padded(x.value_width)
        wrong += [
            (rows % 64 != 0 or rows // 64 not in REGISTERS, "1 to 3 consumers have 64 rows each"),
            (keys % 16 != 0 or not 16 <= keys <= 256, "a block has up to 256 keys, in sixteens"),
            (plan.stages < 2, "a ring has two stages or more"),
            (plan.staged and value_width % (plan.staged * plan.together),
             "staged pieces divide the columns"),
            (not plan.staged and value_width != padded(x.width),
             "results are wider or narrower than the place of queries"),
            (shared_bytes(x, plan) > SHARED_BYTES, "it does not fit shared memory"),
        ]  # fmt: skip
    return next((why for is_wrong, why in wrong if is_wrong), "")


def wide_attention(
    x: AttentionShape, plan: AttentionPlan, name: str = "attention", more: Sequence[Memory] = ()
) -> Body:
    """The Body; parameters q, k, v, the extras, out, lse. `more` are the types of the extras."""
    b = PlacedBuilder(name, parameters(x, more))
    return WideAttention(x, plan, b).build()


@dataclass(frozen=True)
class Work:
    """One tile: whose queries, and which blocks of keys they see.

    Step j takes the block start + count - 1 - j. Steps before `right` and from `left` on are cut
    by a mask, the first one perhaps.
    """

    batch: Size
    head: Size
    first: Size  # query
    limit: Size  # keys there are
    start: Size  # block of keys
    count: Size  # blocks, at least one
    right: Size
    left: Size


Step = Callable[[Size, bool], None]  # (number of the step, whether a mask cuts it)


class WideAttention:
    """Builds one Body of `wide_attention`."""

    def __init__(self, x: AttentionShape, plan: AttentionPlan, b: PlacedBuilder) -> None:
        self.x, self.plan, self.b = x, plan, b
        why = why_not(x, plan)
        if why:
            raise InternalError("kernels.attention", f"{why}: {plan} for {x}")
        self.memory = {p.attrs["name"]: p for p in b.parameters}
        self.rows, self.keys = plan.tile
        self.halves = self.rows // 64
        self.width, self.value_width = padded(x.width), padded(x.value_width)
        self.blocks = ceil_divide(x.queries, self.rows)
        self.lanes = multiply(x.batch, x.heads)
        self.tiles = multiply(self.lanes, self.blocks)
        self.low, self.high = x.band
        self.ends = self.has_end()
        self.most_right = self.count_right()
        self.factor = self.score_factor()

    # ---- what masks cut ---------------------------------------------------------------------

    def has_end(self) -> bool:
        """Whether some query that matters could see keys past the last one."""
        x = self.x
        if "key_lengths" in x.extras:
            return True
        past = self.low is not None and high(combine(
            combine(x.queries, self.low, 1), x.keys, -1)) > 0  # fmt: skip
        if isinstance(x.keys, int) and x.keys % self.keys == 0:
            return past
        within = self.high is not None and low(combine(x.keys, combine(
            self.high, x.queries, 1), -1)) >= 0  # fmt: skip
        return not within

    def count_right(self) -> int:
        """The most blocks at a tile's right end that a mask cuts."""
        if self.high is None:
            return int(self.ends)
        if not isinstance(self.high, int):
            return -(-(self.rows - 1) // self.keys) + 1
        most = 1
        for tile in range(self.keys):
            last = tile * self.rows + self.rows + self.high
            plain = tile * self.rows + self.high + 1
            most = max(most, -(-last // self.keys) - plain // self.keys)
        return most

    @property
    def cut_first(self) -> bool:
        """Whether a mask may cut the first step."""
        return self.most_right > 0 or self.low is not None

    def score_factor(self) -> float:
        """What scores are multiplied by in the exponent of 2."""
        x = self.x
        if {"bias", "slopes"} & set(x.extras):
            return parts.LOG2_E
        return (x.softcap or x.scale) * parts.LOG2_E

    # ---- places, barriers, roles ------------------------------------------------------------

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, x, plan = self.b, self.x, self.plan
        shape = (plan.query_stages, self.halves, 64, self.width)
        self.queries = b.allocate(shape, x.dtype, "shared", layout_of(self.width, x))
        self.rings = [b.allocate((plan.stages, self.keys, width), x.dtype, "shared",
                                 layout_of(width, x))
                      for width in (self.width, self.value_width)]  # fmt: skip
        if plan.staged:
            shape = (self.halves, plan.together, 64, plan.staged)
            layout = swizzle_of(plan.staged, x.dtype)
            self.staged = b.allocate(shape, x.dtype, "shared", layout)
        self.query_full = b.barrier("query_full", 1, plan.query_stages)
        self.query_empty = b.barrier("query_empty", self.halves, plan.query_stages)
        self.full = [b.barrier(f"{of}_full", 1, plan.stages) for of in ("key", "value")]
        self.empty = [b.barrier(f"{of}_empty", self.halves, plan.stages)
                      for of in ("key", "value")]  # fmt: skip
        self.program = b.program(0, plan.programs)
        few, registers = REGISTERS[self.halves]
        b.role("producer", 4, few, self.producer)
        for own in range(self.halves):
            b.role(f"consumer{own}", 4, registers, lambda own=own: self.consumer(own))  # type: ignore[misc]
        return b.finish((plan.programs,), plan=plan)

    # ---- which tile, which stage ------------------------------------------------------------

    def for_tiles(self, body: Callable[[Size, Work, Size], None]) -> None:
        """body(count, tile, steps before it modulo two laps) for every tile of this program.

        Programs take turns forth and back, so that each gets long tiles and short ones.
        """
        b, programs, laps = self.b, self.plan.programs, 2 * self.plan.stages
        rounds, rest = floor_divide(self.tiles, programs), modulo(self.tiles, programs)
        last = self.in_round(rounds)
        mine = combine(rounds, minimum(maximum(combine(rest, last, -1), 0), 1), 1)

        def one(count: Size, carried: list[Node]) -> Sequence[Node]:
            turn = b.atom("turn", carried[0], 0, laps - 1)
            number = combine(multiply(count, programs), self.in_round(count), 1)
            work = self.locate(number)
            body(count, work, turn)
            return [b.index(modulo(combine(turn, work.count, 1), laps))]

        b.loop("count", 0, mine, 1, one, [b.constant(0, int64)])

    def in_round(self, round_: Size) -> Size:
        """This program's place in a round."""
        back = modulo(round_, 2)
        other = combine(self.plan.programs - 1, multiply(self.program, 2), -1)
        return combine(self.program, multiply(back, other), 1)

    def held(self, name: str, value: Size) -> Size:
        """A value computed here, once."""
        if isinstance(value, int):
            return value
        return self.b.atom(name, self.b.index(value), low(value), high(value))

    def corner(self, number: Size) -> tuple[Size, Size]:
        """(number of the batch and head, block of queries) of a tile."""
        section = self.plan.section
        if section == 1:
            lane, block = floor_divide(number, self.blocks), modulo(number, self.blocks)
        elif isinstance(self.lanes, int) and section >= self.lanes:
            block, lane = floor_divide(number, self.lanes), modulo(number, self.lanes)
        else:
            each = multiply(section, self.blocks)
            first = multiply(floor_divide(number, each), section)
            wide = maximum(minimum(combine(self.lanes, first, -1), section), 1)
            within = modulo(number, each)
            block, lane = floor_divide(within, wide), combine(first, modulo(within, wide), 1)
        if self.high is not None:  # the last queries see most
            block = combine(combine(self.blocks, 1, -1), block, -1)
        return lane, block

    def locate(self, number: Size) -> Work:
        """A tile by its number."""
        x, held = self.x, self.held
        lane, block = self.corner(number)
        lane = held("lane", lane)
        batch, head = held("batch", floor_divide(lane, x.heads)), modulo(lane, x.heads)
        first = held("first", multiply(maximum(block, 0), self.rows))
        limit = x.keys
        if "key_lengths" in x.extras:
            length = self.b.cast(self.b.load(self.memory["key_lengths"], (batch,)), int64)
            limit = self.held("limit", minimum(
                self.b.atom("length", length, 0, high(x.keys)), x.keys))  # fmt: skip
        return self.blocks_seen(batch, held("head", head), first, limit)

    def blocks_seen(self, batch: Size, head: Size, first: Size, limit: Size) -> Work:
        """The blocks of keys that the queries from `first` on see."""
        x, keys, held = self.x, self.keys, self.held
        start: Size = 0
        stop, plain = limit, limit
        if self.low is not None:
            start = held("start", floor_divide(maximum(combine(first, self.low, 1), 0), keys))
        if self.high is not None:
            last = minimum(combine(first, self.rows, 1), x.queries)
            stop = maximum(minimum(stop, combine(last, self.high, 1)), 0)
            plain = maximum(minimum(plain, combine(combine(first, self.high, 1), 1, 1)), 0)
        count = held("blocks", maximum(combine(ceil_divide(stop, keys), start, -1), 1))
        end = combine(start, count, 1)
        right: Size = 1
        if self.most_right > 1:
            cut = combine(end, floor_divide(plain, keys), -1)
            right = held("right", minimum(maximum(cut, 1), count))
        left = count
        if self.low is not None:
            reach = combine(combine(first, self.low, 1), self.rows - 1, 1)
            cut = combine(end, ceil_divide(maximum(reach, 0), keys), -1)
            left = held("left", minimum(maximum(cut, right), count))
        return Work(batch, head, first, limit, start, count, right, left)

    def steps(self, work: Work, step: Step) -> None:
        """All steps after the first, those that a mask cuts in loops of their own."""

        def of(cut: bool) -> Callable[[Size, list[Node]], Sequence[Node]]:
            def one(j: Size, _: list[Node]) -> Sequence[Node]:
                step(j, cut)
                return []

            return one

        if self.most_right > 1:
            self.b.loop("right", 1, work.right, 1, of(True))
        self.b.loop("step", work.right, work.left, 1, of("mask" in self.x.extras))
        if self.low is not None:
            self.b.loop("left", work.left, work.count, 1, of(True))

    def stage(self, turn: Size, step: Size) -> tuple[Size, Size]:
        """(stage, lap) of a step of a tile."""
        at = combine(turn, step, 1)
        return modulo(at, self.plan.stages), floor_divide(at, self.plan.stages)

    def query_stage(self, count: Size) -> tuple[Size, Size]:
        """(stage, lap) of a tile's queries."""
        stages = self.plan.query_stages
        return modulo(count, stages), floor_divide(count, stages)

    def key_of(self, work: Work, step: Size) -> Size:
        """The first key of a step's block."""
        last = combine(combine(work.start, work.count, 1), 1, -1)
        return multiply(combine(last, step, -1), self.keys)

    def index(self, which: int, work: Work, token: Size) -> tuple[tuple[Size, ...], tuple[int, int]]:
        """Where rows of q, k, v or the result begin, and the axes that they walk."""
        order = self.x.orders[which]
        head = floor_divide(work.head, self.x.group) if which in (1, 2) else work.head
        of = {"b": work.batch, "h": head, "t": token, "d": 0}
        return tuple(of[axis] for axis in order), (order.index("t"), 3)

    # ---- the producer -----------------------------------------------------------------------

    def producer(self) -> None:
        """Queries of a tile, then keys one block ahead of values."""
        b = self.b
        if self.plan.dependent:
            b.do(placed.grid_dependency_wait)

        def tile(count: Size, work: Work, turn: Size) -> None:
            self.load_queries(count, work)
            self.load(0, work, turn, 0)

            def step(j: Size, _: bool) -> None:
                self.load(0, work, turn, j)
                self.load(1, work, turn, combine(j, 1, -1))

            self.steps(work, step)
            self.load(1, work, turn, combine(work.count, 1, -1))

        self.for_tiles(tile)

    def load_queries(self, count: Size, work: Work) -> None:
        """The queries of a tile, 64 rows a copy."""
        b = self.b
        stage, lap = self.query_stage(count)
        b.wait(self.query_empty, stage, modulo(combine(lap, 1, 1), 2))
        b.expect(self.query_full, stage, self.rows * self.width * self.x.dtype.size)
        for own in range(self.halves):
            index, axes = self.index(0, work, combine(work.first, 64 * own, 1))
            b.copy_async(self.queries, (stage, own), self.memory["q"], index, axes,
                         self.query_full, stage)  # fmt: skip

    def load(self, which: int, work: Work, turn: Size, step: Size) -> None:
        """A block of keys (0) or values (1)."""
        b, width = self.b, (self.width, self.value_width)[which]
        stage, lap = self.stage(turn, step)
        b.wait(self.empty[which], stage, modulo(combine(lap, 1, 1), 2))
        b.expect(self.full[which], stage, self.keys * width * self.x.dtype.size)
        index, axes = self.index(1 + which, work, self.key_of(work, step))
        b.copy_async(self.rings[which], (stage,), self.memory["kv"[which]], index, axes,
                     self.full[which], stage)  # fmt: skip

    # ---- consumers --------------------------------------------------------------------------

    def consumer(self, own: int) -> None:
        """64 queries of every tile."""
        b, plan = self.b, self.plan
        if plan.dependent:
            b.do(placed.grid_dependency_wait)
            if plan.early:
                b.do(placed.grid_launch_dependents)
        Consumer(self, own).run()
        if plan.dependent and not plan.early:
            b.do(placed.grid_launch_dependents)
        b.do(placed.wait_copies, pending=0)


class Consumer:
    """Builds one consumer."""

    def __init__(self, kernel: WideAttention, own: int) -> None:
        self.k, self.own = kernel, own
        self.b, self.x, self.plan = kernel.b, kernel.x, kernel.plan
        b = self.b
        self.scores = b.register_tile((64, kernel.keys), float32)
        self.weights = b.register_tile((64, kernel.keys), self.x.dtype)
        self.total = b.register_tile((64, kernel.value_width), float32)
        self.largest = b.register_tile((64, 1), float32)
        self.sums = b.register_tile((64, parts.LANES), float32)

    def run(self) -> None:
        """Every tile; consumers take turns from the first on."""
        if self.turns and self.own == self.k.halves - 1:
            self.b.do(placed.named_arrive, number=0, threads=256)
        self.k.for_tiles(self.tile if self.plan.overlap else self.tile_in_order)

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

    def tile(self, count: Size, work: Work, turn: Size) -> None:
        """One tile: scores of a block beside the values of the one before it."""
        b, k = self.b, self.k
        stage, lap = k.query_stage(count)
        b.wait(k.query_full, stage, modulo(lap, 2))
        self.wait_full(0, turn, 0)
        b.do(placed.matrix_fence)
        self.multiply_keys(stage, turn, 0)
        b.do(placed.matrix_wait, pending=0)
        self.release(0, turn, 0)
        p, _ = self.softmax(work, 0, k.cut_first, True)
        b.write(self.weights, b.cast(p, self.x.dtype))

        def step(j: Size, cut: bool) -> None:
            before = combine(j, 1, -1)
            self.wait_full(0, turn, j)
            self.take_turn()
            b.do(placed.matrix_fence)
            self.multiply_keys(stage, turn, j)
            self.wait_full(1, turn, before)
            self.multiply_values(turn, before)
            self.give_turn()
            b.do(placed.matrix_wait, pending=1)
            self.release(0, turn, j)
            p, shrink = self.softmax(work, j, cut, False)
            b.do(placed.matrix_wait, pending=0)
            self.release(1, turn, before)
            b.write(self.total, b.apply("multiply", b.read(self.total), shrink))
            b.write(self.weights, b.cast(p, self.x.dtype))

        k.steps(work, step)
        last = combine(work.count, 1, -1)
        if self.plan.staged:
            b.arrive(k.query_empty, stage)
        self.wait_full(1, turn, last)
        self.multiply_values(turn, last)
        b.do(placed.matrix_wait, pending=0)
        self.release(1, turn, last)
        self.finish(work, stage)

    def tile_in_order(self, count: Size, work: Work, turn: Size) -> None:
        """One tile: scores, softmax, values, one after another; only consumers overlap."""
        b, k = self.b, self.k
        stage, lap = k.query_stage(count)
        b.wait(k.query_full, stage, modulo(lap, 2))

        def step(j: Size, cut: bool) -> None:
            first = j == 0
            self.wait_full(0, turn, j)
            self.take_turn()
            b.do(placed.matrix_fence)
            self.multiply_keys(stage, turn, j)
            b.do(placed.matrix_wait, pending=0)
            self.release(0, turn, j)
            self.give_turn()
            p, shrink = self.softmax(work, j, cut, first)
            if not first:
                b.write(self.total, b.apply("multiply", b.read(self.total), shrink))
            b.write(self.weights, b.cast(p, self.x.dtype))
            self.wait_full(1, turn, j)
            self.multiply_values(turn, j)
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
        self.b.wait(self.k.full[which], stage, modulo(lap, 2))

    def release(self, which: int, turn: Size, step: Size) -> None:
        """Give a block's stage back."""
        self.b.arrive(self.k.empty[which], self.k.stage(turn, step)[0])

    def multiply_keys(self, query_stage: Size, turn: Size, step: Size) -> None:
        """Scores of a block."""
        at = (query_stage, self.own, self.k.stage(turn, step)[0])
        self.b.matrix_async(self.scores, self.k.queries, self.k.rings[0], False, at,
                            transpose_b=True)  # fmt: skip
        self.b.do(placed.matrix_commit)

    def multiply_values(self, turn: Size, step: Size) -> None:
        """Add a block's values, weighed."""
        at = (self.k.stage(turn, step)[0],)
        self.b.do(placed.matrix_fence)
        self.b.matrix_async(self.total, self.weights, self.k.rings[1], self.b.less(0, step), at)
        self.b.do(placed.matrix_commit)

    # ---- softmax ----------------------------------------------------------------------------

    def softmax(self, work: Work, step: Size, cut: bool, first: bool) -> tuple[Node, Node]:
        """Weights of a block, and the factor for what was summed before; max and sums move on."""
        b, factor = self.b, self.k.factor
        s = self.adjusted(work, step, b.read(self.scores))
        if cut:
            s = parts.hidden(b, s, self.seen(work, step))
        now = parts.row_max(b, s)
        before = now if first else b.read(self.largest)
        if not first:
            now = b.apply("maximum", before, now)
        b.write(self.largest, now)
        guarded = cut or "bias" in self.x.extras
        top = parts.top(b, now, factor, guarded)
        p = parts.weights(b, s, factor, top)
        sums = parts.folded(b, "add", p)
        if first:
            b.write(self.sums, sums)
            return p, now
        shrink = parts.weights(b, before, factor, top)
        b.write(self.sums, b.apply("multiply_add", b.read(self.sums), shrink, sums))
        return p, shrink

    def seen(self, work: Work, step: Size) -> Node:
        """Which keys of a block each query sees."""
        b, k = self.b, self.k
        shape = (64, k.keys)
        key = k.held("key", k.key_of(work, step))
        apart = combine(combine(work.first, 64 * self.own, 1), key, -1)
        limits = [None if side is None else combine(side, apart, 1) for side in self.x.band]
        end = combine(work.limit, key, -1) if k.ends else None
        seen = parts.within(b, shape, limits[0], limits[1], end)
        if "mask" in self.x.extras:
            given = self.beside("mask", work, key)
            seen = b.apply("bit_and", seen, given)
        return seen

    def adjusted(self, work: Work, step: Size, s: Node) -> Node:
        """Scores with soft limit, bias and slopes; what they are multiplied by later is left out."""
        b, x, k = self.b, self.x, self.k
        more = {"bias", "slopes"} & set(x.extras)
        if x.softcap:
            s = b.apply("tanh", parts.scaled(b, s, x.scale / x.softcap))
        if not more:
            return s
        s = parts.scaled(b, s, x.softcap or x.scale)
        key = k.held("key", k.key_of(work, step))
        if "bias" in x.extras:
            s = b.apply("add", s, b.cast(self.beside("bias", work, key), float32))
        if "slopes" in x.extras:
            slope = b.load(self.k.memory["slopes"], (work.head,))
            apart = combine(key, combine(work.first, 64 * self.own, 1), -1)
            far = b.apply("subtract", parts.line(b, k.keys, apart),
                          parts.column(b, parts.line(b, 64)))  # fmt: skip
            s = b.apply("multiply_add", b.cast(far, float32), slope, s)
        return s

    def beside(self, name: str, work: Work, key: Size) -> Node:
        """A block of the bias or mask, 0 beyond its ends."""
        b, k = self.b, self.k
        memory = k.memory[name]
        sizes = memory.type.shape  # type: ignore[union-attr]
        row = combine(work.first, 64 * self.own, 1)
        index = [0 if size == 1 else at for size, at in zip(sizes, (work.batch, work.head, row,
                                                                    key))]  # fmt: skip
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
            sink = b.cast(b.load(k.memory["sinks"], (work.head,)), float32)
            sink = parts.scaled(b, sink, parts.LOG2_E)
            most = b.apply("maximum", top, sink)
            safe = b.apply("where", b.apply("equal", most, parts.number(b, -math.inf)), zero, most)
            shrink = b.apply("quick_exp2", b.apply("subtract", top, safe))
            extra = b.apply("quick_exp2", b.apply("subtract", sink, safe))
            sums = b.apply("multiply_add", sums, shrink, extra)
            top, inverse = most, shrink
        some = b.apply("less", zero, sums)
        whole = b.apply("where", some, sums, parts.number(b, 1.0))
        over = b.apply("reciprocal", whole)
        over = b.apply("multiply", over, inverse) if inverse is not None else over
        result = b.cast(b.apply("multiply", b.read(self.total), over), x.dtype)
        self.write_out(work, stage, result)
        natural = parts.scaled(b, b.apply("add", top, b.apply("log2", whole)), parts.LN2)
        self.write_sums(work, b.apply("where", some, natural, parts.number(b, -math.inf)))

    def write_sums(self, work: Work, natural: Node) -> None:
        """The log-sum-exps of the tile's queries."""
        b, x = self.b, self.x
        row = combine(work.first, 64 * self.own, 1)
        mask = None
        if not (isinstance(x.queries, int) and x.queries % self.k.rows == 0):
            inside = b.cast(b.index(combine(x.queries, row, -1)), int32)
            mask = b.apply("less", parts.line(b, 64), inside)
        flat = b.add(ops.reshape(natural, shape=(64,)))
        b.store(self.k.memory["lse"], flat, (work.batch, work.head, row), (2,), mask)

    def write_out(self, work: Work, stage: Size, result: Node) -> None:
        """Results on their way out, piece by piece."""
        b, k, plan = self.b, self.k, self.plan
        wide = plan.staged or k.value_width
        place, pieces = (k.staged, plan.together) if plan.staged else (k.queries, 1)
        for first in range(0, k.value_width, wide * pieces):
            if plan.staged:
                b.do(placed.wait_copies, pending=0)
            at = [((self.own, i) if plan.staged else (stage, self.own), first + i * wide)
                  for i in range(pieces)]  # fmt: skip
            for where, start in at:
                piece = result
                if wide != k.value_width:
                    piece = b.add(ops.part(result, start=(0, start), shape=(64, wide)))
                b.write(place, piece, *where)
            b.do(placed.fence, kind="async")
            b.do(placed.named_sync, number=k.halves + self.own, threads=128)
            for where, start in at:
                index, axes = k.index(3, work, combine(work.first, 64 * self.own, 1))
                b.copy_store(k.memory["out"], (*index[:3], start), axes, place, where)
            b.do(placed.commit_copies)
        if not plan.staged:
            b.do(placed.wait_copies, pending=0)
            b.arrive(k.query_empty, stage)


def layout_of(width: int, x: AttentionShape) -> str:
    """How rows of a padded width lie for the matrix units."""
    bytes_ = width * x.dtype.size
    return next(f"swizzle{span}" for span in (128, 64, 32) if bytes_ % span == 0)
