"""A few tokens times quantised rows by the matrix units of warps, all from memory to registers.

As in `gpu_rows`, a thread asks for codes before it waits for the launch before. A program has some
blocks of 16 rows, or of 8 gates and the 8 rows that they gate, and its warps share the columns out.
In a turn a warp has 128 columns of every block, of which four threads of a row hold a group each:
word j of all four (of bytes, of both units) is what two products (mma) over 16 columns take, in an
order of columns of their own, and so is what each of them reads of a token in that group. So no
thread unpacks what another one does, a scale is made once for 32 weights, x is read once for all
blocks, and no warp waits for another one: sums of warps are added up at the end.

Cost for a weight of 4 bits, in lane instructions: 5/8 to cut digits out, 1 to make them values,
0.3 for scales, 1/8 of products; 2.3 as assembled, for 8 tokens. Bytes: those of the parts, once, in
accesses of whole lines; x from L2, once for each program. Error: as in `gpu_packed`.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import high, round_up
from . import gpu_packed
from .gpu_around import AroundKernel, AroundPlan
from .gpu_layout import GROUP, ROWS, STRIP, groups_of, units_of
from .shape import NOTHING, Around, QuantisedShape
from .words import and_masks, there

MOST_TOKENS = 8
MOST_BLOCKS = {1: 7, 2: 2}  # of a program, by units of a group: what registers hold
ALONE = 1.25  # times as long a block takes where its program asks for none ahead
READING = 0.3  # blocks that take as long as a program's x


@dataclass(frozen=True)
class WarpsPlan(AroundPlan):
    """Choices of `WarpsKernel`; its stages are blocks that are asked for ahead."""


def why_not(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> str:
    """Why this is not for a product; '' where it is."""
    if high(shape.tokens) > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    return gpu_packed.why_not(shape, target, around) or around.why_not(shape, ROWS)


def plans(shape: QuantisedShape, around: Around, target: Target) -> list[WarpsPlan]:
    """Plans to consider, the most promising first: those that leave cores alike the fewest blocks,
    and read x seldom; two programs of a core, or one of more warps."""
    units = units_of(shape.layout)
    total = round_up(shape.rows, ROWS * (1 + bool(around.gated))) // ROWS
    made = []
    for warps, blocks in itertools.product((16, 8), range(1, MOST_BLOCKS[units] + 1)):
        turns, rest = divmod(groups_of(shape), 4 * warps)
        stages = min(blocks, 4 // units) if warps == 8 or units == 1 else 1
        if total % blocks or rest or math.lcm(stages, blocks) > turns * blocks:
            continue
        each = -(-total // blocks // target.cores)  # programs of a core
        alone = ALONE if blocks == 1 else 1.0
        cost = each * (blocks + READING) * alone, (warps == 16) is (each > 1)
        plan = WarpsPlan(blocks * ROWS, warps, 4 * warps, stages, 16 // warps)
        made.append((cost, plan))
    return [plan for _, plan in sorted(made, key=lambda one: one[0])]


class WarpsKernel(AroundKernel):
    """The kernel: as `RowsKernel`."""

    tokens = MOST_TOKENS

    def __init__(self, shape: QuantisedShape, plan: WarpsPlan, name: str, around: Around) -> None:
        super().__init__(shape, plan, name, around)
        self.blocks, self.lines = plan.rows // ROWS, ROWS // self.sides  # rows of a side
        self.stages = min(plan.stages, self.blocks * self.turns)
        # turns after which stages begin anew
        self.together = math.lcm(self.stages, self.blocks) // self.blocks
        fits = self.together <= self.turns and plan.groups == 4 * plan.warps
        if not fits or self.each % self.lines:
            raise InternalError("kernels.quantised", f"{plan} does not fit {shape}")

    @tile.function
    def work(self) -> None:
        """Ask for weights, wait, multiply turn by turn, write."""
        loaded = [part for number in range(self.stages) for part in self.load_block(0, number)]
        bias = self.load_bias()
        tile.grid_dependency_wait()
        self.allocate()
        x, added = self.load_inputs(0), self.load_added()
        step, rest = self.plan.groups, self.turns - self.together
        first = rest % self.together
        x, loaded = self.some_turns(first, 0, x, loaded)
        for group in tile.range(first * step, rest * step, self.together * step):
            x, loaded = self.some_turns(self.together, group, x, loaded)
        self.some_turns(self.together, rest * step, x, loaded, last=True)
        self.write_sums(bias, added)

    def allocate(self) -> None:
        """Registers of sums and of operands."""
        warps = self.plan.warps
        sums = (warps * ROWS, self.tokens)
        self.totals = [tile.register(sums, fill=0.0) for _ in range(self.blocks)]
        self.left = tile.register((warps * ROWS, 8), int32)
        right = (warps * self.tokens, 16)
        self.right = [tile.register(right, self.shape.dtype) for _ in range(8)]

    def load_block(self, group: Any, number: int) -> list[Any]:
        """The weights of a block of a turn that begins at a group, or of one that follows: of each
        part 8 rows and the 8 that follow, or that they gate."""
        turn, block = divmod(number, self.blocks)
        group, count = group + turn * self.plan.groups, self.plan.groups
        row, apart = self.row + block * self.lines, self.rows if self.sides > 1 else STRIP
        load, memories = self.weights.strips, self.weights.memories.values()
        return [load(m, row + i * apart, group, STRIP, count) for m in memories for i in range(2)]

    def some_turns(
        self, count: int, group: Any, x: Any, loaded: Sequence[Any], last: bool = False
    ) -> tuple[Any, list[Any]]:
        """Turns from a group on; gives x and the weights of those that follow. What is asked for
        comes where the weights of a block were, so that no thread has to wait to move it."""
        loaded, blocks = list(loaded), self.blocks
        for turn in range(count):
            self.hand_out(x)
            if not last or turn + 1 < count:
                x = self.load_inputs(group + (turn + 1) * self.plan.groups)
            for number in range(turn * blocks, (turn + 1) * blocks):
                codes, scales = (tile.stack(loaded[i : i + 2]) for i in (0, 2))
                del loaded[:4]
                self.multiply(codes, scales, self.totals[number % blocks])
                if not last or number + self.stages < count * blocks:
                    loaded += self.load_block(group, number + self.stages)
        return x, loaded

    # ---- x --------------------------------------------------------------------------------------

    def load_inputs(self, group: Any) -> Any:
        """x of a turn, 0 past its ends."""
        size, first, shape = (self.tokens, self.plan.groups * GROUP), group * GROUP, self.shape
        mask = and_masks(there(size, 0, 0, shape.tokens), there(size, 1, first, shape.columns))
        return tile.load(self.memory["x"], (0, first), size, mask=mask)

    def hand_out(self, x: Any) -> None:
        """x of a turn as operands: for each word and half of a word what meets its digits."""
        x = tile.reshape(x, (self.tokens, self.plan.warps, 4, 2, 2, 4, 2))
        for place, (word, half) in zip(self.right, itertools.product(range(4), range(2))):
            own = tile.transpose(x[..., half : half + 1, word : word + 1, :], (1, 0, 4, 5, 3, 2, 6))
            tile.write(place, tile.reshape(own, place.shape))

    # ---- a block of a turn ----------------------------------------------------------------------

    def multiply(self, codes: Any, scales: Any, total: Any) -> None:
        """Add what the groups of a block give."""
        sizes, units = (ROWS, self.plan.warps, 4), units_of(self.layout)
        codes = tile.reshape(codes, (*sizes, units, 4))
        found = gpu_packed.scales_of(tile.reshape(scales, (*sizes, 1)), self.shape)
        for place, (word, half) in zip(self.right, itertools.product(range(4), range(2))):
            words = tile.reshape(codes[..., word : word + 1], (*sizes, units))
            words = tile.broadcast(words >> 8 if half else words, (*sizes, 2))
            made = gpu_packed.numbers(words, 3, *found, self.shape)
            made = tile.transpose(made, (1, 0, 3, 2))
            tile.write(self.left, tile.reshape(made, self.left.shape))
            tile.matrix_sync(total, self.left, place, (self.plan.warps, 1))

    # ---- results --------------------------------------------------------------------------------

    def load_added(self) -> Any:
        """What is added to results, asked for before it is needed; None for nothing."""
        if not self.around.residual:
            return None
        size = (self.tokens, self.wide)
        return tile.load(self.memory["residual"], (0, self.row), size, mask=self.results_there())

    def results_there(self) -> Any:
        """Which results there are; None for all."""
        size = (self.tokens, self.wide)
        return and_masks(there(size, 0, 0, self.shape.tokens), self.rows_there(self.tokens))

    def write_sums(self, bias: Any, added: Any) -> None:
        """Sum over the warps, do what is around and write."""
        warps, rows, whole = self.plan.warps, self.lines, []
        room = tile.shared((self.blocks, warps, ROWS, self.tokens + 1))
        sums = [tile.reshape(tile.read(t), (warps, ROWS, self.tokens)) for t in self.totals]
        tile.store(room, (0, 0, 0, 0), tile.stack(sums))  # at once: threads meet once
        size = (self.tokens, self.wide // rows, rows)
        own = there(size, 1, 0, self.blocks)
        for side in range(self.sides):
            at = [(0, warp, side * rows, 0) for warp in range(warps)]
            parts = [tile.load(room, a, size, axes=(3, 0, 2), mask=own) for a in at]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
            whole.append(tile.reshape(parts[0], (self.tokens, self.wide)))
        self.put(0, whole, bias, added, self.results_there())
