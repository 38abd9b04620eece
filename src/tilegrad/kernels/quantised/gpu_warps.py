"""Some tokens times quantised rows by the matrix units of warps, weights straight from memory.

As in `gpu_rows`, a thread asks for the codes of groups of its rows before it waits for the launch
before, and programs are small, so that those of the next launch take the place of those that end.
Of a step of 128 columns four threads hold a group each, 16 bytes: word j of all four is what two
products (mma) over 16 columns take, in an order of columns of their own, in which x comes from
shared memory too. So no thread unpacks what another one does, and a scale is made once for 32
weights. Warps share the columns of a program's rows out; their sums are added up at the end.

Cost for a weight of 4 bits, in lane instructions: 5/8 to cut digits out, 1 to make them values,
0.3 for scales, 1/8 of products and 1/8 for x for 8 tokens and 32 rows: 2.1. Bytes: those of the
parts, once; x from L2, once for each program. Error: as in `gpu_packed`; with a norm x times its
weights is rounded to x's dtype as well.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...core.target import Target
from ...ir.symbol import high
from ...tile.build import Body
from . import gpu_packed
from .gpu_layout import GROUP, layout_of
from .gpu_rows import RowsPlan, _Rows
from .shape import NOTHING, Around, QuantisedShape, padded

MOST = 16  # tokens
STEP = 4 * GROUP  # columns that a warp takes at once
WIDE = 40  # elements between neighbouring runs of 32 in shared memory: banks differ


@dataclass(frozen=True)
class WarpsPlan(RowsPlan):
    """Choices of `warp_tokens`; `tokens` are columns of the products."""


def why_not(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> str:
    """Why this is not for a product; '' where it is."""
    if high(shape.tokens) > MOST:
        return f"more than {MOST} tokens"
    return gpu_packed.why_not(shape, target, around, norm=True)


def plan_of(shape: QuantisedShape) -> WarpsPlan:
    """The Plan: two blocks of 16 rows a warp."""
    return WarpsPlan(32, 8, 32, 0, padded(high(shape.tokens), 8), 2)


def warp_tokens(
    shape: QuantisedShape, plan: WarpsPlan, name: str = "quantised_warps", around: Around = NOTHING
) -> Body:
    """The kernel: as `few_tokens`."""
    return _Warps(shape, plan, name, around).build()


class _Warps(_Rows):
    """Builds the Body of `warp_tokens`."""

    def __init__(
        self, shape: QuantisedShape, plan: WarpsPlan, name: str, around: Around
    ) -> None:
        super().__init__(shape, plan, name, around)
        self.tokens, self.chunk = plan.tokens, plan.groups * GROUP
        self.steps = plan.groups // (4 * plan.warps)  # of a warp in a turn

    @tile.function
    def work(self) -> list[Any]:
        """Ask for weights, wait, multiply turn by turn; gives the sums of each side."""
        step, stages = self.plan.groups, min(self.plan.stages, self.turns)
        warps, dtype = self.plan.warps, self.shape.dtype
        loaded = [x for i in range(stages) for x in self.load(i * step)]
        tile.grid_dependency_wait()
        shape = (warps, self.each)
        self.totals = [tile.register((warps * self.each, self.tokens), fill=0.0) for _ in range(self.sides)]
        self.left = tile.register((warps * self.each, 8), int32)
        self.right = tile.register((warps * self.tokens, 16), dtype)
        self.place = tile.shared((self.steps, warps, self.tokens, 4, WIDE), dtype)
        each, rest = len(loaded) // stages, (self.turns - stages) * step
        x = self.load_inputs_at(0)
        for group in tile.range(0, rest, step):
            following = self.load(group + stages * step)
            self.lay_down(x)
            x = self.load_inputs_at(group + step)
            self.multiply_all(loaded[:each])
            loaded = [*loaded[each:], *following]
        for i in range(stages):
            self.lay_down(x)
            if i + 1 < stages:
                x = self.load_inputs_at(rest + (i + 1) * step)
            self.multiply_all(loaded[i * each : (i + 1) * each])
        return [tile.reshape(tile.read(t), (*shape, self.tokens)) for t in self.totals]

    # ---- x --------------------------------------------------------------------------------------

    def load_inputs_at(self, group: Any) -> Any:
        """x of a turn, 0 past its ends."""
        size, first = (self.tokens, self.chunk), group * GROUP
        return tile.load(self.memory["x"], (self.token, first), size, mask=self.there(size, first))

    def there(self, size: tuple[int, int], first: Any) -> Any:
        """Which of some tokens and columns there are; None for all."""
        tokens, columns = self.shape.tokens, self.shape.columns
        mask = None
        if columns % size[1]:
            mask = tile.broadcast((tile.arange(size[1]) + first < columns)[None, :], size)
        if not isinstance(tokens, int) or tokens % size[0]:
            own = tile.broadcast((tile.arange(size[0]) + self.token < tokens)[:, None], size)
            mask = own if mask is None else mask & own
        return mask

    def lay_down(self, x: Any) -> None:
        """x of a turn into shared memory: of 128 columns, the runs of 8 that meet a word."""
        sizes = (self.tokens, self.plan.warps, self.steps, 4, 4, 8)
        runs = tile.transpose(tile.reshape(x, sizes), (0, 1, 2, 4, 3, 5))
        runs = tile.reshape(runs, (*sizes[:3], 4, GROUP))
        tile.store(self.place, (0, 0, 0, 0, 0), runs, axes=(2, 1, 0, 3, 4))

    # ---- a turn -------------------------------------------------------------------------------

    def multiply_all(self, loaded: Sequence[Any]) -> None:
        """Add what some groups give."""
        each = len(loaded) // self.sides
        found = [self.weights.named(loaded[s * each : (s + 1) * each]) for s in range(self.sides)]
        warps, rows = self.plan.warps, self.each
        for step in range(self.steps):
            scales = [self.scales_at(one["scales"], step) for one in found]
            for word in range(4):
                at, size = (step, 0, 0, word, 0), (warps, self.tokens, GROUP)
                x = tile.load(self.place, at, size, axes=(1, 2, 4))
                x = tile.reshape(x, (warps, self.tokens, 4, 2, 2, 2))
                for half in range(2):
                    right = tile.transpose(x[:, :, :, half : half + 1, :, :], (0, 1, 3, 4, 2, 5))
                    tile.write(self.right, tile.reshape(right, (warps * self.tokens, 16)))
                    for total, one, scale in zip(self.totals, found, scales):
                        codes = tile.reshape(one["codes"], (rows, warps, self.steps, 4, 4))
                        own = codes[:, :, step : step + 1, :, word : word + 1]
                        own = tile.reshape(own, (rows, warps, 4, 1))
                        left = tile.transpose(self.values(own, half, *scale), (1, 0, 3, 2))
                        tile.write(self.left, tile.reshape(left, (warps * rows, 8)))
                        tile.matrix_sync(total, self.left, self.right, (warps, 1))

    def scales_at(self, scales: Any, step: int) -> tuple[Any, Any]:
        """Scales of a step (rows, warps, groups, 1), and what codes less 8 are above."""
        sizes = (self.each, self.plan.warps, self.steps, 4)
        found = tile.reshape(scales, sizes)[:, :, step : step + 1, :]
        return gpu_packed.scales_of(tile.reshape(found, (*sizes[:2], 4, 1)), self.shape)

    def values(self, words: Any, half: int, scale: Any, minimum: Any) -> Any:
        """The weights (rows, warps, groups, 2) of half a word, two neighbours in a word."""
        sizes = (*words.shape[:3], 2)
        words = tile.broadcast(words >> 8 if half else words, sizes)
        return gpu_packed.numbers(words, (0, 4), scale, minimum, self.shape)

    # ---- results --------------------------------------------------------------------------------

    def finish(self, sums: Sequence[Any]) -> None:
        """Sum over the warps, do what is around and write."""
        size = (self.tokens, self.each)
        places = [tile.shared((self.plan.warps, *size)) for _ in sums]
        for place, value in zip(places, sums):
            tile.store(place, (0, 0, 0), value, axes=(0, 2, 1))
        whole = []
        for place in places:
            total = tile.load(place, (0, 0, 0), size, axes=(1, 2))
            for warp in range(1, self.plan.warps):
                total = total + tile.load(place, (warp, 0, 0), size, axes=(1, 2))
            whole.append(total)
        mask = self.mask_of(size)
        self.write_all(self.around_all(whole, mask).to(self.shape.dtype), mask)

    def mask_of(self, size: tuple[int, int]) -> Any:
        """Which results there are; None for all."""
        tokens, mask = self.shape.tokens, self.rows_there()
        mask = mask if mask is None else tile.broadcast(mask[None, :], size)
        if not isinstance(tokens, int) or tokens % size[0]:
            own = tile.broadcast((tile.arange(size[0]) + self.token < tokens)[:, None], size)
            mask = own if mask is None else mask & own
        return mask

    def around_all(self, sides: Sequence[Any], mask: Any) -> Any:
        """Results with what is around them."""
        value = sides[0]
        if self.around.bias:
            bias = tile.load(self.memory["bias"], self.row, self.each, mask=self.rows_there())
            value = value + tile.broadcast(bias.to(float32)[None, :], value.shape)
        if self.around.gated:
            one = tile.full((), 1.0)
            value = tile.quick_divide(value, tile.quick_exp(-value) + one) * sides[1]
        if self.around.residual:
            at = (self.token, self.row)
            more = tile.load(self.memory["residual"], at, value.shape, mask=mask)
            value = value + more.to(float32)
        return value

    @tile.function
    def write_all(self, value: Any, mask: Any, number: int = 0) -> None:
        """Into the result that has the rows, from a result on."""
        sizes, out = self.around.results(self.shape), self.memory[f"out{number}"]
        first = sum(sizes[:number])
        row = self.row if not number else tile.maximum(self.row - first, 0)
        if number + 1 == len(sizes) or tile.less(self.row, first + sizes[number]):
            tile.store(out, (self.token, row), value, mask=mask)
        else:
            self.write_all(value, mask, number + 1)


__all__ = ["WarpsPlan", "plan_of", "warp_tokens", "why_not"]
