"""What attention kernels whose threads copy and multiply themselves have in common (sm_80).

A program keeps a block of tokens of one side, the rows of every product, and takes blocks of the
other side's tokens, from the last that is seen to the first: they come by copies of 16 bytes a
thread while others are multiplied, with two stages a whole step ahead. Invariant: the order of a
sum depends on the Plan and on which tokens a program sees alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import DType
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Array
from ...tile.build import Body
from ...tile.define import Definition
from ...tile.plan import Plan
from ...tile.value import index_of
from ..matmul.shape import swizzle_of
from .shape import AttentionShape, Parameters, tokens_of
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


def fitting(made: Sequence[tuple[int, WarpPlan]], target: Target) -> list[WarpPlan]:
    """Plans whose bytes of shared memory fit, first those of which two programs share a core, and
    of these the ones with two stages."""
    core = target.limits["shared_bytes_per_core"]
    fits = [one for one in made if one[0] <= target.memories["shared"].bytes]
    fits.sort(key=lambda one: (2 * (one[0] + 1024) >= core, one[1].stages == 1))
    return [plan for _, plan in fits]


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
    batch: Any
    first: Any  # token that is kept
    seen: Seen
    last: Any  # block

    def __init__(
        self,
        x: AttentionShape,
        plan: WarpPlan,
        sees: AttentionShape,
        other: Sequence[tuple[Any, int]],
    ) -> None:
        """`other` are pairs of an array and whose order it lies in, by number."""
        self.x, self.plan, self.sees, self.other = x, plan, sees, other
        self.rows, self.columns = plan.tile
        self.widths = padded(x.width), padded(x.value_width)
        self.most = max(0, -(-high(sees.keys) // self.columns) - 1)  # number of the last block

    def allocate_ring(self) -> None:
        """Stages of both matrices of a block."""
        shapes = [(self.plan.stages, self.columns, width) for width in self.widths]
        self.ring = [shared_place(self.x.dtype, *shape) for shape in shapes]

    def look(self, limit: Any) -> None:
        """Find the blocks that are seen, of so many tokens."""
        sees = self.sees
        band = tuple(None if side is None else index_of(side) for side in sees.band)
        cuts = band[1] is not None or sees.ends(self.columns)
        given = (self.first, index_of(sees.queries), limit)
        self.seen = seen_by((band[0], band[1]), self.plan.tile, *given, 0, cuts)
        last = tile.minimum(self.seen.start + self.seen.count - 1, self.most)
        self.last = tile.index(last, 0, self.most)

    @tile.function
    def steps(self, always: bool) -> None:
        """Steps; those that a mask cuts in loops of their own, or all where one `always` may."""
        seen = self.seen
        for j in tile.range(0, seen.right):
            self.step(j, True)
        for j in tile.range(seen.right, seen.left):
            self.step(j, always)
        if self.sees.band[0] is not None:
            for j in tile.range(seen.left, seen.count):
                self.step(j, True)

    def load(self, numbers: Sequence[int], head: Any, j: Any, later: bool = False) -> None:
        """Matrices of step j, in a group of their own. Of a `later` one than the first no block
        reaches past the last token; past the last step nobody reads it."""
        end = max(0, self.most - 1) if later else self.most
        block = tile.index(tile.maximum(self.last - j, 0), 0, end)
        for number in numbers if self.most or not later else ():
            place = self.ring[number][j % self.plan.stages]
            part = self.part(*self.other[number], head, block * self.columns, place.shape)
            tile.copy_threads(place, part)
        tile.commit_threads()

    def part(self, memory: Any, order: int, head: Any, token: Any, shape: Any) -> Any:
        """Tokens of an array that lies in the order of q, k, v or the result."""
        return tokens_of(memory, self.x.orders[order], (self.batch, head, token), shape)

    def meet(self) -> None:
        """All that was copied is there, and nobody reads what was there before."""
        tile.wait_threads(0)
        tile.named_sync(0, 32 * self.plan.warps)

    def add_weighed(self, total: Any, weights: Sequence[Any], below: Any, place: Any) -> None:
        """total += weights @ a matrix of a block."""
        for number, left in enumerate(weights):
            tile.load_operand(below, place.T, DEPTH * number)
            tile.matrix_sync(total, left, below, (self.plan.warps, 1))
