"""A few tokens times quantised rows by the matrix units of warps, weights straight from memory.

As in `gpu_rows`, a thread asks for the codes of groups of its rows before it waits for the launch
before. Of a step of 128 columns four threads hold a group each, 16 bytes: word j of all four is
what two products (mma) over 16 columns take, in an order of columns of their own, in which x comes
from shared memory too. So no thread unpacks what another one does, and a scale is made once for 32
weights. Warps share the columns of a program's rows out; their sums are added up at the end.

Cost for a weight of 4 bits, in lane instructions: 5/8 to cut digits out, 1 to make them values,
0.3 for scales, 1/8 of products, 1/8 for x of 8 tokens and 32 rows; 2.3 as assembled. Bytes: those
of the parts, once; x from L2, once for each program. Error: as in `gpu_packed`.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...core.target import Target
from ...ir.symbol import high, round_up
from . import gpu_packed
from .gpu_around import AroundKernel, AroundPlan
from .gpu_layout import GROUP, ROWS, groups_of
from .shape import NOTHING, Around, QuantisedShape
from .words import and_masks, there

MOST_TOKENS = 8
WIDE = 40  # elements between neighbouring runs of 32 in shared memory: banks differ


@dataclass(frozen=True)
class WarpsPlan(AroundPlan):
    """Choices of `WarpsKernel`."""

    tokens: int = 8  # columns of its products


def why_not(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> str:
    """Why this is not for a product; '' where it is."""
    if high(shape.tokens) > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    return gpu_packed.why_not(shape, target, around) or around.why_not(shape, ROWS)


def plan_of(shape: QuantisedShape, around: Around, target: Target) -> WarpsPlan:
    """The Plan: two blocks of 16 rows a warp; more warps where a core has one program."""
    tokens, sides = round_up(high(shape.tokens), 8), 1 + bool(around.gated)
    sizes = [round_up(size, ROWS) * sides for size in around.results(shape)]
    rows = 32 if all(size % 32 == 0 for size in sizes) else 16 * sides
    if sum(sizes) > rows * target.cores or groups_of(shape) % 64:
        return WarpsPlan(rows, 8, 32, 2, 2, tokens)
    return WarpsPlan(rows, 16, 64, 1, 1, tokens)


class WarpsKernel(AroundKernel):
    """The kernel: as `RowsKernel`."""

    def __init__(self, shape: QuantisedShape, plan: WarpsPlan, name: str, around: Around) -> None:
        super().__init__(shape, plan, name, around)
        self.tokens, self.chunk = plan.tokens, plan.groups * GROUP
        self.stages = min(plan.stages, self.turns)
        self.steps = plan.groups // (4 * plan.warps)  # of a warp in a turn

    @tile.function
    def work(self) -> None:
        """Ask for weights, wait, multiply turn by turn, write."""
        step, warps = self.plan.groups, self.plan.warps
        loaded = [part for i in range(self.stages) for part in self.load(i * step)]
        tile.grid_dependency_wait()
        sums = (warps * self.each, self.tokens)
        self.totals = [tile.register(sums, fill=0.0) for _ in range(self.sides)]
        self.left = tile.register((warps * self.each, 8), int32)
        self.right = tile.register((warps * self.tokens, 16), self.shape.dtype)
        shape = (self.steps, warps, self.tokens, 4, WIDE)
        self.rooms = [tile.shared(shape, self.shape.dtype) for _ in range(2)]
        x, rest, added = self.load_inputs(0), self.turns - self.stages, self.load_added()
        first = rest % self.stages
        x, loaded = self.some_turns(range(first), 0, x, loaded)
        for group in tile.range(first * step, rest * step, self.stages * step):
            x, loaded = self.some_turns(range(first, first + self.stages), group, x, loaded)
        self.some_turns(range(first, first + self.stages), rest * step, x, loaded, last=True)
        self.write_sums(added)

    def some_turns(
        self, turns: range, group: Any, x: Any, loaded: Sequence[Any], last: bool = False
    ) -> tuple[Any, list[Any]]:
        """Turns from a group on; gives x and the weights of those that follow. What a stage asks
        for comes where its weights were, so that no thread has to wait to move it."""
        each, step, stages = len(loaded) // self.stages, self.plan.groups, list(loaded)
        for number, turn in enumerate(turns):
            own, at = slice(number * each, (number + 1) * each), group + number * step
            room = self.rooms[turn % 2]
            self.lay_down(x, room)
            if not last or number + 1 < len(turns):
                x = self.load_inputs(at + step)
            self.multiply(stages[own], room)
            if not last:
                stages[own] = self.load(at + self.stages * step)
        count = each * len(turns) % len(stages)
        return x, [*stages[count:], *stages[:count]]

    # ---- x --------------------------------------------------------------------------------------

    def load_inputs(self, group: Any) -> Any:
        """x of a turn, 0 past its ends."""
        size, first, shape = (self.tokens, self.chunk), group * GROUP, self.shape
        mask = and_masks(there(size, 0, 0, shape.tokens), there(size, 1, first, shape.columns))
        return tile.load(self.memory["x"], (0, first), size, mask=mask)

    def lay_down(self, x: Any, room: Any) -> None:
        """x of a turn into shared memory: of 128 columns, the runs of 8 that meet a word."""
        sizes = (self.tokens, self.plan.warps, 4, self.steps, 4, 8)
        runs = tile.transpose(tile.reshape(x, sizes), (0, 1, 3, 4, 2, 5))
        runs = tile.reshape(runs, (*sizes[:2], self.steps, 4, GROUP))
        tile.store(room, (0, 0, 0, 0, 0), runs, axes=(2, 1, 0, 3, 4))

    # ---- a turn -------------------------------------------------------------------------------

    def multiply(self, loaded: Sequence[Any], room: Any) -> None:
        """Add what the groups of a turn give."""
        sizes = (self.each, self.plan.warps, 4, self.steps)
        codes = [tile.reshape(part, (*sizes, 4)) for part in loaded[::2]]
        scales = [tile.reshape(part, sizes) for part in loaded[1::2]]
        for step in range(self.steps):
            found = [gpu_packed.scales_of(s[..., step : step + 1], self.shape) for s in scales]
            for word in range(4):
                x = self.inputs_at(room, step, word)
                for half in range(2):
                    right = tile.transpose(x[:, :, :, half : half + 1, :, :], (0, 1, 3, 4, 2, 5))
                    tile.write(self.right, tile.reshape(right, self.right.shape))
                    for total, own, scale in zip(self.totals, codes, found):
                        words = own[:, :, :, step : step + 1, word : word + 1]
                        words = tile.reshape(words, (*sizes[:3], 1))
                        tile.write(self.left, self.values(words, half, *scale))
                        tile.matrix_sync(total, self.left, self.right, (self.plan.warps, 1))

    def inputs_at(self, room: Any, step: int, word: int) -> Any:
        """x that meets a word of each group: (warps, tokens, groups, halves, pairs, 2)."""
        size = (self.plan.warps, self.tokens, GROUP)
        x = tile.load(room, (step, 0, 0, word, 0), size, axes=(1, 2, 4))
        return tile.reshape(x, (*size[:2], 4, 2, 2, 2))

    def values(self, words: Any, half: int, scale: Any, minimum: Any) -> Any:
        """The weights of half a word of each group, two neighbours in a word."""
        words = tile.broadcast(words >> 8 if half else words, (*words.shape[:3], 2))
        made = gpu_packed.numbers(words, (0, 4), scale, minimum, self.shape)
        return tile.reshape(tile.transpose(made, (1, 0, 3, 2)), self.left.shape)

    # ---- results --------------------------------------------------------------------------------

    def load_added(self) -> Any:
        """What is added to results, asked for before it is needed; None for nothing."""
        if not self.around.residual:
            return None
        size = (self.tokens, self.each)
        return tile.load(self.memory["residual"], (0, self.row), size, mask=self.mask_of(size))

    def mask_of(self, size: tuple[int, int]) -> Any:
        """Which results there are; None for all."""
        rows = there(size, 1, self.row, self.results)
        return and_masks(there(size, 0, 0, self.shape.tokens), rows)

    def write_sums(self, added: Any) -> None:
        """Sum over the warps, do what is around and write."""
        warps, size, whole = self.plan.warps, (self.tokens, self.each), []
        shape = (warps, self.each, self.tokens)
        shared = [tile.shared((*shape[:2], self.tokens + 1)) for _ in self.totals]
        for room, total in zip(shared, self.totals):
            tile.store(room, (0, 0, 0), tile.reshape(tile.read(total), shape))
        for room in shared:
            parts = [tile.load(room, (w, 0, 0), size, axes=(2, 1)) for w in range(warps)]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
            whole.append(parts[0])
        self.put(0, whole, self.load_bias(), added, self.mask_of(size))
