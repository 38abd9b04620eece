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
`why_not` is long: a list of conditions, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...core.dtype import bfloat16, float16
from ...core.errors import InternalError
from ...ir.symbol import Size, low
from ...ir.types import Memory
from ...tile import placed
from ...tile.build import Body
from ...tile.placed import PlacedBuilder
from ..matmul.shape import swizzle_of
from .consumer import Consumer
from .shape import AttentionShape, parameters
from .walk import Walk, Work

SHARED_BYTES = 232_448 - 1_024  # of a program, less what aligns it
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}  # of producer and consumers, by consumers
TAKEN = (
    "bias",
    "mask",
    "slopes",
    "sinks",
    "key_lengths",
    "query_starts",
    "key_starts",
    "key",
    "offset",
)  # extras
RANDOM = {"key", "offset"}
STARTS = {"query_starts", "key_starts"}


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
    late: bool = False  # sums shrink after the next scores are issued, not before
    chained: bool = False  # a tile's first scores are multiplied beside the last values before
    narrow: bool = False  # of a tile's last block only the keys that a consumer's queries see
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
        (
            any(w % 8 or not 8 <= w <= 256 for w in (x.width, x.value_width)),
            "widths are multiples of 8 up to 256",
        ),
        (x.scale <= 0 or not math.isfinite(x.scale), "the scale is not above 0"),
        (x.heads % x.key_heads != 0, "heads are not a multiple of key heads"),
        (low(x.keys) < 1, "there may be no keys"),
        (
            not 0.0 <= x.dropout < 1.0 or (x.dropout > 0.0) != (set(x.extras) >= RANDOM),
            "dropout has a rate below 1, a key and an offset",
        ),
        (not set(x.extras) <= set(TAKEN), f"{sorted(set(x.extras) - set(TAKEN))}"),
        (any(o[-1] != "d" for o in x.orders), "rows are not dense"),
        (
            len(STARTS & set(x.extras)) == 1 or (set(x.extras) > STARTS and x.batch != 1),
            "sequences one after another have a batch of 1 and starts of queries and of keys",
        ),
        (
            bool(STARTS & set(x.extras)) and bool({"bias", "mask", "key_lengths"} & set(x.extras)),
            "sequences one after another, with a bias, mask or lengths",
        ),
    ]
    if plan is not None:
        rows, keys = plan.tile
        value_width = padded(x.value_width)
        wrong += [
            (rows % 64 != 0 or rows // 64 not in REGISTERS, "1 to 3 consumers have 64 rows each"),
            (keys % 16 != 0 or not 16 <= keys <= 256, "a block has up to 256 keys, in sixteens"),
            (plan.stages < 2, "a ring has two stages or more"),
            (
                plan.staged > 0 and value_width % (plan.staged * plan.together) != 0,
                "staged pieces divide the columns",
            ),
            (
                not plan.staged and value_width != padded(x.width),
                "results are wider or narrower than the place of queries",
            ),
            (
                (plan.narrow or plan.late) and not plan.overlap,
                "a narrow block, or sums that shrink late, need overlap",
            ),
            (
                plan.chained and (plan.query_stages < 2 or not plan.overlap),
                "a chain needs overlap and queries of two tiles",
            ),
            (plan.chained and bool(STARTS & set(x.extras)), "a chain has no empty tiles"),
            (not plan.staged and bool(STARTS & set(x.extras)), "an end within a tile is staged"),
            (shared_bytes(x, plan) > SHARED_BYTES, "it does not fit shared memory"),
        ]
    return next((why for is_wrong, why in wrong if is_wrong), "")


def wide_attention(
    x: AttentionShape, plan: AttentionPlan, name: str = "attention", more: Sequence[Memory] = ()
) -> Body:
    """The Body; parameters q, k, v, the extras, out, lse. `more` are the types of the extras."""
    b = PlacedBuilder(name, parameters(x, more))
    return WideAttention(x, plan, b).build()


class WideAttention(Walk):
    """Builds one Body of `wide_attention`."""

    registers = REGISTERS
    notes: ClassVar[dict[str, Any]] = {}  # of the Body

    def __init__(self, x: AttentionShape, plan: AttentionPlan, b: PlacedBuilder) -> None:
        why = why_not(x, plan)
        if why:
            raise InternalError("kernels.attention.forward", f"{why}: {plan} for {x}")
        super().__init__(x, plan, b)
        self.halves = self.rows // 64
        self.width, self.value_width = padded(x.width), padded(x.value_width)

    # ---- places, barriers, roles ------------------------------------------------------------

    def columns(self, own: int) -> int:
        """Keys of a tile's last block that a consumer multiplies."""
        return self.first_columns(own) if self.plan.narrow else self.keys

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, x, plan = self.b, self.x, self.plan
        shape = (plan.query_stages, self.halves, 64, self.width)
        self.queries = b.allocate(shape, x.dtype, "shared", layout_of(self.width, x))
        narrow = any(self.columns(own) < self.keys for own in range(self.halves))
        self.pieces = self.keys // 64 if narrow else 1  # in which values lie
        shapes = ((self.keys, self.width), (self.keys // self.pieces, self.value_width))
        self.rings = [
            b.allocate((plan.stages, pieces, *shape), x.dtype, "shared", layout_of(shape[1], x))
            for pieces, shape in zip((1, self.pieces), shapes)
        ]
        if plan.staged:
            shape = (self.halves, plan.together, 64, plan.staged)
            layout = swizzle_of(plan.staged, x.dtype)
            self.staged = b.allocate(shape, x.dtype, "shared", layout)
        self.query_full = b.barrier("query_full", 1, plan.query_stages)
        self.query_empty = b.barrier("query_empty", self.halves, plan.query_stages)
        self.full = [b.barrier(f"{of}_full", 1, plan.stages) for of in ("key", "value")]
        self.empty = [b.barrier(f"{of}_empty", self.halves, plan.stages) for of in ("key", "value")]
        self.program = b.program(0, plan.programs)
        few, registers = self.registers[self.halves]
        b.role("producer", 4, few, self.producer)
        for own in range(self.halves):
            b.role(f"consumer{own}", 4, registers, lambda own=own: self.consumer(own))  # type: ignore[misc]
        return b.finish((plan.programs,), plan=plan, **self.notes)

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
                self.load(1, work, turn, j - 1)

            self.steps(work, step)
            self.load(1, work, turn, work.count - 1)

        count, turn = self.for_tiles(tile)
        if self.plan.chained:  # consumers begin one tile more
            nothing = Work(0, 0, 0, self.x.queries, self.x.keys, 0, 1, 1, 1)
            self.load_queries(count, nothing)
            self.load(0, nothing, turn, 0)

    def load_queries(self, count: Size, work: Work) -> None:
        """The queries of a tile, 64 rows a copy."""
        b = self.b
        stage, lap = self.query_stage(count)
        b.wait(self.query_empty, stage, (lap + 1) % 2)
        b.expect(self.query_full, stage, self.rows * self.width * self.x.dtype.size)
        for own in range(self.halves):
            index, axes = self.index(0, work, work.first + 64 * own)
            b.copy_async(
                self.queries, (stage, own), self.memory["q"], index, axes, self.query_full, stage
            )

    def load(self, which: int, work: Work, turn: Size, step: Size) -> None:
        """A block of keys (0) or values (1)."""
        b, width = self.b, (self.width, self.value_width)[which]
        stage, lap = self.stage(turn, step)
        b.wait(self.empty[which], stage, (lap + 1) % 2)
        b.expect(self.full[which], stage, self.keys * width * self.x.dtype.size)
        key = self.key_of(work, step)
        for piece in range(self.pieces if which else 1):
            at = key + piece * self.keys // self.pieces
            index, axes = self.index(1 + which, work, at)
            b.copy_async(
                self.rings[which],
                (stage, piece),
                self.memory["kv"[which]],
                index,
                axes,
                self.full[which],
                stage,
            )

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


def layout_of(width: int, x: AttentionShape) -> str:
    """How rows of a padded width lie for the matrix units."""
    bytes_ = width * x.dtype.size
    return next(f"swizzle{span}" for span in (128, 64, 32) if bytes_ % span == 0)
