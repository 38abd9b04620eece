"""Wide matmuls with weights of which two of every four along k are kept.

Operands are turned: the matrix unit takes what is kept as its rows, and tokens as its columns. A
stage of the ring has half as many bytes of weights, the words that say where they were (see
`core.kept`), and tokens as ever; each thread of a consumer reads its words of a step at once and
gives them to the products. Why tiles of 128 x 256: a product of 64 rows reads twice as many bytes
of tokens a clock as a dense one does, 128 bytes with 256 columns, which is what shared memory
gives; what is kept comes on top, so 16/9 of the dense rate is the most there is, with fewer columns
less. Bytes: half of the weights and a bit for each, tokens once for every 128 rows.
Invariant: the order of a sum over k is that of k, whatever the Plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ... import tile
from ...core.dtype import DType, int32
from ...core.target import Target
from ...ir.symbol import ceil_divide, high, round_up
from .plan import (
    FEW_TOKENS,
    NOT_SHARED,
    PIECE_SECONDS,
    READ_SHARE,
    SPAN_BYTES,
    START_SECONDS,
    STEP_SECONDS,
    efficiency,
    matrix_rate,
    most_stages,
    tiles_of,
    work_of,
)
from .shape import Choice, Operands, WidePlan, box
from .wide import WideMatmul

ROWS = 128  # that weights are padded to
GAIN = 1.6  # of the dense rate; not measured
MOST_WIDE, MOST_STAGES = 256, 12
SHARED = 2048  # tokens from which neighbours share them


def depth_of(dtype: DType) -> int:
    """Columns of a step: as many as a span of tokens has."""
    return SPAN_BYTES // dtype.size


class SparseMatmul(WideMatmul):
    """Writes one Body: a are the elements that are kept, `words` say which."""

    words: Any

    def operands(self) -> tuple[Any, Any]:
        """The stages' places of what is kept, of its words, and of tokens."""
        x, stages, (tm, tn, tk) = self.x, self.plan.stages, self.plan.tile
        left = tile.shared((stages, tm // 64, 64, tk // 2), x.dtype, "swizzle64")
        right = tile.shared((stages, tn, tk), x.dtype, "swizzle128")
        self.kept = tile.shared((stages, tm // 64, 4, tk // 2), int32)
        return left, right

    @property
    def stage_bytes(self) -> int:
        """Bytes that land in one stage."""
        return step_bytes(self.x, self.plan)

    def fill_left(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """What is kept of a tile of a and its words, 64 rows a copy."""
        _, row, _ = where
        half, full = self.plan.tile[2] // 2, self.ring.full[stage]
        for own in range(self.halves):
            first = row + 64 * own
            tile.copy_async(
                self.left[stage, own], box(self.a, (first, step * half), (64, half)), full
            )
            source = box(self.words, (first // 16, step * half), (4, half))
            tile.copy_async(self.kept[stage, own], source, full)

    @tile.function
    def multiply(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """The products of a tile. A product reads its words to its end, so the next step's are read
        then; meanwhile the other consumer multiplies."""
        (total,), turn = totals, tile.hold(count * self.turns, "turn")
        for step in tile.range(self.steps):
            stage = self.ring.wait(turn + step)
            tile.matrix_fence()
            left, right = self.left[stage, own], self.right[stage].T
            tile.matrix_async(total, left, right, step > 0, self.kept[stage, own])
            tile.matrix_commit()
            tile.matrix_wait(0)
            self.release(turn + step)


def step_bytes(x: Operands, plan: WidePlan) -> int:
    """Bytes of a step: half of the weights, a bit for each of them, tokens."""
    tm, tn, tk = plan.tile
    return tm * tk // 2 * x.dtype.size + tm * tk // 8 + tn * tk * x.dtype.size


def choose_sparse(x: Operands, target: Target) -> Choice[WidePlan] | None:
    """The Plan for weights on the right, which the kernel takes turned; None where none fits."""
    found = [Choice(plan, True, expected(x, plan, target)) for plan in plans(x, target)]
    return min(found, key=lambda c: c.seconds, default=None)


def plans(x: Operands, target: Target) -> Iterator[WidePlan]:
    """Tiles of one height or two, as wide as tokens are many, alone or in pairs that share them."""
    m = high(x.m)
    across = ceil_divide(m, MOST_WIDE)
    unit = 64 if m > 64 else 8
    wide = round_up(ceil_divide(m, across), unit)
    for rows in (64, 128):
        for cluster in (1, 2) if rows == 128 and m >= SHARED else (1,):
            tile = (rows, wide, depth_of(x.dtype))
            plan = WidePlan(tile, MOST_STAGES, staged=min(64, wide), cluster=cluster)
            tiles, limit = tiles_of(x, plan, True), target.cores // cluster
            limit = limit // 8 * 8 if cluster > 1 and limit >= 8 else limit  # leaves power
            clusters = min(limit, ceil_divide(tiles, ceil_divide(tiles, limit)))
            plan = replace(
                plan, programs=clusters * cluster, early=tiles <= limit or m > FEW_TOKENS
            )
            stages = most_stages(replace(x, turned=True), plan, target, step=step_bytes(x, plan))
            if stages >= 2:
                yield replace(plan, stages=stages)


def expected(x: Operands, plan: WidePlan, target: Target) -> float:
    """Seconds that are expected: products, or bytes from memory."""
    (tm, tn, tk), (m, n, k, _) = plan.tile, x.most
    _, rounds, steps, _ = work_of(x, plan, True)
    rate = GAIN * matrix_rate(x, target) * efficiency(tn) * min(1.0, tm / 128 + 0.3)
    alone = NOT_SHARED if plan.cluster == 1 and m >= SHARED else 1.0
    each = steps * (2 * tm * tn * tk / rate * alone + STEP_SECONDS) + 64 * tn * PIECE_SECONDS
    moved = n * k * x.dtype.size // 2 + n * k // 8 + m * (k * x.dtype.size + n * x.result.size)
    return max(rounds * each, moved / (READ_SHARE * target.peak_bytes())) + START_SECONDS
