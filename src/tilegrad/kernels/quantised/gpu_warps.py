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
from ...core.dtype import float32, int32
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import high, power_of_two, round_up
from . import gpu_packed
from .gpu_around import AroundKernel, AroundPlan
from .gpu_layout import GROUP, ROWS, groups_of, units_of
from .shape import NOTHING, Around, QuantisedShape, norm_block
from .words import and_masks, factors, for_norm, surrounded, there

MOST_TOKENS = 8
MOST_BLOCKS = {1: 7, 2: 2}  # of a program, by units of a group: what registers hold
READING, EXCHANGE = 0.3, 0.3  # blocks that take as long as a program's x, as meeting another one


@dataclass(frozen=True)
class WarpsPlan(AroundPlan):
    """Choices of `WarpsKernel`; its stages are blocks that are asked for ahead."""

    tokens: int = 8  # columns of its products


def why_not(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> str:
    """Why this is not for a product; '' where it is."""
    if high(shape.tokens) > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    return gpu_packed.why_not(shape, target, around) or around.why_not(shape, ROWS)


def plans(shape: QuantisedShape, around: Around, target: Target) -> list[WarpsPlan]:
    """Plans to consider, the most promising first: those that leave cores alike the fewest blocks,
    and read x seldom; two programs of a core, or one of more warps."""
    tokens, units = round_up(high(shape.tokens), 8), units_of(shape.layout)
    total = round_up(shape.rows, ROWS * (1 + bool(around.gated))) // ROWS
    made = []
    sizes = itertools.product((16, 8), range(1, MOST_BLOCKS[units] + 1), (1, 2))
    for warps, blocks, split in sizes:
        turns, rest = divmod(groups_of(shape), 4 * warps * split)
        stages = min(blocks, 4 // units) if warps == 8 or units == 1 else 1
        whole_sums = not around.hands_on or blocks * ROWS % (norm_block(shape.tokens) * split) == 0
        whole_sums = whole_sums and (split == 1 or power_of_two(blocks) == blocks)
        if total % blocks or rest or not whole_sums or math.lcm(stages, blocks) > turns * blocks:
            continue
        resident = 16 // warps
        made.append(WarpsPlan(blocks * ROWS, warps, 4 * warps, stages, resident, split, tokens))

    def cost(plan: WarpsPlan) -> tuple[float, bool]:
        each = -(-total * ROWS // plan.rows * plan.split // target.cores)  # programs of a core
        blocks = (plan.rows / ROWS + READING) / plan.split + EXCHANGE * (plan.split - 1)
        return each * blocks, (plan.warps == 16) is (each > 1)

    return sorted(made, key=cost)


class WarpsKernel(AroundKernel):
    """The kernel: as `RowsKernel`."""

    def __init__(self, shape: QuantisedShape, plan: WarpsPlan, name: str, around: Around) -> None:
        super().__init__(shape, plan, name, around)
        self.tokens, self.chunk = plan.tokens, plan.groups * GROUP
        self.blocks, self.strips = plan.rows // ROWS, ROWS // self.sides  # rows of a side
        self.whole, self.turns = power_of_two(self.each), self.turns // plan.split
        self.stages = min(plan.stages, self.blocks * self.turns)
        # turns after which stages begin anew
        self.together = math.lcm(self.stages, self.blocks) // self.blocks
        fits = self.together <= self.turns and plan.groups == 4 * plan.warps
        shared_out = self.whole % plan.split == 0 and self.groups % (plan.groups * plan.split) == 0
        if not fits or self.each % self.strips or (plan.split > 1 and not shared_out):
            raise InternalError("kernels.quantised", f"{plan} does not fit {shape}")

    @tile.function
    def work(self) -> None:
        """Ask for weights, wait, multiply turn by turn, write."""
        if self.plan.split > 1:
            self.met.expect(0, math.prod(self.parts.shape) * float32.size)
        loaded = [part for number in range(self.stages) for part in self.load_block(0, number)]
        self.constants()
        tile.grid_dependency_wait()
        self.allocate()
        x, added = self.load_inputs(0), self.load_added()
        self.factor = self.load_factor()
        step, rest = self.plan.groups, self.turns - self.together
        first = rest % self.together
        x, loaded = self.some_turns(first, 0, x, loaded)
        if first < rest:
            for group in tile.range(first * step, rest * step, self.together * step):
                x, loaded = self.some_turns(self.together, group, x, loaded)
        self.some_turns(self.together, rest * step, x, loaded, last=True)
        self.write_sums(added)

    def place(self) -> None:
        """The rows that a program finishes: of those that several have, each some."""
        split = self.plan.split
        self.begin, self.each, self.wide = self.row, self.each // split, self.whole // split
        self.row = self.row + self.rank * self.each
        self.first = self.rank * self.turns * self.plan.groups
        if split > 1:
            self.parts = tile.shared((split, self.sides, self.wide, self.tokens))
            self.met = tile.barrier("met", 1)

    def constants(self) -> None:
        """Bias, and the weight of the norm that the result goes to, which need not wait."""
        self.bias, self.next = self.line("bias") if self.around.bias else None, None
        if self.around.hands_on:
            self.next = self.line("next")

    def line(self, name: str) -> Any:
        """A constant of each of the program's rows."""
        mask = self.own_rows((self.wide,), 0)
        return tile.load(self.memory[name], self.row, self.wide, mask=mask)

    def own_rows(self, size: tuple[int, ...], axis: int) -> Any:
        """Which rows along an axis the program has; None for all."""
        there_ = there(size, axis, self.row, self.results)
        return and_masks(there(size, axis, 0, self.each), there_)

    def load_factor(self) -> Any:
        """What a norm before multiplies each token by; None where there is none."""
        if not self.around.summed:
            return None
        return factors(self.memory["squares"], 0, self.tokens, self.around, self.shape)[:, None]

    def allocate(self) -> None:
        """Registers of sums and of operands."""
        warps = self.plan.warps
        sums = (warps * ROWS, self.tokens)
        self.totals = [tile.register(sums, fill=0.0) for _ in range(self.blocks)]
        self.left = tile.register((warps * ROWS, 8), int32)
        right = (warps * self.tokens, 16)
        self.right = [tile.register(right, self.shape.dtype) for _ in range(8)]

    def load_block(self, group: Any, number: int) -> list[Any]:
        """The weights of a block of a turn that begins at a group, or of one that follows."""
        turn, block = divmod(number, self.blocks)
        group, count = self.first + group + turn * self.plan.groups, self.plan.groups
        rows = [self.begin + side * self.rows + block * self.strips for side in range(self.sides)]
        parts = self.weights.memories.values()
        return [self.weights.strips(p, r, group, self.strips, count) for p in parts for r in rows]

    def some_turns(
        self, count: int, group: Any, x: Any, loaded: Sequence[Any], last: bool = False
    ) -> tuple[Any, list[Any]]:
        """Turns from a group on; gives x and the weights of those that follow. What is asked for
        comes where the weights of a block were, so that no thread has to wait to move it."""
        loaded, blocks, sides = list(loaded), self.blocks, self.sides
        for turn in range(count):
            self.hand_out(x)
            if not last or turn + 1 < count:
                x = self.load_inputs(group + (turn + 1) * self.plan.groups)
            for number in range(turn * blocks, (turn + 1) * blocks):
                codes, scales = (whole(loaded[i * sides : (i + 1) * sides]) for i in range(2))
                del loaded[: 2 * sides]
                self.multiply(codes, scales, self.totals[number % blocks])
                if not last or number + self.stages < count * blocks:
                    loaded += self.load_block(group, number + self.stages)
        return x, loaded

    # ---- x --------------------------------------------------------------------------------------

    def load_inputs(self, group: Any) -> Any:
        """x of a turn, 0 past its ends."""
        size, shape = (self.tokens, self.chunk), self.shape
        first = (self.first + group) * GROUP
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
        return tile.load(self.memory["residual"], (0, self.row), size, mask=self.mask_of(size))

    def mask_of(self, size: tuple[int, int]) -> Any:
        """Which results there are; None for all."""
        return and_masks(there(size, 0, 0, self.shape.tokens), self.own_rows(size, 1))

    def write_sums(self, added: Any) -> None:
        """Sum over the warps, do what is around and write."""
        size, sides = (self.tokens, self.wide), self.sums_of_columns()
        value = surrounded(sides, self.bias, added, self.quick, self.factor)
        self.put_all(value.to(self.shape.dtype), self.mask_of(size))

    def sums_of_columns(self) -> list[Any]:
        """Of each side the sums (tokens, rows) that the program finishes."""
        warps, rows, sides = self.plan.warps, self.strips, []
        room = tile.shared((self.blocks, warps, ROWS, self.tokens + 1))
        sums = [tile.reshape(tile.read(t), (warps, ROWS, self.tokens)) for t in self.totals]
        tile.store(room, (0, 0, 0, 0), tile.stack(sums))  # at once: threads meet once
        if self.plan.split > 1:
            tile.named_sync(0, 32 * warps)
        by_block = (self.tokens, self.whole // rows, rows)
        own = there(by_block, 1, 0, self.blocks)
        for side in range(self.sides):
            at = [(0, warp, side * rows, 0) for warp in range(warps)]
            parts = [tile.load(room, a, by_block, axes=(3, 0, 2), mask=own) for a in at]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
            sides.append(tile.reshape(parts[0], (self.tokens, self.whole)))
        return sides if self.plan.split == 1 else self.exchanged(sides)

    def exchanged(self, sides: Sequence[Any]) -> list[Any]:
        """Sums of all columns: each program sends the others the rows that they finish."""
        for side, sums in enumerate(sides):
            tile.send(self.parts[self.rank, side], sums.T, self.met[0], "shares")
        self.met.wait(0, 0)
        found = []
        for side in range(self.sides):
            total = tile.read(self.parts[0, side])
            for other in range(1, self.plan.split):
                total = total + tile.read(self.parts[other, side])
            found.append(total.T)
        return found

    def put_all(self, value: Any, mask: Any) -> None:
        """The results, and what the norm that they go to takes of them."""
        self.put(0, value, mask)
        if not self.around.hands_on:
            return
        scaled, squares = for_norm(value, self.next, self.around)
        tile.store(self.memory["scaled"], (0, self.row), scaled, mask=mask)
        block = norm_block(self.shape.tokens)
        sums = tile.sum(tile.reshape(squares, (self.tokens, self.wide // block, block)), 2)
        mask = and_masks(
            there(sums.shape, 0, 0, self.shape.tokens), there(sums.shape, 1, 0, self.each // block)
        )
        tile.store(self.memory["sums"], (0, self.row // block), sums, mask=mask)


def whole(sides: Sequence[Any]) -> Any:
    """The rows of a block, of one side or of each side some."""
    if len(sides) == 1:
        return sides[0]
    rows, *rest = sides[0].shape
    return tile.reshape(tile.stack(sides), (len(sides) * rows, *rest))
