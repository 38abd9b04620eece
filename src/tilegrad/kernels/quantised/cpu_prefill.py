"""Products of many tokens with quantised weights on CPUs: a panel of rows is unpacked, then used.

A program unpacks some rows into its own cache-sized scratch and multiplies all tokens by them, so
a weight is unpacked once for all tokens. Where the Target has a matrix unit for bfloat16, weights
and tokens are split into a high and a low part of 8 bits each, w = high + low, and three products
are added in float32: high * high + high * low + low * high; what is left out is 2**-16 of a
product. Tokens are split by a Body of its own, tile by tile as the unit reads them; tokens that
are bfloat16 themselves have no low part, and weights are rounded as they are. Without such a unit
a panel is kept in float32 and multiplied by vectors. Invariant: rows and tokens past the last
count as 0 and are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import DType, bfloat16, float32, int32, uint32
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, combine, high, minimum, multiply
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .cpu_decode import Weights, multiply_add
from .cpu_parts import ROWS, STEP, parts
from .shape import QuantisedShape, padded

TILE = 16
PAIR = 2 * TILE  # columns of a tile of bfloat16
PANEL_BYTES = 768 << 10  # of unpacked weights


def unit_of(target: Target) -> str:
    """The matrix unit that multiplies tiles of bfloat16, or ''."""
    found = [
        u.name
        for u in target.matrix_units(bfloat16, bfloat16)
        if (u.m, u.n, u.k) == (TILE, TILE, PAIR)
    ]
    return found[0] if found and target.lanes(float32) == ROWS else ""


def depth_of(shape: QuantisedShape) -> int:
    """Parts that a token is split into."""
    return 1 if shape.dtype is bfloat16 else 2


def split_memory(shape: QuantisedShape, use: str) -> Memory:
    """Tokens in tiles: (parts, tiles of tokens, steps, 16 tokens, 32 columns)."""
    tiles = multiply(ceil_divide(shape.tokens, PAIR), 2)
    sizes = (depth_of(shape), tiles, shape.columns // STEP, TILE, PAIR)
    return Memory(sizes, bfloat16, use=use)


def panel_blocks(shape: QuantisedShape, target: Target, each: int) -> int:
    """Blocks of 16 rows of a program: pairs that fit (`each` bytes a weight), where the worker
    with the most programs has least to do; tokens are read again for every panel."""
    pairs, workers = padded(shape.rows, 2 * ROWS) // (2 * ROWS), max(1, target.cores)
    fitting = max(1, PANEL_BYTES // (2 * ROWS * shape.columns * each))
    most = max(1, min(fitting, pairs // (3 * workers)))

    def longest(size: int) -> float:
        panels = -(-pairs // size)
        return -(-panels // workers) * (size + 0.125)

    return 2 * min(range(1, most + 1), key=longest)


class Builder:
    """What the Bodies share."""

    def __init__(
        self, shape: QuantisedShape, target: Target, given: Sequence[tuple[str, Memory]], name: str
    ) -> None:
        self.shape, self.target = shape, target
        self.b = BodyBuilder(name, given)
        self.memory = dict(zip((n for n, _ in given), self.b.parameters))
        self.weights = Weights(self.b, shape, self.memory)

    def scratch(self, *shape: int, dtype: DType = float32) -> Node:
        """A place of the program's own."""
        return self.b.allocate(shape, dtype, "l2")

    def below(self, start: Size, size: int, limit: Size) -> Node | None:
        """Which of start, start + 1, ... are less than a limit; None where all are known to be."""
        if high(combine(combine(start, size, 1), limit, -1)) <= 0:
            return None
        counted = self.b.add(ops.iota(size=size, dtype=self.b.index(0).dtype))
        places = self.b.apply("add", counted, self.b.index(start))
        return self.b.apply("less", places, self.b.index(limit))

    def values(self, block: Size, step: Size) -> list[Node]:
        """The weights of 16 rows in 32 columns: a tile of 16 for each column, in float32."""
        b, weights = self.b, self.weights
        layout, found = weights.layout, []
        quads, groups = weights.quads(block, step), weights.groups(step)
        each = len(quads) // len(groups)
        for g, group in enumerate(groups):
            scale = weights.scale(block, step, group)
            lowest = weights.scale(block, step, group, "minimum") if layout.minimum else None
            for quad in quads[g * each : (g + 1) * each]:
                for byte in range(4):
                    code = weights.shifted(quad, 8 * byte)
                    code = b.apply("bit_and", code, b.constant(255, int32))
                    if layout.centre:
                        code = b.apply("subtract", code, b.constant(layout.centre, int32))
                    one = b.cast(code, float32)
                    if lowest is None:
                        found.append(b.apply("multiply", one, scale))
                    else:
                        found.append(multiply_add(b, self.target, one, scale, lowest))
        return found


# ---- a matrix unit ------------------------------------------------------------------------------


class Split(Builder):
    """Builds the Body that splits tokens: a program for each tile of 16."""

    def __init__(self, shape: QuantisedShape, target: Target, name: str) -> None:
        given = [
            ("x", Memory((shape.tokens, shape.columns), shape.dtype)),
            ("split", split_memory(shape, "result")),
        ]
        super().__init__(shape, target, given, name)

    def build(self, share: Size) -> Body:
        """The Body."""
        b, shape = self.b, self.shape
        tiles = multiply(ceil_divide(shape.tokens, PAIR), 2)
        tile = b.program(0, tiles)

        def row(r: Size, _: list[Node]) -> Sequence[Node]:
            token = combine(multiply(tile, TILE), r, 1)
            inside = b.less(token, shape.tokens)

            def step(s: Size, _: list[Node]) -> Sequence[Node]:
                x = b.load(self.memory["x"], (token, multiply(s, STEP)), (STEP,), (1,), inside)
                for part, value in enumerate(halves(b, x, depth_of(shape))):
                    b.store(self.memory["split"], value, (part, tile, s, r, 0), (4,))
                return ()

            b.loop("step", 0, shape.columns // STEP, 1, step)
            return ()

        b.loop("row", 0, TILE, 1, row)
        return b.finish((multiply(tiles, share),))


def halves(b: BodyBuilder, x: Node, depth: int) -> list[Node]:
    """x as bfloat16, and what is left of it as another."""
    first = b.cast(x, bfloat16)
    if depth == 1:
        return [first]
    rest = b.apply("subtract", b.cast(x, float32), b.cast(first, float32))
    return [first, b.cast(rest, bfloat16)]


class Matrix(Builder):
    """Builds the Body that multiplies on a matrix unit: a program for each panel of rows."""

    def __init__(self, shape: QuantisedShape, target: Target, name: str) -> None:
        given = [
            ("split", split_memory(shape, "value")),
            *((n, Memory(s, d)) for n, s, d in parts(shape)),
            ("out", Memory((shape.tokens, shape.rows), shape.dtype, use="result")),
        ]
        super().__init__(shape, target, given, name)
        self.unit, self.depth = unit_of(target), depth_of(shape)
        self.count = panel_blocks(shape, target, 2 * self.depth)
        self.steps = shape.columns // STEP

    def build(self, share: Size) -> Body:
        """The Body."""
        b, shape = self.b, self.shape
        blocks = padded(shape.rows, ROWS) // ROWS
        panels = -(-blocks // self.count)
        number = b.program(0, panels)
        self.first = multiply(number, self.count)
        self.panel = self.scratch(self.depth, self.count, self.steps, TILE, TILE, dtype=uint32)
        self.sums, self.zeros = self.scratch(PAIR, PAIR), self.scratch(TILE, TILE)
        b.loop("zero", 0, TILE, 1, self.clear)
        here = minimum(combine(blocks, self.first, -1), self.count)  # blocks that there are

        def unpack(r: Size, _: list[Node]) -> Sequence[Node]:
            self.unpack(r)
            return ()

        b.loop("unpack", 0, here, 1, unpack, bounds=(0, self.count - 1))

        def tokens(t: Size, _: list[Node]) -> Sequence[Node]:
            def pair(r: Size, _: list[Node]) -> Sequence[Node]:
                self.product(t, r)
                return ()

            b.loop("pair", 0, here, 2, pair, bounds=(0, self.count - 2))
            return ()

        tiles = ceil_divide(shape.tokens, PAIR)
        b.loop("tokens", 0, multiply(tiles, 2), 2, tokens, bounds=(0, 2 * high(tiles) - 2))
        return b.finish((multiply(panels, share),))

    def clear(self, i: Size, _: list[Node]) -> Sequence[Node]:
        """A row of the zeros that sums begin with: the unit loads them, one for each sum."""
        self.b.store(self.zeros, self.b.constant(0.0, float32, (TILE,)), (i, 0), (1,))
        return ()

    def unpack(self, r: Size) -> None:
        """A block of rows, in tiles: pairs of columns side by side, as words."""
        b, block = self.b, combine(self.first, r, 1)

        def step(s: Size, _: list[Node]) -> Sequence[Node]:
            columns = self.values(block, s)
            for pair in range(TILE):
                two = [self.rounded(x) for x in columns[2 * pair : 2 * pair + 2]]
                for part in range(self.depth):
                    lower = b.apply("shift_right", two[0][part], b.constant(16, uint32))
                    b.store(
                        self.panel,
                        b.apply("bit_or", two[1][part], lower),
                        (part, r, s, pair, 0),
                        (4,),
                    )
            return ()

        b.loop("step", 0, self.steps, 1, step)

    def rounded(self, x: Node) -> list[Node]:
        """A float32 as its high part and, of what is left, another: bfloat16 in the upper bits."""
        b, found = self.b, []
        for part in range(self.depth):
            bits = b.apply("add", b.add(ops.bitcast(x, dtype=uint32)), b.constant(0x8000, uint32))
            found.append(b.apply("bit_and", bits, b.constant(0xFFFF0000, uint32)))
            if part + 1 < self.depth:
                x = b.apply("subtract", x, b.add(ops.bitcast(found[-1], dtype=float32)))
        return found

    def tile(self, memory: Node, *index: Size) -> Node:
        """A tile in the unit's registers."""
        b, shape = self.b, (TILE, PAIR if memory.dtype is bfloat16 else TILE)
        scalars = [b.index(i) for i in index]
        return b.add(ops.matrix_load(memory, *scalars, shape=shape, unit=self.unit))

    def product(self, t: Size, r: Size) -> None:
        """32 tokens by 32 rows, from tile t of the tokens and block r of the panel on."""
        b, unit = self.b, self.unit

        def step(s: Size, sums: list[Node]) -> Sequence[Node]:
            def tokens(part: int) -> list[Node]:
                return [
                    self.tile(self.memory["split"], part, combine(t, i, 1), s, 0, 0)
                    for i in range(2)
                ]

            def rows(part: int) -> list[Node]:
                return [self.tile(self.panel, part, combine(r, i, 1), s, 0, 0) for i in range(2)]

            def add(left: list[Node], right: list[Node], sums: list[Node]) -> list[Node]:
                return [
                    b.add(ops.matrix_dot(total, left[n // 2], right[n % 2], unit=unit))
                    for n, total in enumerate(sums)
                ]

            upper = tokens(0)
            if self.depth == 1:
                return add(upper, rows(0), sums)
            sums = add(upper, rows(1), sums)  # four sums and four operands at a time: all there are
            above = rows(0)
            sums = add(upper, above, sums)
            return add(tokens(1), above, sums)

        zeros = [self.tile(self.zeros, 0, 0) for _ in range(4)]
        found = b.loop("depth", 0, self.steps, 1, step, zeros)
        token, row = multiply(t, TILE), multiply(combine(self.first, r, 1), ROWS)

        def store(place: Node, down: Size, across: Size) -> Sequence[Node]:
            for n, total in enumerate(found):
                at = (combine(down, TILE * (n // 2), 1), combine(across, TILE * (n % 2), 1))
                b.add(ops.matrix_store(place, total, *(b.index(i) for i in at), unit=unit))
            return ()

        def by_lines() -> Sequence[Node]:
            store(self.sums, 0, 0)
            self.put(token, row)
            return ()

        end = combine(token, PAIR, 1)
        if self.shape.dtype is not float32 or self.shape.rows % PAIR:
            by_lines()
        elif high(combine(end, self.shape.tokens, -1)) <= 0:
            store(self.memory["out"], token, row)
        else:
            whole = b.less_equal(end, self.shape.tokens)
            b.branch(whole, lambda: store(self.memory["out"], token, row), by_lines)

    def put(self, token: Size, row: Size) -> None:
        """Store what there is of 32 tokens by 32 rows."""
        b, shape = self.b, self.shape
        mask = None if shape.rows % PAIR == 0 else self.below(row, PAIR, shape.rows)

        def line(i: Size, _: list[Node]) -> Sequence[Node]:
            value = b.cast(b.load(self.sums, (i, 0), (PAIR,), (1,)), shape.dtype)
            b.store(self.memory["out"], value, (combine(token, i, 1), row), (1,), mask)
            return ()

        stop = minimum(combine(shape.tokens, token, -1), PAIR)
        b.loop("line", 0, stop, 1, line, bounds=(0, PAIR - 1))


# ---- vectors ------------------------------------------------------------------------------------


class Vectors(Builder):
    """Builds the Body that multiplies by vectors: a program for each panel of rows."""

    def __init__(self, shape: QuantisedShape, target: Target, name: str) -> None:
        given = [
            ("x", Memory((shape.tokens, shape.columns), shape.dtype)),
            *((n, Memory(s, d)) for n, s, d in parts(shape)),
            ("out", Memory((shape.tokens, shape.rows), shape.dtype, use="result")),
        ]
        super().__init__(shape, target, given, name)
        lanes, many = target.lanes(float32), target.vector_registers >= 32
        self.across = 2 if lanes == ROWS else 1  # blocks of a panel
        self.tokens = max(1, (24 if many else 10) * lanes // (ROWS * self.across))
        self.tokens = min(self.tokens, max(1, high(shape.tokens)))

    def build(self, share: Size) -> Body:
        """The Body."""
        b, shape = self.b, self.shape
        blocks = padded(shape.rows, ROWS) // ROWS
        panels = -(-blocks // self.across)
        self.first = multiply(b.program(0, panels), self.across)
        self.panel = self.scratch(shape.columns, self.across * ROWS)
        last = blocks - 1

        def step(s: Size, _: list[Node]) -> Sequence[Node]:
            for i in range(self.across):  # past the last block it is repeated
                block = minimum(combine(self.first, i, 1), last)
                for k, value in enumerate(self.values(block, s)):
                    at = (combine(multiply(s, STEP), k, 1), i * ROWS)
                    b.store(self.panel, value, at, (1,))
            return ()

        b.loop("unpack", 0, shape.columns // STEP, 1, step)

        def some(t: Size, _: list[Node]) -> Sequence[Node]:
            self.product(t)
            return ()

        b.loop(
            "tokens", 0, shape.tokens, self.tokens, some, bounds=(0, max(0, high(shape.tokens) - 1))
        )
        return b.finish((multiply(panels, share),))

    def product(self, t: Size) -> None:
        """Some tokens by a panel; past the last token it is repeated."""
        b, shape = self.b, self.shape
        wide = self.across * ROWS
        last = combine(shape.tokens, 1, -1)
        tokens = [minimum(combine(t, i, 1), last) for i in range(self.tokens)]

        def column(k: Size, sums: list[Node]) -> Sequence[Node]:
            line = b.load(self.panel, (k, 0), (wide,), (1,))
            xs = [b.cast(b.load(self.memory["x"], (token, k)), float32) for token in tokens]
            return [multiply_add(b, self.target, x, line, total) for x, total in zip(xs, sums)]

        zero = b.constant(0.0, float32, (wide,))
        sums = b.loop("depth", 0, shape.columns, 1, column, [zero] * self.tokens, unroll=2)
        row = multiply(self.first, ROWS)
        mask = None if shape.rows % wide == 0 else self.below(row, wide, shape.rows)
        for token, total in zip(tokens, sums):
            b.store(self.memory["out"], b.cast(total, shape.dtype), (token, row), (1,), mask)


def prefill(
    shape: QuantisedShape,
    target: Target,
    share: Size = 1,
    name: str = "quantised_prefill",
    vectors: bool = False,
) -> list[Body]:
    """The kernel: Bodies whose parameters are named x, split, the parts and out; by vectors where
    that is asked for."""
    if vectors or not unit_of(target):
        return [Vectors(shape, target, name).build(share)]
    first = Split(shape, target, f"{name}_split").build(share)
    return [first, Matrix(shape, target, name).build(share)]


__all__ = ["prefill", "unit_of"]
