"""Few tokens times quantised rows on a GPU: byte products, one pass over the packed weights.

A thread owns a group of 32 columns and some rows. It asks for the codes of all of its rows at
once (16 bytes a group of 4 bits, neighbouring lanes neighbouring groups), waits for the launch
before only then, and turns its 32 values of x into 16-bit integers with one scale: two signed
bytes each, so that a product with four codes is two byte products (dp4a). Sums within a group are
exact integers; scale, minimum and the offset of the codes are applied once a group, in float32.
Error of x: 2 ** -16 of the largest of its group, below that of bfloat16 itself.

Cost for a weight of Q4_1, in lane instructions: 3/8 to take nibbles apart, 1/2 of byte products,
8/32 for scales and sums: 1.2, and 150/rows/32 to round x. At 4.47 TB/s an H200 brings 31 weights
of 5 bits a clock and core, so that is 37 of 128 lanes (28 of the 64 that do integers). Bytes:
those of the parts; x comes from L2. Each further token adds 1/2 of byte products.

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.dtype import float32, int32, int64
from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..ir.types import Memory
from ..tile import ops, placed
from ..tile.build import Body, BodyBuilder
from .quantised_gpu_layout import (
    GROUP,
    ROWS,
    Groups,
    groups_of,
    layout_of,
    part_parameters,
)
from .quantised_shape import QuantisedShape, padded

MOST = 32512.0  # of x in integers: with the 128 that splits bytes it stays within 16 bits
MAGIC = 12582912.0 + 128.0  # 1.5 * 2 ** 23: adding it leaves an integer in the low bits
LEAST = 1e-30  # x below this counts as 0


@dataclass(frozen=True)
class RowsPlan:
    """Choices of `few_tokens`."""

    rows: int = 16  # of a program
    warps: int = 4
    groups: int = 128  # of a row that the threads take at once
    together: int = 4  # tokens whose rounded values are held at once
    ahead: bool = True  # groups of the next turn are asked for before these are multiplied


def few_tokens(shape: QuantisedShape, plan: RowsPlan, name: str = "quantised_rows") -> Body:
    """The kernel: x (tokens, columns), the parts, out (tokens, rows)."""
    return _Rows(shape, plan, name).build()


class _Rows:
    """Builds the Body of `few_tokens`."""

    def __init__(self, shape: QuantisedShape, plan: RowsPlan, name: str) -> None:
        tokens = shape.tokens
        self.shape, self.plan, self.layout = shape, plan, layout_of(shape)
        self.b = b = BodyBuilder(name, [
            ("x", Memory((tokens, shape.columns), shape.dtype)), *part_parameters(shape),
            ("out", Memory((tokens, shape.rows), shape.dtype, use="result"))])  # fmt: skip
        self.input, self.out = b.parameters[0], b.parameters[-1]
        self.weights = Groups(b, shape, b.parameters[1:-1])
        self.groups = groups_of(shape)
        self.rows = padded(shape.rows, ROWS)
        if self.groups % plan.groups or self.rows % plan.rows or plan.groups % 32:
            raise InternalError("kernels.quantised", f"{plan} does not fit {shape}")

    def build(self) -> Body:
        """Ask for weights, wait, multiply turn by turn, sum up."""
        b, plan = self.b, self.plan
        b.add(placed.grid_launch_dependents())
        self.row = b.program(0, self.rows // plan.rows) * plan.rows
        loaded = self.load(0)
        b.add(placed.grid_dependency_wait())
        tokens = high(self.shape.tokens)
        sums = [b.constant(0.0, float32, (plan.rows, plan.groups, 1)) for _ in range(tokens)]
        last = self.groups - plan.groups

        def turn(group: Size, carried: list[Node]) -> Sequence[Node]:
            own = carried[tokens:] if plan.ahead else self.load(group)
            following = self.load(group + plan.groups) if plan.ahead else []
            return [*self.multiply(group, own, carried[:tokens]), *following]

        carried = [*sums, *loaded]
        if plan.ahead:
            carried = b.loop("group", 0, last, plan.groups, turn, carried)
            sums = self.multiply(last, carried[tokens:], carried[:tokens])
        elif last:
            sums = self.multiply(0, loaded, sums)
            sums = b.loop("group", plan.groups, self.groups, plan.groups, turn, sums)
        else:
            sums = self.multiply(0, loaded, sums)
        self.finish(sums)
        return b.finish((self.rows // plan.rows,), warps=plan.warps, level="placed")

    def load(self, group: Size) -> list[Node]:
        """The weights of a turn."""
        return self.weights.load(self.row, group, self.plan.rows, self.plan.groups)

    # ---- a turn -------------------------------------------------------------------------------

    def multiply(self, group: Size, loaded: Sequence[Node], sums: Sequence[Node]) -> list[Node]:
        """Add what some groups give, for all tokens."""
        found = self.weights.named(loaded)
        made = list(sums)
        for first in range(0, len(sums), self.plan.together):
            tokens = range(first, min(first + self.plan.together, len(sums)))
            rounded = [self.rounded(token, group) for token in tokens]
            scales = self.weights.scales(found)
            halves = self.layout.halves
            totals = self.byte_products(found, rounded)
            for i, token in enumerate(tokens):
                for half in range(halves):
                    made[token] = self.scaled(totals[i][half], scales[half], rounded[i], half,
                                              made[token])  # fmt: skip
        return made

    def byte_products(
        self, found: dict[str, Node], rounded: Sequence[_Rounded]
    ) -> list[list[tuple[Node, Node]]]:
        """For tokens and halves of groups the (high, low) sums of integers."""
        b, plan, halves = self.b, self.plan, self.layout.halves
        shape = (plan.rows, plan.groups, 1)
        zero = b.constant(0, int32, shape)
        totals = [[(zero, self.start(x, half, shape)) for half in range(halves)] for x in rounded]
        for number in range(8):
            word = self.weights.word(found, number)
            half = number * halves // 8
            for x, own in zip(rounded, totals):
                own[half] = tuple(b.apply("byte_dot", word, w[number], total)
                                  for w, total in zip((x.high, x.low), own[half]))  # type: ignore[call-overload]  # fmt: skip
        return totals

    def start(self, x: _Rounded, half: int, shape: tuple[int, ...]) -> Node:
        """What the offset of codes takes off."""
        b = self.b
        less = b.apply("multiply", x.sums[half], self.weights.integer(-self.layout.offset % 2**32))
        return b.broadcast(less if self.layout.offset else b.constant(0, int32), shape)

    def scaled(
        self, parts: tuple[Node, Node], scales: tuple[Node, Node | None], x: _Rounded, half: int,
        total: Node,
    ) -> Node:  # fmt: skip
        """A sum and the value of a group (or half of one)."""
        b = self.b
        whole = b.apply("add", b.apply("shift_left", parts[0], self.weights.integer(8)), parts[1])
        value, (scale, minimum) = b.cast(whole, float32), scales
        if minimum is None:
            return b.apply("multiply_add", b.apply("multiply", value, x.scale), scale, total)
        less = b.apply("multiply", minimum, b.cast(x.sums[half], float32))
        return b.apply("multiply_add", b.apply("multiply_add", value, scale, less),
                       b.broadcast(x.scale, value.shape), total)  # fmt: skip

    # ---- x --------------------------------------------------------------------------------------

    def rounded(self, token: int, group: Size) -> _Rounded:
        """A token's values of the groups as integers."""
        b, plan, columns = self.b, self.plan, self.shape.columns
        wide = plan.groups * GROUP
        mask = None
        if self.groups * GROUP != columns:
            at = b.apply("add", b.add(ops.iota(size=wide, dtype=int64)), b.index(group * GROUP))
            mask = b.apply("less", at, b.constant(columns, int64))
        if not isinstance(self.shape.tokens, int):
            there = b.broadcast(b.less(token, self.shape.tokens), (wide,))
            mask = b.logical_and(mask, there)
        values = b.load(self.input, (token, group * GROUP), (wide,), (1,), mask)
        values = b.add(ops.reshape(b.cast(values, float32), shape=(1, plan.groups, GROUP)))
        size = b.add(ops.reduce(b.apply("absolute", values), axis=2, kind="max"))
        size = b.apply("maximum", size, b.constant(LEAST, float32))
        size = b.add(ops.reshape(size, shape=(1, plan.groups, 1)))
        inverse = b.apply("multiply", b.apply("quick_reciprocal", size), b.constant(MOST, float32))
        moved = b.apply("multiply_add", values, b.broadcast(inverse, values.shape),
                        b.constant(MAGIC, float32, values.shape))  # fmt: skip
        bits = b.add(ops.bitcast(moved, dtype=int32))
        scale = b.apply("multiply", size, b.constant(1 / MOST, float32))
        return _Rounded(self, bits, scale)

    def finish(self, sums: Sequence[Node]) -> None:
        """Sum over the threads of a row and write."""
        b, plan = self.b, self.plan
        whole = [b.add(ops.reduce(s, axis=1, kind="sum")) for s in sums]
        mask = None
        if self.rows != self.shape.rows:
            line = b.apply("add", b.add(ops.iota(size=plan.rows, dtype=int64)), b.index(self.row))
            mask = b.apply("less", line, b.constant(self.shape.rows, int64))
        for token, value in enumerate(whole):
            value = b.cast(b.add(ops.reshape(value, shape=(plan.rows,))), self.shape.dtype)
            there = mask
            if not isinstance(self.shape.tokens, int):
                inside = b.broadcast(b.less(token, self.shape.tokens), (plan.rows,))
                there = b.logical_and(mask, inside)
            b.store(self.out, value, (token, self.row), (1,), there)


class _Rounded:
    """x of some groups as integers, 256 * high + low: words of bytes in the order of codes, the
    sums of each half of a group (or all of it), and the scale."""

    def __init__(self, kernel: _Rows, bits: Node, scale: Node) -> None:
        b, layout = kernel.b, kernel.layout
        self.scale, self.high, self.low = scale, [], []
        integer = kernel.weights.integer
        for number in range(8):
            first, second, third, fourth = (kernel.weights.one(bits, e)
                                            for e in layout.order(number))  # fmt: skip
            left, right = (b.apply("byte_permute", *pair, integer(0x5140))
                           for pair in ((first, second), (third, fourth)))  # fmt: skip
            low = b.apply("byte_permute", left, right, integer(0x5410))
            self.low.append(b.apply("bit_xor", low, integer(0x80808080)))
            self.high.append(b.apply("byte_permute", left, right, integer(0x7632)))
        self.sums = []
        ones, halves = integer(0x01010101), layout.halves
        for half in range(halves):
            chosen = range(half * 8 // halves, (half + 1) * 8 // halves)
            totals = []
            for words in (self.high, self.low):
                total = integer(0)
                for number in chosen:
                    total = b.apply("byte_dot", ones, words[number], total)
                totals.append(total)
            high = b.apply("shift_left", totals[0], integer(8))
            self.sums.append(b.apply("add", high, totals[1]))
