"""Few tokens times quantised rows on a GPU: byte products, one pass over the packed weights.

A thread owns a group of 32 columns and some rows. It asks for the codes of all of its rows at
once (16 bytes a group of 4 bits, neighbouring lanes neighbouring groups) and only then waits for
the launch before. The threads of a program turn x into 16-bit integers, one scale a group, two
signed bytes each, in shared memory; a product of four codes is then two byte products (dp4a).
Sums within a group are exact integers; scale, minimum and the offset of the codes are applied
once a group, in float32. Error of x: 2 ** -16 of the largest of its group, below that of bfloat16.

Cost for a weight of Q4_1, in lane instructions: 3/8 to take nibbles apart, 1/2 of byte products,
9/32 for scales and sums: 1.2, and 5/rows to round x, where a program has so many rows. At 4.47
TB/s an H200 brings 31 weights of 5 bits a clock and core, so that is 37 of 128 lanes (28 of the
64 that do integers). Bytes: those of the parts; x comes from L2. Each further token adds 1/2 of
byte products and 1/4 for scales.

What lies around a product in a decoder may be `Around` it: a root-mean-square norm of x (its
factor is applied to the sums, so nothing waits for it), a bias, the activation of one half of the
rows times the other half, a value that is added.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import float32, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, maximum
from ...ir.types import Memory
from ...tile import ops, placed
from ...tile.build import Body, BodyBuilder
from .gpu_layout import (
    GROUP,
    ROWS,
    Groups,
    groups_of,
    layout_of,
    part_parameters,
)
from .shape import NOTHING, Around, QuantisedShape, padded

MOST = 32512.0  # of x in integers: with the 128 that splits bytes it stays within 16 bits
MAGIC = 12582912.0 + 128.0  # 1.5 * 2 ** 23: adding it leaves an integer in the low bits
LEAST = 1e-30  # x below this counts as 0


@dataclass(frozen=True)
class RowsPlan:
    """Choices of `few_tokens`."""

    rows: int = 16  # of a program
    warps: int = 4
    groups: int = 128  # of a row that the threads take at once
    together: int = 4  # tokens that are multiplied at once
    tokens: int = 4  # of a program at most: more go to further programs, which read weights again
    stages: int = 1  # turns whose groups are asked for ahead
    resident: int = 0  # programs of a core that registers are to suffice for; 0 to let it be


def few_tokens(
    shape: QuantisedShape, plan: RowsPlan, name: str = "quantised_rows", around: Around = NOTHING
) -> Body:
    """The kernel: x (tokens, columns), the parts, out (tokens, rows); see Around."""
    return _Rows(shape, plan, name, around).build()


def why_not_around(shape: QuantisedShape, around: Around) -> str:
    """Why something does not go around a product; '' where it does."""
    if around.gated not in ("", "silu"):
        return f"the activation {around.gated}"
    if around.gated and (around.bias or around.splits or shape.rows % (2 * ROWS)):
        return f"gates of rows that are no multiple of {2 * ROWS}, or with more around them"
    if around.splits and (
        around.residual or sum(around.splits) != shape.rows or any(s % ROWS for s in around.splits)
    ):
        return f"results of rows that are no multiple of {ROWS}"
    return ""


def parameters(shape: QuantisedShape, around: Around = NOTHING) -> list[tuple[str, Memory]]:
    """The parameters in order."""
    dtype, results = shape.dtype, around.results(shape)
    made = [("x", Memory((shape.tokens, shape.columns), dtype))]
    if around.norm is not None:
        made.append(("norm", Memory((shape.columns,), dtype, use="constant")))
    made += part_parameters(shape)
    if around.bias:
        made.append(("bias", Memory((shape.rows,), dtype, use="constant")))
    if around.residual:
        made.append(("residual", Memory((shape.tokens, results[0]), dtype)))
    return [
        *made,
        *(
            (f"out{i}", Memory((shape.tokens, size), dtype, use="result"))
            for i, size in enumerate(results)
        ),
    ]


def rounded_groups(shape: QuantisedShape, plan: RowsPlan) -> int:
    """Groups of x that are rounded: whole turns, and eight elements for every thread."""
    return padded(padded(groups_of(shape), plan.groups), 8 * plan.warps)


def shared_bytes(shape: QuantisedShape, plan: RowsPlan) -> int:
    """Shared memory that a program needs."""
    groups = rounded_groups(shape, plan)
    each = groups * (72 + 4 * layout_of(shape).halves) + 4 * plan.rows * plan.groups
    return min(plan.tokens, high(shape.tokens)) * each


class _Rows:
    """Builds the Body of `few_tokens`."""

    def __init__(self, shape: QuantisedShape, plan: RowsPlan, name: str, around: Around) -> None:
        self.shape, self.plan, self.around = shape, plan, around
        self.layout, self.groups = layout_of(shape), groups_of(shape)
        self.sides = 2 if around.gated else 1
        self.each = plan.rows // self.sides  # rows of a side in a program
        self.results = sum(around.results(shape))
        self.rows = padded(self.results, ROWS)
        self.turns = -(-self.groups // plan.groups)
        self.tokens = min(plan.tokens, high(shape.tokens))
        self.limit = self.groups if self.groups % plan.groups else None
        uneven = any(s % self.each for s in around.splits) or why_not_around(shape, around)
        if self.rows % self.each or plan.groups % 32 or uneven:
            raise InternalError("kernels.quantised", f"{plan}, {around} do not fit {shape}")
        given = parameters(shape, around)
        self.b = b = BodyBuilder(name, given)
        self.memory = dict(zip((n for n, _ in given), b.parameters))
        own = [self.memory[n] for n, _ in part_parameters(shape)]
        self.weights = Groups(b, shape, own)

    def build(self) -> Body:
        """Ask for weights, wait, multiply turn by turn, sum up."""
        b, plan = self.b, self.plan
        b.add(placed.grid_launch_dependents())
        grid: tuple[Size, ...] = (self.rows // self.each,)
        self.token: Size = 0
        if high(self.shape.tokens) > self.tokens:  # neighbours read the same weights
            blocks = ceil_divide(self.shape.tokens, self.tokens)
            self.token = b.program(0, blocks) * self.tokens
            grid = (blocks, *grid)
        self.row = b.program(len(grid) - 1, self.rows // self.each) * self.each
        tokens, step = self.tokens, plan.groups
        stages = min(plan.stages, self.turns)
        loaded = [x for i in range(stages) for x in self.load(i * step)]
        self.constants()
        b.add(placed.grid_dependency_wait())
        self.residuals = [self.load_residual(token) for token in range(tokens)]
        self.round_inputs()
        self.divisors = [self.roots(token) for token in range(tokens)]
        tokens *= self.sides  # sums of a token for each side, one after the other
        sums = [b.constant(0.0, float32, (self.each, step, 1)) for _ in range(tokens)]
        each = len(loaded) // stages

        def turn(group: Size, carried: list[Node]) -> Sequence[Node]:
            following = self.load(group + stages * step)
            own = carried[tokens : tokens + each]
            return [
                *self.multiply(group, own, carried[:tokens]),
                *carried[tokens + each :],
                *following,
            ]

        rest = (self.turns - stages) * step
        carried = b.loop("group", 0, rest, step, turn, [*sums, *loaded])
        sums = carried[:tokens]
        for i in range(stages):
            own = carried[tokens + i * each : tokens + (i + 1) * each]
            sums = self.multiply(rest + i * step, own, sums)
        self.finish(sums)
        notes = {"resident": plan.resident} if plan.resident else {}
        return b.finish(grid, warps=plan.warps, level="placed", **notes)

    def load(self, group: Size) -> list[Node]:
        """The weights of a turn, side by side."""
        return [
            x
            for side in range(self.sides)
            for x in self.weights.load(
                self.row + side * self.rows, group, self.each, self.plan.groups, self.limit
            )
        ]

    def constants(self) -> None:
        """Norm and bias, which need not wait."""
        b, around = self.b, self.around
        wide = rounded_groups(self.shape, self.plan) * GROUP
        self.norm = self.bias = None
        if around.norm is not None:
            self.norm = b.load(self.memory["norm"], (0,), (wide,), (0,), self.columns_there(wide))
        if around.bias:
            self.bias = b.load(
                self.memory["bias"], (self.row,), (self.each,), (0,), self.rows_there()
            )

    def load_residual(self, token: int) -> Node | None:
        """What is added to a token's results: asked for before it is needed."""
        if not self.around.residual:
            return None
        there = self.token_there(token, (self.each,), self.rows_there())
        at = (self.token + token, self.row)
        return self.b.load(self.memory["residual"], at, (self.each,), (1,), there)

    def rows_there(self) -> Node | None:
        """Which rows of a program there are; None for all."""
        b, line = self.b, ops.iota(size=self.each, dtype=int64)
        if self.rows == self.results:
            return None
        at = b.apply("add", b.add(line), b.index(self.row))
        return b.apply("less", at, b.constant(self.results, int64))

    def columns_there(self, wide: int) -> Node | None:
        """Which columns there are; None for all."""
        if wide == self.shape.columns:
            return None
        line = self.b.add(ops.iota(size=wide, dtype=int64))
        return self.b.apply("less", line, self.b.constant(self.shape.columns, int64))

    # ---- x --------------------------------------------------------------------------------------

    def round_inputs(self) -> None:
        """x as integers, 256 * high + low, into shared memory: words of bytes in the order of
        the codes, sums of each half of a group (or of all of it), scales."""
        b, halves = self.b, self.layout.halves
        tokens, groups = self.tokens, rounded_groups(self.shape, self.plan)
        # a place for everything that is written at once: threads need not meet in between
        each = 1 if self.layout.codes == "nibbles" else 2  # planes that are written at once
        self.words = [
            [b.allocate((each, groups, 4), int32, "shared") for _ in range(4 // each)]
            for _ in range(tokens)
        ]
        self.sums = [b.allocate((halves, groups), int32, "shared") for _ in range(tokens)]
        self.scales = [b.allocate((groups,), float32, "shared") for _ in range(tokens)]
        self.squares = [
            b.allocate((groups,), float32, "shared")
            for _ in range(0 if self.around.norm is None else tokens)
        ]
        for token in range(tokens):
            values = self.load_inputs(token, groups)
            size = b.add(ops.reduce(b.apply("absolute", values), axis=1, kind="max"))
            size = b.apply("maximum", size, b.constant(LEAST, float32))
            inverse = b.apply(
                "multiply", b.apply("quick_reciprocal", size), b.constant(MOST, float32)
            )
            inverse = b.add(ops.reshape(inverse, shape=(groups, 1)))
            moved = b.apply(
                "multiply_add",
                values,
                b.broadcast(inverse, values.shape),
                b.constant(MAGIC, float32, values.shape),
            )
            scale = b.apply("multiply", size, b.constant(1 / MOST, float32))
            b.store(self.scales[token], scale, (0,), (0,))
            self.store_words(token, b.add(ops.bitcast(moved, dtype=int32)))
        b.load(self.scales[0], (0,))  # threads meet here, and not in each turn

    def load_inputs(self, token: int, groups: int) -> Node:
        """All of a token, 0 past its end, as (groups, 32); times the weights of a norm."""
        b, wide = self.b, groups * GROUP
        there = self.token_there(token, (wide,), self.columns_there(wide))
        at = (self.token + token, 0)
        values = b.cast(b.load(self.memory["x"], at, (wide,), (1,), there), float32)
        shape = (groups, GROUP)
        if self.norm is None:
            return b.add(ops.reshape(values, shape=shape))
        square = b.add(ops.reshape(b.apply("multiply", values, values), shape=shape))
        square = b.add(ops.reduce(square, axis=1, kind="sum"))
        b.store(self.squares[token], square, (0,), (0,))
        factor = b.cast(self.norm, float32)
        if self.around.offset:
            factor = b.apply("add", factor, b.constant(self.around.offset, float32))
        return b.add(ops.reshape(b.apply("multiply", values, factor), shape=shape))

    def token_there(self, token: int, shape: tuple[int, ...], mask: Node | None) -> Node | None:
        """A mask, where a token of the program is there."""
        b, tokens = self.b, self.shape.tokens
        if isinstance(tokens, int) and tokens % self.tokens == 0:
            return mask
        inside = b.broadcast(b.less(self.token + token, tokens), shape)
        return b.logical_and(mask, inside)

    def store_words(self, token: int, bits: Node) -> None:
        """Words of bytes of integers (groups, 32), and their sums."""
        b, integer, ones = self.b, self.weights.integer, self.weights.integer(0x01010101)
        groups, halves = bits.shape[0], self.layout.halves
        nibbles = self.layout.codes == "nibbles"
        wide, sums = (8 if nibbles else 4), []
        split = b.add(ops.reshape(bits, shape=(groups, GROUP // wide, wide)))
        chosen = ((0, 2, 4, 6), (1, 3, 5, 7)) if nibbles else ((0, 1, 2, 3),)
        for plane, elements in enumerate(chosen):
            one = [
                b.add(ops.part(split, start=(0, 0, e), shape=(groups, GROUP // wide, 1)))
                for e in elements
            ]
            left, right = (
                b.apply("byte_permute", *pair, integer(0x5140)) for pair in (one[:2], one[2:])
            )
            low = b.apply("byte_permute", left, right, integer(0x5410))
            low = b.apply("bit_xor", low, integer(0x80808080))
            top = b.apply("byte_permute", left, right, integer(0x7632))
            sum_ = b.apply("shift_left", b.apply("byte_dot", ones, top, integer(0)), integer(8))
            sums.append(b.apply("byte_dot", ones, low, sum_))
            for number, word in enumerate((top, low)):
                word = b.add(ops.reshape(word, shape=(groups, GROUP // wide // 4, 4)))
                place = self.words[token][number * len(chosen) + plane]
                b.store(place, word, (0, 0, 0), (1, 0, 2))
        total = sums[0] if len(sums) == 1 else b.apply("add", *sums)
        total = b.add(ops.reshape(total, shape=(groups, halves, GROUP // wide // halves)))
        total = b.add(ops.transpose(b.add(ops.reduce(total, axis=2, kind="sum")), order=(1, 0)))
        b.store(self.sums[token], total, (0, 0), (0, 1))

    # ---- a turn -------------------------------------------------------------------------------

    def multiply(self, group: Size, loaded: Sequence[Node], sums: Sequence[Node]) -> list[Node]:
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
                        made[at] = self.scaled(totals[i][half], scale, rounded[i], half, made[at])
        return made

    def byte_products(
        self, found: dict[str, Node], rounded: Sequence[_Rounded]
    ) -> list[list[tuple[Node, Node]]]:
        """For tokens and halves of groups the (high, low) sums of integers."""
        b, halves = self.b, self.layout.halves
        shape = (self.each, self.plan.groups, 1)
        zero = b.constant(0, int32, shape)
        totals = [[(zero, self.start(x, half, shape)) for half in range(halves)] for x in rounded]
        for number in range(8):
            word = self.weights.word(found, number)
            half = number * halves // 8
            for x, own in zip(rounded, totals):
                high, low = (
                    b.apply("byte_dot", word, w, total)
                    for w, total in zip(x.words(number), own[half])
                )
                own[half] = (high, low)
        return totals

    def start(self, x: _Rounded, half: int, shape: tuple[int, ...]) -> Node:
        """What the offset of codes takes off."""
        b = self.b
        less = b.apply("multiply", x.sums[half], self.weights.integer(-self.layout.offset % 2**32))
        return b.broadcast(less if self.layout.offset else b.constant(0, int32), shape)

    def scaled(
        self,
        parts: tuple[Node, Node],
        scales: tuple[Node, Node | None],
        x: _Rounded,
        half: int,
        total: Node,
    ) -> Node:
        """A sum and the value of a group (or half of one)."""
        b = self.b
        whole = b.apply("add", b.apply("shift_left", parts[0], self.weights.integer(8)), parts[1])
        value, (scale, minimum) = b.cast(whole, float32), scales
        if minimum is None:
            return b.apply("multiply_add", b.apply("multiply", value, x.scale), scale, total)
        less = b.apply("multiply", minimum, b.cast(x.sums[half], float32))
        return b.apply(
            "multiply_add",
            b.apply("multiply_add", value, scale, less),
            b.broadcast(x.scale, value.shape),
            total,
        )

    # ---- results --------------------------------------------------------------------------------

    def finish(self, sums: Sequence[Node]) -> None:
        """Sum over the threads of a row, do what is around and write."""
        b, size = self.b, self.each
        whole = [b.add(ops.reduce(s, axis=1, kind="sum")) for s in self.met(sums)]
        mask = self.rows_there()
        for token in range(len(sums) // self.sides):
            there = self.token_there(token, (size,), mask)
            own = [
                self.normed(token, whole[token * self.sides + side]) for side in range(self.sides)
            ]
            value = b.cast(self.surrounded(token, own), self.shape.dtype)
            self.write(token, value, there)

    def write(self, token: int, value: Node, there: Node | None, number: int = 0) -> None:
        """Rows of a token into the result that has them, from a result on."""
        b, sizes = self.b, self.around.results(self.shape)
        first = sum(sizes[:number])
        row = self.row if not number else maximum(self.row - first, 0)

        def here() -> Sequence[Node]:
            at = (self.token + token, row)
            b.store(self.memory[f"out{number}"], value, at, (1,), there)
            return ()

        def further() -> Sequence[Node]:
            self.write(token, value, there, number + 1)
            return ()

        if number + 1 == len(sizes):
            here()
        else:
            b.branch(b.less(self.row, first + sizes[number]), here, further)

    def surrounded(self, token: int, sides: Sequence[Node]) -> Node:
        """A token's results with what is around them."""
        b, value, residual = self.b, sides[0], self.residuals[token]
        if self.bias is not None:
            value = b.apply("add", value, b.cast(self.bias, float32))
        if self.around.gated:
            one, quick = b.constant(1.0, float32), "quick_" * (self.shape.dtype.bits < 32)
            share = b.apply("add", b.apply(quick + "exp", b.apply("negative", value)), one)
            value = b.apply("multiply", b.apply(quick + "divide", value, share), sides[1])
        if residual is not None:
            value = b.apply("add", value, b.cast(residual, float32))
        return value

    def roots(self, token: int) -> Node | None:
        """The root of a token's mean square, for each row; None where there is no norm."""
        b = self.b
        if self.around.norm is None:
            return None
        # each warp sums for the rows it holds: threads need not meet for it
        shape = (self.each, rounded_groups(self.shape, self.plan))
        found = b.load(self.squares[token], (0,), shape[1:], (0,))
        found = b.broadcast(b.add(ops.reshape(found, shape=(1, shape[1]))), shape)
        total = b.add(ops.reduce(found, axis=1, kind="sum"))
        mean = b.apply("multiply", total, b.constant(1 / self.shape.columns, float32))
        mean = b.apply("add", mean, b.constant(self.around.norm, float32))
        return b.apply("square_root", mean)

    def normed(self, token: int, value: Node) -> Node:
        """A token's results, divided by the root of its mean square where asked."""
        root = self.divisors[token]
        if root is None:
            return value
        return self.b.apply("quick_" * (self.shape.dtype.bits < 32) + "divide", value, root)

    def met(self, sums: Sequence[Node]) -> list[Node]:
        """Sums as a warp holds whole rows of them, which costs far fewer shuffles."""
        b, shape = self.b, (self.each, self.plan.groups)
        places = [b.allocate(shape, float32, "shared") for _ in sums]
        for place, value in zip(places, sums):
            b.store(place, b.add(ops.reshape(value, shape=shape)), (0, 0), (0, 1))
        return [b.load(place, (0, 0), shape, (0, 1)) for place in places]


class _Rounded:
    """x of a token and some groups as integers, from shared memory: Tiles (1, groups, 1)."""

    def __init__(self, kernel: _Rows, token: int, group: Size) -> None:
        b, count = kernel.b, kernel.plan.groups
        self.kernel = kernel
        self.planes = [
            b.add(
                ops.reshape(
                    b.load(place, (plane, group, 0), (count, 4), (1, 2)), shape=(1, count, 4)
                )
            )
            for place in kernel.words[token]
            for plane in range(place.shape[0])
        ]
        self.scale = self.line(b.load(kernel.scales[token], (group,), (count,), (0,)))
        self.sums = [
            self.line(b.load(kernel.sums[token], (half, group), (count,), (1,)))
            for half in range(kernel.layout.halves)
        ]

    def line(self, x: Node) -> Node:
        """(groups,) as (1, groups, 1)."""
        return self.kernel.b.add(ops.reshape(x, shape=(1, *x.shape, 1)))

    def words(self, number: int) -> tuple[Node, Node]:
        """The (high, low) bytes that meet a word of codes."""
        plane, at = divmod(number, 4)
        if self.kernel.layout.codes == "nibbles":
            at, plane = divmod(number, 2)
        one = self.kernel.weights.one
        return one(self.planes[plane], at), one(self.planes[2 + plane], at)
