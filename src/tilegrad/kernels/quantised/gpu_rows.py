"""Few tokens times quantised rows on a GPU: byte products, one pass over the packed weights.

A thread owns a group of 32 columns and some rows. It asks for the codes of all of its rows at
once (16 bytes a group of 4 bits, neighbouring lanes neighbouring groups) and only then waits for
the launch before. The threads of a program turn x into 16-bit integers, one scale a group, two
signed bytes each, in shared memory; a product of four codes is then two byte products (dp4a).
Sums within a group are exact integers; scale, minimum and the offset of the codes are applied
once a group, in float32. Error of x: 2 ** -16 of the largest of its group, below that of bfloat16.

Many rows are shared out: a program rounds x once and takes block after block of them; while it
finishes the sums of one, memory brings the weights of the next.

Cost for a weight of Q4_1, in lane instructions: 1/8 to bring nibbles to the order of x, 3/8 to take
them apart, 1/2 of byte products, 9/32 for scales and sums: 1.3; and 5/rows to round x, where a
program has so many rows. At 4.47 TB/s an H200 brings 31 weights of 5 bits a clock and core, so that
is 41 of 128 lanes (32 of the 64 that do integers). Bytes: those of the parts; x comes from L2. Each
further token adds 1/2 of byte products and 1/4 for scales.

Of what is `Around` a product a norm's factor is applied to the sums, so nothing waits for it.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...ir.symbol import high, round_up
from ...tile.value import index_of
from .gpu_around import AroundKernel, AroundPlan
from .gpu_layout import GROUP, groups_of, half_of, halves_of, one
from .shape import Around, QuantisedShape
from .words import BYTES, and_masks, there

MOST_INTEGER = 32512.0  # of x in integers: with the 128 that splits bytes it stays within 16 bits
MAGIC = 12582912.0 + 128.0  # 1.5 * 2 ** 23: adding it leaves an integer in the low bits
LEAST_INPUT = 1e-30  # x below this counts as 0


@dataclass(frozen=True)
class RowsPlan(AroundPlan):
    """Choices of `RowsKernel`."""

    together: int = 4  # tokens that are multiplied at once
    tokens: int = 4  # of a program at most: more go to further programs, which read weights again
    programs: int = 0  # that share blocks of rows out, each with x rounded once; 0: one a block


def rounded_groups(shape: QuantisedShape, plan: RowsPlan) -> int:
    """Groups of x that are rounded: whole turns, and eight elements for every thread."""
    return round_up(round_up(groups_of(shape), plan.groups), 8 * plan.warps)


def shared_bytes(shape: QuantisedShape, plan: RowsPlan) -> int:
    """Shared memory that a program needs."""
    groups = rounded_groups(shape, plan)
    each = groups * (72 + 4 * halves_of(shape.layout)) + 4 * plan.rows * plan.groups
    return min(plan.tokens, high(shape.tokens)) * each


class RowsKernel(AroundKernel):
    """The kernel: x (tokens, columns), the parts, out (tokens, rows); see Around."""

    plan: RowsPlan

    def __init__(self, shape: QuantisedShape, plan: RowsPlan, name: str, around: Around) -> None:
        super().__init__(shape, plan, name, around)
        self.tokens = min(plan.tokens, high(shape.tokens))
        self.programs = min(plan.programs or self.programs, self.programs)

    @tile.function
    def work(self) -> None:
        """Ask for weights, wait, round x, multiply block after block of rows."""
        stages = min(self.plan.stages, self.turns)
        loaded = [x for turn in range(stages) for x in self.ask(self.row, turn)]
        self.constants()
        tile.grid_dependency_wait()
        alone = not self.plan.programs
        residuals = self.load_residuals() if alone else []
        self.round_inputs()
        self.divisors = [self.roots(token) for token in range(self.tokens)]
        if alone:
            self.finish(self.only_block(stages, loaded), residuals)
            return
        for row in tile.range(self.row, self.rows, self.programs * self.each):
            loaded = self.next_block(row, stages, loaded)

    @tile.function
    def only_block(self, stages: int, loaded: Sequence[Any]) -> list[Any]:
        """The sums of the program's rows, turn by turn."""
        step, each = self.plan.groups, len(loaded) // stages
        rest, sums = (self.turns - stages) * step, self.zeros()
        for group in tile.range(0, rest, step):
            following = self.load(group + stages * step)
            sums = self.multiply(group, loaded[:each], sums)
            loaded = [*loaded[each:], *following]
        for turn in range(stages):
            own = loaded[turn * each : (turn + 1) * each]
            sums = self.multiply(rest + turn * step, own, sums)
        return sums

    def next_block(self, row: Any, stages: int, loaded: Sequence[Any]) -> list[Any]:
        """A block of rows: where its weights were, those of the next come in, which memory brings
        while sums are finished."""
        loaded, sums, each = list(loaded), self.zeros(), len(loaded) // stages
        self.row = row
        self.bias, residuals = self.load_bias(), self.load_residuals()
        for turn in range(self.turns):
            loaded += self.ask(row, turn + stages)
            sums = self.multiply(turn * self.plan.groups, loaded[:each], sums)
            del loaded[:each]
        self.row = row
        self.finish(sums, residuals)
        return loaded

    def ask(self, row: Any, turn: int) -> list[Any]:
        """The weights of a turn of a block, or of one of the next: 0 past the last row."""
        after, turn = divmod(turn, self.turns)
        self.row = row + after * self.programs * self.each
        return self.load(turn * self.plan.groups)

    def zeros(self) -> list[Any]:
        """Sums of a token for each side, one after the other."""
        shape = (self.each, self.plan.groups, 1)
        return [tile.zeros(shape) for _ in range(self.tokens * self.sides)]

    def load_residuals(self) -> list[Any]:
        """What is added to the results of each token."""
        return [self.load_residual(token) for token in range(self.tokens)]

    def constants(self) -> None:
        """Norm and bias, which need not wait."""
        wide = rounded_groups(self.shape, self.plan) * GROUP
        self.norm = None
        if self.around.norm is not None:
            mask = there((wide,), 0, 0, self.shape.columns)
            self.norm = tile.load(self.memory["norm"], 0, wide, mask=mask)
        self.bias = self.load_bias()

    def load_residual(self, token: int) -> Any:
        """What is added to a token's results: asked for before it is needed."""
        if not self.around.residual:
            return None
        mask = self.token_there(token, self.each, self.rows_there())
        return tile.load(
            self.memory["residual"], (self.token + token, self.row), self.each, mask=mask
        )

    def token_there(self, token: int, size: int, mask: Any) -> Any:
        """A mask, where a token of the program is there."""
        tokens = index_of(self.shape.tokens)
        if isinstance(tokens, int) and tokens % self.tokens == 0:
            return mask
        return and_masks(mask, tile.broadcast(self.token + token < tokens, (size,)))

    # ---- x --------------------------------------------------------------------------------------

    def round_inputs(self) -> None:
        """x as integers, 256 * high + low, into shared memory: words of bytes in the order of
        the codes, sums of each half of a group (or of all of it), scales."""
        groups, halves = rounded_groups(self.shape, self.plan), halves_of(self.layout)
        # a place for everything that is written at once: threads need not meet in between
        tokens = range(self.tokens)
        self.words = [[tile.shared((2, groups, 4), int32) for _ in range(2)] for _ in tokens]
        self.sums = [tile.shared((halves, groups), int32) for _ in tokens]
        self.scales = [tile.shared((groups,)) for _ in tokens]
        normed = tokens if self.around.norm is not None else ()
        self.squares = [tile.shared((groups,)) for _ in normed]
        for token in tokens:
            values = self.load_inputs(token, groups)
            size = tile.maximum(tile.max(tile.abs(values), 1), LEAST_INPUT)
            inverse = (tile.quick_reciprocal(size) * MOST_INTEGER)[:, None]
            inverse = tile.broadcast(inverse, values.shape)
            moved = tile.multiply_add(values, inverse, tile.full(values.shape, MAGIC))
            tile.store(self.scales[token], 0, size * (1 / MOST_INTEGER))
            self.store_words(token, tile.bitcast(moved, int32))
        tile.load(self.scales[0][0])  # threads meet here, and not in each turn

    def load_inputs(self, token: int, groups: int) -> Any:
        """All of a token, 0 past its end, as (groups, 32); times the weights of a norm."""
        wide, shape = groups * GROUP, (groups, GROUP)
        mask = self.token_there(token, wide, there((wide,), 0, 0, self.shape.columns))
        values = tile.load(self.memory["x"], (self.token + token, 0), wide, mask=mask).to(float32)
        if self.norm is None:
            return tile.reshape(values, shape)
        square = tile.sum(tile.reshape(values * values, shape), 1)
        tile.store(self.squares[token], 0, square)
        factor = self.norm.to(float32)
        if self.around.offset:
            factor = factor + self.around.offset
        return tile.reshape(values * factor, shape)

    def store_words(self, token: int, bits: Any) -> None:
        """Words of bytes of integers (groups, 32), and their sums."""
        groups, halves = bits.shape[0], halves_of(self.layout)
        ones = tile.full((), BYTES, int32)
        split = tile.reshape(bits, (groups, 8, 4))
        four = [one(split, i) for i in range(4)]
        left = tile.byte_permute(four[0], four[1], 0x5140)
        right = tile.byte_permute(four[2], four[3], 0x5140)
        low = tile.byte_permute(left, right, 0x5410) ^ 0x80808080
        top = tile.byte_permute(left, right, 0x7632)
        for place, word in zip(self.words[token], (top, low)):
            word = tile.reshape(word, (groups, 2, 4))
            tile.store(place, (0, 0, 0), word, axes=(1, 0, 2))
        total = tile.byte_dot(ones, low, tile.byte_dot(ones, top, 0) << 8)
        total = tile.reshape(total, (groups, halves, 8 // halves))
        tile.store(self.sums[token], (0, 0), tile.sum(total, 2).T)

    # ---- a turn -------------------------------------------------------------------------------

    def multiply(self, group: Any, loaded: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        """Add what some groups give, for all tokens and sides."""
        count = len(sums) // self.sides
        made = list(sums)
        each = len(loaded) // self.sides
        for first in range(0, count, self.plan.together):
            tokens = range(first, min(first + self.plan.together, count))
            rounded = [_Rounded(self, token, group) for token in tokens]
            for side in range(self.sides):
                found = self.weights.named(loaded[side * each : (side + 1) * each])
                scales = self.weights.scales(found)
                totals = self.byte_products(found, rounded)
                for i, token in enumerate(tokens):
                    at = token * self.sides + side
                    for half, scale in enumerate(scales):
                        made[at] = scaled(totals[i][half], *scale, rounded[i], half, made[at])
        return made

    def byte_products(
        self, found: dict[str, list[Any]], rounded: Sequence[_Rounded]
    ) -> list[list[tuple[Any, Any]]]:
        """For tokens and halves of groups the (high, low) sums of integers."""
        halves, shape = halves_of(self.layout), (self.each, self.plan.groups, 1)
        zero = tile.zeros(shape, int32)
        totals = [[(zero, self.start(x, half, shape)) for half in range(halves)] for x in rounded]
        for number, word in enumerate(self.weights.words(found)):
            half = half_of(self.layout, number)
            for x, own in zip(rounded, totals):
                high, low = (
                    tile.byte_dot(word, w, total) for w, total in zip(x.words(number), own[half])
                )
                own[half] = (high, low)
        return totals

    def start(self, x: _Rounded, half: int, shape: tuple[int, ...]) -> Any:
        """What the offset of codes takes off."""
        less = x.sums[half] * -self.layout.centre
        return tile.broadcast(less if self.layout.centre else tile.zeros((), int32), shape)

    # ---- results --------------------------------------------------------------------------------

    def finish(self, sums: Sequence[Any], residuals: Sequence[Any]) -> None:
        """Sum over the threads of a row, do what is around and write."""
        whole = [tile.sum(s, 1) for s in self.met(sums)]
        rows = self.rows_there()
        for token in range(self.tokens):
            mask = self.token_there(token, self.each, rows)
            own = whole[token * self.sides : (token + 1) * self.sides]
            if (root := self.divisors[token]) is not None:
                own = [tile.quick_divide(x, root) if self.quick else x / root for x in own]
            self.put(token, own, self.bias, residuals[token], mask)

    def roots(self, token: int) -> Any:
        """The root of a token's mean square, for each row; None where there is no norm."""
        if self.around.norm is None:
            return None
        # each warp sums for the rows it holds: threads need not meet for it
        groups = rounded_groups(self.shape, self.plan)
        found = tile.load(self.squares[token], 0, groups)[None, :]
        total = tile.sum(tile.broadcast(found, (self.each, groups)), 1)
        return tile.sqrt(total * (1 / self.shape.columns) + self.around.norm)

    def met(self, sums: Sequence[Any]) -> list[Any]:
        """Sums as a warp holds whole rows of them, which costs far fewer shuffles."""
        shape = (self.each, self.plan.groups)
        shared = [tile.shared(shape) for _ in sums]
        for place, value in zip(shared, sums):
            tile.store(place, (0, 0), tile.reshape(value, shape))
        return [tile.load(place, (0, 0), shape) for place in shared]


def scaled(
    parts: tuple[Any, Any], scale: Any, minimum: Any, x: _Rounded, half: int, total: Any
) -> Any:
    """A sum and the value of a group (or half of one)."""
    value = ((parts[0] << 8) + parts[1]).to(float32)
    if minimum is None:
        return tile.multiply_add(value * x.scale, scale, total)
    less = minimum * x.sums[half].to(float32)
    value = tile.multiply_add(value, scale, less)
    return tile.multiply_add(value, x.scale, total)


class _Rounded:
    """x of a token and some groups as integers, from shared memory: Tiles (1, groups, 1)."""

    def __init__(self, kernel: RowsKernel, token: int, group: Any) -> None:
        count = kernel.plan.groups
        self.planes = [
            [tile.load(place, (plane, group, 0), (count, 4))[None, :, :] for plane in range(2)]
            for place in kernel.words[token]
        ]
        self.scale = tile.load(kernel.scales[token], group, count)[None, :, None]
        self.sums = [
            tile.load(kernel.sums[token], (half, group), count)[None, :, None]
            for half in range(halves_of(kernel.layout))
        ]

    def words(self, number: int) -> tuple[Any, Any]:
        """The (high, low) bytes that meet a word of codes."""
        high, low = (one(planes[number // 4], number % 4) for planes in self.planes)
        return high, low
