"""Some tokens times quantised rows by the matrix units of warps, weights straight from memory.

As in `gpu_rows`, a thread asks for the codes of groups of its rows before it waits for the launch
before. Of a step of 128 columns four threads hold a group each, 16 bytes: word j of all four is
what two products (mma) over 16 columns take, in an order of columns of their own, in which x lies
in shared memory too. So no thread unpacks what another one does, and a scale is made once for 32
weights. Warps share the columns of a block of rows out; their sums are added up at its end.

Where all of x fits into shared memory, programs walk over blocks of rows and threads meet once a
block alone; else a program has one block, and x comes turn by turn. Cost for a weight of 4 bits, in
lane instructions: 5/8 to cut digits out, 1 to make them values, 0.3 for scales, 1/8 of products and
1/32 for x for 8 tokens and 32 rows: 2.1. Bytes: those of the parts, once; x from L2, once for each
program. Error: as in `gpu_packed`; with a norm x times its weights is rounded to x's dtype as well.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import high
from ...tile.build import Body, BodyBuilder
from . import gpu_packed
from .gpu_layout import GROUP, ROWS, groups_of
from .gpu_rows import RowsPlan, parameters, why_not_around
from .shape import NOTHING, Around, QuantisedShape, padded

MOST = 8  # tokens
WIDE = 40  # elements between neighbouring runs of 32 in shared memory: banks differ
RUN = 8  # neighbours of x that a thread moves at once
SPARE_BYTES = 20 << 10  # for sums


@dataclass(frozen=True)
class WarpsPlan(RowsPlan):
    """Choices of `warp_tokens`; `tokens` are columns of its products."""

    programs: int = 0  # that walk over the blocks of rows with all of x; 0 for one each


def why_not(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> str:
    """Why this is not for a product; '' where it is."""
    if high(shape.tokens) > MOST:
        return f"more than {MOST} tokens"
    if around.norm is not None and not plan_of(shape, around, target).programs:
        return "no norm: x does not fit into shared memory"
    wrong = gpu_packed.why_not(shape, target, replace(around, norm=None))
    return wrong or why_not_around(shape, around)


def plan_of(shape: QuantisedShape, around: Around, target: Target) -> WarpsPlan:
    """The Plan: two blocks of 16 rows a warp; with a norm, which is computed once a program, as few
    programs as cores hold."""
    tokens, groups, sides = padded(high(shape.tokens), 8), groups_of(shape), 1 + bool(around.gated)
    results = around.results(shape)
    rows = 32 if all(padded(s, ROWS) * sides % 32 == 0 for s in results) else 16 * sides
    blocks = padded(sum(results), ROWS) * sides // rows
    even = groups % 64 == 0
    if around.norm is None and (blocks > target.cores or not even):
        return WarpsPlan(rows, 8, 32, 0, tokens, 2, 2)
    if around.norm is None:
        return WarpsPlan(rows, 16, 64, 0, tokens, 1, 1)
    bytes_ = tokens * groups * WIDE * shape.dtype.size + SPARE_BYTES
    resident = min(2, target.memories["shared"].bytes // bytes_)
    stages = (64, 0, tokens, 1) if even else (32, 0, tokens, 2)
    return WarpsPlan(rows, 8, *stages, resident, min(blocks, resident * target.cores))


def warp_tokens(
    shape: QuantisedShape, plan: WarpsPlan, name: str = "quantised_warps", around: Around = NOTHING
) -> Body:
    """The kernel: as `few_tokens`."""
    return _Warps(shape, plan, name, around).build()


class _Warps:
    """Builds the Body of `warp_tokens`."""

    def __init__(self, shape: QuantisedShape, plan: WarpsPlan, name: str, around: Around) -> None:
        self.shape, self.plan, self.around = shape, plan, around
        self.sides = 2 if around.gated else 1
        self.each = plan.rows // self.sides  # rows of a side in a block
        self.results = sum(around.results(shape))
        self.rows = padded(self.results, ROWS)
        self.blocks, self.tokens, self.chunk = (
            self.rows // self.each,
            plan.tokens,
            plan.groups * GROUP,
        )
        self.turns = groups_of(shape) // plan.groups
        self.stages = min(plan.stages, self.turns)
        self.steps = plan.groups // (4 * plan.warps)  # of a warp in a turn
        uneven = any(s % self.each for s in around.splits) or self.rows % self.each
        if groups_of(shape) % plan.groups or uneven or why_not_around(shape, around):
            raise InternalError("kernels.quantised", f"{plan}, {around} do not fit {shape}")
        given = parameters(shape, around)
        self.b = BodyBuilder(name, given)
        self.memory = {n: tile.memory(p) for (n, _), p in zip(given, self.b.parameters)}

    def build(self) -> Body:
        """Which rows a program has, then its work."""
        plan, programs = self.plan, self.plan.programs or self.blocks
        with tile.into(self.b):
            tile.grid_launch_dependents()
            self.work(tile.grid(programs))
        notes = {"resident": plan.resident} if plan.resident else {}
        return self.b.finish((programs,), warps=plan.warps, level="placed", **notes)

    @tile.function
    def work(self, number: Any) -> None:
        """Ask for weights, wait, then block by block."""
        step, warps = self.plan.groups, self.plan.warps
        first = tile.hold(number * self.each, "first")
        loaded = [part for i in range(self.stages) for part in self.load(i * step, first)]
        tile.grid_dependency_wait()
        sums = (warps * self.each, self.tokens)
        self.totals = [tile.register(sums, fill=0.0) for _ in range(self.sides)]
        self.left = tile.register((warps * self.each, 8), int32)
        self.right = tile.register((warps * self.tokens, 16), self.shape.dtype)
        shape = (warps, self.each, self.tokens + 1)
        self.parts = [tile.shared(shape) for _ in range(self.sides)]
        if self.plan.programs:
            self.lay_all_down()
            for block in tile.range(number, self.blocks, self.plan.programs):
                loaded = self.one_block(block, loaded)
        else:
            self.row = first
            self.only_block(loaded)

    def load(self, group: Any, row: Any, more: Any = None) -> list[Any]:
        """The weights of a turn from a row on, side by side, where there are more."""
        made, groups = [], self.plan.groups
        for side in range(self.sides):
            at, words = row + side * self.rows, (self.each, 4 * groups)
            for size, name, index, axes in (
                (words, "codes", (at, 0, 4 * group), (0, 2)),
                ((self.each, groups), "scales", (at, group), (0, 1)),
            ):
                mask = None if more is None else tile.broadcast(more, size)
                made.append(tile.load(self.memory[name], index, size, axes=axes, mask=mask))
        return made

    # ---- blocks ---------------------------------------------------------------------------------

    def one_block(self, block: Any, loaded: Sequence[Any]) -> list[Any]:
        """A block whose x lies there; gives the first weights of the next one. What a stage asks
        for comes where its weights were, so that no thread has to wait to move it."""
        each, step, stages = len(loaded) // self.stages, self.plan.groups, list(loaded)
        self.row = tile.hold(block * self.each, "row")
        after = block + self.plan.programs
        more = tile.less(after, self.blocks)
        following = tile.hold(tile.minimum(after, self.blocks - 1) * self.each, "following")
        added = self.load_added()
        for turn in range(self.turns):
            slot, ahead = turn % self.stages, turn + self.stages
            own = slice(slot * each, (slot + 1) * each)
            self.multiply_all(stages[own], self.place, turn * self.steps)
            if ahead < self.turns:
                stages[own] = self.load(ahead * step, self.row)
            else:
                stages[own] = self.load((ahead - self.turns) * step, following, more)
        self.write_sums(added)
        for total in self.totals:
            tile.write(total, tile.zeros(total.shape))
        count = each * (self.turns % self.stages)
        return [*stages[count:], *stages[:count]]

    @tile.function
    def only_block(self, loaded: Sequence[Any]) -> None:
        """A block whose x comes turn by turn."""
        step, shape = self.plan.groups, (self.steps, self.plan.warps, self.tokens, 4, WIDE)
        self.places = [tile.shared(shape, self.shape.dtype) for _ in range(2)]
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
        """Turns from a group on; gives x and the weights of those that follow."""
        each, step, stages = len(loaded) // self.stages, self.plan.groups, list(loaded)
        for number, turn in enumerate(turns):
            own, at = slice(number * each, (number + 1) * each), group + number * step
            place = self.places[turn % 2]
            self.lay_down(x, place, 0)
            if not last or number + 1 < len(turns):
                x = self.load_inputs(at + step)
            self.multiply_all(stages[own], place, 0)
            if not last:
                stages[own] = self.load(at + self.stages * step, self.row)
        count = each * len(turns) % len(stages)
        return x, [*stages[count:], *stages[:count]]

    # ---- x --------------------------------------------------------------------------------------

    def load_inputs(self, group: Any) -> Any:
        """x of a turn, 0 past its ends."""
        size, first = (self.tokens, self.chunk), group * GROUP
        mask = self.tokens_there(size)
        if self.shape.columns % self.chunk:
            line = tile.arange(self.chunk) + first < self.shape.columns
            mask = and_masks(mask, tile.broadcast(line[None, :], size))
        return tile.load(self.memory["x"], (0, first), size, mask=mask)

    def tokens_there(self, size: tuple[int, int]) -> Any:
        """Which of some tokens there are; None for all."""
        tokens = self.shape.tokens
        if isinstance(tokens, int) and tokens == size[0]:
            return None
        return tile.broadcast((tile.arange(size[0]) < tokens)[:, None], size)

    def lay_all_down(self) -> None:
        """All of x into shared memory; times the weights of a norm, and roots of mean squares."""
        shape = (self.turns * self.steps, self.plan.warps, self.tokens, 4, WIDE)
        self.place, step = tile.shared(shape, self.shape.dtype), self.plan.groups
        ahead = [self.load_inputs(i * step) for i in range(min(2, self.turns))]
        squares = tile.zeros((self.tokens, self.chunk // RUN))
        for turn in range(self.turns):
            x = ahead[turn]
            if turn + 2 < self.turns:
                ahead.append(self.load_inputs((turn + 2) * step))
            if self.around.norm is not None:
                wide = x.to(float32)
                runs = tile.reshape(wide * wide, (self.tokens, self.chunk // RUN, RUN))
                squares = squares + tile.sum(runs, 2)
                x = (wide * self.factors(turn * self.chunk, wide.shape)).to(x.dtype)
            self.lay_down(x, self.place, turn * self.steps)
        if self.around.norm is not None:
            mean = tile.sum(squares, 1) * (1 / self.shape.columns)
            self.roots_place = tile.shared((self.tokens,))
            tile.store(self.roots_place, 0, tile.sqrt(mean + self.around.norm))

    def factors(self, first: int, size: tuple[int, int]) -> Any:
        """Weights of the norm of some columns."""
        mask = None
        if self.shape.columns % self.chunk:
            mask = tile.arange(self.chunk) + first < self.shape.columns
        found = tile.load(self.memory["norm"], first, self.chunk, mask=mask).to(float32)
        found = found + self.around.offset if self.around.offset else found
        return tile.broadcast(found[None, :], size)

    def lay_down(self, x: Any, place: Any, first: int) -> None:
        """x of a turn into shared memory: of 128 columns, the runs of 8 that meet a word."""
        sizes = (self.tokens, self.plan.warps, 4, self.steps, 4, RUN)
        runs = tile.transpose(tile.reshape(x, sizes), (0, 1, 3, 4, 2, 5))
        runs = tile.reshape(runs, (*sizes[:2], self.steps, 4, GROUP))
        tile.store(place, (first, 0, 0, 0, 0), runs, axes=(2, 1, 0, 3, 4))

    # ---- a turn -------------------------------------------------------------------------------

    def multiply_all(self, loaded: Sequence[Any], place: Any, first: int) -> None:
        """Add what some groups give."""
        sizes = (self.each, self.plan.warps, 4, self.steps)
        codes = [tile.reshape(part, (*sizes, 4)) for part in loaded[::2]]
        scales = [tile.reshape(part, sizes) for part in loaded[1::2]]
        for step in range(self.steps):
            found = [self.scales_at(own, step) for own in scales]
            for word in range(4):
                x = self.inputs_at(place, first + step, word)
                for half in range(2):
                    right = tile.transpose(x[:, :, :, half : half + 1, :, :], (0, 1, 3, 4, 2, 5))
                    tile.write(self.right, tile.reshape(right, self.right.shape))
                    for total, own, scale in zip(self.totals, codes, found):
                        words = own[:, :, :, step : step + 1, word : word + 1]
                        words = tile.reshape(words, (*sizes[:2], 4, 1))
                        tile.write(self.left, self.values(words, half, *scale))
                        tile.matrix_sync(total, self.left, self.right, (self.plan.warps, 1))

    def inputs_at(self, place: Any, step: int, word: int) -> Any:
        """x that meets a word of each group: (warps, tokens, groups, halves, pairs, 2)."""
        size = (self.plan.warps, self.tokens, GROUP)
        x = tile.load(place, (step, 0, 0, word, 0), size, axes=(1, 2, 4))
        return tile.reshape(x, (*size[:2], 4, 2, 2, 2))

    def scales_at(self, scales: Any, step: int) -> tuple[Any, Any]:
        """Scales of a step (rows, warps, groups, 1), and what codes less 8 are above."""
        return gpu_packed.scales_of(scales[:, :, :, step : step + 1], self.shape)

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

    def rows_there(self) -> Any:
        """Which rows of a block there are; None for all."""
        if self.rows == self.results:
            return None
        return tile.arange(self.each) + self.row < self.results

    def mask_of(self, size: tuple[int, int]) -> Any:
        """Which results there are; None for all."""
        rows = self.rows_there()
        rows = rows if rows is None else tile.broadcast(rows[None, :], size)
        return and_masks(self.tokens_there(size), rows)

    def write_sums(self, added: Any) -> None:
        """Sum over the warps, do what is around and write."""
        warps, size = self.plan.warps, (self.tokens, self.each)
        whole = []
        for place, total in zip(self.parts, self.totals):
            value = tile.reshape(tile.read(total), (warps, self.each, self.tokens))
            tile.store(place, (0, 0, 0), value)
        for place in self.parts:
            parts = [tile.load(place, (w, 0, 0), size, axes=(2, 1)) for w in range(warps)]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
            whole.append(parts[0])
        if self.around.norm is not None:
            roots = tile.load(self.roots_place, 0, self.tokens)[:, None]
            whole = [tile.quick_divide(v, tile.broadcast(roots, size)) for v in whole]
        self.put(self.around_all(whole, added).to(self.shape.dtype), self.mask_of(size))

    def around_all(self, sides: Sequence[Any], added: Any) -> Any:
        """Results with what is around them."""
        value = sides[0]
        if self.around.bias:
            bias = tile.load(self.memory["bias"], self.row, self.each, mask=self.rows_there())
            value = value + tile.broadcast(bias.to(float32)[None, :], value.shape)
        if self.around.gated:
            one = tile.full((), 1.0)
            value = tile.quick_divide(value, tile.quick_exp(-value) + one) * sides[1]
        return value if added is None else value + added.to(float32)

    @tile.function
    def put(self, value: Any, mask: Any, number: int = 0) -> None:
        """Into the result that has the rows, from a result on."""
        sizes, out = self.around.results(self.shape), self.memory[f"out{number}"]
        first = sum(sizes[:number])
        row = self.row if not number else tile.maximum(self.row - first, 0)
        if number + 1 == len(sizes) or tile.less(self.row, first + sizes[number]):
            tile.store(out, (0, row), value, mask=mask)
        else:
            self.put(value, mask, number + 1)


def and_masks(a: Any, b: Any) -> Any:
    """Two masks; None is true."""
    return a if b is None else b if a is None else a & b


__all__ = ["WarpsPlan", "plan_of", "warp_tokens", "why_not"]
