"""Products of many tokens with quantised weights on CPUs: a panel of rows is unpacked, then used.

A program unpacks some rows into its own cache-sized scratch and multiplies all tokens by them, so
a weight is unpacked once for all tokens. Where the Target has a matrix unit for bfloat16, weights
and tokens are split into a high and a low part of 8 bits each, w = high + low, and three products
are added in float32: high * high + high * low + low * high; what is left out is 2**-16 of a
product. Tokens are split by a Body of its own, tile by tile as the unit reads them; tokens that
are bfloat16 themselves, or are to have 8 bits (`dots="int8"`), have no low part, and weights are
rounded as they are: one product. Without such a unit a panel is kept in float32 and multiplied by
vectors. Invariant: rows and tokens past the last count as 0 and are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.config import config
from ...core.dtype import bfloat16, float32, uint32
from ...core.target import Target
from ...ir.symbol import Size, ceil_divide, high, round_up
from ...ir.types import Memory
from ...tile.build import Body
from .cpu_decode import Writer, ends_of, grouped, multiply_add
from .cpu_parts import ROWS, STEP, parts
from .shape import QuantisedShape, parameters
from .words import shifted, there

NAME = "quantised_prefill"
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
    """Parts that a token is split into: bfloat16 has 8 bits."""
    return 1 if shape.dtype is bfloat16 or config().dots == "int8" else 2


def split_memory(shape: QuantisedShape, use: str) -> Memory:
    """Tokens in tiles: (parts, tiles of tokens, steps, 16 tokens, 32 columns)."""
    tiles = ceil_divide(shape.tokens, PAIR) * 2
    sizes = (depth_of(shape), tiles, shape.columns // STEP, TILE, PAIR)
    return Memory(sizes, bfloat16, use=use)


def panel_blocks(shape: QuantisedShape, target: Target, each: int) -> int:
    """Blocks of 16 rows of a program: pairs that fit (`each` bytes a weight), where the worker
    with the most programs has least to do; tokens are read again for every panel."""
    pairs, workers = round_up(shape.rows, 2 * ROWS) // (2 * ROWS), max(1, target.cores)
    fitting = max(1, PANEL_BYTES // (2 * ROWS * shape.columns * each))
    most = max(1, min(fitting, pairs // (3 * workers)))

    def longest(size: int) -> float:
        panels = ceil_divide(pairs, size)
        return ceil_divide(panels, workers) * (size + 0.125)

    return 2 * min(range(1, most + 1), key=longest)


class Panels(Writer):
    """What the Bodies that unpack panels share."""

    def values(self, block: Any, step: Any) -> list[Any]:
        """The weights of 16 rows in 32 columns: a tile of 16 for each column, in float32."""
        found, quads = [], self.weights.quads(block, step)
        each, centre = len(quads) * self.layout.group // STEP, self.layout.centre
        for g, (_, scale, least) in enumerate(self.weights.groups(block, step)):
            for quad in quads[g * each : (g + 1) * each]:
                for byte in range(4):
                    code = shifted(quad, 8 * byte) & 255
                    one = (code - centre if centre else code).to(float32)
                    if least is None:
                        found.append(one * scale)
                    else:
                        found.append(multiply_add(self.target, one, scale, least))
        return found


# ---- a matrix unit ------------------------------------------------------------------------------


class Split(Writer):
    """Writes the Body that splits tokens: a program for each tile of 16."""

    def __init__(self, shape: QuantisedShape, target: Target) -> None:
        x, *_ = parameters(shape, ())
        super().__init__(
            shape, target, [x, ("split", split_memory(shape, "result"))], f"{NAME}_split"
        )
        self.programs = ceil_divide(shape.tokens, PAIR) * 2

    @tile.function
    def work(self, program: Any) -> None:
        """Row by row, step by step."""
        shape = self.shape
        for row in tile.range(TILE):
            token = program * TILE + row
            inside = token < shape.tokens
            for step in tile.range(shape.columns // STEP):
                x = tile.load(self.memory["x"], (token, step * STEP), STEP, mask=inside)
                for part, value in enumerate(halves(x, depth_of(shape))):
                    tile.store(self.memory["split"], (part, program, step, row, 0), value)


def halves(x: Any, depth: int) -> list[Any]:
    """x as bfloat16, and what is left of it as another."""
    first = x.to(bfloat16)
    if depth == 1:
        return [first]
    return [first, (x.to(float32) - first.to(float32)).to(bfloat16)]


class Matrix(Panels):
    """Writes the Body that multiplies on a matrix unit: a program for each panel of rows."""

    def __init__(self, shape: QuantisedShape, target: Target) -> None:
        _, *rest = parameters(shape, parts(shape))
        super().__init__(shape, target, [("split", split_memory(shape, "value")), *rest], NAME)
        self.unit, self.depth = unit_of(target), depth_of(shape)
        self.count = panel_blocks(shape, target, 2 * self.depth)
        self.steps, self.blocks = shape.columns // STEP, round_up(shape.rows, ROWS) // ROWS
        self.programs = ceil_divide(self.blocks, self.count)

    @tile.function
    def work(self, program: Any) -> None:
        """Unpack the blocks that there are, then multiply all tokens by them."""
        self.first = program * self.count
        panel = (self.depth, self.count, self.steps, TILE, TILE)
        self.panel = tile.scratch(panel, uint32)
        self.sums, self.zeros = tile.scratch((PAIR, PAIR)), tile.scratch((TILE, TILE))
        here = tile.minimum(self.blocks - self.first, self.count)
        for zero in tile.range(TILE):  # the unit loads what sums begin with, one for each sum
            tile.store(self.zeros, (zero, 0), tile.zeros((TILE,)))
        for unpack in tile.range(here, bounds=(0, self.count - 1)):
            self.unpack(unpack)
        tiles = ceil_divide(self.shape.tokens, PAIR)
        for tokens in tile.range(0, tiles * 2, 2, bounds=(0, 2 * high(tiles) - 2)):
            for pair in tile.range(0, here, 2, bounds=(0, self.count - 2)):
                self.product(tokens, pair)

    @tile.function
    def unpack(self, number: Any) -> None:
        """A block of rows, in tiles: pairs of columns side by side, as words."""
        block = self.first + number
        for step in tile.range(self.steps):
            columns = self.values(block, step)
            for pair in range(TILE):
                two = [self.rounded(x) for x in columns[2 * pair : 2 * pair + 2]]
                for part in range(self.depth):
                    lower = two[0][part] >> 16
                    tile.store(self.panel, (part, number, step, pair, 0), two[1][part] | lower)

    def rounded(self, x: Any) -> list[Any]:
        """A float32 as its high part and, of what is left, another: bfloat16 in the upper bits."""
        found: list[Any] = []
        for part in range(self.depth):
            found.append(tile.bitcast(x, uint32) + 0x8000 & 0xFFFF0000)
            if part + 1 < self.depth:
                x = x - tile.bitcast(found[-1], float32)
        return found

    def two(self, memory: Any, part: int, first: Any, step: Any) -> list[Any]:
        """Two neighbouring tiles in the unit's registers."""
        shape = (TILE, PAIR if memory.dtype is bfloat16 else TILE)
        at = [(part, first + i, step, 0, 0) for i in range(2)]
        return [tile.matrix_load(memory, index, shape, self.unit) for index in at]

    def add(self, left: Sequence[Any], right: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        """Four sums after the products of two tiles with two."""
        return [
            tile.matrix_dot(total, left[n // 2], right[n % 2], self.unit)
            for n, total in enumerate(sums)
        ]

    @tile.function
    def product(self, first: Any, number: Any) -> None:
        """32 tokens by 32 rows, from a tile of the tokens and a block of the panel on."""
        split, shape = self.memory["split"], self.shape
        sums = [tile.matrix_load(self.zeros, (0, 0), (TILE, TILE), self.unit) for _ in range(4)]
        for depth in tile.range(self.steps):
            upper = self.two(split, 0, first, depth)
            if self.depth == 2:  # four sums and four operands at a time: all there are
                sums = self.add(upper, self.two(self.panel, 1, number, depth), sums)
            above = self.two(self.panel, 0, number, depth)
            sums = self.add(upper, above, sums)
            if self.depth == 2:
                sums = self.add(self.two(split, 1, first, depth), above, sums)
        token, row = first * TILE, (self.first + number) * ROWS
        whole = shape.dtype is float32 and shape.rows % PAIR == 0
        fits = tile.most(token + PAIR - shape.tokens) <= 0
        if whole and (fits or token + PAIR <= shape.tokens):
            self.store(self.memory["out0"], sums, token, row)
        else:
            self.by_lines(sums, token, row)

    def store(self, place: Any, sums: Sequence[Any], down: Any, across: Any) -> None:
        """Four tiles of the unit."""
        for n, total in enumerate(sums):
            at = (down + TILE * (n // 2), across + TILE * (n % 2))
            tile.matrix_store(place, at, total, self.unit)

    @tile.function
    def by_lines(self, sums: Sequence[Any], token: Any, row: Any) -> None:
        """Store what there is of 32 tokens by 32 rows."""
        self.store(self.sums, sums, 0, 0)
        shape = self.shape
        mask = None if shape.rows % PAIR == 0 else there((PAIR,), 0, row, shape.rows)
        stop = tile.minimum(shape.tokens - token, PAIR)
        for line in tile.range(stop, bounds=(0, PAIR - 1)):
            value = tile.load(self.sums, (line, 0), PAIR).to(shape.dtype)
            tile.store(self.memory["out0"], (token + line, row), value, mask=mask)


# ---- vectors ------------------------------------------------------------------------------------


class Vectors(Panels):
    """Writes the Body that multiplies by vectors: a program for each panel of rows."""

    def __init__(self, shape: QuantisedShape, target: Target) -> None:
        super().__init__(shape, target, grouped(shape), NAME)
        lanes, many = target.lanes(float32), target.vector_registers >= 32
        self.across = 2 if lanes == ROWS else 1  # blocks of a panel
        self.tokens = max(1, (24 if many else 10) * lanes // (ROWS * self.across))
        self.tokens = min(self.tokens, max(1, high(shape.tokens)))
        self.blocks = round_up(shape.outputs, ROWS) // ROWS
        self.programs = ceil_divide(self.blocks, self.across)

    @tile.function
    def work(self, program: Any) -> None:
        """All tokens with all rows, or those of each group with its own."""
        self.first = program * self.across
        self.panel = tile.scratch((self.shape.columns, self.across * ROWS))
        if self.shape.groups == 1:
            self.panel_products(0, 0, self.shape.tokens)
        else:
            for number in tile.range(self.shape.groups):
                start, stop = ends_of(self.shape, self.memory, number)
                if start < stop:
                    self.panel_products(number * self.blocks, start, stop)

    @tile.function
    def panel_products(self, base: Any, start: Any, stop: Any) -> None:
        """Unpack the panel, past the last block that one again; then tokens, some at once."""
        shape = self.shape
        for unpack in tile.range(shape.columns // STEP):
            for i in range(self.across):
                block = base + tile.minimum(self.first + i, self.blocks - 1)
                for k, value in enumerate(self.values(block, unpack)):
                    tile.store(self.panel, (unpack * STEP + k, i * ROWS), value)
        bounds = (0, max(0, high(shape.tokens) - 1))
        for tokens in tile.range(start, stop, self.tokens, bounds=bounds):
            self.product(tokens, stop)

    @tile.function
    def product(self, first: Any, stop: Any) -> None:
        """Some tokens by a panel; past the last token it is repeated."""
        shape, wide = self.shape, self.across * ROWS
        tokens = [tile.minimum(first + i, stop - 1) for i in range(self.tokens)]
        sums = [tile.zeros((wide,)) for _ in tokens]
        for depth in tile.range(shape.columns, unroll=2):
            line = tile.load(self.panel, (depth, 0), wide)
            xs = [tile.load(self.memory["x"], (t, depth)).to(float32) for t in tokens]
            sums = [multiply_add(self.target, x, line, total) for x, total in zip(xs, sums)]
        row = self.first * ROWS
        mask = there((wide,), 0, row, shape.outputs)
        for token, total in zip(tokens, sums):
            tile.store(self.memory["out0"], (token, row), total.to(shape.dtype), mask=mask)


def prefill(
    shape: QuantisedShape,
    target: Target,
    share: Size = 1,
    vectors: bool = False,
) -> list[Body]:
    """The kernel: Bodies whose parameters are named x, split, the parts and out0; by vectors where
    that is asked for."""
    alone = vectors or not unit_of(target)
    kernels = (Vectors,) if alone else (Split, Matrix)
    return [kernel(shape, target).build(share) for kernel in kernels]
